//! A Gaussian process over the space, and the point with the highest expected improvement (Jones
//! et al. 1998), whose logarithm is maximised (Ament et al. 2023).
//!
//! The kernel is Matérn's with nu = 5/2 and a length for each key. Lengths, variance and noise are
//! the most probable ones given the results (Rasmussen & Williams 2006, section 5.4.1), with the
//! priors of Optuna's GPSampler. Keys without an order contribute 1 to the distance where they
//! differ.
//!
//! The improvement is looked at in many places, and climbed from the best of them: by its gradient
//! along numbers, and value by value along the other keys.
//!
//! With successive halving, the process models the losses of the highest rung that enough trials
//! have reached; those that paused below it count as the worst there. Trials that run are taken to
//! end at their predicted loss (kriging believer; Ginsbourger et al. 2010), so that trials that run
//! together differ.

use super::{FIRST, Observation, Standing, random, sobol};
use crate::descent::{Limits, dot, minimise};
use crate::normal::{improvement_slope, log_improvement};
use crate::random::Stream;
use crate::{Domain, Point, Space};
use std::collections::BTreeSet;
use std::f64::consts::LN_2;

const PURPOSE: u32 = 0x6770_0000;
/// Most trials in the model: half of them the best, the others the newest.
const POINTS_MAX: usize = 120;
/// Most trials from which lengths, variance and noise are found, chosen in the same way.
const FITTED_MAX: usize = 60;
/// Steps of the search for lengths, variance and noise, and the slope at which it ends.
const FIT_LIMITS: Limits = Limits { low: -14.0, high: 8.0, steps: 50, slope: 1e-2 };
/// The same of the climb along numbers.
const CLIMB_LIMITS: Limits = Limits { low: 0.0, high: 1.0, steps: 50, slope: 1e-3 };
/// Places at which the improvement is looked at before the best are climbed from.
const CANDIDATES: usize = 512;
/// Places near the best results, per scale.
const NEAR: usize = 64;
const NEAR_SCALES: [f64; 3] = [0.1, 0.03, 0.01];
/// Climbs.
const CLIMBS: usize = 8;
/// Rounds of a climb: numbers, then the other keys.
const ROUNDS: usize = 8;
/// Most values of a key that are all looked at in a climb. With more, those at some distances are.
const VALUES_MAX: usize = 16;
const DISTANCES: [f64; 7] = [0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4];
/// Variance of the noise that is always there, for losses of variance 1.
const NOISE_MIN: f64 = 1e-7;

/// Lengths by key, the variance of the kernel and that of the noise; as logarithms.
#[derive(Clone, Debug)]
struct Shape {
    lengths: Vec<f64>,
    variance: f64,
    noise: f64,
}

/// A process given results.
struct Process<'a> {
    space: &'a Space,
    metric: Metric,
    points: Vec<Vec<f64>>,
    shape: Shape,
    /// The inverse squares of the lengths.
    inverse_squares: Vec<f64>,
    variance: f64,
    /// The inverse kernel matrix, by rows.
    inverse: Vec<f64>,
    /// The inverse kernel matrix times the results.
    weights: Vec<f64>,
}

/// The expected improvement over the least loss.
struct Improvement<'a> {
    process: Process<'a>,
    best: f64,
    /// The points that have been tried, if the space has a fixed number of them.
    tried: Option<BTreeSet<Vec<u64>>>,
}

