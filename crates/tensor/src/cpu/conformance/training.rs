//! Rotary embedding, activations, embedding, cross-entropy and the fused head.

use super::{ULP, close, dot, dtypes, is_gradient, on_every_cpu, roundoff, values, wide};
use crate::cpu::activation::{Activation, activation, activation_backward, glu, glu_backward};
use crate::cpu::distill::{Distillation, Divergence, TeacherLogits, distillation_loss};
use crate::cpu::embedding::{IndexError, TablePart, embedding, embedding_backward};
use crate::cpu::gemm::{Accumulate, MatMut, MatRef, Weight};
use crate::cpu::head::{
    HeadGradients, chunk_rows, linear_cross_entropy, part_gradients, vocabulary_statistics, workspace,
};
use crate::cpu::loss::{
    IGNORE, RowLosses, cross_entropy, cross_entropy_backward, cross_entropy_in_place, merge_statistics,
};
use crate::cpu::norm::HeadColumns;
use crate::cpu::rope::{RopeError, RopeScaling, RopeTable, Rotation, rope, rope_frequencies};
use crate::cpu::value_residual::{value_residual, value_residual_backward};
use crate::cpu::{Cpu, Isa};
use crate::dtype::Element;
use crate::reference::{activation as curve, loss as oracle};
use std::ops::Range;

dtypes! {
    fn rope_turns_pairs_and_turns_back<T>() {
        for (rows, columns, dim) in [
            (0, HeadColumns { row_stride: 8, first: 0, heads: 1, head_dim: 8 }, 8),
            (3, HeadColumns { row_stride: 25, first: 1, heads: 2, head_dim: 10 }, 6),
            (301, HeadColumns { row_stride: 192, first: 0, heads: 2, head_dim: 64 }, 64),
        ] {
            let x = values::<T>(1, rows * columns.row_stride);
            let positions: Vec<i32> = (0..rows as i32).map(|t| t * 7 % 64).collect();
            let table = RopeTable::new(dim, 10_000.0, RopeScaling::None, 64).unwrap();
            on_every_cpu(
                |cpu| {
                    let mut y = x.clone();
                    rope(cpu, Rotation::Forward, columns, &table, &positions, &mut y).unwrap();
                    let mut back = y.clone();
                    rope(cpu, Rotation::Backward, columns, &table, &positions, &mut back).unwrap();
                    (y, back)
                },
                |isa, (y, back)| {
                    let turn = |x: &[T], sign: f64| {
                        let x = wide(x);
                        let mut want = x.clone();
                        for (row, position) in positions.iter().enumerate() {
                            for head in 0..columns.heads {
                                let at = row * columns.row_stride + columns.first + head * columns.head_dim;
                                for j in 0..dim / 2 {
                                    let angle = f64::from(*position as f32 * 10_000f64.powf(-2.0 * j as f64 / dim as f64) as f32);
                                    let (a, b) = (x[at + j], x[at + dim / 2 + j]);
                                    want[at + j] = a * angle.cos() - sign * b * angle.sin();
                                    want[at + dim / 2 + j] = b * angle.cos() + sign * a * angle.sin();
                                }
                            }
                        }
                        want
                    };
                    // Roundings of cosine, sine, two products and a sum, all of numbers below 2.
                    close(isa, "rope", y, &turn(&x, 1.0), 6.0 * ULP);
                    close(isa, "rope backward", back, &turn(y, -1.0), 6.0 * ULP);
                },
            );
        }
    }
}

