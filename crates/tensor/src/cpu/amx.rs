//! AMX tiles: configuration, and the one product that attention is made of.
//!
//! A tile is 16 rows of 64 bytes. `tdpbf16ps C, A, B` adds to `C` (16 x 16 f32) the product of `A`
//! (16 rows of 32 bf16) and `B`, whose row `r` holds rows `2r` and `2r + 1` of the 32 x 16 right
//! factor, interleaved. Two by two tiles of `C` use all eight registers: four sums hide the
//! instruction's latency of 52 cycles behind its rate of one in 16, and each loaded tile is used
//! twice. Nothing tells the compiler of tiles, and compilers never use them by themselves: what was
//! configured and summed lasts from one `asm!` block to the next, as long as what runs between them
//! is ours.
//!
//! Tiles lie in memory without gaps (1 KiB each), which spares the caches the conflicts that
//! power-of-two strides bring.

use std::arch::asm;
use std::marker::PhantomData;

/// Bytes of a tile.
pub const TILE: usize = 1024;

/// The operand of `ldtilecfg`: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static FULL_TILES: Config = {
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
        tile += 1;
    }
    config
};

/// Proof that this thread's tiles are configured as eight full ones; they are released when it is
/// dropped.
///
/// Made at the start of a task and dropped at its end, so that kernels with other configurations
/// can share the thread.
#[derive(Debug)]
pub struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// Configures this thread's tiles.
    ///
    /// # Safety
    /// The CPU must have AMX bf16 and the process the permission to use it:
    /// `Isa::detect() >= Isa::AmxBf16`. No other configuration may be in use on this thread while
    /// the value lives.
    pub unsafe fn configure() -> Tiles {
        // SAFETY: the instruction exists by this function's contract and reads the 64 bytes of a
        // valid configuration.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const FULL_TILES, options(nostack, readonly, preserves_flags),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _);
        }
        Tiles(PhantomData)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a `Tiles` proves that the instruction exists. Released tiles also spare context
        // switches 8 KiB.
        unsafe {
            asm!("tilerelease", options(nomem, nostack, preserves_flags),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _);
        }
    }
}

/// A factor of [`Tiles::quad`]: a pair of tiles per step, the pairs of consecutive steps `step`
/// bytes apart.
///
/// A left pair is two tiles one below the other, a right pair two tiles side by side.
#[derive(Clone, Copy, Debug)]
pub struct Pairs {
    /// The first pair.
    pub first: *const u8,
    /// Bytes from one pair to the next.
    pub step: usize,
}

macro_rules! quad {
    ($c:expr, $a:expr, $b:expr, $steps:expr, $($init:literal),+) => {
        asm!(
            $($init,)+
            "2:",
            "tileloadd tmm4, [{a} + {row}]",
            "tileloadd tmm6, [{b} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {row} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {row} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, {a_step}",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c} + {row}], tmm0",
            "tilestored [{c} + {row} + 1024], tmm1",
            "tilestored [{c} + {row} + 2048], tmm2",
            "tilestored [{c} + {row} + 3072], tmm3",
            a = inout(reg) $a.first => _,
            b = inout(reg) $b.first => _,
            steps = inout(reg) $steps => _,
            c = in(reg) $c,
            row = in(reg) 64usize,
            a_step = in(reg) $a.step,
            b_step = in(reg) $b.step,
            options(nostack),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
        )
    };
}

impl Tiles {
    /// `C = A B` over `steps > 0` pairs; `C` is the tiles (0, 0), (0, 1), (1, 0), (1, 1), 4 KiB.
    ///
    /// # Safety
    /// All pairs of `a` and `b` must be readable, `c` writable, and `c` overlap neither.
    #[inline(always)]
    pub unsafe fn quad(&self, c: *mut f32, a: Pairs, b: Pairs, steps: usize) {
        debug_assert!(steps > 0);
        // SAFETY: memory by this function's contract; `self` proves the configuration.
        unsafe { quad!(c, a, b, steps, "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3") }
    }

    /// `C += A B`, otherwise as [`quad`](Tiles::quad).
    ///
    /// # Safety
    /// As [`quad`](Tiles::quad), and `c` must be readable.
    #[inline(always)]
    pub unsafe fn quad_add(&self, c: *mut f32, a: Pairs, b: Pairs, steps: usize) {
        debug_assert!(steps > 0);
        // SAFETY: as above.
        unsafe {
            quad!(
                c,
                a,
                b,
                steps,
                "tileloadd tmm0, [{c} + {row}]",
                "tileloadd tmm1, [{c} + {row} + 1024]",
                "tileloadd tmm2, [{c} + {row} + 2048]",
                "tileloadd tmm3, [{c} + {row} + 3072]"
            )
        }
    }
}
