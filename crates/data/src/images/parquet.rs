//! Images in Parquet files, as Hugging Face's `datasets` writes them: a column of structures with a
//! field `bytes`, and a column of classes.
//!
//! Opening reads the footer and the classes. An image is found by its row group and its row there:
//! pages before its own are passed over by their headers, and its page alone is decompressed. So
//! images in any order cost a page each, of 1 MiB as most programs write them.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{ConvertedType, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, DataType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::SchemaDescriptor;
use serde_json::Value;
use trainyard_tensor::mapped::MappedFile;
use xxhash_rust::xxh3::xxh3_128;

use super::index::{Label, label_of_number, label_of_text};
use crate::corpus::parquet_fault;
use crate::error::{DataError, Result};

/// Columns that hold classes if nothing else says which one does, the first that there is.
const CLASS_COLUMNS: [&str; 4] = ["label", "labels", "class", "cls"];
/// The key of the metadata of Hugging Face's `datasets`.
const METADATA: &str = "huggingface";
/// Bytes at the end of a file by which it is identified. Its footer stands there.
const IDENTIFYING_BYTES: usize = 1 << 20;
const AGAIN: &str = "fetch or write the file again";

/// The images of a file.
pub(super) struct Rows {
    path: PathBuf,
    file: SerializedFileReader<Bytes>,
    map: Arc<MappedFile>,
    /// The column with the encoded images.
    column: usize,
    /// Identifies the file: the time when it was written, and its last bytes.
    identity: u128,
}

/// The label of a row, and where its image lies.
pub(super) struct Row {
    pub label: Label,
    pub group: u64,
    /// Counted in its row group.
    pub row: u64,
    /// Bytes of an image of its row group, on average.
    pub bytes: u64,
}

/// A mapped file under [`Bytes`].
struct Mapped(Arc<MappedFile>);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows").field("path", &self.path).field("column", &self.column).finish_non_exhaustive()
    }
}

impl Rows {
    /// Opens a file and reads the classes of its rows.
    ///
    /// # Errors
    /// The file cannot be read; it has no column of images or of classes, or several; a row has no
    /// class, or one that has no name.
    pub fn open(path: &Path) -> Result<(Self, Vec<Row>)> {
        let map = Arc::new(MappedFile::open(path).map_err(DataError::io("open", path))?);
        let bytes = Bytes::from_owner(Mapped(Arc::clone(&map)));
        let file = SerializedFileReader::new(bytes).map_err(|error| parquet_fault(path, error))?;
        let schema = file.metadata().file_metadata().schema_descr_ptr();
        let features = features(&file);
        let refused = |what: String, fix: &str| DataError::input(path, None, what, fix);
        let column = image_column(&schema).map_err(|(what, fix)| refused(what, fix))?;
        let (class, names) = class_column(&schema, &features).map_err(|(what, fix)| refused(what, fix))?;
        let written = fs::metadata(path).and_then(|about| about.modified()).map_err(DataError::io("open", path))?;
        let end = &map[map.len().saturating_sub(IDENTIFYING_BYTES)..];
        let identity = xxh3_128(format!("{written:?} {} {:032x}", map.len(), xxh3_128(end)).as_bytes());
        let this = Self { path: path.to_owned(), file, map, column, identity };
        let mut rows = Vec::new();
        for group in 0..this.file.num_row_groups() {
            let about = this.file.metadata().row_group(group);
            let count = usize::try_from(about.num_rows()).unwrap_or(0);
            let bytes = about.column(this.column).uncompressed_size().max(0) as u64 / count.max(1) as u64;
            let labels = this.labels(group, class, count, names.as_deref(), rows.len())?;
            let places = labels.into_iter().zip(0..);
            rows.extend(places.map(|(label, row)| Row { label, group: group as u64, row, bytes }));
        }
        if rows.is_empty() {
            return Err(DataError::input(path, None, "holds no images", "give the right file"));
        }
        Ok((this, rows))
    }

