//! `trainyard advise`: prices every lever for a configuration, on this machine or on a cluster.

mod here;
pub(super) mod settings;
mod tried;

use super::config::resolve_for;
use super::plan;
use crate::choose::{self, trial_seconds};
use crate::forecast;
use crate::output::print;
use anyhow::{Context, Result};
use here::MachineBench;
use settings::{settings, setup};
use std::path::PathBuf;
use trainyard_calibrate::probe_group;
use trainyard_engine::config::{Config, Inputs, Int8Recipe, ModelSource, Resolved};
use trainyard_engine::shape::model_spec;
use trainyard_plan::levers::{self, Advice, ClusterBench, Heading, Place, Setup, Switch, advise};
use trainyard_plan::{Budget, Fixed, Limits, Objective, Request, table};
use trainyard_program::Tier;
use trainyard_sim::machine::Machine;
use trainyard_sim::transformer::Architecture;
use trainyard_sim::{Cluster, Format, Generation, MachineProfile};

/// Say what would make the training of a configuration faster or smaller, and by how much.
///
/// One table of all levers: batch, precision, memory, each kind of parallelism, network, update
/// rule, data, adapters, pruning, quantisation, distillation. Each row is simulated like a plan,
/// and says speed, memory, what it costs in quality, and the settings that switch it on. What no
/// setting switches on is priced on a changed program and stands apart.
#[derive(clap::Args)]
pub struct Args {
    /// A configuration in TOML.
    config: PathBuf,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// A cluster as NODESxDEVICESxDEVICE, e.g. 4x8xH100. Default: this machine, from its profile by
    /// `trainyard calibrate`.
    #[arg(long, value_name = "CLUSTER")]
    cluster: Option<String>,
    /// A TOML file with your own [[device]] and [[network]] entries, to name in --cluster.
    #[arg(long, value_name = "FILE", requires = "cluster")]
    profiles: Option<PathBuf>,
    /// A profile by `trainyard calibrate`. Default: this machine's.
    #[arg(long, value_name = "FILE", conflicts_with = "cluster")]
    profile: Option<PathBuf>,
    /// Seconds for trials on this machine: the first three levers that can be run and the
    /// configuration itself make steps in turn, and the measured gains stand beside the predicted.
    /// 0: no trials.
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["cluster", "profile"], default_value_t = 0.0, value_parser = trial_seconds)]
    trial_seconds: f64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let load =
        |sets: &[String]| -> Result<Config> { Ok(Config::load(Some(&args.config), &[&args.sets[..], sets].concat())?) };
    match &args.cluster {
        Some(cluster) => on_cluster(args, &load, cluster),
        None => on_this_machine(args, &load),
    }
}

fn on_this_machine(args: &Args, load: &dyn Fn(&[String]) -> Result<Config>) -> Result<()> {
    let profile = profile(args, &load(&[])?)?;
    let inputs = probe_group::inputs(&profile);
    let resolved = resolve_for(&load(&[])?, inputs.clone())?;
    let base = setup(&resolved)?;
    let place = machine(&resolved, &profile, &inputs)?;
    let room = choose::room(&resolved, &profile);
    let bench = MachineBench { load, profile: &profile, inputs: &inputs, base: &base, room };
    let mut advice = advise(&base, &place, &bench).map_err(anyhow::Error::msg)?;
    let sets = |setup: &Setup| settings(&base, setup);
    if args.trial_seconds > 0.0 {
        tried::try_out(&mut advice, load, &sets, &inputs, args.trial_seconds)?;
    }
    show(args, &advice, &heading(&resolved, &profile.machine.to_string())?, &sets)
}

fn on_cluster(args: &Args, load: &dyn Fn(&[String]) -> Result<Config>, cluster: &str) -> Result<()> {
    let profiles = plan::read_profiles(args.profiles.as_deref())?;
    let cluster = Cluster::parse(cluster, &profiles)?;
    let mut there = Vec::new();
    if cluster.device.family != Generation::Cpu {
        there.push("compute.device=cuda".to_owned());
    }
    there.push(format!("parallel.ranks={}", cluster.devices()));
    let resolved = resolve_for(&load(&there)?, Inputs::of_this_machine())
        .with_context(|| format!("the configuration on {} ranks", cluster.devices()))?;
    let base = setup(&resolved)?;
    let request = request(&resolved, &base, cluster)?;
    let facts = plan::facts()?;
    let over = |sets: &[String]| {
        let config = load(&[&there[..], sets].concat())?;
        resolve_for(&config, Inputs::of_this_machine()).map(|_| config)
    };
    let knows = |setup: &Setup| settings::knows(&base, setup, &over);
    let bench = ClusterBench { request: &request, facts: &facts, base: &base, knows: &knows };
    let place =
        Place { pretrained: is_pretrained(&resolved), image_cache: image_cache(&resolved), ..Place::of(&request) };
    let advice = advise(&base, &place, &bench).map_err(anyhow::Error::msg)?;
    let sets = |setup: &Setup| [&there[..], &settings(&base, setup)].concat();
    show(args, &advice, &heading(&resolved, &words(&request.cluster))?, &sets)
}

