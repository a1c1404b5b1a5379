//! Measures a GPU into a profile of the same format.
//!
//! As on a processor, small models are trained and every kernel call is recorded, here by the
//! device's clock. Each model runs two kinds of steps. In one nothing is recorded, and its
//! instructions show the cost of launching. In the other the host waits for every kernel, which
//! gives the kernels' own times. Each rank has a GPU to itself, so there is only one layout.

use crate::check::{Case, Pair, Row};
use crate::collect::Collector;
use crate::forecast::forecast;
use crate::probes::{Model, sums_on};
use crate::ranks::resolve;
use crate::{CalibrateError, disk, gpu_exchange, sample, utc};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;
use trainyard_base::median;
use trainyard_comm::Communicator;
use trainyard_engine::EngineError;
use trainyard_engine::bench::Stepper;
use trainyard_engine::config::Inputs;
use trainyard_sim::MachineProfile;
use trainyard_sim::machine::{Disk, FORMAT, Gpu, Interference, Machine, Processes, Speeds, Transfers};
use trainyard_tensor::bench::gpu::time;
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cuda::driver::Product;
use trainyard_tensor::cuda::peak::random;
use trainyard_tensor::cuda::{Cuda, link};
use trainyard_tensor::ops::optim::{AdamW, OptimizerOperands, adamw};
use trainyard_tensor::{DType, Device, Purpose, Tensor, TensorError, ops};

/// The sizes to measure.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Widths of the models.
    dims: Vec<u32>,
    /// Number of sequences of a micro-batch, and tokens of each.
    batches: Vec<(u32, u32)>,
    /// Rows of the embedding. Models take them in turn.
    vocabularies: Vec<u32>,
    /// Widths of a head. Models take them in turn.
    head_dims: Vec<u32>,
    /// Exponents of two: numbers of elements that are summed and cast.
    sums: std::ops::Range<u32>,
    /// Exponents of two: bytes that GPUs exchange.
    exchanges: std::ops::Range<u32>,
    /// Side of the reference product, and bytes of the reference copy.
    reference: (usize, usize),
    /// Number of rounds over all models.
    rounds: u32,
}

impl Sizes {
    /// The sizes of `trainyard calibrate --device cuda`.
    pub fn of_a_gpu() -> Sizes {
        Sizes {
            dims: vec![768, 1024, 2048, 4096],
            batches: vec![(8, 512), (16, 1024), (4, 4096), (2, 8192)],
            vocabularies: vec![16_384, 50_304, 128_256],
            head_dims: vec![64, 128],
            sums: 14..28,
            exchanges: 10..30,
            reference: (4096, 256 << 20),
            rounds: 3,
        }
    }

    /// A part of the sizes, in one round.
    pub fn quick() -> Sizes {
        Sizes { dims: vec![1024, 4096], batches: vec![(8, 512), (4, 4096)], rounds: 1, ..Sizes::of_a_gpu() }
    }

    /// Tiny sizes, to test the measuring itself on an emulated GPU.
    pub fn tiny() -> Sizes {
        Sizes {
            dims: vec![32],
            // Two batches, so that both families appear in bf16.
            batches: vec![(2, 8), (4, 8)],
            vocabularies: vec![64],
            head_dims: vec![16],
            sums: 8..10,
            exchanges: 10..13,
            reference: (64, 1 << 16),
            rounds: 1,
        }
    }

