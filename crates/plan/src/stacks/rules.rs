//! The rules of a trainer: which candidates of the space it can express.
//!
//! The space is made without any trainer in mind. A rule either drops a candidate or replaces one
//! of its choices by the nearest that the trainer has: where the planner recomputes a quarter of
//! the blocks fully and the others selectively, Megatron recomputes a quarter and torchtitan every
//! fourth block.

use crate::{Candidate, Checkpointing};
use serde::Deserialize;
use trainyard_program::{Mesh, Offload, PipelineSchedule, ReduceSchedule, Reshard, Tier};
use trainyard_sim::Format;

/// The layouts that a trainer can express.
#[derive(Clone, PartialEq, Debug)]
pub struct Rules {
    /// The trainer's name, for messages.
    pub name: String,
    /// Largest degree of tensor parallelism.
    pub tensor_max: u32,
    /// Largest number of pipeline stages.
    pub pipeline_max: u32,
    /// Largest degree of context parallelism.
    pub context_max: u32,
    /// Largest degree of expert parallelism.
    pub expert_max: u32,
    /// Number formats of products.
    pub precisions: Vec<Format>,
    /// Pipeline schedules.
    pub schedules: Vec<ScheduleName>,
    /// Numbers of micro-batches that a pipeline accepts.
    pub micro_batches: MicroBatches,
    /// Ways of recomputing activations.
    pub recomputation: Vec<Recomputation>,
    /// Ways of sharing work and state among data-parallel ranks.
    pub data_parallel: Vec<DataParallel>,
}

/// A way of sharing work and state among data-parallel ranks.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataParallel {
    /// Its name in the trainer.
    pub name: String,
    /// The ZeRO stage that it amounts to.
    pub zero_stage: u8,
    /// True if groups that share a state can have replicas (hybrid sharding).
    #[serde(default)]
    pub hybrid: bool,
    /// Stage 3: the possible times at which gathered parameters are released.
    #[serde(default)]
    pub reshard: Vec<ReshardRule>,
    /// Stage 3: the number of units that are gathered ahead.
    #[serde(default = "one")]
    pub prefetch: u32,
    /// Stages 2 and 3: the times at which gradients of several micro-batches may be summed.
    #[serde(default)]
    pub sums: Vec<ReduceSchedule>,
    /// Axes that must be split as well.
    #[serde(default)]
    pub with: Vec<SplitAxis>,
    /// Axes that must not be split as well.
    #[serde(default)]
    pub without: Vec<SplitAxis>,
    /// State that can lie on the host.
    #[serde(default)]
    pub offload: Vec<Offloaded>,
}

/// The time at which gathered parameters are released.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReshardRule {
    /// After each forward.
    Always,
    /// After the last backward.
    Never,
    /// After each forward, down to the part of a node's ranks.
    Node,
}

/// An axis that a layout can split beside data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitAxis {
    /// Products.
    Tensor,
    /// Layers.
    Pipeline,
    /// Sequences.
    Context,
    /// Experts.
    Expert,
}

/// A pipeline schedule, by its name in configurations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub enum ScheduleName {
    /// GPipe.
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward.
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// Interleaved 1F1B.
    #[serde(rename = "interleaved")]
    Interleaved,
    /// ZB-H1.
    #[serde(rename = "zero_bubble")]
    ZeroBubble,
    /// ZB-V.
    #[serde(rename = "zero_bubble_v")]
    ZeroBubbleV,
    /// DualPipeV.
    #[serde(rename = "dual_pipe_v")]
    DualPipeV,
}

/// Numbers of micro-batches that a pipeline accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MicroBatches {
    /// Any number.
    #[default]
    Any,
    /// At least one per stretch of layers.
    PerStretch,
}

/// A way of recomputing activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recomputation {
    /// Nothing is recomputed.
    None,
    /// Every block recomputes cheap functions.
    Selective,
    /// Every block keeps its input only.
    Full,
    /// Some blocks of every stage keep their input only; the others keep everything.
    SomeFull,
    /// Every second or fourth block keeps its input only; the others keep everything.
    EveryNth,
    /// Some blocks keep their input only; the others recompute cheap functions.
    Mixed,
}

/// State that lies on the host between uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offloaded {
    /// Masters and optimizer state, which are updated there.
    Optimizer,
    /// Also gradients.
    OptimizerAndGradients,
    /// Also parameters.
    Everything,
    /// Activations.
    Activations,
}

/// Rules as they are written, without the name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    #[serde(default = "any")]
    tensor_max: u32,
    #[serde(default = "any")]
    pipeline_max: u32,
    #[serde(default = "any")]
    context_max: u32,
    #[serde(default = "any")]
    expert_max: u32,
    precisions: Vec<Format>,
    #[serde(default)]
    schedules: Vec<ScheduleName>,
    #[serde(default)]
    micro_batches: MicroBatches,
    recomputation: Vec<Recomputation>,
    data_parallel: Vec<DataParallel>,
}

