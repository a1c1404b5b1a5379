//! Constraints on weights during training.
//!
//! *Quantisation-aware training*: forward and backward read the matrices of blocks rounded to the
//! grid of `trainyard quantize --method rtn`, so the loss that is lowered is that of the rounded
//! model. The gradient goes to the f32 masters as it is (the straight-through estimator, Bengio et
//! al. 2013). Masters are rounded where the copy that forward reads is written from them: in the
//! update, once a step, however often the copy is read. So the masters of a group must lie on one
//! rank, which is checked before a run begins.
//!
//! *Gradual magnitude pruning* (Zhu & Gupta 2017): the smallest weights of a matrix become zero,
//! more of them at every choice, `s (1 - (1 - x)^3)` when `x` of the way from the first to the last
//! choice is done. A weight that is zero before an update is zero after it, so the zeros of the
//! masters are the mask: nothing else is kept or stored, and a resumed run has the same one. A
//! weight that is zero by chance stays zero too.

use crate::Result;
use crate::state::{Holding, does_not_fit, overlap};
use serde::Serialize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use trainyard_autograd::ParamId;
use trainyard_model::weights::{PackedFormat, is_packed};
use trainyard_model::{Model, ParameterSpec, UnitLayout};
use trainyard_program::Extent;
use trainyard_tensor::ops::sparsity::{self, Masked};
use trainyard_tensor::sparsity::Pattern;
use trainyard_tensor::{DType, Purpose, Tensor, ops};

/// The values that weights may have during training.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct WeightConstraints {
    /// The grid to which the matrices of blocks are rounded before forward reads them; None if they
    /// are not.
    pub grid: Option<PackedFormat>,
    /// The first update whose result is rounded to the grid, from 1; 0: the weights that a run
    /// begins with are.
    pub grid_begin: u64,
    /// The rule by which weights of the matrices of blocks become zero; None if they do not.
    pub pruning: Option<Pruning>,
}

/// The rule by which weights become zero.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Pruning {
    /// The number and the places of the zeros at the end.
    #[serde(serialize_with = "by_debug")]
    pub pattern: Pattern,
    /// Number of updates before the first zeros.
    pub begin: u64,
    /// The update that chooses the last zeros.
    pub end: u64,
    /// Number of updates from one choice to the next.
    pub interval: u64,
}

fn by_debug<S: serde::Serializer>(pattern: &Pattern, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{pattern:?}"))
}

impl Pruning {
    /// The share of all zeros that update `update`, from 1, chooses; None if it keeps those that
    /// there are.
    pub fn chooses(&self, update: u64) -> Option<f64> {
        let Pruning { begin, end, interval, .. } = *self;
        let is_due = begin < update && update < end && (update - begin).is_multiple_of(interval);
        let left = 1.0 - update.saturating_sub(begin) as f64 / end.saturating_sub(begin).max(1) as f64;
        match update == end {
            true => Some(1.0),
            false => is_due.then_some(1.0 - left.powi(3)),
        }
    }
}

/// A matrix of a block.
struct Matrix<'m> {
    spec: &'m ParameterSpec,
    name: String,
    /// Its elements in the unit's flat buffer.
    range: Range<usize>,
}

/// The matrices of a unit that are rounded and pruned: those that `trainyard quantize` rounds.
fn matrices<'m>(model: &'m Model, unit: usize, layout: &UnitLayout) -> Vec<Matrix<'m>> {
    let of_unit = &model.units()[unit];
    let matrix = |(index, spec): (usize, &'m ParameterSpec)| {
        let is_matrix = is_packed(model, ParamId::new(unit as u32, index as u32));
        let name = || format!("{}.{}", of_unit.name(), spec.name);
        is_matrix.then(|| Matrix { spec, name: name(), range: layout.range(index) })
    };
    of_unit.parameters().iter().enumerate().filter_map(matrix).collect()
}

impl WeightConstraints {
    /// True if the f32 masters are separate from what forward reads in `compute`.
    pub fn separate_masters(&self, compute: DType) -> bool {
        compute != DType::F32 || self.grid.is_some()
    }

