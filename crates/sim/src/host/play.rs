//! The event simulation of ranks that share a host's cores.
//!
//! Ranks of one pipeline stage do the same at the same time, so one of each stage is simulated and
//! counted as often as the stage has ranks. A receive begins when its message was sent. The norm,
//! and the sum of a tied unit's gradients, begin when every stage that takes part is there.
//!
//! An instruction takes longer while others run, for two reasons. `n` threads that want to run on
//! `c` cores get `c / n` of a core each (completely fair scheduling), whatever stage they belong
//! to. Lanes of one rank beside each other also lose speed as the profile's
//! [interference](crate::machine::Interference) says.
//!
//! A collective was measured on its own ranks, which may already have been more than the cores.
//! Only the load beyond them slows it further. A collective that begins while compute keeps every
//! core busy waits until it gets a core, or until compute rests.

use super::{HostLayout, Priced};
use crate::machine::MachineProfile;
use crate::simulate::{RankTime, Simulated, Span};
use std::collections::HashSet;
use trainyard_program::{Action, Axis, Lane, Phase, Program, Streams};

const LANES: usize = Lane::ALL.len();

/// An instruction in progress.
#[derive(Clone, Copy)]
struct Running {
    number: usize,
    start_s: f64,
    /// Seconds that are left of each [`WorkPhase`], if run alone.
    left: [f64; PARTS],
    exchange_ranks: u32,
}

/// The phases of an instruction, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WorkPhase {
    /// Its thread is woken.
    Wake,
    /// A collective waits for cores that compute keeps busy. The phase is skipped when compute
    /// rests.
    Queue,
    /// Kernels, and the engine's work around them.
    Work,
    /// Communication with other ranks.
    Exchange,
}

const PARTS: usize = 4;

impl WorkPhase {
    const ALL: [WorkPhase; PARTS] = [WorkPhase::Wake, WorkPhase::Queue, WorkPhase::Work, WorkPhase::Exchange];
}

impl Running {
    /// The current phase; None when the instruction is done.
    fn part(&self) -> Option<WorkPhase> {
        WorkPhase::ALL.into_iter().find(|part| self.left[*part as usize] > 0.0)
    }
}

/// A message: the stages that send and receive it, unit, micro-batch and direction.
type Message = (u32, u32, u32, u32, Phase);

/// Simulates `stages`, the program of one rank of each pipeline stage with the prices of its
/// instructions, on the ranks of `layout`. A message from a stage that is not among them is there
/// from the start.
pub fn play(stages: &[(&Program, &[Priced])], layout: HostLayout, profile: &MachineProfile) -> Simulated {
    let players = stages.iter().map(|(program, prices)| Player::new(program, prices, layout, profile)).collect();
    let mut host = Host { players, profile, now: 0.0, sent: HashSet::new() };
    while host.begin() {
        host.advance();
    }
    let step_s = host.now + profile.overheads.step_s;
    Simulated { step_s, ranks: host.players.into_iter().map(|player| player.time).collect() }
}

/// All simulated ranks.
struct Host<'a> {
    players: Vec<Player<'a>>,
    profile: &'a MachineProfile,
    now: f64,
    /// Messages that have been sent.
    sent: HashSet<Message>,
}

