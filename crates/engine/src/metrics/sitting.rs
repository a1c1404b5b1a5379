//! Statistics of the steps of a sitting (one process's part of a run), in memory that does not grow
//! with their number.

use super::StepMetrics;

/// A sample of a stream of values, for its median. Up to [`Sample::KEPT`] values the median is
/// exact. Beyond, it is the median of that many values drawn uniformly from all. In 99 of 100 cases
/// it lies between the 48th and the 52nd percentile of the stream.
#[derive(Clone, Debug)]
pub struct Sample {
    kept: Vec<f64>,
    seen: u64,
    /// The state of the generator that draws.
    state: u64,
}

impl Default for Sample {
    /// Allocates all memory at once, so that no step allocates.
    fn default() -> Sample {
        Sample { kept: Vec::with_capacity(Sample::KEPT), seen: 0, state: 0 }
    }
}

impl Sample {
    /// Number of values that are kept.
    pub const KEPT: usize = 4096;

    /// Adds a value. Vitter 1985, "Random sampling with a reservoir", algorithm R: the n-th value
    /// takes the place of a kept one with probability `KEPT / n`.
    pub fn add(&mut self, value: f64) {
        self.seen += 1;
        if self.kept.len() < Sample::KEPT {
            return self.kept.push(value);
        }
        // Steele, Lea and Flood 2014: SplitMix64, of a fixed seed, so that the same values give the
        // same median.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut draw = self.state;
        draw = (draw ^ (draw >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        draw = (draw ^ (draw >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let place = (draw ^ (draw >> 31)) % self.seen;
        if let Some(kept) = usize::try_from(place).ok().and_then(|place| self.kept.get_mut(place)) {
            *kept = value;
        }
    }

    /// The median; `None` of nothing.
    pub fn median(&self) -> Option<f64> {
        trainyard_base::median(self.kept.iter().copied())
    }
}

/// Statistics of the steps of a sitting.
#[derive(Clone, Debug, Default)]
pub struct Sitting {
    /// Number of steps.
    pub steps: usize,
    /// Seconds per step.
    pub step_s: Sample,
    /// Tokens per second.
    pub tps: Sample,
    /// Utilisations, where a peak is known.
    pub mfu: Sample,
    /// With a parameter server, the pulls by the number of updates that their parameters lacked.
    pub staleness: Option<Vec<u64>>,
    /// With back-up workers, the pushes that updates were made without.
    pub dropped_pushes: Option<u64>,
    total_s: f64,
    data_wait_s: f64,
    comm_s: f64,
    comm_exposed_s: f64,
}

impl Sitting {
    /// Adds a step. One that rank 0 left out says nothing about speed.
    pub fn add(&mut self, step: &StepMetrics) {
        self.steps += 1;
        if !step.late {
            self.step_s.add(step.step_s);
            self.tps.add(step.tps);
            step.mfu.into_iter().for_each(|mfu| self.mfu.add(mfu));
        }
        if let Some(pulls) = &step.staleness {
            let sum = self.staleness.get_or_insert_default();
            sum.resize(sum.len().max(pulls.len()), 0);
            sum.iter_mut().zip(pulls).for_each(|(sum, pulls)| *sum += pulls);
        }
        if let Some(dropped) = step.dropped_pushes {
            *self.dropped_pushes.get_or_insert_default() += dropped;
        }
        self.total_s += step.step_s;
        self.data_wait_s += step.data_wait_s;
        self.comm_s += step.comm_s;
        self.comm_exposed_s += step.comm_exposed_s;
    }

    /// Time that steps waited for data, as a share of their time.
    pub fn data_wait_share(&self) -> f64 {
        self.share(self.data_wait_s)
    }

    /// Time that rank 0's lanes spent in exchanges with other ranks, as a share of the steps' time.
    pub fn comm_share(&self) -> f64 {
        self.share(self.comm_s)
    }

    /// The part of [`Sitting::comm_share`] during which computing waited.
    pub fn comm_exposed_share(&self) -> f64 {
        self.share(self.comm_exposed_s)
    }

    fn share(&self, seconds: f64) -> f64 {
        seconds / self.total_s.max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::tests::sample;

    #[test]
    fn a_median_is_exact_for_short_streams_and_near_for_long_ones() {
        assert_eq!(Sample::default().median(), None);
        let median = |count: u64| {
            let mut sample = Sample::default();
            // 0 to count - 1 in scattered order: 7919 shares no factor with the counts.
            (0..count).for_each(|n| sample.add((n * 7919 % count) as f64));
            assert!(sample.kept.len() <= Sample::KEPT && sample.kept.capacity() <= 2 * Sample::KEPT);
            sample.median().unwrap()
        };
        assert_eq!([1, 2, 5, 4096].map(median), [0.0, 0.5, 2.0, 2047.5]);
        for count in [4097, 100_000, 1_000_000] {
            let middle = median(count) / count as f64;
            assert!((middle - 0.5).abs() < 0.02, "{count}: {middle}");
        }
    }

    #[test]
    fn shares_are_of_the_time_of_all_steps() {
        let mut sitting = Sitting::default();
        assert_eq!(sitting.data_wait_share(), 0.0);
        for step in 1..=3 {
            sitting.add(&StepMetrics { step_s: 2.0, data_wait_s: 0.5, comm_s: 1.0, mfu: None, ..sample(step) });
        }
        assert_eq!((sitting.steps, sitting.mfu.median()), (3, None));
        assert_eq!((sitting.data_wait_share(), sitting.comm_share(), sitting.comm_exposed_share()), (0.25, 0.5, 0.0));
    }
}
