//! The unit: the part of a model that is sharded, gathered, checkpointed, cut and frozen as a
//! whole.
//!
//! A model is a chain of units. The first takes tokens, each other one takes the output of the one
//! before, and the last gives the loss. A unit describes its parameters ([`ParameterSpec`]) and
//! runs them on a tape; it holds no values. To add a model of your own, implement [`Unit`] and
//! chain the units with [`Model::from_units`](crate::Model::from_units); see
//! `examples/own_model.rs`.

use crate::cache::KvCache;
use crate::{Batch, ModelError, ParameterSpec, Result};
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_tensor::Tensor;

/// The result of the last unit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Output {
    /// `scale` times the sum of the losses of all targets that count: a scalar in f32. For the mean
    /// over a step, `scale` is 1 / (targets that count in the whole step); under f16 that is
    /// multiplied by the loss scale.
    Loss {
        /// Factor of the sum.
        scale: f32,
    },
    /// The logits of every token, [m, v].
    Logits,
    /// The logits of the last token, [1, v]; no gradient flows through them.
    LastLogits,
}

/// The context of a unit's forward, beside its input.
pub struct Forward<'a> {
    /// The micro-batch.
    pub batch: &'a Batch,
    /// True if dropout acts.
    pub training: bool,
    /// The result of the last unit.
    pub output: Output,
    /// Keys and values of earlier tokens, for generation. The batch is then one sequence that
    /// continues them.
    pub cache: Option<&'a mut KvCache>,
}

impl<'a> Forward<'a> {
    /// The context of training: dropout acts, and the head gives the loss.
    pub fn training(batch: &'a Batch, scale: f32) -> Forward<'a> {
        Forward { batch, training: true, output: Output::Loss { scale }, cache: None }
    }

    /// The context of evaluation.
    pub fn evaluation(batch: &'a Batch, output: Output) -> Forward<'a> {
        Forward { batch, training: false, output, cache: None }
    }

    /// The context of generation: the head gives the logits of the token after the batch, which
    /// continues `cache`.
    pub fn generation(batch: &'a Batch, cache: &'a mut KvCache) -> Forward<'a> {
        Forward { batch, training: false, output: Output::LastLogits, cache: Some(cache) }
    }

    /// The batch's targets.
    pub fn targets(&self) -> Result<&'a Tensor> {
        let missing = || ModelError::Batch("a loss needs targets, and this batch has none".into());
        self.batch.targets.as_ref().ok_or_else(missing)
    }
}

/// A part of a model.
pub trait Unit: Send + Sync {
    /// Its name in programs, traces and files: `embedding`, `block.3`, `head`.
    fn name(&self) -> &str;

    /// Its parameters; their order is their index in [`ParamId`].
    fn parameters(&self) -> &[ParameterSpec];

    /// Parameters of other units that forward or backward reads. A head that is tied to the
    /// embedding names the token table here.
    fn borrowed(&self) -> &[ParamId] {
        &[]
    }

    /// Runs the unit. `input` is the output of the unit before, [m, d]; None for the first.
    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var>;
}

/// The input of a unit that is not the first.
pub fn require_input<'v>(unit: &str, input: Option<&'v Var>) -> Result<&'v Var> {
    input.ok_or_else(|| ModelError::Unit { unit: unit.into(), problem: "needs the output of the unit before".into() })
}

/// Collects a unit's parameters and hands out their slots.
#[derive(Debug)]
pub struct Slots {
    unit: u32,
    specs: Vec<ParameterSpec>,
}

impl Slots {
    /// For unit number `unit` of the model.
    pub fn new(unit: u32) -> Slots {
        Slots { unit, specs: Vec::new() }
    }

    /// Adds a parameter.
    pub fn add(&mut self, spec: ParameterSpec) -> ParamId {
        self.specs.push(spec);
        ParamId::new(self.unit, self.specs.len() as u32 - 1)
    }

    /// The parameters that were added.
    pub fn finish(self) -> Vec<ParameterSpec> {
        self.specs
    }
}
