//! The critical batch size by training: branches of one run, each with another batch, are trained
//! to the same loss (McCandlish et al. 2018, section 2.4; Merrill et al. 2025, "Critical batch size
//! revisited", branched training).

use crate::NoiseScale;

/// The critical batch is looked for up to this many times beyond the batches of the branches.
const BEYOND: f64 = 64.0;
/// Places of the search in each factor of e.
const PLACES: f64 = 200.0;

/// A branch: how its loss falls with the sequences it has trained on.
#[derive(Clone, PartialEq, Debug)]
pub struct Branch {
    /// Sequences of a step.
    pub batch: usize,
    /// Its learning rate, as a multiple of the run's.
    pub rate: f64,
    /// (sequences, loss), from (0, the loss before) on.
    pub curve: Vec<(f64, f64)>,
}

impl Branch {
    /// The least loss on the way.
    pub fn best(&self) -> f64 {
        self.curve.iter().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min)
    }

    /// The sequences after which the loss is `target` for the first time, linear between two
    /// measurements; None if it never is.
    pub fn reaches(&self, target: f64) -> Option<f64> {
        let mut before: Option<(f64, f64)> = None;
        for &(sequences, loss) in &self.curve {
            if loss <= target {
                let Some((from, above)) = before else { return Some(sequences) };
                return Some(from + (sequences - from) * (above - target) / (above - loss));
            }
            before = Some((sequences, loss)).filter(|_| loss.is_finite()).or(before);
        }
        None
    }
}

/// The best branch of each batch, and the loss that all of them reach.
#[derive(Clone, PartialEq, Debug)]
pub struct Branches {
    /// The loss.
    pub target: f64,
    /// Of each batch, in order: its batch, its best learning rate as a multiple of the run's, and
    /// the sequences that it takes to the target.
    pub reached: Vec<(usize, f64, f64)>,
    /// The critical batch size.
    pub scale: NoiseScale,
}

impl Branches {
    /// The critical batch size by `branches` of at least three batches; a batch may have several,
    /// with other learning rates, of which the one that is first at the target counts.
    ///
    /// The target is the highest loss that the best branch of a batch ends at. None if a batch has
    /// no branch whose loss falls, or there are fewer than three.
    pub fn measured(branches: &[Branch]) -> Option<Branches> {
        let mut batches: Vec<usize> = branches.iter().map(|branch| branch.batch).collect();
        batches.sort_unstable();
        batches.dedup();
        let of = |batch: usize| branches.iter().filter(move |branch| branch.batch == batch);
        let best = |batch: usize| of(batch).map(Branch::best).fold(f64::INFINITY, f64::min);
        let target = batches.iter().map(|batch| best(*batch)).fold(f64::NEG_INFINITY, f64::max);
        let first = |batch: usize| {
            let reached = of(batch).filter_map(|branch| Some((batch, branch.rate, branch.reaches(target)?)));
            reached.filter(|(.., sequences)| *sequences > 0.0).min_by(|a, b| a.2.total_cmp(&b.2))
        };
        let reached: Vec<_> = batches.iter().map(|batch| first(*batch)).collect::<Option<_>>()?;
        let points: Vec<(f64, f64)> = reached.iter().map(|&(batch, _, sequences)| (batch as f64, sequences)).collect();
        Some(Branches { target, scale: fitted(&points)?, reached })
    }
}

/// The critical batch size by (batch, sequences to one loss): equation 2.11 of McCandlish et al.,
/// `sequences = least (1 + batch / critical)`, fitted to logarithms. The interval is the
/// jackknife's over batches.
fn fitted(points: &[(f64, f64)]) -> Option<NoiseScale> {
    if points.len() < 3 || points.iter().any(|(batch, sequences)| !(*batch > 0.0 && *sequences > 0.0)) {
        return None;
    }
    let all = fit(points);
    let without: Vec<f64> =
        (0..points.len()).map(|left_out| fit(&[&points[..left_out], &points[left_out + 1..]].concat())).collect();
    if !all.is_finite() || all == 0.0 || without.iter().any(|fit| !fit.is_finite() || *fit == 0.0) {
        let low = without.iter().copied().fold(all, f64::min);
        let high = without.iter().copied().fold(all, f64::max);
        return Some(NoiseScale { sequences: all, low, high });
    }
    let n = points.len() as f64;
    let logs: Vec<f64> = without.iter().map(|fit| fit.ln()).collect();
    let mean = logs.iter().sum::<f64>() / n;
    let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() * (n - 1.0) / n;
    let factor = (1.96 * variance.sqrt()).exp();
    Some(NoiseScale { sequences: all, low: all / factor, high: all * factor })
}

