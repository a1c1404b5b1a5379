//! Backward in the vector form: f32 blocks of 64 queries by 64 keys. See [`vector`](super::vector)
//! for the products.
//!
//! A task owns the gradients of one segment and key/value head. Queries are walked [`SUPER`] at a
//! time, head after head, and for these the keys, [`SUPER`] at a time: both are widened into rows
//! without gaps first. dQ of the queries at hand is finished when the keys were walked; dK and dV
//! of the whole segment are summed in f32 and written at the end.

use super::distance::{add_bias, add_gradients};
use super::plan::Task;
use super::scratch::{carve, lines, total, with};
use super::vector::{
    KEYS, LANES_MAX, Left, Mask, QUERIES, SUPER, Strip, Strips, gradient_block, narrow, product, row_dots, transpose,
    widen,
};
use super::{AttentionSpec, Backward, BiasSums};
use crate::dtype::Element;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// The parts of the workspace besides the sums of dK and dV, in floats: K, V, Q, dO rows; Q^T,
/// dO^T, dQ^T of each query block; S^T, dP^T; log-sum-exp, delta.
fn parts(spec: &AttentionSpec) -> [usize; 11] {
    let wide = SUPER * lines(spec.head_dim);
    let block = KEYS * QUERIES;
    [wide, wide, wide, wide, wide, wide, wide, block, block, SUPER, SUPER]
}

/// Floats of workspace of a task on a segment of `keys` keys.
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
        let mut widened = 0..0;
        for head in task.kv_head * spec.group()..(task.kv_head + 1) * spec.group() {
            for start in task.chunk.clone().step_by(SUPER) {
                run(job, task, head, start..task.chunk.end.min(start + SUPER), dk, dv, space, &mut widened);
            }
        }
        let cols = task.kv_head * d..(task.kv_head + 1) * d;
        // Scores were made in units of log2 e.
        narrow(job.isa, dk, LN_2, &job.dk, segment.keys.clone(), cols.clone());
        narrow(job.isa, dv, 1.0, &job.dv, segment.keys.clone(), cols);
    });
}

/// Up to `SUPER` queries of a head; `widened` are the keys whose rows lie in the workspace.
fn run<T: Element>(
    job: &Backward<'_, T>,
    task: &Task,
    head: usize,
    all: Range<usize>,
    dk: &mut [f32],
    dv: &mut [f32],
    space: &mut [f32],
    widened: &mut Range<usize>,
) {
    let (isa, spec, segment) = (job.isa, job.spec, &task.segment);
    let (d, row) = (spec.head_dim, lines(spec.head_dim));
    let [k, v, q, dout, q_t, dout_t, dq_t, p, ds, lse, delta] = carve(space, parts(spec));
    let q_cols = head * d..(head + 1) * d;
    let kv_cols = task.kv_head * d..(task.kv_head + 1) * d;
    let q_rows = segment.queries.start + all.start..segment.queries.start + all.end;
    let lanes = all.len().next_multiple_of(LANES_MAX);

    // The scale and log2 e go into Q: scores and dK carry them; dQ gets the scale when it is
    // written.
    widen(isa, job.q, q_rows.clone(), q_cols.clone(), spec.scale * LOG2_E, q);
    widen(isa, job.dout, q_rows.clone(), q_cols.clone(), 1.0, dout);
    q[all.len() * row..lanes * row].fill(0.0);
    dout[all.len() * row..lanes * row].fill(0.0);
    row_dots(isa, dout, job.out, q_rows.clone(), q_cols.clone(), delta);
    if let Some(dlse) = job.dlse {
        let dlse = &dlse[head * job.q.rows() + q_rows.start..][..all.len()];
        delta.iter_mut().zip(dlse).for_each(|(delta, dlse)| *delta -= dlse);
    }
    delta[all.len()..].fill(0.0);
    for (lse, saved) in lse.iter_mut().zip(&job.lse[head * job.q.rows() + q_rows.start..][..all.len()]) {
        // A query that saw no key, and the lanes without a query, have probability 0 everywhere.
        *lse = if *saved == f32::NEG_INFINITY { f32::INFINITY } else { saved * LOG2_E };
    }
    lse[all.len()..].fill(f32::INFINITY);
    dq_t.fill(0.0);
    let blocks = || {
        all.clone().step_by(QUERIES).map(|start| {
            let first = start - all.start;
            (start..all.end.min(start + QUERIES), first, first * row..(first + QUERIES) * row)
        })
    };
    for (queries, _, at) in blocks() {
        transpose(isa, &q[at.clone()], row, queries.len(), d, &mut q_t[at.clone()], QUERIES);
        transpose(isa, &dout[at.clone()], row, queries.len(), d, &mut dout_t[at], QUERIES);
    }

    let visible = segment.visible_to_any(spec, &all);
    for first in (visible.start / SUPER * SUPER..visible.end).step_by(SUPER) {
        let wide = first..segment.keys.len().min(first + SUPER);
        if *widened != wide {
            let rows = segment.keys.start + wide.start..segment.keys.start + wide.end;
            widen(isa, job.k, rows.clone(), kv_cols.clone(), 1.0, k);
            widen(isa, job.v, rows, kv_cols.clone(), 1.0, v);
            *widened = wide.clone();
        }
        for (queries, lane, at) in blocks() {
            let seen = segment.visible_to_any(spec, &queries);
            let end = seen.end.min(wide.end);
            for start in (wide.start.max(seen.start / KEYS * KEYS)..end).step_by(KEYS) {
                let keys = start..end.min(start + KEYS);
                let from = (start - wide.start) * row;
                let operands = Operands {
                    k: &k[from..],
                    v: &v[from..],
                    q: &q[at.clone()],
                    dout: &dout[at.clone()],
                    q_t: &q_t[at.clone()],
                    dout_t: &dout_t[at.clone()],
                    lse: &lse[lane..lane + QUERIES],
                    delta: &delta[lane..lane + QUERIES],
                };
                let sums = keys.start * row..keys.end * row;
                let (dk, dv, dq_t) = (&mut dk[sums.clone()], &mut dv[sums], &mut dq_t[at.clone()]);
                block(job, task, head, &queries, &keys, operands, p, ds, dk, dv, dq_t);
            }
        }
    }
    for (queries, _, at) in blocks() {
        transpose(isa, &dq_t[at.clone()], QUERIES, d, queries.len(), &mut q[at.clone()], row);
        let rows = segment.queries.start + queries.start..segment.queries.start + queries.end;
        narrow(isa, &q[at], spec.scale, &job.dq, rows, q_cols.clone());
    }
}

