//! `cargo xtask choices`: checks that `--plan auto` picks well. It trains every runnable candidate
//! of small models and limits of memory for a few steps.
//!
//! The candidates, their predictions and the pick come from
//! `trainyard plan c.toml --json --trial-seconds 20`. Each candidate is trained with the settings
//! listed there, so the measured run is the one that would run. A machine's speed drifts, and only
//! downward from its best. The pick, the one that prediction alone would pick, and the fastest few
//! are therefore trained again in turn, and the best of those rounds are compared. The bar: the
//! pick is within 5 % of the fastest. It needs a profile of the machine (`trainyard calibrate`).

use crate::bench::measure::{figure, output, records};
use crate::bench::program;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Arguments of `cargo xtask choices`.
#[derive(Args)]
pub struct Options {
    /// Only the configurations from this number, counted from 1.
    #[arg(long, default_value_t = 1)]
    from: usize,
    /// And up to this one.
    #[arg(long, default_value_t = usize::MAX)]
    to: usize,
    /// Steps of each training; the first does not count.
    #[arg(long, default_value_t = 7)]
    steps: u32,
    /// Rounds in which the pick and the fastest few are trained in turn.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds for which the most promising candidates are tried before one is picked; 0:
    /// prediction alone picks.
    #[arg(long, default_value_t = 20.0)]
    trial_seconds: f64,
    /// The program. Default: the release build, made first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Largest slowdown of the pick against the fastest.
const BAR: f64 = 0.05;
/// Number of candidates that are trained again in turn, beside the picks.
const FINALISTS: usize = 3;

/// Family, width, blocks, heads, sequence, global batch, dtype, and the limit of memory as a
/// position between the needs of the leanest candidate (0) and of the fastest; 1: no limit.
type Case = (&'static str, u32, u32, u32, u32, u32, &'static str, f64);

const CASES: [Case; 12] = [
    ("gpt2", 128, 4, 4, 128, 8, "f32", 1.0),
    ("llama", 192, 4, 6, 128, 8, "bf16", 1.0),
    ("gpt2", 256, 4, 4, 256, 4, "bf16", 1.0),
    ("llama", 384, 2, 6, 128, 8, "f32", 1.0),
    ("gpt2", 384, 6, 6, 64, 16, "bf16", 1.0),
    ("llama", 512, 3, 8, 128, 8, "bf16", 1.0),
    ("gpt2", 128, 4, 4, 256, 8, "f32", 0.7),
    ("llama", 192, 6, 6, 256, 8, "bf16", 0.6),
    ("gpt2", 256, 6, 4, 128, 16, "bf16", 0.7),
    ("llama", 256, 4, 8, 256, 8, "f32", 0.8),
    ("gpt2", 384, 4, 6, 128, 8, "f32", 0.6),
    ("llama", 512, 2, 8, 256, 4, "bf16", 0.8),
];

/// One candidate, predicted and measured.
struct Way {
    words: String,
    sets: Vec<String>,
    predicted_s: f64,
    measured_s: Vec<f64>,
}

impl Way {
    /// The best of its rounds, each of which is a median of steps.
    fn best(&self) -> f64 {
        self.measured_s.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// Trains every candidate of every case; false if a pick misses the bar.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    // Both commands run in the folder of the text, because paths in a configuration are relative to
    // the working folder.
    let program = program(root, options.program.as_deref())?;
    let program = std::path::absolute(&program).with_context(|| format!("cannot resolve {}", program.display()))?;
    let folder = std::env::temp_dir().join(format!("trainyard-choices-{}", std::process::id()));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    std::fs::write(folder.join("text.txt"), text())?;
    println!(
        "configuration                              limit  ways | picked: predicted  measured | fastest  the pick loses  by prediction alone"
    );
    let mut met = true;
    let chosen = (1..).zip(CASES).filter(|(number, _)| (options.from..=options.to).contains(number));
    for (number, case) in chosen {
        met &= judge(number, case, &program, &folder, options)?;
    }
    std::fs::remove_dir_all(&folder)?;
    println!(
        "bar: the pick is at most {:.0} % slower than the fastest: {}",
        100.0 * BAR,
        if met { "met" } else { "MISSED" }
    );
    Ok(met)
}

fn judge(number: usize, case: Case, program: &Path, folder: &Path, options: &Options) -> Result<bool> {
    let (family, dim, layers, _, sequence, batch, dtype, share) = case;
    let name = format!("{family} {dim}x{layers} {batch}x{sequence} {dtype}");
    let config = folder.join(format!("case-{number}.toml"));
    std::fs::write(&config, configuration(case, options.steps, None))?;
    let mut limit = None;
    if share < 1.0 {
        let free = plans(program, &config, 0.0)?;
        let plans = free["plans"].as_array().context("a list of plans")?;
        let needs = plans.iter().map(|plan| figure(plan, "/memory_bytes")).collect::<Result<Vec<f64>>>()?;
        let fastest = *needs.first().with_context(|| format!("{name}: nothing fits"))?;
        let leanest = needs.iter().copied().fold(fastest, f64::min);
        limit = Some((leanest + share * (fastest - leanest)) as u64).map(|bytes| bytes.div_ceil(1 << 20));
        std::fs::write(&config, configuration(case, options.steps, limit))?;
    }
    let answer = plans(program, &config, options.trial_seconds)?;
    let mut ways =
        answer["plans"].as_array().context("a list of plans")?.iter().map(way).collect::<Result<Vec<Way>>>()?;
    if ways.is_empty() {
        bail!("{name}: nothing fits");
    }
    for way in &mut ways {
        way.measured_s.push(train(program, &config, &way.sets)?);
    }
    let count = ways.len();
    // The pick stays first, followed by the pick of prediction alone if that is another. The
    // fastest few of the others come next.
    let predicted =
        (0..count).min_by(|a, b| ways[*a].predicted_s.total_cmp(&ways[*b].predicted_s)).expect("there are ways");
    let mut picks = 1;
    if predicted > 0 {
        let way = ways.remove(predicted);
        ways.insert(1, way);
        picks = 2;
    }
    ways[picks..].sort_by(|a, b| a.best().total_cmp(&b.best()));
    ways.truncate(picks + FINALISTS);
    for way in &mut ways {
        way.measured_s.clear();
    }
    for _ in 0..options.rounds {
        for way in &mut ways {
            way.measured_s.push(train(program, &config, &way.sets)?);
        }
    }
    let pick = &ways[0];
    let fastest = ways.iter().min_by(|a, b| a.best().total_cmp(&b.best())).context("ways are left")?;
    let loss = pick.best() / fastest.best() - 1.0;
    let by_prediction = ways[picks - 1].best() / fastest.best() - 1.0;
    println!(
        "{number:2} {name:38} {:>7}  {count:3} | {:8.2} ms {:8.2} ms | {:8.2} ms  {:4.1} %   {:4.1} %  {}{}",
        limit.map_or("none".to_owned(), |mib| format!("{mib} MiB")),
        1e3 * pick.predicted_s,
        1e3 * pick.best(),
        1e3 * fastest.best(),
        100.0 * loss,
        100.0 * by_prediction,
        pick.words,
        if loss > 0.0 {
            format!("; fastest: {} ({:.2} ms predicted)", fastest.words, 1e3 * fastest.predicted_s)
        } else {
            String::new()
        },
    );
    Ok(loss <= BAR)
}

fn way(plan: &Value) -> Result<Way> {
    let word = |key: &str| plan[key].as_str().unwrap_or_default().to_owned();
    let sets =
        plan["sets"].as_array().context("settings")?.iter().filter_map(Value::as_str).map(str::to_owned).collect();
    let (micro, steps) = (&plan["micro_batch_size"], &plan["accumulation_steps"]);
    Ok(Way {
        words: format!("{}, {micro} x {steps}, {}", word("layout"), word("recomputation")),
        sets,
        predicted_s: figure(plan, "/step_s")?,
        measured_s: Vec::new(),
    })
}

fn plans(program: &Path, config: &Path, trial_seconds: f64) -> Result<Value> {
    let mut command = Command::new(program);
    command.current_dir(config.parent().context("a folder")?).arg("plan").arg(config).arg("--json");
    command.arg("--trial-seconds").arg(trial_seconds.to_string());
    let log = config.with_extension("log");
    serde_json::from_str(&output(&mut command, &log)?).with_context(|| {
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        format!("`trainyard plan` printed no JSON: {said}")
    })
}

/// Median seconds of a step, without the first.
fn train(program: &Path, config: &Path, sets: &[String]) -> Result<f64> {
    let folder = config.parent().context("a folder")?;
    let runs = folder.join("runs");
    if runs.exists() {
        std::fs::remove_dir_all(&runs)?;
    }
    let mut command = Command::new(program);
    command.current_dir(folder).arg("train").arg(config);
    for set in sets {
        command.arg("--set").arg(set);
    }
    output(&mut command, &config.with_extension("log"))?;
    let steps = records(&runs.join("run/metrics.jsonl"))?;
    let mut seconds = steps[1..].iter().map(|step| figure(step, "/step_s")).collect::<Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().context("no steps")
}

fn configuration(case: Case, steps: u32, limit: Option<u64>) -> String {
    let (family, dim, layers, heads, sequence, batch, dtype, _) = case;
    let memory = limit.map_or(String::new(), |mib| format!("[memory]\nlimit = \"{mib}MiB\"\n"));
    format!(
        "[run]\nname = \"run\"\n[model]\nfamily = \"{family}\"\ndim = {dim}\nlayers = {layers}\nheads = {heads}\nvocab_size = 2048\n\
         max_sequence_length = {sequence}\n[tokenizer]\nkind = \"bytes\"\n[data]\ntrain = [\"text.txt\"]\n[training]\nsteps = {steps}\n\
         global_batch_size = {batch}\nsequence_length = {sequence}\n[precision]\ncompute = \"{dtype}\"\n{memory}"
    )
}

/// Some hundred thousand bytes of words.
fn text() -> String {
    let mut state = 1u32;
    let word = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ["the ", "step ", "is ", "a ", "program ", "of ", "ranks ", "and ", "lanes. "][(state >> 16) as usize % 9]
    };
    (0..60_000).map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_twelve_configurations_with_and_without_limits() {
        assert_eq!(CASES.len(), 12);
        assert!(CASES.iter().any(|case| case.7 < 1.0) && CASES.iter().any(|case| case.7 == 1.0));
        for case in CASES {
            let text = configuration(case, 7, Some(64));
            let parsed: toml::Table = toml::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert_eq!(parsed["model"]["dim"].as_integer(), Some(i64::from(case.1)));
            assert!(case.1 % case.3 == 0, "heads divide the width");
        }
    }
}
