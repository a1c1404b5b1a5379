//! The input of a lowering: the model's units, the strategy, and the placement of state that
//! follows from them.

use crate::{Axis, BlockCodec, Encoding, Keep, Layout, Mesh, PipelineSchedule, Schedule, SplitShape};
use serde::{Deserialize, Serialize};

/// Number of elements in a chunk over which gradient norms are summed. Every shard is a whole
/// number of chunks, so the norm's bits do not depend on the sharding factor.
pub const SHARD_QUANTUM: u64 = 4096;

/// Elements of a unit's flat buffer when it is padded to `shards` equal shards of whole chunks.
pub fn padded(flat_elements: u64, shards: u32) -> u64 {
    flat_elements.next_multiple_of(SHARD_QUANTUM * u64::from(shards.max(1)))
}

/// Elements of each of `chunks` parts of the `held` elements that a rank holds of a unit. The last
/// part may have fewer.
pub fn chunk_elements(held: u64, chunks: u32) -> u64 {
    held.div_ceil(u64::from(chunks.max(1))).next_multiple_of(SHARD_QUANTUM)
}

/// The facts about a unit that a lowering needs. Sizes are those of one rank's micro-batch on an
/// unsplit model; a lowering divides them by the degrees that split them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct UnitShape {
    /// Name, for prints and reports.
    pub name: String,
    /// Elements of the flat buffer before padding to shards, including the gaps between parameters.
    pub flat_elements: u64,
    /// Those of `flat_elements` that are not trained. They lie behind the trained ones and have
    /// neither gradients nor masters nor optimizer state.
    #[serde(default)]
    pub frozen_elements: u64,
    /// True if what is trained of it is frozen in this step alone, and other steps train it: its
    /// state is held, and nothing reads or writes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rests: bool,
    /// The elements of each of its frozen parameters that [`Tier::Encoded`] encodes: matrices of
    /// blocks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub encodable: Vec<u64>,
    /// The shapes [rows, columns] of its trained parameters, by which low-rank codecs send them. A
    /// vector has one row, and each expert is a matrix.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matrices: Vec<[u64; 2]>,
    /// Other units whose parameters it reads (tied embeddings).
    pub borrows: Vec<u32>,
    /// Bytes that a forward keeps, in the order of [`Keep`]: everything, selective, input only.
    pub saved_bytes: [u64; 3],
    /// Bytes of its output. This is what crosses a pipeline cut and what tensor parallelism
    /// exchanges; 0 for the loss.
    pub output_bytes: u64,
    /// Collectives of `output_bytes` inside a forward under tensor parallelism, and as many inside
    /// a backward: 2 for a transformer block.
    pub tensor_collectives: u32,
    /// FLOPs of a forward and a backward on the whole unit, by which pipeline stages are balanced.
    /// The same on all ranks; 0 if it is not known.
    pub work: u64,
    /// Bytes of keys and values, which the ring of context parallelism passes on.
    pub kv_bytes: u64,
    /// Elements of `flat_elements` that expert parallelism splits: those of all experts.
    pub expert_elements: u64,
    /// Bytes that a dispatch to experts sends. A combine sends as many.
    pub expert_bytes: u64,
    /// The inside of a unit that is split over the tensor-parallel group. The other sizes are then
    /// those of one rank's part, and a lowering divides nothing. None: the unit runs as a whole,
    /// and a lowering divides its sizes by the tensor-parallel degree.
    pub split: Option<SplitShape>,
}

impl UnitShape {
    /// True if no step trains anything of it.
    pub fn has_no_state(&self) -> bool {
        self.frozen_elements > 0 && self.frozen_elements >= self.flat_elements
    }
}

/// The facts about a model that a lowering needs: its units in order of execution. The last one
/// computes the loss.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ModelShape {
    /// Units from first to last.
    pub units: Vec<UnitShape>,
    /// Bytes of a micro-batch's tokens, targets and positions on the device.
    pub batch_bytes: u64,
}

