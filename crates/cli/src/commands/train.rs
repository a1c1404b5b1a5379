//! `trainyard train`: a new run from a configuration, the quick start without one, or an earlier run resumed.

use super::config::load;
use crate::output::{count, memory, note, print, size};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use trainyard_engine::config::{Config, Limits};
use trainyard_engine::generate::{Sampling, generate};
use trainyard_engine::metrics::progress;
use trainyard_engine::session::{Session, files};
use trainyard_engine::shape::compute_dtype;
use trainyard_engine::trainer::{Control, Ending, Summary, train};

/// Tokens of the sample at the end.
const SAMPLE_TOKENS: usize = 120;

/// Train a model: from a configuration, or without one as a quick start on the Rust sources of this machine.
#[derive(clap::Args)]
pub struct Args {
    /// A configuration in TOML (see `trainyard config docs`). Without one: the quick start.
    config: Option<PathBuf>,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Go on with an earlier run, from its newest whole checkpoint.
    #[arg(long, value_name = "RUN", conflicts_with = "config")]
    resume: Option<PathBuf>,
    /// Train on these files or folders instead of what the configuration names; can be given several times.
    #[arg(long, value_name = "PATH", conflicts_with = "resume")]
    data: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args, process_start: Instant) -> Result<ExitCode> {
    let mut session = match &args.resume {
        Some(folder) => {
            Session::resume(folder, &args.sets, note).with_context(|| format!("cannot resume {}", folder.display()))?
        }
        None => Session::create(&configuration(args)?, note)?,
    };
    print(session.resolved.to_toml())?;
    print(format_args!("\n{}", plan(&session)))?;
    let stop = stop_on_signals()?;
    let mut display = progress::for_stderr();
    let control = Control { stop: &stop, process_start };
    let summary = train(&mut session, &mut *display, control)?;
    if summary.ending == Ending::Complete {
        sample(&session)?;
    }
    print(describe(&session, &summary))?;
    Ok(if summary.ending == Ending::Complete { ExitCode::SUCCESS } else { ExitCode::from(130) })
}

fn configuration(args: &Args) -> Result<Config> {
    let mut sets = args.sets.clone();
    if !args.data.is_empty() {
        let paths = args.data.iter().map(|path| toml::Value::String(path.display().to_string()));
        // First, so that a --set of the same key wins.
        sets.insert(0, format!("data.train={}", toml::Value::Array(paths.collect())));
    }
    load(args.config.as_deref(), &sets)
}

/// What will be trained, on what, and what a step will need.
fn plan(session: &Session) -> String {
    let resolved = &session.resolved;
    let peaks = &session.peaks;
    let dtype = compute_dtype(resolved);
    let purposes = session.prediction.purposes();
    let purposes: Vec<String> = purposes.iter().map(|(p, bytes)| format!("{p} {}", size(*bytes as u64))).collect();
    format!(
        "model        {} parameters, {} tokens a step\n\
         kernels      {} on {} threads; measured peaks: f32 {:.3} TFLOP/s, bf16 {:.3} TFLOP/s, copies {:.1} GB/s\n\
         step         {:.3} TFLOP in {}; {} instructions\n\
         memory       {} predicted: {}\n\
         run folder   {}\n\n",
        count(session.rank.model().parameter_count() as u64),
        count(resolved.tokens_per_step()),
        peaks.isa,
        peaks.threads,
        peaks.f32_flops / 1e12,
        peaks.bf16_flops / 1e12,
        peaks.copy_bytes_per_s / 1e9,
        session.prediction.cost.flops as f64 / 1e12,
        dtype,
        session.programs[0].instructions.len(),
        size(session.prediction.memory.peak_total() as u64),
        purposes.join(", "),
        session.folder.display(),
    )
}

/// The first SIGINT or SIGTERM asks the run to stop; a second one ends the process at once.
fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // Order matters: the check of the flag comes before the flag is set.
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop)).context("signal handling")?;
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("signal handling")?;
    }
    Ok(stop)
}

