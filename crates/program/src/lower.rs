//! The lowering: turns a model, a mesh and a strategy into the program of a rank.
//!
//! One lowering serves every strategy. It walks through the rank's forwards and backwards in order.
//! Around each pass it inserts the instructions that the [`Placement`] requires:
//!
//! - before the pass: gathers, fetches and receives for the passes up to `prefetch` ahead;
//! - after the pass: releases and evictions of what is not needed any more, and sends to other
//!   stages;
//! - after the pass that completes a gradient: its fold, its reduction, and its move to its tier.
//!
//! The norm and the [updates](crate::update) follow. With one rank nothing is gathered and nothing
//! is reduced; the walk is the same.

use crate::builder::Builder;
use crate::passes::{Pass, Pipeline};
use crate::segments::{Around, Ran};
use crate::sizes::Sizes;
use crate::strategy::validate;
use crate::windows::{GradientSpan, Stay, Window, activation_trips, gradient_spans, gradient_stays, parameter_windows};
use crate::{
    Action, Axis, BackwardPart, Codec, Encoding, Extent, Fresh, Instruction, MemoryKind, Mesh, ModelShape, Phase,
    Placement, Program, ReduceSchedule, Reshard, State, Strategy, StrategyError,
};

/// Returns the programs of all ranks, whose parts of units are equally large.
///
/// # Errors
///
/// A strategy that does not fit the model or the mesh.
pub fn lower(model: &ModelShape, mesh: &Mesh, strategy: &Strategy) -> Result<Vec<Program>, StrategyError> {
    let firsts = lower_stages(model, mesh, strategy)?;
    Ok(firsts.iter().flat_map(|first| (0..mesh.stage_ranks()).map(|offset| at_rank(first, offset))).collect())
}

/// Returns the programs of the first rank of every pipeline stage. The ranks of a stage have equal
/// programs, except for rank numbers.
///
/// # Errors
///
/// As [`lower`].
pub fn lower_stages(model: &ModelShape, mesh: &Mesh, strategy: &Strategy) -> Result<Vec<Program>, StrategyError> {
    validate(model, mesh, strategy)?;
    let pipeline = Pipeline::new(model, mesh, strategy)?;
    let ranks = (0..mesh.pp).map(|stage| stage * mesh.stage_ranks());
    ranks.map(|rank| Ok(Lowering::new(model, mesh, strategy, &pipeline, rank)?.lower())).collect()
}

/// Returns the programs of all ranks of a model whose units are split over tensor-parallel ranks.
/// `shape_of` gives the shape of the part that a position in the tensor-parallel group holds: parts
/// may differ in size, for a vocabulary that is not a multiple of the degree, say.
///
/// # Errors
///
/// As [`lower`], for any of the shapes.
pub fn lower_all<'m>(
    shape_of: impl Fn(u32) -> &'m ModelShape,
    mesh: &Mesh,
    strategy: &Strategy,
) -> Result<Vec<Program>, StrategyError> {
    let of_part = |tp| lower_stages(shape_of(tp), mesh, strategy);
    let firsts = (0..mesh.tp).map(of_part).collect::<Result<Vec<_>, _>>()?;
    let stage_ranks = mesh.stage_ranks();
    let rank = |rank: u32| {
        let first = &firsts[(rank % mesh.tp) as usize][(rank / stage_ranks) as usize];
        at_rank(first, rank % stage_ranks)
    };
    Ok((0..mesh.ranks()).map(rank).collect())
}

/// Returns the program of one rank.
///
/// # Errors
///
/// As [`lower`], and a rank that the mesh does not have.
pub fn lower_rank(model: &ModelShape, mesh: &Mesh, strategy: &Strategy, rank: u32) -> Result<Program, StrategyError> {
    validate(model, mesh, strategy)?;
    if rank >= mesh.ranks() {
        return Err(StrategyError::Rank { rank, ranks: mesh.ranks() });
    }
    let pipeline = Pipeline::new(model, mesh, strategy)?;
    Ok(Lowering::new(model, mesh, strategy, &pipeline, rank)?.lower())
}

/// The program of the rank `offset` after `first` in the same stage.
fn at_rank(first: &Program, offset: u32) -> Program {
    let mut program = Program { rank: first.rank + offset, ..first.clone() };
    for instruction in &mut program.instructions {
        match &mut instruction.action {
            Action::Send { to: peer, .. } | Action::Recv { from: peer, .. } => *peer += offset,
            _ => {}
        }
    }
    if program.server.is_some_and(|server| program.rank >= server.servers) {
        // The first rank is a server, and this one is none.
        let of_server = [MemoryKind::Masters, MemoryKind::Optimizer, MemoryKind::Communication];
        program.resident.retain(|effect| !of_server.contains(&effect.kind));
    }
    program
}

