//! Conversion between float dtypes, rounding to nearest even.

use crate::cpu::rows::{for_elements, load_at, store_at};
use crate::cpu::threads::Shares;
use crate::cpu::{Cpu, Isa};
use crate::dtype::Element;
use crate::simd_fn;

/// `y = x` in another dtype: widening is exact, narrowing rounds once, to nearest even; too large
/// for `f16` is infinity.
///
/// # Panics
/// When the lengths disagree.
pub fn cast<A: Element, B: Element>(cpu: &Cpu, x: &[A], y: &mut [B]) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    let y = Shares::new(y);
    for_elements(cpu, x.len(), size_of::<A>() + size_of::<B>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        cast_part(cpu.isa, &x[range], y);
    });
}

/// As [`cast`], on the calling thread alone.
///
/// # Panics
/// When the lengths disagree.
pub fn cast_part<A: Element, B: Element>(isa: Isa, x: &[A], y: &mut [B]) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    if A::DTYPE == B::DTYPE {
        y.copy_from_slice(bytemuck::cast_slice(x));
    } else {
        convert(isa, x, y);
    }
}

simd_fn! {
    fn convert[A: Element, B: Element](s: S, x: &[A], y: &mut [B]) {
        let mut i = 0;
        while i < x.len() {
            store_at(s, load_at(s, x, i, 0.0), y, i);
            i += S::LANES;
        }
    }
}
