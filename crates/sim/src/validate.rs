//! Comparison with published measurements.

use crate::constants::Constants;
use crate::measurement::{MemoryFigure, Row};
use crate::predict::{Lowered, predict};
use crate::profile::Profiles;

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

    /// True if the verdict on memory agrees with the measurement.
    pub fn verdict_right(&self) -> bool {
        self.failed.is_none() && self.fits != self.row.out_of_memory
    }
}

/// Predicts every row.
pub fn compare(rows: &[Row], profiles: &Profiles, constants: &Constants) -> Vec<Outcome> {
    rows.iter().map(|row| outcome(row, profiles, constants)).collect()
}

fn outcome(row: &Row, profiles: &Profiles, constants: &Constants) -> Outcome {
    let failed = |error: String| Outcome {
        row: row.clone(),
        failed: Some(error),
        tokens_per_s: 0.0,
        memory_gb: 0.0,
        fits: false,
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
            }
        }
    }
}

/// Median and 90th percentile of absolute values, by nearest rank.
pub fn quantiles(errors: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let mut sizes: Vec<f64> = errors.into_iter().map(f64::abs).collect();
    sizes.sort_by(f64::total_cmp);
    let at = |share: f64| sizes.get(((share * sizes.len() as f64).ceil() as usize).saturating_sub(1)).copied();
    Some((at(0.5)?, at(0.9)?))
}

/// The result of a fit.
#[derive(Clone, PartialEq, Debug)]
pub struct Fit {
    /// The constants.
    pub constants: Constants,
    /// Mean loss before and after.
    pub loss: [f64; 2],
    /// Number of rows that it used.
    pub rows: usize,
}

/// Fits the constants of the table `fitted` on the judged rows of the sources that the constants
/// name. The method is coordinate descent on a robust loss: the absolute logarithm of predicted
/// over measured speed, cut at a half, so that inexplicable rows have no pull.
pub fn fit(rows: &[Row], profiles: &Profiles, constants: &Constants, rounds: u32) -> Fit {
    let seen = |row: &&Row| row.judged && constants.fitted_on.iter().any(|source| source == row.source());
    let lowered: Vec<(Lowered, f64)> = rows
        .iter()
        .filter(seen)
        .filter_map(|row| Some((Lowered::new(&row.case(profiles).ok()?).ok()?, row.tokens_per_s?)))
        .collect();
    let loss = |constants: &Constants| {
        let one = |(lowered, measured): &(Lowered, f64)| {
            let predicted = lowered.tokens_per_s(constants).unwrap_or(f64::INFINITY);
            let error = (predicted / measured).ln().abs();
            // Beyond a quarter an error counts as much as it can, as for the bars.
            error.min(0.5) + 0.3 / (1.0 + (-(error - 0.22) / 0.02).exp())
        };
        lowered.iter().map(one).sum::<f64>() / lowered.len().max(1) as f64
    };
    let mut best = constants.clone();
    let before = loss(&best);
    let mut now = before;
    let mut step = 1.25;
    for _ in 0..rounds {
        for index in 0..best.fitted_mut().len() {
            for factor in [step, 1.0 / step] {
                loop {
                    let mut trial = best.clone();
                    *trial.fitted_mut()[index].1 *= factor;
                    let there = loss(&trial);
                    if there + 1e-6 >= now || !trial.plausible() {
                        break;
                    }
                    (best, now) = (trial, there);
                }
            }
        }
        step = 1.0 + (step - 1.0) * 0.55;
    }
    Fit { constants: best, loss: [before, now], rows: lowered.len() }
}
