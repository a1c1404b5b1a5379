//! Writes checkpoints beside the training: one thread, one snapshot at a time.
//!
//! The snapshot is a copy, so training goes on while it is written. A second snapshot waits until
//! the first is on disk (back-pressure), so at most one copy exists beside the one being made. The
//! next call, whichever it is, returns the errors of earlier ones.

use super::fault::Disk;
use super::group::Group;
use super::store::{CheckpointStore, hidden};
use super::write::{Sizes, Written};
use super::{CheckpointError, Snapshot};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use trainyard_comm::Communicator;

/// An act of the writer.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A checkpoint is on disk.
    Written(Written),
    /// An evaluation is the best so far; its checkpoint will be kept.
    Best {
        /// Completed steps at the evaluation.
        step: u64,
        /// Loss of the evaluation.
        loss: f64,
    },
}

enum Job {
    Write(Box<Snapshot<'static>>),
    Evaluated { step: u64, loss: f64 },
}

type Outcome = Result<Option<Event>, CheckpointError>;

/// A thread that writes checkpoints.
#[derive(Debug)]
pub struct BackgroundWriter {
    /// `None` once the thread is to end.
    jobs: Option<Sender<Job>>,
    outcomes: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
    /// Jobs without an outcome.
    pending: usize,
    events: Vec<Event>,
    error: Option<CheckpointError>,
}

/// The part of a checkpoint that a rank writes.
enum Role {
    /// Rank 0: its own files, and the commit.
    First { store: CheckpointStore, group: Option<Group> },
    /// Another rank: its own files in `RUN/checkpoints`.
    Other { folder: PathBuf, group: Group, disk: Disk },
}

impl Role {
    fn write(&mut self, snapshot: &Snapshot<'_>) -> Result<Option<Event>, CheckpointError> {
        match self {
            Role::First { store, group } => {
                store.write_with(snapshot, group.as_ref()).map(|written| Some(Event::Written(written)))
            }
            Role::Other { folder, group, disk } => {
                let folder = hidden(folder, snapshot.step, "tmp");
                group.write_own(disk, &folder, snapshot, Sizes::default()).map(|()| None)
            }
        }
    }

    fn evaluated(&mut self, step: u64, loss: f64) -> Result<Option<Event>, CheckpointError> {
        let Role::First { store, .. } = self else { return Ok(None) };
        store.record_evaluation(step, loss).map(|best| best.then_some(Event::Best { step, loss }))
    }
}

impl BackgroundWriter {
    /// Takes over the store of a rank that writes alone.
    pub fn new(store: CheckpointStore) -> Result<BackgroundWriter, CheckpointError> {
        let folder = store.folder().to_owned();
        BackgroundWriter::start(Role::First { store, group: None }, folder)
    }

    /// Writes one rank's part of each checkpoint of `run`. Only rank 0 has a `store`. The
    /// communicator `ranks` is used by this writer alone, and all its ranks submit the same steps.
    pub fn with_others(
        run: &Path,
        store: Option<CheckpointStore>,
        ranks: Communicator,
    ) -> Result<BackgroundWriter, CheckpointError> {
        BackgroundWriter::with_others_on(run, store, ranks, Disk::default())
    }

    /// As [`BackgroundWriter::with_others`]; a rank without a store writes by `disk`.
    pub(super) fn with_others_on(
        run: &Path,
        store: Option<CheckpointStore>,
        ranks: Communicator,
        disk: Disk,
    ) -> Result<BackgroundWriter, CheckpointError> {
        let folder = run.join("checkpoints");
        let group = Group::new(ranks);
        let role = match store {
            Some(store) => Role::First { store, group: Some(group) },
            None => Role::Other { folder: folder.clone(), group, disk },
        };
        BackgroundWriter::start(role, folder)
    }

    fn start(mut role: Role, folder: PathBuf) -> Result<BackgroundWriter, CheckpointError> {
        let (jobs, todo) = channel::<Job>();
        let (done, outcomes) = channel();
        let work = move || {
            for job in todo {
                let outcome = match job {
                    Job::Write(snapshot) => role.write(&snapshot),
                    Job::Evaluated { step, loss } => role.evaluated(step, loss),
                };
                if done.send(outcome).is_err() {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(work);
        let thread = thread.map_err(CheckpointError::io("start a thread that writes to", &folder))?;
        Ok(BackgroundWriter {
            jobs: Some(jobs),
            outcomes,
            thread: Some(thread),
            pending: 0,
            events: Vec::new(),
            error: None,
        })
    }

    /// Hands over a snapshot, after waiting for the previous one. This happens even if the previous
    /// one failed.
    ///
    /// # Errors
    ///
    /// The error of the previous snapshot.
    pub fn submit(&mut self, snapshot: Snapshot<'static>) -> Result<Vec<Event>, CheckpointError> {
        self.wait();
        self.send(Job::Write(Box::new(snapshot)));
        self.take()
    }

    /// Waits until the submitted snapshot is on disk.
    pub fn wait_for_it(&mut self) -> Result<Vec<Event>, CheckpointError> {
        self.wait();
        self.take()
    }

    /// Records an evaluation of the snapshot that was submitted at `step`.
    pub fn evaluated(&mut self, step: u64, loss: f64) -> Result<Vec<Event>, CheckpointError> {
        self.send(Job::Evaluated { step, loss });
        self.poll()
    }

    /// Returns the events since the last call, without waiting.
    pub fn poll(&mut self) -> Result<Vec<Event>, CheckpointError> {
        while self.pending > 0
            && let Ok(outcome) = self.outcomes.try_recv()
        {
            self.note(outcome);
        }
        self.take()
    }

    /// Waits until everything is on disk.
    pub fn finish(mut self) -> Result<Vec<Event>, CheckpointError> {
        self.wait();
        self.join();
        self.take()
    }

    fn send(&mut self, job: Job) {
        match self.jobs.as_ref().map(|jobs| jobs.send(job)) {
            Some(Ok(())) => self.pending += 1,
            _ => self.error = self.error.take().or(Some(CheckpointError::WriterGone)),
        }
    }

    fn wait(&mut self) {
        while self.pending > 0 {
            match self.outcomes.recv() {
                Ok(outcome) => self.note(outcome),
                Err(_) => {
                    self.pending = 0;
                    self.error = self.error.take().or(Some(CheckpointError::WriterGone));
                }
            }
        }
    }

    fn note(&mut self, outcome: Outcome) {
        self.pending -= 1;
        match outcome {
            Ok(event) => self.events.extend(event),
            // The first error is the cause of later ones.
            Err(error) => self.error = self.error.take().or(Some(error)),
        }
    }

    fn take(&mut self) -> Result<Vec<Event>, CheckpointError> {
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(std::mem::take(&mut self.events)),
        }
    }

    fn join(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.error = self.error.take().or(Some(CheckpointError::WriterGone));
        }
    }
}

impl Drop for BackgroundWriter {
    /// Waits, so that a checkpoint that was begun is finished. An error can no longer be returned,
    /// so it is logged.
    fn drop(&mut self) {
        self.wait();
        self.join();
        if let Some(error) = self.error.take() {
            tracing::error!(%error, "a checkpoint could not be written");
        }
    }
}
