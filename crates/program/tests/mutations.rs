//! Programs that the checker accepts do no harm, and mutants that do harm are refused.
//!
//! An interpreter that shares nothing with the checker judges the harm. It runs the programs of all
//! ranks, with numbers for tensors, in many orders that lanes and dependencies allow. A mutant is
//! harmful if some order fails or ends with other weights than the original program.

mod common;
mod interpreter;

use common::{Case, Dice, data_parallel_cases, pipeline_cases};
use interpreter::{Order, Outcome, run};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use trainyard_program::{
    Lane, Mesh, ModelShape, Offload, PipelineSchedule, Program, ReduceSchedule, Strategy as How, Tier, check_ranks,
    lower,
};

fn runner() -> TestRunner {
    let config = Config { failure_persistence: None, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[11; 32]))
}

fn orders(random: u64) -> Vec<Order> {
    let eager = Lane::ALL.into_iter().map(Order::Eager);
    eager.chain(Lane::ALL.into_iter().map(Order::Lazy)).chain((0..random).map(Order::Random)).collect()
}

/// The outcome, if every order gives the same one.
fn outcome(programs: &[Program], orders: &[Order]) -> Result<Outcome, String> {
    let mut outcomes = orders.iter().map(|order| run(programs, *order));
    let first = outcomes.next().expect("there are orders")?;
    for other in outcomes {
        if other? != first {
            return Err("orders end differently".to_owned());
        }
    }
    Ok(first)
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Mutation {
    Drop,
    Duplicate,
    SwapNeighbours,
    Swap,
    DropDependency,
}

const MUTATIONS: [Mutation; 5] =
    [Mutation::Drop, Mutation::Duplicate, Mutation::SwapNeighbours, Mutation::Swap, Mutation::DropDependency];

/// The program with its instructions in the order `order` (old numbers; some may be missing or
/// repeated). Dependencies follow the instructions they named.
fn reordered(program: &Program, order: &[usize]) -> Program {
    let new = |old: u32| order.iter().position(|number| *number == old as usize).map(|place| place as u32);
    let mut mutant = program.clone();
    mutant.instructions = order.iter().map(|number| program.instructions[*number].clone()).collect();
    for instruction in &mut mutant.instructions {
        instruction.after = instruction.after.iter().filter_map(|on| new(*on)).collect();
    }
    mutant
}

fn mutate(program: &Program, mutation: Mutation, dice: &mut Dice) -> Option<Program> {
    let count = program.instructions.len();
    let at = dice.below(count);
    let mut order: Vec<usize> = (0..count).collect();
    match mutation {
        Mutation::Drop => {
            order.remove(at);
        }
        Mutation::Duplicate => order.insert(at, at),
        Mutation::SwapNeighbours => order.swap(at, (at + 1) % count),
        Mutation::Swap => order.swap(at, dice.below(count)),
        Mutation::DropDependency => {
            let with: Vec<usize> = (0..count).filter(|n| !program.instructions[*n].after.is_empty()).collect();
            let mut mutant = program.clone();
            let after = &mut mutant.instructions[with[dice.below(with.len())]].after;
            after.remove(dice.below(after.len()));
            return Some(mutant);
        }
    }
    let mutant = reordered(program, &order);
    (mutant != *program).then_some(mutant)
}

/// The instructions of each lane with their dependencies. Two programs with the same result are one
/// program written down in different orders.
fn lanes_alone(program: &Program) -> Vec<String> {
    let place = |number: u32| {
        let lane = program.instructions[number as usize].action.lane();
        (lane, program.on_lane(lane).position(|n| n as u32 == number))
    };
    let line = |number: usize| {
        let instruction = &program.instructions[number];
        let mut after: Vec<_> = instruction.after.iter().map(|on| place(*on)).collect();
        after.sort();
        format!("{:?} {:?} {:?} {after:?}", instruction.action, instruction.effects, instruction.working_bytes)
    };
    Lane::ALL.iter().flat_map(|lane| program.on_lane(*lane).map(line)).collect()
}

#[derive(Clone, Copy, Default, Debug)]
struct Count {
    made: u32,
    caught: u32,
    /// Not caught: the same lanes with the same dependencies, written in another order.
    same: u32,
    /// Not caught: no order of execution tells the mutant from its original.
    harmless: u32,
    harmful: u32,
}

/// Mutants with dropped, duplicated or swapped instructions, or dropped dependencies: none that
/// does harm is accepted.
#[test]
fn no_harmful_mutant_passes_the_checker() {
    let (mut runner, mut dice) = (runner(), Dice(3));
    let mut counts = [Count::default(); MUTATIONS.len()];
    let mut missed = Vec::new();
    let (cases, pipelines) = (data_parallel_cases(4), pipeline_cases(5));
    let rounds = trainyard_testing::cases("programs to break", 60, 240);
    for round in 0..rounds {
        let case: Case = match round % 3 {
            2 => pipelines.new_tree(&mut runner).unwrap().current(),
            _ => cases.new_tree(&mut runner).unwrap().current(),
        };
        let programs = lower(&case.model, &case.mesh, &case.strategy).unwrap();
        let original = outcome(&programs, &orders(2)).unwrap();
        for _ in 0..4 {
            for (mutation, count) in MUTATIONS.into_iter().zip(&mut counts) {
                let rank = dice.below(programs.len());
                let Some(mutant) = mutate(&programs[rank], mutation, &mut dice) else { continue };
                let mut mutated = programs.clone();
                mutated[rank] = mutant;
                count.made += 1;
                let caught = check_ranks(&mutated).is_err();
                let harmful = outcome(&mutated, &orders(6)) != Ok(original.clone());
                count.caught += u32::from(caught);
                count.harmful += u32::from(harmful);
                if !caught && harmful {
                    missed.push(format!("{mutation:?} on rank {rank} of {case:?}\n{}", mutated[rank]));
                } else if !caught && lanes_alone(&mutated[rank]) == lanes_alone(&programs[rank]) {
                    count.same += 1;
                } else if !caught {
                    count.harmless += 1;
                }
            }
        }
    }
    for (mutation, count) in MUTATIONS.into_iter().zip(counts) {
        println!("{mutation:?}: {count:?}");
    }
    assert!(missed.is_empty(), "{} missed, the first: {}", missed.len(), missed[0]);
    // Nearly all mutants that differ in some lane are caught. No order of execution tells the rest
    // from the original.
    let [made, same, caught] =
        [counts.map(|c| c.made), counts.map(|c| c.same), counts.map(|c| c.caught)].map(|c| c.iter().sum::<u32>());
    assert!(u64::from(made) > 18 * rounds && caught * 100 >= (made - same) * 97, "{caught} of {made} - {same} caught");
}

/// Invariant 7, in programs: the same micro-batches on the same mesh end in the same weights,
/// whatever the order of lanes, stage, sharding of the step, prefetch, offload or checkpointing.
#[test]
fn strategies_and_orders_change_no_weight() {
    let mut runner = runner();
    for round in 0..40 {
        let case = data_parallel_cases(4).new_tree(&mut runner).unwrap().current();
        let plain = How { accumulation_steps: case.strategy.accumulation_steps, ..How::new(case.model.units.len()) };
        let weights = |strategy: &How| {
            let programs = lower(&case.model, &case.mesh, strategy).unwrap();
            let ends = outcome(&programs, &orders(4)).unwrap();
            ends.iter().map(|rank| norm_and_weights(rank, &case.model).to_vec()).collect::<Vec<_>>()
        };
        assert_eq!(weights(&plain), weights(&case.strategy), "round {round}: {case:?}");
    }
}

/// The norm and the weights of every unit, of one rank of an outcome.
fn norm_and_weights<'r>(rank: &'r [u64], model: &ModelShape) -> &'r [u64] {
    &rank[rank.len() - model.units.len() - 1..]
}

