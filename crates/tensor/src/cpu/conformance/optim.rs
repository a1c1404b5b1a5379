//! Optimizer steps: ten in a row against the oracle in `f64`, with and without a compute copy.
//!
//! Weights and gradients are below 1 and steps below 0.1; a step rounds a handful of numbers of
//! that size, so ten are off by at most some 200 ULP. Where an update divides by a small root, the
//! relative error of the moments stays what it is.

use super::{ULP, close, dtypes, on_every_cpu, values, wide};
use crate::cpu::muon::{self, Matrix, Muon, MuonScale, muon};
use crate::cpu::optim::*;
use crate::cpu::{Cpu, Isa};
use crate::dtype::{Element, bf16};
use crate::reference::optim as oracle;
use std::cell::RefCell;

const SLACK: f64 = 200.0 * ULP;
const SCALE: f32 = 0.25;
const LENGTHS: [usize; 4] = [0, 1, 130, 40_003];

fn gradient(step: u64, len: usize) -> Vec<f32> {
    values::<f32>(100 + step, len)
}

fn scaled(step: u64, len: usize) -> Vec<f64> {
    gradient(step, len).iter().map(|g| f64::from(*g * SCALE)).collect()
}

dtypes! {
    fn adamw_steps<T>() {
        for (len, variance_steps) in LENGTHS.into_iter().flat_map(|len| [(len, None), (len, Some(4))]) {
            let hyper = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, variance_steps };
            let start = values::<f32>(1, len);
            on_every_cpu(
                |cpu| {
                    let (mut p, mut m, mut v, mut c) = (start.clone(), vec![0.0; len], vec![0.0; len], vec![T::default(); len]);
                    for step in 1..=10 {
                        let copy = (step % 2 == 0).then_some(&mut c[..]);
                        adamw(cpu, hyper, step, SCALE, &mut p, &gradient(step, len), &mut m, &mut v, copy);
                    }
                    (p, m, v, c)
                },
                |isa, (p, m, v, c)| {
                    let (mut want, mut first, mut second) = (wide(&start), vec![0.0; len], vec![0.0; len]);
                    for step in 1..=10 {
                        oracle::adamw(hyper, step, &mut want, &scaled(step, len), &mut first, &mut second);
                    }
                    close(isa, "weights", p, &want, SLACK);
                    close(isa, "first", m, &first, SLACK);
                    close(isa, "second", v, &second, SLACK);
                    assert!(c.iter().zip(p).all(|(c, p)| *c == T::from_f32(*p)), "{isa}: the copy is not the weights");
                },
            );
        }
    }
}

dtypes! {
    fn lamb_steps<T>() {
        for (len, variance_steps) in LENGTHS.into_iter().flat_map(|len| [(len, None), (len, Some(4))]) {
            // A rate of 0.01 moves a tensor by a hundredth of its length in each step.
            let hyper = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1, variance_steps };
            for start in [values::<f32>(1, len), vec![0.0; len]] {
                on_every_cpu(
                    |cpu| {
                        let (mut p, mut m, mut v, mut c) = (start.clone(), vec![0.0; len], vec![0.0; len], vec![T::default(); len]);
                        for step in 1..=10 {
                            let copy = (step % 2 == 0).then_some(&mut c[..]);
                            lamb(cpu, hyper, step, SCALE, &mut p, &gradient(step, len), &mut m, &mut v, copy);
                        }
                        (p, m, v, c)
                    },
                    |isa, (p, m, v, c)| {
                        let (mut want, mut first, mut second) = (wide(&start), vec![0.0; len], vec![0.0; len]);
                        for step in 1..=10 {
                            oracle::lamb(hyper, step, &mut want, &scaled(step, len), &mut first, &mut second);
                        }
                        close(isa, "weights", p, &want, SLACK);
                        close(isa, "first", m, &first, SLACK);
                        close(isa, "second", v, &second, SLACK);
                        assert!(c.iter().zip(p).all(|(c, p)| *c == T::from_f32(*p)), "{isa}: the copy is not the weights");
                    },
                );
            }
        }
    }
}

dtypes! {
    fn sgd_steps<T>() {
        for (momentum, nesterov, decay) in [(0.0, false, Decay::Coupled), (0.9, false, Decay::Decoupled), (0.9, true, Decay::Coupled)] {
            let hyper = Sgd { lr: 0.05, momentum, nesterov, weight_decay: 0.1, decay };
            for len in LENGTHS {
                let start = values::<f32>(1, len);
                on_every_cpu(
                    |cpu| {
                        let (mut p, mut m, mut c) = (start.clone(), vec![0.0; len], vec![T::default(); len]);
                        for step in 1..=10 {
                            let state = (momentum != 0.0).then_some(&mut m[..]);
                            sgd(cpu, hyper, SCALE, &mut p, &gradient(step, len), state, Some(&mut c));
                        }
                        (p, c)
                    },
                    |isa, (p, c)| {
                        let (mut want, mut m) = (wide(&start), vec![0.0; len]);
                        (1..=10).for_each(|step| oracle::sgd(hyper, &mut want, &scaled(step, len), &mut m));
                        close(isa, "weights", p, &want, SLACK);
                        assert!(c.iter().zip(p).all(|(c, p)| *c == T::from_f32(*p)), "{isa}: the copy is not the weights");
                    },
                );
            }
        }
    }
}

