//! One rank: parameters, gradients, optimizer and activations, and the execution of programs on
//! them.
//!
//! [`Rank::execute`] runs one training step: it gives each lane of the program a thread, and each
//! instruction a function that does it. A rank knows instructions and no strategies.
//!
//! It runs on the CPU, on a GPU and on the meta device. On meta the same execution predicts a
//! step's memory and cost.
//!
//! Lanes share the rank without a lock around it. The program's dependencies ensure that no two
//! lanes use the same unit's buffers at once. Each lane has its own links to other ranks.

mod apart;
mod averages;
mod behind;
mod consolidation;
mod dead_units;
mod events;
mod exchanges;
mod forwards;
mod graphs;
mod ledger;
mod magnitudes;
mod messages;
mod offload;
mod offloaded_activations;
mod pace;
mod passes;
mod periods;
mod replicas;
mod step;
mod worker;

pub use apart::Participation;
pub(crate) use apart::{LowRankStart, NamedResidual};
pub use graphs::{kept, stretch};
pub(crate) use offload::Setting;
pub use pace::Pace;
pub(crate) use step::in_order;
pub use step::{Launches, ServerStep, StepOutcome, StepSettings};

use crate::collectives::Way;
use crate::config::OptimizerSettings;
use crate::constraints::WeightConstraints;
use crate::encoded::{CodeRounding, Moment, MomentumCorrection};
use crate::experts::ExpertExchange;
use crate::faults::Faults;
use crate::fp8::{AmaxHistory, Fp8Settings, Fp8State};
use crate::health::SpikeLimits;
use crate::lanes::{self, Handler};
use crate::links::{ComputeLinks, GatherLinks, Link, Links, PipelineLinks, ReduceLinks, Reduction};
use crate::optimizer::Optimizer;
use crate::outer::{OuterSettings, OuterStep};
use crate::positions::{Doing, Positions};
use crate::precision::LossScaler;
use crate::server::Worker;
use crate::stages::StageLink;
use crate::state::{GradientState, Holding, ParameterState, initial_values, lock};
use crate::tier::Tiers;
use crate::{EngineError, Result};
use events::Events;
use graphs::Graphs;
use serde::Serialize;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use step::RunningStep;
use trainyard_autograd::ParamId;
use trainyard_comm::{Communicator, Position};
use trainyard_model::{Batch, ContextSplit, Model, TensorSplit};
use trainyard_program::{Action, Axis, BlockCodec, Encoding, Instruction, Lane, Program};
use trainyard_tensor::device::{enter_lane, tag_calls};
use trainyard_tensor::{Computes, DType, Device, Tensor};

/// One rank: a model with its parameters, gradients, optimizer state, and links to other ranks.
pub struct Rank {
    device: Device,
    model: Model,
    /// The same model without divided rows and sequences, for evaluation and generation; None if it
    /// is the same.
    undivided: Option<Model>,
    /// The parameters.
    pub parameters: ParameterState,
    gradients: GradientState,
    pub(crate) optimizer: Arc<Optimizer>,
    tiers: Tiers,
    core: Mutex<Core>,
    gather_links: Mutex<GatherLinks>,
    reduce_links: Mutex<ReduceLinks>,
    compute_links: Mutex<ComputeLinks>,
    pipeline_links: PipelineLinks,
    /// The link of the inner lane to the tensor-parallel group.
    tensor_link: Link,
    /// The link of the inner lane to the context-parallel group.
    context_link: Link,
    /// The exchange of rows with the ranks that have other experts; None if this rank has all, or
    /// has no data.
    experts: Option<Arc<ExpertExchange>>,
    alarm: Option<Communicator>,
    /// True if the GPU exchanges tensors by NCCL. Such an exchange may fail after the host has
    /// launched it.
    by_nccl: bool,
    positions: Arc<Positions>,
    faults: Option<Arc<Faults>>,
    pace: Option<Pace>,
    reduce_dtype: DType,
    seed: u64,
    /// The CUDA graph of the step's passes; None if every kernel is launched by itself.
    graphs: Option<Graphs>,
    /// The state of outer steps; None if replicas do not train apart.
    outer: Option<Mutex<OuterStep>>,
    /// The part of this replica in the step; None if all replicas take part alike.
    participation: Option<Participation>,
    /// The worker of a parameter server, and the server that it hosts.
    worker: Option<Worker>,
    /// The scales of 8-bit products; None if no products are 8-bit.
    fp8: Option<Mutex<Fp8State>>,
    /// The weights whose products have operands in 8-bit integers; None if there are none.
    int8: Option<Arc<BTreeSet<ParamId>>>,
    /// The weights whose inputs evaluation and generation round to 8 bits.
    rounded_inputs: BTreeSet<ParamId>,
}

