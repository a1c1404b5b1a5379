//! One rank: parameters, gradients, optimizer and activations, and the execution of programs on them.
//!
//! A rank knows instructions and no strategies. It runs on the CPU and on the meta device alike; on meta the same execution predicts a
//! step's memory and cost.

use crate::lanes::{self, Handler, Span};
use crate::optimizer::{Optimizer, Rates};
use crate::precision::LossScaler;
use crate::state::{GradientState, ParameterState, does_not_fit};
use crate::{EngineError, Result};
use std::collections::BTreeMap;
use std::sync::Mutex;
use trainyard_autograd::{Policy, Recording, Tape, Var};
use trainyard_model::{Batch, Forward, Model};
use trainyard_program::{Action, Instruction, Keep, Lane, Part, Program};
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// Everything that a rank trains.
pub struct Rank {
    device: Device,
    model: Model,
    /// The parameters.
    pub parameters: ParameterState,
    gradients: GradientState,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The loss scale.
    pub scaler: LossScaler,
    seed: u64,
    /// Updates made; skipped steps do not count.
    pub updates: u64,
}

/// What one step is run with.
#[derive(Clone, Copy, Debug)]
pub struct StepSettings {
    /// Which step, from 0; keys the random numbers.
    pub step: u64,
    /// The learning rate as a share of its peak.
    pub rate_factor: f64,
    /// Gradients with a larger norm are scaled down to it.
    pub clip_norm: Option<f64>,
}

/// What one step did.
#[derive(Clone, Debug, Default)]
pub struct StepOutcome {
    /// The mean loss over the step's targets; 0 on meta.
    pub loss: f64,
    /// Tokens in.
    pub tokens: u64,
    /// Targets that counted.
    pub targets: u64,
    /// The global gradient norm before clipping.
    pub gradient_norm: f64,
    /// Whether the update was skipped because the loss or a gradient was not finite.
    pub skipped: bool,
    /// When each instruction waited and ran.
    pub spans: Vec<Span>,
}

/// A forward whose backward is to come.
enum Pending {
    Recorded { recording: Recording, input: Option<Var>, output: Var },
    InputOnly { input: Option<Tensor> },
}

/// What a step carries from instruction to instruction.
struct Step<'p> {
    program: &'p Program,
    settings: StepSettings,
    pending: BTreeMap<(u32, u32), Pending>,
    /// The output of the last unit that ran on each micro-batch.
    outputs: BTreeMap<u32, Tensor>,
    /// The gradient that flows down each micro-batch.
    flowing: BTreeMap<u32, Tensor>,
    loss_sum: f64,
    rates: Rates,
    outcome: StepOutcome,
}

impl Rank {
    /// A rank with freshly initialised parameters.
    pub fn new(
        device: &Device,
        model: Model,
        compute: DType,
        optimizer: crate::config::OptimizerSettings,
        scaler: LossScaler,
        seed: u64,
    ) -> Result<Rank> {
        let parameters = ParameterState::new(device, &model, compute, seed)?;
        let gradients = GradientState::new(device, &model)?;
        let optimizer = Optimizer::new(device, &model, optimizer)?;
        Ok(Rank { device: device.clone(), model, parameters, gradients, optimizer, scaler, seed, updates: 0 })
    }

