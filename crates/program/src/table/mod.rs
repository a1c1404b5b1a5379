//! A pipeline schedule as a table: the turns of every stage in order, and the stage of every
//! stretch of units.
//!
//! A table comes from a [known schedule](crate::PipelineSchedule) or from a
//! [file](ScheduleTable::parse). All readers work on the table, whatever its origin.

mod arrivals;
mod csv;

use crate::{BackwardPart, Phase, PipelineSchedule, Turn};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::fmt;
use std::ops::Range;

/// The order of forwards and backwards in a pipeline: a known one, or the user's own.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Schedule {
    /// A schedule with a name.
    Known(PipelineSchedule),
    /// A table from a file.
    Own(ScheduleTable),
}

/// The turns of every stage of a pipeline. Every stretch runs forward once on every micro-batch and
/// backward once, whole or in two halves, and the stages come to an end together. Serialised as the
/// text that [`ScheduleTable::parse`] reads.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ScheduleTable {
    turns: Vec<Vec<Turn>>,
    stage_of: Vec<u32>,
    micro_batches: u32,
}

/// A reason why a table is no schedule. Lines and cells count from 1; every line is a stage.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TableError {
    /// A cell cannot be a turn at its place.
    #[error("line {line}, cell {cell} ({text}): {fault}")]
    Cell {
        /// Number of the line.
        line: usize,
        /// Number of the cell.
        cell: usize,
        /// Its text.
        text: String,
        /// Its fault.
        fault: CellFault,
    },
    /// A stage has no turns.
    #[error("line {0} has no turns: every line is a stage, and every stage runs a stretch of units")]
    IdleStage(usize),
    /// There are no lines.
    #[error("there are no turns: a table has one line per stage, with cells such as 0F0")]
    Empty,
    /// A turn is missing.
    #[error("{0} is missing")]
    Missing(Turn),
}

/// A reason why a cell of a table cannot be a turn at its place.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CellFault {
    /// It is not written like a turn.
    #[error("a turn is a stretch, one of F, B, I and W, and a micro-batch, as in 0F0")]
    Unreadable,
    /// It moves data, which follows from the turns.
    #[error("{0} is no computation: write the table without communication, which follows from it")]
    NoComputation(String),
    /// Its stretch or micro-batch is higher than the number of turns.
    #[error("the table has {0} turns, too few for this number")]
    TooHigh(usize),
    /// It runs again what has run already.
    #[error("runs again what line {line}, cell {cell} runs")]
    Again {
        /// Number of the line.
        line: usize,
        /// Number of the cell.
        cell: usize,
    },
    /// Another stage runs the stretch too.
    #[error("stretch {stretch} is that of line {line}: one stage runs all turns of a stretch")]
    OtherStage {
        /// Index of the stretch.
        stretch: u32,
        /// Number of the line that runs it.
        line: usize,
    },
    /// It comes before a turn of its own stage that it needs.
    #[error("comes before {0} on its line")]
    TooEarly(Turn),
    /// It waits for another stage for ever.
    #[error("waits for {0}, which waits for a later turn of this line")]
    WaitsForEver(Turn),
}

/// The durations of turns, in any unit of time. A whole backward takes as long as its two halves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TurnTimes {
    /// A forward.
    pub forward: u64,
    /// The half of a backward for the input.
    pub input: u64,
    /// The half of a backward for weights.
    pub weights: u64,
}

impl TurnTimes {
    /// Forward and both halves take equally long.
    pub const EQUAL: TurnTimes = TurnTimes { forward: 1, input: 1, weights: 1 };

    /// The duration of a forward, or of a part of a backward.
    pub const fn of(self, phase: Phase, part: BackwardPart) -> u64 {
        match (phase, part) {
            (Phase::Forward, _) => self.forward,
            (_, BackwardPart::Whole) => self.input + self.weights,
            (_, BackwardPart::Input) => self.input,
            (_, BackwardPart::Weights) => self.weights,
        }
    }
}

impl ScheduleTable {
    /// The table of a known schedule, which is right by construction.
    pub(crate) fn of_known(turns: Vec<Vec<Turn>>, stage_of: Vec<u32>, micro_batches: u32) -> ScheduleTable {
        ScheduleTable { turns, stage_of, micro_batches }
    }

    /// The table with these turns per stage.
    ///
    /// # Errors
    ///
    /// Turns that are missing, repeated, out of order or on two stages, and stages that wait for
    /// each other for ever.
    pub fn new(turns: Vec<Vec<Turn>>) -> Result<ScheduleTable, TableError> {
        let numbered = |turns: Vec<Turn>| turns.into_iter().enumerate().map(|(at, turn)| (at + 1, turn)).collect();
        ScheduleTable::of_cells(turns.into_iter().map(numbered).collect())
    }

