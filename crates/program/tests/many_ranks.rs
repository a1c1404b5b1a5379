//! Every lowering on every mesh passes the checker, and its memory agrees with known formulas.

mod common;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use trainyard_program::{
    Axis, ExpertRanks, Group, Lane, Memory, MemoryKind, Mesh, ModelShape, PipelineSchedule, Reshard, Runnable,
    Schedule, StateBytes, Strategy as How, UnitShape, check_ranks, lower, lower_rank, runnable,
};

/// 10,000 of everything, of which 1,000 are drawn unless all are asked for: each lowered for all
/// ranks and checked, alone and together.
#[test]
fn ten_thousand_random_lowerings_pass_the_checker() {
    let cases = u32::try_from(trainyard_testing::cases("lowerings", 1_000, 10_000)).unwrap();
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &[7; 32]),
    );
    let checked = runner.run(&common::cases(7), |case| {
        let programs = lower(&case.model, &case.mesh, &case.strategy).unwrap();
        if let Err(error) = check_ranks(&programs) {
            return Err(TestCaseError::fail(format!("{error}\n{}", programs[0])));
        }
        Ok(())
    });
    checked.unwrap();
}

/// ZeRO (Rajbhandari et al. 2020, figure 1): 7.5 billion parameters on 64 ranks, 2 + 2 + 12 bytes
/// per parameter.
#[test]
fn the_memory_table_of_zero() {
    let unit = |name: &str, flat_elements| UnitShape { name: name.to_owned(), flat_elements, ..UnitShape::default() };
    let model = ModelShape { units: vec![unit("model", 7_500_000_000)], batch_bytes: 0 };
    let bytes = StateBytes { parameter: 2, master: 4, gradient: 2, optimizer: 8, optimizer_scales: 0, reduce: 2 };
    let resident = |zero_stage| {
        let strategy = How { zero_stage, bytes, ..How::new(1) };
        let program = lower_rank(&model, &Mesh::data(1, 64), &strategy, 63).unwrap();
        program.resident.iter().map(|effect| effect.bytes).sum::<i64>() as f64 / 1e9
    };
    let table: Vec<String> = (0..4).map(|stage| format!("{:.1}", resident(stage))).collect();
    assert_eq!(table, ["120.0", "31.4", "16.6", "1.9"]);
}

/// The program of a step on 16,384 ranks is made for one rank of each stage. The other ranks'
/// programs differ only in rank numbers.
#[test]
fn ranks_of_a_stage_have_the_same_program() {
    let mesh = Mesh { pp: 4, dp_shard: 2, tp: 2, ..Mesh::default() };
    let strategy = How { accumulation_steps: 8, zero_stage: 1, ..How::new(10) };
    let programs = lower(&common::model(10), &mesh, &strategy).unwrap();
    for program in &programs {
        assert_eq!(*program, lower_rank(&common::model(10), &mesh, &strategy, program.rank).unwrap());
    }
    assert!(programs[4].on_lane(Lane::Send).count() == 16 && programs[4].on_lane(Lane::Receive).count() == 16);
}

/// Activations in flight (Qi et al. 2023, table 1): a stage of 1F1B keeps those of as many
/// micro-batches as there are stages from it to the last; every stage of ZB-H1 keeps as many as the
/// first of 1F1B; GPipe keeps those of all.
#[test]
fn a_pipeline_keeps_the_micro_batches_in_flight() {
    let mut model = common::model(10);
    model.units.iter_mut().for_each(|unit| (unit.saved_bytes, unit.borrows) = ([1 << 20; 3], Vec::new()));
    let mesh = Mesh { pp: 4, ..Mesh::default() };
    let kept = |pipeline, stage| {
        let strategy = How { accumulation_steps: 8, pipeline: Schedule::Known(pipeline), ..How::new(10) };
        let program = lower_rank(&model, &mesh, &strategy, stage).unwrap();
        let memory = Memory::of(&program);
        let kept = memory.at_peak.iter().find(|effect| effect.kind == MemoryKind::Activations).unwrap();
        kept.bytes / (program.stretches().map(|units| units.len()).sum::<usize>() as i64 * (1 << 20))
    };
    let stages = |pipeline| [0, 1, 2, 3].map(|stage| kept(pipeline, stage));
    assert_eq!(stages(PipelineSchedule::OneForwardOneBackward), [4, 3, 2, 1]);
    assert_eq!(stages(PipelineSchedule::ZeroBubble), [4; 4]);
    assert_eq!(stages(PipelineSchedule::GPipe), [8; 4]);
}

