//! The vector form's building blocks: packing, small products, softmax blocks. Each is compiled for
//! portable, AVX2 and AVX-512.
//!
//! Blocks are f32: `QUERIES` queries along the lanes, `KEYS` keys down. All products go through
//! [`product`], `C += A B` with `B` and `C` row-major and `A` read as scalars in either direction:
//!
//! | product | A | B | C |
//! |---|---|---|---|
//! | S^T = K Q^T, dP^T = V dO^T | `[keys, d]` | `[d, queries]` | `[keys, queries]` |
//! | O^T += V^T P^T, dQ^T += K^T dS^T | `[keys, d]`, columns | `[keys, queries]` | `[d, queries]` |
//! | dV += P^T dO, dK += dS^T Q | `[keys, queries]` | `[queries, d]` | `[keys, d]` |

use super::plan::Segment;
use super::scratch::lines;
use super::{AttentionSpec, Rows, RowsMut};
use crate::cpu::Isa;
use crate::cpu::simd::Simd;
use crate::dtype::Element;
use crate::simd_fn;
use std::ops::Range;

/// Queries of a block: four vectors of AVX-512, the widest register tile of [`product`].
pub(super) const QUERIES: usize = 64;
/// Keys of a block: scores of 64 x 64 floats are 16 KiB, a third of the smallest L1 of CPUs with
/// AVX-512.
pub(super) const KEYS: usize = 64;
/// Queries or keys that are widened at a time: four blocks, 64 KiB of rows of 64 floats.
pub(super) const SUPER: usize = 256;
/// Lanes are filled in whole AVX-512 vectors on every rung.
pub(super) const LANES_MAX: usize = 16;

/// The value of a masked score. It is far below [`FLOOR`], so that its exponential is 0 even if a
/// query has seen no key yet.
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
    /// `C = A B` or `C += A B`: `m` rows, `n` columns (a multiple of [`LANES_MAX`]), `k` terms.
    /// Rows of `b` are `ldb` apart, of `c` `ldc`. Register tiles of 4 rows by 4 vectors (AVX-512)
    /// or 2 vectors (16-register sets): 16 or 8 sums hide the latency of the multiply-add, and 4 +
    /// 4 or 2 + 4 loads feed them. Narrower ends take taller tiles.
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
        fn columns<S: Simd, const M: usize, const V: usize>(
            s: S, m: usize, k: usize, a: Left<'_>, b: &[f32], ldb: usize, c: &mut [f32], ldc: usize, add: bool,
        ) {
            let whole = m / M * M;
            for i in (0..whole).step_by(M) {
                tile::<S, M, V>(s, k, a, i, b, ldb, &mut c[i * ldc..], ldc, add);
            }
            for i in whole..m {
                tile::<S, 1, V>(s, k, a, i, b, ldb, &mut c[i * ldc..], ldc, add);
            }
        }
        debug_assert!(n.is_multiple_of(LANES_MAX));
        let mut j = 0;
        while j < n {
            let (b, c) = (&b[j..], &mut c[j..]);
            if S::LANES == 8 {
                columns::<S, 4, 2>(s, m, k, a, b, ldb, c, ldc, add);
                j += 16;
                continue;
            }
            match (n - j) / 16 {
                1 => columns::<S, 8, 1>(s, m, k, a, b, ldb, c, ldc, add),
                2 => columns::<S, 8, 2>(s, m, k, a, b, ldb, c, ldc, add),
                3 => columns::<S, 4, 3>(s, m, k, a, b, ldb, c, ldc, add),
                _ => columns::<S, 4, 4>(s, m, k, a, b, ldb, c, ldc, add),
            }
            j += 64;
        }
    }
}

