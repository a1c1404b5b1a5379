//! Matrix products, one sum at a time in `f64`.

use crate::cpu::gemm::{Activation, MatRef, Transpose};
use crate::dtype::Element;

/// `Σ_k op(a)[i, k] op(b)[k, j]`, and the sum of the products' magnitudes, by which rounding errors
/// are bounded.
pub fn product<T: Element>(
    a: MatRef<T>,
    transpose_a: Transpose,
    b: MatRef<T>,
    transpose_b: Transpose,
    i: usize,
    j: usize,
) -> (f64, f64) {
    let k = if transpose_a == Transpose::No { a.cols() } else { a.rows() };
    (0..k).fold((0.0, 0.0), |(sum, magnitude), k| {
        let left = if transpose_a == Transpose::No { a.row(i)[k] } else { a.row(k)[i] };
        let right = if transpose_b == Transpose::No { b.row(k)[j] } else { b.row(j)[k] };
        let product = left.to_f32() as f64 * right.to_f32() as f64;
        (sum + product, magnitude + product.abs())
    })
}

/// `erf x`.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    // Σ (-1)^n x^(2n+1) / (n! (2n+1)) loses e^(x²) in cancellation; Kummer's form Σ 2^n x^(2n+1) /
    // (2n+1)!! has only positive terms: erf x = 2/√π e^(-x²) Σ.
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / (2 * n + 1) as f64;
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// The activation at `x`.
pub fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::ReluSquared => x.max(0.0).powi(2),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluExact => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
    }
}

/// The derivative of the activation at `x`; at its corner ReLU has 0, as everywhere in the field.
pub fn derivative(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => 1.0,
        Activation::Relu => f64::from(x > 0.0),
        Activation::ReluSquared => 2.0 * x.max(0.0),
        Activation::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            s * (1.0 + x * (1.0 - s))
        }
        Activation::GeluExact => {
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)) + x * density
        }
        Activation::GeluTanh => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let t = (c * (x + 0.044715 * x * x * x)).tanh();
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x)
        }
    }
}
