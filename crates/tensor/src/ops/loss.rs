//! The LM head fused with softmax cross-entropy; logits exist a chunk of rows at a time, in workspace.

use super::{GradientSlot, accumulate_mode, check_slot, same_dtype};
use crate::cpu::gemm::{MatMut, MatRef, Weight};
use crate::cpu::head::{self, HeadGradients, HeadLoss};
use crate::error::Result;
use crate::{Cost, DType, Purpose, Tensor, by_float, ensure_shape};

/// Cross-entropy of each row.
#[derive(Debug)]
pub struct TokenLosses {
    /// `-log softmax(x wᵀ)[target]`, f32 [m]; 0 where there is no target.
    pub losses: Tensor,
    /// Their sum, how many rows count, and in how many of them no logit is above the target's. Zero on meta.
    pub summary: HeadLoss,
}

/// `scale` times the sum over rows of `-log softmax(x wᵀ)[target]`: x [m, d], w [v, d], targets i32 [m] with -100 where a row does not
/// count. A scalar, f32.
pub fn linear_cross_entropy(x: &Tensor, w: &Tensor, targets: &Tensor, scale: f32) -> Result<Tensor> {
    scaled(x, token_losses(x, w, targets)?.summary, scale)
}

/// The cross-entropy of each row on its own, for evaluation.
pub fn token_losses(x: &Tensor, w: &Tensor, targets: &Tensor) -> Result<TokenLosses> {
    run("linear_cross_entropy", x, w, targets, None)
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
    let losses = run("linear_cross_entropy_with_gradients", x, w, targets, Some(gradients))?;
    Ok((scaled(x, losses.summary, scale)?, dx))
}

struct Gradients<'a> {
    scale: f32,
    dx: &'a mut Tensor,
    dw: Option<GradientSlot<'a>>,
}

fn run(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    mut gradients: Option<Gradients<'_>>,
) -> Result<TokenLosses> {
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
    by_float!(op, x.dtype(), T => {
        let floats = head::workspace(head::chunk_rows::<T>(m, v), v);
        let mut logits = device.empty([floats], x.dtype(), Purpose::Workspace)?;
        let adds = gradients.as_ref().and_then(|g| g.dw.as_ref()).is_some_and(|(_, overwrite)| !overwrite);
        let work = cost.on(x.dtype(), [m, v, d]).variant(if adds { "adding" } else { "" });
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
    Ok(TokenLosses { losses, summary })
}

fn scaled(x: &Tensor, summary: HeadLoss, scale: f32) -> Result<Tensor> {
    let loss = (summary.loss_sum * f64::from(scale)) as f32;
    x.device().tensor([], &[loss], Purpose::Activations)
}
