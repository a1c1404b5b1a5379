//! The register kernel on AMX tiles: 32 x 32 sums in four tile registers, through `asm!`, as the intrinsics are not stable.
//!
//! `tdpbf16ps c, a, b` adds to the 16 x 16 `f32` sums in tile `c` the products of 16 rows of 32 `bf16` in `a` with 16 rows of 16
//! pairs in `b`: 8,192 multiply-adds in 16 cycles. A step of 32 shared indices loads two tiles of either side and uses each twice:
//! 64 cycles of products, 4 KiB of loads.
//!
//! Two things decide what becomes of those 64 cycles, and both are in here:
//!
//! - *The right side is loaded with `tileloaddt1`*, which does not displace the left rows from L1. With both sides in L2 a step takes
//!   about 100 cycles; with the left one in L1, 76.
//! - *Nothing may be missed in L2.* A tile load holds up all that follow; L3 answers after 150 ns, four steps. So every step asks for a few
//!   lines that will be needed later: of the result, whose sums are finished after the next block, and of the next left rows. Few at a time,
//!   because the 16 fill buffers of a core serve these and the loads from L2 alike.

use super::epilogue::Target;
use super::tiles::STEP_BYTES;
use std::arch::asm;

/// Lines to ask for during a block, a few in each step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
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
    /// Whether to continue from what is there.
    pub add: bool,
}

/// How many lines a step asks for ahead of the left side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rate {
    Two,
    Four,
    Eight,
}

impl Rate {
    /// The least rate that asks for `lines` in `steps`, as far as there is one.
    pub fn covering(lines: usize, steps: usize) -> Rate {
        match lines.div_ceil(steps.max(1)) {
            ..=2 => Rate::Two,
            3..=4 => Rate::Four,
            _ => Rate::Eight,
        }
    }

    /// Lines a step.
    pub fn lines(self) -> usize {
        match self {
            Rate::Two => 2,
            Rate::Four => 4,
            Rate::Eight => 8,
        }
    }
}

/// What the kernel reads from memory, for want of registers.
#[repr(C)]
struct Rest {
    /// 0: where the left side's addresses go from step to step.
    a_step: usize,
    /// 8: likewise for the lines asked for ahead.
    ahead_step: usize,
    /// 16: where the right side is when the target has been asked for.
    target_end: *const u8,
    /// 24: where it ends.
    end: *const u8,
    /// 32, 40: the target.
    first: *const u8,
    second: *const u8,
    /// 48, 56: rows 0 and 16 of the sums.
    sums: *mut f32,
    lower_sums: *mut f32,
    /// 64: bytes from row to row of the sums.
    sums_stride: usize,
    /// 72: whether to continue from them.
    add: usize,
}

