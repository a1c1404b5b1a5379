//! Text that commands take for evaluation and calibration.

use super::data::tokenizing;
use crate::output::note;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use trainyard_data::corpus::printable;
use trainyard_data::prepare::validation_prefix;
use trainyard_data::{ChatOptions, IndexedTokens, LossOn, PrepareOptions, Tokenizer, prepare};
use trainyard_engine::corpora::{begins_otherwise, check_made_by, open_text};

/// Default upper limit for the tokens of a row, for a model that was not trained here: its longest
/// sequence may be impractically long.
pub const LENGTH_MAX: usize = 1024;

/// The way in which text is read.
#[derive(Clone, Debug)]
pub enum Form {
    /// Documents, in JSONL in this field.
    Text {
        /// The field.
        field: String,
    },
    /// Conversations.
    Chat {
        /// The part of them that counts.
        loss_on: LossOn,
    },
}

/// Opens the texts as token files. Those that are not are tokenized into `scratch`.
pub fn open(paths: &[PathBuf], form: &Form, tokenizer: &Tokenizer, scratch: &Path) -> Result<Vec<IndexedTokens>> {
    let mut texts = Vec::new();
    for (number, path) in paths.iter().enumerate() {
        let bare = match path.extension() {
            Some(extension) if extension == "idx" || extension == "bin" => path.with_extension(""),
            _ => path.clone(),
        };
        let is_tokens = |prefix: &Path| {
            let mut index = prefix.to_owned().into_os_string();
            index.push(".idx");
            Path::new(&index).is_file()
        };
        // The OUT of `data prepare` is named as in data.train; its held-back part is evaluated.
        if let Some(prefix) = [validation_prefix(&bare), bare].into_iter().find(|prefix| is_tokens(prefix)) {
            check_made_by(tokenizer, &prefix)?;
            begins_otherwise(tokenizer, &prefix)?.iter().for_each(|line| note(line));
            texts.push(IndexedTokens::open(&prefix)?);
            continue;
        }
        let (field, chat) = match form {
            Form::Text { field } => (field.as_str(), None),
            Form::Chat { loss_on } => {
                ("", Some(ChatOptions { template: tokenizer.chat_template(), loss_on: *loss_on }))
            }
        };
        let corpus = open_text(std::slice::from_ref(path), field, chat.is_some())?;
        let out = scratch.join(format!("text-{number}"));
        let options = PrepareOptions { validation_fraction: 0.0, reuse: false, chat, ..PrepareOptions::new(out) };
        let made = prepare(&corpus, tokenizer, &options, tokenizing())
            .with_context(|| format!("cannot tokenize {}", printable(path)))?;
        texts.push(IndexedTokens::open(&made.train)?);
    }
    Ok(texts)
}

/// A temporary folder, removed when dropped.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    /// A new one.
    pub fn new() -> Result<Scratch> {
        let folder = tempfile::Builder::new().prefix("trainyard-text-").tempdir();
        Ok(Scratch(folder.context("cannot create a temporary folder")?))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}
