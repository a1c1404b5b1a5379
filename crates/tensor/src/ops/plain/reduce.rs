//! Reductions over any dimensions, and what works on rows: softmax, cumulative sums, argmax, top-k.
//!
//! A reduction over leading or middle dimensions of a sum or mean reads the tensor as it lies;
//! every other one is brought to rows by a permutation first. The order of additions depends on the
//! shape alone.

use super::arrange::{inverse, permuted};
use super::{Dims, dimension, groups};
use crate::cpu::plain::row;
use crate::cpu::reduce::{self as kernels, Reduce};
use crate::cpu::{Cpu, cast, elementwise, norm};
use crate::dtype::Element;
use crate::error::Result;
use crate::ops::{same_form, workspace};
use crate::{Computes, Cost, DType, On, Purpose, Shape, Tensor, by_float, cuda, ensure_shape};

/// The sum over `dims`.
pub fn sum(x: &Tensor, dims: &Dims) -> Result<Tensor> {
    const OP: &str = "sum";
    let (shape, kept) = dims.shapes(OP, x.shape())?;
    scaled_sum(OP, x, kept, 1.0)?.reshape(shape)
}

/// The mean over `dims`, which have elements.
pub fn mean(x: &Tensor, dims: &Dims) -> Result<Tensor> {
    const OP: &str = "mean";
    let (shape, kept) = dims.shapes(OP, x.shape())?;
    let count = reduced_count(OP, x, &kept)?;
    scaled_sum(OP, x, kept, 1.0 / count as f32)?.reshape(shape)
}

/// The number of elements that become one.
fn reduced_count(op: &'static str, x: &Tensor, kept: &Shape) -> Result<usize> {
    let pairs = x.shape().iter().zip(kept.iter());
    let count = pairs.filter(|(_, kept)| **kept == 1).map(|(len, _)| *len).product();
    ensure_shape!(count > 0, op, "{} has no elements along the reduced dimensions", x.shape());
    Ok(count)
}

fn scaled_sum(op: &'static str, x: &Tensor, kept: Shape, factor: f32) -> Result<Tensor> {
    let groups = groups(x.shape(), [&kept]).into_iter().map(|(len, [kept])| (len, !kept)).collect();
    summed(op, x, groups, factor, kept)
}

/// Sums `x`, whose dimensions are `groups` of (length, whether summed), times `factor`, as a tensor
/// of `shape`.
pub(super) fn summed(
    op: &'static str,
    x: &Tensor,
    groups: Vec<(usize, bool)>,
    factor: f32,
    shape: Shape,
) -> Result<Tensor> {
    let mut y = x.empty_like(shape, x.dtype())?;
    if x.elements() == 0 {
        y.fill_zero()?;
        return Ok(y);
    }
    // [outer, summed, inner]: the sums of rows, of columns, of matrices' columns.
    let (x, [outer, middle, inner]) = match groups[..] {
        [] => (x.clone(), [1, 1, 1]),
        [(len, true)] => (x.clone(), [1, len, 1]),
        [(len, false)] => (x.clone(), [len, 1, 1]),
        [(outer, false), (middle, true)] => (x.clone(), [outer, middle, 1]),
        [(middle, true), (inner, false)] => (x.clone(), [1, middle, inner]),
        [(outer, false), (middle, true), (inner, false)] => (x.clone(), [outer, middle, inner]),
        _ => rows_of_groups(op, x, &groups)?,
    };
    let narrow = x.dtype() != DType::F32 && inner > 1;
    let mut wide = narrow.then(|| workspace(x.device(), y.elements())).transpose()?;
    let floats = match x.device().computes() {
        _ if inner == 1 => 0,
        Computes::Cpu => norm::backward_workspace(middle, inner),
        Computes::Cuda => outer * cuda::row_blocks(middle) * inner,
    };
    let mut blocks = workspace(x.device(), floats)?;
    let cost = Cost::streaming(1, &[&x, &y]);
    by_float!(op, x.dtype(), T => x.device().launch_on(op, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) if inner == 1 => {
                return cuda::plain::reduce_rows(gpu, &x, [outer, middle], Some(factor), &y);
            }
            On::Cuda(gpu) => {
                let sums = wide.as_ref().unwrap_or(&y);
                cuda::plain::sum_middle(gpu, &x, [outer, middle, inner], factor, sums, &blocks)?;
                return wide.as_ref().map_or(Ok(()), |wide| cuda::cast(gpu, wide, &y));
            }
        };
        let data = x.get::<T>();
        if inner == 1 {
            sum_rows(cpu, [outer, middle], factor, data, y.get_mut::<T>());
            return Ok(());
        }
        let sums = match &mut wide {
            Some(wide) => wide.get_mut::<f32>(),
            None => y.get_mut::<f32>(),
        };
        sums.fill(0.0);
        let blocks = blocks.get_mut::<f32>();
        for (x, sums) in data.chunks_exact(middle * inner).zip(sums.chunks_exact_mut(inner)) {
            kernels::sum_over_rows(cpu, x, sums, blocks);
        }
        if factor != 1.0 {
            elementwise::scale(cpu, factor, sums);
        }
        if let Some(wide) = &wide {
            cast::cast(cpu, wide.get::<f32>(), y.get_mut::<T>());
        }
        Ok(())
    })?);
    Ok(y)
}

