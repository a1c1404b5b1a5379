//! Gradients of a rank, f32 and flat, in two forms per unit:
//!
//! - *fresh* sums: backward adds the gradients of this rank's micro-batches to them. A program may
//!   fold them together, and reduces them over ranks;
//! - the *sum* of the step, which reductions write and the update reads. It is resident on the
//!   device, or lies in a tier while nothing is added to it.

use super::{CurrentPeriod, Holding, does_not_fit, lock, overlap};
use crate::Result;
use crate::links::{Link, ReduceLinks, Reduction, reduce};
use crate::tier::{Lower, Stored, Tiers, aligned};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use trainyard_autograd::{AutogradError, GradientTarget, Gradients, ParamId};
use trainyard_model::{Model, ParameterSpec, UnitLayout};
use trainyard_program::{Extent, Fresh};
use trainyard_tensor::ops::optim::ChunkSums;
use trainyard_tensor::{DType, Device, Purpose, Tensor, TensorError, ops};

/// The gradients of every unit, f32 and flat.
pub struct GradientState {
    device: Device,
    holding: Holding,
    units: Vec<UnitGradients>,
    lowered: Option<Lowered>,
    /// Memory for the shared gradients of one unit, while the reduce lane sums them.
    shared: Option<Tensor>,
    pub(crate) period: CurrentPeriod,
}

/// The tier of offloaded sums.
struct Lowered {
    lower: Lower,
    /// Sums of squares of the elements that the update reads. They are computed when a sum is
    /// evicted.
    squares: Mutex<ChunkSums>,
}

/// One unit's gradients.
struct UnitGradients {
    layout: UnitLayout,
    shapes: Vec<Vec<usize>>,
    /// The elements of the flat buffer that the sum holds.
    range: Range<usize>,
    /// The elements that this rank's update reads.
    read: Range<usize>,
    /// The elements that count in the norm on this rank; None if all do.
    counted: Option<Vec<Range<usize>>>,
    /// The elements whose gradients the tensor-parallel group sums, each run with its place in a
    /// buffer for those of all ranks; and the size of that buffer.
    shared: (Vec<(Range<usize>, usize)>, usize),
    /// Offset of the sum in the store.
    offset: u64,
    /// The sum on the host, if it lies there.
    on_host: Option<Tensor>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The sum; None while it is in its tier.
    resident: Option<Tensor>,
    /// Memory for sums that will be fetched or reduced. There is more than one while the compute
    /// lane is ahead.
    coming: VecDeque<Tensor>,
    /// Evicted sums that were fetched again into other memory, oldest first. The compute lane frees
    /// each when it knows that its eviction is done.
    gone: VecDeque<Tensor>,
    /// Sums that backward has written and that are not folded or reduced yet, oldest first.
    fresh: Vec<FreshSum>,
    /// Buffers that a reduction has read, with its instruction number. The compute lane frees each
    /// when it knows that the reduction is done, so that memory does not depend on the reduction's
    /// speed.
    spent: Vec<(u32, Tensor)>,
    /// True if `resident` holds this step's sum over ranks, or the first part of it.
    reduced: bool,
}

/// A unit's gradients after the backwards of a step: the fresh sums and their state.
pub struct AfterBackward {
    fresh: Vec<FreshSum>,
    reduced: bool,
}

/// A sum over some micro-batches of this rank.
#[derive(Clone)]
struct FreshSum {
    flat: Tensor,
    /// Per parameter, true once its gradient has been written, or if it has none. The first
    /// contribution overwrites,
    /// so nothing needs zeroing.
    written: Vec<bool>,
    /// The last micro-batch in it.
    micro_batch: u32,
    /// Number of micro-batches folded into it.
    count: u32,
}

/// The target of one micro-batch's gradient contributions.
pub struct MicroBatchGradients<'g> {
    gradients: &'g GradientState,
    micro_batch: u32,
    /// True if each micro-batch has its own sum until it is folded or reduced.
    apart: bool,
}

