//! The jobs in one SQLite file. Every change is one transaction that begins with the write lock, so
//! commands and the daemon may work at the same time, and one that is killed leaves the state
//! before or after.

use crate::QueueError;
use crate::job::{Job, Process, Request, Shape, State, Unit};
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file in the queue's folder.
pub const FILE: &str = "queue.sqlite";
/// The version of the table.
const VERSION: i64 = 1;
/// Time to wait for other processes that write.
const BUSY: Duration = Duration::from_secs(30);

const SCHEMA: &str = "
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, folder TEXT NOT NULL, run TEXT NOT NULL,
    config TEXT NOT NULL, sets TEXT NOT NULL, priority INTEGER NOT NULL, deadline INTEGER, price TEXT, carbon TEXT,
    idle_below REAL, work REAL, unit TEXT NOT NULL, shapes TEXT NOT NULL, added INTEGER NOT NULL,
    state TEXT NOT NULL, since INTEGER NOT NULL, why TEXT NOT NULL, is_paused INTEGER NOT NULL DEFAULT 0,
    is_cancelled INTEGER NOT NULL DEFAULT 0,
    shape INTEGER, pid INTEGER, pid_started INTEGER, done REAL NOT NULL DEFAULT 0, done_at_start REAL NOT NULL DEFAULT 0,
    measured TEXT NOT NULL DEFAULT '[]', start_s REAL, starts INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0, not_before INTEGER NOT NULL DEFAULT 0
);
";

/// The store of the jobs.
pub struct Store {
    connection: Connection,
    path: PathBuf,
}

impl Store {
    /// Opens the store in `folder`, and makes it if there is none.
    ///
    /// # Errors
    ///
    /// The folder cannot be made, SQLite refuses, or the file is of another version.
    pub fn create(folder: &Path) -> Result<Store, QueueError> {
        let file_error = |source| QueueError::File { what: "create", path: folder.to_owned(), source };
        std::fs::create_dir_all(folder).map_err(file_error)?;
        Store::open_file(folder, OpenFlags::SQLITE_OPEN_CREATE)
    }

    /// Opens the store in `folder`.
    ///
    /// # Errors
    ///
    /// There is none, SQLite refuses, or the file is of another version.
    pub fn open(folder: &Path) -> Result<Store, QueueError> {
        if !folder.join(FILE).is_file() {
            return Err(QueueError::Refused(format!(
                "there is no queue in {}: `trainyard queue add c.toml` makes it",
                folder.display()
            )));
        }
        Store::open_file(folder, OpenFlags::empty())
    }

    fn open_file(folder: &Path, more: OpenFlags) -> Result<Store, QueueError> {
        let path = folder.join(FILE);
        let error = |source| QueueError::Sqlite { path: path.clone(), source };
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | more;
        let mut connection = Connection::open_with_flags(&path, flags).map_err(error)?;
        let version = |connection: &Connection| -> rusqlite::Result<i64> {
            connection.pragma_query_value(None, "user_version", |row| row.get(0))
        };
        let prepare = |connection: &mut Connection| -> rusqlite::Result<i64> {
            connection.busy_timeout(BUSY)?;
            // Readers then do not wait for a writer. Where the file system cannot do it, the answer
            // is another mode, and nothing is lost but that.
            connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
            if version(connection)? == 0 {
                let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
                // Another process may have made it meanwhile.
                if version(&transaction)? == 0 {
                    transaction.execute_batch(SCHEMA)?;
                    transaction.pragma_update(None, "user_version", VERSION)?;
                }
                transaction.commit()?;
            }
            version(connection)
        };
        let found = prepare(&mut connection).map_err(error)?;
        if found != VERSION {
            return Err(QueueError::Version { path, found, known: VERSION });
        }
        Ok(Store { connection, path })
    }

    fn error(&self, source: rusqlite::Error) -> QueueError {
        QueueError::Sqlite { path: self.path.clone(), source }
    }

    /// Runs `change` in one transaction.
    fn change<T>(&mut self, change: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>) -> Result<T, QueueError> {
        let path = &self.path;
        let error = |source| QueueError::Sqlite { path: path.clone(), source };
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(error)?;
        let result = change(&transaction).map_err(error)?;
        transaction.commit().map_err(error)?;
        Ok(result)
    }

