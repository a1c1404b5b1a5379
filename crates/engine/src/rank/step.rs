//! One training step: [`RunningStep`] is its state between instructions, and [`Rank::compute`] runs
//! the instructions of the compute lane (forward, backward, fold, clip, update).

use super::exchanges::Exchanges;
use super::ledger::Ledger;
use super::messages::{Message, Messages, message_of};
use super::offloaded_activations::OffloadedActivations;
use super::passes::{At, Pass, Passes};
use super::{Participation, Rank, cannot};
use crate::Result;
use crate::constraints::Sparsity;
use crate::fp8::over_ranks;
use crate::lanes::Span;
use crate::links::{ComputeLinks, Link};
use crate::optimizer::Rates;
use crate::state::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};
use trainyard_model::{Batch, RoutingLog, RoutingRecord};
use trainyard_program::{Action, Extent, Instruction, Lane, Program, State};
use trainyard_tensor::{DType, Device, Tensor};

/// Settings of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepSettings {
    /// Number of the step, from 0. Random numbers depend on it.
    pub step: u64,
    /// The learning rate as a share of its peak.
    pub rate_factor: f64,
    /// The maximum gradient norm. Gradients with a larger norm are scaled down to it.
    pub clip_norm: Option<f64>,
}

/// The result of one step, over all ranks unless a field says otherwise.
#[derive(Clone, Debug, Default)]
pub struct StepOutcome {
    /// The mean loss over the step's targets; 0 on meta.
    pub loss: f64,
    /// Number of input tokens.
    pub tokens: u64,
    /// Number of targets in the loss.
    pub targets: u64,
    /// The global gradient norm before clipping.
    pub gradient_norm: f64,
    /// The drift between replicas before an outer step: the root mean square distance of their
    /// changes from the mean change, as a share of its length.
    pub drift: Option<f64>,
    /// The part of the outcome that depends on a parameter server; None where every step waits for
    /// its update.
    pub server: Option<ServerStep>,
    /// With a server on this rank: the pulls that it has answered since the step before, of all
    /// workers, by the number of updates that their parameters lacked.
    pub staleness: Option<Vec<u64>>,
    /// With a server on this rank and back-up workers: the pushes that updates were made without
    /// since the step before.
    pub dropped_pushes: Option<u64>,
    /// True if this rank left the step out: its update had been made without it, or its replica
    /// has made its steps of the round.
    pub late: bool,
    /// Time from the beginning of the step to the end of this rank's last update. Before it, a
    /// replica that trains apart waits for no other.
    pub computed: Duration,
    /// The zeros that this rank's updates keep; no weights if nothing is pruned, or the update was
    /// skipped.
    pub sparsity: Sparsity,
    /// The penalty of elastic weight consolidation on the weights before the update, which the loss
    /// does not include; None without it, or if the update was skipped.
    pub penalty: Option<f64>,
    /// The ways of this step's tokens; None without experts.
    pub routing: Option<RoutingRecord>,
    /// The way its forwards and backwards were launched.
    pub launches: Launches,
    /// A message to the user about the launches, when they change.
    pub note: Option<String>,
    /// True if the update was skipped because the loss or a gradient was not finite, or a spike.
    pub skipped: bool,
    /// True if it was skipped because the loss or the norm was a spike.
    pub spike: bool,
    /// The times at which each instruction of this rank waited and ran.
    pub spans: Vec<Span>,
    /// The moment from which `spans` count; None on meta.
    pub began: Option<Instant>,
    /// Time that this rank's compute lane waited for batches.
    pub data_wait: Duration,
    /// Time that this rank's lanes spent in exchanges with other ranks.
    pub comm: Duration,
    /// The part of `comm` that the compute lane waited for.
    pub comm_exposed: Duration,
    /// Bytes of rows that this rank sent to the experts of other ranks and back from its own, in
    /// forwards and backwards.
    pub expert_bytes: u64,
    /// Time that this rank spent moving state from and to its tiers.
    pub tiers: Duration,
    /// The part of `tiers` that the compute lane waited for.
    pub tiers_exposed: Duration,
}

