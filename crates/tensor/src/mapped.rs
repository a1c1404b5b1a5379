//! Read-only memory-mapped files: token files and weight files are read where the page cache has
//! them.
//!
//! It lives here because mapping a file is `unsafe` and unsafe code stays in this crate. What it
//! does not do: writing through a mapping, or guarding against somebody who truncates the file
//! while it is mapped (that ends the process with SIGBUS, as for every program that maps files;
//! Trainyard itself only ever replaces files by rename, which leaves an existing mapping whole).

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::{Advice, Mmap};

/// The bytes of a file, mapped; dereferences to `[u8]`.
#[derive(Debug)]
pub struct MappedFile {
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps the whole regular file at `path`.
    ///
    /// Fails as opening does, and with `InvalidInput` when `path` is a directory, pipe or device.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        if metadata.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the mapping is private and read-only. That nobody changes the file under it
        // cannot be proved by any program; ours never do (see the module text), and only plain
        // bytes are ever read from it.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map: Some(map) })
    }

    /// Asks the kernel to read the file into the page cache in the background; a refusal costs only
    /// speed.
    pub fn warm(&self) {
        if let Some(map) = &self.map {
            let _ = map.advise(Advice::WillNeed);
        }
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_files_and_refuses_directories() {
        let folder = std::env::temp_dir().join(format!("trainyard-mapped-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("file");
        std::fs::write(&path, b"abc").unwrap();
        let mapped = MappedFile::open(&path).unwrap();
        mapped.warm();
        assert_eq!(&mapped[..], b"abc");
        std::fs::write(folder.join("empty"), b"").unwrap();
        assert_eq!(&MappedFile::open(&folder.join("empty")).unwrap()[..], b"");
        assert!(MappedFile::open(&folder).is_err());
        assert!(MappedFile::open(&folder.join("absent")).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
