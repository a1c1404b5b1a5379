//! Tests of the plain functions together: graphs that differ from step to step, random programs,
//! every dtype, and meta.

mod common;

use common::*;
use proptest::prelude::*;
use trainyard_autograd::{AutogradError, Policy, Result, Store, TABLE, Tape, Var};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::elementwise::{Binary, Unary};
use trainyard_tensor::{DType, Device, Purpose, TensorError, ops};

fn cpu() -> Device {
    Device::cpu(Isa::detect(), 2, None)
}

fn all_examples(device: &Device) -> Vec<(&'static str, Example)> {
    let of = |name| plain::examples(name, device).into_iter().map(move |example| (name, example));
    TABLE.iter().flat_map(|row| of(row.name)).collect()
}

#[test]
fn every_member_has_an_example() {
    let count = |name| plain::examples(name, &cpu()).len();
    assert!(count("unary") >= Unary::ALL.len());
    assert!(count("binary") >= Binary::ALL.len() - 1);
}

#[test]
fn meta_has_the_shapes_costs_and_peaks_of_the_cpu() {
    let (cpu, meta) = (cpu(), Device::meta());
    for ((name, on_cpu), (_, on_meta)) in all_examples(&cpu).iter().zip(&all_examples(&meta)) {
        let counted = |device: &Device, example: &Example| {
            device.set_profiling(true);
            device.take_profile();
            let device_before = device.pool().usage().live_total();
            let store = Store::new();
            let mut tape = Tape::new(device, &store, Policy::Everything, KEY);
            let leaf = |shape: &Vec<usize>| tape.leaf(device.zeros(shape, DType::F32, Purpose::Activations).unwrap());
            let inputs: Vec<Var> = example.inputs.iter().map(leaf).collect();
            let y = (example.build)(&mut tape, &inputs).unwrap();
            let shape = *y.tensor().shape();
            let seed = device.zeros(shape, DType::F32, Purpose::Activations).unwrap();
            let recording = tape.finish();
            let saved = recording.saved_bytes();
            let mut store = Store::new();
            let (parameters, mut sink) = store.split();
            let wanted: Vec<&Var> = inputs.iter().collect();
            let gradients = recording.backward(&[(&y, seed)], &wanted, &parameters, &mut sink).unwrap();
            let shapes: Vec<_> = gradients.iter().map(|g| *g.as_ref().unwrap().shape()).collect();
            for (shape, input) in shapes.iter().zip(&example.inputs) {
                assert_eq!(shape[..], input[..], "{name}");
            }
            let calls: Vec<_> = device.take_profile().kernels.iter().map(|(k, v)| (*k, v.calls, v.cost)).collect();
            drop((y, inputs, gradients));
            let usage = device.pool().usage();
            assert!(usage.live_total() <= device_before, "{name} leaks");
            (shape, shapes, saved, calls, Purpose::ALL.map(|purpose| usage.peak(purpose)), usage.peak_total())
        };
        assert_eq!(counted(&cpu, on_cpu), counted(&meta, on_meta), "{name}");
    }
}

#[test]
fn half_precision_follows_f32() {
    let device = cpu();
    for dtype in [DType::BF16, DType::F16] {
        for (name, example) in all_examples(&device) {
            // Its example goes through f16 and f32 by itself.
            if name == "cast" {
                continue;
            }
            // The same rounded numbers, computed on in `dtype` or in f32.
            let run = |compute: DType| -> Vec<f32> {
                let mut store = Store::new();
                let (parameters, mut sink) = store.split();
                let mut tape = Tape::new(&device, &parameters, Policy::Everything, KEY);
                let leaf = |(i, shape): (usize, &Vec<usize>)| {
                    let values = values(shape.iter().product(), i);
                    let x = device.tensor(shape, &values, Purpose::Activations).unwrap();
                    let half = ops::cast(&x, dtype).unwrap();
                    tape.leaf(ops::cast(&half, compute).unwrap())
                };
                let inputs: Vec<Var> = example.inputs.iter().enumerate().map(leaf).collect();
                let y = (example.build)(&mut tape, &inputs).unwrap();
                let count = y.tensor().elements();
                let g = if count == 1 { vec![1.0] } else { values(count, 99) };
                let seed = device.tensor(*y.tensor().shape(), &g, Purpose::Activations).unwrap();
                let seed = ops::cast(&seed, y.tensor().dtype()).unwrap();
                let mut all = y.tensor().to_f32_vec().unwrap();
                let wanted: Vec<&Var> = inputs.iter().collect();
                let got = tape.finish().backward(&[(&y, seed)], &wanted, &parameters, &mut sink).unwrap();
                for gradient in got {
                    let gradient = gradient.unwrap();
                    assert_eq!(gradient.dtype(), compute, "{name}");
                    all.extend(gradient.to_f32_vec().unwrap());
                }
                all
            };
            let (half, full) = (run(dtype), run(DType::F32));
            let off: Vec<f32> = half.iter().zip(&full).map(|(a, b)| a - b).collect();
            let relative = (dot(&off, &off) / dot(&full, &full).max(1e-12)).sqrt();
            // A few roundings of 2^-9 (bf16) in a row.
            assert!(relative < 2e-2, "{name} {dtype}: off by {relative}");
        }
    }
}

