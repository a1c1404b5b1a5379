//! The passes of a rank: its turns, unit by unit; and the cuts of a pipeline.

use crate::{BackwardPart, Mesh, ModelShape, Phase, Schedule, ScheduleTable, Strategy, StrategyError, Turn};
use serde::{Deserialize, Serialize};
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

/// Neighbouring units that one pipeline stage runs in one turn.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stretch {
    /// The units, from first to last.
    pub units: Range<u32>,
    /// The stage that runs them.
    pub stage: u32,
}

/// The part of a lowering that all stages of a pipeline share.
pub struct Pipeline {
    pub stretches: Vec<Stretch>,
    pub table: ScheduleTable,
    /// Per stage, the turns that receive their input, in the order in which it comes.
    pub arrivals: Vec<Vec<u32>>,
}

impl Pipeline {
    /// The pipeline of a strategy that fits the mesh.
    ///
    /// # Errors
    ///
    /// A table of the user's own for another number of stages or micro-batches.
    pub fn new(model: &ModelShape, mesh: &Mesh, strategy: &Strategy) -> Result<Pipeline, StrategyError> {
        let micro_batches = strategy.accumulation_steps;
        let table = match &strategy.pipeline {
            Schedule::Known(schedule) => schedule.table(mesh.pp, micro_batches),
            Schedule::Own(table) => table.clone(),
        };
        if (table.stages(), table.micro_batches()) != (mesh.pp, micro_batches) {
            return Err(StrategyError::Table {
                table: [table.stages(), table.micro_batches()],
                wanted: [mesh.pp, micro_batches],
            });
        }
        let arrivals = table.arrivals();
        Ok(Pipeline { stretches: stretches(model, table.stage_of(), &strategy.cuts), table, arrivals })
    }

    /// The passes of a stage, in order; and the passes that receive their input, in the order in
    /// which it comes.
    pub fn passes(&self, stage: u32) -> (Vec<Pass>, Vec<usize>) {
        let mut passes = Vec::new();
        let mut firsts = Vec::new();
        for turn in self.table.turns(stage) {
            firsts.push(passes.len());
            passes.extend(units_of(turn, &self.stretches[turn.stretch as usize].units));
        }
        let receives = self.arrivals[stage as usize].iter().map(|turn| firsts[*turn as usize]).collect();
        (passes, receives)
    }
}

/// The stretches of units of a pipeline, whose stages are given per stretch. Without cuts,
/// stretches get equal work; if the work of units is not known, equally many blocks.
fn stretches(model: &ModelShape, stage_of: &[u32], cuts: &[u32]) -> Vec<Stretch> {
    let (units, count) = (model.units.len() as u32, stage_of.len() as u32);
    let work: Vec<u64> = model.units.iter().map(|unit| unit.work).collect();
    let chosen = match cuts.is_empty() {
        true if work.iter().any(|work| *work > 0) => balanced_cuts(&work, count as usize),
        true => even_cuts(units, count),
        false => Vec::new(),
    };
    let cuts = || cuts.iter().chain(&chosen).copied();
    let starts = std::iter::once(0).chain(cuts());
    let ends = cuts().chain([units]);
    starts.zip(ends).zip(stage_of).map(|((start, end), stage)| Stretch { units: start..end, stage: *stage }).collect()
}

