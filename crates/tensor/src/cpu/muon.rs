//! Muon (Jordan et al. 2024): momentum whose singular values are all pushed towards one.
//!
//! The update of a weight matrix is its averaged gradient, made nearly orthogonal by five
//! Newton-Schulz steps `X <- a X + (b A + c A²) X`, `A = X Xᵀ`, with coefficients chosen to lift
//! small singular values fast rather than to converge. The Gram matrix is taken on the shorter
//! side, so that `A` is small; no matrix is transposed in memory. `A` and `A²` are symmetric, and
//! half of each is computed: five steps of a matrix `[r, c]`, `r <= c`, take `5 (3 r² c + r³)`
//! FLOPs instead of `5 (4 r² c + 2 r³)`, in the dtype of the workspace: `bf16` is what the authors
//! use, `f32` is exact enough for tests.
//!
//! The norm that the iteration starts from divides nothing: it enters the first products as a
//! factor, so it costs no rounding.
//!
//! A product of a few hundred rows is too short for several threads: they pack the same operands
//! and wait for each other 15 times a matrix. So the matrices of a pass are dealt to the threads
//! whole where that balances, the largest first; else each is on all threads, one after the other.
//! Both have the same bits.

use crate::cpu::Cpu;
use crate::cpu::gemm::{MatMut, MatRef, Transpose, gram, matmul};
use crate::cpu::reduce::sum_of_squares;
use crate::cpu::rows::{for_elements, load_at, store_at};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

/// The quintic's coefficients.
pub(crate) const A: f32 = 3.4445;
pub(crate) const B: f32 = -4.775;
pub(crate) const C: f32 = 2.0315;
/// Norms below this are taken for it.
pub(crate) const LEAST_NORM: f64 = 1e-7;

/// Muon's settings for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the averaged gradient.
    pub momentum: f32,
    /// True if the step looks ahead: `(1 - momentum) g + momentum m` instead of `m`.
    pub nesterov: bool,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Scale of the orthogonal update.
    pub scale: MuonScale,
    /// Newton-Schulz steps (5).
    pub iterations: u32,
}

/// The scale of the orthogonal update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MuonScale {
    /// `sqrt(max(1, rows / columns))`, the original.
    Original,
    /// `0.2 sqrt(max(rows, columns))`: the root mean square of an AdamW update, so that its
    /// learning rates carry over (Liu et al. 2025).
    MatchRmsAdamW,
}

impl MuonScale {
    pub(crate) fn factor(self, rows: usize, columns: usize) -> f32 {
        match self {
            MuonScale::Original => (rows as f32 / columns as f32).max(1.0).sqrt(),
            MuonScale::MatchRmsAdamW => 0.2 * (rows.max(columns) as f32).sqrt(),
        }
    }
}

/// Elements of workspace for a matrix `[rows, columns]`.
pub fn workspace(rows: usize, columns: usize) -> usize {
    2 * rows * columns + 2 * rows.min(columns).pow(2)
}

/// FLOPs of `iterations` Newton-Schulz steps of a matrix `[rows, columns]`.
pub fn flops([rows, columns]: [usize; 2], iterations: u32) -> u64 {
    let (short, long) = (rows.min(columns) as u64, rows.max(columns) as u64);
    u64::from(iterations) * (3 * short * short * long + short.pow(3))
}

/// A weight matrix and its step.
pub struct Matrix<'a, T, W> {
    /// Settings of the step.
    pub hyper: Muon,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Multiplies the gradient as it is read.
    pub gradient_scale: f32,
    /// Updated.
    pub params: &'a mut [f32],
    /// Read.
    pub gradients: &'a [f32],
    /// Updated.
    pub momentum: &'a mut [f32],
    /// Receives the new weights.
    pub copy: Option<&'a mut [T]>,
    /// At least [`workspace()`] elements, in the dtype of the iteration.
    pub workspace: &'a mut [W],
}

/// Matrices are dealt whole if the last thread then ends at most this many times later than with
/// all threads equally busy. An estimate.
const WAIT_MAX: f64 = 1.25;

