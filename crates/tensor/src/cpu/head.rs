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
//! Where ranks have a part of the vocabulary each, no rank has all logits of a row. Each makes
//! [`vocabulary_statistics`] of its own; from those of all ranks the loss follows
//! ([`merge_statistics`](crate::cpu::loss::merge_statistics)), and with it each rank makes its
//! [`part_gradients`].
//!
//! The rounding of logits to the storage dtype is part of the model, as it is in other frameworks'
//! mixed precision. Results depend on the chunk length only through the order in which `dw` is
//! summed: not at all, because products continue their sums.

use crate::cpu::Cpu;
use crate::cpu::embedding::{IndexError, TablePart};
use crate::cpu::gemm::{
    Accumulate, Epilogue, GradientEpilogue, MatMut, MatRef, Weight, forward, input_gradient, weight_gradient,
};
use crate::cpu::loss::{IGNORE, LossRow, PartStatistics, check_targets, loss_row, part_gradient, part_statistics};
use crate::cpu::rows::for_rows;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use std::ops::Range;
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
pub(crate) fn stride(vocab: usize) -> usize {
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
    let vocab = w.plain.rows();
    losses_in_chunks(cpu, x, w, targets, gradients, losses, workspace, |chunk, logits, scale, losses| {
        losses_of_rows(cpu, vocab, 2, logits, losses, |row, logits| {
            let LossRow { loss, hit, .. } = loss_row(cpu.isa, logits, targets[chunk.start + row], scale);
            (loss, hit)
        })
    })
}

/// The body of every loss of a whole head. For each chunk of rows, `of_chunk` is given their range,
/// their logits, the scale of gradients if there are any, and room for their losses. It turns the
/// logits into their gradient where there is a scale, and returns the hits. Arguments and errors
/// are those of [`linear_cross_entropy`].
pub(crate) fn losses_in_chunks<T: Element>(
    cpu: &Cpu,
    x: MatRef<'_, T>,
    w: Weight<'_, T>,
    targets: &[i32],
    mut gradients: Option<HeadGradients<'_, T>>,
    losses: &mut [f32],
    workspace: &mut [T],
    mut of_chunk: impl FnMut(Range<usize>, &mut [T], Option<f32>, &mut [f32]) -> usize,
) -> Result<HeadLoss, IndexError> {
    let (tokens, vocab) = (x.rows(), w.plain.rows());
    assert_eq!((targets.len(), losses.len()), (tokens, tokens), "lengths of targets and losses");
    let counted = check_targets(targets, vocab)?;
    let mut correct = 0;
    for_chunks(cpu, x, w, workspace, |chunk, logits| {
        let scale = gradients.as_ref().map(|gradients| gradients.scale);
        correct += of_chunk(chunk.clone(), logits, scale, &mut losses[chunk.clone()]);
        if let Some(gradients) = gradients.as_mut() {
            gradients.take(cpu, logits, x, w, chunk);
        }
    });
    if let Some(gradients) = gradients {
        gradients.finish(tokens);
    }
    let loss_sum = losses.iter().map(|loss| f64::from(*loss)).sum();
    Ok(HeadLoss { loss_sum, tokens: counted, correct })
}

/// Writes the losses of a chunk, which `of_row` makes of each row's number and logits, beside
/// whether it is a hit; returns the hits. Rows are read and written `passes` times.
pub(crate) fn losses_of_rows<T: Element>(
    cpu: &Cpu,
    vocab: usize,
    passes: usize,
    logits: &mut [T],
    losses: &mut [f32],
    of_row: impl Fn(usize, &mut [T]) -> (f32, bool) + Sync,
) -> usize {
    let (stride, rows, hits) = (stride(vocab), losses.len(), AtomicUsize::new(0));
    let (logits, losses) = (Shares::new(logits), Shares::new(losses));
    for_rows(cpu, rows, passes * stride * size_of::<T>(), |range| {
        for row in range {
            // SAFETY: every row belongs to one range.
            let (x, loss) = unsafe { (logits.part(row * stride..row * stride + vocab), losses.part(row..row + 1)) };
            let (value, hit) = of_row(row, x);
            loss[0] = value;
            hits.fetch_add(usize::from(hit), Ordering::Relaxed);
        }
    });
    hits.into_inner()
}

