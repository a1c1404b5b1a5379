//! Ranks that are threads of one process.
//!
//! Nothing is copied that need not be: a rank publishes where its buffers lie, and peers read and
//! write them in place. An operation is
//!
//! 1. **arrive**: publish a descriptor, add one to a counter, wait until everybody has;
//! 2. compare the descriptors, so that a mismatch touches no memory;
//! 3. **transfer**: each rank does its own share, disjoint from everybody else's ([`transfer`]);
//! 4. **depart**: a second count, after which buffers belong to their owners again.
//!
//! Messages of at most [`group::INLINE_BYTES`] travel inside the descriptor and need no second
//! count: each rank computes the whole result from the descriptors, and two sets of them alternate.
//!
//! Waiting is a brief spin, then sleep ([`gate`]): ranks may be more than cores, and the cores have
//! better things to do.
//!
//! **Why a failure leaves no dangling pointer.** A rank may return with an error while a slow peer
//! still copies from its buffer. Therefore whoever touches foreign memory announces it first and
//! then looks whether the world has failed; whoever returns an error has failed the world first and
//! then waits until nobody announces anything. Copies always end, so this wait does.

pub(crate) mod gate;
pub(crate) mod group;
mod mailbox;
mod transfer;
mod world;

pub use world::World;
