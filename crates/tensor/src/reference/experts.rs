//! Routing of a mixture of experts in `f64`.

use crate::cpu::experts::{Gate, Router};

/// The scores of one token's logits.
pub fn scores(gate: Gate, logits: &[f64]) -> Vec<f64> {
    match gate {
        Gate::Softmax => {
            let sum: f64 = logits.iter().map(|l| l.exp()).sum();
            logits.iter().map(|l| l.exp() / sum).collect()
        }
        Gate::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
    }
}

/// A token's choices: its largest scores with `bias`, in falling order, the first of equals first.
pub fn choose(router: &Router, logits: &[f64], bias: &[f64]) -> Vec<usize> {
    let scores = scores(router.gate, logits);
    let mut order: Vec<usize> = (0..router.experts).collect();
    order.sort_by(|a, b| (scores[*b] + bias[*b]).total_cmp(&(scores[*a] + bias[*a])));
    order.truncate(router.top_k);
    order
}

/// The weights of the choices `chosen`.
pub fn weights(router: &Router, logits: &[f64], chosen: &[usize]) -> Vec<f64> {
    let scores = scores(router.gate, logits);
    let sum: f64 = if router.normalise { chosen.iter().map(|e| scores[*e]).sum() } else { 1.0 };
    chosen.iter().map(|e| f64::from(router.scale) * scores[*e] / sum).collect()
}

/// `E Σ_e f_e P_e`, and the mean of the squared logarithms of sums, of all tokens' logits.
pub fn balance(router: &Router, logits: &[f64], counts: &[i32]) -> (f64, f64) {
    let experts = router.experts;
    let tokens = (logits.len() / experts) as f64;
    let (mut auxiliary, mut z) = (0.0, 0.0);
    for logits in logits.chunks_exact(experts) {
        let scores = scores(router.gate, logits);
        let sum: f64 = scores.iter().sum();
        let of = |(score, count): (&f64, &i32)| score / sum / tokens * f64::from(*count) / tokens;
        auxiliary += experts as f64 * scores.iter().zip(counts).map(of).sum::<f64>();
        z += logits.iter().map(|l| l.exp()).sum::<f64>().ln().powi(2) / tokens;
    }
    (auxiliary, z)
}
