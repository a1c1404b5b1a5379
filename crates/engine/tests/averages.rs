//! Averages of the weights: what they are, that no layout changes a bit of them or they of the
//! training, that runs resume with them, and that their memory is predicted.

#[path = "common/train.rs"]
mod common;
#[path = "common/layouts.rs"]
mod layouts;
#[path = "common/runs.rs"]
mod runs;
#[path = "common/small.rs"]
mod small;
#[path = "common/tensors.rs"]
mod tensors;

use common::{ON_THE_HOST, check_memory};
use layouts::*;
use runs::copy;
use small::{run, start};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use tensors::tensors;
use trainyard_engine::checkpoint::{Choice, find};
use trainyard_engine::metrics::EvaluationMetrics;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::snapshot::read_state;
use trainyard_engine::trained::{Runtime, Selection, Weights, open_trained};

const EMA: &[&str] =
    &["averaging.kind=ema", "averaging.decay=0.7", "averaging.start_step=2", "averaging.interval_steps=2"];
const UNIFORM: &[&str] = &["averaging.kind=uniform", "averaging.start_step=3", "averaging.interval_steps=3"];
const STEPS: u64 = 12;

const ONE: &[&str] = &["parallel.ranks=1"];
const PARAMETERS_ON_DISK: &[&str] = &["precision.compute=f32", "memory.offload.parameters=disk"];

type Tensors = BTreeMap<String, Vec<u8>>;

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
}

fn at(run: &Path, step: u64) -> Tensors {
    tensors(&find(run, Choice::Step(step)).unwrap().unwrap().checkpoint)
}

/// The share of weights in an average that has taken `n` before, as the definition says.
type Share = fn(f64) -> f64;

/// Checks the averages of a run against those that its checkpoints of every step give in f64.
fn check_averages(folder: &Path, name: &str, sets: &[&str], start_step: u64, interval: u64, share: Share) {
    let every = ["checkpoint.interval_steps=1", "checkpoint.keep_last=100", RATE];
    let steps = format!("training.steps={STEPS}");
    let end = start(folder, name, &[sets, &every, &[&steps]].concat());
    let of_steps: Vec<Tensors> = (1..=STEPS).map(|step| at(&folder.join(name), step)).collect();
    let names: Vec<&str> = end.keys().filter_map(|name| name.strip_prefix("model ")).collect();
    assert!(names.len() > 5);
    let mut moved = 0.0f64;
    for tensor in names {
        let weights = |step: u64| floats(&of_steps[step as usize - 1][&format!("model {tensor}")]);
        let mut want = weights(start_step);
        let mut n = 1.0;
        for step in (start_step + interval..=STEPS).step_by(interval as usize) {
            let share = share(n);
            want.iter_mut().zip(weights(step)).for_each(|(a, w)| *a = (1.0 - share) * *a + share * w);
            n += 1.0;
        }
        let got = floats(&end[&format!("averages {tensor}")]);
        assert_eq!(got.len(), want.len(), "{name} {tensor}");
        let largest = want.iter().fold(1.0f64, |most, want| most.max(want.abs()));
        // A weight that is taken rounds the difference and the sum: two roundings of numbers of at
        // most twice the largest.
        let bound = n * 4.0 * largest * f64::from(f32::EPSILON / 2.0);
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() <= bound, "{name} {tensor}: {got} against {want}");
        }
        let last = weights(STEPS);
        moved = want.iter().zip(&last).fold(moved, |most, (want, last)| most.max((want - last).abs()));
    }
    assert!(moved > 1e-2, "{name}: the average is nearly the last weights, which shows nothing");
    let state = read_state(&find(&folder.join(name), Choice::Latest).unwrap().unwrap().checkpoint).unwrap();
    assert_eq!(state.averaged, (STEPS - start_step) / interval + 1);
}

