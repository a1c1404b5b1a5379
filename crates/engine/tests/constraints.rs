//! Constraints on weights during training: weights rounded to a grid, and weights that become zero.
//! No layout changes a bit of either, runs resume with them, and their memory is predicted.

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

use common::check_memory;
use layouts::*;
use small::{go_on, start};
use std::path::Path;
use tensors::tensors;
use trainyard_engine::checkpoint::{Choice, find};
use trainyard_engine::constraints::Pruning;
use trainyard_engine::metrics::{EvaluationMetrics, StepMetrics};
use trainyard_engine::session::Session;
use trainyard_engine::trained::{Runtime, open_trained};
use trainyard_tensor::sparsity::Pattern;

const GRID: &[&str] = &["quantization.aware=4", "quantization.group=32"];
const HALF: &[&str] =
    &["pruning.sparsity=0.5", "pruning.begin=0.2", "pruning.end=0.7", "pruning.interval_steps=2", "training.steps=10"];
const TWO_OF_FOUR: &[&str] =
    &["pruning.pattern='2:4'", "pruning.begin=0.2", "pruning.end=0.7", "pruning.interval_steps=2", "training.steps=10"];

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// The evaluations of a run: step, and loss as bits.
fn evaluations(run: &Path) -> Vec<(u64, u64)> {
    let text = std::fs::read_to_string(run.join("evaluations.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<EvaluationMetrics>(line).unwrap());
    lines.map(|m| (m.step, m.loss.to_bits())).collect()
}

fn check_layouts(sets: &[&str], ways: &[(&str, &[&str])]) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let base = [sets, EVALUATED, &[RATE]].concat();
    let go = |name: &str, way: &[&str]| start(folder, name, &[&base, way].concat());
    let whole = go("whole", DDP);
    let seen = evaluations(&folder.join("whole"));
    assert!(seen.len() > 2);
    for (name, way) in ways {
        assert!(go(name, way) == whole, "{name}");
        assert_eq!(evaluations(&folder.join(name)), seen, "{name}");
    }
}

/// Rounded copies, in both forms of masters: beside a copy of 16 bits, and beside one of f32.
#[test]
fn no_layout_changes_a_bit_of_training_on_a_grid() {
    for compute in ["precision.compute=bf16", "precision.compute=f32"] {
        let sets = [GRID, &[compute, "training.steps=6"]].concat();
        let ways: &[(&str, &[&str])] = &[
            ("stage-1", STAGE_1),
            ("stage-2", STAGE_2),
            ("stage-3", STAGE_3),
            ("hybrid", HYBRID),
            ("pipeline", PIPELINE),
            ("disk", &[STAGE_3, ON_DISK].concat()),
            ("all-on-disk", &[DDP, ALL_ON_DISK].concat()),
        ];
        check_layouts(&sets, ways);
        let elastic = [&sets[..], &["training.elastic_bits=true"]].concat();
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str, way: &str| start(folder.path(), name, &[&elastic[..], &[way]].concat());
        assert!(of("one", "parallel.ranks=1") == of("two", "parallel.ranks=2"), "{compute}: one rank and two");
        let without = start(folder.path(), "without", &[compute, "training.steps=6", "parallel.ranks=1"]);
        assert!(of("one-more", "parallel.ranks=1") != without, "the grid changed nothing");
    }
}

#[test]
fn no_layout_changes_a_bit_of_pruning() {
    let disk = [DDP, ON_DISK].concat();
    check_layouts(HALF, &[("pipeline", PIPELINE), ("disk", &disk)]);
    let sharded = [STAGE_3, ON_DISK].concat();
    let ways: &[(&str, &[&str])] =
        &[("stage-1", STAGE_1), ("stage-2", STAGE_2), ("stage-3", STAGE_3), ("hybrid", HYBRID), ("disk", &sharded)];
    check_layouts(TWO_OF_FOUR, ways);
    check_layouts(&[TWO_OF_FOUR, &["precision.compute=f32"]].concat(), &ways[..3]);
    check_layouts(&[TWO_OF_FOUR, GRID].concat(), &ways[..3]);
}

/// The weights of every matrix of weight files in the blocks, by parameter, at a step of a run.
fn matrices(run: &Path, step: u64) -> Vec<(usize, Vec<f32>)> {
    let tensors = tensors(&find(run, Choice::Step(step)).unwrap().unwrap().checkpoint);
    let trained = open_trained(run, Choice::Latest, &Runtime::of_this_machine(), |_| ()).unwrap();
    let model = trained.rank.model();
    let mut all = Vec::new();
    for (id, spec) in model.parameters() {
        let inside = id.unit > 0 && (id.unit as usize) + 1 < model.units().len();
        if inside && spec.shape.len() == 2 {
            let values = floats(&tensors[&format!("model {}", model.parameter_name(id).unwrap())]);
            let width = spec.shape[1];
            let sources = spec.sources.iter().map(|source| &source.rows);
            all.extend(sources.map(|rows| (width, values[rows.start * width..rows.end * width].to_vec())));
        }
    }
    assert_eq!(all.len(), 2 * 7, "q, k, v, o, gate, up and down of two blocks");
    all
}

fn zeros(weights: &[f32]) -> usize {
    weights.iter().filter(|weight| **weight == 0.0).count()
}

/// Every step's zeros are as many as the schedule says, and no weight comes back.
#[test]
fn zeros_follow_the_schedule_and_stay() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let every = ["checkpoint.interval_steps=1", "checkpoint.keep_last=100", RATE, "parallel.ranks=2"];
    // Choices after updates 4 and 6 and, the last, 7 of 10.
    let shares = |share: f64| {
        let at = |x: f64| share * (1.0 - (1.0 - x).powi(3));
        [0.0, 0.0, 0.0, at(0.4), at(0.4), at(0.8), share, share, share, share]
    };
    for rule in ["adamw", "sgd", "lion", "muon", "adafactor", "lamb"] {
        let name = format!("half-{rule}");
        let of_rule = format!("optimizer.name={rule}");
        start(folder, &name, &[HALF, &every, &[&of_rule]].concat());
        let mut before: Vec<Vec<f32>> = Vec::new();
        for (step, share) in (1..).zip(shares(0.5)) {
            let now = matrices(&folder.join(&name), step);
            for (number, (_, weights)) in now.iter().enumerate() {
                assert_eq!(zeros(weights), (share * weights.len() as f64) as usize, "{name}: step {step}, {number}");
                let come_back = |(old, new): (&f32, &f32)| *old == 0.0 && *new != 0.0;
                let back = before.get(number).is_some_and(|old| old.iter().zip(weights).any(come_back));
                assert!(!back, "{name}: a weight came back in step {step}");
            }
            before = now.into_iter().map(|(_, weights)| weights).collect();
        }
    }
    let text = std::fs::read_to_string(folder.join("half-adamw/metrics.jsonl")).unwrap();
    let recorded: Vec<StepMetrics> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (metrics, share) in recorded.iter().zip(shares(0.5)) {
        // A count of a matrix is rounded down.
        let off = share - metrics.sparsity.unwrap();
        assert!((0.0..1e-3).contains(&off), "step {}: {:?}, not {share}", metrics.step, metrics.sparsity);
    }
    start(folder, "pairs", &[TWO_OF_FOUR, &every].concat());
    for (step, zeros_of_four) in (1..).zip([0, 0, 0, 1, 1, 1, 2, 2, 2, 2]) {
        for (width, weights) in matrices(&folder.join("pairs"), step) {
            assert!(width % 4 == 0 && weights.chunks(4).all(|four| zeros(four) == zeros_of_four), "step {step}");
        }
    }
    // What begins and ends at once, at the last step.
    let once = ["pruning.sparsity=0.75", "pruning.begin=1", "pruning.end=1", "training.steps=3"];
    start(folder, "once", &[&once[..], &every].concat());
    let of = |step| matrices(&folder.join("once"), step);
    assert!(of(2).iter().all(|(_, weights)| zeros(weights) == 0));
    assert!(of(3).iter().all(|(_, weights)| zeros(weights) == weights.len() * 3 / 4));
}

