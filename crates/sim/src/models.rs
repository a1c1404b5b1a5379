//! Models by name, and from descriptions of this project's own models.

use crate::transformer::{Architecture, Experts};
use std::collections::BTreeMap;
use trainyard_model::ModelSpec;
use trainyard_model::families::MlpKind;

/// Every named model, with its shape.
pub fn models() -> BTreeMap<String, Architecture> {
    toml::from_str(include_str!("../data/models.toml")).expect("built-in models are tested")
}

/// Returns the model called `name`.
///
/// # Errors
///
/// An unknown name; the error lists the names that exist.
pub fn model(name: &str) -> Result<Architecture, String> {
    let mut all = models();
    all.remove(name).ok_or_else(|| {
        let known: Vec<String> = models().into_keys().collect();
        format!("no model is called `{name}`; known: {}; or give a config.json", known.join(", "))
    })
}

impl From<&ModelSpec> for Architecture {
    /// The shape of one of this project's models, from a configuration or from a Hugging Face
    /// `config.json`.
    fn from(spec: &ModelSpec) -> Architecture {
        Architecture {
            dim: spec.dim as u32,
            layers: spec.layers as u32,
            encoder_layers: 0,
            heads: spec.heads as u32,
            kv_heads: spec.kv_heads as u32,
            head_dim: spec.head_dim as u32,
            ffn: spec.experts.as_ref().map_or(spec.ffn_dim, |experts| experts.ffn_dim) as u32,
            vocab: spec.vocab_size as u32,
            gated: spec.family.form().mlp == MlpKind::Gated,
            tied: spec.tie_embeddings,
            positions: spec.learned_positions().unwrap_or(0) as u32,
            experts: spec.experts.as_ref().map(|experts| Experts {
                count: experts.experts as u32,
                per_token: experts.top_k as u32,
                shared_ffn: experts.shared_ffn_dim as u32,
                imbalance: Experts::NATURAL,
            }),
            latent: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters as published, in the unit of the name.
    #[test]
    fn models_have_the_published_sizes() {
        for (name, billions) in [
            ("gpt2-124m", 0.124),
            ("gpt2-1.5b", 1.558),
            ("gpt3-175b", 174.6),
            ("megatron-1.7b", 1.66),
            ("megatron-145b", 145.6),
            ("megatron-530b", 529.6),
            ("megatron-1t", 1008.0),
            ("llama-7b", 6.738),
            ("llama-13b", 13.02),
            ("llama2-70b", 68.98),
            ("llama-1b", 1.236),
            ("llama-3b", 3.21),
            ("llama-8b", 8.03),
            ("llama-70b", 70.55),
            ("llama-405b", 405.9),
            ("mistral-7b", 7.24),
            ("mixtral-8x7b", 46.7),
            ("qwen2.5-0.5b", 0.494),
            ("qwen2.5-72b", 72.7),
            ("qwen3-30b-a3b", 30.5),
            ("t5-base", 0.223),
            ("t5-3b", 2.85),
            ("t5-11b", 11.3),
            ("t5-611m", 0.611),
            ("t5-2.28b", 2.28),
            ("t5-11.3b", 11.3),
        ] {
            let ours = model(name).unwrap().parameters() / 1e9;
            assert!((ours / billions - 1.0).abs() < 0.025, "{name}: {ours:.3}");
        }
        assert!(model("gpt5").unwrap_err().contains("gpt3-175b"));
    }

    #[test]
    fn this_projects_presets_are_the_same_models() {
        for name in ["gpt2-124m", "gpt2-774m", "llama-1b", "llama-7b", "llama-8b", "qwen2.5-0.5b", "mistral-7b"] {
            let spec = trainyard_model::preset(name).unwrap();
            assert_eq!(Architecture::from(&spec), model(name).unwrap(), "{name}");
        }
    }
}
