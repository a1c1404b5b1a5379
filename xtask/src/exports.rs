//! `cargo xtask exports`: checks that settings written by `trainyard plan --export` are accepted
//! by the parsers of the trainers that they are for, and mean the same run when `--from` reads
//! them.
//!
//! The parsers are torchtitan's, DeepSpeed's and Accelerate's own, from PyPI, in an environment
//! under `target/`. Megatron-LM's argument parser is in no package there: name a checkout with
//! `--megatron`. Without one, the values are given to the configuration classes of megatron-core.
//! It downloads some gigabytes, because all of them need PyTorch, and is therefore no part of the
//! tests; those hold the round trips.

use crate::bench::measure::{figure, output};
use crate::bench::{environment, program, target_folder};
use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Arguments of `cargo xtask exports`.
#[derive(Args)]
pub struct Options {
    /// The program. Default: the release build, made first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Python of an environment that has the trainers. Default: one is made under target/.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// A checkout of Megatron-LM, whose argument parser then reads its settings.
    #[arg(long, value_name = "FOLDER")]
    megatron: Option<PathBuf>,
}

/// The packages, with the last torchtitan that reads TOML.
const PACKAGES: [&str; 5] = ["torchtitan==0.2.2", "deepspeed", "accelerate", "transformers", "megatron-core"];
/// Forms that are checked, with the stack that reads each.
const FORMS: [&str; 4] = ["megatron", "torchtitan", "deepspeed", "accelerate"];
/// Plans of each form.
const PLANS: usize = 40;
/// Plans that one request gives.
const SHOWN: usize = 6;

/// Model, cluster, global batch, sequence length, fixed choices.
type Case = (&'static str, &'static str, u64, u64, &'static str);

const CASES: [Case; 14] = [
    ("llama-8b", "1x8xH100", 64, 8192, ""),
    ("gpt2-1.5b", "1x4xA100-80GB", 32, 1024, ""),
    ("llama-1b", "1x8xH100", 64, 4096, "checkpointing=full"),
    ("mixtral-8x7b", "4x8xH100", 128, 4096, ""),
    ("gpt2-1.5b", "1x8xV100-32GB", 64, 1024, "checkpointing=full"),
    ("llama-3b", "1x8xH100", 64, 8192, "offload=true"),
    ("llama-70b", "8x8xH100", 256, 4096, ""),
    ("llama-13b", "4x8xA100-80GB", 128, 2048, "tp=2"),
    ("qwen3-30b-a3b", "4x8xH100", 128, 4096, ""),
    ("llama-1b", "1x8xH100", 64, 4096, "micro_batch=2"),
    ("llama-7b", "2x8xA100-80GB", 64, 2048, "checkpointing=none"),
    ("qwen2.5-0.5b", "1x2xH100", 32, 2048, ""),
    ("llama-3b", "1x8xH100", 32, 8192, "zero=3"),
    ("llama-70b", "16x8xH100", 256, 4096, "checkpointing=full"),
];

/// Checks every form; false if a parser refuses settings or a round trip changes the run.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let program = program(root, options.program.as_deref())?;
    let folder = target_folder(root).join("exports");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let python = options.python.clone().map_or_else(|| environment(&folder.join("venv"), &PACKAGES, "--python"), Ok)?;
    let mut manifest = Vec::new();
    let mut met = true;
    for form in FORMS {
        let (mut written, mut changed) = (0, 0);
        for (number, case) in CASES.iter().enumerate() {
            let missing = PLANS - written;
            if missing == 0 {
                break;
            }
            let entries = export(&program, form, case, number, missing, &folder)?;
            written += entries.len();
            for entry in entries {
                if let Some(difference) = entry["difference"].as_str() {
                    println!("{form} {}: read again it is another run: {difference}", entry["file"]);
                    changed += 1;
                }
                manifest.push(entry);
            }
        }
        println!("{form:<12} {written} plans written; {changed} are another run when they are read again");
        met &= written == PLANS && changed == 0;
    }
    let list = folder.join("manifest.json");
    std::fs::write(&list, serde_json::to_string_pretty(&manifest)?)?;
    let mut command = Command::new(&python);
    command.arg(root.join("scripts/exports/check.py")).arg(&list);
    command.args(&options.megatron);
    let said = output(&mut command, &folder.join("check.log"))?;
    for form in FORMS {
        let accepted = said.lines().filter(|line| line.starts_with(&format!("ok {form} "))).count();
        let by = match (form, &options.megatron) {
            ("megatron", Some(_)) => "the parser of the checkout",
            ("megatron", None) => "the configuration classes of megatron-core",
            _ => "its own parser",
        };
        println!("{form:<12} {accepted} of {PLANS} accepted by {by}");
        met &= accepted == PLANS;
    }
    for line in said.lines().filter(|line| line.starts_with("refused ")) {
        println!("{line}");
    }
    println!(
        "bar: {PLANS} plans x {} trainers accepted, round trips keep the run: {}",
        FORMS.len(),
        if met { "met" } else { "MISSED" }
    );
    Ok(met)
}