impl GradientState {
    /// Makes zero gradients for `model`, on the device or in their tier of `tiers`.
    pub fn new(device: &Device, model: &Model, holding: Holding, tiers: &Tiers) -> Result<GradientState> {
        let lower = tiers.gradients.as_ref();
        let mut offset = 0;
        let mut unit = |unit: usize| {
            let specs = holding.parameters(model, unit);
            let layout = UnitLayout::new(specs, holding.shards);
            let range = holding.range(holding.placement.gradients, &layout);
            let read = holding.range(holding.placement.masters, &layout);
            let zeros = |device: &Device| device.zeros([range.len()], DType::F32, Purpose::Grads);
            let held = holding.holds(unit) && layout.trained_elements() > 0;
            let resident = (held && lower.is_none()).then(|| zeros(device)).transpose()?;
            let on_host = lower.and_then(Lower::host).filter(|_| held).map(zeros).transpose()?;
            let shapes = specs.iter().map(|spec| spec.shape.clone()).collect();
            let state = Mutex::new(State { resident, ..State::default() });
            let begin = offset;
            offset += aligned(4 * range.len() as u64);
            let counted = counted(specs, &layout, [model.tensor_split().rank, model.expert_split().rank]);
            let shared = shared(specs, &layout);
            Ok(UnitGradients { layout, shapes, range, read, counted, shared, offset: begin, on_host, state })
        };
        let units = (0..model.units().len()).map(&mut unit).collect::<Result<Vec<_>>>()?;
        let lowered = |lower: &Lower| -> Result<Lowered> {
            let read: Vec<usize> = units.iter().map(|unit| unit.read.len()).collect();
            let squares = Mutex::new(ChunkSums::new(device, &read, UnitLayout::QUANTUM)?);
            Ok(Lowered { lower: lower.clone(), squares })
        };
        let lowered = lower.map(lowered).transpose()?;
        let most = units.iter().map(|unit| unit.shared.1).max().unwrap_or(0);
        let shared = (most > 0).then(|| device.zeros([most], DType::F32, Purpose::Comm)).transpose()?;
        let period = CurrentPeriod::default();
        Ok(GradientState { device: device.clone(), holding, units, lowered, shared, period })
    }

    /// Makes no gradients, for a rank that does not train.
    pub fn none(device: &Device) -> GradientState {
        GradientState {
            device: device.clone(),
            holding: Holding::whole(),
            units: Vec::new(),
            lowered: None,
            shared: None,
            period: CurrentPeriod::default(),
        }
    }

    /// Begins a step: every gradient counts as zero.
    pub fn begin_step(&self) {
        for unit in &self.units {
            let mut state = lock(&unit.state);
            state.fresh.clear();
            state.spent.clear();
            state.reduced = false;
        }
        self.leave_all();
    }

    /// True if sums lie in a tier while nothing is added to them.
    fn is_offloaded(&self) -> bool {
        self.lowered.is_some()
    }

    fn is_in_place(&self) -> bool {
        self.holding.placement.fresh_gradients == Fresh::InPlace
    }

    /// Allocates memory for a unit's sum that will be fetched or reduced.
    pub fn take(&self, unit: usize) -> Result<()> {
        let unit = &self.units[unit];
        let sum = self.device.empty([unit.range.len()], DType::F32, Purpose::Grads)?;
        lock(&unit.state).coming.push_back(sum);
        Ok(())
    }

    /// Reads a unit's sum from its tier.
    pub fn fetch(&self, unit: usize) -> Result<()> {
        let unit = &self.units[unit];
        let mut sum = {
            let mut state = lock(&unit.state);
            let sum = state.coming.pop_front().expect("memory is taken before a sum comes");
            let gone = state.resident.replace(sum.clone());
            state.gone.extend(gone);
            if self.is_in_place() {
                // The next micro-batches add to it.
                let written = vec![true; unit.shapes.len()];
                state.fresh = vec![FreshSum { flat: sum.clone(), written, micro_batch: 0, count: 1 }];
            }
            sum
        };
        match (&self.lowered, &unit.on_host) {
            (_, Some(on_host)) => Ok(sum.transfer_from(on_host)?),
            (Some(Lowered { lower: Lower::Disk(store), .. }), _) if !self.device.is_meta() => {
                Ok(sum.overwrite_bytes(|bytes| store.read(unit.offset, bytes))??)
            }
            _ => Ok(()),
        }
    }

    /// Writes a unit's sum to its tier, and sums the squares of the elements that the update will
    /// read. Gradients that no backward has written are set to zero first.
    pub fn evict(&self, number: usize) -> Result<()> {
        let unit = &self.units[number];
        let sum = unit.sum();
        if self.is_in_place()
            && let Some(fresh) = lock(&unit.state).fresh.last_mut()
        {
            unit.complete(fresh)?;
        }
        let lowered = self.lowered.as_ref().expect("gradients lie in a tier");
        let read = sum.view(unit.read.start - unit.range.start, [unit.read.len()])?;
        lock(&lowered.squares).add_up(number, &read)?;
        match (&lowered.lower, &unit.on_host) {
            (_, Some(on_host)) => Ok(on_host.clone().transfer_from(&sum)?),
            (Lower::Disk(store), _) if !self.device.is_meta() => {
                Ok(sum.with_bytes(|bytes| store.write(unit.offset, bytes))??)
            }
            _ => Ok(()),
        }
    }

