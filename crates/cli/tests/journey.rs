//! The whole path through the program: from text to a trained, exported and used model.

mod common;

use common::{Folder, tensors};
use std::fs;

#[test]
fn a_run_is_trained_resumed_evaluated_sampled_and_exported() {
    let folder = Folder::new();
    let first = folder.run(&["train", "tiny.toml"]).ok();
    for part in
        ["layout       1 rank x", "predicted:", "12 steps", "validation   loss", "--- sample", "run folder   runs/tiny"]
    {
        assert!(first.stdout.contains(part), "no {part:?} in:\n{}", first.stdout);
    }
    let metrics = fs::read_to_string(folder.join("runs/tiny/metrics.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 12);
    for key in ["step", "loss", "lr", "grad_norm", "tokens", "tps", "tflops", "mfu", "step_s", "data_wait_s"] {
        assert!(lines[11][key].is_number(), "{key} in {}", lines[11]);
    }

    // The saved file is a configuration again, and the run resumes where it was.
    folder.run(&["config", "check", "runs/tiny/config.toml"]).ok();
    let more = folder.run(&["train", "--resume", "runs/tiny", "--set", "training.steps=40"]).ok();
    assert!(more.stderr.contains("resumed at step 12"), "{}", more.stderr);
    let metrics = fs::read_to_string(folder.join("runs/tiny/metrics.jsonl")).unwrap();
    let steps: Vec<_> = metrics.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()).collect();
    let numbers: Vec<u64> = steps.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=40).collect::<Vec<_>>());
    let loss = |line: &serde_json::Value| line["loss"].as_f64().unwrap();
    assert!(loss(&steps[39]) < loss(&steps[0]) - 1.0, "{} -> {}", loss(&steps[0]), loss(&steps[39]));

    let eval = |model: &str| -> serde_json::Value {
        let ran = folder.run(&["eval", model, "--data", "text.txt", "--length", "32", "--dtype", "f32", "--json"]).ok();
        serde_json::from_str(&ran.stdout).unwrap()
    };
    let of_run = eval("runs/tiny");
    assert_eq!(of_run["step"], 40);
    let perplexity = of_run["loss"].as_f64().unwrap().exp();
    assert!((of_run["perplexity"].as_f64().unwrap() / perplexity - 1.0).abs() < 1e-9);
    assert!(of_run["bits_per_byte"].as_f64().unwrap() > 0.0);

    let generate = |model: &str, seed: &str| {
        let arguments = ["generate", model, "--prompt", "the ", "--tokens", "20", "--seed", seed, "--top-k", "20"];
        folder.run(&[&arguments[..], &["--ignore-eos", "--dtype", "f32"]].concat()).ok().stdout
    };
    let text = generate("runs/tiny", "1");
    assert!(text.starts_with("the ") && text.len() > 10, "{text:?}");
    assert_eq!(text, generate("runs/tiny", "1"));
    assert_ne!(text, generate("runs/tiny", "2"));

    let exported =
        folder.run(&["export", "runs/tiny", "--out", "hf", "--dtype", "f32", "--max-shard-size", "20KB"]).ok();
    assert!(exported.stdout.contains("model.safetensors.index.json"), "{}", exported.stdout);
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        assert!(folder.join("hf").join(file).is_file(), "{file}");
    }
    // Generation stops at the end of a text: 256 is the end-of-text token of bytes.
    let generation: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("hf/generation_config.json")).unwrap()).unwrap();
    assert_eq!(generation["eos_token_id"], 256, "{generation}");
    // The exported model is the same function.
    let of_export = eval("hf")["loss"].as_f64().unwrap();
    assert!((of_export - of_run["loss"].as_f64().unwrap()).abs() < 1e-6, "{of_export} {of_run}");
    assert_eq!(generate("hf", "1"), text);
}

#[test]
fn a_run_by_the_clock_goes_on_under_a_longer_limit() {
    let folder = Folder::new();
    let steps = |arguments: &[&str]| {
        folder.run(&[arguments, &["--set", "training.steps='auto'"]].concat()).ok();
        fs::read_to_string(folder.join("runs/tiny/metrics.jsonl")).unwrap().lines().count()
    };
    let first = steps(&["train", "tiny.toml", "--set", "training.seconds=1"]);
    // The schedule, fixed by the first limit, is over, or nearly.
    let second = steps(&["train", "--resume", "runs/tiny", "--set", "training.seconds=4"]);
    assert!(second > first + first / 2, "{first} steps in a second, {second} in four");
}

