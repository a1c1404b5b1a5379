//! Notes that somebody should read who reads nothing else.

use std::fmt::Display;

const MARK: &str = "warning: ";

/// The note `text`, marked as a warning: it is shown where other notes are not.
pub fn warning(text: impl Display) -> String {
    format!("{MARK}{text}")
}

/// True for a note that [`warning`] made.
pub fn is_warning(note: &str) -> bool {
    note.starts_with(MARK)
}
