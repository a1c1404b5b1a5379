//! The instructions of a step: actions, the lanes they run on, and their effects on memory.

use crate::{Axes, Axis, Codec, Encoding, Factors};
use serde::{Deserialize, Serialize};

/// The amount of activations that a forward keeps for its backward.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Everything that backward reads.
    #[default]
    Everything,
    /// Everything but the results of cheap functions, which backward recomputes.
    Selective,
    /// The unit's input only. Backward runs the forward again first.
    InputOnly,
}

/// The gradients that a backward computes. Zero-bubble schedules compute the two halves separately.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackwardPart {
    /// The gradients of the input and of the weights.
    #[default]
    Whole,
    /// The gradient of the input only.
    Input,
    /// The gradients of the weights only.
    Weights,
}

/// A forward or a backward.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Activations travel from the first unit to the last.
    Forward,
    /// Gradients of activations travel from the last unit to the first.
    Backward,
}

/// State of a unit that can lie in a lower tier (host memory or disk).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum State {
    /// The resident copy of the parameters, which forward reads: whole or a shard, as
    /// [`Placement`](crate::Placement) says.
    Parameters,
    /// Masters and optimizer state of one chunk of the rank's part of the unit, together with its
    /// gradients if those lie in the tier too.
    ///
    /// If the state lies on the host, the update runs there. The fetch then moves only gradients to
    /// the host, and the eviction moves the updated parameters back to the device.
    Optimizer {
        /// Index of the chunk.
        chunk: u32,
    },
    /// The sum of gradients that the update reads, with the contributions so far.
    Gradients,
    /// The activations that a forward kept.
    Activations {
        /// Index of the micro-batch.
        micro_batch: u32,
    },
}

/// The kind of a collective inside a unit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Every rank gets the whole sum.
    AllReduce,
    /// Every rank gets every rank's part.
    AllGather,
    /// Every rank gets its part of the sum.
    ReduceScatter,
    /// An all-gather before the products and a reduce-scatter after them. Together they move the
    /// bytes of an all-reduce, with the sequence split between them.
    GatherScatter,
    /// The keys and values of every rank pass by every other rank.
    Ring,
    /// Every rank sends a part to every other rank.
    AllToAll,
}

impl Collective {
    /// The number of kinds.
    pub const COUNT: usize = 6;

    /// The name in prints.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::AllGather => "all-gather",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::GatherScatter => "gather-scatter",
            Collective::Ring => "ring",
            Collective::AllToAll => "all-to-all",
        }
    }
}

