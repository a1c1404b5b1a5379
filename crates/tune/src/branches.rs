//! The critical batch size by training: branches of one run, each with another batch, are trained
//! on the same number of sequences (branched training; Merrill et al. 2025, "Critical batch size
//! revisited").
//!
//! A batch of B sequences needs `1 + B / critical` times the fewest possible sequences (equation
//! 2.11 of McCandlish et al. 2018). So the loss that the smallest batch b has after half of the
//! sequences is that of the batch B that needs twice as many: `1 + B / critical = 2 (1 + b /
//! critical)`, and the critical batch is `B - 2 b`.

use crate::NoiseScale;

/// The best branch of a batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Branch {
    /// Sequences of a step.
    pub batch: usize,
    /// Its learning rate, as a multiple of the run's.
    pub rate: f64,
    /// The loss after all sequences.
    pub loss: f64,
}

/// Branches of several batches.
#[derive(Clone, PartialEq, Debug)]
pub struct Branches {
    /// The loss of the smallest batch after half of the sequences.
    pub half: f64,
    /// The branches on all sequences, by their batch.
    pub whole: Vec<Branch>,
    /// The critical batch size; its interval is that of the two batches around it.
    pub scale: NoiseScale,
}

impl Branches {
    /// The critical batch size by branches on all sequences, smallest batch first, and the loss of
    /// the smallest batch on half of them. Losses between two batches are taken to be linear in the
    /// batch's logarithm.
    ///
    /// None if the second half gained the smallest batch nothing, or with fewer than two branches.
    pub fn measured(half: f64, whole: &[Branch]) -> Option<Branches> {
        let first = whole.first().filter(|first| whole.len() > 1 && first.loss < half)?;
        let least = 2.0 * first.batch as f64;
        let critical = |batch: f64| (batch - least).max(0.0);
        let scale = match whole.iter().position(|branch| branch.loss.is_nan() || branch.loss > half) {
            Some(over) => {
                let (below, above) = (whole[over - 1], whole[over]);
                let (low, high) = (below.batch as f64, above.batch as f64);
                let share = (half - below.loss) / (above.loss - below.loss);
                // What did not stay finite says nothing about how far below it the place lies.
                let share = if share.is_finite() { share } else { 0.5 };
                let sequences = critical(low * (high / low).powf(share));
                NoiseScale { sequences, low: critical(low), high: critical(high) }
            }
            None => {
                let low = critical(whole[whole.len() - 1].batch as f64);
                NoiseScale { sequences: f64::INFINITY, low, high: f64::INFINITY }
            }
        };
        Some(Branches { half, whole: whole.to_vec(), scale })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loss that falls with the logarithm of the sequences, of which a batch uses the share of
    /// equation 2.11 with a critical batch of 40.
    fn loss(sequences: f64, batch: usize) -> f64 {
        3.0 - 0.1 * (sequences / (1.0 + batch as f64 / 40.0)).ln()
    }

    fn branches(batches: &[usize]) -> Vec<Branch> {
        batches.iter().map(|&batch| Branch { batch, rate: 1.0, loss: loss(4096.0, batch) }).collect()
    }

    #[test]
    fn a_known_critical_batch_is_found() {
        let found = Branches::measured(loss(2048.0, 8), &branches(&[8, 16, 32, 64, 128])).unwrap();
        let NoiseScale { sequences, low, high } = found.scale;
        assert!((sequences / 40.0 - 1.0).abs() < 0.06, "{found:?}");
        assert_eq!((low, high), (16.0, 48.0), "{found:?}");
    }

    #[test]
    fn the_ends_are_lower_and_upper_limits() {
        // Every batch is better than half of the sequences: the critical one is larger than all.
        let free = Branches::measured(loss(2048.0, 2), &branches(&[2, 4, 16])).unwrap();
        assert!(free.scale.sequences.is_infinite() && free.scale.low == 12.0, "{free:?}");
        // Already the second is worse.
        let mut worse = branches(&[8, 16, 32]);
        worse[1].loss = loss(512.0, 8);
        let found = Branches::measured(loss(2048.0, 8), &worse).unwrap();
        assert_eq!((found.scale.sequences, found.scale.high), (0.0, 0.0), "{found:?}");
        worse[1].loss = f64::NAN;
        assert_eq!(Branches::measured(loss(2048.0, 8), &worse).unwrap().scale.high, 0.0);
    }

    #[test]
    fn what_cannot_be_measured_is_none() {
        assert!(Branches::measured(loss(2048.0, 8), &branches(&[8])).is_none());
        assert!(Branches::measured(loss(4096.0, 8), &branches(&[8, 16])).is_none(), "nothing gained");
    }
}
