//! The checker: what every program must satisfy before it runs.

use crate::{Action, Extent, Instruction, Program};
use std::collections::BTreeSet;

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
        /// `unit` or `micro-batch`.
        operand: &'static str,
        /// Which one.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// Something is used before it is there.
    #[error("instruction {number} ({action}): {what}")]
    Order {
        /// Which instruction.
        number: usize,
        /// What it does.
        action: &'static str,
        /// What is missing.
        what: String,
    },
    /// Something is left over at the end.
    #[error("at the end of the step {0}")]
    Leftover(String),
}

/// Checks one rank's program: dependencies point backwards, every micro-batch is loaded before use, forwards run in unit order, each
/// backward follows its forward and the backward of the unit above it, every forward is differentiated, each
/// unit is updated once after its last backward, gathered units are released and not used after, and memory effects balance.
pub fn check(program: &Program) -> Result<(), CheckError> {
    let mut state = State::default();
    for (number, instruction) in program.instructions.iter().enumerate() {
        operands(program, number, instruction)?;
        state.apply(program, number, instruction)?;
    }
    state.end(program)
}

fn operands(program: &Program, number: usize, instruction: &Instruction) -> Result<(), CheckError> {
    let action = instruction.action.name();
    if let Some(on) = instruction.after.iter().copied().find(|on| *on as usize >= number) {
        return Err(CheckError::WaitsForward { number, action, on });
    }
    let (unit, micro_batch) = (instruction.action.unit(), instruction.action.micro_batch());
    let units = program.units.len() as u32;
    if let Some(index) = unit.filter(|unit| *unit >= units) {
        return Err(CheckError::NoSuch { number, action, operand: "unit", index, count: units });
    }
    if let Some(index) = micro_batch.filter(|m| *m >= program.micro_batches) {
        return Err(CheckError::NoSuch { number, action, operand: "micro-batch", index, count: program.micro_batches });
    }
    Ok(())
}

#[derive(Default)]
struct State {
    loaded: BTreeSet<u32>,
    forwarded: BTreeSet<(u32, u32)>,
    differentiated: BTreeSet<(u32, u32)>,
    gathered: BTreeSet<u32>,
    updated: BTreeSet<u32>,
    clipped: bool,
    balance: std::collections::BTreeMap<crate::MemoryKind, i64>,
}

impl State {
    fn apply(&mut self, program: &Program, number: usize, instruction: &Instruction) -> Result<(), CheckError> {
        let action = instruction.action.name();
        let unless = |holds: bool, what: &dyn Fn() -> String| {
            if holds { Ok(()) } else { Err(CheckError::Order { number, action, what: what() }) }
        };
        let last = program.units.len() as u32 - 1;
        match instruction.action {
            Action::Load { micro_batch: m } => unless(self.loaded.insert(m), &|| format!("micro-batch {m} again"))?,
            Action::Forward { unit: u, micro_batch: m, .. } => {
                unless(self.loaded.contains(&m), &|| format!("micro-batch {m} is not loaded"))?;
                let below = u == 0 || self.forwarded.contains(&(u - 1, m));
                unless(below, &|| format!("unit {} has not run on micro-batch {m}", u.wrapping_sub(1)))?;
                unless(self.updated.is_empty(), &|| "parameters are already updated".to_owned())?;
                unless(self.forwarded.insert((u, m)), &|| format!("unit {u} ran on micro-batch {m} already"))?;
            }
            Action::Backward { unit: u, micro_batch: m, .. } => {
                unless(self.forwarded.contains(&(u, m)), &|| format!("unit {u} has not run on micro-batch {m}"))?;
                let above = u == last || self.differentiated.contains(&(u + 1, m));
                unless(above, &|| format!("unit {} has not been differentiated", u + 1))?;
                unless(self.updated.is_empty(), &|| "parameters are already updated".to_owned())?;
                unless(self.differentiated.insert((u, m)), &|| format!("unit {u} again"))?;
            }
            Action::Clip => {
                unless(self.forwarded == self.differentiated, &|| "some backward is missing".to_owned())?;
                self.clipped = true;
            }
            Action::Update { unit: u } => {
                unless(self.clipped, &|| "the gradient norm is not known".to_owned())?;
                unless(self.updated.insert(u), &|| format!("unit {u} again"))?;
            }
            Action::Gather { unit: u, .. } if program.placement.parameters == Extent::Shard => {
                self.gathered.insert(u);
            }
            Action::Release { unit: u, keep } if keep == program.mesh.shard_degree() => {
                unless(self.gathered.remove(&u), &|| format!("unit {u} is not gathered"))?;
            }
            Action::Snapshot => {
                unless(self.updated.len() == program.units.len(), &|| "some unit is not updated".to_owned())?;
            }
            _ => {}
        }
        for effect in &instruction.effects {
            let live = self.balance.entry(effect.kind).or_default();
            *live += effect.bytes;
            let live = *live;
            unless(live >= 0, &|| {
                format!("gives back {} bytes of {} more than were taken", -live, effect.kind.name())
            })?;
        }
        Ok(())
    }

    fn end(self, program: &Program) -> Result<(), CheckError> {
        let leftover = |what: String| Err(CheckError::Leftover(what));
        if let Some((u, m)) = self.forwarded.difference(&self.differentiated).next() {
            return leftover(format!("unit {u} was never differentiated on micro-batch {m}"));
        }
        if let Some(unit) = (0..program.units.len() as u32).find(|unit| !self.updated.contains(unit)) {
            return leftover(format!("unit {unit} was never updated"));
        }
        if let Some(unit) = self.gathered.first() {
            return leftover(format!("unit {unit} is still gathered"));
        }
        if let Some((kind, bytes)) = self.balance.iter().find(|(_, bytes)| **bytes != 0) {
            return leftover(format!("{bytes} bytes of {} are not given back", kind.name()));
        }
        Ok(())
    }
}
