//! Masks: comparisons make them, logic combines them, selection and filling use them. A mask is
//! u32, 0 or 1.

use super::{arrange, broadcast_shape, check_mask};
use crate::cpu::elementwise::{self, Compare};
use crate::cpu::plain::mask::{self as kernels, Logic, Side};
use crate::error::Result;
use crate::ops::same_dtype;
use crate::{Cost, DType, Device, On, Purpose, Shape, Tensor, by_float, cuda, ensure_shape};

/// 1 where `a` compares so with `b`, broadcast together, else 0.
pub fn compare(how: Compare, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "compare";
    same_dtype(OP, a, b)?;
    let shape = broadcast_shape(OP, &[a.shape(), b.shape()])?;
    let (a, b) = (full(OP, a, &shape)?, full(OP, b, &shape)?);
    let mut y = a.empty_like(shape, DType::U32)?;
    by_float!(OP, a.dtype(), T => a.device().launch_on(OP, Cost::streaming(1, &[&a, &b, &y]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::compare(gpu, how, &a, &b, &y),
        };
        elementwise::compare(cpu, how, a.get::<T>(), b.get::<T>(), y.get_mut::<u32>());
        Ok(())
    })?);
    Ok(y)
}

fn full(op: &'static str, x: &Tensor, shape: &Shape) -> Result<Tensor> {
    arrange::expanded(op, x, shape, Purpose::Workspace)
}

/// `f` of two masks, broadcast together.
pub fn logic(f: Logic, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "logic";
    check_mask(OP, a)?;
    check_mask(OP, b)?;
    let shape = broadcast_shape(OP, &[a.shape(), b.shape()])?;
    let (a, b) = (full(OP, a, &shape)?, full(OP, b, &shape)?);
    let mut y = a.empty_like(shape, DType::U32)?;
    a.device().launch_on(OP, Cost::streaming(1, &[&a, &b, &y]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::logic(gpu, Some(f), &a, &b, &y),
        };
        kernels::logic(cpu, f, a.get::<u32>(), b.get::<u32>(), y.get_mut::<u32>());
        Ok(())
    })?;
    Ok(y)
}

/// 1 where the mask is 0, else 0.
pub fn logical_not(mask: &Tensor) -> Result<Tensor> {
    const OP: &str = "logical_not";
    check_mask(OP, mask)?;
    let mut y = mask.empty_like(*mask.shape(), DType::U32)?;
    mask.device().launch_on(OP, Cost::streaming(1, &[mask, mask]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::logic(gpu, None, mask, mask, &y),
        };
        kernels::not(cpu, mask.get::<u32>(), y.get_mut::<u32>());
        Ok(())
    })?;
    Ok(y)
}

/// `a` where the mask is set, else `b`; all three broadcast together.
pub fn select(mask: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "select";
    check_mask(OP, mask)?;
    same_dtype(OP, a, b)?;
    let shape = broadcast_shape(OP, &[mask.shape(), a.shape(), b.shape()])?;
    let (mask, a, b) = (full(OP, mask, &shape)?, full(OP, a, &shape)?, full(OP, b, &shape)?);
    let mut y = a.empty_like(shape, a.dtype())?;
    by_float!(OP, a.dtype(), T => a.device().launch_on(OP, Cost::streaming(0, &[&a, &b, &mask, &y]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::select(gpu, &mask, &a, &b, &y),
        };
        elementwise::select(cpu, mask.get::<u32>(), a.get::<T>(), b.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// `x` with `value` where the mask, which broadcasts to the shape of `x`, is set.
pub fn masked_fill(x: &Tensor, mask: &Tensor, value: f32) -> Result<Tensor> {
    fill("masked_fill", x, mask, Side::Set, value)
}

/// `x` where the mask, which broadcasts to the shape of `x`, is on `side`, else 0.
pub fn keep(x: &Tensor, mask: &Tensor, side: Side) -> Result<Tensor> {
    fill("keep", x, mask, if side == Side::Set { Side::Unset } else { Side::Set }, 0.0)
}

fn fill(op: &'static str, x: &Tensor, mask: &Tensor, side: Side, value: f32) -> Result<Tensor> {
    check_mask(op, mask)?;
    let mask = full(op, mask, x.shape())?;
    let mut y = x.empty_like(*x.shape(), x.dtype())?;
    by_float!(op, x.dtype(), T => x.device().launch_on(op, Cost::streaming(0, &[x, &mask, x]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::masked_fill(gpu, x, &mask, side, value, &y),
        };
        kernels::fill(cpu, mask.get::<u32>(), side, value, x.get::<T>(), y.get_mut::<T>());
        Ok(())
    })?);
    Ok(y)
}

/// A mask [queries, keys], 1 where a query may attend to a key: the key is no later, the last query
/// being at the last key.
pub fn causal_mask(device: &Device, queries: usize, keys: usize) -> Result<Tensor> {
    const OP: &str = "causal_mask";
    ensure_shape!(queries <= keys, OP, "{queries} queries are more than {keys} keys");
    let shape = super::checked_shape(OP, &[queries, keys])?;
    let mut y = device.empty(shape, DType::U32, Purpose::Activations)?;
    let cost = Cost::streaming(0, &[&y]);
    device.launch_on(OP, cost, |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::plain::causal_mask(gpu, [queries, keys], &y),
        };
        kernels::causal(cpu, [queries, keys], y.get_mut::<u32>());
        Ok(())
    })?;
    Ok(y)
}
