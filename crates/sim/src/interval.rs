//! Intervals around predictions.

use serde::Serialize;

/// A predicted value with the interval that holds the true one with probability [`COVERAGE`].
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Interval {
    /// The lower end: one true value in ten is below it.
    pub low: f64,
    /// The expected value.
    pub expected: f64,
    /// The upper end: one true value in ten is above it.
    pub high: f64,
}

/// The probability that an interval holds the true value.
pub const COVERAGE: f64 = 0.8;

impl Interval {
    /// An interval of no width.
    pub fn exact(value: f64) -> Interval {
        Interval { low: value, expected: value, high: value }
    }

    /// Its width as a share of the expected value.
    pub fn width(&self) -> f64 {
        if self.expected == 0.0 { 0.0 } else { (self.high - self.low) / self.expected }
    }

    /// True if `value` lies in it.
    pub fn holds(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// The interval of `factor` times the value.
    pub fn times(&self, factor: f64) -> Interval {
        Interval { low: factor * self.low, expected: factor * self.expected, high: factor * self.high }
    }
}
