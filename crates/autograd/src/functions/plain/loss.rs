//! Losses over values that are there. A language model's head has a fused form,
//! [`Tape::linear_cross_entropy`].

use super::prelude::*;
use plain::Reduction;

/// The mean squared difference; inputs are a and b.
#[derive(Clone, Debug)]
pub struct MseLoss;

/// Cross-entropy of softmax over plain logits.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    targets: Tensor,
    reduction: Reduction,
}

impl Tape<'_> {
    /// The mean of `(a - b)²` over two values of one shape: a scalar in f32.
    pub fn mse_loss(&mut self, a: &Var, b: &Var) -> Result<Var> {
        let y = plain::mse_loss(a.tensor(), b.tensor())?;
        self.record_one(MseLoss, &[a.into(), b.into()], y, |tape| vec![tape.save(a), tape.save(b)])
    }

    /// `-log softmax(logits)[target]`, its mean or sum over rows: logits [.., v], targets i32 of
    /// the dimensions before, -100 for rows that do not count. A scalar in f32.
    pub fn cross_entropy(&mut self, logits: &Var, targets: &Tensor, reduction: Reduction) -> Result<Var> {
        let (y, lse) = plain::cross_entropy(logits.tensor(), targets, reduction)?;
        let function = CrossEntropy { targets: targets.clone(), reduction };
        self.record_one(function, &[logits.into()], y, |tape| vec![tape.save(logits), Saved::Tensor(lse)])
    }
}

impl Differentiable for MseLoss {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (a, b) = (cx.saved(0)?, cx.saved(1)?);
        if cx.wants(0)? {
            cx.add_gradient(0, plain::mse_loss_backward(&dy, &a, &b)?)?;
        }
        if cx.wants(1)? {
            cx.add_gradient(1, plain::mse_loss_backward(&dy, &b, &a)?)?;
        }
        Ok(())
    }
}

impl Differentiable for CrossEntropy {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let dx = plain::cross_entropy_backward(&dy, &cx.saved(0)?, &self.targets, &cx.saved(1)?, self.reduction)?;
        cx.add_gradient(0, dx)
    }
}