impl Host<'_> {
    /// Starts every instruction that can start. Returns true if anything runs.
    fn begin(&mut self) -> bool {
        for stage in 0..self.players.len() {
            for lane in 0..Streams::COUNT {
                let ready = self.players[stage].ready(lane);
                if let Some(number) = ready.filter(|number| self.others_are_there(stage, *number)) {
                    self.players[stage].start(lane, number, self.now);
                }
            }
        }
        self.players.iter().any(|player| player.lanes.iter().any(|lane| lane.3.is_some()))
    }

    /// True if instruction `number` of a stage need not wait for another stage.
    fn others_are_there(&self, stage: usize, number: usize) -> bool {
        let own = &self.players[stage];
        match own.program.instructions[number].action {
            Action::Recv { from, unit, micro_batch, phase } => {
                let from = own.stage_of(from);
                let is_simulated = self.players.iter().any(|player| player.program.stage() == from);
                !is_simulated || self.sent.contains(&(from, own.program.stage(), unit, micro_batch, phase))
            }
            action => {
                own.meetings.iter().all(|meeting| *meeting != number)
                    || self.players.iter().all(|player| player.is_at_meeting(action))
            }
        }
    }

    /// Advances to the end of the next instruction, or of one of its phases.
    fn advance(&mut self) {
        let speeds: Vec<Vec<Option<f64>>> = self.players.iter().map(|player| self.speeds(player)).collect();
        let until = self.players.iter().zip(&speeds).map(|(player, speeds)| player.until(speeds));
        let step = until.fold(f64::INFINITY, f64::min);
        self.now += step;
        for (player, speeds) in self.players.iter_mut().zip(&speeds) {
            for lane in 0..Streams::COUNT {
                let Some(number) = player.go(lane, speeds[lane], step, self.now) else { continue };
                if let Action::Send { to, unit, micro_batch, phase } = player.program.instructions[number].action {
                    self.sent.insert((player.program.stage(), player.stage_of(to), unit, micro_batch, phase));
                }
            }
        }
    }

    /// The speed of each of a rank's lanes, relative to its price; None for idle lanes.
    fn speeds(&self, player: &Player<'_>) -> Vec<Option<f64>> {
        let cores = self.profile.machine.shared_cores();
        let here = self.players.iter().filter(|other| other.host == player.host);
        let wanted: f64 = here.map(|other| other.ranks * other.busy_threads()).sum();
        let share = (cores / wanted.max(1e-9)).min(1.0);
        let computes = player.computes();
        let beside = |part: WorkPhase| player.running().any(|other| other.part() == Some(part));
        let speed = |running: &Running| match running.part() {
            Some(WorkPhase::Work) if beside(WorkPhase::Exchange) => share / self.profile.interference.compute,
            Some(WorkPhase::Work) => share,
            Some(WorkPhase::Queue) if !computes => f64::INFINITY,
            Some(WorkPhase::Exchange) => {
                // The share of a core that it got when it was measured alone.
                let alone = (cores / f64::from(running.exchange_ranks.max(1))).min(1.0);
                let lost = if beside(WorkPhase::Work) { self.profile.interference.communication } else { 1.0 };
                share / alone / lost
            }
            _ => 1.0,
        };
        player.lanes.iter().map(|lane| lane.3.as_ref().map(speed)).collect()
    }
}

/// One rank, which stands for all ranks of its stage.
struct Player<'a> {
    program: &'a Program,
    prices: &'a [Priced],
    layout: HostLayout,
    profile: &'a MachineProfile,
    /// The host of the stage's first rank, and the number of ranks there that do the same.
    host: u32,
    ranks: f64,
    streams: Streams<'a>,
    finished: Vec<bool>,
    /// Instructions in which stages meet.
    meetings: Vec<usize>,
    /// Per stream: its instructions, the number that have begun, the time since which it is free,
    /// and the running instruction.
    lanes: Vec<(Vec<usize>, usize, f64, Option<Running>)>,
    time: RankTime,
}

/// True if stages meet in both actions, and in the same meeting.
fn is_one_meeting(one: Action, other: Action) -> bool {
    match (one, other) {
        (Action::Clip { .. }, Action::Clip { .. }) => true,
        (Action::Tie { unit, axis: Axis::Pipeline }, Action::Tie { unit: of, axis: Axis::Pipeline }) => unit == of,
        _ => false,
    }
}

