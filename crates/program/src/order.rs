//! The order in which a rank runs its units forward and backward, and the cuts of a pipeline.

use crate::{BackwardPart, Mesh, Phase, PipelineSchedule, Strategy};
use std::ops::Range;

/// One run of a unit on a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pass {
    /// Forward or backward.
    pub phase: Phase,
    /// The gradients that a backward computes.
    pub part: BackwardPart,
    /// Index of the unit.
    pub unit: u32,
    /// Index of the micro-batch.
    pub micro_batch: u32,
}

/// A forward or backward of a whole stretch of units on a micro-batch. A pipeline schedule is an
/// order of turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Forward or backward.
    pub phase: Phase,
    /// The gradients that a backward computes.
    pub part: BackwardPart,
    /// Index of the stretch among those of the stage.
    pub chunk: usize,
    /// Index of the micro-batch.
    pub micro_batch: u32,
}

/// The stretches of units of every pipeline stage. Stretch c of stage s is number c · pp + s of the
/// model's.
pub fn stages(units: u32, mesh: &Mesh, strategy: &Strategy) -> Vec<Vec<Range<u32>>> {
    let chunks = chunks(strategy);
    let count = mesh.pp * chunks;
    let cuts: Vec<u32> = if strategy.cuts.is_empty() { even_cuts(units, count) } else { strategy.cuts.clone() };
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    let stretches: Vec<Range<u32>> =
        starts.zip(cuts.iter().copied().chain([units])).map(|(start, end)| start..end).collect();
    (0..mesh.pp)
        .map(|stage| (0..chunks).map(|chunk| stretches[(chunk * mesh.pp + stage) as usize].clone()).collect())
        .collect()
}

/// Number of stretches of units per stage.
pub fn chunks(strategy: &Strategy) -> u32 {
    match strategy.pipeline {
        PipelineSchedule::Interleaved { chunks } => chunks,
        _ => 1,
    }
}

/// Cuts that give every stretch equally many blocks; stretches in the middle get the remainder. The
/// first unit belongs to the first stretch, the last unit to the last.
fn even_cuts(units: u32, count: u32) -> Vec<u32> {
    if units < count + 2 {
        return (1..count).map(|cut| cut * units / count).collect();
    }
    let blocks = units - 2;
    let (each, left) = (blocks / count, blocks % count);
    let first_with_more = (count - left) / 2;
    (1..count).map(|cut| 1 + cut * each + cut.saturating_sub(first_with_more).min(left)).collect()
}

/// The passes of stage `stage`, in order.
pub fn passes(stage: u32, stretches: &[Range<u32>], mesh: &Mesh, strategy: &Strategy) -> Vec<Pass> {
    let turns = turns(stage, mesh.pp, strategy.pipeline, strategy.accumulation_steps);
    turns.iter().flat_map(|turn| units_of(turn, &stretches[turn.chunk])).collect()
}

/// The turns of stage `stage` of a pipeline of `pp` stages, in order.
pub fn turns(stage: u32, pp: u32, schedule: PipelineSchedule, micro_batches: u32) -> Vec<Turn> {
    match schedule {
        _ if pp == 1 => one_after_the_other(micro_batches),
        PipelineSchedule::GPipe => warmed_up(micro_batches, micro_batches, plain),
        PipelineSchedule::OneForwardOneBackward => warmed_up(micro_batches, pp - stage - 1, plain),
        PipelineSchedule::Interleaved { chunks } => {
            let (total, warm_up) = (micro_batches * chunks, 2 * (pp - stage - 1) + (chunks - 1) * pp);
            warmed_up(total, warm_up, |phase, turn| interleaved(phase, turn, pp, chunks))
        }
        PipelineSchedule::ZeroBubble => weights_later(&warmed_up(micro_batches, pp - stage - 1, plain), stage),
    }
}

fn units_of(turn: &Turn, stretch: &Range<u32>) -> Vec<Pass> {
    let Turn { phase, part, micro_batch, .. } = *turn;
    let pass = |unit| Pass { phase, part, unit, micro_batch };
    match phase {
        Phase::Forward => stretch.clone().map(pass).collect(),
        Phase::Backward => stretch.clone().rev().map(pass).collect(),
    }
}

fn plain(phase: Phase, micro_batch: u32) -> Turn {
    Turn { phase, part: BackwardPart::Whole, chunk: 0, micro_batch }
}

/// Each micro-batch forward and then backward: the order of a rank that holds all units.
fn one_after_the_other(micro_batches: u32) -> Vec<Turn> {
    (0..micro_batches)
        .flat_map(|micro_batch| [Phase::Forward, Phase::Backward].map(|phase| plain(phase, micro_batch)))
        .collect()
}

/// `warm_up` forwards, then alternating forwards and backwards, then the remaining backwards.
fn warmed_up(total: u32, warm_up: u32, turn: impl Fn(Phase, u32) -> Turn) -> Vec<Turn> {
    let warm_up = warm_up.min(total);
    let forwards = 0..warm_up;
    let pairs = (warm_up..total).flat_map(|forward| [(Phase::Forward, forward), (Phase::Backward, forward - warm_up)]);
    let backwards = total - warm_up..total;
    let order = forwards.map(|forward| (Phase::Forward, forward)).chain(pairs);
    order
        .chain(backwards.map(|backward| (Phase::Backward, backward)))
        .map(|(phase, number)| turn(phase, number))
        .collect()
}

/// The `number`-th forward or backward of an interleaved schedule: `stages` micro-batches on one
/// stretch, then the same ones on the next (Narayanan et al. 2021, section 2.2).
fn interleaved(phase: Phase, number: u32, stages: u32, chunks: u32) -> Turn {
    let (round, place) = (number / (stages * chunks), number % (stages * chunks));
    let chunk = match phase {
        Phase::Forward => place / stages,
        Phase::Backward => chunks - 1 - place / stages,
    };
    Turn { phase, part: BackwardPart::Whole, chunk: chunk as usize, micro_batch: round * stages + place % stages }
}

/// ZB-H1: gradients of weights come `late` backwards after those of inputs, which fills the stage's
/// bubble (Qi et al. 2023, section 2.1).
fn weights_later(turns: &[Turn], late: u32) -> Vec<Turn> {
    let mut all = Vec::new();
    let mut waiting = std::collections::VecDeque::new();
    for turn in turns {
        match turn.phase {
            Phase::Forward => all.push(*turn),
            Phase::Backward => {
                all.push(Turn { part: BackwardPart::Input, ..*turn });
                waiting.push_back(Turn { part: BackwardPart::Weights, ..*turn });
                if waiting.len() > late as usize {
                    all.extend(waiting.pop_front());
                }
            }
        }
    }
    all.extend(waiting);
    all
}
