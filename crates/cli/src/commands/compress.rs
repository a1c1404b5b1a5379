//! The options and the report of the commands that write a model anew.

use super::export::{parse_size, stored_dtype};
use super::texts::{Form, LENGTH_MAX, Scratch, open};
use super::{BosArgs, CheckpointArgs, Precision, generation_config};
use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use trainyard_base::format_bytes;
use trainyard_compress::{Compressed, Pass, Sequences, Source, calibration};
use trainyard_engine::evaluate::{Evaluation, EvaluationSettings};
use trainyard_engine::trained::{Runtime, TrainedRun};
use trainyard_model::weights::ExportOptions;
use trainyard_tensor::Device;

/// Default upper limit for the tokens of a calibration sequence.
const CALIBRATION_LENGTH_MAX: usize = 512;

/// The model, and the folder to write.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// A run's folder, a Hugging Face folder or a GGUF file.
    pub model: PathBuf,
    #[command(flatten)]
    checkpoint: CheckpointArgs,
    /// The folder to write. It must not exist, or be empty.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// The type of the weights. Unset: the precision of the run, or the type in a Hugging Face
    /// folder's config.json.
    #[arg(long)]
    dtype: Option<Precision>,
    /// The most bytes of one file: "5GB", "512MiB".
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
    /// Kernel threads. Unset: the cores that the process may use.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

/// The text that goes through the model.
#[derive(clap::Args)]
pub struct TextArgs {
    /// Text on which the inputs of layers are seen: files or folders of text, JSONL, .zst, .gz, or
    /// prefixes of token files made with the model's tokenizer.
    #[arg(long, value_name = "FILES", num_args = 1..)]
    calibration: Vec<PathBuf>,
    /// Sequences of calibration, drawn from all of the text.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Tokens of a sequence of calibration. Unset: as in training; at most 512 for a Hugging Face
    /// folder.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    length: Option<u32>,
    /// Seed of the draw.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Text whose perplexity is told before and after, in the same forms.
    #[arg(long, value_name = "FILES", num_args = 1..)]
    evaluate: Vec<PathBuf>,
    /// The most tokens of that text to predict. Unset: all. Memory holds two hidden states of each.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    tokens_max: Option<u64>,
    /// The field of a JSONL record that holds the text.
    #[arg(long, default_value = "text")]
    text_field: String,
    #[command(flatten)]
    bos: BosArgs,
}

impl ModelArgs {
    /// A device for the work: the best kernels, all threads.
    pub fn device(&self) -> Device {
        let runtime = Runtime::of_this_machine();
        Device::cpu(runtime.isa, self.threads.map_or(runtime.threads, usize::from), None)
    }

    /// Opens the model.
    pub fn open(&self, device: &Device) -> Result<Source> {
        check_out(&self.out)?;
        Source::open(&self.model, self.checkpoint.selection(), device, note)
            .with_context(|| format!("cannot open the model {}", self.model.display()))
    }

    /// The options of the folder to write.
    pub fn options(&self, source: &Source) -> Result<ExportOptions> {
        let (dtype, _) = stored_dtype(self.dtype, &self.model, source.trained())?;
        let generation = generation_config(&self.model)?;
        Ok(ExportOptions { dtype, max_shard_bytes: self.max_shard_size, generation })
    }

    /// Writes the tokenizer and tells what was done: `what` in words, `settings` for `--json`.
    pub fn report(&self, source: &Source, done: &Compressed, what: &str, settings: Value) -> Result<()> {
        source
            .tokenizer()
            .save_hugging_face(&self.out, source.spec().max_positions)
            .with_context(|| format!("cannot write the tokenizer to {}", self.out.display()))?;
        let perplexity = |losses: &Evaluation| losses.loss().exp();
        if self.json {
            let losses = done.losses.as_ref().map(|losses| losses.each_ref().map(Evaluation::loss));
            let line = json!({
                "model": self.model,
                "out": self.out,
                "settings": settings,
                "bytes": done.exported.bytes,
                "zeros": done.zeros,
                "elements": done.elements,
                "loss_before": losses.map(|losses| losses[0]),
                "loss_after": losses.map(|losses| losses[1]),
                "perplexity_before": losses.map(|losses| losses[0].exp()),
                "perplexity_after": losses.map(|losses| losses[1].exp()),
                "tokens": done.losses.as_ref().map(|losses| losses[0].targets),
            });
            return print(format_args!("{line}\n"));
        }
        print(format_args!("{}: {what}\n", self.model.display()))?;
        if let Some([before, after]) = &done.losses {
            let tokens = count(before.targets);
            print(format_args!(
                "perplexity   {:.4} before, {:.4} after ({tokens} tokens)\n",
                perplexity(before),
                perplexity(after)
            ))?;
        }
        print(format_args!("weights      {} in {}\n", format_bytes(done.exported.bytes), self.out.display()))?;
        done.exported.files.iter().try_for_each(|file| print(format_args!("  {}\n", file.display())))
    }
}

