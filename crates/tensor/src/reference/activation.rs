//! Activation functions and their derivatives, one number at a time.

use crate::cpu::activation::Activation;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI, PI};

/// `erf x`, to 1e-15 or so: its Taylor series up to `|x| = 3`, beyond that the continued fraction
/// of `erfc`.
pub fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a < 3.0 {
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 1.0;
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
        }
        return sum * 2.0 / PI.sqrt();
    }
    (1.0 - erfc_tail(a)).copysign(x)
}

/// `erfc x = 1 - erf x`, without cancellation for large `x`.
pub fn erfc(x: f64) -> f64 {
    if x < 3.0 { 1.0 - erf(x) } else { erfc_tail(x) }
}

/// `erfc x = e^(-x^2) / sqrt(pi) * 1 / (x + (1/2) / (x + (2/2) / (x + (3/2) / ...)))` for `x >= 3`.
fn erfc_tail(x: f64) -> f64 {
    let fraction = (1..=80).rev().fold(x, |f, k| x + k as f64 / 2.0 / f);
    (-x * x).exp() / PI.sqrt() / fraction
}

/// `f(x)`
pub fn value(f: Activation, x: f64) -> f64 {
    match f {
        Activation::GeluExact => 0.5 * x * erfc(-x * FRAC_1_SQRT_2),
        Activation::GeluTanh => 0.5 * x * (1.0 + (FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)).tanh()),
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::ReluSquared => x.max(0.0).powi(2),
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

/// `f'(x)`
pub fn slope(f: Activation, x: f64) -> f64 {
    match f {
        Activation::GeluExact => 0.5 * erfc(-x * FRAC_1_SQRT_2) + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt(),
        Activation::GeluTanh => {
            let tanh = (FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)).tanh();
            let inner = FRAC_2_PI.sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
            0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
        }
        Activation::None => 1.0,
        Activation::Relu => f64::from(x > 0.0),
        Activation::ReluSquared => 2.0 * x.max(0.0),
        Activation::Silu => {
            let g = 1.0 / (1.0 + (-x).exp());
            g * (1.0 + x * (1.0 - g))
        }
    }
}
