//! What kernels reach on this machine, in percent of its measured peaks: functions that check a kernel's results, then time it,
//! and return figures for others to print.

mod array;
pub mod attention;
pub mod gemm;
pub mod gpu;
pub mod memory_bound;
