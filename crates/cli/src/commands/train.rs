//! `trainyard train`: starts a run from a configuration, or the quick start without one, or resumes
//! an earlier run.

use super::config::{load, resolve};
use super::supervise::{self, EXIT_INTERRUPTED, RunFile, Supervised};
use super::{dash, records};
use crate::choose::{self, trial_seconds};
use crate::forecast;
use crate::output::{Verbosity, chain, count, is_fault, memory, note, print};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trainyard_base::format_bytes;
use trainyard_calibrate::probe_group;
use trainyard_comm::{Communicator, DEADLINE_DEFAULT, Environment};
use trainyard_engine::checkpoint::Choice;
use trainyard_engine::config::{Config, Inputs, Limits, Resolved};
use trainyard_engine::early_stopping::StoppedEarly;
use trainyard_engine::faults::{Faults, VARIABLE};
use trainyard_engine::generate::{Sampling, generate};
use trainyard_engine::metrics::progress::{self, Progress};
use trainyard_engine::predict::Preprocessing;
use trainyard_engine::resume::{GoingOn, ModelChange, rate_change, twice_as_long};
use trainyard_engine::session::{Session, files};
use trainyard_engine::shape::compute_dtype;
use trainyard_engine::spans;
use trainyard_engine::trainer::{Control, Ending, Summary, train};
use trainyard_engine::warning::warning;
use trainyard_engine::{EngineError, world};
use trainyard_plan::here::race;
use trainyard_sim::machine::Machine;
use trainyard_tensor::DType;

/// Tokens of the sample at the end.
const SAMPLE_TOKENS: usize = 120;

/// Train a model: from a configuration, or without one as a quick start on the Rust sources of this
/// machine.
#[derive(clap::Args)]
pub struct Args {
    /// A configuration in TOML (see `trainyard config docs`). Without one: the quick start.
    pub(super) config: Option<PathBuf>,
    /// Set a key over the configuration; can be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(super) sets: Vec<String>,
    /// Resume the run in this folder, from its newest whole checkpoint.
    #[arg(long, value_name = "RUN", conflicts_with = "config")]
    pub(super) resume: Option<PathBuf>,
    /// With --resume: resume from this checkpoint. Checkpoints of later steps are moved into the
    /// run's folder set-aside-NNN, with a copy of the records.
    #[arg(long, value_name = "latest|best|STEP", requires = "resume")]
    checkpoint: Option<Choice>,
    /// With --resume: let --set change keys of the model that do not change its tensors
    /// (rope_theta, sliding_window, norm_eps, activation, max_sequence_length). Without it every
    /// change of the model is an error.
    #[arg(long, requires = "resume")]
    change_model: bool,
    /// Train on these files or folders instead of those in the configuration; can be given several
    /// times.
    #[arg(long, value_name = "PATH", conflicts_with = "resume")]
    data: Vec<PathBuf>,
    /// `auto` picks the fastest plan (ranks, sharding, micro-batch, recomputation) within
    /// memory.limit, at the configuration's global batch, and prints the reasons. It needs this
    /// machine's profile (`trainyard calibrate`). Keys given by --set are kept.
    #[arg(long, value_enum, value_name = "PLAN", conflicts_with = "resume")]
    plan: Option<PlanBy>,
    /// With --plan auto: seconds for trials. Plans that are predicted to be nearly as fast as the
    /// best run a few steps each, in turn, which corrects the predictions. 0: no trials. Default: 3
    /// % of the predicted run, at most 120. There are no trials for ranks that are processes.
    #[arg(long, value_name = "SECONDS", requires = "plan", value_parser = trial_seconds)]
    trial_seconds: Option<f64>,
    /// End after this step with a checkpoint and an evaluation, before the run's own limit. The
    /// schedule stays that of the whole run, which --resume goes on with.
    #[arg(long, value_name = "STEP", value_parser = clap::value_parser!(u64).range(1..))]
    until: Option<u64>,
    /// When a rank fails, restart from the newest checkpoint, up to N times. For ranks that are
    /// processes use `trainyard launch --max-restarts`, or `trainyard supervise` around mpirun or
    /// srun.
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: u32,
    /// Also show the runs of run.directory in the browser, at an address that is printed.
    #[arg(long)]
    dash: bool,
    #[command(flatten)]
    verbosity: Verbosity,
    /// The file in which rank 0 writes the run's folder and its exit code, for the supervisor.
    #[arg(long, hide = true, value_name = "FILE")]
    run_file: Option<PathBuf>,
    /// Resume the run that an earlier attempt of this command began.
    #[arg(long, hide = true, value_name = "RUN")]
    pub(super) restart: Option<PathBuf>,
}

