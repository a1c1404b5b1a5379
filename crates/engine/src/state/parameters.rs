//! Parameters: f32 masters, the copy that forward reads, and copies gathered from other ranks for a while.

use super::{Holding, lock, overlap};
use crate::links::Link;
use crate::{EngineError, Result};
use std::ops::Range;
use std::sync::Mutex;
use trainyard_autograd::{AutogradError, ParamId, Parameter, Parameters};
use trainyard_model::{Init, Model, UnitLayout};
use trainyard_program::Extent;
use trainyard_tensor::cpu::philox::{self, RandomKey};
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// The parameters of every unit, in f32 and in the dtype that forward reads.
pub struct ParameterState {
    compute: DType,
    holding: Holding,
    units: Vec<UnitParameters>,
}

/// One unit's parameters.
pub struct UnitParameters {
    layout: UnitLayout,
    shapes: Vec<Vec<usize>>,
    /// The elements of the flat buffer that `master` holds.
    master_range: Range<usize>,
    /// f32.
    master: Tensor,
    /// The elements that `copy` holds.
    copy_range: Range<usize>,
    /// In the compute dtype; in f32 the master is a view into it or it itself.
    copy: Tensor,
    /// What is there to be read.
    present: Mutex<Present>,
}

/// What forward and backward can read of a unit.
#[derive(Default)]
struct Present {
    /// The whole flat buffer and the parameters in it; None while only a part of it is here.
    whole: Option<(Tensor, Vec<Parameter>)>,
    /// A part larger than the shard that stayed when the whole was released.
    stayed: Option<Tensor>,
}

impl ParameterState {
    /// Parameters of `model` with initial values drawn from `seed`: each a function of (seed, unit, index, element), so that a shard
    /// has the values of the whole.
    pub fn new(device: &Device, model: &Model, holding: Holding, compute: DType, seed: u64) -> Result<ParameterState> {
        let mut state = ParameterState::zeros(device, model, holding, compute)?;
        for (id, spec) in model.parameters() {
            let (part, mut values) = state.master_part(id)?;
            let site = (id.unit << 16) | id.index;
            initialise(&mut values, spec.init, part.start, RandomKey { seed, step: RandomKey::INIT, site })?;
        }
        state.refresh_own_copies()?;
        Ok(state)
    }

    /// Parameters that are all zero, to be loaded.
    pub fn zeros(device: &Device, model: &Model, holding: Holding, compute: DType) -> Result<ParameterState> {
        let units = (0..model.units().len()).map(|unit| UnitParameters::new(device, model, unit, &holding, compute));
        Ok(ParameterState { compute, holding, units: units.collect::<Result<_>>()? })
    }

    /// The f32 values of a parameter, in `shape`.
    ///
    /// # Errors
    /// When this rank holds only a part of it: see [`ParameterState::master_part`].
    pub fn master(&self, id: ParamId, shape: &[usize]) -> Result<Tensor> {
        let (_, values) = self.master_part(id)?;
        Ok(values.reshape(shape)?)
    }

    /// Which elements of a parameter this rank holds, and their f32 values.
    pub fn master_part(&self, id: ParamId) -> Result<(Range<usize>, Tensor)> {
        let unit = &self.units[id.unit as usize];
        let parameter = unit.layout.range(id.index as usize);
        let held = overlap(&parameter, &unit.master_range);
        let values = unit.master.view(held.start - unit.master_range.start, [held.len()])?;
        let start = held.start.clamp(parameter.start, parameter.end) - parameter.start;
        Ok((start..start + held.len(), values))
    }

    /// Writes the rank's own part of every compute copy anew, after masters were changed from outside.
    fn refresh_own_copies(&mut self) -> Result<()> {
        for unit in &mut self.units {
            if unit.master.overlaps(&unit.copy) {
                continue;
            }
            let part = overlap(&unit.master_range, &unit.copy_range);
            let mut copy = unit.copy.view(part.start - unit.copy_range.start, [part.len()])?;
            ops::cast_into(&unit.master.view(part.start - unit.master_range.start, [part.len()])?, &mut copy)?;
        }
        Ok(())
    }

    /// Writes every compute copy anew, after masters were changed from outside (initial values, loading); what other ranks hold of copies that
    /// are whole here comes from them.
    pub fn refresh_copies(&mut self, shard: &Link) -> Result<()> {
        self.refresh_own_copies()?;
        if self.holding.placement.parameters != self.holding.placement.masters {
            for unit in 0..self.units.len() {
                self.gather(unit, self.holding.shards, shard)?;
            }
        }
        Ok(())
    }

