//! The LM head with cross-entropy: logits a chunk of rows at a time; and the plain losses.

use super::launch::{Arg, args};
use super::linear::{operands, plain, weight_gradient};
use super::{Cuda, SQUARES_CHUNK, index, part};
use crate::cpu::head::HeadLoss;
use crate::error::Result;
use crate::ops::GradientSlot;
use crate::{DType, Tensor};
use std::sync::Arc;
use trainyard_cuda::driver::{Product, Region};
use trainyard_cuda::kernels as k;

/// Bytes of logits at a time: large enough to fill a device, small beside what else it holds.
const CHUNK_BYTES: usize = 256 << 20;

/// Rows of a chunk: the tokens cut evenly into the fewest chunks of at most [`CHUNK_BYTES`], in
/// multiples of 128, the rows of a tile.
pub(crate) fn chunk_rows(tokens: usize, vocab: usize, size: usize) -> usize {
    let most = (CHUNK_BYTES / (vocab * size).max(1) / 128 * 128).max(128);
    let chunks = tokens.div_ceil(most).max(1);
    tokens.div_ceil(chunks).next_multiple_of(128).min(tokens.max(1))
}

/// The gradients that the head makes beside losses.
pub(crate) struct HeadGradients<'a, 'b> {
    pub scale: f32,
    pub dx: &'a Tensor,
    pub dw: &'a Option<GradientSlot<'b>>,
}

/// The head's scratch.
pub(crate) struct HeadScratch<'a> {
    /// [chunk_rows, v] in the dtype of x.
    pub logits: &'a Tensor,
    /// f32 [m].
    pub lse: &'a Tensor,
    pub workspace: &'a Tensor,
}

/// Losses [m] of x [m, d] by w [v, d], gradients if wanted, and (`hits`, u32 [m]) where no logit is
/// above the target's.
pub(crate) fn head(
    gpu: &Arc<Cuda>,
    [x, w, targets]: [&Tensor; 3],
    gradients: Option<HeadGradients<'_, '_>>,
    losses: &Tensor,
    hits: Option<&Tensor>,
    scratch: HeadScratch<'_>,
) -> Result<()> {
    const OP: &str = "linear_cross_entropy";
    let (m, d, v) = (x.rows(), x.last_dim(), w.rows());
    let (dtype, size) = (x.dtype(), x.dtype().size());
    let rows_max = scratch.logits.rows();
    for first in (0..m).step_by(rows_max.max(1)) {
        let rows = rows_max.min(m - first);
        let rows_of = |region: Region, row_bytes| part(region, first * row_bytes, rows * row_bytes);
        let logits = |written| part(scratch.logits.region(written), 0, rows * v * size);
        let form = Product { b_transposed: true, ..plain(OP, [rows, v, d], dtype, dtype)? };
        let x_rows = rows_of(x.region(false), d * size);
        gpu.product(&form, &operands(x_rows, w.region(false), logits(true), scratch.workspace))?;
        let chunk = |tensor| Arg::Part(tensor, 4 * first, 4 * rows);
        let hit = hits.map_or(Arg::Null, chunk);
        let part_of_logits = Arg::Part(scratch.logits, 0, rows * v * size);
        let Some(HeadGradients { scale, dx, dw }) = &gradients else {
            let args = args![part_of_logits, chunk(targets), chunk(losses), chunk(scratch.lse), hit, rows, v, v];
            gpu.launch(&k::CROSS_ENTROPY, dtype, [rows, v, 1], args)?;
            continue;
        };
        let varying = gpu.varying_scale(*scale)?;
        let scale_at = Arg::from(varying.as_ref());
        let args = args![part_of_logits, chunk(targets), chunk(losses), Arg::Null, hit, rows, v, v, *scale, scale_at];
        gpu.launch(&k::CROSS_ENTROPY_IN_PLACE, dtype, [rows, v, 1], args)?;
        let dx_rows = rows_of(dx.region(true), d * size);
        let form = plain(OP, [rows, d, v], dtype, dtype)?;
        gpu.product(&form, &operands(logits(false), w.region(false), dx_rows, scratch.workspace))?;
        if let Some((dw, overwrite)) = dw {
            let overwrite = *overwrite && first == 0;
            weight_gradient(gpu, logits(false), x_rows, dw, rows, dtype, overwrite, scratch.workspace)?;
        }
    }
    Ok(())
}

