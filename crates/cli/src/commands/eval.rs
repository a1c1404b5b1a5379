//! `trainyard eval`: the loss of a trained model on text.

use super::texts::{LENGTH_MAX, Scratch, open};
use super::{BosArgs, CheckpointArgs, RuntimeArgs};
use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::path::PathBuf;
use trainyard_engine::evaluate::{EvaluationSettings, evaluate_until};
use trainyard_engine::metrics::{EvaluationMetrics, progress};
use trainyard_engine::trained::open_trained;

/// Evaluate a run or a Hugging Face folder on text: loss, perplexity, bits per byte.
#[derive(clap::Args)]
pub struct Args {
    /// A run's folder, or a Hugging Face folder.
    model: PathBuf,
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// Files or folders of text, JSONL, .zst, .gz, or prefixes of token files made with the model's
    /// tokenizer (for the OUT of `data prepare`, the part held back).
    #[arg(long, value_name = "FILES", required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// Tokens of a row. Unset: as in training; at most 1024 for a Hugging Face folder.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    length: Option<u32>,
    /// Rows of a batch.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    rows: u32,
    /// The most tokens to predict, from the beginning of the text. Unset: all.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    tokens_max: Option<u64>,
    /// The field of a JSONL record that holds the text.
    #[arg(long, default_value = "text")]
    text_field: String,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    bos: BosArgs,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let runtime = args.runtime.resolve()?;
    let trained = open_trained(&args.model, args.checkpoint.checkpoint, &runtime, note)
        .with_context(|| format!("cannot open the model {}", args.model.display()))?;
    let scratch = Scratch::new()?;
    let tokenizer = args.bos.tokenizer(&trained)?;
    let texts = open(&args.data, &args.text_field, &tokenizer, scratch.path())?;
    let longest = trained.spec.max_positions;
    let run = trained.run.as_ref();
    let length = match args.length {
        Some(length) if length as usize > longest => {
            bail!("--length {length} is beyond the model's longest sequence of {longest} tokens")
        }
        Some(length) => length as usize,
        None => run.map_or(longest.min(LENGTH_MAX), |run| run.sequence_length),
    };
    let settings = EvaluationSettings {
        sequence_length: length,
        rows: args.rows as usize,
        respect_document_boundaries: run.is_none_or(|run| run.config.data.respect_document_boundaries),
        tokens_max: args.tokens_max,
    };
    let began = std::time::Instant::now();
    let mut display = progress::for_stderr();
    let found = evaluate_until(&trained.rank, &texts, &tokenizer, settings, &mut |done| {
        display.evaluating(done);
        Ok(false)
    });
    display.end();
    let found = found?.context("nobody stops it")?;
    if found.targets == 0 {
        bail!("the text has no token to predict: give documents of at least two tokens");
    }
    if !found.loss_sum.is_finite() {
        bail!("the loss is not finite ({}): the weights hold NaN or infinities, or are close to it", found.loss());
    }
    let step = run.map(|run| run.step);
    let seconds = began.elapsed().as_secs_f64();
    let metrics = EvaluationMetrics::new(step.unwrap_or(0), found.loss_sum, found.targets, found.text_bytes, seconds);
    if args.json {
        let line = json!({
            "model": args.model,
            "step": step,
            "loss": metrics.loss,
            "perplexity": metrics.perplexity,
            "bits_per_byte": metrics.bits_per_byte,
            "tokens": metrics.tokens,
            "seconds": metrics.seconds,
        });
        return print(format_args!("{line}\n"));
    }
    let step = step.map_or(String::new(), |step| format!(" at step {step}"));
    print(format_args!("{}{step}, {} tokens\n", args.model.display(), count(metrics.tokens)))?;
    print(format_args!("loss           {:.4}\nperplexity     {:.4}\n", metrics.loss, metrics.perplexity))?;
    match metrics.bits_per_byte {
        Some(bits) => print(format_args!("bits per byte  {bits:.4}\n")),
        None => print("bits per byte  unknown: not all of the text was read\n"),
    }
}
