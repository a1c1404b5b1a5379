//! The ranks of one process lend each other waiting threads.
//!
//! If cores differ (a neighbour on the other hyperthread, a hotter core, an interrupt), two ranks
//! on two cores are as fast as the slower core, step after step. The threads of *one* rank balance
//! by themselves, because they take tasks as they become free. Lending does the same between ranks.
//! While a rank waits for another, it takes tasks from the other's open regions
//! ([`LentThreads::lend`]), one at a time, and checks between tasks whether it still has to wait.
//! Results do not depend on it, as they depend on no thread.
//!
//! Lending is for ranks that have a core for each of their threads. If ranks shared cores, the
//! owner would have to wait for a guest that is not running.

use super::threads::{inside_region, mark_inside};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use trainyard_base::lock;

/// The parallel regions that ranks of a process have open, for others to join.
#[derive(Default)]
pub struct LentThreads {
    open: Mutex<Vec<Entry>>,
    hands: AtomicUsize,
    lent: AtomicU64,
}

/// Tasks that are dealt from a counter to whoever comes.
pub(super) struct Region<'b> {
    next: AtomicUsize,
    tasks: usize,
    body: &'b (dyn Fn(usize) + Sync),
    /// Threads of other ranks that are at work in it.
    guests: AtomicUsize,
    /// The panic of a guest, for the owner to raise.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A region with its lifetime erased: it is taken off the list, and its last guest waited for,
/// before it ends.
#[derive(Clone, Copy, PartialEq)]
struct Entry(*const Region<'static>);

// SAFETY: a region is shared by reference: its body is `Sync`, the rest atomics and a mutex.
unsafe impl Send for Entry {}

impl std::fmt::Debug for LentThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LentThreads({} threads)", self.hands())
    }
}

impl<'b> Region<'b> {
    pub fn new(tasks: usize, body: &'b (dyn Fn(usize) + Sync)) -> Region<'b> {
        Region { next: AtomicUsize::new(0), tasks, body, guests: AtomicUsize::new(0), panic: Mutex::new(None) }
    }

    /// Does one task; false when all have been dealt.
    fn one(&self) -> bool {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        if task < self.tasks {
            (self.body)(task);
        }
        task < self.tasks
    }

    /// Does tasks until all have been dealt.
    pub fn all(&self) {
        while self.one() {}
    }

    fn has_tasks(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.tasks
    }
}

impl LentThreads {
    /// Threads of all ranks that joined.
    pub fn hands(&self) -> usize {
        self.hands.load(Ordering::Relaxed)
    }

    /// Tasks that ranks have done for others so far.
    pub fn lent(&self) -> u64 {
        self.lent.load(Ordering::Relaxed)
    }

    pub(super) fn join(&self, threads: usize) {
        self.hands.fetch_add(threads, Ordering::Relaxed);
    }

    pub(super) fn leave(&self, threads: usize) {
        self.hands.fetch_sub(threads, Ordering::Relaxed);
    }

    fn open(&self) -> MutexGuard<'_, Vec<Entry>> {
        lock(&self.open)
    }

    /// Lets other ranks join `region` while `work` runs, and returns when nobody is in it any more.
    /// The panic of a guest is raised here.
    pub(super) fn with_guests(&self, region: &Region<'_>, work: impl FnOnce()) {
        /// Also when `work` panics, the region must not end before its guests have left.
        struct Shown<'c>(&'c LentThreads, Entry);
        impl Drop for Shown<'_> {
            fn drop(&mut self) {
                self.0.open().retain(|entry| *entry != self.1);
                // SAFETY: `with_guests` borrows the region for longer than this guard lives.
                let region = unsafe { &*self.1.0 };
                super::threads::wait_until(|| region.guests.load(Ordering::Acquire) == 0);
            }
        }
        let entry = Entry(std::ptr::from_ref(region).cast());
        self.open().push(entry);
        let shown = Shown(self, entry);
        work();
        drop(shown);
        let panic = lock(&region.panic).take();
        if let Some(panic) = panic {
            std::panic::resume_unwind(panic);
        }
    }

    /// Does one task of a region that another rank has open; false when there is none. For a thread
    /// that has nothing else to do.
    pub fn lend(&self) -> bool {
        if inside_region() {
            return false;
        }
        let entry = {
            let open = self.open();
            // SAFETY: a region on the list is alive, and stays so while it has a guest.
            let regions =
                open.iter().map(|entry| (entry, unsafe { &*entry.0 })).filter(|(_, region)| region.has_tasks());
            let Some((entry, region)) = regions.min_by_key(|(_, region)| region.guests.load(Ordering::Relaxed)) else {
                return false;
            };
            region.guests.fetch_add(1, Ordering::Relaxed);
            *entry
        };
        // SAFETY: as above: this thread is its guest.
        let region = unsafe { &*entry.0 };
        let _inside = mark_inside();
        let done = catch_unwind(AssertUnwindSafe(|| region.one()));
        let did = *done.as_ref().unwrap_or(&true);
        if let Err(panic) = done {
            lock(&region.panic).get_or_insert(panic);
        }
        self.lent.fetch_add(u64::from(did), Ordering::Relaxed);
        // The last touch: from here on the region may end.
        region.guests.fetch_sub(1, Ordering::Release);
        did
    }
}

