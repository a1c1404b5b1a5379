//! The matrix products of language models: seconds and percent of the measured peak.
//!
//! Every case is checked against the scalar reference on sampled elements before it is timed, so no
//! figure belongs to a wrong result.

use super::array::Array;
use crate::cpu::Cpu;
use crate::cpu::gemm::{
    Accumulate, Epilogue, GradientEpilogue, MatMut, MatRef, Transpose, forward, forward_int8, input_gradient,
    input_gradient_int8, weight_gradient,
};
use crate::cpu::int8::{Codes, CodesMut, encode, encode_transposed};
use crate::cpu::peak::Peaks;
use crate::dtype::{DType, Element, bf16, f16};
use crate::reference::matmul as reference;
use std::fmt;
use std::time::Instant;
use trainyard_base::median;

/// A linear layer on a number of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layer {
    /// Model and layer.
    pub name: &'static str,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
}

/// The linear layers of GPT-2 124M (vocabulary padded to 50,304) and of Llama 3.2 1B (gate and up
/// fused, as are query, key and value of 32 and 8 heads).
pub const LAYERS: [Layer; 9] = [
    Layer { name: "gpt2 qkv", inputs: 768, outputs: 2304 },
    Layer { name: "gpt2 out", inputs: 768, outputs: 768 },
    Layer { name: "gpt2 up", inputs: 768, outputs: 3072 },
    Layer { name: "gpt2 down", inputs: 3072, outputs: 768 },
    Layer { name: "gpt2 head", inputs: 768, outputs: 50304 },
    Layer { name: "llama qkv", inputs: 2048, outputs: 3072 },
    Layer { name: "llama out", inputs: 2048, outputs: 2048 },
    Layer { name: "llama gate-up", inputs: 2048, outputs: 16384 },
    Layer { name: "llama down", inputs: 8192, outputs: 2048 },
];

/// The three products of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// `y = x wᵀ`
    Forward,
    /// `dx = dy w`
    InputGradient,
    /// `dw = dyᵀ x`, in `f32`
    WeightGradient,
}

impl Form {
    /// In the order of a training step.
    pub const ALL: [Form; 3] = [Form::Forward, Form::InputGradient, Form::WeightGradient];

    /// The name used in output.
    pub const fn name(self) -> &'static str {
        match self {
            Form::Forward => "forward",
            Form::InputGradient => "input-gradient",
            Form::WeightGradient => "weight-gradient",
        }
    }
}

/// A measured product.
#[derive(Clone, Debug)]
pub struct Timing {
    /// The layer.
    pub layer: Layer,
    /// Rows.
    pub tokens: usize,
    /// The form of the product.
    pub form: Form,
    /// Type of the operands; `U8` are codes of eight bits.
    pub dtype: DType,
    /// Median seconds of a product.
    pub seconds: f64,
    /// 10^9 floating-point operations a second.
    pub gflops: f64,
    /// Percent of the peak of this type, sampled in turn with the product: the ratio of the two
    /// medians.
    pub percent_of_peak: f64,
}

/// A product that differs from the reference by more than rounding.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{layer} {form} in {dtype}: element {row}, {col} is {found}, the reference says {wanted}; a kernel is wrong, please report it with your CPU's name"
)]
pub struct WrongResult {
    layer: &'static str,
    form: &'static str,
    dtype: DType,
    row: usize,
    col: usize,
    found: f64,
    wanted: f64,
}

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<14} {:>5} x {:>5} -> {:>5}  {:<15} {:<4} {:>9.3} ms {:>8.1} GFLOP/s {:>5.1} %",
            self.layer.name,
            self.tokens,
            self.layer.inputs,
            self.layer.outputs,
            self.form.name(),
            self.type_name(),
            self.seconds * 1e3,
            self.gflops,
            self.percent_of_peak
        )
    }
}

impl Timing {
    /// The name of the operands' type: a dtype, or `int8`.
    pub fn type_name(&self) -> &'static str {
        if self.dtype == DType::U8 { "int8" } else { self.dtype.name() }
    }
}

