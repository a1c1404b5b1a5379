//! Update rules and codecs for replicas on machines like this one, with a given network between
//! them. Each is priced by simulating its programs; none is chosen, because each changes the
//! result.

use super::Args;
use crate::commands::config::resolve_for;
use crate::output::{count, print};
use anyhow::{Result, bail};
use serde_json::json;
use std::path::Path;
use trainyard_base::format_bytes;
use trainyard_calibrate::probe_group::inputs;
use trainyard_engine::bench;
use trainyard_engine::config::{Config, Resolved};
use trainyard_plan::table;
use trainyard_program::{Action, Axis, Fragment, Program, StepKind};
use trainyard_sim::host::{HostLayout, HostStage, host_step};
use trainyard_sim::{MachineProfile, NetworkLink};

/// A rule and a codec: settings, and what is known of their effect.
struct Choice {
    sets: Vec<String>,
    effect: &'static str,
}

const EXACT: &str = "-";
const BF16: &str = "rounds each sum to 8 bits of mantissa, as bf16 reductions everywhere do";
const INT8: &str = "quality kept with 4 bits already (Wang et al. 2023, ZeRO++)";
const INT4: &str = "quality kept (Wang et al. 2023, ZeRO++)";
const ONE_BIT: &str = "quality kept after a full-precision warm-up (Tang et al. 2021), which this program has not";
const TOP_K: &str = "quality kept with momentum correction and a warm-up (Lin et al. 2018), which this program has not";
const POWER_SGD: &str = "quality kept with rank 4 and SGD (Vogels et al. 2019)";
const LOCAL: &str = "worse with longer rounds (Lin et al. 2020)";
const DILOCO: &str = "about the quality of synchronous steps up to 500 (Douillard et al. 2023)";
const DILOCO_INT4: &str = "as diloco (Douillard et al. 2025, outer gradients of 4 bits)";
const STREAMING: &str = "as diloco (Douillard et al. 2025, streaming, 4 bits, mixing 0.5)";

fn choices() -> Vec<Choice> {
    let choice = |sets: &[&str], effect| Choice { sets: sets.iter().map(|set| (*set).to_owned()).collect(), effect };
    let mut all = vec![choice(&[], EXACT)];
    let codecs = [
        ("bf16", BF16),
        ("int8", INT8),
        ("int4", INT4),
        ("one_bit", ONE_BIT),
        ("top_k", TOP_K),
        ("power_sgd", POWER_SGD),
    ];
    all.extend(codecs.map(|(codec, effect)| choice(&[&format!("compression.gradients={codec}")], effect)));
    all.push(choice(&["update.rule=local", "update.every=16"], LOCAL));
    for every in ["update.every=50", "update.every=100", "update.every=500"] {
        all.push(choice(&["update.rule=diloco", every], DILOCO));
    }
    all.push(choice(&["update.rule=diloco", "update.every=100", "compression.outer=int4"], DILOCO_INT4));
    let streaming = ["update.rule=diloco", "update.every=100", "compression.outer=int4"];
    let streaming = [&streaming[..], &["update.fragments=4", "update.overlap=true"]].concat();
    all.push(choice(&streaming, STREAMING));
    all
}

/// The price of a choice.
struct Priced {
    choice: Choice,
    rule: String,
    every: u64,
    codec: String,
    /// Mean seconds of a step.
    step_s: f64,
    /// Mean bytes that a rank sends to other replicas in a step.
    sent_bytes: f64,
}

