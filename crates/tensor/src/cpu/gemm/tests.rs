//! Conformance: every register kernel, storage type, form and epilogue, on shapes with all kinds of
//! tails, against sums in `f64`; and the same bits from any number of threads.

mod int8;

use super::*;
use crate::cpu::Isa;
use crate::dtype::{DType, bf16, f16};
use crate::reference::matmul as reference;

/// The register kernels that can run here, AMX on emulated tiles where the CPU has none.
fn rungs(dtype: DType) -> Vec<Rung> {
    let best = Isa::tested(Isa::Avx512Bf16).last().expect("every machine has one");
    let mut rungs = vec![Rung::Portable];
    if best >= Isa::Avx2 {
        rungs.push(Rung::Avx2);
        if dtype == DType::U8 {
            rungs.push(Rung::Avx2Int8);
        }
    }
    if best >= Isa::Avx512 {
        rungs.push(Rung::Avx512);
        if dtype == DType::U8 {
            if crate::cpu::isa::has_vnni() {
                rungs.push(Rung::Avx512Vnni);
            } else {
                trainyard_testing::skip_part("this processor has no AVX-512 VNNI");
            }
        }
        if dtype == DType::BF16 && best >= Isa::Avx512Bf16 {
            rungs.push(Rung::Avx512Bf16);
        }
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        if dtype == DType::BF16 || dtype == DType::U8 && crate::cpu::isa::has_vnni() {
            if best < Isa::AmxBf16 {
                crate::cpu::tile_emulator::install();
            }
            rungs.push(if dtype == DType::BF16 { Rung::AmxBf16 } else { Rung::AmxInt8 });
        }
    }
    rungs
}

/// Runs `body` once per register kernel and number of threads, products inside using that kernel.
fn on_every_rung(dtype: DType, mut body: impl FnMut(&Cpu, &str)) {
    for rung in rungs(dtype) {
        let isa = match rung {
            Rung::Portable => Isa::Portable,
            Rung::Avx2 | Rung::Avx2Int8 => Isa::Avx2,
            Rung::Avx512 | Rung::Avx512Vnni => Isa::Avx512,
            Rung::Avx512Bf16 => Isa::Avx512Bf16,
            Rung::AmxBf16 | Rung::AmxInt8 => Isa::AmxBf16.min(Isa::detect()),
        };
        for threads in 1..=3 {
            let cpu = Cpu::new(isa, threads);
            driver::FORCED.set(Some(rung));
            body(&cpu, &format!("{rung:?}"));
            driver::FORCED.set(None);
        }
    }
}

/// Unit roundoff: half the distance from 1 to the next value.
fn roundoff<T: Element>() -> f64 {
    match T::DTYPE {
        DType::F32 => 2f64.powi(-24),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-8),
    }
}

/// The largest error of a sum of `k` products. Each product passes through at most `k + 2`
/// roundings of relative size `2^-24` (Higham, Accuracy and Stability, 3.1:
/// `γ_n = n u / (1 - n u)`), and `bf16` instructions flush subnormals.
fn sum_bound(k: usize, magnitude: f64) -> f64 {
    let nu = (k + 2) as f64 * 2f64.powi(-24);
    nu / (1.0 - nu) * magnitude + k as f64 * 2f64.powi(-126)
}

/// The largest error that storing `exact` in `T` may add: one rounding, or half a step of the
/// subnormals.
fn store_bound<T: Element>(exact: f64) -> f64 {
    let smallest = if T::DTYPE == DType::F16 { 2f64.powi(-25) } else { 2f64.powi(-134) };
    roundoff::<T>() * exact.abs() * 1.01 + smallest
}

/// The vector polynomials' error: 4e-7 absolute in values of order one (see `simd`), times the
/// argument that multiplies them.
fn activation_bound(pre: f64) -> f64 {
    1e-6 * (1.0 + pre.abs())
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn values<T: Element>(&mut self, len: usize) -> Vec<T> {
        (0..len).map(|_| T::from_f32(self.next())).collect()
    }
}

