//! The step of a configuration, before it runs.

use trainyard_engine::config::{DeviceKind, Resolved};
use trainyard_engine::predict::StepNeeds;
use trainyard_engine::{EngineError, bench};
use trainyard_program::Program;
use trainyard_sim::MachineProfile;
use trainyard_sim::host::{HostLayout, HostStep, host_step};
use trainyard_sim::machine::{Machine, Processes, Speeds};

/// What is known of a step on this machine.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Rank 0's program; all ranks do the same.
    pub program: Program,
    /// Memory, FLOPs and kernel calls, from executing it without data.
    pub needs: StepNeeds,
    /// How the cores are shared.
    pub layout: HostLayout,
}

/// Lowers `resolved` and executes the program without data: all that does not depend on how fast
/// `machine` is.
///
/// # Errors
///
/// A model that does not fit.
pub fn forecast(resolved: &Resolved, machine: &Machine) -> Result<Forecast, EngineError> {
    let (program, needs) = bench::forecast(resolved)?;
    Ok(Forecast { program, needs, layout: layout(resolved, machine) })
}

/// How the ranks on a host share what computes: its cores, or a GPU each, which profiles know as a
/// rank of one thread. Ranks are on one host, where they are not processes that `machine` knows on
/// several.
pub fn layout(resolved: &Resolved, machine: &Machine) -> HostLayout {
    let ranks = machine.processes.as_ref().map_or(resolved.parallel.ranks as u32, Processes::on_a_host);
    let threads = match resolved.config.compute.device {
        DeviceKind::Cpu => resolved.threads as u32,
        DeviceKind::Cuda(_) => 1,
    };
    HostLayout { ranks, threads }
}

impl Forecast {
    /// Seconds of the step and of each instruction on the machine of `profile` when it is as fast
    /// as `speeds` say (`profile.speeds` if nothing better is known).
    pub fn step(&self, profile: &MachineProfile, speeds: &Speeds) -> HostStep {
        host_step(&self.program, &self.needs.calls, profile, self.layout, speeds)
    }
}
