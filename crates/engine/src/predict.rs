//! What a rank's step will need and do, from executing it on the meta device: same model code, same
//! engine, same pool, no data and nobody to talk to.

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

/// A step's needs, before it runs.
#[derive(Clone, Debug)]
pub struct StepNeeds {
    /// Peak bytes per purpose and in total, of a steady step.
    pub memory: Usage,
    /// The same of the host's memory beside a GPU, for what is offloaded to it; nothing elsewhere.
    pub host_memory: Usage,
    /// Bytes of disk that offloaded state takes.
    pub disk: u64,
    /// Bytes of the host's memory that a copy of the state takes while a checkpoint is written
    /// beside the training.
    pub copy: usize,
    /// FLOPs and bytes of the whole step, recomputation included.
    pub cost: Cost,
    /// Every kernel call of the step, tagged with the number of its instruction; those of the host
    /// beside a GPU last.
    pub calls: Vec<Call>,
    /// How long the prediction took.
    pub took: Duration,
}

/// Executes one rank's `program` once on meta, as the device that the settings name would run it.
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
    // A graph keeps the batches that it was captured with; a step's own come beside them.
    let graph = settings.graphs && rank::stretch(program).is_ok();
    let _kept = graph.then(|| rank::kept(&device, shape, program.micro_batches)).transpose()?;
    let step = StepSettings { step: 0, rate_factor: 1.0, clip_norm: Some(1.0) };
    rank.execute(program, step, |device, _| Ok(shape.batch(device)?), |_, _| Ok(()))?;
    let copy = snapshot::bytes_copied(&rank)?;
    let cost = device.take_profile().total();
    let (memory, host_memory) = (device.pool().usage(), rank.host_memory());
    let calls = [Some(device), host].into_iter().flatten().flat_map(|device| device.take_calls()).collect();
    Ok(StepNeeds { memory, host_memory, disk, copy, cost, calls, took: began.elapsed() })
}

/// What a step is expected to take, by whoever has a profile of the machine; the engine keeps it
/// beside what it measures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimePrediction {
    /// Seconds of the step.
    pub step_s: f64,
    /// Seconds of a rank's instructions, summed by kind.
    pub instructions: BTreeMap<String, f64>,
    /// What it rests on, in words: the profile, and the machine's speed at the time.
    pub basis: String,
}

impl StepNeeds {
    /// (purpose, predicted peak bytes), largest first, without those that are not used.
    pub fn purposes(&self) -> Vec<(Purpose, usize)> {
        let mut all: Vec<_> = Purpose::ALL.map(|p| (p, self.memory.peak(p))).into();
        all.retain(|(_, bytes)| *bytes > 0);
        all.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        all
    }
}
