//! The parameter server (Li et al. 2014) with a bound of staleness (Ho et al. 2013).
//!
//! Every data rank is a *worker* with a copy of all parameters. Some ranks also host a *server*,
//! which owns a part of every unit's masters, and the optimizer state of that part. A worker's step
//! number `c` (its *clock*) runs forward and backward on its copy and pushes each unit's gradient
//! to the servers, each its part. It then commits the step, and pulls parameters for the next one.
//!
//! A server keeps pushes by worker and clock. Once all workers have committed clock `c`, it sums
//! their gradients along the tree of [`number`](trainyard_comm::number), exchanges the sums of
//! squares with the other servers for the norm, and updates its masters: version `c + 1`. A pull
//! for clock `c` waits for version `c - staleness`. So a worker is never more than `staleness`
//! clocks ahead of the slowest one, and a server holds the gradients of at most `staleness + 1`
//! clocks. With a staleness of 0 every version is the one that synchronous training has, bit by
//! bit.
//!
//! With back-up workers (Chen et al. 2016) an update is made once all workers but these have
//! committed. The first server chooses whose gradients all servers take. A worker that learns from
//! a pull that the updates of its next steps are made leaves these steps out and goes on with the
//! newest parameters: its clock becomes their version.
//!
//! | file | holds |
//! |---|---|
//! | `clocks` | the accounting of commits and versions, without threads or tensors |
//! | `wire` | the messages between workers and servers |
//! | `shard` | the server: its part of the state, the sum, the norm and the update |
//! | `service` | the threads of a server: one for each other worker, and one for updates |
//! | `worker` | push, commit and pull |
//!
//! A server is no part of its rank's step program: it runs while the program computes, and outlives
//! steps. The program has the worker's side of every message, with its bytes. On meta the work of a
//! server is done inside the commit, so its memory and kernels are predicted.
//!
//! There are no workers that join or leave.

mod clocks;
mod service;
mod shard;
mod wire;
mod worker;

pub use clocks::Clocks;
pub(crate) use shard::Server;
pub use wire::{Commit, Version};
pub(crate) use worker::Worker;

use trainyard_comm::Communicator;

/// The communicators between workers and servers.
pub(crate) struct ServerLinks {
    /// Workers send requests and gradients to servers.
    pub requests: Communicator,
    /// Servers answer pulls.
    pub answers: Communicator,
    /// The servers alone, for the norm; on other ranks it is a group of those.
    pub servers: Communicator,
}
