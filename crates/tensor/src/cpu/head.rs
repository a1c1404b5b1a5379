//! The language-model head fused with cross-entropy, in chunks of tokens: logits of all tokens
//! never exist.
//!
//! For a chunk of rows of the final hidden states: `logits = x wᵀ`, losses, `dlogits` over the
//! logits, `dx = dlogits w`, `dw += dlogitsᵀ x`. Backward is thus done at forward time, which the
//! loss allows because its own incoming gradient is a factor known beforehand, `scale`.
//!
//! Every chunk reads and writes all of `dw` in `f32`, so chunks must be long: with GPT-2's
//! vocabulary 154 MB each way against `6 rows vocab dim` FLOPs. [`chunk_rows`] takes the longest
//! chunk whose logits fit [`CHUNK_BYTES`]. The chunk lies in a workspace of the caller.
//!
//! The rounding of logits to the storage dtype is part of the model, as it is in other frameworks'
//! mixed precision. Results depend on the chunk length only through the order in which `dw` is
//! summed: not at all, because products continue their sums.

use crate::cpu::Cpu;
use crate::cpu::embedding::IndexError;
use crate::cpu::gemm::{
    Accumulate, Epilogue, GradientEpilogue, MatMut, MatRef, Weight, forward, input_gradient, weight_gradient,
};
use crate::cpu::loss::{LossRow, check_targets, loss_row};
use crate::cpu::rows::for_rows;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of logits that a chunk may take: at GPT-2's vocabulary 1,334 tokens in 16 bits.
pub const CHUNK_BYTES: usize = 128 << 20;

/// The result of the head's loss.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadLoss {
    /// The sum of the losses of the tokens that count, in token order.
    pub loss_sum: f64,
    /// Tokens whose target is not [`IGNORE`](crate::cpu::loss::IGNORE).
    pub tokens: usize,
    /// Of those, the ones for which no logit is larger than the target's.
    pub correct: usize,
}

/// The gradients that [`linear_cross_entropy`] makes.
#[derive(Debug)]
pub struct HeadGradients<'a, T> {
    /// The factor on the gradient of every token's loss: usually one over the tokens of the step,
    /// times the loss scale.
    pub scale: f32,
    /// `[tokens, dim]`, written.
    pub dx: Option<MatMut<'a, T>>,
    /// `[vocab, dim]` contiguous.
    pub dw: Option<&'a mut [f32]>,
    /// Overwrites `dw`, or adds to it.
    pub accumulate: Accumulate,
}

/// Elements from row to row of a chunk's logits: whole cache lines.
fn stride(vocab: usize) -> usize {
    vocab.next_multiple_of(32)
}

/// Rows of a chunk: the tokens cut into the fewest chunks of at most [`CHUNK_BYTES`], evenly, in
/// multiples of 32.
pub fn chunk_rows<T>(tokens: usize, vocab: usize) -> usize {
    let most = (CHUNK_BYTES / (stride(vocab) * size_of::<T>()).max(1) / 32 * 32).max(32);
    let chunks = tokens.div_ceil(most).max(1);
    tokens.div_ceil(chunks).next_multiple_of(32).min(tokens.max(1))
}

/// Elements of workspace for chunks of `rows` rows.
pub fn workspace(rows: usize, vocab: usize) -> usize {
    rows * stride(vocab)
}

/// The loss of `x wᵀ` against `targets`, and its gradients: `x` is `[tokens, dim]`, `w`
/// `[vocab, dim]`.
///
/// Without `gradients` only the loss is made (evaluation). `losses` `[tokens]` receives every
/// token's loss, 0 where ignored. `workspace` holds at least one row of logits, see
/// [`workspace()`]; its length decides the chunks. FLOPs: `2 tokens vocab dim`, three times that
/// with both gradients.
///
/// # Errors
/// When a target is neither a token nor [`IGNORE`](crate::cpu::loss::IGNORE); nothing is written
/// then.
///
/// # Panics
/// When the shapes disagree or the workspace holds no row.
pub fn linear_cross_entropy<T: Element>(
    cpu: &Cpu,
    x: MatRef<'_, T>,
    w: Weight<'_, T>,
    targets: &[i32],
    gradients: Option<HeadGradients<'_, T>>,
    losses: &mut [f32],
    workspace: &mut [T],
) -> Result<HeadLoss, IndexError> {
    let (tokens, vocab) = (x.rows(), w.plain.rows());
    assert_eq!((targets.len(), losses.len()), (tokens, tokens), "lengths of targets and losses");
    let counted = check_targets(targets, vocab)?;
    let stride = stride(vocab);
    let chunk = (workspace.len() / stride.max(1)).min(tokens.max(1));
    assert!(chunk > 0, "a workspace of {} elements for rows of {stride}", workspace.len());
    let mut gradients = gradients;
    let correct = AtomicUsize::new(0);
    for first in (0..tokens).step_by(chunk) {
        let range = first..(first + chunk).min(tokens);
        let x = x.row_range(range.clone());
        let logits = &mut workspace[..range.len() * stride];
        forward(cpu, x, w, Epilogue::default(), MatMut::with_stride(&mut *logits, range.len(), vocab, stride));
        let scale = gradients.as_ref().map(|gradients| gradients.scale);
        let (targets, losses) = (&targets[range.clone()], &mut losses[range.clone()]);
        correct.fetch_add(chunk_losses(cpu, vocab, logits, targets, scale, losses), Ordering::Relaxed);
        let Some(gradients) = gradients.as_mut() else { continue };
        let dlogits = MatRef::with_stride(logits, range.len(), vocab, stride);
        if let Some(dx) = gradients.dx.as_mut() {
            input_gradient(cpu, dlogits, w, GradientEpilogue::default(), dx.rows_mut(range));
        }
        if let Some(dw) = gradients.dw.as_deref_mut() {
            let accumulate = if first == 0 { gradients.accumulate } else { Accumulate::Add };
            weight_gradient(cpu, dlogits, x, dw, accumulate, None);
        }
    }
    if let (0, Some(HeadGradients { dw: Some(dw), accumulate: Accumulate::Overwrite, .. })) = (tokens, gradients) {
        dw.fill(0.0);
    }
    let loss_sum = losses.iter().map(|loss| f64::from(*loss)).sum();
    Ok(HeadLoss { loss_sum, tokens: counted, correct: correct.into_inner() })
}

/// Losses of a chunk, and its logits turned into their gradient when there is a `scale`; returns
/// the hits.
fn chunk_losses<T: Element>(
    cpu: &Cpu,
    vocab: usize,
    logits: &mut [T],
    targets: &[i32],
    scale: Option<f32>,
    losses: &mut [f32],
) -> usize {
    let stride = stride(vocab);
    let hits = AtomicUsize::new(0);
    let (logits, losses) = (Shares::new(logits), Shares::new(losses));
    for_rows(cpu, targets.len(), 2 * stride * size_of::<T>(), |range| {
        for row in range {
            // SAFETY: every row belongs to one range.
            let (x, loss) = unsafe { (logits.part(row * stride..row * stride + vocab), losses.part(row..row + 1)) };
            let LossRow { loss: value, hit, .. } = loss_row(cpu.isa, x, targets[row], scale);
            loss[0] = value;
            hits.fetch_add(usize::from(hit), Ordering::Relaxed);
        }
    });
    hits.into_inner()
}
