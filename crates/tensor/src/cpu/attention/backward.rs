//! Backward in the vector form: f32 blocks of 64 queries by 64 keys. See [`vector`](super::vector) for the products.
//!
//! A task walks the blocks of queries of one segment and key/value head. dQ of a block is finished when its keys were walked;
//! dK and dV of the whole segment are summed in f32 and written at the end.

use super::plan::Task;
use super::scratch::{carve, lines, total, with};
use super::vector::{KEYS, LANES_MAX, Left, Mask, QUERIES, gradient_block, narrow, product, row_dot, transpose, widen};
use super::{AttentionSpec, Backward};
use crate::dtype::Element;
use std::ops::Range;

/// The parts of the workspace of one block, in floats: K, V, Q, dO rows; Q^T, dO^T, dQ^T; S^T, dP^T; log-sum-exp, delta.
fn parts(spec: &AttentionSpec) -> [usize; 11] {
    let (d, row) = (spec.head_dim, lines(spec.head_dim));
    let (by_key, by_query, by_lane) = (KEYS * row, QUERIES * row, d * QUERIES);
    let block = KEYS * QUERIES;
    [by_key, by_key, by_query, by_query, by_lane, by_lane, by_lane, block, block, QUERIES, QUERIES]
}

/// Floats of workspace of a task: a block's, and the sums of dK and dV of a segment.
pub(super) fn floats(spec: &AttentionSpec, keys: usize) -> usize {
    total(&parts(spec)) + 2 * keys * lines(spec.head_dim)
}

/// One segment and key/value head: all its queries and keys.
pub(super) fn task<T: Element>(job: &Backward<'_, T>, task: &Task) {
    let (spec, segment) = (job.spec, &task.segment);
    let (d, row) = (spec.head_dim, lines(spec.head_dim));
    let sums = segment.keys.len() * row;
    with(floats(spec, segment.keys.len()), |space| {
        let [dk, dv, space] = carve(space, [sums, sums, total(&parts(spec))]);
        dk.fill(0.0);
        dv.fill(0.0);
        for head in task.kv_head * spec.group()..(task.kv_head + 1) * spec.group() {
            for start in task.chunk.clone().step_by(QUERIES) {
                block(job, task, head, start..task.chunk.end.min(start + QUERIES), dk, dv, space);
            }
        }
        let cols = task.kv_head * d..(task.kv_head + 1) * d;
        narrow(job.isa, dk, row, 1.0, &job.dk, segment.keys.clone(), cols.clone());
        narrow(job.isa, dv, row, 1.0, &job.dv, segment.keys.clone(), cols);
    });
}

fn block<T: Element>(
    job: &Backward<'_, T>,
    task: &Task,
    head: usize,
    queries: Range<usize>,
    dk: &mut [f32],
    dv: &mut [f32],
    space: &mut [f32],
) {
    let (isa, spec, segment) = (job.isa, job.spec, &task.segment);
    let (d, row) = (spec.head_dim, lines(spec.head_dim));
    let [k, v, q, dout, q_t, dout_t, dq_t, p, ds, lse, delta] = carve(space, parts(spec));
    let lanes = queries.len().next_multiple_of(LANES_MAX);
    let q_cols = head * d..(head + 1) * d;
    let kv_cols = task.kv_head * d..(task.kv_head + 1) * d;
    let q_rows = segment.queries.start + queries.start..segment.queries.start + queries.end;

    // The scale goes into Q: scores and dK then carry it, and dQ gets it when it is written.
    widen(isa, job.q, q_rows.clone(), q_cols.clone(), spec.scale, q, row);
    widen(isa, job.dout, q_rows.clone(), q_cols.clone(), 1.0, dout, row);
    q[queries.len() * row..lanes * row].fill(0.0);
    dout[queries.len() * row..lanes * row].fill(0.0);
    transpose(q, row, lanes, d, q_t, QUERIES);
    transpose(dout, row, lanes, d, dout_t, QUERIES);
    dq_t.fill(0.0);
    for (i, query) in q_rows.clone().enumerate() {
        let saved = job.lse[head * job.q.rows() + query];
        // A query that saw no key, and the lanes without a query, have probability 0 everywhere.
        lse[i] = if saved == f32::NEG_INFINITY { f32::INFINITY } else { saved };
        delta[i] = row_dot(isa, job.dout, job.out, query, q_cols.clone());
    }
    lse[queries.len()..].fill(f32::INFINITY);
    delta[queries.len()..].fill(0.0);

    let visible = segment.visible_to_any(spec, &queries);
    for start in (visible.start / KEYS * KEYS..visible.end).step_by(KEYS) {
        let keys = start..visible.end.min(start + KEYS);
        let rows = segment.keys.start + keys.start..segment.keys.start + keys.end;
        let n = keys.len();
        widen(isa, job.k, rows.clone(), kv_cols.clone(), 1.0, k, row);
        widen(isa, job.v, rows, kv_cols.clone(), 1.0, v, row);
        product(isa, n, lanes, d, Left { data: k, row, col: 1 }, q_t, QUERIES, p, QUERIES, false);
        product(isa, n, lanes, d, Left { data: v, row, col: 1 }, dout_t, QUERIES, ds, QUERIES, false);
        let mask = Mask::of(spec, segment, &queries, &keys);
        gradient_block(isa, n, lanes, mask, lse, delta, p, ds);
        let (p, ds) = (Left { data: p, row: QUERIES, col: 1 }, &*ds);
        let sums = keys.start * row..keys.end * row;
        product(isa, n, row, lanes, p, dout, row, &mut dv[sums.clone()], row, true);
        product(isa, n, row, lanes, Left { data: ds, row: QUERIES, col: 1 }, q, row, &mut dk[sums], row, true);
        product(isa, d, lanes, n, Left { data: k, row: 1, col: row }, ds, QUERIES, dq_t, QUERIES, true);
    }
    transpose(dq_t, QUERIES, d, queries.len(), q, row);
    narrow(isa, q, row, spec.scale, &job.dq, q_rows, q_cols);
}
