//! Conformance of the CUDA kernels, on emulated blocks or on a GPU (`TRAINYARD_TEST_DEVICE`), with
//! the scalar oracles in f64. The bounds are those of the CPU's suite.
//!
//! Kernels read their operands exactly and compute in f32. A result may differ from the oracle's by
//! its final rounding, `u |want|`, and by a `slack` for the arithmetic inside. Each test derives
//! its slack: a number of roundings times 2^-24 times the size of the rounded values.

mod attention;
mod device;
mod emulator;
mod experts;
mod fp8;
mod norm;
mod optim;
mod plain;
mod rows;
mod table;
mod training;