fn show(args: &Args, advice: &Advice, heading: &Heading, sets: &dyn Fn(&Setup) -> Vec<String>) -> Result<()> {
    if args.json {
        return print(format_args!("{:#}\n", levers::json(advice, sets)));
    }
    print(levers::text(advice, heading, sets))
}

/// The profile that prices the configuration on this machine.
fn profile(args: &Args, config: &Config) -> Result<MachineProfile> {
    let kind = forecast::profile_kind(config);
    match &args.profile {
        Some(file) => plan::here::measured(file, kind),
        None => forecast::profile(kind, &Machine::here())
            .map_err(|why| anyhow::anyhow!("{why}, or name a cluster of known devices with --cluster")),
    }
}

fn heading(resolved: &Resolved, place: &str) -> Result<Heading> {
    let parameters = Architecture::from(&model_spec(resolved)?).parameters();
    Ok(Heading {
        place: format!("{} parameters on {place}", table::parameters(parameters)),
        setup: format!("{}, {} tokens a sequence", choose::words(resolved), resolved.sequence_length),
    })
}

/// `4 x 8 H100 on ndr-8`
fn words(cluster: &Cluster) -> String {
    let network = if cluster.nodes > 1 { format!(" on {}", cluster.network.name) } else { String::new() };
    format!("{} x {} {}{network}", cluster.nodes, cluster.devices_per_node, cluster.device.name)
}

/// True if training starts from the weights of a folder or a file.
fn is_pretrained(resolved: &Resolved) -> bool {
    matches!(resolved.model, ModelSource::HuggingFace { load_weights: true, .. })
}

/// This machine as a place: its cores or GPUs.
fn machine(resolved: &Resolved, profile: &MachineProfile, inputs: &Inputs) -> Result<Place> {
    let spec = model_spec(resolved)?;
    let own = resolved.parallel.ranks as u32;
    let gpu = profile.machine.gpu.as_ref();
    let processes = inputs.processes.map(|count| count as u32);
    let devices = processes.unwrap_or_else(|| own.max(gpu.map_or(inputs.cores as u32, |gpu| gpu.count)));
    let hosts = profile.machine.processes.as_ref().map_or(1, |processes| processes.hosts.max(1));
    let mut formats = vec![Format::Fp32, Format::Bf16];
    formats.extend(gpu.map(|_| Format::Fp8));
    Ok(Place {
        devices,
        devices_per_node: devices / hosts,
        all_devices: processes.is_some(),
        heads: spec.heads as u32,
        kv_heads: spec.kv_heads as u32,
        experts: 1,
        pretrained: is_pretrained(resolved),
        dim: spec.dim as u32,
        tiers: if gpu.is_some() { vec![Tier::Host, Tier::Disk] } else { vec![Tier::Disk] },
        formats,
        integers: match resolved.config.precision.int8 {
            Int8Recipe::Off if choose::has_int8(profile) => Switch::Off,
            Int8Recipe::Off => Switch::None,
            Int8Recipe::Switchback => Switch::On,
        },
        image_cache: image_cache(resolved),
    })
}

/// The state of the cache of decoded images.
fn image_cache(resolved: &Resolved) -> Switch {
    match &resolved.images {
        None => Switch::None,
        Some(_) if resolved.config.images.cache.is_some() => Switch::On,
        Some(_) => Switch::Off,
    }
}

/// The request to the simulator: the configuration's model and batch on a cluster.
fn request(resolved: &Resolved, base: &Setup, cluster: Cluster) -> Result<Request> {
    let spec = model_spec(resolved)?;
    Ok(Request {
        model: Architecture::from(&spec),
        own: Some(spec.into()),
        cluster,
        global_batch: base.global_batch(),
        sequence_length: base.sequence_length,
        formats: vec![base.candidate.format],
        limits: Limits { memory_bytes: resolved.config.memory.limit.map(|limit| limit.0), ..Limits::default() },
        fixed: Fixed::default(),
        objective: Objective::Speed,
        shown: 1,
        threads: 1,
        budget: Budget::default(),
    })
}