dtypes! {
    fn lion_steps<T>() {
        let hyper = Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
        for len in LENGTHS {
            let start = values::<f32>(1, len);
            on_every_cpu(
                |cpu| {
                    let (mut p, mut m, mut c) = (start.clone(), vec![0.0; len], vec![T::default(); len]);
                    for step in 1..=10 {
                        lion(cpu, hyper, SCALE, &mut p, &gradient(step, len), &mut m, Some(&mut c));
                    }
                    (p, m, c)
                },
                |isa, (p, m, c)| {
                    let (mut want, mut momentum) = (wide(&start), vec![0.0; len]);
                    let mut unsure = vec![false; len];
                    for step in 1..=10 {
                        let g = scaled(step, len);
                        // Where the sign's argument is within rounding of zero, either sign is
                        // right.
                        for i in 0..len {
                            unsure[i] |= (0.9f32 as f64 * momentum[i] + (1.0 - 0.9f32 as f64) * g[i]).abs() < 4.0 * ULP;
                        }
                        oracle::lion(hyper, &mut want, &g, &mut momentum);
                    }
                    close(isa, "momentum", m, &momentum, SLACK);
                    for i in (0..len).filter(|i| !unsure[*i]) {
                        close(isa, "weights", &p[i..=i], &want[i..=i], SLACK);
                    }
                    assert!(unsure.iter().filter(|unsure| **unsure).count() <= len / 1000, "too many are left unchecked");
                    assert!(c.iter().zip(p).all(|(c, p)| *c == T::from_f32(*p)), "{isa}: the copy is not the weights");
                },
            );
        }
    }
}

#[test]
fn average_steps() {
    // A step rounds twice numbers below 2, and the average of bounded weights stays bounded.
    let slack = 4.0 * ULP;
    for len in LENGTHS {
        let start = values::<f32>(1, len);
        let shares = [1.0f32, 0.9, 0.5, 0.001, 1.0 / 6.0, 0.0];
        let of_all = RefCell::new(Vec::new());
        on_every_cpu(
            |cpu| {
                let mut a = start.clone();
                for (step, share) in shares.iter().enumerate() {
                    average(cpu, *share, &gradient(step as u64, len), &mut a);
                }
                a
            },
            |isa, a| {
                let mut want = wide(&start);
                for (step, share) in shares.iter().enumerate() {
                    oracle::average(*share, &wide(&gradient(step as u64, len)), &mut want);
                }
                close(isa, "average", a, &want, shares.len() as f64 * slack);
                // The portable form rounds the product of its multiply-add.
                of_all.borrow_mut().extend((isa > Isa::Portable).then(|| a.clone()));
            },
        );
        let of_all = of_all.into_inner();
        assert!(of_all.windows(2).all(|pair| pair[0] == pair[1]), "instruction sets give other bits");
        // A share of 1 forgets what was there, and an average of equal weights does not move.
        on_every_cpu(
            |cpu| {
                let mut a = vec![f32::MAX; len];
                average(cpu, 1.0, &start, &mut a);
                average(cpu, 0.3, &start, &mut a);
                a
            },
            |isa, a| assert!(a.iter().zip(&start).all(|(a, w)| a.to_bits() == w.to_bits()), "{isa}: not the weights"),
        );
    }
}

#[test]
fn consolidation_adds_the_gradient_of_its_penalty() {
    for len in LENGTHS {
        for chunk in [64, 4096] {
            let (p, held, g) = (values::<f32>(1, len), values::<f32>(2, len), gradient(3, len));
            let fisher: Vec<f32> = gradient(4, len).iter().map(|x| x * x).collect();
            let weight = 0.3;
            on_every_cpu(
                |cpu| {
                    let (mut g, mut sums) = (g.clone(), vec![f64::NAN; len.div_ceil(chunk)]);
                    consolidate(cpu, chunk, weight, &p, &fisher, &held, &mut g, &mut sums);
                    (g, sums)
                },
                |isa, (got, sums)| {
                    let mut want = wide(&g);
                    let (p, f, a) = (wide(&p), wide(&fisher), wide(&held));
                    oracle::consolidate(weight, &p, &f, &a, &mut want);
                    close(isa, "gradient", got, &want, SLACK);
                    for (number, sum) in sums.iter().enumerate() {
                        let at = number * chunk..((number + 1) * chunk).min(len);
                        let want: f64 = at.map(|i| f[i] * (p[i] - a[i]).powi(2)).sum();
                        assert!((sum - want).abs() <= 1e-5 * want, "{isa}: a sum of {sum} instead of {want}");
                    }
                },
            );
        }
    }
}

