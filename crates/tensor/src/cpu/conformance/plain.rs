//! The kernels of the plain operations; what rearranges data has its property test beside it.

use super::{ULP, close, dtypes, on_every_cpu, values, wide};
use crate::cpu::Cpu;
use crate::cpu::elementwise::{Binary, Operand, Unary, unary};
use crate::cpu::plain::derivative::{self, Needs, needs};
use crate::cpu::plain::mask::{self, Logic, Side};
use crate::cpu::plain::strided::{self, Axis};
use crate::cpu::plain::{index, row};
use crate::dtype::Element;
use crate::reference::plain as oracle;

const LENGTHS: [usize; 4] = [0, 1, 17, 70_003];

/// Numbers in (0.25, 1.25).
fn positive<T: Element>(seed: u64, len: usize) -> Vec<T> {
    values::<T>(seed, len).iter().map(|x| T::from_f32(x.to_f32().abs() + 0.25)).collect()
}

fn indices(seed: u64, len: usize, limit: usize) -> Vec<u32> {
    values::<f32>(seed, len).iter().map(|x| ((x + 1.0) / 2.0 * limit as f32) as u32 % limit as u32).collect()
}

fn made<T: Element>(len: usize, kernel: impl Fn(&Cpu, &mut [T])) -> impl Fn(&Cpu) -> Vec<T> {
    move |cpu| {
        let mut y = vec![T::default(); len];
        kernel(cpu, &mut y);
        y
    }
}

dtypes! {
    fn slopes_of_functions_of_one_number<T>() {
        let cpu = Cpu::new(crate::cpu::Isa::Portable, 1);
        for len in LENGTHS {
            let (x, dy) = (positive::<T>(1, len), values::<T>(2, len));
            for f in Unary::ALL {
                let mut y = x.clone();
                unary(&cpu, f, &x, &mut y);
                let z = if needs(f) == Needs::Result { &y } else { &x };
                let want: Vec<f64> = wide(&x).iter().zip(wide(&dy)).map(|(x, dy)| dy * oracle::slope(f, *x)).collect();
                // Eight roundings; where the result stands for the argument, its rounding counts up
                // to three times, and slopes are at most 16 here (the reciprocal's and the inverse
                // root's, at 0.25).
                let stored = if needs(f) == Needs::Result { super::roundoff(T::DTYPE) * 3.0 } else { 0.0 };
                on_every_cpu(
                    made(len, |cpu, dx| derivative::unary_backward(cpu, f, &dy, z, dx)),
                    |isa, dx: &Vec<T>| close(isa, &format!("{f:?}"), dx, &want, 16.0 * (8.0 * ULP + stored)),
                );
            }
        }
    }
}

dtypes! {
    fn slopes_of_functions_of_two_numbers<T>() {
        for [rows, columns] in [[0, 3], [1, 1], [3, 17], [301, 129]] {
            let len = rows * columns;
            let (a, full, dy) = (positive::<T>(1, len), positive::<T>(2, len), values::<T>(3, len));
            let (line, column) = (positive::<T>(4, columns), positive::<T>(5, rows));
            let operands = [Operand::Full(&full[..]), Operand::Row(&line[..]), Operand::Column(&column[..]), Operand::Scalar(0.75)];
            for b in operands {
                let b_at = |i: usize| f64::from(match b {
                    Operand::Full(b) => b[i].to_f32(),
                    Operand::Row(b) => b[i % columns].to_f32(),
                    Operand::Column(b) => b[i / columns].to_f32(),
                    Operand::Scalar(b) => b,
                });
                for f in Binary::ALL {
                    let slopes: Vec<[f64; 2]> =
                        wide(&a).iter().enumerate().map(|(i, a)| oracle::slopes(f, *a, b_at(i))).collect();
                    let want = |which: usize| -> Vec<f64> {
                        wide(&dy).iter().zip(&slopes).map(|(dy, slopes)| dy * slopes[which]).collect()
                    };
                    let both = |cpu: &Cpu| {
                        let (mut da, mut db) = (vec![T::default(); len], vec![T::default(); len]);
                        derivative::binary_backward(
                            cpu, f, [rows, columns], &dy, [Operand::Full(&a), b], Some(&mut da), Some(&mut db),
                        );
                        // Either alone is the same.
                        let mut alone = vec![T::default(); len];
                        derivative::binary_backward(cpu, f, [rows, columns], &dy, [Operand::Full(&a), b], None, Some(&mut alone));
                        assert!(alone == db);
                        (da, db)
                    };
                    // Slopes are at most 20 here (a / b^2); four roundings, and those of the C
                    // library's powers.
                    on_every_cpu(both, |isa, (da, db)| {
                        close(isa, &format!("{f:?} da"), da, &want(0), 20.0 * 8.0 * ULP);
                        close(isa, &format!("{f:?} db"), db, &want(1), 20.0 * 8.0 * ULP);
                    });
                }
            }
        }
    }
}

