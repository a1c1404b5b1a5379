//! Elastic weight consolidation: the Fisher information is that of the loss, the penalty that of
//! the paper, no layout changes a bit of either, runs resume with them, and their memory is
//! predicted.

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
use small::{config, run, start};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tensors::tensors;
use trainyard_data::{IndexedTokens, PrepareOptions, prepare};
use trainyard_engine::checkpoint::{Choice, find, find_latest};
use trainyard_engine::consolidation::{Estimate, EstimateSettings, FOLDER, estimate};
use trainyard_engine::corpora::open_text;
use trainyard_engine::evaluate::{EvaluationSettings, evaluate};
use trainyard_engine::metrics::StepMetrics;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trained::{Runtime, Trained, open_trained};

const F32: &str = "precision.compute=f32";
/// Updates whose change is the gradient.
const SGD: &[&str] = &[
    F32,
    "optimizer.name=sgd",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "optimizer.learning_rate=0.5",
    "optimizer.clip_norm=0",
    "training.steps=1",
];
const LENGTH: usize = 16;

type Tensors = BTreeMap<String, Vec<u8>>;

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
}

fn division(rows: usize, tokens_max: Option<u64>) -> EvaluationSettings {
    let respect_document_boundaries = true;
    EvaluationSettings { sequence_length: LENGTH, rows, respect_document_boundaries, tokens_max, spans: None }
}

fn opened(run: &Path) -> Trained {
    open_trained(run, Choice::Latest, &Runtime::of_this_machine(), |_| ()).unwrap()
}

/// The old text, as tokens of the tokenizer of `trained`.
fn text(folder: &Path, trained: &Trained) -> Vec<IndexedTokens> {
    let path = folder.join("old.txt");
    std::fs::write(&path, trainyard_testing::text(600)).unwrap();
    let corpus = open_text(&[path], "text", false).unwrap();
    let options = PrepareOptions { validation_fraction: 0.0, ..PrepareOptions::new(folder.join("old-tokens")) };
    let made = prepare(&corpus, trained.tokenizer.as_ref().unwrap(), &options, |_| ()).unwrap();
    vec![IndexedTokens::open(&made.train).unwrap()]
}

/// Consolidates the run `name`. Returns what was kept.
fn consolidate(folder: &Path, name: &str, batches: usize, decay: f64) -> (Estimate, Tensors) {
    let trained = opened(&folder.join(name));
    let settings = EstimateSettings { batches, decay, division: division(1, None) };
    let texts = text(folder, &trained);
    let (found, _) = estimate(&folder.join(name), &trained, &texts, settings, |_| ()).unwrap();
    (found, tensors(&find_latest(&folder.join(name).join(FOLDER)).unwrap().unwrap().checkpoint))
}

/// A run that was trained for a few steps and consolidated, and the settings of runs held to it.
fn old(folder: &Path, more: &[&str]) -> (Tensors, String) {
    start(folder, "old", &[more, &["training.steps=6", RATE]].concat());
    (consolidate(folder, "old", 8, 1.0).1, format!("consolidation.from={}", folder.join("old").display()))
}

fn metrics(run: &Path) -> Vec<StepMetrics> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The gradient of a batch, squared and times its targets, is the slope of the loss.
#[test]
fn the_fisher_information_is_the_squared_slope_of_the_loss() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    start(folder, "old", &["training.steps=6", RATE, F32]);
    let (found, kept) = consolidate(folder, "old", 1, 1.0);
    assert_eq!((found.step, found.batches, found.targets), (6, 1, LENGTH as u64));
    let trained = opened(&folder.join("old"));
    let texts = text(folder, &trained);
    let tokenizer = trained.tokenizer.as_ref().unwrap();
    let loss = || evaluate(&trained.rank, &texts, tokenizer, division(1, Some(LENGTH as u64))).unwrap().loss();
    assert!((loss() - found.loss).abs() < 1e-6);
    let model = trained.rank.model();
    let mut compared = 0;
    for (id, spec) in model.parameters() {
        let name = model.parameter_name(id).unwrap();
        let fisher = floats(&kept[&format!("fisher {name}")]);
        let mut master = trained.rank.parameters.master(id, &spec.shape).unwrap();
        assert!(master.as_bytes().unwrap() == kept[&format!("weights {name}")], "{name}: not the weights");
        // The largest of each tensor: their slopes are far above the rounding of the loss.
        let place = (0..fisher.len()).max_by(|a, b| fisher[*a].total_cmp(&fisher[*b])).unwrap();
        let want = fisher[place];
        let change = 2e-3;
        let mut at = |change: f32| {
            master.data_mut::<f32>().unwrap()[place] += change;
            let loss = loss();
            master.data_mut::<f32>().unwrap()[place] -= change;
            loss
        };
        let slope = (at(change) - at(-change)) / (2.0 * f64::from(change));
        let got = LENGTH as f64 * slope * slope;
        if want > 1e-3 {
            compared += 1;
            assert!((got / want - 1.0).abs() < 0.03, "{name}[{place}]: {got} by differences, kept is {want}");
        }
    }
    assert!(compared >= 5, "only {compared} tensors were compared");
}