/// A program under construction, with the instructions that later ones depend on. Instructions are
/// identified by their numbers.
pub(crate) struct Lowering<'a> {
    pub(crate) strategy: &'a Strategy,
    pub(crate) sizes: Sizes<'a>,
    pub(crate) builder: Builder,
    /// Everything but the instructions.
    pub(crate) program: Program,
    /// The units that the rank holds.
    pub(crate) holds: Vec<u32>,
    /// Those of them of which something is trained.
    pub(crate) trains: Vec<u32>,
    pub(crate) passes: Vec<Pass>,
    /// Per pass so far, its last instructions.
    pub(crate) ran: Vec<Ran>,
    /// The instruction that the first pass waits for.
    counted: u32,
    /// Windows in order of first use. Those before `next_window` have been brought.
    windows: Vec<Window>,
    next_window: usize,
    /// Per pass, the windows that end with it.
    window_ends: Vec<Vec<usize>>,
    /// Per unit, the instruction that brought its parameters.
    pub(crate) present: Vec<Option<u32>>,
    /// Per unit, the instruction that returned its parameters to their tier.
    pub(crate) dropped: Vec<Option<u32>>,
    /// Per forward pass, the backward pass until which its activations are offloaded; those
    /// backward passes, ascending; and the evictions and fetches of activations.
    trips: Vec<Option<usize>>,
    returns: Vec<usize>,
    next_return: usize,
    /// All sends of gradients so far, and the sends of outputs by unit and micro-batch. Their
    /// buffers are freed when the compute lane knows that they are sent.
    gradients_sent: Vec<u32>,
    outputs_sent: Vec<Option<u32>>,
    /// Passes whose input comes from another stage, in the order in which it comes, each with the
    /// first pass that takes this input or a later one.
    receives: Vec<(usize, usize)>,
    next_receive: usize,
    /// Per pass, the instructions that brought its activations and its input.
    brought: Vec<Brought>,
    /// Per micro-batch, the last pass that reads it.
    last_uses: Vec<usize>,
    /// Per phase, unit and micro-batch, the collective that completes the pass.
    exchanged: [Vec<Option<u32>>; 2],
    /// The gradients that begin and those that are complete with each pass.
    gradients: Vec<GradientSpan>,
    begins: Vec<Vec<usize>>,
    completes: Vec<Vec<usize>>,
    /// Where gradient sums lie in a tier: the times when they are on the device, by first and by
    /// last pass. Those before `next_stay` have been fetched. Then, per unit, the fetch of its sum.
    stays: Vec<Stay>,
    next_stay: usize,
    stay_begins: Vec<Vec<usize>>,
    stay_ends: Vec<Vec<usize>>,
    sum_fetched: Vec<Option<u32>>,
    /// All evictions so far that free memory which the compute lane takes: of activations, of
    /// gradient sums and of updated parameters.
    pub(crate) evictions: Vec<u32>,
    pub(crate) sums_evicted: Vec<u32>,
    pub(crate) copies_evicted: Vec<u32>,
    /// All reductions so far, and the units that have been reduced.
    pub(crate) reduces: Vec<u32>,
    reduced: Vec<bool>,
    /// The last sum of gradients over a tensor-parallel group.
    pub(crate) tied: Option<u32>,
    /// Per unit, the instruction that completes its gradient sum.
    pub(crate) summed: Vec<Option<u32>>,
    /// Units and their chunks in update order, the fetches of their state where it lies in a tier,
    /// and the number of updates so far.
    pub(crate) pieces: Vec<(u32, u32)>,
    pub(crate) fetched: Vec<u32>,
    pub(crate) updated: usize,
    /// Per unit, the outer step that runs during the step.
    pub(crate) averaged: Vec<Option<u32>>,
    /// The instruction that ends the last outer step of a unit.
    pub(crate) outer: Option<u32>,
}

/// The instructions that bring what a pass reads, where that is not on the rank.
#[derive(Clone, Copy, Default)]
struct Brought {
    activations: Option<u32>,
    input: Option<u32>,
}

