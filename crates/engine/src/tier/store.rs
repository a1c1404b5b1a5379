//! A file that holds offloaded state.
//!
//! Reads and writes are positional. They bypass the page cache (`O_DIRECT`) where the file system
//! allows it, so that evicted state does not stay in memory as cache.
//!
//! `O_DIRECT` needs memory addresses, file offsets and lengths that are multiples of [`SECTOR`].
//! Offsets are, by construction. Addresses of buffers from 2 MiB on are, because the pool maps them
//! so. All other bytes pass through an aligned [`Bounce`] buffer.

use super::TierError;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Alignment of direct I/O in bytes. No disk has larger sectors.
pub const SECTOR: usize = 4096;

/// Size in bytes of the bounce buffer.
const BOUNCE: usize = 1 << 20;

/// `bytes` rounded up to a multiple of [`SECTOR`], at which the next region begins.
pub const fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(SECTOR as u64)
}

/// A file of one rank and kind of state. Dropping it removes the file. On the meta device there is
/// no file, and nothing is read or written.
pub struct Store {
    what: &'static str,
    bytes: u64,
    disk: Option<Disk>,
}

struct Disk {
    file: File,
    path: PathBuf,
    direct: bool,
    bounce: Mutex<Bounce>,
}

/// A buffer whose memory is aligned to [`SECTOR`].
struct Bounce {
    bytes: Vec<u8>,
    start: usize,
}

impl Store {
    /// A store of `bytes` bytes without a file, for predictions.
    pub fn nowhere(what: &'static str, bytes: u64) -> Store {
        Store { what, bytes: aligned(bytes), disk: None }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Creates `FOLDER/WHAT-rank-RANK.bin` with room for `bytes` bytes. A file that a killed run
    /// left there is replaced.
    ///
    /// # Errors
    /// If the folder cannot be made or written to, or the disk has not enough room.
    pub fn create(folder: &Path, what: &'static str, rank: u32, bytes: u64) -> Result<Store, TierError> {
        let path = folder.join(format!("{what}-rank-{rank:05}.bin"));
        let trouble = |action, source| TierError::new(action, what, &path, bytes, source);
        std::fs::create_dir_all(folder).map_err(|source| trouble("make the folder of", source))?;
        let open = |flags: i32| {
            OpenOptions::new().read(true).write(true).create(true).truncate(true).custom_flags(flags).open(&path)
        };
        let (file, direct) = match open(libc::O_DIRECT) {
            Ok(file) => (file, true),
            // File systems in memory, and some network file systems, have no direct I/O.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                (open(0).map_err(|e| trouble("create", e))?, false)
            }
            Err(error) => return Err(trouble("create", error)),
        };
        let disk = Disk { file, path: path.clone(), direct, bounce: Mutex::new(Bounce::new()) };
        // The store is made before room is reserved: on an error, dropping it removes the file.
        let store = Store { what, bytes: aligned(bytes), disk: Some(disk) };
        store.reserve(bytes).map_err(|source| trouble("take room on disk for", source))?;
        Ok(store)
    }

    /// True if reads and writes bypass the page cache, or if there is no file.
    pub fn is_direct(&self) -> bool {
        self.disk.as_ref().is_none_or(|disk| disk.direct)
    }

    fn reserve(&self, bytes: u64) -> io::Result<()> {
        let Some(disk) = self.disk.as_ref().filter(|_| bytes > 0) else { return Ok(()) };
        match rustix::fs::fallocate(&disk.file, rustix::fs::FallocateFlags::empty(), 0, aligned(bytes)) {
            // Only the length can be set here. A full disk is then an error of a later write.
            Err(rustix::io::Errno::OPNOTSUPP) => disk.file.set_len(aligned(bytes)),
            other => Ok(other?),
        }
    }

    /// Writes `bytes` at `offset`, a multiple of [`SECTOR`]. The bytes after them, up to the next
    /// multiple, may change.
    ///
    /// # Errors
    /// Those of the operating system, such as a full disk.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), TierError> {
        let Some(disk) = &self.disk else { return Ok(()) };
        disk.write(offset, bytes).map_err(|source| self.trouble("write", bytes.len(), source))
    }

    /// Reads into `target` from `offset`, a multiple of [`SECTOR`].
    ///
    /// # Errors
    /// Those of the operating system, and a file that ends early.
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), TierError> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let bytes = target.len();
        disk.read(offset, target).map_err(|source| self.trouble("read", bytes, source))
    }

    /// Reads from any offset. Slower than [`Store::read`]; not for use in a step.
    ///
    /// # Errors
    /// As [`Store::read`].
    pub fn read_anywhere(&self, offset: u64, target: &mut [u8]) -> Result<(), TierError> {
        let lead = (offset % SECTOR as u64) as usize;
        let mut done = 0;
        let mut sectors = vec![0; BOUNCE];
        while done < target.len() {
            let skip = if done == 0 { lead } else { 0 };
            let wanted = (target.len() - done).min(BOUNCE - skip);
            let whole = (skip + wanted).next_multiple_of(SECTOR);
            self.read(offset + done as u64 - skip as u64, &mut sectors[..whole])?;
            target[done..done + wanted].copy_from_slice(&sectors[skip..skip + wanted]);
            done += wanted;
        }
        Ok(())
    }

    fn trouble(&self, action: &'static str, bytes: usize, source: io::Error) -> TierError {
        let path = self.disk.as_ref().map_or(Path::new(""), |disk| &disk.path);
        TierError::new(action, self.what, path, bytes as u64, source)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a file of offloaded state stays behind");
        }
    }
}

