//! CUDA: the kernels as sources and as a table, and what compiles and launches them.
//!
//! The sources in `kernels/` are CUDA C++ without any header but their own, so that NVRTC alone compiles them, for sm_80 and later; the same text is
//! compiled by the host's C++ compiler against `emulation/` and checked there. [`kernels`] lists every entry point.
//!
//! [`driver::Driver`] is what a device is asked to do; `nvidia` does it on one (feature `nvidia`), [`fake`] without, for tests. Nothing here knows tensors: `trainyard-tensor` launches.

pub mod cache;
pub mod driver;
#[cfg(feature = "emulation")]
pub mod emulated;
mod error;
pub mod fake;
pub mod find;
pub mod kernels;
#[cfg(feature = "nvidia")]
pub mod nvidia;
#[cfg(feature = "emulation")]
pub mod tested;

pub use error::{CudaError, Result};

/// Whether there is a GPU `ordinal` among those that the process sees, without opening it.
///
/// # Errors
/// What the machine or this build lacks for it, in a sentence.
pub fn check(ordinal: usize) -> Result<()> {
    #[cfg(feature = "nvidia")]
    return nvidia::Nvidia::find(ordinal).map(drop);
    #[cfg(not(feature = "nvidia"))]
    {
        let _ = ordinal;
        Err(CudaError::NotBuilt)
    }
}

/// GPUs that the process sees; 0 where there is no driver.
pub fn count() -> usize {
    #[cfg(feature = "nvidia")]
    return nvidia::Nvidia::count();
    #[cfg(not(feature = "nvidia"))]
    0
}

/// GPU `ordinal` of those that the process sees.
///
/// # Errors
/// What the machine or this build lacks for it, in a sentence.
pub fn open(ordinal: usize) -> Result<std::sync::Arc<dyn driver::Driver>> {
    #[cfg(feature = "nvidia")]
    return Ok(std::sync::Arc::new(nvidia::Nvidia::open(ordinal)?));
    #[cfg(not(feature = "nvidia"))]
    {
        let _ = ordinal;
        Err(CudaError::NotBuilt)
    }
}
