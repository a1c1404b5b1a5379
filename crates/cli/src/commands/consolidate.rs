//! `trainyard consolidate`: how much the loss of a run on its text depends on each weight.

use super::data::LossPart;
use super::texts::{Form, Scratch, open};
use super::{BosArgs, CheckpointArgs, RuntimeArgs};
use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::path::PathBuf;
use trainyard_engine::config::{DataFormat, LossOnPart};
use trainyard_engine::consolidation::{EstimateSettings, estimate};
use trainyard_engine::evaluate::EvaluationSettings;
use trainyard_engine::spans;
use trainyard_engine::trained::{TrainedRun, open_trained};

/// Estimate on which weights the loss of a run depends (the diagonal of the empirical Fisher
/// information), and keep that beside the run. A run with `consolidation.from` then learns new
/// text and forgets less of the old.
#[derive(clap::Args)]
pub struct Args {
    /// A run's folder.
    run: PathBuf,
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// Files or folders of the old text, JSONL, .zst, .gz, or prefixes of token files. Unset:
    /// data.train of the run.
    #[arg(long, value_name = "FILES", num_args = 1..)]
    data: Vec<PathBuf>,
    /// The field of a JSONL record that holds the text. Unset: data.text_field of the run.
    #[arg(long)]
    text_field: Option<String>,
    /// Batches to take the gradient of, spread evenly over the text. A batch is one sequence.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batches: u32,
    /// Tokens of a sequence. Unset: as in training.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    length: Option<u32>,
    /// The factor of what the run's own consolidation.from holds, which is added: 1 keeps all
    /// earlier texts, less lets them fade.
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR", allow_negative_numbers = true)]
    decay: f64,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    bos: BosArgs,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

impl Args {
    /// The form of the text, which is that of the run's.
    fn form(&self, run: &TrainedRun) -> Form {
        let data = &run.config.data;
        if data.format != DataFormat::Chat {
            return Form::Text { field: self.text_field.clone().unwrap_or_else(|| data.text_field.clone()) };
        }
        let part = match data.loss_on {
            None | Some(LossOnPart::Answers) => LossPart::Answers,
            Some(LossOnPart::LastAnswer) => LossPart::LastAnswer,
            Some(LossOnPart::All) => LossPart::All,
        };
        Form::Chat { loss_on: part.into() }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !(0.0..=1.0).contains(&args.decay) {
        bail!("--decay {} is not from 0 to 1", args.decay);
    }
    let runtime = args.runtime.resolve()?;
    let trained = open_trained(&args.run, args.checkpoint.selection(), &runtime, note)
        .with_context(|| format!("cannot open the model {}", args.run.display()))?;
    let Some(run) = &trained.run else {
        bail!("{} is not the folder of a run, beside whose checkpoints the result is kept", args.run.display());
    };
    if trained.spec.image.is_some() {
        bail!("consolidate takes runs on text, and {} is a model of images", args.run.display());
    }
    let longest = trained.spec.max_positions;
    let sequence_length = args.length.map_or(run.sequence_length, |length| length as usize);
    if sequence_length > longest {
        bail!("--length {sequence_length} is beyond the model's longest sequence of {longest} tokens");
    }
    let of_run: Vec<PathBuf> = run.config.data.train.0.iter().map(|source| source.path.clone()).collect();
    let data = if args.data.is_empty() { &of_run } else { &args.data };
    if data.is_empty() {
        bail!("the run's configuration names no data.train: name the old text with --data FILES");
    }
    let scratch = Scratch::new()?;
    let tokenizer = args.bos.tokenizer(&args.run, &trained)?;
    let texts = open(data, &args.form(run), &tokenizer, scratch.path())?;
    let division = EvaluationSettings {
        sequence_length,
        rows: 1,
        respect_document_boundaries: run.config.data.respect_document_boundaries,
        tokens_max: None,
        spans: spans::of_evaluation(&trained.spec, Some(&run.config), &tokenizer, sequence_length)?,
    };
    let settings = EstimateSettings { batches: args.batches as usize, decay: args.decay, division };
    const EVERY_S: u64 = 5;
    let mut told = std::time::Instant::now();
    let progress = |targets: u64| {
        if told.elapsed().as_secs() >= EVERY_S {
            told = std::time::Instant::now();
            note(&format!("consolidating: {} targets so far", count(targets)));
        }
    };
    let (found, path) = estimate(&args.run, &trained, &texts, settings, progress)
        .with_context(|| format!("cannot consolidate {}", args.run.display()))?;
    if args.json {
        return print(format_args!("{}\n", json!({"run": args.run, "path": path, "estimate": found})));
    }
    print(format_args!(
        "{} at {}: {} batches, {} targets, loss {:.4}\n",
        args.run.display(),
        run.weights_in_words(),
        found.batches,
        count(found.targets),
        found.loss
    ))?;
    if let Some(decay) = found.decay {
        print(format_args!("with {decay} times what the run was held to itself\n"))?;
    }
    print(format_args!(
        "empirical Fisher information of {} weights: mean {:.3e}, largest {:.3e}\n  {}\n",
        count(found.weights),
        found.mean,
        found.largest,
        path.display()
    ))
}
