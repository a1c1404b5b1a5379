//! Forwards and backwards: the segments of units on the compute lane.
//!
//! A unit that is split over a tensor-parallel group is a chain of segments with exchanges between
//! them. Every other unit is a chain of one segment, which takes the unit's input and gives its
//! output. Each segment of each micro-batch is recorded on a tape of its own.

use super::step::RunningStep;
use super::{Rank, exchanges};
use crate::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use trainyard_autograd::{Deferred, Place, Policy, Recording, Tape, Var};
use trainyard_model::{Forward, RoutingLog};
use trainyard_program::{BackwardPart, Change, Keep, Phase, Program, SegmentShape, SplitShape, ValueShape};
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::{Purpose, Tensor};

/// A unit and a micro-batch.
type Run = (u32, u32);

/// A segment of a unit on a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct At {
    pub unit: u32,
    pub micro_batch: u32,
    pub segment: u32,
}

impl At {
    fn run(self) -> Run {
        (self.unit, self.micro_batch)
    }

    /// A value of the same unit on the same micro-batch.
    fn value(self, value: u32) -> (Run, u32) {
        (self.run(), value)
    }
}

/// A forward whose backward has not run yet, or whose weights have not been differentiated yet.
enum Pending {
    Recorded { recording: Recording, takes: Vec<Place>, gives: Vec<Place> },
    Weights(Deferred),
}

/// The state of forwards and backwards between instructions.
#[derive(Default)]
pub(super) struct Passes {
    pending: BTreeMap<At, Pending>,
    /// The inputs of units that keep nothing else; None if the unit has none, or if it is
    /// offloaded.
    kept_inputs: BTreeMap<Run, Option<Tensor>>,
    /// Outputs that the next unit has not read yet.
    outputs: BTreeMap<Run, Tensor>,
    /// The gradients of outputs that the backward of their unit has not read yet.
    flowing: BTreeMap<Run, Tensor>,
    /// Values between the segments of a unit, and their gradients.
    values: BTreeMap<(Run, u32), Tensor>,
    gradients: BTreeMap<(Run, u32), Tensor>,
    /// Number of random functions in the segments so far.
    sites: BTreeMap<Run, u32>,
    /// Units whose forward runs again for their backward.
    again: BTreeSet<Run>,
    /// Per segment, the number of its activations that are offloaded.
    away: BTreeMap<Run, Vec<(u32, usize)>>,
    /// The ways of tokens through mixtures of experts, each forward counted once.
    pub routing: RoutingLog,
}

/// The inside of a unit that runs as a whole: one segment. The first unit has no input.
static WHOLE: LazyLock<[SplitShape; 2]> = LazyLock::new(|| [whole(true), whole(false)]);

fn whole(first: bool) -> SplitShape {
    let value = |name: &str| ValueShape { name: name.to_owned(), ..ValueShape::default() };
    let names: &[&str] = if first { &["y"] } else { &["x", "y"] };
    let output = names.len() as u32 - 1;
    let takes: Vec<u32> = (0..output).collect();
    let name = "whole".to_owned();
    let segment = SegmentShape { name, takes, gives: vec![output], differentiable: true, ..SegmentShape::default() };
    SplitShape {
        values: names.iter().map(|name| value(name)).collect(),
        input: (!first).then_some(0),
        segments: vec![segment],
        ..SplitShape::default()
    }
}

/// The inside of a unit of the program.
pub(super) fn inside(program: &Program, unit: u32) -> &SplitShape {
    program.split_of(unit).unwrap_or_else(|| &WHOLE[usize::from(unit > 0)])
}

impl Passes {
    /// Offloads the kept activations of all segments of a unit.
    fn take_saved(&mut self, at: At) -> Vec<Tensor> {
        let mut taken = Vec::new();
        let mut counts = Vec::new();
        for (of, pending) in self.of_unit(at) {
            if let Pending::Recorded { recording, .. } = pending {
                let tensors = recording.take_saved();
                counts.push((of.segment, tensors.len()));
                taken.extend(tensors);
            }
        }
        self.away.insert(at.run(), counts);
        taken
    }

    /// Puts back the activations of [`Passes::take_saved`].
    fn put_back(&mut self, at: At, tensors: Vec<Tensor>) -> Result<()> {
        let counts = self.away.remove(&at.run()).unwrap_or_default();
        let mut tensors = tensors.into_iter();
        for (of, pending) in self.of_unit(at) {
            let count = counts.iter().find(|(segment, _)| *segment == of.segment).map_or(0, |(_, count)| *count);
            if let Pending::Recorded { recording, .. } = pending {
                recording.put_back(tensors.by_ref().take(count).collect())?;
            }
        }
        Ok(())
    }

