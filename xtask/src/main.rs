//! Every chore of the project: `cargo xtask test | tidy | advise | bench | choices | churn |
//! dashboard | equality | exports | gpu | manifests | objects | overhead | overlap | perfetto |
//! pictures | slow-links | slurm | soak | traces | validate | verdicts | wheel`.
//!
//! A chore is a Rust function here rather than a shell script, so that it runs where cargo runs and
//! is compiled, formatted and linted with the rest. `test` is what continuous integration calls
//! (`.ci/run`); `tidy` holds the rules of the house that no compiler checks; `bench` measures the
//! program against its peers and writes what it found. Nothing here is needed to build or to use
//! Trainyard.

mod advise;
mod bench;
mod cable;
mod choices;
mod churn;
mod dashboard;
mod equality;
mod exports;
mod gpu;
mod lexer;
mod manifests;
mod markdown;
mod objects;
mod overhead;
mod overlap;
mod perfetto;
mod pictures;
mod slow_links;
mod slurm;
mod soak;
mod test;
mod tidy;
mod traces;
mod validate;
mod verdicts;
mod wheel;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Every chore of the project.")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Run everything that must hold: tidy, rustfmt, clippy, unit, integration and documentation
    /// tests.
    Test(test::Options),
    /// Check the rules that no compiler checks: module essays, file length, unsafe code, crate
    /// arrows, dependencies, links.
    Tidy,
    /// Measure the release build against its bars and peers; prints a table and writes
    /// target/bench/NAME.json.
    Bench(bench::Options),
    /// Measure what a run's record and the watchers of its dashboard take from a step.
    Overhead(overhead::Options),
    /// Measure how much communication over a slow link hides behind computing: two network
    /// namespaces, MPI over TCP.
    Overlap(overlap::Options),
    /// Run the first levers that `trainyard advise` names for six configurations, and compare their
    /// gains with the predicted ones.
    Advise(advise::Options),
    /// Train every runnable way of small models and compare the fastest with what `--plan auto`
    /// picks.
    Choices(choices::Options),
    /// Let hosts come, leave and die while a run lasts, and compare it with an undisturbed one.
    Churn(churn::Options),
    /// Click through the dashboard of a live run in a headless Chromium, and hold its bars: first
    /// paint, zoom, spikes, many runs, many watchers.
    Dashboard(dashboard::Options),
    /// Train small models on every layout, compare them with one rank, and write the tables of
    /// docs/equality.md.
    Equality(equality::Options),
    /// Give exported settings to the parsers of the trainers that they are for, from PyPI, and read
    /// them again.
    Exports(exports::Options),
    /// Everything that needs a GPU: conformance, accuracy, speed; with --compile every kernel by
    /// NVRTC, without one.
    Gpu(gpu::Options),
    /// Check what `trainyard submit` writes for Kubernetes and SkyPilot against their schemas, from
    /// PyPI.
    Manifests(manifests::Options),
    /// Read text of every format from a real S3 server, moto's, and compare its tokens with those
    /// of files.
    Objects(objects::Options),
    /// Give a trace to Perfetto's own trace processor, from PyPI, and compare what its SQL says of
    /// it.
    Perfetto(perfetto::Options),
    /// Draw the pictures of the documentation from what the code computes.
    Pictures(pictures::Options),
    /// Train over a slow cable between two network namespaces by every way of sending less, with
    /// PyTorch beside it.
    SlowLinks(slow_links::Options),
    /// Submit runs to a real Slurm of two nodes on this machine, with a time limit that is too
    /// short: they are requeued and end with the same weights.
    Slurm(slurm::Options),
    /// Train half a million tiny steps on one rank and on rank threads, and hold the growth of
    /// resident memory to its bar.
    Soak(soak::Options),
    /// Compare what `doctor` says of traces of PyTorch's profiler with HolisticTraceAnalysis:
    /// figures, time, memory.
    Traces(traces::Options),
    /// Compare the simulator with published measurements: a table per source, the error of every
    /// row, the bars.
    Validate(validate::Options),
    /// Plant causes of lost time whose verdict is known, count how often `trainyard doctor` is
    /// right, and write the tables of docs/finding-bottlenecks.md.
    Verdicts(verdicts::Options),
    /// Build the wheel for Python, install it into an empty environment, and test it there.
    Wheel(wheel::Options),
}

fn main() -> ExitCode {
    let root = workspace_root();
    let outcome = match Arguments::parse().chore {
        Chore::Test(options) => test::run(&root, &options),
        Chore::Tidy => tidy::run(&root),
        Chore::Bench(options) => bench::run(&root, &options),
        Chore::Overhead(options) => overhead::run(&root, &options),
        Chore::Overlap(options) => overlap::run(&root, &options),
        Chore::Advise(options) => advise::run(&root, &options),
        Chore::Choices(options) => choices::run(&root, &options),
        Chore::Churn(options) => churn::run(&root, &options),
        Chore::Dashboard(options) => dashboard::run(&root, &options),
        Chore::Equality(options) => equality::run(&root, &options),
        Chore::Exports(options) => exports::run(&root, &options),
        Chore::Gpu(options) => gpu::run(&root, &options),
        Chore::Manifests(options) => manifests::run(&root, &options),
        Chore::Objects(options) => objects::run(&root, &options),
        Chore::Perfetto(options) => perfetto::run(&root, &options),
        Chore::Pictures(options) => pictures::run(&root, &options),
        Chore::SlowLinks(options) => slow_links::run(&root, &options),
        Chore::Slurm(options) => slurm::run(&root, &options),
        Chore::Soak(options) => soak::run(&root, &options),
        Chore::Traces(options) => traces::run(&root, &options),
        Chore::Validate(options) => validate::run(&options),
        Chore::Verdicts(options) => verdicts::run(&root, &options),
        Chore::Wheel(options) => wheel::run(&root, &options),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The folder with the workspace's `Cargo.toml`, which is the parent of this crate's folder.
fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies inside the workspace").to_path_buf()
}
