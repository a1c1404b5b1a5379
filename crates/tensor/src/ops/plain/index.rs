//! Reading and adding by indices, which are i32 or u32.
//!
//! An index outside its dimension is [`TensorError::Index`](crate::TensorError), for which the host
//! waits on a GPU, unless it made the indices itself ([`Indices::of_host`]). The meta device, which
//! has no values, cannot notice it.

use super::{check_index, checked_shape, dimension, index_bits, split_point};
use crate::cpu::cast;
use crate::cpu::embedding::check_indices;
use crate::cpu::plain::index as kernels;
use crate::cuda::index as on_cuda;
use crate::error::Result;
use crate::ops::{given, scratch_on_cuda};
use crate::{Cost, DType, Device, On, Purpose, Shape, Tensor, by_float, cuda, ensure_shape};

/// Positions of a dimension: i32 or u32.
#[derive(Clone, Debug)]
pub struct Indices {
    tensor: Tensor,
    /// All are below it, as the host has found. None if a device has to look.
    limit: Option<usize>,
}

impl Indices {
    /// Indices that the host checks and brings to the device.
    ///
    /// # Errors
    /// One that is not in `0..limit`; refusals of the device.
    pub fn of_host(device: &Device, indices: &[i32], limit: usize) -> Result<Indices> {
        check_indices("index", indices, limit)?;
        let tensor = device.tensor([indices.len()], indices, Purpose::Data)?;
        Ok(Indices { tensor, limit: Some(limit) })
    }

    /// The scratch of a check on a GPU that they lie in `0..n`; None elsewhere, and where they are
    /// known to.
    fn check_scratch(&self, device: &Device, n: usize) -> Result<Option<Tensor>> {
        match self.limit.is_some_and(|limit| limit <= n) {
            true => Ok(None),
            false => scratch_on_cuda(device, 1),
        }
    }
}

impl From<&Tensor> for Indices {
    fn from(tensor: &Tensor) -> Indices {
        Indices { tensor: tensor.clone(), limit: None }
    }
}

impl From<&Indices> for Indices {
    fn from(indices: &Indices) -> Indices {
        indices.clone()
    }
}

/// Positions `indices` [k] of dimension `dim`, in that order.
pub fn index_select(x: &Tensor, dim: i32, indices: impl Into<Indices>) -> Result<Tensor> {
    const OP: &str = "index_select";
    let of = indices.into();
    let indices = &of.tensor;
    check_index(OP, indices)?;
    let dim = dimension(OP, x.shape(), dim)?;
    let mut dims = x.shape().to_vec();
    dims[dim] = indices.elements();
    let mut y = x.empty_like(checked_shape(OP, &dims)?, x.dtype())?;
    let cost = Cost::streaming(0, &[&y, &y, indices]);
    let shape = split_point(x.shape(), dim);
    let found = of.check_scratch(x.device(), shape[1])?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return on_cuda::index_select(gpu, x, shape, indices, &y, found.as_ref()),
        };
        Ok(kernels::select(cpu, shape, index_bits(indices)?, x.get::<T>(), y.get_mut::<T>())?)
    })?);
    Ok(y)
}

/// Zeros of `shape`, to which position `i` of `dim` of `dy` is added at position `indices[i]`, in
/// the order of `i`: the gradient of [`index_select`].
pub fn index_add(dy: &Tensor, shape: &Shape, dim: i32, indices: impl Into<Indices>) -> Result<Tensor> {
    const OP: &str = "index_add";
    let of = indices.into();
    let indices = &of.tensor;
    check_index(OP, indices)?;
    let dim = dimension(OP, shape, dim)?;
    let split = split_point(shape, dim);
    let fits = dy.shape().len() == shape.len()
        && (0..shape.len()).all(|i| dy.shape()[i] == if i == dim { indices.elements() } else { shape[i] });
    ensure_shape!(fits, OP, "{} at {} indices of dimension {dim} of {shape}", dy.shape(), indices.elements());
    let add = |on: On<'_>, sums: &mut Sums| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return on_cuda::index_add(gpu, dy, split, indices, sums.on_cuda()),
        };
        let sums = sums.zeroed();
        by_float!(OP, dy.dtype(), T => kernels::add(cpu, split, index_bits(indices)?, dy.get::<T>(), sums)?);
        Ok(())
    };
    added(OP, dy, shape, &of, split[1], split[1], add)
}

