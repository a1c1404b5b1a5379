//! The passes of units that are split over a tensor-parallel or a context-parallel group: segments
//! on the compute lane, and between them exchanges on the inner lane.
//!
//! A backward segment whose input's gradient must be exchanged comes in two halves: the gradient of
//! the input, the exchange, and the gradients of the weights while the exchange is under way. If
//! only the unit's input was kept, its forward segments and their exchanges come first once more.

use crate::lower::Lowering;
use crate::passes::Pass;
use crate::{Action, BackwardPart, Instruction, Keep, MemoryKind, Phase, SplitShape};

/// The facts about a pass that do not depend on its segments.
pub(crate) struct Around {
    /// The instructions that its input depends on.
    pub inputs: Vec<u32>,
    /// The instructions that bring parameters and activations, or make room.
    pub needs: Vec<u32>,
    /// Bytes of gradients that begin with it.
    pub gradients: u64,
    /// Bytes of its result, if that is sent to another stage.
    pub leaves: u64,
    /// Memory that it gives back at its end, beside activations.
    pub gives_back: Vec<(MemoryKind, u64)>,
}

/// The instructions of a pass that later ones depend on.
#[derive(Clone, Copy)]
pub(crate) struct Ran {
    /// The last one on the compute lane.
    pub last: u32,
    /// The one on the compute lane that makes its result: the output, or the gradient of the input.
    pub result: u32,
    /// The exchange that completes the result.
    pub exchange: Option<u32>,
}

/// A step of a pass over a split unit.
#[derive(Clone, Copy)]
enum Step {
    Forward { segment: u32 },
    Backward { segment: u32, part: BackwardPart },
    Exchange { border: u32, phase: Phase },
}

/// The steps of a forward. With `again` they are run for a backward, which needs no output.
fn forward(split: &SplitShape, again: bool) -> Vec<Step> {
    let exchanges = |segment: Option<u32>| {
        let borders = split.borders_after(segment).into_iter();
        let needed = |border: &u32| !again || split.borders[*border as usize].to != split.output();
        let exchanged = borders.filter(|border| split.collective(*border, Phase::Forward).is_some()).filter(needed);
        exchanged.map(|border| Step::Exchange { border, phase: Phase::Forward }).collect::<Vec<_>>()
    };
    let segment = |segment: u32| [vec![Step::Forward { segment }], exchanges(Some(segment))].concat();
    exchanges(None).into_iter().chain((0..split.segments.len() as u32).flat_map(segment)).collect()
}

/// The steps of a backward.
fn backward(split: &SplitShape, part: BackwardPart) -> Vec<Step> {
    let exchange = |border: u32| Step::Exchange { border, phase: Phase::Backward };
    let of_output = (0..).zip(&split.borders).filter(|(_, border)| border.to == split.output());
    let of_output = of_output.filter(|(border, _)| split.collective(*border, Phase::Backward).is_some());
    let mut steps: Vec<Step> = match part {
        BackwardPart::Weights => Vec::new(),
        _ => of_output.map(|(border, _)| exchange(border)).collect(),
    };
    for segment in split.differentiable().into_iter().rev() {
        let half = |part| Step::Backward { segment, part };
        let exchanges = split.exchanges_after_backward(segment);
        match part {
            BackwardPart::Weights => steps.push(half(part)),
            BackwardPart::Whole if exchanges.is_empty() => steps.push(half(part)),
            _ => {
                steps.push(half(BackwardPart::Input));
                steps.extend(exchanges.into_iter().map(exchange));
                steps.extend((part == BackwardPart::Whole).then(|| half(BackwardPart::Weights)));
            }
        }
    }
    steps
}

