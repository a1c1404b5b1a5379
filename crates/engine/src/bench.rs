//! Benchmark of a training step on random tokens: its speed in percent of the measured peak, and
//! its memory beside the prediction.
//!
//! The step is the one that training runs: the same lowering, lanes and optimizer. Random tokens
//! stand in for text, because the cost of a step does not depend on it. The time to the first step
//! excludes the measurement of the peak. A utilisation above one is an error. Kernels are timed one
//! by one in an additional step, which is not among the timed ones.

use crate::Result;
use crate::collectives;
use crate::config::Resolved;
use crate::lanes::Span;
use crate::limit;
use crate::links::Links;
use crate::metrics::Throughput;
use crate::peaks::Peaks;
use crate::precision::LossScaler;
use crate::predict::{StepNeeds, predict};
use crate::rank::{Launches, Pace, Rank, RankSettings, StepSettings};
use crate::session;
use crate::shape::{self, compute_dtype, model_spec};
use crate::state::{Holding, does_not_fit};
use crate::world;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use trainyard_base::median;
use trainyard_comm::Communicator;
use trainyard_data::rng::Stream;
use trainyard_model::{BatchSlices, IGNORED, Model};
use trainyard_program::{Fragment, Program, StepKind, Strategy};
use trainyard_tensor::{Device, Purpose};

/// Untimed steps after the first, in which caches, huge pages and the pool's sizes settle.
const WARMUP_STEPS: u64 = 1;

/// The measurements of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// Parameters of the model.
    pub parameters: u64,
    /// Tokens of a step.
    pub tokens: u64,
    /// Number format of matrix products.
    pub dtype: &'static str,
    /// The rung of the kernel ladder, or the architecture of a GPU.
    pub isa: String,
    /// Ranks.
    pub ranks: usize,
    /// Threads of the kernels of each rank.
    pub threads: usize,
    /// Timed steps.
    pub steps: u64,
    /// Median seconds of a step.
    pub step_s: f64,
    /// Tokens per second of the median step.
    pub tokens_per_s: f64,
    /// Model TFLOP/s of the median step: 6 per parameter in a product, 12 per pair of attention;
    /// recomputation does not count.
    pub tflops: f64,
    /// `tflops` as a share of the peak; none if the step was faster than it, because the machine
    /// was busy while the peak was measured.
    pub mfu: Option<f64>,
    /// The measured peak for this dtype.
    pub peak_tflops: f64,
    /// Seconds from the start of the process to the end of the first step.
    pub first_step_s: f64,
    /// Processor seconds of the operating system until then, over all threads, mostly spent on
    /// allocating memory; 0 if it does not say.
    pub first_step_system_s: f64,
    /// Median seconds of a step in which computing waited for its batch.
    pub data_wait_s: f64,
    /// The peak resident memory of the process, as the operating system counts it; 0 if it does not
    /// say.
    pub peak_rss_bytes: u64,
    /// True if the forwards and backwards of every timed step were replayed as a CUDA graph.
    pub replayed: bool,
    /// The last step's loss. On random tokens it must be near the logarithm of the vocabulary's
    /// size.
    pub loss: f64,
    /// Measured peak bytes, over all purposes.
    pub mem_peak_bytes: u64,
    /// Predicted peak bytes, over all purposes.
    pub mem_predicted_bytes: u64,
    /// Measured peak bytes of offloaded state in the host's memory beside a GPU; 0 without any.
    pub host_peak_bytes: u64,
    /// The prediction of `host_peak_bytes`.
    pub host_predicted_bytes: u64,
    /// Bytes of offloaded state on disk; 0 without any.
    pub disk_bytes: u64,
    /// The most bytes that the pool held at once: in use or kept for reuse.
    pub mem_reserved_bytes: u64,
    /// Peak bytes per purpose.
    pub memory: Vec<PurposeMemory>,
    /// Kernels of one step, the most expensive first.
    pub kernels: Vec<KernelTime>,
}

/// The memory of one purpose.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PurposeMemory {
    /// The purpose.
    pub purpose: &'static str,
    /// Measured peak bytes.
    pub measured: u64,
    /// Peak bytes predicted by the meta device.
    pub predicted: u64,
}

impl PurposeMemory {
    /// Relative error: (measured - predicted) / predicted. Infinite if nothing was predicted.
    pub fn error(&self) -> f64 {
        (self.measured as f64 - self.predicted as f64) / self.predicted as f64
    }
}

