//! Elastic weight consolidation ([`crate::consolidation`]), as seen by a rank.

use super::Rank;
use super::step::RunningStep;
use crate::optimizer::Held;
use crate::state::lock;
use crate::{EngineError, Result};
use std::ops::Range;
use trainyard_autograd::ParamId;
use trainyard_tensor::Tensor;

impl Rank {
    /// Sets the Fisher information or the weights that are held, of every parameter. `set` is
    /// called for each part that the rank holds, with the parameter, the range of its elements,
    /// and the tensor to write their values to.
    pub(crate) fn set_held(
        &mut self,
        which: Held,
        mut set: impl FnMut(ParamId, Range<usize>, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for number in (0..self.model.units().len()).filter(|unit| self.parameters.holds(*unit)) {
            let mut of_unit = |index: usize, range: Range<usize>, values: &mut Tensor| {
                set(ParamId { unit: number as u32, index: index as u32 }, range, values)
            };
            let unit = self.parameters.unit(number);
            self.optimizer.set_held(number, which, |range, held| unit.set(range, held, &mut of_unit))?;
        }
        Ok(())
    }

    /// The penalty of the weights before the step's update, over all ranks; None if nothing is
    /// consolidated or the update was skipped. All ranks call this together.
    pub(super) fn penalty(&self, step: &RunningStep<'_>) -> Result<Option<f64>> {
        let Some(weight) = self.optimizer.consolidates().filter(|_| !step.outcome().skipped) else { return Ok(None) };
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