    /// A rank that evaluates and generates: it has neither gradients nor optimizer state, and must not be trained.
    pub fn for_inference(device: &Device, model: Model, compute: DType) -> Result<Rank> {
        let parameters = ParameterState::zeros(device, &model, compute)?;
        Ok(Rank {
            device: device.clone(),
            model,
            parameters,
            gradients: GradientState::none(),
            optimizer: Optimizer::none(),
            scaler: LossScaler::none(),
            seed: 0,
            updates: 0,
        })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Runs one step. `load` gives the next micro-batch, on the input lane; `snapshot` takes the state after the update, on the
    /// host lane.
    pub fn execute(
        &mut self,
        program: &Program,
        settings: StepSettings,
        mut load: impl FnMut(&Device, &Model) -> Result<Batch> + Send,
        mut snapshot: impl FnMut(&Rank, &StepOutcome) -> Result<()> + Send,
    ) -> Result<StepOutcome> {
        check_runnable(program)?;
        self.gradients.begin_step();
        let step = Mutex::new(Step::new(program, settings));
        let batches: Mutex<Vec<Option<Batch>>> = Mutex::new(vec![None; program.micro_batches as usize]);
        let device = self.device.clone();
        let rank = Mutex::new(self);
        let input: Handler<'_, EngineError> = Box::new(|_, instruction| {
            if let Action::Load { micro_batch } = instruction.action {
                let batch = {
                    // The model is shared with the compute lane, which holds the rank only while an instruction runs; loading
                    // precedes the first of them.
                    let rank = rank.lock().expect("a lane that panics ends the step");
                    load(&device, &rank.model)?
                };
                batches.lock().expect("not poisoned")[micro_batch as usize] = Some(batch);
            }
            Ok(())
        });
        let count: Handler<'_, EngineError> = Box::new(|_, _| {
            let mut step = step.lock().expect("a lane that panics ends the step");
            step.count(&batches.lock().expect("not poisoned"));
            Ok(())
        });
        let host: Handler<'_, EngineError> = Box::new(|_, instruction| {
            if instruction.action == Action::Snapshot {
                let step = step.lock().expect("a lane that panics ends the step");
                snapshot(&rank.lock().expect("a lane that panics ends the step"), &step.outcome)?;
            }
            Ok(())
        });
        let spans = lanes::run(
            program,
            vec![(Lane::Input, input), (Lane::Reduce, count), (Lane::HostIo, host)],
            |_, instruction| {
                let mut rank = rank.lock().expect("a lane that panics ends the step");
                let mut step = step.lock().expect("a lane that panics ends the step");
                rank.compute(instruction, &mut step, &batches)
            },
        )?;
        let mut outcome = step.into_inner().expect("no lane panicked").outcome;
        outcome.spans = spans;
        Ok(outcome)
    }

    fn compute(
        &mut self,
        instruction: &Instruction,
        step: &mut Step<'_>,
        batches: &Mutex<Vec<Option<Batch>>>,
    ) -> Result<()> {
        match instruction.action {
            Action::Forward { unit, micro_batch, keep } => {
                let batches = batches.lock().expect("not poisoned");
                let batch = batches[micro_batch as usize].as_ref().expect("the program loads before it uses");
                self.forward(step, unit, micro_batch, keep, batch)
            }
            Action::Backward { unit, micro_batch, .. } => {
                let batches = batches.lock().expect("not poisoned");
                let batch = batches[micro_batch as usize].as_ref().expect("the program loads before it uses");
                self.backward(step, unit, micro_batch, batch)
            }
            Action::Clip => self.clip(step),
            Action::Update { unit } => self.update(step, unit),
            other => Err(cannot_run(other)),
        }
    }

    fn forward(&mut self, step: &mut Step<'_>, unit: u32, micro_batch: u32, keep: Keep, batch: &Batch) -> Result<()> {
        let input = step.outputs.remove(&micro_batch);
        let policy = match keep {
            Keep::Everything => Policy::Everything,
            Keep::Selective => Policy::Selective,
            Keep::InputOnly => Policy::Nothing,
        };
        let kept = (keep == Keep::InputOnly).then(|| input.clone());
        let (recording, input, output) = self.run(step, unit, micro_batch, batch, input, policy)?;
        if step.is_last(unit) {
            step.loss_sum += self.read_loss(&output)?;
        } else {
            step.outputs.insert(micro_batch, output.tensor().clone());
        }
        let pending = match kept {
            Some(input) => Pending::InputOnly { input },
            None => Pending::Recorded { recording, input, output },
        };
        step.pending.insert((unit, micro_batch), pending);
        Ok(())
    }

    /// Runs a unit's forward on a new tape.
    fn run(
        &mut self,
        step: &Step<'_>,
        unit: u32,
        micro_batch: u32,
        batch: &Batch,
        input: Option<Tensor>,
        policy: Policy,
    ) -> Result<(Recording, Option<Var>, Var)> {
        // Micro-batches draw different numbers, and a forward that is repeated draws the same.
        let seed = self.seed ^ (u64::from(micro_batch)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let key = RandomKey { seed, step: step.settings.step as u32, site: unit };
        let mut tape = Tape::new(&self.device, &self.parameters, policy, key);
        if step.is_last(unit) {
            tape = tape.with_gradients(&mut self.gradients);
        }
        let input = input.map(|tensor| tape.leaf(tensor));
        let scale = self.scaler.scale() / step.outcome.targets.max(1) as f64;
        let mut cx = Forward::training(batch, scale as f32);
        let output = self.model.units()[unit as usize].forward(&mut tape, &mut cx, input.as_ref())?;
        Ok((tape.finish(), input, output))
    }

    fn backward(&mut self, step: &mut Step<'_>, unit: u32, micro_batch: u32, batch: &Batch) -> Result<()> {
        let pending = step.pending.remove(&(unit, micro_batch)).expect("the program runs forward before backward");
        let (recording, input, output) = match pending {
            Pending::Recorded { recording, input, output } => (recording, input, output),
            Pending::InputOnly { input } => self.run(step, unit, micro_batch, batch, input, Policy::Everything)?,
        };
        let gradient = match step.flowing.remove(&micro_batch) {
            Some(gradient) => gradient,
            None => self.device.tensor([], &[1.0f32], Purpose::Activations)?,
        };
        let inputs: Vec<&Var> = input.iter().collect();
        let mut gradients =
            recording.backward(&[(&output, gradient)], &inputs, &self.parameters, &mut self.gradients)?;
        if let Some(Some(gradient)) = gradients.pop() {
            step.flowing.insert(micro_batch, gradient);
        }
        Ok(())
    }

    fn clip(&mut self, step: &mut Step<'_>) -> Result<()> {
        self.gradients.end_backward()?;
        let scale = self.scaler.scale();
        let norm = self.gradients.sum_of_squares()?.sqrt() / scale;
        let outcome = &mut step.outcome;
        outcome.loss = step.loss_sum / scale;
        outcome.gradient_norm = norm;
        let finite = norm.is_finite() && outcome.loss.is_finite();
        outcome.skipped = !finite;
        self.scaler.update(finite);
        let clip = match step.settings.clip_norm {
            Some(limit) if norm > limit => limit / norm,
            _ => 1.0,
        };
        if finite {
            self.updates += 1;
        }
        step.rates = Rates {
            factor: step.settings.rate_factor,
            gradient_scale: (clip / scale) as f32,
            update: self.updates.max(1),
        };
        Ok(())
    }

    fn update(&mut self, step: &Step<'_>, unit: u32) -> Result<()> {
        if step.outcome.skipped {
            return Ok(());
        }
        self.optimizer.update(unit as usize, &mut self.parameters, &self.gradients, step.rates)
    }

    fn read_loss(&self, output: &Var) -> Result<f64> {
        if self.device.is_meta() { Ok(0.0) } else { Ok(f64::from(output.tensor().to_scalar()?)) }
    }
}

