//! Numbers rounded to the grid of few bits: weights as quantisation-aware training reads them, and
//! inputs of layers.

use crate::cpu::grid as kernels;
use crate::error::{Result, TensorError};
use crate::{Cost, DType, Tensor, by_float, ensure_shape};

/// Writes to `values` the f32 `weights`, whole rows or parts of them, rounded to codes of `bits`
/// bits with a scale for each `group` neighbours. Scales and values have the dtype of `values`. On
/// the CPU only.
///
/// # Errors
/// Other dtypes, other numbers of elements, groups that do not divide them, and a GPU.
pub fn round_to_grid(bits: u8, group: usize, weights: &Tensor, values: &mut Tensor) -> Result<()> {
    const OP: &str = "round_to_grid";
    if weights.dtype() != DType::F32 {
        return Err(TensorError::DType { op: OP, expected: "f32", got: weights.dtype() });
    }
    let elements = weights.elements();
    ensure_shape!(values.elements() == elements, OP, "{values:?} of {weights:?}");
    ensure_shape!(group > 0 && elements.is_multiple_of(group), OP, "{weights:?} in groups of {group}");
    let cost = Cost::new(8 * elements, weights.bytes() + values.bytes()).on(values.dtype(), [elements]);
    let device = weights.device().clone();
    by_float!(OP, values.dtype(), T => device.launch(OP, cost, |cpu| {
        kernels::round_to_grid(cpu, bits, group, weights.get::<f32>(), values.get_mut::<T>());
        Ok(())
    })?);
    Ok(())
}

/// Every row of `x` rounded to codes of `bits` bits with a scale of its own. Scales and values have
/// the dtype of `x`. On the CPU only.
///
/// # Errors
/// Other dtypes than floats, and a GPU.
pub fn rows_to_grid(bits: u8, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "rows_to_grid";
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    let cost = Cost::new(8 * x.elements(), 2 * x.bytes()).on(x.dtype(), [x.rows(), x.last_dim()]);
    by_float!(OP, x.dtype(), T => x.device().launch(OP, cost, |cpu| {
        if x.elements() > 0 {
            kernels::round_to_grid(cpu, bits, x.last_dim(), x.get::<T>(), y.get_mut::<T>());
        }
        Ok(())
    })?);
    Ok(y)
}
