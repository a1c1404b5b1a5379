//! The diagnosis of a run: looks for every cause and orders what was found.

use crate::account::{accounts, mean, predicted};
use crate::causes::{self, Findings};
use crate::verdict::{Advice, Cause, Diagnosis, Evidence, Severity, Unit, Verdict};
use trainyard_plan::TimeCategory;

/// Steps that a diagnosis of time needs.
const STEPS_MIN: usize = 5;
/// The share of a step that must have a name.
pub const EXPLAINED_MIN: f64 = 0.98;

/// If a step takes longer than its prediction by this factor, and no cause was found, this is
/// reported.
const OVER_PREDICTION: f64 = 1.25;

/// The diagnosis of a run.
pub fn diagnose(findings: &Findings<'_>) -> Diagnosis {
    let of_run = [causes::hang, causes::wrong_numbers, causes::leak, incomplete];
    let mut verdicts: Vec<Verdict> = of_run.iter().filter_map(|cause| cause(findings)).collect();
    if findings.steps.len() >= STEPS_MIN {
        let of_time = [
            causes::throttled,
            causes::stolen_cores,
            causes::memory_pressure,
            causes::noisy_neighbour,
            causes::input_bound,
            causes::checkpoint_stall,
            causes::offload_bound,
            causes::straggler,
            causes::imbalance,
            causes::communication_bound,
            causes::bubble,
            causes::host_overhead,
        ];
        verdicts.extend(of_time.iter().filter_map(|cause| cause(findings)));
        verdicts.extend(unexplained(findings, &verdicts));
        verdicts.extend(causes::bound(findings));
    }
    Diagnosis::new(verdicts)
}

/// The parts of a record that verdicts need and that this one lacks.
fn incomplete(findings: &Findings<'_>) -> Option<Verdict> {
    let run = findings.run;
    let (ranks, world) = (run.ranks.len(), run.world());
    let mut evidence = Vec::new();
    let mut advice = Vec::new();
    if findings.steps.len() < STEPS_MIN {
        evidence.push(Evidence::new(
            format!("recorded steps after warm-up; a diagnosis of time needs {STEPS_MIN}"),
            findings.steps.len() as f64,
            Unit::Count,
        ));
        advice.push(Advice::set("train more steps, with the record on", "metrics.record=true"));
    }
    if ranks < world {
        evidence.push(Evidence::new("ranks without a record", (world - ranks) as f64, Unit::Count));
        advice.push(Advice::new("copy trace/ of every host into one run folder"));
    }
    let sampled = findings.steps.iter().filter(|step| step.sample.is_some()).count();
    if run.samples.is_empty() || 2 * sampled < findings.steps.len() {
        evidence.push(Evidence::new(
            "steps with a sample of the machine; in the others, causes outside of the program stay unknown",
            sampled as f64,
            Unit::Count,
        ));
    }
    let severity = if findings.steps.len() < STEPS_MIN { Severity::Warning } else { Severity::Info };
    let summary = "The record does not hold everything that verdicts need.".to_owned();
    (!evidence.is_empty()).then_some(Verdict {
        cause: Cause::IncompleteData,
        severity,
        summary,
        evidence,
        saving: None,
        advice,
    })
}

/// Time without a name, and time over the prediction that no verdict explains.
fn unexplained(findings: &Findings<'_>, verdicts: &[Verdict]) -> Option<Verdict> {
    let account = mean(&accounts(&findings.steps))?;
    let mut evidence = Vec::new();
    if account.explained() < EXPLAINED_MIN {
        evidence.push(Evidence::new("of a step has no name", account.unexplained_s, Unit::Seconds));
    }
    // Savings do not add up, so the largest alone is taken off.
    let savings = verdicts.iter().filter_map(|verdict| verdict.saving);
    let saved = savings.map(|saving| saving.seconds).fold(0.0, f64::max);
    let left = account.step_s - saved;
    let step_s = findings.run.predicted.as_ref().map_or(f64::INFINITY, |predicted| predicted.step_s);
    if left > OVER_PREDICTION * step_s {
        let what = if saved > 0.0 { "a step without its gravest cause" } else { "a step" };
        evidence.push(Evidence::new(format!("{what}, over its prediction"), left / step_s, Unit::Ratio));
        evidence.extend(longer_than_predicted(findings));
    }
    let summary = "Some of the step's time has no known cause.".to_owned();
    let advice = vec![Advice::new("measure the machine again (`trainyard calibrate`), and compare with another run")];
    (!evidence.is_empty()).then_some(Verdict {
        cause: Cause::Unexplained,
        severity: Severity::Info,
        summary,
        evidence,
        saving: None,
        advice,
    })
}

/// The parts of rank 0's step that take longest beyond their prediction, at most three.
fn longer_than_predicted(findings: &Findings<'_>) -> Vec<Evidence> {
    let (Some(predicted), Some(account)) = (predicted(findings.run), mean(&accounts(&findings.steps))) else {
        return Vec::new();
    };
    let over = |part: TimeCategory| account.breakdown.seconds(part) - predicted.seconds(part);
    let mut parts: Vec<(&str, f64)> = TimeCategory::ALL.into_iter().map(|part| (part.words(), over(part))).collect();
    // A prediction has no time between steps.
    parts.push(("between steps", account.agree_s + account.between_s));
    parts.retain(|(_, seconds)| *seconds > causes::SHARE_MIN * account.step_s);
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let evidence =
        |(part, seconds): (&str, f64)| Evidence::new(format!("{part}, beyond its prediction"), seconds, Unit::Seconds);
    parts.into_iter().take(3).map(evidence).collect()
}
