//! CUDA: the kernels as sources and as a table, and what compiles and launches them.
//!
//! The sources in `kernels/` are CUDA C++ without any header but their own, so that NVRTC alone
//! compiles them, for sm_80 and later; the same text is compiled by the host's C++ compiler against
//! `emulation/` and checked there. [`kernels`] lists every entry point.
//!
//! [`driver::Driver`] is what a device is asked to do, and [`nccl::Nccl`] what several are asked to
//! do together. [`nvidia`] does it by NVIDIA's driver, which is loaded when a GPU is asked for;
//! [`fake`] does it without a GPU, for tests. Nothing here knows tensors: `trainyard-tensor`
//! launches.

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

/// Looks for GPU `ordinal` among those that the process sees, without opening it.
///
/// # Errors
/// What the machine lacks for it, in a sentence.
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
/// What the machine lacks for it, in a sentence.
pub fn open(ordinal: usize) -> Result<std::sync::Arc<dyn driver::Driver>> {
    Ok(std::sync::Arc::new(nvidia::Nvidia::open(ordinal)?))
}

/// Which GPU `ordinal` is, whatever this process calls it: its UUID, the same in every process of
/// the host.
///
/// # Errors
/// What the machine lacks for it, in a sentence.
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
