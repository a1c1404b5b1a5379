//! A file of JSON objects, one per line, each with a `step`. Records are appended; later ones are
//! removed when a run resumes.
//!
//! A process that dies may leave half a line, or a block of zeros. A run that resumes from an
//! earlier checkpoint finds records of steps that it will repeat. Opening removes both: it writes
//! the lines to keep to a new file that replaces the old one, so that a crash in between loses
//! nothing.

use super::MetricsError;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The open file.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: File,
    last_step: Option<u64>,
}

/// The lines that opening removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repair {
    /// Damaged lines, for example cut off by a crash.
    pub damaged: u64,
    /// Records of steps that the run will repeat.
    pub later: u64,
}

impl Repair {
    /// A sentence for the user about the removed lines, if there were any.
    pub fn notice(&self, name: &str) -> Option<String> {
        (*self != Repair::default()).then(|| {
            let Repair { damaged, later } = self;
            format!("{name}: removed {later} records after the resumed step and {damaged} damaged lines")
        })
    }
}

impl JsonLines {
    /// Opens or creates the file and keeps the records whose step is at most `keep`.
    pub fn open(path: &Path, keep: u64) -> Result<(JsonLines, Repair), MetricsError> {
        let (last_step, repair) = match File::open(path) {
            // Most files need no repair, so the first pass reads without copying.
            Ok(file) => select(file, keep, &mut std::io::sink()).map_err(MetricsError::io("read", path))?,
            Err(error) if error.kind() == ErrorKind::NotFound => Default::default(),
            Err(error) => return Err(MetricsError::io("open", path)(error)),
        };
        if repair != Repair::default() {
            let temporary = path.with_extension("jsonl.new");
            let written = File::create(&temporary).and_then(|file| {
                let mut kept = BufWriter::new(file);
                select(File::open(path)?, keep, &mut kept)?;
                kept.into_inner().map_err(|error| error.into_error())?.sync_all()
            });
            written.map_err(MetricsError::io("write", &temporary))?;
            std::fs::rename(&temporary, path).map_err(MetricsError::io("replace", path))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(MetricsError::io("open", path))?;
        Ok((JsonLines { path: path.to_owned(), file, last_step }, repair))
    }

    /// Appends one record; it is in the file when this returns, and durable after
    /// [`JsonLines::sync`].
    pub fn append<T: Serialize>(&mut self, record: &T) -> Result<(), MetricsError> {
        let mut line =
            serde_json::to_vec(record).map_err(|e| MetricsError::io("encode a record for", &self.path)(e.into()))?;
        line.push(b'\n');
        // A line is a single write, so that a concurrent reader sees whole records.
        self.file.write_all(&line).map_err(MetricsError::io("append to", &self.path))
    }

    /// Makes the appended records durable.
    pub fn sync(&mut self) -> Result<(), MetricsError> {
        self.file.sync_data().map_err(MetricsError::io("sync", &self.path))
    }

    /// The step of the last record that was there when the file was opened.
    pub fn last_step(&self) -> Option<u64> {
        self.last_step
    }
}

/// Writes the lines to keep to `kept`. Returns the last step among them, and the removed lines.
fn select(file: File, keep: u64, kept: &mut dyn Write) -> std::io::Result<(Option<u64>, Repair)> {
    // The whole line must be JSON, not only the field that is read.
    let step_of = |line: &[u8]| serde_json::from_slice::<serde_json::Value>(line).ok()?.get("step")?.as_u64();
    let mut reader = BufReader::new(file);
    let (mut last, mut repair, mut line) = (None, Repair::default(), Vec::new());
    while reader.read_until(b'\n', &mut line)? > 0 {
        let whole = line.ends_with(b"\n");
        match step_of(&line) {
            Some(step) if whole && step <= keep => {
                last = Some(step);
                kept.write_all(&line)?;
            }
            Some(_) if whole => repair.later += 1,
            _ => repair.damaged += 1,
        }
        line.clear();
    }
    Ok((last, repair))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::tests::sample;
    use proptest::prelude::*;

    fn steps(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        let step = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap();
        text.lines().map(step).collect()
    }

    #[test]
    fn resuming_removes_later_records_so_that_no_step_appears_twice() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let (mut lines, repair) = JsonLines::open(&path, 0).unwrap();
        assert_eq!(repair, Repair::default());
        (1..=10).for_each(|step| lines.append(&sample(step)).unwrap());
        let (mut lines, repair) = JsonLines::open(&path, 6).unwrap();
        assert_eq!((repair, lines.last_step()), (Repair { damaged: 0, later: 4 }, Some(6)));
        (7..=12).for_each(|step| lines.append(&sample(step)).unwrap());
        lines.sync().unwrap();
        assert_eq!(steps(&path), (1..=12).collect::<Vec<_>>());
        assert!(repair.notice("metrics.jsonl").unwrap().contains("4 records"));
    }

    #[test]
    fn a_file_cut_anywhere_keeps_its_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let (mut lines, _) = JsonLines::open(&path, 0).unwrap();
        (1..=3).for_each(|step| lines.append(&sample(step)).unwrap());
        let whole = std::fs::read(&path).unwrap();
        let ends = (0..whole.len()).filter(|at| whole[*at] == b'\n').flat_map(|at| [at, at + 1]);
        for cut in (0..=whole.len()).step_by(17).chain(ends) {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut lines, _) = JsonLines::open(&path, u64::MAX).unwrap();
            lines.append(&sample(99)).unwrap();
            let mut want: Vec<u64> = (1..=whole[..cut].iter().filter(|byte| **byte == b'\n').count() as u64).collect();
            want.push(99);
            assert_eq!(steps(&path), want, "cut at {cut}");
        }
    }

    #[test]
    fn an_unwritable_place_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing/metrics.jsonl");
        let error = JsonLines::open(&path, 0).unwrap_err().to_string();
        assert!(error.contains("missing/metrics.jsonl"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn damage_anywhere_leaves_a_file_of_records(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("metrics.jsonl");
            let (mut lines, _) = JsonLines::open(&path, 0).unwrap();
            (1..=3).for_each(|step| lines.append(&sample(step)).unwrap());
            let mut bytes = std::fs::read(&path).unwrap();
            for (index, value) in flips {
                let at = index.index(bytes.len());
                bytes[at] = value;
            }
            std::fs::write(&path, &bytes).unwrap();
            let (mut lines, _) = JsonLines::open(&path, u64::MAX).unwrap();
            lines.append(&sample(99)).unwrap();
            for line in std::fs::read(&path).unwrap().split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                prop_assert!(serde_json::from_slice::<serde_json::Value>(line).is_ok());
            }
        }
    }
}
