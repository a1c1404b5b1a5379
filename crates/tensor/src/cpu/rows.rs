//! Helpers of kernels that stream over rows: the cut into tasks, and loops over lanes with ragged
//! ends.
//!
//! Tasks are cut by shape alone, never by the number of threads, so results are the same on any
//! number. Work that one core finishes in a few microseconds is not worth a parallel region (a
//! region costs one to two) and runs on the caller.

use crate::cpu::Cpu;
use crate::cpu::simd::Simd;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use std::ops::Range;

/// Below this much traffic the caller works alone: at 10 to 30 GB/s a core, 2 to 7 microseconds.
const REGION_BYTES: usize = 64 << 10;
/// Least and most traffic of one task: enough to hide the dealing, little enough to balance.
const TASK_BYTES: Range<usize> = 32 << 10..1 << 20;
/// Tasks of elementwise kernels start at multiples of this many elements: a whole number of cache
/// lines for every dtype and of random-number groups.
pub(crate) const ELEMENTS_ALIGN: usize = 128;
/// Sums over rows are made in at most this many blocks.
const ROW_BLOCKS: usize = 64;

/// Units of `unit_bytes` traffic that one task takes, of `units` in all.
fn grain(units: usize, unit_bytes: usize) -> usize {
    let total = units.saturating_mul(unit_bytes);
    if total <= REGION_BYTES {
        return units.max(1);
    }
    (total / 64).clamp(TASK_BYTES.start, TASK_BYTES.end) / unit_bytes.max(1) + 1
}

/// Runs `body` on `tasks` tasks, in parallel when they move enough bytes together.
pub(crate) fn for_tasks(cpu: &Cpu, tasks: usize, total_bytes: usize, body: impl Fn(usize) + Sync) {
    if total_bytes <= REGION_BYTES { (0..tasks).for_each(body) } else { cpu.threads.for_each(tasks, body) }
}

/// Cuts `0..rows` into ranges by their traffic and runs `body` on each.
pub(crate) fn for_rows(cpu: &Cpu, rows: usize, row_bytes: usize, body: impl Fn(Range<usize>) + Sync) {
    cpu.threads.for_ranges(rows, grain(rows, row_bytes), body);
}

/// Cuts `0..len` elements into ranges that start at multiples of [`ELEMENTS_ALIGN`] and runs `body`
/// on each.
pub(crate) fn for_elements(cpu: &Cpu, len: usize, element_bytes: usize, body: impl Fn(Range<usize>) + Sync) {
    cpu.threads.for_ranges(len, grain(len, element_bytes).next_multiple_of(ELEMENTS_ALIGN), body);
}

/// Rows of one block of a sum over rows: a function of the number of rows alone.
pub(crate) fn block_rows(rows: usize) -> usize {
    rows.div_ceil(ROW_BLOCKS).max(ROW_BLOCKS)
}

/// Blocks of a sum over `rows` rows.
pub(crate) fn blocks(rows: usize) -> usize {
    rows.div_ceil(block_rows(rows))
}

/// `total[j] += sum over b of partials[b * total.len() + j]`, in the order of `b`.
pub(crate) fn sum_blocks(cpu: &Cpu, partials: &[f32], total: &mut [f32]) {
    let dim = total.len();
    let count = partials.len().checked_div(dim).unwrap_or(0);
    let total = Shares::new(total);
    for_elements(cpu, dim, 4 * (count + 2), |columns| {
        // SAFETY: the ranges of a region do not overlap.
        let total = unsafe { total.part(columns.clone()) };
        for block in 0..count {
            let block = &partials[block * dim..][columns.clone()];
            for (total, part) in total.iter_mut().zip(block) {
                *total += part;
            }
        }
    });
}

