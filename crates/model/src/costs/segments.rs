//! The cost of each segment of the units of one rank of a tensor-parallel or context-parallel
//! group.
//!
//! Segments run one after the other on a device without data. In the place of an exchange the value
//! is made in the shape that it has afterwards. A unit that is not split counts as one segment.

use crate::batch::{Batch, BatchShape};
use crate::unit::{Exchange, Forward, Segments, Unit};
use crate::{Model, ModelError, Result};
use trainyard_autograd::{Place, Policy, RandomKey, Recording, Store, Tape, Var};
use trainyard_program::{Axis, Change, Collective};
use trainyard_tensor::{Cost, DType, Device, Purpose, Tensor};

/// The cost of one segment on one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentCost {
    /// The segment's name.
    pub name: &'static str,
    /// FLOPs and bytes moved by forward.
    pub forward: Cost,
    /// The same for backward, without a repeated forward.
    pub backward: Cost,
    /// The same for the first half of a divided backward, the gradients of values.
    pub backward_input: Cost,
    /// The same for its second half, the gradients of parameters.
    pub backward_parameters: Cost,
    /// Bytes of activations that the segment keeps from forward to backward, the values that it
    /// takes or gives among them. A buffer that an earlier segment of the unit keeps too counts
    /// there.
    pub saved_bytes: usize,
    /// Bytes that live between the two halves of a divided backward.
    pub deferred_bytes: usize,
    /// The peak of activation bytes inside forward, beyond those that live when it begins.
    pub forward_peak_bytes: usize,
    /// The same inside backward. Saved tensors and the gradients of outputs live when it begins.
    pub backward_peak_bytes: usize,
    /// The peak of kernels' scratch memory.
    pub workspace_bytes: usize,
}

/// The cost of one unit on one micro-batch, segment by segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentedCost {
    /// The unit's name.
    pub name: String,
    /// Elements of its parameters on this rank.
    pub parameters: usize,
    /// Its values, segments and exchanges. A unit that is not split has one segment, `all`, that
    /// takes its input (none in the first unit) and gives its output.
    pub segments: Segments,
    /// Bytes of each value on this rank. A value that an exchange of [`Change::Nothing`] gives is
    /// the tensor before the exchange.
    pub value_bytes: Vec<usize>,
    /// The cost of each segment.
    pub costs: Vec<SegmentCost>,
}

/// Prices the segments of every unit of `model` for micro-batches of `shape` in `dtype`. `policy`
/// says which tensors are kept for backward. Under [`Policy::Nothing`] (full checkpointing) that is
/// nothing; backward is then priced as after a repeated forward, which is not included.
///
/// # Errors
/// A shape that the ranks cannot divide; errors of units.
pub fn segment_costs(model: &Model, shape: &BatchShape, dtype: DType, policy: Policy) -> Result<Vec<SegmentedCost>> {
    segment_costs_on(&Device::meta(), model, shape, dtype, policy)
}

/// Does the same on `device`, which must be idle. On a real device the kernels that it launches are
/// counted. All parameters, and all values that ranks would exchange, are zero there.
///
/// # Errors
/// As [`segment_costs`].
pub fn segment_costs_on(
    device: &Device,
    model: &Model,
    shape: &BatchShape,
    dtype: DType,
    policy: Policy,
) -> Result<Vec<SegmentedCost>> {
    device.set_profiling(true);
    let batch = shape.batch_of(device, model.context_split())?;
    let mut store = super::zeros(device, model, dtype)?;
    let ranks = [model.tensor_split().ranks, model.context_split().ranks];
    let mut costs = Vec::with_capacity(model.units().len());
    let mut input: Option<Tensor> = None;
    for unit in model.units() {
        let unit = unit.as_ref();
        let segments = unit.segments().cloned().unwrap_or_else(|| Segments::whole(input.is_some()));
        let mut pricing = Pricing { device, unit, segments, ranks, batch: &batch, store: &mut store };
        let (cost, output) = pricing.unit_cost(input.take(), policy)?;
        costs.push(cost);
        input = Some(output);
    }
    Ok(costs)
}

/// The shape and dtype of a value.
type Form = (Vec<usize>, DType);

