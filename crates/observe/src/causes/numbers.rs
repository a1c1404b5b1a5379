//! Causes that are wrong numbers, and ranks that stopped.

use super::Findings;
use crate::verdict::{Advice, Cause, Evidence, Place, Severity, Unit, Verdict};
use trainyard_record::health::Symptom;

/// Losses or gradients that are not finite or jump, and data that arrived changed.
pub fn wrong_numbers(findings: &Findings<'_>) -> Option<Verdict> {
    let run = findings.run;
    let mut evidence = Vec::new();
    let mut severity = Severity::Warning;
    let mut advice = Vec::new();
    let corrupt = run.faults.iter().filter(|report| report.error.contains("checksum")).max_by_key(|r| r.lanes.len());
    if let Some(report) = corrupt {
        severity = Severity::Critical;
        let at =
            Place { rank: Some(report.rank), step: report.lanes.first().map(|lane| lane.step + 1), ..Place::default() };
        evidence.push(Evidence::new(report.error.clone(), 1.0, Unit::Count).at(at));
        advice.push(Advice::new("take the named host out, and go on from the last checkpoint"));
    }
    for event in run.health.iter().filter(|event| event.symptom == Symptom::ReplicasDiffer) {
        severity = Severity::Critical;
        let at = Place { step: Some(event.step), ..Place::default() };
        evidence.push(Evidence::new(event.reaction.clone(), 1.0, Unit::Count).at(at));
        advice.push(Advice::new(
            "take the host of the rank that is alone out, and go on from a checkpoint before the step",
        ));
        advice
            .push(Advice::new("train the steps before again elsewhere and compare them by bits: trainyard verify RUN"));
    }
    // With a dynamic loss scale, a step is skipped now and then by design.
    let skipped: Vec<_> = run.metrics.iter().filter(|m| m.skipped && m.loss_scale.is_none()).collect();
    if let Some(first) = skipped.first() {
        severity = Severity::Critical;
        let at = Place { step: Some(first.step), ..Place::default() };
        let what = "steps whose loss or gradient is not finite; the first";
        evidence.push(Evidence::new(what, skipped.len() as f64, Unit::Count).at(at));
        advice.push(Advice::set("a lower learning rate", "optimizer.learning_rate"));
        advice.push(Advice::set("a longer warm-up", "schedule.warmup_steps"));
    }
    for symptom in [Symptom::LossSpike, Symptom::NormSpike, Symptom::NormDrift] {
        let events: Vec<_> = run.health.iter().filter(|event| event.symptom == symptom).collect();
        let Some(first) = events.first() else { continue };
        let at = Place {
            step: Some(first.step),
            span: Some(format!("samples {} to {}", first.samples[0], first.samples[0] + first.samples[1].max(1) - 1)),
            ..Place::default()
        };
        evidence.push(
            Evidence::new(
                format!("{}: number of steps; the first", symptom.in_words()),
                events.len() as f64,
                Unit::Count,
            )
            .at(at),
        );
        advice.push(Advice::set("skip updates at spikes, or go back to the checkpoint before", "health.on_spike"));
    }
    if let Some(last) = run.health.iter().rfind(|event| event.symptom == Symptom::DeadUnits) {
        let at = Place { step: Some(last.step), ..Place::default() };
        let share = last.value.unwrap_or(0.0);
        evidence
            .push(Evidence::new("units of feed-forward layers that learn nothing any more", share, Unit::Share).at(at));
        advice.push(Advice::set("a lower learning rate", "optimizer.learning_rate"));
        advice.push(Advice::set("a longer warm-up", "schedule.warmup_steps"));
    }
    if evidence.is_empty() {
        return None;
    }
    advice.dedup();
    let summary = "Numbers of the training are wrong or suspicious.".to_owned();
    Some(Verdict { cause: Cause::WrongNumbers, severity, summary, evidence, saving: None, advice })
}

/// A rank made no progress within the deadline.
pub fn hang(findings: &Findings<'_>) -> Option<Verdict> {
    let reports = &findings.run.faults;
    let stuck = reports.iter().find(|report| report.error.contains("no progress within the deadline"))?;
    // The culprit's own report says what its lane is at.
    let lane = stuck.lanes.iter().find(|lane| lane.doing == "running").or(stuck.lanes.first());
    let at = Place {
        rank: Some(stuck.rank),
        step: lane.map(|lane| lane.step + 1),
        lane: lane.map(|lane| lane.lane.clone()),
        span: lane.map(|lane| lane.what.clone()),
        ..Place::default()
    };
    let evidence = vec![
        Evidence::new("seconds in this instruction", lane.map_or(0.0, |lane| lane.for_s), Unit::Seconds).at(at),
        Evidence::new("ranks that reported", reports.len() as f64, Unit::Count),
    ];
    let advice = vec![
        Advice::new("look at the named instruction on the named rank: its disk, device or network"),
        Advice::set("let runs restart by themselves", "--max-restarts"),
    ];
    let summary = stuck.error.clone();
    Some(Verdict { cause: Cause::Hang, severity: Severity::Critical, summary, evidence, saving: None, advice })
}
