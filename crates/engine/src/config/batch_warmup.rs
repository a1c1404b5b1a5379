//! Batch warm-up: the first steps of a run take smaller batches.
//!
//! Early in a training the gradient's noise is small against the gradient, so large batches spend
//! tokens for little (McCandlish et al. 2018; Merrill et al. 2025, "Critical batch size
//! revisited"). `training.batch_warmup` is a list of stages; after the last, steps take the whole
//! batch.

use super::resolve::Resolver;
use super::sections::CudaGraphs;
use super::sections_parallel::UpdateRule;
use super::value::{ConfigValue, choices, wrong};
use super::{Batch, Resolved};
use crate::schedule::RateStage;
use serde::Serialize;
use toml::Value;

/// Most stages. Each has programs of its own.
const STAGES_MAX: usize = 32;

/// The value of `training.batch_warmup`: sequences of a step over all ranks, and the number of
/// steps that take so many, stage by stage.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct BatchWarmup(pub Vec<(usize, u64)>);

impl ConfigValue for BatchWarmup {
    fn expected() -> String {
        "a list of `[sequences, steps]`, such as `[[8, 200], [16, 400]]`".to_owned()
    }
    fn from_value(value: &Value) -> Result<Self, String> {
        let stage = |value: &Value| match value.as_array().map(Vec::as_slice) {
            Some([sequences, steps]) => Some((usize::from_value(sequences).ok()?, u64::from_value(steps).ok()?)),
            _ => None,
        };
        let list = value.as_array().ok_or_else(|| wrong::<Self>(value))?;
        list.iter().map(stage).collect::<Option<_>>().map(BatchWarmup).ok_or_else(|| wrong::<Self>(value))
    }
    fn to_value(&self) -> Option<Value> {
        let pair =
            |(sequences, steps): &(usize, u64)| Some(Value::Array(vec![sequences.to_value()?, steps.to_value()?]));
        self.0.iter().map(pair).collect::<Option<_>>().map(Value::Array)
    }
}

choices! {
    /// The learning rate of a stage of a batch warm-up, against that of the whole batch.
    BatchWarmupRate {
        /// Times the root of the share of the batch (Malladi et al. 2022, for Adam).
        SquareRoot = "square_root",
        /// Times the share of the batch (Goyal et al. 2017, for SGD).
        Linear = "linear",
        /// The same.
        Constant = "constant",
    }
}

/// The steps that take one batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct BatchStage {
    /// Their batch.
    pub batch: Batch,
    /// The step, from 0, at which the next stage begins.
    pub end: u64,
}

/// The batches of a run: those of the stages of a warm-up, then the whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Batches<'a> {
    /// The batch after the warm-up.
    pub whole: Batch,
    /// The stages of the warm-up, in order; empty without one.
    pub stages: &'a [BatchStage],
}

impl Batches<'_> {
    /// The stage of step `step`, from 0; None after the warm-up.
    pub fn stage(&self, step: u64) -> Option<usize> {
        self.stages.iter().position(|stage| step < stage.end)
    }

    /// The batch of step `step`, from 0.
    pub fn of(&self, step: u64) -> Batch {
        self.stage(step).map_or(self.whole, |stage| self.stages[stage].batch)
    }

    /// Every one of them, the whole first.
    pub fn all(self) -> impl Iterator<Item = Batch> {
        std::iter::once(self.whole).chain(self.stages.iter().map(|stage| stage.batch))
    }

    /// (sequences of a step, number of steps) of each stage.
    fn lengths(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut begin = 0;
        self.stages.iter().map(move |stage| {
            let steps = stage.end - std::mem::replace(&mut begin, stage.end);
            (stage.batch.global as u64, steps)
        })
    }

    /// Sequences of the first `steps` steps.
    pub fn sequences(&self, steps: u64) -> u64 {
        let (mut left, mut sum) = (steps, 0u64);
        for (each, steps) in self.lengths() {
            let taken = left.min(steps);
            sum = sum.saturating_add(each.saturating_mul(taken));
            left -= taken;
        }
        sum.saturating_add(left.saturating_mul(self.whole.global as u64))
    }

    /// The whole steps in `sequences` sequences, the batch of the step that follows, and the
    /// sequences that are left for it.
    pub fn place(&self, sequences: u64) -> (u64, Batch, u64) {
        let (mut done, mut left) = (0u64, sequences);
        for ((each, steps), stage) in self.lengths().zip(self.stages) {
            if left < each.saturating_mul(steps) {
                return (done + left / each, stage.batch, left % each);
            }
            left -= each * steps;
            done += steps;
        }
        let each = (self.whole.global as u64).max(1);
        (done + left / each, self.whole, left % each)
    }

    /// The fewest steps with at least `sequences` sequences.
    pub fn steps(&self, sequences: u64) -> u64 {
        let (steps, _, left) = self.place(sequences);
        steps + u64::from(left > 0)
    }

    /// The factors of the learning rate of the warm-up's stages, where the rate goes with the
    /// `exponent`-th power of the batch.
    fn rates(&self, exponent: f64) -> Vec<RateStage> {
        let factor = |batch: Batch| (batch.global as f64 / self.whole.global as f64).powf(exponent);
        self.stages.iter().map(|stage| RateStage { end: stage.end, factor: factor(stage.batch) }).collect()
    }
}

