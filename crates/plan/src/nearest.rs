//! Errors of the planner: the reason why nothing works, and the nearest request that would.

use crate::planner::{Facts, Planner};
use crate::space::meshes;
use crate::{Fixed, Limits, Request};
use trainyard_base::format_bytes;
use trainyard_program::ExpertRanks;
use trainyard_sim::Cluster;

/// A request without an answer.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum PlanError {
    /// A number of the request is zero or out of range.
    #[error("{0}")]
    Request(String),
    /// No mesh divides the devices and the batch under the fixed choices.
    #[error("no mesh of {devices} devices works for {why}{nearest}")]
    NoMesh {
        /// Number of devices that may be used.
        devices: u32,
        /// The obstacle, in words.
        why: String,
        /// The nearest requests that would work, in words.
        nearest: String,
    },
    /// The smallest candidate is larger than a device.
    #[error("nothing fits: the least that any plan needs is {} per device ({layout}), and {} may be used{nearest}", format_bytes(*needed), format_bytes(*available))]
    DoesNotFit {
        /// Bytes per device of the smallest plan.
        needed: u64,
        /// Its layout.
        layout: String,
        /// Bytes of a device that may be used.
        available: u64,
        /// The nearest requests that would work, in words.
        nearest: String,
    },
}

impl Request {
    /// Checks that the numbers of the request make sense by themselves.
    pub(crate) fn check(&self) -> Result<(), PlanError> {
        let fail = |text: String| Err(PlanError::Request(text));
        if self.global_batch == 0 || self.sequence_length == 0 {
            return fail(format!(
                "a step needs sequences and tokens: the global batch is {}, the sequence length {}",
                self.global_batch, self.sequence_length
            ));
        }
        const TOKENS_MAX: u64 = 1 << 26;
        if self.sequence_length > TOKENS_MAX || self.global_batch > TOKENS_MAX {
            return fail(format!(
                "the global batch ({}) and the sequence length ({}) must be at most {TOKENS_MAX}",
                self.global_batch, self.sequence_length
            ));
        }
        if let Some(format) = self.formats.iter().find(|format| !self.cluster.device.has(**format)) {
            let stated = self.cluster.device.dense_tflops.keys().map(|format| format.name());
            return fail(format!(
                "the profile of {} states no peak of products in {}, only in {}: choose among these with --precision, or state it in a profile of your \
                 own",
                self.cluster.device.name,
                format.name(),
                stated.collect::<Vec<_>>().join(", ")
            ));
        }
        let Limits { memory_bytes, devices, usd_per_hour, .. } = self.limits;
        let price = self.cluster.device.usd_per_hour;
        if usd_per_hour.is_some() && price <= 0.0 {
            return fail("a limit of dollars an hour needs a price per device: give --price".to_owned());
        }
        if let Some(usd) = usd_per_hour
            && usd < price
        {
            return fail(format!(
                "{usd} dollars an hour do not pay for one {}, which costs {price}",
                self.cluster.device.name
            ));
        }
        if !self.has_host_tier() && self.fixed.offload == Some(true) {
            return fail(
                "offload to the host is for devices with memory of their own: leave it open; offload to disk runs on cores, and `trainyard plan CONFIG` \
                 tries it on this machine"
                    .to_owned(),
            );
        }
        if devices == Some(0) || memory_bytes == Some(0) {
            return fail("a limit of 0 leaves nothing to plan with".to_owned());
        }
        if let (Some(micro), Some(steps)) = (self.fixed.micro_batch, self.fixed.accumulation) {
            let one = u64::from(micro) * u64::from(steps);
            if one == 0 || !self.global_batch.is_multiple_of(one) {
                return fail(format!(
                    "micro_batch {micro} x accumulation {steps} does not divide the global batch of {}",
                    self.global_batch
                ));
            }
        }
        Ok(())
    }

    /// The largest number of devices within all limits.
    fn devices_max(&self) -> u32 {
        let mut devices = self.cluster.devices().min(self.limits.devices.unwrap_or(u32::MAX));
        let price = self.cluster.device.usd_per_hour;
        if let Some(usd) = self.limits.usd_per_hour.filter(|_| price > 0.0) {
            devices = devices.min((usd / price) as u32);
        }
        devices
    }
}