impl<'a> Lowering<'a> {
    fn new(
        model: &'a ModelShape,
        mesh: &'a Mesh,
        strategy: &'a Strategy,
        pipeline: &Pipeline,
        rank: u32,
    ) -> Result<Lowering<'a>, StrategyError> {
        let units = model.units.len();
        let (accumulation, prefetch) = (strategy.accumulation_steps, strategy.prefetch as usize);
        let sizes = Sizes::new(model, mesh, strategy);
        let placement = sizes.placement;
        let (mut passes, arrivals) = pipeline.passes(mesh.coordinates(rank).pp);
        let lowest = sizes.lowest_differentiated();
        if lowest > 0 {
            // There is one stage, so nothing arrives.
            passes.retain(|pass| pass.phase == Phase::Forward || pass.unit >= lowest);
        }
        let mut program = Program {
            rank,
            mesh: *mesh,
            placement,
            offload: strategy.offload,
            staying: sizes.staying_units(),
            chunks: Vec::new(),
            units: model.units.iter().map(|unit| unit.name.clone()).collect(),
            borrows: model.units.iter().map(|unit| unit.borrows.clone()).collect(),
            frozen: model.frozen_units(),
            lowest,
            splits: model.units.iter().filter_map(|unit| unit.split.clone()).collect(),
            pipeline: pipeline.stretches.clone(),
            fused_loss: backward_follows(&passes, units as u32 - 1),
            micro_batches: accumulation,
            kind: strategy.kind,
            fragment: strategy.fragment,
            server: strategy.server,
            folded: strategy.elastic,
            rounding_bits: strategy.rounding_bits,
            pruned: strategy.pruned,
            period: strategy.period,
            snapshot: strategy.snapshot,
            prefetch: strategy.prefetch,
            resident: Vec::new(),
            instructions: Vec::new(),
        };
        let mut windows =
            parameter_windows(&passes, units, |unit| program.reads(unit).collect(), &reach(mesh, strategy, &placement));
        windows.retain(|window| placement.parameters == Extent::Shard || !program.staying.contains(&window.unit));
        let apart = strategy.elastic || strategy.reduce_schedule == ReduceSchedule::PerMicroBatch;
        let spans = |program: &Program, apart| {
            let adds_to = |pass: &Pass| match program.adds_gradients(pass.unit, pass.phase, pass.part) {
                true => program.adds_to(pass.unit).collect(),
                false => Vec::new(),
            };
            gradient_spans(&passes, units, accumulation, adds_to, apart)
        };
        if apart || strategy.offload.gradients.is_some() {
            // Sums of one micro-batch at a time: the loss's gradient must not begin with a forward
            // if its half for weights comes after the next forward.
            program.fused_loss &= mixed(&spans(&program, true)).is_none();
            if let Some(unit) = mixed(&spans(&program, true)) {
                return Err(StrategyError::MixedGradients { unit });
            }
        }
        let gradients = spans(&program, apart);
        let stays = match strategy.offload.gradients {
            Some(_) => {
                let needed = sums_needed(spans(&program, true), strategy, &placement);
                gradient_stays(needed, units, prefetch.max(1))
            }
            None => Vec::new(),
        };
        let trips = match strategy.offload.activations {
            Some(_) => activation_trips(&passes, accumulation, prefetch.max(1)),
            None => vec![None; passes.len()],
        };
        let mut returns: Vec<usize> = trips.iter().flatten().copied().collect();
        returns.sort_unstable();
        let mut last_uses = vec![0; accumulation as usize];
        passes.iter().enumerate().for_each(|(at, pass)| last_uses[pass.micro_batch as usize] = at);
        let places = units * accumulation as usize;
        Ok(Lowering {
            strategy,
            sizes,
            builder: Builder::default(),
            holds: program.holds(),
            trains: program.trains(),
            ran: Vec::with_capacity(passes.len()),
            counted: 0,
            window_ends: by_pass(passes.len(), windows.iter().map(|window| window.last)),
            windows,
            next_window: 0,
            present: vec![None; units],
            dropped: vec![None; units],
            trips,
            returns,
            next_return: 0,
            gradients_sent: Vec::new(),
            outputs_sent: vec![None; places],
            receives: with_first_use(arrivals),
            next_receive: 0,
            brought: vec![Brought::default(); passes.len()],
            last_uses,
            exchanged: [vec![None; places], vec![None; places]],
            begins: by_pass(passes.len(), gradients.iter().map(|span| span.first)),
            completes: by_pass(passes.len(), gradients.iter().map(|span| span.last)),
            gradients,
            stay_begins: by_pass(passes.len(), stays.iter().map(|stay| stay.first)),
            stay_ends: by_pass(passes.len(), stays.iter().map(|stay| stay.last)),
            stays,
            next_stay: 0,
            sum_fetched: vec![None; units],
            evictions: Vec::new(),
            sums_evicted: Vec::new(),
            copies_evicted: Vec::new(),
            reduces: Vec::new(),
            reduced: vec![false; units],
            tied: None,
            summed: vec![None; units],
            pieces: Vec::new(),
            fetched: Vec::new(),
            updated: 0,
            averaged: vec![None; units],
            outer: None,
            passes,
            program,
        })
    }

    fn lower(mut self) -> Program {
        self.load();
        self.average_beside();
        for at in 0..self.passes.len() {
            self.receive(at);
            self.acquire(at);
            self.run(at);
            self.pass_on(at);
            self.let_go(at);
            self.complete_gradients(at);
        }
        self.update();
        self.finish()
    }

    fn finish(mut self) -> Program {
        self.program.resident = self.resident();
        let chunks: Vec<u32> = (0..self.program.units.len() as u32).map(|unit| self.sizes.chunks(unit)).collect();
        if chunks.iter().any(|chunks| *chunks > 1) {
            self.program.chunks = chunks;
        }
        self.program.instructions = self.builder.finish();
        self.program
    }

    /// Loads all micro-batches first. The loss is a mean over the targets of the whole step, so
    /// their number must be known before the first backward. A batch takes a few kilobytes.
    fn load(&mut self) {
        let mut last = 0;
        for micro_batch in 0..self.strategy.accumulation_steps {
            let load = Instruction::new(Action::Load { micro_batch });
            last = self.builder.push(load.taking(MemoryKind::Data, self.sizes.batch()), []);
        }
        // The message is two numbers: tokens and targets.
        let axis = self.strategy.kind.gradient_axis();
        let message = if self.program.counts_over_ranks() { self.sizes.message(axis, 16) } else { 0 };
        let count = Instruction::new(Action::Count { axis }).moving(message);
        self.counted = self.builder.push(count, [last]);
    }

    /// Starts to receive the inputs of the next stretch of units while this one runs.
    fn receive(&mut self, at: usize) {
        let horizon = at + self.program.units_ahead();
        let before = at.checked_sub(1).map(|before| self.ran[before].last);
        while let Some((pass, _)) = self.receives.get(self.next_receive).copied().filter(|(_, used)| *used <= horizon) {
            self.next_receive += 1;
            let Pass { phase, unit, micro_batch, .. } = self.passes[pass];
            let (unit, maker) = match phase {
                Phase::Forward => (unit - 1, unit - 1),
                Phase::Backward => (unit, unit + 1),
            };
            let from = self.program.peer(maker);
            let receive = self.between_stages(Action::Recv { from, unit, micro_batch, phase }, unit, phase);
            let receive = receive.taking(MemoryKind::Communication, self.sizes.sent(unit));
            self.brought[pass].input = Some(self.builder.push(receive, before));
        }
    }

    /// Starts to bring what the passes up to `prefetch` after `at` need.
    fn acquire(&mut self, at: usize) {
        let horizon = at + self.strategy.prefetch as usize;
        // Waiting for the pass before `at` bounds the memory of what is brought ahead.
        let before = at.checked_sub(1).map(|before| self.ran[before].last);
        while let Some(window) = self.windows.get(self.next_window).copied().filter(|w| w.first <= horizon) {
            self.next_window += 1;
            self.present[window.unit as usize] = Some(self.bring_parameters(&window, before));
        }
        while let Some(stay) = self.stays.get(self.next_stay).copied().filter(|stay| stay.first <= horizon) {
            self.next_stay += 1;
            if !stay.begins {
                let bytes = self.sum(stay.unit);
                let fetch = Instruction::new(Action::Fetch { unit: stay.unit, state: State::Gradients }).moving(bytes);
                self.sum_fetched[stay.unit as usize] =
                    Some(self.builder.push(fetch.taking(MemoryKind::Gradients, bytes), before));
            }
        }
        while let Some(pass) = self.returns.get(self.next_return).copied().filter(|pass| *pass <= horizon) {
            self.next_return += 1;
            let Pass { unit, micro_batch, .. } = self.passes[pass];
            let (state, bytes) = (State::Activations { micro_batch }, self.sizes.saved(unit));
            let fetch = Instruction::new(Action::Fetch { unit, state }).moving(bytes);
            self.brought[pass].activations =
                Some(self.builder.push(fetch.taking(MemoryKind::Activations, bytes), before));
        }
    }

    fn bring_parameters(&mut self, window: &Window, before: Option<u32>) -> u32 {
        let Window { unit, over, .. } = *window;
        let shards = self.sizes.mesh.shard_degree();
        // A part that stayed since the forward is not fetched from the tier again.
        let from_tier = self.program.lies_in_a_tier(unit) && over == shards;
        let fetched = from_tier.then(|| self.fetch_parameters(unit, before));
        match fetched {
            Some(fetched) if self.sizes.placement.parameters == Extent::Full => return fetched,
            _ => {}
        }
        let full = self.sizes.full(unit, self.strategy.bytes.parameter);
        let stayed = if over == shards { 0 } else { full / u64::from(over) };
        // Parts that were kept are the decoded ones, and travel as they are.
        let encoding = self.strategy.gathers.filter(|_| over == shards);
        let message = if over == shards { self.sizes.gathered(unit) } else { full };
        let gather = Instruction::new(Action::Gather { unit, over }).moving(message);
        let gather = gather.encoded_elements(encoding, self.strategy.bytes.parameter);
        let gather = gather.taking(MemoryKind::Gathered, full - stayed);
        let gather = self.builder.push(gather, before.into_iter().chain(fetched));
        if from_tier {
            self.drop_parameters(unit, gather, false);
        }
        gather
    }

    pub(crate) fn fetch_parameters(&mut self, unit: u32, before: Option<u32>) -> u32 {
        let bytes = self.sizes.parameters(unit);
        let fetch = Instruction::new(Action::Fetch { unit, state: State::Parameters }).moving(bytes);
        self.builder.push(fetch.taking(MemoryKind::Parameters, bytes), before)
    }

    pub(crate) fn drop_parameters(&mut self, unit: u32, after: u32, write: bool) -> u32 {
        let bytes = self.sizes.parameters(unit);
        let evict = Instruction::new(Action::Evict { unit, state: State::Parameters, write });
        let evict = evict.moving(if write { self.sizes.written(unit) } else { 0 });
        let evict = self.builder.push(evict.giving_back(MemoryKind::Parameters, bytes), [after]);
        self.dropped[unit as usize] = Some(evict);
        evict
    }

    /// Runs a pass once everything that it reads is there.
    fn run(&mut self, at: usize) {
        let Pass { phase, part, unit, micro_batch } = self.passes[at];
        let mut needs: Vec<u32> = self.program.reads(unit).filter_map(|unit| self.present[unit as usize]).collect();
        needs.extend(self.brought[at].activations);
        if phase == Phase::Forward {
            needs.extend(self.room(&self.evictions));
        }
        let mut gives_back = Vec::new();
        if self.brought[at].input.is_some() {
            let received = if phase == Phase::Forward { unit - 1 } else { unit };
            gives_back.push((MemoryKind::Communication, self.sizes.sent(received)));
            if phase == Phase::Backward {
                needs.extend(self.outputs_sent[self.place(unit, micro_batch)]);
                gives_back.push((MemoryKind::Communication, self.sizes.sent(unit)));
            }
        }
        let sent = crosses_out(&self.program, &self.passes[at]).filter(|_| part != BackwardPart::Weights);
        let leaves = sent.map_or(0, |(sent, _)| self.sizes.sent(sent));
        if sent.is_some() && phase == Phase::Backward {
            needs.extend(self.room(&self.gradients_sent));
        }
        if at == self.last_uses[micro_batch as usize] {
            gives_back.push((MemoryKind::Data, self.sizes.batch()));
        }
        let gradients = self.begin_gradients(at, &mut needs);
        let around = Around { inputs: self.inputs(at), needs, gradients, leaves, gives_back };
        let ran = match self.sizes.split(unit) {
            Some(split) => self.run_segments(at, split, around),
            None => {
                let mut pass = self.pass_with_activations(phase, part, unit, micro_batch);
                for (kind, bytes) in around.gives_back {
                    pass = pass.giving_back(kind, bytes);
                }
                let pass = pass.taking(MemoryKind::Gradients, around.gradients);
                let pass = pass.taking(MemoryKind::Communication, around.leaves);
                let last = self.builder.push(pass, around.inputs.into_iter().chain(around.needs));
                Ran { last, result: last, exchange: None }
            }
        };
        self.ran.push(ran);
    }

    /// Bytes of the gradients that begin with pass `at`. Adds the instructions that make room for
    /// them to `needs`.
    fn begin_gradients(&mut self, at: usize, needs: &mut Vec<u32>) -> u64 {
        let mut bytes = 0;
        if self.sizes.placement.fresh_gradients == Fresh::InPlace {
            for Stay { unit, begins, .. } in self.stays_from(at) {
                bytes += if begins { self.sum(unit) } else { 0 };
                needs.extend(self.room_for_sum(unit));
            }
        }
        for gradient in std::mem::take(&mut self.begins[at]) {
            let GradientSpan { unit, micro_batch, .. } = self.gradients[gradient];
            if self.begins_in_a_buffer(micro_batch) {
                bytes += self.sizes.gradient(unit);
                needs.extend(self.room(&self.reduces));
                if self.sizes.placement.fresh_gradients == Fresh::InPlace {
                    needs.extend(self.room(&self.sums_evicted));
                }
            }
        }
        bytes
    }

    /// The release that must finish before the next piece of memory of its kind may be taken. At
    /// most `prefetch` pieces are in flight.
    pub(crate) fn room(&self, giving_back: &[u32]) -> Option<u32> {
        let under_way = self.strategy.prefetch.max(1) as usize;
        giving_back.len().checked_sub(under_way + 1).map(|last| giving_back[last])
    }

    fn pass_with_activations(&self, phase: Phase, part: BackwardPart, unit: u32, micro_batch: u32) -> Instruction {
        let (saved, everything) = (self.sizes.saved(unit), self.sizes.everything(unit));
        let recomputed = everything.saturating_sub(saved);
        let backward = Instruction::new(Action::Backward { unit, segment: 0, micro_batch, part });
        match (phase, part) {
            (Phase::Forward, _) => {
                let keep = self.sizes.keep(unit);
                Instruction::new(Action::Forward { unit, segment: 0, micro_batch, keep })
                    .taking(MemoryKind::Activations, saved)
            }
            (_, BackwardPart::Whole) => backward.giving_back(MemoryKind::Activations, saved).working(recomputed),
            // The second half reads what the first half recomputed.
            (_, BackwardPart::Input) => backward.taking(MemoryKind::Activations, recomputed),
            (_, BackwardPart::Weights) => backward.giving_back(MemoryKind::Activations, saved + recomputed),
        }
    }

    /// The instructions that the input of pass `at` depends on.
    pub(crate) fn inputs(&self, at: usize) -> Vec<u32> {
        let Pass { phase, part, unit, micro_batch } = self.passes[at];
        if part == BackwardPart::Weights {
            return Vec::new();
        }
        let before = at.checked_sub(1).map_or(self.counted, |before| self.ran[before].last);
        let inputs = [Some(before), self.brought[at].input, self.input_exchange(phase, unit, micro_batch)];
        inputs.into_iter().flatten().collect()
    }

    /// The collective that completes a pass's input.
    fn input_exchange(&self, phase: Phase, unit: u32, micro_batch: u32) -> Option<u32> {
        let of = |phase, unit| self.exchanged[phase as usize][self.place(unit, micro_batch)];
        match phase {
            Phase::Forward => unit.checked_sub(1).and_then(|below| of(phase, below)),
            Phase::Backward if unit == self.program.loss_unit() => of(Phase::Forward, unit),
            Phase::Backward => of(phase, unit + 1),
        }
    }

    fn place(&self, unit: u32, micro_batch: u32) -> usize {
        (unit * self.strategy.accumulation_steps + micro_batch) as usize
    }

    /// Emits the collectives inside the unit, and the send of its result to the next stage.
    fn pass_on(&mut self, at: usize) {
        let Pass { phase, part, unit, micro_batch } = self.passes[at];
        if part == BackwardPart::Weights {
            return;
        }
        let exchange = self.exchange(at);
        let place = self.place(unit, micro_batch);
        self.exchanged[phase as usize][place] = exchange;
        if let Some((unit, taker)) = crosses_out(&self.program, &self.passes[at]) {
            let to = self.program.peer(taker);
            let mut send = self.between_stages(Action::Send { to, unit, micro_batch, phase }, unit, phase);
            if phase == Phase::Backward {
                send = send.giving_back(MemoryKind::Communication, self.sizes.sent(unit));
            }
            let sent = self.builder.push(send, [self.ran[at].result].into_iter().chain(exchange));
            match phase {
                Phase::Forward => self.outputs_sent[place] = Some(sent),
                Phase::Backward => self.gradients_sent.push(sent),
            }
        }
    }

    /// A send or a receive of the output of `unit`, or of that output's gradient.
    fn between_stages(&self, action: Action, unit: u32, phase: Phase) -> Instruction {
        let codec = self.strategy.activations[phase as usize];
        let encoding = codec.map(|codec| Encoding::new(Codec::Blocks(codec), Axis::Pipeline, false));
        let message = Instruction::new(action).moving(self.sizes.sent(unit));
        message.encoded_elements(encoding, self.strategy.bytes.parameter)
    }

    /// Frees what pass `at` was the last to use for now.
    fn let_go(&mut self, at: usize) {
        let ran = self.ran[at].last;
        for window in std::mem::take(&mut self.window_ends[at]) {
            let Window { unit, keep, .. } = self.windows[window];
            if self.sizes.placement.parameters == Extent::Full {
                self.drop_parameters(unit, ran, false);
                continue;
            }
            let full = self.sizes.full(unit, self.strategy.bytes.parameter);
            let stays = if keep == self.sizes.mesh.shard_degree() { 0 } else { full / u64::from(keep) };
            let release = Instruction::new(Action::Release { unit, keep });
            self.builder.push(release.giving_back(MemoryKind::Gathered, full - stays), [ran]);
        }
        if self.trips[at].is_some() {
            let Pass { unit, micro_batch, .. } = self.passes[at];
            let bytes = self.sizes.saved(unit);
            let state = State::Activations { micro_batch };
            let evict = Instruction::new(Action::Evict { unit, state, write: true }).moving(bytes);
            self.evictions.push(self.builder.push(evict.giving_back(MemoryKind::Activations, bytes), [ran]));
        }
    }

    /// Folds and reduces the gradients that pass `at` completed.
    fn complete_gradients(&mut self, at: usize) {
        for gradient in std::mem::take(&mut self.completes[at]) {
            let GradientSpan { unit, micro_batch, .. } = self.gradients[gradient];
            let bytes = self.sizes.gradient(unit);
            let mut complete = self.ran[at].last;
            if self.strategy.elastic && micro_batch % 2 == 1 {
                let merged = u64::from(micro_batch.trailing_ones());
                let fold = Instruction::new(Action::Fold { unit, micro_batch });
                complete = self.builder.push(fold.giving_back(MemoryKind::Gradients, merged * bytes), []);
            }
            let due = !self.strategy.elastic || micro_batch + 1 == self.strategy.accumulation_steps;
            let axis = self.strategy.kind.gradient_axis();
            if self.program.server.is_some() {
                let push = Instruction::new(Action::Push { unit }).moving(self.sizes.gradient(unit));
                complete = self.builder.push(push, [complete]);
                self.reduces.push(complete);
            } else if due && self.sizes.mesh.degree(axis) > 1 {
                let accumulate = std::mem::replace(&mut self.reduced[unit as usize], true);
                let message = self.sizes.reduced(unit, self.strategy.bytes.reduce);
                let mut reduce = Instruction::new(Action::Reduce { unit, accumulate, axis }).moving(message);
                let encoding = self.strategy.gradients.filter(|_| !self.strategy.warms_up);
                reduce = reduce.encoded(encoding, &self.sizes.model.units[unit as usize].matrices);
                let mut needs = vec![complete];
                if self.sizes.placement.fresh_gradients == Fresh::Transient {
                    reduce = reduce.giving_back(MemoryKind::Gradients, bytes);
                    if let Some(stay) = self.stays_from(at).into_iter().find(|stay| stay.unit == unit) {
                        reduce = reduce.taking(MemoryKind::Gradients, if stay.begins { self.sum(unit) } else { 0 });
                        needs.extend(self.room_for_sum(unit));
                    }
                }
                complete = self.builder.push(reduce, needs);
                self.reduces.push(complete);
            }
            if micro_batch + 1 == self.strategy.accumulation_steps {
                complete = self.tie_in_group(unit, complete);
            }
            self.summed[unit as usize] = Some(complete);
        }
        for stay in std::mem::take(&mut self.stay_ends[at]) {
            let unit = self.stays[stay].unit;
            let (bytes, sum) = (self.sum(unit), self.summed[unit as usize]);
            let evict = Instruction::new(Action::Evict { unit, state: State::Gradients, write: true }).moving(bytes);
            let evict = evict.giving_back(MemoryKind::Gradients, bytes);
            let evicted = self.builder.push(evict, [self.ran[at].last].into_iter().chain(sum));
            self.sums_evicted.push(evicted);
        }
    }

    /// Sums the parts of a unit's gradient that the ranks of a tensor-parallel group share, once
    /// they are complete on the rank. Returns the instruction that completes the gradient.
    fn tie_in_group(&mut self, unit: u32, complete: u32) -> u32 {
        let shared = self.sizes.split(unit).map_or(0, |split| split.shared_gradient_elements);
        if shared == 0 {
            return complete;
        }
        let tie = Instruction::new(Action::Tie { unit, axis: Axis::Tensor });
        let tie = self.builder.push(tie.moving(shared * u64::from(self.strategy.bytes.gradient)), [complete]);
        self.tied = Some(tie);
        tie
    }

    /// The gradient sums in tiers that must be on the device from pass `at` on.
    fn stays_from(&self, at: usize) -> Vec<Stay> {
        self.stay_begins[at].iter().map(|stay| self.stays[*stay]).collect()
    }

    /// Bytes of the gradient sum that a unit's update reads.
    fn sum(&self, unit: u32) -> u64 {
        self.sizes.held(unit, self.sizes.placement.gradients, self.strategy.bytes.gradient)
    }

    /// The instruction that an addition to a unit's sum waits for where sums lie in a tier: the
    /// fetch of the sum, or the eviction that makes room for it.
    fn room_for_sum(&self, unit: u32) -> Option<u32> {
        self.sum_fetched[unit as usize].or_else(|| self.room(&self.sums_evicted))
    }

    /// True if a gradient starts in a buffer of its own. Transient gradients always do; elastic
    /// sums do for every micro-batch but the first.
    fn begins_in_a_buffer(&self, micro_batch: u32) -> bool {
        self.sizes.placement.fresh_gradients == Fresh::Transient || self.strategy.elastic && micro_batch > 0
    }
}

