//! The ways of running a configuration on this machine, priced from its profile.
//! `trainyard train --plan auto` chooses among them, and `trainyard plan c.toml` shows them.
//!
//! The global batch is fixed. The search varies ranks and their threads, pipeline stages and
//! tensor-parallel degree, sharding (ZeRO stage, resharding), micro-batch and accumulation,
//! recomputation and the reduction schedule. A way is a
//! few settings over the configuration, so the priced way is the one that runs. Each is resolved,
//! lowered and executed on the `meta` device like a run. This gives its memory to the byte and its
//! kernel calls, which are priced from the profile.
//!
//! Savings of memory are tried only where they are needed, because they cost time: recomputation
//! computes again, and summing per micro-batch exchanges more. Offloading is slower than both, so
//! it is tried only if nothing fits without it.

use crate::commands::config::resolve_for;
use crate::forecast::by_kind;

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use trainyard_base::format_bytes;
use trainyard_calibrate::forecast;
use trainyard_engine::config::{Config, DeviceKind, Inputs, OffloadTier, Resolved};
use trainyard_engine::host;
use trainyard_engine::shape::is_offloaded;
use trainyard_program::Lane;
use trainyard_sim::MachineProfile;

/// A way of running the configuration, priced.
#[derive(Clone, Debug)]
pub struct Way {
    /// Settings over the configuration, as `--set` takes them.
    pub sets: Vec<String>,
    /// Ranks and sharding, in words.
    pub layout: String,
    /// Sequences of a micro-batch, and micro-batches of a rank.
    pub batch: [usize; 2],
    /// Savings of memory, in words.
    pub savings: String,
    /// Predicted seconds of a step.
    pub step_s: f64,
    /// Predicted peak of a rank.
    pub bytes: u64,
    /// The most bytes that a rank may hold, if there is a limit.
    pub limit: Option<Limit>,
    /// Bytes of the host's memory that a rank with a GPU holds.
    pub pinned_bytes: u64,
    /// Seconds of a rank's instructions by kind.
    pub kinds: BTreeMap<String, f64>,
    /// Seconds that computing waits for other lanes.
    pub waits_s: f64,
    /// True if state is offloaded to disk, or to the host's memory beside a GPU.
    pub offloaded: bool,
    /// The result of its trial, if there was one.
    pub tried: Option<Tried>,
}

/// The result of a trial.
#[derive(Clone, Copy, Debug)]
pub struct Tried {
    /// Median seconds of a step.
    pub seconds: f64,
    /// Expected seconds of a step, by prediction and trial.
    pub expected_s: f64,
}

/// All ways that were priced.
#[derive(Clone, Debug, Default)]
pub struct Ways {
    /// The ways within the memory limit, the fastest first: tried ways, then the others by
    /// prediction.
    pub fitting: Vec<Way>,
    /// The ways above the limit, the smallest first.
    pub too_large: Vec<Way>,
}

/// The most memory that a rank may hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// The origin of the limit.
    pub of: Bound,
}

/// The origin of a memory limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// `memory.limit`.
    Asked,
    /// The memory of a GPU.
    Gpu,
    /// A rank's share of the memory of this host, or of this process's limit.
    Host,
}

/// The memory available to ranks.
#[derive(Clone, Copy, Default)]
pub struct Room {
    asked: Option<u64>,
    gpu: Option<u64>,
    /// Bytes of a host for all of its ranks: for everything on processors, for offloaded state
    /// beside GPUs.
    host: Option<u64>,
    /// Hosts that ranks are spread over.
    hosts: u64,
}

impl Room {
    /// The memory of the machine of `profile`, and the limit of `base`.
    pub fn of(base: &Resolved, profile: &MachineProfile) -> Room {
        Room {
            asked: base.config.memory.limit.map(|limit| limit.0),
            gpu: profile.machine.gpu.as_ref().map(|gpu| gpu.memory_bytes),
            host: host::memory().map(|memory| memory.for_steps() as u64),
            hosts: profile.machine.processes.as_ref().map_or(1, |processes| u64::from(processes.hosts.max(1))),
        }
    }

