//! Resolves `[update]` and `[compression]`: how often ranks exchange what, and in what form.

use super::inner_steps::InnerSteps;
use super::resolve::Resolver;
use super::sections::*;
use super::sections_parallel::*;
use super::sections_precision::Fp8Recipe;
use super::{Batch, DeviceKind, Parallel, ServerRule};
use crate::encoded::{CodeRounding, MomentumCorrection};
use crate::outer::OuterSettings;
use crate::rank::Compression;
use serde::Serialize;
use trainyard_program::{Axis, BlockCodec, Codec, Encoding, Fragment, PowerSgd};

/// The rule of replicas that train apart.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Apart {
    /// Number of steps from one outer step to the next.
    pub every: u64,
    /// The outer step.
    pub outer: OuterSettings,
    /// Number of fragments, each with outer steps at times of its own. 1: the whole model.
    pub fragments: u64,
}

impl Apart {
    /// True if parts of the model have outer steps at different times, or beside a step. Replicas
    /// then differ between all steps but at the end of a run.
    pub fn streams(&self) -> bool {
        self.fragments > 1 || self.outer.mixing.is_some()
    }

    /// The fragments that have outer steps of their own; none if the whole model has them.
    pub fn fragments(&self) -> Vec<Fragment> {
        let (count, overlaps) = (self.fragments as u32, self.outer.mixing.is_some());
        let own = if self.streams() { count } else { 0 };
        (0..own).map(|index| Fragment { index, count, overlaps }).collect()
    }

    /// The outer step of step `step`, from 1, by its number in
    /// [`outer_strategies`](crate::shape::outer_strategies): 0 is that of the whole model, which
    /// the last step of a run has.
    pub fn outer_step(&self, step: u64, is_last: bool) -> Option<usize> {
        if is_last {
            return Some(0);
        }
        if !self.streams() {
            return step.is_multiple_of(self.every).then_some(0);
        }
        // Fragments take turns, at equal distances.
        let turn = |index: u64| (index + 1) * self.every / self.fragments % self.every;
        (0..self.fragments).find(|index| step % self.every == turn(*index)).map(|index| 1 + index as usize)
    }
}

/// The most columns of low-rank factors.
const RANK_MAX: u64 = 1024;

/// The most steps between outer steps.
pub(super) const EVERY_MAX: u64 = 1 << 20;

impl Resolver {
    /// Resolves `[update]` and `[compression]`.
    pub(super) fn exchanges(
        &mut self,
        parallel: &Parallel,
        batch: Batch,
    ) -> (Option<Apart>, Option<ServerRule>, Compression) {
        let (apart, server) = (self.update(parallel), self.server(parallel));
        // A parameter server refuses compression itself.
        let compression =
            if server.is_some() { Compression::default() } else { self.compression(parallel, apart, batch) };
        (apart, server, compression)
    }