/// Times the products of codes of a layer in bf16, forward and input gradient, from uncoded
/// operands; otherwise as [`time_layer`].
pub fn time_int8(
    cpu: &Cpu,
    peaks: &Peaks,
    layer: Layer,
    tokens: usize,
    seconds: f64,
) -> Result<Vec<Timing>, WrongResult> {
    let (m, k, n) = (tokens, layer.inputs, layer.outputs);
    let random = &mut random::<bf16>(1);
    let (x, w, dy) = (random(m * k), random(n * k), random(m * n));
    let (mut y, mut dx) = (Array::<bf16>::zeros(m * n), Array::<bf16>::zeros(m * k));
    let (mut left, mut right) = (Coded::new(m, k.max(n)), Coded::new(n.max(k), n.max(k)));
    let mut timings = Vec::new();
    for form in [Form::Forward, Form::InputGradient] {
        let mut once = || match form {
            Form::Forward => {
                encode(cpu, &x, m, k, left.rows(m, k));
                encode(cpu, &w, n, k, right.rows(n, k));
                let (left, right) = (left.codes(m, k), right.codes(n, k));
                forward_int8(cpu, left, right, Epilogue::default(), MatMut::new(&mut y, m, n));
            }
            _ => {
                encode(cpu, &dy, m, n, left.rows(m, n));
                encode_transposed(cpu, &w, n, k, right.rows(k, n));
                let (left, right) = (left.codes(m, n), right.codes(k, n));
                input_gradient_int8(cpu, left, right, GradientEpilogue::default(), MatMut::new(&mut dx, m, k));
            }
        };
        let [seconds, peak] = time_in_turn(&mut once, || peaks.sample(cpu, DType::U8), seconds);
        let (result, depth): (&[bf16], usize) = if form == Form::Forward { (&y, k) } else { (&dx, n) };
        let cols = result.len() / m;
        for at in sampled(result.len()) {
            let (row, col) = (at / cols, at % cols);
            let (left, right) = (left.codes(m, depth), right.codes(cols, depth));
            let pairs = left.codes[row * depth..].iter().zip(&right.codes[col * depth..]).take(depth);
            let sum: i64 = pairs.map(|(a, b)| i64::from(*a) * i64::from(*b)).sum();
            let scale = f64::from(left.scales[row]) * f64::from(right.scales[col]);
            let (found, wanted) = (f64::from(result[at].to_f32()), sum as f64 * scale);
            // Where codes are widened to f32, their sums are exact up to 2^24 only.
            let bound = depth as f64 * (127.0 * 127.0) * scale * depth as f64 * 2f64.powi(-24) + wanted.abs() / 250.0;
            if found.is_nan() || (found - wanted).abs() > bound {
                let (layer, form, dtype) = (layer.name, form.name(), DType::U8);
                return Err(WrongResult { layer, form, dtype, row, col, found, wanted });
            }
        }
        timings.push(Timing::new(layer, tokens, form, DType::U8, seconds, peak));
    }
    Ok(timings)
}

/// Room for a matrix in codes.
struct Coded {
    codes: Array<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl Coded {
    fn new(rows: usize, cols: usize) -> Coded {
        Coded { codes: Array::zeros(rows * cols), scales: vec![0.0; rows], sums: vec![0; rows] }
    }

    fn rows(&mut self, rows: usize, cols: usize) -> CodesMut<'_> {
        let (scales, sums) = (&mut self.scales[..rows], &mut self.sums[..rows]);
        CodesMut { codes: &mut self.codes[..rows * cols], scales, sums }
    }

    fn codes(&self, rows: usize, cols: usize) -> Codes<'_> {
        Codes { codes: &self.codes[..rows * cols], scales: &self.scales[..rows], sums: &self.sums[..rows] }
    }
}

/// Arrays of random numbers in `[-1, 1)`.
fn random<T: Element>(mut state: u64) -> impl FnMut(usize) -> Array<T> {
    move |len| {
        Array::from_fn(len, || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            T::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
        })
    }
}

/// The median seconds of `once` and the median of `peak`, sampled in turn, at least three times and
/// for about `seconds`. One call more goes before.
fn time_in_turn(mut once: impl FnMut(), peak: impl Fn() -> f64, seconds: f64) -> [f64; 2] {
    once();
    let (start, mut times, mut samples) = (Instant::now(), Vec::new(), Vec::new());
    while times.len() < 3 || start.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        once();
        times.push(start.elapsed().as_secs_f64());
        samples.push(peak());
    }
    [times, samples].map(|values| median(values).expect("there are rounds"))
}

impl Timing {
    fn new(layer: Layer, tokens: usize, form: Form, dtype: DType, seconds: f64, peak: f64) -> Timing {
        let flops = 2.0 * tokens as f64 * layer.inputs as f64 * layer.outputs as f64 / seconds;
        Timing { layer, tokens, form, dtype, seconds, gflops: flops / 1e9, percent_of_peak: 100.0 * flops / peak }
    }
}

/// Times the three products of a layer, each at least three times and for about `seconds`, after
/// checking them.
pub fn time_layer(
    cpu: &Cpu,
    peaks: &Peaks,
    dtype: DType,
    layer: Layer,
    tokens: usize,
    seconds: f64,
) -> Result<Vec<Timing>, WrongResult> {
    match dtype {
        DType::BF16 => time::<bf16>(cpu, peaks, layer, tokens, seconds),
        DType::F16 => time::<f16>(cpu, peaks, layer, tokens, seconds),
        _ => time::<f32>(cpu, peaks, layer, tokens, seconds),
    }
}

