//! The step as a program: instructions, lanes, dependencies, lowerings, checker. Plain data.
//!
//! One training step of one rank is a [`Program`]: an ordered list of typed instructions, each on a lane, with what it must wait for,
//! the bytes it moves and what it does to memory. A strategy is a *lowering*, `(model, mesh, strategy) -> programs`
//! ([`lower`]). The engine executes a program, the simulator prices it, the doctor compares the two; none of them knows
//! strategies.
//!
//! This crate knows no tensors, threads, files or clocks. Programs are serialisable, printable ([`Program`]'s `Display`) and checked ([`check`])
//! before they run.

mod check;
mod instruction;
mod lower;
mod print;

pub use check::{CheckError, check};
pub use instruction::{Action, Effect, Instruction, Keep, Lane, MemoryKind, Program};
pub use lower::{ModelShape, Strategy, StrategyError, UnitShape, lower};
