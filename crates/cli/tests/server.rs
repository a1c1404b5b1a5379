//! The parameter server through the program: threads and processes, resuming, records, failures.

mod common;

use common::{Folder, Ran, tensors};
use std::fs;

/// Steps that every run here has, with three checkpoints and as many evaluations.
const SETS: [&str; 4] =
    ["training.steps=6", "checkpoint.interval_steps=2", "checkpoint.keep_last=9", "evaluation.interval_steps=3"];
const TWO: [&str; 2] = ["parallel.ranks=2", "update.rule=server"];

/// `train tiny.toml` as the run `name` with `sets`.
fn train(name: &str, sets: &[&str]) -> Vec<String> {
    let name = format!("run.name={name}");
    let sets = [&[name.as_str()], &SETS[..], sets].concat();
    let sets = sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]);
    ["train".to_owned(), "tiny.toml".to_owned()].into_iter().chain(sets).collect()
}

/// `command` in two processes over TCP.
fn launched(command: Vec<String>) -> Vec<String> {
    ["launch", "--nproc-per-node", "2"].into_iter().map(str::to_owned).chain(command).collect()
}

fn run(folder: &Folder, arguments: &[String], faults: &str) -> Ran {
    let mut command = folder.command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    Ran::new(command.env("TRAINYARD_FAULTS", faults).output().expect("the program starts"))
}

fn records(folder: &Folder, run: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(folder.join(&format!("runs/{run}/metrics.jsonl"))).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

fn losses(folder: &Folder, run: &str) -> Vec<[serde_json::Value; 3]> {
    records(folder, run).iter().map(|line| ["step", "loss", "grad_norm"].map(|key| line[key].clone())).collect()
}

/// Threads and processes with a parameter server end in the records of synchronous training, and in
/// the checkpoint of ZeRO stage 1, byte by byte. So does a run that goes on from a checkpoint in
/// the middle, as threads or processes, whichever began it.
#[test]
fn a_staleness_of_zero_is_synchronous_training_for_threads_processes_and_resumed_runs() {
    let folder = Folder::new();
    let ended = |name: &str| tensors(&folder.join(&format!("runs/{name}")));
    let zero_1 = ["parallel.ranks=2", "parallel.data_parallel_shard_degree=2", "parallel.zero_stage=1"];
    run(&folder, &train("synchronous", &zero_1), "").ok();
    run(&folder, &train("threads", &TWO), "").ok();
    run(&folder, &launched(train("processes", &TWO)), "").ok();
    for name in ["threads", "processes"] {
        assert_eq!(losses(&folder, name), losses(&folder, "synchronous"), "{name}");
        assert!(ended(name) == ended("synchronous"), "{name}");
        fs::remove_dir_all(folder.join(&format!("runs/{name}/checkpoints/step-00000006"))).unwrap();
    }
    let resume = |name: &str| ["train", "--resume", &format!("runs/{name}")].map(str::to_owned).to_vec();
    run(&folder, &launched(resume("threads")), "").ok();
    run(&folder, &resume("processes"), "").ok();
    for name in ["threads", "processes"] {
        assert_eq!(losses(&folder, name), losses(&folder, "synchronous"), "resumed {name}");
        assert!(ended(name) == ended("synchronous"), "resumed {name}");
    }
    // One server writes other files. What it wrote goes on with any rule.
    run(&folder, &train("one", &[&TWO[..], &["update.servers=1"]].concat()), "").ok();
    fs::remove_dir_all(folder.join("runs/one/checkpoints/step-00000006")).unwrap();
    let sets = ["--set", "update.rule=synchronous", "--set", "update.servers=auto", "--set", "update.staleness=auto"];
    run(&folder, &[resume("one"), sets.map(str::to_owned).to_vec()].concat(), "").ok();
    assert_eq!(losses(&folder, "one"), losses(&folder, "synchronous"));
}

/// Stale workers: pulls are counted by what they lack and stay within the bound, checkpoints and
/// evaluations find all updates, and the run goes on.
#[test]
fn stale_pulls_are_recorded_and_stay_within_the_bound() {
    let folder = Folder::new();
    let stale = [&TWO[..], &["update.staleness=2", "update.every=5"]].concat();
    let slow = "slow:2 rank=1 what=forward";
    for (name, arguments) in
        [("threads", train("threads", &stale)), ("processes", launched(train("processes", &stale)))]
    {
        let ran = run(&folder, &arguments, slow).ok();
        assert!(ran.stdout.contains("staleness    updates that pulled parameters lacked: 0: "), "{}", ran.stdout);
        let records = records(&folder, name);
        assert_eq!(records.len(), 6);
        for record in &records {
            let pulls: Vec<u64> = serde_json::from_value(record["staleness"].clone()).expect("a histogram");
            assert!(pulls.len() == 3 && pulls.iter().sum::<u64>() >= 4, "{record}");
            assert!(record["skipped"] == false && record["loss"].as_f64().is_some_and(|loss| loss > 0.0), "{record}");
        }
        let evaluations = fs::read_to_string(folder.join(&format!("runs/{name}/evaluations.jsonl"))).unwrap();
        assert_eq!(evaluations.lines().count(), 2);
        // Checkpoints at 2, 4 and 6, and before the evaluation at 3.
        let checkpoints = fs::read_dir(folder.join(&format!("runs/{name}/checkpoints"))).unwrap();
        let steps =
            checkpoints.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("step-"));
        assert_eq!(steps.count(), 4);
        let go_on = ["train", "--resume", &format!("runs/{name}"), "--set", "training.steps=8"].map(str::to_owned);
        let ran = run(&folder, &go_on, "").ok();
        assert!(ran.stdout.contains("done: 8 steps"), "{}", ran.stdout);
    }
}

