//! What a step is made of.

use serde::{Deserialize, Serialize};

/// How much a forward keeps for its backward.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// All that backward reads.
    #[default]
    Everything,
    /// All but the results of cheap functions, which backward recomputes.
    Selective,
    /// The unit's input; backward runs the forward again first.
    InputOnly,
}

/// One thing that a rank does. `unit` and `micro_batch` count from zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Action {
    /// Takes the next micro-batch from the loader to the device.
    Load {
        /// Which of the step's micro-batches.
        micro_batch: u32,
    },
    /// Gathers a unit's parameters inside its shard group.
    Gather {
        /// Which unit.
        unit: u32,
    },
    /// Drops the gathered copy.
    Release {
        /// Which unit.
        unit: u32,
    },
    /// Runs a unit.
    Forward {
        /// Which unit.
        unit: u32,
        /// On which micro-batch.
        micro_batch: u32,
        /// What is kept for backward.
        keep: Keep,
    },
    /// Differentiates a unit: input and weight gradients, after running it again if only its input was kept.
    Backward {
        /// Which unit.
        unit: u32,
        /// On which micro-batch.
        micro_batch: u32,
    },
    /// Sums a unit's gradients over the ranks that hold replicas, leaving each its shard.
    Reduce {
        /// Which unit.
        unit: u32,
    },
    /// Sends an activation, or its gradient, across a pipeline cut.
    Send {
        /// To which rank.
        to: u32,
        /// Of which micro-batch.
        micro_batch: u32,
    },
    /// Receives one.
    Recv {
        /// From which rank.
        from: u32,
        /// Of which micro-batch.
        micro_batch: u32,
    },
    /// The global gradient norm, and from it the factor that updates multiply gradients by.
    Clip,
    /// The optimizer on the rank's own shard of a unit; writes the next compute copy.
    Update {
        /// Which unit.
        unit: u32,
    },
    /// Brings a unit's state from the host or disk tier.
    Fetch {
        /// Which unit.
        unit: u32,
    },
    /// Moves a unit's state to the host or disk tier.
    Evict {
        /// Which unit.
        unit: u32,
    },
    /// Hands the state to the checkpoint writer.
    Snapshot,
}

/// Where an instruction runs. The instructions of one lane run in program order; lanes run beside each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Parameter gathers.
    Gather,
    /// Gradient reductions.
    Reduce,
    /// Pipeline sends and receives.
    Pipeline,
    /// Batches from the loader.
    Input,
    /// Traffic with the host and disk tiers, and snapshots.
    HostIo,
}

impl Lane {
    /// Every lane, in the order of displays.
    pub const ALL: [Lane; 6] = [Lane::Compute, Lane::Gather, Lane::Reduce, Lane::Pipeline, Lane::Input, Lane::HostIo];

    /// The name in traces and prints.
    pub const fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::Gather => "gather",
            Lane::Reduce => "reduce",
            Lane::Pipeline => "pipeline",
            Lane::Input => "input",
            Lane::HostIo => "host_io",
        }
    }
}

impl Action {
    /// The lane that the action belongs to.
    pub const fn lane(self) -> Lane {
        match self {
            Action::Load { .. } => Lane::Input,
            Action::Gather { .. } | Action::Release { .. } => Lane::Gather,
            Action::Forward { .. } | Action::Backward { .. } | Action::Clip | Action::Update { .. } => Lane::Compute,
            Action::Reduce { .. } => Lane::Reduce,
            Action::Send { .. } | Action::Recv { .. } => Lane::Pipeline,
            Action::Fetch { .. } | Action::Evict { .. } | Action::Snapshot => Lane::HostIo,
        }
    }

    /// The action's name, without operands.
    pub const fn name(self) -> &'static str {
        match self {
            Action::Load { .. } => "load",
            Action::Gather { .. } => "gather",
            Action::Release { .. } => "release",
            Action::Forward { .. } => "forward",
            Action::Backward { .. } => "backward",
            Action::Reduce { .. } => "reduce",
            Action::Send { .. } => "send",
            Action::Recv { .. } => "recv",
            Action::Clip => "clip",
            Action::Update { .. } => "update",
            Action::Fetch { .. } => "fetch",
            Action::Evict { .. } => "evict",
            Action::Snapshot => "snapshot",
        }
    }
}

/// What memory is held for; the words of the engine's pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Activations kept between a forward and its backward.
    Activations,
    /// Gathered parameters.
    Gathered,
    /// Batches.
    Data,
}

/// A change of live memory that outlasts its instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Effect {
    /// Of which kind.
    pub kind: MemoryKind,
    /// Bytes taken (positive) or given back (negative).
    pub bytes: i64,
}

/// An action in its place: its number is its index in the program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Instruction {
    /// What is done.
    #[serde(flatten)]
    pub action: Action,
    /// Instructions of other lanes that must have finished, by number. Those earlier on the same lane are implied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u32>,
    /// What it does to memory for longer than it runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub effects: Vec<Effect>,
}

/// One rank's step.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Program {
    /// Whose.
    pub rank: u32,
    /// The names of the units, by number.
    pub units: Vec<String>,
    /// How many micro-batches a step has.
    pub micro_batches: u32,
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
}
