//! `cargo xtask churn`: hosts that come, leave and die while a run lasts.
//!
//! `trainyard launch --nnodes MIN:MAX` trains on hosts that are processes of this machine, and a
//! seeded sequence of events lets some come, leave (SIGTERM) and die (SIGKILL), one event in every
//! 20 steps. The bars:
//!
//! - With sums that do not depend on the number of ranks, the weights have the bits of an
//!   undisturbed run. So no sample is lost or trained twice.
//! - With DiLoCo the validation loss is within 1 % of that of an undisturbed run.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::bench::program;

/// The events to make.
#[derive(clap::Args)]
pub struct Options {
    /// Number of events of each run.
    #[arg(long, default_value_t = 100)]
    events: u64,
    /// Seed of the events.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Use this program instead of a release build.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Make this trial alone: `synchronous` or `diloco`.
    #[arg(long, value_name = "TRIAL")]
    only: Option<String>,
    /// A text file to train on.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
}

/// Steps from one event to the next.
const STEPS_PER_EVENT: u64 = 20;
/// The time in which the next event has to become possible.
const PATIENCE: Duration = Duration::from_secs(300);
/// How far the loss of DiLoCo may lie from that of an undisturbed run.
const BAR: f64 = 0.01;
const PORT: &str = "29463";

/// A run that is disturbed.
struct Trial {
    name: &'static str,
    /// The hosts that may train.
    hosts: &'static str,
    /// Hosts beside the keeper's at most.
    guests_max: usize,
    sets: &'static [&'static str],
    /// Ranks of the undisturbed run.
    ranks: &'static str,
}

const TRIALS: [Trial; 2] = [
    Trial {
        name: "synchronous",
        hosts: "1:2",
        guests_max: 2,
        sets: &["training.elastic_bits=true", "training.micro_batch_size=2", "training.global_batch_size=4"],
        ranks: "1",
    },
    Trial {
        name: "diloco",
        // The loss of DiLoCo depends on the number of replicas: 2 and 3 are alike here, 4 is worse.
        hosts: "2:3",
        guests_max: 3,
        sets: &[
            "update.rule='diloco'",
            "update.every=10",
            "parallel.data_parallel_shard_degree=1",
            "training.micro_batch_size=1",
            "training.global_batch_size=12",
        ],
        ranks: "3",
    },
];

/// Makes both trials; whether they kept the bars.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let program = program(root, options.binary.as_deref())?;
    let scratch = root.join("target/churn");
    if scratch.exists() {
        fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    }
    fs::create_dir_all(&scratch)?;
    fs::copy(&options.text, scratch.join("text.txt")).with_context(|| format!("{}", options.text.display()))?;
    let steps = options.events * STEPS_PER_EVENT;
    let config = format!(
        "[model]\npreset = 'quickstart'\ndim = 256\nlayers = 4\nheads = 4\n[tokenizer]\nkind = 'bytes'\n\
         [data]\ntrain = ['text.txt']\n[training]\nsteps = {steps}\nsequence_length = 256\n\
         [checkpoint]\ninterval_steps = 10\n[compute]\nthreads = 1\n"
    );
    fs::write(scratch.join("c.toml"), config)?;
    let mut kept = true;
    println!("rule          events   joins  leaves   kills  worlds  seconds  validation loss, undisturbed, disturbed");
    let is_wanted = |trial: &&Trial| options.only.as_ref().is_none_or(|name| name == trial.name);
    ensure!(TRIALS.iter().any(|trial| is_wanted(&trial)), "--only: there is synchronous and diloco");
    for trial in TRIALS.iter().filter(is_wanted) {
        kept &= make(trial, options, &program, &scratch)?;
    }
    Ok(kept)
}

/// Makes a trial and prints its line.
fn make(trial: &Trial, options: &Options, program: &Path, scratch: &Path) -> Result<bool> {
    let began = Instant::now();
    let mut churn = Churn { trial, program, scratch, keeper: None, guests: Vec::new(), logs: 0 };
    churn.keeper = Some(churn.start(&["--node-rank", "0"])?);
    let fewest = usize::from(trial.hosts.starts_with('2'));
    for _ in 0..fewest {
        churn.join()?;
    }
    let mut random = options.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut counts = [0u64; 3];
    for event in 0..options.events {
        churn.wait_for(event * STEPS_PER_EVENT + 10, fewest)?;
        // xorshift64 (Marsaglia 2003).
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let guests = churn.guests.len();
        let kind = match random % 3 {
            _ if guests <= fewest => 0,
            0 if guests >= trial.guests_max => 1,
            kind => kind as usize,
        };
        counts[kind] += 1;
        match kind {
            0 => churn.join()?,
            kind => churn.remove((random >> 8) as usize % guests, kind == 2)?,
        }
    }
    let worlds = churn.finish()?;
    let undisturbed = format!("{}-undisturbed", trial.name);
    let mut alone = Command::new(program);
    alone.args(["launch", "--nproc-per-node", trial.ranks, "train", "c.toml", "-q"]);
    let name = format!("run.name='{undisturbed}'");
    alone.args(trial.sets.iter().chain(&[name.as_str()]).flat_map(|set| ["--set", set]));
    let ran = alone.current_dir(scratch).output().context("cannot start the undisturbed run")?;
    ensure!(ran.status.success(), "the undisturbed run: {}", String::from_utf8_lossy(&ran.stderr));
    let losses = [undisturbed.as_str(), trial.name].map(|run| validation_loss(&scratch.join("runs").join(run)));
    let [before, after] = losses;
    let (before, after) = (before?, after?);
    let (is_kept, verdict) = if trial.name == "synchronous" {
        let same = weights(program, scratch, &undisturbed)? == weights(program, scratch, trial.name)?;
        (same, if same { "same bits" } else { "other bits: MISSED" })
    } else {
        let is_near = (after / before - 1.0).abs() <= BAR;
        (is_near, if is_near { "within 1 %" } else { "MISSED" })
    };
    let [joins, leaves, kills] = counts;
    println!(
        "{:12} {:7} {joins:7} {leaves:7} {kills:7} {worlds:7} {:8.0}  {before:.4}, {after:.4}: {verdict}",
        trial.name,
        options.events,
        began.elapsed().as_secs_f64()
    );
    Ok(is_kept)
}

