//! Measured steps of all ranks on one clock, ready to be replayed without a cause.

use crate::run::{RankRecord, Run};
use std::ops::RangeInclusive;
use trainyard_program::{Action, Instruction, Program};
use trainyard_record::monitor::Sample;
use trainyard_record::programs::Work;
use trainyard_record::steps::Step;
use trainyard_sim::Span;
use trainyard_sim::replay::{Own, Replay};

/// Steps at the start of a sitting that touch memory and files for the first time.
const WARM_UP: usize = 3;
/// The most steps that are replayed, evenly spread over those recorded.
const STEPS_MAX: usize = 96;

/// One measured step of all recorded ranks.
#[derive(Debug)]
pub struct Measured<'a> {
    /// Its number, from 1.
    pub step: u64,
    /// True if it ended in a snapshot.
    pub snapshot: bool,
    /// Seconds of the whole step, from the end of the one before.
    pub seconds: f64,
    /// Seconds before the first rank's execution.
    pub before_s: f64,
    /// The part of `before_s` in which ranks agreed on the step.
    pub agreed_s: f64,
    /// Start of the first rank's execution, since the Unix epoch.
    pub began_s: f64,
    /// The intervals of every rank's instructions; 0 is the start of the first rank's execution.
    pub spans: Vec<Vec<Span>>,
    /// Per rank, the seconds that lanes waited for others before each instruction.
    pub waited_s: Vec<Vec<f64>>,
    /// The same step, to be replayed.
    pub replay: Replay<'a>,
    /// Seconds of the step when it is replayed unchanged. They differ from the measured ones only
    /// by the time after the last instruction.
    pub replayed_s: f64,
    /// The sample of the machine whose time covers the middle of the step.
    pub sample: Option<&'a Sample>,
}

/// The instruction that a change of a step may touch.
#[derive(Clone, Copy)]
pub struct Site<'a> {
    /// Place of the rank among those recorded.
    pub rank: usize,
    /// Number of the instruction.
    pub number: usize,
    /// The instruction.
    pub instruction: &'a Instruction,
}

impl<'a> Measured<'a> {
    /// Seconds of the step when `change` has changed the own times of its instructions.
    pub fn without(&self, change: &mut dyn FnMut(Site<'a>, &mut Own)) -> f64 {
        let mut changed = self.replay.clone();
        let programs = self.replay.programs();
        for (rank, program) in programs.iter().enumerate() {
            for (number, instruction) in program.instructions.iter().enumerate() {
                change(Site { rank, number, instruction }, &mut changed.own[rank][number]);
            }
        }
        // Shorter durations cannot make ranks wait in a circle; if the record is odd, nothing is
        // saved.
        changed.seconds().map_or(self.replayed_s, |seconds| self.before_s + seconds)
    }
}

/// The program of a rank in this step.
fn program<'a>(record: &'a RankRecord, step: &Step) -> &'a Program {
    &record.programs.programs[step.program]
}

/// The steps of a run that every recorded rank has recorded, warm-up left out; at most
/// [`STEPS_MAX`] of them, oldest first.
pub fn measured(run: &Run) -> Vec<Measured<'_>> {
    let common = common(run);
    let warm = if common.len() >= 3 * WARM_UP { WARM_UP } else { common.len().min(1) };
    let common = &common[warm..];
    let count = common.len().min(STEPS_MAX);
    (0..count).map(|index| one(run, common[index * common.len() / count])).collect()
}

/// The steps in `range` that every recorded rank has recorded.
pub fn measured_in<'a>(run: &'a Run, range: &RangeInclusive<u64>) -> Vec<Measured<'a>> {
    common(run).into_iter().filter(|step| range.contains(step)).map(|step| one(run, step)).collect()
}

/// The numbers of the steps that every recorded rank has recorded.
fn common(run: &Run) -> Vec<u64> {
    let Some(first) = run.ranks.first() else { return Vec::new() };
    let has = |record: &RankRecord, step: &Step| {
        find(record, step.step).is_some_and(|at| record.steps[at].program == step.program)
    };
    let everywhere = first.steps.iter().filter(|step| run.ranks.iter().all(|record| has(record, step)));
    everywhere.map(|step| step.step).collect()
}

