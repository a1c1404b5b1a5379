//! The register kernel on AMX tiles: 32 x 32 sums in four tile registers, through `asm!`, as the
//! intrinsics are not stable.
//!
//! `tdpbf16ps c, a, b` adds to the 16 x 16 `f32` sums in tile `c` the products of 16 rows of 32
//! `bf16` in `a` with 16 rows of 16 pairs in `b`: 8,192 multiply-adds in 16 cycles. A step of 32
//! shared indices loads two tiles of either side and uses each twice: 64 cycles of products, 4 KiB
//! of loads.
//!
//! Three things decide what becomes of those 64 cycles, and all are in here:
//!
//! - *The right side is loaded with `tileloaddt1`*, which does not displace the left rows from L1.
//!   With both sides in L2 a step takes about 100 cycles; with the left one in L1, 76.
//! - *Nothing may be missed in L2.* A tile load holds up all that follow; L3 answers after 150 ns,
//!   four steps. So every step asks for a few lines that will be needed later: of the result, whose
//!   sums are finished after the next block, and of the next left rows. Few at a time, because the
//!   16 fill buffers of a core serve these and the loads from L2 alike.
//! - *Vector work hides under tiles only a little at a time.* The reorder buffer holds a few steps;
//!   a whole block finished between two products leaves the tiles idle. So the block before is
//!   finished here, a row or two in each step.

use super::epilogue::{Sink, Target};
use super::tiles::{PANEL, STEP_BYTES};
use crate::cpu::Isa;
use crate::cpu::simd::{Avx512, Simd};
use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

/// Lines to ask for during a block, a few in each step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// Number of lines in a step.
    pub lines: usize,
    /// The first.
    pub first: *const u8,
    /// Bytes between the lines of a step.
    pub apart: usize,
    /// Bytes from a step's first line to the next step's.
    pub step: usize,
}

/// A left panel of 32 rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    /// The first row.
    pub rows: *const u8,
    /// Row 16.
    pub lower: *const u8,
    /// Bytes from row to row.
    pub stride: usize,
    /// Bytes from step to step.
    pub step: usize,
}

/// Sums of 32 x 32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// The first row.
    pub at: *mut f32,
    /// Elements from row to row.
    pub stride: usize,
    /// True to continue from the previous contents.
    pub add: bool,
}

/// A block of sums that is complete and waits to be finished.
#[derive(Debug)]
pub(super) struct Pending {
    /// Its rows and columns in the result, at most 32 each.
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    /// 32 x 32 sums.
    pub sums: *const f32,
}

impl Pending {
    /// Hands some of its rows, of `width` columns, to `sink`.
    ///
    /// # Safety
    /// `sums` must be a block whose sums are complete; the contract of [`Sink::finish_row`] must
    /// hold for its part of the result.
    #[inline(always)]
    unsafe fn finish_rows<S: Simd>(&self, s: S, sink: &impl Sink, rows: Range<usize>, width: usize) {
        for i in rows {
            // SAFETY: by contract.
            unsafe {
                let sums = std::slice::from_raw_parts(self.sums.add(i * PANEL), width);
                sink.finish_row(s, self.rows.start + i, self.cols.start, sums);
            }
        }
    }

    /// Hands all of it to `sink`.
    ///
    /// # Safety
    /// As [`finish_rows`](Self::finish_rows), on a CPU with AMX.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    pub unsafe fn finish(&self, sink: &impl Sink) {
        // SAFETY: by contract.
        unsafe { self.finish_rows(Avx512::assume_rung(Isa::AmxBf16), sink, 0..self.rows.len(), self.cols.len()) }
    }
}

