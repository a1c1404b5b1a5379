//! Conformance of products of codes: integer sums, computed in `i64`, times both scales.

use super::*;
use crate::cpu::int8::Codes;

/// Random codes with their sums, and scales between 0.5 and 1.5.
struct Coded {
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl Coded {
    fn random(random: &mut Random, rows: usize, cols: usize) -> Coded {
        let codes: Vec<i8> = (0..rows * cols).map(|_| (random.next() * 127.99) as i8).collect();
        Coded::new(codes, (0..rows).map(|_| 1.0 + 0.5 * random.next()).collect())
    }

    fn new(codes: Vec<i8>, scales: Vec<f32>) -> Coded {
        let cols = codes.len() / scales.len();
        let sum = |row| codes[row * cols..(row + 1) * cols].iter().map(|code| i32::from(*code)).sum();
        Coded { sums: (0..scales.len()).map(sum).collect(), codes, scales }
    }

    fn view(&self) -> Codes<'_> {
        Codes { codes: &self.codes, scales: &self.scales, sums: &self.sums }
    }

    fn row(&self, row: usize) -> &[i8] {
        let cols = self.codes.len() / self.scales.len();
        &self.codes[row * cols..(row + 1) * cols]
    }
}

/// The sum of products of codes, and of their magnitudes.
fn sum(left: &[i8], right: &[i8]) -> (i64, i64) {
    let products = || left.iter().zip(right).map(|(a, b)| i64::from(*a) * i64::from(*b));
    (products().sum(), products().map(i64::abs).sum())
}

/// The largest error of a scaled sum: three roundings where sums are integers, else those of the
/// sum as well.
fn bound(rung: &str, k: usize, magnitude: f64) -> f64 {
    let of_sum = if ["Avx2Int8", "Avx512Vnni", "AmxInt8"].contains(&rung) { 0.0 } else { sum_bound(k, magnitude) };
    of_sum + 3.01 * 2f64.powi(-24) * magnitude
}

#[test]
fn forward_of_codes_conforms() {
    for (case, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let random = &mut Random(700 + case as u64);
        let (x, w) = (Coded::random(random, m, k), Coded::random(random, n, k));
        let bias: Vec<bf16> = random.values(n);
        let residual = Padded::<bf16>::random(random, m, n, case % 4);
        let before = Padded::<bf16>::random(random, m, n, 3 - case % 4);
        for activation in [Activation::None, Activation::GeluTanh] {
            let mut first = None;
            on_every_rung(DType::U8, |cpu, rung| {
                let (mut y, mut pre) = (before.clone(), before.clone());
                let epilogue = Epilogue {
                    bias: Some(&bias),
                    activation,
                    pre_activation: Some(pre.view_mut()),
                    residual: Some(residual.view()),
                };
                forward_int8(cpu, x.view(), w.view(), epilogue, y.view_mut());
                check_same(&mut first, rung, &y.data);
                assert!(y.same_gaps(&before) && pre.same_gaps(&before), "{rung}: wrote between rows");
                if cpu.threads.count() > 1 {
                    return;
                }
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let (sum, magnitude) = sum(x.row(i), w.row(j));
                    let scale = f64::from(x.scales[i]) * f64::from(w.scales[j]);
                    let (sum, b) = (sum as f64 * scale, f64::from(bias[j].to_f32()));
                    let bound = bound(rung, k, magnitude as f64 * scale) + 2f64.powi(-24) * (sum.abs() + b.abs());
                    let context = || format!("{rung} {m}x{n}x{k} {activation:?} at {i}, {j}");
                    let found = f64::from(pre.view().row(i)[j].to_f32());
                    check_close(found, sum + b, bound + store_bound::<bf16>(sum + b), context);
                    let wanted =
                        reference::activate(activation, sum + b) + f64::from(residual.view().row(i)[j].to_f32());
                    let bound = 1.13 * bound + activation_bound(sum + b) + 2f64.powi(-24) * wanted.abs();
                    let found = f64::from(y.view().row(i)[j].to_f32());
                    check_close(found, wanted, bound + store_bound::<bf16>(wanted), context);
                }
            });
        }
    }
}

#[test]
fn input_gradient_of_codes_conforms() {
    for (case, (m, k, n)) in SHAPES.into_iter().enumerate() {
        let random = &mut Random(800 + case as u64);
        let (dy, w) = (Coded::random(random, m, n), Coded::random(random, k, n));
        let before = Padded::<f32>::random(random, m, k, case % 3);
        for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
            let mut first = None;
            on_every_rung(DType::U8, |cpu, rung| {
                let mut dx = before.clone();
                let epilogue = GradientEpilogue { activation: None, accumulate };
                input_gradient_int8(cpu, dy.view(), w.view(), epilogue, dx.view_mut());
                check_same(&mut first, rung, &dx.data);
                assert!(dx.same_gaps(&before), "{rung}: wrote between rows");
                for (i, j) in (0..m).flat_map(|i| (0..k).map(move |j| (i, j))) {
                    let (sum, magnitude) = sum(dy.row(i), w.row(j));
                    let scale = f64::from(dy.scales[i]) * f64::from(w.scales[j]);
                    let old = match accumulate {
                        Accumulate::Add => f64::from(before.view().row(i)[j]),
                        Accumulate::Overwrite => 0.0,
                    };
                    let wanted = sum as f64 * scale + old;
                    let bound = bound(rung, n, magnitude as f64 * scale) + store_bound::<f32>(wanted);
                    check_close(f64::from(dx.view().row(i)[j]), wanted, bound, || {
                        format!("{rung} {m}x{k}x{n} {accumulate:?} at {i}, {j}")
                    });
                }
            });
        }
    }
}

/// The largest codes over the longest sums, whose `i32` wraps on the way where 128 is added.
#[test]
fn the_longest_sums_of_the_largest_codes_do_not_overflow() {
    let (m, n) = (3, 2);
    for (left, right) in [(127i8, 127i8), (-127, 127), (127, -127), (-127, -127)] {
        let coded = |rows, code| Coded::new(vec![code; rows * INT8_DEPTH_MAX], vec![1.0; rows]);
        let (left, right) = (coded(m, left), coded(n, right));
        let wanted = sum(left.row(0), right.row(0)).0 as f64;
        on_every_rung(DType::U8, |cpu, rung| {
            let mut y = vec![0f32; m * n];
            forward_int8(cpu, left.view(), right.view(), Epilogue::default(), MatMut::new(&mut y, m, n));
            for y in &y {
                check_close(f64::from(*y), wanted, bound(rung, INT8_DEPTH_MAX, wanted.abs()), || rung.to_owned());
            }
        });
    }
}

/// A row with a NaN or an infinity has a scale that is none, and so has every result of it.
#[test]
fn a_scale_that_is_no_number_spoils_its_row_alone() {
    let (m, n, k) = (4, 33, 40);
    let random = &mut Random(900);
    let (mut x, w) = (Coded::random(random, m, k), Coded::random(random, n, k));
    x.codes[k..2 * k].fill(0);
    x.sums[1] = 0;
    for bad in [f32::NAN, f32::INFINITY] {
        x.scales[1] = bad;
        on_every_rung(DType::U8, |cpu, rung| {
            let mut y = vec![0f32; m * n];
            forward_int8(cpu, x.view(), w.view(), Epilogue::default(), MatMut::new(&mut y, m, n));
            for (i, y) in y.iter().enumerate() {
                assert_eq!(y.is_finite(), i / n != 1, "{rung} {bad} at {i}: {y}");
            }
        });
    }
}
