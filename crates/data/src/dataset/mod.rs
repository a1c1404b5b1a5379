//! Samples from token files: sample `i` is a pure function of (specification, `i`).
//!
//! The documents of a corpus form one long sequence of tokens. A sample is `sequence_length` + 1 of
//! them: the inputs, and the targets one token further. `packed` sampling cuts the sequence into
//! rows and gives out every row once an epoch in a seeded order. The cuts shift from epoch to
//! epoch, so that no tail is left out for ever. `in_order` gives the rows out as they lie. `random`
//! sampling draws offsets uniformly, with replacement. `best_fit` sampling puts whole documents
//! into rows, and gives out every row once an epoch in a seeded order. Corpora are mixed by a fixed
//! table that follows the weights as evenly as whole samples allow.
//!
//! Nothing here has state. Any number of ranks and workers therefore gives out the same samples,
//! and a position is one number.

mod batch;
mod mixture;
mod packing;
mod spans;
mod transforms;

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

pub use batch::{IGNORE, MicroBatch};
pub(crate) use mixture::check_weights;
pub use packing::PackingReport;
pub use spans::{SpanCorruption, SpanLengths, SpanShape};
pub use transforms::{FillInTheMiddle, LengthCurriculum, Transforms};

use crate::error::{DataError, Result};
use crate::indexed::IndexedTokens;
use crate::prepare::Sidecar;
use crate::rng::{Permutation, Stream};
use mixture::Mixture;
use packing::Packing;
use transforms::PLACES;

/// The specification of a sequence of samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DatasetSpec {
    /// One or several corpora.
    pub sources: Vec<Source>,
    /// Input tokens of a sample.
    pub sequence_length: usize,
    /// Tokens must be below this number, which is the number of rows of the model's embedding.
    pub vocab_size: u32,
    /// True if a sample is divided into segments at document boundaries, so that no token attends
    /// to, or predicts, another document. Otherwise a sample is one segment.
    pub respect_document_boundaries: bool,
    /// The choice of tokens for each sample.
    pub sampling: Sampling,
    /// Seed of the order.
    pub seed: u64,
    /// Changes to the samples.
    #[serde(default)]
    pub transforms: Transforms,
}

impl DatasetSpec {
    /// Tokens of text of a sample: its positions, unless spans of a longer text are taken out.
    pub fn text_length(&self) -> usize {
        let spans = self.transforms.span_corruption.as_ref();
        spans.and_then(|spans| spans.shape.lengths(self.sequence_length)).map_or(self.sequence_length, |l| l.text)
    }
}

/// One corpus of a mixture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// Prefix of its token files.
    pub prefix: PathBuf,
    /// Its share of the samples, relative to the other weights.
    pub weight: f64,
}

/// The choice of tokens for each sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// Every row once an epoch, in a seeded order.
    Packed,
    /// Every row once an epoch, in the order of the text. The first pass begins at the first token,
    /// the second ends at the last, and so on in turn.
    InOrder,
    /// Uniformly random offsets.
    Random,
    /// Whole documents, each in the fullest row that has room; every row once an epoch, in a seeded
    /// order.
    BestFit,
}

/// A position in the endless sequence of samples, part of every checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// Number of samples given out so far, to all ranks together.
    pub samples: u64,
}

/// Opened corpora and the rule that draws samples from them.
#[derive(Debug)]
pub struct Dataset {
    spec: DatasetSpec,
    corpora: Vec<IndexedTokens>,
    /// Hash of each corpus's tokens, if its description has one.
    hashes: Vec<Option<String>>,
    mixture: Mixture,
    /// The rows of each corpus, for best-fit sampling.
    packings: Vec<Packing>,
}

/// The random streams of a corpus: bits 2 and up hold the number of the corpus, these constants the
/// bits below.
const STREAM_ORDER: u32 = 0;
const STREAM_SHIFT: u32 = 1;
const STREAM_OFFSET: u32 = 2;

