//! The errors between a text on disk and a batch. Each says which file is wrong, where, and what to
//! do.

use std::io;
use std::path::{Path, PathBuf};

/// Shorthand for results of this crate.
pub type Result<T, E = DataError> = std::result::Result<T, E>;

/// All errors of this crate. Every message names the object, the fault, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The operating system refused: missing file, permission, full disk.
    #[error("cannot {action} {}{}: {reason}{}", path.display(), place_of(path, reason), io_advice(reason))]
    Io {
        /// A verb: `open`, `read`, `create`, `write`, `sync`, `rename`, `list`, `map`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's own words.
        reason: io::Error,
    },
    /// A text, JSONL or compressed file whose content cannot be used.
    #[error("{}{}: {what}; {fix}", path.display(), line.map(|l| format!(":{l}")).unwrap_or_default())]
    Input {
        /// The file.
        path: PathBuf,
        /// Line counted from 1, if the fault belongs to one.
        line: Option<u64>,
        /// The fault.
        what: String,
        /// Advice.
        fix: String,
    },
    /// A token file (`.bin`, `.idx` or its sidecar) is damaged or contradicts itself.
    #[error("{}: {what}; {fix}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// The fault.
        what: String,
        /// Advice.
        fix: String,
    },
    /// A tokenizer cannot be read, trained or used.
    #[error("tokenizer {origin}: {what}; {fix}")]
    Tokenizer {
        /// Its file, or its kind if it has none.
        origin: String,
        /// The fault.
        what: String,
        /// Advice.
        fix: String,
    },
    /// Tokens or characters lie outside the vocabulary that they are used with.
    #[error("{origin}: {what}; {fix}")]
    Vocabulary {
        /// The data or text.
        origin: String,
        /// The fault.
        what: String,
        /// Advice.
        fix: String,
    },
    /// There is less data than the request needs.
    #[error("{what}; {fix}")]
    TooLittle {
        /// The amount of data, and the amount that was needed.
        what: String,
        /// Advice.
        fix: String,
    },
    /// A setting is outside its range.
    #[error("{name}: {what}; {fix}")]
    Setting {
        /// The setting's name as the caller spells it.
        name: &'static str,
        /// The fault.
        what: String,
        /// Advice.
        fix: String,
    },
    /// A worker thread ended without an answer, which is a defect of this crate.
    #[error(
        "a data worker stopped unexpectedly while {doing}; please report this, with the command and the data it ran on"
    )]
    Worker {
        /// Task of the worker.
        doing: &'static str,
    },
    /// The loader already reported its error and delivers nothing more.
    #[error("the loader stopped after the error it reported before; build a new one to continue")]
    Stopped,
}

impl DataError {
    /// An operating system error on `path`; curried for `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DataError {
        let path = path.to_path_buf();
        move |reason| DataError::Io { action, path, reason }
    }

    pub(crate) fn input(path: &Path, line: Option<u64>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        DataError::Input { path: path.to_path_buf(), line, what: what.into(), fix: fix.into() }
    }

    pub(crate) fn token_file(path: &Path, what: impl Into<String>, fix: impl Into<String>) -> Self {
        DataError::TokenFile { path: path.to_path_buf(), what: what.into(), fix: fix.into() }
    }

    pub(crate) fn tokenizer(origin: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        DataError::Tokenizer { origin: origin.into(), what: what.into(), fix: fix.into() }
    }

    pub(crate) fn setting(name: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        DataError::Setting { name, what: what.into(), fix: fix.into() }
    }
}

/// ` (looked for at /absolute/path)` for an error that says of a relative path that it is not
/// there, and nothing for any other.
pub fn place_of(path: &Path, error: &io::Error) -> String {
    let is_absent = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
    match std::path::absolute(path) {
        Ok(absolute) if is_absent && path.is_relative() => format!(" (looked for at {})", absolute.display()),
        _ => String::new(),
    }
}

/// Advice on the most common errors of the system.
fn io_advice(reason: &io::Error) -> &'static str {
    match reason.kind() {
        io::ErrorKind::NotFound => "; check the path",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; check the permissions, or choose another folder"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space or choose another folder (nothing that was complete has been touched)"
        }
        _ => "",
    }
}
