//! Optimizers: update rules that run over a unit's flat buffers, and their state.
//!
//! A rule's state is a list of named tensors per unit.
//!
//! - Element-wise rules (AdamW, SGD, Lion) run over the longest ranges that share a [`Group`],
//!   cut to the part that the rank holds. Gaps between parameters are included: they are zero and
//!   stay zero.
//! - Whole-matrix rules (Muon, Adafactor, LAMB) need all of each matrix. Muon takes those of a
//!   chunk together, the others one by one. A parameter that fuses several matrices (queries, keys
//!   and values; gate and up) is updated as the separate matrices of weight files.
//!
//! Norms and biases have no weight decay.
//!
//! An average of the weights over steps ([`crate::averaging`]) lies behind the state of each chunk,
//! and behind that what is held of an earlier run ([`crate::consolidation`]).

mod averages;
mod behind;
mod consolidation;
mod constrained;
mod group;
mod of_server;
mod on_host;
mod periods;
mod rule;

use crate::Result;
use crate::config::{MuonScale, OptimizerName, OptimizerSettings};
use crate::constraints::{PrunedMatrices, Sparsity};
use crate::rank::RankSettings;
use crate::state::{GradientState, Holding, ParameterState, does_not_fit, lock, overlap};
use crate::tier::{Lower, Store, Stored, Tiers, aligned};
pub(crate) use averages::swap;
pub(crate) use behind::Behind;
use group::Group;
use on_host::Visit;
use periods::PeriodUpdates;
use rule::Rule;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use trainyard_model::{Model, ParameterSpec, UnitLayout};
use trainyard_program::chunk_elements;
use trainyard_tensor::ops::optim::{
    self, Adafactor, AdamW, Decay, Lion, Moment, Muon, MuonScale as Scale, MuonUpdate, OptimizerOperands, Sgd, StepSize,
};
use trainyard_tensor::{DType, Device, Purpose, Tensor, ops};

/// An optimizer and its state. The state of a unit is one of:
///
/// - one chunk on the device;
/// - chunks in a [`Store`], each fetched into a staging buffer for its update;
/// - chunks in the host's memory, where they stay and are updated.
pub struct Optimizer {
    /// None for a rank that does not train.
    settings: Option<OptimizerSettings>,
    device: Device,
    units: Vec<Vec<Chunk>>,
    /// The tier of the state; None if it is on the device.
    lower: Option<Lower>,
    /// True if f32 masters lie with the state, because forward reads another dtype or they are not
    /// on the device.
    with_masters: bool,
    /// True if the gradients that an update reads lie in a tier too.
    with_gradients: bool,
    /// Per unit, the matrices that are pruned; empty if none are.
    pruned: Vec<PrunedMatrices>,
    /// Free staging buffers.
    staging: Mutex<Vec<Staged>>,
    /// Free host buffers for gradients and copies, if the state lies on the host.
    visits: Mutex<Vec<Visit>>,
    periods: Mutex<PeriodUpdates>,
}

/// The factors of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// The learning rate as a share of its peak.
    pub factor: f64,
    /// Multiplies gradients: clipping, and the inverse of the loss scale.
    pub gradient_scale: f32,
    /// Number of the update, from 1. Skipped steps do not count.
    pub update: u64,
    /// The share of the new weights in their average; None if the average stays as it is.
    pub average: Option<f32>,
}

/// A stretch of a unit's flat buffers whose state is kept and moved together.
struct Chunk {
    /// Its elements.
    range: Range<usize>,
    pieces: Vec<Piece>,
    /// Number of f32 words of its state, with the average of its masters and what is held.
    state_elements: usize,
    /// The first element of that average within the state; None if there is none.
    average: Option<usize>,
    /// The first element within the state of what is held of an earlier run; None if nothing is.
    held: Option<usize>,
    /// Offset of its masters in the store. Its state follows at the next sector.
    offset: u64,
    /// Its buffers in memory; None while it is in the store.
    here: Mutex<Option<Staged>>,
    /// The host buffers of its gradient and copy, while it is updated on the host.
    visit: Mutex<Option<Visit>>,
}

