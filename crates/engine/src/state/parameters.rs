//! Parameters of a rank, in up to three forms:
//!
//! - *masters*: the f32 values that the optimizer updates;
//! - the *copy*: the values in the compute dtype that forward and backward read. In f32 it may be
//!   the masters themselves. It may be a shard, and may be offloaded;
//! - the *whole*: all of a unit's parameters, gathered from other ranks if the copy is a shard.

use super::encoded_copy::{self, EncodedCopy};
use super::{CurrentPeriod, Holding, lock, overlap};
use crate::constraints::{GridMatrices, WeightConstraints};
use crate::gathers::EncodedGathers;
use crate::links::Link;
use crate::tier::{Lower, Stored, Tiers, aligned};
use crate::{EngineError, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use trainyard_autograd::{Adapter, AutogradError, ParamId, Parameter, Parameters};
use trainyard_model::tuning::encodable;
use trainyard_model::{Adapters, Init, Model, ParameterSpec, UnitLayout};
use trainyard_program::{BlockCodec, Extent};
use trainyard_tensor::cpu::philox::{self, RandomKey};
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// Elements of frozen parameters that are set at a time.
const FROZEN_AT_ONCE: usize = 1 << 20;

/// The parameters of every unit, in f32 and in the dtype that forward reads.
pub struct ParameterState {
    device: Device,
    compute: DType,
    holding: Holding,
    /// The tier of copies that are not in use; None if they stay on the device.
    lower: Option<Lower>,
    /// True if masters are separate from the copies.
    apart: bool,
    units: Vec<UnitParameters>,
    adapters: Adapters,
    /// Buffers of gathers that are encoded; None: shards travel as they are.
    encoded: Option<EncodedGathers>,
    /// The packed words of a unit on their way to be decoded, where shards lie encoded. One lane at
    /// a time gathers.
    received: Option<Mutex<Tensor>>,
    /// Number of updates in the masters, which says whether copies are on their grid.
    updates: Arc<AtomicU64>,
    pub(crate) period: CurrentPeriod,
}

/// One unit's parameters.
pub struct UnitParameters {
    layout: UnitLayout,
    shapes: Vec<Vec<usize>>,
    /// The elements of the flat buffer that the masters hold: trained ones.
    master_range: Range<usize>,
    /// The f32 masters. None if the copy is its own master, or if masters lie in a tier.
    master: Option<Tensor>,
    /// True if the masters are separate from the copy.
    apart: bool,
    /// The trained elements that the copy holds. They are its first.
    copy_range: Range<usize>,
    /// The frozen elements that it holds behind them.
    frozen_range: Range<usize>,
    /// The matrices that the copy holds rounded to a grid; None if it holds all as they are.
    on_grid: Option<GridMatrices>,
    /// Offset of the copy in the store.
    offset: u64,
    /// The copy on the host, if it lies there.
    on_host: Option<Tensor>,
    /// The copy at rest, if a part of it lies encoded in memory.
    at_rest: Option<EncodedCopy>,
    /// The parameters that can be read now.
    present: Mutex<Present>,
}

/// The parameters of a unit that are on the device, for forward and backward.
#[derive(Default)]
struct Present {
    /// The rank's copy, in the compute dtype; None while it is in its tier.
    copy: Option<Tensor>,
    /// The whole flat buffer and the parameters in it; None while only a part of it is on the
    /// device.
    whole: Option<(Tensor, Vec<Parameter>)>,
    /// Memory for the next gather.
    incoming: Option<Tensor>,
    /// A part, larger than the shard, that was kept when the whole was released. It stays until the
    /// next release, so that the time of its end depends on no clock.
    stayed: Option<Tensor>,
}

impl ParameterState {
    /// Sets the number of updates in the masters, before they are copied.
    pub(crate) fn set_updates(&self, updates: u64) {
        self.updates.store(updates, Ordering::Relaxed);
    }

    /// Makes parameters that are all zero. No memory is allocated for copies that `tiers` offload.
    pub fn zeros(
        device: &Device,
        model: &Model,
        holding: Holding,
        compute: DType,
        constraints: WeightConstraints,
        tiers: &Tiers,
    ) -> Result<ParameterState> {
        // A server updates its masters while the rank computes with its copy.
        let separate = constraints.separate_masters(compute) || holding.server.is_some();
        let with_state = tiers.has_masters(separate);
        let mut state = ParameterState {
            device: device.clone(),
            compute,
            holding,
            lower: tiers.parameters.clone(),
            apart: separate || with_state,
            units: Vec::new(),
            adapters: model.adapters().clone(),
            encoded: None,
            received: None,
            updates: Arc::default(),
            period: CurrentPeriod::default(),
        };
        let host = state.lower.as_ref().and_then(Lower::host).cloned();
        let mut offset = 0;
        for unit in 0..model.units().len() {
            let here = state.apart && !with_state && state.holding.holds(unit);
            let grid = constraints.grid.filter(|_| state.holding.holds(unit));
            let on_grid = grid.map(|format| {
                GridMatrices::of(model, unit, &state.holding, (format, constraints.grid_begin), &state.updates)
            });
            let mut unit = UnitParameters::new(device, model, unit, &state.holding, state.apart, here)?;
            unit.on_grid = on_grid;
            unit.offset = offset;
            offset += aligned((unit.copy_elements() * compute.size()) as u64);
            let on_host = |host: &Device| host.zeros([unit.copy_elements()], compute, Purpose::Params);
            unit.on_host = host.as_ref().filter(|_| unit.copy_elements() > 0).map(on_host).transpose()?;
            state.units.push(unit);
        }
        if let Some(codec) = tiers.encoded {
            state.encode(model, codec)?;
        }
        (0..state.units.len())
            .filter(|unit| state.holding.holds(*unit) && !state.visits(*unit))
            .try_for_each(|unit| state.put_zeros(unit))?;
        Ok(state)
    }

    /// Allocates memory for the frozen matrices as `codec` encodes them.
    fn encode(&mut self, model: &Model, codec: BlockCodec) -> Result<()> {
        let part = self.is_sharded().then_some((self.holding.shard, self.holding.shards));
        for (number, unit) in self.units.iter_mut().enumerate().filter(|(unit, _)| self.holding.holds(*unit)) {
            let encodable = encodable(model, number);
            unit.at_rest = EncodedCopy::new(&self.device, codec, &unit.layout, &encodable, self.compute, part)?;
            if part.is_some() && unit.at_rest.is_some() {
                // What is frozen lies packed, and the copy has the trained shard alone.
                unit.frozen_range.end = unit.frozen_range.start;
            }
        }
        let words = self.units.iter().filter_map(|unit| unit.at_rest.as_ref()).map(EncodedCopy::words).max();
        if let Some(words) = words.filter(|_| part.is_some()) {
            self.received = Some(Mutex::new(self.device.empty([words], DType::BF16, Purpose::Comm)?));
        }
        Ok(())
    }

    /// Encodes what the whole shard group gathers by `codec`.
    pub(crate) fn encode_gathers(&mut self, codec: BlockCodec) -> Result<()> {
        if self.is_sharded() && self.holding.shards > 1 {
            let regions = |unit: &UnitParameters| unit.layout.regions().map(|region| region.len()).max();
            let largest = self.units.iter().filter_map(regions).max().unwrap_or(0) / self.holding.shards;
            self.encoded = Some(EncodedGathers::new(&self.device, codec, largest, self.holding.shards)?);
        }
        Ok(())
    }

    /// Rounds the frozen matrices that `codec` encodes, in copies that are on the device, to what
    /// it keeps of them in a run that computes in `dtype`.
    pub(crate) fn round_frozen(&self, model: &Model, codec: BlockCodec, dtype: DType) -> Result<()> {
        for unit in self.held() {
            let state = &self.units[unit];
            for index in encodable(model, unit) {
                let range = state.layout.range(index);
                encoded_copy::round(&mut state.copy()?.view(range.start, [range.len()])?, codec, dtype)?;
            }
        }
        Ok(())
    }

    /// The units that this rank holds.
    fn held(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.units.len()).filter(|unit| self.holding.holds(*unit))
    }

    /// True if this rank holds the unit, or a part of it.
    pub fn holds(&self, unit: usize) -> bool {
        self.holding.holds(unit)
    }

    /// Identities of the buffers that forward reads, by unit; 0 for a unit without one.
    pub fn buffers(&self) -> impl Iterator<Item = usize> + '_ {
        self.units.iter().map(|unit| lock(&unit.present).whole.as_ref().map_or(0, |(whole, _)| whole.buffer_id()))
    }

    /// The f32 values of a parameter, in `shape`.
    ///
    /// # Errors
    /// When this rank holds only a part of it, or has it in a tier: see
    /// [`ParameterState::master_part`].
    pub fn master(&self, id: ParamId, shape: &[usize]) -> Result<Tensor> {
        let (_, values) = self.master_part(id)?;
        Ok(values.reshape(shape)?)
    }

    /// The range of a parameter's elements whose masters this rank holds.
    pub fn master_part_range(&self, id: ParamId) -> Range<usize> {
        let unit = &self.units[id.unit as usize];
        let parameter = unit.layout.range(id.index as usize);
        let held = overlap(&parameter, &unit.master_range);
        let start = held.start.clamp(parameter.start, parameter.end) - parameter.start;
        start..start + held.len()
    }

    /// The range of a parameter's elements that this rank holds, and their f32 values.
    ///
    /// # Errors
    /// When they lie in a tier.
    pub fn master_part(&self, id: ParamId) -> Result<(Range<usize>, Tensor)> {
        let unit = &self.units[id.unit as usize];
        let held = overlap(&unit.layout.range(id.index as usize), &unit.master_range);
        Ok((self.master_part_range(id), unit.master_range(held)?))
    }

    /// Casts the masters into the rank's own part of every compute copy, after masters were changed
    /// from outside.
    fn refresh_own_copies(&self) -> Result<()> {
        self.held().try_for_each(|unit| self.units[unit].refresh_own_copy())
    }

    /// Casts the masters into every compute copy, after masters were changed from outside. Where a
    /// copy is whole and masters are sharded, the other parts are gathered from other ranks.
    ///
    /// # Errors
    /// When copies lie in a tier.
    pub fn refresh_copies(&mut self, shard: &Link) -> Result<()> {
        self.refresh_own_copies()?;
        self.held().try_for_each(|unit| self.complete_copy(unit, shard))
    }

    /// Gathers the other ranks' parts of a copy that is whole on this rank.
    pub fn complete_copy(&self, unit: usize, shard: &Link) -> Result<()> {
        if self.holding.placement.parameters == self.holding.placement.masters {
            return Ok(());
        }
        self.gather(unit, self.holding.shards, shard)
    }

    /// True if a unit's copy is on the device only while it is used.
    fn visits(&self, unit: usize) -> bool {
        self.lower.is_some() || self.units[unit].fetched_from().is_some()
    }

    /// Allocates zeroed memory for a unit's copy, unless it stays on the device.
    pub fn take(&self, unit: usize) -> Result<()> {
        if self.visits(unit) { self.put_zeros(unit) } else { Ok(()) }
    }

    fn put_zeros(&self, unit: usize) -> Result<()> {
        let unit = &self.units[unit];
        let copy = self.device.zeros([unit.copy_elements()], self.compute, Purpose::Params)?;
        unit.put(copy, self.holding.placement.parameters)
    }

    /// Allocates memory for a unit's copy that will be fetched from its tier.
    pub fn take_to_read(&self, unit: usize) -> Result<()> {
        if !self.visits(unit) {
            return Ok(());
        }
        let unit = &self.units[unit];
        let copy = self.device.empty([unit.copy_elements()], self.compute, Purpose::Params)?;
        unit.put(copy, self.holding.placement.parameters)
    }

    /// Allocates memory for a unit that will be gathered.
    pub fn take_whole(&self, unit: usize) -> Result<()> {
        lock(&self.units[unit].present).incoming = Some(self.memory_for_whole(unit)?);
        Ok(())
    }

    fn memory_for_whole(&self, unit: usize) -> Result<Tensor> {
        let elements = self.units[unit].layout.elements();
        Ok(self.device.empty([elements], self.compute, Purpose::Gathered)?)
    }

    /// Frees the memory of a unit's copy.
    pub fn give_back(&self, unit: usize) {
        if !self.visits(unit) {
            return;
        }
        let mut present = lock(&self.units[unit].present);
        present.copy = None;
        if self.holding.placement.parameters == Extent::Full {
            present.whole = None;
        }
    }

    /// True if memory is allocated for a unit's copy.
    pub fn is_here(&self, unit: usize) -> bool {
        lock(&self.units[unit].present).copy.is_some()
    }

    /// True if copies lie in a tier while they are not in use.
    pub fn is_offloaded(&self) -> bool {
        self.lower.is_some() || self.units.iter().any(|unit| unit.fetched_from().is_some())
    }

    /// True if that tier is on disk.
    pub fn is_on_disk(&self) -> bool {
        self.lower.as_ref().is_some_and(|lower| lower.store().is_some())
    }

    /// True if masters are separate from the copies that forward reads.
    pub fn is_apart(&self) -> bool {
        self.apart
    }

    /// Reads a unit's copy from its tier into memory allocated before.
    pub fn fetch(&self, unit: usize) -> Result<()> {
        let unit = &self.units[unit];
        if let Some(at_rest) = unit.fetched_from() {
            return at_rest.fetch(&unit.copy()?);
        }
        match (&self.lower, &unit.on_host) {
            (Some(Lower::Disk(store)), _) if !self.device.is_meta() => {
                Ok(unit.copy()?.overwrite_bytes(|bytes| store.read(unit.offset, bytes))??)
            }
            (_, Some(on_host)) => Ok(unit.copy()?.transfer_from(on_host)?),
            _ => Ok(()),
        }
    }

    /// Writes a unit's copy to its tier. Of a copy that lies encoded in memory, only what is
    /// trained is written, and has to be here.
    pub fn write(&self, unit: usize) -> Result<()> {
        let unit = &self.units[unit];
        if let Some(at_rest) = unit.fetched_from() {
            return at_rest.write(&unit.copy()?);
        }
        match (&self.lower, &unit.on_host) {
            (Some(Lower::Disk(store)), _) if !self.device.is_meta() => {
                Ok(unit.copy()?.with_bytes(|bytes| store.write(unit.offset, bytes))??)
            }
            (_, Some(on_host)) => Ok(on_host.clone().transfer_from(&unit.copy()?)?),
            _ => Ok(()),
        }
    }

    /// The place in the tier of elements `range` of a unit's copy; None if copies are not
    /// offloaded.
    pub fn in_tier(&self, unit: usize, range: &Range<usize>) -> Result<Option<Stored>> {
        let unit = &self.units[unit];
        let within = range.start - unit.copy_range.start;
        if let Some(at_rest) = unit.fetched_from() {
            return Ok(Some(Stored::Here(at_rest.trained(&(within..within + range.len()))?)));
        }
        Ok(match (&self.lower, &unit.on_host) {
            (Some(Lower::Disk(store)), _) => {
                Some(Stored::Away(Arc::clone(store), unit.offset + (within * self.compute.size()) as u64))
            }
            (_, Some(on_host)) => Some(Stored::Here(on_host.view(within, [range.len()])?)),
            _ => None,
        })
    }

    /// Gathers a unit's parameters from the `over` ranks of `link`. If the copy is whole already,
    /// the other ranks' parts of it are overwritten.
    pub fn gather(&self, unit: usize, over: usize, link: &Link) -> Result<()> {
        let state = &self.units[unit];
        let trained = state.layout.trained_elements();
        if self.holding.placement.parameters == Extent::Full {
            if self.holding.owners() < self.holding.shards {
                let part = |owner: usize| self.holding.owned_by(owner, &state.layout);
                return (0..self.holding.owners())
                    .try_for_each(|owner| link.broadcast(&mut state.copy_of(part(owner))?, owner));
            }
            // Frozen parameters are whole and never change.
            return link.all_gather_in_place(&mut state.copy()?.view(0, [trained])?);
        }
        let (stayed, incoming) = {
            let mut present = lock(&state.present);
            (present.stayed.clone(), present.incoming.take())
        };
        let whole = incoming.map_or_else(|| self.memory_for_whole(unit), Ok)?;
        match (&state.at_rest, &self.received) {
            // Smaller groups gather what was decoded before.
            (Some(at_rest), Some(received)) if over == self.holding.shards => {
                if trained > 0 {
                    link.all_gather(&state.copy()?, &mut whole.view(0, [trained])?)?;
                }
                at_rest.gather(&lock(received), &whole, link)?;
            }
            _ => self.gather_regions(state, &stayed.map_or_else(|| state.copy(), Ok)?, &whole, over, link)?,
        }
        let views = state.views(&whole)?;
        lock(&state.present).whole = Some((whole, views));
        Ok(())
    }

    /// Gathers both regions of a unit into `whole` from the `over` equal parts of them that the
    /// ranks of `link` have, of which this rank's is `part`.
    fn gather_regions(
        &self,
        state: &UnitParameters,
        part: &Tensor,
        whole: &Tensor,
        over: usize,
        link: &Link,
    ) -> Result<()> {
        assert_eq!(part.elements() * over, whole.elements(), "a gather over {over} ranks takes parts of that size");
        for region in state.layout.regions() {
            let of_part = part.view(region.start / over, [region.len() / over])?;
            let mut of_whole = whole.view(region.start, [region.len()])?;
            match &self.encoded {
                // Smaller groups gather what was decoded before.
                Some(encoded) if over == self.holding.shards => encoded.gather(&of_part, &of_whole, link)?,
                _ => link.all_gather(&of_part, &mut of_whole)?,
            }
        }
        Ok(())
    }

    /// Frees a unit's gathered parameters except this rank's one of `keep` equal parts.
    pub fn release(&self, unit: usize, keep: usize) -> Result<()> {
        let state = &self.units[unit];
        let mut present = lock(&state.present);
        let whole = present.whole.take();
        present.stayed = None;
        if keep < self.holding.shards
            && let Some((whole, _)) = &whole
        {
            let part = whole.device().empty([whole.elements() / keep], self.compute, Purpose::Gathered)?;
            for region in state.layout.regions() {
                let elements = region.len() / keep;
                let source = whole.view(region.start + self.holding.shard % keep * elements, [elements])?;
                part.view(region.start / keep, [elements])?.copy_from(&source)?;
            }
            present.stayed = Some(part);
        }
        Ok(())
    }

    /// Number of units of the model.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// The parameters of one unit.
    pub fn unit(&self, unit: usize) -> &UnitParameters {
        &self.units[unit]
    }

    /// The compute dtype, in which forward reads parameters.
    pub fn compute(&self) -> DType {
        self.compute
    }

    /// The part of each unit that this rank holds.
    pub fn holding(&self) -> &Holding {
        &self.holding
    }

    /// True if units must be gathered before they can be read.
    pub fn is_sharded(&self) -> bool {
        self.holding.placement.parameters == Extent::Shard
    }
}

