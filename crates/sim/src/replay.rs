//! Replays a measured step, with the durations of chosen instructions changed.
//!
//! [`Replay::of`] divides the measured time of each instruction on each rank into its own time and
//! waiting. A replay with the own times unchanged gives the measured step again. If a time is
//! changed, the replay shows the step as it would have been: instructions that waited for the
//! changed one wait less, on its rank and on others.
//!
//! A collective's own time begins when the last rank has arrived. A receive begins with its send. A
//! send whose receiver was late ends when the receiver arrives. If it ended earlier in the
//! measurement, the message was buffered, and the send does not wait.
//!
//! A replay does not know that lanes share cores. If compute becomes shorter, a collective beside
//! it keeps its duration.

use crate::simulate::{SimulateError, Span};
use std::collections::HashMap;
use trainyard_program::{Action, Axis, Lane, Phase, Program};

/// The times of one instruction that are its own.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Own {
    /// Seconds between the moment at which it could have begun and its begin: the lane was woken,
    /// or the engine was between two instructions.
    pub late_s: f64,
    /// Seconds that it took, without waiting for other ranks.
    pub took_s: f64,
}

/// A measured step of several ranks, ready to be played.
#[derive(Clone, Debug)]
pub struct Replay<'a> {
    programs: Vec<&'a Program>,
    /// Per rank and instruction, the number of its meeting.
    meetings: Vec<Vec<Option<usize>>>,
    /// Per meeting, its members: rank (by its place in `programs`) and instruction.
    members: Vec<Vec<(usize, usize)>>,
    /// Per rank and instruction, true if a send does not wait for its receiver.
    buffered: Vec<Vec<bool>>,
    /// Per rank and instruction, the own times. Change them before [`Replay::play`].
    pub own: Vec<Vec<Own>>,
}

