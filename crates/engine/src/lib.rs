//! Runs step programs: lanes, precision, optimizers, checkpoints, the trainer.
//!
//! | module | holds |
//! |---|---|
//! | [`config`], [`schedule`] | the configuration as requested and as resolved; the learning-rate schedule |
//! | [`shape`] | from configuration to model and program |
//! | [`rank`], [`lanes`], [`links`], [`collectives`], [`state`], [`tier`], [`optimizer`], [`outer`], [`encoded`], [`precision`], [`fp8`] | one rank and the execution of programs on it |
//! | [`checkpoint`], [`snapshot`], [`metrics`], [`recording`], [`trace`] | the files that a run writes |
//! | [`corpora`], [`session`], [`resume`], [`trainer`], `clock`, [`early_stopping`], [`health`], [`world`], [`warning`] | a run: its setup, resuming and training, on one rank or many |
//! | [`positions`], [`watch`], [`faults`], [`lasting_faults`] | the positions of ranks, the detection of failed ones, and injected faults |
//! | [`trained`], [`evaluate`], [`generate`] | a trained model: opening, evaluation, generation |
//! | [`predict`], [`limit`], [`host`] | the memory and cost of a step, predicted by executing it without data; settings that fit |
//! | [`bench`], [`largest`] | the measured time of a step on random tokens; the largest model that fits |
//!
//! The engine knows instructions and no strategies: the program alone decides on sharding, gathers
//! and recomputation.

pub mod bench;
pub mod checkpoint;
mod clock;
pub mod collectives;
pub mod config;
pub mod corpora;
pub mod device;
pub mod early_stopping;
pub mod encoded;
mod error;
pub mod evaluate;
mod exchange;
pub mod faults;
pub mod fp8;
pub mod generate;
pub mod health;
pub mod host;
pub mod lanes;
pub mod largest;
pub mod lasting_faults;
pub mod limit;
pub mod links;
pub mod measured;
pub mod metrics;
pub mod optimizer;
pub mod outer;
pub mod peaks;
pub mod positions;
pub mod precision;
pub mod predict;
pub mod rank;
pub mod recording;
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
