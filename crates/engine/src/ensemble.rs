//! Ensembles: several models predict the same text, and their predictions are combined.
//!
//! The mean of the models' probabilities has at most the mean of their losses, because the
//! logarithm is concave (Jensen's inequality); by how much it is lower depends on how differently
//! they err. A vote needs no probabilities.

use crate::Result;
use crate::evaluate::{EvaluationSettings, slices};
use crate::rank::Rank;
use crate::state::does_not_fit;
use trainyard_data::{IndexedTokens, MicroBatch, eval_batches};
use trainyard_model::{Forward, Output};

/// The way in which predictions are combined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Combination {
    /// The mean of the models' probabilities.
    Mean,
    /// The token that most models find most probable. Of tokens with equally many votes, the one
    /// of the largest mean probability.
    Vote,
}

impl Combination {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Combination::Mean => "mean",
            Combination::Vote => "vote",
        }
    }
}

/// The quality of predictions.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Score {
    /// The sum of the losses of all targets, in nats; None of votes, which have no probabilities.
    pub loss_sum: Option<f64>,
    /// The number of targets that were the most probable token.
    pub correct: u64,
}

/// The scores of an ensemble and its members on the same text.
#[derive(Clone, PartialEq, Debug)]
pub struct EnsembleEvaluation {
    /// Number of targets.
    pub targets: u64,
    /// Of each model alone.
    pub members: Vec<Score>,
    /// Of all together.
    pub ensemble: Score,
}

/// Evaluates `models`, alone and together, on all of `texts` or on their beginning. Every model
/// runs on one rank. `done` is called with the number of targets so far.
///
/// # Errors
/// Models of different vocabularies.
pub fn evaluate_ensemble(
    models: &[&Rank],
    texts: &[IndexedTokens],
    settings: EvaluationSettings,
    combination: Combination,
    done: &mut dyn FnMut(u64),
) -> Result<EnsembleEvaluation> {
    if models.iter().any(|model| model.model().is_paired()) {
        return Err(does_not_fit("models with an encoder are not averaged: evaluate them one by one"));
    }
    let vocab_size = models.first().map_or(0, |model| model.model().vocab_size());
    if let Some(other) = models.iter().find(|model| model.model().vocab_size() != vocab_size) {
        let sizes = (vocab_size, other.model().vocab_size());
        return Err(does_not_fit(format!("vocabularies of {} and {} tokens cannot be averaged", sizes.0, sizes.1)));
    }
    let alone = Score { loss_sum: Some(0.0), correct: 0 };
    let loss_sum = (combination == Combination::Mean).then_some(0.0);
    let mut total =
        EnsembleEvaluation { targets: 0, members: vec![alone; models.len()], ensemble: Score { loss_sum, correct: 0 } };
    let mut left = settings.tokens_max.unwrap_or(u64::MAX);
    for text in texts {
        let batches = eval_batches(text, settings.options(vocab_size, left))?;
        left = left.saturating_sub(batches.tokens_covered());
        for batch in batches {
            let batch = batch?;
            let logits = models.iter().map(|model| logits(model, &batch)).collect::<Result<Vec<_>>>()?;
            for (token, target) in batch.targets.iter().enumerate() {
                let Ok(target) = usize::try_from(*target) else { continue };
                let of_token = token * vocab_size..(token + 1) * vocab_size;
                let of_models = logits.iter().map(|logits| &logits[of_token.clone()]);
                total.add(of_models, target, combination);
            }
            done(total.targets);
        }
    }
    Ok(total)
}

impl EnsembleEvaluation {
    /// Counts one target, given every model's logits.
    fn add<'l>(&mut self, logits: impl Iterator<Item = &'l [f32]>, target: usize, combination: Combination) {
        self.targets += 1;
        let models = self.members.len() as f64;
        let mut mean: Vec<f64> = Vec::new();
        let mut of_target = Vec::with_capacity(self.members.len());
        let mut votes = Vec::with_capacity(self.members.len());
        for (logits, score) in logits.zip(&mut self.members) {
            let (probabilities, log_sum) = softmax(logits);
            let best = largest(&probabilities);
            let log_probability = f64::from(logits[target]) - log_sum;
            of_target.push(log_probability);
            score.loss_sum = score.loss_sum.map(|sum| sum - log_probability);
            score.correct += u64::from(best == target);
            votes.push(best);
            mean.resize(probabilities.len(), 0.0);
            mean.iter_mut().zip(&probabilities).for_each(|(sum, probability)| *sum += probability / models);
        }
        let count = |token: usize| votes.iter().filter(|vote| **vote == token).count();
        let chosen = match combination {
            Combination::Mean => largest(&mean),
            Combination::Vote => {
                let better =
                    |a: &&usize, b: &&usize| count(**a).cmp(&count(**b)).then_with(|| mean[**a].total_cmp(&mean[**b]));
                *votes.iter().max_by(better).expect("there is a model")
            }
        };
        self.ensemble.correct += u64::from(chosen == target);
        self.ensemble.loss_sum = self.ensemble.loss_sum.map(|sum| sum - log_mean(&of_target));
    }
}

