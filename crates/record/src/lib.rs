//! The record that a run keeps of itself, and its readers.
//!
//! | module | file in the run's folder | holds |
//! |---|---|---|
//! | [`steps`] | `trace/rank-N.spans` | start, wait and duration of every instruction of recent steps |
//! | [`programs`] | `trace/rank-N.program.json`, `trace/predicted.json` | the programs that those steps ran, and their prediction |
//! | [`monitor`] | `monitor.jsonl` | a sample of the machine a second |
//! | [`health`] | `health.jsonl` | numbers that a run found suspicious, with step and samples |
//!
//! The engine writes these files and `observe` reads them. All of them can be read while a run goes
//! on, and after it was killed.

pub mod health;
pub mod monitor;
pub mod programs;
pub mod steps;

use std::path::{Path, PathBuf};

/// A file of the record that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The operating system refuses.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// `read`, `write`.
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

/// The folder of traces in the folder of a run.
pub fn trace_folder(run: &Path) -> PathBuf {
    run.join("trace")
}
