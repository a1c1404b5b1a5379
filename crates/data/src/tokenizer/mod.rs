//! Converts text to tokens and back.
//!
//! One type for the three kinds: a Hugging Face `tokenizer.json` (run by the crate `tokenizers`, so
//! that ids are those of transformers), bytes, and characters. The last two are saved as a small
//! JSON of our own and can be exported as a `tokenizer.json` too. Truncation and padding are
//! switched off, and encoding adds no token: [`Tokenizer::before`] and [`Tokenizer::after`] are
//! what the post-processor of a `tokenizer.json` puts around a text, for whoever has a whole text.
//! The end-of-text token is put between documents by whoever writes them.
//!
//! The files beside a `tokenizer.json` (chat template, special tokens, ...) are kept with it, and
//! saved with it again.

mod byte_bpe;
mod characters;
mod companions;
mod hugging_face;
mod stream;
mod train;
mod words;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

pub use stream::StreamDecoder;
pub use train::TrainProgress;

use crate::atomic;
use crate::error::{DataError, Result};
use characters::Characters;
use companions::{Companions, SPECIAL_TOKENS};
use hugging_face::HuggingFace;

/// The end-of-text token of GPT-2, the default for trained tokenizers.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// The key that marks our own tokenizer files, and its only version.
const OWN_KEY: &str = "trainyard_tokenizer";
const OWN_VERSION: u64 = 1;

/// No tokenizer file in use comes near this size; a larger file is something else.
const FILE_BYTES_MAX: u64 = 1 << 29;

/// A tokenizer; cheap to clone, safe to share between threads.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    kind: Arc<Kind>,
    /// The file's content, kept so that saving reproduces it byte for byte.
    json: Arc<str>,
    eos: Option<u32>,
    bos: Option<u32>,
    /// The tokens that belong before a text and after it.
    around: [Arc<[u32]>; 2],
    companions: Arc<Companions>,
}

#[derive(Debug)]
enum Kind {
    Bytes,
    Characters(Box<Characters>),
    HuggingFace(Box<HuggingFace>),
}

impl Tokenizer {
    /// Loads a `tokenizer.json` or one of our own files; a folder is searched for `tokenizer.json`.
    ///
    /// The end-of-text token of a `tokenizer.json` is the `eos_token` of a `tokenizer_config.json`
    /// beside it, else the first of the usual names among its special tokens. Where its
    /// post-processor adds nothing before (after) a text, `add_bos_token` (`add_eos_token`) of that
    /// file counts.
    pub fn load(path: &Path) -> Result<Self> {
        let path: PathBuf = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let origin = path.display().to_string();
        let metadata = std::fs::metadata(&path).map_err(DataError::io("open", &path))?;
        if metadata.len() > FILE_BYTES_MAX {
            let what = format!("has {} bytes, more than any tokenizer", metadata.len());
            return Err(DataError::tokenizer(origin, what, "give the path of a tokenizer.json"));
        }
        let bytes = std::fs::read(&path).map_err(DataError::io("read", &path))?;
        let mut tokenizer = Self::from_json(&bytes, &origin)?;
        if matches!(&*tokenizer.kind, Kind::HuggingFace(_)) {
            tokenizer.companions = Arc::new(Companions::read(&path)?);
            tokenizer.follow_config(&origin)?;
        } else {
            tokenizer.companions = Arc::new(Companions::read(&path)?.template_alone());
        }
        Ok(tokenizer)
    }

    /// Takes what `tokenizer_config.json` says.
    fn follow_config(&mut self, origin: &str) -> Result<()> {
        let companions = Arc::clone(&self.companions);
        if let Some(token) = companions.token("eos_token") {
            self.eos = Some(self.token_to_id(token).ok_or_else(|| {
                let what =
                    format!("tokenizer_config.json names the end-of-text token {token:?}, which it does not have");
                DataError::tokenizer(origin, what, "use the tokenizer.json and tokenizer_config.json of one model")
            })?);
        }
        // Many name one that they never use, and that the vocabulary may lack.
        self.bos = companions.token("bos_token").and_then(|token| self.token_to_id(token)).or(self.bos);
        for (place, (asks, token)) in [("add_bos_token", self.bos), ("add_eos_token", self.eos)].into_iter().enumerate()
        {
            if let (true, true, Some(token)) = (self.around[place].is_empty(), companions.flag(asks), token) {
                self.around[place] = [token].into();
            }
        }
        Ok(())
    }

