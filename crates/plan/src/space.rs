//! The space: every candidate for a model, a batch and a number of devices that could be run at
//! all.
//!
//! Some candidates are left out because nothing is lost by it:
//!
//! - Tensor parallelism beyond a node: two collectives per block on the network.
//! - GPipe: 1F1B has its bubble with fewer activations (Narayanan et al. 2019).
//! - ZeRO-0 on a shard group: it is the same as a replica, which the replicate degree covers.
//! - Summing gradients per micro-batch where they are kept whole anyway: the same result for more
//!   traffic.
//! - Gathering parameters again in every pass of a pipeline, and state on the host beside one: each
//!   stage would move its weights for every micro-batch.
//! - Shard groups larger than a node in steps smaller than four: prices change little from one to
//!   the next.

use crate::stacks::Rules;
use crate::{Candidate, Checkpointing};
use serde::Serialize;
use trainyard_program::{ExpertRanks, Mesh, Offload, PipelineSchedule, ReduceSchedule, Reshard, Tier};
use trainyard_sim::Format;

/// The dimensions of the model, the batch and the cluster that bound the space.
#[derive(Clone, PartialEq, Debug)]
pub struct Extent {
    /// Number of devices that the mesh covers.
    pub devices: u32,
    /// Number of devices of a node.
    pub devices_per_node: u32,
    /// Number of sequences of a step.
    pub global_batch: u64,
    /// Number of tokens of a sequence.
    pub sequence_length: u64,
    /// Number of blocks of the model, without embedding and head.
    pub blocks: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key/value heads.
    pub kv_heads: u32,
    /// True if this program computes each block whole, without tensor or context parallelism:
    /// models with an encoder, models of images, and models with value residuals.
    pub whole_blocks: bool,
    /// Number of experts of a block; 1 for dense models.
    pub experts: u32,
    /// Number formats to try.
    pub formats: Vec<Format>,
    /// True if state can lie on the host, because devices have memory of their own.
    pub host_tier: bool,
}

/// Choices that are given and not searched.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Fixed {
    /// Tensor-parallel degree.
    pub tp: Option<u32>,
    /// Pipeline stages.
    pub pp: Option<u32>,
    /// Context-parallel degree.
    pub cp: Option<u32>,
    /// Expert-parallel degree.
    pub ep: Option<u32>,
    /// Number of replicas of the sharded state.
    pub dp_replicate: Option<u32>,
    /// Number of ranks that share a state.
    pub dp_shard: Option<u32>,
    /// ZeRO stage.
    pub zero_stage: Option<u8>,
    /// Number of sequences of a micro-batch.
    pub micro_batch: Option<u32>,
    /// Number of micro-batches of a rank.
    pub accumulation: Option<u32>,
    /// Activations that all blocks keep.
    pub checkpointing: Option<Mode>,
    /// True if state may lie on the host, false if it must not.
    pub offload: Option<bool>,
    /// The rules of the trainer that is planned for; None: everything that can be lowered.
    #[serde(skip)]
    pub rules: Option<Rules>,
}

impl Fixed {
    /// True if the plan is for a trainer that is not this program.
    pub fn is_for_another_trainer(&self) -> bool {
        self.rules.as_ref().is_some_and(|rules| rules.name != "trainyard")
    }

    /// The ranks among which experts are divided: other trainers divide them inside a shard group,
    /// this program among replicas.
    pub fn expert_ranks(&self) -> ExpertRanks {
        if self.is_for_another_trainer() { ExpertRanks::Shards } else { ExpertRanks::Replicas }
    }
}

/// The activations that all blocks keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Everything.
    None,
    /// Everything but the results of cheap functions.
    Selective,
    /// The input only.
    Full,
}

/// Maximum number of tokens of a rank's micro-batch beyond its first sequence. Products with more
/// rows are no faster.
const MICRO_BATCH_TOKENS_MAX: u64 = 1 << 16;
/// Maximum number of pipeline stages.
const STAGES_MAX: u32 = 64;
/// Maximum number of chunks of an interleaved schedule.
const CHUNKS_MAX: u32 = 8;
/// Minimum number of tokens of a sequence on a rank of a context group.
const CONTEXT_TOKENS_MIN: u64 = 1024;

