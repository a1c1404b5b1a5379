//! Ranks that are processes, over TCP: a transport ([`crate::processes`]) out of the sockets of the
//! standard library. Nothing to install, on one host or many.
//!
//! **Coming together.** Rank 0 listens at the master's address. Every other rank sends it its rank
//! and address, receives the addresses of all ranks, and connects to those of lower rank
//! ([`rendezvous`]). So there is one connection between any two ranks, and data takes the direct
//! way. If the world does not come together, every rank's error gives the reason.
//!
//! **Messages.** Small ones are copied and sent at once, and wait at the receiver until they are
//! asked for. Large ones wait at the sender until the receiver has said where they go ("ready"),
//! and are read from the socket into that very place: memory is bounded, no byte is copied on the
//! way, and no lane's data keeps another lane's from getting through ([`link`]).
//!
//! **Progress.** Each connection has a thread that reads and one that writes. Data moves while the
//! ranks compute, and a thread that waits for data sleeps until it has come. Threads and
//! connections grow with the number of ranks: for hundreds of ranks take MPI.
//!
//! **Failures.** The operating system closes the connections of a process that dies, so its peers
//! know at once. A process that is stopped or cut off does not answer; the deadline names it. After
//! a failure requests are taken back. If the socket of a stopped peer still reads or writes memory
//! that is needed again, that one connection is shut down ([`request`]).
//!
//! **Strangers.** Every connection begins with a proof that both ends know the job's secret
//! ([`JobSecret`]); others are closed and counted ([`door`]). Without a secret the proof keeps
//! apart what is not of this program, and no more. Nothing is encrypted, as with MPI and NCCL.
//! Rank 0 listens until all have come, at loopback or at one address; afterwards nobody listens.

mod door;
pub mod elastic;
mod link;
mod mesh;
mod rendezvous;
mod request;
mod secret;
mod transport;
mod words;

pub use rendezvous::{LISTEN_VARIABLE, RENDEZVOUS_DEFAULT, Rendezvous, RendezvousError};
pub use secret::{JobSecret, SECRET_VARIABLE, SecretSource};
pub(crate) use words::printable;
