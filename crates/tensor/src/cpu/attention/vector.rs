//! The vector form's building blocks: packing, small products, softmax blocks. Each is compiled for portable, AVX2 and AVX-512.
//!
//! Blocks are f32: `QUERIES` queries along the lanes, `KEYS` keys down. Everything that is multiplied goes through
//! [`product`], `C += A B` with `B` and `C` row-major and `A` read as scalars in either direction:
//!
//! | product | A | B | C |
//! |---|---|---|---|
//! | S^T = K Q^T, dP^T = V dO^T | `[keys, d]` | `[d, queries]` | `[keys, queries]` |
//! | O^T += V^T P^T, dQ^T += K^T dS^T | `[keys, d]` read by columns | `[keys, queries]` | `[d, queries]` |
//! | dV += P^T dO, dK += dS^T Q | `[keys, queries]` | `[queries, d]` | `[keys, d]` |

use super::plan::Segment;
use super::{AttentionSpec, Rows, RowsMut};
use crate::cpu::simd::Simd;
use crate::dtype::Element;
use crate::simd_fn;
use std::ops::Range;

/// Queries of a block: four vectors of AVX-512, the widest register tile of [`product`].
pub(super) const QUERIES: usize = 64;
/// Keys of a block: scores of 64 x 64 floats are 16 KiB, a third of the smallest L1 of CPUs with AVX-512.
pub(super) const KEYS: usize = 64;
/// Lanes are filled in whole AVX-512 vectors on every rung.
pub(super) const LANES_MAX: usize = 16;

/// What a masked score becomes. Far below [`FLOOR`], so that its exponential is 0 even when a query saw no key yet.
pub(super) const MASKED: f32 = -1e30;
/// Where running maxima start. Finite, so that no difference of infinities arises.
pub(super) const FLOOR: f32 = -1e29;

/// The left factor of [`product`]: element `(i, k)` is `data[i * row + k * col]`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

simd_fn! {
    /// `C = A B` or `C += A B`: `m` rows, `n` columns (a multiple of [`LANES_MAX`]), `k` terms. Rows of `b` are `ldb` apart, of
    /// `c` `ldc`. Register tiles of 4 rows by 4 vectors (AVX-512) or 2 vectors (16-register sets): 16 or 8 sums hide the
    /// latency of the multiply-add, 4 + 4 or 2 + 4 loads feed them.
    pub(super) fn product(s: S, m: usize, n: usize, k: usize, a: Left<'_>, b: &[f32], ldb: usize, c: &mut [f32], ldc: usize, add: bool) {
        #[inline(always)]
        fn tile<S: Simd, const M: usize, const V: usize>(
            s: S, k: usize, a: Left<'_>, i: usize, b: &[f32], ldb: usize, c: &mut [f32], ldc: usize, add: bool,
        ) {
            let mut sum = [[s.splat(0.0); V]; M];
            if add {
                for (r, sum) in sum.iter_mut().enumerate() {
                    let row = &c[r * ldc..][..V * S::LANES];
                    for (v, sum) in sum.iter_mut().enumerate() {
                        *sum = s.load(&row[v * S::LANES..]);
                    }
                }
            }
            if k > 0 {
                // One check for the whole loop, so that it carries none.
                assert!(a.data.len() > (i + M - 1) * a.row + (k - 1) * a.col && b.len() >= (k - 1) * ldb + V * S::LANES);
            }
            for t in 0..k {
                let mut right = [s.splat(0.0); V];
                for (v, right) in right.iter_mut().enumerate() {
                    // SAFETY: `t < k` and the assertion above.
                    *right = s.load(unsafe { b.get_unchecked(t * ldb + v * S::LANES..t * ldb + (v + 1) * S::LANES) });
                }
                for (r, sum) in sum.iter_mut().enumerate() {
                    // SAFETY: `r < M`, `t < k` and the assertion above.
                    let left = s.splat(unsafe { *a.data.get_unchecked((i + r) * a.row + t * a.col) });
                    for (sum, right) in sum.iter_mut().zip(&right) {
                        *sum = s.fma(left, *right, *sum);
                    }
                }
            }
            for (r, sum) in sum.iter().enumerate() {
                let row = &mut c[r * ldc..][..V * S::LANES];
                for (v, sum) in sum.iter().enumerate() {
                    s.store(*sum, &mut row[v * S::LANES..]);
                }
            }
        }
        #[inline(always)]
        fn columns<S: Simd, const V: usize>(
            s: S, m: usize, k: usize, a: Left<'_>, b: &[f32], ldb: usize, c: &mut [f32], ldc: usize, add: bool,
        ) {
            let mut i = 0;
            while i + 4 <= m {
                tile::<S, 4, V>(s, k, a, i, b, ldb, &mut c[i * ldc..], ldc, add);
                i += 4;
            }
            while i < m {
                tile::<S, 1, V>(s, k, a, i, b, ldb, &mut c[i * ldc..], ldc, add);
                i += 1;
            }
        }
        debug_assert!(n.is_multiple_of(LANES_MAX));
        let wide = if S::LANES == 16 { 4 * S::LANES } else { 2 * S::LANES };
        let mut j = 0;
        while j + wide <= n {
            if S::LANES == 16 {
                columns::<S, 4>(s, m, k, a, &b[j..], ldb, &mut c[j..], ldc, add);
            } else {
                columns::<S, 2>(s, m, k, a, &b[j..], ldb, &mut c[j..], ldc, add);
            }
            j += wide;
        }
        while j < n {
            columns::<S, 1>(s, m, k, a, &b[j..], ldb, &mut c[j..], ldc, add);
            j += S::LANES;
        }
    }
}

