//! Value residuals and squared ReLU, from the command line.

mod common;

use common::{Folder, Ran, TINY, losses, record, tensors};
use serde_json::Value;

/// Three blocks: one that gives values, one that reads them and hands them on, one that reads them.
/// Keys and values have one head of two, so they fill half of the width of the stream.
fn folder() -> Folder {
    let folder = Folder::new();
    let config = TINY.replace("layers = 2\nheads = 2", "layers = 3\nheads = 2\nkv_heads = 1\nvalue_residual = true");
    folder.write("v.toml", config.replace("name = 'tiny'", "name = 'one'"));
    folder
}

fn train(folder: &Folder, name: &str, sets: &[&str]) -> Ran {
    folder.train("v.toml", name, sets)
}

#[test]
fn a_run_learns_and_resumes_with_the_same_bits_and_its_memory_is_predicted() {
    let folder = folder();
    train(&folder, "plain", &["model.value_residual=false"]).ok();
    train(&folder, "whole", &["model.dropout=0.1"]).ok();
    assert_ne!(losses(&folder, "whole"), losses(&folder, "plain"));
    let mut paused = folder.command(&["train", "v.toml", "--set", "run.name=paused", "--set", "model.dropout=0.1"]);
    Ran::new(paused.args(["--until", "7"]).output().unwrap()).ok();
    folder.run(&["train", "--resume", "runs/paused"]).ok();
    assert_eq!(losses(&folder, "paused"), losses(&folder, "whole"));
    assert_eq!(tensors(&folder.join("runs/paused")), tensors(&folder.join("runs/whole")));
    let spec: Value = serde_json::from_slice(&std::fs::read(folder.join("runs/whole/model.json")).unwrap()).unwrap();
    assert_eq!(spec["value_residual"], true);

    train(&folder, "one", &["training.steps=60"]).ok();
    let all: Vec<f64> = losses(&folder, "one").iter().map(|loss| loss.parse().unwrap()).collect();
    assert!(all[59] < 0.8 * all[0], "{} after {}", all[59], all[0]);
    for run in ["one", "whole", "plain"] {
        let steps = record(&folder, run, "metrics.jsonl");
        assert_eq!(steps[3]["mem_peak_bytes"], steps[3]["predicted_mem_peak_bytes"], "{run}");
    }
    let [with, without] =
        ["whole", "plain"].map(|run| record(&folder, run, "metrics.jsonl")[3]["mem_peak_bytes"].as_u64());
    assert!(with > without, "{with:?} and {without:?}: values that travel take memory");

    // A run is evaluated as it evaluated itself, and says what it learnt.
    let ran = folder.run(&["eval", "runs/one", "--data", "text.txt", "--length", "32", "--json"]).ok();
    let evaluated: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert!(evaluated["loss"].as_f64().unwrap() < all[0], "{evaluated}");
    let say = ["generate", "runs/one", "--prompt", "the cat", "--tokens", "12", "--temperature", "0"];
    assert_eq!(folder.run(&say).ok().stdout, folder.run(&say).ok().stdout);
    // No file of other programs has them.
    let ran = folder.run(&["export", "runs/one", "--out", "hf"]);
    assert!(ran.code != Some(0) && ran.stderr.contains("Llama blocks with value residuals"), "{ran:?}");
    let ran = folder.run(&["quantize", "runs/one", "--out", "q"]);
    assert!(ran.code != Some(0) && ran.stderr.contains("model.value_residual"), "{ran:?}");
}

