//! The errors of tensors. Every variant carries its operands.

use crate::cpu::IsaError;
use crate::{DType, Purpose, Shape};

/// An error of a tensor operation.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// Operands do not fit together.
    #[error("{op}: {what}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The operands, with their shapes.
        what: String,
    },
    /// An operand has a type that the operation does not take.
    #[error("{op} takes {expected}, not {got}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The dtypes that it takes.
        expected: &'static str,
        /// The dtype that it was given.
        got: DType,
    },
    /// The pool's limit would be exceeded.
    #[error(
        "out of memory: {asked} more bytes for {purpose} would make {would} bytes, over the limit of {limit} by {over}; \
         live now: {live}"
    )]
    OutOfMemory {
        /// Bytes asked for.
        asked: usize,
        /// Purpose of the memory.
        purpose: Purpose,
        /// Live bytes after the allocation.
        would: usize,
        /// The limit.
        limit: usize,
        /// By how much it would be exceeded.
        over: usize,
        /// Live bytes of each purpose, as text.
        live: String,
    },
    /// The operating system refused.
    #[error("the operating system refused {bytes} bytes for {purpose}: {source}")]
    Refused {
        /// Bytes asked for.
        bytes: usize,
        /// Purpose of the memory.
        purpose: Purpose,
        /// Its reason.
        source: std::io::Error,
    },
    /// Data was asked of the meta device, which has none.
    #[error("{what} needs values, but this tensor of shape {shape} is on the meta device, which has shapes only")]
    NoData {
        /// The operation that needed data.
        what: &'static str,
        /// The tensor's shape.
        shape: Shape,
    },
    /// Memory was asked for as the host's that is the device's.
    #[error(
        "{what} takes host memory, but this tensor of shape {shape} is on cuda: copy it (with_data, to_vec, write)"
    )]
    NotOnHost {
        /// The operation that needed it.
        what: &'static str,
        /// The tensor's shape.
        shape: Shape,
    },
    /// An operation that a device does not have yet.
    #[error("not implemented on {device}: {op}")]
    NotImplemented {
        /// The device.
        device: &'static str,
        /// The operation.
        op: &'static str,
    },
    /// Something that a captured step may not do.
    #[error("this cannot be captured: {0}")]
    Uncapturable(String),
    /// A GPU or its libraries.
    #[error(transparent)]
    Cuda(#[from] trainyard_cuda::CudaError),
    /// A token, position or target outside its table.
    #[error(transparent)]
    Index(#[from] crate::cpu::embedding::IndexError),
    /// Attention's operands do not fit together.
    #[error(transparent)]
    Attention(#[from] crate::cpu::attention::AttentionError),
    /// A drop probability outside `[0, 1)`.
    #[error(transparent)]
    DropRate(#[from] crate::cpu::dropout::DropRateError),
    /// A bad choice of instruction set.
    #[error(transparent)]
    Isa(#[from] IsaError),
}

/// The result of a tensor operation.
pub type Result<T, E = TensorError> = std::result::Result<T, E>;

/// Fails with [`TensorError::Shape`] unless the condition holds.
#[macro_export]
macro_rules! ensure_shape {
    ($condition:expr, $op:expr, $($what:tt)+) => {
        if !$condition {
            return Err($crate::TensorError::Shape { op: $op, what: format!($($what)+) });
        }
    };
}
