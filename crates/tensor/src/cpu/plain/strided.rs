//! Moving data between two strided layouts.
//!
//! A walk has some axes, each with a length and a stride on either side; a source stride of 0
//! repeats. Axes that lie one after another on both sides are merged first, so that a copy of rows
//! becomes a run of `memcpy`s however the shape was written. Where neighbours in the target are far
//! apart in the source (a transposition), the walk goes in square tiles whose lines of both sides
//! stay in the first-level cache.
//!
//! Traffic: each element once in, once out; a partial tile line is fetched at most twice.

use crate::cpu::Cpu;
use crate::cpu::rows::{for_elements, for_rows};
use crate::cpu::threads::Shares;
use crate::dtype::Element;

/// One axis of a walk: its length, and elements from one position to the next in source and target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Axis {
    /// Positions.
    pub len: usize,
    /// Stride of the source; 0 repeats.
    pub source: usize,
    /// Stride of the target.
    pub target: usize,
}

impl Axis {
    /// An axis of `len` positions with these strides.
    pub const fn new(len: usize, source: usize, target: usize) -> Axis {
        Axis { len, source, target }
    }
}

/// Two axes for each dimension of a tensor: more than any operation builds.
const AXES_MAX: usize = 2 * crate::shape::RANK_MAX;
/// The side of a tile: 32 lines of at most 128 bytes on either side are a quarter of the
/// first-level cache.
const TILE: usize = 32;

/// `target[..] = source[..]` along the axes, outermost first.
///
/// # Panics
/// When the axes reach beyond either side, or two positions are one element of the target.
pub fn copy<T: Copy + Send + Sync>(cpu: &Cpu, axes: &[Axis], source: &[T], target: &mut [T]) {
    walk(cpu, axes, source, target, |target, source| *target = source);
}

/// `target[..] += source[..]` along the axes.
///
/// # Panics
/// As [`copy`].
pub fn add<T: Element>(cpu: &Cpu, axes: &[Axis], source: &[T], target: &mut [T]) {
    walk(cpu, axes, source, target, |target, source| *target = T::from_f32(target.to_f32() + source.to_f32()));
}

/// Drops axes of one position and merges neighbours that are one axis on both sides.
fn merged(axes: &[Axis]) -> Vec<Axis> {
    let mut out: Vec<Axis> = Vec::with_capacity(AXES_MAX);
    for &axis in axes.iter().filter(|axis| axis.len != 1) {
        match out.last_mut() {
            Some(outer) if outer.source == axis.source * axis.len && outer.target == axis.target * axis.len => {
                *outer = Axis::new(outer.len * axis.len, axis.source, axis.target);
            }
            _ => out.push(axis),
        }
    }
    if out.is_empty() {
        out.push(Axis::new(1, 1, 1));
    }
    out
}

/// Checks that the parts of a walk are disjoint and inside.
fn check(axes: &[Axis], source: usize, target: usize) {
    assert!(axes.len() <= AXES_MAX, "a walk of {} axes; the most is {AXES_MAX}", axes.len());
    let last = |stride: fn(&Axis) -> usize| axes.iter().map(|axis| (axis.len - 1) * stride(axis)).sum::<usize>();
    assert!(last(|a| a.source) < source, "{axes:?} reach beyond a source of {source} elements");
    assert!(last(|a| a.target) < target, "{axes:?} reach beyond a target of {target} elements");
    let mut inner_first = axes.to_vec();
    inner_first.sort_by_key(|axis| axis.target);
    let mut reach = 0;
    for axis in inner_first {
        assert!(axis.target > reach, "{axes:?} write an element twice");
        reach += (axis.len - 1) * axis.target;
    }
}

/// Where a walk over `axes` is.
struct Place<'a> {
    axes: &'a [Axis],
    at: [usize; AXES_MAX],
    source: usize,
    target: usize,
}

