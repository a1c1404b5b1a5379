//! The rectangles of a whole parameter that a stretch of a rank's part of it covers.
//!
//! A rank holds a flat range of its local part: all of it, or a ZeRO shard, which may begin and end
//! inside a row. In the whole, seen as a matrix, such a range is few rectangles: the first partial
//! row, the full rows, and the last partial row, each once for every [`Piece`] of the split.
//! Checkpoints and imports work with rectangles, because a part of some columns is as many short
//! runs as there are rows.

use crate::parameter::{ParameterSpec, Piece};
use std::ops::Range;

/// A rectangle of a whole parameter, and its place in a rank's local part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Patch {
    /// Its rows of the matrix [.., `width`] that the whole parameter is seen as.
    pub rows: Range<usize>,
    /// Its columns.
    pub columns: Range<usize>,
    /// Number of columns of that matrix.
    pub width: usize,
    /// Its first element in the local part.
    pub local: usize,
    /// Elements of the local part from the start of one of its rows to the next.
    pub local_stride: usize,
    /// True on the rank that writes it to checkpoints.
    pub owned: bool,
}

impl Patch {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.rows.len() * self.columns.len()
    }
}

impl ParameterSpec {
    /// The rectangles of the whole parameter that the elements `local` of this part are: at most
    /// three for each piece of the split, in local order of their first elements.
    ///
    /// The matrix has the rows of the first dimension, or, if the split is along a later one, those
    /// of all dimensions before it.
    pub fn patches(&self, local: Range<usize>) -> Vec<Patch> {
        let elements = self.elements();
        let local = local.start.min(elements)..local.end.min(elements);
        let (dim, outer) = self.split.as_ref().map_or((0, 0), |split| (split.dim, split.outer));
        let inner = |shape: &[usize]| shape.iter().skip(dim.max(1)).product::<usize>();
        let (width, local_stride) = (inner(self.whole_shape()), inner(&self.shape));
        // The pieces of an unsplit parameter: all of it.
        let all = [Piece { local: 0..usize::MAX, whole: 0..usize::MAX, holders: 1, owned: true }];
        let pieces = self.split.as_ref().map_or(&all[..], |split| &split.pieces);
        // Elements of one step along the dimension of a split by columns.
        let step: usize = self.shape.iter().skip(dim + 1).product();
        let mut patches = Vec::new();
        for (rows, columns) in rectangles(local, local_stride) {
            for piece in pieces {
                let (rows_held, columns_held, rows_whole, columns_whole) = if dim == 0 {
                    let held = overlap(&rows, &piece.local);
                    let whole = moved(&held, piece.local.start, piece.whole.start);
                    (held, columns.clone(), whole, columns.clone())
                } else {
                    let held = overlap(&columns, &(piece.local.start * step..piece.local.end * step));
                    let whole = moved(&held, piece.local.start * step, piece.whole.start * step);
                    (rows.clone(), held, outer + rows.start..outer + rows.end, whole)
                };
                if !rows_held.is_empty() && !columns_held.is_empty() {
                    patches.push(Patch {
                        rows: rows_whole,
                        columns: columns_whole,
                        width,
                        local: rows_held.start * local_stride + columns_held.start,
                        local_stride,
                        owned: piece.owned,
                    });
                }
            }
        }
        patches
    }
}

