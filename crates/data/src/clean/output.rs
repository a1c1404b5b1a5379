//! The files that cleaning writes: documents kept, documents dropped, and a report.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use zstd::stream::write::Encoder;

use crate::atomic::{self, AtomicFile};
use crate::corpus::{Corpus, DROPPED_EXTENSION, Document, Skipped};
use crate::error::{DataError, Result};
use crate::indexed::with_suffix;

/// Level of compression: text shrinks to a third and compressing keeps up with reading.
const LEVEL: i32 = 3;

/// Bytes handed to the file at a time.
const BUFFER_BYTES: usize = 1 << 16;

/// The file of dropped documents.
fn dropped_path(out: &Path) -> PathBuf {
    with_suffix(out, &format!(".{DROPPED_EXTENSION}"))
}

/// One document as it is written.
#[derive(Serialize)]
pub(super) struct Line<'d> {
    pub(super) text: &'d str,
    /// The file that it came from.
    pub(super) source: std::borrow::Cow<'d, str>,
    /// Its line or record there, counted from 1; 0 for a file that is one document.
    pub(super) line: u64,
    /// Number of the document in the corpus, from 0.
    pub(super) number: u64,
    /// The reason why it was dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<&'d str>,
    /// The document that was kept in its place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) duplicate_of: Option<u64>,
}

/// Documents and bytes of text that were dropped for a reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DropCount {
    /// Number of documents.
    pub documents: u64,
    /// Bytes of their text.
    pub bytes: u64,
}

/// Counts of a cleaning.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Documents that were read.
    pub documents: u64,
    /// Bytes of their text.
    pub bytes: u64,
    /// Documents that were kept.
    pub kept: u64,
    /// Bytes of text that were kept, after any change.
    pub kept_bytes: u64,
    /// Dropped documents, by reason.
    pub dropped: BTreeMap<String, DropCount>,
    /// Documents that were kept with a changed text, by the kind of change.
    pub changed: BTreeMap<String, u64>,
    /// Documents without any text.
    pub empty: u64,
    /// Documents that could not be read, where skipping them was asked for.
    pub invalid: u64,
}

impl Report {
    /// Documents that were dropped, for all reasons together.
    pub fn dropped_documents(&self) -> u64 {
        self.dropped.values().map(|count| count.documents).sum()
    }
}

/// The files of one cleaning while they are written.
pub(super) struct Output {
    out: PathBuf,
    kept: Lines,
    /// Begun with the first document that is dropped.
    dropped: Option<Lines>,
    pub(super) report: Report,
}

impl Output {
    /// Starts the files of the prefix `out`, none of which may be read by `corpora`.
    pub(super) fn create(out: &Path, corpora: &[&Corpus]) -> Result<Self> {
        if out.file_name().is_none() {
            return Err(DataError::setting(
                "out",
                format!("{out:?} has no file name"),
                "give a prefix such as data/my",
            ));
        }
        let kept = with_suffix(out, ".jsonl.zst");
        let place = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let written = [place(&kept), place(&dropped_path(out))];
        for file in corpora.iter().flat_map(|corpus| corpus.files()) {
            if written.contains(&place(&file.path)) {
                let what = format!("{} would be read and written", file.path.display());
                return Err(DataError::setting("out", what, "give another prefix"));
            }
        }
        let kept = Lines::create(&kept)?;
        Ok(Self { out: out.to_path_buf(), kept, dropped: None, report: Report::default() })
    }

    /// Counts the next document of `corpus` that was read, and gives its line, without a reason to
    /// drop it.
    pub(super) fn line<'d>(&mut self, corpus: &'d Corpus, document: &'d Document) -> Line<'d> {
        let number = self.report.documents;
        self.report.documents += 1;
        self.report.bytes += document.text.len() as u64;
        Line {
            text: &document.text,
            source: corpus.files()[document.file].path.to_string_lossy(),
            line: document.line,
            number,
            reason: None,
            duplicate_of: None,
        }
    }

    /// Writes a document: to those dropped if it has a reason, else to those kept.
    pub(super) fn write(&mut self, line: &Line<'_>) -> Result<()> {
        let Some(reason) = line.reason else {
            self.report.kept += 1;
            self.report.kept_bytes += line.text.len() as u64;
            return self.kept.write(line);
        };
        let count = self.report.dropped.entry(reason.to_owned()).or_default();
        count.documents += 1;
        count.bytes += line.text.len() as u64;
        let dropped = match &mut self.dropped {
            Some(dropped) => dropped,
            none => none.insert(Lines::create(&dropped_path(&self.out))?),
        };
        dropped.write(line)
    }

    /// Makes the files appear.
    pub(super) fn finish(mut self, skipped: Skipped) -> Result<Report> {
        (self.report.empty, self.report.invalid) = (skipped.empty, skipped.invalid);
        self.kept.finish()?;
        match self.dropped {
            Some(dropped) => dropped.finish()?,
            // That of an earlier run.
            None => atomic::remove_if_present(&dropped_path(&self.out))?,
        }
        let path = with_suffix(&self.out, ".report.json");
        let text = serde_json::to_string_pretty(&self.report).map_err(|e| DataError::io("write", &path)(e.into()))?;
        atomic::write(&path, format!("{text}\n").as_bytes())?;
        Ok(self.report)
    }
}

/// A compressed file of JSON lines.
struct Lines {
    path: PathBuf,
    file: AtomicFile,
    encoder: Encoder<'static, Vec<u8>>,
    line: Vec<u8>,
}

impl Lines {
    fn create(path: &Path) -> Result<Self> {
        let file = AtomicFile::create(path)?;
        let encoder =
            Encoder::new(Vec::with_capacity(2 * BUFFER_BYTES), LEVEL).map_err(DataError::io("create", path))?;
        Ok(Self { path: path.to_path_buf(), file, encoder, line: Vec::new() })
    }

    fn write(&mut self, line: &Line<'_>) -> Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, line).map_err(|e| DataError::io("write", &self.path)(e.into()))?;
        self.line.push(b'\n');
        self.encoder.write_all(&self.line).map_err(DataError::io("write", &self.path))?;
        if self.encoder.get_ref().len() >= BUFFER_BYTES {
            self.file.write(self.encoder.get_ref())?;
            self.encoder.get_mut().clear();
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        let rest = self.encoder.finish().map_err(DataError::io("write", &self.path))?;
        self.file.write(&rest)?;
        self.file.commit()
    }
}
