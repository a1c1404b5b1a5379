//! The tree-structured Parzen estimator (Bergstra et al., NIPS 2011), in the multivariate form of
//! Falkner et al. (BOHB, ICML 2018).
//!
//! Trials are divided into the good ones (the best tenth, at most 25) and the others. Each set is
//! the centres of a mixture of kernels, with a wide kernel over the whole space as a prior. Of 24
//! points drawn from the good mixture, the one with the highest ratio of good to other density is
//! tried: it has the highest expected improvement (Bergstra et al., section 4.1).
//!
//! Trials that run count among the others, so that trials that run together differ.

use super::{Observation, Standing, ranked};
use crate::normal;
use crate::random::Stream;
use crate::space::cell;
use crate::{Domain, Point, Space};

const PURPOSE: u32 = 0x7470_6500;
/// Points drawn from the good mixture.
const CANDIDATES: usize = 24;
/// Most good trials.
const GOOD_MAX: usize = 25;
/// Trials at full weight; those before count less, by their age.
const RECENT: usize = 25;
/// Width of a kernel in a unit interval, for one trial.
const WIDTH: f64 = 0.2;

/// A mixture of kernels, one for each point, and the prior.
struct Mixture<'a> {
    points: Vec<&'a Point>,
    /// One for each point, and the prior's; they sum to 1.
    weights: Vec<f64>,
    /// Deviation of each point's kernel, in a unit interval.
    width: f64,
}

impl<'a> Mixture<'a> {
    fn new(points: Vec<&'a Point>, dimensions: usize) -> Mixture<'a> {
        let n = points.len();
        let age = |index: usize| match n.saturating_sub(RECENT) {
            0 => 1.0,
            old if index < old => 1.0 / n as f64 + (1.0 - 1.0 / n as f64) * index as f64 / old as f64,
            _ => 1.0,
        };
        let mut weights: Vec<f64> = (0..n).map(age).chain([1.0]).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
        // Scott's rule, and no narrower than a hundredth, or where there are few trials a tenth.
        let scott = WIDTH * (n.max(1) as f64).powf(-1.0 / (dimensions as f64 + 4.0));
        let width = scott.max(1.0 / 100f64.min(2.0 + n as f64));
        Mixture { points, weights, width }
    }

    fn draw(&self, space: &Space, stream: &mut Stream) -> Vec<f64> {
        let mut at = stream.uniform();
        let kernel = self.weights.iter().position(|weight| {
            at -= weight;
            at < 0.0
        });
        let centre = kernel.and_then(|kernel| self.points.get(kernel));
        let draw = |(index, dimension): (usize, &crate::Dimension)| {
            let Some(centre) = centre else { return stream.uniform() };
            match &dimension.domain {
                Domain::Choice { values } if !dimension.domain.is_ordered() => {
                    let n = values.len();
                    let stay = self.stay(n);
                    // The other values share the rest.
                    match stream.uniform() < stay {
                        true => centre.0[index],
                        false => {
                            let other = stream.below(n - 1);
                            let own = cell(centre.0[index], n);
                            ((other + usize::from(other >= own)) as f64 + 0.5) / n as f64
                        }
                    }
                }
                _ => stream.truncated_normal(centre.0[index], self.width, 0.0, 1.0),
            }
        };
        space.dimensions.iter().enumerate().map(draw).collect()
    }

    /// The probability with which a kernel keeps its centre's value, of `n` without an order.
    /// Aitchison & Aitken (1976), with this mixture's width.
    fn stay(&self, n: usize) -> f64 {
        1.0 - self.width * (n - 1) as f64 / n as f64
    }

    /// The logarithm of the density at `point`. Values of an ordered list have the probability of
    /// their cell.
    fn log_density(&self, space: &Space, point: &Point) -> f64 {
        let kernel = |centre: Option<&&Point>| -> f64 {
            let factor = |(index, dimension): (usize, &crate::Dimension)| {
                let x = point.0[index];
                let count = dimension.domain.count().map(|count| count as f64);
                let Some(centre) = centre.map(|centre| centre.0[index]) else {
                    return -count.unwrap_or(1.0).ln();
                };
                match &dimension.domain {
                    Domain::Choice { values } if !dimension.domain.is_ordered() => {
                        let (n, stay) = (values.len(), self.stay(values.len()));
                        match cell(x, n) == cell(centre, n) {
                            true => stay.ln(),
                            false => ((1.0 - stay) / (n - 1) as f64).ln(),
                        }
                    }
                    _ => {
                        let z = |at: f64| (at - centre) / self.width;
                        let whole = normal::cdf(z(1.0)) - normal::cdf(z(0.0));
                        match count.filter(|count| *count < 1000.0) {
                            // The mass of a cell. Cells of logarithmic ranges differ in size, and
                            // the middle one's is near enough for a ratio of two densities.
                            Some(count) => {
                                let (low, high) = (x - 0.5 / count, x + 0.5 / count);
                                let mass = normal::cdf(z(high)) - normal::cdf(z(low));
                                (mass / whole).max(f64::MIN_POSITIVE).ln()
                            }
                            None => normal::log_density(z(x)) - (self.width * whole).ln(),
                        }
                    }
                }
            };
            space.dimensions.iter().enumerate().map(factor).sum()
        };
        let logs: Vec<f64> = (0..self.weights.len())
            .map(|index| self.weights[index].ln() + kernel(self.points.get(index)))
            .collect();
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        most + logs.iter().map(|log| (log - most).exp()).sum::<f64>().ln()
    }
}

pub fn propose(space: &Space, seed: u64, trials: &[Observation<'_>]) -> Point {
    let ranked = ranked(trials);
    let good = ranked.len().div_ceil(10).min(GOOD_MAX);
    let is_good = |trial: &Observation<'_>| ranked[..good].iter().any(|best| std::ptr::eq(*best, trial));
    // In the order of the trials, because weights follow age.
    let (mut best, mut others) = (Vec::new(), Vec::new());
    for trial in trials {
        match is_good(trial) && trial.standing != Standing::Failed {
            true => best.push(trial.point),
            false => others.push(trial.point),
        }
    }
    let (best, others) = (Mixture::new(best, space.len()), Mixture::new(others, space.len()));
    let mut stream = Stream::new(seed, PURPOSE, trials.len() as u32);
    let mut chosen: Option<(f64, Point)> = None;
    for _ in 0..CANDIDATES {
        let point = space.point(&best.draw(space, &mut stream));
        let gain = best.log_density(space, &point) - others.log_density(space, &point);
        // Among equals the first.
        let is_better = chosen.as_ref().is_none_or(|(most, _)| gain > *most);
        let is_tried = space.count().is_some() && trials.iter().any(|trial| *trial.point == point);
        if is_better && !is_tried {
            chosen = Some((gain, point));
        }
    }
    match chosen {
        Some((_, point)) => point,
        None => space.point(&best.draw(space, &mut stream)),
    }
}