simd_fn! {
    /// Columns `cols` of the rows `rows` of `x`, widened and multiplied by `scale`, to rows
    /// `lines(cols.len())` apart, whose rest is 0.
    pub(super) fn widen[T: Element](s: S, x: Rows<'_, T>, rows: Range<usize>, cols: Range<usize>, scale: f32, y: &mut [f32]) {
        let scale = s.splat(scale);
        let (whole, ld) = (cols.len() / S::LANES * S::LANES, lines(cols.len()));
        assert!(y.len() >= rows.len() * ld);
        for (x, y) in x.walk(rows, cols).zip(y.chunks_exact_mut(ld)) {
            for (x, y) in x.chunks_exact(S::LANES).zip(y.chunks_exact_mut(S::LANES)) {
                s.store(s.mul(T::load(s, x), scale), y);
            }
            if whole < ld {
                s.store(s.mul(T::load_partial(s, &x[whole..], 0.0), scale), &mut y[whole..]);
                // A line is at most two vectors.
                if whole + S::LANES < ld {
                    s.store(s.splat(0.0), &mut y[whole + S::LANES..]);
                }
            }
        }
    }
}

simd_fn! {
    /// Rounds the first `cols.len()` elements of rows `lines(cols.len())` apart, times `scale`, to
    /// columns `cols` of the rows `rows` of `y`.
    ///
    /// The caller's task must be the only user of those elements.
    pub(super) fn narrow[T: Element](s: S, x: &[f32], scale: f32, y: &RowsMut<'_, T>, rows: Range<usize>, cols: Range<usize>) {
        let scale = s.splat(scale);
        let (whole, ld) = (cols.len() / S::LANES * S::LANES, lines(cols.len()));
        assert!(x.len() >= rows.len() * ld);
        // SAFETY: tasks own disjoint rows or heads of their outputs.
        for (y, x) in unsafe { y.walk(rows, cols) }.zip(x.chunks_exact(ld)) {
            for (x, y) in x.chunks_exact(S::LANES).zip(y.chunks_exact_mut(S::LANES)) {
                T::store(s, s.mul(s.load(x), scale), y);
            }
            if whole < y.len() {
                T::store_partial(s, s.mul(s.load(&x[whole..]), scale), &mut y[whole..]);
            }
        }
    }
}

/// `y[c * y_ld + r] = x[r * x_ld + c]` for `r < rows` and `c < cols`, both rounded up to multiples
/// of 16: buffers are padded. By blocks of 16 x 16, in registers where AVX-512 has enough of them.
pub(super) fn transpose(isa: Isa, x: &[f32], x_ld: usize, rows: usize, cols: usize, y: &mut [f32], y_ld: usize) {
    for r in (0..rows).step_by(16) {
        for c in (0..cols).step_by(16) {
            let (x, y) = (&x[r * x_ld + c..][..15 * x_ld + 16], &mut y[c * y_ld + r..][..15 * y_ld + 16]);
            #[cfg(target_arch = "x86_64")]
            if isa >= Isa::Avx512 {
                // SAFETY: no rung above what the CPU has reaches the vector form.
                unsafe { super::transpose::block(x, x_ld, y, y_ld) };
                continue;
            }
            let _ = isa;
            for j in 0..16 {
                for i in 0..16 {
                    y[j * y_ld + i] = x[i * x_ld + j];
                }
            }
        }
    }
}

/// Some keys of a block and the lanes that must be worked out for them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Strip {
    /// Keys, from the block's first.
    pub keys: Range<usize>,
    /// Lanes, in whole multiples of [`LANES_MAX`].
    pub lanes: Range<usize>,
}

/// A block of pairs cut so that little of what is masked is worked out: on the diagonal and at the
/// window's edge strips of 16 keys, each with the lanes from the first to the last query that sees
/// any of them.
pub(super) struct Strips {
    strips: [Strip; KEYS / LANES_MAX],
    count: usize,
}

