//! The ways of running a configuration on this machine: [`trainyard_plan::here`] lists and chooses
//! them, and what it asks is answered here, by resolving, lowering, pricing and trying
//! configurations.
//! `trainyard train --plan auto` chooses among them, and `trainyard plan c.toml` shows them.

use crate::commands::config::{resolve, resolve_for};
use crate::forecast::{beside, image_seconds};
use crate::output::{chain, note};
use anyhow::{Context, Result, bail};
use std::time::Instant;
use trainyard_base::median;
use trainyard_calibrate::{Ranks, forecast, layout as layout_of};
use trainyard_engine::config::{BaseDtype, Config, DeviceKind, Inputs, OffloadTier, Parallel, Resolved};
use trainyard_engine::host;
use trainyard_engine::predict::Preprocessing;
use trainyard_engine::shape::{is_offloaded, model_of, model_spec};
use trainyard_plan::here::{self, Asked, Base, Room, Way, Ways, race};
use trainyard_program::Lane;
use trainyard_sim::MachineProfile;

/// Prices the ways of running a configuration. `load` makes the configuration from settings;
/// `inputs` describe the ranks. Settings given by hand are kept, because `load` puts them over
/// those that are tried.
///
/// # Errors
///
/// A configuration that cannot be resolved, or whose model is known only after the text is read.
pub fn ways(load: &dyn Fn(&[String]) -> Result<Config>, profile: &MachineProfile, inputs: &Inputs) -> Result<Ways> {
    let resolved = resolve_for(&load(&[])?, inputs.clone())?;
    if matches!(&resolved.model, trainyard_engine::config::ModelSource::Shape(shape) if shape.vocab_size.is_none()) {
        if resolved.images.is_some() {
            bail!("the classes are those of the images of data.train, which cannot be listed: set model.vocab_size");
        }
        bail!("the vocabulary is that of the text's characters, so nothing can be priced before it is read");
    }
    if resolved.parallel.experts > 1 {
        // Experts that cannot be divided so are an error, not a lack of plans.
        model_of(&resolved, model_spec(&resolved)?, 0)?;
    }
    let room = room(&resolved, profile);
    let image_s = image_seconds(&resolved, &note);
    here::ways(&base(&resolved, profile, inputs), &room, &mut |asked: Asked| {
        // Settings that contradict those given by hand are skipped.
        let Ok(resolved) = load(&asked.sets).and_then(|config| resolve_for(&config, inputs.clone())) else {
            return Ok(None);
        };
        let Parallel { pipeline, context, tensor, experts, .. } = resolved.parallel;
        if [pipeline, context, tensor, experts] != asked.model_degrees {
            return Ok(None);
        }
        // A model of fewer heads or layers than ranks cannot be divided among them.
        let whole = pipeline * context * tensor == 1;
        match price(asked.sets, &resolved, profile, &room, image_s) {
            Err(_) if !whole => Ok(None),
            priced => priced.map(Some),
        }
    })
}

/// A setting that would make a way faster, and changes the training's result.
pub struct Lever {
    /// The setting.
    pub set: &'static str,
    /// Predicted seconds of a step with it.
    pub step_s: f64,
    /// Its effect on the result, and where that is known from.
    pub effect: &'static str,
}

/// The gain of products of 8-bit integers for `way`. None if they are chosen or refused already, if
/// the profile has not measured them, or if they are not faster.
pub fn int8(
    way: &Way,
    load: &dyn Fn(&[String]) -> Result<Config>,
    profile: &MachineProfile,
    inputs: &Inputs,
) -> Option<Lever> {
    let set = "precision.int8=switchback";
    let now = load(&way.sets).ok().filter(|_| has_int8(profile))?;
    let with = load(&[&way.sets[..], &[set.to_owned()]].concat()).ok()?;
    if now.precision.int8 == with.precision.int8 {
        return None;
    }
    let step_s = |config: &Config| -> Option<f64> {
        let resolved = resolve_for(config, inputs.clone()).ok()?;
        model_spec(&resolved).ok()?;
        Some(forecast(&resolved, &profile.machine).ok()?.step(profile, &profile.speeds).simulated.step_s)
    };
    // What runs beside a step, as the preparation of images, is the same with it.
    let saved_s = step_s(&now)? - step_s(&with)?;
    let effect =
        "it rounds operands of products to 8 bits: the loss of a small model was 0.2 % higher (docs/training.md)";
    (saved_s > 0.0).then_some(Lever { set, step_s: way.step_s - saved_s, effect })
}

