//! One rank's step.

use crate::{Action, BackwardPart, Effect, Instruction, Lane, Mesh, Offload, Phase, Placement, State, Tier};
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
    /// Per unit, in how many chunks its optimizer state is fetched and updated; empty: each in one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<u32>,
    /// The names of the model's units, by number.
    pub units: Vec<String>,
    /// Per unit, the units whose parameters it reads besides its own.
    pub borrows: Vec<Vec<u32>>,
    /// The stretches of units that this rank runs, ascending; without a pipeline, one of all units.
    pub stages: Vec<Range<u32>>,
    /// How many micro-batches a rank's step has.
    pub micro_batches: u32,
    /// Whether each micro-batch's gradient has buffers of its own, which are folded along a binary
    /// tree.
    pub folded: bool,
    /// Whether the state is handed to the checkpoint writer.
    pub snapshot: bool,
    /// How many passes ahead of its use anything is brought, and how many reductions may be under
    /// way while gradients are computed.
    pub prefetch: u32,
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

    /// The units whose parameters `unit` reads: its own, and those it borrows.
    pub fn reads(&self, unit: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::once(unit).chain(self.borrows[unit as usize].iter().copied())
    }

    /// In how many chunks the optimizer state of `unit` is updated.
    pub fn chunks_of(&self, unit: u32) -> u32 {
        self.chunks.get(unit as usize).copied().unwrap_or(1)
    }

    /// The units that the rank trains: those it runs, and those they borrow; ascending.
    pub fn trains(&self) -> Vec<u32> {
        let units = self.stages.iter().cloned().flatten();
        let mut units: Vec<u32> = units.flat_map(|unit| self.reads(unit)).collect();
        units.sort_unstable();
        units.dedup();
        units
    }

    /// Whether other stages of the pipeline hold `unit` too: it is borrowed from them or by them.
    pub fn is_shared_between_stages(&self, unit: u32) -> bool {
        let borrows = |(by, from): (u32, &Vec<u32>)| from.contains(&unit) && self.runs(by) != self.runs(unit);
        (0..).zip(&self.borrows).any(borrows)
    }

    /// Where what an action fetches or evicts lies; None for others.
    pub fn tier_of(&self, action: Action) -> Option<Tier> {
        match action {
            Action::Fetch { state, .. } | Action::Evict { state, .. } => match state {
                State::Parameters => self.offload.parameters,
                State::Optimizer { .. } => self.offload.optimizer,
                State::Activations { .. } => self.offload.activations,
                State::Gradients => self.offload.gradients,
            },
            _ => None,
        }
    }

    /// Whether an action copies from the device to the host: what is evicted, and the gradients
    /// that an optimizer there fetches, which evicts to the device.
    pub fn leaves_device(&self, action: Action) -> bool {
        let of_optimizer = |state| matches!(state, State::Optimizer { .. });
        self.tier_of(action) == Some(Tier::Host)
            && match action {
                Action::Fetch { state, .. } => of_optimizer(state),
                Action::Evict { state, .. } => !of_optimizer(state),
                _ => false,
            }
    }

    /// The unit that computes the loss.
    pub fn loss_unit(&self) -> u32 {
        self.units.len() as u32 - 1
    }

    /// Whether a pass over `unit` adds to the gradients of the units it reads: a backward that
    /// differentiates weights, and the loss's forward, which differentiates while it has the logits
    /// (in a pipeline, whose schedules part forwards from backwards, its backward does).
    pub fn adds_gradients(&self, unit: u32, phase: Phase, part: BackwardPart) -> bool {
        match phase {
            Phase::Forward => unit == self.loss_unit() && self.mesh.pp == 1,
            Phase::Backward => part != BackwardPart::Input,
        }
    }
}
