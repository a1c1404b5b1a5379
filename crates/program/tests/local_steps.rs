//! Steps of replicas that train apart, and encoded messages.

mod common;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use trainyard_program::{
    Action, Axis, BlockCodec, Codec, Encoding, Fragment, Memory, MemoryKind, Mesh, Offload, Program, StepKind,
    Strategy as How, check, check_ranks, lower, lower_rank,
};

/// Lowerings of every kind on meshes with every axis, for all ranks and checked.
#[test]
fn inner_and_outer_steps_of_random_lowerings_pass_the_checker() {
    let cases = u32::try_from(trainyard_testing::cases("local steps", 300, 3_000)).unwrap();
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[9; 32]));
    let kind = prop::sample::select(vec![StepKind::Synchronous, StepKind::Inner, StepKind::Outer]);
    let over = prop::sample::select(vec![Axis::Data, Axis::Replicate]);
    let fragment = prop::option::of((0..3u32, any::<bool>()))
        .prop_map(|drawn| drawn.map(|(index, overlaps)| Fragment { index, count: 3, overlaps }));
    let drawn = (common::cases(6), kind, over, any::<bool>(), fragment);
    let checked = runner.run(&drawn, |(case, kind, over, feedback, fragment)| {
        let encoding = Some(Encoding::new(Codec::Blocks(BlockCodec::Int8), over, feedback));
        let offload = if kind == StepKind::Synchronous { case.strategy.offload } else { Offload::default() };
        let strategy = How {
            kind,
            gradients: encoding,
            outer: encoding,
            fragment,
            elastic: false,
            offload,
            ..case.strategy.clone()
        };
        let programs = lower(&case.model, &case.mesh, &strategy).unwrap();
        if let Err(error) = check_ranks(&programs) {
            return Err(TestCaseError::fail(format!("{error}\n{}", programs[0])));
        }
        Ok(())
    });
    checked.unwrap();
}

fn program(kind: StepKind) -> Program {
    let strategy = How { kind, zero_stage: 3, snapshot: true, ..How::new(4) };
    lower_rank(&common::model(4), &Mesh::data(2, 2), &strategy, 3).unwrap()
}

fn count(program: &Program, is: impl Fn(&Action) -> bool) -> usize {
    program.instructions.iter().filter(|instruction| is(&instruction.action)).count()
}

#[test]
fn inner_steps_exchange_inside_a_replica_only_and_an_outer_step_averages_every_unit_once() {
    let [inner, outer] = [StepKind::Inner, StepKind::Outer].map(program);
    let over_replicas = |action: &Action| match action {
        Action::Count { axis } | Action::Reduce { axis, .. } => *axis != Axis::Shard,
        Action::Outer { .. } => true,
        _ => false,
    };
    assert_eq!(count(&inner, over_replicas), 0);
    assert_eq!(count(&outer, over_replicas), 4);
    // Parameters of the last outer step and their momentum.
    let held = |program: &Program| {
        let of = program.resident.iter().filter(|effect| effect.kind == MemoryKind::Optimizer);
        of.map(|effect| effect.bytes).sum::<i64>()
    };
    assert_eq!(held(&outer), 2 * held(&program(StepKind::Synchronous)));
    assert!(Memory::of(&inner).peak_bytes > 0);
}

