//! `trainyard plan --from FILE`: what a trainer's settings run, priced as it runs them, beside what
//! would be better.

use super::stacks::{self, Best};
use super::{Args, facts, plan_json, request_with};
use crate::output::{print, read};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::path::Path;
use trainyard_base::format_bytes;
use trainyard_plan::settings::{Dialect, Settings, read as read_settings};
use trainyard_plan::stacks::StackProfile;
use trainyard_plan::{Checkpointing, Facts, Lacking, Mode, Plan, Request, best, price, table};
use trainyard_sim::Profiles;

/// Runs `trainyard plan --from`.
pub(super) fn run(args: &Args, path: &Path, profiles: &Profiles) -> Result<()> {
    let text = read(path)?;
    let file = path.display();
    let settings = Dialect::of(path, &text).and_then(|dialect| read_settings(dialect, &text));
    let settings = settings.with_context(|| file.to_string())?;
    let (request, facts) = (request_with(args, profiles, Some(&settings))?, facts()?);
    let profile = match &args.stack {
        Some(_) => stacks::chosen(args.stack.as_deref(), None)?.context("--stack names a profile")?,
        None => StackProfile::named(settings.stack).map_err(anyhow::Error::msg)?,
    };
    let (mut same, mut same_facts) = (Request { shown: 1, ..request.clone() }, facts.clone());
    stacks::plan_for(&profile, &mut same, &mut same_facts);
    let better = match best(&same, &same_facts) {
        Err(Lacking::Request(problem)) => bail!("{problem}"),
        better => better,
    };
    let now = today(&settings, &request, &facts, &profile).with_context(|| file.to_string())?;
    let all = if args.stack.is_none() { stacks::compare(&request, &facts)? } else { Vec::new() };
    if args.json {
        let value = json!({
            "file": file.to_string(),
            "form": settings.dialect.name(),
            "stack": profile.name,
            "now": plan_json(&now.plan),
            "fits": now.fits,
            "assumed": now.assumed,
            "not_priced": settings.unpriced,
            "best_of_stack": better.as_ref().map(plan_json).map_err(ToString::to_string).unwrap_or_else(|error| json!({"error": error})),
            "stacks": stacks::to_json(&all),
        });
        return print(format_args!("{value:#}\n"));
    }
    print(words(&file.to_string(), &same, &settings, &profile, &now, better.as_ref().ok(), &all))
}

/// The run that settings describe, priced.
struct Today {
    plan: Plan,
    fits: bool,
    assumed: Vec<String>,
}

fn today(settings: &Settings, request: &Request, facts: &Facts, profile: &StackProfile) -> Result<Today> {
    let facts = Facts { stack: settings.software(profile)?, constants: facts.constants.clone() };
    let mut request = Request { own: None, ..request.clone() };
    request.fixed.rules = None;
    let blocks = request.model.layers + request.model.encoder_layers;
    let mut candidates = settings.candidates(&request)?;
    let open = candidates.len() > 1;
    if let Some(mode) = request.fixed.checkpointing {
        let checkpointing = match mode {
            Mode::None => Checkpointing::default(),
            Mode::Selective => Checkpointing { full: 0, selective: blocks },
            Mode::Full => Checkpointing { full: blocks, selective: 0 },
        };
        candidates.iter_mut().for_each(|candidate| candidate.checkpointing = checkpointing);
    }
    let mut assumed = settings.assumed.clone();
    let refused = candidates.first().and_then(|candidate| profile.rules.refuses(candidate, blocks));
    if let Some(refused) = refused {
        assumed.push(format!("{} is not known to run {refused}; it is priced all the same", profile.title));
    }
    let plans = candidates.iter().filter_map(|candidate| price(&request, &facts, candidate));
    let fits = |plan: &Plan| plan.memory.total <= request.bytes_max();
    // The fastest that fits; if none does, the smallest.
    let plan = plans.min_by(|a, b| {
        let key = |plan: &Plan| (!fits(plan), if fits(plan) { plan.step_s } else { plan.memory.total as f64 });
        key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal)
    });
    let Some(plan) = plan else { bail!("no step can be made of these settings: the schedule does not divide them") };
    if open {
        let micro = plan.candidate.micro_batch;
        assumed.push(format!(
            "the settings leave the micro-batch open: {micro}, the fastest that fits (--fix micro_batch=N says another)"
        ));
    }
    Ok(Today { fits: fits(&plan), plan, assumed })
}

fn words(
    file: &str,
    request: &Request,
    settings: &Settings,
    profile: &StackProfile,
    now: &Today,
    better: Option<&Plan>,
    all: &[Best],
) -> String {
    let mut text = table::heading(request);
    text += &format!("\n{file}, as {} runs it\n", profile.title);
    let rows = std::iter::once(&now.plan).chain(better).map(|plan| table::cells(request, plan));
    text += &table::lines(&table::titles(request), rows);
    text += &match better {
        Some(_) => format!("  1  these settings; 2  the best that {} can run\n", profile.title),
        None => "  1  these settings\n".to_owned(),
    };
    if !now.fits {
        let total = format_bytes(now.plan.memory.total);
        text +=
            &format!("\nthese settings are predicted not to fit: {total} of {}\n", format_bytes(request.bytes_max()));
    }
    for assumed in &now.assumed {
        text += &format!("assumed     {assumed}\n");
    }
    for unpriced in &settings.unpriced {
        text += &format!("not priced  {unpriced}\n");
    }
    if let Some(better) = better {
        let faster = 100.0 * (now.plan.step_s / better.step_s - 1.0);
        if faster < 0.5 {
            text += "\nnothing better was found for this trainer\n";
        } else {
            let (stack, form) = (&profile.name, settings.dialect.name());
            text += &format!(
                "\n{faster:.1} % faster with the same trainer; --stack {stack} --export {form} prints the settings\n"
            );
            text += &table::difference("the best of this trainer were run", &now.plan, better);
        }
    }
    if !all.is_empty() {
        text += &format!("\n{}", stacks::table(request, all));
    }
    text
}
