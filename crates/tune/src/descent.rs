//! Minimisation of a smooth function of a few numbers in a box: the BFGS method with steps
//! projected on the box (Nocedal & Wright, "Numerical Optimization", 2006, sections 6.1 and 16.7).

/// Halvings of a step before the search along it ends.
const HALVINGS: u32 = 20;
/// Least share of the predicted decrease (Armijo's condition).
const DECREASE: f64 = 1e-4;

/// The limits of a minimisation.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The lowest number of each place.
    pub low: f64,
    /// The highest.
    pub high: f64,
    /// Most steps.
    pub steps: usize,
    /// The slope, in every direction that the box leaves free, at which a place counts as a
    /// minimum.
    pub slope: f64,
}

/// A function that returns a value and its gradient at a place, or None where it has no value.
type Function<'f> = dyn FnMut(&[f64]) -> Option<(f64, Vec<f64>)> + 'f;

/// The least value found from `start` on, and its place. `function` returns a value and its
/// gradient, or None where it has no value. None if it has none at the start.
pub fn minimise(start: &[f64], limits: Limits, function: &mut Function<'_>) -> Option<(f64, Vec<f64>)> {
    let n = start.len();
    let Limits { low, high, .. } = limits;
    let mut place: Vec<f64> = start.iter().map(|x| x.clamp(low, high)).collect();
    let (mut value, mut gradient) = function(&place)?;
    // An approximation of the inverse Hessian, of the numbers that are free; None: the identity.
    let mut inverse: Option<Vec<f64>> = None;
    let mut was_free: Vec<bool> = Vec::new();
    for _ in 0..limits.steps {
        // A number at an edge whose slope leads out of the box is not free.
        let is_free: Vec<bool> =
            place.iter().zip(&gradient).map(|(x, g)| !(*x <= low && *g > 0.0 || *x >= high && *g < 0.0)).collect();
        if is_free != was_free {
            inverse = None;
        }
        let free = |all: &[f64]| -> Vec<f64> {
            all.iter().zip(&is_free).map(|(x, is_free)| if *is_free { *x } else { 0.0 }).collect()
        };
        let slopes = free(&gradient);
        let steepest = slopes.iter().fold(0.0, |most: f64, slope| most.max(slope.abs()));
        // Also ends where a slope is not a number.
        if steepest.is_nan() || steepest <= limits.slope {
            break;
        }
        let step: Vec<f64> = match &inverse {
            Some(inverse) => (0..n).map(|i| -dot(&inverse[i * n..(i + 1) * n], &slopes)).collect(),
            // A first step of a tenth in the steepest direction.
            None => slopes.iter().map(|slope| -slope * (0.1 / steepest).min(1.0)).collect(),
        };
        let next = match dot(&step, &slopes) < 0.0 {
            true => search(&place, value, &gradient, &step, limits, function),
            false => None,
        };
        let Some((next, next_value, next_gradient)) = next else {
            // Without a decrease the approximation is bad; the identity had its turn before.
            if inverse.take().is_none() {
                break;
            }
            continue;
        };
        let moved: Vec<f64> = next.iter().zip(&place).map(|(a, b)| a - b).collect();
        let turned: Vec<f64> = next_gradient.iter().zip(&gradient).map(|(a, b)| a - b).collect();
        update(&mut inverse, &moved, &free(&turned));
        was_free = is_free;
        (place, value, gradient) = (next, next_value, next_gradient);
    }
    Some((value, place))
}

/// Halves `step` until the value falls enough. Returns the place, its value and its gradient.
fn search(
    place: &[f64],
    value: f64,
    gradient: &[f64],
    step: &[f64],
    limits: Limits,
    function: &mut Function<'_>,
) -> Option<(Vec<f64>, f64, Vec<f64>)> {
    (0..HALVINGS).find_map(|halvings| {
        let share = 0.5f64.powi(halvings as i32);
        let next: Vec<f64> =
            place.iter().zip(step).map(|(x, d)| (x + share * d).clamp(limits.low, limits.high)).collect();
        let predicted: f64 = next.iter().zip(place).zip(gradient).map(|((a, b), g)| (a - b) * g).sum();
        let (found, slopes) = function(&next)?;
        (predicted < 0.0 && found <= value + DECREASE * predicted).then_some((next, found, slopes))
    })
}

/// The update of the inverse Hessian (equation 6.17) by a move and the change of the gradient.
fn update(inverse: &mut Option<Vec<f64>>, moved: &[f64], turned: &[f64]) {
    let n = moved.len();
    let curvature = dot(moved, turned);
    if curvature.is_nan() || curvature <= 1e-12 {
        return;
    }
    let h = inverse.get_or_insert_with(|| {
        // The size of the first approximation: equation 6.20.
        let size = curvature / dot(turned, turned);
        (0..n * n).map(|at| if at / n == at % n { size } else { 0.0 }).collect()
    });
    let product: Vec<f64> = (0..n).map(|i| dot(&h[i * n..(i + 1) * n], turned)).collect();
    let rho = 1.0 / curvature;
    let both = rho * (1.0 + rho * dot(turned, &product));
    for i in 0..n {
        for j in 0..n {
            h[i * n + j] += both * moved[i] * moved[j] - rho * (product[i] * moved[j] + moved[i] * product[j]);
        }
    }
}

/// The sum of the products of two lists, in eight partial sums.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { low: -2.0, high: 2.0, steps: 200, slope: 1e-8 };

    /// Rosenbrock's valley, with its minimum at (1, 1).
    fn valley(at: &[f64]) -> Option<(f64, Vec<f64>)> {
        let (x, y) = (at[0], at[1]);
        let value = (1.0 - x).powi(2) + 100.0 * (y - x * x).powi(2);
        Some((value, vec![-2.0 * (1.0 - x) - 400.0 * x * (y - x * x), 200.0 * (y - x * x)]))
    }

    #[test]
    fn a_curved_valley_is_followed_to_its_minimum() {
        let mut evaluations = 0;
        let (value, place) = minimise(&[-1.2, 1.0], LIMITS, &mut |at| {
            evaluations += 1;
            valley(at)
        })
        .unwrap();
        assert!(value < 1e-12 && (place[0] - 1.0).abs() < 1e-5, "{value} at {place:?}");
        assert!(evaluations < 100, "{evaluations}");
    }

    /// With x at most 0.5 the minimum is (0.5, 0.25), on the edge.
    #[test]
    fn the_edge_of_the_box_stops_a_step() {
        let (value, place) = minimise(&[-1.2, 1.0], Limits { high: 0.5, ..LIMITS }, &mut valley).unwrap();
        assert!((value - 0.25).abs() < 1e-9 && place[0] == 0.5 && (place[1] - 0.25).abs() < 1e-5, "{value} {place:?}");
    }

    #[test]
    fn places_without_a_value_are_avoided() {
        let mut root = |at: &[f64]| (at[0] > 0.0).then(|| (at[0] - at[0].ln(), vec![1.0 - 1.0 / at[0]]));
        let (value, place) = minimise(&[1.9], LIMITS, &mut root).unwrap();
        assert!((value - 1.0).abs() < 1e-12 && (place[0] - 1.0).abs() < 1e-6, "{value} {place:?}");
        assert!(minimise(&[-1.0], LIMITS, &mut root).is_none());
    }

    #[test]
    fn partial_sums_have_every_product() {
        for n in [0, 1, 7, 8, 9, 40, 41] {
            let numbers: Vec<f64> = (0..n).map(f64::from).collect();
            assert_eq!(dot(&numbers, &numbers), numbers.iter().map(|x| x * x).sum::<f64>(), "{n}");
        }
    }
}
