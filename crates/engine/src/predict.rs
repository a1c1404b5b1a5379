//! Predicts the memory, FLOPs and kernel calls of a rank's step by executing it on the meta device.
//! Model code, engine and pool are the same as in training; there is no data, and no other rank.

use crate::Result;
use crate::config::Resolved;
use crate::links::Links;
use crate::rank::{self, Rank, RankSettings, StepSettings};
use crate::snapshot;
use crate::state::Holding;
use crate::tier::Tiers;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;
use trainyard_model::{BatchShape, Model};
use trainyard_program::Program;
use trainyard_tensor::{Call, Cost, Device, Purpose, Usage};

/// The predicted memory and cost of a step.
#[derive(Clone, Debug)]
pub struct StepNeeds {
    /// Peak bytes of a steady step, by purpose and in total.
    pub memory: Usage,
    /// Peak bytes of the host's memory beside a GPU, for offloaded state; zero without a GPU.
    pub host_memory: Usage,
    /// Bytes of offloaded state on disk.
    pub disk: u64,
    /// Bytes of host memory for the copy of the state from which a checkpoint is written while
    /// training goes on.
    pub copy: usize,
    /// FLOPs and bytes of the whole step, recomputation included.
    pub cost: Cost,
    /// Every kernel call of the step, tagged with the number of its instruction. Calls of the host
    /// beside a GPU come last.
    pub calls: Vec<Call>,
    /// Duration of the prediction itself.
    pub took: Duration,
}

/// Executes one rank's `program` once on meta, with the kernels of the device in `settings`.
pub fn predict(model: Model, program: &Program, shape: &BatchShape, settings: &RankSettings) -> Result<StepNeeds> {
    predict_all(model, program, &[program], 0, shape, settings)
}

/// As [`predict`], of a run whose steps have one program after the other of `programs`, over the
/// state of `whole`. Memory is that of all steps, cost and calls are those of program `priced`.
pub(crate) fn predict_all(
    model: Model,
    whole: &Program,
    programs: &[&Program],
    priced: usize,
    shape: &BatchShape,
    settings: &RankSettings,
) -> Result<StepNeeds> {
    let began = std::time::Instant::now();
    let device = Device::meta_for(settings.computes);
    let tiers = Tiers::nowhere(whole);
    let disk = tiers.disk_bytes();
    let links = Links::predicted(whole, settings.way)?;
    let graph = settings.graphs && rank::stretch(whole, &model).is_ok();
    let mut rank = Rank::with_tiers(&device, model, Holding::of(whole), tiers, links, settings)?;
    device.take_profile();
    device.set_recording(true);
    let host = rank.host().cloned();
    host.iter().for_each(|host| host.set_recording(true));
    // A graph keeps the batches that it was captured with, beside each step's own.
    let _kept = graph.then(|| rank::kept(&device, shape, whole.micro_batches)).transpose()?;
    let step = StepSettings { step: 0, rate_factor: 1.0, clip_norm: Some(1.0) };
    let (mut cost, mut calls) = (Cost::default(), Vec::new());
    for (number, program) in programs.iter().enumerate() {
        rank.execute(program, step, |device, model| Ok(shape.batch_of(device, model.context_split())?), |_, _| Ok(()))?;
        let of_step = device.take_profile().total();
        let of_devices = [Some(&device), host.as_ref()].into_iter().flatten();
        let made: Vec<Call> = of_devices.flat_map(|device| device.take_calls()).collect();
        if number == priced {
            (cost, calls) = (of_step, made);
        }
    }
    let copy = snapshot::bytes_copied(&rank)?;
    let (memory, host_memory) = (device.pool().usage(), rank.host_memory());
    Ok(StepNeeds { memory, host_memory, disk, copy, cost, calls, took: began.elapsed() })
}

/// The predicted time of a step. A caller with a profile of the machine computes it; the engine
/// stores it beside the measured time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimePrediction {
    /// Seconds of the step.
    pub step_s: f64,
    /// Seconds of a rank's instructions, summed by kind.
    pub instructions: BTreeMap<String, f64>,
    /// The basis of the prediction, in words: the profile, and the machine's speed at the time.
    pub basis: String,
    /// The work of making the batches, if that is more than copying.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preprocessing: Option<Preprocessing>,
    /// Per pipeline stage, start and end of each instruction of its program without a snapshot.
    #[serde(skip)]
    pub stages: Vec<Vec<[f64; 2]>>,
}

/// The price of decoding and changing images, which loader threads do beside the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Preprocessing {
    /// Seconds of one thread for an image, measured on images of the run.
    pub image_s: f64,
    /// Images of a rank's step.
    pub images: usize,
    /// Loader threads of a rank.
    pub workers: usize,
    /// Seconds in which they make the images of a step, each on a core.
    pub step_s: f64,
}

impl Preprocessing {
    /// The price of a run's steps, where a thread takes `image_s` for an image.
    pub fn of(resolved: &Resolved, image_s: f64) -> Preprocessing {
        let images = resolved.batch.micro * resolved.batch.accumulation;
        let workers = resolved.config.data.workers;
        Preprocessing { image_s, images, workers, step_s: image_s * images as f64 / workers.max(1) as f64 }
    }

    /// Seconds of a step that takes `compute_s` alone, of `ranks` with `threads` each on `cores`.
    ///
    /// Loader threads with cores of their own work beside the step, which waits for what they have
    /// not finished. Without a free core each takes its time from the kernels of its rank: these
    /// wait for their slowest thread, so what the others could do meanwhile is lost.
    pub fn beside(&self, compute_s: f64, ranks: usize, threads: usize, cores: usize) -> f64 {
        let own = self.image_s * self.images as f64;
        match cores.saturating_sub(ranks * threads) {
            0 => compute_s + own,
            free => {
                let loaders = (self.workers * ranks).clamp(1, free);
                compute_s.max(own * ranks as f64 / loaders as f64)
            }
        }
    }
}

impl StepNeeds {
    /// (purpose, predicted peak bytes), largest first, without unused purposes.
    pub fn purposes(&self) -> Vec<(Purpose, usize)> {
        let mut all: Vec<_> = Purpose::ALL.map(|p| (p, self.memory.peak(p))).into();
        all.retain(|(_, bytes)| *bytes > 0);
        all.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps that were measured on two cores (docs/LOG.md, 2026-11-27), in milliseconds.
    #[test]
    fn loader_threads_without_a_core_take_their_time_from_the_kernels() {
        let work = |image_s: f64, workers: usize| Preprocessing { image_s, images: 16, workers, step_s: 0.0 };
        let close = |ours: f64, measured: f64| assert!((ours / measured - 1.0).abs() < 0.1, "{ours} {measured}");
        close(work(2.46e-3, 1).beside(24.2e-3, 1, 2, 2), 63.6e-3);
        close(work(2.48e-3, 2).beside(24.2e-3, 1, 2, 2), 61.0e-3);
        close(work(0.85e-3, 1).beside(24.2e-3, 1, 2, 2), 40.9e-3);
        // With cores of their own they hide, until there is more to do than the step takes.
        assert_eq!(work(1e-3, 1).beside(24e-3, 1, 2, 4), 24e-3);
        assert_eq!(work(4e-3, 2).beside(24e-3, 1, 2, 4), 32e-3);
        assert_eq!(work(4e-3, 8).beside(24e-3, 2, 2, 8), 32e-3);
    }
}
