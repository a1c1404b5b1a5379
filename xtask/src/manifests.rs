//! `cargo xtask manifests`: checks what `trainyard submit` writes for Kubernetes and SkyPilot
//! against the schemas of those systems.
//!
//! The schemas are those of the packages kubernetes-validate, kubeflow-trainer-api (JobSet) and
//! skypilot from PyPI, in an environment under `target/`. To show that a refusal would be seen,
//! each manifest is also checked with a field that no schema has. It downloads some hundred
//! megabytes, and is therefore no part of the tests; those hold the texts.

use crate::bench::measure::output;
use crate::bench::{environment, target_folder};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Arguments of `cargo xtask manifests`.
#[derive(clap::Args)]
pub struct Options {
    /// The program. Default: the debug build, made first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Python of an environment that has the packages. Default: one is made under target/.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
}

const PACKAGES: [&str; 5] = ["kubernetes-validate", "kubeflow-trainer-api", "skypilot", "jsonschema", "pyyaml"];

/// Names and options of what is submitted.
const CASES: [(&str, &str); 8] = [
    ("one", "--to kubernetes --image i:1 --claim runs"),
    ("hosts", "--to kubernetes --image i:1 --claim runs --nodes 4 --ranks-per-node 2 --memory 64Gi"),
    ("kueue", "--to kubernetes --image i:1 --claim runs --nodes 2 --kueue night --namespace lab --max-restarts 0"),
    ("gpus", "--to kubernetes --image i:1 --claim runs --nodes 2 --gpus-per-node 8 --gpu NVIDIA-H100-80GB-HBM3"),
    ("sky", "--to skypilot"),
    ("sky-hosts", "--to skypilot --nodes 4 --ranks-per-node 2 --memory 64G --bucket s3://runs"),
    ("sky-spot", "--to skypilot --gpus-per-node 8 --gpu H100 --spot --bucket gs://runs --max-restarts 0"),
    ("sky-setup", "--to skypilot --nodes 2 --setup true --set training.seed=3"),
];

/// Documents of all cases: three for Kubernetes, one for SkyPilot.
const DOCUMENTS: usize = 4 * 3 + 4;

/// Checks all; false if a schema refuses one, or does not notice a field that it has not.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let program = crate::slurm::program(root, options.program.as_deref())?;
    let folder = target_folder(root).join("manifests");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let python = options.python.clone().map_or_else(|| environment(&folder.join("venv"), &PACKAGES, "--python"), Ok)?;
    std::fs::write(folder.join("text.txt"), "to be or not to be, that is the question. ".repeat(200))?;
    std::fs::write(folder.join("c.toml"), crate::slurm::config("manifests", 9))?;
    let (mut files, mut spoilt) = (Vec::new(), Vec::new());
    for (name, words) in CASES {
        let mut command = Command::new(&program);
        command.args(["submit", "c.toml", "--dry-run", "--cpus-per-rank", "4"]).args(words.split(' '));
        let text = output(command.current_dir(&folder), &folder.join("submit.log"))?;
        let file = folder.join(format!("{name}.yaml"));
        std::fs::write(&file, &text)?;
        files.push(file);
        let bad = folder.join(format!("{name}.spoilt.yaml"));
        let with_more = text.replace("      backoffLimit: 0\n", "      backoffLimit: 0\n          backofLimit: 0\n");
        let with_more = with_more.replace("num_nodes:", "nodes_of_it: 1\nnum_nodes:");
        std::fs::write(&bad, with_more)?;
        spoilt.push(bad);
    }
    let checked = |files: &[PathBuf]| -> Result<(usize, usize)> {
        let mut command = Command::new(&python);
        command.arg(root.join("scripts/manifests/check.py")).args(files);
        let said = output(&mut command, &folder.join("check.log"))?;
        said.lines().filter(|line| line.starts_with("refused ")).for_each(|line| println!("{line}"));
        let count = |word: &str| said.lines().filter(|line| line.starts_with(word)).count();
        Ok((count("ok "), count("refused ")))
    };
    let (accepted, refused) = checked(&files)?;
    println!("{accepted} of {DOCUMENTS} documents accepted by their schemas, {refused} refused");
    println!("with a field that no schema has:");
    let (_, noticed) = checked(&spoilt)?;
    let is_met = accepted == DOCUMENTS && noticed == CASES.len();
    println!(
        "noticed in {noticed} of {} manifests; bar: all of both: {}",
        CASES.len(),
        if is_met { "met" } else { "MISSED" }
    );
    Ok(is_met)
}
