//! Optimizer steps: ten in a row against the oracle in f64. Weights and gradients are below 1 and
//! steps below 0.1. A step rounds a handful of numbers of that size, so ten steps are off by at
//! most about 200 ULP.

use super::device::{Buffer, NULL, ULP, both_orders, close, dtypes, float, launch, values, wide};
use trainyard_cuda::kernels::{self, Argument, Float, row_blocks};
use trainyard_tensor::Element;
use trainyard_tensor::cpu::optim::{Adafactor, AdamW, Decay, Lion, Sgd, StepSize};
use trainyard_tensor::reference::optim as oracle;

const SLACK: f64 = 200.0 * ULP;
const SCALE: f32 = 0.25;
const LENGTHS: [usize; 4] = [0, 1, 130, 5003];

fn gradient(step: u64, len: usize) -> Vec<f32> {
    values::<f32>(100 + step, len)
}

fn scaled(step: u64, len: usize) -> Vec<f64> {
    gradient(step, len).iter().map(|g| f64::from(*g * SCALE)).collect()
}

fn correction(beta: f32, step: u64) -> f64 {
    1.0 - f64::from(beta).powf(step as f64)
}

#[track_caller]
fn is_copy<T: Element>(copy: &[T], p: &[f32]) {
    assert!(copy.iter().zip(p).all(|(c, p)| *c == T::from_f32(*p)), "the copy is not the weights");
}

dtypes! {
    fn adamw_steps<T>() {
        let hyper = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, variance_steps: None };
        for (len, shift) in LENGTHS.into_iter().flat_map(|len| [(len, 0), (len, 1)]) {
            let start = values::<f32>(1, len);
            let (p, m, v, c) = both_orders(|| {
                let (p, c) = (Buffer::shifted(&start, shift), Buffer::<T>::empty(len));
                let (m, v) = (Buffer::new(&vec![0.0f32; len]), Buffer::new(&vec![0.0f32; len]));
                for step in 1..=10 {
                    let g = Buffer::new(&gradient(step, len));
                    let step_size = (f64::from(hyper.lr) / correction(hyper.beta1, step)) as f32;
                    let root = (1.0 / correction(hyper.beta2, step).sqrt()) as f32;
                    let keep = 1.0 - hyper.lr * hyper.weight_decay;
                    let copy = if step % 2 == 0 { c.at() } else { NULL };
                    let floats = [SCALE, hyper.beta1, hyper.beta2, hyper.eps, keep, step_size, root].map(Argument::F32);
                    let arguments =
                        [&[p.at(), g.at(), m.at(), v.at(), copy, Argument::I64(len as i64)][..], &floats].concat();
                    launch(&kernels::ADAMW, float::<T>(), [len, 1, 1], &arguments);
                }
                (p.get(), m.get(), v.get(), c.get())
            });
            let (mut want, mut first, mut second) = (wide(&start), vec![0.0; len], vec![0.0; len]);
            for step in 1..=10 {
                oracle::adamw(hyper, step, &mut want, &scaled(step, len), &mut first, &mut second);
            }
            close("weights", &p, &want, SLACK);
            close("first", &m, &first, SLACK);
            close("second", &v, &second, SLACK);
            is_copy(&c, &p);
        }
    }
}

dtypes! {
    fn sgd_steps<T>() {
        for (momentum, nesterov, decay) in
            [(0.0, false, Decay::Coupled), (0.9, false, Decay::Decoupled), (0.9, true, Decay::Coupled)]
        {
            let hyper = Sgd { lr: 0.05, momentum, nesterov, weight_decay: 0.1, decay };
            for len in LENGTHS {
                let start = values::<f32>(1, len);
                let (p, c) = both_orders(|| {
                    let (p, m, c) = (Buffer::new(&start), Buffer::new(&vec![0.0f32; len]), Buffer::<T>::empty(len));
                    let (keep, coupled) = match decay {
                        Decay::Decoupled => (1.0 - hyper.lr * hyper.weight_decay, 0.0),
                        Decay::Coupled => (1.0, hyper.weight_decay),
                    };
                    for step in 1..=10 {
                        let g = Buffer::new(&gradient(step, len));
                        let state = if momentum == 0.0 { NULL } else { m.at() };
                        let arguments = [
                            p.at(), g.at(), state, c.at(), Argument::I64(len as i64), Argument::F32(SCALE), Argument::F32(hyper.lr),
                            Argument::F32(momentum), Argument::I32(i32::from(nesterov)), Argument::F32(keep), Argument::F32(coupled),
                        ];
                        launch(&kernels::SGD, float::<T>(), [len, 1, 1], &arguments);
                    }
                    (p.get(), c.get())
                });
                let (mut want, mut m) = (wide(&start), vec![0.0; len]);
                (1..=10).for_each(|step| oracle::sgd(hyper, &mut want, &scaled(step, len), &mut m));
                close("weights", &p, &want, SLACK);
                is_copy(&c, &p);
            }
        }
    }
}

