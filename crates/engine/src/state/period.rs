//! The period of a schedule of freezing in which the running step lies.

use super::lock;
use std::sync::Mutex;
use trainyard_model::Periods;

/// The current period; at first there is no schedule.
#[derive(Default)]
pub(crate) struct CurrentPeriod(Mutex<Option<u32>>);

impl CurrentPeriod {
    /// Sets the period of the step that begins.
    pub fn set(&self, period: Option<u32>) {
        *lock(&self.0) = period;
    }

    /// True if what rests in `periods` rests now.
    pub fn is_in(&self, periods: Periods) -> bool {
        !periods.is_empty() && lock(&self.0).is_some_and(|period| periods.has(period as usize))
    }
}
