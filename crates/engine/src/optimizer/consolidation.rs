//! Elastic weight consolidation ([`crate::consolidation`]): the Fisher information and the weights
//! that are held, an element of each for each of a chunk's masters, behind the chunk's state. Both
//! are zero in the gaps between parameters.

use super::{Behind, Chunk, Optimizer, Staged};
use crate::Result;
use crate::state::{GradientState, ParameterState};
use std::ops::Range;
use trainyard_model::UnitLayout;
use trainyard_tensor::ops::optim;
use trainyard_tensor::{Tensor, TensorError};

impl Chunk {
    /// Makes room for both tensors at the end of the state.
    pub(super) fn hold(&mut self) {
        self.held = Some(self.state_elements);
        self.state_elements += 2 * self.held_stride();
    }

    /// Elements from the first of the two tensors to the second.
    pub(super) fn held_stride(&self) -> usize {
        self.range.len().next_multiple_of(UnitLayout::ALIGN)
    }
}

impl Optimizer {
    /// The factor of the penalty; None if nothing is consolidated.
    pub fn consolidates(&self) -> Option<f64> {
        self.settings.as_ref().and_then(|settings| settings.consolidation).map(|penalty| penalty.weight)
    }

    /// Adds the gradient of the penalty to that of a chunk, which `gradient` gives by its range
    /// within the chunk, and which the rule multiplies by `gradient_scale`. Returns the sums of
    /// `F (w - a)^2` over the elements that this rank counts, in the order and the pieces of the
    /// gradient's norm; None if nothing is consolidated.
    pub(super) fn consolidate(
        &self,
        (unit, chunk): (usize, &Chunk),
        staged: &Staged,
        parameters: &ParameterState,
        gradients: &GradientState,
        gradient: impl Fn(Range<usize>) -> Result<Tensor>,
        gradient_scale: f32,
    ) -> Result<Option<Vec<f64>>> {
        let Some(weight) = self.consolidates() else { return Ok(None) };
        let held = |which| chunk.behind(staged.state.as_ref(), which);
        let (Some(fisher), Some(weights)) = (held(Behind::Fisher)?, held(Behind::HeldWeights)?) else {
            return Ok(Some(Vec::new()));
        };
        let masters = self.masters_of(unit, chunk, staged, parameters)?;
        let mut all = Vec::new();
        for (part, counts) in gradients.parts_of_norm(unit, &chunk.range) {
            let within = part.start - chunk.range.start..part.end - chunk.range.start;
            let view = |tensor: &Tensor| -> Result<Tensor, TensorError> { tensor.view(within.start, [within.len()]) };
            let mut gradient = gradient(within.clone())?;
            let weight = (weight / f64::from(gradient_scale)) as f32;
            let quantum = UnitLayout::QUANTUM;
            let (masters, fisher, weights) = (view(&masters)?, view(&fisher)?, view(&weights)?);
            let sums = optim::consolidate(weight, quantum, &masters, &fisher, &weights, &mut gradient)?;
            if counts {
                all.extend(sums);
            }
        }
        Ok(Some(all))
    }
}
