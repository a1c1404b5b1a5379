//! Dropout (Srivastava et al. 2014) whose mask is never stored.
//!
//! The mask is a function of [`RandomKey`] and the element's index, so backward is the same
//! function applied to the gradient. An element uses 16 random bits: eight elements share one
//! Philox call, and the drop probability is `p` rounded to a multiple of `2^-16`; kept elements are
//! scaled by the inverse of the exact keep probability, so that the expectation is preserved.
//! Traffic: 2 elements in and out (3 with a residual), about 6 integer operations an element.

use crate::cpu::Cpu;
use crate::cpu::philox::{GROUP, RandomKey};
use crate::cpu::rows::{ELEMENTS_ALIGN, for_elements, load_at, store_at};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

/// Elements whose bits come from one group of counters.
const GROUP_ELEMENTS: usize = 8 * GROUP;
const _: () = assert!(ELEMENTS_ALIGN.is_multiple_of(GROUP_ELEMENTS));

/// A drop probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropRate {
    /// Of 65,536 values of an element's bits, how many drop it.
    threshold: u32,
    /// The inverse of the keep probability.
    scale: f32,
}

/// A drop probability outside `[0, 1)`.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("dropout probability {0} is not in [0, 1)")]
pub struct DropRateError(pub f32);

impl DropRate {
    /// The rate nearest to `p`, `0 <= p < 1`.
    pub fn new(p: f32) -> Result<DropRate, DropRateError> {
        if !(0.0..1.0).contains(&p) {
            return Err(DropRateError(p));
        }
        let threshold = ((p * 65536.0).round() as u32).min(65535);
        Ok(DropRate { threshold, scale: 65536.0 / (65536 - threshold) as f32 })
    }

    /// Of 65,536 values of an element's bits, how many drop it.
    pub(crate) fn threshold(self) -> u32 {
        self.threshold
    }

    /// The probability with which an element is dropped, and the factor on kept ones.
    pub fn exact(self) -> (f32, f32) {
        (self.threshold as f32 / 65536.0, self.scale)
    }
}

/// `y = x mask scale` for elements `first..` of the site, or the same for gradients.
///
/// # Panics
/// When the lengths disagree.
pub fn dropout<T: Element>(cpu: &Cpu, key: RandomKey, first: u64, rate: DropRate, x: &[T], y: &mut [T]) {
    dropout_any(cpu, key, first, rate, x, None, y);
}

/// `y = residual + x mask scale`: [`dropout`] and the residual addition in one pass.
pub fn dropout_add<T: Element>(
    cpu: &Cpu,
    key: RandomKey,
    first: u64,
    rate: DropRate,
    x: &[T],
    residual: &[T],
    y: &mut [T],
) {
    dropout_any(cpu, key, first, rate, x, Some(residual), y);
}

fn dropout_any<T: Element>(
    cpu: &Cpu,
    key: RandomKey,
    first: u64,
    rate: DropRate,
    x: &[T],
    residual: Option<&[T]>,
    y: &mut [T],
) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    assert_eq!(residual.map_or(x.len(), <[T]>::len), x.len(), "length of the residual");
    // Elements of a group that begins before the first: with as many in front of them.
    let before = (first % GROUP_ELEMENTS as u64) as usize;
    let (mut first, mut x, mut residual, mut y) = (first, x, residual, y);
    if before != 0 {
        let count = x.len().min(GROUP_ELEMENTS - before);
        let ends = |x: &[T]| {
            let mut group = [T::default(); GROUP_ELEMENTS];
            group[before..before + count].copy_from_slice(&x[..count]);
            group
        };
        let mut group = [T::default(); GROUP_ELEMENTS];
        let added = residual.map(ends);
        drop_range(cpu.isa, key, first - before as u64, rate, &ends(x), added.as_ref().map(|r| &r[..]), &mut group);
        y[..count].copy_from_slice(&group[before..before + count]);
        first += count as u64;
        (x, residual, y) = (&x[count..], residual.map(|residual| &residual[count..]), &mut y[count..]);
    }
    let y = Shares::new(y);
    for_elements(cpu, x.len(), 3 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        let residual = residual.map(|residual| &residual[range.clone()]);
        drop_range(cpu.isa, key, first + range.start as u64, rate, &x[range], residual, y);
    });
}

simd_fn! {
    fn drop_range[T: Element](s: S, key: RandomKey, first: u64, rate: DropRate, x: &[T], residual: Option<&[T]>, y: &mut [T]) {
        let (zero, scale) = (s.splat(0.0), s.splat(rate.scale));
        let low = s.splat_u32(0xffff);
        // Kept when bits > threshold - 1, signed: a threshold of zero keeps all.
        let limit = s.splat_u32(rate.threshold.wrapping_sub(1));
        for start in (0..x.len()).step_by(GROUP_ELEMENTS) {
            let counter = (first + start as u64) / GROUP_ELEMENTS as u64 * GROUP as u64;
            for j in (0..GROUP).step_by(S::LANES) {
                let words = key.words(s, counter + j as u64);
                for k in 0..8 {
                    let i = start + k * GROUP + j;
                    if i >= x.len() {
                        break;
                    }
                    let word = words[k / 2];
                    let bits = if k % 2 == 0 { s.and_u32(word, low) } else { s.shr_u32(word, 16) };
                    let kept = s.select(s.gt_i32(bits, limit), s.mul(load_at(s, x, i, 0.0), scale), zero);
                    let v = match residual {
                        None => kept,
                        Some(residual) => s.add(kept, load_at(s, residual, i, 0.0)),
                    };
                    store_at(s, v, y, i);
                }
            }
        }
    }
}
