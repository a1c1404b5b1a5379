//! `trainyard eval`: the loss of a trained model, or of several together, on text.

use super::data::LossPart;
use super::texts::{Form, LENGTH_MAX, Scratch, open};
use super::{BosArgs, CheckpointArgs, RuntimeArgs};
use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::path::{Path, PathBuf};
use trainyard_data::{IndexedTokens, OnInvalid, Tokenizer};
use trainyard_engine::adapters::open_adapted;
use trainyard_engine::config::PAIRED_LENGTH;
use trainyard_engine::ensemble::{Combination, EnsembleEvaluation, Score, evaluate_ensemble};
use trainyard_engine::evaluate::{Evaluation, EvaluationProgress, EvaluationSettings, evaluate_until};
use trainyard_engine::images::{HeldBack, evaluate_images_until};
use trainyard_engine::metrics::{EvaluationMetrics, progress};
use trainyard_engine::rank::Rank;
use trainyard_engine::spans;
use trainyard_engine::trained::{Selection, Trained, open_trained};

/// Evaluate a run or a Hugging Face folder on text: loss, perplexity, bits per byte. With
/// `--ensemble`, evaluate several models alone and together; with `--adapter`, several adapters on
/// one base.
#[derive(clap::Args)]
pub struct Args {
    /// A run's folder, or a Hugging Face folder; several with --ensemble.
    #[arg(required = true, num_args = 1.., value_name = "MODEL")]
    models: Vec<PathBuf>,
    /// Combine the predictions of several models with one tokenizer: the mean of their
    /// probabilities, or the token that most of them find most probable.
    #[arg(long, value_enum, value_name = "KIND")]
    ensemble: Option<Ensemble>,
    /// A PEFT adapter of the model, which is a Hugging Face folder; may be given several times. The
    /// model is loaded once, and evaluated without an adapter and with each of them.
    #[arg(long = "adapter", value_name = "DIR", conflicts_with_all = ["ensemble", "skip_invalid"])]
    adapters: Vec<PathBuf>,
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
    /// Read conversations, as for data.format = "chat": the loss is that of the answers. The chat
    /// template is that of the tokenizer.
    #[arg(long, conflicts_with = "text_field")]
    chat: bool,
    /// With --chat: the part of a conversation whose loss counts.
    #[arg(long, value_enum, value_name = "PART", default_value_t = LossPart::Answers, requires = "chat")]
    loss_on: LossPart,
    /// Leave out images that cannot be decoded, and tell how many they are.
    #[arg(long, conflicts_with_all = ["ensemble", "chat"])]
    skip_invalid: bool,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    bos: BosArgs,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// The values of `--ensemble`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Ensemble {
    /// The mean of the models' probabilities.
    Mean,
    /// The token that most models find most probable.
    Vote,
}

impl From<Ensemble> for Combination {
    fn from(kind: Ensemble) -> Combination {
        match kind {
            Ensemble::Mean => Combination::Mean,
            Ensemble::Vote => Combination::Vote,
        }
    }
}

