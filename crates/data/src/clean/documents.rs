//! Runs work on the documents of a corpus: one thread reads, several work, and the caller's thread
//! takes the results in order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use trainyard_base::lock;

use crate::corpus::{Corpus, Document, Skipped};
use crate::error::{DataError, Result};

/// Bytes of text per job.
const JOB_BYTES: usize = 1 << 18;

/// Jobs in flight per worker.
const JOBS_PER_WORKER: usize = 4;

/// Some documents, and the destination of their results.
struct Job<R> {
    documents: Vec<Document>,
    reply: SyncSender<Vec<R>>,
}

/// Calls `work` for each document on `workers` threads, and `take` for each result in the order of
/// the corpus. Memory holds a few jobs of 256 KiB, or of one document, per worker.
pub(super) fn map<R: Send>(
    corpus: &Corpus,
    workers: usize,
    work: impl Fn(Document) -> R + Sync,
    mut take: impl FnMut(R) -> Result<()>,
) -> Result<Skipped> {
    let (jobs, queue) = sync_channel::<Job<R>>(workers * JOBS_PER_WORKER);
    let (replies, results) = sync_channel::<Receiver<Vec<R>>>(workers * JOBS_PER_WORKER);
    let queue = Mutex::new(queue);
    thread::scope(|scope| {
        // When this thread returns early, its receiver is dropped, and the reader notices.
        let results = results;
        let reader = scope.spawn(move || read(corpus, &jobs, &replies));
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let received = lock(&queue).recv();
                    let Ok(Job { documents, reply }) = received else { return };
                    // A panic must not end the thread: the missing reply tells the caller.
                    let done = AssertUnwindSafe(|| documents.into_iter().map(&work).collect());
                    if let Ok(done) = catch_unwind(done) {
                        let _ = reply.send(done);
                    }
                }
            });
        }
        for reply in &results {
            for result in reply.recv().map_err(|_| DataError::Worker { doing: "cleaning text" })? {
                take(result)?;
            }
        }
        drop(results);
        reader.join().map_err(|_| DataError::Worker { doing: "reading text" })?
    })
}

fn read<R>(corpus: &Corpus, jobs: &SyncSender<Job<R>>, replies: &SyncSender<Receiver<Vec<R>>>) -> Result<Skipped> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    let send = |documents: Vec<Document>| {
        let (reply, result) = sync_channel(1);
        replies.send(result).is_ok() && jobs.send(Job { documents, reply }).is_ok()
    };
    let mut documents = corpus.documents();
    for document in documents.by_ref() {
        let document = document?;
        bytes += document.text.len();
        batch.push(document);
        if bytes >= JOB_BYTES {
            bytes = 0;
            if !send(std::mem::take(&mut batch)) {
                break; // the caller has its own error to report
            }
        }
    }
    if !batch.is_empty() {
        send(batch);
    }
    Ok(documents.skipped())
}