    /// Each rank's share of its host.
    fn share(&self, ranks: usize) -> Option<u64> {
        Some(self.host? / (ranks as u64).div_ceil(self.hosts).max(1))
    }

    /// The most memory that each of `ranks` ranks may hold on its device.
    pub fn limit(&self, ranks: usize) -> Option<Limit> {
        let host = if self.gpu.is_some() { None } else { self.share(ranks) };
        let bounds = [(self.asked, Bound::Asked), (self.gpu, Bound::Gpu), (host, Bound::Host)];
        bounds.into_iter().filter_map(|(bytes, of)| Some(Limit { bytes: bytes?, of })).min_by_key(|limit| limit.bytes)
    }
}

/// The input of a search: the configuration as a function of settings, its resolved form without
/// any, and the machine.
struct Question<'a> {
    load: &'a dyn Fn(&[String]) -> Result<Config>,
    base: &'a Resolved,
    profile: &'a MachineProfile,
    inputs: &'a Inputs,
    room: Room,
}

/// The division of a way among ranks: pipeline stages and ranks that share every product, then, of
/// the ranks that see different data, replicas and shards, ZeRO stage, and resharding after
/// forward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sharing {
    pipeline: Option<&'static str>,
    stages: usize,
    tensor: usize,
    data: usize,
    shard: usize,
    stage: usize,
    reshard: bool,
}

impl Sharing {
    fn ranks(&self) -> usize {
        self.stages * self.tensor * self.data
    }
}

/// The most ranks that divide a model among them, by stages and products. More exchange more than
/// they save on one machine.
const MODEL_RANKS_MAX: usize = 8;

/// Orders of a pipeline that are tried: the usual one, and the one with the smallest bubble of
/// those with one stretch of layers per stage.
const PIPELINES: [&str; 2] = ["1f1b", "zero_bubble"];

/// Savings of memory, from none to the most expensive: the checkpointing mode, and true for sums
/// per micro-batch.
const SAVINGS: [(&str, bool); 6] =
    [("none", false), ("none", true), ("selective", false), ("selective", true), ("full", false), ("full", true)];

/// Offloaded state, to disk or, beside a GPU, to the host. Combinations that move the least bytes
/// come first.
const OFFLOADS: [&[&str]; 8] = [
    &["optimizer"],
    &["activations"],
    &["optimizer", "activations"],
    &["optimizer", "gradients"],
    &["optimizer", "parameters"],
    &["optimizer", "gradients", "activations"],
    &["optimizer", "gradients", "parameters"],
    &["optimizer", "gradients", "parameters", "activations"],
];

/// Number of tried ways beside the best that are named.
const TRIED_SHOWN: usize = 3;

/// Upper limit for the micro-batches of a rank: more are no faster, and take long to price.
const ACCUMULATION_MAX: usize = 32;

/// Prices the ways of running a configuration. `load` makes the configuration from settings;
/// `inputs` describe the ranks. Settings given by hand are kept, because `load` puts them over
/// those that are tried.
///
/// # Errors
///
/// A configuration that cannot be resolved, or whose model is known only after the text is read.
pub fn ways(load: &dyn Fn(&[String]) -> Result<Config>, profile: &MachineProfile, inputs: &Inputs) -> Result<Ways> {
    let base = resolve_for(&load(&[])?, inputs.clone())?;
    if matches!(&base.model, trainyard_engine::config::ModelSource::Shape(shape) if shape.vocab_size.is_none()) {
        bail!("the vocabulary is that of the text's characters, so nothing can be priced before it is read");
    }
    let mut ways = Ways::default();
    let question = Question { load, base: &base, profile, inputs, room: Room::of(&base, profile) };
    ways.look(&question, &[&[]], OffloadTier::None)?;
    // A GPU's host is faster than a disk.
    let tiers =
        if question.room.gpu.is_some() { &[OffloadTier::Host, OffloadTier::Disk][..] } else { &[OffloadTier::Disk] };
    for tier in tiers {
        if ways.fitting.is_empty() && !ways.too_large.is_empty() {
            ways.look(&question, &OFFLOADS, *tier)?;
        }
    }
    ways.fitting.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    ways.too_large.sort_by_key(|way| way.bytes);
    Ok(ways)
}

