//! Span corruption (Raffel et al. 2020, section 3.1.4): spans of a text are taken out, and a model
//! learns to give them back.
//!
//! A row is made of a stretch of text. Its first part is the text with a sentinel in the place of
//! each span, then end-of-text: what an encoder reads. Its second part are the sentinels, each with
//! its span behind it, then end-of-text: what a decoder says. The number of tokens taken out and
//! that of spans follow from the length of the row alone, so all rows are alike and nothing is
//! padded but for two positions at most.

use serde::{Deserialize, Serialize};

use super::batch::{IGNORE, MicroBatch};
use crate::error::{DataError, Result};
use crate::rng::Stream;

/// The settings of span corruption.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SpanCorruption {
    /// The shape of rows.
    pub shape: SpanShape,
    /// The sentinel of the first span; that of the next has the number before, and so on.
    pub sentinel: u32,
    /// The token that ends both parts.
    pub end: u32,
    /// The token that the second part begins with.
    pub start: u32,
    /// True if the two parts are sequences of their own, for an encoder and a decoder. Otherwise
    /// they are one sequence, of which the second part is learned.
    pub paired: bool,
}

/// The numbers from which the lengths of rows follow.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SpanShape {
    /// The share of the tokens that is taken out.
    pub rate: f64,
    /// The mean length of a span.
    pub mean_length: f64,
}

/// The lengths of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SpanLengths {
    /// Tokens of text.
    pub text: usize,
    /// Those of them that are taken out.
    pub noise: usize,
    /// The number of spans.
    pub spans: usize,
}

impl SpanLengths {
    /// Positions of the first part.
    pub fn encoder(&self) -> usize {
        self.text - self.noise + self.spans + 1
    }

    /// Positions of the second part.
    pub fn decoder(&self) -> usize {
        self.noise + self.spans + 1
    }
}

impl SpanShape {
    /// As T5 was trained: 15 % of the tokens, in spans of 3.
    pub const T5: SpanShape = SpanShape { rate: 0.15, mean_length: 3.0 };

    /// The lengths of rows of `sequence_length` positions: of as much text as they have room for.
    /// None if they have room for less than a span and a token.
    pub fn lengths(&self, sequence_length: usize) -> Option<SpanLengths> {
        let of_text = |text: usize| {
            let noise = ((text as f64 * self.rate).round() as usize).clamp(1, text.saturating_sub(1).max(1));
            let spans = ((noise as f64 / self.mean_length).round() as usize).clamp(1, noise);
            // Between two spans lies a token at least.
            SpanLengths { text, noise, spans: spans.min(text.saturating_sub(noise)).max(1) }
        };
        let fits = |lengths: &SpanLengths| lengths.encoder() + lengths.decoder() <= sequence_length;
        // Positions grow with the text.
        let (mut low, mut high) = (1, sequence_length);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if fits(&of_text(middle)) { low = middle } else { high = middle - 1 }
        }
        (low >= 2).then(|| of_text(low)).filter(fits)
    }
}

/// The random streams of the lengths of spans and of those of the text between them.
const STREAM_NOISE: u32 = u32::MAX - 4;
const STREAM_TEXT: u32 = u32::MAX - 5;

impl SpanCorruption {
    /// The lengths of rows.
    ///
    /// # Errors
    /// Numbers out of range, or no room for a span.
    pub fn lengths(&self, sequence_length: usize) -> Result<SpanLengths> {
        let SpanShape { rate, mean_length } = self.shape;
        if !(rate > 0.0 && rate < 1.0) {
            return Err(DataError::setting(
                "span_corruption_rate",
                format!("is {rate}"),
                "take a share between 0 and 1",
            ));
        }
        if !(1.0..=1e6).contains(&mean_length) {
            return Err(DataError::setting("span_length", format!("is {mean_length}"), "take a mean length from 1"));
        }
        self.shape.lengths(sequence_length).ok_or_else(|| {
            let what = format!("{sequence_length} has no room for a corrupted text");
            DataError::setting("sequence_length", what, "take a longer one")
        })
    }

    /// Checks that rows can be made, for a model of `vocab_size` tokens.
    pub(super) fn check(&self, sequence_length: usize, vocab_size: u32) -> Result<()> {
        let lengths = self.lengths(sequence_length)?;
        if u64::from(self.sentinel) + 1 < lengths.spans as u64 || self.sentinel >= vocab_size {
            let what = format!("{} spans with sentinels from {} down", lengths.spans, self.sentinel);
            return Err(DataError::setting("span_length", what, "take longer spans, or shorter sequences"));
        }
        match [self.start, self.end].into_iter().find(|token| *token >= vocab_size) {
            Some(token) => {
                let what = format!("token {token} is outside the vocabulary of {vocab_size}");
                Err(DataError::setting("span_corruption_rate", what, "take the tokenizer of the model"))
            }
            None => Ok(()),
        }
    }
}

/// Divides `items` into `parts` parts of at least one, each division as likely as any other. It is
/// a function of the stream and of `place`, of which as many are used as there are items.
fn divided(stream: &Stream, place: u64, items: usize, parts: usize) -> Vec<usize> {
    let mut lengths = Vec::with_capacity(parts);
    let (mut length, mut cuts) = (1, parts - 1);
    // Of the places between items, `cuts` are chosen (Knuth, volume 2, algorithm 3.4.2 S).
    for between in 1..items {
        let left = (items - between) as u64;
        if stream.below(place + between as u64, left) < cuts as u64 {
            lengths.push(length);
            (length, cuts) = (0, cuts - 1);
        }
        length += 1;
    }
    lengths.push(length);
    lengths
}

