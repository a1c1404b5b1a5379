//! `trainyard data inspect`: shows tokens as text, with the boundaries of documents.
//!
//! For token files it shows documents; for a configuration, the samples that training reads.
//! Control characters are escaped, so that no corpus can move a terminal's cursor.

use super::inspect_text;
use super::objects::ObjectArgs;
use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use trainyard_data::corpus::is_url;
use trainyard_data::{Dataset, IGNORE, IndexedTokens, Sampling, Tokenizer};
use trainyard_engine::config::{Config, Inputs, Resolved};
use trainyard_engine::corpora::{Corpora, held_back_part, token_source, tokenizer_of};
use trainyard_engine::pretrained;
use trainyard_engine::resume::GoingOn;
use trainyard_engine::session::{Session, files, inputs_for};
use trainyard_engine::shape::model_spec;

/// Upper limit for the tokens of a document that are shown.
const SHOWN: u64 = 256;

/// Show the data that training reads: counts, and samples as text with the boundaries of documents.
///
/// In token files and text a sample is a document. In a configuration or a run it is a sequence of
/// the loader: packed documents, and the targets that count. Text that is not tokenized yet is
/// tokenized as by `train`.
#[derive(clap::Args)]
pub struct Args {
    /// Token files (the OUT of `data prepare`, or a .bin or .idx), a configuration in TOML, a run's
    /// folder, or text, perhaps as a URL.
    path: PathBuf,
    /// The number of the sample to show, from 0.
    #[arg(long, value_name = "N", default_value_t = 0)]
    sample: u64,
    /// The tokenizer of token files that have none beside them: a tokenizer.json, or a folder that
    /// has one.
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// The field of a JSONL record, or the column of a Parquet or MDS file, that holds the text.
    /// Unset: text.
    #[arg(long)]
    text_field: Option<String>,
    /// Show classes and sizes of images: a folder with a sub-folder for each class, or a shard.
    #[arg(long, conflicts_with_all = ["sample", "tokenizer", "sets", "text_field"])]
    images: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    objects: ObjectArgs,
}

/// The output of the command.
#[derive(Serialize)]
struct Inspection {
    /// Pairs of token files.
    corpora: Vec<CorpusCounts>,
    /// Pairs of token files for validation.
    validation: Vec<CorpusCounts>,
    tokenizer: Option<TokenizerCounts>,
    /// The cutting of samples; None for token files alone.
    samples: Option<SampleCounts>,
    sample: Sample,
}

#[derive(Serialize)]
struct CorpusCounts {
    prefix: PathBuf,
    tokens: u64,
    documents: u64,
    token_type: String,
    /// Tokens of a document: mean, median, longest.
    document_mean: f64,
    document_median: u64,
    document_longest: u64,
}

#[derive(Serialize)]
struct TokenizerCounts {
    kind: &'static str,
    vocab_size: usize,
    eos: Option<u32>,
}

#[derive(Serialize)]
struct SampleCounts {
    sequence_length: usize,
    sequences_per_epoch: u64,
    sampling: Sampling,
    respect_document_boundaries: bool,
    seed: u64,
}

/// A sample, divided at the beginnings of documents.
#[derive(Serialize)]
struct Sample {
    number: u64,
    /// The token files of the sample, and its place in them.
    prefix: PathBuf,
    first_token: u64,
    tokens: Vec<i32>,
    /// The target of each token, None if it does not count; None for token files alone.
    targets: Option<Vec<Option<i32>>>,
    /// The place of the sample in training; None for token files alone.
    place: Option<Place>,
    pieces: Vec<Piece>,
}

/// The place of a sample in training. Steps count from 1 as in metrics, the rest from 0.
#[derive(Serialize)]
struct Place {
    epoch: f64,
    step: u64,
    rank: u64,
    micro_batch: u64,
    row: u64,
}

