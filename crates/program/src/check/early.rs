//! Checks that nothing is brought earlier than the program's `prefetch` allows, so that memory
//! stays within the plan.

use super::CheckError;
use crate::clocks::HappensBefore;
use crate::{Action, BackwardPart, Extent, Fresh, Instruction, Lane, MemoryKind, Phase, Program, State};
use std::collections::BTreeMap;

/// Finds an instruction that takes memory without waiting for the pass or the reduction that bounds
/// it.
pub fn check(program: &Program, order: &HappensBefore) -> Result<(), CheckError> {
    let passes = passes(program);
    let under_way = program.prefetch.max(1) as usize;
    let receives = receives(program, &passes);
    let (mut reduces, mut evictions, mut copies, mut sums) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let room = |giving_back: &[u32]| giving_back.len().checked_sub(under_way + 1).map(|last| giving_back[last]);
    let mut states = 0;
    let starts: BTreeMap<u32, &Pass> = passes.iter().map(|pass| (pass.first, pass)).collect();
    let (mut gradients_sent, mut outputs_sent) = (Vec::new(), BTreeMap::new());
    for (number, instruction) in (0..).zip(&program.instructions) {
        match instruction.action {
            Action::Send { phase: Phase::Backward, .. } => gradients_sent.push(number),
            Action::Send { phase: Phase::Forward, unit, micro_batch, .. } => {
                outputs_sent.insert((unit, micro_batch), number);
            }
            _ => {}
        }
        // A value that was sent is freed when the compute lane knows that it is.
        if let Some((unit, micro_batch)) = starts.get(&number).and_then(|pass| pass.differentiates()) {
            let sends = unit > 0 && !program.runs(unit - 1);
            let bounds =
                [sends.then(|| room(&gradients_sent)).flatten(), outputs_sent.get(&(unit, micro_batch)).copied()];
            if let Some(earlier) = bounds.into_iter().flatten().find(|earlier| !order.holds(*earlier, number)) {
                return Err(early(number, instruction, earlier));
            }
        }
        let waits_for = match instruction.action {
            Action::Reduce { .. } => {
                reduces.push(number);
                None
            }
            Action::Forward { .. } | Action::Backward { .. } if begins_a_buffer(program, instruction) => room(&reduces),
            Action::Fetch { state: State::Optimizer { .. }, .. } => {
                states += 1;
                passes.last().map(|pass| pass.last)
            }
            Action::Evict { state: State::Optimizer { .. }, .. } => {
                states -= 1;
                None
            }
            Action::Evict { state: State::Activations { .. }, .. } => {
                evictions.push(number);
                None
            }
            Action::Evict { state: State::Gradients, .. } => {
                sums.push(number);
                None
            }
            Action::Evict { state: State::Parameters, write: true, .. } => {
                copies.push(number);
                None
            }
            Action::Update { .. } if takes(instruction, MemoryKind::Parameters) => room(&copies),
            Action::Gather { .. } if program.placement.parameters == Extent::Full => None,
            Action::Gather { .. } | Action::Fetch { .. } => ahead(program, &passes, number, program.prefetch as usize),
            Action::Recv { .. } => receives.get(&number).copied().flatten(),
            _ => None,
        };
        if matches!(instruction.action, Action::Forward { .. })
            && let Some(earlier) = room(&evictions).filter(|earlier| !order.holds(*earlier, number))
        {
            return Err(early(number, instruction, earlier));
        }
        if begins_a_sum(program, instruction)
            && let Some(earlier) = room(&sums).filter(|earlier| !order.holds(*earlier, number))
        {
            return Err(early(number, instruction, earlier));
        }
        let wrong = |what| Err(CheckError::Order { number: number as usize, action: instruction.action.name(), what });
        if let Some(earlier) = waits_for.filter(|earlier| !order.holds(*earlier, number)) {
            return Err(early(number, instruction, earlier));
        }
        if states > 2 {
            return wrong("more than two chunks of optimizer state are on the device".to_owned());
        }
    }
    Ok(())
}

fn begins_a_buffer(program: &Program, instruction: &Instruction) -> bool {
    program.placement.fresh_gradients == Fresh::Transient && takes(instruction, MemoryKind::Gradients)
}

/// True if an instruction takes memory for a gradient sum that lies in a tier. A pass does so where
/// gradients are summed in place; otherwise a reduction does.
fn begins_a_sum(program: &Program, instruction: &Instruction) -> bool {
    let begins = match instruction.action {
        Action::Forward { .. } | Action::Backward { .. } => program.placement.fresh_gradients == Fresh::InPlace,
        Action::Reduce { .. } => true,
        _ => false,
    };
    program.offload.gradients.is_some() && begins && takes(instruction, MemoryKind::Gradients)
}

fn takes(instruction: &Instruction, kind: MemoryKind) -> bool {
    instruction.effects.iter().any(|effect| effect.kind == kind && effect.bytes > 0)
}

fn early(number: u32, instruction: &Instruction, earlier: u32) -> CheckError {
    let what = format!("does not wait for instruction {earlier}, so more may be in memory than planned");
    CheckError::Order { number: number as usize, action: instruction.action.name(), what }
}

