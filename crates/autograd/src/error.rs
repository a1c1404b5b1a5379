//! Errors of recording and differentiating.

use crate::ParamId;
use trainyard_tensor::TensorError;

/// An error while a tape is recorded or differentiated.
#[derive(Debug, thiserror::Error)]
pub enum AutogradError {
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The error arose in the backward of this function.
    #[error("in the backward of `{function}`: {source}")]
    InBackward {
        /// The function.
        function: &'static str,
        /// The cause.
        source: Box<AutogradError>,
    },
    /// A function that has no derivative was reached.
    #[error(
        "`{0}` has no backward, yet a gradient reached it: stop the gradient before it, or use a differentiable form"
    )]
    NotDifferentiable(&'static str),
    /// The store does not hold the parameter, or not at this moment.
    #[error("parameter {0} is not available here: its unit is not gathered, or it was never declared")]
    NoParameter(ParamId),
    /// The gradient given for an output does not fit it.
    #[error("the gradient of an output of shape {output} has shape {gradient}")]
    GradientShape {
        /// The output.
        output: String,
        /// The gradient that was given for it.
        gradient: String,
    },
    /// A loss whose gradients were already taken in its forward got a gradient other than one.
    #[error(
        "the loss took its gradients during forward, for an upstream gradient of 1, but backward brought {0}: \
         fold the factor into the loss's scale, or record it without gradients at hand"
    )]
    EagerUpstream(f32),
    /// Rows could not be exchanged between the ranks that share experts.
    #[error("rows of experts could not be exchanged: {0}")]
    Exchange(String),
    /// A tensor that was taken out of the recording was not put back before it was needed.
    #[error("activation {0} was taken out of the recording and is not back")]
    Away(usize),
}

/// The result of recording or differentiating.
pub type Result<T, E = AutogradError> = std::result::Result<T, E>;
