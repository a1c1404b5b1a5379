//! The register kernel on codes of eight bits: AVX2, which has no instruction for sums of four.
//!
//! `vpmaddubsw` multiplies bytes without a sign by bytes with one, and adds neighbours to 16 bits,
//! with saturation. So the magnitudes of left codes are multiplied by right codes that got the left
//! one's sign: two products of codes from -127 to 127 are at most 32,258, which 16 bits hold.
//! `vpmaddwd` by ones adds neighbours again. Four instructions do the work of four multiply-adds of
//! `f32`, and three of them can issue in a cycle instead of two.
//!
//! The tile is 4 x 16: 8 of 16 registers hold sums, and what is between the four instructions takes
//! most of the others.

use super::driver::Tiles;
use super::fma::{Lanes, tiles};
use std::arch::x86_64::*;

/// Four codes a word. A value proves that the CPU has AVX2.
#[derive(Clone, Copy)]
struct Quads(());

impl Lanes for Quads {
    type Words = __m256i;
    type Sums = __m256i;
    const LANES: usize = 8;

    #[inline(always)]
    fn zero(self) -> __m256i {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> __m256i {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(self, p: *const u32) -> __m256i {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm256_set1_epi32((*p).cast_signed()) }
    }
    #[inline(always)]
    fn multiply_add(self, sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn load_sums(self, p: *const f32) -> __m256i {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_sums(self, p: *mut f32, sums: __m256i) {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm256_storeu_si256(p.cast(), sums) }
    }
}

/// # Safety
/// As [`super::fma`]'s tiles; the CPU must have AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel(rows: usize, t: &Tiles) {
    let l = Quads(());
    // SAFETY: by contract.
    unsafe {
        match rows {
            3.. => tiles::<_, 4, 2>(l, t),
            2 => tiles::<_, 2, 2>(l, t),
            _ => tiles::<_, 1, 2>(l, t),
        }
    }
}
