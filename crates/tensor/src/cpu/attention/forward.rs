//! Forward in the vector form: f32 blocks of 64 queries by 64 keys. See [`vector`](super::vector) for the products.

use super::plan::{Segment, Task};
use super::scratch::{carve, lines, total, with};
use super::vector::{
    FLOOR, KEYS, LANES_MAX, Left, Mask, QUERIES, Statistics, narrow, product, scale_lanes, softmax_block, transpose,
    widen,
};
use super::{AttentionSpec, Forward};
use crate::dtype::Element;
use crate::simd_fn;

/// The parts of the workspace, in floats: a widened key or value block or query block; Q^T; O^T; S^T; three statistics.
fn parts(spec: &AttentionSpec) -> [usize; 7] {
    let (d, row) = (spec.head_dim, lines(spec.head_dim));
    [KEYS.max(QUERIES) * row, d * QUERIES, d * QUERIES, KEYS * QUERIES, QUERIES, QUERIES, QUERIES]
}

/// Floats of workspace of a task.
pub(super) fn floats(spec: &AttentionSpec) -> usize {
    total(&parts(spec))
}

/// One chunk of at most `QUERIES` queries of the heads of one key/value head.
pub(super) fn task<T: Element>(job: &Forward<'_, T>, task: &Task) {
    with(floats(job.spec), |space| {
        for head in 0..job.spec.group() {
            for start in task.chunk.clone().step_by(QUERIES) {
                let queries = start..task.chunk.end.min(start + QUERIES);
                block(job, task, task.kv_head * job.spec.group() + head, queries, space);
            }
        }
    });
}

fn block<T: Element>(
    job: &Forward<'_, T>,
    task: &Task,
    head: usize,
    queries: std::ops::Range<usize>,
    space: &mut [f32],
) {
    let (isa, spec, segment) = (job.isa, job.spec, &task.segment);
    let (d, row) = (spec.head_dim, lines(spec.head_dim));
    let [wide, q_t, o_t, scores, max, sum, decay] = carve(space, parts(spec));
    let lanes = queries.len().next_multiple_of(LANES_MAX);
    let q_cols = head * d..(head + 1) * d;
    let kv_cols = task.kv_head * d..(task.kv_head + 1) * d;
    let q_rows = segment.queries.start + queries.start..segment.queries.start + queries.end;

    widen(isa, job.q, q_rows.clone(), q_cols.clone(), spec.scale, wide, row);
    // Lanes without a query hold zeros: their scores are 0 and nobody reads what becomes of them.
    wide[queries.len() * row..lanes * row].fill(0.0);
    transpose(wide, row, lanes, d, q_t, QUERIES);
    o_t.fill(0.0);
    max.fill(FLOOR);
    sum.fill(0.0);

    let visible = segment.visible_to_any(spec, &queries);
    // Key blocks lie on a grid from the segment's start, so that a query's arithmetic does not depend on its chunk.
    for start in (visible.start / KEYS * KEYS..visible.end).step_by(KEYS) {
        let keys = start..visible.end.min(start + KEYS);
        let rows = segment.keys.start + keys.start..segment.keys.start + keys.end;
        widen(isa, job.k, rows.clone(), kv_cols.clone(), 1.0, wide, row);
        let by_key = Left { data: wide, row, col: 1 };
        product(isa, keys.len(), lanes, d, by_key, q_t, QUERIES, scores, QUERIES, false);
        let mask = Mask::of(spec, segment, &queries, &keys);
        if softmax_block(isa, keys.len(), lanes, mask, scores, Statistics { max, sum, decay }) {
            scale_lanes(isa, d, lanes, decay, o_t);
        }
        widen(isa, job.v, rows, kv_cols.clone(), 1.0, wide, row);
        let by_column = Left { data: wide, row: 1, col: row };
        product(isa, d, lanes, keys.len(), by_column, scores, QUERIES, o_t, QUERIES, true);
    }

    // SAFETY: this task alone writes these queries' statistics of this head.
    let lse = unsafe { job.lse.part(head * job.q.rows() + q_rows.start..head * job.q.rows() + q_rows.end) };
    for (i, lse) in lse.iter_mut().enumerate() {
        let seen = sum[i] != 0.0;
        *lse = if seen { max[i] + sum[i].ln() } else { f32::NEG_INFINITY };
        decay[i] = if seen { sum[i].recip() } else { 0.0 };
    }
    decay[queries.len()..].fill(0.0);
    scale_lanes(isa, d, lanes, decay, o_t);
    transpose(o_t, QUERIES, d, queries.len(), wide, row);
    narrow(isa, wide, row, 1.0, &job.out, q_rows, q_cols);
}