    /// Checks that the constraints fit the model and its division over ranks.
    ///
    /// # Errors
    /// Groups that do not divide rows, or that ranks would share; frozen matrices; experts.
    pub(crate) fn check(&self, model: &Model, holding: &Holding) -> Result<()> {
        let pruning = self.pruning.map(|pruning| match pruning.pattern {
            Pattern::Share(_) => ("pruning.sparsity", None),
            Pattern::Neighbours { of, .. } => ("pruning.pattern", Some(of)),
        });
        let grid = self.grid.map(|format| ("quantization.aware", format));
        let Some((key, what)) = grid
            .map(|(key, _)| (key, "mixtures of experts cannot be quantised yet"))
            .or(pruning.map(|(key, _)| (key, "mixtures of experts cannot be pruned yet")))
        else {
            return Ok(());
        };
        if model.spec().is_some_and(|spec| spec.experts.is_some()) {
            return Err(does_not_fit(format!("{key}: {what}")));
        }
        for unit in (0..model.units().len()).filter(|unit| holding.holds(*unit)) {
            let layout = UnitLayout::new(model.units()[unit].parameters(), holding.shards);
            for matrix in matrices(model, unit, &layout) {
                if !matrix.spec.trained {
                    return Err(does_not_fit(format!(
                        "{key} changes weights that are trained, and {} is frozen: take it out of fine_tuning.freeze",
                        matrix.name
                    )));
                }
                if let Some((_, format)) = grid {
                    check_groups(&matrix, model, format)?;
                    check_ranks(&matrix, &layout, holding, "quantization.group", format.group_in(matrix.columns()))?;
                }
                match pruning {
                    Some((_, Some(of))) => {
                        check_neighbours(&matrix, of)?;
                        check_ranks(&matrix, &layout, holding, "pruning.pattern", of)?;
                    }
                    Some((key, None)) => check_whole(&matrix, holding, key)?,
                    None => {}
                }
            }
        }
        Ok(())
    }
}

impl Matrix<'_> {
    /// Elements of a row that the rank holds.
    fn columns(&self) -> usize {
        self.spec.row_elements()
    }

    /// The ends of the parts of rows that tensor-parallel ranks hold; none if rows are whole.
    fn cuts(&self) -> Vec<usize> {
        let split = self.spec.split.as_ref().filter(|split| split.dim > 0);
        let pieces = split.into_iter().flat_map(|split| &split.pieces);
        pieces.flat_map(|piece| [&piece.local, &piece.whole]).flat_map(|range| [range.start, range.end]).collect()
    }
}

/// Checks that a rank holds all weights of a matrix, which are compared with each other.
fn check_whole(matrix: &Matrix<'_>, holding: &Holding, key: &str) -> Result<()> {
    let divided = match holding.placement.masters {
        Extent::Shard if holding.shards > 1 => Some("take ZeRO stage 0"),
        _ => matrix.spec.split.as_ref().map(|_| "set parallel.tensor_parallel_degree = 1"),
    };
    match divided {
        None => Ok(()),
        Some(instead) => Err(does_not_fit(format!(
            "{key} compares all weights of a matrix, and a rank holds a part of {}: {instead}, or pruning.pattern, which \
             compares neighbours",
            matrix.name
        ))),
    }
}

/// Checks that the neighbours of a pattern divide the rows of a matrix.
fn check_neighbours(matrix: &Matrix<'_>, of: usize) -> Result<()> {
    let columns = matrix.columns();
    if !columns.is_multiple_of(of) {
        return Err(does_not_fit(format!(
            "pruning.pattern: {} has rows of {columns} weights, which do not divide into groups of {of}",
            matrix.name
        )));
    }
    check_cuts(matrix, "pruning.pattern", of)
}

/// Checks that tensor parallelism cuts no group.
fn check_cuts(matrix: &Matrix<'_>, key: &str, group: usize) -> Result<()> {
    match matrix.cuts().into_iter().all(|cut| cut.is_multiple_of(group)) {
        true => Ok(()),
        false => Err(does_not_fit(format!(
            "parallel.tensor_parallel_degree cuts the rows of {} inside groups of {group} weights: set another {key}, or \
             parallel.tensor_parallel_degree = 1",
            matrix.name
        ))),
    }
}

