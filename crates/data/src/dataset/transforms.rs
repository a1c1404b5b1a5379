//! Changes to samples: fill-in-the-middle, noise, a curriculum of lengths, and span corruption.
//!
//! Each is a function of the seed, the number of the sample and the place in it, so that any number
//! of ranks and workers sees the same changes, and resuming costs nothing.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::batch::MicroBatch;
use super::spans::SpanCorruption;
use crate::error::{DataError, Result};
use crate::rng::Stream;

/// The changes to the samples of a dataset; none by default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Transforms {
    /// Moves the middle of some documents to their ends.
    pub fill_in_the_middle: Option<FillInTheMiddle>,
    /// Probability with which an input token is replaced by a random one. Targets stay.
    pub noise_rate: f64,
    /// Divides long segments of the first samples.
    pub curriculum: Option<LengthCurriculum>,
    /// Takes spans out of the text, to be given back. It goes with no other change.
    #[serde(default)]
    pub span_corruption: Option<SpanCorruption>,
}

/// Moves the middle of a document behind its end (Bavarian et al. 2022), so that a model learns to
/// fill it in.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FillInTheMiddle {
    /// Share of the documents that are changed.
    pub rate: f64,
    /// Share of these in the order suffix, prefix, middle; the others are prefix, suffix, middle.
    pub spm_rate: f64,
    /// The token before the prefix.
    pub prefix: u32,
    /// The token before the middle.
    pub middle: u32,
    /// The token before the suffix.
    pub suffix: u32,
    /// The end-of-text token, which stays at the end.
    pub eos: Option<u32>,
}

/// Segments grow from `start` tokens to the whole row while the first `samples` are read. Rows keep
/// their length: a long segment is divided into several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LengthCurriculum {
    /// Longest segment of the first sample.
    pub start: usize,
    /// Number of samples until segments have their full length.
    pub samples: u64,
}

/// The random streams of the changes count down. Those of corpora count up from 0.
const STREAM_FILL: u32 = u32::MAX;
const STREAM_CUT: u32 = u32::MAX - 1;
const STREAM_NOISE: u32 = u32::MAX - 2;
const STREAM_TOKEN: u32 = u32::MAX - 3;

/// Shorter documents stay as they are: their middle would be a token or two.
const FILL_TOKENS_MIN: usize = 16;

/// Segments grow by this many tokens at a time.
const CURRICULUM_STRIDE: usize = 8;

/// Random places of a sample: more than a row has tokens.
pub(super) const PLACES: u64 = 1 << 25;

impl Transforms {
    /// Refuses rates that are no probabilities, and tokens outside the vocabulary.
    pub(super) fn check(&self, sequence_length: usize, vocab_size: u32) -> Result<()> {
        let fill = self.fill_in_the_middle;
        for (name, rate) in [
            ("fim_rate", fill.map_or(0.0, |fill| fill.rate)),
            ("fim_spm_rate", fill.map_or(0.0, |fill| fill.spm_rate)),
            ("token_noise", self.noise_rate),
        ] {
            if !(0.0..=1.0).contains(&rate) {
                return Err(DataError::setting(name, format!("is {rate}"), "take a probability from 0 to 1"));
            }
        }
        if let Some(spans) = &self.span_corruption {
            if *self != (Transforms { span_corruption: Some(*spans), ..Transforms::default() }) {
                let what = "is given beside another change of samples".to_owned();
                return Err(DataError::setting("span_corruption_rate", what, "leave one of them out"));
            }
            spans.check(sequence_length, vocab_size)?;
        }
        let tokens = fill.map_or([0; 3], |fill| [fill.prefix, fill.middle, fill.suffix]);
        if let Some(token) = tokens.iter().find(|token| **token >= vocab_size) {
            let what = format!("token {token} is outside the vocabulary of {vocab_size}");
            return Err(DataError::setting("fim_rate", what, "take the tokenizer that the model was made for"));
        }
        if let Some(curriculum) = self.curriculum
            && !(CURRICULUM_STRIDE..=sequence_length).contains(&curriculum.start)
        {
            let what = format!("is {}", curriculum.start);
            let fix = format!("take a length from {CURRICULUM_STRIDE} to the sequence length, {sequence_length}");
            return Err(DataError::setting("curriculum_start", what, fix));
        }
        Ok(())
    }

