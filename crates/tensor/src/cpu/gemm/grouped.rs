//! Products of ragged groups: the rows of one matrix lie in contiguous groups, and each group has a
//! weight of its own. This is the arithmetic of a mixture of experts without dropped tokens (Gale
//! et al. 2022), whose groups are as long as routing makes them.
//!
//! There may be several groups of a weight: with `G` weights, group `g` is one of weight `g % G`.
//! Rows that came from several ranks lie like that, in the order of the ranks.
//!
//! All groups' tasks are dealt to the threads together. Each sum is the chain that the plain
//! product makes of the same rows, so grouping changes no bit, and neither does the number of rows
//! in a group: short groups take the way of long ones.

use super::driver::{Operand, Product, products};
use super::epilogue::{Forward, InputGradient, Out, WeightGradient};
use super::{Accumulate, Activation, MatMut, MatRef, expect_shape};
use crate::cpu::Cpu;
use crate::dtype::Element;
use std::ops::Range;

/// The groups that `bounds` delimit: group `e` is `bounds[e]..bounds[e + 1]` of `rows` rows.
#[track_caller]
fn groups(bounds: &[usize], rows: usize) -> impl Iterator<Item = Range<usize>> + '_ {
    let ascending = bounds.windows(2).all(|pair| pair[0] <= pair[1]);
    assert!(ascending && bounds.last().is_some_and(|end| *end <= rows), "groups {bounds:?} of {rows} rows");
    bounds.windows(2).map(|pair| pair[0]..pair[1])
}

/// The number of weights of `n` rows each that the groups of `bounds` take in turn.
#[track_caller]
fn weights(bounds: &[usize], rows: usize, n: usize) -> usize {
    let (groups, weights) = (bounds.len() - 1, rows / n.max(1));
    let fits = weights > 0 && rows == weights * n && groups.is_multiple_of(weights);
    assert!(fits, "{groups} groups take turns with weights of {n} rows, of which there are {rows}");
    weights
}

/// `y = x w[g % G]ᵀ` for the rows of each group `g`: `x [R, K]`, `w [G N, K]`, `y [R, N]`, `bounds
/// [S G + 1]`. Rows outside of all groups are left as they are.
pub fn grouped_forward<T: Element, O: Element>(cpu: &Cpu, x: MatRef<T>, w: MatRef<T>, bounds: &[usize], y: MatMut<O>) {
    let (rows, k, n) = (x.rows, x.cols, y.cols);
    let weights = weights(bounds, w.rows, n);
    expect_shape("the weight", (w.rows, w.cols), (weights * n, k));
    expect_shape("the output", (y.rows, y.cols), (rows, n));
    let y = Out::new(y);
    let sink = |rows: Range<usize>| Forward {
        bias: None::<&[T]>,
        activation: Activation::None,
        pre_activation: None,
        residual: None,
        y: y.row_range(rows),
    };
    let sinks: Vec<_> = groups(bounds, rows).map(sink).collect();
    let product = |(g, (rows, sink)): (usize, (Range<usize>, _))| Product {
        shape: (rows.len(), n, k),
        left: Operand::rows(x.row_range(rows)),
        right: Operand::rows(w.row_range(g % weights * n..(g % weights + 1) * n)),
        sink,
    };
    products(cpu, &groups(bounds, rows).zip(&sinks).enumerate().map(product).collect::<Vec<_>>());
}

/// `dx = dy w[g % G]` for the rows of each group `g`: `dy [R, N]`, `w [G N, K]`, `dx [R, K]`. Rows
/// outside of all groups are left as they are.
pub fn grouped_input_gradient<T: Element>(cpu: &Cpu, dy: MatRef<T>, w: MatRef<T>, bounds: &[usize], dx: MatMut<T>) {
    let (rows, n, k) = (dy.rows, dy.cols, w.cols);
    let weights = weights(bounds, w.rows, n);
    expect_shape("the weight", (w.rows, w.cols), (weights * n, k));
    expect_shape("the input gradient", (dx.rows, dx.cols), (rows, k));
    let dx = Out::new(dx);
    let sink = |rows: Range<usize>| InputGradient {
        activation: None::<(Activation, MatRef<'_, T>)>,
        accumulate: Accumulate::Overwrite,
        dx: dx.row_range(rows),
    };
    let sinks: Vec<_> = groups(bounds, rows).map(sink).collect();
    let product = |(g, (rows, sink)): (usize, (Range<usize>, _))| Product {
        shape: (rows.len(), k, n),
        left: Operand::rows(dy.row_range(rows)),
        right: Operand::cols(w.row_range(g % weights * n..(g % weights + 1) * n)),
        sink,
    };
    products(cpu, &groups(bounds, rows).zip(&sinks).enumerate().map(product).collect::<Vec<_>>());
}

/// `dw[e] (+)= dyᵀ x` over the rows of each group `e`: `dy [R, N]`, `x [R, K]`, `dw [G N, K]`
/// contiguous. The gradient of a group without rows is zero, or stays. Each weight has one group
/// here.
pub fn grouped_weight_gradient<T: Element>(
    cpu: &Cpu,
    dy: MatRef<T>,
    x: MatRef<T>,
    bounds: &[usize],
    dw: &mut [f32],
    accumulate: Accumulate,
) {
    let (rows, n, k) = (dy.rows, dy.cols, x.cols);
    assert!(x.rows == rows, "gradients of {rows} rows with inputs of {} rows", x.rows);
    let all = (bounds.len() - 1) * n;
    assert!(dw.len() == all * k, "a weight gradient of {} elements, the operands make it {all} x {k}", dw.len());
    let dw = Out::new(MatMut::new(dw, all, k));
    let sink = |e: usize| WeightGradient { accumulate, dw: dw.row_range(e * n..(e + 1) * n) };
    let sinks: Vec<_> = (0..bounds.len() - 1).map(sink).collect();
    let product = |(rows, sink): (Range<usize>, _)| Product {
        shape: (n, k, rows.len()),
        left: Operand::cols(dy.row_range(rows.clone())),
        right: Operand::cols(x.row_range(rows)),
        sink,
    };
    // A group without rows adds nothing: its sums are not read and written back.
    let added = |(rows, _): &(Range<usize>, _)| accumulate == Accumulate::Overwrite || !rows.is_empty();
    products(cpu, &groups(bounds, rows).zip(&sinks).filter(added).map(product).collect::<Vec<_>>());
}