/// The time of one kernel in one step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct KernelTime {
    /// Name of the kernel.
    pub name: &'static str,
    /// Launches.
    pub calls: u64,
    /// Summed seconds.
    pub seconds: f64,
    /// 10^9 floating-point operations a second.
    pub gflops: f64,
    /// 10^9 bytes a second, read and written.
    pub gbytes: f64,
}

/// Runs the benchmark of `resolved` on its device: the first step, one warm-up step, `steps` timed
/// steps and one profiled step. Several ranks are threads of this process; the report is that of
/// rank 0, with the peak of all ranks together.
///
/// # Errors
///
/// A model that does not fit, and a utilisation above one.
pub fn steps(resolved: &Resolved, steps: u64, process_start: Instant) -> Result<StepReport> {
    if resolved.parallel.ranks == 1 {
        return steps_on(&crate::device::open(resolved, None, None)?, resolved, steps, process_start);
    }
    world::on_threads(resolved.parallel.ranks, |world| {
        let device = crate::device::open(resolved, Some(&world), None)?;
        steps_of_rank(&device, resolved, steps, process_start, Some(&world))
    })
}

/// As [`steps`], on an open device.
///
/// # Errors
///
/// As [`steps`].
pub fn steps_on(device: &Device, resolved: &Resolved, steps: u64, process_start: Instant) -> Result<StepReport> {
    if resolved.parallel.ranks > 1 {
        return Err(does_not_fit("one rank is measured on an open device: leave [parallel] out"));
    }
    steps_of_rank(device, resolved, steps, process_start, None)
}

fn steps_of_rank(
    device: &Device,
    resolved: &Resolved,
    steps: u64,
    process_start: Instant,
    world: Option<&Communicator>,
) -> Result<StepReport> {
    if steps == 0 {
        return Err(does_not_fit("0 steps measure nothing: take at least 1"));
    }
    let (own, ranks) = world.map_or((0, 1), |world| (world.rank() as u32, world.size()));
    let spec = model_spec(resolved)?;
    let dtype = compute_dtype(resolved);
    let (_, prediction) = forecast(resolved, own)?;
    limit::check(resolved, &spec, own, &prediction)?;
    limit::check_machine(resolved, &spec, own, &prediction, ranks)?;
    // The peaks of a GPU are measured now, while there is memory for it.
    let measuring = Instant::now();
    let gpu_peaks = device.as_cuda().map(|_| Peaks::of(device)).transpose()?;
    let measured_s = measuring.elapsed().as_secs_f64();
    let mut stepper = Stepper::on(device, resolved, world)?;
    let parameters = stepper.rank.model().parameter_count() as u64;

    stepper.step()?;
    let first_step_s = process_start.elapsed().as_secs_f64() - measured_s;
    let first_step_system_s = system_s();
    let predicted = prediction.memory;
    for _ in 0..WARMUP_STEPS {
        stepper.step()?;
    }
    // Ranks measure their peaks at the same time, because they share the machine.
    world.map_or(Ok(()), Communicator::barrier)?;
    let peaks = gpu_peaks.map_or_else(|| Peaks::of(device), Ok)?;
    let mut peak_of_each = vec![0.0; ranks];
    match world {
        Some(world) => world.all_gather(&[peaks.flops(dtype)], &mut peak_of_each)?,
        None => peak_of_each[0] = peaks.flops(dtype),
    }
    let peak: f64 = peak_of_each.iter().sum();
    let mut timed = Vec::new();
    for _ in 0..steps {
        timed.push(stepper.step()?);
    }
    let usage = device.pool().usage();
    let peak_rss_bytes = peak_rss_bytes();
    device.take_profile();
    device.set_profiling(true);
    stepper.step()?;
    device.set_profiling(false);
    let kernels = kernel_times(device);

    let tokens = resolved.tokens_per_step();
    let flops = spec.flops_per_token(resolved.sequence_length).convention * tokens as f64;
    let step_s = median(timed.iter().map(|t| t.seconds)).unwrap_or(0.0);
    let rates = Throughput::new(tokens, flops, step_s, Some(peak))
        .unwrap_or_else(|_| Throughput::without_peak(tokens, flops, step_s));
    let memory = Purpose::ALL.map(|purpose| PurposeMemory {
        purpose: purpose.name(),
        measured: usage.peak(purpose) as u64,
        predicted: predicted.peak(purpose) as u64,
    });
    Ok(StepReport {
        parameters,
        tokens,
        dtype: dtype.name(),
        isa: peaks.isa().to_owned(),
        ranks,
        threads: resolved.threads,
        steps,
        step_s,
        tokens_per_s: rates.tps,
        tflops: rates.tflops,
        mfu: rates.mfu,
        peak_tflops: peak / 1e12,
        first_step_s,
        first_step_system_s,
        data_wait_s: median(timed.iter().map(|t| t.data_wait_s)).unwrap_or(0.0),
        peak_rss_bytes,
        replayed: timed.iter().all(|t| t.launches == Launches::Replayed),
        loss: timed.last().map_or(f64::NAN, |t| t.loss),
        mem_peak_bytes: usage.peak_total() as u64,
        mem_predicted_bytes: predicted.peak_total() as u64,
        host_peak_bytes: stepper.rank.host_memory().peak_total() as u64,
        host_predicted_bytes: prediction.host_memory.peak_total() as u64,
        disk_bytes: prediction.disk,
        mem_reserved_bytes: usage.reserved_peak() as u64,
        memory: memory.into_iter().filter(|m| m.measured + m.predicted > 0).collect(),
        kernels,
    })
}

