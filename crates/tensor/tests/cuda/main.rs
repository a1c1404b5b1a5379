//! Operations on CUDA give what they give on the CPU: the kernels run emulated on the host, on the
//! fake driver, or on a GPU (`TRAINYARD_TEST_DEVICE`).
//!
//! Kernels are checked against scalar oracles in `trainyard-cuda`; here it is that each operation
//! launches the right one with the right operands, and that `meta` predicts its memory.

mod context;
mod relative;
mod value_residual;

use std::path::Path;
use std::sync::Arc;
use trainyard_cuda::driver::Product;
use trainyard_cuda::emulated::Emulated;
use trainyard_cuda::fake::{Fake, Kernels, Options};
use trainyard_cuda::kernels::{Argument, File, Float, Launch};
use trainyard_cuda::tested::{self, Tested};
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::attention::AttentionSpec;
use trainyard_tensor::cpu::elementwise::{Binary, Compare, Unary};
use trainyard_tensor::cpu::gemm::{Activation, Transpose};
use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::cpu::plain::mask::{Logic, Side};
use trainyard_tensor::cpu::rope::{RopeScaling, RopeTable, Rotation};
use trainyard_tensor::cuda::{AttentionForm, Cuda};
use trainyard_tensor::ops::optim::{
    Adafactor, AdamW, Decay, Lion, Muon, MuonScale, MuonUpdate, OptimizerOperands, Sgd, StepSize,
};
use trainyard_tensor::ops::plain::{self, Dims, Reduction};
use trainyard_tensor::ops::{self, HeadLayout, Segments, TablePart, experts};
use trainyard_tensor::{Computes, Cost, DType, Device, Purpose, Result, Tensor, TensorError};

/// Operands of a case on one device.
struct Operands<'d> {
    device: &'d Device,
    dtype: DType,
}

impl Operands<'_> {
    /// Numbers in [-1, 1) in the case's dtype.
    fn floats(&self, seed: u64, shape: &[usize]) -> Tensor {
        self.wide(seed, shape).and_then(|wide| ops::cast(&wide, self.dtype)).unwrap()
    }

    fn wide(&self, seed: u64, shape: &[usize]) -> Result<Tensor> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
        self.device.tensor(shape, &values, Purpose::Activations)
    }

    fn integers(&self, shape: &[usize], values: &[i32]) -> Tensor {
        self.device.tensor(shape, values, Purpose::Data).unwrap()
    }

    fn mask(&self, seed: u64, shape: &[usize]) -> Tensor {
        let (a, b) = (self.floats(seed, shape), self.floats(seed + 1, shape));
        plain::compare(Compare::Greater, &a, &b).unwrap()
    }
}

type Case = fn(&Operands<'_>) -> Result<Vec<Tensor>>;

fn device() -> (Tested, Device) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let tested = Tested::new(&folder, 0).unwrap_or_else(|problem| panic!("{problem}"));
    let device = Device::cuda(Arc::new(Cuda::new(tested.driver.clone(), 1)), None);
    (tested, device)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    match tensor.dtype() {
        DType::U32 => tensor.to_vec::<u32>().unwrap().into_iter().map(|x| x as f32).collect(),
        DType::I32 => tensor.to_vec::<i32>().unwrap().into_iter().map(|x| x as f32).collect(),
        _ => tensor.to_f32_vec().unwrap(),
    }
}

/// Runs cases in every dtype on both devices, and on meta for the memory.
fn check(cases: &[(&str, Case)]) {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        // Sums of some ten products of numbers below 1, rounded once or twice.
        let tolerance = match dtype {
            DType::F32 => 2e-5,
            DType::BF16 => 2e-2,
            _ => 3e-3,
        };
        let (tested, cuda) = device();
        let cpu = Device::cpu(Isa::detect(), 1, None);
        for (name, case) in cases {
            let meta = Device::meta_for(Computes::Cuda);
            cuda.pool().reset_peaks();
            let run = |device: &Device| case(&Operands { device, dtype }).unwrap();
            let (got, want) = (run(&cuda), run(&cpu));
            assert_eq!(tested.problems(), [""; 0], "{name} in {dtype}");
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!((got.shape(), got.dtype()), (want.shape(), want.dtype()), "{name} in {dtype}, result {at}");
                for (i, (got, want)) in values(got).into_iter().zip(values(want)).enumerate() {
                    let near = (got - want).abs() <= tolerance * want.abs().max(1.0) || (got.is_nan() && want.is_nan());
                    assert!(near, "{name} in {dtype}, result {at}, element {i}: {got} and {want} on the CPU");
                }
            }
            drop(got);
            run(&meta);
            let (measured, predicted) = (cuda.pool().usage(), meta.pool().usage());
            assert_eq!(measured.peak_total(), predicted.peak_total(), "memory of {name} in {dtype}");
        }
    }
}

const SPEC: AttentionSpec =
    AttentionSpec { heads: 4, kv_heads: 2, head_dim: 8, scale: 0.35, causal: true, window: None };
const LAYOUT: HeadLayout = HeadLayout { heads: 4, kv_heads: 2, head_dim: 8 };