fn sum_rows<T: Element>(cpu: &Cpu, [rows, columns]: [usize; 2], factor: f32, x: &[T], y: &mut [T]) {
    if rows == 1 {
        y[0] = T::from_f32((kernels::sum_all(cpu, x) * f64::from(factor)) as f32);
    } else if factor == 1.0 {
        kernels::reduce_rows(cpu, Reduce::Sum, columns, x, y);
    } else {
        kernels::reduce_rows(cpu, Reduce::Mean, columns, x, y);
    }
}

/// `x` with the summed groups last: [rows, columns, 1].
fn rows_of_groups(op: &'static str, x: &Tensor, groups: &[(usize, bool)]) -> Result<(Tensor, [usize; 3])> {
    let lens: Vec<usize> = groups.iter().map(|(len, _)| *len).collect();
    let of = |summed: bool| (0..groups.len()).filter(move |i| groups[*i].1 == summed);
    let order: Vec<usize> = of(false).chain(of(true)).collect();
    let size = |summed| of(summed).map(|i| groups[i].0).product();
    let rows = permuted(op, &x.reshape(&lens)?, &order, Purpose::Workspace)?;
    Ok((rows, [size(false), size(true), 1]))
}

/// A tensor with the reduced dimensions last and what it takes to go back.
struct Rows {
    x: Tensor,
    columns: usize,
    /// The permutation, unless it was the identity.
    order: Vec<usize>,
    shape: Shape,
    reduced: Shape,
}

impl Rows {
    fn new(op: &'static str, x: &Tensor, dims: &Dims) -> Result<Rows> {
        let reduced = dims.reduced(op, x.shape())?;
        let (shape, kept) = dims.shapes(op, x.shape())?;
        let reduced = &reduced;
        let of = |which: bool| (0..reduced.len()).filter(move |i| reduced[*i] == which);
        let order: Vec<usize> = of(false).chain(of(true)).collect();
        let columns = reduced_count(op, x, &kept)?;
        Ok(Rows { x: permuted(op, x, &order, Purpose::Workspace)?, columns, order, shape: *x.shape(), reduced: shape })
    }

    /// Along one dimension, without reducing it.
    fn along(op: &'static str, x: &Tensor, dim: i32) -> Result<Rows> {
        Rows::new(op, x, &Dims::from(dim))
    }

    fn rows(&self) -> usize {
        self.x.elements() / self.columns
    }

    /// A tensor in the order of rows, brought back to the order of the operand.
    fn restored(&self, op: &'static str, rows: Tensor) -> Result<Tensor> {
        permuted(op, &rows, &inverse(&self.order), Purpose::Activations)?.reshape(self.shape)
    }
}