/// One timed step.
#[derive(Clone, Debug)]
pub struct Timed {
    /// Duration in seconds.
    pub seconds: f64,
    /// Part of `seconds` in which computing waited for the batch.
    pub data_wait_s: f64,
    /// Loss of the step.
    pub loss: f64,
    /// Kernel launches of the step.
    pub launches: Launches,
    /// The time span of each instruction.
    pub spans: Vec<Span>,
}

/// A rank that trains on random tokens.
pub struct Stepper {
    rank: Rank,
    /// Declared, and so dropped, after the rank, whose files lie in this folder.
    _folder: OffloadFolder,
    program: Program,
    resolved: Resolved,
    vocabulary: u64,
    step: u64,
}

impl Stepper {
    /// Makes this process's rank of `world`, or the only rank if there is no world. All ranks of a
    /// world call each method together.
    ///
    /// # Errors
    ///
    /// A model that does not fit.
    pub fn new(resolved: &Resolved, world: Option<&Communicator>) -> Result<Stepper> {
        Stepper::on(&crate::device::open(resolved, world, None)?, resolved, world)
    }

    /// As [`Stepper::new`], on an open device.
    ///
    /// # Errors
    ///
    /// As [`Stepper::new`].
    pub fn on(device: &Device, resolved: &Resolved, world: Option<&Communicator>) -> Result<Stepper> {
        let spec = model_spec(resolved)?;
        let own = world.map_or(0, Communicator::rank) as u32;
        let model = shape::model_of(resolved, spec.clone(), own)?;
        let program = program(resolved, &model, own)?;
        if let Some(world) = world.filter(|_| resolved.config.parallel.hierarchical_sums) {
            world.sum_by_nodes()?;
        }
        let links = match world {
            Some(world) => Links::by(collectives::choose(resolved, world)?.way, world, &program, device)?,
            None => Links::default(),
        };
        let folder = OffloadFolder::new(&resolved.config.run.directory, program.rank);
        let tiers = session::tiers(resolved, &program, device, &folder.folder)?;
        let rank = Rank::with_tiers(device, model, Holding::of(&program), tiers, links, &settings(resolved))?;
        Ok(Stepper {
            rank,
            _folder: folder,
            program,
            resolved: resolved.clone(),
            vocabulary: spec.vocab_size as u64,
            step: 0,
        })
    }

    /// The device of the rank.
    pub fn device(&self) -> &Device {
        self.rank.device()
    }

    /// The program of a step.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Makes every pass last at least as long as `pace` says.
    pub fn pace(&mut self, pace: Pace) {
        self.rank.pace(pace);
    }