simd_fn! {
    /// Columns `cols` of the rows `rows` of `x`, widened and multiplied by `scale`, to rows `ld` apart; the rest of a row is 0.
    pub(super) fn widen[T: Element](s: S, x: Rows<'_, T>, rows: Range<usize>, cols: Range<usize>, scale: f32, y: &mut [f32], ld: usize) {
        let scale = s.splat(scale);
        for (row, y) in rows.zip(y.chunks_exact_mut(ld)) {
            let x = &x.row(row)[cols.clone()];
            let whole = x.len() / S::LANES * S::LANES;
            for c in (0..whole).step_by(S::LANES) {
                s.store(s.mul(T::load(s, &x[c..]), scale), &mut y[c..]);
            }
            let mut c = whole;
            while c < ld {
                let tail = if c < x.len() { &x[c..] } else { &[] };
                let v = s.mul(T::load_partial(s, tail, 0.0), scale);
                if c + S::LANES <= ld { s.store(v, &mut y[c..]) } else { f32::store_partial(s, v, &mut y[c..]) }
                c += S::LANES;
            }
        }
    }
}

simd_fn! {
    /// Rounds the first `cols.len()` elements of rows `ld` apart, times `scale`, to columns `cols` of the rows `rows` of `y`.
    ///
    /// The caller's task must be the only writer of those elements.
    pub(super) fn narrow[T: Element](s: S, x: &[f32], ld: usize, scale: f32, y: &RowsMut<'_, T>, rows: Range<usize>, cols: Range<usize>) {
        let scale = s.splat(scale);
        for (row, x) in rows.zip(x.chunks_exact(ld)) {
            // SAFETY: tasks own disjoint rows or heads of their outputs, and rows are visited one after another.
            let y = unsafe { y.part(row, cols.clone()) };
            let mut c = 0;
            while c + S::LANES <= y.len() {
                T::store(s, s.mul(s.load(&x[c..]), scale), &mut y[c..]);
                c += S::LANES;
            }
            if c < y.len() {
                T::store_partial(s, s.mul(f32::load_partial(s, &x[c..], 0.0), scale), &mut y[c..]);
            }
        }
    }
}

/// `y[c * y_ld + r] = x[r * x_ld + c]` for `r < rows`, `c < cols`, in blocks that stay in L1.
pub(super) fn transpose(x: &[f32], x_ld: usize, rows: usize, cols: usize, y: &mut [f32], y_ld: usize) {
    for c0 in (0..cols).step_by(16) {
        for r in 0..rows {
            for (c, x) in (c0..cols.min(c0 + 16)).zip(&x[r * x_ld + c0..]) {
                y[c * y_ld + r] = *x;
            }
        }
    }
}

/// Which pairs of a block are masked; made only for blocks that have some.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    /// The position of lane 0, plus one half so that comparisons of positions held as floats are strict.
    first: f32,
    /// The local key of row 0.
    key: f32,
    /// The window, or infinity. The upper bound of the view is `position`, or infinity when not causal.
    window: f32,
}

impl Mask {
    /// The mask of local queries `queries` against local keys `keys`, or `None` when all is visible. Positions are exact as
    /// floats up to 2^22, a length far above what attention is computed for on a CPU.
    pub(super) fn of(
        spec: &AttentionSpec,
        segment: &Segment,
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) -> Option<Mask> {
        if !spec.causal || segment.all_visible(spec, queries, keys) {
            return None;
        }
        Some(Mask {
            first: segment.position(queries.start) as f32 + 0.5,
            key: keys.start as f32,
            window: spec.window.map_or(f32::INFINITY, |window| window as f32),
        })
    }
}

const IOTA: [f32; 64] = {
    let mut iota = [0.0; 64];
    let mut i = 0;
    while i < 64 {
        iota[i] = i as f32;
        i += 1;
    }
    iota
};

