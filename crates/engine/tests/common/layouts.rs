//! Layouts that must train the same bits, and settings of the runs that are compared over them.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub const EVALUATED: &[&str] =
    &["data.validation_fraction=0.1", "evaluation.interval_steps=2", "evaluation.tokens_max=64"];
pub const RATE: &str = "optimizer.learning_rate=0.02";

pub const DDP: &[&str] = &["parallel.ranks=4"];
pub const STAGE_1: &[&str] = &["parallel.ranks=4", "parallel.zero_stage=1"];
pub const STAGE_2: &[&str] = &["parallel.ranks=4", "parallel.zero_stage=2"];
pub const STAGE_3: &[&str] = &["parallel.ranks=4", "parallel.zero_stage=3"];
pub const HYBRID: &[&str] =
    &["parallel.data_parallel_replicate_degree=2", "parallel.data_parallel_shard_degree=2", "parallel.zero_stage=2"];
pub const PIPELINE: &[&str] = &["parallel.ranks=8", "parallel.pipeline_parallel_degree=2"];
pub const ON_DISK: &[&str] = &["memory.offload.optimizer=disk", "memory.offload.chunk_elements=4096"];
pub const ALL_ON_DISK: &[&str] =
    &["memory.offload.optimizer=disk", "memory.offload.parameters=disk", "memory.offload.gradients=disk"];
