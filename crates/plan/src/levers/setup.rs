//! A setup: how a step is run now or could be run, and the place that runs it.

use super::edit::Edit;
use crate::price::stack_state;
use crate::{Candidate, Request};
use trainyard_program::{Mesh, Tier};
use trainyard_sim::{Format, Stack};

/// A way to run a step, including what the engine does not run yet.
#[derive(Clone, PartialEq, Debug)]
pub struct Setup {
    /// Layout, batch, sharding, recomputation, offload, schedule and number format.
    pub candidate: Candidate,
    /// Number of tokens of a sequence.
    pub sequence_length: u64,
    /// The number format of gradients while they travel between ranks.
    pub reduce: ReduceFormat,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Number of blocks of the model.
    pub layers: u32,
    /// Inner width of the model's MLPs.
    pub ffn: u32,
    /// Changes of the program for what no layout expresses.
    pub edits: Vec<Edit>,
}

/// The number format of gradients while they travel between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReduceFormat {
    /// 32 bits.
    F32,
    /// 16 bits.
    Bf16,
}

/// An optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Optimizer {
    /// Two moments per parameter.
    AdamW,
    /// AdamW with its moments in eight bits.
    AdamW8,
    /// One momentum per parameter.
    Lion,
    /// A row and a column of second moments per matrix.
    Adafactor,
    /// Any other. Levers leave it as it is.
    Other,
}

impl Optimizer {
    /// The name in a configuration; None for those that no lever chooses.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Optimizer::AdamW | Optimizer::AdamW8 => Some("adamw"),
            Optimizer::Lion => Some("lion"),
            Optimizer::Adafactor => Some("adafactor"),
            Optimizer::Other => None,
        }
    }

    /// Bytes of scales of the state for each 32 parameters, as in
    /// [`trainyard_program::StateBytes`].
    pub fn scale_bytes(self) -> u32 {
        if self == Optimizer::AdamW8 { 2 * 4 } else { 0 }
    }

    /// Bytes of state per parameter, without scales.
    pub fn state_bytes(self) -> u32 {
        match self {
            Optimizer::AdamW | Optimizer::Other => 8,
            Optimizer::Lion => 4,
            Optimizer::AdamW8 => 2,
            Optimizer::Adafactor => 0,
        }
    }
}

/// The state of something that a place can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Switch {
    /// The place does not have it, or nothing is known of it.
    None,
    /// It is there, and off.
    Off,
    /// It is in use.
    On,
}

/// The devices that run the step, and the sizes of the model that they divide.
#[derive(Clone, PartialEq, Debug)]
pub struct Place {
    /// Number of devices: GPUs of a cluster, or cores of this machine.
    pub devices: u32,
    /// Number of devices of a node.
    pub devices_per_node: u32,
    /// True if all devices take part in every setup. On cores, fewer ranks have more threads each.
    pub all_devices: bool,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key/value heads.
    pub kv_heads: u32,
    /// Number of experts of a block; 1 for dense models.
    pub experts: u32,
    /// True if training starts from trained weights, so that it fine-tunes.
    pub pretrained: bool,
    /// Width of the model.
    pub dim: u32,
    /// The tiers that state can be offloaded to.
    pub tiers: Vec<Tier>,
    /// Number formats whose products the devices have.
    pub formats: Vec<Format>,
    /// The state of products of 8-bit integers in blocks.
    pub integers: Switch,
    /// The state of a cache of decoded images; none for models of text.
    pub image_cache: Switch,
}

impl Setup {
    /// The setup of a plan of `request` by `stack`. The planner counts AdamW.
    pub fn of(request: &Request, stack: &Stack, candidate: &Candidate) -> Setup {
        Setup {
            candidate: *candidate,
            sequence_length: request.sequence_length,
            reduce: match stack_state(stack, candidate.format).reduce {
                2 => ReduceFormat::Bf16,
                _ => ReduceFormat::F32,
            },
            optimizer: Optimizer::AdamW,
            layers: request.model.layers,
            ffn: request.model.ffn,
            edits: Vec::new(),
        }
    }

    /// Number of sequences of a step.
    pub fn global_batch(&self) -> u64 {
        self.candidate.global_batch()
    }

    /// Number of tokens of a step.
    pub fn tokens(&self) -> f64 {
        self.global_batch() as f64 * self.sequence_length as f64
    }

    /// The setup with another candidate.
    pub fn with(&self, candidate: Candidate) -> Setup {
        Setup { candidate, ..self.clone() }
    }

    /// The setup with one more edit; None if it has one of the kind already.
    pub fn edited(&self, edit: Edit) -> Option<Setup> {
        let is_there = |other: &Edit| std::mem::discriminant(other) == std::mem::discriminant(&edit);
        if self.edits.iter().any(is_there) {
            return None;
        }
        let mut setup = self.clone();
        setup.edits.push(edit);
        Some(setup)
    }

    /// The same batch on another mesh. The micro-batch stays if it divides the sequences of a rank,
    /// and shrinks otherwise. None if the mesh does not divide the batch.
    pub fn on(&self, mesh: Mesh) -> Option<Setup> {
        let (global, ranks) = (self.global_batch(), u64::from(mesh.data_parallel()));
        if !global.is_multiple_of(ranks) {
            return None;
        }
        let of_a_rank = (global / ranks) as u32;
        let micro = (1..=self.candidate.micro_batch.min(of_a_rank)).rev().find(|n| of_a_rank.is_multiple_of(*n))?;
        let candidate = Candidate { mesh, micro_batch: micro, accumulation: of_a_rank / micro, ..self.candidate };
        let stage = if mesh.shard_degree() > 1 { candidate.zero_stage.max(1) } else { 0 };
        Some(self.with(Candidate { zero_stage: stage, ..candidate }))
    }
}

impl Place {
    /// The cluster of `request`, all of whose devices are used.
    pub fn of(request: &Request) -> Place {
        let (cluster, model) = (&request.cluster, &request.model);
        Place {
            devices: cluster.devices(),
            devices_per_node: cluster.devices_per_node,
            all_devices: true,
            heads: model.heads,
            kv_heads: model.kv_heads,
            experts: model.experts.map_or(1, |experts| experts.count),
            pretrained: false,
            dim: model.dim,
            tiers: if request.has_host_tier() { vec![Tier::Host] } else { Vec::new() },
            formats: cluster.device.dense_tflops.keys().copied().collect(),
            integers: Switch::None,
            image_cache: Switch::None,
        }
    }

    /// Numbers of devices that a setup may use.
    pub fn counts(&self) -> Vec<u32> {
        if self.all_devices { vec![self.devices] } else { (1..=self.devices).collect() }
    }
}
