//! Rounds in which replicas make different numbers of steps.
//!
//! Replica `r` makes the first `h_r` steps of a round. The samples of a step are divided among the
//! replicas that take part in it, and those of the next step follow without a gap. A round of
//! replicas with the numbers `h` therefore takes `sum(h)` parts, each of the samples of one replica
//! in one step. With the numbers (3, 1) the parts are:
//!
//! ```text
//! step       0     1   2
//! part     0   1   2   3
//! replica  0   1   0   0
//! ```

use super::LoaderConfig;
use crate::error::{DataError, Result};
use serde::{Deserialize, Serialize};

/// The number of steps that each replica makes in a round: at least 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundSteps(pub Vec<u64>);

impl RoundSteps {
    /// The same number for every replica.
    pub fn equal(replicas: usize, steps: u64) -> RoundSteps {
        RoundSteps(vec![steps; replicas])
    }

    /// Number of replicas.
    pub fn replicas(&self) -> usize {
        self.0.len()
    }

    /// Steps of a whole round: the largest number.
    pub fn longest(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or(0)
    }

    /// True if all replicas make equally many steps.
    pub fn are_equal(&self) -> bool {
        self.0.iter().all(|steps| *steps == self.0[0])
    }

    /// True if `replica` takes part in step `step` of the round, from 0.
    pub fn takes_part(&self, replica: usize, step: u64) -> bool {
        step < self.0[replica]
    }

    /// Number of replicas that take part in step `step` of the round.
    pub fn taking_part(&self, step: u64) -> usize {
        self.0.iter().filter(|steps| step < **steps).count()
    }

    /// The numbers of a round that ends after `steps` steps.
    pub fn within(&self, steps: u64) -> RoundSteps {
        RoundSteps(self.0.iter().map(|own| *own.min(&steps)).collect())
    }

    /// Number of parts that all replicas together take.
    pub fn parts(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Number of parts in the steps before step `step`.
    fn before(&self, step: u64) -> u64 {
        self.0.iter().map(|own| *own.min(&step)).sum()
    }

    /// The place of the part of `replica` in step `step`, counted from the first of the round.
    fn part(&self, replica: usize, step: u64) -> u64 {
        let earlier = self.0[..replica].iter().filter(|own| step < **own).count();
        self.before(step) + earlier as u64
    }
}

/// The rounds of a loader: one after the other with the same numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rounds {
    /// The numbers of every round.
    pub steps: RoundSteps,
    /// Steps of the first round that lie before the loader's first position.
    pub done: u64,
}

impl Rounds {
    /// All ranks take part in every step.
    pub(super) fn of_one() -> Rounds {
        Rounds { steps: RoundSteps(vec![1]), done: 0 }
    }

    /// Checks that the ranks of `config` can be divided among the replicas.
    pub(super) fn check(&self, config: &LoaderConfig) -> Result<()> {
        let (replicas, least) = (self.steps.replicas(), self.steps.0.iter().min().copied());
        if replicas == 0 || !config.world.is_multiple_of(replicas) || least == Some(0) {
            let what = format!("are {:?} for {} ranks", self.steps.0, config.world);
            let how = "give each replica a number of at least 1, and equally many ranks";
            return Err(DataError::setting("steps of a round", what, how));
        }
        Ok(())
    }

    /// The number of samples between the loader's first position and micro-batch `k` of its rank.
    pub(super) fn samples_before(&self, config: &LoaderConfig, k: u64) -> u64 {
        let accumulation = config.accumulation_steps as u64;
        let shards = config.world / self.steps.replicas();
        let (replica, shard) = (config.rank / shards, (config.rank % shards) as u64);
        let (round, step) = self.own_step(replica, k / accumulation);
        let part = round * self.steps.parts() + self.steps.part(replica, step) - self.steps.before(self.done);
        let group = (part * shards as u64 + shard) * accumulation + k % accumulation;
        group * config.micro_batch_size as u64
    }

    /// The number of samples between the loader's first position and the step of the whole job in
    /// which its rank takes its micro-batch `k`.
    pub(super) fn samples_before_step(&self, config: &LoaderConfig, k: u64) -> u64 {
        let accumulation = config.accumulation_steps as u64;
        let shards = config.world / self.steps.replicas();
        let (round, step) = self.own_step(config.rank / shards, k / accumulation);
        let parts = round * self.steps.parts() + self.steps.before(step) - self.steps.before(self.done);
        let of_part = shards as u64 * accumulation * config.micro_batch_size as u64;
        parts * of_part + (k % accumulation) * (config.micro_batch_size * config.world) as u64
    }

    /// The round, and the step in it, of the `number`-th step that `replica` makes.
    fn own_step(&self, replica: usize, number: u64) -> (u64, u64) {
        let own = self.steps.0[replica];
        let number = number + own.min(self.done);
        (number / own, number % own)
    }
}
