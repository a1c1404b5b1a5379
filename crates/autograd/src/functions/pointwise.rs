//! Functions of one element, or nearly so, that the model families use.

use super::prelude::*;
use trainyard_tensor::Shape;
use trainyard_tensor::cpu::gemm::Activation;

/// A parameter as a value on the tape, for model code that computes with it directly.
#[derive(Clone, Debug)]
pub struct Parameter;

/// `a + b`, broadcast together.
#[derive(Clone, Debug)]
pub struct Add {
    shapes: [Shape; 2],
}

/// `x + b` of rows, b a parameter; inputs are x and b.
#[derive(Clone, Debug)]
pub struct Bias;

/// An activation on its own.
#[derive(Clone, Debug)]
pub struct Activate {
    activation: Activation,
}

/// `silu(gate) * up` (Shazeer 2020) of a fused [m, 2 f] matrix, gate first.
#[derive(Clone, Debug)]
pub struct SwiGlu;

/// `act(gate) * up` of a fused [m, 2 f] matrix, gate first, for other activations than SiLU.
#[derive(Clone, Debug)]
pub struct Glu {
    activation: Activation,
}

impl Tape<'_> {
    /// The parameter's compute copy as a value; its gradient goes where the parameter's does.
    pub fn param(&mut self, id: ParamId) -> Result<Var> {
        let value = self.parameter(id)?.value;
        self.record_one(Parameter, &[id.into()], value, |_| Vec::new())
    }

    /// `a + b`, broadcast together.
    pub fn add(&mut self, a: &Var, b: &Var) -> Result<Var> {
        let y = ops::add(a.tensor(), b.tensor())?;
        let shapes = [*a.tensor().shape(), *b.tensor().shape()];
        self.record_one(Add { shapes }, &[a.into(), b.into()], y, |_| Vec::new())
    }

    /// `x + b`: x [m, n], b [n]. For a bias that is added apart from its product, as where ranks
    /// sum their products first.
    pub fn add_bias(&mut self, x: &Var, b: ParamId) -> Result<Var> {
        let bias = self.parameter(b)?;
        let y = ops::add(x.tensor(), &bias.value)?;
        self.record_one(Bias, &[x.into(), b.into()], y, |_| Vec::new())
    }

    /// The activation of each element.
    pub fn activate(&mut self, x: &Var, activation: Activation) -> Result<Var> {
        let y = ops::activate(activation, x.tensor())?;
        self.record_one(Activate { activation }, &[x.into()], y, |tape| vec![tape.save(x)])
    }

    /// `silu(gate) * up` of [m, 2 f]: [m, f].
    pub fn swiglu(&mut self, gate_up: &Var) -> Result<Var> {
        let y = ops::swiglu(gate_up.tensor())?;
        self.record_one(SwiGlu, &[gate_up.into()], y, |tape| vec![tape.save(gate_up)])
    }
}

impl Tape<'_> {
    /// `act(gate) * up` of [m, 2 f]: [m, f].
    pub fn glu(&mut self, gate_up: &Var, activation: Activation) -> Result<Var> {
        if activation == Activation::Silu {
            return self.swiglu(gate_up);
        }
        let y = ops::glu(activation, gate_up.tensor())?;
        self.record_one(Glu { activation }, &[gate_up.into()], y, |tape| vec![tape.save(gate_up)])
    }
}

impl Differentiable for Glu {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let gate_up = cx.saved(0)?;
        let dx = ops::glu_backward(self.activation, &gate_up, &dy)?;
        cx.add_gradient(0, dx)
    }

    fn recompute(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
        let gate_up = cx.saved(0)?;
        Ok(ops::glu(self.activation, &gate_up)?)
    }
}

impl Differentiable for Parameter {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        if let Some(mut target) = cx.gradient_target(0)? {
            ops::accumulate(&dy, &mut target.tensor, target.overwrite)?;
        }
        Ok(())
    }
}

impl Differentiable for Add {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        if cx.wants(0)? {
            cx.add_gradient(0, ops::plain::sum_to(dy.clone(), &self.shapes[0])?)?;
        }
        if cx.wants(1)? {
            cx.add_gradient(1, ops::plain::sum_to(dy, &self.shapes[1])?)?;
        }
        Ok(())
    }
}

impl Differentiable for Bias {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        if let Some(mut target) = cx.gradient_target(1)? {
            ops::linear_weight_gradient(&dy, &dy, None, Some((&mut target.tensor, target.overwrite)))?;
        }
        cx.add_gradient(0, dy)
    }
}

impl Differentiable for Activate {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let x = cx.saved(0)?;
        let dx = ops::activation_backward(self.activation, &x, dy)?;
        cx.add_gradient(0, dx)
    }

    fn recompute(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
        let x = cx.saved(0)?;
        Ok(ops::activate(self.activation, &x)?)
    }
}

impl Differentiable for SwiGlu {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = cx.output_gradient(0) else { return Ok(()) };
        let gate_up = cx.saved(0)?;
        let dx = ops::swiglu_backward(&gate_up, &dy)?;
        cx.add_gradient(0, dx)
    }

    fn recompute(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
        let gate_up = cx.saved(0)?;
        Ok(ops::swiglu(&gate_up)?)
    }
}
