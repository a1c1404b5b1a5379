//! Products with a handful of rows, as in generation: `y = x wᵀ` for up to [`ROWS_MAX`] rows of
//! `x`.
//!
//! Every weight is used once per row, so the product is as fast as the weights arrive from memory,
//! and packing them would double that traffic. Instead rows of `w` are read as they lie: four of
//! them at a time run along the shared dimension against all rows of `x` (widened to `f32`
//! beforehand), each pair with its own vector of partial sums, reduced at the end.

use super::MatRef;
use super::epilogue::{Sink, finish};
use crate::cpu::Cpu;
use crate::cpu::simd::Simd;
use crate::dtype::Element;
use crate::simd_fn;
use std::cell::Cell;

/// Up to this many rows, the weights' way from memory costs more than the arithmetic.
pub(super) const ROWS_MAX: usize = 4;
/// Rows of `w` that run together: 4 x 4 sums leave registers for the operands.
const TOGETHER: usize = 4;

thread_local! {
    static WIDE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// `sums[i, j] = Σ_k x[i, k] w[j, k]`, handed to `sink`.
pub(super) fn product<T: Element, S: Sink>(cpu: &Cpu, x: MatRef<T>, w: MatRef<T>, sink: &S) {
    debug_assert!(!sink.seeded(), "sums of few rows start from zero");
    let (m, n, k) = (x.rows(), w.rows(), x.cols());
    if m == 0 || n == 0 {
        return;
    }
    let mut wide = WIDE.take();
    wide.clear();
    wide.extend((0..m).flat_map(|i| x.row(i).iter().map(|x| x.to_f32())));
    // A task reads some 64 KiB of weights, a few microseconds' worth.
    const TASK_COLS_MAX: usize = 256;
    let grain = (65_536 / (k * size_of::<T>()).max(1)).next_multiple_of(TOGETHER).clamp(TOGETHER, TASK_COLS_MAX);
    cpu.threads.for_ranges(n, grain, |cols| {
        let mut sums = [0.0; ROWS_MAX * TASK_COLS_MAX];
        let count = cols.len();
        dot_products(cpu.isa, &wide, m, k, w.row_range(cols.clone()), &mut sums);
        // Tasks have disjoint columns.
        finish(cpu.isa, sink, 0, cols.start, MatRef::new(&sums, m, count));
    });
    WIDE.set(wide);
}

simd_fn! {
    /// `sums[i, j] = x[i] · w[j]`, `sums` being `m` rows of `w.rows()`.
    fn dot_products[T: Element](s: S, x: &[f32], m: usize, k: usize, w: MatRef<T>, sums: &mut [f32]) {
        match m {
            1 => dots::<S, T, 1>(s, x, k, w, sums),
            2 => dots::<S, T, 2>(s, x, k, w, sums),
            3 => dots::<S, T, 3>(s, x, k, w, sums),
            _ => dots::<S, T, ROWS_MAX>(s, x, k, w, sums),
        }
    }
}

#[inline(always)]
fn dots<S: Simd, T: Element, const M: usize>(s: S, x: &[f32], k: usize, w: MatRef<T>, sums: &mut [f32]) {
    let n = w.rows();
    let x: [&[f32]; M] = std::array::from_fn(|i| &x[i * k..][..k]);
    for first in (0..n).step_by(TOGETHER) {
        // Behind the last row the last one runs again; its sums are dropped.
        let rows: [&[T]; TOGETHER] = std::array::from_fn(|j| w.row((first + j).min(n - 1)));
        let mut acc = [[s.splat(0.0); TOGETHER]; M];
        let mut at = 0;
        while at + S::LANES <= k {
            let w: [S::F; TOGETHER] = std::array::from_fn(|j| T::load(s, &rows[j][at..at + S::LANES]));
            for i in 0..M {
                let x = s.load(&x[i][at..at + S::LANES]);
                for j in 0..TOGETHER {
                    acc[i][j] = s.fma(x, w[j], acc[i][j]);
                }
            }
            at += S::LANES;
        }
        if at < k {
            for i in 0..M {
                let x = f32::load_partial(s, &x[i][at..], 0.0);
                for j in 0..TOGETHER {
                    acc[i][j] = s.fma(x, T::load_partial(s, &rows[j][at..], 0.0), acc[i][j]);
                }
            }
        }
        for i in 0..M {
            for j in 0..TOGETHER.min(n - first) {
                sums[i * n + first + j] = s.reduce_sum(acc[i][j]);
            }
        }
    }
}