    /// Frees the memory of a unit's evicted sum.
    pub fn leave(&self, unit: usize) {
        let mut state = lock(&self.units[unit].state);
        if state.gone.pop_front().is_some() {
            return;
        }
        state.resident = None;
        if self.is_in_place() {
            state.fresh.clear();
        }
    }

    /// Frees the memory of all offloaded sums.
    pub fn leave_all(&self) {
        for unit in self.units.iter().filter(|_| self.is_offloaded()) {
            *lock(&unit.state) = State::default();
        }
    }

    /// The place in the tier of elements `range` of a unit's sum; None if sums are resident.
    pub fn in_tier(&self, unit: usize, range: &Range<usize>) -> Result<Option<Stored>> {
        let unit = &self.units[unit];
        let within = range.start - unit.range.start;
        Ok(match (&self.lowered, &unit.on_host) {
            (_, Some(on_host)) => Some(Stored::Here(on_host.view(within, [range.len()])?)),
            (Some(Lowered { lower: Lower::Disk(store), .. }), _) => {
                Some(Stored::Away(Arc::clone(store), unit.offset + 4 * within as u64))
            }
            _ => None,
        })
    }

    /// The state of every unit's gradients after the backwards. [`GradientState::stand_at`]
    /// restores it after a graph has done the same work without the host.
    pub fn stand(&self) -> Vec<AfterBackward> {
        let unit = |unit: &UnitGradients| {
            let state = lock(&unit.state);
            AfterBackward { fresh: state.fresh.clone(), reduced: state.reduced }
        };
        self.units.iter().map(unit).collect()
    }

    /// Restores the state that [`GradientState::stand`] returned.
    pub fn stand_at(&self, units: &[AfterBackward]) {
        for (unit, after) in self.units.iter().zip(units) {
            let mut state = lock(&unit.state);
            (state.fresh, state.reduced) = (after.fresh.clone(), after.reduced);
        }
    }

    /// The resident sums of the step, by unit.
    pub fn residents(&self) -> Vec<Tensor> {
        self.units.iter().filter_map(|unit| lock(&unit.state).resident.clone()).collect()
    }