dtypes! {
    fn steps_of_signs<T>() {
        let (start, g) = ([0.5f32, -1.0, 2.0, 0.25], [3e-24f32, -1e-30, 0.0, f32::NAN]);
        let (p, copy) = both_orders(|| {
            let (p, g, copy) = (Buffer::new(&start), Buffer::new(&g), Buffer::<T>::empty(4));
            let arguments = [p.at(), g.at(), copy.at(), Argument::I64(4), Argument::F32(0.125)];
            launch(&kernels::SIGN_STEP, float::<T>(), [4, 1, 1], &arguments);
            (p.get()[..3].to_vec(), copy.get().iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>())
        });
        assert_eq!(p, [0.375, -0.875, 2.0]);
        assert_eq!(copy[..3], [0.375f32, -0.875, 2.0].map(f32::to_bits));
        assert!(f32::from_bits(copy[3]).is_nan());
    }
}

dtypes! {
    fn lion_steps<T>() {
        let hyper = Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
        for len in LENGTHS {
            let start = values::<f32>(1, len);
            let (p, m, c) = both_orders(|| {
                let (p, m, c) = (Buffer::new(&start), Buffer::new(&vec![0.0f32; len]), Buffer::<T>::empty(len));
                for step in 1..=10 {
                    let g = Buffer::new(&gradient(step, len));
                    let floats = [SCALE, hyper.lr, hyper.beta1, hyper.beta2, 1.0 - hyper.lr * hyper.weight_decay];
                    let pointers = [p.at(), g.at(), m.at(), c.at(), Argument::I64(len as i64)];
                    launch(&kernels::LION, float::<T>(), [len, 1, 1], &[&pointers[..], &floats.map(Argument::F32)].concat());
                }
                (p.get(), m.get(), c.get())
            });
            let (mut want, mut momentum) = (wide(&start), vec![0.0; len]);
            let mut unsure = vec![false; len];
            for step in 1..=10 {
                let g = scaled(step, len);
                // Where the sign's argument is within rounding of zero, either sign is right.
                for i in 0..len {
                    unsure[i] |= (0.9f32 as f64 * momentum[i] + (1.0 - 0.9f32 as f64) * g[i]).abs() < 4.0 * ULP;
                }
                oracle::lion(hyper, &mut want, &g, &mut momentum);
            }
            close("momentum", &m, &momentum, SLACK);
            for i in (0..len).filter(|i| !unsure[*i]) {
                close("weights", &p[i..=i], &want[i..=i], SLACK);
            }
            assert!(unsure.iter().filter(|unsure| **unsure).count() <= len / 1000, "too many are left unchecked");
            is_copy(&c, &p);
        }
    }
}

dtypes! {
    fn muon_averages_and_applies<T>() {
        for (len, nesterov) in [(1, false), (130, true), (5003, true)] {
            let (start, state, g) = (values::<f32>(1, len), values::<f32>(2, len), values::<f32>(3, len));
            let (momentum, keep, step) = (0.95f32, 0.99f32, 0.02f32);
            let (m, x, p) = both_orders(|| {
                let (m, x, g, p) = (Buffer::new(&state), Buffer::<T>::empty(len), Buffer::new(&g), Buffer::new(&start));
                let n = Argument::I64(len as i64);
                let last = [Argument::F32(SCALE), Argument::F32(momentum), Argument::I32(i32::from(nesterov))];
                launch(&kernels::MUON_AVERAGE, float::<T>(), [len, 1, 1], &[&[g.at(), m.at(), x.at(), n][..], &last].concat());
                let arguments = [x.at(), p.at(), n, Argument::F32(keep), Argument::F32(step)];
                launch(&kernels::MUON_APPLY, float::<T>(), [len, 1, 1], &arguments);
                (m.get(), x.get(), p.get())
            });
            let momentum = f64::from(momentum);
            for i in 0..len {
                let g = f64::from(g[i]) * f64::from(SCALE) * (1.0 - momentum);
                let want = momentum * f64::from(state[i]) + g;
                close("momentum", &m[i..=i], &[want], 4.0 * ULP);
                close("what is orthogonalised", &x[i..=i], &[if nesterov { momentum * want + g } else { want }], 8.0 * ULP);
                let update = f64::from(x[i].to_f32());
                let want = f64::from(start[i]) * f64::from(keep) - f64::from(step) * update;
                close("weights", &p[i..=i], &[want], 2.0 * ULP);
            }
        }
    }
}

