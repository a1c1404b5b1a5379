//! Elementwise arithmetic: one-operand, two-operand with broadcasting of rows, columns and scalars,
//! comparison, selection.
//!
//! Everything is computed in `f32` and rounded once. General broadcasting is the caller's: a shape
//! that is not one of [`Operand`]'s is brought to it by views or copies first. Traffic: each
//! operand once in, the result once out. These kernels exist so that any model can be written; what
//! a transformer does often has fused kernels of its own.

use crate::cpu::Cpu;
use crate::cpu::rows::{for_elements, for_rows, load_at, store_at};
use crate::cpu::simd::Simd;
use crate::cpu::threads::Shares;
use crate::dtype::{Element, Scalar};
use crate::simd_fn;

/// A function of one number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unary {
    /// `-x`
    Neg,
    /// `|x|`
    Abs,
    /// `e^x`
    Exp,
    /// `ln x`
    Ln,
    /// `sqrt x`
    Sqrt,
    /// `1 / sqrt x`
    Rsqrt,
    /// `x^2`
    Square,
    /// `1 / x`
    Reciprocal,
    /// `tanh x`
    Tanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// The error function.
    Erf,
    /// -1, 0 or 1.
    Sign,
}

impl Unary {
    /// All of them, for tests and tables.
    pub const ALL: [Unary; 12] = [
        Unary::Neg,
        Unary::Abs,
        Unary::Exp,
        Unary::Ln,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Square,
        Unary::Reciprocal,
        Unary::Tanh,
        Unary::Sigmoid,
        Unary::Erf,
        Unary::Sign,
    ];
}

/// A function of two numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a b`
    Mul,
    /// `a / b`
    Div,
    /// The larger; NaN where `b` is.
    Max,
    /// The smaller; NaN where `b` is.
    Min,
    /// `a^b`, lane by lane in the C library.
    Pow,
}

impl Binary {
    /// All of them, for tests and tables.
    pub const ALL: [Binary; 7] =
        [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max, Binary::Min, Binary::Pow];
}

/// A comparison.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Compare {
    /// `a > b`
    Greater,
    /// `a >= b`
    GreaterEqual,
    /// `a == b`
    Equal,
}

/// An operand of a `[rows, columns]` result.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a, T> {
    /// `[rows, columns]`
    Full(&'a [T]),
    /// `[columns]`, the same for every row.
    Row(&'a [T]),
    /// `[rows]`, one number for the whole of each row.
    Column(&'a [T]),
    /// One number.
    Scalar(f32),
}

/// A function on lanes; the dispatch on the operation is made once per call, outside the loops.
trait UnaryOp: Copy + Send + Sync {
    fn apply<S: Simd>(self, s: S, x: S::F) -> S::F;
}

trait BinaryOp: Copy + Send + Sync {
    fn apply<S: Simd>(self, s: S, a: S::F, b: S::F) -> S::F;
}

/// Declares one type per operation, and `$with!(value, op => expression)` that calls `expression`
/// with it.
macro_rules! operations {
    ($d:tt $trait:ident $enum:ident $with:ident $($name:ident($s:ident $(, $arg:ident)+) => $body:expr;)*) => {
        mod $with {
            $(#[derive(Clone, Copy)] pub(super) struct $name;)*
        }
        $(impl $trait for $with::$name {
            #[inline(always)]
            fn apply<S: Simd>(self, $s: S $(, $arg: S::F)+) -> S::F { $body }
        })*
        macro_rules! $with {
            ($d operation:expr, $d op:ident => $d call:expr) => {
                match $d operation {
                    $($enum::$name => { let $d op = $with::$name; $d call })*
                }
            };
        }
    };
}

operations! { $ UnaryOp Unary unary_ops
    Neg(s, x) => s.neg(x);
    Abs(s, x) => s.abs(x);
    Exp(s, x) => {
        // Beyond 88 the exponential of half the number, squared, which overflows to infinity where
        // it must.
        let half = s.exp(s.mul(x, s.splat(0.5)));
        s.select(s.gt(x, s.splat(88.0)), s.mul(half, half), s.exp(x))
    };
    Ln(s, x) => s.ln(x);
    Sqrt(s, x) => s.sqrt(x);
    Rsqrt(s, x) => s.div(s.splat(1.0), s.sqrt(x));
    Square(s, x) => s.mul(x, x);
    Reciprocal(s, x) => s.div(s.splat(1.0), x);
    Tanh(s, x) => s.tanh(x);
    Sigmoid(s, x) => s.sigmoid(x);
    Erf(s, x) => s.erf(x);
    Sign(s, x) => {
        let (zero, one) = (s.splat(0.0), s.splat(1.0));
        let down = s.select(s.gt(zero, x), s.splat(-1.0), s.mul(x, zero));
        s.select(s.gt(x, zero), one, down)
    };
}

operations! { $ BinaryOp Binary binary_ops
    Add(s, a, b) => s.add(a, b);
    Sub(s, a, b) => s.sub(a, b);
    Mul(s, a, b) => s.mul(a, b);
    Div(s, a, b) => s.div(a, b);
    Max(s, a, b) => s.max(a, b);
    Min(s, a, b) => s.min(a, b);
    Pow(s, a, b) => {
        let (mut x, mut y) = ([0.0; 16], [0.0; 16]);
        s.store(a, &mut x);
        s.store(b, &mut y);
        for lane in 0..S::LANES {
            x[lane] = x[lane].powf(y[lane]);
        }
        s.load(&x)
    };
}

/// `y = f(x)`.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn unary<T: Element>(cpu: &Cpu, f: Unary, x: &[T], y: &mut [T]) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    let y = Shares::new(y);
    for_elements(cpu, x.len(), 2 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        unary_ops!(f, op => map(cpu.isa, op, &x[range], y));
    });
}

simd_fn! {
    fn map[T: Element, O: UnaryOp](s: S, op: O, x: &[T], y: &mut [T]) {
        let mut i = 0;
        while i < x.len() {
            store_at(s, op.apply(s, load_at(s, x, i, 1.0)), y, i);
            i += S::LANES;
        }
    }
}

impl<T: Element> Operand<'_, T> {
    fn check(&self, rows: usize, columns: usize) {
        match self {
            Operand::Full(x) => assert_eq!(x.len(), rows * columns, "a full operand of {rows} x {columns}"),
            Operand::Row(x) => assert_eq!(x.len(), columns, "a row operand of {columns} columns"),
            Operand::Column(x) => assert_eq!(x.len(), rows, "a column operand of {rows} rows"),
            Operand::Scalar(_) => {}
        }
    }

    /// The operand's part for one row: its elements, or one number.
    #[inline(always)]
    fn row(&self, row: usize, columns: usize) -> Part<'_, T> {
        match self {
            Operand::Full(x) => Part::Elements(&x[row * columns..(row + 1) * columns]),
            Operand::Row(x) => Part::Elements(x),
            Operand::Column(x) => Part::Number(x[row].to_f32()),
            Operand::Scalar(x) => Part::Number(*x),
        }
    }
}