/// The part of a document in a sample.
#[derive(Serialize)]
struct Piece {
    document: usize,
    /// The first token of the document that the sample has.
    from_token: u64,
    tokens: u64,
    document_tokens: u64,
    /// Targets that do not count.
    targets_masked: u64,
    /// None without a tokenizer.
    text: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if args.images {
        return super::images::inspect(&args.path, args.json);
    }
    let path = &args.path;
    let inspection = if let Some(prefix) = token_source(path) {
        if !args.sets.is_empty() {
            bail!("--set changes a configuration, and {} names token files", path.display());
        }
        if args.text_field.is_some() {
            bail!("--text-field is for text, and {} names token files", path.display());
        }
        of_tokens(&prefix, args)
    } else if path.join(files::CONFIG).is_file() {
        let going_on = GoingOn::new(path, &args.sets);
        Session::configuration(&going_on).map_err(Into::into).and_then(|config| of_training(&config, args))
    } else if path.is_file() && path.extension().is_some_and(|extension| extension == "toml" || extension == "json") {
        Config::load(Some(path), &args.sets).map_err(Into::into).and_then(|config| of_training(&config, args))
    } else if path.exists() || is_url(path) {
        if !args.sets.is_empty() {
            bail!("--set changes a configuration, and {} is text", path.display());
        }
        if args.tokenizer.is_some() {
            bail!("--tokenizer is for token files, and {} is text", path.display());
        }
        let text_field = args.text_field.as_deref().unwrap_or("text");
        let (sample, json, store) = (args.sample, args.json, args.objects.options());
        return inspect_text::run(&inspect_text::Args { path, sample, text_field, json, store });
    } else {
        let named = path.display();
        bail!("{named} does not exist: neither token files ({named}.idx, {named}.train.idx) nor a configuration")
    };
    let inspection = inspection.with_context(|| format!("cannot inspect {}", path.display()))?;
    if args.json {
        return print(format_args!("{}\n", serde_json::to_string(&inspection)?));
    }
    print(describe(&inspection))
}

/// Inspects token files: their documents, and those held back of them.
fn of_tokens(prefix: &Path, args: &Args) -> Result<Inspection> {
    let tokenizer = match &args.tokenizer {
        Some(path) => Some(pretrained::tokenizer_at(path)?),
        None => tokenizer_of(prefix)?,
    };
    if tokenizer.is_none() {
        note("no tokenizer lies beside these tokens: they are shown as numbers; give it by --tokenizer");
    }
    let corpus = IndexedTokens::open(prefix)?;
    let documents = corpus.documents() as u64;
    if args.sample >= documents {
        bail!("--sample {} does not exist: there are {documents} documents, from 0", args.sample);
    }
    let start = corpus.document_start(args.sample as usize);
    let range = start..corpus.tokens().min(start + SHOWN);
    let mut tokens = Vec::new();
    let vocabulary = tokenizer.as_ref().map_or(i32::MAX as u32, |tokenizer| tokenizer.vocab_size() as u32);
    corpus.read_into(range.clone(), vocabulary, &mut tokens)?;
    let held_back = held_back_part(&args.path).map(|prefix| IndexedTokens::open(&prefix)).transpose()?;
    let pieces = pieces(&corpus, range, &tokens, None, tokenizer.as_ref());
    Ok(Inspection {
        corpora: vec![counts(&corpus)],
        validation: held_back.iter().map(counts).collect(),
        tokenizer: tokenizer.as_ref().map(tokenizer_counts),
        samples: None,
        sample: Sample {
            number: args.sample,
            prefix: corpus.prefix().to_owned(),
            first_token: start,
            tokens,
            targets: None,
            place: None,
            pieces,
        },
    })
}

/// Inspects the samples that the loader makes for a training.
fn of_training(config: &Config, args: &Args) -> Result<Inspection> {
    if args.tokenizer.is_some() {
        bail!("--tokenizer is for token files; a configuration has tokenizer.path");
    }
    if args.text_field.is_some() {
        bail!("--text-field is for text; a configuration has data.text_field");
    }
    let mut inputs = inputs_for(config, Inputs::of_this_machine())?;
    let first = config.resolve(&inputs)?;
    let corpora = Corpora::open(&first, note)?;
    inputs.knows(&corpora.tokenizer);
    let resolved = config.resolve(&inputs)?;
    let dataset = corpora.dataset(&resolved, model_spec(&resolved)?.vocab_size)?;
    let validation = corpora.validation()?;
    let spec = dataset.spec();
    Ok(Inspection {
        corpora: dataset.corpora().iter().map(counts).collect(),
        validation: validation.iter().map(counts).collect(),
        tokenizer: Some(tokenizer_counts(&corpora.tokenizer)),
        samples: Some(SampleCounts {
            sequence_length: spec.sequence_length,
            sequences_per_epoch: dataset.samples_per_epoch(),
            sampling: spec.sampling,
            respect_document_boundaries: spec.respect_document_boundaries,
            seed: spec.seed,
        }),
        sample: fed(&dataset, &resolved, args.sample, &corpora.tokenizer)?,
    })
}

