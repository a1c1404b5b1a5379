//! Elementwise functions, casts and reductions.

use super::{ULP, close, dot, dtypes, is_gradient, on_every_cpu, values, wide};
use crate::cpu::cast::cast;
use crate::cpu::elementwise::*;
use crate::cpu::reduce::*;
use crate::dtype::{bf16, f16};
use crate::reference::{activation::erf, loss as oracle};

const LENGTHS: [usize; 5] = [0, 1, 17, 1000, 70_003];

dtypes! {
    fn functions_of_one_number<T>() {
        for len in LENGTHS {
            for f in Unary::ALL {
                // Positive for logarithm and roots, away from zero for the reciprocal.
                let positive = matches!(f, Unary::Ln | Unary::Sqrt | Unary::Rsqrt | Unary::Reciprocal);
                let x: Vec<T> = values::<T>(1, len).iter().map(|x| {
                    let x = x.to_f32() * 4.0;
                    T::from_f32(if positive { x.abs() + 0.01 } else { x })
                }).collect();
                let exact = |x: f64| match f {
                    Unary::Neg => -x,
                    Unary::Abs => x.abs(),
                    Unary::Exp => x.exp(),
                    Unary::Ln => x.ln(),
                    Unary::Sqrt => x.sqrt(),
                    Unary::Rsqrt => 1.0 / x.sqrt(),
                    Unary::Square => x * x,
                    Unary::Reciprocal => 1.0 / x,
                    Unary::Tanh => x.tanh(),
                    Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
                    Unary::Erf => erf(x),
                    Unary::Sign => if x == 0.0 { 0.0 } else { x.signum() },
                };
                let want: Vec<f64> = wide(&x).into_iter().map(exact).collect();
                // The functions' own bounds, 4e-7 relative to the largest value here: e^4 = 55, 1 /
                // sqrt(0.01) = 10, 1 / 0.01 = 100 (one rounding).
                let slack = match f {
                    Unary::Exp => 55.0 * 4e-7,
                    Unary::Rsqrt => 2e-6,
                    Unary::Ln | Unary::Tanh | Unary::Sigmoid | Unary::Erf => 4e-7,
                    _ => 0.0,
                };
                on_every_cpu(
                    |cpu| {
                        let mut y = vec![T::default(); len];
                        unary(cpu, f, &x, &mut y);
                        y
                    },
                    |isa, y| close(isa, &format!("{f:?}"), y, &want, slack),
                );
            }
        }
    }
}

#[test]
fn functions_of_one_number_at_the_ends_of_their_range() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for (f, cases) in [
        (Unary::Exp, vec![(inf, inf), (-inf, 0.0), (nan, nan), (90.0, inf), (88.5, 88.5f32.exp()), (0.0, 1.0)]),
        (
            Unary::Ln,
            vec![(0.0, -inf), (-0.0, -inf), (-1.0, nan), (inf, inf), (nan, nan), (1.0, 0.0), (1e-40, 1e-40f32.ln())],
        ),
        (Unary::Tanh, vec![(inf, 1.0), (-inf, -1.0), (nan, nan)]),
        (Unary::Sigmoid, vec![(inf, 1.0), (-inf, 0.0), (nan, nan)]),
        (Unary::Erf, vec![(inf, 1.0), (-inf, -1.0), (nan, nan), (0.0, 0.0)]),
        (Unary::Neg, vec![(inf, -inf), (0.0, -0.0), (nan, nan)]),
        (Unary::Sign, vec![(inf, 1.0), (-inf, -1.0), (0.0, 0.0), (-3.0, -1.0)]),
        (Unary::Sqrt, vec![(-1.0, nan), (inf, inf), (0.0, 0.0)]),
    ] {
        let x: Vec<f32> = cases.iter().map(|(x, _)| *x).collect();
        on_every_cpu(
            |cpu| {
                let mut y = vec![0.0f32; x.len()];
                unary(cpu, f, &x, &mut y);
                y.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
            },
            |isa, y| {
                for (bits, (x, want)) in y.iter().zip(&cases) {
                    let y = f32::from_bits(*bits);
                    let same =
                        y == *want || (y.is_nan() && want.is_nan()) || (y - want).abs() <= 1e-6 * want.abs() + 1e-37;
                    assert!(same, "{isa} {f:?}({x}) = {y}, not {want}");
                }
            },
        );
    }
}

