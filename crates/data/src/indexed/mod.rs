//! Reads and writes token files: Megatron-LM's `.bin` (tokens) and `.idx` (the starts of sequences
//! and documents).
//!
//! A pair is named by its prefix: `data/my` means `data/my.bin` and `data/my.idx`.
//! [`IndexedTokens`] maps both files and validates the index against the data before anything is
//! read through it. [`IndexedWriter`] leaves a complete pair or none. The files are compatible with
//! other tools in both directions; multimodal modes are accepted and ignored.
//!
//! A `.bin` of llm.c needs no index: its header says what it is, and its end-of-text tokens say
//! where documents begin.

mod format;
mod llm_c;
mod writer;

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use trainyard_tensor::mapped::MappedFile;
use xxhash_rust::xxh3::Xxh3;

pub use format::{HEADER_BYTES, IdxFault, IdxLayout, MAGIC, TokenType, VERSION, parse_idx};
pub use llm_c::is_llm_c;
pub use writer::{IndexedSummary, IndexedWriter};

use crate::dataset::IGNORE;
use crate::error::{DataError, Result};
use crate::prepare::Sidecar;

/// Advice for a token file that cannot be trusted.
const REBUILD: &str = "the file is damaged or incomplete: run `trainyard data prepare` again, or copy it again";

/// A mapped, validated pair of token files.
#[derive(Debug)]
pub struct IndexedTokens {
    prefix: PathBuf,
    layout: IdxLayout,
    idx: Index,
    bin: MappedFile,
    /// Bytes of the `.bin` before its first token.
    header_bytes: usize,
    /// One bit a token, the lowest first: 1 if it is a target. None if all are.
    mask: Option<MappedFile>,
}

/// The bytes of an index.
#[derive(Debug)]
enum Index {
    Mapped(MappedFile),
    /// Made of a token file that has none.
    Made(Vec<u8>),
}

impl Deref for Index {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Index::Mapped(map) => map,
            Index::Made(bytes) => bytes,
        }
    }
}

impl IndexedTokens {
    /// Opens `PREFIX.bin` and `PREFIX.idx`; a path ending in `.bin` or `.idx` is taken as its
    /// prefix.
    pub fn open(prefix: &Path) -> Result<Self> {
        let prefix = match prefix.extension().and_then(|e| e.to_str()) {
            Some("bin" | "idx") => prefix.with_extension(""),
            _ => prefix.to_path_buf(),
        };
        let (bin_path, idx_path) = (bin_path(&prefix), idx_path(&prefix));
        if !idx_path.exists() && is_llm_c(&bin_path) {
            return Self::open_llm_c(prefix, &bin_path);
        }
        let idx = MappedFile::open(&idx_path).map_err(DataError::io("open", &idx_path))?;
        let bin = MappedFile::open(&bin_path).map_err(DataError::io("open", &bin_path))?;
        let layout = parse_idx(&idx).map_err(|fault| DataError::token_file(&idx_path, fault.to_string(), REBUILD))?;
        if bin.len() as u64 != layout.bin_bytes() {
            let what = format!(
                "has {} bytes where the index counts {} tokens of {}, {} bytes",
                bin.len(),
                layout.tokens,
                layout.token_type,
                layout.bin_bytes()
            );
            return Err(DataError::token_file(&bin_path, what, REBUILD));
        }
        let mask = open_mask(&prefix, layout.tokens)?;
        if let Ok(Some((_, part))) = Sidecar::of_part(&prefix)
            && part.tokens == layout.tokens
            && part.mask_xxh3.is_some() != mask.is_some()
        {
            let (is, says) = if mask.is_some() { ("a", "none") } else { ("no", "one") };
            let what = format!("has {is} .mask file, and its description says that it has {says}");
            return Err(DataError::token_file(&prefix, what, "copy all its files, or prepare it again"));
        }
        Ok(Self { prefix, layout, idx: Index::Mapped(idx), bin, header_bytes: 0, mask })
    }

    fn open_llm_c(prefix: PathBuf, path: &Path) -> Result<Self> {
        let bin = MappedFile::open(path).map_err(DataError::io("open", path))?;
        let refuse = |what: String| DataError::token_file(path, what, llm_c::FIX);
        let idx = llm_c::index_of(&bin).map_err(refuse)?;
        let layout = parse_idx(&idx).map_err(|fault| refuse(fault.to_string()))?;
        Ok(Self { prefix, layout, idx: Index::Made(idx), bin, header_bytes: llm_c::HEADER_BYTES, mask: None })
    }

    /// True if some of its tokens are no targets.
    pub fn is_masked(&self) -> bool {
        self.mask.is_some()
    }

    /// True if token `token` is a target.
    pub fn is_target(&self, token: u64) -> bool {
        self.mask.as_ref().is_none_or(|mask| mask[(token / 8) as usize] >> (token % 8) & 1 == 1)
    }

    /// Takes away the targets that do not count; the first of them is token `first`.
    pub(crate) fn mask_targets(&self, first: u64, targets: &mut [i32]) {
        if self.is_masked() {
            let outside = (first..).zip(targets).filter(|(token, _)| !self.is_target(*token));
            outside.for_each(|(_, target)| *target = IGNORE);
        }
    }

    /// The path without `.bin` or `.idx`.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Number of tokens in all documents together.
    pub fn tokens(&self) -> u64 {
        self.layout.tokens
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.layout.documents
    }

    /// Number of sequences. A document is one sequence unless it is longer than 2^31 - 1 tokens or
    /// its writer chose otherwise.
    pub fn sequences(&self) -> usize {
        self.layout.sequences
    }

    /// Type of a token.
    pub fn token_type(&self) -> TokenType {
        self.layout.token_type
    }

