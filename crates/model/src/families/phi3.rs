//! Phi-3 (Abdin et al. 2024): Llama's block, whose files hold queries, keys and values as one
//! tensor, and gate and up as one. A window, where there is one, is in every layer.

use super::llama::{self, FORM};
use super::{Class, Definition, Form, PHI3, Row, Sizes, refuse, row};
use crate::Result;
use crate::gguf::{self, Layout};
use crate::hf::{ConfigError, Keys, Written};
use crate::spec::{Activation, ModelSpec, RopeSpec};
use crate::split::Cut;
use serde_json::{Value, json};

/// The definition of the family.
pub(super) struct Phi3;

const CLASS: Class = Class { model_type: "phi3", architecture: "Phi3ForCausalLM" };

const PARAMETERS: &[Row] = &[
    row("tokens.weight", Cut::VocabularyRows, &["model.embed_tokens.weight"]),
    row("norm1.weight", Cut::Residual, &["model.layers.{}.input_layernorm.weight"]),
    row("attn.qkv.weight", Cut::HeadRows, &["model.layers.{}.self_attn.qkv_proj.weight"]),
    row("attn.out.weight", Cut::HeadColumns, &["model.layers.{}.self_attn.o_proj.weight"]),
    row("norm2.weight", Cut::Residual, &["model.layers.{}.post_attention_layernorm.weight"]),
    row("mlp.up.weight", Cut::GateUpRows, &["model.layers.{}.mlp.gate_up_proj.weight"]),
    row("mlp.down.weight", Cut::FfnColumns, &["model.layers.{}.mlp.down_proj.weight"]),
    row("norm.weight", Cut::Residual, &["model.norm.weight"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

const GGUF: &[gguf::Form] = &[gguf::Form {
    architecture: "phi3",
    model_type: "phi3",
    keys: gguf::DECODER_KEYS,
    tensors: &[
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("output", "lm_head"),
        ("blk.{}.attn_norm", "model.layers.{}.input_layernorm"),
        ("blk.{}.attn_qkv", "model.layers.{}.self_attn.qkv_proj"),
        ("blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"),
        ("blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"),
        ("blk.{}.ffn_up", "model.layers.{}.mlp.gate_up_proj"),
        ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
    ],
    biases: gguf::DECODER_BIASES,
    layout: Layout::Same,
    complete: gguf::complete,
}];

impl Definition for Phi3 {
    fn name(&self) -> &'static str {
        "phi3"
    }

    fn title(&self) -> &'static str {
        "Phi-3"
    }

    fn about(&self) -> &'static str {
        "Llama's block under fused names, and a window in every layer or none: Phi-3, Phi-4."
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

    fn gguf(&self) -> &'static [gguf::Form] {
        GGUF
    }

    fn usual(&self, sizes: &Sizes) -> ModelSpec {
        ModelSpec { family: PHI3, ..llama::usual(sizes) }
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        if spec.activation != Activation::Silu {
            return refuse("activation", "family phi3 gates with silu");
        }
        if spec.qk_norm {
            return refuse("qk_norm", "family phi3 has none; use family llama");
        }
        if spec.rope.as_ref().is_some_and(|rope| rope.scaling.is_some()) {
            return refuse("rope.scaling", "family phi3 does not stretch its rotations; use family llama");
        }
        if spec.qkv_bias || spec.o_bias || spec.mlp_bias {
            return refuse("qkv_bias, o_bias, mlp_bias", "family phi3 has none");
        }
        llama::validate(spec)
    }

    fn read_config(&self, keys: &mut Keys, _model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let usual = Sizes { vocab_size: 32_064, dim: 3072, layers: 32, heads: 32, max_positions: 4096 };
        let sizes = keys.sizes(usual)?;
        let mut spec = ModelSpec { ffn_dim: keys.size("intermediate_size", Some(8192))?, ..self.usual(&sizes) };
        keys.grouped_heads(&mut spec)?;
        spec.activation = keys.activation("hidden_act", "silu")?;
        keys.decoder(&mut spec, 1e-5, false)?;
        keys.refuse("attention_bias", &[Value::Bool(false)], "not in this model_type")?;
        keys.refuse("mlp_bias", &[Value::Bool(false)], "not in this model_type")?;
        spec.sliding_window = keys.optional_size("sliding_window")?;
        // Only the rule `longrope` reads it.
        keys.take("original_max_position_embeddings");
        spec.rope = Some(rotation(keys, sizes.max_positions)?);
        spec.dropout = keys.dropout("resid_pdrop", "embd_pdrop", 0.0)?;
        keys.attention_dropout("attention_dropout", 0.0)?;
        Ok(spec)
    }

    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
        if spec.sliding_layers.is_some() {
            return no("Phi-3 blocks with a sliding window in some layers only");
        }
        Ok(vec![CLASS])
    }

    fn write_config(&self, spec: &ModelSpec, _class: Class, keys: &mut Written) {
        keys.decoder(spec);
        keys.activation(spec);
        keys.set("sliding_window", json!(spec.sliding_window));
        keys.set("resid_pdrop", json!(spec.dropout));
        keys.set("embd_pdrop", json!(spec.dropout));
        keys.set("original_max_position_embeddings", json!(spec.max_positions));
        keys.partial_rope(spec.rope.as_ref());
    }
}

/// The rotation of a file. The class knows one rule besides the plain one, `longrope`, and takes
/// the names `su` and `yarn` for it too.
fn rotation(keys: &mut Keys, positions: usize) -> std::result::Result<RopeSpec, ConfigError> {
    let refused = |value: String| ConfigError::Unsupported {
        key: "rope_type".into(),
        value,
        why: "phi3 stretches rotations by longrope only, which is not available; files for 4,096 positions do not",
    };
    match keys.partial_rope(positions) {
        Ok(rope) if rope.scaling.is_some() => Err(refused("a rule other than default".into())),
        Err(ConfigError::Unsupported { key, value, .. }) if key == "rope_type" => Err(refused(value)),
        other => other,
    }
}
