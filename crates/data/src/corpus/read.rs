//! Reads one file after another and one document after another.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use serde::de::{self, Deserialize, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::mds::MdsTexts;
use super::objects::refused;
use super::parquet::ParquetTexts;
use super::records::{Record, Records};
use super::tar::TarTexts;
use super::{Compression, Corpus, Document, Format, OnInvalid, SourceFile};
use crate::error::{DataError, Result};
use trainyard_store::StoreError;

/// Number of bytes read at a time.
const BUFFER_BYTES: usize = 1 << 17;

/// Iterator over the documents of a corpus; ends after the first error.
pub struct Documents<'c> {
    corpus: &'c Corpus,
    next_file: usize,
    open: Option<OpenFile>,
    skipped: Skipped,
    failed: bool,
    /// The document being read. The buffer is kept for its capacity.
    buffer: Vec<u8>,
}

/// The numbers of documents that were skipped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Documents without any text.
    pub empty: u64,
    /// Documents that are not UTF-8, and lines without usable text; zero unless skipping them was
    /// asked for.
    pub invalid: u64,
}

impl std::ops::AddAssign for Skipped {
    fn add_assign(&mut self, other: Self) {
        self.empty += other.empty;
        self.invalid += other.invalid;
    }
}

struct OpenFile {
    file: usize,
    reader: Reader,
    /// Number of lines begun, for messages.
    line: u64,
    /// True once the file has given any bytes.
    has_content: bool,
}

/// The way in which a file gives its documents.
enum Reader {
    /// Bytes, which separators divide.
    Bytes(Box<dyn BufRead + Send>),
    /// Records of a container.
    Records(Box<dyn Records>),
}

/// The reason why a JSONL line was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineFault {
    /// The bytes are not UTF-8.
    #[error("is not UTF-8 at byte {0} of the line")]
    NotUtf8(usize),
    /// The line is not JSON.
    #[error("is not valid JSON ({0})")]
    Json(String),
    /// The line is JSON, but not an object.
    #[error("is not a JSON object")]
    NotObject,
    /// The object has no such field.
    #[error("has no field {field:?} (fields: {found})")]
    Missing {
        /// The field looked for.
        field: String,
        /// The fields that it has, at most ten.
        found: String,
    },
    /// The field holds something else.
    #[error("field {field:?} is not a string")]
    NotString {
        /// The field looked for.
        field: String,
    },
}

impl<'c> Documents<'c> {
    pub(super) fn new(corpus: &'c Corpus) -> Self {
        Self { corpus, next_file: 0, open: None, skipped: Skipped::default(), failed: false, buffer: Vec::new() }
    }

    /// The numbers of documents skipped so far.
    pub fn skipped(&self) -> Skipped {
        self.skipped
    }

    /// Number of files finished so far.
    pub fn files_done(&self) -> usize {
        self.next_file - usize::from(self.open.is_some())
    }

    fn read_next(&mut self) -> Result<Option<Document>> {
        loop {
            let Some(open) = &mut self.open else {
                if self.next_file == self.corpus.files.len() {
                    return Ok(None);
                }
                self.open = Some(open_file(self.corpus, self.next_file)?);
                self.next_file += 1;
                continue;
            };
            let source = &self.corpus.files[open.file];
            let options = &self.corpus.options;
            let path = &source.path;
            let reader = match &mut open.reader {
                Reader::Bytes(reader) => reader,
                Reader::Records(records) => {
                    let Some(Record { number, text }) = records.next()? else {
                        self.open = None;
                        continue;
                    };
                    let file = open.file;
                    match text {
                        Ok(text) if text.is_empty() => self.skipped.empty += 1,
                        Ok(text) => return Ok(Some(Document { text, file, line: number })),
                        Err(_) if options.on_invalid == OnInvalid::Skip => self.skipped.invalid += 1,
                        Err(error) => return Err(error),
                    }
                    continue;
                }
            };
            let is_text = source.format == Format::Text;
            let separator: Option<&[u8]> = match is_text {
                true => options.document_separator.as_deref().map(str::as_bytes),
                false => Some(b"\n"),
            };
            self.buffer.clear();
            let first_line = open.line + 1;
            let limit = options.document_bytes_max;
            let found = read_document(reader, separator, limit, &mut self.buffer)
                .map_err(|reason| read_error(path, source.compression, reason))?;
            if self.buffer.len() as u64 > limit {
                let what = format!("a document is longer than {limit} bytes");
                let fix = match is_text {
                    true => "set a document separator, or raise the limit if there is memory for it",
                    false => "check that it has one object per line, or raise the limit",
                };
                return Err(DataError::input(path, Some(first_line), what, fix));
            }
            if !found {
                if !open.has_content && source.named {
                    return Err(DataError::input(
                        path,
                        None,
                        "is empty",
                        "remove it from the list, or give the right file",
                    ));
                }
                self.skipped.empty += u64::from(!open.has_content);
                self.open = None;
                continue;
            }
            // A byte order mark is no text.
            if !open.has_content && self.buffer.starts_with(b"\xEF\xBB\xBF") {
                self.buffer.drain(..3);
            }
            open.has_content |= !self.buffer.is_empty();
            open.line += match is_text {
                true => self.buffer.iter().filter(|&&b| b == b'\n').count() as u64,
                false => 1,
            };
            let file = open.file;
            let text = match is_text {
                true => take_text(path, first_line, separator, &mut self.buffer),
                false if self.buffer.iter().all(u8::is_ascii_whitespace) => continue,
                false if options.whole_records => whole_line(&self.buffer).map_err(|fault| {
                    DataError::input(path, Some(first_line), fault.to_string(), "repair or remove the line")
                }),
                false => parse_jsonl_line(&self.buffer, &options.field).map_err(|fault| {
                    let fix = match &fault {
                        LineFault::Missing { .. } | LineFault::NotString { .. } => "set the field that holds the text",
                        _ => "repair or remove the line",
                    };
                    DataError::input(path, Some(first_line), fault.to_string(), fix)
                }),
            };
            match text {
                Ok(text) if text.is_empty() => self.skipped.empty += 1,
                Ok(text) => {
                    let line = if is_text { 0 } else { first_line };
                    return Ok(Some(Document { text, file, line }));
                }
                Err(_) if options.on_invalid == OnInvalid::Skip => self.skipped.invalid += 1,
                Err(error) => return Err(error),
            }
        }
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<Document>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.read_next();
        self.failed = next.is_err();
        next.transpose()
    }
}

