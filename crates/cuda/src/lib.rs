//! CUDA: the kernels, as sources and as a table, and the code that compiles and launches them.
//!
//! The sources in `kernels/` are CUDA C++ that includes only their own headers, so that NVRTC alone
//! compiles them, for sm_80 and later. The host's C++ compiler compiles the same text against
//! `emulation/` to check it there. [`kernels`] lists every entry point.
//!
//! [`driver::Driver`] is the interface of a device, and [`nccl::Nccl`] that of several devices
//! together. [`nvidia`] implements them by NVIDIA's driver, which is loaded when a GPU is asked
//! for, and [`fake`] without a GPU, for tests. Nothing here knows tensors; `trainyard-tensor`
//! launches the kernels.

pub mod cache;
pub mod driver;
pub mod emulated;
mod error;
pub mod fake;
pub mod find;
pub mod fp8;
pub mod kernels;
pub mod nccl;
pub mod nvidia;
pub mod stand_in;
pub mod tested;

pub use error::{CudaError, Result};

/// Checks without opening it that GPU `ordinal` exists among those that the process sees.
///
/// # Errors
/// The missing part of the machine, in a sentence.
pub fn check(ordinal: usize) -> Result<()> {
    nvidia::Nvidia::find(ordinal).map(drop)
}

/// GPUs that the process sees; 0 where there is no driver.
pub fn count() -> usize {
    nvidia::Nvidia::count()
}

/// GPU `ordinal` of those that the process sees.
///
/// # Errors
/// A sentence that names the missing part of the machine.
pub fn open(ordinal: usize) -> Result<std::sync::Arc<dyn driver::Driver>> {
    Ok(std::sync::Arc::new(nvidia::Nvidia::open(ordinal)?))
}

/// The UUID of GPU `ordinal`, which is the same in every process of the host.
///
/// # Errors
/// The missing part of the machine, in a sentence.
pub fn identity(ordinal: usize) -> Result<[u8; 16]> {
    nvidia::Nvidia::identity(ordinal)
}

/// The version of NCCL that would be used, without a GPU: 10000 major + 100 minor + patch.
///
/// # Errors
/// That it is not found or too old, in a sentence.
pub fn nccl_version() -> Result<u32> {
    nvidia::nccl_version()
}
