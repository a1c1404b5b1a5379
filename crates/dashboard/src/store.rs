//! All runs of a folder, read as they grow, and shared by all pages.

use crate::inside::Inside;
use crate::run::{Mark, State, Summary, files, folders};
use crate::table::{Progress, Table};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trainyard_base::lock;

/// The files of records: the prefix of their metrics, their name, and the keys that place a record.
pub const TABLES: [(&str, &str, &[&str]); 3] = [
    ("", files::METRICS, &["step"]),
    ("evaluation.", files::EVALUATIONS, &["step"]),
    ("monitor.", files::MONITOR, &["unix_s", "time_s", "time", "step"]),
];

/// The tables of one run.
#[derive(Debug)]
pub struct RunTables {
    /// In the order of [`TABLES`].
    pub tables: Vec<Table>,
}

/// The runs.
#[derive(Debug)]
pub struct Store {
    inside: Inside,
    runs: Mutex<BTreeMap<String, Arc<Run>>>,
}

/// A run in the store.
#[derive(Debug)]
pub struct Run {
    /// The folder's name.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
    known: Mutex<(Mark, Option<Arc<Summary>>)>,
    tables: Mutex<RunTables>,
    /// True while a thread reads a long file.
    is_read: AtomicBool,
}

impl Store {
    /// The runs in a folder.
    ///
    /// # Errors
    ///
    /// The folder does not exist.
    pub fn open(root: &Path) -> io::Result<Store> {
        Ok(Store { inside: Inside::new(root)?, runs: Mutex::default() })
    }

    /// The files that may be read.
    pub fn inside(&self) -> &Inside {
        &self.inside
    }

    /// Looks at the folder again. Returns the runs that are there, by name.
    ///
    /// # Errors
    ///
    /// The folder cannot be listed.
    pub fn scan(&self) -> io::Result<Vec<Arc<Run>>> {
        let found = folders(&self.inside)?;
        let mut runs = lock(&self.runs);
        runs.retain(|name, _| found.binary_search_by(|(found, _)| found.cmp(name)).is_ok());
        for (name, folder) in found {
            runs.entry(name.clone()).or_insert_with(|| Arc::new(Run::new(name, folder)));
        }
        Ok(runs.values().cloned().collect())
    }

    /// A run by the name of its folder.
    ///
    /// # Errors
    ///
    /// The folder cannot be listed.
    pub fn run(&self, name: &str) -> io::Result<Option<Arc<Run>>> {
        let known = lock(&self.runs).get(name).cloned();
        match known {
            Some(run) => Ok(Some(run)),
            None => Ok(self.scan()?.into_iter().find(|run| run.name == name)),
        }
    }
}

impl Run {
    fn new(name: String, folder: PathBuf) -> Run {
        let tables = TABLES.iter().map(|(_, file, places)| Table::new(folder.join(file), places)).collect();
        Run {
            name,
            folder,
            known: Mutex::default(),
            tables: Mutex::new(RunTables { tables }),
            is_read: AtomicBool::new(false),
        }
    }

    /// The run in short. It is read again only if a file has changed or the run may be going on.
    ///
    /// # Errors
    ///
    /// A file cannot be read.
    pub fn summary(&self, inside: &Inside) -> io::Result<Arc<Summary>> {
        let mark = Mark::of(&self.folder);
        let mut known = lock(&self.known);
        let (known_mark, summary) = &*known;
        let is_over = |summary: &Summary| summary.state != State::Running;
        if let Some(summary) = summary.as_ref().filter(|summary| *known_mark == mark && is_over(summary)) {
            return Ok(Arc::clone(summary));
        }
        let summary = Arc::new(Summary::read(inside, &self.name, &self.folder)?);
        *known = (mark, Some(Arc::clone(&summary)));
        Ok(summary)
    }

    /// Reads what was appended to the records, for at most about the time of one slice of each
    /// file.
    ///
    /// # Errors
    ///
    /// A file cannot be read.
    pub fn read(&self, inside: &Inside) -> io::Result<Progress> {
        let mut progress = Progress::Done;
        for number in 0..TABLES.len() {
            // The lock is let go between slices, so that others can look meanwhile.
            if lock(&self.tables).tables[number].read(inside)? == Progress::More {
                progress = Progress::More;
            }
        }
        Ok(progress)
    }

    /// Reads everything on a thread of its own, so that nobody waits for a long file. Meanwhile the
    /// tables have what was read so far.
    pub fn read_beside(self: &Arc<Run>, inside: &Inside) {
        if self.is_read.swap(true, Ordering::Relaxed) {
            return;
        }
        let (run, inside) = (Arc::clone(self), inside.clone());
        let read = move || {
            while let Ok(Progress::More) = run.read(&inside) {
                // Whoever waits for the lock gets it.
                std::thread::sleep(Duration::from_millis(1));
            }
            run.is_read.store(false, Ordering::Relaxed);
        };
        if std::thread::Builder::new().name("dashboard-reader".to_owned()).spawn(read).is_err() {
            // Requests go on reading a part each.
            self.is_read.store(false, Ordering::Relaxed);
        }
    }

    /// True while [`Run::read_beside`] reads.
    pub fn is_read_beside(&self) -> bool {
        self.is_read.load(Ordering::Relaxed)
    }

    /// Calls `look` with the tables.
    pub fn with<T>(&self, look: impl FnOnce(&RunTables) -> T) -> T {
        look(&lock(&self.tables))
    }
}

impl RunTables {
    /// The table and the name in it of a metric such as `loss` or `evaluation.loss`.
    pub fn find<'a>(&self, metric: &'a str) -> Option<(&Table, &'a str)> {
        let pairs = TABLES.iter().zip(&self.tables);
        // The first prefix is empty, so it is tried last.
        pairs.rev().find_map(|((prefix, ..), table)| {
            let name = metric.strip_prefix(prefix)?;
            table.column(name).map(|_| (table, name))
        })
    }

    /// The names of all metrics.
    pub fn names(&self) -> Vec<String> {
        let pairs = TABLES.iter().zip(&self.tables);
        pairs.flat_map(|((prefix, ..), table)| table.names().map(move |name| format!("{prefix}{name}"))).collect()
    }

    /// Records that could not be read.
    pub fn damaged(&self) -> u64 {
        self.tables.iter().map(Table::damaged).sum()
    }
}