    /// Makes a step.
    ///
    /// # Errors
    ///
    /// As [`Rank::execute`].
    pub fn step(&mut self) -> Result<Timed> {
        let (rows, length) = (self.resolved.batch.micro, self.resolved.sequence_length);
        let of_images = self.resolved.images.is_some();
        let resolved = &self.resolved;
        let random = Stream::new(self.resolved.config.training.seed, self.step as u32);
        let mut drawn = 0;
        let vocabulary = self.vocabulary;
        let settings = StepSettings { step: self.step, rate_factor: 1.0, clip_norm: self.resolved.optimizer.clip_norm };
        let start = Instant::now();
        let outcome = self.rank.execute(
            &self.program,
            settings,
            |device, model| {
                if of_images {
                    // Grey images of the first class: kernels take the same time for all.
                    return Ok(shape::batch_shape(resolved, model).batch(device)?);
                }
                let mut draw = |count: usize| -> Vec<i32> {
                    let from = drawn;
                    drawn += count as u64;
                    (from..drawn).map(|i| random.below(i, vocabulary) as i32).collect()
                };
                let (tokens, mut targets) = (draw(rows * length), draw(rows * length));
                let shape = shape::batch_shape(resolved, model);
                let (mut positions, mut cu_seqlens) = (Vec::with_capacity(rows * length), vec![0]);
                for (number, length) in shape.sequences.iter().enumerate() {
                    let begin = positions.len();
                    positions.extend(0..*length as i32);
                    cu_seqlens.push(positions.len() as i32);
                    if shape.paired && number % 2 == 0 {
                        // What an encoder reads is not predicted.
                        targets[begin..].iter_mut().take(*length).for_each(|target| *target = IGNORED);
                    }
                }
                let slices = BatchSlices::of_text(&tokens, Some(&targets), &positions, &cu_seqlens);
                Ok(model.batch(device, &slices)?)
            },
            |_, _| Ok(()),
        )?;
        self.step += 1;
        Ok(Timed {
            seconds: start.elapsed().as_secs_f64(),
            data_wait_s: outcome.data_wait.as_secs_f64(),
            loss: outcome.loss,
            launches: outcome.launches,
            spans: outcome.spans,
        })
    }
}

/// The folder of offloaded state while steps are measured. Dropping it removes the folder.
struct OffloadFolder {
    folder: PathBuf,
    /// True if the folder of runs existed before.
    in_runs: bool,
}

impl OffloadFolder {
    fn new(runs: &Path, rank: u32) -> OffloadFolder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = runs.join(format!("bench-{}-{number}-rank-{rank:05}", std::process::id()));
        OffloadFolder { folder, in_runs: runs.exists() }
    }
}

impl Drop for OffloadFolder {
    fn drop(&mut self) {
        // The folder exists if something was offloaded to disk.
        let _ = std::fs::remove_dir(self.folder.join(session::files::OFFLOAD));
        let _ = std::fs::remove_dir(&self.folder);
        if !self.in_runs {
            let _ = self.folder.parent().map(std::fs::remove_dir);
        }
    }
}

/// The rank's settings without a loss scale, which random tokens do not need.
fn settings(resolved: &Resolved) -> RankSettings {
    RankSettings { scaler: LossScaler::none(), ..shape::rank_settings(resolved) }
}

/// The program of `rank` without a snapshot.
fn program(resolved: &Resolved, model: &Model, rank: u32) -> Result<Program> {
    let strategy = shape::strategy(resolved, model.units().len())?;
    shape::program(
        model,
        &shape::batch_shape(resolved, model),
        compute_dtype(resolved),
        &shape::mesh(resolved),
        &strategy,
        rank,
    )
}

/// The program of `rank` and the needs of its step, predicted by executing it on the meta device.
/// Allocates no tensor memory.
///
/// # Errors
///
/// A model that does not fit.
pub fn forecast(resolved: &Resolved, rank: u32) -> Result<(Program, StepNeeds)> {
    let model = shape::model_of(resolved, model_spec(resolved)?, rank)?;
    let program = program(resolved, &model, rank)?;
    let batch = shape::batch_shape(resolved, &model);
    let prediction = predict(model, &program, &batch, &settings(resolved))?;
    Ok((program, prediction))
}

/// As [`forecast`], for rank 0 in a step of `kind`.
///
/// # Errors
///
/// A model that does not fit.
pub fn forecast_of(resolved: &Resolved, kind: StepKind, fragment: Option<Fragment>) -> Result<(Program, StepNeeds)> {
    let model = shape::model_of(resolved, model_spec(resolved)?, 0)?;
    let strategy = Strategy { kind, fragment, ..shape::strategy(resolved, model.units().len())? };
    let (batch, dtype) = (shape::batch_shape(resolved, &model), shape::compute_dtype(resolved));
    let program = shape::program(&model, &batch, dtype, &shape::mesh(resolved), &strategy, 0)?;
    let prediction = predict(model, &program, &batch, &settings(resolved))?;
    Ok((program, prediction))
}

