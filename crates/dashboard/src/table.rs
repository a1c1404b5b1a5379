//! A file of JSON records as columns, read as it grows.
//!
//! A run that resumes removes the records of steps that it repeats, by replacing the file. So
//! before a [`Table`] reads on, it compares the last bytes that it has read with the file, and
//! starts again if they differ. A record whose position is not above the last one replaces the
//! records from there on. In both cases a run stays one curve.

use crate::flatten;
use crate::inside::Inside;
use crate::pyramid::{ABSENT, Bucket, Pyramid};
use crate::steps::Steps;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

/// Bytes that are read at a time: some milliseconds, so that nobody waits long for a table.
const SLICE_BYTES: usize = 512 << 10;

/// A longer record is skipped as damaged.
pub(crate) const RECORD_BYTES_MAX: usize = 32 << 20;

/// Further columns of a file are left out.
const COLUMNS_MAX: usize = 20_000;

/// Numbers that are null where they are not finite. Other numbers that are null are not known.
const NULL_IF_NOT_FINITE: [&str; 3] = ["loss", "grad_norm", "perplexity"];

/// Bytes before the read position that must be the same when the file is read on.
const ANCHOR_BYTES: usize = 256;

/// The columns of a file.
#[derive(Debug, Default)]
pub struct Table {
    path: PathBuf,
    /// The keys that place a record: the first that it has does.
    places: &'static [&'static str],
    read: Position,
    steps: Steps,
    names: Vec<String>,
    numbers: HashMap<String, usize>,
    columns: Vec<Pyramid>,
    /// Records that were not read.
    damaged: u64,
    /// Changes when records were removed.
    generation: u64,
    row: Vec<(usize, f64)>,
}

/// The end of what was read of a file.
#[derive(Debug, Default)]
struct Position {
    inode: u64,
    /// The end of the last whole line.
    offset: u64,
    /// The last of the bytes before it.
    anchor: Vec<u8>,
}

/// The result of reading on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Everything was read.
    Done,
    /// There is more.
    More,
}

/// A part of a column, as few buckets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// The first and the last place of each bucket, and its values.
    pub buckets: Vec<(f64, f64, Bucket)>,
}

/// The distances of bins on the horizontal axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences.
    #[default]
    Linear,
    /// Equal ratios.
    Log,
}

