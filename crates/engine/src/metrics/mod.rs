//! The records of a run: one per step and one per evaluation, and the files and displays that
//! receive them.
//!
//! [`StepMetrics`] lists all names. [`Recorder`] writes it to `metrics.jsonl` ([`jsonl`]) and to
//! TensorBoard event files ([`tensorboard`]); [`Progress`] shows it. Records are measured values
//! without smoothing. A utilisation above one is an error, [`UtilizationAboveOne`], because then
//! the FLOPs, the time or the peak are wrong.
//!
//! Steps count completed optimizer steps: the record of the first step has `step = 1`, and a
//! checkpoint of step n is taken after the record n.

pub(crate) mod above_peak;
pub mod jsonl;
pub mod progress;
pub mod sitting;
pub mod tensorboard;

pub use jsonl::{JsonLines, Repair};
pub use progress::{Plain, Progress, Quiet, Terminal, TimeLeft};
pub use sitting::{Sample, Sitting};
pub use tensorboard::EventWriter;

use crate::config::MetricsSection;
use crate::evaluate::TextLoss;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trainyard_model::units::Hits;
use trainyard_model::{LayerRouting, RoutingRecord};

/// One optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Completed steps, this one included.
    pub step: u64,
    /// Mean loss of a token over the global batch, in nats; not finite if the step was skipped
    /// because of it.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Global norm of the gradient before clipping.
    #[serde(deserialize_with = "null_is_nan")]
    pub grad_norm: f64,
    /// Tokens trained on since the beginning of the run, including this step.
    pub tokens: u64,
    /// Passes over the training data since the beginning of the run, including this step.
    #[serde(default)]
    pub epoch: f64,
    /// Tokens per second in this step; of images, positions.
    pub tps: f64,
    /// Images per second in this step; absent for text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images_per_s: Option<f64>,
    /// Model TFLOP/s in this step: the operations of the model's mathematics, without
    /// recomputation.
    pub tflops: f64,
    /// `tflops` as a share of the peak measured at start, from 0 to 1; `None` when no peak is
    /// known.
    pub mfu: Option<f64>,
    /// Seconds from the previous step's end to this one's.
    pub step_s: f64,
    /// Part of `step_s` spent waiting for data.
    pub data_wait_s: f64,
    /// Seconds that rank 0's lanes spent in exchanges with other ranks.
    #[serde(default)]
    pub comm_s: f64,
    /// Part of `comm_s` during which computing waited.
    #[serde(default)]
    pub comm_exposed_s: f64,
    /// The most bytes of the pool in use at once.
    pub mem_peak_bytes: u64,
    /// The peak bytes of each purpose. Purposes peak at different times, so the sum is at least the
    /// total.
    pub mem_peak: BTreeMap<String, u64>,
    /// The most bytes that the pool held at once: in use or kept for reuse.
    #[serde(default)]
    pub mem_reserved_bytes: u64,
    /// Prediction of `step_s` from the machine's profile; absent without a profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_step_s: Option<f64>,
    /// Prediction of `mem_peak_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_mem_peak_bytes: Option<u64>,
    /// The loss scale, in f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// The drift between replicas that train apart, in a step that ends in an outer step: the root
    /// mean square distance of their changes from the mean change, as a share of its length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift: Option<f64>,
    /// In a step that ends a round in which replicas may make different numbers of steps: the
    /// number that each has made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inner_steps: Option<Vec<u64>>,
    /// With a parameter server: the pulls of all workers from rank 0 since the step before, by the
    /// number of updates that the pulled parameters lacked. Entry 0 counts pulls that lacked none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staleness: Option<Vec<u64>>,
    /// With back-up workers: the pushes that updates were made without since the step before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_pushes: Option<u64>,
    /// True if rank 0 computed nothing in the step: its update had been made without it, or its
    /// replica has made its steps of the round.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late: bool,
    /// The share of weights that are zero, of those that rank 0 prunes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sparsity: Option<f64>,
    /// The penalty of elastic weight consolidation on the weights before the update. The loss does
    /// not include it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub penalty: Option<f64>,
    /// Number of parameters that this step trains, with a schedule of freezing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_parameters: Option<u64>,
    /// The balance of experts, in a model with experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertMetrics>,
    /// True if the update was skipped because the loss or the gradient was not finite.
    pub skipped: bool,
}

