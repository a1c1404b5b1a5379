//! Errors of the engine.

use crate::checkpoint::CheckpointError;
use std::io;
use trainyard_autograd::AutogradError;
use trainyard_comm::{CommError, ErrorKind};
use trainyard_data::{DataError, place_of};
use trainyard_model::ModelError;
use trainyard_tensor::TensorError;

/// An error while a run is set up or goes on.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Recording or differentiating failed.
    #[error(transparent)]
    Autograd(#[from] AutogradError),
    /// The model does not fit its configuration, weights or batch.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// The lowering refused the strategy.
    #[error(transparent)]
    Strategy(#[from] trainyard_program::StrategyError),
    /// The lowering made a program that must not run: a bug.
    #[error("the step program is wrong, which is a bug: {0}")]
    Program(#[from] trainyard_program::CheckError),
    /// The processes that were started together cannot be joined.
    #[error(transparent)]
    Environment(#[from] trainyard_comm::EnvironmentError),
    /// An exchange with other ranks failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// An exchange with other ranks failed inside a step.
    #[error("rank {rank} in step {step} at `{what}`: {source}")]
    Exchange {
        /// This rank.
        rank: u32,
        /// The step, from 0.
        step: u64,
        /// The instruction.
        what: String,
        /// The failure, with the rank at fault.
        source: CommError,
    },
    /// A rank's GPU failed.
    #[error("rank {rank} on {device}: {source}")]
    Device {
        /// This rank.
        rank: usize,
        /// Its GPU.
        device: String,
        /// The driver's error.
        source: Box<TensorError>,
    },
    /// The training ended on every rank: the first failure, as far as this rank knows, and the
    /// positions of the ranks.
    #[error("{source}\n{report}")]
    Fault {
        /// The failure that ended it.
        source: Box<EngineError>,
        /// The positions of the ranks.
        report: String,
    },
    /// A thread of this rank panicked; the panic itself was printed when it happened.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// This rank.
        rank: u32,
        /// The panic's message.
        message: String,
    },
    /// A file of the run could not be read or written.
    #[error("{what} `{path}`{}: {source}", place_of(path.as_ref(), source))]
    File {
        /// The attempted action.
        what: &'static str,
        /// The file.
        path: String,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Offloaded state could not be moved.
    #[error(transparent)]
    Tier(#[from] crate::tier::TierError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Records cannot be written, or a figure is impossible.
    #[error(transparent)]
    Metrics(#[from] crate::metrics::MetricsError),
    /// The record of a run.
    #[error(transparent)]
    Record(#[from] trainyard_record::RecordError),
    /// The default corpus is not on this machine.
    #[error(
        "no Rust sources were found in cargo's registry ($CARGO_HOME or ~/.cargo, registry/src): name text to train on with \
         --data PATH, or data.train in a config"
    )]
    NoRustSources,
    /// Two parts of a run do not fit together.
    #[error("{0}")]
    DoesNotFit(String),
    /// Ranks that must hold the same parameters hold different bits.
    #[error(
        "after step {step}: {what}, though they must hold the same. Memory or arithmetic of a host is wrong, and no exchange \
         would show it. {kept} Take the host out; `trainyard verify RUN` trains earlier steps again and compares them"
    )]
    ReplicasDiffer {
        /// The number of finished steps.
        step: u64,
        /// The ranks and the unit.
        what: String,
        /// A sentence about the newest checkpoint from before.
        kept: String,
    },
    /// Too many steps in a row had a loss or gradient that was not finite.
    #[error(
        "stopped at step {step}: {skipped} steps in a row had a loss or gradient that is not finite (last loss {loss}). {kept} \
         Lower optimizer.learning_rate, lengthen schedule.warmup_steps, or raise training.skipped_steps_max"
    )]
    Diverged {
        /// The last skipped step.
        step: u64,
        /// Number of skipped steps in a row.
        skipped: u64,
        /// The last loss.
        loss: f64,
        /// A sentence about the newest checkpoint from before.
        kept: String,
    },
}

/// Result with an engine error.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

impl EngineError {
    /// True if a rank failed while it ran, so that a restart from the last checkpoint may help.
    /// False for errors that would come again: a wrong configuration, wrong data or a wrong model,
    /// and, on any rank, a full disk or a folder that cannot be written to.
    pub fn is_fault(&self) -> bool {
        let gave_up = |failure: &CommError| matches!(failure.kind, ErrorKind::Aborted { lasting: true, .. });
        match self {
            error if error.failure().is_some_and(gave_up) => false,
            EngineError::Fault { source, .. } => !source.comes_again(),
            EngineError::Panicked { .. } => true,
            _ => self.is_told(),
        }
    }

    /// True if a restart would meet the same error: a full disk, a folder that is missing or may
    /// not be written to, a run that another process has locked, or wrong data.
    pub(crate) fn comes_again(&self) -> bool {
        if self.is_told() {
            return false;
        }
        match self {
            EngineError::Checkpoint(error) => error.comes_again(),
            EngineError::Data(error)
                if !matches!(error, DataError::Io { .. } | DataError::Worker { .. } | DataError::Stopped) =>
            {
                true
            }
            _ => is_lasting(self),
        }
    }

    /// The failure of the world that caused this error, if there is one.
    pub fn failure(&self) -> Option<&CommError> {
        match self {
            EngineError::Comm(failure)
            | EngineError::Exchange { source: failure, .. }
            | EngineError::Checkpoint(CheckpointError::Comm(failure)) => Some(failure),
            EngineError::Fault { source, .. } => source.failure(),
            _ => None,
        }
    }

    /// True if this is a failure of the world that was reported to this rank; another rank may have
    /// caused it.
    pub(crate) fn is_told(&self) -> bool {
        self.failure().is_some()
    }
}

/// True if one of the causes of `error` is a refusal that the operating system would repeat.
pub(crate) fn is_lasting(error: &(dyn std::error::Error + 'static)) -> bool {
    let lasts = |kind: io::ErrorKind| {
        matches!(
            kind,
            io::ErrorKind::StorageFull
                | io::ErrorKind::QuotaExceeded
                | io::ErrorKind::PermissionDenied
                | io::ErrorKind::ReadOnlyFilesystem
                | io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
        )
    };
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|error| lasts(error.kind())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::MetricsError;

    #[test]
    fn what_comes_again_is_no_reason_to_start_again_and_another_failure_while_running_is() {
        let writing = |kind: io::ErrorKind| EngineError::from(MetricsError::io("append to", "m".as_ref())(kind.into()));
        let full = CheckpointError::DiskFull { path: "c".into(), needed: 7 };
        let ended = |source: EngineError| EngineError::Fault { source: Box::new(source), report: String::new() };
        assert!(!ended(writing(io::ErrorKind::StorageFull)).is_fault());
        assert!(!ended(writing(io::ErrorKind::QuotaExceeded)).is_fault());
        assert!(!ended(full.into()).is_fault());
        assert!(!ended(writing(io::ErrorKind::PermissionDenied)).is_fault());
        assert!(!ended(CheckpointError::Locked { path: "c".into() }.into()).is_fault());
        let token = DataError::Vocabulary { origin: "t".into(), what: "token 9 of 5".into(), fix: "f".into() };
        assert!(!ended(token.into()).is_fault());
        assert!(ended(writing(io::ErrorKind::BrokenPipe)).is_fault());
        // Errors before the run are no faults.
        assert!(!writing(io::ErrorKind::BrokenPipe).is_fault());
    }
}
