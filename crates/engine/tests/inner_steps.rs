//! Runs in which slower replicas make fewer inner steps in a round: `update.inner_steps`.

#[path = "common/runs.rs"]
mod runs;
#[path = "common/small.rs"]
mod small;
#[path = "common/tensors.rs"]
mod tensors;

use runs::{copy, run_to_the_end};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use trainyard_comm::Communicator;
use trainyard_engine::checkpoint::{Checkpoint, Choice, find_latest};
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::Ending;
use trainyard_record::programs::Programs;
use trainyard_record::steps;

const RULE: &[&str] =
    &["update.rule='diloco'", "update.every=4", "checkpoint.interval_steps=1", "checkpoint.keep_last=20"];
const THREE: &[&str] = &["parallel.ranks=3", "training.global_batch_size=6"];

/// A session that begins, or goes on, with the given seconds of an inner step of each replica.
fn given(session: trainyard_engine::Result<Session>, step_s: &[f64]) -> trainyard_engine::Result<Session> {
    let mut session = session?;
    session.inner_step_s = Some(step_s.to_vec());
    Ok(session)
}

fn last(run: &Path) -> Checkpoint {
    find_latest(run).unwrap().unwrap().checkpoint
}

/// The run's state without the time that it took.
fn state(checkpoint: &Checkpoint) -> Value {
    let mut state = checkpoint.state().clone();
    state["seconds"] = Value::Null;
    state
}

fn everything(run: &Path) -> (BTreeMap<String, Vec<u8>>, Value) {
    let checkpoint = last(run);
    (tensors::tensors(&checkpoint), state(&checkpoint))
}

/// Trains the run `name` to its end, with the given seconds of an inner step.
fn train(folder: &Path, name: &str, sets: &[&str], step_s: &[f64]) {
    let config = small::config(folder, name, sets);
    let open = |world: Communicator| given(Session::create(&config, world, |_| ()), step_s);
    assert_eq!(run_to_the_end(&config, open).unwrap(), Ending::Complete);
}

/// Resumes a copy of the run `from` after `step` steps, to the end.
fn go_on(folder: &Path, from: &str, step: u64, sets: &[&str], step_s: &[f64]) -> std::path::PathBuf {
    let to = folder.join(format!("{from}-{step}-{}", sets.join("-").replace(['/', ' '], "")));
    copy(&folder.join(from), &to);
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let going_on = GoingOn { checkpoint: Choice::Step(step), ..GoingOn::new(&to, &sets) };
    let config = Session::configuration(&going_on).unwrap();
    let open = |world: Communicator| given(Session::resume(&going_on, world, |_| ()), step_s);
    assert_eq!(run_to_the_end(&config, open).unwrap(), Ending::Complete);
    to
}

fn records(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The numbers of each round follow the speed in the round before, whatever ranks a replica has. A
/// run that is resumed after any step goes on with the same bits, samples and numbers.
#[test]
fn runs_by_speed_go_on_exactly_from_any_step() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let by_speed = &["update.inner_steps=by_speed", "training.steps=14"][..];
    let stages = &["parallel.ranks=6", "parallel.pipeline_parallel_degree=2", "training.global_batch_size=6"][..];
    let sharded = &["parallel.ranks=6", "parallel.data_parallel_replicate_degree=3", "training.global_batch_size=6"];
    let sharded = [&sharded[..], &["parallel.data_parallel_shard_degree=2", "parallel.zero_stage=2"]].concat();
    for (name, layout, steps) in [
        ("plain", THREE, &[2, 4, 5, 6, 7, 8, 10, 12, 13][..]),
        ("stages", stages, &[6]),
        ("sharded", &sharded, &[6, 8]),
    ] {
        let step_s = [0.3, 0.1, 0.2];
        train(folder, name, &[RULE, by_speed, layout].concat(), &step_s);
        let run = folder.join(name);
        // Equal at first, then by speed; the last round is cut short after two steps.
        let made: Vec<Value> = records(&run).iter().map(|record| record["inner_steps"].clone()).collect();
        let of = |step: usize| made[step - 1].clone();
        assert_eq!([of(4), of(8), of(12), of(14)], [[4, 4, 4], [1, 4, 2], [1, 4, 2], [1, 2, 2]].map(|of| json!(of)));
        assert_eq!(made.iter().filter(|made| !made.is_null()).count(), 4);
        let ended = everything(&run);
        // Two samples of each replica in a step; in sharded replicas too.
        assert_eq!(ended.1["samples"], 2 * (12 + 7 + 7 + 5), "{name}");
        assert_eq!(ended.1["tokens"], 16 * 2 * (12 + 7 + 7 + 5), "{name}");
        for step in steps {
            let (tensors, state) = everything(&go_on(folder, name, *step, &[], &step_s));
            assert_eq!(state, ended.1, "{name} from step {step}");
            let differing: Vec<_> = ended.0.iter().filter(|(of, bytes)| tensors.get(*of) != Some(bytes)).collect();
            let differing: Vec<&String> = differing.into_iter().map(|(of, _)| of).collect();
            assert_eq!((differing, tensors.len()), (Vec::new(), ended.0.len()), "{name} from step {step}");
        }
    }
}

