//! `doctor` on traces of PyTorch's profiler.

mod common;

use common::Folder;
use serde_json::Value;
use std::path::Path;

/// A trace of `crates/observe/tests/golden`.
fn golden(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../observe/tests/golden");
    folder.join(name).display().to_string()
}

#[test]
fn verdicts_come_first_and_the_exit_code_says_how_grave_they_are() {
    let folder = Folder::new();
    let ran = folder.run(&["doctor", &golden("loader_bound.json")]);
    assert_eq!(ran.code, Some(4), "{}", ran.stderr);
    assert!(ran.stdout.starts_with("input bound (critical): "), "{}", ran.stdout);
    assert!(ran.stdout.contains("DataLoader(num_workers=4)") && ran.stdout.contains("\ndevice "), "{}", ran.stdout);
    let cured = folder.run(&["doctor", &golden("loader_cured.json")]);
    assert_eq!(cured.code, Some(0), "{}", cured.stdout);
}

#[test]
fn json_holds_the_figures_of_every_rank_and_the_diagnosis() {
    let folder = Folder::new();
    let ran = folder.run(&["doctor", "--json", &golden("data_parallel.json"), &golden("loader_bound.json")]);
    let json: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(json["ranks"][0]["rank"], 1);
    assert_eq!(json["ranks"].as_array().unwrap().len(), 2);
    assert_eq!(json["diagnosis"]["verdicts"][0]["cause"], "input_bound");
    assert!(json["ranks"][0]["communication"]["overlapped"].as_f64().unwrap() > 0.7);
}

#[test]
fn files_that_are_no_traces_are_refused_by_name() {
    let folder = Folder::new();
    folder.write("cut.json", r#"{"traceEvents":[{"ph":"X","#);
    folder.write("config.json", r#"{"model_type":"llama","vocab_size":10}"#);
    for (file, part) in [
        ("cut.json", "the file ends in the middle"),
        ("config.json", "the file is JSON with the keys model_type, vocab_size"),
        ("missing.json", "No such file"),
        ("missing.json", "neither the folder of a run nor a trace file: give runs/NAME of a run"),
    ] {
        let ran = folder.run(&["doctor", file]);
        assert_eq!(ran.code, Some(1));
        assert!(ran.stderr.contains(&format!("cannot explain {file}")) && ran.stderr.contains(part), "{}", ran.stderr);
    }
}