/// Memory for a chunk up to some size: masters and state, where there are any, and gradients that
/// are fetched with them from a store.
#[derive(Clone)]
pub struct Staged {
    masters: Option<Tensor>,
    state: Option<Tensor>,
    gradient: Option<Tensor>,
}

/// The part of one state tensor of one parameter that a rank holds.
pub struct StatePart {
    /// The unit.
    pub unit: usize,
    /// The parameter's index in it.
    pub index: usize,
    /// Named as PyTorch names it.
    pub name: &'static str,
    /// Number of elements of the whole tensor.
    pub elements: usize,
    /// The elements that the rank holds.
    pub range: Range<usize>,
    /// The code in which they lie, in whole blocks; None for f32.
    pub encoding: Option<Moment>,
    /// Their place within the chunk's state, in f32 words.
    at: Range<usize>,
}

/// A range of a unit's flat buffers that one kernel call updates.
struct Piece {
    range: Range<usize>,
    group: Group,
    rule: Rule,
    /// The ranges of its state tensors within the chunk's state.
    slots: Vec<Range<usize>>,
    /// The parameters in it: index and whole range within the unit.
    parameters: Vec<(usize, Range<usize>)>,
    /// The matrix or vector of the only parameter; None for element-wise rules.
    member: Option<Member>,
}

/// Views of a piece's elements: masters, gradients, and the compute copy if it is apart.
struct Operands {
    master: Tensor,
    gradient: Tensor,
    copy: Option<Tensor>,
}

impl Operands {
    fn of(&mut self, rates: Rates) -> OptimizerOperands<'_> {
        let Operands { master, gradient, copy } = self;
        OptimizerOperands { master, gradient, gradient_scale: rates.gradient_scale, copy: copy.as_mut() }
    }
}

/// One of the tensors that a parameter fuses, updated by itself.
#[derive(Clone, PartialEq)]
struct Member {
    /// Its rows of the parameter (elements, if the parameter has one dimension).
    rows: Range<usize>,
    /// Number of rows of the whole parameter.
    of_rows: usize,
    /// Its index among the members.
    number: usize,
    /// Number of members of the parameter.
    of_members: usize,
}

enum State {
    /// AdamW: first and second moment.
    Moments(Tensor, Tensor),
    /// AdamW: both in codes of eight bits.
    Moments8(Tensor, Tensor),
    /// SGD, Lion: momentum, or nothing.
    Momentum(Option<Tensor>),
    /// Adafactor of a matrix: row and column moment.
    Factored(Tensor, Tensor),
    /// Adafactor of anything else.
    Second(Tensor),
    /// LAMB of a matrix: first and second moment.
    Lamb(Tensor, Tensor),
}

impl Optimizer {
    /// Makes an optimizer for `model` with zero state, on the device or in its tier of `tiers`.
    /// `compute`: the dtype that forward reads.
    pub fn new(
        device: &Device,
        model: &Model,
        holding: &Holding,
        compute: DType,
        settings: &RankSettings,
        tiers: &Tiers,
    ) -> Result<Optimizer> {
        let RankSettings { optimizer: settings, constraints, .. } = *settings;
        let separate = constraints.separate_masters(compute);
        let pruned =
            |pruning| (0..model.units().len()).map(move |unit| PrunedMatrices::of(model, unit, holding, pruning));
        let mut optimizer = Optimizer {
            pruned: constraints.pruning.map(pruned).into_iter().flatten().collect(),
            settings: Some(settings),
            device: device.clone(),
            units: Vec::new(),
            lower: tiers.optimizer.clone(),
            with_masters: tiers.has_masters(separate),
            with_gradients: tiers.gradients.is_some(),
            staging: Mutex::default(),
            visits: Mutex::default(),
            periods: Mutex::default(),
        };
        let mut offset = 0;
        for unit in 0..model.units().len() {
            let trained = !holding.own(&model.layout(unit, holding.shards)).is_empty();
            let count = if holding.holds(unit) && trained { tiers.chunks_of(unit) } else { 0 };
            let mut chunks = chunks(model, unit, holding, &settings, count)?;
            for chunk in &mut chunks {
                chunk.offset = offset;
                offset += optimizer.masters_bytes(chunk) + aligned(4 * chunk.state_elements as u64);
            }
            optimizer.units.push(chunks);
        }
        for chunk in optimizer.units.iter().flatten() {
            let staged = optimizer.buffers(chunk.range.len(), chunk.state_elements)?;
            match optimizer.store() {
                Some(store) => optimizer.write_state(store, chunk, &staged)?,
                None => *lock(&chunk.here) = Some(staged),
            }
        }
        optimizer.take_visits(compute)?;
        Ok(optimizer)
    }