/// The state of a parameter server when its worker ended a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerStep {
    /// True if the worker has the updates of all steps. Otherwise the step's loss is that of this
    /// rank alone, its norm is that of the newest update that the worker has heard of, and skipped
    /// updates are not known yet.
    pub is_drained: bool,
    /// Number of updates up to the newest that were skipped in a row.
    pub skipped_in_a_row: u64,
}

/// The way the forwards and backwards of a step were launched on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Launches {
    /// Kernel by kernel, as on a CPU.
    #[default]
    OneByOne,
    /// As a graph that was captured in this step.
    Captured,
    /// As a graph that was captured before.
    Replayed,
}

impl StepOutcome {
    /// True if this rank left the step out, because its replica has made its steps of the round.
    pub(crate) fn waits_for_round(&self) -> bool {
        self.late && self.server.is_none()
    }

    /// Sums the lanes' spans into the times of the outcome.
    pub(super) fn take_times(&mut self, program: &Program, spans: Vec<Span>) {
        for (span, instruction) in spans.iter().zip(&program.instructions) {
            if matches!(instruction.action, Action::Update { .. }) {
                self.computed = self.computed.max(span.end);
            }
            let lane = instruction.action.lane();
            if lane != Lane::Compute {
                if instruction.bytes > 0 {
                    let total = if lane == Lane::HostIo { &mut self.tiers } else { &mut self.comm };
                    *total += span.end - span.start;
                }
                continue;
            }
            let Some(number) = span.waited_for else { continue };
            // Until the awaited instruction began, the compute lane waited for that instruction's
            // own dependency. Example: the count waits for a load.
            let cause = &spans[number as usize];
            if program.instructions[number as usize].action.lane() == Lane::HostIo {
                self.tiers_exposed += span.waited;
                continue;
            }
            let later = span.start.saturating_sub(cause.start).min(span.waited);
            for (cause, waited) in [(Some(number), later), (cause.waited_for, span.waited - later)] {
                let lane = cause.map(|number| program.instructions[number as usize].action.lane());
                match lane {
                    Some(Lane::Input) => self.data_wait += waited,
                    _ => self.comm_exposed += waited,
                }
            }
        }
        self.spans = spans;
    }
}

/// The unit and micro-batch whose activations an instruction evicts, if it does.
fn leaves(instruction: &Instruction) -> Option<(u32, u32)> {
    match instruction.action {
        Action::Evict { unit, state: State::Activations { micro_batch }, .. } => Some((unit, micro_batch)),
        _ => None,
    }
}

/// The state of a step between its instructions.
pub(super) struct RunningStep<'p> {
    program: &'p Program,
    settings: StepSettings,
    /// True if the step's update has been made without this rank, which therefore computes nothing.
    is_late: bool,
    /// The part of this replica in it; None if all replicas take part alike.
    participation: Option<Participation>,
    /// True if each micro-batch has its own gradients, which are folded or reduced one by one.
    apart: bool,
    batches: Mutex<Vec<Option<Batch>>>,
    /// Number of targets of all ranks' micro-batches.
    targets: OnceLock<u64>,
    /// Number of targets of this rank's micro-batches.
    own_targets: OnceLock<u64>,
    carried: Mutex<Carried>,
    ledger: Mutex<Ledger>,
    /// Units and micro-batches whose activations are offloaded between forward and backward.
    leave: BTreeSet<(u32, u32)>,
    offloaded_activations: OffloadedActivations,
    /// The values that cross between pipeline stages, and those of them that this rank sends.
    messages: Messages,
    /// The values that change their layout inside units.
    exchanges: Exchanges,
    pub(super) sent: BTreeSet<Message>,
    pub(super) outcome: Mutex<StepOutcome>,
    /// By unit and chunk, this rank's sums of the penalty of consolidation.
    pub(super) penalties: Mutex<BTreeMap<(usize, u32), Vec<f64>>>,
}

