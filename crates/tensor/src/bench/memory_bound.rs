//! The kernels that stream: seconds, bandwidth, and percent of what copying the same number of
//! bytes takes.
//!
//! Bytes are those that an ideal kernel moves: every operand in once, every result out once. A copy
//! of as many bytes, read plus written, is timed in turn with the kernel, so that both see the same
//! machine and the same level of the memory hierarchy. Figures above 100 % are possible: a kernel
//! that reads more than it writes, or that updates in place, beats a copy. Every result is checked
//! against the scalar reference on sampled rows before it is timed.
//!
//! Not measured here: kernels whose cost is arithmetic or indices (top-k, random fills).

use crate::cpu::Cpu;
use crate::cpu::activation::{Activation, activation, activation_backward, glu, glu_backward};
use crate::cpu::cast::cast;
use crate::cpu::dropout::{DropRate, dropout_add};
use crate::cpu::elementwise::{Binary, Operand, binary};
use crate::cpu::embedding::{embedding, embedding_backward};
use crate::cpu::loss::{RowLosses, cross_entropy_in_place};
use crate::cpu::norm::{
    AddTo, HeadColumns, add_rms_norm, backward_workspace, layer_norm, layer_norm_backward, rms_norm, rms_norm_backward,
};
use crate::cpu::optim::{AdamW, adamw};
use crate::cpu::philox::RandomKey;
use crate::cpu::reduce::sum_of_squares;
use crate::cpu::rope::{RopeScaling, RopeTable, Rotation, rope};
use crate::cpu::threads::Shares;
use crate::dtype::{DType, Element};
use crate::reference;
use std::fmt;
use std::time::Instant;
use trainyard_base::median;

/// The sizes that the kernels are timed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of activations.
    pub tokens: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Width of the feed-forward layer.
    pub inner: usize,
    /// Columns of one head.
    pub head_dim: usize,
    /// Classes of the cross-entropy, and rows of the embedding.
    pub vocab: usize,
    /// Rows of logits.
    pub logit_rows: usize,
    /// Parameters of the optimizer step.
    pub parameters: usize,
}

impl Sizes {
    /// GPT-2 124M on 2,048 tokens, its logits in chunks of 1,024.
    pub const GPT2: Sizes = Sizes {
        tokens: 2048,
        dim: 768,
        inner: 3072,
        head_dim: 64,
        vocab: 50_257,
        logit_rows: 1024,
        parameters: 124_439_808,
    };
    /// The character-level Shakespeare recipe: 12 sequences of 64.
    pub const CHARACTERS: Sizes =
        Sizes { tokens: 768, dim: 128, inner: 512, head_dim: 32, vocab: 65, logit_rows: 768, parameters: 804_096 };
}

/// A measured kernel.
#[derive(Clone, Debug)]
pub struct Timing {
    /// The kernel.
    pub kernel: &'static str,
    /// The dtype of activations, or of the weights' compute copy.
    pub dtype: DType,
    /// Bytes that it has to move.
    pub bytes: usize,
    /// Median seconds of a call.
    pub seconds: f64,
    /// 10^9 bytes a second.
    pub gb_per_s: f64,
    /// Percent of the bandwidth of a copy of the same number of bytes.
    pub percent_of_copy: f64,
}

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<24} {:<4} {:>9.3} MB {:>10.1} us {:>7.1} GB/s {:>6.1} % of copy",
            self.kernel,
            self.dtype.name(),
            self.bytes as f64 / 1e6,
            self.seconds * 1e6,
            self.gb_per_s,
            self.percent_of_copy
        )
    }
}

/// A kernel that differs from the reference by more than rounding.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{kernel} in {dtype}: element {element} is {found}, the reference says {wanted}; a kernel is wrong, please report it with your CPU's name"
)]
pub struct WrongResult {
    kernel: &'static str,
    dtype: DType,
    element: usize,
    found: f64,
    wanted: f64,
}

/// Times every kernel, each at least three times and for about `seconds`, after checking it.
pub fn time_kernels<T: Element>(cpu: &Cpu, sizes: Sizes, seconds: f64) -> Result<Vec<Timing>, WrongResult> {
    let mut bench = Bench { cpu, seconds, dtype: T::DTYPE, timings: Vec::new() };
    norms::<T>(&mut bench, sizes)?;
    pointwise::<T>(&mut bench, sizes)?;
    indexed::<T>(&mut bench, sizes)?;
    parameters::<T>(&mut bench, sizes)?;
    Ok(bench.timings)
}

