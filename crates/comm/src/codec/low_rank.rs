//! Kernels of PowerSGD (Vogels et al. 2019, algorithm 1): products of a gradient matrix with a few
//! columns, and their orthogonalisation.
//!
//! A matrix M is [n, m] and has the factors P [n, r] and Q [m, r]. P lies row by row. Q lies in
//! blocks of [`COLUMNS`] columns of M: a block has r runs, one for each column of Q. Threads divide
//! rows of P and blocks of Q. Each element is one sum in one order, so no division changes a bit.
//!
//! With few columns these products are bound by memory, so they are plain loops and not GEMM.

use trainyard_base::philox4x32;

/// Columns of M in a block of Q.
pub const COLUMNS: usize = 512;

/// Partial sums of a product along a row.
const LANES: usize = 16;

/// A column of P whose length falls below this share in the orthogonalisation is rounding error of
/// the columns before it.
const DEPENDENT: f64 = 1e-6;

/// `P = M Q` for whole rows of M, of `columns` elements each.
pub fn times_q(m: &[f32], columns: usize, q: &[f32], p: &mut [f32]) {
    dispatch!(times_q_rows(m: &[f32], columns: usize, q: &[f32], p: &mut [f32]))
}

/// Block number `block` of `Q = Mᵀ P`, for the whole of M.
pub fn times_p(m: &[f32], columns: usize, p: &[f32], block: usize, q: &mut [f32]) {
    dispatch!(times_p_block(m: &[f32], columns: usize, p: &[f32], block: usize, q: &mut [f32]))
}

/// Elements `first..` of `P Qᵀ`, counted along the rows of M. `p` and `q` are those of all of M.
pub fn product(p: &[f32], q: &[f32], columns: usize, first: usize, out: &mut [f32]) {
    dispatch!(product_rows(p: &[f32], q: &[f32], columns: usize, first: usize, out: &mut [f32]))
}

#[inline(always)]
fn times_q_rows(m: &[f32], columns: usize, q: &[f32], p: &mut [f32]) {
    let rank = q.len() / columns;
    for (m, p) in m.chunks(columns).zip(p.chunks_mut(rank)) {
        for (k, p) in p.iter_mut().enumerate() {
            let mut lanes = [0.0f32; LANES];
            for (m, q) in m.chunks(COLUMNS).zip(q.chunks(COLUMNS * rank)) {
                let q = &q[k * m.len()..(k + 1) * m.len()];
                let (m, m_rest) = m.as_chunks::<LANES>();
                let (q, q_rest) = q.as_chunks::<LANES>();
                for (m, q) in m.iter().zip(q) {
                    for lane in 0..LANES {
                        lanes[lane] += m[lane] * q[lane];
                    }
                }
                for (lane, (m, q)) in lanes.iter_mut().zip(m_rest.iter().zip(q_rest)) {
                    *lane += m * q;
                }
            }
            let mut width = LANES;
            while width > 1 {
                width /= 2;
                for lane in 0..width {
                    lanes[lane] += lanes[lane + width];
                }
            }
            *p = lanes[0];
        }
    }
}

#[inline(always)]
fn times_p_block(m: &[f32], columns: usize, p: &[f32], block: usize, q: &mut [f32]) {
    let at = block * COLUMNS..((block + 1) * COLUMNS).min(columns);
    let rank = q.len() / at.len();
    q.fill(0.0);
    for (m, p) in m.chunks(columns).zip(p.chunks(rank)) {
        let m = &m[at.clone()];
        for (p, q) in p.iter().zip(q.chunks_mut(m.len())) {
            for (q, m) in q.iter_mut().zip(m) {
                *q += p * m;
            }
        }
    }
}

