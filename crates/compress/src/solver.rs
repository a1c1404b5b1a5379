//! Rounding a matrix one column after another, where later columns make up for the error of earlier
//! ones (Frantar & Alistarh 2022; Frantar et al. 2023, algorithm 1).
//!
//! Of the squared error of a layer's outputs, `(w - q) H (w - q)ᵀ` for each row, column j adds
//! `e_j²` with `e_j = (w_j - q_j) / R_jj`, once the later columns have moved by `-e_j R_j`. R is
//! the factor of the inverse of H ([`inverse_factor`](crate::factor::inverse_factor)). Moves of
//! columns in other blocks are made together, as one product.

use std::ops::Range;
use std::thread;
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::cpu::gemm::{MatMut, MatRef, Transpose, matmul};

/// Columns of a block.
pub const BLOCK: usize = 128;

/// The columns of a block whose parts of `multiple` columns stay together.
pub fn block_of(multiple: usize) -> usize {
    if multiple >= BLOCK { multiple } else { BLOCK / multiple * multiple }
}

/// A column of one row as [`solve`] comes to it.
#[derive(Clone, Copy, Debug)]
pub struct Place<'w> {
    /// The row.
    pub row: usize,
    /// The column.
    pub column: usize,
    /// The place of the column in its block.
    pub in_block: usize,
    /// The weights of the row from this column to the end of the block, as they are by now.
    pub rest: &'w [f32],
}

/// Rounds `weights` [n, k] in place with the factor R, [k, k].
///
/// `prepare` sees the columns of a block, and all weights as they are by then. `round` gives the
/// value that stands at a place; `rows` is its memory of each row.
pub fn solve<S: Send, P: Sync>(
    cpu: &Cpu,
    weights: &mut [f32],
    factor: &[f32],
    rows: &mut [S],
    block: usize,
    mut prepare: impl FnMut(Range<usize>, &[f32]) -> P,
    round: impl Fn(&P, &mut S, Place<'_>) -> f32 + Sync,
) {
    let n = rows.len();
    let k = weights.len() / n.max(1);
    let mut errors = vec![0.0; n * block];
    for start in (0..k).step_by(block) {
        let columns = start..k.min(start + block);
        let width = columns.len();
        let prepared = prepare(columns.clone(), weights);
        let each = n.div_ceil(cpu.threads.count()).max(1);
        thread::scope(|scope| {
            let shares = weights.chunks_mut(each * k).zip(rows.chunks_mut(each)).zip(errors.chunks_mut(each * block));
            for (share, ((weights, rows), errors)) in shares.enumerate() {
                let (prepared, round, columns) = (&prepared, &round, columns.clone());
                scope.spawn(move || {
                    let lines = weights.chunks_exact_mut(k).zip(rows).zip(errors.chunks_exact_mut(block));
                    for (number, ((line, state), errors)) in lines.enumerate() {
                        let line = &mut line[columns.clone()];
                        for i in 0..width {
                            let column = columns.start + i;
                            let place = Place { row: share * each + number, column, in_block: i, rest: &line[i..] };
                            let rounded = round(prepared, state, place);
                            let steps = &factor[column * k..][columns.clone()];
                            let error = (line[i] - rounded) / steps[i];
                            line[i] = rounded;
                            errors[i] = error;
                            line[i + 1..].iter_mut().zip(&steps[i + 1..]).for_each(|(w, step)| *w -= error * step);
                        }
                    }
                });
            }
        });
        if columns.end < k {
            let errors = MatRef::with_stride(&errors, n, width, block);
            let steps = MatRef::with_stride(&factor[start * k + columns.end..], width, k - columns.end, k);
            let rest = MatMut::with_stride(&mut weights[columns.end..], n, k - columns.end, k);
            matmul(cpu, errors, Transpose::No, steps, Transpose::No, -1.0, 1.0, rest);
        }
    }
}