    /// Changes the order of the tokens of the documents at `sections` of `tokens`. Each keeps its
    /// number of tokens: the three special tokens push out the last three of the middle.
    pub(super) fn fill(&self, seed: u64, sample: u64, sections: &[Range<usize>], tokens: &mut [i32]) {
        let Some(fill) = self.fill_in_the_middle else { return };
        for (number, section) in sections.iter().enumerate() {
            let place = sample * PLACES + 4 * number as u64;
            let draws = Stream::new(seed, STREAM_FILL);
            let ends = section.end > section.start && fill.eos == Some(tokens[section.end - 1] as u32);
            let body = &mut tokens[section.start..section.end - usize::from(ends)];
            if body.len() < FILL_TOKENS_MIN || !happens(&draws, place, fill.rate) {
                continue;
            }
            let cuts = Stream::new(seed, STREAM_CUT);
            let cut = |nth| cuts.below(place + nth, body.len() as u64 + 1) as usize;
            let (a, b) = (cut(0).min(cut(1)), cut(0).max(cut(1)));
            let [prefix, middle, suffix] = [&body[..a], &body[a..b], &body[b..]];
            let [of_prefix, of_middle, of_suffix] = [fill.prefix, fill.middle, fill.suffix].map(|token| [token as i32]);
            let parts: [&[i32]; 6] = match happens(&draws, place + 1, fill.spm_rate) {
                true => [&of_prefix, &of_suffix, suffix, &of_middle, prefix, middle],
                false => [&of_prefix, prefix, &of_suffix, suffix, &of_middle, middle],
            };
            let mut changed = parts.concat();
            changed.truncate(body.len());
            body.copy_from_slice(&changed);
        }
    }

    /// Replaces inputs of the last row of `batch`, and divides its segments.
    pub(super) fn finish_row(&self, seed: u64, sample: u64, vocab_size: u32, batch: &mut MicroBatch) {
        let length = batch.sequence_length;
        let base = (batch.rows - 1) * length;
        if self.noise_rate > 0.0 {
            let (draws, tokens) = (Stream::new(seed, STREAM_NOISE), Stream::new(seed, STREAM_TOKEN));
            for at in 0..length {
                let place = sample * PLACES + at as u64;
                if happens(&draws, place, self.noise_rate) {
                    batch.tokens[base + at] = tokens.below(place, u64::from(vocab_size)) as i32;
                }
            }
        }
        if let Some(longest) = self.curriculum.and_then(|curriculum| curriculum.longest(sample, length)) {
            batch.divide_last_row(longest);
        }
    }
}

impl Transforms {
    /// The changes in words, which differ where samples do.
    pub(super) fn identity(&self) -> String {
        let Transforms { fill_in_the_middle, noise_rate, curriculum, span_corruption } = self;
        let mut text = format!(
            "Transforms {{ fill_in_the_middle: {fill_in_the_middle:?}, noise_rate: {noise_rate:?}, curriculum: \
             {curriculum:?} }}"
        );
        if let Some(spans) = span_corruption {
            text += &format!(" {spans:?}");
        }
        text
    }
}

impl LengthCurriculum {
    /// Longest segment of a sample; `None` from the last sample of the curriculum on.
    fn longest(&self, sample: u64, length: usize) -> Option<usize> {
        if sample >= self.samples {
            return None;
        }
        let growth = (length - self.start) as u128 * u128::from(sample) / u128::from(self.samples);
        Some((self.start + growth as usize) / CURRICULUM_STRIDE * CURRICULUM_STRIDE)
    }
}

/// True with probability `rate`, to 2^-32.
fn happens(stream: &Stream, place: u64, rate: f64) -> bool {
    const STEPS: u64 = 1 << 32;
    (stream.below(place, STEPS) as f64) < rate * STEPS as f64
}
