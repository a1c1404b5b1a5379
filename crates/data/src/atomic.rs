//! Files that appear whole or not at all: written under a temporary name, synced, then renamed.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{DataError, Result};

/// A file being written beside its destination; dropped without [`AtomicFile::commit`] it leaves nothing behind.
pub(crate) struct AtomicFile {
    destination: PathBuf,
    temporary: PathBuf,
    /// `None` once committed.
    writer: Option<BufWriter<File>>,
}

/// Distinguishes temporary files of one process.
static SERIAL: AtomicU64 = AtomicU64::new(0);

impl AtomicFile {
    /// Starts a file that will appear at `destination`, creating missing folders above it.
    pub(crate) fn create(destination: &Path) -> Result<Self> {
        let folder = folder_of(destination);
        fs::create_dir_all(folder).map_err(DataError::io("create", folder))?;
        let name = destination.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!(".{name}.{}-{serial}.tmp", std::process::id()));
        let file = File::create(&temporary).map_err(DataError::io("create", &temporary))?;
        let writer = BufWriter::with_capacity(1 << 18, file);
        Ok(Self { destination: destination.to_path_buf(), temporary, writer: Some(writer) })
    }

    /// Appends `bytes`.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.writer {
            Some(writer) => writer.write_all(bytes).map_err(DataError::io("write", &self.destination)),
            None => Err(DataError::io("write", &self.destination)(io::Error::other("already committed"))),
        }
    }

    /// Flushes to the disk, so that a later rename cannot expose an incomplete file.
    pub(crate) fn sync(&mut self) -> Result<()> {
        if let Some(writer) = &mut self.writer {
            writer.flush().map_err(DataError::io("write", &self.destination))?;
            writer.get_ref().sync_all().map_err(DataError::io("sync", &self.destination))?;
        }
        Ok(())
    }

    /// Syncs and renames into place.
    pub(crate) fn commit(mut self) -> Result<()> {
        self.sync()?;
        fs::rename(&self.temporary, &self.destination).map_err(DataError::io("rename", &self.destination))?;
        self.writer = None;
        sync_folder(folder_of(&self.destination))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.writer.take().is_some() {
            // The error that brought us here is the one worth reporting.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a small file atomically.
pub(crate) fn write(destination: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(destination)?;
    file.write(bytes)?;
    file.commit()
}

/// Removes a file that may be absent.
pub(crate) fn remove_if_present(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(reason) if reason.kind() != io::ErrorKind::NotFound => Err(DataError::io("remove", path)(reason)),
        _ => Ok(()),
    }
}

/// The folder a path lies in; `.` for a bare name.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Makes a rename durable; folders that cannot be synced (some network file systems) are left to the system.
fn sync_folder(folder: &Path) -> Result<()> {
    if let Ok(handle) = File::open(folder) {
        let _ = handle.sync_all();
    }
    Ok(())
}