impl ModelShape {
    /// The units of which nothing is trained in this step, ascending.
    pub fn frozen_units(&self) -> Vec<u32> {
        let frozen = |unit: &UnitShape| unit.rests || unit.has_no_state();
        (0..).zip(&self.units).filter(|(_, unit)| frozen(unit)).map(|(number, _)| number).collect()
    }

    /// The first unit of which something is trained: no gradient flows further down.
    pub fn lowest_trained(&self) -> u32 {
        let frozen = self.frozen_units();
        (0..self.units.len() as u32).find(|unit| frozen.binary_search(unit).is_err()).unwrap_or(0)
    }
}

/// Bytes per element of the state that a rank keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StateBytes {
    /// The copy of parameters that forward reads.
    pub parameter: u32,
    /// The f32 master; 0 if the compute copy is the master.
    pub master: u32,
    /// A gradient.
    pub gradient: u32,
    /// The optimizer state, without the scales of codes.
    pub optimizer: u32,
    /// Scales of the optimizer state for each [`StateBytes::BLOCK`] elements; 0 if it has none.
    #[serde(default)]
    pub optimizer_scales: u32,
    /// A gradient while it is summed over ranks.
    pub reduce: u32,
}

impl StateBytes {
    /// Elements that share a scale.
    pub const BLOCK: u32 = 32;

    /// Training in bf16 or f16 with f32 masters, gradients and two moments.
    pub const MIXED: StateBytes =
        StateBytes { parameter: 2, master: 4, gradient: 4, optimizer: 8, optimizer_scales: 0, reduce: 4 };
    /// Training in f32 with two moments.
    pub const F32: StateBytes = StateBytes { parameter: 4, master: 0, ..StateBytes::MIXED };

    /// The optimizer state of an element, with its part of the scales.
    pub fn whole_optimizer(&self) -> f64 {
        f64::from(self.optimizer) + f64::from(self.optimizer_scales) / f64::from(StateBytes::BLOCK)
    }
}

/// The time at which parameters that were gathered for a forward are released (FSDP's
/// `reshard_after_forward`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reshard {
    /// After each forward; backward gathers again.
    #[default]
    Always,
    /// After the last backward: parameters are gathered once a step.
    Never,
    /// After each forward, down to the 1/n part. Backward then gathers from n neighbours (of one
    /// node, say).
    To(u32),
}

/// The time at which gradients are summed over ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceSchedule {
    /// Once, after the last micro-batch.
    #[default]
    PerStep,
    /// After every micro-batch.
    PerMicroBatch,
}

/// The kind of a step. Replicas that train apart take inner steps, whose gradients are summed
/// inside each replica only, and at intervals an outer step, which ends in one result for all.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepKind {
    /// Gradients are summed over all data ranks.
    #[default]
    Synchronous,
    /// A step of each replica by itself.
    Inner,
    /// An inner step, and the outer step after it.
    Outer,
    /// A worker's step with a parameter server. It ends with parameters that may lack the updates
    /// of as many steps as [`ParameterServer::staleness`] says.
    Stale,
    /// As `Stale`, but the parameters have all updates, that of this step included.
    Drained,
}

impl StepKind {
    /// The axis along which the gradients of a step are summed.
    pub const fn gradient_axis(self) -> Axis {
        match self {
            StepKind::Synchronous | StepKind::Stale | StepKind::Drained => Axis::Data,
            StepKind::Inner | StepKind::Outer => Axis::Shard,
        }
    }

    /// True for synchronous steps.
    pub fn is_synchronous(&self) -> bool {
        *self == StepKind::Synchronous
    }

    /// True for the steps of replicas that train apart.
    pub fn is_apart(self) -> bool {
        matches!(self, StepKind::Inner | StepKind::Outer)
    }

    /// True for the steps of workers with a parameter server.
    pub fn is_of_server(self) -> bool {
        matches!(self, StepKind::Stale | StepKind::Drained)
    }
}

