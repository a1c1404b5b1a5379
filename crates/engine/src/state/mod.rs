//! What a rank holds of the model's state: one flat buffer per unit and role, parameters being
//! views into it.
//!
//! A buffer holds all of a unit or this rank's shard of it, as the program's placement says;
//! nothing here knows why. The buffers are handed from lane to lane by handle: a lane takes a
//! unit's handle under a lock, and then works on it without one, because the program's dependencies
//! say whose turn it is.

mod gradients;
mod parameters;

pub use gradients::{AfterBackward, GradientState};
pub(crate) use parameters::initialise;
pub use parameters::{ParameterState, UnitParameters};

use crate::EngineError;
use std::ops::Range;
pub(crate) use trainyard_base::lock;
use trainyard_model::UnitLayout;
use trainyard_program::{Axis, Extent, Placement, Program};

/// What a rank holds of every unit: how much, and which part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holding {
    /// How much of what.
    pub placement: Placement,
    /// Which shard is this rank's.
    pub shard: usize,
    /// Of how many.
    pub shards: usize,
}

impl Holding {
    /// Everything, on one rank.
    pub fn whole() -> Holding {
        Holding { placement: Placement::WHOLE, shard: 0, shards: 1 }
    }

    /// What the program's rank holds.
    pub fn of(program: &Program) -> Holding {
        let group = program.mesh.group(program.rank, Axis::Shard);
        Holding { placement: program.placement, shard: group.index as usize, shards: group.ranks.len() }
    }

    /// The rank's own elements of a unit's flat buffer.
    pub fn own(&self, layout: &UnitLayout) -> Range<usize> {
        self.shard * layout.shard_elements()..(self.shard + 1) * layout.shard_elements()
    }

    /// The elements that a buffer of `extent` holds.
    pub fn range(&self, extent: Extent, layout: &UnitLayout) -> Range<usize> {
        match extent {
            Extent::Full => 0..layout.elements(),
            Extent::Shard => self.own(layout),
        }
    }
}

/// The part of `inner` that lies in `outer`; empty at `outer`'s nearer end when none does.
pub(crate) fn overlap(inner: &Range<usize>, outer: &Range<usize>) -> Range<usize> {
    let start = inner.start.clamp(outer.start, outer.end);
    start..inner.end.clamp(start, outer.end)
}

/// A checkpoint or a weight file does not fit the model.
pub(crate) fn does_not_fit(what: impl Into<String>) -> EngineError {
    EngineError::DoesNotFit(what.into())
}
