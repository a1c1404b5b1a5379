//! Differentiation: walks the nodes of a recording from last to first.

use crate::functions::Function;
use crate::halves::DeferredNode;
use crate::tape::{Node, Operand, Place, Recording, Saved, Value, Var, in_backward};
use crate::{AutogradError, GradientTarget, Gradients, Parameter, Parameters, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use trainyard_tensor::{Tensor, ops};

/// The view of one function's backward: its saved tensors, the gradients of its outputs, and the
/// destinations of its inputs' gradients.
pub struct Backward<'a> {
    pub(crate) parameters: &'a dyn Parameters,
    pub(crate) gradients: &'a mut dyn Gradients,
    pub(crate) values: &'a [Value],
    /// The nodes before this one, for recomputing their results.
    pub(crate) earlier: &'a [Node],
    pub(crate) node: &'a Node,
    pub(crate) pass: Pass<'a>,
    /// A scalar that is known to be 1.
    pub(crate) one: Option<&'a Tensor>,
    pub(crate) flow: &'a mut Flow,
}

/// The gradients that a walk over the nodes computes.
#[derive(Clone, Copy)]
pub(crate) enum Pass<'a> {
    /// All that are wanted.
    Whole,
    /// Those of the values for which this is true, by value id.
    Values(&'a [bool]),
    /// Those of the inputs for which this is true, by index.
    Rest {
        wanted: &'a [bool],
        /// True if the node's output gradient is the one that [`Backward::leave`] left.
        left: bool,
    },
}

/// Gradients on their way, and recomputed values, both by value id.
#[derive(Default)]
pub(crate) struct Flow {
    pub gradients: Vec<Option<Tensor>>,
    pub recomputed: BTreeMap<usize, Tensor>,
    /// Set by [`Backward::leave`].
    pub left: Option<Left>,
}

/// The needs of a function's second half, where they are fewer than all.
pub(crate) struct Left {
    pub gradient: Option<Tensor>,
    /// Indices of saved tensors.
    pub saved: &'static [usize],
}

impl Recording {
    /// Runs backward from `outputs` (each with its gradient) and returns the gradients of `inputs`,
    /// None where nothing flowed. Gradients of parameters go to `gradients`. Saved tensors are
    /// freed as they are used.
    pub fn backward(
        self,
        outputs: &[(&Var, Tensor)],
        inputs: &[&Var],
        parameters: &dyn Parameters,
        gradients: &mut dyn Gradients,
    ) -> Result<Vec<Option<Tensor>>> {
        let outputs: Vec<(Place, Tensor)> = outputs.iter().map(|(var, g)| (Place::from(*var), g.clone())).collect();
        let inputs: Vec<Place> = inputs.iter().map(|var| Place::from(*var)).collect();
        self.backward_at(&outputs, &inputs, parameters, gradients)
    }

    /// States that `one` is a scalar with the value 1, so that backward need not read it. On a GPU
    /// the host would have to wait for it.
    pub fn with_one(mut self, one: &Tensor) -> Recording {
        self.one = Some(one.clone());
        self
    }

    /// As [`Recording::backward`], from and to places in the graph. Their values need not exist any
    /// more.
    pub fn backward_at(
        mut self,
        outputs: &[(Place, Tensor)],
        inputs: &[Place],
        parameters: &dyn Parameters,
        gradients: &mut dyn Gradients,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut flow = Flow::starting(&self.values, outputs)?;
        let wanted: Vec<bool> = self.values.iter().map(|value| value.wanted).collect();
        // Gradients of parameters that wait for the next exchange.
        let mut waiting: Vec<DeferredNode> = Vec::new();
        while let Some(node) = self.nodes.pop() {
            let outputs = node.output_ids();
            let begins_exchange = node.function.begins_exchange();
            if outputs.clone().any(|id| flow.gradients[id].is_some()) {
                let name = node.function.info().name;
                let waits = node.function.parameters_wait();
                let mut cx = Backward {
                    parameters,
                    gradients: &mut *gradients,
                    values: &self.values,
                    earlier: &self.nodes,
                    node: &node,
                    pass: if waits { Pass::Values(&wanted) } else { Pass::Whole },
                    one: self.one.as_ref(),
                    flow: &mut flow,
                };
                node.function.backward(&mut cx).map_err(in_backward(name))?;
                if waits {
                    let left = cx.flow.left.take();
                    let rest = cx.rest(left, None).map_err(in_backward(name))?;
                    let trained = |input: &Operand| match input {
                        Operand::Param(id) => Ok(parameters.parameter(*id)?.trained),
                        Operand::Value(_) => Ok(false),
                    };
                    let params: Vec<bool> = node.inputs.iter().map(trained).collect::<Result<_>>()?;
                    if params.contains(&true) {
                        waiting.push(rest.of(node, params));
                    }
                }
            }
            flow.forget(outputs);
            if begins_exchange || self.nodes.is_empty() {
                for node in waiting.drain(..) {
                    node.run(parameters, gradients, self.one.as_ref(), &mut flow)?;
                }
            }
        }
        Ok(flow.take(inputs))
    }
}

impl Flow {
    /// The gradients with which a walk begins.
    pub fn starting(values: &[Value], outputs: &[(Place, Tensor)]) -> Result<Flow> {
        let mut flow = Flow { gradients: vec![None; values.len()], ..Flow::default() };
        for (output, gradient) in outputs {
            if output.shape != *gradient.shape() {
                return Err(AutogradError::GradientShape {
                    output: output.shape.to_string(),
                    gradient: gradient.shape().to_string(),
                });
            }
            if values.get(output.id).is_some_and(|value| value.wanted) {
                flow.add(output.id, gradient.clone())?;
            }
        }
        Ok(flow)
    }