#[test]
fn a_resumed_run_has_the_same_bits_on_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let grid = [GRID, &["training.steps=10"]].concat();
    for (name, sets, first, second) in [
        ("grid", &grid[..], DDP, STAGE_3),
        ("grid-back", &grid, STAGE_2, DDP),
        ("late", &[&grid[..], &["quantization.begin=0.5"]].concat(), DDP, STAGE_3),
        ("half", HALF, DDP, PIPELINE),
        ("pairs", TWO_OF_FOUR, STAGE_3, DDP),
        ("both", &[TWO_OF_FOUR, GRID].concat(), DDP, STAGE_2),
    ] {
        let every = ["checkpoint.interval_steps=1", "checkpoint.keep_last=20", RATE];
        let whole = start(folder, name, &[first, sets, &every].concat());
        // Before the first zeros, between two choices, and after the last.
        for step in [1, 5, 8] {
            let on = format!("{name}-{step}");
            let continued = go_on(folder, name, &on, step, &[second, &["checkpoint.interval_steps=auto"]].concat());
            assert!(continued == whole, "{on}");
        }
    }
}

/// The masters are those of a run without a grid, up to the step whose update is rounded first. The
/// next forward reads what it has made.
#[test]
fn weights_are_rounded_from_the_share_of_the_steps_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for compute in ["precision.compute=bf16", "precision.compute=f32"] {
        let every = ["training.steps=10", "checkpoint.interval_steps=1", "checkpoint.keep_last=20", compute, RATE];
        let begin = ["quantization.begin=0.5"];
        start(folder, "plain", &[&every[..], DDP].concat());
        start(folder, "late", &[&every[..], DDP, GRID, &begin].concat());
        let of = |name: &str, step| matrices(&folder.join(name), step);
        for step in [1, 4, 5] {
            assert!(of("plain", step) == of("late", step), "{compute}: step {step}");
        }
        assert!(of("plain", 6) != of("late", 6), "{compute}: the grid changed nothing");
        for name in ["plain", "late"] {
            std::fs::remove_dir_all(folder.join(name)).unwrap();
        }
    }
}

