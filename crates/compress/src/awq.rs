//! Scales that make columns matter less to rounding: activation-aware weight quantisation (Lin et
//! al. 2023, AWQ).
//!
//! Column j of a layer's matrix meets input j. Where inputs are large, the rounding of the column
//! changes outputs most. So the column is multiplied by `s_j > 1` before it is rounded, and what
//! makes input j is divided by `s_j`: the gains of the norm before the layer, or rows of the matrix
//! before it. Before rounding, the block computes what it did. The scales are `s_j = x_j^a`, where
//! `x_j` is the root mean square of input j; of 20 exponents `a` from 0 to 0.95 the one with the
//! least error of the layer's outputs is taken. With `a = 0` nothing is scaled.
//!
//! The published program takes means of magnitudes, and clips weights too, which is left out here.

use crate::Result;
use crate::inputs::Inputs;
use crate::quantise::{GroupedGrid, QuantiseMethod, quantise};
use std::collections::BTreeMap;
use std::ops::Range;
use trainyard_model::families::{Gains, MlpKind, NormPlaces};
use trainyard_model::{Model, ModelSpec, ParameterSpec};
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::cpu::gemm::{Epilogue, MatMut, MatRef, forward};

/// Exponents that are tried: multiples of 1 / 20.
const EXPONENTS: usize = 20;

/// The maker of a layer's inputs, by the numbers of its parameters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Maker {
    /// A norm.
    Norm { weight: usize, bias: Option<usize>, gains: Gains },
    /// The rows of a layer's matrix from `first` to its end, and of its bias.
    Rows { matrix: usize, bias: Option<usize>, first: usize },
}

/// Scales the matrices of a block, unit `unit` of `model`, and what makes their inputs. `flat` are
/// its parameters and `inputs` the products of the inputs of its matrices.
///
/// # Errors
/// Errors of rounding.
pub fn scale(
    cpu: &Cpu,
    model: &Model,
    unit: usize,
    flat: &mut [f32],
    inputs: &BTreeMap<usize, Inputs>,
    grid: GroupedGrid,
) -> Result<()> {
    let Some(spec) = model.spec().filter(|spec| (1..=spec.layers).contains(&unit)) else { return Ok(()) };
    let parameters = model.units()[unit].parameters();
    let ranges = ranges(model, unit);
    for (matrix, maker) in layers(spec, unit - 1, parameters) {
        let Some(inputs) = inputs.get(&matrix) else { continue };
        let name = format!("{}.{}", model.units()[unit].name(), parameters[matrix].name);
        let scales = best_scales(cpu, &name, &flat[ranges[matrix].clone()], inputs, grid)?;
        multiply(&mut flat[ranges[matrix].clone()], &scales);
        divide(flat, &ranges, &maker, &scales);
    }
    Ok(())
}

/// The parameters of a unit in its flat buffer.
pub(crate) fn ranges(model: &Model, unit: usize) -> Vec<Range<usize>> {
    let layout = model.layout(unit, 1);
    (0..model.units()[unit].parameters().len()).map(|index| layout.range(index)).collect()
}

/// The layers of a block whose inputs have a maker that can be scaled, those that change the rows
/// of others first. Left out are inputs behind a function that is not linear, values that several
/// heads share, and experts.
pub(crate) fn layers(spec: &ModelSpec, layer: usize, parameters: &[ParameterSpec]) -> Vec<(usize, Maker)> {
    let form = spec.family.form();
    let index = |name: &str| parameters.iter().position(|parameter| parameter.name == name);
    let rows = |of: &str, first| {
        let matrix = index(&format!("{of}.weight"))?;
        Some(Maker::Rows { matrix, bias: index(&format!("{of}.bias")), first })
    };
    let norm = |name: &str| {
        let weight = index(&format!("{name}.weight"))?;
        Some(Maker::Norm { weight, bias: index(&format!("{name}.bias")), gains: form.gains })
    };
    let before = matches!(form.norms, NormPlaces::Before | NormPlaces::Both);
    let is_dense = spec.experts_of(layer).is_none();
    let heads = spec.heads * spec.head_dim;
    let pairs = [
        ("attn.out.weight", rows("attn.qkv", 2 * heads).filter(|_| spec.kv_heads == spec.heads)),
        ("mlp.down.weight", rows("mlp.up", spec.ffn_dim).filter(|_| is_dense && form.mlp == MlpKind::Gated)),
        ("attn.qkv.weight", norm("norm1").filter(|_| before)),
        ("mlp.up.weight", norm("norm2").filter(|_| before && is_dense)),
    ];
    pairs.into_iter().filter_map(|(name, maker)| Some((index(name)?, maker?))).collect()
}

