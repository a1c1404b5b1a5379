//! The interface of a backend: it runs one [`Call`] at a time, in order, with a deadline.
//!
//! The public methods of a communicator check their slices and turn them into a `Call` without
//! types; a backend moves bytes and adds numbers by [`Dtype`]. Collectives differ only in which
//! part of whose input ends up where, so one descriptor serves all.

use crate::error::{CommError, ErrorKind, Failure, Peer, Result};
use crate::number::Dtype;
use crate::place::{Place, Position};
use serde::{Deserialize, Serialize};
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// The operations of a group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Operation {
    /// Everybody gets the sum of everybody's data.
    AllReduce,
    /// Rank `r` gets part `r` of the sum.
    ReduceScatter,
    /// As `ReduceScatter`, leaving the sum in its wide type, unrounded.
    ReduceScatterSums,
    /// Everybody gets everybody's part.
    AllGather,
    /// Everybody gets the root's data.
    Broadcast,
    /// The root gets everybody's part.
    Gather,
    /// Rank `r` gets part `r` of everybody's data.
    AllToAll,
    /// Nobody goes on before all have come.
    Barrier,
    /// New communicators out of this one.
    Split,
    /// To one rank.
    Send,
    /// From one rank.
    Receive,
}

impl Operation {
    /// The name of the method, e.g. `all_reduce`.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::ReduceScatterSums => "reduce_scatter_sums",
            Operation::AllGather => "all_gather",
            Operation::Broadcast => "broadcast",
            Operation::Gather => "gather",
            Operation::AllToAll => "all_to_all",
            Operation::Barrier => "barrier",
            Operation::Split => "split",
            Operation::Send => "send",
            Operation::Receive => "receive",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The part of a call that must be the same on all ranks of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Signature {
    /// The operation.
    pub operation: Operation,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Elements of one part: the whole data of an all-reduce or a broadcast, one rank's share of
    /// the others.
    pub elements: usize,
    /// The root's rank in the group, 0 where there is none.
    pub root: usize,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} {}", self.operation, self.elements, self.dtype)?;
        match self.operation {
            Operation::Broadcast | Operation::Gather => write!(f, " with root {}", self.root),
            _ => Ok(()),
        }
    }
}

/// A collective operation with one rank's memory.
///
/// Sizes follow from the signature and the group: `input` and `output` are `elements` long for
/// all-reduce and broadcast (where only the root's input is read); one of the two is `size` parts
/// long for reduce-scatter (input), all-gather and gather (output), both for all-to-all. They may
/// be one buffer where the result of the operation does not overwrite what peers still read:
/// all-reduce and broadcast in full, reduce-scatter and all-gather with the own part in its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub signature: Signature,
    pub input: *const u8,
    pub output: *mut u8,
}

// SAFETY: a call is a description; the pointers are only followed under the promise of
// `Backend::collective`.
unsafe impl Send for Call {}
// SAFETY: as above.
unsafe impl Sync for Call {}

/// Bytes that a call lets others read and those it fills.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    pub input: usize,
    pub output: usize,
}

impl Signature {
    /// Bytes of `elements`.
    pub(crate) fn part_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Bytes of the two buffers of `rank` in a group of `size`.
    pub(crate) fn extent(&self, size: usize, rank: usize) -> Extent {
        let part = self.part_bytes();
        let (input, output) = match self.operation {
            Operation::AllReduce => (part, part),
            Operation::Broadcast => (if rank == self.root { part } else { 0 }, part),
            Operation::ReduceScatter => (size * part, part),
            Operation::ReduceScatterSums => (size * part, self.elements * self.dtype.sum().size()),
            Operation::AllGather => (part, size * part),
            Operation::Gather => (part, if rank == self.root { size * part } else { 0 }),
            Operation::AllToAll => (size * part, size * part),
            Operation::Send => (part, 0),
            Operation::Receive => (0, part),
            Operation::Barrier | Operation::Split => (0, 0),
        };
        Extent { input, output }
    }
}

/// Ranks' shares of an all-reduce are cut at cache lines, so that no line is written by two ranks.
const LINE_BYTES: usize = 64;

impl Signature {
    /// The elements of an all-reduce or a broadcast that `rank` of `size` works on: start and
    /// length.
    pub(crate) fn share(&self, size: usize, rank: usize) -> (usize, usize) {
        let quantum = (LINE_BYTES / self.dtype.size().max(1)).max(1);
        let lines = self.elements.div_ceil(quantum);
        let edge = |rank: usize| (lines * rank / size * quantum).min(self.elements);
        (edge(rank), edge(rank + 1) - edge(rank))
    }

    /// The bytes of any rank's input that `reader` works on: offset and length.
    pub(crate) fn read_by(&self, size: usize, reader: usize) -> (usize, usize) {
        let part = self.part_bytes();
        match self.operation {
            Operation::AllReduce | Operation::Broadcast => {
                let (start, count) = self.share(size, reader);
                (start * self.dtype.size(), count * self.dtype.size())
            }
            Operation::ReduceScatter | Operation::ReduceScatterSums | Operation::AllToAll => (reader * part, part),
            _ => (0, part),
        }
    }
}

