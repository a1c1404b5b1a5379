//! Llama (Touvron et al. 2023): RMSNorm, rotary positions, a gated MLP of three products. Mistral,
//! Qwen2, Qwen3 and SmolLM are this with other fields.

use super::{
    AttentionKind, Class, Definition, EmbeddingScale, Form, GPT2, Gains, HeadsKind, Input, LLAMA, MlpKind, NormKind,
    NormPlaces, Positions, QkNormKind, ResidualInit, Row, Sizes, refuse, row,
};
use crate::Result;
use crate::gguf::{self, Layout};
use crate::hf::{ConfigError, Keys, Written};
use crate::spec::{Activation, LAYERS_MAX, ModelSpec, RopeSpec};
use crate::split::Cut;
use serde_json::{Value, json};

/// The definition of the family.
pub(super) struct Llama;

const LLAMA_CLASS: Class = Class { model_type: "llama", architecture: "LlamaForCausalLM" };
const MISTRAL: Class = Class { model_type: "mistral", architecture: "MistralForCausalLM" };
const QWEN2: Class = Class { model_type: "qwen2", architecture: "Qwen2ForCausalLM" };
const QWEN3: Class = Class { model_type: "qwen3", architecture: "Qwen3ForCausalLM" };

pub(super) const QKV_WEIGHT: &[&str] = &[
    "model.layers.{}.self_attn.q_proj.weight",
    "model.layers.{}.self_attn.k_proj.weight",
    "model.layers.{}.self_attn.v_proj.weight",
];
pub(super) const QKV_BIAS: &[&str] = &[
    "model.layers.{}.self_attn.q_proj.bias",
    "model.layers.{}.self_attn.k_proj.bias",
    "model.layers.{}.self_attn.v_proj.bias",
];
pub(super) const UP_WEIGHT: &[&str] = &["model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"];
const UP_BIAS: &[&str] = &["model.layers.{}.mlp.gate_proj.bias", "model.layers.{}.mlp.up_proj.bias"];

const PARAMETERS: &[Row] = &[
    row("tokens.weight", Cut::VocabularyRows, &["model.embed_tokens.weight"]),
    row("norm1.weight", Cut::Residual, &["model.layers.{}.input_layernorm.weight"]),
    row("attn.qkv.weight", Cut::HeadRows, QKV_WEIGHT),
    row("attn.qkv.bias", Cut::HeadRows, QKV_BIAS),
    row("attn.q_norm.weight", Cut::EachHead, &["model.layers.{}.self_attn.q_norm.weight"]),
    row("attn.k_norm.weight", Cut::EachHead, &["model.layers.{}.self_attn.k_norm.weight"]),
    row("attn.out.weight", Cut::HeadColumns, &["model.layers.{}.self_attn.o_proj.weight"]),
    row("attn.out.bias", Cut::Residual, &["model.layers.{}.self_attn.o_proj.bias"]),
    row("norm2.weight", Cut::Residual, &["model.layers.{}.post_attention_layernorm.weight"]),
    row("mlp.up.weight", Cut::GateUpRows, UP_WEIGHT),
    row("mlp.up.bias", Cut::GateUpRows, UP_BIAS),
    row("mlp.down.weight", Cut::FfnColumns, &["model.layers.{}.mlp.down_proj.weight"]),
    row("mlp.down.bias", Cut::Residual, &["model.layers.{}.mlp.down_proj.bias"]),
    row("norm.weight", Cut::Residual, &["model.norm.weight"]),
    row("lm.weight", Cut::VocabularyRows, &["lm_head.weight"]),
];

/// Mistral's files have the architecture `llama` too. The class `qwen2` always has its biases.
const GGUF: &[gguf::Form] = &[
    gguf::Form { architecture: "llama", model_type: "llama", layout: Layout::Interleaved, ..GGUF_FORM },
    gguf::Form { architecture: "qwen2", model_type: "qwen2", biases: &[], ..GGUF_FORM },
    gguf::Form { architecture: "qwen3", model_type: "qwen3", ..GGUF_FORM },
];

/// The common part of the architectures.
const GGUF_FORM: gguf::Form = gguf::Form {
    architecture: "",
    model_type: "",
    keys: gguf::DECODER_KEYS,
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
        ("blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"),
        ("blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"),
        ("blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"),
        ("blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"),
    ],
    biases: gguf::DECODER_BIASES,
    layout: Layout::Same,
    complete: gguf::complete,
};

/// The form of Llama's blocks, which many families share.
pub(super) const FORM: Form = Form {
    input: Input::Tokens,
    attention: AttentionKind::Causal,
    norm: NormKind::Rms,
    gains: Gains::Weight,
    norms: NormPlaces::Before,
    qk_norm: QkNormKind::EachHead,
    embedding: EmbeddingScale::One,
    positions: Positions::Rotary,
    mlp: MlpKind::Gated,
    heads: HeadsKind::Grouped,
    residual_init: ResidualInit::Same,
};

