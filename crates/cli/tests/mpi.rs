//! Ranks that are MPI processes: the program under `mpirun`, from the command line to the last
//! checkpoint.
//!
//! Ignored unless the program is built with the feature `mpi`; `cargo xtask test` does that where
//! it finds an MPI. The flags are Open MPI's.

mod common;
mod mpirun;

use common::{Folder, Ran, tensors};
use mpirun::Mpirun;
use std::fs;

/// Steps of a run here: enough for three checkpoints.
const STEPS: &str = "training.steps=6";

/// Cases: a name (model, precision, layout of two or four ranks) and the settings.
const CASES: [(&str, &[&str]); 12] = [
    ("llama-bf16-ddp", &["parallel.ranks=2", "precision.compute='bf16'"]),
    ("llama-f32-zero-1", &["parallel.ranks=2", "parallel.zero_stage=1", "activation_checkpointing.mode='full'"]),
    (
        "gpt2-bf16-zero-2",
        &["parallel.ranks=2", "parallel.zero_stage=2", "model.family='gpt2'", "precision.compute='bf16'"],
    ),
    (
        "mixtral-f32-experts",
        &["parallel.ranks=2", "model.family='mixtral'", "experts.count=4", "parallel.expert_parallel_degree=2"],
    ),
    (
        "dots1-f32-experts-and-columns",
        &[
            "parallel.ranks=4",
            "model.family='dots1'",
            "experts.count=4",
            "experts.dense_layers=1",
            "parallel.expert_parallel_degree=2",
            "parallel.tensor_parallel_degree=2",
        ],
    ),
    ("gpt2-f32-zero-3", &["parallel.ranks=2", "parallel.zero_stage=3", "model.family='gpt2'"]),
    ("gpt2-f32-ddp", &["parallel.ranks=4", "model.family='gpt2'", "activation_checkpointing.mode='selective'"]),
    ("llama-bf16-zero-3", &["parallel.ranks=4", "parallel.zero_stage=3", "precision.compute='bf16'"]),
    ("llama-f32-hybrid", &["parallel.ranks=4", "parallel.zero_stage=3", "parallel.data_parallel_replicate_degree=2"]),
    (
        "gpt2-bf16-hybrid",
        &[
            "parallel.ranks=4",
            "parallel.zero_stage=2",
            "parallel.data_parallel_replicate_degree=2",
            "model.family='gpt2'",
            "precision.compute='bf16'",
            "parallel.reduce_schedule='micro_batch'",
        ],
    ),
    ("llama-f32-tensor", &["parallel.ranks=2", "parallel.tensor_parallel_degree=2", "model.tie_embeddings=true"]),
    (
        "gpt2-bf16-pipeline",
        &[
            "parallel.ranks=4",
            "parallel.zero_stage=3",
            "parallel.pipeline_parallel_degree=2",
            "parallel.pipeline_schedule='zero_bubble'",
            "model.family='gpt2'",
            "precision.compute='bf16'",
        ],
    ),
];

/// `train tiny.toml` as the run `name` with `sets`.
fn train(name: &str, sets: &[&str]) -> Vec<String> {
    let name = format!("run.name='{name}'");
    let batch = ["training.micro_batch_size=2", "training.accumulation_steps=2", "checkpoint.interval_steps=2"];
    let sets = [&[name.as_str(), STEPS], &batch[..], sets].concat();
    let sets = sets.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]);
    ["train".to_owned(), "tiny.toml".to_owned()].into_iter().chain(sets).collect()
}

fn ranks(sets: &[&str]) -> usize {
    let digit = sets.iter().find_map(|set| set.strip_prefix("parallel.ranks="));
    digit.expect("every case says how many").parse().expect("a number")
}

