//! Ranks that are processes, over MPI: a transport ([`crate::processes`]) out of its non-blocking
//! point-to-point messages.
//!
//! **Progress.** MPI moves data only inside its calls. Whoever waits for an operation makes these
//! calls: the thread of a lane, or the worker of a started operation; compute threads need not, so
//! communication proceeds beside them. One lock around every call makes `MPI_THREAD_SERIALIZED`
//! enough and keeps clear of the locking inside MPI. Polling backs off to sleeping, because ranks
//! may be more than cores.
//!
//! **Failures.** Notices travel on a second MPI communicator. After a failure receives are
//! cancelled; if one cannot be, this process makes no further MPI call, so that no message arrives
//! in memory that is in use again. With network hardware that writes memory by itself that is not
//! enough: there the program must end after a failure, as the trainer does. `MPI_Finalize` is
//! called only if all ranks reach the end.
//!
//! Launchers end all processes when one dies; to let the others report, start with
//! `mpirun --mca orte_enable_recovery 1` (Open MPI, whose exit code is then always 0) or
//! `mpiexec -disable-auto-cleanup` (MPICH).

mod transport;

use crate::communicator::{Communicator, DEADLINE_DEFAULT};
use crate::error::Result;
use crate::processes;
use std::sync::{Arc, OnceLock, Weak};
use transport::Mpi;

/// For MPI's own all-reduce.
static MPI: OnceLock<Weak<Mpi>> = OnceLock::new();

/// Joins the world of the processes started together: rank and size are MPI's. Call it once in a
/// process, before other threads use the environment, which it adds to.
///
/// # Errors
/// When MPI was initialised before in this process, or does not support several threads.
pub fn init() -> Result<Communicator> {
    let mpi = Arc::new(Mpi::init().map_err(processes::broken)?);
    // Only one initialisation succeeds.
    let _ = MPI.set(Arc::downgrade(&mpi));
    processes::world(mpi, DEADLINE_DEFAULT)
}

/// MPI's own all-reduce over the world; for comparison only, as it has no deadline.
pub(crate) fn native_all_reduce(comm: &Communicator, input: &[f32], output: &mut [f32]) -> Result<()> {
    use processes::Transport;
    let mpi = MPI.get().and_then(Weak::upgrade);
    let Some(mpi) = mpi.filter(|mpi| mpi.size() == comm.size()) else { return comm.barrier() };
    mpi.native_all_reduce(input, output).map_err(|what| comm.refuse(what))
}
