//! Forward on tiles.
//!
//! A task packs the Q^T of its queries (all heads of a group), then walks its keys by [`SUPER`] units: packs K and V^T of
//! those, and for each query unit walks blocks of up to [`BLOCK`] key units: scores, maxima, probabilities, then
//! `O^T += V^T P^T` over the whole block, so that sums are loaded into tiles and stored once per block.

use super::{CHUNK, LN_2, LOG2_E, PAIR, QUAD, SUPER, UNIT, UnitMask, as_bf16, exp2, pack, round_pair, units};
use crate::cpu::amx::{Pairs, Tiles};
use crate::cpu::attention::plan::{self, Task};
use crate::cpu::attention::scratch::{carve, total, with};
use crate::cpu::attention::vector::FLOOR;
use crate::cpu::attention::{AttentionSpec, Forward};
use crate::dtype::{Element, bf16};
use std::arch::x86_64::*;
use std::ops::Range;

/// Key units of a block: scores of 4 x 32 keys by 32 queries are 16 KiB, probabilities 8; both stay in L1.
const BLOCK: usize = 4;

/// Query units of a task: those of a chunk, for each head of a group.
fn query_units(spec: &AttentionSpec) -> usize {
    spec.group() * plan::chunk(spec, CHUNK, UNIT) / UNIT
}

/// The parts of the workspace, in floats: Q^T, K, V^T, O^T, scores, probabilities, maxima, sums.
fn parts(spec: &AttentionSpec) -> [usize; 8] {
    let (d, queries) = (units(spec.head_dim), query_units(spec));
    let pair = PAIR / 4;
    let lanes = queries * UNIT;
    [
        queries * d * pair,
        SUPER * d * pair,
        SUPER * d * pair,
        queries * d * QUAD,
        BLOCK * QUAD,
        BLOCK * pair,
        lanes,
        lanes,
    ]
}

/// Floats of workspace of a task.
pub(in crate::cpu::attention) fn floats(spec: &AttentionSpec) -> usize {
    total(&parts(spec))
}

