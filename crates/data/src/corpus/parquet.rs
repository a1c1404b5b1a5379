//! Texts of a column of a Parquet file.
//!
//! Only the column's pages are read, some records at a time, of a file and of an object alike.
//! Columns of other types, and lists, are refused by name.

use std::path::PathBuf;

use parquet::basic::Type;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::chunks::Chunks;
use super::objects::refused;
use super::records::{Record, Records, SKIP, too_long, utf8};
use super::{CorpusOptions, SourceFile};
use crate::error::{DataError, Result};
use trainyard_store::StoreError;

/// Records decoded at a time. They share the memory of their page.
const BATCH: usize = 64;

pub(super) struct ParquetTexts {
    path: PathBuf,
    field: String,
    bytes_max: u64,
    file: SerializedFileReader<Chunks>,
    /// The bytes under `file`.
    chunks: Chunks,
    /// The column with the text.
    column: usize,
    next_group: usize,
    open: Option<ColumnReaderImpl<ByteArrayType>>,
    /// Definition level of a value that is there.
    defined: i16,
    levels: Vec<i16>,
    values: Vec<ByteArray>,
    /// The next entry of `levels` and of `values`.
    next: (usize, usize),
    number: u64,
}

impl ParquetTexts {
    pub(super) fn open(source: &SourceFile, options: &CorpusOptions) -> Result<Self> {
        let path = &source.path;
        let chunks = Chunks::open(source)?;
        let file = SerializedFileReader::new(chunks.clone()).map_err(|error| fault(path, error))?;
        let schema = file.metadata().file_metadata().schema_descr_ptr();
        let name = |at: usize| schema.column(at).path().string();
        let Some(column) = (0..schema.num_columns()).find(|&at| name(at) == options.field) else {
            const NAMES_MAX: usize = 10;
            let names: Vec<String> = (0..schema.num_columns().min(NAMES_MAX)).map(name).collect();
            let what = format!("has no column {:?} (columns: {})", options.field, names.join(", "));
            return Err(DataError::input(path, None, what, "set the column that holds the text"));
        };
        let about = schema.column(column);
        if about.physical_type() != Type::BYTE_ARRAY || about.max_rep_level() > 0 {
            let kind = if about.max_rep_level() > 0 { "a list".into() } else { about.physical_type().to_string() };
            let what = format!("column {:?} is {kind}, not text", options.field);
            return Err(DataError::input(path, None, what, "set the column that holds the text"));
        }
        let defined = about.max_def_level();
        Ok(Self {
            path: path.clone(),
            field: options.field.clone(),
            bytes_max: options.document_bytes_max,
            file,
            chunks,
            column,
            next_group: 0,
            open: None,
            defined,
            levels: Vec::new(),
            values: Vec::new(),
            next: (0, 0),
            number: 0,
        })
    }

    /// Decodes the next records; false after the last.
    fn refill(&mut self) -> Result<bool> {
        loop {
            let Some(open) = &mut self.open else {
                if self.next_group == self.file.num_row_groups() {
                    return Ok(false);
                }
                let group = self.file.get_row_group(self.next_group).map_err(|error| fault(&self.path, error))?;
                self.next_group += 1;
                let (start, bytes) = group.metadata().column(self.column).byte_range();
                self.chunks.will_read(start..start.saturating_add(bytes));
                let reader = group.get_column_reader(self.column).map_err(|error| fault(&self.path, error))?;
                let ColumnReader::ByteArrayColumnReader(reader) = reader else {
                    let what = format!("column {:?} changes its type between row groups", self.field);
                    return Err(DataError::input(&self.path, None, what, "write the file again"));
                };
                self.open = Some(reader);
                continue;
            };
            self.levels.clear();
            self.values.clear();
            self.next = (0, 0);
            let levels = (self.defined > 0).then_some(&mut self.levels);
            let (records, values, _) =
                open.read_records(BATCH, levels, None, &mut self.values).map_err(|error| fault(&self.path, error))?;
            if records == 0 {
                self.open = None;
                continue;
            }
            if self.defined == 0 {
                self.levels.resize(values, 0);
            }
            return Ok(true);
        }
    }
}

impl Records for ParquetTexts {
    fn next(&mut self) -> Result<Option<Record>> {
        if self.next.0 == self.levels.len() && !self.refill()? {
            return Ok(None);
        }
        self.number += 1;
        let (number, place) = (self.number, format!("row {}", self.number));
        let is_there = self.levels[self.next.0] == self.defined;
        self.next.0 += 1;
        if !is_there {
            let what = format!("{place} has no value in column {:?}", self.field);
            return Ok(Some(Record { number, text: Err(DataError::input(&self.path, None, what, SKIP)) }));
        }
        let Some(value) = self.values.get(self.next.1) else {
            let what = "holds fewer values than it says";
            return Err(DataError::input(&self.path, None, what, "fetch or write the file again"));
        };
        self.next.1 += 1;
        if value.len() as u64 > self.bytes_max {
            return Err(too_long(&self.path, &place, self.bytes_max));
        }
        Ok(Some(Record { number, text: utf8(&self.path, &place, value.data().to_vec()) }))
    }
}

/// The error of a file that the library does not read.
pub(crate) fn fault(path: &std::path::Path, error: ParquetError) -> DataError {
    if let ParquetError::External(inner) = &error
        && let Some(error) = inner.downcast_ref().or_else(|| inner.downcast_ref().and_then(StoreError::within))
    {
        return refused(error.clone());
    }
    let what = format!("is damaged, or not a Parquet file that can be read ({error})");
    let fix = match error.to_string().contains("feature") {
        true => "write it again with zstd, Snappy, gzip or without compression",
        false => "fetch or write the file again",
    };
    DataError::input(path, None, what, fix)
}
