//! Records of container files: the common parts of Parquet, tar and MDS.

use std::path::Path;

use super::parse_jsonl_line;
use crate::error::{DataError, Result};

/// Texts of a container file, in order.
pub(super) trait Records: Send {
    /// Reads the next record; `None` after the last.
    ///
    /// # Errors
    /// The file is damaged. A record that merely has no usable text is no error of the file.
    fn next(&mut self) -> Result<Option<Record>>;
}

/// One record of a container file.
pub(super) struct Record {
    /// Counted from 1.
    pub(super) number: u64,
    /// Its text, or the reason why it has none.
    pub(super) text: Result<String>,
}

/// Advice for a record without usable text.
pub(super) const SKIP: &str = "repair it, or pass over such records by `data prepare --skip-invalid`";

/// The text of a record, if its bytes are UTF-8.
pub(super) fn utf8(path: &Path, place: &str, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        DataError::input(path, None, format!("{place} is not UTF-8 (byte {at} of its text)"), SKIP)
    })
}

/// The text in a field of a record that is a JSON object.
pub(super) fn of_json(path: &Path, place: &str, bytes: &[u8], field: &str) -> Result<String> {
    parse_jsonl_line(bytes, field).map_err(|fault| DataError::input(path, None, format!("{place} {fault}"), SKIP))
}

/// An error for a record above the limit, which is fatal because records are held in memory.
pub(super) fn too_long(path: &Path, place: &str, bytes_max: u64) -> DataError {
    let what = format!("{place} is longer than {bytes_max} bytes");
    DataError::input(path, None, what, "divide it, or raise the limit if there is memory for it")
}
