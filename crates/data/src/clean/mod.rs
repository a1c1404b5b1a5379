//! Cleans text before it is tokenized: removes duplicates, applies quality rules, masks personal
//! data, mixes corpora.
//!
//! Each operation reads a [`Corpus`](crate::Corpus) and writes documents under a prefix:
//!
//! | file | holds |
//! |---|---|
//! | `OUT.jsonl.zst` | the documents that were kept, with their sources |
//! | `OUT.dropped` | the others as `.jsonl.zst`, each with the reason |
//! | `OUT.report.json` | counts of documents and bytes for each reason |
//!
//! Results do not depend on the number of workers. Nothing here judges what a text says.

mod dedup;
mod documents;
mod filter;
mod language;
mod mix;
mod output;
mod pii;
mod quality;
mod sketch;
mod spill;
mod words;

pub use dedup::{DedupOptions, Method, dedup};
pub use filter::{FilterOptions, filter};
pub use language::Language;
pub use mix::{MixOptions, MixReport, MixShare, mix};
pub use output::{DropCount, Report};
pub use quality::Rule;
pub use sketch::{Shape, shingles};
