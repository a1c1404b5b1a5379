//! What waits for what where a device copies to and from its host on two streams, one for each
//! direction.
//!
//! The host lane has one order. A link works in both directions at once, so copies from the device
//! have a stream of their own beside the host lane's, and of that order is kept: what moves the
//! same, whichever way; what an instruction before waited for; and that whoever waits for a copy
//! comes after all copies before it. State on disk is moved on the host lane's own stream, which
//! what comes after it waits for.

use crate::{Action, Lane, Program, State, Tier};
use std::collections::BTreeMap;

/// The streams of a program's lanes. Where nothing lies on the host each lane is one, and nothing
/// is waited for but dependencies.
pub struct Streams<'p> {
    program: &'p Program,
    /// Per instruction, whether it is on the stream of copies from the device; empty: there is
    /// none.
    outward: Vec<bool>,
    /// What instructions wait for beside their dependencies.
    also: BTreeMap<usize, Vec<u32>>,
}

impl<'p> Streams<'p> {
    /// How many there are: one for each lane, and that of copies from the device to the host.
    pub const COUNT: usize = Lane::ALL.len() + 1;

    /// Those of `program`, whose dependencies point backwards.
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

    /// Whether there is a stream of copies from the device.
    pub fn are_apart(&self) -> bool {
        !self.outward.is_empty()
    }

    /// Which stream an instruction is on: its lane's number, or the last.
    pub fn of(&self, number: usize) -> usize {
        match self.outward.get(number) {
            Some(true) => Lane::ALL.len(),
            _ => self.program.instructions[number].action.lane() as usize,
        }
    }

    /// What an instruction waits for.
    pub fn waits(&self, number: usize) -> impl Iterator<Item = u32> + '_ {
        let also = self.also.get(&number).into_iter().flatten();
        self.program.instructions[number].after.iter().chain(also).copied()
    }

    fn order(&mut self) {
        let instructions = &self.program.instructions;
        // Of copies in each direction: the last one; what others waited for that those have not;
        // and all that move a unit's state.
        let mut last = [None; 2];
        let mut waited: [Vec<u32>; 2] = Default::default();
        let mut of_unit: [BTreeMap<u32, Vec<u32>>; 2] = Default::default();
        // Per instruction of the host lane, the last copy before it in the other direction.
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
                    // It reads what was moved.
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

/// Whether two copies of one unit move the same. The copy that forward reads is written by an
/// optimizer that lies on the host.
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
