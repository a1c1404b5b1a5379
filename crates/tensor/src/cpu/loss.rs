//! Softmax cross-entropy over rows of logits, fused.
//!
//! The loss of a row is `lse - x[target]`, `lse = log sum exp x`; its gradient is
//! `softmax(x) - onehot(target)`. The gradient is written over the logits, which are needed no
//! more. `lse` is made in one pass: a row is walked in blocks that stay in the first-level cache,
//! the sum being rescaled when a block holds a new maximum (Milakov & Gimelshein 2018). Traffic:
//! logits in (forward), in and out (backward); about 20 FLOPs an element each way.
//!
//! Rows whose target is [`IGNORE`] have loss 0 and gradient 0. Label smoothing and z-loss are not
//! offered. A NaN among the logits makes the row's loss NaN.

use crate::cpu::Cpu;
use crate::cpu::embedding::IndexError;
use crate::cpu::rows::{Fold, fold, for_rows, largest, load_at, store_at, total};
use crate::cpu::simd::Simd;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

/// The target of a row that does not count (Hugging Face's and PyTorch's value).
pub const IGNORE: i32 = -100;

/// Elements whose maximum is found before they are exponentiated: 4 to 8 KiB.
const BLOCK: usize = 2048;

/// Checks that every target is in `0..vocab` or [`IGNORE`]; returns how many count.
pub fn check_targets(targets: &[i32], vocab: usize) -> Result<usize, IndexError> {
    let outside = |target: &i32| *target != IGNORE && (*target < 0 || *target as usize >= vocab);
    match targets.iter().position(outside) {
        None => Ok(targets.iter().filter(|target| **target != IGNORE).count()),
        Some(entry) => Err(IndexError { what: "target", index: targets[entry], entry, limit: vocab }),
    }
}

/// The statistics of rows of logits, one number per row in each.
#[derive(Debug)]
pub struct RowLosses<'a> {
    /// `lse - x[target]`, 0 where ignored.
    pub loss: &'a mut [f32],
    /// The logarithm of the sum of exponentials.
    pub lse: &'a mut [f32],
    /// 1 where no logit is larger than the target's, else 0.
    pub hit: Option<&'a mut [u32]>,
}

impl RowLosses<'_> {
    fn check(&self, rows: usize) {
        assert_eq!((self.loss.len(), self.lse.len()), (rows, rows), "lengths of loss and lse");
        assert_eq!(self.hit.as_ref().map_or(rows, |hit| hit.len()), rows, "length of hit");
    }
}

fn rows_of(len: usize, vocab: usize, rows: usize) {
    assert!(vocab > 0, "cross-entropy over no classes");
    assert_eq!(len, rows * vocab, "{rows} targets for {len} logits of {vocab} classes");
}

/// Losses of `logits` `[targets.len(), vocab]`.
///
/// # Errors
/// When a target is neither a class nor [`IGNORE`].
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn cross_entropy<T: Element>(
    cpu: &Cpu,
    vocab: usize,
    logits: &[T],
    targets: &[i32],
    out: RowLosses<'_>,
) -> Result<(), IndexError> {
    rows_of(logits.len(), vocab, targets.len());
    check_targets(targets, vocab)?;
    out.check(targets.len());
    let (loss, lse, hit) = (Shares::new(out.loss), Shares::new(out.lse), out.hit.map(Shares::new));
    for_rows(cpu, targets.len(), vocab * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let (loss, lse) = unsafe { (loss.part(range.clone()), lse.part(range.clone())) };
        // SAFETY: as above.
        let hit = hit.as_ref().map(|hit| unsafe { hit.part(range.clone()) });
        let logits = &logits[range.start * vocab..range.end * vocab];
        stats_of_rows(cpu.isa, vocab, logits, &targets[range], RowLosses { loss, lse, hit });
    });
    Ok(())
}

/// Turns `logits` into `(softmax - onehot) * scale` given their `lse`; rows that are ignored become
/// 0.
///
/// # Errors
/// When a target is neither a class nor [`IGNORE`]; the logits are as before then.
pub fn cross_entropy_backward<T: Element>(
    cpu: &Cpu,
    vocab: usize,
    logits: &mut [T],
    targets: &[i32],
    lse: &[f32],
    scale: f32,
) -> Result<(), IndexError> {
    rows_of(logits.len(), vocab, targets.len());
    check_targets(targets, vocab)?;
    assert_eq!(lse.len(), targets.len(), "length of lse");
    let logits = Shares::new(logits);
    for_rows(cpu, targets.len(), 2 * vocab * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let logits = unsafe { logits.part(range.start * vocab..range.end * vocab) };
        gradient_of_rows(cpu.isa, vocab, logits, &targets[range.clone()], &lse[range], scale);
    });
    Ok(())
}