/// The error for a request that no mesh divides, with the nearest that would work.
pub(crate) fn nothing_divides(request: &Request) -> PlanError {
    let devices = request.devices_max();
    let model = &request.model;
    let mut why = format!(
        "a global batch of {}, {} heads ({} of keys and values) and {} blocks",
        request.global_batch,
        model.heads,
        model.kv_heads,
        model.layers + model.encoder_layers
    );
    if let Some(rules) = &request.fixed.rules {
        why += &format!(", by what {} can run", rules.name);
    }
    let fixed = fixed_words(&request.fixed);
    if !fixed.is_empty() {
        why += &format!(" with {}", fixed.join(", "));
    }
    let contradictions = contradictions(request, devices);
    if !contradictions.is_empty() {
        why += &format!(": {}", contradictions.join(", "));
    }
    PlanError::NoMesh { devices, why, nearest: nearest_division(request, devices) }
}

/// The fixed choices, as they were given.
fn fixed_words(fixed: &Fixed) -> Vec<String> {
    let degrees = [
        ("tp", fixed.tp),
        ("pp", fixed.pp),
        ("cp", fixed.cp),
        ("ep", fixed.ep),
        ("dp_replicate", fixed.dp_replicate),
        ("dp_shard", fixed.dp_shard),
        ("zero", fixed.zero_stage.map(u32::from)),
        ("micro_batch", fixed.micro_batch),
        ("accumulation", fixed.accumulation),
    ];
    degrees.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?))).collect()
}

/// The fixed choices that are impossible whatever else is chosen.
fn contradictions(request: &Request, devices: u32) -> Vec<String> {
    let Request { fixed, model, cluster, .. } = request;
    let one = |degree: Option<u32>| u64::from(degree.unwrap_or(1));
    let product =
        [fixed.tp, fixed.pp, fixed.cp, fixed.dp_replicate, fixed.dp_shard].into_iter().map(one).product::<u64>();
    let mut said = Vec::new();
    if product > u64::from(devices) {
        said.push(format!("these degrees make {product} devices"));
    }
    if let Some(tp) = fixed.tp.filter(|tp| *tp > cluster.devices_per_node) {
        said.push(format!("tp={tp} is more than a node's {} devices", cluster.devices_per_node));
    }
    if let Some(tp) = fixed.tp.filter(|tp| !model.heads.is_multiple_of(*tp) || !model.kv_heads.is_multiple_of(*tp)) {
        said.push(format!("tp={tp} does not divide the heads"));
    }
    let whole_blocks = request.extent(devices).whole_blocks && !request.is_for_another_trainer();
    for (name, degree) in [("tp", fixed.tp), ("cp", fixed.cp)] {
        if let Some(degree) = degree.filter(|degree| *degree > 1 && whole_blocks) {
            said.push(format!(
                "{name}={degree} divides blocks, which this program does not do in models with an encoder or of images"
            ));
        }
    }
    if let Some(ep) = fixed.ep.filter(|ep| *ep > 1 && model.experts.is_none()) {
        said.push(format!("ep={ep} splits experts, which this model has none of"));
    }
    if let Some(ep) = fixed.ep.filter(|_| fixed.expert_ranks() == ExpertRanks::Replicas) {
        let others = [fixed.tp, fixed.pp, fixed.cp, fixed.dp_shard].into_iter().flatten().product::<u32>();
        let replicas = fixed.dp_replicate.unwrap_or(devices / others.max(1));
        if !replicas.is_multiple_of(ep.max(1)) {
            let of = if replicas == 1 { "1 replica".to_owned() } else { format!("{replicas} replicas") };
            said.push(format!("ep={ep} does not divide the experts of {of}"));
        }
    }
    said
}