macro_rules! kernel {
    ($name:ident, [$($early:literal),*], [$($late:literal),*]) => {
        /// # Safety
        /// As [`multiply`].
        unsafe fn $name(a: &Left, b: *const u8, ahead: &Ahead, ldt: usize, rest: &Rest) {
            // SAFETY: by contract; what is asked for ahead need not exist.
            unsafe {
                asm!(
                    "mov {u}, [{rest} + 64]",
                    "cmp qword ptr [{rest} + 72], 0",
                    "je 2f",
                    "mov {t}, [{rest} + 48]",
                    "tileloadd tmm0, [{t} + {u}]", "tileloadd tmm1, [{t} + {u} + 64]",
                    "mov {t}, [{rest} + 56]",
                    "tileloadd tmm2, [{t} + {u}]", "tileloadd tmm3, [{t} + {u} + 64]",
                    "jmp 3f",
                    "2:",
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "3:",
                    "mov {t}, [{rest} + 32]", "mov {u}, [{rest} + 40]",
                    "cmp {b}, [{rest} + 16]",
                    "je 5f",
                    "4:",
                    "tileloaddt1 tmm6, [{b} + {row}]",
                    "tileloadd tmm4, [{a} + {lda}]",
                    "prefetchw [{t}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloaddt1 tmm7, [{b} + {row} + 1024]",
                    "prefetchw [{u}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "prefetchw [{t} + {ldt}]",
                    "tileloadd tmm5, [{lower} + {lda}]",
                    $($early,)*
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "prefetchw [{u} + {ldt}]",
                    $($late,)*
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {a}, [{rest}]", "add {lower}, [{rest}]", "add {b}, 2048",
                    "add {p}, [{rest} + 8]",
                    "lea {t}, [{t} + {ldt}*2]", "lea {u}, [{u} + {ldt}*2]",
                    "cmp {b}, [{rest} + 16]",
                    "jne 4b",
                    "5:",
                    "cmp {b}, [{rest} + 24]",
                    "je 7f",
                    "6:",
                    "tileloaddt1 tmm6, [{b} + {row}]",
                    "tileloadd tmm4, [{a} + {lda}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloaddt1 tmm7, [{b} + {row} + 1024]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{lower} + {lda}]",
                    $($early,)*
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    $($late,)*
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {a}, [{rest}]", "add {lower}, [{rest}]", "add {b}, 2048",
                    "add {p}, [{rest} + 8]",
                    "cmp {b}, [{rest} + 24]",
                    "jne 6b",
                    "7:",
                    "mov {u}, [{rest} + 64]",
                    "mov {t}, [{rest} + 48]",
                    "tilestored [{t} + {u}], tmm0", "tilestored [{t} + {u} + 64], tmm1",
                    "mov {t}, [{rest} + 56]",
                    "tilestored [{t} + {u}], tmm2", "tilestored [{t} + {u} + 64], tmm3",
                    a = inout(reg) a.rows => _,
                    lower = inout(reg) a.lower => _,
                    lda = in(reg) a.stride,
                    b = inout(reg) b => _,
                    row = in(reg) 64usize,
                    t = out(reg) _,
                    u = out(reg) _,
                    ldt = in(reg) ldt,
                    p = inout(reg) ahead.first => _,
                    ps = in(reg) ahead.apart,
                    rest = in(reg) rest,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

kernel!(two_ahead, ["prefetcht1 [{p}]"], ["prefetcht1 [{p} + {ps}]"]);
kernel!(
    four_ahead,
    ["prefetcht1 [{p}]", "prefetcht1 [{p} + {ps}]", "lea {p}, [{p} + {ps}*2]"],
    ["prefetcht1 [{p}]", "prefetcht1 [{p} + {ps}]"]
);
kernel!(
    eight_ahead,
    [
        "prefetcht1 [{p}]",
        "prefetcht1 [{p} + {ps}]",
        "lea {p}, [{p} + {ps}*2]",
        "prefetcht1 [{p}]",
        "prefetcht1 [{p} + {ps}]",
        "lea {p}, [{p} + {ps}*2]"
    ],
    [
        "prefetcht1 [{p}]",
        "prefetcht1 [{p} + {ps}]",
        "lea {p}, [{p} + {ps}*2]",
        "prefetcht1 [{p}]",
        "prefetcht1 [{p} + {ps}]"
    ]
);

/// Multiplies 32 rows with 32 columns over `steps` steps, asking for the lines of `target` (in the first 16 steps) and `ahead`.
///
/// # Safety
/// Tiles must be configured as eight full ones; `left` and the packed panel at `b` must hold the steps, and `sums` 32 rows of 32
/// elements.
pub(super) unsafe fn multiply(
    left: &Left,
    b: *const u8,
    steps: usize,
    sums: &Sums,
    target: Option<&Target>,
    rate: Rate,
    ahead: &Ahead,
) {
    let of_target = if target.is_some() { steps.min(16) } else { 0 };
    let target = target.copied().unwrap_or(Target { first: b, second: b, stride: 0 });
    let rest = Rest {
        a_step: left.step,
        // All but the last pair of a step's lines move the address.
        ahead_step: ahead.step.wrapping_sub((rate.lines() - 2) * ahead.apart),
        target_end: b.wrapping_add(of_target * STEP_BYTES),
        end: b.wrapping_add(steps * STEP_BYTES),
        first: target.first,
        second: target.second,
        sums: sums.at,
        lower_sums: sums.at.wrapping_add(16 * sums.stride),
        sums_stride: sums.stride * 4,
        add: usize::from(sums.add),
    };
    // SAFETY: by contract.
    unsafe {
        match rate {
            Rate::Two => two_ahead(left, b, ahead, target.stride, &rest),
            Rate::Four => four_ahead(left, b, ahead, target.stride, &rest),
            Rate::Eight => eight_ahead(left, b, ahead, target.stride, &rest),
        }
    }
}
