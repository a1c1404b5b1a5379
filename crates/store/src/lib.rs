//! Objects of S3, Google Cloud Storage, Azure Blob Storage and HTTP servers, read as if they were
//! files.
//!
//! An [`Object`] is found by its URL ([`Store::find`]), which may be a pattern. Its bytes are read
//! in ranges, several of which are in flight ahead of the reader ([`ObjectReader`]), or range by
//! range ([`Object::range`]). Memory holds `block_bytes * in_flight` of an object at most, and
//! nothing is unpacked to disk.
//!
//! Each range is verified against the length and the validator (ETag, or the time of change) that
//! the object had when it was found. A range that breaks off goes on at the byte that was reached.
//! Refusals of the server, such as 403, end at once.
//!
//! All requests run on one background thread. No caller sees a future.
//!
//! This crate never writes to a store, and it knows no file formats. Its [`Cache`] on disk serves
//! other slow work too.

mod address;
mod cache;
mod client;
mod error;
mod fetch;
mod find;
mod object;
mod profile;
mod reader;
mod remote;

pub use address::is_url;
pub use cache::{CACHE_BYTES, Cache, CacheOptions, Full, Kind};
pub use error::StoreError;
pub use object::{Object, Request};
pub use reader::ObjectReader;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use object_store::ObjectStore;
use tokio::runtime::{Builder, Handle};

use client::Client;

/// Ranges of objects that were read before.
const RANGES: Kind = Kind { what: "objects", extension: "range", full: Full::Evicts };

/// The way in which objects are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// The cache of the ranges that were read; None to read from the network each time.
    pub cache: Option<CacheOptions>,
    /// Bytes of one range of a stream.
    pub block_bytes: u64,
    /// Ranges of a stream that are requested ahead of the reader.
    pub in_flight: usize,
    /// Failed requests in a row, without a byte of progress, that end a reading.
    pub attempts: u32,
    /// Pause after the first failure. It doubles with each further one, up to 20 seconds.
    pub backoff: Duration,
    /// A request that gives nothing for this long has failed.
    pub inactivity: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            cache: None,
            block_bytes: 8 << 20,
            in_flight: 4,
            attempts: 6,
            backoff: Duration::from_millis(200),
            inactivity: Duration::from_secs(30),
        }
    }
}

/// Numbers of what was read so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests sent, listings included.
    pub requests: u64,
    /// Bytes of objects that came over the network, those of broken answers included.
    pub network_bytes: u64,
    /// Bytes of objects that came from the cache.
    pub cache_bytes: u64,
    /// Requests that were repeated after a fault.
    pub retries: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.network_bytes += other.network_bytes;
        self.cache_bytes += other.cache_bytes;
        self.retries += other.retries;
    }
}

/// The counters behind [`Traffic`].
#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    network_bytes: AtomicU64,
    cache_bytes: AtomicU64,
    retries: AtomicU64,
}

impl Counters {
    fn add(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// Reads objects. Clones share their connections, their cache and their counters.
#[derive(Debug, Clone)]
pub struct Store(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    options: StoreOptions,
    cache: Option<Cache>,
    client: Client,
    /// A client of `object_store` for each bucket.
    buckets: Mutex<HashMap<String, Arc<dyn ObjectStore>>>,
    traffic: Arc<Counters>,
}

impl Store {
    /// Makes a store. No request is sent before the first [`Store::find`].
    ///
    /// # Errors
    /// The folder of the cache cannot be made, or the thread for requests cannot be started.
    pub fn new(options: StoreOptions) -> Result<Self, StoreError> {
        requests()?;
        let cache = |cache: &CacheOptions| {
            Cache::open(cache, RANGES).map_err(|error| {
                let what = format!("cannot be used as a cache of {} ({error})", RANGES.what);
                StoreError::new(cache.folder.display().to_string(), what, "choose another folder")
            })
        };
        let cache = options.cache.as_ref().map(cache).transpose()?;
        let traffic = Arc::new(Counters::default());
        let client = Client::new(traffic.clone());
        Ok(Self(Arc::new(Shared { options, cache, client, buckets: Mutex::default(), traffic })))
    }

    /// The way in which it reads.
    pub fn options(&self) -> &StoreOptions {
        &self.0.options
    }

    /// Requests, bytes and retries so far.
    pub fn traffic(&self) -> Traffic {
        let Counters { requests, network_bytes, cache_bytes, retries } = &*self.0.traffic;
        let [requests, network_bytes, cache_bytes, retries] =
            [requests, network_bytes, cache_bytes, retries].map(|counter| counter.load(Ordering::Relaxed));
        Traffic { requests, network_bytes, cache_bytes, retries }
    }
}

/// The runtime on the thread for requests, which lives as long as the process.
fn requests() -> Result<Handle, StoreError> {
    static HANDLE: OnceLock<Result<Handle, String>> = OnceLock::new();
    let handle = HANDLE.get_or_init(|| {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())?;
        let handle = runtime.handle().clone();
        let run = move || runtime.block_on(std::future::pending::<()>());
        std::thread::Builder::new().name("objects".into()).spawn(run).map_err(|error| error.to_string())?;
        Ok(handle)
    });
    handle.clone().map_err(|reason| {
        StoreError::new(
            "object stores",
            format!("the thread for requests cannot be started ({reason})"),
            "free some memory or threads",
        )
    })
}

/// Waits for `work`, which runs on the thread for requests.
fn wait<T: Send + 'static>(
    name: &str,
    work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    let (send, receive) = std::sync::mpsc::channel();
    requests()?.spawn(async move { drop(send.send(work.await)) });
    receive.recv().unwrap_or_else(|_| Err(StoreError::stopped(name)))
}
