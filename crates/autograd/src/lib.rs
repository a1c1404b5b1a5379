//! A define-by-run tape and the one table of differentiable functions.
//!
//! What the model code did this step is the graph: a [`Tape`] records each function applied to a
//! [`Var`], so lengths, branches and loops may differ every step. [`Tape::finish`] gives the
//! [`Recording`], which owns what backward needs and refers to parameters by slot ([`ParamId`]),
//! never by data, so that a unit's parameters can leave between forward and backward.
//! [`Recording::backward`] starts from given output gradients and ends at the given leaves, so a
//! unit is differentiated alone.
//!
//! The functions stand in one table, [`functions::TABLE`]; a test walks it and checks every
//! backward against finite differences. This crate launches operations of `trainyard-tensor` and
//! holds no arithmetic of its own.

mod backward;
mod error;
pub mod functions;
mod parameters;
mod tape;

pub use backward::Backward;
pub use error::{AutogradError, Result};
pub use functions::{Function, TABLE};
pub use parameters::{GradientTarget, Gradients, ParamId, Parameter, Parameters, Store};
pub use tape::{Operand, Place, Policy, RandomKey, Recording, Saved, Tape, Var};
