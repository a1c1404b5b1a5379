//! Matrix products with batch dimensions.

use super::{broadcast_shape, checked_shape, groups, strides};
use crate::cpu::gemm::{self, Batch, MatMut, MatRef, Transpose};
use crate::error::Result;
use crate::ops::same_dtype;
use crate::{Cost, Shape, Tensor, by_float, ensure_shape};

/// `op(a) op(b)` of the last two dimensions, the dimensions before them broadcast together: a [.., m, k] (or [.., k, m]
/// transposed), b [.., k, n] (or [.., n, k]), result [.., m, n].
pub fn matmul(a: &Tensor, transpose_a: Transpose, b: &Tensor, transpose_b: Transpose) -> Result<Tensor> {
    const OP: &str = "matmul";
    same_dtype(OP, a, b)?;
    let (ranks, what) = ((a.shape().len(), b.shape().len()), format!("{} and {}", a.shape(), b.shape()));
    ensure_shape!(
        ranks.0 >= 2 && ranks.1 >= 2,
        OP,
        "{what}: both must be matrices; reshape vectors to one row or column"
    );
    let ([a_rows, a_cols], a_batch) = matrix(a);
    let ([b_rows, b_cols], b_batch) = matrix(b);
    let (m, k) = if transpose_a == Transpose::No { (a_rows, a_cols) } else { (a_cols, a_rows) };
    let (kb, n) = if transpose_b == Transpose::No { (b_rows, b_cols) } else { (b_cols, b_rows) };
    ensure_shape!(k == kb, OP, "{what}: a product of {m} x {k} and {kb} x {n}");
    let batch = broadcast_shape(OP, &[&a_batch, &b_batch])?;
    let mut dims = batch.to_vec();
    dims.extend([m, n]);
    let mut y = a.empty_like(checked_shape(OP, &dims)?, a.dtype())?;
    let cost = Cost::new(2 * y.elements() * k, a.bytes() + b.bytes() + y.bytes());
    if y.elements() == 0 || k == 0 {
        y.fill_zero()?;
        return Ok(y);
    }
    let groups = groups(&batch, [&a_batch, &b_batch]);
    // One matrix on the right of many: their rows are one matrix.
    let one_right = transpose_a == Transpose::No && groups.iter().all(|(_, [in_a, in_b])| *in_a && !in_b);
    by_float!(OP, a.dtype(), T => a.device().launch(OP, cost, |cpu| {
        let (a, b, y) = (a.get::<T>(), b.get::<T>(), y.get_mut::<T>());
        if one_right {
            let rows = a.len() / k;
            let (a, b) = (MatRef::new(a, rows, k), MatRef::new(b, b_rows, b_cols));
            gemm::matmul(cpu, a, transpose_a, b, transpose_b, 1.0, 0.0, MatMut::new(y, rows, n));
            return Ok(());
        }
        let lens: Vec<usize> = groups.iter().map(|(len, _)| *len).collect();
        let (outer, inner) = lens.split_at(lens.len().saturating_sub(1));
        let count = inner.first().copied().unwrap_or(1);
        let steps = [steps(&groups, 0), steps(&groups, 1)];
        for (index, y) in y.chunks_exact_mut(count * m * n).enumerate() {
            let first = |steps: &[usize]| -> usize {
                strides(outer).iter().zip(outer).zip(steps).map(|((stride, len), step)| index / stride % len * step).sum()
            };
            let step = |i: usize| steps[i].last().copied().unwrap_or(0);
            let (size_a, size_b) = (a_rows * a_cols, b_rows * b_cols);
            let a = Batch { step: step(0) * size_a, ..Batch::new(&a[first(&steps[0]) * size_a..], a_rows, a_cols) };
            let b = Batch { step: step(1) * size_b, ..Batch::new(&b[first(&steps[1]) * size_b..], b_rows, b_cols) };
            gemm::matmul_batched(cpu, count, a, transpose_a, b, transpose_b, 1.0, 0.0, y);
        }
        Ok(())
    })?);
    Ok(y)
}

/// The last two dimensions, and those before.
fn matrix(x: &Tensor) -> ([usize; 2], Shape) {
    let (batch, matrix) = x.shape().split_at(x.shape().len() - 2);
    ([matrix[0], matrix[1]], Shape::from(batch))
}

/// Matrices of operand `which` from one position of each group to the next; 0 where it is repeated.
fn steps(groups: &[(usize, [bool; 2])], which: usize) -> Vec<usize> {
    let mut step = 1;
    let mut steps = vec![0; groups.len()];
    for (steps, (len, has)) in steps.iter_mut().zip(groups).rev() {
        if has[which] {
            *steps = step;
            step *= len;
        }
    }
    steps
}
