//! Plans for other trainers: the profile that `--stack` names, the table that compares all of them,
//! and the settings that `--export` prints.

use crate::output::{note, print, read};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::Path;
use trainyard_plan::explain::duration;
use trainyard_plan::settings::{Dialect, export as settings_of};
use trainyard_plan::stacks::StackProfile;
use trainyard_plan::{Budget, Facts, Lacking, Plan, Request, best, table as tables};
use trainyard_sim::{Generation, Stack};

/// Parses the value of `--export`.
pub(super) fn dialect(text: &str) -> Result<Dialect, String> {
    let all = Dialect::ALL;
    let found = all.into_iter().find(|dialect| dialect.name() == text || dialect.stack() == text);
    found.ok_or_else(|| format!("one of {}", all.map(Dialect::name).join(", ")))
}

/// The profile that is planned for: the one of `--stack`, else that of `--export`.
pub(super) fn chosen(stack: Option<&str>, export: Option<Dialect>) -> Result<Option<StackProfile>> {
    match (stack, export) {
        (Some(name), _) if name.ends_with(".toml") => {
            let text = read(Path::new(name))?;
            let profile = StackProfile::parse(&text).map_err(anyhow::Error::msg);
            profile.with_context(|| format!("{name} is no profile of a trainer")).map(Some)
        }
        (Some(name), _) => StackProfile::named(name).map(Some).map_err(anyhow::Error::msg),
        (None, Some(dialect)) => StackProfile::named(dialect.stack()).map(Some).map_err(anyhow::Error::msg),
        (None, None) => Ok(None),
    }
}

/// Restricts a request to what `profile` can run, and prices it as it runs.
pub(super) fn plan_for(profile: &StackProfile, request: &mut Request, facts: &mut Facts) {
    request.fixed.rules = Some(profile.rules.clone());
    if profile.software.name != facts.stack.name {
        // Its kernels are not those of this program.
        request.own = None;
        facts.stack = profile.software.clone();
    }
}

/// The lines about the trainer that was planned for, below the answer.
pub(super) fn words(profile: &StackProfile) -> String {
    let mut text = format!("for  {}: {}\n", profile.title, profile.words());
    let names: Vec<&str> = profile.rules.data_parallel.iter().map(|form| form.name.as_str()).collect();
    text += &format!("     it shares state by {}\n", names.join("; "));
    for beyond in &profile.beyond {
        text += &format!("     {beyond}\n");
    }
    text
}

/// The best plan of the trainers called `names`, which run alike.
pub(super) struct Best {
    names: Vec<String>,
    plan: Result<Plan, Lacking>,
    /// The request for these trainers.
    request: Request,
}

/// Number of instructions that the search for one trainer may simulate.
const INSTRUCTIONS: u64 = 3_000_000;

/// The best plan of every built-in trainer, fastest first. Nothing on processors, where the others
/// do not run.
pub(super) fn compare(request: &Request, facts: &Facts) -> Result<Vec<Best>> {
    if request.cluster.device.family == Generation::Cpu {
        return Ok(Vec::new());
    }
    let mut all: Vec<Best> = Vec::new();
    let mut seen: Vec<StackProfile> = Vec::new();
    for profile in StackProfile::builtin() {
        if let Some(same) = seen.iter().position(|before| before.runs_like(&profile)) {
            all[same].names.push(profile.name.clone());
            continue;
        }
        let (mut request, mut facts) = (request.clone(), facts.clone());
        plan_for(&profile, &mut request, &mut facts);
        request.shown = 1;
        request.budget = match request.budget {
            Budget::Instructions(count) => Budget::Instructions(count.min(INSTRUCTIONS)),
            Budget::Seconds(seconds) => Budget::Seconds(seconds / 4.0),
        };
        all.push(Best { names: vec![profile.name.clone()], plan: best(&request, &facts), request });
        seen.push(profile);
    }
    let seconds = |best: &Best| best.plan.as_ref().map_or(f64::INFINITY, |plan| price(request, plan));
    all.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
    Ok(all)
}

/// The quantity that is minimised.
fn price(request: &Request, plan: &Plan) -> f64 {
    match request.objective {
        trainyard_plan::Objective::Speed => plan.step_s,
        trainyard_plan::Objective::Cost => plan.step_s * f64::from(plan.candidate.mesh.ranks()),
    }
}

/// The comparison, as text.
pub(super) fn table(request: &Request, all: &[Best]) -> String {
    let mut text = "the best of each trainer, by its own software (--stack NAME for more)\n".to_owned();
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut lacking = String::new();
    for best in all {
        match &best.plan {
            Ok(plan) => {
                let cells = tables::cells(&best.request, plan);
                let [layout, batch, recompute, step, ..] = &cells[..] else { continue };
                let rest = cells[4..].to_vec();
                let start = [best.names.join(", "), step.clone(), layout.clone(), batch.clone(), recompute.clone()];
                rows.push(start.into_iter().chain(rest).collect());
            }
            Err(why) => lacking += &format!("     {}: {why}\n", best.names.join(", ")),
        }
    }
    let titles = ["stack", "step", "layout", "batch", "recompute"];
    let titles: Vec<&str> = titles.into_iter().chain(tables::titles(request)[4..].iter().copied()).collect();
    if !rows.is_empty() {
        text += &tables::lines(&titles, rows);
    }
    text + &lacking
}

/// The comparison, as JSON.
pub(super) fn to_json(all: &[Best]) -> Value {
    let one = |best: &Best| match &best.plan {
        Ok(plan) => json!({"names": best.names, "best": super::plan_json(plan)}),
        Err(why) => json!({"names": best.names, "error": why.to_string()}),
    };
    all.iter().map(one).collect()
}

/// Prints the settings of `plan`, and on standard error what they do not say.
pub(super) fn export(dialect: Dialect, request: &Request, plan: &Plan, software: &Stack) -> Result<()> {
    let exported = settings_of(dialect, request, plan, software);
    note(&format!(
        "{}, {} x {}: {} a step as {} runs it",
        plan.layout,
        plan.candidate.micro_batch,
        plan.candidate.accumulation,
        duration(plan.step_s),
        software.name
    ));
    for unsaid in &exported.unsaid {
        note(&format!("not in these settings: {unsaid}"));
    }
    print(exported.text)
}
