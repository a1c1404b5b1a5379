//! The lowering: from a model, a mesh and a strategy to the program of a rank.
//!
//! There is one for every strategy. It walks the rank's forwards and backwards in order, and around each it puts what the
//! [`Placement`] asks for:
//!
//! - before a pass, what the passes up to `prefetch` ahead of it need and is not resident: gathers, fetches;
//! - after it, what is not needed any more: releases, evictions;
//! - after the pass that completes a gradient: its fold and its reduction.
//!
//! Then come the norm and the updates. With one rank nothing is gathered and nothing reduced; the walk is the same.

use crate::builder::Builder;
use crate::order::{Pass, one_after_the_other};
use crate::strategy::validate;
use crate::windows::{
    GradientSpan, Window, activation_trips, differentiates_weights, gradient_spans, parameter_windows,
};
use crate::{
    Action, Axis, Effect, Extent, Fresh, Instruction, Keep, MemoryKind, Mesh, ModelShape, Phase, Placement, Program,
    ReduceSchedule, Reshard, State, Strategy, StrategyError, padded,
};

/// The programs of all ranks.
///
/// # Errors
///
/// A strategy that does not fit the model or the mesh.
pub fn lower(model: &ModelShape, mesh: &Mesh, strategy: &Strategy) -> Result<Vec<Program>, StrategyError> {
    let first = lower_rank(model, mesh, strategy, 0)?;
    Ok((0..mesh.ranks()).map(|rank| Program { rank, ..first.clone() }).collect())
}

/// The program of one rank.
///
/// # Errors
///
/// As [`lower`].
pub fn lower_rank(model: &ModelShape, mesh: &Mesh, strategy: &Strategy, rank: u32) -> Result<Program, StrategyError> {
    validate(model, mesh, strategy)?;
    let mut lowering = Lowering::new(model, mesh, strategy);
    lowering.load();
    for at in 0..lowering.passes.len() {
        lowering.acquire(at);
        lowering.run(at);
        lowering.let_go(at);
        lowering.complete_gradients(at);
    }
    lowering.update();
    let all = 0..model.units.len() as u32;
    Ok(Program {
        rank,
        mesh: *mesh,
        placement: lowering.placement,
        offload: strategy.offload,
        units: model.units.iter().map(|unit| unit.name.clone()).collect(),
        stages: vec![all],
        micro_batches: strategy.accumulation_steps,
        resident: lowering.resident(),
        instructions: lowering.builder.finish(),
    })
}

/// A program under construction, with what later instructions must know of earlier ones. Instructions are known by number.
struct Lowering<'a> {
    model: &'a ModelShape,
    mesh: &'a Mesh,
    strategy: &'a Strategy,
    placement: Placement,
    builder: Builder,
    passes: Vec<Pass>,
    /// The instruction of each pass so far.
    ran: Vec<u32>,
    /// What the first pass waits for.
    counted: u32,
    /// By first use; those before `next_window` have begun.
    windows: Vec<Window>,
    next_window: usize,
    /// Indices of windows by their last pass.
    window_ends: Vec<Vec<usize>>,
    /// Per unit, what brought its parameters.
    present: Vec<Option<u32>>,
    /// Per forward pass, the backward pass that its activations are away until; those backward passes, ascending; and what fetched for them.
    trips: Vec<Option<usize>>,
    returns: Vec<usize>,
    next_return: usize,
    fetched: Vec<Option<u32>>,
    /// Gradients by the pass that begins and the pass that completes them.
    gradients: Vec<GradientSpan>,
    begins: Vec<Vec<usize>>,
    completes: Vec<Vec<usize>>,
    /// Every reduction so far, and which units have been reduced.
    reduces: Vec<u32>,
    reduced: Vec<bool>,
}

