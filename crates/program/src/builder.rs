//! Collects instructions in order and records only the dependencies that are not implied already.

use crate::Instruction;
use crate::clocks::{Clock, STREAMS, merge};

/// A program under construction.
///
/// A lowering states everything that an instruction needs. The builder leaves out what is implied.
/// A finished instruction implies that all earlier instructions of its lane have finished, and
/// everything they waited for. Vector clocks keep track of this.
#[derive(Default)]
pub struct Builder {
    instructions: Vec<Instruction>,
    /// Per instruction, everything that has finished once it has finished.
    clocks: Vec<Clock>,
    /// Per lane, everything that has finished once the lane's last instruction has.
    lanes: [Clock; STREAMS],
}

impl Builder {
    /// Adds an instruction that starts after all of `needs` have finished, and returns its number.
    pub fn push(&mut self, mut instruction: Instruction, needs: impl IntoIterator<Item = u32>) -> u32 {
        let number = self.instructions.len() as u32;
        let lane = instruction.action.lane() as usize;
        let mut clock = self.lanes[lane];
        let mut needs: Vec<u32> = needs.into_iter().collect();
        // From the latest to the earliest: a later instruction may imply an earlier one, never the
        // reverse.
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

    /// Returns the instructions in order.
    pub fn finish(self) -> Vec<Instruction> {
        self.instructions
    }
}