/// Sample `number` as the model receives it.
fn fed(dataset: &Dataset, resolved: &Resolved, number: u64, tokenizer: &Tokenizer) -> Result<Sample> {
    let (index, ranges) = dataset.locate(number);
    let corpus = &dataset.corpora()[index];
    let row = dataset.micro_batch(number, 1)?;
    let (steps, batch, in_step) = resolved.batches().place(number);
    let (micro, accumulation) = (batch.micro as u64, batch.accumulation as u64);
    let micro_batch = in_step / micro;
    let place = Place {
        epoch: number as f64 / dataset.samples_per_epoch() as f64,
        step: steps + 1,
        rank: micro_batch / accumulation,
        micro_batch: micro_batch % accumulation,
        row: in_step % micro,
    };
    Ok(Sample {
        number,
        prefix: corpus.prefix().to_owned(),
        first_token: ranges[0].start,
        pieces: ranges
            .into_iter()
            .scan(0, |at, range| {
                // The last token of a range is only a target.
                let inputs = range.start..range.end - 1;
                let held = *at..*at + (inputs.end - inputs.start) as usize;
                *at = held.end;
                let (tokens, targets) = (&row.tokens[held.clone()], &row.targets[held]);
                Some(pieces(corpus, inputs, tokens, Some(targets), Some(tokenizer)))
            })
            .flatten()
            .collect(),
        targets: Some(row.targets.iter().map(|target| Some(*target).filter(|target| *target != IGNORE)).collect()),
        tokens: row.tokens,
        place: Some(place),
    })
}

/// The `tokens` of `range`, divided at the beginnings of documents.
fn pieces(
    corpus: &IndexedTokens,
    range: Range<u64>,
    tokens: &[i32],
    targets: Option<&[i32]>,
    tokenizer: Option<&Tokenizer>,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let document = corpus.document_of(at);
        let whole = corpus.document(document);
        let end = whole.end.min(range.end);
        let held = (at - range.start) as usize..(end - range.start) as usize;
        let ids: Vec<u32> = tokens[held.clone()].iter().map(|token| *token as u32).collect();
        let masked = targets.map_or(0, |targets| targets[held].iter().filter(|target| **target == IGNORE).count());
        pieces.push(Piece {
            document,
            from_token: at - whole.start,
            tokens: end - at,
            document_tokens: whole.end - whole.start,
            targets_masked: masked as u64,
            text: tokenizer.map(|tokenizer| decoded(tokenizer, &ids)),
        });
        at = end;
    }
    pieces
}

/// Decodes `ids` with a visible end of document. Other special tokens decode as usual.
fn decoded(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    match ids.split_last() {
        Some((last, text)) if Some(*last) == tokenizer.eos() => tokenizer.decode(text) + "<end of text>",
        _ => tokenizer.decode(ids),
    }
}

fn counts(corpus: &IndexedTokens) -> CorpusCounts {
    let mut lengths: Vec<u64> = (0..corpus.documents())
        .map(|document| {
            let range = corpus.document(document);
            range.end - range.start
        })
        .collect();
    lengths.sort_unstable();
    CorpusCounts {
        prefix: corpus.prefix().to_owned(),
        tokens: corpus.tokens(),
        documents: lengths.len() as u64,
        token_type: corpus.token_type().to_string(),
        document_mean: corpus.tokens() as f64 / lengths.len().max(1) as f64,
        document_median: lengths.get(lengths.len() / 2).copied().unwrap_or(0),
        document_longest: lengths.last().copied().unwrap_or(0),
    }
}

fn tokenizer_counts(tokenizer: &Tokenizer) -> TokenizerCounts {
    TokenizerCounts { kind: tokenizer.kind(), vocab_size: tokenizer.vocab_size(), eos: tokenizer.eos() }
}

