//! Turns a [`ModelSpec`] into `config.json`.

use super::ConfigError;
use crate::spec::{Activation, Family, ModelSpec, RopeScaling};
use serde_json::{Map, Value, json};
use trainyard_tensor::DType;

/// A class of transformers.
#[derive(Clone, Copy)]
struct Class {
    model_type: &'static str,
    architecture: &'static str,
}

const GPT2: Class = Class { model_type: "gpt2", architecture: "GPT2LMHeadModel" };
const LLAMA: Class = Class { model_type: "llama", architecture: "LlamaForCausalLM" };
const MISTRAL: Class = Class { model_type: "mistral", architecture: "MistralForCausalLM" };
const QWEN2: Class = Class { model_type: "qwen2", architecture: "Qwen2ForCausalLM" };
const QWEN3: Class = Class { model_type: "qwen3", architecture: "Qwen3ForCausalLM" };

/// The classes that can express a specification of the `llama` family, the usual one first.
///
/// `attention_bias` of Llama and Qwen3 is on all four projections: biases that the model has not
/// are zeros ([`implied_zeros`]). Qwen2, which has three, comes after Llama, because transformers
/// splits text for it by a class of its own, whatever `tokenizer.json` says.
fn classes(spec: &ModelSpec) -> Vec<Class> {
    let (biases, window) = ((spec.qkv_bias, spec.o_bias, spec.mlp_bias), spec.sliding_window.is_some());
    let able = [
        (LLAMA, !spec.qk_norm && !window),
        (MISTRAL, !spec.qk_norm && biases == (false, false, false) && spec.sliding_layers.is_none()),
        (QWEN2, !spec.qk_norm && biases == (true, false, false)),
        (QWEN3, spec.qk_norm && !spec.mlp_bias),
    ];
    able.into_iter().filter_map(|(class, able)| able.then_some(class)).collect()
}

/// The class that a model goes out as: the one that it came as, else the usual one.
fn class(spec: &ModelSpec) -> Result<Class, ConfigError> {
    let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
    if spec.family == Family::Gpt2 {
        if spec.kv_heads != spec.heads || spec.heads * spec.head_dim != spec.dim {
            return no("GPT-2 blocks with heads other than dim / heads wide, or grouped");
        }
        if spec.sliding_window.is_some() {
            return no("GPT-2 blocks with a sliding window");
        }
        return Ok(GPT2);
    }
    if spec.rotary_dim() != spec.head_dim {
        return no("Llama blocks that rotate part of a head");
    }
    let classes = classes(spec);
    let came_as = classes.iter().find(|class| Some(class.model_type) == spec.model_type.as_deref());
    match came_as.or(classes.first()) {
        Some(class) => Ok(*class),
        None if spec.qk_norm => no("query/key norms together with biases in the MLP"),
        None => no("a sliding window with these biases, or in some layers only without query/key norms or biases"),
    }
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
        Ok(class) if class.model_type == QWEN2.model_type && spec.model_type.is_none() => Some(
            "only Qwen2 has this sliding window together with these biases: transformers will load the exported model, but split its text as Qwen2 does, \
             whatever the tokenizer.json says; set model.qkv_bias = false or leave out model.sliding_window to avoid that"
                .to_owned(),
        ),
        Ok(_) => None,
    }
}

/// The text of a `config.json` with which transformers (4 and 5) builds this model; `dtype` is that
/// of the weights.
pub fn config_json(spec: &ModelSpec, dtype: DType) -> Result<String, ConfigError> {
    let class = class(spec)?;
    let mut map = Map::new();
    let mut set = |key: &str, value: Value| map.insert(key.into(), value);
    set("architectures", json!([class.architecture]));
    set("model_type", json!(class.model_type));
    set("vocab_size", json!(spec.vocab_size));
    set("tie_word_embeddings", json!(spec.tie_embeddings));
    set("initializer_range", json!(spec.init_std));
    set("use_cache", json!(true));
    set("bos_token_id", json!(spec.bos_token));
    set("eos_token_id", eos(spec));
    set("pad_token_id", json!(spec.pad_token));
    match spec.family {
        Family::Gpt2 => {
            set("n_embd", json!(spec.dim));
            set("n_layer", json!(spec.layers));
            set("n_head", json!(spec.heads));
            set("n_positions", json!(spec.max_positions));
            set("n_inner", if spec.ffn_dim == 4 * spec.dim { Value::Null } else { json!(spec.ffn_dim) });
            set("activation_function", json!(activation(spec.activation)));
            set("layer_norm_epsilon", json!(spec.norm_eps));
            set("resid_pdrop", json!(spec.dropout));
            set("embd_pdrop", json!(spec.dropout));
            set("attn_pdrop", json!(0.0));
        }
        Family::Llama => {
            set("hidden_size", json!(spec.dim));
            set("num_hidden_layers", json!(spec.layers));
            set("num_attention_heads", json!(spec.heads));
            set("num_key_value_heads", json!(spec.kv_heads));
            set("head_dim", json!(spec.head_dim));
            set("intermediate_size", json!(spec.ffn_dim));
            set("max_position_embeddings", json!(spec.max_positions));
            set("hidden_act", json!(activation(spec.activation)));
            set("rms_norm_eps", json!(spec.norm_eps));
            set("attention_dropout", json!(0.0));
            if matches!(class.model_type, "llama" | "qwen3") {
                set("attention_bias", json!(spec.qkv_bias || spec.o_bias));
            }
            if class.model_type == "llama" {
                set("mlp_bias", json!(spec.mlp_bias));
            }
            set_windows(spec, class.model_type, &mut set);
            set_rope(spec, &mut set);
        }
    }
    // transformers 5 and 4, in this order.
    set("dtype", json!(dtype_name(dtype)));
    set("torch_dtype", json!(dtype_name(dtype)));
    Ok(pretty(Value::Object(map)))
}

