//! Tests of state offloaded to the host beside a GPU.

use super::*;
use trainyard_engine::checkpoint::Snapshot;
use trainyard_engine::precision::LossScaler;
use trainyard_engine::snapshot::{RunState, take};

/// Settings that offload each kind of state, alone and together, with several chunks and other
/// prefetch depths.
const WAYS: [&[&str]; 10] = [
    &[OPTIMIZER],
    &[OPTIMIZER, "memory.offload.chunk_elements=4096"],
    &[PARAMETERS],
    &[ACTIVATIONS],
    &[ACTIVATIONS, PARAMETERS, "parallel.prefetch=2"],
    &[OPTIMIZER, PARAMETERS, ACTIVATIONS, "memory.offload.chunk_elements=8192"],
    &[OPTIMIZER, PARAMETERS, "parallel.prefetch=0"],
    &[OPTIMIZER, GRADIENTS],
    &[OPTIMIZER, GRADIENTS, "memory.offload.chunk_elements=4096", "parallel.prefetch=2"],
    &[OPTIMIZER, GRADIENTS, PARAMETERS, ACTIVATIONS, "memory.offload.chunk_elements=8192"],
];

#[test]
fn what_lies_on_the_host_comes_and_goes_in_order_and_takes_the_memory_that_meta_predicts() {
    let base = ["device=cuda", "training.accumulation_steps=2"];
    for (model, precision) in [(LLAMA, "precision.compute=bf16"), (GPT2, "precision.compute=f32")] {
        for way in WAYS {
            let sets = [&base[..], &[precision], way].concat();
            let trial = Trial::new(model, &sets);
            let (fake, device) = fake(Options::default());
            let mut rank = trial.rank(&device);
            for step in 0..3 {
                trial.step(&mut rank, step);
            }
            assert_eq!(fake.problems(), [""; 0], "{sets:?}");
            let shape = BatchShape::uniform(ROWS, LENGTH);
            let predicted = predict(trial.model(), &trial.program, &shape, &trial.settings).unwrap();
            for (measured, predicted) in
                [(device.pool().usage(), predicted.memory), (rank.host_memory(), predicted.host_memory)]
            {
                for purpose in Purpose::ALL {
                    assert_eq!(measured.peak(purpose), predicted.peak(purpose), "{purpose} of {sets:?}");
                }
                assert_eq!(measured.peak_total(), predicted.peak_total(), "{sets:?}");
            }
            // Offloaded state is not on the device as well.
            let optimizer = way.contains(&OPTIMIZER);
            assert_eq!(predicted.memory.peak(Purpose::Optimizer) == 0, optimizer, "{sets:?}");
            assert_eq!(predicted.host_memory.peak(Purpose::Optimizer) > 0, optimizer, "{sets:?}");
            assert_eq!(predicted.memory.live(Purpose::Grads) == 0, way.contains(&GRADIENTS), "{sets:?}");
            assert_eq!(predicted.host_memory.peak(Purpose::Activations) > 0, way.contains(&ACTIVATIONS), "{sets:?}");
        }
    }
}

#[test]
fn what_lies_on_the_host_changes_no_bit() {
    for (model, base) in [
        (LLAMA, ["device=cuda", "precision.compute=bf16", "training.accumulation_steps=2"]),
        (GPT2, ["device=cuda", "precision.compute=f32", "activation_checkpointing.mode=full"]),
    ] {
        let reference = {
            let (_tested, gpu) = device(0);
            Trial::new(model, &base).run(&gpu, 3)
        };
        for (number, way) in WAYS.into_iter().enumerate() {
            let sets = [&base[..], way].concat();
            let (tested, gpu) = device(number as u64);
            let (outcomes, weights) = Trial::new(model, &sets).run(&gpu, 3);
            assert_eq!(tested.problems(), [""; 0], "{sets:?}");
            let losses = |outcomes: &[StepOutcome]| outcomes.iter().map(|o| o.loss).collect::<Vec<_>>();
            assert_eq!(losses(&outcomes), losses(&reference.0), "{sets:?}");
            assert!(weights == reference.1, "{sets:?}: some weight differs");
        }
    }
}

/// Overlap of copies and computing, by the fake driver's clocks, on which streams run in parallel
/// as far as their events allow. A pass's state is fetched while the previous pass computes, and
/// evicted while the next one does.
#[test]
fn what_lies_on_the_host_moves_beside_computing() {
    let model = LLAMA.replace("layers = 2", "layers = 6");
    let trial = Trial::new(&model, &["device=cuda", "precision.compute=bf16", PARAMETERS, ACTIVATIONS]);
    let (fake, device) = fake(Options::default());
    let mut rank = trial.rank(&device);
    trial.step(&mut rank, 0);
    let spans = trial.step(&mut rank, 1).spans;
    assert_eq!(fake.problems(), [""; 0]);
    let actions: Vec<Action> = trial.program.instructions.iter().map(|i| i.action).collect();
    let is_pass = |n: &usize| matches!(actions[*n], Action::Forward { .. } | Action::Backward { .. });
    let passes: Vec<usize> = trial.program.on_lane(Lane::Compute).filter(is_pass).collect();
    let (mut fetched, mut evicted) = (0, 0);
    for number in trial.program.on_lane(Lane::HostIo) {
        match actions[number] {
            Action::Fetch { unit, state } => {
                let uses = |n: &&usize| actions[**n].unit() == Some(unit) && **n > number;
                let Some(user) = passes.iter().position(|n| uses(&n)) else { continue };
                let backward = matches!(actions[passes[user]], Action::Backward { .. });
                if user == 0 || matches!(state, State::Activations { .. }) != backward {
                    continue;
                }
                let (fetch, before) = (spans[number], spans[passes[user - 1]]);
                assert!(fetch.start < before.end, "{:?}: {fetch:?} after {before:?}", actions[number]);
                fetched += 1;
            }
            Action::Evict { unit, state: State::Activations { .. }, .. } => {
                let left = passes.iter().position(|n| actions[*n].unit() == Some(unit)).unwrap();
                let (evict, next) = (spans[number], spans[passes[left + 1]]);
                if evict.start == evict.end {
                    continue; // Nothing was to be moved.
                }
                assert!(next.start < evict.end, "{:?}: {next:?} after {evict:?}", actions[number]);
                evicted += 1;
            }
            _ => {}
        }
    }
    assert!(fetched >= 10 && evicted >= 5, "{fetched} {evicted}");
}

