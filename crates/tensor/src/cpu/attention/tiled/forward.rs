//! Forward on tiles.
//!
//! A task packs the Q of its queries (all heads of a group), then walks its keys by [`SUPER`]
//! units: packs K^T and V of those, and for each query unit walks blocks of up to [`BLOCK`] key
//! units: scores, maxima, probabilities, then `O += P V` over the whole block, so that sums are
//! loaded into tiles and stored once per block.
//!
//! Scores lie as the product makes them, queries down and keys along the lanes, so that
//! probabilities are a left factor as soon as they are rounded, and V needs no transpose. What this
//! costs is horizontal maxima and sums, sixteen queries at once and once per block ([`fold`]).

use super::{CHUNK, LOG2_E, PAIR, QUAD, Quads, SUPER, UNIT, UnitMask, as_bf16, exp2, pack, round_pair, units};
use crate::cpu::amx::Pairs;
use crate::cpu::attention::plan::{self, Task};
use crate::cpu::attention::scratch::{carve, total, with};
use crate::cpu::attention::vector::FLOOR;
use crate::cpu::attention::{AttentionSpec, Forward};
use crate::dtype::Element;
use std::arch::x86_64::*;
use std::ops::Range;

/// Key units of a block: scores of 32 queries by 8 x 32 keys are 32 KiB, probabilities 16.
const BLOCK: usize = 8;

/// Query units of a task: those of a chunk, for each head of a group.
fn query_units(spec: &AttentionSpec) -> usize {
    spec.group() * plan::chunk(spec, CHUNK, UNIT) / UNIT
}

/// The parts of the workspace, in floats: Q, K^T, V, O, scores, probabilities, maxima, sums,
/// factors of a unit's rows.
fn parts(spec: &AttentionSpec) -> [usize; 9] {
    let (d, queries) = (units(spec.head_dim), query_units(spec));
    let pair = PAIR / 4;
    let rows = queries * UNIT;
    [
        queries * d * pair,
        SUPER * d * pair,
        SUPER * d * pair,
        queries * d * QUAD,
        BLOCK * QUAD,
        BLOCK * pair,
        rows,
        rows,
        UNIT,
    ]
}

/// Floats of workspace of a task.
pub(in crate::cpu::attention) fn floats(spec: &AttentionSpec) -> usize {
    total(&parts(spec))
}

/// One chunk of the queries of the heads of one key/value head. `next` is what this thread will
/// probably do next.
pub(in crate::cpu::attention) fn task<T: Element, Q: Quads>(job: &Forward<'_, T>, task: &Task, next: Option<&Task>) {
    // SAFETY: jobs come here only on rungs from AVX-512 BF16 on, which no CPU without these
    // features detects.
    with(floats(job.spec), |space| unsafe { run::<T, Q>(job, task, next, space) });
}

