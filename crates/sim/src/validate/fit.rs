//! The fit of the constants: the most probable ones given priors and the measured speeds of all
//! sources, and for each source the most probable ones without it.
//!
//! Every source counts alike, however many rows it has. A row's error is the logarithm of predicted
//! over measured speed, taken as Student-t distributed, so that inexplicable rows have little pull.
//! The fit is a Gauss-Newton method: predictions are linear in the logarithms of the constants
//! close to the current ones. So one table of derivatives serves the fits without each source, too.

use super::{in_parallel, solve::solve};
use crate::constants::{Constants, Prior};
use crate::measurement::Row;
use crate::predict::Lowered;
use crate::profile::Profiles;

/// Scale of a row's error, as a logarithm: half of what unexplained rows are off by.
const SCALE: f64 = 0.06;
/// Degrees of freedom of the errors' distribution.
const FREEDOM: f64 = 3.0;
/// Number of independent rows that a source is worth. Rows of one source share cluster, software
/// and the way of measuring.
const SOURCE_ROWS: f64 = 6.0;
/// Step in the logarithm of a constant for derivatives.
const STEP: f64 = 0.04;
/// Maximum change of a constant's logarithm before derivatives are taken anew.
const CHANGE_MAX: f64 = 0.25;
/// A source that has at least this share of what is known about a constant is said to identify it
/// alone.
const ALONE: f64 = 0.75;

/// The result of a fit.
#[derive(Clone, PartialEq, Debug)]
pub struct Fit {
    /// The constants fitted on all sources.
    pub constants: Constants,
    /// For each source, the values of the fitted constants without it.
    pub left_out: Vec<(String, Vec<f64>)>,
    /// For each fitted constant, the standard deviation of its logarithm, and the source that alone
    /// identifies it, if one does.
    pub certainty: Vec<(f64, Option<String>)>,
    /// Number of rows that it used.
    pub rows: usize,
}

struct Case {
    source: String,
    lowered: Lowered,
    measured: f64,
}

/// Errors of all rows at some constants, and their derivatives by the constants' logarithms.
struct Linear {
    errors: Vec<f64>,
    slopes: Vec<Vec<f64>>,
}

/// Fits the constants of the table `fitted` in `rounds` rounds.
pub fn fit(rows: &[Row], profiles: &Profiles, constants: &Constants, rounds: u32) -> Fit {
    let cases: Vec<Case> = rows
        .iter()
        .filter_map(|row| {
            let lowered = Lowered::new(&row.case(profiles).ok()?).ok()?;
            Some(Case { source: row.source().to_owned(), lowered, measured: row.tokens_per_s? })
        })
        .collect();
    let mut sources: Vec<String> = cases.iter().map(|case| case.source.clone()).collect();
    sources.sort_unstable();
    sources.dedup();
    let priors = constants.priors();
    let mut constants = constants.clone();
    let mut linear = linearised(&cases, &constants);
    for _ in 0..rounds {
        let change = most_probable(&cases, &linear, &priors, &logarithms(&mut constants), None);
        move_by(&mut constants, &change, CHANGE_MAX);
        linear = linearised(&cases, &constants);
    }
    let here = logarithms(&mut constants);
    let left_out = sources
        .iter()
        .map(|source| {
            let mut without = constants.clone();
            let change = most_probable(&cases, &linear, &priors, &here, Some(source));
            move_by(&mut without, &change, 2.0 * CHANGE_MAX);
            (source.clone(), without.fitted_mut().map(|(_, value)| *value).to_vec())
        })
        .collect();
    let certainty = certainty(&cases, &linear, &priors, &sources);
    Fit { constants, left_out, certainty, rows: cases.len() }
}

fn logarithms(constants: &mut Constants) -> Vec<f64> {
    constants.fitted_mut().iter().map(|(_, value)| value.ln()).collect()
}

fn move_by(constants: &mut Constants, change: &[f64], most: f64) {
    for ((name, value), change) in constants.fitted_mut().into_iter().zip(change) {
        *value *= change.clamp(-most, most).exp();
        if Constants::is_share(name) {
            *value = value.min(1.0);
        }
    }
}