dtypes! {
    fn functions_of_two_numbers_with_every_broadcast<T>() {
        for [rows, columns] in [[0, 3], [1, 1], [3, 17], [301, 129]] {
            let positive = |seed, len| -> Vec<T> {
                values::<T>(seed, len).iter().map(|x| T::from_f32(x.to_f32().abs() + 0.25)).collect()
            };
            let (a, b) = (positive(1, rows * columns), positive(2, rows * columns));
            let (row, column) = (positive(3, columns), positive(4, rows));
            let operands = [Operand::Full(&b[..]), Operand::Row(&row[..]), Operand::Column(&column[..]), Operand::Scalar(0.75)];
            let at = |operand: &Operand<'_, T>, i: usize| f64::from(match operand {
                Operand::Full(x) => x[i].to_f32(),
                Operand::Row(x) => x[i % columns].to_f32(),
                Operand::Column(x) => x[i / columns].to_f32(),
                Operand::Scalar(x) => *x,
            });
            for f in Binary::ALL {
                let exact = |a: f64, b: f64| match f {
                    Binary::Add => a + b,
                    Binary::Sub => a - b,
                    Binary::Mul => a * b,
                    Binary::Div => a / b,
                    Binary::Max => a.max(b),
                    Binary::Min => a.min(b),
                    Binary::Pow => a.powf(b),
                };
                let pairs = operands.iter().flat_map(|b| [(Operand::Full(&a[..]), *b), (*b, Operand::Full(&a[..]))]);
                for (left, right) in pairs.chain([(operands[1], operands[2]), (operands[2], operands[3])]) {
                    let want: Vec<f64> = (0..rows * columns).map(|i| exact(at(&left, i), at(&right, i))).collect();
                    on_every_cpu(
                        |cpu| {
                            let mut y = vec![T::default(); rows * columns];
                            binary(cpu, f, [rows, columns], left, right, &mut y);
                            y
                        },
                        // One rounding in f32 before the final one, of numbers up to 5.
                        |isa, y| close(isa, &format!("{f:?}"), y, &want, 5.0 * ULP),
                    );
                }
            }
        }
    }
}

dtypes! {
    fn scaled_sums_clamps_comparisons_and_selections<T>() {
        for len in LENGTHS {
            let (a, b) = (values::<T>(1, len), values::<T>(2, len));
            let start = values::<f32>(3, len);
            on_every_cpu(
                |cpu| {
                    let (mut sum, mut onto, mut over) = (b.clone(), start.clone(), vec![f32::NAN; len]);
                    axpby(cpu, -0.5, &a, 2.0, &mut sum);
                    accumulate(cpu, &a, &mut onto);
                    axpby(cpu, 3.0, &a, 0.0, &mut over);
                    let (mut scaled, mut clamped) = (a.clone(), a.clone());
                    scale(cpu, 0.375, &mut scaled);
                    clamp(cpu, &a, -0.5, 0.25, &mut clamped);
                    let (mut mask, mut chosen) = (vec![7; len], a.clone());
                    compare(cpu, Compare::Greater, &a, &b, &mut mask);
                    select(cpu, &mask, &a, &b, &mut chosen);
                    (sum, onto, over, scaled, clamped, mask, chosen)
                },
                |isa, (sum, onto, over, scaled, clamped, mask, chosen)| {
                    let (a, b) = (wide(&a), wide(&b));
                    let want = |f: &dyn Fn(usize) -> f64| (0..len).map(f).collect::<Vec<f64>>();
                    close(isa, "axpby", sum, &want(&|i| -0.5 * a[i] + 2.0 * b[i]), 3.0 * ULP);
                    close(isa, "accumulate", onto, &want(&|i| a[i] + f64::from(start[i])), 0.0);
                    close(isa, "overwrite", over, &want(&|i| 3.0 * a[i]), 0.0);
                    close(isa, "scale", scaled, &want(&|i| 0.375 * a[i]), ULP);
                    close(isa, "clamp", clamped, &want(&|i| a[i].clamp(-0.5, 0.25)), 0.0);
                    assert!((0..len).all(|i| mask[i] == u32::from(a[i] > b[i])));
                    close(isa, "select", chosen, &want(&|i| a[i].max(b[i])), 0.0);
                },
            );
        }
    }
}

dtypes! {
    fn casts_round_as_the_scalar_types_do<T>() {
        let mut x: Vec<f32> = (0..70_001u32).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761))).filter(|x| x.is_normal()).collect();
        x.extend([0.0, -0.0, f32::INFINITY, 65519.0, 65520.0, 1e-8, 3e-8]);
        on_every_cpu(
            |cpu| {
                let mut narrow = vec![T::default(); x.len()];
                cast(cpu, &x, &mut narrow);
                let mut same = narrow.clone();
                cast(cpu, &narrow, &mut same);
                let (mut back, mut b, mut h) = (x.clone(), vec![bf16::default(); x.len()], vec![f16::default(); x.len()]);
                cast(cpu, &narrow, &mut back);
                cast(cpu, &narrow, &mut b);
                cast(cpu, &narrow, &mut h);
                (narrow, same, back, b, h)
            },
            |isa, (narrow, same, back, b, h)| {
                assert!(narrow == same);
                for (i, x) in x.iter().enumerate() {
                    let n = T::from_f32(*x);
                    assert!(narrow[i] == n && back[i] == n.to_f32(), "{isa} {x}: {:?} {:?}", narrow[i], back[i]);
                    assert!(b[i] == bf16::from_f32(n.to_f32()) && h[i] == f16::from_f32(n.to_f32()), "{isa} {x}");
                }
            },
        );
    }
}