/// Lanes `i..` of `x`, filled up with `fill` where `x` ends; all `fill` beyond.
#[inline(always)]
pub(crate) fn load_at<S: Simd, T: Element>(s: S, x: &[T], i: usize, fill: f32) -> S::F {
    if i + S::LANES <= x.len() {
        // SAFETY: just checked.
        T::load(s, unsafe { x.get_unchecked(i..i + S::LANES) })
    } else {
        s.load_tail(x.get(i..).unwrap_or(&[]), fill)
    }
}

/// Stores to `y[i..]` as many lanes as it has room for.
#[inline(always)]
pub(crate) fn store_at<S: Simd, T: Element>(s: S, v: S::F, y: &mut [T], i: usize) {
    if i + S::LANES <= y.len() {
        // SAFETY: just checked.
        T::store(s, v, unsafe { y.get_unchecked_mut(i..i + S::LANES) })
    } else {
        s.store_tail(v, y.get_mut(i..).unwrap_or(&mut []));
    }
}

/// The sum of four running sums, which are kept so that additions overlap.
#[inline(always)]
pub(crate) fn total<S: Simd>(s: S, acc: [S::F; 4]) -> f32 {
    s.reduce_sum(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
}

/// A reduction that takes vectors one after another into a running one.
pub(crate) trait Fold: Copy {
    /// The value read beyond the end of a row. It changes no running value.
    fn fill(self) -> f32;
    fn take<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F;
}

/// Folds `x` into four running vectors that start as `start`.
#[inline(always)]
pub(crate) fn fold<S: Simd, T: Element, R: Fold>(s: S, reduction: R, start: f32, x: &[T]) -> [S::F; 4] {
    let mut acc = [s.splat(start); 4];
    let mut blocks = x.chunks_exact(4 * S::LANES);
    for block in &mut blocks {
        for (k, acc) in acc.iter_mut().enumerate() {
            *acc = reduction.take(s, *acc, T::load(s, &block[k * S::LANES..(k + 1) * S::LANES]));
        }
    }
    let rest = blocks.remainder();
    let mut i = 0;
    while i < rest.len() {
        acc[0] = reduction.take(s, acc[0], load_at(s, rest, i, reduction.fill()));
        i += S::LANES;
    }
    acc
}

#[derive(Clone, Copy)]
struct Sum;
impl Fold for Sum {
    #[inline(always)]
    fn fill(self) -> f32 {
        0.0
    }
    #[inline(always)]
    fn take<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.add(acc, x)
    }
}

#[derive(Clone, Copy)]
struct SquaresAbout(f32);
impl Fold for SquaresAbout {
    #[inline(always)]
    fn fill(self) -> f32 {
        self.0
    }
    #[inline(always)]
    fn take<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        let d = s.sub(x, s.splat(self.0));
        s.fma(d, d, acc)
    }
}

#[derive(Clone, Copy)]
struct Largest;
impl Fold for Largest {
    #[inline(always)]
    fn fill(self) -> f32 {
        f32::NEG_INFINITY
    }
    #[inline(always)]
    fn take<S: Simd>(self, s: S, acc: S::F, x: S::F) -> S::F {
        s.max(x, acc)
    }
}

/// The sum of `x` in `f32`.
#[inline(always)]
pub(crate) fn sum<S: Simd, T: Element>(s: S, x: &[T]) -> f32 {
    total(s, fold(s, Sum, 0.0, x))
}

/// The sum of `(x - centre)^2` in `f32`.
#[inline(always)]
pub(crate) fn sum_of_squares_about<S: Simd, T: Element>(s: S, x: &[T], centre: f32) -> f32 {
    total(s, fold(s, SquaresAbout(centre), 0.0, x))
}

/// The largest of `x`; negative infinity of nothing. NaN is passed over.
#[inline(always)]
pub(crate) fn largest<S: Simd, T: Element>(s: S, x: &[T]) -> f32 {
    let acc = fold(s, Largest, f32::NEG_INFINITY, x);
    s.reduce_max(s.max(s.max(acc[0], acc[1]), s.max(acc[2], acc[3])))
}
