//! Tests of runs that are stopped and resumed, on the same ranks or on others. A checkpoint of any
//! layout can be read by any other layout.

#[path = "common/runs.rs"]
mod runs;
#[path = "common/small.rs"]
mod small;
#[path = "common/tensors.rs"]
mod tensors;

use runs::copy;
use small::run;
use std::collections::BTreeMap;
use std::path::Path;
use trainyard_engine::checkpoint::{Choice, find_latest};
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trained::{Runtime, open_trained};

const DDP: &[&str] = &["parallel.ranks=4"];
const STAGE_1: &[&str] = &["parallel.ranks=4", "parallel.zero_stage=1"];
const STAGE_3: &[&str] = &["parallel.ranks=4", "parallel.zero_stage=3"];
const HYBRID: &[&str] =
    &["parallel.data_parallel_replicate_degree=2", "parallel.data_parallel_shard_degree=2", "parallel.zero_stage=2"];
const ONE: &[&str] = &["parallel.ranks=1"];
const THREE: &[&str] = &["parallel.ranks=3", "parallel.zero_stage=3", "training.global_batch_size=6"];

fn start(folder: &Path, name: &str, sets: &[&str], steps: &str) -> BTreeMap<String, Vec<u8>> {
    small::start(folder, name, &[sets, &[steps]].concat())
}

/// Resumes a copy of the run `from` with another layout.
fn go_on(folder: &Path, from: &str, name: &str, sets: &[&str], steps: &str) -> BTreeMap<String, Vec<u8>> {
    copy(&folder.join(from), &folder.join(name));
    let auto = ["ranks", "zero_stage", "data_parallel_replicate_degree", "data_parallel_shard_degree"]
        .map(|key| format!("parallel.{key}=auto"));
    let mut all: Vec<String> = auto.into();
    all.extend([sets, &[steps]].concat().iter().map(|set| (*set).to_owned()));
    let run_folder = folder.join(name);
    let going_on = GoingOn::new(&run_folder, &all);
    let config = Session::configuration(&going_on).unwrap();
    run(&run_folder, &config, |world| Session::resume(&going_on, world, |_| ()))
}

/// A pipeline's schedule, rows that a group divides and a number of ranks mean nothing once their
/// degree is 1, so the user need not unset each.
#[test]
fn a_degree_of_one_takes_along_the_keys_that_depend_on_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let pipeline = ["parallel.pipeline_parallel_degree=2", "parallel.pipeline_schedule='gpipe'"];
    let split = ["parallel.tensor_parallel_degree=2", "parallel.sequence_parallel=true", "parallel.ranks=2"];
    let context = ["parallel.context_parallel_degree=2", "parallel.context_parallel_load_balance=true"];
    for (name, sets, on) in [
        ("pipeline", &pipeline[..], "parallel.pipeline_parallel_degree=1"),
        ("split", &split[..], "parallel.tensor_parallel_degree=1"),
        ("context", &context[..], "parallel.context_parallel_degree=1"),
    ] {
        start(folder, name, sets, "training.steps=2");
        let (run_folder, sets) = (folder.join(name), [on.to_owned(), "training.steps=3".to_owned()]);
        let going_on = GoingOn::new(&run_folder, &sets);
        let config = Session::configuration(&going_on).unwrap();
        assert_eq!(trainyard_engine::world::ranks(&config).unwrap(), 1, "{name}");
        run(&run_folder, &config, |world| Session::resume(&going_on, world, |_| ()));
    }
}

#[test]
fn a_run_goes_on_with_the_same_bits_on_ranks_that_share_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let whole = start(folder, "whole", STAGE_3, "training.steps=6");
    assert!(whole.len() > 10 && whole.values().any(|bytes| bytes.iter().any(|byte| *byte != 0)));
    for (name, first, second) in [
        ("same", STAGE_3, STAGE_3),
        ("sharded-later", DDP, STAGE_3),
        ("whole-later", STAGE_3, DDP),
        ("hybrid-later", STAGE_1, HYBRID),
        ("hybrid-before", HYBRID, STAGE_1),
    ] {
        start(folder, name, first, "training.steps=3");
        let continued = go_on(folder, name, &format!("{name}-on"), second, "training.steps=6");
        assert!(continued == whole, "{name}: {first:?}, then {second:?}");
    }
}