/// Checks that nothing is overwritten.
pub fn check_out(out: &Path) -> Result<()> {
    let taken = match std::fs::read_dir(out) {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => out.exists(),
    };
    match taken {
        true => bail!("{} exists already and is not empty: give --out a new folder", out.display()),
        false => Ok(()),
    }
}

impl TextArgs {
    /// Tokens of a calibration sequence.
    fn length(&self, source: &Source) -> Result<usize> {
        let longest = source.spec().max_positions;
        match self.length {
            Some(length) if length as usize > longest => {
                bail!("--length {length} is beyond the model's longest sequence of {longest} tokens")
            }
            Some(length) => Ok(length as usize),
            None => Ok(run_of(source).map_or(longest.min(CALIBRATION_LENGTH_MAX), |run| run.sequence_length)),
        }
    }

    /// The calibration sequences, if there are any.
    pub fn calibration(&self, source: &Source, device: &Device) -> Result<Option<Sequences>> {
        if self.calibration.is_empty() {
            return Ok(None);
        }
        let length = self.length(source)?;
        let (tokenizer, scratch) = (self.bos.applied(source.tokenizer(), source.trained())?, Scratch::new()?);
        let form = Form::Text { field: self.text_field.clone() };
        let texts = open(&self.calibration, &form, &tokenizer, scratch.path())?;
        let drawn = calibration(device, source.model(), &texts, self.samples as usize, length, self.seed)?;
        let wanted = self.samples as usize * length;
        if drawn.tokens() < wanted {
            note(&format!(
                "the calibration text has {} sequences of {length} tokens, fewer than --samples {}: all are used",
                drawn.tokens() / length,
                self.samples
            ));
        }
        Ok(Some(drawn))
    }

    /// The sequences of evaluation, if there are any: the rows of `trainyard eval`.
    pub fn evaluation(&self, source: &Source, device: &Device) -> Result<Option<Sequences>> {
        if self.evaluate.is_empty() {
            return Ok(None);
        }
        let (tokenizer, scratch) = (self.bos.applied(source.tokenizer(), source.trained())?, Scratch::new()?);
        let form = Form::Text { field: self.text_field.clone() };
        let texts = open(&self.evaluate, &form, &tokenizer, scratch.path())?;
        let run = run_of(source);
        let settings = EvaluationSettings {
            sequence_length: run.map_or(source.spec().max_positions.min(LENGTH_MAX), |run| run.sequence_length),
            rows: 8,
            respect_document_boundaries: run.is_none_or(|run| run.config.data.respect_document_boundaries),
            tokens_max: self.tokens_max,
            spans: None,
        };
        Ok(Some(Sequences::evaluation(device, source.model(), &texts, settings)?))
    }

    /// A way through the model with these texts.
    pub fn pass<'a>(
        &self,
        source: &'a Source,
        device: &'a Device,
        options: ExportOptions,
        tell: &'a mut dyn FnMut(&str),
    ) -> Result<Pass<'a>> {
        let (calibration, evaluation) = (self.calibration(source, device)?, self.evaluation(source, device)?);
        Ok(Pass::new(source, device, options, tell).calibrated(calibration).evaluated(evaluation))
    }
}

fn run_of(source: &Source) -> Option<&TrainedRun> {
    source.trained().and_then(|trained| trained.run.as_ref())
}
