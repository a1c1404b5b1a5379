//! Tests of AdamW with moments of eight bits: every layout trains the same bits, runs go on as if
//! they had not stopped, memory is as predicted, and the loss is near that of f32 moments.

#[path = "common/train.rs"]
mod common;
#[path = "common/runs.rs"]
mod runs;
#[path = "common/small.rs"]
mod small;
#[path = "common/tensors.rs"]
mod tensors;

use common::{ON_THE_HOST, check_memory, losses, refused, weights};
use runs::copy;
use std::collections::BTreeMap;
use std::path::Path;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_tensor::Purpose;

const BITS: &str = "optimizer.state_bits=8";
const ELASTIC: &[&str] = &[BITS, "training.elastic_bits=true"];
const ONE: &[&str] = &["parallel.ranks=1"];
const TWO: &[&str] = &["parallel.ranks=2", "parallel.zero_stage=1"];
const DDP: &[&str] = &["parallel.ranks=4"];
const STAGE_1: &[&str] = &["parallel.ranks=4", "parallel.zero_stage=1"];
const STAGE_2: &[&str] = &["parallel.ranks=4", "parallel.zero_stage=2"];
const STAGE_3: &[&str] = &["parallel.ranks=4", "parallel.zero_stage=3"];
const ON_DISK: &[&str] = &["parallel.ranks=2", "memory.offload.optimizer=disk", "memory.offload.chunk_elements=4096"];

fn start(folder: &Path, name: &str, sets: &[&str]) -> BTreeMap<String, Vec<u8>> {
    small::start(folder, name, sets)
}

/// Resumes a copy of the run `from` with other settings.
fn go_on(folder: &Path, from: &str, name: &str, sets: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let run_folder = folder.join(name);
    copy(&folder.join(from), &run_folder);
    let all = ["parallel.ranks=auto", "parallel.zero_stage=auto"].iter().chain(sets).map(|set| (*set).to_owned());
    let all: Vec<String> = all.collect();
    let going_on = GoingOn::new(&run_folder, &all);
    let config = Session::configuration(&going_on).unwrap();
    small::run(&run_folder, &config, |world| Session::resume(&going_on, world, |_| ()))
}

/// The weights and the decoded moments.
#[test]
fn every_layout_ends_with_the_same_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let steps = "training.steps=5";
    let of = |name: &str, sets: &[&str]| start(folder.path(), name, &[ELASTIC, sets, &[steps]].concat());
    let reference = of("one", ONE);
    let second = reference.iter().filter(|(name, _)| name.ends_with("exp_avg_sq"));
    assert!(second.map(|(_, bytes)| bytes.len()).sum::<usize>() > 4 * 10_000, "moments are written in f32");
    let layouts = [TWO, DDP, STAGE_1, STAGE_2, STAGE_3, ON_DISK];
    for (name, sets) in ["two", "ddp", "stage 1", "stage 2", "stage 3", "disk"].into_iter().zip(layouts) {
        assert!(of(name, sets) == reference, "{name}");
    }
    let f32s = start(folder.path(), "f32", &["training.elastic_bits=true", steps]);
    assert!(f32s.keys().eq(reference.keys()) && f32s != reference, "codes change the result, and no name");
}

#[test]
fn a_run_goes_on_as_if_it_had_not_stopped_in_any_layout() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let frozen = "optimizer.freeze_variance_after=2";
    let (first, all) = ("training.steps=3", "training.steps=6");
    let whole = start(folder, "whole", &[ELASTIC, STAGE_3, &[frozen, all]].concat());
    start(folder, "half", &[ELASTIC, STAGE_3, &[frozen, first]].concat());
    for (name, sets) in [("one", ONE), ("ddp", DDP), ("stage 1", STAGE_1), ("stage 3", STAGE_3), ("disk", ON_DISK)] {
        assert!(go_on(folder, "half", name, &[sets, &[all]].concat()) == whole, "{name}");
    }
}

