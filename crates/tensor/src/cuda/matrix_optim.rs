//! Muon and Adafactor: steps that look at a matrix as a whole. Nothing waits for the device; what a
//! step is scaled by stays there.

use super::launch::{Arg, args};
use super::linear::{operands, plain};
use super::optim::copy_of;
use super::{Cuda, PRODUCT_WORKSPACE, SQUARES_CHUNK, row_blocks};
use crate::cpu::muon::{A, B, C, LEAST_NORM, Muon};
use crate::cpu::optim::{Adafactor, StepSize};
use crate::error::Result;
use crate::ops::optim::OptimizerOperands;
use crate::{DType, Device, Purpose, Tensor};
use std::sync::Arc;
use trainyard_cuda::driver::{Operands, Product};
use trainyard_cuda::kernels as k;

fn floats(device: &Device, count: usize) -> Result<Tensor> {
    device.empty([count], DType::F32, Purpose::Workspace)
}

/// Sums in f64, one for each [`SQUARES_CHUNK`] of `n` elements.
fn chunk_sums(device: &Device, n: usize) -> Result<Tensor> {
    floats(device, 2 * n.div_ceil(SQUARES_CHUNK))
}

/// The scratch of a step of Muon.
pub(crate) struct MuonScratch {
    /// The matrix and what it becomes.
    matrices: [Tensor; 2],
    /// Its Gram matrix on the shorter side, and the polynomial of it.
    grams: [Tensor; 2],
    sums: Tensor,
    total: Tensor,
    workspace: Tensor,
}

impl MuonScratch {
    /// For a matrix, iterated in `dtype`.
    pub fn new(device: &Device, [rows, columns]: [usize; 2], dtype: DType) -> Result<MuonScratch> {
        let empty = |elements: usize| device.empty([elements], dtype, Purpose::Workspace);
        let (n, square) = (rows * columns, rows.min(columns).pow(2));
        Ok(MuonScratch {
            matrices: [empty(n)?, empty(n)?],
            grams: [empty(square)?, empty(square)?],
            sums: chunk_sums(device, n)?,
            total: floats(device, 2)?,
            workspace: floats(device, PRODUCT_WORKSPACE / 4)?,
        })
    }
}

pub(crate) fn muon(
    gpu: &Arc<Cuda>,
    hyper: Muon,
    [rows, columns]: [usize; 2],
    update: &OptimizerOperands<'_>,
    momentum: &Tensor,
    scratch: &MuonScratch,
) -> Result<()> {
    let [x, _] = &scratch.matrices;
    let (n, dtype) = (rows * columns, x.dtype());
    let nesterov = i32::from(hyper.nesterov);
    let args = args![update.gradient, momentum, x, n, update.gradient_scale, hyper.momentum, nesterov];
    gpu.launch(&k::MUON_AVERAGE, dtype, [n, 1, 1], args)?;
    squares(gpu, x, &scratch.sums, Arg::Part(&scratch.total, 0, 8))?;
    let args = args![x, Arg::Part(&scratch.total, 0, 8), n, LEAST_NORM as f32];
    gpu.launch(&k::MUON_NORMALISE, dtype, [n, 1, 1], args)?;
    let orthogonal = orthogonalise(gpu, [rows, columns], hyper.iterations, scratch)?;
    let step = hyper.lr * hyper.scale.factor(rows, columns);
    let keep = 1.0 - hyper.lr * hyper.weight_decay;
    gpu.launch(&k::MUON_APPLY, dtype, [n, 1, 1], args![orthogonal, &*update.master, n, keep, step])?;
    match update.copy.as_deref() {
        Some(copy) => super::cast(gpu, update.master, copy),
        None => Ok(()),
    }
}