fn nearest_division(request: &Request, devices: u32) -> String {
    let works = |request: &Request, devices: u32| {
        devices > 0 && !crate::space::candidates(&request.extent(devices), &request.fixed).is_empty()
    };
    let mut said = Vec::new();
    // Alternatives that give up one of the fixed choices.
    for (name, relaxed) in relaxations(&request.fixed) {
        if works(&Request { fixed: relaxed, ..request.clone() }, devices) {
            said.push(format!("leave {name} open"));
        }
    }
    // Maximum number of alternatives to examine. A mesh that divides everything may still have no
    // strategy that runs on it, which takes longer to find out.
    const TRIES: usize = 200;
    let divides = |request: &Request, devices: u32| !meshes(&request.extent(devices), &request.fixed).is_empty();
    let mut smaller = (1..devices).rev().filter(|count| divides(request, *count)).take(TRIES);
    let smaller = smaller.find(|count| works(request, *count));
    said.extend(smaller.map(|count| format!("use {count} devices")));
    let batches = (1..=4096u64).flat_map(|by| [request.global_batch.checked_sub(by), Some(request.global_batch + by)]);
    let other = |batch: u64| Request { global_batch: batch, ..request.clone() };
    let mut batches = batches.flatten().filter(|batch| *batch > 0 && divides(&other(*batch), devices)).take(TRIES);
    let batch = batches.find(|batch| works(&other(*batch), devices));
    said.extend(batch.map(|batch| format!("take a global batch of {batch}")));
    if said.is_empty() { String::new() } else { format!("; the nearest that would: {}", said.join(", or ")) }
}

/// The fixed choices with each one left open in turn.
fn relaxations(fixed: &Fixed) -> Vec<(&'static str, Fixed)> {
    let mut all = Vec::new();
    let mut add = |given: bool, name, relaxed: Fixed| {
        if given {
            all.push((name, relaxed));
        }
    };
    add(fixed.tp.is_some(), "tp", Fixed { tp: None, ..fixed.clone() });
    add(fixed.pp.is_some(), "pp", Fixed { pp: None, ..fixed.clone() });
    add(fixed.cp.is_some(), "cp", Fixed { cp: None, ..fixed.clone() });
    add(fixed.ep.is_some(), "ep", Fixed { ep: None, ..fixed.clone() });
    add(fixed.dp_replicate.is_some(), "dp_replicate", Fixed { dp_replicate: None, ..fixed.clone() });
    add(fixed.dp_shard.is_some(), "dp_shard", Fixed { dp_shard: None, ..fixed.clone() });
    add(fixed.zero_stage.is_some(), "zero", Fixed { zero_stage: None, ..fixed.clone() });
    add(fixed.micro_batch.is_some(), "micro_batch", Fixed { micro_batch: None, ..fixed.clone() });
    add(fixed.accumulation.is_some(), "accumulation", Fixed { accumulation: None, ..fixed.clone() });
    all
}

/// The error for a smallest plan that is too large, with alternatives that would fit.
pub(crate) fn nearest_for_memory(request: &Request, facts: &Facts, needed: u64, layout: String) -> PlanError {
    let available = request.bytes_max();
    let device = (request.cluster.device.memory_gb * 1e9) as u64;
    let mut said = Vec::new();
    if needed <= device {
        // What stays free is given up first.
        let free = (100.0 * (1.0 - needed as f64 / device as f64)).floor();
        said.push(match request.limits.memory_bytes.is_none_or(|limit| limit >= needed) {
            true => format!("a memory margin of {free} %"),
            false => format!("a limit of {}", format_bytes(needed)),
        });
    }
    said.extend(more_nodes(request, facts));
    said.extend(shorter(request, facts));
    let nearest =
        if said.is_empty() { String::new() } else { format!("; the nearest that would: {}", said.join(", or ")) };
    PlanError::DoesNotFit { needed, layout, available, nearest }
}

/// True if the smallest candidate fits, by simulation.
fn fits(request: &Request, facts: &Facts) -> bool {
    Planner::new(request, facts).is_ok_and(|planner| planner.smallest().0 <= request.bytes_max())
}

fn more_nodes(request: &Request, facts: &Facts) -> Option<String> {
    const DOUBLINGS: u32 = 9;
    let limits = Limits { devices: None, usd_per_hour: None, ..request.limits.clone() };
    (1..=DOUBLINGS).find_map(|doublings| {
        let nodes = request.cluster.nodes.checked_mul(1 << doublings)?;
        let cluster = Cluster { nodes, ..request.cluster.clone() };
        let larger = Request { cluster, limits: limits.clone(), ..request.clone() };
        let name = &request.cluster.device.name;
        fits(&larger, facts).then(|| format!("{nodes}x{}x{name}", request.cluster.devices_per_node))
    })
}

fn shorter(request: &Request, facts: &Facts) -> Option<String> {
    let mut tokens = request.sequence_length / 2;
    while tokens >= 128 {
        if fits(&Request { sequence_length: tokens, ..request.clone() }, facts) {
            return Some(format!("sequences of {tokens} tokens"));
        }
        tokens /= 2;
    }
    None
}
