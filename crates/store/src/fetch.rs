//! Fetches ranges: repeats what fails, goes on at the byte that was reached, and verifies.

use std::cell::RefCell;
use std::error::Error;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use hyper::StatusCode;
use tokio::sync::mpsc::Sender;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use crate::address::Scheme;
use crate::client::{SEEN, Seen};
use crate::error::StoreError;
use crate::object::Object;
use crate::remote::{advice, ask};
use crate::{Counters, Store, StoreOptions};

/// Longest pause between two attempts, unless a server asks for a longer one.
const PAUSE_MAX: Duration = Duration::from_secs(20);

/// A pause of this length is announced.
const PAUSE_TOLD: Duration = Duration::from_secs(3);

/// Requests for one range, however much progress each makes.
const REQUESTS_MAX: u32 = 1000;

/// The fault of one attempt.
#[derive(Debug)]
pub(crate) enum Fault {
    /// May be gone the next time.
    Passing { what: String, after: Option<Duration> },
    /// Will be the same the next time.
    Fatal(StoreError),
}

impl Fault {
    pub(crate) fn passing(what: String) -> Self {
        Fault::Passing { what, after: None }
    }
}

/// The fault of an object that is not what it was when it was found.
pub(crate) fn changed(name: &str) -> Fault {
    let fix = "run the command again when nothing writes to it any more";
    Fault::Fatal(StoreError::new(name, "changed while it was read", fix))
}

/// The innermost reason of an error. Outer ones repeat URLs.
pub(crate) fn deepest(error: &(dyn Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// The fault that an answer with `status` is. `code` is the store's own word for it.
pub(crate) fn refusal(name: &str, scheme: Scheme, status: StatusCode, code: &str) -> Fault {
    let after = SEEN.try_with(|seen| seen.borrow().retry_after).ok().flatten();
    let code = if code.is_empty() { String::new() } else { format!(", {code}") };
    let what = format!("the server answers {status}{code}");
    if status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429) {
        return Fault::Passing { what, after };
    }
    let fix = match status.as_u16() {
        401 | 403 => advice(scheme).into(),
        404 | 410 if scheme == Scheme::S3 => {
            "check the bucket and the name; AWS_ENDPOINT_URL names another service than AWS".into()
        }
        404 | 410 => "check the URL".into(),
        412 => return changed(name),
        416 => "the object became shorter: run the command again when nothing writes to it any more".into(),
        _ if scheme == Scheme::S3 => {
            format!("check AWS_REGION, the region of the bucket, and AWS_ENDPOINT_URL; {}", advice(scheme))
        }
        _ => format!("check the URL; {}", advice(scheme)),
    };
    Fault::Fatal(StoreError::new(name, what, fix))
}

/// The fault that an error of `object_store` is.
pub(crate) fn store_fault(name: &str, scheme: Scheme, error: &object_store::Error) -> Fault {
    let seen: Seen = SEEN.try_with(|seen| seen.borrow().clone()).unwrap_or_default();
    if seen.plain_refused {
        let variable = match scheme {
            Scheme::Gcs => "GOOGLE_ALLOW_HTTP",
            Scheme::Azure => "AZURE_ALLOW_HTTP",
            Scheme::S3 | Scheme::Http => "AWS_ALLOW_HTTP",
        };
        let fix = format!("give an endpoint with https://, or set {variable}=true");
        return Fault::Fatal(StoreError::new(name, "the endpoint is plain HTTP, without encryption", fix));
    }
    if seen.no_credentials {
        return Fault::Fatal(StoreError::new(name, "no credentials were found", advice(scheme)));
    }
    let reason = deepest(error);
    match (error, seen.status) {
        (object_store::Error::Precondition { .. }, _) => changed(name),
        (_, Some(status)) if !status.is_success() => {
            // The body is XML: <Code>NoSuchBucket</Code>.
            let code = reason.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
            refusal(name, scheme, status, code.map_or("", |(code, _)| code))
        }
        (object_store::Error::NotFound { .. }, None) => refusal(name, scheme, StatusCode::NOT_FOUND, ""),
        _ => Fault::passing(reason),
    }
}

/// Attempts that failed so far.
struct Failures<'o> {
    options: &'o StoreOptions,
    /// Those since the last progress.
    in_a_row: u32,
    all: u32,
}

impl<'o> Failures<'o> {
    fn new(options: &'o StoreOptions) -> Self {
        Self { options, in_a_row: 0, all: 0 }
    }

    /// Waits before the next attempt, or gives the error that ends all.
    async fn pause(&mut self, store: &Store, name: &str, fault: Fault, has_progress: bool) -> Result<(), StoreError> {
        let (what, after) = match fault {
            Fault::Fatal(error) => return Err(error),
            Fault::Passing { what, after } => (what, after),
        };
        self.in_a_row = if has_progress { 1 } else { self.in_a_row + 1 };
        self.all += 1;
        if self.in_a_row >= self.options.attempts || self.all >= REQUESTS_MAX {
            let what = format!("cannot be read after {} requests ({what})", self.all);
            let fix = "check the network and the service, and run the command again";
            return Err(StoreError::new(name, what, fix));
        }
        Counters::add(&store.0.traffic.retries, 1);
        let doubled = self.options.backoff.saturating_mul(1 << (self.in_a_row - 1).min(20)).min(PAUSE_MAX);
        let pause = after.map_or(doubled, |after| after.max(doubled));
        if pause >= PAUSE_TOLD {
            tracing::warn!("{name}: {what}; asking again in {} s", pause.as_secs());
        }
        sleep(pause).await;
        Ok(())
    }
}