impl Strips {
    pub(super) fn of(spec: &AttentionSpec, segment: &Segment, queries: &Range<usize>, keys: &Range<usize>) -> Strips {
        let lanes = queries.len().next_multiple_of(LANES_MAX);
        let mut strips: [Strip; KEYS / LANES_MAX] = Default::default();
        if segment.all_visible(spec, queries, keys) {
            strips[0] = Strip { keys: 0..keys.len(), lanes: 0..lanes };
            return Strips { strips, count: 1 };
        }
        let mut count = 0;
        for first in (0..keys.len()).step_by(LANES_MAX) {
            let end = keys.len().min(first + LANES_MAX);
            // The lane at position p sees keys in (p - window, p]: some of these from p = keys'
            // first to p = last + window - 1.
            let lane = |position: isize| position.clamp(0, queries.len() as isize) as usize;
            let level = keys.start as isize - segment.position(queries.start);
            let from = lane(first as isize + level);
            let to = spec
                .window
                .map_or(queries.len(), |window| lane((end as isize + level).saturating_add_unsigned(window) - 1));
            let from = from / LANES_MAX * LANES_MAX;
            let to = if from < to { to.next_multiple_of(LANES_MAX) } else { from };
            strips[count] = Strip { keys: first..end, lanes: from..to };
            count += 1;
        }
        Strips { strips, count }
    }

    /// The strips that have lanes.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Strip> {
        self.strips[..self.count].iter().filter(|strip| !strip.lanes.is_empty())
    }

    /// The keys that were worked out for lane `lane`; the strips of a lane follow each other.
    pub(super) fn keys_of(&self, lane: usize) -> Range<usize> {
        let mut strips = self.iter().filter(|strip| strip.lanes.contains(&lane));
        let Some(first) = strips.next() else { return 0..0 };
        first.keys.start..strips.last().unwrap_or(first).keys.end
    }
}

/// `2^x` for `x` up to 0 and a little above; exactly 0 from -126 down; NaN stays NaN. Relative
/// error below 2e-7.
///
/// `2^x = 2^n 2^r` with `n` the nearest integer, and on `|r| <= 1/2` the minimax polynomial of
/// degree 5 in relative error (7.5e-8, found by Remez' exchange).
#[inline(always)]
fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    // In this order of operands the clamp hands a NaN on.
    let x = s.max(s.splat(-126.0), x);
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(EXP2[5]);
    for c in EXP2[..5].iter().rev() {
        p = s.fma(p, r, s.splat(*c));
    }
    // What is subtracted vanishes beside all but the smallest results, and turns the clamped ones,
    // where r = 0, into zeros: a comparison less, and hardly ever a subnormal number.
    s.fma(p, s.pow2(n), s.splat(-EXP2[0] * f32::MIN_POSITIVE))
}

/// The coefficients of [`exp2`], the constant first.
const EXP2: [f32; 6] = [1.0000001, 0.69314694, 0.2402212, 0.05550713, 0.009675541, 0.0013276472];

/// The masked pairs of a block. It is made only for blocks that have some.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    /// The position of lane 0, plus one half so that comparisons of positions held as floats are
    /// strict.
    first: f32,
    /// The local key of row 0.
    key: f32,
    /// The window, or infinity. The upper bound of the view is `position`, or infinity when not
    /// causal.
    window: f32,
}

impl Mask {
    /// The mask of local queries `queries` against local keys `keys`, or `None` when all is
    /// visible. Positions are exact as floats up to 2^22, a length far above what attention is
    /// computed for on a CPU.
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

