//! Figures and verdicts about whole traces. The traces in `golden` and the figures beside them are
//! made by `scripts/golden/make_traces.py`; the figures are those of HolisticTraceAnalysis.

use serde_json::Value;
use std::path::PathBuf;
use trainyard_observe::traces::diagnose::{diagnose, examine};
use trainyard_observe::traces::{Report, kineto};
use trainyard_observe::verdict::{Cause, Severity};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn report(names: &[&str]) -> Report {
    let examine = |(place, name): (usize, &&str)| {
        let trace = kineto::read_file(&golden(&format!("{name}.json"))).unwrap();
        examine(&trace, place as u32)
    };
    diagnose(names.iter().enumerate().map(examine).collect())
}

fn median_step(report: &Report) -> f64 {
    trainyard_base::median(report.ranks[0].steps.iter().map(|step| step.seconds)).unwrap()
}

#[test]
fn figures_are_those_of_holistic_trace_analysis() {
    let text = std::fs::read_to_string(golden("expected.json")).unwrap();
    let expected: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(expected.len(), 5);
    for (name, theirs) in &expected {
        let report = report(&[name]);
        let rank = &report.ranks[0];
        let breakdown = rank.breakdown.unwrap();
        for (figure, ours) in [
            ("total", breakdown.total_seconds),
            ("compute", breakdown.compute_seconds),
            ("non_compute", breakdown.non_compute_seconds),
            ("idle", breakdown.idle_seconds),
            ("host_wait", rank.idle_by_stream.iter().map(|stream| stream.idle.host_wait_seconds).sum()),
        ] {
            let theirs = theirs[figure].as_f64().unwrap();
            assert!((1e6 * ours - theirs).abs() < 0.01, "{name} {figure}: {} and {theirs}", 1e6 * ours);
        }
        match (theirs["overlap"].as_f64(), rank.communication) {
            (Some(theirs), Some(ours)) => assert!((ours.overlapped - theirs).abs() < 1e-4, "{name}"),
            (theirs, ours) => assert_eq!((theirs, ours), (None, None), "{name}"),
        }
    }
}

#[test]
fn the_saving_of_an_input_bound_step_is_what_its_cure_gains() {
    let (bound, cured) = (report(&["loader_bound"]), report(&["loader_cured"]));
    let verdict = &bound.diagnosis.verdicts[0];
    assert_eq!((verdict.cause, verdict.severity), (Cause::InputBound, Severity::Critical));
    assert!(verdict.advice[0].setting.as_ref().unwrap().contains("num_workers"));
    assert_eq!(cured.diagnosis.verdict(Cause::InputBound), None);
    let (predicted, gained) = (verdict.saving.unwrap().seconds, median_step(&bound) - median_step(&cured));
    assert!((predicted / gained - 1.0).abs() < 0.1, "{predicted} predicted, {gained} gained");
    // A share of the step would be far off: most of the wait hides behind the device's work.
    let wait = trainyard_base::median(bound.ranks[0].steps.iter().map(|step| step.input_seconds)).unwrap();
    assert!(wait > 1.5 * gained, "{wait} waited, {gained} gained");
    // The format of 2021 names categories and streams otherwise.
    assert_eq!(report(&["loader_bound_2021"]).diagnosis.verdicts[0].cause, Cause::InputBound);
}

#[test]
fn a_host_that_launches_too_slowly_and_exposed_communication_are_told() {
    let report_of = report(&["host_bound_rocm"]);
    let verdict = &report_of.diagnosis.verdicts[0];
    assert_eq!((verdict.cause, verdict.severity), (Cause::HostOverhead, Severity::Critical));
    let report_of = report(&["data_parallel"]);
    assert_eq!(report_of.diagnosis.verdicts[0].cause, Cause::CommunicationBound);
    assert!(report_of.diagnosis.verdict(Cause::ComputeBound).is_some());
    assert_eq!((report_of.ranks[0].rank, report_of.ranks[0].world_size), (1, Some(2)));
}

#[test]
fn the_same_trace_twice_has_no_straggler() {
    assert_eq!(report(&["data_parallel", "data_parallel"]).diagnosis.verdict(Cause::Straggler), None);
}
