//! Runs on a host's cores: ranks that share cores and memory, as threads or processes, priced from
//! the machine's own profile.
//!
//! The step program is the one that the engine executes, and so are the kernel calls: the engine
//! executed the program on the `meta` device and recorded every call with the number of its
//! instruction. [`HostPrices`] look each call up in the measured curves ([`crate::machine`]) and
//! each exchange in those of its operation; [`play`] runs the program against the clock with the
//! cores as a shared resource.

mod play;
mod price;

pub use play::play;
pub use price::{HostPrices, Priced};

use crate::machine::{MachineProfile, Speeds};
use crate::simulate::Simulated;
use std::collections::BTreeMap;
use trainyard_program::Program;
use trainyard_tensor::Call;

/// How ranks share a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostLayout {
    /// Ranks of the run on each host.
    pub ranks: u32,
    /// Threads of each rank's kernels.
    pub threads: u32,
}

/// A step on this host, before it runs.
#[derive(Clone, PartialEq, Debug)]
pub struct HostStep {
    /// How the program of one rank ran; all do the same.
    pub simulated: Simulated,
    /// What each instruction costs alone.
    pub prices: Vec<Priced>,
    /// Kernels without a curve of their own and how often they are called: priced as plain copies
    /// of their bytes.
    pub unpriced: BTreeMap<String, u32>,
}

/// Predicts one step: `program` is a rank's, `calls` its kernel calls by instruction, `speeds`
/// those of the moment (`profile.speeds` if not known).
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
