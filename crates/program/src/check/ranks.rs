//! Checks all ranks together: they meet in the same collectives in the same order, and never wait
//! for each other for ever.

use super::CheckError;
use crate::{Action, Axis, Lane, Program};
use std::collections::BTreeMap;
use std::fmt;

/// The position of every rank that cannot go on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Deadlock {
    /// Rank, number of the instruction it waits at, and that instruction in words.
    pub waiting: Vec<(u32, usize, String)>,
}

impl fmt::Display for Deadlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (rank, number, what)) in self.waiting.iter().enumerate() {
            write!(f, "{}rank {rank} waits at {number} ({what})", if place == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Checks the programs of all ranks, in the order of ranks: each by itself, and then that together
/// they come to an end.
///
/// Lanes and their meetings are simulated. A lane waits at its next instruction until the
/// instruction's dependencies have finished. If the instruction communicates, the lane also waits
/// until all ranks of its group stand at the same one. Sends and receives meet too, as they do for
/// messages that are too large to be buffered.
///
/// # Errors
///
/// A program that fails [`check`](super::check), ranks that stand at different instructions of one
/// lane of one group, and deadlocks.
pub fn check_ranks(programs: &[Program]) -> Result<(), CheckError> {
    for (rank, program) in (0..).zip(programs) {
        super::check(program).map_err(|error| CheckError::OfRank { rank, error: Box::new(error) })?;
        let first = &programs[0];
        let given = programs.len();
        if program.rank != rank || program.mesh != first.mesh || program.mesh.ranks() as usize != given {
            let what = format!("program {rank} of {given} is that of rank {} in {:?}", program.rank, program.mesh);
            return Err(CheckError::Malformed(what));
        }
        if program.pipeline != first.pipeline {
            return Err(CheckError::Malformed(format!("rank {rank} has another pipeline than rank 0")));
        }
    }
    Simulation::new(programs).run()
}

/// One lane of one rank: its instructions and the position in them.
struct Queue {
    instructions: Vec<u32>,
    next: usize,
}

struct Simulation<'p> {
    programs: &'p [Program],
    queues: Vec<[Queue; Lane::ALL.len()]>,
    finished: Vec<Vec<bool>>,
    /// The ranks (and their instructions) that wait at each meeting.
    meetings: BTreeMap<Meeting, Vec<(u32, u32)>>,
}

/// The identity of a meeting: ranks meet on a lane of a group. Messages from one rank to another
/// have no names, so the sends of a pair meet its receives in order.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Group(Lane, Vec<u32>),
    Message { from: u32, to: u32 },
}

