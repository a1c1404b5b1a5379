//! A fast encoder for byte-level BPE of the GPT-2 kind.
//!
//! The library supports offsets, normalizers and every kind of pre-tokenizer, while a training
//! corpus only needs ids. For a `tokenizer.json` that is exactly of GPT-2's kind (as are those that
//! are trained here), this encoder gives the same ids about twenty times as fast. It finds words
//! with [`words`](super::words), caches the ids of words, and merges new words in the library's
//! order. Everything else goes through the library.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::hugging_face::{byte_characters, kind, merge_pair};
use super::words::words;

/// The vocabulary and merges of one tokenizer.
#[derive(Debug)]
pub(super) struct ByteBpe {
    /// The id of each byte alone.
    byte_ids: [u32; 256],
    /// Rank and result of merging two ids.
    merges: HashMap<(u32, u32), Merge, Fast>,
    /// Words that are taken whole if they are in the vocabulary, for tokenizers with
    /// `ignore_merges`.
    whole_words: Option<HashMap<Box<[u8]>, u32, Fast>>,
    /// Distinguishes the caches of several tokenizers.
    number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Merge {
    rank: u32,
    id: u32,
}

/// Maximum number of words cached per thread; 2^16 of them cover nearly all of any text.
const CACHE_WORDS: usize = 1 << 16;
/// Maximum bytes of a cached word. Longer words are rare and would fill the cache.
const CACHE_WORD_BYTES: usize = 64;

/// A thread's cache of one tokenizer's words.
struct Cache {
    number: u64,
    /// Range in `ids` of each word.
    words: HashMap<Box<[u8]>, (u32, u32), Fast>,
    ids: Vec<u32>,
}

thread_local! {
    static CACHE: RefCell<Cache> =
        const { RefCell::new(Cache { number: 0, words: HashMap::with_hasher(Fast), ids: Vec::new() }) };
}

impl ByteBpe {
    /// Builds the encoder from a parsed `tokenizer.json` of this kind: BPE over all 256 bytes
    /// without normalizer, dropout, affixes or unknown token, split by GPT-2's pattern, and with no
    /// added tokens but special ones. None for other kinds.
    pub(super) fn new(value: &Value) -> Option<Self> {
        let model = &value["model"];
        let is_off =
            |v: &Value| v.is_null() || *v == Value::Bool(false) || v.as_str() == Some("") || v.as_f64() == Some(0.0);
        let switches = ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"];
        let splitter = &value["pre_tokenizer"];
        let is_plain = kind(model) == Some("BPE")
            && switches.iter().all(|name| is_off(&model[*name]))
            && value["normalizer"].is_null()
            && kind(splitter) == Some("ByteLevel")
            && splitter["add_prefix_space"] == Value::Bool(false)
            && splitter.get("use_regex").is_none_or(|v| *v == Value::Bool(true));
        let added = value["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
        if !is_plain || !added.iter().all(|token| token["special"] == Value::Bool(true)) {
            return None;
        }

        let vocab = model["vocab"].as_object()?;
        let id = |token: &str| u32::try_from(vocab.get(token)?.as_u64()?).ok();
        let characters = byte_characters();
        let mut byte_ids = [0; 256];
        for (slot, character) in byte_ids.iter_mut().zip(&characters) {
            *slot = id(character.encode_utf8(&mut [0; 4]))?;
        }
        let list = model["merges"].as_array()?;
        let mut merges = HashMap::with_capacity_and_hasher(list.len(), Fast);
        for (rank, merge) in list.iter().enumerate() {
            let (left, right) = merge_pair(merge)?;
            let merged = Merge { rank: rank as u32, id: id(&format!("{left}{right}"))? };
            merges.insert((id(left)?, id(right)?), merged);
        }
        let whole_words = (model["ignore_merges"] == Value::Bool(true)).then(|| {
            let byte_of: HashMap<char, u8> = characters.iter().copied().zip(0..=u8::MAX).collect();
            let in_bytes = |token: &str| token.chars().map(|c| byte_of.get(&c).copied()).collect::<Option<Box<[u8]>>>();
            vocab.iter().filter_map(|(token, _)| Some((in_bytes(token)?, id(token)?))).collect()
        });
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        Some(Self { byte_ids, merges, whole_words, number: NUMBER.fetch_add(1, Ordering::Relaxed) })
    }

    /// The ids of `text`.
    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        CACHE.with_borrow_mut(|cache| {
            if cache.number != self.number {
                cache.number = self.number;
                cache.words.clear();
                cache.ids.clear();
            }
            for word in words(text) {
                self.encode_word(word.as_bytes(), cache, &mut ids);
            }
        });
        ids
    }