dtypes! {
    fn reductions_of_rows_and_of_everything<T>() {
        for (rows, columns) in [(0, 3), (1, 1), (5, 17), (301, 129), (3, 5000)] {
            let x = values::<T>(1, rows * columns);
            on_every_cpu(
                |cpu| {
                    let (mut sum, mut mean, mut max) = (vec![0.0f32; rows], vec![0.0f32; rows], vec![T::default(); rows]);
                    reduce_rows(cpu, Reduce::Sum, columns, &x, &mut sum);
                    reduce_rows(cpu, Reduce::Mean, columns, &x, &mut mean);
                    reduce_rows(cpu, Reduce::Max, columns, &x, &mut max);
                    let mut index = vec![9; rows];
                    argmax_rows(cpu, columns, &x, &mut index);
                    let mut down = vec![1.0; columns];
                    let mut space = vec![f32::NAN; crate::cpu::norm::backward_workspace(rows, columns)];
                    sum_over_rows(cpu, &x, &mut down, &mut space);
                    let mut running = x.clone();
                    cumulative_sum(cpu, columns, &x, &mut running);
                    (sum, mean, max, index, down, running, sum_all(cpu, &x), sum_of_squares(cpu, &x))
                },
                |isa, (sum, mean, max, index, down, running, all, squares)| {
                    let w = wide(&x);
                    let row = |r: usize| &w[r * columns..(r + 1) * columns];
                    let slack = columns as f64 * ULP;
                    for r in 0..rows {
                        let total: f64 = row(r).iter().sum();
                        close(isa, "sum", &sum[r..=r], &[total], slack);
                        close(isa, "mean", &mean[r..=r], &[total / columns as f64], ULP);
                        let most = row(r).iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        assert_eq!(f64::from(max[r].to_f32()), most);
                        assert_eq!(index[r] as usize, row(r).iter().position(|x| *x == most).unwrap());
                        // A running sum in order: j roundings of numbers that stay below 3
                        // sqrt(columns).
                        let mut total = 0.0;
                        let want: Vec<f64> = row(r).iter().map(|x| { total += x; total }).collect();
                        close(isa, "cumulative", &running[r * columns..(r + 1) * columns], &want, slack * 3.0 * (columns as f64).sqrt());
                    }
                    let want: Vec<f64> = (0..columns).map(|j| 1.0 + (0..rows).map(|r| row(r)[j]).sum::<f64>()).collect();
                    close(isa, "column sums", down, &want, rows as f64 * 10.0 * ULP);
                    let want: f64 = w.iter().sum();
                    // Blocks of 4,096 in 32 chains of at most 128 terms.
                    assert!((all - want).abs() <= w.len() as f64 * 128.0 * ULP, "{isa} {all} {want}");
                    let want: f64 = w.iter().map(|x| x * x).sum();
                    assert!((squares - want).abs() <= want * 128.0 * ULP, "{isa} {squares} {want}");
                },
            );
        }
    }
}

#[test]
fn sum_of_squares_tells_large_from_broken() {
    on_every_cpu(
        |cpu| {
            let mut x = vec![1.0f32; 300_001];
            x[200_000] = 1e30;
            let large = sum_of_squares(cpu, &x);
            x[7] = f32::NAN;
            let nan = sum_of_squares(cpu, &x);
            x[7] = f32::NEG_INFINITY;
            let tiny = sum_of_squares(cpu, &[1e-30f32; 3]);
            (large, nan.is_nan(), sum_of_squares(cpu, &x), (tiny * 1e65).round())
        },
        |_, (large, nan, infinite, tiny)| {
            assert!(
                (large / 1e60 - 1.0).abs() < 1e-6 && *nan && *infinite == f64::INFINITY && *tiny == 3e5,
                "{large} {tiny}"
            );
        },
    );
}

