//! Matrix products: the three forms that training a linear layer needs, and the plain product for
//! everything else.
//!
//! | form | computes | reduces over |
//! |---|---|---|
//! | [`forward`] | `y = act(x wᵀ + b) + residual` | input features |
//! | [`input_gradient`] | `dx = (dy w) ⊙ act'(pre)` | output features |
//! | [`weight_gradient`] | `dw (+)= dyᵀ x`, `db (+)= Σ dy` | tokens |
//! | [`matmul`], [`matmul_batched`] | `c = α op(a) op(b) + β c` | the shared dimension |
//! | [`gram`] | `c = α op(a) op(a)ᵀ + β c`, half of it | the shared dimension |
//! | [`grouped_forward`] and its two backwards | the first three, for groups of rows | as those |
//!
//! Weights are `[out, in]`, as in Hugging Face checkpoints. All matrices are row-major with a row
//! stride, so a group of a tensor's columns is a matrix too. Sums are accumulated in `f32` whatever
//! the storage type.
//!
//! **How.** A product is cut into blocks of rows and columns of the result, the tasks; a task walks
//! the shared dimension in blocks, packs one block of the right operand so that it fills a third of
//! the L2 cache, and streams panels of the left operand through it; one panel stays in L1 while a
//! register kernel runs along it ([`driver`]). Packing absorbs the storage type, the transposition
//! and the tails, so each rung of the ladder has one register kernel ([`fma`], [`avx512_bf16`]) and
//! it never sees an edge. Tiles outrun memory so far that they have a loop nest of their own
//! ([`amx`]). The epilogue ([`epilogue`]) is applied to sums while they are still in L1 or L2.
//! Products with a handful of rows (generation) take another way: [`vector`].
//!
//! **Same bits.** Each sum is one chain over the shared dimension in ascending order; blocks only
//! interrupt it. The bits of a result therefore depend on the shapes and on the instruction set,
//! not on the number of threads or the cut into tasks. [`weight_gradient`] with [`Accumulate::Add`]
//! continues the chain from the stored value.
//!
//! Operands whose shapes disagree are a caller's bug and panic with both shapes; tensors check
//! shapes before they get here.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2_int8;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod avx512_vnni;
#[cfg(target_arch = "x86_64")]
mod claims;
mod driver;
mod epilogue;
mod fma;
mod grouped;
mod int8;
mod pack;
#[cfg(target_arch = "x86_64")]
mod tile_kernel;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod vector;
mod workspace;

#[cfg(test)]
mod tests;

pub use driver::{Rung, workspace_bytes};
pub use grouped::{grouped_forward, grouped_input_gradient, grouped_weight_gradient};
pub use int8::{DEPTH_MAX as INT8_DEPTH_MAX, forward_int8, input_gradient_int8};

use crate::cpu::Cpu;
use crate::cpu::rows::for_tasks;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use driver::Operand;
use epilogue::{Forward, InputGradient, Out, Scaled, WeightGradient};
use std::ops::Range;

/// A row-major matrix: row `i` is `data[i * stride..][..cols]`.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

/// A row-major matrix to write to.
#[derive(Debug)]
pub struct MatMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

#[track_caller]
fn check_extent(len: usize, rows: usize, cols: usize, stride: usize) {
    assert!(stride >= cols, "a row stride of {stride} elements for rows of {cols}");
    let needed = if rows == 0 { 0 } else { (rows - 1) * stride + cols };
    assert!(len >= needed, "{rows} rows of {cols} at stride {stride} need {needed} elements, there are {len}");
}

impl<'a, T> MatRef<'a, T> {
    /// `rows` rows of `cols` elements, one after another.
    #[track_caller]
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements that start `stride` elements apart.
    #[track_caller]
    pub fn with_stride(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        check_extent(data.len(), rows, cols, stride);
        MatRef { data, rows, cols, stride }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from the start of one row to the start of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &'a [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        &self.data[i * self.stride..][..self.cols]
    }

    /// The matrix of some of the rows.
    #[track_caller]
    pub fn row_range(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let data = if range.is_empty() { &self.data[..0] } else { &self.data[range.start * self.stride..] };
        Self::with_stride(data, range.len(), self.cols, self.stride)
    }

    /// The matrix of some of the columns.
    #[track_caller]
    pub fn col_range(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        let data = if self.rows == 0 { self.data } else { &self.data[range.start..] };
        Self::with_stride(data, self.rows, range.len(), self.stride)
    }
}