/// Newton-Schulz on the first of the matrices, as `cpu::muon` has it; gives the one that has the
/// result.
fn orthogonalise<'a>(
    gpu: &Cuda,
    [rows, columns]: [usize; 2],
    iterations: u32,
    scratch: &'a MuonScratch,
) -> Result<&'a Tensor> {
    let MuonScratch { matrices: [x, next], grams: [gram, polynomial], workspace, .. } = scratch;
    let (wide, short) = (rows <= columns, rows.min(columns));
    let form = |dims| plain("muon", dims, x.dtype(), x.dtype());
    let outer = Product { a_transposed: !wide, b_transposed: wide, ..form([short, short, rows.max(columns)])? };
    let squared = Product { adds: true, ..form([short; 3])? };
    let multiplied = Product { adds: true, ..form([rows, columns, short])? };
    let of = |a: &Tensor, b: &Tensor, d: &Tensor| operands(a.region(false), b.region(false), d.region(true), workspace);
    let (mut x, mut next) = (x, next);
    for _ in 0..iterations {
        gpu.product(&outer, &of(x, x, gram))?;
        // b A + c A A, A being symmetric.
        let sum = Operands { c: gram.region(false), adding: B, scale: C, ..of(gram, gram, polynomial) };
        gpu.product(&squared, &sum)?;
        let (left, right) = if wide { (polynomial, x) } else { (x, polynomial) };
        gpu.product(&multiplied, &Operands { c: x.region(false), adding: A, ..of(left, right, next) })?;
        std::mem::swap(&mut x, &mut next);
    }
    Ok(x)
}

/// The sum of the squares of `x`, f64; `sums` as [`chunk_sums`].
fn squares(gpu: &Arc<Cuda>, x: &Tensor, sums: &Tensor, total: Arg<'_>) -> Result<()> {
    let n = x.elements();
    gpu.launch(&k::CHUNK_SQUARES, x.dtype(), [n, SQUARES_CHUNK, 1], args![x, sums, n, SQUARES_CHUNK])?;
    gpu.launch(&k::SUM_F64, DType::F32, [1, 1, 1], args![sums, total, n.div_ceil(SQUARES_CHUNK)])
}

/// The scratch of the length of an Adafactor step.
pub(crate) struct Lengths {
    /// Of updates, f64.
    squares: Tensor,
    /// Of weights, f64.
    weights: Tensor,
    /// The sum of the latter, f64; the mean of the row moments; the length.
    numbers: Tensor,
}

impl Lengths {
    /// For `n` weights, whose squared updates are summed into `count` sums.
    fn new(device: &Device, n: usize, count: usize) -> Result<Lengths> {
        let (squares, weights) = (floats(device, 2 * count)?, chunk_sums(device, n)?);
        Ok(Lengths { squares, weights, numbers: floats(device, 4)? })
    }

    /// For what is no matrix.
    pub fn of_vector(device: &Device, n: usize) -> Result<Lengths> {
        Lengths::new(device, n, n.div_ceil(SQUARES_CHUNK))
    }

    fn row_mean(&self) -> Arg<'_> {
        Arg::Part(&self.numbers, 8, 4)
    }

    fn length(&self) -> Arg<'_> {
        Arg::Part(&self.numbers, 12, 4)
    }

    /// The length of a step from `count` sums of squared updates.
    fn measure(&self, gpu: &Arc<Cuda>, hyper: Adafactor, step: u64, weights: &Tensor, count: usize) -> Result<()> {
        let total = Arg::Part(&self.numbers, 0, 8);
        let (relative, lr) = match hyper.step_size {
            StepSize::Relative => (1i32, hyper.rate(step) as f32),
            StepSize::Absolute => (0, hyper.lr),
        };
        if relative == 1 {
            squares(gpu, weights, &self.weights, total)?;
        }
        let (n, clip) = (weights.elements(), hyper.clip_threshold);
        let args = args![&self.squares, count, total, n, self.length(), clip, lr, hyper.eps2, relative];
        gpu.launch(&k::ADAFACTOR_LENGTH, DType::F32, [1, 1, 1], args)
    }
}