/// The rules by which windows over parameters are formed. Resident parameters have none.
fn reach(mesh: &Mesh, strategy: &Strategy, placement: &Placement) -> crate::windows::Reach {
    let whole = placement.parameters == Extent::Full;
    crate::windows::Reach {
        come_and_go: !whole || strategy.offload.parameters.is_some(),
        shards: mesh.shard_degree(),
        // Parameters that are whole and come from a tier have no parts that could stay.
        reshard: match strategy.reshard_after_forward {
            Reshard::To(_) if whole => Reshard::Always,
            // One part of one: everything stays.
            Reshard::To(1) => Reshard::Never,
            reshard => reshard,
        },
        prefetch: strategy.prefetch as usize,
    }
}

/// The passes during which each unit's gradient sum is needed. In-place sums are needed while a
/// micro-batch adds to them, transient ones when a reduction does. Folding needs the sum all the
/// time.
fn sums_needed<'a>(
    of_micro_batches: Vec<GradientSpan>,
    strategy: &'a Strategy,
    placement: &Placement,
) -> impl Iterator<Item = GradientSpan> + 'a {
    let transient = placement.fresh_gradients == Fresh::Transient;
    let per_step = strategy.reduce_schedule == ReduceSchedule::PerStep;
    let last = strategy.accumulation_steps - 1;
    let first = |unit: u32| of_micro_batches.iter().find(|span| span.unit == unit).map(|span| span.first);
    let spans: Vec<GradientSpan> = of_micro_batches
        .iter()
        .map(|span| match transient {
            true => GradientSpan { first: span.last, ..*span },
            false if strategy.elastic => GradientSpan { first: first(span.unit).unwrap_or(span.first), ..*span },
            false => *span,
        })
        .collect();
    let whole = strategy.elastic || transient && per_step;
    spans.into_iter().filter(move |span| !whole || span.micro_batch == last)
}

