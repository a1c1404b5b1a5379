//! `[parallel]`, `[update]` and `[compression]`: the ranks of a run, how they divide model, batch
//! and state, and what they exchange when.

use super::inner_steps::InnerSteps;
use super::section::section;
use super::sections::{Collectives, ReduceDtype, ReduceSchedule};
use super::value::{Cuts, Reshard, choices};
use std::path::PathBuf;

choices! {
    /// The order of forwards and backwards in a pipeline.
    PipelineSchedule {
        /// All forwards, then all backwards (Huang et al. 2019).
        Gpipe = "gpipe",
        /// One forward, one backward (Narayanan et al. 2019).
        OneForwardOneBackward = "1f1b",
        /// One forward, one backward over several stretches of layers per stage (Narayanan et al.
        /// 2021): a smaller bubble, more messages.
        Interleaved = "interleaved",
        /// Backward in two halves, of which the one for weights fills the bubble (Qi et al. 2023,
        /// ZB-H1).
        ZeroBubble = "zero_bubble",
        /// Backward in two halves over two stretches of layers per stage, laid out as a V (Qi et
        /// al. 2023, ZB-V): no bubble where forward and both halves take equally long.
        ZeroBubbleV = "zero_bubble_v",
        /// Pairs of a forward and a backward over the same layout (DeepSeek-AI 2024, DualPipe cut
        /// in half).
        DualPipeV = "dual_pipe_v",
    }
}

choices! {
    /// The exchange of context-parallel ranks for attention.
    ContextExchange {
        /// Each rank gathers the keys and values of all ranks for its own queries. Goes with any
        /// number of heads.
        AllGather = "all_gather",
        /// The same, and attention to a rank's own keys is computed while the others are on their
        /// way. It hides a slow network, and keeps the part and its statistics for backward.
        AllGatherOverlapped = "all_gather_overlapped",
        /// Ranks exchange rows for heads before attention and back after it (Jacobs et al. 2023,
        /// DeepSpeed Ulysses). The degree must divide the numbers of query and of key/value
        /// heads.
        AllToAll = "all_to_all",
    }
}

