//! Coding in eight bits: every result is exact, so the oracle's bits are wanted.

use super::{dtypes, on_every_cpu, values};
use crate::cpu::Cpu;
use crate::cpu::int8::{CodesMut, encode, encode_transposed};
use crate::reference::int8 as oracle;

type Coded = (Vec<i8>, Vec<u32>, Vec<i32>);

/// Codes, the scales' bits, and sums of `rows` rows of `cols`.
fn coded(rows: usize, cols: usize, encode: impl FnOnce(CodesMut<'_>)) -> Coded {
    let (mut codes, mut scales, mut sums) = (vec![99; rows * cols], vec![f32::NAN; rows], vec![99; rows]);
    encode(CodesMut { codes: &mut codes, scales: &mut scales, sums: &mut sums });
    (codes, scales.into_iter().map(f32::to_bits).collect(), sums)
}

fn wanted(rows: impl Iterator<Item = Vec<f32>>) -> Coded {
    let (mut codes, mut scales, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        let (scale, row) = oracle::codes(&row);
        sums.push(row.iter().map(|code| i32::from(*code)).sum());
        scales.push(scale.to_bits());
        codes.extend(row);
    }
    (codes, scales, sums)
}

dtypes! {
    fn codes_of_eight_bits_are_the_oracles<T>() {
        for (m, k) in [(1, 1), (3, 0), (0, 5), (2, 17), (65, 63), (64, 64), (130, 200), (7, 1031)] {
            let mut x = values::<T>(m as u64, m * k);
            // Rows and columns of zeros, of numbers that are too small, and of one large number.
            for (i, x) in x.iter_mut().enumerate() {
                let (row, col) = (i / k, i % k);
                let factor = match (row % 5, col % 7) {
                    (1, _) | (_, 1) => 0.0,
                    (2, _) | (_, 2) => 1e-37,
                    (3, 3) => 3e4,
                    _ => 1.0,
                };
                *x = T::from_f32(x.to_f32() * factor);
            }
            let at = |i: usize, j: usize| x[i * k + j].to_f32();
            let rows = wanted((0..m).map(|i| (0..k).map(|j| at(i, j)).collect()));
            let columns = wanted((0..k).map(|j| (0..m).map(|i| at(i, j)).collect()));
            on_every_cpu(
                |cpu: &Cpu| {
                    let rows = coded(m, k, |to| encode(cpu, &x, m, k, to));
                    (rows, coded(k, m, |to| encode_transposed(cpu, &x, m, k, to)))
                },
                |isa, found| {
                    assert!(found.0 == rows, "{isa} {m} x {k}, as it lies");
                    assert!(found.1 == columns, "{isa} {m} x {k}, transposed");
                },
            );
        }
    }
}

dtypes! {
    fn a_row_that_is_not_finite_gets_no_finite_scale<T>() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (m, k) = (5, 70);
            let mut x = values::<T>(8, m * k);
            x[2 * k + 3] = T::from_f32(bad);
            on_every_cpu(
                |cpu: &Cpu| {
                    let rows = coded(m, k, |to| encode(cpu, &x, m, k, to)).1;
                    (rows, coded(k, m, |to| encode_transposed(cpu, &x, m, k, to)).1)
                },
                |isa, (rows, columns)| {
                    let spoilt = |scales: &[u32]| -> Vec<usize> {
                        (0..scales.len()).filter(|i| !f32::from_bits(scales[*i]).is_finite()).collect()
                    };
                    assert_eq!((spoilt(rows), spoilt(columns)), (vec![2], vec![3]), "{isa} {bad}");
                },
            );
        }
    }
}
