//! Backward in two halves, for schedules that fill bubbles with the second one (Qi et al. 2023).
//!
//! The first half computes the gradients of values, which the stage before waits for. The second
//! computes the gradients of parameters, which nobody waits for until the optimizer. Together they
//! give the bits of the whole backward.
//!
//! A node takes part in the first half if one of its inputs leads back to a requested leaf, and in
//! the second if one of its inputs is a trained parameter or a value that leads back to parameters
//! only. A node of both halves runs twice: each time [`Backward::wants`] names the gradients to
//! compute. Sums over the paths to a value keep their order, because all paths to it are in the
//! same half.

use crate::backward::{Flow, Left, Pass};
use crate::tape::{Node, Operand, Place, Recording, Saved, buffer_bytes, in_backward};
use crate::{Backward, GradientTarget, Gradients, ParamId, Parameters, Result};
use trainyard_tensor::Tensor;

/// The second half of a backward: the tensors from which the gradients of parameters are computed.
#[derive(Default)]
pub struct Deferred {
    /// In the order of backward.
    nodes: Vec<DeferredNode>,
    /// Gradients on their way, by value id.
    gradients: Vec<Option<Tensor>>,
    /// A scalar that is known to be 1.
    one: Option<Tensor>,
}

/// A node whose parameters' gradients are still to be computed. All its saved tensors are here.
pub(crate) struct DeferredNode {
    node: Node,
    /// The inputs whose gradients are to be computed, by index.
    wanted: Vec<bool>,
    /// The gradients of its outputs, if the first half has used them; else they are among those of
    /// [`Deferred`].
    output_gradients: Option<Vec<Option<Tensor>>>,
    /// True if [`Backward::leave`] chose what is kept.
    left: bool,
}

/// The needs of a node's second half.
pub(crate) struct Rest {
    saved: Vec<Saved>,
    output_gradients: Option<Vec<Option<Tensor>>>,
    left: bool,
}

impl Rest {
    fn is_empty(&self) -> bool {
        self.output_gradients.as_ref().is_some_and(|gradients| gradients.iter().all(Option::is_none))
    }

    /// The second half of `node`, whose `wanted` inputs' gradients are to be computed.
    pub(crate) fn of(self, mut node: Node, wanted: Vec<bool>) -> DeferredNode {
        let Rest { saved, output_gradients, left } = self;
        node.saved = saved;
        DeferredNode { node, wanted, output_gradients, left }
    }
}

impl Backward<'_> {
    /// The needs of this node's second half, after the first one, which may have `left` fewer
    /// tensors than all.
    pub(crate) fn rest(&mut self, left: Option<Left>, output_gradients: Option<Vec<Option<Tensor>>>) -> Result<Rest> {
        let kept: Vec<usize> = match &left {
            Some(left) => left.saved.to_vec(),
            None => (0..self.node.saved.len()).collect(),
        };
        let saved = kept.into_iter().map(|index| Ok(Saved::Tensor(self.saved(index)?))).collect::<Result<_>>()?;
        let (is_left, left) = (left.is_some(), left.map(|left| vec![left.gradient]));
        Ok(Rest { saved, output_gradients: left.or(output_gradients), left: is_left })
    }
}

impl DeferredNode {
    /// Computes the gradients of what is left. Gradients of outputs that the first half has not
    /// used are those of `flow`.
    pub(crate) fn run(
        self,
        parameters: &dyn Parameters,
        gradients: &mut dyn Gradients,
        one: Option<&Tensor>,
        flow: &mut Flow,
    ) -> Result<()> {
        let DeferredNode { node, wanted, output_gradients, left } = self;
        let ids = node.output_ids();
        for (id, gradient) in ids.clone().zip(output_gradients.into_iter().flatten()) {
            flow.gradients[id] = gradient;
        }
        if ids.clone().any(|id| flow.gradients[id].is_some()) {
            let mut cx = Backward {
                parameters,
                gradients,
                values: &[],
                earlier: &[],
                node: &node,
                pass: Pass::Rest { wanted: &wanted, left },
                one,
                flow,
            };
            node.function.backward(&mut cx).map_err(in_backward(node.function.info().name))?;
        }
        flow.forget(ids);
        Ok(())
    }
}

/// For each value, which leaves its gradient leads to.
struct Paths {
    /// True if it leads to a requested leaf: its gradient belongs to the first half.
    to_input: Vec<bool>,
    /// True if it leads to trained parameters and no requested leaf: the second half.
    to_parameters_only: Vec<bool>,
}

/// Takes no gradients.
struct Nowhere;

impl Gradients for Nowhere {
    fn target(&mut self, _: ParamId) -> Result<Option<GradientTarget>> {
        Ok(None)
    }
}