/// The largest over `dims`, which have elements. NaN is passed over.
pub fn amax(x: &Tensor, dims: &Dims) -> Result<Tensor> {
    const OP: &str = "amax";
    let rows = Rows::new(OP, x, dims)?;
    let mut y = x.empty_like(rows.reduced, x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(1, &[x, &y]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::reduce_rows(gpu, &rows.x, [rows.rows(), rows.columns], None, &y),
        };
        kernels::reduce_rows(cpu, Reduce::Max, rows.columns, rows.x.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// `dy` in equal parts to all elements that are the maximum `y` of theirs.
pub fn amax_backward(dy: &Tensor, x: &Tensor, y: &Tensor, dims: &Dims) -> Result<Tensor> {
    const OP: &str = "amax_backward";
    same_form(OP, dy, y)?;
    let rows = Rows::new(OP, x, dims)?;
    ensure_shape!(dy.elements() == rows.rows(), OP, "a gradient {} of {}", dy.shape(), rows.reduced);
    let mut dx = x.empty_like(*rows.x.shape(), x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(2, &[x, dy, y, &dx]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::max_backward(gpu, [dy, &rows.x, y], rows.columns, &dx),
        };
        let (dy, x, y) = (dy.get::<T>(), rows.x.get::<T>(), y.get::<T>());
        row::max_backward(cpu, rows.columns, dy, x, y, dx.get_mut::<T>());
        Ok(())
    })?);
    rows.restored(OP, dx)
}

/// `sum((x - mean)^2) / (n - correction)` over `dims` of n elements, and the means (f32): a
/// correction of 1 gives the estimate without bias, 0 the variance of the elements themselves.
pub fn variance(x: &Tensor, dims: &Dims, correction: usize) -> Result<(Tensor, Tensor)> {
    const OP: &str = "variance";
    let rows = Rows::new(OP, x, dims)?;
    let divisor = divisor(OP, rows.columns, correction)?;
    let mut y = x.empty_like(rows.reduced, x.dtype())?;
    let mut mean = x.empty_like([rows.rows()], DType::F32)?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(4, &[x, &y, &mean]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::variance(gpu, &rows.x, rows.columns, divisor, [&y, &mean]),
        };
        let x = rows.x.get::<T>();
        row::variance(cpu, rows.columns, divisor, x, y.get_mut::<T>(), mean.get_mut::<f32>());
        Ok(())
    })?);
    Ok((y, mean))
}

fn divisor(op: &'static str, count: usize, correction: usize) -> Result<f32> {
    ensure_shape!(count > correction, op, "{count} elements with a correction of {correction}");
    Ok((count - correction) as f32)
}

/// `2 dy (x - mean) / (n - correction)`.
pub fn variance_backward(dy: &Tensor, x: &Tensor, mean: &Tensor, dims: &Dims, correction: usize) -> Result<Tensor> {
    const OP: &str = "variance_backward";
    let rows = Rows::new(OP, x, dims)?;
    let divisor = divisor(OP, rows.columns, correction)?;
    let fits = dy.dtype() == x.dtype() && dy.elements() == rows.rows() && mean.elements() == rows.rows();
    ensure_shape!(fits, OP, "a gradient {dy:?} and means {mean:?} of {x:?}");
    let mut dx = x.empty_like(*rows.x.shape(), x.dtype())?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(2, &[x, dy, mean, &dx]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::variance_backward(gpu, [dy, &rows.x, mean], rows.columns, divisor, &dx),
        };
        let (dy, x, mean) = (dy.get::<T>(), rows.x.get::<T>(), mean.get::<f32>());
        row::variance_backward(cpu, rows.columns, divisor, dy, x, mean, dx.get_mut::<T>());
        Ok(())
    })?);
    rows.restored(OP, dx)
}

/// A result of the form of `x` whose rows are made one by one; nothing to do when there are none.
fn row_by_row(
    op: &'static str,
    flops: usize,
    operands: &[&Tensor],
    run: impl FnOnce(On<'_>, usize, &mut Tensor) -> Result<()>,
) -> Result<Tensor> {
    let x = operands[0];
    for other in operands {
        same_form(op, x, other)?;
    }
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    if x.elements() > 0 {
        let moved = operands.iter().map(|t| t.bytes()).sum::<usize>() + y.bytes();
        let cost = Cost::new(flops * x.elements(), moved);
        x.device().launch_on(op, cost, |on| run(on, x.last_dim(), &mut y))?;
    }
    Ok(y)
}

/// `softmax(x)` over the last dimension.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    row_by_row("softmax", 18, &[x], |on, columns, y| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::softmax(gpu, x, columns, false, y),
        };
        by_float!("softmax", x.dtype(), T => kernels::softmax(cpu, columns, x.get::<T>(), y.get_mut::<T>()));
        Ok(())
    })
}

