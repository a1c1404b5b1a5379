//! Kernels that stream: bound by memory, so in percent of a copy.

use super::{Result, Sizes, Timing, near, time, tolerance};
use crate::cpu::Isa;
use crate::cpu::gemm::Activation;
use crate::cpu::philox::RandomKey;
use crate::cpu::rope::{RopeScaling, RopeTable, Rotation};
use crate::cuda::peak::{Peaks, random};
use crate::error::Result as TensorResult;
use crate::ops::optim::{self, AdamW, OptimizerOperands};
use crate::ops::{self, HeadLayout, plain};
use crate::{DType, Device, Purpose, Tensor};
use std::collections::BTreeMap;

/// Operands by name, made at their first use; the same numbers on every device.
struct Operands<'d> {
    device: &'d Device,
    dtype: DType,
    sizes: &'d Sizes,
    made: BTreeMap<&'static str, Tensor>,
    /// Kept, because a GPU keeps its copy with it.
    angles: &'d RopeTable,
}

/// Positions of the rotary table.
const POSITIONS: usize = 64;

impl Operands<'_> {
    fn of(&mut self, name: &'static str, dtype: DType, shape: &[usize]) -> TensorResult<Tensor> {
        if let Some(tensor) = self.made.get(name) {
            return Ok(tensor.clone());
        }
        // The name is the seed.
        let seed = name.bytes().fold(7, |seed, byte| 31 * seed + u64::from(byte)) % 1009;
        let tensor = random(self.device, shape, dtype, seed)?;
        self.made.insert(name, tensor.clone());
        Ok(tensor)
    }

    /// Activations: rows of the residual stream, `times` as wide.
    fn rows(&mut self, name: &'static str, times: usize) -> TensorResult<Tensor> {
        let [rows, dim] = self.sizes.rows;
        self.of(name, self.dtype, &[rows, times * dim])
    }

    fn weight(&mut self, name: &'static str) -> TensorResult<Tensor> {
        self.of(name, self.dtype, &[self.sizes.rows[1]])
    }

    /// One to be changed, which [`Operands::keep`] takes back.
    fn own(&mut self, name: &'static str, dtype: DType, shape: &[usize]) -> TensorResult<Tensor> {
        let tensor = self.of(name, dtype, shape)?;
        self.made.remove(name);
        Ok(tensor)
    }

    fn keep(&mut self, name: &'static str, tensor: Tensor) {
        self.made.insert(name, tensor);
    }

    /// One token of the vocabulary a row, or a position.
    fn indices(&mut self, name: &'static str, below: usize) -> TensorResult<Tensor> {
        if let Some(tensor) = self.made.get(name) {
            return Ok(tensor.clone());
        }
        let rows = self.sizes.rows[0];
        let values: Vec<i32> = (0..rows).map(|row| (row * 7919 % below) as i32).collect();
        let tensor = self.device.tensor([rows], &values, Purpose::Workspace)?;
        self.made.insert(name, tensor.clone());
        Ok(tensor)
    }
}

