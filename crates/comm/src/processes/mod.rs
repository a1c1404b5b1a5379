//! Ranks that are processes, over anything that carries messages between them ([`Transport`]).
//!
//! Of a transport only point-to-point messages are used, and nothing that blocks: a blocked call
//! has no deadline. Every operation begins with an exchange of [`envelope`]s, which shows
//! mismatches before data moves, carries positions, and carries small data itself. Large data flows
//! in [`flight`]: chunks with a bounded number on the way, so that a chunk is summed while the next
//! ones travel, and sums leave while others still arrive. Reductions are a scatter, ordered local
//! sums and a gather, whatever the transport: so the bits are the same.
//!
//! **Failures.** A thread receives notices beside all operations ([`process`]): failures of other
//! ranks, and questions for this rank's position, which it answers even while the rank computes. A
//! rank has died if it does not answer, if its process on this host is gone, or if the transport
//! has lost it. The rank that detects a failure broadcasts it before anything else. It then stops
//! incoming transfers, so that no late message lands in reused memory. A rank that receives the
//! failure broadcasts it again. So a rank that ends because of a failure is never taken for its
//! cause.

mod envelope;
mod flight;
mod member;
mod process;
mod transfer;
mod transport;

pub(crate) use envelope::bytes_max as envelope_bytes_max;
pub(crate) use member::world;
pub(crate) use transport::{GRACE, Transport};
#[cfg(feature = "mpi")]
pub(crate) use {
    flight::{CHUNK_BYTES, WINDOW},
    member::broken,
};