/// A matrix in a larger one: what lies between its rows must be left alone.
struct Padded<T> {
    data: Vec<T>,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<T: Element> Padded<T> {
    fn random(random: &mut Random, rows: usize, cols: usize, gap: usize) -> Self {
        Padded { data: random.values(rows * (cols + gap)), rows, cols, stride: cols + gap }
    }

    fn view(&self) -> MatRef<'_, T> {
        MatRef::with_stride(&self.data, self.rows, self.cols, self.stride)
    }

    fn view_mut(&mut self) -> MatMut<'_, T> {
        MatMut::with_stride(&mut self.data, self.rows, self.cols, self.stride)
    }

    fn same_gaps(&self, other: &Self) -> bool {
        (0..self.data.len()).filter(|i| i % self.stride >= self.cols).all(|i| self.data[i] == other.data[i])
    }
}

impl<T: Clone> Clone for Padded<T> {
    fn clone(&self) -> Self {
        Padded { data: self.data.clone(), ..*self }
    }
}

/// Rows, columns and depth: ones, sides of every tile and one off, more than one block, task and
/// panel.
const SHAPES: [(usize, usize, usize); 22] = [
    (1, 1, 1),
    (2, 3, 1),
    (1, 129, 65),
    (3, 17, 31),
    (4, 31, 127),
    (5, 1, 33),
    (13, 15, 16),
    (14, 32, 2),
    (15, 33, 17),
    (16, 16, 32),
    (17, 31, 63),
    (31, 65, 15),
    (33, 48, 64),
    (63, 63, 65),
    (65, 2, 129),
    (127, 129, 33),
    (129, 127, 1),
    (29, 33, 257),
    (9, 34, 1041),
    (43, 18, 515),
    (1040, 33, 20),
    (40, 790, 35),
];

fn check_close(found: f64, wanted: f64, bound: f64, context: impl Fn() -> String) {
    assert!((found - wanted).abs() <= bound, "{}: {found}, exactly {wanted}, bound {bound:e}", context());
}

/// Compares with what the first number of threads gave, bit by bit.
fn check_same<T: Element>(first: &mut Option<(String, Vec<T>)>, rung: &str, found: &[T]) {
    match first {
        Some((name, bits)) if name == rung => {
            let same = bits.iter().zip(found).all(|(a, b)| bytemuck::bytes_of(a) == bytemuck::bytes_of(b));
            assert!(same, "{rung}: other bits from another number of threads");
        }
        _ => *first = Some((rung.to_owned(), found.to_vec())),
    }
}

const ACTIVATIONS: [Activation; 6] = [
    Activation::None,
    Activation::Relu,
    Activation::ReluSquared,
    Activation::Silu,
    Activation::GeluExact,
    Activation::GeluTanh,
];

