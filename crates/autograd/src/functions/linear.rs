//! `y = act(x wᵀ + b) + residual`: the product that nearly all FLOPs of a transformer go through.

use super::prelude::*;
use trainyard_tensor::cpu::gemm::Activation;

/// One call; inputs are x, w, then bias and residual where present.
#[derive(Clone, Debug)]
pub struct Linear {
    activation: Activation,
    bias: bool,
    residual: bool,
}

/// The optional parts of a linear layer.
#[derive(Clone, Copy, Default)]
pub struct LinearOptions<'a> {
    /// Added to each row, [n].
    pub bias: Option<ParamId>,
    /// Applied after the bias.
    pub activation: Activation,
    /// Added last, [m, n].
    pub residual: Option<&'a Var>,
}

impl Tape<'_> {
    /// `act(x wᵀ + b) + residual`: x [m, k], w [n, k], b [n], residual and result [m, n].
    pub fn linear(&mut self, x: &Var, w: ParamId, options: LinearOptions<'_>) -> Result<Var> {
        let LinearOptions { bias, activation, residual } = options;
        let mut inputs = vec![Operand::from(x), w.into()];
        inputs.extend(bias.map(Operand::from));
        inputs.extend(residual.map(Operand::from));
        let weight = self.parameter(w)?;
        let bias = bias.map(|id| self.parameter(id)).transpose()?;
        let keep = activation != Activation::None && self.records();
        let (y, pre) = ops::linear(
            x.tensor(),
            &weight.value,
            bias.as_ref().map(|b| &b.value),
            activation,
            residual.map(Var::tensor),
            keep,
        )?;
        let function = Linear { activation, bias: bias.is_some(), residual: residual.is_some() };
        self.record_one(function, &inputs, y, |tape| [tape.save(x)].into_iter().chain(pre.map(Saved::Tensor)).collect())
    }
}

impl Differentiable for Linear {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(mut dy) = cx.output_gradient(0) else { return Ok(()) };
        if self.residual {
            cx.add_gradient(2 + self.bias as usize, dy.clone())?;
        }
        if self.activation != Activation::None {
            let pre = cx.saved(1)?;
            dy = ops::activation_backward(self.activation, &pre, dy)?;
        }
        let mut dw = cx.gradient_target(1)?;
        let mut db = if self.bias { cx.gradient_target(2)? } else { None };
        if dw.is_some() || db.is_some() {
            let x = cx.saved(0)?;
            ops::linear_weight_gradient(
                &dy,
                &x,
                dw.as_mut().map(|t| (&mut t.tensor, t.overwrite)),
                db.as_mut().map(|t| (&mut t.tensor, t.overwrite)),
            )?;
        }
        if cx.wants(0)? {
            let weight = cx.parameter(1)?;
            cx.add_gradient(0, ops::linear_input_gradient(&dy, &weight.value)?)?;
        }
        Ok(())
    }
}