impl Recording {
    /// The first half of a backward: the gradients of `inputs`, as [`Recording::backward_at`] gives
    /// them, but none of a parameter. What their computation needs is in the result; all other
    /// saved tensors are freed. Outputs and their gradients are as in [`Recording::backward_at`].
    pub fn backward_input(
        mut self,
        outputs: &[(Place, Tensor)],
        inputs: &[Place],
        parameters: &dyn Parameters,
    ) -> Result<(Vec<Option<Tensor>>, Deferred)> {
        let paths = self.paths(inputs, parameters)?;
        let mut flow = Flow::starting(&self.values, outputs)?;
        // Values that a gradient will reach in the second half.
        let mut reached: Vec<bool> = flow.gradients.iter().map(Option::is_some).collect();
        let mut deferred = Deferred { one: self.one.clone(), ..Deferred::default() };
        while let Some(node) = self.nodes.pop() {
            let ids = node.output_ids();
            let with_gradient = ids.clone().any(|id| flow.gradients[id].is_some());
            let now = node.inputs.iter().any(|input| input.is_value_of(&paths.to_input));
            if !(with_gradient || !now && ids.clone().any(|id| reached[id])) {
                flow.forget(ids);
                continue;
            }
            let mut wanted = Vec::with_capacity(node.inputs.len());
            for input in &node.inputs {
                wanted.push(match input {
                    Operand::Value(_) => input.is_value_of(&paths.to_parameters_only),
                    Operand::Param(id) => parameters.parameter(*id)?.trained,
                });
            }
            let later = wanted.contains(&true);
            let name = node.function.info().name;
            let output_gradients = (now && later).then(|| flow.gradients[ids.clone()].to_vec());
            let mut cx = Backward {
                parameters,
                gradients: &mut Nowhere,
                values: &self.values,
                earlier: &self.nodes,
                node: &node,
                pass: Pass::Values(&paths.to_input),
                one: self.one.as_ref(),
                flow: &mut flow,
            };
            if now {
                node.function.backward(&mut cx).map_err(in_backward(name))?;
            }
            let left = cx.flow.left.take();
            if later {
                for (input, _) in node.inputs.iter().zip(&wanted).filter(|(_, wanted)| **wanted) {
                    if let Operand::Value(id) = input {
                        reached[*id] = true;
                    }
                }
                let rest = cx.rest(left, output_gradients).map_err(in_backward(name))?;
                if !rest.is_empty() {
                    deferred.nodes.push(rest.of(node, wanted));
                }
            }
            if now || !later {
                flow.forget(ids);
            } else {
                ids.for_each(|id| _ = flow.recomputed.remove(&id));
            }
        }
        let gradients = flow.take(inputs);
        if !deferred.nodes.is_empty() {
            deferred.gradients = flow.gradients;
        }
        Ok((gradients, deferred))
    }

    fn paths(&self, inputs: &[Place], parameters: &dyn Parameters) -> Result<Paths> {
        let mut to_input = vec![false; self.values.len()];
        for input in inputs {
            if let Some(value) = self.values.get(input.id) {
                to_input[input.id] = value.wanted && value.producer.is_none();
            }
        }
        let mut to_parameters_only = vec![false; self.values.len()];
        for node in &self.nodes {
            let (mut input, mut parameter) = (false, false);
            for operand in &node.inputs {
                match operand {
                    Operand::Param(id) => parameter |= parameters.parameter(*id)?.trained,
                    Operand::Value(_) => {
                        input |= operand.is_value_of(&to_input);
                        parameter |= operand.is_value_of(&to_parameters_only);
                    }
                }
            }
            for id in node.output_ids() {
                to_input[id] = input;
                to_parameters_only[id] = parameter && !input;
            }
        }
        Ok(Paths { to_input, to_parameters_only })
    }
}

impl Operand {
    fn is_value_of(&self, set: &[bool]) -> bool {
        matches!(self, Operand::Value(id) if set.get(*id).is_some_and(|member| *member))
    }
}

impl Deferred {
    /// Computes the gradients of parameters and adds them to `gradients`. The parameters are read
    /// once more, and must have the values that they had in the first half.
    pub fn backward_parameters(self, parameters: &dyn Parameters, gradients: &mut dyn Gradients) -> Result<()> {
        let mut flow = Flow { gradients: self.gradients, ..Flow::default() };
        for node in self.nodes {
            node.run(parameters, gradients, self.one.as_ref(), &mut flow)?;
        }
        Ok(())
    }

    /// True if no gradient of a parameter is left to compute.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Bytes that it keeps alive, each buffer once.
    pub fn bytes(&self) -> usize {
        let saved = self.nodes.iter().flat_map(|later| &later.node.saved).filter_map(Saved::tensor);
        let used = self.nodes.iter().flat_map(|later| later.output_gradients.iter().flatten().flatten());
        buffer_bytes(saved.chain(used).chain(self.gradients.iter().flatten()))
    }

    /// The names of the functions whose parameters' gradients are left to compute, in the order of
    /// backward.
    pub fn function_names(&self) -> Vec<&'static str> {
        self.nodes.iter().map(|later| later.node.function.info().name).collect()
    }
}

impl std::fmt::Debug for Deferred {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Deferred({})", self.function_names().join(" "))
    }
}
