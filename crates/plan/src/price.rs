//! Prices of candidates: lower bounds first, then the simulation of their lowered programs.
//!
//! Prices that depend only on micro-batch, tensor, context and expert degree and number format are
//! computed once per such class.

use crate::bounds::Bounds;
use crate::candidate::state_bytes;
use crate::search::{Bound, Simulated};
use crate::{Candidate, Objective, Request};
use std::collections::HashMap;
use std::ops::Range;
use trainyard_program::{
    BlockCodec, MemoryKind, ModelShape, Program, StateBytes, Strategy, Tier, even_cuts, lower_stages,
};
use trainyard_sim::transformer::{Units, Workload};
use trainyard_sim::{
    Constants, Costs, Format, Generation, MemoryUse, Partition, RankTime, SimulateError, Stack, memory, simulate,
    waiting,
};
use trainyard_tensor::DType;

/// The choices that decide what a micro-batch costs a rank. Candidates of one class share them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Class {
    micro_batch: u32,
    tensor: u32,
    context: u32,
    expert: u32,
    format: Format,
}

impl Class {
    fn of(candidate: &Candidate) -> Class {
        Class {
            micro_batch: candidate.micro_batch,
            tensor: candidate.mesh.tp,
            context: candidate.mesh.cp,
            expert: candidate.mesh.ep,
            format: candidate.format,
        }
    }
}

/// A class's model and prices.
pub(crate) struct Known {
    pub(crate) shape: ModelShape,
    pub(crate) costs: Costs,
}

impl Known {
    /// The first unit of every pipeline stretch of `candidate` but the first. The software says
    /// what stretches have in equal amounts; by default it is work, as nearly as whole units allow.
    pub(crate) fn cuts(&self, candidate: &Candidate) -> Vec<u32> {
        let count = candidate.mesh.pp * candidate.chunks();
        let units = self.shape.units.len() as u32;
        match self.costs.stack.partition {
            Partition::Layers => return even_cuts(units, count),
            Partition::Units => return (1..count).map(|cut| cut * units / count).collect(),
            Partition::Cost => {}
        }
        let work = |unit: u32| {
            let cost = self.costs.unit(unit);
            cost.forward_s + cost.backward_input_s + cost.backward_weights_s
        };
        let total: f64 = (0..units).map(work).sum();
        let mut cuts = Vec::with_capacity(count as usize - 1);
        let (mut unit, mut before) = (0, 0.0);
        for cut in 1..count {
            let wanted = total * f64::from(cut) / f64::from(count);
            let least = cuts.last().map_or(1, |last| last + 1);
            // Enough units must be left for the remaining stretches.
            let most = units - (count - cut);
            while unit < most && (unit < least || before + 0.5 * work(unit) <= wanted) {
                before += work(unit);
                unit += 1;
            }
            cuts.push(unit);
        }
        cuts
    }

    /// The stretches of units that each pipeline stage of `candidate` runs, ascending.
    pub(crate) fn stages(&self, candidate: &Candidate) -> Vec<Vec<Range<u32>>> {
        let cuts = self.cuts(candidate);
        let starts = std::iter::once(0).chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([self.shape.units.len() as u32]);
        let mut stages = vec![Vec::new(); candidate.mesh.pp as usize];
        for ((start, end), stage) in starts.zip(ends).zip(candidate.pipeline.stage_of(candidate.mesh.pp)) {
            stages[stage as usize].push(start..end);
        }
        stages
    }
}

/// A unit's kernels and bytes. For a model that this program trains, unsplit, they are those of its
/// own code. Other models are taken as transformers.
fn units(request: &Request, work: &Workload, stack: &Stack, class: &Class) -> Units {
    let dtype = match class.format {
        Format::Fp32 | Format::Tf32 => DType::F32,
        Format::Fp16 => DType::F16,
        Format::Bf16 | Format::Fp8 | Format::Fp4 => DType::BF16,
    };
    let own = request.own.as_ref().and_then(|own| own.units(work, stack, dtype).ok());
    own.unwrap_or_else(|| request.model.units(work, stack))
}

/// Bytes per parameter element in `stack`. Formats of 32 bits need no second copy of parameters.
pub(crate) fn stack_state(stack: &Stack, format: Format) -> StateBytes {
    match state_bytes(format) {
        StateBytes::F32 => StateBytes::F32,
        _ => stack.state,
    }
}

/// Prices the candidates of a request.
pub struct Pricer<'a> {
    request: &'a Request,
    known: HashMap<Class, Known>,
}

