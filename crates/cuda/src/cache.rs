//! A cache on disk of compiled kernels and chosen algorithms, under the hash of everything that
//! they depend on.
//!
//! A file holds the content and its checksum, and appears by a rename. A file that another process
//! has half written, or that a disk has damaged, counts as missing.

use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// A folder of results. Without one nothing is found, and nothing kept.
#[derive(Clone, Debug, Default)]
pub struct Cache(Option<PathBuf>);

/// Names the folder.
pub const VARIABLE: &str = "TRAINYARD_CUDA_CACHE";

impl Cache {
    /// `$TRAINYARD_CUDA_CACHE`, else `trainyard/cuda` below `$XDG_CACHE_HOME`, else below
    /// `~/.cache`.
    pub fn of_this_process() -> Cache {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        Cache(set(VARIABLE).or_else(|| Some(cache()?.join("trainyard").join("cuda"))))
    }

    /// A folder.
    pub fn at(folder: &Path) -> Cache {
        Cache(Some(folder.to_owned()))
    }

    fn file(&self, key: &str) -> Option<PathBuf> {
        Some(self.0.as_ref()?.join(format!("{:032x}", xxh3_128(key.as_bytes()))))
    }

    /// The content kept under a key, if it is whole.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        let mut content = std::fs::read(self.file(key)?).ok()?;
        let sum = content.split_off(content.len().checked_sub(8)?);
        (sum == xxh3_64(&content).to_le_bytes()).then_some(content)
    }

    /// Keeps what took time to make.
    ///
    /// # Errors
    /// The folder cannot be written; what was made is good all the same.
    pub fn put(&self, key: &str, content: &[u8]) -> std::io::Result<()> {
        let Some(file) = self.file(key) else { return Ok(()) };
        std::fs::create_dir_all(file.parent().expect("a file in the folder"))?;
        let own = file.with_extension(std::process::id().to_string());
        std::fs::write(&own, [content, &xxh3_64(content).to_le_bytes()].concat())?;
        std::fs::rename(own, file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_damaged_is_not_found() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(&folder.path().join("below"));
        assert_eq!(cache.get("a"), None);
        cache.put("a", b"machine code").unwrap();
        assert_eq!((cache.get("a").unwrap(), cache.get("b")), (b"machine code".to_vec(), None));
        let file = cache.file("a").unwrap();
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[3] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(cache.get("a"), None);
        std::fs::write(&file, b"short").unwrap();
        assert_eq!(cache.get("a"), None);
        assert!(Cache::default().put("a", b"").is_ok() && Cache::default().get("a").is_none());
    }
}