impl UnitParameters {
    /// Makes the parameters of one unit. `apart`: masters are separate from the copy. `here`: they
    /// are allocated on the device rather than in a tier.
    fn new(
        device: &Device,
        model: &Model,
        unit: usize,
        holding: &Holding,
        apart: bool,
        here: bool,
    ) -> Result<UnitParameters> {
        let specs = holding.parameters(model, unit);
        let layout = UnitLayout::new(specs, holding.shards);
        let placement = holding.placement;
        let master_range = holding.range(placement.masters, &layout);
        let copy_range = holding.range(placement.parameters, &layout);
        let frozen_range = match placement.parameters {
            Extent::Full => layout.trained_elements()..layout.elements(),
            Extent::Shard => holding.own_frozen(&layout),
        };
        let here = here && !master_range.is_empty();
        let master = here.then(|| device.zeros([master_range.len()], DType::F32, Purpose::Params)).transpose()?;
        let shapes = specs.iter().map(|spec| spec.shape.clone()).collect();
        let present = Mutex::default();
        Ok(UnitParameters {
            layout,
            shapes,
            master_range,
            master,
            apart,
            copy_range,
            frozen_range,
            on_grid: None,
            offset: 0,
            on_host: None,
            at_rest: None,
            present,
        })
    }

    /// Sets the copy that the unit is read from. It has the extent `extent`.
    fn put(&self, copy: Tensor, extent: Extent) -> Result<()> {
        let whole = match extent {
            Extent::Full => Some((copy.clone(), self.views(&copy)?)),
            Extent::Shard => None,
        };
        let mut present = lock(&self.present);
        present.copy = Some(copy);
        if extent == Extent::Full {
            present.whole = whole;
        }
        Ok(())
    }

