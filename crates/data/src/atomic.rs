//! Files that appear whole or not at all: written under a temporary name, synced, then renamed.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{DataError, Result};

/// A file being written beside its destination. Dropped without [`AtomicFile::commit`], it leaves
/// nothing behind.
pub(crate) struct AtomicFile {
    destination: PathBuf,
    temporary: PathBuf,
    /// `None` once committed.
    writer: Option<BufWriter<File>>,
}

/// Distinguishes temporary files of one process.
static SERIAL: AtomicU64 = AtomicU64::new(0);

impl AtomicFile {
    /// Starts a file that will appear at `destination`, or at the target of a link there, and
    /// creates missing folders above it.
    ///
    /// # Errors
    /// The destination exists and is not a file (a device, for example), and errors of the system.
    pub(crate) fn create(destination: &Path) -> Result<Self> {
        let destination = &fs::canonicalize(destination).unwrap_or_else(|_| destination.to_path_buf());
        if fs::metadata(destination).is_ok_and(|there| !there.is_file()) {
            return Err(DataError::input(
                destination,
                None,
                "is no regular file, and would be replaced",
                "name another file",
            ));
        }
        let folder = folder_of(destination);
        fs::create_dir_all(folder).map_err(DataError::io("create", folder))?;
        let name = destination.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!(".{name}.{}-{serial}.tmp", std::process::id()));
        clear_left_behind(folder, &name);
        let file = File::create(&temporary).map_err(DataError::io("create", &temporary))?;
        // The lock is held until this process ends, in whatever way. Where locks are not supported,
        // abandoned files stay.
        let _ = file.try_lock();
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
            // The error that led here is the one worth reporting.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// A younger file may belong to another process that has not locked it yet.
const LEFT_BEHIND: Duration = Duration::from_secs(60);

/// Removes temporary files for `name` that killed processes left behind, so that their hidden names
/// do not take disk space for ever.
fn clear_left_behind(folder: &Path, name: &str) {
    let prefix = format!(".{name}.");
    // Anything that cannot be examined stays: a new file can be written beside it.
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_ours = |file: &str| {
            let number = file.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".tmp"));
            number.is_some_and(|number| number.split('-').all(|n| n.parse::<u64>().is_ok()))
        };
        if !path.file_name().and_then(|file| file.to_str()).is_some_and(is_ours) {
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        let age = file.metadata().and_then(|about| about.modified()).map(|at| at.elapsed().unwrap_or_default());
        if age.is_ok_and(|age| age > LEFT_BEHIND) && file.try_lock().is_ok() {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Writes a small file whole or not at all, and makes missing folders above it.
pub fn write(destination: &Path, bytes: &[u8]) -> Result<()> {
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

/// The folder that a path lies in; `.` for a bare name.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Makes a rename durable; folders that cannot be synced (some network file systems) are left to
/// the system.
fn sync_folder(folder: &Path) -> Result<()> {
    if let Ok(handle) = File::open(folder) {
        let _ = handle.sync_all();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn what_a_killed_process_left_goes_and_what_is_written_stays() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| folder.path().join(name);
        let old = SystemTime::now() - 2 * LEFT_BEHIND;
        for name in [".a.bin.77-0.tmp", ".a.bin.78-1.tmp", ".a.bin.x-1.tmp", ".b.bin.77-0.tmp", ".a.bin.79-0.tmp"] {
            let file = File::create(of(name)).unwrap();
            if name != ".a.bin.79-0.tmp" {
                file.set_modified(old).unwrap();
            }
        }
        let written = File::open(of(".a.bin.78-1.tmp")).unwrap();
        written.try_lock().unwrap();
        write(&of("a.bin"), b"whole").unwrap();
        let mut left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        // These are locked, without a process number, of another file, or too young.
        assert_eq!(left, [".a.bin.78-1.tmp", ".a.bin.79-0.tmp", ".a.bin.x-1.tmp", ".b.bin.77-0.tmp", "a.bin"]);
    }
}