fn any() -> u32 {
    u32::MAX
}

fn one() -> u32 {
    1
}

impl Written {
    /// The rules of the trainer called `name`.
    pub(super) fn named(self, name: &str) -> Result<Rules, String> {
        let Written { tensor_max, pipeline_max, context_max, expert_max, .. } = self;
        let Written { precisions, schedules, micro_batches, recomputation, data_parallel, .. } = self;
        for form in &data_parallel {
            if form.zero_stage > 3 {
                return Err(format!("[[rules.data_parallel]] {}: a ZeRO stage from 0 to 3", form.name));
            }
            if form.zero_stage == 3 && form.reshard.is_empty() {
                return Err(format!("[[rules.data_parallel]] {}: stage 3 needs `reshard`", form.name));
            }
            if form.zero_stage >= 2 && form.sums.is_empty() {
                return Err(format!("[[rules.data_parallel]] {}: stages 2 and 3 need `sums`", form.name));
            }
        }
        let name = name.to_owned();
        Ok(Rules {
            name,
            tensor_max,
            pipeline_max,
            context_max,
            expert_max,
            precisions,
            schedules,
            micro_batches,
            recomputation,
            data_parallel,
        })
    }
}

impl Rules {
    /// True if some layout on `mesh` can be expressed.
    pub fn allows(&self, mesh: &Mesh) -> bool {
        let Mesh { pp, cp, tp, ep, .. } = *mesh;
        let within =
            tp <= self.tensor_max && pp <= self.pipeline_max && cp <= self.context_max && ep <= self.expert_max;
        within && (pp == 1 || !self.schedules.is_empty()) && self.data_parallel.iter().any(|form| form.allows(mesh))
    }

    /// The candidates that can be expressed, in the order of `all`. `blocks` is the model's number
    /// of blocks.
    pub fn restrict(&self, all: &[Candidate], blocks: u32) -> Vec<Candidate> {
        let mut kept = Vec::with_capacity(all.len());
        for candidate in all {
            for form in &self.data_parallel {
                for offload in form.offloads(candidate) {
                    let Some(checkpointing) = self.checkpointing(candidate, blocks) else { continue };
                    let changed = Candidate { offload, checkpointing, ..*candidate };
                    // Candidates that differ in what the trainer cannot express become equal. They
                    // are neighbours in the space.
                    let seen = kept.iter().rev().take(NEIGHBOURS).any(|before| *before == changed);
                    if self.expresses(&changed, form) && !seen {
                        kept.push(changed);
                    }
                }
            }
        }
        kept
    }

    /// The reason why `candidate` cannot be expressed; None if it can.
    pub fn refuses(&self, candidate: &Candidate, blocks: u32) -> Option<String> {
        let Mesh { pp, cp, tp, ep, .. } = candidate.mesh;
        let degrees = [
            ("tensor", tp, self.tensor_max),
            ("pipeline", pp, self.pipeline_max),
            ("context", cp, self.context_max),
            ("expert", ep, self.expert_max),
        ];
        if let Some((axis, degree, most)) = degrees.into_iter().find(|(_, degree, most)| degree > most) {
            return Some(format!("{axis} parallelism of degree {degree}, where {most} is the most"));
        }
        if !self.precisions.contains(&candidate.format) {
            return Some(format!("products in {}", candidate.format.name()));
        }
        if !self.pipelines(candidate) {
            let micro_batches = candidate.accumulation;
            return Some(format!("the schedule {} with {micro_batches} micro-batches", candidate.pipeline));
        }
        if self.checkpointing(candidate, blocks) != Some(candidate.checkpointing) {
            let words = crate::candidate::checkpointing_words(candidate.checkpointing, blocks);
            return Some(format!("this recomputation ({words})"));
        }
        let forms = || self.data_parallel.iter().filter(|form| self.expresses(candidate, form));
        match forms().any(|form| form.offloads(candidate).contains(&candidate.offload)) {
            true => None,
            false if forms().next().is_some() => Some("state on the host in this layout".to_owned()),
            false => Some(format!("{} with these choices of gathering and summing", candidate.layout())),
        }
    }

    /// True if everything but recomputation and offload can be expressed by `form`.
    fn expresses(&self, candidate: &Candidate, form: &DataParallel) -> bool {
        let Mesh { pp, cp, tp, ep, .. } = candidate.mesh;
        tp <= self.tensor_max
            && pp <= self.pipeline_max
            && cp <= self.context_max
            && ep <= self.expert_max
            && self.precisions.contains(&candidate.format)
            && self.pipelines(candidate)
            && form.expresses(candidate)
    }

