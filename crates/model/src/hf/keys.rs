//! The keys of a `config.json` that are not used yet, and what several families read alike.

use super::ConfigError;
use crate::families::Sizes;
use crate::spec::{Activation, ModelSpec, RopeScaling, RopeSpec};
use serde_json::{Map, Value};

type Result<T> = std::result::Result<T, ConfigError>;

/// The keys not yet used.
#[derive(Debug)]
pub struct Keys {
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
    /// Of the text of a `config.json`.
    pub(super) fn of(text: &str) -> Result<Keys> {
        let value: Value = serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        let Value::Object(map) = value else {
            return Err(ConfigError::Json("it holds another JSON value".into()));
        };
        Ok(Keys { map, notes: Vec::new() })
    }

    /// Takes a key's value, whatever it is.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        // `remove` would move the last key into the gap; the order of notes should be the file's.
        self.map.shift_remove(key)
    }

    /// Gives `key` a value if the file does not have it.
    pub fn default(&mut self, key: &str, value: Value) {
        self.map.entry(key).or_insert(value);
    }

    /// True if the file does not have the key, or it was taken.
    pub fn absent(&self, key: &str) -> bool {
        !self.map.contains_key(key)
    }

    /// Takes a value that `read` understands; None if it is absent or null.
    pub fn typed<T>(
        &mut self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.take(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(ConfigError::Value { key: key.into(), expected, found: value.to_string() }),
            },
        }
    }

    /// Takes a string.
    pub fn text(&mut self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |value| value.as_str().map(String::from))
    }

    /// Takes a truth value.
    pub fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Takes a number.
    pub fn number(&mut self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Takes a size.
    pub fn optional_size(&mut self, key: &str) -> Result<Option<usize>> {
        // Anything larger is no size of a model, and sums and products of sizes must not overflow.
        let read = |value: &Value| value.as_u64().filter(|n| *n > 0 && *n < 1 << 31).map(|n| n as usize);
        self.typed(key, "a positive whole number below 2^31", read)
    }

    /// Takes a whole number, which may be 0.
    pub fn whole_number(&mut self, key: &str) -> Result<Option<usize>> {
        let read = |value: &Value| value.as_u64().filter(|n| *n < 1 << 31).map(|n| n as usize);
        self.typed(key, "a whole number below 2^31", read)
    }

    /// Takes a list of whole numbers; empty if it is absent or null.
    pub fn whole_numbers(&mut self, key: &str) -> Result<Vec<usize>> {
        let number = |value: &Value| value.as_u64().map(|n| n as usize);
        let read = |value: &Value| value.as_array()?.iter().map(number).collect();
        Ok(self.typed(key, "a list of whole numbers", read)?.unwrap_or_default())
    }

    /// Takes a size that has a default or must be there.
    pub fn size(&mut self, key: &'static str, default: Option<usize>) -> Result<usize> {
        self.optional_size(key)?.or(default).ok_or(ConfigError::Missing { key })
    }

    /// Takes the sizes of Llama and its relatives. `usual` are those of a file that leaves them
    /// out.
    pub fn sizes(&mut self, usual: Sizes) -> Result<Sizes> {
        Ok(Sizes {
            dim: self.size("hidden_size", Some(usual.dim))?,
            heads: self.size("num_attention_heads", Some(usual.heads))?,
            layers: self.size("num_hidden_layers", Some(usual.layers))?,
            vocab_size: self.size("vocab_size", Some(usual.vocab_size))?,
            max_positions: self.size("max_position_embeddings", Some(usual.max_positions))?,
        })
    }

    /// Takes the fields that Llama and its relatives read alike: `norm_eps` and `tied` are those of
    /// a file that leaves them out.
    pub fn decoder(&mut self, spec: &mut ModelSpec, norm_eps: f64, tied: bool) -> Result<()> {
        spec.norm_eps = self.number("rms_norm_eps")?.unwrap_or(norm_eps);
        spec.init_std = self.number("initializer_range")?.unwrap_or(0.02);
        spec.tie_embeddings = self.flag("tie_word_embeddings")?.unwrap_or(tied);
        Ok(())
    }

    /// Takes the numbers of key and value heads and the width of heads, where one follows from the
    /// number of heads.
    pub fn grouped_heads(&mut self, spec: &mut ModelSpec) -> Result<()> {
        spec.kv_heads = self.optional_size("num_key_value_heads")?.unwrap_or(spec.heads);
        match self.optional_size("head_dim")? {
            Some(head_dim) => spec.head_dim = head_dim,
            None => self.head_dim_divides(spec.dim, spec.heads)?,
        }
        Ok(())
    }

    /// Fails when `key` is there with a value that is none of `allowed` and not null.
    pub fn refuse(&mut self, key: &str, allowed: &[Value], why: &'static str) -> Result<()> {
        match self.take(key) {
            Some(value) if !value.is_null() && !allowed.contains(&value) => {
                Err(ConfigError::Unsupported { key: key.into(), value: value.to_string(), why })
            }
            _ => Ok(()),
        }
    }

    /// Notes a dropout of attention probabilities, which is not done here. It matters in training
    /// only, so it is no error.
    pub fn attention_dropout(&mut self, key: &'static str, default: f64) -> Result<()> {
        let probability = self.number(key)?.unwrap_or(default);
        if probability != 0.0 {
            self.notes.push(format!(
                "`{key}` = {probability}: attention probabilities are not dropped here, in training either"
            ));
        }
        Ok(())
    }

    /// A width of heads that follows from their number.
    pub fn head_dim_divides(&self, dim: usize, heads: usize) -> Result<()> {
        if heads != 0 && dim.is_multiple_of(heads) {
            return Ok(());
        }
        Err(ConfigError::Value {
            key: "num_attention_heads".into(),
            expected: "a divisor of hidden_size when there is no head_dim",
            found: format!("{heads} with hidden_size {dim}"),
        })
    }

    /// The layers with a window, ascending, from `layer_types`; None if that is absent.
    pub fn sliding_layers(&mut self, layers: usize) -> Result<Option<Vec<usize>>> {
        let Some(types) = self.take("layer_types").filter(|types| !types.is_null()) else { return Ok(None) };
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
        Ok(Some(sliding))
    }

    /// Rotary parameters as transformers 5 writes them (`rope_parameters`) or 4 did (`rope_theta`,
    /// `rope_scaling`).
    pub fn rope(&mut self, positions: usize) -> Result<RopeSpec> {
        let rope = self.partial_rope(positions)?;
        if rope.partial_factor != 1.0 {
            return Err(ConfigError::Unsupported {
                key: "partial_rotary_factor".into(),
                value: rope.partial_factor.to_string(),
                why: "these model types rotate whole heads",
            });
        }
        Ok(rope)
    }

    /// As [`Keys::rope`], where a part of each head may be rotated.
    pub fn partial_rope(&mut self, positions: usize) -> Result<RopeSpec> {
        let theta = self.number("rope_theta")?;
        let partial = self.number("partial_rotary_factor")?;
        let mut rules = Map::new();
        for key in ["rope_parameters", "rope_scaling"] {
            match self.take(key) {
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
        rotation(rules, theta.unwrap_or(10_000.0), partial.unwrap_or(1.0), positions)
    }

    /// The rotary parameters of layers that see everything and of those with a window, as
    /// transformers 5 writes them or 4 did (`rope_theta`, `rope_scaling`, `rope_local_base_freq`);
    /// `thetas` are the defaults.
    pub fn layered_rope(&mut self, positions: usize, thetas: [f64; 2]) -> Result<[RopeSpec; 2]> {
        let wrong = |key: &str, found: &Value| ConfigError::Value {
            key: key.into(),
            expected: "an object or null",
            found: found.to_string(),
        };
        let theta = self.number("rope_theta")?.unwrap_or(thetas[0]);
        let local = self.number("rope_local_base_freq")?.unwrap_or(thetas[1]);
        let mut object = |key: &str| match self.take(key) {
            None | Some(Value::Null) => Ok(Map::new()),
            Some(Value::Object(object)) => Ok(object),
            Some(other) => Err(wrong(key, &other)),
        };
        let mut scaling = object("rope_scaling")?;
        let mut layers = object("rope_parameters")?;
        let mut of = |key: &str| match layers.shift_remove(key) {
            None | Some(Value::Null) => Ok(Map::new()),
            Some(Value::Object(object)) => Ok(object),
            Some(other) => Err(wrong(key, &other)),
        };
        let (full, sliding) = (of("full_attention")?, of("sliding_attention")?);
        if let Some((key, value)) = layers.iter().next() {
            let why = "it has rules for full_attention and sliding_attention";
            return Err(ConfigError::Unsupported {
                key: format!("rope_parameters.{key}"),
                value: value.to_string(),
                why,
            });
        }
        scaling.extend(full);
        Ok([rotation(scaling, theta, 1.0, positions)?, rotation(sliding, local, 1.0, positions)?])
    }

    /// The probability of dropout, which a file gives for branches and again for the embedding.
    pub fn dropout(&mut self, branches: &str, embedding: &str, default: f64) -> Result<f64> {
        let dropout = self.number(branches)?.unwrap_or(default);
        let of_embedding = self.number(embedding)?.unwrap_or(default);
        if of_embedding == dropout {
            return Ok(dropout);
        }
        Err(ConfigError::Unsupported {
            key: embedding.into(),
            value: of_embedding.to_string(),
            why: "it must equal resid_pdrop: there is one dropout",
        })
    }

    /// The function inside the MLP.
    pub fn activation(&mut self, key: &'static str, default: &str) -> Result<Activation> {
        let name = self.text(key)?.unwrap_or_else(|| default.into());
        Ok(match name.as_str() {
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            "relu2" => Activation::ReluSquared,
            "silu" | "swish" => Activation::Silu,
            _ => {
                let why = "supported are gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu, relu2, silu, swish";
                return Err(ConfigError::Unsupported { key: key.into(), value: name, why });
            }
        })
    }

    /// The special tokens.
    pub(super) fn special_tokens(&mut self, spec: &mut ModelSpec) -> Result<()> {
        let vocab = spec.vocab_size as u64;
        let mut token = |key: &'static str| -> Result<Vec<u32>> {
            let Some(value) = self.take(key) else { return Ok(Vec::new()) };
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
                self.notes
                    .push(format!("`{key}` = {outside} is outside of the vocabulary of {vocab} and was not used"));
            }
            Ok(ids.into_iter().filter(|id| *id < vocab).map(|id| id as u32).collect())
        };
        spec.bos_token = token("bos_token_id")?.first().copied();
        spec.eos_tokens = token("eos_token_id")?;
        spec.pad_token = token("pad_token_id")?.first().copied();
        Ok(())
    }

    /// Notes the keys that nobody used; returns all notes.
    pub(super) fn finish(mut self) -> Vec<String> {
        for key in std::mem::take(&mut self.map).keys().filter(|key| !INERT.contains(&key.as_str())) {
            self.notes.push(format!("`{key}` is not known here and was not used"));
        }
        self.notes
    }
}

/// A rotation from its rules; `theta`, `partial` and `positions` are what they do not say.
fn rotation(rules: Map<String, Value>, theta: f64, partial: f64, positions: usize) -> Result<RopeSpec> {
    let mut rules = Keys { map: rules, notes: Vec::new() };
    let theta = rules.number("rope_theta")?.unwrap_or(theta);
    let partial_factor = rules.number("partial_rotary_factor")?.unwrap_or(partial);
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