    /// Position of the first token of document `d` in the concatenation; `documents()` gives
    /// `tokens()`. Panics beyond that.
    pub fn document_start(&self, d: usize) -> u64 {
        self.layout.document_start(&self.idx, d)
    }

    /// Range of the tokens of document `d` in the concatenation.
    pub fn document(&self, d: usize) -> Range<u64> {
        self.layout.document(&self.idx, d)
    }

    /// The document that holds token `token` (below `tokens()`), by bisection.
    pub fn document_of(&self, token: u64) -> usize {
        let (mut low, mut high) = (0, self.layout.documents);
        // Invariant: document_start(low) <= token < document_start(high). Among empty documents
        // with the same start, the last one wins.
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.document_start(middle) <= token { low = middle } else { high = middle }
        }
        low
    }

    /// Appends the tokens of `range` to `out`, checking that each lies in `0..vocab_size`.
    pub fn read_into(&self, range: Range<u64>, vocab_size: u32, out: &mut Vec<i32>) -> Result<()> {
        if range.start > range.end || range.end > self.layout.tokens {
            let what = format!("tokens {}..{} were asked of {}", range.start, range.end, self.layout.tokens);
            return Err(DataError::token_file(&bin_path(&self.prefix), what, "please report this"));
        }
        let size = self.layout.token_type.bytes();
        let bytes = &self.bin[self.header_bytes..][range.start as usize * size..range.end as usize * size];
        let before = out.len();
        // Values that exceed an i32 become negative or saturate, which the check below refuses.
        match self.layout.token_type {
            TokenType::U8 => out.extend(bytes.iter().map(|&b| i32::from(b))),
            TokenType::I8 => out.extend(bytes.iter().map(|&b| i32::from(b as i8))),
            TokenType::I16 => out.extend(words(bytes).map(|w: [u8; 2]| i32::from(i16::from_le_bytes(w)))),
            TokenType::U16 => out.extend(words(bytes).map(|w: [u8; 2]| i32::from(u16::from_le_bytes(w)))),
            TokenType::I32 => out.extend(words(bytes).map(i32::from_le_bytes)),
            TokenType::I64 => {
                out.extend(words(bytes).map(|w: [u8; 8]| i32::try_from(i64::from_le_bytes(w)).unwrap_or(-1)));
            }
        }
        // Negative values are huge as u32, so one maximum suffices.
        let largest = out[before..].iter().map(|&t| t as u32).max().unwrap_or(0);
        if largest < vocab_size || out.len() == before {
            return Ok(());
        }
        let at = out[before..].iter().position(|&t| t as u32 >= vocab_size).unwrap_or(0);
        let token = out[before + at];
        out.truncate(before);
        Err(DataError::Vocabulary {
            origin: bin_path(&self.prefix).display().to_string(),
            what: format!("token {} is {token}, outside the vocabulary of {vocab_size}", range.start + at as u64),
            fix: "the data was prepared with another tokenizer than the model's: prepare it again with the model's \
                  tokenizer, or set the model's vocabulary to the tokenizer's"
                .into(),
        })
    }

    /// Reads every token once and refuses the first outside `0..vocab_size`.
    pub fn check_tokens(&self, vocab_size: u32) -> Result<()> {
        const STEP: u64 = 1 << 16;
        let mut buffer = Vec::with_capacity(STEP as usize);
        let mut start = 0;
        while start < self.tokens() {
            buffer.clear();
            let end = self.tokens().min(start + STEP);
            self.read_into(start..end, vocab_size, &mut buffer)?;
            start = end;
        }
        Ok(())
    }

    /// Asks the kernel to bring both files into memory in the background.
    pub fn warm(&self) {
        if let Index::Mapped(idx) = &self.idx {
            idx.warm();
        }
        self.bin.warm();
    }

    /// Reads both files once, so that the page cache holds them, as far as it has room. Returns
    /// their bytes.
    pub fn read_ahead(&self) -> Result<u64> {
        let mut files = vec![bin_path(&self.prefix)];
        if let Index::Mapped(_) = self.idx {
            files.push(idx_path(&self.prefix));
        }
        let mut bytes = 0;
        let mut buffer = vec![0; 1 << 20];
        for path in files {
            let mut file = File::open(&path).map_err(DataError::io("open", &path))?;
            loop {
                match file.read(&mut buffer).map_err(DataError::io("read", &path))? {
                    0 => break,
                    read => bytes += read as u64,
                }
            }
        }
        Ok(bytes)
    }

    /// Adds the identity of this data to `hash`: the whole index, which changes with any document's
    /// length.
    pub(crate) fn fingerprint_into(&self, hash: &mut Xxh3) {
        hash.update(&self.idx);
    }
}

/// `PREFIX.mask`.
pub fn mask_path(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".mask")
}

/// Maps the mask of the targets among `tokens` tokens, if there is one.
fn open_mask(prefix: &Path, tokens: u64) -> Result<Option<MappedFile>> {
    let path = mask_path(prefix);
    if !path.try_exists().map_err(DataError::io("open", &path))? {
        return Ok(None);
    }
    let mask = MappedFile::open(&path).map_err(DataError::io("open", &path))?;
    if mask.len() as u64 != tokens.div_ceil(8) {
        let what = format!("has {} bytes for {tokens} tokens, one bit each", mask.len());
        return Err(DataError::token_file(&path, what, REBUILD));
    }
    Ok(Some(mask))
}

/// `PREFIX.bin`.
pub fn bin_path(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".bin")
}

/// `PREFIX.idx`.
pub fn idx_path(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".idx")
}

/// Appends to the file name; unlike `with_extension` it keeps dots that belong to the name.
pub(crate) fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut path = OsString::from(prefix);
    path.push(suffix);
    PathBuf::from(path)
}

/// Fixed-size words of a byte slice.
fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}
