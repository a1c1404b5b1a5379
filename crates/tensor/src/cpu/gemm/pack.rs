//! Packing: from matrices of any float type, lying either way, to the panels of words that register
//! kernels read.
//!
//! There are two directions a vector of words can be read from memory: along the shared index or
//! along the outer one. A left panel wants rows along the shared index, a right panel word rows
//! along the outer index; where memory lies the other way, a square of words is transposed in
//! registers. AVX-512 does 16 x 16 words in 64 shuffles with masked loads for the tails; the other
//! rungs go through a plain loop, whose cost their slower register kernels hide.
//!
//! Codes of eight bits always lie along the shared index. Those of a left panel are packed with 128
//! added, without a sign, as `vpdpbusd` wants them.

use super::driver::{A_STRIDE, Operand, Rung};
use crate::dtype::{DType, Element};

/// An operand of a multiplication: a float, or a code of eight bits in two's complement.
pub(super) trait Factor: Copy + Send + Sync + 'static {
    /// Its type; that of codes is `U8`.
    const DTYPE: DType;
    /// Widens, exactly.
    fn to_f32(self) -> f32;
}

impl<T: Element> Factor for T {
    const DTYPE: DType = T::DTYPE;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Element::to_f32(self)
    }
}

impl Factor for i8 {
    const DTYPE: DType = DType::U8;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.into()
    }
}

/// Packs `rows` rows of the left operand from `row`, and `depth` shared indices from `k`, into `a`;
/// words are padded with zeros to a multiple of 16.
///
/// # Safety
/// The operand must hold the part; `a` must have room for `rows` rows of [`A_STRIDE`] words; the
/// CPU must have the rung's instructions.
pub(super) unsafe fn left<T: Factor>(
    rung: Rung,
    src: &Operand<T>,
    row: usize,
    rows: usize,
    k: usize,
    depth: usize,
    a: *mut u32,
) {
    if depth == 0 {
        return;
    }
    // SAFETY: by this function's contract.
    unsafe {
        match rung {
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512 => x86::left::<T, 1>(src, row, rows, k, depth, a),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512Vnni => x86::left::<T, 4>(src, row, rows, k, depth, a),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512Bf16 => x86::left::<T, 2>(src, row, rows, k, depth, a),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx2 => x86::left_avx2(src, row, rows, k, depth, a),
            Rung::Avx2Int8 => left_quads(src, row, rows, k, depth, a),
            _ => left_plain(src, row, rows, k, depth, a),
        }
    }
}

/// Packs `cols` columns of the right operand from `col`, and `depth` shared indices from `k`, into
/// panels in `b`; columns are padded with zeros to `padded_cols`, words to a multiple of 16.
///
/// # Safety
/// The operand must hold the part; `b` must have room for `padded_cols` columns of the padded
/// words; the CPU must have the rung's instructions.
pub(super) unsafe fn right<T: Factor>(
    rung: Rung,
    src: &Operand<T>,
    col: usize,
    cols: usize,
    padded_cols: usize,
    k: usize,
    depth: usize,
    b: *mut u32,
) {
    if depth == 0 {
        return;
    }
    // SAFETY: by this function's contract.
    unsafe {
        match rung {
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512 => x86::right::<T, 1>(src, col, cols, padded_cols, k, depth, b),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512Vnni => x86::right::<T, 4>(src, col, cols, padded_cols, k, depth, b),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx512Bf16 => x86::right::<T, 2>(src, col, cols, padded_cols, k, depth, b),
            #[cfg(target_arch = "x86_64")]
            Rung::Avx2 => x86::right_avx2(src, col, cols, padded_cols, k, depth, b),
            Rung::Avx2Int8 => right_quads(src, col, cols, padded_cols, k, depth, b),
            _ => right_plain(src, col, cols, padded_cols, k, depth, b),
        }
    }
}

/// [`left`] into `f32` words, in plain Rust.
///
/// # Safety
/// As [`left`].
#[inline(always)]
unsafe fn left_plain<T: Factor>(src: &Operand<T>, row: usize, rows: usize, k: usize, depth: usize, a: *mut u32) {
    let padded = depth.next_multiple_of(16);
    for i in 0..rows {
        // SAFETY: row `i` of the panel.
        let dst = unsafe { std::slice::from_raw_parts_mut(a.add(i * A_STRIDE).cast::<f32>(), padded) };
        if src.along_k {
            // SAFETY: the operand holds the part.
            let src = unsafe { std::slice::from_raw_parts(src.at(row + i, k), depth) };
            for (d, s) in dst.iter_mut().zip(src) {
                *d = s.to_f32();
            }
        } else {
            for (j, d) in dst[..depth].iter_mut().enumerate() {
                // SAFETY: the operand holds the part.
                *d = unsafe { (*src.at(row + i, k + j)).to_f32() };
            }
        }
        dst[depth..].fill(0.0);
    }
}

