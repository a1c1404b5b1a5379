//! Benchmarks of kernels on a GPU, in percent of its measured peaks: products, those of experts,
//! attention, and streaming kernels.
//!
//! Every result is checked before it is timed. Sampled elements of products, and sampled rows of
//! attention and of its gradients, are compared with sums in f64. Streaming kernels are compared
//! with the CPU's, which the oracles check. Times are the device's own, of enough calls in a row
//! that launching is hidden. Operands are random numbers, because zeros draw less power.

mod attention;
mod experts;
mod fp8;
mod products;
mod streaming;

pub use attention::attention;
pub use experts::experts;
pub use fp8::fp8;
pub use products::products;
pub use streaming::streaming;

use crate::cuda::peak::Peaks;
use crate::error::{Result as TensorResult, TensorError};
use crate::{DType, Device};

/// A kernel that could not be timed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is wrong.
    #[error(
        "{what} is wrong on this GPU: {found} where {wanted} was expected; please report it with the GPU's name and the driver's version"
    )]
    Wrong {
        /// The kernel and the element.
        what: String,
        /// The result of the kernel.
        found: f64,
        /// The expected result.
        wanted: f64,
    },
    /// It cannot be run.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

type Result<T> = std::result::Result<T, Error>;

/// The sizes to time.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Products: rows of the activations, inputs and outputs of the layer.
    pub layers: Vec<[usize; 3]>,
    /// Mixtures: rows of all experts, experts, inputs and outputs of one.
    pub experts: Vec<[usize; 4]>,
    /// Attention: columns of a head, query heads, key and value heads, tokens of a sequence.
    pub attention: Vec<[usize; 4]>,
    /// Tokens of an attention in all: so many are made of as many sequences as fit.
    pub tokens: usize,
    /// Streaming kernels: rows, and columns of the residual stream; the feed-forward layer has four
    /// times as many.
    pub rows: [usize; 2],
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Parameters of an optimizer step.
    pub parameters: usize,
}

impl Sizes {
    /// The shapes of GPT-2 124M, Llama 1B and Llama 8B, attention from 1k to 16k tokens, and
    /// buffers that no cache holds.
    pub fn of_a_gpu() -> Sizes {
        let layers = [[768, 2304], [3072, 768], [2048, 8192], [8192, 2048], [4096, 14_336], [4096, 6144]];
        let lengths = [1024, 2048, 4096, 8192, 16_384];
        let heads = [[64, 32, 32], [128, 16, 16], [128, 32, 8]];
        Sizes {
            layers: layers.map(|[inputs, outputs]| [16_384, inputs, outputs]).into(),
            // Mixtral 8x7B and Qwen3 30B-A3B, up and down.
            experts: vec![
                [16_384, 8, 4096, 28_672],
                [16_384, 8, 14_336, 4096],
                [65_536, 128, 2048, 1536],
                [65_536, 128, 768, 2048],
            ],
            attention: heads.into_iter().flat_map(|[d, h, kv]| lengths.map(|length| [d, h, kv, length])).collect(),
            tokens: 16_384,
            rows: [16_384, 4096],
            vocabulary: 50_304,
            parameters: 128 << 20,
        }
    }

    /// Everything once, tiny: to test the timing itself where a GPU is emulated.
    pub fn tiny() -> Sizes {
        Sizes {
            layers: vec![[32, 16, 48]],
            experts: vec![[40, 3, 16, 24]],
            attention: vec![[8, 2, 1, 16], [16, 2, 2, 32]],
            tokens: 32,
            rows: [6, 16],
            vocabulary: 11,
            parameters: 300,
        }
    }
}

/// A timed kernel.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Unique among all.
    pub name: String,
    /// `product`, `experts`, `attention`, `streaming`, or `fp8` for products of eight bits and the
    /// rounding of their operands.
    pub kind: &'static str,
    /// `forward`, `input-gradient`, `weight-gradient`, `backward`, or the name of a streaming
    /// kernel.
    pub form: &'static str,
    /// Of the operands.
    pub dtype: DType,
    /// Its sizes by name.
    pub sizes: Vec<(&'static str, usize)>,
    /// Operations that it has to do.
    pub flops: f64,
    /// Bytes that it has to move.
    pub bytes: f64,
    /// Median seconds of a call.
    pub seconds: f64,
    /// Of the measured peak of products in this dtype, or of copies for what streams.
    pub peak_share: f64,
}

