//! Memory over a program, and what its lanes move.

use crate::{Effect, Lane, MemoryKind, Program};
use serde::Serialize;

/// A rank's memory over its program, one instruction after the other. Lanes that run ahead of that
/// order may hold a little more for a while; the program's dependencies bound it by what `prefetch`
/// allows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Memory {
    /// Held from the first instruction to the last.
    pub resident_bytes: u64,
    /// Per instruction, bytes held while it runs: what it takes and works with included, what it
    /// gives back still there.
    pub running_bytes: Vec<u64>,
    /// The most of them.
    pub peak_bytes: u64,
    /// The first instruction at which it is reached.
    pub peak_at: usize,
    /// What is held there, by kind.
    pub at_peak: Vec<Effect>,
}

/// What a lane does in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct LaneSummary {
    /// Which.
    pub lane: Lane,
    /// Its instructions.
    pub instructions: usize,
    /// The messages of all of them.
    pub bytes: u64,
}

/// A program with what it holds and moves: what `trainyard program --json` prints.
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

    /// What each lane does that has anything to do.
    pub fn summary(&self) -> Vec<LaneSummary> {
        let of = |lane| {
            let bytes = self.on_lane(lane).map(|number| self.instructions[number].bytes).sum();
            LaneSummary { lane, instructions: self.on_lane(lane).count(), bytes }
        };
        self.lanes().map(of).collect()
    }
}
