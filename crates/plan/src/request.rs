//! The planner's question: a model on a cluster, a batch, limits, and fixed choices.

use crate::search::Budget;
use crate::{Extent, Fixed};
use serde::Serialize;
use trainyard_sim::{Cluster, Format, OwnModel};

/// A question to the planner.
#[derive(Clone, PartialEq, Debug)]
pub struct Request {
    /// The model.
    pub model: trainyard_sim::transformer::Architecture,
    /// The same model as this program trains it, if it does, and the part of it that is trained.
    /// Kernels and kept activations are then those of its own code.
    pub own: Option<OwnModel>,
    /// The cluster to train on.
    pub cluster: Cluster,
    /// Number of sequences of a step, over all ranks. Every plan keeps it.
    pub global_batch: u64,
    /// Number of tokens of a sequence.
    pub sequence_length: u64,
    /// Number formats to choose among.
    pub formats: Vec<Format>,
    /// Limits of a plan.
    pub limits: Limits,
    /// Choices that are not searched.
    pub fixed: Fixed,
    /// The quantity to minimise.
    pub objective: Objective,
    /// Number of plans of different layouts to return.
    pub shown: usize,
    /// Number of threads of the search.
    pub threads: usize,
    /// Limit of the search's work.
    pub budget: Budget,
}

/// Limits of a plan.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Limits {
    /// Bytes of a device that a step may use; None: all of its memory.
    pub memory_bytes: Option<u64>,
    /// The share of a device's memory that is left free, because predictions may be too low.
    pub memory_margin: f64,
    /// Maximum number of devices.
    pub devices: Option<u32>,
    /// US dollars an hour for all devices together.
    pub usd_per_hour: Option<f64>,
}

/// The quantity to minimise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// The shortest step.
    #[default]
    Speed,
    /// The cheapest token.
    Cost,
}

impl Objective {
    /// The adjective for a better plan.
    pub fn better(self) -> &'static str {
        match self {
            Objective::Speed => "faster",
            Objective::Cost => "cheaper",
        }
    }
}

impl Request {
    /// The numbers of devices to search, largest first: whole nodes within the limits. For speed
    /// these are the few largest that divide the batch in some way; for cost also halves, quarters
    /// and so on.
    pub fn device_counts(&self) -> Vec<u32> {
        let Cluster { devices_per_node, nodes, .. } = self.cluster;
        let mut devices = nodes * devices_per_node;
        devices = devices.min(self.limits.devices.unwrap_or(devices));
        if let Some(usd) = self.limits.usd_per_hour
            && self.cluster.device.usd_per_hour > 0.0
        {
            devices = devices.min((usd / self.cluster.device.usd_per_hour).floor() as u32);
        }
        // Inside one node any number is allowed; beyond it, whole nodes.
        let step = if devices >= devices_per_node { devices_per_node } else { 1 };
        let largest = devices / step * step;
        let possible = |count: &u32| !crate::space::meshes(&self.extent(*count), &self.fixed).is_empty();
        const LARGEST: usize = 3;
        match self.objective {
            Objective::Speed if largest == nodes * devices_per_node && possible(&largest) => vec![largest],
            Objective::Speed => {
                let counts = (1..=largest / step).rev().map(|n| n * step).filter(possible);
                counts.take(LARGEST).collect()
            }
            Objective::Cost => {
                let halves = std::iter::successors(Some(largest), |n| (n % 2 == 0).then_some(n / 2));
                halves.filter(|count| *count > 0).filter(possible).collect()
            }
        }
    }

    /// True if the plan is for a trainer that is not this program.
    pub fn is_for_another_trainer(&self) -> bool {
        self.fixed.is_for_another_trainer()
    }

    /// The space of candidates for the model and the batch on `devices` devices.
    pub fn extent(&self, devices: u32) -> Extent {
        Extent {
            devices,
            devices_per_node: self.cluster.devices_per_node.min(devices),
            global_batch: self.global_batch,
            sequence_length: self.sequence_length,
            blocks: self.model.layers + self.model.encoder_layers,
            heads: self.model.heads,
            kv_heads: self.model.kv_heads,
            whole_blocks: self.model.encoder_layers > 0 || self.model.patch_len > 0 || self.model.value_residual,
            experts: self.model.experts.map_or(1, |experts| experts.count),
            formats: self.formats.clone(),
            host_tier: self.cluster.device.family != trainyard_sim::Generation::Cpu,
        }
    }
}