#[test]
fn memory_is_predicted_with_constraints() {
    let ways: &[&[&str]] = &[
        &[],
        &["precision.compute='f32'"],
        &["parallel.ranks=2", "parallel.zero_stage=1"],
        &["parallel.ranks=2", "parallel.zero_stage=3"],
        &["parallel.ranks=2", "parallel.zero_stage=3", "precision.compute='f32'"],
        &["parallel.ranks=2", "parallel.tensor_parallel_degree=2"],
        &["memory.offload.optimizer='disk'", "memory.offload.parameters='disk'"],
        &["memory.offload.optimizer='disk'", "precision.compute='f32'"],
    ];
    let aware = ["quantization.aware=4", "quantization.group=8"];
    let pruned = ["pruning.pattern='2:4'", "pruning.begin=0", "pruning.end=0.02"];
    for way in ways {
        let without = common::train(way, 3);
        for constraints in [&aware[..], &pruned, &[&aware[..], &pruned].concat()] {
            let sets = [way, constraints].concat();
            let with = common::train(&sets, 3);
            with.iter().for_each(|end| check_memory(end, &sets));
            assert_ne!(common::weights(&with), common::weights(&without), "{sets:?} changed nothing");
        }
    }
    let half = ["pruning.sparsity=0.5", "pruning.begin=0", "pruning.end=0.02"];
    common::train(&half, 3).iter().for_each(|end| check_memory(end, &half));
}

#[test]
fn choices_come_as_the_schedule_says() {
    let pruning = Pruning { pattern: Pattern::Share(0.5), begin: 10, end: 20, interval: 4 };
    let chosen: Vec<(u64, f64)> = (1..40).filter_map(|u| Some((u, pruning.chooses(u)?))).collect();
    let at = |x: f64| 1.0 - (1.0 - x).powi(3);
    assert_eq!(chosen.iter().map(|(update, _)| *update).collect::<Vec<_>>(), [14, 18, 20]);
    for ((_, got), want) in chosen.iter().zip([at(0.4), at(0.8), 1.0]) {
        assert!((got - want).abs() < 1e-12);
    }
    let once = Pruning { pattern: Pattern::Share(0.5), begin: 20, end: 20, interval: 4 };
    assert_eq!((1..40).filter_map(|u| Some((u, once.chooses(u)?))).collect::<Vec<_>>(), [(20, 1.0)]);
}

