//! Errors of compression.

use trainyard_autograd::AutogradError;
use trainyard_data::DataError;
use trainyard_engine::EngineError;
use trainyard_model::ModelError;
use trainyard_model::weights::WeightsError;
use trainyard_tensor::TensorError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum CompressError {
    /// A setting that is out of range, or that the model or the text does not allow.
    #[error("{0}")]
    Setting(String),
    /// The statistics of a layer's inputs have no Cholesky factor.
    #[error("{layer}: the products of its inputs have no Cholesky factor (pivot {pivot} is {value:e}): {fix}")]
    NotPositive {
        /// The layer.
        layer: String,
        /// The column.
        pivot: usize,
        /// Its pivot.
        value: f64,
        /// The way out.
        fix: &'static str,
    },
    /// Opening a model or evaluating it.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Running a model, or its files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Text.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Recording.
    #[error(transparent)]
    Autograd(#[from] AutogradError),
    /// A tensor operation.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl From<WeightsError> for CompressError {
    fn from(error: WeightsError) -> CompressError {
        CompressError::Model(error.into())
    }
}

/// The result of this crate's functions.
pub type Result<T, E = CompressError> = std::result::Result<T, E>;

/// The error of a setting.
pub(crate) fn refuse<T>(what: impl Into<String>) -> Result<T> {
    Err(CompressError::Setting(what.into()))
}
