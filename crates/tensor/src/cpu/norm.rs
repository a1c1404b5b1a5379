//! Layer norm (Ba et al. 2016) and root-mean-square norm (Zhang & Sennrich 2019), forward and
//! backward.
//!
//! Rows are normalised one by one with statistics in `f32`; what backward needs of a row is one or
//! two numbers. A row is read from memory once and again from the first-level cache. Forward moves
//! `2 rows dim` elements and does about `4 rows dim` (RMS) or `7 rows dim` (layer norm) FLOPs;
//! backward moves three to four times `rows dim` elements.
//!
//! Weight gradients are sums over rows. They are made in row blocks whose size depends on the
//! number of rows alone and added up in the order of the blocks, so the bits do not depend on the
//! number of threads. The blocks lie in a workspace of the caller, of [`backward_workspace`]
//! numbers.
//!
//! In-place forward is not offered: backward needs the input.

use crate::cpu::Cpu;
use crate::cpu::rows::{
    block_rows, blocks, for_rows, for_tasks, load_at, store_at, sum, sum_blocks, sum_of_squares_about, total,
};
use crate::cpu::simd::Simd;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

/// The summand to which a backward kernel adds its input gradient.
#[derive(Clone, Copy, Debug)]
pub enum AddTo<'a, T> {
    /// Nothing: the output is written.
    Nothing,
    /// This gradient, typically of the residual branch; same shape as the output.
    Gradient(&'a [T]),
    /// The previous contents of the output.
    Output,
}

/// Where the heads lie in a matrix that holds several projections side by side.
///
/// Row `t` of head `h` is `[t * row_stride + first + h * head_dim ..][.. head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadColumns {
    /// Columns of the whole matrix.
    pub row_stride: usize,
    /// The column at which head 0 starts.
    pub first: usize,
    /// Heads, side by side.
    pub heads: usize,
    /// Columns of one head.
    pub head_dim: usize,
}

impl HeadColumns {
    /// The rows of a matrix of `len` elements, after checking that the heads fit into them.
    pub(crate) fn rows(&self, len: usize) -> usize {
        let end = self.first + self.heads * self.head_dim;
        assert!(end <= self.row_stride, "heads end at column {end} of {}", self.row_stride);
        assert!(
            self.row_stride > 0 && len.is_multiple_of(self.row_stride),
            "{len} elements in rows of {}",
            self.row_stride
        );
        len / self.row_stride
    }
}

/// `f32` numbers of workspace that a backward needs for each of the gradients (weight; bias) that
/// it sums over rows.
pub fn backward_workspace(rows: usize, dim: usize) -> usize {
    blocks(rows) * dim
}

fn rows_of(len: usize, dim: usize) -> usize {
    assert!(dim > 0 && len.is_multiple_of(dim), "{len} elements are no rows of {dim}");
    len / dim
}

/// `y = x / rms(x) * weight`, `rms(x) = sqrt(mean(x^2) + eps)`, for rows of `weight.len()`; saves
/// `inv_rms`, one a row.
///
/// # Panics
/// When the lengths disagree.
pub fn rms_norm<T: Element>(cpu: &Cpu, x: &[T], weight: &[T], eps: f32, y: &mut [T], inv_rms: &mut [f32]) {
    add_rms_norm_any(cpu, x, None, weight, eps, y, inv_rms);
}

/// `sum = x + residual`, then [`rms_norm`] of `sum` as stored: one pass instead of two.
pub fn add_rms_norm<T: Element>(
    cpu: &Cpu,
    x: &[T],
    residual: &[T],
    weight: &[T],
    eps: f32,
    sum: &mut [T],
    y: &mut [T],
    inv_rms: &mut [f32],
) {
    add_rms_norm_any(cpu, x, Some((residual, sum)), weight, eps, y, inv_rms);
}

