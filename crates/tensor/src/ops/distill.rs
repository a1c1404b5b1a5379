//! The LM head fused with the loss of a student that learns from a teacher's distribution.

use super::loss::{checked, logits_workspace, product_cost, scaled};
use super::{GradientSlot, accumulate_mode, check_slot, same_dtype};
use crate::cpu::distill::{self, Distillation, Divergence};
use crate::cpu::gemm::{MatMut, MatRef, Weight};
use crate::cpu::head::{HeadGradients, HeadLoss};
use crate::error::Result;
use crate::{Computes, Cost, DType, Purpose, Tensor, by_float, ensure_shape};

/// The factors of a teacher's logits, and the loss that compares a student's with them.
#[derive(Clone, Debug)]
pub struct TeacherLogits {
    /// The teacher's final hidden states, [m, its d].
    pub x: Tensor,
    /// The teacher's matrix of the vocabulary, [v, its d].
    pub w: Tensor,
    /// The loss.
    pub distillation: Distillation,
}

/// `scale` times the sum over rows of
/// `(1 - a) (-log softmax(z)[target]) + a T² D(softmax(t / T), softmax(z / T))`: z = x wᵀ the
/// student's logits, t the teacher's ([`TeacherLogits`]), x [m, d], w [v, d], targets i32 [m] with
/// -100 where a row does not count. A scalar, f32. For the divergences, see
/// [`cpu::distill`](distill).
///
/// # Errors
/// Shapes that do not fit together, a weight outside 0 to 1, a temperature or a beta out of range;
/// a GPU, which has no kernel for it.
pub fn distillation_loss(
    x: &Tensor,
    w: &Tensor,
    taught: &TeacherLogits,
    targets: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    run("distillation_loss", x, w, taught, targets, scale, None)
}

/// As [`distillation_loss`], with the gradient of x; `dw` sums the weight's. The teacher has none.
pub fn distillation_loss_with_gradients(
    x: &Tensor,
    w: &Tensor,
    taught: &TeacherLogits,
    targets: &Tensor,
    scale: f32,
    dw: Option<GradientSlot<'_>>,
) -> Result<(Tensor, Tensor)> {
    let mut dx = x.empty_like(*x.shape(), x.dtype())?;
    let gradients = (&mut dx, dw);
    let loss = run("distillation_loss_with_gradients", x, w, taught, targets, scale, Some(gradients))?;
    Ok((loss, dx))
}

fn run(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    taught: &TeacherLogits,
    targets: &Tensor,
    scale: f32,
    mut gradients: Option<(&mut Tensor, Option<GradientSlot<'_>>)>,
) -> Result<Tensor> {
    let [m, d, v] = checked(op, x, w, targets)?;
    let [rows, width, vocab] = checked(op, &taught.x, &taught.w, targets)?;
    same_dtype(op, x, &taught.x)?;
    ensure_shape!((rows, vocab) == (m, v), op, "a teacher of {vocab} tokens for a student of {v}");
    let Distillation { weight, temperature, divergence } = taught.distillation;
    let known = match divergence {
        Divergence::JensenShannon { beta } => beta > 0.0 && beta < 1.0,
        Divergence::ForwardKl | Divergence::ReverseKl => true,
    };
    ensure_shape!(
        known && (0.0..=1.0).contains(&weight) && temperature >= 0.01 && temperature.is_finite(),
        op,
        "{:?}",
        taught.distillation
    );
    let device = x.device();
    ensure_shape!(device.computes() == Computes::Cpu, op, "no kernel for a GPU");
    let mut products = 1;
    if let Some((_, dw)) = &gradients {
        check_slot(op, dw, v * d)?;
        products = if dw.is_some() { 3 } else { 2 };
    }
    let (own, other) = (product_cost(x, w, products), product_cost(&taught.x, &taught.w, 1));
    let cost = Cost { flops: own.flops + other.flops, bytes: own.bytes + other.bytes };
    let adds = gradients.as_ref().and_then(|(_, dw)| dw.as_ref()).is_some_and(|(_, overwrite)| !overwrite);
    let work = cost.on(x.dtype(), [m, v, d, width]).variant(if adds { "adding" } else { "" });
    let mut losses = device.empty([m], DType::F32, Purpose::Workspace)?;
    let mut summary = HeadLoss::default();
    by_float!(op, x.dtype(), T => {
        let [mut logits, mut others] = [logits_workspace::<T>(x, v)?, logits_workspace::<T>(x, v)?];
        device.launch(op, work, |cpu| {
            let gradients = gradients.as_mut().map(|(dx, dw)| HeadGradients {
                scale,
                dx: Some(MatMut::new(dx.get_mut::<T>(), m, d)),
                accumulate: accumulate_mode(dw.as_ref().is_none_or(|(_, overwrite)| *overwrite)),
                dw: dw.as_mut().map(|(tensor, _)| tensor.get_mut::<f32>()),
            });
            let lesson = distill::TeacherLogits {
                x: MatRef::new(taught.x.get::<T>(), m, width),
                w: Weight::from(MatRef::new(taught.w.get::<T>(), v, width)),
                distillation: taught.distillation,
                workspace: others.get_mut::<T>(),
            };
            summary = distill::distillation_loss(
                cpu,
                MatRef::new(x.get::<T>(), m, d),
                Weight::from(MatRef::new(w.get::<T>(), v, d)),
                lesson,
                targets.get::<i32>(),
                gradients,
                losses.get_mut::<f32>(),
                logits.get_mut::<T>(),
            )?;
            Ok(())
        })?
    });
    scaled(x, summary, scale)
}
