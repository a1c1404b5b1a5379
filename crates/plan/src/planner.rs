//! The planner's main path, from a request to an answer.

use crate::explain::{Neighbour, reasons};
use crate::nearest::{nearest_for_memory, nothing_divides};
use crate::search::{Bound, Found, Saving, Search};
use crate::space::candidates;
use crate::{
    Answer, Basis, Breakdown, Candidate, Checkpointing, Counts, Layout, LayoutKind, Memory, MemorySeries, Outline,
    Plan, PlanError, PricedStep, Pricer, Request,
};
use std::collections::HashMap;
use trainyard_program::{Mesh, Offload, PipelineSchedule, Program, Tier};
use trainyard_sim::errors::{runs_like, uncovered, wider};
use trainyard_sim::measurement::Class;
use trainyard_sim::{Constants, Errors, Generation, Interval, Stack};

/// The facts that prices rest on.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The software that will run the step.
    pub stack: Stack,
    /// Fitted and assumed constants.
    pub constants: Constants,
}

/// Searches for the best plans.
///
/// # Errors
///
/// Nothing divides devices and batch, or nothing fits. The error gives the nearest request that
/// would work.
pub fn plan(request: &Request, facts: &Facts) -> Result<Answer, PlanError> {
    let planner = Planner::new(request, facts)?;
    let mut found = planner.search();
    if found.fitting.is_empty() && !planner.take_the_smallest(&mut found) {
        return Err(planner.does_not_fit(facts));
    }
    Ok(planner.answer(&found))
}

/// The reason why there is no plan, without the nearest request that would work.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Lacking {
    /// A number of the request is zero or out of range, or the device has no such format.
    #[error("{0}")]
    Request(String),
    /// No layout divides devices and batch, or the number format is not there.
    #[error("nothing divides these devices, this batch and this format")]
    Layout,
    /// The smallest candidate is larger than a device.
    #[error("nothing fits: {} at least ({layout})", trainyard_base::format_bytes(*bytes))]
    Memory {
        /// Bytes of the smallest candidate.
        bytes: u64,
        /// Its layout.
        layout: String,
    },
}

/// Searches for the best plan alone, without the reasons for it.
///
/// # Errors
///
/// An impossible request; nothing divides devices and batch; or nothing fits.
pub fn best(request: &Request, facts: &Facts) -> Result<Plan, Lacking> {
    request.check().map_err(|error| Lacking::Request(error.to_string()))?;
    let planner = Planner::of(request, facts).ok_or(Lacking::Layout)?;
    let mut found = planner.search();
    if found.fitting.is_empty() && !planner.take_the_smallest(&mut found) {
        let (bytes, candidate) = planner.smallest();
        return Err(Lacking::Memory { bytes, layout: candidate.layout().to_string() });
    }
    planner.plan(&planner.candidates[found.fitting[0]]).ok_or(Lacking::Layout)
}

/// Prices one candidate of a request that [`plan`] or [`best`] accepted; None if there is no
/// lowering for it.
pub fn price(request: &Request, facts: &Facts, candidate: &Candidate) -> Option<Plan> {
    Planner::over(request, facts, vec![*candidate]).plan(candidate)
}

/// A search that is ready to run.
pub(crate) struct Planner<'a> {
    request: &'a Request,
    candidates: Vec<Candidate>,
    pricer: Pricer<'a>,
    bounds: Vec<Bound>,
    errors: Errors,
    uncovered: Vec<String>,
}

