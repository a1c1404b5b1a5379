//! Runs step programs: lanes, precision, optimizers, checkpoints, the trainer.
//!
//! | module | holds |
//! |---|---|
//! | [`config`], [`schedule`] | what is asked for, and what follows from it |
//! | [`shape`] | from configuration to model and program |
//! | [`rank`], [`lanes`], [`links`], [`collectives`], [`state`], [`tier`], [`optimizer`], [`precision`], [`fp8`] | one rank and the execution of programs on it |
//! | [`checkpoint`], [`snapshot`], [`metrics`], [`trace`] | what is written while it runs |
//! | [`corpora`], [`session`], [`resume`], [`trainer`], [`early_stopping`], [`world`], [`warning`] | a run: set up, gone on with, and trained, on one rank or many |
//! | [`positions`], [`watch`], [`faults`] | where a rank is, what becomes of one that fails, and failures on purpose |
//! | [`trained`], [`evaluate`], [`generate`] | a trained model, opened, and what it is used for |
//! | [`predict`], [`limit`], [`host`] | a step's memory and cost, by executing it without data; whether it fits, and what would |
//! | [`bench`], [`largest`] | a step's time, by executing it on random tokens; the largest model that fits |
//!
//! The engine knows instructions and no strategies: what is sharded, gathered or recomputed is in
//! the program.

pub mod bench;
pub mod checkpoint;
pub mod collectives;
pub mod config;
pub mod corpora;
pub mod device;
pub mod early_stopping;
mod error;
pub mod evaluate;
mod exchange;
pub mod faults;
pub mod fp8;
pub mod generate;
pub mod host;
pub mod lanes;
pub mod largest;
pub mod limit;
pub mod links;
pub mod measured;
pub mod metrics;
pub mod optimizer;
pub mod peaks;
pub mod positions;
pub mod precision;
pub mod predict;
pub mod rank;
pub mod resume;
mod room;
mod same_on_all_ranks;
pub mod schedule;
pub mod session;
pub mod shape;
pub mod snapshot;
pub mod state;
pub mod tier;
pub mod trace;
pub mod trained;
pub mod trainer;
pub mod warning;
pub mod watch;
pub mod world;

pub use error::{EngineError, Result};
