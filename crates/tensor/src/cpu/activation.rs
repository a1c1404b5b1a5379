//! Activation functions and gated linear units, forward and backward.
//!
//! - **GELU** (Hendrycks & Gimpel 2016): `x P(x)`, where `P` is the normal distribution function
//!   with density `p`. Derivative: `P(x) + x p(x)`.
//! - **GELU, tanh form** (GPT-2): `x g` with `g = 1 / (1 + e^-2u)` and
//!   `u = sqrt(2/pi) (x + 0.044715 x^3)`. Derivative: `g + x g (1 - g) 2u'`.
//! - **SiLU**: `x g` with `g = 1 / (1 + e^-x)`. Derivative: `g (1 + x (1 - g))`.
//! - **ReLU**: `max(x, 0)`. Derivative: 1 where `x > 0`, else 0.
//! - **Squared ReLU** (So et al. 2021, "Primer"): `max(x, 0)^2`. Derivative: `2 max(x, 0)`.
//!
//! The tanh form is written with the sigmoid, `1/2 (1 + tanh u) = 1 / (1 + e^-2u)`, which keeps
//! small negative results exact to a rounding. A gated unit multiplies the activated first half of
//! a row with the second half (Shazeer 2020); with SiLU it is SwiGLU. Traffic: forward 2 elements
//! per output (gated: 3), backward 3 (gated: 5). Each output takes about 20 to 40 FLOPs, so from
//! cache these kernels are bound by arithmetic.

use crate::cpu::Cpu;
pub use crate::cpu::gemm::Activation;
use crate::cpu::rows::{for_elements, for_rows, load_at, store_at};
use crate::cpu::simd::Simd;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;
use std::f32::consts::FRAC_1_SQRT_2;

/// A function and its derivative on lanes.
pub(crate) trait Curve: Copy + Send + Sync {
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F;
    /// Value and derivative.
    fn both<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F);
}

#[derive(Clone, Copy)]
pub(crate) struct Identity;
#[derive(Clone, Copy)]
pub(crate) struct GeluExact;
#[derive(Clone, Copy)]
pub(crate) struct GeluTanh;
#[derive(Clone, Copy)]
pub(crate) struct Relu;
#[derive(Clone, Copy)]
pub(crate) struct ReluSquared;
#[derive(Clone, Copy)]
pub(crate) struct Silu;

/// `1 / sqrt(2 pi)`
const NORMAL_PEAK: f32 = 0.398_942_3;
/// `2 sqrt(2 / pi)`, and that times 0.044715.
const TANH_LINEAR: f32 = 1.595_769;
const TANH_CUBIC: f32 = 0.071_354_814;

impl Curve for Identity {
    #[inline(always)]
    fn value<S: Simd>(self, _: S, x: S::F) -> S::F {
        x
    }
    #[inline(always)]
    fn both<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        (x, s.splat(1.0))
    }
}

impl Curve for GeluExact {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        let below = s.mul(s.splat(0.5), s.erfc(s.mul(x, s.splat(-FRAC_1_SQRT_2))));
        s.mul(x, below)
    }
    #[inline(always)]
    fn both<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        // p(x) = e^(-(x / sqrt 2)^2) / sqrt(2 pi): the factor that erfc needs too.
        let (erfc, gauss) = s.erfc_and_gauss(s.mul(x, s.splat(-FRAC_1_SQRT_2)));
        let below = s.mul(s.splat(0.5), erfc);
        (s.mul(x, below), s.fma(s.mul(x, s.splat(NORMAL_PEAK)), gauss, below))
    }
}

impl Curve for GeluTanh {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        let inner = s.fma(s.mul(x, x), s.splat(TANH_CUBIC), s.splat(TANH_LINEAR));
        s.mul(x, s.sigmoid(s.mul(x, inner)))
    }
    #[inline(always)]
    fn both<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        let xx = s.mul(x, x);
        let inner = s.fma(xx, s.splat(TANH_CUBIC), s.splat(TANH_LINEAR));
        let slope = s.fma(xx, s.splat(3.0 * TANH_CUBIC), s.splat(TANH_LINEAR));
        let g = s.sigmoid(s.mul(x, inner));
        let rest = s.mul(g, s.sub(s.splat(1.0), g));
        (s.mul(x, g), s.fma(s.mul(x, rest), slope, g))
    }
}

impl Curve for Relu {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.max(s.splat(0.0), x)
    }
    #[inline(always)]
    fn both<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        let zero = s.splat(0.0);
        (s.max(zero, x), s.select(s.gt(x, zero), s.splat(1.0), zero))
    }
}

impl Curve for ReluSquared {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        let positive = s.max(s.splat(0.0), x);
        s.mul(positive, positive)
    }
    #[inline(always)]
    fn both<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        let positive = s.max(s.splat(0.0), x);
        (s.mul(positive, positive), s.add(positive, positive))
    }
}

impl Curve for Silu {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.mul(x, s.sigmoid(x))
    }
    #[inline(always)]
    fn both<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        let one = s.splat(1.0);
        let g = s.sigmoid(x);
        (s.mul(x, g), s.mul(g, s.fma(x, s.sub(one, g), one)))
    }
}

