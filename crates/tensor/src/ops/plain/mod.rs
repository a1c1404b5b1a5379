//! The plain operations, from which a user writes a new model.
//!
//! | file | operations |
//! |---|---|
//! | [`elementwise`] | arithmetic with broadcasting, functions of one number, casts, dropout-add |
//! | [`mask`] | comparisons, logic, selection and filling by masks, the causal mask |
//! | [`reduce`] | sum, mean, maximum, variance, softmax, cumulative sum, argmax, top-k |
//! | [`arrange`] | permutation, broadcasting, slices, concatenation, repetition |
//! | [`index`] | reading and adding by indices, one-hot |
//! | [`product`] | matrix products with batch dimensions |
//! | [`loss`] | squared error, cross-entropy over logits |
//!
//! Shapes broadcast as in NumPy: from the last dimension backwards, sizes are equal or one of them
//! is 1 or absent. Dimensions are numbered from 0, or from the end with -1 the last. Results are
//! contiguous. There are no strided views, so operations that rearrange data move it, except where
//! the result is one run of the source. Masks are u32, 0 or 1; indices are i32 or u32. Every
//! operation takes all float dtypes, computes in f32 and rounds once.
//!
//! Nothing here is lazy or fused: `a * b + c` is two passes over memory.

pub mod arrange;
pub mod elementwise;
pub mod index;
pub mod loss;
pub mod mask;
pub mod product;
pub mod reduce;

pub use arrange::{
    concat, expand, narrow, narrow_backward, permute, repeat, repeat_backward, split_point, sum_to, transpose,
};
pub use elementwise::{
    binary, binary_backward, clamp, clamp_backward, dropout_add, power, power_backward, to_float, unary,
    unary_backward, with_number,
};
pub use index::{Indices, gather, index_add, index_select, one_hot, scatter_add};
pub use loss::{Reduction, cross_entropy, cross_entropy_backward, mse_loss, mse_loss_backward};
pub use mask::{causal_mask, compare, keep, logic, logical_not, masked_fill, select};
pub use product::matmul;
pub use reduce::{
    amax, amax_backward, argmax, cumulative_sum, cumulative_sum_backward, log_softmax, log_softmax_backward, mean,
    softmax, softmax_backward, sum, top_k, variance, variance_backward,
};

use crate::error::Result;
use crate::shape::RANK_MAX;
use crate::{DType, Purpose, Shape, Tensor, ensure_shape};

/// Dimensions to reduce, and whether they stay with size 1: `..` is all of them, `-1` the last,
/// `[0, 2]` those two; `Dims::from(-1).keep()` keeps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dims {
    which: Option<Vec<i32>>,
    kept: bool,
}

impl Dims {
    /// Reduced dimensions stay, with size 1 (`keepdim`).
    pub fn keep(self) -> Dims {
        Dims { kept: true, ..self }
    }

    /// For every dimension of `shape`, whether it is reduced.
    fn reduced(&self, op: &'static str, shape: &Shape) -> Result<Vec<bool>> {
        let Some(which) = &self.which else { return Ok(vec![true; shape.len()]) };
        let mut reduced = vec![false; shape.len()];
        for dim in which {
            let dim = dimension(op, shape, *dim)?;
            ensure_shape!(!reduced[dim], op, "dimension {dim} of {shape} is named twice");
            reduced[dim] = true;
        }
        Ok(reduced)
    }

    /// The shape of a reduction of `shape`, and the same with reduced dimensions kept.
    pub fn shapes(&self, op: &'static str, shape: &Shape) -> Result<(Shape, Shape)> {
        let reduced = self.reduced(op, shape)?;
        let dims = || shape.iter().zip(&reduced);
        let kept: Vec<usize> = dims().map(|(len, reduced)| if *reduced { 1 } else { *len }).collect();
        let dropped: Vec<usize> = dims().filter(|(_, reduced)| !**reduced).map(|(len, _)| *len).collect();
        let kept = Shape::from(&kept);
        Ok((if self.kept { kept } else { Shape::from(&dropped) }, kept))
    }
}

