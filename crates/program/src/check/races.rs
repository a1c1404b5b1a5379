//! Checks that conflicting instructions are ordered: two that touch the same thing, one of them
//! changing it.

use super::CheckError;
use crate::clocks::{HappensBefore, STREAMS};
use crate::{
    Action, Axis, BackwardPart, Border, Collective, Extent, Fresh, Instruction, MemoryKind, Phase, Program, State, Tier,
};

/// Something that instructions read and change. The first number is the unit's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Thing {
    Batch(u32),
    Targets,
    /// The resident copy of a unit's parameters, which forward reads.
    Parameters(u32),
    Gathered(u32),
    Activations(u32, u32),
    /// The result of a pass (phase, unit, micro-batch): the unit's output or the gradient of its
    /// input, and what collectives inside the unit make of it.
    Result(Phase, u32, u32),
    Completed(Phase, u32, u32),
    /// A value inside a split unit, or its gradient: phase, unit, value and micro-batch.
    Value(Phase, u32, u32, u32),
    /// A gradient before its reduction. The second number counts the unit's reductions.
    Fresh(u32, u32),
    /// The gradient sum that the update reads.
    Gradient(u32),
    Norm,
    /// Masters and optimizer state of one chunk of a unit.
    Optimizer(u32, u32),
    /// The parameters of a unit's last outer step, and their momentum.
    Outer(u32),
}

/// Gives every [`Thing`] a dense number.
struct Places {
    units: usize,
    micro_batches: usize,
    /// Per unit, the total number of chunks of the units before it. The last entry is the total
    /// over all units.
    chunks: Vec<usize>,
    /// The same for values inside units.
    values: Vec<usize>,
}

impl Places {
    fn count(&self) -> usize {
        self.before_chunks() + self.chunks[self.units] + 2 * self.values[self.units] * self.micro_batches
    }

    fn before_chunks(&self) -> usize {
        let (units, batches) = (self.units, self.micro_batches);
        2 + batches + 4 * units + 5 * units * batches + units * (batches + 2)
    }

    fn of(&self, thing: Thing) -> usize {
        let (units, batches) = (self.units, self.micro_batches);
        let pair = |unit: u32, micro_batch: u32| unit as usize * batches + micro_batch as usize;
        let per_unit = 2 + batches;
        let per_pair = per_unit + 4 * units;
        match thing {
            Thing::Targets => 0,
            Thing::Norm => 1,
            Thing::Batch(micro_batch) => 2 + micro_batch as usize,
            Thing::Parameters(unit) => per_unit + unit as usize,
            Thing::Gathered(unit) => per_unit + units + unit as usize,
            Thing::Gradient(unit) => per_unit + 2 * units + unit as usize,
            Thing::Outer(unit) => per_unit + 3 * units + unit as usize,
            Thing::Optimizer(unit, chunk) => self.before_chunks() + self.chunks[unit as usize] + chunk as usize,
            Thing::Value(phase, unit, value, m) => {
                let value = phase as usize * self.values[units] + self.values[unit as usize] + value as usize;
                self.before_chunks() + self.chunks[units] + value * batches + m as usize
            }
            Thing::Activations(unit, m) => per_pair + pair(unit, m),
            Thing::Result(phase, unit, m) => per_pair + (1 + phase as usize) * units * batches + pair(unit, m),
            Thing::Completed(phase, unit, m) => per_pair + (3 + phase as usize) * units * batches + pair(unit, m),
            Thing::Fresh(unit, reductions) => {
                let reductions = (reductions as usize).min(batches + 1);
                per_pair + 5 * units * batches + unit as usize * (batches + 2) + reductions
            }
        }
    }
}

/// The instructions that touched a thing last.
#[derive(Clone, Copy, Default)]
struct Access {
    changed: Option<u32>,
    /// Per stream, the last reader since the last change.
    read: [Option<u32>; STREAMS],
}

