//! Texts of a shard of MosaicML's MDS, the format of the `streaming` library.
//!
//! A shard is, little-endian: u32 samples n, u32 offsets[n + 1], the columns as JSON, and the
//! samples. A sample is the u32 sizes of its columns of variable size, then their bytes. A shard
//! describes itself; the `index.json` of a dataset adds the order of shards, sizes and hashes.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::read::{read_error, unpacked};
use super::records::{Record, Records, too_long, utf8};
use super::{Compression, CorpusOptions, Expected, SourceFile};
use crate::error::{DataError, Result};

/// Name of the file that lists the shards.
pub(super) const INDEX: &str = "index.json";

/// Offsets are u32, so no shard is larger.
const SHARD_BYTES_MAX: u64 = u32::MAX as u64;

/// Advice for a shard that cannot be trusted.
const FIX: &str = "fetch or write the shard again";

/// A shard as the index lists it.
pub(super) struct Shard {
    /// File name of the unpacked shard.
    pub(super) raw: String,
    /// File name of the compressed shard, if there is one.
    pub(super) zip: Option<(String, Compression)>,
    pub(super) expected: Expected,
}

#[derive(Deserialize)]
struct Index {
    shards: Vec<IndexShard>,
}

#[derive(Deserialize)]
struct IndexShard {
    format: String,
    compression: Option<String>,
    raw_data: IndexFile,
    zip_data: Option<IndexFile>,
}

#[derive(Deserialize)]
struct IndexFile {
    basename: String,
    bytes: u64,
    #[serde(default)]
    hashes: serde_json::Map<String, serde_json::Value>,
}

/// The shards that the `index.json` at `index` lists in `text`; `None` if it is no index of an MDS
/// dataset.
pub(super) fn shards(index: &Path, text: &[u8]) -> Result<Option<Vec<Shard>>> {
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(text) else { return Ok(None) };
    let Some(first) = value["shards"].get(0) else { return Ok(None) };
    if first["format"] != "mds" {
        return Ok(None);
    }
    let refuse = |what: String| DataError::input(index, None, what, "write the dataset again as MDS");
    let listed: Index =
        serde_json::from_value(value).map_err(|error| refuse(format!("is a damaged index of MDS shards ({error})")))?;
    let mut shards = Vec::with_capacity(listed.shards.len());
    for shard in listed.shards {
        if shard.format != "mds" {
            return Err(refuse(format!("lists a shard of format {:?}", shard.format)));
        }
        // A name with a folder in it could lead anywhere on this machine.
        for file in [Some(&shard.raw_data), shard.zip_data.as_ref()].into_iter().flatten() {
            if Path::new(&file.basename).file_name() != Some(file.basename.as_ref()) {
                return Err(refuse(format!("lists a shard named {:?}, which is no file name", file.basename)));
            }
        }
        let zip =
            match (shard.compression.as_deref().map(|name| name.split(':').next().unwrap_or(name)), shard.zip_data) {
                (Some("zstd"), Some(zip)) => Some((zip.basename, Compression::Zstd)),
                (Some("gz"), Some(zip)) => Some((zip.basename, Compression::Gzip)),
                (Some(other), _) => {
                    let what = format!("lists shards compressed by {other:?}");
                    return Err(DataError::input(index, None, what, "write them with zstd, gz or no compression"));
                }
                (None, _) => None,
            };
        let hashes = shard.raw_data.hashes.into_iter();
        let hashes = hashes.filter_map(|(name, digest)| Some((name, digest.as_str()?.to_owned()))).collect();
        let expected = Expected { bytes: shard.raw_data.bytes, hashes };
        shards.push(Shard { raw: shard.raw_data.basename, zip, expected });
    }
    Ok(Some(shards))
}

/// The columns of a shard, as it describes them itself.
#[derive(Deserialize)]
struct Columns {
    column_names: Vec<String>,
    column_encodings: Vec<String>,
    column_sizes: Vec<Option<u32>>,
}

pub(super) struct MdsTexts {
    path: PathBuf,
    bytes_max: u64,
    shard: Vec<u8>,
    layout: MdsLayout,
    next: usize,
}

impl MdsTexts {
    pub(super) fn open(source: &SourceFile, options: &CorpusOptions) -> Result<Self> {
        let path = &source.path;
        let bytes_max = source.expected.as_ref().map_or(SHARD_BYTES_MAX, |expected| expected.bytes);
        let mut shard = Vec::new();
        // One byte more, to notice a shard that is too long.
        let limit = bytes_max.min(SHARD_BYTES_MAX) + 1;
        let read = unpacked(source)?.take(limit).read_to_end(&mut shard);
        read.map_err(|reason| read_error(path, source.compression, reason))?;
        if let Some(expected) = &source.expected {
            check(path, &shard, expected)?;
        }
        let layout = parse_mds(&shard, &options.field).map_err(|fault| {
            let fix = match fault {
                MdsFault::Column { .. } | MdsFault::Encoding { .. } => "set the column that holds the text",
                _ => FIX,
            };
            DataError::input(path, None, fault.to_string(), fix)
        })?;
        Ok(Self { path: path.clone(), bytes_max: options.document_bytes_max, shard, layout, next: 0 })
    }
}

impl Records for MdsTexts {
    fn next(&mut self) -> Result<Option<Record>> {
        if self.next == self.layout.samples {
            return Ok(None);
        }
        let place = format!("sample {}", self.next);
        let text = self.layout.text(&self.shard, self.next);
        let text = text.map_err(|fault| DataError::input(&self.path, None, fault.to_string(), FIX))?;
        if text.len() as u64 > self.bytes_max {
            return Err(too_long(&self.path, &place, self.bytes_max));
        }
        self.next += 1;
        Ok(Some(Record { number: self.next as u64, text: utf8(&self.path, &place, text.to_vec()) }))
    }
}

