//! The unit: the part of a model that is sharded, gathered, checkpointed, cut and frozen as a
//! whole.
//!
//! A model is a chain of units. The first takes tokens, each other one takes the output of the one
//! before, and the last gives the loss. A unit describes its parameters ([`ParameterSpec`]) and
//! runs them on a tape; it holds no values. To add a model of your own, implement [`Unit`] and
//! chain the units with [`Model::from_units`](crate::Model::from_units); see
//! `examples/own_model.rs` of the engine, which trains one.

use crate::cache::KvCache;
use crate::routing::RoutingLog;
use crate::units::Hits;
use crate::{Batch, ModelError, ParameterSpec, Result};
use std::sync::Arc;
use trainyard_autograd::functions::RowExchange;
use trainyard_autograd::{ParamId, Tape, Var};
use trainyard_program::{Axis, Change, Layout};
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
    /// The logits of every token, [m, v], or of every token of the decoder beside an encoder. The
    /// last segment of a split head gives those of this rank's part of the vocabulary; the ranks'
    /// columns in their order are all.
    Logits,
    /// The final hidden states of every token, [m, d], of which a whole head makes its logits by
    /// the matrix [`Unit::vocabulary`].
    Hidden,
    /// The logits of the last token, [1, v]; no gradient flows through them. Of a split head as for
    /// [`Output::Logits`].
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
    /// The record to which mixtures of experts add the ways of their tokens.
    pub routing: Option<&'a mut RoutingLog>,
    /// The count to which a head of classes adds its right answers.
    pub hits: Option<&'a mut Hits>,
    /// The way to the ranks that have the other experts; None where experts are whole.
    pub experts: Option<Arc<dyn RowExchange>>,
}

impl<'a> Forward<'a> {
    /// The context of training: dropout acts, and the head gives the loss.
    pub fn training(batch: &'a Batch, scale: f32) -> Forward<'a> {
        Forward { training: true, ..Forward::evaluation(batch, Output::Loss { scale }) }
    }

    /// The context of evaluation.
    pub fn evaluation(batch: &'a Batch, output: Output) -> Forward<'a> {
        Forward { batch, training: false, output, cache: None, routing: None, hits: None, experts: None }
    }

    /// The context of generation: the head gives the logits of the token after the batch, which
    /// continues `cache`.
    pub fn generation(batch: &'a Batch, cache: &'a mut KvCache) -> Forward<'a> {
        Forward { cache: Some(cache), ..Forward::evaluation(batch, Output::LastLogits) }
    }

    /// The factor of the loss's sum over the targets of the batch.
    ///
    /// # Errors
    /// A forward for logits, which has no loss.
    pub fn loss_scale(&self) -> Result<f32> {
        match self.output {
            Output::Loss { scale } => Ok(scale),
            _ => Err(ModelError::Batch("logits are asked for, and this unit gives only a loss".into())),
        }
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

    /// The matrix [v, d] by which a whole head makes logits of [`Output::Hidden`]; None for a unit
    /// that makes none, or in another way.
    fn vocabulary(&self) -> Option<ParamId> {
        None
    }

    /// Runs the unit. `input` is the output of the unit before, [m, d]; None for the first.
    fn forward(&self, tape: &mut Tape<'_>, cx: &mut Forward<'_>, input: Option<&Var>) -> Result<Var>;

    /// The segments of a unit that is split over ranks; None if it runs as a whole.
    fn segments(&self) -> Option<&Segments> {
        None
    }

    /// Runs one segment of a split unit on the values that it takes, and returns those that it
    /// gives. The exchanges between segments are the caller's.
    fn forward_segment(
        &self,
        segment: usize,
        tape: &mut Tape<'_>,
        cx: &mut Forward<'_>,
        takes: &[Var],
    ) -> Result<Vec<Var>> {
        let _ = (segment, tape, cx, takes);
        Err(without_segments(self.name()))
    }
}

/// A unit whose compute is split over the ranks of a tensor-parallel group, of a context-parallel
/// group, or of both, as a chain of segments. A segment is local compute on named values; between
/// two segments ranks exchange.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segments {
    /// The values that segments take and give, and their layouts over the groups. The last one is
    /// the unit's output.
    pub values: Vec<Value>,
    /// The value that is the unit's input; None for the first unit of a model.
    pub input: Option<usize>,
    /// The segments, in the order of forward.
    pub segments: Vec<Segment>,
    /// The exchanges, in the order of forward. Each takes place between the segment that gives its
    /// first value and the one that takes its second.
    pub exchanges: Vec<Exchange>,
}

/// A value inside a split unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Value {
    /// Its name in prints.
    pub name: &'static str,
    /// Its layout over the ranks of the tensor-parallel group. Split values are split along their
    /// rows.
    pub layout: Layout,
    /// The same over the ranks of the context-parallel group.
    pub context: Layout,
}

