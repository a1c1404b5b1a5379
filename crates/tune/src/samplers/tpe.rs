//! The tree-structured Parzen estimator (Bergstra et al., NIPS 2011), in the multivariate form of
//! Falkner et al. (BOHB, ICML 2018).
//!
//! Trials are divided into the good ones (the best tenth, at most 25) and the others. Each set is
//! the centres of a mixture of kernels, with a wide kernel over the whole space as a prior. The
//! width of a kernel is, for each key, the larger distance to its neighbours. Of 24 points drawn
//! from the good mixture, the one with the highest ratio of good to other density is tried: it has
//! the highest expected improvement (Bergstra et al., section 4.1).
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
/// The narrowest of n kernels has this width over n + 2, or over a hundred if n is large. Twice it,
/// as Optuna has, finds good regions as fast, and later the best of a region (docs/LOG.md).
const NARROWEST: f64 = 0.5;
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
    keys: Vec<Kernels>,
}

/// One key's part of all kernels.
enum Kernels {
    /// Values without an order: the probability that a kernel keeps its own value, and the
    /// logarithms of the densities of that value and of each other one.
    Unordered { values: usize, stay: f64, own: f64, other: f64 },
    /// Few values in order: the edges of their cells, the different kernels, and each point's.
    Cells { edges: Vec<f64>, kernels: Vec<Kernel>, of: Vec<usize> },
    /// Numbers: a kernel for each point.
    Places(Vec<Kernel>),
}

/// A normal distribution, given that it lies in the unit interval.
#[derive(Clone, Copy, PartialEq)]
struct Kernel {
    centre: f64,
    width: f64,
    /// The logarithm of the density in the centre.
    peak: f64,
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
        let keys = space.dimensions.iter().enumerate();
        let keys = keys.map(|(key, dimension)| Kernels::of(&dimension.domain, key, &points)).collect();
        let log_weights = weights.iter().map(|weight| weight.ln()).collect();
        Mixture { points, weights, log_weights, keys }
    }

    fn draw(&self, stream: &mut Stream) -> Vec<f64> {
        let mut at = stream.uniform();
        let kernel = self.weights.iter().position(|weight| {
            at -= weight;
            at < 0.0
        });
        let point = kernel.filter(|kernel| *kernel < self.points.len());
        let draw = |(key, kernels): (usize, &Kernels)| {
            let Some(point) = point else { return stream.uniform() };
            let kernel = match kernels {
                Kernels::Unordered { values, stay, .. } => {
                    let own = self.points[point].0[key];
                    if stream.uniform() < *stay {
                        return own;
                    }
                    // The other values share the rest.
                    let other = stream.below(values - 1);
                    return ((other + usize::from(other >= cell(own, *values))) as f64 + 0.5) / *values as f64;
                }
                Kernels::Cells { kernels, of, .. } => kernels[of[point]],
                Kernels::Places(kernels) => kernels[point],
            };
            stream.truncated_normal(kernel.centre, kernel.width, 0.0, 1.0)
        };
        self.keys.iter().enumerate().map(draw).collect()
    }

    /// The logarithm of the density at `point`. `logs` is working space.
    fn log_density(&self, point: &Point, logs: &mut Vec<f64>) -> f64 {
        logs.clear();
        // The density of the prior is 1.
        logs.extend(&self.log_weights);
        for (key, (kernels, place)) in self.keys.iter().zip(&point.0).enumerate() {
            let sums = logs.iter_mut().zip(&self.points);
            match kernels {
                Kernels::Unordered { values, own, other, .. } => {
                    let value = cell(*place, *values);
                    sums.for_each(|(log, centre)| {
                        *log += if cell(centre.0[key], *values) == value { own } else { other };
                    });
                }
                Kernels::Cells { edges, kernels, of } => {
                    let value = value_at(edges, *place);
                    let means: Vec<f64> =
                        kernels.iter().map(|kernel| kernel.log_mean(edges[value], edges[value + 1])).collect();
                    sums.zip(of).for_each(|((log, _), kernel)| *log += means[*kernel]);
                }
                Kernels::Places(kernels) => sums.zip(kernels).for_each(|((log, _), kernel)| {
                    let z = (place - kernel.centre) / kernel.width;
                    *log += kernel.peak - 0.5 * z * z;
                }),
            }
        }
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        most + logs.iter().map(|log| (log - most).exp()).sum::<f64>().ln()
    }
}

