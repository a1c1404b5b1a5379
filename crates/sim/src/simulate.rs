//! The event simulation: runs the programs of several ranks against a common clock.
//!
//! Every lane of a rank runs its instructions in order; copies to the host and from it each have
//! their own order ([`Streams`]). An instruction starts when its lane is free and its dependencies
//! have ended. A receive ends no earlier than its send. Ranks that do the same are simulated once.
//! The price of a collective depends on its group, so one rank per pipeline stage is enough, and
//! 16,384 GPUs take no longer to simulate than 16.
//!
//! Three effects make an instruction take longer than its price. The host launches kernels one
//! after another and may be late. Collectives that run at the same time take cores and bandwidth
//! from compute. Some software starts its reductions only after backward.

use crate::costs::Costs;
use std::collections::{BTreeMap, HashMap};
use trainyard_program::{Action, BackwardPart, Instruction, Keep, Lane, MemoryKind, Phase, Program, Streams};

const LANES: usize = Lane::ALL.len();

/// The interval of an instruction, in seconds from the step's start.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Span {
    /// Start.
    pub start_s: f64,
    /// End.
    pub end_s: f64,
}

/// The times of one rank's step.
#[derive(Clone, PartialEq, Debug)]
pub struct RankTime {
    /// The rank.
    pub rank: u32,
    /// The interval of each instruction.
    pub spans: Vec<Span>,
    /// Per lane of [`Lane::ALL`], seconds during which it was busy.
    pub busy_s: [f64; LANES],
    /// Per lane, seconds that compute waited for it.
    pub waited_s: [f64; LANES],
    /// Seconds that compute waited for the host.
    pub host_s: f64,
    /// Seconds lost to collectives beside compute.
    pub interference_s: f64,
}

impl RankTime {
    /// Seconds of exposed communication: the time that compute waited for gathers, reductions and
    /// collectives inside units.
    pub fn exposed_s(&self) -> f64 {
        [Lane::Gather, Lane::Reduce, Lane::Inner].iter().map(|lane| self.waited_s[*lane as usize]).sum()
    }

    /// Seconds that compute waited for other stages.
    pub fn bubble_s(&self) -> f64 {
        self.waited_s[Lane::Send as usize] + self.waited_s[Lane::Receive as usize]
    }
}

/// A simulated step.
#[derive(Clone, PartialEq, Debug)]
pub struct Simulated {
    /// Seconds from the first instruction to the last, over all ranks.
    pub step_s: f64,
    /// The times of each program that was given.
    pub ranks: Vec<RankTime>,
}

impl Simulated {
    /// The share of the step in which compute waits, on the rank that computes longest.
    pub fn waiting(&self) -> f64 {
        waiting(&self.ranks, self.step_s)
    }
}

/// The share of a step of `step_s` seconds in which compute waits, on the rank that computes
/// longest.
pub fn waiting(ranks: &[RankTime], step_s: f64) -> f64 {
    let busy = ranks.iter().map(|rank| rank.busy_s[Lane::Compute as usize]).fold(0.0, f64::max);
    if step_s > 0.0 { (1.0 - busy / step_s).clamp(0.0, 1.0) } else { 0.0 }
}

/// The reason why programs cannot be simulated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SimulateError {
    /// A receive has no send, or receives wait for each other in a circle.
    #[error("rank {rank} waits at instruction {instruction} ({action}) for a message that never comes")]
    Stuck {
        /// The rank.
        rank: u32,
        /// Number of the instruction.
        instruction: usize,
        /// Name of its action.
        action: &'static str,
    },
}

/// A message: sending stage, receiving stage, unit, micro-batch, and direction.
type Message = (u32, u32, u32, u32, Phase);

/// The times at which messages were sent.
type Sent = HashMap<Message, f64>;