/// [`cross_entropy`] and [`cross_entropy_backward`] in one pass over memory: the losses, and
/// `logits` turned into their gradient. The `lse` of ignored rows is 0 here.
///
/// # Errors
/// When a target is neither a class nor [`IGNORE`]; the logits are as before then.
pub fn cross_entropy_in_place<T: Element>(
    cpu: &Cpu,
    vocab: usize,
    logits: &mut [T],
    targets: &[i32],
    scale: f32,
    out: RowLosses<'_>,
) -> Result<(), IndexError> {
    rows_of(logits.len(), vocab, targets.len());
    check_targets(targets, vocab)?;
    out.check(targets.len());
    let (loss, lse, hit) = (Shares::new(out.loss), Shares::new(out.lse), out.hit.map(Shares::new));
    let logits = Shares::new(logits);
    for_rows(cpu, targets.len(), 2 * vocab * size_of::<T>(), |range| {
        for row in range {
            // SAFETY: every row belongs to one range.
            let logits = unsafe { logits.part(row * vocab..(row + 1) * vocab) };
            let found = loss_row(cpu.isa, logits, targets[row], Some(scale));
            // SAFETY: as above.
            unsafe {
                loss.part(row..row + 1)[0] = found.loss;
                lse.part(row..row + 1)[0] = found.lse;
            }
            if let Some(hit) = &hit {
                // SAFETY: as above.
                unsafe { hit.part(row..row + 1)[0] = u32::from(found.hit) };
            }
        }
    });
    Ok(())
}

/// The sum of `e^((x - max) / T)`; `inverse` is 1 / T.
#[derive(Clone, Copy)]
struct ExpAbout {
    max: f32,
    inverse: f32,
}

impl Fold for ExpAbout {
    #[inline(always)]
    fn fill(self) -> f32 {
        f32::NEG_INFINITY
    }
    #[inline(always)]
    fn take<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        let x = s.mul(s.sub(x, s.splat(self.max)), s.splat(self.inverse));
        s.add(acc, s.exp_nonpositive(x))
    }
}

/// The largest of `x`, and the sum of exponentials of the differences from it, which are multiplied
/// by `inverse` before. With a constant of 1 the compiler leaves the products out.
#[inline(always)]
fn max_and_sum<S: Simd, T: Element>(s: S, x: &[T], inverse: f32) -> (f32, f32) {
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0f32);
    for block in x.chunks(BLOCK) {
        let larger = largest(s, block).max(max);
        if larger > max {
            sum *= ((max - larger) * inverse).exp();
            max = larger;
        }
        sum += total(s, fold(s, ExpAbout { max, inverse }, 0.0, block));
    }
    (max, sum)
}

/// The largest of `x` and the logarithm of the sum of exponentials.
#[inline(always)]
pub(crate) fn max_and_lse<S: Simd, T: Element>(s: S, x: &[T]) -> (f32, f32) {
    max_and_lse_at(s, x, 1.0)
}

/// The largest of `x`, and `log sum exp(x / T)`; `inverse` is 1 / T.
#[inline(always)]
pub(crate) fn max_and_lse_at<S: Simd, T: Element>(s: S, x: &[T], inverse: f32) -> (f32, f32) {
    let (max, sum) = max_and_sum(s, x, inverse);
    (max, max * inverse + sum.ln())
}

simd_fn! {
    fn stats_of_rows[T: Element](s: S, vocab: usize, logits: &[T], targets: &[i32], out: RowLosses<'_>) {
        let mut out = out;
        for (row, (x, target)) in logits.chunks_exact(vocab).zip(targets).enumerate() {
            let (max, lse) = max_and_lse(s, x);
            out.lse[row] = lse;
            let (loss, hit) = match *target {
                IGNORE => (0.0, 0),
                target => {
                    let logit = x[target as usize].to_f32();
                    (lse - logit, u32::from(logit >= max))
                }
            };
            out.loss[row] = loss;
            if let Some(hits) = out.hit.as_deref_mut() {
                hits[row] = hit;
            }
        }
    }
}

/// The result of one row of logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LossRow {
    pub loss: f32,
    pub lse: f32,
    pub hit: bool,
}

