//! Compression of trained models: pruning, quantisation, merging.
//!
//! A model is a chain of units, and everything here goes along it once. A unit is read, changed and
//! written before the next one is read, so memory holds one unit, what is known of the inputs of
//! its layers, and the hidden states of the calibration text ([`pass`]).
//!
//! | module | contents |
//! |---|---|
//! | [`source`] | a model to compress: a run, a Hugging Face folder or a GGUF file, unit by unit |
//! | [`text`] | sequences of tokens that go through a model unit by unit |
//! | [`inputs`] | statistics of the inputs of linear layers |
//! | [`factor`] | the Cholesky factor of an inverse |
//! | [`solver`] | rounding one column after another, with the error moved to later columns |
//! | [`prune`] | weights to zero: magnitude, Wanda, SparseGPT |
//! | [`quantise`] | weights of few bits: round to nearest, GPTQ |
//! | [`awq`] | scales that make columns matter less to rounding |
//! | [`smooth`] | scales that make inputs easier to round |
//! | [`survey`] | how much blocks, channels and heads do on calibration text |
//! | [`depth`] | blocks that change the residual stream least |
//! | [`width`] | fewer channels and heads |
//! | [`adapters`] | one adapter of several on one base |
//! | [`merge`] | one model of several of the same shape |
//! | [`sizes`] | the sizes of what units give, for comparisons of models of different widths |
//! | [`pass`] | the way through a model that writes it anew |
//!
//! Nothing here is trained. Models with fewer blocks, channels or heads run faster. Nothing else
//! does: `eval` and `generate` decode what is packed when they read it, and multiply by zeros.

pub mod adapters;
pub mod awq;
pub mod depth;
pub mod error;
pub mod factor;
pub mod inputs;
pub mod merge;
pub mod pass;
pub mod prune;
pub mod quantise;
pub mod sizes;
pub mod smooth;
mod solver;
pub mod source;
pub mod survey;
pub mod text;
pub mod width;

pub use adapters::{AdapterMerge, AdapterMethod, MergedAdapter, merge_adapters};
pub use error::{CompressError, Result};
pub use merge::{MergeMethod, MergeSettings, merge};
pub use pass::{Compressed, Pass};
pub use prune::{Pattern, PruneMethod};
pub use quantise::{GroupedGrid, QuantiseMethod};
pub use sizes::output_sizes;
pub use source::Source;
pub use survey::Survey;
pub use text::{Sequences, calibration};
pub use width::{Kept, Smaller, Widths};
