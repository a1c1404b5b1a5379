//! Evaluation: the loss of a model on held-back text.

use crate::Result;
use crate::rank::Rank;
use trainyard_data::{EvalOptions, IndexedTokens, MicroBatch, SpanCorruption, Tokenizer, eval_batches, text_bytes};
use trainyard_model::units::Hits;
use trainyard_model::{BatchSlices, Forward, ImageSlices, MixedSlices, Output};

/// The summed losses of texts.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Evaluation {
    /// The sum of the losses of all targets, in nats.
    pub loss_sum: f64,
    /// The number of targets.
    pub targets: u64,
    /// Bytes of the text, when all of it was read.
    pub text_bytes: Option<u64>,
    /// Each text, or set of images, by itself.
    pub texts: Vec<TextLoss>,
    /// The images whose class was found; None for text.
    pub hits: Option<Hits>,
}

/// The summed losses of one text.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct TextLoss {
    /// The sum of the losses of its targets, in nats.
    pub loss_sum: f64,
    /// The number of its targets that were read.
    pub targets: u64,
}

impl Evaluation {
    /// Mean loss in nats.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.targets.max(1) as f64
    }
}

/// A micro-batch in the form that the model takes.
pub fn slices(batch: &MicroBatch) -> BatchSlices<'_> {
    BatchSlices {
        tokens: &batch.tokens,
        targets: Some(&batch.targets),
        positions: &batch.positions,
        cu_seqlens: &batch.cu_seqlens,
        images: batch.pixels.as_ref().map(|pixels| ImageSlices {
            patches: &pixels.patches,
            patch_len: pixels.patch_len,
            mixed: pixels.mixed.as_ref().map(|mixed| MixedSlices { second: &mixed.second, weight: &mixed.weight }),
        }),
    }
}

/// Settings that divide text into rows and batches for evaluation.
#[derive(Clone, Copy, Debug)]
pub struct EvaluationSettings {
    /// Tokens of a row.
    pub sequence_length: usize,
    /// Rows of a batch.
    pub rows: usize,
    /// True if tokens attend only within their own document, as in training.
    pub respect_document_boundaries: bool,
    /// The most tokens to predict, from the beginning of the texts; None: all.
    pub tokens_max: Option<u64>,
    /// Spans are taken out of the text, as in training.
    pub spans: Option<SpanCorruption>,
}

impl EvaluationSettings {
    /// The division of a text of which at most `left` more tokens are predicted, for a model of
    /// `vocab_size` tokens.
    pub fn options(&self, vocab_size: usize, left: u64) -> EvalOptions {
        EvalOptions {
            sequence_length: self.sequence_length,
            rows: self.rows,
            vocab_size: vocab_size as u32,
            respect_document_boundaries: self.respect_document_boundaries,
            tokens_max: Some(left),
            spans: self.spans,
        }
    }
}

/// Evaluates the model on all of `texts`, or on their beginning. Data ranks call this together and
/// share the batches: rank r of n takes every n-th. Losses are summed in the order of the batches,
/// so the sum does not depend on n.
pub fn evaluate(
    rank: &Rank,
    texts: &[IndexedTokens],
    tokenizer: &Tokenizer,
    settings: EvaluationSettings,
) -> Result<Evaluation> {
    let evaluation = evaluate_until(rank, texts, tokenizer, settings, &mut |_| Ok(false))?;
    Ok(evaluation.expect("nobody stops it"))
}

/// Progress of an evaluation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EvaluationProgress {
    /// Tokens evaluated so far.
    pub tokens: u64,
    /// Tokens in all.
    pub of: u64,
}

/// As [`evaluate`], with a way to stop. All ranks call `stops` with the progress after every round
/// of batches. It returns the same on all ranks; true ends the evaluation, whose result is then
/// None.
pub fn evaluate_until(
    rank: &Rank,
    texts: &[IndexedTokens],
    tokenizer: &Tokenizer,
    settings: EvaluationSettings,
    stops: &mut dyn FnMut(EvaluationProgress) -> Result<bool>,
) -> Result<Option<Evaluation>> {
    let (index, ranks) = rank.evaluation_place();
    let mut total = Evaluation::default();
    let mut left = settings.tokens_max.unwrap_or(u64::MAX);
    let all: u64 = texts.iter().map(|text| text.tokens().saturating_sub(1)).sum();
    let mut progress = EvaluationProgress { tokens: 0, of: all.min(left) };
    let mut bytes = Some(0);
    let mut own = Vec::new();
    let mut number = 0;
    // Of each text, one past its last batch, and its targets.
    let mut ends = Vec::with_capacity(texts.len());
    for text in texts {
        let batches = eval_batches(text, settings.options(rank.model().vocab_size(), left))?;
        left = left.saturating_sub(batches.tokens_covered());
        let end = progress.tokens + batches.tokens_covered();
        bytes = match bytes {
            Some(sum) if batches.is_whole() => Some(sum + text_bytes(text, tokenizer)?),
            _ => None,
        };
        let targets_before = total.targets;
        for batch in batches {
            let batch = batch?;
            progress.tokens = end.min(progress.tokens + (batch.rows * batch.sequence_length) as u64);
            total.targets += batch.targets_counted() as u64;
            if number % ranks == index {
                own.push(loss_sum(rank, &batch)?);
            }
            number += 1;
            if number.is_multiple_of(ranks) && stops(progress)? {
                return Ok(None);
            }
        }
        ends.push((number, total.targets - targets_before));
    }
    // In the last round this rank may have no batch. It still takes part in the gathers of the
    // others.
    let rounds = number.div_ceil(ranks);
    if own.len() < rounds {
        rank.forward_nothing()?;
        own.push(0.0);
    }
    let all = rank.gather_numbers(&own)?;
    let of_batch = |number: usize| all[number % ranks * rounds + number / ranks];
    total.loss_sum = (0..number).map(of_batch).sum();
    let mut begin = 0;
    for (end, targets) in ends {
        total.texts.push(TextLoss { loss_sum: (begin..end).map(of_batch).sum(), targets });
        begin = end;
    }
    total.text_bytes = bytes;
    Ok(Some(total))
}

fn loss_sum(rank: &Rank, batch: &MicroBatch) -> Result<f64> {
    let mut tape = rank.inference_tape();
    let batch = rank.inference_model().batch(rank.device(), &slices(batch))?;
    let mut cx = Forward::evaluation(&batch, Output::Loss { scale: 1.0 });
    match rank.forward(&mut tape, &mut cx)? {
        Some(loss) => Ok(f64::from(loss.tensor().to_scalar()?)),
        // Another stage of the pipeline has it.
        None => Ok(0.0),
    }
}