impl<'a, T> MatMut<'a, T> {
    /// `rows` rows of `cols` elements, one after another.
    #[track_caller]
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements that start `stride` elements apart.
    #[track_caller]
    pub fn with_stride(data: &'a mut [T], rows: usize, cols: usize, stride: usize) -> Self {
        check_extent(data.len(), rows, cols, stride);
        MatMut { data, rows, cols, stride }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from the start of one row to the start of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Some of the rows, for writing.
    #[track_caller]
    pub fn rows_mut(&mut self, range: Range<usize>) -> MatMut<'_, T> {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let start = if range.is_empty() { 0 } else { range.start * self.stride };
        MatMut::with_stride(&mut self.data[start..], range.len(), self.cols, self.stride)
    }

    /// The same matrix for reading.
    pub fn as_ref(&self) -> MatRef<'_, T> {
        MatRef { data: self.data, rows: self.rows, cols: self.cols, stride: self.stride }
    }
}

/// The activation functions that a product applies to its result, or differentiates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Activation {
    /// The identity.
    #[default]
    None,
    /// `max(x, 0)`
    Relu,
    /// `max(x, 0)²` (So et al. 2021, "Primer").
    ReluSquared,
    /// `x / (1 + e^-x)`, also called swish.
    Silu,
    /// `x Φ(x)` with the normal distribution function `Φ` (Hendrycks and Gimpel, 2016).
    GeluExact,
    /// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`, the same paper's approximation, as in GPT-2.
    GeluTanh,
}

/// The choice between replacing the previous contents and adding to them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Accumulate {
    /// The old values are not read.
    #[default]
    Overwrite,
    /// The result is added to the old values.
    Add,
}

/// The orientation of an operand of [`matmul`]: as it lies, or transposed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Transpose {
    /// As it lies.
    #[default]
    No,
    /// Transposed.
    Yes,
}

/// A weight matrix `[out, in]`.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a, T> {
    /// The weights as stored.
    pub plain: MatRef<'a, T>,
}

impl<'a, T> From<MatRef<'a, T>> for Weight<'a, T> {
    fn from(plain: MatRef<'a, T>) -> Self {
        Weight { plain }
    }
}

/// The operations of [`forward`] on each sum before it is stored. All of them happen in `f32`, with
/// one rounding at the end.
#[derive(Debug)]
pub struct Epilogue<'a, T> {
    /// Added to each row; `[N]`.
    pub bias: Option<&'a [T]>,
    /// Applied after the bias.
    pub activation: Activation,
    /// Receives `x wᵀ + bias`, which the activation's backward needs; `[M, N]`.
    pub pre_activation: Option<MatMut<'a, T>>,
    /// Added after the activation; `[M, N]`.
    pub residual: Option<MatRef<'a, T>>,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Epilogue { bias: None, activation: Activation::None, pre_activation: None, residual: None }
    }
}

/// The operations of [`input_gradient`] on each sum before it is stored.
#[derive(Clone, Copy, Debug)]
pub struct GradientEpilogue<'a, T> {
    /// The activation that produced the layer's input, and its argument `[M, K]`: the sums are
    /// multiplied by the derivative.
    pub activation: Option<(Activation, MatRef<'a, T>)>,
    /// Replaces the contents of `dx`, or adds to them.
    pub accumulate: Accumulate,
}

impl<T> Default for GradientEpilogue<'_, T> {
    fn default() -> Self {
        GradientEpilogue { activation: None, accumulate: Accumulate::Overwrite }
    }
}

#[track_caller]
fn expect_shape(what: &str, found: (usize, usize), wanted: (usize, usize)) {
    assert!(found == wanted, "{what} is {found:?}, the other operands make it {wanted:?}");
}

/// The sink of a forward's sums `[M, N]`.
#[track_caller]
fn forward_sink<'a, T: Element, O: Element>(
    (m, n): (usize, usize),
    epilogue: Epilogue<'a, T>,
    y: MatMut<'a, O>,
) -> Forward<'a, T, O> {
    expect_shape("the output", (y.rows, y.cols), (m, n));
    if let Some(bias) = epilogue.bias {
        assert!(bias.len() == n, "a bias of {} elements for {n} outputs", bias.len());
    }
    if let Some(pre) = &epilogue.pre_activation {
        expect_shape("the pre-activation", (pre.rows, pre.cols), (m, n));
    }
    if let Some(residual) = &epilogue.residual {
        expect_shape("the residual", (residual.rows, residual.cols), (m, n));
    }
    Forward {
        bias: epilogue.bias,
        activation: epilogue.activation,
        pre_activation: epilogue.pre_activation.map(Out::new),
        residual: epilogue.residual,
        y: Out::new(y),
    }
}

/// The sink of an input gradient's sums `[M, K]`.
#[track_caller]
fn input_gradient_sink<'a, T: Element>(
    (m, k): (usize, usize),
    epilogue: GradientEpilogue<'a, T>,
    dx: MatMut<'a, T>,
) -> InputGradient<'a, T> {
    expect_shape("the input gradient", (dx.rows, dx.cols), (m, k));
    if let Some((_, pre)) = &epilogue.activation {
        expect_shape("the pre-activation", (pre.rows, pre.cols), (m, k));
    }
    InputGradient { activation: epilogue.activation, accumulate: epilogue.accumulate, dx: Out::new(dx) }
}

