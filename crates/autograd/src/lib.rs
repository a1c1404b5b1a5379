//! A define-by-run tape, and the one table of differentiable functions.
//!
//! The operations of a step form its graph: a [`Tape`] records each function applied to a [`Var`],
//! so lengths, branches and loops may differ in every step. [`Tape::finish`] returns the
//! [`Recording`], which owns the tensors that backward needs. It refers to parameters by slot
//! ([`ParamId`]) and never by data, so that a unit's parameters can leave between forward and
//! backward. [`Recording::backward`] starts from given output gradients and ends at the given
//! leaves, so a unit is differentiated alone. [`Recording::backward_input`] computes the gradients
//! of values only, and leaves those of parameters to a later call ([`Deferred`]).
//!
//! All functions are in one table, [`functions::TABLE`]. A test walks it and checks every backward
//! against finite differences. This crate launches operations of `trainyard-tensor` and has no
//! arithmetic of its own.

mod backward;
mod error;
pub mod functions;
mod halves;
mod parameters;
mod tape;

pub use backward::Backward;
pub use error::{AutogradError, Result};
pub use functions::{Function, TABLE};
pub use halves::Deferred;
pub use parameters::{Adapter, AdapterOutputs, GradientTarget, Gradients, ParamId, Parameter, Parameters, Store};
pub use tape::{Observer, Operand, Place, Policy, RandomKey, Recording, Saved, Tape, Var};
