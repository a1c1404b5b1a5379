//! Ranks that are processes, over MPI.
//!
//! Of MPI only point-to-point messages are used, and none of its blocking calls: a blocked call has no deadline. Every operation begins with an
//! exchange of [`envelope`]s, which shows mismatches before data moves, carries positions, and carries small data itself.
//! Large data flows in [`flight`]: chunks with a bounded number on the way, so that a chunk is summed while the next ones travel, and sums leave while
//! others still arrive. Reductions are a scatter, ordered local sums and a gather; MPI's own reductions choose their order themselves.
//!
//! **Progress.** MPI moves data only inside its calls. Whoever waits for an operation makes these calls: the thread of a lane, or the worker of a started
//! operation; compute threads need not, so communication proceeds beside them. One lock around every call makes `MPI_THREAD_SERIALIZED` enough and keeps clear of the
//! locking inside MPI. Polling backs off to sleeping, because ranks may be more than cores.
//!
//! **Failures.** A thread listens on a second MPI communicator ([`process`]): for failures of others, and for questions where this rank is, which it answers even while the rank
//! computes. Who does not answer, or whose process on this host is gone, has died. After a failure receives are cancelled; if one cannot be, this process makes no
//! further MPI call, so that no message arrives in memory that is in use again. With network hardware that writes memory by itself that is not enough: there the program must end
//! after a failure, as the trainer does. `MPI_Finalize` is called only if all ranks reach the end.
//!
//! Launchers end all processes when one dies; to let the others report, start with `mpirun --mca orte_enable_recovery 1` (Open MPI, whose exit code is then always 0) or
//! `mpiexec -disable-auto-cleanup` (MPICH).

mod envelope;
mod flight;
mod member;
mod process;
mod raw;
mod transfer;

use crate::communicator::Communicator;
use crate::error::Result;

pub(crate) use member::native_all_reduce;

/// Joins the world of the processes started together: rank and size are MPI's. Call it once in a process, before other threads use the environment, which it adds to.
///
/// # Errors
/// When MPI was initialised before in this process, or does not support several threads.
pub fn init() -> Result<Communicator> {
    member::world()
}
