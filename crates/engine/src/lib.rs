//! Runs step programs: lanes, precision, optimizers, checkpoints, the trainer.
//!
//! - The configuration as requested and as resolved, the learning-rate schedule, and the way from
//!   them to model and programs: [`config`], [`schedule`], [`shape`].
//! - One rank: [`rank`], and its [`state`], [`tier`], [`optimizer`], [`precision`] and [`fp8`].
//! - The execution of programs on it: [`lanes`], and between ranks [`links`], [`collectives`],
//!   [`encoded`] and [`outer`].
//! - The files that a run writes: [`checkpoint`], [`snapshot`], [`metrics`], [`recording`],
//!   [`trace`].
//! - A run, on one rank or many: [`corpora`], [`session`], [`resume`], [`trainer`], `clock`,
//!   [`early_stopping`], [`health`], [`world`], [`warning`].
//! - The positions of ranks, the detection of failed ones, and injected faults: [`positions`],
//!   [`watch`], [`faults`], [`lasting_faults`].
//! - A trained model, its evaluation and generation: [`trained`], [`evaluate`], [`generate`].
//! - The memory and cost of a step, predicted by executing it without data, and settings that fit:
//!   [`predict`], [`limit`], [`host`].
//! - The measured time of a step on random tokens, and the largest model that fits: [`bench`],
//!   [`largest`].
//!
//! The engine knows instructions and no strategies: the program alone decides on sharding, gathers
//! and recomputation.

pub mod adapters;
pub mod averaging;
pub mod bench;
pub mod checkpoint;
mod clock;
pub mod collectives;
pub mod config;
pub mod consolidation;
pub mod constraints;
pub mod corpora;
pub mod device;
mod distill;
pub mod early_stopping;
pub mod encoded;
pub mod ensemble;
mod error;
pub mod evaluate;
mod exchange;
mod experts;
pub mod faults;
pub mod fp8;
mod gathers;
pub mod generate;
pub mod health;
pub mod host;
pub mod images;
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
pub mod periods;
pub mod positions;
mod power_sgd;
pub mod precision;
pub mod predict;
pub mod pretrained;
pub mod rank;
pub mod recording;
pub mod resume;
mod room;
pub mod rounds;
mod same_on_all_ranks;
pub mod schedule;
pub mod server;
pub mod session;
pub mod shape;
pub mod snapshot;
pub mod spans;
mod stages;
pub mod state;
pub mod tier;
pub mod trace;
pub mod trained;
pub mod trainer;
pub mod warning;
pub mod watch;
pub mod world;

pub use error::{EngineError, Result};
