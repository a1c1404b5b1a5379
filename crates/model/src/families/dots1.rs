//! The experts of DeepSeek-V3 (DeepSeek-AI 2024) behind plain attention, as dots.llm1 has them:
//! sigmoid gates, shared experts, MLPs in the first layers, and a bias for each expert that
//! balances them without an auxiliary loss. Its attention is Qwen3's.

use super::llama::{self, FORM};
use super::{Class, DOTS1, Definition, Form, Row, Sizes, row};
use super::{mixtral, qwen3_moe};
use crate::Result;
use crate::hf::{ConfigError, Keys, Written};
use crate::spec::{ExpertsSpec, Gate, ModelSpec};
use crate::split::Cut;
use serde_json::{Value, json};

/// The definition of the family.
pub(super) struct Dots1;

const CLASS: Class = Class { model_type: "dots1", architecture: "Dots1ForCausalLM" };

const SHARED: &[&str] =
    &["model.layers.{}.mlp.shared_experts.gate_proj.weight", "model.layers.{}.mlp.shared_experts.up_proj.weight"];

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
    row("mlp.router.bias", Cut::Choices, &["model.layers.{}.mlp.gate.e_score_correction_bias"]),
    row("mlp.experts.up.weight", Cut::ExpertsUpRows, qwen3_moe::UP),
    row("mlp.experts.down.weight", Cut::ExpertsDownColumns, qwen3_moe::DOWN),
    row("mlp.shared.up.weight", Cut::SharedUpRows, SHARED),
    row("mlp.shared.down.weight", Cut::SharedDownColumns, &["model.layers.{}.mlp.shared_experts.down_proj.weight"]),
    row("norm.weight", Cut::Residual, &["model.norm.weight"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

impl Definition for Dots1 {
    fn name(&self) -> &'static str {
        "dots1"
    }

    fn title(&self) -> &'static str {
        "dots.llm1"
    }

    fn about(&self) -> &'static str {
        "Experts as in DeepSeek-V3 (sigmoid gates, shared experts, a balancing bias) behind plain attention: dots.llm1."
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
        let ffn_dim = (usual.ffn_dim / 4).max(1);
        let experts = ExpertsSpec {
            shared_ffn_dim: ffn_dim,
            gate: Gate::Sigmoid,
            selection_bias: true,
            auxiliary_loss: 0.0,
            bias_update_rate: 0.001,
            ..ExpertsSpec::softmax(16, 3, ffn_dim)
        };
        ModelSpec { family: DOTS1, qk_norm: true, norm_eps: 1e-6, experts: Some(experts), ..usual }
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        mixtral::validate(spec)
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let usual = Sizes { vocab_size: 152_064, dim: 4608, layers: 62, heads: 32, max_positions: 2048 };
        let sizes = keys.sizes(usual)?;
        let ffn_dim = keys.size("intermediate_size", Some(10944))?;
        let mut spec = ModelSpec { ffn_dim, ..self.usual(&sizes) };
        keys.grouped_heads(&mut spec)?;
        spec.activation = keys.activation("hidden_act", "silu")?;
        keys.decoder(&mut spec, 1e-6, false)?;
        let biases = keys.flag("attention_bias")?.unwrap_or(false);
        (spec.qkv_bias, spec.o_bias) = (biases, biases);
        // The window is in the layers from max_window_layers on, of which there are usually none.
        let window = keys.optional_size("sliding_window")?;
        let first = keys.whole_number("max_window_layers")?.unwrap_or(62);
        let sliding =
            keys.sliding_layers(spec.layers)?.unwrap_or_else(|| (first.min(spec.layers)..spec.layers).collect());
        if let Some(window) = window.filter(|_| !sliding.is_empty()) {
            spec.sliding_window = Some(window);
            spec.sliding_layers = (sliding.len() < spec.layers).then_some(sliding);
        }
        spec.rope = Some(keys.rope(sizes.max_positions)?);
        for key in ["n_group", "topk_group"] {
            keys.refuse(key, &[json!(1)], "experts in groups are not available")?;
        }
        let Some(experts) = &mut spec.experts else { return Ok(spec) };
        let dense = keys.whole_number("first_k_dense_replace")?.unwrap_or(0);
        experts.dense_layers = (0..dense.min(spec.layers)).collect();
        experts.experts = keys.size("n_routed_experts", None)?;
        experts.top_k = keys.size("num_experts_per_tok", None)?;
        experts.ffn_dim = keys.size("moe_intermediate_size", Some(1408))?;
        experts.shared_ffn_dim = keys.whole_number("n_shared_experts")?.unwrap_or(0) * experts.ffn_dim;
        experts.normalise = keys.flag("norm_topk_prob")?.unwrap_or(false);
        experts.scale = keys.number("routed_scaling_factor")?.unwrap_or(1.0);
        keys.take("output_router_logits");
        keys.attention_dropout("attention_dropout", 0.0)?;
        Ok(spec)
    }

    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
        let Some(experts) = &spec.experts else { return no("dots.llm1 without experts") };
        if experts.gate != Gate::Sigmoid || !experts.selection_bias {
            return no("dots.llm1 with another gate, or without the router's bias");
        }
        if experts.shared_ffn_dim == 0 || !experts.shared_ffn_dim.is_multiple_of(experts.ffn_dim) {
            return no("dots.llm1 whose shared experts are not as wide as one or several experts");
        }
        if experts.dense_layers.iter().enumerate().any(|(first, layer)| first != *layer) {
            return no("dots.llm1 with an MLP in other layers than the first");
        }
        if !spec.qk_norm || spec.rotary_dim() != spec.head_dim || spec.qkv_bias != spec.o_bias {
            return no("dots.llm1 without query/key norms, with some biases only, or part of a head rotated");
        }
        Ok(vec![CLASS])
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        keys.decoder(spec);
        keys.set("attention_bias", json!(spec.qkv_bias));
        keys.set("sliding_window", json!(spec.sliding_window));
        keys.layer_types(spec);
        keys.set("max_window_layers", json!(spec.layers));
        if let Some(experts) = &spec.experts {
            keys.set("first_k_dense_replace", json!(experts.dense_layers.len()));
            keys.set("moe_intermediate_size", json!(experts.ffn_dim));
            keys.set("n_routed_experts", json!(experts.experts));
            keys.set("n_shared_experts", json!(experts.shared_ffn_dim / experts.ffn_dim.max(1)));
            keys.set("num_experts_per_tok", json!(experts.top_k));
            keys.set("norm_topk_prob", json!(experts.normalise));
            keys.set("routed_scaling_factor", json!(experts.scale));
            keys.set("n_group", json!(1));
            keys.set("topk_group", json!(1));
            keys.set("output_router_logits", Value::Bool(false));
        }
        keys.rope(spec.rope.as_ref());
    }
}