#[test]
fn every_layout_gives_the_same_bits() {
    let folder = folder();
    let (two, bits) = ("parallel.ranks=2", "training.elastic_bits=true");
    let batch = "training.global_batch_size=8";
    train(&folder, "one", &[bits, batch]).ok();
    for (name, sets) in [
        ("ddp", &[bits, batch, two][..]),
        ("zero1", &[bits, batch, two, "parallel.zero_stage=1"]),
        ("zero2", &[bits, batch, two, "parallel.zero_stage=2"]),
        ("zero3", &[bits, batch, two, "parallel.zero_stage=3"]),
        ("full", &[bits, batch, "activation_checkpointing.mode=full"]),
        ("selective", &[bits, batch, "activation_checkpointing.mode=selective"]),
        ("disk", &[bits, batch, "memory.offload.activations=disk"]),
    ] {
        train(&folder, name, sets).ok();
        assert_eq!((losses(&folder, name), losses(&folder, name).len()), (losses(&folder, "one"), 12), "{name}");
        let steps = record(&folder, name, "metrics.jsonl");
        assert_eq!(steps[3]["mem_peak_bytes"], steps[3]["predicted_mem_peak_bytes"], "{name}");
    }
    let stages = "parallel.pipeline_parallel_degree=2";
    train(&folder, "accumulated", &[batch]).ok();
    for schedule in ["gpipe", "1f1b", "zero_bubble"] {
        let schedule_key = format!("parallel.pipeline_schedule={schedule}");
        train(&folder, schedule, &[batch, two, stages, &schedule_key]).ok();
        assert_eq!(losses(&folder, schedule), losses(&folder, "accumulated"), "{schedule}");
        let steps = record(&folder, schedule, "metrics.jsonl");
        assert_eq!(steps[3]["mem_peak_bytes"], steps[3]["predicted_mem_peak_bytes"], "{schedule}");
    }
}

#[test]
fn ranks_that_divide_experts_give_the_bits_of_ranks_with_all() {
    let folder = folder();
    let mixture = ["model.family=mixtral", "experts.count=4", "parallel.ranks=2", "training.global_batch_size=8"];
    train(&folder, "all", &mixture).ok();
    train(&folder, "divided", &[&mixture[..], &["parallel.expert_parallel_degree=2"]].concat()).ok();
    assert_eq!((losses(&folder, "divided"), losses(&folder, "all").len()), (losses(&folder, "all"), 12));
}

#[test]
fn the_recipe_takes_each_key_and_adapters_and_gpt_2_have_them_too() {
    let folder = folder();
    let gpt2 = ["model.family=gpt2", "model.kv_heads=2", "training.recipe=fast"];
    for (name, sets) in [
        ("recipe", &[][..]),
        ("without", &["model.value_residual=false"]),
        ("squared", &["model.activation=relu_squared"]),
    ] {
        train(&folder, name, &[&gpt2[..], sets].concat()).ok();
        let steps = record(&folder, name, "metrics.jsonl");
        assert_eq!(steps[3]["mem_peak_bytes"], steps[3]["predicted_mem_peak_bytes"], "{name}");
    }
    assert_ne!(losses(&folder, "recipe"), losses(&folder, "without"));
    assert_ne!(losses(&folder, "recipe"), losses(&folder, "squared"));
    train(&folder, "lora", &["fine_tuning.adapter=lora", "precision.compute=bf16"]).ok();
    assert_eq!(losses(&folder, "lora").len(), 12);
}

#[test]
fn what_does_not_go_with_them_is_refused_before_anything_begins() {
    let folder = folder();
    let cases: [(&[&str], &str); 6] = [
        (&["model.layers=1"], "a model of one block has no values to mix"),
        (&["model.family=t5", "model.layers=4", "model.kv_heads=2"], "family t5 has none"),
        (&["parallel.ranks=2", "parallel.tensor_parallel_degree=2"], "model.value_residual is not divided so"),
        (&["parallel.ranks=2", "parallel.context_parallel_degree=2"], "model.value_residual is not divided so"),
        (&["model.value_residual=2"], "model.value_residual"),
        (&["model.activation=relu_squared"], "the llama family gates with silu"),
    ];
    for (sets, expected) in cases {
        let ran = train(&folder, "refused", sets);
        assert!(ran.code != Some(0) && ran.stderr.contains(expected), "{sets:?}: {ran:?}");
        assert!(!folder.join("runs/refused").exists(), "{sets:?}: nothing has begun");
    }
}
