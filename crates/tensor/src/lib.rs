//! Dtypes, shapes, the memory pool, devices and the kernels.
//!
//! From the bottom: [`cpu`] holds kernels, plain functions over slices, each with a ladder of
//! instruction sets; `reference` holds their naive scalar oracles; [`pool`] hands out memory with a
//! purpose on every byte; [`Tensor`] is a contiguous region of it; [`Device`] runs kernels (`cpu`,
//! [`cuda`]) or only counts them (`meta`); [`ops`] are the operations on tensors: they check
//! shapes, allocate results, state their cost and launch.
//!
//! This crate knows nothing of gradients: it has forward and backward kernels, and `autograd` pairs
//! them.

pub mod bench;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod dtype;
pub mod error;
pub mod grid;
pub mod heap;
mod host;
pub mod mapped;
pub mod ops;
pub mod pool;
pub mod reference;
pub mod shape;
pub mod sparsity;
pub mod tensor;

pub use device::{Call, Computes, Cost, Device, Dims, On, Profile, Work};
pub use dtype::{DType, Element, Scalar, bf16, f16};
pub use error::{Result, TensorError};
pub use pool::{MemoryPool, Purpose, Usage};
pub use shape::Shape;
pub use tensor::Tensor;
