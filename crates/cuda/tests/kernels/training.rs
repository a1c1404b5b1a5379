//! The other kernels of transformers: rotary positions, activations, embeddings, dropout,
//! cross-entropy.

use super::device::{Buffer, NULL, ULP, both_orders, close, dtypes, float, launch, values, wide};
use trainyard_cuda::kernels::{self, Argument, Float};
use trainyard_tensor::cpu::activation::Activation;
use trainyard_tensor::cpu::dropout::DropRate;
use trainyard_tensor::cpu::loss::IGNORE;
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::cpu::rope::{RopeScaling, RopeTable};
use trainyard_tensor::reference::{activation as curve, loss as oracle, random};
use trainyard_tensor::{Element, bf16, f16};

/// In the order of their numbers in kernels.
const CURVES: [Activation; 6] = [
    Activation::None,
    Activation::Relu,
    Activation::Silu,
    Activation::GeluExact,
    Activation::GeluTanh,
    Activation::ReluSquared,
];

fn int(n: usize) -> Argument {
    Argument::I32(n as i32)
}

fn long(n: usize) -> Argument {
    Argument::I64(n as i64)
}

fn spread<T: Element>(seed: u64, len: usize) -> Vec<T> {
    values::<T>(seed, len).iter().map(|x| T::from_f32(x.to_f32() * 6.0)).collect()
}