fn find(record: &RankRecord, number: u64) -> Option<usize> {
    record.steps.binary_search_by_key(&number, |step| step.step).ok()
}

fn one(run: &Run, number: u64) -> Measured<'_> {
    let of = |record: &RankRecord| find(record, number).expect("every rank has this step");
    assemble(run, run.ranks.iter().map(|record| (record, &record.steps[of(record)])).collect())
}

fn assemble<'a>(run: &'a Run, of_ranks: Vec<(&'a RankRecord, &'a Step)>) -> Measured<'a> {
    let shifts = clock_shifts(&of_ranks);
    let began = |index: usize| of_ranks[index].1.began.as_secs_f64() + shifts[index];
    let origin = (0..of_ranks.len()).map(began).fold(f64::INFINITY, f64::min);
    let mut spans = Vec::with_capacity(of_ranks.len());
    let mut waited_s = Vec::with_capacity(of_ranks.len());
    for (index, (_, step)) in of_ranks.iter().enumerate() {
        let offset = began(index) - origin;
        let seconds = |time: std::time::Duration| time.as_secs_f64();
        let span = |times: &trainyard_record::steps::Times| Span {
            start_s: offset + seconds(times.start),
            end_s: offset + seconds(times.end),
        };
        spans.push(step.instructions.iter().map(span).collect::<Vec<_>>());
        waited_s.push(step.instructions.iter().map(|times| seconds(times.waited)).collect::<Vec<_>>());
    }
    let programs: Vec<&Program> = of_ranks.iter().map(|(record, step)| program(record, step)).collect();
    let first = of_ranks[0].1;
    // The step began for all when the first rank ended the one before.
    let ahead = began(0) - origin;
    let before_s = (first.before.as_secs_f64() - ahead).max(0.0);
    let seconds = first.seconds();
    let middle = origin + (seconds - before_s) / 2.0;
    let sample = run.samples.iter().find(|sample| sample.unix_s >= middle && sample.unix_s - sample.seconds <= middle);
    let replay = Replay::of(&programs, &spans);
    Measured {
        step: first.step,
        snapshot: programs[0].instructions.iter().any(|i| i.action == Action::Snapshot),
        seconds,
        before_s,
        agreed_s: first.agreed.as_secs_f64().min(before_s),
        began_s: origin,
        replayed_s: replay.seconds().map_or(seconds, |replayed| before_s + replayed),
        replay,
        spans,
        waited_s,
        sample,
    }
}

/// Seconds to add to each rank's clock. Ranks of one host share a clock. Those of other hosts are
/// shifted so that the norm, in which all ranks meet, ends at the same time on all. Replicas that
/// train apart do not meet in it; their clocks are taken as they are.
fn clock_shifts(of_ranks: &[(&RankRecord, &Step)]) -> Vec<f64> {
    let norm = |(record, step): &(&RankRecord, &Step)| {
        let program = program(record, step);
        let meets_all = program.ranks_of_norm().len() == program.mesh.ranks() as usize;
        let is_norm = |i: &Instruction| meets_all && matches!(i.action, Action::Clip { .. });
        let clip = program.instructions.iter().position(is_norm)?;
        Some((step.began + step.instructions[clip].end).as_secs_f64())
    };
    let base = norm(&of_ranks[0]);
    let shift = |of: &(&RankRecord, &Step)| match (of.0.host == of_ranks[0].0.host, base, norm(of)) {
        (false, Some(base), Some(own)) => base - own,
        _ => 0.0,
    };
    of_ranks.iter().map(shift).collect()
}

/// The work of an instruction of a recorded rank.
pub fn work(run: &Run, rank: usize, number: usize, instruction: &Instruction) -> Work {
    let programs = &run.ranks[rank].programs;
    // Another program is the priced one with more instructions, so there it is no later than here;
    // or, in another period of a schedule of freezing, one with fewer.
    let first = &programs.priced().instructions;
    let at = first.iter().take(number + 1).rposition(|own| own.action == instruction.action);
    at.or_else(|| first.iter().position(|own| own.action == instruction.action))
        .and_then(|at| programs.work.get(at))
        .copied()
        .unwrap_or_default()
}
