//! Messages from one thread to another: the sender offers its buffer, the receiver copies out of
//! it, the sender goes on.
//!
//! One copy, and none in between. A buffer is the receiver's only while the state says `Taking`; an
//! offer that is not yet taken can be withdrawn at any time.

use crate::backend::{Operation, Signature};
use crate::error::{CommError, ErrorKind};
use crate::number::Dtype;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trainyard_base::lock;
use xxhash_rust::xxh3::xxh3_64;

/// The pause between two looks of a waiting rank whether the world has failed.
const SLICE: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Default)]
enum State {
    #[default]
    Empty,
    Offered {
        data: *const u8,
        bytes: usize,
        sum: Option<u64>,
    },
    Taking,
    Taken,
}

// SAFETY: the pointer is followed only in state `Taking`, while the offering rank waits in `Offer`.
unsafe impl Send for State {}

/// The way from one member to another.
#[derive(Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
    sending: Mutex<()>,
    receiving: Mutex<()>,
}

/// Why a message did not pass.
pub(super) enum Trouble {
    Failed(CommError),
    Kind(ErrorKind),
}

impl Trouble {
    /// The failure of the world, or a new one.
    pub fn resolve(self, fail: impl FnOnce(ErrorKind) -> CommError) -> CommError {
        match self {
            Trouble::Failed(error) => error,
            Trouble::Kind(kind) => fail(kind),
        }
    }
}

/// A buffer on offer; it stays borrowed until this is dropped.
pub(super) struct Offer<'a> {
    mailbox: &'a Mailbox,
    _sending: MutexGuard<'a, ()>,
    _data: &'a [u8],
}

/// Sleeps until something changes, for a slice at most; whether to give up, and why.
fn sleep<'a>(
    mailbox: &Mailbox,
    state: MutexGuard<'a, State>,
    start: Instant,
    deadline: Duration,
    failure: &impl Fn() -> Option<CommError>,
    gone: &impl Fn() -> bool,
) -> Result<MutexGuard<'a, State>, Trouble> {
    if let Some(error) = failure() {
        return Err(Trouble::Failed(error));
    }
    let Some(left) = deadline.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
        return Err(Trouble::Kind(ErrorKind::Deadline { waited: deadline }));
    };
    let was_gone = gone();
    let (state, _) = mailbox.changed.wait_timeout(state, left.min(SLICE)).unwrap_or_else(PoisonError::into_inner);
    // A rank that has left may have done its part just before; that shows in the state after a look
    // at `gone`.
    match *state {
        State::Empty | State::Offered { .. } if was_gone && !matches!(*state, State::Taken) => {
            Err(Trouble::Kind(ErrorKind::Left))
        }
        _ => Ok(state),
    }
}

impl Mailbox {
    /// Offers `data` with its checksum to the receiver. Of two threads that send the same way, the
    /// second waits for the first.
    pub fn offer<'a>(&'a self, data: &'a [u8], sum: Option<u64>) -> Offer<'a> {
        let sending = lock(&self.sending);
        *lock(&self.state) = State::Offered { data: data.as_ptr(), bytes: data.len(), sum };
        self.changed.notify_all();
        Offer { mailbox: self, _sending: sending, _data: data }
    }

    /// Waits for an offer and copies it.
    pub fn take(
        &self,
        into: &mut [u8],
        deadline: Duration,
        failure: impl Fn() -> Option<CommError>,
        gone: impl Fn() -> bool,
    ) -> Result<(), Trouble> {
        let _receiving = lock(&self.receiving);
        let start = Instant::now();
        let mut state = lock(&self.state);
        loop {
            if let State::Offered { data, bytes, sum } = *state {
                if bytes != into.len() {
                    let side =
                        |operation, bytes| Signature { operation, dtype: Dtype::Plain(1), elements: bytes, root: 0 };
                    let (ours, theirs) = (side(Operation::Receive, into.len()), side(Operation::Send, bytes));
                    return Err(Trouble::Kind(ErrorKind::Mismatch { ours, theirs }));
                }
                *state = State::Taking;
                drop(state);
                // SAFETY: the offering rank keeps the buffer borrowed and waits as long as the
                // state is `Taking`; `into` is ours.
                unsafe { std::ptr::copy_nonoverlapping(data, into.as_mut_ptr(), bytes) };
                *lock(&self.state) = State::Taken;
                self.changed.notify_all();
                let intact = sum.is_none_or(|sum| xxh3_64(into) == sum);
                return if intact { Ok(()) } else { Err(Trouble::Kind(ErrorKind::Corrupt)) };
            }
            state = sleep(self, state, start, deadline, &failure, &gone)?;
        }
    }
}

impl Offer<'_> {
    /// Waits until the offer was taken.
    pub fn wait(
        self,
        deadline: Duration,
        failure: impl Fn() -> Option<CommError>,
        gone: impl Fn() -> bool,
    ) -> Result<(), Trouble> {
        let start = Instant::now();
        let mut state = lock(&self.mailbox.state);
        while !matches!(*state, State::Taken) {
            state = sleep(self.mailbox, state, start, deadline, &failure, &gone)?;
        }
        Ok(())
    }
}

impl Drop for Offer<'_> {
    /// Withdraws what was not taken; a copy that has begun is waited for, which is as long as a
    /// copy takes.
    fn drop(&mut self) {
        let mut state = lock(&self.mailbox.state);
        while matches!(*state, State::Taking) {
            state = self.mailbox.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        *state = State::Empty;
    }
}
