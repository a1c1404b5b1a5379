//! A message in flight, and the thread that may touch its memory.
//!
//! The memory belongs to an operation of the caller. That operation may end early, while a socket's
//! thread reads or writes the memory. So a thread claims the memory before it begins
//! ([`Slot::begin`]) and releases it at the end ([`Slot::end`]). An operation that ends early takes
//! its request back ([`Slot::take_back`]), and sees whether a thread still holds the memory.

use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::Thread;

/// No thread has claimed the memory yet.
const WAITING: u8 = 0;
/// A thread holds the memory.
const MOVING: u8 = 1;
/// All bytes have moved.
const DONE: u8 = 2;
/// The connection broke in the middle.
const BROKEN: u8 = 3;
/// Taken back: no thread may claim the memory any more.
const TAKEN_BACK: u8 = 4;

/// Memory that bytes are sent from or received into.
pub(crate) struct Slot {
    data: *mut u8,
    bytes: usize,
    state: AtomicU8,
    /// The thread that waits for it.
    waiter: Thread,
    pub peer: usize,
}

// SAFETY: the memory is touched by one thread at a time, as the state says; who makes a slot
// promises that it stays.
unsafe impl Send for Slot {}
// SAFETY: as above.
unsafe impl Sync for Slot {}

impl Slot {
    /// A message to or from `peer`, for the calling thread.
    ///
    /// # Safety
    /// `data` is valid for `bytes`, for writes unless only [`Slot::source`] is used, and nobody
    /// else touches it (or writes, for a source), until the slot is done or taken back.
    pub unsafe fn new(peer: usize, data: *mut u8, bytes: usize) -> Self {
        Self { data, bytes, state: AtomicU8::new(WAITING), waiter: std::thread::current(), peer }
    }

    /// A message that was copied, and has no memory here.
    pub fn copied(peer: usize) -> Self {
        let data = std::ptr::NonNull::dangling().as_ptr();
        Self { data, bytes: 0, state: AtomicU8::new(WAITING), waiter: std::thread::current(), peer }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_done(&self) -> bool {
        self.state.load(Ordering::Acquire) == DONE
    }

    pub fn is_moving(&self) -> bool {
        self.state.load(Ordering::Acquire) == MOVING
    }

    /// Asks for the memory; what is granted must be ended.
    pub fn begin(&self) -> bool {
        self.state.compare_exchange(WAITING, MOVING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Gives the memory back, with all bytes moved or not.
    pub fn end(&self, whole: bool) {
        self.state.store(if whole { DONE } else { BROKEN }, Ordering::Release);
        self.waiter.unpark();
    }

    /// Lets no thread begin any more. One may still hold the memory ([`Slot::is_moving`]).
    pub fn take_back(&self) {
        // A thread that holds the memory ends by itself.
        let _ = self.state.compare_exchange(WAITING, TAKEN_BACK, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The memory to read.
    ///
    /// # Safety
    /// Between [`Slot::begin`] and [`Slot::end`].
    pub unsafe fn source(&self) -> &[u8] {
        // SAFETY: the promise of `Slot::new`, and the state.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// The memory to fill.
    ///
    /// # Safety
    /// Between [`Slot::begin`] and [`Slot::end`], of a slot whose memory may be written, by the
    /// thread that began.
    #[allow(clippy::mut_from_ref, reason = "the state gives the memory to one thread")]
    pub unsafe fn target(&self) -> &mut [u8] {
        // SAFETY: the promise of `Slot::new`, and the state.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }

    /// Fills the memory from a message that was copied, unless nobody wants it any more.
    pub fn fill(&self, message: &[u8]) {
        if self.begin() {
            let bytes = message.len().min(self.bytes);
            // SAFETY: just begun, and ended below.
            let target = unsafe { self.target() };
            target[..bytes].copy_from_slice(&message[..bytes]);
            self.end(message.len() <= self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_back_is_left_alone() {
        let mut memory = [0u8; 4];
        // SAFETY: the memory outlives the slots, which are used one after the other.
        let slot = |memory: &mut [u8]| unsafe { Slot::new(0, memory.as_mut_ptr(), memory.len()) };
        let wanted = slot(&mut memory);
        wanted.fill(&[1, 2]);
        assert!(wanted.is_done() && !wanted.begin());
        let unwanted = slot(&mut memory);
        unwanted.take_back();
        unwanted.fill(&[9; 4]);
        assert!(!unwanted.is_done() && !unwanted.begin());
        let moving = slot(&mut memory);
        assert!(moving.begin());
        moving.take_back();
        assert!(moving.is_moving());
        moving.end(false);
        assert!(!moving.is_moving() && !moving.is_done());
        let small = slot(&mut memory[..1]);
        small.fill(&[1, 2]);
        assert!(!small.is_done(), "a message that does not fit is not cut");
        assert_eq!(memory, [1, 2, 0, 0]);
    }
}
