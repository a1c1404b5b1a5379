//! Predicts the time of a run's steps from the profile of this machine.

use std::collections::BTreeMap;
use std::time::Duration;
use trainyard_calibrate::{layout, probe_group};
use trainyard_comm::Communicator;
use trainyard_data::Samples;
use trainyard_engine::config::{Config, DeviceKind, Resolved};
use trainyard_engine::images::ImageCorpora;
use trainyard_engine::predict::{Preprocessing, TimePrediction};
use trainyard_engine::session::Session;
use trainyard_engine::{EngineError, periods};
use trainyard_sim::host::{HostLayout, HostStage, HostStep, host_step};
use trainyard_sim::machine::Machine;
use trainyard_sim::{MachineProfile, ProfileKind, Span, load_local_profile};

/// Messages for a missing profile.
const NO_PROFILE: &str = "no profile of this machine: run `trainyard calibrate`";
const NO_GPU_PROFILE: &str = "no profile of a GPU: run `trainyard calibrate --device cuda` where there is one";

const NO_GPU_PROCESSES_PROFILE: &str = "no profile of these GPUs: run `trainyard calibrate --device cuda` in place of `train`, under the launcher and on as many ranks";

const NO_PROCESSES_PROFILE: &str =
    "no profile of processes: run `trainyard calibrate` in place of `train`, under the launcher and on as many ranks";

/// The kind of profile that prices runs of `config` whose ranks are threads, or have a GPU each.
pub fn profile_kind(config: &Config) -> ProfileKind {
    match config.compute.device {
        DeviceKind::Cpu => ProfileKind::Cpu,
        DeviceKind::Cuda(_) => ProfileKind::Gpu,
    }
}

/// The kind of profile that prices runs of `config` on `machine`, whose ranks may be processes.
pub fn profile_kind_on(config: &Config, machine: &Machine) -> ProfileKind {
    match (profile_kind(config), &machine.processes) {
        (ProfileKind::Cpu, Some(_)) => ProfileKind::Processes,
        (ProfileKind::Gpu, Some(processes)) if processes.hosts > 1 => ProfileKind::GpuProcesses,
        (kind, _) => kind,
    }
}

/// The machine of a run of `config` on `world`, and the kind of profile that prices it; or the
/// reason why there is none.
pub fn place(config: &Config, world: &Communicator) -> Result<(ProfileKind, Machine), String> {
    if world.backend() == "local" {
        return Ok((profile_kind(config), Machine::here()));
    }
    let machine = probe_group::machine(world).map_err(|error| error.to_string())?;
    Ok(match profile_kind_on(config, &machine) {
        // The GPUs of one host are measured by a single process, however the ranks are started.
        ProfileKind::Gpu => (ProfileKind::Gpu, Machine::here()),
        kind => (kind, machine),
    })
}

/// Predicted seconds of the session's step and of its instructions by kind; or the reason why there
/// is no prediction. Uses the speeds of the calibration, because measuring the present ones would
/// delay the start.
pub fn time(session: &Session) -> Result<TimePrediction, String> {
    let (kind, here) = place(&session.resolved.config, &session.world)?;
    let profile = profile(kind, &here)?;
    if let (Some(gpu), Some(measured)) = (session.rank.device().as_cuda(), &profile.machine.gpu)
        && gpu.properties().name != measured.name
    {
        return Err(format!("the profile is of {}, and this is {}", measured.name, gpu.properties().name));
    }
    let layout = layout(&session.resolved, &here);
    let program = &session.programs[session.priced()];
    let own = program.stage() as usize;
    let calls = &session.prediction.calls;
    let others = (0..program.mesh.pp as usize).map(|stage| {
        let first = stage as u32 * program.mesh.stage_ranks();
        Ok(if stage == own { None } else { Some(periods::forecast(&session.resolved, first)?) })
    });
    let others = others.collect::<Result<Vec<_>, EngineError>>().map_err(|error| error.to_string())?;
    let stages = others.iter().map(|other| match other {
        None => HostStage { program, calls },
        Some((program, needs)) => HostStage { program, calls: &needs.calls },
    });
    let step = host_step(&stages.collect::<Vec<_>>(), &profile, layout, &profile.speeds);
    let basis = format!("calibrated {}, at the speeds of that time{}", profile.measured, missing(&step));
    let of_stage = |spans: &Vec<Span>| spans.iter().map(|span| [span.start_s, span.end_s]).collect();
    let stages = step.simulated.ranks.iter().map(|rank| of_stage(&rank.spans)).collect();
    let preprocessing = match &session.dataset {
        Samples::Images(images) => {
            images.price(MEASURED_FOR).map(|image_s| Preprocessing::of(&session.resolved, image_s))
        }
        Samples::Text(_) => None,
    };
    let mut instructions = step.by_kind(program);
    let step_s = beside(step.simulated.step_s, preprocessing, layout, &here, &mut instructions);
    Ok(TimePrediction { step_s, instructions, basis, preprocessing, stages })
}

/// Seconds of a step that takes `compute_s` without the work of its loader threads. Adds what they
/// cost to the `kinds` of instruction.
pub fn beside(
    compute_s: f64,
    work: Option<Preprocessing>,
    layout: HostLayout,
    machine: &Machine,
    kinds: &mut BTreeMap<String, f64>,
) -> f64 {
    let HostLayout { ranks, threads } = layout;
    let Some(work) = work else { return compute_s };
    let step_s = work.beside(compute_s, ranks as usize, threads as usize, machine.cores as usize);
    *kinds.entry(LOAD.to_owned()).or_default() += step_s - compute_s;
    step_s
}

/// Seconds that a thread takes for an image of the training data, where that is one of images and
/// can be opened; a reason why not is said by `say`.
pub fn image_seconds(resolved: &Resolved, say: &dyn Fn(&str)) -> Option<f64> {
    resolved.images.as_ref()?;
    let sets = ImageCorpora::open(resolved, None).and_then(|images| images.into_sets(resolved));
    let why = match sets {
        Ok((images, _)) => match images.price(MEASURED_FOR) {
            Some(seconds) => return Some(seconds),
            None => "none of them can be decoded".to_owned(),
        },
        Err(error) => error.to_string(),
    };
    say(&format!("plans are without the price of preparing the images: {why}"));
    None
}

/// The kind of instruction that waits for a batch.
const LOAD: &str = "load";

/// The longest measuring of images before a training.
const MEASURED_FOR: Duration = Duration::from_millis(300);

/// A message that names the kernels missing in the profile.
fn missing(step: &HostStep) -> String {
    let names: Vec<&str> = step.unpriced.keys().map(String::as_str).collect();
    if names.is_empty() { String::new() } else { format!("; not in it, priced as copies: {}", names.join(", ")) }
}

/// The profile of `here`, or of its GPU; or the reason why there is no usable one.
pub fn profile(of: ProfileKind, here: &Machine) -> Result<MachineProfile, String> {
    match load_local_profile(of, here) {
        Ok(Some(profile)) => Ok(profile),
        Ok(None) => Err(match of {
            ProfileKind::Cpu => NO_PROFILE,
            ProfileKind::Processes => NO_PROCESSES_PROFILE,
            ProfileKind::Gpu => NO_GPU_PROFILE,
            ProfileKind::GpuProcesses => NO_GPU_PROCESSES_PROFILE,
        }
        .to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