#[test]
fn tokenizers_and_token_files_are_made_and_trained_on() {
    let folder = Folder::new();
    let made = folder.run(&["tokenizer", "train", "--vocab-size", "280", "--out", "tok.json", "text.txt"]).ok();
    assert!(made.stdout.contains("tok.json: 280 tokens"), "{}", made.stdout);
    for (tokenizer, out) in [("tok.json", "data/bpe"), ("bytes", "data/bytes"), ("characters", "data/characters")] {
        let prepare = ["data", "prepare", "--tokenizer", tokenizer, "--out", out, "--validation-fraction", "0.1"];
        let made = folder.run(&[&prepare[..], &["text.txt"]].concat()).ok();
        assert!(made.stdout.starts_with("made: no earlier result"), "{}", made.stdout);
        assert!(folder.run(&[&prepare[..], &["text.txt"]].concat()).ok().stdout.starts_with("kept: "));
        let (data, name) = (format!("data.train=['{out}']"), format!("run.name='{}'", out.replace('/', "-")));
        let sets = [&data, &name, "tokenizer.kind='auto'", "data.validation_fraction='auto'"];
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        let arguments: Vec<&str> = ["train", "tiny.toml"].into_iter().chain(sets).collect();
        let trained = folder.run(&arguments).ok();
        assert!(trained.stdout.contains("validation   loss"), "{}", trained.stdout);
    }
}

