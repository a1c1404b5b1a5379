//! Turns `config.json` into a [`ModelSpec`].
//!
//! Absent keys take the defaults of transformers' configuration classes, on which published files
//! rely.

use super::ConfigError;
use crate::spec::{Activation, ModelSpec, RopeScaling, RopeSpec};
use serde_json::{Map, Value};

/// A translated configuration.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The model.
    pub spec: ModelSpec,
    /// Notes for the user: keys that were not used.
    pub notes: Vec<String>,
}

type Result<T> = std::result::Result<T, ConfigError>;

/// Translates the text of a `config.json`.
pub fn from_config_json(text: &str) -> Result<Imported> {
    let value: Value = serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
    let Value::Object(map) = value else {
        return Err(ConfigError::Json("it holds another JSON value".into()));
    };
    let mut keys = Keys { map, notes: Vec::new() };
    let model_type = keys.text("model_type")?.ok_or(ConfigError::Missing { key: "model_type" })?;
    let mut spec = match model_type.as_str() {
        "gpt2" => gpt2(&mut keys)?,
        "llama" | "mistral" | "qwen2" | "qwen3" => llama(&mut keys, &model_type)?,
        _ => return Err(ConfigError::ModelType { found: model_type }),
    };
    special_tokens(&mut keys, &mut spec)?;
    keys.refuse("quantization_config", &[], "weights must be f32, bf16 or f16: use the unquantised model")?;
    keys.refuse("add_cross_attention", &[Value::Bool(false)], "decoders without an encoder only")?;
    keys.refuse("is_encoder_decoder", &[Value::Bool(false)], "decoders without an encoder only")?;
    keys.refuse("tie_encoder_decoder", &[Value::Bool(false)], "decoders without an encoder only")?;
    keys.finish();
    spec.validate().map_err(|error| ConfigError::Invalid(Box::new(error)))?;
    spec.model_type = super::export::usual(&spec).is_none_or(|usual| usual != model_type).then_some(model_type);
    Ok(Imported { spec, notes: keys.notes })
}

fn gpt2(keys: &mut Keys) -> Result<ModelSpec> {
    let dim = keys.size("n_embd", Some(768))?;
    let heads = keys.size("n_head", Some(12))?;
    let layers = keys.size("n_layer", Some(12))?;
    let positions = keys.size("n_positions", Some(1024))?;
    // Old files repeat the number of positions under this name.
    keys.refuse("n_ctx", &[Value::from(positions)], "it must equal n_positions")?;
    keys.refuse("scale_attn_weights", &[Value::Bool(true)], "scores are always divided by sqrt(head_dim)")?;
    keys.refuse("scale_attn_by_inverse_layer_idx", &[Value::Bool(false)], "scores are not scaled by layer")?;
    // This changes the rounding of transformers' own f16 path, not the function; softmax is always
    // f32 here.
    keys.take("reorder_and_upcast_attn");
    let mut spec = ModelSpec::gpt2(keys.size("vocab_size", Some(50_257))?, dim, layers, heads, positions);
    if heads == 0 || !dim.is_multiple_of(heads) {
        return Err(ConfigError::Value {
            key: "n_head".into(),
            expected: "a divisor of n_embd",
            found: format!("{heads} with n_embd {dim}"),
        });
    }
    if let Some(inner) = keys.optional_size("n_inner")? {
        spec.ffn_dim = inner;
    }
    spec.activation = activation(keys, "activation_function", "gelu_new")?;
    spec.norm_eps = keys.number("layer_norm_epsilon")?.unwrap_or(1e-5);
    spec.init_std = keys.number("initializer_range")?.unwrap_or(0.02);
    spec.tie_embeddings = keys.flag("tie_word_embeddings")?.unwrap_or(true);
    spec.dropout = keys.number("resid_pdrop")?.unwrap_or(0.1);
    let embedding = keys.number("embd_pdrop")?.unwrap_or(0.1);
    if embedding != spec.dropout {
        return Err(ConfigError::Unsupported {
            key: "embd_pdrop".into(),
            value: embedding.to_string(),
            why: "it must equal resid_pdrop: there is one dropout",
        });
    }
    keys.attention_dropout("attn_pdrop", 0.1)?;
    Ok(spec)
}

