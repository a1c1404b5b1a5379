//! Planted causes are found, sized, and not seen where there are none.

mod planted;

use planted::{Plant, record};
use trainyard_observe::causes::Findings;
use trainyard_observe::diagnose::diagnose;
use trainyard_observe::verdict::{Cause, Severity};
use trainyard_record::programs::Predicted;

#[test]
fn the_first_verdict_names_the_planted_cause() {
    let mut wrong = Vec::new();
    for plant in Plant::ALL {
        for severity in 0..3 {
            let diagnosis = diagnose(&Findings::of(&record(plant, severity, 7).run));
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
            let diagnosis = diagnose(&Findings::of(&recording.run));
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
        let diagnosis = diagnose(&Findings::of(&record(Plant::Clean, 0, seed).run));
        let alarms: Vec<_> = diagnosis.verdicts.iter().filter(|verdict| verdict.severity > Severity::Info).collect();
        assert!(alarms.is_empty(), "seed {seed}: {alarms:#?}");
    }
}

/// The times of the last step of a recording, divided by `factor`, as its prediction.
fn prediction(plant: Plant, factor: f64) -> Predicted {
    let clean = record(plant, 0, 3).run;
    let step = clean.ranks[0].steps.last().unwrap();
    let of = |time: std::time::Duration| time.as_secs_f64() / factor;
    let stage = step.instructions.iter().map(|times| [of(times.start), of(times.end)]).collect();
    Predicted { step_s: of(step.length), basis: "measured".into(), stages: vec![stage] }
}

#[test]
fn a_step_over_its_prediction_is_told_with_its_parts_unless_a_cause_explains_it() {
    let mut run = record(Plant::Clean, 0, 3).run;
    run.predicted = Some(prediction(Plant::Clean, 2.0));
    let diagnosis = diagnose(&Findings::of(&run));
    let evidence = &diagnosis.verdict(Cause::Unexplained).unwrap().evidence;
    assert!(evidence[0].what == "a step, over its prediction" && (evidence[0].value - 2.0).abs() < 0.1, "{evidence:?}");
    assert!(evidence[1].what.starts_with("backward") && evidence[2].what.starts_with("forward"), "{evidence:?}");
    for (plant, is_explained) in [(Plant::StolenCores, true), (Plant::Clean, true)] {
        let mut run = record(plant, 2, 3).run;
        run.predicted = Some(prediction(Plant::Clean, 1.0));
        assert_eq!(diagnose(&Findings::of(&run)).verdict(Cause::Unexplained).is_none(), is_explained, "{plant:?}");
    }
}
