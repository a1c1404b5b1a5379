//! Streams documents out of files and folders: memory holds one document at a time, never the
//! corpus.
//!
//! A text file is one document, or several if a separator is set. A line of a `.jsonl` file is one
//! document, whose text is in a field. So is a row of a Parquet file, a sample of a WebDataset tar
//! and a sample of a shard of MosaicML's MDS. `.gz` and `.zst` forms are decompressed on the fly.
//! Folders are walked in the order of their names, so that a corpus has the same order on every
//! machine.
//!
//! A URL names objects of a store. They are read as streams, and as files in every other way.
//!
//! This module does not guess encodings, filter for quality or remove duplicates.

mod chunks;
mod list;
mod mds;
mod objects;
mod parquet;
mod read;
mod records;
mod tar;

use std::path::{Path, PathBuf};

pub use list::{DROPPED_EXTENSION, expand, rust_sources};
pub use mds::{MdsFault, MdsLayout, parse_mds};
pub use objects::printable;
pub use read::{Documents, LineFault, Skipped, parse_jsonl_line};

pub(crate) use parquet::fault as parquet_fault;

use crate::error::{DataError, Result};
use trainyard_store::{Object, Store};

pub use trainyard_store::{CACHE_BYTES, CacheOptions, StoreOptions, Traffic, is_url};

/// The way in which files become documents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorpusOptions {
    /// The field of a JSONL object that holds the text.
    pub field: String,
    /// True to take whole records rather than one field of them: lines of JSONL files.
    pub whole_records: bool,
    /// The separator between documents inside a text file. Without it a file is one document.
    pub document_separator: Option<String>,
    /// A longer document is an error: documents are held in memory, and a small compressed file can
    /// unpack to anything.
    pub document_bytes_max: u64,
    /// Treatment of a document that is not UTF-8, or of a JSONL line without usable text.
    pub on_invalid: OnInvalid,
    /// The way in which objects of stores are read.
    pub store: StoreOptions,
}

impl Default for CorpusOptions {
    fn default() -> Self {
        Self {
            field: "text".into(),
            whole_records: false,
            document_separator: None,
            document_bytes_max: 1 << 30,
            on_invalid: OnInvalid::Fail,
            store: StoreOptions::default(),
        }
    }
}

/// Treatment of a document that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnInvalid {
    /// Stop with an error that names it.
    Fail,
    /// Count it and go on.
    Skip,
}

impl OnInvalid {
    /// Skips it if the user says so.
    pub fn skipping(skips: bool) -> OnInvalid {
        if skips { OnInvalid::Skip } else { OnInvalid::Fail }
    }
}

/// A list of files, read on demand.
#[derive(Debug, Clone)]
pub struct Corpus {
    files: Vec<SourceFile>,
    options: CorpusOptions,
    /// The store of its objects; None if all are files.
    store: Option<Store>,
}

/// One file of a corpus, as it was when listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Its place: a path, or a URL without its query.
    pub path: PathBuf,
    /// Its size, packed as it is.
    pub bytes: u64,
    /// Last modification, nanoseconds since 1970.
    pub modified_ns: u64,
    /// True if the user named the file, false if it was found in a folder. A named file that is
    /// empty is an error.
    pub(crate) named: bool,
    pub(crate) format: Format,
    pub(crate) compression: Compression,
    /// The size and hashes that the index of an MDS dataset states for the unpacked shard.
    pub(crate) expected: Option<Expected>,
    /// The object, if it is no file of this machine.
    pub(crate) object: Option<Object>,
}

impl SourceFile {
    /// The value that changes whenever the content of an object does; None for files, and for
    /// objects whose server gives none.
    pub fn validator(&self) -> Option<&str> {
        self.object.as_ref()?.validator()
    }
}

/// The size and the hashes of an unpacked MDS shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) bytes: u64,
    /// Pairs of an algorithm's name and its digest in hexadecimal.
    pub(crate) hashes: Vec<(String, String)>,
}

/// One document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its text, never empty.
    pub text: String,
    /// Index of its file in [`Corpus::files`].
    pub file: usize,
    /// Its line in a JSONL file, or its record in a Parquet, tar or MDS file, counted from 1; 0
    /// elsewhere.
    pub line: u64,
}

/// The format of a file's content once unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    JsonLines,
    Parquet,
    Tar,
    Mds,
}