dtypes! {
    fn value_residuals_and_their_gradients<T>() {
        for (rows, columns) in [
            (0, HeadColumns { row_stride: 8, first: 0, heads: 1, head_dim: 8 }),
            (3, HeadColumns { row_stride: 25, first: 5, heads: 2, head_dim: 10 }),
            (301, HeadColumns { row_stride: 192, first: 128, heads: 1, head_dim: 64 }),
        ] {
            let width = columns.heads * columns.head_dim;
            let weights = [0.75f32, -1.5];
            let (x, first) = (values::<T>(1, rows * columns.row_stride), values::<T>(2, rows * width));
            let (dy, own) = (values::<T>(3, rows * columns.row_stride), values::<T>(4, rows * width));
            on_every_cpu(
                |cpu| {
                    let (mut y, mut plain, mut kept) = (x.clone(), x.clone(), first.clone());
                    value_residual(cpu, columns, weights, &first, Some(&mut kept), &mut y);
                    value_residual(cpu, columns, weights, &first, None, &mut plain);
                    assert!(y == plain, "values that are put aside change the result");
                    let mut space = vec![f32::NAN; crate::cpu::norm::backward_workspace(rows, 2)];
                    let (mut dx, mut dfirst, mut sums) = (dy.clone(), first.clone(), vec![1.0; 2]);
                    let both = [&own[..], &first[..]];
                    value_residual_backward(cpu, columns, weights, both, &mut dx, &mut dfirst, Some(&mut sums), &mut space);
                    (y, kept, dx, dfirst, sums)
                },
                |isa, (y, kept, dx, dfirst, sums)| {
                    let [a, b] = weights.map(f64::from);
                    let (mut want_y, mut want_dx) = (wide(&x), wide(&dy));
                    let (x, dy, first, own) = (wide(&x), wide(&dy), wide(&first), wide(&own));
                    let (mut want_kept, mut want_dfirst, mut want_sums) = (own.clone(), own.clone(), [1.0; 2]);
                    for i in 0..rows * width {
                        let at = i / width * columns.row_stride + columns.first + i % width;
                        want_y[at] = a * x[at] + b * first[i];
                        want_kept[i] = x[at];
                        want_dx[at] = a * dy[at];
                        want_dfirst[i] = b * dy[at];
                        want_sums[0] += dy[at] * own[i];
                        want_sums[1] += dy[at] * first[i];
                    }
                    // Two roundings of numbers below 2.25; sums of so many products below 1, in
                    // some hundred steps of up to their size.
                    close(isa, "value residual", y, &want_y, 5.0 * ULP);
                    close(isa, "own values", kept, &want_kept, 0.0);
                    close(isa, "gradient of qkv", dx, &want_dx, 2.0 * ULP);
                    close(isa, "gradient of the first values", dfirst, &want_dfirst, 2.0 * ULP);
                    close(isa, "gradient of the weights", sums, &want_sums, 400.0 * ((rows * width) as f64).sqrt() * ULP);
                },
            );
        }
    }
}

#[test]
fn rope_reports_positions_beyond_the_table_and_impossible_settings() {
    let table = RopeTable::new(4, 10_000.0, RopeScaling::None, 3).unwrap();
    let columns = HeadColumns { row_stride: 4, first: 0, heads: 1, head_dim: 4 };
    let error = rope(&Cpu::new(Isa::Portable, 1), Rotation::Forward, columns, &table, &[0, 3], &mut [1.0f32; 8]);
    assert_eq!(error, Err(IndexError { what: "position", index: 3, entry: 1, limit: 3 }));
    assert_eq!(rope_frequencies(5, 1e4, RopeScaling::None), Err(RopeError::OddDim(5)));
    let linear = RopeScaling::Linear { factor: 0.0 };
    assert_eq!(rope_frequencies(4, 1e4, linear), Err(RopeError::NotPositive { name: "factor", value: 0.0 }));
    let llama = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_context: 8 };
    assert_eq!(rope_frequencies(4, 1e4, llama), Err(RopeError::Factors { low: 4.0, high: 4.0 }));
}

const ACTIVATIONS: [Activation; 6] = [
    Activation::None,
    Activation::Relu,
    Activation::ReluSquared,
    Activation::Silu,
    Activation::GeluExact,
    Activation::GeluTanh,
];

dtypes! {
    fn activations_and_gated_units<T>() {
        for (rows, width) in [(0, 3), (1, 1), (3, 17), (301, 130)] {
            let spread = |seed, len| -> Vec<T> {
                values::<T>(seed, len).iter().map(|x| T::from_f32(x.to_f32() * 6.0)).collect()
            };
            let (x, dy) = (spread(1, 2 * rows * width), values::<T>(2, 2 * rows * width));
            let half = rows * width;
            for f in ACTIVATIONS {
                on_every_cpu(
                    |cpu| {
                        let (mut y, mut dx) = (x.clone(), x.clone());
                        activation(cpu, f, &x, &mut y);
                        activation_backward(cpu, f, &dy, &x, &mut dx);
                        let (mut gated, mut dgated) = (x[..half].to_vec(), x.clone());
                        glu(cpu, f, width, &x, &mut gated);
                        glu_backward(cpu, f, width, &dy[..half], &x, &mut dgated);
                        (y, dx, gated, dgated)
                    },
                    |isa, (y, dx, gated, dgated)| {
                        let (x, dy) = (wide(&x), wide(&dy));
                        // Exponentials are off by 4e-7 relative after an argument of up to 20,
                        // whose rounding adds 20 ULP; values and derivatives are below 6, the
                        // products below 36.
                        let slack = 40.0 * 6.0 * ULP;
                        let want: Vec<f64> = x.iter().map(|x| curve::value(f, *x)).collect();
                        close(isa, &format!("{f:?}"), y, &want, slack);
                        let want: Vec<f64> = x.iter().zip(&dy).map(|(x, dy)| dy * curve::slope(f, *x)).collect();
                        close(isa, &format!("{f:?} backward"), dx, &want, slack);
                        for row in 0..rows {
                            for j in 0..width {
                                let (gate, up) = (x[2 * row * width + j], x[(2 * row + 1) * width + j]);
                                let i = row * width + j;
                                close(isa, "glu", &gated[i..=i], &[curve::value(f, gate) * up], 6.0 * slack);
                                let (dgate, dup) = (dy[i] * up * curve::slope(f, gate), dy[i] * curve::value(f, gate));
                                close(isa, "dgate", &dgated[2 * row * width + j..][..1], &[dgate], 6.0 * slack);
                                close(isa, "dup", &dgated[(2 * row + 1) * width + j..][..1], &[dup], slack);
                            }
                        }
                    },
                );
            }
        }
    }
}