    /// Reads the content of a tokenizer file; `origin` names it in errors.
    pub fn from_json(bytes: &[u8], origin: &str) -> Result<Self> {
        const FIX: &str = "give a Hugging Face tokenizer.json, or a file that `trainyard tokenizer` wrote";
        let text = std::str::from_utf8(bytes)
            .map_err(|e| DataError::tokenizer(origin, format!("is not UTF-8 at byte {}", e.valid_up_to()), FIX))?;
        if text.trim().is_empty() {
            return Err(DataError::tokenizer(origin, "is empty", FIX));
        }
        let value: Value = serde_json::from_str(text)
            .map_err(|e| DataError::tokenizer(origin, format!("is not valid JSON ({e})"), FIX))?;
        if let Some(version) = value.get(OWN_KEY) {
            return Self::from_own_json(&value, version, origin);
        }
        if value.get("model").is_none() {
            let what = "is JSON, but has neither \"model\" (tokenizer.json) nor \"trainyard_tokenizer\"";
            return Err(DataError::tokenizer(origin, what, FIX));
        }
        let inner = HuggingFace::from_json(text, &value, origin)?;
        let (eos, around) = (inner.guess_eos(), inner.around()?);
        // A template says with what texts begin.
        let bos = around[0].first().copied();
        Ok(Self { eos, bos, around: around.map(Into::into), ..Self::of(Kind::HuggingFace(Box::new(inner)), text) })
    }

    fn from_own_json(value: &Value, version: &Value, origin: &str) -> Result<Self> {
        if version.as_u64() != Some(OWN_VERSION) {
            let what = format!("is of version {version}, this program knows {OWN_VERSION}");
            return Err(DataError::tokenizer(origin, what, "use the program that wrote it, or make it again"));
        }
        match value.get("kind").and_then(Value::as_str) {
            Some("bytes") => Ok(Self::bytes()),
            Some("characters") => match value.get("characters").and_then(Value::as_str) {
                Some(list) => Self::characters(Characters::from_list(list, origin)?),
                None => Err(DataError::tokenizer(origin, "has no \"characters\"", "make it again from its text")),
            },
            other => {
                let what = format!("is of kind {other:?}, known are \"bytes\" and \"characters\"");
                Err(DataError::tokenizer(origin, what, "make it again"))
            }
        }
    }

    /// One token per byte, and 256 as end-of-text: 257 in all.
    pub fn bytes() -> Self {
        let json = json!({ OWN_KEY: OWN_VERSION, "kind": "bytes" }).to_string();
        Self { eos: Some(256), ..Self::of(Kind::Bytes, &json) }
    }

    /// A tokenizer without special tokens.
    fn of(kind: Kind, json: &str) -> Self {
        let (kind, around) = (Arc::new(kind), [Arc::default(), Arc::default()]);
        Self { kind, json: json.into(), eos: None, bos: None, around, companions: Arc::default() }
    }

    /// One token per character of `text`, in code point order; no end-of-text token.
    pub fn characters_from(text: &str) -> Result<Self> {
        Self::characters(Characters::from_text(text)?)
    }

    /// As [`Tokenizer::characters_from`], from a stream of texts.
    pub fn characters_from_texts(texts: impl Iterator<Item = Result<String>>) -> Result<Self> {
        Self::characters(Characters::from_texts(texts)?)
    }

    fn characters(characters: Characters) -> Result<Self> {
        let list: String = characters.list().iter().collect();
        let json = json!({ OWN_KEY: OWN_VERSION, "kind": "characters", "characters": list }).to_string();
        Ok(Self::of(Kind::Characters(Box::new(characters)), &json))
    }

