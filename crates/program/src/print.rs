//! Programs as text.

use crate::{Action, Instruction, Keep, Part, Phase, Program, State};
use std::fmt;

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "rank {}: {} instructions, {} units, {} micro-batches",
            self.rank,
            self.instructions.len(),
            self.units.len(),
            self.micro_batches
        )?;
        for (number, instruction) in self.instructions.iter().enumerate() {
            let lane = instruction.action.lane().name();
            let line =
                format!("{number:>5}  {lane:<8} {:<34} {}", describe(self, instruction.action), details(instruction));
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl Program {
    /// Instruction `number` in words, without lane and dependencies.
    ///
    /// # Panics
    ///
    /// When there is none.
    pub fn describe(&self, number: usize) -> String {
        describe(self, self.instructions[number].action)
    }
}

fn details(instruction: &Instruction) -> String {
    let mut details = Vec::new();
    if !instruction.after.is_empty() {
        let after: Vec<String> = instruction.after.iter().map(u32::to_string).collect();
        details.push(format!("after {}", after.join(", ")));
    }
    if instruction.bytes > 0 {
        details.push(format!("moves {}", instruction.bytes));
    }
    for effect in &instruction.effects {
        details.push(format!("{} {:+}", effect.kind.name(), effect.bytes));
    }
    details.join("; ")
}

fn describe(program: &Program, action: Action) -> String {
    let name = action.name();
    let unit_name = |unit: u32| program.units.get(unit as usize).map_or("?", String::as_str);
    match action {
        Action::Forward { unit, micro_batch, keep } => {
            let keep = match keep {
                Keep::Everything => "",
                Keep::Selective => ", keep selective",
                Keep::InputOnly => ", keep input",
            };
            format!("{name} {} {micro_batch}{keep}", unit_name(unit))
        }
        Action::Backward { unit, micro_batch, part } => {
            let part = match part {
                Part::Whole => "",
                Part::Input => ", of the input",
                Part::Weights => ", of the weights",
            };
            format!("{name} {} {micro_batch}{part}", unit_name(unit))
        }
        Action::Load { micro_batch } => format!("{name} micro-batch {micro_batch}"),
        Action::Fold { unit, micro_batch } => format!("{name} {} {micro_batch}", unit_name(unit)),
        Action::Gather { unit, over } => format!("{name} {} from {over}", unit_name(unit)),
        Action::Release { unit, keep } if keep == program.mesh.shard_degree() => format!("{name} {}", unit_name(unit)),
        Action::Release { unit, keep } => format!("{name} {} to 1/{keep}", unit_name(unit)),
        Action::Reduce { unit, accumulate } => {
            format!("{name} {}{}", unit_name(unit), if accumulate { ", add" } else { "" })
        }
        Action::Update { unit } | Action::Tie { unit } => format!("{name} {}", unit_name(unit)),
        Action::Fetch { unit, state } => format!("{name} {} of {}", state_name(state), unit_name(unit)),
        Action::Evict { unit, state, write } => {
            format!("{} {} of {}", if write { name } else { "drop" }, state_name(state), unit_name(unit))
        }
        Action::Send { to, unit, micro_batch, phase } => {
            format!("{name} {} {micro_batch} to {to}", flow(unit_name(unit), phase))
        }
        Action::Recv { from, unit, micro_batch, phase } => {
            format!("{name} {} {micro_batch} from {from}", flow(unit_name(unit), phase))
        }
        Action::Exchange { collective, axis, unit, micro_batch, phase, times } => {
            let what = format!("{collective:?} x {times} over {axis:?}").to_lowercase();
            format!("{what}, {} {micro_batch}", flow(unit_name(unit), phase))
        }
        Action::Count | Action::Clip | Action::Snapshot => name.to_owned(),
    }
}

fn state_name(state: State) -> String {
    match state {
        State::Parameters => "parameters".to_owned(),
        State::Optimizer => "optimizer".to_owned(),
        State::Activations { micro_batch } => format!("activations {micro_batch}"),
    }
}

fn flow(unit: &str, phase: Phase) -> String {
    match phase {
        Phase::Forward => unit.to_owned(),
        Phase::Backward => format!("gradient of {unit}"),
    }
}