/// The part of a model whose changes an outer step averages (streaming DiLoCo, Douillard et al.
/// 2025).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Fragment {
    /// Its number, from 0.
    pub index: u32,
    /// Number of fragments. Fragment `i` has the units `i`, `i + count`, `i + 2 count` ...
    pub count: u32,
    /// True if the changes before the step travel while the step computes, and their mean is mixed
    /// into the step's result.
    pub overlaps: bool,
}

impl Fragment {
    /// True if it has a unit.
    pub const fn has(self, unit: u32) -> bool {
        unit % self.count == self.index
    }
}

/// A parameter server (Li et al. 2014): some of the data ranks also host a server, which owns a
/// part of the masters and of the optimizer state. All data ranks are workers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ParameterServer {
    /// Number of servers: the first ranks. It divides the number of ranks.
    pub servers: u32,
    /// The bound of staleness (Ho et al. 2013): a worker begins step `c` once the updates of steps
    /// `0..c - staleness` are in its parameters.
    pub staleness: u32,
    /// The number of workers without whose gradients an update is made if they are late (back-up
    /// workers, Chen et al. 2016).
    #[serde(default)]
    pub backups: u32,
}

/// A memory below the device's, to which state can be offloaded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Host memory, for devices that have memory of their own.
    Host,
    /// A local disk.
    Disk,
    /// The rank's own memory, in fewer bits: the frozen matrices of blocks as this codec encodes
    /// them (QLoRA, Dettmers et al. 2023), and the rest as it is. A fetch decodes, or the gather of
    /// shards that lie encoded. Parameters alone can lie there.
    Encoded(BlockCodec),
}

/// The tier in which each kind of state lies while it is not used; None: on the device.
///
/// Optimizer state on the host is not brought to the device. The update runs on the host: gradients
/// are fetched to it, and the updated parameters are evicted to the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Offload {
    /// Masters and optimizer state.
    pub optimizer: Option<Tier>,
    /// The copy of parameters that forward reads.
    pub parameters: Option<Tier>,
    /// Activations that forward keeps for backward.
    pub activations: Option<Tier>,
    /// The gradient sum, between the micro-batches that add to it and until the update. It lies in
    /// the tier of the optimizer state, because the update reads it there.
    #[serde(default)]
    pub gradients: Option<Tier>,
}

/// The choices of how to run a step on a mesh.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Strategy {
    /// Number of micro-batches that a rank sums before an update.
    pub accumulation_steps: u32,
    /// Per unit, the activations that forward keeps. The last unit always keeps everything, because
    /// its backward follows at once.
    pub keep: Vec<Keep>,
    /// True if the state is handed to the checkpoint writer after the update.
    pub snapshot: bool,
    /// The state that is sharded over the shard group (Rajbhandari et al. 2020): 0 none, 1 masters
    /// and optimizer, 2 also gradients, 3 also parameters.
    pub zero_stage: u8,
    /// Stage 3: the time at which gathered parameters are released.
    pub reshard_after_forward: Reshard,
    /// Number of passes that gathers and fetches may run ahead of their use. Also the number of
    /// reductions that may be in flight while the next gradient is computed (at least one).
    pub prefetch: u32,
    /// The time at which gradients are summed over ranks.
    pub reduce_schedule: ReduceSchedule,
    /// True if gradients are summed over micro-batches along the same tree as over ranks. Degrees
    /// 1, 2, 4, .. then give the same bits at one global batch.
    pub elastic: bool,
    /// The state that lies in a lower tier.
    pub offload: Offload,
    /// Maximum number of elements whose optimizer state is fetched and updated at a time, in whole
    /// quanta ([`SHARD_QUANTUM`]). None: a whole unit.
    pub update_chunk: Option<u64>,
    /// Bytes per element of the state.
    pub bytes: StateBytes,
    /// The order of forwards and backwards in a pipeline.
    pub pipeline: Schedule,
    /// The first unit of every pipeline stretch but the first, ascending. Empty: stretches get
    /// equal work, or equally many blocks if the units' work is not known.
    pub cuts: Vec<u32>,
    /// True if tensor parallelism splits norms and residuals along the sequence too (Korthikanti et
    /// al. 2022). It matters for units whose shapes are not split; the layouts of split ones say it
    /// themselves.
    pub sequence_parallel: bool,
    /// The kind of the step.
    pub kind: StepKind,
    /// The form of gradients on their way between ranks; None: `bytes.reduce` bytes per element.
    pub gradients: Option<Encoding>,
    /// True if gradients travel as they are in this step, though those of later ones have the form
    /// of `gradients`: residuals are there already.
    pub warms_up: bool,
    /// The form of sharded parameters while the whole shard group gathers them; None: that in which
    /// forward reads them.
    pub gathers: Option<Encoding>,
    /// The form of outputs between pipeline stages, and that of their gradients; None: as they are.
    pub activations: [Option<BlockCodec>; 2],
    /// The form of parameter changes on their way between replicas in an outer step; None: f32.
    pub outer: Option<Encoding>,
    /// True if outer steps have momentum.
    pub outer_momentum: bool,
    /// The fragment of an outer step; None: the whole model, after the update.
    pub fragment: Option<Fragment>,
    /// The parameter server of steps that have one.
    pub server: Option<ParameterServer>,
    /// The bits to which an update rounds the matrices of blocks in the copy that forward reads;
    /// None: it rounds them to the copy's dtype.
    pub rounding_bits: Option<u8>,
    /// True if updates keep weights of the matrices of blocks at zero.
    pub pruned: bool,
    /// The period of a schedule of freezing to which the step belongs; None: there is no schedule,
    /// or the step trains what any period trains.
    pub period: Option<u32>,
}

