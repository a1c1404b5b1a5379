//! Optimizer steps on `f64`, one parameter at a time where they allow it.

use crate::cpu::optim::{Adafactor, AdamW, Decay, Lion, Sgd, StepSize};

/// AdamW; updates weights and moments.
pub fn adamw(h: AdamW, step: u64, p: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64]) {
    let (b1, b2) = (f64::from(h.beta1), f64::from(h.beta2));
    let (lr, eps, decay) = (f64::from(h.lr), f64::from(h.eps), f64::from(h.weight_decay));
    let taken = h.variance_steps.unwrap_or(step).min(step);
    for i in 0..p.len() {
        m[i] = b1 * m[i] + (1.0 - b1) * g[i];
        if taken == step {
            v[i] = b2 * v[i] + (1.0 - b2) * g[i] * g[i];
        }
        let (m, v) = (m[i] / (1.0 - b1.powf(step as f64)), v[i] / (1.0 - b2.powf(taken as f64)));
        p[i] = p[i] * (1.0 - lr * decay) - lr * m / (v.sqrt() + eps);
    }
}

/// The eight-bit codes of a block of a moment, decoded: each element becomes the nearest number
/// among the largest magnitude of the block times `2^e (1 + f / 8)`. The first moment (`signed`)
/// has 127 magnitudes and 0. The second has 255, and only 0 becomes 0.
pub fn moment8(signed: bool, block: &[f64]) -> Vec<f64> {
    let scale = block.iter().fold(2.0f64.powi(-90), |most, x| most.max(x.abs()));
    let magnitude = |below: i32| 2.0f64.powi(-(below + 7).div_euclid(8)) * (1.0 + f64::from((8 - below % 8) % 8) / 8.0);
    let mut table: Vec<f64> = (0..if signed { 127 } else { 255 }).map(magnitude).collect();
    table.extend(signed.then_some(0.0));
    let nearest = |x: f64| {
        let apart = |number: &f64| (x.abs() - number * scale).abs();
        let found = table.iter().min_by(|a, b| apart(a).total_cmp(&apart(b))).expect("a table has numbers");
        if x == 0.0 { 0.0 } else { found * scale * x.signum() }
    };
    block.iter().map(|x| nearest(*x)).collect()
}

/// LAMB of one tensor; updates weights and moments.
pub fn lamb(h: AdamW, step: u64, p: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64]) {
    let before = p.to_vec();
    // AdamW from weights 0 without decay gives the direction.
    let mut direction = vec![0.0; p.len()];
    adamw(AdamW { lr: 1.0, weight_decay: 0.0, ..h }, step, &mut direction, g, m, v);
    let update: Vec<f64> = direction.iter().zip(&before).map(|(d, p)| -d + f64::from(h.weight_decay) * p).collect();
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let (weights, length) = (norm(&before), norm(&update));
    let ratio = if weights > 0.0 && length > 0.0 { weights / length } else { 1.0 };
    for (p, update) in p.iter_mut().zip(update) {
        *p -= f64::from(h.lr) * ratio * update;
    }
}

/// SGD with momentum.
pub fn sgd(h: Sgd, p: &mut [f64], g: &[f64], m: &mut [f64]) {
    let (lr, mu, decay) = (f64::from(h.lr), f64::from(h.momentum), f64::from(h.weight_decay));
    for i in 0..p.len() {
        let mut g = g[i];
        match h.decay {
            Decay::Coupled => g += decay * p[i],
            Decay::Decoupled => p[i] *= 1.0 - lr * decay,
        }
        m[i] = mu * m[i] + g;
        p[i] -= lr * if h.nesterov { g + mu * m[i] } else { m[i] };
    }
}

/// Lion.
pub fn lion(h: Lion, p: &mut [f64], g: &[f64], m: &mut [f64]) {
    let (lr, b1, b2, decay) = (f64::from(h.lr), f64::from(h.beta1), f64::from(h.beta2), f64::from(h.weight_decay));
    for i in 0..p.len() {
        let direction = b1 * m[i] + (1.0 - b1) * g[i];
        let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
        p[i] = p[i] * (1.0 - lr * decay) - lr * sign;
        m[i] = b2 * m[i] + (1.0 - b2) * g[i];
    }
}

/// Moves the average `a` of weights a `share` of the way to `w`.
pub fn average(share: f32, w: &[f64], a: &mut [f64]) {
    for i in 0..w.len() {
        a[i] = (1.0 - f64::from(share)) * a[i] + f64::from(share) * w[i];
    }
}

/// Adds the gradient of `weight / 2 sum f (w - a)^2` to the gradient `g`. Returns the sum.
pub fn consolidate(weight: f32, w: &[f64], f: &[f64], a: &[f64], g: &mut [f64]) -> f64 {
    for i in 0..g.len() {
        g[i] += f64::from(weight) * f[i] * (w[i] - a[i]);
    }
    (0..g.len()).map(|i| f[i] * (w[i] - a[i]).powi(2)).sum()
}

fn mean_square(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64
}

fn adafactor_apply(h: Adafactor, step: u64, p: &mut [f64], update: &[f64]) {
    let lr = f64::from(h.lr);
    let clip = (mean_square(update).sqrt() / f64::from(h.clip_threshold)).max(1.0);
    let alpha = match h.step_size {
        StepSize::Absolute => lr,
        StepSize::Relative => mean_square(p).sqrt().max(f64::from(h.eps2)) * lr.min(1.0 / (step as f64).sqrt()),
    };
    for (p, u) in p.iter_mut().zip(update) {
        *p = *p * (1.0 - lr * f64::from(h.weight_decay)) - alpha * u / clip;
    }
}

/// Adafactor for a matrix `[r.len(), c.len()]`.
pub fn adafactor_matrix(h: Adafactor, step: u64, p: &mut [f64], g: &[f64], r: &mut [f64], c: &mut [f64]) {
    let (rows, columns) = (r.len(), c.len());
    let beta2 = 1.0 - (step as f64).powf(f64::from(h.beta2_decay));
    let square = |i: usize, j: usize| g[i * columns + j].powi(2) + f64::from(h.eps1);
    for i in 0..rows {
        let mean = (0..columns).map(|j| square(i, j)).sum::<f64>() / columns as f64;
        r[i] = beta2 * r[i] + (1.0 - beta2) * mean;
    }
    for j in 0..columns {
        let mean = (0..rows).map(|i| square(i, j)).sum::<f64>() / rows as f64;
        c[j] = beta2 * c[j] + (1.0 - beta2) * mean;
    }
    let mean_r = r.iter().sum::<f64>() / rows as f64;
    let update: Vec<f64> =
        (0..rows * columns).map(|k| g[k] / (r[k / columns] * c[k % columns] / mean_r).sqrt()).collect();
    adafactor_apply(h, step, p, &update);
}

/// Adafactor for what is no matrix.
pub fn adafactor_vector(h: Adafactor, step: u64, p: &mut [f64], g: &[f64], v: &mut [f64]) {
    let beta2 = 1.0 - (step as f64).powf(f64::from(h.beta2_decay));
    for (v, g) in v.iter_mut().zip(g) {
        *v = beta2 * *v + (1.0 - beta2) * (g * g + f64::from(h.eps1));
    }
    let update: Vec<f64> = g.iter().zip(&*v).map(|(g, v)| g / v.sqrt()).collect();
    adafactor_apply(h, step, p, &update);
}
