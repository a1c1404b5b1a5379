//! `trainyard plan`: finds the plans for training a model that fit on a cluster, predicts their
//! speed, and explains which is best.

mod from;
pub(super) mod here;
pub(super) mod keys;
mod measured;
mod mixtures;
mod network;
mod stacks;

use super::advise::settings as advise_settings;
use super::config::resolve;
use crate::choose::trial_seconds;
use crate::forecast;
use crate::output::{count, note, print, read};
use anyhow::{Context, Result, bail};
use keys::settings;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use trainyard_engine::config::{
    ByteSize, CompressionCodec, CompressionSection, Config, ConfigValue, OptimizerName, UpdateRule,
};
use trainyard_engine::host;
use trainyard_engine::pretrained::config_text;
use trainyard_engine::shape::{base_codec, model_spec, tuning};
use trainyard_engine::trained::Runtime;
use trainyard_model::{ModelSpec, PRESET_NAMES, gguf, hf, preset};
use trainyard_plan::html::{Page, Scaling, page};
use trainyard_plan::levers::{ClusterBench, Place, Setup, advise, quoted};
use trainyard_plan::settings::{Dialect, Settings};
use trainyard_plan::{
    Answer, Budget, Change, Facts, Fixed, Limits, Mode, Objective, Plan, PlanError, Request, plan, step, table,
    timeline,
};
use trainyard_program::MemoryKind;
use trainyard_sim::measurement::Class;
use trainyard_sim::transformer::Architecture;
use trainyard_sim::{
    Cluster, Constants, Errors, Format, Generation, NetworkLink, OwnModel, ProfileKind, Profiles, Stack, models,
    usual_name,
};

