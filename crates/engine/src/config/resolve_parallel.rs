//! Resolves `[parallel]`: from ranks and degrees to a mesh and the state that each rank keeps.

use super::resolve::Resolver;
use super::sections::*;
use super::sections_fine_tuning::{AdapterMethod, BaseDtype};
use super::sections_parallel::*;
use super::{Batch, Cuts, DeviceKind, Inputs, ModelSource, Reshard};
use crate::shape::known_schedule;
use serde::Serialize;
use std::fmt;

/// The most ranks, and the largest degree.
const RANKS_MAX: u64 = 1 << 16;

/// The ranks of a run and the state that each of them keeps, completely resolved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Parallel {
    /// Number of all ranks.
    pub ranks: usize,
    /// Number of replicas: groups of ranks with the same state. Gradients are summed over them.
    pub replicate: usize,
    /// Shard degree: ranks of a group that share one state.
    pub shard: usize,
    /// Ranks that share each sequence.
    pub context: usize,
    /// The exchange of these ranks for attention.
    pub exchange: ContextExchange,
    /// True if each of them has an early and a late part of it.
    pub balanced: bool,
    /// Ranks that share every product.
    pub tensor: usize,
    /// True if these ranks divide the rows of norms and residuals too.
    pub sequence: bool,
    /// Replicas that share the experts of every layer: neighbours.
    pub experts: usize,
    /// Pipeline stages.
    pub pipeline: usize,
    /// The order of forwards and backwards of a pipeline.
    pub schedule: PipelineSchedule,
    /// Stretches of layers per stage.
    pub chunks: usize,
    /// ZeRO stage. 0: nothing is sharded; 1: masters and optimizer state; 2: gradients as well; 3:
    /// parameters as well.
    pub zero_stage: usize,
    /// The part of a gathered unit that a rank keeps between forward and backward.
    pub reshard_after_forward: Reshard,
    /// Units gathered ahead of their use.
    pub prefetch: usize,
    /// Schedule of the gradient reductions over ranks.
    pub reduce_schedule: ReduceSchedule,
    /// Type of gradients while they travel between ranks.
    pub reduce_dtype: ReduceDtype,
    /// True if micro-batches are summed along a tree that does not depend on the number of ranks
    /// (`training.elastic_bits`).
    pub elastic: bool,
}

impl Parallel {
    /// Ranks that see different data.
    pub fn data_degree(&self) -> usize {
        self.replicate * self.shard
    }
}

/// `8 ranks = 2 stages x 2 replicas x 2 shards, ZeRO stage 3`; without a pipeline no stages.
impl fmt::Display for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parallel { ranks, pipeline, replicate, shard, context, tensor, experts, zero_stage, .. } = self;
        let stages = if *pipeline > 1 { format!("{pipeline} stages x ") } else { String::new() };
        let sequence = if *context > 1 { format!(" x {context} parts of every sequence") } else { String::new() };
        let parts = if *tensor > 1 { format!(" x {tensor} parts of every product") } else { String::new() };
        let experts = if *experts > 1 { format!(", experts over {experts} replicas") } else { String::new() };
        write!(
            f,
            "{ranks} ranks = {stages}{replicate} replicas x {shard} shards{sequence}{parts}{experts}, ZeRO stage {zero_stage}"
        )
    }
}