/// Checks that groups divide the rows of a matrix, and the parts of them that ranks hold.
fn check_groups(matrix: &Matrix<'_>, model: &Model, format: PackedFormat) -> Result<()> {
    let of_columns = matrix.spec.split.as_ref().filter(|split| split.dim > 0);
    let whole = of_columns.map_or(matrix.columns(), |split| split.whole[1]);
    let group = format.group_in(whole);
    if !whole.is_multiple_of(group) {
        let widths = |model: &Model| -> Vec<usize> {
            let packed = model.parameters().filter(|(id, _)| is_packed(model, *id));
            packed.map(|(_, spec)| spec.split.as_ref().map_or(spec.row_elements(), |split| split.whole[1])).collect()
        };
        let widths = widths(model);
        let fits = |size: &usize| widths.iter().all(|width| width.is_multiple_of(*size));
        let others: Vec<String> =
            [256, 128, 64, 32, 16].into_iter().filter(fits).map(|size| size.to_string()).collect();
        return Err(does_not_fit(format!(
            "quantization.group = {group} does not divide the {whole} inputs of {}: {}0 has one scale per row",
            matrix.name,
            if others.is_empty() { String::new() } else { format!("{} would; ", others.join(" or ")) },
        )));
    }
    check_cuts(matrix, "quantization.group", group)
}

/// Checks that no `group` of weights that belong together lies on two ranks of the shard group.
/// `key` asks for groups.
fn check_ranks(matrix: &Matrix<'_>, layout: &UnitLayout, holding: &Holding, key: &str, group: usize) -> Result<()> {
    let Range { start, end } = matrix.range;
    let cuts = (1..holding.shards).map(|shard| shard * layout.shard_elements());
    let mut inside = cuts.filter(|cut| (start..end).contains(cut) && holding.placement.masters == Extent::Shard);
    match inside.all(|cut| (cut - start).is_multiple_of(group)) {
        true => Ok(()),
        false => Err(does_not_fit(format!(
            "{key}: a group of {group} weights of {} would lie on two ranks: take ZeRO stage 0, or a group that \
             divides all of the model's tensors",
            matrix.name
        ))),
    }
}

/// The matrices of a unit that are rounded to a grid.
pub(crate) struct GridMatrices {
    bits: u8,
    /// The first update whose result is rounded.
    begin: u64,
    /// Number of updates in the weights.
    updates: Arc<AtomicU64>,
    /// Their elements in the unit's flat buffer, and the number of neighbours that share a scale.
    matrices: Vec<(Range<usize>, usize)>,
}

impl GridMatrices {
    /// Those of the parts that a rank holds.
    pub fn of(
        model: &Model,
        unit: usize,
        holding: &Holding,
        (format, begin): (PackedFormat, u64),
        updates: &Arc<AtomicU64>,
    ) -> GridMatrices {
        let layout = UnitLayout::new(model.units()[unit].parameters(), holding.shards);
        let of_matrix = |matrix: Matrix<'_>| (matrix.range, format.group_in(matrix.spec.row_elements()));
        let matrices = matrices(model, unit, &layout).into_iter().map(of_matrix).collect();
        GridMatrices { bits: format.bits, begin, updates: Arc::clone(updates), matrices }
    }

    /// True if the weights are rounded now.
    pub fn rounds(&self) -> bool {
        self.updates.load(Ordering::Relaxed) >= self.begin
    }

    /// Writes to `copy` the matrices among `masters`, rounded. Both are the elements `range` of the
    /// flat buffer.
    ///
    /// # Errors
    /// A range that cuts a group.
    pub fn round(&self, range: &Range<usize>, masters: &Tensor, copy: &mut Tensor) -> Result<()> {
        for (matrix, group) in &self.matrices {
            let part = overlap(matrix, range);
            let cut = |end: usize| !(end - matrix.start).is_multiple_of(*group);
            if part.is_empty() {
                continue;
            }
            if cut(part.start) || cut(part.end) {
                return Err(cut_by_a_chunk("quantization.group", *group));
            }
            let (at, n) = (part.start - range.start, part.len());
            ops::grid::round_to_grid(self.bits, *group, &masters.view(at, [n])?, &mut copy.view(at, [n])?)?;
        }
        Ok(())
    }
}

fn cut_by_a_chunk(key: &str, group: usize) -> crate::EngineError {
    does_not_fit(format!(
        "memory.offload.chunk_elements cuts groups of {group} weights: set a {key} that divides all of the model's tensors"
    ))
}

