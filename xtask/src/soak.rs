//! `cargo xtask soak`: the memory of a long run is that of a short one.
//!
//! Trains a model that is next to nothing for half a million steps, on one rank and beside it on
//! two rank threads, and reads each process's resident memory all the while. The bar: the median
//! over the last tenth of the steps lies within two hundredths of that over the second tenth. The
//! first tenth is left out, because caches fill in it, samples of the steps' times, and what the
//! first checkpoint takes. It takes minutes, so it is no part of `test`, which counts live bytes
//! over fewer steps (`crates/engine/tests/memory.rs`).

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// The runs to make.
#[derive(clap::Args)]
pub struct Options {
    /// Steps of each run.
    #[arg(long, default_value_t = 500_000)]
    steps: u64,
    /// Rank threads of each run.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    ranks: Vec<u64>,
}

/// The distance at which the last tenth may lie from the second.
const BAR: f64 = 0.02;

/// The time between two readings of the memory.
const EVERY: Duration = Duration::from_millis(500);

/// Resident bytes when so many steps were done.
struct Reading {
    step: u64,
    bytes: u64,
}

/// Runs all of them; whether each kept the bar.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    ensure!(options.steps >= 1000, "--steps {}: a tenth of less than 1,000 steps says nothing", options.steps);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo).args(["build", "--locked", "--package", "trainyard"]).current_dir(root).status();
    ensure!(built.context("cannot run cargo build")?.success(), "the program does not build");
    let scratch = root.join("target/soak");
    if scratch.exists() {
        fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    }
    fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    fs::write(scratch.join("text.txt"), "to be or not to be, that is the question. ".repeat(200))?;
    // All at once: what is measured is no time.
    let mut runs = options
        .ranks
        .iter()
        .map(|ranks| Run::start(root, &scratch, *ranks, options.steps))
        .collect::<Result<Vec<_>>>()?;
    while runs.iter().any(|run| run.seconds.is_none()) {
        std::thread::sleep(EVERY);
        runs.iter_mut().try_for_each(Run::look)?;
    }
    println!("ranks      steps  seconds  second tenth  last tenth   change        most  metrics.jsonl");
    let mut kept = true;
    for run in &runs {
        kept &= run.judge(options.steps)?;
    }
    Ok(kept)
}

/// A training, and what was read of it.
struct Run {
    ranks: u64,
    child: Child,
    began: Instant,
    /// Seconds that it took; `None` while it runs.
    seconds: Option<f64>,
    metrics: PathBuf,
    log: PathBuf,
    readings: Vec<Reading>,
}

impl Run {
    fn start(root: &Path, scratch: &Path, ranks: u64, steps: u64) -> Result<Run> {
        let toml = format!(
            "[run]\nname = 'ranks-{ranks}'\ndirectory = 'runs'\n[model]\ndim = 8\nlayers = 1\nheads = 1\n\
             [tokenizer]\nkind = 'bytes'\n[data]\ntrain = 'text.txt'\nvalidation_fraction = 0\n\
             [training]\nsteps = {steps}\nsequence_length = 8\nmicro_batch_size = 1\nglobal_batch_size = {ranks}\n\
             [parallel]\nranks = {ranks}\n[compute]\nthreads = 1\n[checkpoint]\ninterval_steps = 5000\n\
             [metrics]\ntensorboard = false\n"
        );
        let config = format!("ranks-{ranks}.toml");
        fs::write(scratch.join(&config), toml)?;
        let log = scratch.join(format!("ranks-{ranks}.log"));
        let said = File::create(&log)?;
        let child = Command::new(root.join("target/debug/trainyard"))
            .args(["train", &config])
            .current_dir(scratch)
            .stdin(Stdio::null())
            .stdout(said.try_clone()?)
            .stderr(said)
            .spawn()
            .context("cannot start the training")?;
        let metrics = scratch.join(format!("runs/ranks-{ranks}/metrics.jsonl"));
        Ok(Run { ranks, child, began: Instant::now(), seconds: None, metrics, log, readings: Vec::new() })
    }

    /// Reads how far it is and what it holds.
    fn look(&mut self) -> Result<()> {
        if self.seconds.is_some() {
            return Ok(());
        }
        match self.child.try_wait()? {
            Some(status) if status.success() => self.seconds = Some(self.began.elapsed().as_secs_f64()),
            Some(status) => bail!("{} ranks: the run ended with {status}: see {}", self.ranks, self.log.display()),
            None => {
                let step = last_step(&self.metrics);
                let memory = resident(self.child.id());
                self.readings.extend(step.zip(memory).map(|(step, bytes)| Reading { step, bytes }));
            }
        }
        Ok(())
    }

    /// Prints its line; whether it kept the bar.
    fn judge(&self, steps: u64) -> Result<bool> {
        let tenth = |from: u64| {
            median(&self.readings, steps * from / 10, steps * (from + 1) / 10)
                .with_context(|| format!("nothing was read in tenth {} of the run: give more --steps", from + 1))
        };
        let (second, last) = (tenth(1)?, tenth(9)?);
        let change = last as f64 / second as f64 - 1.0;
        let most = self.readings.iter().map(|reading| reading.bytes).max().unwrap_or_default();
        let records = fs::metadata(&self.metrics).map_or(0, |about| about.len());
        let mebibytes = |bytes: u64| format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64);
        let is_kept = change.abs() <= BAR;
        println!(
            "{:>5} {steps:>10} {:>8.0} {:>13} {:>11} {:>+6.2} % {:>11} {:>14}{}",
            self.ranks,
            self.seconds.unwrap_or_default(),
            mebibytes(second),
            mebibytes(last),
            100.0 * change,
            mebibytes(most),
            mebibytes(records),
            if is_kept { "" } else { "  missed" }
        );
        Ok(is_kept)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // After an error; who has ended cannot be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The median of the readings of steps from `from` to `to`.
fn median(readings: &[Reading], from: u64, to: u64) -> Option<u64> {
    let within = readings.iter().filter(|reading| (from..to).contains(&reading.step));
    let mut bytes: Vec<u64> = within.map(|reading| reading.bytes).collect();
    bytes.sort_unstable();
    bytes.get(bytes.len() / 2).copied()
}

/// The step of the last whole record; `None` before there is one.
fn last_step(path: &Path) -> Option<u64> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(4096))).ok()?;
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let record = text[..text.rfind('\n')?].lines().next_back()?;
    serde_json::from_str::<serde_json::Value>(record).ok()?.get("step")?.as_u64()
}

/// Bytes of a process that are resident, from Linux's `/proc`.
fn resident(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenths_have_medians_and_the_last_record_is_found() {
        let readings: Vec<Reading> = (0..100).map(|step| Reading { step, bytes: 1000 - step }).collect();
        assert_eq!(median(&readings, 10, 20), Some(986));
        assert_eq!(median(&readings, 100, 110), None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert_eq!(last_step(&path), None);
        fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"ste").unwrap();
        assert_eq!(last_step(&path), Some(2));
        assert!(!cfg!(target_os = "linux") || resident(std::process::id()).is_some_and(|bytes| bytes > 1 << 16));
    }
}