/// Repeats `work` until it is done or refused. An attempt that takes longer than `limit` failed.
pub(crate) async fn repeated<T>(
    store: &Store,
    name: &str,
    limit: Duration,
    mut work: impl FnMut() -> BoxFuture<'static, Result<T, Fault>>,
) -> Result<T, StoreError> {
    let mut failures = Failures::new(store.options());
    loop {
        let done = SEEN.scope(RefCell::default(), timeout(limit, work())).await;
        match done.unwrap_or_else(|_| Err(silent(limit))) {
            Ok(value) => return Ok(value),
            Err(fault) => failures.pause(store, name, fault, false).await?,
        }
    }
}

fn silent(limit: Duration) -> Fault {
    Fault::passing(format!("nothing came for {} s", limit.as_secs_f64()))
}

/// Receives the bytes of a range in order.
enum Sink<'s> {
    Memory(Vec<u8>),
    Reader(&'s Sender<Result<Bytes, StoreError>>),
}

/// A range being fetched.
struct Progress<'s> {
    /// The next byte to come.
    reached: u64,
    end: u64,
    sink: Sink<'s>,
}

/// The bytes of `range`, from the cache or the network.
pub(crate) async fn range(object: &Object, range: Range<u64>) -> Result<Bytes, StoreError> {
    if range.is_empty() {
        return Ok(Bytes::new());
    }
    let inner = &object.0;
    let shared = inner.store.clone();
    let is_cached = shared.0.cache.is_some();
    let identity = || {
        let validator = inner.about.validator().filter(|_| is_cached)?;
        let (name, bytes) = (&inner.name, inner.about.bytes);
        Some(format!("{name}\n{validator}\n{bytes}\n{}\n{}", range.start, range.end))
    };
    let stopped = |_| StoreError::stopped(&inner.name);
    if let Some(identity) = identity() {
        let shared = shared.clone();
        let found = spawn_blocking(move || shared.0.cache.as_ref().and_then(|cache| cache.get(&identity)));
        if let Some(found) = found.await.map_err(stopped)? {
            Counters::add(&inner.store.0.traffic.cache_bytes, found.len() as u64);
            return Ok(found.into());
        }
    }
    let room = Vec::with_capacity((range.end - range.start) as usize);
    let mut progress = Progress { reached: range.start, end: range.end, sink: Sink::Memory(room) };
    complete(object, &mut progress).await?;
    let Sink::Memory(data) = progress.sink else { return Err(StoreError::stopped(&inner.name)) };
    let data = Bytes::from(data);
    if let Some(identity) = identity() {
        let kept = data.clone();
        let put = spawn_blocking(move || {
            if let Some(cache) = &shared.0.cache {
                cache.put(&identity, &[&kept]);
            }
        });
        put.await.map_err(stopped)?;
    }
    Ok(data)
}

/// Sends all bytes of an object into `sink`, and the error if there is one.
pub(crate) async fn whole(object: &Object, sink: Sender<Result<Bytes, StoreError>>) {
    let mut progress = Progress { reached: 0, end: object.bytes(), sink: Sink::Reader(&sink) };
    if let Err(error) = complete(object, &mut progress).await {
        // The reader may be gone, and then nobody wants the error.
        drop(sink.send(Err(error)).await);
    }
}

/// Makes attempts until the range is complete.
async fn complete(object: &Object, progress: &mut Progress<'_>) -> Result<(), StoreError> {
    let (store, name) = (&object.0.store, &object.0.name);
    let mut failures = Failures::new(store.options());
    while progress.reached < progress.end {
        let before = progress.reached;
        let done = SEEN.scope(RefCell::default(), attempt(object, progress)).await;
        let fault = match done {
            Ok(()) if progress.reached == progress.end => return Ok(()),
            Ok(()) => Fault::passing(format!("the answer ended at byte {} of {}", progress.reached, progress.end)),
            Err(fault) => fault,
        };
        failures.pause(store, name, fault, progress.reached > before).await?;
    }
    Ok(())
}

/// One request for the rest of a range.
async fn attempt(object: &Object, progress: &mut Progress<'_>) -> Result<(), Fault> {
    let inner = &object.0;
    let limit = inner.store.options().inactivity;
    let answer = timeout(limit, ask(inner, progress.reached..progress.end)).await.map_err(|_| silent(limit))??;
    let mut skip = progress.reached - answer.start;
    let mut pieces = answer.pieces;
    while let Some(piece) = timeout(limit, pieces.next()).await.map_err(|_| silent(limit))? {
        let mut piece = piece.map_err(Fault::passing)?;
        Counters::add(&inner.store.0.traffic.network_bytes, piece.len() as u64);
        let skipped = skip.min(piece.len() as u64);
        skip -= skipped;
        drop(piece.split_to(skipped as usize));
        let room = progress.end - progress.reached;
        let is_last = piece.len() as u64 >= room;
        piece.truncate(room.min(piece.len() as u64) as usize);
        progress.reached += piece.len() as u64;
        match &mut progress.sink {
            Sink::Memory(data) => data.extend_from_slice(&piece),
            Sink::Reader(_) if piece.is_empty() => {}
            Sink::Reader(sender) => {
                if sender.send(Ok(piece)).await.is_err() {
                    return Err(Fault::Fatal(StoreError::stopped(&inner.name)));
                }
            }
        }
        if is_last {
            break;
        }
    }
    Ok(())
}
