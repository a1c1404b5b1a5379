//! Benchmarks of kernels on this machine, in percent of its measured peaks. The functions check a
//! kernel's results, then time it, and return figures for others to print.

mod array;
pub mod attention;
pub mod gemm;
pub mod gpu;
pub mod memory_bound;

/// Peaks that no kernel reaches.
#[cfg(test)]
const UNBEATEN: crate::cpu::peak::Peaks = crate::cpu::peak::Peaks {
    isa: crate::cpu::Isa::Portable,
    threads: 1,
    f32_flops: 1e12,
    bf16_flops: 1e12,
    bf16_instruction: crate::cpu::peak::Instruction::MultiplyAdd,
    int8_flops: 1e12,
    int8_instruction: crate::cpu::peak::Instruction::MultiplyAdd,
    copy_bytes_per_s: 1e9,
};
