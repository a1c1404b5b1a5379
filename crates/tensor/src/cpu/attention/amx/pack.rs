//! Packing units into tiles, and taking sums out of them.

use super::{PAIR, UNIT, round_pair};
use crate::cpu::amx::TILE;
use crate::cpu::attention::Rows;
use crate::cpu::attention::transpose::transpose;
use crate::dtype::bf16;
use std::arch::x86_64::*;

/// Where a unit of 32 rows by 32 columns comes from.
#[derive(Clone, Copy)]
pub(super) struct Unit<'a> {
    pub x: Rows<'a, bf16>,
    /// The first row, and how many there are: up to 32.
    pub row: usize,
    pub rows: usize,
    /// The first column, and how many there are: up to 32.
    pub col: usize,
    pub cols: usize,
    /// Flips the sign of all elements.
    pub negate: bool,
}

impl Unit<'_> {
    /// Row `r` of the unit as 32 words, zeros where there is nothing.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    pub fn load(&self, r: usize) -> __m512i {
        if r >= self.rows {
            return _mm512_setzero_si512();
        }
        let row = &self.x.row(self.row + r)[self.col..self.col + self.cols];
        // SAFETY: the mask admits exactly the elements of `row`.
        let words = unsafe { _mm512_maskz_loadu_epi16(u32::MAX >> (UNIT - self.cols), row.as_ptr().cast()) };
        if self.negate { _mm512_xor_si512(words, _mm512_set1_epi16(i16::MIN)) } else { words }
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

/// The two tiles of pairs of rows: row `r` interleaves rows `2r` and `2r + 1`; columns 0 to 15, then 16 to 31.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn interleaved(unit: &Unit<'_>) -> [[__m512i; 16]; 2] {
    let index = |first: i16| {
        let mut words = [0i16; 32];
        for (i, word) in words.iter_mut().enumerate() {
            *word = first + (i / 2) as i16 + (i % 2) as i16 * 32;
        }
        // SAFETY: both are 64 bytes without invalid values.
        unsafe { std::mem::transmute::<[i16; 32], __m512i>(words) }
    };
    let (low, high) = (index(0), index(16));
    let mut tiles = [[_mm512_setzero_si512(); 16]; 2];
    for r in 0..16 {
        let (even, odd) = (unit.load(2 * r), unit.load(2 * r + 1));
        tiles[0][r] = _mm512_permutex2var_epi16(even, low, odd);
        tiles[1][r] = _mm512_permutex2var_epi16(even, high, odd);
    }
    tiles
}

/// Left factor X.
///
/// # Safety
/// For this and the functions below: `pair` is 2 KiB, writable and 64-byte aligned, and the CPU has AVX-512 F and BW.
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

/// Left factor X^T: pairs of rows are dwords, so that the transpose of their tile has a column's 32 rows in a row.
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

/// Sixteen rows of 32 columns from transposed sums: columns down in two tiles 2 KiB apart (a column of the quad's tiles),
/// each lane multiplied by its factor. Vector `r` holds row `r`, rounded.
///
/// # Safety
/// `tiles` and the tile 2 KiB after it are readable and 64-byte aligned; the CPU has AVX-512 F and BF16.
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
        // Columns 0 to 15 lie in the first tile, 16 to 31 in the one below it.
        let base = (r / 8) * (PAIR / 4) + (r % 8) * 32;
        // SAFETY: by the contract.
        let (even, odd) = unsafe { (_mm512_load_ps(tiles.add(base)), _mm512_load_ps(tiles.add(base + 16))) };
        let pair = round_pair(_mm512_mul_ps(even, factor), _mm512_mul_ps(odd, factor));
        *dwords = _mm512_permutexvar_epi16(interleave, pair);
    }
    transpose(dwords)
}

/// Writes the first words of `row` to `y`.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn store_row(row: __m512i, y: &mut [bf16]) {
    debug_assert!(y.len() <= UNIT && !y.is_empty());
    // SAFETY: the mask admits exactly the elements of `y`.
    unsafe { _mm512_mask_storeu_epi16(y.as_mut_ptr().cast(), u32::MAX >> (UNIT - y.len()), row) };
}