#[test]
fn averages_are_those_of_the_weights_of_every_step() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let warm: Share = |n| 1.0 - 0.7f64.min((1.0 + n) / (10.0 + n));
    let mean: Share = |n| 1.0 / (n + 1.0);
    let cold = [EMA, &["averaging.decay_warmup=false"]].concat();
    check_averages(folder, "warm", EMA, 2, 2, warm);
    check_averages(folder, "cold", &cold, 2, 2, |_| 1.0 - 0.7);
    check_averages(folder, "usual", &["averaging.kind=ema"], 1, 1, |n| 1.0 - 0.999f64.min((1.0 + n) / (10.0 + n)));
    check_averages(folder, "mean", UNIFORM, 3, 3, mean);
    check_averages(folder, "sharded", &[STAGE_3, UNIFORM].concat(), 3, 3, mean);
    let tensor = [&["parallel.tensor_parallel_degree=2", "parallel.ranks=2"], UNIFORM].concat();
    check_averages(folder, "tensor", &tensor, 3, 3, mean);
    for rule in ["sgd", "lion", "muon", "adafactor", "lamb"] {
        let rule_of = format!("optimizer.name={rule}");
        check_averages(folder, rule, &[&[rule_of.as_str()], UNIFORM].concat(), 3, 3, mean);
    }
    let plain = [&["optimizer.name=sgd", "optimizer.momentum=0"], UNIFORM].concat();
    check_averages(folder, "stateless", &plain, 3, 3, mean);
    let lora = [&["fine_tuning.adapter=lora"], UNIFORM].concat();
    check_averages(folder, "lora", &lora, 3, 3, mean);
    let of_part = |part: &str| -> Vec<String> {
        let all = at(&folder.join("lora"), STEPS);
        all.keys().filter_map(|name| Some(name.strip_prefix(part)?.trim().to_owned())).collect()
    };
    assert_eq!(of_part("averages"), of_part("model"), "what is frozen has no average");
}

/// The evaluations of a run: step, loss and loss of the average, as bits.
fn evaluations(run: &Path) -> Vec<(u64, u64, Option<u64>)> {
    let text = std::fs::read_to_string(run.join("evaluations.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<EvaluationMetrics>(line).unwrap());
    lines.map(|m| (m.step, m.loss.to_bits(), m.averaged_loss.map(f64::to_bits))).collect()
}

/// An evaluation exchanges the weights with their average and back, wherever they lie.
#[test]
fn no_layout_and_no_evaluation_of_averages_changes_a_bit() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let base = [EMA, EVALUATED, &[RATE, "training.steps=6"]].concat();
    let go = |name: &str, way: &[&str]| start(folder, name, &[&base, way].concat());
    for (dtype, ways) in [
        (
            "bf16",
            &[
                ("stage-1", STAGE_1),
                ("stage-2", STAGE_2),
                ("stage-3", STAGE_3),
                ("hybrid", HYBRID),
                ("pipeline", PIPELINE),
                ("disk", &[STAGE_3, ON_DISK].concat()),
                ("all-on-disk", &[DDP, ALL_ON_DISK].concat()),
            ][..],
        ),
        (
            "f32",
            &[("stage-1-f32", STAGE_1), ("stage-3-f32", STAGE_3), ("parameters", &[DDP, PARAMETERS_ON_DISK].concat())],
        ),
    ] {
        let precision = format!("precision.compute={dtype}");
        let unread = go(&format!("unread-{dtype}"), &[DDP, &[&precision, "averaging.evaluate=false"]].concat());
        let whole = go(&format!("whole-{dtype}"), &[DDP, &[&precision]].concat());
        assert!(whole == unread, "{dtype}: evaluating averages changed bits");
        let seen = evaluations(&folder.join(format!("whole-{dtype}")));
        assert_eq!(seen.iter().map(|(step, ..)| *step).collect::<Vec<_>>(), [2, 4, 6]);
        // After the first weights are taken the average is these weights.
        assert_eq!(seen[0].2, Some(seen[0].1));
        assert!(seen[2].2.is_some_and(|averaged| averaged != seen[2].1));
        for (name, way) in ways {
            assert!(go(name, &[way, &[precision.as_str()][..]].concat()) == whole, "{name}");
            assert_eq!(evaluations(&folder.join(name)), seen, "{name}");
        }
    }
}

/// Resumes a copy of the run `from`, and returns its tensors and what was said.
fn go_on(folder: &Path, from: &str, name: &str, checkpoint: Choice, sets: &[&str]) -> (Tensors, Vec<String>) {
    copy(&folder.join(from), &folder.join(name));
    let auto = ["ranks", "zero_stage", "data_parallel_replicate_degree", "data_parallel_shard_degree"]
        .map(|key| format!("parallel.{key}=auto"));
    let all: Vec<String> = auto.into_iter().chain(sets.iter().map(|set| (*set).to_owned())).collect();
    let run_folder = folder.join(name);
    let going_on = GoingOn { checkpoint, ..GoingOn::new(&run_folder, &all) };
    let config = Session::configuration(&going_on).unwrap();
    let said = Mutex::new(Vec::new());
    let note = |line: &str| said.lock().unwrap().push(line.to_owned());
    let end = run(&run_folder, &config, |world| Session::resume(&going_on, world, note));
    (end, said.into_inner().unwrap())
}

#[test]
fn a_resumed_run_has_the_same_averages_on_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (kind, sets) in [("ema", EMA), ("uniform", UNIFORM)] {
        let whole = start(folder, &format!("{kind}-whole"), &[STAGE_3, sets, &[RATE, "training.steps=9"]].concat());
        for (name, first, second) in [
            ("same", STAGE_3, STAGE_3),
            ("sharded-later", DDP, STAGE_2),
            ("whole-later", STAGE_3, DDP),
            ("hybrid-later", STAGE_1, HYBRID),
            ("disk-later", DDP, &[STAGE_3, ON_DISK].concat()),
        ] {
            let name = format!("{kind}-{name}");
            let every = ["checkpoint.interval_steps=1", "checkpoint.keep_last=9", "training.steps=5"];
            start(folder, &name, &[first, sets, &every, &[RATE]].concat());
            // Before the first weights of UNIFORM are taken, and between two of EMA.
            for step in [2, 5] {
                let on = format!("{name}-on-{step}");
                let sets = [second, &["training.steps=9", "checkpoint.interval_steps=auto"]].concat();
                let (continued, _) = go_on(folder, &name, &on, Choice::Step(step), &sets);
                assert!(continued == whole, "{name}: {first:?}, then {second:?} from step {step}");
            }
        }
    }
}

