//! Packing for AMX: panels of 32 rows or columns, in steps of 32 shared indices, a step being two
//! tiles.
//!
//! A left tile has a row of the result in each row, 32 `bf16` along the shared index. A right tile
//! has a column of the result in each 32-bit word, a word row being the pair of shared indices
//! `(2r, 2r + 1)`. There are thus four ways to pack:
//!
//! | operand | memory runs along | packing a step |
//! |---|---|---|
//! | left | the shared index | copies 32 lines |
//! | right | columns | interleaves pairs of lines |
//! | left | rows | transposes 16-bit elements |
//! | right | the shared index | transposes 32-bit words |
//!
//! Measured on Emerald Rapids, a step: copying 15 ns, interleaving 55, transposing words 84,
//! elements 72. Putting lines together from 16-byte pieces by loads, which halves the shuffles, was
//! slower (107 and 95).

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

/// The side of the product that an operand is on.
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
    /// All of an operand with `outer` rows or columns and `k` shared indices. Elements have 16
    /// bits, or are pairs of 8 bits along the shared index.
    pub fn new<T>(role: Role, operand: &Operand<'a, T>, outer: usize, k: usize) -> Self {
        let width = 2 / size_of::<T>();
        let paired = operand.along_k && k.is_multiple_of(width) && operand.stride.is_multiple_of(width);
        assert!(width == 1 || width == 2 && paired, "{k} elements of {} bytes in tiles", size_of::<T>());
        Source {
            role,
            data: operand.at(0, 0).cast(),
            stride: operand.stride / width,
            along_k: operand.along_k,
            first: 0,
            end: outer,
            k: k / width,
            _data: PhantomData,
        }
    }

    /// Up to `count` panels from `first` on.
    pub fn panel_range(&self, first: usize, count: usize) -> Self {
        let first = self.first + first * PANEL;
        Source { first, end: self.end.min(first + count * PANEL), ..*self }
    }

    /// True if packing transposes.
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

    /// The rows of a left panel from the first of `steps` on and the bytes from one to the next, if
    /// tiles can be loaded from them.
    pub fn direct(&self, panel: usize, steps: Range<usize>) -> Option<(*const u8, usize)> {
        let whole = self.outer_range(panel).len() == PANEL && steps.end * STEP <= self.k;
        (self.role == Role::Left && self.along_k && whole).then(|| self.line(panel, steps, 0))
    }

    /// Line `index` of a panel's part and the bytes from line to line: of its rows where they run
    /// along the shared index, else of its shared indices. It may lie behind the end.
    pub fn line(&self, panel: usize, steps: Range<usize>, index: usize) -> (*const u8, usize) {
        let (first, ..) = self.part(panel, &steps);
        (first.wrapping_add(index * self.stride).cast(), 2 * self.stride)
    }

    /// Packs steps of all panels, one panel after another `panel_words` apart.
    ///
    /// # Safety
    /// As [`pack`](Self::pack) for each.
    pub unsafe fn pack_all(&self, steps: Range<usize>, to: *mut u32, panel_words: usize) {
        // In the order of memory: rows that run along the shared index are read whole, others a few
        // steps of all panels at a time.
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
/// `count` steps of 32 lines, `stride` elements apart, must be readable, and `to` have room for
/// them; the CPU must have AVX-512 F and BW.
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
/// `count` steps of 32 lines, `stride` elements apart, must be readable, and `to` have room for
/// them; the CPU must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave(from: *const u16, stride: usize, count: usize, to: *mut u32) {
    // Unpacking works inside 128-bit lanes: the low half of the result is low 0, high 0, low 1,
    // high 1.
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

/// Transposes 16 lines of 16 words: `[c][lane]` is word `4 lane + c` of each line.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn transposed(lines: &[__m512i; 16]) -> [[__m512i; 4]; 4] {
    let zero = _mm512_setzero_si512();
    // Inside the 128-bit lanes of four lines at a time: `t[c][group]` has word `4 lane + c` of four
    // lines in each lane.
    let mut t = [[zero; 4]; 4];
    for group in 0..4 {
        let r = &lines[4 * group..4 * group + 4];
        let (low, high) = (_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[0], r[1]));
        let (low2, high2) = (_mm512_unpacklo_epi32(r[2], r[3]), _mm512_unpackhi_epi32(r[2], r[3]));
        t[0][group] = _mm512_unpacklo_epi64(low, low2);
        t[1][group] = _mm512_unpackhi_epi64(low, low2);
        t[2][group] = _mm512_unpacklo_epi64(high, high2);
        t[3][group] = _mm512_unpackhi_epi64(high, high2);
    }
    // Then the lanes themselves.
    let mut out = [[zero; 4]; 4];
    for (out, t) in out.iter_mut().zip(&t) {
        let even = _mm512_shuffle_i32x4::<0x88>(t[0], t[1]);
        let even2 = _mm512_shuffle_i32x4::<0x88>(t[2], t[3]);
        let odd = _mm512_shuffle_i32x4::<0xdd>(t[0], t[1]);
        let odd2 = _mm512_shuffle_i32x4::<0xdd>(t[2], t[3]);
        out[0] = _mm512_shuffle_i32x4::<0x88>(even, even2);
        out[1] = _mm512_shuffle_i32x4::<0x88>(odd, odd2);
        out[2] = _mm512_shuffle_i32x4::<0xdd>(even, even2);
        out[3] = _mm512_shuffle_i32x4::<0xdd>(odd, odd2);
    }
    out
}

