//! Samples the machine's current speeds.
//!
//! The peak of arithmetic on registers is a poor measure of the current speed. Neighbours that take
//! time on the same core, memory bandwidth or last-level cache slow down products, but not such a
//! peak. The unit of arithmetic is therefore a product of middling shape, by the kernel that
//! training calls. The unit of memory traffic is a copy. Both are medians.

use crate::CalibrateError;
use crate::probe_group::ProbeGroup;
use std::cell::RefCell;
use std::time::Instant;
use trainyard_base::median;
use trainyard_sim::machine::Speeds;
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::{DType, Device, Purpose, Tensor, TensorError, ops};

/// Elements of each of the two buffers that a copy goes between: 32 MiB.
const COPY_ELEMENTS: usize = 8 << 20;
/// Rows, columns and inner length of the reference product.
const PRODUCT: [usize; 3] = [256, 768, 768];
/// Number of weights that the product takes in turn. Together they exceed an L2 cache.
const WEIGHTS: usize = 4;
/// Seconds of each of the three parts of a sample. A part has at least three repetitions.
const PART_S: f64 = 3e-3;

/// Samples products and copies on all cores. One sample takes about fifteen milliseconds, during
/// which nothing else should run. Processes sample at the same time, each on its share of the
/// cores, and each gets its own speeds.
pub struct Sampler<'c> {
    group: &'c ProbeGroup,
    device: Device,
    from: Tensor,
    /// Input and weights in bf16 and in f32.
    operands: [(Tensor, Vec<Tensor>); 2],
    next: RefCell<usize>,
}

impl<'c> Sampler<'c> {
    /// Allocates the operands.
    ///
    /// # Errors
    ///
    /// Not enough memory for them, or a process that does not join.
    pub fn new(group: &'c ProbeGroup) -> Result<Sampler<'c>, CalibrateError> {
        let device = Device::cpu(Isa::detect(), group.threads() as usize, None);
        let from = device.zeros([COPY_ELEMENTS], DType::F32, Purpose::Workspace)?;
        let [m, n, k] = PRODUCT;
        let matrix = |rows: usize, dtype| device.zeros([rows, k], dtype, Purpose::Workspace);
        let operands = |dtype| -> Result<(Tensor, Vec<Tensor>), TensorError> {
            Ok((matrix(m, dtype)?, (0..WEIGHTS).map(|_| matrix(n, dtype)).collect::<Result<_, _>>()?))
        };
        let operands = [operands(DType::BF16)?, operands(DType::F32)?];
        let sampler = Sampler { group, device, from, operands, next: RefCell::new(0) };
        // The first sample wakes threads and touches memory.
        sampler.sample()?;
        Ok(sampler)
    }

    /// Takes one sample.
    ///
    /// # Errors
    ///
    /// As [`Sampler::new`].
    pub fn sample(&self) -> Result<Speeds, CalibrateError> {
        self.group.meet()?;
        let [bf16_flops, f32_flops] = [self.product(0)?, self.product(1)?];
        let mut to = self.device.empty([COPY_ELEMENTS], DType::F32, Purpose::Workspace)?;
        let copy_s = repeated(|| ops::cast_into(&self.from, &mut to))?;
        Ok(Speeds { f32_flops, bf16_flops, copy_bytes_per_s: 8.0 * COPY_ELEMENTS as f64 / copy_s })
    }

    /// Operations per second of the reference product.
    fn product(&self, dtype: usize) -> Result<f64, TensorError> {
        let (x, weights) = &self.operands[dtype];
        let seconds = repeated(|| {
            let mut next = self.next.borrow_mut();
            *next = (*next + 1) % WEIGHTS;
            ops::linear(x, &weights[*next], None, Activation::None, None, false).map(drop)
        })?;
        let [m, n, k] = PRODUCT;
        Ok(2.0 * (m * n * k) as f64 / seconds)
    }
}

/// Median seconds of `body`, after one run that does not count.
fn repeated(mut body: impl FnMut() -> Result<(), TensorError>) -> Result<f64, TensorError> {
    body()?;
    let (began, mut times) = (Instant::now(), Vec::new());
    while times.len() < 3 || began.elapsed().as_secs_f64() < PART_S {
        let start = Instant::now();
        body()?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times).expect("at least three"))
}

/// The speeds during something that ran between two samples.
pub fn between(before: Speeds, after: Speeds) -> Speeds {
    let mean = |a: f64, b: f64| (a * b).sqrt();
    Speeds {
        f32_flops: mean(before.f32_flops, after.f32_flops),
        bf16_flops: mean(before.bf16_flops, after.bf16_flops),
        copy_bytes_per_s: mean(before.copy_bytes_per_s, after.copy_bytes_per_s),
    }
}

/// The largest factor by which a speed differs between two samples.
pub fn factor(one: &Speeds, other: &Speeds) -> f64 {
    let factor = |a: f64, b: f64| (a / b).max(b / a);
    factor(one.f32_flops, other.f32_flops)
        .max(factor(one.bf16_flops, other.bf16_flops))
        .max(factor(one.copy_bytes_per_s, other.copy_bytes_per_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_rates_and_what_lies_between_two_is_their_mean() {
        let sample = Sampler::new(&ProbeGroup::alone()).unwrap().sample().unwrap();
        assert!(sample.f32_flops > 1e6 && sample.bf16_flops > 1e6 && sample.copy_bytes_per_s > 1e6, "{sample:?}");
        let four = Speeds { f32_flops: 4.0 * sample.f32_flops, ..sample };
        assert!((between(sample, four).f32_flops / sample.f32_flops - 2.0).abs() < 1e-9);
        assert!((factor(&sample, &four) - 4.0).abs() < 1e-9 && (factor(&four, &sample) - 4.0).abs() < 1e-9);
        assert_eq!(factor(&sample, &sample), 1.0);
    }
}
