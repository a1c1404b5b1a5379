//! A unit's description of its parameters, and their layout in its flat buffer.
//!
//! A fused projection is one parameter made of several tensors of the interchange format. Query,
//! key and value are rows of one matrix, gate and up of another, so that each needs one product.
//! [`Source`] says which rows come from which tensor.

use crate::periods::Periods;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use trainyard_program::Layout;

/// The role of a parameter for the optimizer. Decay groups and the choice of algorithm follow from
/// it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParameterKind {
    /// The weight of a product. It decays, and Muon is made for it.
    Matrix,
    /// A table whose rows are looked up (and, if tied, multiplied by). It decays.
    Embedding,
    /// The gain of a normalisation, or another factor. It does not decay.
    Norm,
    /// An addend. It does not decay.
    Bias,
    /// A bias that balances experts: an addend of their scores. It moves by a fixed step against
    /// the excess of choices of each expert, which stands in the place of its gradient (Wang et al.
    /// 2024). It does not decay.
    Balance,
}

impl ParameterKind {
    /// True if weight decay applies by default.
    pub fn decays(self) -> bool {
        matches!(self, ParameterKind::Matrix | ParameterKind::Embedding)
    }
}

/// The distribution of initial values.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// Normal around zero.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    /// Normal around zero, with another deviation in the first rows of a matrix.
    #[serde(rename = "normal_rows")]
    NormalRows {
        /// The number of the first rows.
        first: usize,
        /// Standard deviations of the first rows and of the others.
        stds: [f32; 2],
    },
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// One number for all.
    Constant {
        /// The number.
        value: f32,
    },
}

/// A tensor of the interchange format that is part of a parameter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// Its name in files.
    pub hf_name: String,
    /// Its rows in the parameter (elements, if the parameter has one dimension).
    pub rows: Range<usize>,
    /// True if files hold it transposed: [columns, rows] (GPT-2's `Conv1D`).
    pub transposed: bool,
    /// Its shape in files, where that has the same elements in the same order and other dimensions
    /// (the kernel of a convolution); None if it is that of its rows and columns.
    pub file_shape: Option<Vec<usize>>,
}

impl Source {
    /// The shape that the tensor has in files, for a parameter of `shape`.
    pub fn shape(&self, shape: &[usize]) -> Vec<usize> {
        if let Some(of_file) = &self.file_shape {
            return of_file.clone();
        }
        let mut dims = shape.to_vec();
        if let Some(first) = dims.first_mut() {
            *first = self.rows.len();
        }
        if self.transposed {
            dims.reverse();
        }
        dims
    }
}

/// One parameter of a unit.
#[derive(Clone, PartialEq, Debug)]
pub struct ParameterSpec {
    /// Its name in the unit, e.g. `attn.qkv.weight`.
    pub name: String,
    /// Its dimensions; products take `[out, in]`.
    pub shape: Vec<usize>,
    /// Its initial values.
    pub init: Init,
    /// Its role for the optimizer.
    pub kind: ParameterKind,
    /// Its tensors in files, in the order of rows and covering all of them; empty if it has no name
    /// in files. Rows are those of the whole parameter.
    pub sources: Vec<Source>,
    /// The part of a larger parameter that this is; None if it is whole.
    pub split: Option<Split>,
    /// The layout over the ranks of a tensor-parallel group: split; invariant if every rank
    /// computes the same gradient of it; replicated if the ranks' gradients must be summed.
    pub layout: Layout,
    /// True if it is the part of some of the experts, and other ranks of an expert-parallel group
    /// have those of the others. Rows of all these ranks' tokens come to it, so its gradient is
    /// summed only over ranks that hold the same part.
    pub of_experts: bool,
    /// True if training updates it. A frozen parameter has no gradient, no master and no optimizer
    /// state.
    pub trained: bool,
    /// The periods of training in which it is frozen for a time, although it is trained in others.
    pub rests_in: Periods,
    /// Factor of the learning rate, for it alone.
    pub rate: f64,
    /// Factor of the weight decay, which rules multiply by its learning rate.
    pub decay: f64,
}