    /// Twelve configurations, or fewer if fewer sizes are measured: both families, half as wide
    /// again as the probes and two blocks deep, with every mode of recomputation, with and without
    /// accumulation.
    fn cases(&self) -> Vec<Case> {
        let modes = ["none", "selective", "full"];
        let mut cases = Vec::new();
        for (wide, dim) in self.dims.iter().enumerate() {
            for (turn, mode) in modes.into_iter().enumerate() {
                let (rows, length) = self.batches[(wide + turn) % self.batches.len()];
                let head_dim = self.head_dims[(wide + turn) % self.head_dims.len()];
                let model = Model {
                    family: if (wide + turn) % 2 == 0 { "gpt2" } else { "llama" },
                    dtype: "bf16",
                    dim: dim + dim / 2,
                    head_dim: if (dim + dim / 2).is_multiple_of(head_dim) { head_dim } else { dim / 2 },
                    vocab: self.vocabularies[turn % self.vocabularies.len()],
                    rows,
                    length,
                    accumulation: 1 + turn as u32 % 2,
                };
                let mut sets = model.sets(1);
                sets.retain(|set| !set.starts_with("model.layers="));
                sets.extend(["model.layers=2", "compute.device='cuda'"].map(str::to_owned));
                sets.push(format!("activation_checkpointing.mode='{mode}'"));
                let Model { family, dim, accumulation, .. } = model;
                let name = format!("{family} {dim}x2 bf16 {rows}x{length}x{accumulation} keep {mode}");
                cases.push(Case { name, sets, ranks: 1 });
            }
        }
        cases
    }

    fn models(&self, has_fp8: bool) -> Vec<Model> {
        let mut models = Vec::new();
        for (wide, dim) in self.dims.iter().enumerate() {
            for (long, (rows, length)) in self.batches.iter().enumerate() {
                for (number, dtype) in ["bf16", "f32", "fp8"].into_iter().enumerate() {
                    // In f32 only the shorter half of the batches: nobody trains the others in f32.
                    if dtype == "f32" && 2 * long >= self.batches.len().max(2) || dtype == "fp8" && !has_fp8 {
                        continue;
                    }
                    let turn = wide + long + number;
                    models.push(Model {
                        family: if turn % 2 == 0 { "gpt2" } else { "llama" },
                        dtype,
                        dim: *dim,
                        head_dim: self.head_dims[turn % self.head_dims.len()],
                        vocab: self.vocabularies[turn % self.vocabularies.len()],
                        rows: *rows,
                        length: *length,
                        accumulation: 2,
                    });
                }
            }
        }
        models
    }
}

/// Note for readers of the file on how collectives were measured.
const BY_NCCL: &str = "collectives are NCCL's, on buffers that nobody has just written";

/// Measures the first of `gpus`, which must be the GPUs of this host and of one kind; the
/// collectives between them over NCCL, if there are several; and the host's disk in `folder`. Calls
/// `progress` with the fraction that is done and a description of the next part.
///
/// # Errors
///
/// Any failure of the engine, the driver, NCCL or the disk.
///
/// # Panics
///
/// If `gpus` is empty.
pub fn calibrate(
    gpus: &[Arc<Cuda>],
    sizes: &Sizes,
    folder: &Path,
    progress: &mut dyn FnMut(f64, &str),
) -> Result<MachineProfile, CalibrateError> {
    progress(0.0, "disk");
    let (profile, exchanged) = one(&gpus[0], sizes, disk_in(folder)?, progress)?;
    let (collectives, how) = match (gpus.len(), gpus[0].driver().nccl()) {
        (1, _) => (Vec::new(), "there is one GPU, so nothing between GPUs is measured".to_owned()),
        (_, Err(error)) => (Vec::new(), format!("nothing between GPUs is measured, for want of NCCL: {error}")),
        (_, Ok(_)) => (gpu_exchange::collectives(gpus, &exchanged)?, BY_NCCL.to_owned()),
    };
    let gpu = profile.machine.gpu.map(|gpu| Gpu { count: gpus.len() as u32, ..gpu });
    let method = format!("{}; {how}", profile.method);
    Ok(MachineProfile { method, machine: Machine { gpu, ..profile.machine }, collectives, ..profile })
}

