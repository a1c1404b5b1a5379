//! The planner's answer: plans with their prices, and the reasons in words.

use crate::{Breakdown, Candidate, Objective};
use serde::Serialize;
use trainyard_program::MemoryKind;
use trainyard_sim::{Correction, Interval};

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
    /// Seconds of a step, with the interval that holds them in eight of ten cases.
    pub step_interval: Interval,
    /// Bytes of the fullest device, likewise.
    pub memory_interval: Interval,
    /// The probability that the plan needs more memory than there is.
    pub not_fitting: f64,
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
    /// Plans, best first. Each has a layout of another kind.
    pub plans: Vec<Plan>,
    /// Sentences that explain why the first plan is best.
    pub reasons: Vec<String>,
    /// The number of candidates that reached each stage of the search.
    pub search: Counts,
    /// The fraction of its cost by which a candidate of the space could still be better than the
    /// first plan; 0 if the first is proven best of them. It says nothing of what [`space`] leaves
    /// out.
    ///
    /// [`space`]: crate::space
    pub gap: f64,
    /// Bytes of a device that a plan may use.
    pub bytes_max: u64,
    /// The quantity that was minimised.
    pub objective: Objective,
    /// The measurements that predictions rest on.
    pub basis: Basis,
    /// Every simulated candidate that fits, for plots.
    pub simulated: Vec<Outline>,
}

/// The measurements that predictions rest on, and how far off they usually are.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Basis {
    /// The kind of published runs that is like the question.
    pub runs: &'static str,
    /// Number of such runs.
    pub count: usize,
    /// Number of their sources.
    pub sources: usize,
    /// Half of the runs were predicted with an error of speed of at most this, by constants that
    /// had not seen their source.
    pub usual_error: f64,
    /// Nine of ten runs were predicted with an error of at most this.
    pub large_error: f64,
    /// Traits of the question that no run has. Intervals are wider for them.
    pub uncovered: Vec<String>,
    /// The relative difference of two plans' seconds from which the faster one is faster in eight
    /// of ten cases.
    pub apart: f64,
    /// The share of a device's memory that is left free.
    pub memory_margin: f64,
    /// The factor on all seconds by a measured step; None if there is none.
    pub correction: Option<f64>,
}

impl Basis {
    /// The number of `plans`, best first, that cannot be told apart from the first.
    pub fn equal(&self, plans: &[Plan]) -> usize {
        let Some(best) = plans.first() else { return 0 };
        plans.iter().take_while(|plan| (plan.step_s / best.step_s).ln() < self.apart).count()
    }
}

impl Answer {
    /// Corrects all predictions by a measured step.
    pub fn correct(&mut self, correction: &Correction) {
        let Correction { factor, narrower } = *correction;
        for plan in &mut self.plans {
            let expected = factor * plan.step_s;
            let end = |end: f64| expected * ((end / plan.step_interval.expected).ln() * narrower).exp();
            plan.step_interval =
                Interval { low: end(plan.step_interval.low), expected, high: end(plan.step_interval.high) };
            plan.step_s = expected;
            plan.tokens_per_s /= factor;
            plan.model_flops_per_s /= factor;
            plan.mfu /= factor;
            plan.usd_per_million_tokens = plan.usd_per_million_tokens.map(|usd| usd * factor);
            plan.breakdown.0.iter_mut().for_each(|(_, seconds)| *seconds *= factor);
        }
        self.simulated.iter_mut().for_each(|outline| outline.step_s *= factor);
        self.basis.correction = Some(factor);
    }
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
