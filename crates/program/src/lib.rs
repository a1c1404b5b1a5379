//! The step as a program: instructions, lanes, dependencies, lowerings, checker. Plain data.
//!
//! One training step of one rank is a [`Program`]: an ordered list of typed instructions, each on a
//! lane, with what it must wait for, the bytes it moves and what it does to memory. A strategy is a
//! *lowering*, `(model, mesh, strategy) -> programs` ([`lower`]). The engine executes a program,
//! the simulator prices it, the doctor compares the two; none of them knows strategies.
//!
//! This crate knows no tensors, threads, files or clocks. Programs are serialisable, printable
//! ([`Program`]'s `Display`) and checked ([`check`]) before they run.

mod builder;
mod check;
mod clocks;
mod exchange;
mod instruction;
mod lower;
mod memory;
mod mesh;
mod order;
mod print;
mod program;
mod runnable;
mod sizes;
mod strategy;
mod streams;
mod update;
mod windows;

pub use check::{CheckError, Deadlock, check, check_ranks};
pub use instruction::{Action, BackwardPart, Collective, Effect, Instruction, Keep, Lane, MemoryKind, Phase, State};
pub use lower::{lower, lower_rank};
pub use memory::{LaneSummary, Memory, Report};
pub use mesh::{Axis, Coordinates, Group, Mesh};
pub use order::{Turn, turns};
pub use program::Program;
pub use runnable::{Runnable, runnable};
pub use strategy::{
    Extent, Fresh, ModelShape, Offload, PipelineSchedule, Placement, ReduceSchedule, Reshard, SHARD_QUANTUM,
    StateBytes, Strategy, StrategyError, Tier, UnitShape, chunk_elements, padded,
};
pub use streams::Streams;
