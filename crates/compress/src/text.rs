//! Sequences of tokens that go through a model unit by unit.

use crate::{Result, error::refuse};
use std::collections::BTreeSet;
use trainyard_autograd::{Observer, ParamId, Policy, Store, Tape};
use trainyard_data::rng::Permutation;
use trainyard_data::{IndexedTokens, eval_batches};
use trainyard_engine::evaluate::{Evaluation, EvaluationSettings, slices};
use trainyard_model::{Batch, Forward, Model, Output};
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::{Device, Tensor};

/// Tokens of a batch of calibration.
const BATCH_TOKENS: usize = 2048;

/// Sequences and their hidden states after the units so far.
pub struct Sequences {
    batches: Vec<Batch>,
    /// The outputs of the last unit, one for each batch; empty before the first unit.
    hidden: Vec<Tensor>,
    /// The weights whose inputs [`Sequences::advance`] rounds to 8 bits.
    rounded_inputs: BTreeSet<ParamId>,
}

/// Draws `samples` sequences of `length` tokens from all of `texts`, without overlaps. Fewer if the
/// text has fewer.
///
/// # Errors
/// No text as long as one sequence; tokens that the model does not have.
pub fn calibration(
    device: &Device,
    model: &Model,
    texts: &[IndexedTokens],
    samples: usize,
    length: usize,
    seed: u64,
) -> Result<Sequences> {
    let rows: Vec<u64> = texts.iter().map(|text| text.tokens() / length as u64).collect();
    let all: u64 = rows.iter().sum();
    if all == 0 {
        let tokens: u64 = texts.iter().map(IndexedTokens::tokens).max().unwrap_or(0);
        return refuse(format!(
            "the calibration text has {tokens} tokens, and a sequence takes {length}: give more text, or a smaller --length"
        ));
    }
    let order = Permutation::new(all, seed, 0, 0);
    let mut tokens = Vec::new();
    let mut batches = Vec::new();
    let count = all.min(samples as u64);
    let each = (BATCH_TOKENS / length).max(1);
    for number in 0..count {
        let mut row = order.apply(number);
        let text = rows.iter().position(|of_text| {
            let inside = row < *of_text;
            row -= if inside { 0 } else { *of_text };
            inside
        });
        let text = &texts[text.expect("rows are counted over all texts")];
        let start = row * length as u64;
        text.read_into(start..start + length as u64, model.vocab_size() as u32, &mut tokens)?;
        if tokens.len() == each * length || number + 1 == count {
            batches.push(model.rows(device, length, &tokens, None)?);
            tokens.clear();
        }
    }
    Ok(Sequences { batches, hidden: Vec::new(), rounded_inputs: BTreeSet::new() })
}

impl Sequences {
    /// The rows of `texts` as `trainyard eval` cuts them.
    ///
    /// # Errors
    /// Texts without a token to predict, or with tokens that the model does not have.
    pub fn evaluation(
        device: &Device,
        model: &Model,
        texts: &[IndexedTokens],
        settings: EvaluationSettings,
    ) -> Result<Sequences> {
        let mut left = settings.tokens_max.unwrap_or(u64::MAX);
        let mut batches = Vec::new();
        for text in texts {
            let rows = eval_batches(text, settings.options(model.vocab_size(), left))?;
            left = left.saturating_sub(rows.tokens_covered());
            for batch in rows {
                batches.push(model.batch(device, &slices(&batch?))?);
            }
        }
        if batches.iter().all(|batch| batch.counted == 0) {
            return refuse("the text of --evaluate has no token to predict: give documents of at least two tokens");
        }
        Ok(Sequences { batches, hidden: Vec::new(), rounded_inputs: BTreeSet::new() })
    }

    /// The same sequences before the first unit.
    pub fn again(&self) -> Sequences {
        Sequences { batches: self.batches.clone(), hidden: Vec::new(), rounded_inputs: BTreeSet::new() }
    }

    /// Makes [`Sequences::advance`] round the inputs of layers with these weights to 8 bits.
    pub fn round_inputs(&mut self, weights: BTreeSet<ParamId>) {
        self.rounded_inputs = weights;
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.batches.iter().map(Batch::len).sum()
    }

    /// The outputs of the last unit, one for each batch; none before the first unit.
    pub fn hidden(&self) -> &[Tensor] {
        &self.hidden
    }

    /// Runs unit `unit` and keeps what it gives: hidden states, or of the last unit the losses.
    ///
    /// # Errors
    /// Errors of the unit.
    pub fn advance(&mut self, model: &Model, unit: usize, store: &Store) -> Result<()> {
        for number in 0..self.batches.len() {
            let output = self.run(model, unit, store, number, None)?;
            match self.hidden.get_mut(number) {
                Some(hidden) => *hidden = output,
                None => self.hidden.push(output),
            }
        }
        Ok(())
    }

    /// Runs unit `unit` and keeps nothing; `observer` sees the inputs of its linear layers, and
    /// `each` the unit's input and output of every batch.
    ///
    /// # Errors
    /// Errors of the unit, of `observer` and of `each`.
    pub fn look(
        &self,
        model: &Model,
        unit: usize,
        store: &Store,
        observer: Observer<'_>,
        mut each: impl FnMut(&Tensor, &Tensor) -> Result<()>,
    ) -> Result<()> {
        for number in 0..self.batches.len() {
            let output = self.run(model, unit, store, number, Some(&mut *observer))?;
            if let Some(input) = self.hidden.get(number) {
                each(input, &output)?;
            }
        }
        Ok(())
    }

    fn run(
        &self,
        model: &Model,
        unit: usize,
        store: &Store,
        number: usize,
        observer: Option<Observer<'_>>,
    ) -> Result<Tensor> {
        let batch = &self.batches[number];
        let mut tape = Tape::new(batch.tokens.device(), store, Policy::Nothing, RandomKey::default());
        match observer {
            Some(observer) => tape = tape.with_observer(observer),
            None if !self.rounded_inputs.is_empty() => tape = tape.with_rounded_inputs(&self.rounded_inputs),
            None => {}
        }
        let mut cx = Forward::evaluation(batch, Output::Loss { scale: 1.0 });
        let input = self.hidden.get(number).map(|hidden| tape.constant(hidden.clone()));
        Ok(model.units()[unit].forward(&mut tape, &mut cx, input.as_ref())?.into_tensor())
    }

    /// The losses, after the last unit.
    ///
    /// # Errors
    /// Hidden states that are no losses.
    pub fn losses(&self) -> Result<Evaluation> {
        let mut found = Evaluation::default();
        for (batch, loss) in self.batches.iter().zip(&self.hidden) {
            found.loss_sum += f64::from(loss.to_scalar()?);
            found.targets += batch.counted as u64;
        }
        Ok(found)
    }
}
