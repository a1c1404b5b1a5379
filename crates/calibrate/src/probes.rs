//! The models that are trained to measure kernels: one block of many widths, on few and many
//! tokens, in both families and dtypes.
//!
//! A probe uses every core, by one rank with all of them or several ranks with a part each. Memory
//! and caches are then shared as in a real run. Probes of few tokens take two micro-batches; the
//! second adds its gradients to the first's.

use crate::collect::Collector;
use crate::probe_group::ProbeGroup;
use crate::ranks::{Ranks, resolve};
use crate::sample::Sampler;
use crate::{CalibrateError, sample};
use std::time::Instant;
use trainyard_engine::EngineError;
use trainyard_engine::bench::Timed;
use trainyard_engine::config::Inputs;
use trainyard_sim::machine::Speeds;
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::gemm::Rung;
use trainyard_tensor::ops::optim::{AdamW, OptimizerOperands, adamw8, moments8};
use trainyard_tensor::{Call, DType, Device, Purpose, TensorError, bf16, ops};

/// The number of ranks that share the machine, and the threads of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of threads of each.
    pub threads: u32,
}

impl Layout {
    /// The layouts to measure on `cores` cores: one rank, two, and four if there are cores for
    /// them.
    pub fn of(cores: u32) -> Vec<Layout> {
        let all = [1, 2, 4].into_iter().filter(|ranks| *ranks <= cores.max(1));
        all.map(|ranks| Layout { ranks, threads: cores / ranks }).collect()
    }
}

/// One measurement.
#[derive(Clone, PartialEq, Debug)]
pub enum Probe {
    /// Steps of a small model.
    Steps {
        /// Ranks and threads.
        layout: Layout,
        /// The model.
        model: Model,
    },
    /// Sums and casts of buffers with this many elements, the kernels of a reduction; and updates
    /// of as many parameters with moments of eight bits, which no probe's model has.
    Sums {
        /// Ranks and threads.
        layout: Layout,
        /// Number of elements.
        elements: usize,
    },
}

/// A small model and its batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Model {
    /// `gpt2` or `llama`.
    pub family: &'static str,
    /// `f32`, `bf16`, or `fp8` or `int8` for bf16 with the products of blocks in eight bits.
    pub dtype: &'static str,
    /// Width.
    pub dim: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Size of the vocabulary.
    pub vocab: u32,
    /// Number of sequences of a micro-batch.
    pub rows: u32,
    /// Number of tokens of each.
    pub length: u32,
    /// Number of micro-batches.
    pub accumulation: u32,
}

/// Widths of the models.
const DIMS: [u32; 5] = [64, 128, 256, 512, 1024];
/// Sequences and their lengths, by number of tokens.
const BATCHES: [[(u32, u32); 2]; 4] =
    [[(1, 64), (2, 32)], [(1, 256), (4, 64)], [(4, 256), (2, 512)], [(4, 1024), (16, 256)]];
/// Number of counted steps of a probe in a round: as many as fit into [`PROBE_S`], within this
/// range.
const STEPS: std::ops::RangeInclusive<u32> = 1..=6;
/// Seconds that the counted steps of a probe take in a round.
const PROBE_S: f64 = 0.12;

/// Every `every`th probe of a layout.
pub fn all(layout: Layout, every: usize) -> Vec<Probe> {
    let mut probes = Vec::new();
    for (wide, dim) in DIMS.into_iter().enumerate() {
        for (long, batches) in BATCHES.into_iter().enumerate() {
            for (number, dtype) in ["bf16", "f32"].into_iter().enumerate() {
                // The most expensive probes are reduced: in f32 the largest width runs on few
                // tokens only.
                if dtype == "f32" && dim == 1024 && long > 1 || dtype == "bf16" && dim == 1024 && long > 2 {
                    continue;
                }
                let family = if (wide + long + number) % 2 == 0 { "gpt2" } else { "llama" };
                let (rows, length) = batches[(wide + number) % 2];
                let head_dim = if dim <= 128 || (wide + long) % 3 == 0 { 32 } else { 64 };
                let vocab = [512, 2048, 8192][(wide + long + number) % 3];
                let accumulation = if long < 2 { 2 } else { 1 };
                let model = Model { family, dtype, dim, head_dim, vocab, rows, length, accumulation };
                probes.push(Probe::Steps { layout, model });
                // 8-bit products where they are faster; half of the probes tell their curve.
                if dtype == "bf16" && dim > 64 && (wide + long) % 2 == 0 && multiplies_int8() {
                    probes.push(Probe::Steps { layout, model: Model { dtype: "int8", ..model } });
                }
            }
        }
    }
    let sizes = (12..=23).step_by(if every > 1 { 4 } else { 1 });
    let sums: Vec<Probe> = sizes.map(|power| Probe::Sums { layout, elements: 1 << power }).collect();
    probes.into_iter().step_by(every).chain(sums).collect()
}

/// True if this processor has an instruction for products of 8-bit integers.
fn multiplies_int8() -> bool {
    Rung::choose(Isa::detect(), DType::U8).name_of_codes().is_some()
}

