//! Attention and rotary positions.

use super::Cuda;
use super::launch::args;
use crate::cpu::attention::AttentionSpec;
use crate::cpu::rope::{RopeTable, Rotation};
use crate::error::Result;
use crate::ops::HeadLayout;
use crate::{Tensor, ensure_shape};
use std::sync::Arc;
use trainyard_cuda::kernels::{self as k, AttentionKernels, HEAD_DIM_MAX};

/// Tensor cores read 16 bytes at a time.
const ALIGNMENT: u64 = 16;

fn kernels(op: &'static str, qkv: &Tensor, spec: &AttentionSpec) -> Result<AttentionKernels> {
    let aligned = qkv.region(false).address.is_multiple_of(ALIGNMENT);
    let kernels = k::attention(super::float(op, qkv.dtype())?, spec.head_dim, aligned);
    ensure_shape!(kernels.is_some(), op, "heads of {} columns; on cuda the most is {HEAD_DIM_MAX}", spec.head_dim);
    Ok(kernels.expect("just checked"))
}

fn causal(spec: &AttentionSpec) -> (i32, usize) {
    (i32::from(spec.causal), spec.window.unwrap_or(0))
}

/// `bounds`: for each row the first row of its segment; then for each row the end of it, [2, m].
pub(crate) fn attention(
    gpu: &Arc<Cuda>,
    qkv: &Tensor,
    spec: &AttentionSpec,
    bounds: &Tensor,
    out: &Tensor,
    lse: &Tensor,
) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *spec;
    let m = qkv.rows();
    let (starts, ends) = (bounds.narrow(0..1)?, bounds.narrow(1..2)?);
    let (causal, window) = causal(spec);
    let args = args![qkv, out, lse, &starts, &ends, m, heads, kv_heads, head_dim, scale, causal, window];
    gpu.launch(kernels("attention", qkv, spec)?.forward, qkv.dtype(), [m, heads, head_dim], args)
}

/// `bounds` as in [`attention`]; `delta`: scratch [h, m].
pub(crate) fn attention_backward(
    gpu: &Arc<Cuda>,
    [dout, qkv, out, lse]: [&Tensor; 4],
    spec: &AttentionSpec,
    bounds: &Tensor,
    delta: &Tensor,
    dqkv: &Tensor,
) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *spec;
    let m = qkv.rows();
    let (starts, ends) = (bounds.narrow(0..1)?, bounds.narrow(1..2)?);
    let (causal, window) = causal(spec);
    let dtype = qkv.dtype();
    gpu.launch(&k::ATTENTION_DELTA, dtype, [m * heads, 1, 1], args![dout, out, delta, m, heads, head_dim])?;
    let kernels = kernels("attention_backward", qkv, spec)?;
    let args = args![qkv, dout, lse, delta, &starts, &ends, dqkv, m, heads, kv_heads, head_dim, scale, causal, window];
    gpu.launch(kernels.backward_queries, dtype, [m, heads, head_dim], args)?;
    gpu.launch(kernels.backward_keys, dtype, [m, kv_heads, head_dim], args)
}

pub(crate) fn attention_decode(
    gpu: &Arc<Cuda>,
    qkv: &Tensor,
    spec: &AttentionSpec,
    [keys, values]: [&Tensor; 2],
    start: usize,
    out: &Tensor,
) -> Result<()> {
    let AttentionSpec { heads, kv_heads, head_dim, scale, .. } = *spec;
    let n = qkv.rows();
    let (causal, window) = causal(spec);
    let append = args![qkv, keys, values, n, start, heads, kv_heads, head_dim];
    gpu.launch(&k::CACHE_APPEND, qkv.dtype(), [n * kv_heads * head_dim, 1, 1], append)?;
    let args = args![qkv, keys, values, out, n, start, heads, kv_heads, head_dim, scale, causal, window];
    gpu.launch(&k::ATTENTION_DECODE, qkv.dtype(), [n, heads, head_dim], args)
}

/// `on_device`: the table's cosines, then its sines, [2, positions, dim / 2].
pub(crate) fn rope(
    gpu: &Arc<Cuda>,
    qkv: &Tensor,
    layout: HeadLayout,
    table: &RopeTable,
    on_device: &Tensor,
    positions: &Tensor,
    rotation: Rotation,
) -> Result<()> {
    let (rows, heads) = (qkv.rows(), layout.heads + layout.kv_heads);
    let (cos, sin) = (on_device.narrow(0..1)?, on_device.narrow(1..2)?);
    let sign = match rotation {
        Rotation::Forward => 1.0f32,
        Rotation::Backward => -1.0,
    };
    let args =
        args![qkv, positions, &cos, &sin, rows, layout.columns(), 0usize, heads, layout.head_dim, table.dim, sign];
    gpu.launch(&k::ROPE, qkv.dtype(), [rows * heads * (table.dim / 2), 1, 1], args)
}

/// A table as [`rope`] reads it.
pub(crate) fn rope_table(device: &crate::Device, table: &RopeTable) -> Result<Tensor> {
    let values = [table.cos.as_slice(), table.sin.as_slice()].concat();
    device.tensor([2, table.positions, table.dim / 2], &values, crate::Purpose::Workspace)
}

/// The bounds of segments as [`attention`] reads them, [2, m].
pub(crate) fn rows_of_segments(bounds: &[i32]) -> Vec<i32> {
    let m = bounds[bounds.len() - 1] as usize;
    let mut values = vec![0; 2 * m];
    for pair in bounds.windows(2) {
        let rows = pair[0] as usize..pair[1] as usize;
        values[rows.clone()].fill(pair[0]);
        values[m + rows.start..m + rows.end].fill(pair[1]);
    }
    values
}
