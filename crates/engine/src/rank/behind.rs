//! Tensors behind the optimizer's state ([`Behind`]), by parameter.

use super::Rank;
use crate::Result;
use crate::optimizer::Behind;
use std::ops::Range;
use trainyard_autograd::ParamId;
use trainyard_tensor::Tensor;

impl Rank {
    /// Sets one of the tensors, of every parameter. `set` is called for each part that the rank
    /// holds, with the parameter, the range of its elements, and the tensor to write their values
    /// to.
    pub(crate) fn set_behind(
        &mut self,
        which: Behind,
        mut set: impl FnMut(ParamId, Range<usize>, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for number in (0..self.model.units().len()).filter(|unit| self.parameters.holds(*unit)) {
            let mut of_unit = |index: usize, range: Range<usize>, values: &mut Tensor| {
                set(ParamId { unit: number as u32, index: index as u32 }, range, values)
            };
            let unit = self.parameters.unit(number);
            self.optimizer.set_behind(number, which, |range, values| unit.set(range, values, &mut of_unit))?;
        }
        Ok(())
    }
}