fn llama(keys: &mut Keys, model_type: &str) -> Result<ModelSpec> {
    let qwen = model_type.starts_with("qwen");
    let mistral = model_type == "mistral";
    let dim = keys.size("hidden_size", Some(4096))?;
    let heads = keys.size("num_attention_heads", Some(32))?;
    let layers = keys.size("num_hidden_layers", Some(32))?;
    let vocab = keys.size("vocab_size", Some(if qwen { 151_936 } else { 32_000 }))?;
    let ffn_dim = keys.size(
        "intermediate_size",
        Some(if qwen {
            22_016
        } else if mistral {
            14_336
        } else {
            11_008
        }),
    )?;
    let positions = if qwen {
        32_768
    } else if mistral {
        131_072
    } else {
        2048
    };
    let positions = keys.size("max_position_embeddings", Some(positions))?;
    let mut spec = ModelSpec::llama(vocab, dim, layers, heads, ffn_dim, positions);
    spec.kv_heads = match (keys.optional_size("num_key_value_heads")?, keys.absent("num_key_value_heads")) {
        (Some(kv_heads), _) => kv_heads,
        (None, true) if mistral => 8,
        (None, true) if qwen => 32,
        (None, _) => heads,
    };
    match keys.optional_size("head_dim")? {
        Some(head_dim) => spec.head_dim = head_dim,
        None if model_type == "qwen3" => spec.head_dim = 128,
        None if heads == 0 || !dim.is_multiple_of(heads) => {
            return Err(ConfigError::Value {
                key: "num_attention_heads".into(),
                expected: "a divisor of hidden_size when there is no head_dim",
                found: format!("{heads} with hidden_size {dim}"),
            });
        }
        None => {}
    }
    spec.activation = activation(keys, "hidden_act", "silu")?;
    spec.norm_eps = keys.number("rms_norm_eps")?.unwrap_or(1e-6);
    spec.init_std = keys.number("initializer_range")?.unwrap_or(0.02);
    spec.tie_embeddings = keys.flag("tie_word_embeddings")?.unwrap_or(false);
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
    spec.rope = Some(rope(keys, positions)?);
    keys.attention_dropout("attention_dropout", 0.0)?;
    Ok(spec)
}

/// Sliding windows: Mistral's are in every layer; Qwen's where `layer_types` says, or from
/// `max_window_layers` on.
fn windows(keys: &mut Keys, model_type: &str, spec: &mut ModelSpec) -> Result<()> {
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
            let sliding = match keys.take("layer_types") {
                None => (first.min(spec.layers)..spec.layers).collect(),
                Some(types) => sliding_layers(&types, spec.layers)?,
            };
            if window.is_some() && !sliding.is_empty() {
                spec.sliding_window = window;
                spec.sliding_layers = (sliding.len() < spec.layers).then_some(sliding);
            }
        }
    }
    Ok(())
}

fn sliding_layers(types: &Value, layers: usize) -> Result<Vec<usize>> {
    let wrong = |found: String| ConfigError::Value {
        key: "layer_types".into(),
        expected: "\"full_attention\" or \"sliding_attention\" for every layer",
        found,
    };
    let list = types.as_array().filter(|list| list.len() == layers).ok_or_else(|| wrong(types.to_string()))?;
    let mut sliding = Vec::new();
    for (layer, kind) in list.iter().enumerate() {
        match kind.as_str() {
            Some("full_attention") => {}
            Some("sliding_attention") => sliding.push(layer),
            _ => return Err(wrong(kind.to_string())),
        }
    }
    Ok(sliding)
}