/// Shows what the model writes: after the beginning of a function, or else of the validation text.
fn sample(session: &Session) -> Result<()> {
    let prompt = prompt(session)?;
    if prompt.is_empty() {
        return Ok(());
    }
    let mut decoder = session.tokenizer.stream_decoder();
    let mut text = session.tokenizer.decode(&prompt);
    generate(&session.rank, &prompt, SAMPLE_TOKENS, Sampling::default(), &[], |token| {
        text += &decoder.push(token);
        true
    })?;
    text += &decoder.finish();
    print(format_args!("\n--- sample, after a prompt of {} tokens ---\n{text}\n---\n\n", prompt.len()))
}

fn prompt(session: &Session) -> Result<Vec<u32>> {
    if session.resolved.config.data.train.0.iter().any(|s| s.path.as_os_str() == "rust-sources") {
        return Ok(session.tokenizer.encode("fn main() {")?);
    }
    let Some(text) = session.validation.iter().find(|text| text.tokens() > 0) else { return Ok(Vec::new()) };
    let mut tokens = Vec::new();
    let vocabulary = session.rank.model().vocab_size() as u32;
    text.read_into(0..text.tokens().min(8), vocabulary, &mut tokens)?;
    Ok(tokens.into_iter().map(|token| token as u32).collect())
}

fn describe(session: &Session, summary: &Summary) -> String {
    let folder = session.folder.display();
    let mut text = match summary.ending {
        Ending::Complete => format!("done: {} steps", count(summary.steps)),
        Ending::Interrupted => format!("stopped after {} steps, with a checkpoint to go on from", count(summary.steps)),
    };
    text += &format!(", {} tokens; {:.1} s of training in this sitting\n", count(summary.tokens), summary.seconds);
    if summary.loss.is_finite() {
        text += &format!("loss         {:.4} in the last step\n", summary.loss);
    }
    if let Some(e) = &summary.evaluation {
        let bits = e.bits_per_byte.map_or(String::new(), |bits| format!(", {bits:.4} bits per byte"));
        text += &format!(
            "validation   loss {:.4}, perplexity {:.2}{bits} ({} tokens)\n",
            e.loss,
            e.perplexity,
            count(e.tokens)
        );
    }
    if summary.skipped > 0 {
        text += &format!("skipped      {} steps whose loss or gradient was not finite\n", summary.skipped);
    }
    if summary.step_s_median > 0.0 {
        let share = summary.mfu_median.map_or(String::new(), |mfu| {
            format!(", {:.1} % of the measured {} peak", 100.0 * mfu, compute_dtype(&session.resolved))
        });
        text += &format!(
            "speed        {:.2} ms a step (median), {} tokens/s{share}\n\
             data         {:.3} % of the time waiting for it\n\
             first step   done {:.2} s after the program's start\n\
             memory             measured   predicted\n{}",
            1e3 * summary.step_s_median,
            count(summary.tps_median as u64),
            100.0 * summary.data_wait_share,
            summary.first_step_done_s,
            memory(
                &summary.memory.iter().map(|(p, m, q)| (p.name(), *m as u64, *q as u64)).collect::<Vec<_>>(),
                (summary.memory_total.0 as u64, summary.memory_total.1 as u64)
            )
        );
    }
    text += &format!("run folder   {folder} ({}, metrics.jsonl, checkpoints)\n\n", files::CONFIG);
    let more = match (summary.ending, session.resolved.limits) {
        (Ending::Interrupted, _) => String::new(),
        (_, Limits { steps: Some(steps), .. }) => format!(" --set training.steps={}", 2 * steps),
        (_, Limits { seconds, .. }) => format!(" --set training.seconds={}", 2.0 * seconds.unwrap_or(60.0)),
    };
    text + &format!(
        "go on        trainyard train --resume {folder}{more}\n\
         use it       trainyard generate {folder} --prompt \"...\"\n             \
                      trainyard eval {folder} --data FILES\n             \
                      trainyard export {folder} --out DIR\n"
    )
}
