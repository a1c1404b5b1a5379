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

const OP: &str = "linear_cross_entropy";

/// Bytes of logits at a time. The gradient of w is read and written in f32 for each chunk: 1,000
/// rows of a vocabulary of 128,000 made that a third of the products' time on an H100, 4,000 a
/// tenth.
const CHUNK_BYTES: usize = 1 << 30;

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
    let v = w.rows();
    for_chunks(gpu, [x, w], scratch.logits, scratch.workspace, |Chunk { first, rows, logits }| {
        let chunk = |tensor| Arg::Part(tensor, 4 * first, 4 * rows);
        let hit = hits.map_or(Arg::Null, chunk);
        let Some(gradients) = &gradients else {
            let args = args![logits, chunk(targets), chunk(losses), chunk(scratch.lse), hit, rows, v, v];
            return gpu.launch(&k::CROSS_ENTROPY, x.dtype(), [rows, v, 1], args);
        };
        let varying = gpu.varying_scale(gradients.scale)?;
        let (scale, scale_at) = (gradients.scale, Arg::from(varying.as_ref()));
        let args = args![logits, chunk(targets), chunk(losses), Arg::Null, hit, rows, v, v, scale, scale_at];
        gpu.launch(&k::CROSS_ENTROPY_IN_PLACE, x.dtype(), [rows, v, 1], args)?;
        gradients.take(gpu, [x, w], [scratch.logits, scratch.workspace], first, rows)
    })
}

/// Statistics [m, 3] of the logits of x [m, d] by w [v, d], the rows of the vocabulary from
/// `first_token` on. `scratch`: logits [chunk_rows, v], and that of products.
pub(crate) fn vocabulary_statistics(
    gpu: &Arc<Cuda>,
    [x, w, targets]: [&Tensor; 3],
    first_token: usize,
    statistics: &Tensor,
    [logits, workspace]: [&Tensor; 2],
) -> Result<()> {
    let v = w.rows();
    for_chunks(gpu, [x, w], logits, workspace, |Chunk { first, rows, logits }| {
        let (targets, out) = (Arg::Part(targets, 4 * first, 4 * rows), Arg::Part(statistics, 12 * first, 12 * rows));
        let args = args![logits, targets, out, rows, v, v, first_token];
        gpu.launch(&k::CROSS_ENTROPY_STATISTICS, x.dtype(), [rows, v, 1], args)
    })
}

/// Losses and lse [m] from the statistics of all parts of the vocabulary, [parts m, 3].
pub(crate) fn merge_statistics(
    gpu: &Arc<Cuda>,
    [statistics, targets]: [&Tensor; 2],
    [losses, lse]: [&Tensor; 2],
) -> Result<()> {
    let m = targets.elements();
    let args = args![statistics, targets, losses, lse, m, statistics.rows() / m.max(1)];
    gpu.launch(&k::MERGE_STATISTICS, DType::F32, [m, 1, 1], args)
}

/// The gradients of the rows of the vocabulary from `first_token` on, given lse [m].
pub(crate) fn part_gradients(
    gpu: &Arc<Cuda>,
    [x, w, targets, lse]: [&Tensor; 4],
    first_token: usize,
    gradients: HeadGradients<'_, '_>,
    [logits_of_chunk, workspace]: [&Tensor; 2],
) -> Result<()> {
    let v = w.rows();
    for_chunks(gpu, [x, w], logits_of_chunk, workspace, |Chunk { first, rows, logits }| {
        let chunk = |tensor| Arg::Part(tensor, 4 * first, 4 * rows);
        let varying = gpu.varying_scale(gradients.scale)?;
        let (scale, scale_at) = (gradients.scale, Arg::from(varying.as_ref()));
        let args = args![logits, chunk(targets), chunk(lse), rows, v, v, first_token, scale, scale_at];
        gpu.launch(&k::CROSS_ENTROPY_PART_GRADIENT, x.dtype(), [rows, v, 1], args)?;
        gradients.take(gpu, [x, w], [logits_of_chunk, workspace], first, rows)
    })
}

/// The logits of the rows `first .. first + rows`.
struct Chunk<'a> {
    first: usize,
    rows: usize,
    logits: Arg<'a>,
}

/// Runs `body` on the logits of x [m, d] by w [v, d], one chunk of rows after the other.
fn for_chunks(
    gpu: &Arc<Cuda>,
    [x, w]: [&Tensor; 2],
    logits: &Tensor,
    workspace: &Tensor,
    mut body: impl FnMut(Chunk<'_>) -> Result<()>,
) -> Result<()> {
    let (m, d, v) = (x.rows(), x.last_dim(), w.rows());
    let (dtype, size) = (x.dtype(), x.dtype().size());
    for first in (0..m).step_by(logits.rows().max(1)) {
        let rows = logits.rows().min(m - first);
        let form = Product { b_transposed: true, ..plain(OP, [rows, v, d], dtype, dtype)? };
        let x_rows = part(x.region(false), first * d * size, rows * d * size);
        let to = part(logits.region(true), 0, rows * v * size);
        gpu.product(&form, &operands(x_rows, w.region(false), to, workspace))?;
        body(Chunk { first, rows, logits: Arg::Part(logits, 0, rows * v * size) })?;
    }
    Ok(())
}

impl HeadGradients<'_, '_> {
    /// Adds what follows from the gradient of the logits of a chunk. `scratch`: those logits, and
    /// that of products.
    fn take(
        &self,
        gpu: &Arc<Cuda>,
        [x, w]: [&Tensor; 2],
        [logits, workspace]: [&Tensor; 2],
        first: usize,
        rows: usize,
    ) -> Result<()> {
        let (d, v) = (x.last_dim(), w.rows());
        let (dtype, size) = (x.dtype(), x.dtype().size());
        let dlogits = || part(logits.region(false), 0, rows * v * size);
        let rows_of = |region: Region| part(region, first * d * size, rows * d * size);
        let form = plain(OP, [rows, d, v], dtype, dtype)?;
        gpu.product(&form, &operands(dlogits(), w.region(false), rows_of(self.dx.region(true)), workspace))?;
        let Some((dw, overwrite)) = self.dw else { return Ok(()) };
        let overwrite = *overwrite && first == 0;
        weight_gradient(gpu, dlogits(), rows_of(x.region(false)), dw, rows, dtype, overwrite, workspace)
    }
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
