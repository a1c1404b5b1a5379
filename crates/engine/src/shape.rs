//! Translates a resolved configuration into a model, a strategy and a step program.

use crate::config::{
    Activation as ConfigActivation, AdapterMethod, BaseDtype, CheckpointMode, CompressionCodec, Compute, Config,
    ContextExchange as ConfigExchange, CudaGraphs, ExpertsSection, FP8_AMAX_HISTORY, Fp8Recipe, Int8Recipe,
    ModelShape as ConfigShape, ModelSource, OffloadTier, OptimizerName, Parallel, PipelineSchedule as ConfigPipeline,
    ReduceDtype, ReduceSchedule as ConfigSchedule, Reshard as ConfigReshard, Resolved, RopeScaling as ConfigScaling,
    Section,
};
use crate::constraints::Pruning;
use crate::fp8::{Fp8Settings, check_sizes, layers};
use crate::power_sgd::matrices;
use crate::precision::LossScaler;
use crate::pretrained::description;
use crate::rank::RankSettings;
use crate::state::does_not_fit;
use crate::{EngineError, Result};
use std::ops::Range;
use trainyard_autograd::Policy;
use trainyard_model::costs::{SegmentedCost, UnitCost, segment_costs, unit_costs};
use trainyard_model::families::Sizes;
use trainyard_model::tuning::encodable;
use trainyard_model::{
    Activation, AdapterSpec, BatchShape, Chunks, ContextExchange, ContextSplit, EncoderSpec, ExpertSplit, ExpertsSpec,
    Model, ModelError, ModelSpec, RopeScaling, RopeSpec, Segment, TensorSplit, Tuning, Unit, Value, hf,
};
use trainyard_program::{
    Axis, BlockCodec, Border, Codec, Encoding, ExpertRanks, Keep, Mesh, ModelShape, Offload, PipelineSchedule, Program,
    ReduceSchedule, Reshard, Schedule, ScheduleTable, SegmentShape, SplitShape, StateBytes, StepKind, Strategy, Tier,
    UnitShape, ValueShape, check, lower_rank,
};
use trainyard_tensor::DType;
use trainyard_tensor::sparsity::Pattern;

/// The model of a resolved configuration.
pub fn model_spec(resolved: &Resolved) -> Result<ModelSpec> {
    let spec = unchecked_spec(resolved)?;
    if let Some(experts) = &spec.experts {
        check_experts(resolved, experts)?;
    }
    if fp8(resolved).is_some() {
        let rows = resolved.batch.micro * resolved.sequence_length / resolved.parallel.context;
        check_sizes(&[
            ("model.dim", spec.dim),
            ("model.heads x model.head_dim", spec.heads * spec.head_dim),
            ("queries, keys and values", spec.qkv_dim()),
            ("model.ffn_dim", spec.ffn_dim),
            ("a rank's tokens of a micro-batch", rows),
        ])?;
        check_parts(resolved, &spec)?;
    }
    Ok(spec)
}

/// Checks that nothing is asked for that mixtures of experts do not have.
fn check_experts(resolved: &Resolved, experts: &ExpertsSpec) -> Result<()> {
    if fp8(resolved).is_some() {
        return Err(does_not_fit("precision.fp8: products of experts have no 8-bit form; set it to \"off\""));
    }
    if int8(resolved) {
        return Err(does_not_fit("precision.int8: products of experts have no 8-bit form; set it to \"off\""));
    }
    // Beside the gradients of its block, what moves the bias is too small for a codec of blocks.
    let codec = resolved.config.compression.gradients;
    let kept = matches!(codec, CompressionCodec::None | CompressionCodec::Bf16);
    if experts.bias_update_rate > 0.0 && !kept {
        return Err(does_not_fit(format!(
            "compression.gradients = \"{codec}\" loses what moves the bias of experts: set experts.bias_update_rate to 0 and \
             experts.auxiliary_loss to 0.01, or compression.gradients to \"bf16\" or \"none\""
        )));
    }
    Ok(())
}

