//! `trainyard data dedup`, `data filter` and `data mix`: text with less in it, or of several
//! corpora.

use super::export::parse_size;
use super::objects::{ObjectArgs, Part, note_traffic, parse_part};
use crate::output::{count, note, print};
use anyhow::{Context, Result, anyhow, bail};
use std::path::{Path, PathBuf};
use trainyard_base::format_bytes;
use trainyard_data::clean::{
    DedupOptions, FilterOptions, Language, Method, MixOptions, Report, Rule, Shape, dedup, filter, mix,
};
use trainyard_data::{Corpus, CorpusOptions, OnInvalid};

/// The text that a command reads.
#[derive(clap::Args)]
pub struct TextArgs {
    /// Files, folders, patterns or URLs (s3://, gs://, az://, https://) of text, JSONL, Parquet,
    /// WebDataset tar, MDS, .zst, .gz.
    #[arg(required = true)]
    text: Vec<PathBuf>,
    /// Read only part K of N: whole files, dealt by size, so that N hosts share the work.
    #[arg(long, value_name = "K/N", value_parser = parse_part)]
    part: Option<Part>,
    #[command(flatten)]
    options: TextOptions,
}

/// The way in which text is read.
#[derive(clap::Args)]
struct TextOptions {
    /// The field of a JSONL record, or the column of a Parquet or MDS file, that holds the text.
    #[arg(long, default_value = "text")]
    text_field: String,
    /// Skip documents that cannot be used, instead of stopping.
    #[arg(long)]
    skip_invalid: bool,
    #[command(flatten)]
    objects: ObjectArgs,
}

impl TextArgs {
    /// Lists the text, whose files `separator` divides into documents.
    pub fn open(&self, separator: Option<&str>) -> Result<Corpus> {
        self.part(self.options.open(&self.text, separator, false)?)
    }

    /// The same for records that are taken whole.
    pub fn open_records(&self) -> Result<Corpus> {
        self.part(self.options.open(&self.text, None, true)?)
    }

    fn part(&self, corpus: Corpus) -> Result<Corpus> {
        match self.part {
            Some(Part { part, parts }) => Ok(corpus.part(part, parts)?),
            None => Ok(corpus),
        }
    }
}

impl TextOptions {
    fn open(&self, paths: &[PathBuf], separator: Option<&str>, whole_records: bool) -> Result<Corpus> {
        let options = CorpusOptions {
            whole_records,
            field: self.text_field.clone(),
            document_separator: separator.map(str::to_owned),
            on_invalid: OnInvalid::skipping(self.skip_invalid),
            store: self.objects.options(),
            ..CorpusOptions::default()
        };
        Ok(Corpus::open(paths, options)?)
    }
}

/// Remove documents that are equal, or nearly equal, to an earlier one.
///
/// Near duplicates share word n-grams: two documents are compared by the Jaccard similarity of
/// their sets of n-grams, which sketches estimate. The first document of each cluster is kept.
#[derive(clap::Args)]
pub struct DedupArgs {
    #[command(flatten)]
    text: TextArgs,
    /// Prefix of the files to write: OUT.jsonl.zst, OUT.dropped and OUT.report.json.
    #[arg(long)]
    out: PathBuf,
    /// Drop documents with the same bytes only.
    #[arg(long)]
    exact: bool,
    /// Words of an n-gram.
    #[arg(long, default_value_t = Shape::default().ngram, conflicts_with = "exact")]
    ngram: usize,
    /// Bands of a sketch. More find less similar documents.
    #[arg(long, default_value_t = Shape::default().bands, conflicts_with = "exact")]
    bands: usize,
    /// Numbers in a band. More find only more similar documents.
    #[arg(long, default_value_t = Shape::default().rows, conflicts_with = "exact")]
    rows: usize,
    /// Memory for grouping, such as 1GiB; what needs more is spilled to disk beside OUT.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    memory: u64,
    /// Threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
}

/// Drop documents that break rules of quality or are in another language, and mask personal data.
///
/// Rules: gopher-quality, gopher-repetition, c4, c4-lenient (without its rule that lines end in
/// punctuation), fineweb. FineWeb's own order is
/// --rules gopher-repetition,gopher-quality,c4-lenient,fineweb.
#[derive(clap::Args)]
pub struct FilterArgs {
    #[command(flatten)]
    text: TextArgs,
    /// Prefix of the files to write: OUT.jsonl.zst, OUT.dropped and OUT.report.json.
    #[arg(long)]
    out: PathBuf,
    /// Rules, applied in this order.
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    rules: Vec<String>,
    /// Languages to keep, such as en or eng.
    #[arg(long, value_name = "CODE", value_delimiter = ',')]
    language: Vec<String>,
    /// Least confidence in a document's language, from 0 to 1.
    #[arg(long, default_value_t = 0.65, allow_negative_numbers = true, requires = "language")]
    language_confidence: f64,
    /// Mask e-mail addresses and public IPv4 addresses.
    #[arg(long)]
    mask_pii: bool,
    /// Threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
}