impl Strategy {
    /// One micro-batch of mixed precision on `units` units. Everything is kept and nothing is
    /// sharded.
    pub fn new(units: usize) -> Strategy {
        Strategy {
            accumulation_steps: 1,
            keep: vec![Keep::Everything; units],
            snapshot: false,
            zero_stage: 0,
            reshard_after_forward: Reshard::Always,
            prefetch: 1,
            reduce_schedule: ReduceSchedule::PerStep,
            elastic: false,
            offload: Offload::default(),
            update_chunk: None,
            bytes: StateBytes::MIXED,
            pipeline: Schedule::default(),
            cuts: Vec::new(),
            sequence_parallel: false,
            kind: StepKind::Synchronous,
            gradients: None,
            warms_up: false,
            gathers: None,
            activations: [None; 2],
            outer: None,
            outer_momentum: true,
            fragment: None,
            server: None,
            rounding_bits: None,
            pruned: false,
            period: None,
        }
    }
}

/// The part of a unit's flat buffer that a rank holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// All of it.
    Full,
    /// The rank's shard, 1/F of it.
    Shard,
}

/// The place where backward puts a gradient.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fresh {
    /// Into the resident sum.
    InPlace,
    /// Into a temporary buffer that exists from the unit's first contribution to its reduction.
    /// With one reduction per micro-batch, the next buffer may be allocated while the previous one
    /// is still being reduced. A pass whose effects take gradient memory begins a new buffer.
    Transient,
}

/// The extent of the state that a rank keeps between steps, and the place of fresh gradients. The
/// engine learns nothing else of a strategy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Placement {
    /// The copy of parameters that forward reads. A shard is gathered when needed.
    pub parameters: Extent,
    /// f32 masters and optimizer state.
    pub masters: Extent,
    /// The gradient sum that the update reads.
    pub gradients: Extent,
    /// The place where backward writes gradients.
    pub fresh_gradients: Fresh,
}

impl Placement {
    /// Everything whole, gradients in place: one rank.
    pub const WHOLE: Placement = Placement {
        parameters: Extent::Full,
        masters: Extent::Full,
        gradients: Extent::Full,
        fresh_gradients: Fresh::InPlace,
    };

