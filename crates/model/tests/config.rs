//! `config.json` in and out.

mod common;

use common::*;
use trainyard_model::families::{self, Sizes};
use trainyard_model::{Activation, Family, ModelSpec, PRESET_NAMES, RopeScaling, RopeSpec, hf, preset};
use trainyard_tensor::DType;

/// A small model as is usual in a family.
fn usual(family: Family) -> ModelSpec {
    family.usual(&Sizes { vocab_size: 97, dim: 32, layers: 2, heads: 4, max_positions: 128 })
}

/// The class for Llama of transformers 5 refuses heads that do not divide the width. Mistral's does
/// not, and computes the same.
#[test]
fn a_llama_whose_heads_do_not_divide_its_width_is_written_as_a_mistral() {
    let model_type = |spec: &ModelSpec| {
        let config = hf::config_json(spec, DType::F32).unwrap();
        assert_eq!(hf::from_config_json(&config).unwrap().spec, *spec);
        serde_json::from_str::<serde_json::Value>(&config).unwrap()["model_type"].clone()
    };
    let whole = usual(families::LLAMA);
    assert_eq!(model_type(&whole), "llama");
    assert_eq!(model_type(&ModelSpec { heads: 3, kv_heads: 3, ..whole.clone() }), "mistral");
    let biases = ModelSpec { heads: 3, kv_heads: 3, mlp_bias: true, ..whole };
    let refused = hf::config_json(&biases, DType::F32).unwrap_err().to_string();
    assert!(refused.contains("with these biases whose heads do not divide dim"), "{refused}");
}

/// Our JSON of a model read back is the model, and so is the spelling of transformers 4.
#[test]
fn golden_configs_round_trip() {
    for name in GOLDENS {
        let folder = golden(name);
        let spec = read_config(&folder, "config.json");
        if folder.join("config_v4.json").exists() {
            assert_eq!(read_config(&folder, "config_v4.json"), spec, "{name}");
        }
        let ours = hf::config_json(&spec, DType::F32).unwrap();
        let back = hf::from_config_json(&ours).unwrap();
        assert_eq!(back.spec, spec, "{name}");
        assert_eq!(back.notes, [] as [String; 0], "{name}");
        let theirs: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
        let ours: serde_json::Value = serde_json::from_str(&ours).unwrap();
        for key in ["model_type", "architectures", "vocab_size", "rope_parameters", "head_dim", "n_embd", "layer_types"]
        {
            // Null stands for the class's default.
            assert!(theirs[key].is_null() || theirs[key] == ours[key], "{name}: {key}");
        }
    }
}

#[test]
fn presets_round_trip_through_config_json_and_toml_shaped_serde() {
    for name in PRESET_NAMES {
        let spec = preset(name).unwrap();
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<ModelSpec>(&json).unwrap(), spec, "{name}");
        if name != "shakespeare-char" {
            let config = hf::config_json(&spec, DType::BF16).unwrap();
            assert_eq!(hf::from_config_json(&config).unwrap().spec, spec, "{name}");
        }
    }
}

/// A null once stood for the default of a file without the key.
#[test]
fn a_null_number_of_key_and_value_heads_is_that_of_query_heads() {
    let kv_heads = |model_type: &str, kv: &str| {
        let config = format!("{{\"model_type\": \"{model_type}\", \"num_attention_heads\": 64{kv}}}");
        hf::from_config_json(&config).unwrap().spec.kv_heads
    };
    for (model_type, default) in [("llama", 64), ("qwen2", 32), ("qwen3", 32)] {
        let found = [kv_heads(model_type, ""), kv_heads(model_type, ", \"num_key_value_heads\": null")];
        assert_eq!(found, [default, 64], "{model_type}");
    }
}