dtypes! {
    fn rope_turns_pairs_and_turns_back<T>() {
        for (rows, row_stride, first, heads, head_dim, dim) in
            [(0, 8, 0, 1, 8, 8), (3, 25, 1, 2, 10, 6), (37, 192, 0, 2, 64, 64), (5, 64, 16, 1, 40, 32)]
        {
            let x = values::<T>(1, rows * row_stride);
            let positions: Vec<i32> = (0..rows as i32).map(|t| t * 7 % 64).collect();
            let table = RopeTable::new(dim, 10_000.0, RopeScaling::None, 64).unwrap();
            let (y, back) = both_orders(|| {
                let (x, positions) = (Buffer::new(&x), Buffer::new(&positions));
                let (cos, sin) = (Buffer::new(&table.cos), Buffer::new(&table.sin));
                let turn = |sign| {
                    let pointers = [x.at(), positions.at(), cos.at(), sin.at()];
                    let sizes = [rows, row_stride, first, heads, head_dim, dim].map(int);
                    let arguments = [&pointers[..], &sizes, &[Argument::F32(sign)]].concat();
                    launch(&kernels::ROPE, float::<T>(), [rows * heads * dim / 2, 1, 1], &arguments);
                    x.get()
                };
                (turn(1.0), turn(-1.0))
            });
            let turn = |x: &[T], sign: f64| {
                let x = wide(x);
                let mut want = x.clone();
                for (row, position) in positions.iter().enumerate() {
                    for head in 0..heads {
                        let at = row * row_stride + first + head * head_dim;
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
            close("rope", &y, &turn(&x, 1.0), 6.0 * ULP);
            close("rope backward", &back, &turn(&y, -1.0), 6.0 * ULP);
        }
    }
}

dtypes! {
    fn activations_gated_units_and_epilogues<T>() {
        for (rows, width) in [(0, 3), (1, 1), (3, 17), (41, 136)] {
            let half = rows * width;
            let (x, dy) = (spread::<T>(1, 2 * half), values::<T>(2, 2 * half));
            let (bias, residual) = (values::<T>(3, width), values::<T>(4, half));
            // As in the CPU's suite.
            let slack = 40.0 * 6.0 * ULP;
            for (index, f) in CURVES.into_iter().enumerate() {
                let (y, dx, pre, fused, bare) = both_orders(|| {
                    let (x, dy, bias, residual) = (Buffer::new(&x), Buffer::new(&dy), Buffer::new(&bias), Buffer::new(&residual));
                    let (y, dx) = (Buffer::<T>::empty(2 * half), Buffer::<T>::empty(2 * half));
                    let (n, sizes) = (long(2 * half), [2 * half, 1, 1]);
                    launch(&kernels::ACTIVATE, float::<T>(), sizes, &[x.at(), y.at(), n, int(index)]);
                    launch(&kernels::ACTIVATION_BACKWARD, float::<T>(), sizes, &[dy.at(), x.at(), dx.at(), n, int(index)]);
                    let (pre, fused, bare) = (Buffer::<T>::empty(half), Buffer::<T>::empty(half), Buffer::<T>::empty(half));
                    let epilogue = |bias, residual, pre, y| {
                        let arguments = [x.at(), bias, residual, pre, y, long(rows), int(width), int(index)];
                        launch(&kernels::EPILOGUE, float::<T>(), [half, 1, 1], &arguments);
                    };
                    epilogue(bias.at(), residual.at(), pre.at(), fused.at());
                    epilogue(NULL, NULL, NULL, bare.at());
                    (y.get(), dx.get(), pre.get(), fused.get(), bare.get())
                });
                let (x, dy) = (wide(&x), wide(&dy));
                close(&format!("{f:?}"), &y, &x.iter().map(|x| curve::value(f, *x)).collect::<Vec<_>>(), slack);
                let want: Vec<f64> = x.iter().zip(&dy).map(|(x, dy)| dy * curve::slope(f, *x)).collect();
                close(&format!("{f:?} backward"), &dx, &want, slack);
                assert!(bare == y[..half], "{f:?}");
                let sums: Vec<f64> = (0..half).map(|i| x[i] + wide(&bias)[i % width]).collect();
                close("pre", &pre, &sums, 8.0 * ULP);
                let want: Vec<f64> = sums.iter().zip(wide(&residual)).map(|(x, r)| curve::value(f, *x) + r).collect();
                close("epilogue", &fused, &want, 2.0 * slack);
            }
            let (gated, dgated) = both_orders(|| {
                let (x, dy) = (Buffer::new(&x), Buffer::new(&dy[..half]));
                let (y, dx) = (Buffer::<T>::empty(half), Buffer::<T>::empty(2 * half));
                let shape = [long(rows), int(width)];
                launch(&kernels::SWIGLU, float::<T>(), [half, 1, 1], &[x.at(), y.at(), shape[0], shape[1]]);
                let arguments = [dy.at(), x.at(), dx.at(), shape[0], shape[1]];
                launch(&kernels::SWIGLU_BACKWARD, float::<T>(), [half, 1, 1], &arguments);
                (y.get(), dx.get())
            });
            let (gate_up, upstream) = (&x, &dy);
            let (x, dy) = (wide(gate_up), wide(upstream));
            for i in 0..half {
                let at = i + i / width * width;
                let (gate, up, f) = (x[at], x[at + width], Activation::Silu);
                close("swiglu", &gated[i..=i], &[curve::value(f, gate) * up], 6.0 * slack);
                close("dgate", &dgated[at..=at], &[dy[i] * up * curve::slope(f, gate)], 6.0 * slack);
                close("dup", &dgated[at + width..=at + width], &[dy[i] * curve::value(f, gate)], slack);
            }
            for (index, f) in CURVES.into_iter().enumerate().skip(1) {
                let (gated, dgated) = both_orders(|| {
                    let (x, dy) = (Buffer::new(gate_up), Buffer::new(&upstream[..half]));
                    let (y, dx) = (Buffer::<T>::empty(half), Buffer::<T>::empty(2 * half));
                    let shape = [long(rows), int(width), int(index)];
                    launch(&kernels::GLU, float::<T>(), [half, 1, 1], &[x.at(), y.at(), shape[0], shape[1], shape[2]]);
                    let arguments = [dy.at(), x.at(), dx.at(), shape[0], shape[1], shape[2]];
                    launch(&kernels::GLU_BACKWARD, float::<T>(), [half, 1, 1], &arguments);
                    (y.get(), dx.get())
                });
                for i in 0..half {
                    let at = i + i / width * width;
                    let (gate, up) = (x[at], x[at + width]);
                    close(&format!("glu {f:?}"), &gated[i..=i], &[curve::value(f, gate) * up], 6.0 * slack);
                    close("dgate", &dgated[at..=at], &[dy[i] * up * curve::slope(f, gate)], 6.0 * slack);
                    close("dup", &dgated[at + width..=at + width], &[dy[i] * curve::value(f, gate)], 6.0 * slack);
                }
            }
        }
    }
}

#[test]
fn the_lower_tail_of_gelu_keeps_its_digits() {
    let x: Vec<f32> = (10..70).map(|i| -(i as f32) / 10.0).collect();
    let (input, y) = (Buffer::new(&x), Buffer::<f32>::empty(x.len()));
    launch(&kernels::ACTIVATE, Float::F32, [x.len(), 1, 1], &[input.at(), y.at(), long(x.len()), int(3)]);
    for (x, y) in x.iter().zip(y.get()) {
        let want = curve::value(Activation::GeluExact, f64::from(*x));
        // The exponent x^2 / 2 <= 24.5 is rounded twice: 50 ULP.
        assert!((f64::from(y) - want).abs() <= 60.0 * ULP * want.abs(), "{x}: {y} against {want}");
    }
}

dtypes! {
    fn casts_sums_and_fills<T>() {
        for len in [0, 1, 17, 3001] {
            let (a, b, start) = (values::<T>(1, len), values::<T>(2, len), values::<f32>(3, len));
            let (x, sizes, n) = (spread::<f32>(4, len), [len, 1, 1], long(len));
            let (sum, onto, over, scaled, filled, narrow, bits) = both_orders(|| {
                let (a, b, onto, over) = (Buffer::shifted(&a, 1), Buffer::new(&b), Buffer::new(&start), Buffer::<f32>::empty(len));
                let (sum, filled, bits) = (Buffer::<T>::empty(len), Buffer::<T>::empty(len), Buffer::<u32>::empty(len));
                let t = float::<T>();
                launch(&kernels::ADD, t, sizes, &[a.at(), b.at(), sum.at(), n]);
                launch(&kernels::ACCUMULATE, t, sizes, &[a.at(), onto.at(), n, int(0)]);
                launch(&kernels::ACCUMULATE, t, sizes, &[a.at(), over.at(), n, int(1)]);
                launch(&kernels::SCALE, t, sizes, &[a.at(), n, Argument::F32(0.375)]);
                launch(&kernels::FILL, t, sizes, &[filled.at(), n, Argument::F32(-2.5)]);
                launch(&kernels::FILL_U32, t, sizes, &[bits.at(), n, Argument::U32(7)]);
                let (x, narrow) = (Buffer::new(&x), Buffer::<T>::empty(len));
                let cast = match float::<T>() {
                    Float::F32 => &kernels::CAST_TO_F32,
                    Float::Bf16 => &kernels::CAST_TO_BF16,
                    Float::F16 => &kernels::CAST_TO_F16,
                };
                launch(cast, Float::F32, sizes, &[x.at(), narrow.at(), n]);
                (sum.get(), onto.get(), over.get(), a.get(), filled.get(), narrow.get(), bits.get())
            });
            let (aw, bw) = (wide(&a), wide(&b));
            close("add", &sum, &aw.iter().zip(&bw).map(|(a, b)| a + b).collect::<Vec<_>>(), 2.0 * ULP);
            close("accumulate", &onto, &aw.iter().zip(wide(&start)).map(|(a, s)| a + s).collect::<Vec<_>>(), 0.0);
            close("overwrite", &over, &aw, 0.0);
            close("scale", &scaled, &aw.iter().map(|a| 0.375 * a).collect::<Vec<_>>(), ULP);
            assert!(filled.iter().all(|x| x.to_f32() == -2.5) && bits.iter().all(|x| *x == 7));
            assert!(narrow.iter().zip(&x).all(|(n, x)| *n == T::from_f32(*x)));
        }
    }
}

/// The emulated conversions are those of the instructions: to nearest, ties to even, NaN to NaN.
#[test]
fn casts_round_as_the_scalar_types_do() {
    let mut x: Vec<f32> =
        (0..40_001u32).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761))).filter(|x| x.is_normal()).collect();
    x.extend([0.0, -0.0, f32::INFINITY, -f32::INFINITY, 65519.0, 65520.0, 1e-8, 3e-8, 6.1e-5, 6.103e-5]);
    let (n, sizes) = (long(x.len()), [x.len(), 1, 1]);
    let (input, b, h) = (Buffer::new(&x), Buffer::<bf16>::empty(x.len()), Buffer::<f16>::empty(x.len()));
    launch(&kernels::CAST_TO_BF16, Float::F32, sizes, &[input.at(), b.at(), n]);
    launch(&kernels::CAST_TO_F16, Float::F32, sizes, &[input.at(), h.at(), n]);
    let (from_b, from_h) = (Buffer::<f32>::empty(x.len()), Buffer::<f32>::empty(x.len()));
    launch(&kernels::CAST_TO_F32, Float::Bf16, sizes, &[b.at(), from_b.at(), n]);
    launch(&kernels::CAST_TO_F32, Float::F16, sizes, &[h.at(), from_h.at(), n]);
    for (i, x) in x.iter().enumerate() {
        let (want_b, want_h) = (bf16::from_f32(*x), f16::from_f32(*x));
        assert!(b.get()[i] == want_b || want_b.is_nan(), "{x}: {:?} {want_b:?}", b.get()[i]);
        assert!(h.get()[i] == want_h, "{x}: {:?} {want_h:?}", h.get()[i]);
        if i % 100 == 0 {
            assert!(from_b.get()[i] == want_b.to_f32() && from_h.get()[i] == want_h.to_f32(), "{x}");
        }
    }
}

