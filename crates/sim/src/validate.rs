//! The comparison with published measurements.

use crate::constants::Constants;
use crate::measurement::{MemoryFigure, Row};
use crate::predict::predict;
use crate::profile::Profiles;

/// A row beside its prediction.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// What was measured.
    pub row: Row,
    /// Why there is no prediction.
    pub failed: Option<String>,
    /// Predicted tokens per second and device.
    pub tokens_per_s: f64,
    /// Predicted memory as the row counts it, 1e9 bytes.
    pub memory_gb: f64,
    /// Whether the prediction says that it fits.
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

    /// Whether the verdict agrees with what happened.
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
                fits: prediction.memory_bytes(MemoryFigure::Device) <= case.cluster.device.memory_gb * 1e9,
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