/// Adds losses up, into a scalar times `scale` on the device, or as a summary for the host, which
/// waits for it. `scratch`: four floats.
pub(crate) fn summary(
    gpu: &Arc<Cuda>,
    [losses, targets]: [&Tensor; 2],
    hits: Option<&Tensor>,
    loss: Option<(&Tensor, f32)>,
    scratch: &Tensor,
) -> Result<HeadLoss> {
    let (sum, counts) = (Arg::Part(scratch, 0, 8), Arg::Part(scratch, 8, 8));
    let (to, scale) = loss.unzip();
    let varying = scale.map_or(Ok(None), |scale| gpu.varying_scale(scale))?;
    let (scale, scale_at) = (scale.unwrap_or(1.0), Arg::from(varying.as_ref()));
    let args = args![losses, hits, targets, losses.elements(), sum, counts, to, scale, scale_at, 0i32];
    gpu.launch(&k::LOSS_SUMMARY, DType::F32, [1, 1, 1], args)?;
    if loss.is_some() {
        return Ok(HeadLoss::default());
    }
    let mut bytes = [0; 16];
    gpu.download(scratch.region(false), &mut bytes)?;
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
    let loss_sum = f64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    Ok(HeadLoss { loss_sum, tokens: word(8), correct: word(12) })
}

/// Losses [m] of logits, their log-sum-exp [m] and the scalar; `scratch`: four floats.
pub(crate) fn cross_entropy(
    gpu: &Arc<Cuda>,
    [x, targets]: [&Tensor; 2],
    mean: bool,
    [losses, lse, loss]: [&Tensor; 3],
    scratch: &Tensor,
) -> Result<()> {
    let (m, v) = (x.rows(), x.last_dim());
    index::check(gpu, "target", targets, v, true, scratch)?;
    let args = args![x, targets, losses, lse, Arg::Null, m, v, v];
    gpu.launch(&k::CROSS_ENTROPY, x.dtype(), [m, v, 1], args)?;
    summarise(gpu, losses, targets, Some(loss), mean, scratch)
}

/// `scratch`: four floats.
pub(crate) fn cross_entropy_backward(
    gpu: &Arc<Cuda>,
    dy: &Tensor,
    [x, targets, lse]: [&Tensor; 3],
    mean: bool,
    dx: &Tensor,
    scratch: &Tensor,
) -> Result<()> {
    let (m, v) = (x.rows(), x.last_dim());
    index::check(gpu, "target", targets, v, true, scratch)?;
    let counted = if mean {
        // For the number of rows that count; what it adds up is of no use.
        summarise(gpu, lse, targets, None, mean, scratch)?;
        Arg::Part(scratch, 8, 4)
    } else {
        Arg::Null
    };
    gpu.launch(&k::CROSS_ENTROPY_BACKWARD, x.dtype(), [m, v, 1], args![x, targets, lse, dy, counted, dx, m, v, v])
}

/// The sum of `losses` and the counts of `targets` into `scratch`, and the reduced loss.
fn summarise(
    gpu: &Arc<Cuda>,
    losses: &Tensor,
    targets: &Tensor,
    loss: Option<&Tensor>,
    mean: bool,
    scratch: &Tensor,
) -> Result<()> {
    let (sum, counts) = (Arg::Part(scratch, 0, 8), Arg::Part(scratch, 8, 8));
    let args =
        args![losses, Arg::Null, targets, losses.elements(), sum, counts, loss, 1.0f32, Arg::Null, i32::from(mean)];
    gpu.launch(&k::LOSS_SUMMARY, DType::F32, [1, 1, 1], args)
}

/// `sums`: scratch of two floats for each [`SQUARES_CHUNK`] elements.
pub(crate) fn mse_loss(gpu: &Arc<Cuda>, a: &Tensor, b: &Tensor, loss: &Tensor, sums: &Tensor) -> Result<()> {
    let n = a.elements();
    let args = args![a, b, sums, n, SQUARES_CHUNK];
    gpu.launch(&k::SQUARED_ERROR, a.dtype(), [n, SQUARES_CHUNK, 1], args)?;
    gpu.launch(&k::MEAN_F64, DType::F32, [1, 1, 1], args![sums, loss, n.div_ceil(SQUARES_CHUNK), n])
}

pub(crate) fn mse_loss_backward(gpu: &Arc<Cuda>, dy: &Tensor, a: &Tensor, b: &Tensor, da: &Tensor) -> Result<()> {
    let n = a.elements();
    let factor = 2.0 / n.max(1) as f32;
    gpu.launch(&k::SCALED_DIFFERENCE, a.dtype(), [n, 1, 1], args![a, b, dy, da, n, factor])
}