impl Dataset {
    /// Opens and validates every corpus.
    ///
    /// Refuses a corpus prepared for a larger vocabulary, with less than one sample, or damaged;
    /// weights that are not positive; a `sequence_length` of 0.
    pub fn open(spec: DatasetSpec) -> Result<Self> {
        check(&spec)?;
        let mut corpora = Vec::with_capacity(spec.sources.len());
        let mut hashes = Vec::with_capacity(spec.sources.len());
        for source in &spec.sources {
            let (corpus, hash) = open_source(&source.prefix, &spec)?;
            corpora.push(corpus);
            hashes.push(hash);
        }
        let weights: Vec<f64> = spec.sources.iter().map(|s| s.weight).collect();
        let mut packings = Vec::new();
        if spec.sampling == Sampling::BestFit {
            packings.extend(corpora.iter().map(|c| Packing::best_fit(documents_of(c), spec.sequence_length)));
        }
        if let Some(c) = packings.iter().position(|packing| packing.report().rows == 0) {
            return Err(DataError::TooLittle {
                what: format!("{} has no document of two tokens", corpora[c].prefix().display()),
                fix: "give text with longer documents".into(),
            });
        }
        Ok(Self { mixture: Mixture::new(&weights)?, spec, corpora, hashes, packings })
    }

    /// The specification that it was opened with.
    pub fn spec(&self) -> &DatasetSpec {
        &self.spec
    }

    /// The corpora, in the order of the sources.
    pub fn corpora(&self) -> &[IndexedTokens] {
        &self.corpora
    }

    /// Number of tokens of all corpora together.
    pub fn tokens(&self) -> u64 {
        self.corpora.iter().map(IndexedTokens::tokens).sum()
    }

    /// Number of samples until the corpora together have given as many tokens as they hold. It is
    /// informative only, because the corpora of a mixture come to their ends at different times.
    pub fn samples_per_epoch(&self) -> u64 {
        (0..self.corpora.len()).map(|c| self.rows(c)).sum()
    }

    /// The tokens dealt before `position`, as a multiple of those that the corpora hold together.
    pub fn passes(&self, position: Position) -> f64 {
        position.samples as f64 / self.samples_per_epoch() as f64
    }

    /// The number of passes over corpus `c` at `position`, with fractions.
    pub fn epochs(&self, c: usize, position: Position) -> f64 {
        self.mixture.samples_before(position.samples, c) as f64 / self.rows(c) as f64
    }

    /// Identifies the samples and their order: equal fingerprints mean equal samples. A resumed run
    /// compares it.
    pub fn fingerprint(&self) -> String {
        let mut hash = Xxh3::new();
        let spec = &self.spec;
        let numbers = [
            spec.sequence_length as u64,
            u64::from(spec.respect_document_boundaries),
            match spec.sampling {
                Sampling::Random => 0,
                Sampling::Packed => 1,
                Sampling::InOrder => 2,
                Sampling::BestFit => 3,
            },
            spec.seed,
        ];
        numbers.iter().for_each(|n| hash.update(&n.to_le_bytes()));
        for ((source, corpus), tokens) in spec.sources.iter().zip(&self.corpora).zip(&self.hashes) {
            hash.update(&source.weight.to_le_bytes());
            hash.update(tokens.as_deref().unwrap_or("unknown").as_bytes());
            corpus.fingerprint_into(&mut hash);
        }
        if spec.transforms != Transforms::default() {
            hash.update(spec.transforms.identity().as_bytes());
        }
        format!("{:016x}", hash.digest())
    }

