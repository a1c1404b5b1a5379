//! Recording: values, nodes, and the tensors kept for backward.

use crate::functions::Function;
use crate::{Adapter, AutogradError, Gradients, ParamId, Parameter, Parameters, Result};
use std::collections::{BTreeMap, BTreeSet};
pub use trainyard_tensor::cpu::philox::RandomKey;
use trainyard_tensor::ops::fp8::Scaling;
use trainyard_tensor::{Device, Purpose, Shape, Tensor};

/// The tensors that a tape keeps for backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Nothing: evaluation, generation, and the first forward under full checkpointing.
    Nothing,
    /// Everything that backward asks for.
    Everything,
    /// Everything but the results of cheap functions (norms, activations, dropout). Backward
    /// recomputes those from the tensors that the functions keep themselves. Matrix products and
    /// attention are never repeated.
    Selective,
}

/// A value on a tape: a tensor and its place in the graph. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Var {
    pub(crate) id: usize,
    tensor: Tensor,
}

impl Var {
    /// The value.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The value, giving up the place in the graph.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

/// The place of a value in the graph, without the value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    pub(crate) id: usize,
    pub(crate) shape: Shape,
}

impl From<&Var> for Place {
    fn from(var: &Var) -> Place {
        Place { id: var.id, shape: *var.tensor.shape() }
    }
}

/// An input of a function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operand {
    /// A value on the tape.
    Value(usize),
    /// A parameter, by slot.
    Param(ParamId),
}

impl From<&Var> for Operand {
    fn from(var: &Var) -> Operand {
        Operand::Value(var.id)
    }
}

impl From<ParamId> for Operand {
    fn from(id: ParamId) -> Operand {
        Operand::Param(id)
    }
}

/// A tensor that backward will need.
#[derive(Clone, Debug)]
pub enum Saved {
    /// Kept.
    Tensor(Tensor),
    /// Not kept: recomputed by its producer, which is cheap.
    Recompute(usize),
    /// Taken out by [`Recording::take_saved`]: its index there, and its shape.
    Away(usize, Shape),
}

pub(crate) struct Node {
    pub function: Function,
    pub inputs: Vec<Operand>,
    /// The ids of the outputs are `first_output ..`.
    pub first_output: usize,
    pub outputs: usize,
    pub saved: Vec<Saved>,
}

impl Node {
    /// The ids of its outputs.
    pub fn output_ids(&self) -> std::ops::Range<usize> {
        self.first_output..self.first_output + self.outputs
    }
}

pub(crate) struct Value {
    /// The node that made it; None for leaves and constants.
    pub producer: Option<usize>,
    /// True if a gradient should flow to it.
    pub wanted: bool,
}

/// Sees the input [m, k] of every product with a weight in [`Tape::linear`].
pub type Observer<'a> = &'a mut dyn FnMut(ParamId, &Tensor) -> Result<()>;