/// Qwen2 is the one class with biases on queries, keys and values alone, and transformers splits
/// text for it by a class of its own: what was not Qwen2 goes out as a Llama whose other bias is
/// zero.
#[test]
fn a_shape_with_qkv_bias_goes_out_as_a_llama_and_what_came_as_qwen2_stays_qwen2() {
    let model_type = |spec: &ModelSpec| {
        let config: serde_json::Value = serde_json::from_str(&hf::config_json(spec, DType::F32).unwrap()).unwrap();
        (config["model_type"].as_str().unwrap().to_owned(), config["attention_bias"].as_bool())
    };
    let spec = ModelSpec { qkv_bias: true, ..ModelSpec::llama(97, 32, 2, 4, 40, 128) };
    assert_eq!(model_type(&spec), ("llama".into(), Some(true)));
    let zeros: Vec<_> = (0..2).map(|layer| (format!("model.layers.{layer}.self_attn.o_proj.bias"), vec![32])).collect();
    assert_eq!(hf::implied_zeros(&spec), zeros);
    let only_o = ModelSpec { o_bias: true, qkv_bias: false, kv_heads: 2, ..spec.clone() };
    assert_eq!(model_type(&only_o), ("llama".into(), Some(true)));
    let names: Vec<_> = hf::implied_zeros(&only_o).into_iter().take(3).collect();
    let name = |what: &str, size: usize| (format!("model.layers.0.self_attn.{what}.bias"), vec![size]);
    assert_eq!(names, [name("q_proj", 32), name("k_proj", 16), name("v_proj", 16)]);

    let qwen2 = read_config(&golden("qwen2"), "config.json");
    assert_eq!(model_type(&qwen2), ("qwen2".into(), None));
    assert_eq!(hf::implied_zeros(&qwen2), []);
    let mistral = r#"{"model_type": "mistral", "sliding_window": null}"#;
    assert_eq!(model_type(&hf::from_config_json(mistral).unwrap().spec), ("mistral".into(), None));
}

#[test]
fn shapes_that_cannot_be_exported_say_so_before_training() {
    let llama = ModelSpec::llama(97, 32, 2, 4, 40, 128);
    assert_eq!(hf::export_note(&llama), None);
    let refused = [
        ModelSpec { qk_norm: true, mlp_bias: true, ..llama.clone() },
        ModelSpec { sliding_window: Some(5), mlp_bias: true, ..llama.clone() },
        ModelSpec { sliding_window: Some(5), ..ModelSpec::gpt2(97, 32, 2, 4, 128) },
        ModelSpec { kv_heads: 2, ..ModelSpec::gpt2(97, 32, 2, 4, 128) },
    ];
    for spec in refused {
        let note = hf::export_note(&spec).unwrap();
        let why = hf::config_json(&spec, DType::F32).unwrap_err().to_string();
        assert!(note.contains("export` will refuse it") && note.contains(&why), "{note}");
    }
    let window = ModelSpec { sliding_window: Some(5), qkv_bias: true, ..llama };
    assert!(hf::export_note(&window).unwrap().contains("split its text as Qwen2 does"));
}

