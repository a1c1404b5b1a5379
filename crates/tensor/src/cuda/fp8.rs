//! Operands of eight bits and their products.

use super::Cuda;
use super::launch::args;
use super::linear::{operands, plain, with_epilogue};
use crate::cpu::gemm::Activation;
use crate::error::Result;
use crate::ops::fp8::Slot;
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::driver::{Operands, Product};
use trainyard_cuda::fp8::Fp8;
use trainyard_cuda::kernels as k;

/// Codes [rows, what is summed over], their format and their scale.
pub(crate) type Operand<'t> = (&'t Tensor, Fp8, &'t Slot);

/// The codes of `x`, as it lies and transposed.
pub(crate) fn round(
    gpu: &Arc<Cuda>,
    x: &Tensor,
    format: Fp8,
    slot: &Slot,
    rows: Option<&Tensor>,
    columns: Option<&Tensor>,
) -> Result<()> {
    let (m, n, e5m2) = (x.rows(), x.last_dim(), i32::from(format == Fp8::E5M2));
    gpu.launch(&k::FP8_ROUND, x.dtype(), [m, n, 1], args![x, &slot.scale, rows, columns, &slot.amax, m, n, e5m2])
}

/// The largest magnitude of `x` alone.
pub(crate) fn amax(gpu: &Arc<Cuda>, x: &Tensor, slot: &Slot) -> Result<()> {
    gpu.launch(&k::FP8_AMAX, x.dtype(), [x.elements(), 1, 1], args![x, &slot.amax, x.elements()])
}

/// `a bᵀ` into `y`, both operands along what is summed over.
fn product(y: &Tensor, [a, b]: [Operand<'_>; 2], workspace: &Tensor) -> Result<(Product, Operands)> {
    let dims = [a.0.rows(), b.0.rows(), a.0.last_dim()];
    // Of the dtypes the result's alone counts.
    let form = plain("linear_fp8", dims, DType::BF16, y.dtype())?;
    let form = Product { b_transposed: true, fp8: Some([a.1, b.1]), ..form };
    let operands = operands(a.0.region(false), b.0.region(false), y.region(true), workspace);
    Ok((form, Operands { scales: [a.2.inverse.region(false), b.2.inverse.region(false)], ..operands }))
}

/// `act(x wᵀ + bias) + residual`.
pub(crate) fn linear(
    gpu: &Arc<Cuda>,
    x: Operand<'_>,
    w: Operand<'_>,
    bias: Option<&Tensor>,
    activation: Activation,
    residual: Option<&Tensor>,
    pre: Option<&Tensor>,
    y: &Tensor,
    workspace: &Tensor,
) -> Result<()> {
    let (form, operands) = product(y, [x, w], workspace)?;
    with_epilogue(gpu, form, operands, bias, activation, residual, pre, y)
}

/// `dy w` from dy and wᵀ.
pub(crate) fn input_gradient(
    gpu: &Arc<Cuda>,
    factors: [Operand<'_>; 2],
    dx: &Tensor,
    workspace: &Tensor,
) -> Result<()> {
    let (form, operands) = product(dx, factors, workspace)?;
    gpu.product(&form, &operands)
}

/// `dw (+)= dyᵀ x` from dyᵀ and xᵀ.
pub(crate) fn weight_gradient(
    gpu: &Arc<Cuda>,
    factors: [Operand<'_>; 2],
    dw: &Tensor,
    overwrite: bool,
    workspace: &Tensor,
) -> Result<()> {
    let (mut form, mut operands) = product(dw, factors, workspace)?;
    if !overwrite {
        (form.adds, operands.c) = (true, dw.region(false));
    }
    gpu.product(&form, &operands)
}