/// The balance of experts in one step, over all ranks and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertMetrics {
    /// Tokens of the largest expert over the mean, in the layer where that is most.
    pub load_max: f64,
    /// The same, averaged over layers.
    pub load_max_mean: f64,
    /// Choices that were dropped because their expert had no room, over all layers.
    pub dropped: u64,
    /// The auxiliary loss without its factor, E sum(f P), averaged over layers; `top_k` when
    /// experts are balanced. 0 where neither it nor the z-loss has a factor.
    pub auxiliary_loss: f64,
    /// The router's z-loss without its factor, averaged over layers.
    pub z_loss: f64,
}

impl ExpertMetrics {
    /// The figures of a step's record; None where nothing was routed.
    pub fn new(record: &RoutingRecord) -> Option<ExpertMetrics> {
        let layers: Vec<&LayerRouting> = record.layers().map(|(_, layer)| layer).collect();
        let count = layers.len() as f64;
        let mean = |of: &dyn Fn(&LayerRouting) -> f64| layers.iter().map(|layer| of(layer)).sum::<f64>() / count;
        let load = |layer: &LayerRouting| {
            let sum: f64 = layer.counts.iter().sum();
            let max = layer.counts.iter().copied().fold(0.0, f64::max);
            if sum > 0.0 { max * layer.counts.len() as f64 / sum } else { 0.0 }
        };
        (!layers.is_empty()).then(|| ExpertMetrics {
            load_max: layers.iter().map(|layer| load(layer)).fold(0.0, f64::max),
            load_max_mean: mean(&load),
            dropped: layers.iter().map(|layer| layer.dropped).sum::<f64>() as u64,
            auxiliary_loss: mean(&|layer| layer.auxiliary / layer.tokens),
            z_loss: mean(&|layer| layer.z / layer.tokens),
        })
    }
}

/// One evaluation on held-back text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationMetrics {
    /// Completed steps before the evaluation.
    pub step: u64,
    /// Mean loss of a token, in nats.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// exp(loss).
    #[serde(deserialize_with = "null_is_nan")]
    pub perplexity: f64,
    /// Bits per byte of the text, when its bytes are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// Mean loss of a token under the average of the weights, if one is kept and has taken some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub averaged_loss: Option<f64>,
    /// The share of images whose class has the highest score; absent for text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top1: Option<f64>,
    /// The share of images whose class is among the five highest scores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top5: Option<f64>,
    /// Tokens that were predicted; of images, their number.
    pub tokens: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Each text by itself, if there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<TextMetrics>,
}

/// The evaluation of one of several held-back texts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextMetrics {
    /// The text's name.
    pub name: String,
    /// Mean loss of a token, in nats.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Tokens that were predicted.
    pub tokens: u64,
}

impl EvaluationMetrics {
    /// Makes the record from `loss_sum`, the summed losses in nats of `tokens` tokens, which stand
    /// for `bytes` bytes of text.
    pub fn new(step: u64, loss_sum: f64, tokens: u64, bytes: Option<u64>, seconds: f64) -> EvaluationMetrics {
        let loss = loss_sum / tokens as f64;
        let bits_per_byte =
            bytes.filter(|bytes| *bytes > 0).map(|bytes| loss_sum / std::f64::consts::LN_2 / bytes as f64);
        let (perplexity, averaged_loss, texts) = (loss.exp(), None, Vec::new());
        let (top1, top5) = (None, None);
        EvaluationMetrics { step, loss, perplexity, bits_per_byte, averaged_loss, top1, top5, tokens, seconds, texts }
    }