/// A model with another graph each time: `depth` turns, a branch chosen by the values, and a
/// recursion over halves of its input.
fn recursive(t: &mut Tape<'_>, x: &Var, w: &Var, depth: usize) -> Result<Var> {
    let width = x.tensor().shape()[0];
    let mut h = t.matmul(x, w)?;
    for _ in 0..depth {
        // Both branches are 0 at 0, so that differences across the switch mean something.
        let mean = t.mean(&h, ..)?;
        let factor = if mean.tensor().to_scalar()? > 0.0 { mean } else { t.scale(&mean, -0.5)? };
        h = t.tanh(&h)?;
        h = t.mul(&h, &factor)?;
        h = t.add(&h, x)?;
    }
    if width < 2 {
        return Ok(h);
    }
    let (top, bottom) = (t.narrow(&h, 0, 0, width / 2)?, t.narrow(&h, 0, width / 2, width - width / 2)?);
    let parts = [recursive(t, &top, w, depth / 2)?, recursive(t, &bottom, w, depth + 1)?];
    let joined = t.cat(&[&parts[0], &parts[1]], 0)?;
    t.mul(&joined, &h)
}

#[test]
fn a_model_of_another_length_each_step_differentiates_right() {
    let device = cpu();
    let mut lengths = Vec::new();
    for (step, rows) in [1, 2, 3, 5, 6].into_iter().enumerate() {
        let depth = step % 3;
        let model = example(&[&[rows, 4], &[4, 4]], &[], move |t, x| recursive(t, &x[0], &x[1], depth));
        check("recursive", &device, &model);
        let store = Store::new();
        let mut tape = Tape::new(&device, &store, Policy::Everything, KEY);
        let shapes = [rows * 4, 16].iter().enumerate().map(|(i, n)| values(*n, i)).collect::<Vec<_>>();
        let inputs: Vec<Var> = tensors(&device, &model.inputs, &shapes).into_iter().map(|x| tape.leaf(x)).collect();
        (model.build)(&mut tape, &inputs).unwrap();
        lengths.push(tape.finish().function_names().len());
    }
    lengths.dedup();
    assert_eq!(lengths.len(), 5, "graphs of {lengths:?} functions");
}

#[test]
fn the_indices_of_topk_and_a_stopped_gradient() {
    let device = cpu();
    let of_indices = example(&[&[3, 5]], &[], |t, x| {
        let (_, indices) = t.topk(&x[0], 2)?;
        t.cast(&indices, DType::F32)
    });
    let error = backward(&device, &of_indices, &[values(15, 0)], Policy::Everything).unwrap_err();
    let AutogradError::InBackward { source, .. } = error else { panic!("{error}") };
    assert!(matches!(*source, AutogradError::NotDifferentiable("the indices of topk")));

    // The documented way to compute with a mask as with numbers.
    let stopped = example(&[&[3, 5], &[5]], &[], |t, x| {
        let mask = t.gt(&x[0], &x[1])?;
        let mask = t.stop_gradient(&mask);
        let numbers = t.cast(&mask, DType::F32)?;
        let y = t.mul(&numbers, &x[0])?;
        t.mul(&y, &x[1])
    });
    backward(&device, &stopped, &[values(15, 0), values(5, 1)], Policy::Everything).unwrap();
}