/// Simulates `programs`, one per rank that differs (one per pipeline stage), at the prices of
/// `costs`.
///
/// # Errors
///
/// A receive whose send is in none of the programs.
pub fn simulate(programs: &[Program], costs: &Costs) -> Result<Simulated, SimulateError> {
    let mut players: Vec<Player<'_>> = programs.iter().map(|program| Player::new(program, costs)).collect();
    let mut sent = Sent::new();
    loop {
        let mut moved = false;
        for player in &mut players {
            while player.play(&mut sent) {
                moved = true;
            }
        }
        if players.iter().all(Player::done) {
            break;
        }
        if !moved {
            let stuck = players.iter().find(|player| !player.done()).expect("not all are done");
            let instruction = stuck.waiting();
            let action = stuck.program.instructions[instruction].action.name();
            return Err(SimulateError::Stuck { rank: stuck.program.rank, instruction, action });
        }
    }
    let ranks: Vec<RankTime> = players.into_iter().map(Player::finish).collect();
    let ends = ranks.iter().flat_map(|rank| rank.spans.iter().map(|span| span.end_s));
    Ok(Simulated { step_s: ends.fold(0.0, f64::max) + costs.constants.step_s + costs.straggle_s(), ranks })
}

const NOT_YET: Span = Span { start_s: -1.0, end_s: -1.0 };

/// The state of one rank during the simulation.
struct Player<'a> {
    program: &'a Program,
    costs: &'a Costs,
    streams: Streams<'a>,
    time: RankTime,
    /// Per stream, its instructions and the number of them that have been played.
    lanes: [(Vec<u32>, usize); Streams::COUNT],
    /// The first instruction that has not been played.
    first: usize,
    /// The time at which each stream is free.
    free: [f64; Streams::COUNT],
    /// The time at which the host has launched everything so far.
    host: f64,
    /// Seconds of compute that collectives delayed and that are not yet paid.
    debt: f64,
    /// Per unit, the activations that its forward kept, and the number of forwards without a
    /// backward so far.
    keep: Vec<(Keep, u32)>,
    /// Seconds of reductions that are postponed until backward is over.
    put_off: f64,
    /// The last intervals of compute and of collectives, to find overlaps, each with the seconds of
    /// compute that a second of the collective costs.
    recent: [Vec<(Span, f64)>; 2],
}

