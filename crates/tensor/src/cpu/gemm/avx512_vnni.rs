//! The register kernel on codes of eight bits: AVX-512 with `vpdpbusd`.
//!
//! Each lane multiplies four codes of the left operand, without a sign, by four of the right one,
//! with a sign, and adds the products to an `i32` sum, which wraps. So a word carries four
//! elements: twice as many as [`super::avx512_bf16`]'s, at as many instructions a cycle or more.
//! The tile, 14 x 32, is the one of `f32`.

use super::driver::Tiles;
use super::fma::{Lanes, tiles};
use std::arch::x86_64::*;

/// Four codes a word. A value proves that the CPU has AVX-512 F and VNNI.
#[derive(Clone, Copy)]
struct Quads(());

impl Lanes for Quads {
    type Words = __m512i;
    type Sums = __m512i;
    const LANES: usize = 16;

    #[inline(always)]
    fn zero(self) -> __m512i {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_setzero_si512() }
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
    fn multiply_add(self, sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_dpbusd_epi32(sums, a, b) }
    }
    #[inline(always)]
    unsafe fn load_sums(self, p: *const f32) -> __m512i {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_sums(self, p: *mut f32, sums: __m512i) {
        // SAFETY: `self` proves the instructions; the pointer by contract.
        unsafe { _mm512_storeu_si512(p.cast(), sums) }
    }
}

/// # Safety
/// As [`super::fma`]'s tiles; the CPU must have AVX-512 F, BW, VL, DQ and VNNI.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panel(rows: usize, t: &Tiles) {
    let l = Quads(());
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