#[test]
fn an_average_can_begin_and_end_when_a_run_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let without = start(folder, "without", &[ONE, &[RATE, "training.steps=4"]].concat());
    assert!(!without.keys().any(|name| name.starts_with("averages")));
    let sets = ["averaging.kind=uniform", "training.steps=5", "parallel.ranks=1"];
    let (begun, _) = go_on(folder, "without", "begun", Choice::Latest, &sets);
    for (name, average) in begun.iter().filter_map(|(name, a)| Some((name.strip_prefix("averages ")?, a))) {
        assert!(*average == begun[&format!("model {name}")], "{name}: the first weights are all of the average");
    }
    assert_eq!(
        begun.keys().filter(|name| name.starts_with("averages ")).count(),
        without.keys().filter(|name| name.starts_with("model ")).count()
    );
    let sets = ["averaging.kind=off", "training.steps=6", "parallel.ranks=1"];
    let (ended, said) = go_on(folder, "begun", "ended", Choice::Latest, &sets);
    assert!(said.iter().any(|line| line.contains("the average of the weights is dropped")), "{said:?}");
    let (whole, _) = go_on(folder, "without", "whole", Choice::Latest, &["training.steps=6", "parallel.ranks=1"]);
    assert!(ended == whole, "the average changed the training");
}

