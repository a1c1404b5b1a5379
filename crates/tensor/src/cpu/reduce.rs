//! Reductions, softmax, top-k, transposition and cumulative sums over rows.
//!
//! Sums are made in `f32` lanes within a row; over many rows or a whole buffer, in blocks whose
//! size depends on the shape alone, added in order. Traffic: the input once in.

use crate::cpu::Cpu;
use crate::cpu::loss::max_and_lse;
use crate::cpu::rows::{
    block_rows, blocks, for_rows, for_tasks, largest, load_at, store_at, sum, sum_blocks, sum_of_squares_about,
};
use crate::cpu::threads::Shares;
use crate::dtype::{Element, Scalar};
use crate::simd_fn;
use std::cmp::Ordering;

/// The reduction of a row to one number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reduce {
    /// The sum.
    Sum,
    /// The mean; NaN of nothing.
    Mean,
    /// The largest element, negative infinity of nothing; NaN is passed over.
    Max,
}

fn rows_of(len: usize, columns: usize) -> usize {
    assert!(columns > 0 && len.is_multiple_of(columns), "{len} elements are no rows of {columns}");
    len / columns
}

/// Reduces every row of `x` `[rows, columns]` to one element of `y` `[rows]`.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn reduce_rows<T: Element, U: Element>(cpu: &Cpu, how: Reduce, columns: usize, x: &[T], y: &mut [U]) {
    let rows = rows_of(x.len(), columns);
    assert_eq!(y.len(), rows, "length of y");
    let y = Shares::new(y);
    for_rows(cpu, rows, columns * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        reduce_range(cpu.isa, how, columns, &x[range.start * columns..range.end * columns], y);
    });
}

simd_fn! {
    fn reduce_range[T: Element, U: Element](s: S, how: Reduce, columns: usize, x: &[T], y: &mut [U]) {
        for (x, y) in x.chunks_exact(columns).zip(y) {
            *y = U::from_f32(match how {
                Reduce::Sum => sum(s, x),
                Reduce::Mean => sum(s, x) / columns as f32,
                Reduce::Max => largest(s, x),
            });
        }
    }
}

/// Blocks of a whole buffer's sum are at least this long; they are few enough for the sums to lie
/// on the stack.
const SUM_BLOCKS: usize = 64;
const SUM_BLOCK_LEAST: usize = 4096;

/// The sum of all elements: blocks in `f32` lanes, the blocks' sums in `f64`, in a fixed order.
pub fn sum_all<T: Element>(cpu: &Cpu, x: &[T]) -> f64 {
    over_blocks(cpu, x, |block| sum_block(cpu.isa, block))
}

/// The sum of squares, for norms; infinite or NaN exactly when an element is.
///
/// Large elements whose squares overflow `f32` are summed in `f64`, so that a finite gradient is
/// never taken for a broken one.
pub fn sum_of_squares<T: Element>(cpu: &Cpu, x: &[T]) -> f64 {
    over_blocks(cpu, x, |block| {
        let sum = f64::from(squares_block(cpu.isa, block));
        // Too large or too small for f32, or not finite: add up again in f64.
        if (1e-30..1e38).contains(&sum) {
            return sum;
        }
        block.iter().map(|x| f64::from(x.to_f32()).powi(2)).sum()
    })
}

/// `sums[c]` = the sum of squares of `x[c * chunk ..]`, at most `chunk` elements: each chunk's bits
/// depend on its elements alone, so that whoever holds a whole number of chunks finds the same
/// sums. Added up in f32 lanes, in f64 where that is out of range.
pub fn chunk_sums_of_squares<T: Element>(cpu: &Cpu, chunk: usize, x: &[T], sums: &mut [f64]) {
    assert_eq!(sums.len(), x.len().div_ceil(chunk), "one sum a chunk");
    let shares = Shares::new(sums);
    for_rows(cpu, x.len().div_ceil(chunk), chunk * size_of::<T>(), |range| {
        for index in range {
            let part = &x[index * chunk..((index + 1) * chunk).min(x.len())];
            let mut sum = f64::from(squares_block(cpu.isa, part));
            if !(1e-30..1e38).contains(&sum) {
                sum = part.iter().map(|x| f64::from(x.to_f32()).powi(2)).sum();
            }
            // SAFETY: the ranges of a region do not overlap.
            unsafe { shares.part(index..index + 1)[0] = sum };
        }
    });
}