/// The probabilities, and the logarithm of the sum of the exponentials.
fn softmax(logits: &[f32]) -> (Vec<f64>, f64) {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let mut probabilities: Vec<f64> = logits.iter().map(|logit| (f64::from(*logit) - most).exp()).collect();
    let sum: f64 = probabilities.iter().sum();
    probabilities.iter_mut().for_each(|probability| *probability /= sum);
    (probabilities, most + sum.ln())
}

/// The logarithm of the mean of the exponentials, which may be too small for f64 themselves.
fn log_mean(logarithms: &[f64]) -> f64 {
    let most = logarithms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logarithms.iter().map(|logarithm| (logarithm - most).exp()).sum();
    most + (sum / logarithms.len() as f64).ln()
}

/// The index of the largest value; the first of equal ones.
fn largest(values: &[f64]) -> usize {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    best
}

/// The logits of every token of a batch, `[tokens, vocabulary]`.
fn logits(model: &Rank, batch: &MicroBatch) -> Result<Vec<f32>> {
    let mut tape = model.inference_tape();
    let batch = model.inference_model().batch(model.device(), &slices(batch))?;
    let mut cx = Forward::evaluation(&batch, Output::Logits);
    let logits = model.forward(&mut tape, &mut cx)?;
    let logits = logits.ok_or_else(|| does_not_fit("a model of an ensemble runs on one rank"))?;
    Ok(logits.tensor().to_f32_vec()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(logits: &[[f32; 3]], target: usize, combination: Combination) -> EnsembleEvaluation {
        let loss_sum = (combination == Combination::Mean).then_some(0.0);
        let mut all = EnsembleEvaluation {
            targets: 0,
            members: vec![Score { loss_sum: Some(0.0), correct: 0 }; logits.len()],
            ensemble: Score { loss_sum, correct: 0 },
        };
        all.add(logits.iter().map(|logits| &logits[..]), target, combination);
        all
    }

    #[test]
    fn the_mean_is_that_of_probabilities_and_not_of_logits() {
        // Probabilities 0.5, 0.25, 0.25 and 0.1, 0.8, 0.1.
        let logits = [[0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln()], [0.1f32.ln(), 0.8f32.ln(), 0.1f32.ln()]];
        let found = scores(&logits, 1, Combination::Mean);
        let near = |value: Option<f64>, expected: f64| assert!((value.unwrap() - expected).abs() < 1e-6, "{value:?}");
        near(found.members[0].loss_sum, -(0.25f64.ln()));
        near(found.members[1].loss_sum, -(0.8f64.ln()));
        near(found.ensemble.loss_sum, -(0.525f64.ln()));
        assert_eq!((found.members[0].correct, found.members[1].correct, found.ensemble.correct), (0, 1, 1));
    }

    #[test]
    fn probabilities_that_vanish_leave_the_loss_finite() {
        let found = scores(&[[2000.0, 0.0, 0.0], [1000.0, 0.0, 0.0]], 1, Combination::Mean);
        let [one, two] = [0, 1].map(|place| found.members[place].loss_sum.unwrap());
        let together = found.ensemble.loss_sum.unwrap();
        assert_eq!((one, two), (2000.0, 1000.0));
        assert!((together - (1000.0 + 2f64.ln())).abs() < 1e-9, "{together}");
    }

    #[test]
    fn most_votes_win_and_of_equally_many_the_likelier_token() {
        let (a, b, sure) = ([1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 9.0, 0.0]);
        assert_eq!(scores(&[a, a, sure], 0, Combination::Vote).ensemble, Score { loss_sum: None, correct: 1 });
        assert_eq!(scores(&[a, b, a], 0, Combination::Vote).ensemble.correct, 1);
        assert_eq!(scores(&[a, sure], 1, Combination::Vote).ensemble.correct, 1, "one vote each");
        // The mean of the same three is for the other token.
        assert_eq!(scores(&[a, a, sure], 1, Combination::Mean).ensemble.correct, 1);
    }
}
