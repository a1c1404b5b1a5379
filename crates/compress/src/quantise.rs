//! Weights of few bits: rounded to nearest, as they are or scaled before ([`crate::awq`],
//! [`crate::smooth`]), or by GPTQ (Frantar et al. 2023).
//!
//! A weight becomes `code x scale`: see [`trainyard_tensor::grid`].

use crate::Result;
use crate::factor::inverse_factor;
use crate::inputs::{Inputs, Needs};
use crate::solver::{Place, block_of, solve};
use trainyard_model::weights::{PackedFormat, PackedMatrix};
use trainyard_tensor::DType;
use trainyard_tensor::cpu::Cpu;
use trainyard_tensor::grid::Grid;

/// A choice of codes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuantiseMethod {
    /// The nearest.
    Nearest,
    /// The nearest to weights that have moved to make up for the rounding of earlier columns.
    Gptq,
    /// The nearest to weights whose columns were scaled before, by the size of their inputs.
    Awq,
    /// The nearest to weights whose columns were scaled before, so that inputs lose less in
    /// rounding.
    SmoothQuant,
}

impl QuantiseMethod {
    /// The statistics of inputs that it looks at.
    pub fn needs(self) -> Needs {
        match self {
            QuantiseMethod::Nearest => Needs::Nothing,
            QuantiseMethod::Gptq | QuantiseMethod::Awq => Needs::Products,
            QuantiseMethod::SmoothQuant => Needs::Largest,
        }
    }
}

/// The values that weights may have, and the number of neighbours that share a scale.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupedGrid {
    /// Bits, and neighbours that share a scale.
    pub format: PackedFormat,
    /// The dtype of scales and of values.
    pub dtype: DType,
}

/// The codes of one row.
struct Row {
    codes: Vec<i8>,
    scales: Vec<f32>,
}

/// Rounds rows of a matrix.
fn round_to_nearest(rows: &mut [Row], weights: &mut [f32], columns: usize, group: usize, grid: Grid) {
    for (row, weights) in rows.iter_mut().zip(weights.chunks_exact_mut(columns)) {
        for (column, weight) in weights.iter_mut().enumerate() {
            let scale = row.scales[column / group];
            row.codes[column] = grid.code(*weight, scale);
            *weight = grid.value(row.codes[column], scale);
        }
    }
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
    GroupedGrid { format, dtype }: GroupedGrid,
) -> Result<PackedMatrix> {
    let columns = inputs.columns();
    let (grid, group) = (Grid { bits: format.bits, dtype }, format.group_in(columns));
    let mut rows: Vec<Row> = weights
        .chunks_exact(columns)
        .map(|row| Row { codes: vec![0; columns], scales: row.chunks(group).map(|group| grid.scale(group)).collect() })
        .collect();
    match method {
        QuantiseMethod::Nearest | QuantiseMethod::Awq | QuantiseMethod::SmoothQuant => {
            let each = rows.len().div_ceil(cpu.threads.count().max(1)).max(1);
            std::thread::scope(|scope| {
                for (rows, weights) in rows.chunks_mut(each).zip(weights.chunks_mut(each * columns)) {
                    scope.spawn(move || round_to_nearest(rows, weights, columns, group, grid));
                }
            });
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