/// The unit whose output, or the gradient of it, goes to another stage after a pass, and the unit
/// that takes it there.
fn crosses_out(program: &Program, pass: &Pass) -> Option<(u32, u32)> {
    let (unit, taker) = match pass.phase {
        Phase::Forward => (pass.unit, pass.unit + 1),
        Phase::Backward => (pass.unit.checked_sub(1)?, pass.unit - 1),
    };
    (taker <= program.loss_unit() && !program.runs(taker)).then_some((unit, taker))
}

/// True if the loss unit is among the units of `passes`, and each of its forwards is followed by
/// its backward on the same micro-batch, whole or the half for the input.
fn backward_follows(passes: &[Pass], loss: u32) -> bool {
    let is_forward = |pass: &Pass| pass.unit == loss && pass.phase == Phase::Forward;
    let follows = |at: usize, pass: &Pass| {
        let backward = |next: &&Pass| {
            let same = (next.unit, next.micro_batch) == (loss, pass.micro_batch);
            same && next.phase == Phase::Backward && next.part != BackwardPart::Weights
        };
        passes.get(at + 1).filter(backward).is_some()
    };
    let mut forwards = passes.iter().enumerate().filter(|(_, pass)| is_forward(pass)).peekable();
    forwards.peek().is_some() && forwards.all(|(at, pass)| follows(at, pass))
}

/// A unit to whose gradient micro-batches add by turns, or in descending order.
fn mixed(of_micro_batches: &[GradientSpan]) -> Option<u32> {
    let by_turns = |pair: &&[GradientSpan]| pair[0].unit == pair[1].unit && pair[0].last >= pair[1].first;
    of_micro_batches.windows(2).find(by_turns).map(|pair| pair[0].unit)
}

/// Each pass that receives its input, in the order in which it comes, with the first pass that
/// takes this input or one that comes later.
fn with_first_use(arrivals: Vec<usize>) -> Vec<(usize, usize)> {
    let mut first = usize::MAX;
    let mut receives: Vec<(usize, usize)> = arrivals
        .into_iter()
        .rev()
        .map(|pass| {
            first = first.min(pass);
            (pass, first)
        })
        .collect();
    receives.reverse();
    receives
}

/// Per pass, the indices of the `ends` that name it.
fn by_pass(passes: usize, ends: impl Iterator<Item = usize>) -> Vec<Vec<usize>> {
    let mut groups = vec![Vec::new(); passes];
    for (index, end) in ends.enumerate() {
        groups[end].push(index);
    }
    groups
}
