//! Value residuals (Zhou et al. 2024, "Value Residual Learning", eq. 7): the values of a block
//! become `a V + b V_1`, with V_1 those of the first block and two learned numbers a and b.
//!
//! Forward works in place on the value columns of the fused query/key/value matrix, and puts V
//! aside, which the gradient of a needs: 3 FLOPs and 3 or 4 elements of traffic for each value.
//! Backward turns the gradient of the columns into that of V in place and gives that of V_1: 6
//! FLOPs, 5 elements. The gradients of a and b are sums over all elements, made in row blocks like
//! those of norms, so their bits do not depend on the number of threads.

use crate::cpu::Cpu;
use crate::cpu::norm::{HeadColumns, over_row_blocks};
use crate::cpu::rows::{for_rows, load_at, store_at};
use crate::cpu::threads::Shares;
use crate::dtype::Element;
use crate::simd_fn;

/// `x = a x + b first` in the `columns` of `x`, whose old contents go to `kept`. `first` and `kept`
/// are matrices of these columns alone; `weights` are a and b.
///
/// # Panics
/// When the lengths disagree.
pub fn value_residual<T: Element>(
    cpu: &Cpu,
    columns: HeadColumns,
    weights: [f32; 2],
    first: &[T],
    kept: Option<&mut [T]>,
    x: &mut [T],
) {
    let (rows, width) = (columns.rows(x.len()), columns.heads * columns.head_dim);
    assert_eq!(first.len(), rows * width, "length of the first block's values");
    let kept = kept.map(|kept| {
        assert_eq!(kept.len(), rows * width, "length of the kept values");
        Shares::new(kept)
    });
    let x = Shares::new(x);
    for_rows(cpu, rows, 4 * width * size_of::<T>(), |range| {
        let span = range.start * width..range.end * width;
        // SAFETY: the ranges of a region do not overlap.
        let x = unsafe { x.part(range.start * columns.row_stride..range.end * columns.row_stride) };
        // SAFETY: as above.
        let kept = kept.as_ref().map(|kept| unsafe { kept.part(span.clone()) });
        mixed_rows(cpu.isa, columns, weights, &first[span], kept, x);
    });
}

simd_fn! {
    fn mixed_rows[T: Element](s: S, columns: HeadColumns, weights: [f32; 2], first: &[T], kept: Option<&mut [T]>, x: &mut [T]) {
        let width = columns.heads * columns.head_dim;
        let [a, b] = weights.map(|weight| s.splat(weight));
        let mut kept = kept.map(|kept| kept.chunks_exact_mut(width));
        for (first, row) in first.chunks_exact(width).zip(x.chunks_exact_mut(columns.row_stride)) {
            let own = &mut row[columns.first..columns.first + width];
            if let Some(kept) = kept.as_mut().and_then(Iterator::next) {
                kept.copy_from_slice(own);
            }
            let mut i = 0;
            while i < width {
                let mixed = s.fma(a, load_at(s, own, i, 0.0), s.mul(b, load_at(s, first, i, 0.0)));
                store_at(s, mixed, own, i);
                i += S::LANES;
            }
        }
    }
}

/// The backward of [`value_residual`], given `own` = V and `first` = V_1: the gradient in the
/// `columns` of `dx` becomes that of V, `dfirst` that of V_1, and those of a and b are added to
/// `dweights`.
///
/// Frozen weights pass `None`. `workspace` needs the numbers that [`backward_workspace`] says for
/// rows of 2, whatever they hold.
///
/// [`backward_workspace`]: crate::cpu::norm::backward_workspace
pub fn value_residual_backward<T: Element>(
    cpu: &Cpu,
    columns: HeadColumns,
    weights: [f32; 2],
    [own, first]: [&[T]; 2],
    dx: &mut [T],
    dfirst: &mut [T],
    dweights: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let (rows, width) = (columns.rows(dx.len()), columns.heads * columns.head_dim);
    assert_eq!([own.len(), first.len(), dfirst.len()], [rows * width; 3], "lengths of values and their gradient");
    let bytes = 5 * size_of_val(own);
    let (dx, dfirst) = (Shares::new(dx), Shares::new(dfirst));
    over_row_blocks(cpu, rows, 2, bytes, [dweights, None], workspace, |range, [sums, _]| {
        let span = range.start * width..range.end * width;
        // SAFETY: row blocks do not overlap.
        let dx = unsafe { dx.part(range.start * columns.row_stride..range.end * columns.row_stride) };
        // SAFETY: as above.
        let dfirst = unsafe { dfirst.part(span.clone()) };
        mixed_rows_backward(cpu.isa, columns, weights, [&own[span.clone()], &first[span]], dx, dfirst, sums);
    });
}

simd_fn! {
    fn mixed_rows_backward[T: Element](
        s: S, columns: HeadColumns, weights: [f32; 2], values: [&[T]; 2], dx: &mut [T], dfirst: &mut [T], sums: Option<&mut [f32]>,
    ) {
        let width = columns.heads * columns.head_dim;
        let [a, b] = weights.map(|weight| s.splat(weight));
        let [own, first] = values.map(|values| values.chunks_exact(width));
        let mut acc = [s.splat(0.0); 2];
        let rows = dx.chunks_exact_mut(columns.row_stride).zip(dfirst.chunks_exact_mut(width));
        for ((row, dfirst), (own, first)) in rows.zip(own.zip(first)) {
            let dx = &mut row[columns.first..columns.first + width];
            let mut i = 0;
            while i < width {
                let d = load_at(s, dx, i, 0.0);
                acc[0] = s.fma(d, load_at(s, own, i, 0.0), acc[0]);
                acc[1] = s.fma(d, load_at(s, first, i, 0.0), acc[1]);
                store_at(s, s.mul(b, d), dfirst, i);
                store_at(s, s.mul(a, d), dx, i);
                i += S::LANES;
            }
        }
        if let Some(sums) = sums {
            for (sum, acc) in sums.iter_mut().zip(acc) {
                *sum += s.reduce_sum(acc);
            }
        }
    }
}
