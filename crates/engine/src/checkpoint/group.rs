//! Writes one checkpoint with many ranks. Each rank writes its own files into the hidden folder;
//! rank 0 commits when all files are on disk.
//!
//! The ranks communicate three times: rank 0 reports that the folder exists, every rank reports the
//! files it wrote, and rank 0 reports that the checkpoint is durable. A rank that could not write
//! reports the reason instead. Then there is no checkpoint on any rank.

use super::fault::Disk;
use super::write::{Partial, Sizes, Writer, verify, write_parts};
use super::{CheckpointError, Snapshot};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use trainyard_comm::Communicator;

/// The ranks that write one checkpoint together. Waits end at the run's deadline. Only the writing
/// thread of a rank uses it.
pub(super) struct Group(Communicator);

/// The reason why a rank could not write, as it is sent to the others.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Trouble {
    /// The reason in words, with the rank.
    pub what: String,
    /// True if a restart would meet the same error. Without this flag the other ranks would take a
    /// full disk for a failure of the rank.
    pub comes_again: bool,
}

impl Trouble {
    /// The message to the other ranks about `error` of `rank`.
    pub(super) fn of(error: &CheckpointError, rank: usize) -> Trouble {
        Trouble { what: format!("rank {rank}: {error}"), comes_again: error.comes_again() }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// The report of a rank: the files it wrote, or the reason why it could not.
type Word = Result<Partial, Trouble>;

impl Group {
    pub fn new(comm: Communicator) -> Group {
        Group(comm)
    }

    /// This rank and the number of ranks that write.
    pub fn writer(&self) -> Writer {
        Writer { rank: self.0.rank(), ranks: self.0.size() }
    }

    /// Broadcasts rank 0's outcome: None for success, else the reason of the failure.
    pub fn tell(&self, trouble: Option<&Trouble>) -> Result<(), CheckpointError> {
        let word = trouble.map(serde_json::to_vec).transpose();
        let mut bytes = word.map_err(|error| CheckpointError::Snapshot(error.to_string()))?.unwrap_or_default();
        let mut length = [bytes.len() as u64];
        self.0.broadcast(&mut length, 0)?;
        if length[0] == 0 {
            return Ok(());
        }
        bytes.resize(length[0] as usize, b' ');
        self.0.broadcast(&mut bytes, 0)?;
        let trouble = serde_json::from_slice(&bytes);
        Err(trouble.map_or_else(
            |error| CheckpointError::Snapshot(format!("rank 0's word: {error}")),
            CheckpointError::Elsewhere,
        ))
    }

    /// Broadcasts the outcome `done` of this rank, which is rank 0.
    pub fn tell_of<T>(&self, done: &Result<T, CheckpointError>) -> Result<(), CheckpointError> {
        self.tell(done.as_ref().err().map(|error| Trouble::of(error, self.0.rank())).as_ref())
    }

    /// Collects the reports of all ranks on rank 0, in order of the ranks. Empty on the others.
    pub fn collect(&self, own: &Word) -> Result<Vec<Word>, CheckpointError> {
        let own = serde_json::to_vec(own).map_err(|error| CheckpointError::Snapshot(error.to_string()))?;
        let mut lengths = vec![0; self.0.size()];
        self.0.all_gather(&[own.len() as u64], &mut lengths)?;
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let mut padded = own;
        padded.resize(longest, b' ');
        let mut all = if self.0.rank() == 0 { vec![0; longest * self.0.size()] } else { Vec::new() };
        self.0.gather(&padded, &mut all, 0)?;
        let words = all.chunks(longest.max(1)).map(|word| {
            serde_json::from_slice(word).map_err(|error| CheckpointError::Snapshot(format!("a rank's word: {error}")))
        });
        words.collect()
    }

    /// Writes this rank's part of a snapshot; for every rank but rank 0.
    pub fn write_own(
        &self,
        disk: &mut Disk,
        folder: &Path,
        snapshot: &Snapshot<'_>,
        sizes: Sizes,
    ) -> Result<(), CheckpointError> {
        self.tell(None)?;
        let own = write_parts(disk, folder, snapshot, sizes, self.writer()).and_then(|own| {
            own.files.iter().try_for_each(|entry| verify(folder, entry))?;
            Ok(own)
        });
        let word: Word = match &own {
            Ok(partial) => Ok(partial.clone()),
            Err(error) => Err(Trouble::of(error, self.0.rank())),
        };
        self.collect(&word)?;
        let told = self.tell(None);
        own?;
        told
    }
}