/// `y = act(x wᵀ + bias) + residual`: `x [M, K]`, `w [N, K]`, `y [M, N]`.
///
/// `y` may have another type than the operands: logits of a `bf16` model can be had in `f32`.
pub fn forward<T: Element, O: Element>(cpu: &Cpu, x: MatRef<T>, w: Weight<T>, epilogue: Epilogue<T>, y: MatMut<O>) {
    let (m, k, n) = (x.rows, x.cols, w.plain.rows);
    expect_shape("the weight", (n, w.plain.cols), (n, k));
    let sink = forward_sink((m, n), epilogue, y);
    if m <= vector::ROWS_MAX {
        vector::product(cpu, x, w.plain, &sink);
    } else {
        driver::product(cpu, (m, n, k), Operand::rows(x), Operand::rows(w.plain), &sink);
    }
}

/// `dx = (dy w) ⊙ act'(pre) [+ dx]`: `dy [M, N]`, `w [N, K]`, `dx [M, K]`.
pub fn input_gradient<T: Element>(
    cpu: &Cpu,
    dy: MatRef<T>,
    w: Weight<T>,
    epilogue: GradientEpilogue<T>,
    dx: MatMut<T>,
) {
    let (m, n, k) = (dy.rows, dy.cols, w.plain.cols);
    expect_shape("the weight", (w.plain.rows, k), (n, k));
    let sink = input_gradient_sink((m, k), epilogue, dx);
    driver::product(cpu, (m, k, n), Operand::rows(dy), Operand::cols(w.plain), &sink);
}

/// `dw (+)= dyᵀ x` and `bias_gradient (+)= Σ_rows dy`: `dy [M, N]`, `x [M, K]`, `dw [N, K]`
/// contiguous, `bias_gradient [N]`.
///
/// With [`Accumulate::Add`] the sums continue from the stored values, so that a batch in two parts
/// gives what the whole batch gives.
pub fn weight_gradient<T: Element>(
    cpu: &Cpu,
    dy: MatRef<T>,
    x: MatRef<T>,
    dw: &mut [f32],
    accumulate: Accumulate,
    bias_gradient: Option<&mut [f32]>,
) {
    let (m, n, k) = (dy.rows, dy.cols, x.cols);
    assert!(x.rows == m, "gradients of {m} tokens with inputs of {} tokens", x.rows);
    assert!(dw.len() == n * k, "a weight gradient of {} elements, the operands make it {n} x {k}", dw.len());
    if let Some(db) = bias_gradient {
        assert!(db.len() == n, "a bias gradient of {} elements for {n} outputs", db.len());
        column_sums(cpu, dy, accumulate, db);
    }
    let sink = WeightGradient { accumulate, dw: Out::new(MatMut::new(dw, n, k)) };
    driver::product(cpu, (n, k, m), Operand::cols(dy), Operand::cols(x), &sink);
}

/// `sums (+)= Σ_rows a`, each column one chain over the rows in order.
pub fn column_sums<T: Element>(cpu: &Cpu, a: MatRef<T>, accumulate: Accumulate, sums: &mut [f32]) {
    assert!(sums.len() == a.cols, "{} sums for {} columns", sums.len(), a.cols);
    // A row's share in one piece, so that lines are asked for before they are reached, as long as
    // its sums stay in L1.
    const COLUMNS_MAX: usize = 4096;
    let (len, shares) = (sums.len(), Shares::new(sums));
    let share = len.div_ceil(cpu.threads.hands()).next_multiple_of(128);
    cpu.threads.for_ranges(len, share.min(COLUMNS_MAX), |columns| {
        // SAFETY: the ranges are disjoint.
        let sums = unsafe { shares.part(columns.clone()) };
        epilogue::column_sums(cpu.isa, a.col_range(columns), accumulate, sums);
    });
}

/// `c = α op(a) op(b) + β c`; with `β = 0` the old values are not read.
pub fn matmul<T: Element>(
    cpu: &Cpu,
    a: MatRef<T>,
    transpose_a: Transpose,
    b: MatRef<T>,
    transpose_b: Transpose,
    alpha: f32,
    beta: f32,
    c: MatMut<T>,
) {
    let (m, k, a) = match transpose_a {
        Transpose::No => (a.rows, a.cols, Operand::rows(a)),
        Transpose::Yes => (a.cols, a.rows, Operand::cols(a)),
    };
    let (kb, n, b) = match transpose_b {
        Transpose::No => (b.rows, b.cols, Operand::cols(b)),
        Transpose::Yes => (b.cols, b.rows, Operand::rows(b)),
    };
    assert!(k == kb, "a product of {m} x {k} and {kb} x {n}");
    expect_shape("the result", (c.rows, c.cols), (m, n));
    driver::product(cpu, (m, n, k), a, b, &Scaled { alpha, beta, lower: false, c: Out::new(c) });
}

