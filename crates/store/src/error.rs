//! The error of this crate.

use std::io;

/// An object cannot be found or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}: {what}; {fix}")]
pub struct StoreError {
    /// The object's URL without secrets.
    pub name: String,
    /// The fault.
    pub what: String,
    /// Advice.
    pub fix: String,
}

impl StoreError {
    pub(crate) fn new(name: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name: name.into(), what: what.into(), fix: fix.into() }
    }

    /// An error for work that ended without an answer, which is a defect of this crate.
    pub(crate) fn stopped(name: &str) -> Self {
        Self::new(name, "the thread for requests stopped unexpectedly", "please report this, with the command")
    }

    /// The error inside an error of reading, if it is one of this crate.
    pub fn within(error: &io::Error) -> Option<&StoreError> {
        error.get_ref()?.downcast_ref()
    }
}

impl From<StoreError> for io::Error {
    fn from(error: StoreError) -> Self {
        io::Error::other(error)
    }
}