/// Find the best plan for training a model on a cluster, with reasons.
///
/// Layout, sharding, micro-batch, recomputation and schedule, with speed, memory and reasons. Every
/// plan that is shown was priced by simulating its step programs. Choices that this program cannot
/// run yet are marked.
#[derive(clap::Args)]
pub struct Args {
    /// A configuration in TOML, which gives model, batch, sequence length and precision. Without
    /// one give --model, --global-batch and --sequence-length.
    config: Option<PathBuf>,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "config")]
    sets: Vec<String>,
    /// A model's name (`trainyard plan --models` lists them), a Hugging Face folder, a config.json
    /// or a GGUF file.
    #[arg(long, value_name = "MODEL", conflicts_with = "config")]
    model: Option<String>,
    /// List the models that --model knows by name, and exit.
    #[arg(long)]
    models: bool,
    /// The cluster as NODESxDEVICESxDEVICE, e.g. 64x8xH100; append :NETWORK for a network other
    /// than the usual one. Default: one rank on all cores of this machine.
    #[arg(long, value_name = "CLUSTER")]
    cluster: Option<String>,
    /// A TOML file with your own [[device]] and [[network]] entries, to name in --cluster.
    #[arg(long, value_name = "FILE")]
    profiles: Option<PathBuf>,
    /// A profile by `trainyard calibrate`, to predict the configuration's speed from: of this
    /// machine's cores, of any processes, or, for a configuration on a GPU, of any GPU. Default:
    /// this machine's.
    #[arg(long, value_name = "FILE", requires = "config", conflicts_with = "cluster")]
    profile: Option<PathBuf>,
    /// Sequences of a step over all ranks; no plan changes it.
    #[arg(long, value_name = "SEQUENCES")]
    global_batch: Option<u64>,
    /// Tokens of a sequence.
    #[arg(long, value_name = "TOKENS")]
    sequence_length: Option<u64>,
    /// Number formats to choose among; exactly one for a configuration on this machine. Default:
    /// that of the configuration, else bf16.
    #[arg(long, value_name = "FORMAT", value_delimiter = ',')]
    precision: Vec<String>,
    /// The objective: the shortest step, or the cheapest token (then fewer devices may win).
    #[arg(long, value_enum, default_value_t = Best::Speed)]
    objective: Best,
    /// The most memory of a device that a plan may use, e.g. 72GiB.
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<String>,
    /// The share of a device's memory that stays free, in percent, because predictions may be too
    /// low. Default with --cluster: what lets plans fit in eight of ten cases, by the errors of
    /// predictions of published runs.
    #[arg(long, value_name = "PERCENT")]
    memory_margin: Option<f64>,
    /// A step that was measured, which corrects all predictions: step_s=12.3, tokens_per_s=90000
    /// (of all devices), or log=FILE (metrics.jsonl of a run). Append the layout that was measured
    /// as in --fix: step_s=12.3,tp=8,pp=4. Without it, it is that of the best plan.
    #[arg(long, value_name = "MEASURED")]
    measured: Option<String>,
    /// Use at most this many devices.
    #[arg(long, value_name = "DEVICES")]
    max_gpus: Option<u32>,
    /// Spend at most this many US dollars per hour.
    #[arg(long, value_name = "USD")]
    max_cost_per_hour: Option<f64>,
    /// The price of a device, in US dollars per hour. Default: the profile's.
    #[arg(long, value_name = "USD")]
    price: Option<f64>,
    /// Fix a choice: tp, pp, cp, ep, dp_replicate, dp_shard, zero, micro_batch, accumulation,
    /// checkpointing (none, selective, full) or offload (true, false); can be given several times.
    #[arg(long, value_name = "CHOICE=VALUE", value_delimiter = ',')]
    fix: Vec<String>,
    /// Plan for a trainer: what it can run, priced as it runs it. megatron, nemo, torchtitan,
    /// deepspeed, fsdp2, trainyard, or a TOML file with a profile of your own. Default: everything
    /// that this program can price, with the best of each trainer below.
    #[arg(long, value_name = "STACK")]
    stack: Option<String>,
    /// Print the settings of the shown plan (default 1) for a trainer, and nothing else: megatron,
    /// nemo, torchtitan, deepspeed or accelerate. The plan is the trainer's own unless --stack
    /// names another. Choices that they cannot say go to standard error.
    #[arg(long, value_name = "FORM", value_parser = stacks::dialect, conflicts_with_all = ["json", "html", "what_if"])]
    export: Option<Dialect>,
    /// Price what a trainer's settings run, and show what would be better: DeepSpeed's JSON,
    /// torchtitan's TOML, Accelerate's YAML, or a script with arguments of Megatron-LM or keys of
    /// NeMo.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["export", "html", "timeline", "what_if", "show"])]
    from: Option<PathBuf>,
    /// Time limit of the search in seconds. If it does not suffice to prove the best plan, the
    /// answer says by how much another could be better. Default: a few seconds, counted in
    /// simulated instructions, so that every machine gives the same answer.
    #[arg(long, value_name = "SECONDS")]
    budget_seconds: Option<f64>,
    /// Number of layouts to show.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=100))]
    top: u16,
    /// Show the details of plan N of the table, and the settings that run it.
    #[arg(long, value_name = "N")]
    show: Option<usize>,
    /// Write the predicted step of the shown plan (default 1) as a trace for Perfetto; for clusters
    /// with memory as counters.
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// For a configuration on this machine: seconds for trials. Plans that are predicted to be
    /// nearly as fast as the best run a few steps each, in turn, which corrects the predictions;
    /// they are listed first. 0: no trials.
    #[arg(long, value_name = "SECONDS", requires = "config", conflicts_with_all = ["cluster", "profile"], default_value_t = 0.0, value_parser = trial_seconds)]
    trial_seconds: f64,
    /// Compare update rules and codecs for replicas on machines like this one, with this network
    /// between them: bandwidth and latency, e.g. 1Gbps,20ms.
    #[arg(long, value_name = "LINK", requires = "config", conflicts_with = "cluster")]
    network: Option<NetworkLink>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Write a page with table, plots and timeline.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Show the effect of a change on the best plan: interconnect=2x, network=NAME, link=2x,
    /// compute=2x, memory=2x, memory_bandwidth=2x, gpus=N, device=NAME, sequence_length=N,
    /// global_batch=N; can be given several times.
    #[arg(long, value_name = "CHANGE")]
    what_if: Vec<String>,
}