    /// The labels of a row group, whose first row is row `first` of the file.
    fn labels(
        &self,
        group: usize,
        column: usize,
        count: usize,
        names: Option<&[String]>,
        first: usize,
    ) -> Result<Vec<Label>> {
        let row_of = |row: usize| format!("row {}", first + row + 1);
        let bad = |row: usize, what: String| {
            let what = format!("{} {what}", row_of(row));
            DataError::input(&self.path, None, what, "write a class number or name")
        };
        let number = |row: usize, number: i64| match names {
            Some(names) => match usize::try_from(number).ok().and_then(|number| names.get(number)) {
                Some(name) => Ok(Label::Name(name.clone())),
                None => Err(bad(
                    row,
                    format!("has the class {number}, and the file names classes 0 to {}", names.len() - 1),
                )),
            },
            None => label_of_number(number).map_err(|what| bad(row, what)),
        };
        let text = |row: usize, bytes: &ByteArray| {
            let text = std::str::from_utf8(bytes.data()).map_err(|_| bad(row, "has a class that is no text".into()))?;
            label_of_text(text).map_err(|what| bad(row, what))?.ok_or_else(|| bad(row, "has no class".into()))
        };
        let reader = self.reader(group, column)?;
        let labels: Vec<Option<Result<Label>>> = match reader {
            ColumnReader::Int32ColumnReader(reader) => {
                self.values(reader, column, count, |row, value| number(row, i64::from(*value)))?
            }
            ColumnReader::Int64ColumnReader(reader) => {
                self.values(reader, column, count, |row, value| number(row, *value))?
            }
            ColumnReader::ByteArrayColumnReader(reader) => self.values(reader, column, count, text)?,
            _ => {
                return Err(DataError::input(&self.path, None, "has classes that are neither numbers nor text", AGAIN));
            }
        };
        if labels.len() != count {
            let what = format!("holds {} classes in row group {group}, which has {count} rows", labels.len());
            return Err(DataError::input(&self.path, None, what, AGAIN));
        }
        let there = |(row, label): (usize, Option<Result<Label>>)| {
            label.unwrap_or_else(|| Err(bad(row, "has no class".into())))
        };
        labels.into_iter().enumerate().map(there).collect()
    }

    fn reader(&self, group: usize, column: usize) -> Result<ColumnReader> {
        let group = self.file.get_row_group(group).map_err(|error| parquet_fault(&self.path, error))?;
        group.get_column_reader(column).map_err(|error| parquet_fault(&self.path, error))
    }

    /// Reads up to `count` values of a column, None where there is none.
    fn values<T: DataType, V>(
        &self,
        mut reader: ColumnReaderImpl<T>,
        column: usize,
        count: usize,
        value_of: impl Fn(usize, &T::T) -> V,
    ) -> Result<Vec<Option<V>>> {
        // The definition level of a value that is there; 0 if all are.
        let defined = self.file.metadata().file_metadata().schema_descr().column(column).max_def_level();
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let mut all = Vec::new();
        while all.len() < count {
            levels.clear();
            values.clear();
            let asked = (count - all.len()).min(4096);
            let read = reader.read_records(asked, Some(&mut levels), None, &mut values);
            let (records, ..) = read.map_err(|error| parquet_fault(&self.path, error))?;
            if records == 0 {
                break;
            }
            let mut next = values.iter();
            for at in 0..records {
                let is_there = defined == 0 || levels.get(at) == Some(&defined);
                let row = all.len();
                all.push(if is_there { next.next().map(|value| value_of(row, value)) } else { None });
            }
        }
        Ok(all)
    }

    /// Gives the encoded bytes of an image to `read`. `number` is its row in the file, from 1.
    ///
    /// # Errors
    /// The file is damaged; the row has no bytes.
    pub fn with_bytes<R>(
        &self,
        (group, row): (u64, u64),
        number: &str,
        read: impl FnOnce(&[u8]) -> Result<R>,
    ) -> Result<R> {
        let ColumnReader::ByteArrayColumnReader(mut reader) = self.reader(group as usize, self.column)? else {
            return Err(DataError::input(&self.path, None, "changes the type of its images between row groups", AGAIN));
        };
        let fault = |error: ParquetError| parquet_fault(&self.path, error);
        let passed = reader.skip_records(row as usize).map_err(fault)?;
        let (mut levels, mut values) = (Vec::new(), Vec::new());
        let (records, ..) = reader.read_records(1, Some(&mut levels), None, &mut values).map_err(fault)?;
        if passed as u64 != row || records != 1 {
            return Err(DataError::input(&self.path, None, format!("ends before {number}"), AGAIN));
        }
        match values.first() {
            Some(bytes) => read(bytes.data()),
            None => {
                let fix = "write the data set with its images inside: paths are not followed";
                Err(DataError::input(&self.path, None, format!("{number} has no bytes of an image"), fix))
            }
        }
    }