/// Finds two instructions that conflict and are not ordered.
pub fn check(program: &Program, order: &HappensBefore) -> Result<(), CheckError> {
    let (mut chunks, mut values) = (vec![0], vec![0]);
    for unit in 0..program.units.len() {
        chunks.push(chunks[unit] + program.chunks_of(unit as u32) as usize);
        values.push(values[unit] + program.split_of(unit as u32).map_or(0, |split| split.values.len()));
    }
    let places = Places { units: program.units.len(), micro_batches: program.micro_batches as usize, chunks, values };
    let mut accesses = vec![Access::default(); places.count()];
    let mut touching = Touching::new(program);
    for (number, instruction) in (0..).zip(&program.instructions) {
        touching.look_at(instruction);
        for thing in &touching.reads {
            let access = &mut accesses[places.of(*thing)];
            ordered(program, order, access.changed, number, *thing)?;
            access.read[order.stream(number)] = Some(number);
        }
        for thing in &touching.changes {
            let access = &mut accesses[places.of(*thing)];
            for earlier in access.read.into_iter().chain([access.changed]) {
                ordered(program, order, earlier, number, *thing)?;
            }
            *access = Access { changed: Some(number), read: [None; STREAMS] };
        }
    }
    Ok(())
}

fn ordered(
    program: &Program,
    order: &HappensBefore,
    earlier: Option<u32>,
    later: u32,
    thing: Thing,
) -> Result<(), CheckError> {
    match earlier.filter(|earlier| *earlier != later && !order.holds(*earlier, later)) {
        None => Ok(()),
        Some(earlier) => Err(CheckError::Unordered {
            number: later as usize,
            action: program.instructions[later as usize].action.name(),
            other: earlier as usize,
            with: program.instructions[earlier as usize].action.name(),
            what: describe(program, thing),
        }),
    }
}

fn describe(program: &Program, thing: Thing) -> String {
    let name = |unit: u32| &program.units[unit as usize];
    match thing {
        Thing::Batch(micro_batch) => format!("micro-batch {micro_batch}"),
        Thing::Targets => "the number of targets".to_owned(),
        Thing::Norm => "the gradient norm".to_owned(),
        Thing::Parameters(unit) => format!("the parameters of {}", name(unit)),
        Thing::Gathered(unit) => format!("the gathered parameters of {}", name(unit)),
        Thing::Activations(unit, m) => format!("the activations of {} on micro-batch {m}", name(unit)),
        Thing::Result(Phase::Forward, unit, m) | Thing::Completed(Phase::Forward, unit, m) => {
            format!("the output of {} on micro-batch {m}", name(unit))
        }
        Thing::Result(Phase::Backward, unit, m) | Thing::Completed(Phase::Backward, unit, m) => {
            format!("the gradient of {}'s input on micro-batch {m}", name(unit))
        }
        Thing::Value(phase, unit, value, m) => {
            let of = if phase == Phase::Forward { "" } else { "the gradient of " };
            let value = program.split_of(unit).map_or("?", |split| &split.values[value as usize].name);
            format!("{of}{value} of {} on micro-batch {m}", name(unit))
        }
        Thing::Fresh(unit, _) | Thing::Gradient(unit) => format!("the gradient of {}", name(unit)),
        Thing::Optimizer(unit, _) => format!("the optimizer state of {}", name(unit)),
        Thing::Outer(unit) => format!("the state of the outer step of {}", name(unit)),
    }
}

/// Walks through a program and lists what each instruction reads and changes.
struct Touching<'p> {
    program: &'p Program,
    trains: Vec<u32>,
    /// Per unit, the number of reductions so far.
    reductions: Vec<u32>,
    /// By unit and micro-batch, true once the unit has run forward. A split unit that runs again
    /// makes no new output.
    forwarded: Vec<bool>,
    reads: Vec<Thing>,
    changes: Vec<Thing>,
}