impl Resolver {
    /// Resolves degrees, ZeRO stage and the keys that depend on them.
    pub(super) fn parallel(&mut self, inputs: &Inputs) -> Parallel {
        let section = self.config.parallel.clone();
        self.seconds("parallel.deadline_seconds", Some(section.deadline_seconds));
        if section.collectives == Collectives::Nccl && self.config.compute.device == DeviceKind::Cpu {
            let message = "parallel.collectives = \"nccl\" exchanges the memory of GPUs, and compute.device is \"cpu\": set \
                           compute.device = \"cuda\", or leave it at \"auto\"";
            self.problem("parallel.collectives", message.to_owned());
        }
        if self.config.training.cuda_graphs == CudaGraphs::On && self.config.compute.device == DeviceKind::Cpu {
            let message = "training.cuda_graphs = \"on\" captures what a GPU is given, and compute.device is \"cpu\": set \
                           compute.device = \"cuda\", or leave it at \"off\"";
            self.problem("training.cuda_graphs", message.to_owned());
        }
        let pipeline = section.pipeline_parallel_degree;
        self.count("parallel.pipeline_parallel_degree", Some(pipeline as u64), 1, RANKS_MAX);
        let pipeline = pipeline.clamp(1, RANKS_MAX as usize);
        let (schedule, chunks) = self.pipeline(&section, pipeline);
        self.cuts(&section, pipeline, schedule, chunks, inputs);
        let (context, exchange, balanced) = self.context(&section);
        let (tensor, sequence) = self.tensor(&section);
        let (replicate, shard) = self.degrees(&section, [pipeline, context, tensor], inputs);
        let (stage, because) = match shard {
            1 => (0, "nothing is sharded".to_owned()),
            n => (3, format!("data_parallel_shard_degree is {n}")),
        };
        let stage = self.settle("parallel.zero_stage", &section.zero_stage, stage, because);
        self.count("parallel.zero_stage", Some(stage as u64), 0, 3);
        if stage == 0 && shard > 1 {
            let message = format!(
                "parallel.zero_stage = 0 shards nothing, but parallel.data_parallel_shard_degree is {shard}: take a stage from 1 to 3, or replicate"
            );
            self.problem("parallel.zero_stage", message);
        }
        let mut parallel = Parallel {
            ranks: pipeline * replicate * shard * context * tensor,
            replicate,
            shard,
            context,
            exchange,
            balanced,
            tensor,
            sequence,
            experts: 1,
            pipeline,
            schedule,
            chunks,
            zero_stage: stage,
            reshard_after_forward: Reshard::Always,
            prefetch: 1,
            reduce_schedule: section.reduce_schedule,
            reduce_dtype: section.reduce_dtype,
            elastic: self.config.training.elastic_bits,
        };
        self.gathers(&section, &mut parallel);
        parallel.experts = self.expert_degree(&section, &parallel);
        let whole = self.config.optimizer.name.looks_at_matrices();
        if stage >= 1 && shard * context > 1 && whole {
            let message = format!(
                "optimizer.name = \"{}\" looks at whole matrices, which parallel.zero_stage = {stage} cuts into shards: use \
                 parallel.zero_stage = 0 with it, or adamw, sgd or lion",
                self.config.optimizer.name
            );
            self.problem("optimizer.name", message);
        }
        parallel
    }

    /// The expert-parallel degree.
    fn expert_degree(&mut self, section: &ParallelSection, parallel: &Parallel) -> usize {
        let (key, degree) = ("parallel.expert_parallel_degree", section.expert_parallel_degree);
        self.count(key, Some(degree as u64), 1, RANKS_MAX);
        let degree = degree.clamp(1, RANKS_MAX as usize);
        if degree == 1 {
            return 1;
        }
        let config = &self.config;
        let Parallel { replicate, shard, pipeline, context, tensor, elastic, .. } = *parallel;
        let whole_matrices = config.optimizer.name.looks_at_matrices();
        let lacks = [
            (elastic, "training.elastic_bits = false"),
            (config.update.rule != UpdateRule::Synchronous, "update.rule = \"synchronous\""),
            (config.compression.gradients != CompressionCodec::None, "compression.gradients = \"none\""),
            (config.offload.gradients != OffloadTier::None, "memory.offload.gradients = \"none\""),
            (config.fine_tuning.adapter != AdapterMethod::None, "fine_tuning.adapter = \"none\""),
            (whole_matrices, "optimizer.name = \"adamw\", \"sgd\" or \"lion\", because ranks hold parts of matrices"),
        ];
        let lacks: Vec<&str> = lacks.iter().filter(|(asked, _)| *asked).map(|(_, need)| *need).collect();
        if !lacks.is_empty() {
            let message = format!("{key} = {degree} does not run with these settings: set {}", lacks.join("; "));
            self.problem(key, message);
        } else if !replicate.is_multiple_of(degree) {
            let (of_shards, how) = match shard {
                1 => (
                    String::new(),
                    format!("make parallel.ranks a multiple of {}", degree * pipeline * context * tensor),
                ),
                _ => (
                    format!(" of {shard} shards each"),
                    format!("make parallel.data_parallel_replicate_degree a multiple of {degree}"),
                ),
            };
            let message = format!(
                "{key} = {degree} divides experts among replicas, of which there are {replicate}{of_shards}: {how}"
            );
            self.problem(key, message);
        }
        degree
    }