    /// Identifies the image at (row group, row): by its place, by the end of the file, where the
    /// lengths and statistics of all its columns stand, and by the time when the file was written.
    pub fn identity(&self, place: (u64, u64)) -> u128 {
        xxh3_128(format!("{:032x} {} {} {}", self.identity, self.column, place.0, place.1).as_bytes())
    }

    /// Asks the kernel to bring the file into memory in the background.
    pub fn warm(&self) {
        self.map.warm();
    }
}

type Refusal = (String, &'static str);

/// The names of the leaves of a schema, for messages.
fn listed(schema: &SchemaDescriptor) -> String {
    const NAMES_MAX: usize = 10;
    let names: Vec<String> =
        (0..schema.num_columns().min(NAMES_MAX)).map(|at| schema.column(at).path().string()).collect();
    names.join(", ")
}

/// The column with encoded images: the field `bytes` of a structure, else the one column of bytes
/// that are no text.
fn image_column(schema: &SchemaDescriptor) -> std::result::Result<usize, Refusal> {
    let bytes = |at: &usize| {
        let column = schema.column(*at);
        column.physical_type() == Type::BYTE_ARRAY && column.max_rep_level() == 0
    };
    let field = |at: &usize| matches!(schema.column(*at).path().parts(), [_, .., last] if last == "bytes");
    let plain = |at: &usize| {
        let column = schema.column(*at);
        column.path().parts().len() == 1
            && column.converted_type() == ConvertedType::NONE
            && column.logical_type_ref().is_none()
    };
    let all: Vec<usize> = (0..schema.num_columns()).filter(bytes).collect();
    let mut found: Vec<usize> = all.iter().copied().filter(field).collect();
    if found.is_empty() {
        found = all.into_iter().filter(plain).collect();
    }
    let names: Vec<String> = found.iter().map(|at| schema.column(*at).path().string()).collect();
    match found[..] {
        [one] => Ok(one),
        [] => Err((
            format!("has no column of images (columns: {})", listed(schema)),
            "write images as structures with a field \"bytes\", as Hugging Face's datasets does",
        )),
        _ => Err((format!("has several columns of images ({})", names.join(", ")), "keep one of them")),
    }
}

/// The column of classes, and their names if the file has them.
fn class_column(
    schema: &SchemaDescriptor,
    features: &Value,
) -> std::result::Result<(usize, Option<Vec<String>>), Refusal> {
    let place = |name: &str| {
        (0..schema.num_columns()).find(|&at| {
            let column = schema.column(at);
            column.path().parts() == [name] && column.max_rep_level() == 0
        })
    };
    let is_class = |feature: &Value| feature.get("_type").and_then(Value::as_str) == Some("ClassLabel");
    let declared: Vec<(&String, usize)> = features
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, feature)| is_class(feature))
        .filter_map(|(name, _)| Some((name, place(name)?)))
        .collect();
    let usual = || CLASS_COLUMNS.iter().find_map(|name| place(name).map(|at| ((*name).to_owned(), at)));
    let (name, at) = match &declared[..] {
        [(name, at)] => ((*name).clone(), *at),
        [] => usual().ok_or_else(|| {
            (format!("has no column of classes (columns: {})", listed(schema)), "name the column of classes \"label\"")
        })?,
        several => match several.iter().find(|(name, _)| CLASS_COLUMNS.contains(&name.as_str())) {
            Some((name, at)) => ((*name).clone(), *at),
            None => {
                let mut names: Vec<&str> = several.iter().map(|(name, _)| name.as_str()).collect();
                names.sort_unstable();
                let what = format!("has several columns of classes ({})", names.join(", "));
                return Err((what, "keep one of them, or name one \"label\""));
            }
        },
    };
    let names = features.get(&name).and_then(|feature| feature.get("names")).and_then(Value::as_array);
    let names: Option<Vec<String>> =
        names.and_then(|names| names.iter().map(|name| name.as_str().map(str::to_owned)).collect());
    // Two classes of one name, as ImageNet has them, stay two by their numbers.
    let is_unique = |names: &Vec<String>| names.iter().collect::<BTreeSet<_>>().len() == names.len();
    Ok((at, names.filter(|names| !names.is_empty() && is_unique(names))))
}

/// The features that Hugging Face's `datasets` describes in a file; null without them.
fn features(file: &SerializedFileReader<Bytes>) -> Value {
    let metadata = file.metadata().file_metadata().key_value_metadata().into_iter().flatten();
    let text = metadata.filter(|entry| entry.key == METADATA).find_map(|entry| entry.value.as_deref());
    let all: Value = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    all.pointer("/info/features").cloned().unwrap_or_default()
}