/// The possible divisions among ranks. The number of ranks is at most that of cores or GPUs (or
/// that which the degrees of the configuration itself make); the number of processes is given. The
/// ranks that see different data divide the batch.
fn sharings(base: &Resolved, profile: &MachineProfile, inputs: &Inputs) -> Vec<Sharing> {
    let own = base.parallel.pipeline * base.parallel.tensor;
    let numbers = match (inputs.processes, &profile.machine.gpu) {
        (Some(count), _) => count..=count,
        (None, Some(gpu)) => 1..=own.max(gpu.count as usize),
        (None, None) => 1..=own.max(Inputs::of_this_machine().cores),
    };
    let mut all = Vec::new();
    for ranks in numbers {
        let divisors = |of: usize| (1..=of).filter(move |part| of.is_multiple_of(*part));
        for stages in divisors(ranks) {
            for tensor in divisors(ranks / stages) {
                let (model, data) = (stages * tensor, ranks / stages / tensor);
                if model > own.max(MODEL_RANKS_MAX) || !base.batch.global.is_multiple_of(data) {
                    continue;
                }
                if stages == 1 {
                    divide_state(None, [1, tensor, data], &mut all);
                } else {
                    PIPELINES.iter().for_each(|order| divide_state(Some(order), [stages, tensor, data], &mut all));
                }
            }
        }
    }
    all
}

/// The ways of dividing the state among the ranks that see different data. Together with stages or
/// split products only replicas and ZeRO-1 are tried: gradients and parameters are small then.
fn divide_state(pipeline: Option<&'static str>, [stages, tensor, data]: [usize; 3], all: &mut Vec<Sharing>) {
    let whole = Sharing { pipeline, stages, tensor, data, shard: 1, stage: 0, reshard: true };
    all.push(whole);
    let kinds = [(1, true), (2, true), (3, true), (3, false)];
    let kinds = if stages * tensor > 1 { &kinds[..1] } else { &kinds[..] };
    for shard in (2..=data).filter(|shard| data.is_multiple_of(*shard)) {
        all.extend(kinds.iter().map(|(stage, reshard)| Sharing { shard, stage: *stage, reshard: *reshard, ..whole }));
    }
}

/// The micro-batches of a division. A pipeline needs at least as many as it has stages to be full.
fn micro_batches(base: &Resolved, sharing: Sharing) -> Vec<usize> {
    let of_a_rank = base.batch.global / sharing.data;
    let few = |micro: &usize| of_a_rank / micro <= ACCUMULATION_MAX || *micro == base.batch.micro;
    let full = |micro: &usize| of_a_rank / micro >= sharing.stages || *micro == 1;
    (1..=of_a_rank).filter(|micro| of_a_rank.is_multiple_of(*micro)).filter(few).filter(full).collect()
}

