//! The carrier of messages between processes: MPI, or sockets.
//!
//! Messages with one tag from one rank to another that are equally long arrive in the order sent,
//! and a receive takes the oldest that no other receive has taken. A receive may ask for more bytes
//! than come, but for no more than an envelope ([`super::envelope::bytes_max`]); larger messages
//! are exactly as long as their receive.

use std::time::Duration;

/// The time that requests get to end after a failure, before the transport gives up their peers.
pub(crate) const GRACE: Duration = Duration::from_millis(500);

/// A world of processes that can send each other bytes.
pub(crate) trait Transport: Send + Sync + 'static {
    /// A message under way, in one direction.
    type Request: Send;
    /// The name that [`crate::Communicator::backend`] returns.
    const NAME: &'static str;

    /// This process, from 0.
    fn rank(&self) -> usize;
    /// Processes.
    fn size(&self) -> usize;
    /// The largest tag.
    fn tag_max(&self) -> u32;

    /// Starts to send `bytes` from `data`.
    ///
    /// # Safety
    /// `data` is valid for `bytes` and nobody writes it until the request has completed or was
    /// abandoned.
    unsafe fn send(&self, data: *const u8, bytes: usize, to: usize, tag: i32) -> Result<Self::Request, String>;

    /// Starts to receive up to `bytes` into `data`.
    ///
    /// # Safety
    /// `data` is valid for `bytes` and nobody touches it until the request has completed or was
    /// abandoned.
    unsafe fn receive(&self, data: *mut u8, bytes: usize, from: usize, tag: i32) -> Result<Self::Request, String>;

    /// The indices of the requests that have completed, which are not to be asked for again.
    fn test(&self, requests: &mut [Self::Request], done: &mut Vec<usize>) -> Result<(), String>;

    /// Ends requests after a failure; each comes with true if it sends.
    /// Afterwards nothing writes their memory.
    fn abandon(&self, requests: Vec<(Self::Request, bool)>);

    /// Waits for a moment, or until something may have happened to requests of this thread; `polls`
    /// counts the calls since something last did.
    fn pause(&self, polls: u32);

    /// Sends a notice, beside all messages. It returns no error: a notice that is lost shows in the
    /// deadlines.
    fn tell(&self, to: usize, notice: &[u8]);

    /// True when all notices are on their way.
    fn has_told(&self) -> bool;

    /// A notice that has come, and the rank that sent it.
    fn hear(&self) -> Result<Option<(usize, Vec<u8>)>, String>;

    /// The reason why nothing will come from a rank any more, where that can be known.
    fn lost(&self, rank: usize) -> Option<String>;

    /// Ends the transport, when all ranks do and nothing failed.
    fn finish(&self);
}