fn forward_conforms<T: Element, O: Element>() {
    for (case, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let random = &mut Random(case as u64);
        let x = Padded::<T>::random(random, m, k, case % 3);
        let w = Padded::<T>::random(random, n, k, case % 2 * 5);
        let bias: Vec<T> = random.values(n);
        let residual = Padded::<T>::random(random, m, n, case % 4);
        let before = Padded::<O>::random(random, m, n, 3 - case % 4);
        let pre_before = Padded::<T>::random(random, m, n, case % 2);
        let sums: Vec<(f64, f64)> = (0..m * n)
            .map(|i| reference::product(x.view(), Transpose::No, w.view(), Transpose::Yes, i / n, i % n))
            .collect();
        for (variant, activation) in ACTIVATIONS.into_iter().enumerate() {
            let (with_bias, with_pre, with_residual) =
                ((case + variant) % 2 == 0, variant >= 2, (case + variant) % 3 == 0);
            let mut first = None;
            on_every_rung(T::DTYPE, |cpu, rung| {
                let (mut y, mut pre) = (before.clone(), pre_before.clone());
                let epilogue = Epilogue {
                    bias: with_bias.then_some(&bias),
                    activation,
                    pre_activation: with_pre.then(|| pre.view_mut()),
                    residual: with_residual.then(|| residual.view()),
                };
                forward(cpu, x.view(), w.view().into(), epilogue, y.view_mut());
                check_same(&mut first, rung, &y.data);
                assert!(y.same_gaps(&before) && pre.same_gaps(&pre_before), "{rung}: wrote between rows");
                if cpu.threads.count() > 1 {
                    return;
                }
                for (i, (sum, magnitude)) in sums.iter().enumerate() {
                    let (i, j) = (i / n, i % n);
                    let b = if with_bias { bias[j].to_f32() as f64 } else { 0.0 };
                    let context = || format!("{rung} {} {m}x{n}x{k} {activation:?} at {i}, {j}", T::DTYPE);
                    let bound = sum_bound(k + 1, magnitude + b.abs());
                    if with_pre {
                        let found = pre.view().row(i)[j].to_f32() as f64;
                        check_close(found, sum + b, bound + store_bound::<T>(sum + b), context);
                    }
                    let r = if with_residual { residual.view().row(i)[j].to_f32() as f64 } else { 0.0 };
                    let wanted = reference::activate(activation, sum + b) + r;
                    // No activation is steeper than 1.13.
                    let bound = 1.13 * bound
                        + if activation == Activation::None { 0.0 } else { activation_bound(sum + b) }
                        + 2f64.powi(-24) * wanted.abs();
                    let found = y.view().row(i)[j].to_f32() as f64;
                    check_close(found, wanted, bound + store_bound::<O>(wanted), context);
                }
            });
        }
    }
}

#[test]
fn forward_conforms_in_f32() {
    forward_conforms::<f32, f32>();
}

#[test]
fn forward_conforms_in_bf16() {
    forward_conforms::<bf16, bf16>();
}

#[test]
fn forward_conforms_in_f16() {
    forward_conforms::<f16, f16>();
}

#[test]
fn forward_conforms_from_bf16_to_f32() {
    forward_conforms::<bf16, f32>();
}

fn input_gradient_conforms<T: Element>() {
    for (case, (m, k, n)) in SHAPES.into_iter().enumerate() {
        let random = &mut Random(100 + case as u64);
        let dy = Padded::<T>::random(random, m, n, case % 3);
        let w = Padded::<T>::random(random, n, k, case % 2 * 5);
        let pre = Padded::<T>::random(random, m, k, case % 4);
        let before = Padded::<T>::random(random, m, k, 3 - case % 4);
        let sums: Vec<(f64, f64)> = (0..m * k)
            .map(|i| reference::product(dy.view(), Transpose::No, w.view(), Transpose::No, i / k, i % k))
            .collect();
        for (variant, activation) in ACTIVATIONS.into_iter().enumerate() {
            let accumulate = if (case + variant) % 2 == 0 { Accumulate::Add } else { Accumulate::Overwrite };
            let mut first = None;
            on_every_rung(T::DTYPE, |cpu, rung| {
                let mut dx = before.clone();
                let epilogue = GradientEpilogue {
                    activation: (activation != Activation::None).then(|| (activation, pre.view())),
                    accumulate,
                };
                input_gradient(cpu, dy.view(), w.view().into(), epilogue, dx.view_mut());
                check_same(&mut first, rung, &dx.data);
                assert!(dx.same_gaps(&before), "{rung}: wrote between rows");
                if cpu.threads.count() > 1 {
                    return;
                }
                for (i, (sum, magnitude)) in sums.iter().enumerate() {
                    let (i, j) = (i / k, i % k);
                    let slope = reference::derivative(activation, pre.view().row(i)[j].to_f32() as f64);
                    let old = match accumulate {
                        Accumulate::Add => before.view().row(i)[j].to_f32() as f64,
                        Accumulate::Overwrite => 0.0,
                    };
                    let wanted = sum * slope + old;
                    let bound = 1.13 * sum_bound(n + 2, magnitude + old.abs())
                        + if activation == Activation::None { 0.0 } else { 2.0 * activation_bound(1.0) * sum.abs() };
                    let found = dx.view().row(i)[j].to_f32() as f64;
                    check_close(found, wanted, bound + store_bound::<T>(wanted), || {
                        format!("{rung} {} {m}x{k}x{n} {activation:?} {accumulate:?} at {i}, {j}", T::DTYPE)
                    });
                }
            });
        }
    }
}