    /// Resolves `[update]` but the keys of a parameter server; None if replicas do not train apart.
    fn update(&mut self, parallel: &Parallel) -> Option<Apart> {
        let UpdateSection {
            rule,
            every,
            inner_steps,
            outer_learning_rate,
            outer_momentum,
            fragments,
            overlap,
            mixing,
            ..
        } = self.config.update.clone();
        if matches!(rule, UpdateRule::Synchronous | UpdateRule::Server) {
            let because = format!("update.rule is \"{rule}\"");
            if rule == UpdateRule::Synchronous {
                self.unused("update.every", &every, &because);
            }
            let is_given = inner_steps != InnerSteps::Equal;
            self.unused("update.inner_steps", &is_given.then_some(()), &because);
            self.unused("update.outer_learning_rate", &outer_learning_rate, &because);
            self.unused("update.outer_momentum", &outer_momentum, &because);
            self.unused("update.fragments", &fragments, &because);
            self.unused("update.overlap", &overlap.then_some(()), &because);
            self.unused("update.mixing", &mixing, &because);
            return None;
        }
        let refuse = |r: &mut Resolver, why: &str| r.problem("update.rule", format!("update.rule = \"{rule}\" {why}"));
        if parallel.replicate == 1 {
            refuse(
                self,
                "lets replicas train apart, and there is one: raise parallel.data_parallel_replicate_degree, or leave it at \"synchronous\"",
            );
        }
        if self.config.precision.compute == Compute::F16 || self.config.precision.fp8 != Fp8Recipe::Off {
            refuse(
                self,
                "needs replicas with the same scales, which f16 and fp8 adapt: use precision.compute bf16 or f32",
            );
        }
        let offload = &self.config.offload;
        if [offload.optimizer, offload.parameters, offload.gradients].iter().any(|tier| *tier != OffloadTier::None) {
            refuse(self, "keeps parameters, optimizer state and gradients on the device: leave out memory.offload");
        }
        if self.config.training.elastic_bits {
            refuse(
                self,
                "depends on the number of replicas, and training.elastic_bits must not: leave one of them out",
            );
        }
        if self.config.health.on_spike == OnSpike::RollBack {
            refuse(
                self,
                "lets replicas meet spikes apart, and they have one checkpoint: use health.on_spike \"skip\" or \"stop\"",
            );
        }
        let because = "DiLoCo loses little quality up to 500, local steps up to some tens";
        let every = self.settle("update.every", &every, 50, because);
        self.count("update.every", Some(every as u64), 1, EVERY_MAX);
        let every = (every as u64).clamp(1, EVERY_MAX);
        let interval = self.config.evaluation.interval_steps;
        if let Some(interval) = interval.filter(|interval| !interval.is_multiple_of(every)) {
            let message = format!(
                "evaluation.interval_steps = {interval} is no multiple of update.every = {every}: between outer steps there is no one model to \
                 evaluate"
            );
            self.problem("evaluation.interval_steps", message);
        }
        self.count("update.fragments", fragments.map(|count| count as u64), 1, every);
        let fragments = fragments.map_or(1, |count| (count as u64).clamp(1, every));
        self.inner_steps(&inner_steps, every, parallel.replicate, fragments > 1 || overlap);
        let mixing = if overlap {
            let because = "half (Douillard et al. 2025)";
            let mixing = self.settle("update.mixing", &mixing, 0.5, because);
            self.within("update.mixing", mixing, 0.0, 1.0 - f64::EPSILON / 2.0);
            Some(mixing)
        } else {
            self.unused("update.mixing", &mixing, "update.overlap is false");
            None
        };
        if rule == UpdateRule::Local {
            let because = "update.rule is \"local\", whose outer step is the mean";
            self.unused("update.outer_learning_rate", &outer_learning_rate, because);
            self.unused("update.outer_momentum", &outer_momentum, because);
            return Some(Apart {
                every,
                outer: OuterSettings { learning_rate: 1.0, momentum: 0.0, mixing },
                fragments,
            });
        }
        let because = "DiLoCo (Douillard et al. 2023)";
        let learning_rate = self.settle("update.outer_learning_rate", &outer_learning_rate, 0.7, because);
        self.positive("update.outer_learning_rate", Some(learning_rate));
        let momentum = self.settle("update.outer_momentum", &outer_momentum, 0.9, because);
        self.within("update.outer_momentum", momentum, 0.0, 1.0 - f64::EPSILON / 2.0);
        Some(Apart { every, outer: OuterSettings { learning_rate, momentum, mixing }, fragments })
    }