/// Refuses programs with instructions that this engine does not run.
fn check_runnable(program: &Program) -> Result<()> {
    let runs = |action: Action| match action {
        Action::Load { .. } | Action::Count | Action::Forward { .. } | Action::Clip | Action::Update { .. } => true,
        Action::Backward { part, .. } => part == Part::Whole,
        Action::Snapshot => true,
        _ => false,
    };
    match program.instructions.iter().map(|instruction| instruction.action).find(|action| !runs(*action)) {
        Some(action) => Err(cannot_run(action)),
        None => Ok(()),
    }
}

fn cannot_run(action: Action) -> EngineError {
    does_not_fit(format!(
        "the step program has a `{}` instruction on the {} lane, which the engine cannot run yet",
        action.name(),
        action.lane().name()
    ))
}

impl<'p> Step<'p> {
    fn new(program: &'p Program, settings: StepSettings) -> Step<'p> {
        Step {
            program,
            settings,
            pending: BTreeMap::new(),
            outputs: BTreeMap::new(),
            flowing: BTreeMap::new(),
            loss_sum: 0.0,
            rates: Rates { factor: 0.0, gradient_scale: 0.0, update: 1 },
            outcome: StepOutcome::default(),
        }
    }

    fn is_last(&self, unit: u32) -> bool {
        unit as usize + 1 == self.program.units.len()
    }

    /// The loss is a mean over the targets of all micro-batches, so that accumulation gives what the large batch gives.
    fn count(&mut self, batches: &[Option<Batch>]) {
        for batch in batches.iter().flatten() {
            self.outcome.tokens += batch.len() as u64;
            self.outcome.targets += batch.counted as u64;
        }
    }
}
