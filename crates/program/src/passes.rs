//! The passes of a rank: its turns, unit by unit; and the cuts of a pipeline.

use crate::{BackwardPart, Mesh, Phase, Schedule, ScheduleTable, Strategy, StrategyError, Turn};
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
    pub fn new(units: u32, mesh: &Mesh, strategy: &Strategy) -> Result<Pipeline, StrategyError> {
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
        Ok(Pipeline { stretches: stretches(units, table.stage_of(), &strategy.cuts), table, arrivals })
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

/// The stretches of units of a pipeline, whose stages are given per stretch.
fn stretches(units: u32, stage_of: &[u32], cuts: &[u32]) -> Vec<Stretch> {
    let even = if cuts.is_empty() { even_cuts(units, stage_of.len() as u32) } else { Vec::new() };
    let cuts = || cuts.iter().chain(&even).copied();
    let starts = std::iter::once(0).chain(cuts());
    let ends = cuts().chain([units]);
    starts.zip(ends).zip(stage_of).map(|((start, end), stage)| Stretch { units: start..end, stage: *stage }).collect()
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

fn units_of(turn: &Turn, stretch: &Range<u32>) -> Vec<Pass> {
    let Turn { phase, part, micro_batch, .. } = *turn;
    let pass = |unit| Pass { phase, part, unit, micro_batch };
    match phase {
        Phase::Forward => stretch.clone().map(pass).collect(),
        Phase::Backward => stretch.clone().rev().map(pass).collect(),
    }
}
