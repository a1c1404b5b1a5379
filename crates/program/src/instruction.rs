//! What a step is made of.

use crate::Axis;
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

/// Which gradients a backward computes; zero-bubble schedules do the halves apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackwardPart {
    /// Those of the input and of the weights.
    #[default]
    Whole,
    /// Those of the input.
    Input,
    /// Those of the weights.
    Weights,
}

/// A forward or a backward.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Activations go up.
    Forward,
    /// Their gradients come down.
    Backward,
}

/// State of a unit that can lie in a lower tier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum State {
    /// The copy that forward reads, in its resident extent.
    Parameters,
    /// Masters and optimizer state of a chunk of what the rank holds of the unit; with them come
    /// its gradients, where those lie in the tier too. Where the state lies on the host, what is
    /// fetched are the gradients alone, and what is evicted is the copy that the update wrote: the
    /// update runs where the state is.
    Optimizer {
        /// Which chunk.
        chunk: u32,
    },
    /// The sum of gradients that the update reads, as far as it has come.
    Gradients,
    /// What a forward kept.
    Activations {
        /// Of which micro-batch.
        micro_batch: u32,
    },
}

/// What a collective inside a unit does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Sums, whole on every rank.
    AllReduce,
    /// Parts to wholes and wholes to summed parts, of the same bytes: an all-reduce in two steps
    /// with the sequence split between them.
    GatherScatter,
    /// Every rank's keys and values pass by every other.
    Ring,
    /// A part from every rank to every rank.
    AllToAll,
}

/// One thing that a rank does. `unit` and `micro_batch` count from zero; a rank's micro-batch m of
/// A is number (data-parallel rank) x A + m of the global batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Action {
    /// Takes the next micro-batch from the loader to the device.
    Load {
        /// Which of the rank's micro-batches.
        micro_batch: u32,
    },
    /// Sums the step's tokens and targets over the data ranks: the loss is a mean over the targets
    /// of the whole global batch.
    Count,
    /// Gathers a unit's parameters from neighbours of the shard group.
    Gather {
        /// Which unit.
        unit: u32,
        /// From how many neighbours, this rank included: the whole shard group, or the part of it
        /// that a release kept the unit in.
        over: u32,
    },
    /// Drops a gathered copy.
    Release {
        /// Which unit.
        unit: u32,
        /// One of how many parts stays: the shard group's size leaves only the resident shard.
        keep: u32,
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
    /// Differentiates a unit, after running it again if only its input was kept.
    Backward {
        /// Which unit.
        unit: u32,
        /// On which micro-batch.
        micro_batch: u32,
        /// Which gradients.
        part: BackwardPart,
    },
    /// Folds a micro-batch's gradient of a unit into those before it along a binary tree: while the
    /// lowest two buffers stand for equally many micro-batches, the later is added to the earlier
    /// and given back.
    Fold {
        /// Which unit.
        unit: u32,
        /// The micro-batch just differentiated; odd, since even ones have nothing to be folded
        /// with.
        micro_batch: u32,
    },
    /// Sums a unit's gradient over the data ranks: reduce-scatter inside the shard group, then
    /// all-reduce of the shard across replicas. Each rank keeps what its placement says.
    Reduce {
        /// Which unit.
        unit: u32,
        /// Whether the sum is added to the resident one instead of taking its place.
        accumulate: bool,
    },
    /// Sums the gradient of a unit that several stages of a pipeline hold (a tied embedding) over
    /// them.
    Tie {
        /// Which unit.
        unit: u32,
    },
    /// Sends the activations of a unit, or their gradients, across a pipeline cut.
    Send {
        /// To which rank.
        to: u32,
        /// Whose output crosses.
        unit: u32,
        /// Of which micro-batch.
        micro_batch: u32,
        /// Activations (forward) or their gradients (backward).
        phase: Phase,
    },
    /// Receives them.
    Recv {
        /// From which rank.
        from: u32,
        /// Whose output crosses.
        unit: u32,
        /// Of which micro-batch.
        micro_batch: u32,
        /// Activations (forward) or their gradients (backward).
        phase: Phase,
    },
    /// The collectives inside a unit that tensor, context and expert parallelism need.
    Exchange {
        /// What is done.
        collective: Collective,
        /// Among whom.
        axis: Axis,
        /// Inside which unit.
        unit: u32,
        /// On which micro-batch.
        micro_batch: u32,
        /// In its forward or its backward.
        phase: Phase,
        /// How often, each of the instruction's bytes.
        times: u32,
    },
    /// The global gradient norm, and from it the factor that updates multiply gradients by; and the
    /// step's loss.
    Clip,
    /// The optimizer on a chunk of what the rank holds of a unit's masters; writes that part of the
    /// next compute copy.
    Update {
        /// Which unit.
        unit: u32,
        /// Which chunk: a unit is one, unless its optimizer state lies in a tier.
        chunk: u32,
    },
    /// Brings state from its tier.
    Fetch {
        /// Of which unit.
        unit: u32,
        /// What.
        state: State,
    },
    /// Gives back the device's copy of state that lies in a tier.
    Evict {
        /// Of which unit.
        unit: u32,
        /// What.
        state: State,
        /// Whether it is written there first; otherwise the tier has it already.
        write: bool,
    },
    /// Hands the state to the checkpoint writer.
    Snapshot,
}

