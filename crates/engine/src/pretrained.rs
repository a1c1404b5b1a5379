//! Pretrained models: Hugging Face folders, and GGUF files, which hold a model and its tokenizer.

use crate::session::files;
use crate::{EngineError, Result};
use std::path::{Path, PathBuf};
use trainyard_data::Tokenizer;
use trainyard_model::weights::{ADAPTER_CONFIG, PREPROCESSOR, read_adapter_base, read_adapter_config};
use trainyard_model::{AdapterSpec, ModelError, gguf, hf};

/// The text of the `config.json` of the model at `path`: that of a folder, or what the metadata of
/// a GGUF file says, as such a text.
///
/// # Errors
/// No such file, or one that is damaged.
pub fn config_text(path: &Path) -> Result<String> {
    if gguf::is_gguf(path) {
        return Ok(gguf::config_json(path).map_err(ModelError::from)?);
    }
    let file = path.join("config.json");
    std::fs::read_to_string(&file).map_err(|source| EngineError::File {
        what: "cannot read",
        path: file.display().to_string(),
        source,
    })
}

/// The model that the PEFT adapter in `folder` was made for, and the adapter's description; None if
/// `folder` has no adapter, or a whole model as well.
///
/// # Errors
/// A description that cannot be read; a model that is not on this machine.
pub fn adapted(folder: &Path) -> Result<Option<(PathBuf, AdapterSpec)>> {
    let description = folder.join(ADAPTER_CONFIG);
    if folder.join("config.json").is_file() || !description.is_file() {
        return Ok(None);
    }
    let adapter = read_adapter_config(folder).map_err(ModelError::from)?;
    let name = read_adapter_base(folder).map_err(ModelError::from)?;
    // A relative path counts from here, or from where the adapter lies.
    let places = [PathBuf::from(&name), folder.join(&name), folder.join("..").join(&name)];
    match places.into_iter().find(|place| place.join("config.json").is_file() || gguf::is_gguf(place)) {
        Some(base) => Ok(Some((base, adapter))),
        None => Err(EngineError::DoesNotFit(format!(
            "{} adapts the model `{name}`, which is no folder here: download it, and write its place as \
             base_model_name_or_path",
            description.display()
        ))),
    }
}

/// The folder of the model at `path`: of an adapter's, the one that it was made for.
///
/// # Errors
/// As [`adapted`].
pub fn base_of(path: &Path) -> Result<PathBuf> {
    Ok(adapted(path)?.map_or_else(|| path.to_owned(), |(base, _)| base))
}

/// The place of a file that comes with the model at `path`: in the folder, or beside a GGUF file.
pub fn companion(path: &Path, name: &str) -> PathBuf {
    match path.parent().filter(|_| gguf::is_gguf(path)) {
        Some(folder) => folder.join(name),
        None => path.join(name),
    }
}

/// The description of the model at `path`, with notes on keys that are not used. That of a model of
/// images has the preprocessing of its `preprocessor_config.json`, if there is one.
///
/// # Errors
/// A configuration that cannot be read or is not supported.
pub(crate) fn description(path: &Path) -> Result<hf::Imported> {
    let mut imported = hf::from_config_json(&config_text(path)?).map_err(ModelError::from)?;
    let file = path.join(PREPROCESSOR);
    if let Some(image) = imported.spec.image.as_mut().filter(|_| file.is_file()) {
        let text = std::fs::read_to_string(&file).map_err(|source| EngineError::File {
            what: "cannot read",
            path: file.display().to_string(),
            source,
        })?;
        imported.notes.extend(hf::read_preprocessor(&text, image).map_err(ModelError::from)?);
    }
    Ok(imported)
}

/// True if the model at `path` comes with a tokenizer.
pub fn brings_tokenizer(path: &Path) -> bool {
    companion(path, files::TOKENIZER).is_file() || (gguf::is_gguf(path) && gguf::has_tokenizer(path))
}

/// The tokenizer that `path` names: a file of its own, a folder that has one, or a GGUF file.
///
/// # Errors
/// As [`tokenizer`].
pub fn tokenizer_at(path: &Path) -> Result<Tokenizer> {
    if gguf::is_gguf(path) { tokenizer(path) } else { Ok(Tokenizer::load(path)?) }
}

/// The tokenizer of the model at `path`. A `tokenizer.json` beside a GGUF file comes before the
/// tokenizer inside.
///
/// # Errors
/// No tokenizer, or one that is damaged or of an unknown kind.
pub fn tokenizer(path: &Path) -> Result<Tokenizer> {
    let file = companion(path, files::TOKENIZER);
    if file.is_file() || !gguf::is_gguf(path) {
        return Ok(Tokenizer::load(&file)?);
    }
    let text = gguf::tokenizer_json(path).map_err(ModelError::from)?;
    Ok(Tokenizer::from_json(text.as_bytes(), &path.display().to_string())?)
}
