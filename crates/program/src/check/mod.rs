//! The checker: the conditions that programs must meet before they run.
//!
//! [`check`] looks at one rank's program, [`check_ranks`] at those of all ranks together.
//!
//! The meaning of a program is that of its instructions executed one after the other. The lanes
//! execute them in another order. A program is therefore right if four conditions hold:
//!
//! 1. Any two instructions that touch the same thing, one of them changing it, are ordered by lanes
//!    and dependencies (`races`). Every order that lanes can produce then means the same as the
//!    program's own order.
//! 2. In the program's own order, each instruction finds what it needs, and the step does all of
//!    its work exactly once (`step`).
//! 3. Nothing is brought earlier than planned, so that memory stays within the plan (`early`).
//! 4. Every value has the layout over ranks that its users take, and every sum over ranks is over
//!    the right axis (`types`).

mod early;
mod gradients;
mod races;
mod ranks;
mod step;
mod types;

use crate::clocks::HappensBefore;
use crate::{Action, BackwardPart, Lane, Program, State, Streams, Stretch};
pub use ranks::{Deadlock, check_ranks};

/// The reason why a program must not run.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CheckError {
    /// An instruction waits for itself or for a later one, which can never be met.
    #[error("instruction {number} ({action}) waits for {on}, which does not come before it")]
    WaitsForward {
        /// Number of the instruction.
        number: usize,
        /// Name of its action.
        action: &'static str,
        /// Number of the instruction it waits for.
        on: u32,
    },
    /// An operand is out of the program's range.
    #[error("instruction {number} ({action}) names {operand} {index}, but the program has {count}")]
    NoSuch {
        /// Number of the instruction.
        number: usize,
        /// Name of its action.
        action: &'static str,
        /// `unit`, `segment`, `border`, `chunk` or `micro-batch`.
        operand: &'static str,
        /// Index that was given.
        index: u32,
        /// Number of such operands in the program; valid indices are below it.
        count: u32,
    },
    /// Something is used before it exists, or is done a second time.
    #[error("instruction {number} ({action}): {what}")]
    Order {
        /// Number of the instruction.
        number: usize,
        /// Name of its action.
        action: &'static str,
        /// The missing or repeated thing, in words.
        what: String,
    },
    /// Two instructions touch the same thing without an order between them.
    #[error(
        "instruction {number} ({action}) and instruction {other} ({with}) both touch {what}, and neither waits for the other"
    )]
    Unordered {
        /// Number of the later instruction.
        number: usize,
        /// Name of its action.
        action: &'static str,
        /// Number of the earlier instruction.
        other: usize,
        /// Name of its action.
        with: &'static str,
        /// The thing that both touch, in words.
        what: String,
    },
    /// An operand does not have the layout over ranks that the instruction takes, or a sum is over
    /// a wrong axis.
    #[error("instruction {number} ({action}): {what}")]
    Layout {
        /// Number of the instruction.
        number: usize,
        /// Name of its action.
        action: &'static str,
        /// The fault, in words.
        what: String,
    },
    /// The layouts inside a split unit break a rule.
    #[error("unit {unit}: {what}")]
    Rule {
        /// Name of the unit.
        unit: String,
        /// The broken rule, in words.
        what: String,
    },
    /// Something is left over at the end of the step.
    #[error("at the end of the step {0}")]
    Leftover(String),
    /// The program's tables contradict each other.
    #[error("{0}")]
    Malformed(String),
    /// The program of one rank is wrong.
    #[error("the program of rank {rank}: {error}")]
    OfRank {
        /// The rank.
        rank: u32,
        /// The fault in its program.
        error: Box<CheckError>,
    },
    /// Two ranks meet in a lane with different instructions.
    #[error("on the {} lane rank {rank} is at {wants}, and rank {peer} at {gets}", .lane.name())]
    Disagree {
        /// Lane of both instructions.
        lane: Lane,
        /// One of the two ranks.
        rank: u32,
        /// Its instruction, in words.
        wants: String,
        /// The other rank.
        peer: u32,
        /// The other rank's instruction, in words.
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
/// The first fault that is found: an operand that does not exist, a dependency on a later
/// instruction, two conflicting instructions without an order, use of something that is not there
/// (a unit that is not gathered, state in a lower tier, activations that were evicted), a gradient
/// that is reduced twice or never, a value in another layout than the one that is taken, a sum over
/// a wrong axis, an update before the norm, memory that is given back without
/// being taken, or anything left over at the end.
pub fn check(program: &Program) -> Result<(), CheckError> {
    tables(program)?;
    operands(program)?;
    types::check(program)?;
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
    if !(program.chunks.is_empty() || program.chunks.len() == units) || program.chunks.contains(&0) {
        return malformed(format!("chunks do not fit {units} units: {:?}", program.chunks));
    }
    if !program.splits.is_empty() && (program.splits.len() != units || mesh.tp * mesh.cp == 1) {
        let ranks = mesh.tp * mesh.cp;
        return malformed(format!("{} of {units} units are split over {ranks} ranks", program.splits.len()));
    }
    for (name, split) in program.units.iter().zip(&program.splits) {
        if let Some(fault) = split.fault() {
            return malformed(format!("unit {name} is split, but {fault}"));
        }
    }
    let degrees = [mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep];
    if degrees.contains(&0) || program.rank >= mesh.ranks() {
        return malformed(format!("rank {} is not in the mesh {mesh:?}", program.rank));
    }
    let (mut end, mut stages) = (0, vec![false; mesh.pp as usize]);
    for Stretch { units: stretch, stage } in &program.pipeline {
        if stretch.start != end || stretch.end <= end || *stage >= mesh.pp {
            return malformed(format!("the pipeline does not fit {units} units: {:?}", program.pipeline));
        }
        (end, stages[*stage as usize]) = (stretch.end, true);
    }
    if end as usize != units || stages.contains(&false) {
        return malformed(format!("the pipeline does not fit {units} units: {:?}", program.pipeline));
    }
    if program.fused_loss && !backward_follows_loss(program) {
        return malformed("the loss's forward computes gradients, but its backward does not follow".to_owned());
    }
    Ok(())
}

/// True if each forward of the loss unit is followed by its backward on the same micro-batch.
fn backward_follows_loss(program: &Program) -> bool {
    let loss = program.loss_unit();
    let mut forwarded = None;
    for action in program.instructions.iter().map(|instruction| instruction.action) {
        let follows = match action {
            Action::Forward { unit, micro_batch, .. } => {
                // The segments of a split loss unit follow each other.
                forwarded.is_none_or(|on| (unit, micro_batch) == (loss, on))
            }
            Action::Backward { unit, micro_batch, part, .. } => {
                forwarded.is_none_or(|on| (unit, part != BackwardPart::Weights) == (loss, true) && on == micro_batch)
            }
            _ => continue,
        };
        if !follows {
            return false;
        }
        forwarded = match action {
            Action::Forward { unit, micro_batch, .. } if unit == loss => Some(micro_batch),
            _ => None,
        };
    }
    forwarded.is_none()
}

fn operands(program: &Program) -> Result<(), CheckError> {
    let holds = program.holds();
    for (number, instruction) in program.instructions.iter().enumerate() {
        let action = instruction.action.name();
        if let Some(on) = instruction.after.iter().copied().find(|on| *on as usize >= number) {
            return Err(CheckError::WaitsForward { number, action, on });
        }
        let (count, has) = (program.units.len() as u32, |unit: &u32| match instruction.action {
            Action::Send { .. } | Action::Recv { .. } => (*unit as usize) < program.units.len(),
            Action::Forward { .. } | Action::Backward { .. } | Action::Exchange { .. } => program.runs(*unit),
            _ => holds.binary_search(unit).is_ok(),
        });
        if let Some(index) = instruction.action.unit().filter(|unit| !has(unit)) {
            return Err(CheckError::NoSuch { number, action, operand: "unit", index, count });
        }
        if let Some((operand, index, count)) = inside(program, instruction.action).filter(|(_, i, count)| i >= count) {
            return Err(CheckError::NoSuch { number, action, operand, index, count });
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

/// The part of a unit that an action names: its kind, its index, and the number of such parts.
fn inside(program: &Program, action: Action) -> Option<(&'static str, u32, u32)> {
    match action {
        Action::Forward { unit, segment, .. } | Action::Backward { unit, segment, .. } => {
            Some(("segment", segment, program.split_of(unit).map_or(1, |split| split.segments.len() as u32)))
        }
        Action::Exchange { unit, border, .. } => {
            Some(("border", border, program.split_of(unit).map_or(1, |split| split.borders.len() as u32)))
        }
        _ => None,
    }
}
