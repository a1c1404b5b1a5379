//! Muon (Jordan et al. 2024): momentum whose singular values are all pushed towards one.
//!
//! The update of a weight matrix is its averaged gradient, made nearly orthogonal by five
//! Newton-Schulz steps `X <- a X + (b A + c A²) X`, `A = X Xᵀ`, with coefficients chosen to lift
//! small singular values fast rather than to converge. The Gram matrix is taken on the shorter
//! side, so that `A` is small; no matrix is transposed in memory. Five steps of a matrix `[r, c]`,
//! `r <= c`, take `5 (4 r² c + 2 r³)` FLOPs, in the dtype of the workspace: `bf16` is what the
//! authors use, `f32` is exact enough for tests.
//!
//! The norm that the iteration starts from divides nothing: it enters the first products as a
//! factor, so it costs no rounding.

use crate::cpu::Cpu;
use crate::cpu::gemm::{MatMut, MatRef, Transpose, matmul};
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

/// One step for a weight matrix `[rows, columns]`; `W` is the dtype of the iteration, `workspace`
/// needs [`workspace()`] elements.
///
/// # Panics
/// When the lengths disagree.
pub fn muon<W: Element, T: Element>(
    cpu: &Cpu,
    hyper: Muon,
    [rows, columns]: [usize; 2],
    gradient_scale: f32,
    params: &mut [f32],
    gradients: &[f32],
    momentum: &mut [f32],
    copy: Option<&mut [T]>,
    workspace: &mut [W],
) {
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
    let short = rows.min(columns);
    let (next, rest) = rest.split_at_mut(rows * columns);
    let (gram, rest) = rest.split_at_mut(short * short);
    let polynomial = &mut rest[..short * short];
    let mut factor = (1.0 / sum_of_squares(cpu, x).sqrt().max(LEAST_NORM)) as f32;
    let (mut x, mut next) = (x, next);
    for _ in 0..iterations {
        let wide = rows <= columns;
        let (left, right) = if wide { (Transpose::No, Transpose::Yes) } else { (Transpose::Yes, Transpose::No) };
        let matrix = MatRef::new(&*x, rows, columns);
        matmul(cpu, matrix, left, matrix, right, factor * factor, 0.0, MatMut::new(&mut *gram, short, short));
        // b A + c A A, A being symmetric.
        polynomial.copy_from_slice(gram);
        let square = MatRef::new(&*gram, short, short);
        matmul(cpu, square, Transpose::No, square, Transpose::No, C, B, MatMut::new(&mut *polynomial, short, short));
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
