//! CUDA: the kernels as sources and as a table, and what compiles and launches them.
//!
//! The sources in `kernels/` are CUDA C++ without any header but their own, so that NVRTC alone compiles them, for sm_80 and later; the same text is
//! compiled by the host's C++ compiler against `emulation/` and checked there. [`kernels`] lists every entry point.

pub mod kernels;
