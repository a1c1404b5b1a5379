//! Turns text and images on disk into micro-batches of plain numbers: corpora, tokenizers, token
//! files, packing, decoding and loaders.
//!
//! The data pass through these modules in order:
//!
//! | module | from | to |
//! |---|---|---|
//! | [`corpus`] | files and folders | documents: streamed, with errors that name file and line |
//! | [`clean`] | documents | fewer documents: without duplicates, by rules, mixed |
//! | [`chat`] | records with messages | documents, and what is learned of them |
//! | [`tokenizer`] | documents | tokens: `tokenizer.json`, bytes, characters; BPE training |
//! | [`prepare`] | documents, tokenizer | token files: parallel, deterministic, reused |
//! | [`indexed`] | token files | mapped tokens: Megatron-LM's format, validated before use |
//! | [`dataset`] | token files, specification | sample i, a pure function of i: packing, mixture |
//! | [`images`] | class folders, tar shards | patches of images: decoded, augmented |
//! | [`loader`] | dataset, position | micro-batches: prefetched in order; resume is a number |
//! | [`evaluation`] | token files | every token once, for losses and bits per byte |
//!
//! This crate knows no tensors (a micro-batch is vectors), starts no training and downloads
//! nothing.

mod atomic;
pub mod chat;
pub mod clean;
pub mod corpus;
pub mod dataset;
pub mod error;
pub mod evaluation;
pub mod images;
pub mod indexed;
pub mod loader;
mod ordered;
pub mod prepare;
pub mod rng;
pub mod tokenizer;

pub use atomic::write as write_atomically;
pub use chat::{ChatOptions, ChatTemplate, LossOn};
pub use corpus::{Corpus, CorpusOptions, Document, OnInvalid, parse_jsonl_line, parse_mds};
pub use dataset::{
    Dataset, DatasetSpec, FillInTheMiddle, IGNORE, LengthCurriculum, MicroBatch, PackingReport, Position, Sampling,
    Source, SpanCorruption, SpanLengths, SpanShape, Transforms, packing_report, rows_in_epoch, rows_of,
};
pub use error::{DataError, Result, place_of};
pub use evaluation::{EvalBatches, EvalOptions, eval_batches, text_bytes};
pub use images::{Augmentation, ImageEvaluation, ImageIndex, ImageSet, ImageSpec, IndexOptions, Mixed, Pixels};
pub use indexed::{IndexedTokens, IndexedWriter, TokenType, parse_idx};
pub use loader::{Loader, LoaderConfig, RoundSteps, Rounds, Samples};
pub use prepare::{PrepareOptions, PrepareProgress, Prepared, Sidecar, prepare};
pub use tokenizer::{StreamDecoder, Tokenizer, TrainProgress};
