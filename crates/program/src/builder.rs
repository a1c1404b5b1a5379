//! Instructions in order, each with exactly the dependencies that its lane and its other
//! dependencies do not imply.

use crate::Instruction;
use crate::clocks::{Clock, STREAMS, merge};

/// A program under construction.
///
/// A lowering states all that an instruction needs. What is implied is left out by vector clocks:
/// when an instruction has finished, so have all before it on its lane and all that those waited
/// for.
#[derive(Default)]
pub struct Builder {
    instructions: Vec<Instruction>,
    /// What has finished when an instruction has.
    clocks: Vec<Clock>,
    /// What has finished when a lane's last instruction has.
    lanes: [Clock; STREAMS],
}

impl Builder {
    /// Adds an instruction that needs those of `needs` to have finished, and returns its number.
    pub fn push(&mut self, mut instruction: Instruction, needs: impl IntoIterator<Item = u32>) -> u32 {
        let number = self.instructions.len() as u32;
        let lane = instruction.action.lane() as usize;
        let mut clock = self.lanes[lane];
        let mut needs: Vec<u32> = needs.into_iter().collect();
        // Later instructions may imply earlier ones, never the other way round.
        needs.sort_unstable_by(|a, b| b.cmp(a));
        for need in needs {
            let of = self.instructions[need as usize].action.lane() as usize;
            if clock[of] <= need {
                instruction.after.push(need);
                merge(&mut clock, &self.clocks[need as usize]);
            }
        }
        clock[lane] = number + 1;
        self.lanes[lane] = clock;
        self.clocks.push(clock);
        self.instructions.push(instruction);
        number
    }

    /// The instructions.
    pub fn finish(self) -> Vec<Instruction> {
        self.instructions
    }
}
