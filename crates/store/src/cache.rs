//! A folder with ranges of objects that were read before.
//!
//! An entry is one file: a line of JSON that says which range of which version of which object it
//! holds, and the xxh3 hash of its bytes, then the bytes. An entry whose line differs from the
//! request, or whose bytes do not have the hash, is not used and is removed. Entries appear by
//! rename, so no process sees half of one.
//!
//! When the folder grows above its limit, the entries that were used least recently are removed.
//! Each process counts what it adds, and lists the folder again after every sixteenth of the
//! limit. Several processes may thus exceed it by a sixteenth each.

use std::fs::{self, File, FileTimes};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::error::StoreError;

/// Size of a cache unless another is asked for.
pub const CACHE_BYTES: u64 = 16 << 30;

/// Extension of entries. Other files in the folder are left alone.
const EXTENSION: &str = "range";

/// Extension of entries being written.
const HALF: &str = "half";

/// A half-written entry of this age was left by a process that was killed.
const HALF_LEFT: Duration = Duration::from_secs(3600);

/// Longest first line.
const LINE_BYTES_MAX: usize = 16 << 10;

/// A cache on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// The folder. It is made if it is missing, and other processes may use it too.
    pub folder: PathBuf,
    /// Bytes that its entries may take.
    pub bytes_max: u64,
}

/// The first line of an entry.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) object: String,
    pub(crate) validator: String,
    pub(crate) bytes: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Set by the cache.
    pub(crate) xxh3: String,
}

#[derive(Debug)]
pub(crate) struct Cache {
    options: CacheOptions,
    /// Bytes in the folder as it was listed last, and those added since.
    listed: Mutex<u64>,
    added: AtomicU64,
    /// Number of the next half-written entry of this process.
    number: AtomicU64,
    has_warned: AtomicBool,
}

impl Cache {
    pub(crate) fn open(options: &CacheOptions) -> Result<Self, StoreError> {
        let cache = Self {
            options: options.clone(),
            listed: Mutex::new(0),
            added: AtomicU64::new(0),
            number: AtomicU64::new(0),
            has_warned: AtomicBool::new(false),
        };
        let made = fs::create_dir_all(&options.folder).and_then(|()| cache.evict());
        made.map_err(|error| {
            let what = format!("cannot be used as a cache of objects ({error})");
            StoreError::new(options.folder.display().to_string(), what, "choose another folder")
        })?;
        Ok(cache)
    }

    /// The bytes of an entry, verified; None if there is none.
    pub(crate) fn get(&self, wanted: &Entry) -> Option<Bytes> {
        let path = self.path(wanted);
        let mut file = File::open(&path).ok()?;
        let mut all = Vec::new();
        file.read_to_end(&mut all).ok()?;
        let found = check(&all, wanted);
        if found.is_none() {
            let _ = fs::remove_file(&path);
            return None;
        }
        // The time of change is the time of the last use.
        let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
        let begin = found?;
        Some(Bytes::from(all).slice(begin..))
    }

    /// Keeps the bytes of an entry. A failure costs only the entry; the first is reported.
    pub(crate) fn put(&self, entry: &Entry, data: &[u8]) {
        if let Err(error) = self.try_put(entry, data)
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            let folder = self.options.folder.display();
            tracing::warn!("the cache {folder} cannot be written ({error}); objects are read without it");
        }
    }

    fn try_put(&self, entry: &Entry, data: &[u8]) -> std::io::Result<()> {
        let limit = self.options.bytes_max;
        let size = data.len() as u64;
        if size > limit / 2 {
            return Ok(());
        }
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let half = self.options.folder.join(format!("{}-{number}.{HALF}", std::process::id()));
        let entry = Entry {
            xxh3: format!("{:016x}", xxh3_64(data)),
            object: entry.object.clone(),
            validator: entry.validator.clone(),
            ..*entry
        };
        let mut line = serde_json::to_vec(&entry)?;
        line.push(b'\n');
        let written = File::create(&half).and_then(|mut file| {
            file.write_all(&line)?;
            file.write_all(data)?;
            fs::rename(&half, self.path(&entry))
        });
        if let Err(error) = written {
            let _ = fs::remove_file(&half);
            return Err(error);
        }
        let added = self.added.fetch_add(size + line.len() as u64, Ordering::Relaxed) + size;
        let listed = *self.listed.lock().expect("no thread panics with the lock");
        if listed + added > limit || added > limit / 16 { self.evict() } else { Ok(()) }
    }

    /// Lists the folder and removes entries until the rest is within the limit.
    fn evict(&self) -> std::io::Result<()> {
        let mut listed = self.listed.lock().expect("no thread panics with the lock");
        self.added.store(0, Ordering::Relaxed);
        let mut entries = Vec::new();
        for found in fs::read_dir(&self.options.folder)? {
            let path = found?.path();
            // Another process may have removed it.
            let Ok(about) = fs::metadata(&path) else { continue };
            let modified = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some(EXTENSION) => entries.push((modified, about.len(), path)),
                Some(HALF) if modified.elapsed().is_ok_and(|age| age > HALF_LEFT) => {
                    let _ = fs::remove_file(&path);
                }
                _ => {}
            }
        }
        let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        entries.sort_unstable();
        // Room for the entries until the next listing.
        let limit = self.options.bytes_max - self.options.bytes_max / 16;
        for (_, bytes, path) in &entries {
            if total <= limit {
                break;
            }
            let _ = fs::remove_file(path);
            total -= bytes;
        }
        *listed = total;
        Ok(())
    }

    fn path(&self, entry: &Entry) -> PathBuf {
        let Entry { object, validator, bytes, start, end, .. } = entry;
        let identity = format!("{object}\n{validator}\n{bytes}\n{start}\n{end}");
        self.options.folder.join(Path::new(&format!("{:032x}.{EXTENSION}", xxh3_128(identity.as_bytes()))))
    }
}

