//! Programs as text.

use crate::instruction::{Action, Instruction, Keep, Program};
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

fn details(instruction: &Instruction) -> String {
    let mut details = Vec::new();
    if !instruction.after.is_empty() {
        let after: Vec<String> = instruction.after.iter().map(u32::to_string).collect();
        details.push(format!("after {}", after.join(", ")));
    }
    for effect in &instruction.effects {
        details.push(format!("{:?} {:+} bytes", effect.kind, effect.bytes).to_lowercase());
    }
    details.join("; ")
}

fn describe(program: &Program, action: Action) -> String {
    let name = action.name();
    let unit_name = |unit: u32| program.units.get(unit as usize).map_or("?", String::as_str);
    match action {
        Action::Load { micro_batch } => format!("{name} micro-batch {micro_batch}"),
        Action::Forward { unit, micro_batch, keep } => {
            let keep = match keep {
                Keep::Everything => "",
                Keep::Selective => ", keep selective",
                Keep::InputOnly => ", keep input",
            };
            format!("{name} {} {micro_batch}{keep}", unit_name(unit))
        }
        Action::Backward { unit, micro_batch } => format!("{name} {} {micro_batch}", unit_name(unit)),
        Action::Gather { unit }
        | Action::Release { unit }
        | Action::Reduce { unit }
        | Action::Update { unit }
        | Action::Fetch { unit }
        | Action::Evict { unit } => format!("{name} {}", unit_name(unit)),
        Action::Send { to, micro_batch } => format!("{name} micro-batch {micro_batch} to {to}"),
        Action::Recv { from, micro_batch } => format!("{name} micro-batch {micro_batch} from {from}"),
        Action::Clip | Action::Snapshot => name.to_owned(),
    }
}
