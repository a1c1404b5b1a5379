//! Writes a snapshot into a folder: division into files, safetensors headers, checksums and
//! read-back.

use super::fault::{Disk, Output};
use super::manifest::{FileEntry, MANIFEST, MANIFEST_SUM, Manifest, PieceEntry, TensorEntry, hex, is_plain};
use super::{Bytes, CheckpointError, Region, Runs, Snapshot, SnapshotPart};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use trainyard_tensor::DType;
use xxhash_rust::xxh3::Xxh3;

/// A durable checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// Completed steps.
    pub step: u64,
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Size in bytes.
    pub bytes: u64,
    /// Seconds from the beginning of the write to the last sync.
    pub seconds: f64,
    /// Steps of the checkpoints that were removed for it.
    pub pruned: Vec<u64>,
    /// Warnings about removals that were refused after the checkpoint was durable.
    pub notices: Vec<String>,
}

impl Written {
    /// Writes step, bytes and seconds to [`LAST`] in the run's folder, from which schedulers plan
    /// their margins. The file is no part of the checkpoint.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep_time(&self) -> std::io::Result<()> {
        let Some(run) = self.path.parent().and_then(Path::parent) else { return Ok(()) };
        let text = json!({ "step": self.step, "bytes": self.bytes, "seconds": self.seconds });
        std::fs::write(run.join(LAST), format!("{text}\n"))
    }
}

/// The file in the run's folder about the last checkpoint that was written.
pub const LAST: &str = "last-checkpoint.json";

/// Sizes of files and of single writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Upper limit for the bytes of a file; a larger tensor has a file of its own.
    pub shard_bytes: usize,
    /// Bytes of one write and of one step of the checksum: small enough for the cache.
    pub chunk_bytes: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Sizes { shard_bytes: 1 << 30, chunk_bytes: 1 << 20 }
    }
}

/// The name of a type in safetensors files.
pub(super) const fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::I32 => "I32",
        DType::U32 => "U32",
        DType::U8 => "U8",
    }
}

/// Refuses a snapshot that could not be read again.
pub(super) fn check(snapshot: &Snapshot<'_>) -> Result<(), CheckpointError> {
    let refuse = |what: String| Err(CheckpointError::Snapshot(what));
    let mut parts = BTreeSet::new();
    for SnapshotPart { name: part, regions, .. } in &snapshot.parts {
        if !is_plain(part) || part.contains('.') || !parts.insert(part) {
            return refuse(format!("the part name {part:?} is no plain word or is used twice"));
        }
        let mut names = BTreeSet::new();
        for region in regions {
            let Region { name, dtype, shape, runs, bytes } = region;
            if name.is_empty() || name == "__metadata__" || !names.insert(name) {
                return refuse(format!("{part}: the tensor name {name:?} is reserved or used twice"));
            }
            let elements = shape.iter().try_fold(1usize, |size, n| size.checked_mul(*n));
            let got = bytes.len();
            let fits = elements.is_some_and(|elements| runs.iter().all(|runs| runs.are_within(elements)));
            if !fits || region.elements().checked_mul(dtype.size()) != Some(got) {
                let runs = runs.iter().map(Runs::to_string).collect::<Vec<_>>().join(", ");
                return refuse(format!("{part}: `{name}` is {dtype} {shape:?}, {runs}, but has {got} bytes"));
            }
        }
    }
    let mut names = BTreeSet::new();
    for (name, _) in &snapshot.attachments {
        let ours =
            name == MANIFEST || name == MANIFEST_SUM || parts.iter().any(|part| name.starts_with(&format!("{part}.")));
        let shard = name.ends_with(".safetensors");
        if !is_plain(name) || ours || shard || !names.insert(name) {
            return refuse(format!("the attachment name {name:?} is reserved, used twice or no file name"));
        }
    }
    Ok(())
}

/// An upper bound of a snapshot's size on disk, for messages.
pub(super) fn size(snapshot: &Snapshot<'_>) -> u64 {
    let regions = snapshot.parts.iter().flat_map(|part| &part.regions);
    let tensors: usize = regions.map(|region| region.bytes.len()).sum();
    let attachments: usize = snapshot.attachments.iter().map(|(_, bytes)| bytes.len()).sum();
    (tensors + attachments) as u64
}

/// A rank among those that write a checkpoint together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer {
    pub rank: usize,
    pub ranks: usize,
}

impl Writer {
    pub const ALONE: Writer = Writer { rank: 0, ranks: 1 };
}

/// The files and pieces that one rank has written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Partial {
    pub files: Vec<FileEntry>,
    /// The pieces by part and tensor name.
    pub pieces: BTreeMap<String, BTreeMap<String, Piece>>,
}

/// The pieces of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Piece {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub at: Vec<PieceEntry>,
}