/// The part of a whole parameter that one rank of a tensor-parallel group, of an expert-parallel
/// group or of both holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Split {
    /// The shape of the whole parameter.
    pub whole: Vec<usize>,
    /// The dimension along which it is split.
    pub dim: usize,
    /// The position, over all dimensions before `dim`, of the part's first: a part of columns of
    /// some experts begins at the rows of its own. Else 0.
    pub outer: usize,
    /// The held stretches along that dimension, in local order; together they are all that is held.
    pub pieces: Vec<Piece>,
    /// The stretches of the whole that several ranks hold, whichever, ascending. The ranks of the
    /// group sum their gradients of them.
    pub shared: Vec<Range<usize>>,
}

/// A stretch of a split parameter, along the dimension of the split.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its place in this rank's part.
    pub local: Range<usize>,
    /// Its place in the whole.
    pub whole: Range<usize>,
    /// The number of ranks that hold it. Their gradients of it are summed.
    pub holders: usize,
    /// True on the rank that counts it in norms and writes it to checkpoints: the first that holds
    /// it.
    pub owned: bool,
}

impl Piece {
    /// The stretch of it that lies within `rows` of the part, of which these become all. None if
    /// none does.
    pub(crate) fn within(&self, rows: &Range<usize>) -> Option<Piece> {
        let (start, end) = (self.local.start.max(rows.start), self.local.end.min(rows.end));
        let whole = self.whole.start + start.saturating_sub(self.local.start);
        (start < end).then(|| Piece {
            local: start - rows.start..end - rows.start,
            whole: whole..whole + (end - start),
            ..self.clone()
        })
    }
}

impl ParameterSpec {
    /// The elements `local` of this part by deviation: the run, the place of its first element in
    /// the whole parameter, the deviation. Empty if initial values are no random numbers.
    pub fn normal_runs(&self, local: Range<usize>) -> Vec<(Range<usize>, usize, f32)> {
        let (first, stds) = match self.init {
            Init::Normal { std } => (usize::MAX, [std; 2]),
            Init::NormalRows { first, stds } => (first * self.whole_shape().get(1).copied().unwrap_or(1), stds),
            Init::Zeros | Init::Ones | Init::Constant { .. } => return Vec::new(),
        };
        let by_deviation = |(run, whole): (Range<usize>, usize)| {
            let at = first.saturating_sub(whole).min(run.len());
            let (before, rest) = (run.start..run.start + at, run.start + at..run.end);
            [(before, whole, stds[0]), (rest, whole + at, stds[1])]
        };
        let runs = self.whole_runs(local).into_iter().flat_map(by_deviation);
        runs.filter(|(run, ..)| !run.is_empty()).collect()
    }

    /// A parameter that is one tensor, `hf_name`, in files.
    pub fn new(
        name: &str,
        shape: &[usize],
        init: Init,
        kind: ParameterKind,
        hf_name: impl Into<String>,
    ) -> ParameterSpec {
        let rows = 0..shape.first().copied().unwrap_or(1);
        let source = Source { hf_name: hf_name.into(), rows, transposed: false, file_shape: None };
        let (split, layout) = (None, Layout::Invariant);
        let (name, shape) = (name.into(), shape.to_vec());
        ParameterSpec {
            name,
            shape,
            init,
            kind,
            sources: vec![source],
            split,
            layout,
            of_experts: false,
            trained: true,
            rests_in: Periods::default(),
            rate: 1.0,
            decay: 1.0,
        }
    }

    /// The same, made of several tensors one below the other: (name in files, rows).
    pub fn fused(mut self, parts: &[(String, usize)]) -> ParameterSpec {
        let mut start = 0;
        self.sources = parts
            .iter()
            .map(|(hf_name, rows)| {
                let rows = start..start + rows;
                start = rows.end;
                Source { hf_name: hf_name.clone(), rows, transposed: false, file_shape: None }
            })
            .collect();
        self
    }

