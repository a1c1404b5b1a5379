//! Makes micro-batches ahead of time: worker threads fill bounded queues, and the consumer takes
//! the batches in order.
//!
//! A step of the whole job is a run of samples. It is cut into `world` x `accumulation_steps`
//! micro-batches, of which rank `r` takes the `r`-th group of `accumulation_steps`. The samples of
//! a step and their division into micro-batches are therefore the same whatever the number of
//! ranks. Making a batch of text means some microseconds of copying from mapped files, so one
//! worker is plenty and sleeps nearly always. It hides a disk that is slow now and then. Images are
//! decoded by the workers, which takes milliseconds each: they need as many workers as cores are
//! free.
//!
//! Where replicas make different numbers of steps in a round, the samples of a step are divided
//! among those that take part in it ([`Rounds`]).

mod rounds;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::dataset::{Dataset, MicroBatch, Position, SpanCorruption};
use crate::error::{DataError, Result};
use crate::images::ImageSet;

pub use rounds::{RoundSteps, Rounds};

/// The samples that a loader gives out.
#[derive(Debug, Clone)]
pub enum Samples {
    /// Rows of tokens.
    Text(Arc<Dataset>),
    /// Images of classes.
    Images(Arc<ImageSet>),
}

impl From<Arc<Dataset>> for Samples {
    fn from(dataset: Arc<Dataset>) -> Self {
        Self::Text(dataset)
    }
}

impl From<Arc<ImageSet>> for Samples {
    fn from(images: Arc<ImageSet>) -> Self {
        Self::Images(images)
    }
}

impl Samples {
    /// Samples `first..first + rows` as one micro-batch of `rows` rows.
    ///
    /// # Errors
    /// The data are damaged, or hold what the model has no number for.
    pub fn micro_batch(&self, first: u64, rows: usize) -> Result<MicroBatch> {
        match self {
            Self::Text(dataset) => dataset.micro_batch(first, rows),
            Self::Images(images) => images.micro_batch(first, rows),
        }
    }

    /// Positions of a row.
    pub fn sequence_length(&self) -> usize {
        match self {
            Self::Text(dataset) => dataset.spec().sequence_length,
            Self::Images(images) => images.spec().sequence_length(),
        }
    }

    /// The span corruption of texts, if they have it.
    pub fn span_corruption(&self) -> Option<SpanCorruption> {
        match self {
            Self::Text(dataset) => dataset.spec().transforms.span_corruption,
            Self::Images(_) => None,
        }
    }

    /// Samples until the data have been given out once.
    pub fn samples_per_epoch(&self) -> u64 {
        match self {
            Self::Text(dataset) => dataset.samples_per_epoch(),
            Self::Images(images) => images.samples_per_epoch(),
        }
    }

    /// The number of passes over the data at `position`, with fractions.
    pub fn passes(&self, position: Position) -> f64 {
        match self {
            Self::Text(dataset) => dataset.passes(position),
            Self::Images(images) => images.passes(position),
        }
    }

    /// Identifies the samples and their order: equal fingerprints mean equal samples.
    pub fn fingerprint(&self) -> String {
        match self {
            Self::Text(dataset) => dataset.fingerprint(),
            Self::Images(images) => images.fingerprint(),
        }
    }

    /// Asks the kernel to bring the data into memory in the background.
    pub fn warm(&self) {
        match self {
            Self::Text(dataset) => dataset.warm(),
            Self::Images(images) => images.index().warm(),
        }
    }

    /// Most numbers of four bytes of a row.
    fn elements_of_row(&self) -> usize {
        // Tokens, targets, positions, and in the worst case as many segment starts.
        let text = 4 * self.sequence_length();
        match self {
            Self::Text(_) => text,
            // The patches, and the second class with its weight.
            Self::Images(images) => text + images.spec().patches() * images.spec().patch_len() + 2,
        }
    }
}

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
    samples: Samples,
    config: LoaderConfig,
    rounds: Rounds,
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
    /// Starts at `position`, in constant time. All ranks take part in every step.
    pub fn new(samples: impl Into<Samples>, config: LoaderConfig, position: Position) -> Result<Self> {
        Self::in_rounds(samples, config, Rounds::of_one(), position)
    }

    /// As [`Loader::new`], for replicas that make different numbers of steps in a round. Replicas
    /// are neighbouring ranks, equally many each.
    pub fn in_rounds(
        samples: impl Into<Samples>,
        config: LoaderConfig,
        rounds: Rounds,
        position: Position,
    ) -> Result<Self> {
        let samples = samples.into();
        check(&samples, &config)?;
        rounds.check(&config)?;
        let mut loader = Self {
            samples,
            config,
            rounds,
            start: position,
            delivered: 0,
            waited: Duration::ZERO,
            has_failed: false,
            queues: Vec::with_capacity(config.workers),
            workers: Vec::with_capacity(config.workers),
        };
        for worker in 0..config.workers {
            let (queue, receiver) = sync_channel(config.prefetch.div_ceil(config.workers).max(1));
            let (samples, rounds) = (loader.samples.clone(), loader.rounds.clone());
            let first = move |k| position.samples + rounds.samples_before(&config, k);
            let work = move || fill(&samples, &config, first, worker as u64, &queue);
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
            0 => {
                let first = self.start.samples + self.rounds.samples_before(&self.config, self.delivered);
                self.samples.micro_batch(first, self.config.micro_batch_size)
            }
            workers => take(&self.queues[(self.delivered % workers) as usize]),
        };
        self.waited += begin.elapsed();
        match &batch {
            Ok(_) => self.delivered += 1,
            Err(_) => self.has_failed = true,
        }
        batch
    }

    /// The position at which a loader must start to continue after this one: the beginning of the
    /// next step in which this rank takes part. It is exact once every rank has taken its batches
    /// of all steps before.
    pub fn position(&self) -> Position {
        let taken = self.rounds.samples_before_step(&self.config, self.delivered);
        Position { samples: self.start.samples + taken }
    }

    /// The rounds that it began with.
    pub fn rounds(&self) -> &Rounds {
        &self.rounds
    }

    /// Total time that `next` has taken so far.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The samples behind it.
    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    /// The configuration.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// Maximum bytes of the batches that wait in the queues and of those that workers are making.
    pub fn prefetch_bytes(&self) -> usize {
        let per_worker = self.config.prefetch.div_ceil(self.config.workers.max(1)).max(1) + 1;
        let elements = self.config.micro_batch_size * self.samples.elements_of_row();
        self.config.workers * per_worker * elements * size_of::<i32>()
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

fn check(samples: &Samples, config: &LoaderConfig) -> Result<()> {
    let tokens = config.micro_batch_size.saturating_mul(samples.sequence_length());
    if !(1..=i32::MAX as usize).contains(&tokens) {
        let what = format!("{} rows of {} tokens", config.micro_batch_size, samples.sequence_length());
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

/// The loop of a worker, until an error, or until the loader is dropped. `first` is the first
/// sample of a micro-batch.
fn fill(
    samples: &Samples,
    config: &LoaderConfig,
    first: impl Fn(u64) -> u64,
    worker: u64,
    queue: &SyncSender<Result<MicroBatch>>,
) {
    let mut k = worker;
    loop {
        let batch = samples.micro_batch(first(k), config.micro_batch_size);
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
