//! Packing for AMX: panels of 32 rows or columns, in steps of 32 shared indices, a step being two tiles.
//!
//! A left tile has a row of the result in each row, 32 `bf16` along the shared index. A right tile has a column of the result in each
//! 32-bit word, a word row being the pair of shared indices `(2r, 2r + 1)`. There are thus four ways to pack:
//!
//! | operand | memory runs along | packing a step |
//! |---|---|---|
//! | left | the shared index | copies 32 lines |
//! | right | columns | interleaves pairs of lines |
//! | left | rows | transposes 16-bit elements |
//! | right | the shared index | transposes 32-bit words |
//!
//! Shuffles run on one port, so transposing avoids them: lines are put together from 16-byte pieces by loads, such that what
//! remains is a transposition inside each 128-bit lane, 32 (words) or 48 (elements) shuffles a tile instead of 64 or 96.

use super::driver::Operand;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Rows or columns of a panel.
pub(super) const PANEL: usize = 32;
/// Shared indices of a step.
pub(super) const STEP: usize = 32;
/// Bytes of a packed step: two tiles.
pub(super) const STEP_BYTES: usize = 2048;
/// 32-bit words of a packed step.
pub(super) const STEP_WORDS: usize = 512;
/// Words of a tile.
const TILE_WORDS: usize = 256;

/// Which side of the product an operand is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Left,
    Right,
}

/// An operand, or some of its panels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    role: Role,
    data: *const u16,
    stride: usize,
    along_k: bool,
    /// Rows or columns of the result that this is about.
    first: usize,
    end: usize,
    k: usize,
    _data: PhantomData<&'a [u16]>,
}

// SAFETY: a shared slice in other words.
unsafe impl Sync for Source<'_> {}
// SAFETY: as above.
unsafe impl Send for Source<'_> {}

impl<'a> Source<'a> {
    /// All of an operand with `outer` rows or columns and `k` shared indices; elements have 16 bits.
    pub fn new<T>(role: Role, operand: &Operand<'a, T>, outer: usize, k: usize) -> Self {
        assert!(size_of::<T>() == 2);
        Source {
            role,
            data: operand.at(0, 0).cast(),
            stride: operand.stride,
            along_k: operand.along_k,
            first: 0,
            end: outer,
            k,
            _data: PhantomData,
        }
    }

    /// Up to `count` panels from `first` on.
    pub fn panel_range(&self, first: usize, count: usize) -> Self {
        let first = self.first + first * PANEL;
        Source { first, end: self.end.min(first + count * PANEL), ..*self }
    }

    /// Whether packing transposes.
    pub fn is_transposed(&self) -> bool {
        self.along_k == (self.role == Role::Right)
    }

    /// The number of panels.
    pub fn panels(&self) -> usize {
        (self.end - self.first).div_ceil(PANEL)
    }

    /// The number of steps.
    pub fn steps(&self) -> usize {
        self.k.div_ceil(STEP)
    }

    /// The rows or columns of the result that a panel holds.
    pub fn outer_range(&self, panel: usize) -> Range<usize> {
        let start = self.end.min(self.first + panel * PANEL);
        start..self.end.min(start + PANEL)
    }

    /// Where a part of a panel starts, and its shape in memory.
    fn part(&self, panel: usize, steps: &Range<usize>) -> (*const u16, usize, usize) {
        let outer = self.outer_range(panel);
        let k = steps.start * STEP..self.k.min(steps.end * STEP);
        let (at, rows, cols) = if self.along_k {
            (outer.start * self.stride + k.start, outer.len(), k.len())
        } else {
            (k.start * self.stride + outer.start, k.len(), outer.len())
        };
        (self.data.wrapping_add(at), rows, cols)
    }

    /// The rows of a left panel from the first of `steps` on and the bytes from one to the next, if tiles can be loaded from them.
    pub fn direct(&self, panel: usize, steps: Range<usize>) -> Option<(*const u8, usize)> {
        let whole = self.outer_range(panel).len() == PANEL && steps.end * STEP <= self.k;
        (self.role == Role::Left && self.along_k && whole).then(|| self.line(panel, steps, 0))
    }

