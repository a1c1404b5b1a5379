//! Assigns samples to the corpora of a mixture.

use crate::error::{DataError, Result};

/// A table of slots that repeats for ever. Each slot has a corpus and the number of earlier slots
/// in the table with the same corpus.
///
/// Shares are rounded to 1/4096. Inside the table each slot goes to the corpus that is furthest
/// behind its share, so every stretch of samples follows the weights as closely as whole samples
/// can.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    slots: Vec<(u32, u32)>,
    /// Number of slots of each corpus in the table.
    shares: Vec<u64>,
}

impl Mixture {
    const SLOTS: usize = 4096;

    pub(super) fn new(weights: &[f64]) -> Result<Self> {
        check_weights(weights)?;
        if weights.len() == 1 {
            return Ok(Self { slots: vec![(0, 0)], shares: vec![1] });
        }
        let total: f64 = weights.iter().sum();
        let exact: Vec<f64> = weights.iter().map(|w| w / total * Self::SLOTS as f64).collect();
        let mut shares: Vec<u64> = exact.iter().map(|e| e.floor() as u64).collect();
        // The largest remainders get the slots that rounding down left; ties go to the earlier
        // corpus.
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()).then(a.cmp(&b)));
        let left = Self::SLOTS.saturating_sub(shares.iter().sum::<u64>() as usize);
        order.iter().take(left).for_each(|&c| shares[c] += 1);
        if let Some(c) = shares.iter().position(|&share| share == 0) {
            let what = format!("corpus {c} has a share of {:.2e}, below 1/{}", weights[c] / total, Self::SLOTS);
            return Err(DataError::setting("weight", what, "raise its weight, or leave it out"));
        }
        let mut counts = vec![0u64; weights.len()];
        let slots = (1..=Self::SLOTS as u64)
            .map(|slot| {
                // share x slot is the number a corpus should have by now, count x SLOTS the number
                // it has, both times SLOTS.
                let lag = |c: usize| (shares[c] * slot) as i64 - (counts[c] * Self::SLOTS as u64) as i64;
                let behind = (0..weights.len()).max_by(|&a, &b| lag(a).cmp(&lag(b)).then(b.cmp(&a))).unwrap_or(0);
                counts[behind] += 1;
                (behind as u32, counts[behind] as u32 - 1)
            })
            .collect();
        debug_assert_eq!(counts, shares);
        Ok(Self { slots, shares })
    }

    /// The corpus of sample `i`, and the number of earlier samples from the same corpus.
    pub(super) fn place(&self, i: u64) -> (usize, u64) {
        let table = self.slots.len() as u64;
        let (corpus, before) = self.slots[(i % table) as usize];
        (corpus as usize, i / table * self.shares[corpus as usize] + u64::from(before))
    }

    /// The number of samples below `i` that come from corpus `c`.
    pub(super) fn samples_before(&self, i: u64, c: usize) -> u64 {
        let table = self.slots.len() as u64;
        let partial = self.slots[..(i % table) as usize].iter().filter(|slot| slot.0 as usize == c).count();
        i / table * self.shares[c] + partial as u64
    }
}

/// Refuses weights that are no positive numbers.
pub(crate) fn check_weights(weights: &[f64]) -> Result<()> {
    match weights.iter().find(|w| !(w.is_finite() && **w > 0.0)) {
        Some(weight) => {
            let what = format!("{weight} is not a positive number");
            Err(DataError::setting("weight", what, "give each corpus a positive weight, or leave it out"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_stretch_follows_the_weights_and_no_sample_is_dealt_twice(weights in proptest::collection::vec(0.05f64..1.0, 1..5)) {
            let mixture = Mixture::new(&weights).unwrap();
            let total: f64 = weights.iter().sum();
            let mut counts = vec![0u64; weights.len()];
            for i in 0..10_000u64 {
                let (c, nth) = mixture.place(i);
                prop_assert_eq!(nth, counts[c], "samples of a corpus come in its own order");
                prop_assert_eq!(mixture.samples_before(i, c), counts[c]);
                counts[c] += 1;
                for (&count, weight) in counts.iter().zip(&weights) {
                    let expected = weight / total * (i + 1) as f64;
                    // Whole samples and shares of 1/4096, which differ from the weights by 1/4096
                    // at most.
                    let tolerance = weights.len() as f64 + (i + 1) as f64 / 4096.0;
                    prop_assert!((count as f64 - expected).abs() <= tolerance, "{i}: {counts:?} {weights:?}");
                }
            }
        }
    }

    #[test]
    fn weights_that_mean_nothing_are_refused() {
        for weights in [&[0.0, 1.0][..], &[-1.0], &[f64::NAN, 1.0], &[f64::INFINITY], &[1.0, 1e-9]] {
            assert!(matches!(Mixture::new(weights), Err(DataError::Setting { .. })), "{weights:?}");
        }
    }
}