/// A pipeline ends in the weights of one stage, by whatever schedule: forwards and backwards, their
/// halves, messages and shared units give every gradient once.
#[test]
fn pipelines_end_in_the_weights_of_one_stage() {
    let mut runner = runner();
    for round in 0..trainyard_testing::cases("pipelines", 60, 400) {
        let case = pipeline_cases(8).new_tree(&mut runner).unwrap().current();
        let plain = How { accumulation_steps: case.strategy.accumulation_steps, ..How::new(case.model.units.len()) };
        let stage = lower(&case.model, &Mesh { pp: 1, ..case.mesh }, &plain).unwrap();
        let wanted = outcome(&stage, &[Order::Random(0)]).unwrap();
        let programs = lower(&case.model, &case.mesh, &case.strategy).unwrap();
        let ends = outcome(&programs, &orders(4)).unwrap_or_else(|error| panic!("round {round}: {case:?}: {error}"));
        for (program, rank) in programs.iter().zip(&ends) {
            let wanted = norm_and_weights(&wanted[program.rank as usize % wanted.len()], &case.model);
            let rank = norm_and_weights(rank, &case.model);
            let same = |unit: u32| rank[unit as usize + 1] == wanted[unit as usize + 1];
            assert!(rank[0] == wanted[0] && program.trains().into_iter().all(same), "round {round}: {case:?}");
        }
    }
}

