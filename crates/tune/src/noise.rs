//! The gradient noise scale (McCandlish et al., "An empirical model of large-batch training",
//! 2018): the batch size at which the noise of a gradient is as large as the gradient.
//!
//! With the gradient G of the loss over all data and the covariance S of the gradients of single
//! sequences, a batch of B sequences has a gradient whose squared norm is on average `|G|^2 + tr(S)
//! / B` (equation 2.6 and appendix A.1). Norms at two batch sizes therefore give both numbers, and
//! `tr(S) / |G|^2` is the noise scale. A training with batches of B sequences then needs `1 + noise
//! / B` times the least possible number of steps, and `1 + B / noise` times the least possible
//! number of sequences (equation 2.11).

/// Squared norms of gradients at the same weights and on the same data: of small batches, and of
/// the large batch that they make together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Norms {
    /// The mean squared norm of the small batches' gradients.
    pub small: f64,
    /// The squared norm of the large batch's gradient.
    pub large: f64,
}

/// A measured noise scale.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NoiseScale {
    /// Sequences; infinite if the gradient itself could not be told from its noise.
    pub sequences: f64,
    /// The lower end of its 95 % interval.
    pub low: f64,
    /// The upper end; infinite if the measurement sets no upper limit.
    pub high: f64,
}

impl NoiseScale {
    /// The noise scale by norms of batches of `small` and of `large` sequences. Numerator and
    /// denominator are averaged separately; the interval is the jackknife's (Efron & Tibshirani
    /// 1993, chapter 11), over large batches, of the logarithm.
    ///
    /// None with fewer than two measurements, norms that are not finite, or a `large` that is not
    /// above `small`.
    pub fn measured(norms: &[Norms], small: usize, large: usize) -> Option<NoiseScale> {
        let n = norms.len();
        let (b, whole) = (small as f64, large as f64);
        if n < 2 || small == 0 || large <= small || norms.iter().any(|n| !(n.small + n.large).is_finite()) {
            return None;
        }
        let squares: Vec<f64> = norms.iter().map(|n| (whole * n.large - b * n.small) / (whole - b)).collect();
        let traces: Vec<f64> = norms.iter().map(|n| (n.small - n.large) / (1.0 / b - 1.0 / whole)).collect();
        let ratio = |trace: f64, square: f64| match (trace > 0.0, square > 0.0) {
            (true, true) => trace / square,
            (true, false) => f64::INFINITY,
            (false, _) => 0.0,
        };
        let (trace, square): (f64, f64) = (traces.iter().sum(), squares.iter().sum());
        let sequences = ratio(trace, square);
        let without: Vec<f64> = (0..n).map(|i| ratio(trace - traces[i], square - squares[i])).collect();
        if sequences.is_infinite() || without.iter().any(|ratio| ratio.is_infinite()) {
            // The gradient is within two standard errors of nothing: what it can at most be gives
            // the lower end.
            let mean = square / n as f64;
            let variance = squares.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / (n - 1) as f64;
            let most = mean + 2.0 * (variance / n as f64).sqrt();
            return Some(NoiseScale { sequences, low: ratio(trace / n as f64, most), high: f64::INFINITY });
        }
        if sequences == 0.0 || without.contains(&0.0) {
            return Some(NoiseScale { sequences, low: 0.0, high: without.iter().copied().fold(sequences, f64::max) });
        }
        let logs: Vec<f64> = without.iter().map(|ratio| ratio.ln()).collect();
        let mean = logs.iter().sum::<f64>() / n as f64;
        let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() * (n - 1) as f64 / n as f64;
        let factor = (1.96 * variance.sqrt()).exp();
        Some(NoiseScale { sequences, low: sequences / factor, high: sequences * factor })
    }

    /// The steps that batches of `batch` sequences need, as a multiple of the fewest possible.
    pub fn steps(&self, batch: f64) -> f64 {
        1.0 + self.sequences / batch
    }

    /// The sequences that they need, as a multiple of the fewest possible.
    pub fn examples(&self, batch: f64) -> f64 {
        1.0 + batch / self.sequences
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Stream;

    /// Gradients of single sequences are drawn around a known mean with a known deviation.
    fn drawn(mean: f64, deviation: f64, groups: u32) -> Vec<Norms> {
        const DIMENSIONS: usize = 200;
        let (small, parts) = (2, 8);
        let group = |number: u32| {
            let mut stream = Stream::new(3, 7, number);
            let mut whole = vec![0.0; DIMENSIONS];
            let mut squares = 0.0;
            for _ in 0..parts {
                let mut part = vec![0.0; DIMENSIONS];
                for _ in 0..small {
                    part.iter_mut().for_each(|x| *x += (mean + deviation * stream.normal()) / f64::from(small));
                }
                squares += part.iter().map(|x| x * x).sum::<f64>() / f64::from(parts);
                whole.iter_mut().zip(&part).for_each(|(sum, x)| *sum += x / f64::from(parts));
            }
            Norms { small: squares, large: whole.iter().map(|x| x * x).sum() }
        };
        (0..groups).map(group).collect()
    }

    #[test]
    fn a_known_noise_scale_is_found() {
        for (mean, deviation) in [(1.0, 1.0), (0.2, 1.0), (1.0, 0.3)] {
            let found = NoiseScale::measured(&drawn(mean, deviation, 64), 2, 16).unwrap();
            let want: f64 = (deviation / mean).powi(2);
            assert!((found.sequences / want - 1.0).abs() < 0.1, "{found:?} for {want}");
            assert!(found.low < want && want < found.high && found.high / found.low < 1.3, "{found:?} for {want}");
        }
    }

    #[test]
    fn a_gradient_that_drowns_in_noise_sets_a_lower_limit_only() {
        let found = NoiseScale::measured(&drawn(0.005, 1.0, 8), 2, 16).unwrap();
        assert!(found.high.is_infinite() && found.low > 100.0, "{found:?}");
        let without_noise = NoiseScale::measured(&[Norms { small: 4.0, large: 4.0 }; 4], 2, 16).unwrap();
        assert_eq!((without_noise.sequences, without_noise.low), (0.0, 0.0));
    }

    #[test]
    fn what_cannot_be_measured_is_none() {
        let norms = Norms { small: 2.0, large: 1.0 };
        assert!(NoiseScale::measured(&[norms], 1, 4).is_none());
        assert!(NoiseScale::measured(&[norms; 3], 4, 4).is_none());
        assert!(NoiseScale::measured(&[norms, Norms { small: f64::NAN, large: 1.0 }], 1, 4).is_none());
    }

    /// Equation 2.11: at the noise scale both are twice the least.
    #[test]
    fn at_the_noise_scale_steps_and_sequences_are_twice_the_least() {
        let noise = NoiseScale { sequences: 32.0, low: 30.0, high: 34.0 };
        assert_eq!((noise.steps(32.0), noise.examples(32.0)), (2.0, 2.0));
        assert_eq!((noise.steps(8.0), noise.examples(8.0)), (5.0, 1.25));
    }
}