/// The part of a step's state that only the compute lane uses.
pub(super) struct Carried {
    passes: Passes,
    /// The loss of each of this rank's micro-batches. Losses are read together with the norm, so
    /// that the host waits for a GPU once.
    pub(super) losses: Vec<Option<Tensor>>,
    rates: Rates,
    /// The last reduction that is known to be done.
    reduced: u32,
}

impl<'p> RunningStep<'p> {
    pub fn new(
        program: &'p Program,
        settings: StepSettings,
        is_late: bool,
        participation: Option<Participation>,
    ) -> RunningStep<'p> {
        let micro_batches = program.micro_batches as usize;
        // Ranks that take part count their own tokens.
        let tokens = participation.map_or(0, |own| own.tokens);
        let late = is_late || participation.is_some_and(|own| !own.takes_part);
        let outcome = StepOutcome { tokens, late, ..StepOutcome::default() };
        let carried = Carried {
            passes: Passes::default(),
            losses: vec![None; micro_batches],
            rates: Rates { factor: 0.0, gradient_scale: 0.0, update: 1, average: None },
            reduced: 0,
        };
        RunningStep {
            program,
            settings,
            is_late,
            participation,
            apart: program.instructions.iter().any(|instruction| {
                matches!(instruction.action, Action::Fold { .. } | Action::Reduce { accumulate: true, .. })
            }),
            batches: Mutex::new(vec![None; micro_batches]),
            targets: OnceLock::new(),
            own_targets: OnceLock::new(),
            carried: Mutex::new(carried),
            ledger: Mutex::new(Ledger::new(program)),
            leave: program.instructions.iter().filter_map(leaves).collect(),
            offloaded_activations: OffloadedActivations::default(),
            messages: Messages::default(),
            exchanges: Exchanges::default(),
            sent: program
                .instructions
                .iter()
                .filter(|instruction| matches!(instruction.action, Action::Send { .. }))
                .filter_map(|instruction| message_of(instruction.action))
                .collect(),
            outcome: Mutex::new(outcome),
            penalties: Mutex::default(),
        }
    }

    pub fn program(&self) -> &'p Program {
        self.program
    }

    pub fn action(&self, number: u32) -> Action {
        self.program.instructions[number as usize].action
    }

    pub fn ledger(&self) -> &Mutex<Ledger> {
        &self.ledger
    }

    /// True if the step's update has been made without this rank.
    pub fn is_late(&self) -> bool {
        self.is_late
    }

    /// True if this rank's replica has made its steps of the round, and waits for the outer step.
    pub fn waits_for_round(&self) -> bool {
        self.participation.is_some_and(|own| !own.takes_part)
    }

    /// True if this rank computes nothing in the step.
    pub fn is_left_out(&self) -> bool {
        self.is_late || self.waits_for_round()
    }

    /// True if the rank runs an instruction. A late worker takes its samples and, in the end, new
    /// parameters, and computes nothing. A replica that has made its steps takes part in the outer
    /// step alone, and in the gathers after it, which bring its result to the copies that forward
    /// reads.
    pub fn runs(&self, number: usize, action: Action) -> bool {
        use Action::{Commit, Count, Gather, Load, Outer, Pull, Snapshot};
        if self.waits_for_round() {
            let earlier = &self.program.instructions[..number];
            let follows_outer = || earlier.iter().any(|earlier| matches!(earlier.action, Outer { .. }));
            return match action {
                Outer { .. } | Snapshot => true,
                Gather { .. } => follows_outer(),
                _ => false,
            };
        }
        !self.is_late || matches!(action, Load { .. } | Count { .. } | Commit | Pull { .. } | Snapshot)
    }

    /// True if each micro-batch has its own gradients.
    pub fn apart(&self) -> bool {
        self.apart
    }

    /// True if the activations of a unit on a micro-batch are offloaded.
    pub fn leaves(&self, run: (u32, u32)) -> bool {
        self.leave.contains(&run)
    }

    pub fn exchanges(&self) -> &Exchanges {
        &self.exchanges
    }

    pub fn messages(&self) -> &Messages {
        &self.messages
    }

    /// Allocates memory for what the receive with this number receives.
    pub fn take_message(&self, device: &Device, number: u32, dtype: DType) -> Result<()> {
        self.messages.take(device, &self.program.instructions[number as usize], dtype)
    }

    pub fn offloaded_activations(&self) -> &OffloadedActivations {
        &self.offloaded_activations
    }

    pub fn put_batch(&self, micro_batch: u32, batch: Batch) {
        lock(&self.batches)[micro_batch as usize] = Some(batch);
    }

    /// Sets the drift between replicas.
    pub fn set_drift(&self, drift: f64) {
        lock(&self.outcome).drift = Some(drift);
    }

    /// Sets the way the passes of this step were launched, and a message about it.
    pub fn set_launches(&self, launches: Launches, note: Option<String>) {
        let mut outcome = lock(&self.outcome);
        (outcome.launches, outcome.note) = (launches, note);
    }

    /// The micro-batches.
    pub fn batches(&self) -> Vec<Batch> {
        lock(&self.batches).iter().flatten().cloned().collect()
    }

    /// Replaces the micro-batches. An empty list drops them.
    pub fn set_batches(&self, mut batches: Vec<Batch>) {
        batches.reverse();
        lock(&self.batches).iter_mut().for_each(|batch| *batch = batches.pop());
    }

    /// The losses of the micro-batches, once all forwards have run.
    pub fn losses(&self) -> Vec<Option<Tensor>> {
        lock(&self.carried).losses.clone()
    }

    /// Sets the losses as if all forwards and backwards had run.
    pub fn set_losses(&self, losses: &[Option<Tensor>]) {
        lock(&self.carried).losses = losses.to_vec();
    }

    /// Resets the state to that before any forward.
    pub fn forget_passes(&self) {
        let mut carried = lock(&self.carried);
        carried.passes = Passes::default();
        carried.losses.iter_mut().for_each(|loss| *loss = None);
    }

    pub fn settings(&self) -> StepSettings {
        self.settings
    }

    /// Number of targets in the loss, of all ranks.
    pub fn targets(&self) -> u64 {
        *self.targets.get().expect("the program counts before it computes")
    }

    /// Number of targets in the loss, of this rank.
    pub fn own_targets(&self) -> u64 {
        *self.own_targets.get().expect("the program counts before it computes")
    }

    pub fn outcome(&self) -> StepOutcome {
        lock(&self.outcome).clone()
    }

    /// Sums the tokens and targets of all micro-batches of the ranks that sum gradients. The loss
    /// is a mean over all these targets, so every division of a batch gives the loss of the whole
    /// batch.
    pub fn count(&self, summed: &Link) -> Result<()> {
        let mut counts = [0; 2];
        for batch in lock(&self.batches).iter().flatten() {
            counts[0] += batch.len() as u64;
            counts[1] += batch.counted as u64;
        }
        self.own_targets.set(counts[1]).ok();
        if self.program.counts_over_ranks() {
            summed.sum_counts(&mut counts)?;
        } else {
            // As if all workers had as many. The servers correct what they have in fact.
            counts = counts.map(|count| count * u64::from(self.program.mesh.data_parallel()));
        }
        // Replicas that train apart have equally many tokens.
        let apart = match (self.participation, self.program.kind.is_apart()) {
            (Some(own), _) => own.replicas as u64,
            (None, true) => u64::from(self.program.mesh.dp_replicate),
            (None, false) => 1,
        };
        let [tokens, targets] = [counts[0] * apart, counts[1]];
        // A program counts once.
        self.targets.set(targets).ok();
        let mut outcome = lock(&self.outcome);
        (outcome.tokens, outcome.targets) = (tokens, targets);
        Ok(())
    }

    /// The number of the last reduction that has finished when the dependencies `after` have.
    pub fn reductions_done(&self, after: &[u32]) -> u32 {
        let is_reduce = |n: &&u32| self.program.instructions[**n as usize].action.lane() == Lane::Reduce;
        let mut carried = lock(&self.carried);
        carried.reduced = after.iter().filter(is_reduce).copied().max().unwrap_or(0).max(carried.reduced);
        carried.reduced
    }

    pub fn batch(&self, micro_batch: u32) -> Batch {
        lock(&self.batches)[micro_batch as usize].clone().expect("the program loads before it uses")
    }

    fn is_last(&self, unit: u32) -> bool {
        unit == self.program.loss_unit()
    }

    /// Frees a micro-batch that no later pass reads.
    fn forget_batch(&self, micro_batch: u32) {
        lock(&self.batches)[micro_batch as usize] = None;
    }
}

