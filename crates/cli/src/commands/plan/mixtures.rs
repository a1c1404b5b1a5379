//! Mixtures of experts from a Hugging Face `config.json`: models that are planned and not trained
//! here.
//!
//! Apart from its experts a mixture is a model of a family that is read anyway, so its file is read
//! as such a model's.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use trainyard_model::hf;
use trainyard_sim::transformer::{Architecture, Experts};

/// `model_type` of a mixture, the dense family that it is otherwise, and the keys of the number of
/// experts, the width of one, and the width of the MLP that every token goes through.
const FAMILIES: [(&str, &str, &str, &str, Option<&str>); 3] = [
    ("mixtral", "mistral", "num_local_experts", "intermediate_size", None),
    ("qwen2_moe", "qwen2", "num_experts", "moe_intermediate_size", Some("shared_expert_intermediate_size")),
    ("qwen3_moe", "qwen3", "num_experts", "moe_intermediate_size", None),
];

/// Keys that say how experts are trained and used, not which products there are.
const IGNORED: [&str; 7] = [
    "router_aux_loss_coef",
    "output_router_logits",
    "router_jitter_noise",
    "norm_topk_prob",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "mlp_only_layers",
];

/// The architecture of a mixture; None if the file is of another kind of model.
pub(super) fn architecture(text: &str) -> Result<Option<Architecture>> {
    let Ok(Value::Object(mut config)) = serde_json::from_str(text) else { return Ok(None) };
    let kind = config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let Some((_, dense, count, width, shared)) = FAMILIES.into_iter().find(|(name, ..)| *name == kind) else {
        return Ok(None);
    };
    let number = |key: &str| {
        let value = config.get(key).with_context(|| format!("config.json has no `{key}`"))?;
        value
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .filter(|n| *n > 0)
            .with_context(|| format!("config.json: `{key}` is {value}"))
    };
    let sparse = config.get("decoder_sparse_step").and_then(Value::as_u64).unwrap_or(1);
    let dense_layers = config.get("mlp_only_layers").and_then(Value::as_array).is_some_and(|layers| !layers.is_empty());
    if sparse != 1 || dense_layers {
        bail!(
            "config.json: only models with experts in every block are planned (decoder_sparse_step, mlp_only_layers)"
        );
    }
    let experts = Experts {
        count: number(count)?,
        per_token: number("num_experts_per_tok")?,
        shared_ffn: shared.map(number).transpose()?.unwrap_or(0),
        imbalance: Experts::NATURAL,
    };
    let ffn = number(width)?;
    for key in IGNORED.into_iter().chain([count, width]).chain(shared) {
        config.remove(key);
    }
    config.insert("model_type".to_owned(), dense.into());
    config.insert("intermediate_size".to_owned(), ffn.into());
    config.remove("architectures");
    let spec = hf::from_config_json(&Value::Object(config).to_string())?.spec;
    Ok(Some(Architecture { experts: Some(experts), ..Architecture::from(&spec) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published file of Mixtral 8x7B.
    const MIXTRAL: &str = r#"{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32000}"#;

    #[test]
    fn a_mixture_is_the_model_of_its_name() {
        assert_eq!(architecture(MIXTRAL).unwrap(), Some(trainyard_sim::model("mixtral-8x7b").unwrap()));
        assert_eq!(architecture(r#"{"model_type": "llama"}"#).unwrap(), None);
        assert_eq!(architecture("no json").unwrap(), None);
    }

    #[test]
    fn mixtures_that_are_none_are_refused_in_words() {
        for (from, to, says) in [
            ("\"num_local_experts\": 8, ", "", "num_local_experts"),
            ("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 0", "`num_experts_per_tok` is 0"),
            ("\"hidden_size\": 4096", "\"hidden_size\": 0", "hidden_size"),
            ("\"use_cache\"", "\"decoder_sparse_step\": 2, \"use_cache\"", "experts in every block"),
        ] {
            let text = MIXTRAL.replacen(from, to, 1);
            assert_ne!(text, MIXTRAL);
            let error = format!("{:#}", architecture(&text).unwrap_err());
            assert!(error.contains(says), "{says}: {error}");
        }
    }
}
