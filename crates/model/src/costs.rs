//! The cost of each unit of a model, from running its own code on a device without data.
//!
//! There is no formula per layer here. [`unit_costs`] runs forward and backward of every unit on
//! [`Device::meta`], where each kernel states its FLOPs and bytes and every allocation is counted.
//! A user's own unit is priced the same way.
//!
//! [`segment_costs`] does the same for units that are split over ranks, segment by segment.
//!
//! [`FlopsPerToken`] is the figure with which the field reports utilisation.

mod segments;

pub use segments::{SegmentCost, SegmentedCost, segment_costs, segment_costs_on};

use crate::batch::{Batch, BatchShape};
use crate::families::{AttentionKind, Input, NormPlaces, QkNormKind};
use crate::spec::{EncoderSpec, ModelSpec};
use crate::unit::{Forward, Unit};
use crate::{Model, Result};
use trainyard_autograd::{Gradients, Policy, RandomKey, Recording, Store, Tape, Var};
use trainyard_tensor::{Cost, DType, Device, Purpose, Tensor};

/// The cost of one unit on one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitCost {
    /// The unit's name.
    pub name: String,
    /// Elements of its parameters.
    pub parameters: usize,
    /// FLOPs and bytes moved by forward.
    pub forward: Cost,
    /// The same for backward, including the repeated forward under full checkpointing.
    pub backward: Cost,
    /// Bytes that live from forward to backward: the tensors that the unit keeps and, for all units
    /// but the first, its input. Each buffer counts once.
    pub saved_bytes: usize,
    /// Bytes of its output.
    pub output_bytes: usize,
    /// The peak of activation bytes inside forward, beyond its input.
    pub forward_peak_bytes: usize,
    /// The same inside backward, including the tensors that forward saved and the output's
    /// gradient.
    pub backward_peak_bytes: usize,
    /// The peak of kernels' scratch memory.
    pub workspace_bytes: usize,
}

/// Prices every unit of `model` for micro-batches of `shape` in `dtype`. `policy` says which
/// tensors are kept for backward: [`Policy::Nothing`] is full checkpointing, where a unit keeps its
/// input and repeats its forward.
pub fn unit_costs(model: &Model, shape: &BatchShape, dtype: DType, policy: Policy) -> Result<Vec<UnitCost>> {
    let device = Device::meta();
    unit_costs_on(&device, model, shape, dtype, policy)
}

/// Does the same on `device`, which must be idle. On a real device the kernels that it launches are
/// counted. All parameters are zero there.
pub fn unit_costs_on(
    device: &Device,
    model: &Model,
    shape: &BatchShape,
    dtype: DType,
    policy: Policy,
) -> Result<Vec<UnitCost>> {
    device.set_profiling(true);
    let batch = shape.batch(device)?;
    let mut store = zeros(device, model, dtype)?;
    let mut costs = Vec::with_capacity(model.units().len());
    let mut input: Option<Tensor> = None;
    for (number, unit) in model.units().iter().enumerate() {
        let flows = number > model.lowest_trained();
        let (mut cost, output) = unit_cost(device, unit.as_ref(), &batch, &mut store, input.take(), flows, policy)?;
        if number < model.lowest_trained() {
            // No backward comes so far down.
            cost.saved_bytes = 0;
        }
        costs.push(cost);
        input = Some(output);
    }
    Ok(costs)
}

/// The parameters of `model`, all zero. Gradients exist before they are written, as in a run.
fn zeros(device: &Device, model: &Model, dtype: DType) -> Result<Store> {
    let mut store = Store::new();
    for (id, parameter) in model.parameters() {
        store.insert(id, device.zeros(&parameter.shape, dtype, Purpose::Params)?);
        match parameter.trained {
            true => drop(store.split().1.target(id)?),
            false => store.freeze(id),
        }
    }
    model.adapters().iter().for_each(|(id, adapter)| store.adapt(*id, adapter.clone()));
    Ok(store)
}