    /// With the mean loss under the average of the weights.
    pub fn with_average(self, averaged_loss: Option<f64>) -> EvaluationMetrics {
        EvaluationMetrics { averaged_loss, ..self }
    }

    /// With the shares of images whose class was found; as it is if they are None.
    pub fn with_accuracy(self, hits: Option<Hits>) -> EvaluationMetrics {
        let share = |right: u64, hits: &Hits| right as f64 / hits.counted.max(1) as f64;
        let [top1, top5] = [hits.map(|hits| share(hits.top1, &hits)), hits.map(|hits| share(hits.top5, &hits))];
        EvaluationMetrics { top1, top5, ..self }
    }

    /// With the losses of each text, if there are several and some of each was read.
    pub fn with_texts(mut self, names: &[String], texts: &[TextLoss]) -> EvaluationMetrics {
        let read = names.iter().zip(texts).filter(|(_, text)| text.targets > 0);
        let metrics = |(name, text): (&String, &TextLoss)| TextMetrics {
            name: name.clone(),
            loss: text.loss_sum / text.targets as f64,
            tokens: text.targets,
        };
        self.texts = read.map(metrics).collect();
        if self.texts.len() < 2 {
            self.texts.clear();
        }
        self
    }
}

/// JSON has no infinities: they are written as null.
fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// A step that computed faster than the measured peak: the machine was busy while the peak was
/// measured, or the work or the time is wrong.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "the step ran at {tflops:.3} TFLOP/s, which is more than the peak of {peak_tflops:.3} TFLOP/s that was measured ({:.0} %): \
     the machine was probably busy during that measurement; run it again while nothing else runs",
    100.0 * utilization
)]
pub struct UtilizationAboveOne {
    /// `tflops / peak_tflops`.
    pub utilization: f64,
    /// Rate of the step.
    pub tflops: f64,
    /// Measured peak of the machine.
    pub peak_tflops: f64,
}

/// Rates of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throughput {
    /// Tokens per second.
    pub tps: f64,
    /// Model TFLOP/s.
    pub tflops: f64,
    /// `tflops` as a share of the peak.
    pub mfu: Option<f64>,
}

impl Throughput {
    /// The rates of `tokens` and `flops` in `seconds`, relative to a peak in FLOP/s.
    ///
    /// # Errors
    ///
    /// The rate exceeds the peak.
    pub fn new(tokens: u64, flops: f64, seconds: f64, peak: Option<f64>) -> Result<Throughput, UtilizationAboveOne> {
        let rates = Throughput::without_peak(tokens, flops, seconds);
        let peak_tflops = peak.filter(|peak| *peak > 0.0).map(|peak| peak / 1e12);
        let mfu = peak_tflops.map(|peak| rates.tflops / peak);
        if let (Some(utilization), Some(peak_tflops)) = (mfu.filter(|mfu| *mfu > 1.0), peak_tflops) {
            return Err(UtilizationAboveOne { utilization, tflops: rates.tflops, peak_tflops });
        }
        Ok(Throughput { mfu, ..rates })
    }

    /// The rates of `tokens` and `flops` in `seconds`, without the utilisation.
    pub fn without_peak(tokens: u64, flops: f64, seconds: f64) -> Throughput {
        // A clock that did not move measures nothing.
        let per_second = if seconds > 0.0 { 1.0 / seconds } else { 0.0 };
        Throughput { tps: tokens as f64 * per_second, tflops: flops * per_second / 1e12, mfu: None }
    }
}

/// An error while records are written.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The refused action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// An impossible figure.
    #[error(transparent)]
    Utilization(#[from] UtilizationAboveOne),
}

impl MetricsError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> MetricsError {
        let path = path.to_owned();
        move |source| MetricsError::Io { action, path, source }
    }
}

/// All files that receive records, by `[metrics]`.
#[derive(Debug)]
pub struct Recorder {
    steps: Option<JsonLines>,
    evaluations: Option<JsonLines>,
    events: Option<EventWriter>,
    thinning: Thinning,
    /// The last step, if it has no record.
    last: Option<StepMetrics>,
}

