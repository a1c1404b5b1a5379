//! `cargo xtask overhead`: the time that watching takes from a training.
//!
//! The same short training runs in turn as it is, without its record (`metrics.record`), and with
//! two hundred watchers of a dashboard that serves it from another process. Of each turn the median
//! steps are compared, so that a machine that becomes slower meanwhile does not count. It takes
//! minutes and needs a quiet machine, so it is no part of `test`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::bench::measure::{figure, training_run};
use crate::bench::{program, target_folder};
use crate::dashboard::{serve, watch};

/// The program and the number of turns.
#[derive(clap::Args)]
pub struct Options {
    /// The program. Default: the release build, made first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Turns of the three trainings.
    #[arg(long, default_value_t = 5)]
    turns: usize,
    /// Watchers of the dashboard.
    #[arg(long, default_value_t = 200)]
    watchers: usize,
}

/// Bars: the longest step, over that of the plain training.
const RECORD_MAX: f64 = 1.005;
const WATCHERS_MAX: f64 = 1.02;
/// A model whose step takes about a tenth of a second on two cores.
const CONFIG: &str = "[model]\npreset = 'quickstart'\n[tokenizer]\nkind = 'bytes'\n[data]\ntrain = ['text.txt']\n\
                      validation_fraction = 0\n[training]\nsteps = 60\nsequence_length = 256\nmicro_batch_size = 2\n";

/// One of the three trainings.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Plain,
    WithoutRecord,
    Watched,
}

/// Measures. True if both bars are held.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    ensure!(options.turns > 0, "--turns 0 measures nothing");
    let program = program(root, options.program.as_deref())?;
    let folder = target_folder(root).join("overhead");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder.join("runs"))?;
    fs::write(
        folder.join("text.txt"),
        "a step of the rank gathers what it needs and reduces what it has. ".repeat(4_000),
    )?;
    fs::write(folder.join("c.toml"), CONFIG)?;
    let (mut of_record, mut of_watchers) = (Vec::new(), Vec::new());
    for turn in 0..options.turns {
        // Each kind comes first, second and last in turn.
        let mut kinds = [Kind::Plain, Kind::WithoutRecord, Kind::Watched];
        kinds.rotate_left(turn % 3);
        let mut step_s = [0.0; 3];
        for kind in kinds {
            step_s[kind as usize] = step(&program, &folder, turn, kind, options.watchers)?;
        }
        let [plain, without, watched] = step_s;
        println!(
            "turn {turn}: {:.2} ms; without record {:.2}; watched {:.2}",
            1e3 * plain,
            1e3 * without,
            1e3 * watched
        );
        of_record.push(plain / without);
        of_watchers.push(watched / plain);
    }
    let mut held = true;
    for (what, mut ratios, bar) in [("record", of_record, RECORD_MAX), ("watchers", of_watchers, WATCHERS_MAX)] {
        ratios.sort_by(f64::total_cmp);
        let (low, median, high) = (ratios[0], ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
        held &= median <= bar;
        let percent = |ratio: f64| 1e2 * (ratio - 1.0);
        println!(
            "{what:<9} {:+.2} % a step ({:+.2} to {:+.2} %), bar {:+.2} %: {}",
            percent(median),
            percent(low),
            percent(high),
            percent(bar),
            if median <= bar { "held" } else { "missed" }
        );
    }
    Ok(held)
}

/// The median step of one training.
fn step(program: &Path, folder: &Path, turn: usize, kind: Kind, watchers: usize) -> Result<f64> {
    let name = format!("{}-{turn}", ["plain", "bare", "watched"][kind as usize]);
    let _watched = match kind {
        Kind::Watched => {
            let (server, url) = serve(program, &folder.join("runs"))?;
            Some((server, watch(&url, watchers)?))
        }
        _ => None,
    };
    let mut command = Command::new(program);
    command.args(["train", "c.toml", "--quiet", "--set", &format!("run.name={name}")]).current_dir(folder);
    if kind == Kind::WithoutRecord {
        command.args(["--set", "metrics.record=false"]);
    }
    let status = command.stdout(Stdio::null()).status().context("the training does not start")?;
    ensure!(status.success(), "the training `{name}` failed: {status}");
    figure(&training_run(&folder.join("runs").join(name).join("metrics.jsonl"))?, "/step_s")
}
