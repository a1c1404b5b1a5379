//! A model with an encoder and a decoder, from the command line; and span corruption.

mod common;

use common::{Folder, Ran, TINY, losses, record, tensors};
use serde_json::Value;
use std::fs;

/// A folder with `t5.toml`: an encoder and a decoder of two blocks each.
fn folder() -> Folder {
    let folder = Folder::new();
    let config = TINY.replace("name = 'tiny'", "name = 'one'");
    let config = config.replace("family = 'llama'", "family = 't5'").replace("layers = 2", "layers = 4");
    folder.write("t5.toml", config.replace("max_sequence_length = 32\n", ""));
    folder
}

fn train(folder: &Folder, name: &str, sets: &[&str]) -> Ran {
    folder.train("t5.toml", name, sets)
}

#[test]
fn a_run_learns_and_resumes_with_the_same_bits_and_its_memory_is_predicted() {
    let folder = folder();
    train(&folder, "one", &["training.steps=60"]).ok();
    let all: Vec<f64> = losses(&folder, "one").iter().map(|loss| loss.parse().unwrap()).collect();
    assert!(all[59] < 0.8 * all[0], "{} after {}", all[59], all[0]);
    let steps = record(&folder, "one", "metrics.jsonl");
    assert_eq!(steps[3]["mem_peak_bytes"], steps[3]["predicted_mem_peak_bytes"]);

    train(&folder, "whole", &["model.dropout=0.1"]).ok();
    let mut paused = folder.command(&["train", "t5.toml", "--set", "run.name=paused", "--set", "model.dropout=0.1"]);
    Ran::new(paused.args(["--until", "7"]).output().unwrap()).ok();
    folder.run(&["train", "--resume", "runs/paused"]).ok();
    assert_eq!(losses(&folder, "paused"), losses(&folder, "whole"));
    assert_eq!(tensors(&folder.join("runs/paused")), tensors(&folder.join("runs/whole")));
}

#[test]
fn every_layout_gives_the_same_losses() {
    let folder = folder();
    let (two, bits) = ("parallel.ranks=2", "training.elastic_bits=true");
    let batch = "training.global_batch_size=8";
    train(&folder, "one", &[bits, batch]).ok();
    for (name, sets) in [
        ("ddp", &[bits, batch, two][..]),
        ("zero2", &[bits, batch, two, "parallel.zero_stage=2"]),
        ("zero3", &[bits, batch, two, "parallel.zero_stage=3"]),
        ("full", &[bits, batch, "activation_checkpointing.mode=full"]),
        ("workers", &[bits, batch, "data.workers=3"]),
    ] {
        train(&folder, name, sets).ok();
        assert_eq!((losses(&folder, name), losses(&folder, name).len()), (losses(&folder, "one"), 12), "{name}");
        let steps = record(&folder, name, "metrics.jsonl");
        assert_eq!(steps[3]["mem_peak_bytes"], steps[3]["predicted_mem_peak_bytes"], "{name}");
        let [ours, one] = [name, "one"].map(|run| record(&folder, run, "evaluations.jsonl").pop().unwrap());
        assert_eq!(ours["loss"], one["loss"], "{name}");
    }
    // Stages share the tables of distances, whose gradients are summed in another order.
    train(&folder, "stages", &[two, batch, "parallel.pipeline_parallel_degree=2"]).ok();
    for (ours, one) in losses(&folder, "stages").iter().zip(losses(&folder, "one")) {
        let [ours, one] = [ours, &one].map(|loss| loss.parse::<f64>().unwrap());
        assert!((ours / one - 1.0).abs() < 1e-4, "{ours} and {one}");
    }
}

#[test]
fn an_export_evaluates_like_its_run_says_the_same_and_trains_on() {
    let folder = folder();
    train(&folder, "one", &["model.activation=gelu_tanh", "model.tie_embeddings=false"]).ok();
    let eval = |model: &str| -> Value {
        let length = ["--length", "32"];
        let ran = folder.run(&[&["eval", model, "--data", "text.txt", "--json"], &length[..]].concat()).ok();
        serde_json::from_str(&ran.stdout).unwrap()
    };
    let say = |model: &str| {
        let ran = folder.run(&["generate", model, "--prompt", "the cat", "--tokens", "8", "--temperature", "0"]).ok();
        ran.stdout
    };
    folder.run(&["export", "runs/one", "--out", "hf", "--dtype", "f32"]).ok();
    let config: Value = serde_json::from_slice(&fs::read(folder.join("hf/config.json")).unwrap()).unwrap();
    assert_eq!((&config["feed_forward_proj"], &config["num_decoder_layers"]), (&"gated-gelu".into(), &2.into()));
    let (of_run, of_export) = (eval("runs/one"), eval("hf"));
    assert_eq!(of_run["loss"], of_export["loss"]);
    assert!(of_run["tokens"].as_u64().unwrap() > 100, "{of_run}");
    assert_eq!(say("runs/one"), say("hf"));
    // What the encoder reads is not said again.
    assert!(!say("hf").starts_with("the cat"), "{}", say("hf"));

    let tuned = fs::read_to_string(folder.join("t5.toml")).unwrap();
    let shape = "family = 't5'\ndim = 32\nlayers = 4\nheads = 2";
    assert!(tuned.contains(shape), "{tuned}");
    let tuned = tuned.replace(shape, "path = 'hf'").replace("kind = 'bytes'", "").replace("'one'", "'tuned'");
    folder.write("tuned.toml", tuned);
    folder.run(&["train", "tuned.toml"]).ok();
    let [first, last] =
        [&losses(&folder, "tuned")[0], losses(&folder, "one").last().unwrap()].map(|loss| loss.parse::<f64>().unwrap());
    assert!(first < last + 0.5, "{first} after {last}: it begins with the weights");
}