dtypes! {
    fn dropout_has_the_bits_of_the_cpu<T>() {
        for (len, p) in [(0, 0.5), (1, 0.0), (17, 0.3), (128, 0.9), (5003, 0.1)] {
            let key = RandomKey { seed: 0x1234_5678_9abc_def0, step: 77, site: 5 };
            let rate = DropRate::new(p).unwrap();
            let (probability, scale) = rate.exact();
            let (x, r) = (values::<T>(1, len), values::<T>(2, len));
            let (y, added) = both_orders(|| {
                let (x, r) = (Buffer::new(&x), Buffer::new(&r));
                let (y, added) = (Buffer::<T>::empty(len), Buffer::<T>::empty(len));
                // Of the step that is given, and of one that lies in memory.
                let in_memory = Buffer::new(&[key.step]);
                let drop = |residual, y, step, step_at| {
                    let arguments = [
                        x.at(), residual, y, long(len), long(0), Argument::U64(key.seed), Argument::U32(step), step_at, Argument::U32(key.site),
                        Argument::U32((probability * 65536.0) as u32), Argument::F32(scale),
                    ];
                    launch(&kernels::DROPOUT, float::<T>(), [len, 1, 1], &arguments);
                };
                drop(NULL, y.at(), key.step, NULL);
                drop(r.at(), added.at(), 0, in_memory.at());
                (y.get(), added.get())
            });
            for i in 0..len {
                let kept = random::dropout_bits(key, i as u64) as f32 >= probability * 65536.0;
                let want = if kept { x[i].to_f32() * scale } else { 0.0 };
                assert!(y[i] == T::from_f32(want), "element {i} of {len}");
                assert!(added[i] == T::from_f32(want + r[i].to_f32()), "element {i} of {len}");
            }
        }
    }
}

