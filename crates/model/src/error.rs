//! Errors of describing, building, running and storing models.

use crate::hf::ConfigError;
use crate::weights::WeightsError;
use trainyard_autograd::AutogradError;
use trainyard_tensor::TensorError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A description that no model can follow.
    #[error("model.{field}: {problem}")]
    Spec {
        /// The field of [`ModelSpec`](crate::ModelSpec).
        field: &'static str,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
    /// A preset that does not exist.
    #[error("there is no model preset `{asked}`; presets are: {known}")]
    Preset {
        /// What was asked for.
        asked: String,
        /// All names.
        known: String,
    },
    /// A batch that the model cannot take.
    #[error("batch: {0}")]
    Batch(String),
    /// Units that do not fit together or were called wrongly.
    #[error("unit `{unit}`: {problem}")]
    Unit {
        /// The unit's name.
        unit: String,
        /// What is wrong.
        problem: String,
    },
    /// A key/value cache that cannot take what was asked of it.
    #[error("key/value cache: {0}")]
    Cache(String),
    /// A Hugging Face configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Weight files.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Recording or differentiating.
    #[error(transparent)]
    Autograd(#[from] AutogradError),
    /// A tensor operation.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// The result of this crate's functions.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
