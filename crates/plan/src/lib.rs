//! The planner: which way to train a model on a cluster is best, and why.
//!
//! A [`Request`] says what is asked: model, cluster, batch, limits. [`space`] lists every
//! [`Candidate`] that could run it, bounds and [`search`] choose which of them are simulated,
//! [`Answer`] holds the plans with their prices and the reasons in words. Every plan that is
//! reported was priced by simulating its programs; bounds serve only to leave out what cannot win,
//! and a test holds them below the simulation.
//!
//! This crate neither runs anything nor reads files: the program's commands do.

#![forbid(unsafe_code)]

mod answer;
mod bounds;
mod breakdown;
mod candidate;
pub mod explain;
pub mod html;
mod nearest;
mod planner;
mod price;
mod request;
pub mod search;
pub mod space;
pub mod svg;
pub mod table;
pub mod timeline;
mod what_if;

pub use answer::{Answer, Counts, Memory, Outline, Plan};
pub use breakdown::{Breakdown, TimeCategory};
pub use candidate::{Candidate, Checkpointing, Layout, state_bytes};
pub use nearest::PlanError;
pub use planner::{Facts, plan, step};
pub use price::{MemorySeries, PricedStep, Pricer};
pub use request::{Limits, Objective, Request};
pub use search::Budget;
pub use space::{Extent, Fixed, Mode};
pub use what_if::{Change, ChangeError};
