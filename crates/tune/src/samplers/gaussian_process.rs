//! A Gaussian process over the space, and the point with the highest expected improvement (Jones
//! et al. 1998), whose logarithm is maximised (Ament et al. 2023).
//!
//! The kernel is Matérn's with nu = 5/2 and a length for each key. Lengths and noise are the most
//! probable ones given the results (Rasmussen & Williams 2006, section 5.4.1), with the prior of
//! Hvarfner et al. (2024) on lengths; the variance follows from them in closed form. Keys without
//! an order contribute 1 to the distance where they differ.
//!
//! With successive halving, the process models the losses of the highest rung that enough trials
//! have reached. Trials that run are taken to end at their predicted loss (kriging believer;
//! Ginsbourger et al. 2010), so that trials that run together differ.

use super::{FIRST, Observation, Standing, random, sobol};
use crate::normal::log_improvement;
use crate::random::Stream;
use crate::{Point, Space};
use std::f64::consts::LN_2;

const PURPOSE: u32 = 0x6770_0000;
/// Most trials in the model: the best, and the newest of the others.
const POINTS_MAX: usize = 120;
/// Most trials from which lengths and noise are found.
const FITTED_MAX: usize = 60;
/// Steps of the search for lengths and noise.
const FIT_STEPS: usize = 40;
/// Places at which the improvement is looked at before the best are refined.
const CANDIDATES: usize = 512;
/// Places near the best results, per scale.
const NEAR: usize = 64;
const NEAR_SCALES: [f64; 3] = [0.1, 0.03, 0.01];
/// Candidates that are refined.
const REFINED: usize = 3;

/// Lengths by key, and the noise's variance as a share of the kernel's; as logarithms.
#[derive(Clone, Debug)]
struct Shape {
    lengths: Vec<f64>,
    noise: f64,
}

/// A process given results.
struct Process<'a> {
    space: &'a Space,
    points: Vec<Vec<f64>>,
    shape: Shape,
    /// The kernel's variance.
    variance: f64,
    /// The lower triangle of the Cholesky factor of the kernel matrix, by rows.
    factor: Vec<f64>,
    /// The inverse kernel matrix times the results.
    weights: Vec<f64>,
}

pub fn propose(space: &Space, seed: u64, trials: &[Observation<'_>]) -> Point {
    let number = trials.len() as u32;
    let (points, losses) = results(space, trials);
    let shape = fit(space, &points, &losses);
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
    let is_free = |point: &Point| space.count().is_none() || trials.iter().all(|trial| trial.point != point);
    let gain = |point: &Point| {
        if !is_free(point) {
            return f64::NEG_INFINITY;
        }
        let (mean, deviation) = process.predict(&point.0);
        log_improvement((best - mean) / deviation) + deviation.ln()
    };
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
            let centre = &process.points[order[index % order.len().min(4)]];
            let near = centre.iter().map(|place| stream.truncated_normal(*place, scale, 0.0, 1.0)).collect();
            places.push(near);
        }
    }
    let mut candidates: Vec<(f64, Point)> = places
        .iter()
        .map(|place| {
            let point = space.point(place);
            (gain(&point), point)
        })
        .collect();
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
    candidates.truncate(REFINED);
    let refined = candidates.into_iter().map(|start| refine(space, start, &gain));
    let best = refined.reduce(|best, next| if next.0 > best.0 { next } else { best });
    best.map_or_else(|| space.point(&random(space, &mut stream)), |(_, point)| point)
}

/// Climbs by single keys, with steps that shrink.
fn refine(space: &Space, mut best: (f64, Point), gain: &dyn Fn(&Point) -> f64) -> (f64, Point) {
    let mut step = 0.05;
    while step > 5e-4 {
        let mut is_higher = false;
        for key in 0..space.len() {
            for sign in [-1.0, 1.0] {
                let mut place = best.1.0.clone();
                place[key] = (place[key] + sign * step).clamp(0.0, 1.0);
                let point = space.point(&place);
                let gained = gain(&point);
                if gained > best.0 {
                    (best, is_higher) = ((gained, point), true);
                }
            }
        }
        if !is_higher {
            step /= 2.0;
        }
    }
    best
}