dtypes! {
    fn embedding_and_its_gradient<T>() {
        for (tokens, dim, vocab) in [(0, 3, 2), (1, 1, 1), (40, 17, 5), (300, 264, 30), (4500, 9, 800)] {
            let ids: Vec<i32> = (0..tokens as i32).map(|t| (t * t + t / 3) % vocab as i32).collect();
            let positions: Vec<i32> = (0..tokens as i32).map(|t| t % 9).collect();
            let (table, places, dy) = (values::<T>(1, vocab * dim), values::<T>(2, 9 * dim), values::<T>(3, tokens * dim));
            let (y, z, gradient) = both_orders(|| {
                let (ids, positions, dy) = (Buffer::new(&ids), Buffer::new(&positions), Buffer::new(&dy));
                let (table, places) = (Buffer::new(&table), Buffer::new(&places));
                let (y, z) = (Buffer::<T>::empty(tokens * dim), Buffer::<T>::empty(tokens * dim));
                let look = |positions, places, y| {
                    let pointers = [ids.at(), table.at(), positions, places, y];
                    let arguments = [&pointers[..], &[tokens, dim, 0, vocab, 9].map(int)].concat();
                    launch(&kernels::EMBEDDING, float::<T>(), [tokens * dim, 1, 1], &arguments);
                };
                look(NULL, NULL, y.at());
                look(positions.at(), places.at(), z.at());
                let (first, gradient) = (Buffer::new(&vec![i32::MAX; vocab]), Buffer::new(&vec![1.0f32; vocab * dim]));
                let arguments = [ids.at(), first.at(), int(tokens), int(0), int(vocab)];
                launch(&kernels::FIRST_USE, float::<T>(), [tokens, 1, 1], &arguments);
                let pointers = [dy.at(), ids.at(), first.at(), gradient.at()];
                let arguments = [&pointers[..], &[1, 0, vocab, tokens, dim].map(int)].concat();
                launch(&kernels::INDEX_ADD, float::<T>(), [1, tokens, dim], &arguments);
                (y.get(), z.get(), gradient.get())
            });
            // Addition in token order in f32: the very bits.
            let mut want = vec![1.0f32; vocab * dim];
            for (t, id) in ids.iter().enumerate() {
                let row = &table[*id as usize * dim..][..dim];
                assert!(y[t * dim..(t + 1) * dim] == *row);
                let place = &places[positions[t] as usize * dim..][..dim];
                let sum: Vec<f64> = wide(row).iter().zip(wide(place)).map(|(a, b)| a + b).collect();
                close("token + position", &z[t * dim..(t + 1) * dim], &sum, ULP * 2.0);
                for j in 0..dim {
                    want[*id as usize * dim + j] += dy[t * dim + j].to_f32();
                }
            }
            assert!(gradient == want, "tokens are not added in order");
        }
    }
}