    /// The schedule of a pipeline of `stages`, and the stretches of layers per stage.
    fn pipeline(&mut self, section: &ParallelSection, stages: usize) -> (PipelineSchedule, usize) {
        let one = PipelineSchedule::OneForwardOneBackward;
        if stages == 1 {
            let because = "pipeline_parallel_degree is 1";
            self.unused("parallel.pipeline_schedule", &section.pipeline_schedule, because);
            self.unused("parallel.pipeline_schedule_file", &section.pipeline_schedule_file, because);
            self.unused("parallel.pipeline_chunks", &section.pipeline_chunks, because);
            self.unused("parallel.pipeline_cuts", &section.pipeline_cuts, because);
            return (one, 1);
        }
        if section.pipeline_schedule_file.is_some() {
            let because = "parallel.pipeline_schedule_file gives the order";
            self.unused("parallel.pipeline_schedule", &section.pipeline_schedule, because);
            self.unused("parallel.pipeline_chunks", &section.pipeline_chunks, because);
            return (one, 1);
        }
        let because = "the least memory for its speed";
        let schedule = self.settle("parallel.pipeline_schedule", &section.pipeline_schedule, one, because);
        if schedule != PipelineSchedule::Interleaved {
            let because = format!("pipeline_schedule is \"{schedule}\"");
            self.unused("parallel.pipeline_chunks", &section.pipeline_chunks, &because);
            return (schedule, 1);
        }
        let because = "the fewest that interleave";
        let chunks = self.settle("parallel.pipeline_chunks", &section.pipeline_chunks, 2, because);
        self.count("parallel.pipeline_chunks", Some(chunks as u64), 1, 1 << 10);
        (schedule, chunks)
    }

    /// Checks `pipeline_cuts` against the number of stretches, and of units where it is known. The
    /// lowering checks those of a schedule's file.
    fn cuts(
        &mut self,
        section: &ParallelSection,
        stages: usize,
        schedule: PipelineSchedule,
        chunks: usize,
        inputs: &Inputs,
    ) {
        let Some(Cuts(cuts)) = section.pipeline_cuts.as_ref().filter(|_| stages > 1) else { return };
        let key = "parallel.pipeline_cuts";
        let of_a_stage = match schedule {
            PipelineSchedule::ZeroBubbleV | PipelineSchedule::DualPipeV => 2,
            _ => chunks,
        };
        let stretches = stages.saturating_mul(of_a_stage);
        let layers = inputs.pretrained.as_ref().map(|pretrained| pretrained.layers).or(self.config.model.layers);
        let units = layers.map_or(usize::MAX, |layers| layers.saturating_add(2));
        let ascending = cuts.is_sorted_by(|a, b| a < b) && cuts.first() != Some(&0);
        let inside = cuts.last().is_none_or(|last| *last < units);
        if section.pipeline_schedule_file.is_none() && cuts.len() + 1 != stretches {
            let message = format!(
                "{key} makes {} stretches of layers, and {stages} stages of {of_a_stage} have {stretches}: give {} units",
                cuts.len() + 1,
                stretches - 1
            );
            self.problem(key, message);
        } else if !ascending || !inside {
            let last = if layers.is_some() { format!(", to {}, the head", units - 1) } else { String::new() };
            self.problem(key, format!("{key} = {cuts:?}: units go up from 1, the first block{last}"));
        }
    }

    /// The context-parallel degree, the exchange of its ranks, and true if they have early and late
    /// parts.
    fn context(&mut self, section: &ParallelSection) -> (usize, ContextExchange, bool) {
        let degree = section.context_parallel_degree;
        self.count("parallel.context_parallel_degree", Some(degree as u64), 1, RANKS_MAX);
        let degree = degree.clamp(1, RANKS_MAX as usize);
        let (given, gathers) = (&section.context_parallel_load_balance, ContextExchange::AllGather);
        if degree == 1 {
            let because = "context_parallel_degree is 1";
            self.unused("parallel.context_parallel_load_balance", given, because);
            self.unused("parallel.context_parallel_exchange", &section.context_parallel_exchange, because);
            return (1, gathers, true);
        }
        let because = "any number of heads";
        let key = "parallel.context_parallel_exchange";
        let exchange = self.settle(key, &section.context_parallel_exchange, gathers, because);
        if exchange == ContextExchange::AllToAll {
            let because = "by all_to_all every rank has whole sequences of its heads, which is equal work";
            self.unused("parallel.context_parallel_load_balance", given, because);
            return (degree, exchange, false);
        }
        let because = "equal work under the causal mask";
        (degree, exchange, self.settle("parallel.context_parallel_load_balance", given, true, because))
    }

