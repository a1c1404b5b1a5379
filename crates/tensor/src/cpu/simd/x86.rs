//! The vectors of x86-64: AVX2 and AVX-512.

use super::{Simd, bf16, f16};
use crate::cpu::Isa;
use crate::dtype::{DType, Element};
use std::arch::asm;
use std::arch::x86_64::*;

/// AVX2, FMA and F16C: eight lanes. A value proves that the CPU has them.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

/// AVX-512 F, BW, VL and DQ: sixteen lanes. A value proves that the CPU has them.
///
/// Where the CPU also converts to `bf16` in hardware, the token says so, and stores of `bf16` are
/// that one instruction instead of eight; it takes subnormal numbers for zero. The question is
/// asked at run time, once per loop.
#[derive(Clone, Copy, Debug)]
pub struct Avx512 {
    converts_bf16: bool,
}

impl Avx2 {
    /// # Safety
    /// The CPU must have AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn assume() -> Self {
        Avx2(())
    }
}

impl Avx512 {
    /// # Safety
    /// The CPU must have AVX-512 F, BW, VL and DQ.
    #[inline(always)]
    pub unsafe fn assume() -> Self {
        Avx512 { converts_bf16: false }
    }

    /// # Safety
    /// The CPU must have AVX-512 F, BW, VL and DQ, and what `isa` says beyond that.
    #[inline(always)]
    pub unsafe fn assume_rung(isa: Isa) -> Self {
        Avx512 { converts_bf16: isa >= Isa::Avx512Bf16 }
    }

    /// Sixteen `bf16` bit patterns, rounded to nearest even.
    #[inline(always)]
    fn to_bf16(self, v: __m512) -> __m256i {
        // SAFETY: the token says which instructions there are.
        unsafe { if self.converts_bf16 { convert_bf16(v) } else { round_bf16(v) } }
    }
}

/// # Safety
/// As [`convert_bf16`]; `v[0]` is in the lower half.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn convert_bf16_pair(v: [__m512; 2]) -> __m512i {
    let y: __m512i;
    // SAFETY: the caller vouches for the instruction; it touches registers only.
    unsafe {
        asm!("vcvtne2ps2bf16 {y}, {high}, {low}", y = lateout(zmm_reg) y, high = in(zmm_reg) v[1], low = in(zmm_reg) v[0], options(pure, nomem, nostack, preserves_flags));
    }
    y
}

/// # Safety
/// The CPU must have AVX-512 BF16. The intrinsic would keep this from being inlined into code
/// compiled for AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn convert_bf16(v: __m512) -> __m256i {
    let y: __m256i;
    // SAFETY: the caller vouches for the instruction; it touches registers only.
    unsafe {
        asm!("vcvtneps2bf16 {y}, {v}", y = lateout(ymm_reg) y, v = in(zmm_reg) v, options(pure, nomem, nostack, preserves_flags));
    }
    y
}

/// Adds 0x7fff plus the lowest kept bit, then drops the low half; NaN stays quiet NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_bf16(v: __m512) -> __m256i {
    let bits = _mm512_castps_si512(v);
    let lowest = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
    let high = _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(rounded, nan, quiet));
    _mm512_cvtepi32_epi16(high)
}

