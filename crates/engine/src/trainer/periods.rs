//! Freezing by schedule: the period of a step, and the begin of a period.

use super::Run;
use crate::health::History;
use crate::periods::{Period, at};
use crate::session::Session;

impl Session {
    /// The period of step `step`, from 0.
    pub(super) fn period(&self, step: u64) -> Period {
        self.periods[at(&self.periods, step)]
    }

    /// Number of parameters that step `step` trains; None without a schedule.
    pub(super) fn trained_parameters(&self, step: u64) -> Option<u64> {
        (self.periods.len() > 1).then(|| self.period(step).trained_parameters)
    }
}

impl Run<'_> {
    /// Tells of a period that begins with the next step. Norms of other parameters are no measure
    /// for those that follow, so no spike is sought before there are new ones.
    pub(super) fn begin_period(&mut self) {
        let step = self.session.state.step;
        let period = self.session.period(step);
        if step > 0 && period.from_step == step {
            self.session.state.history = History::default();
            self.progress
                .note(&format!("step {step}: from here on {} parameters are trained", period.trained_parameters));
        }
    }
}