impl Model {
    /// The configuration keys of the model.
    pub(crate) fn sets(&self, threads: u32) -> Vec<String> {
        let Model { family, dtype, dim, head_dim, vocab, rows, length, accumulation } = *self;
        let (compute, fp8, int8) = match dtype {
            "fp8" => ("bf16", "hybrid", "off"),
            "int8" => ("bf16", "off", "switchback"),
            _ => (dtype, "off", "off"),
        };
        vec![
            format!("model.family='{family}'"),
            format!("model.dim={dim}"),
            "model.layers=1".to_owned(),
            format!("model.heads={}", dim / head_dim),
            format!("model.vocab_size={vocab}"),
            format!("model.max_sequence_length={length}"),
            format!("training.micro_batch_size={rows}"),
            format!("training.accumulation_steps={accumulation}"),
            "training.steps=1".to_owned(),
            format!("precision.compute='{compute}'"),
            format!("precision.fp8='{fp8}'"),
            format!("precision.int8='{int8}'"),
            format!("compute.threads={threads}"),
        ]
    }
}

impl Probe {
    /// Description of the probe.
    pub fn name(&self) -> String {
        match self {
            Probe::Steps { layout: Layout { ranks, threads }, model } => {
                let Model { family, dtype, dim, rows, length, .. } = model;
                format!("{ranks} x {threads} threads, {family} {dim} {dtype}, {rows} x {length} tokens")
            }
            Probe::Sums { layout: Layout { ranks, threads }, elements } => {
                format!("{ranks} x {threads} threads, sums of {elements}")
            }
        }
    }

    /// Runs the probe once to settle and then a few times to count, in turn with samples of the
    /// machine's speeds.
    pub(crate) fn run(
        &self,
        group: &ProbeGroup,
        sampler: &Sampler,
        collector: &mut Collector,
    ) -> Result<(), CalibrateError> {
        match self {
            Probe::Steps { layout, model } => {
                let failed = |source: EngineError| CalibrateError::Probe { probe: self.name(), source };
                steps(group, *layout, model, sampler, collector, &failed)
            }
            Probe::Sums { layout, elements } => sums(group, *layout, *elements, sampler, collector),
        }
    }
}

fn steps(
    group: &ProbeGroup,
    layout: Layout,
    model: &Model,
    sampler: &Sampler,
    collector: &mut Collector,
    failed: &dyn Fn(EngineError) -> CalibrateError,
) -> Result<(), CalibrateError> {
    let resolved = resolve(&model.sets(layout.threads), Inputs::of_this_machine()).map_err(failed)?;
    let mut ranks = Ranks::apart(&resolved, group.own(layout)).map_err(failed)?;
    ranks.step().map_err(failed)?;
    ranks.members().iter().for_each(|rank| rank.device.set_recording(true));
    let mut before = sampler.sample()?;
    let began = Instant::now();
    for step in 0..*STEPS.end() {
        if group.agree(step >= *STEPS.start() && began.elapsed().as_secs_f64() > PROBE_S)? {
            break;
        }
        group.meet()?;
        let timed: Vec<Timed> = ranks.step().map_err(failed)?;
        let after = sampler.sample()?;
        let speeds = sample::between(before, after);
        collector.sample(after);
        for (rank, timed) in ranks.members().iter().zip(&timed) {
            let calls: Vec<Call> = rank.device.take_calls();
            collector.calls(&calls, layout.ranks, layout.threads, speeds);
            collector.step(&rank.program, timed, &calls);
        }
        before = after;
    }
    Ok(())
}

fn sums(
    group: &ProbeGroup,
    layout: Layout,
    elements: usize,
    sampler: &Sampler,
    collector: &mut Collector,
) -> Result<(), CalibrateError> {
    let isa = Isa::detect();
    let devices: Vec<Device> =
        (0..group.own(layout)).map(|_| Device::cpu(isa, layout.threads as usize, None)).collect();
    let before = sampler.sample()?;
    group.meet()?;
    let results: Vec<Result<Vec<Call>, TensorError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = devices.iter().map(|device| scope.spawn(move || streams_on(device, elements))).collect();
        threads.into_iter().map(|thread| thread.join().expect("sums do not panic")).collect()
    });
    let speeds: Speeds = sample::between(before, sampler.sample()?);
    collector.sample(speeds);
    for calls in results {
        collector.calls(&calls?, layout.ranks, layout.threads, speeds);
    }
    Ok(())
}

fn streams_on(device: &Device, elements: usize) -> Result<Vec<Call>, TensorError> {
    let mut calls = sums_on(device, elements)?;
    calls.extend(updates8_on(device, elements)?);
    Ok(calls)
}