#[test]
fn input_gradient_conforms_in_f32() {
    input_gradient_conforms::<f32>();
}

#[test]
fn input_gradient_conforms_in_bf16() {
    input_gradient_conforms::<bf16>();
}

#[test]
fn input_gradient_conforms_in_f16() {
    input_gradient_conforms::<f16>();
}

fn weight_gradient_conforms<T: Element>() {
    for (case, (n, k, m)) in SHAPES.into_iter().enumerate() {
        let random = &mut Random(200 + case as u64);
        let dy = Padded::<T>::random(random, m, n, case % 3);
        let x = Padded::<T>::random(random, m, k, case % 2 * 5);
        let before: Vec<f32> = random.values(n * k);
        let bias_before: Vec<f32> = random.values(n);
        let sums: Vec<(f64, f64)> = (0..n * k)
            .map(|i| reference::product(dy.view(), Transpose::Yes, x.view(), Transpose::No, i / k, i % k))
            .collect();
        for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
            let (mut first, mut first_bias) = (None, None);
            on_every_rung(T::DTYPE, |cpu, rung| {
                let (mut dw, mut db) = (before.clone(), bias_before.clone());
                weight_gradient(cpu, dy.view(), x.view(), &mut dw, accumulate, Some(&mut db));
                check_same(&mut first, rung, &dw);
                check_same(&mut first_bias, rung, &db);
                if cpu.threads.count() > 1 {
                    return;
                }
                let old = |value: f32| if accumulate == Accumulate::Add { value as f64 } else { 0.0 };
                for (i, (sum, magnitude)) in sums.iter().enumerate() {
                    let old = old(before[i]);
                    let bound = sum_bound(m + 1, magnitude + old.abs());
                    check_close(dw[i] as f64, sum + old, bound, || {
                        format!("{rung} {} {n}x{k}x{m} {accumulate:?} at {i}", T::DTYPE)
                    });
                }
                for (j, db) in db.iter().enumerate() {
                    let column = (0..m).map(|i| dy.view().row(i)[j].to_f32() as f64);
                    let old = old(bias_before[j]);
                    let bound = sum_bound(m + 1, column.clone().map(f64::abs).sum::<f64>() + old.abs());
                    let wanted = column.sum::<f64>() + old;
                    check_close(*db as f64, wanted, bound, || format!("{rung} bias {j}"));
                }
            });
        }
    }
}

#[test]
fn weight_gradient_conforms_in_f32() {
    weight_gradient_conforms::<f32>();
}

#[test]
fn weight_gradient_conforms_in_bf16() {
    weight_gradient_conforms::<bf16>();
}

#[test]
fn weight_gradient_conforms_in_f16() {
    weight_gradient_conforms::<f16>();
}

/// The chain of each sum goes on where it stopped, so accumulation over micro-batches is the big
/// batch.
#[test]
fn a_batch_in_two_parts_gives_the_bits_of_the_whole() {
    let (m, n, k) = (96, 37, 50);
    let random = &mut Random(300);
    let (dy, x) = (random.values::<bf16>(m * n), random.values::<bf16>(m * k));
    let (dy, x) = (MatRef::new(&dy, m, n), MatRef::new(&x, m, k));
    on_every_rung(DType::BF16, |cpu, rung| {
        let (mut whole, mut parts) = (vec![0.0; n * k], vec![f32::NAN; n * k]);
        weight_gradient(cpu, dy, x, &mut whole, Accumulate::Overwrite, None);
        for (rows, accumulate) in [(0..32, Accumulate::Overwrite), (32..96, Accumulate::Add)] {
            weight_gradient(cpu, dy.row_range(rows.clone()), x.row_range(rows), &mut parts, accumulate, None);
        }
        assert!(whole == parts, "{rung}");
    });
}

