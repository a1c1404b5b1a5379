//! One object, as it was when it was found.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use bytes::Bytes;
use tokio::task::AbortHandle;

use crate::address::Scheme;
use crate::error::StoreError;
use crate::reader::ObjectReader;
use crate::remote::Remote;
use crate::{Store, fetch, requests};

/// An object of a store. Clones are cheap.
#[derive(Clone)]
pub struct Object(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) store: Store,
    pub(crate) remote: Remote,
    pub(crate) scheme: Scheme,
    pub(crate) name: String,
    pub(crate) about: About,
}

/// The properties by which an object is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) bytes: u64,
    pub(crate) etag: Option<String>,
    /// Time of the last change in the server's own words, for servers without ETags.
    pub(crate) modified: Option<String>,
    pub(crate) modified_ns: u64,
    /// True if parts of it can be asked for.
    pub(crate) has_ranges: bool,
}

impl About {
    /// The value that changes whenever the object does; None if the server gives none.
    pub(crate) fn validator(&self) -> Option<&str> {
        self.etag.as_deref().or(self.modified.as_deref())
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object").field("name", &self.0.name).field("about", &self.0.about).finish_non_exhaustive()
    }
}

impl PartialEq for Object {
    fn eq(&self, other: &Self) -> bool {
        (&self.0.name, &self.0.about) == (&other.0.name, &other.0.about)
    }
}

impl Eq for Object {}

impl Object {
    /// Its URL, without a query, which may hold a signature.
    pub fn name(&self) -> &Path {
        Path::new(&self.0.name)
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.0.about.bytes
    }

    /// Last modification, nanoseconds since 1970; 0 if the server does not say.
    pub fn modified_ns(&self) -> u64 {
        self.0.about.modified_ns
    }

    /// The value that changes whenever its content does: its ETag, or else the time of its change;
    /// None if the server gives neither.
    pub fn validator(&self) -> Option<&str> {
        self.0.about.validator()
    }

    /// True if parts of it can be read without what lies before them.
    pub fn has_ranges(&self) -> bool {
        self.0.about.has_ranges
    }

    /// The way in which it is read.
    pub fn options(&self) -> &crate::StoreOptions {
        self.0.store.options()
    }

    /// Reads it from the beginning.
    pub fn read(&self) -> ObjectReader {
        ObjectReader::new(self.clone())
    }

    /// The bytes of `range`, which must lie inside it.
    ///
    /// # Errors
    /// The server refuses, the object changed, or requests fail again and again.
    pub fn range(&self, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.request(range).wait()
    }

    /// Begins to fetch the bytes of `range`, which must lie inside it.
    pub fn request(&self, range: Range<u64>) -> Request {
        assert!(range.start <= range.end && range.end <= self.bytes(), "{range:?} lies outside the object");
        let (send, answer) = channel();
        let object = self.clone();
        let task = match requests() {
            Ok(handle) => {
                let task = handle.spawn(async move { drop(send.send(fetch::range(&object, range).await)) });
                Some(task.abort_handle())
            }
            Err(error) => {
                drop(send.send(Err(error)));
                None
            }
        };
        Request { name: self.0.name.clone(), answer, task }
    }
}

/// A range on its way. Dropping it ends its request.
#[derive(Debug)]
pub struct Request {
    name: String,
    answer: Receiver<Result<Bytes, StoreError>>,
    task: Option<AbortHandle>,
}

impl Request {
    /// Waits for the bytes.
    ///
    /// # Errors
    /// As [`Object::range`].
    pub fn wait(self) -> Result<Bytes, StoreError> {
        self.answer.recv().unwrap_or_else(|_| Err(StoreError::stopped(&self.name)))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}