    /// The target of the contributions of `micro_batch`. With `apart` each micro-batch has its own
    /// sum, to be folded or reduced.
    pub fn of(&self, micro_batch: u32, apart: bool) -> MicroBatchGradients<'_> {
        MicroBatchGradients { gradients: self, micro_batch, apart }
    }

    /// Folds the newest sums of a unit along a binary tree: while the last two hold equally many
    /// micro-batches, the later is added to the earlier.
    pub fn fold(&self, unit: usize) -> Result<()> {
        let unit = &self.units[unit];
        let mut state = lock(&unit.state);
        while let [.., earlier, later] = state.fresh.as_slice()
            && earlier.count == later.count
        {
            let mut later = state.fresh.pop().expect("two were there");
            unit.complete(&mut later)?;
            let earlier = state.fresh.last_mut().expect("two were there");
            unit.complete(earlier)?;
            ops::accumulate(&later.flat, &mut earlier.flat, false)?;
            earlier.count += later.count;
            earlier.micro_batch = later.micro_batch;
        }
        Ok(())
    }

    /// Sums a unit's oldest fresh gradient over the data ranks. The result overwrites the resident
    /// sum, or is added to it.
    pub fn reduce(&self, number: usize, reduction: Reduction, links: &mut ReduceLinks) -> Result<()> {
        let unit = &self.units[number];
        let accumulate = reduction.accumulate;
        let (mut fresh, resident) = {
            let mut state = lock(&unit.state);
            // The oldest is taken because the next micro-batch may have begun. Without any
            // contribution the gradient is zero.
            let fresh = if state.fresh.is_empty() { self.begin(unit, &mut state, 0)? } else { state.fresh.remove(0) };
            if self.is_offloaded() && !self.is_in_place() && !accumulate {
                state.resident = state.coming.pop_front();
            }
            let resident = state.resident.clone().expect("the program brings sums before it adds to them");
            (fresh, resident)
        };
        unit.complete(&mut fresh)?;
        let mut own = self.holding.own(&unit.layout);
        let mut sum = reduce(number, &mut fresh.flat, own.clone(), unit.layout.experts(), reduction, links)?;
        let summed = self.holding.summed(&unit.layout);
        if summed.len() > own.len() {
            // Nothing is sharded, and several ranks divide the sequences: each needs the whole sum.
            links.shard.all_gather_in_place(&mut fresh.flat)?;
            (own, sum) = (summed.clone(), fresh.flat.view(summed.start, [summed.len()])?);
        }
        let part = overlap(&own, &unit.range);
        let mut target = resident.view(part.start - unit.range.start, [part.len()])?;
        if !target.overlaps(&sum) {
            ops::accumulate(&sum, &mut target, !accumulate)?;
        }
        let mut state = lock(&unit.state);
        state.reduced = true;
        if !fresh.flat.overlaps(&resident) {
            state.spent.push((reduction.number, fresh.flat));
        }
        Ok(())
    }

    /// Frees the buffers of reductions up to instruction `number`.
    pub fn give_back(&self, number: u32) {
        for unit in &self.units {
            lock(&unit.state).spent.retain(|(reduction, _)| *reduction > number);
        }
    }

    /// Ends the backwards of a step: zeroes every gradient that was neither written nor reduced, so
    /// that the resident sums are the step's gradients.
    pub fn end_backward(&self) -> Result<()> {
        for unit in self.held() {
            self.complete_sum(unit)?;
            let mut state = lock(&self.units[unit].state);
            state.spent.clear();
            state.fresh.clear();
        }
        Ok(())
    }

    /// Zeroes what was neither written nor reduced of a unit's sum in this step.
    fn complete_sum(&self, unit: usize) -> Result<()> {
        let unit = &self.units[unit];
        let mut state = lock(&unit.state);
        if self.is_in_place() && !state.reduced && !self.is_offloaded() {
            let before = state.fresh.pop();
            let fresh = before.map_or_else(|| self.begin(unit, &mut state, 0), Ok)?;
            unit.complete(&mut { fresh })?;
            state.reduced = true;
        }
        Ok(())
    }

    /// The gradient of a unit of which all contributions of the step have come, for the servers.
    pub(crate) fn completed(&self, unit: usize) -> Result<Tensor> {
        self.complete_sum(unit)?;
        Ok(self.units[unit].sum())
    }

    /// The units of which this rank holds something that the step trains.
    fn held(&self) -> impl Iterator<Item = usize> + '_ {
        let trained = |unit: &usize| self.units[*unit].layout.trained_elements() > 0 && !self.rests(*unit);
        (0..self.units.len()).filter(|unit| self.holding.holds(*unit)).filter(trained)
    }

    /// True if the step trains nothing of a unit, which others train.
    fn rests(&self, unit: usize) -> bool {
        self.period.is_in(self.units[unit].layout.all_rest_in())
    }

    /// Sums the shared part of a unit's gradient over the tensor-parallel group. Where ranks have
    /// reduced shards of gradients, their parts are brought together first: shards of different
    /// ranks of the group may have different elements.
    pub(crate) fn sum_shared(&self, unit: usize, tensor: &Link, shard: &Link) -> Result<()> {
        self.complete_sum(unit)?;
        let unit = &self.units[unit];
        let (runs, elements) = &unit.shared;
        let Some(memory) = self.shared.as_ref().filter(|_| *elements > 0) else { return Ok(()) };
        let mut buffer = memory.view(0, [*elements])?;
        let sum = unit.sum();
        // The parts of the buffer that this rank has reduced. In ZeRO stage 1 its sum holds more
        // than that.
        let own = self.holding.summed(&unit.layout);
        let held = runs.iter().filter_map(|(run, place)| {
            let held = overlap(run, &own);
            (!held.is_empty()).then(|| (held.start - unit.range.start, place + held.start - run.start, held.len()))
        });
        let held: Vec<(usize, usize, usize)> = held.collect();
        buffer.fill_zero()?;
        for (at, place, length) in &held {
            buffer.view(*place, [*length])?.copy_from(&sum.view(*at, [*length])?)?;
        }
        if self.holding.shards > 1 && self.holding.placement.masters == Extent::Shard {
            // Each element lies in one shard, so the order of the sum changes no bit.
            shard.sum(&mut buffer)?;
        }
        tensor.sum(&mut buffer)?;
        for (at, place, length) in held {
            sum.view(at, [length])?.copy_from(&buffer.view(place, [length])?)?;
        }
        Ok(())
    }

    /// Sums a unit's gradient over the ranks of `link`, each of which has contributed to it.
    pub(crate) fn tie(&self, unit: usize, link: &Link) -> Result<()> {
        self.complete_sum(unit)?;
        link.sum(&mut self.units[unit].sum())
    }

    /// Begins a fresh sum. It is the resident sum if gradients are written in place and this is the
    /// first; else it is a new buffer.
    fn begin(&self, unit: &UnitGradients, state: &mut State, micro_batch: u32) -> Result<FreshSum, TensorError> {
        let in_place = self.is_in_place() && state.fresh.is_empty();
        let flat = match state.resident.clone().filter(|_| in_place) {
            Some(resident) => resident,
            None => {
                let mut flat = self.device.empty([unit.layout.trained_elements()], DType::F32, Purpose::Grads)?;
                unit.zero_gaps(&mut flat)?;
                if in_place {
                    state.resident = Some(flat.clone());
                }
                flat
            }
        };
        let mut written = vec![true; unit.shapes.len()];
        unit.layout.trained().for_each(|(index, _)| written[index] = false);
        Ok(FreshSum { flat, written, micro_batch, count: 1 })
    }

    /// Elements `range` of a unit's resident sum.
    pub fn range(&self, unit: usize, range: Range<usize>) -> Result<Tensor> {
        let unit = &self.units[unit];
        Ok(unit.sum().view(range.start - unit.range.start, [range.len()])?)
    }

    /// Elements `range` of a parameter's resident sum.
    ///
    /// # Errors
    /// When the sum lies in a tier, or this rank holds nothing of the unit that is trained.
    pub fn of_parameter(&self, id: ParamId, range: Range<usize>) -> Result<Tensor> {
        let unit = self.units.get(id.unit as usize).ok_or(AutogradError::NoParameter(id))?;
        let Some(sum) = lock(&unit.state).resident.clone() else {
            return Err(does_not_fit(format!("the gradient of parameter {id} is not on the device")));
        };
        // An empty range may begin before the sum.
        let start = (unit.layout.range(id.index as usize).start + range.start).saturating_sub(unit.range.start);
        Ok(sum.view(if range.is_empty() { 0 } else { start }, [range.len()])?)
    }

    /// The elements `range` of a unit, cut into those that count in the norm, with true, and the
    /// others. Parts of neighbouring ranges that end at whole quanta are those of both together.
    pub fn parts_of_norm(&self, unit: usize, range: &Range<usize>) -> Vec<(Range<usize>, bool)> {
        let (mut all, mut end) = (Vec::new(), range.start);
        for part in self.units[unit].counted_within(range) {
            if end < part.start {
                all.push((end..part.start, false));
            }
            end = part.end;
            all.push((part, true));
        }
        if end < range.end {
            all.push((end..range.end, false));
        }
        all
    }

    /// Sums of squares of the gradients that this rank's update reads, by unit and chunk; none for
    /// units that it does not hold.
    pub fn chunk_sums_of_squares(&self) -> Result<Vec<Vec<f64>>> {
        if let Some(lowered) = &self.lowered {
            let mut sums = lock(&lowered.squares).read()?;
            // Those of units that rest are of an earlier step.
            sums.iter_mut().enumerate().filter(|(unit, _)| self.rests(*unit)).for_each(|(_, sums)| sums.fill(0.0));
            return Ok(sums);
        }
        let mut read = Vec::new();
        let mut of_units = Vec::new();
        for unit in self.held() {
            for part in self.units[unit].counted_here() {
                read.push(self.range(unit, part)?);
                of_units.push(unit);
            }
        }
        let mut sums = vec![Vec::new(); self.units.len()];
        let chunks = ops::optim::chunk_sums_of_squares_of(&read, UnitLayout::QUANTUM)?;
        for (unit, chunks) in of_units.into_iter().zip(chunks) {
            sums[unit].extend(chunks);
        }
        Ok(sums)
    }
}