#[test]
fn a_snapshot_has_what_was_just_moved_to_the_host() {
    for seed in 0..4 {
        let sets = ["device=cuda", "precision.compute=f32", PARAMETERS];
        let trial = Trial::lowered(LLAMA, &sets, true);
        let (tested, gpu) = device(seed);
        let mut rank = trial.rank(&gpu);
        let mut taken = Vec::new();
        trial.step_with(&mut rank, 0, |rank| taken = Trial::masters(rank));
        assert_eq!(tested.problems(), [""; 0]);
        assert!(taken == Trial::masters(&rank), "some weight of the snapshot is that of the step before");
    }
}

/// A checkpoint has the same bytes whether the state is copied first or not, and whichever thread
/// reads it.
#[test]
fn a_snapshot_that_is_not_copied_is_read_by_another_thread() {
    for way in [&[][..], &[OPTIMIZER], &[OPTIMIZER, GRADIENTS, PARAMETERS]] {
        let trial = Trial::lowered(LLAMA, &[&["device=cuda", "precision.compute=bf16"], way].concat(), true);
        let (tested, gpu) = device(1);
        let mut rank = trial.rank(&gpu);
        let state = RunState {
            step: 1,
            updates: 1,
            averaged: 0,
            period_updates: Vec::new(),
            skipped_in_a_row: 0,
            skipped: 0,
            samples: 1,
            tokens: 1,
            seconds: 0.0,
            schedule_steps: None,
            schedule_seconds: None,
            learning_rate_next: None,
            scaler: LossScaler::none(),
            amax_history: None,
            early_stopping: Default::default(),
            history: Default::default(),
            round: None,
            dataset: String::new(),
            tokenizer: String::new(),
        };
        let bytes = |snapshot: &Snapshot<'_>| -> Vec<u8> {
            let mut all = Vec::new();
            for region in snapshot.parts.iter().flat_map(|part| &part.regions) {
                let to = |bytes: &[u8]| {
                    all.extend_from_slice(bytes);
                    Ok(())
                };
                region.bytes.chunks(1000, to).unwrap();
            }
            all
        };
        let mut taken = Vec::new();
        trial.step_with(&mut rank, 0, |rank| {
            let live = take(rank, &state, false).unwrap();
            let live = std::thread::scope(|scope| scope.spawn(|| bytes(&live)).join().unwrap());
            taken = vec![live, bytes(&take(rank, &state, true).unwrap())];
        });
        assert_eq!(tested.problems(), [""; 0]);
        assert!(!taken[0].is_empty() && taken[0] == taken[1], "{way:?}");
    }
}

/// By the fake driver's clocks too, a link copies in both directions at once.
#[test]
fn what_lies_on_the_host_comes_while_other_things_go() {
    let model = LLAMA.replace("layers = 2", "layers = 6");
    for (way, least) in [
        (&[PARAMETERS, ACTIVATIONS][..], 4),
        (&[OPTIMIZER, "memory.offload.chunk_elements=4096"], 10),
        (&[OPTIMIZER, PARAMETERS, ACTIVATIONS], 6),
        (&[OPTIMIZER, GRADIENTS, PARAMETERS, ACTIVATIONS], 6),
    ] {
        let trial = Trial::new(&model, &[&["device=cuda", "precision.compute=bf16"], way].concat());
        let (fake, device) = fake(Options::default());
        let mut rank = trial.rank(&device);
        trial.step(&mut rank, 0);
        let spans = trial.step(&mut rank, 1).spans;
        assert_eq!(fake.problems(), [""; 0], "{way:?}");
        let (to_host, to_device): (Vec<usize>, Vec<usize>) = trial
            .program
            .on_lane(Lane::HostIo)
            .filter(|number| trial.program.instructions[*number].bytes > 0)
            .partition(|number| trial.program.leaves_device(trial.program.instructions[*number].action));
        let together = |a: &Span, b: &Span| a.start.max(b.start) < a.end.min(b.end);
        let beside = |number: &&usize| to_device.iter().any(|other| together(&spans[**number], &spans[*other]));
        let found = to_host.iter().filter(beside).count();
        assert!(found >= least, "{found} of {} copies beside one of {}: {way:?}", to_host.len(), to_device.len());
        // Copies in one direction run one after the other.
        for copies in [&to_host, &to_device] {
            assert!(copies.windows(2).all(|pair| spans[pair[0]].end <= spans[pair[1]].start), "{way:?}");
        }
    }
}