impl Rank {
    /// Runs an instruction of the compute lane.
    pub(super) fn compute(&self, number: usize, instruction: &Instruction, step: &RunningStep<'_>) -> Result<()> {
        let carried = &mut *lock(&step.carried);
        match instruction.action {
            Action::Forward { unit, segment, micro_batch, keep } => {
                let at = At { unit, micro_batch, segment };
                let mut pass = Pass::new(self, step, &mut carried.passes, at);
                match pass.forward(keep)? {
                    Some(loss) if step.is_last(unit) => carried.losses[micro_batch as usize] = Some(loss),
                    Some(output) => pass.pass_on(output),
                    None => {}
                }
                Ok(())
            }
            Action::Backward { unit, segment, micro_batch, part } => {
                let at = At { unit, micro_batch, segment };
                Pass::new(self, step, &mut carried.passes, at).backward(part)?;
                if step.program.frees_batch(number) {
                    step.forget_batch(micro_batch);
                }
                Ok(())
            }
            Action::Fold { unit, .. } => self.gradients.fold(unit as usize),
            Action::Clip { .. } => self.clip(step, carried),
            Action::Commit => self.commit(step, carried),
            Action::Update { unit, chunk } => self.update(step, carried, unit as usize, chunk),
            other => Err(cannot(other)),
        }
    }