/// The points and losses that the process models: mean 0, deviation 1.
fn results(space: &Space, trials: &[Observation<'_>]) -> (Vec<Vec<f64>>, Vec<f64>) {
    let needed = FIRST.min(space.len() + 3);
    let top = trials.iter().map(|trial| trial.losses.len()).max().unwrap_or(0);
    let enough = |rung: &usize| trials.iter().filter(|trial| trial.loss_at(*rung).is_some()).count() >= needed;
    let rung = (0..top).rev().find(enough).unwrap_or(0);
    let mut found: Vec<(usize, f64)> = trials
        .iter()
        .enumerate()
        .filter_map(|(index, trial)| match trial.standing {
            Standing::Failed => Some((index, f64::INFINITY)),
            _ => Some((index, trial.loss_at(rung)?)),
        })
        .collect();
    let mut finite: Vec<f64> = found.iter().map(|(_, loss)| *loss).filter(|loss| loss.is_finite()).collect();
    finite.sort_by(f64::total_cmp);
    let (Some(least), Some(middle)) = (finite.first().copied(), finite.get(finite.len() / 2).copied()) else {
        return (found.iter().map(|(index, _)| trials[*index].point.0.clone()).collect(), vec![0.0; found.len()]);
    };
    // How bad a bad trial is does not matter, and would hide the differences between good ones.
    let most = (middle + 5.0 * (middle - least)).min(finite[finite.len() - 1]).max(least);
    found.iter_mut().for_each(|(_, loss)| *loss = loss.min(most));
    if found.len() > POINTS_MAX {
        found.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut others = found.split_off(POINTS_MAX / 2);
        others.sort_by_key(|(index, _)| std::cmp::Reverse(*index));
        found.extend(others.into_iter().take(POINTS_MAX / 2));
        found.sort_by_key(|(index, _)| *index);
    }
    let n = found.len() as f64;
    let mean = found.iter().map(|(_, loss)| loss).sum::<f64>() / n;
    let deviation = (found.iter().map(|(_, loss)| (loss - mean).powi(2)).sum::<f64>() / n).sqrt();
    let scale = if deviation > 0.0 { deviation } else { 1.0 };
    let points = found.iter().map(|(index, _)| trials[*index].point.0.clone()).collect();
    (points, found.iter().map(|(_, loss)| (loss - mean) / scale).collect())
}

/// The squared difference of two places of key `key`.
fn difference(space: &Space, key: usize, a: f64, b: f64) -> f64 {
    match space.dimensions[key].domain.is_ordered() {
        true => (a - b).powi(2),
        // Places of equal values are equal.
        false => f64::from(u8::from(a != b)),
    }
}

/// Matérn's kernel with nu = 5/2 at the squared scaled distance, and minus twice its derivative by
/// it.
fn matern(squared: f64) -> (f64, f64) {
    let r = (5.0 * squared).sqrt();
    let decay = (-r).exp();
    ((1.0 + r + r * r / 3.0) * decay, 5.0 / 3.0 * (1.0 + r) * decay)
}

/// The mean and deviation of the logarithm of a length, before any result: Hvarfner et al. 2024,
/// section 5, for the unit cube.
fn length_prior(dimensions: usize) -> (f64, f64) {
    (2f64.sqrt() + 0.5 * (dimensions as f64).ln() - 1.0, 3f64.sqrt())
}

/// The same of the noise's variance, as a share of the kernel's.
const NOISE_PRIOR: (f64, f64) = (-9.0, 2.5);

/// The most probable lengths and noise, by resilient propagation (Riedmiller & Braun 1993) from two
/// starts.
fn fit(space: &Space, points: &[Vec<f64>], losses: &[f64]) -> Shape {
    let from = points.len().saturating_sub(FITTED_MAX);
    // The best of the earlier ones stays: trials are in order, so this is a matter of the newest.
    let (points, losses) = (&points[from..], &losses[from..]);
    let starts = [length_prior(space.len()).0, 0.3f64.ln()];
    let fitted = starts.map(|length| {
        let mut at = Shape { lengths: vec![length; space.len()], noise: NOISE_PRIOR.0 };
        let mut steps = vec![0.3f64; space.len() + 1];
        let mut before = vec![0.0f64; space.len() + 1];
        let mut best = (f64::INFINITY, at.clone());
        for _ in 0..FIT_STEPS {
            let Some((value, gradient)) = improbability(space, points, losses, &at) else { break };
            if value < best.0 {
                best = (value, at.clone());
            }
            for (index, slope) in gradient.iter().enumerate() {
                let turned = slope * before[index];
                steps[index] = match turned {
                    turned if turned > 0.0 => (1.2 * steps[index]).min(1.0),
                    turned if turned < 0.0 => (0.5 * steps[index]).max(1e-3),
                    _ => steps[index],
                };
                before[index] = if turned < 0.0 { 0.0 } else { *slope };
                let change = -before[index].signum() * if before[index] == 0.0 { 0.0 } else { steps[index] };
                match at.lengths.get_mut(index) {
                    Some(length) => *length = (*length + change).clamp(-6.0, 8.0),
                    None => at.noise = (at.noise + change).clamp(-16.0, 2.0),
                }
            }
        }
        best
    });
    let [a, b] = fitted;
    if b.0 < a.0 { b.1 } else { a.1 }
}

/// The negative logarithm of the probability of a shape, up to a constant, and its gradient by the
/// lengths and the noise. The kernel's variance is the most probable one. None if the matrix is
/// not positive in f64.
fn improbability(space: &Space, points: &[Vec<f64>], losses: &[f64], shape: &Shape) -> Option<(f64, Vec<f64>)> {
    let n = points.len();
    let inverse_squares: Vec<f64> = shape.lengths.iter().map(|length| (-2.0 * length).exp()).collect();
    let noise = shape.noise.exp();
    let mut matrix = vec![0.0; n * n];
    let mut slopes = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let squared: f64 = (0..space.len())
                .map(|key| difference(space, key, points[i][key], points[j][key]) * inverse_squares[key])
                .sum();
            let (value, slope) = matern(squared);
            (matrix[i * n + j], slopes[i * n + j]) = (value, slope);
        }
        matrix[i * n + i] += noise;
    }
    let factor = cholesky(matrix, n)?;
    let weights = solve(&factor, n, losses);
    let fit: f64 = losses.iter().zip(&weights).map(|(loss, weight)| loss * weight).sum();
    let variance = (fit / n as f64).max(1e-12);
    let half_determinant: f64 = (0..n).map(|i| factor[i * n + i].ln()).sum();
    let mut value = 0.5 * n as f64 * variance.ln() + half_determinant;
    let inverse = inverse(&factor, n);
    let mut gradient = vec![0.0; space.len() + 1];
    for i in 0..n {
        for j in 0..=i {
            let twice = if i == j { 0.5 } else { 1.0 };
            // Half of tr(K^-1 dK) - a' dK a / variance; each pair counts twice.
            let factor = twice * (inverse[i * n + j] - weights[i] * weights[j] / variance);
            if i == j {
                gradient[space.len()] += factor * noise;
                continue;
            }
            for key in 0..space.len() {
                let squared = difference(space, key, points[i][key], points[j][key]) * inverse_squares[key];
                gradient[key] += factor * slopes[i * n + j] * squared;
            }
        }
    }
    let (mean, deviation) = length_prior(space.len());
    for (length, slope) in shape.lengths.iter().zip(&mut gradient) {
        value += 0.5 * ((length - mean) / deviation).powi(2);
        *slope += (length - mean) / deviation.powi(2);
    }
    let (mean, deviation) = NOISE_PRIOR;
    value += 0.5 * ((shape.noise - mean) / deviation).powi(2);
    gradient[space.len()] += (shape.noise - mean) / deviation.powi(2);
    Some((value, gradient))
}

