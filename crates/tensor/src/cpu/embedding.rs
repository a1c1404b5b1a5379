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
use std::ops::Range;

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

/// The rows of a table that are here, where several ranks hold one table between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TablePart {
    /// The first row that is here.
    pub first: usize,
    /// Rows of the whole table.
    pub whole: usize,
}

impl TablePart {
    /// A table of `rows` rows that is all here.
    pub const fn all(rows: usize) -> TablePart {
        TablePart { first: 0, whole: rows }
    }

    /// The place among the `rows` rows that are here of row `index` of the whole; None if it is
    /// elsewhere.
    #[inline(always)]
    pub fn local(self, index: i32, rows: usize) -> Option<usize> {
        usize::try_from(index).ok()?.checked_sub(self.first).filter(|at| *at < rows)
    }

    fn check(self, rows: usize) {
        assert!(self.first + rows <= self.whole, "rows {}.. ({rows}) of a table of {}", self.first, self.whole);
    }
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
/// `table` is `[vocab, dim]`, `y` is `[tokens, dim]`. Of a table of which only a `part` is here,
/// rows that are elsewhere count as zeros.
///
/// # Errors
/// When an id or position has no row in the whole table.
///
/// # Panics
/// When the lengths disagree.
pub fn embedding<T: Element>(
    cpu: &Cpu,
    dim: usize,
    ids: &[i32],
    table: &[T],
    part: Option<TablePart>,
    positions: Option<(&[i32], &[T])>,
    y: &mut [T],
) -> Result<(), IndexError> {
    assert!(dim > 0 && table.len().is_multiple_of(dim), "{} elements are no rows of {dim}", table.len());
    assert_eq!(y.len(), ids.len() * dim, "length of y");
    let rows = table.len() / dim;
    let part = part.unwrap_or(TablePart::all(rows));
    part.check(rows);
    check_indices("token", ids, part.whole)?;
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
        gather(cpu.isa, dim, &ids[range], table, part, positions, y);
    });
    Ok(())
}

simd_fn! {
    fn gather[T: Element](
        s: S, dim: usize, ids: &[i32], table: &[T], part: TablePart, positions: Option<(&[i32], &[T])>, y: &mut [T]
    ) {
        let rows = table.len() / dim;
        for (t, (id, y)) in ids.iter().zip(y.chunks_exact_mut(dim)).enumerate() {
            // Empty where the row is elsewhere: loads beyond the end give zeros.
            let row = part.local(*id, rows).map_or(&[][..], |at| &table[at * dim..(at + 1) * dim]);
            match positions {
                None if row.is_empty() => y.fill(T::default()),
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
/// Of a table of which only a `part` is here, nothing is added for rows that are elsewhere.
///
/// # Errors
/// When an id has no row in the whole table; nothing is added then.
///
/// # Panics
/// When the lengths disagree.
pub fn embedding_backward<T: Element>(
    cpu: &Cpu,
    dim: usize,
    ids: &[i32],
    dy: &[T],
    dtable: &mut [f32],
    part: Option<TablePart>,
) -> Result<(), IndexError> {
    assert!(dim > 0 && dtable.len().is_multiple_of(dim), "{} elements are no rows of {dim}", dtable.len());
    assert_eq!(dy.len(), ids.len() * dim, "length of dy");
    let rows = dtable.len() / dim;
    let part = part.unwrap_or(TablePart::all(rows));
    part.check(rows);
    check_indices("token", ids, part.whole)?;
    // Four cache lines of f32 at least, 16 tasks at most.
    let width = dim.div_ceil(16).next_multiple_of(64);
    let dtable = Shares::new(dtable);
    for_tasks(cpu, dim.div_ceil(width), dy.len() * (size_of::<T>() + 8), |task| {
        let columns = task * width..(task * width + width).min(dim);
        scatter(cpu.isa, dim, columns, ids, dy, &dtable, (part, rows));
    });
    Ok(())
}

simd_fn! {
    fn scatter[T: Element](
        s: S, dim: usize, columns: Range<usize>, ids: &[i32], dy: &[T], dtable: &Shares<'_, f32>, here: (TablePart, usize)
    ) {
        let (part, rows) = here;
        for (id, dy) in ids.iter().zip(dy.chunks_exact(dim)) {
            let Some(row) = part.local(*id, rows) else { continue };
            // SAFETY: tasks own disjoint columns, and a task holds one row at a time.
            let row = unsafe { dtable.part(row * dim + columns.start..row * dim + columns.end) };
            let dy = &dy[columns.clone()];
            let mut i = 0;
            while i < dy.len() {
                store_at(s, s.add(load_at(s, row, i, 0.0), load_at(s, dy, i, 0.0)), row, i);
                i += S::LANES;
            }
        }
    }
}
