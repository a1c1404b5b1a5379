//! Passes of a given duration, for tests and benchmarks of schedules.
//!
//! A paced rank does all of its work, and then sleeps until its pass has lasted as long as asked.
//! It does not spin, so few cores can run many ranks, and a step takes the time of its schedule and
//! of the engine's own lanes and messages.

use std::time::{Duration, Instant};
use trainyard_program::{Action, BackwardPart, Phase, TurnTimes};

/// The least durations of the passes of every unit.
#[derive(Clone, Debug)]
pub struct Pace(Vec<TurnTimes>);

impl Pace {
    /// The passes of unit `u` last `nanoseconds[u]`; units beyond the end of the list are not
    /// paced. A unit that is split into segments takes this time for each.
    pub fn new(nanoseconds: Vec<TurnTimes>) -> Pace {
        Pace(nanoseconds)
    }

    /// The durations of the passes of every unit, in nanoseconds.
    pub fn nanoseconds(&self) -> &[TurnTimes] {
        &self.0
    }

    /// Sleeps until a pass that began at `began` has lasted long enough. Returns at once after
    /// anything else.
    pub(super) fn hold(&self, action: Action, began: Instant) {
        let Some(duration) = self.of(action) else { return };
        let left = duration.saturating_sub(began.elapsed());
        if !left.is_zero() {
            std::thread::sleep(left);
        }
    }

    fn of(&self, action: Action) -> Option<Duration> {
        let (unit, phase, part) = match action {
            Action::Forward { unit, .. } => (unit, Phase::Forward, BackwardPart::Whole),
            Action::Backward { unit, part, .. } => (unit, Phase::Backward, part),
            _ => return None,
        };
        self.0.get(unit as usize).map(|times| Duration::from_nanos(times.of(phase, part)))
    }
}
