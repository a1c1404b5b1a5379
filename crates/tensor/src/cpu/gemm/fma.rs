//! Register kernels on `f32` words: portable, AVX2, AVX-512.
//!
//! A tile of `MR` rows by `NV` vectors of columns is held in registers. Per word of the shared
//! dimension the kernel loads `NV` vectors of the right panels, broadcasts `MR` words of the left
//! panel, and does `MR NV` multiply-adds.
//!
//! | rung | tile | accumulators | loads per multiply-add |
//! |---|---|---|---|
//! | portable | 4 x 8 | 4 arrays of 8 | 5/4 |
//! | AVX2 | 6 x 16 | 12 of 16 registers | 8/12 |
//! | AVX-512 | 14 x 32 | 28 of 32 registers | 16/28 |
//!
//! Two multiply-adds and two 512-bit loads can issue in a cycle, so a tile needs at most one load
//! per multiply-add, and at least 8 accumulators to cover a latency of 4 cycles. The last rows of a
//! task use a shorter tile.

use super::driver::{A_STRIDE, Tiles, prefetch};
use crate::cpu::simd::{Portable, Simd};

/// The operations of a register kernel on words. A word is one `f32`, or a pair of `bf16`.
pub(super) trait Lanes: Copy {
    /// A vector of words.
    type Words: Copy;
    /// A vector of sums.
    type Sums: Copy;
    /// Words of a vector.
    const LANES: usize;
    /// Sums of zero.
    fn zero(self) -> Self::Sums;
    /// # Safety
    /// `p` must point to `LANES` words.
    unsafe fn load(self, p: *const u32) -> Self::Words;
    /// # Safety
    /// `p` must point to a word.
    unsafe fn broadcast(self, p: *const u32) -> Self::Words;
    /// `sums + a b`
    fn multiply_add(self, sums: Self::Sums, a: Self::Words, b: Self::Words) -> Self::Sums;
    /// # Safety
    /// `p` must point to `LANES` sums.
    unsafe fn load_sums(self, p: *const f32) -> Self::Sums;
    /// # Safety
    /// `p` must point to `LANES` sums.
    unsafe fn store_sums(self, p: *mut f32, sums: Self::Sums);
}

/// One `f32` a word.
#[derive(Clone, Copy)]
struct Singles<S>(S);

impl<S: Simd> Lanes for Singles<S> {
    type Words = S::F;
    type Sums = S::F;
    const LANES: usize = S::LANES;