    /// The factor by which the sum of the step's losses is multiplied.
    pub(super) fn loss_scale(&self, step: &RunningStep<'_>) -> f32 {
        (self.scaler().scale() / step.targets().max(1) as f64) as f32
    }

    fn clip(&self, step: &RunningStep<'_>, carried: &mut Carried) -> Result<()> {
        self.gradients.end_backward()?;
        let chunks = self.gradients.chunk_sums_of_squares()?;
        let summed = Instant::now();
        let links = lock(&self.compute_links);
        let squares = self.sum_over_ranks(chunks, &links)?;
        let losses = carried.losses.iter_mut().map(|loss| self.read_loss(loss.take())).collect::<Result<Vec<_>>>()?;
        let losses = links.summed.all_gather_numbers(&losses)?;
        let routing = self.routing_over_ranks(&links, std::mem::take(&mut carried.passes.routing))?;
        lock(&step.outcome).routing = routing;
        // Stages without the loss unit have zeros.
        let losses = sum_by_place(&links.pipeline.gather_lists(&losses)?);
        let amax = self.amax_over_ranks(&links)?;
        drop(links);
        let exchanged = if step.program.ranks_of_norm().len() > 1 { summed.elapsed() } else { Duration::ZERO };

        let traffic = self.experts.as_ref().map(|experts| experts.take_traffic()).unwrap_or_default();
        let core = &mut *lock(&self.core);
        let scale = core.scaler.scale();
        let norm = squares.sqrt() / scale;
        let mut outcome = lock(&step.outcome);
        outcome.comm += exchanged + traffic.time;
        outcome.comm_exposed += exchanged + traffic.time;
        outcome.expert_bytes = traffic.sent_bytes;
        outcome.loss = losses.iter().sum::<f64>() / scale;
        outcome.gradient_norm = norm;
        let in_range = amax.as_ref().is_none_or(|amax| amax.iter().all(|most| most.is_finite()));
        let finite = norm.is_finite() && outcome.loss.is_finite() && in_range;
        let spike = finite && core.skip_above.is_some_and(|limits| limits.exceeded(outcome.loss, norm));
        let updates = finite && !spike;
        (outcome.skipped, outcome.spike) = (!updates, spike);
        core.scaler.update(finite);
        let clip = match step.settings.clip_norm {
            Some(limit) if norm > limit => limit / norm,
            _ => 1.0,
        };
        let mut average = None;
        if updates {
            core.count_update(step.program.period);
            self.optimizer.begin_updates(step.program.period, &core.period_updates);
            average = self.optimizer.averaging().and_then(|rule| rule.share(core.updates, core.averaged));
            core.averaged += u64::from(average.is_some());
        }
        if let Some(fp8) = &self.fp8 {
            lock(fp8).end_step(amax.filter(|_| updates))?;
        }
        carried.rates = Rates {
            factor: step.settings.rate_factor,
            gradient_scale: (clip / scale) as f32,
            update: core.updates.max(1),
            average,
        };
        Ok(())
    }

