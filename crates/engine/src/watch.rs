//! The watch of a training rank: a thread that ensures that no rank waits for ever, and that
//! reports the position of every lane when a run fails.
//!
//! - *A stuck lane*: a lane may spend [`OWN_SHARE`] of the deadline on its own work. If it takes
//!   longer, its rank fails the world and names itself. It does so before the other ranks' deadline
//!   passes, because those might blame a rank that only waits for the stuck one.
//! - *A failed world*: every rank writes the positions of its lanes to `RUN/faults` and ends.
//! - *A rank that does not end*: if its threads do not return within [`GRACE`], its process is
//!   ended.

use crate::positions::Positions;
use crate::{EngineError, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use trainyard_comm::Communicator;

/// The share of the deadline that a lane's own work may take.
const OWN_SHARE: f64 = 0.8;
/// Time in which the threads of a rank must end after a failure.
const GRACE: Duration = Duration::from_secs(5);
/// The folder of reports in a run's folder.
pub const FOLDER: &str = "faults";

/// A thread that watches one rank. Dropping it ends the thread. If that happens in a panic, it
/// first writes the positions of the rank's lanes.
pub struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    positions: Arc<Positions>,
    folder: PathBuf,
    world: Communicator,
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Watch {
    /// Starts to watch this rank of `world`, whose lanes are `positions`. Reports go to the folder
    /// `run`. `on_stuck` is called with a message when the process must be ended. All ranks call
    /// this together.
    pub fn start(
        world: &Communicator,
        positions: Arc<Positions>,
        run: &Path,
        deadline: Duration,
        on_stuck: fn(&str),
    ) -> Result<Watch> {
        let world = world.duplicate("watch")?;
        let folder = run.join(FOLDER);
        let shared = Arc::new(Shared { positions, folder, world, ended: Mutex::new(false), changed: Condvar::new() });
        let watching = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("watch".to_owned()).spawn(move || watching.watch(deadline, on_stuck));
        let thread = thread.map_err(|source| EngineError::File {
            what: "cannot start the thread that watches",
            path: run.display().to_string(),
            source,
        })?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    /// Wraps an error that ends the training, together with a report of the ranks' positions, which
    /// is written too.
    pub fn report(&self, error: EngineError) -> EngineError {
        let report = self.shared.report(&error.to_string());
        EngineError::Fault { source: Box::new(error), report }
    }

    fn end(&mut self) {
        *self.shared.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has printed its message already.
            let _ = thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.report("a thread of this rank panicked");
        }
        self.end();
    }
}

impl Shared {
    fn watch(&self, deadline: Duration, on_stuck: fn(&str)) {
        let interval = (deadline / 40).clamp(Duration::from_millis(5), Duration::from_millis(250));
        let limit = deadline.mul_f64(OWN_SHARE);
        let mut failed: Option<Instant> = None;
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            ended = self.changed.wait_timeout(ended, interval).unwrap_or_else(PoisonError::into_inner).0;
            if *ended {
                return;
            }
            let world = &self.world;
            match (world.failure(), failed) {
                (None, _) => {
                    if let Some((lane, position)) = self.positions.stuck(limit) {
                        world.abort(format!(
                            "no progress within the deadline of {:.1} s: lane {} is {position}",
                            deadline.as_secs_f64(),
                            lane.name()
                        ));
                    }
                }
                (Some(_), None) => failed = Some(Instant::now()),
                (Some(failure), Some(since)) if since.elapsed() > GRACE => {
                    let rank = world.members()[world.rank()];
                    let report = self.report(&failure.to_string());
                    on_stuck(&format!(
                        "rank {rank} does not end {:.0} s after a failure, so its process is ended: {failure}\n{report}",
                        GRACE.as_secs_f64()
                    ));
                    return;
                }
                (Some(_), Some(_)) => {}
            }
        }
    }

    /// Writes the positions of this rank's lanes. Returns them as text, with the last known
    /// positions of the other ranks.
    fn report(&self, error: &str) -> String {
        let world = &self.world;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let own = world.rank();
        let lanes = self.positions.lanes();
        let written = self.write(world, error, now);
        let mut text = match written {
            Ok(path) => format!("where the ranks were (rank {own}'s lanes in full: {}):", path.display()),
            Err(error) => format!("where the ranks were (not written to {}: {error}):", self.folder.display()),
        };
        for rank in 0..world.size() {
            let place = world.place(rank);
            text += &format!("\n  rank {rank} on {}: ", place.host);
            if rank == own {
                let lanes: Vec<String> = lanes.iter().map(|(lane, at)| format!("{} {at}", lane.name())).collect();
                text += if lanes.is_empty() { "before its first step" } else { "" };
                text += &lanes.join("; ");
            } else {
                match world.position(rank) {
                    Some((position, ago)) => {
                        text += &format!("last heard of at {position}, {:.1} s ago", ago.as_secs_f64())
                    }
                    None => text += "not heard of",
                }
            }
        }
        text
    }

    /// Writes `RUN/faults/SECONDS-rank-R.json`.
    fn write(&self, world: &Communicator, error: &str, now: Duration) -> std::io::Result<PathBuf> {
        std::fs::create_dir_all(&self.folder)?;
        let path = self.folder.join(format!("{}-rank-{}.json", now.as_secs(), world.rank()));
        let lanes = self.positions.lanes().into_iter().map(|(lane, at)| {
            json!({
                "lane": lane.name(),
                "step": at.at.step,
                "instruction": at.at.instruction,
                "what": at.at.what,
                "doing": at.doing,
                "for_s": at.since.elapsed().as_secs_f64(),
                "last_finished": at.finished,
            })
        });
        let others = (0..world.size()).filter(|rank| *rank != world.rank()).map(|rank| {
            let heard = world.position(rank);
            json!({
                "rank": rank,
                "place": world.place(rank),
                "last_position": heard.as_ref().map(|(position, _)| position),
                "ago_s": heard.map(|(_, ago)| ago.as_secs_f64()),
            })
        });
        let report = json!({
            "rank": world.rank(),
            "place": world.place(world.rank()),
            "unix_s": now.as_secs_f64(),
            "error": error,
            "failure": world.failure().map(|failure| serde_json::to_value(&*failure).unwrap_or(Value::Null)),
            "lanes": lanes.collect::<Vec<_>>(),
            "others": others.collect::<Vec<_>>(),
        });
        std::fs::write(&path, serde_json::to_vec_pretty(&report)?)?;
        Ok(path)
    }
}
