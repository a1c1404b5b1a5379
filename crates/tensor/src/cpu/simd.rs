//! Vectors of `f32` lanes, one type per instruction set, so that a kernel is written once.
//!
//! A kernel is a function generic over `S: Simd` that is handed a token `s: S`. Tokens of [`Avx2`]
//! and [`Avx512`] can only be made by [`simd_fn!`](crate::simd_fn)'s trampolines after the CPU was
//! asked, so holding one proves that the instructions exist and the methods are safe to call. The
//! trampolines carry `#[target_feature]`; everything below is `#[inline(always)]` so that it is
//! compiled with those features.
//!
//! Transcendental functions are polynomials on the primitives, the same on every rung; they differ
//! between rungs only by the rounding of fused multiply-add, which [`Portable`] does not have.

use crate::dtype::Element;
use half::{bf16, f16};

/// A vector of [`Simd::LANES`] `f32` lanes and the operations on it.
pub trait Simd: Copy + Send + Sync + 'static {
    /// The vector.
    type F: Copy;
    /// A lane mask.
    type M: Copy;
    /// As many `u32` lanes: for random bits and for taking floating-point numbers apart.
    type U: Copy;
    /// Lanes of a vector; at most 16.
    const LANES: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F;
    /// The first `LANES` elements of `x`; panics when there are fewer.
    fn load(self, x: &[f32]) -> Self::F;
    /// To the first `LANES` elements of `y`; panics when there are fewer.
    fn store(self, v: Self::F, y: &mut [f32]);
    /// Widened.
    fn load_bf16(self, x: &[bf16]) -> Self::F;
    /// Rounded to nearest even.
    fn store_bf16(self, v: Self::F, y: &mut [bf16]);
    /// Two vectors, rounded to nearest even, to the first `2 LANES` elements.
    #[inline(always)]
    fn store_bf16_pair(self, v: [Self::F; 2], y: &mut [bf16]) {
        self.store_bf16(v[0], y);
        self.store_bf16(v[1], &mut y[Self::LANES..]);
    }
    /// Widened.
    fn load_f16(self, x: &[f16]) -> Self::F;
    /// Rounded to nearest even; overflow gives infinity.
    fn store_f16(self, v: Self::F, y: &mut [f16]);

    /// `a + b`
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, fused where the hardware does.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger of each lane; `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of each lane; `b` where either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The square root.
    fn sqrt(self, a: Self::F) -> Self::F;
    /// Rounded to the nearest integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `2^n` for integral `n` in `[-126, 127]`.
    fn pow2(self, n: Self::F) -> Self::F;
    /// `a > b`, false for NaN.
    fn gt(self, a: Self::F, b: Self::F) -> Self::M;
    /// `a` where the mask is set, else `b`.
    fn select(self, mask: Self::M, a: Self::F, b: Self::F) -> Self::F;
    /// The sum of the lanes, in an order fixed per type.
    fn reduce_sum(self, a: Self::F) -> f32;
    /// The largest lane.
    fn reduce_max(self, a: Self::F) -> f32;

    /// All lanes `x`.
    fn splat_u32(self, x: u32) -> Self::U;
    /// `0, 1, 2, ...`
    fn iota_u32(self) -> Self::U;
    /// `a + b`, wrapping.
    fn add_u32(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a - b`, wrapping.
    fn sub_u32(self, a: Self::U, b: Self::U) -> Self::U;
    /// The upper and the lower half of the 64-bit product `a * b`.
    fn mul_wide_u32(self, a: Self::U, b: Self::U) -> (Self::U, Self::U);
    /// `a & b`
    fn and_u32(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a ^ b`
    fn xor_u32(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a >> bits`, for `bits < 32`.
    fn shr_u32(self, a: Self::U, bits: u32) -> Self::U;
    /// `a << bits`, for `bits < 32`.
    fn shl_u32(self, a: Self::U, bits: u32) -> Self::U;
    /// `a > b` as signed numbers.
    fn gt_i32(self, a: Self::U, b: Self::U) -> Self::M;
    /// The signed numbers `a`, rounded to `f32`.
    fn i32_to_f32(self, a: Self::U) -> Self::F;
    /// The bits of `a`.
    fn bits_of(self, a: Self::F) -> Self::U;
    /// The numbers whose bits are `a`.
    fn float_of(self, a: Self::U) -> Self::F;

    /// `-a`, by the sign bit: exact for zeros, infinities and NaN too.
    #[inline(always)]
    fn neg(self, a: Self::F) -> Self::F {
        self.float_of(self.xor_u32(self.bits_of(a), self.splat_u32(0x8000_0000)))
    }

    /// `|a|`
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        self.float_of(self.and_u32(self.bits_of(a), self.splat_u32(0x7fff_ffff)))
    }

    /// `magnitude` with the sign of `sign`; the magnitude must not be negative.
    #[inline(always)]
    fn with_sign_of(self, magnitude: Self::F, sign: Self::F) -> Self::F {
        let bit = self.and_u32(self.bits_of(sign), self.splat_u32(0x8000_0000));
        self.float_of(self.xor_u32(self.bits_of(magnitude), bit))
    }

    /// `e^x`, relative error below 2e-7 on `[-87, 88]`; 0 below, infinity-free saturation above;
    /// NaN stays NaN.
    ///
    /// Cody-Waite reduction `x = n ln 2 + r`, `|r| <= ln 2 / 2`, then [`Simd::exp_reduced`].
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        // The constants come first because `min` and `max` return their second operand for NaN.
        let clamped = self.max(self.splat(-87.3), self.min(self.splat(88.02), x));
        let n = self.round(self.mul(clamped, self.splat(std::f32::consts::LOG2_E)));
        let y = self.mul(self.exp_reduced(clamped, n), self.pow2(n));
        self.select(self.gt(self.splat(-87.3), x), self.splat(0.0), y)
    }

    /// `e^(x - n ln 2)` for the `n` nearest to `x / ln 2`: the polynomial of degree 5 with constant
    /// term 1 whose greatest relative error on `|r| <= ln 2 / 2` is least, 9.2e-8; with the
    /// roundings, 1.5e-7.
    #[inline(always)]
    fn exp_reduced(self, x: Self::F, n: Self::F) -> Self::F {
        let r = self.fma(n, self.splat(-0.693_359_4), x);
        let r = self.fma(n, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(0.008_290_272);
        for c in [0.041_898_16, 0.166_676_39, 0.499_991_48, 0.999_999_7, 1.0] {
            p = self.fma(p, r, self.splat(c));
        }
        p
    }

    /// [`Simd::exp`] for `x <= 0`, where it needs no upper clamp; positive infinity gives NaN.
    #[inline(always)]
    fn exp_nonpositive(self, x: Self::F) -> Self::F {
        self.exp(x)
    }

    /// `1 / a` to two units in the last place, for normal `a` whose reciprocal is normal; NaN for
    /// an infinity, perhaps.
    #[inline(always)]
    fn reciprocal(self, a: Self::F) -> Self::F {
        self.div(self.splat(1.0), a)
    }

    /// `x`, at most `LANES` elements, filled up with `fill`.
    #[inline(always)]
    fn load_tail<T: Element>(self, x: &[T], fill: f32) -> Self::F {
        self.load(&tail(x, fill))
    }

    /// Stores as many lanes as `y` has room for.
    #[inline(always)]
    fn store_tail<T: Element>(self, v: Self::F, y: &mut [T]) {
        let mut lanes = [0.0; LANES_MAX];
        self.store(v, &mut lanes);
        store_lanes(&lanes[..Self::LANES], y);
    }

    /// `1 / (1 + e^-x)`; where that is below 1.2e-38 it is 1.2e-38.
    #[inline(always)]
    fn sigmoid(self, x: Self::F) -> Self::F {
        let below = self.add(self.splat(1.0), self.exp(self.neg(x)));
        self.reciprocal(self.min(self.splat(8e37), below))
    }

    /// `tanh x = 1 - 2 / (e^2x + 1)`, absolute error below 2e-7.
    #[inline(always)]
    fn tanh(self, x: Self::F) -> Self::F {
        let (one, two) = (self.splat(1.0), self.splat(2.0));
        let below = self.min(self.splat(8e37), self.add(self.exp(self.mul(two, x)), one));
        self.sub(one, self.mul(two, self.reciprocal(below)))
    }

    /// The complementary error function, relative error below `(x^2 + 6) 2^-24`, 0 beyond 9.3;
    /// absolute below 3e-7 everywhere.
    ///
    /// `erfc |x| = t P(t) e^(-x^2)` with `t = 1 / (1 + |x|/2)`, the substitution of Hastings
    /// (1955). `P`, of degree 8, is the least-maximum fit of `e^(x^2) erfc x` on `[0, 10]`,
    /// relative error 4.3e-8; the rest is the rounding of `x^2` in the exponent, `x^2 2^-24`. For
    /// negative `x`, `erfc x = 2 - erfc |x|`.
    #[inline(always)]
    fn erfc(self, x: Self::F) -> Self::F {
        self.erfc_and_gauss(x).0
    }

    /// [`Simd::erfc`] and the `e^(-x^2)` that it is made of.
    #[inline(always)]
    fn erfc_and_gauss(self, x: Self::F) -> (Self::F, Self::F) {
        const P: [f32; 9] = [
            -0.059_069_216,
            0.284_576_17,
            -0.487_202_3,
            0.278_069_8,
            -0.026_627_386,
            0.202_687_55,
            0.243_103_6,
            0.282_375_33,
            0.282_086_42,
        ];
        let one = self.splat(1.0);
        let magnitude = self.abs(x);
        let t = self.reciprocal(self.fma(self.min(self.splat(1e30), magnitude), self.splat(0.5), one));
        let mut p = self.splat(P[0]);
        for c in &P[1..] {
            p = self.fma(p, t, self.splat(*c));
        }
        let gauss = self.exp(self.neg(self.mul(x, x)));
        let y = self.mul(self.mul(t, p), gauss);
        (self.select(self.gt(self.splat(0.0), x), self.sub(self.splat(2.0), y), y), gauss)
    }

    /// The error function, absolute error below 3e-7.
    #[inline(always)]
    fn erf(self, x: Self::F) -> Self::F {
        self.with_sign_of(self.sub(self.splat(1.0), self.erfc(self.abs(x))), x)
    }

    /// The natural logarithm, relative error below 3e-7 away from 1 and absolute below 1e-7 near
    /// it; `-inf` at zero, NaN below, infinity at infinity.
    ///
    /// `x = 2^e m` with `m` in `[sqrt 1/2, sqrt 2)`; `ln m = 2 atanh z`, `z = (m - 1) / (m + 1)`,
    /// `|z| < 0.1716`, by its series up to `z^9 / 9`: truncation `z^10 / 11 < 2.1e-9` relative.
    /// Subnormal numbers are scaled by `2^25` first. Multiplications and additions are not fused,
    /// so that the bits are the same on every rung: random numbers are made with this function.
    #[inline(always)]
    fn ln(self, x: Self::F) -> Self::F {
        let (zero, one) = (self.splat(0.0), self.splat(1.0));
        let small = self.gt(self.splat(f32::MIN_POSITIVE), x);
        let scaled = self.select(small, self.mul(x, self.splat(33_554_432.0)), x);
        let bits = self.bits_of(scaled);
        // 0x3f35_04f3 is sqrt 1/2: what lies below it belongs to the exponent before. The bias
        // keeps the shift unsigned.
        let above = self.add_u32(self.sub_u32(bits, self.splat_u32(0x3f35_04f3)), self.splat_u32(0x4000_0000));
        let exponent = self.sub_u32(self.shr_u32(above, 23), self.splat_u32(128));
        let m = self.float_of(self.sub_u32(bits, self.shl_u32(exponent, 23)));
        let e = self.sub(self.i32_to_f32(exponent), self.select(small, self.splat(25.0), zero));
        let z = self.div(self.sub(m, one), self.add(m, one));
        let zz = self.mul(z, z);
        let mut p = self.splat(2.0 / 9.0);
        for c in [2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0] {
            p = self.add(self.mul(p, zz), self.splat(c));
        }
        // 2z + z^3 p(z^2) + e ln 2, the logarithm of 2 in two parts, of which the first is short
        // enough for e times it to be exact.
        let series = self.add(self.mul(self.mul(z, zz), p), self.mul(e, self.splat(-2.121_944_4e-4)));
        let y = self.add(self.add(series, self.add(z, z)), self.mul(e, self.splat(0.693_359_4)));
        let y = self.select(self.gt(x, zero), y, self.splat(f32::NAN));
        let y = self.select(self.gt(x, self.splat(f32::MAX)), self.splat(f32::INFINITY), y);
        // Zero of either sign: neither above nor below zero and not NaN.
        let not_zero = self.abs(x);
        self.select(self.gt(self.splat(1e-45), not_zero), self.splat(f32::NEG_INFINITY), y)
    }

    /// `(cos, sin)` of `2 pi turns` for `turns` in `[-1, 1]`, absolute error below 2e-7.
    ///
    /// The nearest quarter turn is taken off, which leaves `|r| <= pi / 4`, where the Taylor
    /// polynomials of degree 9 and 10 are off by less than 2e-9. Not fused, as [`Simd::ln`].
    #[inline(always)]
    fn cos_sin_turns(self, turns: Self::F) -> (Self::F, Self::F) {
        let quarters = self.round(self.mul(turns, self.splat(4.0)));
        let rest = self.sub(turns, self.mul(quarters, self.splat(0.25)));
        let r = self.mul(rest, self.splat(std::f32::consts::TAU));
        let rr = self.mul(r, r);
        let mut sin = self.splat(1.0 / 362_880.0);
        for c in [-1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0] {
            sin = self.add(self.mul(sin, rr), self.splat(c));
        }
        let sin = self.add(self.mul(self.mul(sin, rr), r), r);
        let mut cos = self.splat(-1.0 / 3_628_800.0);
        for c in [1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5, 1.0] {
            cos = self.add(self.mul(cos, rr), self.splat(c));
        }
        // Whole turns off: q is in [-2, 2].
        let whole = self.round(self.mul(quarters, self.splat(0.25)));
        let q = self.sub(quarters, self.mul(whole, self.splat(4.0)));
        let odd = self.gt(self.splat(0.5), self.abs(self.sub(self.abs(q), self.splat(1.0))));
        let (c, s) = (self.select(odd, sin, cos), self.select(odd, cos, sin));
        // q: -2 -> (-c, -s), -1 -> (s, -c), 0 -> (c, s), 1 -> (-s, c), 2 -> (-c, -s).
        let cos_stays = self.gt(self.splat(1.0), self.abs(self.add(q, self.splat(0.5))));
        let sin_stays = self.gt(self.splat(1.0), self.abs(self.sub(q, self.splat(0.5))));
        (self.select(cos_stays, c, self.neg(c)), self.select(sin_stays, s, self.neg(s)))
    }
}

