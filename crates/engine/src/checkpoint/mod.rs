//! Checkpoints on disk. A checkpoint is a folder that appears whole or not at all. It is verified
//! before it is used, and the previous one is kept until then.
//!
//! A [`Snapshot`] consists of named byte regions in parts (`model`, `optimizer`), a JSON state and
//! some plain files. This module knows nothing of models. A snapshot becomes
//!
//! ```text
//! RUN/checkpoints/step-00000123/
//!     model.safetensors                      or model-00001-of-00003.safetensors ... and model.safetensors.index.json
//!     optimizer.safetensors
//!     config.json ...                        attachments, as the caller likes
//!     manifest.json                          step, state, every tensor, every file with its size and XXH3
//!     manifest.xxh3                          the checksum of manifest.json
//!                                            of many ranks: model.rank-00000.safetensors ..., each with the elements that its rank held
//! RUN/checkpoints/best.json                  step and loss of the best evaluation
//! ```
//!
//! Writing ([`CheckpointStore::write`]) puts all files into a hidden sibling folder and syncs each
//! one. It reads everything back, compares the checksums, syncs the folder, renames it and syncs
//! the parent. Only then are old checkpoints pruned. A pruned folder is renamed before it is
//! deleted, so that no half-deleted folder has a checkpoint's name. [`BackgroundWriter`] does all
//! this on a thread of its own.
//!
//! Reading ([`CheckpointStore::find_latest`], [`Checkpoint`]) takes the newest checkpoint whose
//! checksums all agree, and gives the reason why each newer one was passed over.
//!
//! The read-back sees the page cache. So it catches lost and wrong writes of software, but not
//! those of a disk that fails after a sync. `docs/checkpoints.md` describes checkpoints for users.

mod background;
mod choice;
mod fault;
mod group;
mod manifest;
mod read;
mod runs;
mod store;
#[cfg(test)]
mod tests;
mod write;

pub use background::{BackgroundWriter, Event};
pub use choice::{Choice, find};
pub use fault::{Fault, FaultKind};
pub use group::Trouble;
pub use manifest::{FileEntry, Manifest, PieceEntry, TensorEntry};
pub use read::Checkpoint;
pub use runs::{PlacedRuns, Runs};
pub use store::{
    Best, CheckpointStore, Found, Retention, SetAside, Skipped, find_latest, open_step, set_aside, steps_of,
};
pub use write::Written;

use crate::tier::{Store, TierError};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trainyard_tensor::cpu::Isa;
use trainyard_tensor::ops::optim::{Moment, moments8};
use trainyard_tensor::{DType, Tensor, TensorError};

/// The whole state of a run after one step.
#[derive(Clone, Debug, Default)]
pub struct Snapshot<'a> {
    /// Completed optimizer steps.
    pub step: u64,
    /// Groups of tensors, each in files of its own.
    pub parts: Vec<SnapshotPart<'a>>,
    /// The rest of the trainer's state: position in the data, loss scale, counters.
    pub state: serde_json::Value,
    /// Small files beside the tensors, by name: `config.json`, `tokenizer.json`.
    pub attachments: Vec<(String, Vec<u8>)>,
}

/// A group of tensors.
#[derive(Clone, Debug)]
pub struct SnapshotPart<'a> {
    /// The stem of its file names: `model` makes a folder that Hugging Face libraries load.
    pub name: String,
    /// The tensors, in any order; names are unique.
    pub regions: Vec<Region<'a>>,
    /// Names of tensors that the whole part must have, on whatever ranks they are. A checkpoint
    /// without one of them is not committed.
    pub required: BTreeSet<String>,
}

/// A named tensor, or some of its elements, as bytes, little-endian.
#[derive(Clone, Debug)]
pub struct Region<'a> {
    /// Name of the tensor.
    pub name: String,
    /// Type of an element.
    pub dtype: DType,
    /// The whole tensor's shape.
    pub shape: Vec<usize>,
    /// The tensor's elements in the order of the bytes; all of them, row-major, when one rank
    /// writes alone.
    pub runs: Vec<Runs>,
    /// The values.
    pub bytes: Bytes<'a>,
}

impl Region<'_> {
    /// True if it has all elements of the tensor, row-major.
    pub fn is_whole(&self) -> bool {
        self.runs == [Runs::from(0..self.shape.iter().product::<usize>())]
    }

    /// Number of its elements.
    pub fn elements(&self) -> usize {
        self.runs.iter().map(Runs::elements).sum()
    }
}