dtypes! {
    fn dropout_of_a_part_has_the_bits_of_the_whole<T>() {
        let (key, rate, len) = (RandomKey { seed: 11, step: 5, site: 2 }, DropRate::new(0.4).unwrap(), 9000);
        let (threshold, scale) = ((rate.exact().0 * 65536.0) as u32, rate.exact().1);
        let x = values::<T>(1, len);
        let drop = |first: usize, end: usize| {
            let (x, y) = (Buffer::new(&x[first..end]), Buffer::<T>::empty(end - first));
            let arguments = [
                x.at(), NULL, y.at(), long(end - first), long(first), Argument::U64(key.seed), Argument::U32(key.step), NULL,
                Argument::U32(key.site), Argument::U32(threshold), Argument::F32(scale),
            ];
            launch(&kernels::DROPOUT, float::<T>(), [end - first + first % kernels::DROPOUT_GROUP, 1, 1], &arguments);
            y.get()
        };
        let whole = both_orders(|| drop(0, len));
        for (first, end) in [(1, 2), (5, 130), (127, 129), (128, 400), (300, 8999), (2050, 2060)] {
            assert!(drop(first, end) == whole[first..end], "elements {first}..{end}");
        }
    }
}

dtypes! {
    fn parts_of_an_embedding_are_those_of_the_whole<T>() {
        let (tokens, dim, vocab) = (300, 40, 31);
        let ids: Vec<i32> = (0..tokens as i32).map(|t| (t * t + t / 3) % vocab as i32).collect();
        let (table, dy) = (values::<T>(1, vocab * dim), values::<T>(3, tokens * dim));
        let part = |first: usize, end: usize| {
            let rows = end - first;
            let (ids, dy, table) = (Buffer::new(&ids), Buffer::new(&dy), Buffer::new(&table[first * dim..end * dim]));
            let y = Buffer::<T>::empty(tokens * dim);
            let pointers = [ids.at(), table.at(), NULL, NULL, y.at()];
            let arguments = [&pointers[..], &[tokens, dim, first, rows, 0].map(int)].concat();
            launch(&kernels::EMBEDDING, float::<T>(), [tokens * dim, 1, 1], &arguments);
            let (uses, gradient) = (Buffer::new(&vec![i32::MAX; rows]), Buffer::new(&vec![1.0f32; rows * dim]));
            let arguments = [ids.at(), uses.at(), int(tokens), int(first), int(rows)];
            launch(&kernels::FIRST_USE, float::<T>(), [tokens, 1, 1], &arguments);
            let pointers = [dy.at(), ids.at(), uses.at(), gradient.at()];
            let arguments = [&pointers[..], &[1, first, rows, tokens, dim].map(int)].concat();
            launch(&kernels::INDEX_ADD, float::<T>(), [1, tokens, dim], &arguments);
            (y.get(), gradient.get())
        };
        let (y, gradient) = part(0, vocab);
        for (first, end) in [(0, 16), (16, 31), (30, 31)] {
            let (y_part, gradient_part) = both_orders(|| part(first, end));
            assert!(gradient_part == gradient[first * dim..end * dim], "rows {first}..{end}");
            for (t, id) in ids.iter().enumerate() {
                let (row, here) = (t * dim..(t + 1) * dim, (first..end).contains(&(*id as usize)));
                let right = y_part[row.clone()].iter().zip(&y[row]).all(|(got, y)| *got == if here { *y } else { T::default() });
                assert!(right, "token {t}, {id}, of rows {first}..{end}");
            }
        }
    }
}