    /// Adds a job and returns its number.
    ///
    /// # Errors
    ///
    /// Another job that is not over has the same run.
    pub fn add(&mut self, request: &Request, now: i64) -> Result<i64, QueueError> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let sets = serde_json::json!(request.sets).to_string();
        let shapes = serde_json::json!(request.shapes).to_string();
        let run = text(&request.run);
        let added = self.change(|transaction| {
            let other: Option<i64> = transaction
                .query_row(
                    "SELECT id FROM jobs WHERE run = ?1 AND state NOT IN ('done', 'failed', 'cancelled')",
                    [&run],
                    |row| row.get(0),
                )
                .optional()?;
            if let Some(other) = other {
                return Ok(Err(other));
            }
            transaction.execute(
                "INSERT INTO jobs (name, folder, run, config, sets, priority, deadline, price, carbon, idle_below, work, \
                 unit, shapes, added, state, since, why) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, 'waiting', ?14, 'added')",
                params![
                    request.name,
                    text(&request.folder),
                    run,
                    request.config,
                    sets,
                    request.priority,
                    request.deadline,
                    request.price.as_deref().map(text),
                    request.carbon.as_deref().map(text),
                    request.idle_below,
                    request.work,
                    if request.unit == Unit::Steps { "steps" } else { "seconds" },
                    shapes,
                    now,
                ],
            )?;
            Ok(Ok(transaction.last_insert_rowid()))
        })?;
        added.map_err(|other| {
            QueueError::Refused(format!(
                "job {other} is to train {run}: give this one another name by --set run.name=NAME"
            ))
        })
    }

    /// All jobs, by number.
    ///
    /// # Errors
    ///
    /// SQLite refuses.
    pub fn jobs(&self) -> Result<Vec<Job>, QueueError> {
        let read = || -> rusqlite::Result<Vec<Job>> {
            let mut statement = self.connection.prepare_cached("SELECT * FROM jobs ORDER BY id")?;
            let rows = statement.query_map([], job)?;
            rows.collect()
        };
        read().map_err(|source| self.error(source))
    }

    /// One job.
    ///
    /// # Errors
    ///
    /// There is none of that number.
    pub fn job(&self, id: i64) -> Result<Job, QueueError> {
        let found = self.connection.query_row("SELECT * FROM jobs WHERE id = ?1", [id], job).optional();
        let found = found.map_err(|source| self.error(source))?;
        found.ok_or_else(|| {
            let jobs = self.jobs().unwrap_or_default();
            let known: Vec<String> = jobs.iter().map(|job| job.id.to_string()).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            QueueError::Refused(format!("there is no job {id}: there are {known}"))
        })
    }

    /// Pauses or resumes a job. A job that failed is given another chance.
    ///
    /// # Errors
    ///
    /// There is none of that number, or it is done.
    pub fn pause(&mut self, id: i64, is_paused: bool, now: i64) -> Result<(), QueueError> {
        let job = self.job(id)?;
        match (job.state, is_paused) {
            (State::Done | State::Cancelled, _) => {
                return Err(QueueError::Refused(format!("job {id} is {}", job.state.name())));
            }
            _ if job.is_cancelled => return Err(QueueError::Refused(format!("job {id} is cancelled"))),
            (State::Failed, true) => {
                return Err(QueueError::Refused(format!("job {id} has failed: {}", job.why)));
            }
            _ => {}
        }
        self.change(|transaction| {
            transaction.execute("UPDATE jobs SET is_paused = ?2 WHERE id = ?1", params![id, is_paused])?;
            transaction.execute(
                "UPDATE jobs SET state = 'waiting', since = ?2, why = 'resumed', crashes = 0, not_before = 0 \
                 WHERE id = ?1 AND state = 'failed'",
                params![id, now],
            )?;
            Ok(())
        })
    }

    /// Gives a job up. One that may be alive ends at its next step, others at once. The run stays.
    ///
    /// # Errors
    ///
    /// There is none of that number, or it is over.
    pub fn cancel(&mut self, id: i64, now: i64) -> Result<Job, QueueError> {
        let job = self.job(id)?;
        if matches!(job.state, State::Done | State::Cancelled) {
            return Err(QueueError::Refused(format!("job {id} is {} already", job.state.name())));
        }
        self.change(|transaction| {
            transaction.execute("UPDATE jobs SET is_cancelled = 1 WHERE id = ?1", [id])?;
            transaction.execute(
                "UPDATE jobs SET state = 'cancelled', since = ?2, why = 'cancelled' \
                 WHERE id = ?1 AND state IN ('waiting', 'failed')",
                params![id, now],
            )
        })?;
        self.job(id)
    }

    /// The number of the job that `text` names: by its number, or by its run's name, of which the
    /// newest counts.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn find(&self, text: &str) -> Result<i64, QueueError> {
        if let Ok(id) = text.parse() {
            return self.job(id).map(|job| job.id);
        }
        let jobs = self.jobs()?;
        let named = jobs.iter().rev().find(|job| job.request.name == text);
        named.map(|job| job.id).ok_or_else(|| {
            QueueError::Refused(format!("there is no job {text:?}: `trainyard queue list --all` lists them"))
        })
    }

    /// Writes what the daemon knows of a job. Returns false if there is none of its number. What
    /// commands change (that it is paused or cancelled) stays as it is.
    ///
    /// # Errors
    ///
    /// SQLite refuses.
    pub fn update(&mut self, job: &Job) -> Result<bool, QueueError> {
        let measured = serde_json::json!(job.measured).to_string();
        let changed = self.change(|transaction| {
            transaction
                .prepare_cached(
                    "UPDATE jobs SET state = ?2, since = ?3, why = ?4, shape = ?5, pid = ?6, pid_started = ?7, done = ?8, \
                     done_at_start = ?9, measured = ?10, start_s = ?11, starts = ?12, crashes = ?13, \
                     not_before = ?14 WHERE id = ?1",
                )?
                .execute(params![
                    job.id,
                    job.state.name(),
                    job.since,
                    job.why,
                    job.shape.map(|shape| shape as i64),
                    job.process.map(|process| process.pid),
                    job.process.map(|process| process.started as i64),
                    job.done,
                    job.done_at_start,
                    measured,
                    job.start_s,
                    job.starts,
                    job.crashes,
                    job.not_before,
                ])
        })?;
        Ok(changed > 0)
    }
}

