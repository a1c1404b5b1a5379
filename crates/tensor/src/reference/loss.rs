//! Cross-entropy and softmax of one row.

/// `log sum exp x`
pub fn lse(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

/// `softmax(x)`
pub fn softmax(x: &[f64]) -> Vec<f64> {
    let lse = lse(x);
    x.iter().map(|x| (x - lse).exp()).collect()
}

/// `(loss, gradient)` of one row; a target of `None` is ignored.
pub fn cross_entropy(x: &[f64], target: Option<usize>) -> (f64, Vec<f64>) {
    let Some(target) = target else { return (0.0, vec![0.0; x.len()]) };
    let mut gradient = softmax(x);
    gradient[target] -= 1.0;
    (lse(x) - x[target], gradient)
}
