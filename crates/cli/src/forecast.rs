//! What a run is expected to take on this machine, from the machine's own profile.

use std::collections::BTreeMap;
use trainyard_calibrate::layout;
use trainyard_engine::config::{Config, DeviceKind};
use trainyard_engine::predict::TimePrediction;
use trainyard_engine::session::Session;
use trainyard_program::Program;
use trainyard_sim::host::{HostStep, host_step};
use trainyard_sim::{MachineProfile, Processor, load_local_profile};

/// Said where there is no profile to predict from.
const NO_PROFILE: &str = "no profile of this machine: run `trainyard calibrate`";
const NO_GPU_PROFILE: &str = "no profile of a GPU: run `trainyard calibrate --device cuda` where there is one";

/// What a configuration computes on.
pub fn processor(config: &Config) -> Processor {
    match config.compute.device {
        DeviceKind::Cpu => Processor::Cpu,
        DeviceKind::Cuda(_) => Processor::Gpu,
    }
}

/// Seconds of the session's step and of its instructions by kind, at the speeds of the calibration (sampling those of the moment would delay the start); or why
/// they are not known.
pub fn time(session: &Session) -> Result<TimePrediction, String> {
    if session.world.backend() != "local" {
        return Err("ranks are processes, and profiles are of threads".to_owned());
    }
    let profile = profile(processor(&session.resolved.config))?;
    if let (Some(gpu), Some(measured)) = (session.rank.device().as_cuda(), &profile.machine.gpu)
        && gpu.properties().name != measured.name
    {
        return Err(format!("the profile is of {}, and this is {}", measured.name, gpu.properties().name));
    }
    let layout = layout(&session.resolved, session.world.size());
    let program = &session.programs[0];
    let step = host_step(program, &session.prediction.calls, &profile, layout, &profile.speeds);
    let basis = format!("calibrated {}, at the speeds of that time{}", profile.measured, missing(&step));
    Ok(TimePrediction { step_s: step.simulated.step_s, instructions: by_kind(program, &step), basis })
}

/// The kernels that a profile does not know.
fn missing(step: &HostStep) -> String {
    let names: Vec<&str> = step.unpriced.keys().map(String::as_str).collect();
    if names.is_empty() { String::new() } else { format!("; not in it, priced as copies: {}", names.join(", ")) }
}

/// Seconds of a rank's instructions, summed by kind.
pub fn by_kind(program: &Program, step: &HostStep) -> BTreeMap<String, f64> {
    let mut kinds = BTreeMap::new();
    for (instruction, span) in program.instructions.iter().zip(&step.simulated.ranks[0].spans) {
        *kinds.entry(instruction.action.name().to_owned()).or_default() += span.end_s - span.start_s;
    }
    kinds
}

/// The profile of this machine, or of its GPU, if there is one that can be used; what is wrong with it otherwise.
pub fn profile(of: Processor) -> Result<MachineProfile, String> {
    match load_local_profile(of) {
        Ok(Some(profile)) => Ok(profile),
        Ok(None) if of == Processor::Gpu => Err(NO_GPU_PROFILE.to_owned()),
        Ok(None) => Err(NO_PROFILE.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