struct Bench<'a> {
    cpu: &'a Cpu,
    seconds: f64,
    dtype: DType,
    timings: Vec<Timing>,
}

/// Bytes above which a longer copy is no slower per byte.
const COPY_BYTES_MAX: usize = 1 << 30;

impl Bench<'_> {
    /// Compares what a kernel made with what the reference says, to a few roundings at size one.
    fn check<U: Element>(&self, kernel: &'static str, found: &[U], wanted: &[f64]) -> Result<(), WrongResult> {
        let roundoff: f64 = match U::DTYPE {
            DType::BF16 => 2f64.powi(-8),
            DType::F16 => 2f64.powi(-11),
            _ => 2f64.powi(-24),
        };
        for (element, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let (found, wanted) = (f64::from(found.to_f32()), *wanted);
            if found.is_nan() || (found - wanted).abs() > 1.01 * roundoff * wanted.abs() + 2e-5 {
                return Err(WrongResult { kernel, dtype: self.dtype, element, found, wanted });
            }
        }
        Ok(())
    }

    fn time(&mut self, kernel: &'static str, bytes: usize, mut run: impl FnMut(&Cpu)) {
        let half = bytes.min(COPY_BYTES_MAX) / 2;
        let from = vec![1u8; half];
        let mut to = vec![0u8; half];
        let (mut own, mut copies) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while own.len() < 3 || start.elapsed().as_secs_f64() < self.seconds {
            let start = Instant::now();
            run(self.cpu);
            own.push(start.elapsed().as_secs_f64());
            let start = Instant::now();
            copy(self.cpu, &from, &mut to);
            copies.push(start.elapsed().as_secs_f64());
        }
        let (seconds, copy) = (median(own).expect("there are rounds"), median(copies).expect("there are rounds"));
        let rate = bytes as f64 / seconds;
        let copy_rate = (2 * half) as f64 / copy;
        let percent_of_copy = 100.0 * rate / copy_rate;
        let dtype = self.dtype;
        self.timings.push(Timing { kernel, dtype, bytes, seconds, gb_per_s: rate / 1e9, percent_of_copy });
    }
}

fn copy(cpu: &Cpu, from: &[u8], to: &mut [u8]) {
    let len = to.len();
    let to = Shares::new(to);
    cpu.threads.for_ranges(len, (len / 16).clamp(32 << 10, 1 << 20), |range| {
        // SAFETY: the ranges of a region do not overlap.
        unsafe { to.part(range.clone()) }.copy_from_slice(&from[range]);
    });
}

/// Numbers in `[-1, 1)`.
fn values<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// The first, a middle and the last row.
fn sample(rows: usize) -> [usize; 3] {
    [0, rows / 2, rows - 1]
}

