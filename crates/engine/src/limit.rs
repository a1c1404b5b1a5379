//! Checks that a step fits in `memory.limit` and in the machine; otherwise names settings that
//! would fit.
//!
//! The needs of a step, under the present and under other settings, are predicted by executing it
//! on the meta device ([`crate::predict`]). Nothing here is estimated.

use crate::Result;
use crate::config::{CheckpointMode, DeviceKind, OffloadTier, Resolved};
use crate::host::{self, ASIDE};
use crate::periods;
use crate::predict::StepNeeds;
use crate::shape;
use crate::state::does_not_fit;
use trainyard_base::format_bytes;
use trainyard_model::ModelSpec;

/// The needs of a step under `resolved`, on rank `rank`.
pub fn predict_step(resolved: &Resolved, spec: &ModelSpec, rank: u32) -> Result<StepNeeds> {
    let model = shape::model_of(resolved, spec.clone(), rank)?;
    let batch = shape::batch_shape(resolved, &model);
    let strategy = shape::strategy(resolved, model.units().len())?;
    periods::lower(resolved, spec, &model, &strategy, rank)?.predict(model, &batch, &shape::rank_settings(resolved))
}

/// Returns an error if `prediction` exceeds `memory.limit`. It names the excess, the purposes, and
/// settings that fit.
pub fn check(resolved: &Resolved, spec: &ModelSpec, rank: u32, prediction: &StepNeeds) -> Result<()> {
    match resolved.config.memory.limit {
        Some(limit) => keeps(resolved, spec, rank, prediction, limit.0 as usize, "memory.limit"),
        None => Ok(()),
    }
}

/// Returns an error, with settings that fit, if the `ranks` of this host together need more memory
/// than it has. Returns a warning if they need more than is free.
pub fn check_machine(
    resolved: &Resolved,
    spec: &ModelSpec,
    rank: u32,
    prediction: &StepNeeds,
    ranks: usize,
) -> Result<Option<String>> {
    let Some(memory) = host::memory().filter(|_| resolved.config.compute.device == DeviceKind::Cpu) else {
        return Ok(None);
    };
    let share = if ranks > 1 { "a rank's share of " } else { "" };
    let what = format!("{share}{} less {} for the process", memory.name(), format_bytes(ASIDE as u64));
    keeps(resolved, spec, rank, prediction, (memory.for_steps() + memory.swap) / ranks, &what)?;
    let needed = ranks * prediction.memory.peak_total() + ASIDE;
    Ok((needed > memory.available).then(|| {
        format!(
            "a run needs {} of memory{}, and {} are free: the system may swap, or end the run",
            format_bytes(needed as u64),
            if ranks > 1 { " on all ranks here" } else { "" },
            format_bytes(memory.available as u64)
        )
    }))
}

/// Possibility of writing checkpoints from a copy of the state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Copies {
    /// The copy fits beside the step.
    Fit,
    /// The copy does not fit; a sentence gives the reason.
    No(String),
}

/// Tells if all of the `ranks_here` ranks of this host can each hold a copy of their state beside
/// the step, within `memory.limit` and the host's available memory.
pub fn copies(resolved: &Resolved, prediction: &StepNeeds, ranks_here: usize) -> Copies {
    let on_cpu = resolved.config.compute.device == DeviceKind::Cpu;
    let step = if on_cpu { prediction.memory.peak_total() } else { prediction.host_memory.peak_total() };
    let needed = step + prediction.copy;
    let asked = resolved.config.memory.limit.filter(|_| on_cpu).map(|limit| limit.0 as usize);
    let host = host::memory().map(|memory| memory.available.saturating_sub(ASIDE) / ranks_here.max(1));
    let (room, what) = match (asked, host) {
        (Some(asked), host) if host.is_none_or(|host| asked <= host) => (asked, "memory.limit is"),
        (_, Some(host)) => (host, "what a rank can have of this host is"),
        (_, None) => return Copies::Fit,
    };
    if prediction.copy == 0 || needed <= room {
        return Copies::Fit;
    }
    Copies::No(format!(
        "training waits while a checkpoint is written: a copy of the state, {}, would make {}, and {what} {}",
        format_bytes(prediction.copy as u64),
        format_bytes(needed as u64),
        format_bytes(room as u64)
    ))
}

