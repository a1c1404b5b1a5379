//! Runs work on the documents of a corpus, with results in the order of the corpus.

use crate::corpus::{Corpus, Document, Skipped};
use crate::error::Result;
use crate::ordered::{self, JOB_BYTES, Outlet};

/// Calls `work` for each document on `workers` threads, and `take` for each result in the order of
/// the corpus. Memory holds a few jobs of 256 KiB, or of one document, per worker.
pub(super) fn map<R: Send>(
    corpus: &Corpus,
    workers: usize,
    work: impl Fn(Document) -> R + Sync,
    mut take: impl FnMut(R) -> Result<()>,
) -> Result<Skipped> {
    let work = |documents: Vec<Document>| documents.into_iter().map(&work).collect::<Vec<R>>();
    let take = |results: Vec<R>| results.into_iter().try_for_each(&mut take);
    ordered::run(ordered::threads(workers), "cleaning text", |outlet| read(corpus, outlet), work, take)
}

fn read<R>(corpus: &Corpus, outlet: &Outlet<Vec<Document>, Vec<R>>) -> Result<Skipped> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    let mut documents = corpus.documents();
    for document in documents.by_ref() {
        let document = document?;
        bytes += document.text.len();
        batch.push(document);
        if bytes >= JOB_BYTES {
            bytes = 0;
            if !outlet.send(std::mem::take(&mut batch)) {
                break; // the caller has its own error to report
            }
        }
    }
    if !batch.is_empty() {
        outlet.send(batch);
    }
    Ok(documents.skipped())
}