impl<'p> Simulation<'p> {
    fn new(programs: &'p [Program]) -> Simulation<'p> {
        let queues = |program: &Program| {
            Lane::ALL.map(|lane| Queue { instructions: program.on_lane(lane).map(|n| n as u32).collect(), next: 0 })
        };
        Simulation {
            programs,
            queues: programs.iter().map(queues).collect(),
            finished: programs.iter().map(|program| vec![false; program.instructions.len()]).collect(),
            meetings: BTreeMap::new(),
        }
    }

    fn run(mut self) -> Result<(), CheckError> {
        // Lanes that may be able to advance.
        let all = |rank: u32| Lane::ALL.into_iter().map(move |lane| (rank, lane));
        let mut awake: Vec<(u32, Lane)> = (0..self.programs.len() as u32).flat_map(all).collect();
        while let Some((rank, lane)) = awake.pop() {
            if let Some(number) = self.stands_ready(rank, lane) {
                for (rank, number) in self.arrive(rank, number)? {
                    let lane = self.programs[rank as usize].instructions[number as usize].action.lane();
                    self.finished[rank as usize][number as usize] = true;
                    self.queues[rank as usize][lane as usize].next += 1;
                    awake.extend(all(rank));
                }
            }
        }
        self.all_done()
    }

    /// The instruction at which the lane stands, if all of its dependencies have finished.
    fn stands_ready(&self, rank: u32, lane: Lane) -> Option<u32> {
        let queue = &self.queues[rank as usize][lane as usize];
        let number = *queue.instructions.get(queue.next)?;
        let after = &self.programs[rank as usize].instructions[number as usize].after;
        after.iter().all(|on| self.finished[rank as usize][*on as usize]).then_some(number)
    }

    /// Records that `rank` has arrived at instruction `number`. Returns the instructions that this
    /// completes; there are none while other ranks are missing.
    fn arrive(&mut self, rank: u32, number: u32) -> Result<Vec<(u32, u32)>, CheckError> {
        let action = self.action(rank, number);
        let Some((meeting, expected)) = self.meeting(rank, action) else { return Ok(vec![(rank, number)]) };
        let here = self.meetings.entry(meeting.clone()).or_default();
        if here.contains(&(rank, number)) {
            return Ok(Vec::new());
        }
        here.push((rank, number));
        let (first, first_number) = here[0];
        if !agree(self.programs, here[0], (rank, number)) {
            return Err(CheckError::Disagree {
                lane: action.lane(),
                rank: first,
                wants: self.programs[first as usize].describe(first_number as usize),
                peer: rank,
                gets: self.programs[rank as usize].describe(number as usize),
            });
        }
        if here.len() < expected {
            return Ok(Vec::new());
        }
        Ok(self.meetings.remove(&meeting).unwrap_or_default())
    }

    fn action(&self, rank: u32, number: u32) -> Action {
        self.programs[rank as usize].instructions[number as usize].action
    }

    /// The meeting of `action` and the number of ranks in it; None if a rank does it alone.
    fn meeting(&self, rank: u32, action: Action) -> Option<(Meeting, usize)> {
        let mesh = &self.programs[0].mesh;
        let ranks = match action {
            Action::Send { to, .. } => return Some((Meeting::Message { from: rank, to }, 2)),
            Action::Recv { from, .. } => return Some((Meeting::Message { from, to: rank }, 2)),
            Action::Gather { over, .. } => mesh.neighbours(rank, Axis::Shard, over).ranks,
            Action::Count { .. } if !self.programs[rank as usize].counts_over_ranks() => return None,
            Action::Count { axis }
            | Action::Reduce { axis, .. }
            | Action::Outer { axis, .. }
            | Action::Exchange { axis, .. }
            | Action::Tie { axis: axis @ Axis::Tensor, .. } => mesh.group(rank, axis).ranks,
            Action::Clip { .. } => self.programs[rank as usize].ranks_of_norm(),
            Action::Tie { unit, .. } => {
                let holders = self.programs[rank as usize].holders(unit);
                holders.iter().map(|stage| stage * mesh.stage_ranks() + rank % mesh.stage_ranks()).collect()
            }
            _ => return None,
        };
        let count = ranks.len();
        Some((Meeting::Group(action.lane(), ranks), count))
    }

    fn all_done(&self) -> Result<(), CheckError> {
        let mut waiting = Vec::new();
        for (rank, queues) in (0..).zip(&self.queues) {
            for queue in queues.iter().filter(|queue| queue.next < queue.instructions.len()) {
                let number = queue.instructions[queue.next] as usize;
                waiting.push((rank, number, self.programs[rank as usize].describe(number)));
            }
        }
        if waiting.is_empty() { Ok(()) } else { Err(CheckError::Deadlock(Deadlock { waiting })) }
    }
}

/// True if the instructions of two ranks that meet go together.
fn agree(programs: &[Program], a: (u32, u32), b: (u32, u32)) -> bool {
    let [a, b] = [a, b].map(|(rank, number)| &programs[rank as usize].instructions[number as usize]);
    match (a.action, b.action) {
        (
            Action::Send { unit, micro_batch, phase, .. },
            Action::Recv { unit: of, micro_batch: on, phase: during, .. },
        )
        | (
            Action::Recv { unit, micro_batch, phase, .. },
            Action::Send { unit: of, micro_batch: on, phase: during, .. },
        ) => (unit, micro_batch, phase, a.bytes, a.encoding) == (of, on, during, b.bytes, b.encoding),
        // Pipeline stages compute partial norms over units of their own, tensor-parallel ranks over
        // parts that may differ in size.
        (Action::Clip { axes }, Action::Clip { axes: others }) => axes == others,
        _ => (a.action, a.bytes, a.encoding, a.factors) == (b.action, b.bytes, b.encoding, b.factors),
    }
}