/// The state that an update changes beside parameters and optimizer state.
pub struct Core {
    /// The loss scale.
    pub scaler: LossScaler,
    /// Number of updates made. Skipped steps do not count.
    pub updates: u64,
    /// Number of weights that the average of the weights has taken.
    pub averaged: u64,
    /// Number of updates made in each period of a schedule of freezing; empty if there is none.
    pub period_updates: Vec<u64>,
    /// The limits above which a step's loss or norm makes it skip its update; None for no limits.
    pub skip_above: Option<SpikeLimits>,
}

/// Settings of a rank: precision, optimizer and seed.
#[derive(Clone, Copy, Debug)]
pub struct RankSettings {
    /// The kernels that run it. A prediction takes scratch memory for these.
    pub computes: Computes,
    /// The dtype of forward and backward.
    pub compute: DType,
    /// The rounding of the blocks' products to 8 bits; None if they are not rounded.
    pub fp8: Option<Fp8Settings>,
    /// True if the blocks' products multiply 8-bit integers.
    pub int8: bool,
    /// The dtype of gradients on their way between ranks: f32 or bf16.
    pub reduce: DType,
    /// The transport of tensors between ranks. A prediction takes memory for its buffers.
    pub way: Way,
    /// The update rule.
    pub optimizer: OptimizerSettings,
    /// The values that weights may have.
    pub constraints: WeightConstraints,
    /// The loss scale at the start.
    pub scaler: LossScaler,
    /// The seed of initial values and of dropout.
    pub seed: u64,
    /// True to capture a GPU's launches and replay them where possible.
    pub graphs: bool,
    /// The form of gradients and of parameter changes on their way between ranks.
    pub compression: Compression,
    /// The rule of outer steps; None if replicas do not train apart.
    pub outer: Option<OuterSettings>,
}

/// The form of messages between ranks. The default encodes nothing.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Compression {
    /// The encoding of gradients.
    pub gradients: Option<Encoding>,
    /// Number of first steps in which gradients travel as they are.
    pub warmup_steps: u64,
    /// The codec of sharded parameters while the shard group gathers them.
    pub parameters: Option<BlockCodec>,
    /// The codec of outputs between pipeline stages, and that of their gradients.
    pub activations: [Option<BlockCodec>; 2],
    /// The encoding of parameter changes in outer steps.
    pub outer: Option<Encoding>,
    /// The rounding between two codes.
    pub rounding: CodeRounding,
    /// The momentum that ranks apply to gradients before they choose the largest elements.
    pub momentum: Option<MomentumCorrection>,
}

impl RankSettings {
    /// Training in f32 on processors with `optimizer`.
    pub fn new(optimizer: OptimizerSettings, seed: u64) -> RankSettings {
        RankSettings {
            computes: Computes::Cpu,
            compute: DType::F32,
            fp8: None,
            int8: false,
            reduce: DType::F32,
            way: Way::Host,
            optimizer,
            constraints: WeightConstraints::default(),
            scaler: LossScaler::none(),
            seed,
            graphs: false,
            compression: Compression::default(),
            outer: None,
        }
    }
}

impl Rank {
    /// Makes a rank with freshly initialised parameters. It holds the parts of them that `holding`
    /// names, and exchanges with other ranks through `links`. All ranks call this together.
    pub fn new(device: &Device, model: Model, holding: Holding, links: Links, settings: &RankSettings) -> Result<Rank> {
        Rank::with_tiers(device, model, holding, Tiers::default(), links, settings)
    }