    /// Samples `first..first + rows` as one micro-batch of `rows` rows.
    pub fn micro_batch(&self, first: u64, rows: usize) -> Result<MicroBatch> {
        let spec = &self.spec;
        let (seed, vocab_size, transforms) = (spec.seed, spec.vocab_size, &spec.transforms);
        let mut batch = MicroBatch::with_capacity(rows, spec.sequence_length);
        let mut tokens = Vec::with_capacity(spec.sequence_length + 1);
        for sample in first..first + rows as u64 {
            let (corpus, ranges) = self.locate(sample);
            let corpus = &self.corpora[corpus];
            tokens.clear();
            if spec.sampling == Sampling::BestFit {
                let mut sections = Vec::with_capacity(ranges.len());
                for range in &ranges {
                    let begin = tokens.len();
                    corpus.read_into(range.clone(), vocab_size, &mut tokens)?;
                    sections.push(begin..tokens.len());
                }
                transforms.fill(seed, sample, &sections, &mut tokens);
                batch.push_pieces(&tokens, &sections, &ranges, corpus, spec.respect_document_boundaries);
            } else {
                for range in ranges {
                    corpus.read_into(range.clone(), vocab_size, &mut tokens)?;
                    if let Some(spans) = &transforms.span_corruption {
                        let lengths = spans.lengths(spec.sequence_length)?;
                        batch.push_corrupted(&tokens[..lengths.text], spans, lengths, seed, sample * PLACES);
                        continue;
                    }
                    if transforms.fill_in_the_middle.is_some() {
                        transforms.fill(seed, sample, &sections_of(corpus, &range), &mut tokens);
                    }
                    batch.push_row(&tokens, range.start, corpus, spec.respect_document_boundaries);
                }
            }
            transforms.finish_row(seed, sample, vocab_size, &mut batch);
        }
        Ok(batch)
    }

    /// The corpus of sample `i`, and the ranges of its tokens: one, or for best-fit sampling one a
    /// piece. A range holds inputs and one token more, the last target.
    pub fn locate(&self, i: u64) -> (usize, Vec<Range<u64>>) {
        let (c, nth) = self.mixture.place(i);
        let corpus = &self.corpora[c];
        let length = self.spec.text_length() as u64;
        let stream = (c as u32) << 2;
        let rows = self.rows(c);
        let (epoch, place) = (nth / rows, nth % rows);
        let shuffled = || Permutation::new(rows, self.spec.seed, stream | STREAM_ORDER, epoch).apply(place);
        let slack = (corpus.tokens() - 1) % length;
        let start = match self.spec.sampling {
            // Draws among all offsets that have length + 1 tokens.
            Sampling::Random => {
                Stream::new(self.spec.seed, stream | STREAM_OFFSET).below(nth, corpus.tokens() - length)
            }
            Sampling::BestFit => return (c, self.packings[c].row(shuffled()).collect()),
            Sampling::InOrder => place * length + epoch % 2 * slack,
            Sampling::Packed => {
                let shift = Stream::new(self.spec.seed, stream | STREAM_SHIFT).below(epoch, slack + 1);
                shuffled() * length + shift
            }
        };
        let row = start..start + length + 1;
        (c, vec![row])
    }

    /// Asks the kernel to bring all corpora into memory in the background.
    pub fn warm(&self) {
        self.corpora.iter().for_each(IndexedTokens::warm);
    }

    /// Brings all corpora into memory, and returns when they are there.
    pub fn read_ahead(&self) -> Result<()> {
        self.corpora.iter().try_for_each(|corpus| corpus.read_ahead().map(drop))
    }

    /// Number of rows of corpus `c` in one epoch; at least one, by [`Dataset::open`].
    fn rows(&self, c: usize) -> u64 {
        match self.packings.get(c) {
            Some(packing) => packing.report().rows,
            None => rows_of(self.corpora[c].tokens(), self.spec.text_length()),
        }
    }
}

/// Samples that a corpus gives in one epoch.
pub fn rows_in_epoch(corpus: &IndexedTokens, sequence_length: usize, sampling: Sampling) -> u64 {
    match sampling {
        Sampling::BestFit => packing_report(corpus, sequence_length, sampling).rows,
        _ => rows_of(corpus.tokens(), sequence_length),
    }
}

/// Counts of the rows that `sampling` makes of a corpus, in its first epoch if they shift.
pub fn packing_report(corpus: &IndexedTokens, sequence_length: usize, sampling: Sampling) -> PackingReport {
    match sampling {
        Sampling::BestFit => Packing::best_fit(documents_of(corpus), sequence_length).report(),
        _ => packing::back_to_back(documents_of(corpus), sequence_length),
    }
}

