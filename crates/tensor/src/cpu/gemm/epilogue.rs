//! The last operations on finished sums: bias, activation, residual, scaling, rounding, storing.
//!
//! A [`Sink`] receives rectangles of `f32` sums that have just left the register kernel. It is the
//! only part of a product that knows the result's type and shape in memory, so kernels store to
//! scratch without tails and without reading the result.

use super::{Accumulate, Activation, MatMut, MatRef};
use crate::cpu::activation::{self, Curve};
use crate::cpu::simd::Simd;
use crate::dtype::Element;
use crate::simd_fn;
use std::marker::PhantomData;
use std::ops::Range;

/// Two places of 32 rows each that will be written or read when the sums are finished.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// The first row of the result.
    pub first: *const u8,
    /// A second line of the same rows: of the result, if 32 of its columns take two, or of another
    /// matrix of its shape.
    pub second: *const u8,
    /// Bytes from row to row in both.
    pub stride: usize,
}

/// Receives the sums of a product.
pub(super) trait Sink: Sync {
    /// True if sums are `i32` in the bits of `f32`.
    const INTEGER: bool = false;

    /// True if only the sums on and below the diagonal are wanted. A loop nest may hand over others
    /// too.
    fn lower(&self) -> bool {
        false
    }

    /// True if sums start from [`Sink::seed`] instead of zero.
    fn seeded(&self) -> bool {
        false
    }

    /// The values from which the sums of `row`, columns from `col` on, start.
    fn seed(&self, _row: usize, _col: usize, _sums: &mut [f32]) {}

    /// True if blocks of sums may start from, and be left in, the lines of [`Sink::target`],
    /// because those are the result, in `f32`.
    fn in_place(&self) -> bool {
        false
    }

    /// The lines that finishing 32 rows from `row` and 32 columns from `col` on will touch.
    fn target(&self, row: usize, col: usize) -> Target;

    /// Takes the finished sums of `row`, columns from `col` on.
    ///
    /// # Safety
    /// No two calls at the same time may be for overlapping parts, and the part must lie inside the
    /// result.
    unsafe fn finish_row<S: Simd>(&self, s: S, row: usize, col: usize, sums: &[f32]);
}

simd_fn! {
    /// Hands `sink` the finished sums of the rows from `row` and the columns from `col` on, as
    /// [`Sink::finish_row`], whose contract it needs.
    pub(super) fn finish[K: Sink](s: S, sink: &K, row: usize, col: usize, sums: MatRef<f32>) {
        for i in 0..sums.rows() {
            // SAFETY: by contract.
            unsafe { sink.finish_row(s, row + i, col, sums.row(i)) };
        }
    }
}

/// A result matrix that tasks write disjoint parts of.
#[derive(Debug)]
pub(super) struct Out<'a, T> {
    data: *mut T,
    rows: usize,
    cols: usize,
    stride: usize,
    _data: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are handed out through `part`, whose contract is that they do not overlap.
unsafe impl<T: Send> Sync for Out<'_, T> {}

impl<'a, T> Out<'a, T> {
    pub(super) fn new(m: MatMut<'a, T>) -> Self {
        Out { data: m.data.as_mut_ptr(), rows: m.rows, cols: m.cols, stride: m.stride, _data: PhantomData }
    }

    /// Some of its rows. Parts of it and of this one that live at the same time may not overlap.
    pub(super) fn row_range(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let data = self.data.wrapping_add(range.start * self.stride);
        Out { data, rows: range.len(), cols: self.cols, stride: self.stride, _data: PhantomData }
    }

    /// The lines of 32 rows and columns.
    fn target(&self, row: usize, col: usize) -> Target {
        target(self.data, self.stride, row, col)
    }

    /// `len` elements of a row.
    ///
    /// # Safety
    /// No two parts that live at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, row: usize, col: usize, len: usize) -> &mut [T] {
        assert!(row < self.rows && col + len <= self.cols, "row {row}, columns {col}..{} of a result", col + len);
        // SAFETY: inside the matrix by the assertion and `MatMut`'s own check; disjoint by
        // contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride + col), len) }
    }
}

/// The lines of 32 rows and columns of a matrix; two lines a row where elements have 32 bits.
fn target<T>(data: *const T, stride: usize, row: usize, col: usize) -> Target {
    let first: *const u8 = data.wrapping_add(row * stride + col).cast();
    let second = if size_of::<T>() == 4 { first.wrapping_add(64) } else { first };
    Target { first, second, stride: stride * size_of::<T>() }
}

/// `first`, and the same lines of another matrix if they are as far apart.
fn with_second<T>(first: Target, other: *const T, stride: usize, row: usize, col: usize) -> Target {
    let other = target(other, stride, row, col);
    if other.stride == first.stride && first.second == first.first {
        return Target { second: other.first, ..first };
    }
    first
}