/// A checkpoint has f32 moments, so the bits may change between sittings.
#[test]
fn the_bits_may_change_between_sittings() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (first, all) = ("training.steps=3", "training.steps=6");
    start(folder, "eight", &[BITS, first]);
    start(folder, "f32", &[first]);
    let whole = [start(folder, "whole eight", &[BITS, all]), start(folder, "whole f32", &[all])];
    for (from, to, name) in [("eight", "optimizer.state_bits=32", "widened"), ("f32", BITS, "narrowed")] {
        let changed = go_on(folder, from, name, &[to, all]);
        assert!(whole.iter().all(|whole| *whole != changed), "{name}");
    }
}

#[test]
fn memory_is_predicted_and_moments_take_two_and_a_quarter_bytes() {
    let ways: &[&[&str]] = &[
        &[],
        &["precision.compute='f32'"],
        &["parallel.ranks=2", "parallel.zero_stage=1"],
        &["parallel.ranks=2", "parallel.zero_stage=3"],
        &["parallel.ranks=2", "parallel.tensor_parallel_degree=2"],
        &["parallel.ranks=2", "parallel.pipeline_parallel_degree=2"],
        &["memory.offload.optimizer='disk'", "memory.offload.parameters='disk'"],
        &["memory.offload.optimizer='disk'", "memory.offload.chunk_elements=4096"],
        &["memory.offload.optimizer='disk'", ON_THE_HOST],
        &["averaging.kind='ema'"],
    ];
    for way in ways {
        let sets = [way, &[BITS][..]].concat();
        let (codes, f32s) = (common::train(&sets, 3), common::train(way, 3));
        codes.iter().for_each(|end| check_memory(end, &sets));
        let state = |ends: &[common::End]| {
            let on = |usage: &trainyard_tensor::Usage| usage.peak(Purpose::Optimizer);
            on(&ends[0].memory) + on(&ends[0].host[0])
        };
        let averaged = way.iter().any(|set| set.starts_with("averaging"));
        // The pool rounds sizes up.
        let of_f32 = if averaged { (2.25 + 4.0) / 12.0 } else { 2.25 / 8.0 };
        let share = state(&codes) as f64 / state(&f32s) as f64;
        assert!((share / of_f32 - 1.0).abs() < 0.02, "{way:?}: {share}");
    }
}

/// The offloaded state is that of memory, bit for bit.
#[test]
fn offloaded_state_trains_the_same_bits() {
    let memory = weights(&common::train(&[BITS], 6));
    for way in [
        &["memory.offload.optimizer='disk'"][..],
        &["memory.offload.optimizer='disk'", "memory.offload.chunk_elements=4096"],
        &["memory.offload.optimizer='disk'", "memory.offload.gradients='disk'", ON_THE_HOST],
    ] {
        assert!(weights(&common::train(&[way, &[BITS]].concat(), 6)) == memory, "{way:?}");
    }
}

#[test]
fn the_loss_is_near_that_of_f32_moments() {
    let of = |sets: &[&str]| losses(&common::train(sets, 300));
    let (exact, rounded) = (of(&[]), of(&[BITS]));
    let last = |losses: &[f64]| losses[280..].iter().sum::<f64>() / 20.0;
    assert!(last(&exact) < 0.8 * exact[0], "nothing was learnt: {} to {}", exact[0], last(&exact));
    let (exact, rounded) = (last(&exact), last(&rounded));
    assert!((rounded / exact - 1.0).abs() < 0.02, "{rounded} instead of {exact}");
}

#[test]
fn what_eight_bits_do_not_go_with_is_refused() {
    for (sets, words) in [
        (&["optimizer.state_bits=16"][..], "optimizer.state_bits = 16: moments have 32 bits or 8"),
        (&[BITS, "optimizer.name=lamb"], "optimizer.state_bits = 8 is for adamw: lamb keeps its state in 32 bits"),
        (&[BITS, "optimizer.name=muon"], "optimizer.state_bits = 8 is for adamw: muon"),
        (&[BITS, "compute.device=cuda"], "optimizer.state_bits = 8 has no kernel for GPUs"),
    ] {
        let message = refused(sets);
        assert!(message.contains(words), "{sets:?}: {message}");
    }
}
