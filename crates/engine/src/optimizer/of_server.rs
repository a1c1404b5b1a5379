//! Updates by a parameter server, which owns masters apart from the copies that forward reads.

use super::{Optimizer, Rates};
use crate::Result;
use crate::state::lock;
use trainyard_tensor::Tensor;
use trainyard_tensor::ops::optim::OptimizerOperands;

impl Optimizer {
    /// Updates the `masters` of a unit and their state with a sum of gradients over workers. Both
    /// tensors have the elements that this rank owns. Copies that forward reads are the workers',
    /// and are left alone.
    pub(crate) fn update_masters(&self, unit: usize, masters: &Tensor, gradient: &Tensor, rates: Rates) -> Result<()> {
        let settings = self.settings.as_ref().expect("only what trains is updated");
        for chunk in &self.units[unit] {
            let state = lock(&chunk.here).as_ref().and_then(|staged| staged.state.clone());
            for piece in &chunk.pieces {
                let (at, elements) = (piece.range.start - chunk.range.start, piece.range.len());
                let operands = OptimizerOperands {
                    master: &mut masters.view(at, [elements])?,
                    gradient: &gradient.view(at, [elements])?,
                    gradient_scale: rates.gradient_scale,
                    copy: None,
                };
                piece.update(settings, rates, operands, state.as_ref())?;
            }
        }
        Ok(())
    }
}