/// The values of `--objective`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Best {
    /// The shortest step.
    Speed,
    /// The cheapest token.
    Cost,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if args.models {
        return print(known_models());
    }
    if let Some(folder) = args.config.as_deref().filter(|path| path.is_dir()) {
        let folder = folder.display();
        bail!("{folder} is a folder, and a configuration is a file in TOML: for a model's folder say --model {folder}");
    }
    if let (Some(path), None) = (&args.config, &args.cluster) {
        match args.asks_of_clusters() {
            None => {
                let profile = here::profile(args, path)?;
                if let Some(link) = args.network {
                    let Some(profile) = profile else {
                        bail!("--network prices from a profile: run `trainyard calibrate` first")
                    };
                    return network::rules(args, path, &profile, link);
                }
                if let Some(profile) = profile {
                    return here::ways(args, path, &profile);
                }
            }
            Some(option) => is_a_cluster(args, path, option)?,
        }
    }
    let profiles = read_profiles(args.profiles.as_deref())?;
    let changes: Vec<Change> = args.what_if.iter().map(|text| Change::parse(text)).collect::<Result<_, _>>()?;
    if let Some(path) = &args.from {
        return from::run(args, path, &profiles);
    }
    let (mut request, mut facts) = (request(args, &profiles)?, facts()?);
    let stack = stacks::chosen(args.stack.as_deref(), args.export)?;
    let tuned = request.own.as_ref().is_some_and(|own| !own.tuning.trains_all());
    if let Some(stack) = &stack {
        if tuned {
            note("other trainers are planned as training all of the model, without [fine_tuning]");
        }
        stacks::plan_for(stack, &mut request, &mut facts);
    }
    let coded = request.own.as_ref().is_some_and(|own| own.base.is_some());
    if coded && request.cluster.device.family != Generation::Cpu {
        bail!(
            "fine_tuning.base_dtype runs on processors only: leave it out (--set fine_tuning.base_dtype=compute), or plan for processors, for example --cluster 4x1xCPU-AVX512-32"
        );
    }
    let mut answer = plan(&request, &facts)?;
    let correction = args.measured.as_deref().map(|text| measured::correction(text, &request, &facts)).transpose()?;
    if let Some(correction) = &correction {
        answer.correct(correction);
    }
    let number = args.show.unwrap_or(1);
    let Some(shown) = number.checked_sub(1).and_then(|index| answer.plans.get(index)) else {
        bail!("--show {number}: the table has plans 1 to {}", answer.plans.len());
    };
    let different = changes
        .iter()
        .map(|change| {
            let changed = change.apply(&request, &profiles)?;
            has_positions(&changed)?;
            let mut answer = plan(&changed, &facts);
            if let (Ok(answer), Some(correction)) = (&mut answer, &correction) {
                answer.correct(correction);
            }
            Ok((change.to_string(), answer))
        })
        .collect::<Result<Vec<_>>>()?;
    write_files(args, &request, &facts, &answer, (shown, number))?;
    if let Some(dialect) = args.export {
        return stacks::export(dialect, &request, shown, &facts.stack);
    }
    // Other trainers are planned as training all of the model: nothing to compare a part with.
    let compared = if stack.is_none() && !tuned { stacks::compare(&request, &facts)? } else { Vec::new() };
    if args.json {
        let mut value = to_json(&request, &answer, &different);
        value["stacks"] = stacks::to_json(&compared);
        return print(format_args!("{value:#}\n"));
    }
    let mut text = table::table(&request, &answer);
    if let Some(stack) = &stack {
        text += &stacks::words(stack);
    }
    if !compared.is_empty() {
        text += &format!("\n{}", stacks::table(&request, &compared));
    }
    if args.show.is_some() {
        text += &format!("\n{}", table::details_of(&request, shown, number, answer.bytes_max));
        text += &match settings(&request, shown) {
            _ if request.is_for_another_trainer() => {
                format!("\nits settings: --export FORM --show {number}\n")
            }
            Ok(sets) => {
                let sets = sets.iter().map(|set| format!("  --set {}\n", quoted(set)));
                format!("\nto run it on {} ranks:\n{}", shown.candidate.mesh.ranks(), sets.collect::<String>())
            }
            Err(why) => format!("\n{why}\n"),
        };
    }
    for (what, answer_then) in &different {
        text += "\n";
        match answer_then {
            Ok(then) => text += &table::difference(what, &answer.plans[0], &then.plans[0]),
            Err(error) => text += &format!("what if {what}\n  {error}\n"),
        }
    }
    print(text)
}