    /// The sum over all ranks of numbers of the elements that each updates, which it has by unit,
    /// in an order that does not depend on the sharding.
    pub(super) fn sum_over_ranks(&self, chunks: Vec<Vec<f64>>, links: &ComputeLinks) -> Result<f64> {
        let chunks = match self.parameters.holding().placement.masters {
            Extent::Full => chunks,
            // Ranks with other parts of products, or other experts, may count elements here that
            // this one does not.
            Extent::Shard if links.tensor.size().max(links.experts.size()) > 1 => {
                by_rank(gather_by_unit(&chunks, &links.shard)?)
            }
            Extent::Shard => in_order(&chunks, &links.shard.all_gather_numbers(&chunks.concat())?),
        };
        let chunks = match links.tensor.size() {
            1 => chunks,
            _ => by_rank(gather_by_unit(&chunks, &links.tensor)?),
        };
        // Each replica has chunks of its own experts, and the first those of everything else too.
        let chunks = match links.experts.size() {
            1 => chunks,
            _ => by_rank(gather_by_unit(&chunks, &links.experts)?),
        };
        over_stages(chunks, &links.pipeline)
    }

    /// The ways of all ranks' tokens; None without experts.
    fn routing_over_ranks(&self, links: &ComputeLinks, own: RoutingLog) -> Result<Option<RoutingRecord>> {
        let spec = self.model.spec().filter(|_| !self.device.is_meta());
        let Some((experts, layers)) = spec.and_then(|spec| Some((spec.experts.as_ref()?.experts, spec.layers))) else {
            return Ok(None);
        };
        let own = own.read()?.to_list(layers, experts);
        let sum = |lists: Vec<f64>| sum_by_place(&lists.chunks(own.len()).map(<[f64]>::to_vec).collect::<Vec<_>>());
        // Ranks of a tensor-parallel group have routed the same tokens. A stage has zeros for the
        // layers of the others.
        let of_data = sum(links.summed.all_gather_numbers(&own)?);
        let all = sum(links.pipeline.all_gather_numbers(&of_data)?);
        Ok(Some(RoutingRecord::from_list(&all, experts)))
    }

    /// The step's largest magnitudes, over all ranks, of the values that products round to 8 bits.
    fn amax_over_ranks(&self, links: &ComputeLinks) -> Result<Option<Vec<f32>>> {
        let Some(fp8) = &self.fp8 else { return Ok(None) };
        let own = lock(fp8).of_step()?;
        let of_data = links.summed.all_gather_numbers(&own)?;
        // Ranks of a tensor-parallel group round parts of one matrix. A stage has zeros for the
        // layers of the others.
        let of_group = links.tensor.all_gather_numbers(&of_data)?;
        Ok(Some(over_ranks(&links.pipeline.all_gather_numbers(&of_group)?, own.len())))
    }