/// Wraps a method body in `unsafe`: the token proves the instructions, asserts prove the bounds.
macro_rules! lanes {
    ($($name:ident($($arg:ident: $t:ty),*) $(-> $r:ty)? $body:block)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe, clippy::macro_metavars_in_unsafe)]
        fn $name(self, $($arg: $t),*) $(-> $r)? {
            // SAFETY: `self` proves that the CPU has the instructions; slices are checked before
            // they are read.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx2 {
    type F = __m256;
    type M = __m256;
    type U = __m256i;
    const LANES: usize = 8;

    lanes! {
        splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        load(x: &[f32]) -> __m256 { _mm256_loadu_ps(x[..8].as_ptr()) }
        store(v: __m256, y: &mut [f32]) { _mm256_storeu_ps(y[..8].as_mut_ptr(), v) }
        load_bf16(x: &[bf16]) -> __m256 {
            let raw = _mm_loadu_si128(x[..8].as_ptr().cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(raw)))
        }
        store_bf16(v: __m256, y: &mut [bf16]) {
            // Round to nearest even: add 0x7fff plus the lowest kept bit, then drop the low half;
            // NaN stays quiet NaN.
            let bits = _mm256_castps_si256(v);
            let lowest = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7fff)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
            _mm_storeu_si128(y[..8].as_mut_ptr().cast(), _mm256_castsi256_si128(packed))
        }
        load_f16(x: &[f16]) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(x[..8].as_ptr().cast())) }
        store_f16(v: __m256, y: &mut [f16]) {
            _mm_storeu_si128(y[..8].as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
        }
        add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        sqrt(a: __m256) -> __m256 { _mm256_sqrt_ps(a) }
        round(a: __m256) -> __m256 { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        pow2(n: __m256) -> __m256 {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
        gt(a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_GT_OQ>(a, b) }
        select(mask: __m256, a: __m256, b: __m256) -> __m256 { _mm256_blendv_ps(b, a, mask) }
        reduce_sum(a: __m256) -> f32 {
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
        reduce_max(a: __m256) -> f32 {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
        splat_u32(x: u32) -> __m256i { _mm256_set1_epi32(x.cast_signed()) }
        iota_u32() -> __m256i { _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7) }
        add_u32(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        sub_u32(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        mul_wide_u32(a: __m256i, b: __m256i) -> (__m256i, __m256i) {
            // The multiplier takes even lanes; odd ones are shifted into their place.
            let even = _mm256_mul_epu32(a, b);
            let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(a), _mm256_srli_epi64::<32>(b));
            let high = _mm256_blend_epi32::<0b1010_1010>(_mm256_srli_epi64::<32>(even), odd);
            (high, _mm256_blend_epi32::<0b1010_1010>(even, _mm256_slli_epi64::<32>(odd)))
        }
        and_u32(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        xor_u32(a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        shr_u32(a: __m256i, bits: u32) -> __m256i { _mm256_srlv_epi32(a, _mm256_set1_epi32(bits.cast_signed())) }
        shl_u32(a: __m256i, bits: u32) -> __m256i { _mm256_sllv_epi32(a, _mm256_set1_epi32(bits.cast_signed())) }
        gt_i32(a: __m256i, b: __m256i) -> __m256 { _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b)) }
        i32_to_f32(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        bits_of(a: __m256) -> __m256i { _mm256_castps_si256(a) }
        float_of(a: __m256i) -> __m256 { _mm256_castsi256_ps(a) }
    }
}

impl Simd for Avx512 {
    type F = __m512;
    type M = __mmask16;
    type U = __m512i;
    const LANES: usize = 16;

    lanes! {
        splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        load(x: &[f32]) -> __m512 { _mm512_loadu_ps(x[..16].as_ptr()) }
        store(v: __m512, y: &mut [f32]) { _mm512_storeu_ps(y[..16].as_mut_ptr(), v) }
        load_bf16(x: &[bf16]) -> __m512 {
            let raw = _mm256_loadu_si256(x[..16].as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(raw)))
        }
        load_f16(x: &[f16]) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(x[..16].as_ptr().cast())) }
        store_f16(v: __m512, y: &mut [f16]) {
            let half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v);
            _mm256_storeu_si256(y[..16].as_mut_ptr().cast(), half)
        }
        add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        sqrt(a: __m512) -> __m512 { _mm512_sqrt_ps(a) }
        round(a: __m512) -> __m512 {
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
        }
        pow2(n: __m512) -> __m512 { _mm512_scalef_ps(_mm512_set1_ps(1.0), n) }
        gt(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) }
        select(mask: __mmask16, a: __m512, b: __m512) -> __m512 { _mm512_mask_blend_ps(mask, b, a) }
        reduce_sum(a: __m512) -> f32 { _mm512_reduce_add_ps(a) }
        reduce_max(a: __m512) -> f32 { _mm512_reduce_max_ps(a) }
        splat_u32(x: u32) -> __m512i { _mm512_set1_epi32(x.cast_signed()) }
        iota_u32() -> __m512i { _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) }
        add_u32(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        sub_u32(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        mul_wide_u32(a: __m512i, b: __m512i) -> (__m512i, __m512i) {
            let even = _mm512_mul_epu32(a, b);
            let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(a), _mm512_srli_epi64::<32>(b));
            let high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64::<32>(even), odd);
            (high, _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64::<32>(odd)))
        }
        and_u32(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        xor_u32(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        shr_u32(a: __m512i, bits: u32) -> __m512i { _mm512_srlv_epi32(a, _mm512_set1_epi32(bits.cast_signed())) }
        shl_u32(a: __m512i, bits: u32) -> __m512i { _mm512_sllv_epi32(a, _mm512_set1_epi32(bits.cast_signed())) }
        gt_i32(a: __m512i, b: __m512i) -> __mmask16 { _mm512_cmpgt_epi32_mask(a, b) }
        i32_to_f32(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        bits_of(a: __m512) -> __m512i { _mm512_castps_si512(a) }
        float_of(a: __m512i) -> __m512 { _mm512_castsi512_ps(a) }
    }

    #[inline(always)]
    fn store_bf16(self, v: __m512, y: &mut [bf16]) {
        let (bits, y) = (self.to_bf16(v), &mut y[..16]);
        // SAFETY: `self` proves that the CPU has the instruction; sixteen elements are there.
        unsafe { _mm256_storeu_si256(y.as_mut_ptr().cast(), bits) }
    }

    #[inline(always)]
    fn store_bf16_pair(self, v: [__m512; 2], y: &mut [bf16]) {
        let y = &mut y[..32];
        // SAFETY: `self` proves that the CPU has the instructions; 32 elements are there.
        unsafe {
            let line = if self.converts_bf16 {
                convert_bf16_pair(v)
            } else {
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(round_bf16(v[0])), round_bf16(v[1]))
            };
            _mm512_storeu_si512(y.as_mut_ptr().cast(), line);
        }
    }

    #[inline(always)]
    fn load_tail<T: Element>(self, x: &[T], fill: f32) -> __m512 {
        let kept = mask(x.len());
        let data = x.as_ptr();
        // SAFETY: `self` proves that the CPU has the instructions; lanes that are masked off are
        // not read, and `DTYPE` tells what the elements are.
        unsafe {
            let fill = _mm512_set1_ps(fill);
            match T::DTYPE {
                DType::BF16 => {
                    let wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(kept, data.cast()));
                    _mm512_mask_blend_ps(kept, fill, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
                }
                DType::F16 => {
                    let half = _mm256_maskz_loadu_epi16(kept, data.cast());
                    _mm512_mask_blend_ps(kept, fill, _mm512_cvtph_ps(half))
                }
                _ => _mm512_mask_loadu_ps(fill, kept, data.cast()),
            }
        }
    }

    #[inline(always)]
    fn store_tail<T: Element>(self, v: __m512, y: &mut [T]) {
        let kept = mask(y.len());
        let data = y.as_mut_ptr();
        // SAFETY: as in `load_tail`; lanes that are masked off are not written.
        unsafe {
            match T::DTYPE {
                DType::BF16 => _mm256_mask_storeu_epi16(data.cast(), kept, self.to_bf16(v)),
                DType::F16 => {
                    let half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v);
                    _mm256_mask_storeu_epi16(data.cast(), kept, half);
                }
                _ => _mm512_mask_storeu_ps(data.cast(), kept, v),
            }
        }
    }

    #[inline(always)]
    fn reciprocal(self, a: __m512) -> __m512 {
        // An estimate to 2^-14 and one Newton step, which squares that: a quarter of a division's
        // time. SAFETY: `self` proves that the CPU has the instructions.
        unsafe {
            let r = _mm512_rcp14_ps(a);
            _mm512_fmadd_ps(_mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0)), r, r)
        }
    }

    #[inline(always)]
    fn exp(self, x: __m512) -> __m512 {
        self.exp_below(x, self.min(self.splat(88.02), x))
    }

    #[inline(always)]
    fn exp_nonpositive(self, x: __m512) -> __m512 {
        self.exp_below(x, x)
    }
}

/// The first `len` of sixteen lanes.
#[inline(always)]
fn mask(len: usize) -> __mmask16 {
    if len >= 16 { 0xffff } else { (1 << len) - 1 }
}

impl Avx512 {
    /// `e^x` given `x` with its upper end clamped. As the general form; scaling by `2^n` is one
    /// instruction, and its mask is what makes 0 of what lies below.
    #[inline(always)]
    fn exp_below(self, x: __m512, clamped: __m512) -> __m512 {
        let n = self.round(self.mul(clamped, self.splat(std::f32::consts::LOG2_E)));
        let p = self.exp_reduced(clamped, n);
        // SAFETY: `self` proves that the CPU has the instructions.
        unsafe {
            let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-87.3));
            _mm512_maskz_scalef_ps(kept, p, n)
        }
    }
}