    /// Makes an empty optimizer, for a rank that does not train.
    pub fn none(device: &Device) -> Optimizer {
        Optimizer {
            pruned: Vec::new(),
            settings: None,
            device: device.clone(),
            units: Vec::new(),
            lower: None,
            with_masters: false,
            with_gradients: false,
            staging: Mutex::default(),
            visits: Mutex::default(),
            periods: Mutex::default(),
        }
    }

    /// True if the f32 masters lie with the optimizer's state.
    pub fn has_masters(&self) -> bool {
        self.with_masters
    }

    /// The store of the state; None if it is in memory.
    pub fn store(&self) -> Option<&Arc<Store>> {
        self.lower.as_ref().and_then(Lower::store)
    }

    /// The host, if the state lies and is updated there.
    pub fn host(&self) -> Option<&Device> {
        self.lower.as_ref().and_then(Lower::host)
    }

    /// The elements of each chunk of a unit.
    pub fn chunks(&self, unit: usize) -> impl Iterator<Item = Range<usize>> {
        self.units[unit].iter().map(|chunk| chunk.range.clone())
    }

    /// Allocates staging buffers for `count` chunks, until [`Optimizer::give_back_staging`]. Does
    /// nothing if the state lies on the host.
    pub fn take_staging(&self, count: usize) -> Result<()> {
        if self.host().is_some() {
            return Ok(());
        }
        let chunks = || self.units.iter().flatten();
        let elements = chunks().map(|chunk| chunk.range.len()).max().unwrap_or(0);
        let state_elements = chunks().map(|chunk| chunk.state_elements).max().unwrap_or(0);
        let buffer = |_| -> Result<Staged> {
            let gradient = || self.device.empty([elements], DType::F32, Purpose::Grads);
            let gradient = self.with_gradients.then(gradient).transpose()?;
            Ok(Staged { gradient, ..self.buffers(elements, state_elements)? })
        };
        *lock(&self.staging) = (0..count).map(buffer).collect::<Result<_>>()?;
        Ok(())
    }

    /// Frees the staging buffers. Every chunk must have been evicted.
    pub fn give_back_staging(&self) {
        lock(&self.staging).clear();
    }

    /// Allocates zeroed memory for `elements` masters, if masters lie with the state, and
    /// `state_elements` elements of state.
    fn buffers(&self, elements: usize, state_elements: usize) -> Result<Staged> {
        let device = self.host().unwrap_or(&self.device);
        let masters = self.with_masters.then(|| device.zeros([elements], DType::F32, Purpose::Params)).transpose()?;
        let state =
            (state_elements > 0).then(|| device.zeros([state_elements], DType::F32, Purpose::Optimizer)).transpose()?;
        Ok(Staged { masters, state, gradient: None })
    }

    /// Prepares the update of a chunk. State in a store is read into a staging buffer, with its
    /// gradients if those are in a store too. For state on the host, its gradients are copied to
    /// the host.
    pub fn fetch(&self, unit: usize, chunk: u32, gradients: &GradientState) -> Result<()> {
        let chunk = &self.units[unit][chunk as usize];
        let Some(store) = self.store() else { return self.fetch_gradients(unit, chunk, gradients) };
        let buffer =
            lock(&self.staging).pop().expect("as many buffers as the program has chunks on the device at once");
        let mut staged = buffer.first(chunk.range.len(), chunk.state_elements)?;
        self.read(store, chunk, &mut staged)?;
        if !self.device.is_meta()
            && let (Some(gradient), Some(Stored::Away(store, offset))) =
                (&mut staged.gradient, gradients.in_tier(unit, &chunk.range)?)
        {
            gradient.overwrite_bytes(|bytes| store.read(offset, bytes))??;
        }
        // The whole buffer is kept, so that it can be returned to `staging`; `staged` is a view of
        // it.
        *lock(&chunk.here) = Some(buffer);
        Ok(())
    }

