//! Operations that move data without computing: permutation, broadcasting, slices, concatenation,
//! repetition.

use super::{checked_shape, dimension, groups, scratch, strides};
use crate::cpu::Cpu;
use crate::cpu::plain::strided::{self, Axis};
use crate::error::Result;
use crate::ops::{pointwise, same_dtype};
use crate::{Cost, On, Purpose, Shape, Tensor, by_float, cuda, ensure_shape};

/// Copies along `axes`, from element `source_at` on to element `target_at` on, whatever the dtype:
/// two or four bytes.
fn copy(on: On<'_>, axes: &[Axis], x: &Tensor, source_at: usize, y: &mut Tensor, target_at: usize) -> Result<()> {
    fn typed<T: bytemuck::Pod + Send + Sync>(
        cpu: &Cpu,
        axes: &[Axis],
        (x, source_at): (&[u8], usize),
        (y, target_at): (&mut [u8], usize),
    ) {
        let (x, y) = (bytemuck::cast_slice::<u8, T>(x), bytemuck::cast_slice_mut::<u8, T>(y));
        strided::copy(cpu, axes, &x[source_at..], &mut y[target_at..]);
    }
    let cpu = match on {
        On::Cpu(cpu) => cpu,
        On::Cuda(gpu) => return cuda::plain::strided(gpu, axes, (x, source_at), (y, target_at), false),
    };
    let size = x.dtype().size();
    let (x, y) = ((x.as_bytes()?, source_at), (y.as_bytes_mut()?, target_at));
    if size == 2 {
        typed::<u16>(cpu, axes, x, y)
    } else {
        typed::<u32>(cpu, axes, x, y)
    }
    Ok(())
}

/// A tensor of `shape` made by one walk over all of `x`.
fn rearranged(op: &'static str, x: &Tensor, axes: &[Axis], shape: Shape, purpose: Purpose) -> Result<Tensor> {
    let mut y = x.device().empty(shape, x.dtype(), purpose)?;
    let cost = Cost::new(0, x.bytes() + y.bytes());
    x.device().launch_on(op, cost, |on| copy(on, axes, x, 0, &mut y, 0))?;
    Ok(y)
}

/// Dimension `i` of the result is dimension `order[i]` of `x`.
pub fn permute(x: &Tensor, order: &[i32]) -> Result<Tensor> {
    const OP: &str = "permute";
    let mut dims = Vec::with_capacity(order.len());
    for dim in order {
        dims.push(dimension(OP, x.shape(), *dim)?);
    }
    let mut sorted = dims.clone();
    sorted.sort_unstable();
    ensure_shape!(
        sorted.into_iter().eq(0..x.shape().len()),
        OP,
        "{order:?} is no order of the dimensions of {}",
        x.shape()
    );
    permuted(OP, x, &dims, Purpose::Activations)
}

/// As [`permute`], for an order that was checked.
pub(super) fn permuted(op: &'static str, x: &Tensor, order: &[usize], purpose: Purpose) -> Result<Tensor> {
    let dims: Vec<usize> = order.iter().map(|dim| x.shape()[*dim]).collect();
    let shape = Shape::from(&dims);
    // Where only dimensions of size 1 change places, no element does.
    if order.iter().filter(|dim| x.shape()[**dim] != 1).is_sorted() {
        return x.reshape(shape);
    }
    let (source, target) = (strides(x.shape()), strides(&dims));
    let axes: Vec<Axis> = (0..dims.len()).map(|i| Axis::new(dims[i], source[order[i]], target[i])).collect();
    rearranged(op, x, &axes, shape, purpose)
}

/// The order that undoes `order`.
pub(super) fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (i, dim) in order.iter().enumerate() {
        inverse[*dim] = i;
    }
    inverse
}

/// Dimensions `a` and `b` exchanged.
pub fn transpose(x: &Tensor, a: i32, b: i32) -> Result<Tensor> {
    const OP: &str = "transpose";
    let (a, b) = (dimension(OP, x.shape(), a)?, dimension(OP, x.shape(), b)?);
    let mut order: Vec<usize> = (0..x.shape().len()).collect();
    order.swap(a, b);
    permuted(OP, x, &order, Purpose::Activations)
}

/// `x` repeated along dimensions where it has size 1 or none.
pub fn expand(x: &Tensor, shape: &[usize]) -> Result<Tensor> {
    expanded("expand", x, &checked_shape("expand", shape)?, Purpose::Activations)
}