    /// Trains a byte-level BPE tokenizer of at most `vocab_size` tokens, including `<|endoftext|>`,
    /// on `texts`.
    ///
    /// The result is a `tokenizer.json` that transformers loads (with GPT-2's pre-tokenization),
    /// and does not depend on thread timing. It is smaller than asked if the text runs out of pairs
    /// that occur twice. `progress` is called now and then from one thread.
    pub fn train_bpe<I>(texts: I, vocab_size: usize, progress: impl FnMut(TrainProgress) + Send) -> Result<Self>
    where
        I: Iterator<Item = Result<String>> + Send,
    {
        Self::from_json(train::train_bpe(texts, vocab_size, progress)?.as_bytes(), "just trained")
    }

    /// The tokens of `text`. Special tokens that occur literally in it become their ids, as in
    /// transformers.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &*self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Characters(characters) => characters.encode(text),
            Kind::HuggingFace(inner) => inner.encode(text),
        }
    }

    /// The tokens of `text`, with special tokens read as ordinary text. Training data should be
    /// read this way.
    pub fn encode_ordinary(&self, text: &str) -> Result<Vec<u32>> {
        match &*self.kind {
            Kind::Bytes | Kind::Characters(_) => self.encode(text),
            Kind::HuggingFace(inner) => inner.encode_ordinary(text),
        }
    }

    /// The text of `tokens`. Bytes that are not UTF-8 become U+FFFD; so do ids outside a byte or
    /// character vocabulary (a `tokenizer.json` leaves such ids out). The end-of-text token appears
    /// as its name.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match &*self.kind {
            Kind::Bytes => decode_bytes(tokens),
            Kind::Characters(characters) => characters.decode(tokens),
            Kind::HuggingFace(inner) => inner.decode(tokens),
        }
    }

    /// A decoder for tokens that arrive one at a time.
    pub fn stream_decoder(&self) -> StreamDecoder {
        StreamDecoder::new(self.clone())
    }

    /// Number of rows that an embedding needs: the largest id plus one.
    pub fn vocab_size(&self) -> usize {
        match &*self.kind {
            Kind::Bytes => 257,
            Kind::Characters(characters) => characters.list().len(),
            Kind::HuggingFace(inner) => inner.vocab_size,
        }
    }

    /// The beginning-of-text token, if the tokenizer has one; it is added to texts only if the
    /// tokenizer asks for it.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token between documents, if there is one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The same tokenizer with `token` as end-of-text.
    pub fn with_eos(mut self, token: &str) -> Result<Self> {
        self.eos = Some(self.token_to_id(token).ok_or_else(|| {
            let what = format!("has no token {token:?} to serve as end-of-text");
            DataError::tokenizer(self.kind(), what, "choose one of its tokens")
        })?);
        Ok(self)
    }

    /// The tokens that belong before a whole text, as its post-processor has it: a
    /// beginning-of-text token, or nothing.
    pub fn before(&self) -> &[u32] {
        &self.around[0]
    }

    /// The tokens that belong after a whole text, as its post-processor has it.
    pub fn after(&self) -> &[u32] {
        &self.around[1]
    }

    /// The same tokenizer with a beginning-of-text token before texts, or without one; None leaves
    /// that to it.
    ///
    /// # Errors
    ///
    /// It has no such token.
    pub fn with_bos(mut self, add: Option<bool>) -> Result<Self> {
        match add {
            Some(true) if self.before().is_empty() => {
                let bos = self.bos.ok_or_else(|| {
                    let what = "has no beginning-of-text token: no bos_token in a tokenizer_config.json beside it";
                    DataError::tokenizer(self.kind(), what, "leave open whether texts begin with one")
                })?;
                self.around[0] = [bos].into();
            }
            Some(false) => self.around[0] = Arc::default(),
            _ => {}
        }
        Ok(self)
    }

    /// The tokens around a text in words: "begins each text with <s> (1)". None where there are
    /// none.
    pub fn around_in_words(&self) -> Option<String> {
        let words = |tokens: &[u32], verb: &str| {
            let named: Vec<_> = tokens.iter().map(|token| format!("{} ({token})", self.decode(&[*token]))).collect();
            (!named.is_empty()).then(|| format!("{verb} each text with {}", named.join(" ")))
        };
        let both = [words(self.before(), "begins"), words(self.after(), "ends")];
        let said = both.into_iter().flatten().collect::<Vec<_>>().join(" and ");
        (!said.is_empty()).then_some(said)
    }

    /// The text of a special token by its key in `tokenizer_config.json`: `eos_token`.
    pub fn special(&self, key: &str) -> Option<String> {
        let of_id = |id: Option<u32>| id.map(|id| self.decode(&[id]));
        self.companions.token(key).map(str::to_owned).or_else(|| match key {
            "eos_token" => self.eos_name(),
            "bos_token" => of_id(self.bos),
            _ => None,
        })
    }

    /// True for a token that no text is encoded to but by its name.
    pub fn is_special(&self, token: u32) -> bool {
        match &*self.kind {
            Kind::Bytes => token == 256,
            Kind::Characters(_) => false,
            Kind::HuggingFace(inner) => inner.is_special(token),
        }
    }

    /// The chat template that lies beside it, in Jinja.
    pub fn chat_template(&self) -> Option<String> {
        self.companions.chat_template()
    }

    /// The same tokenizer with another chat template, which is saved with it.
    pub fn with_chat_template(mut self, template: &str) -> Self {
        self.companions = Arc::new(self.companions.with_chat_template(template));
        self
    }

    /// The tokens of a text, and of each whether it has something of the ranges `learned`, which
    /// are bytes. Special tokens that occur literally in the text become their ids.
    pub fn encode_learned(&self, text: &str, learned: &[Range<usize>]) -> Result<(Vec<u32>, Vec<bool>)> {
        let (tokens, places) = match &*self.kind {
            Kind::Bytes => (self.encode(text)?, (0..text.len()).map(|at| (at, at + 1)).collect()),
            Kind::Characters(characters) => {
                let places = text.char_indices().map(|(at, character)| (at, at + character.len_utf8()));
                (characters.encode(text)?, places.collect())
            }
            Kind::HuggingFace(inner) => inner.encode_with_places(text)?,
        };
        let is_learned = |(begin, end): &(usize, usize)| learned.iter().any(|of| *begin < of.end && of.start < *end);
        let learned = places.iter().map(is_learned).collect();
        Ok((tokens, learned))
    }

    /// The id of a token by its name in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        match &*self.kind {
            Kind::Bytes if token == END_OF_TEXT => Some(256),
            Kind::Bytes | Kind::Characters(_) => match self.encode(token).ok()?.as_slice() {
                [one] => Some(*one),
                _ => None,
            },
            Kind::HuggingFace(inner) => inner.token_to_id(token),
        }
    }

    /// `bytes`, `characters` or `tokenizer.json`.
    pub fn kind(&self) -> &'static str {
        match &*self.kind {
            Kind::Bytes => "bytes",
            Kind::Characters(_) => "characters",
            Kind::HuggingFace(_) => "tokenizer.json",
        }
    }

    /// Hash of the tokenizer file, so that data and runs notice another one. The choice of
    /// end-of-text is not in it, nor that of a token before texts.
    pub fn fingerprint(&self) -> String {
        format!("{:016x}", xxh3_64(self.json.as_bytes()))
    }

    /// Writes the file that [`Tokenizer::load`] reads, and those that lay beside it, unchanged
    /// since they were loaded or trained; each atomically.
    ///
    /// When the end-of-text token cannot be told from them, a `tokenizer_config.json` beside it
    /// says it.
    pub fn save(&self, path: &Path) -> Result<()> {
        atomic::write(path, self.json.as_bytes())?;
        if let Kind::HuggingFace(inner) = &*self.kind {
            let told = self.companions.token("eos_token").map_or(inner.guess_eos(), |name| self.token_to_id(name));
            let config = (told != self.eos).then(|| json!({ "eos_token": self.eos_name() }));
            self.companions.write(path, config.as_ref())?;
        } else {
            self.companions.write(path, None)?;
        }
        Ok(())
    }

    /// Writes `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` into
    /// `folder`, as `AutoTokenizer.from_pretrained` reads them. `context_length` becomes
    /// `model_max_length`. A tokenizer that came with its own files is written with these.
    pub fn save_hugging_face(&self, folder: &Path, context_length: usize) -> Result<()> {
        let path = folder.join("tokenizer.json");
        if self.companions.is_whole() {
            return self.save(&path);
        }
        let json = self.hugging_face_json();
        let eos = self.eos_name();
        let bos = self.bos.map_or(eos.clone(), |bos| Some(self.decode(&[bos])));
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": false,
            "bos_token": bos,
            "eos_token": eos,
        });
        let special = match &eos {
            Some(eos) => json!({ "bos_token": bos, "eos_token": eos }),
            None => json!({}),
        };
        atomic::write(&path, json.as_bytes())?;
        self.companions.write(&path, Some(&config))?;
        match self.companions.has(SPECIAL_TOKENS) {
            true => Ok(()),
            false => atomic::write(&folder.join(SPECIAL_TOKENS), pretty(&special).as_bytes()),
        }
    }

    /// The text of a `tokenizer.json` that other programs read.
    pub fn hugging_face_json(&self) -> String {
        match &*self.kind {
            Kind::Bytes => pretty(&hugging_face::json_of_bytes()),
            Kind::Characters(characters) => pretty(&hugging_face::json_of_characters(characters.list())),
            Kind::HuggingFace(_) => self.json.to_string(),
        }
    }

    /// The bytes of one token, if every token stands for bytes.
    fn token_bytes(&self, token: u32) -> Option<Vec<u8>> {
        match &*self.kind {
            Kind::Bytes => Some(match u8::try_from(token) {
                Ok(byte) => vec![byte],
                Err(_) => decode_bytes(&[token]).into_bytes(),
            }),
            Kind::Characters(_) => None,
            Kind::HuggingFace(inner) => inner.token_bytes(token),
        }
    }

    fn eos_name(&self) -> Option<String> {
        let eos = self.eos?;
        match &*self.kind {
            Kind::Bytes if eos == 256 => Some(END_OF_TEXT.into()),
            Kind::Bytes | Kind::Characters(_) => Some(self.decode(&[eos])),
            Kind::HuggingFace(inner) => inner.id_to_token(eos),
        }
    }

    /// Cuts `text` into pieces of about `bytes` that encode to the same tokens as the whole.
    /// Returns it whole if this tokenizer has no such positions.
    pub(crate) fn pieces<'t>(&self, text: &'t str, bytes: usize) -> Vec<&'t str> {
        match &*self.kind {
            Kind::Bytes | Kind::Characters(_) => cut(text, bytes, |_, _| true),
            Kind::HuggingFace(inner) if inner.splittable => cut(text, bytes, hugging_face::may_cut),
            Kind::HuggingFace(_) => vec![text],
        }
    }
}