    /// Checks the numbers of inner steps of `replicas` replicas.
    fn inner_steps(&mut self, asked: &InnerSteps, every: u64, replicas: usize, streams: bool) {
        const KEY: &str = "update.inner_steps";
        match asked {
            InnerSteps::Equal => return,
            InnerSteps::BySpeed if every == 1 => {
                let message = "update.inner_steps = \"by_speed\" has no effect: with update.every = 1 every replica makes its 1 step; raise \
                               update.every, or remove it";
                self.problem(KEY, message);
            }
            InnerSteps::BySpeed => {}
            InnerSteps::Given(numbers) if numbers.len() != replicas => {
                let message = format!(
                    "update.inner_steps = {asked} needs one number for each of the {replicas} replicas: give as many, or \"by_speed\""
                );
                self.problem(KEY, message);
            }
            InnerSteps::Given(numbers) if numbers.contains(&0) || numbers.iter().max() != Some(&every) => {
                let message = format!(
                    "update.inner_steps = {asked}: each number is at least 1, and the largest is update.every = {every}, the steps of a round"
                );
                self.problem(KEY, message);
            }
            InnerSteps::Given(_) => {}
        }
        if streams {
            let message = format!(
                "update.inner_steps = {asked} lets replicas meet at the end of a round alone, and fragments have outer steps inside it: leave out \
                 update.fragments and update.overlap, or set it to \"equal\""
            );
            self.problem(KEY, message);
        }
        const LIMITS: &str = "use training.steps or training.seconds";
        let TrainingSection { tokens, epochs, .. } = &self.config.training;
        let counted = [
            ("training.tokens", tokens.is_some(), LIMITS),
            ("training.epochs", epochs.is_some(), LIMITS),
            ("data.curriculum_steps", self.config.data.curriculum_steps.is_some(), "remove it"),
        ];
        for (key, _, instead) in counted.into_iter().filter(|(_, is_set, _)| *is_set) {
            let message = format!(
                "{key} needs steps of equally many samples, and with update.inner_steps = {asked} some replicas leave out steps: {instead}, or set \
                 update.inner_steps to \"equal\""
            );
            self.problem(key, message);
        }
    }

    /// Resolves `[compression]`.
    fn compression(&mut self, parallel: &Parallel, apart: Option<Apart>, batch: Batch) -> Compression {
        let section = self.config.compression.clone();
        let CompressionSection {
            gradients,
            parameters,
            activations,
            activation_gradients,
            outer,
            over,
            top_k_density,
            top_k_momentum: _,
            top_k_momentum_masking: _,
            rank,
            error_feedback,
            rounding,
            warmup_steps,
        } = section;
        let parameters = self.gathered(parameters, parallel);
        let between_stages = [activations, activation_gradients.unwrap_or(activations)];
        let activations = self.between_stages(between_stages, parallel);
        let momentum = self.momentum_correction(parallel);
        let used = [gradients, outer].into_iter().filter(|codec| *codec != CompressionCodec::None).collect::<Vec<_>>();
        let is = |codec: CompressionCodec| used.contains(&codec);
        let is_anywhere = |codec: CompressionCodec| is(codec) || between_stages.contains(&codec);
        if !is(CompressionCodec::TopK) {
            self.unused("compression.top_k_density", &top_k_density, "no codec is \"top_k\"");
        }
        if !is(CompressionCodec::PowerSgd) {
            self.unused("compression.rank", &rank, "no codec is \"power_sgd\"");
        }
        if used.is_empty() {
            let because = "compression.gradients and compression.outer are \"none\"";
            self.unused("compression.error_feedback", &error_feedback, because);
            self.unused("compression.over", &(over != CompressionOver::All).then_some(()), because);
        }
        if gradients == CompressionCodec::None {
            self.unused("compression.warmup_steps", &warmup_steps, "compression.gradients is \"none\"");
        }
        let by_chance = rounding == RoundingOfCodes::Stochastic;
        if by_chance && !is_anywhere(CompressionCodec::Int8) && !is_anywhere(CompressionCodec::Int4) {
            self.unused("compression.rounding", &Some(()), "only int8 and int4 round by chance");
        }
        let rounding = if by_chance { CodeRounding::Stochastic } else { CodeRounding::Nearest };
        if used.is_empty() {
            return Compression { parameters, activations, rounding, ..Compression::default() };
        }
        let density = match is(CompressionCodec::TopK) {
            true => self.settle("compression.top_k_density", &top_k_density, 0.01, "1 % (Lin et al. 2018)"),
            false => 0.01,
        };
        self.within("compression.top_k_density", density, 1e-3, 1.0);
        let rank = match is(CompressionCodec::PowerSgd) {
            true => self.settle("compression.rank", &rank, 4, "rank 4 (Vogels et al. 2019)") as u64,
            false => 4,
        };
        self.count("compression.rank", Some(rank), 1, RANK_MAX);
        let codec = |codec: CompressionCodec| match codec {
            CompressionCodec::None => None,
            CompressionCodec::Bf16 => Some(Codec::Blocks(BlockCodec::Bf16)),
            CompressionCodec::Int8 => Some(Codec::Blocks(BlockCodec::Int8)),
            CompressionCodec::Int4 => Some(Codec::Blocks(BlockCodec::Int4)),
            CompressionCodec::OneBit => Some(Codec::Blocks(BlockCodec::OneBit)),
            CompressionCodec::TopK => {
                let block = (BlockCodec::TopK { kept: 1 }).block_elements() as f64;
                let kept = (density * block).round().clamp(1.0, block) as u16;
                Some(Codec::Blocks(BlockCodec::TopK { kept }))
            }
            CompressionCodec::PowerSgd => Some(Codec::PowerSgd(PowerSgd { rank: rank.clamp(1, RANK_MAX) as u32 })),
        };
        let (gradients, outer) = (codec(gradients), codec(outer));
        let needs = [gradients, outer].into_iter().flatten().any(Codec::needs_feedback);
        let because = if needs { "the codec drops much of a message" } else { "the codec's error is small" };
        let feedback = self.settle("compression.error_feedback", &error_feedback, needs && !by_chance, because);
        let over = if over == CompressionOver::All { Axis::Data } else { Axis::Replicate };
        let encoding = |codec: Option<Codec>| codec.map(|codec| Encoding::new(codec, over, feedback));
        let of_gradients = |encoding| Encoding { momentum: momentum.is_some(), ..encoding };
        let compression = Compression {
            warmup_steps: if gradients.is_some() { warmup_steps.unwrap_or(0) } else { 0 },
            gradients: encoding(gradients).map(of_gradients),
            parameters,
            outer: encoding(outer),
            activations,
            rounding,
            momentum,
        };
        self.check_compression(parallel, apart.is_some(), batch, &compression);
        compression
    }