impl<'a> Player<'a> {
    fn new(program: &'a Program, prices: &'a [Priced], layout: HostLayout, profile: &'a MachineProfile) -> Player<'a> {
        let count = program.instructions.len();
        let streams = Streams::new(program);
        let mut lanes = vec![(Vec::new(), 0, 0.0, None); Streams::COUNT];
        for number in 0..count {
            lanes[streams.of(number)].0.push(number);
        }
        let action = |number: usize| program.instructions[number].action;
        let (of_stage, of_host) = (program.mesh.stage_ranks(), layout.ranks.max(1));
        let stages_of_host = (of_host / of_stage).clamp(1, program.mesh.pp);
        Player {
            program,
            prices,
            layout,
            profile,
            host: program.stage() * of_stage / of_host,
            ranks: f64::from(of_host) / f64::from(stages_of_host),
            streams,
            finished: vec![false; count],
            meetings: (0..count).filter(|number| is_one_meeting(action(*number), action(*number))).collect(),
            lanes,
            time: RankTime {
                rank: program.rank,
                spans: vec![Span::default(); count],
                busy_s: [0.0; LANES],
                waited_s: [0.0; LANES],
                host_s: 0.0,
                interference_s: 0.0,
            },
        }
    }

    fn stage_of(&self, rank: u32) -> u32 {
        rank / self.program.mesh.stage_ranks().max(1)
    }

    /// The next instruction of an idle lane, if everything that it depends on in this rank has
    /// finished.
    fn ready(&self, lane: usize) -> Option<usize> {
        let (numbers, begun, _, running) = &self.lanes[lane];
        let number = numbers.get(*begun).copied().filter(|_| running.is_none())?;
        self.streams.waits(number).all(|on| self.finished[on as usize]).then_some(number)
    }

    /// True if the rank has come to the meeting of `action`, or has no part in it.
    fn is_at_meeting(&self, action: Action) -> bool {
        let same = |number: &&usize| is_one_meeting(self.program.instructions[**number].action, action);
        self.meetings.iter().find(same).is_none_or(|number| {
            let lane = self.streams.of(*number);
            let begun = self.lanes[lane].0[..self.lanes[lane].1].contains(number);
            begun || self.ready(lane) == Some(*number)
        })
    }

    /// Starts instruction `number` on its lane.
    fn start(&mut self, lane: usize, number: usize, now: f64) {
        let idle = now - self.lanes[lane].2;
        let last = self.streams.waits(number).max_by(|a, b| self.end_of(*a).total_cmp(&self.end_of(*b)));
        let cause = last.map(|on| self.program.instructions[on as usize].action.lane());
        // A lane that slept until another finished must be woken.
        let woken = cause.filter(|_| idle > 0.0);
        if let (Some(cause), true) = (woken, lane == Lane::Compute as usize) {
            self.time.waited_s[cause as usize] += idle;
        }
        let Priced { work_s, exchange_s, exchange_ranks } = self.prices[number];
        let wake = if woken.is_some() { self.profile.overheads.handover_s } else { 0.0 };
        let queues = exchange_s > 0.0 && lane != Lane::Compute as usize && self.is_crowded();
        let queue = if queues { self.profile.interference.start_s } else { 0.0 };
        let left = [wake, queue, work_s, exchange_s];
        self.lanes[lane].1 += 1;
        self.lanes[lane].3 = Some(Running { number, start_s: now, left, exchange_ranks });
    }

    fn running(&self) -> impl Iterator<Item = &Running> {
        self.lanes.iter().filter_map(|lane| lane.3.as_ref())
    }

    /// True if compute and a lane beside it have more threads than there are cores.
    fn is_crowded(&self) -> bool {
        let threads = f64::from(self.layout.ranks * (self.layout.threads + 1));
        self.computes() && threads > self.profile.machine.shared_cores()
    }

    /// True if the compute lane has work, or is being woken for it.
    fn computes(&self) -> bool {
        let running = self.lanes[Lane::Compute as usize].3;
        running.is_some_and(|running| matches!(running.part(), Some(WorkPhase::Wake | WorkPhase::Work)))
    }

    fn end_of(&self, number: u32) -> f64 {
        self.time.spans[number as usize].end_s
    }

    /// Number of threads of the rank that are busy.
    fn busy_threads(&self) -> f64 {
        let threads = |running: &Running| match running.part() {
            Some(WorkPhase::Work) => f64::from(self.layout.threads),
            Some(WorkPhase::Exchange) => 1.0,
            _ => 0.0,
        };
        self.running().map(threads).sum()
    }

    /// Seconds until the first phase of a running instruction ends.
    fn until(&self, speeds: &[Option<f64>]) -> f64 {
        let until = |(lane, speed): (&(_, _, _, Option<Running>), &Option<f64>)| {
            let left = |running: &Running| running.part().map_or(0.0, |part| running.left[part as usize]);
            Some(left(lane.3.as_ref()?) / (*speed)?)
        };
        self.lanes.iter().zip(speeds).filter_map(until).fold(f64::INFINITY, f64::min)
    }

    /// Lets a lane run for `step` seconds, until `now`. Returns the instruction that ends.
    fn go(&mut self, lane: usize, speed: Option<f64>, step: f64, now: f64) -> Option<usize> {
        let (Some(running), Some(speed)) = (&mut self.lanes[lane].3, speed) else { return None };
        if let Some(part) = running.part() {
            let left = &mut running.left[part as usize];
            // Removes what rounding leaves of a finished phase. A phase without duration ends at
            // once.
            *left = if speed.is_infinite() || *left - step * speed <= 1e-12 { 0.0 } else { *left - step * speed };
        }
        if running.part().is_some() {
            return None;
        }
        let Running { number, start_s, .. } = self.lanes[lane].3.take()?;
        self.time.spans[number] = Span { start_s, end_s: now };
        self.time.busy_s[self.program.instructions[number].action.lane() as usize] += now - start_s;
        let Priced { work_s, exchange_s, .. } = self.prices[number];
        self.time.interference_s += (now - start_s - work_s - exchange_s).max(0.0);
        self.finished[number] = true;
        self.lanes[lane].2 = now;
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::tests::small;
    use trainyard_program::{
        Action, Instruction, Mesh, ModelShape, Offload, Strategy, Tier, UnitShape, lower_rank, lower_stages,
    };

    /// Two units on two replicas. Every forward, backward and reduction costs 1, the rest nothing.
    fn program() -> (Program, Vec<Priced>) {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1 << 20, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let program = lower_rank(&model, &Mesh::data(2, 1), &Strategy::new(2), 0).unwrap();
        let price = |action: &Action| match action {
            Action::Forward { .. } | Action::Backward { .. } => Priced { work_s: 1.0, ..Priced::default() },
            Action::Reduce { .. } => Priced { exchange_s: 1.0, exchange_ranks: 2, ..Priced::default() },
            _ => Priced::default(),
        };
        let prices = program.instructions.iter().map(|instruction| price(&instruction.action)).collect();
        (program, prices)
    }

    fn profile(cores: u32) -> MachineProfile {
        let mut profile = small();
        profile.machine.cores = cores;
        (profile.overheads.handover_s, profile.overheads.step_s) = (0.0, 0.0);
        profile
    }

    #[test]
    fn lanes_run_beside_each_other_where_there_are_cores_and_share_them_where_not() {
        let (program, prices) = program();
        let step = |ranks, threads, cores| {
            let layout = HostLayout { ranks, threads };
            (play(&[(&program, &prices)], layout, &profile(cores)).step_s * 1e6).round() / 1e6
        };
        // Two forwards and two backwards. The head's reduction runs beside the embedding's
        // backward, the embedding's after it.
        assert_eq!(step(2, 1, 4), 5.0);
        // On two cores overlap gains nothing: two threads of each rank share one core.
        assert_eq!(step(2, 1, 2), 6.0);
        // Four ranks on two cores: compute runs at half speed, and reductions of two ranks at half
        // of their speed alone.
        assert_eq!(step(4, 1, 2), 12.0);
    }

    /// Two stages of one unit each, which take one second for a forward and one for a backward.
    fn stages(micro_batches: u32, cores: u32) -> Simulated {
        let unit = |name: &str| UnitShape { name: name.into(), output_bytes: 1 << 10, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let strategy = Strategy { accumulation_steps: micro_batches, ..Strategy::new(2) };
        let programs = lower_stages(&model, &Mesh { pp: 2, ..Mesh::default() }, &strategy).unwrap();
        let price = |instruction: &Instruction| match instruction.action {
            Action::Forward { .. } | Action::Backward { .. } => Priced { work_s: 1.0, ..Priced::default() },
            _ => Priced::default(),
        };
        let prices = programs.iter().map(|program| program.instructions.iter().map(price).collect::<Vec<_>>());
        let prices: Vec<Vec<Priced>> = prices.collect();
        let played: Vec<_> = programs.iter().zip(&prices).map(|(program, prices)| (program, &prices[..])).collect();
        play(&played, HostLayout { ranks: 2, threads: 1 }, &profile(cores))
    }

    /// Regression: only one stage was simulated, and its messages took no time.
    #[test]
    fn stages_wait_for_each_other_and_share_the_cores() {
        // 1F1B on p stages with m micro-batches takes (m + p - 1) forwards and backwards (Narayanan
        // et al. 2021, section 2.2).
        assert_eq!(stages(1, 2).step_s, 4.0);
        assert_eq!(stages(4, 2).step_s, 10.0);
        let waited: f64 = stages(4, 2).ranks[0].waited_s.iter().sum();
        assert!((waited - 2.0).abs() < 1e-9, "{waited}");
        // On one core nothing runs beside anything else: four micro-batches on two units.
        assert_eq!(stages(4, 1).step_s, 16.0);
        let norm = |simulated: Simulated| simulated.ranks.iter().map(|rank| rank.spans.last().unwrap().end_s).collect();
        let ends: Vec<f64> = norm(stages(4, 2));
        assert_eq!(ends[0], ends[1], "the stages find the norm together");
    }

    #[test]
    fn interference_and_waking_cost_what_the_profile_says() {
        let (program, prices) = program();
        let mut slow = profile(4);
        slow.interference.compute = 1.5;
        let layout = HostLayout { ranks: 2, threads: 1 };
        // The last backward runs beside a reduction of one second. 1 / 1.5 of the reduction is done
        // by then; the rest runs alone.
        let step = play(&[(&program, &prices)], layout, &slow).step_s;
        assert!((step - (5.0 + 1.0 / 3.0)).abs() < 1e-9, "{step}");
        let mut sleepy = profile(4);
        sleepy.overheads.handover_s = 0.01;
        let step = play(&[(&program, &prices)], layout, &sleepy).step_s;
        assert!(5.0 < step && step < 5.1, "{step}");
    }

    #[test]
    fn an_exchange_waits_for_a_core_only_while_compute_keeps_it() {
        let (program, prices) = program();
        let mut queueing = profile(2);
        queueing.interference.start_s = 10.0;
        let layout = HostLayout { ranks: 2, threads: 1 };
        // The head's reduction waits until the backward of the embedding ends. Then both reductions
        // run with nothing beside them.
        let step = play(&[(&program, &prices)], layout, &queueing).step_s;
        assert!((step - 6.0).abs() < 1e-9, "{step}");
        // If there are cores for all, nothing waits.
        let (short, long) = (
            play(&[(&program, &prices)], layout, &profile(4)),
            play(&[(&program, &prices)], layout, &MachineProfile { machine: profile(4).machine, ..queueing }),
        );
        assert_eq!(short.step_s, long.step_s);
    }

    #[test]
    fn what_goes_to_the_host_goes_beside_what_comes_from_it_and_a_disk_does_one_thing_at_a_time() {
        let unit = |name: &str| UnitShape { name: name.into(), flat_elements: 1 << 20, ..UnitShape::default() };
        let model = ModelShape { units: vec![unit("embedding"), unit("head")], ..ModelShape::default() };
        let step = |tier| {
            let strategy =
                Strategy { offload: Offload { optimizer: Some(tier), ..Offload::default() }, ..Strategy::new(2) };
            let program = lower_rank(&model, &Mesh::data(1, 1), &strategy, 0).unwrap();
            let moves = |action: &Action| matches!(action, Action::Fetch { .. } | Action::Evict { .. });
            let price = |instruction: &Instruction| Priced {
                work_s: if moves(&instruction.action) { 1.0 } else { 0.0 },
                ..Priced::default()
            };
            let prices: Vec<Priced> = program.instructions.iter().map(price).collect();
            play(&[(&program, &prices)], HostLayout { ranks: 1, threads: 1 }, &profile(4)).step_s
        };
        // The second unit's gradients leave while the first one's copy arrives. A disk is read
        // twice, then written twice.
        assert_eq!([step(Tier::Host), step(Tier::Disk)], [3.0, 4.0]);
    }

    #[test]
    fn spans_are_in_order_and_nothing_runs_before_what_it_waits_for() {
        let (program, prices) = program();
        let time = play(&[(&program, &prices)], HostLayout { ranks: 2, threads: 1 }, &profile(2)).ranks.remove(0);
        for (instruction, span) in program.instructions.iter().zip(&time.spans) {
            assert!(span.start_s <= span.end_s);
            for on in &instruction.after {
                assert!(time.spans[*on as usize].end_s <= span.start_s + 1e-9);
            }
        }
    }
}