fn open_file(corpus: &Corpus, file: usize) -> Result<OpenFile> {
    let (source, options) = (&corpus.files[file], &corpus.options);
    let reader = match source.format {
        Format::Text | Format::JsonLines => Reader::Bytes(unpacked(source)?),
        Format::Parquet => Reader::Records(Box::new(ParquetTexts::open(source, options)?)),
        Format::Tar => Reader::Records(Box::new(TarTexts::open(source, options)?)),
        Format::Mds => Reader::Records(Box::new(MdsTexts::open(source, options)?)),
    };
    Ok(OpenFile { file, reader, line: 0, has_content: false })
}

/// The bytes of a file, decompressed.
pub(super) fn unpacked(source: &SourceFile) -> Result<Box<dyn BufRead + Send>> {
    let path = &source.path;
    let raw: Box<dyn BufRead + Send> = match &source.object {
        Some(object) => Box::new(BufReader::with_capacity(BUFFER_BYTES, object.read())),
        None => {
            Box::new(BufReader::with_capacity(BUFFER_BYTES, File::open(path).map_err(DataError::io("open", path))?))
        }
    };
    Ok(match source.compression {
        Compression::None => raw,
        Compression::Gzip => Box::new(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(raw))),
        Compression::Zstd => {
            let decoder = zstd::stream::read::Decoder::with_buffer(raw).map_err(DataError::io("read", path))?;
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        }
    })
}

/// Reads up to and including the next `separator`, or to the end, or until `buffer` is longer than
/// `limit`. Returns false if nothing was left.
fn read_document(
    reader: &mut Box<dyn BufRead + Send>,
    separator: Option<&[u8]>,
    limit: u64,
    buffer: &mut Vec<u8>,
) -> io::Result<bool> {
    let mut rest = reader.take(limit.saturating_add(1));
    match separator {
        None => {
            rest.read_to_end(buffer)?;
        }
        Some(separator) => {
            // Reads up to the separator's last byte, repeatedly, until the bytes read end with the
            // whole separator.
            let last = separator[separator.len() - 1];
            while rest.read_until(last, buffer)? > 0 && !buffer.ends_with(separator) {}
        }
    }
    Ok(!buffer.is_empty())
}

/// Takes the text out of `buffer`, which is left empty, without the separator at its end.
fn take_text(path: &Path, first_line: u64, separator: Option<&[u8]>, buffer: &mut Vec<u8>) -> Result<String> {
    if let Some(separator) = separator
        && buffer.ends_with(separator)
    {
        buffer.truncate(buffer.len() - separator.len());
    }
    String::from_utf8(std::mem::take(buffer)).map_err(|error| {
        let bytes = error.as_bytes();
        let at = error.utf8_error().valid_up_to();
        let line = first_line + bytes[..at].iter().filter(|&&b| b == b'\n').count() as u64;
        let utf16 = bytes.starts_with(b"\xFF\xFE") || bytes.starts_with(b"\xFE\xFF");
        let fix = if utf16 {
            "it looks like UTF-16: convert it to UTF-8, for instance with iconv"
        } else {
            "convert it to UTF-8, for instance with iconv; `data prepare --skip-invalid` passes over such documents"
        };
        DataError::input(path, Some(line), format!("is not UTF-8 (byte {at} of the document)"), fix)
    })
}

