//! Tests of the parameter server: its bits, its bound of staleness, and its refusals.

#[path = "common/train.rs"]
mod common;

use common::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use trainyard_comm::local;
use trainyard_engine::EngineError;
use trainyard_engine::faults::{Faults, Hang};
use trainyard_engine::world::run;
use trainyard_model::Model;
use trainyard_tensor::Device;

/// The outcome of every step on rank 0.
fn told(ends: &[End]) -> Vec<(f64, f64, u64, u64, bool)> {
    let of = |outcome: &trainyard_engine::rank::StepOutcome| {
        (outcome.loss, outcome.gradient_norm, outcome.tokens, outcome.targets, outcome.skipped)
    };
    ends[0].outcomes.iter().map(of).collect()
}

/// A staleness of 0 is synchronous training: the same losses, norms and masters, for every number
/// of workers and servers, on rows with equally many targets and without, with the predicted
/// memory.
#[test]
fn a_staleness_of_zero_trains_the_bits_of_synchronous_steps() {
    for (layout, servers) in [
        (&["parallel.ranks=2", "precision.compute='f32'"][..], &[1, 2][..]),
        (&["parallel.ranks=2", "precision.compute='bf16'", "training.accumulation_steps=2"], &[1, 2]),
        (&["parallel.ranks=4", "precision.compute='f32'", "optimizer.name='lion'"], &[1, 2, 4]),
        (&["parallel.ranks=2", "precision.compute='f32'", "optimizer.state_bits=8"], &[1, 2]),
        (&["parallel.ranks=8", "precision.compute='bf16'", "model.tie_embeddings=true"], &[4]),
    ] {
        for rows in [batch as Rows, documents] {
            let synchronous = train_on(rows, layout, 6);
            for servers in servers {
                let servers = format!("update.servers={servers}");
                let sets = [layout, &["update.rule='server'", &servers]].concat();
                let ends = train_on(rows, &sets, 6);
                assert_eq!(told(&ends), told(&synchronous), "{sets:?}");
                assert_eq!(losses(&ends), losses(&synchronous), "{sets:?}");
                assert!(weights(&ends) == weights(&synchronous), "{sets:?}");
                ends.iter().for_each(|end| check_memory(end, &sets));
                let pulls = ends[0].outcomes.iter().flat_map(|outcome| outcome.staleness.clone().unwrap());
                assert!(pulls.count() == 6 && ends[0].outcomes[5].staleness.as_ref().unwrap()[0] > 0, "{sets:?}");
            }
        }
    }
}

/// Where all workers have all updates after every step, a bound above 0 changes nothing but the
/// count of targets, which workers then do not exchange. With equally many targets no bit changes;
/// otherwise servers weigh gradients, and the result is the same to rounding.
#[test]
fn servers_weigh_the_gradients_of_workers_with_other_numbers_of_targets() {
    let layout = &["parallel.ranks=4", "precision.compute='f32'", "optimizer.name='sgd'", "optimizer.momentum=0"][..];
    let sets = [layout, &["update.rule='server'", "update.staleness=3", "update.every=1"]].concat();
    let (equal, ends) = (train(layout, 6), train(&sets, 6));
    assert_eq!((told(&ends), weights(&ends)), (told(&equal), weights(&equal)));
    let (uneven, ends) = (train_on(documents, layout, 6), train_on(documents, &sets, 6));
    for (ours, theirs) in losses(&ends).into_iter().zip(losses(&uneven)) {
        assert!((ours - theirs).abs() <= 1e-6 * theirs, "{ours} and {theirs}");
    }
    let start = weights(&train_on(documents, layout, 1));
    let distance = |ours: &[Vec<u32>], theirs: &[Vec<u32>]| {
        let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
        pairs.map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs()).fold(0.0, f32::max)
    };
    let (error, moved) = (distance(&weights(&ends), &weights(&uneven)), distance(&start, &weights(&uneven)));
    assert!(error < 1e-6 && moved > 1e3 * error, "{error:e}, moved by {moved:e}");
    ends.iter().for_each(|end| check_memory(end, &sets));
}