fn allowed<T: PartialEq + Copy>(fixed: Option<T>, value: T) -> bool {
    fixed.is_none_or(|fixed| fixed == value)
}

/// The divisors of `n` up to `limit`, ascending.
pub fn divisors(n: u64, limit: u64) -> impl Iterator<Item = u64> {
    (1..=limit.min(n)).filter(move |d| n.is_multiple_of(*d))
}

/// Every candidate. The order depends only on the arguments.
pub fn candidates(extent: &Extent, fixed: &Fixed) -> Vec<Candidate> {
    let mut all = Vec::new();
    for mesh in meshes(extent, fixed) {
        let sequences = extent.global_batch / u64::from(mesh.data_parallel());
        let micro_batch_max = (MICRO_BATCH_TOKENS_MAX / extent.sequence_length * u64::from(mesh.cp)).max(1);
        for micro_batch in divisors(sequences, micro_batch_max).map(|n| n as u32) {
            let accumulation = (sequences / u64::from(micro_batch)) as u32;
            if !allowed(fixed.micro_batch, micro_batch) || !allowed(fixed.accumulation, accumulation) {
                continue;
            }
            for &format in &extent.formats {
                let candidate = Candidate::plain(mesh, micro_batch, accumulation, format);
                ways_to_run(candidate, extent, fixed, &mut all);
            }
        }
    }
    match &fixed.rules {
        Some(rules) => rules.restrict(&all, extent.blocks),
        None => all,
    }
}

/// The meshes that divide the devices and the batch.
pub fn meshes(extent: &Extent, fixed: &Fixed) -> Vec<Mesh> {
    let mut all = Vec::new();
    let devices = u64::from(extent.devices);
    let whole_blocks = extent.whole_blocks && !fixed.is_for_another_trainer();
    for tp in divisors(devices, u64::from(extent.devices_per_node)) {
        let splits = |n: u32| u64::from(n).is_multiple_of(tp);
        if !splits(extent.heads) || !splits(extent.kv_heads) || !allowed(fixed.tp, tp as u32) {
            continue;
        }
        if whole_blocks && tp > 1 {
            continue;
        }
        for cp in divisors(devices / tp, extent.sequence_length / CONTEXT_TOKENS_MIN.min(extent.sequence_length)) {
            // Causal attention is balanced by giving each rank one piece from either end of the
            // sequence.
            if !extent.sequence_length.is_multiple_of(2 * cp) && cp > 1 || !allowed(fixed.cp, cp as u32) {
                continue;
            }
            if whole_blocks && cp > 1 {
                continue;
            }
            for pp in divisors(devices / tp / cp, u64::from(STAGES_MAX.min(extent.blocks))) {
                let dp = devices / tp / cp / pp;
                if !extent.global_batch.is_multiple_of(dp) || !allowed(fixed.pp, pp as u32) {
                    continue;
                }
                for dp_shard in shard_degrees(dp, devices_of_node(extent, tp * cp)) {
                    let expert_ranks = fixed.expert_ranks();
                    let ranks = match expert_ranks {
                        ExpertRanks::Replicas => dp / dp_shard,
                        ExpertRanks::Shards => dp_shard * cp,
                    };
                    for ep in divisors(u64::from(extent.experts), ranks) {
                        let mesh = Mesh {
                            pp: pp as u32,
                            dp_replicate: (dp / dp_shard) as u32,
                            dp_shard: dp_shard as u32,
                            cp: cp as u32,
                            tp: tp as u32,
                            ep: ep as u32,
                            expert_ranks: if ep > 1 { expert_ranks } else { ExpertRanks::default() },
                        };
                        let wanted = allowed(fixed.dp_replicate, mesh.dp_replicate)
                            && allowed(fixed.dp_shard, mesh.dp_shard)
                            && allowed(fixed.ep, mesh.ep)
                            && ranks.is_multiple_of(ep)
                            && fixed.rules.as_ref().is_none_or(|rules| rules.allows(&mesh));
                        if wanted {
                            all.push(mesh);
                        }
                    }
                }
            }
        }
    }
    all
}

/// Number of data-parallel ranks of a node if each is `width` devices.
fn devices_of_node(extent: &Extent, width: u64) -> u64 {
    (u64::from(extent.devices_per_node) / width).max(1)
}

