//! Injection of disk faults. All changes to the disk go through [`Disk`], which numbers them, so
//! that a test can let any one of them fail or crash.

use super::CheckpointError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A fault at one position of the sequence of changes to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The position, from 0.
    pub at: u64,
    /// The kind of the fault.
    pub kind: FaultKind,
}

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The operating system refuses this one change.
    Fail(io::ErrorKind),
    /// The process dies: half of a write is done, and nothing after it.
    Crash,
    /// The machine loses power: as a crash, and unsynced changes may be lost. File contents are
    /// cut, names of new files vanish and the last renames are undone; the seed decides how many.
    PowerLoss {
        /// Seed that decides the lost changes.
        seed: u64,
    },
    /// One bit of the written data is flipped silently.
    Corrupt,
}

/// The disk, with at most one fault in it.
#[derive(Debug, Default)]
pub(super) struct Disk {
    fault: Option<Fault>,
    position: u64,
    crashed: bool,
    /// The changes that a power loss may undo: file contents, names in folders, and renames in
    /// their order.
    unsynced: Vec<PathBuf>,
    unsynced_names: Vec<PathBuf>,
    unsynced_renames: Vec<(PathBuf, PathBuf)>,
}

/// A file being written.
#[derive(Debug)]
pub(super) struct Output {
    file: File,
    path: PathBuf,
}

impl Disk {
    pub fn with_fault(fault: Option<Fault>) -> Disk {
        Disk { fault, ..Disk::default() }
    }

    /// Number of changes so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Counts a change. Returns true if the fault is at this change.
    fn step(&mut self, action: &'static str, path: &Path) -> Result<bool, CheckpointError> {
        if self.crashed {
            return Err(CheckpointError::Injected(self.position));
        }
        let here = self.position;
        self.position += 1;
        let Some(Fault { kind, .. }) = self.fault.filter(|fault| fault.at == here) else { return Ok(false) };
        match kind {
            FaultKind::Fail(kind) => Err(CheckpointError::io(action, path)(io::Error::new(kind, "injected"))),
            FaultKind::Crash | FaultKind::PowerLoss { .. } | FaultKind::Corrupt => Ok(true),
        }
    }

    /// Counts a change that is not a write, and dies if the fault is there. `Corrupt` has nothing
    /// to corrupt in such a change.
    fn step_whole(&mut self, action: &'static str, path: &Path) -> Result<(), CheckpointError> {
        let hit = self.step(action, path)?;
        if hit && self.fault.is_some_and(|fault| fault.kind != FaultKind::Corrupt) { Err(self.die()) } else { Ok(()) }
    }

    fn die(&mut self) -> CheckpointError {
        self.crashed = true;
        if let Some(Fault { kind: FaultKind::PowerLoss { seed }, .. }) = self.fault {
            self.lose(seed);
        }
        CheckpointError::Injected(self.position - 1)
    }

    /// Undoes a part of the unsynced changes. Errors are ignored: files that are already gone
    /// cannot be lost.
    fn lose(&mut self, mut seed: u64) {
        // Knuth's linear congruential generator; its high bits are good enough to pick.
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for path in std::mem::take(&mut self.unsynced) {
            if let Ok(file) = OpenOptions::new().write(true).open(&path)
                && let Ok(metadata) = file.metadata()
            {
                let _ = file.set_len(below(metadata.len() + 1));
            }
        }
        for path in std::mem::take(&mut self.unsynced_names) {
            if below(2) == 0 {
                let _ = fs::remove_file(&path);
            }
        }
        // A journal loses its end: the last renames are undone, never some in the middle.
        let renames = std::mem::take(&mut self.unsynced_renames);
        let lost = below(renames.len() as u64 + 1) as usize;
        for (from, to) in renames.iter().rev().take(lost) {
            if !from.exists() {
                let _ = fs::rename(to, from);
            }
        }
    }

    pub fn create_dir(&mut self, path: &Path) -> Result<(), CheckpointError> {
        self.step_whole("create", path)?;
        fs::create_dir(path).map_err(CheckpointError::io("create", path))
    }

    pub fn create(&mut self, path: &Path) -> Result<Output, CheckpointError> {
        self.step_whole("create", path)?;
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
        let file = file.map_err(CheckpointError::io("create", path))?;
        self.unsynced.push(path.to_owned());
        self.unsynced_names.push(path.to_owned());
        Ok(Output { file, path: path.to_owned() })
    }

    pub fn write(&mut self, out: &mut Output, bytes: &[u8]) -> Result<(), CheckpointError> {
        let mut altered;
        let mut bytes = bytes;
        if self.step("write to", &out.path)? {
            if self.fault.is_some_and(|fault| fault.kind != FaultKind::Corrupt) {
                out.file.write_all(&bytes[..bytes.len() / 2]).map_err(CheckpointError::io("write to", &out.path))?;
                return Err(self.die());
            }
            altered = bytes.to_vec();
            if let Some(byte) = altered.last_mut() {
                *byte ^= 4;
            }
            bytes = &altered;
        }
        out.file.write_all(bytes).map_err(CheckpointError::io("write to", &out.path))
    }

    pub fn sync(&mut self, out: Output) -> Result<(), CheckpointError> {
        self.step_whole("sync", &out.path)?;
        out.file.sync_all().map_err(CheckpointError::io("sync", &out.path))?;
        self.unsynced.retain(|path| *path != out.path);
        Ok(())
    }

    /// Makes the names in a folder durable.
    pub fn sync_dir(&mut self, path: &Path) -> Result<(), CheckpointError> {
        self.step_whole("sync", path)?;
        File::open(path).and_then(|folder| folder.sync_all()).map_err(CheckpointError::io("sync", path))?;
        self.unsynced_names.retain(|name| name.parent() != Some(path));
        self.unsynced_renames.retain(|(_, to)| to.parent() != Some(path));
        Ok(())
    }

    pub fn rename(&mut self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.step_whole("rename", from)?;
        fs::rename(from, to).map_err(CheckpointError::io("rename", from))?;
        // Paths inside the renamed folder change too.
        for path in self.unsynced.iter_mut().chain(&mut self.unsynced_names) {
            if let Ok(rest) = path.strip_prefix(from) {
                *path = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
            }
        }
        self.unsynced_renames.push((from.to_owned(), to.to_owned()));
        Ok(())
    }

    /// Removes a folder and its files, one at a time, so that a crash can fall in between.
    pub fn remove_tree(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let entries = fs::read_dir(path).map_err(CheckpointError::io("list", path))?;
        let mut files: Vec<_> = entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
        files.sort();
        for file in files {
            self.step_whole("remove", &file)?;
            let removed = if file.is_dir() { fs::remove_dir_all(&file) } else { fs::remove_file(&file) };
            removed.map_err(CheckpointError::io("remove", &file))?;
        }
        self.step_whole("remove", path)?;
        fs::remove_dir(path).map_err(CheckpointError::io("remove", path))
    }

    /// Replaces a small file: writes a new one beside it, syncs that, renames it over the old one
    /// and syncs the folder.
    pub fn replace(&mut self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        let temporary = path.with_extension("tmp");
        let mut out = self.create(&temporary)?;
        self.write(&mut out, bytes)?;
        self.sync(out)?;
        self.rename(&temporary, path)?;
        path.parent().map_or(Ok(()), |folder| self.sync_dir(folder))
    }
}
