//! Embedding tables.

use super::{given, same_dtype, scratch_on_cuda};
use crate::cpu::embedding as kernels;
use crate::error::Result;
use crate::{Cost, DType, On, Tensor, by_float, cuda, ensure_shape};

/// Row `tokens[i]` (i32) of `table` [v, d], plus row `positions[i]` of the position table where
/// given: [m, d].
pub fn embedding(tokens: &Tensor, table: &Tensor, positions: Option<(&Tensor, &Tensor)>) -> Result<Tensor> {
    const OP: &str = "embedding";
    ensure_shape!(tokens.dtype() == DType::I32 && table.shape().len() == 2, OP, "{tokens:?} of table {table:?}");
    let (m, d) = (tokens.elements(), table.last_dim());
    if let Some((rows, weight)) = positions {
        same_dtype(OP, table, weight)?;
        ensure_shape!(rows.elements() == m && weight.last_dim() == d, OP, "{rows:?} of positions {weight:?}");
    }
    let mut y = table.device().empty([m, d], table.dtype(), crate::Purpose::Activations)?;
    let cost = Cost::new(m * d, 2 * y.bytes());
    let work = cost.on(table.dtype(), [m, d]).variant(if positions.is_some() { "positions" } else { "" });
    by_float!(OP, table.dtype(), T => table.device().launch_on(OP, work, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::embedding(gpu, tokens, table, positions, &y),
        };
        let positions = positions.map(|(rows, weight)| (rows.get::<i32>(), weight.get::<T>()));
        Ok(kernels::embedding(cpu, d, tokens.get::<i32>(), table.get::<T>(), positions, y.get_mut::<T>())?)
    })?);
    Ok(y)
}

/// Adds each row of `dy` [m, d] to row `rows[i]` of the f32 gradient, in order of i.
pub fn embedding_backward(dy: &Tensor, rows: &Tensor, gradient: &mut Tensor, overwrite: bool) -> Result<()> {
    const OP: &str = "embedding_backward";
    let d = dy.last_dim();
    ensure_shape!(
        gradient.dtype() == DType::F32 && gradient.last_dim() == d && rows.elements() == dy.rows(),
        OP,
        "{dy:?} into {gradient:?}"
    );
    // What is overwritten is zeroed first, all of it.
    let zeroed = if overwrite { gradient.elements() } else { 0 };
    let cost = Cost::new(dy.elements(), dy.bytes() + 8 * dy.elements() + 4 * zeroed);
    let work = cost.on(dy.dtype(), [dy.rows(), d, zeroed]);
    let first = scratch_on_cuda(dy.device(), gradient.rows())?;
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, work, |on| {
        if overwrite {
            gradient.fill_zero()?;
        }
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::embedding_backward(gpu, dy, rows, gradient, given(&first)),
        };
        Ok(kernels::embedding_backward(cpu, d, rows.get::<i32>(), dy.get::<T>(), gradient.get_mut::<f32>())?)
    })?);
    Ok(())
}