    /// Ends the update of a chunk. State in a store is written back. For state on the host, the
    /// updated compute copy is copied to the device. The chunk's buffer is free afterwards.
    pub fn evict(&self, unit: usize, chunk: u32, parameters: &ParameterState) -> Result<()> {
        let chunk = &self.units[unit][chunk as usize];
        let Some(store) = self.store() else { return self.evict_copy(unit, chunk, parameters) };
        let buffer = lock(&chunk.here).take().expect("a program evicts what it fetched");
        let staged = buffer.first(chunk.range.len(), chunk.state_elements)?;
        self.write_masters(store, chunk, &staged)?;
        self.write_state(store, chunk, &staged)?;
        lock(&self.staging).push(buffer);
        Ok(())
    }

    fn masters_bytes(&self, chunk: &Chunk) -> u64 {
        if self.with_masters { aligned(4 * chunk.range.len() as u64) } else { 0 }
    }

    /// Reads a chunk's masters and state from the store.
    fn read(&self, store: &Store, chunk: &Chunk, staged: &mut Staged) -> Result<()> {
        if self.device.is_meta() {
            return Ok(());
        }
        if let Some(masters) = &mut staged.masters {
            masters.overwrite_bytes(|bytes| store.read(chunk.offset, bytes))??;
        }
        if let Some(state) = &mut staged.state {
            let offset = chunk.offset + self.masters_bytes(chunk);
            state.overwrite_bytes(|bytes| store.read(offset, bytes))??;
        }
        Ok(())
    }

    fn write_masters(&self, store: &Store, chunk: &Chunk, staged: &Staged) -> Result<()> {
        match &staged.masters {
            Some(masters) if !self.device.is_meta() => {
                Ok(masters.with_bytes(|bytes| store.write(chunk.offset, bytes))??)
            }
            _ => Ok(()),
        }
    }

    fn write_state(&self, store: &Store, chunk: &Chunk, staged: &Staged) -> Result<()> {
        match &staged.state {
            Some(state) if !self.device.is_meta() => {
                let offset = chunk.offset + self.masters_bytes(chunk);
                Ok(state.with_bytes(|bytes| store.write(offset, bytes))??)
            }
            _ => Ok(()),
        }
    }

    /// Updates one chunk of a unit: masters, state and compute copy. Returns the zeros that pruning
    /// keeps in it, and the sums of the penalty of consolidation, if there is one.
    pub fn update(
        &self,
        unit: usize,
        chunk: u32,
        parameters: &ParameterState,
        gradients: &GradientState,
        rates: Rates,
    ) -> Result<(Sparsity, Option<Vec<f64>>)> {
        let settings = self.settings.as_ref().expect("only what trains is updated");
        let chunk = &self.units[unit][chunk as usize];
        let staged = lock(&chunk.here).clone().expect("a program fetches before it updates");
        let staged = staged.first(chunk.range.len(), chunk.state_elements)?;
        let visit = lock(&chunk.visit).clone();
        visit.as_ref().map_or(Ok(()), Visit::wait)?;
        parameters.set_updates(rates.update);
        let zeros = self.zeros(unit, chunk, &staged, parameters, rates.update)?;
        let gradient = |within: Range<usize>| match (&visit, &staged.gradient) {
            (Some(visit), _) => Ok(visit.part(within.start, within.len())?.0),
            (None, Some(fetched)) => Ok(fetched.view(within.start, [within.len()])?),
            (None, None) => gradients.range(unit, chunk.range.start + within.start..chunk.range.start + within.end),
        };
        let penalty =
            self.consolidate((unit, chunk), &staged, parameters, gradients, gradient, rates.gradient_scale)?;
        let state = staged.state.as_ref();
        let mut matrices = Vec::new();
        for piece in &chunk.pieces {
            let within = piece.range.start - chunk.range.start;
            let master = match &staged.masters {
                Some(masters) => masters.view(within, [piece.range.len()])?,
                None => parameters.unit(unit).master_range(piece.range.clone())?,
            };
            let gradient = gradient(within..within + piece.range.len())?;
            let copy = match &visit {
                Some(visit) => visit.part(within, piece.range.len())?.1,
                None => parameters.unit(unit).copy_range(piece.range.clone())?,
            };
            let Some(rates) = self.rates_of(piece.group, rates) else {
                // The copy may be written without having been read.
                copy.map_or(Ok(()), |mut copy| ops::cast_into(&master, &mut copy))?;
                continue;
            };
            let mut operands = Operands { master, gradient, copy };
            match piece.rule {
                Rule::Muon(shape) => matrices.push((piece, shape, operands, piece.state_tensor(0, state)?)),
                _ => piece.update(settings, rates, operands.of(rates), state)?,
            }
        }
        let mut together = Vec::with_capacity(matrices.len());
        for (piece, shape, operands, momentum) in &mut matrices {
            let hyper = piece.muon(settings, rates);
            together.push(MuonUpdate { hyper, shape: *shape, operands: operands.of(rates), momentum });
        }
        optim::muon(&mut together)?;
        let sparsity = self.constrain(unit, chunk, &staged, parameters, zeros)?;
        if let Some(share) = rates.average {
            self.average(unit, chunk, &staged, parameters, share)?;
        }
        Ok((sparsity, penalty))
    }