/// Checks that the parts of products that ranks have can be computed in 8 bits. All blocks are
/// divided alike.
fn check_parts(resolved: &Resolved, spec: &ModelSpec) -> Result<()> {
    let ranks = resolved.parallel.tensor;
    if ranks == 1 {
        return Ok(());
    }
    let one_block = ModelSpec { layers: 1, ..spec.clone() };
    for rank in 0..ranks {
        let place = TensorSplit { rank, ranks, sequence: resolved.parallel.sequence };
        let model = split(one_block.clone(), place, ContextSplit::WHOLE, ExpertSplit::WHOLE)?;
        let sides = model.parameters().filter(|(id, _)| layers(&model).contains(id)).flat_map(|(_, spec)| {
            let name = format!("part {rank} of {ranks} (parallel.tensor_parallel_degree) of {}", spec.name);
            spec.shape.iter().map(move |side| (name.clone(), *side)).collect::<Vec<_>>()
        });
        let sides: Vec<(String, usize)> = sides.collect();
        check_sizes(&sides.iter().map(|(name, side)| (name.as_str(), *side)).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn unchecked_spec(resolved: &Resolved) -> Result<ModelSpec> {
    spec_of(&resolved.model, &resolved.config)
}

/// The model that `source` describes, with the dropout and the balance of experts of `config`.
pub(crate) fn spec_of(source: &ModelSource, config: &Config) -> Result<ModelSpec> {
    match source {
        ModelSource::Shape(shape) => from_shape(shape),
        ModelSource::HuggingFace { path, .. } => {
            let mut spec = description(path)?.spec;
            spec.dropout = config.model.dropout;
            balance(&mut spec, &config.experts)?;
            Ok(spec)
        }
    }
}

/// Sets the balance of the experts of a model from files.
fn balance(spec: &mut ModelSpec, section: &ExpertsSection) -> Result<()> {
    let Some(experts) = &mut spec.experts else {
        let set = section.keys().into_iter().find(|key| section.get(key.name).is_some());
        let problem = |key: &str| does_not_fit(format!("experts.{key} is given, and the model has no experts"));
        return set.map_or(Ok(()), |key| Err(problem(key.name)));
    };
    experts.auxiliary_loss = section.auxiliary_loss.unwrap_or(experts.auxiliary_loss);
    experts.z_loss = section.z_loss.unwrap_or(experts.z_loss);
    experts.capacity_factor = section.capacity_factor.or(experts.capacity_factor);
    if let Some(rate) = section.bias_update_rate {
        if rate > 0.0 && !experts.selection_bias {
            return Err(does_not_fit(format!(
                "experts.bias_update_rate = {rate}: the files of this family have no bias of the router; \
                 balance it with experts.auxiliary_loss"
            )));
        }
        experts.bias_update_rate = rate;
    }
    Ok(())
}

fn from_shape(shape: &ConfigShape) -> Result<ModelSpec> {
    let vocab_size = shape
        .vocab_size
        .ok_or_else(|| does_not_fit("the vocabulary is not known yet: set model.vocab_size or give a tokenizer"))?;
    let ConfigShape { dim, layers, heads, max_sequence_length: max_positions, .. } = *shape;
    let usual = shape.family.usual(&Sizes { vocab_size, dim, layers, heads, max_positions });
    let biases = shape.qkv_bias || shape.output_bias || shape.mlp_bias;
    Ok(ModelSpec {
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        ffn_dim: shape.ffn_dim,
        activation: match shape.activation {
            ConfigActivation::Silu => Activation::Silu,
            ConfigActivation::Gelu => Activation::Gelu,
            ConfigActivation::GeluTanh => Activation::GeluTanh,
            ConfigActivation::Relu => Activation::Relu,
            ConfigActivation::ReluSquared => Activation::ReluSquared,
        },
        norm_eps: shape.norm_eps,
        norm_bias: usual.norm_bias && biases,
        qkv_bias: shape.qkv_bias,
        o_bias: shape.output_bias,
        mlp_bias: shape.mlp_bias,
        qk_norm: shape.qk_norm,
        value_residual: shape.value_residual,
        tie_embeddings: shape.tie_embeddings,
        rope: shape.rope.map(|rope| RopeSpec {
            theta: rope.theta,
            partial_factor: 1.0,
            scaling: match rope.scaling {
                ConfigScaling::None => None,
                ConfigScaling::Linear => Some(RopeScaling::Linear { factor: rope.factor }),
                ConfigScaling::Llama3 => Some(RopeScaling::Llama3 {
                    factor: rope.factor,
                    low_freq_factor: rope.low_freq_factor,
                    high_freq_factor: rope.high_freq_factor,
                    original_max_positions: rope.original_length,
                }),
                ConfigScaling::Yarn => Some(RopeScaling::Yarn {
                    factor: rope.factor,
                    beta_fast: rope.beta_fast,
                    beta_slow: rope.beta_slow,
                    original_max_positions: rope.original_length,
                    attention_factor: None,
                    mscale: None,
                    mscale_all_dim: None,
                    truncate: true,
                }),
            },
        }),
        sliding_window: shape.sliding_window,
        dropout: shape.dropout,
        init_std: shape.init_std,
        mup_base_dim: shape.mup_base_dim,
        experts: shape.experts.clone(),
        max_positions,
        image: shape.image.clone(),
        encoder: shape.encoder_layers.and_then(|layers| Some(EncoderSpec { layers, ..usual.encoder? })),
        ..usual
    })
}

/// Notes on the model for the user: keys of its `config.json` that are not used, and an export that
/// will fail.
pub fn model_notes(resolved: &Resolved, spec: &ModelSpec) -> Vec<String> {
    let mut notes = match &resolved.model {
        ModelSource::HuggingFace { path, .. } => {
            description(path).map_or_else(|_| Vec::new(), |imported| imported.notes)
        }
        ModelSource::Shape(_) => Vec::new(),
    };
    notes.extend(hf::export_note(spec));
    notes
}

/// The dtype of forward and backward.
pub fn compute_dtype(resolved: &Resolved) -> DType {
    dtype_of(resolved.config.precision.compute)
}

/// The tensor type of `precision.compute`.
pub fn dtype_of(compute: Compute) -> DType {
    match compute {
        Compute::F32 => DType::F32,
        Compute::Bf16 => DType::BF16,
        Compute::F16 => DType::F16,
    }
}

/// The fp8 settings of a resolved configuration; None if fp8 is off.
pub fn fp8(resolved: &Resolved) -> Option<Fp8Settings> {
    let precision = &resolved.config.precision;
    (precision.fp8 == Fp8Recipe::Hybrid).then(|| Fp8Settings {
        history: precision.fp8_amax_history.unwrap_or(FP8_AMAX_HISTORY) as usize,
        margin: precision.fp8_margin.unwrap_or(0) as u32,
    })
}

/// True if the blocks' products multiply 8-bit integers.
pub fn int8(resolved: &Resolved) -> bool {
    resolved.config.precision.int8 != Int8Recipe::Off
}

/// The shape of a micro-batch of `model`.
pub fn batch_shape(resolved: &Resolved, model: &Model) -> BatchShape {
    if let Some(spans) = resolved.spans.filter(|spans| spans.paired) {
        let encoder = spans.lengths.encoder();
        return BatchShape::pairs(
            resolved.batch.micro,
            encoder,
            resolved.sequence_length.saturating_sub(encoder).max(1),
        );
    }
    let mixed = resolved.images.as_ref().is_some_and(|images| images.augmentation.mixes());
    BatchShape { mixed, ..model.batch_shape(resolved.batch.micro, resolved.sequence_length) }
}

/// The activations that each unit keeps for backward. The checkpoint mode and its overrides apply
/// to blocks only: the embedding has nothing to recompute, and the head's backward follows its
/// forward at once.
pub fn keep(resolved: &Resolved, units: usize) -> Vec<Keep> {
    (0..units)
        .map(|unit| match unit.checked_sub(1) {
            Some(block) if unit + 1 < units => match resolved.checkpoint_mode(block) {
                CheckpointMode::None => Keep::Everything,
                CheckpointMode::Selective => Keep::Selective,
                CheckpointMode::Full => Keep::InputOnly,
            },
            _ => Keep::Everything,
        })
        .collect()
}

/// The policies in the order of [`Keep`].
const POLICIES: [Policy; 3] = [Policy::Everything, Policy::Selective, Policy::Nothing];

/// The model as the lowering needs it, with the bytes that each unit keeps under each policy. Of a
/// split model these are the sizes of one rank's part.
pub fn model_shape(model: &Model, batch: &BatchShape, dtype: DType) -> Result<ModelShape> {
    let mut units = match model.tensor_split().ranks * model.context_split().ranks {
        1 => whole_units(model, batch, dtype)?,
        _ => split_units(model, batch, dtype)?,
    };
    for (index, (shape, unit)) in units.iter_mut().zip(model.units()).enumerate() {
        shape.name = unit.name().to_owned();
        let layout = model.layout(index, 1);
        // A lowering divides experts among `expert` ranks, of which this model is one.
        let expert = model.expert_split().ranks as u64;
        shape.expert_elements = if expert > 1 { layout.experts().len() as u64 * expert } else { 0 };
        shape.expert_bytes = expert_bytes(model, index, batch, dtype);
        shape.flat_elements = layout.flat_elements() as u64 + shape.expert_elements / expert * (expert - 1);
        let matrix =
            |(range, columns): (Range<usize>, usize)| [range.len() / columns.max(1), columns].map(|n| n as u64);
        shape.matrices = matrices(model, index, &layout).into_iter().map(matrix).collect();
        let encodable = encodable(model, index).into_iter().map(|parameter| layout.range(parameter).len() as u64);
        shape.encodable = encodable.collect();
        shape.frozen_elements = layout.frozen_flat_elements() as u64;
        shape.borrows = unit.borrowed().iter().map(|id| id.unit).collect();
        shape.borrows.dedup();
        if index + 1 == model.units().len() {
            shape.output_bytes = 0;
        }
    }
    Ok(ModelShape { units, batch_bytes: batch.bytes() })
}

/// Bytes of the rows that a unit sends to the ranks of its experts in a forward: those of all
/// choices, of which one part of as many as there are ranks stays.
fn expert_bytes(model: &Model, unit: usize, batch: &BatchShape, dtype: DType) -> u64 {
    let spec = model.spec().filter(|_| model.expert_split().ranks > 1);
    let experts = spec.zip(unit.checked_sub(1)).and_then(|(spec, layer)| {
        let is_block = layer < spec.layers;
        is_block.then(|| spec.experts_of(layer)).flatten().map(|experts| experts.top_k * spec.dim)
    });
    experts.map_or(0, |row| (batch.tokens() * row * dtype.size()) as u64)
}

/// FLOPs of a forward and a backward of a whole unit.
fn work(cost: &UnitCost) -> u64 {
    cost.forward.flops + cost.backward.flops
}

/// The sizes of units that run as a whole.
fn whole_units(model: &Model, batch: &BatchShape, dtype: DType) -> Result<Vec<UnitShape>> {
    let costs = POLICIES.map(|policy| unit_costs(model, batch, dtype, policy));
    let [everything, selective, input_only] = costs;
    let (everything, selective, input_only) = (everything?, selective?, input_only?);
    let shape = |index: usize| UnitShape {
        saved_bytes: [&everything, &selective, &input_only].map(|costs| costs[index].saved_bytes as u64),
        output_bytes: everything[index].output_bytes as u64,
        work: work(&everything[index]),
        ..UnitShape::default()
    };
    Ok((0..model.units().len()).map(shape).collect())
}

/// The sizes of one rank's part of split units, by segment. Their work is that of the whole units,
/// so every rank divides the stages alike.
fn split_units(model: &Model, batch: &BatchShape, dtype: DType) -> Result<Vec<UnitShape>> {
    let costs = POLICIES.map(|policy| segment_costs(model, batch, dtype, policy));
    let [everything, selective, input_only] = costs;
    let (everything, selective, input_only) = (everything?, selective?, input_only?);
    let spec = model.spec().expect("a model is split by its specification");
    let whole = unit_costs(&Model::new(spec.clone())?, batch, dtype, Policy::Everything)?;
    let index_of = |values: &[usize]| values.iter().map(|value| *value as u32).collect();
    let shape = |(index, unit): (usize, &dyn Unit)| {
        let cost: &SegmentedCost = &everything[index];
        let inside = &cost.segments;
        let segment = |(number, segment): (usize, &Segment)| {
            let saved = |costs: &[SegmentedCost]| costs[index].costs[number].saved_bytes as u64;
            let saved = [&everything, &selective, &input_only].map(|costs| saved(costs));
            SegmentShape {
                name: segment.name.to_owned(),
                takes: index_of(&segment.takes),
                gives: index_of(&segment.gives),
                differentiable: segment.differentiable,
                saved_bytes: if segment.differentiable { saved } else { [0; 3] },
            }
        };
        let value = |(value, bytes): (&Value, &usize)| ValueShape {
            name: value.name.to_owned(),
            layout: value.layout,
            context: value.context,
            bytes: *bytes as u64,
        };
        let segments: Vec<SegmentShape> = inside.segments.iter().enumerate().map(segment).collect();
        let saved = |keep: usize| segments.iter().map(|segment| segment.saved_bytes[keep]).sum();
        UnitShape {
            saved_bytes: [0, 1, 2].map(saved),
            output_bytes: cost.value_bytes.last().map_or(0, |bytes| *bytes as u64),
            work: work(&whole[index]),
            split: Some(SplitShape {
                values: inside.values.iter().zip(&cost.value_bytes).map(value).collect(),
                input: inside.input.map(|value| value as u32),
                segments,
                borders: inside
                    .exchanges
                    .iter()
                    .map(|exchange| Border { from: exchange.from as u32, to: exchange.to as u32 })
                    .collect(),
                shared_gradient_elements: unit
                    .parameters()
                    .iter()
                    .filter(|spec| spec.trained)
                    .map(|spec| spec.shared_runs().1 as u64)
                    .sum(),
            }),
            ..UnitShape::default()
        }
    };
    Ok(model.units().iter().map(AsRef::as_ref).enumerate().map(shape).collect())
}

/// The part of every product that a rank has.
pub fn tensor_split(resolved: &Resolved, rank: u32) -> TensorSplit {
    let parallel = &resolved.parallel;
    let rank = mesh(resolved).coordinates(rank).tp as usize;
    TensorSplit { rank, ranks: parallel.tensor, sequence: parallel.sequence }
}

/// The part of every sequence that a rank has.
pub fn context_split(resolved: &Resolved, rank: u32) -> ContextSplit {
    let parallel = &resolved.parallel;
    let chunks = if parallel.balanced { Chunks::Zigzag } else { Chunks::Contiguous };
    let exchange = match parallel.exchange {
        ConfigExchange::AllToAll => ContextExchange::Heads,
        ConfigExchange::AllGather => ContextExchange::Keys(chunks),
        ConfigExchange::AllGatherOverlapped => ContextExchange::Overlapped(chunks),
    };
    let rank = mesh(resolved).coordinates(rank).cp as usize;
    ContextSplit { rank, ranks: parallel.context, length: resolved.sequence_length, exchange }
}

/// The part of the experts that a rank has.
pub fn expert_split(resolved: &Resolved, rank: u32) -> ExpertSplit {
    let mesh = mesh(resolved);
    ExpertSplit { rank: mesh.group(rank, Axis::Expert).index as usize, ranks: mesh.ep as usize }
}

/// The model of a rank: all units, or its parts of them.
///
/// # Errors
/// A model that cannot be divided among the ranks.
pub fn model_of(resolved: &Resolved, spec: ModelSpec, rank: u32) -> Result<Model> {
    tuned_model(resolved, spec, rank, &tuning(&resolved.config))
}

/// As [`model_of`], with another tuning than the configuration's.
pub(crate) fn tuned_model(resolved: &Resolved, spec: ModelSpec, rank: u32, tuning: &Tuning) -> Result<Model> {
    let experts = expert_split(resolved, rank);
    let whole = split(spec, tensor_split(resolved, rank), context_split(resolved, rank), experts)?;
    crate::distill::taught(whole.tuned(tuning)?, resolved)
}

/// The usual width of adapters.
pub(crate) const ADAPTER_RANK: usize = 16;

/// The usual alpha of adapters of this rank.
pub(crate) fn adapter_alpha(rank: usize) -> f64 {
    2.0 * rank as f64
}

/// The form in which frozen matrices lie in memory; None: in the compute dtype.
pub fn base_codec(config: &Config) -> Option<BlockCodec> {
    match config.fine_tuning.base_dtype {
        BaseDtype::Compute => None,
        BaseDtype::Int8 => Some(BlockCodec::Int8),
        BaseDtype::Nf4 => Some(BlockCodec::Nf4),
    }
}

/// The trained part of the model.
pub fn tuning(config: &Config) -> Tuning {
    let section = &config.fine_tuning;
    let adapter = match section.adapter {
        AdapterMethod::None => None,
        AdapterMethod::Lora | AdapterMethod::Dora => {
            let rank = section.rank.unwrap_or(ADAPTER_RANK);
            Some(AdapterSpec {
                rank,
                alpha: section.alpha.unwrap_or_else(|| adapter_alpha(rank)),
                rank_stabilised: section.rank_stabilised.unwrap_or(false),
                magnitudes: section.adapter == AdapterMethod::Dora,
                targets: section.targets.clone().unwrap_or_default().0,
            })
        }
    };
    Tuning {
        adapter,
        freeze: section.freeze.0.clone(),
        train: section.train.0.clone(),
        layer_rate_decay: section.layer_rate_decay,
        freeze_schedule: crate::periods::patterns(config),
    }
}

/// One rank's part of a model. An error names the keys that ask for parts.
fn split(spec: ModelSpec, split: TensorSplit, context: ContextSplit, experts: ExpertSplit) -> Result<Model> {
    Model::split_over(spec, split, context, experts).map_err(|error| match error {
        ModelError::Split(problem) => {
            let degrees = [("expert", experts.ranks), ("context", context.ranks), ("tensor", split.ranks)];
            let divides = degrees.into_iter().filter(|(_, ranks)| *ranks > 1);
            let keys: Vec<_> =
                divides.map(|(kind, ranks)| format!("parallel.{kind}_parallel_degree = {ranks}")).collect();
            does_not_fit(format!("{}: {problem}", keys.join(", ")))
        }
        other => other.into(),
    })
}

/// The mesh of ranks of a resolved configuration.
pub fn mesh(resolved: &Resolved) -> Mesh {
    let parallel = &resolved.parallel;
    Mesh {
        pp: parallel.pipeline as u32,
        cp: parallel.context as u32,
        tp: parallel.tensor as u32,
        ep: parallel.experts as u32,
        expert_ranks: ExpertRanks::Replicas,
        ..match resolved.server {
            // Servers own shards of masters, as the ranks of a shard group do.
            Some(_) => Mesh::data(1, parallel.data_degree() as u32),
            None => Mesh::data(parallel.replicate as u32, parallel.shard as u32),
        }
    }
}

/// The strategy of a resolved configuration, on a model of `units` units.
///
/// # Errors
/// A schedule's file that cannot be read, or is no schedule.
pub fn strategy(resolved: &Resolved, units: usize) -> Result<Strategy> {
    let parallel = &resolved.parallel;
    Ok(Strategy {
        accumulation_steps: resolved.batch.accumulation as u32,
        keep: keep(resolved, units),
        zero_stage: if resolved.server.is_some() { 1 } else { parallel.zero_stage as u8 },
        reshard_after_forward: match parallel.reshard_after_forward {
            ConfigReshard::Always => Reshard::Always,
            ConfigReshard::Never => Reshard::Never,
            ConfigReshard::To(n) => Reshard::To(n as u32),
        },
        prefetch: parallel.prefetch as u32,
        reduce_schedule: match parallel.reduce_schedule {
            ConfigSchedule::Step => ReduceSchedule::PerStep,
            ConfigSchedule::MicroBatch => ReduceSchedule::PerMicroBatch,
        },
        elastic: parallel.elastic,
        offload: offload(resolved),
        update_chunk: update_chunk(resolved),
        bytes: state_bytes(resolved),
        pipeline: pipeline(resolved)?,
        cuts: cuts(resolved),
        sequence_parallel: parallel.sequence,
        kind: match (resolved.apart, resolved.server) {
            (Some(_), _) => StepKind::Inner,
            (_, Some(_)) => StepKind::Stale,
            _ => StepKind::Synchronous,
        },
        server: resolved.server.map(|server| server.server),
        gradients: resolved.compression.gradients,
        gathers: resolved.compression.parameters.map(|codec| Encoding::new(Codec::Blocks(codec), Axis::Shard, false)),
        activations: resolved.compression.activations,
        outer: resolved.compression.outer,
        outer_momentum: resolved.apart.is_some_and(|apart| apart.outer.momentum != 0.0),
        rounding_bits: resolved.constraints.grid.map(|grid| grid.bits),
        pruned: resolved.constraints.pruning.is_some(),
        ..Strategy::new(units)
    })
}

/// The order of forwards and backwards: a known schedule, or the table of a file.
///
/// # Errors
/// A file that cannot be read, or is no schedule.
fn pipeline(resolved: &Resolved) -> Result<Schedule> {
    if let Some(path) = &resolved.config.parallel.pipeline_schedule_file {
        let text = std::fs::read_to_string(path).map_err(|source| EngineError::File {
            what: "cannot read",
            path: path.display().to_string(),
            source,
        })?;
        let fail =
            |problem: String| does_not_fit(format!("parallel.pipeline_schedule_file {}: {problem}", path.display()));
        let table = ScheduleTable::parse(&text).map_err(|error| fail(error.to_string()))?;
        let (stages, micro_batches) = (resolved.parallel.pipeline, resolved.batch.accumulation);
        let of_table = [table.stages() as usize, table.micro_batches() as usize];
        if of_table != [stages, micro_batches] {
            return Err(fail(format!(
                "it is for {} stages and {} micro-batches, but parallel.pipeline_parallel_degree is {stages} and \
                 training.accumulation_steps is {micro_batches}",
                of_table[0], of_table[1]
            )));
        }
        return Ok(Schedule::Own(table));
    }
    Ok(Schedule::Known(known_schedule(&resolved.parallel)))
}

/// The known schedule that the configuration asks for.
pub(crate) fn known_schedule(parallel: &Parallel) -> PipelineSchedule {
    match parallel.schedule {
        ConfigPipeline::Gpipe => PipelineSchedule::GPipe,
        ConfigPipeline::OneForwardOneBackward => PipelineSchedule::OneForwardOneBackward,
        ConfigPipeline::Interleaved => PipelineSchedule::Interleaved { chunks: parallel.chunks as u32 },
        ConfigPipeline::ZeroBubble => PipelineSchedule::ZeroBubble,
        ConfigPipeline::ZeroBubbleV => PipelineSchedule::ZeroBubbleV,
        ConfigPipeline::DualPipeV => PipelineSchedule::DualPipeV,
    }
}

/// The first unit of every stretch of the pipeline but the first; empty if they are not given.
fn cuts(resolved: &Resolved) -> Vec<u32> {
    let cuts = resolved.config.parallel.pipeline_cuts.iter().flat_map(|cuts| &cuts.0);
    cuts.map(|unit| u32::try_from(*unit).unwrap_or(u32::MAX)).collect()
}

/// The tier of each kind of state.
fn offload(resolved: &Resolved) -> Offload {
    let tier = |tier: OffloadTier| match tier {
        OffloadTier::None => None,
        OffloadTier::Host => Some(Tier::Host),
        OffloadTier::Disk => Some(Tier::Disk),
    };
    let section = &resolved.config.offload;
    let encoded = base_codec(&resolved.config).map(Tier::Encoded);
    Offload {
        optimizer: tier(section.optimizer),
        parameters: encoded.or(tier(section.parameters)),
        activations: tier(section.activations),
        gradients: tier(section.gradients),
    }
}

/// True if any state is offloaded.
pub fn is_offloaded(resolved: &Resolved) -> bool {
    offload(resolved) != Offload::default()
}

/// Elements per chunk of optimizer state; None if the rule needs all of a unit.
fn update_chunk(resolved: &Resolved) -> Option<u64> {
    let compares_all = |pruning: &Pruning| matches!(pruning.pattern, Pattern::Share(_));
    let whole =
        resolved.optimizer.name.looks_at_matrices() || resolved.constraints.pruning.as_ref().is_some_and(compares_all);
    (!whole).then_some(resolved.config.offload.chunk_elements as u64)
}

/// The dtype of gradients on their way between ranks.
pub fn reduce_dtype(resolved: &Resolved) -> DType {
    match resolved.parallel.reduce_dtype {
        ReduceDtype::F32 => DType::F32,
        ReduceDtype::Bf16 => DType::BF16,
    }
}

/// The rank settings of a resolved configuration.
pub fn rank_settings(resolved: &Resolved) -> RankSettings {
    let (compute, precision) = (compute_dtype(resolved), &resolved.config.precision);
    let scaler = match compute {
        DType::F16 => LossScaler::dynamic(
            precision.loss_scale_initial.unwrap_or(65536.0),
            precision.loss_scale_window.unwrap_or(1000),
        ),
        _ => LossScaler::none(),
    };
    RankSettings {
        computes: crate::device::computes(resolved),
        compute,
        fp8: fp8(resolved),
        int8: int8(resolved),
        reduce: reduce_dtype(resolved),
        way: crate::collectives::asked(resolved),
        optimizer: resolved.optimizer,
        constraints: resolved.constraints,
        scaler,
        seed: resolved.config.training.seed,
        compression: resolved.compression,
        outer: resolved.apart.map(|apart| apart.outer),
        graphs: resolved.config.training.cuda_graphs != CudaGraphs::Off,
    }
}

/// Bytes of each kind of state; an average of the weights, and what is held of an earlier run,
/// count as the optimizer's. Optimizer state of Muon and Adafactor differs between parameters; the
/// figure is that of most.
fn state_bytes(resolved: &Resolved) -> StateBytes {
    let compute = compute_dtype(resolved);
    let is_encoded = resolved.optimizer.state_bits == 8;
    let optimizer = match resolved.optimizer.name {
        OptimizerName::AdamW if is_encoded => 2,
        OptimizerName::AdamW | OptimizerName::Lamb => 8,
        OptimizerName::Lion | OptimizerName::Muon => 4,
        OptimizerName::Sgd if resolved.optimizer.momentum != 0.0 => 4,
        OptimizerName::Sgd | OptimizerName::Adafactor => 0,
    };
    let average = if resolved.optimizer.averaging.is_some() { 4 } else { 0 };
    let held = if resolved.optimizer.consolidation.is_some() { 8 } else { 0 };
    StateBytes {
        parameter: compute.size() as u32,
        master: if resolved.constraints.separate_masters(compute) || resolved.server.is_some() { 4 } else { 0 },
        gradient: 4,
        optimizer: optimizer + average + held,
        optimizer_scales: if is_encoded { 2 * 4 } else { 0 },
        reduce: reduce_dtype(resolved).size() as u32,
    }
}

/// The checked programs of rank `rank`'s step: without and with a snapshot at its end.
pub fn programs(shape: &ModelShape, mesh: &Mesh, strategy: &Strategy, rank: u32) -> Result<[Program; 2]> {
    let program = |snapshot| -> Result<Program> {
        let strategy = Strategy { snapshot, ..strategy.clone() };
        let program = lower_rank(shape, mesh, &strategy, rank)?;
        check(&program)?;
        Ok(program)
    };
    Ok([program(false)?, program(true)?])
}

/// The strategy of steps that end a round: in an outer step where replicas train apart, or with all
/// updates of a parameter server. None where every step is the same.
pub fn outer_strategies(resolved: &Resolved, strategy: &Strategy) -> Vec<Strategy> {
    let (kind, fragments) = match (resolved.apart, resolved.server) {
        (Some(apart), _) => (StepKind::Outer, apart.fragments()),
        (_, Some(_)) => (StepKind::Drained, Vec::new()),
        _ => return Vec::new(),
    };
    let fragments = std::iter::once(None).chain(fragments.into_iter().map(Some));
    fragments.map(|fragment| Strategy { kind, fragment, ..strategy.clone() }).collect()
}

/// The checked program of a step of `model` for rank `rank` of `mesh`, whose micro-batches have
/// `batch`'s shape.
///
/// # Errors
/// A strategy that does not fit the model or the mesh.
pub fn program(
    model: &Model,
    batch: &BatchShape,
    dtype: DType,
    mesh: &Mesh,
    strategy: &Strategy,
    rank: u32,
) -> Result<Program> {
    let [program, _] = programs(&model_shape(model, batch, dtype)?, mesh, strategy, rank)?;
    Ok(program)
}
