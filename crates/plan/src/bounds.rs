//! Lower bounds of time and memory, from the prices of single instructions and from facts that hold
//! for every program of a candidate.
//!
//! The bound of time takes the longest pipeline stage. It rests on three facts:
//!
//! - A stage's first forward waits for the forwards of the stages before it and for the stage's
//!   first gather. Its compute lane then runs all of its passes one after another. The collectives
//!   of tensor and expert parallelism between the units of a stretch lie between the passes. After
//!   its last backward, the stages before it still have theirs. Then the last gradient is summed,
//!   and the updates follow. None of this can overlap.
//! - If parameters are gathered for every pass, at most `prefetch` gathers run ahead. The gathers
//!   of a stretch's pass, except for the first few, therefore lie inside the pass.
//! - No gradient is summed before it is complete. Without a pipeline, all sums except the last
//!   unit's come after the start of the last backward.
//!
//! For pipelines there is a closer bound that takes longer to compute: it plays their [turns].
//!
//! The bound of memory is the resident state plus the activations of the micro-batches that a stage
//! has begun when its first backward starts.
//!
//! Both leave out what a simulation adds: interference, launches, norms, and exchanges that could
//! be hidden.

mod turns;

use crate::Candidate;
use crate::price::Known;
use std::collections::HashMap;
use std::ops::Range;
use trainyard_program::{
    Action, Axis, BackwardPart, Collective, Extent, Instruction, Keep, Mesh, Offload, Phase, PipelineSchedule,
    Placement, Program, ReduceSchedule, Reshard, State, StateBytes, StepKind,
};

/// Kinds of unit: an example unit of each kind, and the number of units of the kind.
type Kinds = Vec<(u32, f64)>;

/// The most frequent kind of unit in a stretch.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Main {
    unit: u32,
    count: f64,
    forward_s: f64,
    backward_s: f64,
    exchange_s: [f64; 2],
}

/// Seconds of one micro-batch on a stretch of units that a stage runs without interruption.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Stretch {
    kinds: Kinds,
    /// Seconds of the forward, with the exchanges between its units.
    forward_s: f64,
    backward_s: f64,
    /// The most frequent kind of its units.
    main: Main,
    saved_bytes: f64,
    /// Seconds of the backward's first half, and of its second half. Only the update waits for the
    /// second half.
    input_s: f64,
    weights_s: f64,
    /// Seconds of the exchanges that follow the last pass of a turn: forward, backward.
    after_s: [f64; 2],
    /// Index of the first unit and of the last.
    ends: [u32; 2],
}

/// One pipeline stage.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Stage {
    stretches: Vec<Stretch>,
    kinds: Kinds,
    /// Bytes of activations that one micro-batch keeps.
    saved_bytes: f64,
    /// Elements of its parameters on a rank, before sharding.
    elements: f64,
    /// Bytes that the last unit's backward recomputes for a micro-batch.
    recomputed_bytes: f64,
}

/// Seconds of a stage's passes: the earliest start, the sum of all passes, and the last backward.
struct Passes {
    start: f64,
    all: f64,
    last_backward: f64,
}

/// The choices that decide which units a stage has and what they keep: pipeline degree, chunks,
/// checkpointing.
type Dealt = (u32, u32, crate::Checkpointing);

/// Computes the bounds of candidates of one class.
pub struct Bounds<'a> {
    known: &'a Known,
    dealt: HashMap<Dealt, Vec<Stage>>,
    /// Only mesh and placement are filled in. The prices of single instructions need nothing else.
    program: Program,
}

