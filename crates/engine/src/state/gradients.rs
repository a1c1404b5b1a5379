//! Gradients: the resident sum that the update reads, and buffers in which fresh gradients gather before they are folded or reduced.

use super::{Holding, lock, overlap};
use crate::Result;
use crate::links::{ReduceLinks, reduce};
use std::ops::Range;
use std::sync::Mutex;
use trainyard_autograd::{AutogradError, GradientTarget, Gradients, ParamId};
use trainyard_model::{Model, UnitLayout};
use trainyard_program::Fresh;
use trainyard_tensor::{DType, Device, Purpose, Tensor, TensorError, ops};

/// The gradients of every unit, f32 and flat.
pub struct GradientState {
    device: Device,
    holding: Holding,
    units: Vec<UnitGradients>,
}

/// One unit's gradients.
struct UnitGradients {
    layout: UnitLayout,
    shapes: Vec<Vec<usize>>,
    /// The elements of the flat buffer that the resident sum holds.
    range: Range<usize>,
    state: Mutex<State>,
}

struct State {
    resident: Tensor,
    /// What backward has written and nothing has folded or reduced, oldest first.
    fresh: Vec<FreshSum>,
    /// Buffers that a reduction has emptied, with its number: the compute lane gives them back when it knows that the reduction is done, so
    /// that memory does not depend on how fast it was.
    spent: Vec<(u32, Tensor)>,
    /// Whether this step's sum over ranks, or its first part, is in `resident`.
    reduced: bool,
}

/// What backwards have left of a unit's gradients before anything was folded into the step's: the buffers, and what is known of them.
pub struct AfterBackward {
    fresh: Vec<FreshSum>,
    reduced: bool,
}

/// A sum over some micro-batches of this rank.
#[derive(Clone)]
struct FreshSum {
    flat: Tensor,
    /// Whether a parameter's gradient has been written; the first contribution overwrites, so that nothing needs zeroing.
    written: Vec<bool>,
    /// The last micro-batch in it.
    micro_batch: u32,
    /// How many micro-batches have been folded into it.
    count: u32,
}

/// Takes the contributions of one micro-batch.
pub struct MicroBatchGradients<'g> {
    gradients: &'g GradientState,
    micro_batch: u32,
    /// Whether each micro-batch has a sum of its own until it is folded or reduced.
    apart: bool,
}

impl GradientState {
    /// Zero gradients for `model`.
    pub fn new(device: &Device, model: &Model, holding: Holding) -> Result<GradientState> {
        let unit = |unit: &dyn trainyard_model::Unit| {
            let specs = unit.parameters();
            let layout = UnitLayout::new(specs, holding.shards);
            let range = holding.range(holding.placement.gradients, &layout);
            let resident = device.zeros([range.len()], DType::F32, Purpose::Grads)?;
            let shapes = specs.iter().map(|spec| spec.shape.clone()).collect();
            let state = Mutex::new(State { resident, fresh: Vec::new(), spent: Vec::new(), reduced: false });
            Ok(UnitGradients { layout, shapes, range, state })
        };
        let units = model.units().iter().map(|u| unit(u.as_ref())).collect::<Result<_>>()?;
        Ok(GradientState { device: device.clone(), holding, units })
    }

    /// No gradients, for what does not train.
    pub fn none(device: &Device) -> GradientState {
        GradientState { device: device.clone(), holding: Holding::whole(), units: Vec::new() }
    }

    /// Begins a step: every gradient counts as zero.
    pub fn begin_step(&self) {
        for unit in &self.units {
            let mut state = lock(&unit.state);
            state.fresh.clear();
            state.spent.clear();
            state.reduced = false;
        }
    }

    /// Where the gradients of every unit stand, to be put there again by [`GradientState::stand_at`] when the same work has been done without the host.
    pub fn stand(&self) -> Vec<AfterBackward> {
        let unit = |unit: &UnitGradients| {
            let state = lock(&unit.state);
            AfterBackward { fresh: state.fresh.clone(), reduced: state.reduced }
        };
        self.units.iter().map(unit).collect()
    }

    /// As if the work had been done after which [`GradientState::stand`] was asked.
    pub fn stand_at(&self, units: &[AfterBackward]) {
        for (unit, after) in self.units.iter().zip(units) {
            let mut state = lock(&unit.state);
            (state.fresh, state.reduced) = (after.fresh.clone(), after.reduced);
        }
    }

    /// The step's sums, unit by unit.
    pub fn residents(&self) -> Vec<Tensor> {
        self.units.iter().map(|unit| lock(&unit.state).resident.clone()).collect()
    }