    /// Brings a unit's parameters together from `over` ranks, which are those of `link`. What is whole already gets the others' parts anew.
    pub fn gather(&self, unit: usize, over: usize, link: &Link) -> Result<()> {
        let state = &self.units[unit];
        if self.holding.placement.parameters == Extent::Full {
            return link.all_gather_in_place(&mut state.copy.clone());
        }
        let stayed = lock(&state.present).stayed.take();
        let part = stayed.as_ref().unwrap_or(&state.copy);
        let elements = state.layout.elements();
        assert_eq!(part.elements() * over, elements, "a gather over {over} ranks takes parts of that size");
        let mut whole = part.device().empty([elements], self.compute, Purpose::Gathered)?;
        link.all_gather(part, &mut whole)?;
        let views = state.views(&whole)?;
        lock(&state.present).whole = Some((whole, views));
        Ok(())
    }

    /// Drops a unit's gathered parameters, all but this rank's one of `keep` parts.
    pub fn release(&self, unit: usize, keep: usize) -> Result<()> {
        let state = &self.units[unit];
        let mut present = lock(&state.present);
        let whole = present.whole.take();
        if keep < self.holding.shards
            && let Some((whole, _)) = &whole
        {
            let elements = whole.elements() / keep;
            let mut part = whole.device().empty([elements], self.compute, Purpose::Gathered)?;
            let source = whole.view(self.holding.shard % keep * elements, [elements])?;
            copy_bytes(&source, &mut part)?;
            present.stayed = Some(part);
        }
        Ok(())
    }

    /// One unit's.
    pub fn unit(&self, unit: usize) -> &UnitParameters {
        &self.units[unit]
    }

    /// The dtype that forward reads.
    pub fn compute(&self) -> DType {
        self.compute
    }

    /// How much of each unit is here.
    pub fn holding(&self) -> Holding {
        self.holding
    }

    /// Whether units must be gathered before they can be read.
    pub fn is_sharded(&self) -> bool {
        self.holding.placement.parameters == Extent::Shard
    }
}

impl UnitParameters {
    fn new(device: &Device, model: &Model, unit: usize, holding: &Holding, compute: DType) -> Result<UnitParameters> {
        let specs = model.units()[unit].parameters();
        let layout = UnitLayout::new(specs, holding.shards);
        let placement = holding.placement;
        let master_range = holding.range(placement.masters, &layout);
        let copy_range = holding.range(placement.parameters, &layout);
        let copy = device.zeros([copy_range.len()], compute, Purpose::Params)?;
        let master = if compute == DType::F32 {
            copy.view(master_range.start - copy_range.start, [master_range.len()])?
        } else {
            device.zeros([master_range.len()], DType::F32, Purpose::Params)?
        };
        let shapes = specs.iter().map(|spec| spec.shape.clone()).collect();
        let present = Mutex::default();
        let state = UnitParameters { layout, shapes, master_range, master, copy_range, copy, present };
        if placement.parameters == Extent::Full {
            let views = state.views(&state.copy)?;
            lock(&state.present).whole = Some((state.copy.clone(), views));
        }
        Ok(state)
    }

    fn views(&self, whole: &Tensor) -> Result<Vec<Parameter>> {
        let view = |(index, shape): (usize, &Vec<usize>)| {
            let value = whole.view(self.layout.range(index).start, shape)?;
            Ok(Parameter { value, trained: true })
        };
        self.shapes.iter().enumerate().map(view).collect()
    }

    /// Where its parameters lie.
    pub fn layout(&self) -> &UnitLayout {
        &self.layout
    }

    /// Elements `range` of the flat masters, of which this rank must hold them.
    pub fn master_range(&self, range: Range<usize>) -> Result<Tensor> {
        Ok(self.master.view(range.start - self.master_range.start, [range.len()])?)
    }

    /// Elements `range` of the compute copy; None when forward reads the masters.
    pub fn copy_range(&self, range: Range<usize>) -> Result<Option<Tensor>> {
        if self.copy.dtype() == DType::F32 {
            return Ok(None);
        }
        Ok(Some(self.copy.view(range.start - self.copy_range.start, [range.len()])?))
    }
}

impl Parameters for ParameterState {
    fn parameter(&self, id: ParamId) -> Result<Parameter, AutogradError> {
        let unit = self.units.get(id.unit as usize).ok_or(AutogradError::NoParameter(id))?;
        let present = lock(&unit.present);
        let view = present.whole.as_ref().and_then(|(_, views)| views.get(id.index as usize));
        view.cloned().ok_or(AutogradError::NoParameter(id))
    }
}

/// Nothing on meta.
fn copy_bytes(source: &Tensor, target: &mut Tensor) -> Result<(), EngineError> {
    if !source.device().is_meta() {
        target.as_bytes_mut()?.copy_from_slice(source.as_bytes()?);
    }
    Ok(())
}

/// Elements `first ..` of a parameter.
fn initialise(values: &mut Tensor, init: Init, first: usize, key: RandomKey) -> Result<()> {
    let device = values.device().clone();
    let Some(cpu) = device.as_cpu() else { return Ok(()) };
    let values = values.data_mut::<f32>()?;
    match init {
        Init::Zeros => values.fill(0.0),
        Init::Ones => values.fill(1.0),
        Init::Normal { std } => philox::fill_normal(cpu, key, first as u64, 0.0, std, values),
    }
    Ok(())
}