/// The elements of a unit's flat buffer that count in the norm on the rank with these places in its
/// tensor-parallel and in its expert-parallel group; None if all do.
fn counted(specs: &[ParameterSpec], layout: &UnitLayout, [tensor, experts]: [usize; 2]) -> Option<Vec<Range<usize>>> {
    let is_whole = |spec: &ParameterSpec| match spec.counted_runs(tensor, experts).as_slice() {
        [run] => *run == (0..spec.elements()),
        _ => false,
    };
    let trained = || specs.iter().enumerate().filter(|(_, spec)| spec.trained);
    if trained().all(|(_, spec)| is_whole(spec)) {
        return None;
    }
    let of = |(index, spec): (usize, &ParameterSpec)| {
        let start = layout.range(index).start;
        spec.counted_runs(tensor, experts).into_iter().map(move |run| start + run.start..start + run.end)
    };
    Some(trained().flat_map(of).collect())
}

/// The elements of a unit's flat buffer that the ranks of the tensor-parallel group sum, as in
/// [`ParameterSpec::shared_runs`].
fn shared(specs: &[ParameterSpec], layout: &UnitLayout) -> (Vec<(Range<usize>, usize)>, usize) {
    let (mut all, mut elements) = (Vec::new(), 0);
    for (index, spec) in specs.iter().enumerate().filter(|(_, spec)| spec.trained) {
        let start = layout.range(index).start;
        let (runs, of_all) = spec.shared_runs();
        all.extend(runs.into_iter().map(|(run, place)| (start + run.start..start + run.end, elements + place)));
        elements += of_all;
    }
    (all, elements)
}