fn time<T: Element>(
    cpu: &Cpu,
    peaks: &Peaks,
    layer: Layer,
    tokens: usize,
    seconds: f64,
) -> Result<Vec<Timing>, WrongResult> {
    let (m, k, n) = (tokens, layer.inputs, layer.outputs);
    let random = &mut random::<T>(1);
    let (x, w, dy) = (random(m * k), random(n * k), random(m * n));
    let (x, w, dy) = (MatRef::new(&x, m, k), MatRef::new(&w, n, k), MatRef::new(&dy, m, n));
    let (mut y, mut dx, mut dw) = (Array::<T>::zeros(m * n), Array::<T>::zeros(m * k), Array::<f32>::zeros(n * k));

    let mut timings = Vec::new();
    for form in Form::ALL {
        let mut once = || match form {
            Form::Forward => forward(cpu, x, w.into(), Epilogue::default(), MatMut::new(&mut y, m, n)),
            Form::InputGradient => {
                input_gradient(cpu, dy, w.into(), GradientEpilogue::default(), MatMut::new(&mut dx, m, k))
            }
            Form::WeightGradient => weight_gradient(cpu, dy, x, &mut dw, Accumulate::Overwrite, None),
        };
        let [seconds, peak] = time_in_turn(&mut once, || peaks.sample(cpu, T::DTYPE), seconds);
        match form {
            Form::Forward => check(layer, form, x, Transpose::No, w, Transpose::Yes, &y)?,
            Form::InputGradient => check(layer, form, dy, Transpose::No, w, Transpose::No, &dx)?,
            Form::WeightGradient => check(layer, form, dy, Transpose::Yes, x, Transpose::No, &dw)?,
        }
        timings.push(Timing::new(layer, tokens, form, T::DTYPE, seconds, peak));
    }
    Ok(timings)
}

/// 64 places in a result of `len` elements, the last among them.
fn sampled(len: usize) -> impl Iterator<Item = usize> {
    // The multiplier is odd, so places spread over all rows and columns.
    let spread = move |sample: usize| sample.wrapping_mul(0x9e37_79b9_7f4a_7c15) % len;
    (0..63).map(spread).chain([len - 1])
}

/// Compares 64 elements spread over the result.
fn check<T: Element, O: Element>(
    layer: Layer,
    form: Form,
    a: MatRef<T>,
    transpose_a: Transpose,
    b: MatRef<T>,
    transpose_b: Transpose,
    result: &[O],
) -> Result<(), WrongResult> {
    let n = if transpose_b == Transpose::No { b.cols() } else { b.rows() };
    let k = if transpose_b == Transpose::No { b.rows() } else { b.cols() };
    let roundoff: f64 = match O::DTYPE {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    };
    for at in sampled(result.len()) {
        let (row, col) = (at / n, at % n);
        let (wanted, magnitude) = reference::product(a, transpose_a, b, transpose_b, row, col);
        let found = result[at].to_f32() as f64;
        let bound = (k + 2) as f64 * 2f64.powi(-24) * magnitude + 1.01 * roundoff * wanted.abs() + 1e-30;
        if found.is_nan() || (found - wanted).abs() > bound {
            let (layer, form, dtype) = (layer.name, form.name(), T::DTYPE);
            return Err(WrongResult { layer, form, dtype, row, col, found, wanted });
        }
    }
    Ok(())
}

/// The geometric mean of the percentages.
pub fn geometric_mean(timings: &[Timing]) -> f64 {
    (timings.iter().map(|timing| timing.percent_of_peak.ln()).sum::<f64>() / timings.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::super::UNBEATEN;
    use super::*;

    #[test]
    fn a_small_layer_passes_its_check_in_every_dtype() {
        let cpu = Cpu::new(crate::cpu::Isa::detect(), 2);
        let layer = Layer { name: "small", inputs: 40, outputs: 56 };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let timings = time_layer(&cpu, &UNBEATEN, dtype, layer, 24, 0.0).unwrap();
            assert_eq!(timings.len(), 3);
            assert!(timings.iter().all(|timing| timing.seconds > 0.0));
        }
    }

    #[test]
    fn a_small_layer_in_codes_passes_its_check() {
        let layer = Layer { name: "small", inputs: 40, outputs: 56 };
        for isa in crate::cpu::Isa::available() {
            let timings = time_int8(&Cpu::new(isa, 2), &UNBEATEN, layer, 24, 0.0).unwrap();
            assert_eq!(timings.iter().map(Timing::type_name).collect::<Vec<_>>(), ["int8"; 2]);
        }
    }

    #[test]
    fn a_wrong_element_is_found() {
        let layer = Layer { name: "small", inputs: 2, outputs: 2 };
        let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32, 0.0, 0.0, 1.0]);
        let (a, b) = (MatRef::new(&a, 2, 2), MatRef::new(&b, 2, 2));
        assert!(
            check(layer, Form::InputGradient, a, Transpose::No, b, Transpose::No, &[1.0f32, 2.0, 3.0, 4.0]).is_ok()
        );
        let wrong =
            check(layer, Form::InputGradient, a, Transpose::No, b, Transpose::No, &[1.0f32, 2.0, 3.0, f32::NAN]);
        assert!(wrong.unwrap_err().to_string().contains("element 1, 1"));
    }
}
