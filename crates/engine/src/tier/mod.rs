//! The tiers below the device: where state lies that the program fetches and evicts.
//!
//! Each of optimizer state, parameters, activations and gradients that are offloaded has a
//! [`Lower`]: a [`Store`] on disk, or the host beside a GPU, whose memory is a device like any
//! other with a pool of its own. The program says when something comes and goes; this module knows
//! nothing of what the bytes mean.

mod store;

pub use store::{SECTOR, Store, aligned};

use crate::Result;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use trainyard_program::{Action, Program, State, Tier};
use trainyard_tensor::{Computes, DType, Device, Tensor, Usage};

/// Offloaded state could not be moved.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the offloaded {what}, {bytes} bytes, in `{path}`: {source}; {}", advice(source.kind()))]
pub struct TierError {
    /// What was to be done.
    pub action: &'static str,
    /// To what: optimizer, parameters, activations, gradients.
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

/// Where state of one kind lies while it is not on the device.
#[derive(Clone)]
pub enum Lower {
    /// In a file.
    Disk(Arc<Store>),
    /// In the host's memory.
    Host(Device),
}

impl Lower {
    /// The file, if it is one.
    pub fn store(&self) -> Option<&Arc<Store>> {
        match self {
            Lower::Disk(store) => Some(store),
            Lower::Host(_) => None,
        }
    }

    /// The host, if it is that.
    pub fn host(&self) -> Option<&Device> {
        match self {
            Lower::Disk(_) => None,
            Lower::Host(host) => Some(host),
        }
    }
}

/// Where bytes of the state are.
pub enum Stored {
    /// In memory, of the device or of the host.
    Here(Tensor),
    /// In a store, from this position on.
    Away(Arc<Store>, u64),
}

/// What of a rank lies in tiers; None: on the device.
#[derive(Clone, Default)]
pub struct Tiers {
    /// Masters and optimizer state.
    pub optimizer: Option<Lower>,
    /// The copy that forward reads.
    pub parameters: Option<Lower>,
    /// What forward keeps for backward.
    pub activations: Option<Lower>,
    /// The sums of gradients that the update reads, while nothing is added to them.
    pub gradients: Option<Lower>,
    /// Per unit, in how many chunks its optimizer state comes; empty: each in one.
    chunks: Vec<u32>,
}

impl Tiers {
    /// What `program` needs, without files or memory: for predictions.
    pub fn nowhere(program: &Program) -> Tiers {
        let host = Device::meta_for(Computes::Cpu);
        Tiers::with(program, &host, |what, bytes| Ok(Store::nowhere(what, bytes))).expect("nothing is made")
    }

    /// What `program` needs: files in `folder`, and the host beside `device`.
    ///
    /// # Errors
    /// Those of [`Store::create`].
    pub fn create(program: &Program, device: &Device, folder: &Path) -> Result<Tiers> {
        Tiers::with(program, &device.beside(), |what, bytes| Ok(Store::create(folder, what, program.rank, bytes)?))
    }

    /// Each store at least as large as all that is ever written to it.
    fn with(program: &Program, host: &Device, make: impl Fn(&'static str, u64) -> Result<Store>) -> Result<Tiers> {
        let offload = &program.offload;
        let written = |is: fn(State) -> bool| -> u64 {
            let evicted = program.instructions.iter().filter_map(|instruction| match instruction.action {
                Action::Evict { state, write: true, .. } if is(state) => Some(aligned(instruction.bytes)),
                _ => None,
            });
            evicted.sum()
        };
        let one = |tier: Option<Tier>, what, bytes| -> Result<Option<Lower>> {
            Ok(match tier {
                None => None,
                Some(Tier::Disk) => Some(Lower::Disk(Arc::new(make(what, bytes)?))),
                Some(Tier::Host) => Some(Lower::Host(host.clone())),
            })
        };
        // Every micro-batch writes a unit's to the same place.
        let sums: BTreeMap<u32, u64> = program
            .instructions
            .iter()
            .filter_map(|instruction| match instruction.action {
                Action::Evict { unit, state: State::Gradients, .. } => Some((unit, aligned(instruction.bytes))),
                _ => None,
            })
            .collect();
        let is_activations = |state| matches!(state, State::Activations { .. });
        let is_optimizer = |state| matches!(state, State::Optimizer { .. });
        Ok(Tiers {
            optimizer: one(offload.optimizer, "optimizer", written(is_optimizer))?,
            parameters: one(offload.parameters, "parameters", written(|s| s == State::Parameters))?,
            activations: one(offload.activations, "activations", written(is_activations))?,
            gradients: one(offload.gradients, "gradients", sums.values().sum())?,
            chunks: program.chunks.clone(),
        })
    }

    /// The host, where anything lies there.
    pub fn host(&self) -> Option<&Device> {
        self.all().find_map(Lower::host)
    }

    /// What is and was in use of the host's memory, nothing where nothing lies there.
    pub fn host_memory(&self) -> Usage {
        self.host().map_or_else(Usage::default, |host| host.pool().usage())
    }

    /// In how many chunks the optimizer state of `unit` comes.
    pub fn chunks_of(&self, unit: usize) -> u32 {
        self.chunks.get(unit).copied().unwrap_or(1)
    }

    /// Whether f32 masters lie with the optimizer's state, where forward reads `compute`: on disk
    /// those that are apart from the copy, on the host all, because the update runs there.
    pub fn has_masters(&self, compute: DType) -> bool {
        match &self.optimizer {
            None => false,
            Some(Lower::Disk(_)) => compute != DType::F32,
            Some(Lower::Host(_)) => true,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Lower> {
        [&self.optimizer, &self.parameters, &self.activations, &self.gradients].into_iter().flatten()
    }

    /// Bytes of disk that the files take.
    pub fn disk_bytes(&self) -> u64 {
        self.stores().map(Store::bytes).sum()
    }

    /// The files.
    pub fn stores(&self) -> impl Iterator<Item = &Store> {
        self.all().filter_map(Lower::store).map(Arc::as_ref)
    }
}