/// One step for each of `matrices`.
///
/// # Panics
/// When the lengths disagree.
pub fn muon<W: Element, T: Element>(cpu: &Cpu, matrices: &mut [Matrix<'_, T, W>]) {
    let flops = |matrix: &Matrix<'_, T, W>| flops(matrix.shape, matrix.hyper.iterations);
    matrices.sort_by_key(|matrix| std::cmp::Reverse(flops(matrix)));
    let lengths: Vec<u64> = matrices.iter().map(flops).collect();
    if whole(&lengths, cpu.threads.hands()) {
        let (count, shares) = (matrices.len(), Shares::new(matrices));
        // SAFETY: each task has a matrix of its own.
        cpu.threads.for_each(count, |index| step(cpu, unsafe { &mut shares.part(index..index + 1)[0] }));
    } else {
        matrices.iter_mut().for_each(|matrix| step(cpu, matrix));
    }
}

/// True if tasks of these lengths, longest first, are dealt whole to so many threads.
fn whole(lengths: &[u64], threads: usize) -> bool {
    let mut busy = vec![0; threads];
    for length in lengths {
        *busy.iter_mut().min().expect("there is a thread") += length;
    }
    let last = busy.iter().max().expect("there is a thread");
    *last as f64 * threads as f64 <= WAIT_MAX * lengths.iter().sum::<u64>() as f64
}

fn step<W: Element, T: Element>(cpu: &Cpu, matrix: &mut Matrix<'_, T, W>) {
    let Matrix { hyper, shape: [rows, columns], gradient_scale, .. } = *matrix;
    let Matrix { params, gradients, momentum, copy, workspace, .. } = matrix;
    let (gradients, copy) = (*gradients, copy.as_deref_mut());
    let len = rows * columns;
    assert_eq!((params.len(), gradients.len(), momentum.len()), (len, len, len), "a matrix of {rows} x {columns}");
    assert_eq!(copy.as_ref().map_or(len, |copy| copy.len()), len, "length of the compute copy");
    let (x, rest) = workspace.split_at_mut(len);
    {
        let (x, momentum) = (Shares::new(&mut *x), Shares::new(momentum));
        for_elements(cpu, len, 12 + size_of::<W>(), |range| {
            // SAFETY: the ranges of a region do not overlap.
            let (x, momentum) = unsafe { (x.part(range.clone()), momentum.part(range.clone())) };
            average(cpu.isa, hyper, gradient_scale, &gradients[range], momentum, x);
        });
    }
    let update = orthogonalise(cpu, [rows, columns], hyper.iterations, x, rest);
    let step = hyper.lr * hyper.scale.factor(rows, columns) * update.factor;
    let (params, copy) = (Shares::new(params), copy.map(Shares::new));
    for_elements(cpu, len, 8 + size_of::<W>() + size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let params = unsafe { params.part(range.clone()) };
        // SAFETY: as above.
        let copy = copy.as_ref().map(|copy| unsafe { copy.part(range.clone()) });
        apply(cpu.isa, 1.0 - hyper.lr * hyper.weight_decay, step, &update.matrix[range], params, copy);
    });
}

simd_fn! {
    fn average[W: Element](s: S, hyper: Muon, gradient_scale: f32, gradients: &[f32], momentum: &mut [f32], x: &mut [W]) {
        let (keep, scale) = (s.splat(hyper.momentum), s.splat(gradient_scale));
        let rest = s.splat(1.0 - hyper.momentum);
        let mut i = 0;
        while i < x.len() {
            let g = s.mul(s.mul(load_at(s, gradients, i, 0.0), scale), rest);
            let m = s.fma(load_at(s, momentum, i, 0.0), keep, g);
            store_at(s, m, momentum, i);
            store_at(s, if hyper.nesterov { s.fma(m, keep, g) } else { m }, x, i);
            i += S::LANES;
        }
    }
}

simd_fn! {
    fn apply[W: Element, T: Element](s: S, keep: f32, step: f32, update: &[W], params: &mut [f32], copy: Option<&mut [T]>) {
        let mut copy = copy;
        let (keep, step) = (s.splat(keep), s.splat(-step));
        let mut i = 0;
        while i < params.len() {
            let p = s.fma(load_at(s, update, i, 0.0), step, s.mul(load_at(s, params, i, 0.0), keep));
            store_at(s, p, params, i);
            if let Some(copy) = copy.as_deref_mut() {
                store_at(s, p, copy, i);
            }
            i += S::LANES;
        }
    }
}

/// A matrix that is to be read times a factor.
struct Scaled<'a, W> {
    matrix: &'a [W],
    factor: f32,
}

/// Newton-Schulz on `x`; the result lies in `x` or in `rest`.
fn orthogonalise<'a, W: Element>(
    cpu: &Cpu,
    [rows, columns]: [usize; 2],
    iterations: u32,
    x: &'a mut [W],
    rest: &'a mut [W],
) -> Scaled<'a, W> {
    let (wide, short) = (rows <= columns, rows.min(columns));
    let (next, rest) = rest.split_at_mut(rows * columns);
    let (outer, rest) = rest.split_at_mut(short * short);
    let polynomial = &mut rest[..short * short];
    let mut factor = (1.0 / sum_of_squares(cpu, x).sqrt().max(LEAST_NORM)) as f32;
    let (mut x, mut next) = (x, next);
    for _ in 0..iterations {
        let matrix = MatRef::new(&*x, rows, columns);
        gram(cpu, matrix, if wide { Transpose::No } else { Transpose::Yes }, factor * factor, 0.0, outer);
        // b A + c A A.
        polynomial.copy_from_slice(outer);
        let square = MatRef::new(&*outer, short, short);
        gram(cpu, square, Transpose::No, C, B, polynomial);
        next.copy_from_slice(x);
        let polynomial = MatRef::new(&*polynomial, short, short);
        let (left, right) = if wide { (polynomial, matrix) } else { (matrix, polynomial) };
        let out = MatMut::new(&mut *next, rows, columns);
        matmul(cpu, left, Transpose::No, right, Transpose::No, factor, factor * A, out);
        std::mem::swap(&mut x, &mut next);
        factor = 1.0;
    }
    Scaled { matrix: x, factor }
}