/// A forward or backward of a unit on a micro-batch: one instruction, or those of all segments.
struct Pass {
    /// Its first and last instruction on the compute lane.
    first: u32,
    last: u32,
    actions: Vec<Action>,
}

impl Pass {
    /// The unit and micro-batch whose input it differentiates, if it does.
    fn differentiates(&self) -> Option<(u32, u32)> {
        self.actions.iter().find_map(|action| match *action {
            Action::Backward { unit, micro_batch, part, .. } if part != BackwardPart::Weights => {
                Some((unit, micro_batch))
            }
            _ => None,
        })
    }
}

/// The passes of a program. A forward that a split unit repeats for its backward belongs to that.
fn passes(program: &Program) -> Vec<Pass> {
    let mut passes: Vec<Pass> = Vec::new();
    let mut forwarded = vec![false; program.units.len() * program.micro_batches as usize];
    // Of the last instruction: the unit, the micro-batch, true for a backward, and its segment in
    // the order in which the pass runs them.
    let mut before = None;
    for (number, instruction) in (0..).zip(&program.instructions) {
        let action = instruction.action;
        let (unit, segment, micro_batch, phase) = match action {
            Action::Forward { unit, segment, micro_batch, .. } => (unit, segment, micro_batch, Phase::Forward),
            Action::Backward { unit, segment, micro_batch, .. } => (unit, segment, micro_batch, Phase::Backward),
            _ => continue,
        };
        let split = program.split_of(unit);
        let segments = split.map_or(1, |split| split.segments.len() as u32);
        let forwarded = &mut forwarded[(unit * program.micro_batches + micro_batch) as usize];
        let backward = phase == Phase::Backward || *forwarded;
        let place = if phase == Phase::Backward { 2 * segments - segment } else { segment };
        let goes_on = before.is_some_and(|(of, earlier)| {
            // The halves of the one segment's backward are passes of their own.
            let follows = if segments > 1 { earlier <= place } else { earlier < place };
            of == (unit, micro_batch, backward) && follows
        });
        match passes.last_mut().filter(|_| goes_on && split.is_some()) {
            Some(pass) => {
                pass.last = number;
                pass.actions.push(action);
            }
            None => passes.push(Pass { first: number, last: number, actions: vec![action] }),
        }
        before = Some(((unit, micro_batch, backward), place));
        *forwarded |= phase == Phase::Forward && segment + 1 == segments;
    }
    passes
}

/// The end of the pass that instruction `number` must wait for, if it may run `prefetch` passes
/// ahead of the pass that uses its result.
fn ahead(program: &Program, passes: &[Pass], number: u32, prefetch: usize) -> Option<u32> {
    let next = passes.partition_point(|pass| pass.first < number);
    let brings = program.instructions[number as usize].action;
    let uses = |pass: &Pass| pass.actions.iter().any(|action| uses(program, *action, brings));
    match passes[next..].iter().position(uses) {
        Some(place) => (next + place).checked_sub(prefetch + 1).map(|pass| passes[pass].last),
        // Its result is used by the update.
        None => passes.last().map(|pass| pass.last),
    }
}

/// Per receive, the pass that it must wait for. It may run a stretch of passes ahead of the first
/// one that takes its message or a later one, because receives keep their order.
fn receives(program: &Program, passes: &[Pass]) -> BTreeMap<u32, Option<u32>> {
    let mut first = None;
    let receives: Vec<u32> = program.on_lane(Lane::Receive).map(|number| number as u32).collect();
    let bound = |number: u32| {
        let bound = ahead(program, passes, number, program.units_ahead());
        first = Some(first.map_or(bound, |first: Option<u32>| first.min(bound)));
        (number, first.flatten())
    };
    receives.into_iter().rev().map(bound).collect()
}

/// True if a pass over `runs` adds to the gradient of `unit`.
fn adds(program: &Program, runs: u32, phase: Phase, part: BackwardPart, unit: u32) -> bool {
    program.adds_gradients(runs, phase, part) && program.adds_to(runs).any(|read| read == unit)
}

/// True if `pass` uses the result of `brings`.
fn uses(program: &Program, pass: Action, brings: Action) -> bool {
    let (Some(runs), Some(on)) = (pass.unit(), pass.micro_batch()) else { return false };
    let forward = matches!(pass, Action::Forward { .. });
    match brings {
        Action::Gather { unit, .. } | Action::Fetch { unit, state: State::Parameters } => {
            program.reads(runs).any(|read| read == unit)
        }
        Action::Fetch { unit, state: State::Activations { micro_batch } } => {
            !forward && (runs, on) == (unit, micro_batch)
        }
        Action::Fetch { unit, state: State::Gradients } => match pass {
            Action::Forward { .. } => adds(program, runs, Phase::Forward, BackwardPart::Whole, unit),
            Action::Backward { part, .. } => adds(program, runs, Phase::Backward, part, unit),
            _ => false,
        },
        Action::Recv { unit, micro_batch, phase, .. } => {
            let user = if phase == Phase::Forward { unit + 1 } else { unit };
            forward == (phase == Phase::Forward) && (runs, on) == (user, micro_batch)
        }
        _ => false,
    }
}
