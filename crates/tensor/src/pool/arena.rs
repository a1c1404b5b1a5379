//! Arenas: blocks that are kept for work that is repeated at the same addresses, such as a captured
//! graph.
//!
//! Memory that a thread takes within an arena comes from the arena's blocks, or from the pool's,
//! which the arena then keeps. Freed memory goes back to the arena. Nothing else therefore ever
//! gets a block that the work uses. Live bytes are counted as without an arena while the host takes
//! and gives back. When the work is repeated without that, [`Arena::repeat`] counts the same need
//! again.

use super::{Backing, Block, Free, MemoryPool, Purpose, State, take_free};
use crate::error::{Result, TensorError};
use std::collections::BTreeMap;
use std::thread::ThreadId;

/// The pool's arenas.
#[derive(Default)]
pub(super) struct Arenas {
    made: u64,
    /// Their free blocks.
    free: BTreeMap<u64, Free>,
    entered: Option<Entered>,
}

/// Somebody is within one.
struct Entered {
    arena: u64,
    thread: ThreadId,
    /// True if it must do with the blocks that it has.
    closed: bool,
}

/// The peak of live bytes during work within an arena, above the bytes live after it: by purpose,
/// and in total.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    purposes: [usize; Purpose::ALL.len()],
    total: usize,
}

/// See the module. Its blocks go back to the pool when it is dropped; what works on them must be
/// done by then.
pub struct Arena {
    pool: MemoryPool,
    number: u64,
}

impl Arenas {
    /// The arena that this thread is within.
    pub fn entered(&self) -> Option<u64> {
        let entered = self.entered.as_ref()?;
        (entered.thread == std::thread::current().id()).then_some(entered.arena)
    }
}

impl State {
    /// A block for an arena, and whether it is all zeros.
    pub(super) fn block_of(
        &mut self,
        arena: u64,
        backing: &Backing,
        capacity: usize,
        bytes: usize,
        purpose: Purpose,
    ) -> Result<(Option<Block>, bool)> {
        let free = self.arenas.free.get_mut(&arena).expect("who is within an arena holds it");
        if let Some(block) = take_free(free, capacity)? {
            return Ok((Some(block), false));
        }
        if self.arenas.entered.as_ref().is_some_and(|entered| entered.closed) {
            let what = format!("{bytes} bytes for {purpose}, which the same work did not need before");
            return Err(TensorError::Uncapturable(what));
        }
        self.block(backing, capacity, bytes, purpose)
    }

    /// Where the free blocks of an arena are, or those of none.
    pub(super) fn free_of(&mut self, arena: Option<u64>) -> &mut Free {
        match arena.and_then(|arena| self.arenas.free.get_mut(&arena)) {
            Some(free) => free,
            None => &mut self.free,
        }
    }
}

impl MemoryPool {
    /// A new arena without blocks.
    pub fn arena(&self) -> Arena {
        let mut state = self.lock();
        state.arenas.made += 1;
        let number = state.arenas.made;
        state.arenas.free.insert(number, Free::new());
        Arena { pool: self.clone(), number }
    }
}

impl Arena {
    /// Lets this thread take memory from the arena while `work` goes on; when that is `closed`,
    /// from the blocks alone that it has by now.
    ///
    /// # Errors
    /// Those of `work`; closed, that needs a block more.
    ///
    /// # Panics
    /// Within an arena of the same pool.
    pub fn within<T, E>(&self, closed: bool, work: impl FnOnce() -> Result<T, E>) -> Result<(T, Held), E> {
        let before = {
            let mut state = self.pool.lock();
            let entered = Entered { arena: self.number, thread: std::thread::current().id(), closed };
            assert!(state.arenas.entered.replace(entered).is_none(), "within one arena at a time");
            let before = state.usage;
            // The peaks of the work alone.
            state.usage.peak = state.usage.live;
            state.usage.peak_total = state.usage.live_total();
            before
        };
        let result = work();
        let mut state = self.pool.lock();
        state.arenas.entered = None;
        let usage = &mut state.usage;
        let above = |peak: usize, live: usize| peak.saturating_sub(live);
        let held = Held {
            purposes: std::array::from_fn(|purpose| above(usage.peak[purpose], usage.live[purpose])),
            total: above(usage.peak_total, usage.live_total()),
        };
        usage.peak = std::array::from_fn(|purpose| usage.peak[purpose].max(before.peak[purpose]));
        usage.peak_total = usage.peak_total.max(before.peak_total);
        drop(state);
        result.map(|value| (value, held))
    }

    /// Counts the peaks of work that is repeated on the arena's blocks.
    pub fn repeat(&self, held: &Held) {
        let usage = &mut self.pool.lock().usage;
        for purpose in 0..Purpose::ALL.len() {
            usage.peak[purpose] = usage.peak[purpose].max(usage.live[purpose] + held.purposes[purpose]);
        }
        usage.peak_total = usage.peak_total.max(usage.live_total() + held.total);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        for (capacity, blocks) in state.arenas.free.remove(&self.number).unwrap_or_default() {
            state.free.entry(capacity).or_default().extend(blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses of blocks that are taken and given back.
    fn addresses(pool: &MemoryPool) -> Vec<usize> {
        let take = |bytes| pool.allocate(bytes, Purpose::Activations).unwrap();
        let first = [1000, 2000].map(take);
        let second = [2000, 5000].map(take);
        drop(first);
        let third = [1000, 2000].map(take);
        let address = |buffer: &super::super::Buffer| buffer.data().unwrap().as_ptr() as usize;
        let mut all: Vec<usize> = second.iter().chain(&third).map(address).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn what_is_repeated_has_its_blocks_to_itself() {
        let pool = MemoryPool::new(true, None);
        let (arena, ok) = (pool.arena(), |a| Ok::<_, TensorError>(a));
        let (first, held) = arena.within(false, || ok(addresses(&pool))).unwrap();
        let outside = addresses(&pool);
        assert!(first.iter().all(|address| !outside.contains(address)));
        let (again, _) = arena.within(true, || ok(addresses(&pool))).unwrap();
        assert!(first == again);
        let more = || pool.allocate(9000, Purpose::Activations);
        let error = arena.within(true, more).map(drop).unwrap_err().to_string();
        assert!(error.contains("cannot be captured: 9000 bytes for activations"), "{error}");
        assert_eq!(pool.usage().live_total(), 0);
        // Repeating counts what the work needed.
        let peak = pool.usage().peak(Purpose::Activations);
        pool.reset_peaks();
        arena.repeat(&held);
        assert_eq!((pool.usage().peak(Purpose::Activations), pool.usage().peak_total()), (peak, peak));
        // Afterwards its blocks are everybody's, those in use too.
        let (kept, _) = arena.within(false, || pool.allocate(5000, Purpose::Grads)).unwrap();
        drop(arena);
        let reserved = pool.usage().reserved();
        drop(kept);
        addresses(&pool);
        assert_eq!(pool.usage().reserved(), reserved);
    }

    #[test]
    fn other_threads_are_not_within() {
        let pool = MemoryPool::new(true, None);
        let arena = pool.arena();
        let (is_of_arena, _) = arena
            .within(false, || {
                let other = std::thread::scope(|scope| {
                    scope.spawn(|| pool.allocate(100, Purpose::Data).unwrap().is_of_arena()).join().unwrap()
                });
                pool.allocate(100, Purpose::Data).map(|own| [own.is_of_arena(), other])
            })
            .unwrap();
        assert_eq!(is_of_arena, [true, false]);
    }
}
