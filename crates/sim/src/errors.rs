//! The error of predictions, from published runs that the constants were not fitted on: intervals,
//! the probability that a step does not fit, and the correction by a measured step.
//!
//! The logarithm of measured over predicted has quantiles of its own for dense models in 16 bits
//! and for everything else. It grows with the share of the step in which compute waits, because
//! communication, bubbles and hosts are harder to predict than kernels.

use crate::interval::Interval;
use crate::measurement::{self, Class};
use crate::profile::{Device, Profiles};
use serde::Deserialize;

/// Factor on the width of an interval for each thing that no published run covers.
const UNCOVERED: f64 = 1.2;

/// The quantiles of a prediction's error.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spread {
    /// The logarithm of measured over predicted below which one run in ten lies, if compute never
    /// waits.
    pub low: f64,
    /// The logarithm above which one run in ten lies.
    pub high: f64,
    /// Both grow by this factor times the share of the step in which compute waits.
    pub waiting: f64,
}

impl Spread {
    /// The interval of a quantity predicted as `expected`, in a step that waits for the share
    /// `waiting`. `wider` multiplies its width.
    pub fn interval(&self, expected: f64, waiting: f64, wider: f64) -> Interval {
        let scale = (1.0 + self.waiting * waiting) * wider;
        Interval { low: expected * (scale * self.low).exp(), expected, high: expected * (scale * self.high).exp() }
    }
}

/// The errors of one class of runs.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassErrors {
    /// Of tokens per second.
    pub speed: Spread,
    /// Of memory.
    pub memory: Spread,
    /// Standard deviation of what the runs of one source have in common, as a logarithm of speed.
    pub between: f64,
    /// Standard deviation among the runs of one source.
    pub within: f64,
    /// Median size of the error of speed, as a logarithm.
    pub usual: f64,
    /// Its 90th percentile.
    pub large: f64,
}

/// The errors of all classes.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Errors {
    /// Of dense models in 16 bits.
    pub dense: ClassErrors,
    /// Of mixtures, 8 and 4 bits, and long sequences.
    pub other: ClassErrors,
}

impl Errors {
    /// The built-in errors.
    pub fn builtin() -> Errors {
        toml::from_str(include_str!("../data/errors.toml")).expect("built-in errors are tested")
    }

    /// The errors of `class`.
    pub fn of(&self, class: Class) -> &ClassErrors {
        if class == Class::Dense { &self.dense } else { &self.other }
    }
}

impl ClassErrors {
    /// The probability that a step predicted to need `bytes` needs more than `bytes_max`. `wider`
    /// multiplies the error.
    pub fn not_fitting(&self, bytes: f64, bytes_max: f64, wider: f64) -> f64 {
        // The distance from the median to a quantile of 90 % is 1.2816 standard deviations.
        let spread = 0.5 * (self.memory.high - self.memory.low) / 1.2816 * wider;
        let median = 0.5 * (self.memory.high + self.memory.low) * wider;
        normal(((bytes / bytes_max).ln() + median) / spread)
    }

    /// The share of memory to leave free so that eight steps in ten fit that fill the rest.
    pub fn memory_margin(&self) -> f64 {
        // Quantiles of 80 and 90 % are 0.8416 and 1.2816 standard deviations from the median.
        1.0 - (-self.memory.high.max(0.0) * 0.8416 / 1.2816).exp()
    }

    /// The difference of two speeds, as a logarithm, from which the faster one is the faster one in
    /// eight of ten cases. What runs of one source have in common does not count.
    pub fn apart(&self) -> f64 {
        0.8416 * std::f64::consts::SQRT_2 * self.within
    }
}

/// The correction of all predictions by a measured step.
///
/// The error of a prediction has one part that all runs of a trainer on a cluster have in common,
/// and one of its own. A measured step tells of their sum. The expected common part given the sum
/// is the share `between²/(between² + within²)` of it (normal distributions).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Correction {
    /// Factor on predicted seconds.
    pub factor: f64,
    /// Factor on the logarithmic width of intervals.
    pub narrower: f64,
}

impl Correction {
    /// The correction by a step that was predicted to take `predicted_s` seconds and took
    /// `measured_s`.
    pub fn by(errors: &ClassErrors, predicted_s: f64, measured_s: f64) -> Correction {
        let (common, own) = (errors.between.powi(2), errors.within.powi(2));
        let share = common / (common + own);
        let left = common * (1.0 - share) + own;
        Correction { factor: ((measured_s / predicted_s).ln() * share).exp(), narrower: (left / (common + own)).sqrt() }
    }
}

