//! The measured peaks of a GPU: the denominators of utilisation there.
//!
//! Only a kernel as good as the library's products can keep a GPU's registers busy, so the peak is
//! that of the fastest square product. Sides double from 64 until a product takes a millisecond,
//! which is about 8,192 in bf16 on a Hopper. Operands are random numbers, because zeros draw less
//! power and let the clock rise.

use super::{Cuda, linear};
use crate::error::Result;
use crate::ops::fp8::{Fp8, Slot};
use crate::{DType, Device, Element, Purpose, Tensor, bf16, f16};
use std::sync::Arc;

/// The measured peaks of one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Operations a second of products in f32, as they are computed in training.
    pub f32_flops: f64,
    /// The same in bf16, with f32 sums.
    pub bf16_flops: f64,
    /// The same in f16.
    pub f16_flops: f64,
    /// Bytes a second, read plus written, of a copy that no cache holds.
    pub copy_bytes_per_s: f64,
}

impl Peaks {
    /// The peak, operations a second, of products whose operands have type `dtype`.
    pub fn flops(&self, dtype: DType) -> f64 {
        match dtype {
            DType::BF16 => self.bf16_flops,
            DType::F16 => self.f16_flops,
            _ => self.f32_flops,
        }
    }
}

/// Sides of products, and bytes that are copied.
const SIDES: std::ops::RangeInclusive<usize> = 64..=16_384;
const BYTES: std::ops::RangeInclusive<usize> = (1 << 16)..=(1 << 30);
/// Seconds of a product or copy that is long enough: launching is hidden, and the clock has settled
/// after a few.
const LONG_S: f64 = 1e-3;
/// Of the last size, how many are timed; the fastest counts.
const ROUNDS: usize = 8;

/// Measures the peaks of a GPU, in memory of its own that is given back: some tenths of a second,
/// and at most 2 GiB or a quarter of what is free.
///
/// # Errors
/// Of the driver.
pub fn measure(cuda: &Arc<Cuda>) -> Result<Peaks> {
    // A device of its own, because a run's pool is to hold and count nothing of this.
    let device = Device::cuda(Arc::clone(cuda), None);
    let bytes_max = cuda.memory()?.0 / 4;
    Ok(Peaks {
        f32_flops: product(&device, DType::F32, bytes_max)?,
        bf16_flops: product(&device, DType::BF16, bytes_max)?,
        f16_flops: product(&device, DType::F16, bytes_max)?,
        copy_bytes_per_s: copy(&device, bytes_max)?,
    })
}

/// Measures the peak, operations a second, of products of eight bits (E4M3, f32 sums, results in
/// bf16), as [`measure`] does the others.
///
/// # Errors
/// Of the driver, on a GPU that has none among them.
pub fn fp8(cuda: &Arc<Cuda>) -> Result<f64> {
    let device = Device::cuda(Arc::clone(cuda), None);
    let number = |x: f32| device.tensor([1], &[x], Purpose::Workspace);
    let amax = device.zeros([1], DType::U32, Purpose::Workspace)?;
    // Numbers in [-1, 1).
    let slot = Slot { scale: number(256.0)?, inverse: number(1.0 / 256.0)?, amax };
    let workspace = device.empty([super::PRODUCT_WORKSPACE / 4], DType::F32, Purpose::Workspace)?;
    of_squares(DType::BF16, cuda.memory()?.0 / 4, |side| {
        let codes = |seed| -> Result<Tensor> {
            let wide = random(&device, &[side, side], DType::BF16, seed)?;
            let codes = device.empty([side, side], DType::U8, Purpose::Workspace)?;
            super::fp8::round(cuda, &wide, Fp8::E4M3, &slot, Some(&codes), None)?;
            Ok(codes)
        };
        let (a, b) = (codes(1)?, codes(2)?);
        let d = device.empty([side, side], DType::BF16, Purpose::Workspace)?;
        let factors = [&a, &b].map(|codes| (codes, Fp8::E4M3, &slot));
        fastest(&device, || super::fp8::input_gradient(cuda, factors, &d, &workspace))
    })
}