impl Args {
    /// An option given that only the planner of clusters supports.
    fn asks_of_clusters(&self) -> Option<&'static str> {
        let asked = [
            ("--what-if", !self.what_if.is_empty()),
            ("--objective cost", self.objective == Best::Cost),
            ("--html", self.html.is_some()),
            ("--profiles", self.profiles.is_some()),
            ("--max-gpus", self.max_gpus.is_some()),
            ("--max-cost-per-hour", self.max_cost_per_hour.is_some()),
            ("--price", self.price.is_some()),
            ("--memory-margin", self.memory_margin.is_some()),
            ("--measured", self.measured.is_some()),
            ("--budget-seconds", self.budget_seconds.is_some()),
            ("--stack", self.stack.is_some()),
            ("--export", self.export.is_some()),
            ("--from", self.from.is_some()),
        ];
        asked.into_iter().find_map(|(option, is_asked)| is_asked.then_some(option))
    }
}

/// Prints a note on how the planner of clusters, which alone supports `option`, sees this machine.
/// Refuses `option` for GPUs and together with --profile or trials.
fn is_a_cluster(args: &Args, path: &Path, option: &str) -> Result<()> {
    if args.profile.is_some() || args.trial_seconds > 0.0 {
        bail!("{option} is for the planner of clusters, which neither reads --profile nor tries: leave one out");
    }
    if forecast::profile_kind(&Config::load(Some(path), &args.sets)?) == ProfileKind::Gpu {
        bail!("{option} is for the planner of clusters: name one of known GPUs with --cluster, e.g. 1x8xH100");
    }
    note(&format!(
        "{option} is for the planner of clusters: there this machine is one rank on all cores, at measured peaks, whatever was calibrated"
    ));
    Ok(())
}

fn known_models() -> String {
    let mut text = "what this program trains\n".to_owned();
    for name in PRESET_NAMES {
        text += &format!("  {name}\n");
    }
    text += "what it plans\n";
    for (name, model) in models() {
        text += &format!("  {name:<20} {:>7}\n", table::parameters(model.parameters()));
    }
    text
}

/// The built-in devices and networks, and those of a file before them.
pub(super) fn read_profiles(file: Option<&Path>) -> Result<Profiles> {
    let builtin = Profiles::builtin();
    let Some(path) = file else { return Ok(builtin) };
    let text = read(path)?;
    let own = Profiles::parse(&text).with_context(|| path.display().to_string())?;
    Ok(own.before(builtin))
}

/// The facts that prices are based on.
pub fn facts() -> Result<Facts> {
    let stack = Stack::named("trainyard").map_err(anyhow::Error::msg)?;
    Ok(Facts { stack, constants: Constants::builtin() })
}

fn request(args: &Args, profiles: &Profiles) -> Result<Request> {
    request_with(args, profiles, None)
}

