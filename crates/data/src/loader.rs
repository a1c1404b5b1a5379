//! Makes micro-batches ahead of time: worker threads fill bounded queues, and the consumer takes
//! the batches in order.
//!
//! A step of the whole job is a run of samples. It is cut into `world` x `accumulation_steps`
//! micro-batches, of which rank `r` takes the `r`-th group of `accumulation_steps`. The samples of
//! a step and their division into micro-batches are therefore the same whatever the number of
//! ranks. Making a batch means some microseconds of copying from mapped files, so one worker is
//! plenty and sleeps nearly always. It hides a disk that is slow now and then.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::dataset::{Dataset, MicroBatch, Position};
use crate::error::{DataError, Result};

/// The way in which a rank reads a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Number of rows of a micro-batch.
    pub micro_batch_size: usize,
    /// Number of threads. With 0 a batch is made when it is asked for.
    pub workers: usize,
    /// Number of batches made ahead, in all.
    pub prefetch: usize,
    /// Number of micro-batches of a rank in one step.
    pub accumulation_steps: usize,
    /// This rank.
    pub rank: usize,
    /// Number of ranks that read different samples.
    pub world: usize,
}

impl LoaderConfig {
    /// One worker, four batches ahead, one rank.
    pub fn new(micro_batch_size: usize) -> Self {
        Self { micro_batch_size, workers: 1, prefetch: 4, accumulation_steps: 1, rank: 0, world: 1 }
    }
}

/// An endless sequence of micro-batches from a position on.
#[derive(Debug)]
pub struct Loader {
    dataset: Arc<Dataset>,
    config: LoaderConfig,
    start: Position,
    /// Number of micro-batches delivered.
    delivered: u64,
    waited: Duration,
    has_failed: bool,
    /// Queue of each worker. Worker `w` makes the batches `w`, `w` + workers, …
    queues: Vec<Receiver<Result<MicroBatch>>>,
    workers: Vec<JoinHandle<()>>,
}

impl Loader {
    /// Starts at `position`, in constant time.
    pub fn new(dataset: Arc<Dataset>, config: LoaderConfig, position: Position) -> Result<Self> {
        check(&dataset, &config)?;
        let mut loader = Self {
            dataset,
            config,
            start: position,
            delivered: 0,
            waited: Duration::ZERO,
            has_failed: false,
            queues: Vec::with_capacity(config.workers),
            workers: Vec::with_capacity(config.workers),
        };
        for worker in 0..config.workers {
            let (queue, receiver) = sync_channel(config.prefetch.div_ceil(config.workers).max(1));
            let dataset = Arc::clone(&loader.dataset);
            let work = move || fill(&dataset, &config, position, worker as u64, &queue);
            let spawned = thread::Builder::new().name(format!("data-{}-{worker}", config.rank)).spawn(work);
            loader.workers.push(spawned.map_err(|e| {
                DataError::setting("workers", format!("thread {worker} could not start ({e})"), "use fewer workers")
            })?);
            loader.queues.push(receiver);
        }
        Ok(loader)
    }

    /// Returns the next micro-batch of this rank. An error is returned once, in its place in the
    /// order; afterwards the loader returns [`DataError::Stopped`].
    #[expect(clippy::should_implement_trait, reason = "endless and fallible: `?` reads better than `transpose`")]
    pub fn next(&mut self) -> Result<MicroBatch> {
        if self.has_failed {
            return Err(DataError::Stopped);
        }
        let begin = Instant::now();
        let batch = match self.config.workers as u64 {
            0 => make(&self.dataset, &self.config, self.start, self.delivered),
            workers => take(&self.queues[(self.delivered % workers) as usize]),
        };
        self.waited += begin.elapsed();
        match &batch {
            Ok(_) => self.delivered += 1,
            Err(_) => self.has_failed = true,
        }
        batch
    }

    /// The position at which a loader must start to continue after this one. It is exact once every
    /// rank has taken equally many batches, as at the end of a step.
    pub fn position(&self) -> Position {
        Position {
            samples: self.start.samples + self.delivered * (self.config.micro_batch_size * self.config.world) as u64,
        }
    }

    /// Total time that `next` has taken so far.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The dataset behind it.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// The configuration.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// Maximum bytes of the batches that wait in the queues and of those that workers are making.
    pub fn prefetch_bytes(&self) -> usize {
        let per_worker = self.config.prefetch.div_ceil(self.config.workers.max(1)).max(1) + 1;
        let tokens = self.config.micro_batch_size * self.dataset.spec().sequence_length;
        // Tokens, targets, positions, and in the worst case as many segment starts.
        self.config.workers * per_worker * tokens * 4 * size_of::<i32>()
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // A worker that waits for room in its queue notices that the receiver is gone.
        self.queues.clear();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn check(dataset: &Dataset, config: &LoaderConfig) -> Result<()> {
    let tokens = config.micro_batch_size.saturating_mul(dataset.spec().sequence_length);
    if !(1..=i32::MAX as usize).contains(&tokens) {
        let what = format!("{} rows of {} tokens", config.micro_batch_size, dataset.spec().sequence_length);
        return Err(DataError::setting("micro_batch_size", what, "take at least 1 row and at most 2^31 - 1 tokens"));
    }
    if config.accumulation_steps == 0 {
        return Err(DataError::setting("accumulation_steps", "is 0".to_owned(), "a step has at least 1 micro-batch"));
    }
    if config.rank >= config.world {
        let what = format!("is {} of {}", config.rank, config.world);
        return Err(DataError::setting("rank", what, "ranks count from 0 to world - 1"));
    }
    if config.workers > 256 || config.prefetch > 1 << 16 {
        let what = format!("{} workers, {} batches ahead", config.workers, config.prefetch);
        return Err(DataError::setting(
            "workers",
            what,
            "take at most 256 workers and 65,536 batches; 1 and 4 are plenty",
        ));
    }
    Ok(())
}

/// Micro-batch number `k` of this rank.
fn make(dataset: &Dataset, config: &LoaderConfig, start: Position, k: u64) -> Result<MicroBatch> {
    let (step, place) = (k / config.accumulation_steps as u64, k % config.accumulation_steps as u64);
    let group = (step * config.world as u64 + config.rank as u64) * config.accumulation_steps as u64 + place;
    dataset.micro_batch(start.samples + group * config.micro_batch_size as u64, config.micro_batch_size)
}

/// The loop of a worker, until an error, or until the loader is dropped.
fn fill(
    dataset: &Dataset,
    config: &LoaderConfig,
    start: Position,
    worker: u64,
    queue: &SyncSender<Result<MicroBatch>>,
) {
    let mut k = worker;
    loop {
        let batch = make(dataset, config, start, k);
        let is_last = batch.is_err();
        if queue.send(batch).is_err() || is_last {
            return;
        }
        k += config.workers as u64;
    }
}

/// Takes a worker's next batch. A worker that ended without an error has panicked.
fn take(queue: &Receiver<Result<MicroBatch>>) -> Result<MicroBatch> {
    match queue.try_recv() {
        Ok(batch) => batch,
        Err(TryRecvError::Empty) => queue.recv().unwrap_or(Err(DataError::Worker { doing: "making batches" })),
        Err(TryRecvError::Disconnected) => Err(DataError::Worker { doing: "making batches" }),
    }
}

#[cfg(test)]
mod tests;