impl<'a> Place<'a> {
    fn new(axes: &'a [Axis], mut index: usize) -> Place<'a> {
        let mut place = Place { axes, at: [0; AXES_MAX], source: 0, target: 0 };
        for (i, axis) in axes.iter().enumerate().rev() {
            place.at[i] = index % axis.len;
            index /= axis.len;
            place.source += place.at[i] * axis.source;
            place.target += place.at[i] * axis.target;
        }
        place
    }

    fn advance(&mut self) {
        for (i, axis) in self.axes.iter().enumerate().rev() {
            self.at[i] += 1;
            self.source += axis.source;
            self.target += axis.target;
            if self.at[i] < axis.len {
                return;
            }
            self.at[i] = 0;
            self.source -= axis.len * axis.source;
            self.target -= axis.len * axis.target;
        }
    }
}

fn walk<T: Copy + Send + Sync>(
    cpu: &Cpu,
    axes: &[Axis],
    source: &[T],
    target: &mut [T],
    put: impl Fn(&mut T, T) + Copy + Sync,
) {
    if axes.iter().any(|axis| axis.len == 0) {
        return;
    }
    let mut axes = merged(axes);
    check(&axes, source.len(), target.len());
    let shares = Shares::new(target);
    let inner = axes.pop().expect("a merged walk has an axis");
    let transposed = inner.target == 1 && inner.source > 1;
    if let Some(across) = axes.iter().position(|axis| transposed && axis.source == 1) {
        let across = axes.remove(across);
        let bands = across.len.div_ceil(TILE);
        let units = axes.iter().map(|axis| axis.len).product::<usize>() * bands;
        for_rows(cpu, units, 2 * TILE * inner.len * size_of::<T>(), |range| {
            for unit in range {
                let place = Place::new(&axes, unit / bands);
                let first = unit % bands * TILE;
                let band = first..(first + TILE).min(across.len);
                tiles(&source[place.source..], &shares, place.target, band, across, inner, put);
            }
        });
        return;
    }
    if axes.is_empty() {
        for_elements(cpu, inner.len, 2 * size_of::<T>(), |range| {
            let part = Axis { len: range.len(), ..inner };
            run(&source[range.start * inner.source..], &shares, range.start * inner.target, part, put);
        });
        return;
    }
    let units = axes.iter().map(|axis| axis.len).product();
    for_rows(cpu, units, 2 * inner.len * size_of::<T>(), |range| {
        let mut place = Place::new(&axes, range.start);
        for _ in range {
            run(&source[place.source..], &shares, place.target, inner, put);
            place.advance();
        }
    });
}

/// One line along the inner axis.
#[inline(always)]
fn run<T: Copy + Send>(source: &[T], target: &Shares<'_, T>, at: usize, axis: Axis, put: impl Fn(&mut T, T)) {
    let Axis { len, source: stride, target: 1 } = axis else {
        for i in 0..axis.len {
            let at = at + i * axis.target;
            // SAFETY: no two positions of a walk are one element of the target (`check`).
            put(unsafe { &mut target.part(at..at + 1)[0] }, source[i * axis.source]);
        }
        return;
    };
    // SAFETY: as above; the line's elements are neighbours.
    let line = unsafe { target.part(at..at + len) };
    match stride {
        0 => line.iter_mut().for_each(|target| put(target, source[0])),
        1 => line.iter_mut().zip(&source[..len]).for_each(|(target, source)| put(target, *source)),
        _ => line.iter_mut().zip(source.iter().step_by(stride)).for_each(|(target, source)| put(target, *source)),
    }
}

/// Tiles of a band of lines; the lines lie along `inner` in the target, and side by side along
/// `across` in the source.
fn tiles<T: Copy + Send>(
    source: &[T],
    target: &Shares<'_, T>,
    at: usize,
    band: std::ops::Range<usize>,
    across: Axis,
    inner: Axis,
    put: impl Fn(&mut T, T),
) {
    for left in (0..inner.len).step_by(TILE) {
        let right = (left + TILE).min(inner.len);
        for line in band.clone() {
            let start = at + line * across.target;
            // SAFETY: no two positions of a walk are one element of the target, and lines lie along
            // its inner axis.
            let part = unsafe { target.part(start + left..start + right) };
            for (i, target) in (left..right).zip(part) {
                put(target, source[line + i * inner.source]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use proptest::prelude::*;

    /// One position after another.
    fn naive(axes: &[Axis], source: &[u32], target: &mut [u32]) {
        let count: usize = axes.iter().map(|axis| axis.len).product();
        for index in 0..count {
            let (mut rest, mut from, mut to) = (index, 0, 0);
            for axis in axes.iter().rev() {
                from += rest % axis.len * axis.source;
                to += rest % axis.len * axis.target;
                rest /= axis.len;
            }
            target[to] = source[from];
        }
    }

    proptest! {
        /// Any permutation of dimensions with any of them repeated, into a part of a larger target.
        #[test]
        fn every_walk_is_the_naive_walk(
            lens in prop::collection::vec(0usize..50, 1..5),
            repeated in prop::collection::vec(any::<bool>(), 5),
            order in Just([0usize, 1, 2, 3, 4]).prop_shuffle(),
            gap in 1usize..3,
        ) {
            let mut axes: Vec<Axis> = lens.iter().map(|len| Axis::new(*len, 0, 0)).collect();
            let mut size = gap;
            for axis in axes.iter_mut().rev() {
                axis.target = size;
                size *= axis.len.max(1);
            }
            let target = size + 3;
            let mut size = 1;
            for i in order.into_iter().filter(|i| *i < lens.len()) {
                if !repeated[i] || lens[i] > 9 {
                    axes[i].source = size;
                    size *= axes[i].len.max(1);
                }
            }
            let source: Vec<u32> = (1..=size as u32).collect();
            prop_assume!(target < 1 << 20);
            let (mut found, mut wanted) = (vec![0; target], vec![0; target]);
            copy(&Cpu::new(Isa::Portable, 2), &axes, &source, &mut found);
            naive(&axes, &source, &mut wanted);
            prop_assert_eq!(found, wanted);
        }
    }

    #[test]
    #[should_panic(expected = "write an element twice")]
    fn overlapping_targets_are_refused() {
        let axes = [Axis::new(3, 2, 1), Axis::new(2, 1, 1)];
        copy(&Cpu::new(Isa::Portable, 1), &axes, &[0u32; 6], &mut [0; 6]);
    }
}