/// Mix corpora into one by their shares of the bytes of text.
#[derive(clap::Args)]
pub struct MixArgs {
    /// Corpora with their weights, such as web/=3 code.parquet=1.
    #[arg(required = true, value_name = "TEXT=WEIGHT")]
    corpora: Vec<String>,
    #[command(flatten)]
    options: TextOptions,
    /// Prefix of the files to write: OUT.jsonl.zst, OUT.report.json.
    #[arg(long)]
    out: PathBuf,
    /// Text to write, such as 10GB; a corpus that ends is begun again. Unset: until one ends.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    bytes: Option<u64>,
}

/// Runs `data dedup`.
pub fn run_dedup(args: &DedupArgs) -> Result<()> {
    let corpus = args.text.open(None)?;
    let method = match args.exact {
        true => Method::Exact,
        false => Method::Near(Shape { ngram: args.ngram, bands: args.bands, rows: args.rows }),
    };
    let options = DedupOptions { out: args.out.clone(), method, memory_bytes: args.memory, workers: args.workers };
    let report = dedup(&corpus, &options, note).context("cannot deduplicate")?;
    note_traffic([&corpus]);
    describe(&report, &args.out)
}

/// Runs `data filter`.
pub fn run_filter(args: &FilterArgs) -> Result<()> {
    let rule = |name: &String| {
        let found = Rule::ALL.iter().find(|(known, _)| known == name).map(|(_, rule)| *rule);
        let names = Rule::ALL.map(|(name, _)| name).join(", ");
        found.ok_or_else(|| anyhow!("--rules: there is no rule {name:?}; take some of {names}"))
    };
    let rules = args.rules.iter().map(rule).collect::<Result<Vec<_>>>()?;
    let languages = args.language.iter().map(|code| Language::of_code(code)).collect::<Result<Vec<_>, _>>();
    let options = FilterOptions {
        out: args.out.clone(),
        rules,
        languages: languages.context("--language")?,
        confidence_min: args.language_confidence,
        mask_pii: args.mask_pii,
        workers: args.workers,
    };
    let corpus = args.text.open(None)?;
    let report = filter(&corpus, &options).context("cannot filter")?;
    note_traffic([&corpus]);
    describe(&report, &args.out)
}

/// Runs `data mix`.
pub fn run_mix(args: &MixArgs) -> Result<()> {
    let (mut corpora, mut weights) = (Vec::new(), Vec::new());
    for given in &args.corpora {
        let Some((path, weight)) = given.rsplit_once('=') else {
            bail!("{given:?} has no weight: write TEXT=WEIGHT, such as web.jsonl=3");
        };
        let number: f64 = weight.parse().map_err(|_| anyhow!("{given:?}: {weight:?} is not a number"))?;
        weights.push(number);
        corpora.push(args.options.open(&[PathBuf::from(path)], None, false)?);
    }
    let mixed =
        mix(&corpora, &MixOptions { out: args.out.clone(), weights, bytes: args.bytes }).context("cannot mix")?;
    note_traffic(&corpora);
    let total = mixed.report.kept_bytes.max(1) as f64;
    for (given, share) in args.corpora.iter().zip(&mixed.shares) {
        print(format_args!(
            "{:<24} {} documents, {}, {:.2} % of the text, pass {}\n",
            given.rsplit_once('=').map_or(given.as_str(), |(path, _)| path),
            count(share.documents),
            format_bytes(share.bytes),
            share.bytes as f64 / total * 100.0,
            share.passes
        ))?;
    }
    describe(&mixed.report, &args.out)
}

fn describe(report: &Report, out: &Path) -> Result<()> {
    let of_all = |documents: u64| documents as f64 / report.documents.max(1) as f64 * 100.0;
    let line = |what: &str, documents: u64, bytes: u64| {
        print(format_args!(
            "{what:<44} {:>12} documents {:>6.2} % {:>12}\n",
            count(documents),
            of_all(documents),
            format_bytes(bytes)
        ))
    };
    line("read", report.documents, report.bytes)?;
    for (reason, dropped) in &report.dropped {
        line(&format!("dropped: {reason}"), dropped.documents, dropped.bytes)?;
    }
    for (change, documents) in &report.changed {
        print(format_args!("changed: {change:<35} {:>12} documents\n", count(*documents)))?;
    }
    if report.empty + report.invalid > 0 {
        print(format_args!("passed over {} empty and {} invalid documents\n", report.empty, report.invalid))?;
    }
    line("kept", report.kept, report.kept_bytes)?;
    let out = out.display();
    print(format_args!("text: {out}.jsonl.zst"))?;
    if report.dropped_documents() > 0 {
        print(format_args!(", and what was dropped: `trainyard data inspect {out}.dropped`"))?;
    }
    print("\n")
}