/// The words of zstd for a window that is larger than its decoder takes memory for.
const WINDOW_TOO_LARGE: &str = "Frame requires too much memory for decoding";

pub(super) fn read_error(path: &Path, compression: Compression, reason: io::Error) -> DataError {
    if let Some(error) = StoreError::within(&reason) {
        return refused(error.clone());
    }
    if compression == Compression::Zstd && reason.to_string().contains(WINDOW_TOO_LARGE) {
        let what = "is compressed with a window of more than 128 MiB (zstd --long=28 or more), and that is the most \
                    memory that reading takes for one";
        let fix = "compress it again: `zstd -d --long=31 FILE.zst`, then `zstd FILE`";
        return DataError::input(path, None, what, fix);
    }
    let damaged = !matches!(reason.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::IsADirectory);
    let name = match compression {
        Compression::Gzip if damaged => "gzip",
        Compression::Zstd if damaged => "zstd",
        _ => return DataError::io("read", path)(reason),
    };
    let what = format!("the {name} stream is damaged or cut off ({reason})");
    DataError::input(path, None, what, "fetch or compress the file again")
}

/// One JSONL line as it is.
fn whole_line(line: &[u8]) -> Result<String, LineFault> {
    let text = std::str::from_utf8(line).map_err(|e| LineFault::NotUtf8(e.valid_up_to()))?;
    Ok(text.trim().to_owned())
}

/// Returns the string in `field` of one JSONL line. Pure and total: any bytes give a text or the
/// reason why there is none.
///
/// If a field occurs twice, the last one counts, as in Python.
pub fn parse_jsonl_line(line: &[u8], field: &str) -> Result<String, LineFault> {
    let text = std::str::from_utf8(line).map_err(|e| LineFault::NotUtf8(e.valid_up_to()))?;
    if !text.trim_start().starts_with('{') {
        return match serde_json::from_str::<IgnoredAny>(text) {
            Ok(_) => Err(LineFault::NotObject),
            Err(error) => Err(LineFault::Json(error.to_string())),
        };
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let found = Field(field).deserialize(&mut deserializer).and_then(|found| deserializer.end().map(|()| found));
    match found.map_err(|error| LineFault::Json(error.to_string()))? {
        Found::Text(text) => Ok(text),
        Found::Other => Err(LineFault::NotString { field: field.into() }),
        Found::Nothing(names) => Err(LineFault::Missing { field: field.into(), found: names.join(", ") }),
    }
}

enum Found {
    Text(String),
    Other,
    Nothing(Vec<String>),
}

/// Reads one field of an object and skips the others without building them.
struct Field<'f>(&'f str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Found;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Found, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Found;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Found, A::Error> {
        const NAMES_MAX: usize = 10;
        let mut found = Found::Nothing(Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            if name == self.0 {
                found = match map.next_value::<MaybeText>()? {
                    MaybeText(Some(text)) => Found::Text(text),
                    MaybeText(None) => Found::Other,
                };
                continue;
            }
            map.next_value::<IgnoredAny>()?;
            if let Found::Nothing(names) = &mut found
                && names.len() < NAMES_MAX
            {
                names.push(name);
            }
        }
        Ok(found)
    }
}

/// A string, or `None` for a value of another type, which is read and dropped.
struct MaybeText(Option<String>);

impl<'de> Deserialize<'de> for MaybeText {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;
        impl<'de> Visitor<'de> for AnyValue {
            type Value = MaybeText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_str<E>(self, text: &str) -> Result<MaybeText, E> {
                Ok(MaybeText(Some(text.to_owned())))
            }
            fn visit_string<E>(self, text: String) -> Result<MaybeText, E> {
                Ok(MaybeText(Some(text)))
            }
            fn visit_bool<E>(self, _: bool) -> Result<MaybeText, E> {
                Ok(MaybeText(None))
            }
            fn visit_u64<E>(self, _: u64) -> Result<MaybeText, E> {
                Ok(MaybeText(None))
            }
            fn visit_i64<E>(self, _: i64) -> Result<MaybeText, E> {
                Ok(MaybeText(None))
            }
            fn visit_f64<E>(self, _: f64) -> Result<MaybeText, E> {
                Ok(MaybeText(None))
            }
            fn visit_unit<E>(self) -> Result<MaybeText, E> {
                Ok(MaybeText(None))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<MaybeText, A::Error> {
                while sequence.next_element::<IgnoredAny>()?.is_some() {}
                Ok(MaybeText(None))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MaybeText, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(MaybeText(None))
            }
        }
        deserializer.deserialize_any(AnyValue)
    }
}
