//! Weights in and out as safetensors, in one file or in shards with an index, under Hugging Face's
//! names.
//!
//! Reading goes through positioned reads of one tensor at a time, so that memory holds one
//! conversion buffer and a file that is cut short meanwhile is an error and not a signal;
//! everything that can be known from headers (missing, unexpected and misshapen tensors, lying
//! offsets) is checked before the first value is read. Writing plans the whole folder from the
//! model's parameters, then asks for one unit's values at a time and puts each tensor in its place.
//!
//! Formats: safetensors is a little-endian u64 header length, a JSON header
//! `{name: {dtype, shape, data_offsets: [begin, end]}}` and the bytes, row-major.

mod file;
mod read;
mod write;

pub use file::{StoredDType, StoredTensor, TensorFile};
pub use read::WeightReader;
pub use write::{ExportOptions, Exported, export};

use std::path::PathBuf;

/// The name of a folder's weights when they are one file.
pub const SINGLE: &str = "model.safetensors";
/// The name of the index when they are several.
pub const INDEX: &str = "model.safetensors.index.json";

/// What can go wrong with weight files.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// Reading or writing failed.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was being done.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A folder without weights.
    #[error("{0} holds neither {SINGLE} nor {INDEX}")]
    NoWeights(PathBuf),
    /// A file that is not what it claims to be.
    #[error("{path} is damaged or no safetensors file: {problem}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// An index that does not fit its files.
    #[error("{path}: {problem}")]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Files that do not fit the model.
    #[error("the weights in {path} do not fit the model: {}", list(.problems))]
    Mismatch {
        /// The folder.
        path: PathBuf,
        /// Every difference.
        problems: Vec<String>,
    },
    /// A model without names for its weights, or that Hugging Face cannot express.
    #[error("this model cannot be exported: {0}")]
    NotExportable(String),
    /// The giver of values failed.
    #[error("reading the values of unit `{unit}` for export: {source}")]
    Values {
        /// The unit.
        unit: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl WeightsError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> WeightsError {
        let path = path.into();
        move |source| WeightsError::Io { action, path, source }
    }
}

/// The first few problems, and how many more there are.
fn list(problems: &[String]) -> String {
    const SHOWN: usize = 6;
    let mut text = problems.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("; ");
    if problems.len() > SHOWN {
        text += &format!("; and {} more", problems.len() - SHOWN);
    }
    text
}