fn set_windows(spec: &ModelSpec, model_type: &str, set: &mut impl FnMut(&str, Value) -> Option<Value>) {
    match model_type {
        "mistral" => {
            set("sliding_window", json!(spec.sliding_window));
        }
        "qwen2" | "qwen3" => {
            set("use_sliding_window", json!(spec.sliding_window.is_some()));
            set("sliding_window", json!(spec.sliding_window));
            let kind = |layer| if spec.window(layer).is_some() { "sliding_attention" } else { "full_attention" };
            set("layer_types", (0..spec.layers).map(kind).collect());
            let full_first = (0..spec.layers).take_while(|layer| spec.window(*layer).is_none()).count();
            set("max_window_layers", json!(full_first));
        }
        _ => {}
    }
}

fn set_rope(spec: &ModelSpec, set: &mut impl FnMut(&str, Value) -> Option<Value>) {
    let Some(rope) = &spec.rope else { return };
    let mut rules = Map::new();
    match &rope.scaling {
        None => {
            rules.insert("rope_type".into(), json!("default"));
        }
        Some(RopeScaling::Linear { factor }) => {
            rules.insert("rope_type".into(), json!("linear"));
            rules.insert("factor".into(), json!(factor));
        }
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions }) => {
            rules.insert("rope_type".into(), json!("llama3"));
            rules.insert("factor".into(), json!(factor));
            rules.insert("low_freq_factor".into(), json!(low_freq_factor));
            rules.insert("high_freq_factor".into(), json!(high_freq_factor));
            rules.insert("original_max_position_embeddings".into(), json!(original_max_positions));
        }
        Some(RopeScaling::Yarn {
            factor,
            original_max_positions,
            beta_fast,
            beta_slow,
            attention_factor,
            mscale,
            mscale_all_dim,
            truncate,
        }) => {
            rules.insert("rope_type".into(), json!("yarn"));
            rules.insert("factor".into(), json!(factor));
            rules.insert("original_max_position_embeddings".into(), json!(original_max_positions));
            rules.insert("beta_fast".into(), json!(beta_fast));
            rules.insert("beta_slow".into(), json!(beta_slow));
            for (key, value) in
                [("attention_factor", attention_factor), ("mscale", mscale), ("mscale_all_dim", mscale_all_dim)]
            {
                if let Some(value) = value {
                    rules.insert(key.into(), json!(value));
                }
            }
            rules.insert("truncate".into(), json!(truncate));
        }
    }
    set("rope_theta", json!(rope.theta));
    set("rope_scaling", if rope.scaling.is_some() { Value::Object(rules.clone()) } else { Value::Null });
    rules.insert("rope_theta".into(), json!(rope.theta));
    set("rope_parameters", Value::Object(rules));
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
    let mut zeros = Vec::new();
    let mut bias = |present: bool, name: String, size: usize| {
        if !present {
            zeros.push((format!("{}{name}.bias", crate::units::prefix(spec)), vec![size]));
        }
    };
    match spec.family {
        Family::Gpt2 => {
            for layer in 0..spec.layers {
                bias(spec.norm_bias, format!("h.{layer}.ln_1"), spec.dim);
                bias(spec.norm_bias, format!("h.{layer}.ln_2"), spec.dim);
                bias(spec.qkv_bias, format!("h.{layer}.attn.c_attn"), spec.qkv_dim());
                bias(spec.o_bias, format!("h.{layer}.attn.c_proj"), spec.dim);
                bias(spec.mlp_bias, format!("h.{layer}.mlp.c_fc"), spec.ffn_dim);
                bias(spec.mlp_bias, format!("h.{layer}.mlp.c_proj"), spec.dim);
            }
            bias(spec.norm_bias, "ln_f".into(), spec.dim);
        }
        Family::Llama => {
            let has_attention_bias = class(spec).is_ok_and(|class| matches!(class.model_type, "llama" | "qwen3"));
            if !has_attention_bias || spec.qkv_bias == spec.o_bias {
                return zeros;
            }
            for layer in 0..spec.layers {
                for (name, heads) in [("q_proj", spec.heads), ("k_proj", spec.kv_heads), ("v_proj", spec.kv_heads)] {
                    bias(spec.qkv_bias, format!("layers.{layer}.self_attn.{name}"), heads * spec.head_dim);
                }
                bias(spec.o_bias, format!("layers.{layer}.self_attn.o_proj"), spec.dim);
            }
        }
    }
    zeros
}

fn eos(spec: &ModelSpec) -> Value {
    match spec.eos_tokens.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        several => json!(several),
    }
}

fn activation(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_new",
        Activation::Relu => "relu",
    }
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

fn pretty(value: Value) -> String {
    let mut text = serde_json::to_string_pretty(&value).expect("a JSON value of strings and numbers");
    text.push('\n');
    text
}