    /// Sets the offloaded masters of a unit. `set` is called for each chunk with the range of its
    /// elements and a zeroed tensor to write their values to.
    pub fn set_masters(&self, unit: usize, mut set: impl FnMut(Range<usize>, &mut Tensor) -> Result<()>) -> Result<()> {
        for chunk in &self.units[unit] {
            let here = lock(&chunk.here).clone();
            let mut staged = here.map_or_else(|| self.buffers(chunk.range.len(), 0), Ok)?;
            let masters = staged.masters.as_mut().expect("masters lie in a tier");
            set(chunk.range.clone(), masters)?;
            if let Some(store) = self.store() {
                self.write_masters(store, chunk, &staged)?;
            }
        }
        Ok(())
    }

    /// The parts of every state tensor that this rank holds, by chunk and parameter, each with the
    /// place of its bytes.
    pub fn state(&self) -> Result<Vec<(StatePart, Stored)>> {
        let mut all = Vec::new();
        for (unit, chunks) in self.units.iter().enumerate() {
            for chunk in chunks {
                for part in chunk.parts(unit) {
                    let stored = match (self.store(), lock(&chunk.here).as_ref()) {
                        (Some(store), _) => {
                            let offset = chunk.offset + self.masters_bytes(chunk) + 4 * part.at.start as u64;
                            Stored::Away(Arc::clone(store), offset)
                        }
                        (None, Some(Staged { state: Some(state), .. })) => {
                            Stored::Here(state.view(part.at.start, [part.at.len()])?)
                        }
                        (None, _) => unreachable!("a part is a part of a state that is here"),
                    };
                    all.push((part, stored));
                }
            }
        }
        Ok(all)
    }

