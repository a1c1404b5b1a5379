//! Reads and writes Hugging Face `config.json`.
//!
//! The families ([`crate::families`]) list the supported `model_type`s and translate their keys;
//! here is what they share. A key that changes the function computed is translated, or is an error
//! if its value asks for something that this crate does not do. Nothing is silently ignored:
//! unknown keys, and keys that only matter in training and are not followed, are returned as notes
//! for the user.

mod export;
mod import;
mod keys;
mod preprocessor;
mod written;

pub use export::{config_json, export_note, generation_config_json, generation_eos, implied_zeros};
pub use import::{Imported, from_config_json};
pub use keys::Keys;
pub use preprocessor::{preprocessor_config_json, read_preprocessor};
pub use written::{Written, activation_name};

use crate::ModelError;

/// The supported values of `model_type`.
pub fn model_types() -> Vec<&'static str> {
    let classes = crate::families::FAMILIES.iter().flat_map(|family| family.classes());
    classes.map(|class| class.model_type).collect()
}

/// The errors of a `config.json`, and of turning a model into one.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("config.json is not a JSON object: {0}")]
    Json(String),
    /// A required key is missing.
    #[error("config.json has no `{key}`")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A value has the wrong type or range.
    #[error("config.json: `{key}` is {found}, expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// The expected value.
        expected: &'static str,
        /// The value in the file.
        found: String,
    },
    /// The model is of an unsupported type.
    #[error("config.json: model_type `{found}` is not supported; supported are: {}", model_types().join(", "))]
    ModelType {
        /// The type in the file.
        found: String,
    },
    /// The value asks for something that this crate does not do.
    #[error("config.json: `{key}` = {value} is not supported: {why}")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The values that are supported.
        why: &'static str,
    },
    /// The values do not describe a valid model.
    #[error("config.json describes no valid model: {0}")]
    Invalid(Box<ModelError>),
    /// A `preprocessor_config.json` that is none, or that asks for what is not done here.
    #[error("preprocessor_config.json: {0}")]
    Preprocessor(String),
    /// A `generation_config.json` that is none.
    #[error("generation_config.json is damaged: {0}")]
    Generation(String),
    /// A model for which transformers has no class.
    #[error("no supported Hugging Face model has {0}")]
    NoEquivalent(String),
}
