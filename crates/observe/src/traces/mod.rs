//! Traces that other programs recorded: read, measured, diagnosed.
//!
//! [`kineto`] reads a file. [`window`] chooses what of it is whole. [`breakdown`], [`kernels`] and
//! [`steps`] measure it, [`replay`] computes what a step would take without a cause, and
//! [`diagnose`] turns all of it into a [`Report`] with verdicts.

pub mod breakdown;
pub mod diagnose;
mod host_only;
mod intervals;
pub mod kernels;
pub mod kineto;
mod ranks;
pub mod replay;
pub mod report;
pub mod steps;
pub mod window;

pub use report::Report;
