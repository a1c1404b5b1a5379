//! `trainyard tokenizer`: byte-level BPE trained on text.

use crate::output::{note, print};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use trainyard_base::format_bytes;
use trainyard_data::{Corpus, CorpusOptions, Tokenizer, TrainProgress};

/// Make tokenizers.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Train a byte-level BPE tokenizer; the result is a tokenizer.json that transformers loads.
    Train(TrainArgs),
}

/// Arguments of `tokenizer train`.
#[derive(clap::Args)]
pub struct TrainArgs {
    /// Files or folders of text, JSONL, .zst, .gz.
    #[arg(required = true)]
    text: Vec<PathBuf>,
    /// The most tokens of the vocabulary, the 256 bytes and the end-of-text token among them.
    #[arg(long, default_value_t = 8192)]
    vocab_size: usize,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The most bytes of text to read. Unset: everything.
    #[arg(long)]
    bytes_max: Option<u64>,
    /// The field of a JSONL record that holds the text.
    #[arg(long, default_value = "text")]
    text_field: String,
}

/// Runs the command.
pub fn run(command: &Command) -> Result<()> {
    let Command::Train(args) = command;
    let options = CorpusOptions { field: args.text_field.clone(), ..CorpusOptions::default() };
    let corpus = Corpus::open(&args.text, options)?;
    if let Ok(out) = args.out.canonicalize()
        && corpus.files().iter().any(|file| file.path.canonicalize().is_ok_and(|path| path == out))
    {
        bail!("--out {} is one of the texts, and would be replaced: give it a name of its own", args.out.display());
    }
    let mut told = std::time::Instant::now();
    let progress = |progress: TrainProgress| match progress {
        TrainProgress::Merging { bytes } => note(&format!("{} of text counted, merging pairs", format_bytes(bytes))),
        TrainProgress::Counting { bytes } if told.elapsed().as_secs() >= 5 => {
            told = std::time::Instant::now();
            note(&format!("counting: {}", format_bytes(bytes)));
        }
        TrainProgress::Counting { .. } => {}
    };
    let texts = corpus.texts(args.bytes_max.unwrap_or(u64::MAX));
    let tokenizer = Tokenizer::train_bpe(texts, args.vocab_size, progress).context("cannot train a tokenizer")?;
    tokenizer.save(&args.out)?;
    print(format_args!("{}: {} tokens\n", args.out.display(), tokenizer.vocab_size()))
}