#[test]
fn operations_of_training_are_those_of_the_cpu() {
    check(&[
        ("linear", |o| {
            let (x, w, b, r) = (o.floats(1, &[5, 8]), o.floats(2, &[16, 8]), o.floats(3, &[16]), o.floats(4, &[5, 16]));
            let mut all = Vec::new();
            for activation in [Activation::None, Activation::GeluTanh, Activation::Silu, Activation::GeluExact] {
                let (y, pre) = ops::linear(&x, &w, Some(&b), activation, None, true)?;
                all.extend([y, pre.unwrap(), ops::linear(&x, &w, None, activation, Some(&r), false)?.0]);
            }
            Ok(all)
        }),
        ("linear gradients", |o| {
            let (dy, w, x) = (o.floats(1, &[7, 6]), o.floats(2, &[6, 9]), o.floats(3, &[7, 9]));
            let (mut dw, mut db) = (o.wide(4, &[6, 9])?, o.wide(5, &[6])?);
            ops::linear_weight_gradient(&dy, &x, Some((&mut dw, false)), Some((&mut db, true)))?;
            Ok(vec![ops::linear_input_gradient(&dy, &w)?, dw, db])
        }),
        ("norms", |o| {
            let (x, w, b, dy) = (o.floats(1, &[6, 24]), o.floats(2, &[24]), o.floats(3, &[24]), o.floats(4, &[6, 24]));
            let (mut dw, mut db) = (o.wide(5, &[24])?, o.wide(6, &[24])?);
            let (y, inverse) = ops::rms_norm(&x, &w, 1e-5)?;
            let base = Some(o.floats(7, &[6, 24]));
            let dx = ops::rms_norm_backward(&dy, &x, &w, &inverse, base, Some((&mut dw, false)))?;
            let (z, mean, deviation) = ops::layer_norm(&x, &w, Some(&b), 1e-5)?;
            let (slot_w, slot_b) = (Some((&mut dw, false)), Some((&mut db, true)));
            let dz = ops::layer_norm_backward(&dy, &x, &w, &mean, &deviation, None, slot_w, slot_b)?;
            Ok(vec![y, dx, z, mean, dz, dw, db])
        }),
        ("query and key norms", |o| {
            let (qkv, wq, wk) = (o.floats(1, &[5, 64]), o.floats(2, &[8]), o.floats(3, &[8]));
            let (mut dwq, mut dwk) = (o.wide(4, &[8])?, o.wide(5, &[8])?);
            let (y, inverse) = ops::qk_norm(&qkv, LAYOUT, &wq, &wk, 1e-5)?;
            let (q, k) = (Some((&mut dwq, true)), Some((&mut dwk, true)));
            let dx = ops::qk_norm_backward(o.floats(6, &[5, 64]), &qkv, LAYOUT, &wq, &wk, &inverse, q, k)?;
            Ok(vec![y, dx, dwq, dwk])
        }),
        ("attention", |o| {
            let (qkv, dout) = (o.floats(1, &[9, 64]), o.floats(2, &[9, 32]));
            let segments = Segments::new(&[0, 4, 9])?;
            let (out, lse) = ops::attention(&qkv, &SPEC, &segments)?;
            let dqkv = ops::attention_backward(&dout, &qkv, &out, &lse, &SPEC, &segments)?;
            let window = AttentionSpec { window: Some(2), ..SPEC };
            Ok(vec![ops::attention(&qkv, &window, &segments)?.0, out, lse, dqkv])
        }),
        ("decoding", |o| {
            let qkv = o.floats(1, &[2, 64]);
            let (mut keys, mut values) = (o.floats(2, &[6, 16]), o.floats(3, &[6, 16]));
            let out = ops::attention_decode(&qkv, &SPEC, &mut keys, &mut values, 3)?;
            Ok(vec![out, keys, values])
        }),
        ("rope", |o| {
            let table = RopeTable::new(8, 10_000.0, RopeScaling::None, 16).unwrap();
            let positions = o.integers(&[5], &[0, 1, 2, 7, 15]);
            let turn = |rotation| ops::rope(o.floats(1, &[5, 64]), LAYOUT, &table, &positions, rotation);
            Ok(vec![turn(Rotation::Forward)?, turn(Rotation::Backward)?])
        }),
        ("mixtures of experts", |o| {
            let gate = experts::Gate::Sigmoid;
            let router = experts::Router { experts: 5, top_k: 2, gate, normalise: true, scale: 1.5 };
            let (x, w, bias) = (o.floats(1, &[9, 16]), o.floats(2, &[5, 16]), o.floats(3, &[5]));
            let logits = experts::router_logits(&x, &w)?;
            // Some choices are dropped, so some rows are nobody's.
            let routes = experts::route(&logits, Some(&bias), &router, Some(3))?;
            let rows = experts::gather_rows(&x, &routes.tokens)?;
            let (up, dy, mut dw) = (o.floats(4, &[5 * 24, 16]), o.floats(5, &[18, 24]), o.wide(6, &[5 * 24, 16])?);
            let own = experts::Groups::of_one_source(&routes.bounds);
            // Rows that came from two ranks, of the same five experts.
            let bounds = o.integers(&[11], &[0, 2, 2, 5, 6, 9, 9, 11, 12, 15, 17]);
            let mut results = Vec::new();
            for groups in [own, experts::Groups { bounds, sources: 2 }] {
                results.push(experts::ragged_linear(&rows, &up, &groups)?);
                results.push(experts::ragged_input_gradient(&dy, &up, &groups)?);
                experts::ragged_weight_gradient(&dy, &rows, &groups, (&mut dw, false))?;
            }
            let (places, weights) = (&routes.places, &routes.weights);
            results.push(experts::combine_rows(&rows, places, Some(weights), Some(&x))?);
            results.push(experts::combine_rows(&rows, places, None, None)?);
            let (drows, dweights) = experts::combine_rows_backward(&x, &rows, places, weights)?;
            let factors = experts::BalanceFactors { auxiliary: 0.3, z: 0.2 };
            let (chosen, counts) = (&routes.experts, &routes.counts);
            results.push(experts::route_backward(&logits, chosen, counts, Some(&dweights), &router, factors)?);
            results.push(experts::route_backward(&logits, chosen, counts, None, &router, factors)?);
            results.push(experts::balance_sums(&router, &logits, counts)?);
            results.extend([drows, dweights, dw, logits, rows]);
            results.extend([
                routes.weights,
                routes.experts,
                routes.places,
                routes.tokens,
                routes.bounds,
                routes.counts,
            ]);
            Ok(results)
        }),
        ("embedding", |o| {
            let (tokens, positions) = (o.integers(&[4], &[3, 0, 3, 5]), o.integers(&[4], &[0, 1, 0, 1]));
            let (table, places, mut gradient) = (o.floats(1, &[6, 10]), o.floats(2, &[2, 10]), o.wide(3, &[6, 10])?);
            let y = ops::embedding(&tokens, &table, Some((&positions, &places)))?;
            ops::embedding_backward(&o.floats(4, &[4, 10]), &tokens, &mut gradient, false)?;
            Ok(vec![y, ops::embedding(&tokens, &table, None)?, gradient])
        }),
        ("a part of an embedding", |o| {
            let tokens = o.integers(&[5], &[3, 0, 3, 5, 7]);
            let (table, mut gradient) = (o.floats(1, &[4, 10]), o.wide(3, &[4, 10])?);
            let part = TablePart { first: 2, whole: 8 };
            ops::embedding_part_backward(&o.floats(4, &[5, 10]), &tokens, part, &mut gradient, false)?;
            Ok(vec![ops::embedding_part(&tokens, &table, part)?, gradient])
        }),
        ("a head whose vocabulary lies in two parts", |o| {
            let (x, targets) = (o.floats(1, &[5, 8]), o.integers(&[5], &[2, -100, 12, 0, 5]));
            let (w, v) = (o.floats(2, &[5, 8]), o.floats(4, &[8, 8]));
            let parts = [(&w, TablePart { first: 0, whole: 13 }), (&v, TablePart { first: 5, whole: 13 })];
            let of = |(w, part): (&Tensor, TablePart)| ops::vocabulary_statistics(&x, w, part, &targets);
            let statistics = plain::concat(&[&of(parts[0])?, &of(parts[1])?], 0)?;
            let merged = ops::merge_statistics(&statistics, &targets, 0.25)?;
            let mut all = Vec::new();
            for (w, part) in parts {
                let mut dw = o.wide(3, &[w.rows(), 8])?;
                let slot = Some((&mut dw, part.first > 0));
                let lse = &merged.lse;
                all.push(ops::linear_cross_entropy_part_gradients(&x, w, part, &targets, lse, 0.25, slot)?);
                all.push(dw);
            }
            all.extend([merged.loss, merged.lse, statistics]);
            Ok(all)
        }),
        ("head", |o| {
            let (x, w, targets) = (o.floats(1, &[5, 8]), o.floats(2, &[13, 8]), o.integers(&[5], &[2, -100, 12, 0, 5]));
            let mut dw = o.wide(3, &[13, 8])?;
            let slot = Some((&mut dw, false));
            let (loss, dx) = ops::linear_cross_entropy_with_gradients(&x, &w, &targets, 0.25, slot)?;
            let each = ops::token_losses(&x, &w, &targets)?;
            if !o.device.is_meta() {
                assert_eq!(each.summary.tokens, 4);
            }
            Ok(vec![loss, dx, ops::linear_cross_entropy(&x, &w, &targets, 0.25)?, each.losses, dw])
        }),
        ("elementwise", |o| {
            let (a, b, pair) = (o.floats(1, &[3, 7]), o.floats(2, &[3, 7]), o.floats(3, &[3, 14]));
            let key = RandomKey { seed: 9, step: 1, site: 2 };
            let mut sum = o.wide(4, &[3, 7])?;
            ops::accumulate(&a, &mut sum, false)?;
            let kept = a.clone();
            Ok(vec![
                ops::add(&a, &b)?,
                ops::add_into(o.floats(5, &[3, 7]), &b)?,
                ops::add_into(kept, &b)?,
                sum,
                ops::cast(&a, DType::F32)?,
                ops::activate(Activation::Silu, &a)?,
                ops::activate(Activation::ReluSquared, &a)?,
                ops::activation_backward(Activation::ReluSquared, &a, o.floats(7, &[3, 7]))?,
                ops::activation_backward(Activation::GeluExact, &a, o.floats(6, &[3, 7]))?,
                ops::swiglu(&pair)?,
                ops::swiglu_backward(&pair, &b)?,
                ops::glu(Activation::GeluTanh, &pair)?,
                ops::glu_backward(Activation::GeluTanh, &pair, &b)?,
                ops::dropout(&a, 0.3, key)?,
                ops::dropout_from(&a, 0.3, key, 200)?,
                plain::dropout_add(&a, &b, 0.3, key)?,
            ])
        }),
    ]);
}

