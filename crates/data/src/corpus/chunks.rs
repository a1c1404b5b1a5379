//! The bytes under a Parquet file: a file, or an object that is read in ranges.
//!
//! A Parquet file is read from its end: the footer says where the chunks of a column lie. Of an
//! object its last 64 KiB are fetched first, which hold most footers, then the chunks of one
//! column, in blocks. The next block is on its way while one is read, and memory holds two.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use trainyard_store::{Object, Request, StoreError};

use super::SourceFile;
use crate::error::{DataError, Result};

/// Bytes at the end of an object that are fetched with its footer.
const TAIL: u64 = 64 << 10;

#[derive(Clone)]
pub(super) enum Chunks {
    File(Arc<File>),
    Object(Arc<Blocks>),
}

/// An object and the blocks of it that are in memory.
pub(super) struct Blocks {
    object: Object,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The chunk that is being read, which blocks do not leave.
    chunk: Range<u64>,
    tail: Option<(u64, Bytes)>,
    /// The last blocks, with their first bytes.
    blocks: Vec<(u64, Bytes)>,
    ahead: Option<(Range<u64>, Request)>,
}

impl Chunks {
    pub(super) fn open(source: &SourceFile) -> Result<Self> {
        Ok(match &source.object {
            Some(object) => Chunks::Object(Arc::new(Blocks { object: object.clone(), state: Mutex::default() })),
            None => {
                let file = File::open(&source.path).map_err(DataError::io("open", &source.path))?;
                Chunks::File(Arc::new(file))
            }
        })
    }

    /// Announces that `chunk` will be read from its beginning to its end.
    pub(super) fn will_read(&self, chunk: Range<u64>) {
        if let Chunks::Object(blocks) = self {
            let end = chunk.end.min(blocks.object.bytes());
            let mut state = blocks.state.lock().expect("no thread panics with the lock");
            *state = State { chunk: chunk.start.min(end)..end, tail: state.tail.take(), ..State::default() };
        }
    }
}

impl Blocks {
    /// Bytes from `start` on: at least one, at most up to the end of their block.
    fn piece(&self, start: u64) -> Result<Bytes, StoreError> {
        let bytes = self.object.bytes();
        let state = &mut *self.state.lock().expect("no thread panics with the lock");
        if let Some((first, tail)) = state.tail.as_ref().filter(|(first, _)| *first <= start) {
            return Ok(tail.slice((start - first) as usize..));
        }
        if !state.chunk.contains(&start) {
            // The footer, or a longer one than the tail.
            let tail = TAIL.min(self.object.options().block_bytes);
            let first = start.min(bytes.saturating_sub(tail));
            let tail = self.object.range(first..bytes)?;
            state.tail = Some((first, tail.clone()));
            return Ok(tail.slice((start - first) as usize..));
        }
        let holds = |(first, block): &&(u64, Bytes)| (*first..*first + block.len() as u64).contains(&start);
        if let Some((first, block)) = state.blocks.iter().find(holds) {
            return Ok(block.slice((start - first) as usize..));
        }
        // Blocks are counted from the beginning of the chunk, so that a second reading asks for the
        // same ranges, which a cache then has.
        let length = self.object.options().block_bytes.max(1);
        let chunk = state.chunk.clone();
        let grid = |at: u64| at.min(chunk.end);
        let first = chunk.start + (start - chunk.start) / length * length;
        let wanted = first..grid(first + length);
        let block = match state.ahead.take() {
            Some((range, request)) if range == wanted => request.wait()?,
            _ => self.object.range(wanted.clone())?,
        };
        if wanted.end < chunk.end {
            let next = wanted.end..grid(wanted.end + length);
            state.ahead = Some((next.clone(), self.object.request(next)));
        }
        // A page may lie in two blocks.
        if state.blocks.len() == 2 {
            state.blocks.remove(0);
        }
        state.blocks.push((first, block.clone()));
        Ok(block.slice((start - first) as usize..))
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        match self {
            Chunks::File(file) => Length::len(&**file),
            Chunks::Object(blocks) => blocks.object.bytes(),
        }
    }
}

impl ChunkReader for Chunks {
    type T = Box<dyn Read + Send>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        Ok(match self {
            Chunks::File(file) => Box::new(file.get_read(start)?),
            Chunks::Object(blocks) => Box::new(Stream { blocks: blocks.clone(), next: start }),
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        let blocks = match self {
            Chunks::File(file) => return file.get_bytes(start, length),
            Chunks::Object(blocks) => blocks,
        };
        let end = start.saturating_add(length as u64);
        if end > blocks.object.bytes() {
            return Err(ParquetError::EOF(format!("a page ends at byte {end} of {}", blocks.object.bytes())));
        }
        let external = |error: StoreError| ParquetError::External(Box::new(error));
        if length == 0 {
            return Ok(Bytes::new());
        }
        let first = blocks.piece(start).map_err(external)?;
        if first.len() >= length {
            return Ok(first.slice(..length));
        }
        let mut all = BytesMut::with_capacity(length);
        all.extend_from_slice(&first);
        while all.len() < length {
            let piece = blocks.piece(start + all.len() as u64).map_err(external)?;
            all.extend_from_slice(&piece[..piece.len().min(length - all.len())]);
        }
        Ok(all.freeze())
    }
}

/// Reads on from a byte of an object.
struct Stream {
    blocks: Arc<Blocks>,
    next: u64,
}

impl Read for Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() || self.next >= self.blocks.object.bytes() {
            return Ok(0);
        }
        let piece = self.blocks.piece(self.next)?;
        let count = piece.len().min(out.len());
        out[..count].copy_from_slice(&piece[..count]);
        self.next += count as u64;
        Ok(count)
    }
}