#[test]
fn slopes_where_there_is_none() {
    let cpu = Cpu::new(crate::cpu::Isa::detect(), 1);
    let of = |f, x: f32| {
        let mut dx = [7.0];
        derivative::unary_backward(&cpu, f, &[1.0f32], &[x], &mut dx);
        dx[0]
    };
    assert_eq!(of(Unary::Abs, 0.0), 0.0);
    assert!(of(Unary::Abs, f32::NAN).is_nan());
    let both = |f, a: f32, b: f32| {
        let (mut da, mut db) = ([7.0], [7.0]);
        let operands = [Operand::Full(&[a][..]), Operand::Full(&[b][..])];
        derivative::binary_backward(&cpu, f, [1, 1], &[1.0f32], operands, Some(&mut da), Some(&mut db));
        (da[0], db[0])
    };
    assert_eq!(both(Binary::Max, 2.0, 2.0), (0.5, 0.5));
    assert_eq!(both(Binary::Min, 1.0, 2.0), (1.0, 0.0));
    assert_eq!(both(Binary::Pow, 0.0, 0.0), (0.0, 0.0));
    assert_eq!(both(Binary::Pow, 0.0, 2.0), (0.0, 0.0));
    let mut dx = [7.0; 3];
    derivative::clamp_backward(&cpu, -1.0, 1.0, &[3.0f32; 3], &[-1.0, 1.0, 1.001], &mut dx);
    assert_eq!(dx, [3.0, 3.0, 0.0]);
    derivative::power_backward(&cpu, 3.0, &[1.0f32; 3], &[-2.0, 0.0, 1.0], &mut dx);
    assert_eq!(dx, [12.0, 0.0, 3.0]);
}

dtypes! {
    fn reading_and_adding_by_indices<T>() {
        for [outer, n, inner, k] in [[1, 5, 1, 0], [3, 7, 5, 11], [1, 40, 700, 90], [40, 9, 1, 300]] {
            let (x, chosen) = (values::<T>(1, outer * n * inner), indices(2, k, n));
            let source = |o: usize, i: usize, c: usize| (o * n + chosen[i] as usize) * inner + c;
            let places: Vec<usize> = (0..outer * k * inner)
                .map(|at| source(at / inner / k.max(1), at / inner % k.max(1), at % inner))
                .collect();
            let want: Vec<f64> = places.iter().map(|at| f64::from(x[*at].to_f32())).collect();
            on_every_cpu(
                made(want.len(), |cpu, y| index::select(cpu, [outer, n, inner], &chosen, &x, y).unwrap()),
                |isa, y: &Vec<T>| close(isa, "select", y, &want, 0.0),
            );
            let dy = values::<T>(3, want.len());
            let mut sums = vec![0.5; x.len()];
            places.iter().zip(wide(&dy)).for_each(|(at, dy)| sums[*at] += dy);
            on_every_cpu(
                |cpu| {
                    let mut found = vec![0.5f32; x.len()];
                    index::add(cpu, [outer, n, inner], &chosen, &dy, &mut found).unwrap();
                    found
                },
                // At most k + 1 additions of sums no larger than k.
                |isa, found| close(isa, "add", found, &sums, (k * k + 1) as f64 * ULP),
            );
        }
        for [rows, n, k] in [[1, 1, 1], [3, 17, 5], [700, 33, 64]] {
            let (x, chosen, dy) = (values::<T>(1, rows * n), indices(2, rows * k, n), values::<T>(3, rows * k));
            let place = |at: usize| at / k * n + chosen[at] as usize;
            let want: Vec<f64> = (0..rows * k).map(|at| f64::from(x[place(at)].to_f32())).collect();
            on_every_cpu(
                made(rows * k, |cpu, y| index::gather_rows(cpu, [n, k], &chosen, &x, y).unwrap()),
                |isa, y: &Vec<T>| close(isa, "gather", y, &want, 0.0),
            );
            let mut sums = vec![0.0; rows * n];
            wide(&dy).iter().enumerate().for_each(|(at, dy)| sums[place(at)] += dy);
            on_every_cpu(
                |cpu| {
                    let mut found = vec![0.0f32; rows * n];
                    index::scatter_add_rows(cpu, [n, k], &chosen, &dy, &mut found).unwrap();
                    found
                },
                |isa, found| close(isa, "scatter", found, &sums, (k * k + 1) as f64 * ULP),
            );
            let hot: Vec<f64> = (0..rows * n).map(|at| f64::from(at % n == chosen[at / n * k] as usize)).collect();
            let firsts: Vec<u32> = chosen.iter().step_by(k).copied().collect();
            on_every_cpu(
                made(rows * n, |cpu, y| index::one_hot(cpu, n, &firsts, y).unwrap()),
                |isa, y: &Vec<T>| close(isa, "one hot", y, &hot, 0.0),
            );
        }
    }
}

