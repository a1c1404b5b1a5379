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

/// Most values of a key whose cells are integrated over. With more, cells are narrow beside the
/// kernels, and the density in the middle of a cell stands for its mean.
const CELLS_MAX: usize = 64;

/// A mixture of kernels, one for each point, and the prior, which is uniform.
struct Mixture<'a> {
    points: Vec<&'a Point>,
    /// One for each point, and the prior's; they sum to 1.
    weights: Vec<f64>,
    /// Their logarithms.
    log_weights: Vec<f64>,
    /// Deviation of each point's kernel, in a unit interval.
    width: f64,
    /// The logarithms of the kernels' densities, by key.
    densities: Vec<Densities>,
}

/// The logarithms of the densities of one key's kernels, as far as they do not depend on the place.
enum Densities {
    /// Values without an order: of a kernel's own value, and of each other one.
    Unordered { values: usize, own: f64, other: f64 },
    /// Few values in order: the mean over a value's cell, by the kernel's value and the value.
    Cells { edges: Vec<f64>, table: Vec<f64> },
    /// Places: what makes the integral of each point's kernel over the unit interval 1.
    Places(Vec<f64>),
}

impl<'a> Mixture<'a> {
    fn new(points: Vec<&'a Point>, space: &Space) -> Mixture<'a> {
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
        let scott = WIDTH * (n.max(1) as f64).powf(-1.0 / (space.len() as f64 + 4.0));
        let width = scott.max(1.0 / 100f64.min(2.0 + n as f64));
        let densities = space.dimensions.iter().enumerate();
        let densities =
            densities.map(|(key, dimension)| Densities::of(&dimension.domain, key, &points, width)).collect();
        let log_weights = weights.iter().map(|weight| weight.ln()).collect();
        Mixture { points, weights, log_weights, width, densities }
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
                    // The other values share the rest.
                    match stream.uniform() < stay(self.width, n) {
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

    /// The logarithm of the density at `point`. `logs` is working space.
    fn log_density(&self, point: &Point, logs: &mut Vec<f64>) -> f64 {
        logs.clear();
        // The density of the prior is 1.
        logs.extend(&self.log_weights);
        for (key, (densities, place)) in self.densities.iter().zip(&point.0).enumerate() {
            let kernels = logs.iter_mut().zip(&self.points);
            match densities {
                Densities::Unordered { values, own, other } => {
                    let value = cell(*place, *values);
                    kernels.for_each(|(log, centre)| {
                        *log += if cell(centre.0[key], *values) == value { own } else { other };
                    });
                }
                Densities::Cells { edges, table } => {
                    let (value, n) = (value_at(edges, *place), edges.len() - 1);
                    kernels.for_each(|(log, centre)| *log += table[value_at(edges, centre.0[key]) * n + value]);
                }
                Densities::Places(wholes) => {
                    let by = 1.0 / self.width;
                    kernels.zip(wholes).for_each(|((log, centre), whole)| {
                        let z = (place - centre.0[key]) * by;
                        *log += whole - 0.5 * z * z;
                    });
                }
            }
        }
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        most + logs.iter().map(|log| (log - most).exp()).sum::<f64>().ln()
    }
}

impl Densities {
    fn of(domain: &Domain, key: usize, points: &[&Point], width: f64) -> Densities {
        if let (Domain::Choice { values }, false) = (domain, domain.is_ordered()) {
            let (n, stay) = (values.len(), stay(width, values.len()));
            // The prior gives each value 1 / n.
            let density = |probability: f64| (probability * n as f64).max(f64::MIN_POSITIVE).ln();
            return Densities::Unordered {
                values: n,
                own: density(stay),
                other: density((1.0 - stay) / (n - 1) as f64),
            };
        }
        let below = |centre: f64, place: f64| normal::quick_cdf((place - centre) / width);
        match domain.count().filter(|count| *count <= CELLS_MAX as u64).and_then(|_| domain.edges()) {
            Some(edges) => {
                let mut table = Vec::new();
                for centre in edges.windows(2).map(|cell| 0.5 * (cell[0] + cell[1])) {
                    let whole = below(centre, 1.0) - below(centre, 0.0);
                    table.extend(edges.windows(2).map(|cell| {
                        let mean = (below(centre, cell[1]) - below(centre, cell[0])) / (whole * (cell[1] - cell[0]));
                        mean.max(f64::MIN_POSITIVE).ln()
                    }));
                }
                Densities::Cells { edges, table }
            }
            None => {
                let peak = normal::log_density(0.0) - width.ln();
                let whole = |point: &&Point| peak - (below(point.0[key], 1.0) - below(point.0[key], 0.0)).ln();
                Densities::Places(points.iter().map(whole).collect())
            }
        }
    }
}

/// The probability with which a kernel keeps its centre's value, of `n` without an order. Aitchison
/// & Aitken (1976).
fn stay(width: f64, n: usize) -> f64 {
    1.0 - width * (n - 1) as f64 / n as f64
}

/// The number of the cell that holds `place`.
fn value_at(edges: &[f64], place: f64) -> usize {
    (edges.partition_point(|edge| *edge <= place).max(1) - 1).min(edges.len() - 2)
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
    let (best, others) = (Mixture::new(best, space), Mixture::new(others, space));
    let mut stream = Stream::new(seed, PURPOSE, trials.len() as u32);
    let mut chosen: Option<(f64, Point)> = None;
    let mut logs = Vec::new();
    for _ in 0..CANDIDATES {
        let point = space.point(&best.draw(space, &mut stream));
        let gain = best.log_density(&point, &mut logs) - others.log_density(&point, &mut logs);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the points are, the mean density of a key's values is 1, as the prior's is.
    #[test]
    fn densities_integrate_to_one() {
        for line in ["a.x=0..1", "a.y=int:1..5", "a.z=logint:8..40", "a.w=logint:100..1000", "a.v=p|q|r", "a.u=1|2|4"] {
            let space = Space::parse(None, &[line.to_owned()]).unwrap();
            let points: Vec<Point> =
                (0..30).map(|i| space.point(&[(f64::from(i) * 0.618 + 0.1).fract().powi(2)])).collect();
            for n in [0, 1, 5, 30] {
                let mixture = Mixture::new(points[..n].iter().collect(), &space);
                let (grid, mut logs) = (20_000, Vec::new());
                let place = |i: i32| (f64::from(i) + 0.5) / f64::from(grid);
                let density = |i: i32, logs: &mut Vec<f64>| mixture.log_density(&space.point(&[place(i)]), logs).exp();
                let mean = (0..grid).map(|i| density(i, &mut logs)).sum::<f64>() / f64::from(grid);
                assert!((mean - 1.0).abs() < 2e-3, "{n} points, {line}: {mean}");
            }
        }
    }
}
