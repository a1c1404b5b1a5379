//! A folder with results of work that was done before: ranges of objects that were read, images
//! that were decoded.
//!
//! An entry is one file: a line of JSON with the identity of what it holds and the xxh3 hash of its
//! bytes, then the bytes. An entry whose line differs from the request, or whose bytes do not have
//! the hash, is not used and is removed. Entries appear by rename, so no process sees half of one.
//!
//! Each process counts what it adds, and lists the folder again after every sixteenth of the
//! limit. Several processes may thus exceed it by a sixteenth each.

use std::fs::{self, File, FileTimes};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Size of a cache unless another is asked for.
pub const CACHE_BYTES: u64 = 16 << 30;

/// Extension of entries being written.
const HALF: &str = "half";

/// A half-written entry of this age was left by a process that was killed.
const HALF_LEFT: Duration = Duration::from_secs(3600);

/// An entry of a full cache that keeps its entries goes once it was not used for this time.
const FORGOTTEN: Duration = Duration::from_secs(14 * 24 * 3600);

/// Longest first line.
const LINE_BYTES_MAX: u64 = 16 << 10;

/// A cache on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// The folder. It is made if it is missing, and other processes may use it too.
    pub folder: PathBuf,
    /// Bytes that its entries may take.
    pub bytes_max: u64,
}

/// The entries of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// What they are, in the plural.
    pub what: &'static str,
    /// Extension of their files. Other files in the folder are left alone.
    pub extension: &'static str,
    /// What a full cache does.
    pub full: Full,
}

/// What a full cache does with one more entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// The entries that were used least recently are removed.
    Evicts,
    /// It is not kept. A training passes over everything again and again in random order: half of
    /// it, if it stays, is found by half of the readings; of the half that was used last, few are.
    /// Entries that no one used for two weeks are removed.
    Keeps,
}

/// The first line of an entry.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Line {
    identity: String,
    xxh3: String,
}

/// A cache that is open.
#[derive(Debug)]
pub struct Cache {
    options: CacheOptions,
    kind: Kind,
    /// Bytes in the folder as it was listed last, and those added since.
    listed: Mutex<u64>,
    added: AtomicU64,
    /// Number of the next half-written entry of this process.
    number: AtomicU64,
    has_warned: AtomicBool,
    /// True if an entry was not kept for want of room.
    is_full: AtomicBool,
}

impl Cache {
    /// # Errors
    /// The folder cannot be made or listed.
    pub fn open(options: &CacheOptions, kind: Kind) -> std::io::Result<Self> {
        let cache = Self {
            options: options.clone(),
            kind,
            listed: Mutex::new(0),
            added: AtomicU64::new(0),
            number: AtomicU64::new(0),
            has_warned: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
        };
        fs::create_dir_all(&options.folder)?;
        cache.make_room()?;
        Ok(cache)
    }

    /// The bytes of an entry, verified; None if there is none.
    pub fn get(&self, identity: &str) -> Option<Vec<u8>> {
        let path = self.path(identity);
        let file = File::open(&path).ok()?;
        let found = read(&file, identity);
        if found.is_none() {
            let _ = fs::remove_file(&path);
            return None;
        }
        // The time of change is the time of the last use.
        let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
        found
    }