/// The values of `--plan`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum PlanBy {
    /// The fastest plan that this program can run here.
    Auto,
}

/// The options that a supervisor adds.
pub const RUN_FILE: &str = "--run-file";
pub const RESTART: &str = "--restart";

impl Args {
    /// The run to resume, if any. After a restart, the chosen checkpoint and the settings of a new
    /// run are left out, because an earlier attempt has already applied them.
    fn going_on(&self) -> Option<GoingOn<'_>> {
        let model_change = if self.change_model { ModelChange::OnPurpose } else { ModelChange::Refused };
        match (&self.restart, &self.resume) {
            (Some(folder), None) => Some(GoingOn::new(folder, &[])),
            (Some(folder), Some(_)) => Some(GoingOn { model_change, ..GoingOn::new(folder, &self.sets) }),
            (None, Some(folder)) => {
                let checkpoint = self.checkpoint.unwrap_or_default();
                Some(GoingOn { checkpoint, model_change, ..GoingOn::new(folder, &self.sets) })
            }
            (None, None) => None,
        }
    }

    /// This command without its supervision.
    fn command(&self) -> Result<Vec<OsString>> {
        let mut command =
            vec![std::env::current_exe().context("this program's path")?.into_os_string(), "train".into()];
        command.extend(self.config.iter().map(|path| path.clone().into_os_string()));
        let mut option = |name: &str, value: OsString| command.extend([name.into(), value]);
        self.sets.iter().for_each(|set| option("--set", set.into()));
        self.plan.iter().for_each(|_| option("--plan", "auto".into()));
        self.trial_seconds.iter().for_each(|seconds| option("--trial-seconds", seconds.to_string().into()));
        self.resume.iter().for_each(|folder| option("--resume", folder.into()));
        self.checkpoint.iter().for_each(|choice| option("--checkpoint", choice.to_string().into()));
        self.until.iter().for_each(|step| option("--until", step.to_string().into()));
        self.data.iter().for_each(|path| option("--data", path.into()));
        command.extend(self.dash.then(|| "--dash".into()));
        command.extend(self.change_model.then(|| "--change-model".into()));
        command.extend(self.verbosity.option().map(OsString::from));
        Ok(command)
    }
}

