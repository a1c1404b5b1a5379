//! Operations on tensors: check shapes, allocate results, state the cost, launch.
//!
//! This is the list that a device implements. Functions named `*_backward` are the kernels that
//! `autograd` pairs with their forwards; nothing here records anything. Sums over parameters'
//! gradients take `(&mut Tensor, bool)`: where to, and whether to overwrite.

mod attention;
mod context;
mod distill;
mod embedding;
pub mod experts;
pub mod fp8;
pub mod grid;
mod hidden;
mod int8;
mod linear;
mod loss;
mod norm;
pub mod optim;
pub mod plain;
mod pointwise;
mod relative;
pub mod sparsity;
mod value_residual;

pub use crate::cpu::distill::{Distillation, Divergence};
pub use crate::cpu::embedding::TablePart;
pub use attention::{
    HeadLayout, Segments, attention, attention_backward, attention_decode, attention_decode_biased, rope,
};
pub use context::{
    ContextSegments, context_attention, context_attention_backward, context_attention_part,
    context_attention_part_backward, context_attention_rest, context_attention_rest_backward,
};
pub use distill::{TeacherLogits, distillation_loss, distillation_loss_with_gradients};
pub use embedding::{embedding, embedding_backward, embedding_part, embedding_part_backward};
pub use hidden::{hidden_distance, hidden_distance_backward};
pub use int8::{linear_int8, linear_int8_input_gradient};
pub use linear::{linear, linear_input_gradient, linear_weight_gradient};
pub use loss::{
    MergedLosses, TokenLosses, linear_cross_entropy, linear_cross_entropy_part_gradients,
    linear_cross_entropy_with_gradients, merge_statistics, token_losses, vocabulary_statistics,
};
pub use norm::{layer_norm, layer_norm_backward, qk_norm, qk_norm_backward, rms_norm, rms_norm_backward};
pub use pointwise::{
    accumulate, activate, activation_backward, add, add_into, cast, cast_into, dropout, dropout_from, dropout_of, glu,
    glu_backward, swiglu, swiglu_backward,
};
pub use relative::{
    CrossSegments, biased_attention, biased_attention_backward, cross_attention, cross_attention_backward,
};
pub use value_residual::{value_residual, value_residual_backward};

use crate::cpu::gemm::{Accumulate, Activation};
use crate::error::{Result, TensorError};
use crate::{Computes, DType, Device, Purpose, Tensor, cuda, ensure_shape};

/// Where a parameter's gradient is summed, and whether to overwrite what is there.
pub type GradientSlot<'a> = (&'a mut Tensor, bool);

fn accumulate_mode(overwrite: bool) -> Accumulate {
    if overwrite { Accumulate::Overwrite } else { Accumulate::Add }
}

/// The name of an activation in records of calls.
fn form(activation: Activation) -> &'static str {
    match activation {
        Activation::None => "",
        Activation::Relu => "relu",
        Activation::ReluSquared => "relu_squared",
        Activation::Silu => "silu",
        Activation::GeluExact => "gelu",
        Activation::GeluTanh => "gelu_tanh",
    }
}

/// The error of an operation that only CPUs have a kernel for.
fn not_on_cuda(op: &'static str) -> TensorError {
    TensorError::Shape { op, what: "there is no kernel for it on GPUs".to_owned() }
}

/// Scratch memory of `floats` f32 numbers that kernels of the CPU do without.
fn scratch_on_cuda(device: &Device, floats: usize) -> Result<Option<Tensor>> {
    (device.computes() == Computes::Cuda).then(|| workspace(device, floats)).transpose()
}

/// Scratch of a product on a GPU.
fn product_scratch(device: &Device) -> Result<Option<Tensor>> {
    scratch_on_cuda(device, cuda::PRODUCT_WORKSPACE / 4)
}

/// The scratch that [`scratch_on_cuda`] gave, once launched there.
fn given(scratch: &Option<Tensor>) -> &Tensor {
    scratch.as_ref().expect("a device that computes on cuda has its scratch")
}

/// Scratch memory of `floats` f32 numbers.
fn workspace(device: &Device, floats: usize) -> Result<Tensor> {
    device.empty([floats], DType::F32, Purpose::Workspace)
}

/// Fails unless `b` has the dtype of `a`.
fn same_dtype(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    ensure_shape!(a.dtype() == b.dtype(), op, "operands of {} and {}", a.dtype(), b.dtype());
    Ok(())
}

/// Fails unless both have one shape and dtype.
fn same_form(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    same_dtype(op, a, b)?;
    ensure_shape!(a.shape() == b.shape(), op, "shapes {} and {}", a.shape(), b.shape());
    Ok(())
}

/// Fails unless a gradient slot is f32 with the parameter's number of elements.
fn check_slot(op: &'static str, slot: &Option<GradientSlot<'_>>, elements: usize) -> Result<()> {
    if let Some((tensor, _)) = slot {
        ensure_shape!(
            tensor.dtype() == DType::F32 && tensor.elements() == elements,
            op,
            "a gradient slot of {} {} for a parameter of {elements} elements",
            tensor.dtype(),
            tensor.shape()
        );
    }
    Ok(())
}

/// Kernels of norms add to their weight gradients: zeroes a slot that is to be overwritten.
fn prepare_adding(slot: &mut Option<GradientSlot<'_>>) -> Result<()> {
    if let Some((tensor, overwrite)) = slot
        && *overwrite
    {
        tensor.fill_zero()?;
        *overwrite = false;
    }
    Ok(())
}
