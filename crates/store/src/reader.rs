//! An object as a stream, read in ranges ahead of the reader.

use std::collections::VecDeque;
use std::io::{self, Read};

use bytes::{Buf, Bytes};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::error::StoreError;
use crate::object::{Object, Request};
use crate::{fetch, requests};

/// Pieces of an answer without ranges that wait for the reader.
const PIECES: usize = 64;

/// Reads an object from its beginning to its end.
///
/// An error repeats: after the first, every reading fails with it.
pub struct ObjectReader {
    object: Object,
    current: Bytes,
    source: Source,
    failed: Option<StoreError>,
}

enum Source {
    /// Ranges in flight, in order, and the first byte that is not requested yet.
    Ranges { pending: VecDeque<Request>, next: u64 },
    /// The whole object by one request, from a server that knows no ranges.
    Whole { pieces: mpsc::Receiver<Result<Bytes, StoreError>>, task: AbortHandle, reached: u64 },
    /// No request yet.
    Closed,
}

impl ObjectReader {
    pub(crate) fn new(object: Object) -> Self {
        Self { object, current: Bytes::new(), source: Source::Closed, failed: None }
    }

    fn open(&self) -> Result<Source, StoreError> {
        if self.object.has_ranges() {
            return Ok(Source::Ranges { pending: VecDeque::new(), next: 0 });
        }
        let (send, pieces) = mpsc::channel(PIECES);
        let object = self.object.clone();
        let task = requests()?.spawn(async move { fetch::whole(&object, send).await });
        Ok(Source::Whole { pieces, task: task.abort_handle(), reached: 0 })
    }

    /// The next bytes; empty at the end.
    fn next_piece(&mut self) -> Result<Bytes, StoreError> {
        if matches!(self.source, Source::Closed) {
            self.source = self.open()?;
        }
        let bytes = self.object.bytes();
        let options = self.object.options();
        match &mut self.source {
            Source::Ranges { pending, next } => {
                while pending.len() < options.in_flight.max(1) && *next < bytes {
                    let end = (*next + options.block_bytes.max(1)).min(bytes);
                    pending.push_back(self.object.request(*next..end));
                    *next = end;
                }
                pending.pop_front().map_or(Ok(Bytes::new()), Request::wait)
            }
            Source::Whole { reached, .. } if *reached == bytes => Ok(Bytes::new()),
            Source::Whole { pieces, reached, .. } => {
                let stopped = || Err(StoreError::stopped(&self.object.0.name));
                let piece = pieces.blocking_recv().unwrap_or_else(stopped)?;
                *reached += piece.len() as u64;
                Ok(piece)
            }
            Source::Closed => Ok(Bytes::new()),
        }
    }
}

impl Read for ObjectReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if let Some(error) = &self.failed {
            return Err(error.clone().into());
        }
        if self.current.is_empty() && !out.is_empty() {
            self.current = self.next_piece().inspect_err(|error| self.failed = Some(error.clone()))?;
        }
        let count = out.len().min(self.current.len());
        self.current.copy_to_slice(&mut out[..count]);
        Ok(count)
    }
}

impl Drop for ObjectReader {
    fn drop(&mut self) {
        if let Source::Whole { task, .. } = &self.source {
            task.abort();
        }
    }
}