    #[inline(always)]
    fn zero(self) -> S::F {
        self.0.splat(0.0)
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> S::F {
        // SAFETY: by contract.
        self.0.load(unsafe { std::slice::from_raw_parts(p.cast(), S::LANES) })
    }
    #[inline(always)]
    unsafe fn broadcast(self, p: *const u32) -> S::F {
        // SAFETY: by contract.
        self.0.splat(unsafe { *p.cast::<f32>() })
    }
    #[inline(always)]
    fn multiply_add(self, sums: S::F, a: S::F, b: S::F) -> S::F {
        self.0.fma(a, b, sums)
    }
    #[inline(always)]
    unsafe fn load_sums(self, p: *const f32) -> S::F {
        // SAFETY: by contract.
        self.0.load(unsafe { std::slice::from_raw_parts(p, S::LANES) })
    }
    #[inline(always)]
    unsafe fn store_sums(self, p: *mut f32, sums: S::F) {
        // SAFETY: by contract.
        self.0.store(sums, unsafe { std::slice::from_raw_parts_mut(p, S::LANES) });
    }
}

/// Distance of prefetching the right panel's lines, in words of the shared dimension. At 14 cycles
/// a word or more it is at least 220 cycles, several times the latency of L2. On Zen 4 this beats
/// half of it by 1 %, and twice as far is no better.
const PREFETCH_WORDS: usize = 16;

/// One tile: `MR` rows by `NV` vectors, with its sums at `c`. Those of the tile after it are at
/// `next`.
///
/// # Safety
/// `a` must hold `MR` rows and `b` `NV` panels of `words`; `c` must hold `MR` rows of `NV` vectors.
#[inline(always)]
unsafe fn tile<L: Lanes, const MR: usize, const NV: usize>(
    l: L,
    t: &Tiles,
    b: *const u32,
    c: *mut f32,
    next: *const f32,
) {
    let mut sums = [[l.zero(); NV]; MR];
    // SAFETY: offsets stay inside the parts that the contract describes; prefetches may leave them.
    unsafe {
        if t.add {
            for i in 0..MR {
                for v in 0..NV {
                    sums[i][v] = l.load_sums(c.add(i * t.c_stride + v * L::LANES));
                }
            }
        }
        let (mut a, mut b, mut next) = (t.a, b, next);
        for word in 0..t.words {
            if word < MR {
                for v in 0..NV {
                    prefetch(next.wrapping_add(v * L::LANES).cast());
                }
                next = next.wrapping_add(t.c_stride);
            }
            let mut right = [l.load(b); NV];
            for v in 1..NV {
                right[v] = l.load(b.add(v * t.panel));
            }
            for v in 0..NV {
                prefetch(b.wrapping_add(v * t.panel + PREFETCH_WORDS * L::LANES).cast());
            }
            for i in 0..MR {
                let left = l.broadcast(a.add(i * A_STRIDE));
                for v in 0..NV {
                    sums[i][v] = l.multiply_add(sums[i][v], left, right[v]);
                }
            }
            a = a.add(1);
            b = b.add(L::LANES);
        }
        for i in 0..MR {
            for v in 0..NV {
                l.store_sums(c.add(i * t.c_stride + v * L::LANES), sums[i][v]);
            }
        }
    }
}

/// The tiles of a panel of rows.
///
/// # Safety
/// As [`tile`] for every tile.
#[inline(always)]
pub(super) unsafe fn tiles<L: Lanes, const MR: usize, const NV: usize>(l: L, t: &Tiles) {
    let columns = NV * L::LANES;
    let count = t.columns / columns;
    for index in 0..count {
        let j = index * columns;
        t.next.ask(index, count);
        let next = if index + 1 < count { j + columns } else { MR * t.c_stride };
        // SAFETY: by contract.
        unsafe { tile::<L, MR, NV>(l, t, t.b.add(j / L::LANES * t.panel), t.c.add(j), t.c.wrapping_add(next)) };
    }
}

/// # Safety
/// As [`tile`] for every tile.
pub(super) unsafe fn portable(rows: usize, t: &Tiles) {
    let l = Singles(Portable);
    // SAFETY: by contract.
    unsafe {
        match rows {
            3.. => tiles::<_, 4, 1>(l, t),
            2 => tiles::<_, 2, 1>(l, t),
            _ => tiles::<_, 1, 1>(l, t),
        }
    }
}

/// # Safety
/// As [`tile`] for every tile; the CPU must have AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn avx2(rows: usize, t: &Tiles) {
    // SAFETY: by contract.
    unsafe {
        let l = Singles(crate::cpu::simd::Avx2::assume());
        match rows {
            4.. => tiles::<_, 6, 2>(l, t),
            2..4 => tiles::<_, 3, 2>(l, t),
            _ => tiles::<_, 1, 2>(l, t),
        }
    }
}

/// # Safety
/// As [`tile`] for every tile; the CPU must have AVX-512 F, BW, VL and DQ.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn avx512(rows: usize, t: &Tiles) {
    // SAFETY: by contract.
    unsafe {
        let l = Singles(crate::cpu::simd::Avx512::assume());
        match rows {
            9.. => tiles::<_, 14, 2>(l, t),
            5..9 => tiles::<_, 8, 2>(l, t),
            3..5 => tiles::<_, 4, 2>(l, t),
            _ => tiles::<_, 2, 2>(l, t),
        }
    }
}
