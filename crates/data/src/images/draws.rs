//! The random numbers of one image: a counter-based stream that is keyed by (seed, epoch, image).

use trainyard_base::philox4x32;

/// Keeps the streams of images apart from those of text, which count from 0.
const STREAM: u32 = 0x494d_4700;

/// An independent stream of random numbers. Equal keys give equal numbers.
pub(super) struct Draws {
    key: [u32; 2],
    image: u32,
    epoch: u32,
    purpose: u32,
    next: u32,
}

/// The uses of random numbers, each with a stream of its own, so that a change to one augmentation
/// leaves the draws of the others.
#[derive(Clone, Copy)]
pub(super) enum Purpose {
    Crop = 1,
    Flip = 2,
    Colour = 3,
    RandAugment = 4,
    Mix = 5,
}

/// The stream of [`crate::rng::Permutation`] that orders the images.
pub(super) const ORDER: u32 = STREAM;

impl Draws {
    pub(super) fn new(seed: u64, epoch: u64, image: u64, purpose: Purpose) -> Self {
        let key = [seed as u32, (seed >> 32) as u32];
        Self { key, image: image as u32, epoch: epoch as u32, purpose: STREAM + purpose as u32, next: 0 }
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    pub(super) fn uniform(&mut self) -> f64 {
        let block = philox4x32([self.image, self.epoch, self.next, self.purpose], self.key);
        self.next += 1;
        ((u64::from(block[0]) | u64::from(block[1]) << 32) >> 11) as f64 * (-53f64).exp2()
    }

    /// Uniform in [`low`, `high`).
    pub(super) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.uniform()
    }

    /// Uniform in `0..bound`, up to a bias below `bound` x 2^-53.
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        ((self.uniform() * f64::from(bound)) as u32).min(bound.saturating_sub(1))
    }

    pub(super) fn chance(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }

    /// A draw of Beta(`alpha`, `alpha`), as the ratio of two Gamma draws.
    pub(super) fn beta(&mut self, alpha: f64) -> f64 {
        let (x, y) = (self.ln_gamma(alpha), self.ln_gamma(alpha));
        1.0 / (1.0 + (y - x).exp())
    }

    /// The logarithm of a draw of Gamma(`shape`, 1), by Marsaglia and Tsang 2000. A shape below 1
    /// is reached from `shape + 1` by the factor U^(1 / shape); logarithms keep tiny draws from 0.
    fn ln_gamma(&mut self, shape: f64) -> f64 {
        let boost = if shape < 1.0 { (1.0 - self.uniform()).ln() / shape } else { 0.0 };
        let d = if shape < 1.0 { shape + 1.0 } else { shape } - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && (1.0 - self.uniform()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return (d * v).ln() + boost;
            }
        }
    }

    /// A standard normal draw (Box and Muller 1958).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beta_has_its_mean_and_variance() {
        for alpha in [0.2, 0.8, 1.0, 4.0] {
            let draws: Vec<f64> = (0..20_000).map(|i| Draws::new(3, 1, i, Purpose::Mix).beta(alpha)).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            // Of Beta(a, a): 1/2 and 1 / (4 (2 a + 1)). Five standard errors are below 0.018.
            assert!((mean - 0.5).abs() < 0.018, "alpha {alpha}: mean {mean}");
            assert!((variance - 0.25 / (2.0 * alpha + 1.0)).abs() < 0.008, "alpha {alpha}: variance {variance}");
        }
    }

    #[test]
    fn streams_differ_by_image_epoch_seed_and_purpose() {
        let mut seen: Vec<u64> = Vec::new();
        for (seed, epoch, image) in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)] {
            for purpose in [Purpose::Crop, Purpose::Flip] {
                let mut draws = Draws::new(seed, epoch, image, purpose);
                seen.extend([draws.uniform().to_bits(), draws.uniform().to_bits()]);
            }
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 16);
    }
}
