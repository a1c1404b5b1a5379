//! Turns a [`ModelSpec`] into `config.json`.

use super::{ConfigError, Written};
use crate::families::Class;
use crate::spec::ModelSpec;
use serde_json::{Map, Value, json};
use trainyard_tensor::DType;

/// The class that a model goes out as: the one that it came as, else the usual one.
fn class(spec: &ModelSpec) -> Result<Class, ConfigError> {
    if spec.value_residual {
        return Err(ConfigError::NoEquivalent(format!("{} blocks with value residuals", spec.family.title())));
    }
    let able = spec.family.able(spec)?;
    let came_as = able.iter().find(|class| Some(class.model_type) == spec.model_type.as_deref());
    let none = || ConfigError::NoEquivalent(format!("{} blocks of this shape", spec.family.title()));
    came_as.or(able.first()).copied().ok_or_else(none)
}

/// The `model_type` that a model of this shape goes out as when nothing is known of where it came
/// from; None where there is none.
pub(super) fn usual(spec: &ModelSpec) -> Option<&'static str> {
    class(&ModelSpec { model_type: None, ..spec.clone() }).ok().map(|class| class.model_type)
}

/// A warning, before training, that this model cannot be exported or goes out with a catch.
pub fn export_note(spec: &ModelSpec) -> Option<String> {
    match class(spec) {
        Err(why) => Some(format!(
            "this model can be trained and evaluated, but `trainyard export` will refuse it: {why}; change the shape if transformers is to load it"
        )),
        Ok(class) => spec.family.export_catch(spec, class).map(str::to_owned),
    }
}

/// The text of a `config.json` with which transformers (4 and 5) builds this model; `dtype` is that
/// of the weights.
pub fn config_json(spec: &ModelSpec, dtype: DType) -> Result<String, ConfigError> {
    let class = class(spec)?;
    let mut keys = Written::default();
    keys.set("architectures", json!([class.architecture]));
    keys.set("model_type", json!(class.model_type));
    keys.set("initializer_range", json!(spec.init_std));
    if spec.image.is_none() {
        keys.set("vocab_size", json!(spec.vocab_size));
        keys.set("tie_word_embeddings", json!(spec.tie_embeddings));
        keys.set("use_cache", json!(true));
        keys.set("bos_token_id", json!(spec.bos_token));
        keys.set("eos_token_id", eos(spec));
        keys.set("pad_token_id", json!(spec.pad_token));
    }
    spec.family.write_config(spec, class, &mut keys);
    // transformers 5 and 4, in this order.
    keys.set("dtype", json!(dtype_name(dtype)));
    keys.set("torch_dtype", json!(dtype_name(dtype)));
    Ok(pretty(Value::Object(keys.finish())))
}

/// The text of a `generation_config.json`: the special tokens, and no opinion on sampling.
pub fn generation_config_json(spec: &ModelSpec) -> String {
    let tokens =
        [("bos_token_id", json!(spec.bos_token)), ("eos_token_id", eos(spec)), ("pad_token_id", json!(spec.pad_token))];
    let set = tokens.into_iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.to_string(), value));
    pretty(Value::Object(set.collect()))
}

/// The ids of `eos_token_id` of the text of a `generation_config.json`.
///
/// # Errors
///
/// It is no JSON object, or the key holds something else.
pub fn generation_eos(text: &str) -> Result<Vec<u32>, ConfigError> {
    let map: Map<String, Value> = serde_json::from_str(text).map_err(|e| ConfigError::Generation(e.to_string()))?;
    let ids = match map.get("eos_token_id") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(ids)) => ids.clone(),
        Some(id) => vec![id.clone()],
    };
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let wrong = |found: &Value| ConfigError::Generation(format!("eos_token_id has {found}, which is no token id"));
    ids.iter().map(|value| id(value).ok_or_else(|| wrong(value))).collect()
}

/// Tensors that a Hugging Face class insists on although the model has none, which as zeros change
/// nothing: the biases of a GPT-2 without them, and of a Llama's projections where some have one.
pub fn implied_zeros(spec: &ModelSpec) -> Vec<(String, Vec<usize>)> {
    class(spec).map_or_else(|_| Vec::new(), |class| spec.family.implied_zeros(spec, class))
}

fn eos(spec: &ModelSpec) -> Value {
    match spec.eos_tokens.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        several => json!(several),
    }
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

pub(super) fn pretty(value: Value) -> String {
    let mut text = serde_json::to_string_pretty(&value).expect("a JSON value of strings and numbers");
    text.push('\n');
    text
}
