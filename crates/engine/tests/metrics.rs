//! Tests the metrics files of a run that is interrupted and resumed, through the public interface.

use std::path::PathBuf;
use trainyard_engine::config::MetricsSection;
use trainyard_engine::metrics::{EvaluationMetrics, Recorder, StepMetrics};

fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 10.0 / step as f64,
        lr: 1e-3,
        grad_norm: 1.0,
        tokens: 64 * step,
        epoch: step as f64 / 16.0,
        tps: 640.0,
        images_per_s: None,
        tflops: 0.5,
        mfu: Some(0.25),
        step_s: 0.1,
        data_wait_s: 0.0,
        comm_s: 0.0,
        comm_exposed_s: 0.0,
        mem_peak_bytes: 1 << 20,
        mem_peak: [("params".to_owned(), 1 << 19)].into(),
        mem_reserved_bytes: 9 << 17,
        predicted_step_s: Some(0.1),
        predicted_mem_peak_bytes: Some(1 << 20),
        loss_scale: None,
        drift: None,
        inner_steps: None,
        staleness: None,
        dropped_pushes: None,
        late: false,
        sparsity: None,
        penalty: None,
        trained_parameters: None,
        experts: None,
        skipped: false,
    }
}

/// To view the event files in TensorBoard, set `TRAINYARD_KEEP` to a folder, then run
/// `scripts/golden/make_events.py FOLDER/tensorboard`.
#[test]
fn a_resumed_run_has_each_step_once() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = std::env::var_os("TRAINYARD_KEEP").map_or(temporary.path().to_owned(), PathBuf::from);
    let (mut recorder, notices) = Recorder::open(&folder, &MetricsSection::default(), 0).unwrap();
    assert!(notices.is_empty(), "{notices:?}");
    (1..=8).for_each(|n| assert_eq!(recorder.step(&step(n)).unwrap(), None));
    recorder.evaluation(&EvaluationMetrics::new(8, 20.0, 10, Some(40), 0.5)).unwrap();
    drop(recorder);

    let (mut recorder, notices) = Recorder::open(&folder, &MetricsSection::default(), 5).unwrap();
    assert_eq!(notices.len(), 2, "both files had records after step 5: {notices:?}");
    (6..=10).for_each(|n| assert_eq!(recorder.step(&step(n)).unwrap(), None));
    recorder.evaluation(&EvaluationMetrics::new(10, 10.0, 10, Some(40), 0.5)).unwrap();
    recorder.end().unwrap();

    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let read: Vec<StepMetrics> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(read, (1..=10).map(step).collect::<Vec<_>>());
    let text = std::fs::read_to_string(folder.join("evaluations.jsonl")).unwrap();
    assert_eq!(text.lines().count(), 1);
    assert_eq!(std::fs::read_dir(folder.join("tensorboard")).unwrap().count(), 2, "one event file for each start");
}