    /// The names of a parameter's state tensors, on whatever ranks they are.
    pub fn state_names(&self, spec: &ParameterSpec) -> &'static [&'static str] {
        let Some(settings) = self.settings.as_ref().filter(|_| spec.trained) else { return &[] };
        let rule = Rule::of(settings, spec, &members(spec)[0].rows, 0.0);
        let tensors = rule.state_elements(spec.elements(), settings).len();
        &rule.names()[..tensors]
    }

    /// Number of elements of a parameter's state, all of it on whatever ranks it is.
    pub fn state_elements(&self, spec: &ParameterSpec) -> usize {
        let Some(settings) = self.settings.as_ref().filter(|_| spec.trained) else { return 0 };
        let width: usize = spec.whole_shape().iter().skip(1).product();
        let of = |member: Member| -> usize {
            let rule = Rule::of(settings, spec, &member.rows, 0.0);
            rule.state_elements(member.rows.len() * width, settings).iter().sum()
        };
        members(spec).into_iter().map(of).sum()
    }

    /// Sets the state. `set` is called for each part of a state tensor that this rank holds.
    pub fn set_state(&self, mut set: impl FnMut(&StatePart, &mut Tensor) -> Result<()>) -> Result<()> {
        for (unit, chunks) in self.units.iter().enumerate() {
            for chunk in chunks {
                // An average and what is held lie in the same memory, and stay.
                let staged = self.bring(chunk)?;
                for part in chunk.parts(unit) {
                    let state = staged.state.as_ref().expect("a part is a part of a state");
                    let mut state = state.view(part.at.start, [part.at.len()])?;
                    let Some(moment) = part.encoding else {
                        set(&part, &mut state)?;
                        continue;
                    };
                    let mut values = state.device().empty([part.range.len()], DType::F32, Purpose::Workspace)?;
                    set(&part, &mut values)?;
                    optim::encode_moment(moment, &values, &mut state)?;
                }
                if let Some(store) = self.store() {
                    self.write_state(store, chunk, &staged)?;
                }
            }
        }
        Ok(())
    }

    /// The places in their tier of the masters of elements `range` of a unit, by chunk, each with
    /// its number of elements.
    pub fn masters_in_tier(&self, unit: usize, range: &Range<usize>) -> Result<Vec<(Stored, usize)>> {
        let part = |chunk: &Chunk| {
            let held = overlap(range, &chunk.range);
            let within = held.start - chunk.range.start;
            let stored = match (self.store(), &*lock(&chunk.here)) {
                (Some(store), _) => Stored::Away(Arc::clone(store), chunk.offset + 4 * within as u64),
                (None, Some(Staged { masters: Some(masters), .. })) => {
                    Stored::Here(masters.view(within, [held.len()])?)
                }
                (None, _) => unreachable!("masters that lie in a tier are in a store or on the host"),
            };
            Ok((stored, held.len()))
        };
        self.units[unit].iter().filter(|chunk| !overlap(range, &chunk.range).is_empty()).map(part).collect()
    }
}

impl Staged {
    /// Views of the first `elements` masters and gradients and the first `state_elements` elements
    /// of state.
    fn first(&self, elements: usize, state_elements: usize) -> Result<Staged> {
        let first = |tensor: &Option<Tensor>, n: usize| -> Result<Option<Tensor>> {
            Ok(tensor.as_ref().filter(|_| n > 0).map(|tensor| tensor.view(0, [n])).transpose()?)
        };
        let (masters, gradient) = (first(&self.masters, elements)?, first(&self.gradient, elements)?);
        Ok(Staged { masters, state: first(&self.state, state_elements)?, gradient })
    }
}

impl Chunk {
    /// The parts of every state tensor that the chunk holds.
    fn parts(&self, unit: usize) -> Vec<StatePart> {
        let mut all = Vec::new();
        for piece in &self.pieces {
            for (number, (name, slot)) in piece.rule.names().iter().zip(&piece.slots).enumerate() {
                for (index, whole) in &piece.parameters {
                    let (unit, index, encoding) = (unit, *index, piece.rule.encoding(number));
                    // The state of an element-wise rule covers the piece. Other state belongs to
                    // one member; the members' state lies one after the other in the parameter's.
                    if let Some(member) = &piece.member {
                        let (elements, range) = piece.rule.state_of(number, member);
                        all.push(StatePart { unit, index, name, elements, range, encoding, at: slot.clone() });
                        continue;
                    }
                    let held = overlap(whole, &piece.range);
                    if !held.is_empty() {
                        let start = slot.start + piece.rule.words(held.start - piece.range.start);
                        let range = held.start - whole.start..held.end - whole.start;
                        let at = start..start + piece.rule.words(held.len());
                        all.push(StatePart { unit, index, name, elements: whole.len(), range, encoding, at });
                    }
                }
            }
        }
        all
    }
}

/// A range of a unit's flat buffer with one rule and group.
struct Stretch {
    range: Range<usize>,
    group: Group,
    rule: Rule,
    parameters: Vec<(usize, Range<usize>)>,
    member: Option<Member>,
}