    /// The copy at rest from which the copy is fetched as from a tier. A shard is decoded by
    /// gathers instead.
    fn fetched_from(&self) -> Option<&EncodedCopy> {
        self.at_rest.as_ref().filter(|at_rest| at_rest.is_fetched())
    }

    /// The number of elements of the copy.
    fn copy_elements(&self) -> usize {
        self.copy_range.len() + self.frozen_range.len()
    }

    /// Sets the frozen parameters in the copy, or where they lie encoded. `set` is called with each
    /// one's index, a range of its elements, and an f32 tensor to write their values to.
    pub fn set_frozen(&self, set: &mut impl FnMut(usize, Range<usize>, &mut Tensor) -> Result<()>) -> Result<()> {
        if let Some(at_rest) = &self.at_rest {
            return at_rest.set(&self.layout, FROZEN_AT_ONCE, set);
        }
        for (index, parameter) in self.layout.frozen() {
            let held = overlap(&parameter, &self.frozen_range);
            // A part at a time, so that the f32 values take little memory.
            for start in held.clone().step_by(FROZEN_AT_ONCE) {
                let part = start..held.end.min(start + FROZEN_AT_ONCE);
                let at = self.copy_range.len() + part.start - self.frozen_range.start;
                let mut copy = self.copy()?.view(at, [part.len()])?;
                let local = part.start - parameter.start..part.end - parameter.start;
                if copy.dtype() == DType::F32 {
                    set(index, local, &mut copy)?;
                } else {
                    let mut values = copy.device().empty([part.len()], DType::F32, Purpose::Workspace)?;
                    set(index, local, &mut values)?;
                    ops::cast_into(&values, &mut copy)?;
                }
            }
        }
        Ok(())
    }

