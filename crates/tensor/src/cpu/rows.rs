//! What kernels that stream over rows share: how work is cut into tasks, and loops over lanes with ragged ends.
//!
//! Tasks are cut by shape alone, never by the number of threads, so results are the same on any number. Work that one
//! core finishes in a few microseconds is not worth a parallel region (a region costs one to two) and runs on the caller.

use crate::cpu::Cpu;
use crate::cpu::simd::Simd;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use std::ops::Range;

/// Below this much traffic the caller works alone: at 10 to 30 GB/s a core, 2 to 7 microseconds.
const REGION_BYTES: usize = 64 << 10;
/// Least and most traffic of one task: enough to hide the dealing, little enough to balance.
const TASK_BYTES: Range<usize> = 32 << 10..1 << 20;
/// Tasks of elementwise kernels start at multiples of this many elements: a whole number of cache lines for every
/// dtype and of random-number groups.
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

/// Cuts `0..len` elements into ranges that start at multiples of [`ELEMENTS_ALIGN`] and runs `body` on each.
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
        T::load_partial(s, x.get(i..).unwrap_or(&[]), fill)
    }
}

/// Stores to `y[i..]` as many lanes as it has room for.
#[inline(always)]
pub(crate) fn store_at<S: Simd, T: Element>(s: S, v: S::F, y: &mut [T], i: usize) {
    if i + S::LANES <= y.len() {
        // SAFETY: just checked.
        T::store(s, v, unsafe { y.get_unchecked_mut(i..i + S::LANES) })
    } else {
        T::store_partial(s, v, y.get_mut(i..).unwrap_or(&mut []));
    }
}

/// Four running sums, so that additions overlap.
#[inline(always)]
pub(crate) fn total<S: Simd>(s: S, acc: [S::F; 4]) -> f32 {
    s.reduce_sum(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
}

/// The sum of `x` in `f32`.
#[inline(always)]
pub(crate) fn sum<S: Simd, T: Element>(s: S, x: &[T]) -> f32 {
    let mut acc = [s.splat(0.0); 4];
    let mut i = 0;
    while i < x.len() {
        for (k, acc) in acc.iter_mut().enumerate() {
            *acc = s.add(*acc, load_at(s, x, i + k * S::LANES, 0.0));
        }
        i += 4 * S::LANES;
    }
    total(s, acc)
}

/// The sum of `(x - centre)^2` in `f32`.
#[inline(always)]
pub(crate) fn sum_of_squares_about<S: Simd, T: Element>(s: S, x: &[T], centre: f32) -> f32 {
    let mut acc = [s.splat(0.0); 4];
    let c = s.splat(centre);
    let mut i = 0;
    while i < x.len() {
        for (k, acc) in acc.iter_mut().enumerate() {
            let d = s.sub(load_at(s, x, i + k * S::LANES, centre), c);
            *acc = s.fma(d, d, *acc);
        }
        i += 4 * S::LANES;
    }
    total(s, acc)
}

/// The largest of `x`; negative infinity of nothing. NaN is passed over.
#[inline(always)]
pub(crate) fn largest<S: Simd, T: Element>(s: S, x: &[T]) -> f32 {
    let mut acc = [s.splat(f32::NEG_INFINITY); 4];
    let mut i = 0;
    while i < x.len() {
        for (k, acc) in acc.iter_mut().enumerate() {
            *acc = s.max(load_at(s, x, i + k * S::LANES, f32::NEG_INFINITY), *acc);
        }
        i += 4 * S::LANES;
    }
    s.reduce_max(s.max(s.max(acc[0], acc[1]), s.max(acc[2], acc[3])))
}
