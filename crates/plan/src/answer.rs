//! The planner's answer: plans with their prices, and the reasons in words.

use crate::{Breakdown, Candidate, Objective};
use serde::Serialize;
use trainyard_program::MemoryKind;

/// A plan: a candidate with its simulated price.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// The choices that the plan makes.
    pub candidate: Candidate,
    /// The first unit of every pipeline stretch but the first.
    pub cuts: Vec<u32>,
    /// The layout in words.
    pub layout: String,
    /// Seconds of a step.
    pub step_s: f64,
    /// Tokens per second of all devices together.
    pub tokens_per_s: f64,
    /// Model FLOP/s per device: 6 N per token and 12 L h c s for attention, without recomputation
    /// (Chowdhery et al. 2022).
    pub model_flops_per_s: f64,
    /// Model FLOPs utilisation: the same over the device's peak.
    pub mfu: f64,
    /// Memory of the fullest device.
    pub memory: Memory,
    /// US dollars per million tokens; None if the device has no price.
    pub usd_per_million_tokens: Option<f64>,
    /// The parts of a step's time on the rank that works longest.
    pub breakdown: Breakdown,
}

/// The peak memory of the fullest device.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Memory {
    /// Bytes in total, including those of driver and libraries.
    pub total: u64,
    /// Bytes by purpose.
    pub by_kind: Vec<(MemoryKind, u64)>,
    /// Bytes of driver, libraries and kernels' scratch memory.
    pub other: u64,
    /// The fullest rank.
    pub rank: u32,
    /// The instruction at which the peak is reached.
    pub at: String,
}

/// Everything that the planner found.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// Plans, best first. Each has another layout.
    pub plans: Vec<Plan>,
    /// Sentences that explain why the first plan is best.
    pub reasons: Vec<String>,
    /// The number of candidates that reached each stage of the search.
    pub search: Counts,
    /// The fraction of its cost by which any plan could still be better than the first; 0 if the
    /// first is proven best.
    pub gap: f64,
    /// Bytes of a device that a plan may use.
    pub bytes_max: u64,
    /// The quantity that was minimised.
    pub objective: Objective,
    /// Every simulated candidate that fits, for plots.
    pub simulated: Vec<Outline>,
}

/// A simulated candidate in a few numbers.
#[derive(Clone, PartialEq, Debug)]
pub struct Outline {
    /// The choices of the candidate.
    pub candidate: Candidate,
    /// Seconds of a step.
    pub step_s: f64,
    /// Peak bytes of the fullest device.
    pub bytes: u64,
}

/// The number of candidates that reached each stage of the search.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Counts {
    /// All candidates that divide devices and batch.
    pub considered: usize,
    /// Candidates dropped because their state alone does not fit.
    pub too_large: usize,
    /// Candidates dropped because they are slower than the best even with all communication hidden.
    pub too_slow: usize,
    /// Candidates whose programs were simulated.
    pub simulated: usize,
    /// Simulated candidates whose peak is above the memory limit.
    pub out_of_memory: usize,
}
