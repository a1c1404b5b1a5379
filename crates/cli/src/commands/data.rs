//! `trainyard data`: text to token files.

use crate::output::{count, note, print, size};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use trainyard_data::{Corpus, CorpusOptions, OnInvalid, PrepareOptions, Prepared, Sidecar, Tokenizer, prepare};

/// Prepare text for training.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Tokenize text into token files (Megatron's .bin and .idx) that `train` reads: name OUT in
    /// data.train.
    Prepare(PrepareArgs),
}

/// Arguments of `data prepare`.
#[derive(clap::Args)]
pub struct PrepareArgs {
    /// Files or folders of text, JSONL, .zst, .gz.
    #[arg(required = true)]
    text: Vec<PathBuf>,
    /// A tokenizer.json, a folder that has one, `bytes`, or `characters` (those of the text).
    #[arg(long, value_name = "FILE")]
    tokenizer: String,
    /// Prefix of the files to write: OUT.train.bin, OUT.train.idx, OUT.validation.*,
    /// OUT.tokenizer.json, OUT.json.
    #[arg(long)]
    out: PathBuf,
    /// The share held back for validation; 0 for none.
    #[arg(long, default_value_t = trainyard_data::prepare::VALIDATION_FRACTION, allow_negative_numbers = true)]
    validation_fraction: f64,
    /// Decides which documents those are.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
    /// Put no end-of-text token after each document.
    #[arg(long)]
    no_eos: bool,
    /// The field of a JSONL record that holds the text.
    #[arg(long, default_value = "text")]
    text_field: String,
    /// A line of text that separates documents within a file.
    #[arg(long, value_name = "TEXT")]
    document_separator: Option<String>,
    /// Pass over documents that cannot be used, instead of stopping.
    #[arg(long)]
    skip_invalid: bool,
    /// Do it again even if an earlier result has the same files, tokenizer and options.
    #[arg(long)]
    again: bool,
}

/// Runs the command.
pub fn run(command: &Command) -> Result<()> {
    let Command::Prepare(args) = command;
    let corpus = Corpus::open(
        &args.text,
        CorpusOptions {
            field: args.text_field.clone(),
            document_separator: args.document_separator.clone(),
            on_invalid: if args.skip_invalid { OnInvalid::Skip } else { OnInvalid::Fail },
            ..CorpusOptions::default()
        },
    )?;
    let tokenizer = match args.tokenizer.as_str() {
        "bytes" => Tokenizer::bytes(),
        "characters" => Tokenizer::characters_from_texts(corpus.texts(u64::MAX))?,
        path => Tokenizer::load(Path::new(path))?,
    };
    let options = PrepareOptions {
        validation_fraction: args.validation_fraction,
        seed: args.seed,
        workers: args.workers,
        append_eos: !args.no_eos,
        reuse: !args.again,
        ..PrepareOptions::new(&args.out)
    };
    let mut told = std::time::Instant::now();
    let made = prepare(&corpus, &tokenizer, &options, |progress| {
        if progress.waits {
            return note("another process prepares the same files: waiting for it");
        }
        if told.elapsed().as_secs() >= 5 {
            told = std::time::Instant::now();
            note(&format!(
                "{} of {} of files, {} documents, {} tokens",
                size(progress.text_bytes),
                size(progress.source_bytes),
                count(progress.documents),
                count(progress.tokens)
            ));
        }
    })
    .with_context(|| format!("cannot prepare {}", args.out.display()))?;
    // Where `train` looks for the tokenizer of token files.
    let beside = made.train.with_extension("tokenizer.json");
    tokenizer.save(&beside).with_context(|| format!("cannot write {}", beside.display()))?;
    report(&made, &args.out, &beside)
}

fn report(made: &Prepared, out: &Path, tokenizer: &Path) -> Result<()> {
    let Sidecar { train, validation, empty_documents, invalid_documents, split, .. } = &made.sidecar;
    print(format_args!("{}: {}\n", if made.reused { "kept" } else { "made" }, made.reason))?;
    for (what, prefix, part) in
        [("training", Some(&made.train), Some(train)), ("validation", made.validation.as_ref(), validation.as_ref())]
    {
        let (Some(prefix), Some(part)) = (prefix, part) else { continue };
        print(format_args!(
            "{what:<11} {}.bin: {} documents, {} tokens as {}, {} of text\n",
            prefix.display(),
            count(part.documents),
            count(part.tokens),
            part.token_type,
            size(part.text_bytes)
        ))?;
    }
    if split.divided_documents > 0 {
        print(format_args!(
            "divided     {} of the documents in both: only the end validates\n",
            count(split.divided_documents)
        ))?;
    }
    if empty_documents + invalid_documents > 0 {
        print(format_args!("passed over {empty_documents} empty and {invalid_documents} invalid documents\n"))?;
    }
    print(format_args!("tokenizer   {}\n", tokenizer.display()))?;
    print(format_args!("train on it with data.train = [\"{}\"]\n", out.display()))
}
