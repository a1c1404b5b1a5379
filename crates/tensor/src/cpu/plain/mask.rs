//! Masks: `u32` numbers that are 0 (unset) or not (set).

use crate::cpu::Cpu;
use crate::cpu::rows::{for_elements, for_rows};
use crate::cpu::threads::Shares;
use crate::dtype::{Element, Scalar};

/// The side of a mask: its set or its unset elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Side {
    /// Those that are not 0.
    Set,
    /// Those that are 0.
    Unset,
}

/// A function of masks; results are 0 or 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Logic {
    /// Set in both.
    And,
    /// Set in either.
    Or,
    /// Set in one alone.
    Xor,
}

/// `y = value` where the mask is on `side`, else `x`.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn fill<T: Element>(cpu: &Cpu, mask: &[u32], side: Side, value: f32, x: &[T], y: &mut [T]) {
    assert_eq!((x.len(), y.len()), (mask.len(), mask.len()), "lengths of x and y");
    let (y, value) = (Shares::new(y), T::from_f32(value));
    for_elements(cpu, x.len(), 2 * size_of::<T>() + 4, |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        for ((y, x), mask) in y.iter_mut().zip(&x[range.clone()]).zip(&mask[range]) {
            *y = if (*mask != 0) == (side == Side::Set) { value } else { *x };
        }
    });
}

/// `y = f(a, b)`.
pub fn logic(cpu: &Cpu, f: Logic, a: &[u32], b: &[u32], y: &mut [u32]) {
    assert_eq!((b.len(), y.len()), (a.len(), a.len()), "lengths of b and y");
    let y = Shares::new(y);
    for_elements(cpu, a.len(), 12, |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        for ((y, a), b) in y.iter_mut().zip(&a[range.clone()]).zip(&b[range]) {
            let (a, b) = (*a != 0, *b != 0);
            *y = u32::from(match f {
                Logic::And => a && b,
                Logic::Or => a || b,
                Logic::Xor => a != b,
            });
        }
    });
}

/// `y = 1` where the mask is unset, else 0.
pub fn not(cpu: &Cpu, mask: &[u32], y: &mut [u32]) {
    map(cpu, mask, y, |mask| u32::from(mask == 0));
}

/// `y = x` as a float, rounded to nearest.
pub fn widen<I: Scalar, T: Element>(cpu: &Cpu, x: &[I], y: &mut [T], number: impl Fn(I) -> f32 + Sync) {
    map(cpu, x, y, |x| T::from_f32(number(x)));
}

fn map<A: Scalar, B: Scalar>(cpu: &Cpu, x: &[A], y: &mut [B], f: impl Fn(A) -> B + Sync) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    let y = Shares::new(y);
    for_elements(cpu, x.len(), size_of::<A>() + size_of::<B>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        y.iter_mut().zip(&x[range]).for_each(|(y, x)| *y = f(*x));
    });
}

/// `y[q, k] = 1` where key `k` is no later than query `q`, else 0: `y` is `[queries, keys]`, and
/// the last query stands at the last key.
pub fn causal(cpu: &Cpu, [queries, keys]: [usize; 2], y: &mut [u32]) {
    assert_eq!(y.len(), queries * keys, "length of y");
    assert!(queries <= keys, "{queries} queries of {keys} keys");
    let y = Shares::new(y);
    for_rows(cpu, queries, 4 * keys, |range| {
        for query in range {
            // SAFETY: every row belongs to one range.
            let row = unsafe { y.part(query * keys..(query + 1) * keys) };
            let (seen, hidden) = row.split_at_mut(keys - queries + query + 1);
            seen.fill(1);
            hidden.fill(0);
        }
    });
}
