//! The register kernel on AMX tiles: `tdpbf16ps` through `asm!`, as the intrinsics are not stable.
//!
//! What it adds to AVX-512 BF16: eight tile registers of 16 rows by 64 bytes. `tdpbf16ps c, a, b` adds to the 16 x 16 `f32` sums
//! in `c` the products of 16 rows of 32 `bf16` in `a` with 16 rows of 16 pairs in `b`: 8,192 multiply-adds in 16 cycles, 16
//! times what a core does in `f32`. Four accumulators in a 2 x 2 arrangement (32 x 32 sums) make each loaded tile serve twice:
//!
//! - floor: four `tdpbf16ps` take 64 cycles and need four tiles, 4 KiB. The left half (a panel of 32 rows x 512, 34 KiB) comes
//!   from L1; the right half, 2 KiB, streams from L2 at 32 bytes a cycle, half of what L2 can deliver. It is prefetched one step
//!   of tiles ahead, as tile loads wait for their lines.
//! - one accumulator's chain has a latency of 52 cycles, the other three fill 48 of them.
//!
//! A packed right panel is already what the `b` operand wants: word row `k` holds the pairs `(2k, 2k + 1)` of 16 columns.

use super::driver::{A_STRIDE, Tiles};
use crate::cpu::amx;
use std::arch::asm;

/// Runs along a panel of up to 32 rows.
///
/// # Safety
/// The parts must be packed for tiles of 32 x 32 with words padded by zeros to a multiple of 16; the CPU must have AMX bf16,
/// granted by the operating system.
pub(super) unsafe fn panel(rows: usize, t: &Tiles) {
    // SAFETY: by contract.
    unsafe {
        let _tiles = amx::Tiles::configure();
        for j in (0..t.columns).step_by(32) {
            let (b, c) = (t.b.add(j / 16 * t.panel), t.c.add(j));
            if rows > 16 { tile_2x2(t, b, c) } else { tile_1x2(t, b, c) }
        }
    }
}

/// 32 x 32 sums.
///
/// # Safety
/// As [`panel`], for one tile at `b` and `c`.
unsafe fn tile_2x2(t: &Tiles, b: *const u32, c: *mut f32) {
    // SAFETY: reads 32 rows of `a`, two panels of `b`, reads and writes 32 x 32 of `c`, all inside by contract; prefetches may
    // go beyond. Tiles are configured at full size.
    unsafe {
        asm!(
            "test {add}, {add}",
            "jz 2f",
            "tileloadd tmm0, [{c0} + {cs}*1]", "tileloadd tmm1, [{c0} + {cs}*1 + 64]",
            "tileloadd tmm2, [{c1} + {cs}*1]", "tileloadd tmm3, [{c1} + {cs}*1 + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "3:",
            "test {steps}, {steps}",
            "jz 5f",
            "4:",
            "tileloadd tmm6, [{b0} + {bs}*1]",
            "tileloadd tmm4, [{a0} + {stride}*1]",
            "prefetcht0 [{b0} + 1024]", "prefetcht0 [{b0} + 1088]", "prefetcht0 [{b0} + 1152]", "prefetcht0 [{b0} + 1216]",
            "prefetcht0 [{b0} + 1280]", "prefetcht0 [{b0} + 1344]", "prefetcht0 [{b0} + 1408]", "prefetcht0 [{b0} + 1472]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {bs}*1]",
            "prefetcht0 [{b0} + 1536]", "prefetcht0 [{b0} + 1600]", "prefetcht0 [{b0} + 1664]", "prefetcht0 [{b0} + 1728]",
            "prefetcht0 [{b0} + 1792]", "prefetcht0 [{b0} + 1856]", "prefetcht0 [{b0} + 1920]", "prefetcht0 [{b0} + 1984]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a1} + {stride}*1]",
            "prefetcht0 [{b1} + 1024]", "prefetcht0 [{b1} + 1088]", "prefetcht0 [{b1} + 1152]", "prefetcht0 [{b1} + 1216]",
            "prefetcht0 [{b1} + 1280]", "prefetcht0 [{b1} + 1344]", "prefetcht0 [{b1} + 1408]", "prefetcht0 [{b1} + 1472]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "prefetcht0 [{b1} + 1536]", "prefetcht0 [{b1} + 1600]", "prefetcht0 [{b1} + 1664]", "prefetcht0 [{b1} + 1728]",
            "prefetcht0 [{b1} + 1792]", "prefetcht0 [{b1} + 1856]", "prefetcht0 [{b1} + 1920]", "prefetcht0 [{b1} + 1984]",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, 64", "add {a1}, 64", "add {b0}, 1024", "add {b1}, 1024",
            "dec {steps}",
            "jnz 4b",
            "5:",
            "tilestored [{c0} + {cs}*1], tmm0", "tilestored [{c0} + {cs}*1 + 64], tmm1",
            "tilestored [{c1} + {cs}*1], tmm2", "tilestored [{c1} + {cs}*1 + 64], tmm3",
            a0 = inout(reg) t.a => _,
            a1 = inout(reg) t.a.add(16 * A_STRIDE) => _,
            b0 = inout(reg) b => _,
            b1 = inout(reg) b.add(t.panel) => _,
            c0 = in(reg) c,
            c1 = in(reg) c.add(16 * t.c_stride),
            cs = in(reg) t.c_stride * 4,
            steps = inout(reg) t.words.div_ceil(16) => _,
            add = in(reg) usize::from(t.add),
            bs = in(reg) 64usize,
            stride = in(reg) A_STRIDE * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// 16 x 32 sums, for the last rows and for small batches.
///
/// # Safety
/// As [`panel`], for one tile at `b` and `c`.
unsafe fn tile_1x2(t: &Tiles, b: *const u32, c: *mut f32) {
    // SAFETY: as in `tile_2x2`, with 16 rows.
    unsafe {
        asm!(
            "test {add}, {add}",
            "jz 2f",
            "tileloadd tmm0, [{c0} + {cs}*1]", "tileloadd tmm1, [{c0} + {cs}*1 + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0", "tilezero tmm1",
            "3:",
            "test {steps}, {steps}",
            "jz 5f",
            "4:",
            "tileloadd tmm4, [{a0} + {stride}*1]",
            "tileloadd tmm6, [{b0} + {bs}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {bs}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {a0}, 64", "add {b0}, 1024", "add {b1}, 1024",
            "dec {steps}",
            "jnz 4b",
            "5:",
            "tilestored [{c0} + {cs}*1], tmm0", "tilestored [{c0} + {cs}*1 + 64], tmm1",
            a0 = inout(reg) t.a => _,
            b0 = inout(reg) b => _,
            b1 = inout(reg) b.add(t.panel) => _,
            c0 = in(reg) c,
            cs = in(reg) t.c_stride * 4,
            steps = inout(reg) t.words.div_ceil(16) => _,
            add = in(reg) usize::from(t.add),
            bs = in(reg) 64usize,
            stride = in(reg) A_STRIDE * 4,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
