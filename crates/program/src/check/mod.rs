//! The checker: what programs must satisfy before they run.
//!
//! [`check`] looks at one rank's program, [`check_ranks`] at those of all ranks together.
//!
//! A program's meaning is that of its instructions one after the other; lanes run them in another
//! order. So a program is right when
//!
//! 1. any two instructions that touch the same thing, one of them changing it, are ordered by lanes
//!    and dependencies (`races`): then every order that lanes can produce means the same as the
//!    program's own; and
//! 2. one after the other, each finds what it needs, and the step does all of its work, once
//!    (`step`); and
//! 3. nothing is brought earlier than planned, so that memory is what was planned (`early`).

mod early;
mod gradients;
mod races;
mod ranks;
mod step;

use crate::clocks::HappensBefore;
use crate::{Action, Lane, Program, State, Streams};
pub use ranks::{Deadlock, check_ranks};

/// A program that must not run.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CheckError {
    /// A dependency on itself or on something later can never be met.
    #[error("instruction {number} ({action}) waits for {on}, which does not come before it")]
    WaitsForward {
        /// Which instruction.
        number: usize,
        /// What it does.
        action: &'static str,
        /// What it waits for.
        on: u32,
    },
    /// An operand that the program does not have.
    #[error("instruction {number} ({action}) names {operand} {index}, but the program has {count}")]
    NoSuch {
        /// Which instruction.
        number: usize,
        /// What it does.
        action: &'static str,
        /// `unit`, `chunk` or `micro-batch`.
        operand: &'static str,
        /// Which one.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// Something is used before it is there, or done again.
    #[error("instruction {number} ({action}): {what}")]
    Order {
        /// Which instruction.
        number: usize,
        /// What it does.
        action: &'static str,
        /// What is missing.
        what: String,
    },
    /// Two instructions that need an order have none.
    #[error(
        "instruction {number} ({action}) and instruction {other} ({with}) both touch {what}, and neither waits for the other"
    )]
    Unordered {
        /// The later instruction.
        number: usize,
        /// What it does.
        action: &'static str,
        /// The earlier one.
        other: usize,
        /// What that does.
        with: &'static str,
        /// What both touch.
        what: String,
    },
    /// Something is left over at the end.
    #[error("at the end of the step {0}")]
    Leftover(String),
    /// The program's tables do not fit together.
    #[error("{0}")]
    Malformed(String),
    /// One of several programs is wrong.
    #[error("the program of rank {rank}: {error}")]
    OfRank {
        /// Whose.
        rank: u32,
        /// What is wrong with it.
        error: Box<CheckError>,
    },
    /// Ranks that meet in a lane want different things.
    #[error("on the {} lane rank {rank} is at {wants}, and rank {peer} at {gets}", .lane.name())]
    Disagree {
        /// The lane of both.
        lane: Lane,
        /// One rank.
        rank: u32,
        /// Its instruction.
        wants: String,
        /// The other rank.
        peer: u32,
        /// The other's instruction.
        gets: String,
    },
    /// Ranks wait for each other for ever.
    #[error("no rank can go on: {0}")]
    Deadlock(Deadlock),
}

/// Checks one rank's program.
///
/// # Errors
///
/// The first thing that is wrong: operands that do not exist, a dependency forward, conflicting
/// instructions without an order, something used that is not there (a unit that is not gathered,
/// state in a lower tier, activations that were evicted), a gradient reduced twice or not at all,
/// an update before the norm, memory given back that was not taken, or anything left over at the
/// end.
pub fn check(program: &Program) -> Result<(), CheckError> {
    tables(program)?;
    operands(program)?;
    let order = HappensBefore::of(program);
    races::check(program, &order)?;
    let streams = Streams::new(program);
    if streams.are_apart() {
        races::check(program, &HappensBefore::on_streams(program, &streams))?;
    }
    step::check(program)?;
    early::check(program, &order)
}

fn tables(program: &Program) -> Result<(), CheckError> {
    let (units, mesh) = (program.units.len(), &program.mesh);
    let malformed = |what: String| Err(CheckError::Malformed(what));
    if units == 0 || program.micro_batches == 0 {
        return malformed("a program has at least one unit and one micro-batch".to_owned());
    }
    let borrows = program.borrows.iter().flatten();
    if program.borrows.len() != units || borrows.clone().any(|unit| *unit as usize >= units) {
        return malformed(format!("borrows do not fit {units} units: {:?}", program.borrows));
    }
    let ends = program.stages.iter().map(|stretch| (stretch.start, stretch.end));
    if !(program.chunks.is_empty() || program.chunks.len() == units) || program.chunks.contains(&0) {
        return malformed(format!("chunks do not fit {units} units: {:?}", program.chunks));
    }
    if program.stages.is_empty() || ends.clone().any(|(start, end)| start >= end || end as usize > units) {
        return malformed(format!("stages do not fit {units} units: {:?}", program.stages));
    }
    let degrees = [mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep];
    if degrees.contains(&0) || program.rank >= mesh.ranks() {
        return malformed(format!("rank {} is not in the mesh {mesh:?}", program.rank));
    }
    Ok(())
}

fn operands(program: &Program) -> Result<(), CheckError> {
    let trains = program.trains();
    for (number, instruction) in program.instructions.iter().enumerate() {
        let action = instruction.action.name();
        if let Some(on) = instruction.after.iter().copied().find(|on| *on as usize >= number) {
            return Err(CheckError::WaitsForward { number, action, on });
        }
        let (count, has) = (program.units.len() as u32, |unit: &u32| match instruction.action {
            Action::Send { .. } | Action::Recv { .. } => (*unit as usize) < program.units.len(),
            Action::Forward { .. } | Action::Backward { .. } | Action::Exchange { .. } => program.runs(*unit),
            _ => trains.binary_search(unit).is_ok(),
        });
        if let Some(index) = instruction.action.unit().filter(|unit| !has(unit)) {
            return Err(CheckError::NoSuch { number, action, operand: "unit", index, count });
        }
        if let Action::Update { unit, chunk }
        | Action::Fetch { unit, state: State::Optimizer { chunk } }
        | Action::Evict { unit, state: State::Optimizer { chunk }, .. } = instruction.action
            && chunk >= program.chunks_of(unit)
        {
            let count = program.chunks_of(unit);
            return Err(CheckError::NoSuch { number, action, operand: "chunk", index: chunk, count });
        }
        if let Some(index) = instruction.action.micro_batch().filter(|m| *m >= program.micro_batches) {
            let count = program.micro_batches;
            return Err(CheckError::NoSuch { number, action, operand: "micro-batch", index, count });
        }
    }
    Ok(())
}
