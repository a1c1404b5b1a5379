//! Scales that move what is hard to round from the inputs of layers to their weights: SmoothQuant
//! (Xiao et al. 2023).
//!
//! A row of inputs has one scale, so a column with large inputs leaves few codes to all others. As
//! in [`crate::awq`], column j of a layer's matrix is multiplied by `s_j` and input j divided by
//! it, here by the gains of the norm before the layer; layers without one are left as they are. The
//! scales are `s_j = max |X_j|^a / max |W_j|^(1 - a)`, over the calibration's rows and the matrix's
//! (equation 4).

use crate::awq::{Maker, divide, layers, multiply, ranges};
use crate::inputs::Inputs;
use std::collections::BTreeMap;
use trainyard_model::Model;

/// The least size of a column, and the least scale, as in the published program.
const LEAST: f32 = 1e-5;

/// The usual exponent `a`.
pub const EXPONENT: f32 = 0.5;

/// Scales the matrices of a block that follow a norm, unit `unit` of `model`, and the norm. `flat`
/// are its parameters, and `inputs` the largest inputs of its matrices.
pub fn smooth(model: &Model, unit: usize, flat: &mut [f32], inputs: &BTreeMap<usize, Inputs>, exponent: f32) {
    let Some(spec) = model.spec().filter(|spec| (1..=spec.layers).contains(&unit)) else { return };
    let ranges = ranges(model, unit);
    for (matrix, maker) in layers(spec, unit - 1, model.units()[unit].parameters()) {
        let (Some(inputs), Maker::Norm { .. }) = (inputs.get(&matrix), &maker) else { continue };
        let weights = &mut flat[ranges[matrix].clone()];
        let scales = scales(weights, inputs.largest(), exponent);
        multiply(weights, &scales);
        divide(flat, &ranges, &maker, &scales);
    }
}

/// The scales of the columns of `weights` [n, k], whose inputs have the magnitudes `largest` [k].
pub fn scales(weights: &[f32], largest: &[f32], exponent: f32) -> Vec<f32> {
    let mut columns = vec![LEAST; largest.len()];
    for row in weights.chunks_exact(largest.len()) {
        columns.iter_mut().zip(row).for_each(|(most, weight)| *most = most.max(weight.abs()));
    }
    let scale = |(input, weight): (&f32, f32)| {
        // A column without inputs is left as it is.
        let scale = if *input > 0.0 { input.powf(exponent) / weight.powf(1.0 - exponent) } else { 1.0 };
        scale.max(LEAST)
    };
    largest.iter().zip(columns).map(scale).collect()
}
