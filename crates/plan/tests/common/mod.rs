//! Checks that several tests share.

use trainyard_plan::search::{Bound, Simulated};
use trainyard_plan::{Candidate, Pricer};

/// The simulation of `candidate`, after checking that its bounds are not above it. `what` names the
/// request in failures.
pub fn simulated_above_bounds(pricer: &Pricer<'_>, candidate: &Candidate, bound: &Bound, what: &str) -> Simulated {
    let simulated = pricer.simulated(candidate).unwrap_or_else(|| panic!("{what}: {candidate:?}"));
    let Simulated { cost, bytes } = simulated;
    assert!(bound.cost <= cost * (1.0 + 1e-9), "{what}: {} > {cost}: {candidate:?}", bound.cost);
    let closer = pricer.closer_bound(candidate);
    assert!(closer <= cost * (1.0 + 1e-9), "{what}, closer: {closer} > {cost}: {candidate:?}");
    assert!(bound.bytes <= bytes, "{what}: {} > {bytes}: {candidate:?}", bound.bytes);
    simulated
}