dtypes! {
    fn muon_normalises<T>() {
        for (len, least) in [(1, 1e-7f32), (130, 1e-7), (2051, 1e-7), (130, 100.0)] {
            let start = values::<T>(1, len);
            let square: f64 = wide(&start).iter().map(|x| x * x).sum();
            let x = both_orders(|| {
                let (x, squares) = (Buffer::new(&start), Buffer::new(&[square]));
                let arguments = [x.at(), squares.at(), Argument::I64(len as i64), Argument::F32(least)];
                launch(&kernels::MUON_NORMALISE, float::<T>(), [len, 1, 1], &arguments);
                x.get()
            });
            let norm = square.sqrt().max(f64::from(least));
            let want: Vec<f64> = wide(&start).iter().map(|x| x / norm).collect();
            close("what is orthogonalised", &x, &want, 4.0 * ULP);
        }
    }
}

/// The state between steps of Adafactor: weights, copy, moments.
type Adafactored<T> = (Vec<f32>, Vec<T>, Vec<f32>, Vec<f32>);

fn squares(x: &Buffer<f32>, len: usize) -> Buffer<f64> {
    let (sums, total) = (Buffer::<f64>::empty(len.div_ceil(1000)), Buffer::<f64>::empty(1));
    let n = Argument::I64(len as i64);
    launch(&kernels::CHUNK_SQUARES, Float::F32, [len, 1000, 1], &[x.at(), sums.at(), n, Argument::I64(1000)]);
    launch(
        &kernels::SUM_F64,
        Float::F32,
        [1, 1, 1],
        &[sums.at(), total.at(), Argument::I64(len.div_ceil(1000) as i64)],
    );
    total
}

fn length(hyper: Adafactor, step: u64, sums: &Buffer<f64>, count: usize, p: &Buffer<f32>, len: usize) -> Buffer<f32> {
    let length = Buffer::<f32>::empty(1);
    let relative = hyper.step_size == StepSize::Relative;
    let lr = if relative { hyper.lr.min((1.0 / (step as f64).sqrt()) as f32) } else { hyper.lr };
    let weights = squares(p, len);
    let arguments = [
        sums.at(),
        Argument::I32(count as i32),
        weights.at(),
        Argument::I64(len as i64),
        length.at(),
        Argument::F32(hyper.clip_threshold),
        Argument::F32(lr),
        Argument::F32(hyper.eps2),
        Argument::I32(i32::from(relative)),
    ];
    launch(&kernels::ADAFACTOR_LENGTH, Float::F32, [1, 1, 1], &arguments);
    length
}

fn beta2(hyper: Adafactor, step: u64) -> Argument {
    Argument::F32((1.0 - (step as f64).powf(f64::from(hyper.beta2_decay))) as f32)
}