/// The first replica waits for the others: its records say so, and count the samples of those that
/// take part.
#[test]
fn records_of_a_slow_first_replica_count_what_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let sets = [RULE, THREE, &["update.inner_steps=[1, 4, 2]", "training.steps=8"]].concat();
    train(folder, "run", &sets, &[]);
    let records = records(&folder.join("run"));
    let tokens: Vec<u64> = records.iter().map(|record| record["tokens"].as_u64().unwrap() / 32).collect();
    assert_eq!(tokens, [3, 5, 6, 7, 10, 12, 13, 14]);
    let late: Vec<bool> = records.iter().map(|record| record["late"] == true).collect();
    assert_eq!(late, [false, true, true, true, false, true, true, true]);
    for (record, before) in records[1..4].iter().zip(&records) {
        assert_eq!((&record["loss"], &record["grad_norm"]), (&before["loss"], &before["grad_norm"]));
        assert_eq!(record["tps"], 0.0);
    }
    // What explains the speed of a run compares steps in which a rank computes.
    let recorded = |rank: u32| -> Vec<u64> {
        let run = folder.join("run");
        let programs = Programs::read(&run, rank).unwrap().unwrap().programs;
        steps::read(&run, rank, &programs).unwrap().1.iter().map(|step| step.step).collect()
    };
    assert_eq!([recorded(0), recorded(1), recorded(2)], [vec![1, 5], (1..=8).collect(), vec![1, 2, 5, 6]]);
    assert!(records[3]["drift"].as_f64().unwrap() > 0.0 && records[4]["loss"] != records[3]["loss"]);
}

/// Equal numbers are the bits of a run without the key, and its samples.
#[test]
fn equal_numbers_are_the_run_without_them() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, numbers) in [("equal", "equal"), ("given", "[4, 4, 4]"), ("by_speed", "by_speed")] {
        let numbers = format!("update.inner_steps={numbers}");
        train(folder, name, &[RULE, THREE, &[&numbers, "training.steps=10"]].concat(), &[0.2; 3]);
    }
    let [equal, given, by_speed] = ["equal", "given", "by_speed"].map(|name| everything(&folder.join(name)));
    // The state of the other replicas has what they have timed.
    let plain = |tensors: &BTreeMap<String, Vec<u8>>| -> Vec<(String, Vec<u8>)> {
        let plain = tensors.iter().filter(|(name, _)| !name.contains("state.replica"));
        plain.map(|(name, bytes)| (name.clone(), bytes.clone())).collect()
    };
    for other in [&given, &by_speed] {
        assert!(plain(&other.0) == plain(&equal.0));
        assert_eq!((&other.1["samples"], &other.1["tokens"]), (&equal.1["samples"], &equal.1["tokens"]));
    }
    assert!(equal.1.get("round").is_none() && by_speed.1.get("round").is_some());
}

/// A run goes on with another number of replicas from inside a round, and with other rules: the
/// samples follow those that were taken.
#[test]
fn other_replicas_and_rules_go_on_with_the_next_samples() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let sets = [RULE, THREE, &["update.inner_steps=by_speed", "training.steps=12"]].concat();
    train(folder, "run", &sets, &[0.1, 0.2, 0.4]);
    let samples = |run: &Path| last(run).state()["samples"].as_u64().unwrap();
    assert_eq!(samples(&folder.join("run")), 2 * (12 + 7 + 7));
    // Six steps have taken 12 + 3 + 2 parts of two samples. Two replicas take three samples each.
    for (ranks, rest) in [
        (&["parallel.ranks=2", "training.micro_batch_size=3"][..], 2 * 3 * 2 + 3 * (4 + 2)),
        // The round goes on with its numbers; then all make every step.
        (&["update.inner_steps=equal"], 2 * (1 + 1) + 2 * 12),
        (&["update.inner_steps=[1, 1, 4]"], 2 * (1 + 1) + 2 * 6),
        (&["update.every=6", "update.inner_steps=equal"], 6 * 6),
        (&["update.rule=synchronous", "update.every=auto", "update.inner_steps=equal"], 6 * 6),
    ] {
        let run = go_on(folder, "run", 6, ranks, &[0.1, 0.2, 0.4]);
        assert_eq!(samples(&run), 2 * 17 + rest, "{ranks:?}");
    }
}

/// Fewer steps of some replicas still train the model.
#[test]
fn the_loss_falls() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let rule = ["update.rule='diloco'", "update.every=8", "update.inner_steps=[8, 8, 2]", "training.steps=96"];
    train(folder, "run", &[&rule[..], THREE].concat(), &[]);
    let losses: Vec<f64> = records(&folder.join("run")).iter().map(|r| r["loss"].as_f64().unwrap()).collect();
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, end) = (mean(&losses[..8]), mean(&losses[88..]));
    assert!(end < 0.8 * first, "{first:.3} to {end:.3}");
}