#[test]
fn an_index_outside_is_named_and_nothing_is_written() {
    let cpu = Cpu::new(crate::cpu::Isa::detect(), 1);
    let mut y = [7.0f32; 2];
    let error = index::select(&cpu, [1, 3, 1], &[2, -1i32 as u32], &[0.0f32; 3], &mut y).unwrap_err();
    assert_eq!(error.to_string(), "index -1 (entry 1) is outside 0..3");
    assert!(index::add(&cpu, [1, 2, 1], &[2, 0], &[1.0f32; 2], &mut y).is_err());
    assert!(index::gather_rows(&cpu, [1, 2], &[0, 1], &[0.0f32], &mut y).is_err());
    assert!(index::scatter_add_rows(&cpu, [2, 2], &[0, 2], &[1.0f32; 2], &mut y).is_err());
    assert!(index::one_hot(&cpu, 1, &[0, 1], &mut y).is_err());
    assert_eq!(y, [7.0; 2]);
}

dtypes! {
    fn masks<T>() {
        for len in LENGTHS {
            let (x, a, b) = (values::<T>(1, len), indices(2, len, 3), indices(3, len, 2));
            for side in [Side::Set, Side::Unset] {
                let want: Vec<f64> = wide(&x).iter().zip(&a)
                    .map(|(x, a)| if (*a != 0) == (side == Side::Set) { -2.5 } else { *x }).collect();
                on_every_cpu(
                    made(len, |cpu, y| mask::fill(cpu, &a, side, -2.5, &x, y)),
                    |isa, y: &Vec<T>| close(isa, "fill", y, &want, 0.0),
                );
            }
            let numbers: Vec<f64> = a.iter().map(|a| f64::from(*a)).collect();
            on_every_cpu(
                made(len, |cpu, y| mask::widen(cpu, &a, y, |x| x as f32)),
                |isa, y: &Vec<T>| close(isa, "widen", y, &numbers, 0.0),
            );
            for (f, truth) in [(Logic::And, [0, 0, 0, 1]), (Logic::Or, [0, 1, 1, 1]), (Logic::Xor, [0, 1, 1, 0])] {
                let want: Vec<u32> = a.iter().zip(&b).map(|(a, b)| truth[usize::from(*a != 0) * 2 + *b as usize]).collect();
                on_every_cpu(
                    |cpu| {
                        let mut y = vec![7; len];
                        mask::logic(cpu, f, &a, &b, &mut y);
                        y
                    },
                    |isa, y| assert!(*y == want, "{isa} {f:?}"),
                );
            }
            let want: Vec<u32> = a.iter().map(|a| u32::from(*a == 0)).collect();
            let mut y = vec![7; len];
            mask::not(&Cpu::new(crate::cpu::Isa::Portable, 2), &a, &mut y);
            assert_eq!(y, want);
        }
        for [queries, keys] in [[0, 0], [1, 1], [5, 5], [3, 7], [200, 300]] {
            let mut y = vec![7; queries * keys];
            mask::causal(&Cpu::new(crate::cpu::Isa::Portable, 2), [queries, keys], &mut y);
            for (at, y) in y.into_iter().enumerate() {
                assert_eq!(y, u32::from(at % keys <= at / keys + keys - queries));
            }
        }
    }
}

