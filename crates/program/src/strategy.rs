//! What a lowering is given: the model's units, how the step is to be run, and what follows for
//! where state lies.

use crate::{Keep, Mesh};
use serde::{Deserialize, Serialize};

/// Shards divide into chunks of so many elements, over which gradient norms are summed: a rank's
/// shard is a whole number of chunks, so the norm's bits depend on no sharding factor.
pub const SHARD_QUANTUM: u64 = 4096;

/// Elements of a unit's flat buffer when it is padded to `shards` equal shards of whole chunks.
pub fn padded(flat_elements: u64, shards: u32) -> u64 {
    flat_elements.next_multiple_of(SHARD_QUANTUM * u64::from(shards.max(1)))
}

/// Elements of each of `chunks` parts of what a rank holds of a unit, `held` elements; the last may
/// have fewer.
pub fn chunk_elements(held: u64, chunks: u32) -> u64 {
    held.div_ceil(u64::from(chunks.max(1))).next_multiple_of(SHARD_QUANTUM)
}

/// What a lowering knows of a unit. Sizes are those of one rank's micro-batch on an unsplit model;
/// a lowering divides them by the degrees that split them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct UnitShape {
    /// Its name, for prints and reports.
    pub name: String,
    /// Elements of its flat buffer before padding to shards, the gaps between parameters included.
    pub flat_elements: u64,
    /// Units whose parameters it reads besides its own (tied embeddings).
    pub borrows: Vec<u32>,
    /// Bytes that a forward keeps, by [`Keep`]: everything, selective, input only.
    pub saved_bytes: [u64; 3],
    /// Bytes of its output, which cross a pipeline cut and are what tensor parallelism exchanges; 0
    /// for the loss.
    pub output_bytes: u64,
    /// Collectives of `output_bytes` inside a forward under tensor parallelism, and as many inside
    /// a backward: 2 for a transformer block.
    pub tensor_collectives: u32,
    /// Bytes of keys and values, which context parallelism passes around.
    pub kv_bytes: u64,
    /// Elements of `flat_elements` that expert parallelism splits.
    pub expert_elements: u64,
    /// Bytes that a dispatch to experts sends, and a combine again.
    pub expert_bytes: u64,
}

/// What a lowering knows of a model: its units in order of execution. The last one computes the
/// loss.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ModelShape {
    /// First to last.
    pub units: Vec<UnitShape>,
    /// Bytes of a micro-batch's tokens, targets and positions on the device.
    pub batch_bytes: u64,
}

/// Bytes per element of what a rank keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StateBytes {
    /// The copy that forward reads.
    pub parameter: u32,
    /// The f32 master; 0 when the compute copy is the master.
    pub master: u32,
    /// A gradient.
    pub gradient: u32,
    /// The optimizer's state.
    pub optimizer: u32,
    /// A gradient while it is summed over ranks.
    pub reduce: u32,
}

impl StateBytes {
    /// Training in bf16 or f16 with f32 masters, gradients and two moments.
    pub const MIXED: StateBytes = StateBytes { parameter: 2, master: 4, gradient: 4, optimizer: 8, reduce: 4 };
    /// Training in f32 with two moments.
    pub const F32: StateBytes = StateBytes { parameter: 4, master: 0, gradient: 4, optimizer: 8, reduce: 4 };
}

/// When parameters that were gathered for a forward are given back (FSDP's
/// `reshard_after_forward`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reshard {
    /// After each forward; backward gathers again.
    #[default]
    Always,
    /// After the last backward: gathered once a step.
    Never,
    /// After each forward down to 1 / n, so that backward gathers from n neighbours (of one node,
    /// say).
    To(u32),
}

/// When gradients are summed over ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceSchedule {
    /// Once, after the last micro-batch.
    #[default]
    PerStep,
    /// After every micro-batch.
    PerMicroBatch,
}

/// A memory below the device's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Host memory, for devices that have their own.
    Host,
    /// A local disk.
    Disk,
}

/// What lies in a lower tier while it is not used; None: on the device. Optimizer state on the host
/// is not brought to the device: the update runs there, on gradients that are fetched, and what is
/// evicted is the copy that it wrote.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Offload {
    /// Masters and optimizer state.
    pub optimizer: Option<Tier>,
    /// The copy that forward reads.
    pub parameters: Option<Tier>,
    /// What forward keeps for backward.
    pub activations: Option<Tier>,
    /// Gradients, from when all that a micro-batch adds to them is added until it is the next one's
    /// turn, or the update's. They lie where the optimizer's state lies, whose update reads them
    /// there.
    #[serde(default)]
    pub gradients: Option<Tier>,
}

