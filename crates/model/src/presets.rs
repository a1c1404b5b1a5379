//! Models by name: published shapes, and small ones for this project's own commands and tests.
//!
//! A preset gives shapes and hyper-parameters, not weights. Dropout is 0 everywhere, because the
//! field pre-trains without it.

use crate::families::{self, Sizes};
use crate::spec::{Activation, ModelSpec, RopeScaling, RopeSpec};
use crate::{ModelError, Result};

/// Every name.
pub const PRESET_NAMES: [&str; 20] = [
    // GPT-2 small (Radford et al. 2019)
    "gpt2-124m",
    // GPT-2 medium
    "gpt2-355m",
    // GPT-2 large
    "gpt2-774m",
    // GPT-2 XL
    "gpt2-1.5b",
    // the shape of Llama 3.2 1B
    "llama-1b",
    // the shape of Llama 2 7B
    "llama-7b",
    // the shape of Llama 3.1 8B
    "llama-8b",
    // the shape of Mistral 7B v0.1
    "mistral-7b",
    // the shape of SmolLM 135M
    "smollm-135m",
    // the shape of SmolLM2 135M
    "smollm2-135m",
    // the shape of Qwen2.5 0.5B
    "qwen2.5-0.5b",
    // the shape of Qwen3 0.6B
    "qwen3-0.6b",
    // T5 small, version 1.0 (Raffel et al. 2020)
    "t5-small",
    // T5 base, version 1.0
    "t5-base",
    // T5 small, version 1.1
    "t5-v1.1-small",
    // ViT-Ti/16 at 224 pixels (Touvron et al. 2021)
    "vit-tiny",
    // ViT-S/16 at 224 pixels (Touvron et al. 2021)
    "vit-small",
    // ViT-B/16 at 224 pixels (Dosovitskiy et al. 2020)
    "vit-base",
    // a small Llama that two CPU cores train in minutes
    "quickstart",
    // the character-level GPT-2 of a known small recipe: 4 layers of width 128, no biases
    "shakespeare-char",
];