dtypes! {
    fn softmax_and_log_softmax_with_their_backwards<T>() {
        for (rows, columns) in [(0, 3), (1, 1), (5, 17), (301, 129), (3, 5000)] {
            let x: Vec<T> = values::<T>(1, rows * columns).iter().map(|x| T::from_f32(x.to_f32() * 8.0)).collect();
            let dy = values::<T>(2, rows * columns);
            on_every_cpu(
                |cpu| {
                    let (mut p, mut l, mut dp, mut dl) = (x.clone(), x.clone(), x.clone(), x.clone());
                    softmax(cpu, columns, &x, &mut p);
                    log_softmax(cpu, columns, &x, &mut l);
                    softmax_backward(cpu, columns, &dy, &p, &mut dp);
                    log_softmax_backward(cpu, columns, &dy, &l, &mut dl);
                    (p, l, dp, dl)
                },
                |isa, (p, l, dp, dl)| {
                    for r in 0..rows {
                        let span = r * columns..(r + 1) * columns;
                        let (x, dy) = (wide(&x[span.clone()]), wide(&dy[span.clone()]));
                        // x - lse is rounded at a magnitude of up to 17; lse adds the sum's
                        // relative error.
                        close(isa, "softmax", &p[span.clone()], &oracle::softmax(&x), 60.0 * ULP);
                        let lse = oracle::lse(&x);
                        let want: Vec<f64> = x.iter().map(|x| x - lse).collect();
                        close(isa, "log softmax", &l[span.clone()], &want, 60.0 * ULP);
                        // The backwards take the stored outputs, so the oracle does.
                        let (y, z) = (wide(&p[span.clone()]), wide(&l[span.clone()]));
                        let inner = dot(&dy, &y);
                        let want: Vec<f64> = y.iter().zip(&dy).map(|(y, dy)| y * (dy - inner)).collect();
                        close(isa, "softmax backward", &dp[span.clone()], &want, 20.0 * ULP);
                        let total: f64 = dy.iter().sum();
                        let want: Vec<f64> = z.iter().zip(&dy).map(|(z, dy)| dy - z.exp() * total).collect();
                        close(isa, "log softmax backward", &dl[span], &want, (columns as f64 + 20.0) * ULP);
                    }
                },
            );
        }
    }
}

#[test]
fn softmax_formulas_are_gradients() {
    let (x, dy) = (wide(&values::<f32>(1, 9)), wide(&values::<f32>(2, 9)));
    let y = oracle::softmax(&x);
    let inner = dot(&dy, &y);
    let dx: Vec<f64> = y.iter().zip(&dy).map(|(y, dy)| y * (dy - inner)).collect();
    is_gradient("softmax", &x, &dx, |x| dot(&oracle::softmax(x), &dy));
    let total: f64 = dy.iter().sum();
    let dx: Vec<f64> = y.iter().zip(&dy).map(|(y, dy)| dy - y * total).collect();
    is_gradient("log softmax", &x, &dx, |x| {
        let lse = oracle::lse(x);
        x.iter().zip(&dy).map(|(x, dy)| (x - lse) * dy).sum()
    });
}

dtypes! {
    fn top_k_transpose_and_columns<T>() {
        for (rows, columns, k) in [(1, 1, 1), (3, 17, 17), (4, 5000, 50), (33, 70, 3)] {
            // Rounded to quarters, so that there are ties.
            let x: Vec<T> = values::<T>(1, rows * columns).iter().map(|x| T::from_f32((x.to_f32() * 40.0).round() / 4.0)).collect();
            on_every_cpu(
                |cpu| {
                    let (mut best, mut index) = (vec![T::default(); rows * k], vec![0; rows * k]);
                    top_k(cpu, columns, k, &x, &mut best, &mut index);
                    let mut turned = x.clone();
                    transpose(cpu, [rows, columns], &x, &mut turned);
                    let mut joined = vec![T::default(); rows * (columns + k)];
                    copy_columns(cpu, rows, columns, &x, [columns, 0], &mut joined, [columns + k, k]);
                    copy_columns(cpu, rows, k, &best, [k, 0], &mut joined, [columns + k, 0]);
                    (best, index, turned, joined)
                },
                |isa, (best, index, turned, joined)| {
                    for r in 0..rows {
                        let row = &x[r * columns..(r + 1) * columns];
                        let mut order: Vec<usize> = (0..columns).collect();
                        order.sort_by(|a, b| row[*b].to_f32().total_cmp(&row[*a].to_f32()).then(a.cmp(b)));
                        for j in 0..k {
                            assert_eq!(index[r * k + j] as usize, order[j], "{isa} row {r} place {j}");
                            assert!(best[r * k + j] == row[order[j]]);
                        }
                        assert!((0..columns).all(|c| turned[c * rows + r] == row[c]));
                        let line = &joined[r * (columns + k)..(r + 1) * (columns + k)];
                        assert!(line[..k] == best[r * k..(r + 1) * k] && line[k..] == *row);
                    }
                },
            );
        }
    }
}
