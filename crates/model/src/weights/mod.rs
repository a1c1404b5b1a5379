//! Reads and writes weights as safetensors under Hugging Face's names, in one file or in shards
//! with an index. Reads [GGUF files](crate::gguf) too.
//!
//! Reading uses positioned reads of one tensor at a time. Memory holds one conversion buffer, and a
//! file that is cut short meanwhile is an error and not a signal. Everything that headers tell
//! (missing, unexpected and misshapen tensors, wrong offsets) is checked before the first value is
//! read. Writing plans the whole folder from the model's parameters, then asks for one unit's
//! values at a time and writes each tensor in its place.
//!
//! A safetensors file is a little-endian u64 header length, a JSON header
//! `{name: {dtype, shape, data_offsets: [begin, end]}}`, and the bytes, row-major.

mod adapter;
mod file;
mod packed;
mod read;
mod write;

pub use adapter::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterTensors, export_adapter, read_adapter, read_adapter_base,
    read_adapter_config,
};
pub use file::{Change, Encoding, StoredDType, StoredTensor, TensorFile};
pub use packed::{PACKED_BITS, PackedFormat, PackedMatrix, PackedParts, is_packed};
pub(crate) use read::Places;
pub use read::WeightReader;
pub use write::{ExportOptions, Exported, export, export_packed};
pub(crate) use write::{Partials, partial};

use std::path::PathBuf;

/// The name of a folder's weights when they are one file.
pub const SINGLE: &str = "model.safetensors";
/// The name of the index when they are several.
pub const INDEX: &str = "model.safetensors.index.json";
/// The settings of a model of images for its pixels.
pub const PREPROCESSOR: &str = "preprocessor_config.json";

/// The errors of weight files.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// Reading or writing failed.
    #[error("{action} {path}: {source}")]
    Io {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The folder has no weights.
    #[error("{0} holds neither {SINGLE} nor {INDEX}")]
    NoWeights(PathBuf),
    /// A file does not have the format that it claims.
    #[error("{path} is damaged or no safetensors file: {problem}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// A GGUF file that is damaged, or holds what is not read.
    #[error("{path}: {problem}")]
    Gguf {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// An index contradicts its files.
    #[error("{path}: {problem}")]
    Index {
        /// The index.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// The files do not fit the model.
    #[error("the weights in {path} do not fit the model: {}", list(.problems))]
    Mismatch {
        /// The folder.
        path: PathBuf,
        /// Every difference.
        problems: Vec<String>,
    },
    /// The model has no names for its weights, or Hugging Face cannot express it.
    #[error("this model cannot be exported: {0}")]
    NotExportable(String),
    /// The caller could not give values.
    #[error("reading the values of unit `{unit}` for export: {source}")]
    Values {
        /// The unit.
        unit: String,
        /// Cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl WeightsError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> WeightsError {
        let path = path.into();
        move |source| WeightsError::Io { action, path, source }
    }
}

/// The first few problems, and the number of the others.
fn list(problems: &[String]) -> String {
    const SHOWN: usize = 6;
    let mut text = problems.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("; ");
    if problems.len() > SHOWN {
        text += &format!("; and {} more", problems.len() - SHOWN);
    }
    text
}