/// The scratch of an Adafactor step of a matrix.
pub(crate) struct Factored {
    partials: Tensor,
    sums: Tensor,
    /// Inverse roots of the column moments.
    inverse: Tensor,
    lengths: Lengths,
}

impl Factored {
    /// For a matrix.
    pub fn new(device: &Device, rows: usize, columns: usize) -> Result<Factored> {
        Ok(Factored {
            partials: floats(device, row_blocks(rows) * columns)?,
            sums: floats(device, columns)?,
            inverse: floats(device, columns)?,
            lengths: Lengths::new(device, rows * columns, rows)?,
        })
    }
}

pub(crate) fn adafactor_matrix(
    gpu: &Arc<Cuda>,
    hyper: Adafactor,
    step: u64,
    update: &OptimizerOperands<'_>,
    [row_moment, column_moment]: [&Tensor; 2],
    scratch: &Factored,
) -> Result<()> {
    let (rows, columns) = (row_moment.elements(), column_moment.elements());
    if rows * columns == 0 {
        return Ok(());
    }
    let Factored { partials, sums, inverse, lengths } = scratch;
    let ((dtype, copy), g, scale) = (copy_of(update), update.gradient, update.gradient_scale);
    let (eps, beta2) = (hyper.eps1, hyper.beta2(step));
    let each_row = [rows, columns, 1];
    gpu.launch(&k::ADAFACTOR_ROWS, dtype, each_row, args![g, row_moment, rows, columns, scale, eps, beta2])?;
    let args = args![g, partials, rows, columns, scale, eps];
    gpu.launch(&k::ADAFACTOR_COLUMN_SUMS, dtype, [1, rows, columns], args)?;
    let args = args![partials, sums, row_blocks(rows), columns, 1usize, 1.0f32, 0i32];
    gpu.launch(&k::SUM_PARTIALS, DType::F32, [columns, 1, 1], args)?;
    let args = args![sums, column_moment, inverse, rows, columns, beta2];
    gpu.launch(&k::ADAFACTOR_COLUMNS, dtype, [columns, 1, 1], args)?;
    gpu.launch(&k::ADAFACTOR_ROW_MEAN, dtype, [1, 1, 1], args![row_moment, lengths.row_mean(), rows])?;
    let args = args![g, row_moment, lengths.row_mean(), inverse, &lengths.squares, rows, columns, scale];
    gpu.launch(&k::ADAFACTOR_SQUARES, dtype, each_row, args)?;
    lengths.measure(gpu, hyper, step, update.master, rows)?;
    let (mean, length, p, keep) = (lengths.row_mean(), lengths.length(), &*update.master, hyper.keep());
    let args = args![g, row_moment, mean, inverse, length, p, copy, rows, columns, scale, keep];
    gpu.launch(&k::ADAFACTOR_APPLY, dtype, [rows * columns, 1, 1], args)
}

pub(crate) fn adafactor_vector(
    gpu: &Arc<Cuda>,
    hyper: Adafactor,
    step: u64,
    update: &OptimizerOperands<'_>,
    moment: &Tensor,
    lengths: &Lengths,
) -> Result<()> {
    let n = moment.elements();
    if n == 0 {
        return Ok(());
    }
    let ((dtype, copy), g, scale) = (copy_of(update), update.gradient, update.gradient_scale);
    let args = args![g, moment, &lengths.squares, n, SQUARES_CHUNK, scale, hyper.eps1, hyper.beta2(step)];
    gpu.launch(&k::ADAFACTOR_VECTOR_MOMENT, dtype, [n, SQUARES_CHUNK, 1], args)?;
    lengths.measure(gpu, hyper, step, update.master, n.div_ceil(SQUARES_CHUNK))?;
    let args = args![g, moment, lengths.length(), &*update.master, copy, n, scale, hyper.keep()];
    gpu.launch(&k::ADAFACTOR_VECTOR_APPLY, dtype, [n, 1, 1], args)
}