    /// The same, with all its tensors transposed in files.
    pub fn transposed(mut self) -> ParameterSpec {
        self.sources.iter_mut().for_each(|source| source.transposed = true);
        self
    }

    /// The elements of this part whose gradients the ranks of a tensor-parallel group sum, each run
    /// with its place in a buffer that has room for those of all ranks; and the size of that
    /// buffer, which is the same on every rank. Places that this rank does not hold stay zero.
    pub fn shared_runs(&self) -> (Vec<(Range<usize>, usize)>, usize) {
        let Some(split) = &self.split else {
            return match self.layout {
                Layout::Replicated => (vec![(0..self.elements(), 0)], self.elements()),
                _ => (Vec::new(), 0),
            };
        };
        let inner: usize = split.whole[split.dim + 1..].iter().product();
        let outer: usize = self.shape[..split.dim].iter().product();
        let row: usize = split.shared.iter().map(Range::len).sum();
        let mut runs = Vec::new();
        for piece in split.pieces.iter().filter(|piece| piece.holders > 1) {
            let mut before = 0;
            for shared in &split.shared {
                let (start, end) = (piece.whole.start.max(shared.start), piece.whole.end.min(shared.end));
                for outer in (0..outer).filter(|_| start < end) {
                    let local = piece.local.start + start - piece.whole.start;
                    let first = (outer * self.shape[split.dim] + local) * inner;
                    let place = (outer * row + before + start - shared.start) * inner;
                    runs.push((first..first + (end - start) * inner, place));
                }
                before += shared.len();
            }
        }
        (runs, outer * row * inner)
    }