fn norms<T: Element>(bench: &mut Bench<'_>, Sizes { tokens, dim, .. }: Sizes) -> Result<(), WrongResult> {
    const EPS: f32 = 1e-5;
    let cpu = bench.cpu;
    let n = tokens * dim;
    let (x, dy, residual) = (values::<T>(1, n), values::<T>(2, n), values::<T>(3, n));
    let (weight, bias) = (values::<T>(4, dim), values::<T>(5, dim));
    let (weights, biases) = (wide(&weight), wide(&bias));
    let (mut y, mut total, mut dx) = (vec![T::default(); n], vec![T::default(); n], vec![T::default(); n]);
    let (mut mean, mut inv) = (vec![0.0; tokens], vec![0.0; tokens]);
    let (mut dw, mut db, mut space) = (vec![0.0; dim], vec![0.0; dim], vec![0.0; 2 * backward_workspace(tokens, dim)]);
    let row = |r: usize| r * dim..(r + 1) * dim;
    let each = size_of::<T>();

    layer_norm(cpu, &x, &weight, &bias, EPS, &mut y, &mut mean, &mut inv);
    for r in sample(tokens) {
        let (want, _, _) = reference::norm::layer_norm(&wide(&x[row(r)]), &weights, &biases, f64::from(EPS));
        bench.check("layer norm", &y[row(r)], &want)?;
    }
    bench.time("layer norm", 2 * n * each, |cpu| layer_norm(cpu, &x, &weight, &bias, EPS, &mut y, &mut mean, &mut inv));
    let mut backward = |cpu: &Cpu, dx: &mut [T]| {
        let base = AddTo::Gradient(&residual[..]);
        layer_norm_backward(cpu, &dy, &x, &weight, &mean, &inv, base, dx, Some(&mut dw), Some(&mut db), &mut space);
    };
    backward(cpu, &mut dx);
    for r in sample(tokens) {
        let (mut want, ..) =
            reference::norm::layer_norm_backward(&wide(&dy[row(r)]), &wide(&x[row(r)]), &weights, f64::from(EPS));
        want.iter_mut().zip(wide(&residual[row(r)])).for_each(|(dx, r)| *dx += r);
        bench.check("layer norm backward", &dx[row(r)], &want)?;
    }
    bench.time("layer norm backward", 4 * n * each, |cpu| backward(cpu, &mut dx));

    add_rms_norm(cpu, &x, &residual, &weight, EPS, &mut total, &mut y, &mut inv);
    for r in sample(tokens) {
        let (want, _) = reference::norm::rms_norm(&wide(&total[row(r)]), &weights, f64::from(EPS));
        bench.check("add + RMS norm", &y[row(r)], &want)?;
    }
    bench.time("add + RMS norm", 4 * n * each, |cpu| {
        add_rms_norm(cpu, &x, &residual, &weight, EPS, &mut total, &mut y, &mut inv);
    });
    rms_norm(cpu, &x, &weight, EPS, &mut y, &mut inv);
    let mut backward = |cpu: &Cpu, dx: &mut [T]| {
        rms_norm_backward(cpu, &dy, &x, &weight, &inv, AddTo::Nothing, dx, Some(&mut dw), &mut space);
    };
    backward(cpu, &mut dx);
    for r in sample(tokens) {
        let (want, _) =
            reference::norm::rms_norm_backward(&wide(&dy[row(r)]), &wide(&x[row(r)]), &weights, f64::from(EPS));
        bench.check("RMS norm backward", &dx[row(r)], &want)?;
    }
    bench.time("RMS norm backward", 3 * n * each, |cpu| backward(cpu, &mut dx));
    Ok(())
}

fn pointwise<T: Element>(bench: &mut Bench<'_>, sizes: Sizes) -> Result<(), WrongResult> {
    let Sizes { tokens, dim, inner, .. } = sizes;
    let cpu = bench.cpu;
    let n = tokens * inner;
    let (x, dy) = (values::<T>(1, 2 * n), values::<T>(2, n));
    let (mut y, mut dx) = (vec![T::default(); n], vec![T::default(); 2 * n]);
    let each = size_of::<T>();
    let some = 0..n.min(1000);
    let f = Activation::GeluTanh;

    activation(cpu, f, &x[..n], &mut y);
    let want: Vec<f64> = wide(&x[some.clone()]).into_iter().map(|x| reference::activation::value(f, x)).collect();
    bench.check("GELU (tanh)", &y, &want)?;
    bench.time("GELU (tanh)", 2 * n * each, |cpu| activation(cpu, f, &x[..n], &mut y));
    activation_backward(cpu, f, &dy, &x[..n], &mut dx[..n]);
    let slopes = wide(&x[some.clone()]).into_iter().map(|x| reference::activation::slope(f, x));
    let want: Vec<f64> = slopes.zip(wide(&dy)).map(|(slope, dy)| slope * dy).collect();
    bench.check("GELU (tanh) backward", &dx, &want)?;
    bench.time("GELU (tanh) backward", 3 * n * each, |cpu| activation_backward(cpu, f, &dy, &x[..n], &mut dx[..n]));

    let f = Activation::Silu;
    glu(cpu, f, inner, &x, &mut y);
    let (gate, up) = (wide(&x[..inner]), wide(&x[inner..2 * inner]));
    let want: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| reference::activation::value(f, *g) * u).collect();
    bench.check("SwiGLU", &y, &want)?;
    bench.time("SwiGLU", 3 * n * each, |cpu| glu(cpu, f, inner, &x, &mut y));
    glu_backward(cpu, f, inner, &dy, &x, &mut dx);
    let want: Vec<f64> =
        (0..inner).map(|j| f64::from(dy[j].to_f32()) * up[j] * reference::activation::slope(f, gate[j])).collect();
    bench.check("SwiGLU backward", &dx, &want)?;
    bench.time("SwiGLU backward", 5 * n * each, |cpu| glu_backward(cpu, f, inner, &dy, &x, &mut dx));

    let n = tokens * dim;
    let (a, b) = (&x[..n], &x[n..2 * n]);
    let add = |cpu: &Cpu, y: &mut [T]| {
        binary(cpu, Binary::Add, [tokens, dim], Operand::Full(a), Operand::Full(b), y);
    };
    add(cpu, &mut y[..n]);
    let want: Vec<f64> = wide(&a[..n.min(1000)]).iter().zip(wide(b)).map(|(a, b)| a + b).collect();
    bench.check("add", &y, &want)?;
    bench.time("add", 3 * n * each, |cpu| add(cpu, &mut y[..n]));

    let (rate, key) =
        (DropRate::new(0.1).unwrap_or_else(|error| unreachable!("{error}")), RandomKey { seed: 1, step: 2, site: 3 });
    dropout_add(cpu, key, 0, rate, a, b, &mut y[..n]);
    let (dropped, scale) = rate.exact();
    let kept =
        |i: usize| f64::from(u8::from(reference::random::dropout_bits(key, i as u64) >= (dropped * 65536.0) as u32));
    let want: Vec<f64> =
        (0..n.min(1000)).map(|i| kept(i) * f64::from(a[i].to_f32() * scale) + f64::from(b[i].to_f32())).collect();
    bench.check("dropout + add", &y, &want)?;
    bench.time("dropout + add", 3 * n * each, |cpu| dropout_add(cpu, key, 0, rate, a, b, &mut y[..n]));
    Ok(())
}

