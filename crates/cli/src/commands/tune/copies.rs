//! Copies of a run that train on from a checkpoint with other settings, and are removed.

use super::trials::{Children, Ended, Folder, Start};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use trainyard_engine::config::{OptimizerName, Resolved};

/// A checkpoint of a run.
pub struct Origin<'a> {
    /// The run's configuration.
    pub resolved: &'a Resolved,
    /// Its folder.
    pub run: &'a Folder,
    /// The checkpoint's step.
    pub step: u64,
    /// Set once the user asks to stop.
    pub stop: &'a AtomicBool,
}

impl<'a> Origin<'a> {
    /// The newest checkpoint of `run`.
    pub fn newest(resolved: &'a Resolved, run: &'a Folder, stop: &'a AtomicBool) -> Result<Origin<'a>> {
        let step = run.newest_step().with_context(|| format!("{} has no checkpoint", run.path().display()))?;
        Ok(Origin { resolved, run, step, stop })
    }

    /// Trains a copy named `name` for `steps` steps of `accumulation` x `micro` sequences on each
    /// data-parallel rank, with the keys in `sets`, and gives what `read` finds in it. The learning
    /// rate is constant unless `sets` say otherwise.
    pub fn train<T>(
        &self,
        name: &str,
        batch: (usize, usize),
        steps: u64,
        sets: &[String],
        read: impl FnOnce(&Folder) -> Result<T>,
    ) -> Result<T> {
        let copy = self.run.beside(name);
        copy.copy_from(self.run, self.step)?;
        let changed = [&constant(self.resolved, batch, self.step + steps + 1)[..], sets].concat();
        let until = Some(self.step + steps);
        let log = log_of(&copy);
        let start = Start { trial: 0, folder: &copy, config: None, sets: &[], changed: &changed, until, log };
        let found = alone(start, self.stop).and_then(|()| read(&copy));
        let removed = fs::remove_dir_all(copy.path());
        let found = found?;
        removed.with_context(|| format!("cannot remove {}", copy.path().display()))?;
        Ok(found)
    }

    /// The settings of `rate` times the run's learning rates.
    pub fn rates(&self, rate: f64) -> Vec<String> {
        let optimizer = &self.resolved.optimizer;
        let mut sets = vec![format!("optimizer.learning_rate={:e}", optimizer.learning_rate * rate)];
        if optimizer.name == OptimizerName::Muon {
            sets.push(format!("optimizer.matrix_learning_rate={:e}", optimizer.matrix_learning_rate * rate));
        }
        sets
    }
}

/// The settings of a training of `steps` steps in all with one batch and one learning rate, which
/// nothing ends earlier.
fn constant(resolved: &Resolved, (micro, accumulation): (usize, usize), steps: u64) -> Vec<String> {
    let mut sets: Vec<String> = [
        format!("training.micro_batch_size={micro}"),
        format!("training.accumulation_steps={accumulation}"),
        "training.global_batch_size=auto".to_owned(),
        "training.batch_warmup=auto".to_owned(),
        "training.batch_warmup_rate=auto".to_owned(),
        format!("training.steps={steps}"),
        "training.tokens=auto".to_owned(),
        "training.epochs=auto".to_owned(),
        "training.seconds=auto".to_owned(),
        "schedule.kind=constant".to_owned(),
        "schedule.warmup_steps=0".to_owned(),
        "schedule.decay_steps=auto".to_owned(),
        "schedule.decay_shape=auto".to_owned(),
        "schedule.min_ratio=auto".to_owned(),
        "health.on_spike=warn".to_owned(),
        "metrics.jsonl=true".to_owned(),
    ]
    .to_vec();
    if resolved.config.evaluation.early_stopping_patience.is_some() {
        sets.push("evaluation.early_stopping_patience=auto".to_owned());
        sets.push("evaluation.early_stopping_min_delta=auto".to_owned());
    }
    sets
}

/// Trains a single run. Its messages are kept if it fails.
pub fn alone(start: Start<'_>, stop: &AtomicBool) -> Result<()> {
    let (run, log) = (start.folder.path().display().to_string(), start.log.clone());
    let mut children = Children::default();
    children.start(start)?;
    match children.finish(stop)?.into_iter().next() {
        Some((_, Ended::Done { .. })) => {
            fs::remove_file(&log).with_context(|| format!("cannot remove {}", log.display()))
        }
        Some((_, Ended::Failed { why, .. })) => bail!("{run} failed: {why}; its messages are in {}", log.display()),
        Some((_, Ended::Stopped)) | None => bail!("asked to stop while {run} trained"),
    }
}

/// The file of a run's messages, beside its folder.
pub fn log_of(run: &Folder) -> PathBuf {
    run.path().with_file_name(format!("{}.log", run.name()))
}