impl Disk {
    /// The number of first bytes of `bytes` that need no bounce buffer.
    fn straight(&self, bytes: &[u8]) -> usize {
        match self.direct {
            true if !bytes.as_ptr().addr().is_multiple_of(SECTOR) => 0,
            true => bytes.len() / SECTOR * SECTOR,
            false => bytes.len(),
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (straight, rest) = bytes.split_at(self.straight(bytes));
        self.file.write_all_at(straight, offset)?;
        let mut bounce = self.bounce();
        for (number, part) in rest.chunks(BOUNCE).enumerate() {
            let sectors = &mut bounce.memory()[..part.len().next_multiple_of(SECTOR)];
            sectors[..part.len()].copy_from_slice(part);
            self.file.write_all_at(sectors, offset + (straight.len() + number * BOUNCE) as u64)?;
        }
        Ok(())
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let (straight, rest) = target.split_at_mut(self.straight(target));
        self.file.read_exact_at(straight, offset)?;
        let mut bounce = self.bounce();
        for (number, part) in rest.chunks_mut(BOUNCE).enumerate() {
            let sectors = &mut bounce.memory()[..part.len().next_multiple_of(SECTOR)];
            self.file.read_exact_at(sectors, offset + (straight.len() + number * BOUNCE) as u64)?;
            part.copy_from_slice(&sectors[..part.len()]);
        }
        Ok(())
    }

    fn bounce(&self) -> std::sync::MutexGuard<'_, Bounce> {
        self.bounce.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Bounce {
    fn new() -> Bounce {
        let bytes = vec![0u8; BOUNCE + SECTOR];
        let start = bytes.as_ptr().addr().next_multiple_of(SECTOR) - bytes.as_ptr().addr();
        Bounce { bytes, start }
    }

    fn memory(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + BOUNCE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory, and a range of `length` test bytes in it that begins `lead` bytes after a multiple
    /// of [`SECTOR`].
    fn bytes(length: usize, lead: usize, salt: usize) -> (Vec<u8>, std::ops::Range<usize>) {
        let memory = vec![0u8; length + 2 * SECTOR];
        let start = memory.as_ptr().addr().next_multiple_of(SECTOR) - memory.as_ptr().addr() + lead;
        let mut memory = memory;
        for (place, byte) in memory[start..start + length].iter_mut().enumerate() {
            *byte = (place.wrapping_mul(31) + salt) as u8;
        }
        (memory, start..start + length)
    }

    #[test]
    fn what_is_written_is_read_whatever_its_alignment() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = [1, 64, SECTOR, SECTOR + 1, 3 * SECTOR - 64, BOUNCE + 5 * SECTOR + 4];
        let store =
            Store::create(folder.path(), "optimizer", 3, sizes.iter().map(|n| aligned(*n as u64)).sum()).unwrap();
        for lead in [0, 64, SECTOR - 4] {
            let mut offset = 0;
            let mut written = Vec::new();
            for size in sizes {
                let (memory, range) = bytes(size, lead, size + lead);
                store.write(offset, &memory[range.clone()]).unwrap();
                written.push((offset, memory[range].to_vec()));
                offset = aligned(offset + size as u64);
            }
            for (offset, expected) in &written {
                for lead in [0, 64] {
                    let (mut memory, range) = bytes(expected.len(), lead, 0);
                    store.read(*offset, &mut memory[range.clone()]).unwrap();
                    assert!(&memory[range] == expected.as_slice(), "{} bytes at {offset}", expected.len());
                }
                let skip = expected.len() / 3;
                let mut part = vec![0; expected.len() - skip];
                store.read_anywhere(offset + skip as u64, &mut part).unwrap();
                assert!(part == expected[skip..], "{} bytes from {skip}", part.len());
            }
        }
        let path = folder.path().join("optimizer-rank-00003.bin");
        assert!(path.exists());
        drop(store);
        assert!(!path.exists(), "the file outlives its store");
    }

    #[test]
    fn what_a_killed_run_left_is_replaced_and_a_file_that_ends_early_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("parameters-rank-00000.bin");
        std::fs::write(&path, vec![7; 3 * SECTOR]).unwrap();
        let store = Store::create(folder.path(), "parameters", 0, SECTOR as u64).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), SECTOR as u64);
        let error = store.read(0, &mut vec![0; 2 * SECTOR]).unwrap_err().to_string();
        assert!(error.contains("cannot read") && error.contains("parameters-rank-00000.bin"), "{error}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_and_a_disk_without_room_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = Store::create(&file.join("in"), "optimizer", 0, 1).err().unwrap().to_string();
        assert!(error.contains("memory.offload.directory") && error.contains("optimizer"), "{error}");
        let error = Store::create(folder.path(), "optimizer", 0, 1 << 60).err().unwrap().to_string();
        assert!(error.contains("1073741824.0 MiB") || error.contains("room"), "{error}");
        assert!(!folder.path().join("optimizer-rank-00000.bin").exists(), "it stays behind");
    }
}