#[test]
fn activation_oracles_are_gradients_and_tails_keep_their_digits() {
    let x: Vec<f64> = wide(&values::<f32>(1, 40)).iter().map(|x| x * 5.0).collect();
    for f in ACTIVATIONS {
        for x in &x {
            is_gradient(&format!("{f:?}"), &[*x], &[curve::slope(f, *x)], |x| curve::value(f, x[0]));
        }
    }
    // Far below zero the exact GELU is -|x| erfc(|x| / sqrt 2) / 2; a form with 1 + erf would keep
    // no digit of it.
    let x: Vec<f32> = (10..70).map(|i| -(i as f32) / 10.0).collect();
    on_every_cpu(
        |cpu| {
            let mut y = x.clone();
            activation(cpu, Activation::GeluExact, &x, &mut y);
            y
        },
        |isa, y| {
            for (x, y) in x.iter().zip(y) {
                let want = curve::value(Activation::GeluExact, f64::from(*x));
                // The exponent x^2 / 2 <= 24.5 is rounded twice: 50 ULP.
                assert!((f64::from(*y) - want).abs() <= 60.0 * ULP * want.abs(), "{isa} {x}: {y} against {want}");
            }
        },
    );
}

dtypes! {
    fn embedding_and_its_gradient<T>() {
        for (tokens, dim, vocab) in [(0, 3, 2), (1, 1, 1), (40, 17, 5), (700, 130, 300)] {
            let ids: Vec<i32> = (0..tokens as i32).map(|t| (t * t + t / 3) % vocab as i32).collect();
            let positions: Vec<i32> = (0..tokens as i32).map(|t| t % 9).collect();
            let (table, places, dy) = (values::<T>(1, vocab * dim), values::<T>(2, 9 * dim), values::<T>(3, tokens * dim));
            on_every_cpu(
                |cpu| {
                    let (mut y, mut z) = (dy.clone(), dy.clone());
                    embedding(cpu, dim, &ids, &table, None, None, &mut y).unwrap();
                    embedding(cpu, dim, &ids, &table, None, Some((&positions, &places)), &mut z).unwrap();
                    let mut gradient = vec![1.0; vocab * dim];
                    embedding_backward(cpu, dim, &ids, &dy, &mut gradient, None).unwrap();
                    (y, z, gradient)
                },
                |isa, (y, z, gradient)| {
                    // Addition in token order in f32: the very bits.
                    let mut want = vec![1.0f32; vocab * dim];
                    for (t, id) in ids.iter().enumerate() {
                        let row = &table[*id as usize * dim..][..dim];
                        assert!(y[t * dim..(t + 1) * dim] == *row);
                        let place = &places[positions[t] as usize * dim..][..dim];
                        let sum: Vec<f64> = wide(row).iter().zip(wide(place)).map(|(a, b)| a + b).collect();
                        close(isa, "token + position", &z[t * dim..(t + 1) * dim], &sum, ULP * 2.0);
                        for j in 0..dim {
                            want[*id as usize * dim + j] += dy[t * dim + j].to_f32();
                        }
                    }
                    assert!(*gradient == want, "{isa}: tokens are not added in order");
                },
            );
        }
        let cpu = Cpu::new(Isa::Portable, 1);
        let mut y = [T::default(); 4];
        let error = embedding(&cpu, 2, &[0, -1], &[T::default(); 6], None, None, &mut y);
        assert_eq!(error, Err(IndexError { what: "token", index: -1, entry: 1, limit: 3 }));
        let error = embedding_backward(&cpu, 2, &[3], &y[..2], &mut [0.0; 6], None);
        assert_eq!(error, Err(IndexError { what: "token", index: 3, entry: 0, limit: 3 }));
    }
}