/// [`right`] into panels of 8 `f32` words, in plain Rust.
///
/// # Safety
/// As [`right`].
#[inline(always)]
unsafe fn right_plain<T: Factor>(
    src: &Operand<T>,
    col: usize,
    cols: usize,
    padded_cols: usize,
    k: usize,
    depth: usize,
    b: *mut u32,
) {
    const LANES: usize = 8;
    let padded = depth.next_multiple_of(16);
    for first in (0..padded_cols).step_by(LANES) {
        let lanes = cols.saturating_sub(first).min(LANES);
        // SAFETY: the panel of these columns.
        let panel = unsafe { std::slice::from_raw_parts_mut(b.add(first * padded).cast::<f32>(), LANES * padded) };
        if lanes < LANES {
            panel.fill(0.0);
        } else {
            panel[LANES * depth..].fill(0.0);
        }
        if src.along_k {
            for lane in 0..lanes {
                // SAFETY: the operand holds the part.
                let src = unsafe { std::slice::from_raw_parts(src.at(col + first + lane, k), depth) };
                for (d, s) in panel[lane..].iter_mut().step_by(LANES).zip(src) {
                    *d = s.to_f32();
                }
            }
        } else {
            for (j, word_row) in panel.chunks_exact_mut(LANES).take(depth).enumerate() {
                // SAFETY: the operand holds the part.
                let src = unsafe { std::slice::from_raw_parts(src.at(col + first, k + j), lanes) };
                for (d, s) in word_row.iter_mut().zip(src) {
                    *d = s.to_f32();
                }
            }
        }
    }
}

/// Codes in a word.
const QUAD: usize = 4;

/// [`left`] of codes into words of four, in plain Rust.
///
/// # Safety
/// As [`left`]; the elements must be codes, which lie along the shared index.
unsafe fn left_quads<T: Factor>(src: &Operand<T>, row: usize, rows: usize, k: usize, depth: usize, a: *mut u32) {
    assert!(size_of::<T>() == 1 && src.along_k, "codes lie along the shared index");
    let padded = QUAD * depth.div_ceil(QUAD).next_multiple_of(16);
    for i in 0..rows {
        // SAFETY: row `i` of the panel, and the part that the operand holds.
        unsafe {
            let to = a.add(i * A_STRIDE).cast::<u8>();
            to.copy_from_nonoverlapping(src.at(row + i, k).cast(), depth);
            to.add(depth).write_bytes(0, padded - depth);
        }
    }
}

