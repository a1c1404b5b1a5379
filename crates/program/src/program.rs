//! The program of one rank.

use crate::{
    Action, Axes, Axis, BackwardPart, Effect, Extent, Fragment, Instruction, Lane, MemoryKind, Mesh, Offload,
    ParameterServer, Phase, Placement, SplitShape, State, StepKind, Stretch, Tier,
};
use serde::{Deserialize, Serialize};
use std::ops::Range;

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The program of one rank's step: instructions, and the facts about model and mesh that they refer
/// to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Program {
    /// The rank that runs it.
    pub rank: u32,
    /// The mesh that the rank belongs to.
    pub mesh: Mesh,
    /// The extent of the state that the rank keeps between steps.
    pub placement: Placement,
    /// The tiers of state that is fetched and evicted.
    pub offload: Offload,
    /// The units whose parameters stay on the device although those of others lie in a tier; all,
    /// if they are shards that lie encoded and are decoded by gathers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub staying: Vec<u32>,
    /// Per unit, the number of chunks in which its optimizer state is fetched and updated. Empty:
    /// one chunk each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<u32>,
    /// Names of the model's units, by index.
    pub units: Vec<String>,
    /// Per unit, the other units whose parameters it reads.
    pub borrows: Vec<Vec<u32>>,
    /// The units of which the step trains nothing, ascending. They have neither gradients nor
    /// updates in it. Units that other steps train have state all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<u32>,
    /// The first unit that has a backward: nothing below it is trained.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lowest: u32,
    /// Per unit, its inside if it is split over the tensor-parallel group. Empty: no unit is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub splits: Vec<SplitShape>,
    /// The model's stretches of units, ascending, with the pipeline stages that run them. Without a
    /// pipeline there is one stretch of all units.
    pub pipeline: Vec<Stretch>,
    /// True if this rank's forwards of the loss unit compute its gradients, while they have the
    /// logits. Each is then followed by its backward.
    pub fused_loss: bool,
    /// Number of micro-batches per step on this rank.
    pub micro_batches: u32,
    /// The kind of the step.
    #[serde(default, skip_serializing_if = "StepKind::is_synchronous")]
    pub kind: StepKind,
    /// The fragment that an outer step averages; None: the whole model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fragment: Option<Fragment>,
    /// The parameter server, if the rank is a worker of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ParameterServer>,
    /// True if each micro-batch's gradient has a buffer of its own. The buffers are folded along a
    /// binary tree.
    pub folded: bool,
    /// The bits to which an update rounds the matrices of blocks in the copy that forward reads;
    /// None: it rounds them to the copy's dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding_bits: Option<u8>,
    /// True if updates keep weights of the matrices of blocks at zero.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pruned: bool,
    /// The period of a schedule of freezing to which the step belongs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub period: Option<u32>,
    /// True if the step ends by handing the state to the checkpoint writer.
    pub snapshot: bool,
    /// Number of passes that anything may be brought ahead of its use. Also the number of
    /// reductions that may be in flight while gradients are computed.
    pub prefetch: u32,
    /// Bytes held for the whole step.
    pub resident: Vec<Effect>,
    /// Instructions in order. Dependencies point backwards only.
    pub instructions: Vec<Instruction>,
}

impl Program {
    /// True if this step averages the changes of a unit over replicas.
    pub fn averages(&self, unit: u32) -> bool {
        self.kind == StepKind::Outer && self.fragment.is_none_or(|fragment| fragment.has(unit))
    }

    /// True if changes of parameters travel while the step computes.
    pub fn averages_beside(&self) -> bool {
        self.kind == StepKind::Outer && self.fragment.is_some_and(|fragment| fragment.overlaps)
    }

