//! The threads of one rank: a small persistent pool that spins briefly, then sleeps.
//!
//! A training step is thousands of parallel regions of 5 microseconds to 50 milliseconds. Workers
//! therefore spin for a few microseconds between regions before they park, and a region costs about
//! a microsecond to open. The caller is thread 0 and works too. Regions do not nest: a region
//! opened inside another runs on the calling thread alone.
//!
//! Which thread does which task is left to chance ([`Threads::for_each`] deals tasks from a
//! counter); results must not depend on it, nor on how many tasks a kernel cuts its work into,
//! which follows the number of threads.
//!
//! Ranks that are threads of one process lend each other threads that wait:
//! [`super::lent_threads`].

use super::lent_threads::{LentThreads, Region};
use std::any::Any;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use trainyard_base::lock;

/// Number of polls of a waiting thread before it sleeps: about 20 to 50 microseconds.
const SPINS: u32 = 2_000;

thread_local! {
    static INSIDE_REGION: Cell<bool> = const { Cell::new(false) };
}

/// True if this thread is at work in a region.
pub(super) fn inside_region() -> bool {
    INSIDE_REGION.get()
}

/// This thread is at work in a region until the guard is dropped.
pub(super) fn mark_inside() -> impl Drop {
    struct Inside;
    impl Drop for Inside {
        fn drop(&mut self) {
            INSIDE_REGION.set(false);
        }
    }
    INSIDE_REGION.set(true);
    Inside
}

/// Polls for `done`, at first without giving the core away.
pub(super) fn wait_until(done: impl Fn() -> bool) {
    let mut spins = 0;
    while !done() {
        spins += 1;
        if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}

/// A pool of threads owned by one rank.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One region at a time: lanes of a rank that compute at once take turns.
    turn: Mutex<()>,
    /// Other ranks of this process that may help.
    lent: Option<Arc<LentThreads>>,
}

/// A region's body with its lifetime erased; it outlives the region because [`Threads::run`] waits
/// for all threads.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + Sync));

// SAFETY: the pointee is `Sync`, and `run` keeps it alive until every worker has finished with it.
unsafe impl Send for Job {}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    /// Rises by one with each region; workers spin on it.
    epoch: AtomicUsize,
    /// Workers that have not finished the current region.
    running: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

struct State {
    epoch: usize,
    job: Option<Job>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Threads({})", self.count())
    }
}

