//! Training that knows of rounding and of zeros, through the program.

mod common;

use common::Folder;
use serde_json::Value;
use std::fs;
use std::path::Path;

fn json(folder: &Folder, arguments: &[&str]) -> Value {
    serde_json::from_str(&folder.run(&[arguments, &["--json"]].concat()).ok().stdout).unwrap()
}

/// Trains `name` with validation text of its own.
fn train(folder: &Folder, name: &str, sets: &[&str]) {
    let text = fs::read_to_string(folder.join("text.txt")).unwrap();
    folder.write("valid.txt", &text[..2000]);
    let run = format!("run.name='{name}'");
    let all = [&[&run, "data.validation='valid.txt'", "data.validation_fraction=auto"], sets].concat();
    let sets = all.iter().flat_map(|set| ["--set", *set]);
    folder.run(&["train", "tiny.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
}

fn loss(folder: &Folder, model: &str, dtype: &str) -> f64 {
    let eval = ["eval", model, "--data", "valid.txt", "--length", "32", "--dtype", dtype];
    json(folder, &eval)["loss"].as_f64().unwrap()
}

fn last(folder: &Folder, file: &str) -> Value {
    let text = fs::read_to_string(folder.join(file)).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

/// A run evaluates the model that rounding to nearest makes of its masters, on the same grid, in
/// every precision and with masters of either form.
#[test]
fn a_run_on_a_grid_evaluates_the_model_that_it_is_rounded_to() {
    let folder = Folder::new();
    for (dtype, bits, group) in [("f32", "4", "32"), ("bf16", "4", "16"), ("f32", "2", "0"), ("bf16", "8", "32")] {
        let name = format!("{dtype}-{bits}-{group}");
        let sets = [
            format!("precision.compute='{dtype}'"),
            format!("quantization.aware={bits}"),
            format!("quantization.group={group}"),
            "evaluation.tokens_max=auto".to_owned(),
        ];
        train(&folder, &name, &sets.each_ref().map(String::as_str));
        let (run, out) = (format!("runs/{name}"), format!("q-{name}"));
        let quantize = ["quantize", &run, "--out", &out, "--method", "rtn", "--bits", bits, "--group", group];
        folder.run(&quantize).ok();
        let evaluated = last(&folder, &format!("{run}/evaluations.jsonl"))["loss"].as_f64().unwrap();
        let (rounded, masters) = (loss(&folder, &out, dtype), loss(&folder, &run, dtype));
        // Sums of losses over rows are taken in another order.
        assert!((rounded - evaluated).abs() < 1e-6, "{name}: {rounded} of the folder, {evaluated} of the run");
        assert!(bits == "8" || (masters - evaluated).abs() > 1e-5, "{name}: the grid changed nothing");
    }
}

/// A model trained for 2 bits has a lower loss when it is rounded than one that was not: by 0.05 on
/// average of three seeds, between which losses differ by 0.1.
#[test]
fn training_on_a_grid_makes_up_for_it() {
    let folder = Folder::new();
    let rounded = |name: &str, sets: &[&str]| {
        let losses = [0, 1, 2].map(|seed| {
            let (name, seed) = (format!("{name}-{seed}"), format!("training.seed={seed}"));
            let all = [&[&seed, "training.steps=300", "model.dim=64", "optimizer.learning_rate=1e-2"], sets].concat();
            train(&folder, &name, &all);
            let (run, out) = (format!("runs/{name}"), format!("q-{name}"));
            let quantize = ["quantize", &run, "--out", &out, "--method", "rtn", "--bits", "2", "--group", "0"];
            folder.run(&quantize).ok();
            loss(&folder, &out, "f32")
        });
        losses.iter().sum::<f64>() / 3.0
    };
    let (plain, aware) = (rounded("plain", &[]), rounded("aware", &["quantization.aware=2", "quantization.group=0"]));
    assert!(aware + 0.02 < plain, "{aware} of the one that knew, {plain} of the other");
}

/// The f32 tensors of a safetensors file.
fn tensors(path: &Path) -> Vec<(String, Vec<f32>)> {
    let bytes = fs::read(path).unwrap();
    let (length, rest) = bytes.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: Value = serde_json::from_slice(header).unwrap();
    let entries = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let tensor = |(name, entry): (&String, &Value)| {
        assert_eq!(entry["dtype"], "F32", "{name}");
        let at = |end: usize| entry["data_offsets"][end].as_u64().unwrap() as usize;
        let values = data[at(0)..at(1)].chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
        (name.clone(), values.collect())
    };
    entries.map(tensor).collect()
}

#[test]
fn an_exported_run_has_the_zeros_of_its_training() {
    let folder = Folder::new();
    let zeros = |weights: &[f32]| weights.iter().filter(|weight| **weight == 0.0).count();
    train(&folder, "pairs", &["pruning.pattern='2:4'"]);
    train(&folder, "most", &["pruning.sparsity=0.75", "quantization.aware=8", "quantization.group=16"]);
    for run in ["pairs", "most"] {
        folder.run(&["export", &format!("runs/{run}"), "--out", run]).ok();
        let mut matrices = 0;
        for (name, weights) in tensors(&folder.join(run).join("model.safetensors")) {
            if !name.contains("_proj") {
                assert!(zeros(&weights) == 0, "{run}: {name} is pruned");
                continue;
            }
            matrices += 1;
            match run {
                "pairs" => assert!(weights.chunks(4).all(|four| zeros(four) == 2), "{name}"),
                _ => assert_eq!(zeros(&weights), weights.len() * 3 / 4, "{name}"),
            }
        }
        assert_eq!(matrices, 2 * 7, "{run}");
        let want = if run == "pairs" { 0.5 } else { 0.75 };
        assert_eq!(last(&folder, &format!("runs/{run}/metrics.jsonl"))["sparsity"], want);
        let evaluated = last(&folder, &format!("runs/{run}/evaluations.jsonl"))["loss"].as_f64().unwrap();
        assert!(evaluated.is_finite());
        folder.run(&["generate", run, "--prompt", "a", "--tokens", "4"]).ok();
    }
    // The zeros are on the grid too, so they survive the rounding.
    let quantize = ["quantize", "runs/most", "--out", "q", "--method", "rtn", "--bits", "8", "--group", "16"];
    folder.run(&[&quantize[..], &["--form", "dense"]].concat()).ok();
    for (name, weights) in tensors(&folder.join("q/model.safetensors")) {
        assert!(!name.contains("_proj") || zeros(&weights) >= weights.len() * 3 / 4, "{name}");
    }
}

#[test]
fn the_program_of_a_step_says_what_updates_do() {
    let folder = Folder::new();
    let sets = ["quantization.aware=4", "quantization.group=32", "pruning.pattern='2:4'"];
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let printed = folder.run(&["program", "tiny.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok().stdout;
    assert!(printed.contains("update block.0, to 4 bits, pruned"), "{printed}");
    assert!(printed.contains("update head") && !printed.contains("update head, "), "{printed}");
}