/// One step of SGD with the penalty and one without differ by its gradient.
#[test]
fn an_update_has_the_gradient_of_the_penalty_of_the_paper() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (kept, from) = old(folder, &[F32]);
    let begin = start(folder, "begin", &[SGD, &["optimizer.learning_rate=1e-30"]].concat());
    let without = start(folder, "without", SGD);
    for (name, weight, layout) in [("with", 0.7, DDP), ("sharded", 0.7, STAGE_3), ("strong", 20.0, DDP)] {
        let held = format!("consolidation.weight={weight}");
        let with = start(folder, name, &[SGD, layout, &[&from, &held]].concat());
        let (mut penalty, mut moved) = (0.0, 0.0f64);
        for tensor in begin.keys().filter_map(|name| name.strip_prefix("model ")) {
            let of = |tensors: &Tensors, part: &str| floats(&tensors[&format!("{part} {tensor}")]);
            let (fisher, held) = (of(&kept, "fisher"), of(&kept, "weights"));
            let (first, plain, got) = (of(&begin, "model"), of(&without, "model"), of(&with, "model"));
            for i in 0..first.len() {
                let force = fisher[i] * (first[i] - held[i]);
                penalty += 0.5 * weight * force * (first[i] - held[i]);
                let change = -0.5 * weight * force;
                moved = moved.max(change.abs());
                // Two sums of numbers of the size of the weights and of the changes are rounded.
                let bound = 1e-6 * (1.0 + plain[i].abs() + change.abs());
                assert!((got[i] - plain[i] - change).abs() < bound, "{name} {tensor}[{i}]");
            }
        }
        assert!(moved > 1e-3, "{name}: the penalty moves nothing, which shows nothing");
        let told = metrics(&folder.join(name))[0].penalty.unwrap();
        assert!((told / penalty - 1.0).abs() < 1e-5, "{name}: {told} and {penalty}");
    }
    assert!(metrics(&folder.join("without")).iter().all(|m| m.penalty.is_none()));
}

/// Everything but the times of a run's metrics that the penalty may change, as bits.
fn seen(run: &Path) -> Vec<[u64; 3]> {
    let bits = |m: StepMetrics| [m.loss.to_bits(), m.grad_norm.to_bits(), m.penalty.unwrap_or_default().to_bits()];
    metrics(run).into_iter().map(bits).collect()
}

#[test]
fn no_layout_changes_a_bit_of_consolidation() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (_, from) = old(folder, &[]);
    for dtype in ["precision.compute=bf16", F32] {
        let base: &[&str] = &[dtype, &from, "consolidation.weight=5", RATE, "training.steps=4", "averaging.kind=ema"];
        let name = |way: &str| format!("{way}-{}", &dtype[18..]);
        let go = |way: &str, sets: &[&str]| start(folder, &name(way), &[base, sets].concat());
        let whole = go("whole", DDP);
        let expected = seen(&folder.join(name("whole")));
        assert!(expected.iter().all(|[.., penalty]| f64::from_bits(*penalty) > 0.0));
        let disk = [STAGE_3, ON_DISK].concat();
        let all_on_disk = [DDP, ALL_ON_DISK].concat();
        let ways = [
            ("stage-1", STAGE_1),
            ("stage-2", STAGE_2),
            ("stage-3", STAGE_3),
            ("hybrid", HYBRID),
            ("pipeline", PIPELINE),
            ("disk", &disk),
            ("all-on-disk", &all_on_disk),
        ];
        for (way, sets) in ways {
            assert!(go(way, sets) == whole, "{way}, {dtype}");
            assert_eq!(seen(&folder.join(name(way))), expected, "{way}, {dtype}");
        }
    }
    // Tensor parallelism sums in another order; what its ranks share counts once.
    let base: &[&str] = &[F32, &from, "consolidation.weight=5", RATE, "training.steps=4", "averaging.kind=ema"];
    start(folder, "tensor", &[base, &["parallel.ranks=2", "parallel.tensor_parallel_degree=2"]].concat());
    let penalties = |run: &str| metrics(&folder.join(run)).into_iter().map(|m| m.penalty.unwrap()).collect::<Vec<_>>();
    for (tensor, one) in penalties("tensor").iter().zip(penalties("whole-f32")) {
        assert!((tensor / one - 1.0).abs() < 1e-4, "{tensor} and {one}");
    }
}

