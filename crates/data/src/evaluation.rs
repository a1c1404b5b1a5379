//! Cuts a whole split in order, for losses that can be compared between runs, models and
//! tokenizers.

use crate::dataset::{MicroBatch, SpanCorruption, SpanLengths};
use crate::error::{DataError, Result};
use crate::indexed::IndexedTokens;
use crate::prepare::Sidecar;
use crate::tokenizer::Tokenizer;

/// The seed of the spans that evaluation takes out: the same in every run.
const EVALUATION_SEED: u64 = 0x7261_696e_7961_7264;

/// The cut of a split for evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvalOptions {
    /// Number of tokens of a row.
    pub sequence_length: usize,
    /// Number of rows of a batch.
    pub rows: usize,
    /// Tokens must be below this number.
    pub vocab_size: u32,
    /// As in training.
    pub respect_document_boundaries: bool,
    /// The most tokens to predict, from the beginning of the split; None: all of it.
    pub tokens_max: Option<u64>,
    /// Takes spans out of the rows, as in training.
    pub spans: Option<SpanCorruption>,
}

/// Iterator over the batches of a split; see [`eval_batches`].
#[derive(Debug)]
pub struct EvalBatches<'t> {
    tokens: &'t IndexedTokens,
    options: EvalOptions,
    /// Position of the next row's first input.
    next: u64,
    /// The last target.
    last: u64,
    /// The lengths of rows that spans are taken out of.
    lengths: Option<SpanLengths>,
    has_failed: bool,
}

/// Cuts a whole split into consecutive rows. Every token but the first is the target of exactly one
/// row. (If boundaries are respected, the first token of each document is no target.)
///
/// The last batch may have fewer rows, and its last row ends in padding without targets. Rows that
/// spans are taken out of are whole: what is too short for one is left out. With
/// `tokens_max` the split ends after as many targets, whatever the rows.
pub fn eval_batches(tokens: &IndexedTokens, options: EvalOptions) -> Result<EvalBatches<'_>> {
    let flat = options.sequence_length.saturating_mul(options.rows);
    if !(1..=i32::MAX as usize).contains(&flat) {
        let what = format!("{} rows of {} tokens", options.rows, options.sequence_length);
        return Err(DataError::setting(
            "evaluation batch",
            what,
            "take at least 1 row of 1 token, at most 2^31 - 1 tokens",
        ));
    }
    if tokens.tokens() < 2 {
        return Err(DataError::TooLittle {
            what: format!("{} has {} tokens, and a loss takes 2", tokens.prefix().display(), tokens.tokens()),
            fix: "give more text, or a larger validation fraction".into(),
        });
    }
    let mut last = (tokens.tokens() - 1).min(options.tokens_max.unwrap_or(u64::MAX));
    let lengths = options.spans.map(|spans| spans.lengths(options.sequence_length)).transpose()?;
    if let Some(SpanLengths { text, .. }) = lengths {
        // Whole rows only, and one at least.
        let rows = (last / text as u64).max(1);
        last = rows * text as u64;
        if last > tokens.tokens() {
            return Err(DataError::TooLittle {
                what: format!("{} has {} tokens, and a row takes {text}", tokens.prefix().display(), tokens.tokens()),
                fix: "give more text, or a larger validation fraction".into(),
            });
        }
    }
    Ok(EvalBatches { tokens, options, next: 0, last, lengths, has_failed: false })
}

impl EvalBatches<'_> {
    /// Number of batches.
    pub fn batches(&self) -> u64 {
        let rows = self.tokens_covered().div_ceil(self.of_row());
        rows.div_ceil(self.options.rows as u64)
    }

    /// Tokens that the rows of all batches go over; those that begin a document have no target.
    pub fn tokens_covered(&self) -> u64 {
        self.last
    }

    /// True if all of the split is read, and not only its beginning.
    pub fn is_whole(&self) -> bool {
        self.last == self.tokens.tokens() - 1 && self.lengths.is_none()
    }

    /// Number of tokens that a whole row goes over.
    fn of_row(&self) -> u64 {
        self.lengths.map_or(self.options.sequence_length, |lengths| lengths.text) as u64
    }

    fn batch(&mut self) -> Result<MicroBatch> {
        let EvalOptions { sequence_length, rows, vocab_size, respect_document_boundaries, .. } = self.options;
        let mut batch = MicroBatch::with_capacity(rows, sequence_length);
        let mut row = Vec::with_capacity(sequence_length + 1);
        if let Some((spans, lengths)) = self.options.spans.zip(self.lengths) {
            while batch.rows < rows && self.next < self.last {
                let end = self.next + lengths.text as u64;
                row.clear();
                self.tokens.read_into(self.next..end, vocab_size, &mut row)?;
                batch.push_corrupted(&row, &spans, lengths, EVALUATION_SEED, self.next);
                self.next = end;
            }
            return Ok(batch);
        }
        while batch.rows < rows && self.next < self.last {
            let end = self.last.min(self.next + sequence_length as u64);
            row.clear();
            self.tokens.read_into(self.next..end + 1, vocab_size, &mut row)?;
            batch.push_row(&row, self.next, self.tokens, respect_document_boundaries);
            self.next = end;
        }
        Ok(batch)
    }
}

impl Iterator for EvalBatches<'_> {
    type Item = Result<MicroBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed || self.next >= self.last {
            return None;
        }
        let batch = self.batch();
        self.has_failed = batch.is_err();
        Some(batch)
    }

    /// Passes over `n` batches without reading them.
    fn nth(&mut self, n: usize) -> Option<Result<MicroBatch>> {
        let skipped = (n as u64).saturating_mul(self.options.rows as u64).saturating_mul(self.of_row());
        self.next = self.next.saturating_add(skipped);
        self.next()
    }
}

/// Bytes of UTF-8 text that the tokens stand for, the denominator of bits per byte. They come from
/// the description beside the files if there is one, otherwise from decoding every document.
///
/// Bits per byte are the summed loss in nats / (ln 2 x these bytes). End-of-text tokens, and those
/// that the tokenizer puts around a text, stand for no bytes.
pub fn text_bytes(tokens: &IndexedTokens, tokenizer: &Tokenizer) -> Result<u64> {
    if let Some((sidecar, part)) = Sidecar::of_part(tokens.prefix())?
        && sidecar.tokenizer.fingerprint == tokenizer.fingerprint()
        && part.tokens == tokens.tokens()
    {
        return Ok(part.text_bytes);
    }
    let vocab_size = tokenizer.vocab_size() as u32;
    let mut ids = Vec::new();
    let mut bytes = 0;
    for document in 0..tokens.documents() {
        ids.clear();
        tokens.read_into(tokens.document(document), vocab_size, &mut ids)?;
        let is_text =
            |t: &u32| Some(*t) != tokenizer.eos() && !tokenizer.before().contains(t) && !tokenizer.after().contains(t);
        let places = tokens.document(document);
        let learned = ids.iter().zip(places).filter(|(_, place)| tokens.is_target(*place));
        let kept: Vec<u32> = learned.map(|(&t, _)| t as u32).filter(is_text).collect();
        bytes += tokenizer.decode(&kept).len() as u64;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