    /// The placement of state for `strategy` on `mesh`. A shard group of one holds everything
    /// whole, whatever the stage.
    pub fn of(mesh: &Mesh, strategy: &Strategy) -> Placement {
        let stage = if mesh.shard_degree() == 1 { 0 } else { strategy.zero_stage };
        let from = |first: u8| if stage >= first { Extent::Shard } else { Extent::Full };
        let many = mesh.degree(strategy.kind.gradient_axis()) > 1;
        let apart = stage >= 2 || many && strategy.reduce_schedule == ReduceSchedule::PerMicroBatch;
        Placement {
            parameters: from(3),
            masters: from(1),
            gradients: from(2),
            fresh_gradients: if apart { Fresh::Transient } else { Fresh::InPlace },
        }
    }
}

/// A strategy that does not fit the model or the mesh.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StrategyError {
    /// The step has no micro-batches.
    #[error("a step needs at least one micro-batch: accumulation_steps is 0")]
    NoMicroBatch,
    /// The model has no units.
    #[error("a model needs at least one unit")]
    NoUnits,
    /// The list of activations to keep has the wrong length.
    #[error("what to keep is given for {given} units, but the model has {units}")]
    KeepLength {
        /// Number of entries given.
        given: usize,
        /// Number of units of the model.
        units: usize,
    },
    /// An axis has no ranks.
    #[error("every degree of the mesh must be at least 1: {0:?}")]
    EmptyAxis(Mesh),
    /// A unit borrows from one that does not exist, or from itself.
    #[error("unit {unit} borrows the parameters of unit {from}: the model's others are 0 to {last}")]
    Borrow {
        /// Index of the borrowing unit.
        unit: u32,
        /// Index of the unit it borrows from.
        from: u32,
        /// Index of the model's last unit.
        last: u32,
    },
    /// The ZeRO stage does not exist.
    #[error("zero_stage is {0}: it goes from 0 to 3")]
    ZeroStage(u8),
    /// The part that should stay after forward does not divide the shard group evenly.
    #[error("reshard_after_forward = {to} does not divide the shard group of {shards} ranks: use one of {possible:?}")]
    ReshardTo {
        /// Number of parts that was asked for.
        to: u32,
        /// Number of ranks of the shard group.
        shards: u32,
        /// Values that would be accepted.
        possible: Vec<u32>,
    },
    /// Elastic bits need a binary tree, and the numbers are no powers of two.
    #[error("elastic bits need powers of two: accumulation is {accumulation} and the data-parallel degree {degree}")]
    Elastic {
        /// Number of micro-batches per rank.
        accumulation: u32,
        /// Data-parallel degree.
        degree: u32,
    },
    /// Elastic bits fold micro-batches before ranks, but gradients are reduced per micro-batch.
    #[error("elastic bits sum a rank's micro-batches first: reduce gradients once per step")]
    ElasticPerMicroBatch,
    /// Replicas train apart, but state lies in a tier, which the outer step does not reach.
    #[error(
        "replicas that train apart keep parameters, optimizer state and gradients on the device: leave out their offload"
    )]
    LocalOffload,
    /// A parameter server is combined with something that its workers cannot do, or steps of its
    /// workers have none.
    #[error("a parameter server needs {0}")]
    Server(&'static str),
    /// Elastic bits do not depend on the number of ranks, but encoding gradients and training apart
    /// do.
    #[error(
        "elastic bits need gradients that are summed exactly and in every step: leave out compression and local steps"
    )]
    ElasticApart,
    /// Experts are spread over replicas, because nothing is sharded, and their degree does not
    /// divide them.
    #[error("{experts} expert-parallel ranks do not divide {replicas} replicas: raise dp_replicate to a multiple")]
    ExpertsOfReplicas {
        /// Expert-parallel degree.
        experts: u32,
        /// Number of replicas.
        replicas: u32,
    },
    /// Experts are spread inside a shard group, and their degree does not divide it.
    #[error(
        "{experts} expert-parallel ranks do not divide the shard group of {shards}: raise dp_shard or cp to a multiple"
    )]
    Experts {
        /// Expert-parallel degree.
        experts: u32,
        /// Number of ranks of the shard group.
        shards: u32,
    },
    /// Several stretches per stage need several stages, and every stage needs one.
    #[error(
        "{chunks} stretches of units per stage, with {stages} stages: a stage has at least one stretch, and one stage has no more"
    )]
    Chunks {
        /// Number of stretches per stage.
        chunks: u32,
        /// Number of pipeline stages.
        stages: u32,
    },
    /// A stretch of the pipeline would have no units.
    #[error("a pipeline of {stretches} stretches needs as many units, and the model has {units}")]
    Stretches {
        /// Stages times stretches per stage.
        stretches: u32,
        /// Number of units of the model.
        units: u32,
    },
    /// A known schedule needs another number of micro-batches.
    #[error("{schedule} on {stages} stages needs {}, not {micro_batches}",
        schedule.facts().micro_batches.words(*stages))]
    MicroBatches {
        /// The schedule.
        schedule: PipelineSchedule,
        /// Number of micro-batches of a step.
        micro_batches: u32,
        /// Number of pipeline stages.
        stages: u32,
    },
    /// The table of the schedule has other numbers than the mesh and the step.
    #[error(
        "the pipeline's table is for {} stages and {} micro-batches, the step has {} and {}",
        .table[0], .table[1], .wanted[0], .wanted[1]
    )]
    Table {
        /// Stages and micro-batches of the table.
        table: [u32; 2],
        /// Stages of the mesh and micro-batches of the step.
        wanted: [u32; 2],
    },
    /// A unit's gradient would be summed from several micro-batches at a time, but each needs a sum
    /// of its own.
    #[error(
        "the schedule adds to the gradient of unit {unit} from several micro-batches by turns: reduce once per step, without elastic bits"
    )]
    MixedGradients {
        /// Index of the unit.
        unit: u32,
    },
    /// The cuts do not divide the units into the wanted stretches.
    #[error(
        "the cuts {cuts:?} do not divide {units} units into {stretches} stretches that all have some: give {stretches} - 1, ascending"
    )]
    Cuts {
        /// The cuts as given.
        cuts: Vec<u32>,
        /// Number of stretches wanted.
        stretches: u32,
        /// Number of units of the model.
        units: u32,
    },
    /// Gradients and optimizer state lie in different tiers, but the update reads both in one
    /// place.
    #[error("gradients lie in the tier of the optimizer's state, or on the device: offload both to one tier")]
    GradientsApart,
    /// State other than parameters is to be kept encoded.
    #[error("parameters alone can lie encoded in memory: offload other state to the host or to a disk")]
    EncodedState,
    /// Shards of parameters lie encoded, and are to be encoded once more on their way.
    #[error("shards that lie encoded travel as they are: leave out the encoding of gathers")]
    EncodedTwice,
    /// Gradients are offloaded in a pipeline, but stages sum shared gradients on the device.
    #[error("in a pipeline gradients stay on the device: leave out their offload, or use one stage")]
    GradientsOfStages,
    /// The description of a split unit contradicts itself.
    #[error("unit {unit} is split, but {problem}")]
    Split {
        /// Name of the unit.
        unit: String,
        /// The contradiction, in words.
        problem: String,
    },
    /// Some units are split and others are not, or there are no ranks to split them over.
    #[error(
        "{split} of {units} units are split over {ranks} tensor- and context-parallel ranks: give all units split over several ranks, or none"
    )]
    SplitInPart {
        /// Number of split units.
        split: usize,
        /// Number of units.
        units: usize,
        /// Tensor-parallel degree.
        ranks: u32,
    },
    /// Split units are combined with an axis whose exchanges are not between segments yet.
    #[error("split units know no {0} parallelism: leave it at degree 1")]
    SplitWith(&'static str),
    /// Gradients are offloaded, but parts of them are summed over the tensor-parallel group on the
    /// device.
    #[error(
        "unit {0} has gradients that its tensor-parallel group sums on the device: leave out the offload of gradients"
    )]
    GradientsOfSplit(String),
    /// Update chunks would have no elements.
    #[error("update_chunk is 0: a chunk has at least one element")]
    NoChunk,
    /// The rank does not exist.
    #[error("rank {rank} is not in a mesh of {ranks} ranks, 0 to {}", .ranks - 1)]
    Rank {
        /// The rank that was asked for.
        rank: u32,
        /// Number of ranks of the mesh.
        ranks: u32,
    },
}