#[test]
fn optimizer_steps_are_those_of_the_cpu() {
    check(&[("optimizers", |o| {
        let gradient = o.wide(1, &[37])?;
        let mut all = Vec::new();
        for rule in 0..5 {
            let (mut master, mut copy) = (o.wide(2, &[37])?, o.floats(3, &[37]));
            let (mut first, mut second) = (o.wide(4, &[37])?, o.wide(5, &[37])?);
            second = plain::unary(Unary::Square, &second)?;
            let copies = o.dtype != DType::F32;
            let copy_slot = copies.then_some(&mut copy);
            let operands =
                OptimizerOperands { master: &mut master, gradient: &gradient, gradient_scale: 0.5, copy: copy_slot };
            let (lr, weight_decay) = (0.01, 0.1);
            let sgd = Sgd { lr, momentum: 0.9, nesterov: true, weight_decay, decay: Decay::Coupled };
            match rule {
                0 => {
                    let hyper = AdamW { lr, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay, variance_steps: None };
                    ops::optim::adamw(hyper, 3, operands, &mut first, &mut second)?;
                }
                1 => ops::optim::sgd(sgd, operands, Some(&mut first))?,
                2 => ops::optim::sgd(Sgd { momentum: 0.0, decay: Decay::Decoupled, ..sgd }, operands, None)?,
                3 => ops::optim::sign_step(lr, operands)?,
                _ => ops::optim::lion(Lion { lr, beta1: 0.9, beta2: 0.99, weight_decay }, operands, &mut first)?,
            }
            all.extend([master, first, second]);
            if copies {
                all.push(copy);
            }
        }
        let squares = [vec![ops::optim::sum_of_squares(&gradient)?], ops::optim::chunk_sums_of_squares(&gradient, 16)?];
        let squares: Vec<f32> = squares.concat().into_iter().map(|x| x as f32).collect();
        all.push(o.device.tensor([squares.len()], &squares, Purpose::Activations)?);
        Ok(all)
    })]);
}