section! {
    /// The ranks and the state that each of them keeps. Ranks are threads of one process, or
    /// processes that `trainyard launch`, torchrun, srun or mpirun started.
    ParallelSection = "parallel" {
        /// Number of ranks. Unset: the number of processes that were started together, else the
        /// product of the degrees.
        #[elsewhere("world_size", "num_processes", "nproc_per_node")]
        ranks: Option<usize> = None;
        /// Number of replicas: groups of ranks with the same state (DDP). Unset: `ranks` / the
        /// shard degree.
        #[elsewhere("dp_replicate_size", "data_parallel_size")]
        data_parallel_replicate_degree: Option<usize> = None;
        /// Number of ranks that share one state (FSDP). Unset: `ranks` / the replicate degree; 1
        /// without `zero_stage`.
        #[elsewhere("dp_shard_size", "fsdp_size", "sharding_factor")]
        data_parallel_shard_degree: Option<usize> = None;
        /// The sharded state: 0 none, 1 optimizer state and masters, 2 gradients as well, 3
        /// parameters as well. Unset: 3 when the shard degree is above 1, else 0.
        #[elsewhere("stage", "zero_optimization", "data_parallel_sharding_strategy", "fsdp_sharding_strategy")]
        zero_stage: Option<usize> = None;
        /// zero_stage 3: after its forward, drop a unit's gathered parameters (true), keep them for
        /// backward (false), or keep them on groups of this many neighbouring ranks (a number).
        /// Unset: true.
        #[elsewhere("fsdp_reshard_after_forward")]
        reshard_after_forward: Option<Reshard> = None;
        /// Number of units that are gathered and fetched ahead of the one that computes, with
        /// zero_stage 3 or offloaded parameters, activations or gradients. Unset: 1.
        #[elsewhere("stage3_prefetch_bucket_size", "fsdp_forward_prefetch")]
        prefetch: Option<usize> = None;
        /// The time at which gradients are summed over ranks.
        #[elsewhere("overlap_comm", "require_backward_grad_sync")]
        reduce_schedule: ReduceSchedule = ReduceSchedule::Step;
        /// The type of gradients while ranks exchange them.
        #[elsewhere("mixed_precision_reduce", "grad_reduce_in_fp32", "communication_data_type")]
        reduce_dtype: ReduceDtype = ReduceDtype::F32;
        /// The transport of tensors between ranks with `compute.device = "cuda"`. Ranks on
        /// processors use shared memory, TCP or MPI.
        #[elsewhere("distributed_backend", "ddp_backend", "backend", "comm_backend")]
        collectives: Collectives = Collectives::Auto;
        /// Seconds that ranks wait for each other, and that one instruction may take, before the
        /// run ends with a report of where each rank is. Saving and evaluating count.
        #[elsewhere("timeout", "ddp_timeout", "init_timeout_seconds", "distributed_timeout_minutes")]
        deadline_seconds: f64 = 600.0;
        /// Send data between ranks with checksums, so that damaged data end the run. Costs one more
        /// pass over the data at each end.
        verify: bool = false;
        /// Add gradients up inside each host before they travel between hosts, where every host
        /// holds the
        /// same power of two of replicas, one after the other. Changes no bit.
        #[elsewhere("hierarchical_allreduce")]
        hierarchical_sums: bool = true;
        /// Let a rank that waits for another work for it meanwhile, where ranks are threads of one
        /// process and each of their threads has a core. Changes no bit.
        lend_threads: bool = true;
        /// Number of pipeline stages: groups of ranks that each hold a stretch of the model's
        /// layers. Micro-batches pass through them one after the other.
        #[elsewhere("pipeline_model_parallel_size", "pp_size")]
        pipeline_parallel_degree: usize = 1;
        /// The order of forwards and backwards in a pipeline. Unset: `1f1b`.
        #[elsewhere("pipeline_parallel_schedule")]
        pipeline_schedule: Option<PipelineSchedule> = None;
        /// A file with a table of your own in place of `pipeline_schedule`: a line per stage, with
        /// cells like `0F1` (stretch, action, micro-batch), as PyTorch's schedules are written.
        #[elsewhere("pipeline_parallel_schedule_csv")]
        pipeline_schedule_file: Option<PathBuf> = None;
        /// Stretches of layers per stage with `pipeline_schedule = "interleaved"`. Unset: 2.
        #[elsewhere("virtual_pipeline_model_parallel_size", "pipeline_parallel_layers_per_stage")]
        pipeline_chunks: Option<usize> = None;
        /// The first unit of every stretch of layers but the first, ascending: `[4, 8]` makes
        /// three. Unit 0 is the embedding, 1 the first block, the last the head. Unset: equal work
        /// for each stretch.
        #[elsewhere("module_fqns_per_model_part", "pipeline_parallel_split_points")]
        pipeline_cuts: Option<Cuts> = None;
        /// Number of ranks that share every layer's products, each with a part of every weight.
        #[elsewhere("tensor_model_parallel_size", "tp_size")]
        tensor_parallel_degree: usize = 1;
        /// With tensor parallelism, divide the rows of norms and residuals among the same ranks
        /// (Korthikanti et al. 2022): less memory, the same traffic. Unset: true.
        #[elsewhere("disable_loss_parallel", "sequence_parallel_enabled")]
        sequence_parallel: Option<bool> = None;
        /// Number of ranks that share each sequence, each with a part of its tokens.
        #[elsewhere("context_parallel_size", "cp_size")]
        context_parallel_degree: usize = 1;
        /// The exchange of context-parallel ranks for attention. Unset: `all_gather`.
        #[elsewhere("cp_comm_type", "context_parallel_rotate_method", "ulysses_degree", "ulysses_sequence_parallel_size")]
        context_parallel_exchange: Option<ContextExchange> = None;
        /// With context parallelism by gathered keys, give each rank an early and a late part of
        /// each sequence, so that all have equal work under the causal mask. Unset: true.
        #[elsewhere("context_parallel_load_balancer")]
        context_parallel_load_balance: Option<bool> = None;
        /// Number of replicas that share the experts of every layer, each with equally many.
        #[elsewhere("expert_model_parallel_size", "ep_size", "moe_ep_size")]
        expert_parallel_degree: usize = 1;
    }
}