/// A candidate's step: the programs of the ranks that differ, the times of their instructions, and
/// their memory.
pub struct PricedStep {
    /// One per pipeline stage.
    pub programs: Vec<Program>,
    /// Times at which their instructions ran.
    pub times: Vec<RankTime>,
    /// Their memory.
    pub memory: Vec<MemoryUse>,
    /// Seconds of the step.
    pub step_s: f64,
}

impl PricedStep {
    /// Simulates `programs` at the prices `costs`.
    pub(crate) fn simulated(programs: Vec<Program>, costs: &Costs) -> Result<PricedStep, SimulateError> {
        let simulated = simulate(&programs, costs)?;
        let memory =
            programs.iter().zip(&simulated.ranks).map(|(program, time)| memory(program, time, costs)).collect();
        Ok(PricedStep { programs, times: simulated.ranks, memory, step_s: simulated.step_s })
    }

    /// The share of the step in which compute waits, on the rank that computes longest.
    pub fn waiting(&self) -> f64 {
        waiting(&self.times, self.step_s)
    }

    /// The most bytes of tensors that a rank holds.
    pub(crate) fn peak_bytes(&self) -> f64 {
        self.memory.iter().map(|memory| memory.peak_bytes).fold(0.0, f64::max)
    }
}

/// Bytes by kind, in the order of [`MemoryKind::ALL`], each from its time in seconds until the
/// next.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MemorySeries(pub Vec<(f64, [f64; MemoryKind::ALL.len()])>);

impl MemorySeries {
    /// The series of one rank whose instructions ran at `time`. [`memory`] finds its peak from the
    /// same changes.
    fn of(program: &Program, time: &RankTime, costs: &Costs) -> MemorySeries {
        let mut now = [0.0; MemoryKind::ALL.len()];
        for effect in &program.resident {
            now[effect.kind as usize] += effect.bytes as f64;
        }
        let mut changes: Vec<(f64, bool, MemoryKind, f64)> = Vec::new();
        for (instruction, span) in program.instructions.iter().zip(&time.spans) {
            for effect in &instruction.effects {
                let at = if effect.bytes > 0 { span.start_s } else { span.end_s };
                changes.push((at, effect.bytes > 0, effect.kind, effect.bytes as f64));
            }
            let working = instruction.working_bytes as f64 + costs.working(instruction);
            if working > 0.0 {
                changes.push((span.start_s, true, MemoryKind::Activations, working));
                changes.push((span.end_s, false, MemoryKind::Activations, -working));
            }
        }
        changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut series = vec![(0.0, now)];
        for (at, _, kind, change) in changes {
            now[kind as usize] += change;
            match series.last_mut() {
                // Memory that is given back at a moment makes room for what is taken then.
                Some(last) if last.0 == at => last.1 = now,
                _ => series.push((at, now)),
            }
        }
        MemorySeries(series)
    }

    /// The most bytes held at once.
    pub fn peak(&self) -> f64 {
        self.0.iter().map(|(_, bytes)| bytes.iter().sum()).fold(0.0, f64::max)
    }
}