dtypes! {
    fn adafactor_steps<T>() {
        for step_size in [StepSize::Relative, StepSize::Absolute] {
            let hyper = Adafactor { lr: 0.01, beta2_decay: -0.8, eps1: 1e-30, eps2: 1e-3, clip_threshold: 1.0, weight_decay: 0.01, step_size };
            for (rows, columns) in [(1, 1), (6, 4), (301, 129)] {
                let len = rows * columns;
                let start = values::<f32>(1, len);
                on_every_cpu(
                    |cpu| {
                        let (mut p, mut q) = (start.clone(), start.clone());
                        let (mut r, mut c, mut v) = (vec![0.0; rows], vec![0.0; columns], vec![0.0; len]);
                        let (mut p_copy, mut q_copy) = (vec![T::default(); len], vec![T::default(); len]);
                        let mut space = vec![f32::NAN; adafactor_workspace(rows, columns)];
                        for step in 1..=10 {
                            let g = gradient(step, len);
                            adafactor_matrix(cpu, hyper, step, SCALE, &mut p, &g, &mut r, &mut c, Some(&mut p_copy), &mut space);
                            adafactor_vector(cpu, hyper, step, SCALE, &mut q, &g, &mut v, Some(&mut q_copy));
                        }
                        (p, q, r, c, v, p_copy, q_copy)
                    },
                    |isa, (p, q, r, c, v, p_copy, q_copy)| {
                        let (mut want_p, mut want_q) = (wide(&start), wide(&start));
                        let (mut want_r, mut want_c, mut want_v) = (vec![0.0; rows], vec![0.0; columns], vec![0.0; len]);
                        for step in 1..=10 {
                            let g = scaled(step, len);
                            oracle::adafactor_matrix(hyper, step, &mut want_p, &g, &mut want_r, &mut want_c);
                            oracle::adafactor_vector(hyper, step, &mut want_q, &g, &mut want_v);
                        }
                        close(isa, "row moment", r, &want_r, SLACK);
                        close(isa, "column moment", c, &want_c, SLACK);
                        close(isa, "moment", v, &want_v, SLACK);
                        close(isa, "matrix", p, &want_p, SLACK);
                        close(isa, "vector", q, &want_q, SLACK);
                        for (copy, weights) in [(p_copy, p), (q_copy, q)] {
                            assert!(copy.iter().zip(weights).all(|(c, p)| *c == T::from_f32(*p)), "{isa}: the copy is not the weights");
                        }
                    },
                );
            }
        }
    }
}

/// The Newton-Schulz iteration in `f64`, straightforwardly.
fn orthogonal(g: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let product = |a: &[f64], b: &[f64], m: usize, k: usize, n: usize| -> Vec<f64> {
        (0..m * n).map(|i| (0..k).map(|l| a[i / n * k + l] * b[l * n + i % n]).sum()).collect()
    };
    let turn = |x: &[f64], m: usize, n: usize| -> Vec<f64> { (0..m * n).map(|i| x[i % m * n + i / m]).collect() };
    let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt().max(1e-7);
    let mut x: Vec<f64> = g.iter().map(|g| g / norm).collect();
    for _ in 0..5 {
        let gram = product(&x, &turn(&x, rows, columns), rows, columns, rows);
        let square = product(&gram, &gram, rows, rows, rows);
        let p: Vec<f64> = gram.iter().zip(&square).map(|(a, aa)| -4.775 * a + 2.0315 * aa).collect();
        let px = product(&p, &x, rows, rows, columns);
        x = x.iter().zip(&px).map(|(x, px)| 3.4445 * x + px).collect();
    }
    x
}

