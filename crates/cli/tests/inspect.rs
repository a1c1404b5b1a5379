//! `data inspect` on token files, configurations and runs, and its refusals.

mod common;

use common::Folder;
use std::fs;

/// A folder with four documents, one of which has control characters, as text and as token files.
fn folder() -> Folder {
    let folder = Folder::new();
    let documents = ["one two", "three\\u001b[2J", "four five six", "seven"];
    folder.write("docs.jsonl", documents.map(|text| format!("{{\"text\": \"{text}\"}}\n")).concat());
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--validation-fraction", "0", "--out", "data/docs"];
    folder.run(&[&prepare[..], &["docs.jsonl"]].concat()).ok();
    folder
}

#[test]
fn documents_of_token_files_are_shown_with_their_boundaries() {
    let folder = folder();
    for path in ["data/docs", "data/docs.train", "data/docs.train.bin", "data/docs.train.idx"] {
        let ran = folder.run(&["data", "inspect", path, "--sample", "1"]).ok();
        for part in [
            "data/docs.train: 38 tokens in 4 documents, as u16\n",
            "tokens a document: mean 9.5, median 10, longest 14\n",
            "vocabulary   257 tokens (bytes), token 256 ends a text\n",
            "sample 1: tokens 8 to 37 of data/docs.train\n",
            "--- document 1: all its 10 tokens\n  three\\u{1b}[2J<end of text>\n",
            "--- document 2: all its 14 tokens\n  four five six<end of text>\n",
        ] {
            assert!(ran.stdout.contains(part), "no {part:?} in\n{}", ran.stdout);
        }
        assert!(!ran.stdout.contains('\u{1b}'));
    }
    let ran = folder.run(&["data", "inspect", "data/docs", "--json"]).ok();
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(json["corpora"][0]["documents"], 4);
    assert_eq!(json["sample"]["pieces"][1]["text"], "three\u{1b}[2J<end of text>");
    assert_eq!(json["sample"]["tokens"].as_array().unwrap().len(), 38);
}

#[test]
fn token_files_without_a_tokenizer_are_shown_as_numbers() {
    let folder = folder();
    for end in ["bin", "idx"] {
        fs::copy(folder.join(&format!("data/docs.train.{end}")), folder.join(&format!("foreign.{end}"))).unwrap();
    }
    let ran = folder.run(&["data", "inspect", "foreign"]).ok();
    assert!(ran.stderr.contains("no tokenizer lies beside these tokens"), "{}", ran.stderr);
    assert!(ran.stdout.contains("--- document 0: all its 8 tokens\n[111, 110, 101, "), "{}", ran.stdout);
}

#[test]
fn what_training_is_fed_is_shown_with_the_targets_that_count() {
    let folder = folder();
    let sets =
        ["data.train=['data/docs']", "data.shuffle=false", "data.validation_fraction=0", "training.sequence_length=16"];
    let sets: Vec<&str> = sets.into_iter().flat_map(|set| ["--set", set]).collect();
    let inspect =
        |more: &[&str]| folder.run(&[&["data", "inspect", "tiny.toml"], &sets[..], more].concat()).ok().stdout;
    let shown = inspect(&[]);
    for part in [
        "samples      2 of 16 tokens an epoch; packed, in order; documents are kept apart\n",
        "sample 0: tokens 0 to 15 of data/docs.train\n",
        "fed in step 1 to rank 0, micro-batch 0, row 0; epoch 0.00\n",
        "--- document 0: all its 8 tokens; 1 target does not count\n  one two<end of text>\n",
        "--- document 1: its first 8 of 10 tokens\n  three\\u{1b}[2\n",
    ] {
        assert!(shown.contains(part), "no {part:?} in\n{shown}");
    }
    let shown = inspect(&["--sample", "6"]);
    assert!(shown.contains("fed in step 2 to rank 0, micro-batch 0, row 2; epoch 3.00\n"), "{shown}");
    let json: serde_json::Value = serde_json::from_str(&inspect(&["--json"])).unwrap();
    let targets = json["sample"]["targets"].as_array().unwrap();
    assert_eq!(targets.len(), 16);
    assert!(targets[7].is_null() && targets[6] == 256, "{targets:?}");
    // Without boundaries every target counts.
    let shown = inspect(&["--set", "data.respect_document_boundaries=false"]);
    assert!(shown.contains("not kept apart") && !shown.contains("count\n"), "{shown}");
}

#[test]
fn a_run_is_inspected_as_it_was_configured() {
    let folder = Folder::new();
    folder.run(&["train", "tiny.toml", "--set", "training.steps=1"]).ok();
    let ran = folder.run(&["data", "inspect", "runs/tiny"]).ok();
    assert!(ran.stdout.contains("samples ") && ran.stdout.contains("validation   "), "{}", ran.stdout);
}

#[test]
fn what_cannot_be_inspected_is_said() {
    let folder = folder();
    for (arguments, says) in [
        (&["data/docs", "--sample", "4"][..], "--sample 4 does not exist: there are 4 documents, from 0"),
        (&["data/docs", "--set", "training.seed=1"], "--set changes a configuration"),
        (&["data"], "no text found in [data]"),
        (&["nothing"], "nothing does not exist: neither token files (nothing.idx, nothing.train.idx) nor"),
        (&["tiny.toml", "--tokenizer", "x"], "a configuration has tokenizer.path"),
        (&["tiny.toml", "--set", "data.train=gone.txt"], "gone.txt, which does not exist"),
    ] {
        let ran = folder.run(&[&["data", "inspect"], arguments].concat());
        assert_eq!(ran.code, Some(1), "{arguments:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{arguments:?}: {}", ran.stderr);
    }
}

#[test]
fn an_end_before_the_limit_and_passes_over_the_data_are_said() {
    let folder = Folder::new();
    let sets = [
        "optimizer.learning_rate=0.5",
        "schedule.kind=constant",
        "training.steps=500",
        "evaluation.interval_steps=10",
        "evaluation.early_stopping_patience=2",
        "data.validation_fraction=0.5",
    ];
    let sets: Vec<&str> = sets.into_iter().flat_map(|set| ["--set", set]).collect();
    let ran = folder.run(&[&["train", "tiny.toml"], &sets[..]].concat()).ok();
    assert!(
        ran.stdout.contains("early end    2 evaluations in a row without a lower loss; the best is step "),
        "{}",
        ran.stdout
    );
    assert!(ran.stdout.contains("runs/tiny/checkpoints/step-000"), "{}", ran.stdout);
    let ran = folder.run(&["train", "tiny.toml", "--set", "run.name=b", "--set", "training.epochs=1.5"]).ok();
    assert!(!ran.stdout.contains("epochs       "), "the twelve steps come first: {}", ran.stdout);
    folder.write("short.txt", "one two three ".repeat(40));
    let short = [
        "--set",
        "run.name=c",
        "--set",
        "data.train=['short.txt']",
        "--set",
        "training.epochs=3",
        "--set",
        "training.steps=auto",
    ];
    let ran = folder.run(&[&["train", "tiny.toml"], &short[..]].concat()).ok();
    assert!(ran.stdout.contains("passes over the training data\n"), "{}", ran.stdout);
    let kept = fs::read_to_string(folder.join("runs/c/config.toml")).unwrap();
    assert!(kept.contains("# steps = ") && kept.contains("# 3 epochs x "), "{kept}");
    assert!(ran.stderr.contains("  epoch "), "{}", ran.stderr);
}
