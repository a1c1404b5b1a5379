//! Parameters by slot, and the destinations of their gradients.

use crate::{AutogradError, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use trainyard_tensor::{DType, Purpose, Tensor};

/// A parameter's slot: its unit, and its index in that unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ParamId {
    /// The unit's index in the model.
    pub unit: u32,
    /// The parameter's index in the unit.
    pub index: u32,
}

impl ParamId {
    /// Parameter `index` of unit `unit`.
    pub const fn new(unit: u32, index: u32) -> ParamId {
        ParamId { unit, index }
    }
}

impl fmt::Display for ParamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.unit, self.index)
    }
}

/// The compute copy of a parameter, as functions use it.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The values, in the compute dtype.
    pub value: Tensor,
    /// True if training updates it.
    pub trained: bool,
}

/// A low-rank addition to the product with a weight [n, k] (Hu et al. 2021, equation 3):
/// `x wᵀ + scale (x aᵀ) bᵀ`. A weight that fuses several matrices may have a pair for each of them:
/// their `a` lie one below the other, and so do their `b`.
#[derive(Clone, PartialEq, Debug)]
pub struct Adapter {
    /// The down projections, [members rank, k].
    pub a: ParamId,
    /// The up projections, [n, rank] if all of the weight's matrices have one.
    pub b: ParamId,
    /// The magnitudes of the rows that the pairs add to (DoRA), as many as `b` has rows; None: the
    /// sum keeps its own.
    pub magnitude: Option<ParamId>,
    /// The width between the two.
    pub rank: usize,
    /// The number of pairs.
    pub members: usize,
    /// The outputs of the product, in order and without gaps.
    pub outputs: Arc<[AdapterOutputs]>,
    /// The factor of the addition.
    pub scale: f32,
}

/// Neighbouring outputs of a product with an adapter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AdapterOutputs {
    /// The number of outputs.
    pub count: usize,
    /// The pair that adds to them, and its first row in `b`; None if nothing is added.
    pub from: Option<(usize, usize)>,
}

/// Gives parameters by slot. The tensors may change between forward and backward (released,
/// gathered again), but not their values.
pub trait Parameters {
    /// The parameter, or [`AutogradError::NoParameter`].
    fn parameter(&self, id: ParamId) -> Result<Parameter>;

    /// The addition to products with the weight `id`; None if there is none.
    fn adapter(&self, id: ParamId) -> Option<&Adapter> {
        let _ = id;
        None
    }
}

/// The destination of one parameter's gradient.
#[derive(Debug)]
pub struct GradientTarget {
    /// f32, of the parameter's shape.
    pub tensor: Tensor,
    /// True at the first contribution of a step: the old contents are to be overwritten, not added
    /// to.
    pub overwrite: bool,
}

/// Takes gradients of parameters.
pub trait Gradients {
    /// The destination of the gradient of `id`; None if it is not wanted (frozen). Each call is
    /// followed by one contribution.
    fn target(&mut self, id: ParamId) -> Result<Option<GradientTarget>>;
}

/// A simple holder of parameters and gradients, for tests and small programs; the engine has its
/// own, over flat unit buffers.
#[derive(Debug, Default)]
pub struct Store {
    values: BTreeMap<ParamId, Tensor>,
    gradients: BTreeMap<ParamId, Tensor>,
    frozen: BTreeSet<ParamId>,
    adapters: BTreeMap<ParamId, Adapter>,
}

impl Store {
    /// An empty store.
    pub fn new() -> Store {
        Store::default()
    }

    /// Adds or replaces a parameter.
    pub fn insert(&mut self, id: ParamId, value: Tensor) {
        self.values.insert(id, value);
    }

    /// Freezes a parameter: it gets no gradient.
    pub fn freeze(&mut self, id: ParamId) {
        self.frozen.insert(id);
    }

    /// Adds `adapter` to products with the weight `id`.
    pub fn adapt(&mut self, id: ParamId, adapter: Adapter) {
        self.adapters.insert(id, adapter);
    }

    /// The summed gradient of a parameter, if any reached it.
    pub fn gradient(&self, id: ParamId) -> Option<&Tensor> {
        self.gradients.get(&id)
    }

    /// Takes a parameter's summed gradient out, so that the next one starts afresh.
    pub fn take_gradient(&mut self, id: ParamId) -> Option<Tensor> {
        self.gradients.remove(&id)
    }

    /// Splits into the two roles that backward needs at once.
    pub fn split(&mut self) -> (StoreValues<'_>, StoreGradients<'_>) {
        let Store { values, gradients, frozen, adapters } = self;
        (StoreValues { values, frozen, adapters }, StoreGradients { values, gradients })
    }
}

/// The parameters of a [`Store`].
pub struct StoreValues<'a> {
    values: &'a BTreeMap<ParamId, Tensor>,
    frozen: &'a BTreeSet<ParamId>,
    adapters: &'a BTreeMap<ParamId, Adapter>,
}

/// The gradients of a [`Store`].
pub struct StoreGradients<'a> {
    values: &'a BTreeMap<ParamId, Tensor>,
    gradients: &'a mut BTreeMap<ParamId, Tensor>,
}

impl Parameters for StoreValues<'_> {
    fn parameter(&self, id: ParamId) -> Result<Parameter> {
        let value = self.values.get(&id).ok_or(AutogradError::NoParameter(id))?;
        Ok(Parameter { value: value.clone(), trained: !self.frozen.contains(&id) })
    }

    fn adapter(&self, id: ParamId) -> Option<&Adapter> {
        self.adapters.get(&id)
    }
}

impl Parameters for Store {
    fn parameter(&self, id: ParamId) -> Result<Parameter> {
        let Store { values, frozen, adapters, .. } = self;
        StoreValues { values, frozen, adapters }.parameter(id)
    }

    fn adapter(&self, id: ParamId) -> Option<&Adapter> {
        self.adapters.get(&id)
    }
}

impl Gradients for StoreGradients<'_> {
    fn target(&mut self, id: ParamId) -> Result<Option<GradientTarget>> {
        let value = self.values.get(&id).ok_or(AutogradError::NoParameter(id))?;
        let overwrite = !self.gradients.contains_key(&id);
        if overwrite {
            let fresh = value.device().empty(*value.shape(), DType::F32, Purpose::Grads)?;
            self.gradients.insert(id, fresh);
        }
        Ok(Some(GradientTarget { tensor: self.gradients[&id].clone(), overwrite }))
    }
}