/// True if the profile has measured products of 8-bit integers.
pub fn has_int8(profile: &MachineProfile) -> bool {
    profile.kernels.iter().any(|curve| curve.kernel.starts_with("linear_int8"))
}

/// The memory of the machine of `profile`, and the limit of `base`.
pub fn room(base: &Resolved, profile: &MachineProfile) -> Room {
    Room {
        asked: base.config.memory.limit.map(|limit| limit.0),
        gpu: profile.machine.gpu.as_ref().map(|gpu| gpu.memory_bytes),
        host: host::memory().map(|memory| memory.for_steps() as u64),
        hosts: profile.machine.processes.as_ref().map_or(1, |processes| u64::from(processes.hosts.max(1))),
    }
}

fn base(resolved: &Resolved, profile: &MachineProfile, inputs: &Inputs) -> Base {
    let Parallel { pipeline, context, tensor, experts, .. } = resolved.parallel;
    // Each part of the experts needs a replica.
    let least = pipeline * context * tensor * experts;
    let ranks = match (inputs.processes, &profile.machine.gpu) {
        (Some(count), _) => count..=count,
        (None, Some(gpu)) => 1..=least.max(gpu.count as usize),
        (None, None) => 1..=least.max(inputs.cores),
    };
    Base {
        global_batch: resolved.batch.global,
        micro_batch: resolved.batch.micro,
        sequence_length: resolved.sequence_length,
        pipeline,
        context,
        divides_sequences: profile.machine.gpu.is_none(),
        heads: model_spec(resolved).map_or([1, 1], |spec| [spec.heads, spec.kv_heads]),
        tensor,
        expert_ranks: experts,
        experts: if profile.machine.gpu.is_none() { experts_of(resolved) } else { 1 },
        ranks,
    }
}

/// The number of experts of a layer; 1 without.
fn experts_of(resolved: &Resolved) -> usize {
    let spec = model_spec(resolved).ok();
    spec.and_then(|spec| spec.experts).map_or(1, |experts| experts.experts)
}

fn price(
    sets: Vec<String>,
    resolved: &Resolved,
    profile: &MachineProfile,
    room: &Room,
    image_s: Option<f64>,
) -> Result<Way> {
    let forecast = forecast(resolved, &profile.machine).context("cannot price a plan of the configuration")?;
    let step = forecast.step(profile, &profile.speeds);
    let waited = &step.simulated.ranks[0].waited_s;
    let needs = forecast.fullest();
    let compute_s = step.simulated.step_s;
    let work = image_s.map(|seconds| Preprocessing::of(resolved, seconds));
    let mut kinds = step.by_kind(forecast.first().0);
    let step_s = beside(compute_s, work, layout_of(resolved, &profile.machine), &profile.machine, &mut kinds);
    Ok(Way {
        sets,
        layout: layout(resolved),
        batch: [resolved.batch.micro, resolved.batch.accumulation],
        savings: savings(resolved),
        step_s,
        bytes: needs.memory.peak_total() as u64,
        limit: room.limit(resolved.parallel.ranks),
        pinned_bytes: needs.host_memory.peak_total() as u64,
        kinds,
        waits_s: Lane::ALL.iter().filter(|lane| **lane != Lane::Compute).map(|lane| waited[*lane as usize]).sum(),
        offloaded: is_offloaded(resolved),
        tried: None,
    })
}

/// `4 ranks x 1 thread, 2 stages, shard 2, ZeRO-1`
fn layout(resolved: &Resolved) -> String {
    use trainyard_engine::config::{ContextExchange, Reshard};
    let plural = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let parallel = &resolved.parallel;
    let mut text = match resolved.config.compute.device {
        DeviceKind::Cpu => format!("{} x {}", plural(parallel.ranks, "rank"), plural(resolved.threads, "thread")),
        DeviceKind::Cuda(_) => plural(parallel.ranks, "GPU"),
    };
    if parallel.tensor > 1 {
        text += &format!(", tp {}", parallel.tensor);
    }
    if parallel.context > 1 {
        let by = match parallel.exchange {
            ContextExchange::AllToAll => " by heads",
            ContextExchange::AllGather => "",
            ContextExchange::AllGatherOverlapped => " overlapped",
        };
        text += &format!(", cp {}{by}", parallel.context);
    }
    if parallel.experts > 1 {
        text += &format!(", ep {}", parallel.experts);
    }
    if parallel.pipeline > 1 {
        text += &format!(", pp {} by {}", parallel.pipeline, parallel.schedule);
    }
    if parallel.shard > 1 {
        if parallel.replicate > 1 {
            text += &format!(", {} replicas", parallel.replicate);
        }
        text += &format!(", shard {}, ZeRO-{}", parallel.shard, parallel.zero_stage);
        if parallel.zero_stage == 3 && parallel.reshard_after_forward == Reshard::Never {
            text += " kept gathered";
        }
    }
    text
}