/// Enough rows that threads join each other's tasks, over several blocks of the shared dimension
/// where sums continue in memory, and with narrow ends.
#[test]
fn threads_that_share_a_task_give_the_bits_of_one() {
    let (tokens, outputs, inputs) = (1100, 330, 70);
    let random = &mut Random(400);
    let (dy, x) = (random.values::<bf16>(tokens * outputs), random.values::<bf16>(tokens * inputs));
    let w = random.values::<bf16>(outputs * inputs);
    let before: Vec<f32> = random.values(outputs * inputs);
    let (dy, x) = (MatRef::new(&dy, tokens, outputs), MatRef::new(&x, tokens, inputs));
    let (mut dws, mut ys) = (None, None);
    for rung in rungs(DType::BF16) {
        driver::FORCED.set(Some(rung));
        for threads in [1, 2, 2, 3, 4] {
            let cpu = Cpu::new(Isa::detect(), threads);
            let (mut dw, mut y) = (before.clone(), vec![bf16::ZERO; tokens * outputs]);
            weight_gradient(&cpu, dy, x, &mut dw, Accumulate::Add, None);
            let w = Weight::from(MatRef::new(&w, outputs, inputs));
            forward(&cpu, x, w, Epilogue::default(), MatMut::new(&mut y, tokens, outputs));
            check_same(&mut dws, &format!("{rung:?}"), &dw);
            check_same(&mut ys, &format!("{rung:?}"), &y);
        }
        driver::FORCED.set(None);
    }
}

fn matmul_conforms<T: Element>() {
    for (case, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let random = &mut Random(400 + case as u64);
        for (transpose_a, transpose_b) in
            [(Transpose::No, Transpose::No), (Transpose::Yes, Transpose::No), (Transpose::Yes, Transpose::Yes)]
        {
            let (ar, ac) = if transpose_a == Transpose::No { (m, k) } else { (k, m) };
            let (br, bc) = if transpose_b == Transpose::No { (k, n) } else { (n, k) };
            let a = Padded::<T>::random(random, ar, ac, case % 2);
            let b = Padded::<T>::random(random, br, bc, case % 3);
            let before = Padded::<T>::random(random, m, n, 1);
            let (alpha, beta) = if case % 2 == 0 { (1.0, 0.0) } else { (0.75, -0.5) };
            let mut first = None;
            on_every_rung(T::DTYPE, |cpu, rung| {
                let mut c = before.clone();
                matmul(cpu, a.view(), transpose_a, b.view(), transpose_b, alpha, beta, c.view_mut());
                check_same(&mut first, rung, &c.data);
                if cpu.threads.count() > 1 {
                    return;
                }
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let (sum, magnitude) = reference::product(a.view(), transpose_a, b.view(), transpose_b, i, j);
                    let old = before.view().row(i)[j].to_f32() as f64 * beta as f64;
                    let wanted = alpha as f64 * sum + old;
                    let bound = sum_bound(k + 2, magnitude + old.abs()) + store_bound::<T>(wanted);
                    check_close(c.view().row(i)[j].to_f32() as f64, wanted, bound, || {
                        format!("{rung} {} {m}x{n}x{k} {transpose_a:?} {transpose_b:?} at {i}, {j}", T::DTYPE)
                    });
                }
            });
        }
    }
}

#[test]
fn matmul_conforms_in_f32() {
    matmul_conforms::<f32>();
}

#[test]
fn matmul_conforms_in_bf16() {
    matmul_conforms::<bf16>();
}

#[test]
fn batches_are_their_products() {
    let (count, m, n, k) = (5, 6, 7, 9);
    let random = &mut Random(500);
    let (a, b) = (random.values::<f32>(count * m * k), random.values::<f32>(k * n));
    for threads in 1..=3 {
        let cpu = Cpu::new(Isa::detect(), threads);
        let mut c = vec![f32::NAN; count * m * n];
        let repeated = Batch { step: 0, ..Batch::new(&b, k, n) };
        matmul_batched(&cpu, count, Batch::new(&a, m, k), Transpose::No, repeated, Transpose::No, 1.0, 0.0, &mut c);
        let mut one = vec![0.0; count * m * n];
        let stacked = MatRef::new(&a, count * m, k);
        let c_one = MatMut::new(&mut one, count * m, n);
        matmul(&cpu, stacked, Transpose::No, MatRef::new(&b, k, n), Transpose::No, 1.0, 0.0, c_one);
        assert_eq!(c, one);
    }
}