/// Where an instruction runs. The instructions of one lane run in program order; lanes run beside
/// each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Parameter gathers.
    Gather,
    /// Gradient reductions.
    Reduce,
    /// Sends of a pipeline.
    Send,
    /// Its receives; apart from the sends, so that neighbours that both send do not wait for each
    /// other.
    Receive,
    /// Collectives inside units: tensor, context and expert parallelism.
    Inner,
    /// Batches from the loader.
    Input,
    /// Traffic with the host and disk tiers, and snapshots.
    HostIo,
}

impl Lane {
    /// Every lane, in the order of displays.
    pub const ALL: [Lane; 8] =
        [Lane::Compute, Lane::Gather, Lane::Reduce, Lane::Send, Lane::Receive, Lane::Inner, Lane::Input, Lane::HostIo];

    /// The name in traces and prints.
    pub const fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::Gather => "gather",
            Lane::Reduce => "reduce",
            Lane::Send => "send",
            Lane::Receive => "receive",
            Lane::Inner => "inner",
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
            Action::Forward { .. }
            | Action::Backward { .. }
            | Action::Fold { .. }
            | Action::Clip
            | Action::Update { .. } => Lane::Compute,
            Action::Count | Action::Reduce { .. } | Action::Tie { .. } => Lane::Reduce,
            Action::Send { .. } => Lane::Send,
            Action::Recv { .. } => Lane::Receive,
            Action::Exchange { .. } => Lane::Inner,
            Action::Fetch { .. } | Action::Evict { .. } | Action::Snapshot => Lane::HostIo,
        }
    }

    /// The action's name, without operands.
    pub const fn name(self) -> &'static str {
        match self {
            Action::Load { .. } => "load",
            Action::Count => "count",
            Action::Gather { .. } => "gather",
            Action::Release { .. } => "release",
            Action::Forward { .. } => "forward",
            Action::Backward { .. } => "backward",
            Action::Fold { .. } => "fold",
            Action::Reduce { .. } => "reduce",
            Action::Tie { .. } => "tie",
            Action::Send { .. } => "send",
            Action::Recv { .. } => "recv",
            Action::Exchange { .. } => "exchange",
            Action::Clip => "clip",
            Action::Update { .. } => "update",
            Action::Fetch { .. } => "fetch",
            Action::Evict { .. } => "evict",
            Action::Snapshot => "snapshot",
        }
    }

    /// The unit it is about.
    pub const fn unit(self) -> Option<u32> {
        match self {
            Action::Gather { unit, .. }
            | Action::Release { unit, .. }
            | Action::Forward { unit, .. }
            | Action::Backward { unit, .. }
            | Action::Fold { unit, .. }
            | Action::Reduce { unit, .. }
            | Action::Tie { unit }
            | Action::Send { unit, .. }
            | Action::Recv { unit, .. }
            | Action::Exchange { unit, .. }
            | Action::Update { unit, .. }
            | Action::Fetch { unit, .. }
            | Action::Evict { unit, .. } => Some(unit),
            Action::Load { .. } | Action::Count | Action::Clip | Action::Snapshot => None,
        }
    }

    /// The micro-batch it is about.
    pub const fn micro_batch(self) -> Option<u32> {
        match self {
            Action::Load { micro_batch }
            | Action::Forward { micro_batch, .. }
            | Action::Backward { micro_batch, .. }
            | Action::Fold { micro_batch, .. }
            | Action::Send { micro_batch, .. }
            | Action::Recv { micro_batch, .. }
            | Action::Exchange { micro_batch, .. }
            | Action::Fetch { state: State::Activations { micro_batch }, .. }
            | Action::Evict { state: State::Activations { micro_batch }, .. } => Some(micro_batch),
            _ => None,
        }
    }
}

