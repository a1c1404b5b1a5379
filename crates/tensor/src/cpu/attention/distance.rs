//! Numbers that are added to scores by the distance of query and key (Raffel et al. 2020,
//! section 2.1; Press et al. 2022), in the vector form.
//!
//! A key is a row of a block of scores and queries lie along the lanes, so what is added to a row
//! is a stretch of the head's table: the distance grows with the lane. Backward adds the gradients
//! of scores to the same stretches.

use super::plan::Segment;
use super::vector::{LANES_MAX, QUERIES, Strip, Strips};
use super::{AttentionError, AttentionSpec};
use crate::cpu::threads::Shares;
use crate::simd_fn;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// A number for each head and each distance, added to scaled scores before the softmax.
#[derive(Clone, Copy, Debug)]
pub struct DistanceBias<'a> {
    table: &'a [f32],
    reach: usize,
}

impl<'a> DistanceBias<'a> {
    /// `table` is [heads, 2 `reach` - 1]: the number of query position `p` and key position `k` is
    /// in column `reach - 1 + p - k`.
    ///
    /// # Errors
    /// A table of another size.
    pub fn new(spec: &AttentionSpec, table: &'a [f32], reach: usize) -> Result<Self, AttentionError> {
        let columns = columns(reach);
        if reach == 0 || table.len() != spec.heads * columns {
            return Err(AttentionError::Shape {
                operand: "bias",
                rows: spec.heads,
                cols: table.len() / spec.heads.max(1),
                want_rows: spec.heads,
                want_cols: columns,
            });
        }
        Ok(DistanceBias { table, reach })
    }

    /// One more than the largest distance.
    pub fn reach(&self) -> usize {
        self.reach
    }

    /// Refuses segments that are longer than the table reaches.
    pub(super) fn check(&self, cu: &[i32]) -> Result<(), AttentionError> {
        match cu.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max() {
            Some(longest) if longest > self.reach => Err(AttentionError::Distance { longest, reach: self.reach }),
            _ => Ok(()),
        }
    }

    /// The table in units of log2 e, its rows long enough for whole vectors of lanes.
    pub(super) fn padded(&self) -> Padded {
        let row = row(self.reach);
        let mut table = vec![0.0; self.table.len() / columns(self.reach) * row];
        for (to, from) in table.chunks_exact_mut(row).zip(self.table.chunks_exact(columns(self.reach))) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * LOG2_E);
        }
        Padded { table, reach: self.reach }
    }
}

fn columns(reach: usize) -> usize {
    2 * reach - 1
}

/// Floats of a padded row.
fn row(reach: usize) -> usize {
    columns(reach) + LANES_MAX
}

/// [`DistanceBias`] as the kernels read it.
pub(super) struct Padded {
    table: Vec<f32>,
    reach: usize,
}

impl Padded {
    /// The row of `head`.
    pub(super) fn of_head(&self, head: usize) -> &[f32] {
        let row = row(self.reach);
        &self.table[head * row..(head + 1) * row]
    }

    /// The column of lane 0 and row 0 of a block of local `queries` by local `keys` of a segment
    /// that has no more queries than keys.
    pub(super) fn first(&self, segment: &Segment, queries: &Range<usize>, keys: &Range<usize>) -> usize {
        (self.reach - 1).wrapping_add_signed(segment.position(queries.start)) - keys.start
    }

    /// Zeros for the gradients of `segments` segments.
    pub(super) fn sums(&self, segments: usize) -> Vec<f32> {
        vec![0.0; segments * self.table.len()]
    }

    /// The sums of one segment and head.
    ///
    /// # Safety
    /// No two uses of the same segment and head may overlap.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn sums_of<'a>(&self, sums: &'a Shares<'_, f32>, segment: usize, head: usize) -> &'a mut [f32] {
        let row = row(self.reach);
        let first = segment * self.table.len() + head * row;
        // SAFETY: rows do not overlap, and by the contract this one is used once at a time.
        unsafe { sums.part(first..first + row) }
    }

    /// The sum over segments, in their order: [heads, 2 reach - 1].
    pub(super) fn total(&self, sums: &[f32], total: &mut [f32]) {
        let (row, columns) = (row(self.reach), columns(self.reach));
        total.fill(0.0);
        for segment in sums.chunks_exact(self.table.len()) {
            for (to, from) in total.chunks_exact_mut(columns).zip(segment.chunks_exact(row)) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
        }
    }
}

simd_fn! {
    /// Adds to the scores of a block the numbers of their distances, `first` the column of lane 0
    /// and row 0.
    pub(super) fn add_bias(s: S, strips: &Strips, bias: &[f32], first: usize, scores: &mut [f32]) {
        for Strip { keys, lanes } in strips.iter() {
            for key in keys.clone() {
                let bias = &bias[first + lanes.start - key..][..lanes.len()];
                let scores = &mut scores[key * QUERIES + lanes.start..][..lanes.len()];
                for (x, bias) in scores.chunks_exact_mut(S::LANES).zip(bias.chunks_exact(S::LANES)) {
                    s.store(s.add(s.load(x), s.load(bias)), x);
                }
            }
        }
    }
}

simd_fn! {
    /// Adds the gradients of the scores of a block to the sums of their distances.
    pub(super) fn add_gradients(s: S, strips: &Strips, ds: &[f32], first: usize, sums: &mut [f32]) {
        for Strip { keys, lanes } in strips.iter() {
            for key in keys.clone() {
                let sums = &mut sums[first + lanes.start - key..][..lanes.len()];
                let ds = &ds[key * QUERIES + lanes.start..][..lanes.len()];
                for (sum, ds) in sums.chunks_exact_mut(S::LANES).zip(ds.chunks_exact(S::LANES)) {
                    s.store(s.add(s.load(sum), s.load(ds)), sum);
                }
            }
        }
    }
}