    /// True if nothing of the unit is trained.
    pub fn is_frozen(&self) -> bool {
        self.layout.trained_elements() == 0
    }

    /// True if something of the unit is frozen.
    pub fn has_frozen(&self) -> bool {
        self.layout.elements() > self.layout.trained_elements()
    }

    fn copy(&self) -> Result<Tensor> {
        let in_a_tier = || EngineError::DoesNotFit("parameters that lie in a tier were not fetched".to_owned());
        lock(&self.present).copy.clone().ok_or_else(in_a_tier)
    }

    /// Casts the masters on the device into the copy.
    fn refresh_own_copy(&self) -> Result<()> {
        match &self.master {
            Some(master) => self.write_copy(self.master_range.clone(), master),
            None => Ok(()),
        }
    }

    /// True if the copy holds matrices rounded to a grid now.
    pub fn is_on_grid(&self) -> bool {
        self.grid().is_some()
    }

    fn grid(&self) -> Option<&GridMatrices> {
        self.on_grid.as_ref().filter(|grid| grid.rounds())
    }

    /// Writes to the copy the matrices among `masters`, the elements `range`, rounded to the grid.
    /// Does nothing if there is no grid.
    ///
    /// # Errors
    /// A range that cuts a group.
    pub fn round_copy(&self, range: Range<usize>, masters: &Tensor) -> Result<()> {
        let (Some(grid), Some(mut copy)) = (self.grid(), self.copy_range(range.clone())?) else { return Ok(()) };
        grid.round(&range, masters, &mut copy)
    }