    /// The momentum that ranks apply to gradients before `top_k` chooses; None without any.
    fn momentum_correction(&mut self, parallel: &Parallel) -> Option<MomentumCorrection> {
        const KEY: &str = "compression.top_k_momentum";
        let CompressionSection { gradients, top_k_momentum, top_k_momentum_masking, error_feedback, .. } =
            self.config.compression.clone();
        if gradients != CompressionCodec::TopK {
            let because = format!("compression.gradients is \"{gradients}\"");
            self.unused(KEY, &top_k_momentum, &because);
            self.unused("compression.top_k_momentum_masking", &top_k_momentum_masking, &because);
            return None;
        }
        let factor = top_k_momentum.unwrap_or(0.0);
        self.within(KEY, factor, 0.0, 1.0 - f64::EPSILON / 2.0);
        if factor == 0.0 {
            let because = "compression.top_k_momentum is 0";
            self.unused("compression.top_k_momentum_masking", &top_k_momentum_masking, because);
            return None;
        }
        let because = "gradients of long ago do not push on (Lin et al. 2018)";
        let masking = self.settle("compression.top_k_momentum_masking", &top_k_momentum_masking, true, because);
        let optimizer = &self.config.optimizer;
        let problems = [
            (
                optimizer.name != OptimizerName::Sgd || optimizer.momentum != Some(0.0),
                "replaces the momentum of SGD, and the optimizer must not add its own: set optimizer.name = \"sgd\" and optimizer.momentum = 0",
            ),
            (
                error_feedback == Some(false),
                "adds velocities to what earlier messages left out, which compression.error_feedback = false drops: leave it out",
            ),
            (
                parallel.reduce_schedule == ReduceSchedule::MicroBatch,
                "counts steps, and ranks would apply it to each micro-batch: set parallel.reduce_schedule = \"step\"",
            ),
        ];
        for (_, problem) in problems.into_iter().filter(|(found, _)| *found) {
            self.problem(KEY, format!("{KEY} {problem}"));
        }
        Some(MomentumCorrection { factor, masking })
    }

