//! `manifest.json`: the list of a checkpoint's contents, with the size and checksum of every file.

use super::CheckpointError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Component, Path};
use xxhash_rust::xxh3::xxh3_64;

/// The name of the manifest.
pub(super) const MANIFEST: &str = "manifest.json";
/// The name of its checksum.
pub(super) const MANIFEST_SUM: &str = "manifest.xxh3";
/// Format versions: of a checkpoint whose tensors are each in one file, and of one with tensors in
/// pieces. This program writes and reads both.
const WHOLE: u32 = 1;
const IN_PIECES: u32 = 2;
/// Upper limit for the size of a manifest. A hundred thousand tensors take a few tens of megabytes.
const BYTES_MAX: u64 = 1 << 28;

/// The contents of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this format.
    pub version: u32,
    /// Completed optimizer steps.
    pub step: u64,
    /// Every file but the manifest and its checksum.
    pub files: Vec<FileEntry>,
    /// Tensors by part and name.
    pub parts: BTreeMap<String, BTreeMap<String, TensorEntry>>,
    /// State of the trainer, opaque here.
    pub state: serde_json::Value,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name inside the folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// XXH3 checksum of 64 bits, in hexadecimal.
    pub xxh3: String,
}

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Type under its safetensors name: `F32`, `BF16`.
    pub dtype: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The file it is in; empty when it is in pieces.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// The pieces that several ranks wrote, in order; together they are the whole tensor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<PieceEntry>,
}

/// A range of a tensor's elements, row-major.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceEntry {
    /// The file it is in, under the tensor's name.
    pub file: String,
    /// The first element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
}

impl TensorEntry {
    /// Number of elements; `usize::MAX` if the product overflows.
    pub fn elements(&self) -> usize {
        self.shape.iter().try_fold(1usize, |size, n| size.checked_mul(*n)).unwrap_or(usize::MAX)
    }

    /// The pieces of the tensor; a single one if the tensor is whole in one file.
    pub(super) fn all_pieces(&self) -> Vec<PieceEntry> {
        if self.pieces.is_empty() {
            return vec![PieceEntry { file: self.file.clone(), start: 0, end: self.elements() }];
        }
        self.pieces.clone()
    }
}

impl Manifest {
    pub(super) fn new(step: u64, state: serde_json::Value) -> Manifest {
        Manifest { version: WHOLE, step, files: Vec::new(), parts: BTreeMap::new(), state }
    }

    /// Reads and checks the manifest of the checkpoint in `folder`.
    pub(super) fn read(folder: &Path) -> Result<Manifest, CheckpointError> {
        let damaged = |reason: String| CheckpointError::damaged(folder, reason);
        let read = |name: &str| {
            let path = folder.join(name);
            match fs::metadata(&path) {
                Ok(metadata) if metadata.len() > BYTES_MAX => {
                    return Err(damaged(format!("{name} has {} bytes, more than any manifest", metadata.len())));
                }
                Err(error) if error.kind() == ErrorKind::NotFound => return Err(damaged(format!("{name} is missing"))),
                _ => {}
            }
            fs::read(&path).map_err(CheckpointError::io("read", &path))
        };
        let (text, sum) = (read(MANIFEST)?, read(MANIFEST_SUM)?);
        if sum.trim_ascii() != hex(xxh3_64(&text)).as_bytes() {
            return Err(damaged(format!("{MANIFEST} does not have the checksum in {MANIFEST_SUM}")));
        }
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let parse = |error: serde_json::Error| damaged(format!("{MANIFEST} cannot be read: {error}"));
        let Version { version } = serde_json::from_slice(&text).map_err(parse)?;
        if !(WHOLE..=IN_PIECES).contains(&version) {
            return Err(damaged(format!(
                "its format is version {version}, and this program reads versions {WHOLE} and {IN_PIECES}"
            )));
        }
        let manifest: Manifest = serde_json::from_slice(&text).map_err(parse)?;
        let mut names = std::collections::BTreeSet::new();
        for FileEntry { name, .. } in &manifest.files {
            if !is_plain(name) || !names.insert(name.as_str()) {
                return Err(damaged(format!("{MANIFEST} names a file {name:?}")));
            }
        }
        for (part, tensors) in &manifest.parts {
            for (name, entry) in tensors {
                let pieces = entry.all_pieces();
                if let Some(piece) = pieces.iter().find(|piece| !names.contains(piece.file.as_str())) {
                    let file = &piece.file;
                    return Err(damaged(format!(
                        "{part} tensor `{name}` is said to be in {file:?}, which is not listed"
                    )));
                }
                let ends = [0].into_iter().chain(pieces.iter().map(|piece| piece.end));
                let joined = pieces.iter().zip(ends).all(|(piece, end)| piece.start == end && piece.start <= piece.end);
                if !joined || pieces.last().map(|piece| piece.end) != Some(entry.elements()) {
                    return Err(damaged(format!("{part} tensor `{name}`: its pieces are not all of it")));
                }
            }
        }
        Ok(manifest)
    }

    /// The manifest's text and its checksum.
    pub(super) fn encode(&self) -> Result<(Vec<u8>, String), CheckpointError> {
        let in_pieces = self.parts.values().flatten().any(|(_, entry)| !entry.pieces.is_empty());
        let version = if in_pieces { IN_PIECES } else { WHOLE };
        let text = serde_json::to_vec_pretty(&Manifest { version, ..self.clone() })
            .map_err(|error| CheckpointError::Snapshot(format!("its state is no JSON: {error}")))?;
        let sum = hex(xxh3_64(&text)) + "\n";
        Ok((text, sum))
    }
}

/// A checksum in hexadecimal, as it is written.
pub(super) fn hex(sum: u64) -> String {
    format!("{sum:016x}")
}

/// True if `name` is a plain file name, without folders.
pub(super) fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let plain = matches!(components.next(), Some(Component::Normal(first)) if first == name);
    plain && components.next().is_none() && !name.starts_with('.') && !name.contains(['\0', '\\'])
}