#[test]
fn a_decoder_alone_learns_to_give_spans_back() {
    let folder = Folder::new();
    let spans = ["--set", "data.span_corruption_rate=0.15"];
    folder.run(&[&["train", "tiny.toml"][..], &spans].concat()).ok();
    folder.run(&["train", "tiny.toml", "--set", "run.name=plain"]).ok();
    // A part of the tokens counts in the loss.
    let counted = |run: &str| record(&folder, run, "evaluations.jsonl").pop().unwrap()["tokens"].as_u64().unwrap();
    assert!(counted("tiny") < counted("plain") / 2, "{} and {}", counted("tiny"), counted("plain"));
}

#[test]
fn plans_are_made_and_named_models_are_found() {
    let folder = folder();
    let check = folder.run(&["config", "check", "t5.toml"]).ok();
    for expected in ["encoder_layers = 2  # half of model.layers", "span_length = 3.0", "for spans, rounded up"] {
        assert!(check.stdout.contains(expected), "{expected}: {}", check.stdout);
    }
    // Regression: the ending `-base` was taken off before the name was looked for.
    for model in ["t5-base", "t5-v1.1-small", "google-t5/t5-small"] {
        let plan = folder
            .run(&[
                "plan",
                "--model",
                model,
                "--cluster",
                "1x8xH100",
                "--global-batch",
                "64",
                "--sequence-length",
                "626",
            ])
            .ok();
        assert!(plan.stdout.contains("tokens/s"), "{model}: {}", plan.stdout);
    }
    // Blocks are not divided, so no plan is shown that divides them.
    let sizes = ["--cluster", "1x8xH100", "--global-batch", "64", "--sequence-length", "626"];
    let refused = folder.run(&[&["plan", "--model", "t5-base", "--fix", "tp=2"], &sizes[..]].concat());
    assert!(
        refused.code == Some(1) && refused.stderr.contains("tp=2 divides blocks, which this program does not do"),
        "{}",
        refused.stderr
    );
    let plan = folder.run(&[&["plan", "t5.toml"], &sizes[..2], &["--json"]].concat()).ok();
    let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
    assert_eq!(plan["plans"][0]["runnable"], true, "{plan}");
}

#[test]
fn what_does_not_go_with_an_encoder_is_refused_before_the_run() {
    let folder = folder();
    for (set, expected) in [
        ("parallel.tensor_parallel_degree=2", "a model with an encoder is not divided so"),
        ("parallel.context_parallel_degree=2", "a model with an encoder is not divided so"),
        ("data.fim_rate=0.5", "data.fim_rate has no effect"),
        ("data.token_noise=0.5", "data.token_noise has no effect"),
        ("data.sampling=best_fit", "take packed or random"),
        ("data.respect_document_boundaries=true", "data.respect_document_boundaries has no effect"),
        ("data.format=chat", "leave one of them out"),
        ("data.span_corruption_rate=1.5", "data.span_corruption_rate = 1.5 is out of range"),
        ("data.span_length=0.5", "data.span_length = 0.5 is out of range"),
        ("training.sequence_length=4", "no room for a text with a span taken out"),
        ("model.encoder_layers=4", "the encoder and the decoder need a block each"),
        ("model.vocab_size=257", "the vocabulary has beside the tokenizer's 0 tokens for them"),
        ("model.qk_norm=true", "model.qk_norm"),
        ("model.mup_base_dim=16", "model.mup_base_dim"),
        ("distillation.teacher=runs/one", "distillation.teacher has no effect"),
        ("tokenizer.kind=characters", "no end-of-text token"),
    ] {
        let ran = train(&folder, "refused", &[set]);
        assert!(ran.code != Some(0) && ran.stderr.contains(expected), "{set}: {ran:?}");
        assert!(!folder.join("runs/refused").exists(), "{set}: nothing has begun");
    }
    let text = folder.run(&["train", "tiny.toml", "--set", "model.encoder_layers=1"]);
    assert!(text.stderr.contains("family llama has no encoder; t5 has one"), "{text:?}");
    let text = folder.run(&["train", "tiny.toml", "--set", "data.span_length=2"]);
    assert!(text.stderr.contains("there is no data.span_corruption_rate"), "{text:?}");

    train(&folder, "one", &["training.steps=2"]).ok();
    let ran = folder.run(&["quantize", "runs/one", "--out", "q"]);
    assert!(ran.code != Some(0) && ran.stderr.contains("it has an encoder beside its decoder"), "{ran:?}");
}