#[test]
fn empty_products_are_the_epilogue_of_nothing() {
    let bias = [1.0f32, 2.0, 3.0];
    let none: [f32; 0] = [];
    for isa in Isa::available() {
        let cpu = Cpu::new(isa, 2);
        for m in [2, 7] {
            let mut y = vec![f32::NAN; m * 3];
            let epilogue = Epilogue { bias: Some(&bias), ..Epilogue::default() };
            forward(
                &cpu,
                MatRef::new(&none, m, 0),
                MatRef::new(&none, 3, 0).into(),
                epilogue,
                MatMut::new(&mut y, m, 3),
            );
            assert_eq!(y, bias.repeat(m));
            forward::<f32, f32>(
                &cpu,
                MatRef::new(&none, 0, 3),
                MatRef::new(&bias, 1, 3).into(),
                Epilogue::default(),
                MatMut::new(&mut [], 0, 1),
            );
        }
        let mut dw = [5.0, 6.0];
        let (dy, x) = (MatRef::new(&none, 0, 2), MatRef::new(&none, 0, 1));
        weight_gradient(&cpu, dy, x, &mut dw, Accumulate::Add, None);
        assert_eq!(dw, [5.0, 6.0]);
        weight_gradient(&cpu, dy, x, &mut dw, Accumulate::Overwrite, None);
        assert_eq!(dw, [0.0, 0.0]);
    }
}

#[test]
#[should_panic(expected = "a bias of 2 elements for 3 outputs")]
fn a_wrong_bias_is_named() {
    let cpu = Cpu::new(Isa::Portable, 1);
    let (x, w, mut y) = ([0.0f32; 4], [0.0f32; 12], [0.0f32; 3]);
    let epilogue = Epilogue { bias: Some(&[0.0, 0.0]), ..Epilogue::default() };
    forward(&cpu, MatRef::new(&x, 1, 4), MatRef::new(&w, 3, 4).into(), epilogue, MatMut::new(&mut y, 1, 3));
}

/// Groups of rows, with empty ones and rows behind the last; and the sizes of each group's product.
const GROUPS: [(&[usize], usize, usize, usize); 6] = [
    (&[0, 3], 3, 5, 7),
    (&[0, 0, 1, 34, 34], 36, 33, 17),
    (&[0, 14, 29, 30, 95, 97], 97, 64, 40),
    (&[0, 0, 0], 4, 3, 2),
    (&[0, 260, 261, 262, 300, 300, 300, 317, 350], 350, 34, 300),
    (&[0, 5, 10, 15, 20, 25, 30, 35, 40, 45], 45, 70, 1041),
];

