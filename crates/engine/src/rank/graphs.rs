//! CUDA graphs of a step's forwards and backwards. A graph replaces thousands of kernel launches by
//! one.
//!
//! The graph covers one stretch of the compute lane, from the loaded batches to the norm. This
//! stretch depends on shapes alone. The norm, the decision to skip the step, the update and all
//! other lanes stay outside.
//!
//! Three kinds of steps follow each other:
//!
//! 1. *Rehearsed*: the stretch is launched kernel by kernel, in an arena that then owns all the
//!    memory it needs. Everything that happens only once happens here: kernels are loaded,
//!    algorithms of products are measured, tables are copied to the device.
//! 2. *Captured*: a second step of the same shapes is captured as a graph, which is then launched.
//! 3. *Replayed*: each later step overwrites the graph's batches, writes the step's number and the
//!    loss scale into memory that kernels read, and launches the graph. It then sets the host's
//!    state (gradients, losses, events) to that after the captured step.
//!
//! A step of other shapes drops the graph and rehearses again. If a capture fails, nothing has run
//! yet, so the stretch is launched kernel by kernel, and no other capture is tried. The user is
//! told of both.

use super::Rank;
use super::events::{Ends, Events};
use super::step::{Launches, RunningStep};
use crate::Result;
use crate::state::{AfterBackward, lock};
use std::ops::Range;
use std::sync::Mutex;
use trainyard_model::{Batch, BatchShape, Model};
use trainyard_program::{Action, Instruction, Lane, Program};
use trainyard_tensor::cuda::graph::{Graph, Varying};
use trainyard_tensor::ops::Segments;
use trainyard_tensor::pool::{Arena, Held};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// The range of instructions of a `model`'s `program` to capture: all forwards and backwards of a
/// step.
///
/// # Errors
/// The reason why they cannot be captured, in words: for example, other lanes work between them.
pub fn stretch(program: &Program, model: &Model) -> Result<Range<usize>, String> {
    if let Some(spec) = model.spec() {
        for (has, why) in [
            (spec.experts.is_some(), "each forward notes for the host how its tokens chose experts"),
            (spec.encoder.is_some(), "each block brings the distances of its batch's sequences to the GPU"),
            (spec.image.is_some(), "the host waits for a check of the classes of each batch"),
        ] {
            if has {
                return Err(why.to_owned());
            }
        }
    }
    let ranks = program.mesh.ranks();
    if ranks > 1 {
        return Err(format!("{ranks} ranks exchange between its forwards and backwards"));
    }
    let instructions = &program.instructions;
    let is_pass =
        |action: &Action| matches!(action, Action::Forward { .. } | Action::Backward { .. } | Action::Fold { .. });
    // The compute lane allocates and frees memory for all other instructions.
    let is_else = |one: &&Instruction| {
        let known = matches!(
            one.action,
            Action::Load { .. } | Action::Count { .. } | Action::Clip { .. } | Action::Update { .. }
        );
        !known && !is_pass(&one.action) && one.action != Action::Snapshot
    };
    if let Some(other) = instructions.iter().find(is_else) {
        let (name, lane) = (other.action.name(), other.action.lane().name());
        return Err(format!("lane {lane} has `{name}`, and what comes and goes in a step has no fixed place"));
    }
    let first = instructions.iter().position(|one| is_pass(&one.action)).ok_or("it has no forward")?;
    let count = instructions[first..].iter().take_while(|one| is_pass(&one.action)).count();
    let stretch = first..first + count;
    let rest = &instructions[stretch.end..];
    if rest.iter().any(|one| is_pass(&one.action)) {
        return Err("its forwards and backwards do not come one after the other".to_owned());
    }
    let waits = |one: &Instruction| {
        one.action.lane() != Lane::Compute && one.after.iter().any(|on| stretch.contains(&(*on as usize)))
    };
    match rest.iter().find(|one| waits(one)) {
        Some(other) => Err(format!("`{}` waits for a part of it", other.action.name())),
        None => Ok(stretch),
    }
}