    /// Casts `masters`, the elements `range`, into the copy, and rounds them to the grid if there
    /// is one. Does nothing if the copy is its own master.
    pub fn write_copy(&self, range: Range<usize>, masters: &Tensor) -> Result<()> {
        let part = overlap(&range, &self.copy_range);
        if let Some(mut copy) = self.copy_range(part.clone())? {
            let masters = masters.view(part.start - range.start, [part.len()])?;
            if masters.device().same(copy.device()) {
                ops::cast_into(&masters, &mut copy)?;
                self.grid().map_or(Ok(()), |grid| grid.round(&part, &masters, &mut copy))?;
            } else {
                let mut cast = masters.device().empty([part.len()], copy.dtype(), Purpose::Workspace)?;
                ops::cast_into(&masters, &mut cast)?;
                self.grid().map_or(Ok(()), |grid| grid.round(&part, &masters, &mut cast))?;
                copy.transfer_from(&cast)?;
                // The host memory of `cast` may be reused only after the transfer.
                copy.device().synchronize()?;
            }
        }
        Ok(())
    }

    /// Sets the masters on the device. `set` is called for each of the unit's parameters with its
    /// index, the range of its elements, and the tensor to write their values to.
    pub fn set_here(&self, set: &mut impl FnMut(usize, Range<usize>, &mut Tensor) -> Result<()>) -> Result<()> {
        if self.is_frozen() || self.master_range.is_empty() {
            return Ok(());
        }
        let mut masters = self.master_range(self.master_range.clone())?;
        self.set(self.master_range.clone(), &mut masters, set)?;
        self.refresh_own_copy()
    }

