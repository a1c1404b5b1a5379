//! The report of a rank that panics, gives up or leaves: the same over every backend whose ranks a
//! test can run as threads.

use std::time::{Duration, Instant};
use trainyard_comm::{CommError, Communicator, ErrorKind};

/// The part of a rank, which returns the error that it was told.
pub type Body<'a> = &'a (dyn Fn(&Communicator) -> Option<CommError> + Sync);

/// Holds `outcomes`, which runs a body on three ranks and gives `None` for those that panicked, to
/// what survivors have to hear of rank 1 within `patience`.
pub fn are_told_at_once(outcomes: impl Fn(Body<'_>) -> Vec<Option<Option<CommError>>>, patience: Duration) {
    let start = Instant::now();
    let run = |leave: fn(&Communicator)| {
        outcomes(&|comm| {
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                leave(comm);
                return None;
            }
            // Large enough to be lent, so that it is under way or waits for a receiver when the
            // news come.
            comm.all_reduce(&mut vec![1f32; 100_000]).err()
        })
    };
    let panicked = run(|_| panic!("for the test"));
    let aborted = run(|comm| drop(comm.abort("out of memory")));
    let gave_up = run(|comm| drop(comm.give_up("the disk is full")));
    let left = run(|_| ());
    for (outcome, kind) in [
        (panicked, ErrorKind::Panicked),
        (aborted, ErrorKind::Aborted { reason: "out of memory".into(), lasting: false }),
        (gave_up, ErrorKind::Aborted { reason: "the disk is full".into(), lasting: true }),
        (left, ErrorKind::Left),
    ] {
        for rank in [0, 2] {
            let error = outcome[rank].clone().unwrap().unwrap();
            let culprits: Vec<u32> = error.culprits.iter().map(|peer| peer.rank).collect();
            assert_eq!((&error.kind, culprits), (&kind, vec![1]));
        }
    }
    assert!(start.elapsed() < patience, "nobody waited for a deadline");
}