enum Part<'a, T> {
    Elements(&'a [T]),
    Number(f32),
}

/// `y = f(a, b)`, `y` being `[rows, columns]`.
pub fn binary<T: Element>(
    cpu: &Cpu,
    f: Binary,
    [rows, columns]: [usize; 2],
    a: Operand<'_, T>,
    b: Operand<'_, T>,
    y: &mut [T],
) {
    assert_eq!(y.len(), rows * columns, "a result of {rows} x {columns}");
    a.check(rows, columns);
    b.check(rows, columns);
    let y = Shares::new(y);
    // Without broadcasting over rows, the whole is one long row that is cut anywhere.
    if let (Operand::Full(_) | Operand::Scalar(_), Operand::Full(_) | Operand::Scalar(_)) = (a, b) {
        for_elements(cpu, rows * columns, 3 * size_of::<T>(), |range| {
            // SAFETY: the ranges of a region do not overlap.
            let y = unsafe { y.part(range.clone()) };
            let cut = |x| match x {
                Operand::Full(x) => Operand::Row(&x[range.clone()]),
                other => other,
            };
            binary_ops!(f, op => zip_rows(cpu.isa, op, range.len(), 0, cut(a), cut(b), y));
        });
        return;
    }
    for_rows(cpu, rows, 3 * columns * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.start * columns..range.end * columns) };
        binary_ops!(f, op => zip_rows(cpu.isa, op, columns, range.start, a, b, y));
    });
}

simd_fn! {
    fn zip_rows[T: Element, O: BinaryOp](s: S, op: O, columns: usize, first: usize, a: Operand<'_, T>, b: Operand<'_, T>, y: &mut [T]) {
        for (row, y) in y.chunks_exact_mut(columns.max(1)).enumerate() {
            let mut i = 0;
            match (a.row(first + row, columns), b.row(first + row, columns)) {
                (Part::Elements(a), Part::Elements(b)) => while i < columns {
                    store_at(s, op.apply(s, load_at(s, a, i, 1.0), load_at(s, b, i, 1.0)), y, i);
                    i += S::LANES;
                },
                (Part::Elements(a), Part::Number(b)) => {
                    let b = s.splat(b);
                    while i < columns {
                        store_at(s, op.apply(s, load_at(s, a, i, 1.0), b), y, i);
                        i += S::LANES;
                    }
                }
                (Part::Number(a), Part::Elements(b)) => {
                    let a = s.splat(a);
                    while i < columns {
                        store_at(s, op.apply(s, a, load_at(s, b, i, 1.0)), y, i);
                        i += S::LANES;
                    }
                }
                (Part::Number(a), Part::Number(b)) => {
                    let v = op.apply(s, s.splat(a), s.splat(b));
                    while i < columns {
                        store_at(s, v, y, i);
                        i += S::LANES;
                    }
                }
            }
        }
    }
}

