//! A queue of training jobs for one machine. They run when the machine is idle, in hours that are
//! cheap or clean, by priority and deadline, on as many cores as pay.
//!
//! - [`store`] keeps the jobs in one SQLite file. Every change of a job is one transaction.
//! - [`cluster`] writes runs for Slurm, Kubernetes and SkyPilot.
//! - [`curve`] reads prices or carbon intensities over time from CSV.
//! - [`schedule`] is the pure scheduler: slots of time, shapes of a job, and the work that is left.
//! - [`decide`] turns the jobs and the machine into actions, on whatever clock it is given.
//! - [`machine`] says how much others use of the machine.
//! - [`process`] starts and stops a job's process and knows whether it is alive.
//! - [`progress`] reads how far a run is from its folder.
//! - [`daemon`] looks at the jobs, decides and acts, again and again.
//!
//! Nothing here knows tensors, models or the engine. A job is work, shapes (cores and work per
//! second), and a command that can be stopped at a step boundary and resumed.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod curve;
pub mod daemon;
pub mod decide;
pub mod job;
pub mod machine;
pub mod process;
pub mod progress;
pub mod schedule;
pub mod store;
pub mod time;

use std::io;
use std::path::PathBuf;

/// An error of the queue.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// A curve's file has a line that is not understood.
    #[error("{path}, line {line}: {what}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The mistake.
        what: String,
    },
    /// A file or folder cannot be used.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// The attempt.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// SQLite refuses.
    #[error("the queue {path}: {source}")]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: rusqlite::Error,
    },
    /// The queue's file was made by another version.
    #[error("the queue {path} is of version {found}, and this program knows version {known}")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// The version of this program.
        known: i64,
    },
    /// A request that cannot be followed; the text says why and what to do.
    #[error("{0}")]
    Refused(String),
    /// A job's process cannot be started.
    #[error("cannot start {0}")]
    Start(String),
}