impl<'a> Process<'a> {
    fn new(space: &'a Space, points: Vec<Vec<f64>>, losses: &[f64], mut shape: Shape) -> Process<'a> {
        let n = points.len();
        loop {
            let mut matrix = vec![0.0; n * n];
            for i in 0..n {
                for j in 0..=i {
                    matrix[i * n + j] = kernel(space, &shape, &points[i], &points[j]);
                }
                matrix[i * n + i] += shape.noise.exp();
            }
            match cholesky(matrix, n) {
                Some(factor) => {
                    let weights = solve(&factor, n, losses);
                    let fit: f64 = losses.iter().zip(&weights).map(|(loss, weight)| loss * weight).sum();
                    let variance = (fit / n.max(1) as f64).max(1e-12);
                    return Process { space, points, shape, variance, factor, weights };
                }
                // Points that nearly coincide: twice the noise until the factor exists.
                None => shape.noise += LN_2,
            }
        }
    }

    /// The mean and the deviation of the loss at `point`, without noise.
    fn predict(&self, point: &[f64]) -> (f64, f64) {
        let n = self.points.len();
        let mut row: Vec<f64> = self.points.iter().map(|other| kernel(self.space, &self.shape, point, other)).collect();
        let mean = row.iter().zip(&self.weights).map(|(k, weight)| k * weight).sum();
        forward(&self.factor, n, &mut row);
        let explained: f64 = row.iter().map(|x| x * x).sum();
        (mean, (self.variance * (1.0 - explained).max(1e-10)).sqrt())
    }
}

fn kernel(space: &Space, shape: &Shape, a: &[f64], b: &[f64]) -> f64 {
    let scaled = |key: usize| difference(space, key, a[key], b[key]) * (-2.0 * shape.lengths[key]).exp();
    matern((0..space.len()).map(scaled).sum()).0
}

/// The lower Cholesky factor of a symmetric matrix of which the lower half is read. None if it is
/// not positive definite.
fn cholesky(mut a: Vec<f64>, n: usize) -> Option<Vec<f64>> {
    for i in 0..n {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| a[i * n + k] * a[j * n + k]).sum();
            let rest = a[i * n + j] - sum;
            a[i * n + j] = match i == j {
                // Also false for NaN.
                true if rest > 1e-12 => rest.sqrt(),
                true => return None,
                false => rest / a[j * n + j],
            };
        }
    }
    Some(a)
}

