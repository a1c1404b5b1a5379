//! Embedding lookup and its gradient.
//!
//! Forward copies one table row per token (and adds a row of a position table). Backward adds each
//! token's gradient to its row in `f32`. Tokens that share a row must be added in one order
//! whatever the number of threads: the work is cut by **columns**, and every task walks all tokens
//! in order over its own columns. No sorting, no atomics, no workspace, and a frequent token costs
//! no balance.
//!
//! Traffic of backward: `tokens dim` elements in, and the same number of `f32` in and out.

use crate::cpu::Cpu;
use crate::cpu::rows::{for_rows, for_tasks, load_at, store_at};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

/// An index, such as a token, outside what it indexes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {index} (entry {entry}) is outside 0..{limit}")]
pub struct IndexError {
    /// The index that was checked: `token`, `position`, `target`.
    pub what: &'static str,
    /// The index.
    pub index: i32,
    /// Where in the list of indices it stands.
    pub entry: usize,
    /// The first index that is too large.
    pub limit: usize,
}

/// Checks that every index is in `0..limit`.
pub(crate) fn check_indices(what: &'static str, indices: &[i32], limit: usize) -> Result<(), IndexError> {
    match indices.iter().position(|index| *index < 0 || *index as usize >= limit) {
        None => Ok(()),
        Some(entry) => Err(IndexError { what, index: indices[entry], entry, limit }),
    }
}

/// `y[t] = table[ids[t]]`, and with `positions = (p, position_table)` also
/// `+ position_table[p[t]]`.
///
/// `table` is `[vocab, dim]`, `y` is `[tokens, dim]`.
///
/// # Errors
/// When an id or position has no row.
///
/// # Panics
/// When the lengths disagree.
pub fn embedding<T: Element>(
    cpu: &Cpu,
    dim: usize,
    ids: &[i32],
    table: &[T],
    positions: Option<(&[i32], &[T])>,
    y: &mut [T],
) -> Result<(), IndexError> {
    assert!(dim > 0 && table.len().is_multiple_of(dim), "{} elements are no rows of {dim}", table.len());
    assert_eq!(y.len(), ids.len() * dim, "length of y");
    check_indices("token", ids, table.len() / dim)?;
    if let Some((positions, table)) = positions {
        assert_eq!(positions.len(), ids.len(), "one position a token");
        assert!(table.len().is_multiple_of(dim), "{} elements are no rows of {dim}", table.len());
        check_indices("position", positions, table.len() / dim)?;
    }
    let y = Shares::new(y);
    for_rows(cpu, ids.len(), 2 * dim * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.start * dim..range.end * dim) };
        let positions = positions.map(|(positions, table)| (&positions[range.clone()], table));
        gather(cpu.isa, dim, &ids[range], table, positions, y);
    });
    Ok(())
}

simd_fn! {
    fn gather[T: Element](s: S, dim: usize, ids: &[i32], table: &[T], positions: Option<(&[i32], &[T])>, y: &mut [T]) {
        for (t, (id, y)) in ids.iter().zip(y.chunks_exact_mut(dim)).enumerate() {
            let row = &table[*id as usize * dim..][..dim];
            match positions {
                None => y.copy_from_slice(row),
                Some((positions, table)) => {
                    let position = &table[positions[t] as usize * dim..][..dim];
                    let mut i = 0;
                    while i < dim {
                        store_at(s, s.add(load_at(s, row, i, 0.0), load_at(s, position, i, 0.0)), y, i);
                        i += S::LANES;
                    }
                }
            }
        }
    }
}

/// `dtable[ids[t]] += dy[t]` for `t` in order; `dy` is `[tokens, dim]`, `dtable` is `[vocab, dim]`.
///
/// # Errors
/// When an id has no row; nothing is added then.
///
/// # Panics
/// When the lengths disagree.
pub fn embedding_backward<T: Element>(
    cpu: &Cpu,
    dim: usize,
    ids: &[i32],
    dy: &[T],
    dtable: &mut [f32],
) -> Result<(), IndexError> {
    assert!(dim > 0 && dtable.len().is_multiple_of(dim), "{} elements are no rows of {dim}", dtable.len());
    assert_eq!(dy.len(), ids.len() * dim, "length of dy");
    check_indices("token", ids, dtable.len() / dim)?;
    // Four cache lines of f32 at least, 16 tasks at most.
    let width = dim.div_ceil(16).next_multiple_of(64);
    let dtable = Shares::new(dtable);
    for_tasks(cpu, dim.div_ceil(width), dy.len() * (size_of::<T>() + 8), |task| {
        scatter(cpu.isa, dim, task * width, width.min(dim - task * width), ids, dy, &dtable);
    });
    Ok(())
}

simd_fn! {
    fn scatter[T: Element](s: S, dim: usize, first: usize, width: usize, ids: &[i32], dy: &[T], dtable: &Shares<'_, f32>) {
        for (id, dy) in ids.iter().zip(dy.chunks_exact(dim)) {
            let at = *id as usize * dim + first;
            // SAFETY: tasks own disjoint columns, and a task holds one row at a time.
            let row = unsafe { dtable.part(at..at + width) };
            let dy = &dy[first..first + width];
            let mut i = 0;
            while i < width {
                store_at(s, s.add(load_at(s, row, i, 0.0), load_at(s, dy, i, 0.0)), row, i);
                i += S::LANES;
            }
        }
    }
}
