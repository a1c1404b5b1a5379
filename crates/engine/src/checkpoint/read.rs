//! Reads a checkpoint: tensors by name, mapped into memory.

use super::manifest::{Manifest, TensorEntry};
use super::write::{dtype_name, open, verify_contents};
use super::{CheckpointError, FileEntry, PlacedRuns, Runs};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Seek;
use std::ops::Range;
use std::path::{Path, PathBuf};
use trainyard_tensor::DType;
use trainyard_tensor::mapped::MappedFile;

/// A checkpoint whose manifest and headers have been checked against each other and against the
/// sizes of the files.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, Mapped>,
    /// The other files. They stay open, so that the checkpoint can be read to its end even if a
    /// running training deletes it.
    others: Vec<(FileEntry, File)>,
}

#[derive(Debug)]
struct Mapped {
    bytes: MappedFile,
    /// The byte range of each tensor in the file.
    ranges: BTreeMap<String, Range<usize>>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`, without reading the tensors: see [`Checkpoint::verify`].
    ///
    /// # Errors
    ///
    /// Missing files, wrong sizes, wrong headers, and tensors that contradict the manifest.
    pub fn open(folder: &Path) -> Result<Checkpoint, CheckpointError> {
        let manifest = Manifest::read(folder)?;
        let (mut files, mut others) = (BTreeMap::new(), Vec::new());
        for entry in &manifest.files {
            if entry.name.ends_with(".safetensors") {
                files.insert(entry.name.clone(), map(folder, entry)?);
            } else {
                others.push((entry.clone(), open(folder, entry)?));
            }
        }
        for (part, tensors) in &manifest.parts {
            for (name, entry) in tensors {
                agree(folder, &files, name, entry)
                    .map_err(|reason| CheckpointError::damaged(folder, format!("{part} tensor `{name}`: {reason}")))?;
            }
        }
        Ok(Checkpoint { path: folder.to_owned(), manifest, files, others })
    }

    /// Reads every file and compares its checksum.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        for (entry, mut file) in self.others.iter().map(|(entry, file)| (entry, file)) {
            file.rewind().map_err(CheckpointError::io("read", &self.path.join(&entry.name)))?;
            verify_contents(&self.path, entry, file)?;
        }
        let tensors = self.manifest.files.iter().filter_map(|entry| Some((entry, self.files.get(&entry.name)?)));
        tensors.into_iter().try_for_each(|(entry, file)| verify_contents(&self.path, entry, &file.bytes[..]))
    }

    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Completed optimizer steps.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The trainer's state.
    pub fn state(&self) -> &serde_json::Value {
        &self.manifest.state
    }

    /// The manifest, which lists the contents.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The names of a part's tensors, in order; none when there is no such part.
    pub fn names<'a>(&'a self, part: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        self.manifest.parts.get(part).into_iter().flat_map(|tensors| tensors.keys().map(String::as_str))
    }

    /// Checks that every tensor of `part` is one that its reader asks for.
    ///
    /// # Errors
    /// Tensors for which `is_read` returns false.
    pub fn check_all_read(&self, part: &str, is_read: impl Fn(&str) -> bool) -> Result<(), CheckpointError> {
        let tensors: Vec<String> = self.names(part).filter(|name| !is_read(name)).map(str::to_owned).collect();
        match tensors.is_empty() {
            true => Ok(()),
            false => Err(CheckpointError::Unread { path: self.path.clone(), part: part.to_owned(), tensors }),
        }
    }

    /// The manifest's entry of a tensor.
    pub fn entry(&self, part: &str, name: &str) -> Result<&TensorEntry, CheckpointError> {
        self.manifest.parts.get(part).and_then(|tensors| tensors.get(name)).ok_or_else(|| CheckpointError::NoTensor {
            path: self.path.clone(),
            part: part.to_owned(),
            name: name.to_owned(),
        })
    }

    /// Reads the elements `range` of a tensor, little-endian and row-major, into `target`. Only the
    /// pieces that hold them are touched.
    ///
    /// # Errors
    /// A missing tensor, or a `target` of the wrong size.
    pub fn read(&self, part: &str, name: &str, range: Range<usize>, target: &mut [u8]) -> Result<(), CheckpointError> {
        self.read_runs(part, name, &[Runs::from(range).placed_at(0)], target)
    }

    /// All bytes of a tensor, little-endian and row-major.
    ///
    /// # Errors
    /// A missing tensor, or one of an unknown type.
    pub fn read_whole(&self, part: &str, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let entry = self.entry(part, name)?;
        let size = dtype(&entry.dtype).map(DType::size).ok_or_else(|| {
            CheckpointError::damaged(&self.path, format!("{part} tensor `{name}`: its type is unknown"))
        })?;
        let mut bytes = vec![0; entry.elements() * size];
        self.read(part, name, 0..entry.elements(), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads some of a tensor's elements, little-endian, into their places in `target`. Of the
    /// files, only those elements are touched.
    ///
    /// # Errors
    /// A missing tensor, elements that it does not have, or a `target` of another size than theirs.
    pub fn read_runs(
        &self,
        part: &str,
        name: &str,
        wanted: &[PlacedRuns],
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let entry = self.entry(part, name)?;
        let wrong = |what: &str| CheckpointError::damaged(&self.path, format!("{part} tensor `{name}`: {what}"));
        let size = dtype(&entry.dtype).ok_or_else(|| wrong("its type is unknown"))?.size();
        let elements: usize = wanted.iter().map(|placed| placed.runs.elements()).sum();
        let fits = |placed: &PlacedRuns| {
            placed.runs.are_within(entry.elements()) && placed.places().all(|place| place.end * size <= target.len())
        };
        if target.len() != elements * size || !wanted.iter().all(fits) {
            let wanted = wanted.iter().map(|placed| placed.runs.to_string()).collect::<Vec<_>>().join(", ");
            return Err(wrong(&format!("{wanted} were asked for, {} bytes of them", target.len())));
        }
        let mut found = 0;
        for piece in entry.all_pieces() {
            let held = piece.elements().placed_at(piece.at);
            let file = self.files.get(&piece.file).ok_or_else(|| wrong("its file is missing"))?;
            let bytes = file.ranges.get(name).and_then(|range| file.bytes.get(range.clone()));
            let bytes = bytes.ok_or_else(|| wrong("its file does not have it"))?;
            for placed in wanted {
                placed.for_common(&held, |to, from, length| {
                    let bytes = &bytes[from * size..(from + length) * size];
                    target[to * size..(to + length) * size].copy_from_slice(bytes);
                    found += length;
                });
            }
        }
        match found == elements {
            true => Ok(()),
            false => Err(wrong(&format!("{found} of {elements} elements were found"))),
        }
    }
}

/// Maps a file and reads its header. The library checks that the tensors cover the data exactly,
/// one after the other, each with the size that its type and shape have.
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

/// Checks that the manifest's entry of a tensor agrees with the files.
fn agree(folder: &Path, files: &BTreeMap<String, Mapped>, name: &str, entry: &TensorEntry) -> Result<(), String> {
    let dtype = dtype(&entry.dtype).ok_or_else(|| format!("the type {} is unknown", entry.dtype))?;
    let mut pieces = entry.all_pieces();
    pieces.sort_by(|a, b| (&a.file, a.at).cmp(&(&b.file, b.at)));
    for in_file in pieces.chunk_by(|a, b| a.file == b.file) {
        let name_of_file = &in_file[0].file;
        let path = folder.join(name_of_file);
        let file = files.get(name_of_file).ok_or_else(|| format!("{} is no safetensors file", path.display()))?;
        let range = file.ranges.get(name).ok_or_else(|| format!("{name_of_file} does not have it"))?;
        // In the file the pieces lie one after the other.
        let mut end = 0;
        for piece in in_file {
            if piece.at != end {
                return Err(format!("{name_of_file} has a piece at element {} and none at {end}", piece.at));
            }
            end += piece.elements().elements();
        }
        if end.checked_mul(dtype.size()) != Some(range.len()) {
            return Err(format!("{} {:?} is not {} bytes", entry.dtype, entry.shape, range.len()));
        }
    }
    Ok(())
}

fn dtype(name: &str) -> Option<DType> {
    let all = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U32, DType::U8];
    all.into_iter().find(|dtype| dtype_name(*dtype) == name)
}
