//! Runs whose first steps have smaller batches: `training.batch_warmup`.

#[path = "common/runs.rs"]
mod runs;
#[path = "common/small.rs"]
mod small;
#[path = "common/tensors.rs"]
mod tensors;

use runs::{copy, run_to_the_end};
use serde_json::Value;
use std::path::{Path, PathBuf};
use trainyard_engine::checkpoint::{Choice, find, find_latest};
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::Ending;

/// Steps of 2, 4 and then 8 sequences: a part of a micro-batch, one, and two.
const STAGES: &[&str] = &[
    "training.steps=6",
    "training.micro_batch_size=4",
    "training.global_batch_size=8",
    "training.batch_warmup=[[2, 2], [4, 2]]",
    "checkpoint.interval_steps=1",
    "checkpoint.keep_last=20",
];

fn train(folder: &Path, name: &str, sets: &[&str]) -> PathBuf {
    let config = small::config(folder, name, sets);
    assert_eq!(run_to_the_end(&config, |world| Session::create(&config, world, |_| ())).unwrap(), Ending::Complete);
    folder.join(name)
}

/// Resumes a copy of the run `from` after `step` steps, to the end.
fn go_on(from: &Path, to: &str, step: u64, sets: &[&str]) -> PathBuf {
    let to = from.with_file_name(to);
    copy(from, &to);
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let going_on = GoingOn { checkpoint: Choice::Step(step), ..GoingOn::new(&to, &sets) };
    let config = Session::configuration(&going_on).unwrap();
    assert_eq!(run_to_the_end(&config, |world| Session::resume(&going_on, world, |_| ())).unwrap(), Ending::Complete);
    to
}

/// The weights, moments and counts of the last checkpoint, without times.
fn end(run: &Path) -> (std::collections::BTreeMap<String, Vec<u8>>, Value) {
    let checkpoint = find_latest(run).unwrap().unwrap().checkpoint;
    let mut state = checkpoint.state().clone();
    state["seconds"] = Value::Null;
    (tensors::tensors(&checkpoint), state)
}