/// Writes the tensors of one rank's snapshot into `folder`. The files are durable; the folder
/// itself is not yet synced.
pub(super) fn write_parts(
    disk: &mut Disk,
    folder: &Path,
    snapshot: &Snapshot<'_>,
    sizes: Sizes,
    writer: Writer,
) -> Result<Partial, CheckpointError> {
    check(snapshot)?;
    let mut partial = Partial::default();
    for part in &snapshot.parts {
        write_part(disk, folder, part, sizes, writer, &mut partial)?;
    }
    Ok(partial)
}

/// Completes the checkpoint of `partials`: attachments, manifest and read-back. Reads back rank 0's
/// files only; the other ranks read back their own. Returns the bytes of all files.
pub(super) fn write_rest(
    disk: &mut Disk,
    folder: &Path,
    snapshot: &Snapshot<'_>,
    sizes: Sizes,
    partials: Vec<Partial>,
) -> Result<u64, CheckpointError> {
    let mut manifest = Manifest::new(snapshot.step, snapshot.state.clone());
    let mut ours = partials.first().map_or_else(Vec::new, |first| first.files.clone());
    merge(&mut manifest, partials)?;
    for SnapshotPart { name: part, required, .. } in &snapshot.parts {
        let there = manifest.parts.get(part);
        if let Some(name) = required.iter().find(|name| there.is_none_or(|tensors| !tensors.contains_key(*name))) {
            return Err(CheckpointError::Snapshot(format!("{part}: `{name}` was written by no rank")));
        }
    }
    for (name, bytes) in &snapshot.attachments {
        let entry = write_file(disk, folder, name, sizes, bytes)?;
        ours.push(entry.clone());
        manifest.files.push(entry);
    }
    let (text, sum) = manifest.encode()?;
    let last = [
        write_file(disk, folder, MANIFEST, sizes, &text)?,
        write_file(disk, folder, MANIFEST_SUM, sizes, sum.as_bytes())?,
    ];
    ours.iter().chain(&last).try_for_each(|entry| verify(folder, entry))?;
    disk.sync_dir(folder)?;
    Ok(manifest.files.iter().chain(&last).map(|entry| entry.bytes).sum())
}

/// Merges the ranks' pieces. Every element must have been written exactly once.
fn merge(manifest: &mut Manifest, partials: Vec<Partial>) -> Result<(), CheckpointError> {
    let refuse = |what: String| Err(CheckpointError::Snapshot(what));
    for partial in partials {
        manifest.files.extend(partial.files);
        for (part, pieces) in partial.pieces {
            let tensors = manifest.parts.entry(part).or_default();
            for (name, Piece { dtype, shape, at }) in pieces {
                let entry = tensors.entry(name.clone()).or_insert_with(|| TensorEntry {
                    dtype: dtype.clone(),
                    shape: shape.clone(),
                    file: String::new(),
                    pieces: Vec::new(),
                });
                if entry.dtype != dtype || entry.shape != shape {
                    return refuse(format!("ranks disagree on `{name}`: {dtype} {shape:?}, {entry:?}"));
                }
                entry.pieces.extend(at);
            }
        }
    }
    for (name, entry) in manifest.parts.values_mut().flatten() {
        entry.pieces.sort_by_key(|piece| piece.start);
        entry.check_pieces().map_err(|problem| CheckpointError::Snapshot(format!("`{name}`: {problem}")))?;
        if let [whole] = entry.pieces.as_mut_slice() {
            entry.file = std::mem::take(&mut whole.file);
            entry.pieces.clear();
        }
    }
    Ok(())
}

