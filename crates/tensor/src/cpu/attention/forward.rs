//! Forward in the vector form: f32 blocks of 64 queries by 64 keys. See [`vector`](super::vector)
//! for the products.
//!
//! A task keeps Q^T, O^T and the statistics of a chunk of queries (all heads of a group) and walks
//! its keys [`SUPER`] at a time: these are widened once, into rows without gaps, and serve every
//! block of queries. Rows of a fused matrix lie a page or more apart; fetched anew for each block
//! they cost a third of the products.

use super::distance::add_bias;
use super::plan::{self, Segment, Task};
use super::scratch::{carve, lines, total, with};
use super::vector::{
    FLOOR, KEYS, LANES_MAX, Left, MASKED, Mask, QUERIES, SUPER, Statistics, Strip, Strips, narrow, product,
    scale_lanes, softmax_block, transpose, widen,
};
use super::{AttentionSpec, Forward};
use crate::dtype::Element;
use crate::simd_fn;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// Query rows of a task, counted over the heads of a group.
pub(super) const CHUNK: usize = 512;

/// Query blocks of a task.
fn blocks(spec: &AttentionSpec) -> usize {
    spec.group() * plan::chunk(spec, CHUNK, QUERIES) / QUERIES
}

/// The parts of the workspace, in floats: K, V; of each query block Q^T, O^T, maxima and sums; of
/// the block at hand S^T and the decay.
fn parts(spec: &AttentionSpec) -> [usize; 8] {
    let (row, blocks) = (lines(spec.head_dim), blocks(spec));
    let (wide, queries) = (SUPER * row, QUERIES * blocks);
    [wide, wide, queries * row, queries * row, queries, queries, KEYS * QUERIES, QUERIES]
}

/// Floats of workspace of a task.
pub(super) fn floats(spec: &AttentionSpec) -> usize {
    total(&parts(spec))
}

/// One chunk of the queries of the heads of one key/value head.
pub(super) fn task<T: Element>(job: &Forward<'_, T>, task: &Task) {
    with(floats(job.spec), |space| run(job, task, space));
}

/// The query blocks of a task: (number, head, local queries), head after head.
fn query_blocks<T>(job: &Forward<'_, T>, task: &Task) -> impl Iterator<Item = (usize, usize, Range<usize>)> + use<T> {
    let (group, chunk, kv_head) = (job.spec.group(), task.chunk.clone(), task.kv_head);
    let per_head = chunk.len().div_ceil(QUERIES);
    (0..group * per_head).map(move |block| {
        let start = chunk.start + block % per_head * QUERIES;
        (block, kv_head * group + block / per_head, start..chunk.end.min(start + QUERIES))
    })
}