/// The statistics of the logits `x wᵀ` of which a `part` of the vocabulary is here, for
/// [`merge_statistics`](crate::cpu::loss::merge_statistics): `x` is `[tokens, dim]`, `w`
/// `[vocab of the part, dim]`, `out` `[tokens, 3]`. Rows that are ignored have 0 in all three.
///
/// # Errors
/// As [`linear_cross_entropy`].
///
/// # Panics
/// As [`linear_cross_entropy`].
pub fn vocabulary_statistics<T: Element>(
    cpu: &Cpu,
    x: MatRef<'_, T>,
    w: Weight<'_, T>,
    part: TablePart,
    targets: &[i32],
    out: &mut [f32],
    workspace: &mut [T],
) -> Result<(), IndexError> {
    const N: usize = PartStatistics::NUMBERS;
    let (tokens, vocab) = (x.rows(), w.plain.rows());
    assert_eq!((targets.len(), out.len()), (tokens, N * tokens), "lengths of targets and statistics");
    check_targets(targets, part.whole)?;
    let stride = stride(vocab);
    let out = Shares::new(out);
    for_chunks(cpu, x, w, workspace, |chunk, logits| {
        let logits = &*logits;
        for_rows(cpu, chunk.len(), stride * size_of::<T>(), |range| {
            for row in range {
                let (at, target) = (chunk.start + row, targets[chunk.start + row]);
                // SAFETY: every row belongs to one range of one chunk.
                let out = unsafe { out.part(N * at..N * (at + 1)) };
                if target == IGNORE {
                    out.fill(0.0);
                    continue;
                }
                let x = &logits[row * stride..row * stride + vocab];
                let PartStatistics { max, sum, logit } = part_statistics(cpu.isa, x, part.local(target, vocab));
                out.copy_from_slice(&[max, sum, logit]);
            }
        });
    });
    Ok(())
}

/// The gradients of the loss of logits of which a `part` of the vocabulary is here, given the `lse`
/// `[tokens]` of all logits of each row: `dx` is the summand of the gradient of `x` that comes from
/// this part. FLOPs: `2 tokens vocab dim`, and as many for each gradient.
///
/// # Errors
/// As [`linear_cross_entropy`].
///
/// # Panics
/// As [`linear_cross_entropy`].
pub fn part_gradients<T: Element>(
    cpu: &Cpu,
    x: MatRef<'_, T>,
    w: Weight<'_, T>,
    part: TablePart,
    targets: &[i32],
    lse: &[f32],
    mut gradients: HeadGradients<'_, T>,
    workspace: &mut [T],
) -> Result<(), IndexError> {
    let (tokens, vocab) = (x.rows(), w.plain.rows());
    assert_eq!((targets.len(), lse.len()), (tokens, tokens), "lengths of targets and lse");
    check_targets(targets, part.whole)?;
    let stride = stride(vocab);
    for_chunks(cpu, x, w, workspace, |chunk, logits| {
        let (shared, scale) = (Shares::new(&mut *logits), gradients.scale);
        for_rows(cpu, chunk.len(), 2 * stride * size_of::<T>(), |range| {
            for row in range {
                // SAFETY: every row belongs to one range.
                let x = unsafe { shared.part(row * stride..row * stride + vocab) };
                match targets[chunk.start + row] {
                    IGNORE => x.fill(T::default()),
                    target => part_gradient(cpu.isa, x, part.local(target, vocab), lse[chunk.start + row], scale),
                }
            }
        });
        gradients.take(cpu, logits, x, w, chunk);
    });
    gradients.finish(tokens);
    Ok(())
}

/// Runs `body` on the logits `x wᵀ` of one chunk of rows after the other; they lie in `workspace`.
fn for_chunks<T: Element>(
    cpu: &Cpu,
    x: MatRef<'_, T>,
    w: Weight<'_, T>,
    workspace: &mut [T],
    mut body: impl FnMut(Range<usize>, &mut [T]),
) {
    let (tokens, vocab) = (x.rows(), w.plain.rows());
    let stride = stride(vocab);
    let chunk = (workspace.len() / stride.max(1)).min(tokens.max(1));
    assert!(chunk > 0, "a workspace of {} elements for rows of {stride}", workspace.len());
    for first in (0..tokens).step_by(chunk) {
        let range = first..(first + chunk).min(tokens);
        let logits = &mut workspace[..range.len() * stride];
        let to = MatMut::with_stride(&mut *logits, range.len(), vocab, stride);
        forward(cpu, x.row_range(range.clone()), w, Epilogue::default(), to);
        body(range, logits);
    }
}

impl<T: Element> HeadGradients<'_, T> {
    /// Adds what follows from the gradient of the logits of the rows `range`.
    fn take(&mut self, cpu: &Cpu, dlogits: &[T], x: MatRef<'_, T>, w: Weight<'_, T>, range: Range<usize>) {
        let vocab = w.plain.rows();
        let dlogits = MatRef::with_stride(dlogits, range.len(), vocab, stride(vocab));
        if let Some(dx) = self.dx.as_mut() {
            input_gradient(cpu, dlogits, w, GradientEpilogue::default(), dx.rows_mut(range.clone()));
        }
        if let Some(dw) = self.dw.as_deref_mut() {
            let accumulate = if range.start == 0 { self.accumulate } else { Accumulate::Add };
            weight_gradient(cpu, dlogits, x.row_range(range), dw, accumulate, None);
        }
    }

    /// Zeroes what was to be overwritten, if there was nothing to write over it.
    fn finish(self, tokens: usize) {
        if let (0, Some(dw), Accumulate::Overwrite) = (tokens, self.dw, self.accumulate) {
            dw.fill(0.0);
        }
    }
}
