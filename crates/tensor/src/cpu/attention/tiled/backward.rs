//! Backward on tiles.
//!
//! A task owns the gradients of one segment and key/value head. It walks its queries, head after
//! head, [`SUPER`] units at a time, packs what they need in four forms, and for these its keys,
//! [`SUPER`] units at a time, in three forms. Inside, blocks of up to [`QUERY_BLOCK`] by
//! [`KEY_BLOCK`] units make S^T and dP^T, from them P^T and dS^T rounded to bf16, and then
//!
//! | product | left | right | sums over |
//! |---|---|---|---|
//! | dV += P^T dO | P^T as made | dO, pairs of queries | query units of the block |
//! | dK += dS^T Q | dS^T as made | Q, pairs of queries | query units of the block |
//! | dQ^T += K^T dS^T | K, columns | dS^T, pairs of keys | key units of the block |
//!
//! dQ^T is f32 for the queries at hand, dK and dV for the whole segment. dS^T by pairs of keys is
//! made by the two cheap in-lane interleaves, which leaves its queries in another order along the
//! lanes ([`lane_query`]); dQ^T undoes that once, at the end.

use super::{LOG2_E, PAIR, QUAD, Quads, SUPER, UNIT, UnitMask, as_bf16, exp2, pack, round_pair, units};
use crate::cpu::amx::Pairs;
use crate::cpu::attention::plan::{Segment, Task};
use crate::cpu::attention::scratch::{carve, total, with};
use crate::cpu::attention::{AttentionSpec, Backward};
use crate::dtype::{Element, bf16};
use std::arch::x86_64::*;
use std::ops::Range;

/// Query units of a block.
const QUERY_BLOCK: usize = 4;
/// Key units of a block.
const KEY_BLOCK: usize = 4;
/// The log-sum-exp used for a query without probabilities: 2^-this is 0.
const NOWHERE: f32 = 1e30;

/// The parts of the workspace, in floats, without the sums of dK and dV: K rows, V rows, K columns;
/// Q^T, dO^T, Q, dO; dQ^T; P^T, dS^T, dS^T by pairs; S^T, dP^T; log-sum-exp, delta.
fn parts(spec: &AttentionSpec) -> [usize; 15] {
    let d = units(spec.head_dim);
    let pair = PAIR / 4;
    let (packed, block, lanes) = (SUPER * d * pair, QUERY_BLOCK * KEY_BLOCK * pair, SUPER * UNIT);
    let sums = SUPER * d * QUAD;
    [packed, packed, packed, packed, packed, packed, packed, sums, block, block, block, QUAD, QUAD, lanes, lanes]
}

/// Floats of workspace of a task on a segment of `keys` keys.
pub(in crate::cpu::attention) fn floats(spec: &AttentionSpec, keys: usize) -> usize {
    total(&parts(spec)) + 2 * units(keys) * units(spec.head_dim) * QUAD
}

/// One segment and key/value head: all its queries and keys. `next` is what this thread will
/// probably do next.
pub(in crate::cpu::attention) fn task<T: Element, Q: Quads>(job: &Backward<'_, T>, task: &Task, next: Option<&Task>) {
    // SAFETY: jobs come here only on rungs from AVX-512 BF16 on, which no CPU without these
    // features detects.
    with(floats(job.spec, task.segment.keys.len()), |space| unsafe { run::<T, Q>(job, task, next, space) });
}

/// Fetches part `part` of `parts` of what a task reads first into the L2 cache, as forward does.
fn fetch<T: Element>(job: &Backward<'_, T>, task: &Task, part: usize, parts: usize) {
    let (d, segment, group) = (job.spec.head_dim, &task.segment, job.spec.group());
    let share = |rows: &Range<usize>| {
        let len = rows.len().min(SUPER * UNIT);
        rows.start + len * part / parts..rows.start + len * (part + 1) / parts
    };
    let cols = task.kv_head * group * d..(task.kv_head * group + 1) * d;
    for x in [&job.q, &job.dout, &job.out] {
        pack::prefetch(x, &share(&segment.queries), &cols);
    }
    for x in [&job.k, &job.v] {
        pack::prefetch(x, &share(&segment.keys), &(task.kv_head * d..(task.kv_head + 1) * d));
    }
}

