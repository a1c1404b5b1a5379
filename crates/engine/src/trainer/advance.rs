//! The state of a run after a step.

use crate::health::Suspicion;
use crate::rank::{Rank, StepOutcome};
use crate::snapshot::RunState;

impl RunState {
    /// Updates the state after a finished step. Returns what is suspicious about it.
    pub(super) fn advance(
        &mut self,
        outcome: &StepOutcome,
        rank: &Rank,
        samples: u64,
        deviations: f64,
    ) -> Option<Suspicion> {
        self.step += 1;
        self.updates = rank.updates();
        self.averaged = rank.averaged();
        self.period_updates = rank.period_updates();
        self.scaler = rank.scaler();
        self.samples = samples;
        self.tokens += outcome.tokens;
        match outcome.server {
            // Skips are known once all updates are.
            Some(server) if server.is_drained => {
                self.skipped = self.step.saturating_sub(self.updates);
                self.skipped_in_a_row = server.skipped_in_a_row;
                return self.history.add(outcome.loss, outcome.gradient_norm, deviations);
            }
            Some(_) => return None,
            // A replica that has made its steps of the round.
            None if outcome.waits_for_round() => return None,
            None => {}
        }
        self.skipped += u64::from(outcome.skipped);
        // A dynamic loss scale overflows now and then by design, which is no sign of divergence.
        let counts = outcome.skipped && !outcome.spike && !self.scaler.is_dynamic();
        self.skipped_in_a_row = if counts { self.skipped_in_a_row + 1 } else { 0 };
        let is_expected = outcome.skipped && !outcome.spike && self.scaler.is_dynamic();
        if is_expected { None } else { self.history.add(outcome.loss, outcome.gradient_norm, deviations) }
    }
}