/// The request of `args`, in which `from` says what they leave open.
fn request_with(args: &Args, profiles: &Profiles, from: Option<&Settings>) -> Result<Request> {
    let Asked { model, own, mut batch, mut length, mut format, memory_bytes } = match (&args.config, &args.model) {
        (Some(path), _) => configured(path, &args.sets)?,
        (None, Some(name)) => {
            let (model, own) = named_model(name)?;
            Asked {
                model,
                own: own.map(OwnModel::from),
                batch: None,
                length: None,
                format: Format::Bf16,
                memory_bytes: None,
            }
        }
        (None, None) => {
            bail!("say what to plan: a configuration, or --model with --global-batch and --sequence-length")
        }
    };
    let needed = |given: Option<u64>, configured: Option<u64>, name: &str| {
        given.or(configured).with_context(|| format!("{name} is needed with --model"))
    };
    let cluster = match &args.cluster {
        Some(text) => Cluster::parse(text, profiles)?,
        None => this_machine()?,
    };
    if let Some(settings) = from {
        let devices = cluster.devices().min(args.max_gpus.unwrap_or(u32::MAX));
        batch = settings.batch(devices).or(batch);
        length = settings.sequence_length.or(length);
        format = settings.format.unwrap_or(format);
    }
    let mut request = Request {
        model,
        own,
        cluster,
        global_batch: needed(args.global_batch, batch, "--global-batch")?,
        sequence_length: needed(args.sequence_length, length, "--sequence-length")?,
        formats: if args.precision.is_empty() { vec![format] } else { formats(&args.precision)? },
        limits: Limits {
            memory_bytes: args.memory_limit.as_deref().map(size).transpose()?.or(memory_bytes),
            memory_margin: margin(args.memory_margin)?,
            devices: args.max_gpus,
            usd_per_hour: args.max_cost_per_hour,
        },
        fixed: fixed(&args.fix)?,
        objective: if args.objective == Best::Cost { Objective::Cost } else { Objective::Speed },
        shown: usize::from(args.top),
        threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
        budget: budget(args.budget_seconds)?,
    };
    if args.memory_margin.is_none() && args.cluster.is_some() {
        let class = Class::of(&request.model, request.formats[0], request.sequence_length as u32);
        request.limits.memory_margin = Errors::builtin().of(class).memory_margin();
    }
    if let Some(price) = args.price {
        if !(price >= 0.0 && price.is_finite()) {
            bail!("--price {price}: dollars an hour, 0 or more");
        }
        request.cluster.device.usd_per_hour = price;
    }
    has_positions(&request)?;
    Ok(request)
}

fn margin(percent: Option<f64>) -> Result<f64> {
    match percent.unwrap_or(0.0) {
        percent if (0.0..90.0).contains(&percent) => Ok(percent / 100.0),
        percent => bail!("--memory-margin {percent}: a percentage from 0 to less than 90"),
    }
}

/// Checks that the model supports the sequence length.
fn has_positions(request: &Request) -> Result<()> {
    let (length, learned) = (request.sequence_length, u64::from(request.model.positions));
    if learned > 0 && length > learned {
        bail!(
            "a sequence of {length} tokens: the model has learned {learned} positions, and no sequence can be longer"
        );
    }
    Ok(())
}

fn budget(seconds: Option<f64>) -> Result<Budget> {
    match seconds {
        None => Ok(Budget::default()),
        Some(seconds) if seconds > 0.0 && seconds.is_finite() => Ok(Budget::Seconds(seconds)),
        Some(seconds) => bail!("--budget-seconds {seconds}: more than 0"),
    }
}

/// This machine as a cluster of one device: one rank on all cores, at measured peaks.
fn this_machine() -> Result<Cluster> {
    let runtime = Runtime::of_this_machine();
    let device = trainyard_tensor::Device::cpu(runtime.isa, runtime.threads, None);
    let cpu = device.as_cpu().context("a CPU device")?;
    let peaks = trainyard_tensor::cpu::peak::measure(cpu);
    let memory = host::memory().context("the system does not say how much memory it has: name a --cluster")?;
    let tflops = |flops: f64| flops / 1e12;
    let profile = trainyard_sim::Device {
        name: format!("CPU ({} threads, {})", runtime.threads, peaks.isa),
        family: Generation::Cpu,
        // Products in f16 run in f32.
        dense_tflops: [
            (Format::Fp32, tflops(peaks.f32_flops)),
            (Format::Fp16, tflops(peaks.f32_flops)),
            (Format::Bf16, tflops(peaks.bf16_flops)),
        ]
        .into(),
        // The share of the peak that products reach (docs/LOG.md).
        product_tflops: 0.83 * tflops(peaks.bf16_flops),
        memory_gb: memory.total as f64 / 1e9,
        memory_gb_s: peaks.copy_bytes_per_s / 1e9,
        multiprocessors: runtime.threads as u32,
        link_gb_s: peaks.copy_bytes_per_s / 1e9,
        host_gb_s: peaks.copy_bytes_per_s / 1e9,
        usd_per_hour: 0.0,
        source: "measured".to_owned(),
    };
    let network = Profiles::builtin().network("ethernet-25g")?.clone();
    Ok(Cluster { device: profile, devices_per_node: 1, nodes: 1, network })
}

