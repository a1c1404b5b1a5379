//! `y = act(x wᵀ + b) + residual`: the product that takes nearly all FLOPs of a transformer. Its
//! operands have eight bits if the tape says so ([`Tape::with_fp8`], [`Tape::with_int8`]).

use super::prelude::*;
use crate::tape::Operands;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::ops::fp8;

/// One call; inputs are x, w, then bias and residual where present.
#[derive(Clone, Debug)]
pub struct Linear {
    activation: Activation,
    bias: bool,
    residual: bool,
    /// True if x is kept: the weight or the bias is trained.
    keeps_input: bool,
    /// The operands of its products. Backward rounds those of forward in the same way.
    operands: Operands,
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
        if let Some(adapter) = self.adapter(w) {
            return self.adapted_linear(x, w, options, adapter);
        }
        self.own_linear(x, w, options)
    }

    /// [`Tape::linear`] without what an adapter adds.
    pub(super) fn own_linear(&mut self, x: &Var, w: ParamId, options: LinearOptions<'_>) -> Result<Var> {
        let LinearOptions { bias, activation, residual } = options;
        self.observe(w, x.tensor())?;
        let mut inputs = vec![Operand::from(x), w.into()];
        inputs.extend(bias.map(Operand::from));
        inputs.extend(residual.map(Operand::from));
        let weight = self.parameter(w)?;
        let bias = bias.map(|id| self.parameter(id)).transpose()?;
        let keep = activation != Activation::None && self.records();
        let (from, added) = (x.tensor(), residual.map(Var::tensor));
        let keeps_input = weight.trained || bias.as_ref().is_some_and(|bias| bias.trained);
        let bias = bias.as_ref().map(|b| &b.value);
        let (operands, weight) = (self.operands(w), &weight.value);
        let (y, pre) = match &operands {
            Operands::Whole => ops::linear(from, weight, bias, activation, added, keep)?,
            Operands::Fp8(scaling) => fp8::linear_fp8(from, weight, bias, activation, added, keep, scaling)?,
            Operands::Int8 => ops::linear_int8(from, weight, bias, activation, added, keep)?,
            Operands::RoundedInput => {
                let from = ops::grid::rows_to_grid(8, from)?;
                ops::linear(&from, weight, bias, activation, added, keep)?
            }
        };
        let function = Linear { activation, bias: bias.is_some(), residual: residual.is_some(), keeps_input, operands };
        self.record_one(function, &inputs, y, |tape| {
            let input = keeps_input.then(|| tape.save(x));
            input.into_iter().chain(pre.map(Saved::Tensor)).collect()
        })
    }
}

impl Differentiable for Linear {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(mut dy) = cx.output_gradient(0) else { return Ok(()) };
        if !cx.has_left() {
            if self.residual {
                cx.add_gradient(2 + self.bias as usize, dy.clone())?;
            }
            if self.activation != Activation::None {
                let pre = cx.saved(usize::from(self.keeps_input))?;
                dy = ops::activation_backward(self.activation, &pre, dy)?;
            }
            cx.leave(Some(&dy), if self.keeps_input { &[0] } else { &[] });
        }
        let mut dw = cx.gradient_target(1)?;
        let mut db = if self.bias { cx.gradient_target(2)? } else { None };
        if let Operands::Fp8(scaling) = &self.operands {
            let x = if dw.is_some() { Some(cx.saved(0)?) } else { None };
            let weight = if cx.wants(0)? { Some(cx.parameter(1)?.value) } else { None };
            let x = x.as_ref().zip(dw.as_mut().map(|t| (&mut t.tensor, t.overwrite)));
            let db = db.as_mut().map(|t| (&mut t.tensor, t.overwrite));
            return match fp8::linear_fp8_backward(&dy, x, weight.as_ref(), db, scaling)? {
                Some(dx) => cx.add_gradient(0, dx),
                None => Ok(()),
            };
        }
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
            let input_gradient = match self.operands {
                Operands::Int8 => ops::linear_int8_input_gradient,
                _ => ops::linear_input_gradient,
            };
            cx.add_gradient(0, input_gradient(&dy, &weight.value)?)?;
        }
        Ok(())
    }
}