/// One thing that a rank does. `unit` and `micro_batch` count from zero. With A micro-batches per
/// rank, micro-batch m of a rank is number d x A + m of the global batch, d being the rank's index
/// among those with different micro-batches ([`Mesh::data_rank`](crate::Mesh::data_rank)).
///
/// A unit that is split over a tensor-parallel group runs as a chain of segments
/// ([`SplitShape`](crate::SplitShape)), with exchanges at the borders between them. A unit that
/// runs as a whole has one segment, number 0. If only its input was kept, a split unit's forwards
/// and their exchanges run a second time before its backward, and keep everything then.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Action {
    /// Copies the next micro-batch from the loader to the device.
    Load {
        /// Index of the micro-batch on this rank.
        micro_batch: u32,
    },
    /// Sums the step's tokens and targets over the data ranks. The loss is a mean over the targets
    /// of the whole global batch, so every rank needs their number. Workers of a parameter server
    /// that may be stale do not sum them
    /// ([`counts_over_ranks`](crate::Program::counts_over_ranks)).
    Count {
        /// Axis along which the numbers are summed: [`Axis::Data`]. Ranks of a tensor-parallel
        /// group and pipeline stages have the same targets.
        axis: Axis,
    },
    /// Gathers a unit's parameters from ranks of the shard group.
    Gather {
        /// Index of the unit.
        unit: u32,
        /// Number of ranks that take part, this one included: the whole shard group, or the part of
        /// it over which a release kept the unit.
        over: u32,
    },
    /// Frees a gathered copy.
    Release {
        /// Index of the unit.
        unit: u32,
        /// The 1/`keep` part stays. If `keep` is the size of the shard group, only the resident
        /// shard stays.
        keep: u32,
    },
    /// Runs a unit forward, or one segment of it.
    Forward {
        /// Index of the unit.
        unit: u32,
        /// Index of the segment.
        #[serde(default, skip_serializing_if = "is_first")]
        segment: u32,
        /// Index of the micro-batch.
        micro_batch: u32,
        /// Activations to keep for backward.
        keep: Keep,
    },
    /// Runs a unit backward, or one segment of it. If only the input of a unit that runs as a whole
    /// was kept, the forward runs again first.
    Backward {
        /// Index of the unit.
        unit: u32,
        /// Index of the segment.
        #[serde(default, skip_serializing_if = "is_first")]
        segment: u32,
        /// Index of the micro-batch.
        micro_batch: u32,
        /// Gradients to compute.
        part: BackwardPart,
    },
    /// Adds a micro-batch's gradient of a unit to earlier ones along a binary tree. While the last
    /// two buffers sum equally many micro-batches, the later one is added to the earlier one and
    /// freed.
    Fold {
        /// Index of the unit.
        unit: u32,
        /// The micro-batch whose backward has just run. It is odd: an even one has no partner yet.
        micro_batch: u32,
    },
    /// Sums a unit's gradient over the data ranks: reduce-scatter inside the shard group, then
    /// all-reduce of the shard across replicas. Each rank keeps the extent that its placement says.
    Reduce {
        /// Index of the unit.
        unit: u32,
        /// True if the result is added to the resident sum, false if it replaces it.
        accumulate: bool,
        /// Axis along which gradients are summed: [`Axis::Data`].
        axis: Axis,
    },
    /// Sums a gradient over ranks that hold the same parameters and compute different parts of
    /// their gradient. It comes once a step, after the sum over the data ranks.
    Tie {
        /// Index of the unit.
        unit: u32,
        /// [`Axis::Pipeline`]: the stages that hold the unit (a tied embedding) sum its whole
        /// gradient. [`Axis::Tensor`]: the group sums the elements of the gradient that its ranks
        /// share ([`SplitShape::shared_gradient_elements`](crate::SplitShape)).
        axis: Axis,
    },
    /// Sends a unit's output, or the gradient of that output, to another pipeline stage.
    Send {
        /// Rank that receives.
        to: u32,
        /// Index of the unit whose output this is.
        unit: u32,
        /// Index of the micro-batch.
        micro_batch: u32,
        /// Forward: the output. Backward: its gradient.
        phase: Phase,
    },
    /// Receives a unit's output, or the gradient of that output, from another pipeline stage.
    Recv {
        /// Rank that sends.
        from: u32,
        /// Index of the unit whose output this is.
        unit: u32,
        /// Index of the micro-batch.
        micro_batch: u32,
        /// Forward: the output. Backward: its gradient.
        phase: Phase,
    },
    /// A collective inside a unit, for tensor, context or expert parallelism. In a split unit it
    /// changes the layout of a value at a border, or, in backward, of that value's gradient. In
    /// other units it stands for all collectives of its kind inside the pass, as a price.
    Exchange {
        /// Kind of collective.
        collective: Collective,
        /// Axis of the mesh along which ranks take part.
        axis: Axis,
        /// Index of the unit.
        unit: u32,
        /// Index of the micro-batch.
        micro_batch: u32,
        /// Pass that the collective belongs to.
        phase: Phase,
        /// Index of the border of a split unit at which it takes place; 0 for other units.
        #[serde(default, skip_serializing_if = "is_first")]
        border: u32,
        /// Number of repetitions. Each one moves the instruction's bytes.
        times: u32,
    },
    /// Computes the global gradient norm, from it the factor by which updates scale gradients, and
    /// the step's loss. All ranks take part.
    Clip {
        /// Axes along which ranks hold different gradients: their sums of squares are added. What
        /// several ranks along them hold (a tied unit, a replicated weight) counts on the first of
        /// them only.
        #[serde(default, skip_serializing_if = "Axes::is_empty")]
        axes: Axes,
    },
    /// Runs the optimizer on a chunk of the rank's masters of a unit, and writes that part of the
    /// copy that the next forward reads.
    Update {
        /// Index of the unit.
        unit: u32,
        /// Index of the chunk. A unit has one chunk, unless its optimizer state lies in a tier.
        chunk: u32,
    },
    /// The outer step of a unit: averages over replicas the change of their parameters since the
    /// last outer step, applies the outer update to the parameters from then, and gives all
    /// replicas the result. If the step's [`Fragment`] overlaps, the change is that before the
    /// step, and the result waits for [`Action::Merge`].
    Outer {
        /// Index of the unit.
        unit: u32,
        /// Axis along which replicas train apart: [`Axis::Replicate`].
        axis: Axis,
    },
    /// Mixes the result of a unit's outer step, which ran during the step, into the masters that
    /// the update has made, and writes the copy that the next forward reads.
    Merge {
        /// Index of the unit.
        unit: u32,
    },
    /// Sends a unit's gradient of the step to the servers, each its part of it.
    Push {
        /// Index of the unit.
        unit: u32,
    },
    /// Tells every server that this worker's pushes of the step are complete, with the losses and
    /// the number of targets. Once all workers have committed a step, the servers sum its gradients
    /// in the order of ranks, take the norm together, and update their masters.
    Commit,
    /// Receives a unit's parameters from the servers, each its part of them.
    Pull {
        /// Index of the unit.
        unit: u32,
        /// Number of steps, up to and with this one, whose updates may still be missing.
        staleness: u32,
    },
    /// Copies state from its tier to where it is used.
    Fetch {
        /// Index of the unit.
        unit: u32,
        /// State to fetch.
        state: State,
    },
    /// Frees the working copy of state that lies in a tier.
    Evict {
        /// Index of the unit.
        unit: u32,
        /// State to evict.
        state: State,
        /// True if the state is written to its tier first, false if the tier has it already.
        write: bool,
    },
    /// Hands the state to the checkpoint writer.
    Snapshot,
}

