//! The commands of the program, one file each: arguments and execution.

pub mod advise;
pub mod bench;
pub mod bench_gpu;
pub mod bubbles;
pub mod calibrate;
pub mod clean;
pub mod collectives;
pub mod completions;
pub mod compress;
pub mod config;
pub mod consolidate;
pub mod dash;
pub mod data;
pub mod distill;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod feed;
pub mod generate;
pub mod images;
pub mod inspect;
pub mod inspect_text;
pub mod largest;
pub mod launch;
pub mod layouts;
pub mod merge;
pub mod objects;
pub mod plan;
pub mod program;
pub mod prune;
pub mod quantize;
pub mod queue;
pub mod records;
pub mod report;
pub mod runs;
pub mod submit;
pub mod supervise;
pub mod texts;
pub mod tokenizer;
pub mod top;
pub mod trace;
pub mod train;
pub mod tune;
pub mod verify;

use crate::output::note;
use anyhow::{Context, Result};
use std::path::Path;
use trainyard_data::Tokenizer;
use trainyard_engine::checkpoint::Choice;
use trainyard_engine::config::DeviceKind;
use trainyard_engine::pretrained::{base_of, companion};
use trainyard_engine::session::files;
use trainyard_engine::trained::{Runtime, Selection, Trained, Weights};
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

/// The option for a beginning-of-text token.
#[derive(clap::Args)]
pub struct BosArgs {
    /// Begin each text with the tokenizer's beginning-of-text token: true or false. Unset:
    /// tokenizer.add_bos of the run, else as the tokenizer asks.
    #[arg(long, value_name = "BOOL")]
    add_bos: Option<bool>,
}

impl BosArgs {
    /// The model's tokenizer with this option applied; the choice is printed.
    pub fn tokenizer(&self, model: &Path, trained: &Trained) -> Result<Tokenizer> {
        self.applied(trained.tokenizer(model)?, Some(trained))
    }

    /// As [`BosArgs::tokenizer`], of a model that need not be a run.
    pub fn applied(&self, tokenizer: &Tokenizer, trained: Option<&Trained>) -> Result<Tokenizer> {
        let of_run = trained.and_then(|trained| trained.run.as_ref()?.config.tokenizer.add_bos);
        let tokenizer = tokenizer.clone().with_bos(self.add_bos.or(of_run)).context("--add-bos")?;
        if let Some(words) = tokenizer.around_in_words() {
            note(&format!("the tokenizer {words}"));
        }
        Ok(tokenizer)
    }
}

/// The text of a model's `generation_config.json`, if it has one.
pub fn generation_config(model: &Path) -> Result<Option<String>> {
    let path = companion(&base_of(model)?, files::GENERATION);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// The option that selects a checkpoint of a run.
#[derive(clap::Args)]
pub struct CheckpointArgs {
    /// The checkpoint of a run: latest (the newest whole one), best (the one with the lowest
    /// validation loss), or a step.
    #[arg(long, value_name = "latest|best|STEP", default_value_t)]
    checkpoint: Choice,
    /// Use the average of the weights that the run keeps (averaging.kind) instead of the weights.
    #[arg(long)]
    averaged: bool,
}

impl CheckpointArgs {
    /// The checkpoint and the weights in it.
    pub fn selection(&self) -> Selection {
        let weights = if self.averaged { Weights::Averaged } else { Weights::Last };
        Selection { checkpoint: self.checkpoint, weights }
    }
}

/// The options for running a trained model.
#[derive(clap::Args)]
pub struct RuntimeArgs {
    /// The device: cpu, cuda, or cuda:N for one of several GPUs.
    #[arg(long, default_value = "cpu")]
    device: DeviceKind,
    /// The number format of matrix products. Unset: as the run was trained; f32 for a Hugging Face
    /// folder.
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Precision>,
    /// The fastest instruction set that kernels may use: portable, avx2, avx512, avx512-bf16,
    /// amx-bf16.
    #[arg(long, default_value = "auto")]
    isa: String,
    /// Kernel threads. Unset: the cores that the process may use.
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
