//! Trials as processes: each is a `trainyard train` of its own, so that one that fails, or takes
//! too much memory, ends no other.

use crate::commands::supervise::{EXIT_INTERRUPTED, send};
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trainyard_comm::{Signal, end_with_parent};
use trainyard_engine::session::files;

/// The records of a run's evaluations.
const EVALUATIONS: &str = "evaluations.jsonl";
/// Interval at which the trials are looked at.
pub const LOOK: Duration = Duration::from_millis(20);
/// Bytes of a failed trial's last message that are shown.
const SHOWN_BYTES: usize = 400;

/// The folder of a trial's run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// The run of trial `number` of the study in `study`.
    pub fn of(study: &Path, number: usize) -> Folder {
        let name = study.file_name().unwrap_or_default().to_string_lossy();
        Folder(study.with_file_name(format!("{name}-{number:03}")))
    }

    /// The run in `folder`.
    pub fn at(folder: &Path) -> Folder {
        Folder(folder.to_owned())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The run beside this one whose name ends in `-END`.
    pub fn beside(&self, end: &str) -> Folder {
        Folder(self.0.with_file_name(format!("{}-{end}", self.name())))
    }

    /// The run's name.
    pub fn name(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// True if the run can be resumed.
    pub fn is_begun(&self) -> bool {
        self.0.join(files::CONFIG).is_file()
    }

    /// Makes the run a copy of `parent` as it was at `step`. The configuration is copied last,
    /// because it makes the folder a run.
    pub fn copy_from(&self, parent: &Folder, step: u64) -> Result<()> {
        let what = || format!("cannot copy {} to {}", parent.0.display(), self.0.display());
        // What a copy that was interrupted left.
        if self.0.exists() {
            fs::remove_dir_all(&self.0).with_context(what)?;
        }
        let checkpoint = Path::new("checkpoints").join(format!("step-{step:08}"));
        let from = find_step(&parent.0, step).unwrap_or_else(|| parent.0.join(&checkpoint));
        let to = self.0.join("checkpoints").join(from.file_name().unwrap_or_default());
        fs::create_dir_all(&to).with_context(what)?;
        for entry in fs::read_dir(&from)
            .with_context(|| format!("{}: there is no checkpoint of step {step}", parent.0.display()))?
        {
            let entry = entry.with_context(what)?;
            fs::copy(entry.path(), to.join(entry.file_name())).with_context(what)?;
        }
        for name in [files::TOKENIZER, files::MODEL, files::GENERATION, EVALUATIONS, "metrics.jsonl", files::CONFIG] {
            let from = parent.0.join(name);
            if from.is_file() {
                fs::copy(&from, self.0.join(name)).with_context(what)?;
            }
        }
        Ok(())
    }

    /// The step of the run's newest checkpoint.
    pub fn newest_step(&self) -> Option<u64> {
        let entries = fs::read_dir(self.0.join("checkpoints")).ok()?;
        entries.flatten().filter_map(|entry| step_of(&entry.path())).max()
    }

    /// The step of the run's newest evaluation, and its loss.
    pub fn loss(&self) -> Result<(u64, f64)> {
        let path = self.0.join(EVALUATIONS);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let last: Value = text
            .lines()
            .rev()
            .find_map(|line| serde_json::from_str(line).ok())
            .with_context(|| format!("{} has no evaluation: give validation data", path.display()))?;
        let step = last["step"].as_u64().with_context(|| format!("{}: no step", path.display()))?;
        Ok((step, last["loss"].as_f64().unwrap_or(f64::NAN)))
    }
}

/// The checkpoint of `step`, whatever the number of zeros in its name.
fn find_step(run: &Path, step: u64) -> Option<PathBuf> {
    let entries = fs::read_dir(run.join("checkpoints")).ok()?;
    entries.flatten().map(|entry| entry.path()).find(|path| step_of(path) == Some(step))
}

/// The step of the checkpoint in `path`.
fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// The end of a trial's process.
pub enum Ended {
    /// It trained as far as it was asked to.
    Done {
        /// Seconds of the process.
        seconds: f64,
    },
    /// It failed.
    Failed {
        /// The reason: its last messages.
        why: String,
        /// Seconds of the process.
        seconds: f64,
    },
    /// It was asked to stop, and can be resumed.
    Stopped,
}

/// The start of a trial.
pub struct Start<'a> {
    /// Its number.
    pub trial: usize,
    /// The folder of its run.
    pub folder: &'a Folder,
    /// The configuration of a new run; None: the quick start.
    pub config: Option<&'a Path>,
    /// Keys over the configuration of a new run.
    pub sets: &'a [String],
    /// Keys that a run that goes on changes.
    pub changed: &'a [String],
    /// The step to train to; None: the end.
    pub until: Option<u64>,
    /// The file of its messages.
    pub log: PathBuf,
}

