//! A Hugging Face `tokenizer.json`, run by the crate `tokenizers`.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use serde_json::{Value, json};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Encoding, Token};

use super::END_OF_TEXT;
use super::byte_bpe::ByteBpe;
use crate::error::{DataError, Result};

/// Names that models give their end-of-text token, the most telling first.
const EOS_NAMES: [&str; 7] = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>"];

/// The first byte of a token in its text, and the one behind its last.
pub(super) type Place = (usize, usize);

/// A loaded `tokenizer.json`.
pub(super) struct HuggingFace {
    inner: tokenizers::Tokenizer,
    /// The same with special tokens read as text. It is built when first needed, since most
    /// programs need only one of the two.
    ordinary: OnceLock<tokenizers::Tokenizer>,
    /// The fast encoder, if it can replace the library with the same result.
    fast: Option<ByteBpe>,
    /// Texts of the special tokens, which the fast encoder does not look for.
    special: Vec<String>,
    pub(super) vocab_size: usize,
    /// True if a text may be cut where [`may_cut`] allows without changing its tokens.
    pub(super) splittable: bool,
    /// The byte behind each stand-in character, where the decoder is plainly byte-level.
    byte_of: Option<BTreeMap<char, u8>>,
    origin: String,
}

impl Debug for HuggingFace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HuggingFace").field("origin", &self.origin).field("vocab_size", &self.vocab_size).finish()
    }
}