/// The divisors of `dp` that are worth trying: those inside a node, larger ones at least four times
/// apart, and `dp`.
fn shard_degrees(dp: u64, node: u64) -> Vec<u64> {
    let mut all: Vec<u64> = Vec::new();
    for degree in divisors(dp, dp) {
        if degree <= node || degree == dp || all.last().is_none_or(|last| degree >= 4 * last) {
            all.push(degree);
        }
    }
    all
}

/// Every candidate with the mesh and batch of `base`.
fn ways_to_run(base: Candidate, extent: &Extent, fixed: &Fixed, all: &mut Vec<Candidate>) {
    for (zero_stage, reshard, prefetch, reduce_schedule) in shardings(&base, extent) {
        if !allowed(fixed.zero_stage, zero_stage) {
            continue;
        }
        for pipeline in schedules(&base, extent) {
            for checkpointing in checkpointings(extent.blocks, fixed) {
                for offload in offloads(&base, extent, fixed) {
                    all.push(Candidate {
                        zero_stage,
                        reshard,
                        prefetch,
                        reduce_schedule,
                        pipeline,
                        checkpointing,
                        offload,
                        ..base
                    });
                }
            }
        }
    }
}

type Sharding = (u8, Reshard, u32, ReduceSchedule);

fn shardings(base: &Candidate, extent: &Extent) -> Vec<Sharding> {
    use ReduceSchedule::{PerMicroBatch, PerStep};
    let shards = base.mesh.shard_degree();
    if shards == 1 {
        return vec![(0, Reshard::Always, 1, PerStep)];
    }
    let reduces: &[ReduceSchedule] = if base.accumulation > 1 { &[PerStep, PerMicroBatch] } else { &[PerStep] };
    let mut all = vec![(1, Reshard::Always, 1, PerStep)];
    let node = extent.devices_per_node / base.mesh.tp;
    for &reduce in reduces {
        all.push((2, Reshard::Always, 1, reduce));
        all.push((3, Reshard::Never, 1, reduce));
        if base.mesh.pp > 1 {
            continue;
        }
        all.push((3, Reshard::Always, 1, reduce));
        all.push((3, Reshard::Always, 2, reduce));
        if node > 1 && shards > node && shards.is_multiple_of(node) {
            all.push((3, Reshard::To(node), 2, reduce));
        }
    }
    all
}

fn schedules(base: &Candidate, extent: &Extent) -> Vec<PipelineSchedule> {
    let pp = base.mesh.pp;
    let mut all = vec![PipelineSchedule::OneForwardOneBackward];
    if pp > 1 {
        all.push(PipelineSchedule::ZeroBubble);
        // Micro-batches run in groups of pp (Narayanan et al. 2021). Chunks need not have equally
        // many blocks, and embedding and head may be chunks of their own: 126 blocks on 16 stages
        // of 8.
        let possible = |chunks: &u32| pp * chunks <= extent.blocks + 2;
        let chunks = (2..=CHUNKS_MAX).filter(possible).filter(|_| base.accumulation.is_multiple_of(pp));
        all.extend(chunks.map(|chunks| PipelineSchedule::Interleaved { chunks }));
    }
    all
}

fn checkpointings(blocks: u32, fixed: &Fixed) -> Vec<Checkpointing> {
    let of = |mode| match mode {
        Mode::None => Checkpointing::default(),
        Mode::Selective => Checkpointing { full: 0, selective: blocks },
        Mode::Full => Checkpointing { full: blocks, selective: 0 },
    };
    if let Some(mode) = fixed.checkpointing {
        return vec![of(mode)];
    }
    let mut all = vec![of(Mode::None), of(Mode::Selective)];
    for quarters in 1..4 {
        let part = blocks * quarters / 4;
        if part > 0 {
            all.push(Checkpointing { full: part, selective: blocks - part });
        }
    }
    all.push(of(Mode::Full));
    all
}