/// Checks that model, mesh and strategy go together.
pub(crate) fn validate(model: &ModelShape, mesh: &Mesh, strategy: &Strategy) -> Result<(), StrategyError> {
    if strategy.accumulation_steps == 0 {
        return Err(StrategyError::NoMicroBatch);
    }
    let units = model.units.len();
    if units == 0 {
        return Err(StrategyError::NoUnits);
    }
    if strategy.keep.len() != units {
        return Err(StrategyError::KeepLength { given: strategy.keep.len(), units });
    }
    for (unit, shape) in (0..).zip(&model.units) {
        if let Some(from) = shape.borrows.iter().copied().find(|from| *from == unit || *from as usize >= units) {
            return Err(StrategyError::Borrow { unit, from, last: units as u32 - 1 });
        }
    }
    if [mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep].contains(&0) {
        return Err(StrategyError::EmptyAxis(*mesh));
    }
    if strategy.update_chunk == Some(0) {
        return Err(StrategyError::NoChunk);
    }
    if strategy.offload.gradients.is_some() {
        if strategy.offload.gradients != strategy.offload.optimizer {
            return Err(StrategyError::GradientsApart);
        }
        if mesh.pp > 1 {
            return Err(StrategyError::GradientsOfStages);
        }
    }
    if let Offload { optimizer, activations, gradients, .. } = strategy.offload
        && [optimizer, activations, gradients].iter().any(|tier| matches!(tier, Some(Tier::Encoded(_))))
    {
        return Err(StrategyError::EncodedState);
    }
    if matches!(strategy.offload.parameters, Some(Tier::Encoded(_))) && strategy.gathers.is_some() {
        return Err(StrategyError::EncodedTwice);
    }
    if strategy.zero_stage > 3 {
        return Err(StrategyError::ZeroStage(strategy.zero_stage));
    }
    let shards = mesh.shard_degree();
    if let Reshard::To(to) = strategy.reshard_after_forward
        && (to == 0 || !shards.is_multiple_of(to))
    {
        let possible = (1..=shards).filter(|to| shards.is_multiple_of(*to)).collect();
        return Err(StrategyError::ReshardTo { to, shards, possible });
    }
    let (accumulation, degree) = (strategy.accumulation_steps, mesh.data_parallel());
    if strategy.elastic && !(accumulation.is_power_of_two() && degree.is_power_of_two()) {
        return Err(StrategyError::Elastic { accumulation, degree });
    }
    if strategy.elastic && strategy.reduce_schedule == ReduceSchedule::PerMicroBatch {
        return Err(StrategyError::ElasticPerMicroBatch);
    }
    if strategy.elastic && (strategy.gradients.is_some() || !strategy.kind.is_synchronous()) {
        return Err(StrategyError::ElasticApart);
    }
    let Offload { optimizer, parameters, gradients, .. } = strategy.offload;
    validate_server(mesh, strategy)?;
    if !strategy.kind.is_synchronous() && (optimizer.is_some() || parameters.is_some() || gradients.is_some()) {
        return Err(StrategyError::LocalOffload);
    }
    if mesh.experts_of_replicas() && !mesh.dp_replicate.is_multiple_of(mesh.ep) {
        return Err(StrategyError::ExpertsOfReplicas { experts: mesh.ep, replicas: mesh.dp_replicate });
    }
    if !mesh.experts_of_replicas() && !shards.is_multiple_of(mesh.ep) {
        return Err(StrategyError::Experts { experts: mesh.ep, shards });
    }
    validate_splits(model, mesh, strategy)?;
    validate_pipeline(units as u32, mesh, strategy)
}