/// Allocates the tensors that a graph of this shape keeps on the device beside its work's memory:
/// the batches that it reads, and the values that vary from step to step.
///
/// # Errors
/// Those of the device.
pub fn kept(device: &Device, shape: &BatchShape, micro_batches: u32) -> Result<(Vec<Batch>, Tensor)> {
    let batch = |_| -> Result<Batch> {
        let batch = shape.batch(device)?;
        batch.segments.bring_to(device)?;
        Ok(batch)
    };
    let batches = (0..micro_batches).map(batch).collect::<Result<_>>()?;
    Ok((batches, device.empty([2], DType::U32, Purpose::Data)?))
}

/// The properties that a step must share with a graph's step to be run by that graph.
#[derive(Clone, PartialEq)]
struct Key {
    /// Tokens of each micro-batch.
    tokens: Vec<usize>,
    /// End of the positions that the step may use. A power of two, because tables grow by doubling.
    reach: usize,
    instructions: Vec<Instruction>,
    /// The period of a schedule of freezing, which says whose gradients are computed.
    period: Option<u32>,
    /// True if 8-bit products only measure magnitudes.
    measures: bool,
    /// Identities of the buffers of parameters and gradients.
    state: Vec<usize>,
}

impl Key {
    fn of(rank: &Rank, step: &RunningStep<'_>, stretch: &Range<usize>) -> Key {
        let batches = step.batches();
        let gradients = rank.gradients.residents();
        Key {
            tokens: batches.iter().map(Batch::len).collect(),
            reach: batches.iter().map(|batch| batch.positions_end.next_power_of_two()).max().unwrap_or(0),
            instructions: step.program().instructions[stretch.clone()].to_vec(),
            period: step.program().period,
            measures: rank.measures_fp8(),
            state: rank.parameters.buffers().chain(gradients.iter().map(Tensor::buffer_id)).collect(),
        }
    }

    /// Describes the difference between a step and the graph's.
    fn difference(&self, other: &Key) -> String {
        if self.tokens != other.tokens {
            return format!("its micro-batches have {:?} tokens, the graph's {:?}", other.tokens, self.tokens);
        }
        if self.reach != other.reach {
            return format!("its positions reach up to {}, the graph's to {}", other.reach, self.reach);
        }
        if self.period != other.period {
            return "other parameters are trained from here on".to_owned();
        }
        if self.measures != other.measures {
            return "products have operands of eight bits from here on".to_owned();
        }
        let what =
            if self.instructions != other.instructions { "its instructions are others" } else { "the state has moved" };
        what.to_owned()
    }
}

/// A rank's graph, if it has one.
#[derive(Default)]
pub(super) struct Graphs(Mutex<State>);

#[derive(Default)]
enum State {
    #[default]
    Nothing,
    /// A step of these shapes ran in the arena.
    Rehearsed(Key, Arena),
    Captured(Box<Captured>),
    /// Capturing failed, which was said; it is not tried again.
    Refused,
}

/// A captured stretch. Fields are dropped in this order: the graph waits for its launches before
/// its memory is freed.
struct Captured {
    key: Key,
    graph: Graph,
    /// The batches that it reads, and the segments of each that are on the device.
    batches: Vec<(Batch, Segments)>,
    losses: Vec<Option<Tensor>>,
    gradients: Vec<AfterBackward>,
    events: Vec<Ends>,
    held: Held,
    arena: Arena,
}

