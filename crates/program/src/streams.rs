//! The streams of a device that copies to and from its host in both directions at once.
//!
//! The host lane is one lane with one order. A link works in both directions at once, so copies
//! from the device to the host get a stream of their own. Three parts of the host lane's order must
//! be kept:
//!
//! - two copies that move the same thing keep their order, in whichever direction;
//! - what an earlier instruction waited for has finished;
//! - an instruction that waits for a copy comes after all copies before it.
//!
//! State on disk moves on the host lane's own stream, and everything after it on that lane waits
//! for it.

use crate::{Action, Lane, Program, State, Tier};
use std::collections::BTreeMap;

/// The streams of a program's lanes. If nothing lies on the host, each lane is one stream, and
/// instructions wait only for their dependencies.
pub struct Streams<'p> {
    program: &'p Program,
    /// Per instruction, true if it is on the stream of copies from the device. Empty: there is no
    /// such stream.
    outward: Vec<bool>,
    /// Additional instructions that an instruction waits for, beside its dependencies.
    also: BTreeMap<usize, Vec<u32>>,
}

impl<'p> Streams<'p> {
    /// Number of streams: one for each lane, and one for copies from the device to the host.
    pub const COUNT: usize = Lane::ALL.len() + 1;

    /// The streams of `program`, whose dependencies must point backwards.
    pub fn new(program: &'p Program) -> Streams<'p> {
        let offload = &program.offload;
        let mut streams = Streams { program, outward: Vec::new(), also: BTreeMap::new() };
        if [offload.optimizer, offload.parameters, offload.activations, offload.gradients].contains(&Some(Tier::Host)) {
            streams.outward =
                program.instructions.iter().map(|instruction| program.leaves_device(instruction.action)).collect();
            streams.order();
        }
        streams
    }

    /// True if copies from the device have a stream of their own.
    pub fn are_apart(&self) -> bool {
        !self.outward.is_empty()
    }

    /// Index of an instruction's stream: the number of its lane, or the last stream.
    pub fn of(&self, number: usize) -> usize {
        match self.outward.get(number) {
            Some(true) => Lane::ALL.len(),
            _ => self.program.instructions[number].action.lane() as usize,
        }
    }

    /// The instructions that an instruction waits for.
    pub fn waits(&self, number: usize) -> impl Iterator<Item = u32> + '_ {
        let also = self.also.get(&number).into_iter().flatten();
        self.program.instructions[number].after.iter().chain(also).copied()
    }

    fn order(&mut self) {
        let instructions = &self.program.instructions;
        // For copies in each direction: the last one; the instructions that others waited for and
        // these have not; and all that move a unit's state.
        let mut last = [None; 2];
        let mut waited: [Vec<u32>; 2] = Default::default();
        let mut of_unit: [BTreeMap<u32, Vec<u32>>; 2] = Default::default();
        // Per instruction of the host lane, the last earlier copy in the other direction.
        let mut beside: Vec<Option<u32>> = vec![None; instructions.len()];
        let mut on_disk = None;
        for (number, instruction) in instructions.iter().enumerate() {
            let mut also: Vec<u32> = instruction.after.iter().filter_map(|on| beside[*on as usize]).collect();
            if instruction.action.lane() == Lane::HostIo {
                let (way, other) = (usize::from(self.outward[number]), usize::from(!self.outward[number]));
                also.append(&mut waited[way]);
                waited[other].extend(&instruction.after);
                beside[number] = last[other];
                last[way] = Some(number as u32);
                match instruction.action {
                    Action::Fetch { unit, .. } | Action::Evict { unit, .. } => {
                        let moves_the_same =
                            |on: &&u32| is_the_same(instructions[**on as usize].action, instruction.action);
                        let before = of_unit[other].get(&unit);
                        also.extend(before.and_then(|before| before.iter().rev().find(moves_the_same)));
                        of_unit[way].entry(unit).or_default().push(number as u32);
                    }
                    // The instruction reads what was moved.
                    _ => also.extend(last[other]),
                }
                match self.program.tier_of(instruction.action) {
                    Some(Tier::Disk) => on_disk = Some(number as u32),
                    _ if self.outward[number] => also.extend(on_disk),
                    _ => {}
                }
            }
            if !also.is_empty() {
                self.also.insert(number, also);
            }
        }
    }
}

/// True if two copies of one unit move the same thing. A host optimizer writes the copy that
/// forward reads.
fn is_the_same(a: Action, b: Action) -> bool {
    let state = |action| match action {
        Action::Fetch { state, .. } | Action::Evict { state, .. } => Some(state),
        _ => None,
    };
    match (state(a), state(b)) {
        (Some(State::Parameters), Some(State::Optimizer { .. })) => true,
        (Some(State::Optimizer { .. }), Some(State::Parameters)) => true,
        (a, b) => a == b,
    }
}