fn grouped_products_conform<T: Element>() {
    for (case, (bounds, rows, n, k)) in GROUPS.into_iter().enumerate() {
        let random = &mut Random(600 + case as u64);
        let (groups, end) = (bounds.len() - 1, bounds[bounds.len() - 1]);
        let x = Padded::<T>::random(random, rows, k, case % 3);
        let w = Padded::<T>::random(random, groups * n, k, case % 2 * 5);
        let dy = Padded::<T>::random(random, rows, n, case % 2);
        let before = [Padded::<T>::random(random, rows, n, 2), Padded::<T>::random(random, rows, k, 1)];
        let dw_before: Vec<f32> = random.values(groups * n * k);
        let group = |row: usize| bounds[1..].iter().position(|end| row < *end);
        let mut firsts = [None, None];
        let mut first_dw = [None, None];
        on_every_rung(T::DTYPE, |cpu, rung| {
            let [mut y, mut dx] = before.clone();
            grouped_forward(cpu, x.view(), w.view(), bounds, y.view_mut());
            grouped_input_gradient(cpu, dy.view(), w.view(), bounds, dx.view_mut());
            check_same(&mut firsts[0], rung, &y.data);
            check_same(&mut firsts[1], rung, &dx.data);
            assert!(y.same_gaps(&before[0]) && dx.same_gaps(&before[1]), "{rung}: wrote between rows");
            for row in end..rows {
                assert!(y.view().row(row) == before[0].view().row(row), "{rung}: wrote to nobody's row");
                assert!(dx.view().row(row) == before[1].view().row(row), "{rung}: wrote to nobody's row");
            }
            let mut gradients = [dw_before.clone(), dw_before.clone()];
            for (number, accumulate) in [Accumulate::Overwrite, Accumulate::Add].into_iter().enumerate() {
                let dw = &mut gradients[number];
                grouped_weight_gradient(cpu, dy.view(), x.view(), bounds, dw, accumulate);
                check_same(&mut first_dw[number], rung, dw);
            }
            if cpu.threads.count() > 1 {
                return;
            }
            for row in 0..end {
                let e = group(row).expect("a row of a group");
                let w = w.view().row_range(e * n..(e + 1) * n);
                for j in 0..n {
                    let (sum, magnitude) = reference::product(x.view(), Transpose::No, w, Transpose::Yes, row, j);
                    let bound = sum_bound(k, magnitude) + store_bound::<T>(sum);
                    let found = y.view().row(row)[j].to_f32() as f64;
                    check_close(found, sum, bound, || format!("{rung} {} y {row}, {j} of case {case}", T::DTYPE));
                }
                for j in (0..k).step_by(1 + k / 50) {
                    let (sum, magnitude) = reference::product(dy.view(), Transpose::No, w, Transpose::No, row, j);
                    let bound = sum_bound(n, magnitude) + store_bound::<T>(sum);
                    let found = dx.view().row(row)[j].to_f32() as f64;
                    check_close(found, sum, bound, || format!("{rung} {} dx {row}, {j} of case {case}", T::DTYPE));
                }
            }
            for e in 0..groups {
                let rows = bounds[e]..bounds[e + 1];
                let (dy, x) = (dy.view().row_range(rows.clone()), x.view().row_range(rows.clone()));
                for at in (0..n * k).step_by(1 + n * k / 500) {
                    let (sum, magnitude) = reference::product(dy, Transpose::Yes, x, Transpose::No, at / k, at % k);
                    let old = dw_before[e * n * k + at] as f64;
                    for (found, old) in gradients.iter().zip([0.0, old]) {
                        let bound = sum_bound(rows.len() + 1, magnitude + old.abs());
                        let found = found[e * n * k + at] as f64;
                        check_close(found, sum + old, bound, || format!("{rung} dw {e}, {at} of case {case}"));
                    }
                }
            }
        });
    }
}

#[test]
fn grouped_products_conform_in_f32() {
    grouped_products_conform::<f32>();
}

#[test]
fn grouped_products_conform_in_bf16() {
    grouped_products_conform::<bf16>();
}

#[test]
fn grouped_products_conform_in_f16() {
    grouped_products_conform::<f16>();
}

/// Several groups of a weight have the bits of products of one group each.
#[test]
fn groups_take_turns_with_weights() {
    let (bounds, weights, n, k) = ([0, 14, 14, 40, 90, 95, 131], 2, 33, 40);
    let random = &mut Random(640);
    let x = Padded::<f32>::random(random, 135, k, 1);
    let w = Padded::<f32>::random(random, weights * n, k, 0);
    let dy = Padded::<f32>::random(random, 135, n, 2);
    on_every_rung(DType::F32, |cpu, rung| {
        let (mut y, mut dx) = (vec![0.0f32; 135 * n], vec![0.0f32; 135 * k]);
        let [mut own_y, mut own_dx] = [y.clone(), dx.clone()];
        grouped_forward(cpu, x.view(), w.view(), &bounds, MatMut::new(&mut y, 135, n));
        grouped_input_gradient(cpu, dy.view(), w.view(), &bounds, MatMut::new(&mut dx, 135, k));
        for turn in 0..3 {
            let bounds = &bounds[turn * weights..=(turn + 1) * weights];
            grouped_forward(cpu, x.view(), w.view(), bounds, MatMut::new(&mut own_y, 135, n));
            grouped_input_gradient(cpu, dy.view(), w.view(), bounds, MatMut::new(&mut own_dx, 135, k));
        }
        assert!(y == own_y && dx == own_dx, "{rung}");
    });
}