#[test]
fn plain_operations_are_those_of_the_cpu() {
    check(&[
        ("functions of one number", |o| {
            let x = o.floats(1, &[2, 5]);
            let positive = plain::unary(Unary::Abs, &x)?;
            let mut all = Vec::new();
            for f in Unary::ALL {
                let y = plain::unary(f, &positive)?;
                all.push(plain::unary_backward(f, &x, &positive)?);
                all.push(y);
            }
            all.extend([plain::power(&positive, 3.0)?, plain::power_backward(3.0, &x, &positive)?]);
            all.extend([plain::clamp(&x, -0.5, 0.25)?, plain::clamp_backward(-0.5, 0.25, &x, &x)?]);
            // Near 0 some of them grow beyond what a tolerance means.
            all.retain(|tensor| tensor.device().is_meta() || values(tensor).iter().all(|x| x.abs() < 4.0));
            Ok(all)
        }),
        ("functions of two numbers", |o| {
            let (a, row) = (o.floats(1, &[3, 4]), o.floats(2, &[4]));
            let (column, one, many) = (o.floats(3, &[3, 1]), o.floats(4, &[1]), o.floats(5, &[2, 1, 4]));
            let mut all = vec![plain::with_number(Binary::Mul, &a, 1.5)?];
            for b in [&row, &column, &one, &many] {
                for f in [Binary::Add, Binary::Sub, Binary::Mul] {
                    let y = plain::binary(f, &a, b)?;
                    all.extend(plain::binary_backward(f, &y, &a, b, [true, true])?.into_iter().flatten());
                    all.push(y);
                }
            }
            Ok(all)
        }),
        ("masks", |o| {
            let (a, b, m, n) = (o.floats(1, &[3, 4]), o.floats(2, &[3, 4]), o.mask(3, &[3, 4]), o.mask(5, &[3, 4]));
            let mut all = vec![
                plain::select(&m, &a, &b)?,
                plain::masked_fill(&a, &m, -2.0)?,
                plain::keep(&a, &n, Side::Set)?,
                plain::logical_not(&m)?,
                plain::causal_mask(o.device, 2, 5)?,
                plain::to_float(&m, o.dtype)?,
            ];
            for how in [Compare::Greater, Compare::GreaterEqual, Compare::Equal] {
                all.push(plain::compare(how, &a, &b)?);
            }
            for f in [Logic::And, Logic::Or, Logic::Xor] {
                all.push(plain::logic(f, &m, &n)?);
            }
            Ok(all)
        }),
        ("arranging", |o| {
            let (x, dy) = (o.floats(1, &[2, 3, 4]), o.floats(2, &[2, 2, 4]));
            Ok(vec![
                plain::permute(&x, &[2, 0, 1])?,
                plain::transpose(&o.mask(7, &[3, 5]), 0, 1)?,
                plain::expand(&o.floats(3, &[3, 1]), &[2, 3, 4])?,
                plain::narrow(&x, 1, 1, 2)?,
                plain::narrow_backward(&dy, x.shape(), 1, 1, None)?,
                plain::narrow_backward(&dy, x.shape(), 1, 1, Some(o.floats(4, &[2, 3, 4])))?,
                plain::concat(&[&x, &dy], 1)?,
                plain::repeat(&x, &[2, 1, 3])?,
                plain::repeat_backward(&plain::repeat(&x, &[2, 1, 3])?, x.shape(), &[2, 1, 3])?,
            ])
        }),
        ("reductions", |o| {
            let x = o.floats(1, &[3, 5, 4]);
            let mut all = Vec::new();
            for dims in [Dims::from(..), Dims::from(-1), Dims::from(0), Dims::from(1), Dims::from([0, 2]).keep()] {
                all.extend([plain::sum(&x, &dims)?, plain::mean(&x, &dims)?]);
                let y = plain::amax(&x, &dims)?;
                all.push(plain::amax_backward(&y, &x, &y, &dims)?);
                let (variance, mean) = plain::variance(&x, &dims, 1)?;
                all.push(plain::variance_backward(&variance, &x, &mean, &dims, 1)?);
                all.extend([y, variance, mean]);
            }
            let (values, indices) = plain::top_k(&x, 3)?;
            all.extend([values, indices, plain::argmax(&x, 1)?, plain::softmax(&x)?, plain::log_softmax(&x)?]);
            let (p, l) = (plain::softmax(&x)?, plain::log_softmax(&x)?);
            all.extend([plain::softmax_backward(&x, &p)?, plain::log_softmax_backward(&x, &l)?]);
            all.extend([plain::cumulative_sum(&x, 1)?, plain::cumulative_sum_backward(&x, -1)?]);
            Ok(all)
        }),
    ]);
}