/// A queue in which instructions run. The instructions of one lane run in program order; lanes run
/// concurrently.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Parameter gathers.
    Gather,
    /// Gradient reductions.
    Reduce,
    /// Sends between pipeline stages.
    Send,
    /// Receives between pipeline stages. They have a lane of their own, so that two neighbours that
    /// both send do not wait for each other.
    Receive,
    /// Collectives inside units: tensor, context and expert parallelism.
    Inner,
    /// Batches from the loader.
    Input,
    /// Traffic with the host and disk tiers, and snapshots.
    HostIo,
}

impl Lane {
    /// Every lane, in display order.
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

    /// The number of its track in traces, from 1: Perfetto shows thread 0 of a process as another.
    pub const fn track(self) -> usize {
        Lane::FIRST_TRACK + self as usize
    }

    /// The first number of a track in traces.
    pub const FIRST_TRACK: usize = 1;
}

impl Action {
    /// The lane that the action belongs to.
    pub const fn lane(self) -> Lane {
        match self {
            Action::Load { .. } => Lane::Input,
            Action::Gather { .. } | Action::Release { .. } | Action::Pull { .. } => Lane::Gather,
            Action::Forward { .. }
            | Action::Backward { .. }
            | Action::Fold { .. }
            | Action::Clip { .. }
            | Action::Commit
            | Action::Update { .. } => Lane::Compute,
            Action::Count { .. }
            | Action::Reduce { .. }
            | Action::Tie { .. }
            | Action::Push { .. }
            | Action::Outer { .. }
            | Action::Merge { .. } => Lane::Reduce,
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
            Action::Count { .. } => "count",
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
            Action::Clip { .. } => "clip",
            Action::Update { .. } => "update",
            Action::Outer { .. } => "outer",
            Action::Merge { .. } => "merge",
            Action::Push { .. } => "push",
            Action::Commit => "commit",
            Action::Pull { .. } => "pull",
            Action::Fetch { .. } => "fetch",
            Action::Evict { .. } => "evict",
            Action::Snapshot => "snapshot",
        }
    }

    /// The unit that the action is about.
    pub const fn unit(self) -> Option<u32> {
        match self {
            Action::Gather { unit, .. }
            | Action::Release { unit, .. }
            | Action::Forward { unit, .. }
            | Action::Backward { unit, .. }
            | Action::Fold { unit, .. }
            | Action::Reduce { unit, .. }
            | Action::Tie { unit, .. }
            | Action::Send { unit, .. }
            | Action::Recv { unit, .. }
            | Action::Exchange { unit, .. }
            | Action::Update { unit, .. }
            | Action::Outer { unit, .. }
            | Action::Merge { unit }
            | Action::Push { unit }
            | Action::Pull { unit, .. }
            | Action::Fetch { unit, .. }
            | Action::Evict { unit, .. } => Some(unit),
            Action::Load { .. } | Action::Count { .. } | Action::Clip { .. } | Action::Commit | Action::Snapshot => {
                None
            }
        }
    }

