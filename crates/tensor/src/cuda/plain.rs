//! The plain operations.

use super::Cuda;
use super::launch::{Arg, args};
use crate::cpu::elementwise::{Binary, Compare, Unary};
use crate::cpu::plain::mask::{Logic, Side};
use crate::cpu::plain::strided::Axis;
use crate::error::Result;
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::kernels::{self as k, AXES_MAX, Axes};

/// The place of a function among all, which is its number in the kernels.
fn number<F: PartialEq>(f: F, all: &[F]) -> i32 {
    all.iter().position(|other| *other == f).expect("every function is among all") as i32
}

pub(crate) fn unary(gpu: &Arc<Cuda>, f: Unary, x: &Tensor, y: &Tensor) -> Result<()> {
    let n = x.elements();
    gpu.launch(&k::UNARY, x.dtype(), [n, 1, 1], args![x, y, n, number(f, &Unary::ALL)])
}

pub(crate) fn unary_backward(gpu: &Arc<Cuda>, f: Unary, dy: &Tensor, z: &Tensor, dx: &Tensor) -> Result<()> {
    let n = dy.elements();
    gpu.launch(&k::UNARY_BACKWARD, dy.dtype(), [n, 1, 1], args![dy, z, dx, n, number(f, &Unary::ALL)])
}

/// An operand of a binary function: a tensor and the number of its form in the kernels, or a
/// number.
pub(crate) type Operand<'a> = (Option<&'a Tensor>, i32);

/// The form of a number.
pub(crate) const NUMBER: i32 = 4;

