//! Warnings: notes to the user that are shown even where other notes are hidden.

use std::fmt::Display;

const MARK: &str = "warning: ";

/// Marks the note `text` as a warning.
pub fn warning(text: impl Display) -> String {
    format!("{MARK}{text}")
}

/// True for a note that [`warning`] made.
pub fn is_warning(note: &str) -> bool {
    note.starts_with(MARK)
}
