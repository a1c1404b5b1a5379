//! Losses over tensors that are there: squared error, and cross-entropy over plain logits.
//!
//! A language model's head has a form that never stores the logits,
//! [`linear_cross_entropy`](crate::ops::linear_cross_entropy); these are for small heads and other
//! models. Losses are f32 scalars whatever the dtype.

use crate::cpu::loss::{self as kernels, IGNORE, RowLosses};
use crate::cpu::plain::row;
use crate::error::Result;
use crate::ops::{given, same_form, scratch_on_cuda, workspace};
use crate::{Cost, DType, On, Tensor, by_float, cuda, ensure_shape};

/// The reduction of the losses of rows to one number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Reduction {
    /// Their mean over the rows that count; 0 if none does.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

impl Reduction {
    /// The factor on the sum over rows with these targets.
    fn factor(self, targets: &[i32]) -> f32 {
        match self {
            Reduction::Sum => 1.0,
            Reduction::Mean => 1.0 / targets.iter().filter(|target| **target != IGNORE).count().max(1) as f32,
        }
    }
}

fn check(op: &'static str, x: &Tensor, targets: &Tensor) -> Result<()> {
    let fits = targets.dtype() == DType::I32 && targets.elements() == x.rows() && x.last_dim() > 0;
    ensure_shape!(!x.shape().is_empty() && fits, op, "{targets:?} targets for logits {}", x.shape());
    Ok(())
}

/// `-log softmax(x)[target]` of rows, reduced, and the log-sum-exp of each row (f32 [m]): x
/// [.., v], targets i32 of the dimensions before, -100 where a row does not count.
pub fn cross_entropy(x: &Tensor, targets: &Tensor, reduction: Reduction) -> Result<(Tensor, Tensor)> {
    const OP: &str = "cross_entropy";
    check(OP, x, targets)?;
    let (m, v) = (x.rows(), x.last_dim());
    let mut losses = workspace(x.device(), m)?;
    let mut lse = x.empty_like([m], DType::F32)?;
    let mut loss = x.empty_like([], DType::F32)?;
    let (mean, scratch) = (reduction == Reduction::Mean, scratch_on_cuda(x.device(), 4)?);
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(20, &[x, targets, &lse]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                return cuda::cross_entropy(gpu, [x, targets], mean, [&losses, &lse, &loss], given(&scratch));
            }
        };
        let targets = targets.get::<i32>();
        let out = RowLosses { loss: losses.get_mut::<f32>(), lse: lse.get_mut::<f32>(), hit: None };
        kernels::cross_entropy(cpu, v, x.get::<T>(), targets, out)?;
        let sum: f64 = losses.get::<f32>().iter().map(|loss| f64::from(*loss)).sum();
        loss.get_mut::<f32>()[0] = (sum * f64::from(reduction.factor(targets))) as f32;
        Ok(())
    })?);
    Ok((loss, lse))
}

/// `dy (softmax(x) - onehot(target))`, with the reduction's factor; 0 in rows that do not count.
pub fn cross_entropy_backward(
    dy: &Tensor,
    x: &Tensor,
    targets: &Tensor,
    lse: &Tensor,
    reduction: Reduction,
) -> Result<Tensor> {
    const OP: &str = "cross_entropy_backward";
    check(OP, x, targets)?;
    check_scalar(OP, dy)?;
    let mut dx = x.empty_like(*x.shape(), x.dtype())?;
    let (mean, scratch) = (reduction == Reduction::Mean, scratch_on_cuda(x.device(), 4)?);
    by_float!(OP, x.dtype(), T => x.device().launch_on(OP, Cost::streaming(20, &[x, targets, lse, x]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => {
                return cuda::cross_entropy_backward(gpu, dy, [x, targets, lse], mean, &dx, given(&scratch));
            }
        };
        let (targets, dx) = (targets.get::<i32>(), dx.get_mut::<T>());
        let factor = dy.get::<f32>()[0] * reduction.factor(targets);
        dx.copy_from_slice(x.get::<T>());
        Ok(kernels::cross_entropy_backward(cpu, x.last_dim(), dx, targets, lse.get::<f32>(), factor)?)
    })?);
    Ok(dx)
}

fn check_scalar(op: &'static str, dy: &Tensor) -> Result<()> {
    ensure_shape!(dy.dtype() == DType::F32 && dy.elements() == 1, op, "the gradient of a loss is {dy:?}");
    Ok(())
}

/// The mean of `(a - b)^2`; the two have one shape, with elements.
pub fn mse_loss(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "mse_loss";
    same_form(OP, a, b)?;
    ensure_shape!(a.elements() > 0, OP, "{} has no elements", a.shape());
    let mut loss = a.empty_like([], DType::F32)?;
    let sums = scratch_on_cuda(a.device(), 2 * a.elements().div_ceil(cuda::SQUARES_CHUNK))?;
    by_float!(OP, a.dtype(), T => a.device().launch_on(OP, Cost::streaming(3, &[a, b]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::mse_loss(gpu, a, b, &loss, given(&sums)),
        };
        let sum = row::squared_error(cpu, a.get::<T>(), b.get::<T>());
        loss.get_mut::<f32>()[0] = (sum / a.elements() as f64) as f32;
        Ok(())
    })?);
    Ok(loss)
}

/// The gradient of a, `2 dy (a - b) / n`; that of b is its negative, [`mse_loss_backward`] of (b,
/// a).
pub fn mse_loss_backward(dy: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "mse_loss_backward";
    same_form(OP, a, b)?;
    check_scalar(OP, dy)?;
    let mut da = a.empty_like(*a.shape(), a.dtype())?;
    by_float!(OP, a.dtype(), T => a.device().launch_on(OP, Cost::streaming(2, &[a, b, a]), |on| {
        let cpu = match on {
            On::Cpu(cpu) => cpu,
            On::Cuda(gpu) => return cuda::mse_loss_backward(gpu, dy, a, b, &da),
        };
        let factor = 2.0 * dy.get::<f32>()[0] / a.elements() as f32;
        row::scaled_difference(cpu, factor, a.get::<T>(), b.get::<T>(), da.get_mut::<T>());
        Ok(())
    })?);
    Ok(da)
}
