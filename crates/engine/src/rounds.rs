//! Rounds in which slower replicas make fewer inner steps.
//!
//! Replicas that train apart meet at the end of a round. If all make equally many inner steps,
//! the slowest sets the pace. Here replica `r` makes the first `h_r` of the round's steps. Then it
//! waits for the outer step, which weights its change by `h_r` ([`Round::participation`]).

use crate::config::{Apart, InnerSteps};
use crate::rank::Participation;
use serde::{Deserialize, Serialize};
use trainyard_data::RoundSteps;

/// The round that is under way, or that begins with the next step. All ranks have the same numbers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Round {
    /// The number of steps of the run before it.
    pub begin: u64,
    /// The inner steps of each replica, if the round is not cut short.
    pub inner_steps: RoundSteps,
    /// The inner steps that this replica has timed in it.
    #[serde(default)]
    pub timed: TimedSteps,
}

/// Steps and the time that they took.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TimedSteps {
    /// Number of steps.
    pub steps: u64,
    /// Seconds of them together.
    pub seconds: f64,
}

impl TimedSteps {
    /// Adds a step.
    pub(crate) fn add(&mut self, seconds: f64) {
        (self.steps, self.seconds) = (self.steps + 1, self.seconds + seconds);
    }

    /// Seconds of a step; 0 if none was timed.
    pub(crate) fn mean(self) -> f64 {
        self.seconds / self.steps.max(1) as f64
    }
}

impl Round {
    fn new(begin: u64, inner_steps: RoundSteps) -> Round {
        Round { begin, inner_steps, timed: TimedSteps::default() }
    }

    /// The round of a run that begins at step `begin`; None if all replicas make every step.
    pub fn first(begin: u64, asked: &InnerSteps, every: u64, replicas: usize) -> Option<Round> {
        let numbers = match asked {
            InnerSteps::Equal => return None,
            InnerSteps::BySpeed => RoundSteps::equal(replicas, every),
            InnerSteps::Given(numbers) => RoundSteps(numbers.clone()),
        };
        Some(Round::new(begin, numbers))
    }

    /// The round with which a run goes on that is resumed after `step` steps, and true if its
    /// numbers begin anew though those of `stored` had begun. A round that has begun goes on with
    /// its numbers, if there are as many replicas and steps of a round as before.
    pub(crate) fn resumed(
        stored: Option<Round>,
        step: u64,
        is_in_round: bool,
        (apart, asked): (&Apart, &InnerSteps),
        replicas: usize,
    ) -> (Option<Round>, bool) {
        let fits = |round: &Round| {
            let (numbers, end) = (&round.inner_steps, round.begin.saturating_add(apart.every));
            let is_here = if is_in_round { (round.begin..end).contains(&step) } else { round.begin == step };
            let is_whole = numbers.longest() == apart.every && !numbers.0.contains(&0);
            numbers.replicas() == replicas && is_whole && is_here && !apart.streams()
        };
        let anew = || Round::first(step, asked, apart.every, replicas);
        match stored {
            Some(round) if fits(&round) && (is_in_round || *asked == InnerSteps::BySpeed) => (Some(round), false),
            Some(round) => (anew(), is_in_round && !round.inner_steps.are_equal()),
            None => (anew(), false),
        }
    }

    /// The round that follows one that ended after `end` steps of the run. `step_s` has the seconds
    /// of an inner step of each replica; None if one of them has timed none.
    pub(crate) fn next(&self, end: u64, asked: &InnerSteps, every: u64, step_s: Option<&[f64]>) -> Option<Round> {
        match (asked, step_s) {
            (InnerSteps::BySpeed, Some(step_s)) => Some(Round::new(end, by_speed(step_s, every))),
            (InnerSteps::BySpeed, None) => Some(Round::new(end, self.inner_steps.clone())),
            _ => Round::first(end, asked, every, self.inner_steps.replicas()),
        }
    }

    /// The part of `replica` in step `step` of the run, from 0, in which a replica has `tokens`
    /// tokens. The weights are those of a round that ends with the step.
    pub fn participation(&self, replica: usize, step: u64, tokens: u64) -> Participation {
        let in_round = step - self.begin;
        let replicas = self.inner_steps.taking_part(in_round);
        Participation {
            takes_part: self.inner_steps.takes_part(replica, in_round),
            replicas,
            tokens: replicas as u64 * tokens,
            weight: weights(&self.inner_steps.within(in_round + 1))[replica],
        }
    }
}

/// The weights of the replicas' changes in an outer step, whose mean is 1: in proportion to the
/// steps that each has made. With changes `d_r` of `R` replicas that have made `h_r` steps the
/// average is `sum_r (h_r / sum_q h_q) d_r`, as federated averaging weights clients by their
/// samples (McMahan et al. 2017, Algorithm 1).
fn weights(made: &RoundSteps) -> Vec<f64> {
    made.0.iter().map(|steps| (steps * made.replicas() as u64) as f64 / made.parts() as f64).collect()
}