impl HuggingFace {
    /// Builds it from the text of a file and the same text parsed.
    pub(super) fn from_json(text: &str, value: &Value, origin: &str) -> Result<Self> {
        const FIX: &str = "the file is damaged or newer than this program's tokenizers library: fetch it again";
        check_merges(value).map_err(|what| DataError::tokenizer(origin, what, FIX))?;
        // The library is written for well-formed files. A panic on another kind of damage becomes
        // an error too.
        let parsed = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(text)))
            .unwrap_or_else(|_| Err("the tokenizers library could not take it".into()));
        let mut inner =
            parsed.map_err(|e| DataError::tokenizer(origin, format!("is not a valid tokenizer ({e})"), FIX))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| DataError::tokenizer(origin, e.to_string(), FIX))?;
        let largest = inner.get_vocab(true).into_values().max();
        let Some(largest) = largest.filter(|&id| id < i32::MAX as u32) else {
            return Err(DataError::tokenizer(origin, "has no tokens, or ids beyond 2^31", FIX));
        };
        let splittable = is_splittable(value, &inner);
        let added = inner.get_added_tokens_decoder();
        let special = added.values().map(|token| token.content.clone()).collect();
        let is_byte_level = value.get("decoder").and_then(kind) == Some("ByteLevel");
        Ok(Self {
            inner,
            ordinary: OnceLock::new(),
            fast: ByteBpe::new(value),
            special,
            vocab_size: largest as usize + 1,
            splittable,
            byte_of: is_byte_level.then(|| byte_characters().into_iter().zip(0..=u8::MAX).collect()),
            origin: origin.into(),
        })
    }

    /// The usual end-of-text tokens among the special ones.
    pub(super) fn guess_eos(&self) -> Option<u32> {
        let added = self.inner.get_added_tokens_decoder();
        EOS_NAMES
            .iter()
            .find_map(|name| self.inner.token_to_id(name).filter(|id| added.get(id).is_some_and(|t| t.special)))
    }

    /// The tokens that its post-processor puts before and after a single text.
    pub(super) fn around(&self) -> Result<[Vec<u32>; 2]> {
        const FIX: &str = "repair its post_processor, or fetch the file again";
        // It is asked with a text of one token, because templates, pairs and sequences of both say
        // it in several ways.
        let text = Encoding::from_tokens(vec![Token::new(0, "a".into(), (0, 1))], 0);
        let processed = catch_unwind(AssertUnwindSafe(|| self.inner.post_process(text, None, true)))
            .unwrap_or_else(|_| Err("the tokenizers library could not apply it".into()))
            .map_err(|e| DataError::tokenizer(&self.origin, format!("has a post_processor that fails ({e})"), FIX))?;
        let (ids, added) = (processed.get_ids(), processed.get_special_tokens_mask());
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab_size) {
            let what = format!("has a post_processor that adds the token {id}, which is not in its vocabulary");
            return Err(DataError::tokenizer(&self.origin, what, FIX));
        }
        let text = added.iter().position(|added| *added == 0);
        let Some(text) = text.filter(|first| added[*first + 1..].iter().all(|added| *added == 1)) else {
            return Err(DataError::tokenizer(&self.origin, "has a post_processor that leaves no text", FIX));
        };
        Ok([ids[..text].to_vec(), ids[text + 1..].to_vec()])
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.fast {
            Some(fast) if !self.special.iter().any(|token| text.contains(token)) => Ok(fast.encode(text)),
            _ => self.encode_with(&self.inner, text),
        }
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.inner.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }

    /// The tokens of a text, and the bytes that each is made of.
    pub(super) fn encode_with_places(&self, text: &str) -> Result<(Vec<u32>, Vec<Place>)> {
        let encoding = self.inner.encode(text, false).map_err(|e| {
            let what = format!("could not encode a text ({e})");
            DataError::tokenizer(&self.origin, what, "check that its unknown token is in its vocabulary")
        })?;
        Ok((encoding.get_ids().to_vec(), encoding.get_offsets().to_vec()))
    }

    pub(super) fn encode_ordinary(&self, text: &str) -> Result<Vec<u32>> {
        if let Some(fast) = &self.fast {
            return Ok(fast.encode(text));
        }
        self.encode_ordinary_slowly(text)
    }

    /// Encodes with the library, whatever the kind. Tests compare the fast encoder with it.
    pub(super) fn encode_ordinary_slowly(&self, text: &str) -> Result<Vec<u32>> {
        let ordinary = self.ordinary.get_or_init(|| {
            let mut clone = self.inner.clone();
            clone.set_encode_special_tokens(true);
            clone
        });
        self.encode_with(ordinary, text)
    }

    fn encode_with(&self, inner: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
        let encoding = inner.encode_fast(text, false).map_err(|e| {
            let what = format!("could not encode a text ({e})");
            DataError::tokenizer(&self.origin, what, "check that its unknown token is in its vocabulary")
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(super) fn decode(&self, tokens: &[u32]) -> String {
        // Decoders fail only on patterns that they cannot apply. The plain names are then the best
        // answer.
        self.inner
            .decode(tokens, false)
            .unwrap_or_else(|_| tokens.iter().filter_map(|&t| self.id_to_token(t)).collect())
    }

    /// The bytes of a token, if tokens stand for bytes; none for an unknown token.
    pub(super) fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let byte_of = self.byte_of.as_ref()?;
        let Some(token) = self.id_to_token(id) else { return Some(Vec::new()) };
        let bytes: Option<Vec<u8>> = token.chars().map(|c| byte_of.get(&c).copied()).collect();
        // An added token may have other characters, which are its text.
        Some(bytes.unwrap_or_else(|| token.into_bytes()))
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    pub(super) fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }
}

/// True at a position where a byte-level pre-tokenizer always splits, whatever the rest of the
/// text.
///
/// The position is between a letter and a newline after it. In the patterns of GPT-2, GPT-4, Llama
/// 3 and Qwen, a run of letters ends there, no alternative reaches across, and matching continues
/// at the newline without looking back.
pub(super) fn may_cut(before: char, after: char) -> bool {
    after == '\n' && before.is_alphabetic()
}

/// True if [`may_cut`] applies: pre-tokenized by pattern and bytes, nothing prepended to a text, no
/// token across lines.
fn is_splittable(value: &Value, inner: &tokenizers::Tokenizer) -> bool {
    let normalizer_is_local = match value.get("normalizer") {
        None | Some(Value::Null) => true,
        Some(normalizer) => matches!(kind(normalizer), Some("NFC")),
    };
    let Some(pre_tokenizer) = value.get("pre_tokenizer") else { return false };
    let steps: Vec<&Value> = match kind(pre_tokenizer) {
        Some("Sequence") => {
            pre_tokenizer.get("pretokenizers").and_then(Value::as_array).map(|a| a.iter().collect()).unwrap_or_default()
        }
        _ => vec![pre_tokenizer],
    };
    let plain = |step: &Value| step.get("add_prefix_space").and_then(Value::as_bool) != Some(true);
    let uses_regex = |step: &Value| step.get("use_regex").and_then(Value::as_bool) != Some(false);
    let is_known_split = |step: &Value| {
        let pattern = step.get("pattern").and_then(|p| p.get("Regex")).and_then(Value::as_str);
        pattern.is_some_and(|p| p.contains(r"\p{L}+") && p.contains(r"\s+(?!\S)") && !p.contains("(?<"))
    };
    let kinds_known = steps.iter().all(|step| match kind(step) {
        Some("ByteLevel") => plain(step),
        Some("Split") => is_known_split(step),
        Some("Digits") => true,
        _ => false,
    });
    let splits = steps.iter().any(|s| kind(s) == Some("Split") || kind(s) == Some("ByteLevel") && uses_regex(s));
    let tokens_within_lines = inner
        .get_added_tokens_decoder()
        .values()
        .all(|t| !t.lstrip && !t.rstrip && !t.single_word && !t.content.contains('\n'));
    normalizer_is_local && kinds_known && splits && tokens_within_lines
}

/// The `type` of a part of the file.
pub(super) fn kind(value: &Value) -> Option<&str> {
    value.get("type").and_then(Value::as_str)
}

/// Refuses merges whose result is not in the vocabulary: the library sizes a buffer by the longest
/// token and would write past it.
fn check_merges(value: &Value) -> Result<(), String> {
    let model = &value["model"];
    let (Some(merges), Some(vocab)) = (model["merges"].as_array(), model["vocab"].as_object()) else {
        return Ok(());
    };
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or("");
    for (rank, merge) in merges.iter().enumerate() {
        let Some((left, right)) = merge_pair(merge) else {
            return Err(format!("merge {rank} is not a pair of tokens"));
        };
        let merged = format!("{left}{}", right.strip_prefix(prefix).unwrap_or(right));
        if let Some(missing) = [left, right, &merged].into_iter().find(|token| !vocab.contains_key(*token)) {
            return Err(format!(
                "merge {rank} ({left:?}, {right:?}) needs the token {missing:?}, which is not in its vocabulary"
            ));
        }
        if right.len() < prefix.len() {
            return Err(format!("merge {rank} has a second part shorter than the subword prefix"));
        }
    }
    Ok(())
}

/// The two parts of a merge, in either of the forms in which files write them.
pub(super) fn merge_pair(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(pair) => pair.split_once(' '),
        Value::Array(pair) => match pair.as_slice() {
            [Value::String(left), Value::String(right)] => Some((left, right)),
            _ => None,
        },
        _ => None,
    }
}

