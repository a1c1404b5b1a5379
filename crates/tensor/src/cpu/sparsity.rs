//! Masks of weights that are zero, and stay zero: a bit for each weight.
//!
//! The smallest weights of a matrix are found by their bits. Magnitudes of floats have the order of
//! their bits as integers, so the threshold is found byte by byte from the top: a pass counts the
//! weights by their next byte, among those whose bytes before are the threshold's. After four
//! passes the threshold is exact, whatever the threads. Of equal magnitudes the first are taken.
//!
//! Traffic: 4 bytes a weight and pass. A mask costs a bit to write and to read.

use crate::cpu::Cpu;
use crate::cpu::rows::{ELEMENTS_ALIGN, for_elements, for_tasks};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Weights of one task, a multiple of 8 so that no two tasks share a byte of the mask.
const TASK: usize = 256 * ELEMENTS_ALIGN;

/// Bytes of the mask of `weights` weights.
pub fn mask_bytes(weights: usize) -> usize {
    weights.div_ceil(8)
}

/// The order of a weight among magnitudes.
fn magnitude(weight: f32) -> u32 {
    weight.to_bits() & 0x7fff_ffff
}

/// Writes the bytes of a mask by `is_masked`, which is given the place of a weight and its
/// magnitude. The places of `weights` begin at `first`.
fn write_bits(first: usize, weights: &[f32], mask: &mut [u8], mut is_masked: impl FnMut(usize, u32) -> bool) {
    for (number, (weights, byte)) in weights.chunks(8).zip(mask).enumerate() {
        let first = first + 8 * number;
        let bit = |(bit, weight): (usize, &f32)| u8::from(is_masked(first + bit, magnitude(*weight))) << bit;
        *byte = weights.iter().enumerate().map(bit).fold(0, |byte, bit| byte | bit);
    }
}

/// The weights of one task.
fn range_of(task: usize, weights: usize) -> Range<usize> {
    task * TASK..((task + 1) * TASK).min(weights)
}

/// Runs `body` on the weights of each task and on the bytes of their mask.
fn for_masks(cpu: &Cpu, weights: &[f32], mask: &mut [u8], body: impl Fn(usize, Range<usize>, &mut [u8]) + Sync) {
    assert_eq!(mask.len(), mask_bytes(weights.len()), "bytes of the mask");
    let mask = Shares::new(mask);
    for_tasks(cpu, weights.len().div_ceil(TASK), 4 * weights.len(), |task| {
        let range = range_of(task, weights.len());
        // SAFETY: tasks begin at multiples of 8 weights, so no two have a byte in common.
        let mask = unsafe { mask.part(range.start / 8..mask_bytes(range.end)) };
        body(task, range, mask);
    });
}

/// Masks the weights that are zero.
///
/// # Panics
/// When the mask has another length.
pub fn mask_zeros(cpu: &Cpu, weights: &[f32], mask: &mut [u8]) {
    for_masks(cpu, weights, mask, |_, range, mask| {
        write_bits(range.start, &weights[range], mask, |_, magnitude| magnitude == 0);
    });
}