    fn pipelines(&self, candidate: &Candidate) -> bool {
        let pp = candidate.mesh.pp;
        let name = match candidate.pipeline {
            PipelineSchedule::GPipe => ScheduleName::GPipe,
            PipelineSchedule::OneForwardOneBackward => ScheduleName::OneForwardOneBackward,
            PipelineSchedule::Interleaved { .. } => ScheduleName::Interleaved,
            PipelineSchedule::ZeroBubble => ScheduleName::ZeroBubble,
            PipelineSchedule::ZeroBubbleV => ScheduleName::ZeroBubbleV,
            PipelineSchedule::DualPipeV => ScheduleName::DualPipeV,
        };
        let enough = match self.micro_batches {
            MicroBatches::Any => true,
            MicroBatches::PerStretch => candidate.accumulation >= pp * candidate.chunks(),
        };
        pp == 1 || self.schedules.contains(&name) && enough
    }

    /// The nearest recomputation that can be expressed, if there is one.
    fn checkpointing(&self, candidate: &Candidate, blocks: u32) -> Option<Checkpointing> {
        let Checkpointing { full, selective } = candidate.checkpointing;
        let has = |way: Recomputation| self.recomputation.contains(&way);
        let some = |full: u32| Some(Checkpointing { full, selective: 0 });
        match (full, selective) {
            (0, 0) => has(Recomputation::None).then_some(candidate.checkpointing),
            (0, _) => has(Recomputation::Selective).then_some(candidate.checkpointing),
            (full, _) if full == blocks => has(Recomputation::Full).then_some(candidate.checkpointing),
            (full, selective) if selective > 0 && has(Recomputation::Mixed) => {
                some(full).map(|it| Checkpointing { selective, ..it })
            }
            (full, _) if has(Recomputation::SomeFull) => {
                // Every stretch recomputes equally many.
                let stretches = candidate.mesh.pp * candidate.chunks();
                let rounded = full.div_ceil(stretches) * stretches;
                if rounded < blocks { some(rounded) } else { None }
            }
            (full, _) if has(Recomputation::EveryNth) => {
                [4, 2].into_iter().find(|n| full == blocks / n).and_then(|n| some(blocks / n))
            }
            _ => None,
        }
    }
}

/// Number of candidates among which equal ones lie: those with the same mesh, batch and sharding.
const NEIGHBOURS: usize = 32;

impl DataParallel {
    /// True if it can run on `mesh`.
    fn allows(&self, mesh: &Mesh) -> bool {
        let degree = |axis: &SplitAxis| match axis {
            SplitAxis::Tensor => mesh.tp,
            SplitAxis::Pipeline => mesh.pp,
            SplitAxis::Context => mesh.cp,
            SplitAxis::Expert => mesh.ep,
        };
        let sharded = mesh.shard_degree() > 1;
        if !sharded && mesh.dp_replicate == 1 {
            // Nothing is shared, so nothing is asked of it.
            return true;
        }
        let axes = self.with.iter().all(|axis| degree(axis) > 1) && self.without.iter().all(|axis| degree(axis) == 1);
        axes && sharded == (self.zero_stage > 0) && (!sharded || mesh.dp_replicate == 1 || self.hybrid)
    }

    /// True if it shares state as `candidate` does.
    fn expresses(&self, candidate: &Candidate) -> bool {
        if !self.allows(&candidate.mesh) {
            return false;
        }
        if candidate.mesh.shard_degree() == 1 {
            return true;
        }
        let once = candidate.accumulation == 1;
        let sums = self.zero_stage < 2 || once || self.sums.contains(&candidate.reduce_schedule);
        let reshard = match candidate.reshard {
            Reshard::Always => self.reshard.contains(&ReshardRule::Always) && candidate.prefetch == self.prefetch,
            Reshard::Never => self.reshard.contains(&ReshardRule::Never),
            Reshard::To(_) => self.reshard.contains(&ReshardRule::Node),
        };
        candidate.zero_stage == self.zero_stage && sums && (self.zero_stage < 3 || reshard)
    }

