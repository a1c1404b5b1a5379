//! Gemma 3, text only (Gemma Team 2025): Llama's block with a norm before and after each half,
//! norms of query and key heads, gains of `1 + w`, GeGLU, and an embedding that is scaled by
//! `sqrt(dim)`. Five of six layers see a window and rotate with a short base.

use super::llama::{self, FORM};
use super::{Class, Definition, EmbeddingScale, Form, GEMMA3, Gains, NormPlaces, Row, Sizes, refuse, row};
use crate::Result;
use crate::gguf::{self, Layout};
use crate::hf::{ConfigError, Keys, Written};
use crate::spec::{Activation, LAYERS_MAX, ModelSpec, RopeSpec};
use crate::split::Cut;
use serde_json::{Map, Value, json};

/// The definition of the family.
pub(super) struct Gemma3;

const CLASS: Class = Class { model_type: "gemma3_text", architecture: "Gemma3ForCausalLM" };

/// Every sixth layer sees everything before.
const PATTERN: usize = 6;
/// Bases of the rotations of layers that see everything and of those with a window.
const THETAS: [f64; 2] = [1_000_000.0, 10_000.0];

const PARAMETERS: &[Row] = &[
    row("tokens.weight", Cut::VocabularyRows, &["model.embed_tokens.weight"]),
    row("norm1.weight", Cut::Residual, &["model.layers.{}.input_layernorm.weight"]),
    row("attn.qkv.weight", Cut::HeadRows, llama::QKV_WEIGHT),
    row("attn.qkv.bias", Cut::HeadRows, llama::QKV_BIAS),
    row("attn.q_norm.weight", Cut::EachHead, &["model.layers.{}.self_attn.q_norm.weight"]),
    row("attn.k_norm.weight", Cut::EachHead, &["model.layers.{}.self_attn.k_norm.weight"]),
    row("attn.out.weight", Cut::HeadColumns, &["model.layers.{}.self_attn.o_proj.weight"]),
    row("attn.out.bias", Cut::Residual, &["model.layers.{}.self_attn.o_proj.bias"]),
    row("post_norm1.weight", Cut::Residual, &["model.layers.{}.post_attention_layernorm.weight"]),
    row("norm2.weight", Cut::Residual, &["model.layers.{}.pre_feedforward_layernorm.weight"]),
    row("mlp.up.weight", Cut::GateUpRows, llama::UP_WEIGHT),
    row("mlp.down.weight", Cut::FfnColumns, &["model.layers.{}.mlp.down_proj.weight"]),
    row("post_norm2.weight", Cut::Residual, &["model.layers.{}.post_feedforward_layernorm.weight"]),
    row("norm.weight", Cut::Residual, &["model.norm.weight"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

const GGUF: &[gguf::Form] = &[gguf::Form {
    architecture: "gemma3",
    model_type: "gemma3_text",
    keys: &[
        ("context_length", "max_position_embeddings"),
        ("block_count", "num_hidden_layers"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("attention.sliding_window", "sliding_window"),
        ("attention.sliding_window_pattern", "sliding_window_pattern"),
        ("rope.freq_base", "rope_theta"),
        ("rope.freq_base_swa", "rope_local_base_freq"),
    ],
    tensors: &[
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("output", "lm_head"),
        ("blk.{}.attn_norm", "model.layers.{}.input_layernorm"),
        ("blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"),
        ("blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"),
        ("blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"),
        ("blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm"),
        ("blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm"),
        ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"),
        ("blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm"),
        ("blk.{}.ffn_norm", "model.layers.{}.pre_feedforward_layernorm"),
        ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"),
        ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"),
        ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
        ("blk.{}.post_ffw_norm", "model.layers.{}.post_feedforward_layernorm"),
    ],
    biases: gguf::DECODER_BIASES,
    layout: Layout::GainsOfNorms,
    complete: scale_of_scores,
}];

/// The scale of scores, which stands in no key. llama.cpp knows it by the number of layers: the
/// model of 27 B, with 62, has the width of its stream over its heads, all others that of a head.
fn scale_of_scores(config: &mut Map<String, Value>) {
    let number = |key: &str| config.get(key).and_then(Value::as_u64);
    let of_largest = number("hidden_size").zip(number("num_attention_heads")).map(|(dim, heads)| dim / heads.max(1));
    let scalar = if number("num_hidden_layers") == Some(62) { of_largest } else { number("head_dim") };
    config.extend(scalar.map(|scalar| ("query_pre_attn_scalar".to_owned(), json!(scalar))));
}

/// The layers with a window: all but every `pattern`-th. More layers than any model has are refused
/// elsewhere.
fn sliding(layers: usize, pattern: usize) -> Vec<usize> {
    (0..layers.min(LAYERS_MAX)).filter(|layer| !(layer + 1).is_multiple_of(pattern)).collect()
}

impl Definition for Gemma3 {
    fn name(&self) -> &'static str {
        "gemma3"
    }

    fn title(&self) -> &'static str {
        "Gemma 3"
    }

    fn about(&self) -> &'static str {
        "RMSNorm before and after each half, GeGLU, windows in five of six layers: Gemma 3, text only."
    }

    fn classes(&self) -> &'static [Class] {
        &[CLASS]
    }

    fn parameters(&self) -> &'static [Row] {
        PARAMETERS
    }

    fn form(&self) -> Form {
        Form { gains: Gains::OnePlusWeight, norms: NormPlaces::Both, embedding: EmbeddingScale::SqrtDim, ..FORM }
    }

    fn gguf(&self) -> &'static [gguf::Form] {
        GGUF
    }

    fn usual(&self, sizes: &Sizes) -> ModelSpec {
        let rope = |theta| Some(RopeSpec { theta, partial_factor: 1.0, scaling: None });
        ModelSpec {
            family: GEMMA3,
            activation: Activation::GeluTanh,
            norm_eps: 1e-6,
            qk_norm: true,
            tie_embeddings: true,
            rope: rope(THETAS[0]),
            local_rope: rope(THETAS[1]),
            sliding_window: Some(512),
            sliding_layers: Some(sliding(sizes.layers, PATTERN)),
            ..llama::usual(sizes)
        }
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        if !spec.qk_norm {
            return refuse("qk_norm", "family gemma3 normalises queries and keys");
        }
        if spec.activation != Activation::GeluTanh {
            return refuse("activation", "family gemma3 gates with gelu_tanh");
        }
        if spec.mlp_bias {
            return refuse("mlp_bias", "family gemma3 has none");
        }
        llama::validate(spec)
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let usual = Sizes { vocab_size: 262_208, dim: 2304, layers: 26, heads: 8, max_positions: 131_072 };
        let sizes = keys.sizes(usual)?;
        let mut spec = ModelSpec { ffn_dim: keys.size("intermediate_size", Some(9216))?, ..self.usual(&sizes) };
        spec.kv_heads = keys.size("num_key_value_heads", Some(4))?;
        spec.head_dim = keys.size("head_dim", Some(256))?;
        spec.activation = keys.activation("hidden_activation", "gelu_pytorch_tanh")?;
        keys.decoder(&mut spec, 1e-6, true)?;
        let biases = keys.flag("attention_bias")?.unwrap_or(false);
        (spec.qkv_bias, spec.o_bias) = (biases, biases);
        let scalar = keys.number("query_pre_attn_scalar")?.unwrap_or(256.0);
        spec.attention_scalar = (scalar != spec.head_dim as f64).then_some(scalar);
        keys.refuse("final_logit_softcapping", &[], "logits are not capped")?;
        keys.refuse("attn_logit_softcapping", &[], "scores are not capped")?;
        keys.refuse("use_bidirectional_attention", &[Value::Bool(false)], "attention is causal")?;
        let window = if keys.absent("sliding_window") { Some(4096) } else { keys.optional_size("sliding_window")? };
        // The number of layers from one that sees everything to the next; transformers 5 writes
        // only what follows from it.
        let mut pattern = PATTERN;
        for key in ["sliding_window_pattern", "_sliding_window_pattern"] {
            pattern = keys.optional_size(key)?.unwrap_or(pattern);
        }
        let layers = keys.sliding_layers(spec.layers)?.unwrap_or_else(|| sliding(spec.layers, pattern));
        spec.sliding_window = window.filter(|_| !layers.is_empty());
        spec.sliding_layers = spec.sliding_window.and((layers.len() < spec.layers).then_some(layers));
        let [full, local] = keys.layered_rope(spec.max_positions, THETAS)?;
        (spec.rope, spec.local_rope) = (Some(full), Some(local));
        keys.attention_dropout("attention_dropout", 0.0)?;
        Ok(spec)
    }

    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
        if spec.qkv_bias != spec.o_bias {
            return no("Gemma 3 blocks with biases on some projections of attention");
        }
        if spec.rotary_dim() != spec.head_dim {
            return no("Gemma 3 blocks that rotate part of a head");
        }
        if !spec.dim.is_multiple_of(spec.heads) {
            return no("Gemma 3 blocks whose heads do not divide dim");
        }
        Ok(vec![CLASS])
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        keys.decoder(spec);
        keys.set("hidden_activation", json!("gelu_pytorch_tanh"));
        keys.set("attention_bias", json!(spec.qkv_bias));
        let scalar = spec.attention_scalar.unwrap_or(spec.head_dim as f64);
        // The class takes whole numbers as such only.
        keys.set("query_pre_attn_scalar", if scalar.fract() == 0.0 { json!(scalar as u64) } else { json!(scalar) });
        keys.set("final_logit_softcapping", Value::Null);
        keys.set("attn_logit_softcapping", Value::Null);
        keys.set("sliding_window", json!(spec.sliding_window));
        keys.layer_types(spec);
        keys.layered_rope(spec.rope.as_ref(), spec.local_rope.as_ref().or(spec.rope.as_ref()));
    }
}
