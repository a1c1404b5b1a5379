//! A run's folder on disk: read, traced for Perfetto, compared with another.

#[expect(dead_code, reason = "other tests use the rest")]
mod planted;

use planted::{Plant, record};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use trainyard_observe::causes::Findings;
use trainyard_observe::compare::compare;
use trainyard_observe::diagnose::diagnose;
use trainyard_observe::measured::{measured, measured_in};
use trainyard_observe::perfetto;
use trainyard_observe::run::Run;
use trainyard_observe::verdict::Cause;
use trainyard_record::steps::StepWriter;

/// Writes a recording as a run's folder.
fn write(folder: &Path, run: &Run, config: &str) {
    std::fs::write(folder.join("config.toml"), config).unwrap();
    for rank in &run.ranks {
        rank.programs.write(folder).unwrap();
        let mut writer = StepWriter::create(folder, &rank.programs.programs, &rank.host).unwrap();
        for step in &rank.steps {
            writer.write(step).unwrap();
        }
    }
}

#[test]
fn a_folder_holds_what_was_recorded_and_its_trace_every_instruction_and_message() {
    let folder = tempfile::tempdir().unwrap();
    let recording = record(Plant::SlowStage, 1, 5);
    write(folder.path(), &recording.run, "[training]\nsteps = 43\n");
    let run = Run::open(folder.path()).unwrap();
    let [one, other] = [&recording.run, &run].map(|run| measured(run).iter().map(|step| step.seconds).sum::<f64>());
    assert!((one / other - 1.0).abs() < 1e-4, "ticks of 256 ns: {one} {other}");
    assert!(diagnose(&Findings::of(&run)).verdict(Cause::Straggler).is_some());

    let steps = measured_in(&run, &(20..=21));
    let mut text = Vec::new();
    let written = perfetto::write(&mut text, &run, &steps, 20..=21).unwrap();
    let events: Vec<Value> = serde_json::from_slice(&text).unwrap();
    assert_eq!((written.steps, written.events), (2, events.len()));
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    let instructions: usize = run.ranks.iter().map(|rank| 2 * rank.programs.programs[0].instructions.len()).sum();
    let spans = of("X").into_iter().filter(|event| !["between", "message"].contains(&event["cat"].as_str().unwrap()));
    let spans = spans.count();
    assert_eq!(spans, instructions);
    // Every arrow has a begin and an end, and none goes back in time.
    let (begins, ends) = (of("s"), of("f"));
    assert!(!begins.is_empty() && begins.len() == ends.len());
    for begin in begins {
        let end = ends.iter().find(|end| end["id"] == begin["id"]).unwrap();
        assert!(end["ts"].as_f64() >= begin["ts"].as_f64() && end["pid"] != begin["pid"]);
    }
}

/// A run of images that waits for them is told of the cache of decoded ones, unless it has it.
#[test]
fn what_helps_a_waiting_step_depends_on_what_it_reads() {
    let recording = record(Plant::SlowTokenizer, 2, 5);
    for (config, told) in [
        ("[training]\nsteps = 43\n", false),
        ("[data]\nformat = \"text\"\n", false),
        ("[data]\nformat = \"images\"\n", true),
        ("[data]\nformat = \"images\"\n[images]\ncache = \"decoded\"\n", false),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &recording.run, config);
        let run = Run::open(folder.path()).unwrap();
        let diagnosis = diagnose(&Findings::of(&run));
        let verdict = diagnosis.verdict(Cause::InputBound).expect("it waits for batches");
        let cache = verdict.advice.iter().any(|advice| advice.setting.as_deref() == Some("images.cache"));
        assert_eq!(cache, told, "{config}");
    }
}