impl Kernels {
    fn of(domain: &Domain, key: usize, points: &[&Point]) -> Kernels {
        let n = points.len();
        if let (Domain::Choice { values }, false) = (domain, domain.is_ordered()) {
            // The prior adds one observation, shared by all kernels and values.
            let (values, each) = (values.len(), 1.0 / (n + 1) as f64);
            let all = 1.0 + each * values as f64;
            let (own, other) = ((1.0 + each) / all, each / all);
            let density = |probability: f64| (probability * values as f64).ln();
            return Kernels::Unordered { values, stay: own, own: density(own), other: density(other) };
        }
        let places: Vec<f64> = points.iter().map(|point| point.0[key]).collect();
        let widths = widths(&places);
        let all = places.iter().zip(&widths);
        match domain.count().filter(|count| *count <= CELLS_MAX as u64).and_then(|_| domain.edges()) {
            Some(edges) => {
                let (mut kernels, mut of): (Vec<Kernel>, Vec<usize>) = Default::default();
                for (centre, width) in all {
                    let known = kernels.iter().position(|kernel| kernel.centre == *centre && kernel.width == *width);
                    of.push(known.unwrap_or(kernels.len()));
                    if known.is_none() {
                        kernels.push(Kernel::new(*centre, *width));
                    }
                }
                Kernels::Cells { edges, kernels, of }
            }
            None => Kernels::Places(all.map(|(centre, width)| Kernel::new(*centre, *width)).collect()),
        }
    }
}

impl Kernel {
    fn new(centre: f64, width: f64) -> Kernel {
        let below = |place: f64| normal::quick_cdf((place - centre) / width);
        let peak = normal::log_density(0.0) - width.ln() - (below(1.0) - below(0.0)).ln();
        Kernel { centre, width, peak }
    }

    /// The logarithm of the mean density from `low` to `high`.
    fn log_mean(&self, low: f64, high: f64) -> f64 {
        // By symmetry both ends are taken on the side where the distribution is near 0.
        let (low, high) = ((low - self.centre) / self.width, (high - self.centre) / self.width);
        let mass = match low > 0.0 {
            true => normal::quick_cdf(-low) - normal::quick_cdf(-high),
            false => normal::quick_cdf(high) - normal::quick_cdf(low),
        };
        (mass / (high - low)).max(f64::MIN_POSITIVE).ln() + self.peak - normal::log_density(0.0)
    }
}

/// The widths of kernels at `places`: the larger distance to the neighbours on both sides, at most
/// 1 and no less than [`NARROWEST`] says.
fn widths(places: &[f64]) -> Vec<f64> {
    let n = places.len();
    let least = NARROWEST / 100f64.min(2.0 + n as f64);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|a, b| places[*a].total_cmp(&places[*b]));
    let mut widths = vec![0.0; n];
    for (rank, index) in order.iter().enumerate() {
        let before = rank.checked_sub(1).map(|before| places[*index] - places[order[before]]);
        let after = order.get(rank + 1).map(|after| places[*after] - places[*index]);
        // A single one has the ends of the interval as neighbours.
        let width = match (before, after) {
            (None, None) => places[*index].max(1.0 - places[*index]),
            (before, after) => before.unwrap_or(0.0).max(after.unwrap_or(0.0)),
        };
        widths[*index] = width.clamp(least, 1.0);
    }
    widths
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
        let point = space.point(&best.draw(&mut stream));
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
        None => space.point(&best.draw(&mut stream)),
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
