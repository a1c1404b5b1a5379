//! Elementwise operations, copies, dropout and embeddings.

use super::Cuda;
use super::launch::args;
use super::linear::curve;
use crate::cpu::dropout::DropRate;
use crate::cpu::gemm::Activation;
use crate::cpu::philox::RandomKey;
use crate::error::Result;
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::kernels as k;

/// The bytes of `x`, into `y`.
pub(crate) fn copy(gpu: &Arc<Cuda>, x: &Tensor, y: &Tensor) -> Result<()> {
    if x.bytes() == 0 {
        return Ok(());
    }
    Ok(gpu.driver.copy(gpu.stream()?, y.region(true), x.region(false))?)
}

/// `y` may be one of the operands.
pub(crate) fn add(gpu: &Arc<Cuda>, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<()> {
    gpu.launch(&k::ADD, y.dtype(), [y.elements(), 1, 1], args![a, b, y, y.elements()])
}

pub(crate) fn accumulate(gpu: &Arc<Cuda>, x: &Tensor, target: &Tensor, overwrite: bool) -> Result<()> {
    let n = x.elements();
    gpu.launch(&k::ACCUMULATE, x.dtype(), [n, 1, 1], args![x, target, n, i32::from(overwrite)])
}

pub(crate) fn cast(gpu: &Arc<Cuda>, x: &Tensor, y: &Tensor) -> Result<()> {
    let kernel = match y.dtype() {
        DType::BF16 => &k::CAST_TO_BF16,
        DType::F16 => &k::CAST_TO_F16,
        _ => &k::CAST_TO_F32,
    };
    gpu.launch(kernel, x.dtype(), [x.elements(), 1, 1], args![x, y, x.elements()])
}

/// A scalar 1, without anything that comes from the host.
pub(crate) fn one(gpu: &Arc<Cuda>, y: &Tensor) -> Result<()> {
    gpu.launch(&k::FILL_U32, DType::F32, [1, 1, 1], args![y, 1usize, 1.0f32.to_bits()])
}

pub(crate) fn activate(gpu: &Arc<Cuda>, activation: Activation, x: &Tensor, y: &Tensor) -> Result<()> {
    gpu.launch(&k::ACTIVATE, x.dtype(), [x.elements(), 1, 1], args![x, y, x.elements(), curve(activation)])
}

pub(crate) fn activation_backward(
    gpu: &Arc<Cuda>,
    activation: Activation,
    dy: &Tensor,
    x: &Tensor,
    dx: &Tensor,
) -> Result<()> {
    let n = x.elements();
    gpu.launch(&k::ACTIVATION_BACKWARD, x.dtype(), [n, 1, 1], args![dy, x, dx, n, curve(activation)])
}

pub(crate) fn swiglu(gpu: &Arc<Cuda>, gate_up: &Tensor, y: &Tensor) -> Result<()> {
    gpu.launch(&k::SWIGLU, y.dtype(), [y.elements(), 1, 1], args![gate_up, y, y.rows(), y.last_dim()])
}

pub(crate) fn swiglu_backward(gpu: &Arc<Cuda>, dy: &Tensor, gate_up: &Tensor, dx: &Tensor) -> Result<()> {
    let args = args![dy, gate_up, dx, dy.rows(), dy.last_dim()];
    gpu.launch(&k::SWIGLU_BACKWARD, dy.dtype(), [dy.elements(), 1, 1], args)
}

pub(crate) fn glu(gpu: &Arc<Cuda>, activation: Activation, gate_up: &Tensor, y: &Tensor) -> Result<()> {
    let args = args![gate_up, y, y.rows(), y.last_dim(), curve(activation)];
    gpu.launch(&k::GLU, y.dtype(), [y.elements(), 1, 1], args)
}

pub(crate) fn glu_backward(
    gpu: &Arc<Cuda>,
    activation: Activation,
    dy: &Tensor,
    gate_up: &Tensor,
    dx: &Tensor,
) -> Result<()> {
    let args = args![dy, gate_up, dx, dy.rows(), dy.last_dim(), curve(activation)];
    gpu.launch(&k::GLU_BACKWARD, dy.dtype(), [dy.elements(), 1, 1], args)
}

pub(crate) fn dropout(
    gpu: &Arc<Cuda>,
    key: RandomKey,
    first: usize,
    rate: DropRate,
    x: &Tensor,
    residual: Option<&Tensor>,
    y: &Tensor,
) -> Result<()> {
    let n = x.elements();
    if n == 0 {
        return Ok(());
    }
    let (threshold, scale) = (rate.threshold(), rate.exact().1);
    let varying = gpu.varying_step(key.step)?;
    let args = args![x, residual, y, n, first, key.seed, key.step, varying.as_ref(), key.site, threshold, scale];
    gpu.launch(&k::DROPOUT, x.dtype(), [n + first % k::DROPOUT_GROUP, 1, 1], args)
}

/// Indices were checked when the batch was made.
pub(crate) fn embedding(
    gpu: &Arc<Cuda>,
    tokens: &Tensor,
    table: &Tensor,
    first: usize,
    positions: Option<(&Tensor, &Tensor)>,
    y: &Tensor,
) -> Result<()> {
    let (n, dim) = (tokens.elements(), table.last_dim());
    let (rows, weight) = positions.unzip();
    let count = weight.map_or(0, |weight| weight.rows());
    let args = args![tokens, table, rows, weight, y, n, dim, first, table.rows(), count];
    gpu.launch(&k::EMBEDDING, table.dtype(), [n * dim, 1, 1], args)
}

/// The gradient's rows are those of the table from `first_row` on. `first`: scratch of as many i32
/// as it has rows.
pub(crate) fn embedding_backward(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    rows: &Tensor,
    first_row: usize,
    gradient: &Tensor,
    first: &Tensor,
) -> Result<()> {
    let (n, dim, limit) = (rows.elements(), dy.last_dim(), gradient.rows());
    gpu.launch(&k::FILL_U32, DType::F32, [limit, 1, 1], args![first, limit, i32::MAX as u32])?;
    gpu.launch(&k::FIRST_USE, dy.dtype(), [n, 1, 1], args![rows, first, n, first_row, limit])?;
    let args = args![dy, rows, first, gradient, 1usize, first_row, limit, n, dim];
    gpu.launch(&k::INDEX_ADD, dy.dtype(), [1, n, dim], args)
}
