//! Named model shapes as keys of `[model]`. The shapes come from the model crate. Keys that would
//! be derived anyway are left out, so that a key written beside a preset (`dim`, `layers`) still
//! changes the keys that depend on it.

use super::sections::{Activation, RopeScaling};
use toml::{Table, Value};
use trainyard_model::families::Sizes;
use trainyard_model::{Activation as ModelActivation, ModelSpec, RopeScaling as Scaling};

/// Every name that `model.preset` takes.
pub const PRESETS: &[&str] = &trainyard_model::PRESET_NAMES;

/// The keys of `[model]` that the preset sets; `None` when there is no such preset.
pub fn find(name: &str) -> Option<Table> {
    trainyard_model::preset(name).ok().map(|spec| keys(&spec))
}

/// The key's value for an activation.
pub(super) fn activation(activation: ModelActivation) -> Activation {
    match activation {
        ModelActivation::Silu => Activation::Silu,
        ModelActivation::Gelu => Activation::Gelu,
        ModelActivation::GeluTanh => Activation::GeluTanh,
        ModelActivation::Relu => Activation::Relu,
        ModelActivation::ReluSquared => Activation::ReluSquared,
    }
}

fn keys(spec: &ModelSpec) -> Table {
    let mut keys = Table::new();
    let mut set = |key: &str, value: Value| drop(keys.insert(key.to_owned(), value));
    let whole = |n: usize| Value::Integer(n as i64);
    let ModelSpec { vocab_size, dim, layers, heads, max_positions, .. } = *spec;
    let usual = spec.family.usual(&Sizes { vocab_size, dim, layers, heads, max_positions });
    set("family", Value::String(spec.family.name().to_owned()));
    for (key, value, usual) in [
        ("dim", spec.dim, 0),
        ("layers", spec.layers, 0),
        ("heads", spec.heads, 0),
        ("kv_heads", spec.kv_heads, usual.kv_heads),
        ("head_dim", spec.head_dim, usual.head_dim),
        ("ffn_dim", spec.ffn_dim, usual.ffn_dim),
        ("vocab_size", spec.vocab_size, 0),
        ("max_sequence_length", spec.max_positions, 0),
    ] {
        // The classes of images come from the data, the positions from the images.
        let of_data = spec.image.is_some() && ["vocab_size", "max_sequence_length"].contains(&key);
        if value != usual && !of_data {
            set(key, whole(value));
        }
    }
    for (key, value, usual) in
        [("norm_eps", spec.norm_eps, usual.norm_eps), ("init_std", spec.init_std, usual.init_std)]
    {
        if value != usual {
            set(key, Value::Float(value));
        }
    }
    for (key, value, usual) in [
        ("tie_embeddings", spec.tie_embeddings, usual.tie_embeddings),
        ("qkv_bias", spec.qkv_bias, usual.qkv_bias),
        ("output_bias", spec.o_bias, usual.o_bias),
        ("mlp_bias", spec.mlp_bias, usual.mlp_bias),
        ("qk_norm", spec.qk_norm, usual.qk_norm),
        ("value_residual", spec.value_residual, usual.value_residual),
    ] {
        if value != usual {
            set(key, Value::Boolean(value));
        }
    }
    let half = usual.encoder.map(|encoder| encoder.layers);
    if let Some(layers) = spec.encoder.map(|encoder| encoder.layers).filter(|layers| Some(*layers) != half) {
        set("encoder_layers", whole(layers));
    }
    if let Some(base) = spec.mup_base_dim {
        set("mup_base_dim", whole(base));
    }
    if let Some(window) = spec.sliding_window.filter(|window| Some(*window) != usual.sliding_window) {
        set("sliding_window", whole(window));
    }
    if spec.activation != usual.activation {
        set("activation", Value::String(activation(spec.activation).name().to_owned()));
    }
    let Some(rope) = &spec.rope else { return keys };
    if Some(rope.theta) != usual.rope.as_ref().map(|rope| rope.theta) {
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
