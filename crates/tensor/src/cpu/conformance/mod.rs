//! Conformance of the streaming kernels: every kernel, every rung, every dtype, odd shapes, one to
//! three threads, against the scalar oracles in `f64`.
//!
//! Kernels read their operands exactly and compute in `f32`. A result may therefore differ from the
//! oracle's by its final rounding, `u |want|` with `u` the unit roundoff of its dtype, and by a
//! `slack` for the `f32` arithmetic inside, which each test derives: a number of roundings times
//! `2^-24` times the size of what is rounded.

mod experts;
mod fp8;
mod grid;
mod int8;
mod moments8;
mod norm;
mod optim;
mod plain;
mod random;
mod rows;
mod sparsity;
mod training;

use crate::cpu::{Cpu, Isa};
use crate::dtype::{DType, Element, bf16, f16};
use std::fmt::Debug;

/// The unit roundoff of `f32`.
pub(super) const ULP: f64 = 1.0 / 16_777_216.0;

fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => ULP,
    }
}

/// A dtype by itself, so that one test body runs on all.
pub(super) trait Case {
    fn run<T: Element>(&self);
}

pub(super) fn on_every_dtype(case: impl Case) {
    case.run::<f32>();
    case.run::<bf16>();
    case.run::<f16>();
}

/// Declares a test that runs its body with `T` as each float dtype.
macro_rules! dtypes {
    ($(#[$meta:meta])* fn $name:ident<$t:ident>() $body:block) => {
        $(#[$meta])*
        #[test]
        fn $name() {
            struct Body;
            impl super::Case for Body {
                fn run<$t: crate::dtype::Element>(&self) $body
            }
            super::on_every_dtype(Body);
        }
    };
}
pub(super) use dtypes;

/// Pseudo-random numbers in `[-1, 1)`, as `T`, from a linear congruential generator.
pub(super) fn values<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::from_f32((state >> 40) as f32 / 8_388_608.0 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

pub(super) fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// Runs `kernel` on every rung with one, two and three threads, asserts that the threads change
/// nothing, and hands the result to `check`.
pub(super) fn on_every_cpu<R: PartialEq + Debug>(kernel: impl Fn(&Cpu) -> R, check: impl Fn(Isa, &R)) {
    for isa in Isa::tested(Isa::Avx512Bf16).filter(|isa| *isa <= Isa::Avx512Bf16) {
        let alone = kernel(&Cpu::new(isa, 1));
        for threads in 2..=3 {
            let together = kernel(&Cpu::new(isa, threads));
            assert!(alone == together, "{isa}: {threads} threads give other bits than one");
        }
        check(isa, &alone);
    }
}

/// Asserts `|got - want| <= roundoff |want| + slack`, elementwise; half the smallest subnormal of
/// `f16` is always allowed.
#[track_caller]
pub(super) fn close<T: Element>(isa: Isa, what: &str, got: &[T], want: &[f64], slack: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let u = roundoff(T::DTYPE) * 1.0001;
    let least = if T::DTYPE == DType::F16 { 3e-8 } else { 1e-38 };
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(got.to_f32()) - want).abs();
        assert!(
            off <= u * want.abs() + slack + least,
            "{isa} {} {what}[{i}]: {got:?} against {want}, off by {off:e} of {:e}",
            T::DTYPE,
            u * want.abs() + slack
        );
    }
}

/// Asserts that `gradient` is the derivative of `f` at `x`: central differences in `f64`, step
/// 1e-5, error about `1e-10 f''' + 1e-11 f`.
#[track_caller]
pub(super) fn is_gradient(what: &str, x: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
    let mut moved = x.to_vec();
    for i in 0..x.len() {
        const STEP: f64 = 1e-5;
        moved[i] = x[i] + STEP;
        let above = f(&moved);
        moved[i] = x[i] - STEP;
        let below = f(&moved);
        moved[i] = x[i];
        let slope = (above - below) / (2.0 * STEP);
        let off = (slope - gradient[i]).abs();
        assert!(off <= 1e-6 * (1.0 + slope.abs()), "{what}[{i}]: gradient {} but slope {slope}", gradient[i]);
    }
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