dtypes! {
    fn parts_of_an_embedding_are_those_of_the_whole<T>() {
        let (tokens, dim, vocab) = (700, 130, 300);
        let ids: Vec<i32> = (0..tokens as i32).map(|t| (t * t + t / 3) % vocab as i32).collect();
        let positions: Vec<i32> = (0..tokens as i32).map(|t| t % 9).collect();
        let (table, places, dy) = (values::<T>(1, vocab * dim), values::<T>(2, 9 * dim), values::<T>(3, tokens * dim));
        for rows in [0..128, 128..300, 7..8, 5..5] {
            let part = Some(TablePart { first: rows.start, whole: vocab });
            let here = &table[rows.start * dim..rows.end * dim];
            on_every_cpu(
                |cpu| {
                    let (mut y, mut z, mut gradient) = (dy.clone(), dy.clone(), vec![1.0; rows.len() * dim]);
                    embedding(cpu, dim, &ids, here, part, None, &mut y).unwrap();
                    embedding(cpu, dim, &ids, here, part, Some((&positions, &places)), &mut z).unwrap();
                    embedding_backward(cpu, dim, &ids, &dy, &mut gradient, part).unwrap();
                    (y, z, gradient)
                },
                |isa, (y, z, gradient)| {
                    let mut want = vec![1.0f32; rows.len() * dim];
                    for (t, id) in ids.iter().enumerate() {
                        let place = &places[positions[t] as usize * dim..][..dim];
                        let (y, z) = (&y[t * dim..(t + 1) * dim], &z[t * dim..(t + 1) * dim]);
                        if !rows.contains(&(*id as usize)) {
                            assert!(y.iter().all(|y| *y == T::default()) && z == place, "{isa}: token {t} is elsewhere");
                            continue;
                        }
                        assert!(y == &table[*id as usize * dim..][..dim], "{isa}: token {t}");
                        let sum: Vec<f64> = wide(y).iter().zip(wide(place)).map(|(a, b)| a + b).collect();
                        close(isa, "token + position", z, &sum, ULP * 2.0);
                        for j in 0..dim {
                            want[(*id as usize - rows.start) * dim + j] += dy[t * dim + j].to_f32();
                        }
                    }
                    assert!(*gradient == want, "{isa}: tokens are not added in order");
                },
            );
        }
    }
}

fn targets(rows: usize, vocab: usize) -> Vec<i32> {
    (0..rows).map(|row| if row % 5 == 3 { IGNORE } else { (row * 31 % vocab) as i32 }).collect()
}

fn target(target: i32) -> Option<usize> {
    usize::try_from(target).ok()
}

dtypes! {
    fn cross_entropy_and_its_gradient<T>() {
        for (rows, vocab) in [(0, 3), (1, 1), (7, 17), (40, 5003)] {
            let logits: Vec<T> = values::<T>(1, rows * vocab).iter().map(|x| T::from_f32(x.to_f32() * 10.0)).collect();
            let targets = targets(rows, vocab);
            let scale = 0.125;
            on_every_cpu(
                |cpu| {
                    let (mut loss, mut lse, mut hit) = (vec![9.0; rows], vec![9.0; rows], vec![9; rows]);
                    let out = RowLosses { loss: &mut loss, lse: &mut lse, hit: Some(&mut hit) };
                    cross_entropy(cpu, vocab, &logits, &targets, out).unwrap();
                    let mut gradient = logits.clone();
                    cross_entropy_backward(cpu, vocab, &mut gradient, &targets, &lse, scale).unwrap();
                    let (mut fused, mut loss_2, mut lse_2) = (logits.clone(), loss.clone(), lse.clone());
                    let out = RowLosses { loss: &mut loss_2, lse: &mut lse_2, hit: None };
                    cross_entropy_in_place(cpu, vocab, &mut fused, &targets, scale, out).unwrap();
                    assert!(fused == gradient && loss == loss_2, "one pass and two differ");
                    (loss, lse, hit, gradient)
                },
                |isa, (loss, lse, hit, gradient)| {
                    for row in 0..rows {
                        let span = row * vocab..(row + 1) * vocab;
                        let x = wide(&logits[span.clone()]);
                        let (want, mut slope) = oracle::cross_entropy(&x, target(targets[row]));
                        slope.iter_mut().for_each(|slope| *slope *= f64::from(scale));
                        // lse is about 20 at most, and the sum's relative error adds some 20 ULP.
                        close(isa, "lse", &lse[row..=row], &[oracle::lse(&x)], 60.0 * ULP);
                        close(isa, "loss", &loss[row..=row], &[want], 80.0 * ULP);
                        close(isa, "gradient", &gradient[span], &slope, 80.0 * ULP * f64::from(scale));
                        let best = target(targets[row]).is_some_and(|t| x.iter().all(|other| *other <= x[t]));
                        assert_eq!(hit[row], u32::from(best));
                    }
                },
            );
        }
    }
}

