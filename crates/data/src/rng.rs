//! Counter-based random numbers and permutations: any value can be computed without the values
//! before it.
//!
//! The generator is Philox4x32-10. A sample's content is a pure function of (seed, index), so any
//! number of ranks and workers draws the same samples, and resuming costs nothing.

use trainyard_base::philox4x32;

/// A family of independent random streams under one seed; a stream is read at any index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    stream: u32,
}

impl Stream {
    /// Stream number `stream` of `seed`.
    pub fn new(seed: u64, stream: u32) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], stream }
    }

    /// 64 random bits for (`index`, `attempt`).
    fn bits(&self, index: u64, attempt: u32) -> u64 {
        let block = philox4x32([index as u32, (index >> 32) as u32, attempt, self.stream], self.key);
        u64::from(block[0]) | u64::from(block[1]) << 32
    }

    /// Uniform in `0..bound` for `index`, without bias (Lemire 2019: widening product, rejecting
    /// the short interval). `bound` 0 is answered with 0.
    pub fn below(&self, index: u64, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        let threshold = bound.wrapping_neg() % bound;
        let mut attempt = 0;
        loop {
            let product = u128::from(self.bits(index, attempt)) * u128::from(bound);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
            attempt = attempt.wrapping_add(1);
        }
    }
}

/// A seeded bijection of `0..n` that is computed per element, so that shuffling a trillion rows
/// needs no memory.
///
/// It is a balanced Feistel network over the smallest even number of bits that holds `n`, with
/// Philox as round function. A result outside the domain is permuted again until it falls inside
/// (Black and Rogaway, CT-RSA 2002). The network's domain is below 4 n, so at most four rounds of
/// this are expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    key: [u32; 2],
    stream: u32,
    epoch: u32,
}

impl Permutation {
    /// Four rounds make a strong pseudo-random permutation (Luby and Rackoff 1988) of a large
    /// domain; tiny domains need more before every arrangement is about equally likely.
    const ROUNDS: u32 = 8;

    /// The permutation of `0..n` for (`seed`, `stream`, `epoch`). Epochs repeat after 2^32.
    pub fn new(n: u64, seed: u64, stream: u32, epoch: u64) -> Self {
        let bits = if n <= 1 { 1 } else { 64 - (n - 1).leading_zeros() };
        let key = [seed as u32, (seed >> 32) as u32];
        Self { n, half_bits: bits.div_ceil(2), key, stream, epoch: epoch as u32 }
    }

    /// The image of `index`, which must be below `n`; larger values are returned unchanged.
    pub fn apply(&self, index: u64) -> u64 {
        if index >= self.n || self.n == 1 {
            return index;
        }
        let mut value = self.encrypt(index);
        while value >= self.n {
            value = self.encrypt(value);
        }
        value
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..Self::ROUNDS {
            let block = philox4x32([right as u32, round, self.epoch, self.stream], self.key);
            (left, right) = (right, left ^ (u64::from(block[0]) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn below_is_uniform_and_in_range() {
        let stream = Stream::new(7, 1);
        let mut counts = [0u32; 10];
        for index in 0..20_000 {
            counts[stream.below(index, 10) as usize] += 1;
        }
        // Chi-square with 9 degrees of freedom: 27.9 is the 0.1 % point.
        let chi: f64 = counts.iter().map(|&c| (f64::from(c) - 2000.0).powi(2) / 2000.0).sum();
        assert!(chi < 27.9, "{counts:?}");
        assert_eq!(stream.below(3, 0), 0);
        assert_eq!(stream.below(3, 1), 0);
    }

    #[test]
    fn every_arrangement_of_four_rows_is_about_equally_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for epoch in 0..24_000 {
            let permutation = Permutation::new(4, 99, 0, epoch);
            let order: Vec<u64> = (0..4).map(|i| permutation.apply(i)).collect();
            *counts.entry(order).or_insert(0u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        let (low, high) = (counts.values().min().unwrap(), counts.values().max().unwrap());
        assert!(*low > 700 && *high < 1300, "{low} {high}");
    }

    proptest! {
        #[test]
        fn a_permutation_is_a_bijection(n in 1u64..3000, seed: u64, epoch in 0u64..9) {
            let permutation = Permutation::new(n, seed, 3, epoch);
            let mut seen = vec![false; n as usize];
            for index in 0..n {
                let image = permutation.apply(index) as usize;
                prop_assert!(image < seen.len() && !seen[image]);
                seen[image] = true;
            }
        }

        #[test]
        fn a_huge_permutation_stays_in_range_without_collisions(n in (1u64 << 40)..u64::MAX, seed: u64) {
            let permutation = Permutation::new(n, seed, 0, 0);
            let mut images: Vec<u64> = (0..200).map(|i| permutation.apply(i)).collect();
            prop_assert!(images.iter().all(|&image| image < n));
            images.sort_unstable();
            images.dedup();
            prop_assert_eq!(images.len(), 200);
        }
    }
}
