//! Weights to zero: by magnitude, by Wanda (Sun et al. 2023), by SparseGPT (Frantar & Alistarh
//! 2023).
//!
//! A method scores weights and zeroes those with the lowest scores. Magnitude scores |w| and
//! compares all weights of a matrix. Wanda scores |w| times the norm of the weight's inputs and
//! compares the weights of a row. SparseGPT scores w² / R_jj², compares all rows of a block of
//! 128 columns, and moves the other weights so that outputs change least. With a pattern N:M, all
//! methods compare M neighbours of a row and keep N.

use crate::Result;
use crate::error::refuse;
use crate::factor::inverse_factor;
use crate::inputs::{Inputs, Needs};
use crate::solver::{Place, block_of, solve};
use trainyard_tensor::cpu::Cpu;
pub use trainyard_tensor::sparsity::Pattern;

/// A choice of weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PruneMethod {
    /// The smallest.
    Magnitude,
    /// The smallest, times the norm of their inputs.
    Wanda,
    /// Those whose loss changes the outputs least after the others have moved.
    SparseGpt,
}

impl PruneMethod {
    /// The statistics of inputs that it looks at.
    pub fn needs(self) -> Needs {
        match self {
            PruneMethod::Magnitude => Needs::Nothing,
            PruneMethod::Wanda => Needs::Norms,
            PruneMethod::SparseGpt => Needs::Products,
        }
    }
}

/// Checks that rows of `columns` weights divide into the groups of neighbours of a pattern.
///
/// # Errors
/// They do not.
pub fn divides(pattern: Pattern, layer: &str, columns: usize) -> Result<()> {
    match pattern {
        Pattern::Neighbours { of, .. } if !columns.is_multiple_of(of) => refuse(format!(
            "{layer} has rows of {columns} weights, which do not divide into groups of {of}: take another --pattern"
        )),
        _ => Ok(()),
    }
}

/// Marks the `count` lowest scores; of equal ones the first.
fn lowest(scores: &[f32], count: usize) -> Vec<bool> {
    let mut marks = vec![false; scores.len()];
    let mut order: Vec<usize> = (0..scores.len()).collect();
    if count > 0 && count < scores.len() {
        order.select_nth_unstable_by(count - 1, |a, b| scores[*a].total_cmp(&scores[*b]).then(a.cmp(b)));
    }
    order.iter().take(count).for_each(|place| marks[*place] = true);
    marks
}

/// Zeroes weights of one matrix [n, k], which is called `layer`.
///
/// # Errors
/// A pattern that does not divide rows; inputs that SparseGPT cannot work with.
pub fn prune(
    cpu: &Cpu,
    layer: &str,
    weights: &mut [f32],
    inputs: &Inputs,
    method: PruneMethod,
    pattern: Pattern,
) -> Result<()> {
    let columns = inputs.columns();
    divides(pattern, layer, columns)?;
    match method {
        PruneMethod::Magnitude => {
            let scores: Vec<f32> = weights.iter().map(|w| w.abs()).collect();
            let compared = match pattern {
                Pattern::Share(_) => weights.len(),
                Pattern::Neighbours { of, .. } => of,
            };
            zero(weights, &scores, compared, pattern);
        }
        PruneMethod::Wanda => {
            let norms = inputs.norms();
            let of_row = |row: &[f32]| -> Vec<f32> {
                row.iter().zip(&norms).map(|(w, norm)| (f64::from(w.abs()) * norm) as f32).collect()
            };
            let scores: Vec<f32> = weights.chunks_exact(columns).flat_map(of_row).collect();
            let compared = match pattern {
                Pattern::Share(_) => columns,
                Pattern::Neighbours { of, .. } => of,
            };
            zero(weights, &scores, compared, pattern);
        }
        PruneMethod::SparseGpt => {
            let factor = inverse_factor(layer, inputs.products(), columns, cpu.threads.count())?;
            sparse_gpt(cpu, weights, &factor, columns, pattern);
        }
    }
    Ok(())
}

/// Zeroes the lowest scores of each `compared` neighbours.
fn zero(weights: &mut [f32], scores: &[f32], compared: usize, pattern: Pattern) {
    for (weights, scores) in weights.chunks_mut(compared).zip(scores.chunks(compared)) {
        let marks = lowest(scores, pattern.zeros(compared));
        weights.iter_mut().zip(marks).filter(|(_, mark)| *mark).for_each(|(w, _)| *w = 0.0);
    }
}

/// The marked neighbours of the group that a row is in.
#[derive(Clone, Default)]
struct Marked(u64);

fn sparse_gpt(cpu: &Cpu, weights: &mut [f32], factor: &[f32], columns: usize, pattern: Pattern) {
    let score = |weight: f32, column: usize| {
        let root = weight / factor[column * columns + column];
        root * root
    };
    let mut rows = vec![Marked::default(); weights.len() / columns];
    match pattern {
        Pattern::Share(_) => {
            let prepare = |block: std::ops::Range<usize>, weights: &[f32]| {
                let of_row =
                    |row: &[f32]| -> Vec<f32> { block.clone().map(|column| score(row[column], column)).collect() };
                let scores: Vec<f32> = weights.chunks_exact(columns).flat_map(of_row).collect();
                (block.len(), lowest(&scores, pattern.zeros(scores.len())))
            };
            let round = |(width, marks): &(usize, Vec<bool>), _: &mut Marked, place: Place<'_>| {
                if marks[place.row * width + place.in_block] { 0.0 } else { place.rest[0] }
            };
            solve(cpu, weights, factor, &mut rows, block_of(1), prepare, round);
        }
        Pattern::Neighbours { of, .. } => {
            let round = |_: &(), marked: &mut Marked, place: Place<'_>| {
                let inside = place.column % of;
                if inside == 0 {
                    let scores: Vec<f32> =
                        place.rest[..of].iter().enumerate().map(|(i, w)| score(*w, place.column + i)).collect();
                    let marks = lowest(&scores, pattern.zeros(of));
                    marked.0 = marks.iter().enumerate().map(|(i, mark)| u64::from(*mark) << i).sum();
                }
                if marked.0 >> inside & 1 == 1 { 0.0 } else { place.rest[0] }
            };
            solve(cpu, weights, factor, &mut rows, block_of(of), |_, _| (), round);
        }
    }
}