/// Solves L x = b in place.
fn forward(l: &[f64], n: usize, b: &mut [f64]) {
    for i in 0..n {
        let sum: f64 = (0..i).map(|k| l[i * n + k] * b[k]).sum();
        b[i] = (b[i] - sum) / l[i * n + i];
    }
}

/// Solves L L' x = b.
fn solve(l: &[f64], n: usize, b: &[f64]) -> Vec<f64> {
    let mut x = b.to_vec();
    forward(l, n, &mut x);
    for i in (0..n).rev() {
        let sum: f64 = (i + 1..n).map(|k| l[k * n + i] * x[k]).sum();
        x[i] = (x[i] - sum) / l[i * n + i];
    }
    x
}

/// The lower half of (L L')^-1.
fn inverse(l: &[f64], n: usize) -> Vec<f64> {
    // Rows of L^-1 first.
    let mut m = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let sum: f64 = (j..i).map(|k| l[i * n + k] * m[k * n + j]).sum();
            m[i * n + j] = (f64::from(u8::from(i == j)) - sum) / l[i * n + i];
        }
    }
    let mut inverse = vec![0.0; n * n];
    for k in 0..n {
        for i in 0..=k {
            for j in 0..=i {
                inverse[i * n + j] += m[k * n + i] * m[k * n + j];
            }
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
    fn the_gradient_is_that_of_differences() {
        let space = space(&["a.x=0..1", "a.y=0..1", "a.z=p|q|r"]);
        let (points, losses) = some_results(&space, 12);
        let shape = Shape { lengths: vec![-0.7, 0.2, 0.5], noise: -4.0 };
        let (_, gradient) = improbability(&space, &points, &losses, &shape).unwrap();
        for index in 0..4 {
            let value = |by: f64| {
                let mut moved = shape.clone();
                match moved.lengths.get_mut(index) {
                    Some(length) => *length += by,
                    None => moved.noise += by,
                }
                improbability(&space, &points, &losses, &moved).unwrap().0
            };
            let want = (value(1e-5) - value(-1e-5)) / 2e-5;
            assert!((gradient[index] - want).abs() < 1e-5 * (1.0 + want.abs()), "{index}: {} {want}", gradient[index]);
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

    #[test]
    fn solutions_solve() {
        let n = 5;
        let at = |i: usize, j: usize| if i == j { 3.0 } else { 1.0 / (1.0 + i.abs_diff(j) as f64) };
        let matrix: Vec<f64> = (0..n * n).map(|k| at(k / n, k % n)).collect();
        let factor = cholesky(matrix.clone(), n).unwrap();
        let b = [1.0, -2.0, 0.5, 3.0, 0.0];
        let x = solve(&factor, n, &b);
        let inverse = inverse(&factor, n);
        for i in 0..n {
            let back: f64 = (0..n).map(|j| matrix[i * n + j] * x[j]).sum();
            assert!((back - b[i]).abs() < 1e-12);
            let by_inverse: f64 = (0..n).map(|j| inverse[i.max(j) * n + i.min(j)] * b[j]).sum();
            assert!((by_inverse - x[i]).abs() < 1e-12);
        }
        assert!(cholesky(vec![1.0, 0.0, 2.0, 1.0], 2).is_none());
    }
}
