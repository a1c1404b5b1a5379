//! Predicts the memory, FLOPs and kernel calls of a rank's step by executing it on the meta device.
//! Model code, engine and pool are the same as in training; there is no data, and no other rank.

use crate::Result;
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
    let began = std::time::Instant::now();
    let device = Device::meta_for(settings.computes);
    let tiers = Tiers::nowhere(program);
    let disk = tiers.disk_bytes();
    let links = Links::predicted(program, settings.way)?;
    let mut rank = Rank::with_tiers(&device, model, Holding::of(program), tiers, links, settings)?;
    device.take_profile();
    device.set_recording(true);
    let host = rank.host().cloned();
    host.iter().for_each(|host| host.set_recording(true));
    // A graph keeps the batches that it was captured with, beside each step's own.
    let graph = settings.graphs && rank::stretch(program).is_ok();
    let _kept = graph.then(|| rank::kept(&device, shape, program.micro_batches)).transpose()?;
    let step = StepSettings { step: 0, rate_factor: 1.0, clip_norm: Some(1.0) };
    rank.execute(program, step, |device, model| Ok(shape.batch_of(device, model.context_split())?), |_, _| Ok(()))?;
    let copy = snapshot::bytes_copied(&rank)?;
    let cost = device.take_profile().total();
    let (memory, host_memory) = (device.pool().usage(), rank.host_memory());
    let calls = [Some(device), host].into_iter().flatten().flat_map(|device| device.take_calls()).collect();
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
    /// Per pipeline stage, start and end of each instruction of its program without a snapshot.
    #[serde(skip)]
    pub stages: Vec<Vec<[f64; 2]>>,
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
