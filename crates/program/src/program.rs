//! One rank's step.

use crate::{Effect, Instruction, Lane, Mesh, Offload, Placement};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// One rank's step.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Program {
    /// Whose.
    pub rank: u32,
    /// Among which.
    pub mesh: Mesh,
    /// What the rank keeps between steps.
    pub placement: Placement,
    /// Where state lies that is fetched and evicted.
    pub offload: Offload,
    /// The names of the model's units, by number.
    pub units: Vec<String>,
    /// The stretches of units that this rank runs, ascending; without a pipeline, one of all units.
    pub stages: Vec<Range<u32>>,
    /// How many micro-batches a rank's step has.
    pub micro_batches: u32,
    /// Bytes held for the whole step.
    pub resident: Vec<Effect>,
    /// In order; dependencies point backwards only.
    pub instructions: Vec<Instruction>,
}

impl Program {
    /// The numbers of a lane's instructions, in order.
    pub fn on_lane(&self, lane: Lane) -> impl Iterator<Item = usize> + '_ {
        self.instructions.iter().enumerate().filter(move |(_, i)| i.action.lane() == lane).map(|(number, _)| number)
    }

    /// The lanes that have anything to do.
    pub fn lanes(&self) -> impl Iterator<Item = Lane> + '_ {
        Lane::ALL.into_iter().filter(|lane| self.on_lane(*lane).next().is_some())
    }

    /// Whether the rank runs `unit`.
    pub fn runs(&self, unit: u32) -> bool {
        self.stages.iter().any(|stage| stage.contains(&unit))
    }
}
