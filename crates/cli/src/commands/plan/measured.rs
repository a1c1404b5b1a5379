//! `trainyard plan --measured`: a measured step corrects the predictions of all plans.

use super::fixed;
use crate::output::read;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use trainyard_plan::{Facts, Request, plan};
use trainyard_sim::measurement::Class;
use trainyard_sim::{Correction, Errors};

/// The correction by `text`, as `step_s=12.3,tp=8`.
pub fn correction(text: &str, request: &Request, facts: &Facts) -> Result<Correction> {
    let mut step_s = None;
    let mut layout = Vec::new();
    for choice in text.split(',').map(str::trim).filter(|choice| !choice.is_empty()) {
        let (name, value) = choice.split_once('=').with_context(|| format!("--measured {choice}: write NAME=VALUE"))?;
        let positive = || {
            let parsed = value.parse::<f64>().ok().filter(|value| *value > 0.0 && value.is_finite());
            parsed.with_context(|| format!("--measured {choice}: {name} is a number above 0"))
        };
        match name {
            "step_s" => step_s = Some(positive()?),
            "tokens_per_s" => step_s = Some((request.global_batch * request.sequence_length) as f64 / positive()?),
            "log" => step_s = Some(median_step(Path::new(value))?),
            _ => layout.push(choice.to_owned()),
        }
    }
    let Some(step_s) = step_s else {
        bail!("--measured {text}: give step_s=SECONDS, tokens_per_s=TOKENS or log=FILE");
    };
    let mut asked = Request { shown: 1, ..request.clone() };
    if !layout.is_empty() {
        asked.fixed = fixed(&layout)
            .with_context(|| format!("--measured {text}: after the measurement stand choices as in --fix"))?;
    }
    // A run that was measured fitted, whatever is said of memory.
    asked.limits.memory_margin = 0.0;
    let answer = plan(&asked, facts).with_context(|| format!("--measured {text}: the layout that was measured"))?;
    let predicted = &answer.plans[0];
    let class = Class::of(&request.model, predicted.candidate.format, request.sequence_length as u32);
    Ok(Correction::by(Errors::builtin().of(class), predicted.step_s, step_s))
}

/// The median of the seconds per step in a run's metrics.
fn median_step(path: &Path) -> Result<f64> {
    let text = read(path)?;
    let mut seconds: Vec<f64> = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let value: Value = serde_json::from_str(line)
            .with_context(|| format!("{}, line {}: one JSON object per line", path.display(), number + 1))?;
        seconds.extend(value.get(STEP_SECONDS).and_then(Value::as_f64).filter(|seconds| *seconds > 0.0));
    }
    seconds.sort_by(f64::total_cmp);
    let median = seconds.get(seconds.len() / 2).copied();
    median.with_context(|| format!("{} has no line with `{STEP_SECONDS}`", path.display()))
}

/// The name of a step's seconds in `metrics.jsonl`.
const STEP_SECONDS: &str = "step_s";