/// One unit, and its output for the next. A gradient `flows` to its input if anything below is
/// trained.
fn unit_cost(
    device: &Device,
    unit: &dyn Unit,
    batch: &Batch,
    store: &mut Store,
    input: Option<Tensor>,
    flows: bool,
    policy: Policy,
) -> Result<(UnitCost, Tensor)> {
    let live = |purpose| device.pool().usage().live(purpose);
    let peak = |purpose| device.pool().usage().peak(purpose);
    let input_bytes = input.as_ref().map_or(0, Tensor::buffer_bytes);
    let before = live(Purpose::Activations);
    let scratch_before = live(Purpose::Workspace);

    device.take_profile();
    device.pool().reset_peaks();
    let mut run = Run::forward(device, unit, batch, store, input.clone(), flows, policy)?;
    let forward = device.take_profile().total();
    let forward_peak_bytes = peak(Purpose::Activations) - before;
    let forward_workspace = peak(Purpose::Workspace) - scratch_before;
    let output_bytes = run.output.tensor().buffer_bytes();
    // The output goes to the next unit. It counts here only if backward keeps it too.
    let passed_on = if run.output.tensor().is_unique() { output_bytes } else { 0 };
    let saved_bytes = input_bytes + live(Purpose::Activations) - before - passed_on;

    device.pool().reset_peaks();
    if policy == Policy::Nothing {
        drop(run);
        run = Run::forward(device, unit, batch, store, input, flows, Policy::Everything)?;
    }
    let next = run.backward(device, store)?;
    let cost = UnitCost {
        name: unit.name().into(),
        parameters: unit.parameters().iter().map(|parameter| parameter.elements()).sum(),
        forward,
        backward: device.take_profile().total(),
        saved_bytes,
        output_bytes,
        forward_peak_bytes,
        backward_peak_bytes: peak(Purpose::Activations) - before,
        workspace_bytes: forward_workspace.max(peak(Purpose::Workspace) - scratch_before),
    };
    Ok((cost, next))
}

/// A unit's forward, recorded.
struct Run {
    leaf: Option<Var>,
    output: Var,
    recording: Recording,
}

impl Run {
    fn forward(
        device: &Device,
        unit: &dyn Unit,
        batch: &Batch,
        store: &mut Store,
        input: Option<Tensor>,
        flows: bool,
        policy: Policy,
    ) -> Result<Run> {
        let (parameters, mut gradients) = store.split();
        let mut tape = Tape::new(device, &parameters, policy, RandomKey { seed: 0, step: 0, site: 0 })
            .with_gradients(&mut gradients);
        let leaf = input.map(|input| if flows { tape.leaf(input) } else { tape.constant(input) });
        let output = unit.forward(&mut tape, &mut Forward::training(batch, 1.0), leaf.as_ref())?;
        Ok(Run { leaf, output, recording: tape.finish() })
    }

    fn backward(self, device: &Device, store: &mut Store) -> Result<Tensor> {
        let output = self.output.tensor();
        let mut gradient = device.zeros(*output.shape(), output.dtype(), Purpose::Activations)?;
        if gradient.elements() == 1 && !device.is_meta() {
            // A loss that took its gradients in forward insists on an upstream gradient of one.
            gradient.write(&[1.0f32])?;
        }
        let (parameters, mut gradients) = store.split();
        let inputs: Vec<&Var> = self.leaf.iter().collect();
        self.recording.backward(&[(&self.output, gradient)], &inputs, &parameters, &mut gradients)?;
        Ok(self.output.into_tensor())
    }
}

/// FLOPs of training on one token, by two conventions.
///
/// Utilisation (MFU) is reported with `convention`, so that figures compare with those of other
/// systems. `causal` counts what the mathematics needs. Neither counts recomputation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlopsPerToken {
    /// `6 N + 12 L h c s` (Chowdhery et al. 2022, appendix B). N counts the parameters that every
    /// token is multiplied by, which are all but tables that are only looked up (an untied token
    /// table, learned positions). L is the number of layers, h c the width of all heads, and s the
    /// sequence's length. Attention counts as if every token saw its whole sequence.
    pub convention: f64,
    /// The same, with attention only to the tokens that a token sees: half of the sequence, its
    /// window, or, where attention is not causal, all.
    pub causal: f64,
}

