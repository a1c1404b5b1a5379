//! Comparison with published measurements: predictions of rows, each by constants that were fitted
//! on the other sources, and the fit itself.

mod fit;
mod solve;
mod spread;

pub use fit::{Fit, fit};
pub use spread::class_errors;

use crate::constants::Constants;
use crate::errors::{ClassErrors, sources_of, wider};
use crate::interval::Interval;
pub use crate::measurement::Class;
use crate::measurement::{MemoryFigure, Row};
use crate::predict::predict;
use crate::profile::Profiles;
use std::collections::BTreeMap;

/// A row with its prediction.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// The measurement.
    pub row: Row,
    /// The reason why there is no prediction.
    pub failed: Option<String>,
    /// Predicted tokens per second and device.
    pub tokens_per_s: f64,
    /// Predicted memory as the row counts it, 1e9 bytes.
    pub memory_gb: f64,
    /// True if the prediction says that it fits.
    pub fits: bool,
    /// Memory that the device must have, over what it has.
    pub filled: f64,
    /// Share of the step in which compute waits.
    pub waiting: f64,
    /// The interval of tokens per second and device.
    pub speed_interval: Interval,
    /// The interval of memory, 1e9 bytes.
    pub memory_interval: Interval,
}

impl Outcome {
    /// Relative error of speed, if it was measured and predicted.
    pub fn speed_error(&self) -> Option<f64> {
        let measured = self.row.tokens_per_s.filter(|_| self.failed.is_none())?;
        Some(self.tokens_per_s / measured - 1.0)
    }

    /// Relative error of memory, likewise.
    pub fn memory_error(&self) -> Option<f64> {
        let measured = self.row.memory_gb.filter(|_| self.failed.is_none())?;
        Some(self.memory_gb / measured - 1.0)
    }

    /// True if the measured speed lies in its interval; None if there is no measured speed.
    pub fn speed_held(&self) -> Option<bool> {
        self.speed_error()?;
        self.row.tokens_per_s.map(|measured| self.speed_interval.holds(measured))
    }

    /// True if the measured memory lies in its interval; None if there is no measured memory.
    pub fn memory_held(&self) -> Option<bool> {
        self.memory_error()?;
        self.row.memory_gb.map(|measured| self.memory_interval.holds(measured))
    }

    /// The source, and true for dense models in 16 bits.
    fn group(&self) -> (String, bool) {
        (self.row.source().to_owned(), self.row.class() == Class::Dense)
    }

    /// True if the verdict on memory agrees with the measurement.
    pub fn verdict_right(&self) -> bool {
        self.failed.is_none() && self.fits != self.row.out_of_memory
    }
}

/// Predicts every row with the constants that `constants` gives for its source.
pub fn compare<'a>(
    rows: &[Row],
    profiles: &Profiles,
    constants: impl Fn(&str) -> &'a Constants + Sync,
) -> Vec<Outcome> {
    in_parallel(rows, |row| outcome(row, profiles, constants(row.source())))
}

/// Gives each outcome the intervals by the errors of the outcomes of other sources.
pub fn add_intervals(outcomes: &mut [Outcome], profiles: &Profiles) {
    let of: Vec<(String, bool, Option<ClassErrors>)> = {
        let mut keys: Vec<(String, bool)> = outcomes.iter().map(Outcome::group).collect();
        keys.sort_unstable();
        keys.dedup();
        let errors = |(source, dense): (String, bool)| {
            let others: Vec<&Outcome> = outcomes
                .iter()
                .filter(|other| other.row.source() != source && (other.row.class() == Class::Dense) == dense)
                .collect();
            let errors = class_errors(&others);
            (source, dense, errors)
        };
        keys.into_iter().map(errors).collect()
    };
    // The number of things that no other source covers well: generations of devices that fewer than
    // two others ran on.
    let mut unfamiliar: BTreeMap<(String, String), usize> = BTreeMap::new();
    for outcome in outcomes.iter() {
        let key = outcome.row.device_and_source();
        let count = usize::from(sources_of(profiles, &outcome.row.device, Some(&key.1)) < 2);
        unfamiliar.insert(key, count);
    }
    for outcome in outcomes {
        let group = outcome.group();
        let found = of.iter().find(|(source, dense, _)| (source, *dense) == (&group.0, group.1));
        if let Some((_, _, Some(errors))) = found {
            let wider = wider(unfamiliar[&outcome.row.device_and_source()]);
            outcome.speed_interval = errors.speed.interval(outcome.tokens_per_s, outcome.waiting, wider);
            outcome.memory_interval = errors.memory.interval(outcome.memory_gb, outcome.waiting, 1.0);
        }
    }
}

