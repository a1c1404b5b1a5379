//! The reports of the ranks when one of them fails: all name the same culprit, within the deadline.

mod departures;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use trainyard_comm::fault::{Action, At, Fault, FaultPlan};
use trainyard_comm::{CommError, Communicator, ErrorKind, Place, Position, local};

/// For tests of deadlines; other tests wait longer, so that a busy machine is no failure.
const DEADLINE: Duration = Duration::from_millis(400);
/// A test that needs longer hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `body` on every rank; what each returned, `None` for those that panicked.
fn outcomes<R: Send>(ranks: usize, body: impl Fn(&Communicator) -> R + Sync) -> Vec<Option<R>> {
    let body = &body;
    let start = Instant::now();
    let outcomes = thread::scope(|scope| {
        let run = |comm: Communicator| {
            comm.set_deadline(PATIENCE);
            catch_unwind(AssertUnwindSafe(move || body(&comm))).ok()
        };
        let threads: Vec<_> = local::World::new(ranks).into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(start.elapsed() < PATIENCE);
    outcomes
}

fn culprits(error: &CommError) -> Vec<u32> {
    error.culprits.iter().map(|peer| peer.rank).collect()
}

/// Large enough for every rank to work in the buffers of the others.
fn large() -> Vec<f32> {
    vec![1.0; 50_000]
}

#[test]
fn a_rank_that_does_not_come_is_named_with_its_position() {
    let errors = outcomes(4, |comm| {
        comm.set_deadline(DEADLINE);
        comm.post(Position { step: 7, instruction: 21 + comm.rank() as u32, what: "Reduce block 3".into() });
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            // Waits as a hanging rank would, and then learns that the others gave up on it.
            while comm.failure().is_none() {
                thread::sleep(Duration::from_millis(1));
            }
        }
        comm.all_reduce(&mut large()).unwrap_err()
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(culprits(&error), [2]);
        assert_eq!(error.kind, ErrorKind::Deadline { waited: DEADLINE });
        let (position, since) = error.culprits[0].position.clone().unwrap();
        assert_eq!((position.step, position.instruction), (7, 23));
        assert!(since >= DEADLINE);
        let text = error.to_string();
        let host = Place::here(0).host;
        for part in
            ["all_reduce 1 on `world`", "within 0.4 s", "rank 2", &host, "step 7, instruction 23 (Reduce block 3)"]
        {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
    }
}

#[test]
fn a_panic_an_abort_and_a_departure_are_told_at_once() {
    departures::are_told_at_once(|body| outcomes(3, body), PATIENCE);
}

#[test]
fn leaving_after_the_last_operation_is_no_failure() {
    for _ in 0..200 {
        let results = outcomes(3, |comm| comm.all_reduce(&mut [1.0f32]).and_then(|()| comm.barrier()));
        assert!(results.into_iter().all(|result| result.unwrap().is_ok()));
    }
}

#[test]
fn a_mismatch_shows_both_sides() {
    type Body = fn(&Communicator) -> Result<(), CommError>;
    let cases: [(Body, &[&str]); 4] = [
        (
            |comm| if comm.rank() == 1 { comm.barrier() } else { comm.all_reduce(&mut [0f32; 3]) },
            &["all_reduce of 3 f32", "barrier"],
        ),
        (|comm| comm.all_reduce(&mut vec![0f32; 30_000 + comm.rank() / 2]), &["all_reduce of 30000 f32", "30001 f32"]),
        (|comm| comm.broadcast(&mut [0i32; 2], comm.rank()), &["with root 0", "with root 1"]),
        (
            |comm| {
                if comm.rank() == 0 { comm.all_reduce(&mut [0i32; 5]) } else { comm.all_reduce(&mut [0f32; 5]) }
            },
            &["all_reduce of 5 f32", "all_reduce of 5 i32"],
        ),
    ];
    for (body, parts) in cases {
        for outcome in outcomes(3, body) {
            let error = outcome.unwrap().unwrap_err();
            assert!(matches!(error.kind, ErrorKind::Mismatch { .. }), "{error}");
            assert!(parts.iter().all(|part| error.to_string().contains(part)), "{error}");
        }
    }
}

#[test]
fn messages_have_deadlines_and_lengths_too() {
    let errors = outcomes(2, |comm| {
        comm.set_deadline(DEADLINE);
        let error = (comm.rank() == 0).then(|| comm.recv(&mut [0f32; 4], 1).unwrap_err());
        // Rank 1 stays until rank 0 has given up on it.
        while comm.failure().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        error
    });
    let error = errors[0].clone().unwrap().unwrap();
    assert_eq!((&error.kind, culprits(&error)), (&ErrorKind::Deadline { waited: DEADLINE }, vec![1]));

    let errors = outcomes(2, |comm| (comm.rank() == 0).then(|| comm.send(&[0f32; 4], 1).unwrap_err()));
    assert_eq!(errors[0].clone().unwrap().unwrap().kind, ErrorKind::Left);

    let errors = outcomes(2, |comm| {
        if comm.rank() == 0 { comm.send(&[1f32; 5], 1).unwrap_err() } else { comm.recv(&mut [0f32; 4], 0).unwrap_err() }
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(error.kind, ErrorKind::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("receive of 16") && error.to_string().contains("send of 20"), "{error}");
    }
}

#[test]
fn bad_arguments_are_errors_for_everybody() {
    type Body = fn(&Communicator) -> Result<(), CommError>;
    let cases: [(Body, &str); 9] = [
        (|comm| comm.reduce_scatter_in_place(&mut [0f32; 4]), "4 elements cannot be shared by 3 ranks"),
        (|comm| comm.reduce_scatter(&[0f32; 7], &mut [0f32; 2]), "the longer buffer has 7 elements"),
        (|comm| comm.all_gather(&[0f32; 2], &mut [0f32; 5]), "the longer buffer has 5 elements"),
        (|comm| comm.broadcast(&mut [0f32; 2], 3), "rank 3 does not exist: the group has ranks 0 to 2"),
        (|comm| comm.send(&[0f32; 2], comm.rank()), "cannot send to or from itself alone"),
        (|comm| comm.all_to_all(&[0f32; 3], &mut [0f32; 6]), "the longer buffer has 6 elements"),
        (
            |comm| comm.all_to_all_uneven(&[0f32; 3], &[2, 1], &mut [0f32; 3], &[1, 1, 1]),
            "the input buffer has 3 elements, and the counts of its parts are [2, 1]: give one for each of the 3 ranks",
        ),
        (
            |comm| comm.all_to_all_uneven(&[0f32; 3], &[1; 3], &mut [0f32; 4], &[1; 3]),
            "the output buffer has 4 elements, and the counts of its parts are [1, 1, 1]",
        ),
        (
            |comm| {
                let (mut sends, mut receives) = ([1; 3], [1; 3]);
                (sends[comm.rank()], receives[comm.rank()]) = (2, 3);
                comm.all_to_all_uneven(&[0f32; 4], &sends, &mut [0f32; 5], &receives)
            },
            "sends 2 elements to itself and expects 3",
        ),
    ];
    for (body, what) in cases {
        // Rank 2 does it right and waits; the others' mistake reaches it.
        let outcome = outcomes(3, |comm| if comm.rank() == 2 { comm.barrier() } else { body(comm) });
        for error in outcome {
            let error = error.unwrap().unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
    }
}

/// Every kind of data that changes on its way is noticed when verifying, and its sender named.
#[test]
fn corruption_is_noticed_and_named() {
    type Body = fn(&Communicator, usize) -> Result<(), CommError>;
    let bodies: [Body; 7] = [
        |comm, n| comm.all_reduce(&mut vec![1f32; n]),
        |comm, n| comm.reduce_scatter(&vec![1f32; 3 * n], &mut vec![0f32; n]),
        |comm, n| comm.all_gather(&vec![1f32; n], &mut vec![0f32; 3 * n]),
        |comm, n| comm.broadcast(&mut vec![1f32; n], 1),
        |comm, n| comm.gather(&vec![1f32; n], &mut vec![0f32; 3 * n], 0),
        |comm, n| comm.all_to_all(&vec![1f32; 3 * n], &mut vec![0f32; 3 * n]),
        |comm, n| comm.exchange(&vec![1f32; n], (comm.rank() + 1) % 3, &mut vec![0f32; n], (comm.rank() + 2) % 3),
    ];
    for body in bodies {
        for elements in [10, 20_000] {
            let at = At::Operation { group: "world".into(), number: 1 };
            let plan = Arc::new(FaultPlan::new([Fault { rank: 1, at, action: Action::Corrupt }]));
            let outcome = outcomes(3, |comm| {
                comm.set_verify(true);
                comm.inject(plan.clone());
                body(comm, elements).unwrap();
                // A rank that is done before the bad data is noticed hears of it at its next
                // operation.
                body(comm, elements).and_then(|()| comm.barrier())
            });
            for error in outcome {
                let error = error.unwrap().unwrap_err();
                assert_eq!((&error.kind, culprits(&error)), (&ErrorKind::Corrupt, vec![1]), "{error}");
            }
        }
    }
}

/// Faults drawn from seeds strike a sequence of operations on several groups; whatever happens,
/// everybody who lives ends with the same report or with right results.
#[test]
fn a_hundred_seeded_faults_are_named_correctly() {
    seeded_faults("seeded faults", |lane, long| {
        let mut sum = vec![1f32; if long { 30_000 } else { 100 }];
        lane.all_reduce(&mut sum)?;
        assert!(sum.iter().all(|&value| value == RANKS as f32));
        lane.all_gather_in_place(&mut sum[..99])?;
        lane.barrier()
    });
}

/// Every part has elements, so each of the two rounds is one operation.
#[test]
fn seeded_faults_among_parts_of_any_length_are_named_correctly() {
    seeded_faults("seeded faults of uneven parts", |lane, long| {
        let counts = |of: usize| (0..RANKS).map(|other| if long { 9000 } else { 3 } + of + other).collect::<Vec<_>>();
        let sends = counts(lane.rank());
        let elements: usize = sends.iter().sum();
        let mut arrived = vec![0f32; elements];
        lane.all_to_all_uneven(&vec![lane.rank() as f32; elements], &sends, &mut arrived, &sends)?;
        let expected = (0..RANKS).flat_map(|from| vec![from as f32; sends[from]]);
        assert!(arrived.into_iter().eq(expected));
        lane.barrier()
    });
}

/// Parts of other lengths than their receivers expect are a mismatch for everybody.
#[test]
fn uneven_parts_of_wrong_lengths_are_a_mismatch() {
    let errors = outcomes(3, |comm| {
        let receives = if comm.rank() == 1 { [4, 4, 5] } else { [4, 4, 4] };
        let mut arrived = vec![0f32; receives.iter().sum()];
        comm.all_to_all_uneven(&[0f32; 12], &[4; 3], &mut arrived, &receives).and_then(|()| comm.barrier())
    });
    for error in errors {
        let error = error.unwrap().unwrap_err();
        assert!(matches!(error.kind, ErrorKind::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("receive of 20") && error.to_string().contains("send of 16"), "{error}");
    }
}

const RANKS: usize = 3;

/// Lets three ranks run `operations`, three of them, four times under each of some seeded faults.
/// The last operation is a barrier.
fn seeded_faults(what: &str, operations: impl Fn(&Communicator, bool) -> Result<(), CommError> + Sync) {
    for seed in 0..trainyard_testing::cases(what, 30, 100) {
        let fault = Fault::seeded(seed, RANKS as u32, "lane", 12);
        let plan = Arc::new(FaultPlan::new([fault.clone()]));
        let outcome = outcomes(RANKS, |comm| {
            comm.set_verify(true);
            comm.inject(plan.clone());
            comm.set_deadline(if fault.action == Action::Hang { DEADLINE } else { PATIENCE });
            let lane = comm.duplicate("lane")?;
            for step in 0..4 {
                lane.post(Position { step, instruction: 5, what: "Reduce head".into() });
                operations(&lane, seed % 2 == 1)?;
                comm.barrier()?;
            }
            Ok(())
        });
        for (rank, outcome) in outcome.into_iter().enumerate() {
            let Some(result) = outcome else {
                assert_eq!((fault.action, fault.rank), (Action::Kill, rank as u32), "{fault}");
                continue;
            };
            let is_barrier = matches!(&fault.at, At::Operation { number, .. } if number % 3 == 2);
            match (fault.action, result) {
                (Action::Delay(_), Ok(())) => {}
                // A barrier carries nothing that could be corrupted.
                (Action::Corrupt, Ok(())) if is_barrier => {}
                (action, Err(error)) => {
                    assert_eq!(culprits(&error), [fault.rank], "{fault}: {error}");
                    let expected = match action {
                        Action::Kill => error.kind == ErrorKind::Panicked,
                        Action::Hang => matches!(error.kind, ErrorKind::Deadline { .. }),
                        Action::Corrupt => error.kind == ErrorKind::Corrupt,
                        Action::Refuse => error.kind == ErrorKind::Refused,
                        Action::Delay(_) => false,
                    };
                    assert!(expected, "{fault}: {error}");
                }
                (_, Ok(())) => panic!("rank {rank} did not notice: {fault}"),
            }
        }
    }
}

/// A rank that gives up while others are still at work in its buffer returns only when they are
/// done.
#[test]
fn buffers_outlive_their_readers() {
    for round in 0..200u64 {
        let sums = outcomes(3, |comm| {
            let mut data = vec![1f32; 60_000];
            if comm.rank() == 0 && round % 2 == 0 {
                thread::sleep(Duration::from_micros(round * 3));
                comm.abort("in the middle");
            }
            let result = comm.all_reduce(&mut data);
            // The memory is ours again: what we write stays.
            data.fill(round as f32);
            thread::yield_now();
            assert!(data.iter().all(|&value| value == round as f32));
            result.is_ok()
        });
        assert!(round % 2 == 0 || sums.iter().all(|sum| *sum == Some(true)));
    }
}