type Case = fn(&mut Operands<'_>) -> TensorResult<Vec<Tensor>>;

/// The kernels that training calls, by the names of `scripts/peers/torch_gpu.py`.
const CASES: [(&str, Case); 17] = [
    ("rms_norm", |o| Ok(vec![ops::rms_norm(&o.rows("x", 1)?, &o.weight("w")?, 1e-5)?.0])),
    ("rms_norm_backward", |o| {
        let (x, w, dy) = (o.rows("x", 1)?, o.weight("w")?, o.rows("dy", 1)?);
        let [rows, dim] = o.sizes.rows;
        let (inverse, mut dw) = (o.of("inverse", DType::F32, &[rows])?, o.own("dw", DType::F32, &[dim])?);
        let dx = ops::rms_norm_backward(&dy, &x, &w, &inverse, None, Some((&mut dw, true)))?;
        o.keep("dw", dw.clone());
        Ok(vec![dx, dw])
    }),
    ("layer_norm", |o| {
        let (x, w, b) = (o.rows("x", 1)?, o.weight("w")?, o.weight("b")?);
        Ok(vec![ops::layer_norm(&x, &w, Some(&b), 1e-5)?.0])
    }),
    ("layer_norm_backward", |o| {
        let (x, w, dy) = (o.rows("x", 1)?, o.weight("w")?, o.rows("dy", 1)?);
        let [rows, dim] = o.sizes.rows;
        let (mean, inverse) = (o.of("mean", DType::F32, &[rows])?, o.of("inverse", DType::F32, &[rows])?);
        let (mut dw, mut db) = (o.own("dw", DType::F32, &[dim])?, o.own("db", DType::F32, &[dim])?);
        let slots = (Some((&mut dw, true)), Some((&mut db, true)));
        let dx = ops::layer_norm_backward(&dy, &x, &w, &mean, &inverse, None, slots.0, slots.1)?;
        o.keep("dw", dw.clone());
        o.keep("db", db.clone());
        Ok(vec![dx, dw, db])
    }),
    ("swiglu", |o| Ok(vec![ops::swiglu(&o.rows("gate_up", 4)?)?])),
    ("swiglu_backward", |o| Ok(vec![ops::swiglu_backward(&o.rows("gate_up", 4)?, &o.rows("dh", 2)?)?])),
    ("gelu", |o| Ok(vec![ops::activate(Activation::GeluTanh, &o.rows("gate_up", 4)?)?])),
    ("gelu_backward", |o| {
        let (rows, width) = (o.sizes.rows[0], 4 * o.sizes.rows[1]);
        // It works in place of the gradient, which shrinks a little each time.
        let dy = o.own("dy4", o.dtype, &[rows, width])?;
        let dx = ops::activation_backward(Activation::GeluTanh, &o.rows("gate_up", 4)?, dy)?;
        o.keep("dy4", dx.clone());
        Ok(vec![dx])
    }),
    ("add", |o| Ok(vec![ops::add(&o.rows("x", 1)?, &o.rows("dy", 1)?)?])),
    ("dropout_add", |o| {
        let key = RandomKey { seed: 9, step: 1, site: 2 };
        Ok(vec![plain::dropout_add(&o.rows("x", 1)?, &o.rows("dy", 1)?, 0.1, key)?])
    }),
    ("rope", |o| {
        let [rows, dim] = o.sizes.rows;
        let head_dim = dim.min(128);
        let layout = HeadLayout { heads: dim / head_dim, kv_heads: dim / head_dim, head_dim };
        let positions = o.indices("positions", POSITIONS)?;
        let qkv = o.own("qkv", o.dtype, &[rows, 3 * dim])?;
        let qkv = ops::rope(qkv, layout, o.angles, &positions, Rotation::Forward)?;
        o.keep("qkv", qkv.clone());
        Ok(vec![qkv])
    }),
    ("embedding", |o| {
        let (vocabulary, dim) = (o.sizes.vocabulary, o.sizes.rows[1]);
        let table = o.of("table", o.dtype, &[vocabulary, dim])?;
        Ok(vec![ops::embedding(&o.indices("tokens", vocabulary)?, &table, None)?])
    }),
    ("embedding_backward", |o| {
        let (vocabulary, dim) = (o.sizes.vocabulary, o.sizes.rows[1]);
        let (tokens, dy) = (o.indices("tokens", vocabulary)?, o.rows("dy", 1)?);
        let mut gradient = o.own("dtable", DType::F32, &[vocabulary, dim])?;
        ops::embedding_backward(&dy, &tokens, &mut gradient, true)?;
        o.keep("dtable", gradient.clone());
        Ok(vec![gradient])
    }),
    ("cast", |o| {
        let [rows, dim] = o.sizes.rows;
        Ok(vec![ops::cast(&o.of("wide", DType::F32, &[rows, dim])?, o.dtype)?])
    }),
    ("accumulate", |o| {
        let [rows, dim] = o.sizes.rows;
        let mut sum = o.own("sum", DType::F32, &[rows, dim])?;
        ops::accumulate(&o.rows("x", 1)?, &mut sum, true)?;
        o.keep("sum", sum.clone());
        Ok(vec![sum])
    }),
    ("adamw", |o| {
        let shape = [o.sizes.parameters];
        let gradient = o.of("gradient", DType::F32, &shape)?;
        let (mut master, mut copy) = (o.own("master", DType::F32, &shape)?, o.own("copy", o.dtype, &shape)?);
        let (mut first, mut second) = match (o.made.remove("first"), o.made.remove("second")) {
            (Some(first), Some(second)) => (first, second),
            _ => {
                let zeros = || o.device.zeros(shape, DType::F32, Purpose::Workspace);
                (zeros()?, zeros()?)
            }
        };
        let hyper = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, variance_steps: None };
        let copied = (o.dtype != DType::F32).then_some(&mut copy);
        let operands =
            OptimizerOperands { master: &mut master, gradient: &gradient, gradient_scale: 1.0, copy: copied };
        optim::adamw(hyper, 1, operands, &mut first, &mut second)?;
        let results = vec![master.clone(), first.clone(), second.clone()];
        for (name, tensor) in [("master", master), ("copy", copy), ("first", first), ("second", second)] {
            o.keep(name, tensor);
        }
        Ok(results)
    }),
    ("softmax", |o| Ok(vec![plain::softmax(&o.rows("x", 1)?)?])),
];

