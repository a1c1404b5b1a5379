//! One training step as a program: instructions, lanes, dependencies, lowerings and the checker.
//! Plain data.
//!
//! The step of one rank is a [`Program`]: an ordered list of typed instructions. Each instruction
//! names its lane, the instructions it waits for, the bytes it moves and its effects on memory. A
//! strategy such as ZeRO or a pipeline is a *lowering*, `(model, mesh, strategy) -> programs`
//! ([`lower`]). The engine executes a program and the simulator prices it; neither knows
//! strategies.
//!
//! This crate knows no tensors, threads, files or clocks. Programs can be serialised, printed
//! ([`Program`]'s `Display`) and checked ([`check`]) before they run.

mod builder;
mod check;
mod clocks;
mod codec;
mod exchange;
mod instruction;
mod layout;
mod lower;
mod memory;
mod mesh;
mod order;
mod passes;
mod print;
mod program;
mod runnable;
mod segments;
mod sizes;
mod split;
mod strategy;
mod streams;
mod table;
mod update;
mod windows;

pub use check::{CheckError, Deadlock, check, check_ranks};
pub use codec::{BlockCodec, Codec, Encoding, Factors, PowerSgd};
pub use instruction::{Action, BackwardPart, Collective, Effect, Instruction, Keep, Lane, MemoryKind, Phase, State};
pub use layout::{Change, Layout};
pub use lower::{lower, lower_all, lower_rank, lower_stages};
pub use memory::{LaneSummary, Memory, Report};
pub use mesh::{Axes, Axis, Coordinates, ExpertRanks, Group, Mesh};
pub use order::{MicroBatches, PipelineSchedule, ScheduleFacts, StretchMap, Turn};
pub use passes::{Stretch, even_cuts};
pub use program::Program;
pub use runnable::{Runnable, runnable};
pub use split::{Border, SegmentShape, SplitShape, ValueShape};
pub use strategy::{
    Extent, Fragment, Fresh, ModelShape, Offload, ParameterServer, Placement, ReduceSchedule, Reshard, SHARD_QUANTUM,
    StateBytes, StepKind, Strategy, StrategyError, Tier, UnitShape, chunk_elements, padded,
};
pub use streams::Streams;
pub use table::{CellFault, Schedule, ScheduleTable, TableError, TurnTimes};
