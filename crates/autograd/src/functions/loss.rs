//! The LM head fused with softmax cross-entropy. Logits exist for one chunk of rows at a time.
//!
//! A loss needs its logits twice: for their normaliser and for the gradient. If the tape has the
//! gradients at hand ([`Tape::with_gradients`]), forward computes `dx` and adds to `dw` while a
//! chunk exists, and backward has nothing left to compute. Otherwise backward computes the chunks
//! again.
//!
//! Where ranks have a part of the vocabulary each, they exchange three numbers a row
//! ([`Tape::vocabulary_statistics`]) before the loss ([`Tape::part_cross_entropy`]). Its forward
//! computes logits only for gradients at hand.

use super::prelude::*;
use crate::AutogradError;
use trainyard_tensor::ops::TablePart;

/// One call; inputs are x and w.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy {
    targets: Tensor,
    scale: f32,
    /// True if forward already computed the gradients.
    eager: bool,
}

/// One call with a teacher; inputs are x and w.
#[derive(Clone, Debug)]
pub struct DistillationLoss {
    targets: Tensor,
    /// The teacher's matrix of the vocabulary.
    teacher: Tensor,
    distillation: ops::Distillation,
    scale: f32,
    /// True if forward already computed the gradients.
    eager: bool,
}

/// The distance of hidden states from a teacher's; its input is x.
#[derive(Clone, Debug)]
pub struct HiddenDistance {
    targets: Tensor,
    scale: f32,
}

/// One call of a head of whose vocabulary only a part is here; inputs are x and w.
#[derive(Clone, Debug)]
pub struct PartCrossEntropy {
    targets: Tensor,
    part: TablePart,
    scale: f32,
    /// True if forward already computed the gradients.
    eager: bool,
}

impl Tape<'_> {
    /// The destination of the gradient of `w`, if gradients are at hand and it is trained.
    fn target_at_hand(&mut self, w: ParamId, trained: bool) -> Result<Option<GradientTarget>> {
        match self.gradients() {
            Some(gradients) if trained => gradients.target(w),
            _ => Ok(None),
        }
    }

    /// The statistics of the logits `x wᵀ` that are here, f32 [m, 3]: of each row the largest, the
    /// sum of exponentials of the differences from it, and the target's logit, or 0 if it is
    /// elsewhere. x [m, d]; w the rows `part` of the vocabulary; targets i32 [m] of the whole
    /// vocabulary. No gradient flows through them.
    pub fn vocabulary_statistics(&mut self, x: &Var, w: ParamId, part: TablePart, targets: &Tensor) -> Result<Var> {
        let weight = self.parameter(w)?;
        let statistics = ops::vocabulary_statistics(x.tensor(), &weight.value, part, targets)?;
        Ok(self.constant(statistics))
    }

    /// [`Tape::linear_cross_entropy`] of a vocabulary of which only `part` is here: a scalar in
    /// f32, the same on all ranks. `statistics` are those of all parts, [parts m, 3], one part
    /// below the other. The gradient of x is the summand that comes from this part.
    pub fn part_cross_entropy(
        &mut self,
        x: &Var,
        w: ParamId,
        part: TablePart,
        statistics: &Tensor,
        targets: &Tensor,
        scale: f32,
    ) -> Result<Var> {
        let weight = self.parameter(w)?;
        let inputs = [Operand::from(x), w.into()];
        let ops::MergedLosses { loss, lse } = ops::merge_statistics(statistics, targets, scale)?;
        let recorded = self.records() && self.any_wanted(&inputs)?;
        let mut function = PartCrossEntropy { targets: targets.clone(), part, scale, eager: false };
        if recorded && self.gradients().is_some() {
            function.eager = true;
            let target = self.target_at_hand(w, weight.trained)?;
            let dx = function.gradients(x.tensor(), &weight.value, &lse, target)?;
            return self.record_one(function, &inputs, loss, |_| vec![Saved::Tensor(dx)]);
        }
        self.record_one(function, &inputs, loss, |tape| vec![tape.save(x), Saved::Tensor(lse)])
    }

    /// `scale` times the sum over rows of `-log softmax(x wᵀ)[target]`: x [m, d], w [v, d], targets
    /// i32 [m], -100 for rows that do not count. A scalar in f32.
    pub fn linear_cross_entropy(&mut self, x: &Var, w: ParamId, targets: &Tensor, scale: f32) -> Result<Var> {
        let weight = self.parameter(w)?;
        let inputs = [Operand::from(x), w.into()];
        let recorded = self.records() && self.any_wanted(&inputs)?;
        let mut function = LinearCrossEntropy { targets: targets.clone(), scale, eager: false };
        if recorded && self.gradients().is_some() {
            function.eager = true;
            let target = self.target_at_hand(w, weight.trained)?;
            let (loss, dx) = function.gradients(x.tensor(), &weight.value, target)?;
            return self.record_one(function, &inputs, loss, |_| vec![Saved::Tensor(dx)]);
        }
        let loss = ops::linear_cross_entropy(x.tensor(), &weight.value, targets, scale)?;
        self.record_one(function, &inputs, loss, |tape| vec![tape.save(x)])
    }
}