/// The byte tokenizer as a BPE without merges: the ids are the bytes, then end-of-text.
pub(super) fn json_of_bytes() -> Value {
    let vocab: serde_json::Map<String, Value> =
        byte_characters().iter().enumerate().map(|(byte, c)| (c.to_string(), json!(byte))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special_token(256, END_OF_TEXT)],
        "normalizer": null,
        "pre_tokenizer": byte_level(),
        "post_processor": null,
        "decoder": byte_level(),
        "model": bpe_without_merges(vocab),
    })
}

/// The character tokenizer as a BPE without merges over the characters themselves.
pub(super) fn json_of_characters(list: &[char]) -> Value {
    let vocab: serde_json::Map<String, Value> =
        list.iter().enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": { "type": "Fuse" },
        "model": bpe_without_merges(vocab),
    })
}

fn byte_level() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true })
}

fn special_token(id: u32, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    })
}

fn bpe_without_merges(vocab: serde_json::Map<String, Value>) -> Value {
    json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": vocab, "merges": [],
    })
}

/// GPT-2's printable stand-in for each byte: itself where it prints, else the next code point from
/// 256 on.
pub(super) fn byte_characters() -> Vec<char> {
    let printable = |b: u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    (0..256u32)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap_or('\u{FFFD}')
        })
        .collect()
}

/// The library's alphabet, as a set that its trainer takes.
pub(super) fn byte_alphabet() -> std::collections::HashSet<char> {
    ByteLevel::alphabet().into_iter().collect()
}

#[cfg(test)]
impl HuggingFace {
    pub(super) fn has_fast_path(&self) -> bool {
        self.fast.is_some()
    }
}

/// The vocabulary as (token, id) sorted by id; for tests and reports.
#[cfg(test)]
pub(super) fn vocabulary(inner: &HuggingFace) -> Vec<(String, u32)> {
    let mut list: Vec<(String, u32)> = inner.inner.get_vocab(true).into_iter().collect();
    list.sort_by_key(|(_, id)| *id);
    list
}