macro_rules! with_curve {
    ($activation:expr, $curve:ident => $call:expr) => {
        match $activation {
            Activation::None => {
                let $curve = Identity;
                $call
            }
            Activation::GeluExact => {
                let $curve = GeluExact;
                $call
            }
            Activation::GeluTanh => {
                let $curve = GeluTanh;
                $call
            }
            Activation::Relu => {
                let $curve = Relu;
                $call
            }
            Activation::ReluSquared => {
                let $curve = ReluSquared;
                $call
            }
            Activation::Silu => {
                let $curve = Silu;
                $call
            }
        }
    };
}

/// `y = f(x)`, elementwise.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn activation<T: Element>(cpu: &Cpu, f: Activation, x: &[T], y: &mut [T]) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    let y = Shares::new(y);
    for_elements(cpu, x.len(), 2 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        with_curve!(f, curve => forward(cpu.isa, curve, &x[range], y));
    });
}

simd_fn! {
    fn forward[T: Element, C: Curve](s: S, f: C, x: &[T], y: &mut [T]) {
        let mut i = 0;
        while i < x.len() {
            store_at(s, f.value(s, load_at(s, x, i, 0.0)), y, i);
            i += S::LANES;
        }
    }
}

/// `dx = dy f'(x)`, elementwise.
pub fn activation_backward<T: Element>(cpu: &Cpu, f: Activation, dy: &[T], x: &[T], dx: &mut [T]) {
    assert_eq!((dy.len(), dx.len()), (x.len(), x.len()), "lengths of dy and dx");
    let dx = Shares::new(dx);
    for_elements(cpu, x.len(), 3 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let dx = unsafe { dx.part(range.clone()) };
        with_curve!(f, curve => backward(cpu.isa, curve, &dy[range.clone()], &x[range], dx));
    });
}

simd_fn! {
    fn backward[T: Element, C: Curve](s: S, f: C, dy: &[T], x: &[T], dx: &mut [T]) {
        let mut i = 0;
        while i < x.len() {
            let (_, slope) = f.both(s, load_at(s, x, i, 0.0));
            store_at(s, s.mul(load_at(s, dy, i, 0.0), slope), dx, i);
            i += S::LANES;
        }
    }
}

/// The gated unit `y = f(gate) up` of rows `[gate | up]`, each half `width` wide: `gate_up` is
/// `[rows, 2 width]`, `y` `[rows, width]`. SwiGLU is this with [`Activation::Silu`].
pub fn glu<T: Element>(cpu: &Cpu, f: Activation, width: usize, gate_up: &[T], y: &mut [T]) {
    assert!(width > 0 && y.len().is_multiple_of(width), "{} elements are no rows of {width}", y.len());
    assert_eq!(gate_up.len(), 2 * y.len(), "length of gate_up");
    let rows = y.len() / width;
    let y = Shares::new(y);
    for_rows(cpu, rows, 3 * width * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.start * width..range.end * width) };
        let gate_up = &gate_up[2 * range.start * width..2 * range.end * width];
        with_curve!(f, curve => glu_rows(cpu.isa, curve, width, gate_up, y));
    });
}

simd_fn! {
    fn glu_rows[T: Element, C: Curve](s: S, f: C, width: usize, gate_up: &[T], y: &mut [T]) {
        for (gate_up, y) in gate_up.chunks_exact(2 * width).zip(y.chunks_exact_mut(width)) {
            let (gate, up) = gate_up.split_at(width);
            let mut i = 0;
            while i < width {
                store_at(s, s.mul(f.value(s, load_at(s, gate, i, 0.0)), load_at(s, up, i, 0.0)), y, i);
                i += S::LANES;
            }
        }
    }
}

/// The backward of [`glu`]: `dgate = dy up f'(gate)`, `dup = dy f(gate)`, laid out as `gate_up`.
pub fn glu_backward<T: Element>(cpu: &Cpu, f: Activation, width: usize, dy: &[T], gate_up: &[T], dgate_up: &mut [T]) {
    assert!(width > 0 && dy.len().is_multiple_of(width), "{} elements are no rows of {width}", dy.len());
    assert_eq!((gate_up.len(), dgate_up.len()), (2 * dy.len(), 2 * dy.len()), "lengths of gate_up and dgate_up");
    let rows = dy.len() / width;
    let dgate_up = Shares::new(dgate_up);
    for_rows(cpu, rows, 5 * width * size_of::<T>(), |range| {
        let span = 2 * range.start * width..2 * range.end * width;
        // SAFETY: the ranges of a region do not overlap.
        let dgate_up = unsafe { dgate_up.part(span.clone()) };
        let dy = &dy[range.start * width..range.end * width];
        with_curve!(f, curve => glu_rows_backward(cpu.isa, curve, width, dy, &gate_up[span], dgate_up));
    });
}

simd_fn! {
    fn glu_rows_backward[T: Element, C: Curve](s: S, f: C, width: usize, dy: &[T], gate_up: &[T], dgate_up: &mut [T]) {
        let rows = gate_up.chunks_exact(2 * width).zip(dgate_up.chunks_exact_mut(2 * width));
        for (dy, (gate_up, dgate_up)) in dy.chunks_exact(width).zip(rows) {
            let (gate, up) = gate_up.split_at(width);
            let (dgate, dup) = dgate_up.split_at_mut(width);
            let mut i = 0;
            while i < width {
                let dy = load_at(s, dy, i, 0.0);
                let (value, slope) = f.both(s, load_at(s, gate, i, 0.0));
                store_at(s, s.mul(s.mul(dy, load_at(s, up, i, 0.0)), slope), dgate, i);
                store_at(s, s.mul(dy, value), dup, i);
                i += S::LANES;
            }
        }
    }
}
