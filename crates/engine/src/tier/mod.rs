//! The tiers below the device: where state lies that the program fetches and evicts.
//!
//! A rank has a [`Store`] for each of optimizer state, parameters and activations that are offloaded. The program says when something comes and goes; this
//! module moves bytes and knows nothing of what they mean.

mod store;

pub use store::{SECTOR, Store, aligned};

use crate::Result;
use std::io;
use std::path::Path;
use std::sync::Arc;
use trainyard_program::{Action, Program, State};

/// Offloaded state could not be moved.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the offloaded {what}, {bytes} bytes, in `{path}`: {source}; {}", advice(source.kind()))]
pub struct TierError {
    /// What was to be done.
    pub action: &'static str,
    /// To what: optimizer, parameters, activations.
    pub what: &'static str,
    /// The file.
    pub path: String,
    /// How much was to be moved.
    pub bytes: u64,
    /// The operating system's reason.
    pub source: io::Error,
}

impl TierError {
    pub(crate) fn new(
        action: &'static str,
        what: &'static str,
        path: &Path,
        bytes: u64,
        source: io::Error,
    ) -> TierError {
        TierError { action, what, path: path.display().to_string(), bytes, source }
    }
}

fn advice(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free some space, or name a folder on another disk with memory.offload.directory; checkpoints are whole"
        }
        io::ErrorKind::UnexpectedEof => "something else shortened the file; go on from the last checkpoint",
        _ => "name a folder that can be written to with memory.offload.directory; checkpoints are whole",
    }
}

/// What of a rank lies in tiers; None: on the device.
#[derive(Clone, Default)]
pub struct Tiers {
    /// Masters and optimizer state.
    pub optimizer: Option<Arc<Store>>,
    /// The copy that forward reads.
    pub parameters: Option<Arc<Store>>,
    /// What forward keeps for backward.
    pub activations: Option<Arc<Store>>,
    /// Per unit, in how many chunks its optimizer state comes; empty: each in one.
    chunks: Vec<u32>,
}

impl Tiers {
    /// The stores that `program` needs, without files: for predictions.
    pub fn nowhere(program: &Program) -> Tiers {
        Tiers::with(program, |what, _| Ok(Store::nowhere(what))).expect("nothing is made")
    }

    /// The stores that `program` needs, in `folder`.
    ///
    /// # Errors
    /// Those of [`Store::create`].
    pub fn on_disk(program: &Program, folder: &Path) -> Result<Tiers> {
        Tiers::with(program, |what, bytes| Ok(Store::create(folder, what, program.rank, bytes)?))
    }

    /// Each at least as large as all that is ever written to it.
    fn with(program: &Program, make: impl Fn(&'static str, u64) -> Result<Store>) -> Result<Tiers> {
        let offload = &program.offload;
        let written = |is: fn(State) -> bool| -> u64 {
            let evicted = program.instructions.iter().filter_map(|instruction| match instruction.action {
                Action::Evict { state, write: true, .. } if is(state) => Some(aligned(instruction.bytes)),
                _ => None,
            });
            evicted.sum()
        };
        let one = |is_used: bool, what, bytes| is_used.then(|| make(what, bytes).map(Arc::new)).transpose();
        let is_activations = |state| matches!(state, State::Activations { .. });
        Ok(Tiers {
            optimizer: one(
                offload.optimizer.is_some(),
                "optimizer",
                written(|s| matches!(s, State::Optimizer { .. })),
            )?,
            parameters: one(offload.parameters.is_some(), "parameters", written(|s| s == State::Parameters))?,
            activations: one(offload.activations.is_some(), "activations", written(is_activations))?,
            chunks: program.chunks.clone(),
        })
    }

    /// In how many chunks the optimizer state of `unit` comes.
    pub fn chunks_of(&self, unit: usize) -> u32 {
        self.chunks.get(unit).copied().unwrap_or(1)
    }

    /// All of them.
    pub fn stores(&self) -> impl Iterator<Item = &Store> {
        [&self.optimizer, &self.parameters, &self.activations].into_iter().flatten().map(Arc::as_ref)
    }
}