    /// The codec of gathered parameters.
    fn gathered(&mut self, codec: CompressionCodec, parallel: &Parallel) -> Option<BlockCodec> {
        if codec == CompressionCodec::None {
            return None;
        }
        let block = rounding_codec(codec);
        let narrow = self.config.precision.compute != Compute::F32;
        let gathers = parallel.zero_stage == 3 && parallel.shard * parallel.context > 1;
        let problem = match block {
            None => Some("drops most of a message, and forward needs all parameters: use \"int8\" or \"int4\""),
            Some(BlockCodec::Bf16) if narrow => {
                Some("has no effect: forward reads 16-bit parameters, and so they travel; use \"int8\" or \"int4\"")
            }
            Some(_) if !gathers => Some(
                "has no effect: nothing is gathered; set parallel.zero_stage = 3 on several ranks, or set it to \"none\"",
            ),
            Some(_) if parallel.elastic => Some(
                "changes parameters where they are sharded, and training.elastic_bits needs the same on one rank: set it to \"none\"",
            ),
            Some(_) if matches!(self.config.compute.device, DeviceKind::Cuda(_)) => {
                Some("runs on processors only: set it to \"none\" with compute.device = \"cuda\"")
            }
            Some(_) => return block,
        };
        if let Some(problem) = problem {
            self.problem("compression.parameters", format!("compression.parameters = \"{codec}\" {problem}"));
        }
        None
    }

    /// The codecs of outputs between pipeline stages and of their gradients.
    fn between_stages(&mut self, codecs: [CompressionCodec; 2], parallel: &Parallel) -> [Option<BlockCodec>; 2] {
        let keys = ["compression.activations", "compression.activation_gradients"];
        let narrow = self.config.precision.compute != Compute::F32;
        // A key that is unset says what the first one does, and repeats none of its problems.
        let own = [true, self.config.compression.activation_gradients.is_some()];
        let mut found = [None; 2];
        for (((codec, key), own), found) in codecs.into_iter().zip(keys).zip(own).zip(&mut found) {
            if codec == CompressionCodec::None {
                continue;
            }
            let block = rounding_codec(codec);
            let problem = match block {
                None => "drops most of a message, and the next stage needs all of it: use \"int8\" or \"int4\"",
                Some(BlockCodec::Bf16) if narrow => {
                    "has no effect: stages compute and send 16 bits; use \"int8\" or \"int4\""
                }
                Some(_) if parallel.pipeline == 1 => {
                    "has no effect: the model is not divided into stages; set parallel.pipeline_parallel_degree, or set it to \"none\""
                }
                Some(_) if parallel.elastic => {
                    "changes values where stages meet, and training.elastic_bits needs the same on one rank: set it to \"none\""
                }
                Some(_) if matches!(self.config.compute.device, DeviceKind::Cuda(_)) => {
                    "runs on processors only: set it to \"none\" with compute.device = \"cuda\""
                }
                Some(_) => {
                    *found = block;
                    continue;
                }
            };
            if own {
                self.problem(key, format!("{key} = \"{codec}\" {problem}"));
            }
        }
        found
    }

