//! Lowerings give programs that pass the checker, and the checker refuses broken ones.

use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
use trainyard_program::{Keep, ModelShape, Program, Strategy, StrategyError, UnitShape, check, lower};

fn model(units: usize) -> ModelShape {
    let unit = |i: usize| UnitShape {
        name: match i {
            0 => "embedding".to_owned(),
            i if i + 1 == units => "head".to_owned(),
            i => format!("block.{}", i - 1),
        },
        parameters: 100,
        borrows: if i + 1 == units && i > 0 { vec![0] } else { Vec::new() },
        saved_bytes: [300 + i as u64, 200, 10],
    };
    ModelShape { units: (0..units).map(unit).collect() }
}

fn one(units: usize, strategy: Strategy) -> Program {
    lower(&model(units), &strategy).unwrap().remove(0)
}

#[test]
fn the_program_of_two_micro_batches() {
    let strategy = Strategy {
        accumulation_steps: 2,
        keep: vec![Keep::Everything, Keep::InputOnly, Keep::Everything],
        snapshot: true,
    };
    insta::assert_snapshot!(one(3, strategy).to_string());
}

#[test]
fn strategies_that_do_not_fit_are_refused() {
    let strategy = Strategy { accumulation_steps: 0, keep: vec![Keep::Everything; 3], snapshot: false };
    assert_eq!(lower(&model(3), &strategy), Err(StrategyError::NoMicroBatch));
    let strategy = Strategy { accumulation_steps: 1, keep: vec![Keep::Everything; 2], snapshot: false };
    assert_eq!(lower(&model(3), &strategy), Err(StrategyError::KeepLength { given: 2, units: 3 }));
    let strategy = Strategy { accumulation_steps: 1, keep: vec![], snapshot: false };
    assert_eq!(lower(&model(0), &strategy), Err(StrategyError::NoUnits));
}

#[test]
fn a_program_survives_json() {
    let program = one(4, Strategy { accumulation_steps: 2, keep: vec![Keep::Selective; 4], snapshot: false });
    let json = serde_json::to_string(&program).unwrap();
    assert_eq!(serde_json::from_str::<Program>(&json).unwrap(), program);
}

proptest! {
    #[test]
    fn every_lowering_passes_the_checker(
        units in 1usize..6, accumulation_steps in 1u32..4, keeps in prop::collection::vec(0usize..3, 6), snapshot in any::<bool>()
    ) {
        let keep = keeps[..units].iter().map(|k| [Keep::Everything, Keep::Selective, Keep::InputOnly][*k]).collect();
        let program = one(units, Strategy { accumulation_steps, keep, snapshot });
        prop_assert_eq!(check(&program), Ok(()));
    }

    /// Taking out any instruction but the snapshot, or moving one before what it needs, is noticed.
    #[test]
    fn the_checker_notices_a_missing_instruction(at in 0usize..100) {
        let program = one(3, Strategy { accumulation_steps: 2, keep: vec![Keep::Everything; 3], snapshot: false });
        let mut broken = program.clone();
        broken.instructions.remove(at % program.instructions.len());
        // Numbers after the gap are off by one; only what the step computes is of interest here.
        for instruction in &mut broken.instructions {
            instruction.after.clear();
        }
        prop_assert!(check(&broken).is_err());
    }

    #[test]
    fn the_checker_notices_a_swap_of_dependent_neighbours(at in 0usize..100) {
        let program = one(3, Strategy { accumulation_steps: 1, keep: vec![Keep::Everything; 3], snapshot: false });
        // Instructions 1 to 7 are a chain: forwards, backwards, clip.
        let at = 1 + at % 6;
        let mut broken = program.clone();
        broken.instructions.swap(at, at + 1);
        prop_assert!(check(&broken).is_err());
    }
}