/// Does the same with the GPUs of all processes of `world`, which lie on hosts as `processes` says.
/// Every process measures its own GPU, `cuda`, at the same time, and rank 0's results stand for
/// all. Collectives are measured between neighbours, between all, and between the ranks with the
/// same index on every host. Only rank 0's profile is to be used.
///
/// # Errors
///
/// As [`calibrate`], and a missing NCCL.
pub fn calibrate_together(
    world: &Communicator,
    processes: &Processes,
    cuda: &Arc<Cuda>,
    sizes: &Sizes,
    folder: &Path,
    progress: &mut dyn FnMut(f64, &str),
) -> Result<MachineProfile, CalibrateError> {
    progress(0.0, "disk");
    // One process at a time: ranks share the disk, and predictions divide it among them.
    let own = if world.rank() == 0 { Some(disk_in(folder)?) } else { None };
    let mut disk = own.map_or([0.0; 2], |disk| [disk.write_bytes_per_s, disk.read_bytes_per_s]);
    world.broadcast(&mut disk, 0)?;
    let disk = Disk { write_bytes_per_s: disk[0], read_bytes_per_s: disk[1] };
    let (profile, exchanged) = one(cuda, sizes, disk, progress)?;
    // The faster processes wait here and not in NCCL.
    world.barrier()?;
    let collectives = gpu_exchange::among(world, processes, cuda, &exchanged)?;
    let processes = Some(Processes { backend: "nccl".to_owned(), ..processes.clone() });
    let method = format!("{}, each process on its own GPU while the others are on theirs; {BY_NCCL}", profile.method);
    Ok(MachineProfile { method, machine: Machine { processes, ..profile.machine }, collectives, ..profile })
}

fn disk_in(folder: &Path) -> Result<Disk, CalibrateError> {
    disk::measure(folder).map_err(|source| CalibrateError::Disk { folder: folder.display().to_string(), source })
}

/// Measures one GPU by itself, for a host with `disk` and collectives on the given numbers of
/// bytes.
fn one(
    cuda: &Arc<Cuda>,
    sizes: &Sizes,
    disk: Disk,
    progress: &mut dyn FnMut(f64, &str),
) -> Result<(MachineProfile, Vec<usize>), CalibrateError> {
    progress(0.0, "speeds");
    // As in a run that leaves the choice open. The models compute in bf16 or in f32.
    cuda.choose_attention(DType::BF16, None)?;
    let sampler = Sampler::new(cuda, sizes)?;
    let mut collector = Collector::default();
    let models = sizes.models(cuda.properties().capability >= Product::FP8_CAPABILITY);
    for round in 0..sizes.rounds {
        for at in 0..models.len() {
            // Every other round goes backwards, as on the processor.
            let model = &models[if round % 2 == 0 { at } else { models.len() - 1 - at }];
            let done = (round as usize * models.len() + at) as f64 / (sizes.rounds as usize * models.len()) as f64;
            let Model { family, dim, dtype, rows, length, .. } = model;
            let name = format!("{family} {dim} {dtype}, {rows} x {length} tokens");
            progress(0.85 * done, &format!("round {} of {}: {name}", round + 1, sizes.rounds));
            steps(cuda, model, &sampler, &mut collector)
                .map_err(|source| CalibrateError::Probe { probe: name, source })?;
        }
    }
    progress(0.85, "sums and casts");
    for power in sizes.sums.clone() {
        let before = sampler.sample()?;
        let calls = sums_on(&Device::cuda(Arc::clone(cuda), None), 1 << power)?;
        let speeds = sample::between(before, sampler.sample()?);
        collector.calls(&calls, 1, 1, speeds);
    }
    progress(0.95, "copies between host and GPU");
    let (side, bytes) = sizes.reference;
    let found = link::measure(cuda, bytes, side)?;
    progress(0.97, "collectives between GPUs");
    let exchanged = sizes.exchanges.clone().step_by(2).map(|power| 1 << power).collect();
    let properties = cuda.properties();
    let gpu = Gpu {
        name: properties.name.clone(),
        architecture: properties.architecture(),
        multiprocessors: properties.multiprocessors,
        memory_bytes: properties.memory as u64,
        count: 1,
    };
    let profile = MachineProfile {
        format: FORMAT,
        measured: utc(SystemTime::now()),
        method: format!(
            "by the GPU's clock, medians of {} rounds over {} models; interference is that of products and copies to the GPU",
            sizes.rounds,
            models.len()
        ),
        machine: Machine { gpu: Some(gpu), ..Machine::here() },
        speeds: Speeds::median(collector.speeds()).expect("every probe samples the speeds"),
        overheads: collector.overheads(),
        interference: Interference { compute: found.compute_slowed, communication: found.copies_slowed, start_s: 0.0 },
        disk,
        transfers: Some(Transfers {
            to_device_bytes_per_s: found.to_device_bytes_per_s,
            to_host_bytes_per_s: found.to_host_bytes_per_s,
            host_update_bytes_per_s: host_update(bytes)?,
        }),
        collectives: Vec::new(),
        kernels: collector.curves(),
    };
    Ok((profile, exchanged))
}

