//! The `.idx` file of Megatron-LM's indexed datasets, parsed without trusting a byte of it.
//!
//! Layout, little-endian, no padding:
//!
//! ```text
//! "MMIDIDX\0\0"                9 bytes
//! u64  version                 1
//! u8   token type              1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
//! u64  sequences S
//! u64  document entries D      one more than there are documents
//! i32  lengths[S]              tokens of each sequence
//! i64  pointers[S]             byte offset of each sequence in the .bin
//! i64  documents[D]            first sequence of each document, then S
//! i8   modes[S]                optional (multimodal data)
//! ```
//!
//! The checks: every count against the file's size before anything is indexed by it; lengths
//! not negative; pointers exactly the running sum of the lengths (sequences lie back to back, as
//! every known writer leaves them); document entries start at 0, never fall and end at S.

use std::fmt;
use std::ops::Range;

/// First bytes of every `.idx`.
pub const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// The only version there is.
pub const VERSION: u64 = 1;
/// Bytes of magic, version, token type and two counts.
pub const HEADER_BYTES: usize = 9 + 8 + 1 + 8 + 8;

/// The type of a token in the `.bin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// One unsigned byte.
    U8,
    /// One signed byte.
    I8,
    /// Two signed bytes.
    I16,
    /// Four signed bytes, written for vocabularies of 65,500 and more.
    I32,
    /// Eight signed bytes.
    I64,
    /// Two unsigned bytes, written for smaller vocabularies.
    U16,
}

impl TokenType {
    /// The type that Megatron-LM chooses for a vocabulary.
    pub fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size < 65_500 { Self::U16 } else { Self::I32 }
    }

    /// The code in the header; `None` for floats and unknown codes.
    pub fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::U8,
            2 => Self::I8,
            3 => Self::I16,
            4 => Self::I32,
            5 => Self::I64,
            8 => Self::U16,
            _ => return None,
        })
    }

    /// The code in the header.
    pub fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::I8 => 2,
            Self::I16 => 3,
            Self::I32 => 4,
            Self::I64 => 5,
            Self::U16 => 8,
        }
    }

    /// Bytes of one token.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

impl fmt::Display for TokenType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U16 => "u16",
        })
    }
}

/// The reason why a `.idx` was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdxFault {
    /// The file is too short to hold the header.
    #[error("has {found} bytes, fewer than the {HEADER_BYTES} of the header")]
    Short {
        /// Size of the file.
        found: usize,
    },
    /// The first bytes are wrong.
    #[error("does not begin with MMIDIDX, so it is no Megatron index")]
    Magic,
    /// The version is unknown.
    #[error("has version {0}, only version {VERSION} is known")]
    Version(u64),
    /// The token type is a float, or an undefined code.
    #[error("stores tokens as type {0}, which is not an integer type")]
    TokenType(u8),
    /// The arrays would be too large to be addressed.
    #[error("claims {sequences} sequences and {documents} document entries, more than any file can hold")]
    Overflow {
        /// Claimed sequences.
        sequences: u64,
        /// Claimed document entries.
        documents: u64,
    },
    /// The counts do not match the file's size.
    #[error("has {found} bytes where {sequences} sequences and {documents} document entries take {expected}")]
    Size {
        /// Size of the file.
        found: usize,
        /// Size that the header implies, without modes.
        expected: usize,
        /// Claimed sequences.
        sequences: usize,
        /// Claimed document entries.
        documents: usize,
    },
    /// A length is negative.
    #[error("sequence {sequence} has length {length}")]
    Length {
        /// Index of the sequence.
        sequence: usize,
        /// Length in the file.
        length: i32,
    },
    /// A pointer differs from the end of the sequences before it.
    #[error("sequence {sequence} starts at byte {found} where the sequences before it end at {expected}")]
    Pointer {
        /// Index of the sequence.
        sequence: usize,
        /// Pointer in the file.
        found: i64,
        /// Running sum of the lengths.
        expected: u64,
    },
    /// There are sequences but no document entries, or neither.
    #[error("has no document entries")]
    NoDocuments,
    /// A document entry is out of order or out of range.
    #[error("document entry {entry} is {found}; entries must start at 0, never fall and end at {sequences}")]
    Document {
        /// Index of the entry.
        entry: usize,
        /// Value in the file.
        found: i64,
        /// Number of sequences in the file.
        sequences: usize,
    },
}

/// A validated `.idx`: the positions of its arrays. It holds no data, so that the file stays
/// mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdxLayout {
    /// Type of a token.
    pub token_type: TokenType,
    /// Number of sequences S.
    pub sequences: usize,
    /// Number of documents, which is one less than document entries.
    pub documents: usize,
    /// Number of tokens in all sequences together.
    pub tokens: u64,
    /// True if the optional modes follow.
    pub has_modes: bool,
}