#[test]
fn trained_models_open_with_their_average() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let end = start(folder, "ema", &[EMA, &[RATE, "training.steps=6"]].concat());
    let runtime = Runtime::of_this_machine();
    let averaged = |checkpoint| Selection { checkpoint, weights: Weights::Averaged };
    for (selection, part) in [(averaged(Choice::Latest), "averages"), (Choice::Latest.into(), "model")] {
        let trained = open_trained(&folder.join("ema"), selection, &runtime, |_| ()).unwrap();
        for (id, spec) in trained.rank.model().parameters() {
            let name = trained.rank.model().parameter_name(id).unwrap();
            let read = trained.rank.parameters.master(id, &spec.shape).unwrap();
            assert!(read.as_bytes().unwrap() == end[&format!("{part} {name}")], "{part} {name}");
        }
    }
    let refused = |name: &str, selection| match open_trained(&folder.join(name), selection, &runtime, |_| ()) {
        Ok(_) => panic!("{name} opens"),
        Err(error) => error.to_string(),
    };
    start(folder, "none", &["training.steps=1"]);
    let error = refused("none", averaged(Choice::Latest));
    assert!(error.contains("has no average of the weights") && error.contains("averaging.kind"), "{error}");
    start(folder, "early", &[UNIFORM, &["training.steps=3", "checkpoint.interval_steps=1"]].concat());
    let error = refused("early", averaged(Choice::Step(2)));
    assert!(error.contains("has taken none yet") && error.contains("averaging.start_step"), "{error}");
    open_trained(&folder.join("early"), averaged(Choice::Latest), &runtime, |_| ()).unwrap();
}

#[test]
fn memory_is_predicted_with_an_average() {
    let ways: &[&[&str]] = &[
        &[],
        &["precision.compute='f32'"],
        &["parallel.ranks=2", "parallel.zero_stage=1"],
        &["parallel.ranks=2", "parallel.zero_stage=3"],
        &["parallel.ranks=2", "parallel.tensor_parallel_degree=2"],
        &["memory.offload.optimizer='disk'", "memory.offload.parameters='disk'"],
        &["memory.offload.optimizer='disk'", ON_THE_HOST],
        &["optimizer.name='lion'"],
    ];
    for way in ways {
        let sets = [way, &["averaging.kind='ema'"][..]].concat();
        let (with, without) = (common::train(&sets, 3), common::train(way, 3));
        with.iter().for_each(|end| check_memory(end, &sets));
        assert_eq!(common::weights(&with), common::weights(&without), "{way:?}: the average changed the weights");
        let live = |ends: &[common::End]| ends[0].memory.peak_total() + ends[0].host[0].peak_total();
        assert!(live(&with) > live(&without), "{way:?}");
    }
}

#[test]
fn impossible_averages_are_refused() {
    for (sets, words) in [
        (&["averaging.decay=0.9"][..], "averaging.decay has no effect"),
        (&["averaging.start_step=9"], "averaging.start_step has no effect"),
        (&["averaging.interval_steps=9"], "averaging.interval_steps has no effect"),
        (&["averaging.evaluate=true"], "averaging.evaluate has no effect"),
        (&["averaging.kind=uniform", "averaging.decay=0.9"], "averaging.decay has no effect"),
        (&["averaging.kind=uniform", "averaging.decay_warmup=true"], "averaging.decay_warmup has no effect"),
        (&["averaging.kind=ema", "averaging.decay=1"], "averaging.decay = 1 is out of range"),
        (&["averaging.kind=ema", "averaging.decay=-0.1"], "averaging.decay = -0.1 is out of range"),
        (&["averaging.kind=ema", "averaging.start_step=0"], "averaging.start_step = 0 is too small"),
        (&["averaging.kind=ema", "averaging.interval_steps=0"], "averaging.interval_steps = 0 is too small"),
        (&["averaging.kind=ema", "averaging.start_step=101"], "averaging.start_step = 101, and the run ends after 100"),
        (&["averaging.kind=ema", "device=cuda"], "weights are averaged on processors only"),
        (&["averaging.kind=ema", "update.rule=diloco", "parallel.ranks=2"], "ranks have different ones"),
        (&["averaging.kind=emma"], "averaging.kind"),
        (&["averaging.ema_decay=0.99"], "averaging.decay"),
        (&["training.ema_decay=0.99"], "averaging.decay"),
    ] {
        let said = common::refused(sets);
        assert!(said.contains(words), "{sets:?}: {said}");
    }
}
