//! Normalisations. Their backwards add to the gradient that already flowed into x through the
//! residual path.

use super::prelude::*;
use trainyard_tensor::cpu::elementwise::Binary;
use trainyard_tensor::ops::HeadLayout;

/// RMSNorm (Zhang & Sennrich 2019); inputs are x and weight.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    eps: f32,
    gains: Gains,
}

/// The gains of a norm, as a function of its weight w.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gains {
    /// `w`
    Weight,
    /// `1 + w`, rounded to the compute dtype (Gemma).
    OnePlusWeight,
}

impl Gains {
    /// The gains. The gradient of w is that of the gains.
    fn of(self, weight: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Gains::Weight => weight.clone(),
            Gains::OnePlusWeight => ops::plain::with_number(Binary::Add, weight, 1.0)?,
        })
    }
}

/// LayerNorm (Ba et al. 2016); inputs are x, weight and, where present, bias.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    eps: f32,
    bias: bool,
}

/// RMSNorm of each query and key head in a fused qkv matrix (Qwen3); inputs are qkv, query weight
/// and key weight.
#[derive(Clone, Debug)]
pub struct QkNorm {
    layout: HeadLayout,
    gains: Gains,
}

impl Tape<'_> {
    /// `x / rms(x) * w` over the last dimension: x [m, d], w [d].
    pub fn rms_norm(&mut self, x: &Var, w: ParamId, eps: f32) -> Result<Var> {
        self.rms_norm_with(x, w, eps, Gains::Weight)
    }

    /// As [`Tape::rms_norm`], with these gains.
    pub fn rms_norm_with(&mut self, x: &Var, w: ParamId, eps: f32, gains: Gains) -> Result<Var> {
        let weight = gains.of(&self.parameter(w)?.value)?;
        let (y, inverse_rms) = ops::rms_norm(x.tensor(), &weight, eps)?;
        self.record_one(RmsNorm { eps, gains }, &[x.into(), w.into()], y, |tape| {
            vec![tape.save(x), Saved::Tensor(inverse_rms)]
        })
    }

    /// `(x - mean(x)) / sqrt(var(x) + eps) * w + b` over the last dimension: x [m, d], w and b [d].
    pub fn layer_norm(&mut self, x: &Var, w: ParamId, b: Option<ParamId>, eps: f32) -> Result<Var> {
        let weight = self.parameter(w)?;
        let bias = b.map(|id| self.parameter(id)).transpose()?;
        let (y, mean, inverse_std) = ops::layer_norm(x.tensor(), &weight.value, bias.as_ref().map(|b| &b.value), eps)?;
        let mut inputs = vec![Operand::from(x), w.into()];
        inputs.extend(b.map(Operand::from));
        self.record_one(LayerNorm { eps, bias: b.is_some() }, &inputs, y, |tape| {
            vec![tape.save(x), Saved::Tensor(mean), Saved::Tensor(inverse_std)]
        })
    }

    /// Normalises each query head by `query` and each key head by `key` ([head_dim]); values pass
    /// unchanged.
    pub fn qk_norm(&mut self, qkv: &Var, layout: HeadLayout, query: ParamId, key: ParamId, eps: f32) -> Result<Var> {
        self.qk_norm_with(qkv, layout, [query, key], eps, Gains::Weight)
    }

    /// As [`Tape::qk_norm`], with these gains.
    pub fn qk_norm_with(
        &mut self,
        qkv: &Var,
        layout: HeadLayout,
        [query, key]: [ParamId; 2],
        eps: f32,
        gains: Gains,
    ) -> Result<Var> {
        let (wq, wk) = (gains.of(&self.parameter(query)?.value)?, gains.of(&self.parameter(key)?.value)?);
        let (y, inverse_rms) = ops::qk_norm(qkv.tensor(), layout, &wq, &wk, eps)?;
        self.record_one(QkNorm { layout, gains }, &[qkv.into(), query.into(), key.into()], y, |tape| {
            vec![tape.save(qkv), Saved::Tensor(inverse_rms)]
        })
    }
}

impl Differentiable for RmsNorm {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (x, inverse_rms, weight) = (cx.saved(0)?, cx.saved(1)?, self.gains.of(&cx.parameter(1)?.value)?);
        let mut dw = cx.gradient_target(1)?;
        let dx = cx.take_gradient(0);
        let dw = dw.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        let dx = ops::rms_norm_backward(&dy, &x, &weight, &inverse_rms, dx, dw)?;
        cx.add_gradient(0, dx)
    }

    fn recompute(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
        let (x, weight) = (cx.saved(0)?, self.gains.of(&cx.parameter(1)?.value)?);
        Ok(ops::rms_norm(&x, &weight, self.eps)?.0)
    }
}

impl Differentiable for LayerNorm {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (x, mean, inverse_std, weight) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?, cx.parameter(1)?);
        let mut dw = cx.gradient_target(1)?;
        let mut db = if self.bias { cx.gradient_target(2)? } else { None };
        let dx = cx.take_gradient(0);
        let dw = dw.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        let db = db.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        let dx = ops::layer_norm_backward(&dy, &x, &weight.value, &mean, &inverse_std, dx, dw, db)?;
        cx.add_gradient(0, dx)
    }

    fn recompute(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
        let (x, weight) = (cx.saved(0)?, cx.parameter(1)?);
        let bias = if self.bias { Some(cx.parameter(2)?) } else { None };
        Ok(ops::layer_norm(&x, &weight.value, bias.as_ref().map(|b| &b.value), self.eps)?.0)
    }
}

impl Differentiable for QkNorm {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let (qkv, inverse_rms) = (cx.saved(0)?, cx.saved(1)?);
        let (wq, wk) = (self.gains.of(&cx.parameter(1)?.value)?, self.gains.of(&cx.parameter(2)?.value)?);
        let (mut dwq, mut dwk) = (cx.gradient_target(1)?, cx.gradient_target(2)?);
        let dwq = dwq.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        let dwk = dwk.as_mut().map(|t| (&mut t.tensor, t.overwrite));
        let dx = ops::qk_norm_backward(dy, &qkv, self.layout, &wq, &wk, &inverse_rms, dwq, dwk)?;
        cx.add_gradient(0, dx)
    }
}