/// Runs the command: every rank trains, rank 0 prints.
pub fn run(args: &Args, process_start: Instant) -> Result<ExitCode> {
    if args.max_restarts > 0 {
        if Environment::detect()?.world > 1 {
            bail!(
                "a rank cannot be restarted alone: use `trainyard launch --max-restarts`, or `trainyard supervise` around the launcher"
            );
        }
        let (command, max_restarts) = (args.command()?, args.max_restarts);
        let run = RunFile::own();
        return supervise::supervise(Supervised { command: &command, max_restarts, run, is_honest: true });
    }
    let result = run_ranks(args, process_start);
    if let Some(file) = args.run_file.as_deref().filter(|_| is_first_process()) {
        let code = match &result {
            Ok(Ending::Complete | Ending::Paused) => 0,
            Ok(Ending::Interrupted) => EXIT_INTERRUPTED,
            Err(error) if is_fault(error) => supervise::EXIT_FAULT,
            Err(_) => 1,
        };
        supervise::write_exit_code(file, code).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(if result? == Ending::Interrupted { ExitCode::from(EXIT_INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// True if rank 0 is in this process.
fn is_first_process() -> bool {
    Environment::detect().is_ok_and(|environment| environment.rank == 0)
}

fn run_ranks(args: &Args, process_start: Instant) -> Result<Ending> {
    // Processes connect before they know their configuration only if rank 0 picks the plan.
    let world = if args.plan.is_some() { Environment::detect()?.connect(DEADLINE_DEFAULT, note)? } else { None };
    let config = match args.going_on() {
        Some(going_on) => {
            let config = Session::configuration(&going_on);
            let config = config.with_context(|| format!("cannot resume {}", going_on.folder.display()));
            config.inspect_err(|error| world.iter().for_each(|world| drop(world.give_up(chain(error)))))?
        }
        None => configuration(args, world.as_ref())?,
    };
    let faults = Faults::from_environment()?.map(Arc::new);
    if let Some(faults) = &faults {
        note(&warning(format_args!(
            "{VARIABLE}: this run is going to fail on purpose: {} (steps count from 0 here and in reports of failures, from 1 in metrics)",
            faults.describe()
        )));
    }
    let signals = Signals::watch()?;
    let control = Control { stop: &signals.stop, process_start, on_stuck: end_process };
    let body = |world| train_rank(args, &config, world, control, &signals, faults.as_ref());
    let result = match world {
        Some(world) => world::run(world, body),
        None => world::launch(&config, note, body),
    };
    // After an error before the first step, no fault can have struck.
    if let Some(faults) = faults.filter(|_| result.as_ref().map_or_else(EngineError::is_fault, |_| true)) {
        say_what_did_not_strike(&faults)?;
    }
    Ok(result?)
}

/// Names the injected faults of this process's ranks that did not strike. A test whose fault never
/// struck must not count as survived.
fn say_what_did_not_strike(faults: &Faults) -> Result<()> {
    let environment = Environment::detect()?;
    let own = (environment.world > 1).then_some(environment.rank);
    for (rank, fault) in faults.to_come(own) {
        note(&warning(format_args!(
            "{VARIABLE}: `{fault}` did not strike: the run did not come to this place of rank {rank}, or sent nothing there to corrupt (steps count from 0, \
             `trainyard program` numbers the instructions)"
        )));
    }
    Ok(())
}

/// Ends the process if a rank's threads do not end.
fn end_process(why: &str) {
    note(&format!("error: {why}"));
    std::process::exit(supervise::EXIT_FAULT.into());
}

/// One rank's run from beginning to end.
fn train_rank(
    args: &Args,
    config: &Config,
    world: Communicator,
    control: Control<'_>,
    signals: &Signals,
    faults: Option<&Arc<Faults>>,
) -> Result<Ending, EngineError> {
    let is_first = world.rank() == 0;
    let verbosity = args.verbosity;
    let say = |line: &str| {
        if is_first {
            verbosity.note(line);
        }
    };
    if let Some(faults) = faults {
        faults.check(world.size())?;
    }
    world::prepare(&world, config, faults.map(Arc::as_ref));
    if world.backend() != "local" {
        say(&processes(&world, &Environment::detect()?));
    }
    let mut session = match args.going_on() {
        Some(going_on) => Session::resume(&going_on, world, say)?,
        None => Session::create(config, world, say)?,
    };
    session.until = args.until;
    if let (true, Some(file)) = (is_first, &args.run_file) {
        supervise::write_run_file(file, &session.folder).map_err(|source| EngineError::File {
            what: "cannot write",
            path: file.display().to_string(),
            source,
        })?;
    }
    if is_first && let Err(error) = records::write_environment(&session.folder, session.world.size()) {
        say(&warning(format_args!("the environment is not kept: {error}")));
    }
    if is_first && args.dash {
        dash::beside_training(&session.folder);
    }
    if let Some(faults) = faults {
        session.rank.inject(Arc::clone(faults));
    }
    if is_first && let Err(error) = session.keep_time(forecast::time(&session)) {
        // A failure to save the prediction does not stop the training.
        say(&warning(format_args!("the prediction is not kept: {}", chain(&anyhow::Error::from(error)))));
    }
    let show = |text: String| if is_first { print(text).map_err(output_error) } else { Ok(()) };
    if verbosity.is_verbose() {
        show(format!("{}\n", session.resolved.to_toml()))?;
    }
    if !verbosity.is_quiet() {
        show(plan(&session))?;
    }
    let mut display: Box<dyn Progress> = match (is_first, verbosity.is_quiet()) {
        (true, false) => progress::for_stderr(),
        (true, true) => Box::new(progress::Warnings::new(std::io::stderr())),
        (false, _) => Box::new(progress::Quiet),
    };
    signals.begin_training(is_first);
    let summary = train(&mut session, &mut *display, control)?;
    // With sharded parameters all ranks are needed to generate.
    let samples = summary.ending == Ending::Complete && !verbosity.is_quiet();
    if samples && (is_first || session.rank.needs_others()) {
        let text = sample(&session)?;
        if is_first && !text.is_empty() {
            show(format!("\n--- sample, after a prompt of {} tokens ---\n{text}\n---\n\n", prompt(&session)?.len()))?;
            if let Err(error) = records::add_sample(&session.folder, session.state.step, &text) {
                say(&warning(format_args!("the sample is not kept: {error}")));
            }
        }
    }
    show(result(&session, &summary))?;
    if !verbosity.is_quiet() {
        show(describe(&session, &summary, verbosity))?;
    }
    Ok(summary.ending)
}

/// A line about the connected processes: their number and backend.
fn processes(world: &Communicator, environment: &Environment) -> String {
    let (size, backend) = (world.size(), world.backend());
    let met = environment.master.as_ref().filter(|_| backend == "tcp").map_or(String::new(), |master| {
        format!("; met at {} port {} ({})", master.host, master.port, master.derivation)
    });
    format!("{size} processes over {backend} ({}){met}", environment.derivation)
}

/// The error of a standard output that is closed or full.
fn output_error(error: anyhow::Error) -> EngineError {
    let source = error.downcast::<std::io::Error>().unwrap_or_else(std::io::Error::other);
    EngineError::File { what: "cannot write", path: "standard output".to_owned(), source }
}

/// The configuration of the run. With `--plan auto` and processes, rank 0 of `world` picks the plan
/// for all.
fn configuration(args: &Args, world: Option<&Communicator>) -> Result<Config> {
    let mut sets = Vec::new();
    if !args.data.is_empty() {
        let paths = args.data.iter().map(|path| toml::Value::String(path.display().to_string()));
        // Added first, so that a --set of the same key wins.
        sets.push(format!("data.train={}", toml::Value::Array(paths.collect())));
    }
    sets.extend(args.sets.iter().cloned());
    if args.plan.is_none() {
        return load(args.config.as_deref(), &sets);
    }
    let load = |chosen: &[String]| load(args.config.as_deref(), &[chosen, &sets[..]].concat());
    let Some(world) = world else {
        return load(&choose(&load, &Machine::here(), &Inputs::of_this_machine(), args)?);
    };
    // Rank 0 broadcasts its plan or its error, so that all ranks end alike.
    let mut own = None;
    let picked = world::from_first(world, || {
        let picked = probe_group::machine(world).map_err(anyhow::Error::from);
        let picked = picked
            .and_then(|machine| choose(&load, &machine, &world::inputs(world), args))
            .map_err(|error| own.insert(error));
        let told: Result<&Vec<String>, String> = picked.as_ref().map_err(|error| chain(error));
        Ok(serde_json::to_vec(&told).expect("words are JSON"))
    })?;
    let picked: Result<Vec<String>, String> = serde_json::from_slice(&picked).context("what rank 0 has picked")?;
    let picked = picked.map_err(|why| own.unwrap_or_else(|| anyhow::anyhow!("rank 0 could not pick a plan: {why}")))?;
    // The others would wait for a rank that cannot read its configuration.
    load(&picked).inspect_err(|error| drop(world.give_up(chain(error))))
}

/// Picks the fastest plan on `machine` and prints it with its reasons. Returns its settings. `load`
/// makes the configuration from settings, and `inputs` describe the ranks. If ranks are threads,
/// the most promising plans are tried for `--trial-seconds`.
fn choose(
    load: &dyn Fn(&[String]) -> Result<Config>,
    machine: &Machine,
    inputs: &Inputs,
    args: &Args,
) -> Result<Vec<String>> {
    let (trial_seconds, verbosity) = (args.trial_seconds, args.verbosity);
    let kind = forecast::profile_kind_on(&load(&[])?, machine);
    let are_processes = machine.processes.is_some();
    if are_processes && trial_seconds.is_some_and(|seconds| seconds > 0.0) {
        bail!("--trial-seconds tries ranks that are threads: leave it out under a launcher")
    }
    let profile = forecast::profile(kind, machine);
    let profile = profile.map_err(|why| anyhow::anyhow!("--plan auto needs to know this machine: {why}"))?;
    let mut ways = choose::ways(load, &profile, inputs)?;
    let seconds = match trial_seconds {
        _ if are_processes => 0.0,
        Some(seconds) => seconds,
        None => {
            let limits = resolve(&load(&[])?)?.limits;
            race::default_seconds(limits.steps, limits.seconds, ways.best()?.step_s)
        }
    };
    choose::try_out(&mut ways, load, seconds, &|line| verbosity.note(line))?;
    let best = ways.best()?;
    if verbosity.is_quiet() {
        return Ok(best.sets.clone());
    }
    let (fit, large) = (ways.fitting.len(), ways.too_large.len());
    let fastest = match ways.fitting.iter().filter(|way| way.tried.is_some()).count() {
        0 => format!("the fastest of {fit} plans that fit, {large} do not"),
        tried => format!("of {fit} plans that fit ({large} do not) the fastest by predictions and trials of {tried}"),
    };
    print(format_args!(
        "plan         {}\n             {:.2} ms a step, predicted: {fastest}\n",
        best.words(),
        1e3 * best.step_s
    ))?;
    for (number, reason) in ways.reasons().iter().enumerate() {
        print(format_args!("{:<13}{reason}\n", if number == 0 { "why" } else { "" }))?;
    }
    print("\n")?;
    Ok(best.sets.clone())
}

/// The lines before the training: model, data, machine, and the needs of a step.
fn plan(session: &Session) -> String {
    let resolved = &session.resolved;
    let dtype = compute_dtype(resolved);
    let purposes = session.prediction.purposes();
    let purposes: Vec<String> =
        purposes.iter().map(|(p, bytes)| format!("{p} {}", format_bytes(*bytes as u64))).collect();
    let kernels = session.peaks.as_ref().map_or(String::new(), |peaks| {
        format!(
            "kernels      {}; measured peaks: f32 {:.3} TFLOP/s, bf16 {:.3} TFLOP/s, copies {:.1} GB/s\n",
            peaks.of_what(),
            peaks.flops(DType::F32) / 1e12,
            peaks.flops(DType::BF16) / 1e12,
            peaks.copy_bytes_per_s() / 1e9,
        )
    });
    let copy = match session.prediction.copy as u64 {
        copy if copy > 0 && session.copies_state => {
            format!("; {} more while a checkpoint is written", format_bytes(copy))
        }
        _ => String::new(),
    };
    let each = if resolved.parallel.ranks > 1 { " on each rank" } else { "" };
    let folder = session.folder.display();
    format!(
        "model        {} parameters, {} tokens a step\n\
         layout       {}\n\
         training     {}\n\
         {kernels}\
         step         {:.3} TFLOP in {dtype}{each}; {} instructions\n\
         memory       {} predicted{each}: {}{copy}\n\
         settings     in {folder}/{}, {} derived ones with their reasons; --verbose prints it\n\
         run folder   {folder}\n\n",
        count(session.rank.model().parameter_count() as u64),
        count(resolved.tokens_per_step()),
        choose::words(resolved),
        recipe(resolved),
        session.prediction.cost.flops as f64 / 1e12,
        session.programs[session.priced()].instructions.len(),
        format_bytes(session.prediction.memory.peak_total() as u64),
        purposes.join(", "),
        files::CONFIG,
        resolved.derivations.len(),
    )
}

/// The limits, the optimizer and the schedule of a run, in words:
/// `90 s; adamw, learning rate 0.002, cosine after 20 steps of warmup`.
fn recipe(resolved: &Resolved) -> String {
    let Limits { steps, seconds } = resolved.limits;
    let limits = steps.map(|steps| format!("{} steps", count(steps))).into_iter();
    let limits: Vec<String> = limits.chain(seconds.map(|seconds| format!("{seconds} s"))).collect();
    format!(
        "{}; {}, learning rate {}, {} after {} steps of warmup",
        limits.join(" or "),
        resolved.optimizer.name,
        resolved.optimizer.learning_rate,
        resolved.schedule.kind,
        resolved.schedule.warmup_steps
    )
}

/// The handling of SIGINT and SIGTERM.
#[derive(Default)]
struct Signals {
    /// True if the run was asked to stop.
    stop: Arc<AtomicBool>,
    /// True if a signal ends the process at once: before the training, and after a first signal.
    leave: Arc<AtomicBool>,
}

impl Signals {
    /// Installs the handlers. Until training begins a signal ends the process.
    fn watch() -> Result<Signals> {
        let signals = Signals::default();
        signals.leave.store(true, Ordering::Relaxed);
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // Order matters: the check of the flag comes before the flag is set.
            signal_hook::flag::register_conditional_shutdown(
                signal,
                EXIT_INTERRUPTED.into(),
                Arc::clone(&signals.leave),
            )
            .context("signal handling")?;
            for flag in [&signals.stop, &signals.leave] {
                signal_hook::flag::register(signal, Arc::clone(flag)).context("signal handling")?;
            }
        }
        Ok(signals)
    }

    /// From here on the first signal asks the run to stop, and a second one ends the process. If
    /// this process `speaks`, it prints a message at the first signal.
    fn begin_training(&self, speaks: bool) {
        self.leave.store(false, Ordering::Relaxed);
        if !speaks {
            return;
        }
        let stop = Arc::clone(&self.stop);
        // The thread ends with the process. If it cannot start, only the message is lost.
        let _ = std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK_INTERVAL);
            }
            note("stopping after what is being computed, with a checkpoint to go on from; a second signal ends the process at once");
        });
    }
}