impl BatchWarmupRate {
    fn exponent(self) -> f64 {
        match self {
            BatchWarmupRate::SquareRoot => 0.5,
            BatchWarmupRate::Linear => 1.0,
            BatchWarmupRate::Constant => 0.0,
        }
    }
}

impl Resolved {
    /// The batches of the run's steps.
    pub fn batches(&self) -> Batches<'_> {
        Batches { whole: self.batch, stages: &self.batch_stages }
    }

    /// This configuration where every step takes `batch`.
    pub fn with_batch(&self, batch: Batch) -> Resolved {
        Resolved { batch_stages: Vec::new(), batch, ..self.clone() }
    }
}

const KEY: &str = "training.batch_warmup";

impl Resolver {
    /// The stages of the warm-up of a run whose whole batch is `whole`.
    pub(super) fn batch_stages(&mut self, whole: Batch) -> Vec<BatchStage> {
        let asked = self.config.training.batch_warmup.clone().unwrap_or_default().0;
        let mut stages = Vec::new();
        if asked.is_empty() {
            let because = "training.batch_warmup is unset";
            let given = self.config.training.batch_warmup_rate;
            self.unused("training.batch_warmup_rate", &given, because);
            return stages;
        }
        if asked.len() > STAGES_MAX {
            self.problem(KEY, format!("{KEY} has {} stages, and {STAGES_MAX} are the most", asked.len()));
            return stages;
        }
        let Batch { micro, data_parallel_degree: degree, global, .. } = whole;
        let mut end = 0u64;
        for (number, (sequences, steps)) in asked.iter().copied().enumerate() {
            let of = format!("{KEY}: stage {} has {sequences} sequences a step", number + 1);
            if steps == 0 || sequences == 0 {
                self.problem(
                    KEY,
                    format!("{KEY}: stage {} is [{sequences}, {steps}]; both are at least 1", number + 1),
                );
                continue;
            }
            if sequences >= global {
                let message = format!(
                    "{of}, but the whole batch, training.global_batch_size, has {global}: a warm-up leads up to it, so give less"
                );
                self.problem(KEY, message);
                continue;
            }
            let each = sequences / degree;
            let parts = each.is_multiple_of(micro) || micro.is_multiple_of(each.max(1));
            if !sequences.is_multiple_of(degree) || !parts {
                let smaller = (1..=micro).filter(|rows| micro.is_multiple_of(*rows));
                let possible = smaller.chain((2..=global / micro / degree).map(|many| many * micro));
                let nearest = possible.map(|each| each * degree).filter(|n| *n < global);
                let nearest = nearest.min_by_key(|n| n.abs_diff(sequences)).unwrap_or(degree);
                let message = format!(
                    "{of}, which {degree} data-parallel rank{} cannot share in whole micro-batches of {micro}, or of a part of it: take {nearest}, \
                     or another training.micro_batch_size",
                    if degree == 1 { "" } else { "s" }
                );
                self.problem(KEY, message);
                continue;
            }
            let (micro, accumulation) = (each.min(micro), (each / micro).max(1));
            let batch = Batch { micro, accumulation, data_parallel_degree: degree, global: sequences };
            end = end.saturating_add(steps);
            stages.push(BatchStage { batch, end });
        }
        self.alone_with_batch_warmup();
        stages
    }