#[test]
fn broken_logits_make_a_broken_loss_and_wrong_targets_an_error() {
    let cpu = Cpu::new(Isa::detect(), 1);
    let (mut loss, mut lse) = ([0.0], [0.0]);
    for broken in [f32::NAN, f32::INFINITY] {
        let mut logits = [0.5f32; 40];
        logits[33] = broken;
        cross_entropy(&cpu, 40, &logits, &[2], RowLosses { loss: &mut loss, lse: &mut lse, hit: None }).unwrap();
        assert!(!loss[0].is_finite(), "{broken} gives {}", loss[0]);
    }
    let error = cross_entropy(&cpu, 4, &[0.0f32; 4], &[4], RowLosses { loss: &mut loss, lse: &mut lse, hit: None });
    assert_eq!(error, Err(IndexError { what: "target", index: 4, entry: 0, limit: 4 }));
}

#[test]
fn the_cross_entropy_oracle_is_a_gradient() {
    let x = wide(&values::<f32>(1, 11));
    is_gradient("cross-entropy", &x, &oracle::cross_entropy(&x, Some(4)).1, |x| oracle::cross_entropy(x, Some(4)).0);
    is_gradient("ignored", &x, &oracle::cross_entropy(&x, None).1, |x| oracle::cross_entropy(x, None).0);
}

/// The losses of a head and `scale` times their gradients dx and dw, which is added to ones. All in
/// f64; x [tokens, dim], w [vocab, dim].
fn head_in_f64(x: &[f64], w: &[f64], targets: &[i32], dim: usize, scale: f32) -> [Vec<f64>; 3] {
    let (mut losses, mut dx, mut dw) = (Vec::new(), vec![0.0; x.len()], vec![1.0; w.len()]);
    for ((row, dx), wanted) in x.chunks(dim).zip(dx.chunks_mut(dim)).zip(targets) {
        let logits: Vec<f64> = w.chunks(dim).map(|w| dot(row, w)).collect();
        let (loss, slope) = oracle::cross_entropy(&logits, target(*wanted));
        losses.push(loss);
        for ((w, dw), slope) in w.chunks(dim).zip(dw.chunks_mut(dim)).zip(slope) {
            for j in 0..dim {
                dx[j] += f64::from(scale) * slope * w[j];
                dw[j] += f64::from(scale) * slope * row[j];
            }
        }
    }
    [losses, dx, dw]
}

/// Every rung of the products too, so `Isa::available` and not only the vector rungs.
#[test]
fn head_in_chunks_of_any_length() {
    fn run<T: Element>() {
        let (tokens, dim, vocab) = (75, 24, 301);
        let (x, w) = (values::<T>(1, tokens * dim), values::<T>(2, vocab * dim));
        let targets = targets(tokens, vocab);
        let scale = 0.5f32;
        let [losses, dx, dw] = head_in_f64(&wide(&x), &wide(&w), &targets, dim, scale);
        // Logits are sums of 24 products below 1, below 12 with this data. They are rounded to T at
        // a size of 8: u 8. The loss moves by as much; a gradient's
        // softmax by that relative to itself and by one more rounding, the sums over vocab or
        // tokens by their weighted mean, at most 1.
        let slack = 10.0 * roundoff(T::DTYPE) + 200.0 * ULP;
        for isa in Isa::tested(Isa::Avx512Bf16) {
            let mut outcomes = Vec::new();
            for (threads, chunk) in [(1, 75), (2, 75), (3, 75), (1, 32), (2, 64)] {
                let cpu = Cpu::new(isa, threads);
                let mut space = vec![T::default(); workspace(chunk, vocab)];
                let (mut each, mut got_dx, mut got_dw) =
                    (vec![9.0; tokens], vec![T::default(); tokens * dim], vec![1.0; vocab * dim]);
                let (x, w) = (MatRef::new(&x, tokens, dim), Weight::from(MatRef::new(&w[..], vocab, dim)));
                let gradients = HeadGradients {
                    scale,
                    dx: Some(MatMut::new(&mut got_dx, tokens, dim)),
                    dw: Some(&mut got_dw),
                    accumulate: Accumulate::Add,
                };
                let found = linear_cross_entropy(&cpu, x, w, &targets, Some(gradients), &mut each, &mut space).unwrap();
                let mut alone = vec![9.0; tokens];
                let evaluated = linear_cross_entropy(&cpu, x, w, &targets, None, &mut alone, &mut space).unwrap();
                assert_eq!((found, &each), (evaluated, &alone), "evaluation and training give other losses");
                assert_eq!(found.tokens, 60);
                assert!((found.loss_sum - losses.iter().sum::<f64>()).abs() <= 75.0 * slack);
                close(isa, "losses", &each, &losses, slack);
                close(isa, "dx", &got_dx, &dx, slack);
                close(isa, "dw", &got_dw, &dw, 15.0 * slack);
                outcomes.push((each, got_dx, got_dw));
            }
            assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]), "{isa}: threads or chunks change bits");
        }
    }
    run::<f32>();
    run::<crate::dtype::bf16>();
    run::<crate::dtype::f16>();
    assert_eq!(chunk_rows::<crate::dtype::bf16>(2048, 50_257), 1024);
    assert_eq!(chunk_rows::<f32>(2048, 50_257), 512);
    assert_eq!(chunk_rows::<f32>(7, 100), 7);
}