/// The critical batch of the closest curve: 0 if it lies far below all batches, infinite if far
/// above.
fn fit(points: &[(f64, f64)]) -> f64 {
    let batches = || points.iter().map(|(batch, _)| *batch);
    let low = (batches().fold(f64::INFINITY, f64::min) / BEYOND).ln();
    let high = (batches().fold(0.0, f64::max) * BEYOND).ln();
    let error = |log: f64| {
        let residuals: Vec<f64> =
            points.iter().map(|(batch, sequences)| sequences.ln() - (batch / log.exp()).ln_1p()).collect();
        let mean = residuals.iter().sum::<f64>() / residuals.len() as f64;
        residuals.iter().map(|residual| (residual - mean).powi(2)).sum::<f64>()
    };
    let places = ((high - low) * PLACES) as usize;
    let place = |i: usize| low + (high - low) * i as f64 / places as f64;
    let best = (0..=places).min_by(|a, b| error(place(*a)).total_cmp(&error(place(*b)))).unwrap_or(0);
    match best {
        0 => 0.0,
        last if last == places => f64::INFINITY,
        inside => place(inside).exp(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Branches whose loss falls as equation 2.11 says: `2 - 1e-3 sequences / (1 + batch / 40)`.
    fn branch(batch: usize, rate: f64, slower: f64) -> Branch {
        let speed = 1e-3 / (1.0 + batch as f64 / 40.0) / slower;
        let curve = (0..=8).map(|i| (f64::from(i) * 128.0, 2.0 - f64::from(i) * 128.0 * speed)).collect();
        Branch { batch, rate, curve }
    }

    #[test]
    fn a_known_critical_batch_is_found() {
        let mut branches: Vec<Branch> = [8, 16, 32, 64, 128].map(|batch| branch(batch, 1.0, 1.0)).to_vec();
        // Rates that are worse change nothing.
        branches.extend([8, 128].map(|batch| branch(batch, 2.0, 1.7)));
        let found = Branches::measured(&branches).unwrap();
        assert!((found.scale.sequences / 40.0 - 1.0).abs() < 0.02, "{found:?}");
        assert!(found.scale.low < 40.5 && found.scale.high > 39.5 && found.scale.high < 50.0, "{found:?}");
        assert!(found.reached.iter().all(|(_, rate, _)| *rate == 1.0), "{found:?}");
        let (slowest, ..) = found.reached.last().copied().unwrap();
        assert_eq!(slowest, 128);
        assert!((found.target - branch(128, 1.0, 1.0).best()).abs() < 1e-12);
    }

    #[test]
    fn the_ends_are_no_limit_and_no_use() {
        // Every batch takes as many sequences: larger ones cost nothing.
        let free = fitted(&[(8.0, 500.0), (16.0, 500.0), (64.0, 500.0)]).unwrap();
        assert!(free.sequences.is_infinite() && free.high.is_infinite(), "{free:?}");
        // Sequences grow with the batch: larger ones save no step.
        let useless = fitted(&[(8.0, 100.0), (16.0, 200.0), (64.0, 800.0)]).unwrap();
        assert_eq!((useless.sequences, useless.low), (0.0, 0.0));
    }

    #[test]
    fn what_cannot_be_measured_is_none() {
        assert!(Branches::measured(&[branch(8, 1.0, 1.0), branch(16, 1.0, 1.0)]).is_none());
        let mut rises = [8, 16, 32].map(|batch| branch(batch, 1.0, 1.0));
        rises[1].curve = vec![(0.0, 2.0), (128.0, 2.5)];
        assert!(Branches::measured(&rises).is_none(), "one batch never falls below the loss before");
        rises[1].curve = vec![(0.0, 2.0), (128.0, f64::NAN), (256.0, 1.5)];
        assert!((rises[1].reaches(1.75).unwrap() - 128.0).abs() < 1e-9, "what is not finite is passed over");
    }
}