/// This is documented, and `checkpoint.keep_best` needs it.
#[test]
fn a_checkpoint_is_written_before_each_evaluation() {
    let folder = Folder::new();
    let sets = ["evaluation.interval_steps=4", "checkpoint.interval_steps=auto", "checkpoint.keep_last=3"];
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let ran = folder.run(&["train", "tiny.toml"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    assert_eq!(ran.stderr.matches("evaluation at step").count(), 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("best so far: loss"), "{}", ran.stderr);
    let steps: Vec<String> = common::checkpoints(&folder.join("runs/tiny")).into_keys().collect();
    assert_eq!(steps, ["step-00000004", "step-00000008", "step-00000012"]);
}

#[test]
fn text_follows_the_tokenizer_of_token_files_beside_it_and_other_tokens_are_refused() {
    let folder = Folder::new();
    folder.run(&["tokenizer", "train", "--vocab-size", "280", "--out", "tok.json", "text.txt"]).ok();
    folder.write("more.txt", "the quick brown fox jumps over the lazy dog ".repeat(50));
    let prepare = ["data", "prepare", "--validation-fraction", "0.05", "--tokenizer"];
    folder.run(&[&prepare[..], &["tok.json", "--out", "data/bpe", "text.txt"]].concat()).ok();
    folder.run(&[&prepare[..], &["bytes", "--out", "data/bytes", "text.txt"]].concat()).ok();
    let train = |name: &str, data: &str, kind: &str| {
        let sets = [format!("run.name={name}"), format!("data.train={data}"), format!("tokenizer.kind={kind}")];
        folder.run(&["train", "tiny.toml", "--set", &sets[0], "--set", &sets[1], "--set", &sets[2]])
    };
    let mixed = train("mixed", "['data/bpe', 'more.txt']", "auto").ok();
    assert!(mixed.stderr.contains("tokenizer of data/bpe.train: tokenizer.json, 280 tokens"), "{}", mixed.stderr);
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert_eq!(bytes("runs/mixed/tokenizer.json"), bytes("tok.json"));
    for (data, kind) in [("['data/bpe', 'data/bytes']", "auto"), ("['data/bpe']", "bytes")] {
        let refused = train("refused", data, kind);
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        assert!(refused.stderr.contains("holds tokens of another tokenizer"), "{}", refused.stderr);
        assert!(!folder.join("runs/refused").exists(), "a run that never began left a folder");
    }
    // With the name used for training, the held-back part is evaluated.
    assert!(folder.run(&["eval", "runs/mixed", "--data", "data/bpe"]).ok().stdout.contains("runs/mixed at step 12"));
    let refused = folder.run(&["eval", "runs/mixed", "--data", "data/bytes"]);
    assert!(refused.stderr.contains("holds tokens of another tokenizer"), "{}", refused.stderr);
    // A tokenizer that was saved by another program is the same one.
    let tokenizer: serde_json::Value = serde_json::from_slice(&bytes("tok.json")).unwrap();
    folder.write("data/bpe.tokenizer.json", tokenizer.to_string());
    train("saved-again", "['data/bpe']", "auto").ok();
}

#[test]
fn the_quick_start_takes_other_text() {
    let folder = Folder::new();
    let tiny = ["model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn_dim=64"];
    let fast = [
        "schedule.warmup_steps=1",
        "training.steps=3",
        "training.seconds='auto'",
        "tokenizer.vocab_size=280",
        "training.micro_batch_size=2",
    ];
    let sets = tiny.iter().chain(&fast).flat_map(|set| ["--set", *set]);
    let arguments: Vec<&str> = ["train", "--data", "text.txt"].into_iter().chain(sets).collect();
    let ran = folder.run(&arguments).ok();
    let config = fs::read_to_string(folder.join("runs/run-001/config.toml")).unwrap();
    assert!(config.contains("train = [\"text.txt\"]") && ran.stdout.contains("3 steps"), "{}", ran.stdout);
    assert!(!tensors(&folder.join("runs/run-001")).1.is_empty());
}

#[test]
fn configurations_and_programs_are_explained() {
    let folder = Folder::new();
    let checked = folder.run(&["config", "check", "tiny.toml"]).ok().stdout;
    assert!(checked.contains("the configuration is valid") && checked.contains("activations"), "{checked}");
    // The printed configuration can be read again and means the same.
    let printed = folder.run(&["config", "print", "tiny.toml"]).ok().stdout;
    folder.write("again.toml", &printed);
    assert_eq!(folder.run(&["config", "print", "again.toml"]).ok().stdout, printed);
    assert!(folder.run(&["config", "presets"]).ok().stdout.contains("gpt2-124m"));
    let program = folder.run(&["program", "tiny.toml", "--set", "training.accumulation_steps=2"]).ok().stdout;
    assert!(program.contains("2 micro-batches"), "{program}");
    let json: serde_json::Value =
        serde_json::from_str(&folder.run(&["program", "tiny.toml", "--json"]).ok().stdout).unwrap();
    assert!(json["instructions"].is_array());
    let drawn = ["program", "tiny.toml", "--set", "parallel.ranks=2", "--set", "parallel.zero_stage=3"];
    let said = folder.run(&[&drawn[..], &["--rank", "1", "--picture", "step.svg"]].concat()).ok().stdout;
    assert!(said.starts_with("step.svg: rank 1 of 2, "), "{said}");
    let picture = fs::read_to_string(folder.join("step.svg")).unwrap();
    let named = if said.contains("predicted times") { "predicted: this machine's profile" } else { "equal units" };
    for part in [named, "rect class=\"forward\"", "rect class=\"backward\"", "rect class=\"gather\"", ">gather</text>"]
    {
        assert!(picture.contains(part), "{part} is not in {picture}");
    }
    let shared = ["program", "tiny.toml", "--set", "training.accumulation_steps=4", "--set"];
    let stages = [&shared[..], &["parallel.pipeline_parallel_degree=2", "--rank", "3"]].concat();
    let stages = [&stages[..], &["--set", "parallel.tensor_parallel_degree=2", "--picture", "stages.svg"]].concat();
    let said = folder.run(&stages).ok().stdout;
    assert!(said.starts_with("stages.svg: 2 stages of 2 ranks, "), "{said}");
    let picture = fs::read_to_string(folder.join("stages.svg")).unwrap();
    // The ranks of rank 3's own pipeline, their messages, and what each group exchanges.
    for part in ["rank 1 compute", "rank 3 compute", "class=\"message\"", "rect class=\"exchange\""] {
        assert!(picture.contains(part), "{part} is not in {picture}");
    }
    let refused = folder.run(&[&drawn[..], &["--picture", "no/folder/step.svg"]].concat());
    assert!(
        refused.code != Some(0) && refused.stderr.contains("cannot write no/folder/step.svg"),
        "{}",
        refused.stderr
    );
}

#[test]
fn a_step_is_benchmarked() {
    let folder = Folder::new();
    let small = ["--preset", "shakespeare-char", "--vocab-size", "128", "--rows", "2", "--length", "32"];
    let bench =
        |more: &[&str]| folder.run(&[&["bench", "train", "--steps", "2"], &small[..], more].concat()).ok().stdout;
    let line: serde_json::Value = serde_json::from_str(&bench(&["--json", "--precision", "f32"])).unwrap();
    for key in ["step_s", "tokens_per_s", "tflops", "first_step_s", "peak_rss_bytes"] {
        assert!(line[key].as_f64().unwrap() > 0.0, "{key} in {line}");
    }
    assert!(line["mfu"].as_f64().is_none_or(|mfu| mfu > 0.0 && mfu <= 1.0) && line["data_wait_s"].is_number());
    assert!(bench(&[]).contains("kernels of one step"));
}

#[test]
fn the_largest_model_within_a_limit_is_found_and_trained() {
    let folder = Folder::new();
    let small =
        ["--preset", "shakespeare-char", "--vocab-size", "128", "--rows", "1", "--length", "32", "--steps", "1"];
    let bench = |more: &[&str]| -> serde_json::Value {
        let limit = ["--set", "memory.limit=24MiB", "--json"];
        serde_json::from_str(&folder.run(&[&["bench", "largest"], &small[..], &limit, more].concat()).ok().stdout)
            .unwrap()
    };
    let predicted = bench(&["--predict"]);
    let trained = bench(&[]);
    assert_eq!((&predicted["layers"], &predicted["parameters"]), (&trained["layers"], &trained["parameters"]));
    assert_eq!(trained["mem_peak_bytes"], trained["mem_predicted_bytes"]);
    let bytes = trained["mem_peak_bytes"].as_u64().unwrap();
    assert!((20 << 20..=24 << 20).contains(&bytes), "{bytes}");
    let on_disk = bench(&["--set", "memory.offload.optimizer=disk"]);
    assert!(on_disk["layers"].as_u64() > trained["layers"].as_u64() && on_disk["disk_bytes"].as_u64().unwrap() > 0);
    for (set, said) in
        [("memory.limit=1MiB", "not even one layer fits in 1.0 MiB"), ("model.layers=2", "leave model.layers out")]
    {
        let ran = folder.run(&[&["bench", "largest"], &small[..], &["--set", set]].concat());
        assert_eq!(ran.code, Some(1));
        assert!(ran.stderr.contains(said), "{}", ran.stderr);
    }
}

/// `config check` once silently accepted a configuration that `train` refuses on the same machine.
#[test]
fn a_configuration_that_this_machine_has_no_memory_for_is_said_to_be_valid_elsewhere() {
    let folder = Folder::new();
    let large = ["--set", "model.dim=4096", "--set", "model.heads=32", "--set", "training.micro_batch_size=100000"];
    let checked = folder.run(&[&["config", "check", "tiny.toml"][..], &large].concat()).ok();
    let says = "the configuration is valid, and cannot be trained on this machine: a step needs";
    assert!(
        checked.stdout.contains(says) && checked.stdout.contains("over this machine's memory"),
        "{}",
        checked.stdout
    );
    assert!(folder.run(&["config", "check", "tiny.toml"]).ok().stdout.ends_with("\nthe configuration is valid\n"));
}

/// A document that was partly held back was once counted on both sides.
#[test]
fn a_document_that_is_divided_counts_once() {
    let folder = Folder::new();
    let line = |i: usize| format!("{{\"text\": \"{}\"}}\n", format!("line {i} of the text. ").repeat(100));
    folder.write("lines.jsonl", (0..50).map(line).collect::<String>());
    let sets = ["--set", "data.validation_fraction=0.004", "--set", "training.steps=2"];
    for (name, says) in [("first", "tokenized"), ("second", "found")] {
        let name = format!("run.name='{name}'");
        let arguments = [&["train", "tiny.toml", "--data", "lines.jsonl", "--set", &name], &sets[..]].concat();
        let ran = folder.run(&arguments).ok();
        let says = format!("{says} 50 documents (1 of them divided between training and validation), ");
        assert!(ran.stderr.contains(&says), "{says}\n{}", ran.stderr);
    }
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--validation-fraction", "0.004", "--out", "d"];
    let ran = folder.run(&[&prepare[..], &["lines.jsonl"]].concat()).ok();
    assert!(ran.stdout.contains("divided     1 of the documents in both: only the end validates"), "{}", ran.stdout);
}
