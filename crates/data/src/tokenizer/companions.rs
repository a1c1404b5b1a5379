//! The files that lie beside a `tokenizer.json` and belong to it: what they say of its tokens is
//! read, and all of them go where it goes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{FILE_BYTES_MAX, pretty};
use crate::atomic;
use crate::error::{DataError, Result};

/// The file of special tokens, the class and, of many, the chat template.
const CONFIG: &str = "tokenizer_config.json";
/// Special tokens once more.
pub(super) const SPECIAL_TOKENS: &str = "special_tokens_map.json";
/// The chat template, which comes before that of `tokenizer_config.json`.
const TEMPLATE: &str = "chat_template.jinja";
/// All that transformers reads or writes beside `tokenizer.json`.
const NAMES: [&str; 8] = [
    CONFIG,
    SPECIAL_TOKENS,
    "added_tokens.json",
    TEMPLATE,
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
];

/// The files beside a `tokenizer.json`.
#[derive(Debug, Default)]
pub(super) struct Companions {
    /// By name, as they were read.
    files: BTreeMap<&'static str, Vec<u8>>,
    /// Contents of `tokenizer_config.json`.
    config: Map<String, Value>,
}

impl Companions {
    /// Reads those of the tokenizer file `path`.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        let is_of_a_model = file == "tokenizer.json" || file.ends_with(".tokenizer.json");
        // Beside a file of another name, what lies there may belong to something else.
        for name in NAMES.into_iter().filter(|name| is_of_a_model || *name == CONFIG) {
            // Beside X.tokenizer.json of token files lies X.tokenizer_config.json; older files lie
            // under the plain name.
            let own = beside(path, name);
            let plain = path.with_file_name(name);
            let file = if name == CONFIG && !own.is_file() { plain } else { own };
            match std::fs::metadata(&file) {
                Ok(found) if found.len() > FILE_BYTES_MAX => {
                    let what = format!("has {} bytes, more than any such file", found.len());
                    return Err(DataError::tokenizer(file.display().to_string(), what, "repair or remove it"));
                }
                Ok(_) => {}
                Err(reason) if reason.kind() == std::io::ErrorKind::NotFound => continue,
                Err(reason) => return Err(DataError::io("open", &file)(reason)),
            }
            files.insert(name, std::fs::read(&file).map_err(DataError::io("read", &file))?);
        }
        let config = match files.get(CONFIG) {
            None => Map::new(),
            Some(bytes) => serde_json::from_slice(bytes).map_err(|e| {
                let what = format!("is not a JSON object ({e})");
                DataError::tokenizer(beside(path, CONFIG).display().to_string(), what, "repair or remove it")
            })?,
        };
        Ok(Self { files, config })
    }

    /// A token that `tokenizer_config.json` names, in either of the ways it is written.
    pub(super) fn token(&self, key: &str) -> Option<&str> {
        let token = self.config.get(key)?;
        token.as_str().or_else(|| token.get("content")?.as_str())
    }

    /// The chat template: of `chat_template.jinja`, of `tokenizer_config.json` (of several the one
    /// called `default`), or of `chat_template.json`.
    pub(super) fn chat_template(&self) -> Option<String> {
        let of_file = self.files.get(TEMPLATE).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        of_file.or_else(|| of_value(self.config.get("chat_template")?)).or_else(|| {
            let json: Value = serde_json::from_slice(self.files.get("chat_template.json")?).ok()?;
            of_value(json.get("chat_template")?)
        })
    }

    /// The file of the chat template, without the others.
    pub(super) fn template_alone(mut self) -> Self {
        self.files.retain(|name, _| *name == TEMPLATE);
        Self { files: self.files, config: Map::new() }
    }

    /// The same files with another chat template.
    pub(super) fn with_chat_template(&self, template: &str) -> Self {
        let (mut files, config) = (self.files.clone(), self.config.clone());
        files.insert(TEMPLATE, template.as_bytes().to_vec());
        Self { files, config }
    }

    /// True where `tokenizer_config.json` says so for `key`.
    pub(super) fn flag(&self, key: &str) -> bool {
        self.config.get(key).and_then(Value::as_bool) == Some(true)
    }

    /// True when there is a `tokenizer_config.json` that transformers can go by; one that only
    /// names the end-of-text token is our own.
    pub(super) fn is_whole(&self) -> bool {
        self.config.contains_key("tokenizer_class")
    }

    /// True when `name` is among them.
    pub(super) fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    /// Writes all of them beside the tokenizer file `path`; into `tokenizer_config.json` go the
    /// keys of `config` that it has not, and the end-of-text token of `config`.
    pub(super) fn write(&self, path: &Path, config: Option<&Value>) -> Result<()> {
        for (name, bytes) in self.files.iter().filter(|(name, _)| config.is_none() || **name != CONFIG) {
            atomic::write(&beside(path, name), bytes)?;
        }
        let Some(Value::Object(more)) = config else { return Ok(()) };
        let mut whole = self.config.clone();
        for (key, value) in more.iter().filter(|(key, _)| *key == "eos_token" || !self.config.contains_key(*key)) {
            whole.insert(key.clone(), value.clone());
        }
        atomic::write(&beside(path, CONFIG), pretty(&Value::Object(whole)).as_bytes())
    }
}

/// A template, or the one called `default` of several.
fn of_value(value: &Value) -> Option<String> {
    let named = |one: &&Value| one.get("name").and_then(Value::as_str) == Some("default");
    let one = value.as_array().map_or(Some(value), |all| all.iter().find(named)?.get("template"))?;
    one.as_str().map(str::to_owned)
}

/// The file `name` of the tokenizer file `path`: in its folder, with the same beginning where it is
/// called X.tokenizer.json.
fn beside(path: &Path, name: &str) -> PathBuf {
    let own = path.file_name().and_then(|file| file.to_str()).and_then(|file| file.strip_suffix(".tokenizer.json"));
    match own {
        Some(own) => path.with_file_name(format!("{own}.{name}")),
        None => path.with_file_name(name),
    }
}
