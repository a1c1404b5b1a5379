//! Steps of workers with a parameter server.

mod common;

use trainyard_program::{
    Action, Memory, MemoryKind, Mesh, Offload, ParameterServer, Program, StepKind, Strategy as How, Tier, check,
    check_ranks, lower, lower_rank,
};

fn strategy(servers: u32, staleness: u32) -> How {
    let server = Some(ParameterServer { servers, staleness, backups: 0 });
    How { kind: StepKind::Stale, server, zero_stage: 1, ..How::new(4) }
}

fn program(how: &How, rank: u32) -> Program {
    lower_rank(&common::model(4), &Mesh::data(1, 4), how, rank).unwrap()
}

fn names(program: &Program) -> Vec<String> {
    (0..program.instructions.len()).map(|number| program.describe(number)).collect()
}

/// Every number of servers, bound and kind of step on several meshes, for all ranks and checked.
#[test]
fn steps_of_workers_pass_the_checker() {
    for workers in [2u32, 3, 4, 6] {
        for servers in (1..=workers).filter(|servers| workers.is_multiple_of(*servers)) {
            for (kind, staleness) in [(StepKind::Stale, 0), (StepKind::Stale, 3), (StepKind::Drained, 3)] {
                for (accumulation_steps, snapshot) in [(1, false), (3, true)] {
                    let how = How { kind, accumulation_steps, snapshot, ..strategy(servers, staleness) };
                    let programs = lower(&common::model(4), &Mesh::data(1, workers), &how).unwrap();
                    check_ranks(&programs).unwrap_or_else(|error| panic!("{error}\n{}", programs[0]));
                    for (rank, program) in (0..).zip(&programs) {
                        let alone = lower_rank(&common::model(4), &Mesh::data(1, workers), &how, rank).unwrap();
                        assert!(*program == alone, "rank {rank} of {workers} with {servers} servers");
                    }
                }
            }
        }
    }
}

#[test]
fn a_listing_says_what_is_pushed_and_pulled_and_how_stale_it_may_be() {
    let text = program(&strategy(2, 3), 1).to_string();
    assert!(text.contains("worker and server 1 of 2 servers, staleness 3"), "{text}");
    assert!(program(&strategy(2, 3), 2).to_string().contains(", worker of 2 servers"));
    let stale = names(&program(&strategy(2, 3), 0));
    let [pushes, pulls] = ["push", "pull"].map(|name| stale.iter().filter(|what| what.starts_with(name)).count());
    assert_eq!((pushes, pulls), (4, 4), "{stale:?}");
    assert!(stale.iter().filter(|what| what.starts_with("pull")).all(|what| what.ends_with("3 stale")), "{stale:?}");
    // A step that ends with all updates, one with a snapshot, and any step of a bound of 0.
    for how in
        [How { kind: StepKind::Drained, ..strategy(1, 3) }, How { snapshot: true, ..strategy(1, 3) }, strategy(1, 0)]
    {
        let names = names(&program(&how, 0));
        assert!(names.iter().any(|what| what.starts_with("commit the step to 1 server")), "{names:?}");
        assert!(names.iter().filter(|what| what.starts_with("pull")).all(|what| what.ends_with("from 1 server")));
    }
    let bytes = |program: &Program, is: fn(&Action) -> bool| -> u64 {
        program.instructions.iter().filter(|one| is(&one.action)).map(|one| one.bytes).sum()
    };
    let is_count = |action: &Action| matches!(action, Action::Count { .. });
    assert_eq!(bytes(&program(&strategy(2, 3), 0), is_count), 0, "workers that may be stale wait for no count");
    assert_eq!(bytes(&program(&strategy(2, 0), 0), is_count), 16);
}