fn stretches(specs: &[ParameterSpec], layout: &UnitLayout, settings: &OptimizerSettings, balance: f32) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    let trained: Vec<(usize, Range<usize>)> = layout.trained().collect();
    for (place, (index, exact)) in trained.iter().cloned().enumerate() {
        let spec = &specs[index];
        let members = members(spec);
        let (rule, group) = (Rule::of(settings, spec, &members[0].rows, balance), Group::of(spec));
        if !rule.is_elementwise() {
            let width = spec.row_elements();
            stretches.extend(members.into_iter().map(|member| Stretch {
                range: exact.start + member.rows.start * width..exact.start + member.rows.end * width,
                group,
                rule: Rule::of(settings, spec, &member.rows, balance),
                parameters: vec![(index, exact.clone())],
                member: Some(member),
            }));
            continue;
        }
        // An element-wise stretch extends to the start of the next parameter, so that neighbours
        // join.
        let next = trained.get(place + 1).map_or(layout.trained_elements(), |(_, range)| range.start);
        let range = exact.start..next;
        let joins = |last: &&mut Stretch| last.rule == rule && last.group == group && last.range.end == range.start;
        match stretches.last_mut().filter(joins) {
            Some(last) => {
                last.range.end = range.end;
                last.parameters.push((index, exact));
            }
            None => stretches.push(Stretch { range, group, rule, parameters: vec![(index, exact)], member: None }),
        }
    }
    stretches
}

/// The tensors of weight files that a parameter fuses, or the parameter itself.
fn members(spec: &ParameterSpec) -> Vec<Member> {
    let of_rows = spec.shape.first().copied().unwrap_or(1);
    let mut rows: Vec<_> = spec.sources.iter().map(|source| source.rows.clone()).collect();
    if rows.is_empty() {
        rows.push(0..of_rows);
    }
    let of_members = rows.len();
    let member = |(number, rows)| Member { rows, of_rows, number, of_members };
    rows.into_iter().enumerate().map(member).collect()
}

/// Divides the part of a unit that the rank holds into `count` chunks.
fn chunks(
    model: &Model,
    unit: usize,
    holding: &Holding,
    settings: &OptimizerSettings,
    count: u32,
) -> Result<Vec<Chunk>> {
    let specs = holding.parameters(model, unit);
    let layout = UnitLayout::new(specs, holding.shards);
    let held = holding.range(holding.placement.masters, &layout);
    let each = chunk_elements(held.len() as u64, count) as usize;
    let experts = model.spec().and_then(|spec| spec.experts.as_ref());
    let balance = experts.map_or(0.0, |experts| experts.bias_update_rate as f32);
    let stretches = stretches(specs, &layout, settings, balance);
    let chunk = |number: usize| {
        let range = overlap(&(held.start + number * each..held.start + (number + 1) * each), &held);
        let (here, visit) = (Mutex::default(), Mutex::default());
        let pieces = Vec::new();
        let mut chunk = Chunk { range, pieces, state_elements: 0, average: None, held: None, offset: 0, here, visit };
        for stretch in &stretches {
            let range = overlap(&stretch.range, &chunk.range);
            if range != stretch.range && !stretch.rule.is_elementwise() {
                return Err(does_not_fit(format!(
                    "optimizer {} looks at whole matrices, and only a part of {} is here at once",
                    settings.name,
                    model.units()[unit].name()
                )));
            }
            if range.is_empty() {
                continue;
            }
            let Stretch { group, rule, ref parameters, ref member, .. } = *stretch;
            let mut slots = Vec::new();
            for elements in rule.state_elements(range.len(), settings) {
                let end = chunk.state_elements + rule.words(elements);
                slots.push(chunk.state_elements..end);
                // Codes are read block by block, so that nothing gains by their alignment.
                let is_encoded = rule.encoding(0).is_some();
                chunk.state_elements = if is_encoded { end } else { end.next_multiple_of(UnitLayout::ALIGN) };
            }
            let (parameters, member) = (parameters.clone(), member.clone());
            chunk.pieces.push(Piece { range, group, rule, slots, parameters, member });
        }
        chunk.state_elements = chunk.state_elements.next_multiple_of(UnitLayout::ALIGN);
        if settings.averaging.is_some() && !chunk.range.is_empty() {
            chunk.average = Some(chunk.state_elements);
            chunk.state_elements = (chunk.state_elements + chunk.range.len()).next_multiple_of(UnitLayout::ALIGN);
        }
        if settings.consolidation.is_some() && !chunk.range.is_empty() {
            chunk.hold();
        }
        Ok(chunk)
    };
    (0..count as usize).map(chunk).collect()
}