    /// Rejects encodings that nothing would use, or that do not go with other settings.
    fn check_compression(&mut self, parallel: &Parallel, apart: bool, batch: Batch, compression: &Compression) {
        let Compression { gradients, outer, rounding, .. } = *compression;
        if let Some(encoding) = gradients {
            // The ranks between which gradients travel in the form of the codec.
            let across = if apart { 1 } else { parallel.replicate };
            let ranks = across * if encoding.over == Axis::Data { parallel.shard * parallel.context } else { 1 };
            if ranks == 1 {
                let data = batch.data_parallel_degree;
                let message = format!(
                    "compression.gradients = \"{}\" has no effect: of {data} data ranks none exchange gradients in its form; set it to \"none\"",
                    encoding.codec.name()
                );
                self.problem("compression.gradients", message);
            }
            if parallel.reduce_dtype != ReduceDtype::F32 {
                let message =
                    "compression.gradients and parallel.reduce_dtype both say how gradients travel: set one of them";
                self.problem("compression.gradients", message);
            }
            if parallel.elastic {
                let message = "training.elastic_bits needs sums that do not depend on the number of ranks, and encoded ones do: set \
                               compression.gradients to \"none\"";
                self.problem("compression.gradients", message);
            }
        }
        if outer.is_some() && !apart {
            let message = "compression.outer has no effect: update.rule is \"synchronous\", and there are no outer steps; set it to \"none\"";
            self.problem("compression.outer", message);
        }
        let is_low_rank = |encoding: &Encoding| matches!(encoding.codec, Codec::PowerSgd(_));
        if outer.is_some_and(|encoding| is_low_rank(&encoding))
            && parallel.tensor * parallel.pipeline * parallel.context > 1
        {
            let message = "compression.outer = \"power_sgd\" sends factors of whole matrices, of which tensor- and context-parallel ranks and \
                           pipeline stages hold parts: use tensor, context and pipeline degrees of 1, or \"int8\"";
            self.problem("compression.outer", message);
        }
        if let Some(encoding) = gradients.filter(|encoding| matches!(encoding.codec, Codec::PowerSgd(_))) {
            if encoding.over == Axis::Replicate {
                let message = "compression.gradients = \"power_sgd\" sends factors of whole matrices, of which a sum in the shard group leaves \
                               parts: set compression.over to \"all\"";
                self.problem("compression.over", message);
            }
            if parallel.tensor * parallel.pipeline * parallel.context > 1 {
                let message = "compression.gradients = \"power_sgd\" needs the whole gradient of a unit on each data rank: use tensor, context \
                               and pipeline degrees of 1";
                self.problem("compression.gradients", message);
            }
        }
        let feedback = [gradients, outer].into_iter().flatten().any(|encoding| encoding.feedback);
        if feedback && parallel.tensor * parallel.pipeline * parallel.context > 1 {
            let message = "compression.error_feedback keeps what each data rank left out, which tensor- and context-parallel ranks and pipeline \
                           stages would hold in parts: set it to false, or use tensor, context and pipeline degrees of 1";
            self.problem("compression.error_feedback", message);
        }
        if feedback && self.config.precision.compute == Compute::F16 {
            let message = "compression.error_feedback carries gradients from step to step, and the loss scale of f16 changes between them: use \
                           precision.compute = \"bf16\" or \"f32\", or set it to false";
            self.problem("compression.error_feedback", message);
        }
        if feedback && rounding == CodeRounding::Stochastic {
            let message = "compression.rounding = \"stochastic\" is unbiased by itself and has no exact remainder: set \
                           compression.error_feedback to false, or round to the nearest";
            self.problem("compression.rounding", message);
        }
        if matches!(self.config.compute.device, DeviceKind::Cuda(_)) {
            let message = "messages are encoded on processors only: with compute.device = \"cuda\" set compression.gradients and \
                           compression.outer to \"none\"; parallel.reduce_dtype = \"bf16\" halves the traffic of gradients";
            self.problem("compression.gradients", message);
        }
    }
}

/// The codec, if it rounds each element and drops none: for what passes read.
fn rounding_codec(codec: CompressionCodec) -> Option<BlockCodec> {
    match codec {
        CompressionCodec::Bf16 => Some(BlockCodec::Bf16),
        CompressionCodec::Int8 => Some(BlockCodec::Int8),
        CompressionCodec::Int4 => Some(BlockCodec::Int4),
        CompressionCodec::None | CompressionCodec::OneBit | CompressionCodec::TopK | CompressionCodec::PowerSgd => None,
    }
}