fn add_rms_norm_any<T: Element>(
    cpu: &Cpu,
    x: &[T],
    add: Option<(&[T], &mut [T])>,
    weight: &[T],
    eps: f32,
    y: &mut [T],
    inv_rms: &mut [f32],
) {
    let dim = weight.len();
    let rows = rows_of(x.len(), dim);
    assert_eq!((y.len(), inv_rms.len()), (x.len(), rows), "lengths of y and inv_rms");
    let add = add.map(|(residual, sum)| {
        assert_eq!((residual.len(), sum.len()), (x.len(), x.len()), "lengths of residual and sum");
        (residual, Shares::new(sum))
    });
    let (y, inv_rms) = (Shares::new(y), Shares::new(inv_rms));
    let passes = if add.is_some() { 4 } else { 2 };
    for_rows(cpu, rows, passes * dim * size_of::<T>(), |range| {
        let span = range.start * dim..range.end * dim;
        // SAFETY: the ranges of a region do not overlap.
        let (y, inv_rms) = unsafe { (y.part(span.clone()), inv_rms.part(range)) };
        // SAFETY: as above.
        let add = add.as_ref().map(|(residual, sum)| (&residual[span.clone()], unsafe { sum.part(span.clone()) }));
        rms_rows(cpu.isa, &x[span], add, weight, eps, y, inv_rms);
    });
}

#[inline(always)]
fn add_row<S: Simd, T: Element>(s: S, a: &[T], b: &[T], y: &mut [T]) {
    let mut i = 0;
    while i < y.len() {
        store_at(s, s.add(load_at(s, a, i, 0.0), load_at(s, b, i, 0.0)), y, i);
        i += S::LANES;
    }
}

#[inline(always)]
fn rms_row<S: Simd, T: Element>(s: S, x: &[T], weight: &[T], eps: f32, y: &mut [T]) -> f32 {
    let inv = 1.0 / (sum_of_squares_about(s, x, 0.0) / x.len() as f32 + eps).sqrt();
    let scale = s.splat(inv);
    let mut i = 0;
    while i < x.len() {
        let v = s.mul(s.mul(load_at(s, x, i, 0.0), scale), load_at(s, weight, i, 0.0));
        store_at(s, v, y, i);
        i += S::LANES;
    }
    inv
}

simd_fn! {
    fn rms_rows[T: Element](s: S, x: &[T], add: Option<(&[T], &mut [T])>, weight: &[T], eps: f32, y: &mut [T], inv_rms: &mut [f32]) {
        let dim = weight.len();
        match add {
            None => {
                for ((x, y), inv) in x.chunks_exact(dim).zip(y.chunks_exact_mut(dim)).zip(inv_rms) {
                    *inv = rms_row(s, x, weight, eps, y);
                }
            }
            Some((residual, sum)) => {
                let rows = x.chunks_exact(dim).zip(residual.chunks_exact(dim)).zip(sum.chunks_exact_mut(dim));
                for (((x, r), sum), (y, inv)) in rows.zip(y.chunks_exact_mut(dim).zip(inv_rms)) {
                    add_row(s, x, r, sum);
                    *inv = rms_row(s, sum, weight, eps, y);
                }
            }
        }
    }
}

/// [`rms_norm`] of every head of every row, all heads with the same `weight` (the query and key
/// norm of Qwen3).
///
/// `x` and `y` are whole matrices of the same layout; other columns of `y` are left alone.
/// `inv_rms` is `[rows, heads]`.
pub fn rms_norm_heads<T: Element>(
    cpu: &Cpu,
    columns: HeadColumns,
    x: &[T],
    weight: &[T],
    eps: f32,
    y: &mut [T],
    inv_rms: &mut [f32],
) {
    let rows = columns.rows(x.len());
    assert_eq!(y.len(), x.len(), "length of y");
    assert_eq!(
        (weight.len(), inv_rms.len()),
        (columns.head_dim, rows * columns.heads),
        "lengths of weight and inv_rms"
    );
    let (y, inv_rms) = (Shares::new(y), Shares::new(inv_rms));
    for_rows(cpu, rows, 2 * columns.heads * columns.head_dim * size_of::<T>(), |range| {
        let span = range.start * columns.row_stride..range.end * columns.row_stride;
        // SAFETY: the ranges of a region do not overlap.
        let (y, inv) =
            unsafe { (y.part(span.clone()), inv_rms.part(range.start * columns.heads..range.end * columns.heads)) };
        head_rows(cpu.isa, columns, &x[span], weight, eps, y, inv);
    });
}

simd_fn! {
    fn head_rows[T: Element](s: S, columns: HeadColumns, x: &[T], weight: &[T], eps: f32, y: &mut [T], inv_rms: &mut [f32]) {
        let dim = columns.head_dim;
        for (index, inv) in inv_rms.iter_mut().enumerate() {
            let at = index / columns.heads * columns.row_stride + columns.first + index % columns.heads * dim;
            *inv = rms_row(s, &x[at..at + dim], weight, eps, &mut y[at..at + dim]);
        }
    }
}