    fn encode_word(&self, word: &[u8], cache: &mut Cache, ids: &mut Vec<u32>) {
        if let Some(&(from, to)) = cache.words.get(word) {
            ids.extend_from_slice(&cache.ids[from as usize..to as usize]);
            return;
        }
        let before = ids.len();
        match self.whole_words.as_ref().and_then(|whole| whole.get(word)) {
            Some(&id) => ids.push(id),
            None => self.merge(word, ids),
        }
        if word.len() <= CACHE_WORD_BYTES && cache.words.len() < CACHE_WORDS {
            let from = cache.ids.len() as u32;
            cache.ids.extend_from_slice(&ids[before..]);
            cache.words.insert(word.into(), (from, cache.ids.len() as u32));
        }
    }

    /// Merges pairs in order of rank and then of position, until none is left.
    ///
    /// A queue entry is stale once one of its symbols was merged away. Like the library, this
    /// treats an entry as fresh if the pair now at its position gives the same id.
    fn merge(&self, word: &[u8], ids: &mut Vec<u32>) {
        const NONE: u32 = u32::MAX;
        let length = word.len() as u32;
        let mut symbols: Vec<Symbol> = (0..length)
            .map(|at| Symbol {
                id: self.byte_ids[usize::from(word[at as usize])],
                previous: if at == 0 { NONE } else { at - 1 },
                next: if at + 1 == length { NONE } else { at + 1 },
                is_merged_away: false,
            })
            .collect();
        let candidate = |symbols: &[Symbol], at: u32| {
            let symbol = &symbols[at as usize];
            let next = symbols.get(symbol.next as usize)?;
            let merge = self.merges.get(&(symbol.id, next.id))?;
            Some(Reverse((merge.rank, at, merge.id)))
        };
        let mut queue: BinaryHeap<_> = (0..length).filter_map(|at| candidate(&symbols, at)).collect();
        while let Some(Reverse((_, at, id))) = queue.pop() {
            let symbol = symbols[at as usize];
            let is_fresh = |Reverse((_, _, now))| now == id;
            if symbol.is_merged_away || !candidate(&symbols, at).is_some_and(is_fresh) {
                continue;
            }
            let right = symbols[symbol.next as usize];
            symbols[symbol.next as usize].is_merged_away = true;
            symbols[at as usize] = Symbol { id, next: right.next, ..symbol };
            if right.next != NONE {
                symbols[right.next as usize].previous = at;
            }
            if symbol.previous != NONE {
                queue.extend(candidate(&symbols, symbol.previous));
            }
            queue.extend(candidate(&symbols, at));
        }
        let mut at = 0;
        while let Some(symbol) = symbols.get(at as usize) {
            ids.push(symbol.id);
            at = symbol.next;
        }
    }
}

/// One id of a word being merged, in a list.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    id: u32,
    previous: u32,
    next: u32,
    is_merged_away: bool,
}

/// A hasher for short keys. (A crafted text can slow down its own tokenization, nothing more.)
#[derive(Debug, Clone, Copy, Default)]
struct Fast;

/// The running hash.
struct FastHasher(u64);

impl BuildHasher for Fast {
    type Hasher = FastHasher;

    fn build_hasher(&self) -> FastHasher {
        FastHasher(0)
    }
}

impl Hasher for FastHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u32(&mut self, value: u32) {
        // A product by a large odd constant (2^64 / golden ratio) moves every bit up; the rotation
        // brings them down again.
        self.0 = (self.0 ^ u64::from(value)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    }

    fn write_usize(&mut self, _: usize) {
        // The length prefix of a slice is left out: no key is the beginning of another here.
    }
}
