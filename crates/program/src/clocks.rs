//! Vector clocks over lanes or streams: everything that has finished when an instruction starts
//! (Fidge 1988, Mattern 1989).

use crate::{Program, Streams};

/// Number of streams. The first ones are the lanes.
pub const STREAMS: usize = Streams::COUNT;

/// Per stream, one more than the number of the last instruction that is known to have finished; 0
/// if none has.
pub type Clock = [u32; STREAMS];

/// Adds everything that `other` knows.
pub fn merge(clock: &mut Clock, other: &Clock) {
    for (ours, theirs) in clock.iter_mut().zip(other) {
        *ours = (*theirs).max(*ours);
    }
}

/// The order of a program's instructions: which of them wait for which, directly or indirectly.
pub struct HappensBefore {
    streams: Vec<usize>,
    clocks: Vec<Clock>,
}

impl HappensBefore {
    /// The order of a program whose dependencies point backwards, with its lanes as streams.
    pub fn of(program: &Program) -> HappensBefore {
        let instructions = &program.instructions;
        let lane = |number: usize| instructions[number].action.lane() as usize;
        HappensBefore::new(instructions.len(), lane, |number| instructions[number].after.iter().copied())
    }

    /// The order of the same program on `streams`.
    pub fn on_streams(program: &Program, streams: &Streams<'_>) -> HappensBefore {
        HappensBefore::new(program.instructions.len(), |number| streams.of(number), |number| streams.waits(number))
    }

    fn new<W: Iterator<Item = u32>>(
        count: usize,
        stream: impl Fn(usize) -> usize,
        waits: impl Fn(usize) -> W,
    ) -> HappensBefore {
        let mut lasts = [[0; STREAMS]; STREAMS];
        let mut order = HappensBefore { streams: Vec::with_capacity(count), clocks: Vec::with_capacity(count) };
        for number in 0..count {
            let stream = stream(number);
            let mut clock = lasts[stream];
            for on in waits(number) {
                merge(&mut clock, &order.clocks[on as usize]);
            }
            clock[stream] = number as u32 + 1;
            lasts[stream] = clock;
            order.clocks.push(clock);
            order.streams.push(stream);
        }
        order
    }

    /// True if `earlier` has always finished when `later` starts.
    pub fn holds(&self, earlier: u32, later: u32) -> bool {
        earlier != later && self.clocks[later as usize][self.stream(earlier)] > earlier
    }

    /// Index of the stream that an instruction runs on.
    pub fn stream(&self, number: u32) -> usize {
        self.streams[number as usize]
    }
}