impl IdxLayout {
    /// Size that the `.bin` must have.
    pub fn bin_bytes(&self) -> u64 {
        self.tokens * self.token_type.bytes() as u64
    }

    /// Number of tokens of sequence `s`. `idx` must be the file that this layout was parsed from.
    pub fn length(&self, idx: &[u8], s: usize) -> u64 {
        u64::from(read_u32(idx, HEADER_BYTES + 4 * s))
    }

    /// Position of the first token of sequence `s`; the number of tokens for `s` = S.
    pub fn sequence_start(&self, idx: &[u8], s: usize) -> u64 {
        if s < self.sequences {
            read_u64(idx, HEADER_BYTES + 4 * self.sequences + 8 * s) / self.token_type.bytes() as u64
        } else {
            self.tokens
        }
    }

    /// Position of the first token of document `d`; the number of tokens for `d` = documents.
    pub fn document_start(&self, idx: &[u8], d: usize) -> u64 {
        let first = read_u64(idx, HEADER_BYTES + 12 * self.sequences + 8 * d) as usize;
        self.sequence_start(idx, first)
    }

    /// Range of the tokens of document `d` in the concatenation of all.
    pub fn document(&self, idx: &[u8], d: usize) -> Range<u64> {
        self.document_start(idx, d)..self.document_start(idx, d + 1)
    }
}

/// Parses and validates a `.idx`. Pure, total, and linear in the file: any bytes give a layout that
/// is safe to use, or the reason why there is none.
pub fn parse_idx(idx: &[u8]) -> Result<IdxLayout, IdxFault> {
    if idx.len() >= MAGIC.len() && &idx[..MAGIC.len()] != MAGIC {
        return Err(IdxFault::Magic);
    }
    if idx.len() < HEADER_BYTES {
        return Err(IdxFault::Short { found: idx.len() });
    }
    let version = read_u64(idx, 9);
    if version != VERSION {
        return Err(IdxFault::Version(version));
    }
    let token_type = TokenType::from_code(idx[17]).ok_or(IdxFault::TokenType(idx[17]))?;
    let (claimed_sequences, claimed_documents) = (read_u64(idx, 18), read_u64(idx, 26));
    let overflow = IdxFault::Overflow { sequences: claimed_sequences, documents: claimed_documents };
    let arrays = |s: u64, d: u64| s.checked_mul(12)?.checked_add(d.checked_mul(8)?)?.checked_add(HEADER_BYTES as u64);
    let Some(expected) = arrays(claimed_sequences, claimed_documents).and_then(|n| usize::try_from(n).ok()) else {
        return Err(overflow);
    };
    // Both counts are below the expected size, so they fit usize.
    let (sequences, entries) = (claimed_sequences as usize, claimed_documents as usize);
    let has_modes = sequences > 0 && expected.checked_add(sequences) == Some(idx.len());
    if idx.len() != expected && !has_modes {
        return Err(IdxFault::Size { found: idx.len(), expected, sequences, documents: entries });
    }

    let lengths = idx[HEADER_BYTES..][..4 * sequences].chunks_exact(4);
    let pointers = idx[HEADER_BYTES + 4 * sequences..][..8 * sequences].chunks_exact(8);
    let mut bytes = 0u64; // at most 2^31 tokens of 8 bytes for each of the file's sequences: below 2^64 for any real file
    for (sequence, (length, pointer)) in lengths.zip(pointers).enumerate() {
        let (length, pointer) = (read_u32(length, 0) as i32, read_u64(pointer, 0) as i64);
        if length < 0 {
            return Err(IdxFault::Length { sequence, length });
        }
        if u64::try_from(pointer) != Ok(bytes) {
            return Err(IdxFault::Pointer { sequence, found: pointer, expected: bytes });
        }
        bytes = bytes.checked_add(length as u64 * token_type.bytes() as u64).ok_or(overflow.clone())?;
    }

    let mut previous = 0i64;
    for (entry, bytes) in idx[HEADER_BYTES + 12 * sequences..][..8 * entries].chunks_exact(8).enumerate() {
        let found = read_u64(bytes, 0) as i64;
        let in_order = if entry == 0 { found == 0 } else { found >= previous };
        let ends_right = entry + 1 < entries || found == sequences as i64;
        if !in_order || !ends_right || found > sequences as i64 {
            return Err(IdxFault::Document { entry, found, sequences });
        }
        previous = found;
    }
    if entries == 0 {
        return Err(IdxFault::NoDocuments);
    }
    let tokens = bytes / token_type.bytes() as u64;
    Ok(IdxLayout { token_type, sequences, documents: entries - 1, tokens, has_modes })
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
