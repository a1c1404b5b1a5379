//! Ranks that are processes, over anything that carries messages between them ([`Transport`]).
//!
//! Of a transport only point-to-point messages are used, and nothing that blocks: a blocked call
//! has no deadline. Every operation begins with an exchange of [`envelope`]s, which shows
//! mismatches before data moves, carries positions, and carries small data itself. Large data flows
//! in [`flight`]: chunks with a bounded number on the way, so that a chunk is summed while the next
//! ones travel, and sums leave while others still arrive. Reductions are a scatter, ordered local
//! sums and a gather, whatever the transport: so the bits are the same.
//!
//! **Failures.** A thread listens beside all operations ([`process`]): for failures of others, and
//! for questions where this rank is, which it answers even while the rank computes. Who does not
//! answer, whose process on this host is gone, or whom the transport has lost, has died. Who
//! notices tells everybody first, and then takes care that nothing arrives in memory that is in use
//! again; who is told passes it on, so that nobody takes a rank that ends because of a failure for
//! its cause.

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
