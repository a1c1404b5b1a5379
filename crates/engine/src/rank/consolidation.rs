//! Elastic weight consolidation ([`crate::consolidation`]), as seen by a rank.

use super::Rank;
use super::step::RunningStep;
use crate::state::lock;
use crate::{EngineError, Result};

impl Rank {
    /// The penalty of the weights before the step's update, over all ranks; None if nothing is
    /// consolidated, or the update was skipped or left out. All ranks call this together.
    pub(super) fn penalty(&self, step: &RunningStep<'_>) -> Result<Option<f64>> {
        let Some(weight) = self.optimizer.consolidates().filter(|_| !step.outcome().skipped && !step.waits_for_round())
        else {
            return Ok(None);
        };
        let mut sums = vec![Vec::new(); self.model.units().len()];
        for ((unit, _), own) in std::mem::take(&mut *lock(&step.penalties)) {
            sums[unit].extend(own);
        }
        let sum = self.sum_over_ranks(sums, &lock(&self.compute_links)).map_err(|error| match error {
            EngineError::Comm(source) => {
                let what = "the penalty of a step".to_owned();
                EngineError::Exchange { rank: step.program().rank, step: step.settings().step, what, source }
            }
            other => other,
        })?;
        Ok(Some(0.5 * weight * sum))
    }
}