fn validate_server(mesh: &Mesh, strategy: &Strategy) -> Result<(), StrategyError> {
    let Some(server) = strategy.server else {
        let needs = "a number of servers and a bound of staleness";
        return if strategy.kind.is_of_server() { Err(StrategyError::Server(needs)) } else { Ok(()) };
    };
    let workers = mesh.dp_shard;
    let needs = [
        (strategy.kind.is_of_server(), "steps of workers"),
        (mesh.ranks() == workers && workers > 1, "several data ranks in one shard group, and no other parallelism"),
        (strategy.zero_stage == 1, "sharded masters and whole parameters and gradients: ZeRO stage 1"),
        (server.servers > 0 && workers.is_multiple_of(server.servers), "a number of servers that divides its workers"),
        (server.backups < workers, "fewer back-up workers than workers"),
        (server.backups == 0 || server.staleness == 0, "a staleness of 0 with back-up workers"),
        (strategy.reduce_schedule == ReduceSchedule::PerStep, "one push of each unit's gradient in a step"),
        (strategy.gradients.is_none() && strategy.outer.is_none(), "messages that are not encoded"),
    ];
    match needs.into_iter().find(|(given, _)| !given) {
        Some((_, needs)) => Err(StrategyError::Server(needs)),
        None => Ok(()),
    }
}

