//! `manifest.json`: what a checkpoint contains and what its bytes must be.

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
/// The version that this program writes and reads.
const VERSION: u32 = 1;
/// No manifest is larger: a hundred thousand tensors take a few tens of megabytes.
const BYTES_MAX: u64 = 1 << 28;

/// What a checkpoint contains.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Of this format.
    pub version: u32,
    /// Completed optimizer steps.
    pub step: u64,
    /// Every file but the manifest and its checksum.
    pub files: Vec<FileEntry>,
    /// Tensors by part and name.
    pub parts: BTreeMap<String, BTreeMap<String, TensorEntry>>,
    /// The trainer's own.
    pub state: serde_json::Value,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name inside the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// XXH3 with 64 bits, in hexadecimal.
    pub xxh3: String,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// As safetensors names it: `F32`, `BF16`.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The file it is in.
    pub file: String,
}

impl Manifest {
    pub(super) fn new(step: u64, state: serde_json::Value) -> Manifest {
        Manifest { version: VERSION, step, files: Vec::new(), parts: BTreeMap::new(), state }
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
        if version != VERSION {
            return Err(damaged(format!("its format is version {version}, and this program reads version {VERSION}")));
        }
        let manifest: Manifest = serde_json::from_slice(&text).map_err(parse)?;
        let mut names = std::collections::BTreeSet::new();
        for FileEntry { name, .. } in &manifest.files {
            if !is_plain(name) || !names.insert(name.as_str()) {
                return Err(damaged(format!("{MANIFEST} names a file {name:?}")));
            }
        }
        for (part, tensors) in &manifest.parts {
            if let Some((name, entry)) = tensors.iter().find(|(_, entry)| !names.contains(entry.file.as_str())) {
                return Err(damaged(format!(
                    "{part} tensor `{name}` is said to be in {:?}, which is not listed",
                    entry.file
                )));
            }
        }
        Ok(manifest)
    }

    /// The text to write and its checksum.
    pub(super) fn encode(&self) -> Result<(Vec<u8>, String), CheckpointError> {
        let text = serde_json::to_vec_pretty(self)
            .map_err(|error| CheckpointError::Snapshot(format!("its state is no JSON: {error}")))?;
        let sum = hex(xxh3_64(&text)) + "\n";
        Ok((text, sum))
    }
}

/// A checksum as it is written.
pub(super) fn hex(sum: u64) -> String {
    format!("{sum:016x}")
}

/// Whether `name` is a file name and nothing else.
pub(super) fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let plain = matches!(components.next(), Some(Component::Normal(first)) if first == name);
    plain && components.next().is_none() && !name.starts_with('.') && !name.contains(['\0', '\\'])
}
