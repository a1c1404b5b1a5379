//! Communicators: collectives between the ranks of a training run.
//!
//! A [`Communicator`] is one rank's handle on a group of ranks. Three backends stand behind it:
//! [`local`], whose ranks are threads of one process that read each other's buffers in place;
//! [`tcp`], one rank per process, over sockets; and MPI (feature `mpi`), one rank per process too.
//! TCP and MPI are two transports of one state machine. All backends keep the same promises, which
//! one conformance suite tests:
//!
//! - **One order of sums.** Every reduction adds element by element along the binary tree that
//!   pairs neighbouring ranks level by level, `((0+1)+(2+3))+...`, whatever the backend, algorithm
//!   or message size ([`number`]). Bits therefore depend on the group alone, and a contiguous
//!   aligned power-of-two part of a group is a subtree of it: reducing inside such parts first and
//!   across them afterwards gives the same bits ([`Hierarchy`]).
//! - **No endless waiting.** Every operation has a deadline. When it passes, the error names the
//!   ranks that did not come, their host and the position in the program that they last posted
//!   ([`Communicator::post`]).
//! - **The first failure is everybody's.** A deadline, a mismatch, a panic or an abort fails the
//!   whole world: each later or waiting operation of any rank on any communicator returns that same
//!   [`CommError`], so all ranks report one culprit.
//!
//! The order of calls is the protocol: all ranks of a group call the same operations in the same
//! order with the same counts, and a difference is an error that shows both sides. Lanes that run
//! beside each other use communicators of their own ([`Communicator::duplicate`],
//! [`Communicator::split`]).
//!
//! Memory of GPUs is exchanged by NCCL beside a communicator ([`nccl`]): same groups, deadlines and
//! reports, another order of sums.
//!
//! Beyond this crate: it knows no tensors, programs or strategies, retries nothing, and
//! moves only plain data.

mod backend;
pub mod bench;
mod children;
pub mod codec;
mod communicator;
mod environment;
mod error;
pub mod fault;
mod hierarchy;
mod inline;
pub mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
pub mod number;
mod pending;
mod place;
mod processes;
mod slurm;
mod stream;
pub mod tcp;

pub use backend::{Operation, Signature};
pub use children::{Signal, end_with_parent};
pub use communicator::{BY_NODES_BYTES_MIN, Communicator, DEADLINE_DEFAULT};
pub use environment::{Environment, EnvironmentError, Launcher, Master};
pub use error::{CommError, ErrorKind, Failure, Peer, Result};
pub use hierarchy::Hierarchy;
pub use number::{Dtype, Number, Scalar};
pub use pending::Pending;
pub use place::{Place, Position};

/// A function that is told in a line what is worth knowing of something that goes on.
pub type Note = fn(&str);

/// Marks the note `text` as a warning, which programs show even where they hide other notes.
pub(crate) fn warning(text: impl std::fmt::Display) -> String {
    format!("warning: {text}")
}