pub fn propose(space: &Space, seed: u64, trials: &[Observation<'_>]) -> Point {
    let number = trials.len() as u32;
    let (points, losses) = results(space, trials, POINTS_MAX);
    let (fitted, fitted_losses) = results(space, trials, FITTED_MAX);
    let shape = fit(space, &fitted, &fitted_losses);
    let mut process = Process::new(space, points, &losses, shape);
    let best = losses.iter().copied().fold(f64::INFINITY, f64::min);
    let mut losses = losses;
    for trial in trials.iter().filter(|trial| trial.standing == Standing::Unknown) {
        let (mean, _) = process.predict(&trial.point.0);
        let mut points = std::mem::take(&mut process.points);
        points.push(trial.point.0.clone());
        losses.push(mean);
        process = Process::new(space, points, &losses, process.shape);
    }
    let bits = |point: &Point| point.0.iter().map(|place| place.to_bits()).collect();
    let tried = space.count().map(|_| trials.iter().map(|trial| bits(trial.point)).collect());
    let improvement = Improvement { process, best, tried };

    // The sequence is another one for each trial.
    let mut stream = Stream::new(seed, PURPOSE, number);
    let sequence = stream.bits();
    let mut places: Vec<Vec<f64>> = (0..CANDIDATES)
        .map(|index| match space.len() <= sobol::DIMENSIONS_MAX {
            true => sobol::place(space.len(), sequence, index),
            false => random(space, &mut stream),
        })
        .collect();
    let mut order: Vec<usize> = (0..losses.len()).collect();
    order.sort_by(|a, b| losses[*a].total_cmp(&losses[*b]));
    for scale in NEAR_SCALES {
        for index in 0..NEAR {
            let centre = &improvement.process.points[order[index % order.len().min(4)]];
            places.push(centre.iter().map(|place| stream.truncated_normal(*place, scale, 0.0, 1.0)).collect());
        }
    }
    let mut candidates: Vec<(f64, Vec<f64>)> = places
        .iter()
        .map(|place| {
            let place = space.point(place).0;
            (improvement.at(&place), place)
        })
        .collect();
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
    // Climbs from neighbours end at the same place, so starts keep a distance.
    let mut starts: Vec<(f64, Vec<f64>)> = Vec::new();
    for (value, place) in candidates {
        let is_apart = |start: &(f64, Vec<f64>)| improvement.process.squared_distance(&start.1, &place) > 0.01;
        if starts.iter().all(is_apart) {
            starts.push((value, place));
        }
        if starts.len() == CLIMBS {
            break;
        }
    }
    let climbed = starts.into_iter().map(|start| improvement.climb(start));
    let best = climbed.reduce(|best, next| if next.0 > best.0 { next } else { best });
    best.map_or_else(|| space.point(&random(space, &mut stream)), |(_, place)| space.point(&place))
}

impl Improvement<'_> {
    /// The logarithm of the expected improvement at `place`; no improvement at a point that has
    /// been tried.
    fn at(&self, place: &[f64]) -> f64 {
        if let Some(tried) = &self.tried
            && tried.contains(&place.iter().map(|place| place.to_bits()).collect::<Vec<_>>())
        {
            return f64::NEG_INFINITY;
        }
        let (mean, deviation) = self.process.predict(place);
        log_improvement((self.best - mean) / deviation) + deviation.ln()
    }

    /// The same, and its gradient by the places of `keys`.
    fn slopes(&self, place: &[f64], keys: &[usize]) -> (f64, Vec<f64>) {
        let Process { points, inverse, weights, inverse_squares, variance, .. } = &self.process;
        let n = points.len();
        let kernels: Vec<(f64, f64)> =
            points.iter().map(|point| matern(self.process.squared_distance(place, point))).collect();
        let row: Vec<f64> = kernels.iter().map(|(value, _)| variance * value).collect();
        let solved: Vec<f64> = (0..n).map(|i| dot(&inverse[i * n..(i + 1) * n], &row)).collect();
        let mean = dot(&row, weights);
        let deviation = self.process.deviation(dot(&row, &solved));
        let z = (self.best - mean) / deviation;
        let by_z = improvement_slope(z);
        let gradient = keys.iter().map(|key| {
            // The derivatives of the mean, and of the variance.
            let (mut of_mean, mut of_variance) = (0.0, 0.0);
            for (index, (_, slope)) in kernels.iter().enumerate() {
                let by = -variance * slope * (place[*key] - points[index][*key]) * inverse_squares[*key];
                of_mean += by * weights[index];
                of_variance -= 2.0 * by * solved[index];
            }
            let of_log_deviation = 0.5 * of_variance / (deviation * deviation);
            by_z * (-of_mean / deviation - z * of_log_deviation) + of_log_deviation
        });
        (log_improvement(z) + deviation.ln(), gradient.collect())
    }

    /// Climbs from a place of which the improvement is known.
    fn climb(&self, (mut value, mut place): (f64, Vec<f64>)) -> (f64, Vec<f64>) {
        let dimensions = &self.process.space.dimensions;
        let (numbers, others): (Vec<usize>, Vec<usize>) =
            (0..dimensions.len()).partition(|key| matches!(dimensions[*key].domain, Domain::Number { .. }));
        for _ in 0..ROUNDS {
            let before = value;
            let start: Vec<f64> = numbers.iter().map(|key| place[*key]).collect();
            let with = |at: &[f64]| {
                let mut place = place.clone();
                numbers.iter().zip(at).for_each(|(key, at)| place[*key] = *at);
                place
            };
            let climbed = minimise(&start, CLIMB_LIMITS, &mut |at| {
                let (value, gradient) = self.slopes(&with(at), &numbers);
                value.is_finite().then(|| (-value, gradient.iter().map(|slope| -slope).collect()))
            });
            if let Some((least, at)) = climbed.filter(|(least, _)| -least > value) {
                (value, place) = (-least, with(&at));
            }
            for key in &others {
                for at in self.values(*key, place[*key]) {
                    let mut other = place.clone();
                    other[*key] = at;
                    let found = self.at(&other);
                    if found > value {
                        (value, place) = (found, other);
                    }
                }
            }
            if others.is_empty() || value <= before + CLIMB_LIMITS.slope {
                break;
            }
        }
        (value, place)
    }

    /// Places of values of `key` other than the one at `from`: all, or those at some distances.
    fn values(&self, key: usize, from: f64) -> Vec<f64> {
        let space = self.process.space;
        let domain = &space.dimensions[key].domain;
        let mut places = match domain.count().filter(|count| *count <= VALUES_MAX as u64).and_then(|_| domain.edges()) {
            Some(edges) => edges.windows(2).map(|edge| 0.5 * (edge[0] + edge[1])).collect::<Vec<f64>>(),
            None => DISTANCES.iter().flat_map(|by| [from - by, from + by]).collect(),
        };
        places.iter_mut().for_each(|place| *place = domain.canonical(place.clamp(0.0, 1.0)));
        places.retain(|place| *place != from);
        places
    }
}

