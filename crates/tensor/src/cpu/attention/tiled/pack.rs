//! Packing units into tiles, and taking sums out of them.

use super::{PAIR, UNIT, round_pair};
use crate::cpu::amx::TILE;
use crate::cpu::attention::transpose::transpose;
use crate::cpu::attention::{Rows, RowsMut};
use crate::dtype::{Element, bf16};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// A unit of up to 32 rows by 32 columns of a matrix.
#[derive(Clone, Copy)]
pub(super) struct Unit<'a> {
    first: *const bf16,
    stride: usize,
    rows: usize,
    mask: u32,
    sign: i16,
    _rows: PhantomData<&'a bf16>,
}

impl<'a> Unit<'a> {
    /// The rows `rows` and columns `cols` of `x`, up to 32 of each; panics when they are outside.
    #[inline(always)]
    pub fn new(x: Rows<'a, bf16>, rows: Range<usize>, cols: Range<usize>) -> Unit<'a> {
        assert!(!rows.is_empty() && rows.len() <= UNIT && !cols.is_empty() && cols.len() <= UNIT);
        let (first, mask) = (x.block(&rows, &cols), u32::MAX >> (UNIT - cols.len()));
        Unit { first, stride: x.stride(), rows: rows.len(), mask, sign: 0, _rows: PhantomData }
    }

    /// The same with the sign of all elements flipped when `flip`.
    pub fn negated(self, flip: bool) -> Unit<'a> {
        Unit { sign: if flip { i16::MIN } else { 0 }, ..self }
    }

    /// Row `r` of the unit as 32 words, zeros where there is nothing.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    pub fn load(&self, r: usize) -> __m512i {
        if r >= self.rows {
            return _mm512_setzero_si512();
        }
        // SAFETY: the row is inside by the constructor, and the mask admits exactly its elements.
        let words = unsafe { _mm512_maskz_loadu_epi16(self.mask, self.first.wrapping_add(r * self.stride).cast()) };
        _mm512_xor_si512(words, _mm512_set1_epi16(self.sign))
    }
}

/// Stores 16 vectors as one tile.
///
/// # Safety
/// `tile` is 1 KiB, writable and 64-byte aligned.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn store_tile(tile: *mut u8, rows: &[__m512i; 16]) {
    for (r, row) in rows.iter().enumerate() {
        // SAFETY: by the contract.
        unsafe { _mm512_store_si512(tile.add(r * 64).cast(), *row) };
    }
}

/// The two tiles of pairs of rows: row `r` interleaves rows `2r` and `2r + 1`. `vpunpcklwd` and
/// `vpunpckhwd` take half the time of permutations across lanes and give the columns in another
/// order: see [`place`].
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn interleaved(unit: &Unit<'_>) -> [[__m512i; 16]; 2] {
    let mut tiles = [[_mm512_setzero_si512(); 16]; 2];
    for r in 0..16 {
        let (even, odd) = (unit.load(2 * r), unit.load(2 * r + 1));
        tiles[0][r] = _mm512_unpacklo_epi16(even, odd);
        tiles[1][r] = _mm512_unpackhi_epi16(even, odd);
    }
    tiles
}

/// Where an interleaved unit has its column `column`: the tile, and the column of the tile's sums.
pub(super) const fn place(column: usize) -> (usize, usize) {
    (column / 4 % 2, column / 8 * 4 + column % 4)
}

/// The words of [`round_pair`] of two tiles' rows in the order of the columns.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn in_order(row: __m512i) -> __m512i {
    const INDEX: [i16; 32] = {
        let (mut words, mut column) = ([0; 32], 0);
        while column < 32 {
            let (tile, at) = place(column);
            words[column] = (tile * 16 + at) as i16;
            column += 1;
        }
        words
    };
    // SAFETY: both are 64 bytes without invalid values.
    let index = unsafe { std::mem::transmute::<[i16; 32], __m512i>(INDEX) };
    _mm512_permutexvar_epi16(index, row)
}

/// Left factor X.
///
/// # Safety
/// For this and the functions below: `pair` is 2 KiB, writable and 64-byte aligned, and the CPU has
/// AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn rows(unit: &Unit<'_>, pair: *mut u8) {
    for r in 0..UNIT {
        // SAFETY: by the contract.
        unsafe { _mm512_store_si512(pair.add(r * 64).cast(), unit.load(r)) };
    }
}

/// Right factor X^T.
///
/// # Safety
/// As [`rows`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn dwords(unit: &Unit<'_>, pair: *mut u8) {
    for tile in 0..2 {
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            *r = unit.load(tile * 16 + i);
        }
        // SAFETY: by the contract.
        unsafe { store_tile(pair.add(tile * TILE), &transpose(r)) };
    }
}

/// Right factor X.
///
/// # Safety
/// As [`rows`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pairs(unit: &Unit<'_>, pair: *mut u8) {
    for (tile, rows) in interleaved(unit).iter().enumerate() {
        // SAFETY: by the contract.
        unsafe { store_tile(pair.add(tile * TILE), rows) };
    }
}

