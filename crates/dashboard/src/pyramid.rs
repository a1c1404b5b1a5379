//! One metric of a run, so that any part of it can be drawn without losing a value.
//!
//! A [`Pyramid`] keeps every value, and above them levels of [`Bucket`]s: each has the minimum, the
//! maximum and the mean of 16 buckets below it. Any range of values is the union of a few buckets,
//! so the answer to [`Pyramid::range`] is exact and costs the logarithm of the range. A curve that
//! is drawn from such answers shows every spike, however far one zooms out.

/// Buckets of a level in one bucket of the next.
const FANOUT: usize = 16;

/// The bits of a value that a record does not have. A loss that is not finite has other bits.
const ABSENT_BITS: u64 = 0x7ff8_0000_ab5e_4700;

/// A value that a record does not have.
pub const ABSENT: f64 = f64::from_bits(ABSENT_BITS);

/// True for [`ABSENT`]; false for numbers, finite or not.
pub fn is_absent(value: f64) -> bool {
    value.to_bits() == ABSENT_BITS
}

/// A summary of some values. Values that are not finite are counted and left out of the rest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    /// The least finite value; infinite if there is none.
    pub min: f64,
    /// The largest finite value; minus infinity if there is none.
    pub max: f64,
    /// The sum of the finite values.
    pub sum: f64,
    /// The number of finite values.
    pub count: u32,
    /// The number of values that are not finite.
    pub not_finite: u32,
}

impl Bucket {
    /// The summary of nothing.
    pub const EMPTY: Bucket = Bucket { min: f64::INFINITY, max: f64::NEG_INFINITY, sum: 0.0, count: 0, not_finite: 0 };

    /// The summary of one value.
    pub fn of(value: f64) -> Bucket {
        if is_absent(value) {
            Bucket::EMPTY
        } else if value.is_finite() {
            Bucket { min: value, max: value, sum: value, count: 1, not_finite: 0 }
        } else {
            Bucket { not_finite: 1, ..Bucket::EMPTY }
        }
    }

    /// Adds the values of another bucket.
    pub fn add(&mut self, other: &Bucket) {
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum += other.sum;
        self.count += other.count;
        self.not_finite += other.not_finite;
    }

    /// The mean of the finite values; None if there are none.
    pub fn mean(&self) -> Option<f64> {
        // Rounding must not move the mean of equal values out of their range.
        (self.count > 0).then(|| (self.sum / f64::from(self.count)).clamp(self.min, self.max))
    }

    /// True if nothing was summarised.
    pub fn is_empty(&self) -> bool {
        self.count == 0 && self.not_finite == 0
    }
}

/// All values of a metric, in the order of their records, and their summaries.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pyramid {
    values: Vec<f64>,
    /// `levels[k][i]` summarises the values from `i * 16^(k+1)` on. Only whole buckets are kept.
    levels: Vec<Vec<Bucket>>,
}

impl Pyramid {
    /// The pyramid of `values`.
    pub fn new(values: impl IntoIterator<Item = f64>) -> Pyramid {
        let mut pyramid = Pyramid::default();
        values.into_iter().for_each(|value| pyramid.push(value));
        pyramid
    }

    /// Appends a value.
    pub fn push(&mut self, value: f64) {
        self.values.push(value);
        if !self.values.len().is_multiple_of(FANOUT) {
            return;
        }
        let mut bucket = Bucket::EMPTY;
        self.values[self.values.len() - FANOUT..].iter().for_each(|value| bucket.add(&Bucket::of(*value)));
        for level in 0.. {
            if level == self.levels.len() {
                self.levels.push(Vec::new());
            }
            let buckets = &mut self.levels[level];
            buckets.push(bucket);
            if !buckets.len().is_multiple_of(FANOUT) {
                return;
            }
            bucket = Bucket::EMPTY;
            buckets[buckets.len() - FANOUT..].iter().for_each(|below| bucket.add(below));
        }
    }

