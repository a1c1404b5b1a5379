//! Runs step programs: lanes, precision, optimizers, checkpoints, the trainer.

pub mod checkpoint;
pub mod config;
pub mod metrics;
pub mod schedule;
