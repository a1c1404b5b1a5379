//! Lowerings produce programs that pass the checker, and the checker refuses broken ones.

mod common;

use common::model;
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
use trainyard_program::{Keep, Mesh, ModelShape, Program, Reshard, Strategy, StrategyError, check, lower, lower_rank};

fn one(units: usize, strategy: &Strategy) -> Program {
    lower(&model(units), &Mesh::default(), strategy).unwrap().remove(0)
}

fn accumulating(units: usize, accumulation_steps: u32) -> Strategy {
    Strategy { accumulation_steps, ..Strategy::new(units) }
}

#[test]
fn the_program_of_two_micro_batches() {
    let keep = vec![Keep::Everything, Keep::InputOnly, Keep::Everything];
    let strategy = Strategy { keep, snapshot: true, ..accumulating(3, 2) };
    insta::assert_snapshot!(one(3, &strategy).to_string());
}

#[test]
fn the_programs_of_the_zero_stages() {
    for stage in 0..=3 {
        let strategy = Strategy { zero_stage: stage, ..accumulating(4, 2) };
        let program = lower_rank(&model(4), &Mesh::data(2, 2), &strategy, 1).unwrap();
        insta::assert_snapshot!(format!("zero_{stage}"), program.to_string());
    }
    let strategy = Strategy { zero_stage: 3, reshard_after_forward: Reshard::To(2), ..Strategy::new(5) };
    let program = lower_rank(&model(5), &Mesh::data(1, 4), &strategy, 1).unwrap();
    insta::assert_snapshot!("zero_3_to_2", program.to_string());
}

#[test]
fn strategies_that_do_not_fit_are_refused() {
    let refused = |model: &ModelShape, strategy: &Strategy| lower(model, &Mesh::default(), strategy).unwrap_err();
    assert_eq!(refused(&model(3), &accumulating(3, 0)), StrategyError::NoMicroBatch);
    assert_eq!(refused(&model(3), &Strategy::new(2)), StrategyError::KeepLength { given: 2, units: 3 });
    assert_eq!(refused(&model(0), &Strategy::new(0)), StrategyError::NoUnits);
}

#[test]
fn a_program_survives_json() {
    let strategy = Strategy { zero_stage: 3, keep: vec![Keep::Selective; 4], ..accumulating(4, 2) };
    let program = lower_rank(&model(4), &Mesh::data(1, 2), &strategy, 1).unwrap();
    let json = serde_json::to_string(&program).unwrap();
    assert_eq!(serde_json::from_str::<Program>(&json).unwrap(), program);
}

proptest! {
    #[test]
    fn every_lowering_passes_the_checker(
        units in 1usize..6, accumulation_steps in 1u32..4, keeps in prop::collection::vec(0usize..3, 6), snapshot in any::<bool>()
    ) {
        let keep = keeps[..units].iter().map(|k| [Keep::Everything, Keep::Selective, Keep::InputOnly][*k]).collect();
        let program = one(units, &Strategy { keep, snapshot, ..accumulating(units, accumulation_steps) });
        prop_assert_eq!(check(&program), Ok(()));
    }

    #[test]
    fn the_checker_notices_a_swap_of_dependent_neighbours(at in 0usize..100) {
        let program = one(3, &Strategy::new(3));
        // Instructions 2 to 8 are a chain: forwards, backwards, clip.
        let at = 2 + at % 6;
        let mut broken = program.clone();
        broken.instructions.swap(at, at + 1);
        prop_assert!(check(&broken).is_err());
    }
}
