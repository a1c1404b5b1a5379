//! Concurrent runs and readers in one folder.

mod common;

use common::{Folder, Ran};
use std::process::{Child, Stdio};

/// The program with `arguments`, started.
fn start(folder: &Folder, arguments: &[&str]) -> Child {
    folder.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

fn end(child: Child) -> Ran {
    Ran::new(child.wait_with_output().expect("the program ends"))
}

/// Five of the six once ended in errors.
#[test]
fn six_runs_started_at_once_without_a_name_have_folders_of_their_own() {
    let folder = Folder::new();
    let config = common::TINY.replace("name = 'tiny'", "").replace("steps = 12", "steps = 2");
    folder.write("unnamed.toml", config.replace("kind = 'bytes'", "vocab_size = 300"));
    let runs: Vec<Child> = (0..6).map(|_| start(&folder, &["train", "unnamed.toml"])).collect();
    runs.into_iter().for_each(|run| drop(end(run).ok()));
    for number in 1..=6 {
        let run = folder.join(&format!("runs/run-{number:03}"));
        assert!(run.join("checkpoints/step-00000002").is_dir() && run.join("config.toml").is_file(), "{run:?}");
    }
}

/// Readers once found the only checkpoint gone in 11 of 280 cases.
#[test]
fn eval_and_generate_beside_a_run_that_keeps_one_checkpoint_always_find_it() {
    let folder = Folder::new();
    let sets = ["--set", "checkpoint.interval_steps=1", "--set", "checkpoint.keep_last=1"];
    let long = ["--set", "training.steps=100000", "--set", "checkpoint.keep_best=false"];
    let mut run = start(&folder, &[&["train", "tiny.toml"][..], &sets, &long].concat());
    let first = folder.join("runs/tiny/checkpoints");
    let is_there = || {
        std::fs::read_dir(&first)
            .is_ok_and(|all| all.flatten().any(|step| step.file_name().to_string_lossy().starts_with("step-")))
    };
    while !is_there() {
        assert!(run.try_wait().unwrap().is_none(), "{}", end(run).stderr);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let reads: Vec<Ran> = (0..4)
        .flat_map(|_| {
            [
                &["eval", "runs/tiny", "--data", "text.txt"][..],
                &["generate", "runs/tiny", "--prompt", "the", "--tokens", "2"],
            ]
        })
        .map(|arguments| folder.run(arguments))
        .collect();
    run.kill().unwrap();
    run.wait().unwrap();
    for read in reads {
        let read = read.ok();
        assert!(!read.stderr.contains("passed over"), "{}", read.stderr);
    }
}
