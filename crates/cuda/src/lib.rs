//! CUDA: the kernels as sources and as a table, and what compiles and launches them.
//!
//! The sources in `kernels/` are CUDA C++ without any header but their own, so that NVRTC alone compiles them, for sm_80 and later; the same text is
//! compiled by the host's C++ compiler against `emulation/` and checked there. [`kernels`] lists every entry point.
//!
//! [`driver::Driver`] is what a device is asked to do; [`fake`] does it without a GPU, for tests. Nothing here knows tensors: `trainyard-tensor` launches.

pub mod driver;
#[cfg(feature = "emulation")]
pub mod emulated;
mod error;
pub mod fake;
pub mod kernels;

pub use error::{CudaError, Result};
