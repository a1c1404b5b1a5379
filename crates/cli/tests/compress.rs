//! Pruning and quantising trained models through the program.

mod common;

use common::Folder;
use serde_json::Value;
use std::fs;

/// A folder with a run that has learned something, `runs/tiny`, and its export `hf`.
fn trained() -> Folder {
    let folder = Folder::new();
    let sets = ["training.steps=150", "model.dim=64", "model.ffn_dim=128", "optimizer.learning_rate=5e-3"];
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    folder.run(&["train", "tiny.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    folder
}

fn json(folder: &Folder, arguments: &[&str]) -> Value {
    serde_json::from_str(&folder.run(&[arguments, &["--json"]].concat()).ok().stdout).unwrap()
}

fn loss(folder: &Folder, model: &str) -> f64 {
    let eval = ["eval", model, "--data", "text.txt", "--length", "32", "--dtype", "f32"];
    json(folder, &eval)["loss"].as_f64().unwrap()
}

const TEXTS: [&str; 7] = ["--calibration", "text.txt", "--length", "32", "--evaluate", "text.txt", "--samples"];

/// The published order on a model that was trained here: SparseGPT keeps more than magnitude and
/// Wanda (Frantar & Alistarh 2023, table 1), GPTQ more than rounding to nearest (Frantar et al.
/// 2023, table 3), and so does AWQ (Lin et al. 2023, table 4). Wanda keeps more than magnitude in
/// 2:4 (Sun et al. 2023, table 3); without a pattern the two are close to each other in a model as
/// small as this. What is reported is what `eval` says of the folder.
#[test]
fn methods_are_ordered_as_published_and_folders_hold_what_is_reported() {
    let folder = trained();
    let dense = loss(&folder, "runs/tiny");
    let prune = |method: &str, how: &[&str]| {
        let out = format!("{method}{}", how[1]);
        let command = [&["prune", "runs/tiny", "--out", &out, "--method", method][..], how, &TEXTS, &["64"]].concat();
        let line = json(&folder, &command);
        let [before, after] = ["loss_before", "loss_after"].map(|key| line[key].as_f64().unwrap());
        assert!((before - dense).abs() < 1e-5 && (after - loss(&folder, &out)).abs() < 1e-5, "{line} {dense}");
        let (zeros, all) = (line["zeros"].as_u64().unwrap(), line["elements"].as_u64().unwrap());
        assert!(2 * zeros >= all && zeros < all / 2 + all / 50, "{line}");
        after
    };
    for how in [["--sparsity", "0.5"], ["--pattern", "2:4"]] {
        let [magnitude, wanda, sparsegpt] = ["magnitude", "wanda", "sparsegpt"].map(|method| prune(method, &how));
        assert!(
            magnitude.min(wanda) > sparsegpt && sparsegpt > dense && (how[1] != "2:4" || magnitude > wanda),
            "{how:?}: {dense} {sparsegpt} {wanda} {magnitude}"
        );
    }
    let quantise = |method: &str, bits: &str, form: &str| {
        let out = format!("{method}{bits}{form}");
        let how = ["quantize", "runs/tiny", "--out", &out, "--method", method, "--bits", bits, "--form", form];
        let line = json(&folder, &[&how[..], &["--group", "32"], &TEXTS, &["64"]].concat());
        let after = line["loss_after"].as_f64().unwrap();
        assert!((after - loss(&folder, &out)).abs() < 1e-5, "{line}");
        (after, line["bytes"].as_u64().unwrap())
    };
    for bits in ["3", "4"] {
        let [rtn, gptq, awq] = ["rtn", "gptq", "awq"].map(|method| quantise(method, bits, "compressed-tensors"));
        assert!(rtn.0 > gptq.0 && rtn.0 > awq.0, "{bits} bits: {dense} {gptq:?} {awq:?} {rtn:?}");
    }
    let (eight, four) = (quantise("rtn", "8", "compressed-tensors"), quantise("rtn", "4", "dense"));
    assert!((eight.0 - dense).abs() < 2e-3, "{eight:?} {dense}");
    let rounded = |method: &str| {
        let how = ["quantize", "runs/tiny", "--out", method, "--method", method, "--activations", "8"];
        let line = json(&folder, &[&how[..], &TEXTS, &["64"]].concat());
        let after = line["loss_after"].as_f64().unwrap();
        assert!((after - loss(&folder, method)).abs() < 1e-5, "{line}");
        assert!(after != dense && (after - dense).abs() < 5e-3, "{method}: {after}, before {dense}");
        after
    };
    let [rtn, smooth] = ["rtn", "smoothquant"].map(rounded);
    assert!(rtn != eight.0 && rtn != smooth, "inputs were not rounded, or nothing was scaled: {rtn} {smooth}");
    // The same values as packed ones, in more bytes.
    let packed = fs::metadata(folder.join("rtn4compressed-tensors/model.safetensors")).unwrap().len();
    assert_eq!(loss(&folder, "rtn4dense"), loss(&folder, "rtn4compressed-tensors"));
    assert!(four.1 > 2 * packed, "{four:?} {packed}");
}

#[test]
fn a_packed_folder_generates_and_is_trained_on() {
    let folder = trained();
    let quantised = folder.run(&["quantize", "hf", "--out", "q", "--method", "rtn", "--group", "0"]).ok();
    assert!(quantised.stdout.contains("rtn, 4 bits, a scale per row"), "{}", quantised.stdout);
    let config: Value = serde_json::from_slice(&fs::read(folder.join("q/config.json")).unwrap()).unwrap();
    let settings = &config["quantization_config"]["config_groups"]["group_0"]["weights"];
    assert_eq!((settings["num_bits"].as_u64(), settings["strategy"].as_str()), (Some(4), Some("channel")));
    let generate = ["generate", "q", "--prompt", "the ", "--tokens", "20", "--temperature", "0", "--ignore-eos"];
    let generated = folder.run(&generate).ok();
    assert!(generated.stdout.len() > "the \n".len());
    assert!(generated.stderr.contains("have 4 bits (compressed-tensors) and are decoded"), "{}", generated.stderr);
    let data = common::TINY.split_once("[data]").unwrap().1;
    for (name, model) in [("more", "q"), ("pruned-more", "p")] {
        if model == "p" {
            folder.run(&["prune", "hf", "--out", "p", "--method", "magnitude", "--sparsity", "0.5"]).ok();
        }
        folder.write("more.toml", format!("[run]\nname = '{name}'\n[model]\npath = '{model}'\n[data]\n{data}"));
        let before = loss(&folder, model);
        folder.run(&["train", "more.toml", "--set", "training.steps=60", "--set", "optimizer.learning_rate=1e-3"]).ok();
        assert!(loss(&folder, &format!("runs/{name}")) < before);
    }
    // Written again, the weights are floats.
    folder.run(&["export", "q", "--out", "again", "--dtype", "f32"]).ok();
    assert_eq!(loss(&folder, "again"), loss(&folder, "q"));
}

#[test]
fn a_folder_with_rounded_inputs_says_so_and_is_read_as_it_says() {
    let folder = trained();
    let command = ["quantize", "hf", "--out", "q", "--method", "smoothquant", "--smoothing", "0.6"];
    let text = ["--calibration", "text.txt", "--length", "32", "--samples", "8"];
    let quantised = folder.run(&[&command[..], &text].concat()).ok();
    assert!(
        quantised.stdout.contains("smoothquant, 8 bits, a scale per row; inputs in 8 bits"),
        "{}",
        quantised.stdout
    );
    let text = fs::read_to_string(folder.join("q/config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let settings = &config["quantization_config"];
    assert_eq!(settings["format"], "int-quantized");
    let inputs = &settings["config_groups"]["group_0"]["input_activations"];
    assert_eq!((inputs["num_bits"].as_u64(), inputs["strategy"].as_str()), (Some(8), Some("token")));
    let generate = ["generate", "q", "--prompt", "the ", "--tokens", "8", "--temperature", "0", "--ignore-eos"];
    let generated = folder.run(&generate).ok();
    assert!(generated.stderr.contains("generation round their inputs to 8 bits"), "{}", generated.stderr);
    // The same weights without rounded inputs are another model.
    let rounded = loss(&folder, "q");
    folder.run(&["export", "q", "--out", "again", "--dtype", "f32"]).ok();
    let whole = loss(&folder, "again");
    assert!(rounded != whole && (rounded - whole).abs() < 5e-3, "{rounded} {whole}");
    for (from, to, says) in [
        ("\"dynamic\": true", "\"dynamic\": false", "whose scales are found for each row"),
        ("int-quantized", "float-quantized", "only `pack-quantized` and `int-quantized` are read"),
        ("int-quantized", "pack-quantized", "only `int-quantized` is read with rounded inputs"),
    ] {
        assert!(text.contains(from), "{text}");
        folder.write("q/config.json", text.replace(from, to));
        let refused = folder.run(&["eval", "q", "--data", "text.txt"]);
        assert!(refused.code == Some(1) && refused.stderr.contains(says), "{}", refused.stderr);
    }
}

#[test]
fn blocks_of_little_influence_are_dropped() {
    let folder = Folder::new();
    let sets = ["training.steps=80", "model.layers=3"].iter().flat_map(|set| ["--set", *set]);
    folder.run(&["train", "tiny.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    let command = [&["prune", "runs/tiny", "--out", "two", "--layers", "2"][..], &TEXTS, &["16"]].concat();
    let line = json(&folder, &command);
    let influences: Vec<f64> =
        line["settings"]["influences"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    assert!(influences.len() == 3 && influences.iter().all(|x| (0.0..2.0).contains(x)), "{line}");
    let least = (0..3).min_by(|a, b| influences[*a].total_cmp(&influences[*b])).unwrap();
    let kept: Vec<u64> = (0..3).filter(|layer| *layer != least).map(|layer| layer as u64).collect();
    assert_eq!(line["settings"]["kept"], serde_json::json!(kept));
    let config: Value = serde_json::from_slice(&fs::read(folder.join("two/config.json")).unwrap()).unwrap();
    assert_eq!(config["num_hidden_layers"], 2);
    assert!((line["loss_after"].as_f64().unwrap() - loss(&folder, "two")).abs() < 1e-5);
    assert!((line["loss_before"].as_f64().unwrap() - loss(&folder, "runs/tiny")).abs() < 1e-5);
}

#[test]
fn what_cannot_be_compressed_is_refused() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml", "--set", "training.steps=2"]).ok();
    folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    folder.write("short.txt", "a few words");
    fs::create_dir(folder.join("taken")).unwrap();
    folder.write("taken/file", "x");
    let prune = ["prune", "hf", "--out", "o"];
    let quantize = ["quantize", "hf", "--out", "o"];
    let cases: &[(&[&str], &[&str], i32, &str)] = &[
        (&prune, &[], 1, "give --sparsity 0.5, --pattern 2:4, --layers N, --ffn N,"),
        (&prune, &["--sparsity", "1.5"], 1, "a sparsity of 1.5 is not between 0 and 1"),
        (&prune, &["--sparsity", "0"], 1, "a sparsity of 0 is not between 0 and 1"),
        (&prune, &["--sparsity", "-0.5"], 1, "a sparsity of -0.5"),
        (&prune, &["--sparsity", "NaN"], 1, "a sparsity of NaN"),
        (&prune, &["--sparsity", "half"], 2, "half"),
        (&prune, &["--pattern", "4:2"], 1, "`4:2` is no pattern: 2:4 keeps 2 of each 4"),
        (&prune, &["--pattern", "2"], 1, "`2` is no pattern"),
        (&prune, &["--pattern", "0:4"], 1, "`0:4` is no pattern"),
        (&prune, &["--pattern", "1:100"], 1, "at most 64"),
        (&prune, &["--pattern", "2:7", "--method", "magnitude"], 1, "do not divide into groups of 7"),
        (&prune, &["--sparsity", "0.5", "--pattern", "2:4"], 2, "cannot be used with"),
        (&prune, &["--sparsity", "0.5", "--layers", "1"], 2, "cannot be used with"),
        (&prune, &["--sparsity", "0.5", "--method", "wander"], 2, "wanda"),
        (&prune, &["--sparsity", "0.5"], 1, "--calibration FILES"),
        (&prune, &["--sparsity", "0.5", "--method", "sparsegpt"], 1, "--calibration FILES"),
        (&prune, &["--sparsity", "0.5", "--calibration", "gone.txt"], 1, "gone.txt"),
        (&prune, &["--sparsity", "0.5", "--calibration", "short.txt"], 1, "a sequence takes 32: give more text"),
        (&prune, &["--sparsity", "0.5", "--calibration", "text.txt", "--length", "9999"], 1, "longest sequence of"),
        (&prune, &["--sparsity", "0.5", "--calibration", "text.txt", "--samples", "0"], 2, "0"),
        (&prune, &["--sparsity", "0.5", "--method", "magnitude", "--evaluate", "gone.txt"], 1, "gone.txt"),
        (&prune, &["--layers", "1"], 1, "give it text with --calibration FILES"),
        (&prune, &["--layers", "0", "--calibration", "text.txt"], 1, "keep at least 1"),
        (&prune, &["--layers", "2", "--calibration", "text.txt"], 1, "drop at least 1"),
        (&["prune", "gone", "--out", "o"], &["--sparsity", "0.5"], 1, "neither the folder of a run"),
        (&["prune", "hf", "--out", "taken"], &["--sparsity", "0.5"], 1, "taken exists already and is not empty"),
        (&["prune", "hf", "--out", "hf"], &["--sparsity", "0.5"], 1, "hf exists already"),
        (&["prune", "hf", "--out", "text.txt"], &["--sparsity", "0.5"], 1, "text.txt exists already"),
        (&["prune", "hf"], &["--sparsity", "0.5"], 2, "--out"),
        (&["prune", "hf", "--out", "o", "--checkpoint", "3"], &["--sparsity", "0.5"], 1, "no checkpoint to choose"),
        (&quantize, &["--bits", "5"], 1, "--bits 5: weights have 2, 3, 4 or 8 bits"),
        (&quantize, &["--bits", "many"], 2, "many"),
        (&quantize, &["--method", "smoothquant"], 1, "--calibration FILES"),
        (&quantize, &["--method", "smoothquant", "--bits", "4"], 1, "weights have 8 bits and a scale per row"),
        (&quantize, &["--activations", "4"], 2, "--activations"),
        (&quantize, &["--smoothing", "0.5"], 1, "--smoothing has no effect"),
        (&quantize, &["--method", "smoothquant", "--smoothing", "2"], 1, "must be from 0 to 1"),
        (&quantize, &["--method", "rtn", "--activations", "8", "--form", "dense"], 1, "a folder of floats cannot say"),
        (&quantize, &["--group", "24", "--method", "rtn"], 1, "--group 0 has one scale per row"),
        (&quantize, &["--method", "rtn"], 1, "groups of 128 do not divide the 32 inputs of block.0.attn.qkv.weight"),
        (&quantize, &["--group", "32"], 1, "--calibration FILES"),
        (&quantize, &["--group", "32", "--calibration", "short.txt"], 1, "give more text"),
        (&quantize, &["--method", "best"], 2, "gptq"),
        (&quantize, &["--form", "gguf"], 2, "compressed-tensors"),
        (&quantize, &["--dtype", "int4"], 2, "bf16"),
        (&["quantize", "hf", "--out", "taken"], &[], 1, "give --out a new folder"),
        (&["quantize", "gone", "--out", "o"], &[], 1, "cannot open the model gone"),
    ];
    let mut wrong = Vec::new();
    for (command, more, code, says) in cases {
        let ran = folder.run(&[*command, *more].concat());
        let once = ran.stderr.matches("error: ").count() == 1;
        if ran.code != Some(*code) || !ran.stderr.contains(says) || !once || ran.stderr.contains("panicked") {
            wrong.push(format!("{command:?} {more:?}: {:?}\n{}", ran.code, ran.stderr));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(!folder.join("o").exists(), "a folder was left");
    // Damaged files say so.
    folder.run(&["quantize", "hf", "--out", "q", "--method", "rtn", "--group", "32"]).ok();
    let text = fs::read_to_string(folder.join("q/config.json")).unwrap();
    for (from, to, says) in [
        ("\"num_bits\": 4", "\"num_bits\": 8", "`model.layers.0.mlp.down_proj.weight_packed` is I32"),
        ("\"symmetric\": true", "\"symmetric\": false", "symmetric integers of 2, 3, 4 or 8 bits are read"),
        ("compressed-tensors", "bitsandbytes", "only weights packed by compressed-tensors are read"),
        ("\"group_size\": 32", "\"group_size\": 16", "weight_scale` is"),
    ] {
        assert!(text.contains(from), "{text}");
        folder.write("q/config.json", text.replace(from, to));
        let refused = folder.run(&["eval", "q", "--data", "text.txt"]);
        assert!(refused.code == Some(1) && refused.stderr.contains(says), "{}", refused.stderr);
    }
}

/// Files of GPT-2 hold transposed matrices, which compressed-tensors does not pack.
#[test]
fn gpt_2_is_pruned_and_written_dense() {
    let folder = Folder::new();
    let gpt2 = ["--set", "model.family=gpt2", "--set", "training.steps=30"];
    folder.run(&[&["train", "tiny.toml"][..], &gpt2].concat()).ok();
    let refused = folder.run(&["quantize", "runs/tiny", "--out", "q", "--method", "rtn", "--group", "32"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("transposed matrices"), "{}", refused.stderr);
    assert!(refused.stderr.contains("--form dense"), "{}", refused.stderr);
    let dense = ["quantize", "runs/tiny", "--out", "q", "--method", "gptq", "--group", "32", "--form", "dense"];
    let line = json(&folder, &[&dense[..], &TEXTS, &["32"]].concat());
    assert!((line["loss_after"].as_f64().unwrap() - loss(&folder, "q")).abs() < 1e-5, "{line}");
    let pruned =
        json(&folder, &[&["prune", "runs/tiny", "--out", "p", "--sparsity", "0.5"][..], &TEXTS, &["32"]].concat());
    assert!((pruned["loss_after"].as_f64().unwrap() - loss(&folder, "p")).abs() < 1e-5, "{pruned}");
}

#[test]
fn models_of_one_shape_are_merged() {
    let folder = Folder::new();
    let train = |name: &str, more: &[&str]| {
        let name = format!("run.name='{name}'");
        folder.run(&[&["train", "tiny.toml", "--set", &name], more].concat()).ok();
    };
    train("base", &["--set", "training.steps=60"]);
    folder.run(&["export", "runs/base", "--out", "base"]).ok();
    let data = common::TINY.split_once("[data]").unwrap().1;
    for (name, seed) in [("a", 1), ("b", 2)] {
        folder.write("more.toml", format!("[run]\nname = '{name}'\n[model]\npath = 'base'\n[data]\n{data}"));
        let sets = [format!("training.seed={seed}"), "optimizer.learning_rate=1e-3".into(), "training.steps=40".into()];
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        folder.run(&["train", "more.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    }
    let [base, a, b] = ["base", "runs/a", "runs/b"].map(|model| loss(&folder, model));
    assert!(base > a && base > b, "{base} {a} {b}");
    let merge = |name: &str, arguments: &[&str]| {
        let ran = folder.run(&[&["merge", "--out", name], arguments].concat()).ok();
        assert!(ran.stdout.contains("models: "), "{}", ran.stdout);
        loss(&folder, name)
    };
    let method = |name| ["runs/a", "runs/b", "--method", name];
    for name in ["soup", "slerp", "task", "ties", "dare"] {
        let more: &[&str] = match name {
            "soup" | "slerp" => &[],
            "task" => &["--base", "base", "--weights", "0.5,0.5"],
            _ => &["--base", "base", "--weights", "0.5,0.5", "--density", "0.8"],
        };
        let merged = merge(name, &[&method(name)[..], more].concat());
        assert!(merged < base, "{name}: {merged}, and the base {base}");
    }
    // Together they predict no worse than they do on average, and each alone as `eval` says.
    let eval = ["eval", "runs/a", "runs/b", "--data", "text.txt", "--length", "32", "--dtype", "f32"];
    let mean = json(&folder, &[&eval[..], &["--ensemble", "mean"]].concat());
    for (place, alone) in [a, b].iter().enumerate() {
        assert!((mean["models"][place]["loss"].as_f64().unwrap() - alone).abs() < 1e-5, "{mean} {a} {b}");
    }
    let found = mean["ensemble"]["loss"].as_f64().unwrap();
    assert!(found < (a + b) / 2.0, "{mean}");
    let same = ["eval", "runs/a", "runs/a", "--data", "text.txt", "--length", "32", "--dtype", "f32"];
    let twice = json(&folder, &[&same[..], &["--ensemble", "mean"]].concat());
    assert!((twice["ensemble"]["loss"].as_f64().unwrap() - a).abs() < 1e-5, "{twice}");
    let vote = json(&folder, &[&same[..], &["--ensemble", "vote"]].concat());
    assert_eq!(vote["ensemble"]["accuracy"], vote["models"][0]["accuracy"]);
    assert!(vote["ensemble"]["loss"].is_null() && vote["models"][0]["loss"] == twice["models"][0]["loss"]);
    let shown = folder.run(&[&eval[..], &["--ensemble", "vote"]].concat()).ok().stdout;
    assert!(shown.contains("vote of 2") && shown.contains("accuracy"), "{shown}");

    // All weight on one model is that model, and no change is the base.
    assert_eq!(merge("one", &["runs/a", "runs/b", "--weights", "1,0"]), a);
    assert_eq!(merge("none", &[&method("task")[..], &["--base", "base", "--weights", "0,0"]].concat()), base);
    assert_eq!(merge("only", &["runs/a", "--method", "task", "--base", "base"]), a);

    train("other", &["--set", "tokenizer.kind=characters", "--set", "training.steps=2"]);
    for (arguments, says) in [
        (&["eval", "runs/a", "runs/b", "--data", "text.txt"][..], "--ensemble mean or vote"),
        (&["eval", "runs/a", "--data", "text.txt", "--ensemble", "mean"], "this is one"),
        (&["eval", "runs/a", "runs/other", "--data", "text.txt", "--ensemble", "mean"], "different tokenizers"),
        (&["eval", "runs/a", "runs/gone", "--data", "text.txt", "--ensemble", "mean"], "runs/gone"),
    ] {
        let refused = folder.run(arguments);
        assert_eq!(refused.code, Some(1), "{arguments:?}");
        assert!(refused.stderr.contains(says), "no `{says}` in {}", refused.stderr);
    }
    train("wide", &["--set", "model.ffn_dim=64", "--set", "training.steps=2"]);
    train("gpt2", &["--set", "model.family=gpt2", "--set", "training.steps=2"]);
    train("theta", &["--set", "model.rope_theta=500000.0", "--set", "training.steps=2"]);
    let two = ["merge", "runs/a", "runs/b", "--out", "o"];
    let cases: &[(&[&str], i32, &str)] = &[
        (&["merge", "runs/a", "--out", "o"], 1, "a merge takes two models or more"),
        (&["merge", "--out", "o"], 2, "<MODELS>"),
        (&["merge", "runs/a", "runs/b"], 2, "--out"),
        (&["merge", "runs/a", "gone", "--out", "o"], 1, "cannot open the model gone"),
        (&["merge", "runs/a", "runs/b", "--out", "base"], 1, "base exists already"),
        (&["merge", "runs/a", "runs/wide", "--out", "o"], 1, "the first model and model 2 have ffn_dim 128 and 64"),
        (&["merge", "runs/a", "runs/gpt2", "--out", "o"], 1, "family llama and gpt2"),
        (&["merge", "runs/a", "runs/theta", "--out", "o"], 1, "that are not the same"),
        (&[&two[..], &["--weights", "1"]].concat(), 1, "1 weights for 2 models"),
        (&[&two[..], &["--weights", "1,x"]].concat(), 2, "x"),
        (&[&two[..], &["--weights", "0,0"]].concat(), 1, "not all of them 0"),
        (&[&two[..], &["--weights=-1,1"]].concat(), 1, "numbers of 0 or more"),
        (&[&two[..], &["--weights", "1,inf"]].concat(), 1, "not finite"),
        (&[&two[..], &["--method", "ties"]].concat(), 1, "--base MODEL"),
        (&[&two[..], &["--base", "base"]].concat(), 1, "know no base"),
        (&[&two[..], &["--method", "dare", "--base", "base", "--density", "0"]].concat(), 1, "a density of 0"),
        (&[&two[..], &["--method", "dare", "--base", "base", "--density", "1.5"]].concat(), 1, "a density of 1.5"),
        (&[&two[..], &["--method", "task", "--base", "runs/wide"]].concat(), 1, "the first model and the base have"),
        (&[&two[..], &["--method", "average"]].concat(), 2, "soup"),
        (&["merge", "runs/a", "runs/b", "base", "--method", "slerp", "--out", "o"], 1, "and there are 3: take soup"),
    ];
    for (command, code, says) in cases {
        let ran = folder.run(command);
        assert!(ran.code == Some(*code) && ran.stderr.contains(says), "{command:?}: {:?} {}", ran.code, ran.stderr);
    }
    assert!(!folder.join("o").exists(), "a folder was left");
}

#[test]
fn a_mixture_of_experts_is_refused() {
    let folder = Folder::new();
    let sets = ["--set", "model.family=mixtral", "--set", "training.steps=2"];
    folder.run(&[&["train", "tiny.toml"], &sets[..]].concat()).ok();
    for command in [
        &["prune", "runs/tiny", "--method", "magnitude", "--sparsity", "0.5"][..],
        &["quantize", "runs/tiny", "--method", "rtn"],
    ] {
        let ran = folder.run(&[command, &["--out", "out"]].concat());
        assert!(ran.code == Some(1) && ran.stderr.contains("is a mixture of experts"), "{}", ran.stderr);
        assert!(!folder.join("out").exists());
    }
}
