//! A checkpoint as tensors by name, mapped into memory.

use super::manifest::{Manifest, TensorEntry};
use super::write::{dtype_name, verify};
use super::{CheckpointError, FileEntry};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use trainyard_tensor::DType;
use trainyard_tensor::mapped::MappedFile;

/// A checkpoint whose manifest and headers have been checked against each other and against the sizes of the files.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, Mapped>,
}

#[derive(Debug)]
struct Mapped {
    bytes: MappedFile,
    /// Where each tensor of the file is.
    ranges: BTreeMap<String, Range<usize>>,
}

/// One tensor of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorRef<'a> {
    /// Type of an element.
    pub dtype: DType,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its values: little-endian, row-major. No alignment is promised.
    pub bytes: &'a [u8],
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`. Contents are not read: see [`Checkpoint::verify`].
    ///
    /// # Errors
    ///
    /// Whatever does not agree: missing files, sizes, headers that lie, tensors that the manifest describes otherwise.
    pub fn open(folder: &Path) -> Result<Checkpoint, CheckpointError> {
        let manifest = Manifest::read(folder)?;
        let mut files = BTreeMap::new();
        for entry in manifest.files.iter().filter(|entry| entry.name.ends_with(".safetensors")) {
            files.insert(entry.name.clone(), map(folder, entry)?);
        }
        for (part, tensors) in &manifest.parts {
            for (name, entry) in tensors {
                agree(folder, &files, name, entry)
                    .map_err(|reason| CheckpointError::damaged(folder, format!("{part} tensor `{name}`: {reason}")))?;
            }
        }
        Ok(Checkpoint { path: folder.to_owned(), manifest, files })
    }

    /// Reads every file and compares its checksum.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.manifest.files.iter().try_for_each(|entry| verify(&self.path, entry))
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Completed optimizer steps.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// What the trainer put in.
    pub fn state(&self) -> &serde_json::Value {
        &self.manifest.state
    }

    /// Everything about its contents.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The names of a part's tensors, in order; none when there is no such part.
    pub fn names<'a>(&'a self, part: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        self.manifest.parts.get(part).into_iter().flat_map(|tensors| tensors.keys().map(String::as_str))
    }

    /// A tensor.
    pub fn tensor(&self, part: &str, name: &str) -> Result<TensorRef<'_>, CheckpointError> {
        let find = || {
            let entry = self.manifest.parts.get(part)?.get(name)?;
            let file = self.files.get(&entry.file)?;
            let bytes = file.bytes.get(file.ranges.get(name)?.clone())?;
            Some(TensorRef { dtype: dtype(&entry.dtype)?, shape: &entry.shape, bytes })
        };
        find().ok_or_else(|| CheckpointError::NoTensor {
            path: self.path.clone(),
            part: part.to_owned(),
            name: name.to_owned(),
        })
    }
}

/// Maps a file and reads its header. The library checks that the tensors cover the data exactly, one after the other, each with the
/// size that its type and shape have.
fn map(folder: &Path, entry: &FileEntry) -> Result<Mapped, CheckpointError> {
    let damaged = |reason: String| CheckpointError::damaged(folder, format!("{}: {reason}", entry.name));
    let path = folder.join(&entry.name);
    let bytes = MappedFile::open(&path).map_err(CheckpointError::io("map", &path))?;
    if bytes.len() as u64 != entry.bytes {
        return Err(damaged(format!("{} bytes instead of {}", bytes.len(), entry.bytes)));
    }
    let (header, metadata) =
        SafeTensors::read_metadata(&bytes).map_err(|error| damaged(format!("its header: {error}")))?;
    let start = 8 + header;
    let range = |(begin, end): (usize, usize)| start + begin..start + end;
    let ranges = metadata.tensors().into_iter().map(|(name, info)| (name, range(info.data_offsets))).collect();
    Ok(Mapped { bytes, ranges })
}

/// Whether the manifest's word on a tensor fits the file's.
fn agree(folder: &Path, files: &BTreeMap<String, Mapped>, name: &str, entry: &TensorEntry) -> Result<(), String> {
    let path = folder.join(&entry.file);
    let file = files.get(&entry.file).ok_or_else(|| format!("{} is no safetensors file", path.display()))?;
    let range = file.ranges.get(name).ok_or_else(|| format!("{} does not have it", entry.file))?;
    let dtype = dtype(&entry.dtype).ok_or_else(|| format!("the type {} is unknown", entry.dtype))?;
    let size = entry.shape.iter().try_fold(dtype.size(), |size, n| size.checked_mul(*n));
    if size != Some(range.len()) {
        return Err(format!("{} {:?} is not {} bytes", entry.dtype, entry.shape, range.len()));
    }
    Ok(())
}

fn dtype(name: &str) -> Option<DType> {
    [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U32].into_iter().find(|dtype| dtype_name(*dtype) == name)
}