fn settings(base: &Resolved, sharing: Sharing, micro: usize, mode: &str, each: bool) -> Vec<String> {
    let Sharing { pipeline, stages, tensor, data, shard, stage, reshard } = sharing;
    let mut sets = vec![
        format!("training.global_batch_size={}", base.batch.global),
        format!("training.micro_batch_size={micro}"),
        format!("training.accumulation_steps={}", base.batch.global / data / micro),
        format!("parallel.ranks={}", sharing.ranks()),
        format!("parallel.data_parallel_replicate_degree={}", data / shard),
        format!("parallel.data_parallel_shard_degree={shard}"),
        format!("parallel.zero_stage={stage}"),
        format!("parallel.reduce_schedule={}", if each { "micro_batch" } else { "step" }),
        format!("activation_checkpointing.mode={mode}"),
    ];
    if stage == 3 {
        sets.push(format!("parallel.reshard_after_forward={reshard}"));
    }
    // A configuration with degrees of its own is asked for others too.
    if stages > 1 || base.config.parallel.pipeline_parallel_degree > 1 {
        sets.push(format!("parallel.pipeline_parallel_degree={stages}"));
    }
    sets.extend(pipeline.map(|order| format!("parallel.pipeline_schedule={order}")));
    if tensor > 1 || base.config.parallel.tensor_parallel_degree > 1 {
        sets.push(format!("parallel.tensor_parallel_degree={tensor}"));
    }
    if tensor > 1 {
        // Rows that do not divide evenly stay whole.
        let rows = (micro * base.sequence_length).is_multiple_of(tensor);
        sets.push(format!("parallel.sequence_parallel={rows}"));
    }
    sets
}

fn price(sets: Vec<String>, resolved: &Resolved, profile: &MachineProfile, room: &Room) -> Result<Way> {
    let forecast = forecast(resolved, &profile.machine).context("cannot price a plan of the configuration")?;
    let step = forecast.step(profile, &profile.speeds);
    let waited = &step.simulated.ranks[0].waited_s;
    let needs = forecast.fullest();
    Ok(Way {
        sets,
        layout: layout(resolved),
        batch: [resolved.batch.micro, resolved.batch.accumulation],
        savings: savings(resolved),
        step_s: step.simulated.step_s,
        bytes: needs.memory.peak_total() as u64,
        limit: room.limit(resolved.parallel.ranks),
        pinned_bytes: needs.host_memory.peak_total() as u64,
        kinds: by_kind(forecast.first().0, &step),
        waits_s: Lane::ALL.iter().filter(|lane| **lane != Lane::Compute).map(|lane| waited[*lane as usize]).sum(),
        offloaded: is_offloaded(resolved),
        tried: None,
    })
}