/// Writes up to `missing` plans of a case in `form`, and reads each again.
fn export(program: &Path, form: &str, case: &Case, number: usize, missing: usize, folder: &Path) -> Result<Vec<Value>> {
    let (model, cluster, batch, length, fixed) = case;
    let (batch, length) = (batch.to_string(), length.to_string());
    let plan = || {
        let mut command = Command::new(program);
        command.args(["plan", "--model", model, "--cluster", cluster]);
        command.args(["--global-batch", &batch, "--sequence-length", &length]);
        if cluster.contains("V100") {
            command.args(["--precision", "fp16"]);
        }
        command
    };
    let log = folder.join("plan.log");
    let stack = if form == "accelerate" { "fsdp2" } else { form };
    let mut asked = plan();
    asked.args(["--stack", stack, "--top", &SHOWN.to_string()]);
    if !fixed.is_empty() {
        asked.args(["--fix", fixed]);
    }
    let Ok(answer) = output(asked.arg("--json"), &log) else {
        // This trainer cannot run the case; others are tried.
        return Ok(Vec::new());
    };
    let answer: Value = serde_json::from_str(&answer)?;
    let plans = answer["plans"].as_array().context("a list of plans")?;
    let mut entries = Vec::new();
    for (index, wanted) in plans.iter().take(missing).enumerate() {
        let file = folder.join(format!("{form}-{number}-{index}.txt"));
        let mut command = plan();
        command.args([
            "--stack",
            stack,
            "--top",
            &SHOWN.to_string(),
            "--export",
            form,
            "--show",
            &(index + 1).to_string(),
        ]);
        if !fixed.is_empty() {
            command.args(["--fix", fixed]);
        }
        std::fs::write(&file, output(&mut command, &log)?)?;
        let mut again = plan();
        again.args(["--json", "--stack", stack, "--from"]).arg(&file);
        let read: Value = serde_json::from_str(&output(&mut again, &log)?)?;
        let degree = |name: &str| figure(wanted, &format!("/mesh/{name}"));
        let data_parallel = degree("dp_replicate")? * degree("dp_shard")?;
        let model = degree("tp")? * degree("pp")? * degree("cp")?;
        entries.push(json!({
            "file": file,
            "form": form,
            "devices": (data_parallel * model) as u64,
            "data_parallel": data_parallel as u64,
            "micro_batch": wanted["micro_batch_size"],
            "accumulation": wanted["accumulation_steps"],
            "global_batch": batch.parse::<u64>()?,
            "difference": difference(wanted, &read),
        }));
    }
    Ok(entries)
}

/// The first choice that differs between a plan and what was read again.
fn difference(wanted: &Value, read: &Value) -> Option<String> {
    let keys = [
        "mesh",
        "zero_stage",
        "micro_batch_size",
        "accumulation_steps",
        "precision",
        "activation_checkpointing",
        "offload",
        "pipeline_schedule",
    ];
    let found = &read["now"];
    let other = keys.into_iter().find(|key| wanted[key] != found[key])?;
    Some(format!("{other} was {}, and is {}", wanted[other], found[other]))
}
