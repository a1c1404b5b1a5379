//! The speed of copies between the host's pinned memory and the GPU's, and the slowdown of copies
//! and products beside each other.

use super::{Cuda, enter_lane, lane, peak};
use crate::error::Result;
use crate::{DType, Device, Purpose};
use std::sync::Arc;

/// Measured copies between host and device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes a second to the device.
    pub to_device_bytes_per_s: f64,
    /// Bytes a second from it.
    pub to_host_bytes_per_s: f64,
    /// By what factor products take longer beside copies, at least 1.
    pub compute_slowed: f64,
    /// By what factor copies take longer beside products, at least 1.
    pub copies_slowed: f64,
}

/// The lane that copies, beside lane 0, which computes.
const COPYING: usize = 1;
/// Number of repetitions between two marks.
const ROUNDS: usize = 8;

/// Copies `bytes` to and from the device, and beside products of this side.
///
/// # Errors
/// Of the driver.
pub fn measure(cuda: &Arc<Cuda>, bytes: usize, side: usize) -> Result<Link> {
    let device = Device::cuda(Arc::clone(cuda), None);
    let buffer = device.empty([bytes / 4], DType::F32, Purpose::Workspace)?;
    let (pinned, at) = (cuda.take_pinned(bytes)?, lane());
    let matrix = |seed| peak::random(&device, &[side, side], DType::BF16, seed);
    let (x, w) = (matrix(1)?, matrix(2)?);
    let multiply = || crate::ops::linear_input_gradient(&x, &w).map(drop);
    let copy = |to_device: bool| -> Result<()> {
        let stream = cuda.stream()?;
        let region = buffer.region(to_device);
        // SAFETY: both sides have so many bytes, and nothing else uses them before the streams are
        // waited for below.
        Ok(unsafe {
            match to_device {
                true => cuda.driver.upload(stream, region, pinned.data()),
                false => cuda.driver.download(stream, pinned.data(), region),
            }
        }?)
    };
    // Seconds of so many products and copies, each by the clock of its own lane.
    let run = |products: usize, copies: usize, to_device: bool| -> Result<[f64; 2]> {
        device.synchronize_lanes()?;
        enter_lane(COPYING);
        let began = device.mark()?;
        (0..copies).try_for_each(|_| copy(to_device))?;
        let copied = [began, device.mark()?];
        enter_lane(0);
        let began = device.mark()?;
        (0..products).try_for_each(|_| multiply())?;
        let multiplied = [began, device.mark()?];
        device.synchronize_lanes()?;
        Ok([multiplied[0].seconds_to(&multiplied[1])?, copied[0].seconds_to(&copied[1])?])
    };
    let measured = || -> Result<Link> {
        run(1, 1, true)?;
        let [to_device, to_host] = [run(0, ROUNDS, true)?[1], run(0, ROUNDS, false)?[1]].map(|s| s.max(1e-9));
        let one = run(ROUNDS, 0, true)?[0].max(1e-9) / ROUNDS as f64;
        // As many products as take what the copies take.
        let products = (to_device / one).ceil().clamp(1.0, 1000.0) as usize;
        let alone = run(products, 0, true)?[0].max(1e-9);
        let [beside, copies] = run(products, ROUNDS, true)?;
        let moved = (ROUNDS * buffer.bytes()) as f64;
        Ok(Link {
            to_device_bytes_per_s: moved / to_device,
            to_host_bytes_per_s: moved / to_host,
            compute_slowed: (beside / alone).max(1.0),
            copies_slowed: (copies / to_device).max(1.0),
        })
    };
    let result = measured();
    // Nothing may work on the buffers when they are given back.
    let waited = device.synchronize_lanes();
    enter_lane(at);
    cuda.give_pinned(pinned);
    waited?;
    result
}