/// The scales of the columns of `weights` [n, k] with the least error of the outputs.
///
/// # Errors
/// Errors of rounding.
pub fn best_scales(cpu: &Cpu, name: &str, weights: &[f32], inputs: &Inputs, grid: GroupedGrid) -> Result<Vec<f32>> {
    let columns = inputs.columns();
    let rows = inputs.rows().max(1) as f64;
    let sizes: Vec<f64> = inputs.norms().into_iter().map(|norm| (norm / rows.sqrt()).max(1e-4)).collect();
    let mut least = (f64::INFINITY, vec![1.0; columns]);
    for step in 0..EXPONENTS {
        let scales = scales(&sizes, step as f64 / EXPONENTS as f64);
        let error = error(cpu, name, weights, inputs, &scales, grid)?;
        if error < least.0 {
            least = (error, scales);
        }
    }
    Ok(least.1)
}

/// `sizes^exponent`, over the geometric mean of the largest and the smallest.
fn scales(sizes: &[f64], exponent: f64) -> Vec<f32> {
    let powers: Vec<f64> = sizes.iter().map(|size| size.powf(exponent)).collect();
    let [most, least] = [powers.iter().copied().fold(0.0, f64::max), powers.iter().copied().fold(f64::MAX, f64::min)];
    powers.iter().map(|power| (power / (most * least).sqrt()) as f32).collect()
}

/// The squared error of the layer's outputs on all inputs: the sum over rows e of the change of
/// weights of `e H eᵀ`.
fn error(cpu: &Cpu, name: &str, weights: &[f32], inputs: &Inputs, scales: &[f32], grid: GroupedGrid) -> Result<f64> {
    let columns = inputs.columns();
    let mut moved = weights.to_vec();
    multiply(&mut moved, scales);
    quantise(cpu, name, &mut moved, inputs, QuantiseMethod::Nearest, grid)?;
    for (row, before) in moved.chunks_exact_mut(columns).zip(weights.chunks_exact(columns)) {
        row.iter_mut().zip(before).zip(scales).for_each(|((weight, before), scale)| *weight = *weight / scale - before);
    }
    let rows = weights.len() / columns;
    let mut products = vec![0.0f32; moved.len()];
    let (changes, all) = (MatRef::new(&moved, rows, columns), MatRef::new(inputs.products(), columns, columns));
    forward(cpu, changes, all.into(), Epilogue::<f32>::default(), MatMut::new(&mut products, rows, columns));
    Ok(moved.iter().zip(&products).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum())
}

/// Multiplies the columns of a matrix.
pub(crate) fn multiply(weights: &mut [f32], scales: &[f32]) {
    for row in weights.chunks_exact_mut(scales.len()) {
        row.iter_mut().zip(scales).for_each(|(weight, scale)| *weight *= scale);
    }
}