fn linearised(cases: &[Case], constants: &Constants) -> Linear {
    let error = |case: &Case, constants: &Constants| {
        let predicted = case.lowered.tokens_per_s(constants).unwrap_or(f64::NAN);
        (predicted / case.measured).ln()
    };
    let count = constants.clone().fitted_mut().len();
    let moved: Vec<Constants> = (0..count)
        .map(|index| {
            let mut moved = constants.clone();
            *moved.fitted_mut()[index].1 *= STEP.exp();
            moved
        })
        .collect();
    let both = in_parallel(cases, |case| {
        let here = error(case, constants);
        let slopes = moved.iter().map(|moved| (error(case, moved) - here) / STEP).collect();
        (here, slopes)
    });
    let (errors, slopes) = both.into_iter().unzip();
    Linear { errors, slopes }
}

/// The weight of each row at errors `errors`; 0 for rows of `without`.
fn weights(cases: &[Case], errors: &[f64], without: Option<&String>) -> Vec<f64> {
    let of = |source: &String| cases.iter().filter(|case| case.source == *source).count() as f64;
    cases
        .iter()
        .zip(errors)
        .map(|(case, error)| {
            if without == Some(&case.source) {
                return 0.0;
            }
            let likely = (FREEDOM + 1.0) / (FREEDOM + (error / SCALE).powi(2));
            likely / SCALE.powi(2) * (SOURCE_ROWS / of(&case.source)).min(1.0)
        })
        .collect()
}

/// The change of the constants' logarithms, from `here`, to the most probable ones.
fn most_probable(
    cases: &[Case],
    linear: &Linear,
    priors: &[Prior],
    here: &[f64],
    without: Option<&String>,
) -> Vec<f64> {
    let mut change = vec![0.0; here.len()];
    for _ in 0..40 {
        let errors: Vec<f64> = linear
            .errors
            .iter()
            .zip(&linear.slopes)
            .map(|(error, slopes)| error + slopes.iter().zip(&change).map(|(a, b)| a * b).sum::<f64>())
            .collect();
        let weights = weights(cases, &errors, without);
        let matrix = information(linear, &weights, priors);
        let mut right: Vec<f64> =
            priors.iter().zip(here).map(|(prior, here)| (prior.mean.ln() - here) / prior.spread.powi(2)).collect();
        for ((error, slopes), weight) in linear.errors.iter().zip(&linear.slopes).zip(&weights) {
            for (right, slope) in right.iter_mut().zip(slopes) {
                *right -= weight * slope * error;
            }
        }
        change = solve(matrix, right);
    }
    change
}

/// The inverse of the covariance of the constants' logarithms.
fn information(linear: &Linear, weights: &[f64], priors: &[Prior]) -> Vec<Vec<f64>> {
    let n = priors.len();
    let mut matrix = vec![vec![0.0; n]; n];
    for (slopes, weight) in linear.slopes.iter().zip(weights) {
        for i in 0..n {
            for j in 0..n {
                matrix[i][j] += weight * slopes[i] * slopes[j];
            }
        }
    }
    for (i, prior) in priors.iter().enumerate() {
        matrix[i][i] += 1.0 / prior.spread.powi(2);
    }
    matrix
}

fn certainty(cases: &[Case], linear: &Linear, priors: &[Prior], sources: &[String]) -> Vec<(f64, Option<String>)> {
    let n = priors.len();
    let all = weights(cases, &linear.errors, None);
    let matrix = information(linear, &all, priors);
    let unit = |index: usize| (0..n).map(|i| if i == index { 1.0 } else { 0.0 }).collect::<Vec<f64>>();
    let known = |source: &String, index: usize| -> f64 {
        let rows = cases.iter().zip(&linear.slopes).zip(&all).filter(|((case, _), _)| case.source == *source);
        rows.map(|((_, slopes), weight)| weight * slopes[index].powi(2)).sum()
    };
    (0..n)
        .map(|index| {
            let spread = solve(matrix.clone(), unit(index))[index].sqrt();
            let total: f64 = sources.iter().map(|source| known(source, index)).sum();
            let alone = sources.iter().find(|source| known(source, index) >= ALONE * total);
            (spread, alone.cloned())
        })
        .collect()
}
