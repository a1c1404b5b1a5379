//! Reading and adding by indices.
//!
//! Positions that share an index are added in the order of the positions, whatever the number of
//! threads: work is cut along what indices do not cross (rows, or columns of what an index names),
//! never along the list of indices. Sums are made in `f32`. Indices are checked before anything is
//! written.

use crate::cpu::Cpu;
use crate::cpu::embedding::IndexError;
use crate::cpu::rows::{for_rows, for_tasks};
use crate::cpu::threads::Shares;
use crate::dtype::{Element, Scalar};

/// Checks that every index is below `limit`. Indices are unsigned; signed ones are given by their
/// bits, so that a negative one is too large, and are reported as signed.
pub fn check(indices: &[u32], limit: usize) -> Result<(), IndexError> {
    let limit = limit.min(1 << 31);
    match indices.iter().position(|index| *index as usize >= limit) {
        None => Ok(()),
        Some(entry) => Err(IndexError { what: "index", index: indices[entry] as i32, entry, limit }),
    }
}

/// `y[o, i, ..] = x[o, indices[i], ..]`: `x` is `[outer, n, inner]`, `y` is
/// `[outer, indices.len(), inner]`.
///
/// # Errors
/// When an index is not below `n`, here and below.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn select<T: Scalar>(
    cpu: &Cpu,
    [outer, n, inner]: [usize; 3],
    indices: &[u32],
    x: &[T],
    y: &mut [T],
) -> Result<(), IndexError> {
    let k = indices.len();
    assert_eq!((x.len(), y.len()), (outer * n * inner, outer * k * inner), "lengths of x and y");
    check(indices, n)?;
    let y = Shares::new(y);
    for_rows(cpu, outer * k, 2 * inner * size_of::<T>(), |range| {
        for row in range {
            // SAFETY: every row belongs to one range.
            let y = unsafe { y.part(row * inner..(row + 1) * inner) };
            let from = (row / k * n + indices[row % k] as usize) * inner;
            y.copy_from_slice(&x[from..from + inner]);
        }
    });
    Ok(())
}

/// The reverse of [`select`]: `sums[o, indices[i], ..] += dy[o, i, ..]`, in the order of `i`.
pub fn add<T: Element>(
    cpu: &Cpu,
    [outer, n, inner]: [usize; 3],
    indices: &[u32],
    dy: &[T],
    sums: &mut [f32],
) -> Result<(), IndexError> {
    let k = indices.len();
    assert_eq!((sums.len(), dy.len()), (outer * n * inner, outer * k * inner), "lengths of sums and dy");
    check(indices, n)?;
    // Bands of columns: whole cache lines, 16 tasks for each outer position at most.
    let width = inner.div_ceil(16).next_multiple_of(64);
    let bands = inner.div_ceil(width);
    let sums = Shares::new(sums);
    for_tasks(cpu, outer * bands, dy.len() * (size_of::<T>() + 8), |task| {
        let (o, first) = (task / bands, task % bands * width);
        let width = width.min(inner - first);
        for (i, index) in indices.iter().enumerate() {
            let at = (o * n + *index as usize) * inner + first;
            // SAFETY: tasks own disjoint columns of disjoint outer positions, and a task holds one
            // part at a time.
            let sums = unsafe { sums.part(at..at + width) };
            let dy = &dy[(o * k + i) * inner + first..][..width];
            for (sum, dy) in sums.iter_mut().zip(dy) {
                *sum += dy.to_f32();
            }
        }
    });
    Ok(())
}

/// `y[r, j] = x[r, indices[r, j]]`: `x` is `[rows, n]`, `indices` and `y` are `[rows, k]`.
pub fn gather_rows<T: Scalar>(
    cpu: &Cpu,
    [n, k]: [usize; 2],
    indices: &[u32],
    x: &[T],
    y: &mut [T],
) -> Result<(), IndexError> {
    let rows = x.len().checked_div(n).unwrap_or(0);
    assert_eq!((indices.len(), y.len()), (rows * k, rows * k), "lengths of indices and y");
    check(indices, n)?;
    let y = Shares::new(y);
    for_rows(cpu, rows, k * (4 + 2 * size_of::<T>()), |range| {
        for row in range {
            let (x, span) = (&x[row * n..(row + 1) * n], row * k..(row + 1) * k);
            // SAFETY: every row belongs to one range.
            let y = unsafe { y.part(span.clone()) };
            for (y, index) in y.iter_mut().zip(&indices[span]) {
                *y = x[*index as usize];
            }
        }
    });
    Ok(())
}

/// The reverse of [`gather_rows`]: `sums[r, indices[r, j]] += dy[r, j]`, in the order of `j`.
pub fn scatter_add_rows<T: Element>(
    cpu: &Cpu,
    [n, k]: [usize; 2],
    indices: &[u32],
    dy: &[T],
    sums: &mut [f32],
) -> Result<(), IndexError> {
    let rows = sums.len().checked_div(n).unwrap_or(0);
    assert_eq!((indices.len(), dy.len()), (rows * k, rows * k), "lengths of indices and dy");
    check(indices, n)?;
    let sums = Shares::new(sums);
    for_rows(cpu, rows, k * (4 + size_of::<T>()) + 8 * n, |range| {
        for row in range {
            let span = row * k..(row + 1) * k;
            // SAFETY: every row belongs to one range.
            let sums = unsafe { sums.part(row * n..(row + 1) * n) };
            for (dy, index) in dy[span.clone()].iter().zip(&indices[span]) {
                sums[*index as usize] += dy.to_f32();
            }
        }
    });
    Ok(())
}

/// `y[i, c] = 1` where `c` is `indices[i]`, else 0: `y` is `[indices.len(), classes]`.
pub fn one_hot<T: Element>(cpu: &Cpu, classes: usize, indices: &[u32], y: &mut [T]) -> Result<(), IndexError> {
    assert_eq!(y.len(), indices.len() * classes, "length of y");
    check(indices, classes)?;
    let y = Shares::new(y);
    for_rows(cpu, indices.len(), classes * size_of::<T>(), |range| {
        for row in range {
            // SAFETY: every row belongs to one range.
            let y = unsafe { y.part(row * classes..(row + 1) * classes) };
            y.fill(T::default());
            y[indices[row] as usize] = T::from_f32(1.0);
        }
    });
    Ok(())
}