/// The backward of [`rms_norm`]: `dx = base + inv_rms (g - x^ mean(g x^))` with `x^ = x inv_rms`,
/// `g = dy weight`, and `dweight += sum over rows of dy x^`.
///
/// A frozen weight passes `None` for `dweight`. `workspace` needs [`backward_workspace`] numbers,
/// whatever they hold.
pub fn rms_norm_backward<T: Element>(
    cpu: &Cpu,
    dy: &[T],
    x: &[T],
    weight: &[T],
    inv_rms: &[f32],
    base: AddTo<'_, T>,
    dx: &mut [T],
    dweight: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let dim = weight.len();
    let rows = rows_of(x.len(), dim);
    assert_eq!((dy.len(), dx.len(), inv_rms.len()), (x.len(), x.len(), rows), "lengths of dy, dx and inv_rms");
    check_base(base, x.len());
    let dx = Shares::new(dx);
    let bytes = 3 * size_of_val(x);
    over_row_blocks(cpu, rows, dim, bytes, [dweight, None], workspace, |range, [dw, _]| {
        let span = range.start * dim..range.end * dim;
        // SAFETY: row blocks do not overlap.
        let dx = unsafe { dx.part(span.clone()) };
        rms_rows_backward(
            cpu.isa,
            &dy[span.clone()],
            &x[span.clone()],
            weight,
            &inv_rms[range],
            at(base, span),
            dx,
            dw,
        );
    });
}

fn check_base<T>(base: AddTo<'_, T>, len: usize) {
    if let AddTo::Gradient(gradient) = base {
        assert_eq!(gradient.len(), len, "length of the gradient to add to");
    }
}

