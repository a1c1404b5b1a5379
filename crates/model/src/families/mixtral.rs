//! Mixtral (Jiang et al. 2024): Llama's blocks, in which each token goes to the best two of eight
//! MLPs, weighted by a softmax over the two.

use super::llama::{self, FORM};
use super::{Class, Definition, Family, Form, MIXTRAL, Row, Sizes, refuse, row};
use crate::Result;
use crate::hf::{ConfigError, Keys, Written};
use crate::spec::{Activation, ExpertsSpec, Gate, ModelSpec};
use crate::split::Cut;
use serde_json::{Value, json};

/// The definition of the family.
pub(super) struct Mixtral;

const CLASS: Class = Class { model_type: "mixtral", architecture: "MixtralForCausalLM" };

const UP: &[&str] = &[
    "model.layers.{}.block_sparse_moe.experts.{e}.w1.weight",
    "model.layers.{}.block_sparse_moe.experts.{e}.w3.weight",
];
const DOWN: &[&str] = &["model.layers.{}.block_sparse_moe.experts.{e}.w2.weight"];

const PARAMETERS: &[Row] = &[
    row("tokens.weight", Cut::VocabularyRows, &["model.embed_tokens.weight"]),
    row("norm1.weight", Cut::Residual, &["model.layers.{}.input_layernorm.weight"]),
    row("attn.qkv.weight", Cut::HeadRows, llama::QKV_WEIGHT),
    row("attn.out.weight", Cut::HeadColumns, &["model.layers.{}.self_attn.o_proj.weight"]),
    row("norm2.weight", Cut::Residual, &["model.layers.{}.post_attention_layernorm.weight"]),
    row("mlp.router.weight", Cut::Router, &["model.layers.{}.block_sparse_moe.gate.weight"]),
    row("mlp.experts.up.weight", Cut::ExpertsUpRows, UP),
    row("mlp.experts.down.weight", Cut::ExpertsDownColumns, DOWN),
    row("norm.weight", Cut::Residual, &["model.norm.weight"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

/// Checks what relatives of Llama with experts demand.
pub(super) fn validate(spec: &ModelSpec) -> Result<()> {
    let family: Family = spec.family;
    if spec.activation != Activation::Silu {
        return refuse("activation", format!("family {family} gates with silu"));
    }
    if spec.experts.is_none() {
        return refuse("experts", format!("family {family} is made of experts: give [model.experts]"));
    }
    if spec.mlp_bias {
        return refuse("mlp_bias", format!("experts of family {family} have no biases"));
    }
    llama::validate(spec)
}

/// The reason why files cannot hold a router's bias, if there is one.
pub(super) fn no_bias(spec: &ModelSpec) -> std::result::Result<(), ConfigError> {
    let bias = spec.experts.as_ref().is_some_and(|experts| experts.selection_bias);
    let why = || ConfigError::NoEquivalent("a bias of the router (only dots1 has one)".into());
    if bias { Err(why()) } else { Ok(()) }
}

impl Definition for Mixtral {
    fn name(&self) -> &'static str {
        "mixtral"
    }

    fn title(&self) -> &'static str {
        "Mixtral"
    }

    fn about(&self) -> &'static str {
        "Llama's blocks with experts in the place of the MLP: Mixtral."
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
        let experts = ExpertsSpec::softmax(8, 2, usual.ffn_dim);
        ModelSpec { family: MIXTRAL, experts: Some(experts), ..usual }
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        validate(spec)
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let usual = Sizes { vocab_size: 32_000, dim: 4096, layers: 32, heads: 32, max_positions: 131_072 };
        let sizes = keys.sizes(usual)?;
        let ffn_dim = keys.size("intermediate_size", Some(14336))?;
        let mut spec = ModelSpec { ffn_dim, ..self.usual(&sizes) };
        keys.default("num_key_value_heads", json!(8));
        keys.grouped_heads(&mut spec)?;
        spec.activation = keys.activation("hidden_act", "silu")?;
        keys.decoder(&mut spec, 1e-5, false)?;
        spec.sliding_window = keys.optional_size("sliding_window")?;
        spec.rope = Some(keys.rope(sizes.max_positions)?);
        let Some(experts) = &mut spec.experts else { return Ok(spec) };
        experts.ffn_dim = ffn_dim;
        experts.experts = keys.size("num_local_experts", Some(8))?;
        experts.top_k = keys.size("num_experts_per_tok", Some(2))?;
        experts.auxiliary_loss = keys.number("router_aux_loss_coef")?.unwrap_or(0.001);
        keys.refuse("router_jitter_noise", &[json!(0.0), json!(0)], "noise in the router is not available")?;
        keys.take("output_router_logits");
        keys.attention_dropout("attention_dropout", 0.0)?;
        Ok(spec)
    }

    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
        no_bias(spec)?;
        let Some(experts) = &spec.experts else { return no("Mixtral without experts") };
        let plain = experts.gate == Gate::Softmax && experts.normalise && experts.scale == 1.0;
        if !plain || experts.shared_ffn_dim > 0 || !experts.dense_layers.is_empty() {
            return no("Mixtral with another gate, shared experts or layers with an MLP");
        }
        let ordinary = !spec.qk_norm && !spec.qkv_bias && !spec.o_bias && spec.rotary_dim() == spec.head_dim;
        if !ordinary || spec.sliding_layers.is_some() {
            return no("Mixtral with biases, query/key norms, part of a head rotated, or windows in some layers");
        }
        Ok(vec![CLASS])
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        keys.decoder(spec);
        keys.set("sliding_window", json!(spec.sliding_window));
        if let Some(experts) = &spec.experts {
            keys.set("intermediate_size", json!(experts.ffn_dim));
            keys.set("num_local_experts", json!(experts.experts));
            keys.set("num_experts_per_tok", json!(experts.top_k));
            keys.set("router_aux_loss_coef", json!(experts.auxiliary_loss));
            keys.set("router_jitter_noise", json!(0.0));
            keys.set("output_router_logits", Value::Bool(false));
        }
        keys.rope(spec.rope.as_ref());
    }
}