#[test]
fn bad_operands_are_errors_that_name_the_operation() {
    let device = cpu();
    let store = Store::new();
    let mut t = Tape::new(&device, &store, Policy::Everything, KEY);
    let mut leaf = |shape: &[usize]| t.leaf(device.zeros(shape, DType::F32, Purpose::Activations).unwrap());
    let (x, y, scalar, empty) = (leaf(&[3, 5]), leaf(&[4]), leaf(&[]), leaf(&[0, 5]));
    let bf16 = t.leaf(device.zeros([3, 5], DType::BF16, Purpose::Activations).unwrap());
    let (far, floats) = (ints(&device, &[0, 3]), device.zeros([2], DType::F32, Purpose::Data).unwrap());
    let negative = ints(&device, &[-1]);
    let failures = [
        ("binary", t.mul(&x, &y)),
        ("add", t.add(&x, &bf16)),
        ("compare", t.gt(&x, &y)),
        ("select", t.where_(&x, &x, &x)),
        ("masked_fill", t.masked_fill(&x, &x, 0.0)),
        ("clamp", t.clamp(&x, 1.0, -1.0)),
        ("sum", t.sum(&x, 2)),
        ("sum", t.sum(&x, [0, -2])),
        ("mean", t.mean(&empty, 0)),
        ("amax", t.amax(&empty, ..)),
        ("variance", t.var(&scalar, .., 1)),
        ("cumulative_sum", t.cumsum(&x, 2)),
        ("argmax", t.argmax(&scalar, 0)),
        ("top_k", t.topk(&x, 6).map(|(values, _)| values)),
        ("top_k", t.topk(&x, 0).map(|(values, _)| values)),
        ("reshape", t.reshape(&x, &[4, 4])),
        ("reshape", t.reshape(&x, &[1, 1, 1, 1, 1, 3, 5])),
        ("reshape", t.reshape(&x, &[usize::MAX, 2])),
        ("squeeze", t.squeeze(&x, 5)),
        ("permute", t.permute(&x, &[0, 0])),
        ("transpose", t.transpose(&x, 0, -3)),
        ("narrow", t.narrow(&x, 1, 3, 3)),
        ("narrow", t.narrow(&x, 1, 3, usize::MAX)),
        ("split", t.split(&x, &[2, 2], 1).map(|mut parts| parts.remove(0))),
        ("expand", t.expand(&x, &[3, 10])),
        ("expand", t.expand(&scalar, &[usize::MAX])),
        ("repeat", t.repeat(&x, &[2])),
        ("concat", t.cat(&[], 0)),
        ("concat", t.cat(&[&x, &y], 0)),
        ("index", t.index_select(&x, 0, &far)),
        ("index", t.index_select(&x, 0, &negative)),
        ("index_select", t.index_select(&x, 0, &floats)),
        ("gather", t.gather(&x, &far)),
        ("one_hot", t.one_hot(&floats, 3, DType::F32)),
        ("index", t.one_hot(&far, 3, DType::F32)),
        ("matmul", t.matmul(&x, &y)),
        ("matmul", t.matmul(&x, &x)),
        ("mse_loss", t.mse_loss(&x, &y)),
        ("mse_loss", t.mse_loss(&empty, &empty)),
        ("cross_entropy", t.cross_entropy(&x, &floats, Default::default())),
        ("causal_mask", t.causal_mask(3, 2)),
    ];
    for (name, result) in failures {
        match result {
            Err(AutogradError::Tensor(TensorError::Index(error))) => assert_eq!(name, "index", "{error}"),
            Err(error) => assert!(error.to_string().starts_with(name), "{name}: {error}"),
            Ok(var) => panic!("{name} gave {:?}", var.tensor()),
        }
    }
}

#[test]
fn tensors_without_elements_pass_through() {
    let device = cpu();
    let store = Store::new();
    let mut t = Tape::new(&device, &store, Policy::Everything, KEY);
    let mut leaf = |shape: &[usize]| t.leaf(device.zeros(shape, DType::F32, Purpose::Activations).unwrap());
    let (x, row) = (leaf(&[0, 5]), leaf(&[5]));
    let none = ints(&device, &[]);
    let results = [
        t.mul(&x, &row),
        t.exp(&x),
        t.sum(&x, 1),
        t.amax(&x, -1),
        t.var(&x, -1, 1),
        t.softmax(&x),
        t.cumsum(&x, 0),
        t.transpose(&x, 0, 1),
        t.cat(&[&x, &x], 0),
        t.narrow(&x, 1, 1, 2),
        t.repeat(&x, &[2, 2]),
        t.index_select(&row, 0, &none),
        t.index_select(&x, 1, &ints(&device, &[0, 4])),
        t.topk(&x, 2).map(|(values, _)| values),
    ];
    for result in results {
        assert_eq!(result.unwrap().tensor().elements(), 0);
    }
    // A product over nothing, and a sum of nothing, are zeros.
    let (tall, wide) = (t.reshape(&x, &[5, 0]).unwrap(), t.reshape(&x, &[0, 5]).unwrap());
    let zeros = [t.matmul(&tall, &wide).unwrap(), t.sum(&x, 0).unwrap()];
    assert!(zeros.iter().all(|z| z.tensor().to_f32_vec().unwrap().iter().all(|v| *v == 0.0)));
    assert_eq!(zeros[0].tensor().shape()[..], [5, 5]);
}