/// The model and training that a configuration, or a model's name with options, asks for.
struct Asked {
    model: Architecture,
    own: Option<OwnModel>,
    batch: Option<u64>,
    length: Option<u64>,
    format: Format,
    memory_bytes: Option<u64>,
}

/// Reads the request from a configuration.
fn configured(path: &Path, sets: &[String]) -> Result<Asked> {
    let resolved = resolve(&Config::load(Some(path), sets)?)?;
    let spec = model_spec(&resolved)?;
    let config = &resolved.config;
    let optimizer = config.optimizer.name;
    if optimizer != OptimizerName::AdamW {
        note(&format!(
            "the planner of clusters counts the state and the update of AdamW, not those of {optimizer}: 8 bytes a parameter"
        ));
    }
    if resolved.optimizer.averaging.is_some() {
        note(
            "the planner of clusters does not count the average of the weights: 4 more bytes a parameter, sharded like the optimizer's state",
        );
    }
    if resolved.optimizer.consolidation.is_some() {
        note(
            "the planner of clusters does not count what consolidation.from holds: 8 more bytes a parameter, sharded like the optimizer's state",
        );
    }
    let CompressionSection { gradients, parameters, outer, activations, activation_gradients, .. } = config.compression;
    let codecs = [gradients, parameters, outer, activations, activation_gradients.unwrap_or(activations)];
    for (is_set, passed_over) in [
        (config.update.rule != UpdateRule::Synchronous, "update.rule: --network compares rules"),
        (codecs.iter().any(|codec| *codec != CompressionCodec::None), "compression: --network compares codecs"),
        (config.distillation.teacher.is_some(), "the teacher's forward and its weights"),
    ] {
        if is_set {
            note(&format!("the planner of clusters plans plain synchronous steps, without {passed_over}"));
        }
    }
    let model = Architecture::from(&spec);
    let own = OwnModel { spec, tuning: tuning(config), base: base_codec(config) };
    if let Some(tuned) = own.tuned()? {
        let elements = |trained: bool| -> usize {
            let which = tuned.parameters().filter(|(_, parameter)| !trained || parameter.trained);
            which.map(|(_, parameter)| parameter.elements()).sum()
        };
        note(&format!(
            "fine_tuning: {} of {} parameters are trained; layouts that split products, sequences or experts are priced with the activations of full training",
            count(elements(true) as u64),
            count(elements(false) as u64)
        ));
        if !own.tuning.freeze_schedule.is_empty() {
            note("fine_tuning.freeze_schedule: planned are steps that train what any period trains");
        }
    }
    Ok(Asked {
        model,
        own: Some(own),
        batch: Some(resolved.batch.global as u64),
        length: Some(resolved.sequence_length as u64),
        format: keys::format(&resolved),
        memory_bytes: config.memory.limit.map(|limit| limit.0),
    })
}

/// The architecture of a model: by name, or from a folder or file of Hugging Face.
fn named_model(name: &str) -> Result<(Architecture, Option<ModelSpec>)> {
    let path = Path::new(name);
    let spec = if path.exists() {
        let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let text = if gguf::is_gguf(path) { config_text(path)? } else { read(&file)? };
        if let Some(mixture) = mixtures::architecture(&text).with_context(|| file.display().to_string())? {
            return Ok((mixture, None));
        }
        hf::from_config_json(&text).with_context(|| file.display().to_string())?.spec
    } else if let Ok(spec) = preset(name).or_else(|_| preset(&usual_name(name))) {
        spec
    } else {
        let all = models();
        if let Some(model) = all.get(name).or_else(|| all.get(&usual_name(name))) {
            return Ok((model.clone(), None));
        }
        let names = all.keys().map(String::as_str).chain(PRESET_NAMES);
        let near =
            trainyard_engine::config::nearest(name, names).map_or(String::new(), |n| format!(": did you mean `{n}`?"));
        bail!("no model is called `{name}`{near} (`trainyard plan --models` lists them)");
    };
    Ok((Architecture::from(&spec), Some(spec)))
}