/// The documents of a corpus, as ranges of its tokens.
fn documents_of(corpus: &IndexedTokens) -> impl Iterator<Item = Range<u64>> + '_ {
    (0..corpus.documents()).map(|document| corpus.document(document))
}

/// The documents in a range of tokens, counted from its beginning.
fn sections_of(corpus: &IndexedTokens, range: &Range<u64>) -> Vec<Range<usize>> {
    let mut sections = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let end = corpus.document(corpus.document_of(at)).end.min(range.end);
        sections.push((at - range.start) as usize..(end - range.start) as usize);
        at = end;
    }
    sections
}

/// Rows that `tokens` tokens give in one epoch: each takes a token more than its inputs, and
/// shares it with the next.
pub fn rows_of(tokens: u64, sequence_length: usize) -> u64 {
    tokens.saturating_sub(1) / sequence_length.max(1) as u64
}

fn check(spec: &DatasetSpec) -> Result<()> {
    if spec.sources.is_empty() {
        return Err(DataError::setting("sources", "is empty", "name at least one prepared corpus"));
    }
    // Positions in a row and starts of segments in a micro-batch are i32.
    if !(1..=1 << 24).contains(&spec.sequence_length) {
        let what = format!("is {}", spec.sequence_length);
        return Err(DataError::setting("sequence_length", what, "take a length from 1 to 2^24"));
    }
    if spec.vocab_size == 0 {
        return Err(DataError::setting("vocab_size", "is 0", "give the model's vocabulary size"));
    }
    if spec.transforms.span_corruption.is_some() && spec.sampling == Sampling::BestFit {
        let what = "is given with best-fit sampling".to_owned();
        return Err(DataError::setting("span_corruption_rate", what, "cut rows of equal length: packed, or random"));
    }
    spec.transforms.check(spec.sequence_length, spec.vocab_size)
}

/// Opens a corpus, with the hash of its tokens if its description has one.
fn open_source(prefix: &Path, spec: &DatasetSpec) -> Result<(IndexedTokens, Option<String>)> {
    let corpus = IndexedTokens::open(prefix)?;
    let mut hash = None;
    if let Some((sidecar, part)) = Sidecar::of_part(corpus.prefix())? {
        if sidecar.tokenizer.vocab_size > spec.vocab_size as usize {
            return Err(DataError::Vocabulary {
                origin: prefix.display().to_string(),
                what: format!(
                    "was prepared with a vocabulary of {}, the model has {}",
                    sidecar.tokenizer.vocab_size, spec.vocab_size
                ),
                fix: "prepare it with the model's tokenizer, or give the model the tokenizer's vocabulary".into(),
            });
        }
        if (part.tokens, part.documents) != (corpus.tokens(), corpus.documents() as u64) {
            let what = format!(
                "has {} tokens in {} documents where its description says {} in {}",
                corpus.tokens(),
                corpus.documents(),
                part.tokens,
                part.documents
            );
            return Err(DataError::token_file(prefix, what, "prepare it again"));
        }
        hash = Some(part.bin_xxh3 + part.mask_xxh3.as_deref().unwrap_or_default());
    }
    let moves = [spec.transforms.fill_in_the_middle.is_some(), spec.transforms.span_corruption.is_some()];
    if corpus.is_masked() && moves.contains(&true) {
        let what = format!("moves tokens, and {} says of each whether it is a target", prefix.display());
        let name = if moves[0] { "fill-in-the-middle" } else { "span_corruption_rate" };
        return Err(DataError::setting(name, what, "leave it out for conversations"));
    }
    let needed = spec.text_length() as u64 + 1;
    if corpus.tokens() < needed {
        return Err(DataError::TooLittle {
            what: format!(
                "{} has {} tokens, and one sample of sequence_length {} takes {needed}",
                prefix.display(),
                corpus.tokens(),
                spec.sequence_length
            ),
            fix: "give more text, or set a smaller sequence_length".into(),
        });
    }
    Ok((corpus, hash))
}

#[cfg(test)]
mod tests;