impl ModelSpec {
    /// Elements of all parameters that take part in a product for every token, gains and biases
    /// included. Of experts these are as many as a token goes to. The head of a model of images,
    /// which multiplies one row of an image, counts whole here; [`ModelSpec::flops_per_token`]
    /// divides it.
    pub fn multiplied_parameters(&self) -> usize {
        if let Some(encoder) = &self.encoder {
            let [of_encoder, of_decoder] = self.blocks_of_sides(encoder);
            return of_encoder + of_decoder + self.head_parameters();
        }
        let ModelSpec { dim, ffn_dim, .. } = *self;
        let (q, qkv) = (self.heads * self.head_dim, self.qkv_dim());
        let form = self.family.form();
        let gated = self.gates();
        let up = if gated { 2 * ffn_dim } else { ffn_dim };
        let when = |present: bool, size: usize| if present { size } else { 0 };
        let norm = dim + when(self.norm_bias, dim);
        let norms = if form.norms == NormPlaces::Both { 4 } else { 2 };
        let qk_norm = match form.qk_norm {
            QkNormKind::EachHead => 2 * self.head_dim,
            QkNormKind::Whole => (qkv + q) / 2,
        };
        let mlp = |layer: usize| match self.experts_of(layer) {
            None => dim * (up + ffn_dim) + when(self.mlp_bias, up + dim),
            Some(experts) => dim * (experts.experts + 3 * (experts.top_k * experts.ffn_dim + experts.shared_ffn_dim)),
        };
        let block = dim * (qkv + q)
            + norms * norm
            + when(self.qkv_bias, qkv)
            + when(self.o_bias, dim)
            + when(self.qk_norm, qk_norm);
        let input = self.image.as_ref().map_or(0, |image| image.patch_len() * dim);
        let value_residuals = when(self.value_residual, 2 * self.layers.saturating_sub(1));
        input
            + value_residuals
            + self.layers * block
            + (0..self.layers).map(mlp).sum::<usize>()
            + self.head_parameters()
    }

    /// Elements of the parameters that every token of the encoder, and every token of the decoder,
    /// is multiplied by in blocks. Keys and values of what the encoder made are its tokens'.
    fn blocks_of_sides(&self, encoder: &EncoderSpec) -> [usize; 2] {
        let (dim, width) = (self.dim, self.heads * self.head_dim);
        let mlp = dim * self.ffn_dim * if self.gates() { 3 } else { 2 };
        let decoder_layers = self.decoder_layers();
        let of_encoder = encoder.layers * (4 * dim * width + mlp + 2 * dim) + dim;
        let read = decoder_layers * 2 * dim * width;
        [of_encoder + read, decoder_layers * (6 * dim * width + mlp + 3 * dim)]
    }

    /// [`ModelSpec::flops_per_token`] of a sequence of which `encoder` tokens are the encoder's.
    fn flops_of_sides(&self, spec: &EncoderSpec, length: usize) -> FlopsPerToken {
        let encoder = EncoderSpec::usual_positions(length) as f64;
        let decoder = length as f64 - encoder;
        let [of_encoder, of_decoder] = self.blocks_of_sides(spec).map(|elements| elements as f64);
        let of_decoder = of_decoder + self.head_parameters() as f64;
        let (encoder_layers, decoder_layers) = (spec.layers as f64, self.decoder_layers() as f64);
        let width = (self.heads * self.head_dim) as f64;
        let per_token = |seen_by_decoder: f64| {
            let products = 6.0 * (encoder * of_encoder + decoder * of_decoder);
            let pairs = encoder_layers * encoder * encoder + decoder_layers * decoder * (seen_by_decoder + encoder);
            (products + 12.0 * pairs * width) / length.max(1) as f64
        };
        FlopsPerToken { convention: per_token(decoder), causal: per_token((decoder + 1.0) / 2.0) }
    }

    /// Elements of the parameters of the last unit that take part in its product.
    fn head_parameters(&self) -> usize {
        let norm = if self.norm_bias { 2 * self.dim } else { self.dim };
        let bias = if self.family.form().input == Input::Patches { self.vocab_size } else { 0 };
        norm + self.vocab_size * self.dim + bias
    }

    /// FLOPs of training on one token of a sequence of `length` tokens.
    pub fn flops_per_token(&self, length: usize) -> FlopsPerToken {
        if let Some(encoder) = &self.encoder {
            return self.flops_of_sides(encoder, length);
        }
        let head = self.head_parameters() as f64;
        let rows_of_head = match self.family.form().input {
            Input::Tokens | Input::Pairs => 1.0,
            // The class token's.
            Input::Patches => 1.0 / self.max_positions as f64,
        };
        let products = 6.0 * (self.multiplied_parameters() as f64 - head + head * rows_of_head);
        let width = (self.heads * self.head_dim) as f64;
        // Pairs of query and key, averaged over the sequence: position p sees min(p + 1, window).
        let full = self.family.form().attention == AttentionKind::Full;
        let seen = |layer| {
            if full {
                return length as f64;
            }
            let window = self.window(layer).unwrap_or(length).min(length) as f64;
            let length = length.max(1) as f64;
            (window * (window + 1.0) / 2.0 + (length - window) * window) / length
        };
        let pairs: f64 = (0..self.layers).map(seen).sum();
        FlopsPerToken {
            convention: products + 12.0 * (self.layers * length) as f64 * width,
            causal: products + 12.0 * pairs * width,
        }
    }
}
