//! Plans of a configuration on this machine. Every way of running it is priced from a profile by
//! `trainyard calibrate`.

use super::{Args, fixed, formats, quoted};
use crate::choose::Lever;
use crate::commands::config::resolve_for;
use crate::output::{count, note, print};
use crate::{choose, forecast};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use trainyard_base::format_bytes;
use trainyard_calibrate::probe_group::inputs;
use trainyard_engine::config::{Config, Inputs};
use trainyard_engine::shape::model_spec;
use trainyard_plan::here::{Way, Ways};
use trainyard_plan::{Fixed, Mode, PricedStep, table, timeline};
use trainyard_sim::machine::Machine;
use trainyard_sim::transformer::Architecture;
use trainyard_sim::{Format, MachineProfile, ProfileKind};

/// The profile that prices the configuration. None if there is no profile, and peaks measured now
/// can stand for the machine.
pub fn profile(args: &Args, path: &Path) -> Result<Option<MachineProfile>> {
    let kind = forecast::profile_kind(&Config::load(Some(path), &args.sets)?);
    let profile = match &args.profile {
        Some(file) => return measured(file, kind).map(Some),
        None => forecast::profile(kind, &Machine::here()),
    };
    match profile {
        Ok(profile) => Ok(Some(profile)),
        // Without a profile the speed of a GPU is unknown.
        Err(why) if kind == ProfileKind::Gpu => {
            bail!("{why}, name its file with --profile, or name a cluster of known GPUs with --cluster")
        }
        Err(why) if args.trial_seconds > 0.0 => bail!("--trial-seconds: {why}"),
        Err(why) => {
            note(&format!("{why}; until then one rank on all cores, at measured peaks, stands for this machine"));
            Ok(None)
        }
    }
}

/// Reads a profile that `trainyard calibrate` wrote: of any GPU, of any processes, or of this
/// machine's cores.
pub fn measured(file: &Path, kind: ProfileKind) -> Result<MachineProfile> {
    let profile = MachineProfile::read(file)?;
    if kind == ProfileKind::Cpu && profile.machine.processes.is_none() {
        return Ok(MachineProfile::load(file, &Machine::here())?);
    }
    if kind == ProfileKind::Gpu && profile.machine.gpu.is_none() {
        bail!(
            "{} is of a processor, and the configuration computes on a GPU: `trainyard calibrate --device cuda` measures one",
            file.display()
        );
    }
    Ok(profile)
}

/// Shows the ways of running the configuration `path`, priced from `profile`.
pub fn ways(args: &Args, path: &Path, profile: &MachineProfile) -> Result<()> {
    let mut sets = args.sets.clone();
    sets.extend(args.memory_limit.iter().map(|limit| format!("memory.limit='{limit}'")));
    sets.extend(args.global_batch.iter().map(|batch| format!("training.global_batch_size={batch}")));
    sets.extend(args.sequence_length.iter().map(|length| format!("training.sequence_length={length}")));
    sets.extend(held(&fixed(&args.fix)?)?);
    if !args.precision.is_empty() {
        sets.extend(precision(&formats(&args.precision)?)?);
    }
    let load = |chosen: &[String]| -> Result<Config> { Ok(Config::load(Some(path), &[chosen, &sets[..]].concat())?) };
    let inputs = inputs(profile);
    let base = resolve_for(&load(&[])?, inputs.clone())?;
    let mut ways = choose::ways(&load, profile, &inputs)?;
    let number = args.show.unwrap_or(1);
    let fit = ways.fitting.len();
    if fit > 0 && !(1..=fit).contains(&number) {
        bail!("--show {number}: there are plans 1 to {fit}");
    }
    choose::try_out(&mut ways, &load, args.trial_seconds, &note)?;
    let tokens = base.tokens_per_step();
    let shown = |ways: &Ways| -> Result<Shown> {
        ways.best()?;
        Shown::of(&ways.fitting[number - 1], number, &load, &inputs, profile)
    };
    if let Some(file) = &args.timeline {
        let text = timeline::trace(&shown(&ways)?.step, &[]).to_string();
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
        note(&format!("wrote {}", file.display()));
    }
    let lever = ways.fitting.first().and_then(|best| choose::int8(best, &load, profile, &inputs));
    if args.json {
        return print(format_args!("{:#}\n", to_json(&ways, tokens, lever.as_ref())));
    }
    ways.best()?;
    let parameters = Architecture::from(&model_spec(&base)?).parameters();
    let mut text = format!(
        "{} parameters; {} tokens a step; {}\n\n",
        table::parameters(parameters),
        count(tokens),
        profile.machine
    );
    text += &lines(&ways, tokens, usize::from(args.top));
    let large = ways.too_large.len();
    text +=
        &format!("\n{fit} runnable plans fit, {large} do not; times are predicted at the speeds of the calibration\n");
    for (number, reason) in ways.reasons().iter().enumerate() {
        text += &format!("{:<5}{reason}\n", if number == 0 { "why" } else { "" });
    }
    if let (Some(Lever { set, step_s, effect }), Some(best)) = (&lever, ways.fitting.first()) {
        text += &format!(
            "more {set}: {:.2} ms a step for plan 1, {:.2} times as fast; {effect}\n",
            1e3 * step_s,
            best.step_s / step_s
        );
    }
    if args.show.is_some() {
        text += &format!("\n{}", shown(&ways)?.text);
    }
    print(text)
}

