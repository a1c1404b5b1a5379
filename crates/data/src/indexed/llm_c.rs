//! Token files of llm.c: a header of 256 i32 and then tokens, in one `.bin`.
//!
//! The header holds a magic number, a version and the number of tokens. Files for GPT-2 have u16
//! tokens, those for Llama 3 u32. A document begins with the end-of-text token of its vocabulary.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::format::{MAGIC, TokenType, VERSION};

/// Bytes before the first token.
pub(super) const HEADER_BYTES: usize = 1024;

/// Advice for a file that cannot be trusted.
pub(super) const FIX: &str = "the file is damaged or incomplete: write or copy it again";

/// The kinds: magic number, version, type of a token, end-of-text token.
const KINDS: [(u32, u32, TokenType, u32); 2] =
    [(20_240_520, 1, TokenType::U16, 50_256), (20_240_801, 7, TokenType::I32, 128_000)];

/// True if the file at `path` begins like a token file of llm.c.
pub fn is_llm_c(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && KINDS.iter().any(|kind| kind.0 == u32::from_le_bytes(magic))
}

/// The `.idx` that Megatron-LM would have beside such tokens: one sequence a document.
pub(super) fn index_of(bin: &[u8]) -> Result<Vec<u8>, String> {
    if bin.len() < HEADER_BYTES {
        return Err(format!("has {} bytes, and llm.c has a header of {HEADER_BYTES} bytes", bin.len()));
    }
    let word = |at: usize| bin[4 * at..].first_chunk::<4>().map_or(0, |word| u32::from_le_bytes(*word));
    let (magic, version, tokens) = (word(0), word(1), word(2));
    let known = KINDS.iter().find(|kind| (kind.0, kind.1) == (magic, version));
    let &(_, _, token_type, eot) =
        known.ok_or_else(|| format!("is of llm.c's kind {magic} version {version}, which is not known"))?;
    let body = &bin[HEADER_BYTES..];
    if body.len() as u64 != u64::from(tokens) * token_type.bytes() as u64 {
        return Err(format!("has {} bytes of tokens where its header counts {tokens} tokens", body.len()));
    }
    // Offsets of the documents. Tokens before the first end-of-text token are a document too.
    // The end-of-text token of each kind fits its type, so its bytes are the first of its u32.
    let eot = &eot.to_le_bytes()[..token_type.bytes()];
    let words = body.chunks_exact(eot.len()).zip(0u64..);
    let mut begins: Vec<u64> = words.filter(|(word, at)| *at == 0 || *word == eot).map(|(_, at)| at).collect();
    begins.push(u64::from(tokens));
    let documents = begins.len() as u64 - 1;
    let mut idx = Vec::with_capacity(34 + 20 * begins.len());
    idx.extend(MAGIC);
    idx.extend(VERSION.to_le_bytes());
    idx.push(token_type.code());
    idx.extend(documents.to_le_bytes());
    idx.extend((documents + 1).to_le_bytes());
    for pair in begins.windows(2) {
        // Tokens are counted by an i32 in the header, so a document is no longer.
        let length =
            i32::try_from(pair[1] - pair[0]).map_err(|_| "has a document of 2^31 tokens or more".to_owned())?;
        idx.extend(length.to_le_bytes());
    }
    begins[..documents as usize].iter().for_each(|at| idx.extend((at * token_type.bytes() as u64).to_le_bytes()));
    (0..=documents).for_each(|document| idx.extend(document.to_le_bytes()));
    Ok(idx)
}