#[test]
fn muon_steps() {
    for (rows, columns) in [(6, 4), (4, 6), (40, 33), (1, 9)] {
        for (scale, nesterov) in [(MuonScale::Original, true), (MuonScale::MatchRmsAdamW, false)] {
            let hyper = Muon { lr: 0.02, momentum: 0.95, nesterov, weight_decay: 0.1, scale, iterations: 5 };
            let len = rows * columns;
            let start = values::<f32>(1, len);
            fn steps<W: Element>(cpu: &Cpu, hyper: Muon, shape: [usize; 2], start: &[f32]) -> (Vec<f32>, Vec<bf16>) {
                let (mut p, mut m) = (start.to_vec(), vec![0.0; start.len()]);
                let mut copy = vec![bf16::default(); start.len()];
                let mut space = vec![W::default(); muon::workspace(shape[0], shape[1])];
                for step in 1..=3 {
                    let g = gradient(step, start.len());
                    let matrix = Matrix {
                        hyper,
                        shape,
                        gradient_scale: SCALE,
                        params: &mut p,
                        gradients: &g,
                        momentum: &mut m,
                        copy: Some(&mut copy),
                        workspace: &mut space,
                    };
                    muon(cpu, &mut [matrix]);
                }
                (p, copy)
            }
            let mut want = wide(&start);
            let mut m = vec![0.0; len];
            for step in 1..=3 {
                let g = scaled(step, len);
                let mu = f64::from(hyper.momentum);
                m.iter_mut().zip(&g).for_each(|(m, g)| *m = mu * *m + (1.0 - mu) * g);
                let u: Vec<f64> =
                    if nesterov { m.iter().zip(&g).map(|(m, g)| (1.0 - mu) * g + mu * m).collect() } else { m.clone() };
                let factor = match scale {
                    MuonScale::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
                    MuonScale::MatchRmsAdamW => 0.2 * (rows.max(columns) as f64).sqrt(),
                };
                let o = orthogonal(&u, rows, columns);
                for i in 0..len {
                    want[i] = want[i] * (1.0 - 0.02 * 0.1) - 0.02 * factor * o[i];
                }
            }
            for isa in Isa::tested(Isa::Avx512Bf16) {
                let (p, copy) = steps::<f32>(&Cpu::new(isa, 1), hyper, [rows, columns], &start);
                assert!(
                    steps::<f32>(&Cpu::new(isa, 3), hyper, [rows, columns], &start) == (p.clone(), copy.clone()),
                    "{isa}: threads"
                );
                // An iteration multiplies errors by at most 3.4445 at small singular values:
                // 3.4445^5 = 485 for some 10 roundings, times the step of 0.02 and its factor of at
                // most 1.3, three times.
                close(isa, "muon f32", &p, &want, 485.0 * 10.0 * 0.08 * ULP * 4.0);
                assert!(copy.iter().zip(&p).all(|(c, p)| *c == bf16::from_f32(*p)));
                let (p, _) = steps::<bf16>(&Cpu::new(isa, 2), hyper, [rows, columns], &start);
                // In bf16 singular values only come near one; an update's element moves by a
                // fraction of its size.
                close(isa, "muon bf16", &p, &want, 3.0 * 0.02 * 1.3 * 0.15);
            }
        }
    }
}

/// Matrices that go to threads whole, and matrices that are each on all threads, end with the bits
/// that each has alone on one thread.
#[test]
fn muon_of_several_matrices_has_the_bits_of_each_alone() {
    let block: &[[usize; 2]] = &[[40, 40], [40, 40], [96, 40], [40, 96], [40, 40], [7, 3]];
    for (shapes, isa) in [block, &[[150, 70], [3, 9]]]
        .into_iter()
        .flat_map(|shapes| Isa::tested(Isa::Avx512Bf16).map(move |isa| (shapes, isa)))
    {
        let of = |threads: usize, shapes: &[[usize; 2]], first: usize| {
            let cpu = Cpu::new(isa, threads);
            let len = |shape: &[usize; 2]| shape[0] * shape[1];
            let mut params: Vec<_> = shapes.iter().zip(first..).map(|(s, n)| values::<f32>(n as u64, len(s))).collect();
            let gradients: Vec<_> = shapes.iter().zip(first..).map(|(s, n)| gradient(n as u64, len(s))).collect();
            let mut momentum: Vec<_> = shapes.iter().map(|shape| vec![0.0; len(shape)]).collect();
            let mut scratch: Vec<_> =
                shapes.iter().map(|[rows, columns]| vec![bf16::default(); muon::workspace(*rows, *columns)]).collect();
            let hyper = Muon {
                lr: 0.02,
                momentum: 0.95,
                nesterov: true,
                weight_decay: 0.1,
                scale: MuonScale::Original,
                iterations: 5,
            };
            let mut matrices = Vec::new();
            let parts = params.iter_mut().zip(&gradients).zip(&mut momentum).zip(&mut scratch).zip(shapes);
            for ((((params, gradients), momentum), workspace), shape) in parts {
                let (copy, gradient_scale, shape) = (None::<&mut [f32]>, SCALE, *shape);
                matrices.push(Matrix { hyper, shape, gradient_scale, params, gradients, momentum, copy, workspace });
            }
            muon(&cpu, &mut matrices);
            (params, momentum)
        };
        let alone: (Vec<_>, Vec<_>) = (0..shapes.len())
            .map(|index| of(1, &shapes[index..=index], index))
            .map(|(mut params, mut momentum)| (params.remove(0), momentum.remove(0)))
            .unzip();
        for threads in 1..=4 {
            assert!(of(threads, shapes, 0) == alone, "{isa}: {shapes:?} on {threads} threads");
        }
    }
}
