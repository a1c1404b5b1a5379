//! `trainyard plan` for other trainers: `--stack`, `--export`, `--from`, and mixtures of experts.

mod common;

use common::Folder;

const SMALL: [&str; 9] =
    ["plan", "--model", "llama-1b", "--cluster", "1x4xA100-80GB", "--global-batch", "32", "--sequence-length", "2048"];

fn json(folder: &Folder, more: &[&str]) -> serde_json::Value {
    let ran = folder.run(&[&SMALL[..], &["--json"], more].concat()).ok();
    serde_json::from_str(&ran.stdout).unwrap()
}

#[test]
fn every_trainer_is_compared_and_one_can_be_planned_for() {
    let folder = Folder::new();
    let ran = folder.run(&[&SMALL[..], &["--top", "2"]].concat()).ok();
    for name in ["megatron", "nemo", "torchtitan", "deepspeed", "fsdp2", "trainyard"] {
        assert!(ran.stdout.contains(name), "{name}: {}", ran.stdout);
    }
    let answer = json(&folder, &["--stack", "torchtitan", "--top", "5"]);
    for plan in answer["plans"].as_array().unwrap() {
        let stage = plan["zero_stage"].as_u64().unwrap();
        assert!(stage == 0 || stage == 3, "{plan}");
    }
    assert!(answer["stacks"].as_array().unwrap().is_empty(), "one was chosen");
    let ran = folder.run(&[&SMALL[..], &["--stack", "deepspeed", "--top", "1"]].concat()).ok();
    assert!(ran.stdout.contains("for  DeepSpeed: ") && ran.stdout.contains("ZeRO stage 3"), "{}", ran.stdout);
}

/// Settings that were printed, read again, are the plan that was shown.
#[test]
fn settings_that_are_printed_are_the_plan_that_was_shown() {
    let folder = Folder::new();
    for (form, stack, file) in [
        ("megatron", "megatron", "pretrain.sh"),
        ("nemo", "nemo", "recipe.sh"),
        ("torchtitan", "torchtitan", "train.toml"),
        ("deepspeed", "deepspeed", "ds_config.json"),
        ("accelerate", "fsdp2", "accelerate.yaml"),
    ] {
        let shown = json(&folder, &["--stack", stack, "--top", "1"]);
        let ran = folder.run(&[&SMALL[..], &["--export", form]].concat()).ok();
        assert!(ran.stderr.contains("a step as"), "{form}: {}", ran.stderr);
        folder.write(file, &ran.stdout);
        let read = json(&folder, &["--from", file]);
        assert_eq!(read["stack"], stack);
        assert_eq!(read["not_priced"], serde_json::json!([]), "{form}: {}", ran.stdout);
        for key in
            ["mesh", "zero_stage", "micro_batch_size", "accumulation_steps", "precision", "activation_checkpointing"]
        {
            assert_eq!(read["now"][key], shown["plans"][0][key], "{form}: {key}: {}", ran.stdout);
        }
        let ratio = read["now"]["step_s"].as_f64().unwrap() / shown["plans"][0]["step_s"].as_f64().unwrap();
        assert!((ratio - 1.0).abs() < 0.02, "{form}: {ratio}: {}", ran.stdout);
    }
}

#[test]
fn what_somebody_runs_is_priced_beside_what_would_be_better() {
    let folder = Folder::new();
    folder.write(
        "ds_config.json",
        r#"{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto", "bf16": {"enabled": true},
            "zero_optimization": {"stage": 3, "zero_quantized_weights": true, "offload_optimizer": {"device": "cpu"}}}"#,
    );
    let ran = folder.run(&[&SMALL[..], &["--from", "ds_config.json"]].concat()).ok();
    for part in [
        "ds_config.json, as DeepSpeed runs it",
        "assumed     gradient_accumulation_steps",
        "zero_quantized_weights",
        "% faster",
    ] {
        assert!(ran.stdout.contains(part), "{part}: {}", ran.stdout);
    }
    folder.write("wrong.json", r#"{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 1}}"#);
    folder.write("odd.yaml", "a: 1\n");
    for (file, says) in [
        ("wrong.json", "3 x 1 on 4 data-parallel ranks makes 12 sequences"),
        ("odd.yaml", "not settings of a known trainer"),
        ("missing.json", "missing.json"),
    ] {
        let ran = folder.run(&[&SMALL[..], &["--from", file]].concat());
        assert!(ran.code == Some(1) && ran.stderr.contains(says), "{file}: {}", ran.stderr);
    }
}

#[test]
fn a_profile_of_ones_own_is_planned_for_and_mistakes_are_told() {
    let folder = Folder::new();
    let profile = "name = 'mine'\ntitle = 'My trainer'\nsource = 'its code'\n[price]\nlike = 'torchtitan'\noverlap_reduce = false\n\
                   [rules]\nprecisions = ['bf16']\nrecomputation = ['full']\npipeline_max = 1\n\
                   [[rules.data_parallel]]\nname = 'DDP'\nzero_stage = 0\n";
    folder.write("mine.toml", profile);
    let answer = json(&folder, &["--stack", "mine.toml", "--top", "9"]);
    for plan in answer["plans"].as_array().unwrap() {
        assert_eq!((&plan["zero_stage"], &plan["activation_checkpointing"]["full"]), (&0.into(), &16.into()), "{plan}");
    }
    folder.write("wrong.toml", profile.replace("overlap_reduce", "overlap"));
    for (stack, says) in
        [("wrong.toml", "overlap"), ("caffe", "one of trainyard, megatron"), ("missing.toml", "missing.toml")]
    {
        let ran = folder.run(&[&SMALL[..], &["--stack", stack]].concat());
        assert!(ran.code == Some(1) && ran.stderr.contains(says), "{stack}: {}", ran.stderr);
    }
    let odd = ["--model", "llama-1b", "--cluster", "1x4xV100-32GB", "--sequence-length", "0"];
    folder.write("bf16.json", r#"{"train_batch_size": 8, "bf16": {"enabled": true}}"#);
    let ran = folder.run(&[&["plan", "--from", "bf16.json"][..], &odd].concat());
    assert!(ran.code == Some(1) && ran.stderr.contains("a step needs sequences and tokens"), "{}", ran.stderr);
    let ran = folder.run(&[&["plan", "--from", "bf16.json"][..], &odd[..4], &["--sequence-length", "512"]].concat());
    assert!(ran.code == Some(1) && ran.stderr.contains("states no peak of products in bf16"), "{}", ran.stderr);
    let ran = folder.run(&[&SMALL[..], &["--stack", "deepspeed", "--fix", "pp=2"]].concat());
    assert!(ran.code == Some(1) && ran.stderr.contains("by what deepspeed can run"), "{}", ran.stderr);
}

/// Regression: the file of a mixture was refused though its name was planned.
#[test]
fn a_mixture_plans_from_its_file_as_by_its_name() {
    let folder = Folder::new();
    folder.write(
        "config.json",
        r#"{"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 32000}"#,
    );
    let plan = |model: &str| {
        let more =
            ["--cluster", "4x8xH100", "--global-batch", "64", "--sequence-length", "4096", "--stack", "megatron"];
        folder.run(&[&["plan", "--model", model][..], &more].concat()).ok().stdout
    };
    assert_eq!(plan("config.json"), plan("mixtral-8x7b"));
}