struct Running {
    trial: usize,
    log: PathBuf,
    child: Child,
    began: Instant,
}

/// The trials that train now.
#[derive(Default)]
pub struct Children {
    running: Vec<Running>,
    is_stopping: bool,
}

impl Children {
    /// Number of trials that train.
    pub fn len(&self) -> usize {
        self.running.len()
    }

    /// Starts the process of a trial, or resumes its run where it has one.
    pub fn start(&mut self, start: Start<'_>) -> Result<()> {
        let Start { trial, folder, config, sets, changed, until, log } = start;
        let mut command = Command::new(std::env::current_exe().context("this program's path")?);
        command.arg("train").arg("--quiet");
        match folder.is_begun() {
            true => {
                command.arg("--resume").arg(&folder.0);
                command.args(changed.iter().flat_map(|set| ["--set", set]));
            }
            false => {
                // A folder without a configuration is what a start that was interrupted left.
                if folder.0.exists() {
                    fs::remove_dir_all(&folder.0).with_context(|| format!("cannot remove {}", folder.0.display()))?;
                }
                command.args(config);
                command.args(sets.iter().flat_map(|set| ["--set", set]));
            }
        }
        if let Some(step) = until {
            command.args(["--until", &step.to_string()]);
        }
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("cannot write {}", log.display()))?;
        let again = file.try_clone().with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file).stderr(again);
        end_with_parent(&mut command, Signal::KILL);
        let child = command.spawn().with_context(|| format!("cannot start {}", folder.name()))?;
        self.running.push(Running { trial, log, child, began: Instant::now() });
        Ok(())
    }

    /// The trials whose processes have ended since the last call.
    pub fn ended(&mut self) -> Result<Vec<(usize, Ended)>> {
        let mut ended = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            match self.running[index].child.try_wait().context("waiting for a trial")? {
                Some(status) => {
                    let running = self.running.remove(index);
                    ended.push((running.trial, running.end(status, self.is_stopping)));
                }
                None => index += 1,
            }
        }
        Ok(ended)
    }

    /// Waits for the trials to end. Asks them to stop once `stop` is set.
    pub fn finish(&mut self, stop: &AtomicBool) -> Result<Vec<(usize, Ended)>> {
        let mut ended = Vec::new();
        while self.len() > 0 {
            if stop.load(Ordering::Relaxed) && !self.is_stopping {
                self.stop()?;
            }
            ended.extend(self.ended()?);
            std::thread::sleep(LOOK);
        }
        Ok(ended)
    }

    /// Asks all trials to stop.
    pub fn stop(&mut self) -> Result<()> {
        self.is_stopping = true;
        self.running.iter().try_for_each(|running| send(&running.child, "TERM")).context("stopping trials")
    }

    /// Waits until all trials have ended.
    pub fn wait(&mut self) -> Result<Vec<(usize, Ended)>> {
        let is_stopping = self.is_stopping;
        let wait = |mut running: Running| {
            let status = running.child.wait().context("waiting for a trial")?;
            Ok((running.trial, running.end(status, is_stopping)))
        };
        self.running.drain(..).map(wait).collect()
    }
}

impl Running {
    fn end(&self, status: ExitStatus, is_stopping: bool) -> Ended {
        let seconds = self.began.elapsed().as_secs_f64();
        let interrupted = status.code() == Some(i32::from(EXIT_INTERRUPTED));
        // A signal that ends a process before it trains leaves a run that starts again.
        if interrupted || is_stopping && !status.success() {
            return Ended::Stopped;
        }
        if !status.success() {
            return Ended::Failed { why: format!("{}{status}", self.last_words()), seconds };
        }
        Ended::Done { seconds }
    }

    /// The last error in the trial's log, followed by a comma.
    fn last_words(&self) -> String {
        let text = fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        let line =
            text.lines().rev().find(|line| line.starts_with("error:")).or(text.lines().last()).unwrap_or_default();
        let line: String = line.trim_start_matches("error:").trim().chars().take(SHOWN_BYTES).collect();
        if line.is_empty() { String::new() } else { format!("{line}; ") }
    }
}