#[test]
fn steps_of_whole_matrices_are_those_of_the_cpu() {
    check(&[
        ("muon", |o| {
            let mut all = Vec::new();
            for (number, shape) in [[5, 9], [12, 7], [6, 6]].into_iter().enumerate() {
                let n = shape[0] * shape[1];
                let gradient = o.wide(1, &[n])?;
                let (mut master, mut momentum) = (o.wide(2, &[n])?, o.wide(3, &[n])?);
                let mut copy = o.floats(4, &[n]);
                let scale = [MuonScale::Original, MuonScale::MatchRmsAdamW][number % 2];
                let nesterov = number != 1;
                let hyper = Muon { lr: 0.02, momentum: 0.95, nesterov, weight_decay: 0.1, scale, iterations: 5 };
                let copies = o.dtype != DType::F32;
                for _ in 0..3 {
                    let copy = copies.then_some(&mut copy);
                    let operands =
                        OptimizerOperands { master: &mut master, gradient: &gradient, gradient_scale: 0.5, copy };
                    ops::optim::muon(&mut [MuonUpdate { hyper, shape, operands, momentum: &mut momentum }])?;
                }
                all.extend([master, momentum, copy]);
            }
            Ok(all)
        }),
        ("adafactor", |o| {
            let mut all = Vec::new();
            for (number, [rows, columns]) in [[5, 9], [67, 3], [1, 6]].into_iter().enumerate() {
                let n = rows * columns;
                let gradient = o.wide(1, &[n])?;
                let (mut master, mut vector) = (o.wide(2, &[n])?, o.wide(3, &[n])?);
                let [mut row, mut column, mut moment] =
                    [rows, columns, n].map(|len| o.device.zeros([len], DType::F32, Purpose::Optimizer).unwrap());
                let (mut copy, mut vector_copy) = (o.floats(4, &[n]), o.floats(5, &[n]));
                let step_size = [StepSize::Relative, StepSize::Absolute][number % 2];
                let hyper = Adafactor {
                    lr: 0.01,
                    beta2_decay: -0.8,
                    eps1: 1e-30,
                    eps2: 1e-3,
                    clip_threshold: 1.0,
                    weight_decay: 0.1,
                    step_size,
                };
                let copies = o.dtype != DType::F32;
                for step in 1..4 {
                    let operands = OptimizerOperands {
                        master: &mut master,
                        gradient: &gradient,
                        gradient_scale: 0.5,
                        copy: copies.then_some(&mut copy),
                    };
                    ops::optim::adafactor_matrix(hyper, step, operands, &mut row, &mut column)?;
                    let operands = OptimizerOperands {
                        master: &mut vector,
                        gradient: &gradient,
                        gradient_scale: 0.5,
                        copy: copies.then_some(&mut vector_copy),
                    };
                    ops::optim::adafactor_vector(hyper, step, operands, &mut moment)?;
                }
                all.extend([master, vector, row, column, moment, copy, vector_copy]);
            }
            Ok(all)
        }),
    ]);
}