/// The identity of a meeting: first rank of the group, its size, action, unit, micro-batch, phase,
/// border, and how often such an instruction came before.
type Key = (u32, u32, &'static str, u32, u32, u32, u32, u32);

/// The group of ranks that an instruction of `program` meets in; None for local work.
fn key(program: &Program, action: Action) -> Option<Key> {
    let mesh = &program.mesh;
    let group = |axis| mesh.group(program.rank, axis).ranks;
    let phase = |phase| u32::from(phase == Phase::Backward);
    let (ranks, last) = match action {
        Action::Gather { over, .. } => (mesh.neighbours(program.rank, Axis::Shard, over).ranks, [0, 0]),
        Action::Count { .. } if !program.counts_over_ranks() => return None,
        Action::Count { axis }
        | Action::Reduce { axis, .. }
        | Action::Tie { axis, .. }
        | Action::Outer { axis, .. } => (group(axis), [0, 0]),
        Action::Exchange { axis, phase: of, border, .. } => (group(axis), [phase(of), border]),
        Action::Clip { .. } => (program.ranks_of_norm(), [0, 0]),
        Action::Send { to, phase: of, .. } => (vec![program.rank, to], [phase(of), 0]),
        Action::Recv { from, phase: of, .. } => (vec![from, program.rank], [phase(of), 0]),
        _ => return None,
    };
    let name = if let Action::Recv { .. } = action { "send" } else { action.name() };
    let (first, size) = match action {
        // Both ends of a message name it by sender and receiver.
        Action::Send { .. } | Action::Recv { .. } => (ranks[0], ranks[1]),
        _ => (ranks[0], ranks.len() as u32),
    };
    let unit = action.unit().unwrap_or(u32::MAX);
    (ranks.len() > 1).then_some((
        first,
        size,
        name,
        unit,
        action.micro_batch().unwrap_or(u32::MAX),
        last[0],
        last[1],
        0,
    ))
}

impl<'a> Replay<'a> {
    /// The own times of a measured step. `spans` are those of `programs`, on one clock that begins
    /// with the step. Ranks of which nothing was recorded may be missing: nobody waits for them.
    ///
    /// # Panics
    /// A rank has not one span for each instruction.
    pub fn of(programs: &[&'a Program], spans: &[Vec<Span>]) -> Replay<'a> {
        let mut replay = Replay::unmeasured(programs);
        for (rank, program) in programs.iter().enumerate() {
            assert_eq!(spans[rank].len(), program.instructions.len(), "rank {} has a span for each", program.rank);
            let mut free = [0.0f64; Lane::ALL.len()];
            for (number, instruction) in program.instructions.iter().enumerate() {
                let span = spans[rank][number];
                let lane = instruction.action.lane() as usize;
                let after = instruction.after.iter().map(|on| spans[rank][*on as usize].end_s);
                let ready = after.fold(free[lane], f64::max);
                replay.own[rank][number] = Own { late_s: (span.start_s - ready).max(0.0), took_s: 0.0 };
                free[lane] = span.end_s;
            }
        }
        for (rank, program) in programs.iter().enumerate() {
            for number in 0..program.instructions.len() {
                let span = spans[rank][number];
                let met = replay.meetings[rank][number].map(|meeting| &replay.members[meeting][..]).unwrap_or(&[]);
                let arrivals = || met.iter().map(|(rank, number)| spans[*rank][*number].start_s);
                let last = arrivals().fold(span.start_s, f64::max);
                let is_send = matches!(program.instructions[number].action, Action::Send { .. });
                replay.buffered[rank][number] = is_send && span.end_s < last;
                let began = if replay.buffered[rank][number] { span.start_s } else { last };
                replay.own[rank][number].took_s = (span.end_s - began).max(0.0);
            }
        }
        replay
    }

    /// A step whose instructions take no time yet.
    pub fn unmeasured(programs: &[&'a Program]) -> Replay<'a> {
        let mut numbers: HashMap<Key, usize> = HashMap::new();
        let mut members: Vec<Vec<(usize, usize)>> = Vec::new();
        let mut meetings = Vec::new();
        for (rank, program) in programs.iter().enumerate() {
            let mut repeats: HashMap<Key, u32> = HashMap::new();
            let of = |(number, instruction): (usize, &trainyard_program::Instruction)| {
                let mut key = key(program, instruction.action)?;
                let before = repeats.entry(key).or_default();
                key.7 = *before;
                *before += 1;
                let meeting = *numbers.entry(key).or_insert_with(|| {
                    members.push(Vec::new());
                    members.len() - 1
                });
                members[meeting].push((rank, number));
                Some(meeting)
            };
            meetings.push(program.instructions.iter().enumerate().map(of).collect());
        }
        let sizes = || programs.iter().map(|program| program.instructions.len());
        Replay {
            programs: programs.to_vec(),
            meetings,
            members,
            buffered: sizes().map(|count| vec![false; count]).collect(),
            own: sizes().map(|count| vec![Own::default(); count]).collect(),
        }
    }

    /// The programs, one per rank.
    pub fn programs(&self) -> &[&'a Program] {
        &self.programs
    }

    /// True if an instruction of the rank at this place meets other ranks.
    pub fn meets(&self, rank: usize, number: usize) -> bool {
        self.meetings[rank][number].is_some_and(|meeting| self.members[meeting].len() > 1)
    }

    /// The intervals of all instructions when each takes its own time.
    ///
    /// # Errors
    /// Ranks that wait for each other in a circle.
    pub fn play(&self) -> Result<Vec<Vec<Span>>, SimulateError> {
        let mut state = Playing::new(self);
        while state.advance() {}
        for (rank, ends) in state.spans.iter().enumerate() {
            if let Some(instruction) = ends.iter().position(Option::is_none) {
                let program = self.programs[rank];
                let action = program.instructions[instruction].action.name();
                return Err(SimulateError::Stuck { rank: program.rank, instruction, action });
            }
        }
        Ok(state.spans.into_iter().map(|spans| spans.into_iter().flatten().collect()).collect())
    }

    /// Seconds of the step when each instruction takes its own time.
    ///
    /// # Errors
    /// As [`Replay::play`].
    pub fn seconds(&self) -> Result<f64, SimulateError> {
        Ok(self.play()?.iter().flatten().map(|span| span.end_s).fold(0.0, f64::max))
    }
}

struct Playing<'r, 'a> {
    replay: &'r Replay<'a>,
    lanes: Vec<Vec<Vec<usize>>>,
    next: Vec<[usize; Lane::ALL.len()]>,
    /// The times at which instructions that meet others have begun.
    arrived: Vec<Vec<Option<f64>>>,
    spans: Vec<Vec<Option<Span>>>,
}

impl<'r, 'a> Playing<'r, 'a> {
    fn new(replay: &'r Replay<'a>) -> Playing<'r, 'a> {
        let lanes = |program: &&Program| Lane::ALL.map(|lane| program.on_lane(lane).collect()).to_vec();
        let none = |program: &&Program| vec![None; program.instructions.len()];
        Playing {
            replay,
            lanes: replay.programs.iter().map(lanes).collect(),
            next: vec![[0; Lane::ALL.len()]; replay.programs.len()],
            arrived: replay.programs.iter().map(none).collect(),
            spans: replay.programs.iter().map(|program| vec![None; program.instructions.len()]).collect(),
        }
    }

    /// Plays everything that can be played; false if nothing could.
    fn advance(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.lanes.len() {
            for lane in 0..Lane::ALL.len() {
                while let Some(&number) = self.lanes[rank][lane].get(self.next[rank][lane]) {
                    moved |= self.arrive(rank, lane, number);
                    if !self.end(rank, number) {
                        break;
                    }
                    self.next[rank][lane] += 1;
                    moved = true;
                }
            }
        }
        moved
    }

    /// Begins an instruction whose dependencies have ended. Returns true if it is new.
    fn arrive(&mut self, rank: usize, lane: usize, number: usize) -> bool {
        if self.arrived[rank][number].is_some() {
            return false;
        }
        let instruction = &self.replay.programs[rank].instructions[number];
        let before = self.next[rank][lane].checked_sub(1).map(|before| self.lanes[rank][lane][before] as u32);
        let mut ready = 0.0f64;
        for on in instruction.after.iter().copied().chain(before) {
            let Some(span) = self.spans[rank][on as usize] else { return false };
            ready = ready.max(span.end_s);
        }
        self.arrived[rank][number] = Some(ready + self.replay.own[rank][number].late_s);
        true
    }

    /// Ends an instruction if all that it meets have come.
    fn end(&mut self, rank: usize, number: usize) -> bool {
        let Some(start_s) = self.arrived[rank][number] else { return false };
        let mut began = start_s;
        if let Some(meeting) = self.replay.meetings[rank][number].filter(|_| !self.replay.buffered[rank][number]) {
            for (other, number) in &self.replay.members[meeting] {
                let Some(arrival) = self.arrived[*other][*number] else { return false };
                began = began.max(arrival);
            }
        }
        let end_s = began + self.replay.own[rank][number].took_s;
        self.spans[rank][number] = Some(Span { start_s, end_s });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_program::{Mesh, ModelShape, StepKind, Strategy, UnitShape, lower_rank};

    fn programs(mesh: Mesh, micro_batches: u32) -> Vec<Program> {
        programs_of(mesh, micro_batches, StepKind::Synchronous)
    }

    fn programs_of(mesh: Mesh, micro_batches: u32, kind: StepKind) -> Vec<Program> {
        let unit = |name: &str| UnitShape {
            name: name.into(),
            flat_elements: 1 << 10,
            output_bytes: 1 << 10,
            ..UnitShape::default()
        };
        let names = ["embedding", "block.0", "block.1", "head"];
        let model = ModelShape { units: names.map(unit).to_vec(), ..ModelShape::default() };
        let strategy = Strategy { accumulation_steps: micro_batches, kind, ..Strategy::new(4) };
        (0..mesh.ranks()).map(|rank| lower_rank(&model, &mesh, &strategy, rank).unwrap()).collect()
    }

    /// A step in which passes take 4, collectives and messages 1, and rank `slow` twice as long.
    fn step<'a>(programs: &[&'a Program], slow: usize) -> Replay<'a> {
        let mut replay = Replay::unmeasured(programs);
        for (rank, program) in programs.iter().enumerate() {
            for (number, instruction) in program.instructions.iter().enumerate() {
                let factor = if rank == slow { 2.0 } else { 1.0 };
                let took_s = match instruction.action.lane() {
                    Lane::Compute => 4.0 * factor,
                    Lane::Input => 0.5,
                    _ => 1.0,
                };
                replay.own[rank][number] = Own { late_s: 0.01 * (number % 3) as f64, took_s };
            }
        }
        replay
    }

    #[test]
    fn a_step_that_is_replayed_unchanged_is_the_measured_one() {
        let meshes = [
            Mesh::default(),
            Mesh::data(2, 1),
            Mesh::data(1, 2),
            Mesh::data(2, 2),
            Mesh { pp: 2, ..Mesh::default() },
            Mesh { pp: 2, dp_shard: 2, ..Mesh::default() },
        ];
        for mesh in meshes {
            let programs = programs(mesh, 3);
            let programs: Vec<&Program> = programs.iter().collect();
            let measured = step(&programs, 1).play().unwrap();
            let again = Replay::of(&programs, &measured).play().unwrap();
            for (one, other) in measured.iter().flatten().zip(again.iter().flatten()) {
                assert!((one.start_s - other.start_s).abs() + (one.end_s - other.end_s).abs() < 1e-9, "{mesh:?}");
            }
        }
    }

    #[test]
    fn without_the_slow_rank_everybody_is_faster() {
        let programs = programs(Mesh::data(2, 1), 1);
        let programs: Vec<&Program> = programs.iter().collect();
        let measured = step(&programs, 1).play().unwrap();
        let mut without = Replay::of(&programs, &measured);
        let of_step = |replay: &Replay<'_>| replay.seconds().unwrap();
        let slow = of_step(&without);
        for (own, instruction) in without.own[1].iter_mut().zip(&programs[1].instructions) {
            own.took_s /= if instruction.action.lane() == Lane::Compute { 2.0 } else { 1.0 };
        }
        assert!((of_step(&without) - of_step(&step(&programs, 9))).abs() < 1e-9);
        // The rank that waited has not been slow itself: its own times are those of its peer.
        assert!(of_step(&without) < 0.6 * slow);
    }

    #[test]
    fn replicas_that_train_apart_meet_in_outer_steps_only() {
        for (kind, waits) in [(StepKind::Inner, false), (StepKind::Outer, true)] {
            let programs = programs_of(Mesh::data(2, 1), 1, kind);
            let programs: Vec<&Program> = programs.iter().collect();
            let measured = step(&programs, 1).play().unwrap();
            let ends = [0, 1].map(|rank| measured[rank].iter().map(|span| span.end_s).fold(0.0, f64::max));
            assert_eq!(ends[1] - ends[0] < 5.0, waits, "{kind:?}: {ends:?}");
            let again = Replay::of(&programs, &measured).play().unwrap();
            for (one, other) in measured.iter().flatten().zip(again.iter().flatten()) {
                assert!((one.start_s - other.start_s).abs() + (one.end_s - other.end_s).abs() < 1e-9, "{kind:?}");
            }
        }
    }

    #[test]
    fn a_message_that_was_late_takes_only_its_own_time() {
        let programs = programs(Mesh { pp: 2, ..Mesh::default() }, 2);
        let programs: Vec<&Program> = programs.iter().collect();
        let measured = step(&programs, 0).play().unwrap();
        let replay = Replay::of(&programs, &measured);
        let received = programs[1].instructions.iter().position(|i| matches!(i.action, Action::Recv { .. })).unwrap();
        assert!(measured[1][received].end_s - measured[1][received].start_s > 8.0);
        assert!((replay.own[1][received].took_s - 1.0).abs() < 1e-9 && replay.meets(1, received));
    }
}