fn records(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A stage is what a run with its batch does: each goes on from the checkpoint before it, without a
/// warm-up, to the bits of the whole run. So is a run that is resumed inside a stage.
#[test]
fn a_stage_of_a_batch_warmup_is_a_run_with_its_batch() {
    let folder = tempfile::tempdir().unwrap();
    let rate = "training.batch_warmup_rate=constant";
    let whole = train(folder.path(), "whole", &[STAGES, &[rate]].concat());
    let sequences: Vec<u64> = records(&whole).iter().map(|record| record["tokens"].as_u64().unwrap()).collect();
    let length = sequences[0] / 2;
    let counted: Vec<u64> = sequences.iter().map(|tokens| tokens / length).collect();
    assert_eq!(counted, [2, 4, 8, 12, 20, 28]);
    for step in [1, 2, 3, 4, 5] {
        let resumed = go_on(&whole, &format!("from-{step}"), step, &[]);
        assert_eq!(end(&resumed), end(&whole), "resumed after step {step}");
    }
    let plain = |micro: usize, accumulation: usize, steps: u64| {
        let (off, rate) = ("training.batch_warmup=auto", "training.batch_warmup_rate=auto");
        let batch = format!("training.global_batch_size={}", micro * accumulation);
        let micro = format!("training.micro_batch_size={micro}");
        [off.to_owned(), rate.to_owned(), batch, micro, format!("training.steps={steps}")]
    };
    let at = |step: u64| tensors::tensors(&find(&whole, Choice::Step(step)).unwrap().unwrap().checkpoint);
    let two = plain(2, 1, 2);
    let two = train(folder.path(), "two", &[STAGES, &two.each_ref().map(String::as_str)].concat());
    assert_eq!(end(&two).0, at(2), "two sequences a step");
    for (from, batch) in [(2, plain(4, 1, 4)), (4, plain(4, 2, 6))] {
        let resumed = go_on(&whole, &format!("plain-{from}"), from, &batch.each_ref().map(String::as_str));
        assert_eq!(end(&resumed).0, at(from + 2), "a plain run from step {from}");
    }
}

/// Layouts give the same bits in every stage, and the memory that they predict for the whole batch
/// is that of the run.
#[test]
fn layouts_agree_through_a_batch_warmup() {
    let folder = tempfile::tempdir().unwrap();
    let two = &["parallel.ranks=2", "training.micro_batch_size=2", "training.batch_warmup=[[2, 2], [4, 2]]"][..];
    let ddp = train(folder.path(), "ddp", &[STAGES, two].concat());
    for (name, sets) in [
        ("zero-1", &["parallel.zero_stage=1"][..]),
        ("zero-2", &["parallel.zero_stage=2"]),
        ("zero-3", &["parallel.zero_stage=3"]),
        ("each micro-batch", &["parallel.zero_stage=2", "parallel.reduce_schedule=micro_batch"]),
        ("full recomputation", &["activation_checkpointing.mode=full"]),
    ] {
        let run = train(folder.path(), name, &[STAGES, two, sets].concat());
        let record = records(&run).pop().unwrap();
        assert_eq!(record["mem_peak_bytes"], record["predicted_mem_peak_bytes"], "{name}");
        // Reducing each micro-batch sums in another order.
        if !name.starts_with("each") {
            assert_eq!(end(&run).0, end(&ddp).0, "{name}");
        }
    }
    let sets = ["parallel.pipeline_parallel_degree=2", "parallel.ranks=2", "training.micro_batch_size=1"];
    let stages = train(folder.path(), "stages", &[STAGES, &sets].concat());
    let record = records(&stages).pop().unwrap();
    assert_eq!(record["mem_peak_bytes"], record["predicted_mem_peak_bytes"], "stages");
}

/// A schedule of freezing has its periods in every stage.
#[test]
fn freezing_by_schedule_goes_with_a_batch_warmup() {
    let folder = tempfile::tempdir().unwrap();
    let frozen =
        "fine_tuning.freeze_schedule=[{ from_step = 0, frozen = ['block.0.*'] }, { from_step = 3, frozen = [] }]";
    let run = train(folder.path(), "both", &[STAGES, &[frozen]].concat());
    let trained = |record: &Value| record["trained_parameters"].as_u64().unwrap();
    let records = records(&run);
    assert!(trained(&records[0]) == trained(&records[2]) && trained(&records[2]) < trained(&records[3]), "{records:?}");
    let last = records.last().unwrap();
    assert_eq!(last["mem_peak_bytes"], last["predicted_mem_peak_bytes"]);
    for step in [1, 3, 4] {
        assert_eq!(end(&go_on(&run, &format!("from-{step}"), step, &[])), end(&run), "resumed after step {step}");
    }
}

fn resolve(sets: &[&str]) -> Result<Resolved, String> {
    let sets: Vec<String> = [STAGES, sets].concat().iter().map(|set| (*set).to_owned()).collect();
    let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
    let config = Config::parse(
        "c.toml".as_ref(),
        "[model]\ndim = 16\nlayers = 2\nheads = 2\nvocab_size = 64\n[training]\nsequence_length = 16\n",
        &sets,
    );
    config.unwrap().resolve(&inputs).map_err(|error| error.to_string())
}

/// The learning rate of a stage goes with the root of its batch.
#[test]
fn rates_follow_the_batch() {
    let rates = |sets: &[&str]| -> Vec<f64> {
        let all = [sets, &["schedule.kind=constant", "schedule.warmup_steps=0"]].concat();
        let schedule = resolve(&all).unwrap().schedule;
        [0, 1, 2, 4].map(|step| schedule.factor(step)).to_vec()
    };
    assert_eq!(rates(&[]), [0.5, 0.5, 0.5f64.sqrt(), 1.0]);
    assert_eq!(rates(&["training.batch_warmup_rate=linear"]), [0.25, 0.25, 0.5, 1.0]);
    assert_eq!(rates(&["training.batch_warmup_rate=constant"]), [1.0; 4]);
}

/// Limits count the sequences of every stage.
#[test]
fn limits_count_the_stages() {
    let off = ["training.steps=auto", "training.sequence_length=16"];
    // 2 x 2 + 2 x 4 + 3 x 8 = 36 sequences.
    for (sequences, steps) in [(36, 7), (35, 7), (37, 8)] {
        let tokens = format!("training.tokens={}", 16 * sequences);
        let resolved = resolve(&[&off[..], &[tokens.as_str()]].concat()).unwrap();
        assert_eq!(resolved.limits.steps, Some(steps), "{sequences}");
    }
}

#[test]
fn batches_that_cannot_be_are_refused() {
    for (sets, wants) in [
        (&["training.batch_warmup=[[8, 2]]"][..], "leads up to it"),
        (&["training.batch_warmup=[[3, 2]]"], "take 2, or another"),
        (&["training.batch_warmup=[[0, 2]]"], "at least 1"),
        (&["training.batch_warmup=[[2, 0]]"], "at least 1"),
        (&["training.batch_warmup=[[2, 6]]"], "no step would have the whole batch"),
        (&["training.batch_warmup=auto", "training.batch_warmup_rate=linear"], "has no effect"),
        (&["training.elastic_bits=true"], "leave one of the two out"),
        (&["training.steps=auto", "training.seconds=10"], "needs the number of steps"),
        (&["update.rule=diloco", "parallel.ranks=2"], "update.rule"),
        (&["parallel.ranks=4", "training.micro_batch_size=2", "training.batch_warmup=[[2, 2]]"], "cannot share"),
    ] {
        let error = resolve(sets).unwrap_err();
        assert!(error.contains("training.batch_warmup") && error.contains(wants), "{sets:?}: {error}");
    }
    let parse = |text: &str| Config::parse("c.toml".as_ref(), "", &[format!("training.batch_warmup={text}")]);
    for text in ["8", "[8, 200]", "[[8]]", "[[8, -1]]", "[[8, 200, 1]]"] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains("[[8, 200], [16, 400]]"), "{text}: {error}");
    }
}
