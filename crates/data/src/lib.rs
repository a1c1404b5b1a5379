//! Corpora, tokenizers, token files, packing and loaders: from text on disk to micro-batches of
//! plain integers.
//!
//! The way of the data, one module per stop:
//!
//! ```text
//! corpus     files and folders        -> documents          streamed, typed errors with file and line
//! tokenizer  documents                -> tokens             tokenizer.json, bytes, characters; trains byte-level BPE
//! prepare    documents + tokenizer    -> token files        parallel, deterministic, reused when nothing changed
//! indexed    token files (.bin/.idx)  -> mapped tokens      Megatron-LM's format, validated before use
//! dataset    token files + spec       -> sample i           packing, shuffle, mixture: a pure function of i
//! loader     dataset + position       -> micro-batches      prefetched in order; resume is a number
//! evaluation token files              -> every token once   for losses and bits per byte
//! ```
//!
//! What it does not do: it knows no tensors (a micro-batch is vectors), starts no training,
//! downloads nothing.

mod atomic;
pub mod corpus;
pub mod dataset;
pub mod error;
pub mod evaluation;
pub mod indexed;
pub mod loader;
pub mod prepare;
pub mod rng;
pub mod tokenizer;

pub use atomic::write as write_atomically;
pub use corpus::{Corpus, CorpusOptions, Document, OnInvalid, parse_jsonl_line};
pub use dataset::{Dataset, DatasetSpec, IGNORE, MicroBatch, Position, Sampling, Source};
pub use error::{DataError, Result, place_of};
pub use evaluation::{EvalBatches, EvalOptions, eval_batches, text_bytes};
pub use indexed::{IndexedTokens, IndexedWriter, TokenType, parse_idx};
pub use loader::{Loader, LoaderConfig};
pub use prepare::{PrepareOptions, PrepareProgress, Prepared, Sidecar, prepare};
pub use tokenizer::{StreamDecoder, Tokenizer, TrainProgress};
