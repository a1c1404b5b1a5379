//! Health of the training: losses and gradient norms that are far from those of the steps before.
//!
//! A [`History`] keeps the last losses and norms. A number is a spike if it is above the median by
//! more than a configured number of deviations, where a deviation is 1.4826 times the median
//! absolute deviation (that of a normal distribution) and at least a small share of the median.
//! Both are robust: a spike does not raise the limit for the next one.
//!
//! The history is part of the state in checkpoints, and all ranks of a replica have the same
//! numbers. So they decide alike, and a resumed run decides as one that never stopped. Replicas
//! that train apart have different numbers until their outer step.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use trainyard_base::median;
use trainyard_record::health::Symptom;

/// Number of steps that are remembered.
const WINDOW: usize = 128;
/// Number of steps that must be known before one can be called unusual.
const KNOWN_MIN: usize = 24;
/// The least deviation of a loss and of a norm, as a share of the median.
const DEVIATION_MIN: [f64; 2] = [0.02, 0.1];
/// The growth of the median norm within the window that is said.
const DRIFT: f64 = 4.0;

/// The losses and gradient norms of the last steps.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct History {
    losses: VecDeque<f64>,
    norms: VecDeque<f64>,
    /// Steps since a drift was said.
    #[serde(default)]
    since_drift: usize,
}

/// The largest loss and gradient norm that are usual.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SpikeLimits {
    /// Of the loss.
    pub loss: f64,
    /// Of the gradient norm.
    pub norm: f64,
}

impl SpikeLimits {
    /// True if a step's loss or norm is above its limit. What is not finite is no spike.
    pub fn exceeded(&self, loss: f64, norm: f64) -> bool {
        loss.is_finite() && norm.is_finite() && (loss > self.loss || norm > self.norm)
    }
}

/// A suspicious number: its kind, its value, and the usual one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Suspicion {
    /// The kind.
    pub symptom: Symptom,
    /// The value.
    pub value: f64,
    /// The usual value.
    pub usual: f64,
}

impl History {
    /// The limits for the next step; None while too few steps are known.
    pub fn limits(&self, deviations: f64) -> Option<SpikeLimits> {
        if self.losses.len() < KNOWN_MIN {
            return None;
        }
        let limit = |values: &VecDeque<f64>, least: f64| {
            let middle = median(values.iter().copied())?;
            let deviation = 1.4826 * median(values.iter().map(|value| (value - middle).abs()))?;
            Some(middle + deviations * deviation.max(least * middle.abs()))
        };
        Some(SpikeLimits { loss: limit(&self.losses, DEVIATION_MIN[0])?, norm: limit(&self.norms, DEVIATION_MIN[1])? })
    }

    /// Adds a finished step, and returns what is suspicious about it. `deviations` makes the
    /// limits.
    pub fn add(&mut self, loss: f64, norm: f64, deviations: f64) -> Option<Suspicion> {
        let usual = |values: &VecDeque<f64>| median(values.iter().copied()).unwrap_or(f64::NAN);
        if !loss.is_finite() || !norm.is_finite() {
            let value = if loss.is_finite() { norm } else { loss };
            return Some(Suspicion { symptom: Symptom::NotFinite, value, usual: usual(&self.losses) });
        }
        let spike = self.limits(deviations).and_then(|limits| {
            let of_loss = Suspicion { symptom: Symptom::LossSpike, value: loss, usual: usual(&self.losses) };
            let of_norm = Suspicion { symptom: Symptom::NormSpike, value: norm, usual: usual(&self.norms) };
            match (loss > limits.loss, norm > limits.norm) {
                (true, _) => Some(of_loss),
                (false, true) => Some(of_norm),
                (false, false) => None,
            }
        });
        for (values, value) in [(&mut self.losses, loss), (&mut self.norms, norm)] {
            if values.len() == WINDOW {
                values.pop_front();
            }
            values.push_back(value);
        }
        spike.or_else(|| self.drift())
    }

    /// The growth of the norm over a full window, said once a window.
    fn drift(&mut self) -> Option<Suspicion> {
        self.since_drift += 1;
        if self.norms.len() < WINDOW || self.since_drift < WINDOW {
            return None;
        }
        let quarter = |begin: usize| median(self.norms.iter().skip(begin).take(WINDOW / 4).copied());
        let quarters: Vec<f64> = (0..4).filter_map(|n| quarter(n * WINDOW / 4)).collect();
        let grows = quarters.windows(2).all(|pair| pair[1] > pair[0]);
        let (first, last) = (quarters[0], quarters[3]);
        if !grows || last < DRIFT * first {
            return None;
        }
        self.since_drift = 0;
        Some(Suspicion { symptom: Symptom::NormDrift, value: last, usual: first })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Losses that fall and norms that vary, as in a healthy training.
    fn healthy(step: u64) -> (f64, f64) {
        let noise = ((step * 7919) % 97) as f64 / 97.0;
        (8.0 * (-(step as f64) / 300.0).exp() + 2.0 + 0.2 * noise, 1.0 + 0.6 * noise)
    }

    #[test]
    fn a_healthy_training_is_not_suspicious_and_a_spike_is() {
        let mut history = History::default();
        for step in 0..2_000 {
            let (loss, norm) = healthy(step);
            assert_eq!(history.add(loss, norm, 10.0), None, "step {step}");
        }
        let limits = history.limits(10.0).unwrap();
        assert!(!limits.exceeded(2.1, 1.3) && limits.exceeded(6.0, 1.0) && limits.exceeded(2.1, 30.0));
        assert!(!limits.exceeded(f64::NAN, 1.0));
        let said = |history: &mut History, loss, norm| history.add(loss, norm, 10.0).map(|said| said.symptom);
        assert_eq!(said(&mut history, 6.0, 1.0), Some(Symptom::LossSpike));
        assert_eq!(said(&mut history, 2.1, 30.0), Some(Symptom::NormSpike));
        assert_eq!(said(&mut history, f64::NAN, 1.0), Some(Symptom::NotFinite));
        // The spikes have not raised the limits much.
        assert!(history.limits(10.0).unwrap().loss < 1.2 * limits.loss);
    }

    #[test]
    fn a_norm_that_grows_is_said_once_a_window_and_the_start_of_a_training_is_no_spike() {
        let mut history = History::default();
        let grow = |step: usize| 1.02f64.powi(step as i32);
        let said: Vec<usize> = (0..300).filter(|step| history.add(3.0, grow(*step), 1e9).is_some()).collect();
        assert_eq!(said.len(), 2, "{said:?}");
        let mut history = History::default();
        assert!((0..20).all(|_| history.add(9.0, 1.0, 10.0).is_none()) && history.add(90.0, 1.0, 10.0).is_none());
    }
}
