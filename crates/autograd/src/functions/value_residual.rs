//! Value residuals: values of a block mixed with those of the first.

use super::prelude::*;
use trainyard_tensor::ops::HeadLayout;

/// `a V + b V_1` (Zhou et al. 2024) in the value columns of qkv; inputs are qkv, V_1 and the
/// weights (a, b).
#[derive(Clone, Debug)]
pub struct ValueResidual {
    layout: HeadLayout,
}

impl Tape<'_> {
    /// Gives qkv [m, (h + 2 h_kv) c] the values `a V + b V_1` in place of V, with V_1 = `first`
    /// [m, h_kv c] and (a, b) = `weights` [2]. It takes qkv by value and works in place if nothing
    /// else holds the tensor.
    pub fn value_residual(&mut self, qkv: Var, layout: HeadLayout, first: &Var, weights: ParamId) -> Result<Var> {
        let inputs = [Operand::from(&qkv), first.into(), weights.into()];
        let (value, keep) = (self.parameter(weights)?.value, self.records());
        let (y, own) = ops::value_residual(qkv.into_tensor(), layout, first.tensor(), &value, keep)?;
        self.record_one(ValueResidual { layout }, &inputs, y, |tape| {
            own.into_iter().map(Saved::Tensor).chain([tape.save(first)]).collect()
        })
    }
}

impl Differentiable for ValueResidual {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (own, first, weights) = (cx.saved(0)?, cx.saved(1)?, cx.parameter(2)?);
        let mut dweights = cx.gradient_target(2)?;
        let dweights = dweights.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        let (dx, dfirst) = ops::value_residual_backward(dy, self.layout, &own, &first, &weights.value, dweights)?;
        cx.add_gradient(1, dfirst)?;
        cx.add_gradient(0, dx)
    }
}
