//! `trainyard verify`: trains the steps between two checkpoints again, and compares every bit.
//!
//! A run is a function of its configuration and data, so the same steps from the same checkpoint
//! give the same bits, on this machine or on another one with the same kernels. If they do not, one
//! of the two computed wrongly: silent corruption, which no loss shows.

use crate::output::{count, note, print};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use trainyard_engine::checkpoint::{Checkpoint, open_step, steps_of};
use trainyard_engine::session::files;

/// The most steps or tensors that are named.
const NAMED_MAX: usize = 5;
/// Files of a run that its replay must not go on with.
const RECORDS: [&str; 4] = ["metrics.jsonl", "evaluations.jsonl", "health.jsonl", "monitor.jsonl"];
/// The exit code for a difference; that of a failure is 1.
const EXIT_DIFFERENT: u8 = 3;

/// Train the steps between two checkpoints of a run again, on this machine or another, and compare
/// losses, gradient norms, parameters and optimizer state bit by bit. A difference means that one
/// of the two computed wrongly, and makes the exit code 3. The run itself is not touched.
#[derive(clap::Args)]
pub struct Args {
    /// The folder of a run.
    run: PathBuf,
    /// The step whose checkpoint the replay starts from. Unset: the last one before `--to`.
    #[arg(long, value_name = "STEP")]
    from: Option<u64>,
    /// The step whose checkpoint is compared. Unset: the newest.
    #[arg(long, value_name = "STEP")]
    to: Option<u64>,
    /// Set a key for the replay, e.g. parallel.ranks=4 for a run whose ranks were processes, or
    /// compute.isa=avx2 for one from a machine with other kernels. Can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    ensure!(
        args.run.join(files::CONFIG).is_file(),
        "{} is no run: it has no {}; name the folder of a run",
        args.run.display(),
        files::CONFIG
    );
    let (from, to) = choose(&args.run, args.from, args.to)?;
    let parent = args.run.canonicalize().context("the run's folder")?;
    let parent = parent.parent().context("the run's folder lies in no other")?;
    let scratch = tempfile::Builder::new().prefix(".verify-").tempdir_in(parent);
    let scratch = scratch.with_context(|| format!("cannot make a folder in {}", parent.display()))?;
    copy_run(&args.run, scratch.path(), from)?;
    replay(scratch.path(), to, &args.sets)?;

    let steps = compare_steps(&args.run, scratch.path(), from, to)?;
    let [recorded, again] = [&args.run, scratch.path()].map(|run| open_step(run, to));
    let tensors = compare_tensors(&recorded?, &again?)?;
    let same = steps.different.is_empty() && tensors.different.is_empty();
    if args.json {
        print(json!({
            "from": from, "to": to, "same": same,
            "steps": {"compared": steps.compared, "different": steps.different},
            "tensors": {"compared": tensors.compared, "different": tensors.different},
        }))?;
    } else {
        print(format_args!("replayed     steps {} to {to} of {}\n", from + 1, args.run.display()))?;
        steps.print("losses", "losses and gradient norms")?;
        tensors.print("tensors", "tensors of parameters and optimizer state")?;
        if !same {
            print(
                "One of the two computed wrongly, or they ran on other kernels, ranks or settings: compare `kernels` in\n\
                 the output of both. Replay it on a third machine to see which one is wrong.\n",
            )?;
        }
    }
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DIFFERENT) })
}

/// The steps of the two checkpoints.
fn choose(run: &Path, from: Option<u64>, to: Option<u64>) -> Result<(u64, u64)> {
    let steps = steps_of(run)?;
    let list = || steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let known = |step: u64, option: &str| match steps.contains(&step) {
        true => Ok(step),
        false => bail!("{option} {step}: the run has checkpoints of steps {}", list()),
    };
    let Some(newest) = steps.last().copied() else {
        bail!("{} has no checkpoint: set checkpoint.interval_steps", run.display())
    };
    let to = to.map_or(Ok(newest), |step| known(step, "--to"))?;
    let before = steps.iter().copied().rfind(|step| *step < to);
    let from = match (from, before) {
        (Some(step), _) => known(step, "--from")?,
        (None, Some(step)) => step,
        (None, None) => bail!(
            "the run has no checkpoint before step {to}, and a replay starts from one: raise checkpoint.keep_last, or lower \
             checkpoint.interval_steps"
        ),
    };
    ensure!(from < to, "--from {from} is not before --to {to}");
    Ok((from, to))
}

