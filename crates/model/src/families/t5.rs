//! T5 (Raffel et al. 2020): an encoder and a decoder of pre-norm blocks without biases, RMSNorm,
//! numbers by distance added to scores, which are not divided by the root of the width of heads.
//! Version 1.0 has an MLP of two products with ReLU and a tied head; 1.1 a gated one with GELU and
//! a head of its own.

use super::llama::FORM;
use super::{
    AttentionKind, Class, Definition, Form, HeadsKind, Input, MlpKind, Positions, Row, Share, Sizes, T5 as FAMILY,
    refuse, row, transposed,
};
use crate::hf::{ConfigError, Keys, Written};
use crate::rope::RopeTables;
use crate::spec::{Activation, EncoderSpec, ModelSpec};
use crate::split::Cut;
use crate::unit::Unit;
use crate::units::SideBlock;
use crate::{ModelError, Result};
use serde_json::json;
use std::sync::Arc;

/// The definition of the family.
pub(super) struct T5;

const CLASS: Class = Class { model_type: "t5", architecture: "T5ForConditionalGeneration" };

/// More positions than anyone has trained on: the blocks set no bound.
const POSITIONS: usize = 1 << 15;

const PARAMETERS: &[Row] = &[
    row("tokens.weight", Cut::VocabularyRows, &["shared.weight"]),
    transposed(
        "encoder_bias.weight",
        Cut::EachHead,
        &["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
    ),
    transposed(
        "decoder_bias.weight",
        Cut::EachHead,
        &["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
    ),
    row("norm1.weight", Cut::Residual, &["encoder.block.{}.layer.0.layer_norm.weight"]),
    row(
        "attn.qkv.weight",
        Cut::HeadRows,
        &[
            "encoder.block.{}.layer.0.SelfAttention.q.weight",
            "encoder.block.{}.layer.0.SelfAttention.k.weight",
            "encoder.block.{}.layer.0.SelfAttention.v.weight",
        ],
    ),
    row("attn.out.weight", Cut::HeadColumns, &["encoder.block.{}.layer.0.SelfAttention.o.weight"]),
    row("norm2.weight", Cut::Residual, &["encoder.block.{}.layer.1.layer_norm.weight"]),
    row("mlp.up.weight", Cut::FfnRows, &["encoder.block.{}.layer.1.DenseReluDense.wi.weight"]),
    row(
        "mlp.gate_up.weight",
        Cut::GateUpRows,
        &["encoder.block.{}.layer.1.DenseReluDense.wi_0.weight", "encoder.block.{}.layer.1.DenseReluDense.wi_1.weight"],
    ),
    row("mlp.down.weight", Cut::FfnColumns, &["encoder.block.{}.layer.1.DenseReluDense.wo.weight"]),
    row("last_norm.weight", Cut::Residual, &["encoder.final_layer_norm.weight"]),
    row("decoder.norm1.weight", Cut::Residual, &["decoder.block.{}.layer.0.layer_norm.weight"]),
    row(
        "decoder.attn.qkv.weight",
        Cut::HeadRows,
        &[
            "decoder.block.{}.layer.0.SelfAttention.q.weight",
            "decoder.block.{}.layer.0.SelfAttention.k.weight",
            "decoder.block.{}.layer.0.SelfAttention.v.weight",
        ],
    ),
    row("decoder.attn.out.weight", Cut::HeadColumns, &["decoder.block.{}.layer.0.SelfAttention.o.weight"]),
    row("cross.norm.weight", Cut::Residual, &["decoder.block.{}.layer.1.layer_norm.weight"]),
    row("cross.q.weight", Cut::HeadRows, &["decoder.block.{}.layer.1.EncDecAttention.q.weight"]),
    row(
        "cross.kv.weight",
        Cut::HeadRows,
        &["decoder.block.{}.layer.1.EncDecAttention.k.weight", "decoder.block.{}.layer.1.EncDecAttention.v.weight"],
    ),
    row("cross.out.weight", Cut::HeadColumns, &["decoder.block.{}.layer.1.EncDecAttention.o.weight"]),
    row("decoder.norm2.weight", Cut::Residual, &["decoder.block.{}.layer.2.layer_norm.weight"]),
    row("decoder.mlp.up.weight", Cut::FfnRows, &["decoder.block.{}.layer.2.DenseReluDense.wi.weight"]),
    row(
        "decoder.mlp.gate_up.weight",
        Cut::GateUpRows,
        &["decoder.block.{}.layer.2.DenseReluDense.wi_0.weight", "decoder.block.{}.layer.2.DenseReluDense.wi_1.weight"],
    ),
    row("decoder.mlp.down.weight", Cut::FfnColumns, &["decoder.block.{}.layer.2.DenseReluDense.wo.weight"]),
    row("norm.weight", Cut::Residual, &["decoder.final_layer_norm.weight"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

impl Definition for T5 {
    fn name(&self) -> &'static str {
        "t5"
    }

    fn title(&self) -> &'static str {
        "T5"
    }

    fn about(&self) -> &'static str {
        "An encoder and a decoder, positions by distance: T5."
    }

    fn classes(&self) -> &'static [Class] {
        &[CLASS]
    }

    fn prefix(&self) -> &'static str {
        ""
    }

    fn parameters(&self) -> &'static [Row] {
        PARAMETERS
    }

    /// Copies of the token table, and a table that no code has ever read.
    fn buffers(&self) -> &'static [&'static str] {
        &["coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"]
    }

    fn form(&self) -> Form {
        Form {
            input: Input::Pairs,
            attention: AttentionKind::Sides,
            positions: Positions::Buckets,
            mlp: MlpKind::ByActivation,
            heads: HeadsKind::OfOneKind,
            ..FORM
        }
    }

    fn usual(&self, sizes: &Sizes) -> ModelSpec {
        ModelSpec {
            family: FAMILY,
            activation: Activation::Relu,
            ffn_dim: 4 * sizes.dim,
            norm_eps: 1e-6,
            norm_bias: false,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            tie_embeddings: true,
            attention_scalar: Some(1.0),
            encoder: Some(EncoderSpec { layers: (sizes.layers / 2).max(1), buckets: 32, max_distance: 128 }),
            init_std: 1.0,
            eos_tokens: Vec::new(),
            ..super::GPT2.usual(sizes)
        }
    }

    fn usual_ffn_dim(&self, dim: usize) -> (usize, String) {
        (4 * dim, format!("4 x dim {dim}"))
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        if spec.rope.is_some() {
            return refuse("rope", "family t5 adds numbers by distance to scores; remove [model.rope]");
        }
        if spec.qk_norm {
            return refuse("qk_norm", "family t5 has none");
        }
        if spec.sliding_window.is_some() {
            return refuse("sliding_window", "family t5 has none");
        }
        if spec.qkv_bias || spec.o_bias || spec.mlp_bias || spec.norm_bias {
            return refuse("mlp_bias", "family t5 has no biases of products and norms");
        }
        if spec.kv_heads != spec.heads {
            return refuse("kv_heads", "family t5 has keys and values for each head");
        }
        if spec.attention_scalar != Some(1.0) {
            return refuse("attention_scalar", "family t5 does not divide scores: it is 1");
        }
        if spec.mup_base_dim.is_some() {
            return refuse("mup_base_dim", "family t5 scales initial values by its own rule");
        }
        Ok(())
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let dim = keys.size("d_model", Some(512))?;
        let heads = keys.size("num_heads", Some(8))?;
        let encoder = keys.size("num_layers", Some(6))?;
        let decoder = keys.optional_size("num_decoder_layers")?.unwrap_or(encoder);
        let vocab_size = keys.size("vocab_size", Some(32_128))?;
        let max_positions = keys.optional_size("n_positions")?.unwrap_or(0).max(POSITIONS);
        let mut spec = self.usual(&Sizes { vocab_size, dim, layers: encoder + decoder, heads, max_positions });
        spec.encoder = Some(EncoderSpec {
            layers: encoder,
            buckets: keys.size("relative_attention_num_buckets", Some(32))?,
            max_distance: keys.size("relative_attention_max_distance", Some(128))?,
        });
        spec.head_dim = keys.size("d_kv", Some(64))?;
        spec.ffn_dim = keys.size("d_ff", Some(2048))?;
        spec.norm_eps = keys.number("layer_norm_epsilon")?.unwrap_or(1e-6);
        spec.init_std = keys.number("initializer_factor")?.unwrap_or(1.0);
        spec.dropout = keys.number("dropout_rate")?.unwrap_or(0.1);
        let form = keys.text("feed_forward_proj")?.unwrap_or_else(|| "relu".into());
        spec.activation = match form.as_str() {
            "relu" => Activation::Relu,
            "gated-gelu" => Activation::GeluTanh,
            "gated-silu" => Activation::Silu,
            _ => {
                let why = "supported are relu, gated-gelu, gated-silu";
                return Err(ConfigError::Unsupported { key: "feed_forward_proj".into(), value: form, why });
            }
        };
        // transformers 5 writes whether the output is scaled and calls every model tied.
        let scaled = keys.flag("scale_decoder_outputs")?;
        let tied = keys.flag("tie_word_embeddings")?.unwrap_or(true);
        spec.tie_embeddings = tied && scaled.unwrap_or(true);
        // Follow from other keys.
        for key in ["dense_act_fn", "is_gated_act", "classifier_dropout", "decoder_start_token_id", "initializer_range"]
        {
            keys.take(key);
        }
        Ok(spec)
    }

    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        match spec.activation {
            Activation::Relu | Activation::GeluTanh | Activation::Silu => Ok(vec![CLASS]),
            Activation::ReluSquared => Err(ConfigError::NoEquivalent("T5 blocks with squared ReLU".into())),
            Activation::Gelu => Err(ConfigError::NoEquivalent("T5 blocks gated with the exact GELU".into())),
        }
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        let Some(encoder) = &spec.encoder else { return };
        keys.set("d_model", json!(spec.dim));
        keys.set("d_kv", json!(spec.head_dim));
        keys.set("d_ff", json!(spec.ffn_dim));
        keys.set("num_layers", json!(encoder.layers));
        keys.set("num_decoder_layers", json!(spec.layers - encoder.layers));
        keys.set("num_heads", json!(spec.heads));
        keys.set("relative_attention_num_buckets", json!(encoder.buckets));
        keys.set("relative_attention_max_distance", json!(encoder.max_distance));
        keys.set("layer_norm_epsilon", json!(spec.norm_eps));
        keys.set("initializer_factor", json!(spec.init_std));
        keys.set("dropout_rate", json!(spec.dropout));
        let form = match spec.activation {
            Activation::Relu => "relu",
            Activation::Silu => "gated-silu",
            _ => "gated-gelu",
        };
        keys.set("feed_forward_proj", json!(form));
        keys.set("is_encoder_decoder", json!(true));
        // A decoder begins with it.
        keys.set("decoder_start_token_id", json!(spec.pad_token.unwrap_or(0)));
    }

    fn block(
        &self,
        spec: &ModelSpec,
        layer: usize,
        _rope: Option<Arc<RopeTables>>,
        share: Share<'_>,
    ) -> Result<Box<dyn Unit>> {
        if share.division.is_some() || share.context.ranks > 1 {
            return Err(ModelError::Split(
                "family t5 is not divided over tensor or context ranks: use data or pipeline parallelism".into(),
            ));
        }
        let encoder = spec.encoder.as_ref();
        let encoder =
            encoder.ok_or_else(|| ModelError::Spec { field: "encoder", problem: "family t5 needs one".into() })?;
        Ok(Box::new(SideBlock::new(spec, encoder, layer)))
    }
}