#[test]
fn a_weight_of_zero_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (_, from) = old(folder, &[]);
    for rule in ["adamw", "sgd", "lion", "muon", "adafactor", "lamb"] {
        let name = format!("optimizer.name={rule}");
        let sets = [name.as_str(), "training.steps=3", RATE, "optimizer.clip_norm=0.01"];
        let without = start(folder, &format!("{rule}-without"), &sets);
        let zero = [from.as_str(), "consolidation.weight=0"];
        let with = start(folder, &format!("{rule}-zero"), &[&sets[..], &zero].concat());
        assert_eq!(with.keys().collect::<Vec<_>>(), without.keys().collect::<Vec<_>>(), "a checkpoint has none of it");
        for (name, values) in &without {
            assert!(floats(values) == floats(&with[name]), "{rule} {name}");
        }
    }
}

#[test]
fn a_resumed_run_is_held_as_before_on_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (_, from) = old(folder, &[]);
    let sets: &[&str] = &[&from, "consolidation.weight=5", RATE];
    let whole = start(folder, "whole", &[STAGE_3, sets, &["training.steps=6"]].concat());
    let disk = [STAGE_3, ON_DISK].concat();
    for (name, first, second) in
        [("same", STAGE_3, STAGE_3), ("sharded", DDP, STAGE_2), ("one", STAGE_1, DDP), ("disk", DDP, &disk[..])]
    {
        start(folder, name, &[first, sets, &["training.steps=3"]].concat());
        let to = folder.join(format!("{name}-on"));
        copy(&folder.join(name), &to);
        let auto = ["ranks", "zero_stage"].map(|key| format!("parallel.{key}=auto"));
        let then = second.iter().map(|set| (*set).to_owned()).chain(["training.steps=6".to_owned()]);
        let all: Vec<String> = auto.into_iter().chain(then).collect();
        let going_on = GoingOn::new(&to, &all);
        let config = Session::configuration(&going_on).unwrap();
        let end = run(&to, &config, |world| Session::resume(&going_on, world, |_| ()));
        assert!(end == whole, "{name}");
    }
}

/// The online form: what an earlier run was held to is handed on.
#[test]
fn a_run_that_was_held_hands_on_what_it_held() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (first, from) = old(folder, &[F32]);
    start(folder, "second", &[F32, RATE, &from, "training.steps=3"]);
    let alone = consolidate(folder, "second", 8, 0.0).1;
    let (found, both) = consolidate(folder, "second", 8, 0.25);
    assert_eq!(found.decay, Some(0.25));
    for name in both.keys().filter(|name| name.starts_with("fisher")) {
        let [first, alone, both] = [&first, &alone, &both].map(|tensors| floats(&tensors[name]));
        for i in 0..both.len() {
            let want = alone[i] + 0.25 * first[i];
            assert!((both[i] - want).abs() <= 1e-6 * want, "{name}[{i}]");
        }
    }
    for name in both.keys().filter(|name| name.starts_with("weights")) {
        assert!(both[name] == alone[name] && both[name] != first[name], "{name}: the newest weights are held");
    }
}