/// The place where the bytes of an entry begin, if it is the one that is wanted and is undamaged.
fn check(all: &[u8], wanted: &Entry) -> Option<usize> {
    let end = all.iter().take(LINE_BYTES_MAX).position(|&byte| byte == b'\n')?;
    let found: Entry = serde_json::from_slice(&all[..end]).ok()?;
    let data = &all[end + 1..];
    let is_wanted = (&found.object, &found.validator, found.bytes, found.start, found.end)
        == (&wanted.object, &wanted.validator, wanted.bytes, wanted.start, wanted.end);
    let is_whole = data.len() as u64 == wanted.end - wanted.start && found.xxh3 == format!("{:016x}", xxh3_64(data));
    (is_wanted && is_whole).then_some(end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(start: u64) -> Entry {
        Entry {
            object: "s3://b/k".into(),
            validator: "v1".into(),
            bytes: 4000,
            start,
            end: start + 1000,
            xxh3: String::new(),
        }
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
        files.sort();
        files
    }

    #[test]
    fn only_whole_entries_of_the_same_version_are_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(&CacheOptions { folder: folder.path().into(), bytes_max: 1 << 20 }).unwrap();
        let data: Vec<u8> = (0..1000u32).map(|i| i as u8).collect();
        cache.put(&entry(0), &data);
        assert_eq!(cache.get(&entry(0)).unwrap(), data);
        assert!(cache.get(&entry(1000)).is_none());
        assert!(cache.get(&Entry { validator: "v2".into(), ..entry(0) }).is_none());
        // Each way of damage: a byte changed, the end cut off, nothing left.
        let file = &files(folder.path())[0];
        let whole = fs::read(file).unwrap();
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        for damaged in [&changed[..], &whole[..whole.len() - 1], &whole[..20], &[]] {
            fs::write(file, damaged).unwrap();
            assert!(cache.get(&entry(0)).is_none());
            assert!(!file.exists(), "a damaged entry is removed");
        }
        // A half-written entry is no entry.
        fs::write(folder.path().join("1-0.half"), &whole).unwrap();
        assert!(cache.get(&entry(0)).is_none());
        fs::write(file, &whole).unwrap();
        assert_eq!(cache.get(&entry(0)).unwrap(), data);
    }

    #[test]
    fn what_was_used_least_recently_is_evicted() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Cache::open(&CacheOptions { folder: folder.path().into(), bytes_max: 4000 }).unwrap();
        let cache = open();
        let used = |start: u64, second: u64| {
            let file = File::open(cache.path(&entry(start))).unwrap();
            file.set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second)))
                .unwrap();
        };
        fs::write(folder.path().join("other.txt"), "of someone else").unwrap();
        for start in 0..3 {
            cache.put(&entry(start), &[start as u8; 1000]);
            used(start, start);
        }
        // Entry 0 is read again, by another process, and 1 is then the oldest.
        assert!(open().get(&entry(0)).is_some());
        cache.put(&entry(3), &[3; 1000]);
        assert!(cache.get(&entry(1)).is_none(), "evicted");
        assert!([0, 2, 3].iter().all(|&start| cache.get(&entry(start)).is_some()));
        let total: u64 = files(folder.path()).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
        assert!(total <= 4000, "{total}");
        assert!(folder.path().join("other.txt").exists());
        // An entry that would fill the cache alone is not kept.
        cache.put(&Entry { end: 4000, ..entry(0) }, &[0; 4000]);
        assert!(cache.get(&Entry { end: 4000, ..entry(0) }).is_none());
    }
}
