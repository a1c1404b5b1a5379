//! One rank: parameters, gradients, optimizer and activations, and the execution of programs on
//! them.
//!
//! A rank knows instructions and no strategies. It runs on the CPU and on the meta device alike; on
//! meta the same execution predicts a step's memory and cost. Its lanes share it without a lock
//! around the whole: each works on units that the program's dependencies make its own for that
//! time, and talks to other ranks through links that no other lane has.

mod events;
mod graphs;
mod ledger;
mod offload;
mod offloaded_activations;
mod step;

pub use graphs::{kept, stretch};
pub use step::{Launches, StepOutcome, StepSettings};

use crate::collectives::Way;
use crate::config::OptimizerSettings;
use crate::faults::Faults;
use crate::fp8::{AmaxHistory, Fp8Settings, Fp8State};
use crate::lanes::{self, Handler};
use crate::links::{ComputeLinks, GatherLinks, Links, ReduceLinks};
use crate::optimizer::Optimizer;
use crate::positions::{Doing, Positions};
use crate::precision::LossScaler;
use crate::state::{GradientState, Holding, ParameterState, initialise, lock};
use crate::tier::Tiers;
use crate::{EngineError, Result};
use events::Events;
use graphs::Graphs;
use std::sync::{Arc, Mutex};
use step::RunningStep;
use trainyard_autograd::{Tape, Var};
use trainyard_comm::{Communicator, Position};
use trainyard_model::{Batch, Forward, Model, Passage};
use trainyard_program::{Action, Axis, Instruction, Lane, Program};
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::device::{enter_lane, tag_calls};
use trainyard_tensor::{Computes, DType, Device};

/// Everything that a rank trains.
pub struct Rank {
    device: Device,
    model: Model,
    /// The parameters.
    pub parameters: ParameterState,
    gradients: GradientState,
    pub(crate) optimizer: Optimizer,
    tiers: Tiers,
    core: Mutex<Core>,
    gather_links: Mutex<GatherLinks>,
    reduce_links: Mutex<ReduceLinks>,
    compute_links: Mutex<ComputeLinks>,
    alarm: Option<Communicator>,
    /// Whether its device exchanges by itself, so that an exchange may fail after the host has done
    /// its part.
    by_nccl: bool,
    positions: Arc<Positions>,
    faults: Option<Arc<Faults>>,
    reduce_dtype: DType,
    seed: u64,
    /// None: every kernel is launched by itself.
    graphs: Option<Graphs>,
    /// The scales of products of eight bits; None: there are none.
    fp8: Option<Mutex<Fp8State>>,
}

/// What updates change beside parameters.
pub struct Core {
    /// The loss scale.
    pub scaler: LossScaler,
    /// Updates made; skipped steps do not count.
    pub updates: u64,
}

/// How a rank trains.
#[derive(Clone, Copy, Debug)]
pub struct RankSettings {
    /// Whose kernels run it: what a prediction takes scratch for.
    pub computes: Computes,
    /// What forward and backward compute in.
    pub compute: DType,
    /// How products of the blocks round their operands to eight bits; None: they do not.
    pub fp8: Option<Fp8Settings>,
    /// What gradients are rounded to on their way between ranks: f32 or bf16.
    pub reduce: DType,
    /// How tensors go from rank to rank: what a prediction takes memory for.
    pub way: Way,
    /// The update rule.
    pub optimizer: OptimizerSettings,
    /// The loss scale at the start.
    pub scaler: LossScaler,
    /// Of initial values and of dropout.
    pub seed: u64,
    /// Whether a GPU's launches are captured and replayed where they can be.
    pub graphs: bool,
}

impl Rank {
    /// A rank with freshly initialised parameters, of which it holds what `holding` says and talks
    /// to others through `links`. All ranks are made together.
    pub fn new(device: &Device, model: Model, holding: Holding, links: Links, settings: &RankSettings) -> Result<Rank> {
        Rank::with_tiers(device, model, holding, Tiers::default(), links, settings)
    }

