//! The parameters and gradients that a rank holds: one flat buffer per unit and role. Each
//! parameter is a view into its unit's buffer.
//!
//! A buffer holds a whole unit or this rank's shard of it. The program's placement decides which.
//!
//! Lanes share buffers by handle. A lane copies a unit's handle under a lock and then works on the
//! buffer without one, because the program's dependencies order the lanes.

mod encoded_copy;
mod gradients;
mod parameters;
mod period;

pub use gradients::{AfterBackward, GradientState};
pub(crate) use parameters::initial_values;
pub use parameters::{ParameterState, UnitParameters};
pub(crate) use period::CurrentPeriod;

use crate::EngineError;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
pub(crate) use trainyard_base::lock;
use trainyard_model::{Model, ParameterSpec, UnitLayout};
use trainyard_program::{Axis, Extent, ParameterServer, Placement, Program};

/// The units that a rank holds, and the part of each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holding {
    /// Per unit, true if the rank holds it; None if it holds all.
    units: Option<Arc<[bool]>>,
    /// Per unit, the pipeline stage that runs it; empty if there is one stage.
    stages: Arc<[u32]>,
    /// This rank's pipeline stage.
    stage: u32,
    /// Index of this rank among those with different micro-batches, and their number. Ranks that
    /// share a sequence, the parts of a product or a pipeline have the same index.
    pub data: (usize, usize),
    /// Index of this rank in its context-parallel group, and the number of ranks there.
    pub context: (usize, usize),
    /// Index of this rank in its tensor-parallel group.
    pub tensor: usize,
    /// Index of this rank among the replicas that hold the same experts, and their number, where
    /// replicas divide experts; else (0, 1).
    pub experts: (usize, usize),
    /// The units that a lower pipeline stage holds as well, because this one borrows them.
    pub of_lower_stages: Arc<BTreeSet<usize>>,
    /// Full or shard, for each kind of state.
    pub placement: Placement,
    /// Index of this rank's shard.
    pub shard: usize,
    /// Number of shards.
    pub shards: usize,
    /// The parameter server. Its servers own the masters, and ranks that are none own nothing.
    pub server: Option<ParameterServer>,
}

impl Holding {
    /// Everything, on one rank.
    pub fn whole() -> Holding {
        Holding {
            units: None,
            stages: Arc::default(),
            stage: 0,
            data: (0, 1),
            context: (0, 1),
            tensor: 0,
            experts: (0, 1),
            of_lower_stages: Arc::default(),
            placement: Placement::WHOLE,
            shard: 0,
            shards: 1,
            server: None,
        }
    }

    /// The part that the program's rank holds: that of the units it runs.
    pub fn of(program: &Program) -> Holding {
        let group = program.mesh.group(program.rank, Axis::Shard);
        let holds = program.holds();
        let units = (0..program.units.len() as u32).map(|unit| holds.binary_search(&unit).is_ok()).collect();
        let (shard, shards) = (group.index as usize, group.ranks.len());
        let at = program.mesh.coordinates(program.rank);
        let experts = program.mesh.expert_replicas(program.rank);
        let stages = (0..program.units.len() as u32).map(|unit| program.stage_of(unit)).collect();
        let stage = program.stage();
        let lower = |unit: &u32| program.holders(*unit).first().is_some_and(|first| *first < stage);
        let of_lower_stages = Arc::new(holds.iter().filter(|unit| lower(unit)).map(|unit| *unit as usize).collect());
        Holding {
            units: Some(units),
            stages,
            stage,
            data: (program.mesh.data_rank(program.rank) as usize, program.mesh.data_parallel() as usize),
            context: (at.cp as usize, program.mesh.cp as usize),
            tensor: at.tp as usize,
            experts: (experts.index as usize, experts.ranks.len()),
            of_lower_stages,
            placement: program.placement,
            shard,
            shards,
            server: program.server,
        }
    }

    /// Number of ranks that own elements: the first of the shard group.
    pub(crate) fn owners(&self) -> usize {
        self.server.map_or(self.shards, |server| server.servers as usize)
    }

    /// The elements of the trained region of a unit's flat buffer that the rank with index `owner`
    /// owns.
    pub(crate) fn owned_by(&self, owner: usize, layout: &UnitLayout) -> Range<usize> {
        if owner >= self.owners() {
            return 0..0;
        }
        let each = self.shards / self.owners() * layout.shard_elements();
        owner * each..(owner + 1) * each
    }

    /// True on the first of the ranks that hold one replica together.
    pub(crate) fn is_first_of_replica(&self) -> bool {
        (self.stage, self.shard, self.tensor) == (0, 0, 0)
    }

    /// Index of this rank among those of the shard group that hold the same masters, and their
    /// number: all of the group if nothing is sharded.
    pub(crate) fn copy(&self) -> (usize, usize) {
        match self.placement.masters {
            Extent::Full => (self.shard, self.shards),
            Extent::Shard => (0, 1),
        }
    }

    /// The pipeline stage that runs `unit`.
    pub fn stage_of(&self, unit: usize) -> u32 {
        self.stages.get(unit).copied().unwrap_or(0)
    }

    /// True if the rank runs `unit`. It may hold it without: a stage holds what its units borrow.
    pub fn runs(&self, unit: usize) -> bool {
        self.stage_of(unit) == self.stage
    }

    /// True if the rank holds `unit`.
    pub fn holds(&self, unit: usize) -> bool {
        self.units.as_ref().is_none_or(|units| units.get(unit).is_some_and(|held| *held))
    }

    /// The parameters of `unit`; none if the rank does not hold it.
    pub(crate) fn parameters<'m>(&self, model: &'m Model, unit: usize) -> &'m [ParameterSpec] {
        if self.holds(unit) { model.units()[unit].parameters() } else { &[] }
    }

    /// The rank's own elements of the trained region of a unit's flat buffer.
    pub fn own(&self, layout: &UnitLayout) -> Range<usize> {
        self.owned_by(self.shard, layout)
    }

    /// The elements of a unit's gradient whose sum over the data ranks the rank has: its own, or
    /// all
    /// if nothing is sharded.
    pub(crate) fn summed(&self, layout: &UnitLayout) -> Range<usize> {
        self.range(self.placement.masters, layout)
    }

    /// The rank's own elements of the frozen region.
    pub fn own_frozen(&self, layout: &UnitLayout) -> Range<usize> {
        let (first, each) = (layout.trained_elements(), layout.frozen_shard_elements());
        first + self.shard * each..first + (self.shard + 1) * each
    }

    /// The elements of the trained region that a buffer of `extent` holds.
    pub fn range(&self, extent: Extent, layout: &UnitLayout) -> Range<usize> {
        match extent {
            Extent::Full => 0..layout.trained_elements(),
            Extent::Shard => self.own(layout),
        }
    }
}

/// The part of `inner` that lies in `outer`; empty at `outer`'s nearer end when none does.
pub(crate) fn overlap(inner: &Range<usize>, outer: &Range<usize>) -> Range<usize> {
    let start = inner.start.clamp(outer.start, outer.end);
    start..inner.end.clamp(start, outer.end)
}

/// The error for input that does not fit the model or the run.
pub(crate) fn does_not_fit(what: impl Into<String>) -> EngineError {
    EngineError::DoesNotFit(what.into())
}
