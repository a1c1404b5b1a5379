//! Random numbers as a function of their place: the seed, what they are for, and a number.

use crate::normal;
use trainyard_base::philox4x32;

/// A stream of random numbers, the same whenever it is made for the same place.
#[derive(Clone, Debug)]
pub struct Stream {
    key: [u32; 2],
    place: [u32; 2],
    drawn: u64,
}

impl Stream {
    /// The stream for `number` of `purpose` under `seed`. Streams of different places share no
    /// numbers.
    pub fn new(seed: u64, purpose: u32, number: u32) -> Stream {
        Stream { key: [seed as u32, (seed >> 32) as u32], place: [purpose, number], drawn: 0 }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let block = self.drawn / 2;
        let words = philox4x32([block as u32, (block >> 32) as u32, self.place[0], self.place[1]], self.key);
        let half = 2 * (self.drawn % 2) as usize;
        self.drawn += 1;
        u64::from(words[half]) << 32 | u64::from(words[half + 1])
    }

    /// A uniform number in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A uniform whole number below `n`, which is above 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.uniform() * n as f64) as usize).min(n - 1)
    }

    /// A standard normal number.
    pub fn normal(&mut self) -> f64 {
        // The half keeps 0 out, whose quantile is infinite.
        let p = ((self.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        normal::quantile(p)
    }

    /// A normal number of `mean` and `deviation`, given that it lies in `low..high`.
    pub fn truncated_normal(&mut self, mean: f64, deviation: f64, low: f64, high: f64) -> f64 {
        let (a, b) = (normal::cdf((low - mean) / deviation), normal::cdf((high - mean) / deviation));
        let p = a + (b - a) * self.uniform();
        (mean + deviation * normal::quantile(p)).clamp(low, high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_their_place_alone() {
        let take = |seed, purpose, number| -> Vec<u64> {
            let mut stream = Stream::new(seed, purpose, number);
            (0..5).map(|_| stream.bits()).collect()
        };
        assert_eq!(take(1, 2, 3), take(1, 2, 3));
        let all = [take(1, 2, 3), take(2, 2, 3), take(1, 3, 3), take(1, 2, 4)];
        let mut numbers: Vec<u64> = all.concat();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 20);
    }

    #[test]
    fn distributions_have_their_moments() {
        let mut stream = Stream::new(7, 0, 0);
        let n = 20_000;
        let mean_and_variance = |values: &[f64]| {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            (mean, values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64)
        };
        let uniform: Vec<f64> = (0..n).map(|_| stream.uniform()).collect();
        let (mean, variance) = mean_and_variance(&uniform);
        assert!((mean - 0.5).abs() < 0.01 && (variance - 1.0 / 12.0).abs() < 0.002, "{mean} {variance}");
        let normal: Vec<f64> = (0..n).map(|_| stream.normal()).collect();
        let (mean, variance) = mean_and_variance(&normal);
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        // A normal above its mean is the half-normal: mean sqrt(2 / pi), variance 1 - 2 / pi.
        let half: Vec<f64> = (0..n).map(|_| stream.truncated_normal(0.0, 1.0, 0.0, 100.0)).collect();
        let (mean, variance) = mean_and_variance(&half);
        let pi = std::f64::consts::PI;
        assert!((mean - (2.0 / pi).sqrt()).abs() < 0.02 && (variance - 1.0 + 2.0 / pi).abs() < 0.02);
        assert!((0..n).all(|_| stream.below(3) < 3));
        let far = stream.truncated_normal(-50.0, 1.0, 0.0, 1.0);
        assert!((0.0..=1.0).contains(&far), "{far}");
    }
}