dtypes! {
    fn whole_rows<T>() {
        for [rows, columns] in [[1, 2], [3, 17], [5, 1000], [700, 129]] {
            // A mean of 3, so that a variance by squares alone would lose digits.
            let x: Vec<T> = values::<T>(1, rows * columns).iter().map(|x| T::from_f32(x.to_f32() + 3.0)).collect();
            let dy = values::<T>(2, rows);
            let divisor = columns as f64 - 1.0;
            let (x64, dy64) = (wide(&x), wide(&dy));
            let mean: Vec<f64> = x64.chunks(columns).map(|x| x.iter().sum::<f64>() / columns as f64).collect();
            let variance: Vec<f64> = x64.chunks(columns).zip(&mean)
                .map(|(x, mean)| x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / divisor).collect();
            // Lanes add columns / 64 numbers each, at most 4 in size (1 for squares about the
            // mean).
            let slack = 4.0 * (columns as f64 / 64.0 + 12.0) * ULP;
            on_every_cpu(
                |cpu| {
                    let (mut y, mut centre) = (vec![T::default(); rows], vec![0.0f32; rows]);
                    row::variance(cpu, columns, divisor as f32, &x, &mut y, &mut centre);
                    (y, centre)
                },
                |isa, (y, centre)| {
                    close(isa, "variance", y, &variance, 2.0 * slack);
                    close(isa, "mean", centre, &mean, slack);
                },
            );
            let centre: Vec<f32> = mean.iter().map(|mean| *mean as f32).collect();
            let want: Vec<f64> = x64.iter().enumerate()
                .map(|(i, x)| 2.0 * dy64[i / columns] * (x - mean[i / columns]) / divisor).collect();
            on_every_cpu(
                made(x.len(), |cpu, dx| row::variance_backward(cpu, columns, divisor as f32, &dy, &x, &centre, dx)),
                |isa, dx: &Vec<T>| close(isa, "variance backward", dx, &want, 16.0 * ULP / divisor),
            );
            // Eight values only, so that maxima have company.
            let x: Vec<T> = x.iter().map(|x| T::from_f32((x.to_f32() * 4.0).round())).collect();
            let x64 = wide(&x);
            let max: Vec<T> = x.chunks(columns)
                .map(|x| x.iter().copied().fold(x[0], |a, b| if b.to_f32() > a.to_f32() { b } else { a })).collect();
            let want: Vec<f64> = (0..x.len()).map(|i| {
                let row = &x64[i / columns * columns..][..columns];
                let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let count = row.iter().filter(|x| **x == top).count() as f64;
                if x64[i] == top { dy64[i / columns] / count } else { 0.0 }
            }).collect();
            on_every_cpu(
                made(x.len(), |cpu, dx| row::max_backward(cpu, columns, &dy, &x, &max, dx)),
                |isa, dx: &Vec<T>| close(isa, "max backward", dx, &want, ULP),
            );
            let mut want = wide(&values::<T>(5, rows * columns));
            want.chunks_mut(columns).for_each(|row| for j in (1..columns).rev() { row[j - 1] += row[j] });
            let x = values::<T>(5, rows * columns);
            on_every_cpu(
                made(x.len(), |cpu, y| row::reverse_cumulative_sum(cpu, columns, &x, y)),
                |isa, y: &Vec<T>| close(isa, "sums from the end", y, &want, (columns * columns) as f64 * ULP),
            );
        }
    }
}

dtypes! {
    fn squared_errors<T>() {
        for len in [0, 1, 17, 5000, 300_001] {
            let (a, b) = (values::<T>(1, len), values::<T>(2, len));
            let (a64, b64) = (wide(&a), wide(&b));
            let want: f64 = a64.iter().zip(&b64).map(|(a, b)| (a - b) * (a - b)).sum();
            on_every_cpu(
                |cpu| row::squared_error(cpu, &a, &b).to_bits(),
                // Parts of 4,096 in lanes: 4,096 / LANES additions (1,024 where lanes are few) of
                // at most 4.
                |isa, sum| {
                    let off = (f64::from_bits(*sum) - want).abs();
                    assert!(off <= 1024.0 * ULP * want + 1e-12, "{isa} {len}: off by {off}");
                },
            );
            let want: Vec<f64> = a64.iter().zip(&b64).map(|(a, b)| -0.3f32 as f64 * (a - b)).collect();
            on_every_cpu(
                made(len, |cpu, y| row::scaled_difference(cpu, -0.3, &a, &b, y)),
                |isa, y: &Vec<T>| close(isa, "difference", y, &want, 2.0 * ULP),
            );
        }
    }
}

dtypes! {
    fn adding_into_a_part<T>() {
        // Columns 2 .. 5 of 7, twice the other way round.
        let (rows, width) = (33, 3);
        let (x, before) = (values::<T>(1, rows * width), values::<T>(2, rows * 7));
        let mut want = wide(&before);
        wide(&x).iter().enumerate().for_each(|(i, x)| want[i / width * 7 + 2 + i % width] += x);
        on_every_cpu(
            |cpu| {
                let mut y = before.clone();
                strided::add(cpu, &[Axis::new(rows, width, 7), Axis::new(width, 1, 1)], &x, &mut y[2..]);
                y
            },
            |isa, y| close(isa, "add", y, &want, ULP),
        );
    }
}
