//! The planner: finds the best way to train a model on a cluster, and explains why it is best.
//!
//! A [`Request`] holds the model, the cluster, the batch and the limits. [`space`] lists every
//! [`Candidate`] that could run it. Lower bounds and [`search`] choose the candidates that are
//! simulated. The [`Answer`] holds the plans with their prices and the reasons in words.
//!
//! Every reported plan was priced by simulating its programs. Bounds only leave out candidates that
//! cannot win, and a test holds them below the simulation.
//!
//! This crate neither runs anything nor reads files; the commands of the cli do that.

#![forbid(unsafe_code)]

mod answer;
mod bounds;
mod breakdown;
mod candidate;
pub mod canvas;
pub mod explain;
pub mod here;
pub mod html;
pub mod levers;
mod memory_plot;
mod nearest;
pub mod picture;
mod planner;
mod price;
mod request;
pub mod search;
pub mod settings;
pub mod space;
pub mod stacks;
pub mod svg;
pub mod table;
pub mod timeline;
mod what_if;

pub use answer::{Answer, Basis, Counts, Memory, Outline, Plan};
pub use breakdown::{Breakdown, TimeCategory};
pub use candidate::{Candidate, Checkpointing, Layout, LayoutKind, state_bytes};
pub use nearest::PlanError;
pub use planner::{Facts, Lacking, best, plan, price, step};
pub use price::{MemorySeries, PricedStep, Pricer};
pub use request::{Limits, Objective, Request};
pub use search::Budget;
pub use space::{Extent, Fixed, Mode};
pub use what_if::{Change, ChangeError};