    /// Line `index` of a panel's part and the bytes from line to line: of its rows where they run along the shared index, else of
    /// its shared indices. It may lie behind the end.
    pub fn line(&self, panel: usize, steps: Range<usize>, index: usize) -> (*const u8, usize) {
        let (first, ..) = self.part(panel, &steps);
        (first.wrapping_add(index * self.stride).cast(), 2 * self.stride)
    }

    /// Packs steps of all panels, one panel after another `panel_words` apart.
    ///
    /// # Safety
    /// As [`pack`](Self::pack) for each.
    pub unsafe fn pack_all(&self, steps: Range<usize>, to: *mut u32, panel_words: usize) {
        // In the order of memory: rows that run along the shared index are read whole, others a few steps of all panels at a time.
        let stretch = if self.along_k { steps.len().max(1) } else { 1 };
        for first in steps.clone().step_by(stretch) {
            for panel in 0..self.panels() {
                let to = to.wrapping_add(panel * panel_words + (first - steps.start) * STEP_WORDS);
                // SAFETY: by contract.
                unsafe { self.pack(panel, first..steps.end.min(first + stretch), to) };
            }
        }
    }

    /// Packs steps of a panel; what lies outside the operand is zero.
    ///
    /// # Safety
    /// `to` must have room for the steps; the CPU must have AVX-512 F and BW.
    pub unsafe fn pack(&self, panel: usize, steps: Range<usize>, to: *mut u32) {
        let whole = self.outer_range(panel).len() == PANEL;
        let whole_steps = if whole { steps.end.min(self.k / STEP).max(steps.start) } else { steps.start };
        // SAFETY: whole steps lie inside the operand, others are staged.
        unsafe {
            let (from, ..) = self.part(panel, &steps);
            let count = whole_steps - steps.start;
            match (self.role, self.along_k) {
                (Role::Left, true) => copy(from, self.stride, count, to),
                (Role::Left, false) => transpose_elements(from, self.stride, count, to),
                (Role::Right, true) => transpose_words(from, self.stride, count, to),
                (Role::Right, false) => interleave(from, self.stride, count, to),
            }
            for step in whole_steps..steps.end {
                let (from, rows, cols) = self.part(panel, &(step..step + 1));
                let mut staged = [0u16; PANEL * STEP];
                for i in 0..rows {
                    from.add(i * self.stride).copy_to_nonoverlapping(staged.as_mut_ptr().add(i * 32), cols);
                }
                let staged = Source { data: staged.as_ptr(), stride: 32, first: 0, end: PANEL, k: STEP, ..*self };
                staged.pack(0, 0..1, to.add((step - steps.start) * STEP_WORDS));
            }
        }
    }
}

/// # Safety
/// `count` steps of 32 lines, `stride` elements apart, must be readable, and `to` have room for them; the CPU must have AVX-512 F and
/// BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn copy(from: *const u16, stride: usize, count: usize, to: *mut u32) {
    for i in 0..32 {
        for step in 0..count {
            // SAFETY: by contract.
            unsafe {
                let line = _mm512_loadu_si512(from.add(i * stride + step * STEP).cast());
                _mm512_store_si512(to.add(step * STEP_WORDS + i * 16).cast(), line);
            }
        }
    }
}

/// # Safety
/// `count` steps of 32 lines, `stride` elements apart, must be readable, and `to` have room for them; the CPU must have AVX-512 F and
/// BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave(from: *const u16, stride: usize, count: usize, to: *mut u32) {
    // Unpacking works inside 128-bit lanes: the low half of the result is low 0, high 0, low 1, high 1.
    let first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    let second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for i in 0..16 * count {
        // SAFETY: by contract.
        unsafe {
            let to = to.add(i / 16 * STEP_WORDS + i % 16 * 16);
            let even = _mm512_loadu_si512(from.add(2 * i * stride).cast());
            let odd = _mm512_loadu_si512(from.add((2 * i + 1) * stride).cast());
            let (low, high) = (_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd));
            _mm512_store_si512(to.cast(), _mm512_permutex2var_epi64(low, first, high));
            _mm512_store_si512(to.add(TILE_WORDS).cast(), _mm512_permutex2var_epi64(low, second, high));
        }
    }
}