impl<'p> Touching<'p> {
    fn new(program: &'p Program) -> Touching<'p> {
        let reductions = vec![0; program.units.len()];
        let forwarded = vec![false; program.units.len() * program.micro_batches as usize];
        let (reads, changes) = (Vec::new(), Vec::new());
        Touching { program, trains: program.trains(), reductions, forwarded, reads, changes }
    }

    fn look_at(&mut self, instruction: &Instruction) {
        self.reads.clear();
        self.changes.clear();
        match instruction.action {
            Action::Load { micro_batch } => self.changes.push(Thing::Batch(micro_batch)),
            Action::Count { .. } => {
                self.reads.extend((0..self.program.micro_batches).map(Thing::Batch));
                self.changes.push(Thing::Targets);
            }
            Action::Gather { unit, over } => match self.program.placement.parameters {
                Extent::Shard => {
                    // A gather over part of the group starts from the part that a release kept.
                    if over == self.program.mesh.shard_degree() {
                        self.reads.push(Thing::Parameters(unit));
                    }
                    self.changes.push(Thing::Gathered(unit));
                }
                Extent::Full => self.changes.push(Thing::Parameters(unit)),
            },
            Action::Release { unit, .. } => self.changes.push(Thing::Gathered(unit)),
            Action::Forward { unit, segment, micro_batch, .. } => self.forward(unit, segment, micro_batch),
            Action::Backward { unit, segment, micro_batch, part } => {
                self.backward(unit, segment, micro_batch, part != BackwardPart::Weights);
                if part != BackwardPart::Input {
                    self.adds_to_gradients(unit);
                }
            }
            Action::Fold { unit, .. } => self.changes.push(self.fresh(unit)),
            Action::Reduce { unit, .. } => {
                self.changes.extend([self.fresh(unit), Thing::Gradient(unit)]);
                self.reductions[unit as usize] += 1;
            }
            Action::Tie { unit, .. } => self.changes.push(Thing::Gradient(unit)),
            Action::Send { unit, micro_batch, phase, .. } => self.reads.extend(result_of(phase, unit, micro_batch)),
            Action::Recv { unit, micro_batch, phase, .. } => {
                self.changes.push(result_of(phase, unit, micro_batch)[0]);
            }
            Action::Exchange { axis, unit, micro_batch, phase, border, .. }
                if self.program.split_of(unit).is_some() =>
            {
                // Rows of experts travel inside the pass.
                if axis != Axis::Expert {
                    self.exchange(unit, micro_batch, phase, border);
                }
            }
            Action::Exchange { collective, unit, micro_batch, phase, .. } => {
                match (collective, phase) {
                    // A ring runs beside its pass, on the pass's input.
                    (Collective::Ring, Phase::Forward) if unit > 0 => {
                        self.reads.extend(result_of(Phase::Forward, unit - 1, micro_batch));
                    }
                    (Collective::Ring, Phase::Backward) if unit < self.program.loss_unit() => {
                        self.reads.extend(result_of(Phase::Backward, unit, micro_batch));
                    }
                    (Collective::Ring, _) => {}
                    _ => self.reads.push(Thing::Result(phase, unit, micro_batch)),
                }
                self.changes.push(Thing::Completed(phase, unit, micro_batch));
            }
            // Clipping sets to zero any part of a gradient that no backward wrote. Where sums lie
            // in a tier, this happens before they go there.
            Action::Clip { .. } => {
                let in_tiers = self.program.offload.gradients.is_some();
                let touched = if in_tiers { &mut self.reads } else { &mut self.changes };
                touched.extend(self.trains.iter().map(|unit| Thing::Gradient(*unit)));
                self.changes.push(Thing::Norm);
            }
            Action::Update { unit, chunk } => {
                self.reads.push(Thing::Norm);
                self.changes.push(Thing::Optimizer(unit, chunk));
                if self.updates_on_host() {
                    // The memory for the copy that is brought from the host.
                    self.changes.extend(writes_anew(instruction).then_some(Thing::Parameters(unit)));
                } else {
                    self.reads.push(Thing::Gradient(unit));
                    self.changes.push(Thing::Parameters(unit));
                }
            }
            // What no backward wrote is set to zero first.
            Action::Push { unit } => self.changes.push(self.fresh(unit)),
            Action::Commit => {
                self.reads.extend(self.trains.iter().map(|unit| Thing::Gradient(*unit)));
                self.changes.push(Thing::Norm);
            }
            // Parameters come after the update of the server's state.
            Action::Pull { unit, .. } => {
                self.reads.push(Thing::Norm);
                self.changes.extend([Thing::Optimizer(unit, 0), Thing::Parameters(unit)]);
            }
            // It reads the masters before the step's update. Copies that forward reads are none of
            // its business, unless they are the masters.
            Action::Outer { unit, .. } if self.program.averages_beside() => {
                self.reads.extend([Thing::Optimizer(unit, 0), Thing::Parameters(unit)]);
                self.changes.push(Thing::Outer(unit));
            }
            Action::Outer { unit, .. } | Action::Merge { unit } => {
                self.changes.extend([Thing::Optimizer(unit, 0), Thing::Parameters(unit), Thing::Outer(unit)]);
            }
            Action::Fetch { unit, state } | Action::Evict { unit, state, .. } => {
                if matches!(state, State::Optimizer { .. }) {
                    let on_host = self.updates_on_host();
                    match instruction.action {
                        Action::Fetch { .. } if on_host || self.program.offload.gradients.is_some() => {
                            self.reads.push(Thing::Gradient(unit));
                        }
                        Action::Evict { .. } if on_host => self.changes.push(Thing::Parameters(unit)),
                        _ => {}
                    }
                }
                self.changes.push(match state {
                    State::Parameters => Thing::Parameters(unit),
                    State::Optimizer { chunk } => Thing::Optimizer(unit, chunk),
                    State::Activations { micro_batch } => Thing::Activations(unit, micro_batch),
                    State::Gradients => Thing::Gradient(unit),
                });
            }
            // Where masters are separate from the copy that forward reads, the snapshot saves the
            // masters, and the copy may be gathered meanwhile.
            Action::Snapshot => {
                let chunks = |unit: &u32| {
                    (0..self.program.chunks_of(*unit)).map(|chunk| Thing::Optimizer(*unit, chunk)).collect::<Vec<_>>()
                };
                self.reads.extend(self.trains.iter().flat_map(chunks));
            }
        }
    }

    fn updates_on_host(&self) -> bool {
        self.program.offload.optimizer == Some(Tier::Host)
    }

    fn forward(&mut self, unit: u32, segment: u32, micro_batch: u32) {
        self.reads.extend([Thing::Targets, Thing::Batch(micro_batch)]);
        self.reads_parameters(unit);
        self.changes.push(Thing::Activations(unit, micro_batch));
        let forwarded = (unit * self.program.micro_batches + micro_batch) as usize;
        let program = self.program;
        match program.split_of(unit) {
            Some(split) => {
                let shape = &split.segments[segment as usize];
                let value = |value: &u32| value_of(program, Phase::Forward, unit, *value, micro_batch);
                self.reads.extend(shape.takes.iter().flat_map(value));
                let again = self.forwarded[forwarded];
                let made = shape.gives.iter().filter(|value| !shape.takes.contains(value));
                self.changes.extend(made.filter(|value| !again || **value != split.output()).flat_map(value));
                self.forwarded[forwarded] |= segment as usize + 1 == split.segments.len();
            }
            None => {
                if unit > 0 {
                    self.reads.extend(result_of(Phase::Forward, unit - 1, micro_batch));
                }
                self.changes.push(Thing::Result(Phase::Forward, unit, micro_batch));
            }
        }
        if self.program.segment_adds_gradients(unit, segment, Phase::Forward, BackwardPart::Whole) {
            self.adds_to_gradients(unit);
        }
    }

    fn backward(&mut self, unit: u32, segment: u32, micro_batch: u32, of_input: bool) {
        self.reads.extend([Thing::Targets, Thing::Batch(micro_batch)]);
        self.reads_parameters(unit);
        self.changes.push(Thing::Activations(unit, micro_batch));
        let program = self.program;
        if let Some(split) = program.split_of(unit) {
            let shape = &split.segments[segment as usize];
            let gradient = |value: &u32| value_of(program, Phase::Backward, unit, *value, micro_batch);
            let gradients = |values: &[u32]| -> Vec<Thing> {
                values.iter().filter(|value| split.has_gradient(**value)).flat_map(gradient).collect()
            };
            self.reads.extend(gradients(&shape.gives));
            if of_input {
                self.changes.extend(gradients(&shape.takes));
            }
            return;
        }
        let above = if unit == self.program.loss_unit() { Phase::Forward } else { Phase::Backward };
        self.reads.extend(result_of(above, unit, micro_batch));
        if of_input {
            self.changes.push(Thing::Result(Phase::Backward, unit, micro_batch));
        }
    }

    /// A collective at a border of a split unit reads one value, or gradient, and makes another.
    fn exchange(&mut self, unit: u32, micro_batch: u32, phase: Phase, border: u32) {
        let Some(split) = self.program.split_of(unit) else { return };
        let Border { from, to } = split.borders[border as usize];
        let (source, made) = if phase == Phase::Forward { (from, to) } else { (to, from) };
        self.reads.extend(value_of(self.program, phase, unit, source, micro_batch));
        self.changes.extend(value_of(self.program, phase, unit, made, micro_batch));
    }

    fn reads_parameters(&mut self, unit: u32) {
        for unit in self.program.reads(unit) {
            self.reads.push(match self.program.placement.parameters {
                Extent::Full => Thing::Parameters(unit),
                Extent::Shard => Thing::Gathered(unit),
            });
        }
    }

    fn adds_to_gradients(&mut self, unit: u32) {
        for unit in self.program.adds_to(unit) {
            self.changes.push(self.fresh(unit));
        }
    }

    /// The place where backward writes: the sum itself, or a buffer that lives until the unit's
    /// next reduction.
    fn fresh(&self, unit: u32) -> Thing {
        match self.program.placement.fresh_gradients {
            Fresh::InPlace => Thing::Gradient(unit),
            Fresh::Transient => Thing::Fresh(unit, self.reductions[unit as usize]),
        }
    }
}

/// True if an update takes memory for the copy that forward reads.
fn writes_anew(update: &Instruction) -> bool {
    update.effects.iter().any(|effect| effect.kind == MemoryKind::Parameters && effect.bytes > 0)
}

/// The things that carry the output of `unit` (forward) or the gradient of that output (backward).
/// The latter is the result of the unit above.
fn result_of(phase: Phase, unit: u32, micro_batch: u32) -> [Thing; 2] {
    let maker = if phase == Phase::Forward { unit } else { unit + 1 };
    [Thing::Result(phase, maker, micro_batch), Thing::Completed(phase, maker, micro_batch)]
}

/// The things that carry a value of a split unit, or its gradient. A value on the two sides of
/// a border where nothing is exchanged is one thing. A unit's output is the next one's input.
fn value_of(program: &Program, phase: Phase, unit: u32, value: u32, m: u32) -> [Thing; 2] {
    let Some(split) = program.split_of(unit) else { return result_of(phase, unit, m) };
    let alone = |border: &u32| split.collective(*border, phase).is_none();
    let mut borders = (0..split.borders.len() as u32).filter(alone).map(|border| split.borders[border as usize]);
    let value = match phase {
        Phase::Forward => borders.find(|border| border.to == value).map_or(value, |border| border.from),
        Phase::Backward => borders.find(|border| border.from == value).map_or(value, |border| border.to),
    };
    match phase {
        Phase::Forward if split.input == Some(value) && unit > 0 => result_of(phase, unit - 1, m),
        Phase::Forward if value == split.output() => [Thing::Result(phase, unit, m); 2],
        Phase::Backward if split.input == Some(value) => [Thing::Result(phase, unit, m); 2],
        Phase::Backward if value == split.output() && unit == program.loss_unit() => result_of(Phase::Forward, unit, m),
        Phase::Backward if value == split.output() => result_of(phase, unit, m),
        _ => [Thing::Value(phase, unit, value, m); 2],
    }
}
