//! The divisions of a configuration among ranks, and their settings.

/// The numbers of a configuration that its ways start from.
#[derive(Clone, Debug)]
pub struct Base {
    /// Sequences of a step, over all ranks.
    pub global_batch: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Tokens of a sequence.
    pub sequence_length: usize,
    /// Pipeline stages.
    pub pipeline: usize,
    /// Context-parallel degree.
    pub context: usize,
    /// True if ranks can divide sequences here: on processors.
    pub divides_sequences: bool,
    /// Query and key/value heads, for ranks that exchange rows of sequences for heads.
    pub heads: [usize; 2],
    /// Tensor-parallel degree.
    pub tensor: usize,
    /// Expert-parallel degree.
    pub expert_ranks: usize,
    /// Experts of a layer that ranks can divide here: on processors; 1 without.
    pub experts: usize,
    /// Numbers of ranks that are tried: up to the cores or GPUs (or what the degrees above make),
    /// or the number of processes, where that is given.
    pub ranks: std::ops::RangeInclusive<usize>,
}

/// The division of a way among ranks: pipeline stages, ranks that share every sequence and ranks
/// that share every product, then, of the ranks that see different data, replicas and shards, ZeRO
/// stage, and resharding after forward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sharing {
    pub(super) pipeline: Option<&'static str>,
    pub(super) stages: usize,
    pub(super) context: usize,
    /// The exchange of the ranks that share a sequence, as a configuration names it.
    exchange: &'static str,
    pub(super) tensor: usize,
    pub(super) data: usize,
    pub(super) shard: usize,
    /// Replicas that share the experts.
    pub(super) expert_ranks: usize,
    pub(super) stage: usize,
    reshard: bool,
}

impl Sharing {
    /// Ranks of the whole division.
    pub(super) fn ranks(&self) -> usize {
        self.stages * self.context * self.tensor * self.data
    }
}

/// The fewest tokens of a sequence that a context-parallel rank gets, unless the configuration asks
/// for fewer. For shorter parts, communication takes longer than the division saves.
const CONTEXT_TOKENS_MIN: usize = 1024;

/// The most ranks that divide a model among them, by stages, sequences and matrix products. On one
/// machine, communication between more ranks takes longer than the division saves.
const MODEL_RANKS_MAX: usize = 8;

/// Orders of a pipeline that are tried: the usual one, and the one with the smallest bubble of
/// those with one stretch of layers per stage.
const PIPELINES: [&str; 2] = ["1f1b", "zero_bubble"];

/// Upper limit for the micro-batches of a rank: more are no faster, and take long to price.
const ACCUMULATION_MAX: usize = 32;

/// The possible divisions among ranks. The ranks that see different data divide the batch.
pub(super) fn sharings(base: &Base) -> Vec<Sharing> {
    let own = base.pipeline * base.context * base.tensor;
    let mut all = Vec::new();
    for ranks in base.ranks.clone() {
        let divisors = |of: usize| (1..=of).filter(move |part| of.is_multiple_of(*part));
        for stages in divisors(ranks) {
            let parts = divisors(ranks / stages).filter(|context| base.divides_sequences_by(*context));
            for (context, tensor) in parts.flat_map(|c| divisors(ranks / stages / c).map(move |t| (c, t))) {
                let model = stages * context * tensor;
                let data = ranks / model;
                if model > own.max(MODEL_RANKS_MAX) || !base.global_batch.is_multiple_of(data) {
                    continue;
                }
                let orders: Vec<Option<&str>> = match stages {
                    1 => vec![None],
                    _ => PIPELINES.map(Some).into(),
                };
                for pipeline in orders {
                    let divided = divided_state(pipeline, [stages, context, tensor, data]).into_iter();
                    let divided = divided.flat_map(|sharing| divided_experts(base, sharing));
                    all.extend(divided.flat_map(|sharing| exchanges(base, sharing)));
                }
            }
        }
    }
    all
}

impl Base {
    /// True if `context` ranks can share every sequence, with enough tokens for each.
    fn divides_sequences_by(&self, context: usize) -> bool {
        let enough = context == self.context || self.sequence_length / context >= CONTEXT_TOKENS_MIN;
        context == 1 || self.divides_sequences && self.sequence_length.is_multiple_of(2 * context) && enough
    }