    /// Removes all values from number `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.values.truncate(len);
        let mut whole = len;
        for level in &mut self.levels {
            whole /= FANOUT;
            level.truncate(whole);
        }
    }

    /// The number of values, with those that are absent.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// True if there is no value.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The values.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The summary of the values from `start` up to, not including, `end`.
    ///
    /// # Panics
    ///
    /// `end` is above the number of values.
    pub fn range(&self, start: usize, end: usize) -> Bucket {
        assert!(end <= self.values.len(), "a range up to {end} of {} values", self.values.len());
        let mut sum = Bucket::EMPTY;
        let (mut start, mut end) = (start, end);
        // Values outside whole buckets are taken from this level, the rest from the next.
        let (first, last) = edges(start, end);
        self.values[start.min(end)..first].iter().for_each(|value| sum.add(&Bucket::of(*value)));
        self.values[last..end.max(last)].iter().for_each(|value| sum.add(&Bucket::of(*value)));
        for level in &self.levels {
            (start, end) = (edges(start, end).0 / FANOUT, edges(start, end).1 / FANOUT);
            if start >= end {
                break;
            }
            let (first, last) = edges(start, end);
            level[start..first].iter().chain(&level[last..end]).for_each(|bucket| sum.add(bucket));
        }
        sum
    }
}

/// The part of `start..end` that whole buckets of the next level cover. If there is none, both ends
/// are `end`.
fn edges(start: usize, end: usize) -> (usize, usize) {
    let (first, last) = (start.next_multiple_of(FANOUT), end - end % FANOUT);
    if first < last { (first, last) } else { (end, end) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The oracle: every value by itself.
    fn naive(values: &[f64]) -> Bucket {
        let mut sum = Bucket::EMPTY;
        values.iter().for_each(|value| sum.add(&Bucket::of(*value)));
        sum
    }

    fn value() -> impl Strategy<Value = f64> {
        prop_oneof![
            8 => (-1_000i32..1_000).prop_map(f64::from),
            1 => Just(f64::NAN),
            1 => Just(f64::INFINITY),
            1 => Just(ABSENT),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

        // Whole numbers, so that sums are exact in any order.
        #[test]
        fn every_range_has_exactly_its_minimum_maximum_and_mean(
            values in prop::collection::vec(value(), 0..5_000),
            ranges in prop::collection::vec((0usize..5_000, 0usize..5_000), 32),
            cut in 0usize..5_000,
            more in prop::collection::vec(value(), 0..600),
        ) {
            let mut values = values;
            let mut pyramid = Pyramid::new(values.iter().copied());
            pyramid.truncate(cut);
            values.truncate(cut);
            more.iter().for_each(|value| pyramid.push(*value));
            values.extend(more);
            for (a, b) in ranges {
                let (a, b) = (a.min(b).min(values.len()), a.max(b).min(values.len()));
                prop_assert_eq!(pyramid.range(a, b), naive(&values[a..b]));
            }
        }
    }

    #[test]
    fn a_spike_of_one_value_in_a_million_is_in_every_range_that_has_it() {
        let spike = 654_321;
        let pyramid = Pyramid::new((0..1_000_000).map(|n| if n == spike { 1e9 } else { f64::from(n % 7) }));
        for bins in [1, 2, 3, 800, 1_999] {
            let edge = |bin: usize| bin * 1_000_000 / bins;
            let with: Vec<usize> =
                (0..bins).filter(|bin| pyramid.range(edge(*bin), edge(bin + 1)).max == 1e9).collect();
            assert_eq!(with.len(), 1, "{bins} bins");
            assert!((edge(with[0])..edge(with[0] + 1)).contains(&(spike as usize)));
        }
    }

    #[test]
    fn absent_values_are_nothing_and_infinite_ones_are_counted() {
        let bucket = Pyramid::new([1.0, ABSENT, f64::NAN, 3.0, f64::NEG_INFINITY]).range(0, 5);
        assert_eq!(bucket, Bucket { min: 1.0, max: 3.0, sum: 4.0, count: 2, not_finite: 2 });
        assert_eq!(bucket.mean(), Some(2.0));
        assert!(Pyramid::new([ABSENT; 3]).range(0, 3).is_empty());
        assert_eq!(Bucket::EMPTY.mean(), None);
    }
}