fn over_blocks<T: Element>(cpu: &Cpu, x: &[T], block_sum: impl Fn(&[T]) -> f64 + Sync) -> f64 {
    let step = x.len().div_ceil(SUM_BLOCKS).next_multiple_of(SUM_BLOCK_LEAST).max(SUM_BLOCK_LEAST);
    let mut sums = [0.0; SUM_BLOCKS];
    let shares = Shares::new(&mut sums);
    for_tasks(cpu, x.len().div_ceil(step), size_of_val(x), |task| {
        let block = &x[task * step..((task + 1) * step).min(x.len())];
        let sum = block.chunks(SUM_BLOCK_LEAST).map(&block_sum).sum();
        // SAFETY: every task has its own element.
        unsafe { shares.part(task..task + 1)[0] = sum };
    });
    sums.iter().sum()
}

simd_fn! {
    fn sum_block[T: Element](s: S, x: &[T]) -> f64 { f64::from(sum(s, x)) }
}

simd_fn! {
    fn squares_block[T: Element](s: S, x: &[T]) -> f32 { sum_of_squares_about(s, x, 0.0) }
}

/// `y[j] += sum over rows of x[row][j]`: bias gradients. `workspace` needs
/// [`backward_workspace`](crate::cpu::norm::backward_workspace) numbers.
pub fn sum_over_rows<T: Element>(cpu: &Cpu, x: &[T], y: &mut [f32], workspace: &mut [f32]) {
    let columns = y.len();
    let rows = rows_of(x.len(), columns);
    let (count, step) = (blocks(rows), block_rows(rows));
    let workspace = &mut workspace[..count * columns];
    let partials = Shares::new(&mut *workspace);
    for_tasks(cpu, count, size_of_val(x), |block| {
        // SAFETY: every block has its own part.
        let partial = unsafe { partials.part(block * columns..(block + 1) * columns) };
        partial.fill(0.0);
        add_rows(cpu.isa, &x[block * step * columns..((block + 1) * step).min(rows) * columns], partial);
    });
    sum_blocks(cpu, workspace, y);
}

simd_fn! {
    fn add_rows[T: Element](s: S, x: &[T], y: &mut [f32]) {
        for x in x.chunks_exact(y.len()) {
            let mut i = 0;
            while i < y.len() {
                store_at(s, s.add(load_at(s, y, i, 0.0), load_at(s, x, i, 0.0)), y, i);
                i += S::LANES;
            }
        }
    }
}

/// The index of the largest element of every row, the first of equals; NaN counts as smallest.
pub fn argmax_rows<T: Element>(cpu: &Cpu, columns: usize, x: &[T], y: &mut [u32]) {
    let rows = rows_of(x.len(), columns);
    assert_eq!(y.len(), rows, "length of y");
    let y = Shares::new(y);
    for_rows(cpu, rows, columns * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        for (x, y) in x[range.start * columns..range.end * columns].chunks_exact(columns).zip(y) {
            *y = argmax_row(cpu.isa, x);
        }
    });
}

simd_fn! {
    fn argmax_row[T: Element](s: S, x: &[T]) -> u32 {
        let largest = largest(s, x);
        x.iter().position(|x| x.to_f32() == largest).unwrap_or(0) as u32
    }
}

/// `y = softmax(x)` on every row.
pub fn softmax<T: Element>(cpu: &Cpu, columns: usize, x: &[T], y: &mut [T]) {
    over_rows(cpu, columns, x, y, |x, y| softmax_row(cpu.isa, x, y));
}

