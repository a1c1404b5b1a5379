//! `cargo xtask advise`: checks that `trainyard advise` predicts gains well. For six configurations
//! the first three levers that can be run are run, in turn with the configuration itself.
//!
//! `trainyard advise c.toml --trial-seconds` does both, so a user sees the same comparison. The
//! bar: each measured gain is within 15 % of the predicted one, as factors of tokens per second. It
//! needs a profile of the machine (`trainyard calibrate`), and nothing else may run meanwhile.

use crate::bench::measure::{figure, output};
use crate::bench::program;
use anyhow::{Context, Result};
use clap::Args;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Arguments of `cargo xtask advise`.
#[derive(Args)]
pub struct Options {
    /// Only the configurations from this number, counted from 1.
    #[arg(long, default_value_t = 1)]
    from: usize,
    /// And up to this one.
    #[arg(long, default_value_t = usize::MAX)]
    to: usize,
    /// Seconds of trials of each configuration.
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// The program. Default: the release build, made first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Largest error of a predicted factor of speed.
const BAR: f64 = 0.15;

/// Family, width, blocks, heads, sequence, micro-batch, accumulation, dtype, and more keys.
type Case = (&'static str, u32, u32, u32, u32, u32, u32, &'static str, &'static str);

const CASES: [Case; 6] = [
    ("llama", 256, 4, 4, 256, 2, 4, "f32", ""),
    ("gpt2", 384, 4, 6, 128, 1, 8, "bf16", ""),
    ("llama", 384, 6, 6, 256, 4, 2, "bf16", "[activation_checkpointing]\nmode = \"full\"\n"),
    ("gpt2", 256, 6, 4, 512, 2, 2, "f32", "[activation_checkpointing]\nmode = \"selective\"\n"),
    ("llama", 256, 4, 4, 128, 2, 4, "bf16", "[parallel]\nranks = 2\nzero_stage = 3\n"),
    ("gpt2", 512, 3, 8, 128, 1, 4, "f32", "[parallel]\nranks = 2\ndata_parallel_replicate_degree = 2\n"),
];

/// Tries levers of every case; false if a gain misses the bar.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let program = program(root, options.program.as_deref())?;
    let program = std::path::absolute(&program).with_context(|| format!("cannot resolve {}", program.display()))?;
    let folder = std::env::temp_dir().join(format!("trainyard-advise-{}", std::process::id()));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    std::fs::write(folder.join("text.txt"), "the step is a program of ranks and lanes. ".repeat(5000))?;
    println!("| configuration | lever | predicted | measured | error |\n|---|---|---|---|---|");
    let (mut met, mut tried) = (0, 0);
    let chosen = (1..).zip(CASES).filter(|(number, _)| (options.from..=options.to).contains(number));
    for (number, case) in chosen {
        for error in judge(number, case, &program, &folder, options)? {
            tried += 1;
            met += usize::from(error.abs() <= BAR);
        }
    }
    std::fs::remove_dir_all(&folder)?;
    println!("\n{met} of {tried} gains are within {:.0} % of the predicted ones", 100.0 * BAR);
    Ok(met == tried)
}

/// Prints the tried levers of a case and returns the errors of their predicted factors.
fn judge(number: usize, case: Case, program: &Path, folder: &Path, options: &Options) -> Result<Vec<f64>> {
    let config = folder.join(format!("case-{number}.toml"));
    std::fs::write(&config, configuration(case))?;
    let mut command = Command::new(program);
    command.current_dir(folder).arg("advise").arg(&config).arg("--json");
    command.arg("--trial-seconds").arg(options.seconds.to_string());
    let answer: Value = serde_json::from_str(&output(&mut command, &config.with_extension("log"))?)
        .context("`trainyard advise` printed no JSON")?;
    let levers = answer["levers"].as_array().context("a list of levers")?;
    let mut errors = Vec::new();
    for lever in levers.iter().filter(|lever| lever["tried_speed"].is_number()) {
        let (predicted, measured) = (figure(lever, "/speed")?, figure(lever, "/tried_speed")?);
        let error = predicted / measured - 1.0;
        println!(
            "| {} | {}: {} | {:.2} x | {:.2} x | {:+.1} % |",
            words(case),
            lever["lever"].as_str().unwrap_or_default(),
            lever["change"].as_str().unwrap_or_default(),
            predicted,
            measured,
            100.0 * error
        );
        errors.push(error);
    }
    Ok(errors)
}

fn words(case: Case) -> String {
    let (family, dim, layers, _, sequence, micro, steps, dtype, more) = case;
    let more: Vec<&str> = more.lines().filter(|line| !line.starts_with('[')).collect();
    let more = if more.is_empty() { String::new() } else { format!(", {}", more.join(", ")) };
    format!("{family} {dim} x {layers}, {micro} x {steps} x {sequence}, {dtype}{more}")
}

fn configuration(case: Case) -> String {
    let (family, dim, layers, heads, sequence, micro, steps, dtype, more) = case;
    format!(
        "[model]\nfamily = \"{family}\"\ndim = {dim}\nlayers = {layers}\nheads = {heads}\nvocab_size = 2048\n\
         max_sequence_length = {sequence}\n[tokenizer]\nkind = \"bytes\"\n[data]\ntrain = [\"text.txt\"]\n[training]\nsteps = 100\n\
         micro_batch_size = {micro}\naccumulation_steps = {steps}\nsequence_length = {sequence}\n[precision]\ncompute = \"{dtype}\"\n{more}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_are_toml_with_heads_that_divide_the_width() {
        for case in CASES {
            let text = configuration(case);
            let parsed: toml::Table = toml::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert_eq!(parsed["model"]["dim"].as_integer(), Some(i64::from(case.1)));
            assert!(case.1 % case.3 == 0, "{}", words(case));
        }
    }
}