choices! {
    /// The rule by which replicas come to one set of parameters.
    UpdateRule {
        /// Gradients are summed over all ranks in every step.
        Synchronous = "synchronous",
        /// Each replica takes `every` steps by itself; then their parameters are averaged (Stich
        /// 2019). The result differs from that of synchronous steps.
        Local = "local",
        /// As `local`, with the mean change as the gradient of an outer step with Nesterov momentum
        /// (Douillard et al. 2023). The result differs from that of synchronous steps.
        Diloco = "diloco",
        /// Every rank pushes gradients to servers on `servers` of the ranks, which make the
        /// updates, and pulls parameters, without waiting for other ranks (Li et al. 2014). With a
        /// `staleness` of 0 the result has the bits of synchronous steps.
        Server = "server",
    }
}

section! {
    /// The rule by which replicas come to one set of parameters: `data_parallel_replicate_degree`
    /// of them, each with any layout inside.
    UpdateSection = "update" {
        /// The rule.
        #[elsewhere("semi_sync_method")]
        rule: UpdateRule = UpdateRule::Synchronous;
        /// Steps that each replica takes by itself before their changes are averaged. The last step
        /// of a run averages too. With `server` and a staleness or back-up workers: steps until all
        /// workers wait for all updates and hear of a request to stop. Unset, with these rules: 50.
        #[elsewhere("sync_steps", "sync_every", "local_steps")]
        every: Option<usize> = None;
        /// Steps that each replica makes in a round of `every`: all (`equal`); fewer the slower the
        /// replica was in the round before (`by_speed`); or a number for each replica, of which
        /// `every` is the largest. Changes are averaged in proportion to these numbers (McMahan et
        /// al. 2017). Every sample is taken once.
        inner_steps: InnerSteps = InnerSteps::Equal;
        /// Learning rate of the outer step of `diloco`. Unset: 0.7.
        #[elsewhere("outer_lr")]
        outer_learning_rate: Option<f64> = None;
        /// Nesterov momentum of the outer step of `diloco`. Unset: 0.9.
        outer_momentum: Option<f64> = None;
        /// Fragments of the model, whose outer steps take turns (streaming DiLoCo, Douillard et al.
        /// 2025): fragment i has the units i, i + `fragments`, i + 2 `fragments` ... Unset: 1.
        #[elsewhere("num_fragments")]
        fragments: Option<usize> = None;
        /// Let the changes of an outer step travel beside a step, from before its forward. Their
        /// mean is mixed into the result of the step.
        overlap: bool = false;
        /// With `overlap`: the share of a replica's own parameters in those with which it goes on;
        /// the rest comes from the outer step. Unset: 0.5.
        #[elsewhere("fragment_update_alpha")]
        mixing: Option<f64> = None;
        /// Ranks that host a server, each with an equal part of the masters and of the optimizer
        /// state: the first ones. It divides the number of ranks. Unset, with `server`: all ranks.
        #[elsewhere("num_servers", "ps_num")]
        servers: Option<usize> = None;
        /// The most updates that a worker's parameters may lack when it begins a step (Ho et al.
        /// 2013). 0: none. Unset, with `server`: 0.
        #[elsewhere("staleness_bound", "max_staleness")]
        staleness: Option<usize> = None;
        /// Workers without whose gradients a step's update is made if they are late (Chen et al.
        /// 2016). Late gradients are dropped, and their samples count as seen. With a staleness of
        /// 0. Unset: 0.
        #[elsewhere("backup_workers")]
        backup_workers: Option<usize> = None;
    }
}