/// The cuts that minimise the largest work of a stretch, and among those the sum of squares of
/// work. A head that multiplies by a large vocabulary therefore shares its stretch with fewer
/// blocks. Every stretch has at least one unit.
fn balanced_cuts(work: &[u64], count: usize) -> Vec<u32> {
    let mut sums = vec![0u64];
    work.iter().for_each(|work| sums.push(sums[sums.len() - 1] + work));
    let units = work.len();
    // The best division of the first `end` units into so many stretches: the most work, the sum of
    // squares, and the start of the last stretch.
    let mut best: Vec<Option<(u64, u128, usize)>> = vec![None; units + 1];
    best[0] = Some((0, 0, 0));
    let mut starts = Vec::with_capacity(count);
    for stretch in 1..=count {
        let mut next = vec![None; units + 1];
        for (end, next) in next.iter_mut().enumerate().take(units + 1 - (count - stretch)).skip(stretch) {
            let of = |start: usize| {
                let (most, squares, _) = best[start]?;
                let own = sums[end] - sums[start];
                Some((most.max(own), squares + u128::from(own) * u128::from(own), start))
            };
            *next = (stretch - 1..end).filter_map(of).min();
        }
        starts.push(next.iter().map(|division| division.map_or(0, |(_, _, start)| start)).collect::<Vec<_>>());
        best = next;
    }
    let mut end = units;
    let mut cuts = Vec::with_capacity(count);
    for of_stretch in starts.iter().rev() {
        end = of_stretch[end];
        cuts.push(end as u32);
    }
    // The first stretch begins with the first unit, which is no cut.
    cuts.pop();
    cuts.reverse();
    cuts
}

/// Cuts that give every stretch equally many blocks; stretches in the middle get the remainder. The
/// first unit belongs to the first stretch, the last unit to the last.
pub fn even_cuts(units: u32, count: u32) -> Vec<u32> {
    if units < count + 2 {
        return (1..count).map(|cut| cut * units / count).collect();
    }
    let blocks = units - 2;
    let (each, left) = (blocks / count, blocks % count);
    let first_with_more = (count - left) / 2;
    (1..count).map(|cut| 1 + cut * each + cut.saturating_sub(first_with_more).min(left)).collect()
}

fn units_of(turn: &Turn, stretch: &Range<u32>) -> Vec<Pass> {
    let Turn { phase, part, micro_batch, .. } = *turn;
    let pass = |unit| Pass { phase, part, unit, micro_batch };
    match phase {
        Phase::Forward => stretch.clone().map(pass).collect(),
        Phase::Backward => stretch.clone().rev().map(pass).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_get_equal_work_and_a_unit_each() {
        // Two blocks' work in the head: its stretch has fewer blocks.
        assert_eq!(balanced_cuts(&[0, 1, 1, 1, 1, 1, 1, 2], 2), [5]);
        assert_eq!(balanced_cuts(&[0, 1, 1, 1, 1, 1, 1, 2], 4), [3, 5, 7]);
        // A head with more work than the rest is alone.
        assert_eq!(balanced_cuts(&[0, 1, 1, 9], 2), [3]);
        // As many stretches as units.
        assert_eq!(balanced_cuts(&[0, 5, 5, 1], 4), [1, 2, 3]);
        assert_eq!(balanced_cuts(&[1; 6], 3), [2, 4]);
        // Every division of small models is compared with all others.
        for seed in 0..200u64 {
            let mixed = |i: u64| (seed * 31 + i * 17).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
            let work: Vec<u64> = (0..3 + seed % 5).map(mixed).collect();
            let count = 2 + (seed % 2) as usize;
            let most = |cuts: &[u32]| {
                let ends = cuts.iter().copied().chain([work.len() as u32]);
                let starts = std::iter::once(0).chain(cuts.iter().copied());
                let of = |(start, end): (u32, u32)| work[start as usize..end as usize].iter().sum::<u64>();
                starts.zip(ends).map(of).max()
            };
            let cuts = balanced_cuts(&work, count);
            assert!(cuts.len() + 1 == count && cuts.is_sorted_by(|a, b| a < b) && cuts[0] > 0, "{work:?}: {cuts:?}");
            for first in 1..work.len() as u32 {
                for second in first + 1..work.len() as u32 {
                    let other = if count == 2 { vec![first] } else { vec![first, second] };
                    assert!(most(&cuts) <= most(&other), "{work:?}: {cuts:?} against {other:?}");
                }
            }
        }
    }
}
