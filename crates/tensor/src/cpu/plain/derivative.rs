//! Gradients of the elementwise functions of [`elementwise`](crate::cpu::elementwise): the output's
//! times the derivative.
//!
//! Where the derivative does not exist, what PyTorch takes: 0 for `|x|` at 0, half each for the
//! larger of equals, and the inside of a clamp includes its ends. Everything is computed in `f32`
//! and rounded once.

use crate::cpu::Cpu;
use crate::cpu::elementwise::{Binary, Operand, Unary};
use crate::cpu::rows::{for_elements, for_rows, load_at, store_at};
use crate::cpu::simd::Simd;
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;
use std::ops::Range;

/// The number from which a function's derivative is computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Needs {
    /// None: it is constant.
    Nothing,
    /// The argument.
    Argument,
    /// The result.
    Result,
}

/// The number from which the derivative of `f` is computed. It is the result where that suffices,
/// because the argument may then be freed.
pub const fn needs(f: Unary) -> Needs {
    match f {
        Unary::Neg | Unary::Sign => Needs::Nothing,
        Unary::Abs | Unary::Ln | Unary::Square | Unary::Erf => Needs::Argument,
        Unary::Exp | Unary::Sqrt | Unary::Rsqrt | Unary::Reciprocal | Unary::Tanh | Unary::Sigmoid => Needs::Result,
    }
}

/// `dx = dy f'`; `z` is the argument or the result as [`needs`] says, anything where it needs
/// nothing.
///
/// # Panics
/// When the lengths disagree, here and below.
pub fn unary_backward<T: Element>(cpu: &Cpu, f: Unary, dy: &[T], z: &[T], dx: &mut [T]) {
    assert_eq!((z.len(), dx.len()), (dy.len(), dy.len()), "lengths of z and dx");
    let dx = Shares::new(dx);
    for_elements(cpu, dy.len(), 3 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let dx = unsafe { dx.part(range.clone()) };
        unary_range(cpu.isa, f, &dy[range.clone()], &z[range], dx);
    });
}

simd_fn! {
    fn unary_range[T: Element](s: S, f: Unary, dy: &[T], z: &[T], dx: &mut [T]) {
        let mut i = 0;
        while i < dy.len() {
            store_at(s, unary_lanes(s, f, load_at(s, dy, i, 0.0), load_at(s, z, i, 1.0)), dx, i);
            i += S::LANES;
        }
    }
}

#[inline(always)]
fn unary_lanes<S: Simd>(s: S, f: Unary, dy: S::F, z: S::F) -> S::F {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    match f {
        Unary::Neg => s.neg(dy),
        Unary::Sign => zero,
        Unary::Abs => s.select(s.gt(z, zero), dy, s.select(s.gt(zero, z), s.neg(dy), s.mul(z, dy))),
        Unary::Exp => s.mul(dy, z),
        Unary::Ln => s.div(dy, z),
        Unary::Sqrt => s.div(s.mul(dy, s.splat(0.5)), z),
        Unary::Rsqrt => s.mul(s.mul(dy, s.splat(-0.5)), s.mul(z, s.mul(z, z))),
        Unary::Square => s.mul(dy, s.add(z, z)),
        Unary::Reciprocal => s.neg(s.mul(dy, s.mul(z, z))),
        Unary::Tanh => s.mul(dy, s.sub(one, s.mul(z, z))),
        Unary::Sigmoid => s.mul(dy, s.mul(z, s.sub(one, z))),
        // 2 / sqrt(pi) e^(-z^2)
        Unary::Erf => s.mul(s.mul(dy, s.splat(std::f32::consts::FRAC_2_SQRT_PI)), s.exp(s.neg(s.mul(z, z)))),
    }
}

