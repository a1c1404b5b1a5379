//! CUDA: the kernels as sources and as a table, and what compiles and launches them.
//!
//! The sources in `kernels/` are CUDA C++ without any header but their own, so that NVRTC alone
//! compiles them, for sm_80 and later; the same text is compiled by the host's C++ compiler against
//! `emulation/` and checked there. [`kernels`] lists every entry point.
//!
//! [`driver::Driver`] is what a device is asked to do, and [`nccl::Nccl`] what several are asked to
//! do together; `nvidia` does it (feature `nvidia`), [`fake`] without a GPU, for tests. Nothing
//! here knows tensors: `trainyard-tensor` launches.

pub mod cache;
pub mod driver;
#[cfg(feature = "emulation")]
pub mod emulated;
mod error;
pub mod fake;
pub mod find;
pub mod fp8;
pub mod kernels;
pub mod nccl;
#[cfg(feature = "nvidia")]
pub mod nvidia;
#[cfg(feature = "emulation")]
pub mod stand_in;
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

/// Which GPU `ordinal` is, whatever this process calls it: its UUID, the same in every process of
/// the host.
///
/// # Errors
/// What the machine or this build lacks for it, in a sentence.
pub fn identity(ordinal: usize) -> Result<[u8; 16]> {
    #[cfg(feature = "nvidia")]
    return nvidia::Nvidia::identity(ordinal);
    #[cfg(not(feature = "nvidia"))]
    {
        let _ = ordinal;
        Err(CudaError::NotBuilt)
    }
}

/// The version of NCCL that would be used, without a GPU: 10000 major + 100 minor + patch.
///
/// # Errors
/// That it is not found or too old, in a sentence.
pub fn nccl_version() -> Result<u32> {
    #[cfg(feature = "nvidia")]
    return nvidia::nccl_version();
    #[cfg(not(feature = "nvidia"))]
    Err(CudaError::NotBuilt)
}