/// `y = x - log sum exp x` on every row.
pub fn log_softmax<T: Element>(cpu: &Cpu, columns: usize, x: &[T], y: &mut [T]) {
    over_rows(cpu, columns, x, y, |x, y| log_softmax_row(cpu.isa, x, y));
}

/// `y[j] = x[0] + ... + x[j]` on every row, in order, in `f32`.
pub fn cumulative_sum<T: Element>(cpu: &Cpu, columns: usize, x: &[T], y: &mut [T]) {
    over_rows(cpu, columns, x, y, |x, y| {
        let mut sum = 0.0;
        for (x, y) in x.iter().zip(y) {
            sum += x.to_f32();
            *y = T::from_f32(sum);
        }
    });
}

fn over_rows<T: Element>(cpu: &Cpu, columns: usize, x: &[T], y: &mut [T], row: impl Fn(&[T], &mut [T]) + Sync) {
    let rows = rows_of(x.len(), columns);
    assert_eq!(y.len(), x.len(), "length of y");
    let y = Shares::new(y);
    for_rows(cpu, rows, 2 * columns * size_of::<T>(), |range| {
        let span = range.start * columns..range.end * columns;
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(span.clone()) };
        for (x, y) in x[span].chunks_exact(columns).zip(y.chunks_exact_mut(columns)) {
            row(x, y);
        }
    });
}

simd_fn! {
    fn softmax_row[T: Element](s: S, x: &[T], y: &mut [T]) {
        let shift = s.splat(max_and_lse(s, x).1);
        let mut i = 0;
        while i < x.len() {
            store_at(s, s.exp(s.sub(load_at(s, x, i, 0.0), shift)), y, i);
            i += S::LANES;
        }
    }
}

simd_fn! {
    fn log_softmax_row[T: Element](s: S, x: &[T], y: &mut [T]) {
        let shift = s.splat(max_and_lse(s, x).1);
        let mut i = 0;
        while i < x.len() {
            store_at(s, s.sub(load_at(s, x, i, 0.0), shift), y, i);
            i += S::LANES;
        }
    }
}

/// The backward of [`softmax`] given its output: `dx = y (dy - sum(dy y))`.
pub fn softmax_backward<T: Element>(cpu: &Cpu, columns: usize, dy: &[T], y: &[T], dx: &mut [T]) {
    backward_rows(cpu, columns, dy, y, dx, |dy, y, dx| softmax_row_backward(cpu.isa, dy, y, dx));
}

/// The backward of [`log_softmax`] given its output: `dx = dy - e^y sum(dy)`.
pub fn log_softmax_backward<T: Element>(cpu: &Cpu, columns: usize, dy: &[T], y: &[T], dx: &mut [T]) {
    backward_rows(cpu, columns, dy, y, dx, |dy, y, dx| log_softmax_row_backward(cpu.isa, dy, y, dx));
}

fn backward_rows<T: Element>(
    cpu: &Cpu,
    columns: usize,
    dy: &[T],
    y: &[T],
    dx: &mut [T],
    row: impl Fn(&[T], &[T], &mut [T]) + Sync,
) {
    let rows = rows_of(y.len(), columns);
    assert_eq!((dy.len(), dx.len()), (y.len(), y.len()), "lengths of dy and dx");
    let dx = Shares::new(dx);
    for_rows(cpu, rows, 3 * columns * size_of::<T>(), |range| {
        for index in range {
            let span = index * columns..(index + 1) * columns;
            // SAFETY: every row belongs to one range.
            row(&dy[span.clone()], &y[span.clone()], unsafe { dx.part(span) });
        }
    });
}

simd_fn! {
    fn softmax_row_backward[T: Element](s: S, dy: &[T], y: &[T], dx: &mut [T]) {
        let mut acc = s.splat(0.0);
        let mut i = 0;
        while i < y.len() {
            acc = s.fma(load_at(s, dy, i, 0.0), load_at(s, y, i, 0.0), acc);
            i += S::LANES;
        }
        let dot = s.splat(s.reduce_sum(acc));
        let mut i = 0;
        while i < y.len() {
            store_at(s, s.mul(load_at(s, y, i, 0.0), s.sub(load_at(s, dy, i, 0.0), dot)), dx, i);
            i += S::LANES;
        }
    }
}