impl Piece {
    /// A view of one of its state tensors in the chunk's state.
    fn state_tensor(&self, number: usize, chunk: Option<&Tensor>) -> Result<Tensor> {
        let slot = &self.slots[number];
        Ok(chunk.expect("a rule with state finds some").view(slot.start, [slot.len()])?)
    }

    /// Views of its state tensors in the chunk's state.
    fn state(&self, chunk: Option<&Tensor>) -> Result<State> {
        let view = |number: usize| self.state_tensor(number, chunk);
        Ok(match self.rule {
            Rule::Moments => State::Moments(view(0)?, view(1)?),
            Rule::Moments8 => State::Moments8(view(0)?, view(1)?),
            Rule::Lamb(_) => State::Lamb(view(0)?, view(1)?),
            Rule::Momentum => State::Momentum((!self.slots.is_empty()).then(|| view(0)).transpose()?),
            Rule::Factored(_) => State::Factored(view(0)?, view(1)?),
            Rule::Second => State::Second(view(0)?),
            Rule::Balance(_) => State::Momentum(None),
            Rule::Muon(_) => unreachable!("matrices of Muon are updated together"),
        })
    }

    /// Muon's settings for one update.
    fn muon(&self, settings: &OptimizerSettings, rates: Rates) -> Muon {
        let scale = match settings.muon_scale {
            MuonScale::Original => Scale::Original,
            MuonScale::MatchRmsAdamw => Scale::MatchRmsAdamW,
        };
        Muon {
            lr: self.group.rate(settings.matrix_learning_rate * rates.factor),
            momentum: settings.momentum as f32,
            nesterov: settings.nesterov,
            weight_decay: self.group.weight_decay(settings.weight_decay),
            iterations: settings.newton_schulz_steps as u32,
            scale,
        }
    }

    fn update(
        &self,
        settings: &OptimizerSettings,
        rates: Rates,
        operands: OptimizerOperands<'_>,
        state: Option<&Tensor>,
    ) -> Result<()> {
        let lr = self.group.rate(settings.learning_rate * rates.factor);
        let weight_decay = self.group.weight_decay(settings.weight_decay);
        if let Rule::Balance(rate) = self.rule {
            return Ok(optim::sign_step(rate, operands)?);
        }
        let (beta1, beta2, eps) = (settings.beta1 as f32, settings.beta2 as f32, settings.eps as f32);
        let adam = AdamW { lr, beta1, beta2, eps, weight_decay, variance_steps: settings.variance_steps };
        match &mut self.state(state)? {
            State::Moments(first, second) => optim::adamw(adam, rates.update, operands, first, second)?,
            State::Moments8(first, second) => optim::adamw8(adam, rates.update, operands, first, second)?,
            State::Lamb(first, second) => optim::lamb(adam, rates.update, operands, first, second)?,
            State::Momentum(momentum) if settings.name == OptimizerName::Lion => {
                let momentum = momentum.as_mut().expect("Lion has momentum");
                optim::lion(Lion { lr, beta1, beta2, weight_decay }, operands, momentum)?;
            }
            State::Momentum(momentum) => {
                let (nesterov, decay) = (settings.nesterov, Decay::Decoupled);
                let hyper = Sgd { lr, momentum: settings.momentum as f32, nesterov, weight_decay, decay };
                optim::sgd(hyper, operands, momentum.as_mut())?;
            }
            State::Factored(rows, columns) => {
                optim::adafactor_matrix(adafactor(settings, lr, weight_decay), rates.update, operands, rows, columns)?;
            }
            State::Second(second) => {
                optim::adafactor_vector(adafactor(settings, lr, weight_decay), rates.update, operands, second)?;
            }
        }
        Ok(())
    }
}

fn adafactor(settings: &OptimizerSettings, lr: f32, weight_decay: f32) -> Adafactor {
    Adafactor {
        lr,
        beta2_decay: settings.factored_decay as f32,
        eps1: 1e-30,
        eps2: 1e-3,
        clip_threshold: settings.update_clip as f32,
        weight_decay,
        step_size: if settings.relative_step { StepSize::Relative } else { StepSize::Absolute },
    }
}

#[cfg(test)]
mod tests;
