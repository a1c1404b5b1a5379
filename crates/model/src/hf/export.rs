//! Turns a [`ModelSpec`] into `config.json`.

use super::ConfigError;
use crate::spec::{Activation, Family, ModelSpec, RopeScaling};
use serde_json::{Map, Value, json};
use trainyard_tensor::DType;

/// The classes that transformers has for a specification.
struct Class {
    model_type: &'static str,
    architecture: &'static str,
}

/// The first class that can express `spec`.
fn class(spec: &ModelSpec) -> Result<Class, ConfigError> {
    let class = |model_type, architecture| Ok(Class { model_type, architecture });
    let no = |what: &str| Err(ConfigError::NoEquivalent(what.into()));
    if spec.family == Family::Gpt2 {
        if spec.kv_heads != spec.heads || spec.heads * spec.head_dim != spec.dim {
            return no("GPT-2 blocks with heads other than dim / heads wide, or grouped");
        }
        if spec.sliding_window.is_some() {
            return no("GPT-2 blocks with a sliding window");
        }
        return class("gpt2", "GPT2LMHeadModel");
    }
    if spec.rotary_dim() != spec.head_dim {
        return no("Llama blocks that rotate part of a head");
    }
    let (qkv, o, mlp, window) = (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.sliding_window.is_some());
    match (spec.qk_norm, qkv, o, mlp, window) {
        (true, qkv, o, false, _) if qkv == o => class("qwen3", "Qwen3ForCausalLM"),
        (true, ..) => no("query/key norms with biases on some of the projections only"),
        (false, qkv, o, _, false) if qkv == o => class("llama", "LlamaForCausalLM"),
        (false, true, false, false, _) => class("qwen2", "Qwen2ForCausalLM"),
        (false, false, false, false, true) if spec.sliding_layers.is_none() => class("mistral", "MistralForCausalLM"),
        (.., true) => {
            no("a sliding window with these biases, or in some layers only without query/key norms or biases")
        }
        _ => no("biases on this choice of projections"),
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
                set("attention_bias", json!(spec.qkv_bias));
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

/// Tensors that a Hugging Face class requires although the model has none: the biases of a GPT-2
/// without biases. Zeros there change nothing.
pub fn implied_zeros(spec: &ModelSpec) -> Vec<(String, Vec<usize>)> {
    let mut zeros = Vec::new();
    if spec.family != Family::Gpt2 {
        return zeros;
    }
    let mut bias = |present: bool, name: String, size: usize| {
        if !present {
            zeros.push((format!("transformer.{name}.bias"), vec![size]));
        }
    };
    for layer in 0..spec.layers {
        bias(spec.norm_bias, format!("h.{layer}.ln_1"), spec.dim);
        bias(spec.norm_bias, format!("h.{layer}.ln_2"), spec.dim);
        bias(spec.qkv_bias, format!("h.{layer}.attn.c_attn"), spec.qkv_dim());
        bias(spec.o_bias, format!("h.{layer}.attn.c_proj"), spec.dim);
        bias(spec.mlp_bias, format!("h.{layer}.mlp.c_fc"), spec.ffn_dim);
        bias(spec.mlp_bias, format!("h.{layer}.mlp.c_proj"), spec.dim);
    }
    bias(spec.norm_bias, "ln_f".into(), spec.dim);
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