    /// The state that may lie on the host where `candidate` puts something there.
    fn offloads(&self, candidate: &Candidate) -> Vec<Offload> {
        let none = Offload::default();
        let host = Some(Tier::Host);
        let has = |what: Offloaded| self.offload.contains(&what);
        let Offload { optimizer, gradients, parameters, activations } = candidate.offload;
        match [optimizer, gradients, parameters, activations].map(|tier| tier.is_some()) {
            [false, false, false, false] => vec![none],
            [true, false, false, false] if has(Offloaded::Optimizer) => vec![candidate.offload],
            [false, false, false, true] if has(Offloaded::Activations) => vec![candidate.offload],
            [true, true, true, false] if has(Offloaded::Everything) => vec![candidate.offload],
            [true, true, false, false] => {
                let both = Offload { optimizer: host, gradients: host, ..none };
                let all = Offload { parameters: host, ..both };
                let ways = [(Offloaded::OptimizerAndGradients, both), (Offloaded::Everything, all)];
                ways.into_iter().filter_map(|(what, offload)| has(what).then_some(offload)).collect()
            }
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::StackProfile;
    use crate::{Extent, Fixed, space::candidates};

    fn extent() -> Extent {
        Extent {
            devices: 64,
            devices_per_node: 8,
            global_batch: 256,
            sequence_length: 8192,
            blocks: 32,
            heads: 32,
            kv_heads: 8,
            whole_blocks: false,
            experts: 1,
            formats: vec![Format::Bf16, Format::Fp8],
            host_tier: true,
        }
    }

    fn of(name: &str) -> Vec<Candidate> {
        let rules = Some(StackProfile::named(name).unwrap().rules);
        candidates(&extent(), &Fixed { rules, ..Fixed::default() })
    }

    #[test]
    fn every_trainer_has_what_it_is_known_for_and_nothing_else() {
        let any = |all: &[Candidate], test: &dyn Fn(&Candidate) -> bool| all.iter().any(test);
        let megatron = of("megatron");
        assert!(any(&megatron, &|c| c.mesh.tp == 8 && c.mesh.pp == 4 && c.chunks() == 4 && c.zero_stage == 1));
        assert!(!any(&megatron, &|c| c.pipeline == PipelineSchedule::ZeroBubble));
        assert!(!any(&megatron, &|c| c.checkpointing.full > 0 && c.checkpointing.selective > 0));
        assert!(any(&megatron, &|c| c.checkpointing == Checkpointing { full: 8, selective: 0 }));
        let titan = of("torchtitan");
        assert!(!any(&titan, &|c| matches!(c.layout().zero_stage, 1 | 2)));
        assert!(any(&titan, &|c| c.mesh.dp_replicate > 1 && c.mesh.dp_shard > 1 && c.mesh.tp > 1));
        assert!(!any(&titan, &|c| c.mesh.dp_replicate > 1 && c.mesh.shard_degree() == 1 && c.mesh.tp > 1));
        let deepspeed = of("deepspeed");
        assert!(!any(&deepspeed, &|c| c.mesh.pp > 1 || c.mesh.cp > 1 || c.format == Format::Fp8));
        assert!(any(&deepspeed, &|c| c.offload.parameters.is_some()));
        assert!(any(&deepspeed, &|c| c.layout().zero_stage == 2));
        let accelerate = of("accelerate");
        assert!(accelerate.iter().all(|c| matches!(c.layout().zero_stage, 0 | 3) && c.mesh.pp == 1));
    }

    #[test]
    fn what_is_kept_is_not_refused_and_stands_there_once() {
        for profile in StackProfile::builtin() {
            let kept = of(&profile.name);
            assert!(!kept.is_empty(), "{}", profile.name);
            for candidate in kept.iter().step_by(17) {
                assert_eq!(profile.rules.refuses(candidate, 32), None, "{}: {candidate:?}", profile.name);
            }
            let mut said: Vec<String> = kept.iter().map(|candidate| format!("{candidate:?}")).collect();
            said.sort_unstable();
            said.dedup();
            assert_eq!(said.len(), kept.len(), "{}", profile.name);
        }
    }

    #[test]
    fn refusals_name_the_choice() {
        let rules = StackProfile::named("deepspeed").unwrap().rules;
        let plain = Candidate::plain(Mesh::data(1, 8), 1, 4, Format::Bf16);
        let zero = |zero_stage| Candidate { zero_stage, ..plain };
        let cases = [
            (Candidate { mesh: Mesh { pp: 2, ..plain.mesh }, ..zero(1) }, "pipeline parallelism of degree 2"),
            (Candidate { format: Format::Fp8, ..zero(1) }, "products in fp8"),
            (Candidate { checkpointing: Checkpointing { full: 0, selective: 32 }, ..zero(1) }, "recomputation"),
            (Candidate { reshard: Reshard::Never, ..zero(3) }, "gathering and summing"),
            (Candidate { offload: Offload { activations: Some(Tier::Host), ..Offload::default() }, ..zero(1) }, "host"),
        ];
        for (candidate, says) in cases {
            let said = rules.refuses(&candidate, 32).unwrap();
            assert!(said.contains(says), "{said}");
        }
        assert_eq!(rules.refuses(&zero(1), 32), None);
    }
}
