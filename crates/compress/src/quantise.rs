//! Weights of few bits: rounded to nearest, or by GPTQ (Frantar et al. 2023).
//!
//! A weight becomes `code x scale`. Codes of b bits lie between `-2^(b-1)` and `2^(b-1) - 1`; the
//! scale of a group is its largest absolute value over `(2^b - 1) / 2`, rounded to the dtype that
//! it is stored in (as compressed-tensors has it).

use crate::Result;
use crate::factor::inverse_factor;
use crate::inputs::{Inputs, Needs};
use crate::solver::{Place, block_of, solve};
use trainyard_model::weights::{PackedFormat, PackedMatrix};
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::{DType, bf16, f16};

/// A choice of codes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuantiseMethod {
    /// The nearest.
    Nearest,
    /// The nearest to weights that have moved to make up for the rounding of earlier columns.
    Gptq,
}

impl QuantiseMethod {
    /// The statistics of inputs that it looks at.
    pub fn needs(self) -> Needs {
        match self {
            QuantiseMethod::Nearest => Needs::Nothing,
            QuantiseMethod::Gptq => Needs::Products,
        }
    }
}

/// `x` rounded to a float dtype.
pub fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// The values that weights may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Bits, and neighbours that share a scale.
    pub format: PackedFormat,
    /// The dtype of scales and of values.
    pub dtype: DType,
}

impl Grid {
    /// The scale of a group.
    fn scale(&self, group: &[f32]) -> f32 {
        let most = group.iter().fold(0.0f32, |most, w| most.max(w.abs()));
        rounded(self.dtype, most / (((1u32 << self.format.bits) - 1) as f32 / 2.0))
    }

    /// The code of a weight.
    fn code(&self, weight: f32, scale: f32) -> i8 {
        let end = (1i32 << (self.format.bits - 1)) as f32;
        if scale == 0.0 { 0 } else { (weight / scale).round_ties_even().clamp(-end, end - 1.0) as i8 }
    }

    /// The value of a code, as a reader of the files has it.
    fn value(&self, code: i8, scale: f32) -> f32 {
        rounded(self.dtype, f32::from(code) * scale)
    }
}

/// The codes of one row.
struct Row {
    codes: Vec<i8>,
    scales: Vec<f32>,
}

/// Rounds the weights of one matrix [n, k], which is called `layer`, to `grid`. They become the
/// values of the codes that are returned.
///
/// # Errors
/// Inputs that GPTQ cannot work with.
pub fn quantise(
    cpu: &Cpu,
    layer: &str,
    weights: &mut [f32],
    inputs: &Inputs,
    method: QuantiseMethod,
    grid: Grid,
) -> Result<PackedMatrix> {
    let columns = inputs.columns();
    let group = grid.format.group_in(columns);
    let mut rows: Vec<Row> = weights
        .chunks_exact(columns)
        .map(|row| Row { codes: vec![0; columns], scales: row.chunks(group).map(|group| grid.scale(group)).collect() })
        .collect();
    match method {
        QuantiseMethod::Nearest => {
            for (row, weights) in rows.iter_mut().zip(weights.chunks_exact_mut(columns)) {
                for (column, weight) in weights.iter_mut().enumerate() {
                    let scale = row.scales[column / group];
                    row.codes[column] = grid.code(*weight, scale);
                    *weight = grid.value(row.codes[column], scale);
                }
            }
        }
        QuantiseMethod::Gptq => {
            let factor = inverse_factor(layer, inputs.products(), columns, cpu.threads.count())?;
            let whole = group == columns;
            let round = |_: &(), row: &mut Row, place: Place<'_>| {
                let number = place.column / group;
                if place.column.is_multiple_of(group) && !whole {
                    // The weights have moved since the scales were taken.
                    row.scales[number] = grid.scale(&place.rest[..group]);
                }
                let code = grid.code(place.rest[0], row.scales[number]);
                row.codes[place.column] = code;
                grid.value(code, row.scales[number])
            };
            solve(cpu, weights, &factor, &mut rows, block_of(if whole { 1 } else { group }), |_, _| (), round);
        }
    }
    let scales = rows.iter().flat_map(|row| row.scales.iter().copied()).collect();
    Ok(PackedMatrix { codes: rows.into_iter().flat_map(|row| row.codes).collect(), scales })
}
