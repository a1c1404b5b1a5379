//! What kernels reach on this machine, in percent of its measured peaks.

pub mod gemm;
