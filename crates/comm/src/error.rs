//! Failures between ranks, in words that name the culprit in one line.
//!
//! A [`CommError`] is one allocation around a [`Failure`], cheap to clone, because the first
//! failure of a world is handed to every rank. No failure is worth retrying on the same world:
//! ranks no longer agree on what comes next. The way on is a restart from a checkpoint.

use crate::backend::{Operation, Signature};
use crate::place::{Place, Position};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// Result of an operation.
pub type Result<T, E = CommError> = std::result::Result<T, E>;

/// A failed operation; [`Failure`] holds its facts.
#[derive(Clone, Debug)]
pub struct CommError(Arc<Failure>);

/// A failure: its kind, its culprits, and the rank that noticed it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of failure.
    pub kind: ErrorKind,
    /// Name of the communicator it happened on.
    pub group: String,
    /// The operation that noticed it, and which one of its communicator it was (from 0).
    pub operation: Option<(Operation, u64)>,
    /// World rank that noticed.
    pub noticed_by: u32,
    /// World ranks at fault, in order; empty when nobody but the caller is.
    pub culprits: Vec<Peer>,
}

/// A rank as others see it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Peer {
    /// World rank.
    pub rank: u32,
    /// Where it runs.
    pub place: Place,
    /// The last position it posted, on this communicator if it ever did there, else anywhere; and
    /// how long ago.
    pub position: Option<(Position, Duration)>,
}

/// Kinds of failure.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The culprits did not come to an operation within its deadline.
    Deadline {
        /// Time that was waited.
        waited: Duration,
    },
    /// The culprit called [`crate::Communicator::abort`] or [`crate::Communicator::give_up`].
    Aborted {
        /// The reason that it gave.
        reason: String,
        /// True if a restart would meet the same: it gave up.
        lasting: bool,
    },
    /// The culprit's thread panicked while it held a communicator.
    Panicked,
    /// The culprit dropped its communicator, or its process ended, while others still needed it.
    Left,
    /// The culprit's process is gone or answers no more.
    Died {
        /// The sign of it.
        evidence: String,
    },
    /// Ranks called different operations, or the same with different counts.
    Mismatch {
        /// The call of the group's first rank, in whose name the failure is noticed.
        ours: Signature,
        /// The call of the culprit.
        theirs: Signature,
    },
    /// The culprit's data arrived with another checksum than it was sent with.
    Corrupt,
    /// The caller's arguments make no sense.
    Argument {
        /// The argument, its fault, and what would be right.
        what: String,
    },
    /// A fault injected for a test refused the operation.
    Refused,
    /// The backend cannot be started or said no.
    Backend {
        /// Its message, and what to do.
        what: String,
    },
}

impl From<Failure> for CommError {
    fn from(failure: Failure) -> Self {
        Self(Arc::new(failure))
    }
}

impl Deref for CommError {
    type Target = Failure;
    fn deref(&self) -> &Failure {
        &self.0
    }
}

impl std::error::Error for CommError {}

impl fmt::Display for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operation {
            Some((operation, number)) => write!(f, "{operation} {number} on `{}`: ", self.group)?,
            None => write!(f, "communicator `{}`: ", self.group)?,
        }
        match &self.kind {
            ErrorKind::Deadline { waited } => {
                write!(f, "no arrival within {:.1} s of {}", waited.as_secs_f64(), list(&self.culprits))?;
            }
            ErrorKind::Aborted { reason, .. } => write!(f, "{} aborted: {reason}", list(&self.culprits))?,
            ErrorKind::Panicked => write!(f, "{} panicked", list(&self.culprits))?,
            ErrorKind::Left => write!(f, "{} left while others still needed it", list(&self.culprits))?,
            ErrorKind::Died { evidence } => write!(f, "{} died: {evidence}", list(&self.culprits))?,
            ErrorKind::Mismatch { ours, theirs } => write!(
                f,
                "ranks disagree: rank {} called {ours}, but {} called {theirs}",
                self.noticed_by,
                list(&self.culprits)
            )?,
            ErrorKind::Corrupt => write!(f, "data of {} arrived with a wrong checksum", list(&self.culprits))?,
            ErrorKind::Argument { what } => write!(f, "{what}")?,
            ErrorKind::Refused => write!(f, "{} refused by an injected fault", list(&self.culprits))?,
            ErrorKind::Backend { what } => write!(f, "{what}")?,
        }
        write!(f, " (noticed by rank {})", self.noticed_by)
    }
}

fn list(peers: &[Peer]) -> String {
    peers.iter().map(Peer::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ({}, ", self.rank, self.place)?;
        match &self.position {
            Some((position, ago)) => write!(f, "last at {position}, since {:.1} s)", ago.as_secs_f64()),
            None => write!(f, "position never posted)"),
        }
    }
}
