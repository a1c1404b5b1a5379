//! The products of the tiled form on vectors: `vdpbf16ps`, which multiplies pairs as tiles do.

use super::Quads;
use crate::cpu::amx::{Pairs, TILE};
use std::arch::x86_64::*;

/// Rows of sums in registers: with two vectors each, 16 sums hide the instruction's latency.
const ROWS: usize = 8;

/// A value proves that the CPU has AVX-512 F and BF16.
pub struct Vectors(());

impl Quads for Vectors {
    unsafe fn begin() -> Vectors {
        Vectors(())
    }

    #[inline(always)]
    unsafe fn quad(&self, c: *mut f32, a: Pairs, b: Pairs, steps: usize) {
        // SAFETY: memory by the contract; `self` proves the instructions.
        unsafe { quad::<false>(c, a, b, steps) }
    }

    #[inline(always)]
    unsafe fn quad_add(&self, c: *mut f32, a: Pairs, b: Pairs, steps: usize) {
        // SAFETY: as above.
        unsafe { quad::<true>(c, a, b, steps) }
    }
}

/// `C = A B`, or `C += A B`.
///
/// # Safety
/// As [`Quads::quad_add`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn quad<const ADD: bool>(c: *mut f32, a: Pairs, b: Pairs, steps: usize) {
    for band in 0..32 / ROWS {
        // Rows of the left tiles, one tile below the other, and of the sums, whose tiles (0, 0),
        // (0, 1), (1, 0), (1, 1) follow each other.
        let (tile, row) = (band * ROWS / 16, band * ROWS % 16);
        // SAFETY: eight rows of two tiles of `c`, of one of each left pair, and both of each right
        // pair, inside by the contract.
        unsafe {
            let at = |r: usize, side: usize| c.add(((2 * tile + side) * 16 + row + r) * 16);
            let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
            if ADD {
                for (r, sums) in sums.iter_mut().enumerate() {
                    *sums = [_mm512_load_ps(at(r, 0)), _mm512_load_ps(at(r, 1))];
                }
            }
            let mut left = a.first.add(tile * TILE + row * 64);
            let mut right = b.first;
            for _ in 0..steps {
                for pair in 0..16 {
                    let b = [load(right.add(pair * 64)), load(right.add(TILE + pair * 64))];
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let a = _mm512_set1_epi32(left.add(r * 64 + pair * 4).cast::<i32>().read());
                        let a = std::mem::transmute::<__m512i, __m512bh>(a);
                        sums[0] = _mm512_dpbf16_ps(sums[0], a, b[0]);
                        sums[1] = _mm512_dpbf16_ps(sums[1], a, b[1]);
                    }
                }
                left = left.wrapping_add(a.step);
                right = right.wrapping_add(b.step);
            }
            for (r, sums) in sums.iter().enumerate() {
                _mm512_store_ps(at(r, 0), sums[0]);
                _mm512_store_ps(at(r, 1), sums[1]);
            }
        }
    }
}

/// # Safety
/// 64 readable bytes, aligned to as many.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load(from: *const u8) -> __m512bh {
    // SAFETY: by the contract; both types are 64 bytes of pairs.
    unsafe { std::mem::transmute(_mm512_load_si512(from.cast())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::cpu::attention::scratch::with;
    use crate::dtype::bf16;

    /// Whole numbers, so that every order of sums gives the same.
    #[test]
    fn quads_are_sums_of_products_of_pairs() {
        if Isa::detect() < Isa::Avx512Bf16 {
            return trainyard_testing::skip("this processor has no AVX-512 BF16");
        }
        let steps = 3;
        let number = |i: usize| ((i * 7919) % 13) as f32 - 6.0;
        // Left: rows of 32 numbers, tile below tile. Right: of each 32 x 32 the pairs of rows of
        // its left half, then of its right.
        let a = |step: usize, row: usize, k: usize| number(step * 1024 + row * 32 + k);
        let b = |step: usize, k: usize, column: usize| number(5000 + step * 1024 + k * 32 + column);
        with(2 * steps * 512 + 1024, |space| {
            let (left, rest) = space.split_at_mut(steps * 512);
            let (right, sums) = rest.split_at_mut(steps * 512);
            let (left_words, right_words): (&mut [bf16], &mut [bf16]) =
                (bytemuck::cast_slice_mut(left), bytemuck::cast_slice_mut(right));
            for step in 0..steps {
                for i in 0..32 {
                    for j in 0..32 {
                        left_words[step * 1024 + i * 32 + j] = bf16::from_f32(a(step, i, j));
                        let at = j / 16 * 512 + i / 2 * 32 + j % 16 * 2 + i % 2;
                        right_words[step * 1024 + at] = bf16::from_f32(b(step, i, j));
                    }
                }
            }
            let pairs = |data: &[f32]| Pairs { first: data.as_ptr().cast(), step: 2 * TILE };
            for times in 1..=2 {
                // SAFETY: the rung was detected; operands and sums are lines of the workspace, as
                // large as needed.
                unsafe {
                    let quads = Vectors::begin();
                    match times {
                        1 => quads.quad(sums.as_mut_ptr(), pairs(left), pairs(right), steps),
                        _ => quads.quad_add(sums.as_mut_ptr(), pairs(left), pairs(right), steps),
                    }
                }
                for i in 0..32 {
                    for j in 0..32 {
                        let one = |step: usize| (0..32).map(|k| a(step, i, k) * b(step, k, j)).sum::<f32>();
                        let want = times as f32 * (0..steps).map(one).sum::<f32>();
                        let at = (i / 16 * 2 + j / 16) * 256 + i % 16 * 16 + j % 16;
                        assert_eq!(sums[at], want, "({i}, {j}), {times} times");
                    }
                }
            }
        });
    }
}