impl Graphs {
    /// Runs the stretch by graph or kernel by kernel. `all` launches its instructions one by one.
    pub fn run(
        &self,
        rank: &Rank,
        step: &RunningStep<'_>,
        stretch: &Range<usize>,
        events: &Events<'_>,
        all: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        if rank.device.times_calls() {
            // A timed call is waited for, which a capture cannot do.
            return all();
        }
        let key = Key::of(rank, step, stretch);
        let mut state = lock(&self.0);
        let (next, launches, note) = match std::mem::take(&mut *state) {
            State::Captured(mut captured) if captured.key == key => {
                captured.replay(rank, step, stretch, events)?;
                (State::Captured(captured), Launches::Replayed, None)
            }
            State::Rehearsed(rehearsed, arena) if rehearsed == key => {
                match Captured::new(rank, step, stretch, events, all, key, arena)? {
                    Ok(captured) => {
                        let note = captured.describe();
                        (State::Captured(captured), Launches::Captured, Some(note))
                    }
                    Err(why) => {
                        all()?;
                        let note =
                            format!("steps are launched kernel by kernel from here on, not as a CUDA graph: {why}");
                        (State::Refused, Launches::OneByOne, Some(note))
                    }
                }
            }
            State::Refused => {
                all()?;
                (State::Refused, Launches::OneByOne, None)
            }
            before => {
                let note = before.given_up_for(&key);
                // The new arena needs its memory.
                drop(before);
                let arena = rank.device.pool().arena();
                arena.within(false, all)?;
                (State::Rehearsed(key, arena), Launches::OneByOne, note)
            }
        };
        *state = next;
        step.set_launches(launches, note);
        Ok(())
    }
}

impl State {
    fn given_up_for(&self, key: &Key) -> Option<String> {
        let State::Captured(captured) = self else { return None };
        let why = captured.key.difference(key);
        Some(format!(
            "this step does not go by the CUDA graph, which is given up: {why}; another is captured when two steps in a row have the same shapes"
        ))
    }
}

/// The values that vary from step to step.
fn varying(rank: &Rank, step: &RunningStep<'_>) -> Varying {
    Varying { step: step.settings().step as u32, scale: rank.loss_scale(step) }
}

impl Captured {
    /// Captures the stretch and launches it. The inner error says why it could not be captured;
    /// nothing has run then.
    fn new(
        rank: &Rank,
        step: &RunningStep<'_>,
        stretch: &Range<usize>,
        events: &Events<'_>,
        all: &dyn Fn() -> Result<()>,
        key: Key,
        arena: Arena,
    ) -> Result<Result<Box<Captured>, String>> {
        let device = &rank.device;
        events.wait_before_all(step.program(), stretch)?;
        let own = step.batches();
        for batch in &own {
            batch.segments.bring_to(device)?;
        }
        // The model reads `positions_end` while it is captured, so it must hold for every step of
        // this graph.
        let bounded = |batch: &Batch| Batch { positions_end: key.reach, ..batch.clone() };
        step.set_batches(own.iter().map(bounded).collect());
        let capture = device.begin_capture(varying(rank, step))?;
        events.set_captured(true);
        let ran = arena.within(true, all);
        events.set_captured(false);
        let captured = match ran {
            Ok(((), held)) => capture.end().map(|graph| (graph, held)).map_err(|error| error.to_string()),
            Err(error) => {
                drop(capture);
                Err(error.to_string())
            }
        };
        let (graph, held) = match captured {
            Ok(captured) => captured,
            Err(why) => {
                rank.gradients.begin_step();
                step.forget_passes();
                step.set_batches(own);
                return Ok(Err(why));
            }
        };
        graph.launch(varying(rank, step))?;
        let batches = own.into_iter().map(|batch| (batch.clone(), batch.segments)).collect();
        let (losses, gradients, events) = (step.losses(), rank.gradients.stand(), events.of(stretch));
        Ok(Ok(Box::new(Captured { key, graph, batches, losses, gradients, events, held, arena })))
    }

    /// Launches the graph for the batches of `step`.
    fn replay(
        &mut self,
        rank: &Rank,
        step: &RunningStep<'_>,
        stretch: &Range<usize>,
        events: &Events<'_>,
    ) -> Result<()> {
        events.wait_before_all(step.program(), stretch)?;
        for ((batch, shown), new) in self.batches.iter_mut().zip(step.batches()) {
            batch.overwrite(&new, shown)?;
        }
        step.set_batches(Vec::new());
        self.graph.launch(varying(rank, step))?;
        self.arena.repeat(&self.held);
        step.set_losses(&self.losses);
        rank.gradients.stand_at(&self.gradients);
        events.set(stretch, &self.events);
        Ok(())
    }

    fn describe(&self) -> String {
        format!(
            "{} instructions of a step, its forwards and backwards, are launched as one CUDA graph from here on; norm and update are not in it",
            self.events.len()
        )
    }
}
