//! Pipelines on the engine: every schedule trains the bits of one rank, and memory is as predicted.

#[path = "common/train.rs"]
mod common;

use common::*;

const STEPS: u64 = 4;

/// Four blocks and eight micro-batches of a row.
const MODEL: &[&str] = &["model.layers=4", "model.tie_embeddings=false", "training.micro_batch_size=1"];

/// Losses, norms and weights after a few steps.
type Trained = (Vec<f64>, Vec<f64>, Vec<Vec<u32>>);

fn trained(sets: &[&str]) -> Trained {
    let ends = train(&[MODEL, sets].concat(), STEPS);
    ends.iter().for_each(|end| check_memory(end, sets));
    let norms = ends[0].outcomes.iter().map(|outcome| outcome.gradient_norm).collect();
    (losses(&ends), norms, weights(&ends))
}

fn stages(stages: usize, schedule: &str) -> [String; 2] {
    [format!("parallel.pipeline_parallel_degree={stages}"), format!("parallel.pipeline_schedule='{schedule}'")]
}

#[test]
fn every_schedule_trains_the_bits_of_one_rank() {
    for model in
        [&["precision.compute='f32'"][..], &["precision.compute='bf16'", "activation_checkpointing.mode='full'"]]
    {
        let one = trained(model);
        for (degree, schedule) in [
            (2, "gpipe"),
            (2, "1f1b"),
            (2, "zero_bubble"),
            (3, "1f1b"),
            (3, "zero_bubble"),
            (4, "gpipe"),
            (4, "zero_bubble"),
            (2, "interleaved"),
        ] {
            let stages = stages(degree, schedule);
            let sets: Vec<&str> = model.iter().copied().chain(stages.iter().map(String::as_str)).collect();
            let many = trained(&sets);
            assert_eq!((&many.0, &many.1), (&one.0, &one.1), "{sets:?}: losses or norms");
            assert!(many.2 == one.2, "{sets:?}: some weight differs");
        }
    }
}
