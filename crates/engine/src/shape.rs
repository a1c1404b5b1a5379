//! From configuration to model, strategy and program.

use crate::config::{
    Activation as ConfigActivation, CheckpointMode, Family as ConfigFamily, ModelShape as ConfigShape, ModelSource,
    Resolved, RopeScaling as ConfigScaling,
};
use crate::state::does_not_fit;
use crate::{EngineError, Result};
use trainyard_autograd::Policy;
use trainyard_model::costs::unit_costs;
use trainyard_model::{Activation, BatchShape, Family, Model, ModelSpec, RopeScaling, RopeSpec, UnitLayout, hf};
use trainyard_program::{Keep, Mesh, ModelShape, Program, StateBytes, Strategy, UnitShape, check, lower_rank};
use trainyard_tensor::DType;

/// The model that a resolved configuration asks for.
pub fn model_spec(resolved: &Resolved) -> Result<ModelSpec> {
    match &resolved.model {
        ModelSource::Shape(shape) => from_shape(shape),
        ModelSource::HuggingFace { path, .. } => {
            let file = path.join("config.json");
            let text = std::fs::read_to_string(&file).map_err(|source| EngineError::File {
                what: "cannot read",
                path: file.display().to_string(),
                source,
            })?;
            let mut spec = hf::from_config_json(&text).map_err(trainyard_model::ModelError::from)?.spec;
            spec.dropout = resolved.config.model.dropout;
            Ok(spec)
        }
    }
}

fn from_shape(shape: &ConfigShape) -> Result<ModelSpec> {
    let vocab_size = shape
        .vocab_size
        .ok_or_else(|| does_not_fit("the vocabulary is not known yet: set model.vocab_size or give a tokenizer"))?;
    let gpt2 = shape.family == ConfigFamily::Gpt2;
    Ok(ModelSpec {
        family: if gpt2 { Family::Gpt2 } else { Family::Llama },
        vocab_size,
        dim: shape.dim,
        layers: shape.layers,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        ffn_dim: shape.ffn_dim,
        max_positions: shape.max_sequence_length,
        activation: match shape.activation {
            ConfigActivation::Silu => Activation::Silu,
            ConfigActivation::Gelu => Activation::Gelu,
            ConfigActivation::GeluTanh => Activation::GeluTanh,
            ConfigActivation::Relu => Activation::Relu,
        },
        norm_eps: shape.norm_eps,
        norm_bias: gpt2 && (shape.qkv_bias || shape.output_bias || shape.mlp_bias),
        qkv_bias: shape.qkv_bias,
        o_bias: shape.output_bias,
        mlp_bias: shape.mlp_bias,
        qk_norm: shape.qk_norm,
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
        sliding_layers: None,
        dropout: shape.dropout,
        init_std: shape.init_std,
        bos_token: None,
        eos_tokens: Vec::new(),
        pad_token: None,
    })
}

/// The dtype of forward and backward.
pub fn compute_dtype(resolved: &Resolved) -> DType {
    use crate::config::Compute;
    match resolved.config.precision.compute {
        Compute::F32 => DType::F32,
        Compute::Bf16 => DType::BF16,
        Compute::F16 => DType::F16,
    }
}

/// What each unit keeps for backward. The mode and its overrides are for blocks; the embedding has nothing to recompute, and
/// the head's backward follows at once.
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

/// The model in the words of the lowering, with the bytes that each unit keeps under each policy.
pub fn model_shape(model: &Model, batch: &BatchShape, dtype: DType) -> Result<ModelShape> {
    let everything = unit_costs(model, batch, dtype, Policy::Everything)?;
    let selective = unit_costs(model, batch, dtype, Policy::Selective)?;
    let input_only = unit_costs(model, batch, dtype, Policy::Nothing)?;
    let units = model.units().iter().enumerate().map(|(index, unit)| {
        let mut borrows: Vec<u32> = unit.borrowed().iter().map(|id| id.unit).collect();
        borrows.dedup();
        UnitShape {
            name: unit.name().to_owned(),
            flat_elements: UnitLayout::new(unit.parameters(), 1).elements() as u64,
            borrows,
            saved_bytes: [&everything, &selective, &input_only].map(|costs| costs[index].saved_bytes as u64),
            ..UnitShape::default()
        }
    });
    // Tokens, targets and positions, four bytes each.
    let batch_bytes = 12 * batch.tokens() as u64;
    Ok(ModelShape { units: units.collect(), batch_bytes })
}

/// The checked programs of a step: without and with a snapshot at its end.
pub fn programs(shape: &ModelShape, accumulation_steps: u32, keep: &[Keep], compute: DType) -> Result<[Program; 2]> {
    let bytes = if compute == DType::F32 { StateBytes::F32 } else { StateBytes::MIXED };
    let program = |snapshot| -> Result<Program> {
        let strategy =
            Strategy { accumulation_steps, keep: keep.to_vec(), snapshot, bytes, ..Strategy::new(keep.len()) };
        let program = lower_rank(shape, &Mesh::default(), &strategy, 0)?;
        check(&program)?;
        Ok(program)
    };
    Ok([program(false)?, program(true)?])
}