/// Runs updates with moments of eight bits, with and without a copy in bf16.
fn updates8_on(device: &Device, elements: usize) -> Result<Vec<Call>, TensorError> {
    let f32s = |elements: usize| device.zeros([elements], DType::F32, Purpose::Workspace);
    let (mut master, gradient) = (f32s(elements)?, f32s(elements)?);
    let (mut first, mut second) = (f32s(moments8::words(elements))?, f32s(moments8::words(elements))?);
    let mut copy = device.tensor([elements], &vec![bf16::ZERO; elements], Purpose::Workspace)?;
    let hyper = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, variance_steps: None };
    for step in 1..=3 {
        // The first step touches new memory.
        device.set_recording(step > 1);
        for has_copy in [false, true] {
            let copy = has_copy.then_some(&mut copy);
            let operands = OptimizerOperands { master: &mut master, gradient: &gradient, gradient_scale: 1.0, copy };
            adamw8(hyper, step, operands, &mut first, &mut second)?;
        }
    }
    Ok(device.take_calls())
}

/// Runs the kernels that a reduction uses on a gradient: adding, overwriting, and casts to bf16 and
/// back.
pub(crate) fn sums_on(device: &Device, elements: usize) -> Result<Vec<Call>, TensorError> {
    // Several buffers are used in turn, because a reduction does not find its last sum in its
    // caches.
    let f32s = || device.zeros([elements], DType::F32, Purpose::Workspace);
    let bf16s = || device.tensor([elements], &vec![bf16::ZERO; elements], Purpose::Workspace);
    let mut sets = Vec::new();
    for _ in 0..((12 << 20) / elements).clamp(2, 16) {
        sets.push((f32s()?, f32s()?, bf16s()?));
    }
    for round in 0..3 {
        // The first round touches new memory.
        if round == 1 {
            device.set_recording(true);
        }
        for (x, sum, rounded) in &mut sets {
            ops::accumulate(x, sum, round == 1)?;
            ops::cast_into(x, rounded)?;
        }
        for (_, sum, rounded) in &mut sets {
            ops::cast_into(rounded, sum)?;
        }
    }
    Ok(device.take_calls())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_probe_is_a_configuration_and_both_families_and_dtypes_come_at_every_width() {
        for layout in Layout::of(4) {
            let probes = all(layout, 1);
            for probe in &probes {
                if let Probe::Steps { model, .. } = probe {
                    let resolved = resolve(&model.sets(layout.threads), Inputs::of_this_machine()).unwrap();
                    assert_eq!(resolved.threads, layout.threads as usize, "{}", probe.name());
                    assert_eq!(resolved.batch.accumulation, model.accumulation as usize);
                }
            }
            let has = |dim, what: &str| {
                probes.iter().any(|probe| matches!(probe, Probe::Steps { model, .. } if model.dim == dim && (model.family == what || model.dtype == what)))
            };
            for dim in DIMS {
                assert!(["gpt2", "llama", "f32", "bf16"].iter().all(|what| has(dim, what)), "{dim}");
            }
            assert!(all(layout, 3).len() < probes.len() / 2);
        }
    }

    #[test]
    fn cores_are_shared_without_rest_where_that_is_possible() {
        let of = |cores| Layout::of(cores).iter().map(|l| (l.ranks, l.threads)).collect::<Vec<_>>();
        assert_eq!(of(1), [(1, 1)]);
        assert_eq!(of(2), [(1, 2), (2, 1)]);
        assert_eq!(of(64), [(1, 64), (2, 32), (4, 16)]);
    }

    #[test]
    fn a_probe_measures_every_kernel_of_its_step() {
        let group = ProbeGroup::alone();
        let sampler = Sampler::new(&group).unwrap();
        let mut collector = Collector::default();
        let layout = Layout { ranks: 2, threads: 1 };
        let model = Model {
            family: "llama",
            dtype: "bf16",
            dim: 32,
            head_dim: 16,
            vocab: 64,
            rows: 2,
            length: 8,
            accumulation: 2,
        };
        Probe::Steps { layout, model }.run(&group, &sampler, &mut collector).unwrap();
        Probe::Sums { layout, elements: 4096 }.run(&group, &sampler, &mut collector).unwrap();
        let curves = collector.curves();
        let has =
            |kernel: &str, dtype: &str| curves.iter().any(|c| (c.kernel.as_str(), c.dtype.as_str()) == (kernel, dtype));
        for kernel in [
            "linear",
            "linear residual",
            "linear_weight_gradient adding",
            "attention_backward",
            "rms_norm",
            "swiglu",
            "adamw",
        ] {
            assert!(has(kernel, "bf16"), "{kernel}");
        }
        assert!(has("adamw8", "f32") && has("adamw8", "bf16"));
        assert!(has("sum_of_squares", "f32") && has("accumulate overwriting", "f32") && has("cast bf16", "f32"));
        assert!(curves.iter().all(|curve| (curve.ranks, curve.threads) == (2, 1)));
        let int8 = Model { dtype: "int8", ..model };
        Probe::Steps { layout, model: int8 }.run(&group, &sampler, &mut collector).unwrap();
        for kernel in ["int8_encode", "int8_encode transposed", "linear_int8 residual", "linear_int8_input_gradient"] {
            assert!(collector.curves().iter().any(|curve| curve.kernel == kernel), "{kernel}");
        }
        let overheads = collector.overheads();
        assert!(overheads.launch_s >= 0.0 && overheads.step_s > 0.0, "{overheads:?}");
    }
}
