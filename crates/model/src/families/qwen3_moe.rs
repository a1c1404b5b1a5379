//! Qwen3-MoE (Qwen team 2025): Qwen3's blocks with many small experts. Some layers may have an MLP.

use super::llama::{self, FORM};
use super::mixtral;
use super::{Class, Definition, Form, QWEN3_MOE, Row, Sizes, row};
use crate::Result;
use crate::hf::{ConfigError, Keys, Written};
use crate::spec::{ExpertsSpec, Gate, ModelSpec};
use crate::split::Cut;
use serde_json::{Value, json};

/// The definition of the family.
pub(super) struct Qwen3Moe;

const CLASS: Class = Class { model_type: "qwen3_moe", architecture: "Qwen3MoeForCausalLM" };

pub(super) const UP: &[&str] =
    &["model.layers.{}.mlp.experts.{e}.gate_proj.weight", "model.layers.{}.mlp.experts.{e}.up_proj.weight"];
pub(super) const DOWN: &[&str] = &["model.layers.{}.mlp.experts.{e}.down_proj.weight"];

const PARAMETERS: &[Row] = &[
    row("tokens.weight", Cut::VocabularyRows, &["model.embed_tokens.weight"]),
    row("norm1.weight", Cut::Residual, &["model.layers.{}.input_layernorm.weight"]),
    row("attn.qkv.weight", Cut::HeadRows, llama::QKV_WEIGHT),
    row("attn.qkv.bias", Cut::HeadRows, llama::QKV_BIAS),
    row("attn.q_norm.weight", Cut::EachHead, &["model.layers.{}.self_attn.q_norm.weight"]),
    row("attn.k_norm.weight", Cut::EachHead, &["model.layers.{}.self_attn.k_norm.weight"]),
    row("attn.out.weight", Cut::HeadColumns, &["model.layers.{}.self_attn.o_proj.weight"]),
    row("norm2.weight", Cut::Residual, &["model.layers.{}.post_attention_layernorm.weight"]),
    row("attn.out.bias", Cut::Residual, &["model.layers.{}.self_attn.o_proj.bias"]),
    row("mlp.up.weight", Cut::GateUpRows, llama::UP_WEIGHT),
    row("mlp.down.weight", Cut::FfnColumns, &["model.layers.{}.mlp.down_proj.weight"]),
    row("mlp.router.weight", Cut::Router, &["model.layers.{}.mlp.gate.weight"]),
    row("mlp.experts.up.weight", Cut::ExpertsUpRows, UP),
    row("mlp.experts.down.weight", Cut::ExpertsDownColumns, DOWN),
    row("norm.weight", Cut::Residual, &["model.norm.weight"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

impl Definition for Qwen3Moe {
    fn name(&self) -> &'static str {
        "qwen3_moe"
    }

    fn title(&self) -> &'static str {
        "Qwen3-MoE"
    }

    fn about(&self) -> &'static str {
        "Qwen3's blocks with many small experts: Qwen3-MoE."
    }

    fn classes(&self) -> &'static [Class] {
        &[CLASS]
    }

    fn parameters(&self) -> &'static [Row] {
        PARAMETERS
    }

    fn form(&self) -> Form {
        FORM
    }

    fn usual(&self, sizes: &Sizes) -> ModelSpec {
        let usual = llama::usual(sizes);
        let experts = ExpertsSpec::softmax(8, 2, (usual.ffn_dim / 2).max(1));
        ModelSpec { family: QWEN3_MOE, qk_norm: true, norm_eps: 1e-6, experts: Some(experts), ..usual }
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        mixtral::validate(spec)
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let usual = Sizes { vocab_size: 151_936, dim: 2048, layers: 24, heads: 32, max_positions: 32_768 };
        let sizes = keys.sizes(usual)?;
        let ffn_dim = keys.size("intermediate_size", Some(6144))?;
        let mut spec = ModelSpec { ffn_dim, ..self.usual(&sizes) };
        keys.default("num_key_value_heads", json!(4));
        keys.grouped_heads(&mut spec)?;
        spec.activation = keys.activation("hidden_act", "silu")?;
        keys.decoder(&mut spec, 1e-6, false)?;
        let biases = keys.flag("attention_bias")?.unwrap_or(false);
        (spec.qkv_bias, spec.o_bias) = (biases, biases);
        let window = keys.optional_size("sliding_window")?;
        spec.sliding_window = window.filter(|_| matches!(keys.flag("use_sliding_window"), Ok(Some(true))));
        keys.take("max_window_layers");
        spec.rope = Some(keys.rope(sizes.max_positions)?);
        let step = keys.size("decoder_sparse_step", Some(1))?;
        let only = keys.whole_numbers("mlp_only_layers")?;
        let Some(experts) = &mut spec.experts else { return Ok(spec) };
        experts.dense_layers = (0..spec.layers).filter(|n| only.contains(n) || !(n + 1).is_multiple_of(step)).collect();
        experts.experts =
            keys.optional_size("num_local_experts")?.map_or_else(|| keys.size("num_experts", Some(128)), Ok)?;
        experts.top_k = keys.size("num_experts_per_tok", Some(8))?;
        experts.ffn_dim = keys.size("moe_intermediate_size", Some(768))?;
        experts.normalise = keys.flag("norm_topk_prob")?.unwrap_or(false);
        experts.auxiliary_loss = keys.number("router_aux_loss_coef")?.unwrap_or(0.001);
        keys.take("output_router_logits");
        keys.attention_dropout("attention_dropout", 0.0)?;
        Ok(spec)
    }

    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
        mixtral::no_bias(spec)?;
        let Some(experts) = &spec.experts else { return no("Qwen3-MoE without experts") };
        if experts.gate != Gate::Softmax || experts.scale != 1.0 || experts.shared_ffn_dim > 0 {
            return no("Qwen3-MoE with another gate, a factor of its weights, or shared experts");
        }
        if !spec.qk_norm || spec.rotary_dim() != spec.head_dim || spec.qkv_bias != spec.o_bias {
            return no("Qwen3-MoE without query/key norms, with some biases only, or part of a head rotated");
        }
        if spec.sliding_layers.is_some() {
            return no("Qwen3-MoE with windows in some layers");
        }
        Ok(vec![CLASS])
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        keys.decoder(spec);
        keys.set("attention_bias", json!(spec.qkv_bias));
        keys.set("use_sliding_window", json!(spec.sliding_window.is_some()));
        keys.set("sliding_window", json!(spec.sliding_window));
        if let Some(experts) = &spec.experts {
            keys.set("decoder_sparse_step", json!(1));
            keys.set("mlp_only_layers", json!(experts.dense_layers));
            keys.set("moe_intermediate_size", json!(experts.ffn_dim));
            keys.set("num_experts", json!(experts.experts));
            keys.set("num_experts_per_tok", json!(experts.top_k));
            keys.set("norm_topk_prob", json!(experts.normalise));
            keys.set("router_aux_loss_coef", json!(experts.auxiliary_loss));
            keys.set("output_router_logits", Value::Bool(false));
        }
        keys.rope(spec.rope.as_ref());
    }
}