    /// Keys below the first and above the second are visible, for the lanes from `lane` on.
    #[inline(always)]
    fn lanes<S: Simd>(&self, s: S, lane: usize) -> (S::F, S::F) {
        let position = s.add(s.splat(self.first), s.load(&IOTA[lane..]));
        (position, s.sub(position, s.splat(self.window)))
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
    /// Factor of earlier sums, by the last block.
    pub decay: &'a mut [f32],
}

simd_fn! {
    /// Replaces the scores, in units of log2 e (rows `QUERIES` apart), by their exponentials
    /// relative to the running maximum, and brings the statistics up to date. Returns whether any
    /// earlier sum must be rescaled by `decay`.
    pub(super) fn softmax_block(s: S, strips: &Strips, lanes: usize, mask: Option<Mask>, scores: &mut [f32], state: Statistics<'_>) -> bool {
        let mut rescale = false;
        for lane in (0..lanes).step_by(S::LANES) {
            let keys = strips.keys_of(lane);
            let old = s.load(&state.max[lane..]);
            // In this order of operands a NaN does not become the maximum; its exponential is one,
            // and stays.
            let mut max = old;
            if let Some(mask) = mask {
                let (position, before) = mask.lanes(s, lane);
                for k in keys.clone() {
                    let key = s.splat(mask.key + k as f32);
                    let x = s.load(&scores[k * QUERIES + lane..]);
                    let x = s.select(s.gt(position, key), x, s.splat(MASKED));
                    let x = s.select(s.gt(key, before), x, s.splat(MASKED));
                    max = s.max(x, max);
                    s.store(x, &mut scores[k * QUERIES + lane..]);
                }
            } else {
                for k in keys.clone() {
                    max = s.max(s.load(&scores[k * QUERIES + lane..]), max);
                }
            }
            let decay = exp2(s, s.sub(old, max));
            let mut sum = s.mul(s.load(&state.sum[lane..]), decay);
            for k in keys {
                let p = exp2(s, s.sub(s.load(&scores[k * QUERIES + lane..]), max));
                sum = s.add(sum, p);
                s.store(p, &mut scores[k * QUERIES + lane..]);
            }
            // A NaN needs no rescaling: it has already reached `sum`.
            rescale |= s.reduce_max(s.sub(max, old)) > 0.0;
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
    /// Replaces scores by probabilities `2^(score - lse)` (both in units of log2 e), and `dp` by
    /// `dS = P (dP - delta)`; rows are `QUERIES` apart.
    pub(super) fn gradient_block(s: S, strips: &Strips, lanes: usize, mask: Option<Mask>, lse: &[f32], delta: &[f32], scores: &mut [f32], dp: &mut [f32]) {
        let zero = s.splat(0.0);
        for lane in (0..lanes).step_by(S::LANES) {
            let (lse, delta) = (s.load(&lse[lane..]), s.load(&delta[lane..]));
            for k in strips.keys_of(lane) {
                let mut p = exp2(s, s.sub(s.load(&scores[k * QUERIES + lane..]), lse));
                if let Some(mask) = mask {
                    let (position, before) = mask.lanes(s, lane);
                    let key = s.splat(mask.key + k as f32);
                    p = s.select(s.gt(position, key), p, zero);
                    p = s.select(s.gt(key, before), p, zero);
                }
                s.store(p, &mut scores[k * QUERIES + lane..]);
                let dp = &mut dp[k * QUERIES + lane..];
                s.store(s.mul(p, s.sub(s.load(dp), delta)), dp);
            }
        }
    }
}

simd_fn! {
    /// The dot products of rows of `a`, widened by [`widen`], with columns `cols` of the rows
    /// `rows` of `b`.
    pub(super) fn row_dots[T: Element](s: S, a: &[f32], b: Rows<'_, T>, rows: Range<usize>, cols: Range<usize>, dots: &mut [f32]) {
        let (whole, ld) = (cols.len() / S::LANES * S::LANES, lines(cols.len()));
        assert!(a.len() >= rows.len() * ld && dots.len() >= rows.len());
        for ((b, a), dot) in b.walk(rows, cols).zip(a.chunks_exact(ld)).zip(dots) {
            let mut sum = s.splat(0.0);
            for (a, b) in a.chunks_exact(S::LANES).zip(b.chunks_exact(S::LANES)) {
                sum = s.fma(s.load(a), T::load(s, b), sum);
            }
            if whole < b.len() {
                // What follows the row in `a` is 0.
                sum = s.fma(s.load(&a[whole..]), T::load_partial(s, &b[whole..], 0.0), sum);
            }
            *dot = s.reduce_sum(sum);
        }
    }
}