/// One chunk of the queries of the heads of one key/value head.
pub(in crate::cpu::attention) fn task<T: Element>(job: &Forward<'_, T>, task: &Task) {
    // SAFETY: jobs come here only on the AMX rung, which no CPU without these features detects.
    with(floats(job.spec), |space| unsafe { run(job, task, space) });
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn run<T: Element>(job: &Forward<'_, T>, task: &Task, space: &mut [f32]) {
    let (spec, segment) = (job.spec, &task.segment);
    let (d, group) = (spec.head_dim, spec.group());
    let dims = units(d);
    let [q_t, k, v_t, o_t, scores, probabilities, max, sum] = carve(space, parts(spec));
    let (q_t, k, v_t) = (q_t.as_mut_ptr().cast::<u8>(), k.as_mut_ptr().cast::<u8>(), v_t.as_mut_ptr().cast::<u8>());
    let (o_t, scores) = (o_t.as_mut_ptr(), scores.as_mut_ptr());
    let probabilities = probabilities.as_mut_ptr().cast::<u8>();
    let (q_rows, k_rows, v_rows) = (as_bf16(job.q), as_bf16(job.k), as_bf16(job.v));
    let chunk_units = units(task.chunk.len());
    // The queries of unit `unit` of the chunk.
    let queries = |unit: usize| -> Range<usize> {
        let start = task.chunk.start + unit * UNIT;
        start..task.chunk.end.min(start + UNIT)
    };
    let cols = |dim: usize| UNIT.min(d - dim * UNIT);
    // The largest score is the largest product only when the scale is positive: a negative sign goes into Q.
    let scale = spec.scale.abs() * LOG2_E;

    for head in 0..group {
        for unit in 0..chunk_units {
            let queries = queries(unit);
            for dim in 0..dims {
                let from = pack::Unit {
                    x: q_rows,
                    row: segment.queries.start + queries.start,
                    rows: queries.len(),
                    col: (task.kv_head * group + head) * d + dim * UNIT,
                    cols: cols(dim),
                    negate: spec.scale < 0.0,
                };
                // SAFETY: the pair lies in its part of the workspace.
                unsafe { pack::dwords(&from, q_t.add(((head * chunk_units + unit) * dims + dim) * PAIR)) };
            }
        }
    }
    let lanes = group * chunk_units * UNIT;
    // SAFETY: as many floats lie in the part.
    unsafe { std::slice::from_raw_parts_mut(o_t, lanes / UNIT * dims * QUAD) }.fill(0.0);
    max[..lanes].fill(FLOOR);
    sum[..lanes].fill(0.0);

    // SAFETY: the AMX rung was detected; this task uses no other configuration.
    let tiles = unsafe { Tiles::configure() };
    let visible = segment.visible_to_any(spec, &task.chunk);
    let key_units = visible.start / UNIT..units(visible.end);
    // Blocks lie on a grid from the segment's start, so that a query's arithmetic does not depend on its chunk.
    let mut first = key_units.start / SUPER * SUPER;
    while first < key_units.end {
        let end = key_units.end.min(first + SUPER);
        for unit in first.max(key_units.start)..end {
            for dim in 0..dims {
                let mut from = pack::Unit {
                    x: k_rows,
                    row: segment.keys.start + unit * UNIT,
                    rows: UNIT.min(segment.keys.len() - unit * UNIT),
                    col: task.kv_head * d + dim * UNIT,
                    cols: cols(dim),
                    negate: false,
                };
                let at = ((unit - first) * dims + dim) * PAIR;
                // SAFETY: the pairs lie in their parts of the workspace.
                unsafe {
                    pack::rows(&from, k.add(at));
                    from.x = v_rows;
                    pack::columns(&from, v_t.add(at));
                }
            }
        }
        for lane_unit in 0..group * chunk_units {
            let queries = queries(lane_unit % chunk_units);
            let seen = segment.visible_to_any(spec, &queries);
            if seen.is_empty() {
                continue;
            }
            let range = (seen.start / UNIT).max(first)..units(seen.end).min(end);
            let mut block = range.start / BLOCK * BLOCK;
            while block < range.end {
                let key_units = block.max(range.start)..range.end.min(block + BLOCK);
                let lanes = lane_unit * UNIT..(lane_unit + 1) * UNIT;
                // SAFETY: all offsets lie in their parts of the workspace.
                unsafe {
                    let at = (key_units.start - first) * dims * PAIR;
                    let operands = Block {
                        q_t: q_t.add(lane_unit * dims * PAIR),
                        k: k.add(at),
                        v_t: v_t.add(at),
                        o_t: o_t.add(lane_unit * dims * QUAD),
                        scores,
                        probabilities,
                        dims,
                        scale,
                    };
                    let mask = |i: usize| UnitMask::of(spec, segment, &queries, (key_units.start + i) * UNIT);
                    operands.run(&tiles, key_units.len(), mask, &mut max[lanes.clone()], &mut sum[lanes]);
                }
                block += BLOCK;
            }
        }
        first += SUPER;
    }
    drop(tiles);

    for lane_unit in 0..group * chunk_units {
        let head = task.kv_head * group + lane_unit / chunk_units;
        let queries = queries(lane_unit % chunk_units);
        let rows = segment.queries.start + queries.start..segment.queries.start + queries.end;
        let lanes = lane_unit * UNIT..(lane_unit + 1) * UNIT;
        let (max, sum) = (&max[lanes.clone()], &mut sum[lanes]);
        // SAFETY: this task alone writes these queries' statistics of this head.
        let lse = unsafe { job.lse.part(head * job.q.rows() + rows.start..head * job.q.rows() + rows.end) };
        for (i, sum) in sum.iter_mut().enumerate() {
            let seen = *sum != 0.0;
            if let Some(lse) = lse.get_mut(i) {
                *lse = if seen { max[i] * scale * LN_2 + sum.ln() } else { f32::NEG_INFINITY };
            }
            *sum = if seen { sum.recip() } else { 0.0 };
        }
        for dim in 0..dims {
            for half in 0..2 {
                // SAFETY: the quad lies in its part of the workspace; 16 factors lie in `sum`.
                let values = unsafe {
                    let quad = o_t.add((lane_unit * dims + dim) * QUAD + half * 256);
                    pack::transposed_rows(quad, _mm512_loadu_ps(sum.as_ptr().add(half * 16)))
                };
                for (value, row) in values.iter().zip(rows.clone().skip(half * 16)) {
                    let first = head * d + dim * UNIT;
                    // SAFETY: this task alone writes these rows of this head, one after another.
                    let out = unsafe { job.out.part(row, first..first + cols(dim)) };
                    pack::store_row(*value, bytemuck::cast_slice_mut::<T, bf16>(out));
                }
            }
        }
    }
}

/// A block of key units against one query unit.
struct Block {
    q_t: *const u8,
    k: *const u8,
    v_t: *const u8,
    o_t: *mut f32,
    scores: *mut f32,
    probabilities: *mut u8,
    dims: usize,
    /// |scale| log2 e: probabilities are powers of two.
    scale: f32,
}

impl Block {
    /// # Safety
    /// The pointers are aligned parts of the workspace, packed as far as `count` key units need; `max` and `sum` hold 32.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn run(
        &self,
        tiles: &Tiles,
        count: usize,
        mask: impl Fn(usize) -> Option<UnitMask>,
        max: &mut [f32],
        sum: &mut [f32],
    ) {
        let scale = _mm512_set1_ps(self.scale);
        let row = self.dims * PAIR;
        // SAFETY: 32 floats each; everything else by the contract.
        unsafe {
            let old = [_mm512_loadu_ps(max.as_ptr()), _mm512_loadu_ps(max.as_ptr().add(16))];
            let mut new = old;
            for i in 0..count {
                let scores = self.scores.add(i * QUAD);
                let keys = Pairs { first: self.k.add(i * row), step: PAIR };
                tiles.quad(scores, keys, Pairs { first: self.q_t, step: PAIR }, self.dims);
                match mask(i) {
                    None => largest(scores, |_| u32::MAX, &mut new),
                    Some(mask) => largest(scores, |key| mask.lanes(key), &mut new),
                }
            }
            let mut total = [_mm512_loadu_ps(sum.as_ptr()), _mm512_loadu_ps(sum.as_ptr().add(16))];
            // Nothing to rescale while no maximum rises, which is the rule after the first blocks.
            let rises =
                _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(old[0], new[0]) | _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(old[1], new[1]);
            if rises != 0 {
                let mut decay = [scale; 2];
                for h in 0..2 {
                    decay[h] = exp2(_mm512_mul_ps(_mm512_sub_ps(old[h], new[h]), scale));
                    total[h] = _mm512_mul_ps(total[h], decay[h]);
                    _mm512_storeu_ps(max.as_mut_ptr().add(h * 16), new[h]);
                }
                for quad in 0..self.dims * 2 {
                    for h in 0..2 {
                        let tile = self.o_t.add(quad * 512 + h * 256);
                        for r in 0..16 {
                            _mm512_store_ps(
                                tile.add(r * 16),
                                _mm512_mul_ps(_mm512_load_ps(tile.add(r * 16)), decay[h]),
                            );
                        }
                    }
                }
            }
            let shift = [_mm512_mul_ps(new[0], scale), _mm512_mul_ps(new[1], scale)];
            for i in 0..count {
                let (scores, out) = (self.scores.add(i * QUAD), self.probabilities.add(i * PAIR));
                match mask(i) {
                    None => exponentials(scores, |_| u32::MAX, scale, shift, out, &mut total),
                    Some(mask) => exponentials(scores, |key| mask.lanes(key), scale, shift, out, &mut total),
                }
            }
            _mm512_storeu_ps(sum.as_mut_ptr(), total[0]);
            _mm512_storeu_ps(sum.as_mut_ptr().add(16), total[1]);
            for dim in 0..self.dims {
                let values = Pairs { first: self.v_t.add(dim * PAIR), step: row };
                let right = Pairs { first: self.probabilities, step: PAIR };
                tiles.quad_add(self.o_t.add(dim * QUAD), values, right, count);
            }
        }
    }
}

