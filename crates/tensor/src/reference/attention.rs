//! Attention by its definition, in f64, one (query, key) pair at a time: the oracle of every
//! attention kernel.
//!
//! Besides each result the sums of the absolute values of its terms are returned, for those are
//! what the bounds of rounding errors are proportional to (Higham, "Accuracy and Stability of
//! Numerical Algorithms", 3.1).

use crate::cpu::attention::AttentionSpec;

/// A result and the magnitude of what was added up for it, element by element.
#[derive(Clone, Debug, Default)]
pub struct Valued {
    /// The result.
    pub value: Vec<f64>,
    /// The sum of the absolute values of its terms.
    pub magnitude: Vec<f64>,
}

impl Valued {
    fn zeros(len: usize) -> Valued {
        Valued { value: vec![0.0; len], magnitude: vec![0.0; len] }
    }
}

/// The results of [`forward`].
#[derive(Clone, Debug)]
pub struct Forward {
    /// `[queries, heads * head_dim]`
    pub out: Valued,
    /// `[heads, queries]`, natural; minus infinity for a query that sees no key.
    pub lse: Vec<f64>,
    /// The largest `scale * sum |q| |k| + |bias|` of any pair, which bounds the rounding errors of
    /// scores.
    pub score_magnitude: f64,
}