/// The packs and sums that blocks work on.
struct Space {
    k: *mut u8,
    v: *mut u8,
    k_t: *mut u8,
    q_t: *mut u8,
    dout_t: *mut u8,
    q: *mut u8,
    dout: *mut u8,
    dq_t: *mut f32,
    p: *mut u8,
    ds: *mut u8,
    ds_pairs: *mut u8,
    scores: *mut f32,
    dp: *mut f32,
    lse: *mut f32,
    delta: *mut f32,
    /// Of the whole segment.
    dk: *mut f32,
    dv: *mut f32,
    dims: usize,
    /// |scale| log2 e.
    scale: f32,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn run<T: Element, Q: Quads>(job: &Backward<'_, T>, task: &Task, next: Option<&Task>, space: &mut [f32]) {
    let (spec, segment) = (job.spec, &task.segment);
    let (d, dims) = (spec.head_dim, units(spec.head_dim));
    let sums = units(segment.keys.len()) * dims * QUAD;
    let [dk, dv, space] = carve(space, [sums, sums, total(&parts(spec))]);
    dk.fill(0.0);
    dv.fill(0.0);
    let [k, v, k_t, q_t, dout_t, q, dout, dq_t, p, ds, ds_pairs, scores, dp, lse, delta] =
        carve(space, parts(spec)).map(|part| part.as_mut_ptr());
    let space = Space {
        k: k.cast(),
        v: v.cast(),
        k_t: k_t.cast(),
        q_t: q_t.cast(),
        dout_t: dout_t.cast(),
        q: q.cast(),
        dout: dout.cast(),
        dq_t,
        p: p.cast(),
        ds: ds.cast(),
        ds_pairs: ds_pairs.cast(),
        scores,
        dp,
        lse,
        delta,
        dk: dk.as_mut_ptr(),
        dv: dv.as_mut_ptr(),
        dims,
        scale: spec.scale.abs() * LOG2_E,
    };
    // SAFETY: what the products need was detected; this task uses no other configuration of tiles.
    let quads = unsafe { Q::begin() };
    let all = units(task.chunk.len());
    let heads = task.kv_head * spec.group()..(task.kv_head + 1) * spec.group();
    let mut packed_keys = 0..0;
    for head in heads.clone() {
        for first in (0..all).step_by(SUPER) {
            let query_units = first..all.min(first + SUPER);
            // SAFETY: the packs hold `SUPER` units.
            unsafe { space.pack_queries(job, segment, head, &query_units) };
            let queries = first * UNIT..task.chunk.end.min(query_units.end * UNIT);
            let seen = segment.visible_to_any(spec, &queries);
            if !seen.is_empty() {
                let seen = seen.start / UNIT..units(seen.end);
                for first in (seen.start / SUPER * SUPER..seen.end).step_by(SUPER) {
                    let key_units = first..units(segment.keys.len()).min(first + SUPER);
                    if packed_keys != key_units {
                        // SAFETY: the packs hold `SUPER` units.
                        unsafe { space.pack_keys(job, task, &key_units) };
                        packed_keys = key_units.clone();
                    }
                    for block in query_units.clone().step_by(QUERY_BLOCK) {
                        let queries = block..query_units.end.min(block + QUERY_BLOCK);
                        // The last keys of these queries: what comes next is fetched meanwhile.
                        if key_units.end >= seen.end {
                            let row = segment.queries.start;
                            let rows = row + block * UNIT..segment.queries.end.min(row + queries.end * UNIT);
                            pack::prefetch_rows(&job.dq, &rows, &(head * d..(head + 1) * d));
                            if let Some(next) = next.filter(|_| head + 1 == heads.end && query_units.end == all) {
                                let (part, parts) = (block - query_units.start, query_units.len());
                                fetch(job, next, part / QUERY_BLOCK, parts.div_ceil(QUERY_BLOCK));
                            }
                        }
                        for block in key_units.clone().step_by(KEY_BLOCK) {
                            let keys = block..key_units.end.min(block + KEY_BLOCK);
                            // SAFETY: queries and keys of these units were packed.
                            unsafe { space.block(&quads, spec, segment, &queries, query_units.start, &keys, first) };
                        }
                    }
                }
            }
            // SAFETY: the sums of these queries lie in `dq_t`; this task alone writes these rows of
            // this head.
            unsafe { space.store_queries(job, segment, head, &query_units) };
        }
    }
    drop(quads);
    let rows = |unit: usize| {
        let row = segment.keys.start + unit * UNIT;
        row.min(segment.keys.end)..segment.keys.end.min(row + UNIT)
    };
    for unit in 0..units(segment.keys.len()) {
        for y in [&job.dk, &job.dv] {
            pack::prefetch_rows(y, &rows(unit + 2), &(task.kv_head * d..(task.kv_head + 1) * d));
        }
        for dim in 0..dims {
            let cols = task.kv_head * d + dim * UNIT..task.kv_head * d + d.min((dim + 1) * UNIT);
            let rows = rows(unit);
            let quad = (unit * dims + dim) * QUAD;
            // SAFETY: the quads lie in the sums; this task alone writes these rows of this head.
            unsafe {
                pack::store_rows(space.dk.add(quad), &[spec.scale.abs(); UNIT], &job.dk, &rows, &cols);
                pack::store_rows(space.dv.add(quad), &[1.0; UNIT], &job.dv, &rows, &cols);
            }
        }
    }
}

impl Space {
    /// Packs Q and dO of `units` of `head` in both forms, and gets their statistics.
    ///
    /// # Safety
    /// The CPU must have the instructions, and `self` room for the units.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn pack_queries<T: Element>(
        &self,
        job: &Backward<'_, T>,
        segment: &Segment,
        head: usize,
        units: &Range<usize>,
    ) {
        let (d, tokens) = (job.spec.head_dim, job.q.rows());
        let (q, out, dout) = (as_bf16(job.q), as_bf16(job.out), as_bf16(job.dout));
        for (i, unit) in units.clone().enumerate() {
            let row = segment.queries.start + unit * UNIT;
            let rows = UNIT.min(segment.queries.end - row);
            // SAFETY: 32 floats of each lie in the workspace, which nothing else refers to now.
            let (lse, delta) = unsafe {
                (
                    std::slice::from_raw_parts_mut(self.lse.add(i * UNIT), UNIT),
                    std::slice::from_raw_parts_mut(self.delta.add(i * UNIT), UNIT),
                )
            };
            lse.fill(NOWHERE);
            delta.fill(0.0);
            for (lse, saved) in lse.iter_mut().zip(&job.lse[head * tokens + row..][..rows]) {
                if *saved != f32::NEG_INFINITY {
                    *lse = *saved * LOG2_E;
                }
            }
            for dim in 0..self.dims {
                let cols = head * d + dim * UNIT..head * d + d.min((dim + 1) * UNIT);
                let from = |x| pack::Unit::new(x, row..row + rows, cols.clone());
                let at = (i * self.dims + dim) * PAIR;
                let (q, dout) = (from(q).negated(job.spec.scale < 0.0), from(dout));
                pack::add_row_dots(&dout, &from(out), delta);
                // SAFETY: the packs hold `SUPER` units, and `units` are no more.
                unsafe {
                    pack::dwords(&q, self.q_t.add(at));
                    pack::pairs(&q, self.q.add(at));
                    pack::dwords(&dout, self.dout_t.add(at));
                    pack::pairs(&dout, self.dout.add(at));
                }
            }
            if let Some(dlse) = job.dlse {
                let dlse = &dlse[head * tokens + row..][..rows];
                delta.iter_mut().zip(dlse).for_each(|(delta, dlse)| *delta -= dlse);
            }
        }
        // SAFETY: as many floats lie in the sums.
        unsafe { std::slice::from_raw_parts_mut(self.dq_t, units.len() * self.dims * QUAD) }.fill(0.0);
    }

