//! Reading and adding by indices, which are i32 or u32.
//!
//! An index outside its dimension is [`TensorError::Index`](crate::TensorError); the meta device, which has no values, cannot notice it.

use super::{check_index, checked_shape, dimension, index_bits, split_point};
use crate::cpu::cast;
use crate::cpu::plain::index as kernels;
use crate::error::Result;
use crate::ops::workspace;
use crate::{Cost, DType, Device, Purpose, Shape, Tensor, by_float, ensure_shape};

/// Positions `indices` [k] of dimension `dim`, in that order.
pub fn index_select(x: &Tensor, dim: i32, indices: &Tensor) -> Result<Tensor> {
    const OP: &str = "index_select";
    check_index(OP, indices)?;
    let dim = dimension(OP, x.shape(), dim)?;
    let mut dims = x.shape().to_vec();
    dims[dim] = indices.elements();
    let mut y = x.empty_like(checked_shape(OP, &dims)?, x.dtype())?;
    let cost = Cost::streaming(0, &[&y, &y, indices]);
    by_float!(OP, x.dtype(), T => x.device().launch(OP, cost, |cpu| {
        let shape = split_point(x.shape(), dim);
        Ok(kernels::select(cpu, shape, index_bits(indices)?, x.get::<T>(), y.get_mut::<T>())?)
    })?);
    Ok(y)
}

/// Zeros of `shape`, to which position `i` of `dim` of `dy` is added at position `indices[i]`, in the order of `i`: the
/// gradient of [`index_select`].
pub fn index_add(dy: &Tensor, shape: &Shape, dim: i32, indices: &Tensor) -> Result<Tensor> {
    const OP: &str = "index_add";
    check_index(OP, indices)?;
    let dim = dimension(OP, shape, dim)?;
    let split = split_point(shape, dim);
    let fits = dy.shape().len() == shape.len()
        && (0..shape.len()).all(|i| dy.shape()[i] == if i == dim { indices.elements() } else { shape[i] });
    ensure_shape!(fits, OP, "{} at {} indices of dimension {dim} of {shape}", dy.shape(), indices.elements());
    added(OP, dy, shape, indices, |cpu, indices, dy, sums| {
        by_float!(OP, dy.dtype(), T => kernels::add(cpu, split, indices, dy.get::<T>(), sums)?);
        Ok(())
    })
}

/// Sums made in f32, as a tensor of `shape` in the dtype of `dy`.
fn added(
    op: &'static str,
    dy: &Tensor,
    shape: &Shape,
    indices: &Tensor,
    add: impl FnOnce(&crate::cpu::Cpu, &[u32], &Tensor, &mut [f32]) -> Result<()>,
) -> Result<Tensor> {
    let mut dx = dy.empty_like(*shape, dy.dtype())?;
    let mut wide = (dy.dtype() != DType::F32).then(|| workspace(dy.device(), shape.elements())).transpose()?;
    let cost = Cost::new(dy.elements(), dy.bytes() + indices.bytes() + dx.bytes());
    by_float!(op, dy.dtype(), T => dy.device().launch(op, cost, |cpu| {
        let sums = match &mut wide {
            Some(wide) => wide.get_mut::<f32>(),
            None => dx.get_mut::<f32>(),
        };
        sums.fill(0.0);
        add(cpu, index_bits(indices)?, dy, sums)?;
        if let Some(wide) = &wide {
            cast::cast(cpu, wide.get::<f32>(), dx.get_mut::<T>());
        }
        Ok(())
    })?);
    Ok(dx)
}

/// Fails unless `indices` has the dimensions of `shape` but for the last.
fn check_rows(op: &'static str, shape: &Shape, indices: &Tensor) -> Result<()> {
    check_index(op, indices)?;
    let fits = !shape.is_empty() && *indices.shape() == shape.with_last(indices.last_dim());
    ensure_shape!(fits, op, "indices {} into the last dimension of {shape}", indices.shape());
    Ok(())
}

/// `y[.., j] = x[.., indices[.., j]]`: x [.., n], indices and y [.., k].
pub fn gather(x: &Tensor, indices: &Tensor) -> Result<Tensor> {
    const OP: &str = "gather";
    check_rows(OP, x.shape(), indices)?;
    let [n, k] = [x.last_dim(), indices.last_dim()];
    let mut y = x.empty_like(*indices.shape(), x.dtype())?;
    let cost = Cost::streaming(0, &[&y, &y, indices]);
    by_float!(OP, x.dtype(), T => x.device().launch(OP, cost, |cpu| {
        Ok(kernels::gather_rows(cpu, [n, k], index_bits(indices)?, x.get::<T>(), y.get_mut::<T>())?)
    })?);
    Ok(y)
}

/// Zeros of `shape`, to which `dy[.., j]` is added at `[.., indices[.., j]]`, in the order of `j`: the gradient of [`gather`].
pub fn scatter_add(dy: &Tensor, shape: &Shape, indices: &Tensor) -> Result<Tensor> {
    const OP: &str = "scatter_add";
    check_rows(OP, shape, indices)?;
    ensure_shape!(dy.shape() == indices.shape(), OP, "{} at indices {}", dy.shape(), indices.shape());
    let [n, k] = [shape.last_dim(), indices.last_dim()];
    added(OP, dy, shape, indices, |cpu, indices, dy, sums| {
        by_float!(OP, dy.dtype(), T => kernels::scatter_add_rows(cpu, [n, k], indices, dy.get::<T>(), sums)?);
        Ok(())
    })
}

/// 1 at each index, else 0: [.., classes] of `dtype`.
pub fn one_hot(device: &Device, indices: &Tensor, classes: usize, dtype: DType) -> Result<Tensor> {
    const OP: &str = "one_hot";
    check_index(OP, indices)?;
    let mut dims = indices.shape().to_vec();
    dims.push(classes);
    let mut y = device.empty(checked_shape(OP, &dims)?, dtype, Purpose::Activations)?;
    let cost = Cost::streaming(0, &[&y, indices]);
    by_float!(OP, dtype, T => device.launch(OP, cost, |cpu| {
        Ok(kernels::one_hot(cpu, classes, index_bits(indices)?, y.get_mut::<T>())?)
    })?);
    Ok(y)
}