#[test]
fn indices_losses_and_products_are_those_of_the_cpu() {
    check(&[
        ("indices", |o| {
            let (x, indices) = (o.floats(1, &[3, 5, 4]), o.integers(&[4], &[4, 0, 4, 2]));
            let unsigned = o.device.tensor::<u32>([2], &[1, 1], Purpose::Data)?;
            let rows = o.integers(
                &[3, 5, 2],
                &[3, 3, 0, 1, 2, 0, 1, 1, 3, 0, 0, 0, 1, 2, 3, 3, 2, 1, 0, 1, 3, 2, 2, 2, 1, 0, 0, 3, 3, 1],
            );
            let mut all = Vec::new();
            for (dim, len) in [(0, 3), (1, 5), (2, 4)] {
                let which = if len > 4 { &indices } else { &unsigned };
                let y = plain::index_select(&x, dim, which)?;
                all.push(plain::index_add(&y, x.shape(), dim, which)?);
                all.push(y);
            }
            let y = plain::gather(&x, &rows)?;
            all.push(plain::scatter_add(&y, x.shape(), &rows)?);
            all.extend([y, plain::one_hot(o.device, &indices, 5, o.dtype)?]);
            let none = o.integers(&[0], &[]);
            all.extend([plain::index_select(&x, 1, &none)?, plain::one_hot(o.device, &none, 3, o.dtype)?]);
            all.push(plain::index_add(&o.floats(1, &[3, 0, 4]), x.shape(), 1, &none)?);
            Ok(all)
        }),
        ("losses", |o| {
            let (x, dy) = (o.floats(1, &[5, 7]), o.device.tensor([], &[0.5f32], Purpose::Activations)?);
            let (targets, none) = (o.integers(&[5], &[6, -100, 0, 3, -100]), o.integers(&[5], &[-100; 5]));
            let mut all = Vec::new();
            for reduction in [Reduction::Mean, Reduction::Sum] {
                for targets in [&targets, &none] {
                    let (loss, lse) = plain::cross_entropy(&x, targets, reduction)?;
                    all.push(plain::cross_entropy_backward(&dy, &x, targets, &lse, reduction)?);
                    all.extend([loss, lse]);
                }
            }
            let other = o.floats(2, &[5, 7]);
            all.extend([plain::mse_loss(&x, &other)?, plain::mse_loss_backward(&dy, &x, &other)?]);
            Ok(all)
        }),
        ("products", |o| {
            let (no, yes) = (Transpose::No, Transpose::Yes);
            let mut all = Vec::new();
            for (a, turn_a, b, turn_b) in [
                (&[3, 5][..], no, &[5, 7][..], no),
                (&[5, 3], yes, &[7, 5], yes),
                (&[2, 3, 5], no, &[5, 7], no),
                (&[2, 3, 5], no, &[2, 7, 5], yes),
                (&[2, 5, 3], yes, &[5, 7], no),
                (&[3, 5], no, &[4, 5, 7], no),
                (&[2, 1, 3, 5], no, &[3, 5, 7], no),
                (&[2, 3, 3, 5], no, &[2, 1, 5, 7], no),
                (&[2, 0], no, &[0, 3], no),
            ] {
                all.push(plain::matmul(&o.floats(1, a), turn_a, &o.floats(2, b), turn_b)?);
            }
            // Of a view that begins in the middle of a block.
            let part = plain::narrow(&o.floats(3, &[4, 5]), 0, 1, 3)?;
            all.push(plain::matmul(&part, no, &o.floats(4, &[5, 3]), no)?);
            Ok(all)
        }),
    ]);
}

#[test]
fn wrong_indices_are_named_as_on_the_cpu() {
    let (tested, cuda) = device();
    for device in [cuda, Device::cpu(Isa::detect(), 1, None)] {
        let x = device.zeros([4, 3], DType::F32, Purpose::Activations).unwrap();
        let indices = device.tensor::<i32>([3], &[2, 4, -1], Purpose::Data).unwrap();
        let huge = device.tensor::<u32>([1], &[u32::MAX], Purpose::Data).unwrap();
        for (error, words) in [
            (plain::index_select(&x, 0, &indices).unwrap_err(), "index 4 (entry 1) is outside 0..4"),
            (
                plain::index_add(&x, x.shape(), 0, &device.tensor::<i32>([4], &[0, 0, -7, 1], Purpose::Data).unwrap())
                    .unwrap_err(),
                "index -7 (entry 2) is outside 0..4",
            ),
            (plain::one_hot(&device, &huge, 3, DType::F32).unwrap_err(), "index -1 (entry 0) is outside 0..3"),
            (
                plain::cross_entropy(
                    &x,
                    &device.tensor::<i32>([4], &[0, -100, 3, 1], Purpose::Data).unwrap(),
                    Reduction::Sum,
                )
                .unwrap_err(),
                "target 3 (entry 2) is outside 0..3",
            ),
        ] {
            assert_eq!(error.to_string(), words, "on {device:?}");
        }
    }
    assert_eq!(tested.problems(), [""; 0]);
}

/// A linear layer with operands of eight bits, scaled as by an earlier step, and its gradients;
/// with the largest magnitudes of all three.
fn eight_bits(o: &Operands<'_>, measures: bool) -> Result<Vec<Tensor>> {
    use ops::fp8::{Scaling, Slot, Slots, linear_fp8, linear_fp8_backward};
    let slot = |scale: f32| -> Result<Slot> {
        let one = |value: f32| o.device.tensor([1], &[value], Purpose::Workspace);
        Ok(Slot {
            scale: one(scale)?,
            inverse: one(1.0 / scale)?,
            amax: o.device.zeros([1], DType::U32, Purpose::Workspace)?,
        })
    };
    let slots = Arc::new(Slots { input: slot(256.0)?, weight: slot(512.0)?, gradient: slot(16384.0)? });
    let scaling = Scaling { slots: Arc::clone(&slots), measures };
    let (x, w, b) = (o.floats(1, &[48, 32]), o.floats(2, &[16, 32]), o.floats(3, &[16]));
    let (r, dy) = (o.floats(4, &[48, 16]), o.floats(5, &[48, 16]));
    let mut all = Vec::new();
    for (activation, residual) in [
        (Activation::None, None),
        (Activation::None, Some(&r)),
        (Activation::GeluTanh, None),
        (Activation::Silu, Some(&r)),
    ] {
        let keep = activation != Activation::None;
        let (y, pre) = linear_fp8(&x, &w, Some(&b), activation, residual, keep, &scaling)?;
        all.extend([Some(y), pre].into_iter().flatten());
    }
    let (mut dw, mut db) = (o.wide(6, &[16, 32])?, o.wide(7, &[16])?);
    all.extend(linear_fp8_backward(&dy, Some((&x, (&mut dw, false))), Some(&w), Some((&mut db, true)), &scaling)?);
    all.extend([dw, db]);
    let mut alone = o.wide(8, &[16, 32])?;
    assert!(linear_fp8_backward(&dy, Some((&x, (&mut alone, true))), None, None, &scaling)?.is_none());
    all.push(alone);
    all.extend(linear_fp8_backward(&dy, None, Some(&w), None, &scaling)?);
    all.extend([slots.input.amax.clone(), slots.weight.amax.clone(), slots.gradient.amax.clone()]);
    Ok(all)
}