    fn of_unit(&mut self, at: At) -> impl Iterator<Item = (&At, &mut Pending)> {
        let pending = self.pending.iter_mut();
        pending.filter(move |(of, _)| of.run() == at.run())
    }
}

/// A pass over one segment, forward or backward.
pub(super) struct Pass<'a> {
    rank: &'a Rank,
    step: &'a RunningStep<'a>,
    passes: &'a mut Passes,
    at: At,
    inside: &'a SplitShape,
}

impl<'a> Pass<'a> {
    pub fn new(rank: &'a Rank, step: &'a RunningStep<'a>, passes: &'a mut Passes, at: At) -> Pass<'a> {
        Pass { rank, step, passes, at, inside: inside(step.program(), at.unit) }
    }

    /// Runs a segment of a unit forward.
    pub fn forward(&mut self, keep: Keep) -> Result<Option<Tensor>> {
        let Pass { rank, step, at, inside, .. } = *self;
        let segment = &inside.segments[at.segment as usize];
        let ends = at.segment as usize + 1 == inside.segments.len();
        if at.segment == 0 && self.passes.kept_inputs.contains_key(&at.run()) {
            self.passes.again.insert(at.run());
        }
        let again = self.passes.again.contains(&at.run());
        let mut takes = Vec::with_capacity(segment.takes.len());
        for value in &segment.takes {
            takes.push(self.value(*value)?);
        }
        let policy = match keep {
            _ if !segment.differentiable => Policy::Nothing,
            Keep::Everything => Policy::Everything,
            Keep::Selective => Policy::Selective,
            Keep::InputOnly => Policy::Nothing,
        };
        let leaves = step.leaves(at.run());
        if keep == Keep::InputOnly && at.segment == 0 {
            let input = takes.first().cloned();
            let kept = match leaves {
                true => {
                    step.offloaded_activations().put(&rank.tiers, at.run(), input.into_iter().collect())?;
                    None
                }
                false => input,
            };
            self.passes.kept_inputs.insert(at.run(), kept);
        }
        let (recording, takes, gives) = self.record(takes, policy, !again)?;
        let mut result = None;
        for (value, var) in segment.gives.iter().zip(&gives) {
            let tensor = var.tensor().clone();
            if *value != inside.output() {
                self.give(*value, tensor);
            } else if !again {
                result = Some(tensor);
            }
        }
        if policy != Policy::Nothing {
            let places = |vars: &[Var]| vars.iter().map(Place::from).collect();
            let pending = Pending::Recorded { recording, takes: places(&takes), gives: places(&gives) };
            drop((takes, gives));
            self.passes.pending.insert(at, pending);
        }
        if ends {
            self.passes.sites.remove(&at.run());
            self.passes.again.remove(&at.run());
            if leaves && keep != Keep::InputOnly && !again {
                let saved = self.passes.take_saved(at);
                step.offloaded_activations().put(&rank.tiers, at.run(), saved)?;
            }
        }
        Ok(result)
    }

    /// Hands a unit's output on: to the next unit, or to another stage.
    pub fn pass_on(&mut self, output: Tensor) {
        let Pass { step, at, .. } = *self;
        let message = (Phase::Forward, at.unit, at.micro_batch);
        match step.sends(message) {
            true => step.messages().leave(message, output),
            false => drop(self.passes.outputs.insert(at.run(), output)),
        }
    }

    /// A value that a segment takes: the unit's input, a value that a segment before gave, or what
    /// an exchange made of it.
    fn value(&mut self, value: u32) -> Result<Tensor> {
        let Pass { rank, step, at, inside, .. } = *self;
        if let Some(given) = self.passes.values.remove(&at.value(value)) {
            return Ok(given);
        }
        let border = inside.borders.iter().position(|border| border.to == value);
        let Some(border) = border else { return self.input() };
        if let Some(exchanged) = step.exchanges().arrived((Phase::Forward, at.unit, border as u32, at.micro_batch)) {
            return Ok(exchanged);
        }
        let from = self.passes.values.remove(&at.value(inside.borders[border].from));
        let from = from.expect("the program runs what makes a value before what takes it");
        without_exchange(rank, inside.change(border as u32, Phase::Forward), from)
    }

    /// The input of a unit: the output of the unit before, which ran here or on another stage, or
    /// what a forward kept of it.
    fn input(&mut self) -> Result<Tensor> {
        let Pass { step, at, .. } = *self;
        if self.passes.again.contains(&at.run())
            && let Some(kept) = self.passes.kept_inputs.remove(&at.run())
        {
            let back = || step.offloaded_activations().remove(at.run()).and_then(|mut back| back.pop());
            return Ok(kept.or_else(back).expect("a forward keeps its unit's input"));
        }
        let below = at.unit - 1;
        let arrived =
            step.messages().arrived((Phase::Forward, below, at.micro_batch), |elements| self.stream(elements))?;
        let input = arrived.or_else(|| self.passes.outputs.remove(&(below, at.micro_batch)));
        Ok(input.expect("the program runs or receives what a unit reads"))
    }

    /// The shape of a value between units that has so many elements on this rank. Rows may travel
    /// below those of the residual stream, so rows follow from its width where that is known.
    fn stream(&self, elements: usize) -> [usize; 2] {
        let Pass { rank, step, at, .. } = *self;
        match rank.model.spec() {
            Some(spec) => [elements / spec.dim, spec.dim],
            None => {
                let rows = step.batch(at.micro_batch).len();
                [rows, elements / rows.max(1)]
            }
        }
    }

    /// Hands on a value inside a unit: to later segments, or to an exchange.
    fn give(&mut self, value: u32, tensor: Tensor) {
        let Pass { step, at, inside, .. } = *self;
        let border = inside.borders.iter().position(|border| border.from == value);
        match border.filter(|border| inside.collective(*border as u32, Phase::Forward).is_some()) {
            Some(border) => step.exchanges().offer((Phase::Forward, at.unit, border as u32, at.micro_batch), tensor),
            None => drop(self.passes.values.insert(at.value(value), tensor)),
        }
    }

    /// Runs a segment's forward on a new tape; `first` if it is not repeated.
    fn record(&mut self, takes: Vec<Tensor>, policy: Policy, first: bool) -> Result<(Recording, Vec<Var>, Vec<Var>)> {
        let Pass { rank, step, at, inside, .. } = *self;
        let At { unit, micro_batch, segment } = at;
        let program = step.program();
        let batch = step.batch(micro_batch);
        // Each micro-batch draws its own random numbers. They are the same on any number of ranks,
        // and the same when a forward is repeated.
        let (data_index, _) = rank.data_place();
        let global = data_index as u64 * u64::from(program.micro_batches) + u64::from(micro_batch);
        let seed = rank.seed ^ global.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let key = RandomKey { seed, step: step.settings().step as u32, site: unit };
        let mut gradients = rank.gradients.of(micro_batch, step.apart());
        let mut tape = Tape::new(&rank.device, &rank.parameters, policy, key);
        if unit == program.loss_unit() && program.fused_loss {
            tape = tape.with_gradients(&mut gradients);
        }
        let fp8 = rank.fp8.as_ref().map(|fp8| crate::state::lock(fp8).layers());
        if let Some(layers) = &fp8 {
            tape = tape.with_fp8(layers);
        }
        if let Some(layers) = &rank.int8 {
            tape = tape.with_int8(layers);
        }
        if segment > 0 {
            tape = tape.with_sites(self.passes.sites.get(&at.run()).copied().unwrap_or(0));
        }
        let values = &inside.segments[segment as usize].takes;
        // Nothing below the lowest unit is trained, so no gradient flows to its input.
        let ends_here = program.lowest > 0 && unit <= program.lowest;
        let flows = |value: u32| inside.has_gradient(value) && !(ends_here && inside.input == Some(value));
        let place = |(value, tensor): (&u32, Tensor)| match flows(*value) {
            true => tape.leaf(tensor),
            false => tape.constant(tensor),
        };
        let takes: Vec<Var> = values.iter().zip(takes).map(place).collect();
        let mut cx = Forward::training(&batch, rank.loss_scale(step));
        cx.routing = first.then_some(&mut self.passes.routing);
        cx.experts = rank.row_exchange();
        let module = &rank.model.units()[unit as usize];
        let gives = match program.split_of(unit) {
            Some(_) => module.forward_segment(segment as usize, &mut tape, &mut cx, &takes)?,
            None => vec![module.forward(&mut tape, &mut cx, takes.first())?],
        };
        if inside.segments.len() > 1 {
            self.passes.sites.insert(at.run(), tape.sites());
        }
        Ok((tape.finish(), takes, gives))
    }

    /// Runs a segment of a unit backward, or a half of that.
    pub fn backward(&mut self, part: BackwardPart) -> Result<()> {
        let Pass { rank, step, at, inside, .. } = *self;
        let program = step.program();
        let segment = &inside.segments[at.segment as usize];
        let mut target = rank.gradients.of(at.micro_batch, step.apart());
        if let Some(Pending::Weights(deferred)) = self.passes.pending.get_mut(&at) {
            let deferred = std::mem::take(deferred);
            self.passes.pending.remove(&at);
            return Ok(deferred.backward_parameters(&rank.parameters, &mut target)?);
        }
        if self.passes.away.contains_key(&at.run()) {
            let back = step.offloaded_activations().remove(at.run());
            self.passes.put_back(at, back.unwrap_or_default())?;
        }
        let (mut recording, takes, gives) = match self.passes.pending.remove(&at) {
            Some(Pending::Recorded { recording, takes, gives }) => (recording, takes, gives),
            _ => self.record_again()?,
        };
        let mut outputs = Vec::with_capacity(gives.len());
        for (value, place) in segment.gives.iter().zip(gives) {
            if let Some(gradient) = self.gradient(*value)? {
                outputs.push((place, gradient));
            } else if *value == inside.output() && at.unit == program.loss_unit() {
                let one = rank.device.one(Purpose::Activations)?;
                recording = recording.with_one(&one);
                outputs.push((place, one));
            }
        }
        let gradients = match part {
            BackwardPart::Input => {
                let (gradients, deferred) = recording.backward_input(&outputs, &takes, &rank.parameters)?;
                self.passes.pending.insert(at, Pending::Weights(deferred));
                gradients
            }
            _ => recording.backward_at(&outputs, &takes, &rank.parameters, &mut target)?,
        };
        drop(outputs);
        for (value, gradient) in segment.takes.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                self.give_gradient(*value, gradient);
            }
        }
        Ok(())
    }

    /// Runs the forward of a unit that kept only its input, for its backward.
    fn record_again(&mut self) -> Result<(Recording, Vec<Place>, Vec<Place>)> {
        let Pass { at, inside, .. } = *self;
        self.passes.again.insert(at.run());
        let takes = match inside.input {
            Some(_) => vec![self.input()?],
            None => {
                self.passes.kept_inputs.remove(&at.run());
                Vec::new()
            }
        };
        self.passes.again.remove(&at.run());
        let (recording, takes, gives) = self.record(takes, Policy::Everything, false)?;
        let places = |vars: &[Var]| vars.iter().map(Place::from).collect();
        Ok((recording, places(&takes), places(&gives)))
    }

    /// The gradient of a value that a segment gave; None if nothing flowed into it.
    fn gradient(&mut self, value: u32) -> Result<Option<Tensor>> {
        let Pass { rank, step, at, inside, .. } = *self;
        if value == inside.output() {
            if at.unit == step.program().loss_unit() {
                return Ok(None);
            }
            let message = (Phase::Backward, at.unit, at.micro_batch);
            let arrived = step.messages().arrived(message, |elements| self.stream(elements))?;
            let gradient = arrived.or_else(|| self.passes.flowing.remove(&at.run()));
            return Ok(Some(gradient.expect("the program differentiates a unit after the one that reads its output")));
        }
        if let Some(gradient) = self.passes.gradients.remove(&at.value(value)) {
            return Ok(Some(gradient));
        }
        let Some(border) = inside.borders.iter().position(|border| border.from == value) else { return Ok(None) };
        if let Some(exchanged) = step.exchanges().arrived((Phase::Backward, at.unit, border as u32, at.micro_batch)) {
            return Ok(Some(exchanged));
        }
        let to = self.passes.gradients.remove(&at.value(inside.borders[border].to));
        to.map(|to| without_exchange(rank, inside.change(border as u32, Phase::Backward), to)).transpose()
    }

    /// Hands on the gradient of a value that a segment took: to the unit or the segment before, to
    /// an exchange or to another stage.
    fn give_gradient(&mut self, value: u32, gradient: Tensor) {
        let Pass { step, at, inside, .. } = *self;
        let complete = inside.first_user(value) == Some(at.segment);
        if inside.input == Some(value) && complete {
            let below = at.unit - 1;
            let message = (Phase::Backward, below, at.micro_batch);
            match step.sends(message) {
                true => step.messages().leave(message, gradient),
                false => drop(self.passes.flowing.insert((below, at.micro_batch), gradient)),
            }
            return;
        }
        let border = inside.borders.iter().position(|border| border.to == value).filter(|_| complete);
        match border.filter(|border| inside.collective(*border as u32, Phase::Backward).is_some()) {
            Some(border) => step.exchanges().offer((Phase::Backward, at.unit, border as u32, at.micro_batch), gradient),
            None => drop(self.passes.gradients.insert(at.value(value), gradient)),
        }
    }
}

/// A change of layout that exchanges nothing.
fn without_exchange(rank: &Rank, change: Option<Change>, from: Tensor) -> Result<Tensor> {
    let split = rank.model.tensor_split();
    match change {
        Some(Change::TakePart) => exchanges::part_of(&from, split.rank, split.ranks),
        _ => Ok(from),
    }
}
