//! Products on the host: three loops, with sums in f32.

use super::{bytes, bytes_mut};
use crate::driver::{Activation, Operands, Precision, Product, Region};
use crate::fp8::Fp8;
use crate::kernels::Float;
use half::{bf16, f16};

/// Computes what a library would.
pub fn run(form: &Product, operands: &Operands) {
    let Product { m, n, k, batch, .. } = *form;
    let (mut a, mut b) = match form.fp8 {
        None => (read(&operands.a, form.operands), read(&operands.b, form.operands)),
        Some([a, b]) => (decode(&operands.a, a), decode(&operands.b, b)),
    };
    let scale =
        operands.scale * form.fp8.map_or(1.0, |_| operands.scales.iter().map(|at| read(at, Float::F32)[0]).product());
    if form.operands == Float::F32 && form.precision == Precision::Tf32 {
        a.iter_mut().chain(&mut b).for_each(|x| *x = tf32(*x));
    }
    let bias = if form.bias { read(&operands.bias, form.result) } else { vec![0.0; n] };
    let c = if form.adds { read(&operands.c, form.result) } else { vec![0.0; batch * m * n] };
    let mut arguments = vec![0.0; batch * m * n];
    let mut results = vec![0.0; batch * m * n];
    for at in 0..batch * m * n {
        let (matrix, row, column) = (at / (m * n), at / n % m, at % n);
        let (a, b) = (&a[matrix * m * k..][..m * k], &b[matrix * k * n..][..k * n]);
        let mut sum = 0.0f32;
        for i in 0..k {
            let x = if form.a_transposed { a[i * m + row] } else { a[row * k + i] };
            let y = if form.b_transposed { b[column * k + i] } else { b[i * n + column] };
            sum += x * y;
        }
        arguments[at] = scale * sum + bias[column];
        results[at] = activate(form.activation, arguments[at]) + operands.adding * c[at];
    }
    if form.keeps_argument {
        write(&operands.argument, form.result, &arguments);
    }
    write(&operands.d, form.result, &results);
}

/// To 10 bits after the first, halves away from zero.
fn tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & !0x1fff) } else { x }
}

fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::Gelu => {
            let inner = std::f32::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

fn decode(region: &Region, format: Fp8) -> Vec<f32> {
    bytes(region).iter().map(|code| format.decode(*code)).collect()
}

fn read(region: &Region, float: Float) -> Vec<f32> {
    let bytes = bytes(region);
    match float {
        Float::F32 => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Float::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_ne_bytes([b[0], b[1]]).to_f32()).collect(),
        Float::F16 => bytes.chunks_exact(2).map(|b| f16::from_ne_bytes([b[0], b[1]]).to_f32()).collect(),
    }
}

fn write(region: &Region, float: Float, values: &[f32]) {
    let bytes = bytes_mut(region);
    for (at, value) in values.iter().enumerate() {
        match float {
            Float::F32 => bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_ne_bytes()),
            Float::Bf16 => bytes[2 * at..2 * at + 2].copy_from_slice(&bf16::from_f32(*value).to_ne_bytes()),
            Float::F16 => bytes[2 * at..2 * at + 2].copy_from_slice(&f16::from_f32(*value).to_ne_bytes()),
        }
    }
}