/// The operands of a block: rows and transposes of its queries and keys, `lines(head_dim)` floats
/// or `QUERIES` lanes apart.
struct Operands<'a> {
    k: &'a [f32],
    v: &'a [f32],
    q: &'a [f32],
    dout: &'a [f32],
    q_t: &'a [f32],
    dout_t: &'a [f32],
    lse: &'a [f32],
    delta: &'a [f32],
}

/// The five products of a block; `dk` and `dv` are the sums of its keys, `dq_t` of its queries.
fn block<T: Element>(
    job: &Backward<'_, T>,
    task: &Task,
    head: usize,
    queries: &Range<usize>,
    keys: &Range<usize>,
    x: Operands<'_>,
    p: &mut [f32],
    ds: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
    dq_t: &mut [f32],
) {
    let (isa, spec, segment) = (job.isa, job.spec, &task.segment);
    let (d, row) = (spec.head_dim, lines(spec.head_dim));
    let strips = Strips::of(spec, segment, queries, keys);
    for Strip { keys, lanes } in strips.iter() {
        let (from, to, n) = (keys.start * row, keys.start * QUERIES + lanes.start, lanes.len());
        let (q_t, dout_t) = (&x.q_t[lanes.start..], &x.dout_t[lanes.start..]);
        let left = |data| Left { data, row, col: 1 };
        product(isa, keys.len(), n, d, left(&x.k[from..]), q_t, QUERIES, &mut p[to..], QUERIES, false);
        product(isa, keys.len(), n, d, left(&x.v[from..]), dout_t, QUERIES, &mut ds[to..], QUERIES, false);
    }
    if let Some(BiasSums { bias, .. }) = &job.bias {
        add_bias(isa, &strips, bias.of_head(head), bias.first(segment, queries, keys), p);
    }
    let mask = Mask::of(spec, segment, queries, keys);
    gradient_block(isa, &strips, queries.len().next_multiple_of(LANES_MAX), mask, x.lse, x.delta, p, ds);
    if let Some(of_bias) = &job.bias {
        // SAFETY: this task alone works on this segment and head.
        let sums = unsafe { of_bias.of(segment, head) };
        add_gradients(isa, &strips, ds, of_bias.bias.first(segment, queries, keys), sums);
    }
    for Strip { keys, lanes } in strips.iter() {
        let at = keys.start * QUERIES + lanes.start;
        let (n, p, ds) = (keys.len(), &p[at..], &ds[at..]);
        let left = |data| Left { data, row: QUERIES, col: 1 };
        let sums = keys.start * row..keys.end * row;
        let (q, dout) = (&x.q[lanes.start * row..], &x.dout[lanes.start * row..]);
        product(isa, n, row, lanes.len(), left(p), dout, row, &mut dv[sums.clone()], row, true);
        product(isa, n, row, lanes.len(), left(ds), q, row, &mut dk[sums], row, true);
        let by_column = Left { data: &x.k[keys.start * row..], row: 1, col: row };
        product(isa, d, lanes.len(), n, by_column, ds, QUERIES, &mut dq_t[lanes.start..], QUERIES, true);
    }
}