fn savings(resolved: &Resolved) -> String {
    use trainyard_engine::config::{CheckpointMode, ReduceSchedule};
    let mode = match resolved.config.activation_checkpointing.mode {
        CheckpointMode::None => "none",
        CheckpointMode::Selective => "selective",
        CheckpointMode::Full => "full",
    };
    let mut text = mode.to_owned();
    if resolved.parallel.reduce_schedule == ReduceSchedule::MicroBatch {
        text += ", sums per micro-batch";
    }
    let offload = &resolved.config.offload;
    let tiers = [
        ("optimizer", offload.optimizer),
        ("gradients", offload.gradients),
        ("parameters", offload.parameters),
        ("activations", offload.activations),
    ];
    for (lower, place) in [(OffloadTier::Host, "on the host"), (OffloadTier::Disk, "on disk")] {
        let there = tiers.iter().filter(|(_, tier)| *tier == lower).map(|(what, _)| *what);
        let there: Vec<&str> = there.collect();
        if !there.is_empty() {
            text += &format!(", {} {place}", there.join(" and "));
        }
    }
    let base = resolved.config.fine_tuning.base_dtype;
    if base != BaseDtype::Compute {
        text += &format!(", base in {base}");
    }
    text
}

/// A resolved configuration in words:
/// `2 ranks x 1 thread, shard 2, ZeRO-1, micro-batch 4 x 2, recomputation none`.
pub fn words(resolved: &Resolved) -> String {
    here::words(&layout(resolved), [resolved.batch.micro, resolved.batch.accumulation], &savings(resolved))
}

/// Tries the most promising of the fitting ways for `seconds` in all. Moves the tried ways to the
/// front, the one with the least expected time first. `say` receives messages about the progress.
///
/// # Errors
///
/// Settings that no longer resolve. A way that fails when it runs is no error: it is reported and
/// eliminated.
pub fn try_out(
    ways: &mut Ways,
    load: &dyn Fn(&[String]) -> Result<Config>,
    seconds: f64,
    say: &dyn Fn(&str),
) -> Result<()> {
    let contenders = match race::contenders(&ways.fitting, seconds) {
        Ok(contenders) => contenders,
        Err(why) => {
            if seconds > 0.0 {
                say(&format!("nothing is tried: {why}"));
            }
            return Ok(());
        }
    };
    for way in &contenders {
        resolve(&load(&ways.fitting[*way].sets)?)?;
    }
    say(&format!("trying {} plans for a few steps each, for up to {seconds:.0} s", contenders.len()));
    let start = Instant::now();
    race::try_out(ways, &contenders, seconds, &|| start.elapsed(), &mut |way| {
        let seconds = load(&way.sets).and_then(|config| visit(&resolve(&config)?));
        seconds.inspect_err(|error| say(&format!("{} is out, it cannot be run: {}", way.words(), chain(error)))).ok()
    });
    Ok(())
}

/// Creates a way's ranks and measures the median seconds of a step.
fn visit(resolved: &Resolved) -> Result<f64> {
    let mut ranks = Ranks::together(resolved)?;
    ranks.step()?;
    let start = Instant::now();
    let mut steps = Vec::new();
    while steps.len() < *race::STEPS.start()
        || steps.len() < *race::STEPS.end() && start.elapsed().as_secs_f64() < race::VISIT_S
    {
        let step = Instant::now();
        ranks.step()?;
        steps.push(step.elapsed().as_secs_f64());
    }
    median(steps).context("no step was timed")
}

/// Parses `--trial-seconds`.
pub fn trial_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0);
    seconds.ok_or_else(|| "it is a number of seconds, 0 or more".to_owned())
}
