//! The diagnosis of a run: looks for every cause and orders what was found.

use crate::account::{Account, mean};
use crate::causes::{self, Findings};
use crate::measured::measured;
use crate::run::Run;
use crate::verdict::{Advice, Cause, Diagnosis, Evidence, Severity, Unit, Verdict};
use trainyard_base::median;

/// Steps that a diagnosis of time needs.
const STEPS_MIN: usize = 5;
/// The share of a step that must have a name.
pub const EXPLAINED_MIN: f64 = 0.98;

/// The diagnosis of a run.
pub fn diagnose(run: &Run) -> Diagnosis {
    let findings = Findings { run, steps: measured(run) };
    let mut verdicts: Vec<Verdict> =
        [causes::hang(&findings), causes::wrong_numbers(&findings), causes::leak(&findings)]
            .into_iter()
            .flatten()
            .collect();
    verdicts.extend(incomplete(&findings));
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
        verdicts.extend(of_time.iter().filter_map(|cause| cause(&findings)));
        verdicts.extend(unexplained(&findings));
        verdicts.extend(causes::bound(&findings));
    }
    Diagnosis::new(verdicts)
}

/// What the record lacks.
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
    if run.samples.len() < 2 {
        evidence.push(Evidence::new(
            "samples of the machine; causes outside of the program stay unknown",
            run.samples.len() as f64,
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

/// Time without a name, and compute that took longer than predicted for no known cause.
fn unexplained(findings: &Findings<'_>) -> Option<Verdict> {
    let accounts: Vec<Account> = findings.steps.iter().map(|step| Account::of(step, 0)).collect();
    let account = mean(&accounts)?;
    let mut evidence = Vec::new();
    if account.explained() < EXPLAINED_MIN {
        evidence.push(Evidence::new("of a step has no name", account.unexplained_s, Unit::Seconds));
    }
    let measured = median(findings.steps.iter().map(|step| step.seconds))?;
    if let Some(predicted) = &findings.run.predicted
        && measured > 1.25 * predicted.step_s
    {
        evidence.push(Evidence::new("the step over its prediction", measured / predicted.step_s, Unit::Ratio));
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