#[test]
fn the_first_wrong_index_is_found() {
    let of = |indices: &[i32], limit: usize, ignore: usize| {
        let (list, found) = (Buffer::new(indices), Buffer::new(&[u32::MAX]));
        let arguments = [list.at(), found.at(), long(indices.len()), int(limit), int(ignore)];
        launch(&kernels::CHECK_INDICES, Float::F32, [indices.len(), 1, 1], &arguments);
        found.get()[0]
    };
    let mut indices = vec![3; 5000];
    assert_eq!(of(&indices, 4, 0), u32::MAX);
    indices[4100] = 4;
    indices[4999] = -1;
    indices[77] = IGNORE;
    assert_eq!(of(&indices, 4, 1), 4100);
    assert_eq!(of(&indices, 4, 0), 77);
}

fn target(target: i32) -> Option<usize> {
    usize::try_from(target).ok()
}

dtypes! {
    fn cross_entropy_and_its_gradient<T>() {
        for (rows, vocab, stride, by_memory) in [(0, 3, 3, false), (1, 1, 1, false), (7, 17, 24, true), (9, 5003, 5024, false)] {
            let mut logits: Vec<T> = spread(1, rows * stride);
            logits.iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() * 1.5));
            let targets: Vec<i32> =
                (0..rows).map(|row| if row % 5 == 3 { IGNORE } else { (row * 31 % vocab) as i32 }).collect();
            let (scale, shape, sizes) = (0.125f32, [rows, vocab, stride].map(int), [rows, vocab, 1]);
            let counted = targets.iter().filter(|target| **target != IGNORE).count();
            let (loss, lse, hit, fused, again, gradient, summary) = both_orders(|| {
                let (x, t) = (Buffer::new(&logits), Buffer::new(&targets));
                let (loss, lse, hit) = (Buffer::<f32>::empty(rows), Buffer::<f32>::empty(rows), Buffer::<u32>::empty(rows));
                let pointers = [x.at(), t.at(), loss.at(), lse.at(), hit.at()];
                launch(&kernels::CROSS_ENTROPY, float::<T>(), sizes, &[&pointers[..], &shape].concat());
                let (count, dy) = (Buffer::new(&[counted as u32]), Buffer::new(&[scale * counted as f32]));
                // What lies between the rows is not theirs to write.
                let gradient = Buffer::new(&logits);
                let pointers = [x.at(), t.at(), lse.at(), dy.at(), count.at(), gradient.at()];
                launch(&kernels::CROSS_ENTROPY_BACKWARD, float::<T>(), sizes, &[&pointers[..], &shape].concat());
                let (sum, counts, mean) = (Buffer::<f64>::empty(1), Buffer::<u32>::empty(2), Buffer::<f32>::empty(1));
                let pointers = [loss.at(), hit.at(), t.at(), int(rows), sum.at(), counts.at(), mean.at()];
                launch(&kernels::LOSS_SUMMARY, float::<T>(), [1, 1, 1], &[&pointers[..], &[Argument::F32(1.0), NULL, int(1)]].concat());
                let (again, in_memory) = (Buffer::<f32>::empty(rows), Buffer::new(&[scale]));
                let pointers = [x.at(), t.at(), again.at(), NULL, NULL];
                let scales = if by_memory { [Argument::F32(0.0), in_memory.at()] } else { [Argument::F32(scale), NULL] };
                let arguments = [&pointers[..], &shape, &scales].concat();
                launch(&kernels::CROSS_ENTROPY_IN_PLACE, float::<T>(), sizes, &arguments);
                let summary = (sum.get(), counts.get(), mean.get());
                (loss.get(), lse.get(), hit.get(), x.get(), again.get(), gradient.get(), summary)
            });
            assert!(loss == again, "evaluation and training give other losses");
            let (mut total, mut right) = (0.0, 0);
            for row in 0..rows {
                let span = row * stride..row * stride + vocab;
                let x = wide(&logits[span.clone()]);
                let (want, mut slope) = oracle::cross_entropy(&x, target(targets[row]));
                slope.iter_mut().for_each(|slope| *slope *= f64::from(scale));
                // lse is about 20 at most, and the sum's relative error adds some 20 ULP.
                close("lse", &lse[row..=row], &[oracle::lse(&x)], 60.0 * ULP);
                close("loss", &loss[row..=row], &[want], 80.0 * ULP);
                close("gradient in place", &fused[span.clone()], &slope, 80.0 * ULP * f64::from(scale));
                close("gradient", &gradient[span.clone()], &slope, 80.0 * ULP * f64::from(scale));
                for out in [&fused, &gradient] {
                    assert!(out[span.end..(row + 1) * stride] == logits[span.end..(row + 1) * stride], "beyond the vocabulary");
                }
                let best = target(targets[row]).is_some_and(|t| x.iter().all(|other| *other <= x[t]));
                assert_eq!(hit[row], u32::from(best));
                total += f64::from(loss[row]);
                right += u32::from(best);
            }
            let (sum, counts, mean) = summary;
            assert!((sum[0] - total).abs() <= 1e-12 * total.abs(), "{} {total}", sum[0]);
            assert_eq!(counts, [counted as u32, right]);
            close("mean", &mean, &[total / counted.max(1) as f64], 0.0);
        }
    }
}