/// The bytes of a region: borrowed, shared, in files or in tensors. All but borrowed ones can go to
/// another thread.
#[derive(Clone)]
pub enum Bytes<'a> {
    /// Borrowed for the duration of a write.
    Borrowed(&'a [u8]),
    /// Shared ownership. Nobody changes the bytes while a snapshot holds them.
    Shared(Arc<dyn AsRef<[u8]> + Send + Sync>),
    /// Ranges of files of offloaded state, one after the other: file, position, length. Nobody
    /// changes them until the snapshot is written.
    Stored(Vec<(Arc<Store>, u64, usize)>),
    /// Tensors of one dimension, one after the other. Nobody changes them until the snapshot is
    /// written.
    Live(Vec<Tensor>),
    /// A moment in codes of eight bits, which is written in f32.
    Encoded(Encoded<'a>),
}

/// Blocks of a moment in codes of eight bits ([`moments8`]).
#[derive(Clone)]
pub struct Encoded<'a> {
    /// The moment.
    pub moment: Moment,
    /// Whole blocks.
    pub blocks: Box<Bytes<'a>>,
    /// The elements of these blocks that are meant, in order.
    pub elements: Vec<Range<usize>>,
}

impl Encoded<'_> {
    /// Passes the bytes of the elements in f32 to `to`, at most `size`, or a block, at a time.
    fn decoded(
        &self,
        size: usize,
        to: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        const BLOCK_BYTES: usize = 4 * moments8::BLOCK_WORDS;
        let at_once = (size / (4 * moments8::BLOCK)).max(1);
        let (isa, mut start, mut rest) = (Isa::detect(), 0, &self.elements[..]);
        let (mut words, mut values) = (Vec::new(), Vec::new());
        self.blocks.chunks(at_once * BLOCK_BYTES, |bytes| {
            words.clear();
            words.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
            values.resize(bytes.len() / BLOCK_BYTES * moments8::BLOCK, 0.0);
            moments8::decode(isa, self.moment, &words, &mut values);
            let end = start + values.len();
            while let Some(range) = rest.first().filter(|range| range.start < end) {
                let here = range.start.max(start) - start..range.end.min(end) - start;
                to(bytemuck::cast_slice(&values[here]))?;
                if range.end > end {
                    break;
                }
                rest = &rest[1..];
            }
            start = end;
            Ok(())
        })
    }
}

impl Bytes<'_> {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Bytes::Borrowed(bytes) => bytes.len(),
            Bytes::Shared(bytes) => (**bytes).as_ref().len(),
            Bytes::Stored(parts) => parts.iter().map(|(_, _, bytes)| bytes).sum(),
            Bytes::Live(tensors) => tensors.iter().map(Tensor::bytes).sum(),
            Bytes::Encoded(moment) => 4 * moment.elements.iter().map(Range::len).sum::<usize>(),
        }
    }

    /// Bytes that a copy of what lies in tensors takes.
    pub fn live_len(&self) -> usize {
        match self {
            Bytes::Live(_) => self.len(),
            Bytes::Encoded(moment) => moment.blocks.live_len(),
            Bytes::Borrowed(_) | Bytes::Shared(_) | Bytes::Stored(_) => 0,
        }
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Passes all bytes to `to`, at most `size` at a time.
    ///
    /// # Errors
    /// Errors of `to`, and of reading files and tensors.
    pub fn chunks(
        &self,
        size: usize,
        mut to: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        match self {
            Bytes::Borrowed(bytes) => bytes.chunks(size).try_for_each(to),
            Bytes::Shared(bytes) => (**bytes).as_ref().chunks(size).try_for_each(to),
            Bytes::Stored(parts) => {
                let mut chunk = vec![0; size];
                for (store, offset, bytes) in parts {
                    for start in (0..*bytes).step_by(size) {
                        let read = &mut chunk[..size.min(bytes - start)];
                        store.read_anywhere(offset + start as u64, read)?;
                        to(read)?;
                    }
                }
                Ok(())
            }
            Bytes::Live(tensors) => {
                for tensor in tensors {
                    let (elements, each) = (tensor.elements(), (size / tensor.dtype().size()).max(1));
                    for start in (0..elements).step_by(each) {
                        tensor.view(start, [each.min(elements - start)])?.with_bytes(&mut to)??;
                    }
                }
                Ok(())
            }
            Bytes::Encoded(moment) => moment.decoded(size, &mut to),
        }
    }
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Bytes::Borrowed(bytes)
    }
}

