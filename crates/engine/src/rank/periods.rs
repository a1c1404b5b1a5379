//! Freezing by schedule: the period of a step, and the updates made in each.

use super::{Core, Rank};
use crate::precision::LossScaler;
use crate::state::lock;

impl Core {
    pub(super) fn new(scaler: LossScaler) -> Core {
        Core { scaler, updates: 0, averaged: 0, period_updates: Vec::new(), skip_above: None }
    }

    /// Counts an update in `period`.
    pub(super) fn count_update(&mut self, period: Option<u32>) {
        self.updates += 1;
        if let Some(period) = period.map(|period| period as usize) {
            self.period_updates.resize(self.period_updates.len().max(period + 1), 0);
            self.period_updates[period] += 1;
        }
    }
}

impl Rank {
    /// Begins a step of `period`; None if there is no schedule.
    pub(super) fn begin_period(&self, period: Option<u32>) {
        self.parameters.period.set(period);
        self.gradients.period.set(period);
    }

    /// Number of updates made in each period of a schedule of freezing; empty if there is none.
    pub fn period_updates(&self) -> Vec<u64> {
        lock(&self.core).period_updates.clone()
    }
}
