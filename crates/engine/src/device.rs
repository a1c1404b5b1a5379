//! The device of a rank, as its configuration says.

use crate::Result;
use crate::config::{DeviceKind, Resolved};
use crate::predict::Prediction;
use crate::state::does_not_fit;
use std::sync::Arc;
use trainyard_comm::{Communicator, Environment};
use trainyard_tensor::cuda::Cuda;
use trainyard_tensor::{Computes, Device};

/// Whose kernels a configuration asks for.
pub fn computes(resolved: &Resolved) -> Computes {
    match resolved.config.compute.device {
        DeviceKind::Cpu => Computes::Cpu,
        DeviceKind::Cuda(_) => Computes::Cuda,
    }
}

/// Whether a device that is asked for can be opened at all: asked before there is anything to wait for.
///
/// # Errors
/// What the machine lacks for a GPU.
pub fn check(resolved: &Resolved, world: &Communicator) -> Result<()> {
    let DeviceKind::Cuda(ordinal) = resolved.config.compute.device else { return Ok(()) };
    Ok(Cuda::check(ordinal.map_or_else(|| place(Some(world)), Ok)?)?)
}

/// Opens the device for a rank whose step needs what was predicted.
///
/// # Errors
/// On a GPU: what the machine lacks for it, or that a step does not fit in what is free.
pub fn open(resolved: &Resolved, world: Option<&Communicator>, prediction: Option<&Prediction>) -> Result<Device> {
    let limit = resolved.config.memory.limit.map(|limit| limit.0 as usize);
    let DeviceKind::Cuda(ordinal) = resolved.config.compute.device else {
        return Ok(Device::cpu(resolved.isa, resolved.threads, limit));
    };
    let ordinal = ordinal.map_or_else(|| place(world), Ok)?;
    let cuda = Arc::new(Cuda::open(ordinal, resolved.threads)?.with_tf32(resolved.config.precision.tf32));
    if let Some(prediction) = prediction {
        let (needed, (free, total)) = (prediction.memory.peak_total(), cuda.memory()?);
        if needed > free {
            let mib = |bytes: usize| bytes.div_ceil(1 << 20);
            return Err(does_not_fit(format!(
                "a step needs {} MiB of GPU memory, and {} of the {} MiB of {cuda:?} are free: free the GPU of other \
                 processes, take a smaller training.micro_batch_size or set activation_checkpointing.mode = \"full\"",
                mib(needed),
                mib(free),
                mib(total)
            )));
        }
    }
    Ok(Device::cuda(cuda, limit))
}

/// The rank's place among those on its host, which is that of its GPU.
pub(crate) fn place(world: Option<&Communicator>) -> Result<usize> {
    let Some(world) = world else { return Ok(0) };
    match Environment::detect()?.local_rank {
        Some(local) => Ok(local as usize),
        None => Ok(world.rank()),
    }
}