#[inline(always)]
fn product_rows(p: &[f32], q: &[f32], columns: usize, first: usize, out: &mut [f32]) {
    let rank = q.len() / columns;
    let mut at = first;
    let mut rest = out;
    while !rest.is_empty() {
        let (row, column) = (at / columns, at % columns);
        let block = column / COLUMNS * COLUMNS;
        let width = COLUMNS.min(columns - block);
        let (out, next) = rest.split_at_mut((block + width - column).min(rest.len()));
        let q = &q[block * rank..(block + width) * rank];
        out.fill(0.0);
        for (p, q) in p[row * rank..(row + 1) * rank].iter().zip(q.chunks(width)) {
            for (out, q) in out.iter_mut().zip(&q[column - block..]) {
                *out += p * q;
            }
        }
        at += out.len();
        rest = next;
    }
}

/// Makes the columns of P [n, rank] orthonormal, from the first to the last (modified Gram-Schmidt,
/// each column twice, with sums in f64). A column that depends on those before it becomes zero.
pub fn orthogonalise(p: &mut [f32], rank: usize) {
    for k in 0..rank {
        let mut before = length(p, rank, k);
        let mut is_dependent = false;
        for _ in 0..2 {
            for j in 0..k {
                let along: f64 = p.chunks(rank).map(|row| f64::from(row[j]) * f64::from(row[k])).sum();
                for row in p.chunks_mut(rank) {
                    row[k] = (f64::from(row[k]) - along * f64::from(row[j])) as f32;
                }
            }
            let left = length(p, rank, k);
            is_dependent |= left <= DEPENDENT * before;
            before = 1.0;
            if is_dependent {
                break;
            }
            p.chunks_mut(rank).for_each(|row| row[k] = (f64::from(row[k]) / left) as f32);
        }
        if is_dependent {
            p.chunks_mut(rank).for_each(|row| row[k] = 0.0);
        }
    }
}

fn length(p: &[f32], rank: usize, k: usize) -> f64 {
    p.chunks(rank).map(|row| f64::from(row[k]).powi(2)).sum::<f64>().sqrt()
}