/// Shows update rules and codecs for the configuration `path` over `link`.
pub fn rules(args: &Args, path: &Path, profile: &MachineProfile, link: NetworkLink) -> Result<()> {
    let load = |chosen: &[String]| -> Result<Config> { Ok(Config::load(Some(path), &[&args.sets, chosen].concat())?) };
    let base = resolve_for(&load(&[])?, inputs(profile))?;
    let parallel = base.parallel;
    if base.apart.is_some() || base.server.is_some() || base.compression.gradients.is_some() {
        bail!(
            "--network compares update rules and codecs: leave [update] and [compression] of the configuration unset"
        );
    }
    if parallel.replicate == 1 || parallel.pipeline > 1 {
        bail!(
            "--network is between replicas, each on a machine like this one: set parallel.data_parallel_replicate_degree to their number, and no \
             pipeline across them"
        );
    }
    let here = (parallel.ranks / parallel.replicate) as u32;
    // Each replica has this machine's cores for itself.
    let threads = (inputs(profile).cores / here as usize).max(1);
    let over = profile.over(link, parallel.replicate as u32, here);
    let layout = HostLayout { ranks: here, threads: threads as u32 };
    let (mut priced, mut refused) = (Vec::new(), Vec::new());
    for choice in choices() {
        let sets = [&choice.sets[..], &[format!("compute.threads={threads}")]].concat();
        match resolve_for(&load(&sets)?, inputs(profile)) {
            Ok(resolved) => priced.push(price(choice, &resolved, &over, layout)?),
            Err(why) => refused.push(format!("{}: {why:#}", choice.sets.join(" "))),
        }
    }
    let tokens = base.tokens_per_step();
    if args.json {
        let rows = priced.iter().map(|row| {
            let Priced { choice, rule, every, codec, step_s, sent_bytes } = row;
            json!({ "sets": choice.sets, "rule": rule, "every": every, "codec": codec, "step_s": step_s,
                "sent_bytes": sent_bytes, "tokens_per_s": tokens as f64 / step_s, "effect": choice.effect })
        });
        return print(format_args!("{:#}\n", json!({ "rules": rows.collect::<Vec<_>>(), "refused": refused })));
    }
    let first = priced[0].step_s;
    let rows = priced.iter().map(|row| {
        vec![
            row.rule.clone(),
            row.every.to_string(),
            row.codec.clone(),
            format_bytes(row.sent_bytes as u64),
            format!("{:.1} ms", 1e3 * row.step_s),
            count((tokens as f64 / row.step_s) as u64),
            format!("{:.1} x", first / row.step_s),
            row.choice.effect.to_owned(),
        ]
    });
    let mut text = format!(
        "{} replicas, each on {here} ranks of a machine like this one, with {link} between them; {} tokens a step\n\n",
        parallel.replicate,
        count(tokens)
    );
    let titles =
        ["rule", "every", "codec", "sent a step", "step", "tokens/s", "gain", "effect on the result, as published"];
    text += &table::lines(&titles, rows);
    text += "\nEvery row but the first changes the result, so none is chosen for you. To take one:\n";
    for (number, row) in priced.iter().enumerate().skip(1) {
        let sets: Vec<String> = row.choice.sets.iter().map(|set| format!("--set {set}")).collect();
        text += &format!("{:>3}  {}\n", number + 1, sets.join(" "));
    }
    refused.iter().for_each(|line| text += &format!("left out: {line}\n"));
    print(text)
}

fn price(choice: Choice, resolved: &Resolved, profile: &MachineProfile, layout: HostLayout) -> Result<Priced> {
    let step = |kind: StepKind, fragment: Option<Fragment>| -> Result<(f64, f64)> {
        let (program, needs) = bench::forecast_of(resolved, kind, fragment)?;
        let stage = HostStage { program: &program, calls: &needs.calls };
        let step = host_step(&[stage], profile, layout, &profile.speeds);
        Ok((step.simulated.step_s, sent(&program)))
    };
    let (rule, every, (step_s, sent_bytes)) = match resolved.apart {
        None => ("synchronous", 1, step(StepKind::Synchronous, None)?),
        Some(apart) => {
            let inner = step(StepKind::Inner, None)?;
            let fragments = apart.fragments();
            let outer = match &fragments[..] {
                [] => vec![step(StepKind::Outer, None)?],
                own => own.iter().map(|own| step(StepKind::Outer, Some(*own))).collect::<Result<Vec<_>>>()?,
            };
            let mean = |of: fn(&(f64, f64)) -> f64| {
                let others = (apart.every - outer.len() as u64) as f64;
                (of(&inner) * others + outer.iter().map(of).sum::<f64>()) / apart.every as f64
            };
            let rule = match (apart.streams(), apart.outer.momentum == 0.0) {
                (true, _) => "streaming",
                (false, true) => "local",
                (false, false) => "diloco",
            };
            (rule, apart.every, (mean(|step| step.0), mean(|step| step.1)))
        }
    };
    let codec = resolved.compression.gradients.or(resolved.compression.outer);
    let codec = codec.map_or_else(|| "-".to_owned(), |encoding| encoding.codec.to_string());
    Ok(Priced { choice, rule: rule.to_owned(), every, codec, step_s, sent_bytes })
}

/// Bytes that a rank sends to other replicas in a step: of each sum, its parts for the others, and
/// the part that it adds up.
fn sent(program: &Program) -> f64 {
    let replicas = f64::from(program.mesh.dp_replicate);
    let of = |instruction: &trainyard_program::Instruction| {
        let part = match instruction.action {
            // Factors are summed whole.
            Action::Reduce { axis: Axis::Data, .. } if instruction.factors.is_some() => 1.0,
            Action::Reduce { axis: Axis::Data, .. } => f64::from(program.mesh.shard_degree()),
            Action::Outer { .. } => 1.0,
            _ => return 0.0,
        };
        let bytes = instruction.sent_bytes(Axis::Replicate, instruction.bytes) as f64 / part;
        2.0 * bytes * (replicas - 1.0) / replicas
    };
    program.instructions.iter().map(of).sum()
}