/// The choices of `--fix`, as settings.
fn held(fixed: &Fixed) -> Result<Vec<String>> {
    let Fixed { tp, pp, cp, ep, dp_replicate, dp_shard, zero_stage, micro_batch, accumulation, .. } = *fixed;
    let mode = fixed.checkpointing.map(|mode| match mode {
        Mode::None => "none",
        Mode::Selective => "selective",
        Mode::Full => "full",
    });
    let mut sets = Vec::new();
    let numbers = [
        ("parallel.tensor_parallel_degree", tp),
        ("parallel.pipeline_parallel_degree", pp),
        ("parallel.context_parallel_degree", cp),
        ("parallel.expert_parallel_degree", ep),
        ("parallel.data_parallel_replicate_degree", dp_replicate),
        ("parallel.data_parallel_shard_degree", dp_shard),
        ("parallel.zero_stage", zero_stage.map(u32::from)),
        ("training.micro_batch_size", micro_batch),
        ("training.accumulation_steps", accumulation),
    ];
    sets.extend(numbers.iter().filter_map(|(key, number)| Some(format!("{key}={}", (*number)?))));
    sets.extend(mode.map(|mode| format!("activation_checkpointing.mode={mode}")));
    match fixed.offload {
        Some(true) => bail!(
            "--fix offload=true: say what goes where, e.g. --set memory.offload.optimizer=disk (gradients, parameters, activations; host beside a GPU)"
        ),
        Some(false) => {
            let parts = ["optimizer", "gradients", "parameters", "activations"];
            sets.extend(parts.map(|part| format!("memory.offload.{part}=none")));
        }
        None => {}
    }
    Ok(sets)
}

/// The single number format of `--precision`, as settings.
pub fn precision(formats: &[Format]) -> Result<Vec<String>> {
    let [format] = formats else {
        bail!("--precision: one format on this machine; the planner of clusters chooses among several (--cluster)")
    };
    let (compute, more) = match format {
        Format::Fp32 => ("f32", None),
        Format::Tf32 => ("f32", Some("precision.tf32=true")),
        Format::Fp16 => ("f16", None),
        Format::Bf16 => ("bf16", None),
        Format::Fp8 => ("bf16", Some("precision.fp8=hybrid")),
        Format::Fp4 => bail!("--precision fp4: priced on clusters (--cluster), not run yet"),
    };
    let mut sets = vec![format!("precision.compute={compute}")];
    sets.extend(more.map(str::to_owned));
    Ok(sets)
}

