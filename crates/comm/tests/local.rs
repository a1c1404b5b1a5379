//! The conformance suite over threads.

mod conformance;

use conformance::{Case, KINDS, check_as, everything};
use half::bf16;
use proptest::prelude::*;
use std::thread;
use trainyard_comm::{Communicator, local};

/// Runs `body` on a thread for each rank and hands back what they return, in order.
fn on_ranks<R: Send>(ranks: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> =
            local::World::new(ranks).into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn the_suite_holds_for_one_to_five_ranks() {
    for ranks in 1..=5 {
        on_ranks(ranks, |comm| everything(&comm));
    }
}

#[test]
fn the_suite_holds_for_many_more_ranks_than_cores() {
    on_ranks(11, |comm| everything(&comm));
}

fn case() -> impl Strategy<Value = Case> {
    let elements = prop_oneof![0usize..40, 0usize..5000, Just(16_384usize)];
    (0..KINDS.len(), elements, 0usize..16, any::<u64>()).prop_map(|(kind, elements, root, seed)| Case {
        operation: KINDS[kind],
        elements,
        root,
        seed,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any sequence of operations with any counts and roots, on the world and on groups of any
    /// split of it.
    #[test]
    fn any_sequence_on_any_groups(
        ranks in 1usize..7,
        colors in prop::collection::vec((0u32..3, 0u32..5), 7),
        cases in prop::collection::vec((case(), any::<bool>()), 1..12),
    ) {
        on_ranks(ranks, |comm| {
            let (color, key) = colors[comm.rank()];
            let part = comm.split(color, key, "part").unwrap();
            for (case, inside) in &cases {
                let comm = if *inside { &part } else { &comm };
                check_as::<f32>(comm, case);
                check_as::<bf16>(comm, case);
            }
        });
    }
}