/// A row's loss beside a teacher, and its gradient by the student's logits z.
fn taught_in_f64(z: &[f64], t: &[f64], wanted: Option<usize>, distillation: Distillation) -> (f64, Vec<f64>) {
    let Some(wanted) = wanted else { return (0.0, vec![0.0; z.len()]) };
    let (weight, heat) = (f64::from(distillation.weight), f64::from(distillation.temperature));
    let softmax = |x: &[f64]| {
        let sum: f64 = x.iter().map(|x| (x / heat).exp()).sum();
        x.iter().map(|x| (x / heat).exp() / sum).collect::<Vec<f64>>()
    };
    let kl = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * (a / b).ln()).sum::<f64>();
    let (q, p) = (softmax(z), softmax(t));
    let each = |f: &dyn Fn(f64, f64) -> f64| p.iter().zip(&q).map(|(p, q)| f(*p, *q)).collect::<Vec<f64>>();
    let (distance, slope) = match distillation.divergence {
        Divergence::ForwardKl => (kl(&p, &q), each(&|p, q| q - p)),
        Divergence::ReverseKl => {
            let distance = kl(&q, &p);
            (distance, each(&|p, q| q * ((q / p).ln() - distance)))
        }
        Divergence::JensenShannon { beta } => {
            let b = f64::from(beta);
            let m = each(&|p, q| b * p + (1.0 - b) * q);
            let mean = kl(&q, &m);
            let slope = q.iter().zip(&m).map(|(q, m)| (1.0 - b) * q * ((q / m).ln() - mean)).collect();
            (b * kl(&p, &m) + (1.0 - b) * mean, slope)
        }
    };
    let (hard, hard_slope) = oracle::cross_entropy(z, Some(wanted));
    let slope = hard_slope.iter().zip(slope).map(|(hard, soft)| (1.0 - weight) * hard + weight * heat * soft);
    ((1.0 - weight) * hard + weight * heat * heat * distance, slope.collect())
}

const LESSONS: [Distillation; 4] = [
    Distillation { weight: 0.6, temperature: 1.0, divergence: Divergence::ForwardKl },
    Distillation { weight: 1.0, temperature: 2.0, divergence: Divergence::ForwardKl },
    Distillation { weight: 0.5, temperature: 1.5, divergence: Divergence::ReverseKl },
    Distillation { weight: 0.7, temperature: 0.8, divergence: Divergence::JensenShannon { beta: 0.3 } },
];

#[test]
fn the_distillation_oracle_is_a_gradient() {
    let (z, t) = (wide(&values::<f32>(1, 11)), wide(&values::<f32>(2, 11)));
    for lesson in LESSONS {
        let slope = taught_in_f64(&z, &t, Some(4), lesson).1;
        is_gradient("distillation", &z, &slope, |z| taught_in_f64(z, &t, Some(4), lesson).0);
    }
}

