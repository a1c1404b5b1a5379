//! Predicts the step of a configuration before it runs.

use trainyard_engine::config::{DeviceKind, Resolved};
use trainyard_engine::predict::StepNeeds;
use trainyard_engine::{EngineError, bench};
use trainyard_program::Program;
use trainyard_sim::MachineProfile;
use trainyard_sim::host::{HostLayout, HostStep, host_step};
use trainyard_sim::machine::{Machine, Processes, Speeds};

/// The facts about a step on a machine that do not depend on its speed.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Rank 0's program. All ranks do the same.
    pub program: Program,
    /// Memory, FLOPs and kernel calls, from executing the program without data.
    pub needs: StepNeeds,
    /// The way in which ranks share the cores.
    pub layout: HostLayout,
}

/// Lowers `resolved` and executes the program without data. This gives everything that does not
/// depend on the speed of `machine`.
///
/// # Errors
///
/// A model that does not fit.
pub fn forecast(resolved: &Resolved, machine: &Machine) -> Result<Forecast, EngineError> {
    let (program, needs) = bench::forecast(resolved)?;
    Ok(Forecast { program, needs, layout: layout(resolved, machine) })
}

/// The way in which the ranks on a host share its cores. If each rank has a GPU, profiles treat it
/// as a rank of one thread. All ranks are on one host, unless they are processes that `machine`
/// knows on several.
pub fn layout(resolved: &Resolved, machine: &Machine) -> HostLayout {
    let ranks = machine.processes.as_ref().map_or(resolved.parallel.ranks as u32, Processes::on_a_host);
    let threads = match resolved.config.compute.device {
        DeviceKind::Cpu => resolved.threads as u32,
        DeviceKind::Cuda(_) => 1,
    };
    HostLayout { ranks, threads }
}

impl Forecast {
    /// Predicts the seconds of the step and of each instruction on the machine of `profile` when it
    /// has `speeds` (pass `profile.speeds` if nothing better is known).
    pub fn step(&self, profile: &MachineProfile, speeds: &Speeds) -> HostStep {
        host_step(&self.program, &self.needs.calls, profile, self.layout, speeds)
    }
}
