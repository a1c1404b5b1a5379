//! Models by name, and from descriptions of this project's own models.

use crate::transformer::{Architecture, Experts};
use std::collections::BTreeMap;
use trainyard_model::ModelSpec;

/// Every named model, with its shape.
pub fn models() -> BTreeMap<String, Architecture> {
    toml::from_str(include_str!("../data/models.toml")).expect("built-in models are tested")
}

/// Returns the model called `name`, as here or as people and Hugging Face call it: `llama-405b`,
/// `llama3-405b` and `meta-llama/Llama-3.1-405B-Instruct` are one model.
///
/// # Errors
///
/// An unknown name; the error lists the names that exist.
pub fn model(name: &str) -> Result<Architecture, String> {
    let mut all = models();
    all.remove(name).or_else(|| all.remove(&usual_name(name))).ok_or_else(|| {
        let known: Vec<String> = models().into_keys().collect();
        format!("no model is called `{name}`; known: {}; or give a config.json", known.join(", "))
    })
}

/// The name here of a model, if `name` is another name of one of [`models`]: without the
/// organisation, in lower case, without the kind of training, and with the generation of Llama only
/// where the shape depends on it.
pub fn usual_name(name: &str) -> String {
    let name = name.rsplit('/').next().unwrap_or(name).to_lowercase().replace('_', "-");
    let mut name = name.strip_prefix("meta-").unwrap_or(&name);
    while let Some(shorter) =
        ["-instruct", "-base", "-hf", "-v0.1", "-v0.2", "-v0.3"].iter().find_map(|ending| name.strip_suffix(ending))
    {
        name = shorter;
    }
    let gpt2 =
        [("gpt2", "gpt2-124m"), ("gpt2-medium", "gpt2-355m"), ("gpt2-large", "gpt2-774m"), ("gpt2-xl", "gpt2-1.5b")];
    if let Some((_, usual)) = gpt2.iter().find(|(other, _)| *other == name) {
        return (*usual).to_owned();
    }
    let Some(rest) = name.strip_prefix("llama").map(|rest| rest.trim_start_matches('-')) else {
        return name.to_owned();
    };
    match rest.split_once('-') {
        Some(("2", "70b")) => "llama2-70b".to_owned(),
        Some(("2" | "3" | "3.1" | "3.2" | "3.3", size)) => format!("llama-{size}"),
        _ => name.to_owned(),
    }
}

impl From<&ModelSpec> for Architecture {
    /// The shape of one of this project's models, from a configuration or from a Hugging Face
    /// `config.json`.
    fn from(spec: &ModelSpec) -> Architecture {
        Architecture {
            dim: spec.dim as u32,
            layers: spec.decoder_layers() as u32,
            divided: spec.encoder.is_some(),
            encoder_layers: spec.encoder.as_ref().map_or(0, |encoder| encoder.layers as u32),
            heads: spec.heads as u32,
            kv_heads: spec.kv_heads as u32,
            head_dim: spec.head_dim as u32,
            ffn: spec.experts.as_ref().map_or(spec.ffn_dim, |experts| experts.ffn_dim) as u32,
            vocab: spec.vocab_size as u32,
            gated: spec.gates(),
            tied: spec.tie_embeddings,
            positions: spec.learned_positions().unwrap_or(0) as u32,
            experts: spec.experts.as_ref().map(|experts| Experts {
                count: experts.experts as u32,
                per_token: experts.top_k as u32,
                shared_ffn: experts.shared_ffn_dim as u32,
                imbalance: Experts::NATURAL,
            }),
            latent: None,
            value_residual: spec.value_residual,
            patch_len: spec.image.as_ref().map_or(0, |image| image.patch_len() as u32),
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
    fn models_are_found_by_the_names_that_people_use() {
        for (other, usual) in [
            ("llama3-405b", "llama-405b"),
            ("llama3.1-70b", "llama-70b"),
            ("meta-llama/Llama-3.1-405B-Instruct", "llama-405b"),
            ("meta-llama/Meta-Llama-3-8B", "llama-8b"),
            ("meta-llama/Llama-3.2-1B", "llama-1b"),
            ("meta-llama/Llama-2-7b-hf", "llama-7b"),
            ("llama-2-70b", "llama2-70b"),
            ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
            ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
            ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
            ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
            ("openai-community/gpt2-xl", "gpt2-1.5b"),
        ] {
            assert_eq!(model(other), model(usual), "{other}");
            assert!(model(usual).is_ok());
        }
        assert!(model("llama4-405b").is_err());
    }

    #[test]
    fn this_projects_presets_are_the_same_models() {
        for name in ["gpt2-124m", "gpt2-774m", "llama-1b", "llama-7b", "llama-8b", "qwen2.5-0.5b", "mistral-7b"] {
            let spec = trainyard_model::preset(name).unwrap();
            assert_eq!(Architecture::from(&spec), model(name).unwrap(), "{name}");
        }
    }
}
