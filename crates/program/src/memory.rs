//! Memory over the course of a program, and the traffic of its lanes.

use crate::{Effect, Lane, MemoryKind, Program};
use serde::Serialize;

/// A rank's memory over its program, one instruction after the other. Lanes that run ahead of that
/// order may hold a little more for a while; the program's dependencies bound it by `prefetch`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Memory {
    /// Bytes held from the first instruction to the last.
    pub resident_bytes: u64,
    /// Per instruction, bytes held while it runs. They include what it takes and works with; what
    /// it gives back still counts.
    pub running_bytes: Vec<u64>,
    /// Maximum of `running_bytes`.
    pub peak_bytes: u64,
    /// The first instruction that reaches the peak.
    pub peak_at: usize,
    /// Bytes at the peak, by kind.
    pub at_peak: Vec<Effect>,
}

/// The instructions and traffic of a lane in one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct LaneSummary {
    /// The lane.
    pub lane: Lane,
    /// Number of its instructions.
    pub instructions: usize,
    /// Sum of their message bytes.
    pub bytes: u64,
}

/// A program with its memory and lanes, as `trainyard program --json` prints it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Report<'p> {
    /// The program.
    #[serde(flatten)]
    pub program: &'p Program,
    /// Its memory.
    pub memory: Memory,
    /// Its lanes.
    pub lanes: Vec<LaneSummary>,
}

impl Memory {
    /// Adds up the effects of `program`.
    pub fn of(program: &Program) -> Memory {
        let mut live = [0i64; MemoryKind::ALL.len()];
        for effect in &program.resident {
            live[effect.kind as usize] += effect.bytes;
        }
        let total = |live: &[i64]| live.iter().sum::<i64>() as u64;
        let resident_bytes = total(&live);
        let (mut peak, mut peak_at, mut at_peak) = (resident_bytes, 0, live);
        let mut running_bytes = Vec::with_capacity(program.instructions.len());
        for (number, instruction) in program.instructions.iter().enumerate() {
            for effect in instruction.effects.iter().filter(|effect| effect.bytes > 0) {
                live[effect.kind as usize] += effect.bytes;
            }
            let running = total(&live) + instruction.working_bytes;
            if running > peak {
                (peak, peak_at, at_peak) = (running, number, live);
                at_peak[MemoryKind::Activations as usize] += instruction.working_bytes as i64;
            }
            running_bytes.push(running);
            for effect in instruction.effects.iter().filter(|effect| effect.bytes < 0) {
                live[effect.kind as usize] += effect.bytes;
            }
        }
        let held = MemoryKind::ALL.into_iter().zip(at_peak).map(|(kind, bytes)| Effect { kind, bytes });
        let at_peak = held.filter(|effect| effect.bytes != 0).collect();
        Memory { resident_bytes, running_bytes, peak_bytes: peak, peak_at, at_peak }
    }
}

impl Program {
    /// The program with its memory and its lanes.
    pub fn report(&self) -> Report<'_> {
        Report { program: self, memory: Memory::of(self), lanes: self.summary() }
    }

    /// A summary per lane that has instructions.
    pub fn summary(&self) -> Vec<LaneSummary> {
        let of = |lane| {
            let bytes = self.on_lane(lane).map(|number| self.instructions[number].bytes).sum();
            LaneSummary { lane, instructions: self.on_lane(lane).count(), bytes }
        };
        self.lanes().map(of).collect()
    }
}