/// Rotary parameters as transformers 5 writes them (`rope_parameters`) or 4 did (`rope_theta`,
/// `rope_scaling`).
fn rope(keys: &mut Keys, positions: usize) -> Result<RopeSpec> {
    let theta = keys.number("rope_theta")?;
    let partial = keys.number("partial_rotary_factor")?;
    let mut rules = Map::new();
    for key in ["rope_parameters", "rope_scaling"] {
        match keys.take(key) {
            None | Some(Value::Null) => {}
            Some(Value::Object(object)) => rules.extend(object),
            Some(other) => {
                return Err(ConfigError::Value {
                    key: key.into(),
                    expected: "an object or null",
                    found: other.to_string(),
                });
            }
        }
    }
    let mut rules = Keys { map: rules, notes: Vec::new() };
    let theta = rules.number("rope_theta")?.or(theta).unwrap_or(10_000.0);
    let partial_factor = rules.number("partial_rotary_factor")?.or(partial).unwrap_or(1.0);
    if partial_factor != 1.0 {
        return Err(ConfigError::Unsupported {
            key: "partial_rotary_factor".into(),
            value: partial_factor.to_string(),
            why: "these model types rotate whole heads",
        });
    }
    let old_name = rules.text("type")?;
    let kind = rules.text("rope_type")?.or(old_name).unwrap_or_else(|| "default".into());
    let original = rules.optional_size("original_max_position_embeddings")?.unwrap_or(positions);
    let mut needed = |key: &'static str| rules.number(key)?.ok_or(ConfigError::Missing { key });
    let scaling = match kind.as_str() {
        "default" => None,
        "linear" => Some(RopeScaling::Linear { factor: needed("factor")? }),
        "llama3" => Some(RopeScaling::Llama3 {
            factor: needed("factor")?,
            low_freq_factor: needed("low_freq_factor")?,
            high_freq_factor: needed("high_freq_factor")?,
            original_max_positions: original,
        }),
        "yarn" => Some(RopeScaling::Yarn {
            factor: needed("factor")?,
            original_max_positions: original,
            // Zero means the default, as in transformers.
            beta_fast: rules.number("beta_fast")?.filter(|b| *b != 0.0).unwrap_or(32.0),
            beta_slow: rules.number("beta_slow")?.filter(|b| *b != 0.0).unwrap_or(1.0),
            attention_factor: rules.number("attention_factor")?,
            mscale: rules.number("mscale")?,
            mscale_all_dim: rules.number("mscale_all_dim")?,
            truncate: rules.flag("truncate")?.unwrap_or(true),
        }),
        _ => {
            return Err(ConfigError::Unsupported {
                key: "rope_type".into(),
                value: kind,
                why: "supported are default, linear, llama3, yarn",
            });
        }
    };
    if let Some((key, value)) = rules.map.iter().next() {
        return Err(ConfigError::Unsupported {
            key: format!("rope_parameters.{key}"),
            value: value.to_string(),
            why: "this rotary rule has no such parameter",
        });
    }
    Ok(RopeSpec { theta, partial_factor, scaling })
}

fn activation(keys: &mut Keys, key: &'static str, default: &str) -> Result<Activation> {
    let name = keys.text(key)?.unwrap_or_else(|| default.into());
    Ok(match name.as_str() {
        "gelu" => Activation::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
        "relu" => Activation::Relu,
        "silu" | "swish" => Activation::Silu,
        _ => {
            let why = "supported are gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu, silu, swish";
            return Err(ConfigError::Unsupported { key: key.into(), value: name, why });
        }
    })
}