/// Both devices multiply the same rounded numbers, so that the order of sums alone differs: the
/// tolerance is that of bf16's last rounding, not of eight bits.
#[test]
fn linear_layers_of_eight_bits_are_those_of_the_cpu() {
    let (tested, cuda) = device();
    if tested.driver.properties().capability < Product::FP8_CAPABILITY {
        return trainyard_testing::skip("the GPU has no products of eight bits");
    }
    let cpu = Device::cpu(Isa::detect(), 1, None);
    for measures in [false, true] {
        let meta = Device::meta_for(Computes::Cuda);
        cuda.pool().reset_peaks();
        let run = |device: &Device| eight_bits(&Operands { device, dtype: DType::BF16 }, measures).unwrap();
        let (got, want) = (run(&cuda), run(&cpu));
        assert_eq!(tested.problems(), [""; 0]);
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!((got.shape(), got.dtype()), (want.shape(), want.dtype()));
            for (got, want) in values(got).into_iter().zip(values(want)) {
                let tolerance = if got.abs() > 1e6 { 0.0 } else { 1.0 / 128.0 };
                assert!(
                    (got - want).abs() <= tolerance * want.abs().max(1.0),
                    "result {at}: {got} and {want} on the CPU"
                );
            }
        }
        drop(got);
        let meta_results = run(&meta);
        assert_eq!(meta_results.len(), want.len());
        drop(meta_results);
        assert_eq!(cuda.pool().usage().peak_total(), meta.pool().usage().peak_total());
        // Scratch on a processor is predicted as well.
        let meta = Device::meta();
        cpu.pool().reset_peaks();
        drop(want);
        cpu.pool().reset_peaks();
        drop((run(&cpu), run(&meta)));
        assert_eq!(cpu.pool().usage().peak_total(), meta.pool().usage().peak_total());
    }
    // Rounded and not are apart by what eight bits lose, and no more: three bits of mantissa in
    // each operand, 32 products.
    let [rounded, wide] =
        [false, true].map(|measures| eight_bits(&Operands { device: &cpu, dtype: DType::BF16 }, measures).unwrap());
    let off = |(a, b): (&Tensor, &Tensor)| {
        let (a, b) = (values(a), values(b));
        let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>();
        (squares(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / squares(&mut b.iter().copied())).sqrt()
    };
    let offs: Vec<f64> = rounded.iter().zip(&wide).map(off).collect();
    // Of the bias's gradient nothing is rounded, and the largest magnitudes are the same.
    let exact = [8, offs.len() - 1, offs.len() - 2, offs.len() - 3];
    for (at, off) in offs.iter().enumerate() {
        assert!(if exact.contains(&at) { *off == 0.0 } else { (1e-3..0.1).contains(off) }, "result {at}: {off}");
    }
}

#[test]
fn sizes_that_are_no_multiples_of_16_are_refused_on_every_device() {
    let (_, cuda) = device();
    for device in [Device::cpu(Isa::detect(), 1, None), Device::meta_for(Computes::Cuda), cuda] {
        let one = || device.tensor([1], &[1.0f32], Purpose::Workspace).unwrap();
        let slot = || ops::fp8::Slot {
            scale: one(),
            inverse: one(),
            amax: device.zeros([1], DType::U32, Purpose::Workspace).unwrap(),
        };
        let slots = Arc::new(ops::fp8::Slots { input: slot(), weight: slot(), gradient: slot() });
        let scaling = ops::fp8::Scaling { slots, measures: false };
        let zeros = |shape: [usize; 2]| device.zeros(shape, DType::BF16, Purpose::Activations).unwrap();
        let error =
            ops::fp8::linear_fp8(&zeros([16, 24]), &zeros([32, 24]), None, Activation::None, None, false, &scaling)
                .unwrap_err();
        assert!(
            error.to_string().contains("[16, 32, 24], which for products of eight bits must be multiples of 16"),
            "{error}"
        );
    }
}

#[test]
fn products_of_views_say_how_they_are_aligned() {
    let fake = Arc::new(Fake::new(Options::default()));
    let device = Device::cuda(Arc::new(Cuda::new(fake.clone(), 1)), None);
    let x = device.zeros([4, 6], DType::BF16, Purpose::Activations).unwrap();
    for (first, alignment) in [(0, 256), (1, 4), (2, 8)] {
        let part = plain::narrow(&x, 0, first, 2).unwrap();
        fake.take_records();
        plain::matmul(&part, Transpose::Yes, &part, Transpose::No).unwrap();
        let products: Vec<_> = fake.take_records().into_iter().filter_map(|record| record.product).collect();
        assert_eq!(products.iter().map(|form| form.alignment).collect::<Vec<_>>(), [alignment]);
    }
    let (w, biases) = (device.zeros([6, 6], DType::BF16, Purpose::Params).unwrap(), x.view(0, [24]).unwrap());
    let bias = biases.view(1, [6]).unwrap();
    fake.take_records();
    ops::linear(&x, &w, Some(&bias), Activation::None, None, false).unwrap();
    let products: Vec<_> = fake.take_records().into_iter().filter_map(|record| record.product).collect();
    assert_eq!(products.iter().map(|form| form.alignment).collect::<Vec<_>>(), [2]);
}

