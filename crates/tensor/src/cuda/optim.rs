//! Optimizer steps and the sums of squares that clipping asks for.

use super::Cuda;
use super::launch::{Arg, args};
use crate::cpu::optim::{AdamW, Decay, Lion, Sgd};
use crate::error::Result;
use crate::ops::optim::OptimizerOperands;
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::kernels as k;

/// The module that writes the copy, and the copy.
pub(super) fn copy_of<'a>(operands: &'a OptimizerOperands<'_>) -> (DType, Option<&'a Tensor>) {
    let copy = operands.copy.as_deref();
    (copy.map_or(DType::F32, |copy| copy.dtype()), copy)
}

pub(crate) fn adamw(
    gpu: &Arc<Cuda>,
    hyper: AdamW,
    step: u64,
    operands: &OptimizerOperands<'_>,
    first: &Tensor,
    second: &Tensor,
) -> Result<()> {
    let (dtype, copy) = copy_of(operands);
    let (n, (step_size, root)) = (operands.gradient.elements(), hyper.corrected(step));
    let keep = 1.0 - hyper.lr * hyper.weight_decay;
    let (AdamW { beta1, eps, .. }, beta2) = (hyper, hyper.second_decay(step));
    let args = args![
        &*operands.master,
        operands.gradient,
        first,
        second,
        copy,
        n,
        operands.gradient_scale,
        beta1,
        beta2,
        eps,
        keep,
        step_size,
        root
    ];
    gpu.launch(&k::ADAMW, dtype, [n, 1, 1], args)
}

pub(crate) fn sgd(
    gpu: &Arc<Cuda>,
    hyper: Sgd,
    operands: &OptimizerOperands<'_>,
    momentum: Option<&Tensor>,
) -> Result<()> {
    let (dtype, copy) = copy_of(operands);
    let n = operands.gradient.elements();
    let (keep, coupled) = match hyper.decay {
        Decay::Decoupled => (1.0 - hyper.lr * hyper.weight_decay, 0.0f32),
        Decay::Coupled => (1.0, hyper.weight_decay),
    };
    let args = args![
        &*operands.master,
        operands.gradient,
        momentum,
        copy,
        n,
        operands.gradient_scale,
        hyper.lr,
        hyper.momentum,
        i32::from(hyper.nesterov),
        keep,
        coupled
    ];
    gpu.launch(&k::SGD, dtype, [n, 1, 1], args)
}

pub(crate) fn sign_step(gpu: &Arc<Cuda>, rate: f32, operands: &OptimizerOperands<'_>) -> Result<()> {
    let (dtype, copy) = copy_of(operands);
    let n = operands.gradient.elements();
    gpu.launch(&k::SIGN_STEP, dtype, [n, 1, 1], args![&*operands.master, operands.gradient, copy, n, rate])
}

pub(crate) fn lion(gpu: &Arc<Cuda>, hyper: Lion, operands: &OptimizerOperands<'_>, momentum: &Tensor) -> Result<()> {
    let (dtype, copy) = copy_of(operands);
    let n = operands.gradient.elements();
    let keep = 1.0 - hyper.lr * hyper.weight_decay;
    let args = args![
        &*operands.master,
        operands.gradient,
        momentum,
        copy,
        n,
        operands.gradient_scale,
        hyper.lr,
        hyper.beta1,
        hyper.beta2,
        keep
    ];
    gpu.launch(&k::LION, dtype, [n, 1, 1], args)
}

/// Elements whose squares a block adds up, where the caller does not say.
pub(crate) const SQUARES_CHUNK: usize = 1 << 16;

/// The sums of chunks of `x` into `sums`, scratch of two floats for each, from the `first`-th on.
pub(crate) fn chunk_squares(gpu: &Arc<Cuda>, x: &Tensor, chunk: usize, sums: &Tensor, first: usize) -> Result<()> {
    let n = x.elements();
    let to = Arg::Part(sums, 8 * first, 8 * n.div_ceil(chunk));
    gpu.launch(&k::CHUNK_SQUARES, x.dtype(), [n, chunk, 1], args![x, to, n, chunk])
}

/// Reads the sums of [`chunk_squares`], one after the other. It waits for them.
pub(crate) fn read_sums(gpu: &Arc<Cuda>, sums: &Tensor, out: &mut [Vec<f64>]) -> Result<()> {
    let mut bytes = vec![0; 8 * out.iter().map(Vec::len).sum::<usize>()];
    if bytes.is_empty() {
        return Ok(());
    }
    gpu.download(super::part(sums.region(false), 0, bytes.len()), &mut bytes)?;
    for (sum, bytes) in out.iter_mut().flatten().zip(bytes.chunks_exact(8)) {
        *sum = f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    Ok(())
}

/// The chunks' sums in order, as [`chunk_sums_of_squares`].
pub(crate) fn sum_of_squares(gpu: &Arc<Cuda>, x: &Tensor, sums: &Tensor) -> Result<f64> {
    let mut all = [vec![0.0; x.elements().div_ceil(SQUARES_CHUNK)]];
    chunk_squares(gpu, x, SQUARES_CHUNK, sums, 0)?;
    read_sums(gpu, sums, &mut all)?;
    Ok(all.iter().flatten().sum())
}