/// Masks the `count` weights of least magnitude; of equal ones the first.
///
/// # Panics
/// When the mask has another length, or there are fewer weights.
pub fn mask_lowest(cpu: &Cpu, count: usize, weights: &[f32], mask: &mut [u8]) {
    assert!(count <= weights.len(), "{count} of {} weights", weights.len());
    let tasks = weights.len().div_ceil(TASK);
    let (mut threshold, mut below) = (0u32, 0);
    for byte in (0..4).rev() {
        let shift = 8 * byte;
        let counts = Mutex::new([0usize; 256]);
        for_tasks(cpu, tasks, 4 * weights.len(), |task| {
            let mut own = [0usize; 256];
            for weight in &weights[range_of(task, weights.len())] {
                let difference = magnitude(*weight) ^ threshold;
                // Those whose bytes before are the threshold's.
                if u64::from(difference) >> (shift + 8) == 0 {
                    own[(magnitude(*weight) >> shift & 0xff) as usize] += 1;
                }
            }
            let mut counts = trainyard_base::lock(&counts);
            counts.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        });
        let counts = trainyard_base::lock(&counts);
        let mut value = 0;
        while value < 255 && below + counts[value] < count {
            below += counts[value];
            value += 1;
        }
        threshold |= (value as u32) << shift;
    }
    // The weights of exactly the threshold's magnitude before each task.
    let equal: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    for_tasks(cpu, tasks, 4 * weights.len(), |task| {
        let of_task = &weights[range_of(task, weights.len())];
        let equals = of_task.iter().filter(|weight| magnitude(**weight) == threshold).count();
        equal[task].store(equals, Ordering::Relaxed);
    });
    let mut before = 0;
    for of_task in &equal {
        before += of_task.swap(before, Ordering::Relaxed);
    }
    let quota = count - below;
    for_masks(cpu, weights, mask, |task, range, mask| {
        let mut seen = equal[task].load(Ordering::Relaxed);
        write_bits(range.start, &weights[range], mask, |_, magnitude| {
            let is_equal = magnitude == threshold;
            seen += usize::from(is_equal);
            magnitude < threshold || is_equal && seen <= quota
        });
    });
}

/// Masks the `count` weights of least magnitude among each `of` neighbours; of equal ones the
/// first.
///
/// # Panics
/// When the mask has another length, or the weights do not divide into groups of at most 64.
pub fn mask_lowest_of_neighbours(cpu: &Cpu, count: usize, of: usize, weights: &[f32], mask: &mut [u8]) {
    assert!(of <= crate::sparsity::NEIGHBOURS_MAX && weights.len().is_multiple_of(of), "groups of {of}");
    for_masks(cpu, weights, mask, |_, range, mask| {
        let (mut group, mut marks) = (usize::MAX, 0u64);
        write_bits(range.start, &weights[range.clone()], mask, |place, _| {
            if place / of != group {
                // A task may begin inside a group, so groups are read from all weights.
                group = place / of;
                marks = lowest_of(count, &weights[group * of..(group + 1) * of]);
            }
            marks >> (place % of) & 1 == 1
        });
    });
}

/// The `count` weights of least magnitude, as bits.
fn lowest_of(count: usize, weights: &[f32]) -> u64 {
    let is_lower = |a: usize, b: usize| (magnitude(weights[a]), a) < (magnitude(weights[b]), b);
    let rank = |place: usize| (0..weights.len()).filter(|other| is_lower(*other, place)).count();
    (0..weights.len()).filter(|place| rank(*place) < count).map(|place| 1 << place).sum()
}

/// Sets the masked weights to zero, and their copy where there is one. Returns their number.
///
/// # Panics
/// When the lengths disagree.
pub fn clear<T: Element>(cpu: &Cpu, mask: &[u8], weights: &mut [f32], copy: Option<&mut [T]>) -> usize {
    let len = weights.len();
    assert_eq!(mask.len(), mask_bytes(len), "bytes of the mask");
    assert_eq!(copy.as_ref().map_or(len, |copy| copy.len()), len, "length of the compute copy");
    let (weights, copy, cleared) = (Shares::new(weights), copy.map(Shares::new), AtomicUsize::new(0));
    for_elements(cpu, len, 8 + 2 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let weights = unsafe { weights.part(range.clone()) };
        // SAFETY: as above.
        let copy = copy.as_ref().map(|copy| unsafe { copy.part(range.clone()) });
        let mask = &mask[range.start / 8..mask_bytes(range.end)];
        let is_masked = |place: usize| mask[place / 8] >> (place % 8) & 1 == 1;
        for (place, weight) in weights.iter_mut().enumerate() {
            *weight = if is_masked(place) { 0.0 } else { *weight };
        }
        for (place, value) in copy.into_iter().flatten().enumerate() {
            *value = if is_masked(place) { T::default() } else { *value };
        }
        cleared.fetch_add(mask.iter().map(|byte| byte.count_ones() as usize).sum(), Ordering::Relaxed);
    });
    cleared.into_inner()
}
