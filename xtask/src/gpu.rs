//! `cargo xtask gpu`: runs everything that needs a GPU in one command of some minutes, so that half
//! an hour of access is enough to learn everything.
//!
//! It describes the machine, then runs three parts, each whatever the result of the others:
//!
//! 1. conformance: every kernel against the oracles in f64, every operation and training itself
//!    against the CPU;
//! 2. accuracy: logits and gradients against transformers, a loss curve in bf16 against the CPU's;
//! 3. bars: whole steps, attention, products and streaming kernels, in percent of the measured
//!    peaks and beside PyTorch if there is one.
//!
//! The first two are the suites of `cargo test`, which an environment variable sends to the GPU.
//! With `--emulated` they run as in `cargo test`, so that this chore can be tested without a GPU.
//! On a machine without cargo they come from a folder that `--pack` has filled elsewhere. A missed
//! bar is reported but is no failure; a wrong result is one. Without a GPU the chore gives the
//! reason and passes.

mod bars;
mod compile;
mod machine;
mod python;
mod suites;

pub use compile::compiles;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde_json::json;
use trainyard_cuda::nvidia::Nvidia;

use crate::bench::target_folder;
use machine::Machine;
use suites::{Executables, Part};

#[derive(Args)]
pub struct Options {
    /// Compile every kernel for every architecture and list registers and spills; needs no GPU.
    #[arg(long)]
    compile: bool,
    /// Run one part alone.
    #[arg(long, value_name = "PART", conflicts_with = "compile")]
    only: Option<Only>,
    /// Also write the results here, as JSON, in addition to target/bench/gpu.json.
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Number of pairs of runs, ours and PyTorch's in turn; medians are compared.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pairs: u16,
    /// Build everything that the chore runs into a folder and stop. The folder can be carried to a
    /// machine without cargo: run FOLDER/xtask gpu --prebuilt FOLDER there, in the root of the
    /// sources.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["compile", "prebuilt", "emulated"])]
    pack: Option<PathBuf>,
    /// Take the executables from a folder that --pack has filled.
    #[arg(long, value_name = "FOLDER", conflicts_with = "compile")]
    prebuilt: Option<PathBuf>,
    /// Run the suites on emulated kernels, and the bars with tiny sizes: a test of this chore that
    /// needs no GPU and measures nothing.
    #[arg(long, conflicts_with = "compile")]
    emulated: bool,
}

/// The values of `--only`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Only {
    /// Results of kernels, operations and training.
    Conformance,
    /// The comparison with transformers, and a loss curve.
    Accuracy,
    /// Speed and memory.
    Bars,
}

pub fn run(root: &Path, options: &Options) -> Result<bool> {
    if options.compile {
        return compile::run(root, options.json.as_deref());
    }
    // The executable may have been carried here from the machine that built it.
    let here = std::env::current_dir().context("there is no current folder")?;
    let root = if options.prebuilt.is_some() { here.as_path() } else { root };
    if let Some(folder) = &options.pack {
        return suites::pack(root, folder).map(|()| true);
    }
    let gpu = match Nvidia::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) if !options.emulated => {
            println!("no GPU: {error}");
            return Ok(true);
        }
        Err(_) => None,
    };
    let machine = Machine::of(gpu.as_ref());
    print!("{machine}");
    if let Some(gpu) = gpu.as_ref().filter(|_| !options.emulated) {
        let compiled = gpu.precompile()?;
        println!("kernels  {compiled} modules compiled for {}", machine.architecture());
    }
    let executables = Executables::find(root, options.prebuilt.as_deref())?;
    let folder = target_folder(root).join("bench");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let files: Vec<PathBuf> = [folder.join("gpu.json")].into_iter().chain(options.json.clone()).collect();
    let mut found = json!({"machine": machine, "emulated": options.emulated});
    let mut text = format!("{}\n", machine.words());
    let mut right = true;
    for (only, part) in
        [(Only::Conformance, Part::Conformance), (Only::Accuracy, Part::Accuracy), (Only::Bars, Part::Bars)]
    {
        if options.only.is_some_and(|chosen| chosen != only) {
            continue;
        }
        if part == Part::Bars && !options.emulated {
            let bars = bars::run(root, &executables, machine.python.as_ref(), usize::from(options.pairs));
            // A bar that could not be measured had a wrong result or failed; the text says which.
            right &= bars.failures.is_empty();
            text += &format!("\n{}", bars.text());
            found[part.name()] = json!(bars);
        } else {
            let outcomes = suites::run(root, &executables, part, options.emulated);
            right &= outcomes.iter().all(suites::Outcome::is_right);
            text += &format!("\n{}", suites::table(part, &outcomes));
            found[part.name()] = json!(outcomes);
        }
        found["right"] = right.into();
        // Written after each part: a borrowed machine may be taken away before the last one ends.
        for path in &files {
            std::fs::write(path, format!("{found:#}\n")).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    println!("\n{text}");
    files.iter().for_each(|path| println!("wrote {}", path.display()));
    if !right {
        println!("NOT RIGHT on this machine: see above");
    }
    Ok(right)
}
