//! The messages between workers and servers.
//!
//! A worker sends a request of four words, and what the request announces: its part of a gradient,
//! or the numbers of a commit. A server answers a pull with its version, and its part of the unit.

use crate::Result;
use crate::state::does_not_fit;

/// A worker's request to a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Request {
    /// The server's part of a unit's gradient follows.
    Push { clock: u64, unit: usize },
    /// The step is complete; its numbers follow.
    Commit { clock: u64, numbers: usize },
    /// Asks for the server's part of a unit's parameters, no older than `oldest`, for `clock`.
    Pull { clock: u64, unit: usize, oldest: u64 },
    /// This worker has no more requests.
    Leave,
}

impl Request {
    pub fn encode(self) -> [u64; 4] {
        match self {
            Request::Push { clock, unit } => [0, clock, unit as u64, 0],
            Request::Commit { clock, numbers } => [1, clock, numbers as u64, 0],
            Request::Pull { clock, unit, oldest } => [2, clock, unit as u64, oldest],
            Request::Leave => [3, 0, 0, 0],
        }
    }

    pub fn decode(words: [u64; 4]) -> Result<Request> {
        match words {
            [0, clock, unit, 0] => Ok(Request::Push { clock, unit: unit as usize }),
            [1, clock, numbers, 0] if numbers <= Commit::NUMBERS_MAX => {
                Ok(Request::Commit { clock, numbers: numbers as usize })
            }
            [2, clock, unit, oldest] => Ok(Request::Pull { clock, unit: unit as usize, oldest }),
            [3, 0, 0, 0] => Ok(Request::Leave),
            _ => Err(does_not_fit(format!("a parameter server cannot read the request {words:?}"))),
        }
    }
}

/// A worker's numbers of a step.
#[derive(Clone, PartialEq, Debug)]
pub struct Commit {
    /// The step, from 0 at the start of the sitting.
    pub clock: u64,
    /// Number of targets of the worker's micro-batches.
    pub targets: u64,
    /// The number by which the worker has divided its losses, and with them its gradients.
    pub divisor: u64,
    /// The learning rate of the step as a share of its peak.
    pub rate_factor: f64,
    /// The maximum gradient norm of the step.
    pub clip_norm: Option<f64>,
    /// Number of updates that the run had made before this sitting.
    pub updates_before: u64,
    /// The sum of the losses of each micro-batch, divided by `divisor`.
    pub losses: Vec<f64>,
}

impl Commit {
    /// The most numbers of a commit.
    const NUMBERS_MAX: u64 = 1 << 20;

    pub(super) fn numbers(&self) -> Vec<f64> {
        let Commit { targets, divisor, rate_factor, clip_norm, updates_before, .. } = *self;
        let clip_norm = clip_norm.unwrap_or(f64::INFINITY);
        let fixed = [targets as f64, divisor as f64, rate_factor, clip_norm, updates_before as f64];
        fixed.into_iter().chain(self.losses.iter().copied()).collect()
    }

    pub(super) fn from_numbers(clock: u64, numbers: &[f64]) -> Result<Commit> {
        let [targets, divisor, rate_factor, clip_norm, updates_before, losses @ ..] = numbers else {
            return Err(does_not_fit(format!("the commit of clock {clock} has {} numbers", numbers.len())));
        };
        Ok(Commit {
            clock,
            targets: *targets as u64,
            divisor: *divisor as u64,
            rate_factor: *rate_factor,
            clip_norm: Some(*clip_norm).filter(|norm| norm.is_finite()),
            updates_before: *updates_before as u64,
            losses: losses.to_vec(),
        })
    }
}

/// A version of the parameters, and the clock whose update made it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Version {
    /// Number of clocks whose updates were made or skipped.
    pub number: u64,
    /// Number of updates made in this sitting.
    pub updates: u64,
    /// Number of clocks up to now whose updates were skipped in a row.
    pub skipped_in_a_row: u64,
    /// The mean loss of the last clock over the targets of all workers.
    pub loss: f64,
    /// The norm of its gradient.
    pub gradient_norm: f64,
    /// Number of its targets.
    pub targets: u64,
}

impl Version {
    /// Number of words on the wire.
    pub(super) const WORDS: usize = 6;

    pub(super) fn encode(self) -> [u64; Version::WORDS] {
        let Version { number, updates, skipped_in_a_row, loss, gradient_norm, targets } = self;
        [number, updates, skipped_in_a_row, loss.to_bits(), gradient_norm.to_bits(), targets]
    }

    pub(super) fn decode(words: [u64; Version::WORDS]) -> Version {
        let [number, updates, skipped_in_a_row, loss, gradient_norm, targets] = words;
        let (loss, gradient_norm) = (f64::from_bits(loss), f64::from_bits(gradient_norm));
        Version { number, updates, skipped_in_a_row, loss, gradient_norm, targets }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were_and_others_are_refused() {
        let (clock, unit) = (7, 3);
        let requests = [
            Request::Push { clock, unit },
            Request::Commit { clock, numbers: 9 },
            Request::Pull { clock, unit, oldest: 5 },
            Request::Leave,
        ];
        for request in requests {
            assert_eq!(Request::decode(request.encode()).unwrap(), request);
        }
        for words in [[4, 0, 0, 0], [0, 7, 3, 1], [1, 7, u64::MAX, 0], [3, 0, 0, 9]] {
            assert!(Request::decode(words).unwrap_err().to_string().contains("cannot read the request"));
        }
        for clip_norm in [None, Some(0.5)] {
            let commit = Commit {
                clock,
                targets: 640,
                divisor: 1280,
                rate_factor: 0.25,
                clip_norm,
                updates_before: 90,
                losses: vec![1.5, 0.0],
            };
            assert_eq!(Commit::from_numbers(clock, &commit.numbers()).unwrap(), commit);
        }
        assert!(Commit::from_numbers(clock, &[1.0; 4]).is_err());
        let version = Version { number: 4, updates: 3, skipped_in_a_row: 1, loss: 2.5, gradient_norm: 0.1, targets: 8 };
        assert_eq!(Version::decode(version.encode()), version);
    }
}
