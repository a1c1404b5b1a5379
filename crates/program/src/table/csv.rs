//! Tables as text, in the format of PyTorch's `torch.distributed.pipelining`: a line per stage,
//! cells that are turns. `2F0` is stretch 2 forward on micro-batch 0; `B` is a whole backward, `I`
//! its half for the input, `W` its half for weights. Empty cells are idle.

use super::{CellFault, ScheduleTable, TableError};
use crate::{BackwardPart, Phase, Turn};
use std::fmt;

impl ScheduleTable {
    /// Reads a table. `(2F1;5B0)OVERLAP_F_B`, PyTorch's pair of a forward and a backward, is taken
    /// as one after the other.
    ///
    /// # Errors
    ///
    /// A cell that is no turn, and those of [`ScheduleTable::new`].
    pub fn parse(text: &str) -> Result<ScheduleTable, TableError> {
        let mut stages: Vec<Vec<(usize, Turn)>> = Vec::new();
        for (at, line) in text.trim_end().lines().enumerate() {
            let mut turns = Vec::new();
            for (number, text) in line.split(',').map(str::trim).enumerate().filter(|(_, text)| !text.is_empty()) {
                let (line, cell) = (at + 1, number + 1);
                let read =
                    cell_turns(text).map_err(|fault| TableError::Cell { line, cell, text: text.to_owned(), fault });
                turns.extend(read?.into_iter().map(|turn| (cell, turn)));
            }
            stages.push(turns);
        }
        ScheduleTable::of_cells(stages)
    }
}

/// The turns of a cell that is not empty.
fn cell_turns(text: &str) -> Result<Vec<Turn>, CellFault> {
    match text.strip_suffix("OVERLAP_F_B") {
        Some(pair) => {
            let pair = pair.trim().strip_prefix('(').and_then(|pair| pair.strip_suffix(')'));
            pair.ok_or(CellFault::Unreadable)?.split(';').map(|turn| one_turn(turn.trim())).collect()
        }
        None => Ok(vec![one_turn(text)?]),
    }
}

fn one_turn(text: &str) -> Result<Turn, CellFault> {
    let is_digit = |c: char| c.is_ascii_digit();
    let (stretch, rest) = text.split_at(text.find(|c| !is_digit(c)).unwrap_or(text.len()));
    let (name, micro_batch) = rest.split_at(rest.find(is_digit).unwrap_or(rest.len()));
    let (phase, part) = match name {
        "F" => (Phase::Forward, BackwardPart::Whole),
        "B" => (Phase::Backward, BackwardPart::Whole),
        "I" => (Phase::Backward, BackwardPart::Input),
        "W" => (Phase::Backward, BackwardPart::Weights),
        "SEND_F" | "RECV_F" | "SEND_B" | "RECV_B" | "UNSHARD" | "RESHARD" | "REDUCE_GRAD" => {
            return Err(CellFault::NoComputation(name.to_owned()));
        }
        _ => return Err(CellFault::Unreadable),
    };
    let number = |digits: &str| digits.parse().map_err(|_| CellFault::Unreadable);
    Ok(Turn { phase, part, stretch: number(stretch)?, micro_batch: number(micro_batch)? })
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match (self.phase, self.part) {
            (Phase::Forward, _) => 'F',
            (_, BackwardPart::Whole) => 'B',
            (_, BackwardPart::Input) => 'I',
            (_, BackwardPart::Weights) => 'W',
        };
        write!(f, "{}{name}{}", self.stretch, self.micro_batch)
    }
}

impl fmt::Display for ScheduleTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for turns in &self.turns {
            let cells: Vec<String> = turns.iter().map(Turn::to_string).collect();
            writeln!(f, "{}", cells.join(","))?;
        }
        Ok(())
    }
}

impl TryFrom<String> for ScheduleTable {
    type Error = TableError;

    fn try_from(text: String) -> Result<ScheduleTable, TableError> {
        ScheduleTable::parse(&text)
    }
}

impl From<ScheduleTable> for String {
    fn from(table: ScheduleTable) -> String {
        table.to_string()
    }
}