/// [`right`] of codes into panels of 8 words of four, in plain Rust.
///
/// # Safety
/// As [`right`]; the elements must be codes, which lie along the shared index.
unsafe fn right_quads<T: Factor>(
    src: &Operand<T>,
    col: usize,
    cols: usize,
    padded_cols: usize,
    k: usize,
    depth: usize,
    b: *mut u32,
) {
    const LANES: usize = 8;
    assert!(size_of::<T>() == 1 && src.along_k, "codes lie along the shared index");
    let padded = depth.div_ceil(QUAD).next_multiple_of(16);
    for first in (0..padded_cols).step_by(LANES) {
        let lanes = cols.saturating_sub(first).min(LANES);
        // SAFETY: the panel of these columns.
        let panel = unsafe { std::slice::from_raw_parts_mut(b.add(first * padded), LANES * padded) };
        if lanes < LANES {
            panel.fill(0);
        } else {
            panel[LANES * (depth / QUAD)..].fill(0);
        }
        for lane in 0..lanes {
            // SAFETY: the operand holds the part, whose elements are bytes.
            let codes: &[u8] = unsafe { std::slice::from_raw_parts(src.at(col + first + lane, k).cast(), depth) };
            let (words, rest) = codes.as_chunks::<QUAD>();
            for (to, word) in panel[lane..].iter_mut().step_by(LANES).zip(words) {
                *to = u32::from_le_bytes(*word);
            }
            if !rest.is_empty() {
                let mut word = [0; QUAD];
                word[..rest.len()].copy_from_slice(rest);
                panel[LANES * words.len() + lane] = u32::from_le_bytes(word);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{A_STRIDE, Factor, Operand};
    use crate::cpu::gemm::driver::prefetch;
    use crate::dtype::DType;
    use std::arch::x86_64::*;

    /// # Safety
    /// As [`left`](super::left).
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn left_avx2<T: Factor>(
        src: &Operand<T>,
        row: usize,
        rows: usize,
        k: usize,
        depth: usize,
        a: *mut u32,
    ) {
        // SAFETY: by contract.
        unsafe { super::left_plain(src, row, rows, k, depth, a) }
    }

    /// # Safety
    /// As [`right`](super::right).
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn right_avx2<T: Factor>(
        src: &Operand<T>,
        col: usize,
        cols: usize,
        padded_cols: usize,
        k: usize,
        depth: usize,
        b: *mut u32,
    ) {
        // SAFETY: by contract.
        unsafe { super::right_plain(src, col, cols, padded_cols, k, depth, b) }
    }

    /// The first `n` of up to 64 lanes.
    #[inline(always)]
    fn first(n: usize) -> u64 {
        if n >= 64 { !0 } else { (1 << n) - 1 }
    }

    /// Up to 16 elements as `f32` words; zeros behind `n`.
    ///
    /// # Safety
    /// `n` elements must be readable from `p`; the CPU must have the instructions.
    #[inline(always)]
    unsafe fn singles<T: Factor>(p: *const T, n: usize) -> __m512i {
        let mask = first(n) as u16;
        // SAFETY: masked lanes are not read; by contract of the caller the others are readable.
        unsafe {
            match T::DTYPE {
                DType::F32 => _mm512_maskz_loadu_epi32(mask, p.cast()),
                DType::BF16 => _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.cast()))),
                DType::F16 => _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast()))),
                DType::U8 => {
                    let codes = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, p.cast()));
                    _mm512_castps_si512(_mm512_cvtepi32_ps(codes))
                }
                DType::I32 | DType::U32 => unreachable!("no `Factor`s"),
            }
        }
    }

    /// Words from `n` elements along the shared index.
    ///
    /// # Safety
    /// `n` elements must be readable from `p`; the CPU must have the instructions.
    #[inline(always)]
    unsafe fn along_k<T: Factor, const WIDTH: usize>(p: *const T, n: usize) -> __m512i {
        // SAFETY: as in `singles`.
        unsafe {
            match WIDTH {
                4 => _mm512_maskz_loadu_epi8(first(n), p.cast()),
                2 => _mm512_maskz_loadu_epi16(first(n) as u32, p.cast()),
                _ => singles(p, n),
            }
        }
    }

    /// A word row: `n` words along the outer index, from shared index `k` on, of which `depth` (at
    /// least 1) are left.
    ///
    /// # Safety
    /// The operand must hold the part; the CPU must have the instructions.
    #[inline(always)]
    unsafe fn along_outer<T: Factor, const WIDTH: usize>(
        src: &Operand<T>,
        outer: usize,
        n: usize,
        k: usize,
        depth: usize,
    ) -> __m512i {
        // SAFETY: as in `singles`.
        unsafe {
            if WIDTH == 1 {
                return singles(src.at(outer, k), n);
            }
            assert!(WIDTH == 2, "codes lie along the shared index");
            let mask = first(n) as u16;
            let even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, src.at(outer, k).cast()));
            if depth == 1 {
                return even;
            }
            let odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, src.at(outer, k + 1).cast()));
            _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd))
        }
    }

    /// Transposes 16 x 16 words: pairs of rows, pairs of pairs, then 128-bit quarters in two steps.
    ///
    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(always)]
    unsafe fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
        // SAFETY: the caller has AVX-512.
        unsafe {
            let mut t = r;
            for i in 0..8 {
                t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
                t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
            }
            // u[4 g + j], quarter l: column 4 l + j of rows 4 g .. 4 g + 4.
            let mut u = t;
            for g in 0..4 {
                u[4 * g] = _mm512_unpacklo_epi64(t[4 * g], t[4 * g + 2]);
                u[4 * g + 1] = _mm512_unpackhi_epi64(t[4 * g], t[4 * g + 2]);
                u[4 * g + 2] = _mm512_unpacklo_epi64(t[4 * g + 1], t[4 * g + 3]);
                u[4 * g + 3] = _mm512_unpackhi_epi64(t[4 * g + 1], t[4 * g + 3]);
            }
            let mut out = u;
            for j in 0..4 {
                let even_low = _mm512_shuffle_i32x4::<0x88>(u[j], u[4 + j]);
                let even_high = _mm512_shuffle_i32x4::<0x88>(u[8 + j], u[12 + j]);
                let odd_low = _mm512_shuffle_i32x4::<0xdd>(u[j], u[4 + j]);
                let odd_high = _mm512_shuffle_i32x4::<0xdd>(u[8 + j], u[12 + j]);
                out[j] = _mm512_shuffle_i32x4::<0x88>(even_low, even_high);
                out[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd_low, odd_high);
                out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even_low, even_high);
                out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd_low, odd_high);
            }
            out
        }
    }

    /// Reads 16 outer indices x 16 words along the shared index; lines behind the ends are zeros.
    ///
    /// # Safety
    /// The operand must hold the part; the CPU must have the instructions.
    #[inline(always)]
    unsafe fn square_along_k<T: Factor, const WIDTH: usize>(
        src: &Operand<T>,
        outer: usize,
        n: usize,
        k: usize,
        depth: usize,
    ) -> [__m512i; 16] {
        // SAFETY: as in `singles`.
        unsafe {
            let mut r = [_mm512_setzero_si512(); 16];
            for (i, r) in r.iter_mut().enumerate() {
                if i < n {
                    *r = along_k::<T, WIDTH>(src.at(outer + i, k), depth);
                }
            }
            r
        }
    }

    /// Reads 16 word rows x 16 outer indices; lines behind the ends are zeros.
    ///
    /// # Safety
    /// The operand must hold the part; the CPU must have the instructions.
    #[inline(always)]
    unsafe fn square_along_outer<T: Factor, const WIDTH: usize>(
        src: &Operand<T>,
        outer: usize,
        n: usize,
        k: usize,
        depth: usize,
    ) -> [__m512i; 16] {
        // SAFETY: as in `singles`.
        unsafe {
            let mut r = [_mm512_setzero_si512(); 16];
            for (i, r) in r.iter_mut().enumerate() {
                if i * WIDTH < depth {
                    *r = along_outer::<T, WIDTH>(src, outer, n, k + i * WIDTH, depth - i * WIDTH);
                }
            }
            r
        }
    }

    /// # Safety
    /// As [`left`](super::left).
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn left<T: Factor, const WIDTH: usize>(
        src: &Operand<T>,
        row: usize,
        rows: usize,
        k: usize,
        depth: usize,
        a: *mut u32,
    ) {
        let step = 16 * WIDTH;
        // SAFETY: `a` has room for the rows with words padded to 16; reads are masked to the part.
        unsafe {
            if src.along_k {
                for i in 0..rows {
                    let (from, to) = (src.at(row + i, k), a.add(i * A_STRIDE));
                    for (block, at) in (0..depth).step_by(step).enumerate() {
                        let mut words = along_k::<T, WIDTH>(from.add(at), depth - at);
                        if WIDTH == 4 {
                            words = _mm512_xor_si512(words, _mm512_set1_epi8(i8::MIN));
                        }
                        _mm512_store_si512(to.add(block * 16).cast(), words);
                    }
                }
                return;
            }
            // Along the outer index within a block of the shared one: 16 or 32 streams that the
            // hardware prefetches.
            for (block, at) in (0..depth).step_by(step).enumerate() {
                for first_row in (0..rows).step_by(16) {
                    let n = (rows - first_row).min(16);
                    let r = square_along_outer::<T, WIDTH>(src, row + first_row, n, k + at, depth - at);
                    for (i, words) in transpose(r).into_iter().enumerate() {
                        if i < n {
                            _mm512_store_si512(a.add((first_row + i) * A_STRIDE + block * 16).cast(), words);
                        }
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`right`](super::right).
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn right<T: Factor, const WIDTH: usize>(
        src: &Operand<T>,
        col: usize,
        cols: usize,
        padded_cols: usize,
        k: usize,
        depth: usize,
        b: *mut u32,
    ) {
        let step = 16 * WIDTH;
        let padded = depth.div_ceil(WIDTH).next_multiple_of(16);
        // SAFETY: `b` has room for the padded panels; reads are masked to the part.
        unsafe {
            if !src.along_k {
                for (block, at) in (0..depth).step_by(step).enumerate() {
                    for first_col in (0..padded_cols).step_by(16) {
                        let n = cols.saturating_sub(first_col).min(16);
                        let to = b.add(first_col * padded + block * 256);
                        // Stored as they are read: as an array of 16 the rows went through the
                        // stack, and twice through `memcpy`.
                        for i in 0..16 {
                            let words = if at + i * WIDTH < depth {
                                let k = k + at + i * WIDTH;
                                along_outer::<T, WIDTH>(src, col + first_col, n, k, depth - at - i * WIDTH)
                            } else {
                                _mm512_setzero_si512()
                            };
                            _mm512_store_si512(to.add(i * 16).cast(), words);
                        }
                    }
                }
                return;
            }
            for first_col in (0..padded_cols).step_by(16) {
                let n = cols.saturating_sub(first_col).min(16);
                for (block, at) in (0..depth).step_by(step).enumerate() {
                    let to = b.add(first_col * padded + block * 256);
                    // The rows are short for the hardware prefetcher: the next panel's are asked
                    // for by hand.
                    for i in 0..16 {
                        prefetch(src.at(col + (first_col + 16 + i).min(cols - 1), k + at).cast());
                    }
                    let r = transpose(square_along_k::<T, WIDTH>(src, col + first_col, n, k + at, depth - at));
                    for (i, words) in r.into_iter().enumerate() {
                        _mm512_store_si512(to.add(i * 16).cast(), words);
                    }
                }
            }
        }
    }
}
