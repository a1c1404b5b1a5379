//! The keys of a `config.json` that is being written.

use crate::spec::{Activation, ModelSpec, RopeScaling, RopeSpec};
use serde_json::{Map, Value, json};

/// The keys so far, in order.
#[derive(Debug, Default)]
pub struct Written {
    map: Map<String, Value>,
}

impl Written {
    /// Sets a key.
    pub fn set(&mut self, key: &str, value: Value) {
        self.map.insert(key.into(), value);
    }

    /// The keys that Llama and its relatives share, all but activations, biases, windows and
    /// rotations.
    pub fn decoder(&mut self, spec: &ModelSpec) {
        self.set("hidden_size", json!(spec.dim));
        self.set("num_hidden_layers", json!(spec.layers));
        self.set("num_attention_heads", json!(spec.heads));
        self.set("num_key_value_heads", json!(spec.kv_heads));
        self.set("head_dim", json!(spec.head_dim));
        self.set("intermediate_size", json!(spec.ffn_dim));
        self.set("max_position_embeddings", json!(spec.max_positions));
        self.set("rms_norm_eps", json!(spec.norm_eps));
        self.set("attention_dropout", json!(0.0));
    }

    /// The function inside the MLP.
    pub fn activation(&mut self, spec: &ModelSpec) {
        self.set("hidden_act", json!(activation_name(spec.activation)));
    }

    /// The kind of attention of each layer.
    pub fn layer_types(&mut self, spec: &ModelSpec) {
        let kind = |layer| if spec.window(layer).is_some() { "sliding_attention" } else { "full_attention" };
        self.set("layer_types", (0..spec.layers).map(kind).collect());
    }

    /// The rotary keys, as transformers 5 and as 4 has them.
    pub fn rope(&mut self, rope: Option<&RopeSpec>) {
        let Some(rope) = rope else { return };
        let mut rules = rope_rules(rope);
        self.set("rope_theta", json!(rope.theta));
        self.set("rope_scaling", if rope.scaling.is_some() { Value::Object(rules.clone()) } else { Value::Null });
        rules.insert("rope_theta".into(), json!(rope.theta));
        self.set("rope_parameters", Value::Object(rules));
    }

    /// As [`Written::rope`], for classes that may rotate a part of each head.
    pub fn partial_rope(&mut self, rope: Option<&RopeSpec>) {
        self.rope(rope);
        let (Some(rope), Some(Value::Object(rules))) = (rope, self.map.get_mut("rope_parameters")) else { return };
        rules.insert("partial_rotary_factor".into(), json!(rope.partial_factor));
        self.set("partial_rotary_factor", json!(rope.partial_factor));
    }

    /// The rotary keys of layers that see everything and of those with a window, as transformers 5
    /// and as 4 has them.
    pub fn layered_rope(&mut self, full: Option<&RopeSpec>, sliding: Option<&RopeSpec>) {
        let (Some(full), Some(sliding)) = (full, sliding) else { return };
        let rules = |rope: &RopeSpec| {
            let mut rules = rope_rules(rope);
            rules.insert("rope_theta".into(), json!(rope.theta));
            Value::Object(rules)
        };
        self.set("rope_theta", json!(full.theta));
        self.set("rope_local_base_freq", json!(sliding.theta));
        self.set("rope_scaling", if full.scaling.is_some() { Value::Object(rope_rules(full)) } else { Value::Null });
        self.set("rope_parameters", json!({"full_attention": rules(full), "sliding_attention": rules(sliding)}));
    }

    /// The keys.
    pub(super) fn finish(self) -> Map<String, Value> {
        self.map
    }
}

/// The rules of a rotation, all but its theta.
fn rope_rules(rope: &RopeSpec) -> Map<String, Value> {
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
    rules
}

/// The name of an activation in transformers.
pub fn activation_name(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_new",
        Activation::Relu => "relu",
        Activation::ReluSquared => "relu2",
    }
}