impl Value {
    /// A value of this layout over the tensor-parallel group, in a unit that no context-parallel
    /// group divides.
    pub const fn new(name: &'static str, layout: Layout) -> Value {
        Value { name, layout, context: Layout::Invariant }
    }

    /// Its layout over the ranks of an axis inside units: tensor or context.
    pub fn over(&self, axis: Axis) -> Layout {
        if axis == Axis::Context { self.context } else { self.layout }
    }
}

impl Segments {
    /// The segments of a unit of which ranks of a context-parallel group have their rows: all
    /// values are split over that group.
    pub fn on_rows(mut self) -> Segments {
        self.values.iter_mut().for_each(|value| value.context = Layout::Split);
        self
    }

    /// Segments whose values are named: each has a name, and the names of the values that it takes
    /// and gives, apart by spaces. Gradients flow through all of them. `x` is the unit's input.
    ///
    /// # Panics
    /// A name that no value has.
    pub fn named(values: Vec<Value>, segments: &[(&'static str, &str, &str)], exchanges: &[(&str, &str)]) -> Segments {
        let place = |name: &str| values.iter().position(|value| value.name == name);
        let known = |name: &str| place(name).expect("segments name values of their unit");
        let all = |names: &str| names.split_whitespace().map(known).collect::<Vec<_>>();
        let segment = |(name, takes, gives): &(&'static str, &str, &str)| Segment {
            name,
            takes: all(takes),
            gives: all(gives),
            differentiable: true,
        };
        let exchange = |(from, to): &(&str, &str)| Exchange { from: known(from), to: known(to) };
        Segments {
            input: place("x"),
            segments: segments.iter().map(segment).collect(),
            exchanges: exchanges.iter().map(exchange).collect(),
            values,
        }
    }

    /// The same with another layout of values over the context-parallel group.
    pub fn over_context(mut self, names: &[&str], layout: Layout) -> Segments {
        let named = self.values.iter_mut().filter(|value| names.contains(&value.name));
        named.for_each(|value| value.context = layout);
        self
    }

    /// The one segment of a unit that computes on the rank's rows alone. `input` is false for the
    /// first unit.
    pub fn whole(input: bool) -> Segments {
        let names: &[&'static str] = if input { &["x", "y"] } else { &["x"] };
        let output = names.len() - 1;
        Segments {
            values: names.iter().map(|name| Value::new(name, Layout::Invariant)).collect(),
            input: input.then_some(0),
            segments: vec![Segment {
                name: "all",
                takes: (0..output).collect(),
                gives: vec![output],
                differentiable: true,
            }],
            exchanges: Vec::new(),
        }
    }

    /// The axis over which an exchange changes its value's layout, and the change; None if no
    /// collective makes it.
    pub fn change(&self, exchange: Exchange) -> (Axis, Option<Change>) {
        let [from, to] = [exchange.from, exchange.to].map(|value| &self.values[value]);
        let axis = if from.context == to.context { Axis::Tensor } else { Axis::Context };
        (axis, Change::between(from.over(axis), to.over(axis)))
    }
}

/// A stretch of a unit in which ranks exchange nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Its name in prints.
    pub name: &'static str,
    /// The values that it reads. If a later segment reads one of them too, it is also in `gives`,
    /// as the same tensor, so that its gradient is summed in the order of the unsplit unit.
    pub takes: Vec<usize>,
    /// The values that it makes or passes on.
    pub gives: Vec<usize>,
    /// True if gradients flow through it.
    pub differentiable: bool,
}

/// The change of a value's layout between two segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exchange {
    /// The value before.
    pub from: usize,
    /// The same value in its new layout.
    pub to: usize,
}

/// The input of a unit that is not the first.
pub fn require_input<'v>(unit: &str, input: Option<&'v Var>) -> Result<&'v Var> {
    input.ok_or_else(|| ModelError::Unit { unit: unit.into(), problem: "needs the output of the unit before".into() })
}

/// The error of a unit that is asked for a segment and has none.
pub fn without_segments(unit: &str) -> ModelError {
    ModelError::Unit { unit: unit.into(), problem: "runs as a whole: it has no segments".into() }
}

/// The error of a split unit that is run as a whole.
pub fn in_segments(unit: &str) -> ModelError {
    ModelError::Unit { unit: unit.into(), problem: "is split over ranks: run its segments".into() }
}

/// The error of a unit that has no such segment, or not with so many values.
pub fn no_segment(unit: &str, segment: usize, takes: usize) -> ModelError {
    let problem = format!("has no segment {segment} that takes {takes} values");
    ModelError::Unit { unit: unit.into(), problem }
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

    /// Sets the factor of the learning rate of a parameter that was added. What it decays in a step
    /// stays the same, so that models of all widths decay alike.
    pub fn set_rate(&mut self, id: ParamId, rate: f64) {
        let spec = &mut self.specs[id.index as usize];
        (spec.rate, spec.decay) = (rate, 1.0 / rate);
    }

    /// The parameters that were added.
    pub fn finish(self) -> Vec<ParameterSpec> {
        self.specs
    }
}