    /// The table with these turns per stage, each with the number of its cell.
    fn of_cells(stages: Vec<Vec<(usize, Turn)>>) -> Result<ScheduleTable, TableError> {
        if stages.is_empty() {
            return Err(TableError::Empty);
        }
        if let Some(idle) = stages.iter().position(Vec::is_empty) {
            return Err(TableError::IdleStage(idle + 1));
        }
        let cells = || {
            stages
                .iter()
                .enumerate()
                .flat_map(|(at, cells)| cells.iter().map(move |(cell, turn)| (at + 1, *cell, turn)))
        };
        let refuse =
            |line, cell, turn: &Turn, fault| Err(TableError::Cell { line, cell, text: turn.to_string(), fault });
        let count = cells().count();
        if let Some((line, cell, turn)) = cells().find(|(_, _, t)| t.stretch.max(t.micro_batch) as usize >= count) {
            return refuse(line, cell, turn, CellFault::TooHigh(count));
        }
        let stretches = cells().map(|(_, _, turn)| turn.stretch + 1).max().unwrap_or(0) as usize;
        let micro_batches = cells().map(|(_, _, turn)| turn.micro_batch + 1).max().unwrap_or(0) as usize;
        // Every one has a forward and a backward.
        if 2 * stretches * micro_batches > count {
            return Err(TableError::Missing(missing(cells().map(|(_, _, turn)| turn), micro_batches as u32)));
        }
        let mut stage_of: Vec<Option<usize>> = vec![None; stretches];
        // Per stretch and micro-batch, the cells of its forward and of both halves of its backward.
        let mut ran = vec![[None; 3]; stretches * micro_batches];
        for (line, cell, turn) in cells() {
            let stage = *stage_of[turn.stretch as usize].get_or_insert(line);
            if stage != line {
                return refuse(line, cell, turn, CellFault::OtherStage { stretch: turn.stretch, line: stage });
            }
            let ran: &mut [Option<(usize, usize)>; 3] =
                &mut ran[turn.stretch as usize * micro_batches + turn.micro_batch as usize];
            let (needs, does): (usize, &[usize]) = match (turn.phase, turn.part) {
                (Phase::Forward, _) => (0, &[0]),
                (_, BackwardPart::Whole) => (1, &[1, 2]),
                (_, BackwardPart::Input) => (1, &[1]),
                (_, BackwardPart::Weights) => (2, &[2]),
            };
            if let Some((line_before, cell_before)) = does.iter().find_map(|does| ran[*does]) {
                return refuse(line, cell, turn, CellFault::Again { line: line_before, cell: cell_before });
            }
            if let Some(without) = ran[..needs].iter().position(Option::is_none) {
                return refuse(line, cell, turn, CellFault::TooEarly(step(without, turn.stretch, turn.micro_batch)));
            }
            does.iter().for_each(|does| ran[*does] = Some((line, cell)));
        }
        for (place, ran) in ran.iter().enumerate() {
            if let Some(without) = ran.iter().position(Option::is_none) {
                let turn = step(without, (place / micro_batches) as u32, (place % micro_batches) as u32);
                // Without both halves, a whole backward is missing.
                let part = if without == 1 { BackwardPart::Whole } else { turn.part };
                return Err(TableError::Missing(Turn { part, ..turn }));
            }
        }
        let table = ScheduleTable {
            turns: stages.iter().map(|cells| cells.iter().map(|(_, turn)| *turn).collect()).collect(),
            stage_of: stage_of.into_iter().map(|line| line.map_or(0, |line| line as u32 - 1)).collect(),
            micro_batches: micro_batches as u32,
        };
        let walk = Walk::of(&table, TurnTimes::EQUAL);
        let stuck = (0..stages.len()).find(|stage| walk.spans[*stage].len() < stages[*stage].len());
        if let Some(stage) = stuck {
            let (cell, turn) = &stages[stage][walk.spans[stage].len()];
            let needs = table.needs(turn).map_or(*turn, |(needs, _)| needs);
            return refuse(stage + 1, *cell, turn, CellFault::WaitsForEver(needs));
        }
        Ok(table)
    }

    /// Number of pipeline stages.
    pub fn stages(&self) -> u32 {
        self.turns.len() as u32
    }

    /// Number of micro-batches.
    pub fn micro_batches(&self) -> u32 {
        self.micro_batches
    }

    /// Per stretch of the model, the stage that runs it.
    pub fn stage_of(&self) -> &[u32] {
        &self.stage_of
    }

    /// The turns of a stage, in order.
    pub fn turns(&self, stage: u32) -> &[Turn] {
        &self.turns[stage as usize]
    }

    /// The turn whose result `turn` takes as its input, and its stage. None for the first stretch
    /// forward, and for the half of a backward that has no input of its own.
    pub fn needs(&self, turn: &Turn) -> Option<(Turn, u32)> {
        let last = self.stage_of.len() as u32 - 1;
        let stretch = match (turn.phase, turn.part) {
            (_, BackwardPart::Weights) => return None,
            (Phase::Forward, _) => turn.stretch.checked_sub(1)?,
            // The loss's gradient is its own.
            (Phase::Backward, _) if turn.stretch == last => return None,
            (Phase::Backward, _) => turn.stretch + 1,
        };
        Some((Turn { stretch, ..*turn }, self.stage_of[stretch as usize]))
    }