/// A step: two tiles of either side, each used twice. Sums stay in tiles 0 to 3 from block to block
/// of `asm!`: compilers do not use tiles by themselves, and nothing that is called between a step
/// and the next does.
///
/// # Safety
/// Tiles must be configured as eight full ones and hold sums; both sides must have a step.
#[inline(always)]
unsafe fn multiply_step<const INTEGER: bool>(rows: *const u8, lower: *const u8, stride: usize, b: *const u8) {
    macro_rules! step {
        ($multiply:literal) => {
            asm!(
                "tileloaddt1 tmm6, [{b} + {row}]",
                "tileloadd tmm4, [{rows} + {stride}]",
                concat!($multiply, " tmm0, tmm4, tmm6"),
                "tileloaddt1 tmm7, [{b} + {row} + 1024]",
                concat!($multiply, " tmm1, tmm4, tmm7"),
                "tileloadd tmm5, [{lower} + {stride}]",
                concat!($multiply, " tmm2, tmm5, tmm6"),
                concat!($multiply, " tmm3, tmm5, tmm7"),
                rows = in(reg) rows,
                lower = in(reg) lower,
                stride = in(reg) stride,
                b = in(reg) b,
                row = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: by contract.
    unsafe { if INTEGER { step!("tdpbssd") } else { step!("tdpbf16ps") } }
}

/// Sums from memory, or zero.
///
/// # Safety
/// Tiles must be configured as eight full ones; `sums` must be 32 rows of 32.
#[inline(always)]
unsafe fn start(sums: &Sums) {
    // SAFETY: by contract.
    unsafe {
        if sums.add {
            asm!(
                "tileloadd tmm0, [{upper} + {stride}]", "tileloadd tmm1, [{upper} + {stride} + 64]",
                "tileloadd tmm2, [{lower} + {stride}]", "tileloadd tmm3, [{lower} + {stride} + 64]",
                upper = in(reg) sums.at,
                lower = in(reg) sums.at.wrapping_add(16 * sums.stride),
                stride = in(reg) 4 * sums.stride,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags),
            );
        } else {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// Stores the sums.
///
/// # Safety
/// As [`start`].
#[inline(always)]
unsafe fn store(sums: &Sums) {
    // SAFETY: by contract.
    unsafe {
        asm!(
            "tilestored [{upper} + {stride}], tmm0", "tilestored [{upper} + {stride} + 64], tmm1",
            "tilestored [{lower} + {stride}], tmm2", "tilestored [{lower} + {stride} + 64], tmm3",
            upper = in(reg) sums.at,
            lower = in(reg) sums.at.wrapping_add(16 * sums.stride),
            stride = in(reg) 4 * sums.stride,
            options(nostack, preserves_flags),
        );
    }
}

/// Asks for a line that will be written.
#[inline(always)]
fn ask_to_write(line: *const u8) {
    // SAFETY: an address that does not exist is not asked for.
    unsafe { asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags)) };
}

/// Multiplies 32 rows with 32 columns over `steps` steps. Beside that it asks for the lines of
/// `target` (in the first 16 steps) and `ahead`, and finishes `pending`, which has 32 columns.
///
/// # Safety
/// Tiles must be configured as eight full ones; `left` and the packed panel at `b` must hold the
/// steps, and `sums` 32 rows of 32 elements, none of `pending`'s, which must be complete.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn multiply<K: Sink>(
    left: &Left,
    b: *const u8,
    steps: usize,
    sums: &Sums,
    target: Option<&Target>,
    ahead: &Ahead,
    pending: Option<&Pending>,
    sink: &K,
) {
    // SAFETY: by contract; what is asked for ahead need not exist.
    unsafe {
        let s = Avx512::assume_rung(Isa::AmxBf16);
        let (mut rows, mut lower, mut b, mut line) = (left.rows, left.lower, b, ahead.first);
        let (of_target, Target { mut first, mut second, stride }) = match target {
            Some(target) => (steps.min(16), *target),
            None => (0, Target { first: b, second: b, stride: 0 }),
        };
        let waiting = pending.map_or(0, |pending| pending.rows.len());
        let (share, mut finished) = (waiting.div_ceil(steps.max(1)), 0);
        let two_lines = first != second;
        start(sums);
        for step in 0..steps {
            if K::INTEGER {
                multiply_step::<true>(rows, lower, left.stride, b);
            } else {
                multiply_step::<false>(rows, lower, left.stride, b);
            }
            (rows, lower) = (rows.wrapping_add(left.step), lower.wrapping_add(left.step));
            b = b.wrapping_add(STEP_BYTES);
            if step < of_target {
                for _ in 0..2 {
                    ask_to_write(first);
                    first = first.wrapping_add(stride);
                    if two_lines {
                        ask_to_write(second);
                        second = second.wrapping_add(stride);
                    }
                }
            }
            for i in 0..ahead.lines {
                _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(i * ahead.apart).cast());
            }
            line = line.wrapping_add(ahead.step);
            if let Some(pending) = pending
                && finished < waiting
            {
                let end = waiting.min(finished + share);
                pending.finish_rows(s, sink, finished..end, PANEL);
                finished = end;
            }
        }
        if let Some(pending) = pending {
            pending.finish_rows(s, sink, finished..waiting, PANEL);
        }
        store(sums);
    }
}
