//! The CPU device: an instruction set, a thread pool and the kernels.

pub mod activation;
#[cfg(target_arch = "x86_64")]
pub mod amx;
pub mod attention;
pub mod cast;
#[cfg(test)]
mod conformance;
pub mod distill;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod experts;
pub mod fp8;
pub mod gemm;
pub mod grid;
pub mod head;
pub mod int8;
pub mod isa;
mod lent_threads;
pub mod loss;
pub mod moments8;
pub mod muon;
pub mod norm;
pub mod optim;
pub mod peak;
pub mod philox;
pub mod plain;
pub mod reduce;
pub mod rope;
mod rows;
pub mod simd;
pub mod sparsity;
pub mod threads;
#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
pub(crate) mod tile_emulator;
pub mod value_residual;

pub use isa::{Isa, IsaError};
pub use lent_threads::LentThreads;
pub use threads::Threads;

use std::sync::Arc;

/// The context of every CPU kernel: its instruction set and its threads.
///
/// Kernels are pure functions of their operands: the bits do not depend on the number of threads.
#[derive(Debug)]
pub struct Cpu {
    /// The highest rung of the ladder that kernels may use.
    pub isa: Isa,
    /// The threads of this rank.
    pub threads: Threads,
}

impl Cpu {
    /// A CPU context of `threads` threads (at least one) on the rung `isa`.
    pub fn new(isa: Isa, threads: usize) -> Cpu {
        Cpu { isa, threads: Threads::new(threads) }
    }

    /// As [`Cpu::new`], for a rank that lends its threads to others.
    pub fn lending(isa: Isa, threads: usize, lent: &Arc<LentThreads>) -> Cpu {
        Cpu { isa, threads: Threads::lending(threads, lent) }
    }
}