    /// As [`Rank::new`], with the state that `tiers` take away from the device.
    pub fn with_tiers(
        device: &Device,
        model: Model,
        holding: Holding,
        tiers: Tiers,
        mut links: Links,
        settings: &RankSettings,
    ) -> Result<Rank> {
        links.reduce.stage(device, &model, &holding, settings.reduce)?;
        let parameters = ParameterState::zeros(device, &model, holding, settings.compute, &tiers)?;
        let optimizer = Optimizer::new(device, &model, &holding, settings.compute, settings.optimizer, &tiers)?;
        let gradients = GradientState::new(device, &model, holding, &tiers)?;
        let fp8 = settings.fp8.map(|fp8| Fp8State::new(device, &model, fp8)).transpose()?;
        let core = Core { scaler: settings.scaler, updates: 0 };
        let (reduce_dtype, seed) = (settings.reduce, settings.seed);
        let mut rank =
            Rank::assemble(device, model, parameters, gradients, (optimizer, tiers), core, links, reduce_dtype, seed);
        rank.graphs = settings.graphs.then(Graphs::default);
        rank.fp8 = fp8.map(Mutex::new);
        rank.initialise()?;
        Ok(rank)
    }

    /// Initial values: each a function of (seed, unit, index, element), so that a shard has the
    /// values of the whole.
    fn initialise(&mut self) -> Result<()> {
        let specs: std::collections::BTreeMap<_, _> =
            self.model.parameters().map(|(id, spec)| (id, spec.init)).collect();
        let seed = self.seed;
        self.set_masters(|id, range, values| {
            let site = (id.unit << 16) | id.index;
            initialise(values, specs[&id], range.start, RandomKey { seed, step: RandomKey::INIT, site })
        })
    }

    /// A rank that evaluates and generates: it has neither gradients nor optimizer state, and must
    /// not be trained.
    pub fn for_inference(device: &Device, model: Model, compute: DType) -> Result<Rank> {
        let tiers = Tiers::default();
        let parameters = ParameterState::zeros(device, &model, Holding::whole(), compute, &tiers)?;
        let core = Core { scaler: LossScaler::none(), updates: 0 };
        let state = (Optimizer::none(device), tiers);
        let gradients = GradientState::none(device);
        Ok(Rank::assemble(device, model, parameters, gradients, state, core, Links::default(), DType::F32, 0))
    }

    fn assemble(
        device: &Device,
        model: Model,
        parameters: ParameterState,
        gradients: GradientState,
        (optimizer, tiers): (Optimizer, Tiers),
        core: Core,
        links: Links,
        reduce_dtype: DType,
        seed: u64,
    ) -> Rank {
        Rank {
            device: device.clone(),
            model,
            parameters,
            gradients,
            optimizer,
            tiers,
            core: Mutex::new(core),
            gather_links: Mutex::new(links.gather),
            reduce_links: Mutex::new(links.reduce),
            compute_links: Mutex::new(links.compute),
            alarm: links.alarm,
            by_nccl: links.by_nccl,
            positions: links.positions,
            faults: None,
            reduce_dtype,
            seed,
            graphs: None,
            fp8: None,
        }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where its lanes are.
    pub fn positions(&self) -> Arc<Positions> {
        Arc::clone(&self.positions)
    }

    /// Lets faults strike its instructions. For tests.
    pub fn inject(&mut self, faults: Arc<Faults>) {
        self.faults = Some(faults);
    }

    /// Updates made.
    pub fn updates(&self) -> u64 {
        lock(&self.core).updates
    }

    /// The loss scale.
    pub fn scaler(&self) -> LossScaler {
        lock(&self.core).scaler
    }

    /// The loss scale and the counters, to be saved or restored.
    pub fn core<T>(&self, with: impl FnOnce(&mut Core) -> T) -> T {
        with(&mut lock(&self.core))
    }

    /// The largest magnitudes of earlier steps, to be saved; None without products of eight bits.
    pub fn amax_history(&self) -> Option<AmaxHistory> {
        self.fp8.as_ref().map(|fp8| lock(fp8).history())
    }

    /// Whether products are to have operands of eight bits, and the next step only finds out by
    /// what to scale them.
    pub fn measures_fp8(&self) -> bool {
        self.fp8.as_ref().is_some_and(|fp8| lock(fp8).measures())
    }

    /// Goes on with the largest magnitudes of a checkpoint, where products have operands of eight
    /// bits.
    ///
    /// # Errors
    /// Those of another model.
    pub fn restore_amax_history(&mut self, history: AmaxHistory) -> Result<()> {
        self.fp8.as_ref().map_or(Ok(()), |fp8| lock(fp8).restore(history))
    }

    /// Writes every compute copy anew, after masters were changed from outside. All ranks do this
    /// together.
    pub fn refresh_copies(&mut self) -> Result<()> {
        self.parameters.refresh_copies(&lock(&self.compute_links).shard)
    }

    /// Runs every unit on one tape, each gathered while it is needed where parameters are sharded:
    /// evaluation and generation. All ranks of a shard group do this together, each on what it has.
    pub fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>) -> Result<Var> {
        if !self.parameters.is_sharded() && !self.parameters.is_offloaded() {
            return Ok(self.model.forward(tape, cx)?);
        }
        let links = lock(&self.compute_links);
        self.model.forward_by_unit(tape, cx, |unit, passage| {
            self.reads(unit).try_for_each(|unit| match passage {
                Passage::Enter => self.bring_whole(unit, &links.shard),
                Passage::Leave => self.let_go(unit),
            })
        })
    }

