//! Prices runs on a host's cores from the machine's own profile. Ranks are threads or processes
//! that share cores and memory.
//!
//! The step program is the one that the engine executes, and so are the kernel calls: the engine
//! ran the program on the `meta` device and recorded every call with the number of its instruction.
//! [`HostPrices`] looks up each call in the measured curves ([`crate::machine`]) and each
//! collective in those of its operation. [`play`] simulates the program with the cores as a shared
//! resource.

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

/// The prediction of a step on this host.
#[derive(Clone, PartialEq, Debug)]
pub struct HostStep {
    /// The simulation of one rank's program; all ranks do the same.
    pub simulated: Simulated,
    /// The price of each instruction when nothing else runs.
    pub prices: Vec<Priced>,
    /// Kernels without a curve and the number of their calls. They are priced as plain copies of
    /// their bytes.
    pub unpriced: BTreeMap<String, u32>,
}

/// Predicts one step. `program` is that of a rank, `calls` are its kernel calls by instruction, and
/// `speeds` are those of the moment (`profile.speeds` if not known).
pub fn host_step(
    program: &Program,
    calls: &[Call],
    profile: &MachineProfile,
    layout: HostLayout,
    speeds: &Speeds,
) -> HostStep {
    let prices = HostPrices::new(profile, layout, *speeds);
    let priced = prices.program(program, calls);
    let simulated = play(program, &priced, layout, profile);
    HostStep { simulated, prices: priced, unpriced: prices.unpriced(calls) }
}