/// The numbering of a mesh: neighbours in the shard group are neighbours in rank, and stages are
/// furthest apart.
#[test]
fn groups_are_numbered_with_tensor_innermost_and_pipeline_outermost() {
    let mesh = Mesh { pp: 2, dp_replicate: 2, dp_shard: 3, cp: 2, tp: 2, ep: 3, ..Mesh::default() };
    let ranks = |axis| mesh.group(29, axis).ranks;
    assert_eq!(mesh.ranks(), 48);
    assert_eq!(ranks(Axis::Tensor), [28, 29]);
    assert_eq!(ranks(Axis::Context), [29, 31]);
    assert_eq!(ranks(Axis::Shard), [25, 27, 29, 31, 33, 35]);
    assert_eq!(ranks(Axis::Expert), [25, 27, 29]);
    assert_eq!(ranks(Axis::Replicate), [29, 41]);
    assert_eq!(ranks(Axis::Data).len(), 12);
    assert_eq!(ranks(Axis::Pipeline), [5, 29]);
    let replicas = Mesh { dp_replicate: 4, ep: 2, expert_ranks: ExpertRanks::Replicas, ..mesh };
    assert_eq!(replicas.group(29, Axis::Replicate).ranks, [5, 17, 29, 41]);
    assert_eq!(replicas.group(29, Axis::Expert).ranks, [29, 41]);
    assert_eq!(replicas.expert_replicas(29), Group { ranks: vec![5, 29], index: 1 });
    for mesh in [mesh, replicas] {
        for axis in [Axis::Tensor, Axis::Context, Axis::Shard, Axis::Expert, Axis::Replicate, Axis::Pipeline] {
            for rank in 0..mesh.ranks() {
                let group = mesh.group(rank, axis);
                assert_eq!(group.ranks[group.index as usize], rank);
                assert!(group.ranks.iter().all(|peer| mesh.group(*peer, axis).ranks == group.ranks));
            }
        }
    }
    let place = mesh.coordinates(29);
    assert_eq!((place.pp, place.dp_replicate, place.dp_shard, place.cp, place.tp), (1, 0, 1, 0, 1));
}

/// Errors about bad input name what was asked for and what would work.
#[test]
fn strategies_that_do_not_fit_say_what_would() {
    let says = |mesh: Mesh, strategy: How, expected: &str| {
        let error = lower(&common::model(6), &mesh, &strategy).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let plain = How::new(6);
    let shards = Mesh::data(1, 6);
    says(shards, How { zero_stage: 4, ..plain.clone() }, "from 0 to 3");
    let reshard = How { zero_stage: 3, reshard_after_forward: Reshard::To(4), ..plain.clone() };
    says(shards, reshard, "use one of [1, 2, 3, 6]");
    says(shards, How { elastic: true, ..plain.clone() }, "data-parallel degree 6");
    says(Mesh { dp_replicate: 0, ..shards }, plain.clone(), "at least 1");
    says(Mesh { ep: 4, ..shards }, plain.clone(), "do not divide the shard group of 6");
    says(Mesh { ep: 4, ..Mesh::data(6, 1) }, plain.clone(), "do not divide 6 replicas");
    says(Mesh { pp: 8, ..Mesh::default() }, plain.clone(), "the model has 6");
    let interleaved =
        How { pipeline: PipelineSchedule::Interleaved { chunks: 2 }.into(), accumulation_steps: 3, ..plain.clone() };
    says(Mesh { pp: 2, ..Mesh::default() }, interleaved, "a multiple of 2 micro-batches");
    says(Mesh { pp: 2, ..Mesh::default() }, How { cuts: vec![2, 4], ..plain.clone() }, "do not divide 6 units");
    let error = lower_rank(&common::model(6), &shards, &plain, 6).unwrap_err().to_string();
    assert_eq!(error, "rank 6 is not in a mesh of 6 ranks, 0 to 5");
    let mesh = Mesh { pp: 2, tp: 4, cp: 2, ep: 2, ..Mesh::default() };
    let words = "priced, not runnable yet: the engine has no expert parallelism inside a shard group (degree 2)";
    assert_eq!(runnable(&mesh).to_string(), words);
    assert_eq!(runnable(&Mesh { ep: 2, ..Mesh::data(1, 4) }).to_string(), words);
    let replicas = Mesh { ep: 2, ..Mesh::data(4, 1) };
    assert_eq!(runnable(&replicas), Runnable::Yes);
    let sharded = Mesh { pp: 2, cp: 2, ep: 2, expert_ranks: ExpertRanks::Replicas, ..Mesh::data(4, 2) };
    assert_eq!(runnable(&sharded), Runnable::Yes);
    assert_eq!(runnable(&Mesh { tp: 2, ..sharded }), Runnable::Yes);
    says(Mesh { ep: 3, ..sharded }, plain.clone(), "3 expert-parallel ranks do not divide 4 replicas");
    assert_eq!(runnable(&Mesh { ep: 1, ..mesh }), Runnable::Yes);
    assert_eq!(runnable(&shards), Runnable::Yes);
}