/// A server holds the gradients of all workers for each clock that may lack its update, beside its
/// part of masters and optimizer state; other ranks hold none of these.
#[test]
fn servers_hold_the_state_and_the_gradients_of_all_workers() {
    let held = |how: &How, rank: u32, kind: MemoryKind| -> i64 {
        let program = program(how, rank);
        program.resident.iter().filter(|effect| effect.kind == kind).map(|effect| effect.bytes).sum()
    };
    let all = strategy(4, 0);
    for (kind, factor) in [(MemoryKind::Masters, 2), (MemoryKind::Optimizer, 2)] {
        let each = held(&all, 3, kind);
        assert!(each > 0);
        assert_eq!([0, 1, 2, 3].map(|rank| held(&strategy(2, 0), rank, kind)), [factor * each, factor * each, 0, 0]);
    }
    let messages = |staleness| held(&strategy(4, staleness), 0, MemoryKind::Communication);
    // 4 workers x a quarter of the f32 gradients for each clock.
    let gradients = held(&all, 0, MemoryKind::Gradients);
    assert_eq!(
        [1, 2, 5].map(|staleness| messages(staleness) - messages(0)),
        [1, 2, 5].map(|clocks| clocks * gradients)
    );
    assert_eq!(held(&strategy(2, 0), 3, MemoryKind::Communication), 0);
    assert!(Memory::of(&program(&all, 0)).peak_bytes > 0);
}

/// Whatever is left out of a worker's step, or done twice, too early or by the wrong one, is
/// refused.
#[test]
fn mutants_of_workers_steps_are_refused() {
    let good = program(&How { snapshot: true, ..strategy(2, 3) }, 0);
    check(&good).unwrap();
    let at = |is: &str| names(&good).iter().position(|what| what.starts_with(is)).unwrap();
    let refused = |mutant: &Program, why: &str| {
        let error = check(mutant).unwrap_err().to_string();
        assert!(error.contains(why), "{error}, not `{why}`");
    };
    let with = |at: usize, action: Action| {
        let mut mutant = good.clone();
        mutant.instructions[at].action = action;
        mutant
    };
    let (push, pull, commit) = (at("push"), at("pull"), at("commit"));
    let [Action::Push { unit: pushed }, Action::Pull { unit: pulled, .. }] =
        [push, pull].map(|at| good.instructions[at].action)
    else {
        panic!("{good}")
    };
    refused(&with(pull, Action::Pull { unit: pulled, staleness: 1 }), "may not have made all updates");
    refused(&with(pull, Action::Pull { unit: pulled, staleness: 4 }), "may lack the updates of 3 steps, not of 4");
    refused(&with(pull, Action::Pull { unit: pulled + 1, staleness: 0 }), "again");
    refused(&with(push, Action::Push { unit: pushed - 1 }), "both touch the gradient");
    let reduce = Action::Reduce { unit: pushed, accumulate: false, axis: trainyard_program::Axis::Data };
    refused(&with(push, reduce), "servers sum gradients");
    refused(&with(commit, Action::Clip { axes: good.axes_of_norm() }), "servers take the norm");
    let mut drained = good.clone();
    drained.kind = StepKind::Drained;
    check(&drained).unwrap();
    drained.instructions[pull].action = Action::Pull { unit: pulled, staleness: 1 };
    refused(&drained, "may lack the updates of 0 steps");
    let mut without = good.clone();
    without.server = None;
    refused(&without, "the program has no parameter server");
    let mut early = good.clone();
    early.instructions[commit].after.clear();
    refused(&early, "both touch");
    let mut unordered = good;
    unordered.instructions[pull].after.clear();
    refused(&unordered, "both touch");
}

#[test]
fn what_workers_cannot_do_is_refused() {
    let says = |mesh: Mesh, how: How, expected: &str| {
        let error = lower(&common::model(4), &mesh, &how).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let (mesh, good) = (Mesh::data(1, 4), strategy(2, 1));
    says(mesh, How { server: None, ..good.clone() }, "a number of servers and a bound");
    says(mesh, How { kind: StepKind::Synchronous, ..good.clone() }, "steps of workers");
    says(mesh, strategy(3, 1), "a number of servers that divides its workers");
    says(mesh, strategy(0, 1), "a number of servers that divides its workers");
    says(Mesh::data(2, 2), good.clone(), "several data ranks in one shard group");
    says(Mesh::data(1, 1), strategy(1, 1), "several data ranks in one shard group");
    says(mesh, How { zero_stage: 3, ..good.clone() }, "ZeRO stage 1");
    let optimizer = Some(Tier::Disk);
    says(mesh, How { offload: Offload { optimizer, ..Offload::default() }, ..good }, "leave out their offload");
}