#[test]
fn impossible_constraints_are_refused() {
    let aware = "quantization.aware=4";
    let half = "pruning.sparsity=0.5";
    for (sets, words) in [
        (&["quantization.begin=0.5"][..], "quantization.aware is unset"),
        (&[aware, "quantization.begin=1.5"], "quantization.begin"),
        (&["quantization.aware=5"], "quantization.aware = 5: weights have 2, 3, 4 or 8 bits"),
        (&["quantization.aware=400"], "quantization.aware takes a whole number"),
        (&["quantization.group=64"], "quantization.group has no effect"),
        (&[aware, "device=cuda"], "on processors only"),
        (&[aware, "precision.compute=bf16", "precision.fp8=hybrid"], "precision.fp8 would round them once more"),
        (&[aware, "precision.int8=switchback"], "precision.int8 would round them once more"),
        (&[aware, "update.rule=diloco", "parallel.ranks=2"], "every replica has its own"),
        (&[aware, "fine_tuning.adapter=lora"], "they are frozen"),
        (&["pruning.sparsity=1.5"], "a sparsity of 1.5 is not between 0 and 1"),
        (&["pruning.sparsity=0"], "a sparsity of 0 is not between 0 and 1"),
        (&["pruning.pattern=4:2"], "`4:2` is no pattern"),
        (&[half, "pruning.pattern=2:4"], "pruning.pattern has no effect"),
        (&["pruning.begin=0.2"], "pruning.begin has no effect"),
        (&["pruning.end=0.2"], "pruning.end has no effect"),
        (&["pruning.interval_steps=2"], "pruning.interval_steps has no effect"),
        (&[half, "pruning.begin=0.7", "pruning.end=0.3"], "pruning.end = 0.3 is before pruning.begin = 0.7"),
        (&[half, "pruning.end=1.5"], "pruning.end = 1.5 is out of range"),
        (&[half, "pruning.interval_steps=0"], "pruning.interval_steps = 0 is too small"),
        (&[half, "averaging.kind=ema"], "an average over earlier steps is not zero"),
        (&[half, "training.steps=auto", "training.seconds=5"], "set training.steps"),
        (&["quantization.groupsize=64"], "quantization.group"),
        (&["pruning.final_sparsity=0.5"], "pruning.sparsity"),
    ] {
        let said = common::refused(sets);
        assert!(said.contains(words), "{sets:?}: {said}");
    }
    let folder = tempfile::tempdir().unwrap();
    for (sets, words) in [
        (
            &[aware][..],
            "quantization.group = 128 does not divide the 32 inputs of block.0.attn.qkv.weight: 32 or 16 would",
        ),
        (&[aware, "quantization.group=32", "fine_tuning.freeze=['block.0.*']"], "is frozen: take it out of"),
        (&[aware, "quantization.group=0", "parallel.tensor_parallel_degree=2"], "inside groups of 32 weights"),
        (&[half, "parallel.ranks=2", "parallel.zero_stage=1"], "take ZeRO stage 0, or pruning.pattern"),
        (&[half, "parallel.tensor_parallel_degree=2"], "parallel.tensor_parallel_degree = 1, or pruning.pattern"),
        (
            &[aware, "quantization.group=0", "model.ffn_dim=128", "parallel.ranks=4", "parallel.zero_stage=2"],
            "would lie on two ranks: take ZeRO stage 0",
        ),
        (&["pruning.pattern=3:5"], "do not divide into groups of 5"),
        (&[half, "model.family=mixtral"], "mixtures of experts cannot be pruned yet"),
        (&[aware, "quantization.group=32", "model.family=mixtral"], "mixtures of experts cannot be quantised yet"),
    ] {
        let sets = [sets, &["training.steps=2"]].concat();
        let config = small::config(folder.path(), "refused", &sets);
        let ended = runs::run_to_the_end(&config, |world| Session::create(&config, world, |_| ()));
        let said = ended.map(drop).unwrap_err().to_string();
        assert!(said.contains(words), "{sets:?}: {said}");
        assert!(!folder.path().join("refused/checkpoints").exists(), "{sets:?}: the run began");
    }
}