impl Table {
    /// The table of a file, which need not exist yet. `places` are the keys that place a record on
    /// the horizontal axis: the first that a record has.
    pub fn new(path: PathBuf, places: &'static [&'static str]) -> Table {
        Table { path, places, ..Table::default() }
    }

    /// Reads the next part of what was appended.
    ///
    /// # Errors
    ///
    /// The file cannot be read. A file that does not exist is an empty one.
    pub fn read(&mut self, inside: &Inside) -> io::Result<Progress> {
        let file = match inside.open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.begin_anew();
                return Ok(Progress::Done);
            }
            Err(error) => return Err(error),
        };
        let about = file.metadata()?;
        if !self.is_continued(&file, about.ino(), about.len())? {
            self.begin_anew();
            self.read.inode = about.ino();
        }
        let waiting = about.len() - self.read.offset;
        let mut slice = vec![0; waiting.min(SLICE_BYTES as u64) as usize];
        loop {
            let bytes = read_at(&file, &mut slice, self.read.offset)?;
            let Some(end) = slice[..bytes].iter().rposition(|byte| *byte == b'\n') else {
                // A record that is being written, or one that is longer than the slice.
                if (bytes as u64) < waiting && slice.len() < RECORD_BYTES_MAX {
                    slice.resize(waiting.min(2 * slice.len() as u64) as usize, 0);
                    continue;
                }
                if slice.len() >= RECORD_BYTES_MAX {
                    self.damaged += 1;
                    self.advance(&slice[..bytes]);
                    return Ok(Progress::More);
                }
                return Ok(Progress::Done);
            };
            for line in slice[..end].split(|byte| *byte == b'\n') {
                self.record(line);
            }
            self.advance(&slice[..=end]);
            return Ok(if bytes as u64 == waiting { Progress::Done } else { Progress::More });
        }
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// True if there is no record.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Records that are not JSON objects with a place, such as one that a crash cut off.
    pub fn damaged(&self) -> u64 {
        self.damaged
    }

    /// A number that changes whenever records were removed.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The names of the columns, in the order of their first records.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// The places of the records.
    pub fn steps(&self) -> &Steps {
        &self.steps
    }

    /// A column.
    pub fn column(&self, name: &str) -> Option<&Pyramid> {
        self.numbers.get(name).map(|number| &self.columns[*number])
    }

    /// The part of a column from place `from` to place `to`, with one record on each side, in about
    /// `bins` buckets. Each record is in exactly one bucket; if there are at most `bins` records
    /// each has its own.
    pub fn curve(&self, name: &str, from: f64, to: f64, bins: usize, scale: Scale) -> Curve {
        let Some(column) = self.column(name) else { return Curve::default() };
        let above = |at: f64| self.steps.count_below(at.next_up());
        let start = self.steps.count_below(from).saturating_sub(1);
        let end = (above(to) + 1).min(self.steps.len());
        let mut curve = Curve::default();
        if start >= end || from > to {
            return curve;
        }
        let mut add = |start: usize, end: usize| {
            if start < end {
                let bucket = column.range(start, end);
                if !bucket.is_empty() {
                    curve.buckets.push((self.steps.get(start), self.steps.get(end - 1), bucket));
                }
            }
        };
        if end - start <= bins.max(1) {
            (start..end).for_each(|record| add(record, record + 1));
            return curve;
        }
        let (first, last) = (self.steps.get(start), self.steps.get(end - 1));
        let edge = |bin: usize| {
            let part = bin as f64 / bins as f64;
            match scale {
                Scale::Log if first > 0.0 => first * (last / first).powf(part),
                _ => first + (last - first) * part,
            }
        };
        let mut record = start;
        for bin in 1..=bins {
            let next = if bin == bins { end } else { self.steps.count_below(edge(bin)).clamp(record, end) };
            add(record, next);
            record = next;
        }
        curve
    }

    fn is_continued(&mut self, file: &File, inode: u64, len: u64) -> io::Result<bool> {
        let Position { inode: known, offset, anchor } = &self.read;
        if *known != inode || *offset > len {
            return Ok(false);
        }
        let mut now = vec![0; anchor.len()];
        let bytes = read_at(file, &mut now, offset - anchor.len() as u64)?;
        Ok(now[..bytes] == anchor[..])
    }

    fn begin_anew(&mut self) {
        if self.read.offset > 0 {
            self.generation += 1;
        }
        let Table { path, places, generation, .. } = std::mem::take(self);
        *self = Table { generation, ..Table::new(path, places) };
    }

    fn advance(&mut self, bytes: &[u8]) {
        self.read.offset += bytes.len() as u64;
        self.read.anchor.extend(&bytes[bytes.len().saturating_sub(ANCHOR_BYTES)..]);
        let surplus = self.read.anchor.len().saturating_sub(ANCHOR_BYTES);
        self.read.anchor.drain(..surplus);
    }

    fn record(&mut self, line: &[u8]) {
        if line.is_empty() {
            return;
        }
        let Table { numbers, names, columns, row, places, .. } = self;
        row.clear();
        let mut place = (places.len(), f64::NAN);
        let mut expected = 0;
        let result = flatten::numbers(line, &mut |path, value| {
            if let Some(rank) = places.iter().position(|key| *key == path).filter(|rank| *rank < place.0) {
                place = (rank, value);
            }
            if value.is_nan() && !NULL_IF_NOT_FINITE.contains(&path) {
                return;
            }
            // Records have their keys in the same order, so the next column is the likely one.
            let number = match names.get(expected).filter(|name| *name == path) {
                Some(_) => expected,
                None => match numbers.get(path) {
                    Some(number) => *number,
                    None if names.len() == COLUMNS_MAX => return,
                    None => {
                        names.push(path.to_owned());
                        numbers.insert(path.to_owned(), columns.len());
                        columns.push(Pyramid::default());
                        columns.len() - 1
                    }
                },
            };
            expected = number + 1;
            row.push((number, value));
        });
        if result.is_err() || !place.1.is_finite() {
            self.damaged += 1;
            return;
        }
        self.keep_below(place.1);
        let len = self.steps.len();
        for (number, value) in self.row.drain(..) {
            let column = &mut self.columns[number];
            // A key that a record has twice counts once.
            if column.len() <= len {
                (column.len()..len).for_each(|_| column.push(ABSENT));
                column.push(value);
            }
        }
        for column in self.columns.iter_mut() {
            (column.len()..=len).for_each(|_| column.push(ABSENT));
        }
        self.steps.push(place.1);
    }

    /// Removes records from place `at` on.
    fn keep_below(&mut self, at: f64) {
        if self.steps.last().is_none_or(|last| last < at) {
            return;
        }
        let len = self.steps.count_below(at);
        self.steps.truncate(len);
        self.columns.iter_mut().for_each(|column| column.truncate(len));
        self.generation += 1;
    }
}

fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(more) => done += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    struct File(tempfile::TempDir, Inside, Table);

    impl File {
        fn new() -> File {
            let folder = tempfile::tempdir().unwrap();
            let inside = Inside::new(folder.path()).unwrap();
            let table = Table::new(folder.path().join("metrics.jsonl"), &["step"]);
            File(folder, inside, table)
        }

        fn append(&self, text: &str) {
            use std::io::Write;
            let mut file = fs::OpenOptions::new().create(true).append(true).open(&self.2.path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        }

        fn replace(&self, text: &str) {
            let new = self.0.path().join("new");
            fs::write(&new, text).unwrap();
            fs::rename(new, &self.2.path).unwrap();
        }

        fn read(&mut self) -> Vec<(f64, f64)> {
            while self.2.read(&self.1).unwrap() == Progress::More {}
            let table = &self.2;
            let Some(column) = table.column("loss") else { return Vec::new() };
            (0..table.len()).map(|n| (table.steps().get(n), column.values()[n])).collect()
        }
    }

    fn record(step: u32, loss: f64) -> String {
        format!("{{\"step\":{step},\"loss\":{loss}}}\n")
    }

    #[test]
    fn a_file_is_read_as_it_grows_whatever_the_pieces() {
        let mut file = File::new();
        assert_eq!(file.read(), []);
        let text: String = (1..=5).map(|step| record(step, f64::from(step) / 8.0)).collect();
        for (at, _) in text.char_indices() {
            file.append(&text[at..=at]);
            let lines = text[..=at].matches('\n').count();
            assert_eq!(file.read().len(), lines);
        }
        assert_eq!(file.read()[4], (5.0, 0.625));
        assert_eq!(file.2.damaged(), 0);
    }

    #[test]
    fn a_run_that_resumes_is_one_curve() {
        let mut file = File::new();
        file.append(&(1..=9).map(|step| record(step, 1.0)).collect::<String>());
        assert_eq!(file.read().len(), 9);
        // Its records are replaced up to the checkpoint, and go on from there.
        file.replace(&(1..=4).map(|step| record(step, 1.0)).chain([record(5, 2.0)]).collect::<String>());
        let expected = [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (4.0, 1.0), (5.0, 2.0)];
        assert_eq!((file.read(), file.2.generation()), (expected.to_vec(), 1));
        // Another program appends steps that are there already.
        file.append(&(record(4, 3.0) + &record(5, 3.5)));
        let expected = [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (4.0, 3.0), (5.0, 3.5)];
        assert_eq!(file.read(), expected);
        assert_eq!(file.2.column("loss").unwrap().range(0, 5).max, 3.5);
    }

    #[test]
    fn records_may_differ_and_damaged_ones_are_counted() {
        let mut file = File::new();
        file.append("{\"step\":1,\"a\":1}\n\0\0\0\n{\"step\":2,\"loss\":null,\"b\":5,\"mfu\":null}\n{\"loss\":3}\n\n{\"step\":3,\"a\":9}\n");
        let read = file.read();
        assert!(read.len() == 3 && crate::pyramid::is_absent(read[0].1) && read[1].1.is_nan());
        let all = |name: &str| file.2.column(name).map(|column| column.range(0, 3).sum);
        assert_eq!((file.2.damaged(), all("b"), all("a"), all("mfu")), (2, Some(5.0), Some(10.0), None));
        assert_eq!(file.2.curve("loss", 0.0, 9.0, 10, Scale::Linear).buckets.len(), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

        // Whatever the zoom, each record in view is in exactly one bucket, and none is lost.
        #[test]
        fn every_zoom_has_every_record_once(
            len in 1u32..3_000,
            bins in 1usize..400,
            ends in (0u32..3_000, 0u32..3_000),
            is_log in any::<bool>(),
        ) {
            let mut file = File::new();
            file.append(&(1..=len).map(|step| record(step, f64::from(step * 7 % 101))).collect::<String>());
            let records = file.read();
            let (from, to) = (f64::from(ends.0.min(ends.1)), f64::from(ends.0.max(ends.1)));
            let scale = if is_log { Scale::Log } else { Scale::Linear };
            let curve = file.2.curve("loss", from, to, bins, scale);
            prop_assert!(curve.buckets.len() <= bins.max(1));
            prop_assert!(curve.buckets.windows(2).all(|pair| pair[0].1 < pair[1].0));
            let all: Vec<f64> = records.iter().filter(|(step, _)| (from - 1.0..=to + 1.0).contains(step)).map(|(_, loss)| *loss).collect();
            let mut sum = Bucket::EMPTY;
            curve.buckets.iter().for_each(|(.., bucket)| sum.add(bucket));
            // A range beyond the last record shows that record.
            let expected = if from > f64::from(len) + 1.0 { &records[records.len() - 1..] } else { &[] };
            let mut whole = Bucket::EMPTY;
            all.iter().chain(expected.iter().map(|(_, loss)| loss)).for_each(|loss| whole.add(&Bucket::of(*loss)));
            prop_assert_eq!(sum, whole);
        }
    }
}