impl<'a> Pricer<'a> {
    /// Computes what `candidates` share.
    pub fn new(request: &'a Request, candidates: &[Candidate], stack: &Stack, constants: &Constants) -> Pricer<'a> {
        let mut known = HashMap::new();
        for candidate in candidates {
            known.entry(Class::of(candidate)).or_insert_with_key(|class| {
                let work = Workload {
                    sequence: request.sequence_length as u32,
                    micro_batch: class.micro_batch,
                    tensor: class.tensor,
                    context: class.context,
                    expert: class.expert,
                    operand_bytes: class.format.bytes(),
                };
                let stack = Stack { state: stack_state(stack, class.format), ..stack.clone() };
                let units = units(request, &work, &stack, class);
                let shape = units.shape(&work, request.model.tied, stack.sequence_parallel);
                let costs = Costs::new(&units, &work, &request.cluster, &stack, constants, class.format);
                Known { shape, costs }
            });
        }
        Pricer { request, known }
    }

    pub(crate) fn known(&self, candidate: &Candidate) -> &Known {
        &self.known[&Class::of(candidate)]
    }

    /// The first unit of every pipeline stretch of `candidate` but the first.
    pub fn cuts(&self, candidate: &Candidate) -> Vec<u32> {
        self.known(candidate).cuts(candidate)
    }

    /// The strategy of a candidate, with the software's division of layers and bytes of state.
    pub(crate) fn strategy(&self, candidate: &Candidate) -> Strategy {
        let known = self.known(candidate);
        let stack = &known.costs.stack;
        let mut strategy = candidate.strategy(known.shape.units.len());
        strategy.cuts = known.cuts(candidate);
        strategy.bytes = stack.state;
        if let Some(codec) = self.base() {
            strategy.offload.parameters = Some(Tier::Encoded(codec));
        }
        strategy.sequence_parallel &= stack.sequence_parallel;
        strategy
    }

    /// The form in which frozen matrices lie in memory.
    fn base(&self) -> Option<BlockCodec> {
        self.request.own.as_ref().and_then(|own| own.base)
    }

    /// Lowers and simulates a candidate; None if there is no lowering for it. Parameters that lie
    /// encoded lie in no other tier.
    pub fn step(&self, candidate: &Candidate) -> Option<PricedStep> {
        if self.base().is_some() && candidate.offload.parameters.is_some() {
            return None;
        }
        let Known { shape, costs } = self.known(candidate);
        let programs = lower_stages(shape, &candidate.mesh, &self.strategy(candidate)).ok()?;
        PricedStep::simulated(programs, costs).ok()
    }

    /// The price that the search compares.
    pub fn simulated(&self, candidate: &Candidate) -> Option<Simulated> {
        let step = self.step(candidate)?;
        Some(Simulated { cost: self.cost(candidate, step.step_s), bytes: self.with_overhead(step.peak_bytes()) })
    }

    /// Seconds, or device seconds if cost is minimised.
    fn cost(&self, candidate: &Candidate, step_s: f64) -> f64 {
        match self.request.objective {
            Objective::Speed => step_s,
            Objective::Cost => step_s * f64::from(candidate.mesh.ranks()),
        }
    }

    /// Bytes of a device whose tensors take `bytes`: adds the driver's and libraries' share, and
    /// the memory that an allocator cannot use.
    pub fn with_overhead(&self, bytes: f64) -> u64 {
        let constants = &self.any().costs.constants;
        match self.request.cluster.device.family {
            Generation::Cpu => bytes as u64,
            _ => {
                let stack = &self.any().costs.stack;
                let lost = if stack.expandable { constants.expandable } else { constants.fragmentation };
                (bytes * (1.0 + lost) + 1e9 * (constants.context_gb + stack.buckets_gb)) as u64
            }
        }
    }

    fn any(&self) -> &Known {
        self.known.values().next().expect("a pricer has candidates")
    }

    /// Memory of each program of `step` over time.
    pub fn memory_over_time(&self, candidate: &Candidate, step: &PricedStep) -> Vec<MemorySeries> {
        let costs = &self.known(candidate).costs;
        step.programs.iter().zip(&step.times).map(|(program, time)| MemorySeries::of(program, time, costs)).collect()
    }

    /// Lower bounds of each candidate's simulation. Candidates whose bytes exceed the limit get no
    /// seconds.
    pub fn bounds(&self, candidates: &[Candidate]) -> Vec<Bound> {
        let bytes_max = self.request.bytes_max();
        let some = |candidates: &[Candidate]| {
            let mut classes: HashMap<Class, Bounds<'_>> = HashMap::new();
            let bound = |candidate: &Candidate| {
                let class = Class::of(candidate);
                let bounds = classes.entry(class).or_insert_with(|| Bounds::new(&self.known[&class]));
                let (seconds, bytes) = bounds.of(candidate, |bytes| self.with_overhead(bytes) <= bytes_max);
                Bound { cost: self.cost(candidate, seconds), bytes: self.with_overhead(bytes) }
            };
            candidates.iter().map(bound).collect::<Vec<Bound>>()
        };
        let each = candidates.len().div_ceil(self.request.threads.max(1)).max(1);
        std::thread::scope(|scope| {
            let some = &some;
            let workers: Vec<_> = candidates.chunks(each).map(|part| scope.spawn(move || some(part))).collect();
            let done = workers.into_iter().flat_map(|worker| match worker.join() {
                Ok(bounds) => bounds,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            done.collect()
        })
    }

    /// A bound of cost that is closer than those of [`Pricer::bounds`] and takes longer.
    pub fn closer_bound(&self, candidate: &Candidate) -> f64 {
        self.cost(candidate, Bounds::new(self.known(candidate)).closer(candidate))
    }
}