fn product(device: &Device, dtype: DType, bytes_max: usize) -> Result<f64> {
    of_squares(dtype, bytes_max, |side| {
        let operand = |seed| random(device, &[side, side], dtype, seed);
        let (a, b, d) = (operand(1)?, operand(2)?, device.empty([side, side], dtype, Purpose::Workspace)?);
        let workspace = device.empty([super::PRODUCT_WORKSPACE / 4], DType::F32, Purpose::Workspace)?;
        let cuda = device.as_cuda().expect("a GPU");
        let form = linear::plain("peak", [side; 3], dtype, dtype)?;
        let operands = linear::operands(a.region(false), b.region(false), d.region(true), &workspace);
        fastest(device, || cuda.product(&form, &operands))
    })
}

/// The best rate of square products, of which one of a side takes so many seconds; none is larger
/// than three matrices of `dtype` in `bytes_max`.
fn of_squares(dtype: DType, bytes_max: usize, product: impl Fn(usize) -> Result<f64>) -> Result<f64> {
    let (mut side, mut rate) = (*SIDES.start(), 0.0f64);
    loop {
        let seconds = product(side)?;
        rate = (2.0 * (side as f64).powi(3) / seconds).max(rate);
        let next = 3 * dtype.size() * (2 * side).pow(2);
        if seconds >= LONG_S || 2 * side > *SIDES.end() || next > bytes_max {
            return Ok(rate);
        }
        side *= 2;
    }
}

fn copy(device: &Device, bytes_max: usize) -> Result<f64> {
    let mut bytes = *BYTES.start();
    loop {
        let from = random(device, &[bytes / 4], DType::F32, 3)?;
        let mut to = device.empty([bytes / 4], DType::F32, Purpose::Workspace)?;
        let seconds = fastest(device, || to.copy_from(&from))?;
        // What lies in the last-level cache is copied faster, and is not what this is about: the
        // last size counts.
        if 2 * bytes > *BYTES.end() || 4 * bytes > bytes_max || seconds >= LONG_S {
            return Ok(2.0 * bytes as f64 / seconds);
        }
        bytes *= 2;
    }
}

/// Seconds of the fastest of some calls, by the device's clock.
fn fastest(device: &Device, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    call()?;
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let began = device.mark()?;
        call()?;
        let ended = device.mark()?;
        device.synchronize()?;
        best = best.min(began.seconds_to(&ended)?);
    }
    Ok(best.max(1e-9))
}

/// Numbers in [-1, 1) that repeat only after some hundred thousand: as [`random_value`] says.
pub fn random(device: &Device, shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor> {
    fn filled<T: Element>(device: &Device, shape: &[usize], seed: u64) -> Result<Tensor> {
        let block: Vec<T> = (0..BLOCK).map(|at| T::from_f32(random_value(seed, at))).collect();
        let count = shape.iter().product();
        let mut all = Vec::with_capacity(count);
        while all.len() < count {
            all.extend_from_slice(&block[..BLOCK.min(count - all.len())]);
        }
        device.tensor(shape, &all, Purpose::Workspace)
    }
    match dtype {
        DType::BF16 => filled::<bf16>(device, shape, seed),
        DType::F16 => filled::<f16>(device, shape, seed),
        _ => filled::<f32>(device, shape, seed),
    }
}

/// A prime, so that rows of no usual length are alike.
const BLOCK: usize = 100_003;

/// Element `at` of [`random`], before it is rounded to its dtype (splitmix64 of its place in the
/// block).
pub fn random_value(seed: u64, at: usize) -> f32 {
    let mut x = ((at % BLOCK) as u64).wrapping_add(seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 40) as f32 / 8_388_608.0 - 1.0
}