impl MicroBatch {
    /// Adds a row of corrupted `text`, whose random numbers are those of `seed` and `place`.
    pub(crate) fn push_corrupted(
        &mut self,
        text: &[i32],
        spans: &SpanCorruption,
        lengths: SpanLengths,
        seed: u64,
        place: u64,
    ) {
        let base = self.tokens.len();
        let noise = divided(&Stream::new(seed, STREAM_NOISE), place, lengths.noise, lengths.spans);
        let kept = divided(&Stream::new(seed, STREAM_TEXT), place, lengths.text - lengths.noise, lengths.spans);
        let mut said = Vec::with_capacity(lengths.decoder());
        let mut rest = text;
        for (nth, (kept, noise)) in kept.into_iter().zip(noise).enumerate() {
            let sentinel = spans.sentinel as i32 - nth as i32;
            let (stays, after) = rest.split_at(kept);
            let (goes, after) = after.split_at(noise);
            self.tokens.extend_from_slice(stays);
            self.tokens.push(sentinel);
            said.push(sentinel);
            said.extend_from_slice(goes);
            rest = after;
        }
        self.tokens.push(spans.end as i32);
        said.push(spans.end as i32);
        self.targets.resize(self.tokens.len(), IGNORE);
        let first = self.tokens.len() - base;
        self.tokens.push(spans.start as i32);
        self.tokens.extend_from_slice(&said[..said.len() - 1]);
        self.targets.extend_from_slice(&said);
        let end = base + self.sequence_length;
        self.tokens.resize(end, 0);
        self.targets.resize(end, IGNORE);
        let bounds: &[usize] = if spans.paired { &[first, self.sequence_length] } else { &[self.sequence_length] };
        let mut begin = 0;
        for bound in bounds {
            self.positions.extend(0..(bound - begin) as i32);
            self.cu_seqlens.push((base + bound) as i32);
            begin = *bound;
        }
        self.rows += 1;
    }
}

#[cfg(test)]
mod tests {
    //! Lengths as those of the published pre-training, and rows from which the text can be put
    //! together again.
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_are_those_of_the_published_pre_training() {
        let lengths = SpanShape::T5.lengths(626).unwrap();
        assert_eq!(lengths, SpanLengths { text: 568, noise: 85, spans: 28 });
        assert_eq!((lengths.encoder(), lengths.decoder()), (512, 114));
        assert_eq!(SpanShape::T5.lengths(5), None);
        assert_eq!(SpanShape::T5.lengths(6), Some(SpanLengths { text: 2, noise: 1, spans: 1 }));
    }

    /// The text of a row: each sentinel replaced by what follows it in the second part.
    fn restored(first: &[i32], said: &[i32], is_sentinel: impl Fn(i32) -> bool) -> Vec<i32> {
        let span = |sentinel: i32| {
            let at = said.iter().position(|token| *token == sentinel).unwrap() + 1;
            said[at..].iter().copied().take_while(|token| !is_sentinel(*token)).collect::<Vec<_>>()
        };
        let of = |token: &i32| if is_sentinel(*token) { span(*token) } else { vec![*token] };
        first.iter().flat_map(of).collect()
    }

    proptest! {
        #[test]
        fn a_row_holds_its_text(length in 6usize..400, rate in 0.02f64..0.9, mean_length in 1.0f64..12.0, seed: u64, place in 0u64..1 << 40, paired: bool) {
            let shape = SpanShape { rate, mean_length };
            let spans = SpanCorruption { shape, sentinel: 99_999, end: 1, start: 0, paired };
            let lengths = spans.lengths(length).unwrap();
            prop_assert!(lengths.encoder() + lengths.decoder() + 2 >= length, "two positions are padded at most");
            let text: Vec<i32> = (10..10 + lengths.text as i32).collect();
            let mut batch = MicroBatch::with_capacity(1, length);
            batch.push_corrupted(&text, &spans, lengths, seed, place);
            let first = lengths.encoder();
            prop_assert_eq!((batch.tokens.len(), batch.targets.len(), batch.positions.len()), (length, length, length));
            let bounds: Vec<i32> = if paired { vec![0, first as i32, length as i32] } else { vec![0, length as i32] };
            prop_assert_eq!(&batch.cu_seqlens, &bounds);
            prop_assert!(batch.targets[..first].iter().all(|target| *target == IGNORE));
            let said: Vec<i32> = batch.targets[first..].iter().copied().filter(|target| *target != IGNORE).collect();
            prop_assert_eq!(said.len(), lengths.decoder());
            // The second part is its targets, one further.
            prop_assert_eq!(batch.tokens[first], 0);
            prop_assert_eq!(&batch.tokens[first + 1..first + said.len()], &said[..said.len() - 1]);
            prop_assert_eq!((batch.tokens[first - 1], said[said.len() - 1]), (1, 1));
            let is_sentinel = |token: i32| token > 99_999 - lengths.spans as i32 || token == 1;
            prop_assert_eq!(restored(&batch.tokens[..first - 1], &said, is_sentinel), text);
        }
    }

    #[test]
    fn every_division_is_as_likely_as_any_other() {
        let stream = Stream::new(5, 1);
        let mut counts = std::collections::BTreeMap::new();
        for draw in 0..60_000u64 {
            *counts.entry(divided(&stream, draw * 8, 6, 3)).or_insert(0u32) += 1;
        }
        // Ten ways to choose two of five places.
        assert_eq!(counts.len(), 10);
        let even = 6000.0f64;
        assert!(counts.values().all(|count| (f64::from(*count) - even).abs() < 5.0 * even.sqrt()), "{counts:?}");
    }
}