pub(crate) fn binary(
    gpu: &Arc<Cuda>,
    f: Binary,
    [rows, columns]: [usize; 2],
    [(a, form_a), (b, form_b)]: [Operand<'_>; 2],
    value: f32,
    y: &Tensor,
) -> Result<()> {
    let f = number(f, &Binary::ALL);
    let args = args![a, b, y, rows, columns, f, form_a, form_b, value];
    gpu.launch(&k::BINARY, y.dtype(), [rows * columns, 1, 1], args)
}

pub(crate) fn binary_backward(
    gpu: &Arc<Cuda>,
    f: Binary,
    [rows, columns]: [usize; 2],
    dy: &Tensor,
    [(a, form_a), (b, form_b)]: [Operand<'_>; 2],
    [da, db]: [Option<&Tensor>; 2],
) -> Result<()> {
    let f = number(f, &Binary::ALL);
    let args = args![dy, a, b, da, db, rows, columns, f, form_a, form_b, 0.0f32];
    gpu.launch(&k::BINARY_BACKWARD, dy.dtype(), [rows * columns, 1, 1], args)
}

pub(crate) fn power_backward(gpu: &Arc<Cuda>, p: f32, dy: &Tensor, x: &Tensor, dx: &Tensor) -> Result<()> {
    let n = dy.elements();
    gpu.launch(&k::POWER_BACKWARD, dy.dtype(), [n, 1, 1], args![dy, x, dx, n, p])
}

pub(crate) fn clamp(gpu: &Arc<Cuda>, x: &Tensor, [low, high]: [f32; 2], y: &Tensor) -> Result<()> {
    let n = x.elements();
    gpu.launch(&k::CLAMP, x.dtype(), [n, 1, 1], args![x, y, n, low, high])
}

pub(crate) fn clamp_backward(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    x: &Tensor,
    [low, high]: [f32; 2],
    dx: &Tensor,
) -> Result<()> {
    let n = dy.elements();
    gpu.launch(&k::CLAMP_BACKWARD, dy.dtype(), [n, 1, 1], args![dy, x, dx, n, low, high])
}

pub(crate) fn to_float(gpu: &Arc<Cuda>, x: &Tensor, y: &Tensor) -> Result<()> {
    let (n, is_signed) = (x.elements(), i32::from(x.dtype() == DType::I32));
    gpu.launch(&k::TO_FLOAT, y.dtype(), [n, 1, 1], args![x, y, n, is_signed])
}

pub(crate) fn compare(gpu: &Arc<Cuda>, how: Compare, a: &Tensor, b: &Tensor, mask: &Tensor) -> Result<()> {
    let how = match how {
        Compare::Greater => 0i32,
        Compare::GreaterEqual => 1,
        Compare::Equal => 2,
    };
    let n = a.elements();
    gpu.launch(&k::COMPARE, a.dtype(), [n, 1, 1], args![a, b, mask, n, how])
}

pub(crate) fn select(gpu: &Arc<Cuda>, mask: &Tensor, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<()> {
    let n = a.elements();
    gpu.launch(&k::SELECT, a.dtype(), [n, 1, 1], args![mask, a, b, y, n])
}

pub(crate) fn masked_fill(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    mask: &Tensor,
    side: Side,
    value: f32,
    y: &Tensor,
) -> Result<()> {
    let (n, set) = (x.elements(), i32::from(side == Side::Set));
    gpu.launch(&k::MASKED_FILL, x.dtype(), [n, 1, 1], args![x, mask, y, n, set, value])
}

/// Two masks combined; one turned around where there is no `f`.
pub(crate) fn logic(gpu: &Arc<Cuda>, f: Option<Logic>, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<()> {
    let f = match f {
        Some(Logic::And) => 0i32,
        Some(Logic::Or) => 1,
        Some(Logic::Xor) => 2,
        None => 3,
    };
    let n = a.elements();
    gpu.launch(&k::LOGIC, DType::F32, [n, 1, 1], args![a, b, y, n, f])
}

pub(crate) fn causal_mask(gpu: &Arc<Cuda>, [queries, keys]: [usize; 2], y: &Tensor) -> Result<()> {
    gpu.launch(&k::CAUSAL_MASK, DType::F32, [queries * keys, 1, 1], args![y, queries, keys])
}

/// A walk from element `source_at` on to element `target_at` on; `adds` for float tensors alone.
pub(crate) fn strided(
    gpu: &Arc<Cuda>,
    walk: &[Axis],
    (x, source_at): (&Tensor, usize),
    (y, target_at): (&Tensor, usize),
    adds: bool,
) -> Result<()> {
    // Axes of one position are none.
    let walk: Vec<&Axis> = walk.iter().filter(|axis| axis.len != 1).collect();
    assert!(walk.len() <= AXES_MAX, "two axes a dimension");
    let mut axes = Axes { count: walk.len() as i64, ..Axes::default() };
    for (at, axis) in walk.iter().enumerate() {
        axes.len[at] = axis.len as i64;
        axes.source[at] = axis.source as i64;
        axes.target[at] = axis.target as i64;
    }
    let (n, size) = (walk.iter().map(|axis| axis.len).product::<usize>(), x.dtype().size());
    // What is only moved is moved by its bits.
    let module = match (adds, size) {
        (true, _) => x.dtype(),
        (false, 2) => DType::BF16,
        (false, _) => DType::F32,
    };
    let from = Arg::Part(x, source_at * size, x.bytes() - source_at * size);
    let to = Arg::Part(y, target_at * size, y.bytes() - target_at * size);
    gpu.launch(&k::STRIDED, module, [n, 1, 1], args![from, to, &axes, n, i32::from(adds)])
}

/// The sum of rows times a factor, or (None) the largest of each.
pub(crate) fn reduce_rows(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    [rows, columns]: [usize; 2],
    sum: Option<f32>,
    y: &Tensor,
) -> Result<()> {
    let how = i32::from(sum.is_none());
    let args = args![x, y, rows, columns, how, sum.unwrap_or(1.0)];
    gpu.launch(&k::REDUCE_ROWS, x.dtype(), [rows, columns, 1], args)
}

pub(crate) fn argmax(gpu: &Arc<Cuda>, x: &Tensor, columns: usize, y: &Tensor) -> Result<()> {
    let rows = y.elements();
    gpu.launch(&k::ARGMAX_ROWS, x.dtype(), [rows, columns, 1], args![x, y, rows, columns])
}

pub(crate) fn softmax(gpu: &Arc<Cuda>, x: &Tensor, columns: usize, logarithm: bool, y: &Tensor) -> Result<()> {
    let rows = x.elements() / columns;
    let args = args![x, y, rows, columns, i32::from(logarithm)];
    gpu.launch(&k::SOFTMAX, x.dtype(), [rows, columns, 1], args)
}

pub(crate) fn softmax_backward(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    y: &Tensor,
    columns: usize,
    logarithm: bool,
    dx: &Tensor,
) -> Result<()> {
    let rows = y.elements() / columns;
    let args = args![dy, y, dx, rows, columns, i32::from(logarithm)];
    gpu.launch(&k::SOFTMAX_BACKWARD, y.dtype(), [rows, columns, 1], args)
}

pub(crate) fn cumulative_sum(gpu: &Arc<Cuda>, x: &Tensor, columns: usize, backward: bool, y: &Tensor) -> Result<()> {
    let rows = x.elements() / columns;
    let args = args![x, y, rows, columns, i32::from(backward)];
    gpu.launch(&k::CUMULATIVE_SUM, x.dtype(), [rows, columns, 1], args)
}

pub(crate) fn max_backward(gpu: &Arc<Cuda>, [dy, x, y]: [&Tensor; 3], columns: usize, dx: &Tensor) -> Result<()> {
    let rows = y.elements();
    gpu.launch(&k::MAX_BACKWARD, x.dtype(), [rows, columns, 1], args![dy, x, y, dx, rows, columns])
}

pub(crate) fn variance(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    columns: usize,
    divisor: f32,
    [y, mean]: [&Tensor; 2],
) -> Result<()> {
    let rows = mean.elements();
    gpu.launch(&k::VARIANCE, x.dtype(), [rows, columns, 1], args![x, y, mean, rows, columns, divisor])
}

pub(crate) fn variance_backward(
    gpu: &Arc<Cuda>,
    [dy, x, mean]: [&Tensor; 3],
    columns: usize,
    divisor: f32,
    dx: &Tensor,
) -> Result<()> {
    let rows = mean.elements();
    let args = args![dy, x, mean, dx, rows, columns, divisor];
    gpu.launch(&k::VARIANCE_BACKWARD, x.dtype(), [rows, columns, 1], args)
}

pub(crate) fn top_k(gpu: &Arc<Cuda>, x: &Tensor, values: &Tensor, indices: &Tensor) -> Result<()> {
    let (rows, columns, count) = (x.rows(), x.last_dim(), values.last_dim());
    let args = args![x, values, indices, rows, columns, count];
    gpu.launch(&k::TOP_K, x.dtype(), [rows, columns, 1], args)
}

/// `factor` times the sums over the middle dimension, f32 [outer, inner]; `partials`: scratch of
/// outer [`super::row_blocks`] inner floats.
pub(crate) fn sum_middle(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    [outer, middle, inner]: [usize; 3],
    factor: f32,
    sums: &Tensor,
    partials: &Tensor,
) -> Result<()> {
    let blocks = super::row_blocks(middle);
    gpu.launch(&k::COLUMN_SUMS, x.dtype(), [outer, middle, inner], args![x, partials, outer, middle, inner])?;
    let args = args![partials, sums, blocks, inner, outer, factor, 0i32];
    gpu.launch(&k::SUM_PARTIALS, DType::F32, [outer * inner, 1, 1], args)
}