simd_fn! {
    /// One row's loss, and the row turned into its gradient when there is a `scale`.
    pub(crate) fn loss_row[T: Element](s: S, x: &mut [T], target: i32, scale: Option<f32>) -> LossRow {
        if target == IGNORE {
            if scale.is_some() {
                x.fill(T::default());
            }
            return LossRow { loss: 0.0, lse: 0.0, hit: false };
        }
        let (max, lse) = max_and_lse(s, x);
        let logit = x[target as usize].to_f32();
        if let Some(scale) = scale {
            gradient_row(s, x, Some(target as usize), lse, scale);
        }
        LossRow { loss: lse - logit, lse, hit: logit >= max }
    }
}

#[inline(always)]
fn gradient_row<S: Simd, T: Element>(s: S, x: &mut [T], target: Option<usize>, lse: f32, scale: f32) {
    let at_target = target.map(|target| (target, ((x[target].to_f32() - lse).exp() - 1.0) * scale));
    if scale > 0.0 {
        // The scale goes into the exponent: e^(x - lse + ln scale). Not so large a one that it
        // overflows there.
        let shift = s.splat(lse - scale.ln());
        let mut i = 0;
        while i < x.len() {
            store_at(s, s.exp(s.sub(load_at(s, x, i, 0.0), shift)), x, i);
            i += S::LANES;
        }
    } else {
        let (shift, factor) = (s.splat(lse), s.splat(scale));
        let mut i = 0;
        while i < x.len() {
            store_at(s, s.mul(s.exp(s.sub(load_at(s, x, i, 0.0), shift)), factor), x, i);
            i += S::LANES;
        }
    }
    if let Some((target, gradient)) = at_target {
        x[target] = T::from_f32(gradient);
    }
}

/// The statistics of a row of which only some logits are here, for [`merge_statistics`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PartStatistics {
    /// The largest logit here.
    pub max: f32,
    /// The sum of exponentials of the differences from it.
    pub sum: f32,
    /// The target's logit; 0 if it is elsewhere.
    pub logit: f32,
}

impl PartStatistics {
    /// Numbers of a row in memory.
    pub const NUMBERS: usize = 3;
}

simd_fn! {
    /// The statistics of the logits of a row that are here; `target` is None if it is elsewhere.
    pub(crate) fn part_statistics[T: Element](s: S, x: &[T], target: Option<usize>) -> PartStatistics {
        let (max, sum) = max_and_sum(s, x, 1.0);
        PartStatistics { max, sum, logit: target.map_or(0.0, |target| x[target].to_f32()) }
    }
}

simd_fn! {
    /// Turns a row's logits that are here into their gradient, given the `lse` of all of them.
    pub(crate) fn part_gradient[T: Element](s: S, x: &mut [T], target: Option<usize>, lse: f32, scale: f32) {
        gradient_row(s, x, target, lse, scale);
    }
}

/// Losses and `lse` of rows whose logits lie in several parts: `statistics` is
/// `[parts, targets.len(), 3]`, of each part and row the largest logit, the sum of exponentials of
/// the differences from it, and the target's logit or 0. The logarithm of the sum over parts
/// follows from these, in the order of parts (Milakov & Gimelshein 2018, equation 4). Rows that are
/// ignored have 0 in both results.
///
/// # Panics
/// When the lengths disagree.
pub fn merge_statistics(statistics: &[f32], targets: &[i32], loss: &mut [f32], lse: &mut [f32]) {
    const N: usize = PartStatistics::NUMBERS;
    let rows = targets.len();
    assert_eq!((loss.len(), lse.len()), (rows, rows), "lengths of loss and lse");
    assert!(statistics.len().is_multiple_of((N * rows).max(1)), "{} numbers for {rows} rows", statistics.len());
    for (row, target) in targets.iter().enumerate() {
        if *target == IGNORE {
            (loss[row], lse[row]) = (0.0, 0.0);
            continue;
        }
        let parts = || statistics[N * row..].chunks(N * rows).map(|part| (part[0], part[1], part[2]));
        let max = parts().fold(f32::NEG_INFINITY, |max, (part, ..)| max.max(part));
        let (mut sum, mut logit) = (0.0, 0.0);
        for (part, exponentials, at_target) in parts() {
            sum += exponentials * (part - max).exp();
            logit += at_target;
        }
        lse[row] = max + sum.ln();
        loss[row] = lse[row] - logit;
    }
}

simd_fn! {
    fn gradient_of_rows[T: Element](s: S, vocab: usize, logits: &mut [T], targets: &[i32], lse: &[f32], scale: f32) {
        for (x, (target, lse)) in logits.chunks_exact_mut(vocab).zip(targets.iter().zip(lse)) {
            if *target == IGNORE {
                x.fill(T::default());
                continue;
            }
            gradient_row(s, x, Some(*target as usize), *lse, scale);
        }
    }
}
