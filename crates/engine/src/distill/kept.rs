//! The final hidden states of a teacher in files, for later epochs and other students.
//!
//! A folder belongs to one teacher, whose fingerprint is its name. Each rank of each sitting
//! appends to a file of its own, so that runs can share the folder while they train. A record is
//!
//! | bytes | |
//! |---|---|
//! | 16 | hash of the sequence: tokens and positions (XXH3) |
//! | 8 | number of bytes of the states |
//! | 8 | hash of the states |
//! | n | the states, in the dtype of the teacher's forward |
//!
//! A record that is cut off, because a run was killed, ends its file: what comes after it is not
//! read. States whose hash is wrong are computed again.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};
use trainyard_base::lock;
use trainyard_model::teacher::{KeptStates, Sequence};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const HEAD_BYTES: usize = 32;
const EXTENSION: &str = "states";

/// Kept states in a folder.
pub(super) struct KeptInFiles {
    folder: PathBuf,
    state: Mutex<State>,
}

struct State {
    files: Vec<Known>,
    /// By the hash of a sequence: its file, and the place and number of bytes of its states.
    index: HashMap<u128, (usize, u64, usize)>,
    /// The file of this rank, once it has kept something; its number in `files`.
    own: Option<usize>,
}

struct Known {
    path: PathBuf,
    file: File,
    /// Bytes that are in the index.
    read: u64,
}

impl KeptInFiles {
    /// Opens the folder, and makes it if there is none.
    pub fn open(folder: &Path) -> io::Result<KeptInFiles> {
        fs::create_dir_all(folder)?;
        let state = State { files: Vec::new(), index: HashMap::new(), own: None };
        let kept = KeptInFiles { folder: folder.to_owned(), state: Mutex::new(state) };
        lock(&kept.state).refresh(&kept.folder)?;
        Ok(kept)
    }

    /// Number of sequences whose states are there, and their bytes.
    pub fn size(&self) -> (usize, u64) {
        let state = lock(&self.state);
        (state.index.len(), state.index.values().map(|(.., bytes)| *bytes as u64).sum())
    }
}

impl State {
    /// Reads what files have got since the last time.
    fn refresh(&mut self, folder: &Path) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let is_new = path.extension().is_some_and(|extension| extension == EXTENSION)
                && self.files.iter().all(|known| known.path != path);
            if is_new {
                self.files.push(Known { file: File::open(&path)?, path, read: 0 });
            }
        }
        for (number, known) in self.files.iter_mut().enumerate().filter(|(number, _)| Some(*number) != self.own) {
            let end = known.file.metadata()?.len();
            let mut head = [0; HEAD_BYTES];
            while known.read + HEAD_BYTES as u64 <= end {
                known.file.read_exact_at(&mut head, known.read)?;
                let (key, bytes, _) = parse(&head);
                let at = known.read + HEAD_BYTES as u64;
                let Some(next) = at.checked_add(bytes as u64).filter(|next| *next <= end) else { break };
                self.index.insert(key, (number, at, bytes));
                known.read = next;
            }
        }
        Ok(())
    }
}

impl KeptStates for KeptInFiles {
    fn read(&self, sequence: Sequence<'_>, states: &mut [u8]) -> io::Result<bool> {
        let key = key_of(sequence);
        let mut state = lock(&self.state);
        if !state.index.contains_key(&key) {
            state.refresh(&self.folder)?;
        }
        let Some((number, at, bytes)) = state.index.get(&key).copied() else { return Ok(false) };
        let mut head = [0; HEAD_BYTES];
        let file = &state.files[number].file;
        file.read_exact_at(&mut head, at - HEAD_BYTES as u64)?;
        if bytes != states.len() {
            return Ok(false);
        }
        file.read_exact_at(states, at)?;
        let is_whole = parse(&head) == (key, bytes, xxh3_64(states));
        if !is_whole {
            // It is computed and kept again.
            state.index.remove(&key);
        }
        Ok(is_whole)
    }

