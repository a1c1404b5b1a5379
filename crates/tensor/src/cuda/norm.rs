//! Normalisations. Gradients of weights are summed block by block in scratch, then over the blocks
//! in order.

use super::Cuda;
use super::launch::args;
use crate::error::Result;
use crate::ops::{GradientSlot, HeadLayout};
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::kernels as k;

pub(crate) use trainyard_cuda::kernels::row_blocks;

/// Adds the `floats` partial sums of each block, from `offset` floats of `partials` on, to a
/// gradient.
fn add_partials(
    gpu: &Arc<Cuda>,
    partials: &Tensor,
    offset: usize,
    blocks: usize,
    slot: &Option<GradientSlot<'_>>,
) -> Result<()> {
    let Some((gradient, overwrite)) = slot else { return Ok(()) };
    let n = gradient.elements();
    let part = super::launch::Arg::Part(partials, 4 * offset, 4 * blocks * n);
    let args = args![part, &**gradient, blocks, n, 1usize, 1.0f32, i32::from(!overwrite)];
    gpu.launch(&k::SUM_PARTIALS, DType::F32, [n, 1, 1], args)
}

/// Where a kernel leaves the partial sums of a gradient that is wanted.
fn partials_for<'a>(
    partials: &'a Tensor,
    offset: usize,
    floats: usize,
    slot: &Option<GradientSlot<'_>>,
) -> super::launch::Arg<'a> {
    match slot {
        Some(_) => super::launch::Arg::Part(partials, 4 * offset, 4 * floats),
        None => super::launch::Arg::Null,
    }
}

pub(crate) fn rms_norm(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    w: &Tensor,
    eps: f32,
    y: &Tensor,
    inverse_rms: &Tensor,
) -> Result<()> {
    let (rows, dim) = (x.rows(), x.last_dim());
    gpu.launch(&k::RMS_NORM, x.dtype(), [rows, dim, 1], args![x, w, y, inverse_rms, rows, dim, eps])
}

/// `base` may be `dx`; `partials`: [`row_blocks`] of dim floats.
pub(crate) fn rms_norm_backward(
    gpu: &Arc<Cuda>,
    [dy, x, w, inverse_rms]: [&Tensor; 4],
    base: Option<&Tensor>,
    dx: &Tensor,
    dw: &Option<GradientSlot<'_>>,
    partials: &Tensor,
) -> Result<()> {
    let (rows, dim) = (x.rows(), x.last_dim());
    let blocks = row_blocks(rows);
    let into = partials_for(partials, 0, blocks * dim, dw);
    let args = args![dy, x, w, inverse_rms, base, dx, into, rows, dim];
    gpu.launch(&k::RMS_NORM_BACKWARD, x.dtype(), [rows, dim, 1], args)?;
    add_partials(gpu, partials, 0, blocks, dw)
}

pub(crate) fn layer_norm(
    gpu: &Arc<Cuda>,
    [x, w, b]: [&Tensor; 3],
    eps: f32,
    [y, mean, inverse_std]: [&Tensor; 3],
) -> Result<()> {
    let (rows, dim) = (x.rows(), x.last_dim());
    gpu.launch(&k::LAYER_NORM, x.dtype(), [rows, dim, 1], args![x, w, b, y, mean, inverse_std, rows, dim, eps])
}

/// `base` may be `dx`; `partials`: twice [`row_blocks`] of dim floats.
pub(crate) fn layer_norm_backward(
    gpu: &Arc<Cuda>,
    [dy, x, w, mean, inverse_std]: [&Tensor; 5],
    base: Option<&Tensor>,
    dx: &Tensor,
    [dw, db]: [&Option<GradientSlot<'_>>; 2],
    partials: &Tensor,
) -> Result<()> {
    let (rows, dim) = (x.rows(), x.last_dim());
    let blocks = row_blocks(rows);
    let floats = blocks * dim;
    let (into_w, into_b) = (partials_for(partials, 0, floats, dw), partials_for(partials, floats, floats, db));
    let args = args![dy, x, w, mean, inverse_std, base, dx, into_w, into_b, rows, dim];
    gpu.launch(&k::LAYER_NORM_BACKWARD, x.dtype(), [rows, dim, 1], args)?;
    add_partials(gpu, partials, 0, blocks, dw)?;
    add_partials(gpu, partials, floats, blocks, db)
}

pub(crate) fn qk_norm(
    gpu: &Arc<Cuda>,
    layout: HeadLayout,
    [x, wq, wk]: [&Tensor; 3],
    eps: f32,
    [y, inverse_rms]: [&Tensor; 2],
) -> Result<()> {
    let HeadLayout { heads, kv_heads, head_dim } = layout;
    let rows = x.rows();
    let args = args![x, wq, wk, y, inverse_rms, rows, heads, kv_heads, head_dim, eps];
    gpu.launch(&k::QK_NORM, x.dtype(), [rows * (heads + 2 * kv_heads), 1, 1], args)
}

/// `partials`: twice [`row_blocks`] of head_dim floats.
pub(crate) fn qk_norm_backward(
    gpu: &Arc<Cuda>,
    layout: HeadLayout,
    gradient: &Tensor,
    [x, wq, wk, inverse_rms]: [&Tensor; 4],
    [dwq, dwk]: [&Option<GradientSlot<'_>>; 2],
    partials: &Tensor,
) -> Result<()> {
    let HeadLayout { heads, kv_heads, head_dim } = layout;
    let rows = x.rows();
    let blocks = row_blocks(rows);
    let floats = blocks * head_dim;
    let (into_q, into_k) = (partials_for(partials, 0, floats, dwq), partials_for(partials, floats, floats, dwk));
    let args = args![gradient, x, wq, wk, inverse_rms, into_q, into_k, rows, heads, kv_heads, head_dim];
    gpu.launch(&k::QK_NORM_BACKWARD, x.dtype(), [rows, 8 * head_dim, 1], args)?;
    add_partials(gpu, partials, 0, blocks, dwq)?;
    add_partials(gpu, partials, floats, blocks, dwk)
}