/// Losses, dx and dw of a student beside its teacher, on every rung, for ragged vocabularies, and
/// the same bits for any number of threads and any chunks.
#[test]
fn a_taught_head_in_chunks_of_any_length() {
    fn run<T: Element>(lesson: Distillation) {
        let (tokens, dim, width, vocab) = (75, 24, 17, 301);
        let (x, w) = (values::<T>(1, tokens * dim), values::<T>(2, vocab * dim));
        let (tx, tw) = (values::<T>(3, tokens * width), values::<T>(4, vocab * width));
        let (targets, scale) = (targets(tokens, vocab), 0.5f32);
        let wides = [&x, &w, &tx, &tw].map(|values| wide(values));
        let [wx, ww, wtx, wtw] = &wides;
        let (mut losses, mut dx, mut dw) = (Vec::new(), vec![0.0; x.len()], vec![1.0; w.len()]);
        for (row, wanted) in targets.iter().enumerate() {
            let hidden = &wx[row * dim..][..dim];
            let z: Vec<f64> = ww.chunks(dim).map(|w| dot(hidden, w)).collect();
            let t: Vec<f64> = wtw.chunks(width).map(|w| dot(&wtx[row * width..][..width], w)).collect();
            let (loss, slope) = taught_in_f64(&z, &t, target(*wanted), lesson);
            losses.push(loss);
            for (j, slope) in slope.iter().enumerate() {
                for k in 0..dim {
                    dx[row * dim + k] += f64::from(scale) * slope * ww[j * dim + k];
                    dw[j * dim + k] += f64::from(scale) * slope * hidden[k];
                }
            }
        }
        // As for the head without a teacher, whose logits err by u 8: here those of both models, of
        // which each loss takes at most T times the error, and a gradient's log(q / p) both.
        let slack = 3.0 * (10.0 * roundoff(T::DTYPE) + 200.0 * ULP);
        for isa in Isa::tested(Isa::Avx512Bf16) {
            let mut outcomes = Vec::new();
            for (threads, chunk) in [(1, 75), (3, 75), (2, 32)] {
                let cpu = Cpu::new(isa, threads);
                let mut spaces = [(); 2].map(|()| vec![T::default(); workspace(chunk, vocab)]);
                let [space, other] = &mut spaces;
                let (mut each, mut got_dx, mut got_dw) =
                    (vec![9.0; tokens], vec![T::default(); tokens * dim], vec![1.0; vocab * dim]);
                let rows = MatRef::new(&x, tokens, dim);
                let table = || Weight::from(MatRef::new(&w[..], vocab, dim));
                let mut lesson = |other: &mut Vec<T>, gradients, each: &mut [f32]| {
                    let lesson = TeacherLogits {
                        x: MatRef::new(&tx, tokens, width),
                        w: Weight::from(MatRef::new(&tw[..], vocab, width)),
                        distillation: lesson,
                        workspace: other,
                    };
                    distillation_loss(&cpu, rows, table(), lesson, &targets, gradients, each, space).unwrap()
                };
                let gradients = HeadGradients {
                    scale,
                    dx: Some(MatMut::new(&mut got_dx, tokens, dim)),
                    dw: Some(&mut got_dw),
                    accumulate: Accumulate::Add,
                };
                let found = lesson(other, Some(gradients), &mut each);
                let mut alone = vec![9.0; tokens];
                assert_eq!((found, &each), (lesson(other, None, &mut alone), &alone));
                assert_eq!(found.tokens, 60);
                close(isa, "losses", &each, &losses, slack);
                close(isa, "dx", &got_dx, &dx, slack);
                close(isa, "dw", &got_dw, &dw, 15.0 * slack);
                outcomes.push((each, got_dx, got_dw));
            }
            assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]), "{isa}: threads or chunks change bits");
        }
    }
    for lesson in LESSONS {
        run::<f32>(lesson);
        run::<crate::dtype::bf16>(lesson);
        run::<crate::dtype::f16>(lesson);
    }
}

/// Logits as far apart as they come leave losses and gradients finite.
#[test]
fn a_teacher_that_excludes_tokens_leaves_finite_gradients() {
    let (x, tx) = ([1.0f32], [1.0f32]);
    let (w, tw) = (values::<f32>(7, 40), (0..40).map(|j| if j % 3 == 0 { -3e4 } else { 1.0 }).collect::<Vec<f32>>());
    for isa in Isa::tested(Isa::Avx512) {
        let cpu = Cpu::new(isa, 1);
        for lesson in LESSONS {
            let (mut losses, mut dx, mut spaces) = ([9.0], [9.0], [(); 2].map(|()| vec![0.0f32; workspace(1, 40)]));
            let [space, other] = &mut spaces;
            let gradients = HeadGradients {
                scale: 1.0,
                dx: Some(MatMut::new(&mut dx, 1, 1)),
                dw: None,
                accumulate: Accumulate::Add,
            };
            let lesson = TeacherLogits {
                x: MatRef::new(&tx, 1, 1),
                w: Weight::from(MatRef::new(&tw[..], 40, 1)),
                distillation: lesson,
                workspace: other,
            };
            let table = Weight::from(MatRef::new(&w[..], 40, 1));
            let x = MatRef::new(&x, 1, 1);
            distillation_loss(&cpu, x, table, lesson, &[5], Some(gradients), &mut losses, space).unwrap();
            assert!(losses[0].is_finite() && dx[0].is_finite(), "{isa}: {losses:?} {dx:?}");
        }
    }
}