/// Checksums of an input: one for each reader where readers work on different bytes, else one for
/// all of them.
pub(crate) fn checksums(signature: &Signature, size: usize, input: &[u8]) -> Vec<u64> {
    let readers = match signature.operation {
        Operation::AllGather | Operation::Gather => 1,
        _ => size,
    };
    let sum = |reader| {
        let (offset, bytes) = signature.read_by(size, reader);
        xxh3_64(&input[offset..offset + bytes])
    };
    (0..readers).map(sum).collect()
}

/// True if `segment`, the part of an input that `reader` works on, has the checksum that its owner
/// took; true where no checksum was taken.
pub(crate) fn intact(sums: &[u64], reader: usize, segment: &[u8]) -> bool {
    let index = if sums.len() == 1 { 0 } else { reader };
    sums.get(index).is_none_or(|&sum| xxh3_64(segment) == sum)
}

/// The deadline of one call, its checksums, and its name for reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms<'a> {
    /// Time in which peers have to come.
    pub deadline: Duration,
    /// The operation's number on its communicator, from 0.
    pub number: u64,
    /// Name of the communicator.
    pub group: &'a str,
    /// Checksums of what goes out ([`checksums`]); empty unless verifying.
    pub sums: &'a [u64],
}

/// Values that threads of one process share, one of each type.
pub(crate) type Common = Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>;

/// A group of ranks behind a [`crate::Communicator`].
pub(crate) trait Backend: Send + Sync {
    /// `local`, `tcp` or `mpi`.
    fn kind(&self) -> &'static str;
    /// This rank in the group.
    fn rank(&self) -> usize;
    /// World ranks of the group, in order.
    fn members(&self) -> &[u32];
    /// Where a world rank runs.
    fn place(&self, world_rank: u32) -> Place;
    /// The position that a member last posted, and the time since then.
    fn position_of(&self, member: usize) -> Option<(Position, Duration)>;
    /// Asks members for their positions, where those are not known at once; whether answers are to
    /// come.
    fn ask(&self, _: &[usize]) -> bool {
        false
    }
    /// Members that are known to have died, with the evidence of the first; whoever shares this
    /// process has not.
    fn dead(&self) -> Option<(Vec<usize>, String)> {
        None
    }
    /// Makes this rank's position known.
    fn post(&self, position: Position);

    /// Runs a collective and returns when the output is complete and nobody reads the input any
    /// more, also on failure.
    ///
    /// # Safety
    /// The pointers of `call` are valid for the bytes of [`Signature::extent`], aligned to the
    /// element, and nobody else touches that memory until this returns.
    unsafe fn collective(&self, call: &Call, terms: &Terms) -> Result<()>;

    /// Sends `data` to one member and receives `into` from another, either of which may be absent.
    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>, terms: &Terms) -> Result<()>;

    /// One group for each color, its members ordered by key, then by rank here; `keys` are those of
    /// all members of this group.
    fn split(&self, keys: &[(u32, u32)], terms: &Terms) -> Result<Arc<dyn Backend>>;

    /// Values that the ranks of one process have in common; None where ranks are processes.
    fn common(&self) -> Option<&Common> {
        None
    }

    /// Tells all ranks of the world that this one is asked to stop.
    fn request_stop(&self);
    /// The rank of the world that is asked to stop, if one is and that is known here by now.
    fn stop_requested(&self) -> Option<u32>;

    /// The first failure of the world, if there is one.
    fn failure(&self) -> Option<CommError>;
    /// Fails the world unless it has failed already; returns the failure that counts.
    fn fail(&self, failure: Failure) -> CommError;
    /// This rank drops its handle.
    fn leave(&self);

    /// `members` as reports name them.
    fn peers(&self, members: &[usize]) -> Vec<Peer> {
        let peer = |&member: &usize| {
            let rank = self.members()[member];
            Peer { rank, place: self.place(rank), position: self.position_of(member) }
        };
        members.iter().map(peer).collect()
    }

    /// All members called the same; else the first whose call is not the first member's is named,
    /// by everybody alike.
    fn agree(&self, calls: &[Signature], terms: &Terms) -> Result<()> {
        let Some(odd) = calls.iter().position(|call| *call != calls[0]) else { return Ok(()) };
        Err(self.fail(Failure {
            kind: ErrorKind::Mismatch { ours: calls[0], theirs: calls[odd] },
            group: terms.group.to_owned(),
            operation: Some((calls[0].operation, terms.number)),
            noticed_by: self.members()[0],
            culprits: self.peers(&[odd]),
        }))
    }

    /// Fails the world with `kind` and the `culprits` among the members.
    fn fail_with(
        &self,
        kind: ErrorKind,
        culprits: &[usize],
        operation: Option<(Operation, u64)>,
        group: &str,
    ) -> CommError {
        self.fail(Failure {
            kind,
            group: group.to_owned(),
            operation,
            noticed_by: self.members()[self.rank()],
            culprits: self.peers(culprits),
        })
    }
}

/// The members of the color of `rank`, in the order that [`Backend::split`] asks for.
pub(crate) fn members_of_split(keys: &[(u32, u32)], rank: usize) -> Vec<usize> {
    let color = keys[rank].0;
    let mut members: Vec<usize> = (0..keys.len()).filter(|&member| keys[member].0 == color).collect();
    members.sort_by_key(|&member| (keys[member].1, member));
    members
}