impl<'a> Planner<'a> {
    pub(crate) fn new(request: &'a Request, facts: &Facts) -> Result<Planner<'a>, PlanError> {
        request.check()?;
        Planner::of(request, facts).ok_or_else(|| nothing_divides(request))
    }

    /// None if nothing divides devices and batch.
    fn of(request: &'a Request, facts: &Facts) -> Option<Planner<'a>> {
        let counts = request.device_counts();
        let extents = counts.iter().map(|devices| request.extent(*devices));
        let candidates: Vec<Candidate> = extents.flat_map(|extent| candidates(&extent, &request.fixed)).collect();
        if candidates.is_empty() {
            return None;
        }
        let mut planner = Planner::over(request, facts, candidates);
        planner.bounds = planner.pricer.bounds(&planner.candidates);
        Some(planner)
    }

    /// A planner that can price `candidates`. It has no bounds, so it cannot search.
    fn over(request: &'a Request, facts: &Facts, candidates: Vec<Candidate>) -> Planner<'a> {
        let pricer = Pricer::new(request, &candidates, &facts.stack, &facts.constants);
        let devices = request.device_counts().first().copied().unwrap_or(1);
        let uncovered = uncovered(&request.cluster.device, devices, request.sequence_length as u32);
        Planner { request, candidates, pricer, bounds: Vec::new(), errors: Errors::builtin(), uncovered }
    }

    pub(crate) fn search(&self) -> Found {
        let mut numbers: HashMap<LayoutKind, u32> = HashMap::new();
        let number = |candidate: &Candidate| {
            let next = numbers.len() as u32;
            *numbers.entry(candidate.layout().kind()).or_insert(next)
        };
        let groups: Vec<u32> = self.candidates.iter().map(number).collect();
        let savings = self.savings();
        let mut kinds: HashMap<(Mesh, u8), u32> = HashMap::new();
        let kind = |candidate: &Candidate| {
            let Layout { mesh, zero_stage, .. } = candidate.layout();
            let next = kinds.len() as u32;
            *kinds.entry((Mesh { dp_replicate: 1, dp_shard: 1, ..mesh }, zero_stage)).or_insert(next)
        };
        let kinds: Vec<u32> = self.candidates.iter().map(kind).collect();
        let work: Vec<u64> = self.candidates.iter().map(|candidate| self.instructions(candidate)).collect();
        let search = Search {
            bounds: &self.bounds,
            savings: &savings,
            kinds: &kinds,
            work: &work,
            budget: self.request.budget,
            groups: &groups,
            bytes_max: self.request.bytes_max(),
            shown: self.request.shown,
            threads: self.request.threads,
        };
        search.run(
            |index| self.pricer.closer_bound(&self.candidates[index]),
            |index| self.pricer.simulated(&self.candidates[index]),
        )
    }

    /// The memory savings of each candidate, for the search. Candidates that differ only in
    /// checkpointing and offload stand next to one another.
    fn savings(&self) -> Vec<Saving> {
        let bare = |candidate: &Candidate| Candidate {
            checkpointing: Checkpointing::default(),
            offload: Offload::default(),
            ..*candidate
        };
        let mut family = 0;
        let mut before: Option<Candidate> = None;
        let saving = |candidate: &Candidate| {
            let bare = bare(candidate);
            if before.replace(bare).is_some_and(|before| before != bare) {
                family += 1;
            }
            let Checkpointing { full, selective } = candidate.checkpointing;
            let Offload { optimizer, activations, parameters, gradients } = candidate.offload;
            let bit = |tier: Option<Tier>, bit: u8| if tier.is_some() { 1 << bit } else { 0 };
            Saving {
                family,
                // A block that keeps only its input costs more than all blocks that keep a
                // selection.
                level: full * (self.blocks() + 1) + selective,
                tier: bit(optimizer, 0) | bit(activations, 1) | bit(parameters, 2) | bit(gradients, 3),
                slower_by_level: activations.is_none(),
            }
        };
        self.candidates.iter().map(saving).collect()
    }

    /// The approximate number of instructions of a candidate's programs: its passes, with the
    /// instructions beside each.
    fn instructions(&self, candidate: &Candidate) -> u64 {
        let passes = 2 * u64::from(self.blocks() + 2) * u64::from(candidate.accumulation);
        let Mesh { tp, cp, ep, .. } = candidate.mesh;
        let exchanges = u64::from(tp > 1) + u64::from(cp > 1) + u64::from(ep > 1);
        let gathers = if candidate.layout().zero_stage == 3 && candidate.mesh.pp == 1 { 2 } else { 0 };
        passes * (1 + exchanges + gathers)
    }

    fn blocks(&self) -> u32 {
        self.request.model.layers + self.request.model.encoder_layers
    }

    /// The candidate that needs the least memory, and its bytes.
    pub(crate) fn smallest(&self) -> (u64, &Candidate) {
        let least = self.least();
        let candidate = &self.candidates[least];
        let bytes = self.pricer.simulated(candidate).map_or(self.bounds[least].bytes, |simulated| simulated.bytes);
        (bytes, candidate)
    }

    fn least(&self) -> usize {
        (0..self.bounds.len()).min_by_key(|index| self.bounds[*index].bytes).expect("there are candidates")
    }

    /// If the budget ran out before anything that fits was found, takes the smallest candidate, if
    /// that fits.
    fn take_the_smallest(&self, found: &mut Found) -> bool {
        let (least, bytes_max) = (self.least(), self.request.bytes_max());
        let simulated = self.pricer.simulated(&self.candidates[least]);
        let Some(simulated) = simulated.filter(|simulated| simulated.bytes <= bytes_max) else { return false };
        let possible = self.bounds.iter().filter(|bound| bound.bytes <= bytes_max);
        let bound = possible.map(|bound| bound.cost).fold(f64::INFINITY, f64::min);
        found.gap = (1.0 - bound / simulated.cost).max(0.0);
        found.fitting.push(least);
        if found.results.insert(least, simulated).is_none() {
            found.simulated += 1;
            found.too_slow -= 1;
        }
        true
    }

    fn does_not_fit(&self, facts: &Facts) -> PlanError {
        let (bytes, candidate) = self.smallest();
        nearest_for_memory(self.request, facts, bytes, candidate.layout().to_string())
    }

    fn answer(&self, found: &Found) -> Answer {
        let mut layouts: Vec<LayoutKind> = Vec::new();
        let mut plans = Vec::new();
        for index in &found.fitting {
            let candidate = &self.candidates[*index];
            if plans.len() < self.request.shown && !layouts.contains(&candidate.layout().kind()) {
                layouts.push(candidate.layout().kind());
                plans.push(self.plan(candidate).expect("it was simulated before"));
            }
        }
        let best = self.candidates[found.fitting[0]];
        let neighbours = self.neighbours(&best, found.results[&found.fitting[0]].cost);
        let outline = |index: &usize| Outline {
            candidate: self.candidates[*index],
            step_s: match self.request.objective {
                crate::Objective::Speed => found.results[index].cost,
                crate::Objective::Cost => found.results[index].cost / f64::from(self.candidates[*index].mesh.ranks()),
            },
            bytes: found.results[index].bytes,
        };
        Answer {
            reasons: reasons(&plans, &neighbours, self.request.bytes_max(), self.request.objective),
            plans,
            search: Counts {
                considered: found.considered,
                too_large: found.too_large,
                too_slow: found.too_slow,
                simulated: found.simulated,
                out_of_memory: found.out_of_memory,
            },
            gap: found.gap,
            bytes_max: self.request.bytes_max(),
            objective: self.request.objective,
            basis: self.basis(),
            simulated: found.fitting.iter().map(outline).collect(),
        }
    }

    fn plan(&self, candidate: &Candidate) -> Option<Plan> {
        let step = self.pricer.step(candidate)?;
        let request = self.request;
        let tokens = request.global_batch as f64 * request.sequence_length as f64;
        let devices = f64::from(candidate.mesh.ranks());
        let tokens_per_s = tokens / step.step_s;
        let model_flops_per_s = request.flops_per_token() * tokens_per_s / devices;
        let usd = request.cluster.device.usd_per_hour;
        Some(Plan {
            candidate: *candidate,
            cuts: self.pricer.cuts(candidate),
            layout: candidate.layout().to_string(),
            step_s: step.step_s,
            tokens_per_s,
            model_flops_per_s,
            mfu: model_flops_per_s / request.cluster.device.peak(candidate.format),
            step_interval: self.step_interval(candidate, &step),
            memory_interval: self.memory_interval(candidate, self.memory(&step).total),
            not_fitting: self.not_fitting(candidate, self.memory(&step).total),
            memory: self.memory(&step),
            usd_per_million_tokens: (usd > 0.0).then(|| usd * devices / 3600.0 * 1e6 / tokens_per_s),
            breakdown: breakdown(&step),
        })
    }

    fn class(&self, candidate: &Candidate) -> Class {
        Class::of(&self.request.model, candidate.format, self.request.sequence_length as u32)
    }

    /// Seconds of a step, from the interval of speed.
    fn step_interval(&self, candidate: &Candidate, step: &PricedStep) -> Interval {
        let errors = self.errors.of(self.class(candidate));
        let speed = errors.speed.interval(1.0, step.waiting(), wider(self.uncovered.len()));
        Interval { low: step.step_s / speed.high, expected: step.step_s, high: step.step_s / speed.low }
    }

    fn memory_interval(&self, candidate: &Candidate, bytes: u64) -> Interval {
        self.errors.of(self.class(candidate)).memory.interval(bytes as f64, 0.0, wider(self.uncovered.len()))
    }

    /// The probability that a plan predicted to need `bytes` needs more than the device has, or the
    /// request allows.
    fn not_fitting(&self, candidate: &Candidate, bytes: u64) -> f64 {
        let device = self.request.cluster.device.memory_gb * 1e9;
        let there = self.request.limits.memory_bytes.map_or(device, |limit| device.min(limit as f64));
        self.errors.of(self.class(candidate)).not_fitting(bytes as f64, there, wider(self.uncovered.len()))
    }

    fn basis(&self) -> Basis {
        let request = self.request;
        let class = Class::of(&request.model, request.formats[0], request.sequence_length as u32);
        let errors = self.errors.of(class);
        let (count, sources) = runs_like(class);
        Basis {
            runs: class.words(),
            count,
            sources,
            usual_error: errors.usual.exp() - 1.0,
            large_error: errors.large.exp() - 1.0,
            uncovered: self.uncovered.clone(),
            apart: errors.apart(),
            memory_margin: request.limits.memory_margin,
            correction: None,
        }
    }

    fn memory(&self, step: &PricedStep) -> Memory {
        let fullest = (0..step.memory.len())
            .max_by(|a, b| step.memory[*a].peak_bytes.total_cmp(&step.memory[*b].peak_bytes).then(b.cmp(a)))
            .expect("a step has ranks");
        let memory = &step.memory[fullest];
        let total = self.pricer.with_overhead(memory.peak_bytes);
        Memory {
            total,
            by_kind: memory
                .at_peak
                .iter()
                .map(|(kind, bytes)| (*kind, *bytes as u64))
                .filter(|(_, b)| *b > 0)
                .collect(),
            other: total.saturating_sub(memory.peak_bytes as u64),
            rank: step.programs[fullest].rank,
            at: instruction_words(&step.programs[fullest], memory.at),
        }
    }

    /// The best candidate with one choice changed.
    fn neighbours(&self, best: &Candidate, cost: f64) -> Vec<Neighbour> {
        let changed = changes(best, self.blocks());
        let there = changed.iter().filter(|(_, candidate)| self.candidates.contains(candidate));
        there
            .filter_map(|(words, candidate)| {
                let simulated = self.pricer.simulated(candidate)?;
                Some(Neighbour { words: words.clone(), relative: simulated.cost / cost, bytes: simulated.bytes })
            })
            .collect()
    }
}

/// The step of `candidate`, with the memory of each of its programs over time; None if there is no
/// lowering for it.
pub fn step(request: &Request, facts: &Facts, candidate: &Candidate) -> Option<(PricedStep, Vec<MemorySeries>)> {
    let pricer = Pricer::new(request, &[*candidate], &facts.stack, &facts.constants);
    let step = pricer.step(candidate)?;
    let memory = pricer.memory_over_time(candidate, &step);
    Some((step, memory))
}

/// `backward block.3 of micro-batch 2`
fn instruction_words(program: &Program, number: usize) -> String {
    let Some(instruction) = program.instructions.get(number) else { return "the start".to_owned() };
    let mut words = instruction.action.name().to_owned();
    if let Some(unit) = instruction.action.unit() {
        words += &format!(" {}", program.units.get(unit as usize).map_or("", String::as_str));
    }
    if let Some(micro_batch) = instruction.action.micro_batch().filter(|_| program.micro_batches > 1) {
        words += &format!(" of micro-batch {micro_batch}");
    }
    words
}

/// The breakdown of the stage whose compute lane works longest; the other stages wait for it.
pub(crate) fn breakdown(step: &PricedStep) -> Breakdown {
    let compute = trainyard_program::Lane::Compute as usize;
    let longest = (0..step.times.len())
        .max_by(|a, b| step.times[*a].busy_s[compute].total_cmp(&step.times[*b].busy_s[compute]).then(b.cmp(a)))
        .expect("a step has ranks");
    Breakdown::of(&step.programs[longest], &step.times[longest], step.step_s)
}

/// Candidates that differ from `best` in one choice, with the words for it.
fn changes(best: &Candidate, blocks: u32) -> Vec<(String, Candidate)> {
    let mut all = Vec::new();
    let mut change = |words: String, candidate: Candidate| {
        if candidate != *best {
            all.push((words, candidate));
        }
    };
    for (words, full, selective) in
        [("no recomputation", 0, 0), ("selective recomputation", 0, blocks), ("full recomputation", blocks, 0)]
    {
        change(words.to_owned(), Candidate { checkpointing: Checkpointing { full, selective }, ..*best });
    }
    let (micro, steps) = (best.micro_batch, best.accumulation);
    if steps.is_multiple_of(2) {
        let candidate = Candidate { micro_batch: 2 * micro, accumulation: steps / 2, ..*best };
        change(format!("a micro-batch of {}", 2 * micro), candidate);
    }
    if micro.is_multiple_of(2) {
        let candidate = Candidate { micro_batch: micro / 2, accumulation: 2 * steps, ..*best };
        change(format!("a micro-batch of {}", micro / 2), candidate);
    }
    for stage in 1..=3 {
        if best.mesh.shard_degree() > 1 {
            change(format!("ZeRO-{stage}"), Candidate { zero_stage: stage, ..*best });
        }
    }
    if best.mesh.pp > 1 {
        change("1F1B".into(), Candidate { pipeline: PipelineSchedule::OneForwardOneBackward, ..*best });
        change("a zero-bubble schedule".into(), Candidate { pipeline: PipelineSchedule::ZeroBubble, ..*best });
    }
    change("no offload".into(), Candidate { offload: Offload::default(), ..*best });
    all
}

impl Request {
    /// Bytes of a device that a plan may use.
    pub fn bytes_max(&self) -> u64 {
        let device = (self.cluster.device.memory_gb * 1e9 * (1.0 - self.limits.memory_margin)) as u64;
        self.limits.memory_bytes.map_or(device, |bytes| bytes.min(device))
    }

    /// FLOPs of training on one token by the field's convention, `6 N + 12 L h c s` (Chowdhery et
    /// al. 2022, appendix B), less the gradients that nothing frozen has.
    pub fn flops_per_token(&self) -> f64 {
        let tuned = self.own.as_ref().and_then(|own| own.tuned().ok().flatten());
        if let Some(flops) = tuned.and_then(|model| model.flops_per_token(self.sequence_length as usize)) {
            return flops;
        }
        let model = &self.model;
        let table = f64::from(model.vocab) * f64::from(model.dim);
        let looked_up = f64::from(model.positions) * f64::from(model.dim) + if model.tied { 0.0 } else { table };
        let mut multiplied = model.parameters() - looked_up;
        if let Some(experts) = model.experts {
            let matrices = if model.gated { 3.0 } else { 2.0 };
            let one = matrices * f64::from(model.dim) * f64::from(model.ffn);
            multiplied -=
                f64::from(model.layers) * one * f64::from(experts.count - experts.per_token.min(experts.count));
        }
        let layers = f64::from(model.layers + model.encoder_layers);
        6.0 * multiplied + 12.0 * layers * f64::from(model.heads * model.head_dim) * self.sequence_length as f64
    }

    /// True if devices have a host with memory of its own.
    pub fn has_host_tier(&self) -> bool {
        self.cluster.device.family != Generation::Cpu
    }
}