/// Maps `items` on as many threads as there are cores, in order.
fn in_parallel<T: Sync, R: Send>(items: &[T], map: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(item) = items.get(index) else { return done };
            done.push((index, map(item)));
        }
    };
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("predictions do not panic")).collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

fn outcome(row: &Row, profiles: &Profiles, constants: &Constants) -> Outcome {
    let failed = |error: String| Outcome {
        row: row.clone(),
        failed: Some(error),
        tokens_per_s: 0.0,
        memory_gb: 0.0,
        fits: false,
        filled: 0.0,
        waiting: 0.0,
        speed_interval: Interval::default(),
        memory_interval: Interval::default(),
    };
    let case = match row.case(profiles) {
        Ok(case) => case,
        Err(error) => return failed(error.to_string()),
    };
    match predict(&case, constants) {
        Err(error) => failed(error.to_string()),
        Ok(prediction) => {
            let figure = row.memory_figure.unwrap_or(MemoryFigure::Device);
            Outcome {
                row: row.clone(),
                failed: None,
                tokens_per_s: prediction.tokens_per_s,
                memory_gb: prediction.memory_bytes(figure) / 1e9,
                fits: prediction.fits(),
                filled: prediction.needed_bytes() / prediction.device_bytes,
                waiting: prediction.waiting(),
                speed_interval: Interval::exact(prediction.tokens_per_s),
                memory_interval: Interval::exact(prediction.memory_bytes(figure) / 1e9),
            }
        }
    }
}

/// The value below which the share `share` of the weight lies, among pairs of values and weights.
pub fn weighted_quantile(values: &[(f64, f64)], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = sorted.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    for (value, weight) in &sorted {
        sum += weight;
        if sum >= share * total - 1e-9 {
            return Some(*value);
        }
    }
    None
}

/// The treatment of runs that the source shows to be [disturbed](Row::disturbed).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disturbed {
    /// They count like all others.
    Counted,
    /// They are left out.
    Left,
}

/// For each group of at least three configurations of one model on the same devices that one source
/// measured: the configuration that is predicted fastest, and the speed that is lost by taking it.
/// Of a configuration that was measured several times, the average counts. Runs that the source
/// shows to be disturbed count only if asked for: no plan can foresee them.
pub fn choices(outcomes: &[Outcome], disturbed: Disturbed) -> Vec<(String, f64)> {
    let mut groups: BTreeMap<String, BTreeMap<String, Vec<(f64, f64)>>> = BTreeMap::new();
    for outcome in outcomes {
        let row = &outcome.row;
        if row.disturbed && disturbed == Disturbed::Left {
            continue;
        }
        let (Some(measured), None) = (row.tokens_per_s, &outcome.failed) else { continue };
        let Row { model, sequence, device, devices, format, .. } = row;
        let group = format!("{} {model:?} {sequence} {device} {devices} {format:?}", row.source());
        let Row { tp, pp, chunks, cp, ep, dp, shards, zero, micro_batch, recompute, offloaded, prefetch, .. } = row;
        let configuration = format!(
            "{} tp {tp} pp {pp} x {chunks} cp {cp} ep {ep} dp {dp}/{shards} zero {zero} mb {micro_batch} {recompute} {offloaded} {prefetch:?}",
            row.source()
        );
        let measured = (outcome.tokens_per_s, measured);
        groups.entry(group).or_default().entry(configuration).or_default().push(measured);
    }
    let picked = |group: &BTreeMap<String, Vec<(f64, f64)>>| {
        let average = |(name, runs): (&String, &Vec<(f64, f64)>)| {
            let count = runs.len() as f64;
            let sums = runs.iter().fold((0.0, 0.0), |sums, run| (sums.0 + run.0, sums.1 + run.1));
            (name.clone(), sums.0 / count, sums.1 / count)
        };
        let all: Vec<(String, f64, f64)> = group.iter().map(average).collect();
        let best = all.iter().map(|(_, _, measured)| *measured).fold(0.0, f64::max);
        let (name, _, measured) = all.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        Some((name, 1.0 - measured / best))
    };
    groups.values().filter(|group| group.len() >= 3).filter_map(picked).collect()
}