/// `da = dy df/da` and `db = dy df/db`, full size also where an operand is broadcast: `dy` is
/// `[rows, columns]`.
pub fn binary_backward<T: Element>(
    cpu: &Cpu,
    f: Binary,
    [rows, columns]: [usize; 2],
    dy: &[T],
    [a, b]: [Operand<'_, T>; 2],
    da: Option<&mut [T]>,
    db: Option<&mut [T]>,
) {
    let len = rows * columns;
    assert_eq!(dy.len(), len, "a gradient of {rows} x {columns}");
    for out in [&da, &db].into_iter().flatten() {
        assert_eq!(out.len(), len, "a gradient of {rows} x {columns}");
    }
    let (da, db) = (da.map(Shares::new), db.map(Shares::new));
    let run = |span: Range<usize>, operands| {
        // SAFETY: every span belongs to one range of a region.
        let da = da.as_ref().map(|da| unsafe { da.part(span.clone()) });
        // SAFETY: as above.
        let db = db.as_ref().map(|db| unsafe { db.part(span.clone()) });
        binary_row(cpu.isa, f, &dy[span], operands, da, db);
    };
    // Without broadcasting over rows, the whole is one long row that is cut anywhere.
    if let (Operand::Full(_) | Operand::Scalar(_), Operand::Full(_) | Operand::Scalar(_)) = (a, b) {
        for_elements(cpu, len, 5 * size_of::<T>(), |range| {
            let cut = |operand| match operand {
                Operand::Full(x) => Part::Elements(&x[range.clone()]),
                other => row_of(other, 0, columns),
            };
            run(range.clone(), [cut(a), cut(b)]);
        });
        return;
    }
    for_rows(cpu, rows, 5 * columns * size_of::<T>(), |range| {
        for row in range {
            run(row * columns..(row + 1) * columns, [row_of(a, row, columns), row_of(b, row, columns)]);
        }
    });
}

/// One row of an operand: its elements, or one number for all.
#[derive(Clone, Copy)]
enum Part<'a, T> {
    Elements(&'a [T]),
    Number(f32),
}

fn row_of<T: Element>(operand: Operand<'_, T>, row: usize, columns: usize) -> Part<'_, T> {
    match operand {
        Operand::Full(x) => Part::Elements(&x[row * columns..(row + 1) * columns]),
        Operand::Row(x) => Part::Elements(&x[..columns]),
        Operand::Column(x) => Part::Number(x[row].to_f32()),
        Operand::Scalar(x) => Part::Number(x),
    }
}

#[inline(always)]
fn lanes<S: Simd, T: Element>(s: S, part: Part<'_, T>, i: usize) -> S::F {
    match part {
        Part::Elements(x) => load_at(s, x, i, 1.0),
        Part::Number(x) => s.splat(x),
    }
}

simd_fn! {
    fn binary_row[T: Element](s: S, f: Binary, dy: &[T], operands: [Part<'_, T>; 2], da: Option<&mut [T]>, db: Option<&mut [T]>) {
        let ([a, b], mut da, mut db) = (operands, da, db);
        let mut i = 0;
        while i < dy.len() {
            let (ga, gb) = binary_lanes(s, f, load_at(s, dy, i, 0.0), lanes(s, a, i), lanes(s, b, i));
            if let Some(da) = da.as_deref_mut() {
                store_at(s, ga, da, i);
            }
            if let Some(db) = db.as_deref_mut() {
                store_at(s, gb, db, i);
            }
            i += S::LANES;
        }
    }
}

#[inline(always)]
fn binary_lanes<S: Simd>(s: S, f: Binary, dy: S::F, a: S::F, b: S::F) -> (S::F, S::F) {
    // `dy` to the first where it is above, to the second where it is below, half each where they
    // are equal.
    let chosen = |above: S::M, below: S::M| {
        let (zero, half) = (s.splat(0.0), s.mul(dy, s.splat(0.5)));
        (s.select(above, dy, s.select(below, zero, half)), s.select(above, zero, s.select(below, dy, half)))
    };
    match f {
        Binary::Add => (dy, dy),
        Binary::Sub => (dy, s.neg(dy)),
        Binary::Mul => (s.mul(dy, b), s.mul(dy, a)),
        Binary::Div => {
            let da = s.div(dy, b);
            (da, s.neg(s.mul(da, s.div(a, b))))
        }
        Binary::Max => chosen(s.gt(a, b), s.gt(b, a)),
        Binary::Min => chosen(s.gt(b, a), s.gt(a, b)),
        Binary::Pow => {
            let (mut x, mut y) = ([0.0; 16], [0.0; 16]);
            s.store(a, &mut x);
            s.store(b, &mut y);
            for lane in 0..S::LANES {
                (x[lane], y[lane]) = power_slopes(x[lane], y[lane]);
            }
            (s.mul(dy, s.load(&x)), s.mul(dy, s.load(&y)))
        }
    }
}

/// The derivatives of `a^b` by a and by b; those of a constant (`b = 0`, `a = 0`) are 0, not NaN.
fn power_slopes(a: f32, b: f32) -> (f32, f32) {
    let by_a = if b == 0.0 { 0.0 } else { b * a.powf(b - 1.0) };
    let by_b = if a == 0.0 && b >= 0.0 { 0.0 } else { a.powf(b) * a.ln() };
    (by_a, by_b)
}

/// `dx = dy p x^(p - 1)`.
pub fn power_backward<T: Element>(cpu: &Cpu, p: f32, dy: &[T], x: &[T], dx: &mut [T]) {
    map(cpu, dy, x, dx, |dy, x| dy * power_slopes(x, p).0);
}

/// `dx = dy` where `low <= x <= high`, else 0.
pub fn clamp_backward<T: Element>(cpu: &Cpu, low: f32, high: f32, dy: &[T], x: &[T], dx: &mut [T]) {
    map(cpu, dy, x, dx, |dy, x| if low <= x && x <= high { dy } else { 0.0 });
}

fn map<T: Element>(cpu: &Cpu, dy: &[T], x: &[T], dx: &mut [T], f: impl Fn(f32, f32) -> f32 + Sync) {
    assert_eq!((x.len(), dx.len()), (dy.len(), dy.len()), "lengths of x and dx");
    let dx = Shares::new(dx);
    for_elements(cpu, dy.len(), 3 * size_of::<T>(), |range| {
        // SAFETY: the ranges of a region do not overlap.
        let dx = unsafe { dx.part(range.clone()) };
        for ((dx, dy), x) in dx.iter_mut().zip(&dy[range.clone()]).zip(&x[range]) {
            *dx = T::from_f32(f(dy.to_f32(), x.to_f32()));
        }
    });
}
