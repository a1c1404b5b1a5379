//! Waiting for a counter: a brief spin for peers that are about to come, then sleep.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Spins before sleeping: some 5 us, less than a sleep and its wake-up cost together.
const SPINS: u32 = 200;
/// A sleeper looks up at least so often, to notice failures of the world that happened elsewhere.
const SLICE: Duration = Duration::from_millis(5);

/// A count of arrivals that can be waited for.
#[derive(Default)]
pub(crate) struct Gate {
    count: AtomicU64,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// Why a wait ended without its count.
pub(crate) enum Interrupted<E> {
    Deadline,
    By(E),
}

impl Gate {
    /// Counts one arrival; `last` is the count at which somebody may be waiting.
    pub fn arrive(&self, last: u64) {
        // Sequentially consistent with `sleepers`: either this sees the sleeper, or the sleeper
        // sees the count.
        if self.count.fetch_add(1, Ordering::SeqCst) + 1 == last && self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    pub fn wake_all(&self) {
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_all();
    }

    fn reached(&self, target: u64) -> bool {
        self.count.load(Ordering::SeqCst) >= target
    }

    /// Waits until `target` arrivals were counted; `interrupt` is asked now and then whether to
    /// give up.
    pub fn wait<E>(
        &self,
        target: u64,
        deadline: Duration,
        mut interrupt: impl FnMut() -> Option<E>,
    ) -> Result<(), Interrupted<E>> {
        for _ in 0..SPINS {
            if self.reached(target) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let result = loop {
            if self.reached(target) {
                break Ok(());
            }
            if let Some(reason) = interrupt() {
                // The interruption may have come after the last arrival; then the wait is over all
                // the same.
                break if self.reached(target) { Ok(()) } else { Err(Interrupted::By(reason)) };
            }
            let Some(left) = deadline.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                break Err(Interrupted::Deadline);
            };
            let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.reached(target) {
                let _ = self.wake.wait_timeout(guard, left.min(SLICE));
            }
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        result
    }
}