fn formats(names: &[String]) -> Result<Vec<Format>> {
    let all = [Format::Fp32, Format::Tf32, Format::Fp16, Format::Bf16, Format::Fp8, Format::Fp4];
    let format = |name: &String| {
        let known = || all.map(Format::name).join(", ");
        let wanted = match name.as_str() {
            "f32" => "fp32",
            "f16" => "fp16",
            name => name,
        };
        all.into_iter().find(|f| f.name() == wanted).with_context(|| format!("--precision {name}: one of {}", known()))
    };
    names.iter().map(format).collect()
}

fn size(text: &str) -> Result<u64> {
    let value = toml::Value::String(text.to_owned());
    let size = ByteSize::from_value(&value).map_err(|problem| anyhow::anyhow!("--memory-limit {text}: {problem}"))?;
    Ok(size.0)
}

/// Parses `--fix`: `tp=8`, `checkpointing=full` ...
fn fixed(choices: &[String]) -> Result<Fixed> {
    let mut fixed = Fixed::default();
    for choice in choices {
        let (name, value) = choice.split_once('=').with_context(|| format!("--fix {choice}: write CHOICE=VALUE"))?;
        let number = || {
            let parsed = value.parse::<u32>().ok().filter(|n| *n > 0);
            parsed.with_context(|| format!("--fix {choice}: {name} is a number from 1"))
        };
        match name {
            "tp" => fixed.tp = Some(number()?),
            "pp" => fixed.pp = Some(number()?),
            "cp" => fixed.cp = Some(number()?),
            "ep" => fixed.ep = Some(number()?),
            "dp_replicate" => fixed.dp_replicate = Some(number()?),
            "dp_shard" => fixed.dp_shard = Some(number()?),
            "micro_batch" => fixed.micro_batch = Some(number()?),
            "accumulation" => fixed.accumulation = Some(number()?),
            "zero" => {
                let stage = value.parse::<u8>().ok().filter(|stage| *stage <= 3);
                fixed.zero_stage = Some(stage.with_context(|| format!("--fix {choice}: a stage from 0 to 3"))?);
            }
            "checkpointing" => {
                fixed.checkpointing = Some(match value {
                    "none" => Mode::None,
                    "selective" => Mode::Selective,
                    "full" => Mode::Full,
                    _ => bail!("--fix {choice}: none, selective or full"),
                });
            }
            "offload" => {
                let offload = value.parse().with_context(|| format!("--fix {choice}: true or false"))?;
                fixed.offload = Some(offload);
            }
            _ => bail!(
                "--fix {choice}: one of tp, pp, cp, ep, dp_replicate, dp_shard, zero, micro_batch, accumulation, checkpointing, offload"
            ),
        }
    }
    Ok(fixed)
}

/// Writes the files of `--timeline` and `--html`.
fn write_files(args: &Args, request: &Request, facts: &Facts, answer: &Answer, shown: (&Plan, usize)) -> Result<()> {
    if args.timeline.is_none() && args.html.is_none() {
        return Ok(());
    }
    let (shown, number) = shown;
    let (step, memory) = step(request, facts, &shown.candidate).context("the shown plan has a step")?;
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        note(&format!("wrote {}", path.display()));
        Ok::<(), anyhow::Error>(())
    };
    if let Some(path) = &args.timeline {
        write(path, timeline::trace(&step, &memory).to_string())?;
    }
    if let Some(path) = &args.html {
        let scaling = scaling(request, facts, answer);
        let base = Setup::of(request, &facts.stack, &answer.plans[0].candidate);
        let load = |sets: &[String]| Ok(Config::parse(Path::new("plan"), "", sets)?);
        let knows = |setup: &Setup| advise_settings::knows(&base, setup, &load);
        let bench = ClusterBench { request, facts, base: &base, knows: &knows };
        let levers = advise(&base, &Place::of(request), &bench).map_err(anyhow::Error::msg)?;
        let model = args.model.clone().or_else(|| Some(args.config.as_ref()?.display().to_string()));
        let parts = Page {
            model: &model.unwrap_or_default(),
            request,
            answer,
            step: (&step, number),
            memory: &memory,
            scaling: &scaling,
            levers: Some(&levers),
        };
        write(path, page(&parts))?;
    }
    Ok(())
}

