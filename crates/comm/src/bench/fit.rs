//! The straight line through times: latency and time per byte.

/// `t = alpha + beta S`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Line {
    /// Seconds of an empty message.
    pub alpha: f64,
    /// Seconds per byte.
    pub beta: f64,
    /// The largest `|alpha + beta S - t| / t` of the points.
    pub worst: f64,
}

/// The line that minimises the sum of squared relative errors over points of (bytes, seconds), with
/// neither term negative; `None` for fewer than two different sizes or times that are not positive.
pub fn fit(points: &[(f64, f64)]) -> Option<Line> {
    if points.iter().any(|&(_, t)| t.is_nan() || t <= 0.0) {
        return None;
    }
    // With x = 1/t and y = S/t the error is alpha x + beta y - 1: the normal equations of two
    // unknowns.
    let sum = |f: &dyn Fn(f64, f64) -> f64| points.iter().map(|&(s, t)| f(1.0 / t, s / t)).sum::<f64>();
    let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
    let (x, y) = (sum(&|x, _| x), sum(&|_, y| y));
    let determinant = xx * yy - xy * xy;
    if determinant <= 1e-12 * xx * yy {
        return None;
    }
    let (alpha, beta) = ((x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant);
    let (alpha, beta) = match (alpha < 0.0, beta < 0.0) {
        (true, _) => (0.0, y / yy),
        (_, true) => (x / xx, 0.0),
        _ => (alpha, beta),
    };
    let worst = points.iter().map(|&(s, t)| (alpha + beta * s - t).abs() / t).fold(0.0, f64::max);
    Some(Line { alpha, beta, worst })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let points: Vec<(f64, f64)> = (0..8).map(|i| 8f64.powi(i)).map(|s| (s, 3e-6 + s * 1e-10)).collect();
        let line = fit(&points).unwrap();
        assert!((line.alpha / 3e-6 - 1.0).abs() < 1e-9 && (line.beta / 1e-10 - 1.0).abs() < 1e-9 && line.worst < 1e-9);
    }

    #[test]
    fn neither_term_is_negative_and_too_little_is_no_line() {
        assert_eq!(fit(&[(1.0, 1.0), (2.0, 4.0), (3.0, 9.0)]).unwrap().alpha, 0.0);
        assert_eq!(fit(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]).unwrap().beta, 0.0);
        assert_eq!(fit(&[(1.0, 1.0)]), None);
        assert_eq!(fit(&[(5.0, 1.0), (5.0, 2.0)]), None);
        assert_eq!(fit(&[(1.0, 0.0), (2.0, 1.0)]), None);
    }
}