/// The compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Corpus {
    /// Lists `paths`: files are taken as named, folders are walked for files that hold text, and
    /// patterns such as `shards/*.tar` are expanded. URLs such as `s3://bucket/*.tar` stand for
    /// objects.
    ///
    /// # Errors
    /// Fails when a path does not exist, is of a kind that holds no text, or when nothing is found.
    pub fn open<P: AsRef<Path>>(paths: &[P], options: CorpusOptions) -> Result<Self> {
        if options.document_separator.as_deref() == Some("") {
            return Err(DataError::setting(
                "document_separator",
                "is empty",
                "leave it out, or name the text between documents",
            ));
        }
        let mut files = Vec::new();
        let mut store = None;
        for path in paths {
            if is_url(path.as_ref()) {
                let store = match &store {
                    Some(store) => store,
                    None => store.insert(Store::new(options.store.clone()).map_err(objects::refused)?),
                };
                objects::add(store, path.as_ref(), &mut files)?;
                continue;
            }
            for path in expand(path.as_ref())? {
                list::add(&path, &mut files)?;
            }
        }
        if files.is_empty() {
            let names: Vec<String> = paths.iter().map(|p| objects::printable(p.as_ref())).collect();
            return Err(DataError::TooLittle {
                what: format!("no text found in [{}]", names.join(", ")),
                fix: "give text, .jsonl, .parquet, .tar or MDS files, or a folder that holds some".into(),
            });
        }
        if let Some(other) = files.iter().find(|file| options.whole_records && file.format != Format::JsonLines) {
            let what = "is no JSONL file, and conversations are read from lines of JSON";
            return Err(DataError::input(&other.path, None, what, "give .jsonl files, perhaps .gz or .zst"));
        }
        Ok(Self { files, options, store })
    }

    /// The files, in reading order.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// The way in which its files become documents.
    pub fn options(&self) -> &CorpusOptions {
        &self.options
    }

    /// Part `part` of `parts`, counted from 1: whole files, dealt so that the parts have nearly
    /// equal bytes. The parts are the same on every machine, none shares a file with another, and
    /// together they are the corpus.
    ///
    /// # Errors
    /// There is no such part, or there are fewer files than parts.
    pub fn part(mut self, part: usize, parts: usize) -> Result<Self> {
        if part == 0 || part > parts {
            let what = format!("{part}/{parts} is no part");
            return Err(DataError::setting("part", what, "write K/N with K from 1 to N"));
        }
        if parts > self.files.len() {
            return Err(DataError::TooLittle {
                what: format!("{} files cannot be dealt to {parts} parts", self.files.len()),
                fix: "ask for at most as many parts as there are files".into(),
            });
        }
        // The largest file first, each to the part with the fewest bytes; the first of equals.
        let mut order: Vec<usize> = (0..self.files.len()).collect();
        order.sort_by_key(|&file| (std::cmp::Reverse(self.files[file].bytes), file));
        let mut bytes = vec![(0u64, 0usize); parts];
        let mut ours = vec![false; self.files.len()];
        for file in order {
            let least = (0..parts).min_by_key(|&at| bytes[at]).unwrap_or(0);
            bytes[least].0 += self.files[file].bytes;
            bytes[least].1 += 1;
            ours[file] = least == part - 1;
        }
        let mut ours = ours.into_iter();
        self.files.retain(|_| ours.next().unwrap_or(false));
        Ok(self)
    }

    /// The traffic with stores so far; None if all sources are files.
    pub fn traffic(&self) -> Option<Traffic> {
        self.store.as_ref().map(Store::traffic)
    }

    /// Bytes of all files together, packed as they are.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// True if any file is compressed, so that its text is larger than [`Corpus::bytes`].
    pub fn is_compressed(&self) -> bool {
        self.files.iter().any(|f| f.compression != Compression::None || f.format == Format::Parquet)
    }

    /// Reads from the beginning.
    pub fn documents(&self) -> Documents<'_> {
        Documents::new(self)
    }

    /// The texts alone, until `bytes_max` of them are read. Tokenizers train on them.
    pub fn texts(&self, bytes_max: u64) -> impl Iterator<Item = Result<String>> + Send + '_ {
        let mut bytes = 0;
        self.documents().map(|document| document.map(|d| d.text)).take_while(move |text| {
            let go_on = bytes < bytes_max;
            bytes += text.as_ref().map_or(0, |t| t.len() as u64);
            go_on
        })
    }
}

#[cfg(test)]
mod tests;
