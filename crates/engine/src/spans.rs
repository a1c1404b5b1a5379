//! The special tokens of span corruption, and of a decoder beside an encoder.

use crate::Result;
use crate::config::Config;
use crate::state::does_not_fit;
use trainyard_data::{SpanCorruption, SpanShape, Tokenizer};
use trainyard_model::ModelSpec;

/// The name of sentinel `nth` in tokenizers that have them.
fn sentinel_name(nth: usize) -> String {
    format!("<extra_id_{nth}>")
}

/// The number of sentinels that a tokenizer has, each one less than the one before.
pub fn sentinels(tokenizer: &Tokenizer) -> usize {
    let Some(first) = tokenizer.token_to_id(&sentinel_name(0)) else { return 0 };
    let is_next = |nth: &usize| tokenizer.token_to_id(&sentinel_name(*nth)) == first.checked_sub(*nth as u32);
    (0..).take_while(is_next).count()
}

/// The token with which a decoder begins, and the one that ends a text.
///
/// # Errors
/// A tokenizer without an end-of-text token.
pub fn start_and_end(tokenizer: &Tokenizer) -> Result<[u32; 2]> {
    let end = tokenizer.eos().ok_or_else(|| {
        does_not_fit(format!(
            "the tokenizer ({}) has no end-of-text token, with which an encoder's text and a decoder's answer end: take \
             another, such as tokenizer.kind = \"bpe\"",
            tokenizer.kind()
        ))
    })?;
    Ok([tokenizer.token_to_id("<pad>").unwrap_or(end), end])
}

/// The prompt of a model: `text`, behind which an encoder's ends and the decoder begins.
///
/// # Errors
/// As [`start_and_end`].
pub fn prompt(spec: &ModelSpec, tokenizer: &Tokenizer, mut text: Vec<u32>) -> Result<Vec<u32>> {
    if spec.encoder.is_some() && !text.is_empty() {
        let [start, end] = start_and_end(tokenizer)?;
        text.extend([end, start]);
    }
    Ok(text)
}

/// The name of a token that is a sentinel of the vocabulary and none of the tokenizer's: what
/// `token` is written as. None for others.
pub fn sentinel_in_words(spec: &ModelSpec, tokenizer: &Tokenizer, token: u32) -> Option<String> {
    let outside = spec.encoder.is_some() && token as usize >= tokenizer.vocab_size();
    outside.then(|| sentinel_name(spec.vocab_size.saturating_sub(1 + token as usize)))
}

/// Span corruption of sequences of `sequence_length` positions for a model of `vocab_size` tokens.
///
/// The sentinels are the tokenizer's. If it has none they are the last tokens of the vocabulary,
/// which must be larger than the tokenizer's.
///
/// # Errors
/// Too few sentinels; no end-of-text token.
pub fn corruption(
    tokenizer: &Tokenizer,
    vocab_size: usize,
    shape: SpanShape,
    paired: bool,
    sequence_length: usize,
) -> Result<SpanCorruption> {
    let [start, end] = start_and_end(tokenizer)?;
    let found = sentinels(tokenizer);
    let (sentinel, there_are, whose) = match tokenizer.token_to_id(&sentinel_name(0)).filter(|_| found > 0) {
        Some(first) => (first, found, "the tokenizer has"),
        None => {
            let free = vocab_size.saturating_sub(tokenizer.vocab_size());
            (vocab_size.saturating_sub(1) as u32, free, "the vocabulary has beside the tokenizer's")
        }
    };
    let spans = SpanCorruption { shape, sentinel, end, start, paired };
    let needed = spans.lengths(sequence_length)?.spans;
    if needed > there_are {
        return Err(does_not_fit(format!(
            "a sequence of {sequence_length} positions has {needed} spans, and {whose} {there_are} tokens for them: take \
             shorter sequences, a longer data.span_length or a larger model.vocab_size"
        )));
    }
    Ok(spans)
}

/// The span corruption with which a model is evaluated: that of its run, or the usual of a model
/// with an encoder; None for others.
///
/// # Errors
/// As [`corruption`].
pub fn of_evaluation(
    spec: &ModelSpec,
    run: Option<&Config>,
    tokenizer: &Tokenizer,
    sequence_length: usize,
) -> Result<Option<SpanCorruption>> {
    let data = run.map(|config| &config.data);
    let rate = data.and_then(|data| data.span_corruption_rate);
    let paired = spec.encoder.is_some();
    if rate.is_none() && !paired {
        return Ok(None);
    }
    let shape = SpanShape {
        rate: rate.unwrap_or(SpanShape::T5.rate),
        mean_length: data.and_then(|data| data.span_length).unwrap_or(SpanShape::T5.mean_length),
    };
    corruption(tokenizer, spec.vocab_size, shape, paired, sequence_length).map(Some)
}
