//! The LM head fused with softmax cross-entropy; logits exist a chunk of rows at a time, in
//! workspace.

use super::{GradientSlot, accumulate_mode, check_slot, given, product_scratch, same_dtype, scratch_on_cuda};
use crate::cpu::gemm::{MatMut, MatRef, Weight};
use crate::cpu::head::{self, HeadGradients, HeadLoss};
use crate::error::Result;
use crate::{Computes, Cost, DType, On, Purpose, Tensor, Work, by_float, cuda, ensure_shape};

/// Cross-entropy of each row.
#[derive(Debug)]
pub struct TokenLosses {
    /// `-log softmax(x wᵀ)[target]`, f32 [m]; 0 where there is no target.
    pub losses: Tensor,
    /// Their sum, how many rows count, and in how many of them no logit is above the target's. Zero
    /// on meta.
    pub summary: HeadLoss,
}

/// `scale` times the sum over rows of `-log softmax(x wᵀ)[target]`: x [m, d], w [v, d], targets i32
/// [m] with -100 where a row does not count. A scalar, f32.
pub fn linear_cross_entropy(x: &Tensor, w: &Tensor, targets: &Tensor, scale: f32) -> Result<Tensor> {
    let (_, loss) = run("linear_cross_entropy", x, w, targets, Some(scale), None)?;
    Ok(loss.expect("a scale was given"))
}

/// The cross-entropy of each row on its own, for evaluation.
pub fn token_losses(x: &Tensor, w: &Tensor, targets: &Tensor) -> Result<TokenLosses> {
    Ok(run("linear_cross_entropy", x, w, targets, None, None)?.0)
}

/// As [`linear_cross_entropy`], with the gradient of x; `dw` sums the weight's.
pub fn linear_cross_entropy_with_gradients(
    x: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: f32,
    dw: Option<GradientSlot<'_>>,
) -> Result<(Tensor, Tensor)> {
    let mut dx = x.empty_like(*x.shape(), x.dtype())?;
    let gradients = Gradients { scale, dx: &mut dx, dw };
    let (_, loss) = run("linear_cross_entropy_with_gradients", x, w, targets, Some(scale), Some(gradients))?;
    Ok((loss.expect("a scale was given"), dx))
}

struct Gradients<'a> {
    scale: f32,
    dx: &'a mut Tensor,
    dw: Option<GradientSlot<'a>>,
}

/// With a `scale`, their sum times it as a scalar too, which on a GPU spares the host the summary.
fn run(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    scale: Option<f32>,
    mut gradients: Option<Gradients<'_>>,
) -> Result<(TokenLosses, Option<Tensor>)> {
    same_dtype(op, x, w)?;
    let (m, d, v) = (x.rows(), x.last_dim(), w.rows());
    ensure_shape!(w.last_dim() == d, op, "input {} and weight {}", x.shape(), w.shape());
    ensure_shape!(
        targets.dtype() == DType::I32 && targets.elements() == m,
        op,
        "{} {} targets for {m} rows",
        targets.shape(),
        targets.dtype()
    );
    let mut products = 1;
    if let Some(gradients) = &gradients {
        check_slot(op, &gradients.dw, v * d)?;
        products = if gradients.dw.is_some() { 3 } else { 2 };
    }
    let cost = Cost::new(2 * products * m * v * d, x.bytes() + products * (w.bytes() + m * v * x.dtype().size()));
    let device = x.device();
    let mut losses = device.empty([m], DType::F32, Purpose::Workspace)?;
    let mut summary = HeadLoss::default();
    let adds = gradients.as_ref().and_then(|g| g.dw.as_ref()).is_some_and(|(_, overwrite)| !overwrite);
    let work = cost.on(x.dtype(), [m, v, d]).variant(if adds { "adding" } else { "" });
    if device.computes() == Computes::Cuda {
        return run_on_cuda(op, work, [x, w, targets], scale, gradients, losses);
    }
    by_float!(op, x.dtype(), T => {
        let floats = head::workspace(head::chunk_rows::<T>(m, v), v);
        let mut logits = device.empty([floats], x.dtype(), Purpose::Workspace)?;
        device.launch(op, work, |cpu| {
            let weight = Weight::from(MatRef::new(w.get::<T>(), v, d));
            let gradients = gradients.as_mut().map(|g| HeadGradients {
                scale: g.scale,
                dx: Some(MatMut::new(g.dx.get_mut::<T>(), m, d)),
                accumulate: accumulate_mode(g.dw.as_ref().is_none_or(|(_, overwrite)| *overwrite)),
                dw: g.dw.as_mut().map(|(tensor, _)| tensor.get_mut::<f32>()),
            });
            summary = head::linear_cross_entropy(
                cpu,
                MatRef::new(x.get::<T>(), m, d),
                weight,
                targets.get::<i32>(),
                gradients,
                losses.get_mut::<f32>(),
                logits.get_mut::<T>(),
            )?;
            Ok(())
        })?
    });
    let loss = scale.map(|scale| scaled(x, summary, scale)).transpose()?;
    Ok((TokenLosses { losses, summary }, loss))
}

fn run_on_cuda(
    op: &'static str,
    work: Work,
    [x, w, targets]: [&Tensor; 3],
    scale: Option<f32>,
    gradients: Option<Gradients<'_>>,
    losses: Tensor,
) -> Result<(TokenLosses, Option<Tensor>)> {
    let (device, m, v) = (x.device(), x.rows(), w.rows());
    let rows = cuda::chunk_rows(m, v, x.dtype().size());
    let logits = device.empty([rows, v], x.dtype(), Purpose::Workspace)?;
    let (products, sums) = (product_scratch(device)?, scratch_on_cuda(device, 4)?);
    let lse = scratch_on_cuda(device, m)?;
    let hits = if scale.is_none() { scratch_on_cuda(device, m)? } else { None };
    let loss = scale.map(|_| device.empty([], DType::F32, Purpose::Activations)).transpose()?;
    let mut summary = HeadLoss::default();
    device.launch_on(op, work, |on| {
        let On::Cuda(gpu) = on else { unreachable!("this device computes on cuda") };
        let gradients = gradients.as_ref().map(|g| cuda::HeadGradients { scale: g.scale, dx: &*g.dx, dw: &g.dw });
        let scratch = cuda::HeadScratch { logits: &logits, lse: given(&lse), workspace: given(&products) };
        cuda::head(gpu, [x, w, targets], gradients, &losses, hits.as_ref(), scratch)?;
        summary = cuda::summary(gpu, [&losses, targets], hits.as_ref(), loss.as_ref().zip(scale), given(&sums))?;
        Ok(())
    })?;
    Ok((TokenLosses { losses, summary }, loss))
}

fn scaled(x: &Tensor, summary: HeadLoss, scale: f32) -> Result<Tensor> {
    let loss = (summary.loss_sum * f64::from(scale)) as f32;
    x.device().tensor([], &[loss], Purpose::Activations)
}