    /// The times at which turns run if only turns take time: per stage and turn, from the start to
    /// the end.
    pub fn play(&self, times: TurnTimes) -> Vec<Vec<Range<u64>>> {
        Walk::of(self, times).spans
    }

    /// The number of a forward, or of the part of a backward that gives the input's gradient.
    fn place(&self, turn: &Turn) -> usize {
        let stretch = turn.phase as usize * self.stage_of.len() + turn.stretch as usize;
        stretch * self.micro_batches as usize + turn.micro_batch as usize
    }
}

/// The first turn that is missing among too few to be complete.
fn missing<'t>(turns: impl Iterator<Item = &'t Turn>, micro_batches: u32) -> Turn {
    let has: BTreeSet<(u32, u32, Phase)> = turns.map(|turn| (turn.stretch, turn.micro_batch, turn.phase)).collect();
    let all = (0..).flat_map(|stretch| (0..micro_batches).map(move |micro_batch| (stretch, micro_batch)));
    let mut turns = all.flat_map(|(stretch, micro_batch)| {
        [(Phase::Forward, stretch, micro_batch), (Phase::Backward, stretch, micro_batch)]
    });
    let first = turns.find(|(phase, stretch, micro_batch)| !has.contains(&(*stretch, *micro_batch, *phase)));
    let (phase, stretch, micro_batch) = first.unwrap_or((Phase::Forward, 0, 0));
    Turn { phase, part: BackwardPart::Whole, stretch, micro_batch }
}

/// The forward, and the halves of the backward, of a stretch on a micro-batch, by number.
fn step(number: usize, stretch: u32, micro_batch: u32) -> Turn {
    let (phase, part) = match number {
        0 => (Phase::Forward, BackwardPart::Whole),
        1 => (Phase::Backward, BackwardPart::Input),
        _ => (Phase::Backward, BackwardPart::Weights),
    };
    Turn { phase, part, stretch, micro_batch }
}

/// The turns of a table in an order in which they can run, with the times at which they do.
struct Walk {
    spans: Vec<Vec<Range<u64>>>,
    order: Vec<(u32, u32)>,
}

impl Walk {
    /// Runs every turn as early as possible. Turns that wait for each other for ever are left out.
    fn of(table: &ScheduleTable, times: TurnTimes) -> Walk {
        let stages = table.turns.len();
        let mut walk = Walk { spans: vec![Vec::new(); stages], order: Vec::new() };
        let mut done: Vec<Option<u64>> = vec![None; 2 * table.stage_of.len() * table.micro_batches as usize];
        let mut queued = vec![false; stages];
        let mut queue = BinaryHeap::new();
        let mut look_at: Vec<usize> = (0..stages).collect();
        loop {
            for stage in look_at.drain(..) {
                let Some(turn) = table.turns[stage].get(walk.spans[stage].len()).filter(|_| !queued[stage]) else {
                    continue;
                };
                let ready = table.needs(turn).map_or(Some(0), |(needs, _)| done[table.place(&needs)]);
                if let Some(ready) = ready {
                    let free = walk.spans[stage].last().map_or(0, |span| span.end);
                    queue.push(Reverse((free.max(ready), stage)));
                    queued[stage] = true;
                }
            }
            let Some(Reverse((start, stage))) = queue.pop() else { break };
            queued[stage] = false;
            let number = walk.spans[stage].len();
            let turn = &table.turns[stage][number];
            let end = start + times.of(turn.phase, turn.part);
            walk.spans[stage].push(start..end);
            walk.order.push((stage as u32, number as u32));
            look_at.push(stage);
            if turn.part != BackwardPart::Weights {
                done[table.place(turn)] = Some(end);
                let next = match turn.phase {
                    Phase::Forward => Some(turn.stretch + 1),
                    Phase::Backward => turn.stretch.checked_sub(1),
                };
                let taker = next.and_then(|next| table.stage_of.get(next as usize));
                look_at.extend(taker.map(|stage| *stage as usize).filter(|taker| *taker != stage));
            }
        }
        walk
    }
}

impl Schedule {
    /// Number of stretches of units of a pipeline of `pp` stages.
    pub fn stretches(&self, pp: u32) -> u32 {
        match self {
            Schedule::Known(schedule) => pp * schedule.facts().chunks,
            Schedule::Own(table) => table.stage_of.len() as u32,
        }
    }
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule::Known(PipelineSchedule::default())
    }
}

impl From<PipelineSchedule> for Schedule {
    fn from(schedule: PipelineSchedule) -> Schedule {
        Schedule::Known(schedule)
    }
}

impl From<ScheduleTable> for Schedule {
    fn from(table: ScheduleTable) -> Schedule {
        Schedule::Own(table)
    }
}

impl PartialEq<PipelineSchedule> for Schedule {
    fn eq(&self, other: &PipelineSchedule) -> bool {
        matches!(self, Schedule::Known(schedule) if schedule == other)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::Known(schedule) => schedule.fmt(f),
            Schedule::Own(_) => f.write_str("a table of its own"),
        }
    }
}
