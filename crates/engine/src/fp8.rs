//! Scales of products with 8-bit operands, chosen by the largest values of earlier steps ("delayed
//! scaling", as in NVIDIA's Transformer Engine).
//!
//! Three tensors of every linear layer of the blocks are rounded: the input and the weight to E4M3,
//! the gradient of the output to E5M2. For each tensor, a history keeps the largest magnitudes of
//! some earlier steps. A step rounds with
//! `scale = 2^floor(log2(largest of the format / largest in the history)) / 2^margin`, a power of
//! two, so that scaling back is exact. The history grows once per step, when the gradient norm is
//! known, by the largest value over all ranks. A skipped step adds nothing. So all micro-batches of
//! a step, and recomputed forwards, round with the same scales.
//!
//! The first step of a run has no history. It computes products in bf16 and only records
//! magnitudes.

use crate::state::does_not_fit;
use crate::{EngineError, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use trainyard_autograd::ParamId;
use trainyard_model::{Model, ParameterKind};
use trainyard_tensor::cuda::driver::Product;
use trainyard_tensor::ops::fp8::{Fp8, Scaling, Slot, Slots};
use trainyard_tensor::{DType, Device, Purpose, Tensor};

/// Settings of the fp8 recipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fp8Settings {
    /// Number of steps in the history.
    pub history: usize,
    /// Powers of two of headroom above the largest magnitude in the history.
    pub margin: u32,
}

/// The state in a checkpoint. The scales follow from it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct AmaxHistory {
    /// The layers' weights by name, in the order of the numbers.
    pub layers: Vec<String>,
    /// For each step, oldest first, the largest magnitudes of every layer's input, weight and
    /// output's gradient.
    pub steps: VecDeque<Vec<f32>>,
}

/// Limit for the exponents of scales. Within it the product of two inverses is a normal f32, and
/// values scaled back are normal bf16.
const EXPONENT_MAX: i32 = 60;

/// The formats of a layer's input, weight and output's gradient.
const FORMATS: [Fp8; 3] = [Fp8::E4M3, Fp8::E4M3, Fp8::E5M2];

/// The scale of a tensor with the largest magnitude `amax`: the largest power of two that keeps it
/// within the format, less the margin. 1 for a tensor of zeros.
fn scale(format: Fp8, amax: f32, margin: u32) -> f32 {
    if amax <= 0.0 {
        return 1.0;
    }
    // Division rounds, so near a power of two the quotient's exponent may be one too large.
    let mut exponent = (f64::from(format.max()) / f64::from(amax)).log2().floor() as i32;
    exponent -= i32::from(f64::from(amax) * 2f64.powi(exponent) > f64::from(format.max()));
    2f32.powi((exponent - margin as i32).clamp(-EXPONENT_MAX, EXPONENT_MAX))
}

/// Numbers from one scale to the next, which a GPU's products need aligned.
const SCALE_STRIDE: usize = Product::FP8_MULTIPLE / size_of::<f32>();

/// The weights of the linear layers in the blocks, without the embeddings and the head.
pub fn layers(model: &Model) -> Vec<ParamId> {
    let last = model.units().len() - 1;
    let inner = |id: &ParamId| (1..last).contains(&(id.unit as usize));
    let weights = model
        .parameters()
        .filter(|(id, spec)| inner(id) && spec.kind == ParameterKind::Matrix && spec.shape.len() == 2)
        .filter(|(_, spec)| !spec.is_adapter());
    weights.map(|(id, _)| id).collect()
}

/// A rank's scales with their history.
pub struct Fp8State {
    settings: Fp8Settings,
    ids: Vec<ParamId>,
    names: Vec<String>,
    /// f32: every tensor's scale, then every tensor's inverse, each at a multiple of
    /// [`SCALE_STRIDE`].
    scales: Tensor,
    /// u32, the bits of f32: every tensor's largest magnitude in this step.
    amax: Tensor,
    steps: VecDeque<Vec<f32>>,
    layers: Arc<BTreeMap<ParamId, Scaling>>,
}