    /// Rejects settings that need steps of one batch.
    fn alone_with_batch_warmup(&mut self) {
        let training = &self.config.training;
        let together = [
            ("training.elastic_bits", training.elastic_bits, "true", "sums the same micro-batches in every step"),
            (
                "training.cuda_graphs",
                training.cuda_graphs != CudaGraphs::Off,
                "not \"off\"",
                "replays steps of one shape",
            ),
            (
                "parallel.pipeline_schedule_file",
                self.config.parallel.pipeline_schedule_file.is_some(),
                "set",
                "is a table for one number of micro-batches",
            ),
            (
                "update.rule",
                self.config.update.rule != UpdateRule::Synchronous,
                "not \"synchronous\"",
                "counts rounds of equal steps",
            ),
        ];
        for (key, _, is, why) in together.into_iter().filter(|(_, is_set, ..)| *is_set) {
            self.problem(
                KEY,
                format!("{KEY} changes the batch, and {key}, which is {is}, {why}: leave one of the two out"),
            );
        }
    }

    /// Checks the warm-up against the number of steps; gives the factors of its learning rates.
    pub(super) fn batch_warmup_rates(&mut self, batches: Batches<'_>, steps: Option<u64>) -> Vec<RateStage> {
        let Some(last) = batches.stages.last() else { return Vec::new() };
        let training = &self.config.training;
        let is_counted = training.steps.is_some() || training.tokens.is_some() || training.epochs.is_some();
        match steps {
            // Epochs give it once the data is opened.
            None if is_counted => {}
            None => self.problem(
                KEY,
                format!("{KEY} needs the number of steps: set training.steps, training.tokens or training.epochs"),
            ),
            Some(steps) if last.end >= steps => {
                let message = format!(
                    "{KEY} takes {} steps, and the run has {steps}: no step would have the whole batch; shorten the warm-up, or set a \
                     smaller training.global_batch_size",
                    last.end
                );
                self.problem(KEY, message);
            }
            Some(_) => {}
        }
        let given = self.config.training.batch_warmup_rate;
        let because = "a batch's step grows with the root of the batch under Adam (Malladi et al. 2022)";
        let rate = self.settle("training.batch_warmup_rate", &given, BatchWarmupRate::SquareRoot, because);
        batches.rates(rate.exponent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(global: usize) -> Batch {
        Batch { micro: 1, accumulation: global, data_parallel_degree: 1, global }
    }

    #[test]
    fn steps_and_sequences_are_counted_over_stages() {
        let stages = vec![BatchStage { batch: batch(2), end: 3 }, BatchStage { batch: batch(4), end: 5 }];
        let batches = Batches { whole: batch(8), stages: &stages };
        let globals: Vec<usize> = (0..7).map(|step| batches.of(step).global).collect();
        assert_eq!(globals, [2, 2, 2, 4, 4, 8, 8]);
        let sums: Vec<u64> = (0..8).map(|steps| batches.sequences(steps)).collect();
        assert_eq!(sums, [0, 2, 4, 6, 10, 14, 22, 30]);
        for (sequences, want) in [(0, 0), (1, 1), (2, 1), (5, 3), (6, 3), (7, 4), (14, 5), (15, 6), (22, 6), (23, 7)] {
            assert_eq!(batches.steps(sequences), want, "{sequences}");
        }
        for sequences in 0..40 {
            let (steps, batch, left) = batches.place(sequences);
            assert_eq!(batches.sequences(steps) + left, sequences);
            assert_eq!(batch, batches.of(steps));
        }
        assert_eq!(Batches { whole: batch(8), stages: &[] }.steps(17), 3);
        let rates: Vec<f64> = batches.rates(0.5).iter().map(|stage| stage.factor).collect();
        assert_eq!(rates, [0.5, 0.5f64.sqrt()]);
    }
}
