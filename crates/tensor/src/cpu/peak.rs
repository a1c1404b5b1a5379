//! The peaks of this machine's arithmetic and memory: the denominators of utilisation.
//!
//! Peaks are measured, not looked up: clock rates under vector load, the number of multiply-add
//! units and the share of a virtual machine are not in any table. Each is the fastest of several
//! rounds of ten milliseconds that run only the instruction in question on registers, on all
//! threads at once. No product can be faster; a utilisation above 100 % is a bug.

use super::gemm::Rung;
use super::simd::Simd;
use super::{Cpu, Isa};
use crate::cpu::threads::Shares;
use crate::dtype::DType;
use crate::simd_fn;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;
use trainyard_base::lock;

/// The measured peaks of an instruction set on a number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// The instruction set that was allowed.
    pub isa: Isa,
    /// Threads that computed at once.
    pub threads: usize,
    /// Floating-point operations a second (a multiply-add counts two) of `f32` multiply-adds; `f16`
    /// is computed the same way.
    pub f32_flops: f64,
    /// The same of `bf16` products: the fastest of AMX, `vdpbf16ps` and widened `f32` that the
    /// instruction set allows.
    pub bf16_flops: f64,
    /// The instruction behind `bf16_flops`.
    pub bf16_instruction: Instruction,
    /// The same of products of codes of eight bits: the faster of `f32` and of the instruction for
    /// codes, if there is one.
    pub int8_flops: f64,
    /// The instruction behind `int8_flops`.
    pub int8_instruction: Instruction,
    /// Bytes a second, read plus written, of a copy between buffers that exceed the L2 caches.
    pub copy_bytes_per_s: f64,
}

/// Rounds of which the fastest counts.
const ROUNDS: usize = 8;
/// Seconds that a round should take: long enough for the clock to settle, which it does within
/// milliseconds.
const ROUND_S: f64 = 10e-3;
/// Repetitions that tell how many a round needs: some ten microseconds.
const TRIAL: usize = 5000;
/// Bytes of each of the two buffers of the copy.
const COPY_BYTES: usize = 32 << 20;

/// Measures the peaks of `cpu`'s instruction set on its threads; takes about 200 ms.
pub fn measure(cpu: &Cpu) -> Peaks {
    let f32_flops = fastest(cpu, Instruction::MultiplyAdd, ROUNDS, ROUND_S);
    let mut bf16 = (f32_flops, Instruction::MultiplyAdd);
    for (instruction, isa) in [(Instruction::DotPairs, Isa::Avx512Bf16), (Instruction::Tiles, Isa::AmxBf16)] {
        if cpu.isa >= isa {
            let flops = fastest(cpu, instruction, ROUNDS, ROUND_S);
            if flops > bf16.0 {
                bf16 = (flops, instruction);
            }
        }
    }
    let mut int8 = (f32_flops, Instruction::MultiplyAdd);
    let narrow = match Rung::choose(cpu.isa, DType::U8) {
        Rung::AmxInt8 => Some(Instruction::IntegerTiles),
        Rung::Avx512Vnni => Some(Instruction::DotQuads),
        Rung::Avx2Int8 => Some(Instruction::MultiplyBytes),
        _ => None,
    };
    if let Some(instruction) = narrow {
        // AVX2's way is not faster than f32 on every processor.
        let flops = fastest(cpu, instruction, ROUNDS, ROUND_S);
        if flops > int8.0 {
            int8 = (flops, instruction);
        }
    }
    Peaks {
        isa: cpu.isa,
        threads: cpu.threads.count(),
        f32_flops,
        bf16_flops: bf16.0,
        bf16_instruction: bf16.1,
        int8_flops: int8.0,
        int8_instruction: int8.1,
        copy_bytes_per_s: copy(cpu),
    }
}

impl Peaks {
    /// The peak, operations a second, of products whose operands have type `dtype`; `U8` are codes
    /// of eight bits.
    pub fn flops(&self, dtype: DType) -> f64 {
        match dtype {
            DType::BF16 => self.bf16_flops,
            DType::U8 => self.int8_flops,
            _ => self.f32_flops,
        }
    }

    /// One quick measurement (4 ms) of the same, now: clocks drift, so a benchmark samples the peak
    /// in turn with what it measures.
    pub fn sample(&self, cpu: &Cpu, dtype: DType) -> f64 {
        let instruction = match dtype {
            DType::BF16 => self.bf16_instruction,
            DType::U8 => self.int8_instruction,
            _ => Instruction::MultiplyAdd,
        };
        fastest(cpu, instruction, 1, 4e-3)
    }
}

/// An instruction that multiplies and adds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Instruction {
    /// `f32` multiply-add, of the widest vectors there are.
    MultiplyAdd,
    /// `vpmaddubsw`, with what makes sums of 32 bits of it.
    MultiplyBytes,
    /// `vpdpbusd`
    DotQuads,
    /// `vdpbf16ps`
    DotPairs,
    /// `tdpbf16ps`
    Tiles,
    /// `tdpbssd`
    IntegerTiles,
}