impl Fp8State {
    /// Begins without a history. On meta, where a steady step is predicted, it begins as if there
    /// were one.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(device: &Device, model: &Model, settings: Fp8Settings) -> Result<Fp8State> {
        let ids = layers(model);
        let names = ids.iter().map(|id| model.parameter_name(*id).expect("a parameter of the model has a name"));
        let tensors = FORMATS.len() * ids.len();
        let words = 2 * tensors * SCALE_STRIDE;
        let scales = device.tensor([words], &vec![1.0f32; words], Purpose::Workspace)?;
        let mut state = Fp8State {
            settings,
            names: names.collect(),
            ids,
            scales,
            amax: device.zeros([tensors], DType::U32, Purpose::Workspace)?,
            steps: VecDeque::new(),
            layers: Arc::default(),
        };
        state.name_layers(!device.is_meta())?;
        Ok(state)
    }

    /// Sets whether the layers only measure magnitudes, or multiply in 8 bits, from now on.
    fn name_layers(&mut self, measures: bool) -> Result<()> {
        let tensors = FORMATS.len() * self.ids.len();
        let slot = |index: usize| -> Result<Slot> {
            Ok(Slot {
                scale: self.scales.view(index * SCALE_STRIDE, [1])?,
                inverse: self.scales.view((tensors + index) * SCALE_STRIDE, [1])?,
                amax: self.amax.view(index, [1])?,
            })
        };
        let scaling = |layer: usize| -> Result<Scaling> {
            let first = FORMATS.len() * layer;
            let slots = Slots { input: slot(first)?, weight: slot(first + 1)?, gradient: slot(first + 2)? };
            Ok(Scaling { slots: Arc::new(slots), measures })
        };
        let layers = self.ids.iter().enumerate().map(|(layer, id)| Ok((*id, scaling(layer)?)));
        self.layers = Arc::new(layers.collect::<Result<_>>()?);
        Ok(())
    }

    /// The scales of each layer, for a tape.
    pub fn layers(&self) -> Arc<BTreeMap<ParamId, Scaling>> {
        Arc::clone(&self.layers)
    }

    /// True if this step only records magnitudes.
    pub fn measures(&self) -> bool {
        self.steps.is_empty()
    }

    /// The largest magnitudes of this step on this rank, in the order of the layers; zeros on meta.
    /// The host waits for the device.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn of_step(&self) -> Result<Vec<f64>> {
        if self.amax.device().is_meta() {
            return Ok(vec![0.0; self.amax.elements()]);
        }
        Ok(self.amax.with_data(|bits: &[u32]| bits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect())?)
    }

    /// Ends a step. `amax` has the largest magnitudes over all ranks, or None if the step is
    /// skipped.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn end_step(&mut self, amax: Option<Vec<f32>>) -> Result<()> {
        self.amax.fill_zero()?;
        let Some(amax) = amax.filter(|_| !self.amax.device().is_meta()) else { return Ok(()) };
        self.steps.push_back(amax);
        self.use_history()
    }

    /// Chooses the scales from the history.
    fn use_history(&mut self) -> Result<()> {
        let forgotten = self.steps.len().saturating_sub(self.settings.history);
        self.steps.drain(..forgotten);
        let largest = |tensor: usize| self.steps.iter().map(|step| step[tensor]).fold(0.0, f32::max);
        let scale = |tensor: usize| scale(FORMATS[tensor % FORMATS.len()], largest(tensor), self.settings.margin);
        let scales: Vec<f32> = (0..self.amax.elements()).map(scale).collect();
        let both = scales.iter().copied().chain(scales.iter().map(|scale| 1.0 / scale));
        let words: Vec<f32> = both.flat_map(|scale| [scale; SCALE_STRIDE]).collect();
        self.scales.write(&words)?;
        self.name_layers(self.measures())
    }

    /// The state for a checkpoint.
    pub fn history(&self) -> AmaxHistory {
        AmaxHistory { layers: self.names.clone(), steps: self.steps.clone() }
    }

    /// Restores a checkpoint's history.
    ///
    /// # Errors
    /// A history of another model.
    pub fn restore(&mut self, history: AmaxHistory) -> Result<()> {
        let tensors = self.amax.elements();
        let fits = history.layers == self.names && history.steps.iter().all(|step| step.len() == tensors);
        if !fits {
            let (found, wanted) = (history.layers.len(), self.names.len());
            let message = "the checkpoint's largest magnitudes of eight bits are those of other layers";
            return Err(does_not_fit(format!("{message}: {found} of them, and this model has {wanted}")));
        }
        self.steps = history.steps;
        self.use_history()
    }
}