fn indexed<T: Element>(bench: &mut Bench<'_>, sizes: Sizes) -> Result<(), WrongResult> {
    let Sizes { tokens, dim, head_dim, vocab, logit_rows, .. } = sizes;
    let cpu = bench.cpu;
    let each = size_of::<T>();
    let ids: Vec<i32> = (0..tokens).map(|t| (t * 7919 % vocab) as i32).collect();
    let (table, dy) = (values::<T>(1, vocab * dim), values::<T>(2, tokens * dim));
    let (mut y, mut gradient) = (vec![T::default(); tokens * dim], vec![0.0; vocab * dim]);
    embedding(cpu, dim, &ids, &table, None, None, &mut y).unwrap_or_else(|error| unreachable!("{error}"));
    for r in sample(tokens) {
        let want = wide(&table[ids[r] as usize * dim..][..dim]);
        bench.check("embedding", &y[r * dim..(r + 1) * dim], &want)?;
    }
    bench.time("embedding", 2 * tokens * dim * each, |cpu| {
        embedding(cpu, dim, &ids, &table, None, None, &mut y).unwrap_or_else(|error| unreachable!("{error}"));
    });
    bench.time("embedding backward", tokens * dim * (each + 8), |cpu| {
        embedding_backward(cpu, dim, &ids, &dy, &mut gradient, None).unwrap_or_else(|error| unreachable!("{error}"));
    });

    let columns = HeadColumns { row_stride: 3 * dim, first: 0, heads: 2 * dim / head_dim, head_dim };
    let mut qkv = values::<T>(3, tokens * 3 * dim);
    let positions: Vec<i32> = (0..tokens as i32).collect();
    let rotary =
        RopeTable::new(head_dim, 10_000.0, RopeScaling::None, tokens).unwrap_or_else(|error| unreachable!("{error}"));
    let before = wide(&qkv[3 * dim..3 * dim + head_dim]);
    let turn = |cpu: &Cpu, qkv: &mut [T]| {
        rope(cpu, Rotation::Forward, columns, &rotary, &positions, qkv).unwrap_or_else(|error| unreachable!("{error}"));
    };
    turn(cpu, &mut qkv);
    let (low, high) = before.split_at(head_dim / 2);
    let angle = |j: usize| 10_000f64.powf(-2.0 * j as f64 / head_dim as f64);
    let want: Vec<f64> = (0..head_dim / 2).map(|j| low[j] * angle(j).cos() - high[j] * angle(j).sin()).collect();
    bench.check("rotary", &qkv[3 * dim..], &want)?;
    bench.time("rotary", 4 * tokens * dim * each, |cpu| turn(cpu, &mut qkv));

    let mut logits = values::<T>(4, logit_rows * vocab);
    let targets: Vec<i32> = (0..logit_rows).map(|t| (t * 7919 % vocab) as i32).collect();
    let (mut loss, mut lse) = (vec![0.0; logit_rows], vec![0.0; logit_rows]);
    let (want, _) = reference::loss::cross_entropy(&wide(&logits[..vocab]), Some(targets[0] as usize));
    let mut run = |cpu: &Cpu, logits: &mut [T], loss: &mut [f32]| {
        let out = RowLosses { loss, lse: &mut lse, hit: None };
        cross_entropy_in_place(cpu, vocab, logits, &targets, 1.0, out).unwrap_or_else(|error| unreachable!("{error}"));
    };
    run(cpu, &mut logits, &mut loss);
    bench.check("cross-entropy", &loss, &[want])?;
    bench.time("cross-entropy", 2 * logit_rows * vocab * each, |cpu| run(cpu, &mut logits, &mut loss));
    Ok(())
}