impl From<i32> for Dims {
    fn from(dim: i32) -> Dims {
        Dims::from([dim])
    }
}

impl<const N: usize> From<[i32; N]> for Dims {
    fn from(dims: [i32; N]) -> Dims {
        Dims { which: Some(dims.to_vec()), kept: false }
    }
}

impl From<&[i32]> for Dims {
    fn from(dims: &[i32]) -> Dims {
        Dims { which: Some(dims.to_vec()), kept: false }
    }
}

impl From<std::ops::RangeFull> for Dims {
    fn from(_: std::ops::RangeFull) -> Dims {
        Dims { which: None, kept: false }
    }
}

/// Dimension `dim` of `shape`, counted from the end when negative.
pub fn dimension(op: &'static str, shape: &Shape, dim: i32) -> Result<usize> {
    let rank = shape.len() as i32;
    ensure_shape!((-rank..rank).contains(&dim), op, "dimension {dim} of {shape}");
    Ok(dim.rem_euclid(rank) as usize)
}

/// A shape of these dimensions, unless they are too many or their product is no amount of memory.
pub fn checked_shape(op: &'static str, dims: &[usize]) -> Result<Shape> {
    ensure_shape!(dims.len() <= RANK_MAX, op, "{dims:?} has {} dimensions; the most is {RANK_MAX}", dims.len());
    let bytes = dims.iter().try_fold(4usize, |product, len| product.checked_mul(*len));
    ensure_shape!(bytes.is_some_and(|bytes| bytes <= isize::MAX as usize), op, "{dims:?} is too large");
    Ok(Shape::from(dims))
}

/// The shape that all of `shapes` broadcast to.
pub fn broadcast_shape(op: &'static str, shapes: &[&Shape]) -> Result<Shape> {
    let rank = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let mut dims = vec![1; rank];
    for shape in shapes {
        for (dim, len) in dims.iter_mut().rev().zip(shape.iter().rev()) {
            ensure_shape!(*dim == *len || *dim == 1 || *len == 1, op, "shapes {shapes:?} do not broadcast");
            if *dim == 1 {
                *dim = *len;
            }
        }
    }
    checked_shape(op, &dims)
}

/// Neighbouring dimensions of `shape` on which every operand does the same (has them, or is
/// repeated along them), as one: its length, and which operands have it.
fn groups<const N: usize>(shape: &Shape, operands: [&[usize]; N]) -> Vec<(usize, [bool; N])> {
    let mut groups: Vec<(usize, [bool; N])> = Vec::new();
    for (from_end, len) in shape.iter().rev().enumerate().rev().filter(|(_, len)| **len != 1) {
        let has = operands.map(|dims| dims.len() > from_end && dims[dims.len() - 1 - from_end] == *len);
        match groups.last_mut() {
            Some((outer, same)) if *same == has => *outer *= len,
            _ => groups.push((*len, has)),
        }
    }
    groups
}

/// The row-major strides of dimensions.
fn strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i];
    }
    strides
}

/// Scratch of the form of a result.
fn scratch(x: &Tensor, shape: Shape, dtype: DType) -> Result<Tensor> {
    x.device().empty(shape, dtype, Purpose::Workspace)
}

/// Fails unless the tensor is a mask.
fn check_mask(op: &'static str, mask: &Tensor) -> Result<()> {
    ensure_shape!(mask.dtype() == DType::U32, op, "a mask is u32, this one {}", mask.dtype());
    Ok(())
}

/// The bits of an index tensor, once launched.
fn index_bits(indices: &Tensor) -> Result<&[u32]> {
    Ok(bytemuck::cast_slice(indices.as_bytes()?))
}

/// Fails unless the tensor holds indices.
fn check_index(op: &'static str, indices: &Tensor) -> Result<()> {
    ensure_shape!(
        matches!(indices.dtype(), DType::I32 | DType::U32),
        op,
        "indices are i32 or u32, these {}",
        indices.dtype()
    );
    Ok(())
}