/// Worker 1 does not begin its first step before worker 0 has begun step `staleness`, which must
/// therefore be possible. No worker begins step c before the other has begun c - staleness steps,
/// whatever the speed of the threads.
#[test]
fn a_worker_is_ahead_of_another_by_the_bound_and_no_more() {
    const STALENESS: u64 = 3;
    const STEPS: u64 = 12;
    let resolved = resolved(&["parallel.ranks=2", "update.rule='server'", "update.staleness=3", "update.every=40"]);
    let begun = [AtomicU64::new(0), AtomicU64::new(0)];
    let load = |device: &Device, model: &Model, step: u64, first: usize, count: usize| -> Result<_, EngineError> {
        let rank = usize::from(first > 0);
        begun[rank].store(step + 1, Ordering::SeqCst);
        let other = begun[1 - rank].load(Ordering::SeqCst);
        // The updates of step - STALENESS steps are there, so the other has committed as many.
        assert!(other >= step.saturating_sub(STALENESS), "worker {rank} in step {step}, the other has begun {other}");
        let waits = Instant::now();
        while rank == 1 && step == 0 && begun[0].load(Ordering::SeqCst) <= STALENESS {
            assert!(waits.elapsed() < Duration::from_secs(60), "worker 0 is not allowed to be ahead");
            std::thread::yield_now();
        }
        Ok(batch(device, model, step, first, count))
    };
    let ends: Vec<End> = std::thread::scope(|scope| {
        let (resolved, load) = (&resolved, &load);
        let ranks = local::World::new(2).into_iter().map(|world| {
            let train = move |world| train_rank_with(resolved, world, STEPS, load, |_| Faults::new([], Hang::ForEver));
            scope.spawn(move || run(world, train).unwrap())
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let mut pulls = vec![0; STALENESS as usize + 1];
    for end in &ends {
        for outcome in &end.outcomes {
            let of_step = outcome.staleness.as_ref().expect("both ranks host a server");
            assert_eq!(of_step.len(), pulls.len(), "no pull lacks more updates than the bound");
            pulls.iter_mut().zip(of_step).for_each(|(sum, pulls)| *sum += pulls);
        }
        check_memory(end, &[]);
    }
    let units = ends[0].program.units.len() as u64;
    // Worker 0 pulled for step STALENESS when no update could be made.
    assert!(pulls[STALENESS as usize] >= units, "{pulls:?}");
    // The last pulls of another rank may come after a server's last step.
    let all = 2 * 2 * units * STEPS;
    assert!(pulls.iter().sum::<u64>() <= all && pulls.iter().sum::<u64>() >= all - 2 * units, "{pulls:?} of {all}");
    // Both end with all updates.
    let last = |end: &End| (end.outcomes[11].loss, end.outcomes[11].gradient_norm);
    assert_eq!(last(&ends[0]), last(&ends[1]));
    let server = ends[0].outcomes[11].server.expect("the bound is above 0");
    assert!(server.is_drained && server.skipped_in_a_row == 0);
    assert!(ends[0].outcomes[..11].iter().all(|outcome| !outcome.server.unwrap().is_drained));
}

/// Worker 2 does not begin its first step before worker 0 is in its last one. So the updates are
/// those of workers 0 and 1 alone, and two gradients in each are counted as dropped: that of the
/// first step came too late, and the worker left the others out.
#[test]
fn updates_do_not_wait_for_back_up_workers() {
    const STEPS: u64 = 9;
    let base = ["update.rule='server'", "precision.compute='f32'", "optimizer.name='sgd'", "optimizer.momentum=0"];
    let two = train(&[&base[..], &["parallel.ranks=2", "training.global_batch_size=4"]].concat(), STEPS);
    for servers in ["update.servers=1", "update.servers=3"] {
        let three =
            ["parallel.ranks=3", "training.global_batch_size=6", "update.backup_workers=1", "update.every=40", servers];
        let resolved = resolved(&[&base[..], &three].concat());
        let begun = AtomicU64::new(0);
        let rows = resolved.batch.micro * resolved.batch.accumulation;
        let load = |device: &Device, model: &Model, step: u64, first: usize, count: usize| -> Result<_, EngineError> {
            if first < rows {
                begun.store(step + 1, Ordering::SeqCst);
            }
            let waits = Instant::now();
            while first >= 2 * rows && begun.load(Ordering::SeqCst) < STEPS {
                assert!(waits.elapsed() < Duration::from_secs(60), "an update waits for worker 2");
                std::thread::yield_now();
            }
            Ok(batch(device, model, step, first, count))
        };
        let ends: Vec<End> = std::thread::scope(|scope| {
            let (resolved, load) = (&resolved, &load);
            let ranks = local::World::new(3).into_iter().map(|world| {
                let train =
                    move |world| train_rank_with(resolved, world, STEPS, load, |_| Faults::new([], Hang::ForEver));
                scope.spawn(move || run(world, train).unwrap())
            });
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let expected = losses(&two);
        let of_updates = ends[0].outcomes[..STEPS as usize - 1].iter().map(|outcome| outcome.loss);
        for (step, (ours, theirs)) in of_updates.zip(&expected).enumerate() {
            assert!((ours - theirs).abs() <= 1e-5 * theirs, "{servers}, step {step}: {ours} and {theirs}");
        }
        let dropped: u64 = ends[0].outcomes.iter().filter_map(|outcome| outcome.dropped_pushes).sum();
        assert!((STEPS - 1..=STEPS).contains(&dropped), "{servers}: {dropped}");
        let late = |end: &End| end.outcomes.iter().filter(|outcome| outcome.late).count() as u64;
        assert!(late(&ends[0]) + late(&ends[1]) == 0 && late(&ends[2]) >= STEPS - 2, "{servers}: {}", late(&ends[2]));
        let tokens: Vec<u64> = ends[2].outcomes.iter().map(|outcome| outcome.tokens).collect();
        assert!(tokens.iter().all(|count| *count == ends[0].outcomes[0].tokens), "samples of late steps count as seen");
        let last: Vec<f64> = ends.iter().map(|end| end.outcomes[STEPS as usize - 1].loss).collect();
        assert!(last.iter().all(|loss| *loss == last[0]), "{last:?}");
        ends.iter().for_each(|end| check_memory(end, &[servers]));
    }
}

/// Random delays at instructions of all ranks, with every number of back-up workers: each update
/// takes as many gradients as it must, all ranks end with the same loss, and memory is what is
/// predicted.
#[test]
fn late_instructions_with_back_up_workers_change_no_memory() {
    for (backups, servers, seed) in [(1, 1, 1), (1, 3, 2), (2, 3, 3)] {
        let (backup_set, servers) = (format!("update.backup_workers={backups}"), format!("update.servers={servers}"));
        let sets = [
            "parallel.ranks=3",
            "training.global_batch_size=6",
            "update.rule='server'",
            &backup_set,
            &servers,
            "update.every=6",
        ];
        let ends = train_late(&sets, 12, seed);
        ends.iter().for_each(|end| check_memory(end, &sets));
        let dropped: u64 = ends[0].outcomes.iter().filter_map(|outcome| outcome.dropped_pushes).sum();
        assert!(dropped <= 12 * backups, "{sets:?}: {dropped} dropped");
        let last: Vec<f64> = ends.iter().map(|end| end.outcomes[11].loss).collect();
        assert!(last.iter().all(|loss| *loss == last[0] && loss.is_finite()), "{last:?}");
    }
}

/// Worker 1 stops before its second step. Worker 0 goes on as far as it may; then its pull names
/// worker 1.
#[test]
fn a_pull_that_waits_beyond_the_deadline_names_the_worker_that_has_not_committed() {
    let resolved = resolved(&["parallel.ranks=2", "update.rule='server'", "update.staleness=1", "update.every=40"]);
    let ended = AtomicU64::new(0);
    let load = |device: &Device, model: &Model, step: u64, first: usize, count: usize| -> Result<_, EngineError> {
        if first > 0 && step == 1 {
            while ended.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return Err(EngineError::DoesNotFit("worker 1 has stopped".to_owned()));
        }
        Ok(batch(device, model, step, first, count))
    };
    let errors: Vec<String> = std::thread::scope(|scope| {
        let (resolved, load, ended) = (&resolved, &load, &ended);
        let ranks = local::World::new(2).into_iter().map(|world| {
            world.set_deadline(Duration::from_secs(3));
            let train = move |world| train_rank_with(resolved, world, 9, load, |_| Faults::new([], Hang::ForEver));
            scope.spawn(move || {
                let failed = run(world, train).err().expect("the run ends").to_string();
                ended.store(1, Ordering::SeqCst);
                failed
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let named =
        errors[0].contains("rank 0 in step 2 at `pull ") && errors[0].contains("no arrival within 3.0 s of rank 1");
    assert!(named, "{errors:?}");
}

/// Random delays at instructions of all ranks: the bound holds, and memory is what is predicted.
#[test]
fn late_instructions_change_no_bound_and_no_memory() {
    for (servers, seed) in [("update.servers=3", 1), ("update.servers=1", 2)] {
        let sets =
            ["parallel.ranks=3", "training.global_batch_size=6", "update.rule='server'", "update.staleness=2", servers];
        let ends = train_late(&sets, 8, seed);
        for end in &ends {
            let lacked = end.outcomes.iter().flat_map(|outcome| outcome.staleness.iter());
            lacked.for_each(|pulls| assert_eq!(pulls.len(), 3, "{sets:?}"));
            check_memory(end, &sets);
        }
        let last: Vec<f64> = ends.iter().map(|end| end.outcomes[7].loss).collect();
        assert!(last.iter().all(|loss| *loss == last[0] && loss.is_finite()), "{last:?}");
    }
}

#[test]
fn settings_that_do_not_go_with_a_parameter_server_are_refused() {
    let (two, server) = ("parallel.ranks=2", "update.rule='server'");
    let cases: [(&[&str], &str); 21] = [
        (&[server], "each rank is a worker"),
        (&[two, "update.servers=1"], "update.rule is \"synchronous\""),
        (&[two, "update.rule='diloco'", "update.staleness=1"], "update.rule is \"diloco\""),
        (&[two, server, "update.servers=3"], "update.servers"),
        (&["parallel.ranks=4", server, "update.servers=3"], "use a number that divides 4"),
        (&[two, server, "update.servers=0"], "at least 1"),
        (&[two, server, "update.staleness=2000"], "update.staleness"),
        (&[two, server, "update.every=10"], "update.staleness is 0"),
        (&[two, server, "update.backup_workers=2"], "update.backup_workers"),
        (&[two, server, "update.backup_workers=1", "update.staleness=1"], "set one of them to 0"),
        (&[two, "update.backup_workers=1"], "update.rule is \"synchronous\""),
        (&[two, server, "update.outer_momentum=0.9"], "update.rule is \"server\""),
        (&[two, server, "precision.compute='f16'"], "precision.compute = \"f32\" or \"bf16\""),
        (&[two, server, "memory.offload.optimizer='disk'"], "no memory.offload"),
        (&[two, server, "compression.gradients='int8'"], "no compression"),
        (&[two, server, "parallel.data_parallel_shard_degree=2"], "servers divide the state by themselves"),
        (&["parallel.ranks=4", server, "parallel.tensor_parallel_degree=2"], "tensor_parallel_degree = 1"),
        (&[two, server, "optimizer.name='muon'"], "parts of matrices"),
        (&[two, server, "averaging.kind='ema'"], "ranks have different ones"),
        (&[two, server, "health.on_spike='skip'"], "health.on_spike = \"warn\""),
        (&[two, server, "training.elastic_bits=true"], "elastic_bits"),
    ];
    for (sets, expected) in cases {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let error = resolve(&sets).unwrap_err().to_string();
        assert!(error.contains(expected), "{sets:?}: {error}");
    }
}