fn validate_splits(model: &ModelShape, mesh: &Mesh, strategy: &Strategy) -> Result<(), StrategyError> {
    let units = model.units.len();
    let split = model.units.iter().filter(|unit| unit.split.is_some()).count();
    if split == 0 {
        return Ok(());
    }
    if split < units || mesh.tp * mesh.cp == 1 {
        return Err(StrategyError::SplitInPart { split, units, ranks: mesh.tp * mesh.cp });
    }
    let on_rows = |split: &SplitShape| split.values.iter().any(|value| value.context != Layout::Invariant);
    if mesh.cp > 1 && !model.units.iter().filter_map(|unit| unit.split.as_ref()).all(on_rows) {
        return Err(StrategyError::SplitWith("context"));
    }
    // Rows of experts are exchanged inside the passes of split units, between replicas.
    if mesh.ep > 1 && !mesh.experts_of_replicas() {
        return Err(StrategyError::SplitWith("expert"));
    }
    for (unit, split) in model.units.iter().filter_map(|unit| Some((unit, unit.split.as_ref()?))) {
        if let Some(problem) = split.fault() {
            return Err(StrategyError::Split { unit: unit.name.clone(), problem });
        }
        if strategy.offload.gradients.is_some() && split.shared_gradient_elements > 0 {
            return Err(StrategyError::GradientsOfSplit(unit.name.clone()));
        }
    }
    Ok(())
}

fn validate_pipeline(units: u32, mesh: &Mesh, strategy: &Strategy) -> Result<(), StrategyError> {
    let (pp, micro_batches) = (mesh.pp, strategy.accumulation_steps);
    let stretches = strategy.pipeline.stretches(pp);
    if let Schedule::Known(schedule) = strategy.pipeline {
        let facts = schedule.facts();
        if facts.chunks == 0 || (facts.chunks > 1 && pp == 1) {
            return Err(StrategyError::Chunks { chunks: facts.chunks, stages: pp });
        }
        if pp > 1 && !facts.micro_batches.accept(pp, micro_batches) {
            return Err(StrategyError::MicroBatches { schedule, micro_batches, stages: pp });
        }
    }
    if units < stretches {
        return Err(StrategyError::Stretches { stretches, units });
    }
    let bounds: Vec<u32> = std::iter::once(0).chain(strategy.cuts.iter().copied()).chain([units]).collect();
    if !strategy.cuts.is_empty() && (bounds.len() as u32 != stretches + 1 || !bounds.is_sorted_by(|a, b| a < b)) {
        return Err(StrategyError::Cuts { cuts: strategy.cuts.clone(), stretches, units });
    }
    Ok(())
}