impl<'a> Bounds<'a> {
    /// Prepares bounds for the candidates that share `known`.
    pub fn new(known: &'a Known) -> Bounds<'a> {
        let program = Program {
            rank: 0,
            mesh: Mesh::default(),
            placement: Placement::WHOLE,
            offload: Offload::default(),
            staying: Vec::new(),
            chunks: Vec::new(),
            units: Vec::new(),
            borrows: Vec::new(),
            frozen: Vec::new(),
            lowest: 0,
            splits: Vec::new(),
            pipeline: Vec::new(),
            fused_loss: false,
            micro_batches: 1,
            kind: StepKind::Synchronous,
            fragment: None,
            server: None,
            folded: false,
            rounding_bits: None,
            pruned: false,
            period: None,
            snapshot: false,
            prefetch: 1,
            resident: Vec::new(),
            instructions: Vec::new(),
        };
        Bounds { known, dealt: HashMap::new(), program }
    }

    /// Returns lower bounds of any simulation of `candidate`: bytes of tensors, and seconds.
    /// Seconds are 0 unless `worth` is true for those bytes.
    pub fn of(&mut self, candidate: &Candidate, worth: impl Fn(f64) -> bool) -> (f64, f64) {
        let (prices, stages) = self.dealt(candidate);
        let bytes = prices.bytes(stages);
        (if worth(bytes) { prices.seconds(stages) } else { 0.0 }, bytes)
    }

    /// Returns a lower bound of seconds for any simulation of `candidate`. For pipelines it is
    /// closer than [`Bounds::of`], because their turns are played.
    pub fn closer(&mut self, candidate: &Candidate) -> f64 {
        let (prices, stages) = self.dealt(candidate);
        let seconds = prices.seconds(stages);
        if candidate.mesh.pp == 1 { seconds } else { seconds.max(prices.played(stages)) }
    }

    fn dealt<'b>(&'b mut self, candidate: &'b Candidate) -> (Prices<'b>, &'b [Stage]) {
        self.program.mesh = candidate.mesh;
        self.program.placement = candidate.placement();
        let prices = Prices { known: self.known, program: &self.program, candidate };
        // The other degrees belong to the class, or have no influence on the stages.
        let key = (candidate.mesh.pp, candidate.chunks(), candidate.checkpointing);
        let stages = self.dealt.entry(key).or_insert_with(|| prices.deal());
        (prices, stages)
    }
}

pub(crate) struct Prices<'a> {
    pub(crate) known: &'a Known,
    program: &'a Program,
    pub(crate) candidate: &'a Candidate,
}