/// The running softmax of a block of queries.
pub(super) struct Statistics<'a> {
    /// The largest score so far.
    pub max: &'a mut [f32],
    /// The sum of the exponentials of scores minus `max`.
    pub sum: &'a mut [f32],
    /// What the last block multiplies earlier sums by.
    pub decay: &'a mut [f32],
}

simd_fn! {
    /// Replaces the scores `[keys, lanes]` (rows `QUERIES` apart) by their exponentials relative to the running maximum, and
    /// brings the statistics up to date. Returns whether any earlier sum must be rescaled by `decay`.
    pub(super) fn softmax_block(s: S, keys: usize, lanes: usize, mask: Option<Mask>, scores: &mut [f32], state: Statistics<'_>) -> bool {
        let mut rescale = false;
        let one = s.splat(1.0);
        for lane in (0..lanes).step_by(S::LANES) {
            if let Some(mask) = mask {
                let position = s.add(s.splat(mask.first), s.load(&IOTA[lane..]));
                let before = s.sub(position, s.splat(mask.window));
                for k in 0..keys {
                    let key = s.splat(mask.key + k as f32);
                    let x = s.load(&scores[k * QUERIES + lane..]);
                    let x = s.select(s.gt(position, key), x, s.splat(MASKED));
                    let x = s.select(s.gt(key, before), x, s.splat(MASKED));
                    s.store(x, &mut scores[k * QUERIES + lane..]);
                }
            }
            let old = s.load(&state.max[lane..]);
            let mut max = old;
            for k in 0..keys {
                max = s.max(max, s.load(&scores[k * QUERIES + lane..]));
            }
            let decay = s.exp(s.sub(old, max));
            let mut sum = s.mul(s.load(&state.sum[lane..]), decay);
            for k in 0..keys {
                let p = s.exp(s.sub(s.load(&scores[k * QUERIES + lane..]), max));
                sum = s.add(sum, p);
                s.store(p, &mut scores[k * QUERIES + lane..]);
            }
            // Not `!(decay >= 1)`: a NaN has already reached `sum`.
            rescale |= s.reduce_max(s.sub(one, decay)) > 0.0;
            s.store(max, &mut state.max[lane..]);
            s.store(sum, &mut state.sum[lane..]);
            s.store(decay, &mut state.decay[lane..]);
        }
        rescale
    }
}

simd_fn! {
    /// Multiplies each of the rows (`QUERIES` apart) by `factor`, lane by lane.
    pub(super) fn scale_lanes(s: S, rows: usize, lanes: usize, factor: &[f32], x: &mut [f32]) {
        for lane in (0..lanes).step_by(S::LANES) {
            let factor = s.load(&factor[lane..]);
            for row in 0..rows {
                let x = &mut x[row * QUERIES + lane..];
                s.store(s.mul(s.load(x), factor), x);
            }
        }
    }
}

simd_fn! {
    /// Replaces scores by probabilities `exp(score - lse)`, and `dp` by `dS = P (dP - delta)`; rows are `QUERIES` apart.
    pub(super) fn gradient_block(s: S, keys: usize, lanes: usize, mask: Option<Mask>, lse: &[f32], delta: &[f32], scores: &mut [f32], dp: &mut [f32]) {
        let zero = s.splat(0.0);
        for lane in (0..lanes).step_by(S::LANES) {
            let (lse, delta) = (s.load(&lse[lane..]), s.load(&delta[lane..]));
            for k in 0..keys {
                let mut p = s.exp(s.sub(s.load(&scores[k * QUERIES + lane..]), lse));
                if let Some(mask) = mask {
                    let position = s.add(s.splat(mask.first), s.load(&IOTA[lane..]));
                    let key = s.splat(mask.key + k as f32);
                    p = s.select(s.gt(position, key), p, zero);
                    p = s.select(s.gt(key, s.sub(position, s.splat(mask.window))), p, zero);
                }
                s.store(p, &mut scores[k * QUERIES + lane..]);
                let dp = &mut dp[k * QUERIES + lane..];
                s.store(s.mul(p, s.sub(s.load(dp), delta)), dp);
            }
        }
    }
}

simd_fn! {
    /// `sum(a * b)` over columns `cols` of row `row` of both.
    pub(super) fn row_dot[T: Element](s: S, a: Rows<'_, T>, b: Rows<'_, T>, row: usize, cols: Range<usize>) -> f32 {
        let (a, b) = (&a.row(row)[cols.clone()], &b.row(row)[cols]);
        let mut sum = s.splat(0.0);
        let mut c = 0;
        while c + S::LANES <= a.len() {
            sum = s.fma(T::load(s, &a[c..]), T::load(s, &b[c..]), sum);
            c += S::LANES;
        }
        if c < a.len() {
            sum = s.fma(T::load_partial(s, &a[c..], 0.0), T::load_partial(s, &b[c..], 0.0), sum);
        }
        s.reduce_sum(sum)
    }
}
