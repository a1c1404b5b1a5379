//! OLMo 2 (Team OLMo 2024): Llama's block with its norms after the halves instead of before them,
//! and norms of queries and keys over the whole projection.

use super::llama::{self, FORM};
use super::{Class, Definition, Form, NormPlaces, OLMO2, QkNormKind, Row, Sizes, refuse, row};
use crate::Result;
use crate::gguf::{self, Layout};
use crate::hf::{ConfigError, Keys, Written};
use crate::spec::{Activation, ModelSpec, RopeSpec};
use crate::split::Cut;
use serde_json::json;

/// The definition of the family.
pub(super) struct Olmo2;

const CLASS: Class = Class { model_type: "olmo2", architecture: "Olmo2ForCausalLM" };

const PARAMETERS: &[Row] = &[
    row("tokens.weight", Cut::VocabularyRows, &["model.embed_tokens.weight"]),
    row("attn.qkv.weight", Cut::HeadRows, llama::QKV_WEIGHT),
    row("attn.qkv.bias", Cut::HeadRows, llama::QKV_BIAS),
    row("attn.q_norm.weight", Cut::AllHeads, &["model.layers.{}.self_attn.q_norm.weight"]),
    row("attn.k_norm.weight", Cut::AllHeads, &["model.layers.{}.self_attn.k_norm.weight"]),
    row("attn.out.weight", Cut::HeadColumns, &["model.layers.{}.self_attn.o_proj.weight"]),
    row("attn.out.bias", Cut::Residual, &["model.layers.{}.self_attn.o_proj.bias"]),
    row("post_norm1.weight", Cut::Residual, &["model.layers.{}.post_attention_layernorm.weight"]),
    row("mlp.up.weight", Cut::GateUpRows, llama::UP_WEIGHT),
    row("mlp.down.weight", Cut::FfnColumns, &["model.layers.{}.mlp.down_proj.weight"]),
    row("post_norm2.weight", Cut::Residual, &["model.layers.{}.post_feedforward_layernorm.weight"]),
    row("norm.weight", Cut::Residual, &["model.norm.weight"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

const GGUF: &[gguf::Form] = &[gguf::Form {
    architecture: "olmo2",
    model_type: "olmo2",
    keys: gguf::DECODER_KEYS,
    tensors: &[
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("output", "lm_head"),
        ("blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"),
        ("blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"),
        ("blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"),
        ("blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm"),
        ("blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm"),
        ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"),
        ("blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm"),
        ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"),
        ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"),
        ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
        ("blk.{}.post_ffw_norm", "model.layers.{}.post_feedforward_layernorm"),
    ],
    biases: gguf::DECODER_BIASES,
    layout: Layout::Same,
    complete: gguf::complete,
}];

impl Definition for Olmo2 {
    fn name(&self) -> &'static str {
        "olmo2"
    }

    fn title(&self) -> &'static str {
        "OLMo 2"
    }

    fn about(&self) -> &'static str {
        "RMSNorm after each half, norms of whole queries and keys, gated MLP: OLMo 2."
    }

    fn classes(&self) -> &'static [Class] {
        &[CLASS]
    }

    fn parameters(&self) -> &'static [Row] {
        PARAMETERS
    }

    fn form(&self) -> Form {
        Form { norms: NormPlaces::After, qk_norm: QkNormKind::Whole, ..FORM }
    }

    fn gguf(&self) -> &'static [gguf::Form] {
        GGUF
    }

    fn usual(&self, sizes: &Sizes) -> ModelSpec {
        let rope = Some(RopeSpec { theta: 500_000.0, partial_factor: 1.0, scaling: None });
        ModelSpec { family: OLMO2, norm_eps: 1e-6, qk_norm: true, rope, ..llama::usual(sizes) }
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        if !spec.qk_norm {
            return refuse("qk_norm", "family olmo2 normalises queries and keys");
        }
        if spec.activation != Activation::Silu {
            return refuse("activation", "family olmo2 gates with silu");
        }
        if spec.mlp_bias {
            return refuse("mlp_bias", "family olmo2 has none");
        }
        llama::validate(spec)
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let usual = Sizes { vocab_size: 50_304, dim: 4096, layers: 32, heads: 32, max_positions: 2048 };
        let sizes = keys.sizes(usual)?;
        let mut spec = ModelSpec { ffn_dim: keys.size("intermediate_size", Some(11_008))?, ..self.usual(&sizes) };
        keys.grouped_heads(&mut spec)?;
        spec.activation = keys.activation("hidden_act", "silu")?;
        keys.decoder(&mut spec, 1e-5, false)?;
        let biases = keys.flag("attention_bias")?.unwrap_or(false);
        (spec.qkv_bias, spec.o_bias) = (biases, biases);
        spec.rope = Some(keys.rope(sizes.max_positions)?);
        keys.attention_dropout("attention_dropout", 0.0)?;
        Ok(spec)
    }

    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
        if spec.qkv_bias != spec.o_bias {
            return no("OLMo 2 blocks with biases on some projections of attention");
        }
        if spec.rotary_dim() != spec.head_dim {
            return no("OLMo 2 blocks that rotate part of a head");
        }
        if spec.sliding_window.is_some() {
            return no("OLMo 2 blocks with a sliding window");
        }
        Ok(vec![CLASS])
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        keys.decoder(spec);
        keys.activation(spec);
        keys.set("attention_bias", json!(spec.qkv_bias));
        keys.rope(spec.rope.as_ref());
    }
}