fn special_tokens(keys: &mut Keys, spec: &mut ModelSpec) -> Result<()> {
    let vocab = spec.vocab_size as u64;
    let mut token = |key: &'static str| -> Result<Vec<u32>> {
        let Some(value) = keys.take(key) else { return Ok(Vec::new()) };
        let wrong = |found: &Value| ConfigError::Value {
            key: key.into(),
            expected: "a token id, a list of them, or null",
            found: found.to_string(),
        };
        let list = match &value {
            // Older files write -1 for none.
            Value::Null => return Ok(Vec::new()),
            Value::Number(n) if n.as_i64() == Some(-1) => return Ok(Vec::new()),
            Value::Array(list) => list.clone(),
            one => vec![one.clone()],
        };
        let ids = list.iter().map(|id| id.as_u64().filter(|id| *id <= u32::MAX as u64).ok_or_else(|| wrong(id)));
        let ids: Vec<u64> = ids.collect::<Result<_>>()?;
        if let Some(outside) = ids.iter().find(|id| **id >= vocab) {
            keys.notes.push(format!("`{key}` = {outside} is outside of the vocabulary of {vocab} and was not used"));
        }
        Ok(ids.into_iter().filter(|id| *id < vocab).map(|id| id as u32).collect())
    };
    spec.bos_token = token("bos_token_id")?.first().copied();
    spec.eos_tokens = token("eos_token_id")?;
    spec.pad_token = token("pad_token_id")?.first().copied();
    Ok(())
}

/// The keys not yet used.
struct Keys {
    map: Map<String, Value>,
    notes: Vec<String>,
}

/// Keys without bearing on the function computed.
const INERT: &[&str] = &[
    "_name_or_path",
    "architectures",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "output_past",
    "task_specific_params",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "id2label",
    "label2id",
    "gradient_checkpointing",
    "is_decoder",
    "is_llama_config",
    "torchscript",
    "problem_type",
    "max_window_layers",
    "use_sliding_window",
    "auto_map",
    "_attn_implementation_autoset",
    "transformers.js_config",
];

impl Keys {
    fn take(&mut self, key: &str) -> Option<Value> {
        // `remove` would move the last key into the gap; the order of notes should be the file's.
        self.map.shift_remove(key)
    }

    fn absent(&self, key: &str) -> bool {
        !self.map.contains_key(key)
    }

    fn typed<T>(&mut self, key: &str, expected: &'static str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        match self.take(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(ConfigError::Value { key: key.into(), expected, found: value.to_string() }),
            },
        }
    }

    fn text(&mut self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |value| value.as_str().map(String::from))
    }

    fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn number(&mut self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn optional_size(&mut self, key: &str) -> Result<Option<usize>> {
        // Anything larger is no size of a model, and sums and products of sizes must not overflow.
        let read = |value: &Value| value.as_u64().filter(|n| *n > 0 && *n < 1 << 31).map(|n| n as usize);
        self.typed(key, "a positive whole number below 2^31", read)
    }

    fn size(&mut self, key: &'static str, default: Option<usize>) -> Result<usize> {
        self.optional_size(key)?.or(default).ok_or(ConfigError::Missing { key })
    }

    /// Fails when `key` is there with a value that is none of `allowed` and not null.
    fn refuse(&mut self, key: &str, allowed: &[Value], why: &'static str) -> Result<()> {
        match self.take(key) {
            Some(value) if !value.is_null() && !allowed.contains(&value) => {
                Err(ConfigError::Unsupported { key: key.into(), value: value.to_string(), why })
            }
            _ => Ok(()),
        }
    }

    /// Notes a dropout of attention probabilities, which is not done here. It matters in training
    /// only, so it is no error.
    fn attention_dropout(&mut self, key: &'static str, default: f64) -> Result<()> {
        let probability = self.number(key)?.unwrap_or(default);
        if probability != 0.0 {
            self.notes.push(format!(
                "`{key}` = {probability}: attention probabilities are not dropped here, in training either"
            ));
        }
        Ok(())
    }

    fn finish(&mut self) {
        for key in std::mem::take(&mut self.map).keys().filter(|key| !INERT.contains(&key.as_str())) {
            self.notes.push(format!("`{key}` is not known here and was not used"));
        }
    }
}
