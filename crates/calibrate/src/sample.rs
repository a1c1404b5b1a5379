//! The machine's speeds, now.

use std::time::Instant;
use trainyard_engine::config::Inputs;
use trainyard_sim::machine::Speeds;
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::cpu::peak::{self, Peaks};
use trainyard_tensor::{DType, Device, Purpose, Tensor, TensorError, ops};

/// Elements of each of the two buffers that a copy goes between: 32 MiB.
const COPY_ELEMENTS: usize = 8 << 20;

/// Samples peaks and copies on all cores; one sample takes some fifteen milliseconds, during which nothing else should run.
pub struct Sampler {
    device: Device,
    peaks: Peaks,
    from: Tensor,
}

impl Sampler {
    /// Measures the peaks once, to know which instruction reaches them.
    ///
    /// # Errors
    ///
    /// No memory for the buffers of the copy.
    pub fn new() -> Result<Sampler, TensorError> {
        let device = Device::cpu(Isa::detect(), Inputs::of_this_machine().cores, None);
        let from = device.zeros([COPY_ELEMENTS], DType::F32, Purpose::Workspace)?;
        let peaks = peak::measure(device.as_cpu().expect("a CPU device"));
        Ok(Sampler { device, peaks, from })
    }

    /// One sample.
    ///
    /// # Errors
    ///
    /// As [`Sampler::new`].
    pub fn sample(&self) -> Result<Speeds, TensorError> {
        let cpu = self.device.as_cpu().expect("a CPU device");
        let mut to = self.device.empty([COPY_ELEMENTS], DType::F32, Purpose::Workspace)?;
        let mut fastest = f64::INFINITY;
        // The buffer is the same every time, so only the first copy may find it cold.
        for _ in 0..3 {
            let start = Instant::now();
            ops::cast_into(&self.from, &mut to)?;
            fastest = fastest.min(start.elapsed().as_secs_f64());
        }
        Ok(Speeds {
            f32_flops: self.peaks.sample(cpu, DType::F32),
            bf16_flops: self.peaks.sample(cpu, DType::BF16),
            copy_bytes_per_s: 8.0 * COPY_ELEMENTS as f64 / fastest,
        })
    }
}

/// The speeds while something ran between two samples.
pub fn between(before: Speeds, after: Speeds) -> Speeds {
    let mean = |a: f64, b: f64| (a * b).sqrt();
    Speeds {
        f32_flops: mean(before.f32_flops, after.f32_flops),
        bf16_flops: mean(before.bf16_flops, after.bf16_flops),
        copy_bytes_per_s: mean(before.copy_bytes_per_s, after.copy_bytes_per_s),
    }
}
