//! Tests of encoded gradients: they train, in every layout, with the predicted memory, and
//! residuals go on where they were.

#[path = "common/train.rs"]
mod common;
#[path = "common/runs.rs"]
mod runs;
#[path = "common/tensors.rs"]
mod tensors;

use common::*;
use runs::{copy, run_to_the_end};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use tensors::tensors;
use trainyard_comm::Communicator;
use trainyard_engine::Result;
use trainyard_engine::checkpoint::{Choice, find_latest};
use trainyard_engine::config::Config;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::Session;
use trainyard_engine::trainer::Ending;

const CODECS: [&[&str]; 7] = [
    &["compression.gradients='bf16'"],
    &["compression.gradients='int8'"],
    &["compression.gradients='int8'", "compression.error_feedback=true"],
    &["compression.gradients='int8'", "compression.rounding='stochastic'"],
    &["compression.gradients='int4'"],
    &["compression.gradients='one_bit'"],
    &["compression.gradients='top_k'", "compression.top_k_density=0.05"],
];

fn mean_loss(ends: &[End], last: usize) -> f64 {
    let losses = losses(ends);
    losses[losses.len() - last..].iter().sum::<f64>() / last as f64
}

/// Stages of sharding change no bit, nor do prefetching, resharding and checkpointing.
#[test]
fn what_is_sharded_changes_no_bit_of_encoded_gradients() {
    let ways: [&[&str]; 4] = [
        &["parallel.zero_stage=1"],
        &["parallel.zero_stage=2"],
        &["parallel.zero_stage=3", "parallel.reshard_after_forward=false"],
        &["parallel.zero_stage=3", "parallel.prefetch=2", "activation_checkpointing.mode='full'"],
    ];
    for replicas in ["parallel.data_parallel_replicate_degree=1", "parallel.data_parallel_replicate_degree=2"] {
        for codec in CODECS {
            let mut reference = None;
            for way in ways {
                let sets = [codec, way, &["parallel.ranks=4", replicas, "precision.compute='f32'"]].concat();
                let ends = train(&sets, 3);
                let result = (losses(&ends), weights(&ends));
                assert!(*reference.get_or_insert_with(|| result.clone()) == result, "{sets:?}");
                ends.iter().for_each(|end| check_memory(end, &sets));
            }
        }
    }
}

/// Signs and the largest elements alone send much of a gradient later, which shows in few steps.
#[test]
fn encoded_gradients_train_nearly_like_exact_ones() {
    let ways: [&[&str]; 3] = [
        &["parallel.ranks=3", "training.global_batch_size=6"],
        &["parallel.ranks=4", "training.accumulation_steps=2", "parallel.reduce_schedule='micro_batch'"],
        &["parallel.ranks=4", "parallel.data_parallel_replicate_degree=2", "parallel.zero_stage=2"],
    ];
    for way in ways {
        let exact = mean_loss(&train(way, 40), 10);
        for (codec, tolerance) in CODECS.into_iter().zip([0.01, 0.01, 0.01, 0.01, 0.02, 0.15, 0.2]) {
            let sets = [codec, way].concat();
            let ends = train(&sets, 40);
            let loss = mean_loss(&ends, 10);
            assert!((loss / exact - 1.0).abs() < tolerance, "{sets:?}: {loss} against {exact}");
            ends.iter().for_each(|end| check_memory(end, &sets));
        }
    }
}

/// Between nodes only: the sum in each node is exact, so two ranks in one node change no bit.
#[test]
fn messages_between_replicas_alone_can_be_encoded() {
    let layout = ["parallel.ranks=4", "parallel.data_parallel_replicate_degree=2", "parallel.zero_stage=3"];
    let all = train(&[&["compression.gradients='int8'"], &layout[..]].concat(), 3);
    let across = train(&[&["compression.gradients='int8'", "compression.over='replicas'"], &layout[..]].concat(), 3);
    assert!(weights(&all) != weights(&across));
    let exact = train(&layout, 3);
    assert!((losses(&exact)[2] - losses(&across)[2]).abs() < 1e-2);
}

#[test]
fn keys_that_would_do_nothing_or_do_not_go_together_are_refused() {
    let cases: [(&[&str], &str); 10] = [
        (&["compression.gradients='int8'"], "has no effect"),
        (&["parallel.ranks=2", "compression.over='replicas'"], "compression.over has no effect"),
        (&["parallel.ranks=2", "compression.top_k_density=0.1"], "no codec is \"top_k\""),
        (&["parallel.ranks=2", "compression.rounding='stochastic'"], "only int8 and int4"),
        (&["parallel.ranks=2", "compression.outer='int8'"], "there are no outer steps"),
        (&["parallel.ranks=2", "compression.gradients='int8'", "parallel.reduce_dtype='bf16'"], "set one of them"),
        (&["parallel.ranks=2", "compression.gradients='int8'", "training.elastic_bits=true"], "elastic_bits"),
        (&["parallel.ranks=2", "compression.gradients='int4'", "precision.compute='f16'"], "loss scale"),
        (
            &["parallel.ranks=4", "compression.gradients='one_bit'", "parallel.tensor_parallel_degree=2"],
            "tensor and pipeline degree of 1",
        ),
        (
            &[
                "parallel.ranks=2",
                "compression.gradients='int8'",
                "compression.error_feedback=true",
                "compression.rounding='stochastic'",
            ],
            "unbiased by itself",
        ),
    ];
    for (sets, expected) in cases {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let error = resolve(&sets).unwrap_err().to_string();
        assert!(error.contains(expected), "{sets:?}: {error}");
    }
}