/// The seconds that this machine's local time is ahead of UTC, at a time: SQLite knows it.
pub fn local_offset(at: i64) -> i64 {
    thread_local! {
        static MEMORY: Option<Connection> = Connection::open_in_memory().ok();
    }
    let sql = "SELECT CAST(strftime('%s', ?1, 'unixepoch', 'localtime') AS INTEGER) - ?1";
    MEMORY
        .with(|memory| {
            let connection = memory.as_ref()?;
            connection.prepare_cached(sql).ok()?.query_row([at], |row| row.get(0)).ok()
        })
        .unwrap_or(0)
}

fn job(row: &Row<'_>) -> rusqlite::Result<Job> {
    let path = |name: &str| -> rusqlite::Result<PathBuf> { Ok(PathBuf::from(row.get::<_, String>(name)?)) };
    let path_if = |name: &str| -> rusqlite::Result<Option<PathBuf>> {
        Ok(row.get::<_, Option<String>>(name)?.map(PathBuf::from))
    };
    let broken = |name: &str, what: String| {
        let kind = rusqlite::types::Type::Text;
        let index = row.as_ref().column_index(name).unwrap_or_default();
        rusqlite::Error::FromSqlConversionFailure(index, kind, what.into())
    };
    let json = |name: &str| -> rusqlite::Result<serde_json::Value> {
        let text: String = row.get(name)?;
        serde_json::from_str(&text).map_err(|error| broken(name, error.to_string()))
    };
    let state: String = row.get("state")?;
    let state = State::ALL.into_iter().find(|known| known.name() == state);
    let index = |name: &str| -> rusqlite::Result<Option<usize>> {
        Ok(row.get::<_, Option<i64>>(name)?.and_then(|index| usize::try_from(index).ok()))
    };
    let pid: Option<u32> = row.get("pid")?;
    let pid_started: Option<i64> = row.get("pid_started")?;
    let parsed = |name: &str, error: serde_json::Error| broken(name, error.to_string());
    let shapes: Vec<Shape> = serde_json::from_value(json("shapes")?).map_err(|error| parsed("shapes", error))?;
    let measured: Vec<(usize, f64)> =
        serde_json::from_value(json("measured")?).map_err(|error| parsed("measured", error))?;
    let shape = index("shape")?;
    if shapes.is_empty() || measured.iter().map(|(shape, _)| *shape).chain(shape).any(|shape| shape >= shapes.len()) {
        return Err(broken("shapes", format!("{} shapes, and another one is used", shapes.len())));
    }
    Ok(Job {
        id: row.get("id")?,
        request: Request {
            name: row.get("name")?,
            folder: path("folder")?,
            run: path("run")?,
            config: row.get("config")?,
            sets: serde_json::from_value(json("sets")?).map_err(|error| parsed("sets", error))?,
            priority: row.get("priority")?,
            deadline: row.get("deadline")?,
            price: path_if("price")?,
            carbon: path_if("carbon")?,
            idle_below: row.get("idle_below")?,
            work: row.get("work")?,
            unit: if row.get::<_, String>("unit")? == "steps" { Unit::Steps } else { Unit::Seconds },
            shapes,
        },
        added: row.get("added")?,
        state: state.ok_or_else(|| broken("state", "no state of a job".to_owned()))?,
        since: row.get("since")?,
        why: row.get("why")?,
        is_paused: row.get("is_paused")?,
        is_cancelled: row.get("is_cancelled")?,
        shape,
        process: pid.zip(pid_started).map(|(pid, started)| Process { pid, started: started as u64 }),
        done: row.get("done")?,
        done_at_start: row.get("done_at_start")?,
        measured,
        start_s: row.get("start_s")?,
        starts: row.get("starts")?,
        crashes: row.get("crashes")?,
        not_before: row.get("not_before")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::testing::request;

    fn shapes() -> Vec<Shape> {
        vec![Shape {
            cores: 2,
            sets: vec!["compute.threads=2".to_owned()],
            words: "1 rank".to_owned(),
            rate: Some(0.1),
        }]
    }

    #[test]
    fn a_job_comes_back_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let error = Store::open(folder.path()).err().unwrap().to_string();
        assert!(error.contains("`trainyard queue add c.toml` makes it"), "{error}");
        let mut store = Store::create(folder.path()).unwrap();
        let mut asked = request("a", shapes());
        (asked.priority, asked.deadline, asked.idle_below) = (-3, Some(99), Some(12.5));
        (asked.price, asked.carbon) = (Some("/p.csv".into()), Some("/c.csv".into()));
        let id = store.add(&asked, 5).unwrap();
        let mut job = store.job(id).unwrap();
        assert_eq!((&job.request, job.added, job.state), (&asked, 5, State::Waiting));
        (job.state, job.why, job.since) = (State::Running, "starts".to_owned(), 7);
        (job.shape, job.process) = (Some(0), Some(Process { pid: 4_000_000, started: 1 << 60 }));
        (job.done, job.done_at_start, job.measured, job.start_s) = (3.5, 1.0, vec![(0, 0.25)], Some(2.0));
        (job.starts, job.crashes, job.not_before) = (2, 1, 11);
        assert!(store.update(&job).unwrap());
        drop(store);
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(store.jobs().unwrap(), [job]);
    }

    #[test]
    fn jobs_are_found_paused_and_cancelled() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::create(folder.path()).unwrap();
        let first = store.add(&request("a", shapes()), 0).unwrap();
        let error = store.add(&request("a", shapes()), 0).unwrap_err().to_string();
        assert!(error.contains("job 1 is to train /jobs/runs/a: give this one another name"), "{error}");
        let second = store.add(&request("b", shapes()), 0).unwrap();
        assert_eq!((store.find("b").unwrap(), store.find("1").unwrap()), (second, first));
        for (text, says) in [("c", "there is no job \"c\""), ("9", "there is no job 9: there are 1, 2")] {
            let error = store.find(text).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        store.pause(first, true, 1).unwrap();
        assert!(store.job(first).unwrap().is_paused);
        // A daemon that has read the job before writes nothing over that.
        store.update(&crate::job::Job { is_paused: false, ..store.job(first).unwrap() }).unwrap();
        assert!(store.job(first).unwrap().is_paused);
        store.pause(first, false, 2).unwrap();
        assert!(!store.job(first).unwrap().is_paused);

        let mut failed = store.job(second).unwrap();
        (failed.state, failed.crashes, failed.why) = (State::Failed, 4, "no room".to_owned());
        store.update(&failed).unwrap();
        let error = store.pause(second, true, 3).unwrap_err().to_string();
        assert!(error.contains("job 2 has failed: no room"), "{error}");
        store.pause(second, false, 4).unwrap();
        let again = store.job(second).unwrap();
        assert_eq!((again.state, again.crashes, again.since), (State::Waiting, 0, 4));

        assert_eq!(store.cancel(second, 5).unwrap().state, State::Cancelled);
        let error = store.cancel(second, 6).unwrap_err().to_string();
        assert!(error.contains("job 2 is cancelled already"), "{error}");
        assert!(store.pause(second, false, 7).unwrap_err().to_string().contains("job 2 is cancelled"));
        let mut alive = store.job(first).unwrap();
        alive.state = State::Running;
        store.update(&alive).unwrap();
        let asked = store.cancel(first, 8).unwrap();
        assert_eq!((asked.state, asked.is_cancelled), (State::Running, true));
        // A run's name is free once its job is over.
        store.add(&request("b", shapes()), 9).unwrap();
    }

    #[test]
    fn a_store_of_another_version_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        store.connection.pragma_update(None, "user_version", 9).unwrap();
        drop(store);
        let error = Store::open(folder.path()).err().unwrap().to_string();
        assert!(error.contains("is of version 9, and this program knows version 1"), "{error}");
        std::fs::write(folder.path().join(FILE), "no database, but a text that is long enough to be none").unwrap();
        assert!(Store::open(folder.path()).err().unwrap().to_string().contains("queue.sqlite"));
    }
}