    /// Keeps `parts`, one after the other, as the bytes of an entry. A failure costs only the
    /// entry; the first is reported.
    pub fn put(&self, identity: &str, parts: &[&[u8]]) {
        if let Err(error) = self.try_put(identity, parts)
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            let folder = self.options.folder.display();
            tracing::warn!("the cache {folder} cannot be written ({error}); {} are not kept", self.kind.what);
        }
    }

    fn try_put(&self, identity: &str, parts: &[&[u8]]) -> std::io::Result<()> {
        let limit = self.options.bytes_max;
        let size: u64 = parts.iter().map(|part| part.len() as u64).sum();
        if size > limit / 2 || self.kind.full == Full::Keeps && self.bytes() + size > limit {
            self.is_full.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let half = self.options.folder.join(format!("{}-{number}.{HALF}", std::process::id()));
        let line = Line { identity: identity.to_owned(), xxh3: hash(parts) };
        let mut line = serde_json::to_vec(&line)?;
        line.push(b'\n');
        let written = File::create(&half).and_then(|mut file| {
            file.write_all(&line)?;
            parts.iter().try_for_each(|part| file.write_all(part))?;
            fs::rename(&half, self.path(identity))
        });
        if let Err(error) = written {
            let _ = fs::remove_file(&half);
            return Err(error);
        }
        let size = size + line.len() as u64;
        let added = self.added.fetch_add(size, Ordering::Relaxed) + size;
        let crowded = self.kind.full == Full::Evicts && self.bytes() > limit;
        if crowded || added > limit / 16 { self.make_room() } else { Ok(()) }
    }

    /// Bytes of all entries, as far as this process knows.
    pub fn bytes(&self) -> u64 {
        *self.listed.lock().expect("no thread panics with the lock") + self.added.load(Ordering::Relaxed)
    }

    /// True if an entry was not kept for want of room.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Lists the folder, and removes entries as the kind of cache says until the rest is within the
    /// limit.
    fn make_room(&self) -> std::io::Result<()> {
        let mut listed = self.listed.lock().expect("no thread panics with the lock");
        self.added.store(0, Ordering::Relaxed);
        let mut entries = Vec::new();
        for found in fs::read_dir(&self.options.folder)? {
            let path = found?.path();
            // Another process may have removed it.
            let Ok(about) = fs::metadata(&path) else { continue };
            let modified = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some(extension) if extension == self.kind.extension => entries.push((modified, about.len(), path)),
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
        for (used, bytes, path) in &entries {
            let stays = match self.kind.full {
                Full::Evicts => false,
                // A limit that was lowered holds too.
                Full::Keeps => total <= self.options.bytes_max && !used.elapsed().is_ok_and(|age| age > FORGOTTEN),
            };
            if total <= limit || stays {
                break;
            }
            let _ = fs::remove_file(path);
            total -= bytes;
        }
        *listed = total;
        Ok(())
    }

    fn path(&self, identity: &str) -> PathBuf {
        let name = format!("{:032x}.{}", xxh3_128(identity.as_bytes()), self.kind.extension);
        self.options.folder.join(Path::new(&name))
    }
}

fn hash(parts: &[&[u8]]) -> String {
    let hash = match parts {
        [all] => xxh3_64(all),
        _ => {
            let mut hash = xxhash_rust::xxh3::Xxh3::new();
            parts.iter().for_each(|part| hash.update(part));
            hash.digest()
        }
    };
    format!("{hash:016x}")
}

/// The bytes of an entry, if it is the one that is wanted and is undamaged.
fn read(file: &File, identity: &str) -> Option<Vec<u8>> {
    let size = file.metadata().ok()?.len();
    let mut reader = BufReader::with_capacity(4096, file);
    let mut line = Vec::new();
    reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).ok()?;
    let found: Line = serde_json::from_slice(&line).ok()?;
    let mut data = Vec::with_capacity(size.saturating_sub(line.len() as u64) as usize);
    reader.read_to_end(&mut data).ok()?;
    (found.identity == identity && found.xxh3 == hash(&[&data])).then_some(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGES: Kind = Kind { what: "objects", extension: "range", full: Full::Evicts };

    fn files(folder: &Path) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
        files.sort();
        files
    }

    fn bytes(folder: &Path) -> u64 {
        files(folder).iter().map(|file| fs::metadata(file).unwrap().len()).sum()
    }

    /// Says that an entry was last used at this time.
    fn used(cache: &Cache, identity: &str, time: SystemTime) {
        let file = File::open(cache.path(identity)).unwrap();
        file.set_times(FileTimes::new().set_modified(time)).unwrap();
    }

    #[test]
    fn only_whole_entries_with_the_same_identity_are_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(&CacheOptions { folder: folder.path().into(), bytes_max: 1 << 20 }, RANGES).unwrap();
        let data: Vec<u8> = (0..10_000u32).map(|i| i as u8).collect();
        cache.put("a\nv1", &[&data[..10], &data[10..]]);
        assert_eq!(cache.get("a\nv1").unwrap(), data);
        assert!(cache.get("a\nv2").is_none());
        // Each way of damage: a byte changed, the end cut off, nothing left, another entry.
        let file = &files(folder.path())[0];
        let whole = fs::read(file).unwrap();
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        let mut other = whole.clone();
        let at = whole.windows(2).position(|pair| pair == b"v1").unwrap();
        other[at + 1] = b'2';
        for damaged in [&changed[..], &whole[..whole.len() - 1], &whole[..20], &[], &other] {
            fs::write(file, damaged).unwrap();
            assert!(cache.get("a\nv1").is_none());
            assert!(!file.exists(), "a damaged entry is removed");
        }
        // A half-written entry is no entry.
        fs::write(folder.path().join("1-0.half"), &whole).unwrap();
        assert!(cache.get("a\nv1").is_none());
        fs::write(file, &whole).unwrap();
        assert_eq!(cache.get("a\nv1").unwrap(), data);
    }

    #[test]
    fn what_was_used_least_recently_is_evicted() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Cache::open(&CacheOptions { folder: folder.path().into(), bytes_max: 4000 }, RANGES).unwrap();
        let cache = open();
        fs::write(folder.path().join("other.txt"), "of someone else").unwrap();
        for (second, identity) in ["0", "1", "2"].iter().enumerate() {
            cache.put(identity, &[&[second as u8; 1000]]);
            used(&cache, identity, SystemTime::UNIX_EPOCH + Duration::from_secs(second as u64));
        }
        // Entry 0 is read again, by another process, and 1 is then the oldest.
        assert!(open().get("0").is_some());
        cache.put("3", &[&[3; 1000]]);
        assert!(cache.get("1").is_none(), "evicted");
        assert!(["0", "2", "3"].iter().all(|identity| cache.get(identity).is_some()));
        assert!(bytes(folder.path()) <= 4000);
        assert!(folder.path().join("other.txt").exists());
        // An entry that would fill the cache alone is not kept.
        cache.put("4", &[&[0; 4000]]);
        assert!(cache.get("4").is_none());
    }

    #[test]
    fn a_cache_that_keeps_takes_no_more_when_it_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let kind = Kind { what: "images", extension: "rgb", full: Full::Keeps };
        let open = |bytes_max| Cache::open(&CacheOptions { folder: folder.path().into(), bytes_max }, kind).unwrap();
        let cache = open(4000);
        let all: Vec<String> = (0..6).map(|i| i.to_string()).collect();
        for identity in &all {
            cache.put(identity, &[&[7; 1000]]);
        }
        let kept = |cache: &Cache| all.iter().filter(|identity| cache.get(identity).is_some()).count();
        assert_eq!(kept(&cache), 3, "with their first lines three fit");
        assert!(cache.get("0").is_some() && bytes(folder.path()) <= 4000);
        // One that no one used for a month makes room, and only when there is none.
        used(&cache, "1", SystemTime::now() - Duration::from_secs(30 * 24 * 3600));
        assert_eq!(kept(&open(1 << 20)), 3);
        used(&cache, "1", SystemTime::now() - Duration::from_secs(30 * 24 * 3600));
        let cache = open(3200);
        assert!(cache.get("1").is_none() && cache.get("0").is_some());
        cache.put("9", &[&[7; 1000]]);
        assert!(cache.get("9").is_some());
        // A lower limit removes entries whoever used them.
        open(1500);
        assert_eq!(files(folder.path()).len(), 1);
    }
}
