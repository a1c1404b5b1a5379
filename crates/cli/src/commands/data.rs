//! `trainyard data`: makes token files from text, and shows the samples that training reads.

use super::objects::note_traffic;
use super::{clean, feed, inspect};
use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use trainyard_base::format_bytes;
use trainyard_data::{ChatOptions, LossOn, PrepareOptions, PrepareProgress, Prepared, Sidecar, Tokenizer, prepare};
use trainyard_engine::corpora::chat_template;
use trainyard_engine::pretrained;

/// Clean and prepare text for training, show the samples that training reads, and measure how fast
/// they come.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Tokenize text into token files (Megatron's .bin and .idx) that `train` reads: name OUT in
    /// data.train.
    Prepare(PrepareArgs),
    Inspect(inspect::Args),
    Dedup(clean::DedupArgs),
    Filter(clean::FilterArgs),
    Mix(clean::MixArgs),
    Bench(feed::BenchArgs),
    Warm(feed::WarmArgs),
}

/// Arguments of `data prepare`.
#[derive(clap::Args)]
pub struct PrepareArgs {
    #[command(flatten)]
    text: clean::TextArgs,
    /// A tokenizer.json, a folder or a GGUF file that has one, `bytes`, or `characters` (those of
    /// the text).
    #[arg(long, value_name = "FILE")]
    tokenizer: String,
    /// Prefix of the files to write: OUT.train.bin, OUT.train.idx, OUT.validation.*,
    /// OUT.tokenizer.json, OUT.json.
    #[arg(long)]
    out: PathBuf,
    /// The share held back for validation; 0 for none.
    #[arg(long, default_value_t = trainyard_data::prepare::VALIDATION_FRACTION, allow_negative_numbers = true)]
    validation_fraction: f64,
    /// Seed for the choice of those documents.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
    /// Put no end-of-text token after each document.
    #[arg(long)]
    no_eos: bool,
    /// Begin each document with the tokenizer's beginning-of-text token: true or false. Unset: as
    /// the tokenizer asks.
    #[arg(long, value_name = "BOOL")]
    add_bos: Option<bool>,
    /// Read conversations: JSONL with `messages`, `conversations`, or `prompt` and `completion`.
    #[arg(long, conflicts_with_all = ["document_separator", "text_field"])]
    chat: bool,
    /// The part of a conversation that is learned.
    #[arg(long, value_enum, value_name = "PART", default_value_t = LossPart::Answers, requires = "chat")]
    loss_on: LossPart,
    /// A file with a chat template in Jinja, or `chatml`. Unset: that of the tokenizer.
    #[arg(long, value_name = "FILE", requires = "chat")]
    chat_template: Option<PathBuf>,
    /// A line of text that separates documents within a file.
    #[arg(long, value_name = "TEXT")]
    document_separator: Option<String>,
    /// Tokenize again even if an earlier result has the same files, tokenizer and options.
    #[arg(long)]
    again: bool,
}

/// The values of `--loss-on`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum LossPart {
    /// Every message of the assistant, or the completion.
    Answers,
    /// The last of them.
    LastAnswer,
    /// Everything.
    All,
}

impl From<LossPart> for LossOn {
    fn from(part: LossPart) -> LossOn {
        match part {
            LossPart::Answers => LossOn::Answers,
            LossPart::LastAnswer => LossOn::LastAnswer,
            LossPart::All => LossOn::All,
        }
    }
}

/// Runs the command.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Prepare(args) => prepare_text(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Dedup(args) => clean::run_dedup(args),
        Command::Filter(args) => clean::run_filter(args),
        Command::Mix(args) => clean::run_mix(args),
        Command::Bench(args) => feed::run_bench(args),
        Command::Warm(args) => feed::run_warm(args),
    }
}

fn prepare_text(args: &PrepareArgs) -> Result<()> {
    if args.chat && args.tokenizer == "characters" {
        bail!("--chat: no tokenizer is made of conversations: give that of the model, or `bytes`");
    }
    let corpus = match args.chat {
        true => args.text.open_records()?,
        false => args.text.open(args.document_separator.as_deref())?,
    };
    let tokenizer = match args.tokenizer.as_str() {
        "bytes" => Tokenizer::bytes(),
        "characters" => Tokenizer::characters_from_texts(corpus.texts(u64::MAX))?,
        path => pretrained::tokenizer_at(Path::new(path))?,
    };
    let tokenizer = tokenizer.with_bos(args.add_bos).context("--add-bos")?;
    if let Some(words) = tokenizer.around_in_words() {
        note(&format!("the tokenizer {words}"));
    }
    let template = args.chat_template.as_deref().map(chat_template).transpose()?.or_else(|| tokenizer.chat_template());
    let tokenizer = match template.as_deref().filter(|_| args.chat) {
        Some(template) => tokenizer.with_chat_template(template),
        None => tokenizer,
    };
    let options = PrepareOptions {
        validation_fraction: args.validation_fraction,
        seed: args.seed,
        workers: args.workers,
        append_eos: !args.no_eos,
        reuse: !args.again,
        chat: args.chat.then(|| ChatOptions { template, loss_on: args.loss_on.into() }),
        ..PrepareOptions::new(&args.out)
    };
    let made = prepare(&corpus, &tokenizer, &options, tokenizing())
        .with_context(|| format!("cannot prepare {}", args.out.display()))?;
    note_traffic([&corpus]);
    // The place where `train` looks for the tokenizer of token files.
    let beside = made.train.with_extension("tokenizer.json");
    tokenizer.save(&beside).with_context(|| format!("cannot write {}", beside.display()))?;
    report(&made, &args.out, &beside)
}

/// A callback that prints the progress of tokenizing every few seconds.
pub fn tokenizing() -> impl FnMut(PrepareProgress) {
    const EVERY_S: u64 = 5;
    let mut told = std::time::Instant::now();
    move |progress| {
        if progress.waits {
            return note("another process prepares the same files: waiting for it");
        }
        if told.elapsed().as_secs() >= EVERY_S {
            told = std::time::Instant::now();
            note(&format!(
                "tokenizing: {} of {} of files, {} documents, {} tokens",
                format_bytes(progress.text_bytes),
                format_bytes(progress.source_bytes),
                count(progress.documents),
                count(progress.tokens)
            ));
        }
    }
}

fn report(made: &Prepared, out: &Path, tokenizer: &Path) -> Result<()> {
    let Sidecar { train, validation, empty_documents, invalid_documents, split, .. } = &made.sidecar;
    print(format_args!("{}: {}\n", if made.reused { "kept" } else { "made" }, made.reason))?;
    for (what, prefix, part) in
        [("training", Some(&made.train), Some(train)), ("validation", made.validation.as_ref(), validation.as_ref())]
    {
        let (Some(prefix), Some(part)) = (prefix, part) else { continue };
        print(format_args!(
            "{what:<11} {}.bin: {} documents, {} tokens{} as {}, {} of text\n",
            prefix.display(),
            count(part.documents),
            count(part.tokens),
            part.learned.map_or(String::new(), |learned| format!(" ({} of them learned)", count(learned))),
            part.token_type,
            format_bytes(part.text_bytes)
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