/// What memory is held for; the words of the engine's pool, which counts parameters and masters as
/// one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// The resident copy that forward reads.
    Parameters,
    /// f32 masters, where they are apart from it.
    Masters,
    /// Gathered parameters.
    Gathered,
    /// Gradients of parameters.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// Activations kept between a forward and its backward.
    Activations,
    /// Staging of collectives.
    Communication,
    /// Batches.
    Data,
}

impl MemoryKind {
    /// Every kind, in the order of displays.
    pub const ALL: [MemoryKind; 8] = [
        MemoryKind::Parameters,
        MemoryKind::Masters,
        MemoryKind::Gathered,
        MemoryKind::Gradients,
        MemoryKind::Optimizer,
        MemoryKind::Activations,
        MemoryKind::Communication,
        MemoryKind::Data,
    ];

    /// The name in prints.
    pub const fn name(self) -> &'static str {
        match self {
            MemoryKind::Parameters => "parameters",
            MemoryKind::Masters => "masters",
            MemoryKind::Gathered => "gathered",
            MemoryKind::Gradients => "gradients",
            MemoryKind::Optimizer => "optimizer",
            MemoryKind::Activations => "activations",
            MemoryKind::Communication => "communication",
            MemoryKind::Data => "data",
        }
    }
}

/// Memory held, or a change of it that outlasts its instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Effect {
    /// Of which kind.
    pub kind: MemoryKind,
    /// Bytes taken (positive) or given back (negative). What an instruction takes it takes when it
    /// starts; what it gives back it gives back when it ends.
    pub bytes: i64,
}

/// An action in its place: its number is its index in the program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Instruction {
    /// What is done.
    #[serde(flatten)]
    pub action: Action,
    /// Instructions of other lanes that must have finished, by number, descending. Those that
    /// earlier ones of the same lane or these themselves waited for are implied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u32>,
    /// Bytes of the message: of the whole buffer that a collective works on (an all-gather's
    /// output, a reduce-scatter's input), of what a send, fetch or evict moves. 0 for what stays on
    /// the rank, and for a group of one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// Bytes of activations that it holds while it runs and not after: what a backward recomputes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub working_bytes: u64,
    /// What it does to memory for longer than it runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub effects: Vec<Effect>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl Instruction {
    /// An action that waits for nothing, moves nothing and holds nothing.
    pub fn new(action: Action) -> Instruction {
        Instruction { action, after: Vec::new(), bytes: 0, working_bytes: 0, effects: Vec::new() }
    }

    pub(crate) fn moving(mut self, bytes: u64) -> Instruction {
        self.bytes = bytes;
        self
    }

    pub(crate) fn working(mut self, bytes: u64) -> Instruction {
        self.working_bytes = bytes;
        self
    }

    pub(crate) fn taking(self, kind: MemoryKind, bytes: u64) -> Instruction {
        self.changing(kind, bytes as i64)
    }

    pub(crate) fn giving_back(self, kind: MemoryKind, bytes: u64) -> Instruction {
        self.changing(kind, -(bytes as i64))
    }

    fn changing(mut self, kind: MemoryKind, bytes: i64) -> Instruction {
        if bytes != 0 {
            match self.effects.iter_mut().find(|effect| effect.kind == kind && (effect.bytes < 0) == (bytes < 0)) {
                Some(effect) => effect.bytes += bytes,
                None => self.effects.push(Effect { kind, bytes }),
            }
        }
        self
    }
}
