//! Normalisations.

use super::{GradientSlot, HeadLayout, check_slot, prepare_adding, same_dtype, same_form, workspace};
use crate::cpu::norm::{self, AddTo};
use crate::error::Result;
use crate::{Computes, Cost, DType, Device, On, Tensor, Work, by_float, cuda, ensure_shape};

fn check_weight(op: &'static str, x: &Tensor, w: &Tensor, dim: usize) -> Result<()> {
    same_dtype(op, x, w)?;
    ensure_shape!(w.elements() == dim, op, "a weight of {} for rows of {dim}", w.shape());
    Ok(())
}

/// A kernel that goes over the rows of `x` and moves `tensors` once.
fn rows_of(x: &Tensor, flops_per_element: usize, tensors: &[&Tensor]) -> Work {
    Cost::streaming(flops_per_element, tensors).on(x.dtype(), [x.rows(), x.last_dim()])
}

/// Scratch for the sums of `gradients` weights' gradients over rows.
fn partials(device: &Device, rows: usize, dim: usize, gradients: usize) -> Result<Tensor> {
    let floats = match device.computes() {
        Computes::Cpu => norm::backward_workspace(rows, dim),
        Computes::Cuda => cuda::row_blocks(rows) * dim,
    };
    workspace(device, gradients * floats)
}

/// `x / rms(x) * w` of rows, and the inverse rms of each row (f32): x [.., d], w [d].
pub fn rms_norm(x: &Tensor, w: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    const OP: &str = "rms_norm";
    check_weight(OP, x, w, x.last_dim())?;
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    let mut inverse_rms = x.empty_like([x.rows()], DType::F32)?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, rows_of(x, 4, &[x, &y]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::rms_norm(gpu, x, w, eps, &y, &inverse_rms),
        };
        norm::rms_norm(cpu, x.get::<T>(), w.get::<T>(), eps, y.get_mut::<T>(), inverse_rms.get_mut::<f32>());
        Ok(())
    })?);
    Ok((y, inverse_rms))
}

/// The gradient of x, plus `base`; `dw` sums the weight's.
pub fn rms_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    w: &Tensor,
    inverse_rms: &Tensor,
    base: Option<Tensor>,
    mut dw: Option<GradientSlot<'_>>,
) -> Result<Tensor> {
    const OP: &str = "rms_norm_backward";
    same_form(OP, dy, x)?;
    check_slot(OP, &dw, w.elements())?;
    prepare_adding(&mut dw)?;
    let (mut dx, base) = output_over(OP, x, base)?;
    let mut scratch = partials(x.device(), x.rows(), x.last_dim(), 1)?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, rows_of(x, 8, &[x, dy, &dx]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                return cuda::rms_norm_backward(gpu, [dy, x, w, inverse_rms], base.tensor(&dx), &dx, &dw, &scratch);
            }
        };
        let dweight = dw.as_mut().map(|(t, _)| t.get_mut::<f32>());
        norm::rms_norm_backward(
            cpu, dy.get::<T>(), x.get::<T>(), w.get::<T>(), inverse_rms.get::<f32>(), base.add_to::<T>(),
            dx.get_mut::<T>(), dweight, scratch.get_mut::<f32>(),
        );
        Ok(())
    })?);
    Ok(dx)
}

/// `(x - mean) / sqrt(var + eps) * w + b` of rows, with each row's mean and inverse deviation
/// (f32): x [.., d], w and b [d].
pub fn layer_norm(x: &Tensor, w: &Tensor, b: Option<&Tensor>, eps: f32) -> Result<(Tensor, Tensor, Tensor)> {
    const OP: &str = "layer_norm";
    check_weight(OP, x, w, x.last_dim())?;
    let zeros;
    let b = match b {
        Some(b) => b,
        None => {
            zeros = x.device().zeros(*w.shape(), w.dtype(), crate::Purpose::Workspace)?;
            &zeros
        }
    };
    check_weight(OP, x, b, x.last_dim())?;
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    let mut mean = x.empty_like([x.rows()], DType::F32)?;
    let mut inverse_std = x.empty_like([x.rows()], DType::F32)?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, rows_of(x, 7, &[x, &y]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::layer_norm(gpu, [x, w, b], eps, [&y, &mean, &inverse_std]),
        };
        norm::layer_norm(
            cpu, x.get::<T>(), w.get::<T>(), b.get::<T>(), eps, y.get_mut::<T>(), mean.get_mut::<f32>(),
            inverse_std.get_mut::<f32>(),
        );
        Ok(())
    })?);
    Ok((y, mean, inverse_std))
}

/// The gradient of x, plus `base`; `dw` and `db` sum the parameters'.
pub fn layer_norm_backward(
    dy: &Tensor,
    x: &Tensor,
    w: &Tensor,
    mean: &Tensor,
    inverse_std: &Tensor,
    base: Option<Tensor>,
    mut dw: Option<GradientSlot<'_>>,
    mut db: Option<GradientSlot<'_>>,
) -> Result<Tensor> {
    const OP: &str = "layer_norm_backward";
    same_form(OP, dy, x)?;
    check_slot(OP, &dw, w.elements())?;
    check_slot(OP, &db, w.elements())?;
    prepare_adding(&mut dw)?;
    prepare_adding(&mut db)?;
    let (mut dx, base) = output_over(OP, x, base)?;
    let mut scratch = partials(x.device(), x.rows(), x.last_dim(), 2)?;
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, rows_of(x, 11, &[x, dy, &dx]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let (read, base) = ([dy, x, w, mean, inverse_std], base.tensor(&dx));
                return cuda::layer_norm_backward(gpu, read, base, &dx, [&dw, &db], &scratch);
            }
        };
        let dweight = dw.as_mut().map(|(t, _)| t.get_mut::<f32>());
        let dbias = db.as_mut().map(|(t, _)| t.get_mut::<f32>());
        norm::layer_norm_backward(
            cpu, dy.get::<T>(), x.get::<T>(), w.get::<T>(), mean.get::<f32>(), inverse_std.get::<f32>(),
            base.add_to::<T>(), dx.get_mut::<T>(), dweight, dbias, scratch.get_mut::<f32>(),
        );
        Ok(())
    })?);
    Ok(dx)
}

