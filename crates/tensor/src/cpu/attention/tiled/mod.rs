//! The tiled form, for bf16 operands: every product runs on tiles of pairs, by AMX or by
//! `vdpbf16ps`, and everything between them in AVX-512.
//!
//! The grain is a *unit* of 32 rows (queries or keys) or 32 columns (of a head). A product of two
//! units is two by two tiles ([`Quads`]). Operands are packed once per task into tiles without
//! gaps. Where a pack holds units of rows and of columns, pair `(row unit r, column unit c)` of a
//! head of `D` column units is pair `r * D + c`.
//!
//! | pack | tile contents | used as |
//! |---|---|---|
//! | rows | 16 rows of 32 columns | left factor X |
//! | dwords | the same, transposed by pairs of columns | right factor X^T |
//! | pairs | 16 interleaved pairs of rows, of 16 columns in `pack::place` order | right factor X |
//! | columns | 16 columns, in the same order, of 32 rows | left factor X^T |
//!
//! Forward makes scores with queries down, `S = Q K^T`, so that probabilities are a left factor as
//! they are made. Backward makes them transposed, `S^T = K Q^T`, because P^T and dS^T are the left
//! factors of dV and dK. Rows and columns beyond the ends are packed as zeros. bf16 products are
//! exact in f32; sums are f32 in the order of the hardware.

mod backward;
mod forward;
mod pack;
mod vectors;

pub(super) use backward::{floats as backward_floats, task as backward};
pub(super) use forward::{floats as forward_floats, task as forward};

pub(super) use vectors::Vectors;

use super::plan::Segment;
use super::{AttentionSpec, Rows};
use crate::cpu::amx::{Pairs, Tiles};
use crate::dtype::{Scalar, bf16};
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows or columns of a unit.
pub(super) const UNIT: usize = 32;
/// Query rows of a forward task, counted over the heads of a group: packing 512 keys is then some 5
/// % of the work on them, and O, Q and the packs of [`SUPER`] keys stay within half of the 2 MiB of
/// L2 that every AMX core has, up to heads of 128.
pub(super) const CHUNK: usize = 512;
/// Key units packed at a time: 512 keys.
const SUPER: usize = 16;
/// Bytes of a pair of tiles.
const PAIR: usize = 2048;
/// Floats of two by two tiles of sums.
const QUAD: usize = 1024;

/// log2 e, for exponentials as powers of two.
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Units that hold `len` rows or columns.
const fn units(len: usize) -> usize {
    len.div_ceil(UNIT)
}

/// The multiplication of two by two tiles. A left pair is two tiles one below the other, a right
/// pair two tiles side by side.
pub(super) trait Quads {
    /// Gets ready; dropping the value ends it.
    ///
    /// # Safety
    /// The CPU must have what it multiplies with, and the thread use no other configuration of
    /// tiles while the value lives.
    unsafe fn begin() -> Self;

    /// `C = A B` over `steps > 0` pairs; `C` is the tiles (0, 0), (0, 1), (1, 0), (1, 1), 4 KiB.
    ///
    /// # Safety
    /// All pairs of `a` and `b` must be readable, `c` writable, all aligned to 64 bytes, and `c`
    /// overlap neither.
    unsafe fn quad(&self, c: *mut f32, a: Pairs, b: Pairs, steps: usize);

    /// `C += A B`, otherwise as [`quad`](Quads::quad).
    ///
    /// # Safety
    /// As [`quad`](Quads::quad), and `c` must be readable.
    unsafe fn quad_add(&self, c: *mut f32, a: Pairs, b: Pairs, steps: usize);
}

impl Quads for Tiles {
    unsafe fn begin() -> Tiles {
        // SAFETY: by the contract.
        unsafe { Tiles::configure() }
    }

    #[inline(always)]
    unsafe fn quad(&self, c: *mut f32, a: Pairs, b: Pairs, steps: usize) {
        // SAFETY: by the contract.
        unsafe { Tiles::quad(self, c, a, b, steps) }
    }

    #[inline(always)]
    unsafe fn quad_add(&self, c: *mut f32, a: Pairs, b: Pairs, steps: usize) {
        // SAFETY: by the contract.
        unsafe { Tiles::quad_add(self, c, a, b, steps) }
    }
}

/// `x`, whose elements are known to be bf16, as such.
fn as_bf16<T: Scalar>(x: Rows<'_, T>) -> Rows<'_, bf16> {
    x.cast()
}

/// `2^x` of each lane for `x <= 0` (and a little above), relative error 2.6e-6; 0 far below; NaN
/// stays NaN.
///
/// `2^x = 2^floor(x) 2^(x - floor(x))`; the second factor is the minimax polynomial of degree 4 on
/// `[0, 1)` in relative error, found by Remez' exchange. Its error is 1/1500 of what rounding a
/// probability to bf16 makes.
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn exp2(x: __m512) -> __m512 {
    // Round down (1), suppress exceptions (8), keep 0 fraction bits: x - floor(x).
    let f = _mm512_reduce_ps::<0x09>(x);
    let mut p = _mm512_set1_ps(0.013_534_168);
    for c in [0.052_011_46, 0.241_442_76, 0.693_003_83, 1.000_002_6] {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    }
    // Multiplies by 2^floor(x).
    _mm512_scalef_ps(p, x)
}

/// Two vectors rounded to bf16: words 0 to 15 are `low`, 16 to 31 `high`.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn round_pair(low: __m512, high: __m512) -> __m512i {
    let pair: __m512bh = _mm512_cvtne2ps_pbh(high, low);
    // SAFETY: both are 64 bytes without invalid values.
    unsafe { std::mem::transmute(pair) }
}

/// Per key, the queries of a unit of 32 that see it, from which lane masks are made.
#[derive(Clone, Copy)]
struct UnitMask {
    /// Position of the unit's first query minus the unit's first key.
    ahead: isize,
    causal: bool,
    window: isize,
    /// Keys of the unit that exist.
    keys: usize,
}

impl UnitMask {
    /// The mask of the queries `queries` (of one unit) against the keys `keys` (a whole unit, of
    /// which some may lie beyond the segment), or `None` when everything is visible.
    fn of(spec: &AttentionSpec, segment: &Segment, queries: &Range<usize>, keys: usize) -> Option<UnitMask> {
        if segment.all_visible(spec, queries, &(keys..keys + UNIT)) {
            return None;
        }
        Some(UnitMask {
            ahead: segment.position(queries.start) - keys as isize,
            causal: spec.causal,
            window: spec.window.map_or(isize::MAX / 2, |window| window.min(isize::MAX as usize / 2) as isize),
            keys: segment.keys.len() - keys,
        })
    }

    /// One bit per query that sees key `key` of the unit.
    #[inline(always)]
    fn queries(&self, key: usize) -> u32 {
        if key >= self.keys {
            return 0;
        }
        if !self.causal {
            return u32::MAX;
        }
        // Query lane q sits at `ahead + q`: it sees the key when key <= ahead + q < key + window.
        let first = key as isize - self.ahead;
        below(first + self.window) & !below(first)
    }

    /// One bit per key of the unit that query `query` sees.
    #[inline(always)]
    fn keys(&self, query: usize) -> u32 {
        let exist = below(self.keys as isize);
        if !self.causal {
            return exist;
        }
        let last = self.ahead + query as isize;
        exist & below(last + 1) & !below(last + 1 - self.window)
    }
}

/// Bits 0 to `n - 1`, of 32.
#[inline(always)]
fn below(n: isize) -> u32 {
    ((1u64 << n.clamp(0, 32)) - 1) as u32
}