    /// The micro-batch that the action is about.
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

/// The purpose of memory. The names are those of the engine's pool, except that the pool counts
/// masters as parameters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// The resident copy of parameters, which forward reads.
    Parameters,
    /// The f32 masters, where they are separate from that copy.
    Masters,
    /// Gathered parameters.
    Gathered,
    /// Gradients of parameters.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// Activations kept between a forward and its backward.
    Activations,
    /// Staging buffers of collectives.
    Communication,
    /// Batches.
    Data,
}

impl MemoryKind {
    /// Every kind, in display order.
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

/// Memory that is held, or a change of it that outlasts its instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Effect {
    /// Purpose of the memory.
    pub kind: MemoryKind,
    /// Bytes taken (positive) or given back (negative). An instruction takes memory when it starts
    /// and gives memory back when it ends.
    pub bytes: i64,
}

/// An action with its dependencies and costs. Its number is its index in the program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Instruction {
    /// The action.
    #[serde(flatten)]
    pub action: Action,
    /// Numbers of instructions on other lanes that must have finished, descending. Dependencies
    /// that follow from these, or from earlier instructions of the same lane, are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u32>,
    /// Bytes of the message. For a collective this is the whole buffer (an all-gather's output, a
    /// reduce-scatter's input); for a send, fetch or evict, the bytes that it moves. 0 if nothing
    /// leaves the rank, and for a group of one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// The encoding of the message, if it is encoded; `bytes` counts the bytes before encoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// Bytes of an element of the message before it is encoded.
    #[serde(default = "four", skip_serializing_if = "is_four")]
    pub element_bytes: u32,
    /// The factors that are sent in place of the message, with [`PowerSgd`](crate::PowerSgd).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factors: Option<Factors>,
    /// Bytes of activations that are held only while the instruction runs: the ones that a backward
    /// recomputes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub working_bytes: u64,
    /// Changes of memory that outlast the instruction.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub effects: Vec<Effect>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

fn four() -> u32 {
    4
}

fn is_four(bytes: &u32) -> bool {
    *bytes == 4
}

fn is_first(index: &u32) -> bool {
    *index == 0
}

impl Instruction {
    /// Bytes of the message between the ranks of `axis` for a buffer of `bytes` bytes: fewer than
    /// `bytes` if the message is encoded. Factors are summed over all data ranks at once.
    pub fn sent_bytes(&self, axis: Axis, bytes: u64) -> u64 {
        if let Some(factors) = self.factors {
            return factors.messages().iter().sum();
        }
        match self.encoding.filter(|encoding| encoding.is_over(axis)).map(|encoding| encoding.codec) {
            Some(Codec::Blocks(codec)) => codec.bytes(bytes / u64::from(self.element_bytes)),
            _ => bytes,
        }
    }

    /// An instruction that waits for nothing, moves nothing and holds nothing.
    pub fn new(action: Action) -> Instruction {
        Instruction {
            action,
            after: Vec::new(),
            bytes: 0,
            encoding: None,
            element_bytes: 4,
            factors: None,
            working_bytes: 0,
            effects: Vec::new(),
        }
    }

    pub(crate) fn moving(mut self, bytes: u64) -> Instruction {
        self.bytes = bytes;
        self
    }

    /// The message of a unit with trained matrices of these shapes, in the form of `encoding`.
    pub(crate) fn encoded(mut self, encoding: Option<Encoding>, matrices: &[[u64; 2]]) -> Instruction {
        self.encoding = encoding.filter(|_| self.bytes > 0);
        self.factors = match self.encoding.map(|encoding| encoding.codec) {
            Some(Codec::PowerSgd(codec)) => Some(codec.factors_of(matrices)),
            _ => None,
        };
        self
    }

    /// The message of elements of `width` bytes each, in the form of `encoding`.
    pub(crate) fn encoded_elements(mut self, encoding: Option<Encoding>, width: u32) -> Instruction {
        self.encoding = encoding.filter(|_| self.bytes > 0);
        self.element_bytes = if self.encoding.is_some() { width } else { 4 };
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