/// The order of forwards and backwards of a pipeline.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineSchedule {
    /// All forwards, then all backwards (Huang et al. 2019).
    GPipe,
    /// One forward, one backward (Narayanan et al. 2019, "PipeDream-Flush").
    #[default]
    OneForwardOneBackward,
    /// The same over `chunks` stretches of units per rank (Narayanan et al. 2021).
    Interleaved {
        /// Stretches of units per rank.
        chunks: u32,
    },
    /// Backward in two halves, weights when there is time (Qi et al. 2023, ZB-H1).
    ZeroBubble,
}

/// How a step is to be run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Strategy {
    /// Micro-batches of a rank that are summed before an update.
    pub accumulation_steps: u32,
    /// Per unit, what forward keeps; the last unit's is always everything, since its backward
    /// follows at once.
    pub keep: Vec<Keep>,
    /// Whether the state is handed to the checkpoint writer after the update.
    pub snapshot: bool,
    /// What is sharded over the shard group (Rajbhandari et al. 2020): 0 nothing, 1 masters and
    /// optimizer, 2 also gradients, 3 also parameters.
    pub zero_stage: u8,
    /// Stage 3: when gathered parameters are given back.
    pub reshard_after_forward: Reshard,
    /// Units whose parameters are gathered, and state is fetched, ahead of their use; and
    /// reductions that may be under way while the next gradient is computed (at least one).
    pub prefetch: u32,
    /// When gradients are summed over ranks.
    pub reduce_schedule: ReduceSchedule,
    /// Whether gradients are summed over micro-batches as they are over ranks, so that degrees 1,
    /// 2, 4 .. give the same bits at one global batch.
    pub elastic: bool,
    /// What lies in a lower tier.
    pub offload: Offload,
    /// Elements whose optimizer state is fetched from its tier and updated at a time, at most, in
    /// whole quanta ([`SHARD_QUANTUM`]); None: a unit's.
    pub update_chunk: Option<u64>,
    /// Bytes per element of what is kept.
    pub bytes: StateBytes,
    /// The order of a pipeline's forwards and backwards.
    pub pipeline: PipelineSchedule,
    /// The first unit of every stretch of the pipeline but the first, ascending; empty: blocks in
    /// equal parts.
    pub cuts: Vec<u32>,
    /// Whether tensor parallelism splits norms and residuals along the sequence too (Korthikanti et
    /// al. 2022).
    pub sequence_parallel: bool,
}

impl Strategy {
    /// One micro-batch of mixed precision on `units` units, everything kept, nothing sharded.
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
            pipeline: PipelineSchedule::default(),
            cuts: Vec::new(),
            sequence_parallel: false,
        }
    }
}

/// How much of a unit's flat buffer a rank holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// All of it.
    Full,
    /// The rank's part, 1 / F.
    Shard,
}

/// Where backward puts a gradient.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fresh {
    /// Into the resident sum.
    InPlace,
    /// Into a buffer that lives from the unit's first contribution to its reduction. With one
    /// reduction per micro-batch the next buffer may begin while the one before is still being
    /// reduced: a pass whose effects take gradient memory begins new ones.
    Transient,
}

