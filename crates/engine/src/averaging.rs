//! Averages of the weights over the steps of training.
//!
//! The weights that an optimizer leaves behind at a high learning rate bounce around a point that
//! has a lower loss. An average of them over steps is near that point, as if the rate had been
//! lowered. Two averages are common:
//!
//! - the *exponential* one (Polyak & Juditsky 1992): `a += (1 - decay) (w - a)` after an update. It
//!   remembers about `1 / (1 - decay)` updates;
//! - the *uniform* one of the tail of a run (stochastic weight averaging, Izmailov et al. 2018):
//!   `a += (w - a) / n` with the `n`-th weights, the mean of all of them.
//!
//! An average is a state tensor beside the optimizer's, with an f32 element for each master that
//! the rank holds ([`crate::optimizer`]). So it is sharded, offloaded, predicted and checkpointed
//! like them, and no rank sends anything for it.

use serde::Serialize;

/// An average of the weights over steps.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Averaging {
    /// The rule.
    pub rule: AveragingRule,
    /// The first update whose weights are taken into the average, from 1.
    pub start: u64,
    /// Number of updates from one whose weights are taken to the next.
    pub interval: u64,
}

/// The rule by which weights are taken into an average.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub enum AveragingRule {
    /// Exponential: older weights fade.
    Exponential {
        /// The share of the old average in the new one.
        decay: f64,
        /// True if the `n`-th weights, from 0, are taken with a decay of at most
        /// `(1 + n) / (10 + n)`. So the first weights fade soon, whatever the decay.
        warmup: bool,
    },
    /// The mean of all weights taken.
    Uniform,
}

impl Averaging {
    /// The share of the weights after update `update`, from 1, in the average that has taken
    /// `averaged` weights so far; None if it does not take them. The first weights that it takes
    /// are all of it.
    pub fn share(&self, update: u64, averaged: u64) -> Option<f32> {
        let is_due = update >= self.start && (update - self.start).is_multiple_of(self.interval);
        let n = averaged as f64;
        let share = match self.rule {
            _ if averaged == 0 => 1.0,
            AveragingRule::Exponential { decay, warmup: true } => 1.0 - decay.min((1.0 + n) / (10.0 + n)),
            AveragingRule::Exponential { decay, warmup: false } => 1.0 - decay,
            AveragingRule::Uniform => 1.0 / (n + 1.0),
        };
        is_due.then_some(share as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(averaging: Averaging, updates: u64) -> Vec<(u64, f32)> {
        let mut all = Vec::new();
        for update in 1..=updates {
            all.extend(averaging.share(update, all.len() as u64).map(|share| (update, share)));
        }
        all
    }

    #[test]
    fn a_uniform_average_is_the_mean_of_every_so_many_weights_from_the_first_on() {
        let averaging = Averaging { rule: AveragingRule::Uniform, start: 5, interval: 3 };
        let third = (1.0 / 3.0) as f32;
        assert_eq!(shares(averaging, 13), [(5, 1.0), (8, 0.5), (11, third)]);
    }

    #[test]
    fn the_decay_warms_up() {
        let rule = |warmup| AveragingRule::Exponential { decay: 0.6, warmup };
        let cold = shares(Averaging { rule: rule(false), start: 1, interval: 1 }, 3);
        assert_eq!(cold, [(1, 1.0), (2, 0.4), (3, 0.4)]);
        let warm = shares(Averaging { rule: rule(true), start: 1, interval: 1 }, 40);
        let want = |n: f64| (1.0 - (1.0 + n) / (10.0 + n)) as f32;
        assert_eq!(warm[..4], [(1, 1.0), (2, want(1.0)), (3, want(2.0)), (4, want(3.0))]);
        // (1 + n) / (10 + n) = 0.6 at n = 12.5.
        assert_eq!(warm.iter().position(|(_, share)| *share == 0.4), Some(13));
        assert!(warm.windows(2).all(|pair| pair[1].1 <= pair[0].1));
    }
}
