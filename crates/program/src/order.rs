//! The order in which a rank runs its units forward and backward.

use crate::{Part, Phase};
use std::ops::Range;

/// One run of a unit on a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pass {
    /// Forward or backward.
    pub phase: Phase,
    /// Which half of a backward.
    pub part: Part,
    /// Which unit.
    pub unit: u32,
    /// On which micro-batch.
    pub micro_batch: u32,
}

/// Each micro-batch forward and then backward: what a rank does that holds all units.
pub fn one_after_the_other(units: Range<u32>, micro_batches: u32) -> Vec<Pass> {
    let mut passes = Vec::with_capacity(2 * micro_batches as usize * units.len());
    for micro_batch in 0..micro_batches {
        let part = Part::Whole;
        passes.extend(units.clone().map(|unit| Pass { phase: Phase::Forward, part, unit, micro_batch }));
        passes.extend(units.clone().rev().map(|unit| Pass { phase: Phase::Backward, part, unit, micro_batch }));
    }
    passes
}
