//! One file per command: its arguments, and what it does.

pub mod bench;
pub mod bench_gpu;
pub mod calibrate;
pub mod collectives;
pub mod config;
pub mod data;
pub mod eval;
pub mod export;
pub mod generate;
pub mod largest;
pub mod launch;
pub mod plan;
pub mod program;
pub mod supervise;
pub mod tokenizer;
pub mod train;

use anyhow::{Context, Result};
use trainyard_engine::config::DeviceKind;
use trainyard_engine::session::Runtime;
use trainyard_tensor::DType;
use trainyard_tensor::cpu::Isa;

/// A floating-point type on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Precision {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Precision {
    /// The tensor type.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

/// How a trained model is run.
#[derive(clap::Args)]
pub struct RuntimeArgs {
    /// Where the model runs: cpu, cuda, or cuda:N for one of several GPUs.
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
    /// What products are computed in. Unset: as the run was trained; f32 for a Hugging Face folder.
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Precision>,
    /// The fastest instruction set that kernels may use: portable, avx2, avx512, avx512-bf16,
    /// amx-bf16.
    #[arg(long, default_value = "auto")]
    isa: String,
    /// Threads of the kernels. Unset: the cores that the process may use.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

impl RuntimeArgs {
    /// The settings, checked against this machine.
    pub fn resolve(&self) -> Result<Runtime> {
        let isa = Isa::choose(&self.isa).context("--isa")?;
        let default = Runtime::of_this_machine();
        let threads = self.threads.map_or(default.threads, usize::from);
        Ok(Runtime { isa, threads, dtype: self.dtype.map(Precision::dtype), device: self.device })
    }
}