/// Bytes per second of an AdamW update on the host, with all its cores, on tensors of `bytes`.
fn host_update(bytes: usize) -> Result<f64, TensorError> {
    let host = Device::cpu(Isa::detect(), Inputs::of_this_machine().cores, None);
    let f32s = |purpose| host.zeros([bytes / 4], DType::F32, purpose);
    let (mut master, gradient) = (f32s(Purpose::Params)?, f32s(Purpose::Grads)?);
    let (mut first, mut second) = (f32s(Purpose::Optimizer)?, f32s(Purpose::Optimizer)?);
    let mut copy = host.empty([bytes / 4], DType::BF16, Purpose::Params)?;
    let hyper = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, variance_steps: None };
    host.set_recording(true);
    for step in 1..=5 {
        let operands =
            OptimizerOperands { master: &mut master, gradient: &gradient, gradient_scale: 1.0, copy: Some(&mut copy) };
        adamw(hyper, step, operands, &mut first, &mut second)?;
    }
    // The first call wakes threads and touches memory.
    let calls = host.take_calls().into_iter().skip(1);
    Ok(median(calls.map(|call| call.work.cost.bytes as f64 / call.seconds)).expect("four are left"))
}

/// Number of steps of a configuration that count. The result is their median.
const STEPS: usize = 5;

/// Trains configurations that differ from the probes of `sizes` (wider, longer or deeper) on the
/// GPU behind `cuda`, and compares steps and memory with the predictions of `profile`. Calls
/// `progress` with the fraction that is done and a description of the next part.
///
/// # Errors
///
/// A configuration that cannot be trained.
pub fn check(
    cuda: &Arc<Cuda>,
    profile: &MachineProfile,
    sizes: &Sizes,
    progress: &mut dyn FnMut(f64, &str),
) -> Result<Vec<Row>, CalibrateError> {
    cuda.choose_attention(DType::BF16, None)?;
    let cases = sizes.cases();
    let mut rows = Vec::with_capacity(cases.len());
    for (number, case) in cases.iter().enumerate() {
        progress(number as f64 / cases.len() as f64, &case.name);
        let failed = |source: EngineError| CalibrateError::Probe { probe: case.name.clone(), source };
        rows.push(row(cuda, case, profile).map_err(failed)?);
    }
    Ok(rows)
}