/// The results of [`backward`], each shaped like its operand.
#[derive(Clone, Debug)]
pub struct Backward {
    /// Gradient of the queries.
    pub dq: Valued,
    /// Gradient of the keys.
    pub dk: Valued,
    /// Gradient of the values.
    pub dv: Valued,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn dot_abs(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

/// An addend of scores, by query head and the query's position less the key's.
pub type Bias<'a> = &'a dyn Fn(usize, isize) -> f64;

/// Calls `body(query, keys)` for every query row with the key rows that it sees, each with the
/// query's distance from it.
fn for_queries(spec: &AttentionSpec, cu_q: &[i32], cu_k: &[i32], mut body: impl FnMut(usize, Vec<(usize, isize)>)) {
    for (q, k) in cu_q.windows(2).zip(cu_k.windows(2)) {
        let shift = (k[1] - k[0]) - (q[1] - q[0]);
        for query in q[0]..q[1] {
            let position = query - q[0] + shift;
            let sees = |key: &i32| {
                let key = key - k[0];
                let inside = spec.window.is_none_or(|window| key as i64 > position as i64 - window as i64);
                !spec.causal || (key <= position && inside)
            };
            let seen = (k[0]..k[1]).filter(sees).map(|key| (key as usize, (position - (key - k[0])) as isize));
            body(query as usize, seen.collect());
        }
    }
}

/// Probabilities of one query over `keys`, and its log-sum-exp.
fn probabilities(
    spec: &AttentionSpec,
    q: &[f64],
    k: &[f64],
    keys: &[(usize, isize)],
    head: usize,
    bias: Bias<'_>,
) -> (Vec<f64>, f64) {
    let (d, kv_head) = (spec.head_dim, head / spec.group());
    let at = |key: usize| &k[(key * spec.kv_heads + kv_head) * d..][..d];
    let score = |(key, distance): &(usize, isize)| spec.scale as f64 * dot(q, at(*key)) + bias(head, *distance);
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    let lse = if keys.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() };
    (scores.into_iter().map(|score| (score - lse).exp()).collect(), lse)
}

/// softmax(scale Q K^T + mask) V. `q` is `[queries, heads * head_dim]`, `k` and `v`
/// `[keys, kv_heads * head_dim]`, dense.
pub fn forward(spec: &AttentionSpec, q: &[f64], k: &[f64], v: &[f64], cu_q: &[i32], cu_k: &[i32]) -> Forward {
    forward_biased(spec, q, k, v, cu_q, cu_k, &|_, _| 0.0)
}

/// [`forward`] with `bias` added to the scores.
pub fn forward_biased(
    spec: &AttentionSpec,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    cu_q: &[i32],
    cu_k: &[i32],
    bias: Bias<'_>,
) -> Forward {
    let (d, queries) = (spec.head_dim, q.len() / spec.q_cols());
    let mut result =
        Forward { out: Valued::zeros(q.len()), lse: vec![0.0; spec.heads * queries], score_magnitude: 0.0 };
    for_queries(spec, cu_q, cu_k, |query, keys| {
        for head in 0..spec.heads {
            let kv_head = head / spec.group();
            let at = (query * spec.heads + head) * d;
            let row = &q[at..at + d];
            let (p, lse) = probabilities(spec, row, k, &keys, head, bias);
            result.lse[head * queries + query] = lse;
            for (p, (key, distance)) in p.iter().zip(&keys) {
                let from = (key * spec.kv_heads + kv_head) * d;
                let magnitude =
                    bias(head, *distance).abs() + spec.scale.abs() as f64 * dot_abs(row, &k[from..from + d]);
                result.score_magnitude = result.score_magnitude.max(magnitude);
                for c in 0..d {
                    result.out.value[at + c] += p * v[from + c];
                    result.out.magnitude[at + c] += p * v[from + c].abs();
                }
            }
        }
    });
    result
}

/// Gradients of [`forward`] for the gradient `dout` of its output.
pub fn backward(
    spec: &AttentionSpec,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
    cu_q: &[i32],
    cu_k: &[i32],
) -> Backward {
    backward_biased(spec, q, k, v, dout, cu_q, cu_k, &|_, _| 0.0, |_, _, _, _| ())
}

/// [`backward`] of [`forward_biased`]. `dbias` takes for each pair the query head, the distance,
/// the gradient of the bias there and the sum of the absolute values of its terms.
pub fn backward_biased(
    spec: &AttentionSpec,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
    cu_q: &[i32],
    cu_k: &[i32],
    bias: Bias<'_>,
    mut dbias: impl FnMut(usize, isize, f64, f64),
) -> Backward {
    let d = spec.head_dim;
    let scale = spec.scale as f64;
    let out = forward_biased(spec, q, k, v, cu_q, cu_k, bias).out.value;
    let mut result = Backward { dq: Valued::zeros(q.len()), dk: Valued::zeros(k.len()), dv: Valued::zeros(v.len()) };
    for_queries(spec, cu_q, cu_k, |query, keys| {
        for head in 0..spec.heads {
            let kv_head = head / spec.group();
            let at = (query * spec.heads + head) * d;
            let (q, dout, out) = (&q[at..at + d], &dout[at..at + d], &out[at..at + d]);
            let (delta, delta_abs) = (dot(dout, out), dot_abs(dout, out));
            let (p, _) = probabilities(spec, q, k, &keys, head, bias);
            for (p, (key, distance)) in p.iter().zip(&keys) {
                let from = (key * spec.kv_heads + kv_head) * d;
                let (k, v) = (&k[from..from + d], &v[from..from + d]);
                let ds = p * (dot(dout, v) - delta);
                let ds_abs = p * (dot_abs(dout, v) + delta_abs);
                dbias(head, *distance, ds, ds_abs);
                for c in 0..d {
                    result.dv.value[from + c] += p * dout[c];
                    result.dv.magnitude[from + c] += p * dout[c].abs();
                    result.dq.value[at + c] += scale * ds * k[c];
                    result.dq.magnitude[at + c] += scale.abs() * ds_abs * k[c].abs();
                    result.dk.value[from + c] += scale * ds * q[c];
                    result.dk.magnitude[from + c] += scale.abs() * ds_abs * q[c].abs();
                }
            }
        }
    });
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oracle's own check: its gradients are the central differences of its forward.
    #[test]
    fn gradients_are_the_differences_of_forward() {
        let spec = AttentionSpec { window: Some(3), ..AttentionSpec::causal(4, 2, 3) };
        let cu = [0, 1, 1, 6];
        let value = |i: usize| ((i * 7919 + 13) % 101) as f64 / 50.0 - 1.0;
        let q: Vec<f64> = (0..6 * 12).map(value).collect();
        let k: Vec<f64> = (0..6 * 6).map(|i| value(i + 1000)).collect();
        let v: Vec<f64> = (0..6 * 6).map(|i| value(i + 2000)).collect();
        let dout: Vec<f64> = (0..6 * 12).map(|i| value(i + 3000)).collect();
        let gradients = backward(&spec, &q, &k, &v, &dout, &cu, &cu);
        let loss = |x: &[Vec<f64>; 3]| dot(&forward(&spec, &x[0], &x[1], &x[2], &cu, &cu).out.value, &dout);
        let step = 1e-5;
        for (which, gradient) in [&gradients.dq, &gradients.dk, &gradients.dv].into_iter().enumerate() {
            for i in 0..gradient.value.len() {
                let mut x = [q.clone(), k.clone(), v.clone()];
                x[which][i] += step;
                let above = loss(&x);
                x[which][i] -= 2.0 * step;
                let difference = (above - loss(&x)) / (2.0 * step);
                // Truncation is of the order of step^2, rounding of 1e-16 / step.
                assert!((difference - gradient.value[i]).abs() < 1e-8, "operand {which}, element {i}");
            }
        }
    }
}
