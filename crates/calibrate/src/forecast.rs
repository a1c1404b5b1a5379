//! Predicts the step of a configuration before it runs.

use trainyard_engine::config::{DeviceKind, Resolved};
use trainyard_engine::predict::StepNeeds;
use trainyard_engine::{EngineError, bench};
use trainyard_program::Program;
use trainyard_sim::MachineProfile;
use trainyard_sim::host::{HostLayout, HostStage, HostStep, host_step};
use trainyard_sim::machine::{Machine, Processes, Speeds};

/// The facts about a step on a machine that do not depend on its speed.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// The program of the first rank of every pipeline stage, and its memory, FLOPs and kernel
    /// calls, from executing it without data. All ranks of a stage do the same.
    pub stages: Vec<(Program, StepNeeds)>,
    /// The way in which ranks share the cores.
    pub layout: HostLayout,
}

/// Lowers `resolved` and executes the programs without data. This gives everything that does not
/// depend on the speed of `machine`.
///
/// # Errors
///
/// A model that does not fit.
pub fn forecast(resolved: &Resolved, machine: &Machine) -> Result<Forecast, EngineError> {
    Ok(Forecast { stages: bench::forecast_stages(resolved)?, layout: layout(resolved, machine) })
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
        let stages = self.stages.iter().map(|(program, needs)| HostStage { program, calls: &needs.calls });
        let stages: Vec<HostStage<'_>> = stages.collect();
        host_step(&stages, profile, self.layout, speeds)
    }

    /// The program and the needs of the first stage.
    pub fn first(&self) -> (&Program, &StepNeeds) {
        let (program, needs) = &self.stages[0];
        (program, needs)
    }

    /// The needs of the stage whose ranks hold the most memory.
    pub fn fullest(&self) -> &StepNeeds {
        let needs = self.stages.iter().map(|(_, needs)| needs);
        needs.max_by_key(|needs| needs.memory.peak_total()).unwrap_or(&self.stages[0].1)
    }
}