fn parameters<T: Element>(bench: &mut Bench<'_>, Sizes { parameters, .. }: Sizes) -> Result<(), WrongResult> {
    let cpu = bench.cpu;
    let (mut p, g) = (values::<f32>(1, parameters), values::<f32>(2, parameters));
    let (mut m, mut v) = (vec![0.0f32; parameters], vec![0.0f32; parameters]);
    let mut half = vec![T::default(); parameters];
    let each = size_of::<T>();
    let some = parameters.min(1000);

    cast(cpu, &p, &mut half);
    bench.check("cast", &half, &wide(&p[..some]))?;
    bench.time("cast", parameters * (4 + each), |cpu| cast(cpu, &p, &mut half));

    let want: f64 = g.iter().map(|g| f64::from(*g).powi(2)).sum();
    bench.check("sum of squares", &[(sum_of_squares(cpu, &g) / want) as f32], &[1.0])?;
    let mut total = 0.0;
    bench.time("sum of squares", 4 * parameters, |cpu| total += sum_of_squares(cpu, &g));
    assert!(total > 0.0, "the sums were made");

    let hyper = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, variance_steps: None };
    let (mut want, mut first, mut second) = (wide(&p[..some]), vec![0.0; some], vec![0.0; some]);
    reference::optim::adamw(hyper, 1, &mut want, &wide(&g[..some]), &mut first, &mut second);
    adamw(cpu, hyper, 1, 1.0, &mut p, &g, &mut m, &mut v, Some(&mut half));
    bench.check("AdamW", &p, &want)?;
    bench.time("AdamW", parameters * (28 + each), |cpu| {
        adamw(cpu, hyper, 2, 1.0, &mut p, &g, &mut m, &mut v, Some(&mut half));
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::dtype::bf16;

    #[test]
    fn every_kernel_passes_its_check_and_is_timed() {
        let cpu = Cpu::new(Isa::detect(), 2);
        let sizes =
            Sizes { tokens: 33, dim: 64, inner: 96, head_dim: 16, vocab: 101, logit_rows: 17, parameters: 5000 };
        for timings in [time_kernels::<f32>(&cpu, sizes, 0.0).unwrap(), time_kernels::<bf16>(&cpu, sizes, 0.0).unwrap()]
        {
            assert_eq!(timings.len(), 17);
            assert!(timings.iter().all(|timing| timing.seconds > 0.0 && timing.bytes > 0));
        }
    }

    #[test]
    fn a_wrong_element_is_found() {
        let cpu = Cpu::new(Isa::detect(), 1);
        let bench = Bench { cpu: &cpu, seconds: 0.0, dtype: DType::F32, timings: Vec::new() };
        assert!(bench.check("add", &[1.0f32, 2.0], &[1.0, 2.0]).is_ok());
        let wrong = bench.check("add", &[1.0f32, 2.5], &[1.0, 2.0]).unwrap_err();
        assert!(wrong.to_string().contains("element 1 is 2.5"), "{wrong}");
        assert!(bench.check("add", &[f32::NAN], &[1.0]).is_err());
    }
}