/// The model called `name`.
pub fn preset(name: &str) -> Result<ModelSpec> {
    let gpt2 = |dim, layers, heads| ModelSpec {
        bos_token: Some(50_256),
        eos_tokens: vec![50_256],
        ..ModelSpec::gpt2(50_257, dim, layers, heads, 1024)
    };
    let vit = |dim, heads| families::VIT.usual(&Sizes { vocab_size: 1000, dim, layers: 12, heads, max_positions: 0 });
    let t5 = |dim, layers: usize, heads, head_dim| ModelSpec {
        head_dim,
        eos_tokens: vec![1],
        pad_token: Some(0),
        ..families::T5.usual(&Sizes { vocab_size: 32_128, dim, layers: 2 * layers, heads, max_positions: 1 << 15 })
    };
    let rope = |theta, scaling| Some(RopeSpec { theta, partial_factor: 1.0, scaling });
    let llama3_rope = |factor| {
        rope(
            500_000.0,
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_positions: 8192,
            }),
        )
    };
    Ok(match name {
        "gpt2-124m" => gpt2(768, 12, 12),
        "gpt2-355m" => gpt2(1024, 24, 16),
        "gpt2-774m" => gpt2(1280, 36, 20),
        "gpt2-1.5b" => gpt2(1600, 48, 25),
        "llama-1b" => ModelSpec {
            kv_heads: 8,
            tie_embeddings: true,
            rope: llama3_rope(32.0),
            bos_token: Some(128_000),
            eos_tokens: vec![128_001],
            ..ModelSpec::llama(128_256, 2048, 16, 32, 8192, 131_072)
        },
        "llama-7b" => ModelSpec {
            bos_token: Some(1),
            eos_tokens: vec![2],
            ..ModelSpec::llama(32_000, 4096, 32, 32, 11_008, 4096)
        },
        "llama-8b" => ModelSpec {
            kv_heads: 8,
            rope: llama3_rope(8.0),
            bos_token: Some(128_000),
            eos_tokens: vec![128_001],
            ..ModelSpec::llama(128_256, 4096, 32, 32, 14_336, 131_072)
        },
        "smollm-135m" => ModelSpec {
            kv_heads: 3,
            tie_embeddings: true,
            // 1 / sqrt(dim), as its config says.
            init_std: 1.0 / 576f64.sqrt(),
            bos_token: Some(0),
            eos_tokens: vec![0],
            ..ModelSpec::llama(49_152, 576, 30, 9, 1536, 2048)
        },
        "smollm2-135m" => ModelSpec {
            kv_heads: 3,
            tie_embeddings: true,
            rope: rope(100_000.0, None),
            init_std: 1.0 / 576f64.sqrt(),
            bos_token: Some(0),
            eos_tokens: vec![0],
            ..ModelSpec::llama(49_152, 576, 30, 9, 1536, 8192)
        },
        "mistral-7b" => ModelSpec {
            kv_heads: 8,
            sliding_window: Some(4096),
            bos_token: Some(1),
            eos_tokens: vec![2],
            ..ModelSpec::llama(32_000, 4096, 32, 32, 14_336, 32_768)
        },
        "qwen2.5-0.5b" => ModelSpec {
            model_type: Some("qwen2".into()),
            kv_heads: 2,
            qkv_bias: true,
            tie_embeddings: true,
            norm_eps: 1e-6,
            rope: rope(1_000_000.0, None),
            bos_token: Some(151_643),
            eos_tokens: vec![151_643],
            ..ModelSpec::llama(151_936, 896, 24, 14, 4864, 32_768)
        },
        "qwen3-0.6b" => ModelSpec {
            kv_heads: 8,
            head_dim: 128,
            qk_norm: true,
            tie_embeddings: true,
            norm_eps: 1e-6,
            rope: rope(1_000_000.0, None),
            bos_token: Some(151_643),
            eos_tokens: vec![151_645],
            ..ModelSpec::llama(151_936, 1024, 28, 16, 3072, 40_960)
        },
        "t5-small" => t5(512, 6, 8, 64),
        "t5-base" => t5(768, 12, 12, 64),
        "t5-v1.1-small" => {
            ModelSpec { ffn_dim: 1024, activation: Activation::GeluTanh, tie_embeddings: false, ..t5(512, 8, 6, 64) }
        }
        "vit-tiny" => vit(192, 3),
        "vit-small" => vit(384, 6),
        "vit-base" => vit(768, 12),
        "quickstart" => ModelSpec { kv_heads: 2, tie_embeddings: true, ..ModelSpec::llama(4096, 256, 6, 4, 704, 1024) },
        "shakespeare-char" => ModelSpec {
            norm_bias: false,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            activation: Activation::Gelu,
            ..ModelSpec::gpt2(65, 128, 4, 4, 64)
        },
        asked => {
            return Err(ModelError::Preset { asked: asked.into(), known: PRESET_NAMES.join(", ") });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Model;

    /// Parameter counts as published (tied tables once).
    #[test]
    fn presets_have_the_published_sizes() {
        for (name, parameters) in [
            ("gpt2-124m", 124_439_808),
            ("gpt2-355m", 354_823_168),
            ("gpt2-774m", 774_030_080),
            ("gpt2-1.5b", 1_557_611_200),
            ("llama-1b", 1_235_814_400),
            ("llama-7b", 6_738_415_616),
            ("llama-8b", 8_030_261_248),
            ("mistral-7b", 7_241_732_096),
            ("smollm-135m", 134_515_008),
            ("smollm2-135m", 134_515_008),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen3-0.6b", 596_049_920),
            ("t5-small", 60_506_624),
            ("t5-base", 222_903_552),
            ("t5-v1.1-small", 76_961_152),
            ("vit-tiny", 5_717_416),
            ("vit-small", 22_050_664),
            ("vit-base", 86_567_656),
        ] {
            let model = Model::new(preset(name).unwrap()).unwrap();
            assert_eq!(model.parameter_count(), parameters, "{name}");
        }
        for name in PRESET_NAMES {
            preset(name).unwrap().validate().unwrap();
        }
        assert!(preset("gpt3").unwrap_err().to_string().contains("gpt2-124m"));
    }
}
