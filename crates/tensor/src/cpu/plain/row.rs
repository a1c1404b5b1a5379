//! Functions of whole rows beyond [`reduce`](crate::cpu::reduce): variance, the gradient of a
//! maximum, sums from the end, and sums of squared differences.
//!
//! Sums within a row are made in `f32` lanes. Variance takes two passes, about the mean, so that a
//! large mean costs no digits. Traffic: each operand once in, the result once out. Rows that fit a
//! cache are read from it the second time.

use crate::cpu::Cpu;
use crate::cpu::rows::{for_elements, for_rows, for_tasks, load_at, store_at, sum, sum_of_squares_about};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

fn rows_of(len: usize, columns: usize) -> usize {
    assert!(columns > 0 && len.is_multiple_of(columns), "{len} elements are no rows of {columns}");
    len / columns
}

/// `variance = sum((x - mean)^2) / divisor` of every row, and the means: `x` is `[rows, columns]`.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn variance<T: Element>(cpu: &Cpu, columns: usize, divisor: f32, x: &[T], variance: &mut [T], mean: &mut [f32]) {
    let rows = rows_of(x.len(), columns);
    assert_eq!((variance.len(), mean.len()), (rows, rows), "lengths of variance and mean");
    let (variance, mean) = (Shares::new(variance), Shares::new(mean));
    for_rows(cpu, rows, columns * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let (variance, mean) = unsafe { (variance.part(range.clone()), mean.part(range.clone())) };
        variance_range(cpu.isa, columns, divisor, &x[range.start * columns..range.end * columns], variance, mean);
    });
}

simd_fn! {
    fn variance_range[T: Element](s: S, columns: usize, divisor: f32, x: &[T], variance: &mut [T], mean: &mut [f32]) {
        for (x, (variance, mean)) in x.chunks_exact(columns).zip(variance.iter_mut().zip(mean)) {
            *mean = sum(s, x) / columns as f32;
            *variance = T::from_f32(sum_of_squares_about(s, x, *mean) / divisor);
        }
    }
}

/// The backward of [`variance`]: `dx = 2 dy (x - mean) / divisor`; `dy` is `[rows]`.
pub fn variance_backward<T: Element>(
    cpu: &Cpu,
    columns: usize,
    divisor: f32,
    dy: &[T],
    x: &[T],
    mean: &[f32],
    dx: &mut [T],
) {
    let rows = rows_of(x.len(), columns);
    assert_eq!((dy.len(), mean.len(), dx.len()), (rows, rows, x.len()), "lengths of dy, mean and dx");
    let dx = Shares::new(dx);
    for_rows(cpu, rows, 2 * columns * size_of::<T>(), |range| {
        for row in range {
            let span = row * columns..(row + 1) * columns;
            // SAFETY: every row belongs to one range.
            let dx = unsafe { dx.part(span.clone()) };
            centred(cpu.isa, 2.0 * dy[row].to_f32() / divisor, &x[span], mean[row], dx);
        }
    });
}

simd_fn! {
    fn centred[T: Element](s: S, factor: f32, x: &[T], centre: f32, y: &mut [T]) {
        let (factor, centre) = (s.splat(factor), s.splat(centre));
        let mut i = 0;
        while i < x.len() {
            store_at(s, s.mul(s.sub(load_at(s, x, i, 0.0), centre), factor), y, i);
            i += S::LANES;
        }
    }
}