fn write_part(
    disk: &mut Disk,
    folder: &Path,
    part: &SnapshotPart<'_>,
    sizes: Sizes,
    writer: Writer,
    partial: &mut Partial,
) -> Result<(), CheckpointError> {
    // Wide elements first, so that every tensor lies at a multiple of its element's size; by name
    // within, so that the file does not depend on the caller's order.
    let mut regions: Vec<&Region<'_>> = part.regions.iter().collect();
    regions.sort_by(|a, b| b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name)));
    let mut shards: Vec<Vec<&Region<'_>>> = Vec::new();
    let mut filled = 0usize;
    for region in regions {
        let bytes = region.bytes.len();
        match shards.last_mut() {
            Some(shard) if filled.saturating_add(bytes) <= sizes.shard_bytes => {
                shard.push(region);
                filled += bytes;
            }
            _ => {
                shards.push(vec![region]);
                filled = bytes;
            }
        }
    }
    let stem = match writer {
        Writer { ranks: 1, .. } => part.name.clone(),
        Writer { rank, .. } => format!("{}.rank-{rank:05}", part.name),
    };
    let mut pieces = BTreeMap::new();
    let count = shards.len();
    for (i, shard) in shards.iter().enumerate() {
        let file = match count {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let header = header(shard);
        let header = Bytes::Borrowed(&header);
        let contents: Vec<&Bytes<'_>> =
            std::iter::once(&header).chain(shard.iter().map(|region| &region.bytes)).collect();
        partial.files.push(write_contents(disk, folder, &file, sizes, &contents)?);
        for region in shard {
            let dtype = dtype_name(region.dtype).to_owned();
            let mut end = 0;
            let at = region.runs.iter().map(|runs| {
                let at = end;
                end += runs.elements();
                PieceEntry::new(file.clone(), runs, at)
            });
            let (shape, at) = (region.shape.clone(), at.collect());
            pieces.insert(region.name.clone(), Piece { dtype, shape, at });
        }
    }
    if count > 1 && writer.ranks == 1 {
        // The index that Hugging Face libraries look for beside sharded files.
        let total: usize = part.regions.iter().map(|region| region.bytes.len()).sum();
        let map: BTreeMap<_, _> =
            pieces.iter().filter_map(|(name, piece)| Some((name, &piece.at.first()?.file))).collect();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        let name = format!("{}.safetensors.index.json", part.name);
        let text = format!("{index:#}");
        partial.files.push(write_file(disk, folder, &name, sizes, text.as_bytes())?);
    }
    partial.pieces.insert(part.name.clone(), pieces);
    Ok(())
}

/// The beginning of a safetensors file: u64 length, JSON padded with spaces to a multiple of eight.
fn header(regions: &[&Region<'_>]) -> Vec<u8> {
    let mut offset = 0;
    let mut entries = serde_json::Map::new();
    entries.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    for region in regions {
        let end = offset + region.bytes.len();
        // A part of a tensor has no shape of its own.
        let part = [region.elements()];
        let shape = if region.is_whole() { region.shape.as_slice() } else { &part };
        let entry = json!({ "dtype": dtype_name(region.dtype), "shape": shape, "data_offsets": [offset, end] });
        entries.insert(region.name.clone(), entry);
        offset = end;
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes
}

/// Writes one file and makes it durable.
fn write_file(
    disk: &mut Disk,
    folder: &Path,
    name: &str,
    sizes: Sizes,
    contents: &[u8],
) -> Result<FileEntry, CheckpointError> {
    write_contents(disk, folder, name, sizes, &[&Bytes::Borrowed(contents)])
}

/// As [`write_file`], for contents in pieces.
fn write_contents(
    disk: &mut Disk,
    folder: &Path,
    name: &str,
    sizes: Sizes,
    contents: &[&Bytes<'_>],
) -> Result<FileEntry, CheckpointError> {
    let mut out: Output = disk.create(&folder.join(name))?;
    let (mut hasher, mut bytes) = (Xxh3::new(), 0);
    for piece in contents {
        piece.chunks(sizes.chunk_bytes, |chunk| {
            hasher.update(chunk);
            bytes += chunk.len() as u64;
            disk.write(&mut out, chunk)
        })?;
    }
    disk.sync(out)?;
    Ok(FileEntry { name: name.to_owned(), bytes, xxh3: hex(hasher.digest()) })
}

/// Reads a file and compares it with its entry.
pub(super) fn verify(folder: &Path, entry: &FileEntry) -> Result<(), CheckpointError> {
    verify_contents(folder, entry, open(folder, entry)?)
}

/// Opens a file to be verified.
pub(super) fn open(folder: &Path, entry: &FileEntry) -> Result<File, CheckpointError> {
    let path = folder.join(&entry.name);
    File::open(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::damaged(folder, format!("{} is missing", entry.name)),
        _ => CheckpointError::io("open", &path)(error),
    })
}

/// Reads the contents of a file and compares them with its entry.
pub(super) fn verify_contents(
    folder: &Path,
    entry: &FileEntry,
    mut contents: impl Read,
) -> Result<(), CheckpointError> {
    let (mut hasher, mut bytes, mut chunk) = (Xxh3::new(), 0, vec![0; 1 << 20]);
    loop {
        let n = contents.read(&mut chunk).map_err(CheckpointError::io("read", &folder.join(&entry.name)))?;
        if n == 0 {
            break;
        }
        hasher.update(&chunk[..n]);
        bytes += n as u64;
    }
    if bytes != entry.bytes {
        let reason = format!("{} has {bytes} bytes instead of {}", entry.name, entry.bytes);
        return Err(CheckpointError::damaged(folder, reason));
    }
    let sum = hex(hasher.digest());
    if sum != entry.xxh3 {
        let reason = format!("{} has the checksum {sum} instead of {}", entry.name, entry.xxh3);
        return Err(CheckpointError::damaged(folder, reason));
    }
    Ok(())
}
