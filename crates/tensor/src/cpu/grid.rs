//! Numbers rounded to the grid of few bits, the values of [`Grid`], many at a time: weights for
//! training that knows of it, and inputs of layers whose files say that they are rounded.
//!
//! A group of neighbours is read twice: for its largest magnitude, which gives the scale, and for
//! the codes. The second read finds it in the cache. Traffic: an element read and one written
//! a number; about 8 operations, a division among them. A weight that is NaN stays NaN.

use crate::cpu::Cpu;
use crate::cpu::rows::{for_rows, load_at, store_at};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::grid::Grid;
use crate::simd_fn;

/// Writes to `values` the `weights` rounded to codes of `bits` bits, with a scale for each `group`
/// neighbours. Scales and values have the dtype of `values`.
///
/// # Panics
/// When the lengths disagree or do not divide into groups.
pub fn round_to_grid<I: Element, T: Element>(cpu: &Cpu, bits: u8, group: usize, weights: &[I], values: &mut [T]) {
    assert_eq!(weights.len(), values.len(), "lengths of weights and values");
    assert!(weights.len().is_multiple_of(group), "{} weights in groups of {group}", weights.len());
    let grid = Grid { bits, dtype: T::DTYPE };
    let values = Shares::new(values);
    for_rows(cpu, weights.len() / group, group * (size_of::<I>() + size_of::<T>()), |groups| {
        let range = groups.start * group..groups.end * group;
        // SAFETY: the ranges of a region do not overlap.
        let values = unsafe { values.part(range.clone()) };
        round_groups(cpu.isa, grid, group, &weights[range], values);
    });
}

simd_fn! {
    fn round_groups[I: Element, T: Element](s: S, grid: Grid, group: usize, weights: &[I], values: &mut [T]) {
        let (least, most, zero) = (s.splat(-grid.end()), s.splat(grid.end() - 1.0), s.splat(0.0));
        for (weights, values) in weights.chunks_exact(group).zip(values.chunks_exact_mut(group)) {
            let mut magnitude = zero;
            let mut i = 0;
            while i < group {
                // The order of operands passes over a NaN.
                magnitude = s.max(s.abs(load_at(s, weights, i, 0.0)), magnitude);
                i += S::LANES;
            }
            let scale = T::from_f32(s.reduce_max(magnitude) / grid.steps()).to_f32();
            // All weights are zero, or too small for a scale.
            let divisor = if scale == 0.0 { f32::INFINITY } else { scale };
            let (divisor, scale) = (s.splat(divisor), s.splat(scale));
            let mut i = 0;
            while i < group {
                let code = s.round(s.div(load_at(s, weights, i, 0.0), divisor));
                // The order of operands keeps a NaN; the sum turns -0 into 0.
                let code = s.add(s.min(most, s.max(least, code)), zero);
                store_at(s, s.mul(code, scale), values, i);
                i += S::LANES;
            }
        }
    }
}
