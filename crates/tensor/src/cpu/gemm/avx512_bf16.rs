//! The register kernel on pairs of `bf16`: AVX-512 with `vdpbf16ps`.
//!
//! Its gain over AVX-512: each lane multiplies a pair and adds both products to an `f32` sum, so
//! a word carries two elements and L1 and L2 carry half the bytes. The tile, 14 x 32, is the one of
//! `f32`. Unlike a fused multiply-add the instruction rounds after each of its two additions, and
//! treats subnormals as zero.

use super::driver::Tiles;
use super::fma::{Lanes, tiles};
use std::arch::x86_64::*;

/// Two `bf16` a word. A value proves that the CPU has AVX-512 F and BF16.
#[derive(Clone, Copy)]
struct Pairs(());

impl Lanes for Pairs {
    type Words = __m512i;
    type Sums = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    fn zero(self) -> __m512 {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> __m512i {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(self, p: *const u32) -> __m512i {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm512_set1_epi32(*p as i32) }
    }
    #[inline(always)]
    fn multiply_add(self, sums: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: `self` proves the instructions; both types are 64 bytes of pairs.
        unsafe {
            let (a, b) = (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b));
            _mm512_dpbf16_ps(sums, a, b)
        }
    }
    #[inline(always)]
    unsafe fn load_sums(self, p: *const f32) -> __m512 {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store_sums(self, p: *mut f32, sums: __m512) {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm512_storeu_ps(p, sums) }
    }
}

/// # Safety
/// As [`super::fma`]'s tiles; the CPU must have AVX-512 F, BW, VL, DQ and BF16.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn panel(rows: usize, t: &Tiles) {
    let l = Pairs(());
    // SAFETY: by contract.
    unsafe {
        match rows {
            9.. => tiles::<_, 14, 2>(l, t),
            5..9 => tiles::<_, 8, 2>(l, t),
            3..5 => tiles::<_, 4, 2>(l, t),
            _ => tiles::<_, 2, 2>(l, t),
        }
    }
}
