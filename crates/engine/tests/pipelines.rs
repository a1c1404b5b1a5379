//! Pipelines on the engine: every schedule trains the bits of one rank, and memory is as predicted.

#[path = "common/train.rs"]
mod common;

use common::*;
use trainyard_engine::rank::Pace;
use trainyard_program::{Action, BackwardPart, Phase, TurnTimes};

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
            (2, "zero_bubble_v"),
            (3, "zero_bubble_v"),
            (2, "dual_pipe_v"),
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

/// The layouts that pipelines compose with: replicas, shards of every stage of ZeRO, folded sums,
/// offload and 16-bit gradients.
#[test]
fn pipelines_train_the_same_bits_whatever_else_is_sharded() {
    let base = ["precision.compute='bf16'", "training.accumulation_steps=4"];
    let with = |sets: &[&'static str]| trained(&[&base[..], sets].concat());
    let one = with(&["parallel.ranks=2"]);
    let pipeline = ["parallel.ranks=4", "parallel.pipeline_parallel_degree=2"];
    for sets in [
        &["parallel.zero_stage=0"][..],
        &["parallel.zero_stage=1", "parallel.pipeline_schedule='zero_bubble'"],
        &["parallel.zero_stage=2", "parallel.pipeline_schedule='1f1b'"],
        &["parallel.zero_stage=3", "parallel.pipeline_schedule='interleaved'"],
        &["parallel.zero_stage=3", "parallel.pipeline_schedule='zero_bubble'", "parallel.prefetch=2"],
        &["parallel.zero_stage=3", "parallel.pipeline_schedule='gpipe'", "activation_checkpointing.mode='selective'"],
    ] {
        let many = with(&[&pipeline[..], sets].concat());
        assert_eq!((&many.0, &many.1), (&one.0, &one.1), "{sets:?}: losses or norms");
        assert!(many.2 == one.2, "{sets:?}: some weight differs");
    }
}

/// The first and the last stage both add to a tied embedding, each over its own micro-batches, so
/// sums are in another order than on one rank. All pipelines agree to the bit.
#[test]
fn a_tied_embedding_is_summed_over_its_stages() {
    let tied = ["model.tie_embeddings=true", "precision.compute='f32'"];
    let of = |sets: &[&'static str]| trained(&[&tied[..], sets].concat());
    let one = of(&[]);
    let pipeline = of(&["parallel.pipeline_parallel_degree=2", "parallel.pipeline_schedule='1f1b'"]);
    for (a, b) in [(&one.0, &pipeline.0), (&one.1, &pipeline.1)] {
        for (a, b) in a.iter().zip(b) {
            assert!((a / b - 1.0).abs() < 1e-5, "{a} against {b}");
        }
    }
    for schedule in ["gpipe", "zero_bubble"] {
        let sets = ["parallel.pipeline_parallel_degree=2", &format!("parallel.pipeline_schedule='{schedule}'")];
        let ends = train(&[MODEL, &tied, &sets].concat(), STEPS);
        assert_eq!(losses(&ends), pipeline.0, "{schedule}");
        assert!(weights(&ends) == pipeline.2, "{schedule}: some weight differs");
    }
}

/// Ranks whose stages and passes are held to different paces train the same bits, and every pass
/// lasts as long as it was told to.
#[test]
fn a_pace_changes_no_bit_and_is_kept() {
    let uneven = |unit: u64| TurnTimes { forward: 400_000, input: 200_000 * unit, weights: 600_000 / (unit + 1) };
    let pace = Pace::new((0..6).map(uneven).collect());
    for schedule in ["1f1b", "zero_bubble", "zero_bubble_v"] {
        let stages = stages(2, schedule);
        let sets: Vec<&str> = MODEL.iter().copied().chain(stages.iter().map(String::as_str)).collect();
        let (paced, free) = (train_paced(&sets, 2, &pace), train(&sets, 2));
        assert_eq!(losses(&paced), losses(&free), "{schedule}");
        assert!(weights(&paced) == weights(&free), "{schedule}: some weight differs");
        for end in &paced {
            let spans = end.outcomes.iter().flat_map(|outcome| end.program.instructions.iter().zip(&outcome.spans));
            for (instruction, span) in spans {
                let (unit, phase, part) = match instruction.action {
                    Action::Forward { unit, .. } => (unit, Phase::Forward, BackwardPart::Whole),
                    Action::Backward { unit, part, .. } => (unit, Phase::Backward, part),
                    _ => continue,
                };
                let least = u128::from(pace.nanoseconds()[unit as usize].of(phase, part));
                assert!((span.end - span.start).as_nanos() >= least, "{schedule}: {:?}", instruction.action);
            }
        }
    }
}