/// Local query `i` of a segment over all keys that it sees, for the query heads of `kv_head`: two passes over keys and
/// values in the order that they lie in memory, which is all that one query's attention costs.
pub(super) fn one_query<T: Element>(job: &Forward<'_, T>, segment: &Segment, i: usize, kv_head: usize) {
    let (spec, d) = (job.spec, job.spec.head_dim);
    let keys = segment.visible(spec, i);
    let (group, row) = (spec.group(), lines(d));
    with(total(&[group * row, group * row, group * lines(keys.len())]), |space| {
        let [q, o, scores] = carve(space, [group * row, group * row, group * lines(keys.len())]);
        for head in 0..group {
            let first = (kv_head * group + head) * d;
            let query = segment.queries.start + i..segment.queries.start + i + 1;
            widen(job.isa, job.q, query, first..first + d, spec.scale, &mut q[head * row..(head + 1) * row], row);
        }
        row_attention(job.isa, job, segment.keys.start + keys.start, keys.len(), kv_head, q, o, scores);
        for head in 0..group {
            let first = (kv_head * group + head) * d;
            let query = segment.queries.start + i..segment.queries.start + i + 1;
            narrow(job.isa, &o[head * row..(head + 1) * row], row, 1.0, &job.out, query, first..first + d);
        }
    });
}

simd_fn! {
    /// `o = softmax(q K^T) V` for the rows of `q`, one per head of the group, over `count` keys from row `first`.
    fn row_attention[T: Element](s: S, job: &Forward<'_, T>, first: usize, count: usize, kv_head: usize, q: &[f32], o: &mut [f32], scores: &mut [f32]) {
        let (d, row, stride) = (job.spec.head_dim, lines(job.spec.head_dim), lines(count));
        let cols = kv_head * d..(kv_head + 1) * d;
        let whole = d / S::LANES * S::LANES;
        for key in 0..count {
            let k = &job.k.row(first + key)[cols.clone()];
            for (q, scores) in q.chunks_exact(row).zip(scores.chunks_exact_mut(stride)) {
                let mut sum = s.splat(0.0);
                for c in (0..whole).step_by(S::LANES) {
                    sum = s.fma(T::load(s, &k[c..]), s.load(&q[c..]), sum);
                }
                if whole < d {
                    sum = s.fma(T::load_partial(s, &k[whole..], 0.0), f32::load_partial(s, &q[whole..], 0.0), sum);
                }
                scores[key] = s.reduce_sum(sum);
            }
        }
        o.fill(0.0);
        if count == 0 {
            return;
        }
        for (o, scores) in o.chunks_exact_mut(row).zip(scores.chunks_exact_mut(stride)) {
            scores[count..].fill(MASKED_TAIL);
            let mut max = s.splat(FLOOR);
            for x in scores.chunks_exact(S::LANES) {
                max = s.max(max, s.load(x));
            }
            let max = s.splat(s.reduce_max(max));
            let mut sum = s.splat(0.0);
            for x in scores.chunks_exact_mut(S::LANES) {
                let p = s.exp(s.sub(s.load(x), max));
                sum = s.add(sum, p);
                s.store(p, x);
            }
            let inverse = s.splat(s.reduce_sum(sum).recip());
            for x in scores.chunks_exact_mut(S::LANES) {
                s.store(s.mul(s.load(x), inverse), x);
            }
            for key in 0..count {
                let v = &job.v.row(first + key)[cols.clone()];
                let p = s.splat(scores[key]);
                for c in (0..whole).step_by(S::LANES) {
                    s.store(s.fma(p, T::load(s, &v[c..]), s.load(&o[c..])), &mut o[c..]);
                }
                if whole < d {
                    let sum = s.fma(p, T::load_partial(s, &v[whole..], 0.0), f32::load_partial(s, &o[whole..], 0.0));
                    f32::store_partial(s, sum, &mut o[whole..d]);
                }
            }
        }
    }
}

/// Scores beyond the last key.
const MASKED_TAIL: f32 = super::vector::MASKED;