/// Four pieces of 8 elements, `step` elements apart, as the lanes of a vector.
///
/// # Safety
/// The pieces must be readable; the CPU must have AVX-512 F.
#[inline(always)]
unsafe fn pieces(from: *const u16, step: usize) -> __m512i {
    // SAFETY: by contract.
    unsafe {
        let piece = |i: usize| _mm_loadu_si128(from.add(i * step).cast());
        let v = _mm512_castsi128_si512(piece(0));
        let v = _mm512_inserti32x4::<1>(v, piece(1));
        let v = _mm512_inserti32x4::<2>(v, piece(2));
        _mm512_inserti32x4::<3>(v, piece(3))
    }
}

/// # Safety
/// `count` steps of 32 lines, `stride` elements apart, must be readable, and `to` have room for them; the CPU must have AVX-512 F and
/// BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_words(from: *const u16, stride: usize, count: usize, to: *mut u32) {
    for tile in 0..2 {
        for piece in 0..4 * count {
            // SAFETY: by contract.
            unsafe {
                let from = from.add(tile * 16 * stride + piece * 8);
                let to = to.add(piece / 4 * STEP_WORDS + tile * TILE_WORDS + piece % 4 * 64);
                // Lane `l` of `r[i]` is four words of column `4 l + i`.
                let r: [__m512i; 4] = std::array::from_fn(|i| pieces(from.add(i * stride), 4 * stride));
                let low = (_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpacklo_epi32(r[2], r[3]));
                let high = (_mm512_unpackhi_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[2], r[3]));
                _mm512_store_si512(to.cast(), _mm512_unpacklo_epi64(low.0, low.1));
                _mm512_store_si512(to.add(16).cast(), _mm512_unpackhi_epi64(low.0, low.1));
                _mm512_store_si512(to.add(32).cast(), _mm512_unpacklo_epi64(high.0, high.1));
                _mm512_store_si512(to.add(48).cast(), _mm512_unpackhi_epi64(high.0, high.1));
            }
        }
    }
}

/// # Safety
/// `count` steps of 32 lines, `stride` elements apart, must be readable, and `to` have room for them; the CPU must have AVX-512 F and
/// BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_elements(from: *const u16, stride: usize, count: usize, to: *mut u32) {
    for part in 0..4 * count {
        let (step, rows) = (part / 4, part % 4 * 8);
        // SAFETY: by contract.
        unsafe {
            let from = from.add(step * STEP * stride + rows);
            let to = to.add(step * STEP_WORDS + rows * 16);
            // Lane `l` of `r[i]` is eight rows of shared index `8 l + i`.
            let r: [__m512i; 8] = std::array::from_fn(|i| pieces(from.add(i * stride), 8 * stride));
            let pair = |i: usize| (_mm512_unpacklo_epi16(r[i], r[i + 1]), _mm512_unpackhi_epi16(r[i], r[i + 1]));
            let (p0, p2, p4, p6) = (pair(0), pair(2), pair(4), pair(6));
            let four = |p: __m512i, q: __m512i| (_mm512_unpacklo_epi32(p, q), _mm512_unpackhi_epi32(p, q));
            let (a, b) = (four(p0.0, p2.0), four(p4.0, p6.0));
            let (c, d) = (four(p0.1, p2.1), four(p4.1, p6.1));
            for (i, (x, y)) in [(a.0, b.0), (a.1, b.1), (c.0, d.0), (c.1, d.1)].into_iter().enumerate() {
                _mm512_store_si512(to.add(2 * i * 16).cast(), _mm512_unpacklo_epi64(x, y));
                _mm512_store_si512(to.add((2 * i + 1) * 16).cast(), _mm512_unpackhi_epi64(x, y));
            }
        }
    }
}