/// `4 ranks x 1 thread, 2 stages, shard 2, ZeRO-1`
fn layout(resolved: &Resolved) -> String {
    use trainyard_engine::config::Reshard;
    let plural = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let parallel = &resolved.parallel;
    let mut text = match resolved.config.compute.device {
        DeviceKind::Cpu => format!("{} x {}", plural(parallel.ranks, "rank"), plural(resolved.threads, "thread")),
        DeviceKind::Cuda(_) => plural(parallel.ranks, "GPU"),
    };
    if parallel.tensor > 1 {
        text += &format!(", tp {}", parallel.tensor);
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
    text
}

/// A resolved configuration in words:
/// `2 ranks x 1 thread, shard 2, ZeRO-1, micro-batch 4 x 2, recomputation none`.
pub fn words(resolved: &Resolved) -> String {
    in_words(&layout(resolved), [resolved.batch.micro, resolved.batch.accumulation], &savings(resolved))
}

fn in_words(layout: &str, [micro, accumulation]: [usize; 2], savings: &str) -> String {
    format!("{layout}, micro-batch {micro} x {accumulation}, recomputation {savings}")
}

impl Way {
    /// True if `other` resolved to the same way, because settings given by hand left nothing to
    /// choose.
    fn says_the_same(&self, other: &Way) -> bool {
        (&self.layout, self.batch, &self.savings) == (&other.layout, other.batch, &other.savings)
    }

    /// The way in words.
    pub fn words(&self) -> String {
        in_words(&self.layout, self.batch, &self.savings)
    }
}

impl Ways {
    /// Prices, for every sharding and micro-batch, the savings in order until one fits, with each
    /// of `offloads` in `tier`.
    fn look(&mut self, question: &Question<'_>, offloads: &[&[&str]], tier: OffloadTier) -> Result<()> {
        for sharing in sharings(question.base, question.profile, question.inputs) {
            for micro in micro_batches(question.base, sharing) {
                self.first_that_fits(question, sharing, micro, offloads, tier)?;
            }
        }
        Ok(())
    }

    fn first_that_fits(
        &mut self,
        question: &Question<'_>,
        sharing: Sharing,
        micro: usize,
        offloads: &[&[&str]],
        tier: OffloadTier,
    ) -> Result<()> {
        let accumulation = question.base.batch.global / sharing.data / micro;
        for (mode, each) in SAVINGS {
            if each && (sharing.stage < 2 || accumulation == 1) {
                // Gradients are not sharded here, so summing them more often saves nothing.
                continue;
            }
            for offload in offloads {
                let mut sets = settings(question.base, sharing, micro, mode, each);
                sets.extend(offload.iter().map(|what| format!("memory.offload.{what}={tier}")));
                // Settings that contradict those given by hand are skipped.
                let Some(resolved) =
                    (question.load)(&sets).and_then(|config| resolve_for(&config, question.inputs.clone())).ok()
                else {
                    continue;
                };
                // Degrees given by hand are those of another division.
                if (resolved.parallel.pipeline, resolved.parallel.tensor) != (sharing.stages, sharing.tensor) {
                    continue;
                }
                // A model of fewer heads or layers than ranks cannot be divided among them.
                let whole = resolved.parallel.pipeline * resolved.parallel.tensor == 1;
                let way = match price(sets, &resolved, question.profile, &question.room) {
                    Err(_) if !whole => continue,
                    priced => priced?,
                };
                let on_host = question.room.share(sharing.ranks()).is_none_or(|share| way.pinned_bytes <= share);
                let fits = on_host && way.limit.is_none_or(|limit| way.bytes <= limit.bytes);
                let list = if fits { &mut self.fitting } else { &mut self.too_large };
                if !list.iter().any(|known| known.says_the_same(&way)) {
                    list.push(way);
                }
                if fits {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The fastest way that fits.
    ///
    /// # Errors
    ///
    /// Nothing fits in the memory limit; the error names the needs of the smallest way.
    pub fn best(&self) -> Result<&Way> {
        if let Some(best) = self.fitting.first() {
            return Ok(best);
        }
        match self.too_large.first() {
            Some(least) => {
                let limit = format_bytes(least.limit.map_or(0, |limit| limit.bytes));
                let (limit, nearest) = match least.limit.map(|limit| limit.of) {
                    Some(Bound::Gpu) => (format!("a GPU here has {limit}"), "more GPUs, a larger one".to_owned()),
                    Some(Bound::Host) | None => {
                        (format!("a rank's share of this machine's memory is {limit}"), "more memory".to_owned())
                    }
                    Some(Bound::Asked) => {
                        let mebibytes = least.bytes.div_ceil(1 << 20);
                        (format!("memory.limit is {limit}"), format!("memory.limit = \"{mebibytes}MiB\""))
                    }
                };
                bail!(
                    "nothing fits: the least that any runnable plan needs is {} on each rank ({}), and {limit}; the nearest that would: \
                     {nearest}, a smaller model, a shorter sequence, or an optimizer with less state",
                    format_bytes(least.bytes),
                    least.words()
                )
            }
            None => bail!("no plan for this configuration is left by what is set by hand"),
        }
    }

    /// The reasons for the best way: its bottleneck, and the losses of others.
    pub fn reasons(&self) -> Vec<String> {
        let Some(best) = self.fitting.first() else { return Vec::new() };
        let waits = 100.0 * best.waits_s / best.step_s;
        let mut dearest: Vec<(&String, &f64)> = best.kinds.iter().collect();
        dearest.sort_by(|a, b| b.1.total_cmp(a.1));
        let dearest: Vec<String> = dearest
            .iter()
            .take(3)
            .map(|(kind, seconds)| format!("{kind} {:.0} %", 100.0 * **seconds / best.step_s))
            .collect();
        let mut said = vec![format!(
            "It computes for {:.0} % of the step and waits for exchanges and data for {waits:.0} %; instructions: {}.",
            100.0 - waits,
            dearest.join(", ")
        )];
        if let Some(limit) = best.limit {
            said.push(format!(
                "A rank holds {} of {} that it may.",
                format_bytes(best.bytes),
                format_bytes(limit.bytes)
            ));
        }
        if let Some(faster) =
            self.too_large.iter().filter(|way| way.step_s < best.step_s).min_by(|a, b| a.step_s.total_cmp(&b.step_s))
        {
            said.push(format!("Faster, but too large: {} needs {}.", faster.words(), format_bytes(faster.bytes)));
        }
        match (best.tried, self.fitting.get(1)) {
            (Some(tried), _) => said.push(self.tried(tried)),
            (None, Some(next)) => said.push(format!("The next best ({}) {}.", next.words(), loses(best, next))),
            (None, None) => {}
        }
        said
    }

    /// A sentence about the trials: the best, with the result `tried`, and the next ones.
    fn tried(&self, tried: Tried) -> String {
        let next = self.fitting.iter().skip(1).filter_map(|way| Some((way, way.tried?)));
        let next: Vec<String> = next
            .take(TRIED_SHOWN)
            .map(|(way, theirs)| {
                let worse = 100.0 * (theirs.expected_s / tried.expected_s - 1.0);
                let (took, predicted) = (1e3 * theirs.seconds, 1e3 * way.step_s);
                format!("{} takes {worse:.1} % longer (tried {took:.2} ms, predicted {predicted:.2})", way.words())
            })
            .collect();
        format!(
            "Tried in turn, it took {:.2} ms. Weighing predictions and trials, {}.",
            1e3 * tried.seconds,
            next.join("; ")
        )
    }
}

/// The loss of `next` against `best`, by the kinds of instruction that grew most.
fn loses(best: &Way, next: &Way) -> String {
    let of = |way: &Way, kind: &str| way.kinds.get(kind).copied().unwrap_or(0.0);
    let mut kinds: Vec<(&str, f64)> = best
        .kinds
        .keys()
        .chain(next.kinds.keys())
        .map(|kind| (kind.as_str(), of(next, kind) - of(best, kind)))
        .filter(|(_, more)| more.abs() > 0.002 * best.step_s)
        .collect();
    kinds.push(("waiting", next.waits_s - best.waits_s));
    kinds.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(b.0)));
    kinds.dedup();
    let grown: Vec<String> = kinds
        .iter()
        .filter(|(_, more)| *more > 0.002 * best.step_s)
        .take(2)
        .map(|(kind, more)| format!("{:.1} ms more {kind}", 1e3 * more))
        .collect();
    let worse = 100.0 * (next.step_s / best.step_s - 1.0);
    let why = if grown.is_empty() { String::new() } else { format!(": {}", grown.join(", ")) };
    format!("takes {worse:.1} % longer{why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_may_hold_what_is_asked_or_its_gpu_or_its_share_of_the_host() {
        let room = Room { asked: None, gpu: None, host: Some(1200), hosts: 1 };
        assert_eq!(room.limit(4), Some(Limit { bytes: 300, of: Bound::Host }));
        assert_eq!(Room { hosts: 2, ..room }.limit(4), Some(Limit { bytes: 600, of: Bound::Host }));
        let asked = Room { asked: Some(500), ..room };
        assert_eq!(asked.limit(2), Some(Limit { bytes: 500, of: Bound::Asked }));
        assert_eq!(asked.limit(4), Some(Limit { bytes: 300, of: Bound::Host }));
        // Beside a GPU the host holds only offloaded state.
        let gpu = Room { gpu: Some(400), ..asked };
        assert_eq!((gpu.limit(8), gpu.share(8)), (Some(Limit { bytes: 400, of: Bound::Gpu }), Some(150)));
        assert_eq!(Room { host: None, ..room }.limit(1), None);
    }
}