/// One step of a random program on values of shape [3, 4]: the function, and the earlier values
/// that it takes.
fn apply(t: &mut Tape<'_>, function: usize, a: &Var, b: &Var) -> Result<Var> {
    match function {
        0 => t.add(a, b),
        1 => t.sub(a, b),
        2 => t.mul(a, b),
        3 => t.square(b).and_then(|d| t.add_scalar(&d, 1.0)).and_then(|d| t.div(a, &d)),
        4 => t.tanh(a),
        5 => t.sigmoid(a),
        6 => t.tanh(a).and_then(|z| t.exp(&z)),
        7 => t.softmax(a),
        8 => t.cumsum(a, 0).and_then(|z| t.scale(&z, 0.4)),
        9 => t.transpose(a, 0, 1).and_then(|z| t.reshape(&z, &[3, 4])),
        10 => {
            let both = t.cat(&[a, b], 1)?;
            t.narrow(&both, 1, 3, 4)
        }
        11 => {
            let mean = t.mean(b, plain_dims(-1))?;
            t.sub(a, &mean)
        }
        12 => {
            let square = t.matmul_transposed(
                a,
                trainyard_tensor::cpu::gemm::Transpose::No,
                b,
                trainyard_tensor::cpu::gemm::Transpose::Yes,
            )?;
            let mixed = t.matmul(&square, a)?;
            t.scale(&mixed, 0.3)
        }
        13 => {
            let rows = ints(&t.device().clone(), &[2, 2, 0]);
            t.index_select(a, 0, &rows)
        }
        14 => t.square(a).and_then(|z| t.add_scalar(&z, 0.5)).and_then(|z| t.rsqrt(&z)),
        15 => {
            let spread = t.var(a, plain_dims(0), 0)?;
            t.mul(b, &spread)
        }
        16 => {
            let stacked = t.stack(&[a, b], 0)?;
            t.mean(&stacked, 0)
        }
        17 => {
            let column = t.narrow(a, 1, 2, 1)?;
            let wide = t.expand(&column, &[3, 4])?;
            t.mul(&wide, b)
        }
        18 => t.log_softmax(a).and_then(|z| t.scale(&z, 0.2)),
        _ => {
            let (mask, zero) = (t.causal_mask(3, 4)?, t.scale(b, 0.0)?);
            t.where_(&mask, a, &zero)
        }
    }
}

const FUNCTIONS: usize = 20;

fn plain_dims(dim: i32) -> trainyard_tensor::ops::plain::Dims {
    trainyard_tensor::ops::plain::Dims::from(dim).keep()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// A random program's directional derivative, by central differences of two widths extrapolated
    /// to none.
    #[test]
    fn random_programs_differentiate_right(
        steps in prop::collection::vec((0..FUNCTIONS, any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..9),
        seed in 0usize..1000,
    ) {
        let described = format!("{:?}", steps.iter().map(|(function, ..)| *function).collect::<Vec<_>>());
        let program = example(&[&[3, 4], &[3, 4]], &[], move |t, inputs| {
            let mut values = inputs.to_vec();
            for (function, a, b) in &steps {
                let next = apply(t, *function, a.get(&values), b.get(&values))?;
                values.push(next);
            }
            // Both inputs reach the result.
            let mut last = values[values.len() - 1].clone();
            for input in inputs {
                last = t.add(&last, input)?;
            }
            Ok(last)
        });
        let device = cpu();
        let point = [values(12, seed), values(12, seed + 1)];
        let (gradients, g) = gradients(&device, &program, &point, Policy::Everything);
        let u = [values(12, seed + 2), values(12, seed + 3)];
        let slope = |h: f32| -> Vec<f32> {
            let at = |sign: f32| -> Vec<f32> {
                let moved: Vec<Vec<f32>> = point.iter().zip(&u)
                    .map(|(z, u)| z.iter().zip(u).map(|(z, u)| z + sign * h * u).collect()).collect();
                forward(&device, &program, &moved)
            };
            at(1.0).iter().zip(at(-1.0)).map(|(a, b)| (a - b) / (2.0 * h)).collect()
        };
        let (wide, narrow) = (slope(2e-2), slope(1e-2));
        let change: Vec<f32> = narrow.iter().zip(&wide).map(|(n, w)| (4.0 * n - w) / 3.0).collect();
        let (numeric, analytic) = (dot(&g, &change), dot(&gradients[0], &u[0]) + dot(&gradients[1], &u[1]));
        // The change by extrapolation bounds the remaining error. A program that bends more is
        // beyond finite differences.
        let bend: f64 = narrow.iter().zip(&wide).map(|(n, w)| f64::from((n - w).abs())).sum();
        let scale = dot(&g, &g).sqrt() * dot(&change, &change).sqrt();
        prop_assert!(
            (numeric - analytic).abs() <= 1e-3 * scale + 0.2 * bend + 1e-4,
            "{described}: numeric {numeric}, backward {analytic}"
        );
    }
}