impl<'a> Lowering<'a> {
    fn new(model: &'a ModelShape, mesh: &'a Mesh, strategy: &'a Strategy) -> Lowering<'a> {
        let units = model.units.len();
        let placement = Placement::of(mesh, strategy);
        let passes = one_after_the_other(0..units as u32, strategy.accumulation_steps);
        let come_and_go = placement.parameters == Extent::Shard || strategy.offload.parameters.is_some();
        let windows = if come_and_go {
            // Whole parameters, which come from a tier, have no parts that could stay.
            let reshard = match (placement.parameters, strategy.reshard_after_forward) {
                (Extent::Full, Reshard::To(_)) => Reshard::Always,
                (_, reshard) => reshard,
            };
            let (shards, prefetch) = (mesh.shard_degree(), strategy.prefetch as usize);
            parameter_windows(&passes, units, |unit| reads(model, unit), shards, reshard, prefetch)
        } else {
            Vec::new()
        };
        let apart = strategy.elastic || strategy.reduce_schedule == ReduceSchedule::PerMicroBatch;
        let adds_to = |pass: &Pass| if adds_gradients(model, pass) { reads(model, pass.unit) } else { Vec::new() };
        let gradients = gradient_spans(&passes, units, strategy.accumulation_steps, adds_to, apart);
        let trips = match strategy.offload.activations {
            Some(_) => activation_trips(&passes, strategy.accumulation_steps, strategy.prefetch.max(1) as usize),
            None => vec![None; passes.len()],
        };
        let mut returns: Vec<usize> = trips.iter().flatten().copied().collect();
        returns.sort_unstable();
        Lowering {
            model,
            mesh,
            strategy,
            placement,
            builder: Builder::default(),
            ran: Vec::with_capacity(passes.len()),
            counted: 0,
            window_ends: by_pass(passes.len(), windows.iter().map(|window| window.last)),
            windows,
            next_window: 0,
            present: vec![None; units],
            trips,
            returns,
            next_return: 0,
            fetched: vec![None; passes.len()],
            begins: by_pass(passes.len(), gradients.iter().map(|span| span.first)),
            completes: by_pass(passes.len(), gradients.iter().map(|span| span.last)),
            gradients,
            reduces: Vec::new(),
            reduced: vec![false; units],
            passes,
        }
    }

    /// All micro-batches are loaded first: the loss is a mean over the targets of the whole step, so their number must be
    /// known before the first backward. A batch is a few kilobytes.
    fn load(&mut self) {
        let mut last = 0;
        for micro_batch in 0..self.strategy.accumulation_steps {
            let load = Instruction::new(Action::Load { micro_batch });
            last = self.builder.push(load.taking(MemoryKind::Data, self.model.batch_bytes), []);
        }
        // Two numbers: tokens and targets.
        let count = Instruction::new(Action::Count).moving(self.message(Axis::Data, 16));
        self.counted = self.builder.push(count, [last]);
    }

    /// Begins to bring what the passes up to `prefetch` after `at` need.
    fn acquire(&mut self, at: usize) {
        let horizon = at + self.strategy.prefetch as usize;
        // Nothing is brought earlier than that, so that no more of it is there at once.
        let before = at.checked_sub(1).map(|before| self.ran[before]);
        while let Some(window) = self.windows.get(self.next_window).copied().filter(|w| w.first <= horizon) {
            self.next_window += 1;
            self.present[window.unit as usize] = Some(self.bring_parameters(&window, before));
        }
        while let Some(pass) = self.returns.get(self.next_return).copied().filter(|pass| *pass <= horizon) {
            self.next_return += 1;
            let Pass { unit, micro_batch, .. } = self.passes[pass];
            let (state, bytes) = (State::Activations { micro_batch }, self.saved_bytes(unit));
            let fetch = Instruction::new(Action::Fetch { unit, state }).moving(bytes);
            self.fetched[pass] = Some(self.builder.push(fetch.taking(MemoryKind::Activations, bytes), before));
        }
    }

    fn bring_parameters(&mut self, window: &Window, before: Option<u32>) -> u32 {
        let Window { unit, over, .. } = *window;
        let shards = self.mesh.shard_degree();
        // What stayed since the forward needs nothing from the tier.
        let fetched = (self.strategy.offload.parameters.is_some() && over == shards).then(|| {
            let bytes = self.held(unit, self.placement.parameters, self.strategy.bytes.parameter);
            let fetch = Instruction::new(Action::Fetch { unit, state: State::Parameters }).moving(bytes);
            self.builder.push(fetch.taking(MemoryKind::Parameters, bytes), before)
        });
        if self.placement.parameters == Extent::Full {
            return fetched.expect("whole parameters come and go only between tiers");
        }
        let full = self.full(unit, self.strategy.bytes.parameter);
        let stayed = if over == shards { 0 } else { full / u64::from(over) };
        let gather = Instruction::new(Action::Gather { unit, over }).moving(full);
        let gather =
            self.builder.push(gather.taking(MemoryKind::Gathered, full - stayed), before.into_iter().chain(fetched));
        if fetched.is_some() {
            self.drop_parameters(unit, gather, false);
        }
        gather
    }

    fn drop_parameters(&mut self, unit: u32, after: u32, write: bool) {
        let bytes = self.held(unit, self.placement.parameters, self.strategy.bytes.parameter);
        let evict = Instruction::new(Action::Evict { unit, state: State::Parameters, write });
        self.builder
            .push(evict.moving(if write { bytes } else { 0 }).giving_back(MemoryKind::Parameters, bytes), [after]);
    }

    /// Runs a pass once all that it reads is there.
    fn run(&mut self, at: usize) {
        let Pass { phase, part, unit, micro_batch } = self.passes[at];
        let (keep, saved) = (self.keep(unit), self.saved_bytes(unit));
        let mut needs = vec![self.counted];
        needs.extend(reads(self.model, unit).into_iter().filter_map(|unit| self.present[unit as usize]));
        needs.extend(self.fetched[at]);
        let mut pass = match phase {
            Phase::Forward => {
                Instruction::new(Action::Forward { unit, micro_batch, keep }).taking(MemoryKind::Activations, saved)
            }
            Phase::Backward => {
                let everything = self.model.units[unit as usize].saved_bytes[Keep::Everything as usize];
                let backward = Instruction::new(Action::Backward { unit, micro_batch, part });
                backward.giving_back(MemoryKind::Activations, saved).working(everything.saturating_sub(saved))
            }
        };
        if phase == Phase::Backward && unit == 0 {
            pass = pass.giving_back(MemoryKind::Data, self.model.batch_bytes);
        }
        for gradient in self.begins[at].clone() {
            let GradientSpan { unit, micro_batch, .. } = self.gradients[gradient];
            if self.begins_in_a_buffer(micro_batch) {
                pass = pass.taking(MemoryKind::Gradients, self.full(unit, self.strategy.bytes.gradient));
                // As many reductions may be under way; further buffers wait for them.
                let under_way = self.strategy.prefetch.max(1) as usize;
                needs.extend(self.reduces.len().checked_sub(under_way + 1).map(|reduce| self.reduces[reduce]));
            }
        }
        self.ran.push(self.builder.push(pass, needs));
    }

    /// Gives back what pass `at` was the last to use for now.
    fn let_go(&mut self, at: usize) {
        let ran = self.ran[at];
        for window in self.window_ends[at].clone() {
            let Window { unit, keep, .. } = self.windows[window];
            if self.placement.parameters == Extent::Full {
                self.drop_parameters(unit, ran, false);
                continue;
            }
            let full = self.full(unit, self.strategy.bytes.parameter);
            let stays = if keep == self.mesh.shard_degree() { 0 } else { full / u64::from(keep) };
            let release = Instruction::new(Action::Release { unit, keep });
            self.builder.push(release.giving_back(MemoryKind::Gathered, full - stays), [ran]);
        }
        let Pass { unit, micro_batch, .. } = self.passes[at];
        if self.trips[at].is_some() {
            let bytes = self.saved_bytes(unit);
            let evict =
                Instruction::new(Action::Evict { unit, state: State::Activations { micro_batch }, write: true });
            self.builder.push(evict.moving(bytes).giving_back(MemoryKind::Activations, bytes), [ran]);
        }
    }

    /// Folds and reduces the gradients that pass `at` completed.
    fn complete_gradients(&mut self, at: usize) {
        for gradient in self.completes[at].clone() {
            let GradientSpan { unit, micro_batch, .. } = self.gradients[gradient];
            let full = self.full(unit, self.strategy.bytes.gradient);
            let mut complete = self.ran[at];
            if self.strategy.elastic && micro_batch % 2 == 1 {
                let merged = u64::from(micro_batch.trailing_ones());
                let fold = Instruction::new(Action::Fold { unit, micro_batch });
                complete = self.builder.push(fold.giving_back(MemoryKind::Gradients, merged * full), []);
            }
            let per_step = self.strategy.reduce_schedule == ReduceSchedule::PerStep;
            let due = !per_step || micro_batch + 1 == self.strategy.accumulation_steps;
            if due && self.mesh.degree(Axis::Data) > 1 {
                let accumulate = std::mem::replace(&mut self.reduced[unit as usize], true);
                let message = self.full(unit, self.strategy.bytes.reduce);
                let mut reduce = Instruction::new(Action::Reduce { unit, accumulate }).moving(message);
                if self.placement.fresh_gradients == Fresh::Transient {
                    reduce = reduce.giving_back(MemoryKind::Gradients, full);
                }
                let reduce = self.builder.push(reduce, [complete]);
                self.reduces.push(reduce);
            }
        }
    }

    /// The norm, then unit by unit: fetch what its optimizer needs, update, pass on what others hold too, evict.
    fn update(&mut self) {
        let units = self.model.units.len() as u32;
        let last_pass = self.ran.last().copied();
        self.fetch_optimizer(0, last_pass);
        let clip = Instruction::new(Action::Clip).moving(self.message(Axis::World, self.norm_bytes()));
        self.builder.push(clip, self.reduces.last().copied());
        let mut update = 0;
        for unit in 0..units {
            self.fetch_optimizer(unit + 1, None);
            update = self.update_unit(unit);
        }
        if self.strategy.snapshot {
            self.builder.push(Instruction::new(Action::Snapshot), [update]);
        }
    }

    fn fetch_optimizer(&mut self, unit: u32, before: Option<u32>) {
        if unit as usize >= self.model.units.len() {
            return;
        }
        let Strategy { offload, bytes, .. } = self.strategy;
        let masters = self.held(unit, self.placement.masters, bytes.master);
        let optimizer = self.held(unit, self.placement.masters, bytes.optimizer);
        let mut fetched = None;
        if offload.optimizer.is_some() {
            let fetch = Instruction::new(Action::Fetch { unit, state: State::Optimizer }).moving(masters + optimizer);
            let fetch = fetch.taking(MemoryKind::Masters, masters).taking(MemoryKind::Optimizer, optimizer);
            fetched = Some(self.builder.push(fetch, before));
        }
        // The update of a copy that is its own master reads it; otherwise it is written anew.
        if offload.parameters.is_some() && bytes.master == 0 {
            let parameters = self.held(unit, self.placement.parameters, bytes.parameter);
            let fetch = Instruction::new(Action::Fetch { unit, state: State::Parameters }).moving(parameters);
            fetched = Some(self.builder.push(fetch.taking(MemoryKind::Parameters, parameters), before));
        }
        self.present[unit as usize] = fetched;
    }

    fn update_unit(&mut self, unit: u32) -> u32 {
        let Strategy { offload, bytes, .. } = self.strategy;
        let mut instruction = Instruction::new(Action::Update { unit });
        if offload.parameters.is_some() && bytes.master != 0 {
            let parameters = self.held(unit, self.placement.parameters, bytes.parameter);
            instruction = instruction.taking(MemoryKind::Parameters, parameters);
        }
        let update = self.builder.push(instruction, self.present[unit as usize]);
        if offload.optimizer.is_some() {
            let masters = self.held(unit, self.placement.masters, bytes.master);
            let optimizer = self.held(unit, self.placement.masters, bytes.optimizer);
            let evict = Instruction::new(Action::Evict { unit, state: State::Optimizer, write: true });
            let evict = evict.moving(masters + optimizer).giving_back(MemoryKind::Masters, masters);
            self.builder.push(evict.giving_back(MemoryKind::Optimizer, optimizer), [update]);
        }
        let mut written = update;
        if self.placement.parameters != self.placement.masters {
            let gather = Instruction::new(Action::Gather { unit, over: self.mesh.shard_degree() });
            written = self.builder.push(gather.moving(self.full(unit, bytes.parameter)), [update]);
        }
        if offload.parameters.is_some() {
            self.drop_parameters(unit, written, true);
        }
        update
    }

    /// What is held from the first instruction to the last.
    fn resident(&self) -> Vec<Effect> {
        let Strategy { offload, bytes, .. } = self.strategy;
        let place = &self.placement;
        let kinds = [
            (MemoryKind::Parameters, place.parameters, bytes.parameter, offload.parameters),
            (MemoryKind::Masters, place.masters, bytes.master, offload.optimizer),
            (MemoryKind::Gradients, place.gradients, bytes.gradient, None),
            (MemoryKind::Optimizer, place.masters, bytes.optimizer, offload.optimizer),
        ];
        let units = 0..self.model.units.len() as u32;
        let here = kinds.iter().filter(|(_, _, _, tier)| tier.is_none());
        here.map(|(kind, extent, width, _)| {
            let bytes: u64 = units.clone().map(|unit| self.held(unit, *extent, *width)).sum();
            Effect { kind: *kind, bytes: bytes as i64 }
        })
        .filter(|effect| effect.bytes != 0)
        .collect()
    }

    fn full(&self, unit: u32, width: u32) -> u64 {
        padded(self.model.units[unit as usize].flat_elements, self.mesh.shard_degree()) * u64::from(width)
    }

    fn held(&self, unit: u32, extent: Extent, width: u32) -> u64 {
        match extent {
            Extent::Full => self.full(unit, width),
            Extent::Shard => self.full(unit, width) / u64::from(self.mesh.shard_degree()),
        }
    }

    /// The norm's partial sums, one f64 per chunk, and a loss per micro-batch of the step.
    fn norm_bytes(&self) -> u64 {
        let units = 0..self.model.units.len() as u32;
        let chunks: u64 = units.map(|unit| self.full(unit, 1) / crate::SHARD_QUANTUM).sum();
        8 * (chunks + u64::from(self.mesh.data_parallel() * self.strategy.accumulation_steps))
    }

    /// A group of one sends nothing.
    fn message(&self, axis: Axis, bytes: u64) -> u64 {
        if self.mesh.degree(axis) > 1 { bytes } else { 0 }
    }

    fn keep(&self, unit: u32) -> Keep {
        let last = unit as usize + 1 == self.model.units.len();
        if last { Keep::Everything } else { self.strategy.keep[unit as usize] }
    }

    fn saved_bytes(&self, unit: u32) -> u64 {
        self.model.units[unit as usize].saved_bytes[self.keep(unit) as usize]
    }

    /// Whether a gradient starts in a buffer of its own: always a transient one, and in elastic sums that of every micro-batch but the first.
    fn begins_in_a_buffer(&self, micro_batch: u32) -> bool {
        self.placement.fresh_gradients == Fresh::Transient || self.strategy.elastic && micro_batch > 0
    }
}

/// The units whose parameters `unit` reads: its own, and those it borrows.
fn reads(model: &ModelShape, unit: u32) -> Vec<u32> {
    let mut units = vec![unit];
    units.extend(&model.units[unit as usize].borrows);
    units
}

/// Backwards add to gradients, and so does the forward of the last unit, which differentiates the loss while it has the logits.
fn adds_gradients(model: &ModelShape, pass: &Pass) -> bool {
    let loss = pass.phase == Phase::Forward && pass.unit as usize + 1 == model.units.len();
    loss || differentiates_weights(pass)
}

/// The indices of `ends` grouped by pass.
fn by_pass(passes: usize, ends: impl Iterator<Item = usize>) -> Vec<Vec<usize>> {
    let mut groups = vec![Vec::new(); passes];
    for (index, end) in ends.enumerate() {
        groups[end].push(index);
    }
    groups
}
