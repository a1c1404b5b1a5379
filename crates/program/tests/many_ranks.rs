//! Every lowering, on every mesh, passes the checker; and says what is known of memory.

mod common;

use common::cases;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use trainyard_program::{
    Lane, Mesh, ModelShape, StateBytes, Strategy as How, UnitShape, check_ranks, lower, lower_rank,
};

/// 10,000 of everything: each lowered for all ranks and checked, alone and together.
#[test]
fn ten_thousand_random_lowerings_pass_the_checker() {
    let config = Config { cases: 10_000, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &[7; 32]),
    );
    let checked = runner.run(&cases(7), |case| {
        let programs = lower(&case.model, &case.mesh, &case.strategy).unwrap();
        if let Err(error) = check_ranks(&programs) {
            return Err(TestCaseError::fail(format!("{error}\n{}", programs[0])));
        }
        Ok(())
    });
    checked.unwrap();
}

/// ZeRO (Rajbhandari et al. 2020, figure 1): 7.5 billion parameters on 64 ranks, 2 + 2 + 12 bytes per parameter.
#[test]
fn the_memory_table_of_zero() {
    let unit = |name: &str, flat_elements| UnitShape { name: name.to_owned(), flat_elements, ..UnitShape::default() };
    let model = ModelShape { units: vec![unit("model", 7_500_000_000)], batch_bytes: 0 };
    let bytes = StateBytes { parameter: 2, master: 4, gradient: 2, optimizer: 8, reduce: 2 };
    let resident = |zero_stage| {
        let strategy = How { zero_stage, bytes, ..How::new(1) };
        let program = lower_rank(&model, &Mesh::data(1, 64), &strategy, 63).unwrap();
        program.resident.iter().map(|effect| effect.bytes).sum::<i64>() as f64 / 1e9
    };
    let table: Vec<String> = (0..4).map(|stage| format!("{:.1}", resident(stage))).collect();
    assert_eq!(table, ["120.0", "31.4", "16.6", "1.9"]);
}

/// A program of a step that 16,384 ranks run is made for one rank of each stage; the others' differ in ranks' numbers alone.
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