    /// The elements of this part that count in the norm of all ranks' gradients on the rank with
    /// these places in its tensor-parallel and in its expert-parallel group: ascending runs. Every
    /// element of the whole counts on one rank.
    pub fn counted_runs(&self, of_tensor: usize, of_experts: usize) -> Vec<Range<usize>> {
        // Ranks that divide experts have all else as copies of each other.
        if of_experts > 0 && !self.of_experts {
            return Vec::new();
        }
        let Some(split) = &self.split else {
            return (of_tensor == 0).then_some(0..self.elements()).into_iter().collect();
        };
        if split.pieces.iter().all(|piece| piece.owned) {
            return std::iter::once(0..self.elements()).collect();
        }
        let inner: usize = split.whole[split.dim + 1..].iter().product();
        let outer: usize = self.shape[..split.dim].iter().product();
        let row = self.shape[split.dim];
        let of_row = |outer: usize| {
            let owned = split.pieces.iter().filter(|piece| piece.owned);
            owned.map(move |piece| (outer * row + piece.local.start) * inner..(outer * row + piece.local.end) * inner)
        };
        (0..outer).flat_map(of_row).collect()
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The shape of the whole parameter of which this is a part, or is all.
    pub fn whole_shape(&self) -> &[usize] {
        self.split.as_ref().map_or(&self.shape, |split| &split.whole)
    }

    /// The places of the elements `local` in the whole parameter: runs of neighbours in both, in
    /// order, each with its local elements and the first of its elements in the whole. A parameter
    /// that is whole gives one run.
    pub fn whole_runs(&self, local: Range<usize>) -> Vec<(Range<usize>, usize)> {
        let Some(split) = &self.split else {
            return if local.is_empty() { Vec::new() } else { vec![(local.clone(), local.start)] };
        };
        let inner: usize = split.whole[split.dim + 1..].iter().product();
        let (row, whole_row) = (self.shape[split.dim] * inner, split.whole[split.dim] * inner);
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        if local.is_empty() || row == 0 {
            return runs;
        }
        for outer in local.start / row..local.end.div_ceil(row) {
            for piece in &split.pieces {
                let start = (outer * row + piece.local.start * inner).max(local.start);
                let end = (outer * row + piece.local.end * inner).min(local.end);
                if start >= end {
                    continue;
                }
                let whole = (split.outer + outer) * whole_row + piece.whole.start * inner + start % row
                    - piece.local.start * inner;
                match runs.last_mut() {
                    Some((run, first)) if run.end == start && *first + run.len() == whole => run.end = end,
                    _ => runs.push((start..end, whole)),
                }
            }
        }
        runs
    }

    /// Elements of one row of the first dimension.
    pub fn row_elements(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

/// The positions of a unit's parameters in its one flat buffer.
///
/// The buffer has two regions: trained parameters, then frozen ones. Masters, gradients and
/// optimizer state have the first region only. Trained parts of experts
/// ([`ParameterSpec::of_experts`]) are the end of the first region, because their gradients are
/// summed over other ranks.
///
/// Every parameter starts at a multiple of [`UnitLayout::ALIGN`] elements. Each region is padded so
/// that it divides into equal shards of whole [`UnitLayout::QUANTUM`] elements. One collective then
/// moves a region without copies. The elements of the gaps are zero and stay zero.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitLayout {
    ranges: Vec<Range<usize>>,
    /// The periods in which each parameter rests.
    rests_in: Vec<Periods>,
    /// Elements of the trained and of the frozen region before padding.
    flat_elements: [usize; 2],
    /// The first element of the trained parts of experts.
    experts_start: usize,
    /// Elements of the trained region.
    trained_elements: usize,
    elements: usize,
    shards: usize,
}

impl UnitLayout {
    /// Elements: a cache line (and a widest vector) of the smallest dtype in use, two bytes.
    pub const ALIGN: usize = 32;

    /// Number of elements in a chunk over which gradient norms are summed. A shard is a whole
    /// number of chunks, so that the norm's bits do not depend on the number of shards.
    pub const QUANTUM: usize = 4096;

    /// The layout of `parameters` in order, for `shards` shards.
    pub fn new(parameters: &[ParameterSpec], shards: usize) -> UnitLayout {
        let shards = shards.max(1);
        let mut ranges = vec![0..0; parameters.len()];
        let mut place = |of: &dyn Fn(&ParameterSpec) -> bool, first: usize| {
            let mut end = first;
            for (range, parameter) in ranges.iter_mut().zip(parameters).filter(|(_, p)| of(p)) {
                *range = end..end + parameter.elements();
                end = range.end.next_multiple_of(Self::ALIGN);
            }
            end - first
        };
        let padded = |elements: usize| elements.next_multiple_of(Self::QUANTUM * shards);
        let experts_start = place(&|p| p.trained && !p.of_experts, 0);
        let trained = experts_start + place(&|p| p.trained && p.of_experts, experts_start);
        let trained_elements = padded(trained);
        let frozen = place(&|p| !p.trained, trained_elements);
        let elements = trained_elements + padded(frozen);
        let flat_elements = [trained, frozen];
        let rests_in = parameters.iter().map(|parameter| parameter.rests_in).collect();
        UnitLayout { ranges, rests_in, flat_elements, experts_start, trained_elements, elements, shards }
    }

    /// The elements of parameter `index`.
    pub fn range(&self, index: usize) -> Range<usize> {
        self.ranges[index].clone()
    }

    /// The periods of a schedule of freezing in which parameter `index` rests.
    pub fn rests_in(&self, index: usize) -> Periods {
        self.rests_in[index]
    }

    /// Those in which everything that is trained rests.
    pub fn all_rest_in(&self) -> Periods {
        let each = self.trained().map(|(index, _)| self.rests_in[index]);
        each.reduce(Periods::and).unwrap_or_default()
    }

    /// The elements of every parameter, in order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Elements before padding to shards, the gaps between parameters included.
    pub fn flat_elements(&self) -> usize {
        self.flat_elements.iter().sum()
    }

    /// Those of the frozen region.
    pub fn frozen_flat_elements(&self) -> usize {
        self.flat_elements[1]
    }

    /// Elements of the buffer, padding included.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements of the trained region, which is the first, padding included.
    pub fn trained_elements(&self) -> usize {
        self.trained_elements
    }

    /// The elements of the trained parts of experts, before padding; empty where experts are whole.
    pub fn experts(&self) -> Range<usize> {
        self.experts_start..self.flat_elements[0]
    }

    /// Elements of one shard of the trained region.
    pub fn shard_elements(&self) -> usize {
        self.trained_elements / self.shards
    }

    /// Elements of one shard of the frozen region.
    pub fn frozen_shard_elements(&self) -> usize {
        (self.elements - self.trained_elements) / self.shards
    }

    /// The elements of the two regions, of those that have any.
    pub fn regions(&self) -> impl Iterator<Item = Range<usize>> {
        let regions = [0..self.trained_elements, self.trained_elements..self.elements];
        regions.into_iter().filter(|region| !region.is_empty())
    }

    /// The trained parameters with their elements, ascending.
    pub fn trained(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let of = |(index, range): (usize, &Range<usize>)| (index, range.clone());
        let trained = self.ranges.iter().enumerate().map(of).filter(|(_, range)| range.start < self.trained_elements);
        let is_of_experts = |range: &Range<usize>| range.start >= self.experts_start;
        let (experts, others): (Vec<_>, Vec<_>) = trained.partition(|(_, range)| is_of_experts(range));
        others.into_iter().chain(experts)
    }

    /// The frozen parameters with their elements, ascending.
    pub fn frozen(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let of = |(index, range): (usize, &Range<usize>)| (index, range.clone());
        self.ranges.iter().enumerate().map(of).filter(|(_, range)| range.start >= self.trained_elements)
    }

    /// The part of parameter `index` that lies in `shard`, as elements of that parameter; empty if
    /// none does.
    pub fn part_in_shard(&self, index: usize, shard: usize) -> Range<usize> {
        let parameter = &self.ranges[index];
        let (first, each) = match parameter.start < self.trained_elements {
            true => (0, self.shard_elements()),
            false => (self.trained_elements, self.frozen_shard_elements()),
        };
        let shard = first + shard * each..first + (shard + 1) * each;
        let start = parameter.start.max(shard.start).min(parameter.end);
        let end = parameter.end.min(shard.end).max(start);
        start - parameter.start..end - parameter.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn vector(elements: usize) -> ParameterSpec {
        ParameterSpec::new("p", &[elements], Init::Zeros, ParameterKind::Bias, "p")
    }

    #[test]
    fn the_elements_of_a_split_parameter_have_their_places_in_the_whole() {
        let whole_places = |parameter: &ParameterSpec, local: Range<usize>| -> Vec<usize> {
            let runs = parameter.whole_runs(local.clone());
            assert_eq!(runs.iter().flat_map(|(run, _)| run.clone()).collect::<Vec<_>>(), local.collect::<Vec<_>>());
            runs.into_iter().flat_map(|(run, first)| first..first + run.len()).collect()
        };
        let piece = |local, whole| Piece { local, whole, holders: 1, owned: true };
        let mut parameter = ParameterSpec::new("p", &[4, 6], Init::Zeros, ParameterKind::Matrix, "p");
        assert_eq!(parameter.whole_runs(3..20), [(3..20, 3)]);
        assert_eq!(parameter.whole_runs(3..3), []);
        let pieces = vec![piece(0..1, 1..2), piece(1..3, 5..7), piece(3..4, 7..8)];
        parameter.split = Some(Split { whole: vec![9, 6], dim: 0, outer: 0, pieces, shared: Vec::new() });
        assert_eq!(parameter.whole_runs(0..24), [(0..6, 6), (6..24, 30)]);
        assert_eq!(parameter.whole_runs(4..8), [(4..6, 10), (6..8, 30)]);
        let pieces = vec![piece(0..2, 3..5), piece(2..6, 8..12)];
        parameter.split = Some(Split { whole: vec![4, 14], dim: 1, outer: 0, pieces, shared: Vec::new() });
        let expected: Vec<usize> =
            (0..4).flat_map(|row| [3, 4, 8, 9, 10, 11].map(|column| row * 14 + column)).collect();
        for (start, end) in [(0, 24), (1, 23), (2, 3), (5, 14), (12, 12)] {
            assert_eq!(whole_places(&parameter, start..end), expected[start..end]);
        }
    }

    proptest! {
        /// Design invariant 3: one flat buffer, aligned, padded to the shard count, every element
        /// in exactly one shard.
        #[test]
        fn a_unit_is_one_flat_buffer_padded_to_the_shard_count(
            sizes in prop::collection::vec(1usize..500, 1..8), shards in 1usize..9,
        ) {
            let parameters: Vec<_> = sizes.iter().map(|n| vector(*n)).collect();
            let layout = UnitLayout::new(&parameters, shards);
            prop_assert_eq!(layout.elements(), layout.shard_elements() * shards);
            prop_assert!(layout.shard_elements().is_multiple_of(UnitLayout::QUANTUM));
            prop_assert!(layout.elements() - layout.flat_elements() < shards * UnitLayout::QUANTUM);
            let mut end = 0;
            for (index, size) in sizes.iter().enumerate() {
                let range = layout.range(index);
                prop_assert!(range.start >= end && range.start.is_multiple_of(UnitLayout::ALIGN) && range.len() == *size);
                end = range.end;
                let parts: Vec<_> = (0..shards).flat_map(|shard| layout.part_in_shard(index, shard)).collect();
                prop_assert_eq!(parts, (0..*size).collect::<Vec<_>>());
            }
            prop_assert!(end <= layout.elements());
        }

        /// Trained parts of experts are the end of the trained region.
        #[test]
        fn trained_parts_of_experts_end_the_trained_region(
            kinds in prop::collection::vec((1usize..3000, any::<bool>(), any::<bool>()), 1..9),
        ) {
            let parameter = |(n, of_experts, trained): &(usize, bool, bool)| {
                ParameterSpec { of_experts: *of_experts, trained: *trained, ..vector(*n) }
            };
            let parameters: Vec<_> = kinds.iter().map(parameter).collect();
            let layout = UnitLayout::new(&parameters, 1);
            let experts = layout.experts();
            for (index, (_, of_experts, trained)) in kinds.iter().enumerate() {
                let range = layout.range(index);
                let inside = experts.start <= range.start && range.end <= experts.end;
                prop_assert_eq!(inside, *of_experts && *trained);
            }
            let trained: Vec<_> = layout.trained().map(|(_, range)| range).collect();
            prop_assert!(trained.is_sorted_by(|a, b| a.end <= b.start));
            prop_assert_eq!(trained.len(), kinds.iter().filter(|(_, _, trained)| *trained).count());
        }

        /// Trained parameters come first, and each region divides into equal shards.
        #[test]
        fn trained_parameters_are_a_region_of_their_own(
            sizes in prop::collection::vec((1usize..9000, any::<bool>()), 1..8), shards in 1usize..5,
        ) {
            let parameter = |(n, trained): &(usize, bool)| ParameterSpec { trained: *trained, ..vector(*n) };
            let parameters: Vec<_> = sizes.iter().map(parameter).collect();
            let layout = UnitLayout::new(&parameters, shards);
            let frozen = layout.elements() - layout.trained_elements();
            prop_assert_eq!(layout.trained_elements(), layout.shard_elements() * shards);
            prop_assert_eq!(frozen, layout.frozen_shard_elements() * shards);
            for (index, (size, trained)) in sizes.iter().enumerate() {
                let range = layout.range(index);
                prop_assert!(range.len() == *size && (range.end <= layout.trained_elements()) == *trained);
                prop_assert!(range.end <= layout.elements());
                let parts: Vec<_> = (0..shards).flat_map(|shard| layout.part_in_shard(index, shard)).collect();
                prop_assert_eq!(parts, (0..*size).collect::<Vec<_>>());
            }
            let all = layout.trained().chain(layout.frozen()).map(|(_, range)| range).collect::<Vec<_>>();
            prop_assert!(all.len() == sizes.len() && all.is_sorted_by(|a, b| a.end <= b.start));
        }
    }
}
