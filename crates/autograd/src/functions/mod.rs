//! The table of differentiable functions.
//!
//! Each row names a function, what it saves for backward, and its FLOPs; the type beside it holds
//! the attributes of one call and implements [`Differentiable`]. The forward is a method of
//! [`Tape`](crate::Tape) in the same file. To add a function: write its file, add a row, and give
//! it an example in `tests/table.rs`, which checks every row by finite differences and fails for a
//! row without one.
//!
//! Symbols: m rows (tokens), k and n inner and outer width of a product, d width of a row, p
//! attended pairs of query and key, h heads, c width of a head, v vocabulary.

mod adapter;
mod attention;
mod context;
mod dropout;
mod embedding;
mod experts;
mod linear;
mod loss;
mod norm;
mod plain;
mod pointwise;
mod relative;
mod value_residual;

pub use adapter::{NORM_MIN, norms_of_squares, row_norms, row_squares};
pub use experts::{Direction, InFlight, RowExchange, SentRows, Traffic, WeightGradient};
pub use linear::LinearOptions;
pub use norm::Gains;

use crate::tape::Tape;
use crate::{AutogradError, Backward, Result};
use trainyard_tensor::Tensor;

/// The backward of one function.
pub trait Differentiable {
    /// Reads the gradients of the outputs, adds to those of the inputs.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()>;

    /// Repeats the forward from what was saved, bit for bit; only for rows that say `recomputed`.
    fn recompute(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
        let _ = cx;
        Err(AutogradError::NotDifferentiable("recompute of a function that is kept"))
    }
}

/// A function's row in the table.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// Its name in traces and errors.
    pub name: &'static str,
    /// The tensors that backward keeps alive, in words.
    pub saves: &'static str,
    /// FLOPs of forward and of backward.
    pub flops: &'static str,
    /// True if [`Policy::Selective`](crate::Policy) recomputes the result instead of keeping it.
    pub recomputed_when_selective: bool,
    /// True if it has a derivative. Reaching one without is [`AutogradError::NotDifferentiable`].
    pub differentiable: bool,
}

macro_rules! functions {
    ($($variant:ident($ty:ty): $name:literal, $saves:literal, $flops:literal, $keep:ident;)*) => {
        /// One call of a function, with its attributes.
        #[derive(Clone, Debug)]
        #[allow(missing_docs)]
        pub enum Function { $($variant($ty),)* }

        /// Every function there is.
        pub const TABLE: &[Info] = &[$(Info {
            name: $name,
            saves: $saves,
            flops: $flops,
            recomputed_when_selective: matches!(Keep::$keep, Keep::recomputed),
            differentiable: !matches!(Keep::$keep, Keep::no_derivative),
        },)*];

        impl Function {
            /// The function's row in the table.
            pub fn info(&self) -> &'static Info {
                enum Row { $($variant,)* }
                &TABLE[match self { $(Function::$variant(_) => Row::$variant as usize,)* }]
            }

            pub(crate) fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
                match self { $(Function::$variant(f) => f.backward(cx),)* }
            }

            pub(crate) fn recompute_output(&self, cx: &mut Backward<'_>) -> Result<Tensor> {
                match self { $(Function::$variant(f) => f.recompute(cx),)* }
            }
        }

        $(impl From<$ty> for Function {
            fn from(f: $ty) -> Function {
                Function::$variant(f)
            }
        })*
    };
}

/// The last column of the table.
#[allow(non_camel_case_types, dead_code)]
enum Keep {
    kept,
    recomputed,
    no_derivative,
}