/// A model with RMSNorm, rotary positions and SwiGLU, without biases: what Llama's relatives start
/// from.
pub(super) fn usual(sizes: &Sizes) -> ModelSpec {
    ModelSpec {
        family: LLAMA,
        ffn_dim: LLAMA.usual_ffn_dim(sizes.dim).0,
        activation: Activation::Silu,
        norm_bias: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        tie_embeddings: false,
        rope: Some(RopeSpec { theta: 10_000.0, partial_factor: 1.0, scaling: None }),
        ..GPT2.usual(sizes)
    }
}

/// Checks what all relatives of Llama demand: rotary positions, and RMSNorm without a bias.
pub(super) fn validate(spec: &ModelSpec) -> Result<()> {
    let family = spec.family;
    let Some(rope) = &spec.rope else {
        return refuse(
            "rope",
            format!("family {family} needs [model.rope] with its theta (10000 unless the model says otherwise)"),
        );
    };
    if spec.norm_bias {
        return refuse("norm_bias", format!("family {family} has RMSNorm, which has no bias"));
    }
    rope.validate(spec.head_dim)
}

impl Definition for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn title(&self) -> &'static str {
        "Llama"
    }

    fn about(&self) -> &'static str {
        "RMSNorm, rotary positions, gated MLP: Llama, Mistral, Qwen2, Qwen3, SmolLM."
    }

    fn classes(&self) -> &'static [Class] {
        &[LLAMA_CLASS, MISTRAL, QWEN2, QWEN3]
    }

    fn parameters(&self) -> &'static [Row] {
        PARAMETERS
    }

    fn buffers(&self) -> &'static [&'static str] {
        &[".rotary_emb.inv_freq"]
    }

    fn form(&self) -> Form {
        FORM
    }

    fn gguf(&self) -> &'static [gguf::Form] {
        GGUF
    }

    fn usual(&self, sizes: &Sizes) -> ModelSpec {
        usual(sizes)
    }

    fn validate(&self, spec: &ModelSpec) -> Result<()> {
        if spec.activation != Activation::Silu {
            return refuse("activation", "family llama gates with silu");
        }
        validate(spec)
    }

    fn read_config(&self, keys: &mut Keys, model_type: &str) -> std::result::Result<ModelSpec, ConfigError> {
        let qwen = model_type.starts_with("qwen");
        let (ffn_dim, max_positions) = match model_type {
            "mistral" => (14_336, 131_072),
            "llama" => (11_008, 2048),
            _ => (22_016, 32_768),
        };
        let ffn_dim = keys.size("intermediate_size", Some(ffn_dim))?;
        let vocab_size = if qwen { 151_936 } else { 32_000 };
        let sizes = keys.sizes(Sizes { vocab_size, dim: 4096, layers: 32, heads: 32, max_positions })?;
        let mut spec = ModelSpec { ffn_dim, ..usual(&sizes) };
        let usual_keys = match model_type {
            "mistral" => vec![("num_key_value_heads", 8)],
            "qwen2" => vec![("num_key_value_heads", 32)],
            "qwen3" => vec![("num_key_value_heads", 32), ("head_dim", 128)],
            _ => Vec::new(),
        };
        usual_keys.into_iter().for_each(|(key, value)| keys.default(key, value.into()));
        keys.grouped_heads(&mut spec)?;
        spec.activation = keys.activation("hidden_act", "silu")?;
        keys.decoder(&mut spec, 1e-6, false)?;
        // attention_bias means all four projections; Qwen2 always has it on three.
        let attention_bias = match model_type {
            "llama" | "qwen3" => keys.flag("attention_bias")?.unwrap_or(false),
            _ => {
                keys.refuse(
                    "attention_bias",
                    &[Value::Bool(model_type == "qwen2"), Value::Bool(false)],
                    "not in this model_type",
                )?;
                false
            }
        };
        spec.qkv_bias = attention_bias || model_type == "qwen2";
        spec.o_bias = attention_bias;
        if model_type == "llama" {
            spec.mlp_bias = keys.flag("mlp_bias")?.unwrap_or(false);
            // How transformers once split products; the sum is the same.
            keys.take("pretraining_tp");
            keys.refuse("rope_interleaved", &[Value::Bool(false)], "rotary halves, as transformers rotates")?;
        } else {
            keys.refuse("mlp_bias", &[Value::Bool(false)], "not in this model_type")?;
        }
        spec.qk_norm = model_type == "qwen3";
        windows(keys, model_type, &mut spec)?;
        spec.rope = Some(keys.rope(sizes.max_positions)?);
        keys.attention_dropout("attention_dropout", 0.0)?;
        Ok(spec)
    }

    /// `attention_bias` of Llama and Qwen3 is on all four projections: biases that the model has
    /// not are zeros. Qwen2, which has three, comes after Llama, because transformers splits text
    /// for it by a class of its own, whatever `tokenizer.json` says.
    fn able(&self, spec: &ModelSpec) -> std::result::Result<Vec<Class>, ConfigError> {
        let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
        if spec.rotary_dim() != spec.head_dim {
            return no("Llama blocks that rotate part of a head");
        }
        let (biases, window) = ((spec.qkv_bias, spec.o_bias, spec.mlp_bias), spec.sliding_window.is_some());
        // The class `llama` of transformers 5 refuses other numbers of heads; its relatives do not.
        let divides = spec.dim.is_multiple_of(spec.heads);
        let able = [
            (LLAMA_CLASS, !spec.qk_norm && !window && divides),
            (MISTRAL, !spec.qk_norm && biases == (false, false, false) && spec.sliding_layers.is_none()),
            (QWEN2, !spec.qk_norm && biases == (true, false, false)),
            (QWEN3, spec.qk_norm && !spec.mlp_bias),
        ];
        let able: Vec<Class> = able.into_iter().filter_map(|(class, able)| able.then_some(class)).collect();
        match able.is_empty() {
            false => Ok(able),
            true if spec.qk_norm => no("query/key norms together with biases in the MLP"),
            true if !window && !divides => no("Llama blocks with these biases whose heads do not divide dim"),
            true => no("a sliding window with these biases, or in some layers only without query/key norms or biases"),
        }
    }

    fn write_config(&self, spec: &ModelSpec, class: Class, keys: &mut Written) {
        keys.decoder(spec);
        keys.activation(spec);
        if matches!(class.model_type, "llama" | "qwen3") {
            keys.set("attention_bias", json!(spec.qkv_bias || spec.o_bias));
        }
        match class.model_type {
            "llama" => keys.set("mlp_bias", json!(spec.mlp_bias)),
            "mistral" => keys.set("sliding_window", json!(spec.sliding_window)),
            _ => {
                keys.set("use_sliding_window", json!(spec.sliding_window.is_some()));
                keys.set("sliding_window", json!(spec.sliding_window));
                keys.layer_types(spec);
                let full_first = (0..spec.layers).take_while(|layer| spec.window(*layer).is_none()).count();
                keys.set("max_window_layers", json!(full_first));
            }
        }
        keys.rope(spec.rope.as_ref());
    }

    fn export_catch(&self, spec: &ModelSpec, class: Class) -> Option<&'static str> {
        (class == QWEN2 && spec.model_type.is_none()).then_some(
            "only Qwen2 has this sliding window together with these biases: transformers will load the exported model, but split its text as Qwen2 does, \
             whatever the tokenizer.json says; set model.qkv_bias = false or leave out model.sliding_window to avoid that",
        )
    }

    fn implied_zeros(&self, spec: &ModelSpec, class: Class) -> Vec<(String, Vec<usize>)> {
        let mut zeros = Vec::new();
        if !matches!(class.model_type, "llama" | "qwen3") || spec.qkv_bias == spec.o_bias {
            return zeros;
        }
        let mut bias = |present: bool, name: String, size: usize| {
            if !present {
                zeros.push((format!("model.{name}.bias"), vec![size]));
            }
        };
        for layer in 0..spec.layers {
            for (name, heads) in [("q_proj", spec.heads), ("k_proj", spec.kv_heads), ("v_proj", spec.kv_heads)] {
                bias(spec.qkv_bias, format!("layers.{layer}.self_attn.{name}"), heads * spec.head_dim);
            }
            bias(spec.o_bias, format!("layers.{layer}.self_attn.o_proj"), spec.dim);
        }
        zeros
    }
}