impl Recorder {
    /// Opens the records of the run in `folder`: `metrics.jsonl`, `evaluations.jsonl` and
    /// `tensorboard/`.
    ///
    /// `resumed` is the step of the checkpoint that the run resumes from (0 for a new run). Later
    /// records are removed, so that no step appears twice. The second result has a sentence for
    /// each removal or repair.
    pub fn open(
        folder: &Path,
        section: &MetricsSection,
        resumed: u64,
    ) -> Result<(Recorder, Vec<String>), MetricsError> {
        let mut notices = Vec::new();
        let mut open = |name: &str| {
            let (lines, repair) = JsonLines::open(&folder.join(name), resumed)?;
            notices.extend(repair.notice(name));
            Ok::<_, MetricsError>(Some(lines))
        };
        let (mut steps, mut evaluations) = (None, None);
        if section.jsonl {
            steps = open("metrics.jsonl")?;
            evaluations = open("evaluations.jsonl")?;
        }
        let events =
            section.tensorboard.then(|| EventWriter::create(&folder.join("tensorboard"), resumed)).transpose()?;
        let thinning = Thinning { interval: section.interval_steps };
        Ok((Recorder { steps, evaluations, events, thinning, last: None }, notices))
    }

    /// Records one step, unless it is thinned out. Returns a sentence for the user where fewer
    /// steps are recorded from here on.
    ///
    /// # Errors
    ///
    /// A utilisation above one, and refusals of the operating system.
    pub fn step(&mut self, metrics: &StepMetrics) -> Result<Option<String>, MetricsError> {
        if let Some(utilization) = metrics.mfu.filter(|mfu| *mfu > 1.0) {
            let peak_tflops = metrics.tflops / utilization;
            return Err(UtilizationAboveOne { utilization, tflops: metrics.tflops, peak_tflops }.into());
        }
        self.last = None;
        if !self.thinning.keeps(metrics.step) && !metrics.skipped {
            self.last = Some(metrics.clone());
            return Ok(None);
        }
        self.write(metrics)?;
        Ok(self.thinning.said_at(metrics.step))
    }

    fn write(&mut self, metrics: &StepMetrics) -> Result<(), MetricsError> {
        if let Some(lines) = &mut self.steps {
            lines.append(metrics)?;
        }
        self.events.as_mut().map_or(Ok(()), |events| events.scalars(metrics.step, &step_scalars(metrics)))
    }

    /// Records one evaluation. An evaluation that is repeated when a run resumes is already in
    /// `evaluations.jsonl`.
    pub fn evaluation(&mut self, metrics: &EvaluationMetrics) -> Result<(), MetricsError> {
        if let Some(lines) = self.evaluations.as_mut().filter(|lines| lines.last_step() != Some(metrics.step)) {
            lines.append(metrics)?;
        }
        let mut scalars = vec![
            ("validation_metrics/loss".to_owned(), metrics.loss),
            ("validation_metrics/perplexity".to_owned(), metrics.perplexity),
        ];
        scalars.extend(metrics.bits_per_byte.map(|bits| ("validation_metrics/bits_per_byte".to_owned(), bits)));
        scalars.extend(metrics.top1.map(|share| ("validation_metrics/top1".to_owned(), share)));
        scalars.extend(metrics.top5.map(|share| ("validation_metrics/top5".to_owned(), share)));
        scalars.extend(metrics.averaged_loss.map(|loss| ("validation_metrics/averaged_loss".to_owned(), loss)));
        scalars.extend(metrics.texts.iter().map(|text| (format!("validation_metrics/loss/{}", text.name), text.loss)));
        self.events.as_mut().map_or(Ok(()), |events| events.scalars(metrics.step, &scalars))
    }

    /// The step of the last evaluation that was on record when this was opened.
    pub fn last_evaluation(&self) -> Option<u64> {
        self.evaluations.as_ref().and_then(JsonLines::last_step)
    }