/// A run and its hosts.
struct Churn<'a> {
    trial: &'a Trial,
    program: &'a Path,
    scratch: &'a Path,
    keeper: Option<Child>,
    guests: Vec<Child>,
    logs: usize,
}

impl Churn<'_> {
    fn start(&mut self, options: &[&str]) -> Result<Child> {
        let log = fs::File::create(self.scratch.join(format!("{}-{}.log", self.trial.name, self.logs)))?;
        self.logs += 1;
        let mut command = Command::new(self.program);
        command.args(["launch", "--nnodes", self.trial.hosts, "--master-addr", "127.0.0.1", "--master-port", PORT]);
        command.args(options).args(["train", "c.toml", "-q"]);
        let name = format!("run.name='{}'", self.trial.name);
        command.args(self.trial.sets.iter().chain(&[name.as_str()]).flat_map(|set| ["--set", set]));
        command.current_dir(self.scratch).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.spawn().context("cannot start a host")
    }

    fn join(&mut self) -> Result<()> {
        let guest = self.start(&["--node-rank", "1"])?;
        self.guests.push(guest);
        Ok(())
    }

    /// Lets a guest leave, or kills it.
    fn remove(&mut self, which: usize, kills: bool) -> Result<()> {
        let mut guest = self.guests.remove(which);
        let signal = if kills { "-KILL" } else { "-TERM" };
        let sent = Command::new("kill").args([signal, &guest.id().to_string()]).status();
        guest.wait()?;
        ensure!(sent?.success(), "a guest has ended before it was asked to");
        Ok(())
    }

    /// Waits until the run has made so many steps.
    fn wait_for(&mut self, step: u64, fewest: usize) -> Result<()> {
        let began = Instant::now();
        loop {
            let metrics = self.scratch.join(format!("runs/{}/metrics.jsonl", self.trial.name));
            let steps = fs::read_to_string(metrics).map_or(0, |text| text.lines().count() as u64);
            if steps >= step {
                return Ok(());
            }
            for child in self.keeper.iter_mut().chain(&mut self.guests) {
                if let Some(status) = child.try_wait()? {
                    bail!("a host ended with {status} at step {steps}: see {}", self.scratch.display());
                }
            }
            ensure!(
                began.elapsed() < PATIENCE,
                "{} stays at step {steps} with {} of at least {fewest} guests: see {}",
                self.trial.name,
                self.guests.len(),
                self.scratch.display()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end of the run. Returns the number of times that ranks were started.
    fn finish(&mut self) -> Result<usize> {
        let mut keeper = self.keeper.take().context("the keeper runs")?;
        ensure!(keeper.wait()?.success(), "the run failed: see {}", self.scratch.display());
        for mut guest in self.guests.drain(..) {
            ensure!(guest.wait()?.success(), "a guest failed: see {}", self.scratch.display());
        }
        let mut said = String::new();
        fs::File::open(self.scratch.join(format!("{}-0.log", self.trial.name)))?.read_to_string(&mut said)?;
        Ok(said.matches(" ranks on ").count())
    }
}

impl Drop for Churn<'_> {
    fn drop(&mut self) {
        for child in self.keeper.iter_mut().chain(&mut self.guests) {
            // It may have ended.
            let _ = child.kill();
        }
    }
}

/// The last validation loss of a run.
fn validation_loss(run: &Path) -> Result<f64> {
    let path = run.join("evaluations.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let last: Value = serde_json::from_str(text.lines().last().context("no evaluation")?)?;
    last["loss"].as_f64().with_context(|| format!("no loss in {last}"))
}

/// The weights of a run, as exported.
fn weights(program: &Path, scratch: &Path, run: &str) -> Result<Vec<u8>> {
    let out = format!("{run}-exported");
    let ran = Command::new(program)
        .args(["export", &format!("runs/{run}"), "--out", &out])
        .current_dir(scratch)
        .output()
        .context("cannot start the export")?;
    ensure!(ran.status.success(), "the export of {run}: {}", String::from_utf8_lossy(&ran.stderr));
    let file = scratch.join(out).join("model.safetensors");
    fs::read(&file).with_context(|| format!("cannot read {}", file.display()))
}
