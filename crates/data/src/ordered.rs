//! Work on several threads with results in order: one thread reads, several work, and the caller's
//! thread takes the results.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use trainyard_base::lock;

use crate::error::{DataError, Result};

/// Bytes of text per job: large enough that handing it over costs nothing, small enough that
/// workers end together.
pub(crate) const JOB_BYTES: usize = 1 << 18;

/// Jobs in flight per worker.
const JOBS_PER_WORKER: usize = 4;

/// The reader's side: the queues of jobs and of the reply channels for their results.
pub(crate) struct Outlet<J, R> {
    jobs: SyncSender<(J, SyncSender<R>)>,
    replies: SyncSender<Receiver<R>>,
}

impl<J, R> Outlet<J, R> {
    /// Hands `job` to the workers; `false` if the caller has returned.
    pub(crate) fn send(&self, job: J) -> bool {
        let (reply, result) = sync_channel(1);
        self.replies.send(result).is_ok() && self.jobs.send((job, reply)).is_ok()
    }
}

/// Calls `work` on `workers` threads for each job that `read` sends, and `take` for each result in
/// the order of the jobs. Returns the value of `read`.
///
/// # Errors
/// The error of `read` or of `take`, or [`DataError::Worker`] with `doing` if `work` panicked.
pub(crate) fn run<J: Send, R: Send, T: Send>(
    workers: usize,
    doing: &'static str,
    read: impl FnOnce(&Outlet<J, R>) -> Result<T> + Send,
    work: impl Fn(J) -> R + Sync,
    mut take: impl FnMut(R) -> Result<()>,
) -> Result<T> {
    // Results are ordered by the queue of their reply channels, whichever worker fills them. The
    // bound of the queue limits memory. When this thread returns early, its receivers are dropped,
    // and every other thread notices.
    let (jobs, queue) = sync_channel(workers * JOBS_PER_WORKER);
    let (replies, results) = sync_channel(workers * JOBS_PER_WORKER);
    let queue = Mutex::new(queue);
    thread::scope(|scope| {
        let results: Receiver<Receiver<R>> = results;
        let reader = scope.spawn(move || read(&Outlet { jobs, replies }));
        for _ in 0..workers {
            scope.spawn(|| serve(&queue, &work));
        }
        for reply in &results {
            take(reply.recv().map_err(|_| DataError::Worker { doing })?)?;
        }
        drop(results);
        reader.join().map_err(|_| DataError::Worker { doing: "reading text" })?
    })
}

/// The loop of a worker, until the reader ends.
fn serve<J, R>(queue: &Mutex<Receiver<(J, SyncSender<R>)>>, work: &impl Fn(J) -> R) {
    loop {
        let received = lock(queue).recv();
        let Ok((job, reply)) = received else { return };
        // A panic must not end the thread: if no worker were left, the reader would wait for ever.
        // The missing reply tells the caller. A reply that has no receiver is dropped, and jobs are
        // drained until the reader ends.
        if let Ok(result) = catch_unwind(AssertUnwindSafe(|| work(job))) {
            let _ = reply.send(result);
        }
    }
}

/// Number of threads for a setting, where 0 stands for one per core.
pub(crate) fn threads(workers: usize) -> usize {
    match workers {
        0 => thread::available_parallelism().map_or(1, |n| n.get()),
        n => n,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(read: impl Fn(&Outlet<u64, u64>) -> Result<u64> + Send, work: impl Fn(u64) -> u64 + Sync) -> Result<u64> {
        let mut taken = 0;
        run(3, "adding", read, work, |result| {
            assert!(result > taken, "in order");
            taken = result;
            if result > 900 { Err(DataError::Stopped) } else { Ok(()) }
        })
    }

    #[test]
    fn results_come_in_order_and_errors_end_all_threads() {
        let to = |end: u64| {
            move |outlet: &Outlet<u64, u64>| Ok((1..=end).take_while(|job| outlet.send(*job)).count() as u64)
        };
        assert_eq!(sum(to(500), |job| job).unwrap(), 500);
        assert!(matches!(sum(to(1_000_000), |job| job), Err(DataError::Stopped)));
        let panics = |job| if job == 77 { std::panic::resume_unwind(Box::new(())) } else { job };
        assert!(matches!(sum(to(1_000_000), panics), Err(DataError::Worker { doing: "adding" })));
        assert!(matches!(sum(|_| Err(DataError::Stopped), |job| job), Err(DataError::Stopped)));
    }
}