/// Returns an error if `prediction` exceeds `limit`, which messages call `what`.
fn keeps(
    resolved: &Resolved,
    spec: &ModelSpec,
    rank: u32,
    prediction: &StepNeeds,
    limit: usize,
    what: &str,
) -> Result<()> {
    let needed = prediction.memory.peak_total();
    if needed <= limit {
        return Ok(());
    }
    let purposes: Vec<String> = prediction
        .purposes()
        .iter()
        .map(|(purpose, bytes)| format!("{purpose} {}", format_bytes(*bytes as u64)))
        .collect();
    Err(does_not_fit(format!(
        "a step needs {}{}, {} over {what} = {} (at most: {}); {}",
        format_bytes(needed as u64),
        if resolved.parallel.ranks > 1 { " on each rank" } else { "" },
        format_bytes((needed - limit) as u64),
        format_bytes(limit as u64),
        purposes.join(", "),
        what_fits(resolved, spec, rank, limit)?
    )))
}

/// Upper limit for the settings in a message.
const SHOWN_MAX: usize = 4;

fn what_fits(resolved: &Resolved, spec: &ModelSpec, rank: u32, limit: usize) -> Result<String> {
    let (mut fitting, mut least) = (Vec::new(), None::<(usize, String)>);
    for changes in candidates(resolved) {
        let mut changed = resolved.clone();
        changes.iter().for_each(|change| change.apply(&mut changed));
        let needed = predict_step(&changed, spec, rank)?.memory.peak_total();
        let names = changes.iter().map(Change::name).collect::<Vec<_>>().join(", ");
        if needed <= limit {
            fitting.push(format!("{names} ({})", format_bytes(needed as u64)));
        }
        if least.as_ref().is_none_or(|(bytes, _)| needed < *bytes) {
            least = Some((needed, names));
        }
        if fitting.len() == SHOWN_MAX {
            break;
        }
    }
    Ok(match (fitting.as_slice(), least) {
        ([], Some((bytes, names))) => format!(
            "none of checkpointing, micro-batch, ZeRO stage and offload makes it fit: the least, {}, is {names}; a smaller \
             model, a shorter training.sequence_length or a higher limit is needed",
            format_bytes(bytes as u64)
        ),
        ([], None) => "a smaller model, a shorter training.sequence_length or a higher limit is needed".to_owned(),
        (fitting, _) => format!("it fits with {}", fitting.join("; or ")),
    })
}

/// One setting that needs less memory.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Change {
    Checkpointing(CheckpointMode),
    MicroBatch(usize),
    /// This ZeRO stage, over all ranks that hold the same state now.
    ZeroStage(usize),
    Optimizer(OffloadTier),
    /// Gradients in the tier of the optimizer's state.
    Gradients(OffloadTier),
    Parameters(OffloadTier),
    Activations(OffloadTier),
}

impl Change {
    fn name(&self) -> String {
        match self {
            Change::Checkpointing(mode) => format!("activation_checkpointing.mode = \"{mode}\""),
            Change::MicroBatch(rows) => format!("training.micro_batch_size = {rows}"),
            Change::ZeroStage(stage) => format!("parallel.zero_stage = {stage}"),
            Change::Optimizer(tier) => format!("memory.offload.optimizer = \"{tier}\""),
            Change::Gradients(tier) => format!("memory.offload.gradients = \"{tier}\""),
            Change::Parameters(tier) => format!("memory.offload.parameters = \"{tier}\""),
            Change::Activations(tier) => format!("memory.offload.activations = \"{tier}\""),
        }
    }