#[test]
fn products_of_f32_round_to_tf32_where_that_is_wanted() {
    // So large that tensor cores are the fastest: of small products a GPU may choose not to round.
    const K: usize = 512;
    let run = |tf32, dtype| {
        let tested = Tested::new(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated"), 0).unwrap();
        let device = Device::cuda(Arc::new(Cuda::new(tested.driver.clone(), 1).with_tf32(tf32)), None);
        let operands = Operands { device: &device, dtype };
        let (x, w) = (operands.floats(1, &[256, K]), operands.floats(2, &[128, K]));
        values(&ops::linear(&x, &w, None, Activation::None, None, false).unwrap().0)
    };
    let (full, rounded) = (run(false, DType::F32), run(true, DType::F32));
    assert_ne!(full, rounded);
    // Products of numbers below 1, each operand rounded to 11 bits.
    assert!(full.iter().zip(&rounded).all(|(a, b)| (a - b).abs() <= K as f32 * 2.0 * 2f32.powi(-11)));
    assert_eq!(run(false, DType::BF16), run(true, DType::BF16));
}

/// Emulated kernels but one, which does nothing.
struct Without(&'static Emulated, &'static str);

impl Kernels for Without {
    fn run(
        &self,
        file: File,
        float: Float,
        name: &str,
        launch: Launch,
        arguments: &[Argument],
    ) -> std::result::Result<(), String> {
        if name == self.1 { Ok(()) } else { (&self.0).run(file, float, name, launch, arguments) }
    }
}

#[test]
fn attention_by_wgmma_is_tried_before_it_is_used() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let chosen = |without: &'static str, capability, dtype| {
        let kernels = Without(tested::kernels(&folder).unwrap(), without);
        let options = Options { capability, kernels: Some(Box::new(kernels)), ..Options::default() };
        let cuda = Arc::new(Cuda::new(Arc::new(Fake::new(options)), 1));
        cuda.choose_attention(dtype, None).unwrap();
        cuda.attention().map(|choice| (choice.form, choice.because.clone()))
    };
    for dtype in [DType::BF16, DType::F16] {
        let (form, because) = chosen("", (9, 0), dtype).unwrap();
        assert!(form == AttentionForm::Warpgroups && because.starts_with("tried, within "), "{form:?}: {because}");
    }
    for without in ["attention_warpgroup_64", "attention_warpgroup_128", "attention_backward_keys_warpgroup_128"] {
        let (form, because) = chosen(without, (9, 0), DType::BF16).unwrap();
        assert!(form == AttentionForm::Warps && because.contains(" off: please report it"), "{form:?}: {because}");
    }
    assert_eq!(chosen("", (10, 0), DType::BF16).unwrap().0, AttentionForm::Warps);
    assert_eq!(chosen("", (9, 0), DType::F32), None);
}

#[test]
fn what_cuda_has_not_is_an_error_that_names_it() {
    let (_, device) = device();
    let x = device.zeros([2, 2], DType::F32, Purpose::Activations).unwrap();
    let error = device.launch("of the CPU alone", Cost::default(), |_| Ok(())).unwrap_err();
    assert_eq!(error.to_string(), "not implemented on cuda: of the CPU alone");
    assert!(matches!(x.data::<f32>(), Err(TensorError::NotOnHost { .. })));
}

#[test]
fn peaks_are_found_and_kernels_are_timed_after_their_check() {
    use trainyard_tensor::bench::gpu::{self, Sizes};
    let (tested, device) = device();
    let peaks = trainyard_tensor::cuda::peak::measure(device.as_cuda().unwrap()).unwrap();
    let rates = [peaks.f32_flops, peaks.bf16_flops, peaks.f16_flops, peaks.copy_bytes_per_s];
    assert!(rates.iter().all(|rate| *rate > 1e6 && rate.is_finite()), "{peaks:?}");
    // What was measured on lies in no pool of a run.
    assert_eq!(device.pool().usage().peak_total(), 0);
    let sizes = Sizes::tiny();
    for dtype in [DType::BF16, DType::F32] {
        let products = gpu::products(&device, &peaks, &sizes, dtype, 0.0).unwrap();
        let attention = gpu::attention(&device, &peaks, &sizes, dtype, 0.0).unwrap();
        let streaming = gpu::streaming(&device, &peaks, &sizes, dtype, 0.0).unwrap();
        let experts = gpu::experts(&device, &peaks, &sizes, dtype, 0.0).unwrap();
        assert_eq!(experts.len(), 6 * sizes.experts.len());
        assert_eq!((products.len(), attention.len()), (3 * sizes.layers.len(), 2 * sizes.attention.len()));
        for timing in products.iter().chain(&experts).chain(&attention).chain(&streaming) {
            assert!(timing.seconds > 0.0 && timing.peak_share > 0.0 && timing.peak_share.is_finite(), "{timing:?}");
            assert!(timing.bytes + timing.flops > 0.0, "{timing:?}");
        }
        let names: std::collections::BTreeSet<&str> = streaming.iter().map(|timing| timing.form).collect();
        assert_eq!(names.len(), streaming.len());
    }
    if tested.driver.properties().capability >= Product::FP8_CAPABILITY {
        let peak = trainyard_tensor::cuda::peak::fp8(device.as_cuda().unwrap()).unwrap();
        let timings = gpu::fp8(&device, &peaks, peak, &sizes, 0.0).unwrap();
        assert!(peak > 1e6 && peak.is_finite() && timings.len() == 5 * sizes.layers.len());
        assert!(timings.iter().all(|timing| timing.peak_share > 0.0 && timing.peak_share.is_finite()), "{timings:?}");
    }
    assert_eq!(tested.problems(), [""; 0]);
}