/// Fetches part `part` of `parts` of what a task reads first into the L2 cache. A head's rows lie
/// on different pages, where no hardware prefetcher follows.
fn fetch<T: Element>(job: &Forward<'_, T>, task: &Task, part: usize, parts: usize) {
    let (d, segment) = (job.spec.head_dim, &task.segment);
    let share = |rows: &Range<usize>| {
        let at = |part: usize| rows.start + rows.len() * part / parts;
        at(part)..at(part + 1)
    };
    let queries = segment.queries.start + task.chunk.start..segment.queries.start + task.chunk.end;
    let group = job.spec.group();
    pack::prefetch(&job.q, &share(&queries), &(task.kv_head * group * d..(task.kv_head + 1) * group * d));
    let visible = segment.visible_to_any(job.spec, &task.chunk);
    let first = visible.start / (SUPER * UNIT) * (SUPER * UNIT);
    let keys = segment.keys.start + visible.start..segment.keys.start + visible.end.min(first + SUPER * UNIT);
    let cols = task.kv_head * d..(task.kv_head + 1) * d;
    pack::prefetch(&job.k, &share(&keys), &cols);
    pack::prefetch(&job.v, &share(&keys), &cols);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn run<T: Element, Q: Quads>(job: &Forward<'_, T>, task: &Task, next: Option<&Task>, space: &mut [f32]) {
    let (spec, segment) = (job.spec, &task.segment);
    let (d, group) = (spec.head_dim, spec.group());
    let dims = units(d);
    let [q, k_t, v, o, scores, p, max, sum, factors] = carve(space, parts(spec));
    let (q, k_t, v) = (q.as_mut_ptr().cast::<u8>(), k_t.as_mut_ptr().cast::<u8>(), v.as_mut_ptr().cast::<u8>());
    let (o, scores, p) = (o.as_mut_ptr(), scores.as_mut_ptr(), p.as_mut_ptr().cast::<u8>());
    let (q_rows, k_rows, v_rows) = (as_bf16(job.q), as_bf16(job.k), as_bf16(job.v));
    let chunk_units = units(task.chunk.len());
    // The queries of unit `unit` of the chunk.
    let queries = |unit: usize| -> Range<usize> {
        let start = task.chunk.start + unit * UNIT;
        start..task.chunk.end.min(start + UNIT)
    };
    let rows_of = |queries: &Range<usize>| segment.queries.start + queries.start..segment.queries.start + queries.end;
    let cols = |head: usize, dim: usize| head * d + dim * UNIT..head * d + d.min((dim + 1) * UNIT);
    // The largest score is the largest product only when the scale is positive: a negative sign
    // goes into Q.
    let scale = spec.scale.abs() * LOG2_E;

    for unit in 0..group * chunk_units {
        let head = task.kv_head * group + unit / chunk_units;
        let rows = rows_of(&queries(unit % chunk_units));
        for dim in 0..dims {
            let from = pack::Unit::new(q_rows, rows.clone(), cols(head, dim)).negated(spec.scale < 0.0);
            // SAFETY: the pair lies in its part of the workspace.
            unsafe { pack::rows(&from, q.add((unit * dims + dim) * PAIR)) };
        }
    }
    max[..group * chunk_units * UNIT].fill(FLOOR);
    sum[..group * chunk_units * UNIT].fill(0.0);
    for unit in 0..group * chunk_units {
        let queries = queries(unit % chunk_units);
        if segment.visible_to_any(spec, &queries).is_empty() {
            let (head, lanes) = (task.kv_head * group + unit / chunk_units, unit * UNIT..(unit + 1) * UNIT);
            let sums = o.wrapping_add(unit * dims * QUAD);
            // SAFETY: the sums lie in their part, to which nothing refers; this task alone writes
            // these rows of this head.
            unsafe {
                std::slice::from_raw_parts_mut(sums, dims * QUAD).fill(0.0);
                finish(job, head, &rows_of(&queries), sums, &max[lanes.clone()], &sum[lanes]);
            }
        }
    }

    // SAFETY: what the products need was detected; this task uses no other configuration of tiles.
    let quads = unsafe { Q::begin() };
    let visible = segment.visible_to_any(spec, &task.chunk);
    let key_units = visible.start / UNIT..units(visible.end);
    // Blocks lie on a grid from the segment's start, so that a query's arithmetic does not depend
    // on its chunk.
    for first in (key_units.start / SUPER * SUPER..key_units.end).step_by(SUPER) {
        let end = key_units.end.min(first + SUPER);
        for unit in first.max(key_units.start)..end {
            let row = segment.keys.start + unit * UNIT;
            let rows = row..segment.keys.end.min(row + UNIT);
            for dim in 0..dims {
                let at = ((unit - first) * dims + dim) * PAIR;
                let cols = cols(task.kv_head, dim);
                // SAFETY: the pairs lie in their parts of the workspace.
                unsafe {
                    pack::dwords(&pack::Unit::new(k_rows, rows.clone(), cols.clone()), k_t.add(at));
                    pack::pairs(&pack::Unit::new(v_rows, rows.clone(), cols), v.add(at));
                }
            }
        }
        for unit in 0..group * chunk_units {
            let queries = queries(unit % chunk_units);
            let seen = segment.visible_to_any(spec, &queries);
            if seen.is_empty() {
                continue;
            }
            let head = task.kv_head * group + unit / chunk_units;
            let rows = rows_of(&queries);
            if units(seen.end) <= end {
                pack::prefetch_rows(&job.out, &rows, &(head * d..(head + 1) * d));
            }
            if let Some(next) = next {
                fetch(job, next, unit, group * chunk_units);
            }
            let seen = seen.start / UNIT..units(seen.end);
            let range = seen.start.max(first)..seen.end.min(end);
            let lanes = unit * UNIT..(unit + 1) * UNIT;
            for block in (range.start / BLOCK * BLOCK..range.end).step_by(BLOCK) {
                let key_units = block.max(range.start)..range.end.min(block + BLOCK);
                // SAFETY: all offsets lie in their parts of the workspace.
                unsafe {
                    let at = (key_units.start - first) * dims * PAIR;
                    let operands = Block {
                        q: q.add(unit * dims * PAIR),
                        k_t: k_t.add(at),
                        v: v.add(at),
                        o: o.add(unit * dims * QUAD),
                        scores,
                        p,
                        factors: factors.as_mut_ptr(),
                        dims,
                        scale,
                        starts: key_units.start == seen.start,
                    };
                    let mask = |i: usize| UnitMask::of(spec, segment, &queries, (key_units.start + i) * UNIT);
                    operands.run(&quads, key_units.len(), mask, &mut max[lanes.clone()], &mut sum[lanes.clone()]);
                }
            }
            if seen.end <= end {
                // SAFETY: the sums are complete and lie in their part; this task alone writes these
                // rows of this head.
                unsafe { finish(job, head, &rows, o.add(unit * dims * QUAD), &max[lanes.clone()], &sum[lanes]) };
            }
        }
    }
}

/// Writes the output and the log-sum-exp of the queries `rows` of `head` from their sums `o` and
/// statistics.
///
/// # Safety
/// `o` are as many quads as a head has units of columns; this task alone writes these rows of this
/// head.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn finish<T>(job: &Forward<'_, T>, head: usize, rows: &Range<usize>, o: *mut f32, max: &[f32], sum: &[f32])
where
    T: Element,
{
    let (d, scale) = (job.spec.head_dim, job.spec.scale.abs());
    // SAFETY: by the contract.
    let lse = unsafe { job.lse.part(head * job.q.rows() + rows.start..head * job.q.rows() + rows.end) };
    let mut factors = [0.0; UNIT];
    for (i, lse) in lse.iter_mut().enumerate() {
        let seen = sum[i] != 0.0;
        *lse = if seen { max[i] * scale + sum[i].ln() } else { f32::NEG_INFINITY };
        factors[i] = if seen { sum[i].recip() } else { 0.0 };
    }
    for dim in 0..units(d) {
        let cols = head * d + dim * UNIT..head * d + d.min((dim + 1) * UNIT);
        // SAFETY: by the contract.
        unsafe { pack::store_rows(o.add(dim * QUAD), &factors, &job.out, rows, &cols) };
    }
}

/// A block of key units against one query unit.
struct Block {
    q: *const u8,
    k_t: *const u8,
    v: *const u8,
    o: *mut f32,
    scores: *mut f32,
    p: *mut u8,
    /// Of each query: what scores are shifted by, or what earlier sums decay by.
    factors: *mut f32,
    dims: usize,
    /// |scale| log2 e: probabilities are powers of two.
    scale: f32,
    /// True if the queries have seen no keys before.
    starts: bool,
}

impl Block {
    /// # Safety
    /// The pointers are aligned parts of the workspace, packed as far as `count` key units need;
    /// `max` and `sum` hold 32.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    #[inline]
    unsafe fn run(
        &self,
        quads: &impl Quads,
        count: usize,
        mask: impl Fn(usize) -> Option<UnitMask>,
        max: &mut [f32],
        sum: &mut [f32],
    ) {
        let row = self.dims * PAIR;
        // SAFETY: by the contract.
        unsafe {
            for i in 0..count {
                let keys = Pairs { first: self.k_t.add(i * row), step: PAIR };
                quads.quad(self.scores.add(i * QUAD), Pairs { first: self.q, step: PAIR }, keys, self.dims);
            }
            for half in 0..2 {
                self.softmax(half, count, &mask, &mut max[half * 16..], &mut sum[half * 16..]);
            }
            for dim in 0..self.dims {
                let (sums, left) = (self.o.add(dim * QUAD), Pairs { first: self.p, step: PAIR });
                let values = Pairs { first: self.v.add(dim * PAIR), step: row };
                if self.starts {
                    quads.quad(sums, left, values, count);
                } else {
                    quads.quad_add(sums, left, values, count);
                }
            }
        }
    }

    /// The probabilities of 16 queries, the upper or the lower ones of the unit, and their
    /// statistics.
    ///
    /// # Safety
    /// As [`run`](Block::run); `max` and `sum` hold 16.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    #[inline]
    unsafe fn softmax(
        &self,
        half: usize,
        count: usize,
        mask: &impl Fn(usize) -> Option<UnitMask>,
        max: &mut [f32],
        sum: &mut [f32],
    ) {
        let scale = _mm512_set1_ps(self.scale);
        // SAFETY: 16 floats each; everything else by the contract.
        unsafe {
            let old = _mm512_loadu_ps(max.as_ptr());
            let mut largest = [_mm512_set1_ps(FLOOR); 16];
            for i in 0..count {
                let scores = self.scores.add(i * QUAD + half * 512);
                match mask(i) {
                    None => raise(scores, |_| u32::MAX, &mut largest),
                    Some(mask) => raise(scores, |r| mask.keys(half * 16 + r), &mut largest),
                }
            }
            let new = _mm512_max_ps(old, fold(largest, |a, b| _mm512_max_ps(a, b)));
            let mut total = _mm512_loadu_ps(sum.as_ptr());
            // Nothing to rescale while no maximum rises, which is the rule after the first blocks.
            if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(old, new) != 0 {
                let decay = exp2(_mm512_mul_ps(_mm512_sub_ps(old, new), scale));
                total = _mm512_mul_ps(total, decay);
                _mm512_storeu_ps(max.as_mut_ptr(), new);
                if !self.starts {
                    _mm512_store_ps(self.factors, decay);
                    for tile in 0..2 * self.dims {
                        let tile = self.o.add(tile / 2 * QUAD + half * 512 + tile % 2 * 256);
                        for r in 0..16 {
                            let decay = _mm512_set1_ps(*self.factors.add(r));
                            _mm512_store_ps(tile.add(r * 16), _mm512_mul_ps(_mm512_load_ps(tile.add(r * 16)), decay));
                        }
                    }
                }
            }
            _mm512_store_ps(self.factors, _mm512_mul_ps(new, scale));
            let mut sums = [_mm512_setzero_ps(); 16];
            for i in 0..count {
                let (scores, out) = (self.scores.add(i * QUAD + half * 512), self.p.add(i * PAIR + half * 1024));
                match mask(i) {
                    None => exponentials(scores, |_| u32::MAX, scale, self.factors, out, &mut sums),
                    Some(mask) => {
                        let mask = |r: usize| mask.keys(half * 16 + r);
                        exponentials(scores, mask, scale, self.factors, out, &mut sums)
                    }
                }
            }
            _mm512_storeu_ps(sum.as_mut_ptr(), _mm512_add_ps(total, fold(sums, |a, b| _mm512_add_ps(a, b))));
        }
    }
}

/// Folds the lanes of each of 16 vectors; lane `r` of the result is vector `r`'s. Four rounds of
/// halving: lanes of 128 bits twice, then their elements.
#[target_feature(enable = "avx512f")]
#[inline]
fn fold(x: [__m512; 16], with: impl Fn(__m512, __m512) -> __m512) -> __m512 {
    // Lane l, element e of the end is vector 4 l + e: lanes hold the vectors 4 apart.
    let lanes = |e: usize| {
        let halves = |a, b| with(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let (a, b) = (halves(x[e], x[4 + e]), halves(x[8 + e], x[12 + e]));
        with(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    };
    let pairs = |a, b| with(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let (a, b) = (pairs(lanes(0), lanes(1)), pairs(lanes(2), lanes(3)));
    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
    with(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
}

/// Raises the maxima of each lane of 16 queries to their visible scores against a unit of keys.
///
/// # Safety
/// `scores` are two tiles.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn raise(scores: *const f32, keys: impl Fn(usize) -> u32, max: &mut [__m512; 16]) {
    for (r, max) in max.iter_mut().enumerate() {
        let keys = keys(r);
        // SAFETY: inside the tiles.
        let (left, right) = unsafe { (_mm512_load_ps(scores.add(r * 16)), _mm512_load_ps(scores.add(256 + r * 16))) };
        *max = _mm512_mask_max_ps(*max, keys as u16, *max, left);
        *max = _mm512_mask_max_ps(*max, (keys >> 16) as u16, *max, right);
    }
}

/// The probabilities of 16 queries against a unit of keys as a tile of a left factor, added to the
/// sums of each lane.
///
/// # Safety
/// `scores` are two tiles, `shift` 16 floats, and `out` is one tile.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
#[inline]
unsafe fn exponentials(
    scores: *const f32,
    keys: impl Fn(usize) -> u32,
    scale: __m512,
    shift: *const f32,
    out: *mut u8,
    sums: &mut [__m512; 16],
) {
    for (r, sum) in sums.iter_mut().enumerate() {
        let keys = keys(r);
        // SAFETY: inside the tiles and floats.
        unsafe {
            let shift = _mm512_set1_ps(*shift.add(r));
            let p = |at: usize, keys: u32| {
                let x = _mm512_fmsub_ps(_mm512_load_ps(scores.add(at)), scale, shift);
                _mm512_maskz_mov_ps(keys as u16, exp2(x))
            };
            let (left, right) = (p(r * 16, keys), p(256 + r * 16, keys >> 16));
            *sum = _mm512_add_ps(*sum, _mm512_add_ps(left, right));
            _mm512_store_si512(out.add(r * 64).cast(), round_pair(left, right));
        }
    }
}