fn matrix<T: Element>(hyper: Adafactor, [rows, columns]: [usize; 2], start: &[f32]) -> Adafactored<T> {
    let (len, t, blocks) = (rows * columns, float::<T>(), row_blocks(rows));
    let (p, copy) = (Buffer::new(start), Buffer::<T>::empty(len));
    let (r, c) = (Buffer::new(&vec![0.0f32; rows]), Buffer::new(&vec![0.0f32; columns]));
    let (m, n) = (Argument::I32(rows as i32), Argument::I32(columns as i32));
    let (scale, eps1) = (Argument::F32(SCALE), Argument::F32(hyper.eps1));
    for step in 1..=10 {
        let g = Buffer::new(&gradient(step, len));
        launch(
            &kernels::ADAFACTOR_ROWS,
            t,
            [rows, columns, 1],
            &[g.at(), r.at(), m, n, scale, eps1, beta2(hyper, step)],
        );
        let partials = Buffer::<f32>::empty(blocks * columns);
        launch(&kernels::ADAFACTOR_COLUMN_SUMS, t, [1, rows, columns], &[g.at(), partials.at(), m, n, scale, eps1]);
        let sums = Buffer::new(&super::norm::sum_partials(&partials, blocks, &vec![0.0; columns]));
        let inverse = Buffer::<f32>::empty(columns);
        let arguments = [sums.at(), c.at(), inverse.at(), m, n, beta2(hyper, step)];
        launch(&kernels::ADAFACTOR_COLUMNS, t, [columns, 1, 1], &arguments);
        let mean = Buffer::<f32>::empty(1);
        launch(&kernels::ADAFACTOR_ROW_MEAN, t, [1, 1, 1], &[r.at(), mean.at(), m]);
        let sums = Buffer::<f64>::empty(rows);
        let arguments = [g.at(), r.at(), mean.at(), inverse.at(), sums.at(), m, n, scale];
        launch(&kernels::ADAFACTOR_SQUARES, t, [rows, columns, 1], &arguments);
        let length = length(hyper, step, &sums, rows, &p, len);
        let keep = Argument::F32(1.0 - hyper.lr * hyper.weight_decay);
        let pointers = [g.at(), r.at(), mean.at(), inverse.at(), length.at(), p.at(), copy.at()];
        let arguments = [&pointers[..], &[Argument::I64(rows as i64), n, scale, keep]].concat();
        launch(&kernels::ADAFACTOR_APPLY, t, [len, 1, 1], &arguments);
    }
    (p.get(), copy.get(), r.get(), c.get())
}

fn vector<T: Element>(hyper: Adafactor, start: &[f32]) -> Adafactored<T> {
    let (len, t, chunk) = (start.len(), float::<T>(), 1000);
    let (p, copy, v) = (Buffer::new(start), Buffer::<T>::empty(len), Buffer::new(&vec![0.0f32; len]));
    let n = Argument::I64(len as i64);
    for step in 1..=10 {
        let g = Buffer::new(&gradient(step, len));
        let sums = Buffer::<f64>::empty(len.div_ceil(chunk));
        let last = [Argument::F32(SCALE), Argument::F32(hyper.eps1), beta2(hyper, step)];
        let arguments = [&[g.at(), v.at(), sums.at(), n, Argument::I64(chunk as i64)][..], &last].concat();
        launch(&kernels::ADAFACTOR_VECTOR_MOMENT, t, [len, chunk, 1], &arguments);
        let length = length(hyper, step, &sums, len.div_ceil(chunk), &p, len);
        let last = [Argument::F32(SCALE), Argument::F32(1.0 - hyper.lr * hyper.weight_decay)];
        let arguments = [&[g.at(), v.at(), length.at(), p.at(), copy.at(), n][..], &last].concat();
        launch(&kernels::ADAFACTOR_VECTOR_APPLY, t, [len, 1, 1], &arguments);
    }
    (p.get(), copy.get(), v.get(), Vec::new())
}

dtypes! {
    fn adafactor_steps<T>() {
        for step_size in [StepSize::Relative, StepSize::Absolute] {
            let hyper = Adafactor {
                lr: 0.01, beta2_decay: -0.8, eps1: 1e-30, eps2: 1e-3, clip_threshold: 1.0, weight_decay: 0.01, step_size,
            };
            for (rows, columns) in [(1, 1), (6, 4), (67, 129)] {
                let len = rows * columns;
                let start = values::<f32>(1, len);
                let (p, p_copy, r, c) = both_orders(|| matrix::<T>(hyper, [rows, columns], &start));
                let (q, q_copy, v, _) = both_orders(|| vector::<T>(hyper, &start));
                let (mut want_p, mut want_q) = (wide(&start), wide(&start));
                let (mut want_r, mut want_c, mut want_v) = (vec![0.0; rows], vec![0.0; columns], vec![0.0; len]);
                for step in 1..=10 {
                    let g = scaled(step, len);
                    oracle::adafactor_matrix(hyper, step, &mut want_p, &g, &mut want_r, &mut want_c);
                    oracle::adafactor_vector(hyper, step, &mut want_q, &g, &mut want_v);
                }
                close("row moment", &r, &want_r, SLACK);
                close("column moment", &c, &want_c, SLACK);
                close("moment", &v, &want_v, SLACK);
                close("matrix", &p, &want_p, SLACK);
                close("vector", &q, &want_q, SLACK);
                is_copy(&p_copy, &p);
                is_copy(&q_copy, &q);
            }
        }
    }
}