/// Traits of a question that no published run has, in words.
pub fn uncovered(device: &Device, devices: u32, sequence: u32) -> Vec<String> {
    let rows = measurement::rows().expect("built-in measurements are tested");
    let mut all = Vec::new();
    if sources_of(&Profiles::builtin(), &device.name, None) < 2 {
        all.push(format!("fewer than two sources with devices like {}", device.name));
    }
    let most = rows.iter().map(|row| row.devices).max().unwrap_or(1);
    if devices > most {
        all.push(format!("no run on more than {most} devices"));
    }
    let longest = rows.iter().map(|row| row.sequence).max().unwrap_or(1);
    if sequence > longest {
        all.push(format!("no run with sequences of more than {longest} tokens"));
    }
    all
}

/// The number of sources with runs on devices of the generation of `device`, but for `without`.
pub(crate) fn sources_of(profiles: &Profiles, device: &str, without: Option<&str>) -> usize {
    let family = |name: &str| profiles.device(name).ok().map(|device| device.family);
    let rows = measurement::rows().expect("built-in measurements are tested");
    let like = rows.iter().filter(|row| family(&row.device).is_some() && family(&row.device) == family(device));
    let mut sources: Vec<&str> = like.map(measurement::Row::source).filter(|source| Some(*source) != without).collect();
    sources.sort_unstable();
    sources.dedup();
    sources.len()
}

/// The number of published runs of `class`, and of their sources.
pub fn runs_like(class: Class) -> (usize, usize) {
    let rows = measurement::rows().expect("built-in measurements are tested");
    let like: Vec<&measurement::Row> = rows.iter().filter(|row| row.class() == class).collect();
    let mut sources: Vec<&str> = like.iter().map(|row| row.source()).collect();
    sources.sort_unstable();
    sources.dedup();
    (like.len(), sources.len())
}

/// The factor on the width of intervals for `uncovered` things.
pub fn wider(uncovered: usize) -> f64 {
    UNCOVERED.powi(uncovered as i32)
}

/// The probability that a standard normal variable is below `x` (Abramowitz and Stegun 1964,
/// 26.2.17; within 1e-7).
pub fn normal(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * x.abs());
    let series = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = series.iter().rev().fold(0.0, |sum, factor| t * (factor + sum));
    let above = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt() * sum;
    if x >= 0.0 { 1.0 - above } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profiles;

    #[test]
    fn the_normal_distribution_is_that_of_its_tables() {
        for (x, share) in [(0.0, 0.5), (1.2816, 0.9), (-1.2816, 0.1), (1.96, 0.975), (-3.0, 0.00135)] {
            assert!((normal(x) - share).abs() < 2e-5, "{x}: {}", normal(x));
        }
    }

    #[test]
    fn intervals_hold_the_expected_value_and_widen_with_what_is_harder_to_know() {
        let errors = Errors::builtin();
        for class in Class::ALL {
            let speed = errors.of(class).speed;
            let plain = speed.interval(1000.0, 0.0, 1.0);
            assert!(plain.low < 1000.0 && 1000.0 < plain.high, "{class:?}");
            assert!(speed.interval(1000.0, 0.5, 1.0).width() >= plain.width());
            assert!(speed.interval(1000.0, 0.0, wider(1)).width() > plain.width());
            let likely = |bytes: f64| errors.of(class).not_fitting(bytes, 80e9, 1.0);
            assert!(likely(40e9) < 0.01 && likely(160e9) > 0.99 && likely(78e9) < likely(82e9));
            assert!((0.0..0.5).contains(&errors.of(class).memory_margin()));
        }
    }

    #[test]
    fn a_measured_step_corrects_a_part_of_its_difference_and_narrows_intervals() {
        let dense = Errors::builtin().dense;
        let correction = Correction::by(&dense, 10.0, 12.0);
        assert!(1.0 < correction.factor && correction.factor < 1.2 && correction.narrower < 1.0);
        assert_eq!(Correction::by(&dense, 10.0, 10.0).factor, 1.0);
        let certain = ClassErrors { within: 1e-9, ..dense };
        assert!((Correction::by(&certain, 10.0, 12.0).factor - 1.2).abs() < 1e-6);
    }

    #[test]
    fn what_nobody_measured_is_said() {
        let profiles = Profiles::builtin();
        let words = |name: &str, devices| uncovered(profiles.device(name).unwrap(), devices, 4096);
        assert!(words("H100", 512).is_empty());
        assert_eq!(words("MI300X", 512), ["fewer than two sources with devices like MI300X"]);
        assert_eq!(words("H100", 16384).len(), 1);
    }
}