/// Copies what a resume reads: the run's files, and one checkpoint. Large files are linked where
/// the file system can.
fn copy_run(run: &Path, to: &Path, step: u64) -> Result<()> {
    let is_record = |name: &str| RECORDS.contains(&name) || name.starts_with("monitor-");
    copy_files(run, to, is_record)?;
    let checkpoint = PathBuf::from("checkpoints").join(format!("step-{step:08}"));
    fs::create_dir_all(to.join(&checkpoint))?;
    copy_files(&run.join(&checkpoint), &to.join(&checkpoint), |_| false)
}

fn copy_files(from: &Path, to: &Path, leave_out: impl Fn(&str) -> bool) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_file() && !leave_out(&name.to_string_lossy()) {
            let (path, target) = (entry.path(), to.join(&name));
            // Only checkpoints are large, and nothing writes into theirs again.
            if name.to_string_lossy().ends_with(".safetensors") && fs::hard_link(&path, &target).is_ok() {
                continue;
            }
            fs::copy(&path, &target).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

/// Trains to step `to`.
fn replay(folder: &Path, to: u64, sets: &[String]) -> Result<()> {
    let mut command = Command::new(std::env::current_exe().context("this program's path")?);
    command.args(["train", "--resume"]).arg(folder).args(["--until", &to.to_string()]);
    sets.iter().for_each(|set| {
        command.args(["--set", set]);
    });
    // A signal from the terminal reaches the replay too, which stops at it. This process then goes
    // on and removes the copy.
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::default()).context("signal handling")?;
    }
    let ended = command.stdout(Stdio::null()).status().context("cannot start the replay")?;
    ensure!(ended.success(), "the replay failed ({ended}); its reason stands above");
    Ok(())
}

/// The result of a comparison.
#[derive(Default)]
struct Compared {
    compared: usize,
    different: Vec<String>,
}

impl Compared {
    fn print(&self, label: &str, what: &str) -> Result<()> {
        if self.different.is_empty() {
            return print(format_args!("{label:<12} {} {what} are the same bits\n", count(self.compared as u64)));
        }
        let named = self.different.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join("; ");
        let more = if self.different.len() > NAMED_MAX { "; ..." } else { "" };
        let (different, all) = (count(self.different.len() as u64), count(self.compared as u64));
        print(format_args!("{label:<12} {different} of {all} {what} differ: {named}{more}\n"))
    }
}

/// Losses and gradient norms, by step.
fn recorded(run: &Path) -> Result<BTreeMap<u64, [Option<f64>; 2]>> {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    // A process that was killed may have left half a line.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let entry = |line: Value| Some((line["step"].as_u64()?, [line["loss"].as_f64(), line["grad_norm"].as_f64()]));
    Ok(lines.filter_map(entry).collect())
}

fn compare_steps(run: &Path, again: &Path, from: u64, to: u64) -> Result<Compared> {
    if !run.join("metrics.jsonl").exists() {
        note("the run has no metrics.jsonl, so steps are not compared one by one");
        return Ok(Compared::default());
    }
    let (before, now) = (recorded(run)?, recorded(again)?);
    let mut compared = Compared::default();
    for (step, [loss, norm]) in before.range(from + 1..=to) {
        let Some([loss_now, norm_now]) = now.get(step) else { continue };
        compared.compared += 1;
        let bits = |value: &Option<f64>| value.map(f64::to_bits);
        let shown = |value: &Option<f64>| value.map_or("not finite".to_owned(), |value| value.to_string());
        if bits(loss) != bits(loss_now) {
            compared.different.push(format!("step {step}: loss {} then, {} now", shown(loss), shown(loss_now)));
        } else if bits(norm) != bits(norm_now) {
            compared.different.push(format!(
                "step {step}: gradient norm {} then, {} now",
                shown(norm),
                shown(norm_now)
            ));
        }
    }
    Ok(compared)
}

fn compare_tensors(recorded: &Checkpoint, again: &Checkpoint) -> Result<Compared> {
    let mut compared = Compared::default();
    for (part, tensors) in &recorded.manifest().parts {
        for name in tensors.keys() {
            compared.compared += 1;
            // A tensor that only one of the two has is a difference too.
            let now = again.read_whole(part, name).ok();
            if now.as_ref() != Some(&recorded.read_whole(part, name)?) {
                compared.different.push(format!("{name} ({part})"));
            }
        }
    }
    Ok(compared)
}
