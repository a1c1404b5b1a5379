//! Models: units, layers, families, Hugging Face configurations and weights.
//!
//! A model is plain data ([`ModelSpec`]) turned into a chain of [`Unit`]s ([`Model`]). Sharding,
//! gathering, checkpointing, cutting and freezing all work on units. A unit therefore states its
//! parameters and runs on any tape, and holds no values.
//!
//! | module | contents |
//! |---|---|
//! | [`spec`], [`presets`] | a model's configuration, checked; published shapes by name |
//! | [`unit`], [`batch`], [`cache`] | the interface of a unit, and its inputs |
//! | [`families`] | one file for each family: its parameters, splits, blocks, `config.json` |
//! | [`units`] | embeddings, block and heads that families share |
//! | [`split`] | the units of one rank of a tensor-parallel group |
//! | [`tuning`] | frozen parameters, and adapters on linear layers |
//! | [`periods`] | freezing by schedule |
//! | [`parameter`], [`patch`], [`init`] | parameters, their places in buffers, initial values |
//! | [`hf`], [`weights`] | `config.json` and safetensors, in and out |
//! | [`gguf`] | GGUF files, in |
//! | [`costs`] | FLOPs, bytes and memory of each unit, from running it without data |
//!
//! This crate holds no parameters and no optimizer, runs no training step, and samples no text.

pub mod batch;
pub mod cache;
pub mod costs;
pub mod error;
pub mod families;
pub mod gguf;
pub mod hf;
pub mod init;
pub mod model;
pub mod parameter;
pub mod patch;
pub mod periods;
pub mod presets;
pub mod rope;
pub mod routing;
pub mod spec;
pub mod split;
pub mod teacher;
pub mod tuning;
pub mod unit;
pub mod units;
pub mod weights;

pub use batch::{Batch, BatchPart, BatchShape, BatchSlices, IGNORED, ImageBatch, ImageSlices, MixedBatch, MixedSlices};
pub use cache::KvCache;
pub use error::{ModelError, Result};
pub use families::{FAMILIES, Family};
pub use init::initialise;
pub use model::Model;
pub use parameter::{Init, ParameterKind, ParameterSpec, Piece, Source, Split, UnitLayout};
pub use patch::Patch;
pub use periods::Periods;
pub use presets::{PRESET_NAMES, preset};
pub use routing::{LayerRouting, RoutingLog, RoutingRecord};
pub use spec::{Activation, EncoderSpec, ExpertsSpec, Gate, ImageSpec, ModelSpec, RopeScaling, RopeSpec};
pub use split::{Chunks, ContextExchange, ContextSplit, ExpertSplit, TensorSplit};
pub use teacher::Teacher;
pub use tuning::{AdapterSpec, Adapters, Tuning};
pub use unit::{Exchange, Forward, Output, Segment, Segments, Unit, Value};