/// `x - log sum exp x` over the last dimension.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    row_by_row("log_softmax", 11, &[x], |on, columns, y| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::softmax(gpu, x, columns, true, y),
        };
        by_float!("log_softmax", x.dtype(), T => kernels::log_softmax(cpu, columns, x.get::<T>(), y.get_mut::<T>()));
        Ok(())
    })
}

/// `y (dy - sum(dy y))`, given the softmax `y`.
pub fn softmax_backward(dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    const OP: &str = "softmax_backward";
    row_by_row(OP, 4, &[dy, y], |on, columns, dx| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::softmax_backward(gpu, dy, y, columns, false, dx),
        };
        by_float!(OP, y.dtype(), T =>
            kernels::softmax_backward(cpu, columns, dy.get::<T>(), y.get::<T>(), dx.get_mut::<T>()));
        Ok(())
    })
}

/// `dy - e^y sum(dy)`, given the log-softmax `y`.
pub fn log_softmax_backward(dy: &Tensor, y: &Tensor) -> Result<Tensor> {
    const OP: &str = "log_softmax_backward";
    row_by_row(OP, 11, &[dy, y], |on, columns, dx| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::softmax_backward(gpu, dy, y, columns, true, dx),
        };
        by_float!(OP, y.dtype(), T =>
            kernels::log_softmax_backward(cpu, columns, dy.get::<T>(), y.get::<T>(), dx.get_mut::<T>()));
        Ok(())
    })
}

/// The sum of elements up to each, along `dim`, in order, in f32.
pub fn cumulative_sum(x: &Tensor, dim: i32) -> Result<Tensor> {
    cumulative("cumulative_sum", x, dim, true)
}

/// The sum of elements from each on, along `dim`: the gradient of [`cumulative_sum`].
pub fn cumulative_sum_backward(dy: &Tensor, dim: i32) -> Result<Tensor> {
    cumulative("cumulative_sum_backward", dy, dim, false)
}

fn cumulative(op: &'static str, x: &Tensor, dim: i32, forward: bool) -> Result<Tensor> {
    if x.elements() == 0 {
        dimension(op, x.shape(), dim)?;
        return Ok(x.clone());
    }
    let rows = Rows::along(op, x, dim)?;
    let mut y = x.empty_like(*rows.x.shape(), x.dtype())?;
    by_float!(op, x.dtype(), T => x.device().launch_on(op, Cost::streaming(1, &[x, x]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::cumulative_sum(gpu, &rows.x, rows.columns, !forward, &y),
        };
        let run = if forward { kernels::cumulative_sum::<T> } else { row::reverse_cumulative_sum::<T> };
        run(cpu, rows.columns, rows.x.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    rows.restored(op, y)
}

/// The position of the largest along `dim`, the first of equals, as u32: the shape of `x` without
/// `dim`.
pub fn argmax(x: &Tensor, dim: i32) -> Result<Tensor> {
    const OP: &str = "argmax";
    let rows = Rows::along(OP, x, dim)?;
    let mut y = x.empty_like(rows.reduced, DType::U32)?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(1, &[x, &y]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::argmax(gpu, &rows.x, rows.columns, &y),
        };
        kernels::argmax_rows(cpu, rows.columns, rows.x.get::<T>(), y.get_mut::<u32>());
        Ok(())
    })?);
    Ok(y)
}

/// The `k` largest over the last dimension, largest first, and their positions (u32), both [.., k].
pub fn top_k(x: &Tensor, k: usize) -> Result<(Tensor, Tensor)> {
    const OP: &str = "top_k";
    let n = x.last_dim();
    ensure_shape!(!x.shape().is_empty() && (1..=n).contains(&k), OP, "the {k} largest of rows of {}", x.shape());
    let shape = x.shape().with_last(k);
    let (mut values, mut indices) = (x.empty_like(shape, x.dtype())?, x.empty_like(shape, DType::U32)?);
    let cost = Cost::streaming(1, &[x, &values, &indices]);
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::top_k(gpu, x, &values, &indices),
        };
        kernels::top_k(cpu, n, k, x.get::<T>(), values.get_mut::<T>(), indices.get_mut::<u32>());
        Ok(())
    })?);
    Ok((values, indices))
}