/// Interval at which the thread checks for a signal.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// A sample of generated text, after the beginning of a function, or else of the validation text.
/// All ranks generate it together.
fn sample(session: &Session) -> Result<String, EngineError> {
    let prompt = prompt(session)?;
    if prompt.is_empty() {
        return Ok(String::new());
    }
    let Some(tokenizer) = &session.tokenizer else { return Ok(String::new()) };
    let mut decoder = tokenizer.stream_decoder();
    let mut text = tokenizer.decode(&prompt);
    let (mut prompt, mut stop) = (prompt, Vec::new());
    let spec = session.rank.model().spec();
    if let Some(spec) = spec.filter(|spec| spec.encoder.is_some()) {
        prompt = spans::prompt(spec, tokenizer, prompt)?;
        stop.extend(tokenizer.eos());
        text += "\n→ ";
    }
    generate(&session.rank, &prompt, SAMPLE_TOKENS, Sampling::default(), &stop, |token| {
        match spec.and_then(|spec| spans::sentinel_in_words(spec, tokenizer, token)) {
            Some(name) => text += &name,
            None => text += &decoder.push(token),
        }
        true
    })?;
    text += &decoder.finish();
    // A poorly trained byte-level model may write control characters that move a terminal's cursor.
    Ok(text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t'), "\u{fffd}"))
}

fn prompt(session: &Session) -> Result<Vec<u32>, EngineError> {
    let Some(tokenizer) = &session.tokenizer else { return Ok(Vec::new()) };
    if session.resolved.config.data.train.0.iter().any(|s| s.path.as_os_str() == "rust-sources") {
        return Ok([tokenizer.before(), &tokenizer.encode("fn main() {")?].concat());
    }
    let Some(text) = session.validation.iter().find(|text| text.tokens() > 0) else { return Ok(Vec::new()) };
    let mut tokens = Vec::new();
    let vocabulary = session.rank.model().vocab_size() as u32;
    text.read_into(0..text.tokens().min(8), vocabulary, &mut tokens)?;
    Ok(tokens.into_iter().map(|token| token as u32).collect())
}

/// If a step's seconds differ from their prediction by more than this share, they are shown by kind
/// of instruction.
const TIME_OFF: f64 = 0.1;
/// If bytes exceed their prediction by more than this share, they are shown by purpose.
const MEMORY_OFF: f64 = 0.02;

/// Measured and predicted seconds of a step, or the reason why there is no prediction. Shown by
/// kind of instruction if they differ or `verbosity` asks for it.
fn times(session: &Session, summary: &Summary, verbosity: Verbosity) -> String {
    let median_s = summary.step_s_median;
    let head = format!("time         {:.2} ms a step (median)", 1e3 * median_s);
    let predicted = match &session.time {
        Ok(predicted) => predicted,
        Err(why) => return format!("{head}; not predicted: {why}\n"),
    };
    let mut text = format!("{head}, {:.2} predicted{}\n", 1e3 * predicted.step_s, off(median_s, predicted.step_s));
    let is_off = (median_s / predicted.step_s - 1.0).abs() > TIME_OFF;
    if !is_off && !verbosity.is_verbose() {
        return text;
    }
    let line = |what: &str, measured: f64, predicted: f64| {
        format!("  {what:<16} {:>8.2} ms {:>8.2} ms {}\n", 1e3 * measured, 1e3 * predicted, off(measured, predicted))
    };
    text += "time by kind       measured   predicted\n";
    let mut kinds: Vec<&String> = summary.instructions.keys().collect();
    let seconds = |kind: &String| predicted.instructions.get(kind).copied().unwrap_or(0.0);
    kinds.sort_by(|a, b| summary.instructions[*b].total_cmp(&summary.instructions[*a]));
    for kind in kinds {
        // Kinds of instruction below a thousandth of the step are left out.
        let (measured, predicted) = (summary.instructions[kind], seconds(kind));
        if measured.max(predicted) > 1e-3 * median_s {
            text += &line(kind, measured, predicted);
        }
    }
    text += &line("a step", median_s, predicted.step_s);
    text
}

/// Settings to train twice as long, or, after an early end, with twice the patience.
fn longer(resolved: &Resolved, stopped_early: bool) -> String {
    match resolved.config.evaluation.early_stopping_patience.filter(|_| stopped_early) {
        Some(patience) => format!(" --set evaluation.early_stopping_patience={}", 2 * patience),
        None => twice_as_long(resolved).concat(),
    }
}

/// A sentence about an early end of the run, and the checkpoint to use; empty if it reached its
/// limit.
fn early_end(stopped: Option<&StoppedEarly>) -> String {
    let Some(StoppedEarly { evaluations, lowest, checkpoint }) = stopped else { return String::new() };
    let best = match (lowest, checkpoint) {
        (None, _) => "no loss was finite".to_owned(),
        (Some((step, loss)), Some(path)) => format!("the best is step {step}, loss {loss:.4}: {}", path.display()),
        (Some((step, loss)), None) => {
            format!("the best was step {step}, loss {loss:.4}, whose checkpoint was not kept (checkpoint.keep_best)")
        }
    };
    format!("early end    {evaluations} evaluations in a row without a lower loss; {best}\n")
}

/// The passes over the training data, if some of it was seen more than once.
fn passes(epochs: &[f64]) -> String {
    if epochs.iter().all(|epochs| *epochs <= 1.0) {
        return String::new();
    }
    let each: Vec<String> = epochs.iter().map(|epochs| format!("{epochs:.2}")).collect();
    let of = if epochs.len() > 1 { " of each corpus, in the order of data.train" } else { "" };
    format!("epochs       {} passes over the training data{of}\n", each.join(", "))
}

/// ` (+1.1 %)`; empty if there is nothing to compare.
fn off(measured: f64, predicted: f64) -> String {
    match measured > 0.0 && predicted > 0.0 {
        true => format!(" ({:+.1} %)", 100.0 * (measured / predicted - 1.0)),
        false => String::new(),
    }
}

/// Measured and predicted peak memory. Shown by purpose if one exceeds its prediction or
/// `verbosity` asks for it.
fn peaks(summary: &Summary, verbosity: Verbosity) -> String {
    let (measured, predicted) = summary.memory_total;
    let mut text = format!(
        "memory       {} at the peak, {} predicted{}\n",
        format_bytes(measured as u64),
        format_bytes(predicted as u64),
        off(measured as f64, predicted as f64)
    );
    // A large share of a few bytes is ignored.
    let is_above = |measured: usize, predicted: usize| {
        let more = measured.saturating_sub(predicted) as f64;
        more > MEMORY_OFF * predicted as f64 && more > 1e-3 * summary.memory_total.0 as f64
    };
    if verbosity.is_verbose() || summary.memory.iter().any(|(_, measured, predicted)| is_above(*measured, *predicted)) {
        let rows: Vec<_> = summary.memory.iter().map(|(p, m, q)| (p.name(), *m as u64, *q as u64)).collect();
        text += "memory by purpose  measured   predicted\n";
        text += &memory(&rows, (measured as u64, predicted as u64));
    }
    text
}

/// The result of a run: its ending, loss and validation loss.
fn result(session: &Session, summary: &Summary) -> String {
    let mut text = match summary.ending {
        Ending::Complete => format!("done: {} steps", count(summary.steps)),
        Ending::Interrupted => format!("stopped after {} steps, with a checkpoint to go on from", count(summary.steps)),
        Ending::Paused => format!("paused after {} steps, with a checkpoint to go on from", count(summary.steps)),
    };
    text += &format!(", {} tokens; {:.1} s of training\n", count(summary.tokens), summary.seconds);
    text += &early_end(summary.stopped_early.as_ref());
    text += &passes(&summary.epochs);
    if summary.loss.is_finite() {
        text += &format!("loss         {:.4} in the last step\n", summary.loss);
    }
    if let Some(e) = &summary.evaluation {
        let bits = e.bits_per_byte.map_or(String::new(), |bits| format!(", {bits:.4} bits per byte"));
        let (what, unit) = match e.top1.zip(e.top5) {
            Some((top1, top5)) => (format!("top 1 {:.2} %, top 5 {:.2} %", 1e2 * top1, 1e2 * top5), "images"),
            None => (format!("perplexity {:.2}{bits}", e.perplexity), "tokens"),
        };
        text += &format!("validation   loss {:.4}, {what} ({} {unit})\n", e.loss, count(e.tokens));
    }
    if summary.skipped > 0 {
        text += &format!("skipped      {} steps whose loss or gradient was not finite\n", summary.skipped);
    }
    text + &format!("run folder   {} ({}, metrics.jsonl, checkpoints)\n", session.folder.display(), files::CONFIG)
}

/// A line about the pulls from a parameter server, by the number of updates that they lacked.
fn staleness(pulls: &[u64]) -> String {
    let all = pulls.iter().sum::<u64>().max(1);
    let share = |(lacked, pulls): (usize, &u64)| format!("{lacked}: {:.1} %", 100.0 * *pulls as f64 / all as f64);
    let shares: Vec<String> = pulls.iter().enumerate().map(share).collect();
    format!("staleness    updates that pulled parameters lacked: {}\n", shares.join(", "))
}

/// The summary of a run: result, speed, memory, and commands to continue with.
fn describe(session: &Session, summary: &Summary, verbosity: Verbosity) -> String {
    let folder = session.folder.display();
    let mut text = String::new();
    if summary.step_s_median > 0.0 {
        let share = summary.mfu_median.map_or(String::new(), |mfu| {
            format!(", {:.1} % of the measured {} peak", 100.0 * mfu, compute_dtype(&session.resolved))
        });
        let exchange = match session.world.size() {
            1 => String::new(),
            _ => format!(
                "exchange     {:.1} % of the time; {:.1} % waiting for it, the rest overlapped with computing\n",
                100.0 * summary.comm_share,
                100.0 * summary.comm_exposed_share
            ),
        };
        let speed = match &session.resolved.images {
            Some(images) => format!("{} images/s", count((summary.tps_median / images.positions() as f64) as u64)),
            None => format!("{} tokens/s", count(summary.tps_median as u64)),
        };
        let preprocessing = session.time.as_ref().ok().and_then(|time| time.preprocessing);
        let preparing = preprocessing.map_or(String::new(), |work| {
            let Preprocessing { image_s, images, workers, step_s } = work;
            let (each, all) = (1e3 * image_s, 1e3 * step_s);
            let waits = summary.data_wait_share > 0.01 && session.resolved.config.images.cache.is_none();
            let hint = if waits { "; images.cache would keep them decoded" } else { "" };
            format!("; {each:.2} ms for an image, {all:.1} ms for the {images} of a step with data.workers = {workers}{hint}")
        });
        let staleness = summary.staleness.as_deref().map(staleness).unwrap_or_default();
        let dropped = summary
            .dropped_pushes
            .map_or(String::new(), |dropped| format!("dropped      {} gradients that came too late\n", count(dropped)));
        text += &format!(
            "speed        {speed}{share}\n\
             {}\
             {}\
             data         {:.3} % of the time waiting for it{preparing}\n\
             {exchange}\
             {staleness}\
             {dropped}\
             first step   done {:.2} s after the program's start\n",
            times(session, summary, verbosity),
            peaks(summary, verbosity),
            100.0 * summary.data_wait_share,
            summary.first_step_done_s,
        );
    }
    text += "\n";
    let more = match summary.ending {
        Ending::Interrupted | Ending::Paused => String::new(),
        Ending::Complete => longer(&session.resolved, summary.stopped_early.is_some()),
    };
    let rate = match summary.ending {
        Ending::Interrupted | Ending::Paused => None,
        Ending::Complete => rate_change(&session.state, &session.resolved.schedule_over(2 * summary.steps)),
    };
    let rate = rate.map_or(String::new(), |change| format!("             {change}\n"));
    let generate = match session.tokenizer {
        Some(_) => format!("trainyard generate {folder} --prompt \"...\"\n             "),
        None => String::new(),
    };
    text + &format!(
        "go on        trainyard train --resume {folder}{more}\n\
         {rate}\
         use it       {generate}trainyard eval {folder} --data FILES\n             \
                      trainyard export {folder} --out DIR\n"
    )
}