#[test]
fn end_of_text_tokens_of_a_generation_config_are_one_or_several() {
    assert_eq!(hf::generation_eos(r#"{"eos_token_id": [3, 5], "top_p": 0.9}"#).unwrap(), [3, 5]);
    assert_eq!(hf::generation_eos(r#"{"eos_token_id": 3}"#).unwrap(), [3]);
    assert_eq!(hf::generation_eos("{}").unwrap(), [0u32; 0]);
    assert!(hf::generation_eos(r#"{"eos_token_id": "x"}"#).unwrap_err().to_string().contains("no token id"));
}

/// GPT-2 without biases is exported as a GPT-2 whose biases are zero.
#[test]
fn a_gpt2_without_biases_names_the_zeros_that_stand_for_them() {
    let spec = preset("shakespeare-char").unwrap();
    let zeros = hf::implied_zeros(&spec);
    assert_eq!(zeros.len(), 4 * 6 + 1);
    assert!(zeros.contains(&("transformer.h.3.attn.c_attn.bias".into(), vec![3 * 128])));
    let back = hf::from_config_json(&hf::config_json(&spec, DType::F32).unwrap()).unwrap().spec;
    let with_biases = ModelSpec { norm_bias: true, qkv_bias: true, o_bias: true, mlp_bias: true, ..spec };
    assert_eq!(back, with_biases);
    assert_eq!(hf::implied_zeros(&back), []);
}

#[test]
fn every_rotary_rule_round_trips() {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_max_positions: 32_768,
        beta_fast: 30.0,
        beta_slow: 2.0,
        attention_factor: Some(1.1),
        mscale: Some(1.0),
        mscale_all_dim: Some(0.8),
        truncate: false,
    };
    for scaling in [RopeScaling::Linear { factor: 2.0 }, yarn] {
        let rope = Some(RopeSpec { theta: 5e5, partial_factor: 1.0, scaling: Some(scaling) });
        let spec = ModelSpec { rope, ..ModelSpec::llama(97, 32, 2, 4, 40, 128) };
        let config = hf::config_json(&spec, DType::F32).unwrap();
        assert_eq!(hf::from_config_json(&config).unwrap().spec, spec);
    }
}

#[test]
fn windows_in_some_layers_round_trip() {
    let base = ModelSpec { qk_norm: true, ..ModelSpec::llama(97, 32, 4, 4, 40, 128) };
    for layers in [None, Some(vec![2, 3]), Some(vec![0, 2])] {
        let spec = ModelSpec { sliding_window: Some(5), sliding_layers: layers, ..base.clone() };
        let config = hf::config_json(&spec, DType::F32).unwrap();
        assert_eq!(hf::from_config_json(&config).unwrap().spec, spec);
    }
    // Qwen2's older files say it with one number.
    let old = r#"{"model_type": "qwen2", "num_hidden_layers": 4, "num_key_value_heads": 4, "use_sliding_window": true,
                  "sliding_window": 9, "max_window_layers": 3}"#;
    let spec = hf::from_config_json(old).unwrap().spec;
    assert_eq!((spec.sliding_window, spec.sliding_layers), (Some(9), Some(vec![3])));
}

/// Published configs, abridged to what they say, with the defaults of transformers for the rest.
#[test]
fn published_configs_mean_what_transformers_takes_them_to_mean() {
    let gpt2 = r#"{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index", "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": true}}}"#;
    let imported = hf::from_config_json(gpt2).unwrap();
    assert_eq!(imported.spec, ModelSpec { dropout: 0.1, ..preset("gpt2-124m").unwrap() });
    assert_eq!(imported.notes.len(), 1);
    assert!(imported.notes[0].contains("attn_pdrop"), "{:?}", imported.notes);

    let smollm = r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": true,
        "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false,
        "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers.js_config": {}, "use_cache": true, "vocab_size": 49152, "some_new_key": 1}"#;
    let imported = hf::from_config_json(smollm).unwrap();
    assert_eq!(imported.spec, preset("smollm2-135m").unwrap());
    assert_eq!(imported.notes, ["`some_new_key` is not known here and was not used"]);

    let mistral = r#"{"model_type": "mistral", "hidden_size": 64, "num_attention_heads": 8}"#;
    let spec = hf::from_config_json(mistral).unwrap().spec;
    assert_eq!((spec.sliding_window, spec.kv_heads, spec.head_dim, spec.ffn_dim), (Some(4096), 8, 8, 14_336));
    let mistral = r#"{"model_type": "mistral", "sliding_window": null}"#;
    assert_eq!(hf::from_config_json(mistral).unwrap().spec.sliding_window, None);
    let qwen3 = r#"{"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}"#;
    assert_eq!(hf::from_config_json(qwen3).unwrap().spec.head_dim, 128);
    let old = r#"{"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2}}"#;
    let scaling = hf::from_config_json(old).unwrap().spec.rope.unwrap().scaling;
    assert_eq!(scaling, Some(RopeScaling::Linear { factor: 2.0 }));
}

#[test]
fn what_is_not_supported_is_an_error_that_names_the_key() {
    let cases = [
        ("", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("{}", "no `model_type`"),
        (r#"{"model_type": 3}"#, "`model_type` is 3, expected a string"),
        (r#"{"model_type": "mamba"}"#, "supported are: llama, mistral, qwen2, qwen3, gpt2"),
        (r#"{"model_type": "llama", "hidden_size": "4096"}"#, "`hidden_size` is \"4096\""),
        (r#"{"model_type": "llama", "hidden_size": -1}"#, "`hidden_size` is -1"),
        (r#"{"model_type": "llama", "hidden_size": 0}"#, "positive whole number"),
        (r#"{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}"#, "a divisor of hidden_size"),
        (
            r#"{"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 5}"#,
            "kv_heads: 5 does not divide",
        ),
        (r#"{"model_type": "llama", "hidden_act": "tanh"}"#, "`hidden_act` = tanh"),
        (r#"{"model_type": "llama", "hidden_act": "gelu"}"#, "gates with silu"),
        (r#"{"model_type": "llama", "rms_norm_eps": 0}"#, "norm_eps"),
        (r#"{"model_type": "llama", "sliding_window": 5}"#, "`sliding_window` = 5"),
        (r#"{"model_type": "llama", "rope_interleaved": true}"#, "`rope_interleaved` = true"),
        (r#"{"model_type": "llama", "partial_rotary_factor": 0.5}"#, "`partial_rotary_factor` = 0.5"),
        (r#"{"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2}}"#, "`rope_type` = dynamic"),
        (r#"{"model_type": "llama", "rope_scaling": {"type": "linear"}}"#, "no `factor`"),
        (
            r#"{"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2, "warp": 1}}"#,
            "rope_parameters.warp",
        ),
        (r#"{"model_type": "llama", "rope_scaling": 3}"#, "`rope_scaling` is 3"),
        (r#"{"model_type": "llama", "rope_theta": 0.5}"#, "rope.theta"),
        (r#"{"model_type": "llama", "quantization_config": {"bits": 4}}"#, "`quantization_config`"),
        (r#"{"model_type": "llama", "eos_token_id": "x"}"#, "`eos_token_id` is \"x\""),
        (r#"{"model_type": "mistral", "attention_bias": true}"#, "`attention_bias` = true"),
        (r#"{"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"]}"#, "`layer_types`"),
        (r#"{"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]}"#, "linear_attention"),
        (r#"{"model_type": "gpt2", "n_head": 7}"#, "a divisor of n_embd"),
        (r#"{"model_type": "gpt2", "n_ctx": 512}"#, "`n_ctx` = 512"),
        (r#"{"model_type": "gpt2", "scale_attn_weights": false}"#, "`scale_attn_weights` = false"),
        (r#"{"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": true}"#, "`scale_attn_by_inverse_layer_idx`"),
        (r#"{"model_type": "gpt2", "add_cross_attention": true}"#, "`add_cross_attention`"),
        (r#"{"model_type": "gpt2", "embd_pdrop": 0.2}"#, "it must equal resid_pdrop"),
        (r#"{"model_type": "gemma3_text", "final_logit_softcapping": 30.0}"#, "logits are not capped"),
        (r#"{"model_type": "gemma3_text", "use_bidirectional_attention": true}"#, "attention is causal"),
        (r#"{"model_type": "gemma3_text", "hidden_activation": "silu"}"#, "gates with gelu_tanh"),
        (r#"{"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}"#, "rope_parameters.rope_theta"),
        (r#"{"model_type": "olmo2", "hidden_act": "gelu"}"#, "gates with silu"),
        (
            r#"{"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": [1]}}"#,
            "`rope_type` = longrope is not supported: phi3 stretches rotations by longrope only",
        ),
        (
            r#"{"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 4}}"#,
            "phi3 stretches rotations by longrope only",
        ),
        (r#"{"model_type": "phi3", "attention_bias": true}"#, "`attention_bias` = true"),
    ];
    for (text, expect) in cases {
        let error = hf::from_config_json(text).expect_err(text).to_string();
        assert!(error.contains(expect), "{text}: {error:?} does not say {expect:?}");
    }
}

/// The keys that files of Gemma 3 had before transformers 5, and before 4.53.
#[test]
fn windows_and_rotations_of_gemma_3_are_read_in_every_spelling() {
    let old = r#"{"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 3,
        "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}"#;
    let spec = hf::from_config_json(old).unwrap().spec;
    let rope = |theta, factor: Option<f64>| {
        let scaling = factor.map(|factor| RopeScaling::Linear { factor });
        Some(RopeSpec { theta, partial_factor: 1.0, scaling })
    };
    assert_eq!((spec.sliding_window, spec.sliding_layers.clone()), (Some(8), Some(vec![0, 1, 3])));
    assert_eq!((spec.rope.clone(), spec.local_rope.clone()), (rope(5e5, Some(8.0)), rope(2e4, None)));
    assert_eq!(spec.rope_of(2), spec.rope.as_ref());
    assert_eq!(spec.rope_of(3), spec.local_rope.as_ref());
    let defaults = hf::from_config_json(r#"{"model_type": "gemma3_text"}"#).unwrap().spec;
    assert_eq!((defaults.rope, defaults.local_rope), (rope(1e6, None), rope(1e4, None)));
    assert_eq!((defaults.sliding_window, defaults.sliding_layers.unwrap().len()), (Some(4096), 22));
}

#[test]
fn models_that_transformers_does_not_have_are_not_exported() {
    let llama = ModelSpec::llama(97, 32, 2, 4, 40, 128);
    let rope = |partial_factor| Some(RopeSpec { theta: 1e4, partial_factor, scaling: None });
    for (spec, expect) in [
        (ModelSpec { qk_norm: true, mlp_bias: true, ..llama.clone() }, "query/key norms together with biases"),
        (ModelSpec { rope: rope(0.5), ..llama.clone() }, "part of a head"),
        (ModelSpec { sliding_window: Some(4), sliding_layers: Some(vec![1]), ..llama }, "in some layers only"),
        (ModelSpec { head_dim: 16, ..ModelSpec::gpt2(97, 32, 2, 4, 32) }, "dim / heads"),
        (ModelSpec { qk_norm: true, ..ModelSpec::gpt2(97, 32, 2, 4, 32) }, "GPT-2 blocks with query/key norms"),
        (ModelSpec { value_residual: true, ..ModelSpec::gpt2(97, 32, 2, 4, 32) }, "GPT-2 blocks with value residuals"),
        (ModelSpec { o_bias: true, ..usual(families::GEMMA3) }, "biases on some projections"),
        (ModelSpec { sliding_window: Some(4), ..usual(families::OLMO2) }, "OLMo 2 blocks with a sliding window"),
        (
            ModelSpec { sliding_window: Some(4), sliding_layers: Some(vec![1]), ..usual(families::PHI3) },
            "Phi-3 blocks with a sliding window in some layers",
        ),
    ] {
        spec.validate().unwrap();
        let error = hf::config_json(&spec, DType::F32).unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    }
}

#[test]
fn impossible_models_are_refused_by_field() {
    let llama = ModelSpec::llama(97, 32, 2, 4, 40, 128);
    let gpt2 = ModelSpec::gpt2(97, 32, 2, 4, 32);
    let gemma3 = usual(families::GEMMA3);
    let rope = |theta, partial_factor| Some(RopeSpec { theta, partial_factor, scaling: None });
    for (spec, expect) in [
        (ModelSpec { layers: 0, ..llama.clone() }, "model.layers: 0"),
        (ModelSpec { kv_heads: 3, ..llama.clone() }, "model.kv_heads: 3 does not divide heads = 4"),
        (ModelSpec { head_dim: 7, ..llama.clone() }, "model.head_dim: 7 rotary columns"),
        (ModelSpec { rope: None, ..llama.clone() }, "model.rope: family llama needs"),
        (ModelSpec { rope: rope(f64::NAN, 1.0), ..llama.clone() }, "model.rope.theta: NaN"),
        (ModelSpec { rope: rope(1e4, 1.5), ..llama.clone() }, "model.rope.partial_factor: 1.5"),
        (ModelSpec { norm_bias: true, ..llama.clone() }, "model.norm_bias"),
        (ModelSpec { activation: Activation::Relu, ..llama.clone() }, "model.activation"),
        (ModelSpec { norm_eps: f64::NAN, ..llama.clone() }, "model.norm_eps: NaN"),
        (ModelSpec { dropout: 1.0, ..llama.clone() }, "model.dropout: 1"),
        (ModelSpec { init_std: -0.1, ..llama.clone() }, "model.init_std"),
        (ModelSpec { sliding_window: Some(0), ..llama.clone() }, "model.sliding_window: 0"),
        (ModelSpec { sliding_layers: Some(vec![0]), ..llama.clone() }, "without sliding_window"),
        (ModelSpec { sliding_window: Some(2), sliding_layers: Some(vec![9]), ..llama.clone() }, "layer 9"),
        (ModelSpec { eos_tokens: vec![97], ..llama }, "token 97"),
        (ModelSpec { rope: rope(1e4, 1.0), ..gpt2 }, "model.rope: family gpt2"),
        (ModelSpec { qk_norm: false, ..gemma3.clone() }, "model.qk_norm: family gemma3 normalises"),
        (ModelSpec { attention_scalar: Some(0.0), ..gemma3.clone() }, "model.attention_scalar: 0"),
        (ModelSpec { local_rope: rope(0.5, 1.0), ..gemma3 }, "model.rope.theta: 0.5"),
        (ModelSpec { mlp_bias: true, ..usual(families::OLMO2) }, "model.mlp_bias: family olmo2"),
        (ModelSpec { o_bias: true, ..usual(families::PHI3) }, "family phi3 has none"),
    ] {
        let error = spec.validate().unwrap_err().to_string();
        assert!(error.contains(expect), "{error:?} does not say {expect:?}");
    }
}