fn row(cuda: &Arc<Cuda>, case: &Case, profile: &MachineProfile) -> Result<Row, EngineError> {
    let resolved = resolve(&case.sets, Inputs::of_this_machine())?;
    let forecast = forecast(&resolved, &profile.machine)?;
    let predicted = forecast.step(profile, &profile.speeds);
    let device = Device::cuda(Arc::clone(cuda), None);
    let mut stepper = Stepper::on(&device, &resolved, None)?;
    // The first step compiles, searches and allocates; the second one settles.
    for _ in 0..2 {
        stepper.step()?;
    }
    let steps = (0..STEPS).map(|_| Ok(stepper.step()?.seconds)).collect::<Result<Vec<f64>, EngineError>>()?;
    let usage = device.pool().usage();
    let needs = &forecast.first().1.memory;
    let pair = |measured: usize, predicted: usize| Pair { measured: measured as f64, predicted: predicted as f64 };
    let memory = Purpose::ALL.map(|purpose| (purpose.name(), pair(usage.peak(purpose), needs.peak(purpose))));
    Ok(Row {
        name: case.name.clone(),
        step_s: Pair { measured: median(steps).unwrap_or(f64::NAN), predicted: predicted.simulated.step_s },
        memory: memory.into_iter().filter(|(_, pair)| pair.measured + pair.predicted > 0.0).collect(),
        memory_total: pair(usage.peak_total(), needs.peak_total()),
        instructions: Default::default(),
        kernels: Default::default(),
        unpriced: predicted.unpriced.into_keys().collect(),
    })
}

/// Runs one model: a step to settle, one with timed instructions, and one with timed kernels.
fn steps(cuda: &Arc<Cuda>, model: &Model, sampler: &Sampler, collector: &mut Collector) -> Result<(), EngineError> {
    let mut sets = model.sets(1);
    sets.push("compute.device='cuda'".to_owned());
    let resolved = resolve(&sets, Inputs::of_this_machine())?;
    // The device's memory is freed together with the device.
    let device = Device::cuda(Arc::clone(cuda), None);
    let mut stepper = Stepper::on(&device, &resolved, None)?;
    // In fp8 the first step computes in bf16.
    stepper.step()?;
    let before = sampler.sample()?;
    let timed = stepper.step()?;
    device.set_recording(true);
    let recorded = stepper.step();
    let calls = device.take_calls();
    device.set_recording(false);
    recorded?;
    let after = sampler.sample()?;
    collector.sample(after);
    collector.calls(&calls, 1, 1, sample::between(before, after));
    collector.step(stepper.program(), &timed, &calls);
    Ok(())
}

/// Samples the GPU's speeds, by its own clock: a product of middling size and a copy.
struct Sampler {
    device: Device,
    /// Operands in bf16 and in f32.
    operands: [[Tensor; 2]; 2],
    from: Tensor,
}

impl Sampler {
    fn new(cuda: &Arc<Cuda>, sizes: &Sizes) -> Result<Sampler, TensorError> {
        let device = Device::cuda(Arc::clone(cuda), None);
        let (side, bytes) = sizes.reference;
        let matrix = |dtype, seed| random(&device, &[side, side], dtype, seed);
        let pair = |dtype| -> Result<[Tensor; 2], TensorError> { Ok([matrix(dtype, 1)?, matrix(dtype, 2)?]) };
        let operands = [pair(DType::BF16)?, pair(DType::F32)?];
        let from = random(&device, &[bytes / 4], DType::F32, 3)?;
        Ok(Sampler { device, operands, from })
    }

    fn sample(&self) -> Result<Speeds, TensorError> {
        let product = |[x, w]: &[Tensor; 2]| -> Result<f64, TensorError> {
            let seconds = time(&self.device, 0.0, || ops::linear_input_gradient(x, w).map(drop))?;
            Ok(2.0 * (x.rows() as f64).powi(3) / seconds)
        };
        let (bf16_flops, f32_flops) = (product(&self.operands[0])?, product(&self.operands[1])?);
        let mut to = self.device.empty([self.from.elements()], DType::F32, Purpose::Workspace)?;
        let copy_s = time(&self.device, 0.0, || to.copy_from(&self.from))?;
        Ok(Speeds { f32_flops, bf16_flops, copy_bytes_per_s: 2.0 * self.from.bytes() as f64 / copy_s })
    }
}