    /// The tensor-parallel degree, and true if its ranks divide rows too.
    fn tensor(&mut self, section: &ParallelSection) -> (usize, bool) {
        let degree = section.tensor_parallel_degree;
        self.count("parallel.tensor_parallel_degree", Some(degree as u64), 1, RANKS_MAX);
        let degree = degree.clamp(1, RANKS_MAX as usize);
        if degree == 1 {
            let because = "tensor_parallel_degree is 1";
            self.unused("parallel.sequence_parallel", &section.sequence_parallel, because);
            return (1, false);
        }
        if self.config.optimizer.name.looks_at_matrices() {
            let message = format!(
                "optimizer.name = \"{}\" looks at whole matrices, which parallel.tensor_parallel_degree = {degree} divides among ranks: use \
                 adamw, sgd or lion with it, or degree 1",
                self.config.optimizer.name
            );
            self.problem("optimizer.name", message);
        }
        if self.config.offload.gradients != OffloadTier::None {
            let message = "memory.offload.gradients does not go with parallel.tensor_parallel_degree above 1, whose ranks sum some gradients on the \
                           device: leave it at \"none\"";
            self.problem("memory.offload.gradients", message);
        }
        let because = "less memory for the same traffic";
        (degree, self.settle("parallel.sequence_parallel", &section.sequence_parallel, true, because))
    }

    /// The replicate degree and the shard degree, with `stages` pipeline stages, `context` ranks
    /// that
    /// share every sequence and `tensor` ranks that share every product.
    fn degrees(
        &mut self,
        section: &ParallelSection,
        [stages, context, tensor]: [usize; 3],
        inputs: &Inputs,
    ) -> (usize, usize) {
        let model = stages.saturating_mul(context).saturating_mul(tensor);
        let (replicate, shard) = (section.data_parallel_replicate_degree, section.data_parallel_shard_degree);
        for (key, value) in [
            ("parallel.ranks", section.ranks),
            ("parallel.data_parallel_replicate_degree", replicate),
            ("parallel.data_parallel_shard_degree", shard),
        ] {
            self.count(key, value.map(|n| n as u64), 1, RANKS_MAX);
        }
        let within = |n: usize| n.clamp(1, RANKS_MAX as usize);
        let experts = within(section.expert_parallel_degree);
        // Each part of the experts needs a replica.
        let product =
            within(replicate.unwrap_or(experts)).saturating_mul(within(shard.unwrap_or(1))).saturating_mul(model);
        if let (Some(ranks), Some(started)) = (section.ranks, inputs.processes)
            && ranks != started
        {
            let message = format!("parallel.ranks = {ranks}, but {started} processes were started together");
            self.problem("parallel.ranks", message);
        }
        let ranks = section.ranks.unwrap_or_else(|| match inputs.processes {
            Some(started) => {
                self.fill("parallel.ranks", &started, "processes that were started together");
                started
            }
            None => {
                self.fill("parallel.ranks", &product, "the product of the degrees");
                product
            }
        });
        let ranks = within(ranks);
        if !ranks.is_multiple_of(model) {
            let of_context = match context {
                1 => String::new(),
                _ => format!("parallel.context_parallel_degree {context} x "),
            };
            let (key, message) = match (context, tensor) {
                (1, 1) => (
                    "parallel.pipeline_parallel_degree",
                    format!(
                        "{ranks} ranks do not divide into parallel.pipeline_parallel_degree = {stages} stages of equally many ranks"
                    ),
                ),
                _ => (
                    if tensor > 1 { "parallel.tensor_parallel_degree" } else { "parallel.context_parallel_degree" },
                    format!(
                        "{ranks} ranks are not a multiple of parallel.pipeline_parallel_degree {stages} x \
                         {of_context}parallel.tensor_parallel_degree {tensor}"
                    ),
                ),
            };
            self.problem(key, message);
            return (1, 1);
        }
        let of_stages = match (stages, context, tensor) {
            (1, 1, 1) => String::new(),
            (_, 1, 1) => format!(" in each of {stages} stages"),
            (_, 1, _) => format!(" for each of {stages} stages x {tensor} parts of every product"),
            (_, _, 1) => format!(" for each of {stages} stages x {context} parts of every sequence"),
            _ => {
                format!(" for each of {stages} stages x {context} parts of every sequence x {tensor} of every product")
            }
        };
        let ranks = ranks / model;
        let sharded = section.zero_stage.is_some_and(|stage| stage > 0) || replicate.is_some();
        let experts = if ranks.is_multiple_of(experts) { experts } else { 1 };
        let divide = |by: usize| ranks.is_multiple_of(by).then(|| ranks / by);
        let (r, f) = match (replicate.map(within), shard.map(within)) {
            (Some(r), Some(f)) => (Some(r), Some(f).filter(|_| r.saturating_mul(f) == ranks)),
            (Some(r), None) if section.zero_stage == Some(0) => (Some(r).filter(|r| *r == ranks), Some(1)),
            (Some(r), None) => (Some(r), divide(r)),
            (None, Some(f)) => (divide(f), Some(f)),
            // Experts are divided among replicas.
            (None, None) if sharded => (Some(experts), Some(ranks / experts)),
            (None, None) => (Some(ranks), Some(1)),
        };
        let (Some(r), Some(f)) = (r, f) else {
            let message = format!(
                "{ranks} ranks{of_stages} are not data_parallel_replicate_degree {} x data_parallel_shard_degree {}: leave one of the three out to have it \
                 derived",
                replicate.map_or("?".to_owned(), |n| n.to_string()),
                shard.map_or("?".to_owned(), |n| n.to_string()),
            );
            let key = if section.ranks.is_some() { "parallel.ranks" } else { "parallel.data_parallel_shard_degree" };
            self.problem(key, message);
            return (1, 1);
        };
        let stage =
            section.zero_stage.map_or("no zero_stage asks for shards".to_owned(), |n| format!("zero_stage {n}"));
        if replicate.is_none() {
            self.fill(
                "parallel.data_parallel_replicate_degree",
                &r,
                format!("{ranks} ranks{of_stages} / shard degree {f}"),
            );
        }
        if shard.is_none() {
            self.fill(
                "parallel.data_parallel_shard_degree",
                &f,
                format!("{ranks} ranks{of_stages} / replicate degree {r}; {stage}"),
            );
        }
        (r, f)
    }