/// The rectangles (rows, columns) of the flat range `range` of a matrix with `width` columns: the
/// first partial row, full rows, the last partial row.
pub fn rectangles(range: Range<usize>, width: usize) -> Vec<(Range<usize>, Range<usize>)> {
    if range.is_empty() || width == 0 {
        return Vec::new();
    }
    let (first, last) = (range.start / width, (range.end - 1) / width);
    let (from, to) = (range.start % width, range.end - last * width);
    if first == last {
        return vec![(first..first + 1, from..to)];
    }
    let (head, tail) = (usize::from(from > 0), usize::from(to < width));
    let head = (first..first + head, from..width);
    let full = (head.0.end..last + 1 - tail, 0..width);
    let tail = (full.0.end..last + 1, 0..to);
    [head, full, tail].into_iter().filter(|(rows, _)| !rows.is_empty()).collect()
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

fn moved(range: &Range<usize>, from: usize, to: usize) -> Range<usize> {
    if range.is_empty() {
        return to..to;
    }
    range.start - from + to..range.end - from + to
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameter::{Init, ParameterKind, Split};
    use proptest::prelude::*;

    /// A part of a parameter of `shape`: every second of some uneven stretches along `dim`, and of
    /// them the rows after the first `skipped`, where `dim` is a later dimension.
    fn part(shape: &[usize], dim: usize, cuts: &[usize], skipped: usize) -> ParameterSpec {
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (shape[dim] + 1)).chain([shape[dim]]).collect();
        ends.sort_unstable();
        let (mut start, mut local, mut pieces) = (0, 0, Vec::new());
        for (number, end) in ends.into_iter().enumerate() {
            if number % 2 == 0 && end > start {
                let stretch = local..local + end - start;
                local = stretch.end;
                let (holders, owned) = (1 + number / 2 % 2, number / 2 % 2 == 0);
                pieces.push(Piece { local: stretch, whole: start..end, holders, owned });
            }
            start = end;
        }
        let mut held = shape.to_vec();
        held[dim] = local;
        let skipped = if dim > 0 { skipped % shape[0] } else { 0 };
        held[0] -= skipped;
        let outer = skipped * shape[1..dim.max(1)].iter().product::<usize>();
        let mut spec = ParameterSpec::new("w", &held, Init::Zeros, ParameterKind::Matrix, "w");
        spec.split = Some(Split { whole: shape.to_vec(), dim, outer, pieces, shared: Vec::new() });
        spec
    }

    /// (local, whole) of every element, by the definition of a split.
    fn elements(spec: &ParameterSpec) -> Vec<usize> {
        let split = spec.split.as_ref().unwrap();
        let inner: usize = spec.shape[split.dim + 1..].iter().product();
        let whole_inner = inner * split.whole[split.dim];
        let of = |local: usize| {
            let (row, at) = (local / (inner * spec.shape[split.dim]), local / inner % spec.shape[split.dim]);
            let piece = split.pieces.iter().find(|piece| piece.local.contains(&at)).unwrap();
            (split.outer + row) * whole_inner + (at - piece.local.start + piece.whole.start) * inner + local % inner
        };
        (0..spec.elements()).map(of).collect()
    }

    proptest! {
        #[test]
        fn patches_and_runs_are_the_elements_of_a_split(
            shape in prop::collection::vec(1usize..9, 1..4), dim in 0usize..3,
            cuts in prop::collection::vec(0usize..9, 0..5), skipped in 0usize..9, ends in any::<[prop::sample::Index; 2]>(),
        ) {
            let spec = part(&shape, dim % shape.len(), &cuts, skipped);
            let want = elements(&spec);
            let mut ends = ends.map(|end| end.index(want.len() + 1));
            ends.sort_unstable();
            let range = ends[0]..ends[1];
            let mut got = vec![None; want.len()];
            for patch in spec.patches(range.clone()) {
                for (number, row) in patch.rows.clone().enumerate() {
                    for (at, column) in patch.columns.clone().enumerate() {
                        let local = patch.local + number * patch.local_stride + at;
                        prop_assert_eq!(got[local].replace(row * patch.width + column), None, "covered twice");
                    }
                }
            }
            for (local, want) in want.iter().enumerate() {
                prop_assert_eq!(got[local], range.contains(&local).then_some(*want));
            }
            let runs = spec.whole_runs(range.clone());
            let flat: Vec<_> = runs.iter().flat_map(|(run, first)| *first..first + run.len()).collect();
            prop_assert_eq!(&flat, &want[range.clone()]);
            let locals: Vec<_> = runs.iter().flat_map(|(run, _)| run.clone()).collect();
            prop_assert_eq!(locals, range.collect::<Vec<_>>());
            let joins = |pair: &[(Range<usize>, usize)]| pair[0].1 + pair[0].0.len() == pair[1].1;
            prop_assert!(!runs.windows(2).any(joins), "{:?} could be fewer", runs);
        }
    }

    #[test]
    fn a_whole_parameter_is_one_run_and_at_most_three_patches() {
        let spec = ParameterSpec::new("w", &[5, 4], Init::Zeros, ParameterKind::Matrix, "w");
        assert_eq!(spec.whole_runs(3..18), [(3..18, 3)]);
        assert_eq!(spec.whole_runs(7..7), []);
        let patches = spec.patches(3..18);
        let rectangles: Vec<_> = patches.iter().map(|p| (p.rows.clone(), p.columns.clone())).collect();
        assert_eq!(rectangles, [(0..1, 3..4), (1..4, 0..4), (4..5, 0..2)]);
    }
}