/// The inner steps of replicas whose steps take `step_s` seconds: `every` of the fastest, and as
/// many of the others as take the same time, to the nearest, and at least 1.
fn by_speed(step_s: &[f64], every: u64) -> RoundSteps {
    let fastest = step_s.iter().copied().fold(f64::INFINITY, f64::min);
    let steps = |own: &f64| ((every as f64 * fastest / own).round() as u64).clamp(1, every);
    RoundSteps(step_s.iter().map(steps).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outer::OuterSettings;

    fn numbers(round: Option<Round>) -> Option<Vec<u64>> {
        round.map(|round| round.inner_steps.0)
    }

    #[test]
    fn slower_replicas_make_fewer_steps_and_the_fastest_all() {
        assert_eq!(by_speed(&[0.1, 0.1, 0.2], 16).0, [16, 16, 8]);
        assert_eq!(by_speed(&[0.3, 0.1], 16).0, [5, 16]);
        assert_eq!(by_speed(&[1e-3, 7.0, 1.02e-3], 16).0, [16, 1, 16]);
        assert_eq!(by_speed(&[0.1, 0.4], 1).0, [1, 1]);
    }

    #[test]
    fn weights_are_shares_of_steps() {
        let round = Round::new(10, RoundSteps(vec![4, 1, 3]));
        let weight = |replica: usize, step: u64| round.participation(replica, step, 5).weight;
        assert_eq!([0, 1, 2].map(|replica| weight(replica, 13)), [1.5, 0.375, 1.125]);
        // A round that is cut short counts the steps that were made.
        assert_eq!([0, 1, 2].map(|replica| weight(replica, 11)), [1.2, 0.6, 1.2]);
        assert_eq!([0, 1, 2].map(|replica| weight(replica, 10)), [1.0; 3]);
        let in_step = |step: u64| [0, 1, 2].map(|replica| round.participation(replica, step, 5).takes_part);
        assert_eq!(in_step(10), [true; 3]);
        assert_eq!(in_step(12), [true, false, true]);
        assert_eq!(round.participation(1, 12, 5).tokens, 10);
    }

    #[test]
    fn numbers_are_kept_inside_a_round_and_begin_anew_where_they_do_not_fit() {
        let outer = OuterSettings { learning_rate: 1.0, momentum: 0.0, mixing: None };
        let apart = Apart { every: 4, outer, fragments: 1 };
        let stored =
            || Some(Round { timed: TimedSteps { steps: 2, seconds: 3.0 }, ..Round::new(8, RoundSteps(vec![4, 2])) });
        let resumed = |is_in_round, asked: &InnerSteps, apart: &Apart, replicas| {
            let step = if is_in_round { 10 } else { 8 };
            Round::resumed(stored(), step, is_in_round, (apart, asked), replicas)
        };
        for asked in [InnerSteps::BySpeed, InnerSteps::Equal, InnerSteps::Given(vec![1, 4])] {
            assert_eq!(resumed(true, &asked, &apart, 2), (stored(), false));
        }
        assert_eq!(resumed(false, &InnerSteps::BySpeed, &apart, 2), (stored(), false));
        assert_eq!(resumed(false, &InnerSteps::Equal, &apart, 2), (None, false));
        let given = InnerSteps::Given(vec![1, 4]);
        assert_eq!(numbers(resumed(false, &given, &apart, 2).0), Some(vec![1, 4]));
        // Another number of replicas, or of steps.
        let (round, anew) = resumed(true, &InnerSteps::BySpeed, &apart, 3);
        assert_eq!((round.as_ref().map(|round| round.begin), numbers(round), anew), (Some(10), Some(vec![4; 3]), true));
        let longer = Apart { every: 6, ..apart };
        assert_eq!(numbers(resumed(true, &InnerSteps::BySpeed, &longer, 2).0), Some(vec![6; 2]));
        assert_eq!(resumed(true, &InnerSteps::Equal, &longer, 2), (None, true));
        // A damaged state.
        for (begin, steps) in [(11, vec![4, 2]), (6, vec![4, 2]), (8, vec![4, 0]), (8, vec![])] {
            let stored = Some(Round::new(begin, RoundSteps(steps)));
            let (round, _) = Round::resumed(stored, 10, true, (&apart, &InnerSteps::BySpeed), 2);
            assert_eq!(round, Some(Round::new(10, RoundSteps(vec![4; 2]))));
        }
    }

    #[test]
    fn the_next_round_has_new_numbers_if_all_replicas_were_timed() {
        let round = Round { timed: TimedSteps { steps: 4, seconds: 1.0 }, ..Round::new(0, RoundSteps(vec![4, 2])) };
        let next = round.next(4, &InnerSteps::BySpeed, 4, Some(&[1.0, 4.0])).unwrap();
        assert_eq!(next, Round::new(4, RoundSteps(vec![4, 1])));
        assert_eq!(numbers(round.next(4, &InnerSteps::BySpeed, 4, None)), Some(vec![4, 2]));
        assert_eq!(numbers(round.next(4, &InnerSteps::Given(vec![3, 4]), 4, None)), Some(vec![3, 4]));
        assert_eq!(round.next(4, &InnerSteps::Equal, 4, None), None);
    }
}
