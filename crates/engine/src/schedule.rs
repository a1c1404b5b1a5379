//! The learning rate as a pure function of the step.
//!
//! Steps count from 0 and the value is the one that step s is taken with. The warmup is (s + 1) /
//! (warmup + 1) of the peak, so that no step is wasted on a rate of zero and the peak is reached at
//! s = warmup. The decay's progress is p = (s - start) / (end - start): the minimum would be
//! reached at s = end, which for a decay to the end of the run is the step after the last.
//!
//! | kind | start | end | value at progress p |
//! |---|---|---|---|
//! | constant | | | peak |
//! | linear | warmup | start + decay_steps, or the end | peak + (min - peak) p |
//! | cosine | warmup | start + decay_steps, or the end | min + (peak - min) (1 + cos(pi p)) / 2 |
//! | wsd | end - decay_steps | the end | either of those, or min + (peak - min) (1 - sqrt(p)) |
//!
//! Cosine: Loshchilov & Hutter 2017. Warmup-stable-decay: Hu et al. 2024; its square-root form:
//! Hägele et al. 2024.

use crate::config::{DecayShape, ScheduleKind};
use serde::Serialize;

/// Steps of the warmup where `schedule.warmup_steps` is unset, of a run of `steps`.
pub(crate) fn usual_warmup(steps: u64) -> u64 {
    (steps / 50).min(2000)
}

/// A schedule; everything but the step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Schedule {
    /// The shape.
    pub kind: ScheduleKind,
    /// The highest learning rate.
    pub peak: f64,
    /// The lowest after the decay, as a share of the peak.
    pub min_ratio: f64,
    /// Steps of warmup.
    pub warmup_steps: u64,
    /// Steps of decay; `None`: from the warmup to the end (linear, cosine), the last fifth (wsd).
    pub decay_steps: Option<u64>,
    /// The shape of wsd's decay.
    pub decay_shape: DecayShape,
    /// Steps of the run; `None` while they are not known: then the rate stays at the peak after the
    /// warmup.
    pub steps: Option<u64>,
    /// The stages of a batch warm-up, in order; empty without one.
    pub stages: Vec<RateStage>,
}

/// Steps whose learning rate has a factor, because their batch is smaller.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RateStage {
    /// The step, from 0, at which the next stage begins.
    pub end: u64,
    /// The factor.
    pub factor: f64,
}

impl Schedule {
    /// The learning rate of step `step`, which counts from 0.
    pub fn learning_rate(&self, step: u64) -> f64 {
        self.peak * self.factor(step)
    }

    /// The learning rate of step `step` as a share of the peak. Some parameters have their own
    /// peak.
    pub fn factor(&self, step: u64) -> f64 {
        let stage = self.stages.iter().find(|stage| step < stage.end);
        stage.map_or(1.0, |stage| stage.factor) * self.of_whole_batch(step)
    }

    /// As [`Schedule::factor`], of the whole batch.
    fn of_whole_batch(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return (step + 1) as f64 / (self.warmup_steps + 1) as f64;
        }
        let Some((start, end)) = self.decay() else { return 1.0 };
        if step < start {
            return 1.0;
        }
        let progress = if step >= end { 1.0 } else { (step - start) as f64 / (end - start) as f64 };
        let shape = match self.kind {
            ScheduleKind::Constant => return 1.0,
            ScheduleKind::Linear => DecayShape::Linear,
            ScheduleKind::Cosine => DecayShape::Cosine,
            ScheduleKind::Wsd => self.decay_shape,
        };
        let height = match shape {
            DecayShape::Linear => 1.0 - progress,
            DecayShape::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            DecayShape::Sqrt => 1.0 - progress.sqrt(),
        };
        self.min_ratio + (1.0 - self.min_ratio) * height
    }

    /// The steps at which the decay begins and at which it would be complete.
    pub fn decay(&self) -> Option<(u64, u64)> {
        match self.kind {
            ScheduleKind::Constant => None,
            ScheduleKind::Linear | ScheduleKind::Cosine => {
                let end = self.decay_steps.map(|n| self.warmup_steps.saturating_add(n)).or(self.steps)?;
                Some((self.warmup_steps, end.max(self.warmup_steps)))
            }
            ScheduleKind::Wsd => {
                let end = self.steps?;
                let length = self.decay_steps.unwrap_or_else(|| (end / 5).max(1));
                Some((end.saturating_sub(length).max(self.warmup_steps), end.max(self.warmup_steps)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn name<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str, wanted: &str) -> T {
        *all.iter().find(|v| name(**v) == wanted).unwrap()
    }

    /// Golden numbers are computed by another program, scripts/golden.
    #[test]
    fn schedules_equal_the_golden_numbers() {
        let golden: Value = serde_json::from_str(include_str!("../tests/golden/optimizers.json")).unwrap();
        let cases = golden["schedules"]["cases"].as_array().unwrap();
        assert!(cases.len() >= 7);
        for case in cases {
            let number = |key: &str| case[key].as_f64().unwrap();
            let schedule = Schedule {
                kind: name(ScheduleKind::ALL, ScheduleKind::name, case["name"].as_str().unwrap()),
                peak: number("peak"),
                min_ratio: number("min") / number("peak"),
                warmup_steps: case["warmup"].as_u64().unwrap(),
                decay_steps: case["decay"].as_u64(),
                decay_shape: name(DecayShape::ALL, DecayShape::name, case["decay_shape"].as_str().unwrap_or("linear")),
                steps: case["total"].as_u64(),
                stages: Vec::new(),
            };
            let want = case["lr"].as_array().unwrap();
            assert_eq!(want.len() as u64, schedule.steps.unwrap());
            for (step, want) in want.iter().enumerate() {
                let (got, want) = (schedule.learning_rate(step as u64), want.as_f64().unwrap());
                assert!((got - want).abs() <= 1e-9 * want, "{case:?} step {step}: {got} against {want}");
            }
        }
    }

    #[test]
    fn unknown_ends_and_steps_past_the_end_are_defined() {
        let mut schedule = Schedule {
            kind: ScheduleKind::Cosine,
            peak: 1.0,
            min_ratio: 0.1,
            warmup_steps: 4,
            decay_steps: None,
            decay_shape: DecayShape::Linear,
            steps: None,
            stages: Vec::new(),
        };
        assert_eq!(schedule.learning_rate(1_000_000), 1.0, "the peak while the end is not known");
        for kind in ScheduleKind::ALL {
            for steps in [0, 1, 3, 4, 5, 100, u64::MAX] {
                for decay_steps in [None, Some(1), Some(u64::MAX)] {
                    (schedule.kind, schedule.steps, schedule.decay_steps) = (*kind, Some(steps), decay_steps);
                    for step in [0, 1, 4, 5, 99, 100, 101, u64::MAX - 1] {
                        let rate = schedule.learning_rate(step);
                        assert!((0.1..=1.0).contains(&rate) || step < 4, "{schedule:?} {step}: {rate}");
                    }
                }
            }
        }
        schedule.steps = Some(100);
        schedule.decay_steps = None;
        for kind in [ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::Wsd] {
            schedule.kind = kind;
            assert_eq!(schedule.learning_rate(100), 0.1);
            assert_eq!(schedule.learning_rate(1000), 0.1);
        }
    }
}