impl UnitGradients {
    /// The resident sum. It must not be in its tier.
    fn sum(&self) -> Tensor {
        lock(&self.state).resident.clone().expect("the program brings a sum before it is used")
    }

    /// The elements that this rank's update reads and that count in the norm. They are cut where
    /// chunks end, so that the bits of the norm do not depend on the number of shards.
    fn counted_here(&self) -> Vec<Range<usize>> {
        self.counted_within(&self.read)
    }

    /// The elements within `range` that count in the norm, cut like all.
    fn counted_within(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let Some(counted) = &self.counted else { return std::iter::once(range.clone()).collect() };
        let quantum = UnitLayout::QUANTUM;
        let mut parts = Vec::new();
        for run in counted {
            let mut rest = overlap(run, range);
            for cut in [rest.start.next_multiple_of(quantum), rest.end / quantum * quantum] {
                if rest.start < cut && cut < rest.end {
                    parts.push(rest.start..cut);
                    rest.start = cut;
                }
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
        }
        parts
    }

    /// Zeroes the gradients that nothing has written.
    fn complete(&self, fresh: &mut FreshSum) -> Result<(), TensorError> {
        for (index, written) in fresh.written.iter_mut().enumerate() {
            if !std::mem::replace(written, true) {
                let range = self.layout.range(index);
                fresh.flat.view(range.start, [range.len()])?.fill_zero()?;
            }
        }
        Ok(())
    }

    /// Zeroes the gaps between parameters and after the last.
    fn zero_gaps(&self, flat: &mut Tensor) -> Result<(), TensorError> {
        let starts = self.layout.trained().skip(1).map(|(_, range)| range.start);
        let ends = self.layout.trained().map(|(_, range)| range.end);
        for (end, next) in ends.zip(starts.chain([self.layout.trained_elements()])) {
            flat.view(end, [next - end])?.fill_zero()?;
        }
        Ok(())
    }
}

impl Gradients for MicroBatchGradients<'_> {
    fn target(&mut self, id: ParamId) -> Result<Option<GradientTarget>, AutogradError> {
        let unit = self.gradients.units.get(id.unit as usize).ok_or(AutogradError::NoParameter(id))?;
        if unit.layout.range(id.index as usize).start >= unit.layout.trained_elements() {
            return Ok(None);
        }
        if self.gradients.period.is_in(unit.layout.rests_in(id.index as usize)) {
            return Ok(None);
        }
        let shape = unit.shapes.get(id.index as usize).ok_or(AutogradError::NoParameter(id))?;
        let mut state = lock(&unit.state);
        // The halves of a backward may come after the forward of the next micro-batch, which the
        // loss differentiates.
        let goes_on = |fresh: &FreshSum| !self.apart || fresh.micro_batch == self.micro_batch;
        let at = match state.fresh.iter().rposition(goes_on) {
            Some(at) => at,
            None => {
                let fresh = self.gradients.begin(unit, &mut state, self.micro_batch)?;
                state.fresh.push(fresh);
                state.fresh.len() - 1
            }
        };
        let fresh = &mut state.fresh[at];
        fresh.micro_batch = self.micro_batch;
        let overwrite = !std::mem::replace(&mut fresh.written[id.index as usize], true);
        let tensor = fresh.flat.view(unit.layout.range(id.index as usize).start, shape)?;
        Ok(Some(GradientTarget { tensor, overwrite }))
    }
}
