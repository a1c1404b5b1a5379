//! Explains where the time of a training step goes, what bounds it and what a cure would save.
//!
//! Measurements of any origin become [`span`]s: named intervals on the lanes of a rank. Analyses of
//! spans end in [`verdict`]s, each with numbers, a place in the trace and the predicted saving.
//!
//! This crate measures nothing and changes no run. It reads what was recorded.

pub mod account;
pub mod causes;
pub mod compare;
pub mod diagnose;
pub mod measured;
pub mod perfetto;
pub mod run;
pub mod span;
pub mod traces;
pub mod verdict;
