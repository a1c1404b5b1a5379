//! The plain functions: what a user writes a new model with, named as PyTorch names them.
//!
//! One type and one row for each kind: what its members share is what they save and how they
//! differentiate. Functions from numbers to masks or indices have rows too, without a backward:
//! reaching one is an error that names it, never a silent zero. Shapes broadcast as in NumPy,
//! dimensions count from the end when negative; see [`trainyard_tensor::ops::plain`].

pub(super) mod arrange;
pub(super) mod elementwise;
pub(super) mod index;
pub(super) mod loss;
pub(super) mod mask;
pub(super) mod product;
pub(super) mod reduce;

/// The imports of every file here.
mod prelude {
    pub(super) use super::super::prelude::*;
    pub(super) use crate::AutogradError;
    pub(super) use trainyard_tensor::Shape;
    pub(super) use trainyard_tensor::ops::plain;
}