    /// True if the ranks that share a sequence can exchange its rows for heads.
    fn has_heads_for(&self, sharing: Sharing) -> bool {
        let of_a_group = |heads: usize| heads.is_multiple_of(sharing.context * sharing.tensor);
        sharing.context > 1 && self.heads.into_iter().all(of_a_group)
    }
}

/// The ways of dividing the state among the ranks that see different data. Together with stages or
/// split sequences or products only replicas and ZeRO-1 are tried: gradients and parameters are
/// small then.
fn divided_state(pipeline: Option<&'static str>, [stages, context, tensor, data]: [usize; 4]) -> Vec<Sharing> {
    let (exchange, shard, expert_ranks, stage, reshard) = ("all_gather", 1, 1, 0, true);
    let whole = Sharing { pipeline, stages, context, exchange, tensor, data, shard, expert_ranks, stage, reshard };
    let mut all = vec![whole];
    let kinds = [(1, true), (2, true), (3, true), (3, false)];
    let kinds = if stages * context * tensor > 1 { &kinds[..1] } else { &kinds[..] };
    for shard in (2..=data).filter(|shard| data.is_multiple_of(*shard)) {
        all.extend(kinds.iter().map(|(stage, reshard)| Sharing { shard, stage: *stage, reshard: *reshard, ..whole }));
    }
    all
}

/// The ways of dividing experts among the replicas of a division.
fn divided_experts(base: &Base, sharing: Sharing) -> impl Iterator<Item = Sharing> + use<> {
    let replicas = sharing.data / sharing.shard;
    let experts = base.experts;
    let divides = move |ranks: &usize| replicas.is_multiple_of(*ranks) && experts.is_multiple_of(*ranks);
    (1..=replicas).filter(divides).map(move |expert_ranks| Sharing { expert_ranks, ..sharing })
}

/// A division whose ranks that share a sequence gather keys, before attention or beside a part of
/// it, or, where they can, exchange rows for heads.
fn exchanges(base: &Base, sharing: Sharing) -> impl Iterator<Item = Sharing> + use<> {
    let overlapped = (sharing.context > 1).then_some("all_gather_overlapped");
    let by_heads = base.has_heads_for(sharing).then_some("all_to_all");
    let others = overlapped.into_iter().chain(by_heads).map(move |exchange| Sharing { exchange, ..sharing });
    std::iter::once(sharing).chain(others)
}

/// The micro-batches of a division. A pipeline needs at least as many as it has stages to be full.
pub(super) fn micro_batches(base: &Base, sharing: Sharing) -> Vec<usize> {
    let of_a_rank = base.global_batch / sharing.data;
    let few = |micro: &usize| of_a_rank / micro <= ACCUMULATION_MAX || *micro == base.micro_batch;
    let full = |micro: &usize| of_a_rank / micro >= sharing.stages || *micro == 1;
    (1..=of_a_rank).filter(|micro| of_a_rank.is_multiple_of(*micro)).filter(few).filter(full).collect()
}

/// The settings of a division with micro-batches of `micro` sequences, the checkpointing `mode`,
/// and sums per micro-batch if `each`.
pub(super) fn settings(base: &Base, sharing: Sharing, micro: usize, mode: &str, each: bool) -> Vec<String> {
    let Sharing { pipeline, stages, context, exchange, tensor, data, shard, expert_ranks, stage, reshard } = sharing;
    let mut sets = vec![
        format!("training.global_batch_size={}", base.global_batch),
        format!("training.micro_batch_size={micro}"),
        format!("training.accumulation_steps={}", base.global_batch / data / micro),
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
    if stages > 1 || base.pipeline > 1 {
        sets.push(format!("parallel.pipeline_parallel_degree={stages}"));
    }
    sets.extend(pipeline.map(|order| format!("parallel.pipeline_schedule={order}")));
    if context > 1 || base.context > 1 {
        sets.push(format!("parallel.context_parallel_degree={context}"));
    }
    if context > 1 {
        sets.push(format!("parallel.context_parallel_exchange={exchange}"));
    }
    if expert_ranks > 1 || base.expert_ranks > 1 {
        sets.push(format!("parallel.expert_parallel_degree={expert_ranks}"));
    }
    if tensor > 1 || base.tensor > 1 {
        sets.push(format!("parallel.tensor_parallel_degree={tensor}"));
    }
    if tensor > 1 {
        // Rows that do not divide evenly stay whole.
        let rows = (micro * base.sequence_length / context).is_multiple_of(tensor);
        sets.push(format!("parallel.sequence_parallel={rows}"));
    }
    sets
}