/// Divides what makes inputs.
pub(crate) fn divide(flat: &mut [f32], ranges: &[Range<usize>], maker: &Maker, scales: &[f32]) {
    let mut each = |range: Range<usize>, change: &dyn Fn(f32, f32) -> f32| {
        flat[range].iter_mut().zip(scales).for_each(|(value, scale)| *value = change(*value, *scale));
    };
    match *maker {
        Maker::Norm { weight, bias, gains } => {
            each(ranges[weight].clone(), &|value, scale| match gains {
                Gains::Weight => value / scale,
                Gains::OnePlusWeight => (1.0 + value) / scale - 1.0,
            });
            bias.into_iter().for_each(|bias| each(ranges[bias].clone(), &|value, scale| value / scale));
        }
        Maker::Rows { matrix, bias, first } => {
            let Range { start, end } = ranges[matrix].clone();
            let rows = first + scales.len();
            // They are the last rows of the matrix.
            let width = (end - start) / rows;
            for (row, scale) in flat[start..end].chunks_exact_mut(width).skip(first).zip(scales) {
                row.iter_mut().for_each(|weight| *weight /= scale);
            }
            if let Some(bias) = bias {
                let start = ranges[bias].start + first;
                flat[start..start + scales.len()].iter_mut().zip(scales).for_each(|(value, scale)| *value /= scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::store;
    use trainyard_autograd::{Policy, Tape};
    use trainyard_model::families::{self, Sizes};
    use trainyard_model::{BatchSlices, Forward, Output};
    use trainyard_tensor::cpu::Isa;
    use trainyard_tensor::cpu::philox::RandomKey;
    use trainyard_tensor::{Device, Purpose};

    const ROWS: usize = 12;

    /// Numbers between -1 and 1.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        let mixed = |i: usize| {
            let x = (i as u64 + 1 + ((seed as u64) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / 8_388_608.0 - 1.0
        };
        (0..count).map(mixed).collect()
    }

    fn output(device: &Device, model: &Model, flat: &[f32]) -> Vec<f32> {
        let (tokens, positions): (Vec<i32>, Vec<i32>) = ((0..ROWS as i32).collect(), (0..ROWS as i32).collect());
        let batch = model.batch(device, &BatchSlices::of_text(&tokens, None, &positions, &[0, ROWS as i32])).unwrap();
        let mut store = store(device, model, 1, flat, |_| unreachable!("blocks borrow nothing")).unwrap();
        let (parameters, _) = store.split();
        let mut tape = Tape::new(device, &parameters, Policy::Nothing, RandomKey::default());
        let dim = model.spec().unwrap().dim;
        let x = tape.leaf(device.tensor([ROWS, dim], &numbers(ROWS * dim, 1), Purpose::Activations).unwrap());
        let mut cx = Forward::evaluation(&batch, Output::Logits);
        model.units()[1].forward(&mut tape, &mut cx, Some(&x)).unwrap().tensor().to_f32_vec().unwrap()
    }

    #[test]
    fn a_block_computes_what_it_did_before_rounding() {
        let device = Device::cpu(Isa::detect(), 1, None);
        let sizes = Sizes { vocab_size: 50, dim: 32, layers: 2, heads: 4, max_positions: 16 };
        let usual = |family: families::Family, kv_heads: usize| ModelSpec { kv_heads, ..family.usual(&sizes) };
        for (spec, scaled) in [
            (usual(families::LLAMA, 4), 4),
            (usual(families::LLAMA, 2), 3),
            (usual(families::GPT2, 4), 3),
            (usual(families::GEMMA3, 4), 4),
            (usual(families::OLMO2, 4), 2),
            (usual(families::MIXTRAL, 4), 2),
        ] {
            let model = Model::new(spec.clone()).unwrap();
            let parameters = model.units()[1].parameters();
            let layers = layers(&spec, 0, parameters);
            assert_eq!(layers.len(), scaled, "{}: {layers:?}", spec.family);
            let mut flat = numbers(model.layout(1, 1).elements(), 2);
            let before = output(&device, &model, &flat);
            let ranges = ranges(&model, 1);
            for (matrix, maker) in &layers {
                let columns = parameters[*matrix].row_elements();
                let scales: Vec<f32> = (0..columns).map(|column| 0.4 + (column % 13) as f32 / 4.0).collect();
                let unscaled = flat.clone();
                multiply(&mut flat[ranges[*matrix].clone()], &scales);
                divide(&mut flat, &ranges, maker, &scales);
                let moved = flat.iter().zip(&unscaled).filter(|(a, b)| a != b).count();
                assert!(moved > ranges[*matrix].len() / 2, "{}: {matrix} and {maker:?}", spec.family);
            }
            let after = output(&device, &model, &flat);
            let size = before.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let far = before.iter().zip(&after).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(far <= 2e-5 * size, "{}: {far:e} of {size:e}", spec.family);
        }
    }
}
