//! Hugging Face `config.json` in and out.
//!
//! Supported `model_type`s: `gpt2`, `llama` (which SmolLM is), `mistral`, `qwen2`, `qwen3`. A key
//! that changes the function computed is either translated or, when its value asks for something
//! this crate does not do, an error; nothing is silently ignored: keys that are unknown, or that
//! only matter in training and are not followed, come back as notes for the user.

mod export;
mod import;

pub use export::{config_json, export_note, generation_config_json, generation_eos, implied_zeros};
pub use import::{Imported, from_config_json};

use crate::ModelError;

/// The supported values of `model_type`.
pub const MODEL_TYPES: [&str; 5] = ["gpt2", "llama", "mistral", "qwen2", "qwen3"];

/// What can be wrong with a `config.json`, or with turning a model into one.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("config.json is not a JSON object: {0}")]
    Json(String),
    /// A key that must be there is not.
    #[error("config.json has no `{key}`")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A value of another type or range.
    #[error("config.json: `{key}` is {found}, expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// What was expected.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A model of another type.
    #[error("config.json: model_type `{found}` is not supported; supported are: {}", MODEL_TYPES.join(", "))]
    ModelType {
        /// What was found.
        found: String,
    },
    /// A value that asks for what this crate does not do.
    #[error("config.json: `{key}` = {value} is not supported: {why}")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What would be supported.
        why: &'static str,
    },
    /// The values do not make a model.
    #[error("config.json describes no valid model: {0}")]
    Invalid(Box<ModelError>),
    /// A `generation_config.json` that is none.
    #[error("generation_config.json is damaged: {0}")]
    Generation(String),
    /// A model for which transformers has no class.
    #[error("no supported Hugging Face model has {0}")]
    NoEquivalent(String),
}