/// Cuts before every first character at or after a multiple of `bytes` where
/// `may_cut(before, after)` agrees.
fn cut(text: &str, bytes: usize, may_cut: impl Fn(char, char) -> bool) -> Vec<&str> {
    let mut pieces = Vec::with_capacity(text.len() / bytes.max(1) + 1);
    let mut start = 0;
    while text.len() - start > bytes {
        let mut probe = start + bytes;
        while !text.is_char_boundary(probe) {
            probe += 1;
        }
        let mut before = text[..probe].chars().next_back().unwrap_or(' ');
        let place = text[probe..].char_indices().find(|&(_, after)| {
            let here = may_cut(before, after);
            before = after;
            here
        });
        let Some((offset, _)) = place else { break };
        pieces.push(&text[start..probe + offset]);
        start = probe + offset;
    }
    pieces.push(&text[start..]);
    pieces
}

fn decode_bytes(tokens: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(tokens.len());
    for &token in tokens {
        match u8::try_from(token) {
            Ok(byte) => bytes.push(byte),
            Err(_) if token == 256 => bytes.extend_from_slice(END_OF_TEXT.as_bytes()),
            Err(_) => bytes.extend_from_slice("\u{FFFD}".as_bytes()),
        }
    }
    match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

#[cfg(test)]
mod tests;
