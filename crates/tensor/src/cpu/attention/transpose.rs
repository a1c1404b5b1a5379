//! Transposing 16 x 16 blocks of dwords in AVX-512 registers.

use std::arch::x86_64::*;

/// The transpose of 16 x 16 dwords: four rounds of exchanging halves at distances 1, 2, 4 and 8.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut t = r;
    for i in (0..16).step_by(2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    // In each 128-bit lane l, u[4g + j] holds column 4l + j of rows 4g to 4g + 3.
    let mut u = t;
    for g in (0..16).step_by(4) {
        u[g] = _mm512_unpacklo_epi64(t[g], t[g + 2]);
        u[g + 1] = _mm512_unpackhi_epi64(t[g], t[g + 2]);
        u[g + 2] = _mm512_unpacklo_epi64(t[g + 1], t[g + 3]);
        u[g + 3] = _mm512_unpackhi_epi64(t[g + 1], t[g + 3]);
    }
    // The same among the lanes: a 4 x 4 transpose of lanes for each j.
    let mut v = u;
    for j in 0..4 {
        let low01 = _mm512_shuffle_i32x4::<0x44>(u[j], u[4 + j]);
        let high01 = _mm512_shuffle_i32x4::<0xee>(u[j], u[4 + j]);
        let low23 = _mm512_shuffle_i32x4::<0x44>(u[8 + j], u[12 + j]);
        let high23 = _mm512_shuffle_i32x4::<0xee>(u[8 + j], u[12 + j]);
        v[j] = _mm512_shuffle_i32x4::<0x88>(low01, low23);
        v[4 + j] = _mm512_shuffle_i32x4::<0xdd>(low01, low23);
        v[8 + j] = _mm512_shuffle_i32x4::<0x88>(high01, high23);
        v[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high01, high23);
    }
    v
}

/// `y[j * y_ld + i] = x[i * x_ld + j]` for a block of 16 x 16.
#[target_feature(enable = "avx512f")]
pub(super) fn block(x: &[f32], x_ld: usize, y: &mut [f32], y_ld: usize) {
    assert!(x.len() >= 15 * x_ld + 16 && y.len() >= 15 * y_ld + 16);
    let mut rows = [_mm512_setzero_si512(); 16];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: in bounds by the assertion.
        *row = unsafe { _mm512_loadu_si512(x.as_ptr().add(i * x_ld).cast()) };
    }
    for (j, row) in transpose(rows).iter().enumerate() {
        // SAFETY: in bounds by the assertion.
        unsafe { _mm512_storeu_si512(y.as_mut_ptr().add(j * y_ld).cast(), *row) };
    }
}
