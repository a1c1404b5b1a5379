//! Asynchronous operations: a thread per communicator that runs what was started, in order.

use crate::error::Result;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

/// An operation under way that owns its buffers.
///
/// Dropping it lets the operation run to its end and its buffers go.
pub struct Pending<B> {
    result: Receiver<(B, Result<()>)>,
}

impl<B> Pending<B> {
    /// Waits for the end; the buffers come back when the operation succeeded.
    ///
    /// # Panics
    /// If the operation panicked.
    pub fn wait(self) -> Result<B> {
        let (buffers, result) = self.result.recv().expect("the operation did not panic");
        result.map(|()| buffers)
    }

    /// The result if the operation has ended, else itself to ask again.
    pub fn poll(self) -> std::result::Result<Result<B>, Self> {
        match self.result.try_recv() {
            Ok((buffers, result)) => Ok(result.map(|()| buffers)),
            Err(_) => Err(self),
        }
    }
}

/// The thread behind [`crate::Communicator::start`].
pub(crate) struct Worker {
    jobs: Option<Sender<Job>>,
    outstanding: Arc<(Mutex<usize>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

/// Counts a job as done, also when it panics.
struct Done(Arc<(Mutex<usize>, Condvar)>);

impl Drop for Done {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.1.notify_all();
    }
}

impl Worker {
    pub fn new() -> Self {
        let (jobs, queue) = channel::<Job>();
        let run = move || queue.into_iter().for_each(|job| job());
        let thread = std::thread::Builder::new().name("comm".to_owned()).spawn(run).expect("threads can be started");
        Self { jobs: Some(jobs), outstanding: Arc::default(), thread: Some(thread) }
    }

    pub fn submit<B: Send + 'static>(
        &self,
        mut buffers: B,
        operation: impl FnOnce(&mut B) -> Result<()> + Send + 'static,
    ) -> Pending<B> {
        let (sender, result) = channel();
        *self.outstanding.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let done = Done(self.outstanding.clone());
        let job = Box::new(move || {
            let outcome = operation(&mut buffers);
            // Nobody may be waiting any more.
            let _ = sender.send((buffers, outcome));
            drop(done);
        });
        self.jobs.as_ref().expect("there until dropped").send(job).expect("the worker runs as long as its queue");
        Pending { result }
    }

    /// Waits until everything submitted has ended.
    pub fn drain(&self) {
        let mut outstanding = self.outstanding.0.lock().unwrap_or_else(PoisonError::into_inner);
        while *outstanding > 0 {
            outstanding = self.outstanding.1.wait(outstanding).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A panic of a job was already told to whoever waited for it.
            let _ = thread.join();
        }
    }
}