fn describe(inspection: &Inspection) -> String {
    let Inspection { corpora, validation, tokenizer, samples, sample } = inspection;
    let mut text = String::new();
    for (what, corpus) in
        corpora.iter().map(|corpus| ("training", corpus)).chain(validation.iter().map(|corpus| ("validation", corpus)))
    {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{what:<12} {}: {} tokens in {} documents, as {}\n             tokens a document: mean {:.1}, median {}, longest {}",
            corpus.prefix.display(),
            count(corpus.tokens),
            count(corpus.documents),
            corpus.token_type,
            corpus.document_mean,
            count(corpus.document_median),
            count(corpus.document_longest)
        );
    }
    if let Some(TokenizerCounts { kind, vocab_size, eos }) = tokenizer {
        let eos = eos.map_or("no token ends a text".to_owned(), |eos| format!("token {eos} ends a text"));
        let _ = writeln!(text, "vocabulary   {} tokens ({kind}), {eos}", count(*vocab_size as u64));
    }
    if let Some(samples) = samples {
        let order = match samples.sampling {
            Sampling::Packed => format!("packed, shuffled by seed {}", samples.seed),
            Sampling::InOrder => "packed, in order".to_owned(),
            Sampling::Random => format!("drawn at random by seed {}", samples.seed),
            Sampling::BestFit => format!("whole documents by best fit, shuffled by seed {}", samples.seed),
        };
        let apart = if samples.respect_document_boundaries { "kept apart" } else { "not kept apart" };
        let _ = writeln!(
            text,
            "samples      {} of {} tokens an epoch; {order}; documents are {apart}",
            count(samples.sequences_per_epoch),
            count(samples.sequence_length as u64)
        );
    }
    text + "\n" + &shown(sample)
}

fn shown(sample: &Sample) -> String {
    let last = (sample.first_token + sample.tokens.len() as u64).saturating_sub(1);
    let mut text = format!(
        "sample {}: tokens {} to {} of {}\n",
        sample.number,
        count(sample.first_token),
        count(last),
        sample.prefix.display()
    );
    if let Some(Place { epoch, step, rank, micro_batch, row }) = sample.place {
        let _ =
            writeln!(text, "fed in step {step} to rank {rank}, micro-batch {micro_batch}, row {row}; epoch {epoch:.2}");
    }
    for piece in &sample.pieces {
        let place = match (piece.from_token, piece.tokens == piece.document_tokens) {
            (_, true) => format!("all its {} tokens", count(piece.tokens)),
            (0, false) => format!("its first {} of {} tokens", count(piece.tokens), count(piece.document_tokens)),
            (from, false) => {
                format!("{} of its {} tokens, from {}", count(piece.tokens), count(piece.document_tokens), count(from))
            }
        };
        let masked = match piece.targets_masked {
            0 => String::new(),
            1 => "; 1 target does not count".to_owned(),
            masked => format!("; {masked} targets do not count"),
        };
        let _ = writeln!(text, "--- document {}: {place}{masked}", count(piece.document as u64));
        match &piece.text {
            Some(decoded) => text += &escaped(decoded),
            // Without a tokenizer the tokens are shown as numbers.
            None => {
                let first = sample.pieces.iter().take_while(|other| !std::ptr::eq(*other, piece));
                let first = first.map(|other| other.tokens as usize).sum::<usize>();
                let _ = writeln!(text, "{:?}", &sample.tokens[first..first + piece.tokens as usize]);
            }
        }
    }
    text
}

/// The lines of a text, indented, with control characters as escapes. Each line ends in a visible
/// `\n`.
pub(super) fn escaped(text: &str) -> String {
    let character = |c: char| match c {
        '"' | '\'' => c.to_string(),
        _ => c.escape_debug().to_string(),
    };
    let line = |line: &str| format!("  {}\n", line.chars().map(character).collect::<String>());
    text.split_inclusive('\n').map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_escaped() {
        let text = escaped("é \"a\\\u{1b}[2J\r\nb\u{202e}\u{7}");
        assert_eq!(text, "  é \"a\\\\\\u{1b}[2J\\r\\n\n  b\\u{202e}\\u{7}\n");
    }
}
