//! The low-rank addition of an adapter to a product (LoRA, Hu et al. 2021).
//!
//! Its result is the residual that the product's epilogue adds, so the sum costs no pass over
//! memory. In backward it adds to the gradient of x that the product has computed.

use super::linear::LinearOptions;
use super::prelude::*;
use crate::{Adapter, AdapterOutputs};
use trainyard_tensor::cpu::elementwise::Binary;
use trainyard_tensor::cpu::gemm::Activation;
use trainyard_tensor::ops::plain;
use trainyard_tensor::{DType, Purpose};

/// `scale (x aᵀ) bᵀ + residual`; inputs are x, a, b and, where present, the residual.
#[derive(Clone, Debug)]
pub struct LowRank {
    adapter: Adapter,
    residual: bool,
}

impl Tape<'_> {
    /// `act(x wᵀ + b + scale (x aᵀ) bᵀ) + residual`.
    pub(super) fn adapted_linear(
        &mut self,
        x: &Var,
        w: ParamId,
        options: LinearOptions<'_>,
        adapter: Adapter,
    ) -> Result<Var> {
        let LinearOptions { bias, activation, residual } = options;
        if activation == Activation::None {
            let sum = self.low_rank(x, residual, adapter)?;
            return self.own_linear(x, w, LinearOptions { bias, activation, residual: Some(&sum) });
        }
        let sum = self.low_rank(x, None, adapter)?;
        let inner = LinearOptions { bias, activation: Activation::None, residual: Some(&sum) };
        let y = self.own_linear(x, w, inner)?;
        let y = self.activate(&y, activation)?;
        residual.map_or(Ok(y.clone()), |residual| self.add(&y, residual))
    }

    /// `scale (x aᵀ) bᵀ + residual`: x [m, k], residual and result [m, n]. [`Tape::linear`] calls
    /// it
    /// for weights that have an adapter.
    pub fn low_rank(&mut self, x: &Var, residual: Option<&Var>, adapter: Adapter) -> Result<Var> {
        let (down, up) = (self.parameter(adapter.a)?.value, self.parameter(adapter.b)?.value);
        let (narrow, _) = ops::linear(x.tensor(), &down, None, Activation::None, None, false)?;
        let wide = scaled(&up, &adapter)?;
        let (y, _) = ops::linear(&narrow, &wide, None, Activation::None, residual.map(Var::tensor), false)?;
        let mut inputs = vec![Operand::from(x), adapter.a.into(), adapter.b.into()];
        inputs.extend(residual.map(Operand::from));
        let function = LowRank { adapter, residual: residual.is_some() };
        self.record_one(function, &inputs, y, |tape| vec![tape.save(x), Saved::Tensor(narrow)])
    }
}

/// The up projections as one matrix [n, members rank], times the scale: a row has its own values in
/// the columns of its pair, and zeros elsewhere.
fn scaled(up: &Tensor, adapter: &Adapter) -> Result<Tensor> {
    let scaled = match adapter.scale {
        1.0 => up.clone(),
        scale => plain::with_number(Binary::Mul, up, scale)?,
    };
    if let [AdapterOutputs { from: Some(_), .. }] = &*adapter.outputs {
        return Ok(scaled);
    }
    let mut stretches = Vec::with_capacity(adapter.outputs.len());
    for AdapterOutputs { count, from } in adapter.outputs.iter() {
        let zeros = |members: usize| {
            let shape = [*count, members * adapter.rank];
            up.device().zeros(shape, up.dtype(), Purpose::Activations)
        };
        let Some((member, row)) = *from else {
            stretches.push(zeros(adapter.members)?);
            continue;
        };
        let mut parts = Vec::new();
        if member > 0 {
            parts.push(zeros(member)?);
        }
        parts.push(scaled.narrow(row..row + count)?);
        if member + 1 < adapter.members {
            parts.push(zeros(adapter.members - member - 1)?);
        }
        stretches.push(plain::concat(&parts.iter().collect::<Vec<_>>(), 1)?);
    }
    Ok(plain::concat(&stretches.iter().collect::<Vec<_>>(), 0)?)
}

impl Differentiable for LowRank {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        if self.residual {
            cx.add_gradient(3, dy.clone())?;
        }
        let adapter = &self.adapter;
        let (down, up) = (cx.parameter(1)?.value, cx.parameter(2)?.value);
        let wide = scaled(&up, adapter)?;
        if let Some(target) = cx.gradient_target(2)? {
            let narrow = cx.saved(1)?;
            let mut of_wide = dy.device().empty(*wide.shape(), DType::F32, Purpose::Activations)?;
            ops::linear_weight_gradient(&dy, &narrow, Some((&mut of_wide, true)), None)?;
            let mut first = 0;
            for AdapterOutputs { count, from } in adapter.outputs.iter() {
                let outputs = first..first + count;
                first = outputs.end;
                let Some((member, row)) = *from else { continue };
                let own = of_wide.narrow(outputs)?;
                let own = match adapter.members {
                    1 => own,
                    _ => plain::narrow(&own, 1, member * adapter.rank, adapter.rank)?,
                };
                let own = plain::with_number(Binary::Mul, &own, adapter.scale)?;
                ops::accumulate(&own, &mut target.tensor.narrow(row..row + count)?, target.overwrite)?;
            }
        }
        let narrow_gradient = ops::linear_input_gradient(&dy, &wide)?;
        if let Some(mut target) = cx.gradient_target(1)? {
            let x = cx.saved(0)?;
            ops::linear_weight_gradient(&narrow_gradient, &x, Some((&mut target.tensor, target.overwrite)), None)?;
        }
        if cx.wants(0)? {
            let before = cx.take_gradient(0);
            let down = plain::transpose(&down, 0, 1)?;
            let (dx, _) = ops::linear(&narrow_gradient, &down, None, Activation::None, before.as_ref(), false)?;
            cx.add_gradient(0, dx)?;
        }
        Ok(())
    }
}
