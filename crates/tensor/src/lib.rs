//! Dtypes, shapes, the memory pool, devices and the kernels.

pub mod cpu;
pub mod dtype;

pub use dtype::{DType, Element, Scalar, bf16, f16};
