//! Named model shapes as keys of `[model]`. The shapes come from the model crate. Keys that would
//! be derived anyway are left out, so that a key written beside a preset (`dim`, `layers`) still
//! changes the keys that depend on it.

use super::sections::{Activation, Family, RopeScaling};
use toml::{Table, Value};
use trainyard_model::{Activation as ModelActivation, Family as ModelFamily, ModelSpec, RopeScaling as Scaling};

/// Every name that `model.preset` takes.
pub const PRESETS: &[&str] = &trainyard_model::PRESET_NAMES;

/// The keys of `[model]` that the preset sets; `None` when there is no such preset.
pub fn find(name: &str) -> Option<Table> {
    trainyard_model::preset(name).ok().map(|spec| keys(&spec))
}

/// The width of the MLP when none is given.
pub(super) fn usual_ffn_dim(family: Family, dim: usize) -> usize {
    match family {
        Family::Gpt2 => 4 * dim,
        Family::Llama => (8 * dim).div_ceil(3).next_multiple_of(64),
    }
}

fn keys(spec: &ModelSpec) -> Table {
    let mut keys = Table::new();
    let mut set = |key: &str, value: Value| drop(keys.insert(key.to_owned(), value));
    let whole = |n: usize| Value::Integer(n as i64);
    let gpt2 = spec.family == ModelFamily::Gpt2;
    let family = if gpt2 { Family::Gpt2 } else { Family::Llama };
    set("family", Value::String(family.name().to_owned()));
    for (key, value, usual) in [
        ("dim", spec.dim, 0),
        ("layers", spec.layers, 0),
        ("heads", spec.heads, 0),
        ("kv_heads", spec.kv_heads, spec.heads),
        ("head_dim", spec.head_dim, spec.dim / spec.heads.max(1)),
        ("ffn_dim", spec.ffn_dim, usual_ffn_dim(family, spec.dim)),
        ("vocab_size", spec.vocab_size, 0),
        ("max_sequence_length", spec.max_positions, 0),
    ] {
        if value != usual {
            set(key, whole(value));
        }
    }
    for (key, value, usual) in [("norm_eps", spec.norm_eps, 1e-5), ("init_std", spec.init_std, 0.02)] {
        if value != usual {
            set(key, Value::Float(value));
        }
    }
    for (key, value, usual) in [
        ("tie_embeddings", spec.tie_embeddings, gpt2),
        ("qkv_bias", spec.qkv_bias, gpt2),
        ("output_bias", spec.o_bias, gpt2),
        ("mlp_bias", spec.mlp_bias, gpt2),
        ("qk_norm", spec.qk_norm, false),
    ] {
        if value != usual {
            set(key, Value::Boolean(value));
        }
    }
    if let Some(window) = spec.sliding_window {
        set("sliding_window", whole(window));
    }
    let activation = match spec.activation {
        ModelActivation::Silu => Activation::Silu,
        ModelActivation::Gelu => Activation::Gelu,
        ModelActivation::GeluTanh => Activation::GeluTanh,
        ModelActivation::Relu => Activation::Relu,
    };
    if activation != if gpt2 { Activation::GeluTanh } else { Activation::Silu } {
        set("activation", Value::String(activation.name().to_owned()));
    }
    let Some(rope) = &spec.rope else { return keys };
    if rope.theta != 10_000.0 {
        set("rope_theta", Value::Float(rope.theta));
    }
    let mut scaled = |kind: RopeScaling, factor: f64, more: &[(&str, f64, f64)], original: Option<usize>| {
        set("rope_scaling", Value::String(kind.name().to_owned()));
        set("rope_factor", Value::Float(factor));
        if let Some(original) = original {
            set("rope_original_length", whole(original));
        }
        for (key, value, usual) in more {
            if value != usual {
                set(key, Value::Float(*value));
            }
        }
    };
    match rope.scaling {
        None => {}
        Some(Scaling::Linear { factor }) => scaled(RopeScaling::Linear, factor, &[], None),
        Some(Scaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_max_positions }) => {
            let more = [("rope_low_freq_factor", low, 1.0), ("rope_high_freq_factor", high, 4.0)];
            scaled(RopeScaling::Llama3, factor, &more, Some(original_max_positions));
        }
        Some(Scaling::Yarn { factor, original_max_positions, beta_fast, beta_slow, .. }) => {
            let more = [("rope_beta_fast", beta_fast, 32.0), ("rope_beta_slow", beta_slow, 1.0)];
            scaled(RopeScaling::Yarn, factor, &more, Some(original_max_positions));
        }
    }
    keys
}
