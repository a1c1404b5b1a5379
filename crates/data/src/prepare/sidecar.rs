//! The `.json` beside prepared token files. It records what they were made from, so that they are
//! reused or refused for a reason.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::atomic;
use crate::error::{DataError, Result};
use crate::indexed::with_suffix;

/// The `format` of every sidecar.
const FORMAT: &str = "trainyard-tokens";
const VERSION: u32 = 1;

/// The content of `PREFIX.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sidecar {
    /// `trainyard-tokens`.
    pub format: String,
    /// Version of this structure.
    pub version: u32,
    /// Hash over everything the result depends on; equal keys mean equal results.
    pub key: String,
    /// The tokenizer that made the tokens.
    pub tokenizer: SidecarTokenizer,
    /// The division of documents.
    pub split: SidecarSplit,
    /// The training part.
    pub train: SidecarPart,
    /// The validation part, where one was asked for.
    pub validation: Option<SidecarPart>,
    /// Documents passed over because they had no text.
    pub empty_documents: u64,
    /// Documents passed over because they were invalid and skipping was asked for.
    pub invalid_documents: u64,
    /// Number of source files.
    pub source_files: u64,
    /// The first source files (at most [`Sidecar::SOURCES_MAX`]).
    pub sources: Vec<SidecarSource>,
}

/// The tokenizer that made the tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarTokenizer {
    /// `bytes`, `characters` or `tokenizer.json`.
    pub kind: String,
    /// [`crate::Tokenizer::fingerprint`].
    pub fingerprint: String,
    /// Tokens are below this number.
    pub vocab_size: usize,
    /// The token after each document.
    pub eos: Option<u32>,
    /// The tokens before the text of each document; none in files from before they were added.
    #[serde(default)]
    pub before: Vec<u32>,
    /// The tokens after the text of each document, before the end-of-text token.
    #[serde(default)]
    pub after: Vec<u32>,
}

/// The division of documents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SidecarSplit {
    /// `none`, `document` (by hash) or `position` (the end of the only document).
    pub by: String,
    /// Share of the documents, or of the characters, that was asked for validation.
    pub validation_fraction: f64,
    /// Seed of the hash.
    pub seed: u64,
    /// Number of documents whose end validates, so that they are in both parts; 0 in files that
    /// predate this count.
    #[serde(default)]
    pub divided_documents: u64,
}

/// One pair of token files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarPart {
    /// File name of the pair, without `.bin` or `.idx`.
    pub name: String,
    /// Number of documents.
    pub documents: u64,
    /// Number of tokens, including end-of-text tokens.
    pub tokens: u64,
    /// Bytes of UTF-8 text that the tokens stand for: the denominator of bits per byte.
    pub text_bytes: u64,
    /// Type of a token.
    pub token_type: String,
    /// xxh3 of the `.bin`.
    pub bin_xxh3: String,
    /// xxh3 of the `.mask`; None if every token is a target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_xxh3: Option<String>,
    /// Number of tokens that are targets; None if every token is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned: Option<u64>,
}

/// One source file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarSource {
    /// Path as given.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// Size on disk.
    pub bytes: u64,
    /// Last modification, nanoseconds since 1970.
    pub modified_ns: u64,
}

/// Writes a path that is not Unicode as nearly as possible: it is there for people to read.
fn lossy<S: serde::Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

impl Sidecar {
    /// Maximum number of source files that are listed by name; a folder of millions need not be
    /// repeated.
    pub const SOURCES_MAX: usize = 1000;

    pub(super) fn format() -> String {
        FORMAT.into()
    }

    pub(super) fn version() -> u32 {
        VERSION
    }

    /// Number of documents of the text. A document whose end validates is in both parts and counts
    /// once.
    pub fn documents(&self) -> u64 {
        match (&self.validation, self.split.by.as_str()) {
            (None, _) | (_, "position") => self.train.documents,
            (Some(validation), _) => {
                (self.train.documents + validation.documents).saturating_sub(self.split.divided_documents)
            }
        }
    }

    /// `PREFIX.json`.
    pub fn path(prefix: &Path) -> PathBuf {
        with_suffix(prefix, ".json")
    }

    /// Reads `PREFIX.json`; `Ok(None)` when there is none.
    pub fn read(prefix: &Path) -> Result<Option<Self>> {
        const FIX: &str = "remove it, or run `trainyard data prepare` again";
        let path = Self::path(prefix);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(reason) if reason.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(reason) => return Err(DataError::io("read", &path)(reason)),
        };
        let sidecar: Self = serde_json::from_slice(&bytes)
            .map_err(|e| DataError::token_file(&path, format!("is not a description of token files ({e})"), FIX))?;
        if sidecar.format != FORMAT || sidecar.version != VERSION {
            let what = format!(
                "is of format {:?} version {}, not {FORMAT:?} version {VERSION}",
                sidecar.format, sidecar.version
            );
            return Err(DataError::token_file(&path, what, FIX));
        }
        Ok(Some(sidecar))
    }

    /// The sidecar and the part that describe the token files `PREFIX.bin`, when `PREFIX` is
    /// `X.train` or `X.validation` of a prepared X; `Ok(None)` for token files from elsewhere.
    pub fn of_part(prefix: &Path) -> Result<Option<(Self, SidecarPart)>> {
        let Some(name) = prefix.file_name().and_then(|n| n.to_str()) else { return Ok(None) };
        let Some(stem) = name.strip_suffix(".train").or_else(|| name.strip_suffix(".validation")) else {
            return Ok(None);
        };
        let Some(sidecar) = Self::read(&prefix.with_file_name(stem))? else { return Ok(None) };
        let part = [Some(&sidecar.train), sidecar.validation.as_ref()].into_iter().flatten().find(|p| p.name == name);
        Ok(part.cloned().map(|part| (sidecar, part)))
    }

    pub(super) fn write(&self, prefix: &Path) -> Result<()> {
        let path = Self::path(prefix);
        let text = serde_json::to_string_pretty(self).map_err(|e| DataError::io("write", &path)(e.into()))?;
        atomic::write(&path, format!("{text}\n").as_bytes())
    }
}
