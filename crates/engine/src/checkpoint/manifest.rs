//! `manifest.json`: the list of a checkpoint's contents, with the size and checksum of every file.

use super::runs::check_cover;
use super::{CheckpointError, Runs};
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
/// Format versions: of a checkpoint whose tensors are each in one file, of one with tensors in
/// pieces that are each a flat range, and of one whose files have pieces of many runs or several
/// pieces of a tensor. This program reads all of them and writes the lowest that suffices.
const WHOLE: u32 = 1;
const IN_RANGES: u32 = 2;
const IN_RUNS: u32 = 3;
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

/// Some of a tensor's elements: a flat range, or runs of equal length at equal distances.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceEntry {
    /// The file it is in, under the tensor's name.
    pub file: String,
    /// The first element.
    pub start: usize,
    /// One past the last element of the first run.
    pub end: usize,
    /// Number of runs.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub runs: usize,
    /// Elements of the tensor from the start of one run to the start of the next.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stride: usize,
    /// The place of its first element in what the file has under the tensor's name. The runs lie
    /// there one after the other.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub at: usize,
}

fn one() -> usize {
    1
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl PieceEntry {
    /// The entry of `runs` in `file`, from element `at` on.
    pub(super) fn new(file: String, runs: &Runs, at: usize) -> PieceEntry {
        let Runs { first, count, stride } = runs;
        let stride = if *count == 1 { 0 } else { *stride };
        PieceEntry { file, start: first.start, end: first.end, runs: *count, stride, at }
    }

    /// Its elements of the tensor.
    pub fn elements(&self) -> Runs {
        Runs { first: self.start..self.end, count: self.runs, stride: self.stride }
    }
}

impl TensorEntry {
    /// Number of elements; `usize::MAX` if the product overflows.
    pub fn elements(&self) -> usize {
        self.shape.iter().try_fold(1usize, |size, n| size.checked_mul(*n)).unwrap_or(usize::MAX)
    }

    /// The pieces of the tensor; a single one if the tensor is whole in one file.
    pub(super) fn all_pieces(&self) -> Vec<PieceEntry> {
        if self.pieces.is_empty() {
            return vec![PieceEntry::new(self.file.clone(), &Runs::from(0..self.elements()), 0)];
        }
        self.pieces.clone()
    }

    /// Checks that every element is in exactly one piece.
    pub(super) fn check_pieces(&self) -> Result<(), String> {
        let pieces: Vec<Runs> = self.all_pieces().iter().map(PieceEntry::elements).collect();
        match pieces.iter().find(|runs| !runs.are_within(self.elements())) {
            Some(runs) => Err(format!("{runs} are no part of {:?}", self.shape)),
            None => check_cover(&pieces, self.elements()),
        }
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
        if !(WHOLE..=IN_RUNS).contains(&version) {
            return Err(damaged(format!(
                "its format is version {version}, and this program reads versions {WHOLE} to {IN_RUNS}"
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
                entry.check_pieces().map_err(|problem| {
                    damaged(format!("{part} tensor `{name}`: its pieces are not all of it: {problem}"))
                })?;
            }
        }
        Ok(manifest)
    }

    /// The manifest's text and its checksum.
    pub(super) fn encode(&self) -> Result<(Vec<u8>, String), CheckpointError> {
        let version_for = |piece: &PieceEntry| if piece.runs > 1 || piece.at > 0 { IN_RUNS } else { IN_RANGES };
        let pieces = self.parts.values().flatten().flat_map(|(_, entry)| &entry.pieces);
        let version = pieces.map(version_for).max().unwrap_or(WHOLE);
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