impl Timing {
    fn of_products(self, peaks: &Peaks) -> Timing {
        Timing { peak_share: self.flops / self.seconds / peaks.flops(self.dtype), ..self }
    }
}

/// Calls between two marks, so that launching one after the other is hidden; and samples of which
/// the median counts.
const CALLS_MAX: usize = 10;
const SAMPLES_LEAST: usize = 3;
/// Seconds that the calls between two marks should take.
const SAMPLE_S: f64 = 2e-3;

/// Median seconds of a call by the device's clock; calls are made for about `seconds`.
///
/// # Errors
/// Those of the call, and a device that has no clock.
pub fn time(device: &Device, seconds: f64, mut call: impl FnMut() -> TensorResult<()>) -> TensorResult<f64> {
    if device.as_cuda().is_none() {
        return Err(TensorError::NotImplemented { device: device.name(), op: "timing by the device's clock" });
    }
    let mut sample = |calls: usize| -> TensorResult<f64> {
        let began = device.mark()?;
        (0..calls).try_for_each(|_| call())?;
        let ended = device.mark()?;
        device.synchronize()?;
        began.seconds_to(&ended)
    };
    // The first one compiles, searches and allocates.
    sample(1)?;
    let calls = (SAMPLE_S / sample(1)?.max(1e-9)).ceil().clamp(1.0, CALLS_MAX as f64) as usize;
    let (mut samples, mut spent) = (Vec::new(), 0.0);
    while samples.len() < SAMPLES_LEAST || spent < seconds {
        let took = sample(calls)?;
        spent += took.max(1e-6);
        samples.push(took / calls as f64);
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[samples.len() / 2].max(1e-9))
}

/// Fails unless two rows are one but for rounding: their distance relative to the wanted one's
/// length, plus nothing where both are nothing.
fn near<X: Copy + Into<f64>>(what: impl Fn() -> String, found: &[X], wanted: &[X], tolerance: f64) -> Result<()> {
    near_sums(what, found, wanted, tolerance, 0.0)
}

/// As [`near`], of sums whose terms may cancel: `terms` is the length of all of them together,
/// whose rounding in f32 stays.
fn near_sums<X: Copy + Into<f64>>(
    what: impl Fn() -> String,
    found: &[X],
    wanted: &[X],
    tolerance: f64,
    terms: f64,
) -> Result<()> {
    let length = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = || found.iter().zip(wanted).map(|(found, wanted)| ((*found).into(), (*wanted).into()));
    let distance = length(&mut pairs().map(|(found, wanted): (f64, f64)| found - wanted));
    let allowed = tolerance * length(&mut wanted.iter().map(|x| (*x).into())) + 2f64.powi(-20) * terms + 1e-12;
    if found.len() == wanted.len() && distance <= allowed {
        return Ok(());
    }
    let worst = pairs().max_by(|a, b| (a.0 - a.1).abs().total_cmp(&(b.0 - b.1).abs()));
    let (found, wanted) = worst.unwrap_or((f64::NAN, f64::NAN));
    Err(Error::Wrong { what: what(), found, wanted })
}

/// `count` places among `len`, the first and the last among them.
fn places(len: usize, count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).map(|at| at * (len - 1) / (count - 1).max(1)).collect();
    all.dedup();
    all
}

/// The relative error that rounding to a dtype leaves, for sums in f32 of products.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-9),
        _ => 1e-5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_differ_name_the_worst_element() {
        assert!(near(String::new, &[1.0, 2.001], &[1.0, 2.0], 1e-3).is_ok());
        let error = near(|| "row 3 of a product".into(), &[1.0, 2.1], &[1.0, 2.0], 1e-3).unwrap_err().to_string();
        assert!(error.starts_with("row 3 of a product is wrong on this GPU: 2.1 where 2 was"), "{error}");
        assert!(near(String::new, &[f64::NAN], &[1.0], 0.1).is_err());
        assert_eq!(places(100, 4), [0, 33, 66, 99]);
        assert_eq!(places(2, 4), [0, 1]);
    }

    #[test]
    fn a_processor_is_not_timed_by_a_device() {
        let cpu = Device::cpu(crate::cpu::Isa::detect(), 1, None);
        assert!(time(&cpu, 0.0, || Ok(())).unwrap_err().to_string().contains("cpu"));
    }
}