/// A run that arithmetic bounds is told of shorter numbers only where it does not have them, and
/// could.
#[test]
fn shorter_numbers_are_advised_where_a_run_could_have_them() {
    let recording = record(Plant::Clean, 0, 5);
    for (config, told) in [
        ("precision.compute = 'f32'", Some("precision.compute=\"bf16\"")),
        ("precision.compute = 'bf16'", Some("precision.int8=\"switchback\"")),
        ("precision.compute = 'bf16'\nparallel.tensor_parallel_degree = 2", None),
        ("precision.compute = 'bf16'\nexperts.count = 4", None),
        ("precision.compute = 'bf16'\nquantization.aware = 4", None),
        ("precision.compute = 'bf16'\ncompute.device = 'cuda'", None),
        ("precision.compute = 'bf16'\nprecision.int8 = 'switchback'", None),
        ("", None),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &recording.run, config);
        let run = Run::open(folder.path()).unwrap();
        let diagnosis = diagnose(&Findings::of(&run));
        let verdict = diagnosis.verdict(Cause::ComputeBound).expect("nothing else takes its time");
        let settings: Vec<&str> = verdict.advice.iter().filter_map(|advice| advice.setting.as_deref()).collect();
        assert_eq!(settings, told.into_iter().collect::<Vec<_>>(), "{config}");
    }
}

#[test]
fn perfetto_drops_no_event_of_a_trace() {
    // Its trace processor drops arrows whose id is no number, times below zero, and slices that
    // overlap on a track; `cargo xtask perfetto` asks it itself.
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &record(Plant::SlowStage, 1, 5).run, "[training]\nsteps = 43\n");
    let run = Run::open(folder.path()).unwrap();
    let mut text = Vec::new();
    perfetto::write(&mut text, &run, &measured_in(&run, &(20..=24)), 20..=24).unwrap();
    let events: Vec<Value> = serde_json::from_slice(&text).unwrap();
    let mut tracks: BTreeMap<(u64, u64), Vec<(i64, i64)>> = BTreeMap::new();
    let nanos = |value: &Value| (1e3 * value.as_f64().unwrap()).round() as i64;
    for event in &events {
        assert!(event["ts"].is_null() || nanos(&event["ts"]) >= 0, "{event}");
        assert!(event["id"].is_null() || event["id"].is_u64(), "{event}");
        // A message lies inside of its receive.
        if event["ph"] == "X" && event["cat"] != "message" {
            let track = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            assert!(track.1 > 0, "{event}");
            let begin = nanos(&event["ts"]);
            tracks.entry(track).or_default().push((begin, begin + nanos(&event["dur"])));
        }
    }
    for (track, mut slices) in tracks {
        slices.sort_unstable();
        assert!(slices.windows(2).all(|pair| pair[0].1 <= pair[1].0), "slices overlap on {track:?}");
    }
}

#[test]
fn what_changed_between_two_runs_is_named() {
    let runs = [Plant::Clean, Plant::SlowDisk].map(|plant| record(plant, 2, 3).run);
    let folders = runs.map(|run| {
        let folder = tempfile::tempdir().unwrap();
        let workers = run.samples[0].disk.process_read;
        write(folder.path(), &run, &format!("[data]\nworkers = {workers}\nprefetch = 4\n"));
        folder
    });
    let [one, other] = folders.each_ref().map(|folder| Run::open(folder.path()).unwrap());
    let comparison = compare([&one, &other]).unwrap();
    assert!(comparison.step_s[1] > 1.8 * comparison.step_s[0]);
    assert_eq!(comparison.parts[0].name, "waiting for data");
    assert_eq!(comparison.instructions[0].name, "load");
    assert_eq!(comparison.settings, [("data.workers".to_owned(), ["0".to_owned(), "30000000".to_owned()])]);
    assert!(comparison.to_text().contains("data.workers: 0 -> 30000000"), "{}", comparison.to_text());
}

#[test]
fn a_folder_without_a_run_or_a_record_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let error = Run::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("name the folder of a run"), "{error}");
    std::fs::write(folder.path().join("config.toml"), "").unwrap();
    let diagnosis = diagnose(&Findings::of(&Run::open(folder.path()).unwrap()));
    assert_eq!(diagnosis.verdicts[0].cause, Cause::IncompleteData);
    assert_eq!(diagnosis.verdicts.len(), 1);
}