/// A worker that is slow in a step holds up no update, its gradients are counted, and the run goes
/// on from its checkpoints.
#[test]
fn gradients_of_late_back_up_workers_are_counted() {
    let folder = Folder::new();
    let sets = [&TWO[..], &["update.backup_workers=1", "update.every=3"]].concat();
    let slow = "slow:5 rank=1 what=forward";
    for (name, arguments) in [("threads", train("threads", &sets)), ("processes", launched(train("processes", &sets)))]
    {
        let ran = run(&folder, &arguments, slow).ok();
        assert!(ran.stdout.contains("gradients that came too late"), "{}", ran.stdout);
        let records = records(&folder, name);
        assert_eq!(records.len(), 6);
        let dropped: u64 = records.iter().map(|record| record["dropped_pushes"].as_u64().expect("a count")).sum();
        assert!(dropped <= 6, "{dropped}");
        assert!(records.iter().all(|record| record["loss"].as_f64().is_some_and(|loss| loss > 0.0)));
        let go_on = ["train", "--resume", &format!("runs/{name}"), "--set", "training.steps=8"].map(str::to_owned);
        let ran = run(&folder, &go_on, "").ok();
        assert!(ran.stdout.contains("done: 8 steps"), "{}", ran.stdout);
    }
}

/// The listing names pushes and pulls; what a parameter server cannot do ends before the run.
#[test]
fn programs_are_listed_and_what_cannot_run_is_refused_before_the_run() {
    let folder = Folder::new();
    let sets = |sets: &[&str]| sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]).collect::<Vec<_>>();
    let listing =
        [vec!["program".to_owned(), "tiny.toml".to_owned()], sets(&TWO), sets(&["update.staleness=4"])].concat();
    let ran = run(&folder, &listing, "").ok();
    for line in ["push block.0 to 2 servers", "commit the step to 2 servers", "pull head from 2 servers, 4 stale"] {
        assert!(ran.stdout.contains(line), "{line}: {}", ran.stdout);
    }
    let refused = run(&folder, &train("refused", &[&TWO[..], &["optimizer.name=muon"]].concat()), "");
    assert!(refused.code != Some(0) && refused.stderr.contains("servers own parts of matrices"), "{}", refused.stderr);
    assert!(!folder.join("runs/refused").exists());
}

/// A worker that dies, with its server, is named by the other rank; a step that waits for it says
/// so.
#[test]
fn a_rank_that_dies_is_named() {
    let folder = Folder::new();
    let stale = [&TWO[..], &["update.staleness=2", "parallel.deadline_seconds=20"]].concat();
    let ran = run(&folder, &launched(train("dies", &stale)), "kill rank=1 step=3 instruction=7");
    assert_ne!(ran.code, Some(0));
    let named = ran.stderr.contains("rank 1 (") && ran.stderr.contains("died: its process no longer exists");
    assert!(named && ran.stderr.contains("where the ranks were"), "{}", ran.stderr);
}