    /// Packs K and V of `units`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn pack_keys<T: Element>(&self, job: &Backward<'_, T>, task: &Task, units: &Range<usize>) {
        let d = job.spec.head_dim;
        let (k, v) = (as_bf16(job.k), as_bf16(job.v));
        for (i, unit) in units.clone().enumerate() {
            for dim in 0..self.dims {
                let row = task.segment.keys.start + unit * UNIT;
                let rows = row..task.segment.keys.end.min(row + UNIT);
                let cols = task.kv_head * d + dim * UNIT..task.kv_head * d + d.min((dim + 1) * UNIT);
                let from = |x| pack::Unit::new(x, rows.clone(), cols.clone());
                let at = (i * self.dims + dim) * PAIR;
                // SAFETY: the packs hold `SUPER` units, and `units` are no more.
                unsafe {
                    pack::rows(&from(k), self.k.add(at));
                    pack::columns(&from(k), self.k_t.add(at));
                    pack::rows(&from(v), self.v.add(at));
                }
            }
        }
    }

    /// The query units `queries` (packed from unit `queries_from` on) against the key units `keys`
    /// (packed from `keys_from` on).
    ///
    /// # Safety
    /// They were packed, and are no more than a block each.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn block(
        &self,
        quads: &impl Quads,
        spec: &AttentionSpec,
        segment: &Segment,
        queries: &Range<usize>,
        queries_from: usize,
        keys: &Range<usize>,
        keys_from: usize,
    ) {
        let row = self.dims * PAIR;
        // For each query unit the key units of the block that it sees; both bounds rise with the
        // query unit.
        let mut seen = [const { 0..0 }; QUERY_BLOCK];
        for (j, unit) in queries.clone().enumerate() {
            let queries = unit * UNIT..segment.queries.len().min((unit + 1) * UNIT);
            let visible = segment.visible_to_any(spec, &queries);
            let range = (visible.start / UNIT).max(keys.start)..units(visible.end).min(keys.end);
            if visible.is_empty() || range.is_empty() {
                continue;
            }
            seen[j] = range.start - keys.start..range.end - keys.start;
            let at = unit - queries_from;
            for key in range {
                let i = key - keys.start;
                // SAFETY: all offsets lie in their parts of the workspace.
                unsafe {
                    let key_at = (key - keys_from) * row;
                    let q_t = Pairs { first: self.q_t.add(at * row), step: PAIR };
                    quads.quad(self.scores, Pairs { first: self.k.add(key_at), step: PAIR }, q_t, self.dims);
                    let dout_t = Pairs { first: self.dout_t.add(at * row), step: PAIR };
                    quads.quad(self.dp, Pairs { first: self.v.add(key_at), step: PAIR }, dout_t, self.dims);
                    match UnitMask::of(spec, segment, &queries, key * UNIT) {
                        None => self.gradients(i, j, at, |_| u32::MAX),
                        Some(mask) => self.gradients(i, j, at, |key| mask.queries(key)),
                    }
                }
            }
        }
        for (i, key) in keys.clone().enumerate() {
            let sees = |range: &Range<usize>| range.contains(&i);
            let Some(first) = seen.iter().position(sees) else { continue };
            let steps = seen[first..].iter().take_while(|range| sees(range)).count();
            let at = (queries.start + first - queries_from) * row;
            for dim in 0..self.dims {
                let sums = (key * self.dims + dim) * QUAD;
                // SAFETY: all offsets lie in their parts of the workspace.
                unsafe {
                    let left = (i * QUERY_BLOCK + first) * PAIR;
                    let dout = Pairs { first: self.dout.add(at + dim * PAIR), step: row };
                    quads.quad_add(self.dv.add(sums), Pairs { first: self.p.add(left), step: PAIR }, dout, steps);
                    let q = Pairs { first: self.q.add(at + dim * PAIR), step: row };
                    quads.quad_add(self.dk.add(sums), Pairs { first: self.ds.add(left), step: PAIR }, q, steps);
                }
            }
        }
        for (j, seen) in seen.into_iter().enumerate().filter(|(_, seen)| !seen.is_empty()) {
            let at = queries.start + j - queries_from;
            for dim in 0..self.dims {
                // SAFETY: all offsets lie in their parts of the workspace.
                unsafe {
                    let keys = (keys.start + seen.start - keys_from) * row + dim * PAIR;
                    let k_t = Pairs { first: self.k_t.add(keys), step: row };
                    let first = self.ds_pairs.add((j * KEY_BLOCK + seen.start) * PAIR);
                    let sums = self.dq_t.add((at * self.dims + dim) * QUAD);
                    quads.quad_add(sums, k_t, Pairs { first, step: PAIR }, seen.len());
                }
            }
        }
    }

    /// P^T and dS^T of key unit `i` and query unit `j` of the block (packed query unit `at`) from
    /// the scores and dP^T.
    ///
    /// # Safety
    /// `i`, `j` and `at` lie inside.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    #[inline]
    unsafe fn gradients(&self, i: usize, j: usize, at: usize, lanes: impl Fn(usize) -> u32) {
        let scale = _mm512_set1_ps(self.scale);
        // SAFETY: all offsets lie in their parts of the workspace, which are aligned.
        unsafe {
            let load = |x: *const f32, h: usize| _mm512_load_ps(x.add(at * UNIT + h * 16));
            let lse = [load(self.lse, 0), load(self.lse, 1)];
            let delta = [load(self.delta, 0), load(self.delta, 1)];
            let p_out = self.p.add((i * QUERY_BLOCK + j) * PAIR);
            let ds_out = self.ds.add((i * QUERY_BLOCK + j) * PAIR);
            let pairs_out = self.ds_pairs.add((j * KEY_BLOCK + i) * PAIR);
            for key in (0..UNIT).step_by(2) {
                let mut rows = [_mm512_setzero_si512(); 2];
                for (odd, row) in rows.iter_mut().enumerate() {
                    let key = key + odd;
                    let lanes = lanes(key);
                    let (mut p, mut ds) = ([scale; 2], [scale; 2]);
                    for h in 0..2 {
                        let at = (key / 16) * 512 + h * 256 + (key % 16) * 16;
                        let score = _mm512_load_ps(self.scores.add(at));
                        let all = exp2(_mm512_fmsub_ps(score, scale, lse[h]));
                        p[h] = _mm512_maskz_mov_ps((lanes >> (16 * h)) as u16, all);
                        ds[h] = _mm512_mul_ps(p[h], _mm512_sub_ps(_mm512_load_ps(self.dp.add(at)), delta[h]));
                    }
                    *row = round_pair(ds[0], ds[1]);
                    _mm512_store_si512(p_out.add(key * 64).cast(), round_pair(p[0], p[1]));
                    _mm512_store_si512(ds_out.add(key * 64).cast(), *row);
                }
                let to = pairs_out.add(key / 2 * 64);
                _mm512_store_si512(to.cast(), _mm512_unpacklo_epi16(rows[0], rows[1]));
                _mm512_store_si512(to.add(1024).cast(), _mm512_unpackhi_epi16(rows[0], rows[1]));
            }
        }
    }

    /// Writes dQ of `units` of `head`.
    ///
    /// # Safety
    /// The CPU must have the instructions; no other task may write these rows of this head.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn store_queries<T: Element>(
        &self,
        job: &Backward<'_, T>,
        segment: &Segment,
        head: usize,
        units: &Range<usize>,
    ) {
        let (d, scale) = (job.spec.head_dim, _mm512_set1_ps(job.spec.scale));
        for (i, unit) in units.clone().enumerate() {
            let row = segment.queries.start + unit * UNIT;
            for dim in 0..self.dims {
                let col = head * d + dim * UNIT;
                let cols = col..col + UNIT.min(d - dim * UNIT);
                for half in 0..2 {
                    // SAFETY: the quad lies in the sums.
                    let values = unsafe {
                        pack::transposed_rows(self.dq_t.add((i * self.dims + dim) * QUAD + half * 256), scale)
                    };
                    for (lane, value) in values.iter().enumerate() {
                        let row = row + lane_query(half, lane);
                        if row < segment.queries.end {
                            // SAFETY: by the contract; rows are visited one after another.
                            let dq = unsafe { job.dq.part(row, cols.clone()) };
                            pack::store_row(*value, bytemuck::cast_slice_mut::<T, bf16>(dq));
                        }
                    }
                }
            }
        }
    }
}

/// The query of the unit in lane `lane` of tile `half` of dQ^T: `vpunpcklwd` takes words 0 to 3 of
/// every eight, `vpunpckhwd` words 4 to 7.
fn lane_query(half: usize, lane: usize) -> usize {
    lane / 4 * 8 + half * 4 + lane % 4
}
