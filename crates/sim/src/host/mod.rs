//! Prices runs on a host's cores from the machine's own profile. Ranks are threads or processes
//! that share cores and memory.
//!
//! The step programs are those that the engine executes, one per pipeline stage, and so are the
//! kernel calls: the engine ran the programs on the `meta` device and recorded every call with the
//! number of its instruction. [`HostPrices`] looks up each call in the measured curves
//! ([`crate::machine`]) and each collective in those of its operation. [`play`] simulates the
//! programs with the cores as a shared resource.

mod play;
mod price;

pub use play::play;
pub use price::{HostPrices, Priced};

use crate::machine::{MachineProfile, Speeds};
use crate::simulate::Simulated;
use std::collections::BTreeMap;
use trainyard_program::Program;
use trainyard_tensor::Call;

/// The way in which ranks share a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostLayout {
    /// Number of ranks of the run on each host.
    pub ranks: u32,
    /// Number of threads of each rank's kernels.
    pub threads: u32,
}

/// The program of a rank that stands for its pipeline stage, and its kernel calls by instruction.
#[derive(Clone, Copy, Debug)]
pub struct HostStage<'a> {
    /// The program.
    pub program: &'a Program,
    /// The calls.
    pub calls: &'a [Call],
}

/// The prediction of a step on this host.
#[derive(Clone, PartialEq, Debug)]
pub struct HostStep {
    /// The simulation of the program of one rank per stage; all ranks of a stage do the same.
    pub simulated: Simulated,
    /// The price of each instruction of each of these programs when nothing else runs.
    pub prices: Vec<Vec<Priced>>,
    /// Kernels without a curve and the number of their calls. They are priced as plain copies of
    /// their bytes.
    pub unpriced: BTreeMap<String, u32>,
}

impl HostStep {
    /// Seconds of a rank's instructions, summed by kind. `program` is one of those of this step.
    pub fn by_kind(&self, program: &Program) -> BTreeMap<String, f64> {
        let mut kinds = BTreeMap::new();
        let spans = &self.simulated.ranks[program.stage() as usize].spans;
        for (instruction, span) in program.instructions.iter().zip(spans) {
            *kinds.entry(instruction.action.name().to_owned()).or_default() += span.end_s - span.start_s;
        }
        kinds
    }
}

/// Predicts one step of all pipeline `stages`. `speeds` are those of the moment (`profile.speeds`
/// if not known).
pub fn host_step(stages: &[HostStage<'_>], profile: &MachineProfile, layout: HostLayout, speeds: &Speeds) -> HostStep {
    let prices = HostPrices::new(profile, layout, *speeds);
    let priced: Vec<Vec<Priced>> = stages.iter().map(|stage| prices.program(stage.program, stage.calls)).collect();
    let programs: Vec<_> = stages.iter().zip(&priced).map(|(stage, priced)| (stage.program, &priced[..])).collect();
    let simulated = play(&programs, layout, profile);
    let mut unpriced = BTreeMap::new();
    for (name, count) in stages.iter().flat_map(|stage| prices.unpriced(stage.calls)) {
        *unpriced.entry(name).or_default() += count;
    }
    HostStep { simulated, prices: priced, unpriced }
}