    /// The numbers of a lane's instructions, in order.
    pub fn on_lane(&self, lane: Lane) -> impl Iterator<Item = usize> + '_ {
        self.instructions.iter().enumerate().filter(move |(_, i)| i.action.lane() == lane).map(|(number, _)| number)
    }

    /// The bits to which updates of a unit round its matrices; None: to the copy's dtype.
    pub fn rounding_bits_of(&self, unit: u32) -> Option<u8> {
        self.rounding_bits.filter(|_| self.is_block(unit))
    }

    /// True if updates of a unit keep weights at zero.
    pub fn is_pruned(&self, unit: u32) -> bool {
        self.pruned && self.is_block(unit)
    }

    fn is_block(&self, unit: u32) -> bool {
        unit > 0 && (unit as usize) + 1 < self.units.len()
    }

    /// The instruction's action and unit in words: `forward block.3`, `clip`.
    pub fn name_of(&self, instruction: &Instruction) -> String {
        let action = instruction.action;
        let unit = action.unit().and_then(|unit| self.units.get(unit as usize));
        [Some(action.name()), unit.map(String::as_str)].into_iter().flatten().collect::<Vec<_>>().join(" ")
    }

    /// The lanes that have instructions.
    pub fn lanes(&self) -> impl Iterator<Item = Lane> + '_ {
        Lane::ALL.into_iter().filter(|lane| self.on_lane(*lane).next().is_some())
    }

    /// The pipeline stage of this rank.
    pub fn stage(&self) -> u32 {
        self.rank / self.mesh.stage_ranks()
    }

    /// The pipeline stage that runs `unit`.
    ///
    /// # Panics
    ///
    /// If the model has no such unit.
    pub fn stage_of(&self, unit: u32) -> u32 {
        self.pipeline[self.pipeline.partition_point(|stretch| stretch.units.end <= unit)].stage
    }

    /// The rank of the stage of `unit` that works with this one: it holds the same part of every
    /// other axis.
    pub fn peer(&self, unit: u32) -> u32 {
        self.stage_of(unit) * self.mesh.stage_ranks() + self.rank % self.mesh.stage_ranks()
    }

    /// The stretches of units that this rank runs, ascending.
    pub fn stretches(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        let stage = self.stage();
        self.pipeline.iter().filter(move |stretch| stretch.stage == stage).map(|stretch| stretch.units.clone())
    }

    /// Number of passes by which a receive may run ahead: the units of the rank's longest stretch.
    pub(crate) fn units_ahead(&self) -> usize {
        self.stretches().map(|units| units.len()).max().unwrap_or(1)
    }

    /// True if this rank runs `unit`.
    pub fn runs(&self, unit: u32) -> bool {
        self.stage_of(unit) == self.stage()
    }

    /// The pipeline stages that train `unit`: the one that runs it, and those with a unit that
    /// borrows it. Ascending.
    pub fn holders(&self, unit: u32) -> Vec<u32> {
        let borrowers = (0..).zip(&self.borrows).filter(|(_, from)| from.contains(&unit)).map(|(by, _)| by);
        let mut stages: Vec<u32> = borrowers.chain([unit]).map(|unit| self.stage_of(unit)).collect();
        stages.sort_unstable();
        stages.dedup();
        stages
    }

    /// The units whose parameters `unit` reads: its own, and those it borrows.
    pub fn reads(&self, unit: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::once(unit).chain(self.borrows[unit as usize].iter().copied())
    }

    /// The number of chunks in which the optimizer state of `unit` is updated.
    pub fn chunks_of(&self, unit: u32) -> u32 {
        self.chunks.get(unit as usize).copied().unwrap_or(1)
    }

    /// True if some parameter of `unit` is trained.
    pub fn is_trained(&self, unit: u32) -> bool {
        self.frozen.binary_search(&unit).is_err()
    }

    /// The units to whose gradients a pass that differentiates the weights of `unit` adds.
    pub fn adds_to(&self, unit: u32) -> impl Iterator<Item = u32> + '_ {
        self.reads(unit).filter(|unit| self.is_trained(*unit))
    }

    /// The units that the rank trains, ascending: of those it holds, the ones of which something
    /// is trained.
    pub fn trains(&self) -> Vec<u32> {
        self.holds().into_iter().filter(|unit| self.is_trained(*unit)).collect()
    }

    /// The units that the rank holds, ascending: those it runs, and those whose parameters they
    /// borrow.
    pub fn holds(&self) -> Vec<u32> {
        let units = self.stretches().flatten();
        let mut units: Vec<u32> = units.flat_map(|unit| self.reads(unit)).collect();
        units.sort_unstable();
        units.dedup();
        units
    }

    /// True if several pipeline stages hold `unit`, because one borrows it from another.
    pub fn is_shared_between_stages(&self, unit: u32) -> bool {
        self.holders(unit).len() > 1
    }

    /// True if the batch of instruction `number` is given back once it has run: no later pass of
    /// this rank reads it.
    pub fn frees_batch(&self, number: usize) -> bool {
        self.instructions[number].effects.iter().any(|effect| effect.kind == MemoryKind::Data && effect.bytes < 0)
    }

    /// The inside of `unit`; None if it runs as a whole.
    pub fn split_of(&self, unit: u32) -> Option<&SplitShape> {
        self.splits.get(unit as usize)
    }

    /// True if the ranks of a tensor-parallel group each compute a part of the gradient of some
    /// parameters of `unit`, so that the group sums it.
    pub fn is_shared_in_group(&self, unit: u32) -> bool {
        self.split_of(unit).is_some_and(|split| split.shared_gradient_elements > 0)
    }

    /// The axes along which ranks hold different gradients when the norm is taken: shards of the
    /// optimizer's part, parts of split parameters, and units of pipeline stages.
    pub fn axes_of_norm(&self) -> Axes {
        let shards = self.placement.masters == Extent::Shard;
        let axes = [(Axis::Shard, shards), (Axis::Tensor, self.mesh.tp > 1), (Axis::Pipeline, self.mesh.pp > 1)];
        axes.into_iter().filter(|(_, differ)| *differ).map(|(axis, _)| axis).collect()
    }

    /// The ranks that take the norm together: all, or those of the rank's replica where replicas
    /// train apart.
    pub fn ranks_of_norm(&self) -> Vec<u32> {
        let own = self.mesh.coordinates(self.rank).dp_replicate;
        let here = |rank: &u32| !self.kind.is_apart() || self.mesh.coordinates(*rank).dp_replicate == own;
        (0..self.mesh.ranks()).filter(here).collect()
    }

    /// True if ranks exchange the numbers of their targets before they compute. Workers that need
    /// not wait for each other do not: servers learn the numbers from them.
    pub fn counts_over_ranks(&self) -> bool {
        self.server.is_none_or(|server| server.staleness == 0 && server.backups == 0)
    }

    /// True if the parameters of `unit` lie in a tier while they are not used.
    pub fn lies_in_a_tier(&self, unit: u32) -> bool {
        self.offload.parameters.is_some() && !self.staying.contains(&unit)
    }

    /// The tier of the state that an action fetches or evicts; None for other actions.
    pub fn tier_of(&self, action: Action) -> Option<Tier> {
        match action {
            Action::Fetch { state, .. } | Action::Evict { state, .. } => match state {
                State::Parameters => self.offload.parameters,
                State::Optimizer { .. } => self.offload.optimizer,
                State::Activations { .. } => self.offload.activations,
                State::Gradients => self.offload.gradients,
            },
            _ => None,
        }
    }

    /// True for device-to-host copies: evictions, and, for a host optimizer, gradient fetches. (A
    /// host optimizer's eviction goes the other way.)
    pub fn leaves_device(&self, action: Action) -> bool {
        let of_optimizer = |state| matches!(state, State::Optimizer { .. });
        self.tier_of(action) == Some(Tier::Host)
            && match action {
                Action::Fetch { state, .. } => of_optimizer(state),
                Action::Evict { state, .. } => !of_optimizer(state),
                _ => false,
            }
    }

    /// The unit that computes the loss.
    pub fn loss_unit(&self) -> u32 {
        self.units.len() as u32 - 1
    }

    /// True if a pass over `unit` adds to the gradients of the units it reads. Backwards that
    /// differentiate weights do. The loss's forward does too if it is [fused](Program::fused_loss).
    pub fn adds_gradients(&self, unit: u32, phase: Phase, part: BackwardPart) -> bool {
        match phase {
            Phase::Forward => unit == self.loss_unit() && self.fused_loss,
            Phase::Backward => part != BackwardPart::Input,
        }
    }

    /// True if the pass of one segment of `unit` adds to the gradients of the units it reads. In
    /// forward it is the last segment of the loss.
    pub fn segment_adds_gradients(&self, unit: u32, segment: u32, phase: Phase, part: BackwardPart) -> bool {
        let last = self.split_of(unit).is_none_or(|split| segment as usize + 1 == split.segments.len());
        self.adds_gradients(unit, phase, part) && (phase == Phase::Backward || last)
    }
}
