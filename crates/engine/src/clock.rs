//! The clock of a run: how long it has trained, and how long its schedule is.

use crate::config::Limits;
use crate::metrics::TimeLeft;
use crate::schedule::Schedule;
use crate::snapshot::RunState;
use std::time::Instant;

/// Number of steps that a run with only a time limit makes before it computes the length of its
/// schedule from their speed.
const STEPS_TO_CALIBRATE: u64 = 20;

/// Time and the schedule.
pub(crate) struct Clock {
    pub(crate) schedule: Schedule,
    /// The last step of the run, once known.
    pub(crate) steps: Option<u64>,
    pub(crate) limits: Limits,
    pub(crate) left: TimeLeft,
    pub(crate) began: Instant,
    /// Seconds of training in earlier sittings.
    pub(crate) before: f64,
    pub(crate) last_step_end: Instant,
    /// The steps and seconds of the run since which its speed counts; None until then. A round in
    /// which slower replicas have not yet got fewer steps says nothing about the others.
    pub(crate) speed_since: Option<(u64, f64)>,
}

impl Clock {
    /// Seconds of training over all sittings.
    pub(crate) fn elapsed(&self) -> f64 {
        self.before + self.began.elapsed().as_secs_f64()
    }

    /// Computes the length of the schedule from the speed of the first steps that count, for a run
    /// with only a time limit.
    pub(crate) fn calibrate(&mut self, state: &mut RunState) {
        let step = state.step;
        let (None, Some(seconds)) = (self.steps, self.limits.seconds) else { return };
        let Some(since) = self.speed_since else { return };
        if step - since.0 < STEPS_TO_CALIBRATE.max(self.schedule.warmup_steps.min(4 * STEPS_TO_CALIBRATE)) {
            return;
        }
        let steps = length(seconds, since, (step, self.elapsed()));
        (state.schedule_steps, state.schedule_seconds) = (Some(steps), Some(seconds));
        self.schedule.steps = Some(steps);
        self.steps = Some(steps);
        self.left.set_steps(steps);
    }
}

/// The steps of a run of `seconds`, whose speed is that from `since` to `now`, each the steps and
/// seconds of the run: at least one more than now.
fn length(seconds: f64, since: (u64, f64), now: (u64, f64)) -> u64 {
    let per_step = (now.1 - since.1) / (now.0 - since.0) as f64;
    (since.0 + ((seconds - since.1) / per_step) as u64).max(now.0 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_follows_from_the_speed_that_counts() {
        assert_eq!(length(60.0, (0, 0.0), (20, 10.0)), 120);
        // A first round of 16 steps took 8 s; the steps after it take 0.25 s.
        assert_eq!(length(60.0, (16, 8.0), (48, 16.0)), 16 + 4 * 52);
        assert_eq!(length(60.0, (16, 8.0), (48, 70.0)), 49);
        assert_eq!(length(5.0, (16, 8.0), (48, 16.0)), 49);
    }
}