impl Lowering<'_> {
    /// Runs pass `at` of a split unit.
    pub(crate) fn run_segments(&mut self, at: usize, split: &SplitShape, around: Around) -> Ran {
        let Pass { phase, part, unit, .. } = self.passes[at];
        let again =
            phase == Phase::Backward && part != BackwardPart::Weights && self.sizes.keep(unit) == Keep::InputOnly;
        let recomputed = if again { forward(split, true) } else { Vec::new() };
        let steps = match phase {
            Phase::Forward => forward(split, false),
            Phase::Backward => backward(split, part),
        };
        let adds = |step: &Step| match *step {
            Step::Forward { segment } => {
                self.program.segment_adds_gradients(unit, segment, Phase::Forward, BackwardPart::Whole)
            }
            Step::Backward { segment, part } => self.program.segment_adds_gradients(unit, segment, phase, part),
            Step::Exchange { .. } => false,
        };
        let begins = steps.iter().position(adds);
        let is_compute = |step: &Step| !matches!(step, Step::Exchange { .. });
        let ends = steps.iter().rposition(is_compute);
        let mut made = Made::new(split);
        for (place, step) in recomputed.iter().enumerate() {
            let room = self.room(&self.evictions);
            let outside = if place == 0 { around.needs.iter().copied().chain(room).collect() } else { Vec::new() };
            self.push_step(at, split, *step, &mut made, outside, &|instruction| instruction);
        }
        let (mut last, mut first) = (0, true);
        for (place, step) in steps.iter().enumerate() {
            let mut outside = Vec::new();
            if made.comes_from_outside(split, *step) || first {
                outside.extend(&around.inputs);
            }
            if is_compute(step) && std::mem::take(&mut first) {
                outside.extend(&around.needs);
            }
            let with_effects = |mut instruction: Instruction| {
                if Some(place) == ends {
                    for (kind, bytes) in &around.gives_back {
                        instruction = instruction.giving_back(*kind, *bytes);
                    }
                    instruction = instruction.taking(MemoryKind::Communication, around.leaves);
                }
                instruction.taking(MemoryKind::Gradients, if Some(place) == begins { around.gradients } else { 0 })
            };
            let number = self.push_step(at, split, *step, &mut made, outside, &with_effects);
            if is_compute(step) {
                last = number;
            }
        }
        made.result(split, phase, last)
    }

    /// Emits a step. `outside` are the instructions of other passes that it depends on.
    fn push_step(
        &mut self,
        at: usize,
        split: &SplitShape,
        step: Step,
        made: &mut Made,
        outside: Vec<u32>,
        with_effects: &dyn Fn(Instruction) -> Instruction,
    ) -> u32 {
        let Pass { phase: of_pass, unit, micro_batch, .. } = self.passes[at];
        let keep = self.sizes.keep(unit);
        let mut needs = outside;
        needs.extend(made.needs(split, step));
        let held = |segment: u32| {
            let bytes = split.segments[segment as usize].saved_bytes;
            (bytes[keep as usize], bytes[Keep::Everything as usize].saturating_sub(bytes[keep as usize]))
        };
        let instruction = match step {
            Step::Forward { segment } => {
                let again = of_pass == Phase::Backward;
                let (saved, recomputed) = held(segment);
                let keep = if again { Keep::Everything } else { keep };
                Instruction::new(Action::Forward { unit, segment, micro_batch, keep })
                    .taking(MemoryKind::Activations, if again { recomputed } else { saved })
            }
            Step::Backward { segment, part } => {
                let (saved, recomputed) = held(segment);
                let backward = Instruction::new(Action::Backward { unit, segment, micro_batch, part });
                let by_itself = if keep == Keep::InputOnly { 0 } else { recomputed };
                match part {
                    BackwardPart::Whole => {
                        backward.giving_back(MemoryKind::Activations, saved + recomputed - by_itself).working(by_itself)
                    }
                    BackwardPart::Input => backward.taking(MemoryKind::Activations, by_itself),
                    BackwardPart::Weights => backward.giving_back(MemoryKind::Activations, saved + recomputed),
                }
            }
            Step::Exchange { border, phase } => {
                let Some(collective) = split.collective(border, phase) else { return 0 };
                let axis = split.axis(border);
                let action = Action::Exchange { collective, axis, unit, micro_batch, phase, border, times: 1 };
                Instruction::new(action).moving(split.border_bytes(border))
            }
        };
        let number = self.builder.push(with_effects(instruction), needs);
        made.record(step, number);
        number
    }
}

/// The instructions of a pass so far, by segment and by border.
struct Made {
    forward: Vec<Option<u32>>,
    backward: Vec<Option<u32>>,
    exchanges: [Vec<Option<u32>>; 2],
}

impl Made {
    fn new(split: &SplitShape) -> Made {
        let (segments, borders) = (vec![None; split.segments.len()], vec![None; split.borders.len()]);
        Made { forward: segments.clone(), backward: segments, exchanges: [borders.clone(), borders] }
    }

    fn record(&mut self, step: Step, number: u32) {
        match step {
            Step::Forward { segment } => self.forward[segment as usize] = Some(number),
            Step::Backward { part: BackwardPart::Weights, .. } => {}
            Step::Backward { segment, .. } => self.backward[segment as usize] = Some(number),
            Step::Exchange { border, phase } => self.exchanges[phase as usize][border as usize] = Some(number),
        }
    }

    /// True if a step reads the unit's input, or the gradient of its output.
    fn comes_from_outside(&self, split: &SplitShape, step: Step) -> bool {
        match step {
            Step::Exchange { border, phase: Phase::Forward } => {
                split.input == Some(split.borders[border as usize].from)
            }
            Step::Exchange { border, phase: Phase::Backward } => split.borders[border as usize].to == split.output(),
            _ => false,
        }
    }

    /// The instructions of the pass that make what a step reads.
    fn needs(&self, split: &SplitShape, step: Step) -> Vec<u32> {
        let exchanged = |phase: Phase, is_read: &dyn Fn(usize) -> bool| -> Vec<u32> {
            let exchanges = self.exchanges[phase as usize].iter().enumerate();
            exchanges.filter(|(border, _)| is_read(*border)).filter_map(|(_, number)| *number).collect()
        };
        match step {
            Step::Forward { segment } => {
                let takes = &split.segments[segment as usize].takes;
                exchanged(Phase::Forward, &|border| takes.contains(&split.borders[border].to))
            }
            Step::Backward { part: BackwardPart::Weights, .. } => Vec::new(),
            Step::Backward { segment, .. } => {
                let gives = &split.segments[segment as usize].gives;
                exchanged(Phase::Backward, &|border| gives.contains(&split.borders[border].from))
            }
            Step::Exchange { border, phase } => {
                let border = split.borders[border as usize];
                let (maker, made) = match phase {
                    Phase::Forward => (split.maker(border.from), &self.forward),
                    Phase::Backward => (split.first_user(border.to), &self.backward),
                };
                maker.and_then(|maker| made[maker as usize]).into_iter().collect()
            }
        }
    }

    /// The instructions that a pass ends with. `last` is the last one on the compute lane.
    fn result(&self, split: &SplitShape, phase: Phase, last: u32) -> Ran {
        let value = match phase {
            Phase::Forward => Some(split.output()),
            Phase::Backward => split.input,
        };
        let border = split.borders.iter().position(|border| match phase {
            Phase::Forward => Some(border.to) == value,
            Phase::Backward => Some(border.from) == value,
        });
        let result = match phase {
            Phase::Forward => None,
            Phase::Backward => {
                value.and_then(|value| split.first_user(value)).and_then(|at| self.backward[at as usize])
            }
        };
        let exchange = border.and_then(|border| self.exchanges[phase as usize][border]);
        Ran { last, result: result.unwrap_or(last), exchange }
    }
}
