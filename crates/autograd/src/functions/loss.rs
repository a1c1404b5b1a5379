//! The LM head fused with softmax cross-entropy. Logits exist for one chunk of rows at a time.
//!
//! A loss needs its logits twice: for their normaliser and for the gradient. If the tape has the
//! gradients at hand ([`Tape::with_gradients`]), forward computes `dx` and adds to `dw` while a
//! chunk exists, and backward has nothing left to compute. Otherwise backward computes the chunks
//! again.

use super::prelude::*;
use crate::AutogradError;

/// One call; inputs are x and w.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy {
    targets: Tensor,
    scale: f32,
    /// True if forward already computed the gradients.
    eager: bool,
}

impl Tape<'_> {
    /// `scale` times the sum over rows of `-log softmax(x wᵀ)[target]`: x [m, d], w [v, d], targets
    /// i32 [m], -100 for rows that do not count. A scalar in f32.
    pub fn linear_cross_entropy(&mut self, x: &Var, w: ParamId, targets: &Tensor, scale: f32) -> Result<Var> {
        let weight = self.parameter(w)?;
        let inputs = [Operand::from(x), w.into()];
        let recorded = self.records() && self.any_wanted(&inputs)?;
        let mut function = LinearCrossEntropy { targets: targets.clone(), scale, eager: false };
        if recorded && self.gradients().is_some() {
            function.eager = true;
            let trained = weight.trained;
            let target = match self.gradients() {
                Some(gradients) if trained => gradients.target(w)?,
                _ => None,
            };
            let (loss, dx) = function.gradients(x.tensor(), &weight.value, target)?;
            return self.record_one(function, &inputs, loss, |_| vec![Saved::Tensor(dx)]);
        }
        let loss = ops::linear_cross_entropy(x.tensor(), &weight.value, targets, scale)?;
        self.record_one(function, &inputs, loss, |tape| vec![tape.save(x)])
    }
}

impl LinearCrossEntropy {
    fn gradients(&self, x: &Tensor, w: &Tensor, mut dw: Option<GradientTarget>) -> Result<(Tensor, Tensor)> {
        let dw = dw.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        Ok(ops::linear_cross_entropy_with_gradients(x, w, &self.targets, self.scale, dw)?)
    }
}

impl Differentiable for LinearCrossEntropy {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(upstream) = cx.output_gradient(0) else { return Ok(()) };
        let unit = cx.is_one(&upstream) || upstream.device().is_meta() || upstream.to_scalar()? == 1.0;
        if self.eager {
            if !unit {
                return Err(AutogradError::EagerUpstream(upstream.to_scalar()?));
            }
            let dx = cx.saved(0)?;
            cx.leave(None, &[]);
            return cx.add_gradient(0, dx);
        }
        let x = cx.saved(0)?;
        let weight = cx.parameter(1)?;
        let scale = if unit { self.scale } else { self.scale * upstream.to_scalar()? };
        let target = cx.gradient_target(1)?;
        let scaled = LinearCrossEntropy { scale, ..self.clone() };
        let (_, dx) = scaled.gradients(&x, &weight.value, target)?;
        cx.add_gradient(0, dx)
    }
}