    /// Like [`Rank::new`], but keeps offloaded state in `tiers` rather than on the device.
    pub fn with_tiers(
        device: &Device,
        model: Model,
        holding: Holding,
        tiers: Tiers,
        mut links: Links,
        settings: &RankSettings,
    ) -> Result<Rank> {
        links.reduce.stage(device, &model, &holding, settings)?;
        links.pipeline.stage(device, settings)?;
        let outer = apart::outer_step(device, &model, &holding, &links.reduce, settings)?;
        let (compute, constraints) = (settings.compute, settings.constraints);
        constraints.check(&model, &holding)?;
        let mut parameters = ParameterState::zeros(device, &model, holding.clone(), compute, constraints, &tiers)?;
        if let Some(codec) = settings.compression.parameters {
            parameters.encode_gathers(codec)?;
        }
        let optimizer = Optimizer::new(device, &model, &holding, compute, settings, &tiers)?;
        let gradients = GradientState::new(device, &model, holding.clone(), &tiers)?;
        let fp8 = settings.fp8.map(|fp8| Fp8State::new(device, &model, fp8)).transpose()?;
        let optimizer = Arc::new(optimizer);
        let worker = worker::worker_of(device, &parameters, &optimizer, &mut links)?;
        let core = Core::new(settings.scaler);
        let (reduce_dtype, seed) = (settings.reduce, settings.seed);
        let mut rank =
            Rank::assemble(device, model, parameters, gradients, (optimizer, tiers), core, links, reduce_dtype, seed);
        rank.undivided = undivided(&rank.model)?;
        rank.graphs = settings.graphs.then(Graphs::default);
        rank.fp8 = fp8.map(Mutex::new);
        rank.int8 = settings.int8.then(|| Arc::new(crate::fp8::layers(&rank.model).into_iter().collect()));
        rank.outer = outer.map(Mutex::new);
        rank.worker = worker;
        rank.initialise()?;
        if device.is_meta() {
            rank.set_teacher_weights()?;
        }
        Ok(rank)
    }

    /// Gives the teacher of a rank on meta the memory that its weights take.
    fn set_teacher_weights(&self) -> Result<()> {
        let last = self.model.units().len() - 1;
        let Some(teacher) = self.model.teacher().filter(|_| self.parameters.holding().runs(last)) else {
            return Ok(());
        };
        teacher.set_weights(Box::new(teacher.zeros(&self.device)?));
        Ok(())
    }

    /// Sets the initial values. Each is a function of (seed, unit, index, element), so a shard has
    /// the same values as its part of the whole.
    fn initialise(&mut self) -> Result<()> {
        self.initialise_by(self.seed)
    }

    /// Sets the initial values of `seed`.
    pub(crate) fn initialise_by(&mut self, seed: u64) -> Result<()> {
        let specs: std::collections::BTreeMap<_, _> =
            self.model.parameters().map(|(id, spec)| (id, spec.clone())).collect();
        self.set_parameters_anew(|id, range, values| initial_values(values, id, &specs[&id], range, seed))
    }

    /// The seed of initial values and of dropout.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Makes a rank for evaluation and generation. It has neither gradients nor optimizer state,
    /// and must not be trained.
    pub fn for_inference(device: &Device, model: Model, compute: DType) -> Result<Rank> {
        let tiers = Tiers::default();
        let parameters =
            ParameterState::zeros(device, &model, Holding::whole(), compute, WeightConstraints::default(), &tiers)?;
        let core = Core::new(LossScaler::none());
        let state = (Arc::new(Optimizer::none(device)), tiers);
        let gradients = GradientState::none(device);
        Ok(Rank::assemble(device, model, parameters, gradients, state, core, Links::default(), DType::F32, 0))
    }