#[cfg(test)]
mod tests {
    use super::super::Threads;
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread::{ThreadId, current};

    /// Runs `body` on the threads of one rank, while another has nothing to do.
    fn beside<R>(own: usize, body: impl FnOnce(&Threads) -> R) -> R {
        let lent = Arc::new(LentThreads::default());
        let (threads, other) = (Threads::lending(own, &lent), Threads::lending(1, &lent));
        assert_eq!((threads.count(), threads.hands(), other.hands()), (own, own + 1, own + 1));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    if !lent.lend() {
                        std::thread::yield_now();
                    }
                }
            });
            let result = catch_unwind(AssertUnwindSafe(|| body(&threads)));
            done.store(true, Ordering::Release);
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs two tasks that each wait until the other has begun, so that neither thread can do both;
    /// which threads did them.
    fn two_that_meet(threads: &Threads) -> [ThreadId; 2] {
        let by = Mutex::new(Vec::new());
        let begun = AtomicUsize::new(0);
        threads.for_each(2, |_| {
            by.lock().unwrap().push(current().id());
            begun.fetch_add(1, Ordering::AcqRel);
            while begun.load(Ordering::Acquire) < 2 {
                std::thread::yield_now();
            }
        });
        by.into_inner().unwrap().try_into().unwrap()
    }

    #[test]
    fn a_rank_that_waits_does_tasks_of_another() {
        for own in [1, 2] {
            beside(own, |threads| {
                let by = two_that_meet(threads);
                assert!(by[0] != by[1]);
                let lent = threads.lent().unwrap().lent();
                assert!(lent <= 2 && (own > 1 || lent == 1), "{lent} lent");
            });
        }
    }

    #[test]
    fn a_rank_whose_others_have_left_works_alone() {
        let lent = Arc::new(LentThreads::default());
        let (threads, other) = (Threads::lending(1, &lent), Threads::lending(3, &lent));
        assert_eq!(threads.hands(), 4);
        drop(other);
        assert_eq!((threads.hands(), lent.lend()), (1, false));
    }

    #[test]
    fn every_task_runs_once_with_guests_too() {
        beside(1, |threads| {
            for tasks in [2, 3, 100, 1000] {
                let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                threads.for_each(tasks, |task| {
                    // A region inside of a region stays on its thread, a guest's too.
                    threads.for_each(3, |_| {
                        hits[task].fetch_add(1, Ordering::Relaxed);
                    });
                });
                assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 3));
            }
        });
    }

    /// Runs two tasks on two threads; one panics when both have begun, the other sleeps and ends.
    /// The results that the region's owner saw; true if the other had ended by then.
    fn one_of_two_fails(threads: &Threads, fails: impl Fn(bool) -> bool + Sync) -> (&'static str, bool) {
        let owner = current().id();
        let (begun, ended) = (AtomicUsize::new(0), AtomicBool::new(false));
        let region = || {
            threads.for_each(2, |_| {
                begun.fetch_add(1, Ordering::AcqRel);
                while begun.load(Ordering::Acquire) < 2 {
                    std::thread::yield_now();
                }
                assert!(!fails(current().id() == owner), "it fails");
                std::thread::sleep(std::time::Duration::from_millis(20));
                ended.store(true, Ordering::Release);
            })
        };
        let panic = catch_unwind(AssertUnwindSafe(region)).unwrap_err();
        (*panic.downcast::<&str>().unwrap(), ended.load(Ordering::Acquire))
    }

    #[test]
    fn a_guests_panic_is_its_hosts() {
        beside(1, |threads| {
            assert_eq!(one_of_two_fails(threads, |is_owner| !is_owner), ("it fails", true));
            // The next region is as good as any.
            two_that_meet(threads);
        });
    }

    #[test]
    fn a_region_whose_owner_panics_waits_for_its_guests() {
        beside(1, |threads| assert_eq!(one_of_two_fails(threads, |is_owner| is_owner), ("it fails", true)));
    }
}