/// Sliding windows: Mistral's are in every layer; Qwen's where `layer_types` says, or from
/// `max_window_layers` on.
fn windows(keys: &mut Keys, model_type: &str, spec: &mut ModelSpec) -> std::result::Result<(), ConfigError> {
    let given = !keys.absent("sliding_window");
    let window = keys.optional_size("sliding_window")?;
    match model_type {
        "llama" => {
            if let Some(window) = window {
                let why = "model_type llama has no window; mistral has";
                return Err(ConfigError::Unsupported { key: "sliding_window".into(), value: window.to_string(), why });
            }
        }
        "mistral" => spec.sliding_window = if given { window } else { Some(4096) },
        _ => {
            let uses = keys.flag("use_sliding_window")?.unwrap_or(false);
            let window = if given { window } else { Some(4096) }.filter(|_| uses);
            let first = keys.typed("max_window_layers", "a whole number", Value::as_u64)?.unwrap_or(28) as usize;
            let sliding = match keys.sliding_layers(spec.layers)? {
                // More layers than any model has are refused later.
                None => (first.min(spec.layers)..spec.layers.min(LAYERS_MAX)).collect(),
                Some(sliding) => sliding,
            };
            if window.is_some() && !sliding.is_empty() {
                spec.sliding_window = window;
                spec.sliding_layers = (sliding.len() < spec.layers).then_some(sliding);
            }
        }
    }
    Ok(())
}
