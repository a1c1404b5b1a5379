//! Collectives between the memories of several devices: the interface of NCCL. It is the sibling of
//! [`Driver`](crate::driver::Driver), which hands it out:
//! [`Driver::nccl`](crate::driver::Driver::nccl).
//!
//! Nothing here waits. Every rank begins a communicator with the same [`UniqueId`], and
//! [`Nccl::state`] says when it is ready. Work on a stream runs there in order once all ranks have
//! reached it, and `state` reports failures on the way. The caller (`trainyard-comm`) handles
//! deadlines and finds the rank to blame when they pass.

use crate::driver::{Region, Stream};
use crate::error::Result;

/// By what the ranks of a communicator find each other: made by one of them, known to all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct UniqueId(pub [u8; 128]);

/// A communicator, by its number on the driver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Comm(pub usize);

/// The element type of sums.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Element {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of a binary32; sums are rounded wherever the library pleases.
    Bf16,
}

impl Element {
    /// Bytes of one.
    pub const fn size(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 => 2,
        }
    }
}

/// One operation of one rank. All ranks of a communicator put the same collectives on their streams
/// in the same order; a send meets the receive that its receiver made as many receives from the
/// sender ago.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exchange {
    /// Everybody gets the sum of everybody's `from`; `to` is as long and may be the same memory.
    AllReduce {
        /// The summands.
        from: Region,
        /// The sum.
        to: Region,
        /// Of both.
        element: Element,
    },
    /// Rank `r` gets part `r` of the sum; `to` is one part and may be part `r` of `from`.
    ReduceScatter {
        /// As many parts as there are ranks.
        from: Region,
        /// One part.
        to: Region,
        /// Of both.
        element: Element,
    },
    /// Everybody gets everybody's part, in order of the ranks; `from` may be the rank's part of
    /// `to`.
    AllGather {
        /// One part.
        from: Region,
        /// As many parts as there are ranks.
        to: Region,
    },
    /// Everybody gets the root's bytes; `to` may be `from`, which only the root's is read of.
    Broadcast {
        /// As long as `to`.
        from: Region,
        /// The result.
        to: Region,
        /// The rank that sends.
        root: usize,
    },
    /// To one rank.
    Send {
        /// The data to send.
        from: Region,
        /// To whom.
        peer: usize,
    },
    /// From one rank.
    Receive {
        /// Where to.
        to: Region,
        /// From whom.
        peer: usize,
    },
}

impl Exchange {
    /// The region that it reads, and the region that it writes.
    pub fn regions(&self) -> [Region; 2] {
        match *self {
            Exchange::AllReduce { from, to, .. }
            | Exchange::ReduceScatter { from, to, .. }
            | Exchange::AllGather { from, to }
            | Exchange::Broadcast { from, to, .. } => [from, to],
            Exchange::Send { from, .. } => [from, Region::NONE],
            Exchange::Receive { to, .. } => [Region::NONE, to],
        }
    }
}

/// The state of a communicator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    /// All that was asked for is on its streams.
    Ready,
    /// It is still being set up, or its last call is still being worked on.
    Busy,
    /// It failed, on this rank or on another: nothing on its streams will end before it is aborted.
    Failed(String),
}

/// Collectives of one device. Calls can come from any thread; those on one communicator come one at
/// a time, but for [`Nccl::state`] and [`Nccl::abort`].
pub trait Nccl: Send + Sync {
    /// 10000 major + 100 minor + patch.
    fn version(&self) -> u32;

    /// A new one, known to nobody yet.
    fn unique_id(&self) -> Result<UniqueId>;

    /// Begins a communicator of `size` ranks, each of which calls this; it is [`State::Busy`] until
    /// all have.
    fn init(&self, id: &UniqueId, rank: usize, size: usize) -> Result<Comm>;

    /// The state of the communicator.
    fn state(&self, comm: Comm) -> Result<State>;

    /// Puts operations on a stream as one group: they progress together, and none ends before all
    /// have begun. The communicator is ready.
    fn enqueue(&self, comm: Comm, stream: Stream, exchanges: &[Exchange]) -> Result<()>;

    /// Begins its end, which is reached when [`Nccl::state`] is ready again. All ranks call this.
    fn finalize(&self, comm: Comm) -> Result<()>;

    /// Gives back a communicator that has reached its end.
    fn destroy(&self, comm: Comm);

    /// Ends it at once: what is on streams ends with arbitrary results. It is given back.
    fn abort(&self, comm: Comm);
}