    /// Ends a sitting: its last step is recorded in any case, and everything is made durable.
    pub fn end(&mut self) -> Result<(), MetricsError> {
        if let Some(last) = self.last.take() {
            self.write(&last)?;
        }
        self.steps.iter_mut().chain(&mut self.evaluations).try_for_each(JsonLines::sync)
    }
}

/// Chooses the steps of a long run that have records.
#[derive(Clone, Copy, Debug)]
struct Thinning {
    /// `metrics.interval_steps`; None: increasing intervals.
    interval: Option<u64>,
}

impl Thinning {
    /// Up to this step every step has a record.
    const EVERY: u64 = 10_000;

    /// Steps between records around `step`: 1 up to [`Thinning::EVERY`], 10 up to ten times that,
    /// and so on. A run of a million steps has 28,000 records, and one of a billion has 55,000. The
    /// interval depends on the step alone, so a resumed run has the same records as one that was
    /// never stopped.
    fn interval(self, step: u64) -> u64 {
        self.interval.unwrap_or_else(|| {
            let decades = step.saturating_sub(1) / Thinning::EVERY;
            decades.checked_ilog10().map_or(1, |decades| 10u64.saturating_pow(decades + 1))
        })
    }

    fn keeps(self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.interval(step))
    }

    /// A sentence for the user if fewer steps have records after `step`.
    fn said_at(self, step: u64) -> Option<String> {
        let interval = self.interval(step.saturating_add(1));
        (interval > self.interval(step)).then(|| {
            format!(
                "step {step}: from here on every {interval}th step is recorded in metrics.jsonl and for TensorBoard \
                 (metrics.interval_steps = 1 records all)"
            )
        })
    }
}

/// A step under the names that torchtitan gives these curves, so that runs of both lie in one
/// chart.
fn step_scalars(m: &StepMetrics) -> Vec<(String, f64)> {
    const GIB: f64 = (1u64 << 30) as f64;
    let data_share = if m.step_s > 0.0 { 100.0 * m.data_wait_s / m.step_s } else { 0.0 };
    let mut scalars: Vec<(String, f64)> = [
        ("loss_metrics/global_avg_loss", m.loss),
        ("grad_norm", m.grad_norm),
        ("lr", m.lr),
        ("n_tokens_seen", m.tokens as f64),
        ("epoch", m.epoch),
        ("throughput(tps)", m.tps),
        ("tflops", m.tflops),
        ("time_metrics/end_to_end(s)", m.step_s),
        ("time_metrics/data_loading(s)", m.data_wait_s),
        ("time_metrics/data_loading(%)", data_share),
        ("memory/max_active(GiB)", m.mem_peak_bytes as f64 / GIB),
        ("memory/max_reserved(GiB)", m.mem_reserved_bytes as f64 / GIB),
        ("skipped", f64::from(u8::from(m.skipped))),
    ]
    .map(|(tag, value)| (tag.to_owned(), value))
    .into();
    scalars.extend(m.mfu.map(|mfu| ("mfu(%)".to_owned(), 100.0 * mfu)));
    scalars.extend(m.drift.map(|drift| ("drift".to_owned(), drift)));
    let staleness = m.staleness.as_deref().and_then(mean_staleness);
    scalars.extend(staleness.map(|mean| ("staleness/mean".to_owned(), mean)));
    scalars.extend(m.penalty.map(|penalty| ("consolidation_penalty".to_owned(), penalty)));
    scalars.extend(m.dropped_pushes.map(|dropped| ("dropped_pushes".to_owned(), dropped as f64)));
    scalars.extend(m.trained_parameters.map(|number| ("trained_parameters".to_owned(), number as f64)));
    scalars.extend(m.sparsity.map(|share| ("sparsity".to_owned(), share)));
    let experts = m.experts.map(|experts| {
        [
            ("experts/load_max", experts.load_max),
            ("experts/load_max_mean", experts.load_max_mean),
            ("experts/dropped", experts.dropped as f64),
            ("experts/auxiliary_loss", experts.auxiliary_loss),
            ("experts/z_loss", experts.z_loss),
        ]
    });
    scalars.extend(experts.into_iter().flatten().map(|(tag, value)| (tag.to_owned(), value)));
    scalars.extend(m.loss_scale.map(|scale| ("loss_scale".to_owned(), scale)));
    scalars
        .extend(m.mem_peak.iter().map(|(purpose, bytes)| (format!("memory/max_{purpose}(GiB)"), *bytes as f64 / GIB)));
    scalars
}