impl Threads {
    /// A pool of `count` threads including the caller's; `count - 1` are started.
    pub fn new(count: usize) -> Threads {
        let shared = Arc::new(Shared {
            state: Mutex::new(State { epoch: 0, job: None }),
            wake: Condvar::new(),
            epoch: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let workers = (1..count.max(1))
            .map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("compute-{index}"))
                    .spawn(move || work(&shared, index))
                    .expect("the operating system starts a thread")
            })
            .collect();
        Threads { shared, workers, turn: Mutex::new(()), lent: None }
    }

    /// As [`Threads::new`], for a rank that lends its threads to others: the others may join its
    /// regions.
    pub fn lending(count: usize, lent: &Arc<LentThreads>) -> Threads {
        let mut threads = Threads::new(count);
        lent.join(threads.count());
        threads.lent = Some(Arc::clone(lent));
        threads
    }

    /// The number of threads, the caller's included.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// The number of threads that a region may meet: those of all ranks that lend each other
    /// threads, where this rank is one.
    pub fn hands(&self) -> usize {
        self.lent.as_ref().map_or(0, |lent| lent.hands()).max(self.count())
    }

    /// The ranks that this one's threads work with.
    pub fn lent(&self) -> Option<&Arc<LentThreads>> {
        self.lent.as_ref()
    }

    /// Runs `body(thread)` once on every thread, `thread` in `0..count()`, and returns when all are
    /// done. A panic in any of them is raised here.
    pub fn run(&self, body: impl Fn(usize) + Sync) {
        if self.workers.is_empty() || INSIDE_REGION.get() {
            for thread in 0..self.count() {
                body(thread);
            }
            return;
        }
        let _turn = lock(&self.turn);
        let body: &(dyn Fn(usize) + Sync) = &body;
        // SAFETY: only the lifetime is erased; this function does not return before `running` is
        // back at zero, after which no worker touches the pointer.
        let job = Job(unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(body)
        });
        self.shared.running.store(self.workers.len(), Ordering::Relaxed);
        {
            let mut state = self.shared.state.lock().unwrap();
            state.job = Some(job);
            state.epoch += 1;
            self.shared.epoch.store(state.epoch, Ordering::Release);
        }
        self.shared.wake.notify_all();

        let inside = mark_inside();
        let mine = catch_unwind(AssertUnwindSafe(|| body(0)));
        drop(inside);

        wait_until(|| self.shared.running.load(Ordering::Acquire) == 0);
        let theirs = self.shared.panic.lock().unwrap().take();
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Runs `body(task)` for every `task` in `0..tasks`, dealt to the threads as they become free.
    pub fn for_each(&self, tasks: usize, body: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.hands() == 1 || inside_region() {
            return (0..tasks).for_each(body);
        }
        let region = Region::new(tasks, &body);
        let work = || match self.count() {
            1 => {
                let _inside = mark_inside();
                region.all();
            }
            _ => self.run(|_| region.all()),
        };
        match &self.lent {
            Some(lent) => lent.with_guests(&region, work),
            None => work(),
        }
    }

    /// Cuts `0..len` into ranges of `grain` (the last may be shorter) and runs `body` on each.
    pub fn for_ranges(&self, len: usize, grain: usize, body: impl Fn(Range<usize>) + Sync) {
        let grain = grain.max(1);
        self.for_each(len.div_ceil(grain), |task| body(task * grain..((task + 1) * grain).min(len)));
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(lent) = &self.lent {
            lent.leave(self.count());
        }
        {
            let mut state = lock(&self.shared.state);
            self.shared.stop.store(true, Ordering::Release);
            state.epoch += 1;
            self.shared.epoch.store(state.epoch, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    INSIDE_REGION.set(true);
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.load(Ordering::Acquire) == seen && spins < SPINS {
            std::hint::spin_loop();
            spins += 1;
        }
        let job = {
            let mut state = shared.state.lock().unwrap();
            while state.epoch == seen {
                state = shared.wake.wait(state).unwrap();
            }
            seen = state.epoch;
            state.job
        };
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        if let Some(Job(body)) = job {
            // SAFETY: `run` waits for `running` to reach zero before the body goes out of scope.
            let body = unsafe { &*body };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(index))) {
                shared.panic.lock().unwrap().get_or_insert(panic);
            }
        }
        shared.running.fetch_sub(1, Ordering::Release);
    }
}

/// A mutable slice that the tasks of one parallel region share, each writing its own part.
pub struct Shares<'a, T> {
    data: *mut T,
    len: usize,
    _slice: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `part`, whose contract is that parts handed out at once do not
// overlap.
unsafe impl<T: Send> Sync for Shares<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shares<'_, T> {}

impl<'a, T> Shares<'a, T> {
    /// Shares `slice` for as long as it is borrowed.
    pub fn new(slice: &'a mut [T]) -> Self {
        Shares { data: slice.as_mut_ptr(), len: slice.len(), _slice: PhantomData }
    }

    /// The elements of `range`, for writing.
    ///
    /// # Safety
    /// No two parts that live at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {} elements", self.len);
        // SAFETY: in bounds by the assertion; disjoint by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.end - range.start) }
    }

    /// The first element, for kernels that address a strided part.
    pub fn as_mut_ptr(&self) -> *mut T {
        self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_number_of_threads() {
        for count in 1..=4 {
            let threads = Threads::new(count);
            for tasks in [0, 1, 2, 7, 1000] {
                let mut hits = vec![0u32; tasks];
                let shares = Shares::new(&mut hits);
                // SAFETY: each task writes its own element.
                threads.for_each(tasks, |task| unsafe { shares.part(task..task + 1)[0] += 1 });
                assert!(hits.iter().all(|hit| *hit == 1));
            }
        }
    }

    #[test]
    fn a_nested_region_runs_on_the_calling_thread() {
        let threads = Threads::new(2);
        let sum = AtomicUsize::new(0);
        threads.for_each(4, |_| {
            threads.for_each(4, |task| {
                sum.fetch_add(task, Ordering::Relaxed);
            })
        });
        assert_eq!(sum.into_inner(), 24);
    }

    #[test]
    fn a_panic_in_a_worker_reaches_the_caller_and_the_pool_lives_on() {
        let threads = Threads::new(3);
        for _ in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| threads.run(|thread| assert!(thread != 2, "thread two"))));
            assert!(caught.is_err());
            threads.run(|_| ());
        }
    }
}
