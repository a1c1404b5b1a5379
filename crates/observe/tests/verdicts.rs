//! Planted causes are found, sized, and not seen where there are none.

mod planted;

use planted::{Plant, record};
use trainyard_observe::diagnose::diagnose;
use trainyard_observe::verdict::Severity;

#[test]
fn the_first_verdict_names_the_planted_cause() {
    let mut wrong = Vec::new();
    for plant in Plant::ALL {
        for severity in 0..3 {
            let diagnosis = diagnose(&record(plant, severity, 7).run);
            let said = diagnosis.verdicts.first().map(|verdict| verdict.cause);
            if said != plant.cause() {
                let all: Vec<String> = diagnosis
                    .verdicts
                    .iter()
                    .map(|v| format!("{} {:.3}", v.cause.name(), v.saving.map_or(0.0, |s| s.share())))
                    .collect();
                wrong.push(format!("{plant:?} {severity}: {}", all.join(", ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_saving_is_what_the_cause_cost() {
    let mut wrong = Vec::new();
    for plant in Plant::ALL.into_iter().filter(|plant| plant.has_size()) {
        for severity in 0..3 {
            let recording = record(plant, severity, 3);
            let diagnosis = diagnose(&recording.run);
            let cause = plant.cause().and_then(|cause| diagnosis.verdict(cause));
            let saving = cause.and_then(|verdict| verdict.saving).map_or(0.0, |saving| saving.seconds);
            let error = (saving - recording.cost_s).abs() / recording.cost_s;
            if error > 0.15 {
                wrong.push(format!("{plant:?} {severity}: {saving:.5} s said, {:.5} s lost", recording.cost_s));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn healthy_steps_raise_no_alarm() {
    for seed in 0..12 {
        let diagnosis = diagnose(&record(Plant::Clean, 0, seed).run);
        let alarms: Vec<_> = diagnosis.verdicts.iter().filter(|verdict| verdict.severity > Severity::Info).collect();
        assert!(alarms.is_empty(), "seed {seed}: {alarms:#?}");
    }
}
