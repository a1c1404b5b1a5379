//! Rounding to the numbers of eight bits, for products that a processor computes in wider ones.
//!
//! `y = round(x scale) / scale`: what a product with operands of eight bits sees, as a number of
//! x's own dtype. With a power of two as scale that is exact in bf16, which has more bits of
//! mantissa and of exponent than either format, so the product's arithmetic alone differs from that
//! of a GPU. The same pass finds the largest magnitude. Traffic: 2 elements; about 20 operations an
//! element.

use crate::cpu::Cpu;
use crate::cpu::rows::for_elements;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;
use std::sync::atomic::{AtomicU32, Ordering};
pub use trainyard_cuda::fp8::Fp8;

/// `y = round(x scale) inverse` with `inverse = 1 / scale`, both powers of two; returns the largest
/// magnitude of x, or NaN or infinity where x has one.
///
/// # Panics
/// When the lengths disagree.
pub fn round<T: Element>(cpu: &Cpu, format: Fp8, [scale, inverse]: [f32; 2], x: &[T], y: &mut [T]) -> f32 {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    let (y, most) = (Shares::new(y), AtomicU32::new(0));
    for_elements(cpu, x.len(), 2 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        most.fetch_max(round_range(cpu.isa, format, scale, inverse, &x[range], y), Ordering::Relaxed);
    });
    f32::from_bits(most.into_inner())
}

/// The largest magnitude of x, or NaN or infinity where x has one.
pub fn amax<T: Element>(cpu: &Cpu, x: &[T]) -> f32 {
    let most = AtomicU32::new(0);
    for_elements(cpu, x.len(), size_of::<T>(), |range| {
        most.fetch_max(amax_range(cpu.isa, &x[range]), Ordering::Relaxed);
    });
    f32::from_bits(most.into_inner())
}

// Plain loops, of which the compiler makes vectors of each rung. Magnitudes are compared as
// integers: their order is that of the numbers, with infinity and NaN above all.
simd_fn! {
    fn round_range[T: Element](_s: S, format: Fp8, scale: f32, inverse: f32, x: &[T], y: &mut [T]) -> u32 {
        let (max, least, rounder) = (format.max(), format.least_normal(), format.rounder());
        let dropped = 23 - format.mantissa_bits();
        let half = (1u32 << (dropped - 1)) - 1;
        let mut most = 0;
        for (x, y) in x.iter().zip(y) {
            let x = x.to_f32();
            let bits = x.to_bits() & 0x7fff_ffff;
            most = most.max(bits);
            let scaled = f32::from_bits(bits) * scale;
            let limited = if scaled > max { max } else { scaled };
            let bits = limited.to_bits();
            let normal = f32::from_bits((bits + half + (bits >> dropped & 1)) >> dropped << dropped);
            let small = (limited + rounder) - rounder;
            let rounded = if limited < least { small } else { normal };
            let value = if limited.is_nan() { limited } else { rounded * inverse };
            *y = T::from_f32(value.copysign(x));
        }
        most
    }
}

simd_fn! {
    fn amax_range[T: Element](_s: S, x: &[T]) -> u32 {
        x.iter().fold(0, |most, x| most.max(x.to_f32().to_bits() & 0x7fff_ffff))
    }
}