/// # Safety
/// `count` steps of 32 lines, `stride` elements apart, must be readable, and `to` have room for
/// them; the CPU must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_words(from: *const u16, stride: usize, count: usize, to: *mut u32) {
    for tile in 0..2 {
        for step in 0..count {
            // SAFETY: by contract.
            unsafe {
                let from = from.add(tile * 16 * stride + step * STEP);
                let to = to.add(step * STEP_WORDS + tile * TILE_WORDS);
                let mut lines = [_mm512_setzero_si512(); 16];
                for (i, line) in lines.iter_mut().enumerate() {
                    *line = _mm512_loadu_si512(from.add(i * stride).cast());
                }
                for (c, lanes) in transposed(&lines).into_iter().enumerate() {
                    for (lane, words) in lanes.into_iter().enumerate() {
                        _mm512_store_si512(to.add((4 * lane + c) * 16).cast(), words);
                    }
                }
            }
        }
    }
}

/// # Safety
/// `count` steps of 32 lines, `stride` elements apart, must be readable, and `to` have room for
/// them; the CPU must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_elements(from: *const u16, stride: usize, count: usize, to: *mut u32) {
    for step in 0..count {
        // SAFETY: by contract.
        unsafe {
            let (from, to) = (from.add(step * STEP * stride), to.add(step * STEP_WORDS));
            // Pairs of shared indices as words: rows `8 lane ..` in the low ones, `8 lane + 4 ..`
            // in the high ones.
            let (mut low, mut high) = ([_mm512_setzero_si512(); 16], [_mm512_setzero_si512(); 16]);
            for (i, (low, high)) in low.iter_mut().zip(&mut high).enumerate() {
                let even = _mm512_loadu_si512(from.add(2 * i * stride).cast());
                let odd = _mm512_loadu_si512(from.add((2 * i + 1) * stride).cast());
                (*low, *high) = (_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd));
            }
            for (half, words) in [low, high].iter().enumerate() {
                for (c, lanes) in transposed(words).into_iter().enumerate() {
                    for (lane, words) in lanes.into_iter().enumerate() {
                        _mm512_store_si512(to.add((8 * lane + 4 * half + c) * 16).cast(), words);
                    }
                }
            }
        }
    }
}