/// The maximum over ranks of every tensor's magnitude; NaN if one of them is. `all` has the numbers
/// of one rank after the other.
pub fn over_ranks(all: &[f64], tensors: usize) -> Vec<f32> {
    let mut most = vec![0.0; tensors];
    for rank in all.chunks(tensors.max(1)) {
        for (most, value) in most.iter_mut().zip(rank) {
            // Not `max`, which ignores NaN.
            if value.is_nan() || *value > *most {
                *most = *value;
            }
        }
    }
    most.into_iter().map(|most| most as f32).collect()
}

/// Checks that 8-bit products support all `sizes`, given with their names: those of the linear
/// layers and the rows of a micro-batch.
///
/// # Errors
/// The sizes that are not supported.
pub fn check_sizes(sizes: &[(&str, usize)]) -> Result<(), EngineError> {
    let odd = |(name, size): &(&str, usize)| {
        (!size.is_multiple_of(trainyard_tensor::ops::fp8::MULTIPLE)).then(|| format!("{name} = {size}"))
    };
    let odd: Vec<String> = sizes.iter().filter_map(odd).collect();
    if odd.is_empty() {
        return Ok(());
    }
    Err(does_not_fit(format!(
        "precision.fp8 = \"hybrid\" multiplies matrices whose sides are multiples of {}, and these are not: {}; change them, or set precision.fp8 = \"off\"",
        trainyard_tensor::ops::fp8::MULTIPLE,
        odd.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_the_largest_powers_of_two_that_leave_the_largest_value_in_the_format() {
        for format in Fp8::ALL {
            for amax in [1e-9f32, 0.3, 0.875, 1.0, 1.75, 1.7500001, 3.5, 447.9, 448.0, 449.0, 6e4, 1e9] {
                let s = scale(format, amax, 0);
                assert_eq!(s.log2().fract(), 0.0);
                assert!(amax * s <= format.max() && 2.0 * amax * s > format.max(), "{format:?} {amax} {s}");
                assert_eq!(scale(format, amax, 3), s / 8.0);
            }
            // A tensor of zeros is not scaled, and a tensor of tiny values only within the exponent
            // limit.
            assert_eq!((scale(format, 0.0, 2), scale(format, 1e-40, 0)), (1.0, 2f32.powi(EXPONENT_MAX)));
        }
    }

    #[test]
    fn ranks_agree_on_the_largest_and_nothing_hides_what_is_not_a_number() {
        assert_eq!(over_ranks(&[1.0, 5.0, 0.0, 4.0, 2.0, 0.0], 3), [4.0, 5.0, 0.0]);
        let odd = over_ranks(&[1.0, f64::NAN, f64::INFINITY, 4.0, 2.0, 0.0], 3);
        assert!(odd[0] == 4.0 && odd[1].is_nan() && odd[2] == f32::INFINITY);
        assert!(over_ranks(&[4.0, f64::NAN], 1)[0].is_nan() && over_ranks(&[f64::NAN, 4.0], 1)[0].is_nan());
    }
}