    /// Where the contributions of `micro_batch` go. With `apart` each micro-batch has a sum of its own, to be folded or reduced.
    pub fn of(&self, micro_batch: u32, apart: bool) -> MicroBatchGradients<'_> {
        MicroBatchGradients { gradients: self, micro_batch, apart }
    }

    /// Folds the newest sums of a unit along a binary tree: while the last two stand for equally many micro-batches, the later is added
    /// to the earlier.
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

    /// Sums a unit's gradient over the data ranks, into the resident sum or (`accumulate`) on top of it. `number` is the instruction's.
    pub fn reduce(
        &self,
        unit: usize,
        number: u32,
        accumulate: bool,
        dtype: DType,
        links: &mut ReduceLinks,
    ) -> Result<()> {
        let unit = &self.units[unit];
        let (mut fresh, resident) = {
            let mut state = lock(&unit.state);
            // The oldest: the next micro-batch may have begun. Without a contribution the gradient is zero.
            let fresh = if state.fresh.is_empty() { self.begin(unit, &state, 0)? } else { state.fresh.remove(0) };
            (fresh, state.resident.clone())
        };
        unit.complete(&mut fresh)?;
        let own = self.holding.own(&unit.layout);
        let sum = reduce(&mut fresh.flat, own.clone(), dtype, links)?;
        let part = overlap(&own, &unit.range);
        let mut target = resident.view(part.start - unit.range.start, [part.len()])?;
        if !target.overlaps(&sum) {
            ops::accumulate(&sum, &mut target, !accumulate)?;
        }
        let mut state = lock(&unit.state);
        state.reduced = true;
        if !fresh.flat.overlaps(&resident) {
            state.spent.push((number, fresh.flat));
        }
        Ok(())
    }

    /// Gives back the buffers of reductions up to instruction `number`.
    pub fn give_back(&self, number: u32) {
        for unit in &self.units {
            lock(&unit.state).spent.retain(|(reduction, _)| *reduction > number);
        }
    }

    /// Ends the backwards of a step: what no reduction has taken is made complete, so that the resident sums are the step's gradients.
    pub fn end_backward(&self) -> Result<()> {
        for unit in &self.units {
            let mut state = lock(&unit.state);
            state.spent.clear();
            let in_place = self.holding.placement.fresh_gradients == Fresh::InPlace;
            if in_place && !state.reduced {
                let fresh = state.fresh.pop().map_or_else(|| self.begin(unit, &state, 0), Ok)?;
                unit.complete(&mut { fresh })?;
            }
            state.fresh.clear();
        }
        Ok(())
    }

    /// A new sum: the resident one where it is written in place and nothing is in it yet, else a buffer of its own.
    fn begin(&self, unit: &UnitGradients, state: &State, micro_batch: u32) -> Result<FreshSum, TensorError> {
        let in_place = self.holding.placement.fresh_gradients == Fresh::InPlace && state.fresh.is_empty();
        let flat = if in_place {
            state.resident.clone()
        } else {
            let mut flat = self.device.empty([unit.layout.elements()], DType::F32, Purpose::Grads)?;
            unit.zero_gaps(&mut flat)?;
            flat
        };
        Ok(FreshSum { flat, written: vec![false; unit.shapes.len()], micro_batch, count: 1 })
    }

    /// Elements `range` of a unit's resident sum.
    pub fn range(&self, unit: usize, range: Range<usize>) -> Result<Tensor> {
        let unit = &self.units[unit];
        Ok(lock(&unit.state).resident.view(range.start - unit.range.start, [range.len()])?)
    }

    /// The sums of squares of each chunk of the gradients that this rank's update reads, unit by unit.
    pub fn chunk_sums_of_squares(&self) -> Result<Vec<Vec<f64>>> {
        let unit = |(index, unit): (usize, &UnitGradients)| {
            let read = self.holding.range(self.holding.placement.masters, &unit.layout);
            self.range(index, read)
        };
        let read = self.units.iter().enumerate().map(unit).collect::<Result<Vec<_>>>()?;
        Ok(ops::optim::chunk_sums_of_squares_of(&read, UnitLayout::QUANTUM)?)
    }
}

impl UnitGradients {
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

    /// Zeroes what lies between parameters and after them.
    fn zero_gaps(&self, flat: &mut Tensor) -> Result<(), TensorError> {
        let starts = self.layout.ranges().iter().skip(1).map(|range| range.start);
        let ends = self.layout.ranges().iter().map(|range| range.end);
        for (end, next) in ends.zip(starts.chain([self.layout.elements()])) {
            flat.view(end, [next - end])?.fill_zero()?;
        }
        Ok(())
    }
}

impl Gradients for MicroBatchGradients<'_> {
    fn target(&mut self, id: ParamId) -> Result<Option<GradientTarget>, AutogradError> {
        let unit = self.gradients.units.get(id.unit as usize).ok_or(AutogradError::NoParameter(id))?;
        let shape = unit.shapes.get(id.index as usize).ok_or(AutogradError::NoParameter(id))?;
        let mut state = lock(&unit.state);
        let goes_on = |fresh: &FreshSum| !self.apart || fresh.micro_batch == self.micro_batch;
        if !state.fresh.last().is_some_and(goes_on) {
            let fresh = self.gradients.begin(unit, &state, self.micro_batch)?;
            state.fresh.push(fresh);
        }
        let fresh = state.fresh.last_mut().expect("one was just made sure of");
        fresh.micro_batch = self.micro_batch;
        let overwrite = !std::mem::replace(&mut fresh.written[id.index as usize], true);
        let tensor = fresh.flat.view(unit.layout.range(id.index as usize).start, shape)?;
        Ok(Some(GradientTarget { tensor, overwrite }))
    }
}