/// The configuration of a small run on its own text.
fn config(folder: &Path, name: &str, sets: &[&str]) -> Config {
    let text = folder.join("text.txt");
    if !text.exists() {
        std::fs::write(&text, trainyard_testing::text(3000)).unwrap();
    }
    let toml = format!(
        "[run]\nname = '{name}'\ndirectory = '{0}'\n[model]\ndim = 32\nlayers = 2\nheads = 4\n[tokenizer]\nkind = 'bytes'\n\
         [data]\ntrain = '{0}/text.txt'\nvalidation_fraction = 0\n[training]\nsequence_length = 16\nmicro_batch_size = 1\n\
         [schedule]\nkind = 'constant'\nwarmup_steps = 0\n[compute]\nthreads = 1\n[metrics]\ntensorboard = false\n\
         [checkpoint]\nkeep_last = 9\n",
        folder.display()
    );
    let mut all = vec!["training.global_batch_size=4".to_owned()];
    all.extend(sets.iter().map(|set| (*set).to_owned()));
    Config::parse("c.toml".as_ref(), &toml, &all).unwrap()
}

fn run(
    folder: &Path,
    ranks: &Config,
    open: impl Fn(Communicator) -> Result<Session> + Sync,
) -> BTreeMap<String, Vec<u8>> {
    assert_eq!(run_to_the_end(ranks, open).unwrap(), Ending::Complete);
    tensors(&find_latest(folder).unwrap().unwrap().checkpoint)
}

fn start(folder: &Path, name: &str, sets: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let config = config(folder, name, sets);
    run(&folder.join(name), &config, |world| Session::create(&config, world, |_| ()))
}

/// Resumes a copy of the run `from` at `step` with other settings.
fn go_on(folder: &Path, from: &str, name: &str, step: u64, sets: &[&str]) -> BTreeMap<String, Vec<u8>> {
    copy(&folder.join(from), &folder.join(name));
    let run_folder = folder.join(name);
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let going_on = GoingOn { checkpoint: Choice::Step(step), ..GoingOn::new(&run_folder, &sets) };
    let config = Session::configuration(&going_on).unwrap();
    run(&run_folder, &config, |world| Session::resume(&going_on, world, |_| ()))
}

const STEPS: &[&str] = &["training.steps=5", "checkpoint.interval_steps=1"];

/// Residuals, outer momentum, and inside a round the parameters and optimizer state of each
/// replica: a run goes on from any step with the bits of one that was never stopped.
#[test]
fn runs_with_residuals_and_outer_steps_go_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let hybrid: &[&str] = &[
        "parallel.data_parallel_replicate_degree=2",
        "parallel.data_parallel_shard_degree=2",
        "parallel.zero_stage=2",
    ];
    let diloco: &[&str] = &["update.rule='diloco'", "update.every=3", "compression.outer='int4'"];
    let rules: [&[&str]; 6] = [
        &["parallel.ranks=2", "compression.gradients='one_bit'"],
        &["parallel.ranks=2", "parallel.zero_stage=3", "compression.gradients='top_k'"],
        &[hybrid, &["compression.gradients='int4'"]].concat(),
        &[&["parallel.ranks=2"], diloco].concat(),
        &[hybrid, diloco, &["compression.gradients='int4'"]].concat(),
        &["parallel.ranks=2", "update.rule='local'", "update.every=2"],
    ];
    for (number, rule) in rules.into_iter().enumerate() {
        let name = format!("whole-{number}");
        let whole = start(folder, &name, &[STEPS, rule].concat());
        for step in [1, 2, 3, 4] {
            let again = go_on(folder, &name, &format!("{name}-{step}"), step, &[]);
            assert!(again == whole, "{rule:?} from step {step}");
        }
    }
}

/// A run goes on with residuals on other numbers of ranks, and without them when no codec needs
/// any.
#[test]
fn residuals_move_to_other_layouts_and_away() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let two = start(folder, "two", &[STEPS, &["parallel.ranks=2", "compression.gradients='top_k'"]].concat());
    let names = |run: &BTreeMap<String, Vec<u8>>| -> BTreeSet<String> {
        let of = run.keys().filter_map(|name| name.split_once(".residual.").map(|(_, name)| name.to_owned()));
        of.collect()
    };
    let expect = |run: &BTreeMap<String, Vec<u8>>, expected: &[&str]| {
        assert_eq!(names(run), expected.iter().map(|name| (*name).to_owned()).collect());
        for source in expected {
            let mut of_source = run.iter().filter(|(name, _)| name.ends_with(&format!(".residual.{source}")));
            assert!(of_source.any(|(_, bytes)| bytes.iter().any(|byte| *byte != 0)), "{source} left out nothing");
        }
    };
    expect(&two, &["replica.0", "replica.1", "sum"]);
    let auto = ["ranks", "zero_stage", "data_parallel_replicate_degree", "data_parallel_shard_degree"]
        .map(|key| format!("parallel.{key}=auto"));
    let auto: Vec<&str> = auto.iter().map(String::as_str).collect();
    let on = |name: &str, layout: &[&str]| {
        let sets = [&auto[..], layout, &["training.steps=6", "checkpoint.interval_steps=1"]].concat();
        go_on(folder, "two", name, 5, &sets)
    };
    let four = on("four", &["parallel.ranks=4", "parallel.zero_stage=2"]);
    expect(&four, &["rank.0", "rank.1", "rank.2", "rank.3"]);
    let three = on("three", &["parallel.ranks=3", "training.global_batch_size=6"]);
    expect(&three, &["replica.0", "replica.1", "replica.2", "sum"]);
    let none = on("none", &["parallel.ranks=2", "compression.gradients='none'"]);
    expect(&none, &[]);
}