fn run<T: Element>(job: &Forward<'_, T>, task: &Task, space: &mut [f32]) {
    let (isa, spec, segment) = (job.isa, job.spec, &task.segment);
    let (d, row) = (spec.head_dim, lines(spec.head_dim));
    let [k, v, q_t, o_t, max, sum, scores, decay] = carve(space, parts(spec));
    let kv_cols = task.kv_head * d..(task.kv_head + 1) * d;
    let rows_of = |queries: &Range<usize>| segment.queries.start + queries.start..segment.queries.start + queries.end;
    let of_block = |block: usize| block * QUERIES * row..(block + 1) * QUERIES * row;
    let lanes_of = |block: usize| block * QUERIES..(block + 1) * QUERIES;

    for (block, head, queries) in query_blocks(job, task) {
        let lanes = queries.len().next_multiple_of(LANES_MAX);
        // Scores come out in units of log2 e: probabilities are powers of two.
        widen(isa, job.q, rows_of(&queries), head * d..(head + 1) * d, spec.scale * LOG2_E, k);
        // Lanes without a query hold zeros: their scores are 0 and nobody reads what becomes of
        // them.
        k[queries.len() * row..lanes * row].fill(0.0);
        transpose(isa, k, row, lanes, d, &mut q_t[of_block(block)], QUERIES);
        o_t[of_block(block)].fill(0.0);
        max[lanes_of(block)].fill(FLOOR);
        sum[lanes_of(block)].fill(0.0);
    }

    let visible = segment.visible_to_any(spec, &task.chunk);
    // Key blocks lie on a grid from the segment's start, so that a query's arithmetic does not
    // depend on its chunk.
    for first in (visible.start / SUPER * SUPER..visible.end).step_by(SUPER) {
        let wide = first.max(visible.start / KEYS * KEYS)..visible.end.min(first + SUPER);
        let rows = segment.keys.start + wide.start..segment.keys.start + wide.end;
        widen(isa, job.k, rows.clone(), kv_cols.clone(), 1.0, k);
        widen(isa, job.v, rows, kv_cols.clone(), 1.0, v);
        for (block, head, queries) in query_blocks(job, task) {
            let lanes = queries.len().next_multiple_of(LANES_MAX);
            let (q_t, o_t) = (&q_t[of_block(block)], &mut o_t[of_block(block)]);
            let seen = segment.visible_to_any(spec, &queries);
            let end = seen.end.min(wide.end);
            for start in (wide.start.max(seen.start / KEYS * KEYS)..end).step_by(KEYS) {
                let keys = start..end.min(start + KEYS);
                let at = (start - wide.start) * row;
                let strips = Strips::of(spec, segment, &queries, &keys);
                for Strip { keys, lanes } in strips.iter() {
                    let by_key = Left { data: &k[at + keys.start * row..], row, col: 1 };
                    let scores = &mut scores[keys.start * QUERIES + lanes.start..];
                    product(
                        isa,
                        keys.len(),
                        lanes.len(),
                        d,
                        by_key,
                        &q_t[lanes.start..],
                        QUERIES,
                        scores,
                        QUERIES,
                        false,
                    );
                }
                if let Some(bias) = job.bias {
                    add_bias(isa, &strips, bias.of_head(head), bias.first(segment, &queries, &keys), scores);
                }
                let mask = Mask::of(spec, segment, &queries, &keys);
                let state = Statistics { max: &mut max[lanes_of(block)], sum: &mut sum[lanes_of(block)], decay };
                if softmax_block(isa, &strips, lanes, mask, scores, state) {
                    scale_lanes(isa, d, lanes, decay, o_t);
                }
                for Strip { keys, lanes } in strips.iter() {
                    let by_column = Left { data: &v[at + keys.start * row..], row: 1, col: row };
                    let scores = &scores[keys.start * QUERIES + lanes.start..];
                    let o_t = &mut o_t[lanes.start..];
                    product(isa, d, lanes.len(), keys.len(), by_column, scores, QUERIES, o_t, QUERIES, true);
                }
            }
        }
    }

    for (block, head, queries) in query_blocks(job, task) {
        let (o_t, rows) = (&mut o_t[of_block(block)], rows_of(&queries));
        let (max, sum) = (&max[lanes_of(block)], &sum[lanes_of(block)]);
        // SAFETY: this task alone writes these queries' statistics of this head.
        let lse = unsafe { job.lse.part(head * job.q.rows() + rows.start..head * job.q.rows() + rows.end) };
        decay.fill(0.0);
        for (i, lse) in lse.iter_mut().enumerate() {
            let seen = sum[i] != 0.0;
            *lse = if seen { max[i] * LN_2 + sum[i].ln() } else { f32::NEG_INFINITY };
            decay[i] = if seen { sum[i].recip() } else { 0.0 };
        }
        scale_lanes(isa, d, queries.len().next_multiple_of(LANES_MAX), decay, o_t);
        transpose(isa, o_t, QUERIES, d, queries.len(), k, row);
        narrow(isa, k, 1.0, &job.out, rows, head * d..(head + 1) * d);
    }
}

/// Local query `i` of a segment over all keys that it sees, for the query heads of `kv_head`: two
/// passes over keys and values in the order that they lie in memory, which is all that one query's
/// attention costs.
pub(super) fn one_query<T: Element>(job: &Forward<'_, T>, segment: &Segment, i: usize, kv_head: usize) {
    let (spec, d) = (job.spec, job.spec.head_dim);
    let keys = segment.visible(spec, i);
    let (group, row) = (spec.group(), lines(d));
    with(total(&[group * row, group * row, group * lines(keys.len())]), |space| {
        let [q, o, scores] = carve(space, [group * row, group * row, group * lines(keys.len())]);
        for head in 0..group {
            let first = (kv_head * group + head) * d;
            let query = segment.queries.start + i..segment.queries.start + i + 1;
            widen(job.isa, job.q, query, first..first + d, spec.scale, &mut q[head * row..(head + 1) * row]);
        }
        row_attention(job.isa, job, segment.keys.start + keys.start, keys.len(), kv_head, q, o, scores);
        for head in 0..group {
            let first = (kv_head * group + head) * d;
            let query = segment.queries.start + i..segment.queries.start + i + 1;
            narrow(job.isa, &o[head * row..(head + 1) * row], 1.0, &job.out, query, first..first + d);
        }
    });
}

simd_fn! {
    /// `o = softmax(q K^T) V` for the rows of `q`, one per head of the group, over `count` keys
    /// from row `first`.
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
            scores[count..].fill(MASKED);
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