/// As [`expand`]; the same tensor if it has the shape.
pub(super) fn expanded(op: &'static str, x: &Tensor, shape: &Shape, purpose: Purpose) -> Result<Tensor> {
    let fits = x.shape().len() <= shape.len()
        && x.shape().iter().rev().zip(shape.iter().rev()).all(|(from, to)| from == to || *from == 1);
    ensure_shape!(fits, op, "{} does not expand to {shape}", x.shape());
    if x.elements() == shape.elements() {
        return x.reshape(*shape);
    }
    let (lead, source, target) = (shape.len() - x.shape().len(), strides(x.shape()), strides(shape));
    let stride = |i: usize| if i < lead || x.shape()[i - lead] == 1 { 0 } else { source[i - lead] };
    let axes: Vec<Axis> = (0..shape.len()).map(|i| Axis::new(shape[i], stride(i), target[i])).collect();
    rearranged(op, x, &axes, *shape, purpose)
}

/// The reverse of [`expand`]: sums over the dimensions along which a tensor of `shape` was
/// repeated, in a fixed order.
pub fn sum_to(x: Tensor, shape: &Shape) -> Result<Tensor> {
    const OP: &str = "sum_to";
    if x.shape() == shape {
        return Ok(x);
    }
    let fits = shape.len() <= x.shape().len()
        && shape.iter().rev().zip(x.shape().iter().rev()).all(|(to, from)| from == to || *to == 1);
    ensure_shape!(fits, OP, "{} is no expansion of {shape}", x.shape());
    let groups = groups(x.shape(), [shape]);
    super::reduce::summed(OP, &x, groups.into_iter().map(|(len, [kept])| (len, !kept)).collect(), 1.0, *shape)
}

/// Elements before, in and after dimension `dim`, the dimensions on either side folded.
pub fn split_point(shape: &Shape, dim: usize) -> [usize; 3] {
    [shape[..dim].iter().product(), shape[dim], shape[dim + 1..].iter().product()]
}

/// Positions `start .. start + len` of dimension `dim`. Shares the memory of `x` when they are one
/// run of it.
pub fn narrow(x: &Tensor, dim: i32, start: usize, len: usize) -> Result<Tensor> {
    const OP: &str = "narrow";
    let dim = dimension(OP, x.shape(), dim)?;
    let mut dims = x.shape().to_vec();
    ensure_shape!(
        start.checked_add(len).is_some_and(|end| end <= dims[dim]),
        OP,
        "{len} positions from {start} on of dimension {dim} of {}",
        x.shape()
    );
    dims[dim] = len;
    let [outer, n, inner] = split_point(x.shape(), dim);
    if outer * len * inner == 0 {
        return x.view(0, &dims);
    }
    if outer == 1 {
        return x.view(start * inner, &dims);
    }
    let mut y = x.empty_like(&dims, x.dtype())?;
    let axes = [Axis::new(outer, n * inner, len * inner), Axis::new(len * inner, 1, 1)];
    x.device().launch_on(OP, Cost::streaming(0, &[&y, &y]), |on| copy(on, &axes, x, start * inner, &mut y, 0))?;
    Ok(y)
}

/// The gradient of a tensor of `shape` of which `dy` is that of positions `start ..` of dimension
/// `dim`, plus `base`.
pub fn narrow_backward(dy: &Tensor, shape: &Shape, dim: i32, start: usize, base: Option<Tensor>) -> Result<Tensor> {
    const OP: &str = "narrow_backward";
    let dim = dimension(OP, shape, dim)?;
    let [outer, n, inner] = split_point(shape, dim);
    let len = dy.shape().get(dim).copied().unwrap_or(0);
    ensure_shape!(
        dy.elements() == outer * len * inner && start + len <= n,
        OP,
        "a gradient {} of positions {start}.. of dimension {dim} of {shape}",
        dy.shape()
    );
    let axes = [Axis::new(outer, len * inner, n * inner), Axis::new(len * inner, 1, 1)];
    let Some(base) = base else {
        let mut dx = dy.device().zeros(*shape, dy.dtype(), Purpose::Activations)?;
        let cost = Cost::new(0, dy.bytes() + dx.bytes());
        dy.device().launch_on(OP, cost, |on| copy(on, &axes, dy, 0, &mut dx, start * inner))?;
        return Ok(dx);
    };
    same_dtype(OP, dy, &base)?;
    ensure_shape!(base.shape() == shape, OP, "a gradient {} for {shape}", base.shape());
    let mut dx = pointwise::into_unique(base)?;
    by_float!(OP, dy.dtype(), T => dy.device().launch_on(OP, Cost::streaming(1, &[dy, dy, dy]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::strided(gpu, &axes, (dy, 0), (&dx, start * inner), true),
        };
        if dy.elements() > 0 {
            strided::add(cpu, &axes, dy.get::<T>(), &mut dx.get_mut::<T>()[start * inner..]);
        }
        Ok(())
    })?);
    Ok(dx)
}