    /// Resolves `reshard_after_forward`, which only stage 3 has, and `prefetch`, which counts for
    /// stage 3 and for offloading.
    fn gathers(&mut self, section: &ParallelSection, parallel: &mut Parallel) {
        let because = format!("parameters stay whole with zero_stage {}", parallel.zero_stage);
        let offload = &self.config.offload;
        let fetches =
            [offload.parameters, offload.activations, offload.gradients].iter().any(|tier| *tier != OffloadTier::None);
        let fetches = fetches || self.config.fine_tuning.base_dtype != BaseDtype::Compute;
        if parallel.zero_stage == 3 || fetches {
            let because = "one unit ahead hides a gather or a fetch";
            parallel.prefetch = self.settle("parallel.prefetch", &section.prefetch, 1, because);
            self.count("parallel.prefetch", Some(parallel.prefetch as u64), 0, 1 << 10);
        } else {
            self.unused("parallel.prefetch", &section.prefetch, &because);
        }
        if parallel.zero_stage < 3 {
            return self.unused("parallel.reshard_after_forward", &section.reshard_after_forward, &because);
        }
        let shards = parallel.shard * parallel.context;
        let reshard = &section.reshard_after_forward;
        let reshard = self.settle("parallel.reshard_after_forward", reshard, Reshard::Always, "the least memory");
        parallel.reshard_after_forward = reshard;
        if let Reshard::To(n) = reshard
            && !(n >= 2 && n < shards && shards.is_multiple_of(n))
        {
            let of_context = if parallel.context > 1 { " x context_parallel_degree" } else { "" };
            let message = format!(
                "parallel.reshard_after_forward = {n} must divide data_parallel_shard_degree{of_context} {shards} and lie between 1 and it"
            );
            self.problem("parallel.reshard_after_forward", message);
        }
    }