/// Runs with ranks that are threads.
fn on_threads(folder: &Folder, arguments: &[String]) -> Ran {
    folder.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The records of a run's steps, without the values that depend on a clock.
fn losses(folder: &Folder, run: &str) -> Vec<[serde_json::Value; 4]> {
    let text = fs::read_to_string(folder.join(&format!("runs/{run}/metrics.jsonl"))).expect("metrics");
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a line of JSON"));
    lines.map(|line| ["step", "loss", "grad_norm", "tokens"].map(|key| line[key].clone())).collect()
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn processes_over_mpi_are_measured_and_their_runs_predicted() {
    let folder = Folder::new();
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    // The path at which both commands find the profile.
    Mpirun::new(&folder, 2).run(&words("calibrate --quick --out processes.toml")).ok();
    let profile = std::fs::read_to_string(folder.join("processes.toml")).unwrap();
    assert!(profile.contains("[machine.processes]\nbackend = \"mpi\"\ncount = 2\nhosts = 1\n"));
    let mut command = Mpirun::new(&folder, 2).command(&words("train tiny.toml --verbose --set training.steps=3"));
    let trained = command.env("TRAINYARD_PROCESSES_PROFILE", folder.join("processes.toml")).output();
    let trained = Ran::new(trained.expect("mpirun can be started")).ok();
    assert!(trained.stdout.contains("time by kind       measured   predicted"), "{}", trained.stdout);
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn processes_train_the_bits_of_threads() {
    let folder = Folder::new();
    for (name, sets) in CASES {
        let threads = format!("{name}-threads");
        on_threads(&folder, &train(&threads, sets)).ok();
        let ran = Mpirun::new(&folder, ranks(sets)).run(&train(name, sets)).ok();
        assert!(
            tensors(&folder.join(&format!("runs/{name}"))) == tensors(&folder.join(&format!("runs/{threads}"))),
            "{name}: the tensors differ"
        );
        let recorded = losses(&folder, name);
        assert_eq!((recorded.len(), &recorded), (6, &losses(&folder, &threads)), "{name}");
        // Only rank 0 prints. mpirun also inserts its tags within a line, where one of its buffers
        // ended.
        let stdout = ran.stdout.replace("[1,0]<stdout>:", "");
        for said in ["done: 6 steps", "run folder", "layout  "] {
            let times = stdout.matches(said).count();
            let expected = if said == "run folder" { 2 } else { 1 };
            assert_eq!(times, expected, "{name}: {said}: {}", ran.stdout);
        }
        let others = ran
            .stderr
            .lines()
            .chain(ran.stdout.lines())
            .filter(|line| line.starts_with("[1,") && !line.starts_with("[1,0]"));
        assert_eq!(others.collect::<Vec<_>>(), Vec::<&str>::new(), "{name}");
    }
    // Each case left its two runs; the prepared data is one more entry.
    assert_eq!(fs::read_dir(folder.join("runs")).expect("runs").count(), 2 * CASES.len() + 1);
}

/// A run begins with threads, resumes with processes and ends with threads; and the other way
/// round.
#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn runs_go_on_from_threads_to_processes_and_back() {
    let folder = Folder::new();
    for (name, sets) in [
        ("replicated", &["parallel.ranks=2", "parallel.zero_stage=1"][..]),
        ("sharded", &["parallel.ranks=2", "parallel.zero_stage=3", "model.family='gpt2'", "precision.compute='bf16'"]),
    ] {
        let whole = format!("{name}-whole");
        on_threads(&folder, &train(&whole, sets)).ok();
        for threads_first in [true, false] {
            let run = format!("{name}-{}", if threads_first { "threads" } else { "processes" });
            let mut on_threads_now = threads_first;
            // Two runs end by faults after step 4, whose snapshot waits until the checkpoint of
            // step 2 is written. The third ends by itself.
            let fault = |rank| format!("kill rank={rank} step=5 instruction=5");
            for (sitting, fault) in [fault(1), fault(0), String::new()].iter().enumerate() {
                let arguments = match sitting {
                    0 => train(&run, sets),
                    _ => vec!["train".to_owned(), "--resume".to_owned(), format!("runs/{run}")],
                };
                let ran = if on_threads_now {
                    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                    Ran::new(
                        folder.command(&arguments).env("TRAINYARD_FAULTS", fault).output().expect("the program starts"),
                    )
                } else {
                    Mpirun::new(&folder, 2).faults(fault).run(&arguments)
                };
                // mpirun always ends with 0, see `Mpirun::launcher`.
                let expected = if on_threads_now && !fault.is_empty() { 70 } else { 0 };
                assert_eq!(ran.code, Some(expected), "{run} {sitting}: {}", ran.stderr);
                assert_eq!(ran.stdout.contains("done: 6 steps"), fault.is_empty(), "{run} {sitting}: {}", ran.stderr);
                if sitting > 0 {
                    assert!(ran.stderr.contains("resumed at step "), "{run} {sitting}: {}", ran.stderr);
                }
                on_threads_now = !on_threads_now;
            }
            assert!(
                tensors(&folder.join(&format!("runs/{run}"))) == tensors(&folder.join(&format!("runs/{whole}"))),
                "{run}: the tensors differ"
            );
        }
    }
}