/// The table of the first `top` ways.
fn lines(ways: &Ways, tokens: u64, top: usize) -> String {
    let is_tried = ways.fitting.first().is_some_and(|way| way.tried.is_some());
    let rows = ways.fitting.iter().take(top).map(|way| {
        let [micro, steps] = way.batch;
        let tried_s = way.tried.map(|tried| tried.seconds);
        let seconds = tried_s.unwrap_or(way.step_s);
        let mut row = vec![
            way.layout.clone(),
            format!("{micro} x {steps}"),
            way.savings.clone(),
            format!("{:.2} ms", 1e3 * way.step_s),
            count((tokens as f64 / seconds) as u64),
            format_bytes(way.bytes),
        ];
        if is_tried {
            row.insert(4, tried_s.map_or("-".to_owned(), |seconds| format!("{:.2} ms", 1e3 * seconds)));
        }
        row
    });
    let mut heads = vec!["layout", "batch", "recompute", "step", "tokens/s", "memory"];
    if is_tried {
        heads.insert(4, "tried");
    }
    table::lines(&heads, rows)
}

/// The details of one way, for `--show`.
struct Shown {
    step: PricedStep,
    text: String,
}

impl Shown {
    fn of(
        way: &Way,
        number: usize,
        load: &dyn Fn(&[String]) -> Result<Config>,
        inputs: &Inputs,
        profile: &MachineProfile,
    ) -> Result<Shown> {
        let resolved = resolve_for(&load(&way.sets)?, inputs.clone())?;
        let forecast = trainyard_calibrate::forecast(&resolved, &profile.machine)?;
        let step_s = way.step_s;
        let mut text = format!("plan {number}: {}\n", way.words());
        // Writing to a String cannot fail.
        for set in &way.sets {
            let _ = writeln!(text, "  --set {}", quoted(set));
        }
        let mut kinds: Vec<(&str, f64)> = way.kinds.iter().map(|(kind, seconds)| (kind.as_str(), *seconds)).collect();
        kinds.sort_by(|a, b| b.1.total_cmp(&a.1));
        let _ = writeln!(
            text,
            "\nstep {:.2} ms; instructions of a rank (exchanges and copies overlap with computing):",
            1e3 * step_s
        );
        for (kind, seconds) in kinds {
            let _ = writeln!(text, "  {kind:<40} {:>9.2} ms  {:>5.1} %", 1e3 * seconds, 100.0 * seconds / step_s);
        }
        let _ = writeln!(text, "\n{} at most on each rank; of each purpose at its own peak:", format_bytes(way.bytes));
        for (purpose, bytes) in forecast.fullest().purposes() {
            let _ = writeln!(text, "  {:<40} {:>11}", purpose.name(), format_bytes(bytes as u64));
        }
        for (what, bytes) in [("beside it on the host", way.pinned_bytes), ("on disk", forecast.fullest().disk)] {
            if bytes > 0 {
                let _ = writeln!(text, "  {what:<40} {:>11}", format_bytes(bytes));
            }
        }
        let times = forecast.step(profile, &profile.speeds).simulated.ranks;
        let programs = forecast.stages.into_iter().map(|(program, _)| program).collect();
        Ok(Shown { step: PricedStep { programs, times, memory: Vec::new(), step_s }, text })
    }
}

fn to_json(ways: &Ways, tokens: u64, lever: Option<&Lever>) -> Value {
    let way = |way: &Way| {
        json!({
            "layout": way.layout,
            "micro_batch_size": way.batch[0],
            "accumulation_steps": way.batch[1],
            "recomputation": way.savings,
            "sets": way.sets,
            "step_s": way.step_s,
            "tried_s": way.tried.map(|tried| tried.seconds),
            "tokens_per_s": tokens as f64 / way.tried.map_or(way.step_s, |tried| tried.seconds),
            "memory_bytes": way.bytes,
            "runnable": true,
        })
    };
    json!({
        "tokens": tokens,
        "memory_bytes_max": ways.fitting.first().and_then(|way| way.limit).map(|limit| limit.bytes),
        "plans": ways.fitting.iter().map(way).collect::<Vec<_>>(),
        "too_large": ways.too_large.iter().map(way).collect::<Vec<_>>(),
        "reasons": ways.reasons(),
        "levers": lever.map(|lever| json!({"set": lever.set, "step_s": lever.step_s, "effect": lever.effect})).as_slice(),
    })
}