#[test]
fn memory_is_predicted_with_what_is_held() {
    let ways: &[&[&str]] = &[
        &[],
        &["precision.compute='f32'"],
        &["parallel.ranks=2", "parallel.zero_stage=1"],
        &["parallel.ranks=2", "parallel.zero_stage=3"],
        &["parallel.ranks=2", "parallel.tensor_parallel_degree=2"],
        &["memory.offload.optimizer='disk'", "memory.offload.parameters='disk'"],
        &["memory.offload.optimizer='disk'", ON_THE_HOST],
        &["optimizer.name='lion'"],
        &["optimizer.name='sgd'", "optimizer.momentum=0", "averaging.kind=ema"],
    ];
    for way in ways {
        // Nothing is read here, so nothing pulls: the weights are held with no information.
        let sets = [way, &["consolidation.from='/'"][..]].concat();
        let (with, without) = (common::train(&sets, 3), common::train(way, 3));
        with.iter().for_each(|end| check_memory(end, &sets));
        assert_eq!(common::weights(&with), common::weights(&without), "{way:?}");
        let live = |ends: &[common::End]| ends[0].memory.peak_total() + ends[0].host[0].peak_total();
        assert!(live(&with) > live(&without), "{way:?}");
        assert_eq!(with[0].outcomes[0].penalty, Some(0.0));
    }
}

#[test]
fn what_cannot_be_held_is_refused() {
    for (sets, words) in [
        (&["consolidation.weight=3"][..], "consolidation.weight has no effect"),
        (&["consolidation.from=nowhere"], "consolidation.from names nowhere, which does not exist"),
        (&["consolidation.from='/'", "consolidation.weight=-1"], "consolidation.weight = -1 is out of range"),
        (&["consolidation.from='/'", "consolidation.weight=nan"], "consolidation.weight"),
        (&["consolidation.from='/'", "device=cuda"], "weights are consolidated on processors only"),
        (&["consolidation.from='/'", "update.rule=diloco", "parallel.ranks=2"], "ranks have different ones"),
        (&["optimizer.ewc_lambda=3"], "consolidation.weight"),
    ] {
        let said = common::refused(sets);
        assert!(said.contains(words), "{sets:?}: {said}");
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (_, from) = old(folder, &[]);
    let refused = |name: &str, sets: &[&str]| {
        let config = config(folder, name, &[sets, &["training.steps=1"]].concat());
        let ended = runs::run_to_the_end(&config, |world| Session::create(&config, world, |_| ()));
        ended.expect_err("it is accepted").to_string()
    };
    start(folder, "plain", &["training.steps=1"]);
    let plain = format!("consolidation.from={}", folder.join("plain").display());
    let said = refused("none", &[&plain]);
    assert!(said.contains("has no estimate of the Fisher information: run `trainyard consolidate"), "{said}");
    let said = refused("wider", &[&from, "model.dim=64"]);
    assert!(said.contains("the model, and what of it is trained, must be that of the other run"), "{said}");
    let said = refused("adapted", &[&from, "fine_tuning.adapter=lora"]);
    assert!(said.contains("must be that of the other run"), "{said}");
    // Part of what the old run trained may be trained on.
    start(folder, "part", &[&from, "training.steps=1", "fine_tuning.freeze=['block.0.*']"]);
    let damaged: PathBuf = folder.join("old").join(FOLDER).join("checkpoints/step-00000006/fisher.safetensors");
    let mut bytes = std::fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let said = refused("damaged", &[&from]);
    assert!(said.contains("fisher.safetensors has the checksum"), "{said}");
}

#[test]
fn estimates_that_cannot_be_made_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    start(folder, "old", &["training.steps=4", "checkpoint.interval_steps=2", "checkpoint.keep_last=9"]);
    let refused = |trained: &Trained, batches: usize| {
        let settings = EstimateSettings { batches, decay: 1.0, division: division(1, None) };
        let texts = text(folder, trained);
        estimate(&folder.join("old"), trained, &texts, settings, |_| ()).expect_err("it is accepted").to_string()
    };
    let said = refused(&opened(&folder.join("old")), 1000);
    assert!(said.contains("batches of 16 tokens: ask for at most so many"), "{said}");
    consolidate(folder, "old", 2, 1.0);
    consolidate(folder, "old", 3, 1.0);
    let again = find(&folder.join("old").join(FOLDER), Choice::Latest).unwrap().unwrap().checkpoint;
    assert_eq!(again.state()["batches"], 3, "an estimate of the same step takes the place of the one before");
    let early = open_trained(&folder.join("old"), Choice::Step(2), &Runtime::of_this_machine(), |_| ()).unwrap();
    let said = refused(&early, 2);
    assert!(said.contains("has an estimate of step 4, after step 2: remove that folder first"), "{said}");
}