/// Raises `max` to the largest visible score of each lane of a unit.
///
/// # Safety
/// `scores` is a quad.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn largest(scores: *const f32, lanes: impl Fn(usize) -> u32, max: &mut [__m512; 2]) {
    for key in 0..UNIT {
        let lanes = lanes(key);
        for (h, max) in max.iter_mut().enumerate() {
            // Tile (key / 16, h), row key % 16. SAFETY: inside the quad.
            let score = unsafe { _mm512_load_ps(scores.add((key / 16) * 512 + h * 256 + (key % 16) * 16)) };
            *max = _mm512_mask_max_ps(*max, (lanes >> (16 * h)) as u16, *max, score);
        }
    }
}

/// The probabilities of a unit as a right factor (pairs of keys interleaved), and their sums.
///
/// # Safety
/// `scores` is a quad and `out` a pair of tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
#[inline]
unsafe fn exponentials(
    scores: *const f32,
    lanes: impl Fn(usize) -> u32,
    scale: __m512,
    shift: [__m512; 2],
    out: *mut u8,
    sum: &mut [__m512; 2],
) {
    let interleave = {
        let mut words = [0i16; 32];
        for (i, word) in words.iter_mut().enumerate() {
            *word = (i / 2) as i16 + (i % 2) as i16 * 16;
        }
        // SAFETY: both are 64 bytes without invalid values.
        unsafe { std::mem::transmute::<[i16; 32], __m512i>(words) }
    };
    for key in (0..UNIT).step_by(2) {
        let (even, odd) = (lanes(key), lanes(key + 1));
        for h in 0..2 {
            let at = (key / 16) * 512 + h * 256 + (key % 16) * 16;
            let p = |at: usize, lanes: u32| {
                // SAFETY: inside the quad.
                let score = unsafe { _mm512_load_ps(scores.add(at)) };
                _mm512_maskz_mov_ps((lanes >> (16 * h)) as u16, exp2(_mm512_fmsub_ps(score, scale, shift[h])))
            };
            let (even, odd) = (p(at, even), p(at + 16, odd));
            sum[h] = _mm512_add_ps(sum[h], _mm512_add_ps(even, odd));
            let words = _mm512_permutexvar_epi16(interleave, round_pair(even, odd));
            // SAFETY: inside the pair: row key / 2 of tile h.
            unsafe { _mm512_store_si512(out.add(h * 1024 + (key / 2) * 64).cast(), words) };
        }
    }
}