    fn apply(&self, resolved: &mut Resolved) {
        match *self {
            Change::Checkpointing(mode) => {
                resolved.config.activation_checkpointing.mode = mode;
                resolved.config.activation_checkpointing.overrides.0.clear();
            }
            Change::MicroBatch(rows) => {
                resolved.batch.accumulation *= resolved.batch.micro / rows;
                resolved.batch.micro = rows;
            }
            Change::ZeroStage(stage) => {
                let parallel = &mut resolved.parallel;
                if parallel.shard == 1 {
                    (parallel.shard, parallel.replicate) = (parallel.shard * parallel.replicate, 1);
                }
                parallel.zero_stage = stage;
            }
            Change::Optimizer(tier) => resolved.config.offload.optimizer = tier,
            Change::Gradients(tier) => resolved.config.offload.gradients = tier,
            Change::Parameters(tier) => resolved.config.offload.parameters = tier,
            Change::Activations(tier) => resolved.config.offload.activations = tier,
        }
    }
}

/// Combinations of changes to try: first single changes, the cheapest first, then several together.
fn candidates(resolved: &Resolved) -> Vec<Vec<Change>> {
    let mode = resolved.config.activation_checkpointing.mode;
    let modes = [CheckpointMode::Selective, CheckpointMode::Full];
    let known = modes.iter().position(|known| *known == mode).map_or(0, |place| place + 1);
    let checkpointing: Vec<Change> = modes[known..].iter().map(|mode| Change::Checkpointing(*mode)).collect();
    let micro = resolved.batch.micro;
    let rows = (1..micro).rev().filter(|rows| micro.is_multiple_of(*rows)).map(Change::MicroBatch);
    let rows: Vec<Change> = rows.collect();
    let whole = resolved.optimizer.name.looks_at_matrices();
    let stages = if resolved.parallel.ranks > 1 && !whole { resolved.parallel.zero_stage + 1..4 } else { 0..0 };
    let stages: Vec<Change> = stages.map(Change::ZeroStage).collect();
    let offload = &resolved.config.offload;
    let lower = match resolved.config.compute.device {
        DeviceKind::Cpu => OffloadTier::Disk,
        DeviceKind::Cuda(_) => OffloadTier::Host,
    };
    let tiers = [
        (Change::Activations(lower), offload.activations),
        (Change::Optimizer(lower), offload.optimizer),
        (Change::Gradients(lower), offload.gradients),
        (Change::Parameters(lower), offload.parameters),
    ];
    let encoded = shape::base_codec(&resolved.config).is_some();
    let is_free = |(change, tier): &(Change, OffloadTier)| {
        *tier == OffloadTier::None && !(encoded && matches!(change, Change::Parameters(_)))
    };
    let tiers: Vec<Change> = tiers.into_iter().filter(is_free).map(|(change, _)| change).collect();

    // Gradients follow the optimizer's state.
    let alone = |change: &&Change| !matches!(change, Change::Gradients(lower) if *lower != offload.optimizer);
    let one_by_one = [&checkpointing, &rows, &stages, &tiers].into_iter().flatten().filter(alone);
    let one_by_one = one_by_one.map(|change| vec![*change]);
    let mut all: Vec<Vec<Change>> = one_by_one.collect();
    // Combinations begin with the most recomputation and the smallest micro-batch, then add
    // sharding and tiers one by one.
    let mut together: Vec<Change> = checkpointing.last().into_iter().chain(rows.last()).copied().collect();
    for change in [None].into_iter().chain(stages.last().copied().into_iter().chain(tiers.clone()).map(Some)) {
        together.extend(change);
        all.push(together.clone());
    }
    // Then offloading without recomputation.
    for count in 2..=tiers.len() {
        all.push(tiers[..count].to_vec());
    }
    let mut seen = Vec::new();
    all.retain(|changes| {
        let is_new = !changes.is_empty() && !seen.contains(changes);
        seen.push(changes.clone());
        is_new
    });
    all
}