impl Prices<'_> {
    /// The least seconds of one instruction. A collective may be sent together with the one before.
    fn price(&self, action: Action, bytes: f64, keep: Keep) -> f64 {
        let mut instruction = Instruction::new(action);
        instruction.bytes = bytes as u64;
        let costs = &self.known.costs;
        costs.device_s(self.program, &instruction, keep) - costs.joined_s(self.program, &instruction)
    }

    /// The stages, each with the costs of one micro-batch.
    fn deal(&self) -> Vec<Stage> {
        let units = self.known.shape.units.len();
        let keep = self.candidate.checkpointing.keep(units, self.candidate.mesh.pp > 1);
        let stages = self.known.stages(self.candidate);
        let stage = |ranges: Vec<Range<u32>>| {
            let units = || ranges.iter().cloned().flatten();
            let stretches: Vec<Stretch> = ranges.iter().map(|range| self.stretch(range.clone(), &keep)).collect();
            Stage {
                saved_bytes: stretches.iter().map(|stretch| stretch.saved_bytes).sum(),
                elements: units().map(|unit| self.elements(unit)).sum(),
                kinds: self.kinds(units()),
                recomputed_bytes: ranges.last().map_or(0.0, |range| self.recomputed_bytes(range.end - 1, &keep)),
                stretches,
            }
        };
        stages.into_iter().map(stage).collect()
    }

    fn recomputed_bytes(&self, unit: u32, keep: &[Keep]) -> f64 {
        let Mesh { cp, tp, .. } = self.candidate.mesh;
        let saved = &self.known.shape.units[unit as usize].saved_bytes;
        saved[0].saturating_sub(saved[keep[unit as usize] as usize]) as f64 / f64::from(tp * cp)
    }

    fn kinds(&self, units: impl Iterator<Item = u32>) -> Kinds {
        let mut kinds: Vec<(usize, u32, f64)> = Vec::new();
        for unit in units {
            let kind = self.known.costs.kind_of[unit as usize];
            match kinds.iter_mut().find(|(known, ..)| *known == kind) {
                Some((.., count)) => *count += 1.0,
                None => kinds.push((kind, unit, 1.0)),
            }
        }
        kinds.into_iter().map(|(_, unit, count)| (unit, count)).collect()
    }

    fn stretch(&self, range: Range<u32>, keep: &[Keep]) -> Stretch {
        let Mesh { cp, tp, .. } = self.candidate.mesh;
        let ends = [range.start, range.end - 1];
        let mut stretch = Stretch { kinds: self.kinds(range.clone()), ends, ..Stretch::default() };
        for unit in range.clone() {
            let keep = keep[unit as usize];
            let pass = |phase, part| self.pass_s(unit, phase, part, keep);
            let whole = [pass(Phase::Forward, BackwardPart::Whole), pass(Phase::Backward, BackwardPart::Whole)];
            // The collectives between the pass and the next unit. After the last unit, the result
            // goes to another stage, or another micro-batch follows.
            let after = [Phase::Forward, Phase::Backward].map(|phase| {
                let [ring, between] = self.exchanges_s(unit, phase, keep);
                (ring - whole[phase as usize]).max(0.0) + between
            });
            let last = [unit + 1 == range.end, unit == range.start];
            let between = [0, 1].map(|phase| if last[phase] { 0.0 } else { after[phase] });
            for phase in [0, 1].into_iter().filter(|phase| last[*phase]) {
                stretch.after_s[phase] = after[phase];
            }
            stretch.forward_s += whole[0] + between[0];
            stretch.backward_s += whole[1] + between[1];
            stretch.input_s += pass(Phase::Backward, BackwardPart::Input) + between[1];
            stretch.weights_s += pass(Phase::Backward, BackwardPart::Weights);
            let saved = self.known.shape.units[unit as usize].saved_bytes[keep as usize];
            stretch.saved_bytes += saved as f64 / f64::from(tp * cp);
        }
        if let Some((unit, count)) = stretch.kinds.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1)) {
            // Where blocks keep different amounts, the least that any of them takes.
            let least = Keep::Everything;
            let exchange_s = [Phase::Forward, Phase::Backward].map(|phase| {
                let [ring, between] = self.exchanges_s(unit, phase, Keep::InputOnly);
                ring + between
            });
            let seconds = |phase| self.pass_s(unit, phase, BackwardPart::Whole, least);
            let (forward_s, backward_s) = (seconds(Phase::Forward), seconds(Phase::Backward));
            stretch.main = Main { unit, count, forward_s, backward_s, exchange_s };
        }
        stretch
    }

    fn pass_s(&self, unit: u32, phase: Phase, part: BackwardPart, keep: Keep) -> f64 {
        let micro_batch = 0;
        let action = match phase {
            Phase::Forward => Action::Forward { unit, segment: 0, micro_batch, keep },
            Phase::Backward => Action::Backward { unit, segment: 0, micro_batch, part },
        };
        self.price(action, 0.0, keep)
    }

    /// Seconds of the collectives beside a pass, and of those after it.
    fn exchanges_s(&self, unit: u32, phase: Phase, keep: Keep) -> [f64; 2] {
        let Mesh { cp, tp, .. } = self.candidate.mesh;
        let shape = &self.known.shape.units[unit as usize];
        let again = if phase == Phase::Backward && keep == Keep::InputOnly { 2 } else { 1 };
        let (kv, experts) = (shape.kv_bytes / u64::from(tp), shape.expert_bytes / u64::from(cp));
        let output = shape.output_bytes / u64::from(cp);
        let seconds = |collective, axis, bytes: u64, times: u32| {
            if self.candidate.mesh.degree(axis) == 1 || bytes == 0 || times == 0 {
                return 0.0;
            }
            let times = again * times;
            let action = Action::Exchange { collective, axis, unit, micro_batch: 0, phase, border: 0, times };
            self.price(action, bytes as f64, keep)
        };
        let collective = match self.known.costs.stack.sequence_parallel {
            true => Collective::GatherScatter,
            false => Collective::AllReduce,
        };
        let tensor = seconds(collective, Axis::Tensor, output, shape.tensor_collectives);
        let ring = seconds(Collective::Ring, Axis::Context, kv, 1);
        [ring, tensor + seconds(Collective::AllToAll, Axis::Expert, experts, 2)]
    }

    /// Trained elements of `unit` on a rank, before sharding. Frozen ones may lie in fewer bits,
    /// and are left out of bounds.
    fn elements(&self, unit: u32) -> f64 {
        let shape = &self.known.shape.units[unit as usize];
        let trained = shape.flat_elements.saturating_sub(shape.frozen_elements) as f64;
        let experts = (shape.expert_elements as f64).min(trained);
        let Mesh { tp, ep, .. } = self.candidate.mesh;
        ((trained - experts) + experts / f64::from(ep)) / f64::from(tp)
    }

    fn bytes_per_element(&self) -> StateBytes {
        self.known.costs.stack.state
    }

    fn reduce_s(&self, unit: u32) -> f64 {
        if self.candidate.mesh.degree(Axis::Data) == 1 {
            return 0.0;
        }
        let bytes = self.elements(unit) * f64::from(self.bytes_per_element().reduce);
        self.price(Action::Reduce { unit, accumulate: false, axis: Axis::Data }, bytes, Keep::Everything)
    }

    fn gather_s(&self, unit: u32, over: u32) -> f64 {
        let bytes = self.elements(unit) * f64::from(self.bytes_per_element().parameter);
        self.price(Action::Gather { unit, over }, bytes, Keep::Everything)
    }

    /// The sum, minimum and maximum of `seconds` over `kinds`.
    fn over(&self, kinds: &Kinds, seconds: impl Fn(u32) -> f64) -> (f64, f64, f64) {
        let (mut sum, mut least, mut most) = (0.0, f64::INFINITY, 0.0f64);
        for (unit, count) in kinds {
            let seconds = seconds(*unit);
            sum += count * seconds;
            least = least.min(seconds);
            most = most.max(seconds);
        }
        (sum, least, most)
    }

    fn seconds(&self, stages: &[Stage]) -> f64 {
        let (mut before, mut after, mut end_of_first) = (0.0, 0.0, 0.0);
        let mut least = 0.0f64;
        for (number, stage) in stages.iter().enumerate() {
            let Passes { start, all: passes, last_backward } = self.passes_seconds(stage);
            let [end_min, end, finish] = self.end_seconds(stage, last_backward);
            if number == 0 {
                end_of_first = end_min;
            }
            least = least.max(before + start + passes + end);
            least = least.max(before + start + self.slowed_seconds(stage) + end_min);
            let first = &stage.stretches[0];
            if !self.candidate.pipeline.facts().halves {
                least = least.max(before + start + passes + after + end_of_first);
                after += first.backward_s;
            }
            least = least.max(before + start + first.forward_s + self.sums_seconds(stage) + finish);
            least = least.max(self.host_seconds(stage, before + start + passes));
            before += first.forward_s;
        }
        least + self.rest_s()
    }

    /// Seconds that every step takes beside its programs.
    fn rest_s(&self) -> f64 {
        let costs = &self.known.costs;
        costs.constants.step_s + costs.straggle_s()
    }

    /// Seconds of a stage's first gather and of its passes. Passes take at least as long as the
    /// gathers and reductions beside them.
    fn passes_seconds(&self, stage: &Stage) -> Passes {
        let candidate = self.candidate;
        let mut first = 0.0;
        let (mut seconds, mut last_backward) = (0.0, 0.0);
        let shards = candidate.mesh.shard_degree();
        let gathered = self.program.placement.parameters == Extent::Shard;
        if gathered {
            first = self.over(&stage.kinds, |unit| self.gather_s(unit, shards)).1;
        }
        let again = if let Reshard::To(n) = candidate.reshard { n } else { shards };
        // In a pipeline a forward may follow another one that kept a part.
        let forward_over = if candidate.mesh.pp == 1 { shards } else { again };
        // As many gathers may have begun before a turn, and as many reductions may be left at the
        // start of its last pass.
        let ahead = f64::from(candidate.prefetch.max(1) + 1);
        for stretch in &stage.stretches {
            let mut forward = stretch.forward_s;
            let mut backward = stretch.backward_s;
            if gathered && candidate.reshard != Reshard::Never {
                let gathers = |over: u32| {
                    let (all, _, most) = self.over(&stretch.kinds, |unit| self.gather_s(unit, over));
                    all - ahead * most
                };
                forward = forward.max(gathers(forward_over));
                backward = backward.max(gathers(again));
            }
            if candidate.reduce_schedule == ReduceSchedule::PerMicroBatch {
                let (all, _, most) = self.over(&stretch.kinds, |unit| self.reduce_s(unit));
                let sums = all - ahead * most;
                let apart = if candidate.pipeline.facts().halves { stretch.input_s } else { 0.0 };
                backward = backward.max(apart + sums);
            }
            seconds += forward + backward;
            last_backward = backward;
        }
        Passes { start: first, all: f64::from(candidate.accumulation) * seconds, last_backward }
    }

    /// True if each micro-batch's gradients are summed, and later micro-batches wait for that.
    fn sums_every_micro_batch(&self) -> bool {
        self.candidate.reduce_schedule == ReduceSchedule::PerMicroBatch && !self.candidate.pipeline.facts().halves
    }

    /// Seconds of all passes, with the cost of communication beside them.
    ///
    /// The next unit's gather starts with a unit's pass, and so does the reduction of the previous
    /// unit. The part of a collective that does not overlap the exchange before the pass either
    /// overlaps the pass and slows it down, or outlasts it.
    fn slowed_seconds(&self, stage: &Stage) -> f64 {
        let candidate = self.candidate;
        let steps = f64::from(candidate.accumulation);
        let plain: f64 = stage.stretches.iter().map(|stretch| stretch.forward_s + stretch.backward_s).sum();
        if candidate.offload != Offload::default() || candidate.pipeline.facts().halves {
            return steps * plain;
        }
        let share = self.known.costs.constants.interference;
        let gathered = self.program.placement.parameters == Extent::Shard && candidate.reshard == Reshard::Always;
        let ahead = f64::from(candidate.prefetch.max(1) + 3);
        let mut beside = 0.0;
        for stretch in &stage.stretches {
            let Main { unit, count, forward_s, backward_s, exchange_s } = stretch.main;
            let overlap = |seconds: f64, exchange: f64, pass: f64| (seconds - exchange).clamp(0.0, pass);
            let count = (count - ahead).max(0.0);
            if gathered {
                let gather = self.gather_s(unit, candidate.mesh.shard_degree());
                beside += steps * count * overlap(gather, exchange_s[0], forward_s);
                beside += steps * count * overlap(gather, exchange_s[1], backward_s);
            }
            let reduces = if self.sums_every_micro_batch() { steps } else { 0.0 };
            let reduces = if candidate.mesh.pp == 1 { reduces.max(1.0) } else { reduces };
            beside += reduces * count * overlap(self.reduce_s(unit), exchange_s[1], backward_s);
        }
        // Two lanes of collectives may run beside the same pass, which they lengthen by their
        // interference.
        steps * plain + share / (1.0 + share) * beside
    }

    /// Lower bounds of three times until the end of the step: from the end of a stage's passes;
    /// from the start of the last backward of `last_backward` seconds, if all reductions come after
    /// it; and from the end of all reductions.
    fn end_seconds(&self, stage: &Stage, last_backward: f64) -> [f64; 3] {
        let candidate = self.candidate;
        let (reduces, last_reduce, _) = self.over(&stage.kinds, |unit| self.reduce_s(unit));
        let update = |unit| self.price(Action::Update { unit, chunk: 0 }, 0.0, Keep::Everything);
        let (updates, first_update, _) = self.over(&stage.kinds, update);
        let mut finish = updates;
        if self.program.placement.parameters != self.program.placement.masters {
            // Each unit is gathered after its update, by a lane that does nothing else then.
            let shards = candidate.mesh.shard_degree();
            finish = finish.max(first_update + self.over(&stage.kinds, |unit| self.gather_s(unit, shards)).0);
        }
        let tail = if candidate.mesh.pp == 1 && candidate.reduce_schedule == ReduceSchedule::PerStep {
            last_reduce.max(reduces - last_backward)
        } else {
            last_reduce
        };
        [last_reduce + finish, tail + finish, finish]
    }

    /// Seconds of all reductions of a stage. One lane runs them, and none before the first forward
    /// is over.
    fn sums_seconds(&self, stage: &Stage) -> f64 {
        let times = match self.candidate.reduce_schedule {
            ReduceSchedule::PerStep => 1,
            ReduceSchedule::PerMicroBatch => self.candidate.accumulation,
        };
        f64::from(times) * self.over(&stage.kinds, |unit| self.reduce_s(unit)).0
    }

    /// A lower bound for the host's link, if state or activations lie on the host. `work` is the
    /// end of the last pass.
    fn host_seconds(&self, stage: &Stage, work: f64) -> f64 {
        let Offload { optimizer, activations, gradients, .. } = self.candidate.offload;
        let (unit, state) = (stage.kinds[0].0, State::Optimizer { chunk: 0 });
        let trip = |bytes: f64| {
            self.price(Action::Fetch { unit, state }, bytes, Keep::Everything)
                + self.price(Action::Evict { unit, state, write: true }, bytes, Keep::Everything)
        };
        let mut least = 0.0f64;
        if optimizer.is_some() {
            let bytes = self.bytes_per_element();
            let part = match self.program.placement.masters {
                Extent::Shard => f64::from(self.candidate.mesh.shard_degree()),
                Extent::Full => 1.0,
            };
            // Each unit's gradients go to the host after the last pass, or beside the passes. Its
            // copy returns after the update, beside the gradients of other units.
            let moved = |width: u32| stage.elements / part * f64::from(width);
            let down = self.price(Action::Fetch { unit, state }, moved(bytes.gradient), Keep::Everything);
            let up = self.price(Action::Evict { unit, state, write: true }, moved(bytes.parameter), Keep::Everything);
            least = if gradients.is_some() { down.max(work + up) } else { work + down.max(up) };
        }
        if activations.is_some() && self.candidate.mesh.pp == 1 {
            // Everything except what the last few units keep, whose backward follows at once.
            let most = |unit| self.known.shape.units[unit as usize].saved_bytes[0] as f64;
            let kept = self.over(&stage.kinds, most).2;
            let split = f64::from(self.candidate.mesh.tp * self.candidate.mesh.cp);
            let travels = stage.saved_bytes - f64::from(self.candidate.prefetch + 2) * kept / split;
            least = least.max(f64::from(self.candidate.accumulation) * trip(travels.max(0.0)));
        }
        least
    }

    fn bytes(&self, stages: &[Stage]) -> f64 {
        let all = stages.iter().enumerate().map(|(number, stage)| self.stage_bytes(number as u32, stage));
        all.fold(0.0, f64::max)
    }

    fn stage_bytes(&self, number: u32, stage: &Stage) -> f64 {
        let candidate = self.candidate;
        let bytes = self.bytes_per_element();
        let placement = &self.program.placement;
        let offload = &candidate.offload;
        let held = |extent, width: f64, here: bool| {
            let part = if extent == Extent::Shard { f64::from(candidate.mesh.shard_degree()) } else { 1.0 };
            if here { width / part } else { 0.0 }
        };
        let mut per_element = held(placement.parameters, f64::from(bytes.parameter), offload.parameters.is_none())
            + held(placement.masters, f64::from(bytes.master) + bytes.whole_optimizer(), offload.optimizer.is_none())
            + held(placement.gradients, f64::from(bytes.gradient), offload.gradients.is_none());
        let Mesh { pp, .. } = candidate.mesh;
        let begun = match candidate.pipeline {
            // A turn is one stretch on one micro-batch: the turns of the warm-up and the next one
            // (Narayanan et al. 2021, section 2.2).
            PipelineSchedule::Interleaved { chunks } => {
                let turns = (2 * (pp - number - 1) + (chunks - 1) * pp + 1).min(candidate.accumulation * chunks);
                let least = stage.stretches.iter().map(|stretch| stretch.saved_bytes).fold(f64::INFINITY, f64::min);
                f64::from(turns) * least
            }
            _ => f64::from(candidate.accumulation.min(pp - number)) * stage.saved_bytes,
        };
        let per_step = candidate.reduce_schedule == ReduceSchedule::PerStep;
        let (turns, chunks) = (candidate.accumulation * candidate.chunks(), candidate.chunks());
        let begun_turns = if chunks == 1 { pp - number } else { 2 * (pp - number - 1) + (chunks - 1) * pp + 1 };
        let again = if chunks == 1 { turns > begun_turns } else { turns >= begun_turns + 2 * chunks * pp };
        let whole_gradients = f64::from(bytes.gradient) * stage.elements;
        // The first backward is that of the last unit. It holds what it recomputes, and its
        // gradient begins.
        let last = stage.stretches[stage.stretches.len() - 1].ends[1];
        let mut working = self.known.costs.unit(last).working[1] + stage.recomputed_bytes;
        let mut later_gradients = 0.0;
        if placement.gradients == Extent::Shard && per_step && again {
            // Whole gradients of all units wait for the last micro-batch while other micro-batches
            // run forward.
            working += whole_gradients;
        } else if placement.gradients == Extent::Shard {
            working += f64::from(bytes.gradient) * self.elements(last);
            // They are all present when the first backward is over, together with the micro-batches
            // begun after it.
            later_gradients = if per_step && candidate.accumulation > 1 && chunks == 1 { whole_gradients } else { 0.0 };
        }
        if placement.parameters == Extent::Shard {
            // Everything that stays after a forward is present when the last unit's forward ends,
            // and that unit is whole.
            let shards = f64::from(candidate.mesh.shard_degree());
            let stays = match candidate.reshard {
                Reshard::Never => 1.0 - 1.0 / shards,
                Reshard::To(n) if u64::from(n) < shards as u64 => 0.0f64.max(1.0 / f64::from(n) - 1.0 / shards),
                _ => 0.0,
            };
            per_element += stays * f64::from(bytes.parameter);
            working += (1.0 - 1.0 / shards - stays) * f64::from(bytes.parameter) * self.elements(last);
        }
        let state = per_element * stage.elements;
        if offload.activations.is_some() {
            return state;
        }
        let one = f64::from(u8::from(chunks == 1)) * stage.saved_bytes;
        (state + begun + working).max(state + begun - one + later_gradients)
    }
}