/// `y = act(sum + bias) + residual`
pub(super) struct Forward<'a, T, O> {
    pub bias: Option<&'a [T]>,
    pub activation: Activation,
    pub pre_activation: Option<Out<'a, T>>,
    pub residual: Option<MatRef<'a, T>>,
    pub y: Out<'a, O>,
}

impl<T: Element, O: Element> Sink for Forward<'_, T, O> {
    fn target(&self, row: usize, col: usize) -> Target {
        let y = self.y.target(row, col);
        match (&self.pre_activation, &self.residual) {
            (Some(pre), _) => with_second(y, pre.data, pre.stride, row, col),
            (_, Some(residual)) => with_second(y, residual.data.as_ptr(), residual.stride, row, col),
            _ => y,
        }
    }

    #[inline(always)]
    unsafe fn finish_row<S: Simd>(&self, s: S, row: usize, col: usize, sums: &[f32]) {
        let len = sums.len();
        for j in (0..len).step_by(2 * S::LANES) {
            let mut v = load_pair(s, sums, j);
            if let Some(bias) = self.bias {
                v = add_pair(s, v, load_pair(s, &bias[col..col + len], j));
            }
            if let Some(pre) = &self.pre_activation {
                // SAFETY: by contract.
                store_pair(s, v, unsafe { pre.part(row, col, len) }, j);
            }
            if self.activation != Activation::None {
                v = [activate(s, self.activation, v[0]), activate(s, self.activation, v[1])];
            }
            if let Some(residual) = self.residual {
                v = add_pair(s, v, load_pair(s, &residual.row(row)[col..col + len], j));
            }
            // SAFETY: by contract.
            store_pair(s, v, unsafe { self.y.part(row, col, len) }, j);
        }
    }
}

/// `dx = sum act'(pre) [+ dx]`
pub(super) struct InputGradient<'a, T> {
    pub activation: Option<(Activation, MatRef<'a, T>)>,
    pub accumulate: Accumulate,
    pub dx: Out<'a, T>,
}

impl<T: Element> Sink for InputGradient<'_, T> {
    fn target(&self, row: usize, col: usize) -> Target {
        let dx = self.dx.target(row, col);
        match &self.activation {
            Some((_, pre)) => with_second(dx, pre.data.as_ptr(), pre.stride, row, col),
            None => dx,
        }
    }

    #[inline(always)]
    unsafe fn finish_row<S: Simd>(&self, s: S, row: usize, col: usize, sums: &[f32]) {
        let len = sums.len();
        // SAFETY: by contract.
        let dx = unsafe { self.dx.part(row, col, len) };
        for j in (0..len).step_by(2 * S::LANES) {
            let mut v = load_pair(s, sums, j);
            if let Some((activation, pre)) = self.activation {
                let pre = load_pair(s, &pre.row(row)[col..col + len], j);
                v[0] = s.mul(v[0], derivative(s, activation, pre[0]));
                v[1] = s.mul(v[1], derivative(s, activation, pre[1]));
            }
            if self.accumulate == Accumulate::Add {
                v = add_pair(s, v, load_pair(s, dx, j));
            }
            store_pair(s, v, dx, j);
        }
    }
}

/// `dw = sum`, the sum having started from `dw` when accumulating.
pub(super) struct WeightGradient<'a> {
    pub accumulate: Accumulate,
    pub dw: Out<'a, f32>,
}

impl Sink for WeightGradient<'_> {
    fn in_place(&self) -> bool {
        true
    }

    fn target(&self, row: usize, col: usize) -> Target {
        self.dw.target(row, col)
    }

    fn seeded(&self) -> bool {
        self.accumulate == Accumulate::Add
    }

    fn seed(&self, row: usize, col: usize, sums: &mut [f32]) {
        // SAFETY: a task seeds its own part before it finishes it.
        sums.copy_from_slice(unsafe { self.dw.part(row, col, sums.len()) });
    }

    #[inline(always)]
    unsafe fn finish_row<S: Simd>(&self, s: S, row: usize, col: usize, sums: &[f32]) {
        // SAFETY: by contract.
        let dw = unsafe { self.dw.part(row, col, sums.len()) };
        // Rows are short: `memcpy` takes longer to be called than this.
        for j in (0..sums.len()).step_by(2 * S::LANES) {
            store_pair(s, load_pair(s, sums, j), dw, j);
        }
    }
}

/// `c = alpha sum + beta c`
pub(super) struct Scaled<'a, T> {
    pub alpha: f32,
    pub beta: f32,
    /// True if the result is symmetric: see [`Sink::lower`].
    pub lower: bool,
    pub c: Out<'a, T>,
}

