//! Value residuals (Zhou et al. 2024). Processors have kernels of their own; GPUs compose them of
//! plain operations.

use super::{GradientSlot, HeadLayout, accumulate, add_into, cast, check_slot, prepare_adding, same_form, workspace};
use crate::cpu::elementwise::Binary;
use crate::cpu::{norm, value_residual as kernels};
use crate::error::Result;
use crate::ops::plain::{self, Dims};
use crate::{Computes, Cost, DType, On, Tensor, Work, by_float, ensure_shape};

/// A kernel that goes over the values and moves them `times`.
fn work_of(values: &Tensor, flops: usize, times: usize) -> Work {
    Cost::new(flops * values.elements(), times * values.bytes()).on(values.dtype(), [values.rows(), values.last_dim()])
}

fn check(op: &'static str, qkv: &Tensor, layout: HeadLayout, first: &Tensor, weights: &Tensor) -> Result<()> {
    layout.check(op, qkv)?;
    let columns = layout.value_columns();
    ensure_shape!(
        first.dtype() == qkv.dtype() && *first.shape() == qkv.shape().with_last(columns.heads * columns.head_dim),
        op,
        "the first block's values {} {} for {} {}",
        first.dtype(),
        first.shape(),
        qkv.dtype(),
        qkv.shape()
    );
    ensure_shape!(
        weights.elements() == 2 && weights.dtype() == qkv.dtype(),
        op,
        "weights {} {}",
        weights.dtype(),
        weights.shape()
    );
    Ok(())
}

/// The weights a and b, each as a tensor of one number.
fn apart(weights: &Tensor) -> Result<[Tensor; 2]> {
    Ok([weights.view(0, [1])?, weights.view(1, [1])?])
}

/// Gives qkv [m, (h + 2 h_kv) c] the values `a V + b V_1`, V those that it has, V_1 = `first`
/// [m, h_kv c], (a, b) = `weights` [2]; in place when nobody else holds it. Gives V too, if `keep`,
/// which backward needs.
pub fn value_residual(
    qkv: Tensor,
    layout: HeadLayout,
    first: &Tensor,
    weights: &Tensor,
    keep: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    const OP: &str = "value_residual";
    check(OP, &qkv, layout, first, weights)?;
    let columns = layout.value_columns();
    if qkv.device().computes() == Computes::Cuda {
        let own = plain::narrow(&qkv, -1, columns.first, first.last_dim())?;
        let [a, b] = apart(weights)?;
        let mixed = add_into(plain::binary(Binary::Mul, &own, &a)?, &plain::binary(Binary::Mul, first, &b)?)?;
        let rest = plain::narrow(&qkv, -1, 0, columns.first)?;
        drop(qkv);
        return Ok((plain::concat(&[&rest, &mixed], -1)?, keep.then_some(own)));
    }
    let mut qkv = super::pointwise::into_unique(qkv)?;
    let mut own = keep.then(|| first.empty_like(*first.shape(), first.dtype())).transpose()?;
    let device = qkv.device().clone();
    by_float!(OP, qkv.dtype(), T => device.launch_on(OP, work_of(first, 3, if keep { 4 } else { 3 }), |on| {
        let On::Cpu(cpu) = on else { return Err(super::not_on_cuda(OP)) };
        let kept = own.as_mut().map(|own| own.get_mut::<T>());
        kernels::value_residual(cpu, columns, numbers::<T>(weights), first.get::<T>(), kept, qkv.get_mut::<T>());
        Ok(())
    })?);
    Ok((qkv, own))
}

/// The gradients of qkv, in place when `dy` is held by nobody else, and of `first`, given `own` =
/// V; `dweights` sums those of the weights.
pub fn value_residual_backward(
    dy: Tensor,
    layout: HeadLayout,
    own: &Tensor,
    first: &Tensor,
    weights: &Tensor,
    mut dweights: Option<GradientSlot<'_>>,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "value_residual_backward";
    check(OP, &dy, layout, first, weights)?;
    same_form(OP, own, first)?;
    check_slot(OP, &dweights, 2)?;
    let columns = layout.value_columns();
    if dy.device().computes() == Computes::Cuda {
        let d = plain::narrow(&dy, -1, columns.first, first.last_dim())?;
        if let Some((sums, overwrite)) = dweights {
            let wide = cast(&d, DType::F32)?;
            for (sum, values) in apart(sums)?.iter_mut().zip([own, first]) {
                let products = plain::binary(Binary::Mul, &wide, &cast(values, DType::F32)?)?;
                accumulate(&plain::sum(&products, &Dims::from(..))?.reshape([1])?, sum, overwrite)?;
            }
        }
        let [a, b] = apart(weights)?;
        let dfirst = plain::binary(Binary::Mul, &d, &b)?;
        let d = plain::binary(Binary::Mul, &d, &a)?;
        let rest = plain::narrow(&dy, -1, 0, columns.first)?;
        drop(dy);
        return Ok((plain::concat(&[&rest, &d], -1)?, dfirst));
    }
    prepare_adding(&mut dweights)?;
    let mut scratch = workspace(dy.device(), norm::backward_workspace(dy.rows(), 2))?;
    let mut dx = super::pointwise::into_unique(dy)?;
    let mut dfirst = first.empty_like(*first.shape(), first.dtype())?;
    let device = dx.device().clone();
    by_float!(OP, dx.dtype(), T => device.launch_on(OP, work_of(first, 6, 5), |on| {
        let On::Cpu(cpu) = on else { return Err(super::not_on_cuda(OP)) };
        let (weights, values) = (numbers::<T>(weights), [own.get::<T>(), first.get::<T>()]);
        let sums = dweights.as_mut().map(|(sums, _)| sums.get_mut::<f32>());
        let (dx, dfirst) = (dx.get_mut::<T>(), dfirst.get_mut::<T>());
        kernels::value_residual_backward(cpu, columns, weights, values, dx, dfirst, sums, scratch.get_mut::<f32>());
        Ok(())
    })?);
    Ok((dx, dfirst))
}

fn numbers<T: crate::Element>(weights: &Tensor) -> [f32; 2] {
    let weights = weights.get::<T>();
    [weights[0], weights[1]].map(|weight| weight.to_f32())
}
