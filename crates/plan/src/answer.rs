//! What the planner answers: plans with their prices, and the reasons in words.

use crate::{Breakdown, Candidate, Objective};
use serde::Serialize;
use trainyard_program::MemoryKind;

/// A plan: a candidate with its simulated price.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// What is done.
    pub candidate: Candidate,
    /// Its layout in words.
    pub layout: String,
    /// Seconds of a step.
    pub step_s: f64,
    /// Tokens per second of all devices together.
    pub tokens_per_s: f64,
    /// Model FLOP/s per device: 6 N per token and 12 L h c s for attention, without what is
    /// computed twice (Chowdhery et al. 2022).
    pub model_flops_per_s: f64,
    /// The same over the device's peak.
    pub mfu: f64,
    /// What the fullest device holds.
    pub memory: Memory,
    /// US dollars per million tokens; None without a price of the device.
    pub usd_per_million_tokens: Option<f64>,
    /// Where the time goes on the rank that works longest.
    pub breakdown: Breakdown,
}

/// What the fullest device holds at its peak.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Memory {
    /// Bytes together, with what driver and libraries hold.
    pub total: u64,
    /// By purpose.
    pub by_kind: Vec<(MemoryKind, u64)>,
    /// What driver, libraries and kernels' scratch memory hold.
    pub other: u64,
    /// The rank.
    pub rank: u32,
    /// The instruction at the peak.
    pub at: String,
}

/// Everything that the planner found.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// Best first, each of another layout.
    pub plans: Vec<Plan>,
    /// Why the first is the first, a sentence each.
    pub reasons: Vec<String>,
    /// How the search went.
    pub search: Counts,
    /// What part of its cost any plan could be better than the first; 0 when none can.
    pub gap: f64,
    /// Bytes of a device that a plan may use.
    pub bytes_max: u64,
    /// What is best.
    pub objective: Objective,
    /// Every simulated candidate that fits, for plots.
    pub simulated: Vec<Outline>,
}

/// A simulated candidate in few numbers.
#[derive(Clone, PartialEq, Debug)]
pub struct Outline {
    /// What it is.
    pub candidate: Candidate,
    /// Seconds of a step.
    pub step_s: f64,
    /// Peak bytes of the fullest device.
    pub bytes: u64,
}

/// How many candidates came how far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Counts {
    /// All that divide devices and batch.
    pub considered: usize,
    /// Dropped: their state alone does not fit.
    pub too_large: usize,
    /// Dropped: even with all communication hidden they are slower than the best.
    pub too_slow: usize,
    /// Priced by simulating their programs.
    pub simulated: usize,
    /// Of those, above the limit of memory at their peak.
    pub out_of_memory: usize,
}