/// Gives the columns of Q [columns, rank] that are zero the values of a first step: uniform in
/// [-1, 1), as a function of the key and of the places. `site` tells matrices apart.
pub fn begin(q: &mut [f32], columns: usize, key: [u32; 2], site: [u32; 2]) {
    let rank = q.len() / columns;
    for k in 0..rank {
        let runs = |q: &[f32]| -> bool {
            let mut blocks = q.chunks(COLUMNS * rank);
            blocks.all(|block| block.chunks(block.len() / rank).nth(k).is_none_or(|run| run.iter().all(|q| *q == 0.0)))
        };
        if !runs(q) {
            continue;
        }
        for (number, block) in q.chunks_mut(COLUMNS * rank).enumerate() {
            let width = block.len() / rank;
            for (quad, values) in block[k * width..(k + 1) * width].chunks_mut(4).enumerate() {
                let place = (number * COLUMNS / 4 + quad) as u32;
                let words = philox4x32([site[0], site[1], k as u32, place], key);
                for (value, word) in values.iter_mut().zip(words) {
                    *value = (word >> 8) as f32 * (2.0 / (1 << 24) as f32) - 1.0;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(elements: usize, seed: u32) -> Vec<f32> {
        let mut values = vec![0.0; elements];
        begin(&mut values, elements, [seed, 7], [0, 0]);
        values
    }

    /// Q as [columns][rank] in f64.
    fn plain_q(q: &[f32], columns: usize, rank: usize) -> Vec<Vec<f64>> {
        let at = |j: usize, k: usize| {
            let block = j / COLUMNS * COLUMNS;
            let width = COLUMNS.min(columns - block);
            f64::from(q[block * rank + k * width + j - block])
        };
        (0..columns).map(|j| (0..rank).map(|k| at(j, k)).collect()).collect()
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 2e-5 * (1.0 + b.abs())
    }

    /// One step against sums in f64, with edges of blocks and lanes inside the matrices.
    #[test]
    fn a_step_gives_the_numbers_of_the_definition() {
        for (rows, columns, rank) in [(3, 5, 1), (40, 17, 4), (7, 512, 2), (33, 1031, 3)] {
            let m = random(rows * columns, 1);
            let mut q = vec![0.0; columns * rank];
            begin(&mut q, columns, [2, 3], [4, 5]);
            let of_m = |i: usize, j: usize| f64::from(m[i * columns + j]);
            let old = plain_q(&q, columns, rank);
            let mut p = vec![0.0; rows * rank];
            times_q(&m, columns, &q, &mut p);
            let mut basis: Vec<Vec<f64>> = (0..rank)
                .map(|k| (0..rows).map(|i| (0..columns).map(|j| of_m(i, j) * old[j][k]).sum()).collect())
                .collect();
            for k in 0..rank {
                for i in 0..rows {
                    assert!((f64::from(p[i * rank + k]) - basis[k][i]).abs() < 1e-3, "{rows} x {columns}");
                }
            }
            for k in 0..rank {
                for j in 0..k {
                    let along: f64 = (0..rows).map(|i| basis[j][i] * basis[k][i]).sum();
                    for i in 0..rows {
                        basis[k][i] -= along * basis[j][i];
                    }
                }
                let length = basis[k].iter().map(|x| x * x).sum::<f64>().sqrt();
                basis[k].iter_mut().for_each(|x| *x /= length);
            }
            orthogonalise(&mut p, rank);
            for k in 0..rank {
                assert!(
                    (0..rows).all(|i| close(p[i * rank + k].into(), basis[k][i])),
                    "{rows} x {columns}, column {k}"
                );
            }
            for (block, q) in q.chunks_mut(COLUMNS * rank).enumerate() {
                times_p(&m, columns, &p, block, q);
            }
            let new = plain_q(&q, columns, rank);
            let mut sent = vec![0.0; rows * columns];
            product(&p, &q, columns, 0, &mut sent);
            for j in 0..columns {
                for k in 0..rank {
                    let expected: f64 = (0..rows).map(|i| of_m(i, j) * basis[k][i]).sum();
                    assert!(close(new[j][k], expected), "{} against {expected}", new[j][k]);
                }
            }
            for i in 0..rows {
                for j in 0..columns {
                    let expected: f64 =
                        (0..rank).map(|k| basis[k][i] * (0..rows).map(|i| of_m(i, j) * basis[k][i]).sum::<f64>()).sum();
                    assert!(close(sent[i * columns + j].into(), expected), "{rows} x {columns} at {i}, {j}");
                }
            }
            // Any stretch of the product has the bits of the whole.
            for first in [0, 1, columns - 1, columns + 2, rows * columns / 2] {
                let mut part = vec![7.0; rows * columns - first];
                product(&p, &q, columns, first, &mut part);
                assert_eq!(part, sent[first..], "from {first}");
            }
        }
    }

    /// A matrix of rank 2 leaves nothing out with rank 4, and its other columns are zero.
    #[test]
    fn a_matrix_of_low_rank_is_sent_whole() {
        let (rows, columns, rank) = (50, 700, 4);
        let (a, b) = (random(rows * 2, 1), random(columns * 2, 2));
        let of = |at: usize| (0..2).map(|k| a[at / columns * 2 + k] * b[at % columns * 2 + k]).sum::<f32>();
        let m: Vec<f32> = (0..rows * columns).map(of).collect();
        let mut q = vec![0.0; columns * rank];
        let mut p = vec![0.0; rows * rank];
        for _ in 0..2 {
            begin(&mut q, columns, [2, 3], [4, 5]);
            times_q(&m, columns, &q, &mut p);
            orthogonalise(&mut p, rank);
            for (block, q) in q.chunks_mut(COLUMNS * rank).enumerate() {
                times_p(&m, columns, &p, block, q);
            }
        }
        assert!(p.chunks(rank).all(|row| row[2] == 0.0 && row[3] == 0.0), "two columns are enough");
        let mut sent = vec![0.0; rows * columns];
        product(&p, &q, columns, 0, &mut sent);
        for (sent, m) in sent.iter().zip(&m) {
            assert!((sent - m).abs() < 1e-5, "{sent} for {m}");
        }
    }

    #[test]
    fn nothing_in_gives_nothing_out() {
        let mut p = vec![0.0; 12];
        orthogonalise(&mut p, 3);
        assert_eq!(p, [0.0; 12]);
    }
}