/// The weights whose products have operands of eight bits.
#[derive(Clone, Copy)]
enum EightBits<'a> {
    Fp8(&'a BTreeMap<ParamId, Scaling>),
    Int8(&'a BTreeSet<ParamId>),
    RoundedInputs(&'a BTreeSet<ParamId>),
}

/// The operands of a linear layer's products.
#[derive(Clone, Debug)]
pub(crate) enum Operands {
    /// As they are.
    Whole,
    /// Rounded to 8-bit floats.
    Fp8(Scaling),
    /// In codes of 8 bits, but for the gradient of the weight.
    Int8,
    /// The weight as it is, and rows of the input rounded to 8 bits; forward only.
    RoundedInput,
}

/// Records the functions that model code applies.
pub struct Tape<'a> {
    device: Device,
    parameters: &'a dyn Parameters,
    gradients: Option<&'a mut dyn Gradients>,
    eight_bits: Option<EightBits<'a>>,
    observer: Option<Observer<'a>>,
    /// Squares of rows' norms over all ranks, of weights whose columns ranks divide.
    row_squares: BTreeMap<ParamId, Tensor>,
    policy: Policy,
    random: RandomKey,
    sites: u32,
    recording: Recording,
}

/// A finished recording. It owns everything that backward needs, except for parameters.
#[derive(Default)]
pub struct Recording {
    pub(crate) nodes: Vec<Node>,
    pub(crate) values: Vec<Value>,
    /// A scalar that is known to be 1.
    pub(crate) one: Option<Tensor>,
}

impl<'a> Tape<'a> {
    /// Creates a tape on `device` that reads `parameters`. `random` keys its random functions. Its
    /// `site` identifies the tape within the step (unit and micro-batch, at most 16 bits), and each
    /// random function on the tape adds its own ordinal. A forward repeated under the same key
    /// therefore draws the same numbers.
    pub fn new(device: &Device, parameters: &'a dyn Parameters, policy: Policy, random: RandomKey) -> Tape<'a> {
        Tape {
            device: device.clone(),
            parameters,
            gradients: None,
            eight_bits: None,
            observer: None,
            row_squares: BTreeMap::new(),
            policy,
            random,
            sites: 0,
            recording: Recording::default(),
        }
    }

    /// Lets a loss take its parameters' gradients while its forward has the logits at hand, instead
    /// of computing the logits twice. Backward must then start with a gradient of exactly 1 for the
    /// loss.
    pub fn with_gradients(mut self, gradients: &'a mut dyn Gradients) -> Tape<'a> {
        self.gradients = Some(gradients);
        self
    }

    /// Makes products with these weights in [`Tape::linear`] round their operands to eight bits. A
    /// function keeps its scaling, and its backward rounds with the scales that are in the same
    /// memory at that time.
    pub fn with_fp8(mut self, layers: &'a BTreeMap<ParamId, Scaling>) -> Tape<'a> {
        self.eight_bits = Some(EightBits::Fp8(layers));
        self
    }

    /// Makes products with these weights in [`Tape::linear`] multiply 8-bit integers, forward and
    /// for the gradient of the input.
    pub fn with_int8(mut self, layers: &'a BTreeSet<ParamId>) -> Tape<'a> {
        self.eight_bits = Some(EightBits::Int8(layers));
        self
    }

    /// Makes products with these weights in [`Tape::linear`] round each row of their input to 8
    /// bits, as models do whose files say so. For forwards alone: gradients are those of what was
    /// not rounded.
    pub fn with_rounded_inputs(mut self, layers: &'a BTreeSet<ParamId>) -> Tape<'a> {
        self.eight_bits = Some(EightBits::RoundedInputs(layers));
        self
    }

    /// Sets the squares of the norms of rows that the weight `w` has with its adapter, summed over
    /// the ranks that divide its columns ([`Tape::row_squares`]).
    pub fn set_row_squares(&mut self, w: ParamId, squares: Tensor) {
        self.row_squares.insert(w, squares);
    }

    /// The squares that [`Tape::set_row_squares`] set for `w`; None if it was not called.
    pub(crate) fn summed_row_squares(&self, w: ParamId) -> Option<&Tensor> {
        self.row_squares.get(&w)
    }

    /// Shows `observer` the inputs of linear layers, before each product.
    pub fn with_observer(mut self, observer: Observer<'a>) -> Tape<'a> {
        self.observer = Some(observer);
        self
    }

    pub(crate) fn observe(&mut self, weight: ParamId, input: &Tensor) -> Result<()> {
        self.observer.as_mut().map_or(Ok(()), |observer| observer(weight, input))
    }

    /// Continues the numbering of random functions after `sites` of them, for a unit that is
    /// recorded on several tapes in turn. See [`Tape::sites`].
    pub fn with_sites(mut self, sites: u32) -> Tape<'a> {
        self.sites = sites;
        self
    }

    /// The number of random functions so far, those before [`Tape::with_sites`] included.
    pub fn sites(&self) -> u32 {
        self.sites
    }

    /// The operands of products with a weight.
    pub(crate) fn operands(&self, weight: ParamId) -> Operands {
        match self.eight_bits {
            Some(EightBits::Fp8(layers)) => layers.get(&weight).cloned().map_or(Operands::Whole, Operands::Fp8),
            Some(EightBits::Int8(layers)) if layers.contains(&weight) => Operands::Int8,
            Some(EightBits::RoundedInputs(layers)) if layers.contains(&weight) => Operands::RoundedInput,
            _ => Operands::Whole,
        }
    }

    /// The device of the results.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// True if anything is kept for backward.
    pub fn records(&self) -> bool {
        self.policy != Policy::Nothing
    }

    /// A parameter's compute copy, now.
    pub fn parameter(&self, id: ParamId) -> Result<Parameter> {
        self.parameters.parameter(id)
    }

    /// The addition to products with a weight; None if there is none.
    pub fn adapter(&self, id: ParamId) -> Option<Adapter> {
        self.parameters.adapter(id).cloned()
    }

    pub(crate) fn gradients(&mut self) -> Option<&mut (dyn Gradients + 'a)> {
        if self.policy == Policy::Nothing { None } else { self.gradients.as_deref_mut() }
    }

    /// An input whose gradient is wanted.
    pub fn leaf(&mut self, tensor: Tensor) -> Var {
        self.value(tensor, None, true)
    }

    /// An input without gradient.
    pub fn constant(&mut self, tensor: Tensor) -> Var {
        self.value(tensor, None, false)
    }

    /// The same value, through which no gradient flows back.
    pub fn stop_gradient(&mut self, x: &Var) -> Var {
        self.constant(x.tensor.clone())
    }

    /// The key of the next random function on this tape.
    pub fn next_random(&mut self) -> RandomKey {
        self.sites += 1;
        RandomKey { site: (self.random.site << 16) | self.sites, ..self.random }
    }

    /// The form in which `x` is kept for backward: the tensor, or under [`Policy::Selective`] a
    /// note to recompute it.
    pub fn save(&self, x: &Var) -> Saved {
        let cheap = self.policy == Policy::Selective
            && self
                .recording
                .values
                .get(x.id)
                .and_then(|value| value.producer)
                .is_some_and(|node| self.recording.nodes[node].function.info().recomputed_when_selective);
        if cheap { Saved::Recompute(x.id) } else { Saved::Tensor(x.tensor.clone()) }
    }

    /// Records `function` and gives its outputs their place in the graph. `saved` is called only
    /// when backward will want it.
    pub fn record(
        &mut self,
        function: impl Into<Function>,
        inputs: &[Operand],
        outputs: Vec<Tensor>,
        saved: impl FnOnce(&Self) -> Vec<Saved>,
    ) -> Result<Vec<Var>> {
        if self.policy == Policy::Nothing || !self.any_wanted(inputs)? {
            return Ok(outputs.into_iter().map(|tensor| self.value(tensor, None, false)).collect());
        }
        let node = Node {
            function: function.into(),
            inputs: inputs.to_vec(),
            first_output: self.recording.values.len(),
            outputs: outputs.len(),
            saved: saved(self),
        };
        let producer = self.recording.nodes.len();
        self.recording.nodes.push(node);
        Ok(outputs.into_iter().map(|tensor| self.value(tensor, Some(producer), true)).collect())
    }

    /// As [`Tape::record`], for functions of one output.
    pub fn record_one(
        &mut self,
        function: impl Into<Function>,
        inputs: &[Operand],
        output: Tensor,
        saved: impl FnOnce(&Self) -> Vec<Saved>,
    ) -> Result<Var> {
        Ok(self.record(function, inputs, vec![output], saved)?.remove(0))
    }

    /// True if a gradient is wanted of any of the inputs.
    pub fn any_wanted(&self, inputs: &[Operand]) -> Result<bool> {
        for input in inputs {
            let wanted = match input {
                Operand::Value(id) => self.recording.values.get(*id).is_some_and(|value| value.wanted),
                Operand::Param(id) => self.parameters.parameter(*id)?.trained,
            };
            if wanted {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Ends the recording. Backward may run later, with other copies of the parameters.
    pub fn finish(self) -> Recording {
        self.recording
    }

    fn value(&mut self, tensor: Tensor, producer: Option<usize>, wanted: bool) -> Var {
        if self.policy == Policy::Nothing {
            return Var { id: usize::MAX, tensor };
        }
        self.recording.values.push(Value { producer, wanted });
        Var { id: self.recording.values.len() - 1, tensor }
    }
}

impl Recording {
    /// Bytes of activations kept for backward, each buffer once.
    pub fn saved_bytes(&self) -> usize {
        buffer_bytes(self.nodes.iter().flat_map(|node| &node.saved).filter_map(Saved::tensor))
    }

    /// Takes out the activations that are kept for backward, each region of memory once. Until
    /// [`Recording::put_back`] they may lie anywhere.
    pub fn take_saved(&mut self) -> Vec<Tensor> {
        let mut taken: Vec<Tensor> = Vec::new();
        for saved in self.nodes.iter_mut().flat_map(|node| &mut node.saved) {
            let Saved::Tensor(tensor) = &*saved else { continue };
            if tensor.purpose() != Purpose::Activations {
                continue;
            }
            let (shape, known) = (*tensor.shape(), taken.iter().position(|known| known.is_same_region(tensor)));
            let index = known.unwrap_or_else(|| {
                taken.push(tensor.clone());
                taken.len() - 1
            });
            *saved = Saved::Away(index, shape);
        }
        taken
    }

    /// Puts back the tensors of [`Recording::take_saved`], in the same order. They may be in other
    /// memory.
    pub fn put_back(&mut self, tensors: Vec<Tensor>) -> Result<()> {
        for saved in self.nodes.iter_mut().flat_map(|node| &mut node.saved) {
            if let Saved::Away(index, shape) = *saved {
                let tensor = tensors.get(index).ok_or(AutogradError::Away(index))?;
                *saved = Saved::Tensor(tensor.reshape(shape)?);
            }
        }
        Ok(())
    }

    /// The names of the recorded functions, in order.
    pub fn function_names(&self) -> Vec<&'static str> {
        self.nodes.iter().map(|node| node.function.info().name).collect()
    }
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Recording({})", self.function_names().join(" "))
    }
}

impl Saved {
    /// The tensor, if it is here.
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        match self {
            Saved::Tensor(tensor) => Some(tensor),
            Saved::Recompute(_) | Saved::Away(..) => None,
        }
    }
}

/// Bytes of the buffers of `tensors`, each buffer once.
pub(crate) fn buffer_bytes<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> usize {
    let mut seen = std::collections::BTreeSet::new();
    tensors.filter(|tensor| seen.insert(tensor.buffer_id())).map(Tensor::buffer_bytes).sum()
}

/// Names the function in an error of its backward.
pub(crate) fn in_backward(function: &'static str) -> impl FnOnce(AutogradError) -> AutogradError {
    move |source| match source {
        already @ AutogradError::InBackward { .. } => already,
        source => AutogradError::InBackward { function, source: Box::new(source) },
    }
}