impl Tape<'_> {
    /// As [`Tape::linear_cross_entropy`], of a student that learns from a teacher's logits too
    /// ([`ops::distillation_loss`]). No gradient flows to the teacher.
    pub fn distillation_loss(
        &mut self,
        x: &Var,
        w: ParamId,
        taught: ops::TeacherLogits,
        targets: &Tensor,
        scale: f32,
    ) -> Result<Var> {
        let weight = self.parameter(w)?;
        let inputs = [Operand::from(x), w.into()];
        let recorded = self.records() && self.any_wanted(&inputs)?;
        let (teacher, distillation) = (taught.w.clone(), taught.distillation);
        let mut function = DistillationLoss { targets: targets.clone(), teacher, distillation, scale, eager: false };
        if recorded && self.gradients().is_some() {
            function.eager = true;
            let target = self.target_at_hand(w, weight.trained)?;
            let (loss, dx) = function.gradients(x.tensor(), &weight.value, taught.x, target)?;
            return self.record_one(function, &inputs, loss, |_| vec![Saved::Tensor(dx)]);
        }
        let loss = ops::distillation_loss(x.tensor(), &weight.value, &taught, targets, scale)?;
        self.record_one(function, &inputs, loss, |tape| vec![tape.save(x), Saved::Tensor(taught.x)])
    }
}

impl Tape<'_> {
    /// `scale` times the sum over rows of the mean of `(x - taught)²`: x and a teacher's hidden
    /// states `taught` [m, d], targets i32 [m], -100 for rows that do not count. A scalar in f32.
    pub fn hidden_distance(&mut self, x: &Var, taught: Tensor, targets: &Tensor, scale: f32) -> Result<Var> {
        let loss = ops::hidden_distance(x.tensor(), &taught, targets, scale)?;
        let function = HiddenDistance { targets: targets.clone(), scale };
        self.record_one(function, &[x.into()], loss, |tape| vec![tape.save(x), Saved::Tensor(taught)])
    }
}

impl Differentiable for HiddenDistance {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (x, taught) = (cx.saved(0)?, cx.saved(1)?);
        cx.add_gradient(0, ops::hidden_distance_backward(&dy, &x, &taught, &self.targets, self.scale)?)
    }
}

impl DistillationLoss {
    /// The loss and the gradient of x; `hidden` is the teacher's x.
    fn gradients(
        &self,
        x: &Tensor,
        w: &Tensor,
        hidden: Tensor,
        mut dw: Option<GradientTarget>,
    ) -> Result<(Tensor, Tensor)> {
        let dw = dw.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        let taught = ops::TeacherLogits { x: hidden, w: self.teacher.clone(), distillation: self.distillation };
        Ok(ops::distillation_loss_with_gradients(x, w, &taught, &self.targets, self.scale, dw)?)
    }
}

impl Differentiable for DistillationLoss {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(factor) = upstream_factor(cx, self.eager)? else { return Ok(()) };
        let (x, hidden) = (cx.saved(0)?, cx.saved(1)?);
        let weight = cx.parameter(1)?;
        let target = cx.gradient_target(1)?;
        let scaled = DistillationLoss { scale: self.scale * factor, ..self.clone() };
        let (_, dx) = scaled.gradients(&x, &weight.value, hidden, target)?;
        cx.add_gradient(0, dx)
    }
}

impl LinearCrossEntropy {
    fn gradients(&self, x: &Tensor, w: &Tensor, mut dw: Option<GradientTarget>) -> Result<(Tensor, Tensor)> {
        let dw = dw.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        Ok(ops::linear_cross_entropy_with_gradients(x, w, &self.targets, self.scale, dw)?)
    }
}

impl PartCrossEntropy {
    fn gradients(&self, x: &Tensor, w: &Tensor, lse: &Tensor, mut dw: Option<GradientTarget>) -> Result<Tensor> {
        let dw = dw.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        Ok(ops::linear_cross_entropy_part_gradients(x, w, self.part, &self.targets, lse, self.scale, dw)?)
    }
}

/// The factor that upstream puts on the gradients of a loss; None if nothing is left to compute. If
/// forward computed the gradients (`eager`), the factor must be 1 and dx is the first saved tensor.
fn upstream_factor(cx: &mut Backward<'_>, eager: bool) -> Result<Option<f32>> {
    let Some(upstream) = cx.output_gradient(0) else { return Ok(None) };
    let factor = match cx.is_one(&upstream) || upstream.device().is_meta() {
        true => 1.0,
        false => upstream.to_scalar()?,
    };
    if !eager {
        return Ok(Some(factor));
    }
    if factor != 1.0 {
        return Err(AutogradError::EagerUpstream(factor));
    }
    let dx = cx.saved(0)?;
    cx.leave(None, &[]);
    cx.add_gradient(0, dx)?;
    Ok(None)
}

impl Differentiable for LinearCrossEntropy {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(factor) = upstream_factor(cx, self.eager)? else { return Ok(()) };
        let x = cx.saved(0)?;
        let weight = cx.parameter(1)?;
        let target = cx.gradient_target(1)?;
        let scaled = LinearCrossEntropy { scale: self.scale * factor, ..self.clone() };
        let (_, dx) = scaled.gradients(&x, &weight.value, target)?;
        cx.add_gradient(0, dx)
    }
}

impl Differentiable for PartCrossEntropy {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(factor) = upstream_factor(cx, self.eager)? else { return Ok(()) };
        let (x, lse) = (cx.saved(0)?, cx.saved(1)?);
        let weight = cx.parameter(1)?;
        let target = cx.gradient_target(1)?;
        let scaled = PartCrossEntropy { scale: self.scale * factor, ..self.clone() };
        let dx = scaled.gradients(&x, &weight.value, &lse, target)?;
        cx.add_gradient(0, dx)
    }
}