    fn keep(&self, sequence: Sequence<'_>, states: &[u8]) -> io::Result<()> {
        let key = key_of(sequence);
        let mut state = lock(&self.state);
        if state.index.contains_key(&key) {
            return Ok(());
        }
        let number = match state.own {
            Some(number) => number,
            None => {
                let known = new_file(&self.folder)?;
                state.files.push(known);
                state.files.len() - 1
            }
        };
        state.own = Some(number);
        let head = [&key.to_le_bytes()[..], &(states.len() as u64).to_le_bytes(), &xxh3_64(states).to_le_bytes()];
        let own = &mut state.files[number];
        let at = own.read;
        own.file.write_all_at(&[&head.concat()[..], states].concat(), at)?;
        own.read = at + (HEAD_BYTES + states.len()) as u64;
        state.index.insert(key, (number, at + HEAD_BYTES as u64, states.len()));
        Ok(())
    }
}

/// A file that nobody else writes.
fn new_file(folder: &Path) -> io::Result<Known> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    for attempt in 0u32.. {
        let path = folder.join(format!("{}-{now}-{attempt}.{EXTENSION}", std::process::id()));
        match File::options().read(true).write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => return opened.map(|file| Known { path, file, read: 0 }),
        }
    }
    unreachable!("some number is free")
}

/// Hash of the sequence, number of bytes of the states, and their hash.
fn parse(head: &[u8; HEAD_BYTES]) -> (u128, usize, u64) {
    let (key, rest) = head.split_at(16);
    let (bytes, hash) = rest.split_at(8);
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    (u128::from_le_bytes(key.try_into().expect("16 bytes")), number(bytes) as usize, number(hash))
}

fn key_of(sequence: Sequence<'_>) -> u128 {
    let mut hash = Xxh3::new();
    for numbers in [sequence.tokens, sequence.positions] {
        hash.update(&(numbers.len() as u64).to_le_bytes());
        numbers.iter().for_each(|number| hash.update(&number.to_le_bytes()));
    }
    hash.digest128()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(tokens: &[i32]) -> Sequence<'_> {
        Sequence { tokens, positions: &[0, 1, 2] }
    }

    #[test]
    fn states_are_found_by_their_sequence_in_this_sitting_and_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = [0, 1].map(|_| KeptInFiles::open(folder.path()).unwrap());
        let mut states = [0; 4];
        assert!(!one.read(sequence(&[1, 2, 3]), &mut states).unwrap());
        one.keep(sequence(&[1, 2, 3]), &[1, 2, 3, 4]).unwrap();
        other.keep(sequence(&[1, 2, 4]), &[5, 6, 7, 8]).unwrap();
        // Each finds what the other keeps while both are open.
        for (kept, tokens, expected) in [(&one, [1, 2, 4], [5, 6, 7, 8]), (&other, [1, 2, 3], [1, 2, 3, 4])] {
            assert!(kept.read(sequence(&tokens), &mut states).unwrap());
            assert_eq!(states, expected);
        }
        let elsewhere = Sequence { tokens: &[1, 2, 3], positions: &[4, 5, 6] };
        assert!(!one.read(elsewhere, &mut states).unwrap(), "a token's states depend on its position");
        drop((one, other));
        let again = KeptInFiles::open(folder.path()).unwrap();
        assert_eq!(again.size(), (2, 8));
        assert!(again.read(sequence(&[1, 2, 3]), &mut states).unwrap() && states == [1, 2, 3, 4]);
    }

    #[test]
    fn a_record_that_is_cut_off_or_damaged_is_computed_again() {
        let folder = tempfile::tempdir().unwrap();
        let kept = KeptInFiles::open(folder.path()).unwrap();
        kept.keep(sequence(&[1, 2, 3]), &[1, 2, 3, 4]).unwrap();
        kept.keep(sequence(&[4, 5, 6]), &[5, 6, 7, 8]).unwrap();
        drop(kept);
        let path = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let whole = fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        damaged[HEAD_BYTES] ^= 1;
        for (contents, found) in [(&whole[..], [true, true]), (&whole[..whole.len() - 1], [true, false])]
            .into_iter()
            .chain([(&damaged[..], [false, true]), (&whole[..HEAD_BYTES - 1], [false, false])])
        {
            fs::write(&path, contents).unwrap();
            let kept = KeptInFiles::open(folder.path()).unwrap();
            let mut states = [0; 4];
            let is_there = [[1, 2, 3], [4, 5, 6]].map(|tokens| kept.read(sequence(&tokens), &mut states).unwrap());
            assert_eq!(is_there, found, "{} bytes", contents.len());
        }
    }
}