fn every_dependency_is_needed(model: &ModelShape, strategy: &How) {
    let programs = lower(model, &Mesh::data(1, 2), strategy).unwrap();
    every_dependency_of(&programs[0], &programs, &format!("{strategy:?}"));
}

fn every_dependency_of(program: &Program, programs: &[Program], words: &str) {
    for (number, instruction) in program.instructions.iter().enumerate() {
        for place in 0..instruction.after.len() {
            let mut mutated = programs.to_vec();
            mutated[program.rank as usize].instructions[number].after.remove(place);
            assert!(check_ranks(&mutated).is_err(), "{words}, {number}:\n{program}");
        }
    }
}

/// The same of every stage of a pipeline, by every schedule.
#[test]
fn no_dependency_of_a_pipeline_is_superfluous() {
    for schedule in PipelineSchedule::ALL {
        for (zero_stage, prefetch) in [(0, 1), (3, 2)] {
            let strategy =
                How { pipeline: schedule.into(), zero_stage, prefetch, accumulation_steps: 6, ..How::new(9) };
            let mesh = Mesh { pp: 3, dp_shard: if zero_stage > 0 { 2 } else { 1 }, ..Mesh::default() };
            let programs = lower(&common::model(9), &mesh, &strategy).unwrap();
            for program in programs.iter().step_by(mesh.stage_ranks() as usize) {
                every_dependency_of(program, &programs, &schedule.to_string());
            }
        }
    }
}

/// Every dependency is needed: without it, both the checker and some order notice a difference.
#[test]
fn no_dependency_is_superfluous() {
    let model = common::model(5);
    for zero_stage in 0..4 {
        let strategy = How { zero_stage, accumulation_steps: 2, snapshot: true, ..How::new(5) };
        every_dependency_is_needed(&model, &strategy);
        for tier in [Some(Tier::Disk), Some(Tier::Host)] {
            let of = [[tier, None, None, None], [tier, tier, tier, None], [tier, None, None, tier], [tier; 4]];
            for [optimizer, parameters, activations, gradients] in of {
                let offload = Offload { optimizer, parameters, activations, gradients };
                let strategy = How { offload, update_chunk: Some(16 * 4096), ..strategy.clone() };
                every_dependency_is_needed(&model, &strategy);
                let reduce_schedule = ReduceSchedule::PerMicroBatch;
                every_dependency_is_needed(&model, &How { reduce_schedule, accumulation_steps: 3, ..strategy });
            }
        }
    }
}