/// The working memory of adding by indices: the sums in f32, and scratch on a GPU.
struct Sums {
    sums: Tensor,
    first: Option<Tensor>,
    found: Option<Tensor>,
}

impl Sums {
    fn zeroed(&mut self) -> &mut [f32] {
        let sums = self.sums.get_mut::<f32>();
        sums.fill(0.0);
        sums
    }

    fn on_cuda(&self) -> on_cuda::Sums<'_> {
        on_cuda::Sums { sums: &self.sums, first: given(&self.first), found: self.found.as_ref() }
    }
}

/// Sums made in f32, as a tensor of `shape` in the dtype of `dy`; indices into `n` positions, of
/// which a GPU notes for `noted` where they are first used.
fn added(
    op: &'static str,
    dy: &Tensor,
    shape: &Shape,
    indices: &Indices,
    n: usize,
    noted: usize,
    add: impl FnOnce(On<'_>, &mut Sums) -> Result<()>,
) -> Result<Tensor> {
    let device = dy.device();
    let mut narrow = (dy.dtype() != DType::F32).then(|| dy.empty_like(*shape, dy.dtype())).transpose()?;
    let sums = match narrow {
        Some(_) => device.empty(*shape, DType::F32, Purpose::Workspace)?,
        None => dy.empty_like(*shape, DType::F32)?,
    };
    let (first, found) = (scratch_on_cuda(device, noted)?, indices.check_scratch(device, n)?);
    let mut sums = Sums { sums, first, found };
    let cost = Cost::new(dy.elements(), dy.bytes() + indices.tensor.bytes() + shape.elements() * dy.dtype().size());
    by_float!(op, dy.dtype(), T => device.launch_on(op, cost, |on| {
        add(on, &mut sums)?;
        let Some(narrow) = &mut narrow else { return Ok(()) };
        match on {
            On::Cpu(cpu) => cast::cast(cpu, sums.sums.get::<f32>(), narrow.get_mut::<T>()),
            On::Cuda(gpu) => cuda::cast(gpu, &sums.sums, narrow)?,
        }
        Ok(())
    })?);
    Ok(narrow.unwrap_or(sums.sums))
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
    let found = scratch_on_cuda(x.device(), 1)?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return on_cuda::gather(gpu, x, indices, &y, given(&found)),
        };
        Ok(kernels::gather_rows(cpu, [n, k], index_bits(indices)?, x.get::<T>(), y.get_mut::<T>())?)
    })?);
    Ok(y)
}

/// Zeros of `shape`, to which `dy[.., j]` is added at `[.., indices[.., j]]`, in the order of `j`:
/// the gradient of [`gather`].
pub fn scatter_add(dy: &Tensor, shape: &Shape, indices: &Tensor) -> Result<Tensor> {
    const OP: &str = "scatter_add";
    check_rows(OP, shape, indices)?;
    ensure_shape!(dy.shape() == indices.shape(), OP, "{} at indices {}", dy.shape(), indices.shape());
    let [n, k] = [shape.last_dim(), indices.last_dim()];
    let add = |on: On<'_>, sums: &mut Sums| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return on_cuda::scatter_add(gpu, dy, n, indices, sums.on_cuda()),
        };
        let (sums, indices) = (sums.zeroed(), index_bits(indices)?);
        by_float!(OP, dy.dtype(), T => kernels::scatter_add_rows(cpu, [n, k], indices, dy.get::<T>(), sums)?);
        Ok(())
    };
    added(OP, dy, shape, &indices.into(), n, 0, add)
}

/// 1 at each index, else 0: [.., classes] of `dtype`.
pub fn one_hot(device: &Device, indices: &Tensor, classes: usize, dtype: DType) -> Result<Tensor> {
    const OP: &str = "one_hot";
    check_index(OP, indices)?;
    let mut dims = indices.shape().to_vec();
    dims.push(classes);
    let mut y = device.empty(checked_shape(OP, &dims)?, dtype, Purpose::Activations)?;
    let cost = Cost::streaming(0, &[&y, indices]);
    let found = scratch_on_cuda(device, 1)?;
    by_float!(OP, dtype, T => device.launch_on(OP, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return on_cuda::one_hot(gpu, indices, classes, &y, given(&found)),
        };
        Ok(kernels::one_hot(cpu, classes, index_bits(indices)?, y.get_mut::<T>())?)
    })?);
    Ok(y)
}
