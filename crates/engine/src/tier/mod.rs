//! The tiers below the device (host memory, disk), which hold offloaded state.
//!
//! Each kind of state that is offloaded (optimizer state, parameters, activations, gradients) has a
//! [`Lower`]: a [`Store`] on disk, or the host beside a GPU. The host's memory is a device with its
//! own pool. The program decides when state is fetched and evicted; this module does not interpret
//! the bytes.

mod store;

pub use store::{SECTOR, Store, aligned};

use crate::Result;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use trainyard_program::{Action, BlockCodec, Program, State, Tier};
use trainyard_tensor::{Computes, Device, Tensor, Usage};

/// An error of reading or writing offloaded state.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the offloaded {what}, {bytes} bytes, in `{path}`: {source}; {}", advice(source.kind()))]
pub struct TierError {
    /// The action that failed, as a verb.
    pub action: &'static str,
    /// The kind of state: optimizer, parameters, activations or gradients.
    pub what: &'static str,
    /// The file.
    pub path: String,
    /// Number of bytes to move.
    pub bytes: u64,
    /// The operating system's error.
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

/// The tier of one kind of state.
#[derive(Clone)]
pub enum Lower {
    /// In a file.
    Disk(Arc<Store>),
    /// In the host's memory.
    Host(Device),
}

impl Lower {
    /// The store, if the tier is on disk.
    pub fn store(&self) -> Option<&Arc<Store>> {
        match self {
            Lower::Disk(store) => Some(store),
            Lower::Host(_) => None,
        }
    }

    /// The host, if the tier is its memory.
    pub fn host(&self) -> Option<&Device> {
        match self {
            Lower::Disk(_) => None,
            Lower::Host(host) => Some(host),
        }
    }
}

/// The place of a part of the state.
#[derive(Clone)]
pub enum Stored {
    /// In memory, of the device or of the host.
    Here(Tensor),
    /// In a store, from this position on.
    Away(Arc<Store>, u64),
}

/// The tiers of a rank's state. None: that kind of state stays on the device.
#[derive(Clone, Default)]
pub struct Tiers {
    /// Tier of optimizer state, and of the masters with it.
    pub optimizer: Option<Lower>,
    /// Tier of the parameter copies that forward reads.
    pub parameters: Option<Lower>,
    /// The codec of parameter copies that lie encoded in the rank's own memory.
    pub encoded: Option<BlockCodec>,
    /// Tier of the activations that forward keeps for backward.
    pub activations: Option<Lower>,
    /// Tier of the gradient sums that the update reads, while nothing is added to them.
    pub gradients: Option<Lower>,
    /// Per unit, the number of chunks of its optimizer state. Empty: one chunk each.
    chunks: Vec<u32>,
}

impl Tiers {
    /// The tiers of `program` without files or memory, for predictions.
    pub fn nowhere(program: &Program) -> Tiers {
        let host = Device::meta_for(Computes::Cpu);
        Tiers::with(program, &host, |what, bytes| Ok(Store::nowhere(what, bytes))).expect("nothing is made")
    }

    /// The tiers of `program`: files in `folder`, and the host beside `device`.
    ///
    /// # Errors
    /// Those of [`Store::create`].
    pub fn create(program: &Program, device: &Device, folder: &Path) -> Result<Tiers> {
        Tiers::with(program, &device.beside(), |what, bytes| Ok(Store::create(folder, what, program.rank, bytes)?))
    }

    /// Makes the tiers. Each store has room for all bytes that are ever written to it.
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
                // It is no other memory than the rank's own.
                Some(Tier::Encoded(_)) => None,
            })
        };
        // Every micro-batch writes a unit's gradients to the same place.
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
            encoded: match offload.parameters {
                Some(Tier::Encoded(codec)) => Some(codec),
                _ => None,
            },
            parameters: one(offload.parameters, "parameters", written(|s| s == State::Parameters))?,
            activations: one(offload.activations, "activations", written(is_activations))?,
            gradients: one(offload.gradients, "gradients", sums.values().sum())?,
            chunks: program.chunks.clone(),
        })
    }

    /// The host, if any state lies in its memory.
    pub fn host(&self) -> Option<&Device> {
        self.all().find_map(Lower::host)
    }

    /// Host memory in use now and at its peak; zero if no state lies there.
    pub fn host_memory(&self) -> Usage {
        self.host().map_or_else(Usage::default, |host| host.pool().usage())
    }

    /// Number of chunks of the optimizer state of `unit`.
    pub fn chunks_of(&self, unit: usize) -> u32 {
        self.chunks.get(unit).copied().unwrap_or(1)
    }

    /// True if the f32 masters lie with the optimizer's state. `separate`: they are separate from
    /// what forward reads. On disk these are the masters that lie with the state. On the host it is
    /// all of them, because the update runs there.
    pub fn has_masters(&self, separate: bool) -> bool {
        match &self.optimizer {
            None => false,
            Some(Lower::Disk(_)) => separate,
            Some(Lower::Host(_)) => true,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Lower> {
        [&self.optimizer, &self.parameters, &self.activations, &self.gradients].into_iter().flatten()
    }

    /// Size in bytes of all stores.
    pub fn disk_bytes(&self) -> u64 {
        self.stores().map(Store::bytes).sum()
    }

    /// The stores on disk.
    pub fn stores(&self) -> impl Iterator<Item = &Store> {
        self.all().filter_map(Lower::store).map(Arc::as_ref)
    }
}
