//! Writes token files document by document, in constant memory per token.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::format::{MAGIC, TokenType, VERSION};
use super::{bin_path, idx_path};
use crate::atomic::{self, AtomicFile};
use crate::error::{DataError, Result};

/// Appends documents to a pair of token files. The pair appears when [`IndexedWriter::finish`]
/// returns, or not at all.
///
/// It holds 12 bytes of memory for every document.
pub struct IndexedWriter {
    prefix: PathBuf,
    token_type: TokenType,
    bin: AtomicFile,
    idx: AtomicFile,
    lengths: Vec<i32>,
    /// Index of the first sequence of each finished document.
    documents: Vec<i64>,
    /// Number of tokens of the sequence being written.
    open_tokens: u64,
    /// Index of the sequence with which the open document began.
    open_document: usize,
    tokens: u64,
    hash: Xxh3,
    bytes: Vec<u8>,
}

/// A summary of the written files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedSummary {
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Type of a token.
    pub token_type: TokenType,
    /// xxh3 of the `.bin`, in hexadecimal.
    pub bin_xxh3: String,
}

impl IndexedWriter {
    /// Starts `PREFIX.bin` and `PREFIX.idx`; missing folders are created.
    pub fn create(prefix: &Path, token_type: TokenType) -> Result<Self> {
        Ok(Self {
            prefix: prefix.to_path_buf(),
            token_type,
            bin: AtomicFile::create(&bin_path(prefix))?,
            idx: AtomicFile::create(&idx_path(prefix))?,
            lengths: Vec::new(),
            documents: vec![0],
            open_tokens: 0,
            open_document: 0,
            tokens: 0,
            hash: Xxh3::new(),
            bytes: Vec::new(),
        })
    }

    /// Appends tokens to the current document.
    pub fn append(&mut self, tokens: &[u32]) -> Result<()> {
        self.bytes.clear();
        let limit = match self.token_type {
            TokenType::U8 => u64::from(u8::MAX),
            TokenType::I8 => i8::MAX as u64,
            TokenType::I16 => i16::MAX as u64,
            TokenType::U16 => u64::from(u16::MAX),
            TokenType::I32 | TokenType::I64 => i32::MAX as u64,
        };
        if let Some(token) = tokens.iter().find(|&&t| u64::from(t) > limit) {
            return Err(DataError::Vocabulary {
                origin: bin_path(&self.prefix).display().to_string(),
                what: format!("token {token} does not fit the stored type {}", self.token_type),
                fix: "choose the type by the vocabulary's size (`TokenType::for_vocabulary`)".into(),
            });
        }
        let bytes = &mut self.bytes;
        match self.token_type {
            TokenType::U8 | TokenType::I8 => bytes.extend(tokens.iter().map(|&t| t as u8)),
            TokenType::I16 | TokenType::U16 => bytes.extend(tokens.iter().flat_map(|&t| (t as u16).to_le_bytes())),
            TokenType::I32 => bytes.extend(tokens.iter().flat_map(|&t| t.to_le_bytes())),
            TokenType::I64 => bytes.extend(tokens.iter().flat_map(|&t| u64::from(t).to_le_bytes())),
        }
        self.hash.update(bytes);
        self.bin.write(bytes)?;
        self.tokens += tokens.len() as u64;
        self.open_tokens += tokens.len() as u64;
        // A length is an i32, so a longer document becomes several sequences.
        while self.open_tokens > i32::MAX as u64 {
            self.lengths.push(i32::MAX);
            self.open_tokens -= i32::MAX as u64;
        }
        Ok(())
    }

    /// Ends the current document; one without tokens is not recorded.
    pub fn end_document(&mut self) {
        if self.open_tokens > 0 {
            self.lengths.push(self.open_tokens as i32);
            self.open_tokens = 0;
        }
        if self.lengths.len() > self.open_document {
            self.documents.push(self.lengths.len() as i64);
            self.open_document = self.lengths.len();
        }
    }

    /// Appends a whole document.
    pub fn push_document(&mut self, tokens: &[u32]) -> Result<()> {
        self.append(tokens)?;
        self.end_document();
        Ok(())
    }

    /// Number of tokens so far.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of documents so far, without the open one.
    pub fn documents(&self) -> u64 {
        self.documents.len() as u64 - 1
    }

    /// Writes the index, syncs both files and moves them into place.
    ///
    /// An older index is removed before the new data appears: a crash in between leaves no pair,
    /// never a mixed one.
    pub fn finish(mut self) -> Result<IndexedSummary> {
        self.end_document();
        let header = [
            &MAGIC[..],
            &VERSION.to_le_bytes(),
            &[self.token_type.code()],
            &(self.lengths.len() as u64).to_le_bytes(),
            &(self.documents.len() as u64).to_le_bytes(),
        ];
        for part in header {
            self.idx.write(part)?;
        }
        for length in &self.lengths {
            self.idx.write(&length.to_le_bytes())?;
        }
        let mut pointer = 0i64;
        for &length in &self.lengths {
            self.idx.write(&pointer.to_le_bytes())?;
            pointer += i64::from(length) * self.token_type.bytes() as i64;
        }
        for entry in &self.documents {
            self.idx.write(&entry.to_le_bytes())?;
        }
        let summary = IndexedSummary {
            documents: self.documents(),
            tokens: self.tokens,
            token_type: self.token_type,
            bin_xxh3: format!("{:016x}", self.hash.digest()),
        };
        self.bin.sync()?;
        self.idx.sync()?;
        atomic::remove_if_present(&idx_path(&self.prefix))?;
        self.bin.commit()?;
        self.idx.commit()?;
        Ok(summary)
    }
}
