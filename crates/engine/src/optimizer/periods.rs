//! Freezing by schedule: groups of parameters that rest in a step, and the number of updates of
//! each. Moments are corrected for the updates that they have seen (Kingma & Ba 2015, section 3),
//! so a parameter that joins late begins at 1.

use super::{Group, Optimizer, Rates};
use crate::state::lock;

/// The period of the updates that run, and the number of updates made in each period, with these.
#[derive(Default)]
pub(super) struct PeriodUpdates {
    period: Option<usize>,
    made: Vec<u64>,
}

impl Optimizer {
    /// Begins the updates of a step of `period`; `made` are the updates in each period, with it.
    pub(crate) fn begin_updates(&self, period: Option<u32>, made: &[u64]) {
        *lock(&self.periods) = PeriodUpdates { period: period.map(|period| period as usize), made: made.to_vec() };
    }

    /// The rates of a group in an update; None if it rests.
    pub(super) fn rates_of(&self, group: Group, rates: Rates) -> Option<Rates> {
        let PeriodUpdates { period, made } = &*lock(&self.periods);
        let Some(period) = period else { return Some(rates) };
        let taken = made.iter().enumerate().filter(|(number, _)| !group.rests_in.has(*number));
        let update = taken.map(|(_, updates)| *updates).sum::<u64>().max(1);
        (!group.rests_in.has(*period)).then_some(Rates { update, ..rates })
    }
}