/// Times every streaming kernel on operands of `dtype`, each for about `seconds`, after comparing
/// its results with the CPU's.
///
/// # Errors
/// Results that are wrong, and those of the device.
pub fn streaming(device: &Device, peaks: &Peaks, sizes: &Sizes, dtype: DType, seconds: f64) -> Result<Vec<Timing>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = Device::cpu(Isa::detect(), threads, None);
    let mut timings = Vec::new();
    let angles = RopeTable::new(sizes.rows[1].min(128), 10_000.0, RopeScaling::None, POSITIONS);
    let angles = angles.expect("an even number of columns");
    for (form, case) in CASES {
        let operands = |device| Operands { device, dtype, sizes, made: BTreeMap::new(), angles: &angles };
        let (mut ours, mut theirs) = (operands(device), operands(&cpu));
        let (found, wanted) = (case(&mut ours)?, case(&mut theirs)?);
        for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            // A bf16 result is as good as its rounding; sums over all rows are in f32.
            let allowed = tolerance(found.dtype()).max(tolerance(dtype) / 16.0);
            let (found, wanted) = (found.to_f32_vec()?, wanted.to_f32_vec()?);
            near(|| format!("result {at} of {form} in {dtype}"), &found, &wanted, allowed)?;
        }
        drop((found, wanted, theirs));
        device.set_recording(true);
        let recorded = case(&mut ours).map(drop);
        let calls = device.take_calls();
        device.set_recording(false);
        recorded?;
        let bytes: u64 = calls.iter().map(|call| call.work.cost.bytes).sum();
        let took = time(device, seconds, || case(&mut ours).map(drop))?;
        let [rows, columns] = sizes.rows;
        timings.push(Timing {
            name: format!("{form}, {}", dtype.name()),
            kind: "streaming",
            form,
            dtype,
            sizes: vec![
                ("rows", rows),
                ("columns", columns),
                ("vocabulary", sizes.vocabulary),
                ("parameters", sizes.parameters),
            ],
            flops: 0.0,
            bytes: bytes as f64,
            seconds: took,
            peak_share: bytes as f64 / took / peaks.copy_bytes_per_s,
        });
    }
    Ok(timings)
}
