//! Pairs of a key and a document on disk, grouped by key in bounded memory.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::path::PathBuf;

use crate::error::{DataError, Result};

/// Pairs of a key of `K` bytes and the number of a document, in no order.
///
/// The file has a name for a moment only, so the system takes its space back when this is dropped
/// or the process is killed.
pub(super) struct Spill<const K: usize> {
    path: PathBuf,
    writer: BufWriter<File>,
    pairs: u64,
}

impl<const K: usize> Spill<K> {
    /// Bytes of a pair in memory.
    const PAIR: u64 = size_of::<([u8; K], u32)>() as u64;

    /// Starts a file at `path`, which must not exist.
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(DataError::io("create", &path))?;
        fs::remove_file(&path).map_err(DataError::io("remove", &path))?;
        Ok(Self { path, writer: BufWriter::with_capacity(1 << 16, file), pairs: 0 })
    }

    pub(super) fn push(&mut self, key: [u8; K], document: u32) -> Result<()> {
        self.pairs += 1;
        let written = self.writer.write_all(&key).and_then(|()| self.writer.write_all(&document.to_le_bytes()));
        written.map_err(DataError::io("write", &self.path))
    }

    /// Calls `same` for documents with the same key, the smaller number first.
    ///
    /// It takes at most about `memory` bytes. Where all pairs do not fit, the file is read several
    /// times, each time for another range of keys.
    pub(super) fn group(self, memory: u64, mut same: impl FnMut(u32, u32)) -> Result<()> {
        let file = self.writer.into_inner().map_err(|error| DataError::io("write", &self.path)(error.into_error()))?;
        let mut reader = BufReader::with_capacity(1 << 18, file);
        let limit = (memory / Self::PAIR).max(1024);
        // Keys are hashes, so ranges are about even; an eighth is left for chance.
        let passes = self.pairs.div_ceil(limit - limit / 8).max(1);
        let mut pairs: Vec<([u8; K], u32)> = Vec::with_capacity(self.pairs.min(limit) as usize);
        for pass in 0..passes {
            pairs.clear();
            reader.rewind().map_err(DataError::io("read", &self.path))?;
            let mut bytes = vec![0; K + 4];
            for _ in 0..self.pairs {
                reader.read_exact(&mut bytes).map_err(DataError::io("read", &self.path))?;
                let (key, document) = split::<K>(&bytes);
                let range = key.iter().take(4).fold(0u64, |number, byte| number << 8 | u64::from(*byte));
                if (range * passes) >> 32 != pass {
                    continue;
                }
                if pairs.len() as u64 == limit {
                    // Many documents have the same key: one of them stands for all.
                    reduce(&mut pairs, &mut same);
                }
                pairs.push((key, document));
            }
            reduce(&mut pairs, &mut same);
        }
        Ok(())
    }
}

/// Reports documents with the same key, and leaves the first of each.
fn reduce<const K: usize>(pairs: &mut Vec<([u8; K], u32)>, same: &mut impl FnMut(u32, u32)) {
    pairs.sort_unstable();
    pairs.dedup_by(|later, first| {
        let equal = later.0 == first.0;
        if equal {
            same(first.1, later.1);
        }
        equal
    });
}

fn split<const K: usize>(bytes: &[u8]) -> ([u8; K], u32) {
    let (mut key, mut number) = ([0; K], [0; 4]);
    key.copy_from_slice(&bytes[..K]);
    number.copy_from_slice(&bytes[K..K + 4]);
    (key, u32::from_le_bytes(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_do_not_depend_on_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut expected: Option<Vec<(u32, u32)>> = None;
        for memory in [1 << 20, 40_000, 1] {
            let mut spill = Spill::<8>::create(folder.path().join("spill")).unwrap();
            for document in 0..20_000u32 {
                // One key in three is that of a third of all documents.
                let of = if document % 3 == 0 { 7 } else { u64::from(document % 9000) };
                spill.push(of.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes(), document).unwrap();
            }
            let mut found = Vec::new();
            spill.group(memory, |a, b| found.push((a, b))).unwrap();
            found.sort_unstable();
            assert!(expected.get_or_insert(found.clone()) == &found, "{memory}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
