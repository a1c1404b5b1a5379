//! The quantiles of errors, each source counting alike.

use super::{Outcome, weighted_quantile};
use crate::errors::{ClassErrors, Spread};
use std::collections::BTreeMap;

/// Growth of errors with the share of the step in which compute waits; the one with the narrowest
/// intervals is taken.
const WAITING: [f64; 6] = [0.0, 0.5, 1.0, 2.0, 4.0, 8.0];

/// A row's error: the logarithm of measured over predicted, the share of waiting, the weight.
type Error = (f64, f64, f64);

/// The errors of `outcomes`; None if none of them has a measured speed or none a measured memory.
pub fn class_errors(outcomes: &[&Outcome]) -> Option<ClassErrors> {
    let speed = weighted(outcomes, |outcome| Some((1.0 + outcome.speed_error()?).recip().ln()));
    let memory = weighted(outcomes, |outcome| Some((1.0 + outcome.memory_error()?).recip().ln()));
    let (between, within) = parts(outcomes)?;
    let sizes: Vec<(f64, f64)> = speed.iter().map(|(error, _, weight)| (error.abs(), *weight)).collect();
    Some(ClassErrors {
        speed: spread(&speed, &WAITING)?,
        memory: spread(&memory, &WAITING[..1])?,
        between,
        within,
        usual: weighted_quantile(&sizes, 0.5)?,
        large: weighted_quantile(&sizes, 0.9)?,
    })
}

/// Errors with weights that give each source the weight 1.
fn weighted(outcomes: &[&Outcome], error: impl Fn(&Outcome) -> Option<f64>) -> Vec<Error> {
    let measured: Vec<(&Outcome, f64)> =
        outcomes.iter().filter_map(|outcome| Some((*outcome, error(outcome)?))).collect();
    let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
    measured.iter().for_each(|(outcome, _)| *counts.entry(outcome.row.source()).or_default() += 1.0);
    measured.iter().map(|(outcome, error)| (*error, outcome.waiting, 1.0 / counts[outcome.row.source()])).collect()
}

fn spread(errors: &[Error], slopes: &[f64]) -> Option<Spread> {
    let of = |waiting: f64| {
        let scaled: Vec<(f64, f64)> =
            errors.iter().map(|(error, share, weight)| (error / (1.0 + waiting * share), *weight)).collect();
        let (low, high) = (weighted_quantile(&scaled, 0.1)?, weighted_quantile(&scaled, 0.9)?);
        // The expected value lies in its interval.
        Some(Spread { low: low.min(-0.01), high: high.max(0.01), waiting })
    };
    let width = |spread: &Spread| {
        let widths: Vec<(f64, f64)> = errors
            .iter()
            .map(|(_, share, weight)| ((spread.high - spread.low) * (1.0 + spread.waiting * share), *weight))
            .collect();
        weighted_quantile(&widths, 0.5).unwrap_or(f64::INFINITY)
    };
    slopes.iter().filter_map(|slope| of(*slope)).min_by(|a, b| width(a).total_cmp(&width(b)))
}

/// Standard deviations of the error that the rows of a source have in common, and of the rest.
/// Medians stand for means, because a few rows of one source are off by factors.
fn parts(outcomes: &[&Outcome]) -> Option<(f64, f64)> {
    let mut sources: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for outcome in outcomes {
        if let Some(error) = outcome.speed_error() {
            sources.entry(outcome.row.source()).or_default().push(((1.0 + error).ln(), 1.0));
        }
    }
    let medians: BTreeMap<&str, f64> =
        sources.iter().filter_map(|(source, errors)| Some((*source, weighted_quantile(errors, 0.5)?))).collect();
    let between = medians.values().map(|median| median * median).sum::<f64>() / medians.len().max(1) as f64;
    let inside: Vec<(f64, f64)> = sources
        .iter()
        .filter_map(|(source, errors)| {
            let apart: Vec<(f64, f64)> =
                errors.iter().map(|(error, _)| ((error - medians[source]).abs(), 1.0)).collect();
            // 1.4826 median deviations are a standard deviation.
            (apart.len() >= 3).then(|| Some((1.4826 * weighted_quantile(&apart, 0.5)?, 1.0)))?
        })
        .collect();
    Some((between.sqrt(), weighted_quantile(&inside, 0.5)?))
}