    /// The units whose parameters `unit` reads.
    fn reads(&self, unit: usize) -> impl Iterator<Item = usize> {
        let borrowed = self.model.units()[unit].borrowed().iter().map(|id| id.unit as usize);
        [unit].into_iter().chain(borrowed)
    }

    /// Takes part in a forward of the shard group without a batch of its own: gathers what the
    /// others gather.
    pub fn forward_nothing(&self) -> Result<()> {
        if !self.parameters.is_sharded() {
            return Ok(());
        }
        let links = lock(&self.compute_links);
        for unit in (0..self.model.units().len()).flat_map(|unit| self.reads(unit)) {
            self.bring_whole(unit, &links.shard)?;
            self.let_go(unit)?;
        }
        Ok(())
    }

    /// Which of the ranks with different data this is, and how many there are.
    pub fn data_place(&self) -> (usize, usize) {
        let links = lock(&self.compute_links);
        (links.data.index(), links.data.size())
    }

    /// Which of the ranks that hold the same this is, and how many there are.
    pub fn replica(&self) -> (usize, usize) {
        let links = lock(&self.reduce_links);
        (links.replicate.index(), links.replicate.size())
    }

    /// Every data rank's numbers, in order of the ranks. All of them call this together.
    pub fn gather_numbers(&self, own: &[f64]) -> Result<Vec<f64>> {
        lock(&self.compute_links).data.all_gather_numbers(own)
    }