impl<T: Element> Sink for Scaled<'_, T> {
    fn lower(&self) -> bool {
        self.lower
    }

    fn target(&self, row: usize, col: usize) -> Target {
        self.c.target(row, col)
    }

    #[inline(always)]
    unsafe fn finish_row<S: Simd>(&self, s: S, row: usize, col: usize, sums: &[f32]) {
        let alpha = s.splat(self.alpha);
        // SAFETY: by contract.
        let c = unsafe { self.c.part(row, col, sums.len()) };
        for j in (0..sums.len()).step_by(2 * S::LANES) {
            let mut v = load_pair(s, sums, j);
            v = [s.mul(alpha, v[0]), s.mul(alpha, v[1])];
            if self.beta != 0.0 {
                let (beta, old) = (s.splat(self.beta), load_pair(s, c, j));
                v = [s.fma(beta, old[0], v[0]), s.fma(beta, old[1], v[1])];
            }
            store_pair(s, v, c, j);
        }
    }
}

/// `x[j..]`, one vector of it or what is left.
#[inline(always)]
fn load<T: Element, S: Simd>(s: S, x: &[T], j: usize) -> S::F {
    if x.len() - j >= S::LANES { T::load(s, &x[j..]) } else { T::load_partial(s, &x[j..], 0.0) }
}

/// To `y[j..]`, one vector or what is left of it.
#[inline(always)]
fn store<T: Element, S: Simd>(s: S, v: S::F, y: &mut [T], j: usize) {
    if y.len() - j >= S::LANES { T::store(s, v, &mut y[j..]) } else { T::store_partial(s, v, &mut y[j..]) }
}

/// Two vectors from `x[j..]`, or what is left of them.
#[inline(always)]
fn load_pair<T: Element, S: Simd>(s: S, x: &[T], j: usize) -> [S::F; 2] {
    let x = &x[j..];
    if x.len() >= 2 * S::LANES {
        return [T::load(s, x), T::load(s, &x[S::LANES..])];
    }
    [load(s, x, 0), if x.len() > S::LANES { load(s, x, S::LANES) } else { s.splat(0.0) }]
}

/// To `y[j..]`, two vectors or what is left of them.
#[inline(always)]
fn store_pair<T: Element, S: Simd>(s: S, v: [S::F; 2], y: &mut [T], j: usize) {
    let y = &mut y[j..];
    if y.len() >= 2 * S::LANES {
        return T::store_pair(s, v, y);
    }
    store(s, v[0], y, 0);
    if y.len() > S::LANES {
        store(s, v[1], y, S::LANES);
    }
}

#[inline(always)]
fn add_pair<S: Simd>(s: S, a: [S::F; 2], b: [S::F; 2]) -> [S::F; 2] {
    [s.add(a[0], b[0]), s.add(a[1], b[1])]
}

simd_fn! {
    /// `sums (+)= Σ_rows a` for a few columns: the sums stay in L1 while the rows pass, four at a
    /// time.
    pub(super) fn column_sums[T: Element](s: S, a: MatRef<T>, accumulate: Accumulate, sums: &mut [f32]) {
        if accumulate == Accumulate::Overwrite {
            sums.fill(0.0);
        }
        for first in (0..a.rows()).step_by(4) {
            let last = a.rows().min(first + 4);
            for j in (0..sums.len()).step_by(S::LANES) {
                let mut sum = load(s, sums, j);
                for i in first..last {
                    sum = s.add(sum, load(s, a.row(i), j));
                }
                store(s, sum, sums, j);
            }
        }
    }
}

/// The activation of each lane.
#[inline(always)]
fn activate<S: Simd>(s: S, activation: Activation, x: S::F) -> S::F {
    match activation {
        Activation::None => activation::Identity.value(s, x),
        Activation::Relu => activation::Relu.value(s, x),
        Activation::ReluSquared => activation::ReluSquared.value(s, x),
        Activation::Silu => activation::Silu.value(s, x),
        Activation::GeluExact => activation::GeluExact.value(s, x),
        Activation::GeluTanh => activation::GeluTanh.value(s, x),
    }
}

/// The derivative of the activation at each lane.
#[inline(always)]
fn derivative<S: Simd>(s: S, activation: Activation, x: S::F) -> S::F {
    match activation {
        Activation::None => activation::Identity.both(s, x).1,
        Activation::Relu => activation::Relu.both(s, x).1,
        Activation::ReluSquared => activation::ReluSquared.both(s, x).1,
        Activation::Silu => activation::Silu.both(s, x).1,
        Activation::GeluExact => activation::GeluExact.both(s, x).1,
        Activation::GeluTanh => activation::GeluTanh.both(s, x).1,
    }
}
