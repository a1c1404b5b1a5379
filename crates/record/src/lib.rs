//! The record that a run keeps of itself, and its readers.
//!
//! | module | file in the run's folder | holds |
//! |---|---|---|
//! | [`steps`] | `trace/rank-N.spans` | times of every instruction of recent steps |
//! | [`programs`] | `trace/rank-N.program.json` | the programs that those steps ran |
//! | [`programs`] | `trace/predicted.json` | the prediction of a step |
//! | [`monitor`] | `monitor.jsonl` | a sample of the machine a second |
//! | [`health`] | `health.jsonl` | suspicious numbers, with step and samples |
//!
//! The engine writes these files and `observe` reads them. All of them can be read while a run goes
//! on, and after it was killed.

pub mod health;
pub mod monitor;
pub mod programs;
pub mod steps;

use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// A file of the record that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The operating system refuses.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// The refused operation, e.g. `read`.
        what: &'static str,
        /// The file.
        path: String,
        /// The reason.
        source: std::io::Error,
    },
    /// The file holds something else.
    #[error("{path} is not a record of a run: {why}")]
    Format {
        /// The file.
        path: String,
        /// The reason.
        why: String,
    },
}

impl RecordError {
    pub(crate) fn io(what: &'static str, path: &Path) -> impl Fn(std::io::Error) -> RecordError {
        let path = path.display().to_string();
        move |source| RecordError::Io { what, path: path.clone(), source }
    }

    pub(crate) fn format(path: &Path, why: impl ToString) -> RecordError {
        RecordError::Format { path: path.display().to_string(), why: why.to_string() }
    }
}

/// The lines of a file that are such objects; none if there is no file. Half a line at the end is
/// passed over: a process that died may have left it, or one that goes on may be writing it.
///
/// # Errors
/// A file that cannot be read.
pub fn read_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, RecordError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(RecordError::io("read", path)(error)),
    }
}

/// The folder of traces in the folder of a run.
pub fn trace_folder(run: &Path) -> PathBuf {
    run.join("trace")
}