    /// Runs one step. `load` gives the next micro-batch, on the input lane; `snapshot` takes the
    /// state after the update, on the host lane.
    ///
    /// # Errors
    /// The first of any lane, with this rank and the instruction where it is about the exchange
    /// with other ranks.
    pub fn execute(
        &mut self,
        program: &Program,
        settings: StepSettings,
        mut load: impl FnMut(&Device, &Model) -> Result<Batch> + Send,
        mut snapshot: impl FnMut(&Rank, &StepOutcome) -> Result<()> + Send,
    ) -> Result<StepOutcome> {
        let rank: &Rank = self;
        rank.gradients.begin_step();
        let step = &RunningStep::new(program, settings);
        let first = lock(step.ledger()).start();
        rank.take_for(&first, step)?;
        let events = &Events::new(&rank.device, program)?;
        let perform = |number: usize, instruction: &Instruction, body: &mut dyn FnMut(&Position) -> Result<()>| {
            tag_calls(number as u32);
            let what = describe(program, instruction);
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
                    // What was moved to the host is read there.
                    rank.device.synchronize()?;
                    snapshot(rank, &step.outcome())
                }
                other => rank.move_state(other, step),
            })
        });
        let gather: Handler<'_, EngineError> = Box::new(|number, instruction| {
            perform(number, instruction, &mut |at| {
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
        let handlers = vec![(Lane::Input, input), (Lane::HostIo, host), (Lane::Gather, gather), (Lane::Reduce, reduce)];
        let runs = |lane: &Lane| *lane == Lane::Compute || handlers.iter().any(|(handled, _)| handled == lane);
        if let Some(lane) = program.lanes().find(|lane| !runs(lane)) {
            let first = program.on_lane(lane).next().expect("a lane of the program has instructions");
            return Err(cannot(program.instructions[first].action));
        }
        let one = |number: usize, instruction: &Instruction| {
            perform(number, instruction, &mut |at| {
                rank.gradients.give_back(step.reductions_done(&instruction.after));
                rank.before(step, instruction)?;
                if instruction.action == Action::Clip {
                    lock(&rank.compute_links).post(at);
                }
                rank.compute(instruction, step)?;
                rank.after(step, number)
            })
        };
        let graphs = rank.graphs.as_ref().filter(|_| rank.device.as_cuda().is_some());
        let stretch = graphs.and_then(|graphs| Some((graphs, stretch(program).ok()?)));
        let compute = |number: usize, instruction: &Instruction| match &stretch {
            Some((graphs, stretch)) if stretch.contains(&number) => {
                // All of it comes with its first instruction.
                if number > stretch.start {
                    return Ok(());
                }
                let all = || stretch.clone().try_for_each(|number| one(number, &program.instructions[number]));
                graphs.run(rank, step, stretch, events, &all)
            }
            _ => one(number, instruction),
        };
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
        // What came over the wire when the others had failed is worth nothing, and what the device
        // then says of itself is no news.
        if let Some(source) = rank.alarm.as_ref().filter(|_| rank.by_nccl).and_then(Communicator::failure) {
            let what = "the end of the step".to_owned();
            return Err(EngineError::Exchange { rank: program.rank, step: settings.step, what, source });
        }
        let spans = ended?;
        let mut outcome = step.outcome();
        outcome.take_times(program, spans);
        Ok(outcome)
    }

    /// Runs one instruction, keeping note of where the lane is and letting a fault strike that is
    /// due.
    fn perform(
        &self,
        program: &Program,
        instruction: &Instruction,
        at: &Position,
        body: &mut dyn FnMut(&Position) -> Result<()>,
    ) -> Result<()> {
        let lane = instruction.action.lane();
        self.positions.enter(lane, at);
        let struck = self.faults.as_ref().map_or(Ok(()), |f| f.strike(program.rank, at, self.alarm.as_ref()));
        if program.mesh.ranks() > 1 && waits_for_others(instruction) {
            self.positions.now(lane, Doing::Exchanging);
        }
        let result = struck.and_then(|()| body(at));
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

    /// That a lane panicked, and where those were that had not finished.
    fn panicked(&self) -> String {
        let busy = |doing| matches!(doing, Doing::Running | Doing::Exchanging);
        let lanes = self.positions.lanes().into_iter().filter(|(_, at)| busy(at.doing));
        let lanes: Vec<String> = lanes.map(|(lane, at)| format!("lane {} {at}", lane.name())).collect();
        format!("a lane panicked: {}", lanes.join("; "))
    }

    fn gather(&self, instruction: &Instruction, links: &GatherLinks) -> Result<()> {
        match instruction.action {
            Action::Gather { unit, over } => self.parameters.gather(unit as usize, over as usize, links.over(over)),
            // The compute lane gives back the memory when it has finished what used it.
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
            Action::Count => step.count(&links.data),
            Action::Reduce { unit, accumulate } => {
                self.gradients.reduce(unit as usize, number as u32, accumulate, self.reduce_dtype, links)
            }
            other => Err(cannot(other)),
        }
    }
}

/// Which of the data ranks this is: its micro-batches follow those of the ranks before it.
fn data_index(program: &Program) -> u64 {
    u64::from(program.mesh.group(program.rank, Axis::Data).index)
}

/// Whether an instruction may have to wait for other ranks: those of the communicating lanes, the
/// norm, and a snapshot, which waits for all ranks to have written the one before.
fn waits_for_others(instruction: &Instruction) -> bool {
    let lane = instruction.action.lane();
    instruction.bytes > 0 && lane != Lane::HostIo
        || matches!(lane, Lane::Gather | Lane::Reduce)
        || matches!(instruction.action, Action::Clip | Action::Snapshot)
}

/// The instruction in words.
fn describe(program: &Program, instruction: &Instruction) -> String {
    let action = instruction.action;
    let unit = action.unit().and_then(|unit| program.units.get(unit as usize));
    [Some(action.name()), unit.map(String::as_str)].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn cannot(action: Action) -> EngineError {
    EngineError::DoesNotFit(format!("the instruction `{}` cannot be run yet", action.name()))
}