    /// Like [`UnitParameters::set_here`], for `masters` that are the elements `range`.
    pub fn set(
        &self,
        range: Range<usize>,
        masters: &mut Tensor,
        set: &mut impl FnMut(usize, Range<usize>, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        for (index, parameter) in self.layout.trained() {
            let held = overlap(&parameter, &range);
            if !held.is_empty() {
                let mut values = masters.view(held.start - range.start, [held.len()])?;
                set(index, held.start - parameter.start..held.end - parameter.start, &mut values)?;
            }
        }
        Ok(())
    }

    fn views(&self, whole: &Tensor) -> Result<Vec<Parameter>> {
        let view = |(index, shape): (usize, &Vec<usize>)| {
            let value = whole.view(self.layout.range(index).start, shape)?;
            let trained = self.layout.range(index).start < self.layout.trained_elements();
            Ok(Parameter { value, trained })
        };
        self.shapes.iter().enumerate().map(view).collect()
    }

    /// The layout of its parameters in the flat buffer.
    pub fn layout(&self) -> &UnitLayout {
        &self.layout
    }

    /// Elements `range` of the flat masters. This rank must hold them.
    ///
    /// # Errors
    /// When they lie in a tier.
    pub fn master_range(&self, range: Range<usize>) -> Result<Tensor> {
        let (masters, first) = match &self.master {
            Some(master) => (master.clone(), self.master_range.start),
            None => (self.copy()?, self.copy_range.start),
        };
        if masters.dtype() != DType::F32 || self.apart && self.master.is_none() {
            return Err(EngineError::DoesNotFit("f32 masters that lie in a tier were not fetched".to_owned()));
        }
        Ok(masters.view(range.start - first, [range.len()])?)
    }

    /// The elements of the flat buffer that the masters hold.
    pub fn held_masters(&self) -> Range<usize> {
        self.master_range.clone()
    }

    /// Elements `range` of the compute copy; None when forward reads the masters.
    pub fn copy_range(&self, range: Range<usize>) -> Result<Option<Tensor>> {
        self.apart.then(|| self.copy_of(range)).transpose()
    }

    /// The copy in memory, and the ranges of the flat buffer that it holds.
    pub(crate) fn held_copy(&self) -> Result<(Tensor, [Range<usize>; 2])> {
        Ok((self.copy()?, [self.copy_range.clone(), self.frozen_range.clone()]))
    }

    /// The packed words of frozen parameters that lie encoded, and their place in the unit's.
    pub(crate) fn held_packed(&self) -> Option<(&Tensor, Range<usize>)> {
        self.at_rest.as_ref().map(EncodedCopy::packed)
    }

    /// The masters in memory that are separate from the copy, and their range.
    pub(crate) fn held_apart(&self) -> Option<(Tensor, Range<usize>)> {
        self.master.clone().map(|master| (master, self.master_range.clone()))
    }

    /// Elements `range` of the copy that forward reads.
    pub fn copy_of(&self, range: Range<usize>) -> Result<Tensor> {
        Ok(self.copy()?.view(range.start - self.copy_range.start, [range.len()])?)
    }
}

impl Parameters for ParameterState {
    fn parameter(&self, id: ParamId) -> Result<Parameter, AutogradError> {
        let unit = self.units.get(id.unit as usize).ok_or(AutogradError::NoParameter(id))?;
        let present = lock(&unit.present);
        let view = present.whole.as_ref().and_then(|(_, views)| views.get(id.index as usize));
        let Parameter { value, trained } = view.cloned().ok_or(AutogradError::NoParameter(id))?;
        let rests = self.period.is_in(unit.layout.rests_in(id.index as usize));
        Ok(Parameter { value, trained: trained && !rests })
    }