/// The matrices of a unit that are pruned.
pub(crate) struct PrunedMatrices {
    pruning: Pruning,
    /// The elements of each in the unit's flat buffer: each matrix of weight files by itself.
    matrices: Vec<Range<usize>>,
}

/// The zeros that an update keeps, of the elements `range` of a flat buffer.
pub(crate) struct Zeros {
    /// Parts of the range, with their masks.
    masks: Vec<(Range<usize>, Tensor)>,
}

/// Numbers of weights that may become zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sparsity {
    /// Those that are zero.
    pub zeros: u64,
    /// All of them.
    pub weights: u64,
}

impl Sparsity {
    /// The share that is zero; None if there are none.
    pub fn share(&self) -> Option<f64> {
        (self.weights > 0).then(|| self.zeros as f64 / self.weights as f64)
    }
}

impl std::ops::AddAssign for Sparsity {
    fn add_assign(&mut self, other: Sparsity) {
        self.zeros += other.zeros;
        self.weights += other.weights;
    }
}

impl PrunedMatrices {
    /// Those of the parts that a rank holds.
    pub fn of(model: &Model, unit: usize, holding: &Holding, pruning: Pruning) -> PrunedMatrices {
        let layout = UnitLayout::new(model.units()[unit].parameters(), holding.shards);
        let mut all = Vec::new();
        for matrix in matrices(model, unit, &layout) {
            let (first, width) = (matrix.range.start, matrix.columns());
            let whole = matrix.spec.split.is_some() || matrix.spec.sources.is_empty();
            match whole {
                // Neighbours are compared, which no part cuts.
                true => all.push(matrix.range),
                false => {
                    let rows = matrix.spec.sources.iter().map(|source| &source.rows);
                    all.extend(rows.map(|rows| first + rows.start * width..first + rows.end * width));
                }
            }
        }
        PrunedMatrices { pruning, matrices: all }
    }

    /// The weights among `masters`, the elements `range` of the flat buffer, that are zero after
    /// update `update`.
    ///
    /// # Errors
    /// A range that cuts what is compared.
    pub fn zeros(&self, update: u64, range: &Range<usize>, masters: &Tensor) -> Result<Zeros> {
        let chosen = self.pruning.chooses(update);
        let mut masks = Vec::new();
        for matrix in &self.matrices {
            let part = overlap(matrix, range);
            if part.is_empty() {
                continue;
            }
            let pattern = self.pruning.pattern;
            let compared = match pattern {
                Pattern::Share(_) => matrix.len(),
                Pattern::Neighbours { of, .. } => of,
            };
            let cut = |end: usize| !(end - matrix.start).is_multiple_of(compared);
            if cut(part.start) || cut(part.end) {
                return Err(cut_by_a_chunk("pruning.pattern", compared));
            }
            let count = |progress| pattern.zeros_at(progress, compared);
            let masked = match (chosen, pattern) {
                (None, _) => Masked::Zeros,
                (Some(progress), Pattern::Share(_)) => Masked::Lowest(count(progress)),
                (Some(progress), Pattern::Neighbours { of, .. }) => Masked::OfNeighbours { count: count(progress), of },
            };
            let bytes = sparsity::mask_bytes(part.len());
            let mut mask = masters.device().empty([bytes], DType::U8, Purpose::Workspace)?;
            sparsity::mask(masked, &masters.view(part.start - range.start, [part.len()])?, &mut mask)?;
            masks.push((part, mask));
        }
        Ok(Zeros { masks })
    }
}

impl Zeros {
    /// Sets what is masked to zero in `masters` and in the copy that forward reads, the elements
    /// `range` of the flat buffer. Returns what is zero there; no zeros on meta.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn clear(&self, range: &Range<usize>, masters: &Tensor, copy: Option<&Tensor>) -> Result<Sparsity> {
        let mut sparsity = Sparsity::default();
        for (part, mask) in &self.masks {
            let view = |tensor: &Tensor| tensor.view(part.start - range.start, [part.len()]);
            let mut copy = copy.map(view).transpose()?;
            let zeros = sparsity::clear(mask, &mut view(masters)?, copy.as_mut())?;
            sparsity += Sparsity { zeros: zeros as u64, weights: part.len() as u64 };
        }
        Ok(sparsity)
    }
}