dtypes! {
    fn cross_entropy_in_parts_is_that_of_the_whole<T>() {
        for (rows, stride, bounds) in [(0, 3, vec![0, 2, 3]), (7, 24, vec![0, 1, 17]), (9, 5024, vec![0, 1600, 3200, 5003])] {
            let vocab = bounds[bounds.len() - 1];
            let mut logits: Vec<T> = spread(1, rows * stride);
            logits.iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() * 1.5));
            let targets: Vec<i32> =
                (0..rows).map(|row| if row % 5 == 3 { IGNORE } else { (row * 31 % vocab) as i32 }).collect();
            let scale = 0.125f32;
            let (loss, lse, gradients) = both_orders(|| {
                let t = Buffer::new(&targets);
                let parts: Vec<_> = bounds.windows(2).map(|pair| (pair[0], pair[1] - pair[0])).collect();
                let of_part = |first: usize, width: usize| -> Vec<T> {
                    (0..rows * width).map(|i| logits[i / width * stride + first + i % width]).collect()
                };
                let mut statistics = Vec::new();
                for (first, width) in &parts {
                    let (x, out) = (Buffer::new(&of_part(*first, *width)), Buffer::<f32>::empty(3 * rows));
                    let pointers = [x.at(), t.at(), out.at()];
                    let arguments = [&pointers[..], &[rows, *width, *width, *first].map(int)].concat();
                    launch(&kernels::CROSS_ENTROPY_STATISTICS, float::<T>(), [rows, *width, 1], &arguments);
                    statistics.extend(out.get());
                }
                let (statistics, loss, lse) = (Buffer::new(&statistics), Buffer::<f32>::empty(rows), Buffer::<f32>::empty(rows));
                let arguments = [statistics.at(), t.at(), loss.at(), lse.at(), int(rows), int(parts.len())];
                launch(&kernels::MERGE_STATISTICS, Float::F32, [rows, 1, 1], &arguments);
                let gradients: Vec<Vec<T>> = parts
                    .iter()
                    .map(|(first, width)| {
                        let (x, in_memory) = (Buffer::new(&of_part(*first, *width)), Buffer::new(&[scale]));
                        let pointers = [x.at(), t.at(), lse.at()];
                        let scales = if *first > 0 { [Argument::F32(0.0), in_memory.at()] } else { [Argument::F32(scale), NULL] };
                        let arguments = [&pointers[..], &[rows, *width, *width, *first].map(int), &scales].concat();
                        launch(&kernels::CROSS_ENTROPY_PART_GRADIENT, float::<T>(), [rows, *width, 1], &arguments);
                        x.get()
                    })
                    .collect();
                (loss.get(), lse.get(), gradients)
            });
            for row in 0..rows {
                let x = wide(&logits[row * stride..row * stride + vocab]);
                let (want, mut slope) = oracle::cross_entropy(&x, target(targets[row]));
                slope.iter_mut().for_each(|slope| *slope *= f64::from(scale));
                let counts = targets[row] != IGNORE;
                // As in one part, and two roundings a part of a sum relative to itself.
                close("lse", &lse[row..=row], &[if counts { oracle::lse(&x) } else { 0.0 }], 70.0 * ULP);
                close("loss", &loss[row..=row], &[want], 90.0 * ULP);
                for (part, pair) in gradients.iter().zip(bounds.windows(2)) {
                    let width = pair[1] - pair[0];
                    let got = &part[row * width..(row + 1) * width];
                    close("gradient", got, &slope[pair[0]..pair[1]], 90.0 * ULP * f64::from(scale));
                }
            }
        }
    }
}

#[test]
fn broken_logits_make_a_broken_loss() {
    for broken in [f32::NAN, f32::INFINITY] {
        let mut logits = vec![0.5f32; 4000];
        logits[3333] = broken;
        let (x, t, loss, lse) =
            (Buffer::new(&logits), Buffer::new(&[2]), Buffer::<f32>::empty(1), Buffer::<f32>::empty(1));
        let arguments = [x.at(), t.at(), loss.at(), lse.at(), NULL, int(1), int(4000), int(4000)];
        launch(&kernels::CROSS_ENTROPY, Float::F32, [1, 4000, 1], &arguments);
        assert!(!loss.get()[0].is_finite(), "{broken} gives {}", loss.get()[0]);
    }
}
