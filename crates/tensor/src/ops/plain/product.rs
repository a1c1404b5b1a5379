//! Matrix products with batch dimensions.

use super::{broadcast_shape, checked_shape, groups, strides};
use crate::cpu::gemm::{self, Batch, MatMut, MatRef, Transpose};
use crate::error::Result;
use crate::ops::{given, product_scratch, same_dtype};
use crate::{Cost, On, Shape, Tensor, by_float, cuda, ensure_shape};

/// `op(a) op(b)` of the last two dimensions, the dimensions before them broadcast together: a
/// [.., m, k] (or [.., k, m] transposed), b [.., k, n] (or [.., n, k]), result [.., m, n].
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
    let mut matrices =
        Matrices { m, n, k, a_transposed: transpose_a == Transpose::Yes, b_transposed: transpose_b == Transpose::Yes };
    // One matrix on the right of many: their rows are one matrix.
    let one_right = transpose_a == Transpose::No && groups.iter().all(|(_, [in_a, in_b])| *in_a && !in_b);
    let runs = if one_right { vec![Run::one()] } else { runs(&groups, [m * k, k * n]) };
    if one_right {
        matrices.m = a.elements() / k;
    }
    let scratch = product_scratch(a.device())?;
    by_float!(OP, a.dtype(), T => a.device().launch_on(OP, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::matmul(gpu, [a, b, &y], &matrices, &runs, given(&scratch)),
        };
        let (a, b, y) = (a.get::<T>(), b.get::<T>(), y.get_mut::<T>());
        if one_right {
            let (a, b) = (MatRef::new(a, matrices.m, k), MatRef::new(b, b_rows, b_cols));
            gemm::matmul(cpu, a, transpose_a, b, transpose_b, 1.0, 0.0, MatMut::new(y, matrices.m, n));
            return Ok(());
        }
        let count = runs[0].count;
        for (run, y) in runs.iter().zip(y.chunks_exact_mut(count * m * n)) {
            let a = Batch { step: run.steps[0], ..Batch::new(&a[run.first[0]..], a_rows, a_cols) };
            let b = Batch { step: run.steps[1], ..Batch::new(&b[run.first[1]..], b_rows, b_cols) };
            gemm::matmul_batched(cpu, count, a, transpose_a, b, transpose_b, 1.0, 0.0, y);
        }
        Ok(())
    })?);
    Ok(y)
}

/// The matrices of a product: op(a) is [m, k], op(b) is [k, n].
pub(crate) struct Matrices {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a_transposed: bool,
    pub b_transposed: bool,
}

/// `count` products in a row: the elements at which the first matrices of a and b begin, and from
/// one to the next; 0 where one is used again.
pub(crate) struct Run {
    pub count: usize,
    pub first: [usize; 2],
    pub steps: [usize; 2],
}

impl Run {
    fn one() -> Run {
        Run { count: 1, first: [0; 2], steps: [0; 2] }
    }
}

/// The products of matrices of these sizes along groups of batch dimensions, the innermost group in
/// one run.
fn runs(groups: &[(usize, [bool; 2])], sizes: [usize; 2]) -> Vec<Run> {
    let lens: Vec<usize> = groups.iter().map(|(len, _)| *len).collect();
    let (outer, inner) = lens.split_at(lens.len().saturating_sub(1));
    let steps = [0, 1].map(|which| steps(groups, which).into_iter().map(|s| s * sizes[which]).collect::<Vec<_>>());
    let places = strides(outer);
    let run = |index: usize| {
        let first = |steps: &Vec<usize>| -> usize {
            places.iter().zip(outer).zip(steps).map(|((stride, len), step)| index / stride % len * step).sum()
        };
        let step = |steps: &Vec<usize>| steps.last().copied().unwrap_or(0);
        Run {
            count: inner.first().copied().unwrap_or(1),
            first: [first(&steps[0]), first(&steps[1])],
            steps: [step(&steps[0]), step(&steps[1])],
        }
    };
    (0..outer.iter().product()).map(run).collect()
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
