//! Averages of the weights through the program: trained, resumed, evaluated, exported.

mod common;

use common::Folder;
use serde_json::Value;
use std::fs;

const AVERAGED: &str = "[averaging]\nkind = 'ema'\ndecay = 0.9\n";

/// A folder with a configuration that keeps an average, and a text that is held back.
fn folder() -> Folder {
    let folder = Folder::new();
    let text = fs::read_to_string(folder.join("text.txt")).unwrap();
    let (train, held) = text.split_at(text.len() - text.len() / 10);
    folder.write("train.txt", train);
    folder.write("held.txt", held);
    let tiny = common::TINY
        .replace("train = ['text.txt']\nvalidation_fraction = 0.05", "train = 'train.txt'\nvalidation = 'held.txt'");
    folder.write("averaged.toml", tiny.replace("tokens_max = 512", "interval_steps = 20") + AVERAGED);
    folder
}

fn eval(folder: &Folder, model: &str, more: &[&str]) -> f64 {
    let eval = ["eval", model, "--data", "held.txt", "--length", "32", "--dtype", "f32", "--json"];
    let line: Value = serde_json::from_str(&folder.run(&[&eval, more].concat()).ok().stdout).unwrap();
    line["loss"].as_f64().unwrap()
}

#[test]
fn an_average_is_validated_evaluated_and_exported() {
    let folder = folder();
    let train = ["train", "averaged.toml", "--set", "training.steps=40", "--set", "schedule.kind=constant"];
    let ran = folder.run(&train).ok();
    assert!((ran.stdout.clone() + &ran.stderr).contains("averaged weights "), "{}{}", ran.stdout, ran.stderr);
    let evaluations = || -> Vec<Value> {
        let text = fs::read_to_string(folder.join("runs/tiny/evaluations.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let last = evaluations().pop().unwrap();
    assert_eq!(last["step"], 40);
    let [loss, averaged] = ["loss", "averaged_loss"].map(|key| last[key].as_f64().unwrap());
    assert!((averaged - loss).abs() > 1e-3, "the average is nearly the weights: {averaged}");
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-5, "{a} against {b}");
    close(eval(&folder, "runs/tiny", &[]), loss);
    close(eval(&folder, "runs/tiny", &["--averaged"]), averaged);
    folder.run(&["export", "runs/tiny", "--out", "last"]).ok();
    let exported = folder.run(&["export", "runs/tiny", "--averaged", "--out", "hf"]).ok();
    assert!(exported.stdout.contains("(step 40, averaged weights)"), "{}", exported.stdout);
    close(eval(&folder, "last", &[]), loss);
    close(eval(&folder, "hf", &[]), averaged);
    let generate = |more: &[&str]| {
        let generate = ["generate", "runs/tiny", "--prompt", "the ", "--tokens", "20", "--temperature", "0"];
        folder.run(&[&generate, more].concat()).ok().stdout
    };
    generate(&["--averaged"]);

    // Resumed on two ranks that shard what one rank held.
    let sets = ["training.steps=60", "parallel.ranks=2", "parallel.zero_stage=3"];
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    folder.run(&["train", "--resume", "runs/tiny"].into_iter().chain(sets).collect::<Vec<_>>()).ok();
    let last = evaluations().pop().unwrap();
    close(eval(&folder, "runs/tiny", &["--averaged"]), last["averaged_loss"].as_f64().unwrap());
}

#[test]
fn a_missing_average_is_a_clear_error() {
    let folder = folder();
    folder.run(&["train", "tiny.toml", "--set", "training.steps=2"]).ok();
    folder.run(&["export", "runs/tiny", "--out", "hf"]).ok();
    for (command, words) in [
        (
            &["eval", "runs/tiny", "--data", "held.txt", "--averaged"][..],
            "has no average of the weights: train with averaging.kind",
        ),
        (
            &["export", "runs/tiny", "--out", "out", "--averaged"],
            "has no average of the weights: train with averaging.kind",
        ),
        (&["eval", "hf", "--data", "held.txt", "--averaged"], "is not the folder of a run"),
        (&["train", "averaged.toml", "--set", "averaging.decay=2"], "averaging.decay = 2 is out of range"),
        (&["train", "averaged.toml", "--set", "averaging.kind=off"], "averaging.decay has no effect"),
        (&["train", "averaged.toml", "--set", "averaging.start_step=99"], "the run ends after 12 steps"),
    ] {
        let ran = folder.run(command);
        assert!(ran.code != Some(0) && ran.stderr.contains(words), "{command:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    }
    assert!(!folder.join("out").exists());
}
