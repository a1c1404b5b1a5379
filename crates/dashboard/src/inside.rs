//! Opens files below the runs folder, and refuses all others.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

/// Opens regular files below one folder. A symbolic link that leads out of it is refused.
#[derive(Clone, Debug)]
pub struct Inside {
    root: PathBuf,
}

/// Do not wait for the writer of a named pipe (`O_NONBLOCK` of Linux).
const NONBLOCKING: i32 = 0o4000;

impl Inside {
    /// All files below `root`.
    ///
    /// # Errors
    ///
    /// The folder does not exist.
    pub fn new(root: &Path) -> io::Result<Inside> {
        let root = root.canonicalize()?;
        if !root.is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotADirectory, "not a folder"));
        }
        Ok(Inside { root })
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Opens `path`, relative to the folder or absolute.
    ///
    /// # Errors
    ///
    /// It lies elsewhere, is not a regular file, or cannot be opened.
    pub fn open(&self, path: &Path) -> io::Result<File> {
        let refused = |why| io::Error::new(io::ErrorKind::PermissionDenied, why);
        if path.components().any(|part| part == Component::ParentDir) {
            return Err(refused("the path has .. in it"));
        }
        let real = self.root.join(path).canonicalize()?;
        if !real.starts_with(&self.root) {
            return Err(refused("it lies outside the runs folder"));
        }
        let file = OpenOptions::new().read(true).custom_flags(NONBLOCKING).open(real)?;
        if !file.metadata()?.is_file() {
            return Err(refused("it is not a regular file"));
        }
        Ok(file)
    }

    /// The text of a file of at most `bytes_max` bytes. Bytes that are no UTF-8 are replaced.
    ///
    /// # Errors
    ///
    /// As [`Inside::open`], or the file is larger.
    pub fn read(&self, path: &Path, bytes_max: u64) -> io::Result<String> {
        use io::Read as _;
        let mut bytes = Vec::new();
        self.open(path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > bytes_max {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {bytes_max} bytes")));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_inside_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let runs = folder.path().join("runs");
        std::fs::create_dir_all(runs.join("a")).unwrap();
        std::fs::write(folder.path().join("secret"), "s").unwrap();
        std::fs::write(runs.join("a/config.toml"), "x").unwrap();
        std::os::unix::fs::symlink(folder.path().join("secret"), runs.join("a/link")).unwrap();
        std::os::unix::fs::symlink(folder.path(), runs.join("out")).unwrap();
        std::os::unix::fs::symlink(runs.join("a/config.toml"), runs.join("a/inner")).unwrap();
        let inside = Inside::new(&runs).unwrap();
        let read = |path: &str| inside.read(Path::new(path), 10).map_err(|error| error.kind());
        assert_eq!(read("a/config.toml").unwrap(), "x");
        assert_eq!(read("a/inner").unwrap(), "x");
        for path in ["a/link", "out/secret", "../secret", "a/../../secret", "/etc/passwd", "a"] {
            assert_eq!(read(path), Err(io::ErrorKind::PermissionDenied), "{path}");
        }
        assert_eq!(read("a/none"), Err(io::ErrorKind::NotFound));
        std::fs::write(runs.join("a/config.toml"), "12345678901").unwrap();
        assert_eq!(read("a/config.toml"), Err(io::ErrorKind::FileTooLarge));
    }
}
