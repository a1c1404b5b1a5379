//! The rows of a task, claimed by the threads that share it.
//!
//! Cores differ, and change from second to second. A thread that finds no task left joins
//! another's: it packs the columns for itself and claims rows of those that are left. Claims shrink
//! towards the end, so that all are done at about the same time ("guided self-scheduling",
//! Polychronopoulos and Kuck 1987). Which thread sums which rows changes no sum.

use crate::cpu::threads::wait_until;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The division of rows among threads, in every block of the shared dimension.
pub(super) struct Claims {
    /// Panels of rows.
    rows: usize,
    /// Threads that may share them.
    hands: usize,
    blocks: Vec<Block>,
}

#[derive(Default)]
struct Block {
    claimed: AtomicUsize,
    done: AtomicUsize,
}

/// Panels of rows that are the claiming thread's; done when this is dropped.
pub(super) struct Claim<'c> {
    pub rows: Range<usize>,
    block: &'c Block,
}

impl Claims {
    /// The panels `0..rows` of every block, for up to `hands` threads.
    pub fn new(rows: usize, blocks: usize, hands: usize) -> Claims {
        Claims { rows, hands, blocks: (0..blocks).map(|_| Block::default()).collect() }
    }

    /// Some rows of `block`; None when all are claimed.
    pub fn claim(&self, block: usize) -> Option<Claim<'_>> {
        let block = &self.blocks[block];
        let share = |claimed: usize| match (self.hands, self.rows - claimed) {
            (1, left) => left,
            (hands, left) => left.div_ceil(2 * hands),
        };
        let claim = |claimed: usize| (claimed < self.rows).then(|| claimed + share(claimed));
        let start = block.claimed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).ok()?;
        Some(Claim { rows: start..start + share(start), block })
    }

    /// Panels that nobody has claimed, of all blocks together.
    pub fn unclaimed(&self) -> usize {
        self.blocks.iter().map(|block| self.rows - block.claimed.load(Ordering::Relaxed)).sum()
    }

    /// Returns when all rows of `block`, which are claimed, are done.
    pub fn wait(&self, block: usize) {
        wait_until(|| self.blocks[block].done.load(Ordering::Acquire) == self.rows);
    }
}

impl Drop for Claim<'_> {
    // Also when the kernel panics: nobody waits for rows that nobody does.
    fn drop(&mut self) {
        self.block.done.fetch_add(self.rows.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn every_row_is_claimed_once_in_every_block_and_a_block_begins_after_the_one_before() {
        for (rows, blocks, hands) in [(1, 1, 2), (7, 3, 2), (64, 2, 4), (5, 1, 1)] {
            let claims = Claims::new(rows, blocks, hands);
            let sums: Vec<Mutex<Vec<usize>>> = (0..rows).map(|_| Mutex::default()).collect();
            std::thread::scope(|scope| {
                for _ in 0..hands {
                    scope.spawn(|| {
                        for block in 0..blocks {
                            while let Some(claim) = claims.claim(block) {
                                if block > 0 {
                                    claims.wait(block - 1);
                                }
                                claim.rows.clone().for_each(|row| sums[row].lock().unwrap().push(block));
                            }
                        }
                    });
                }
            });
            let all: Vec<usize> = (0..blocks).collect();
            assert!(sums.iter().all(|row| *row.lock().unwrap() == all));
            assert_eq!(claims.unclaimed(), 0);
        }
    }

    #[test]
    fn claims_shrink_and_one_thread_claims_all() {
        let sizes = |hands| {
            let claims = Claims::new(16, 1, hands);
            std::iter::from_fn(|| claims.claim(0).map(|claim| claim.rows.len())).collect::<Vec<_>>()
        };
        assert_eq!(sizes(1), [16]);
        assert_eq!(sizes(2), [4, 3, 3, 2, 1, 1, 1, 1]);
    }

    #[test]
    fn rows_of_a_kernel_that_panics_are_waited_for_by_nobody() {
        let claims = Claims::new(4, 1, 1);
        let panics = std::panic::AssertUnwindSafe(|| {
            let _claim = claims.claim(0);
            panic!("a kernel fails");
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        claims.wait(0);
    }
}