/// RMSNorm of each query and key head of a fused qkv matrix, values copied; and the inverse rms,
/// queries' [m, h] then keys' [m, h_kv].
pub fn qk_norm(qkv: &Tensor, layout: HeadLayout, wq: &Tensor, wk: &Tensor, eps: f32) -> Result<(Tensor, Tensor)> {
    const OP: &str = "qk_norm";
    layout.check(OP, qkv)?;
    check_weight(OP, qkv, wq, layout.head_dim)?;
    check_weight(OP, qkv, wk, layout.head_dim)?;
    let m = qkv.rows();
    let mut y = qkv.empty_like(*qkv.shape(), qkv.dtype())?;
    let mut inverse_rms = qkv.empty_like([m * (layout.heads + layout.kv_heads)], DType::F32)?;
    by_float!(OP, qkv.dtype(), T => qkv.device().launch_on(OP, rows_of(qkv, 4, &[qkv, &y]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::qk_norm(gpu, layout, [qkv, wq, wk], eps, [&y, &inverse_rms]),
        };
        let (x, y) = (qkv.get::<T>(), y.get_mut::<T>());
        y.copy_from_slice(x);
        let (inverse_q, inverse_k) = inverse_rms.get_mut::<f32>().split_at_mut(m * layout.heads);
        norm::rms_norm_heads(cpu, layout.query_columns(), x, wq.get::<T>(), eps, y, inverse_q);
        norm::rms_norm_heads(cpu, layout.key_columns(), x, wk.get::<T>(), eps, y, inverse_k);
        Ok(())
    })?);
    Ok((y, inverse_rms))
}

/// The gradient of qkv from that of the result, in place when `dy` is held by nobody else.
pub fn qk_norm_backward(
    dy: Tensor,
    qkv: &Tensor,
    layout: HeadLayout,
    wq: &Tensor,
    wk: &Tensor,
    inverse_rms: &Tensor,
    mut dwq: Option<GradientSlot<'_>>,
    mut dwk: Option<GradientSlot<'_>>,
) -> Result<Tensor> {
    const OP: &str = "qk_norm_backward";
    same_form(OP, &dy, qkv)?;
    check_slot(OP, &dwq, layout.head_dim)?;
    check_slot(OP, &dwk, layout.head_dim)?;
    prepare_adding(&mut dwq)?;
    prepare_adding(&mut dwk)?;
    let m = qkv.rows();
    let heads = layout.heads.max(layout.kv_heads);
    let mut scratch = match qkv.device().computes() {
        // Queries and keys one after the other.
        Computes::Cpu => workspace(qkv.device(), norm::backward_workspace(m * heads, layout.head_dim))?,
        Computes::Cuda => partials(qkv.device(), m, layout.head_dim, 2)?,
    };
    let mut dx = super::pointwise::into_unique(dy)?;
    by_float!(OP, qkv.dtype(), T => qkv.device().launch_on(OP, rows_of(qkv, 8, &[qkv, &dx]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                let read = [qkv, wq, wk, inverse_rms];
                return cuda::qk_norm_backward(gpu, layout, &dx, read, [&dwq, &dwk], &scratch);
            }
        };
        let (x, dx) = (qkv.get::<T>(), dx.get_mut::<T>());
        let (inverse_q, inverse_k) = inverse_rms.get::<f32>().split_at(m * layout.heads);
        let dw = dwq.as_mut().map(|(t, _)| t.get_mut::<f32>());
        norm::rms_norm_heads_backward(
            cpu, layout.query_columns(), x, wq.get::<T>(), inverse_q, dx, dw, scratch.get_mut::<f32>(),
        );
        let dw = dwk.as_mut().map(|(t, _)| t.get_mut::<f32>());
        norm::rms_norm_heads_backward(
            cpu, layout.key_columns(), x, wk.get::<T>(), inverse_k, dx, dw, scratch.get_mut::<f32>(),
        );
        Ok(())
    })?);
    Ok(dx)
}

/// The summand of an input gradient.
enum Base {
    Nothing,
    Output,
    Other(Tensor),
}

impl Base {
    fn add_to<T: crate::Element>(&self) -> AddTo<'_, T> {
        match self {
            Base::Nothing => AddTo::Nothing,
            Base::Output => AddTo::Output,
            Base::Other(tensor) => AddTo::Gradient(tensor.get::<T>()),
        }
    }
}

impl Base {
    /// The tensor that a kernel reads, which may be its output `dx`.
    fn tensor<'a>(&'a self, dx: &'a Tensor) -> Option<&'a Tensor> {
        match self {
            Base::Nothing => None,
            Base::Output => Some(dx),
            Base::Other(tensor) => Some(tensor),
        }
    }
}

/// The tensor to write: `base` itself when nobody else holds it, else a new one.
fn output_over(op: &'static str, x: &Tensor, base: Option<Tensor>) -> Result<(Tensor, Base)> {
    match base {
        None => Ok((x.empty_like(*x.shape(), x.dtype())?, Base::Nothing)),
        Some(base) => {
            same_form(op, x, &base)?;
            if base.is_unique() {
                return Ok((base, Base::Output));
            }
            Ok((x.empty_like(*x.shape(), x.dtype())?, Base::Other(base)))
        }
    }
}
