//! Embedding tables.

use super::{given, same_dtype, scratch_on_cuda};
use crate::cpu::embedding::{self as kernels, TablePart};
use crate::error::Result;
use crate::{Cost, DType, On, Tensor, by_float, cuda, ensure_shape};

/// Row `tokens[i]` (i32) of `table` [v, d], plus row `positions[i]` of the position table where
/// given: [m, d].
pub fn embedding(tokens: &Tensor, table: &Tensor, positions: Option<(&Tensor, &Tensor)>) -> Result<Tensor> {
    look_up(tokens, table, TablePart::all(table.rows()), positions)
}

/// As [`embedding`], of a table of which only `part` is here: rows that are elsewhere are zeros, so
/// that the sum over all parts is the whole table's result.
pub fn embedding_part(tokens: &Tensor, table: &Tensor, part: TablePart) -> Result<Tensor> {
    look_up(tokens, table, part, None)
}

/// Fails unless `rows` rows are a part of the whole table.
pub(super) fn check_part(op: &'static str, part: TablePart, rows: usize) -> Result<()> {
    let TablePart { first, whole } = part;
    ensure_shape!(first + rows <= whole, op, "rows {first}..{} of a table of {whole}", first + rows);
    Ok(())
}

fn look_up(tokens: &Tensor, table: &Tensor, part: TablePart, positions: Option<(&Tensor, &Tensor)>) -> Result<Tensor> {
    const OP: &str = "embedding";
    ensure_shape!(tokens.dtype() == DType::I32 && table.shape().len() == 2, OP, "{tokens:?} of table {table:?}");
    check_part(OP, part, table.rows())?;
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
            On::Cuda(gpu) => return cuda::embedding(gpu, tokens, table, part.first, positions, &y),
        };
        let positions = positions.map(|(rows, weight)| (rows.get::<i32>(), weight.get::<T>()));
        let (tokens, table) = (tokens.get::<i32>(), table.get::<T>());
        Ok(kernels::embedding(cpu, d, tokens, table, Some(part), positions, y.get_mut::<T>())?)
    })?);
    Ok(y)
}

/// Adds each row of `dy` [m, d] to row `rows[i]` of the f32 gradient, in order of i.
pub fn embedding_backward(dy: &Tensor, rows: &Tensor, gradient: &mut Tensor, overwrite: bool) -> Result<()> {
    let part = TablePart::all(gradient.rows());
    embedding_part_backward(dy, rows, part, gradient, overwrite)
}

/// As [`embedding_backward`], of a table of which only `part` is here: rows of `dy` that belong to
/// rows elsewhere are passed over.
pub fn embedding_part_backward(
    dy: &Tensor,
    rows: &Tensor,
    part: TablePart,
    gradient: &mut Tensor,
    overwrite: bool,
) -> Result<()> {
    const OP: &str = "embedding_backward";
    check_part(OP, part, gradient.rows())?;
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
            On::Cuda(gpu) => return cuda::embedding_backward(gpu, dy, rows, part.first, gradient, given(&first)),
        };
        let (rows, dy) = (rows.get::<i32>(), dy.get::<T>());
        Ok(kernels::embedding_backward(cpu, d, rows, dy, gradient.get_mut::<f32>(), Some(part))?)
    })?);
    Ok(())
}