    fn update(&self, step: &RunningStep<'_>, carried: &Carried, unit: usize, chunk: u32) -> Result<()> {
        // An offloaded copy with separate masters is overwritten by the update, so it is not
        // fetched before.
        let anew = self.parameters.is_offloaded() && self.parameters.is_apart();
        if anew && !self.parameters.is_here(unit) {
            self.parameters.take(unit)?;
        }
        let skipped = lock(&step.outcome).skipped;
        match skipped {
            false => {
                let (sparsity, penalty) =
                    self.optimizer.update(unit, chunk, &self.parameters, &self.gradients, carried.rates)?;
                lock(&step.outcome).sparsity += sparsity;
                lock(&step.penalties).extend(penalty.map(|sums| ((unit, chunk), sums)));
                Ok(())
            }
            true if anew || self.optimizer.host().is_some() => {
                self.optimizer.refresh_copy(unit, chunk, &self.parameters)
            }
            true => Ok(()),
        }
    }

    pub(super) fn read_loss(&self, loss: Option<Tensor>) -> Result<f64> {
        match loss.filter(|_| !self.device.is_meta()) {
            Some(loss) => Ok(f64::from(loss.to_scalar()?)),
            None => Ok(0.0),
        }
    }
}

/// Every rank's chunks, by unit, in the order in which one rank with all of them has them: within a
/// unit by rank and chunk. `own` holds this rank's chunks by unit; `all` holds every rank's, rank
/// after rank.
pub(crate) fn in_order(own: &[Vec<f64>], all: &[f64]) -> Vec<Vec<f64>> {
    let of_a_rank: usize = own.iter().map(Vec::len).sum();
    let mut first = 0;
    let mut of_unit = |unit: &Vec<f64>| {
        let range = first..first + unit.len();
        first = range.end;
        all.chunks(of_a_rank.max(1)).flat_map(|rank| rank.get(range.clone()).unwrap_or(&[])).copied().collect()
    };
    own.iter().map(&mut of_unit).collect()
}

/// The sum of the chunks of all units, in the order of units. Pipeline stages exchange theirs; what
/// several stages hold counts once. Each stage has its chunks by unit, none for units of other
/// stages.
fn over_stages(own: Vec<Vec<f64>>, stages: &Link) -> Result<f64> {
    if stages.size() == 1 {
        return Ok(own.iter().flatten().sum());
    }
    let all = gather_by_unit(&own, stages)?;
    let first_holder = |unit: usize| all.iter().map(|stage| &stage[unit]).find(|chunks| !chunks.is_empty());
    Ok((0..own.len()).filter_map(first_holder).flatten().sum())
}

/// Every rank's lists by unit, which may have different lengths.
fn gather_by_unit(own: &[Vec<f64>], link: &Link) -> Result<Vec<Vec<Vec<f64>>>> {
    let lengths = own.iter().map(|unit| unit.len() as f64);
    let message: Vec<f64> = lengths.chain(own.iter().flatten().copied()).collect();
    let by_unit = |list: Vec<f64>| {
        let (lengths, mut rest) = list.split_at(own.len().min(list.len()));
        let mut unit = |length: &f64| {
            let (chunks, others) = rest.split_at((*length as usize).min(rest.len()));
            rest = others;
            chunks.to_vec()
        };
        lengths.iter().map(&mut unit).collect()
    };
    Ok(link.gather_lists(&message)?.into_iter().map(by_unit).collect())
}

/// By unit, the lists of all ranks one after the other.
fn by_rank(all: Vec<Vec<Vec<f64>>>) -> Vec<Vec<f64>> {
    let units = all.first().map_or(0, Vec::len);
    (0..units).map(|unit| all.iter().flat_map(|rank| rank[unit].iter().copied()).collect()).collect()
}

/// The sums of the numbers in the same place of every list.
pub(super) fn sum_by_place(lists: &[Vec<f64>]) -> Vec<f64> {
    let length = lists.iter().map(Vec::len).max().unwrap_or(0);
    let sum = |place: usize| lists.iter().filter_map(|list| list.get(place)).fold(0.0, |sum, number| sum + number);
    (0..length).map(sum).collect()
}