simd_fn! {
    fn log_softmax_row_backward[T: Element](s: S, dy: &[T], y: &[T], dx: &mut [T]) {
        let total = s.splat(-sum(s, dy));
        let mut i = 0;
        while i < y.len() {
            store_at(s, s.fma(s.exp(load_at(s, y, i, 0.0)), total, load_at(s, dy, i, 0.0)), dx, i);
            i += S::LANES;
        }
    }
}

/// The `k` largest of every row, largest first, the earlier of equals first: `values` and `indices`
/// are `[rows, k]`. NaN counts as smallest.
///
/// # Panics
/// When `k` is zero or more than `columns`, or the lengths disagree.
pub fn top_k<T: Element>(cpu: &Cpu, columns: usize, k: usize, x: &[T], values: &mut [T], indices: &mut [u32]) {
    let rows = rows_of(x.len(), columns);
    assert!(k > 0 && k <= columns, "the {k} largest of {columns}");
    assert_eq!((values.len(), indices.len()), (rows * k, rows * k), "lengths of values and indices");
    let (values, indices) = (Shares::new(values), Shares::new(indices));
    for_rows(cpu, rows, columns * size_of::<T>(), |range| {
        for row in range {
            // SAFETY: every row belongs to one range.
            let (values, indices) =
                unsafe { (values.part(row * k..(row + 1) * k), indices.part(row * k..(row + 1) * k)) };
            top_k_row(&x[row * columns..(row + 1) * columns], values, indices);
        }
    });
}

fn top_k_row<T: Element>(x: &[T], values: &mut [T], indices: &mut [u32]) {
    let key = |index: u32| {
        let x = x[index as usize].to_f32();
        if x.is_nan() { f32::NEG_INFINITY } else { x }
    };
    let larger_first = |a: &u32, b: &u32| key(*b).partial_cmp(&key(*a)).unwrap_or(Ordering::Equal).then(a.cmp(b));
    // Insertion into the sorted best of those seen so far: a random row of n inserts k ln(n / k)
    // times after the first k.
    let k = indices.len();
    let mut held = 0;
    for index in 0..x.len() as u32 {
        if held == k && larger_first(&index, &indices[k - 1]) == Ordering::Greater {
            continue;
        }
        let place = indices[..held].partition_point(|held| larger_first(held, &index) == Ordering::Less);
        held = (held + 1).min(k);
        indices[place..held].rotate_right(1);
        indices[place] = index;
    }
    for (value, index) in values.iter_mut().zip(indices) {
        *value = x[*index as usize];
    }
}

/// `y = x^T`: `x` is `[rows, columns]`, `y` is `[columns, rows]`.
pub fn transpose<T: Scalar>(cpu: &Cpu, [rows, columns]: [usize; 2], x: &[T], y: &mut [T]) {
    assert_eq!((x.len(), y.len()), (rows * columns, rows * columns), "lengths of x and y");
    // Square tiles whose lines of both matrices stay in the first-level cache.
    const TILE: usize = 32;
    let y = Shares::new(y);
    for_rows(cpu, columns.div_ceil(TILE), 2 * TILE * rows * size_of::<T>(), |range| {
        for first in range.map(|tile| tile * TILE) {
            let last = (first + TILE).min(columns);
            // SAFETY: every tile column, a band of rows of `y`, belongs to one range.
            let band = unsafe { y.part(first * rows..last * rows) };
            for top in (0..rows).step_by(TILE) {
                let bottom = (top + TILE).min(rows);
                for column in first..last {
                    let line = &mut band[(column - first) * rows..][top..bottom];
                    for (row, y) in (top..bottom).zip(line) {
                        *y = x[row * columns + column];
                    }
                }
            }
        }
    });
}