/// The losses and gradients of a vocabulary in parts are those of the whole, on every rung.
#[test]
fn head_in_parts_of_the_vocabulary() {
    fn run<T: Element>() {
        let (tokens, dim, vocab) = (75, 24, 301);
        let (x, w) = (values::<T>(1, tokens * dim), values::<T>(2, vocab * dim));
        let (targets, scale) = (targets(tokens, vocab), 0.5f32);
        let [losses, dx, dw] = head_in_f64(&wide(&x), &wide(&w), &targets, dim, scale);
        // As for the head in one part; each part's summand of dx is rounded once more, at a size
        // below 1.
        let slack = 13.0 * roundoff(T::DTYPE) + 200.0 * ULP;
        let parts = [0..64, 64..208, 208..301];
        for isa in Isa::tested(Isa::Avx512Bf16) {
            let mut outcomes = Vec::new();
            for (threads, chunk) in [(1, 75), (3, 75), (2, 32)] {
                let cpu = Cpu::new(isa, threads);
                let rows = MatRef::new(&x, tokens, dim);
                let of = |rows: &Range<usize>| {
                    let w = &w[rows.start * dim..rows.end * dim];
                    let part = TablePart { first: rows.start, whole: vocab };
                    (
                        Weight::from(MatRef::new(w, rows.len(), dim)),
                        part,
                        vec![T::default(); workspace(chunk, rows.len())],
                    )
                };
                let mut statistics = vec![9.0; 3 * 3 * tokens];
                for (range, out) in parts.iter().zip(statistics.chunks_mut(3 * tokens)) {
                    let (w, part, mut space) = of(range);
                    vocabulary_statistics(&cpu, rows, w, part, &targets, out, &mut space).unwrap();
                }
                let (mut each, mut lse) = (vec![9.0; tokens], vec![9.0; tokens]);
                merge_statistics(&statistics, &targets, &mut each, &mut lse);
                let (mut sum_dx, mut got_dw) = (vec![0.0; tokens * dim], vec![1.0; vocab * dim]);
                for range in &parts {
                    let (w, part, mut space) = of(range);
                    let mut got_dx = vec![T::default(); tokens * dim];
                    let gradients = HeadGradients {
                        scale,
                        dx: Some(MatMut::new(&mut got_dx, tokens, dim)),
                        dw: Some(&mut got_dw[range.start * dim..range.end * dim]),
                        accumulate: Accumulate::Add,
                    };
                    part_gradients(&cpu, rows, w, part, &targets, &lse, gradients, &mut space).unwrap();
                    sum_dx.iter_mut().zip(got_dx).for_each(|(sum, dx): (&mut f32, T)| *sum += dx.to_f32());
                }
                close(isa, "losses", &each, &losses, slack);
                close(isa, "dx", &sum_dx, &dx, slack);
                close(isa, "dw", &got_dw, &dw, 15.0 * slack);
                outcomes.push((each, sum_dx, got_dw));
            }
            assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]), "{isa}: threads or chunks change bits");
        }
        let (cpu, mut space, mut out) = (Cpu::new(Isa::Portable, 1), vec![T::default(); 32], [0.0; 3]);
        let (x, w) = (MatRef::new(&x[..1], 1, 1), Weight::from(MatRef::new(&w[..2], 2, 1)));
        let part = TablePart { first: 2, whole: 5 };
        let error = vocabulary_statistics(&cpu, x, w, part, &[5], &mut out, &mut space);
        assert_eq!(error, Err(IndexError { what: "target", index: 5, entry: 0, limit: 5 }));
    }
    run::<f32>();
    run::<crate::dtype::bf16>();
    run::<crate::dtype::f16>();
}

#[test]
fn broken_logits_in_one_part_make_a_broken_loss() {
    for broken in [f32::NAN, f32::INFINITY] {
        let (cpu, mut statistics) = (Cpu::new(Isa::detect(), 1), [0.0; 6]);
        let (whole, w) = ([1.0f32], [[0.5f32, 0.25], [0.5, broken]]);
        for (part, (w, out)) in w.iter().zip(statistics.chunks_mut(3)).enumerate() {
            let w = Weight::from(MatRef::new(&w[..], 2, 1));
            let part = TablePart { first: 2 * part, whole: 4 };
            vocabulary_statistics(&cpu, MatRef::new(&whole, 1, 1), w, part, &[1], out, &mut [0.0; 32]).unwrap();
        }
        let (mut loss, mut lse) = ([0.0], [0.0]);
        merge_statistics(&statistics, &[1], &mut loss, &mut lse);
        assert!(!loss[0].is_finite(), "{broken} gives {}", loss[0]);
    }
}