fn offloads(base: &Candidate, extent: &Extent, fixed: &Fixed) -> Vec<Offload> {
    let none = Offload::default();
    if !extent.host_tier || fixed.offload == Some(false) || base.mesh.pp > 1 {
        return vec![none];
    }
    let host = Some(Tier::Host);
    let optimizer = Offload { optimizer: host, ..none };
    let some = [optimizer, Offload { gradients: host, ..optimizer }, Offload { activations: host, ..none }];
    let nothing = (fixed.offload != Some(true)).then_some(none);
    nothing.into_iter().chain(some).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent() -> Extent {
        Extent {
            devices: 512,
            devices_per_node: 8,
            global_batch: 1024,
            sequence_length: 8192,
            blocks: 80,
            heads: 64,
            kv_heads: 8,
            whole_blocks: false,
            experts: 1,
            formats: vec![Format::Bf16],
            host_tier: true,
        }
    }

    #[test]
    fn every_candidate_covers_the_devices_and_the_batch() {
        let extent = extent();
        let all = candidates(&extent, &Fixed::default());
        assert!(all.len() > 10_000, "{}", all.len());
        for candidate in &all {
            assert_eq!(candidate.mesh.ranks(), 512);
            assert_eq!(candidate.global_batch(), 1024);
        }
        let few = Extent { devices: 16, global_batch: 16, blocks: 8, ..extent };
        let all = candidates(&few, &Fixed::default());
        let mut said: Vec<String> = all.iter().map(|candidate| format!("{candidate:?}")).collect();
        said.sort_unstable();
        said.dedup();
        assert_eq!(said.len(), all.len(), "none stands there twice");
    }

    #[test]
    fn what_is_fixed_stays() {
        let fixed = Fixed {
            tp: Some(8),
            pp: Some(4),
            zero_stage: Some(1),
            micro_batch: Some(1),
            checkpointing: Some(Mode::Full),
            offload: Some(false),
            ..Fixed::default()
        };
        let all = candidates(&extent(), &fixed);
        assert!(!all.is_empty());
        for candidate in all {
            assert_eq!((candidate.mesh.tp, candidate.mesh.pp, candidate.zero_stage), (8, 4, 1));
            assert_eq!((candidate.micro_batch, candidate.checkpointing.full), (1, 80));
            assert_eq!(candidate.offload, Offload::default());
        }
        let all = candidates(&extent(), &Fixed::default());
        assert!(all.iter().all(|candidate| candidate.runnable().is_yes()));
        assert!(all.iter().any(|candidate| candidate.mesh.tp > 1 && candidate.mesh.pp > 1));
        assert!(all.iter().any(|candidate| candidate.mesh.cp > 1));
        // Experts are divided among replicas, which is what this program runs; by other trainers
        // inside a shard group.
        let mixture = Extent { experts: 8, ..extent() };
        let divides = |fixed| meshes(&mixture, &fixed).into_iter().filter(|mesh| mesh.ep > 1).collect::<Vec<_>>();
        let own = divides(Fixed::default());
        assert!(!own.is_empty() && own.iter().all(Mesh::experts_of_replicas));
        let titan = crate::stacks::StackProfile::named("torchtitan").unwrap().rules;
        let others = divides(Fixed { rules: Some(titan), ..Fixed::default() });
        assert!(!others.is_empty() && !others.iter().any(Mesh::experts_of_replicas));
        // Offload to the host is for GPUs; CPU cores have no other host.
        let on_host = |candidate: &Candidate| candidate.offload != Offload::default();
        assert!(all.iter().any(on_host));
        assert!(!candidates(&Extent { host_tier: false, ..extent() }, &Fixed::default()).iter().any(on_host));
        // Other trainers may divide the blocks of a T5.
        let whole = Extent { whole_blocks: true, ..extent() };
        let divides = |fixed| meshes(&whole, &fixed).iter().any(|mesh| mesh.tp * mesh.cp > 1);
        let megatron = crate::stacks::StackProfile::named("megatron").unwrap().rules;
        assert!(!divides(Fixed::default()) && divides(Fixed { rules: Some(megatron), ..Fixed::default() }));
    }

    #[test]
    fn one_device_has_no_mesh_to_choose() {
        let extent = Extent { devices: 1, devices_per_node: 1, global_batch: 8, host_tier: false, ..extent() };
        assert_eq!(meshes(&extent, &Fixed::default()), [Mesh::default()]);
        let micro: Vec<u32> = candidates(&extent, &Fixed::default()).iter().map(|c| c.micro_batch).collect();
        assert!([1, 2, 4, 8].iter().all(|n| micro.contains(n)));
    }
}