impl<'a> Player<'a> {
    fn new(program: &'a Program, costs: &'a Costs) -> Player<'a> {
        let time = RankTime {
            rank: program.rank,
            spans: vec![NOT_YET; program.instructions.len()],
            busy_s: [0.0; LANES],
            waited_s: [0.0; LANES],
            host_s: 0.0,
            interference_s: 0.0,
        };
        let streams = Streams::new(program);
        let mut lanes: [(Vec<u32>, usize); Streams::COUNT] = Default::default();
        for number in 0..program.instructions.len() {
            lanes[streams.of(number)].0.push(number as u32);
        }
        Player {
            program,
            costs,
            streams,
            time,
            lanes,
            first: 0,
            free: [0.0; Streams::COUNT],
            host: 0.0,
            debt: 0.0,
            keep: vec![(Keep::Everything, 0); program.units.len()],
            put_off: 0.0,
            recent: [Vec::new(), Vec::new()],
        }
    }

    fn stage(&self, rank: u32) -> u32 {
        rank / self.program.mesh.stage_ranks().max(1)
    }

    fn done(&self) -> bool {
        self.first == self.program.instructions.len()
    }

    /// The first instruction that has not been played.
    fn waiting(&self) -> usize {
        self.first
    }

    /// Plays the first instruction, in program order, that its lane has reached and whose
    /// conditions are met; false if there is none.
    fn play(&mut self, sent: &mut Sent) -> bool {
        let Some((number, arrival)) = self.playable(sent) else { return false };
        let instruction = &self.program.instructions[number];
        let span = self.time_of(number, arrival);
        if let Action::Send { to, unit, micro_batch, phase } = instruction.action {
            sent.insert((self.stage(self.program.rank), self.stage(to), unit, micro_batch, phase), span.end_s);
        }
        self.time.spans[number] = span;
        self.lanes[self.streams.of(number)].1 += 1;
        while self.time.spans.get(self.first).is_some_and(|span| *span != NOT_YET) {
            self.first += 1;
        }
        true
    }

    /// The instruction to play next, and the arrival time of the message that it receives.
    fn playable(&self, sent: &Sent) -> Option<(usize, f64)> {
        // Nearly always this is the first one left: its dependencies stand before it, and only a
        // message can be missing.
        if self.first < self.program.instructions.len()
            && let Some(arrival) = self.arrival(self.first, sent)
        {
            return Some((self.first, arrival));
        }
        let heads = self.lanes.iter().filter_map(|(numbers, played)| numbers.get(*played).map(|n| *n as usize));
        heads.filter_map(|number| Some((number, self.arrival(number, sent)?))).min_by_key(|(number, _)| *number)
    }

    /// The arrival time of the message that an instruction receives, 0 for other instructions; None
    /// if a dependency has not been played.
    fn arrival(&self, number: usize, sent: &Sent) -> Option<f64> {
        let instruction = &self.program.instructions[number];
        if self.streams.waits(number).any(|on| self.time.spans[on as usize] == NOT_YET) {
            return None;
        }
        match instruction.action {
            Action::Recv { from, unit, micro_batch, phase } => {
                sent.get(&(self.stage(from), self.stage(self.program.rank), unit, micro_batch, phase)).copied()
            }
            _ => Some(0.0),
        }
    }

    fn time_of(&mut self, number: usize, arrival: f64) -> Span {
        let instruction = &self.program.instructions[number];
        let (lane, stream) = (instruction.action.lane(), self.streams.of(number));
        let (ready, waited_for) = self.ready(number);
        let start = self.free[stream].max(ready);
        let keep = self.kept(instruction);
        if self.costs.stack.host_sync && waited_for == Lane::Receive {
            // The host looked at the message before it launched anything that uses it.
            self.host = self.host.max(ready);
        }
        let mut seconds = self.costs.device_s(self.program, instruction, keep);
        if ready < self.free[stream] {
            // The collective was waiting when the one before it ended, so it was sent with that
            // one.
            seconds -= self.costs.joined_s(self.program, instruction);
        }
        self.host += self.costs.host_s(self.program, instruction, keep);
        let mut end = start;
        match lane {
            Lane::Compute => {
                self.wait(start, waited_for);
                if matches!(instruction.action, Action::Clip { .. }) {
                    // Postponed reductions run now, before the norm.
                    self.time.waited_s[Lane::Reduce as usize] += self.put_off;
                    seconds += std::mem::take(&mut self.put_off);
                }
                seconds += std::mem::take(&mut self.debt);
                seconds += self.slowed(Span { start_s: start, end_s: start + seconds }, 1, 1.0);
                let device = start + seconds;
                end = device.max(self.host);
                self.time.host_s += end - device;
                remember(&mut self.recent[0], (Span { start_s: start, end_s: end }, 1.0));
            }
            Lane::Reduce if !self.costs.stack.overlap_reduce => self.put_off += seconds,
            Lane::Gather | Lane::Reduce => {
                end = start + seconds;
                let span = Span { start_s: start, end_s: end };
                let share = self.costs.interference(instruction, seconds.max(1e-9));
                self.debt += self.slowed(span, 0, share);
                remember(&mut self.recent[1], (span, share));
            }
            Lane::Inner => end = (start + seconds).max(self.host),
            // A message that has arrived is decoded.
            Lane::Send | Lane::Receive => end = start.max(arrival) + seconds,
            Lane::Input | Lane::HostIo => end = start + seconds,
        }
        self.time.busy_s[lane as usize] += end - start;
        self.free[stream] = end;
        Span { start_s: start, end_s: end }
    }

    /// The time at which all dependencies of instruction `number` have ended, and the lane of the
    /// last one.
    fn ready(&self, number: usize) -> (f64, Lane) {
        let mut ready = (0.0, Lane::Compute);
        for on in self.streams.waits(number) {
            let end = self.time.spans[on as usize].end_s;
            if end > ready.0 {
                ready = (end, self.program.instructions[on as usize].action.lane());
            }
        }
        ready
    }

    fn wait(&mut self, start: f64, waited_for: Lane) {
        let idle = start - self.free[Lane::Compute as usize];
        if idle > 0.0 {
            self.time.waited_s[waited_for as usize] += idle;
        }
    }

    fn kept(&mut self, instruction: &Instruction) -> Keep {
        match instruction.action {
            Action::Forward { unit, segment, keep, .. } => {
                // A split unit of which only the input was kept repeats its forward, for one
                // backward, and keeps everything then.
                let (kept, open) = self.keep[unit as usize];
                let again =
                    self.program.split_of(unit).is_some() && (kept, keep) == (Keep::InputOnly, Keep::Everything);
                let begins = segment == 0 && !again;
                self.keep[unit as usize] = (keep, open + u32::from(begins));
                keep
            }
            Action::Backward { unit, segment, part, .. } => {
                let (keep, open) = self.keep[unit as usize];
                if segment == 0 && part != BackwardPart::Weights {
                    self.keep[unit as usize].1 = open.saturating_sub(1);
                }
                keep
            }
            Action::Gather { unit, .. } => match self.keep[unit as usize] {
                (keep, open) if open > 0 => keep,
                _ => Keep::Everything,
            },
            _ => Keep::Everything,
        }
    }

    /// Seconds of compute lost while `span` and the other side's recent intervals overlap. A second
    /// of overlap costs `share` times the share of the other interval.
    fn slowed(&mut self, span: Span, other: usize, share: f64) -> f64 {
        let lost: f64 = self.recent[other]
            .iter()
            .map(|(other, its)| share * its * (span.end_s.min(other.end_s) - span.start_s.max(other.start_s)).max(0.0))
            .sum();
        self.time.interference_s += lost;
        lost
    }

    fn finish(self) -> RankTime {
        self.time
    }
}