/// The gradient of a row's maximum `y`: `dy` in equal parts to all elements that are the maximum.
pub fn max_backward<T: Element>(cpu: &Cpu, columns: usize, dy: &[T], x: &[T], y: &[T], dx: &mut [T]) {
    let rows = rows_of(x.len(), columns);
    assert_eq!((dy.len(), y.len(), dx.len()), (rows, rows, x.len()), "lengths of dy, y and dx");
    let dx = Shares::new(dx);
    for_rows(cpu, rows, 2 * columns * size_of::<T>(), |range| {
        for row in range {
            let span = row * columns..(row + 1) * columns;
            // SAFETY: every row belongs to one range.
            let dx = unsafe { dx.part(span.clone()) };
            let (x, max) = (&x[span], y[row]);
            let count = x.iter().filter(|x| **x == max).count();
            let part = T::from_f32(dy[row].to_f32() / count as f32);
            for (dx, x) in dx.iter_mut().zip(x) {
                *dx = if *x == max { part } else { T::default() };
            }
        }
    });
}

/// `y[j] = x[j] + x[j + 1] + ...` on every row, from the end, in `f32`: the gradient of a
/// cumulative sum.
pub fn reverse_cumulative_sum<T: Element>(cpu: &Cpu, columns: usize, x: &[T], y: &mut [T]) {
    let rows = rows_of(x.len(), columns);
    assert_eq!(y.len(), x.len(), "length of y");
    let y = Shares::new(y);
    for_rows(cpu, rows, 2 * columns * size_of::<T>(), |range| {
        for row in range {
            let span = row * columns..(row + 1) * columns;
            // SAFETY: every row belongs to one range.
            let y = unsafe { y.part(span.clone()) };
            let mut sum = 0.0;
            for (x, y) in x[span].iter().zip(y).rev() {
                sum += x.to_f32();
                *y = T::from_f32(sum);
            }
        }
    });
}

/// Blocks of a sum over a whole buffer, a function of its length alone.
const BLOCKS: usize = 64;
/// Elements of the parts whose sums are made in `f32`.
const PART: usize = 4096;

/// The sum of `(a - b)^2`: parts of 4,096 in `f32` lanes, their sums in `f64`, in a fixed order.
pub fn squared_error<T: Element>(cpu: &Cpu, a: &[T], b: &[T]) -> f64 {
    assert_eq!(a.len(), b.len(), "lengths of a and b");
    let step = a.len().div_ceil(BLOCKS).next_multiple_of(PART).max(PART);
    let mut sums = [0.0; BLOCKS];
    let shares = Shares::new(&mut sums);
    for_tasks(cpu, a.len().div_ceil(step), 2 * size_of_val(a), |task| {
        let range = task * step..((task + 1) * step).min(a.len());
        let parts = a[range.clone()].chunks(PART).zip(b[range].chunks(PART));
        let sum = parts.map(|(a, b)| f64::from(squared_error_of(cpu.isa, a, b))).sum();
        // SAFETY: every task has its own element.
        unsafe { shares.part(task..task + 1)[0] = sum };
    });
    sums.iter().sum()
}

simd_fn! {
    fn squared_error_of[T: Element](s: S, a: &[T], b: &[T]) -> f32 {
        let mut acc = s.splat(0.0);
        let mut i = 0;
        while i < a.len() {
            let d = s.sub(load_at(s, a, i, 0.0), load_at(s, b, i, 0.0));
            acc = s.fma(d, d, acc);
            i += S::LANES;
        }
        s.reduce_sum(acc)
    }
}

/// `y = factor (a - b)`.
pub fn scaled_difference<T: Element>(cpu: &Cpu, factor: f32, a: &[T], b: &[T], y: &mut [T]) {
    assert_eq!((b.len(), y.len()), (a.len(), a.len()), "lengths of b and y");
    let y = Shares::new(y);
    for_elements(cpu, a.len(), 3 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        difference(cpu.isa, factor, &a[range.clone()], &b[range], y);
    });
}

simd_fn! {
    fn difference[T: Element](s: S, factor: f32, a: &[T], b: &[T], y: &mut [T]) {
        let factor = s.splat(factor);
        let mut i = 0;
        while i < a.len() {
            store_at(s, s.mul(s.sub(load_at(s, a, i, 0.0), load_at(s, b, i, 0.0)), factor), y, i);
            i += S::LANES;
        }
    }
}