choices! {
    /// The form of messages between ranks.
    CompressionCodec {
        /// f32, or `parallel.reduce_dtype`.
        None = "none",
        /// 16 bits per element.
        Bf16 = "bf16",
        /// 8 bits per element, and a scale for each 256.
        Int8 = "int8",
        /// 4 bits per element, and a scale for each 256.
        Int4 = "int4",
        /// Signs, and the mean magnitude of each 256 (Seide et al. 2014).
        OneBit = "one_bit",
        /// The largest elements of each 4,096, in bf16, with their places (Lin et al. 2018).
        TopK = "top_k",
        /// Low-rank factors of each matrix (PowerSGD, Vogels et al. 2019); for gradients only.
        PowerSgd = "power_sgd",
    }
}

choices! {
    /// The messages that are encoded.
    CompressionOver {
        /// Those in a shard group and those between replicas.
        All = "all",
        /// Those between replicas, which are on different nodes as a rule.
        Replicas = "replicas",
    }
}

choices! {
    /// The rounding between two codes of `int8` and `int4`.
    RoundingOfCodes {
        /// To the nearest.
        Nearest = "nearest",
        /// Up or down by chance, with the value as the mean.
        Stochastic = "stochastic",
    }
}

section! {
    /// The form of gradients, parameters, their changes, and activations while ranks exchange them.
    /// In sums each rank's contribution is encoded, and sums are formed in f32. A sum that goes to
    /// other replicas is encoded once more.
    CompressionSection = "compression" {
        /// The codec of gradients. It changes the result.
        #[elsewhere("zero_quantized_gradients", "ddp_comm_hook", "communication_hook", "comm_backend_name")]
        gradients: CompressionCodec = CompressionCodec::None;
        /// The codec of parameters while the ranks of a shard group gather them, with
        /// `parallel.zero_stage` 3: `int8`, `int4`, or `bf16` where compute is f32. Masters stay
        /// exact. It changes the result.
        #[elsewhere("zero_quantized_weights")]
        parameters: CompressionCodec = CompressionCodec::None;
        /// The codec of what goes from one pipeline stage to the next: `int8`, `int4`, or `bf16`
        /// where compute is f32. It changes the result.
        activations: CompressionCodec = CompressionCodec::None;
        /// The codec of the gradients that go back from a pipeline stage to the one before. Unset:
        /// that of `activations`.
        activation_gradients: Option<CompressionCodec> = None;
        /// The codec of parameter changes in outer steps, with `update.rule` `local` or `diloco`.
        /// It changes the result.
        #[elsewhere("should_quantize")]
        outer: CompressionCodec = CompressionCodec::None;
        /// The messages that are encoded.
        over: CompressionOver = CompressionOver::All;
        /// The share of elements that `top_k` sends. Unset: 0.01.
        #[elsewhere("compress_ratio", "sparsity")]
        top_k_density: Option<f64> = None;
        /// The momentum that each rank applies to its gradients before `top_k` chooses (momentum
        /// correction, Lin et al. 2018), in place of the optimizer's: with `sgd` and
        /// `optimizer.momentum` 0. Takes 4 bytes per element of a rank's gradient. Unset: 0, none.
        top_k_momentum: Option<f64> = None;
        /// Clear the momentum of each element that is sent (momentum factor masking). Unset: true.
        #[elsewhere("momentum_masking")]
        top_k_momentum_masking: Option<bool> = None;
        /// Columns of the factors that `power_sgd` sends of each matrix. Unset: 4.
        #[elsewhere("matrix_approximation_rank")]
        rank: Option<usize> = None;
        /// Add to each message what the ones before left out. Takes 4 bytes per element of a rank's
        /// gradient, and more with several replicas. Unset: true with `int4`, `one_bit`, `top_k`
        /// and `power_sgd`.
        #[elsewhere("use_error_feedback")]
        error_feedback: Option<bool> = None;
        /// The rounding between two codes of `int8` and `int4`.
        rounding: RoundingOfCodes = RoundingOfCodes::Nearest;
        /// Number of first steps in which gradients travel as they are, because large first changes
        /// suffer most from what a codec leaves out. Unset: 0.
        #[elsewhere("start_powerSGD_iter", "start_iter", "freeze_step", "schedule_offset")]
        warmup_steps: Option<u64> = None;
    }
}