/// The best plans on a half, a quarter and an eighth of the devices, for the plot of cost.
fn scaling(request: &Request, facts: &Facts, answer: &Answer) -> Vec<Scaling> {
    let entry = |answer: &Answer| {
        let best = &answer.plans[0];
        let devices = best.candidate.mesh.ranks();
        Scaling {
            devices,
            layout: best.layout.clone(),
            tokens_per_s: best.tokens_per_s,
            mfu: best.mfu,
            simulated: answer.simulated.iter().filter(|one| one.candidate.mesh.ranks() == devices).cloned().collect(),
        }
    };
    let mut all = vec![entry(answer)];
    let devices = answer.plans[0].candidate.mesh.ranks();
    for divisor in [2, 4, 8, 16] {
        if !devices.is_multiple_of(divisor) {
            break;
        }
        let limits = Limits { devices: Some(devices / divisor), ..request.limits.clone() };
        let smaller = Request { limits, objective: Objective::Speed, shown: 1, ..request.clone() };
        // What does not fit on fewer devices has no place in the plot.
        all.extend(plan(&smaller, facts).ok().map(|answer| entry(&answer)));
    }
    all
}

fn to_json(request: &Request, answer: &Answer, different: &[(String, Result<Answer, PlanError>)]) -> Value {
    let differences = different.iter().map(|(what, then)| match then {
        Ok(then) => json!({"change": what, "best": plan_json(&then.plans[0])}),
        Err(error) => json!({"change": what, "error": error.to_string()}),
    });
    json!({
        "cluster": {
            "nodes": request.cluster.nodes,
            "devices_per_node": request.cluster.devices_per_node,
            "device": request.cluster.device.name,
            "network": request.cluster.network.name,
        },
        "parameters": request.model.parameters(),
        "global_batch": request.global_batch,
        "sequence_length": request.sequence_length,
        "memory_bytes_max": answer.bytes_max,
        "objective": answer.objective,
        "search": answer.search,
        "gap": answer.gap,
        "basis": answer.basis,
        "equal_plans": answer.basis.equal(&answer.plans),
        "plans": answer.plans.iter().map(|plan| {
            let mut value = plan_json(plan);
            value["sets"] = settings(request, plan).ok().into();
            value
        }).collect::<Vec<_>>(),
        "reasons": answer.reasons,
        "what_if": differences.collect::<Vec<_>>(),
    })
}

/// A plan of a request as JSON.
pub fn plan_json(plan: &Plan) -> Value {
    let candidate = &plan.candidate;
    let memory: serde_json::Map<String, Value> = plan
        .memory
        .by_kind
        .iter()
        .map(|(kind, bytes): &(MemoryKind, u64)| (kind.name().to_owned(), json!(bytes)))
        .collect();
    let breakdown: serde_json::Map<String, Value> =
        plan.breakdown.0.iter().map(|(part, seconds)| (part.words().to_owned(), json!(seconds))).collect();
    json!({
        "layout": plan.layout,
        "mesh": candidate.mesh,
        "zero_stage": candidate.layout().zero_stage,
        "reshard_after_forward": candidate.reshard,
        "prefetch": candidate.prefetch,
        "reduce_schedule": candidate.reduce_schedule,
        "micro_batch_size": candidate.micro_batch,
        "accumulation_steps": candidate.accumulation,
        "activation_checkpointing": candidate.checkpointing,
        "offload": candidate.offload,
        "pipeline_schedule": candidate.pipeline,
        "pipeline_cuts": plan.cuts,
        "precision": candidate.format.name(),
        "runnable": candidate.runnable().is_yes(),
        "step_s": plan.step_s,
        "step_s_interval": plan.step_interval,
        "memory_bytes_interval": plan.memory_interval,
        "not_fitting_probability": plan.not_fitting,
        "tokens_per_s": plan.tokens_per_s,
        "model_flops_per_s_per_device": plan.model_flops_per_s,
        "mfu": plan.mfu,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "memory_bytes": plan.memory.total,
        "memory_by_purpose": memory,
        "memory_peak_at": plan.memory.at,
        "seconds_by_part": breakdown,
    })
}