impl From<Vec<u8>> for Bytes<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::Shared(Arc::new(bytes))
    }
}

impl fmt::Debug for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

/// An error while checkpoints are written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The refused action.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The disk is full. The incomplete checkpoint has been removed.
    #[error(
        "no space left for a checkpoint of {needed} bytes while writing {path}: free some, or lower checkpoint.keep_last; \
         earlier checkpoints are whole"
    )]
    DiskFull {
        /// The file that could not be written.
        path: PathBuf,
        /// Size of the whole checkpoint.
        needed: u64,
    },
    /// Another process writes checkpoints of this run.
    #[error("another process is writing checkpoints to {path}: wait for it or end it, or give this run another name")]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// A checkpoint contradicts its checksums or headers.
    #[error("{path} is damaged: {reason}")]
    Damaged {
        /// The folder or file.
        path: PathBuf,
        /// The contradiction.
        reason: String,
    },
    /// There are checkpoints, but all are damaged.
    #[error("no checkpoint in {path} is whole: {}", skipped.iter().map(Skipped::to_string).collect::<Vec<_>>().join("; "))]
    NoneGood {
        /// The folder of checkpoints.
        path: PathBuf,
        /// The damaged checkpoints with their reasons, newest first.
        skipped: Vec<Skipped>,
    },
    /// There is no checkpoint of the step that was named.
    #[error("{path} has no checkpoint of step {step}: {}", match there.as_slice() {
        [] => "there is none yet".to_owned(),
        there => format!("there are those of {}", there.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
    })]
    NoStep {
        /// The folder of checkpoints.
        path: PathBuf,
        /// The step.
        step: u64,
        /// The steps that have checkpoints.
        there: Vec<u64>,
    },
    /// There is no best checkpoint.
    #[error(
        "{path} has no best checkpoint: no evaluation was recorded, or the checkpoint of the best one is gone; set \
         evaluation.interval_steps and checkpoint.keep_best, or name a step"
    )]
    NoBest {
        /// The folder of checkpoints.
        path: PathBuf,
    },
    /// A checkpoint has tensors that nobody reads.
    #[error(
        "{path} has tensors in its part `{part}` that this model and optimizer do not read, and they would be lost: {}",
        named(tensors)
    )]
    Unread {
        /// The checkpoint.
        path: PathBuf,
        /// The part.
        part: String,
        /// The tensors.
        tensors: Vec<String>,
    },
    /// A tensor that the reader asked for is not there.
    #[error("{path} has no tensor `{name}` in its part `{part}`")]
    NoTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The part.
        part: String,
        /// The tensor.
        name: String,
    },
    /// The snapshot contradicts itself.
    #[error("this snapshot cannot be written: {0}")]
    Snapshot(String),
    /// Another rank's part of the checkpoint could not be written.
    #[error("no checkpoint was written: {0}")]
    Elsewhere(Trouble),
    /// The ranks that write together lost each other.
    #[error(transparent)]
    Comm(#[from] trainyard_comm::CommError),
    /// Offloaded state cannot be read from its tier.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// State cannot be read from the device.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The background thread has ended.
    #[error("the checkpoint writer has stopped; its reason was reported before")]
    WriterGone,
    /// A fault that a test asked for.
    #[error("crashed at position {0}, as injected")]
    Injected(u64),
}

/// The first few of `names`, and how many more there are.
fn named(names: &[String]) -> String {
    const NAMED_MAX: usize = 4;
    let first: Vec<_> = names.iter().take(NAMED_MAX).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(NAMED_MAX) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

impl CheckpointError {
    /// True if a restart would meet the same error.
    pub(crate) fn comes_again(&self) -> bool {
        match self {
            CheckpointError::DiskFull { .. } | CheckpointError::Locked { .. } => true,
            CheckpointError::Elsewhere(trouble) => trouble.comes_again,
            _ => crate::error::is_lasting(self),
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> CheckpointError {
        let path = path.to_owned();
        move |source| CheckpointError::Io { action, path, source }
    }

    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::Damaged { path: path.to_owned(), reason: reason.into() }
    }
}