    /// Checks that model and batch can be divided among stages and tensor-parallel ranks. A model
    /// in a folder is checked once it is read.
    pub(super) fn divisions(&mut self, parallel: &Parallel, batch: Batch, sequence_length: usize, model: &ModelSource) {
        let Parallel { pipeline, context, tensor, .. } = *parallel;
        let shape = match model {
            ModelSource::Shape(shape) => Some(shape),
            ModelSource::HuggingFace { .. } => None,
        };
        if pipeline > 1 && self.config.parallel.pipeline_schedule_file.is_none() {
            let schedule = known_schedule(parallel);
            let facts = schedule.facts();
            if !facts.micro_batches.accept(pipeline as u32, batch.accumulation as u32) {
                let message = format!(
                    "parallel.pipeline_schedule = \"{}\" on {pipeline} stages needs {}, and training.accumulation_steps is {}",
                    parallel.schedule,
                    facts.micro_batches.words(pipeline as u32),
                    batch.accumulation
                );
                self.problem("parallel.pipeline_schedule", message);
            }
            let stretches = pipeline.saturating_mul(facts.chunks as usize);
            if let Some(layers) = shape.map(|shape| shape.layers).filter(|layers| layers + 2 < stretches) {
                let per_stage = match facts.chunks {
                    1 => String::new(),
                    chunks => format!(" with {chunks} stretches of units each"),
                };
                let message = format!(
                    "parallel.pipeline_parallel_degree = {pipeline}: that many stages{per_stage} need {stretches} units, and the model has {}: \
                     the embedding, {layers} blocks and the head",
                    layers + 2
                );
                self.problem("parallel.pipeline_parallel_degree", message);
            }
        }
        if pipeline > 1 && self.config.offload.gradients != OffloadTier::None {
            let message = "memory.offload.gradients does not go with parallel.pipeline_parallel_degree above 1, whose stages sum shared gradients on \
                           the device: leave it at \"none\"";
            self.problem("memory.offload.gradients", message);
        }
        if let Some(heads) = shape.map(|shape| shape.heads).filter(|heads| *heads < tensor) {
            let message = format!(
                "parallel.tensor_parallel_degree = {tensor} leaves ranks without a head: model.heads is {heads}, so degrees from 1 to {heads} work"
            );
            self.problem("parallel.tensor_parallel_degree", message);
        }
        if context > 1 && !sequence_length.is_multiple_of(2 * context) {
            let each = 2 * context;
            let message = format!(
                "parallel.context_parallel_degree = {context} cuts each sequence into {each} equal parts, and training.sequence_length is \
                 {sequence_length}: make it a multiple of {each}"
            );
            self.problem("parallel.context_parallel_degree", message);
        }
        let rows = batch.micro.saturating_mul(sequence_length) / context;
        if parallel.sequence && !rows.is_multiple_of(tensor) {
            let of_context = if context > 1 { format!(" / context_parallel_degree {context}") } else { String::new() };
            let message = format!(
                "parallel.sequence_parallel divides the tokens of a micro-batch among parallel.tensor_parallel_degree = {tensor} ranks, and \
                 training.micro_batch_size {} x sequence_length {sequence_length}{of_context} = {rows} does not divide: change one of them, or \
                 set parallel.sequence_parallel = false",
                batch.micro
            );
            self.problem("parallel.sequence_parallel", message);
        }
    }

    /// Checks the batch for `training.elastic_bits`: counts must be powers of two.
    pub(super) fn elastic(&mut self, parallel: &Parallel, batch: Batch) {
        let powers = batch.accumulation.is_power_of_two() && parallel.data_degree().is_power_of_two();
        if parallel.elastic && !powers {
            let message = format!(
                "training.elastic_bits needs powers of two: accumulation_steps is {}, the data-parallel degree {}",
                batch.accumulation,
                parallel.data_degree()
            );
            self.problem("training.elastic_bits", message);
        }
        if parallel.elastic && parallel.context > 1 {
            let message = "training.elastic_bits needs whole sequences on a rank: parallel.context_parallel_degree above 1 sums over parts of a \
                           sequence between micro-batches and ranks";
            self.problem("training.elastic_bits", message.to_owned());
        }
        if parallel.elastic && self.config.parallel.reduce_schedule == ReduceSchedule::MicroBatch {
            let message = "training.elastic_bits sums a rank's micro-batches before ranks: set parallel.reduce_schedule = \"step\" with it";
            self.problem("training.elastic_bits", message);
        }
    }
}