fn at<T>(base: AddTo<'_, T>, span: std::ops::Range<usize>) -> AddTo<'_, T> {
    match base {
        AddTo::Gradient(gradient) => AddTo::Gradient(&gradient[span]),
        other => other,
    }
}

/// Runs `body` on row blocks, handing it zeroed partial sums of the wanted gradients, and adds
/// those up in order.
pub(crate) fn over_row_blocks(
    cpu: &Cpu,
    rows: usize,
    dim: usize,
    total_bytes: usize,
    gradients: [Option<&mut [f32]>; 2],
    workspace: &mut [f32],
    body: impl Fn(std::ops::Range<usize>, [Option<&mut [f32]>; 2]) + Sync,
) {
    let (count, step) = (blocks(rows), block_rows(rows));
    let [first, second] = gradients
        .map(|gradient| gradient.inspect(|gradient| assert_eq!(gradient.len(), dim, "length of a parameter gradient")));
    let wanted = [first.is_some(), second.is_some()];
    let each = count * dim;
    let needed = each * wanted.iter().filter(|wanted| **wanted).count();
    assert!(workspace.len() >= needed, "{} numbers of workspace, {needed} needed", workspace.len());
    let workspace = &mut workspace[..needed];
    let partials = Shares::new(&mut *workspace);
    for_tasks(cpu, count, total_bytes, |block| {
        let part = |index: usize, wanted: bool| {
            wanted.then(|| {
                // SAFETY: every block has its own part of each gradient's partial sums.
                let part = unsafe { partials.part(index * each + block * dim..index * each + (block + 1) * dim) };
                part.fill(0.0);
                part
            })
        };
        let parts = [part(0, wanted[0]), part(usize::from(wanted[0]), wanted[1])];
        body(block * step..((block + 1) * step).min(rows), parts);
    });
    let (partial, rest) = workspace.split_at(if wanted[0] { each } else { 0 });
    if let Some(gradient) = first {
        sum_blocks(cpu, partial, gradient);
    }
    if let Some(gradient) = second {
        sum_blocks(cpu, rest, gradient);
    }
}

/// The sums of `g` and of `g (x - centre)`, `g = dy weight`.
#[inline(always)]
fn weighted_sums<S: Simd, T: Element>(s: S, dy: &[T], weight: &[T], x: &[T], centre: f32) -> (f32, f32) {
    let c = s.splat(centre);
    let (mut sums, mut dots) = ([s.splat(0.0); 4], [s.splat(0.0); 4]);
    let width = 4 * S::LANES;
    let blocks = dy.chunks_exact(width).zip(weight.chunks_exact(width)).zip(x.chunks_exact(width));
    for ((dy, weight), x) in blocks {
        for k in 0..4 {
            let lanes = k * S::LANES..(k + 1) * S::LANES;
            let g = s.mul(T::load(s, &dy[lanes.clone()]), T::load(s, &weight[lanes.clone()]));
            sums[k] = s.add(sums[k], g);
            dots[k] = s.fma(g, s.sub(T::load(s, &x[lanes]), c), dots[k]);
        }
    }
    let mut i = x.len() - x.len() % width;
    while i < x.len() {
        let g = s.mul(load_at(s, dy, i, 0.0), load_at(s, weight, i, 0.0));
        sums[0] = s.add(sums[0], g);
        dots[0] = s.fma(g, s.sub(load_at(s, x, i, 0.0), c), dots[0]);
        i += S::LANES;
    }
    (total(s, sums), total(s, dots))
}

/// One row of the backward; `dy: None` means that the gradient comes in `dx`.
#[inline(always)]
fn rms_row_backward<S: Simd, T: Element>(
    s: S,
    dy: Option<&[T]>,
    x: &[T],
    weight: &[T],
    inv: f32,
    base: AddTo<'_, T>,
    dx: &mut [T],
    dweight: Option<&mut [f32]>,
) {
    let dim = x.len();
    let (_, dot) = weighted_sums(s, dy.unwrap_or(dx), weight, x, 0.0);
    // inv (g - x inv mean(g x inv)) = inv g - x (inv^3 mean(g x))
    let (a, b) = (s.splat(inv), s.splat(-inv * inv * inv * dot / dim as f32));
    let mut i = 0;
    match dweight {
        None => {
            while i < dim {
                let g = s.mul(load_at(s, dy.unwrap_or(dx), i, 0.0), load_at(s, weight, i, 0.0));
                let v = s.fma(g, a, s.mul(load_at(s, x, i, 0.0), b));
                store_at(s, add_base(s, v, base, dx, i), dx, i);
                i += S::LANES;
            }
        }
        Some(dweight) => {
            while i < dim {
                let (dy, x) = (load_at(s, dy.unwrap_or(dx), i, 0.0), load_at(s, x, i, 0.0));
                let v = s.fma(s.mul(dy, load_at(s, weight, i, 0.0)), a, s.mul(x, b));
                store_at(s, add_base(s, v, base, dx, i), dx, i);
                store_at(s, s.fma(dy, s.mul(x, a), load_at(s, dweight, i, 0.0)), dweight, i);
                i += S::LANES;
            }
        }
    }
}

#[inline(always)]
fn add_base<S: Simd, T: Element>(s: S, v: S::F, base: AddTo<'_, T>, output: &[T], i: usize) -> S::F {
    match base {
        AddTo::Nothing => v,
        AddTo::Gradient(gradient) => s.add(v, load_at(s, gradient, i, 0.0)),
        AddTo::Output => s.add(v, load_at(s, output, i, 0.0)),
    }
}

simd_fn! {
    fn rms_rows_backward[T: Element](
        s: S, dy: &[T], x: &[T], weight: &[T], inv_rms: &[f32], base: AddTo<'_, T>, dx: &mut [T], dweight: Option<&mut [f32]>,
    ) {
        let dim = weight.len();
        let mut dweight = dweight;
        for (row, inv) in inv_rms.iter().enumerate() {
            let span = row * dim..(row + 1) * dim;
            let (dy, x, base) = (&dy[span.clone()], &x[span.clone()], at(base, span.clone()));
            rms_row_backward(s, Some(dy), x, weight, *inv, base, &mut dx[span], dweight.as_deref_mut());
        }
    }
}

/// The backward of [`rms_norm_heads`], in place: the head columns of `gradient` hold `dy` and
/// receive `dx`.
pub fn rms_norm_heads_backward<T: Element>(
    cpu: &Cpu,
    columns: HeadColumns,
    x: &[T],
    weight: &[T],
    inv_rms: &[f32],
    gradient: &mut [T],
    dweight: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let rows = columns.rows(x.len());
    assert_eq!(gradient.len(), x.len(), "length of the gradient");
    assert_eq!(
        (weight.len(), inv_rms.len()),
        (columns.head_dim, rows * columns.heads),
        "lengths of weight and inv_rms"
    );
    let gradient = Shares::new(gradient);
    let bytes = inv_rms.len() * columns.head_dim * size_of::<T>() * 3;
    over_row_blocks(cpu, rows, columns.head_dim, bytes, [dweight, None], workspace, |range, [dw, _]| {
        let span = range.start * columns.row_stride..range.end * columns.row_stride;
        // SAFETY: row blocks do not overlap.
        let gradient = unsafe { gradient.part(span.clone()) };
        let inv = &inv_rms[range.start * columns.heads..range.end * columns.heads];
        head_rows_backward(cpu.isa, columns, &x[span], weight, inv, gradient, dw);
    });
}

simd_fn! {
    fn head_rows_backward[T: Element](
        s: S, columns: HeadColumns, x: &[T], weight: &[T], inv_rms: &[f32], gradient: &mut [T], dweight: Option<&mut [f32]>,
    ) {
        let dim = columns.head_dim;
        let mut dweight = dweight;
        for (index, inv) in inv_rms.iter().enumerate() {
            let at = index / columns.heads * columns.row_stride + columns.first + index % columns.heads * dim;
            let (x, gradient) = (&x[at..at + dim], &mut gradient[at..at + dim]);
            rms_row_backward(s, None, x, weight, *inv, AddTo::Nothing, gradient, dweight.as_deref_mut());
        }
    }
}

/// `y = (x - mean) / sqrt(var + eps) * weight + bias` for rows of `weight.len()`, `var` the biased
/// variance; saves `mean` and `inv_std`, one a row. Mean and variance are taken in two passes over
/// the cached row.
///
/// # Panics
/// When the lengths disagree.
pub fn layer_norm<T: Element>(
    cpu: &Cpu,
    x: &[T],
    weight: &[T],
    bias: &[T],
    eps: f32,
    y: &mut [T],
    mean: &mut [f32],
    inv_std: &mut [f32],
) {
    add_layer_norm_any(cpu, x, None, weight, bias, eps, y, mean, inv_std);
}

/// `sum = x + residual`, then [`layer_norm`] of `sum` as stored.
pub fn add_layer_norm<T: Element>(
    cpu: &Cpu,
    x: &[T],
    residual: &[T],
    weight: &[T],
    bias: &[T],
    eps: f32,
    sum: &mut [T],
    y: &mut [T],
    mean: &mut [f32],
    inv_std: &mut [f32],
) {
    add_layer_norm_any(cpu, x, Some((residual, sum)), weight, bias, eps, y, mean, inv_std);
}

fn add_layer_norm_any<T: Element>(
    cpu: &Cpu,
    x: &[T],
    add: Option<(&[T], &mut [T])>,
    weight: &[T],
    bias: &[T],
    eps: f32,
    y: &mut [T],
    mean: &mut [f32],
    inv_std: &mut [f32],
) {
    let dim = weight.len();
    let rows = rows_of(x.len(), dim);
    assert_eq!((bias.len(), y.len()), (dim, x.len()), "lengths of bias and y");
    assert_eq!((mean.len(), inv_std.len()), (rows, rows), "lengths of mean and inv_std");
    let add = add.map(|(residual, sum)| {
        assert_eq!((residual.len(), sum.len()), (x.len(), x.len()), "lengths of residual and sum");
        (residual, Shares::new(sum))
    });
    let (y, mean, inv_std) = (Shares::new(y), Shares::new(mean), Shares::new(inv_std));
    let passes = if add.is_some() { 4 } else { 2 };
    for_rows(cpu, rows, passes * dim * size_of::<T>(), |range| {
        let span = range.start * dim..range.end * dim;
        // SAFETY: the ranges of a region do not overlap.
        let (y, mean, inv_std) = unsafe { (y.part(span.clone()), mean.part(range.clone()), inv_std.part(range)) };
        // SAFETY: as above.
        let add = add.as_ref().map(|(residual, sum)| (&residual[span.clone()], unsafe { sum.part(span.clone()) }));
        layer_rows(cpu.isa, &x[span], add, weight, bias, eps, y, mean, inv_std);
    });
}

#[inline(always)]
fn layer_row<S: Simd, T: Element>(s: S, x: &[T], weight: &[T], bias: &[T], eps: f32, y: &mut [T]) -> (f32, f32) {
    let mean = sum(s, x) / x.len() as f32;
    let inv = 1.0 / (sum_of_squares_about(s, x, mean) / x.len() as f32 + eps).sqrt();
    let (centre, scale) = (s.splat(mean), s.splat(inv));
    let mut i = 0;
    while i < x.len() {
        let normal = s.mul(s.sub(load_at(s, x, i, 0.0), centre), scale);
        store_at(s, s.fma(normal, load_at(s, weight, i, 0.0), load_at(s, bias, i, 0.0)), y, i);
        i += S::LANES;
    }
    (mean, inv)
}

simd_fn! {
    fn layer_rows[T: Element](
        s: S, x: &[T], add: Option<(&[T], &mut [T])>, weight: &[T], bias: &[T], eps: f32, y: &mut [T], mean: &mut [f32], inv_std: &mut [f32],
    ) {
        let dim = weight.len();
        match add {
            None => {
                for (row, (mean, inv)) in mean.iter_mut().zip(inv_std).enumerate() {
                    let span = row * dim..(row + 1) * dim;
                    (*mean, *inv) = layer_row(s, &x[span.clone()], weight, bias, eps, &mut y[span]);
                }
            }
            Some((residual, sum)) => {
                for (row, (mean, inv)) in mean.iter_mut().zip(inv_std).enumerate() {
                    let span = row * dim..(row + 1) * dim;
                    let sum = &mut sum[span.clone()];
                    add_row(s, &x[span.clone()], &residual[span.clone()], sum);
                    (*mean, *inv) = layer_row(s, sum, weight, bias, eps, &mut y[span]);
                }
            }
        }
    }
}

/// The backward of [`layer_norm`]: `dx = base + inv_std (g - mean(g) - x^ mean(g x^))` with
/// `x^ = (x - mean) inv_std`, `g = dy weight`; `dweight += sum dy x^`, `dbias += sum dy`.
///
/// `workspace` needs [`backward_workspace`] numbers for each of `dweight` and `dbias` that is
/// given.
pub fn layer_norm_backward<T: Element>(
    cpu: &Cpu,
    dy: &[T],
    x: &[T],
    weight: &[T],
    mean: &[f32],
    inv_std: &[f32],
    base: AddTo<'_, T>,
    dx: &mut [T],
    dweight: Option<&mut [f32]>,
    dbias: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let dim = weight.len();
    let rows = rows_of(x.len(), dim);
    assert_eq!((dy.len(), dx.len()), (x.len(), x.len()), "lengths of dy and dx");
    assert_eq!((mean.len(), inv_std.len()), (rows, rows), "lengths of mean and inv_std");
    check_base(base, x.len());
    let dx = Shares::new(dx);
    let bytes = 3 * size_of_val(x);
    over_row_blocks(cpu, rows, dim, bytes, [dweight, dbias], workspace, |range, [dw, db]| {
        let span = range.start * dim..range.end * dim;
        // SAFETY: row blocks do not overlap.
        let dx = unsafe { dx.part(span.clone()) };
        let (dy, x, base) = (&dy[span.clone()], &x[span.clone()], at(base, span));
        layer_rows_backward(cpu.isa, dy, x, weight, &mean[range.clone()], &inv_std[range], base, dx, dw, db);
    });
}

simd_fn! {
    fn layer_rows_backward[T: Element](
        s: S, dy: &[T], x: &[T], weight: &[T], mean: &[f32], inv_std: &[f32], base: AddTo<'_, T>, dx: &mut [T],
        dweight: Option<&mut [f32]>, dbias: Option<&mut [f32]>,
    ) {
        let dim = weight.len();
        let (mut dweight, mut dbias) = (dweight, dbias);
        for (row, (mean, inv)) in mean.iter().zip(inv_std).enumerate() {
            let span = row * dim..(row + 1) * dim;
            let (dy, x, base, dx) = (&dy[span.clone()], &x[span.clone()], at(base, span.clone()), &mut dx[span]);
            let centre = s.splat(*mean);
            let (sum, dot) = weighted_sums(s, dy, weight, x, *mean);
            // inv (g - mean(g) - (x - mean) inv^2 mean(g (x - mean)))
            let shift = s.splat(-inv * sum / dim as f32);
            let (a, b) = (s.splat(*inv), s.splat(-inv * inv * inv * dot / dim as f32));
            let mut i = 0;
            while i < dim {
                let (dy, x) = (load_at(s, dy, i, 0.0), s.sub(load_at(s, x, i, 0.0), centre));
                let v = s.fma(s.mul(dy, load_at(s, weight, i, 0.0)), a, s.fma(x, b, shift));
                store_at(s, add_base(s, v, base, dx, i), dx, i);
                if let Some(dweight) = dweight.as_deref_mut() {
                    store_at(s, s.fma(dy, s.mul(x, a), load_at(s, dweight, i, 0.0)), dweight, i);
                }
                if let Some(dbias) = dbias.as_deref_mut() {
                    store_at(s, s.add(dy, load_at(s, dbias, i, 0.0)), dbias, i);
                }
                i += S::LANES;
            }
        }
    }
}