/// As [`forecast`], for the first rank of every pipeline stage. The other ranks of a stage do the
/// same.
///
/// # Errors
///
/// As [`forecast`].
pub fn forecast_stages(resolved: &Resolved) -> Result<Vec<(Program, StepNeeds)>> {
    let mesh = shape::mesh(resolved);
    (0..mesh.pp).map(|stage| forecast(resolved, stage * mesh.stage_ranks())).collect()
}

fn kernel_times(device: &Device) -> Vec<KernelTime> {
    let profile = device.take_profile();
    let mut kernels: Vec<KernelTime> = profile
        .kernels
        .iter()
        .map(|(name, kernel)| {
            let per_s = 1e-9 / kernel.seconds.max(1e-9);
            KernelTime {
                name,
                calls: kernel.calls,
                seconds: kernel.seconds,
                gflops: kernel.cost.flops as f64 * per_s,
                gbytes: kernel.cost.bytes as f64 * per_s,
            }
        })
        .collect();
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    kernels
}

/// `VmHWM` of this process: the high-water mark of its resident set.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

/// Processor seconds that the operating system has spent on behalf of this process.
fn system_s() -> f64 {
    std::fs::read_to_string("/proc/self/stat").ok().and_then(|stat| system_s_of(&stat)).unwrap_or(0.0)
}

/// Field 15 (`stime`) of a `/proc/PID/stat`, given in hundredths of a second.
fn system_s_of(stat: &str) -> Option<f64> {
    // The second field is a name in parentheses, which may have spaces and parentheses in it.
    let (_, from_third) = stat.rsplit_once(") ")?;
    let ticks: u64 = from_third.split(' ').nth(12)?.parse().ok()?;
    Some(ticks as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Inputs};
    use std::path::Path;

    fn small(sets: &[&str]) -> Resolved {
        let small = [
            "model.family='llama'",
            "model.dim=64",
            "model.layers=2",
            "model.heads=2",
            "model.max_sequence_length=32",
            "model.vocab_size=96",
            "training.steps=1",
            "training.micro_batch_size=2",
            "training.accumulation_steps=2",
            "precision.compute='f32'",
        ];
        let inputs = Inputs { batches_supplied: true, ..Inputs::of_this_machine() };
        let sets: Vec<String> = small.iter().chain(sets).map(|set| (*set).to_owned()).collect();
        Config::parse(Path::new("bench"), "", &sets).unwrap().resolve(&inputs).unwrap()
    }

    #[test]
    fn a_small_step_is_measured_and_its_memory_is_as_predicted() {
        let report = steps(&small(&[]), 2, Instant::now()).unwrap();
        assert_eq!((report.tokens, report.steps), (128, 2));
        assert!((report.loss - 96f64.ln()).abs() < 0.5, "{}", report.loss);
        assert!(!report.kernels.is_empty() && report.mfu.is_none_or(|mfu| mfu <= 1.0));
        let activations = report.memory.iter().find(|m| m.purpose == "activations").unwrap();
        assert!(activations.error().abs() <= 0.02, "{activations:?}");
    }

    #[test]
    fn a_step_with_state_on_disk_is_measured_and_leaves_nothing_there() {
        let folder = tempfile::tempdir().unwrap();
        let runs = folder.path().join("runs");
        let sets = ["memory.offload.optimizer='disk'", "memory.offload.gradients='disk'"];
        let report =
            steps(&small(&[&format!("run.directory='{}'", runs.display()), sets[0], sets[1]]), 1, Instant::now());
        let report = report.unwrap();
        // Two moments and the sums of gradients, 4 bytes each: in f32 the masters are the weights.
        assert!(report.disk_bytes >= 12 * report.parameters && report.disk_bytes < 14 * report.parameters);
        assert_eq!(report.mem_peak_bytes, report.mem_predicted_bytes);
        assert!(!runs.exists(), "files stay behind");
    }

    #[test]
    fn time_in_the_system_is_found_after_a_name_with_parentheses() {
        let stat = "77 (a) R (b) S 1 77 77 0 -1 4194560 3016 11 0 12 345 217 18 19 20 0 4 0 881 1000 200";
        assert_eq!(system_s_of(stat), Some(2.17));
        assert_eq!(system_s_of("77 (a"), None);
    }
}