functions! {
    // Columns: variant and type, name, saved tensors, FLOPs of forward; of backward, and whether
    // selective checkpointing recomputes the result.
    Parameter(pointwise::Parameter):            "parameter",            "nothing",                           "0; m",                     kept;
    Add(pointwise::Add):                        "add",                  "nothing",                           "m d; 0",                   kept;
    Bias(pointwise::Bias):                      "bias",                 "nothing",                           "m d; m d",                 kept;
    Linear(linear::Linear):                     "linear",               "x; x wT + b if activated",          "2 m n k; 4 m n k",         kept;
    LowRank(adapter::LowRank):                  "low_rank",             "x, x aT",                           "2 m (n + k) r; 4 m (n + k) r", kept;
    Magnitude(adapter::Magnitude):              "magnitude",            "x, norms of rows",                  "m n + 2 n k r; 3 m n",    kept;
    LinearCrossEntropy(loss::LinearCrossEntropy): "linear_cross_entropy", "x, or dx when gradients are at hand", "2 m v d; 4 or 6 m v d", kept;
    DistillationLoss(loss::DistillationLoss):   "distillation_loss",    "x, the teacher's x, or dx",         "2 m v (d + d'); 4 or 6 m v d", kept;
    HiddenDistance(loss::HiddenDistance):       "hidden_distance",      "x, the teacher's x",               "3 m d; 2 m d",             kept;
    PartCrossEntropy(loss::PartCrossEntropy):   "part_cross_entropy",   "x, log-sum-exp, or dx",             "0 or 6 m v d; 4 or 6 m v d", kept;
    Attention(attention::Attention):            "attention",            "qkv, out, log-sum-exp",             "4 p h c; 10 p h c",        kept;
    ContextAttention(context::ContextAttention): "context_attention",   "q, kv, out, log-sum-exp",           "4 p h c; 10 p h c",        kept;
    ContextAttentionPart(context::ContextAttentionPart): "context_attention_part", "q, kv, out, log-sum-exp",     "4 p h c; 10 p h c",        kept;
    ContextAttentionRest(context::ContextAttentionRest): "context_attention_rest", "q, kv, the part, out, log-sum-exp", "4 p h c; 10 p h c",    kept;
    BiasedAttention(relative::BiasedAttention): "biased_attention",     "qkv, bias, out, log-sum-exp",       "4 p h c; 10 p h c",        kept;
    CrossAttention(relative::CrossAttention):   "cross_attention",      "q, kv, out, log-sum-exp",           "4 p h c; 10 p h c",        kept;
    SplitAt(plain::arrange::SplitAt):           "split_at",             "nothing",                           "0; 0",                     kept;
    Rope(attention::Rope):                      "rope",                 "nothing",                           "6 m h c; 6 m h c",         kept;
    QkNorm(norm::QkNorm):                       "qk_norm",              "qkv, inverse rms",                  "4 m h c; 8 m h c",         kept;
    ValueResidual(value_residual::ValueResidual): "value_residual",     "V, V_1",                            "3 m h_kv c; 6 m h_kv c",   kept;
    RmsNorm(norm::RmsNorm):                     "rms_norm",             "x, inverse rms",                    "4 m d; 8 m d",             recomputed;
    LayerNorm(norm::LayerNorm):                 "layer_norm",           "x, mean, inverse deviation",        "7 m d; 11 m d",            recomputed;
    SwiGlu(pointwise::SwiGlu):                  "swiglu",               "gate and up",                       "6 m d; 10 m d",            recomputed;
    Glu(pointwise::Glu):                        "glu",                  "gate and up",                       "9 m d; 13 m d",            recomputed;
    Activate(pointwise::Activate):              "activate",             "x",                                 "8 m d; 10 m d",            recomputed;
    Embedding(embedding::Embedding):            "embedding",            "nothing",                           "m d; m d",                 kept;
    Dropout(dropout::Dropout):                  "dropout",              "nothing: the mask is regenerated",  "m d; m d",                 kept;
    // A mixture of experts: E of them, k choices of each token, hence m k rows.
    RouterLogits(experts::RouterLogits):        "router_logits",        "x",                                 "2 m E d; 4 m E d",         kept;
    Route(experts::Route):                      "route",                "logits, choices, counts",           "8 m E; 20 m E",            kept;
    Dispatch(experts::Dispatch):                "dispatch",             "x",                                 "0; m k d",                 recomputed;
    SendRows(experts::SendRows):                "send_rows",            "nothing",                           "0; 0",                     kept;
    ReceiveRows(experts::ReceiveRows):          "receive_rows",         "nothing",                           "0; 0",                     kept;
    RaggedLinear(experts::RaggedLinear):        "ragged_linear",        "x",                                 "2 m n k; 4 m n k",         kept;
    Combine(experts::Combine):                  "combine",              "rows, weights",                     "2 m k d; 3 m k d",         kept;
    // The plain functions, n elements of the operand, one row for each kind.
    Unary(plain::elementwise::Unary):           "unary",                "x or y, whichever serves",          "1 to 16 n; 4 n",           kept;
    Binary(plain::elementwise::Binary):         "binary",               "a, b",                              "n; 2 n for each gradient", kept;
    WithNumber(plain::elementwise::WithNumber): "with_number",          "x for powers and clamps",           "n; n",                     kept;
    Cast(plain::elementwise::Cast):             "cast",                 "nothing",                           "0; 0",                     kept;
    DropoutAdd(plain::elementwise::DropoutAdd): "dropout_add",          "nothing: the mask is regenerated",  "2 n; n",                   kept;
    Mask(plain::mask::Mask):                    "mask",                 "nothing",                           "n; none",                  no_derivative;
    Where(plain::mask::Where):                  "where",                "the mask",                          "0; 0",                     kept;
    MaskedFill(plain::mask::MaskedFill):        "masked_fill",          "the mask",                          "0; 0",                     kept;
    Sum(plain::reduce::Sum):                    "sum",                  "nothing",                           "n; n for means",           kept;
    Amax(plain::reduce::Amax):                  "amax",                 "x, y",                              "n; 2 n",                   kept;
    Variance(plain::reduce::Variance):          "variance",             "x, mean",                           "4 n; 2 n",                 kept;
    Softmax(plain::reduce::Softmax):            "softmax",              "y",                                 "11 or 18 n; 4 or 11 n",    kept;
    CumulativeSum(plain::reduce::CumulativeSum): "cumulative_sum",      "nothing",                           "n; n",                     kept;
    Argmax(plain::reduce::Argmax):              "argmax",               "nothing",                           "n; none",                  no_derivative;
    TopK(plain::reduce::TopK):                  "top_k",                "indices",                           "n; n",                     kept;
    Rearrange(plain::arrange::Rearrange):       "rearrange",            "nothing",                           "0; n where repeated",      kept;
    Concat(plain::arrange::Concat):             "concat",               "nothing",                           "0; 0",                     kept;
    Gather(plain::index::Gather):               "gather",               "indices",                           "0; n",                     kept;
    IndexAdd(plain::index::IndexAdd):           "index_add",            "indices",                           "2 n; 0",                   kept;
    Matmul(plain::product::Matmul):             "matmul",               "a, b",                              "2 m n k; 4 m n k",         kept;
    MseLoss(plain::loss::MseLoss):              "mse_loss",             "a, b",                              "3 n; 2 n each",            kept;
    CrossEntropy(plain::loss::CrossEntropy):    "cross_entropy",        "x, log-sum-exp",                    "20 n; 20 n",               kept;
}

impl Function {
    /// True if its backward begins an exchange, which runs beside what comes next.
    pub(crate) fn begins_exchange(&self) -> bool {
        matches!(self, Function::ReceiveRows(_))
    }

    /// True if the gradients of its parameters are computed beside the next exchange.
    pub(crate) fn parameters_wait(&self) -> bool {
        matches!(self, Function::RaggedLinear(products) if products.waits())
    }
}

/// The imports of every function file.
mod prelude {
    pub(super) use super::Differentiable;
    pub(super) use crate::{Backward, GradientTarget, Operand, ParamId, Result, Saved, Tape, Var};
    pub(super) use trainyard_tensor::{Tensor, ops};
}

impl Tape<'_> {
    /// The name of every function in the table.
    pub fn function_names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|row| row.name)
    }
}