/// The mean number of updates that pulled parameters lacked; None without pulls.
pub fn mean_staleness(pulls: &[u64]) -> Option<f64> {
    let count: u64 = pulls.iter().sum();
    let sum: f64 = pulls.iter().zip(0u32..).map(|(pulls, lacked)| *pulls as f64 * f64::from(lacked)).sum();
    (count > 0).then(|| sum / count as f64)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn the_mean_staleness_is_that_of_the_pulls() {
        assert_eq!(mean_staleness(&[]), None);
        assert_eq!(mean_staleness(&[0, 0]), None);
        assert_eq!(mean_staleness(&[3]), Some(0.0));
        assert_eq!(mean_staleness(&[1, 0, 3]), Some(1.5));
    }

    pub(crate) fn sample(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 2.5,
            lr: 3e-4,
            grad_norm: 1.25,
            tokens: step * 2048,
            epoch: step as f64 / 64.0,
            tps: 2300.0,
            images_per_s: None,
            tflops: 1.9,
            mfu: Some(0.31),
            step_s: 0.89,
            data_wait_s: 0.001,
            comm_s: 0.0,
            comm_exposed_s: 0.0,
            mem_peak_bytes: 3 << 29,
            mem_peak: BTreeMap::from([("params".to_owned(), 1 << 29), ("activations".to_owned(), 1 << 30)]),
            mem_reserved_bytes: 13 << 27,
            predicted_step_s: Some(0.9),
            predicted_mem_peak_bytes: Some(3 << 29),
            loss_scale: None,
            drift: None,
            staleness: None,
            dropped_pushes: None,
            inner_steps: None,
            late: false,
            sparsity: None,
            penalty: None,
            trained_parameters: None,
            experts: None,
            skipped: false,
        }
    }

    #[test]
    fn a_utilisation_above_one_is_an_error_and_never_written() {
        let ok = Throughput::new(2048, 1e12, 0.5, Some(4e12)).unwrap();
        assert_eq!(ok, Throughput { tps: 4096.0, tflops: 2.0, mfu: Some(0.5) });
        assert_eq!(Throughput::new(1, 1e12, 1.0, None).unwrap().mfu, None);
        assert_eq!(Throughput::new(1, 1e12, 0.0, Some(1e12)).unwrap().tps, 0.0);
        let error = Throughput::new(2048, 1e12, 0.1, Some(4e12)).unwrap_err();
        assert_eq!(error.utilization, 2.5);

        let folder = tempfile::tempdir().unwrap();
        let (mut recorder, _) = Recorder::open(folder.path(), &MetricsSection::default(), 0).unwrap();
        let error = recorder.step(&StepMetrics { mfu: Some(1.01), ..sample(1) }).unwrap_err();
        assert!(matches!(error, MetricsError::Utilization(_)), "{error}");
        recorder.end().unwrap();
        assert_eq!(std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap(), "");
    }

    #[test]
    fn records_of_a_long_run_are_ever_fewer_and_a_resumed_run_has_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let section = MetricsSection { tensorboard: false, ..MetricsSection::default() };
        let recorded = || {
            let text = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
            let step = |line: &str| serde_json::from_str::<StepMetrics>(line).unwrap().step;
            text.lines().map(step).collect::<Vec<u64>>()
        };
        let (mut recorder, _) = Recorder::open(folder.path(), &section, 0).unwrap();
        let mut said = Vec::new();
        for step in 9_998..=10_024 {
            said.extend(recorder.step(&StepMetrics { skipped: step == 10_015, ..sample(step) }).unwrap());
        }
        recorder.end().unwrap();
        assert_eq!(recorded(), [9_998, 9_999, 10_000, 10_010, 10_015, 10_020, 10_024]);
        assert!(said.len() == 1 && said[0].contains("every 10th step"), "{said:?}");
        // The run resumes from a checkpoint of a step without a record.
        let (mut recorder, _) = Recorder::open(folder.path(), &section, 10_013).unwrap();
        (10_014..=10_030).for_each(|step| drop(recorder.step(&sample(step)).unwrap()));
        recorder.end().unwrap();
        assert_eq!(recorded(), [9_998, 9_999, 10_000, 10_010, 10_020, 10_030]);

        let derived = Thinning { interval: None };
        assert_eq!(
            [1, 10_000, 10_001, 100_000, 100_001, 1_000_001].map(|s| derived.interval(s)),
            [1, 1, 10, 10, 100, 1000]
        );
        let kept = |thinning: Thinning| (1..=1_000_000).filter(|step| thinning.keeps(*step)).count();
        assert_eq!((kept(derived), kept(Thinning { interval: Some(1) })), (28_000, 1_000_000));
        assert_eq!(kept(Thinning { interval: Some(1000) }), 1001);
    }

    #[test]
    fn records_have_the_names_that_are_promised() {
        let record = serde_json::to_value(sample(3)).unwrap();
        let names = "step loss lr grad_norm tokens epoch tps tflops mfu step_s data_wait_s comm_s comm_exposed_s mem_peak_bytes mem_peak mem_reserved_bytes predicted_step_s predicted_mem_peak_bytes skipped";
        let keys: Vec<_> = record.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, names.split(' ').collect::<Vec<_>>());
        assert_eq!(serde_json::from_value::<StepMetrics>(record).unwrap(), sample(3));
    }

    #[test]
    fn the_balance_of_experts_is_of_the_worst_layer_and_of_all() {
        // Counts of four experts, then dropped, tokens, auxiliary, z: an even layer, one without
        // experts, and one in which the largest expert has twice the mean.
        let list = [[2.0, 2.0, 2.0, 2.0, 0.0, 4.0, 8.0, 4.0], [0.0; 8], [4.0, 2.0, 2.0, 0.0, 1.0, 4.0, 12.0, 0.0]];
        let record = RoutingRecord::from_list(&list.concat(), 4);
        let metrics = ExpertMetrics::new(&record).unwrap();
        let want = ExpertMetrics { load_max: 2.0, load_max_mean: 1.5, dropped: 1, auxiliary_loss: 2.5, z_loss: 0.5 };
        assert_eq!(metrics, want);
        assert_eq!(RoutingRecord::from_list(&record.to_list(3, 4), 4), record);
        assert_eq!(ExpertMetrics::new(&RoutingRecord::default()), None);
        let metrics = StepMetrics { experts: Some(metrics), ..sample(1) };
        assert!(step_scalars(&metrics).contains(&("experts/load_max".to_owned(), 2.0)));
        let text = serde_json::to_string(&metrics).unwrap();
        assert_eq!(serde_json::from_str::<StepMetrics>(&text).unwrap(), metrics);
    }

    #[test]
    fn a_loss_that_is_not_finite_is_null_and_comes_back() {
        let text = serde_json::to_string(&StepMetrics { loss: f64::NAN, skipped: true, ..sample(1) }).unwrap();
        assert!(text.contains("\"loss\":null"), "{text}");
        assert!(serde_json::from_str::<StepMetrics>(&text).unwrap().loss.is_nan());
    }

    #[test]
    fn perplexity_and_bits_per_byte_follow_from_the_loss() {
        let e = EvaluationMetrics::new(7, 1000.0 * std::f64::consts::LN_2, 500, Some(2000), 1.0);
        assert!((e.loss - 2.0 * std::f64::consts::LN_2).abs() < 1e-12);
        assert!((e.perplexity - 4.0).abs() < 1e-12);
        assert!((e.bits_per_byte.unwrap() - 0.5).abs() < 1e-12);
    }
}