/// Whatever is left out of an outer step, or done twice or elsewhere, is refused.
#[test]
fn mutants_of_outer_steps_are_refused() {
    let good = program(StepKind::Outer);
    check(&good).unwrap();
    let at = good.instructions.iter().position(|one| matches!(one.action, Action::Outer { .. })).unwrap();
    let refused = |mutant: Program, why: &str| {
        let error = check(&mutant).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    let mut synchronous = good.clone();
    synchronous.kind = StepKind::Synchronous;
    refused(synchronous, "targets differ over data ranks");
    let mut over_shards = good.clone();
    if let Action::Outer { axis, .. } = &mut over_shards.instructions[at].action {
        *axis = Axis::Shard;
    }
    refused(over_shards, "replicas train apart");
    let mut twice = good.clone();
    if let Action::Outer { unit, .. } = &mut twice.instructions[at].action {
        *unit += 1;
    }
    refused(twice, "both touch the optimizer state");
    let mut early = good;
    early.instructions[at].after.clear();
    refused(early, "both touch the optimizer state");
}

fn fragment_beside(index: u32, count: u32) -> Program {
    let fragment = Some(Fragment { index, count, overlaps: true });
    let strategy = How { kind: StepKind::Outer, fragment, zero_stage: 3, snapshot: true, ..How::new(4) };
    lower_rank(&common::model(4), &Mesh::data(2, 2), &strategy, 3).unwrap()
}

/// Changes travel from the beginning of the step, and their mean comes in after the update.
#[test]
fn a_fragment_is_averaged_beside_the_step_and_merged_at_its_end() {
    let program = fragment_beside(1, 2);
    check(&program).unwrap();
    let of = |is: fn(&Action) -> bool| -> Vec<usize> {
        (0..program.instructions.len()).filter(|at| is(&program.instructions[*at].action)).collect()
    };
    let (sent, merged) = (of(|a| matches!(a, Action::Outer { .. })), of(|a| matches!(a, Action::Merge { .. })));
    let units = |at: &[usize]| at.iter().map(|at| program.instructions[*at].action.unit().unwrap()).collect::<Vec<_>>();
    assert_eq!((units(&sent), units(&merged)), (vec![1, 3], vec![1, 3]));
    assert!(sent.iter().all(|at| program.instructions[*at].after.is_empty()), "nothing to wait for");
    let first = of(|a| matches!(a, Action::Forward { .. }))[0];
    let update = *of(|a| matches!(a, Action::Update { .. })).last().unwrap();
    assert!(sent[1] < first && merged[1] > update);
    assert!(program.to_string().contains("fragment 1 of 2, beside the step"), "{program}");
}

/// Whatever is left out of a step with a fragment beside it, or done too early, is refused.
#[test]
fn mutants_of_fragments_are_refused() {
    let good = fragment_beside(1, 2);
    let at = |is: fn(&Action) -> bool| good.instructions.iter().position(|one| is(&one.action)).unwrap();
    let (outer, merge) = (at(|a| matches!(a, Action::Outer { .. })), at(|a| matches!(a, Action::Merge { .. })));
    let refused = |mutant: Program, why: &str| {
        let error = check(&mutant).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    let mut unordered = good.clone();
    unordered.instructions[merge].after.clear();
    refused(unordered, "both touch");
    let mut other = good.clone();
    other.instructions[merge].action = Action::Merge { unit: 0 };
    refused(other, "the changes of unit 0 are not averaged");
    let mut other = good.clone();
    if let Action::Outer { unit, .. } = &mut other.instructions[outer].action {
        *unit = 0;
    }
    refused(other, "no outer step of unit 0");
    let mut whole = good.clone();
    whole.fragment = None;
    refused(whole, "both touch the parameters");
    let mut inner = good.clone();
    inner.kind = StepKind::Inner;
    refused(inner, "both touch the parameters");
}

#[test]
fn offloaded_state_and_elastic_bits_do_not_go_with_training_apart() {
    let says = |strategy: How, expected: &str| {
        let error = lower(&common::model(4), &Mesh::data(2, 1), &strategy).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let apart = How { kind: StepKind::Inner, ..How::new(4) };
    let optimizer = Some(trainyard_program::Tier::Disk);
    says(How { offload: Offload { optimizer, ..Offload::default() }, ..apart.clone() }, "leave out their offload");
    says(How { elastic: true, ..apart }, "leave out compression and local steps");
    let gradients = Some(Encoding::new(Codec::Blocks(BlockCodec::OneBit), Axis::Data, true));
    says(How { elastic: true, gradients, ..How::new(4) }, "leave out compression");
}

#[test]
fn a_listing_names_the_codec_and_the_bytes_before_and_after() {
    let gradients = Some(Encoding::new(Codec::Blocks(BlockCodec::TopK { kept: 41 }), Axis::Data, true));
    let strategy = How { gradients, ..How::new(4) };
    let program = lower_rank(&common::model(4), &Mesh::data(2, 1), &strategy, 0).unwrap();
    let text = program.to_string();
    assert!(text.contains("moves 400.0 KiB; as top_k 1.0 % 4.00 KiB, with feedback"), "{text}");
    // What was left out, and the share of one of two ranks in the sum's.
    let kept = program.resident.iter().find(|effect| effect.kind == MemoryKind::Communication).unwrap();
    assert_eq!(kept.bytes, 4 * 102_400 * (4 + 2));
}