/// `times` repetitions; returns the operations of one.
fn repeat(isa: Isa, instruction: Instruction, times: usize) -> f64 {
    // Also checks that `isa` is one of this CPU's.
    let operations = multiply_add(isa, if instruction == Instruction::MultiplyAdd { times } else { 0 });
    match instruction {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the CPU has the instruction.
        Instruction::MultiplyBytes if isa >= Isa::Avx2 => unsafe { x86::multiply_bytes(times) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Instruction::DotQuads if isa >= Isa::Avx512 && super::isa::has_vnni() => unsafe { x86::dot_quads(times) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Instruction::IntegerTiles if isa >= Isa::AmxBf16 && super::isa::has_amx_int8() => unsafe {
            x86::integer_tiles(times)
        },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the CPU has the instruction set, and it includes the instruction.
        Instruction::DotPairs if isa >= Isa::Avx512Bf16 => unsafe { x86::dot_pairs(times) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Instruction::Tiles if isa >= Isa::AmxBf16 => unsafe { x86::tiles(times) },
        _ => operations,
    }
}

/// Operations a second on all threads: the sum of each thread's fastest round of `seconds`.
///
/// Each thread times its own loops, so that waking threads is not counted.
fn fastest(cpu: &Cpu, instruction: Instruction, rounds: usize, seconds: f64) -> f64 {
    let rate = |times: usize| {
        let start = Instant::now();
        let operations = black_box(repeat(cpu.isa, instruction, times)) * times as f64;
        operations / start.elapsed().as_secs_f64().max(1e-9)
    };
    let total = Mutex::new(0.0);
    cpu.threads.run(|_| {
        let times = (rate(TRIAL) * seconds / repeat(cpu.isa, instruction, 0)).max(TRIAL as f64) as usize;
        let best = (0..rounds).map(|_| rate(times)).fold(0.0, f64::max);
        *lock(&total) += best;
    });
    total.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
}

simd_fn! {
    /// Multiply-adds on registers; returns the operations of one repetition.
    fn multiply_add(s: S, times: usize) -> f64 {
        if is_portable::<S>() { apart(s, times) } else { fused(s, times) }
    }
}

#[inline(always)]
fn is_portable<S: Simd>() -> bool {
    std::any::TypeId::of::<S>() == std::any::TypeId::of::<super::simd::Portable>()
}

/// Chains of fused multiply-adds: enough of them for two units of a latency of 4 cycles.
#[inline(always)]
fn fused<S: Simd>(s: S, times: usize) -> f64 {
    const CHAINS: usize = 12;
    // Both factors come from outside and the sum is multiplied, so that nothing can be taken out of
    // the loop.
    let (x, y) = (s.splat(black_box(0.75)), s.splat(black_box(0.75)));
    let mut sums = [y; CHAINS];
    for _ in 0..times {
        for sum in &mut sums {
            *sum = s.fma(*sum, x, y);
        }
    }
    black_box(sums);
    (2 * CHAINS * S::LANES) as f64
}

/// Chains of products, and of their sums. A product and a sum of one chain would be as slow as
/// their latencies together, which products of matrices are not; three vectors of each, of two
/// registers, leave four registers of 16.
#[inline(always)]
fn apart<S: Simd>(s: S, times: usize) -> f64 {
    const CHAINS: usize = 3;
    // Products stay one, so that none becomes subnormal. What the loop leaves is not summed: in the
    // order of such a sum the lanes of different chains shared registers, and were shuffled apart
    // in every repetition. `trainyard bench kernels --isa portable` stops if that returns: products
    // are then faster than their peak.
    let x = s.splat(black_box(1.0));
    let (mut products, mut sums) = ([x; CHAINS], [x; CHAINS]);
    for _ in 0..times {
        for (product, sum) in products.iter_mut().zip(&mut sums) {
            *sum = s.add(*sum, *product);
            *product = s.mul(*product, x);
        }
    }
    black_box((products, sums));
    (2 * CHAINS * S::LANES) as f64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    /// 8 chains of a product of bytes and its sum in 32 bits, as products of codes need them;
    /// returns the operations of one repetition.
    ///
    /// # Safety
    /// The CPU must have AVX2.
    pub(super) unsafe fn multiply_bytes(times: usize) -> f64 {
        macro_rules! product {
            ($sum:literal, $scratch:literal) => {
                concat!(
                    "vpsignb ",
                    $scratch,
                    ", ymm9, ymm8\n",
                    "vpmaddubsw ",
                    $scratch,
                    ", ymm8, ",
                    $scratch,
                    "\n",
                    "vpmaddwd ",
                    $scratch,
                    ", ",
                    $scratch,
                    ", ymm10\n",
                    "vpaddd ",
                    $sum,
                    ", ",
                    $sum,
                    ", ",
                    $scratch
                )
            };
        }
        // SAFETY: registers alone, on whose content nothing depends.
        unsafe {
            asm!(
                "test {times}, {times}",
                "jz 3f",
                "2:",
                product!("ymm0", "ymm11"), product!("ymm1", "ymm12"),
                product!("ymm2", "ymm13"), product!("ymm3", "ymm14"),
                product!("ymm4", "ymm11"), product!("ymm5", "ymm12"),
                product!("ymm6", "ymm13"), product!("ymm7", "ymm14"),
                "dec {times}",
                "jnz 2b",
                "3:",
                times = inout(reg) times => _,
                out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                out("ymm12") _, out("ymm13") _, out("ymm14") _,
                options(nomem, nostack),
            );
        }
        (8 * 8 * 8) as f64
    }

    /// 12 chains of `vpdpbusd`; returns the operations of one repetition.
    ///
    /// # Safety
    /// The CPU must have AVX-512 VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn dot_quads(times: usize) -> f64 {
        use std::arch::x86_64::*;
        let x = _mm512_set1_epi32(std::hint::black_box(0x0101_0101));
        let mut acc = [_mm512_setzero_si512(); 12];
        for _ in 0..times {
            for acc in &mut acc {
                *acc = _mm512_dpbusd_epi32(*acc, x, x);
            }
        }
        let sum = acc.into_iter().fold(_mm512_setzero_si512(), |sum, acc| _mm512_add_epi32(sum, acc));
        std::hint::black_box(_mm512_reduce_add_epi32(sum));
        (12 * 16 * 8) as f64
    }

    /// 12 chains of `vdpbf16ps`; returns the operations of one repetition.
    ///
    /// # Safety
    /// The CPU must have AVX-512 BF16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn dot_pairs(times: usize) -> f64 {
        use std::arch::x86_64::*;
        // SAFETY: `__m512bh` is 32 `bf16`; all bit patterns are values.
        let x: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(std::hint::black_box(0x3f00_3f00))) };
        let mut acc = [_mm512_setzero_ps(); 12];
        for _ in 0..times {
            for acc in &mut acc {
                *acc = _mm512_dpbf16_ps(*acc, x, x);
            }
        }
        let sum = acc.into_iter().fold(_mm512_setzero_ps(), |sum, acc| _mm512_add_ps(sum, acc));
        std::hint::black_box(_mm512_reduce_add_ps(sum));
        (12 * 16 * 4) as f64
    }

    macro_rules! tiles {
        ($(#[$doc:meta])* $name:ident, $multiply:literal, $depth:literal) => {
    $(#[$doc])*
    ///
    /// # Safety
    /// The CPU must have this form of AMX, granted by the operating system.
    pub(super) unsafe fn $name(times: usize) -> f64 {
        #[repr(C, align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            config.0[16 + 2 * tile] = 64;
            config.0[48 + tile] = 16;
        }
        // SAFETY: reads the configuration and touches no other memory; tiles are released at the
        // end.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "test {times}, {times}",
                "jz 3f",
                "2:",
                concat!($multiply, " tmm0, tmm6, tmm7"), concat!($multiply, " tmm1, tmm6, tmm7"), concat!($multiply, " tmm2, tmm6, tmm7"),
                concat!($multiply, " tmm3, tmm6, tmm7"), concat!($multiply, " tmm4, tmm6, tmm7"), concat!($multiply, " tmm5, tmm6, tmm7"),
                "dec {times}",
                "jnz 2b",
                "3:",
                "tilerelease",
                config = in(reg) &raw const config,
                times = inout(reg) times => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
        (6 * 2 * 16 * 16 * $depth) as f64
    }
        };
    }
    tiles!(
        /// Six accumulators of `tdpbf16ps` on tiles of zeros; returns the operations of one
        /// repetition.
        tiles, "tdpbf16ps", 32
    );
    tiles!(
        /// The same of `tdpbssd`.
        integer_tiles, "tdpbssd", 64
    );
}

/// Bytes a second of a copy.
fn copy(cpu: &Cpu) -> f64 {
    let from = vec![1u8; COPY_BYTES];
    let mut to = vec![0u8; COPY_BYTES];
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let shares = Shares::new(&mut to);
        let start = Instant::now();
        cpu.threads.for_ranges(COPY_BYTES, COPY_BYTES / (4 * cpu.threads.count()), |range| {
            // SAFETY: ranges are disjoint.
            unsafe { shares.part(range.clone()) }.copy_from_slice(&from[range]);
        });
        best = best.min(start.elapsed().as_secs_f64());
        black_box(&mut to);
    }
    2.0 * COPY_BYTES as f64 / best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_positive_and_narrow_operands_are_no_slower_than_their_fallback() {
        for isa in Isa::available() {
            let peaks = measure(&Cpu::new(isa, 2));
            assert!(peaks.f32_flops > 0.0 && peaks.copy_bytes_per_s > 0.0, "{peaks:?}");
            assert!(peaks.bf16_flops >= peaks.f32_flops && peaks.int8_flops >= peaks.f32_flops, "{peaks:?}");
        }
    }
}