#[test]
fn any_number_of_ranks_reads_what_any_other_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let four = start(folder, "four", STAGE_3, "training.steps=2");
    // A resumed run with nothing left to do writes nothing, so its state cannot be compared
    // directly. Each run therefore reads a checkpoint, trains a step, and is compared with a run on
    // the same ranks that read another layout's checkpoint of the same state.
    let one = go_on(folder, "four", "four-one", ONE, "training.steps=3");
    let three = go_on(folder, "four", "four-three", THREE, "training.steps=3");
    let elsewhere = start(folder, "ddp", DDP, "training.steps=2");
    assert!(elsewhere == four, "sharding changed bits");
    assert!(go_on(folder, "ddp", "ddp-one", ONE, "training.steps=3") == one);
    assert!(go_on(folder, "ddp", "ddp-three", THREE, "training.steps=3") == three);
    // Four ranks read checkpoints that one or three wrote.
    let on = go_on(folder, "four-one", "four-one-four", STAGE_3, "training.steps=4");
    assert!(go_on(folder, "ddp-one", "ddp-one-four", HYBRID, "training.steps=4") == on);
    assert_ne!(one, four);

    // Evaluation, generation and export open it like any other.
    let runtime = Runtime::of_this_machine();
    let trained = open_trained(&folder.join("four"), Choice::Latest, &runtime, |_| ()).unwrap();
    let (id, spec) = trained.rank.model().parameters().next().unwrap();
    let name = trained.rank.model().parameter_name(id).unwrap();
    let read = trained.rank.parameters.master(id, &spec.shape).unwrap();
    assert_eq!(read.as_bytes().unwrap(), four[&format!("model {name}")]);
}

const FP8: &[&str] = &["precision.fp8=hybrid", "precision.fp8_amax_history=4", "model.ffn_dim=64"];

#[test]
fn scales_of_eight_bits_go_on_where_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let whole = start(folder, "whole", &[STAGE_3, FP8].concat(), "training.steps=7");
    assert!(start(folder, "wide", &[STAGE_3, &FP8[2..]].concat(), "training.steps=7") != whole, "nothing was rounded");
    start(folder, "same", &[STAGE_3, FP8].concat(), "training.steps=3");
    assert!(go_on(folder, "same", "same-on", STAGE_3, "training.steps=7") == whole);
    assert!(go_on(folder, "same", "whole-on", DDP, "training.steps=7") == whole);
    // The state holds the largest magnitudes of the last four steps.
    let state = find_latest(&folder.join("whole")).unwrap().unwrap().checkpoint.state().clone();
    let history = &state["amax_history"];
    assert_eq!(history["steps"].as_array().unwrap().len(), 4);
    let layers = history["layers"].as_array().unwrap();
    assert_eq!((layers.len(), layers[0].as_str()), (8, Some("block.0.attn.qkv.weight")));
    // A run without history measures one, and notes it.
    start(folder, "later", &[ONE, &FP8[2..]].concat(), "training.steps=2");
    copy(&folder.join("later"), &folder.join("later-on"));
    let sets: Vec<String> = ["precision.fp8=hybrid", "training.steps=4"].map(str::to_owned).into();
    let later_on = folder.join("later-on");
    let going_on = GoingOn::new(&later_on, &sets);
    let config = Session::configuration(&going_on).unwrap();
    let said = std::sync::Mutex::new(Vec::new());
    run(&later_on, &config, |world| {
        Session::resume(&going_on, world, |line| said.lock().unwrap().push(line.to_owned()))
    });
    let said = said.into_inner().unwrap().join("\n");
    for part in
        ["fp8: the 8 linear layers of the blocks multiply E4M3", "takes longer than bf16", "knows no largest values"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
}