/// The points and losses that the process models, at most `most`: mean 0, deviation 1.
fn results(space: &Space, trials: &[Observation<'_>], most: usize) -> (Vec<Vec<f64>>, Vec<f64>) {
    let needed = FIRST.min(space.len() + 3);
    let top = trials.iter().map(|trial| trial.losses.len()).max().unwrap_or(0);
    let enough = |rung: &usize| trials.iter().filter(|trial| trial.loss_at(*rung).is_some()).count() >= needed;
    let rung = (0..top).rev().find(enough).unwrap_or(0);
    let mut found: Vec<(usize, f64)> = trials
        .iter()
        .enumerate()
        .filter_map(|(index, trial)| match trial.standing {
            Standing::Failed => Some((index, f64::INFINITY)),
            // It did not go on, so it is worse than those that did.
            Standing::Reached(reached, _) if reached < rung => Some((index, f64::INFINITY)),
            _ => Some((index, trial.loss_at(rung)?)),
        })
        .collect();
    let mut finite: Vec<f64> = found.iter().map(|(_, loss)| *loss).filter(|loss| loss.is_finite()).collect();
    finite.sort_by(f64::total_cmp);
    let (Some(least), Some(middle)) = (finite.first().copied(), finite.get(finite.len() / 2).copied()) else {
        return (found.iter().map(|(index, _)| trials[*index].point.0.clone()).collect(), vec![0.0; found.len()]);
    };
    // How bad a bad trial is does not matter, and would hide the differences between good ones.
    let highest = (middle + 5.0 * (middle - least)).min(finite[finite.len() - 1]).max(least);
    found.iter_mut().for_each(|(_, loss)| *loss = loss.min(highest));
    if found.len() > most {
        found.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut others = found.split_off(most / 2);
        others.sort_by_key(|(index, _)| std::cmp::Reverse(*index));
        found.extend(others.into_iter().take(most / 2));
        found.sort_by_key(|(index, _)| *index);
    }
    let n = found.len() as f64;
    let mean = found.iter().map(|(_, loss)| loss).sum::<f64>() / n;
    let deviation = (found.iter().map(|(_, loss)| (loss - mean).powi(2)).sum::<f64>() / n).sqrt();
    let scale = if deviation > 0.0 { deviation } else { 1.0 };
    let points = found.iter().map(|(index, _)| trials[*index].point.0.clone()).collect();
    (points, found.iter().map(|(_, loss)| (loss - mean) / scale).collect())
}

/// Matérn's kernel with nu = 5/2 at the squared scaled distance, and minus twice its derivative by
/// it.
fn matern(squared: f64) -> (f64, f64) {
    let r = (5.0 * squared).sqrt();
    let decay = (-r).exp();
    ((1.0 + r + r * r / 3.0) * decay, 5.0 / 3.0 * (1.0 + r) * decay)
}

/// Minus the logarithm of the prior of a length, up to a constant, and its derivative by the
/// length's logarithm. Lengths of a third to three times the range of a key are about as likely.
fn length_prior(log_length: f64) -> (f64, f64) {
    let square = (2.0 * log_length).exp();
    (0.1 * (square + 1.0 / square), 0.2 * (square - 1.0 / square))
}

/// The same of a variance with a gamma distribution of this shape and rate.
fn variance_prior(log_variance: f64, shape: f64, rate: f64) -> (f64, f64) {
    let variance = log_variance.exp();
    (rate * variance - (shape - 1.0) * log_variance, rate * variance - (shape - 1.0))
}

/// Shape and rate of the kernel's variance and of the noise's, for losses of variance 1.
const VARIANCE_PRIOR: (f64, f64) = (2.0, 1.0);
const NOISE_PRIOR: (f64, f64) = (1.0, 30.0);

impl Shape {
    /// Lengths, the kernel's variance and the noise's, in one list.
    fn of(numbers: &[f64], keys: usize) -> Shape {
        Shape { lengths: numbers[..keys].to_vec(), variance: numbers[keys], noise: numbers[keys + 1] }
    }

    fn noise_variance(&self) -> f64 {
        NOISE_MIN + self.noise.exp()
    }
}

/// The squared differences of all pairs of points, by key: what the lengths do not change.
struct Pairs {
    keys: usize,
    /// Of points i and j < i, all keys; then the next j.
    differences: Vec<f64>,
}

impl Pairs {
    fn of(metric: &Metric, points: &[Vec<f64>]) -> Pairs {
        let keys = metric.is_ordered.len();
        let pairs = (0..points.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
        let differences =
            pairs.flat_map(|(i, j)| (0..keys).map(move |key| metric.difference(key, points[i][key], points[j][key])));
        Pairs { keys, differences: differences.collect() }
    }
}

/// The most probable shape. The search for it starts from lengths of half the range of a key.
fn fit(space: &Space, points: &[Vec<f64>], losses: &[f64]) -> Shape {
    let keys = space.len();
    let pairs = Pairs::of(&Metric::of(space), points);
    let start = [vec![0.5f64.ln(); keys], vec![0.0, 1e-4f64.ln()]].concat();
    let fitted = minimise(&start, FIT_LIMITS, &mut |at| improbability(&pairs, losses, &Shape::of(at, keys)));
    // With noise of the losses' own size the kernel matrix of any points is positive.
    fitted.map_or_else(|| Shape { lengths: vec![0.0; keys], variance: 0.0, noise: 0.0 }, |(_, at)| Shape::of(&at, keys))
}

/// The negative logarithm of the probability of a shape, up to a constant, and its gradient by the
/// lengths, the variance and the noise. None if the matrix is not positive in f64.
fn improbability(pairs: &Pairs, losses: &[f64], shape: &Shape) -> Option<(f64, Vec<f64>)> {
    let (n, keys) = (losses.len(), pairs.keys);
    let inverse_squares: Vec<f64> = shape.lengths.iter().map(|length| (-2.0 * length).exp()).collect();
    let (variance, noise) = (shape.variance.exp(), shape.noise_variance());
    let mut matrix = vec![0.0; n * n];
    let mut slopes = Vec::with_capacity(n * n / 2);
    let mut differences = pairs.differences.chunks_exact(keys);
    for i in 0..n {
        for j in 0..i {
            let squared = dot(differences.next()?, &inverse_squares);
            let (value, slope) = matern(squared);
            matrix[i * n + j] = variance * value;
            slopes.push(variance * slope);
        }
        matrix[i * n + i] = variance + noise;
    }
    let factor = cholesky(matrix, n)?;
    let inverse = inverse(&factor, n);
    let weights: Vec<f64> = (0..n).map(|i| dot(&inverse[i * n..(i + 1) * n], losses)).collect();
    let fit = dot(losses, &weights);
    let half_determinant: f64 = (0..n).map(|i| factor[i * n + i].ln()).sum();
    let mut value = 0.5 * fit + half_determinant;
    // Half of tr(K^-1 dK) - a' dK a; each pair counts twice. The kernel's own part of K is K less
    // the noise, so that the derivative by the variance follows from the two traces.
    let mut gradient = vec![0.0; keys + 2];
    let mut differences = pairs.differences.chunks_exact(keys).zip(&slopes);
    let mut trace = 0.0;
    for i in 0..n {
        for j in 0..i {
            let (squares, slope) = differences.next()?;
            let factor = (inverse[i * n + j] - weights[i] * weights[j]) * slope;
            gradient.iter_mut().zip(squares).for_each(|(sum, square)| *sum += factor * square);
        }
        trace += inverse[i * n + i] - weights[i] * weights[i];
    }
    gradient.iter_mut().zip(&inverse_squares).for_each(|(sum, by)| *sum *= by);
    gradient[keys] = 0.5 * (n as f64 - fit - noise * trace);
    gradient[keys + 1] = 0.5 * shape.noise.exp() * trace;

    let of_lengths = shape.lengths.iter().map(|length| length_prior(*length));
    let of_variance = variance_prior(shape.variance, VARIANCE_PRIOR.0, VARIANCE_PRIOR.1);
    let of_noise = variance_prior(shape.noise, NOISE_PRIOR.0, NOISE_PRIOR.1);
    for (sum, (prior, slope)) in gradient.iter_mut().zip(of_lengths.chain([of_variance, of_noise])) {
        value += prior;
        *sum += slope;
    }
    value.is_finite().then_some((value, gradient))
}

/// The measure of distances: whether each key has an order.
struct Metric {
    is_ordered: Vec<bool>,
}

impl Metric {
    fn of(space: &Space) -> Metric {
        Metric { is_ordered: space.dimensions.iter().map(|dimension| dimension.domain.is_ordered()).collect() }
    }

    /// The squared difference of two places of key `key`.
    fn difference(&self, key: usize, a: f64, b: f64) -> f64 {
        match self.is_ordered[key] {
            true => (a - b).powi(2),
            // Places of equal values are equal.
            false => f64::from(u8::from(a != b)),
        }
    }
}

impl<'a> Process<'a> {
    fn new(space: &'a Space, points: Vec<Vec<f64>>, losses: &[f64], mut shape: Shape) -> Process<'a> {
        let n = points.len();
        let inverse_squares = shape.lengths.iter().map(|length| (-2.0 * length).exp()).collect();
        let variance = shape.variance.exp();
        let metric = Metric::of(space);
        let mut process = Process {
            space,
            metric,
            points,
            shape: shape.clone(),
            inverse_squares,
            variance,
            inverse: Vec::new(),
            weights: Vec::new(),
        };
        let mut kernel = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..=i {
                let squared = process.squared_distance(&process.points[i], &process.points[j]);
                kernel[i * n + j] = variance * matern(squared).0;
            }
        }
        loop {
            let mut matrix = kernel.clone();
            (0..n).for_each(|i| matrix[i * n + i] += shape.noise_variance());
            match cholesky(matrix, n) {
                Some(factor) => {
                    process.inverse = inverse(&factor, n);
                    process.weights = (0..n).map(|i| dot(&process.inverse[i * n..(i + 1) * n], losses)).collect();
                    process.shape = shape;
                    return process;
                }
                // Points that nearly coincide: twice the noise until the factor exists.
                None => shape.noise = shape.noise.max(NOISE_MIN.ln()) + LN_2,
            }
        }
    }

    /// The mean and the deviation of the loss at `point`, without noise.
    fn predict(&self, point: &[f64]) -> (f64, f64) {
        let n = self.points.len();
        let row: Vec<f64> =
            self.points.iter().map(|other| self.variance * matern(self.squared_distance(point, other)).0).collect();
        // The matrix is symmetric: pairs of different points count twice.
        let explained: f64 = (0..n)
            .map(|i| {
                row[i] * (2.0 * dot(&self.inverse[i * n..i * n + i], &row[..i]) + self.inverse[i * n + i] * row[i])
            })
            .sum();
        (dot(&row, &self.weights), self.deviation(explained))
    }

    /// The deviation where the results explain this part of the variance.
    fn deviation(&self, explained: f64) -> f64 {
        (self.variance - explained).max(1e-10 * self.variance).sqrt()
    }

    fn squared_distance(&self, a: &[f64], b: &[f64]) -> f64 {
        let scaled = |key: usize| self.metric.difference(key, a[key], b[key]) * self.inverse_squares[key];
        (0..a.len()).map(scaled).sum()
    }
}

/// The lower Cholesky factor of a symmetric matrix of which the lower half is read; the upper half
/// of the result is zero. None if it is not positive definite.
fn cholesky(mut a: Vec<f64>, n: usize) -> Option<Vec<f64>> {
    for i in 0..n {
        let (above, row) = a.split_at_mut(i * n);
        for j in 0..i {
            row[j] = (row[j] - dot(&row[..j], &above[j * n..j * n + j])) / above[j * n + j];
        }
        let rest = row[i] - dot(&row[..i], &row[..i]);
        if rest.is_nan() || rest <= 1e-12 {
            return None;
        }
        row[i] = rest.sqrt();
        row[i + 1..n].fill(0.0);
    }
    Some(a)
}

/// (L L')^-1, both halves.
fn inverse(l: &[f64], n: usize) -> Vec<f64> {
    // The columns of L^-1, as rows.
    let mut columns = vec![0.0; n * n];
    for (j, column) in columns.chunks_exact_mut(n.max(1)).enumerate() {
        column[j] = 1.0 / l[j * n + j];
        for i in j + 1..n {
            column[i] = -dot(&l[i * n + j..i * n + i], &column[j..i]) / l[i * n + i];
        }
    }
    let mut inverse = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let sum = dot(&columns[i * n + i..(i + 1) * n], &columns[j * n + i..(j + 1) * n]);
            (inverse[i * n + j], inverse[j * n + i]) = (sum, sum);
        }
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(lines: &[&str]) -> Space {
        Space::parse(None, &lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    fn some_results(space: &Space, n: usize) -> (Vec<Vec<f64>>, Vec<f64>) {
        let points: Vec<Vec<f64>> = (0..n).map(|index| space.point(&sobol::place(space.len(), 1, index)).0).collect();
        let losses = points.iter().map(|p| (6.0 * p[0]).sin() + p[1] * p[1]).collect();
        (points, losses)
    }

    #[test]
    fn gradients_of_the_fit_are_those_of_differences() {
        let space = space(&["a.x=0..1", "a.y=0..1", "a.z=p|q|r"]);
        let (points, losses) = some_results(&space, 12);
        let pairs = Pairs::of(&Metric::of(&space), &points);
        let at = [-0.7, 0.2, 0.5, 0.4, -4.0];
        let value = |at: &[f64]| improbability(&pairs, &losses, &Shape::of(at, 3)).unwrap();
        let (_, gradient) = value(&at);
        for index in 0..at.len() {
            let moved = |by: f64| {
                let mut moved = at;
                moved[index] += by;
                value(&moved).0
            };
            let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            assert!((gradient[index] - want).abs() < 1e-5 * (1.0 + want.abs()), "{index}: {} {want}", gradient[index]);
        }
    }

    #[test]
    fn gradients_of_the_improvement_are_those_of_differences() {
        let space = space(&["a.x=0..1", "a.y=0..1", "a.z=p|q|r"]);
        let (points, losses) = some_results(&space, 16);
        let shape = fit(&space, &points, &losses);
        let process = Process::new(&space, points, &losses, shape);
        for best in [-0.5, -5.0, -50.0] {
            let improvement = Improvement {
                process: Process::new(&space, process.points.clone(), &losses, process.shape.clone()),
                best,
                tried: None,
            };
            let place = [0.33, 0.61, 0.5];
            let (value, gradient) = improvement.slopes(&place, &[0, 1]);
            assert!((value - improvement.at(&place)).abs() < 1e-9 * value.abs(), "{value}");
            for key in 0..2 {
                let moved = |by: f64| {
                    let mut moved = place;
                    moved[key] += by;
                    improvement.at(&moved)
                };
                let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!(
                    (gradient[key] - want).abs() < 1e-4 * (1.0 + want.abs()),
                    "{best} {key}: {} {want}",
                    gradient[key]
                );
            }
        }
    }

    #[test]
    fn predictions_pass_through_the_results_and_are_unsure_elsewhere() {
        let space = space(&["a.x=0..1", "a.y=0..1"]);
        let (points, losses) = some_results(&space, 24);
        let shape = fit(&space, &points, &losses);
        let process = Process::new(&space, points.clone(), &losses, shape);
        for (point, loss) in points.iter().zip(&losses) {
            let (mean, deviation) = process.predict(point);
            assert!((mean - loss).abs() < 0.05 && deviation < 0.1, "{mean} {loss} {deviation}");
        }
        let (mean, deviation) = process.predict(&[0.35, 0.65]);
        let want = (6.0f64 * 0.35).sin() + 0.65 * 0.65;
        assert!((mean - want).abs() < 3.0 * deviation + 0.02, "{mean} {want} {deviation}");
    }

    /// The best value of a key without an order, and of one with many values, is found by climbing.
    #[test]
    fn a_climb_ends_where_no_value_of_a_key_is_better() {
        let space = space(&["a.x=0..1", "a.y=int:1..8", "a.z=p|q|r"]);
        let (points, losses) = some_results(&space, 20);
        let shape = fit(&space, &points, &losses);
        let improvement =
            Improvement { process: Process::new(&space, points, &losses, shape), best: -0.9, tried: None };
        let start = space.point(&[0.1, 0.9, 0.1]).0;
        let (value, place) = improvement.climb((improvement.at(&start), start));
        assert!((value - improvement.at(&place)).abs() < 1e-9);
        for key in [1, 2] {
            for other in improvement.values(key, place[key]) {
                let mut moved = place.clone();
                moved[key] = other;
                assert!(improvement.at(&moved) <= value, "{key} {other}");
            }
        }
    }

    #[test]
    fn inverses_invert() {
        let n = 11;
        let at = |i: usize, j: usize| if i == j { 3.0 } else { 1.0 / (1.0 + i.abs_diff(j) as f64) };
        let matrix: Vec<f64> = (0..n * n).map(|k| at(k / n, k % n)).collect();
        let inverse = inverse(&cholesky(matrix.clone(), n).unwrap(), n);
        for i in 0..n {
            for j in 0..n {
                let one: f64 = (0..n).map(|k| matrix[i * n + k] * inverse[k * n + j]).sum();
                assert!((one - f64::from(u8::from(i == j))).abs() < 1e-12, "{i} {j}: {one}");
            }
        }
        assert!(cholesky(vec![1.0, 0.0, 2.0, 1.0], 2).is_none());
    }
}