/// Keeps the last few intervals, because an instruction overlaps only neighbours.
fn remember(recent: &mut Vec<(Span, f64)>, span: (Span, f64)) {
    if recent.len() == 8 {
        recent.remove(0);
    }
    recent.push(span);
}

/// Memory of one rank over its step.
#[derive(Clone, PartialEq, Debug)]
pub struct MemoryUse {
    /// Bytes at the peak, by kind. Activations include the working memory of the instruction at the
    /// peak.
    pub at_peak: BTreeMap<MemoryKind, f64>,
    /// Their sum.
    pub peak_bytes: f64,
    /// The instruction that runs at the peak.
    pub at: usize,
}

/// The memory of a rank whose instructions run at `time`: bytes held for the whole step, bytes that
/// instructions take at their start and give back at their end, and their working memory.
pub fn memory(program: &Program, time: &RankTime, costs: &Costs) -> MemoryUse {
    // (time, give back before take, instruction, kind, change). Bytes are whole numbers, and so are
    // their sums.
    let mut changes: Vec<(f64, bool, u32, MemoryKind, f64)> = Vec::with_capacity(2 * program.instructions.len());
    for (number, (instruction, span)) in (0..).zip(program.instructions.iter().zip(&time.spans)) {
        for effect in &instruction.effects {
            let at = if effect.bytes > 0 { span.start_s } else { span.end_s };
            changes.push((at, effect.bytes > 0, number, effect.kind, effect.bytes as f64));
        }
        let working = instruction.working_bytes as f64 + costs.working(instruction);
        if working > 0.0 {
            changes.push((span.start_s, true, number, MemoryKind::Activations, working));
            changes.push((span.end_s, false, number, MemoryKind::Activations, -working));
        }
    }
    // A program is nearly in the order of time, which this sort exploits.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut live = [0.0; MemoryKind::ALL.len()];
    let mut used = [false; MemoryKind::ALL.len()];
    for effect in &program.resident {
        live[effect.kind as usize] += effect.bytes as f64;
        used[effect.kind as usize] = true;
    }
    let mut total: f64 = live.iter().sum();
    let (mut peak, mut at, mut at_peak, mut seen) = (total, 0, live, used);
    for (_, _, number, kind, change) in changes {
        live[kind as usize] += change;
        used[kind as usize] = true;
        total += change;
        if total > peak {
            (peak, at, at_peak, seen) = (total, number as usize, live, used);
        }
    }
    let held = MemoryKind::ALL.into_iter().filter(|kind| seen[*kind as usize]);
    MemoryUse { at_peak: held.map(|kind| (kind, at_peak[kind as usize])).collect(), peak_bytes: peak, at }
}
