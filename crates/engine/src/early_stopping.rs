//! Early stopping: ends a run whose validation loss no longer falls.
//!
//! A checkpoint is written before the evaluation of its step, so its state lacks that evaluation's
//! loss. A run that resumes from it evaluates first and gets the same loss. So it ends at the same
//! step as a run that was never interrupted.

use crate::checkpoint;
use crate::session::Session;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The history of the evaluations; part of a checkpoint.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct EarlyStopping {
    /// The step of the last evaluation that was counted.
    pub evaluated: Option<u64>,
    /// The step and loss of the lowest evaluation.
    pub lowest: Option<(u64, f64)>,
    /// The loss of the last improvement. The next one must be lower by the smallest difference that
    /// counts.
    pub reference: Option<f64>,
    /// Evaluations since the last improvement.
    pub without_improvement: u64,
}

impl EarlyStopping {
    /// Counts an evaluation after `step` steps. A loss that is not finite is no improvement.
    pub fn count(&mut self, step: u64, loss: f64, min_delta: f64) {
        self.evaluated = Some(step);
        if loss.is_finite() && self.lowest.is_none_or(|(_, lowest)| loss < lowest) {
            self.lowest = Some((step, loss));
        }
        if loss.is_finite() && self.reference.is_none_or(|reference| loss < reference - min_delta) {
            (self.reference, self.without_improvement) = (Some(loss), 0);
        } else {
            self.without_improvement += 1;
        }
    }

    /// True if training must end, because `patience` evaluations brought no improvement.
    pub fn is_over(&self, patience: Option<u64>) -> bool {
        patience.is_some_and(|patience| self.without_improvement >= patience)
    }
}

/// The reason why a run ended before its limit.
#[derive(Clone, PartialEq, Debug)]
pub struct StoppedEarly {
    /// Evaluations in a row without improvement.
    pub evaluations: u64,
    /// The lowest loss of an evaluation and the step it followed; None when no loss was finite.
    pub lowest: Option<(u64, f64)>,
    /// The checkpoint of that step, where it was kept.
    pub checkpoint: Option<PathBuf>,
}

impl StoppedEarly {
    /// The reason of a run that has ended; None if its validation loss did not end it.
    pub fn of(session: &Session) -> Option<StoppedEarly> {
        let state = session.state.early_stopping;
        state.is_over(session.resolved.config.evaluation.early_stopping_patience).then(|| StoppedEarly {
            evaluations: state.without_improvement,
            lowest: state.lowest,
            // A checkpoint that was not kept cannot be opened, and is not named.
            checkpoint: state.lowest.and_then(|(step, _)| {
                let checkpoint = checkpoint::open_step(&session.folder, step).ok()?;
                Some(checkpoint.path().to_owned())
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_loss_that_is_lower_by_enough_is_an_improvement() {
        let mut state = EarlyStopping::default();
        let waits: Vec<u64> = [3.0, 2.0, 1.95, f64::NAN, 1.85, 1.85]
            .into_iter()
            .enumerate()
            .map(|(step, loss)| {
                state.count(step as u64, loss, 0.1);
                state.without_improvement
            })
            .collect();
        assert_eq!(waits, [0, 0, 1, 2, 0, 1]);
        assert_eq!((state.lowest, state.evaluated), (Some((4, 1.85)), Some(5)));
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<EarlyStopping>(&text).unwrap(), state);
    }
}