impl Args {
    fn form(&self) -> Form {
        if self.chat {
            Form::Chat { loss_on: self.loss_on.into() }
        } else {
            Form::Text { field: self.text_field.clone() }
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let runtime = args.runtime.resolve()?;
    let open_model = |model: &PathBuf| {
        open_trained(model, args.checkpoint.selection(), &runtime, note)
            .with_context(|| format!("cannot open the model {}", model.display()))
    };
    let models = &args.models;
    if !args.adapters.is_empty() {
        return with_adapters(args);
    }
    match (args.ensemble, &models[..]) {
        (None, [model]) => alone(args, model, &open_model(model)?),
        (None, _) => bail!("{} models: say how to combine them, --ensemble mean or vote", models.len()),
        (Some(_), [_]) => bail!("--ensemble combines several models, and this is one"),
        (Some(kind), _) => together(args, kind.into(), &models.iter().map(open_model).collect::<Result<Vec<_>>>()?),
    }
}

/// Evaluates one model.
fn alone(args: &Args, model: &Path, trained: &Trained) -> Result<()> {
    if trained.spec.image.is_some() {
        return on_images(args, model, trained);
    }
    if args.skip_invalid {
        bail!("--skip-invalid is of images, and {} is a model of text", model.display());
    }
    let scratch = Scratch::new()?;
    let tokenizer = args.bos.tokenizer(model, trained)?;
    let texts = open(&args.data, &args.form(), &tokenizer, scratch.path())?;
    let run = trained.run.as_ref();
    let settings = settings(args, trained, &tokenizer, args.rows)?;
    let began = std::time::Instant::now();
    let found = evaluated(trained, &texts, &tokenizer, settings)?;
    if !found.loss_sum.is_finite() {
        bail!("the loss is not finite ({}): the weights hold NaN or infinities, or are close to it", found.loss());
    }
    let step = run.map(|run| run.step);
    let seconds = began.elapsed().as_secs_f64();
    let names: Vec<String> = args.data.iter().map(|path| path.display().to_string()).collect();
    let metrics = EvaluationMetrics::new(step.unwrap_or(0), found.loss_sum, found.targets, found.text_bytes, seconds)
        .with_texts(&names, &found.texts);
    if args.json {
        let line = json!({
            "model": model,
            "step": step,
            "loss": metrics.loss,
            "perplexity": metrics.perplexity,
            "bits_per_byte": metrics.bits_per_byte,
            "tokens": metrics.tokens,
            "seconds": metrics.seconds,
            "texts": metrics.texts,
        });
        return print(format_args!("{line}\n"));
    }
    let step = run.map_or(String::new(), |run| format!(" at {}", run.weights_in_words()));
    print(format_args!("{}{step}, {} tokens\n", model.display(), count(metrics.tokens)))?;
    print(format_args!("loss           {:.4}\nperplexity     {:.4}\n", metrics.loss, metrics.perplexity))?;
    match metrics.bits_per_byte {
        Some(bits) => print(format_args!("bits per byte  {bits:.4}\n"))?,
        None => print("bits per byte  unknown: not all of the text was read\n")?,
    }
    for text in &metrics.texts {
        print(format_args!("  {:.4}       {}, {} tokens\n", text.loss, text.name, count(text.tokens)))?;
    }
    Ok(())
}

/// Evaluates a model on texts, with a display of the progress.
fn evaluated(
    trained: &Trained,
    texts: &[IndexedTokens],
    tokenizer: &Tokenizer,
    settings: EvaluationSettings,
) -> Result<Evaluation> {
    let mut display = progress::for_stderr();
    let found = evaluate_until(&trained.rank, texts, tokenizer, settings, &mut |done| {
        display.evaluating(done);
        Ok(false)
    });
    display.end();
    let found = found?.context("nobody stops it")?;
    if found.targets == 0 {
        bail!("the text has no token to predict: give documents of at least two tokens");
    }
    Ok(found)
}

/// Evaluates adapters on one base.
fn with_adapters(args: &Args) -> Result<()> {
    let [base] = &args.models[..] else { bail!("--adapter: {} models, and adapters are of one", args.models.len()) };
    if args.checkpoint.selection() != Selection::default() {
        bail!("--adapter: adapters are of a Hugging Face folder, which has no checkpoints");
    }
    let mut adapted = open_adapted(base, &args.adapters, &args.runtime.resolve()?, note)
        .with_context(|| format!("cannot open the model {} with adapters", base.display()))?;
    if adapted.trained.spec.image.is_some() {
        bail!("--adapter evaluates models of text, and {} is one of images", base.display());
    }
    let scratch = Scratch::new()?;
    let tokenizer = args.bos.tokenizer(base, &adapted.trained)?;
    let texts = open(&args.data, &args.form(), &tokenizer, scratch.path())?;
    let settings = settings(args, &adapted.trained, &tokenizer, args.rows)?;
    let plain = adapted.has_plain_base().then_some(None);
    let (mut rows, mut tokens) = (Vec::new(), 0);
    for number in plain.into_iter().chain((0..args.adapters.len()).map(Some)) {
        adapted.take(number)?;
        let found = evaluated(&adapted.trained, &texts, &tokenizer, settings)?;
        let folder = number.map(|number| &args.adapters[number]);
        if !found.loss_sum.is_finite() {
            let name = folder.unwrap_or(base).display();
            bail!("the loss of {name} is not finite: its weights hold NaN or infinities, or are close to it");
        }
        tokens = found.targets;
        rows.push((folder, found.loss()));
    }
    if args.json {
        let row = |(folder, loss): &(Option<&PathBuf>, f64)| json!({"adapter": folder, "loss": loss, "perplexity": loss.exp()});
        let rows: Vec<_> = rows.iter().map(row).collect();
        return print(format_args!("{}\n", json!({"model": base, "tokens": tokens, "adapters": rows})));
    }
    print(format_args!(
        "{}, {} tokens\n{:<28} {:>8} {:>11}\n",
        base.display(),
        count(tokens),
        "",
        "loss",
        "perplexity"
    ))?;
    for (folder, loss) in rows {
        let name = folder.map_or("no adapter".to_owned(), |folder| folder.display().to_string());
        print(format_args!("{name:<28} {loss:>8.4} {:>11.4}\n", loss.exp()))?;
    }
    Ok(())
}

/// Evaluates a model of images.
fn on_images(args: &Args, model: &Path, trained: &Trained) -> Result<()> {
    if args.length.is_some() || args.tokens_max.is_some() || args.chat {
        bail!("--length, --tokens-max and --chat are of text, and {} is a model of images", model.display());
    }
    let labels = trained.spec.image.as_ref().map(|image| image.labels.clone());
    let on_invalid = OnInvalid::skipping(args.skip_invalid);
    let open = |path: &PathBuf| HeldBack::open(path, labels.clone(), on_invalid);
    let sets = args.data.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let began = std::time::Instant::now();
    let mut display = progress::for_stderr();
    let found = evaluate_images_until(&trained.rank, &sets, args.rows as usize, &mut |done| {
        display.evaluating(done);
        Ok(false)
    });
    display.end();
    let found = found?.context("nobody stops it")?;
    if !found.loss_sum.is_finite() {
        bail!("the loss is not finite ({}): the weights hold NaN or infinities, or are close to it", found.loss());
    }
    let all: usize = sets.iter().map(|set| set.images.len()).sum();
    let left_out = all as u64 - found.targets;
    if found.targets == 0 {
        bail!("none of the {all} images can be decoded");
    }
    let step = trained.run.as_ref().map(|run| run.step);
    let names: Vec<String> = args.data.iter().map(|path| path.display().to_string()).collect();
    let seconds = began.elapsed().as_secs_f64();
    let metrics = EvaluationMetrics::new(step.unwrap_or(0), found.loss_sum, found.targets, None, seconds)
        .with_texts(&names, &found.texts)
        .with_accuracy(found.hits);
    if args.json {
        let line = json!({
            "model": model,
            "step": step,
            "loss": metrics.loss,
            "top1": metrics.top1,
            "top5": metrics.top5,
            "images": metrics.tokens,
            "left_out": left_out,
            "seconds": metrics.seconds,
            "sets": metrics.texts,
        });
        return print(format_args!("{line}\n"));
    }
    let step = trained.run.as_ref().map_or(String::new(), |run| format!(" at {}", run.weights_in_words()));
    let without = match left_out {
        0 => String::new(),
        left_out => format!(", without {} that cannot be decoded", count(left_out)),
    };
    print(format_args!("{}{step}, {} images{without}\n", model.display(), count(metrics.tokens)))?;
    let [top1, top5] = [metrics.top1, metrics.top5].map(|share| 100.0 * share.unwrap_or(f64::NAN));
    print(format_args!("loss   {:.4}\ntop 1  {top1:.2} %\ntop 5  {top5:.2} %\n", metrics.loss))?;
    for set in &metrics.texts {
        print(format_args!("  {:.4}  {}, {} images\n", set.loss, set.name, count(set.tokens)))?;
    }
    Ok(())
}

/// The division of the text into rows: as in the model's training unless the user says otherwise.
fn settings(args: &Args, trained: &Trained, tokenizer: &Tokenizer, rows: u32) -> Result<EvaluationSettings> {
    let longest = trained.spec.max_positions;
    let run = trained.run.as_ref();
    let sequence_length = match args.length {
        Some(length) if length as usize > longest => {
            bail!("--length {length} is beyond the model's longest sequence of {longest} tokens")
        }
        Some(length) => length as usize,
        None => {
            let usual = if trained.spec.encoder.is_some() { PAIRED_LENGTH } else { LENGTH_MAX };
            run.map_or(longest.min(usual), |run| run.sequence_length)
        }
    };
    let config = run.map(|run| &run.config);
    Ok(EvaluationSettings {
        sequence_length,
        rows: rows as usize,
        respect_document_boundaries: run.is_none_or(|run| run.config.data.respect_document_boundaries),
        tokens_max: args.tokens_max,
        spans: spans::of_evaluation(&trained.spec, config, tokenizer, sequence_length)?,
    })
}

/// Evaluates several models, alone and together.
fn together(args: &Args, kind: Combination, models: &[Trained]) -> Result<()> {
    let names = &args.models;
    let first = &models[0];
    let tokenizer = args.bos.tokenizer(&names[0], first)?;
    let words = |model: &Trained| model.tokenizer.as_ref().map(|tokenizer| tokenizer.fingerprint().to_owned());
    if let Some(other) = models.iter().position(|model| words(model) != words(first)) {
        bail!(
            "{} and {} have different tokenizers, so their tokens are not the same; an ensemble needs models of one",
            names[0].display(),
            names[other].display()
        );
    }
    // A row at a time: all logits of a row are in memory.
    let each = models.iter().map(|model| settings(args, model, &tokenizer, 1)).collect::<Result<Vec<_>>>()?;
    let shortest = each.iter().min_by_key(|settings| settings.sequence_length).expect("there are models");
    let scratch = Scratch::new()?;
    let texts = open(&args.data, &args.form(), &tokenizer, scratch.path())?;
    let ranks: Vec<&Rank> = models.iter().map(|model| &model.rank).collect();
    let mut display = progress::for_stderr();
    let of =
        texts.iter().map(|text| text.tokens().saturating_sub(1)).sum::<u64>().min(args.tokens_max.unwrap_or(u64::MAX));
    let mut shown = |tokens| display.evaluating(EvaluationProgress { tokens, of });
    let found = evaluate_ensemble(&ranks, &texts, *shortest, kind, &mut shown);
    display.end();
    let found = found?;
    if found.targets == 0 {
        bail!("the text has no token to predict: give documents of at least two tokens");
    }
    let is_broken = |score: &Score| score.loss_sum.is_some_and(|sum| !sum.is_finite());
    if let Some((name, _)) = names.iter().zip(&found.members).find(|(_, score)| is_broken(score)) {
        bail!("the loss of {} is not finite: its weights hold NaN or infinities, or are close to it", name.display());
    }
    show_together(args, kind, &found)
}

/// Prints the scores of an ensemble and of its members.
fn show_together(args: &Args, kind: Combination, found: &EnsembleEvaluation) -> Result<()> {
    let targets = found.targets as f64;
    let figures = |score: &Score| {
        let loss = score.loss_sum.map(|sum| sum / targets);
        (loss, loss.map(f64::exp), score.correct as f64 / targets)
    };
    let object = |score: &Score| {
        let (loss, perplexity, accuracy) = figures(score);
        json!({"loss": loss, "perplexity": perplexity, "accuracy": accuracy})
    };
    let (names, words) = (&args.models, kind.name());
    if args.json {
        let members = names.iter().zip(&found.members).map(|(name, score)| {
            let mut line = object(score);
            line["model"] = json!(name);
            line
        });
        let members: Vec<_> = members.collect();
        let mut ensemble = object(&found.ensemble);
        ensemble["kind"] = json!(words);
        return print(format_args!("{}\n", json!({"tokens": found.targets, "models": members, "ensemble": ensemble})));
    }
    print(format_args!(
        "{} tokens\n{:<28} {:>8} {:>11} {:>9}\n",
        count(found.targets),
        "",
        "loss",
        "perplexity",
        "accuracy"
    ))?;
    let label = format!("{words} of {}", names.len());
    let rows = names.iter().map(|name| name.display().to_string()).zip(&found.members);
    for (name, score) in rows.chain([(label, &found.ensemble)]) {
        let (loss, perplexity, accuracy) = figures(score);
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
        print(format_args!("{name:<28} {:>8} {:>11} {:>7.2} %\n", number(loss), number(perplexity), 1e2 * accuracy))?;
    }
    Ok(())
}