/// Lanes of the widest vector.
const LANES_MAX: usize = 16;

// The ends of rows are kept out of the loops: inlined, they would be most of the code of every
// kernel.
#[cold]
#[inline(never)]
fn tail<T: Element>(x: &[T], fill: f32) -> [f32; LANES_MAX] {
    let mut lanes = [fill; LANES_MAX];
    for (lane, x) in lanes.iter_mut().zip(x) {
        *lane = x.to_f32();
    }
    lanes
}

#[cold]
#[inline(never)]
fn store_lanes<T: Element>(lanes: &[f32], y: &mut [T]) {
    for (y, lane) in y.iter_mut().zip(lanes) {
        *y = T::from_f32(*lane);
    }
}

/// Any CPU: eight lanes in an array, which compilers vectorise as far as the target allows.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

const P: usize = 8;

#[inline(always)]
fn zip(a: [f32; P], b: [f32; P], f: impl Fn(f32, f32) -> f32) -> [f32; P] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type F = [f32; P];
    type M = [bool; P];
    type U = [u32; P];
    const LANES: usize = P;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; P]
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::F {
        std::array::from_fn(|i| x[i])
    }
    #[inline(always)]
    fn store(self, v: Self::F, y: &mut [f32]) {
        y[..P].copy_from_slice(&v);
    }
    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> Self::F {
        std::array::from_fn(|i| f32::from_bits((x[i].to_bits() as u32) << 16))
    }
    #[inline(always)]
    fn store_bf16(self, v: Self::F, y: &mut [bf16]) {
        for i in 0..P {
            y[i] = bf16::from_f32(v[i]);
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> Self::F {
        std::array::from_fn(|i| x[i].to_f32())
    }
    #[inline(always)]
    fn store_f16(self, v: Self::F, y: &mut [f16]) {
        for i in 0..P {
            y[i] = f16::from_f32(v[i]);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn pow2(self, n: Self::F) -> Self::F {
        n.map(|n| f32::from_bits(((n as i32 + 127) << 23) as u32))
    }
    #[inline(always)]
    fn gt(self, a: Self::F, b: Self::F) -> Self::M {
        std::array::from_fn(|i| a[i] > b[i])
    }
    #[inline(always)]
    fn select(self, mask: Self::M, a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| if mask[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn reduce_sum(self, a: Self::F) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    #[inline(always)]
    fn reduce_max(self, a: Self::F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn splat_u32(self, x: u32) -> Self::U {
        [x; P]
    }
    #[inline(always)]
    fn iota_u32(self) -> Self::U {
        std::array::from_fn(|i| i as u32)
    }
    #[inline(always)]
    fn add_u32(self, a: Self::U, b: Self::U) -> Self::U {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn sub_u32(self, a: Self::U, b: Self::U) -> Self::U {
        std::array::from_fn(|i| a[i].wrapping_sub(b[i]))
    }
    #[inline(always)]
    fn mul_wide_u32(self, a: Self::U, b: Self::U) -> (Self::U, Self::U) {
        let wide: [u64; P] = std::array::from_fn(|i| u64::from(a[i]) * u64::from(b[i]));
        (wide.map(|w| (w >> 32) as u32), wide.map(|w| w as u32))
    }
    #[inline(always)]
    fn and_u32(self, a: Self::U, b: Self::U) -> Self::U {
        std::array::from_fn(|i| a[i] & b[i])
    }
    #[inline(always)]
    fn xor_u32(self, a: Self::U, b: Self::U) -> Self::U {
        std::array::from_fn(|i| a[i] ^ b[i])
    }
    #[inline(always)]
    fn shr_u32(self, a: Self::U, bits: u32) -> Self::U {
        a.map(|a| a >> bits)
    }
    #[inline(always)]
    fn shl_u32(self, a: Self::U, bits: u32) -> Self::U {
        a.map(|a| a << bits)
    }
    #[inline(always)]
    fn gt_i32(self, a: Self::U, b: Self::U) -> Self::M {
        std::array::from_fn(|i| a[i].cast_signed() > b[i].cast_signed())
    }
    #[inline(always)]
    fn i32_to_f32(self, a: Self::U) -> Self::F {
        a.map(|a| a.cast_signed() as f32)
    }
    #[inline(always)]
    fn bits_of(self, a: Self::F) -> Self::U {
        a.map(f32::to_bits)
    }
    #[inline(always)]
    fn float_of(self, a: Self::U) -> Self::F {
        a.map(f32::from_bits)
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86;

/// Defines a kernel generic over the vector type, with one compiled form per rung and a dispatcher.
///
/// ```ignore
/// simd_fn! {
///     /// `y = a x + y`
///     pub fn axpy[T: Element](s: S, a: f32, x: &[T], y: &mut [T]) { … s.fma(…) … }
/// }
/// axpy(cpu.isa, a, x, y);
/// ```
#[macro_export]
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $([$($g:ident: $bound:path),+])?
        ($s:ident: $S:ident $(, $arg:ident: $t:ty)* $(,)?) $(-> $r:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name$(<$($g: $bound),+>)?(isa: $crate::cpu::Isa $(, $arg: $t)*) $(-> $r)? {
            #[inline(always)]
            fn body<$S: $crate::cpu::simd::Simd $($(, $g: $bound)+)?>($s: $S $(, $arg: $t)*) $(-> $r)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2$(<$($g: $bound),+>)?($($arg: $t),*) $(-> $r)? {
                // SAFETY: this function is only called on a CPU that has these features.
                body(unsafe { $crate::cpu::simd::Avx2::assume() } $(, $arg)*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
            fn avx512$(<$($g: $bound),+>)?(isa: $crate::cpu::Isa $(, $arg: $t)*) $(-> $r)? {
                // SAFETY: this function is only called on a CPU that has these features and is on
                // this rung.
                body(unsafe { $crate::cpu::simd::Avx512::assume_rung(isa) } $(, $arg)*)
            }

            assert!(isa <= $crate::cpu::Isa::detect(), "kernel form `{isa}` on a CPU that lacks it");
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `isa` is no higher than what was detected.
                $crate::cpu::Isa::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `isa` is no higher than what was detected.
                isa if isa >= $crate::cpu::Isa::Avx512 => unsafe { avx512(isa $(, $arg)*) },
                _ => body($crate::cpu::simd::Portable $(, $arg)*),
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    simd_fn! {
        fn map_exp[T: Element](s: S, which: usize, x: &[T], y: &mut [T]) {
            for (x, y) in x.chunks(S::LANES).zip(y.chunks_mut(S::LANES)) {
                let v = T::load_partial(s, x, 0.0);
                let v = match which {
                    0 => s.exp(v),
                    1 => s.tanh(v),
                    2 => s.sigmoid(v),
                    _ => v,
                };
                if y.len() == S::LANES { T::store(s, v, y) } else { T::store_partial(s, v, y) }
            }
        }
    }

    #[test]
    fn transcendental_functions_agree_with_f64_on_every_rung() {
        let x: Vec<f32> = (-2000..2000).map(|i| i as f32 * 0.0437).collect();
        let exact: [fn(f64) -> f64; 3] = [f64::exp, f64::tanh, |x| 1.0 / (1.0 + (-x).exp())];
        for isa in Isa::tested(Isa::Avx512Bf16) {
            for (which, exact) in exact.iter().enumerate() {
                let mut y = vec![0.0f32; x.len()];
                map_exp(isa, which, &x, &mut y);
                for (x, y) in x.iter().zip(&y) {
                    let want = exact(*x as f64);
                    let scale = if which == 0 { want } else { 1.0 };
                    assert!((*y as f64 - want).abs() <= 4e-7 * scale + 2e-38, "{isa} {which} {x}: {y} against {want}");
                }
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_even_on_every_rung() {
        let x: Vec<f32> = (0..4099u32).map(|i| f32::from_bits(i.wrapping_mul(1_048_583) ^ 0x3f80_0000)).collect();
        let x: Vec<f32> = x.into_iter().chain([f32::NAN, f32::INFINITY, -0.0, 65520.0]).collect();
        for isa in Isa::tested(Isa::Avx512Bf16) {
            let b: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            let wide: Vec<f32> = x.clone();
            let mut y = vec![bf16::ZERO; x.len()];
            store_as(isa, &wide, &mut y);
            for (i, (y, b)) in y.iter().zip(&b).enumerate() {
                let flushed = isa >= Isa::Avx512Bf16 && x[i].is_subnormal() && y.to_f32() == 0.0;
                assert!(y == b || flushed || (y.is_nan() && b.is_nan()), "{isa} {}: {y:?} {b:?}", x[i]);
            }
        }
    }

    simd_fn! {
        fn store_as[T: Element](s: S, x: &[f32], y: &mut [T]) {
            for (x, y) in x.chunks(S::LANES).zip(y.chunks_mut(S::LANES)) {
                let v = f32::load_partial(s, x, 0.0);
                if y.len() == S::LANES { T::store(s, v, y) } else { T::store_partial(s, v, y) }
            }
        }
    }
}