/// Long groups have the bits of the plain products of their rows, whatever the other groups are.
#[test]
fn groups_have_the_bits_of_their_own_products() {
    let (n, k) = (40, 70);
    let bounds = [0usize, 20, 20, 133, 150];
    let random = &mut Random(700);
    let (x, w): (Vec<bf16>, Vec<bf16>) = (random.values(150 * k), random.values(4 * n * k));
    let dy: Vec<bf16> = random.values(150 * n);
    on_every_rung(DType::BF16, |cpu, rung| {
        let (mut y, mut dw) = (vec![bf16::ZERO; 150 * n], vec![0.0; 4 * n * k]);
        let (x, w, dy) = (MatRef::new(&x, 150, k), MatRef::new(&w, 4 * n, k), MatRef::new(&dy, 150, n));
        grouped_forward(cpu, x, w, &bounds, MatMut::new(&mut y, 150, n));
        grouped_weight_gradient(cpu, dy, x, &bounds, &mut dw, Accumulate::Overwrite);
        for e in 0..4 {
            let rows = bounds[e]..bounds[e + 1];
            let (mut alone, mut dw_alone) = (vec![bf16::ZERO; rows.len() * n], vec![0.0; n * k]);
            let w = w.row_range(e * n..(e + 1) * n);
            let y_alone = MatMut::new(&mut alone, rows.len(), n);
            forward(cpu, x.row_range(rows.clone()), w.into(), Epilogue::default(), y_alone);
            let (dy, x) = (dy.row_range(rows.clone()), x.row_range(rows.clone()));
            weight_gradient(cpu, dy, x, &mut dw_alone, Accumulate::Overwrite, None);
            assert!(alone == y[rows.start * n..rows.end * n] && dw_alone == dw[e * n * k..(e + 1) * n * k], "{rung}");
        }
    });
}

/// Half of it computed and mirrored, with the factors of each product exchanged: the bits of the
/// whole, on any number of threads.
fn gram_is_the_product_with_the_transpose<T: Element>() {
    let mut random = Random(11);
    for (n, k, gap) in [(1, 3, 0), (14, 32, 5), (33, 40, 1), (70, 9, 0), (131, 300, 0), (300, 1100, 0)] {
        for transpose in [Transpose::No, Transpose::Yes] {
            let (rows, cols) = if transpose == Transpose::No { (n, k) } else { (k, n) };
            let a = Padded::<T>::random(&mut random, rows, cols, gap);
            let square: Vec<T> = random.values(n * n);
            let symmetric: Vec<T> = (0..n * n).map(|i| square[(i / n).max(i % n) * n + (i / n).min(i % n)]).collect();
            on_every_rung(T::DTYPE, |cpu, name| {
                let other = if transpose == Transpose::No { Transpose::Yes } else { Transpose::No };
                for beta in [0.0, -0.75] {
                    let (mut found, mut wanted) = (symmetric.clone(), symmetric.clone());
                    gram(cpu, a.view(), transpose, 0.5, beta, &mut found);
                    matmul(cpu, a.view(), transpose, a.view(), other, 0.5, beta, MatMut::new(&mut wanted, n, n));
                    let threads = cpu.threads.count();
                    assert!(found == wanted, "{name}: {n} of {k}, {transpose:?}, {beta}, {threads} threads");
                }
            });
        }
    }
}

#[test]
fn gram_is_the_product_with_the_transpose_in_every_dtype() {
    gram_is_the_product_with_the_transpose::<f32>();
    gram_is_the_product_with_the_transpose::<bf16>();
    gram_is_the_product_with_the_transpose::<f16>();
}
