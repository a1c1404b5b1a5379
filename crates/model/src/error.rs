//! Errors of describing, building, running and storing models.

use crate::hf::ConfigError;
use crate::weights::WeightsError;
use trainyard_autograd::AutogradError;
use trainyard_tensor::TensorError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The description contradicts itself, so that no model can follow it.
    #[error("model.{field}: {problem}")]
    Spec {
        /// The field of [`ModelSpec`](crate::ModelSpec).
        field: &'static str,
        /// The fault, and what would be right.
        problem: String,
    },
    /// The preset does not exist.
    #[error("there is no model preset `{asked}`; presets are: {known}")]
    Preset {
        /// The name that was asked for.
        asked: String,
        /// All names of presets.
        known: String,
    },
    /// The model cannot take the batch.
    #[error("batch: {0}")]
    Batch(String),
    /// Units do not fit together or were called wrongly.
    #[error("unit `{unit}`: {problem}")]
    Unit {
        /// The unit's name.
        unit: String,
        /// The fault.
        problem: String,
    },
    /// A model or a micro-batch cannot be divided among the ranks of a tensor-parallel group.
    #[error("tensor parallelism: {0}")]
    Split(String),
    /// A model cannot be fine-tuned as asked.
    #[error("fine-tuning: {0}")]
    Tuning(String),
    /// A model cannot learn from a teacher.
    #[error("teacher: {0}")]
    Teacher(String),
    /// The key/value cache cannot do what was asked.
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