/// The tensors one after another along dimension `dim`; their other dimensions agree.
pub fn concat(parts: &[&Tensor], dim: i32) -> Result<Tensor> {
    const OP: &str = "concat";
    ensure_shape!(!parts.is_empty(), OP, "no tensors");
    let first = parts[0];
    let dim = dimension(OP, first.shape(), dim)?;
    let mut dims = first.shape().to_vec();
    dims[dim] = 0;
    for part in parts {
        same_dtype(OP, first, part)?;
        let fits = part.shape().len() == dims.len() && (0..dims.len()).all(|i| i == dim || part.shape()[i] == dims[i]);
        ensure_shape!(fits, OP, "{} and {} along dimension {dim}", first.shape(), part.shape());
        dims[dim] += part.shape()[dim];
    }
    let shape = checked_shape(OP, &dims)?;
    let mut y = first.empty_like(shape, first.dtype())?;
    first.device().launch_on(OP, Cost::streaming(0, &[&y, &y]), |on| {
        let [outer, n, inner] = split_point(&shape, dim);
        let mut at = 0;
        for part in parts.iter().filter(|part| part.elements() > 0) {
            let width = part.shape()[dim] * inner;
            copy(on, &[Axis::new(outer, width, n * inner), Axis::new(width, 1, 1)], part, 0, &mut y, at)?;
            at += width;
        }
        Ok(())
    })?;
    Ok(y)
}

/// Dimensions of `x` padded with ones on the left to those of `times`.
fn padded(op: &'static str, shape: &Shape, times: &[usize]) -> Result<Vec<usize>> {
    ensure_shape!(times.len() >= shape.len(), op, "{shape} has more dimensions than {times:?} has factors");
    let lead = times.len() - shape.len();
    Ok((0..times.len()).map(|i| if i < lead { 1 } else { shape[i - lead] }).collect())
}

/// `x` laid `times[i]` times one after another along each dimension (NumPy's `tile`).
pub fn repeat(x: &Tensor, times: &[usize]) -> Result<Tensor> {
    const OP: &str = "repeat";
    let from = padded(OP, x.shape(), times)?;
    let dims = from.iter().zip(times).map(|(len, times)| len.checked_mul(*times).unwrap_or(usize::MAX));
    let shape = checked_shape(OP, &dims.collect::<Vec<_>>())?;
    let (source, target) = (strides(&from), strides(&shape));
    let pair = |i: usize| [Axis::new(times[i], 0, from[i] * target[i]), Axis::new(from[i], source[i], target[i])];
    let axes: Vec<Axis> = (0..from.len()).flat_map(pair).collect();
    rearranged(OP, x, &axes, shape, Purpose::Activations)
}

/// The reverse of [`repeat`]: for each element of a tensor of `shape`, the sum over its repetitions
/// in `dy`.
pub fn repeat_backward(dy: &Tensor, shape: &Shape, times: &[usize]) -> Result<Tensor> {
    const OP: &str = "repeat_backward";
    let to = padded(OP, shape, times)?;
    let fits = dy.shape().len() == to.len() && (0..to.len()).all(|i| dy.shape()[i] == to[i] * times[i]);
    ensure_shape!(fits, OP, "{} is not {shape} repeated {times:?} times", dy.shape());
    // [elements, repetitions]: what is added lies together.
    let (source, copies) = (strides(dy.shape()), times.iter().product());
    let (elements, repetitions) = (strides(&to), strides(times));
    let axes: Vec<Axis> = (0..to.len())
        .map(|i| Axis::new(to[i], source[i], elements[i] * copies))
        .chain((0..to.len()).map(|i| Axis::new(times[i], to[i] * source[i], repetitions[i])))
        .collect();
    let mut together = scratch(dy, Shape::from([shape.elements(), copies]), dy.dtype())?;
    dy.device().launch_on(OP, Cost::streaming(0, &[dy, dy]), |on| copy(on, &axes, dy, 0, &mut together, 0))?;
    super::reduce::summed(OP, &together, vec![(shape.elements(), false), (copies, true)], 1.0, *shape)
}
