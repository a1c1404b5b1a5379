//! Sends new records to all open pages, as server-sent events.
//!
//! While pages are open, one thread looks at the runs once a second, writes the new records as JSON
//! once, and sends the same bytes to all pages. A page whose connection is too slow misses events.
//! Each event contains the number of its first record, so the page notices the gap and requests the
//! missing records.

use super::api;
use crate::run::{State, Summary};
use crate::store::{Run, Store, TABLES};
use crate::table::{Progress, Table};
use hyper::body::{Body, Bytes, Frame};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use trainyard_base::lock;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Looks between two signs of life.
const SIGN_INTERVAL: u32 = 15;
/// Events that wait for a watcher.
const WAITING_MAX: usize = 8;
/// More new records than this are sent as this many buckets.
const BUCKETS: usize = 16;

/// The watchers.
pub struct Hub {
    watchers: Mutex<Vec<Sender<Bytes>>>,
}

/// The events for one watcher.
pub struct Events {
    events: Receiver<Bytes>,
    took: Box<dyn Fn() + Send + Sync>,
}

/// The part of a table that watchers know: its generation and its records.
type Known = (u64, usize);

impl Hub {
    /// Starts the thread that looks at the runs.
    ///
    /// # Errors
    ///
    /// The thread cannot start.
    pub fn start(store: Arc<Store>) -> io::Result<Arc<Hub>> {
        let hub = Arc::new(Hub { watchers: Mutex::default() });
        let weak = Arc::downgrade(&hub);
        std::thread::Builder::new().name("dashboard-news".to_owned()).spawn(move || {
            let mut seen = Seen::default();
            let mut looks = 0u32;
            // The thread ends with the server.
            while let Some(hub) = weak.upgrade() {
                if !lock(&hub.watchers).is_empty() {
                    looks += 1;
                    let news = seen.look(&store);
                    if let Some(news) = news {
                        hub.send(&Bytes::from(format!("data: {news}\n\n")));
                    } else if looks.is_multiple_of(SIGN_INTERVAL) {
                        hub.send(&Bytes::from_static(b": still here\n\n"));
                    }
                }
                drop(hub);
                std::thread::sleep(INTERVAL);
            }
        })?;
        Ok(hub)
    }

    /// Begins to watch. `took` is called whenever the connection takes an event.
    pub fn watch(&self, took: impl Fn() + Send + Sync + 'static) -> Events {
        let (sender, events) = channel(WAITING_MAX);
        // A first byte tells the browser that the connection stands.
        let _ = sender.try_send(Bytes::from_static(b": welcome\n\n"));
        lock(&self.watchers).push(sender);
        Events { events, took: Box::new(took) }
    }

    fn send(&self, event: &Bytes) {
        use tokio::sync::mpsc::error::TrySendError::Closed;
        lock(&self.watchers).retain(|watcher| !matches!(watcher.try_send(event.clone()), Err(Closed(_))));
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.events.poll_recv(cx).map(|event| {
            (self.took)();
            event.map(|event| Ok(Frame::data(event)))
        })
    }
}

/// The news that have been told.
#[derive(Default)]
struct Seen {
    summaries: BTreeMap<String, Arc<Summary>>,
    tables: BTreeMap<String, [Known; TABLES.len()]>,
}

impl Seen {
    /// The news since the last look as JSON; None if there are none.
    fn look(&mut self, store: &Store) -> Option<Value> {
        // A folder that cannot be listed for a moment has no news.
        let runs = store.scan().ok()?;
        let mut summaries = Vec::new();
        let mut records = Vec::new();
        for run in &runs {
            let Ok(summary) = run.summary(store.inside()) else { continue };
            let known = self.summaries.get(&run.name);
            let is_new = known.is_none_or(|known| **known != *summary);
            let was_running = known.is_some_and(|known| known.state == State::Running);
            if summary.state == State::Running || (was_running && is_new) {
                self.new_records(store, run, &mut records);
            }
            if is_new {
                summaries.push(api::brief(&summary));
                self.summaries.insert(run.name.clone(), summary);
            }
        }
        let gone: Vec<String> =
            self.summaries.keys().filter(|name| runs.iter().all(|run| run.name != **name)).cloned().collect();
        for name in &gone {
            self.summaries.remove(name);
            self.tables.remove(name);
        }
        let is_empty = summaries.is_empty() && records.is_empty() && gone.is_empty();
        (!is_empty).then(|| json!({"runs": summaries, "records": records, "gone": gone}))
    }

    fn new_records(&mut self, store: &Store, run: &Run, records: &mut Vec<Value>) {
        let is_first = !self.tables.contains_key(&run.name);
        let known = self.tables.entry(run.name.clone()).or_default();
        while let Ok(Progress::More) = run.read(store.inside()) {}
        run.with(|tables| {
            for ((prefix, ..), (table, known)) in TABLES.iter().zip(tables.tables.iter().zip(known)) {
                // The page asks for the records before its first event.
                if !is_first && let Some(mut news) = news_of(table, *known, prefix) {
                    news.insert("run".to_owned(), run.name.as_str().into());
                    records.push(Value::Object(news));
                }
                *known = (table.generation(), table.len());
            }
        });
    }
}

/// The records of a table after the known ones. `values` has for each metric a value per place: a
/// number, null if it is not finite, false if it is absent, or minimum, maximum, mean, count and
/// number of values that are not finite.
fn news_of(table: &Table, (generation, known): Known, prefix: &str) -> Option<Map<String, Value>> {
    let start = if generation == table.generation() { known } else { 0 };
    let end = table.len();
    if start >= end {
        return None;
    }
    let bins = (end - start).min(BUCKETS);
    let edge = |bin: usize| start + bin * (end - start) / bins;
    let place = |record: usize| table.steps().get(record);
    let places: Vec<[f64; 2]> = (0..bins).map(|bin| [place(edge(bin)), place(edge(bin + 1) - 1)]).collect();
    let mut values = Map::new();
    for name in table.names() {
        let Some(column) = table.column(name) else { continue };
        let of_bin = |bin: usize| api::bucket_json(&column.range(edge(bin), edge(bin + 1)));
        values.insert(format!("{prefix}{name}"), (0..bins).map(of_bin).collect());
    }
    let mut news = Map::new();
    news.insert("generation".to_owned(), table.generation().into());
    news.insert("start".to_owned(), start.into());
    news.insert("end".to_owned(), end.into());
    news.insert("places".to_owned(), json!(places));
    news.insert("values".to_owned(), Value::Object(values));
    Some(news)
}