    fn assemble(
        device: &Device,
        model: Model,
        parameters: ParameterState,
        gradients: GradientState,
        (optimizer, tiers): (Arc<Optimizer>, Tiers),
        core: Core,
        links: Links,
        reduce_dtype: DType,
        seed: u64,
    ) -> Rank {
        let experts = Some(&links.compute.experts).filter(|link| link.size() > 1 && !device.is_meta());
        Rank {
            experts: experts.map(|link| Arc::new(ExpertExchange::new(link.clone()))),
            device: device.clone(),
            model,
            undivided: None,
            parameters,
            gradients,
            optimizer,
            tiers,
            core: Mutex::new(core),
            gather_links: Mutex::new(links.gather),
            reduce_links: Mutex::new(links.reduce),
            compute_links: Mutex::new(links.compute),
            pipeline_links: links.pipeline,
            tensor_link: links.tensor,
            context_link: links.context,
            alarm: links.alarm,
            by_nccl: links.by_nccl,
            positions: links.positions,
            faults: None,
            pace: None,
            reduce_dtype,
            seed,
            graphs: None,
            outer: None,
            participation: None,
            worker: None,
            fp8: None,
            int8: None,
            rounded_inputs: BTreeSet::new(),
        }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model in evaluation and generation: its ranks hold all rows, of any number.
    pub fn inference_model(&self) -> &Model {
        self.undivided.as_ref().unwrap_or(&self.model)
    }

    /// True if this rank cannot run the model by itself: others hold parts of it.
    pub fn needs_others(&self) -> bool {
        let holding = self.parameters.holding();
        let all = (0..self.model.units().len()).all(|unit| holding.runs(unit));
        let parts = self.model.tensor_split().ranks * self.model.expert_split().ranks;
        self.parameters.is_sharded() || !all || parts > 1
    }

    /// The logits of the last token from those that this rank has, for all ranks: the last stage
    /// has them, and each of its tensor-parallel ranks those of its part of the vocabulary.
    pub fn gather_logits(&self, own: &[f32]) -> Result<Vec<f32>> {
        let links = lock(&self.compute_links);
        let own: Vec<f64> = own.iter().map(|logit| f64::from(*logit)).collect();
        let of_group = links.tensor.gather_lists(&own)?.concat();
        let of_stages = links.pipeline.gather_lists(&of_group)?.concat();
        Ok(of_stages.into_iter().map(|logit| logit as f32).collect())
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The instructions that its lanes are at.
    pub fn positions(&self) -> Arc<Positions> {
        Arc::clone(&self.positions)
    }

    /// Injects `faults` into its instructions. For tests.
    pub fn inject(&mut self, faults: Arc<Faults>) {
        self.faults = Some(faults);
    }

    /// Flips a bit of the parameters if a fault says so. For tests.
    pub(crate) fn suffer_flip(&self, rank: usize, step: u64) -> Result<()> {
        match &self.faults {
            Some(faults) if faults.flips(rank as u32, step) => self.flip_a_bit(),
            _ => Ok(()),
        }
    }

    /// Makes every pass last at least as long as `pace` says. For tests and benchmarks.
    pub fn pace(&mut self, pace: Pace) {
        self.pace = Some(pace);
    }

    /// Number of updates made.
    pub fn updates(&self) -> u64 {
        lock(&self.core).updates
    }

    /// The loss scale.
    pub fn scaler(&self) -> LossScaler {
        lock(&self.core).scaler
    }

    /// Calls `with` on the loss scale and the number of updates, to save or restore them.
    pub fn core<T>(&self, with: impl FnOnce(&mut Core) -> T) -> T {
        with(&mut lock(&self.core))
    }

    /// The range of a parameter's elements whose gradient this rank's update reads, and their f32
    /// values: the sum over all ranks, times the loss scale and before clipping; with the gradient
    /// of the penalty, where weights are consolidated. They are those of the last step, after
    /// [`Rank::execute`] or in its snapshot. Replicas hold the same range, and the range is empty
    /// if other ranks of the shard group hold the parameter. A unit that rested in the step has
    /// those of an earlier one.
    ///
    /// # Errors
    /// When gradients lie in a tier, or the rank does not hold the parameter's unit.
    pub fn read_gradient(&self, id: ParamId) -> Result<(Range<usize>, Tensor)> {
        let range = self.parameters.master_part_range(id);
        Ok((range.clone(), self.gradients.of_parameter(id, range)?))
    }

    /// The largest magnitudes of earlier steps, to save them; None without 8-bit products.
    pub fn amax_history(&self) -> Option<AmaxHistory> {
        self.fp8.as_ref().map(|fp8| lock(fp8).history())
    }

    /// True if products are 8-bit but have no scales yet: the next step only measures magnitudes.
    pub fn measures_fp8(&self) -> bool {
        self.fp8.as_ref().is_some_and(|fp8| lock(fp8).measures())
    }

    /// Restores the largest magnitudes from a checkpoint. Does nothing without 8-bit products.
    ///
    /// # Errors
    /// If the history is that of another model.
    pub fn restore_amax_history(&mut self, history: AmaxHistory) -> Result<()> {
        self.fp8.as_ref().map_or(Ok(()), |fp8| lock(fp8).restore(history))
    }

    /// Casts the masters into every compute copy again, after masters were changed from outside.
    /// All ranks call this together.
    pub fn refresh_copies(&mut self) -> Result<()> {
        self.parameters.refresh_copies(&lock(&self.compute_links).shard)
    }

    /// The group that an exchange between segments is with.
    fn inner_link(&self, action: Action) -> &Link {
        match action {
            Action::Exchange { axis: Axis::Context, .. } => &self.context_link,
            _ => &self.tensor_link,
        }
    }

    /// This rank's index among the ranks with different data, and their number.
    pub fn data_place(&self) -> (usize, usize) {
        self.parameters.holding().data
    }

    /// This rank's index among those that evaluate different text, and their number. Ranks that
    /// divide the sequences of a step each take whole ones here.
    pub fn evaluation_place(&self) -> (usize, usize) {
        let holding = self.parameters.holding();
        let ((index, ranks), (part, parts)) = (holding.data, holding.context);
        (index * parts + part, ranks * parts)
    }

    /// This rank's index among the ranks that hold the same shard, and their number.
    pub fn replica(&self) -> (usize, usize) {
        let links = lock(&self.reduce_links);
        (links.replicate.index(), links.replicate.size())
    }

    /// Gathers the numbers of every data rank, in order of the ranks. Stages of a pipeline that do
    /// not know them give zeros. All ranks call this together.
    pub fn gather_numbers(&self, own: &[f64]) -> Result<Vec<f64>> {
        let links = lock(&self.compute_links);
        let of_data = links.data.all_gather_numbers(own)?;
        Ok(step::sum_by_place(&links.pipeline.gather_lists(&of_data)?))
    }

    /// Runs one step. `load` returns the next micro-batch; it is called on the input lane.
    /// `snapshot` copies the state after the update; it is called on the host lane.
    ///
    /// # Errors
    /// The first error of any lane. An error of an exchange names this rank and the instruction.
    pub fn execute(
        &mut self,
        program: &Program,
        settings: StepSettings,
        mut load: impl FnMut(&Device, &Model) -> Result<Batch> + Send,
        mut snapshot: impl FnMut(&Rank, &StepOutcome) -> Result<()> + Send,
    ) -> Result<StepOutcome> {
        let rank: &Rank = self;
        rank.begin_period(program.period);
        rank.gradients.begin_step();
        if let Some(outer) = &rank.outer {
            lock(outer).is_in_round = true;
        }
        if let Some(worker) = &rank.worker {
            worker.begin(rank.updates());
        }
        let is_late = rank.worker.as_ref().is_some_and(Worker::is_late);
        let step = &RunningStep::new(program, settings, is_late, rank.participation);
        if !step.is_left_out() {
            let first = lock(step.ledger()).start();
            rank.take_for(&first, step)?;
        }
        let events = &Events::new(&rank.device, program)?;
        let perform = |number: usize, instruction: &Instruction, body: &mut dyn FnMut(&Position) -> Result<()>| {
            if !step.runs(number, instruction.action) {
                // Others may wait for its marks.
                return events.around(number, instruction, || Ok(()));
            }
            tag_calls(number as u32);
            let what = program.name_of(instruction);
            let at = Position { step: settings.step, instruction: number as u32, what };
            let performed = events.around(number, instruction, || rank.perform(program, instruction, &at, body));
            match performed {
                Err(EngineError::Comm(source)) => {
                    Err(EngineError::Exchange { rank: program.rank, step: at.step, what: at.what, source })
                }
                other => other,
            }
        };
        let input: Handler<'_, EngineError> = Box::new(|number, instruction| {
            perform(number, instruction, &mut |_| {
                if let Action::Load { micro_batch } = instruction.action {
                    step.put_batch(micro_batch, load(&rank.device, &rank.model)?);
                }
                Ok(())
            })
        });
        let host: Handler<'_, EngineError> = Box::new(|number, instruction| {
            perform(number, instruction, &mut |_| match instruction.action {
                Action::Snapshot => {
                    // The snapshot reads host memory that streams may still be copying to.
                    rank.device.synchronize()?;
                    snapshot(rank, &step.outcome())
                }
                other => rank.move_state(other, step),
            })
        });
        let gather: Handler<'_, EngineError> = Box::new(|number, instruction| {
            perform(number, instruction, &mut |at| {
                if let Action::Pull { unit, staleness } = instruction.action {
                    rank.post_as_worker(at);
                    return rank.pull(unit, staleness, step);
                }
                let links = lock(&rank.gather_links);
                links.post(at);
                rank.gather(instruction, &links)
            })
        });
        let reduce: Handler<'_, EngineError> = Box::new(|number, instruction| {
            perform(number, instruction, &mut |at| {
                let mut links = lock(&rank.reduce_links);
                links.post(at);
                rank.reduce(number, instruction, step, &mut links)
            })
        });
        let between_stages = |stage: &'_ StageLink, number: usize, instruction: &Instruction| {
            perform(number, instruction, &mut |at| {
                stage.link.post(at);
                step.messages().run(program, instruction, stage, step.settings().step)
            })
        };
        let links = &rank.pipeline_links;
        let send: Handler<'_, EngineError> =
            Box::new(move |number, instruction| between_stages(&links.send, number, instruction));
        let receive: Handler<'_, EngineError> =
            Box::new(move |number, instruction| between_stages(&links.receive, number, instruction));
        let inner: Handler<'_, EngineError> = Box::new(|number, instruction| {
            perform(number, instruction, &mut |at| {
                if let Action::Exchange { axis: Axis::Expert, .. } = instruction.action {
                    // The pass before has exchanged its rows.
                    return Ok(());
                }
                let link = rank.inner_link(instruction.action);
                link.post(at);
                step.exchanges().run(instruction.action, link)
            })
        });
        let handlers = vec![
            (Lane::Input, input),
            (Lane::HostIo, host),
            (Lane::Gather, gather),
            (Lane::Reduce, reduce),
            (Lane::Send, send),
            (Lane::Receive, receive),
            (Lane::Inner, inner),
        ];
        let runs = |lane: &Lane| *lane == Lane::Compute || handlers.iter().any(|(handled, _)| handled == lane);
        if let Some(lane) = program.lanes().find(|lane| !runs(lane)) {
            let first = program.on_lane(lane).next().expect("a lane of the program has instructions");
            return Err(cannot(program.instructions[first].action));
        }
        let one = |number: usize, instruction: &Instruction| {
            perform(number, instruction, &mut |at| {
                if step.is_left_out() {
                    return rank.compute(number, instruction, step);
                }
                rank.gradients.give_back(step.reductions_done(&instruction.after));
                rank.before(step, instruction)?;
                match instruction.action {
                    Action::Clip { .. } => lock(&rank.compute_links).post(at),
                    Action::Commit => rank.post_as_worker(at),
                    _ => {}
                }
                if let Some(experts) = &rank.experts {
                    experts.post(at);
                }
                rank.compute(number, instruction, step).map_err(|error| rank.experts_failed(error))?;
                rank.after(step, number)
            })
        };
        let graphs = rank.graphs.as_ref().filter(|_| rank.device.as_cuda().is_some());
        let stretch = graphs.and_then(|graphs| Some((graphs, stretch(program, &rank.model).ok()?)));
        let compute = |number: usize, instruction: &Instruction| match &stretch {
            Some((graphs, stretch)) if stretch.contains(&number) && !step.is_left_out() => {
                // The first instruction of the stretch runs all of it.
                if number > stretch.start {
                    return Ok(());
                }
                let all = || stretch.clone().try_for_each(|number| one(number, &program.instructions[number]));
                graphs.run(rank, step, stretch, events, &all)
            }
            _ => one(number, instruction),
        };
        let began = Instant::now();
        let spans = if rank.device.is_meta() {
            lanes::run_in_order(program, handlers, compute)?;
            Vec::new()
        } else {
            let lend = || rank.device.lend();
            let meanwhile = rank.device.lends_threads().then_some(&lend as lanes::Meanwhile<'_>);
            lanes::run(program, handlers, compute, meanwhile, &|error| rank.raise_alarm(error))?
        };
        enter_lane(Lane::Compute as usize);
        rank.end_step(step);
        let ended = events.end(spans);
        lock(&rank.gather_links).forget();
        rank.experts.iter().for_each(|experts| experts.forget());
        // When another rank has failed, tensors that came by NCCL are invalid, and the device's own
        // error is only a consequence.
        if let Some(source) = rank.alarm.as_ref().filter(|_| rank.by_nccl).and_then(Communicator::failure) {
            let what = "the end of the step".to_owned();
            return Err(EngineError::Exchange { rank: program.rank, step: settings.step, what, source });
        }
        let spans = ended?;
        let mut outcome = step.outcome();
        outcome.penalty = rank.penalty(step)?;
        outcome.staleness = rank.worker.as_ref().and_then(Worker::take_staleness);
        outcome.dropped_pushes = rank.worker.as_ref().and_then(Worker::take_dropped);
        outcome.began = (!rank.device.is_meta()).then_some(began);
        outcome.take_times(program, spans);
        Ok(outcome)
    }

    /// Runs one instruction. Records the lane's position, and injects a fault that is due.
    fn perform(
        &self,
        program: &Program,
        instruction: &Instruction,
        at: &Position,
        body: &mut dyn FnMut(&Position) -> Result<()>,
    ) -> Result<()> {
        let lane = instruction.action.lane();
        let began = Instant::now();
        self.positions.enter(lane, at);
        let struck = self.faults.as_ref().map_or(Ok(()), |f| f.strike(program.rank, at, self.alarm.as_ref()));
        let is_pass = matches!(instruction.action, Action::Forward { .. } | Action::Backward { .. });
        let joins = self.experts.is_some() && is_pass;
        if program.mesh.ranks() > 1 && (joins || waits_for_others(instruction)) {
            self.positions.now(lane, Doing::Exchanging);
        }
        let result = struck.and_then(|()| body(at));
        if let Some(pace) = &self.pace {
            pace.hold(instruction.action, began);
        }
        self.positions.now(lane, if result.is_ok() { Doing::Finished } else { Doing::Failed });
        result
    }

    /// Wakes the other ranks when this one fails, unless it was told of a failure itself.
    fn raise_alarm(&self, error: Option<&EngineError>) {
        if error.is_some_and(EngineError::is_told) {
            return;
        }
        let Some(comm) = &self.alarm else { return };
        match error {
            Some(error) if error.comes_again() => comm.give_up(error.to_string()),
            Some(error) => comm.abort(error.to_string()),
            None => comm.abort(self.panicked()),
        };
    }

    /// A message that a lane panicked, with the positions of all lanes that had not finished.
    fn panicked(&self) -> String {
        let busy = |doing| matches!(doing, Doing::Running | Doing::Exchanging);
        let lanes = self.positions.lanes().into_iter().filter(|(_, at)| busy(at.doing));
        let lanes: Vec<String> = lanes.map(|(lane, at)| format!("lane {} {at}", lane.name())).collect();
        format!("a lane panicked: {}", lanes.join("; "))
    }

    fn gather(&self, instruction: &Instruction, links: &GatherLinks) -> Result<()> {
        match instruction.action {
            Action::Gather { unit, over } => self.parameters.gather(unit as usize, over as usize, links.over(over)),
            // The compute lane frees the memory after the last instruction that used it.
            Action::Release { .. } => Ok(()),
            other => Err(cannot(other)),
        }
    }

    fn reduce(
        &self,
        number: usize,
        instruction: &Instruction,
        step: &RunningStep<'_>,
        links: &mut ReduceLinks,
    ) -> Result<()> {
        match instruction.action {
            Action::Count { .. } => step.count(&links.summed),
            Action::Reduce { unit, accumulate, axis } => {
                let is_of_unit =
                    |earlier: &&Instruction| matches!(earlier.action, Action::Reduce { unit: of, .. } if of == unit);
                let turn = step.program().instructions[..number].iter().filter(is_of_unit).count() as u32;
                let at = Moment { step: step.settings().step, turn };
                let number = number as u32;
                let (dtype, encoded) = (self.reduce_dtype, instruction.encoding.is_some());
                let reduction = Reduction { over: axis, accumulate, dtype, encoded, number, at };
                self.gradients.reduce(unit as usize, reduction, links)
            }
            Action::Push { unit } => self.push(unit),
            Action::Outer { unit, .. } => {
                let Some(outer) = &self.outer else { return Err(cannot(instruction.action)) };
                let mut outer = lock(outer);
                let at = Moment { step: step.settings().step, turn: 0 };
                let (program, unit) = (step.program(), unit as usize);
                match program.averages_beside() {
                    true => outer.step_beside(unit, &self.parameters, links, at)?,
                    false => outer.step(unit, &self.parameters, links, at)?,
                }
                let is_outer = |instruction: &Instruction| matches!(instruction.action, Action::Outer { .. });
                if program.instructions.iter().rposition(is_outer) == Some(number) {
                    step.set_drift(outer.end(links, program.fragment.is_none())?);
                }
                Ok(())
            }
            Action::Merge { unit } => {
                let Some(outer) = &self.outer else { return Err(cannot(instruction.action)) };
                lock(outer).merge(unit as usize, &self.parameters)
            }
            Action::Tie { unit, axis: Axis::Tensor } => {
                self.gradients.sum_shared(unit as usize, &links.tensor, &links.shard)
            }
            Action::Tie { unit, axis: Axis::Pipeline } => self.gradients.tie(unit as usize, links.tie(unit)),
            other => Err(cannot(other)),
        }
    }
}

/// The model without divided rows and sequences; None if neither are divided.
fn undivided(model: &Model) -> Result<Option<Model>> {
    let split = model.tensor_split();
    match model.spec().filter(|_| split.sequence || model.context_split().ranks > 1) {
        Some(spec) => {
            let split = TensorSplit { sequence: false, ..split };
            let undivided = Model::split_over(spec.clone(), split, ContextSplit::WHOLE, model.expert_split())?;
            Ok(Some(undivided.tuned(model.tuning())?))
        }
        None => Ok(None),
    }
}

/// True if an instruction may wait for other ranks: one of the communicating lanes, the norm, or a
/// snapshot. A snapshot waits until all ranks have written the previous one.
fn waits_for_others(instruction: &Instruction) -> bool {
    let lane = instruction.action.lane();
    instruction.bytes > 0 && lane != Lane::HostIo
        || matches!(lane, Lane::Gather | Lane::Reduce)
        || matches!(instruction.action, Action::Clip { .. } | Action::Snapshot)
}

fn cannot(action: Action) -> EngineError {
    EngineError::DoesNotFit(format!("the instruction `{}` cannot be run yet", action.name()))
}