/// Left factor X^T: pairs of rows are dwords, so that the transpose of their tile has a column's 32
/// rows in a row.
///
/// # Safety
/// As [`rows`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn columns(unit: &Unit<'_>, pair: *mut u8) {
    for (tile, rows) in interleaved(unit).into_iter().enumerate() {
        // SAFETY: by the contract.
        unsafe { store_tile(pair.add(tile * TILE), &transpose(rows)) };
    }
}

/// The sums of dot products of rows of `a` and `b`, one per row of the unit, added to `sums`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn add_row_dots(a: &Unit<'_>, b: &Unit<'_>, sums: &mut [f32]) {
    for (r, sum) in sums.iter_mut().enumerate().take(a.rows) {
        // SAFETY: both are 64 bytes without invalid values.
        let (a, b): (__m512bh, __m512bh) =
            unsafe { std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>([a.load(r), b.load(r)]).into() };
        *sum += _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), a, b));
    }
}

/// Writes a quad of sums made with an interleaved right factor to the rows `rows` and columns
/// `cols` of `y`, row `r` times `factors[r]`.
///
/// # Safety
/// `quad` is one; the caller alone writes these elements, and the CPU has AVX-512 F, BW and BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn store_rows<T: Element>(
    quad: *const f32,
    factors: &[f32; UNIT],
    y: &RowsMut<'_, T>,
    rows: &Range<usize>,
    cols: &Range<usize>,
) {
    for (r, row) in rows.clone().enumerate() {
        let factor = _mm512_set1_ps(factors[r]);
        // SAFETY: by the contract; rows are visited one after another.
        let (y, value) = unsafe {
            let from = quad.add((r / 16) * 512 + (r % 16) * 16);
            let (left, right) = (_mm512_load_ps(from), _mm512_load_ps(from.add(256)));
            (y.part(row, cols.clone()), round_pair(_mm512_mul_ps(left, factor), _mm512_mul_ps(right, factor)))
        };
        store_row(in_order(value), bytemuck::cast_slice_mut::<T, bf16>(y));
    }
}

/// Sixteen rows of 32 columns from transposed sums made with an interleaved left factor: columns
/// down in two tiles 2 KiB apart (a column of the quad's tiles), each lane multiplied by its
/// factor. Vector `r` holds row `r`, rounded.
///
/// # Safety
/// `tiles` and the tile 2 KiB after it are readable and 64-byte aligned; the CPU has AVX-512 F and
/// BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn transposed_rows(tiles: *const f32, factor: __m512) -> [__m512i; 16] {
    let interleave = {
        let mut words = [0i16; 32];
        for (i, word) in words.iter_mut().enumerate() {
            *word = (i / 2) as i16 + (i % 2) as i16 * 16;
        }
        // SAFETY: both are 64 bytes without invalid values.
        unsafe { std::mem::transmute::<[i16; 32], __m512i>(words) }
    };
    let mut dwords = [_mm512_setzero_si512(); 16];
    for (r, dwords) in dwords.iter_mut().enumerate() {
        // Columns 2r and 2r + 1 lie one below the other.
        let (tile, at) = place(2 * r);
        let base = tile * (PAIR / 4) + at * 16;
        // SAFETY: by the contract.
        let (even, odd) = unsafe { (_mm512_load_ps(tiles.add(base)), _mm512_load_ps(tiles.add(base + 16))) };
        let pair = round_pair(_mm512_mul_ps(even, factor), _mm512_mul_ps(odd, factor));
        *dwords = _mm512_permutexvar_epi16(interleave, pair);
    }
    transpose(dwords)
}

/// Fetches columns `cols` of rows `rows` into the L2 cache.
pub(super) fn prefetch<T>(x: &Rows<'_, T>, rows: &Range<usize>, cols: &Range<usize>) {
    let first = x.block(rows, cols);
    for row in 0..rows.len() {
        for byte in (0..cols.len() * size_of::<T>()).step_by(64) {
            let at = first.wrapping_add(row * x.stride()).cast::<i8>().wrapping_add(byte);
            // SAFETY: a hint, which faults nowhere; SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at) };
        }
    }
}

/// Fetches columns `cols` of rows `rows`, to be written soon.
pub(super) fn prefetch_rows<T>(y: &RowsMut<'_, T>, rows: &Range<usize>, cols: &Range<usize>) {
    let first = y.block(rows, cols);
    for row in 0..rows.len() {
        for byte in (0..cols.len() * size_of::<T>()).step_by(64) {
            let at = first.wrapping_add(row * y.stride()).cast::<i8>().wrapping_add(byte);
            // SAFETY: a hint, which faults nowhere; every CPU with AVX-512 has it.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(at) };
        }
    }
}

/// Writes the first words of `row` to `y`.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn store_row(row: __m512i, y: &mut [bf16]) {
    debug_assert!(y.len() <= UNIT && !y.is_empty());
    // SAFETY: the mask admits exactly the elements of `y`.
    unsafe { _mm512_mask_storeu_epi16(y.as_mut_ptr().cast(), u32::MAX >> (UNIT - y.len()), row) };
}