    /// Frees what belongs to the outputs of a node that is done.
    pub fn forget(&mut self, outputs: Range<usize>) {
        for id in outputs {
            self.gradients[id] = None;
            self.recomputed.remove(&id);
        }
    }

    /// The gradients that arrived at `inputs`.
    pub fn take(&mut self, inputs: &[Place]) -> Vec<Option<Tensor>> {
        inputs.iter().map(|input| self.gradients.get_mut(input.id).and_then(Option::take)).collect()
    }

    fn add(&mut self, id: usize, gradient: Tensor) -> Result<()> {
        self.gradients[id] = Some(match self.gradients[id].take() {
            None => gradient,
            Some(before) => ops::add_into(before, &gradient)?,
        });
        Ok(())
    }
}

impl Backward<'_> {
    /// The gradient of output `index`; None where nothing flowed into it. It is owned, so it may be
    /// changed in place if it is unique.
    pub fn output_gradient(&mut self, index: usize) -> Option<Tensor> {
        self.flow.gradients[self.node.first_output + index].take()
    }

    /// True if a gradient is known to be a scalar 1.
    pub fn is_one(&self, gradient: &Tensor) -> bool {
        self.one.is_some_and(|one| one.is_same_region(gradient))
    }

    /// Saved tensor `index`. It is recomputed if it was not kept.
    pub fn saved(&mut self, index: usize) -> Result<Tensor> {
        let saved = self.node.saved[index].clone();
        self.restore(saved)
    }

    pub(crate) fn restore(&mut self, saved: Saved) -> Result<Tensor> {
        let id = match saved {
            Saved::Tensor(tensor) => return Ok(tensor),
            Saved::Recompute(id) => id,
            Saved::Away(index, _) => return Err(AutogradError::Away(index)),
        };
        if let Some(tensor) = self.flow.recomputed.get(&id) {
            return Ok(tensor.clone());
        }
        let producer = self.values[id].producer.expect("only results of functions are recomputed");
        let node = &self.earlier[producer];
        let mut cx = Backward {
            parameters: self.parameters,
            gradients: &mut *self.gradients,
            values: self.values,
            earlier: &self.earlier[..producer],
            node,
            pass: self.pass,
            one: self.one,
            flow: &mut *self.flow,
        };
        let tensor = node.function.recompute(&mut cx)?;
        self.flow.recomputed.insert(id, tensor.clone());
        Ok(tensor)
    }

    /// True if this pass computes the gradient of input `index`.
    pub fn wants(&self, index: usize) -> Result<bool> {
        match (self.pass, self.node.inputs[index]) {
            (Pass::Whole, Operand::Value(id)) => Ok(self.values.get(id).is_some_and(|value| value.wanted)),
            (Pass::Whole, Operand::Param(id)) => Ok(self.parameters.parameter(id)?.trained),
            (Pass::Values(wanted), Operand::Value(id)) => Ok(wanted.get(id).is_some_and(|wanted| *wanted)),
            (Pass::Values(_), Operand::Param(_)) => Ok(false),
            (Pass::Rest { wanted, .. }, _) => Ok(wanted[index]),
        }
    }

    /// States what the second half of a divided backward needs of this node: this gradient in the
    /// place of the output's, and the saved tensors of these indices, which are then the only ones.
    /// Without the call it gets the output gradients and every saved tensor. The call has no effect
    /// unless this is the first half.
    pub fn leave(&mut self, gradient: Option<&Tensor>, saved: &'static [usize]) {
        if let Pass::Values(_) = self.pass {
            self.flow.left = Some(Left { gradient: gradient.cloned(), saved });
        }
    }

    /// True in the second half of a divided backward, if the first one called [`Backward::leave`].
    pub fn has_left(&self) -> bool {
        matches!(self.pass, Pass::Rest { left: true, .. })
    }

    /// The number of inputs.
    pub fn inputs(&self) -> usize {
        self.node.inputs.len()
    }

    /// Adds to the gradient of input `index`, which must be a value. The gradient is dropped if
    /// that input wants none.
    pub fn add_gradient(&mut self, index: usize, gradient: Tensor) -> Result<()> {
        match self.node.inputs[index] {
            Operand::Value(id) if self.wants(index)? => self.flow.add(id, gradient),
            _ => Ok(()),
        }
    }

    /// Takes the gradient that has flowed into input `index` so far, for kernels that add to it as
    /// they write. Return it through [`Backward::add_gradient`].
    pub fn take_gradient(&mut self, index: usize) -> Option<Tensor> {
        match self.node.inputs[index] {
            Operand::Value(id) => self.flow.gradients.get_mut(id).and_then(Option::take),
            Operand::Param(_) => None,
        }
    }

    /// The compute copy of input `index`, which is a parameter.
    pub fn parameter(&self, index: usize) -> Result<Parameter> {
        match self.node.inputs[index] {
            Operand::Param(id) => self.parameters.parameter(id),
            Operand::Value(_) => unreachable!("input {index} of {} is a value", self.node.function.info().name),
        }
    }

    /// The destination of the gradient of input `index`, a parameter; None if this pass computes
    /// none.
    pub fn gradient_target(&mut self, index: usize) -> Result<Option<GradientTarget>> {
        match self.node.inputs[index] {
            Operand::Param(id) if self.wants(index)? => self.gradients.target(id),
            _ => Ok(None),
        }
    }

    /// True if input `index` is a parameter.
    pub fn is_param(&self, index: usize) -> bool {
        matches!(self.node.inputs[index], Operand::Param(_))
    }
}

impl Function {
    fn recompute(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
        self.recompute_output(cx)
    }
}