    fn adapter(&self, id: ParamId) -> Option<&Adapter> {
        self.adapters.get(&id)
    }
}

/// Sets `values`, the elements `local` of the parameter `id`, to their initial values.
pub(crate) fn initial_values(
    values: &mut Tensor,
    id: ParamId,
    parameter: &ParameterSpec,
    local: Range<usize>,
    seed: u64,
) -> Result<()> {
    let site = (id.unit << 16) | id.index;
    initialise(values, parameter, local, RandomKey { seed, step: RandomKey::INIT, site })
}

/// Fills `values` with the initial values of the elements `local` of the part of a parameter that a
/// rank holds. They are those of the whole parameter, whatever the split.
fn initialise(values: &mut Tensor, parameter: &ParameterSpec, local: Range<usize>, key: RandomKey) -> Result<()> {
    let device = values.device().clone();
    let Some(cpu) = device.host() else { return Ok(()) };
    Ok(values.overwrite::<f32, _>(|values| match parameter.init {
        Init::Zeros => values.fill(0.0),
        Init::Ones => values.fill(1.0),
        Init::Constant { value } => values.fill(value),
        Init::Normal { .. } | Init::NormalRows { .. } => {
            for (run, first, std) in parameter.normal_runs(local.clone()) {
                let values = &mut values[run.start - local.start..run.end - local.start];
                philox::fill_normal(cpu, key, first as u64, 0.0, std, values);
            }
        }
    })?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_model::{ParameterKind, Piece, Split};
    use trainyard_tensor::cpu::Isa;

    /// By rows and by columns, from inside one row to inside another.
    #[test]
    fn a_part_begins_with_the_values_of_the_whole() {
        let device = Device::cpu(Isa::detect(), 2, None);
        let key = RandomKey { seed: 3, step: RandomKey::INIT, site: 65_537 };
        let whole = ParameterSpec::new("w", &[30, 40], Init::Normal { std: 0.02 }, ParameterKind::Matrix, "w");
        let fill = |spec: &ParameterSpec, local: Range<usize>| {
            let mut values = device.empty([local.len()], DType::F32, Purpose::Params).unwrap();
            initialise(&mut values, spec, local, key).unwrap();
            values.to_f32_vec().unwrap()
        };
        let mut all = vec![0.0; 1200];
        philox::fill_normal(device.host().unwrap(), key, 0, 0.0, 0.02, &mut all);
        assert_eq!(fill(&whole, 0..1200), all);
        assert_eq!(fill(&whole, 17..1003), all[17..1003]);
        for dim in 0..2 {
            let piece = |local, whole| Piece { local, whole, holders: 1, owned: true };
            let pieces = vec![piece(0..5, 20..25), piece(5..11, 3..9)];
            let mut part = whole.clone();
            part.shape[dim] = 11;
            part.split = Some(Split { whole: vec![30, 40], dim, outer: 0, pieces, shared: Vec::new() });
            let end = part.elements();
            let elements: Vec<usize> = part.whole_runs(0..end).iter().flat_map(|(r, at)| *at..at + r.len()).collect();
            let want: Vec<f32> = elements.iter().map(|element| all[*element]).collect();
            assert_eq!(fill(&part, 0..end), want);
            assert_eq!(fill(&part, 13..end - 14), want[13..end - 14]);
        }
    }
}