/// What a rank keeps between steps, and where fresh gradients go. All that the engine learns of a
/// strategy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Placement {
    /// The copy that forward reads; a shard is gathered when needed.
    pub parameters: Extent,
    /// f32 masters and optimizer state.
    pub masters: Extent,
    /// The sum that the update reads.
    pub gradients: Extent,
    /// Where backward writes.
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

    /// What `strategy` keeps where on `mesh`. A shard group of one holds everything whole, whatever
    /// the stage.
    pub fn of(mesh: &Mesh, strategy: &Strategy) -> Placement {
        let stage = if mesh.shard_degree() == 1 { 0 } else { strategy.zero_stage };
        let from = |first: u8| if stage >= first { Extent::Shard } else { Extent::Full };
        let many = mesh.degree(crate::Axis::Data) > 1;
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
    /// A step of nothing.
    #[error("a step needs at least one micro-batch: accumulation_steps is 0")]
    NoMicroBatch,
    /// No units.
    #[error("a model needs at least one unit")]
    NoUnits,
    /// The lengths disagree.
    #[error("what to keep is given for {given} units, but the model has {units}")]
    KeepLength {
        /// Entries given.
        given: usize,
        /// Units of the model.
        units: usize,
    },
    /// An axis of no ranks.
    #[error("every degree of the mesh must be at least 1: {0:?}")]
    EmptyAxis(Mesh),
    /// A unit borrows from one that does not exist, or from itself.
    #[error("unit {unit} borrows the parameters of unit {from}: the model's others are 0 to {last}")]
    Borrow {
        /// Which unit.
        unit: u32,
        /// From which.
        from: u32,
        /// The last unit.
        last: u32,
    },
    /// A stage that is none.
    #[error("zero_stage is {0}: it goes from 0 to 3")]
    ZeroStage(u8),
    /// Parts that do not come out even.
    #[error("reshard_after_forward = {to} does not divide the shard group of {shards} ranks: use one of {possible:?}")]
    ReshardTo {
        /// What was asked for.
        to: u32,
        /// Ranks of the shard group.
        shards: u32,
        /// What would do.
        possible: Vec<u32>,
    },
    /// Elastic bits need a binary tree.
    #[error("elastic bits need powers of two: accumulation is {accumulation} and the data-parallel degree {degree}")]
    Elastic {
        /// Micro-batches per rank.
        accumulation: u32,
        /// Data-parallel degree.
        degree: u32,
    },
    /// Elastic bits fold micro-batches before ranks.
    #[error("elastic bits sum a rank's micro-batches first: reduce gradients once per step")]
    ElasticPerMicroBatch,
    /// Experts are spread inside a shard group.
    #[error(
        "{experts} expert-parallel ranks do not divide the shard group of {shards}: raise dp_shard or cp to a multiple"
    )]
    Experts {
        /// Expert-parallel degree.
        experts: u32,
        /// Ranks of the shard group.
        shards: u32,
    },
    /// Interleaving nothing.
    #[error(
        "{chunks} stretches of units per stage, with {stages} stages: interleaving needs at least one stretch, and several stages"
    )]
    Chunks {
        /// Stretches per stage.
        chunks: u32,
        /// Pipeline stages.
        stages: u32,
    },
    /// A stage without units.
    #[error("a pipeline of {stretches} stretches needs as many units, and the model has {units}")]
    Stretches {
        /// Stages times stretches per stage.
        stretches: u32,
        /// Units of the model.
        units: u32,
    },
    /// Interleaved schedules go round by round.
    #[error(
        "an interleaved pipeline of {stages} stages needs a multiple of {stages} micro-batches, not {micro_batches}"
    )]
    Interleaving {
        /// Micro-batches of a step.
        micro_batches: u32,
        /// Pipeline stages.
        stages: u32,
    },
    /// Cuts that do not make the stretches.
    #[error(
        "the cuts {cuts:?} do not divide {units} units into {stretches} stretches that all have some: give {stretches} - 1, ascending"
    )]
    Cuts {
        /// As given.
        cuts: Vec<u32>,
        /// Stretches wanted.
        stretches: u32,
        /// Units of the model.
        units: u32,
    },
    /// Gradients that lie in a tier are read there, by the update of a state that is there too.
    #[error("gradients lie in the tier of the optimizer's state, or on the device: offload both to one tier")]
    GradientsApart,
    /// Stages sum what they share where it is.
    #[error("in a pipeline gradients stay on the device: leave out their offload, or use one stage")]
    GradientsOfStages,
    /// Chunks of nothing.
    #[error("update_chunk is 0: a chunk has at least one element")]
    NoChunk,
    /// No such rank.
    #[error("rank {rank} is not in a mesh of {ranks} ranks, 0 to {}", .ranks - 1)]
    Rank {
        /// Which.
        rank: u32,
        /// How many there are.
        ranks: u32,
    },
}

/// Checks that the three go together.
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
    if mesh.ep > 1 && !shards.is_multiple_of(mesh.ep) {
        return Err(StrategyError::Experts { experts: mesh.ep, shards });
    }
    validate_pipeline(units as u32, mesh, strategy)
}

fn validate_pipeline(units: u32, mesh: &Mesh, strategy: &Strategy) -> Result<(), StrategyError> {
    let chunks = crate::order::chunks(strategy);
    if chunks == 0 || (chunks > 1 && mesh.pp == 1) {
        return Err(StrategyError::Chunks { chunks, stages: mesh.pp });
    }
    let stretches = mesh.pp * chunks;
    if units < stretches {
        return Err(StrategyError::Stretches { stretches, units });
    }
    if chunks > 1 && !strategy.accumulation_steps.is_multiple_of(mesh.pp) {
        return Err(StrategyError::Interleaving { micro_batches: strategy.accumulation_steps, stages: mesh.pp });
    }
    let bounds: Vec<u32> = std::iter::once(0).chain(strategy.cuts.iter().copied()).chain([units]).collect();
    if !strategy.cuts.is_empty() && (bounds.len() as u32 != stretches + 1 || !bounds.is_sorted_by(|a, b| a < b)) {
        return Err(StrategyError::Cuts { cuts: strategy.cuts.clone(), stretches, units });
    }
    Ok(())
}
