//! What must have finished when an instruction starts: vector clocks over lanes (Fidge 1988, Mattern 1989).

use crate::{Lane, Program};

/// How many lanes there are.
pub const LANES: usize = Lane::ALL.len();

/// Per lane, one more than the number of the last instruction that is known to have finished; 0: none is.
pub type Clock = [u32; LANES];

/// Takes over all that `other` knows.
pub fn merge(clock: &mut Clock, other: &Clock) {
    for (ours, theirs) in clock.iter_mut().zip(other) {
        *ours = (*theirs).max(*ours);
    }
}

/// Which instructions of a program wait, directly or not, for which.
pub struct HappensBefore {
    lanes: Vec<Lane>,
    clocks: Vec<Clock>,
}

impl HappensBefore {
    /// Of a program whose dependencies point backwards.
    pub fn of(program: &Program) -> HappensBefore {
        let mut lasts = [[0; LANES]; LANES];
        let mut order = HappensBefore { lanes: Vec::new(), clocks: Vec::with_capacity(program.instructions.len()) };
        for (number, instruction) in (1..).zip(&program.instructions) {
            let lane = instruction.action.lane();
            let mut clock = lasts[lane as usize];
            for on in &instruction.after {
                merge(&mut clock, &order.clocks[*on as usize]);
            }
            clock[lane as usize] = number;
            lasts[lane as usize] = clock;
            order.clocks.push(clock);
            order.lanes.push(lane);
        }
        order
    }

    /// Whether `earlier` has finished whenever `later` starts.
    pub fn holds(&self, earlier: u32, later: u32) -> bool {
        earlier != later && self.clocks[later as usize][self.lanes[earlier as usize] as usize] > earlier
    }
}