fn form(tensor: &Tensor) -> Form {
    (tensor.shape().to_vec(), tensor.dtype())
}

/// One unit whose segments are being priced.
struct Pricing<'a> {
    device: &'a Device,
    unit: &'a dyn Unit,
    segments: Segments,
    /// Ranks of the tensor-parallel and of the context-parallel group.
    ranks: [usize; 2],
    batch: &'a Batch,
    store: &'a mut Store,
}

/// A segment that has run.
struct Ran {
    takes: Vec<Place>,
    gives: Vec<Place>,
    recording: Recording,
    cost: SegmentCost,
}

impl Pricing<'_> {
    fn unit_cost(&mut self, input: Option<Tensor>, policy: Policy) -> Result<(SegmentedCost, Tensor)> {
        let (mut ran, values) = self.forward(input.clone(), policy)?;
        let forms: Vec<Form> = values.iter().map(form).collect();
        let value_bytes = values.iter().map(Tensor::buffer_bytes).collect();
        let output = forms[forms.len() - 1].clone();
        let input_form = input.as_ref().map(form);
        drop((values, input));
        // The last one goes first, so that a buffer counts where it is kept first.
        let mut costs = Vec::with_capacity(ran.len());
        while let Some(Ran { recording, mut cost, .. }) = ran.pop() {
            let before = self.live(Purpose::Activations);
            drop(recording);
            cost.saved_bytes = before - self.live(Purpose::Activations);
            costs.push(cost);
        }
        costs.reverse();
        let recorded = if policy == Policy::Nothing { Policy::Everything } else { policy };
        for halves in [false, true] {
            let input = input_form.as_ref().map(|form| self.zeros(form)).transpose()?;
            let (ran, values) = self.forward(input, recorded)?;
            drop(values);
            self.backward(ran, &forms, halves, &mut costs)?;
        }
        let cost = SegmentedCost {
            name: self.unit.name().into(),
            parameters: self.unit.parameters().iter().map(|parameter| parameter.elements()).sum(),
            segments: self.segments.clone(),
            value_bytes,
            costs,
        };
        Ok((cost, self.zeros(&output)?))
    }

    /// Runs all segments, and returns the values too.
    fn forward(&mut self, input: Option<Tensor>, policy: Policy) -> Result<(Vec<Ran>, Vec<Tensor>)> {
        let mut values: Vec<Option<Tensor>> = vec![None; self.segments.values.len()];
        if let Some(at) = self.segments.input {
            values[at] = input;
        }
        let missing = |value: usize, segments: &Segments| ModelError::Unit {
            unit: self.unit.name().into(),
            problem: format!("no segment gives value `{}` before it is taken", segments.values[value].name),
        };
        let mut ran = Vec::new();
        for (index, segment) in self.segments.segments.iter().enumerate() {
            for Exchange { from, to } in self.segments.exchanges.iter().filter(|e| segment.takes.contains(&e.to)) {
                if values[*to].is_none() {
                    let before = values[*from].clone().ok_or_else(|| missing(*from, &self.segments))?;
                    values[*to] = Some(self.exchanged(before, *from, *to)?);
                }
            }
            let takes =
                segment.takes.iter().map(|value| values[*value].clone().ok_or_else(|| missing(*value, &self.segments)));
            let takes = takes.collect::<Result<Vec<Tensor>>>()?;
            let [activations, scratch] = self.begin();
            let (parameters, mut gradients) = self.store.split();
            let mut tape = Tape::new(self.device, &parameters, policy, RandomKey { seed: 0, step: 0, site: 0 })
                .with_gradients(&mut gradients);
            let takes: Vec<Var> = takes.into_iter().map(|tensor| tape.leaf(tensor)).collect();
            let mut cx = Forward::training(self.batch, 1.0);
            let gives = match self.unit.segments() {
                Some(_) => self.unit.forward_segment(index, &mut tape, &mut cx, &takes)?,
                None => vec![self.unit.forward(&mut tape, &mut cx, takes.first())?],
            };
            let recording = tape.finish();
            let cost = SegmentCost {
                name: segment.name,
                forward: self.device.take_profile().total(),
                forward_peak_bytes: self.peak(Purpose::Activations) - activations,
                workspace_bytes: self.peak(Purpose::Workspace) - scratch,
                backward: Cost::default(),
                backward_input: Cost::default(),
                backward_parameters: Cost::default(),
                saved_bytes: 0,
                deferred_bytes: 0,
                backward_peak_bytes: 0,
            };
            let places = |vars: &[Var]| vars.iter().map(Place::from).collect();
            ran.push(Ran { takes: places(&takes), gives: places(&gives), recording, cost });
            for (value, var) in segment.gives.iter().zip(gives) {
                values[*value] = Some(var.into_tensor());
            }
        }
        let values = values.into_iter().enumerate();
        let values = values.map(|(at, value)| value.ok_or_else(|| missing(at, &self.segments)));
        Ok((ran, values.collect::<Result<_>>()?))
    }

    /// Runs backward of all segments, and adds to their costs.
    fn backward(&mut self, ran: Vec<Ran>, forms: &[Form], halves: bool, costs: &mut [SegmentCost]) -> Result<()> {
        for (index, Ran { takes, gives, recording, .. }) in ran.into_iter().enumerate().rev() {
            let segment = &self.segments.segments[index];
            if !segment.differentiable {
                continue;
            }
            let gradients =
                segment.gives.iter().zip(gives).map(|(value, place)| Ok((place, self.zeros(&forms[*value])?)));
            let mut outputs: Vec<(Place, Tensor)> = gradients.collect::<Result<_>>()?;
            for (_, gradient) in outputs.iter_mut().filter(|(_, gradient)| gradient.elements() == 1) {
                if !self.device.is_meta() {
                    // A loss that took its gradients in forward insists on an upstream gradient of
                    // one.
                    gradient.write(&[1.0f32])?;
                }
            }
            let [activations, scratch] = self.begin();
            let (parameters, mut sink) = self.store.split();
            let cost = &mut costs[index];
            if halves {
                let (inputs, deferred) = recording.backward_input(&outputs, &takes, &parameters)?;
                cost.backward_input = self.device.take_profile().total();
                cost.deferred_bytes = deferred.bytes();
                drop((inputs, outputs));
                deferred.backward_parameters(&parameters, &mut sink)?;
                cost.backward_parameters = self.device.take_profile().total();
            } else {
                recording.backward_at(&outputs, &takes, &parameters, &mut sink)?;
                cost.backward = self.device.take_profile().total();
                cost.backward_peak_bytes = self.peak(Purpose::Activations) - activations;
                cost.workspace_bytes = cost.workspace_bytes.max(self.peak(Purpose::Workspace) - scratch);
            }
        }
        Ok(())
    }

    /// A value after its layout has changed.
    fn exchanged(&self, before: Tensor, from: usize, to: usize) -> Result<Tensor> {
        let (axis, change) = self.segments.change(Exchange { from, to });
        let Some(change) = change else {
            let [from, to] = [from, to].map(|value| self.segments.values[value].over(axis).name());
            let problem = format!("no collective turns a {from} value into a {to} one");
            return Err(ModelError::Unit { unit: self.unit.name().into(), problem });
        };
        let ranks = self.ranks[usize::from(axis == Axis::Context)];
        let (mut shape, dtype) = form(&before);
        match change {
            Change::Nothing => return Ok(before),
            Change::By(Collective::AllGather) => shape[0] *= ranks,
            Change::By(Collective::ReduceScatter) | Change::TakePart => shape[0] /= ranks,
            Change::By(_) => {}
        }
        drop(before);
        self.zeros(&(shape, dtype))
    }

    fn zeros(&self, (shape, dtype): &Form) -> Result<Tensor> {
        Ok(self.device.zeros(&shape[..], *dtype, Purpose::Activations)?)
    }

    fn live(&self, purpose: Purpose) -> usize {
        self.device.pool().usage().live(purpose)
    }

    fn peak(&self, purpose: Purpose) -> usize {
        self.device.pool().usage().peak(purpose)
    }

    /// Starts to count; returns the bytes of activations and of scratch that live now.
    fn begin(&self) -> [usize; 2] {
        self.device.take_profile();
        self.device.pool().reset_peaks();
        [Purpose::Activations, Purpose::Workspace].map(|purpose| self.live(purpose))
    }
}
