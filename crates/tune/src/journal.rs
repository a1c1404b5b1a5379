//! The journal of a study: one JSON object a line. The first describes the study, every other one
//! is an [`Event`].
//!
//! A line is written and flushed to disk before what it says is acted upon. So a killed study loses
//! nothing but a line that was being written, which is cut off when the journal is opened again.

use crate::{Event, Settings, Space, Study};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// The format that this version writes.
const FORMAT: &str = "trainyard study 1";

#[derive(Serialize, Deserialize)]
struct Head {
    format: String,
    space: Space,
    settings: Settings,
    /// The data that the caller keeps with the study.
    about: serde_json::Value,
}

/// A journal that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The operating system refuses.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A line is not what it should be.
    #[error("{} line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: usize,
        /// The problem.
        problem: String,
    },
    /// An event that cannot follow those before it. It was not written.
    #[error("{}: {problem}", path.display())]
    Event {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
}

/// The journal of one study, open for writing.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    study: Study,
    about: serde_json::Value,
}

impl Journal {
    /// Begins the journal of a new study. `about` is kept with it, as it is.
    ///
    /// # Errors
    /// The file exists, or cannot be written.
    pub fn create(path: &Path, study: Study, about: serde_json::Value) -> Result<Journal, JournalError> {
        let io = |what| move |source| JournalError::Io { what, path: path.to_owned(), source };
        let file = OpenOptions::new().append(true).create_new(true).open(path).map_err(io("create"))?;
        let head = Head {
            format: FORMAT.to_owned(),
            space: study.space.clone(),
            settings: study.settings.clone(),
            about: about.clone(),
        };
        let mut journal = Journal { path: path.to_owned(), file, study, about };
        journal.write(&head)?;
        Ok(journal)
    }

    /// Opens the journal of a study and repeats what happened in it.
    ///
    /// # Errors
    /// The file cannot be read, or a line other than a last one without its end is damaged.
    pub fn open(path: &Path) -> Result<Journal, JournalError> {
        let io = |what| move |source| JournalError::Io { what, path: path.to_owned(), source };
        let mut file = OpenOptions::new().read(true).append(true).open(path).map_err(io("open"))?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(io("read"))?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        if whole < text.len() {
            file.set_len(whole as u64).map_err(io("shorten"))?;
        }
        let problem = |line: usize, problem: String| JournalError::Line { path: path.to_owned(), line, problem };
        let mut lines = text[..whole].lines().enumerate().map(|(index, line)| (index + 1, line));
        let (_, first) = lines.next().ok_or_else(|| problem(1, "the journal is empty".to_owned()))?;
        let head: Head =
            serde_json::from_str(first).map_err(|error| problem(1, format!("no head of a study: {error}")))?;
        if head.format != FORMAT {
            return Err(problem(1, format!("the format is `{}`, and this program reads `{FORMAT}`", head.format)));
        }
        let mut study = Study::new(head.space, head.settings).map_err(|error| problem(1, error.to_string()))?;
        for (number, line) in lines {
            let event: Event = serde_json::from_str(line).map_err(|error| problem(number, error.to_string()))?;
            study.apply(&event).map_err(|error| problem(number, error.to_string()))?;
        }
        Ok(Journal { path: path.to_owned(), file, study, about: head.about })
    }

    /// The study.
    pub fn study(&self) -> &Study {
        &self.study
    }

    /// The data that the caller keeps with the study.
    pub fn about(&self) -> &serde_json::Value {
        &self.about
    }

    /// Applies an event to the study and writes it.
    ///
    /// # Errors
    /// The event cannot follow those before it, and nothing has changed; or the file cannot be
    /// written, and the study is ahead of its journal, so the search ends.
    pub fn apply(&mut self, event: &Event) -> Result<(), JournalError> {
        self.study
            .apply(event)
            .map_err(|error| JournalError::Event { path: self.path.clone(), problem: error.to_string() })?;
        self.write(event)
    }

    fn write(&mut self, line: &impl Serialize) -> Result<(), JournalError> {
        let io = |source| JournalError::Io { what: "write", path: self.path.clone(), source };
        let mut text = serde_json::to_string(line).map_err(|error| io(error.into()))?;
        text.push('\n');
        self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data()).map_err(io)
    }
}