/// `c = α op(a) op(a)ᵀ + β c` for a symmetric and contiguous `c`; with `β = 0` the old values are
/// not read.
///
/// The result is symmetric, so tiles above the diagonal are not computed but copied from below it:
/// an element there is the same chain with the factors of each product exchanged, so it has the
/// same bits. (Tiles of AMX compute all of it.)
pub fn gram<T: Element>(cpu: &Cpu, a: MatRef<T>, transpose: Transpose, alpha: f32, beta: f32, c: &mut [T]) {
    let (n, k, left, right) = match transpose {
        Transpose::No => (a.rows, a.cols, Operand::rows(a), Operand::rows(a)),
        Transpose::Yes => (a.cols, a.rows, Operand::cols(a), Operand::cols(a)),
    };
    let sink = Scaled { alpha, beta, lower: true, c: Out::new(MatMut::new(c, n, n)) };
    driver::product(cpu, (n, n, k), left, right, &sink);
    mirror(cpu, n, c);
}

/// Copies what lies below the diagonal of a matrix `[n, n]` to above it.
fn mirror<T: Element>(cpu: &Cpu, n: usize, c: &mut [T]) {
    /// Rows and columns of a square that is read, then written: two cache lines of `f32` wide.
    const SIDE: usize = 32;
    assert!(c.len() == n * n, "{} elements of a matrix {n} x {n}", c.len());
    let c = Shares::new(c);
    for_tasks(cpu, n.div_ceil(SIDE), n * n * size_of::<T>(), |band| {
        let mut square = [[T::default(); SIDE]; SIDE];
        let first = band * SIDE;
        let rows = first..n.min(first + SIDE);
        for left in (first..n).step_by(SIDE) {
            let columns = left..n.min(left + SIDE);
            for (from, row) in columns.clone().zip(&mut square) {
                // SAFETY: on and below the diagonal, where nobody writes; at the diagonal itself
                // this task does, before and after.
                row[..rows.len()].copy_from_slice(unsafe { c.part(from * n + rows.start..from * n + rows.end) });
            }
            for (at, to) in rows.clone().enumerate() {
                let right = left.max(to + 1)..columns.end;
                let skipped = right.start.min(right.end) - left;
                // SAFETY: above the diagonal, in rows that only this task writes and reads there.
                let out = unsafe { c.part(to * n + left + skipped..to * n + right.end) };
                out.iter_mut().zip(&square[skipped..]).for_each(|(out, row)| *out = row[at]);
            }
        }
    });
}

/// A batch of matrices of one shape, `step` elements apart; a step of 0 repeats one matrix.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a, T> {
    /// The elements, from the first matrix's first on.
    pub data: &'a [T],
    /// Rows of each matrix.
    pub rows: usize,
    /// Columns of each matrix.
    pub cols: usize,
    /// Elements from row to row.
    pub stride: usize,
    /// Elements from matrix to matrix.
    pub step: usize,
}

impl<'a, T> Batch<'a, T> {
    /// Matrices without gaps.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Batch { data, rows, cols, stride: cols, step: rows * cols }
    }

    fn matrix(&self, i: usize) -> MatRef<'a, T> {
        MatRef::with_stride(&self.data[i * self.step..], self.rows, self.cols, self.stride)
    }
}

/// `c[i] = α op(a[i]) op(b[i]) + β c[i]` for `count` matrices; `c` holds them contiguously.
pub fn matmul_batched<T: Element>(
    cpu: &Cpu,
    count: usize,
    a: Batch<T>,
    transpose_a: Transpose,
    b: Batch<T>,
    transpose_b: Transpose,
    alpha: f32,
    beta: f32,
    c: &mut [T],
) {
    let m = if transpose_a == Transpose::No { a.rows } else { a.cols };
    let n = if transpose_b == Transpose::No { b.cols } else { b.rows };
    assert!(c.len() == count * m * n, "{count} results of {m} x {n} in {} elements", c.len());
    let shares = Shares::new(c);
    let one = |i: usize| {
        // SAFETY: the results are disjoint.
        let c = unsafe { shares.part(i * m * n..(i + 1) * m * n) };
        matmul(cpu, a.matrix(i), transpose_a, b.matrix(i), transpose_b, alpha, beta, MatMut::new(c, m, n));
    };
    // Whole products per thread when there are enough of them to go round, else each product on all
    // threads.
    if count >= 2 * cpu.threads.hands() {
        cpu.threads.for_each(count, one);
    } else {
        (0..count).for_each(one);
    }
}