/// Compares an unpacked shard with the index. Hashes of other algorithms than xxh3 are left alone.
fn check(path: &Path, shard: &[u8], expected: &Expected) -> Result<()> {
    if shard.len() as u64 != expected.bytes {
        let what = format!("unpacks to other than the {} bytes of its index", expected.bytes);
        return Err(DataError::input(path, None, what, FIX));
    }
    for (name, digest) in &expected.hashes {
        let found = match name.as_str() {
            "xxh3_64" => format!("{:016x}", xxh3_64(shard)),
            "xxh3_128" => format!("{:032x}", xxh3_128(shard)),
            _ => continue,
        };
        if found != *digest {
            let what = format!("has the hash {found}, and its index says {digest} ({name})");
            return Err(DataError::input(path, None, what, FIX));
        }
    }
    Ok(())
}

/// The reason why an MDS shard was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MdsFault {
    /// The shard ends before its header does.
    #[error("is damaged, or not an MDS shard: its header says {samples} samples, and it has {found} bytes")]
    Short {
        /// Claimed samples.
        samples: usize,
        /// Bytes of the shard.
        found: usize,
    },
    /// An offset falls, or leaves the shard.
    #[error("is damaged, or not an MDS shard: sample {sample} begins at byte {found} of {bytes}")]
    Offset {
        /// Number of the sample; as many as there are samples for the end of the last.
        sample: usize,
        /// Its offset.
        found: usize,
        /// Bytes of the shard.
        bytes: usize,
    },
    /// The description of the columns is no JSON, or contradicts itself.
    #[error("is damaged, or not an MDS shard: its columns cannot be read ({0})")]
    Columns(String),
    /// There is no such column.
    #[error("has no column {field:?} (columns: {found})")]
    Column {
        /// The column looked for.
        field: String,
        /// The columns that it has.
        found: String,
    },
    /// The column holds something else.
    #[error("column {field:?} is encoded as {found}, not as str")]
    Encoding {
        /// The column.
        field: String,
        /// Its encoding.
        found: String,
    },
    /// The columns of a sample do not fit into it.
    #[error("is damaged: the columns of sample {sample} take more than its {bytes} bytes")]
    Sample {
        /// Number of the sample.
        sample: usize,
        /// Its bytes.
        bytes: usize,
    },
}

/// A parsed MDS shard: places, no data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MdsLayout {
    /// Number of samples.
    pub samples: usize,
    /// Size of each column; `None` where a sample says it.
    sizes: Vec<Option<u32>>,
    /// The column with the text.
    column: usize,
}

impl MdsLayout {
    /// The bytes of the text of sample `sample`, below [`MdsLayout::samples`]. `shard` must be what
    /// this layout was parsed from.
    pub fn text<'s>(&self, shard: &'s [u8], sample: usize) -> Result<&'s [u8], MdsFault> {
        let (begin, end) = (offset(shard, sample), offset(shard, sample + 1));
        let bytes = &shard[begin..end];
        let fault = MdsFault::Sample { sample, bytes: bytes.len() };
        let variable = self.sizes.iter().filter(|size| size.is_none()).count();
        let (heads, body) = bytes.split_at_checked(4 * variable).ok_or(fault.clone())?;
        let mut heads = heads.as_chunks::<4>().0.iter().map(|head| u32::from_le_bytes(*head));
        let mut at = 0usize;
        for (column, size) in self.sizes.iter().enumerate() {
            let size = size.unwrap_or_else(|| heads.next().unwrap_or(0)) as usize;
            let data = body.get(at..).and_then(|rest| rest.get(..size)).ok_or(fault.clone())?;
            if column == self.column {
                return Ok(data);
            }
            at += size;
        }
        Err(fault)
    }
}

/// Parses the header of an MDS shard. Pure and total: any bytes give a layout that is safe to use,
/// or the reason why there is none.
pub fn parse_mds(shard: &[u8], field: &str) -> Result<MdsLayout, MdsFault> {
    let samples = shard.first_chunk::<4>().map_or(0, |word| u32::from_le_bytes(*word)) as usize;
    // Samples are at most 2^32, so nothing here overflows.
    let header = 4 + 4 * (samples + 1);
    if shard.len() < header {
        return Err(MdsFault::Short { samples, found: shard.len() });
    }
    let mut before = header;
    for sample in 0..=samples {
        let found = offset(shard, sample);
        if found < before || found > shard.len() {
            return Err(MdsFault::Offset { sample, found, bytes: shard.len() });
        }
        before = found;
    }
    let columns: Columns = serde_json::from_slice(&shard[header..offset(shard, 0)])
        .map_err(|error| MdsFault::Columns(error.to_string()))?;
    let names = &columns.column_names;
    if [columns.column_encodings.len(), columns.column_sizes.len()] != [names.len(); 2] {
        return Err(MdsFault::Columns("their names, encodings and sizes differ in number".into()));
    }
    let Some(column) = names.iter().position(|name| name == field) else {
        return Err(MdsFault::Column { field: field.into(), found: names.join(", ") });
    };
    let encoding = &columns.column_encodings[column];
    if encoding != "str" && encoding != "bytes" {
        return Err(MdsFault::Encoding { field: field.into(), found: encoding.clone() });
    }
    Ok(MdsLayout { samples, sizes: columns.column_sizes, column })
}

/// Offset number `sample` of a shard whose header was checked.
fn offset(shard: &[u8], sample: usize) -> usize {
    let at = 4 + 4 * sample;
    shard[at..].first_chunk::<4>().map_or(0, |word| u32::from_le_bytes(*word)) as usize
}
