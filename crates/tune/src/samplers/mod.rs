//! Samplers: functions from the results so far to the settings of the next trial.
//!
//! A sampler has no state. Its random numbers are a function of the seed and the number of the
//! trial, so a study that is read again from its journal goes on as it would have.

mod gaussian_process;
mod genetic;
mod sobol;
mod tpe;

use crate::random::Stream;
use crate::{Point, Space, Trial};
use serde::{Deserialize, Serialize};

pub use sobol::DIMENSIONS_MAX as SOBOL_DIMENSIONS_MAX;

/// A way to choose the settings of a new trial.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampler {
    /// Uniform random numbers.
    Random,
    /// A Sobol sequence: covers the space more evenly than random numbers.
    Sobol,
    /// The tree-structured Parzen estimator.
    Tpe,
    /// A Gaussian process and the expected improvement.
    GaussianProcess,
    /// Crossover and mutation of the best trials.
    Genetic,
}

/// A trial as samplers see it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Observation<'a> {
    /// Its settings.
    pub point: &'a Point,
    /// The losses at the rungs it reached.
    pub losses: &'a [Option<f64>],
    /// The standing of the trial.
    pub standing: Standing,
}

/// The standing of a trial.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Standing {
    /// It runs, and has reached no rung yet.
    Unknown,
    /// The highest rung that it reached, and the loss there.
    Reached(usize, f64),
    /// It failed or was refused.
    Failed,
}

impl<'a> Observation<'a> {
    /// The observation of a trial.
    pub fn of(trial: &'a Trial) -> Observation<'a> {
        let standing = match (&trial.end, trial.last()) {
            (Some(crate::End::Failed(_) | crate::End::Refused(_)), _) => Standing::Failed,
            (_, Some((rung, loss))) => Standing::Reached(rung, loss),
            (_, None) => Standing::Unknown,
        };
        Observation { point: &trial.point, losses: &trial.losses, standing }
    }

    fn loss_at(&self, rung: usize) -> Option<f64> {
        self.losses.get(rung).copied().flatten()
    }
}

/// Trials that are spread over the space before a model of it is made.
const FIRST: usize = 10;
/// Draws before a point that has been tried is accepted.
const DRAWS: u32 = 100;

const RANDOM: u32 = 0x7261_6e64;

impl Sampler {
    /// # Errors
    /// The sampler cannot search this space.
    pub(crate) fn check(self, space: &Space) -> Result<(), String> {
        if self == Sampler::Sobol && space.len() > SOBOL_DIMENSIONS_MAX {
            return Err(format!(
                "the Sobol sequence has {SOBOL_DIMENSIONS_MAX} dimensions, and the space has {} keys: use random",
                space.len()
            ));
        }
        Ok(())
    }

    /// The settings of the next trial after `trials`. If the space still has points that have not
    /// been tried, it is one of these, as far as a hundred draws find one.
    pub fn propose(self, space: &Space, seed: u64, trials: &[Observation<'_>]) -> Point {
        let is_new = |point: &Point| trials.iter().all(|trial| trial.point != point);
        let first = match self {
            Sampler::Random => space.point(&random(space, &mut Stream::new(seed, RANDOM, trials.len() as u32))),
            Sampler::Sobol => space.point(&sobol::place(space.len(), seed, trials.len())),
            _ if trials.iter().filter(|trial| trial.standing != Standing::Unknown).count() < FIRST => {
                space.point(&spread(space, seed, trials.len()))
            }
            Sampler::Tpe => tpe::propose(space, seed, trials),
            Sampler::GaussianProcess => gaussian_process::propose(space, seed, trials),
            Sampler::Genetic => genetic::propose(space, seed, trials),
        };
        if is_new(&first) || space.count().is_none() {
            return first;
        }
        // A space of few points: any that is new.
        let mut stream = Stream::new(seed, RANDOM ^ 1, trials.len() as u32);
        let mut draws = (0..DRAWS).map(|_| space.point(&random(space, &mut stream)));
        draws.find(is_new).unwrap_or(first)
    }
}

/// A uniform place in the unit cube.
fn random(space: &Space, stream: &mut Stream) -> Vec<f64> {
    (0..space.len()).map(|_| stream.uniform()).collect()
}

/// The place `number` of a sequence that covers the unit cube evenly.
pub(crate) fn spread(space: &Space, seed: u64, number: usize) -> Vec<f64> {
    match space.len() <= SOBOL_DIMENSIONS_MAX {
        true => sobol::place(space.len(), seed, number),
        false => random(space, &mut Stream::new(seed, RANDOM, number as u32)),
    }
}

/// The order of results: higher rungs first, then the lower loss; failures last. Trials that have
/// no result yet are left out.
fn ranked<'a, 'b>(trials: &'b [Observation<'a>]) -> Vec<&'b Observation<'a>> {
    let key = |trial: &Observation<'_>| match trial.standing {
        Standing::Reached(rung, loss) => (rung as i64, loss),
        _ => (-1, f64::INFINITY),
    };
    let mut ranked: Vec<&Observation<'_>> = trials.iter().filter(|trial| trial.standing != Standing::Unknown).collect();
    ranked.sort_by(|a, b| {
        let (a, b) = (key(a), key(b));
        b.0.cmp(&a.0).then(a.1.total_cmp(&b.1))
    });
    ranked
}