/// `y = alpha x + beta y`: scaling in place is `x` of nothing, accumulation is `alpha = beta = 1`;
/// `x` and `y` may differ in dtype. `beta = 0` overwrites `y` whatever it holds.
pub fn axpby<A: Element, B: Element>(cpu: &Cpu, alpha: f32, x: &[A], beta: f32, y: &mut [B]) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    let y = Shares::new(y);
    for_elements(cpu, x.len(), size_of::<A>() + 2 * size_of::<B>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        axpby_range(cpu.isa, alpha, &x[range], beta, y);
    });
}

simd_fn! {
    fn axpby_range[A: Element, B: Element](s: S, alpha: f32, x: &[A], beta: f32, y: &mut [B]) {
        let (a, b) = (s.splat(alpha), s.splat(beta));
        let mut i = 0;
        while i < x.len() {
            let ax = s.mul(load_at(s, x, i, 0.0), a);
            let v = if beta == 0.0 { ax } else { s.fma(load_at(s, y, i, 0.0), b, ax) };
            store_at(s, v, y, i);
            i += S::LANES;
        }
    }
}

/// `y += x`; `x` and `y` may differ in dtype.
pub fn accumulate<A: Element, B: Element>(cpu: &Cpu, x: &[A], y: &mut [B]) {
    axpby(cpu, 1.0, x, 1.0, y);
}

/// `y *= alpha`.
pub fn scale<T: Element>(cpu: &Cpu, alpha: f32, y: &mut [T]) {
    let len = y.len();
    let y = Shares::new(y);
    for_elements(cpu, len, 2 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        scale_range(cpu.isa, alpha, unsafe { y.part(range) });
    });
}

simd_fn! {
    fn scale_range[T: Element](s: S, alpha: f32, y: &mut [T]) {
        let a = s.splat(alpha);
        let mut i = 0;
        while i < y.len() {
            store_at(s, s.mul(load_at(s, y, i, 0.0), a), y, i);
            i += S::LANES;
        }
    }
}

/// `y = min(max(x, low), high)`; NaN stays NaN.
pub fn clamp<T: Element>(cpu: &Cpu, x: &[T], low: f32, high: f32, y: &mut [T]) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    let y = Shares::new(y);
    for_elements(cpu, x.len(), 2 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        clamp_range(cpu.isa, low, high, &x[range], y);
    });
}

simd_fn! {
    fn clamp_range[T: Element](s: S, low: f32, high: f32, x: &[T], y: &mut [T]) {
        let (low, high) = (s.splat(low), s.splat(high));
        let mut i = 0;
        while i < x.len() {
            store_at(s, s.min(high, s.max(low, load_at(s, x, i, 0.0))), y, i);
            i += S::LANES;
        }
    }
}

/// `mask = 1` where `a` compares so with `b`, else 0.
pub fn compare<T: Element>(cpu: &Cpu, how: Compare, a: &[T], b: &[T], mask: &mut [u32]) {
    assert_eq!((b.len(), mask.len()), (a.len(), a.len()), "lengths of b and mask");
    let mask = Shares::new(mask);
    for_elements(cpu, a.len(), 2 * size_of::<T>() + 4, |range| {
        // SAFETY: the ranges of a region do not overlap.
        let mask = unsafe { mask.part(range.clone()) };
        for ((a, b), mask) in a[range.clone()].iter().zip(&b[range]).zip(mask) {
            let (a, b) = (a.to_f32(), b.to_f32());
            *mask = u32::from(match how {
                Compare::Greater => a > b,
                Compare::GreaterEqual => a >= b,
                Compare::Equal => a == b,
            });
        }
    });
}

/// `y = a` where `mask` is not 0, else `b`.
pub fn select<T: Scalar>(cpu: &Cpu, mask: &[u32], a: &[T], b: &[T], y: &mut [T]) {
    assert_eq!((a.len(), b.len(), y.len()), (mask.len(), mask.len(), mask.len()), "lengths of a, b and y");
    let y = Shares::new(y);
    for_elements(cpu, mask.len(), 3 * size_of::<T>() + 4, |range| {
        // SAFETY: the ranges of a region do not overlap.
        let y = unsafe { y.part(range.clone()) };
        for (i, y) in range.zip(y) {
            *y = if mask[i] != 0 { a[i] } else { b[i] };
        }
    });
}

/// Copies columns: for each row, `source[row * stride + first ..][.. width]` of one matrix to the
/// same of another. With it matrices are concatenated and split by columns; by rows, slices do.
pub fn copy_columns<T: Scalar>(
    cpu: &Cpu,
    rows: usize,
    width: usize,
    source: &[T],
    [source_stride, source_first]: [usize; 2],
    target: &mut [T],
    [target_stride, target_first]: [usize; 2],
) {
    assert!(
        source_first + width <= source_stride && target_first + width <= target_stride,
        "columns beyond the stride"
    );
    assert_eq!((source.len(), target.len()), (rows * source_stride, rows * target_stride), "lengths of the matrices");
    let target = Shares::new(target);
    for_rows(cpu, rows, 2 * width * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let target = unsafe { target.part(range.start * target_stride..range.end * target_stride) };
        for (row, target) in range.zip(target.chunks_exact_mut(target_stride)) {
            let source = &source[row * source_stride + source_first..][..width];
            target[target_first..target_first + width].copy_from_slice(source);
        }
    });
}
