//! Options of commands that read objects of stores.

use super::export::parse_size;
use crate::output::note;
use std::path::PathBuf;
use trainyard_data::Corpus;
use trainyard_data::corpus::StoreOptions;
use trainyard_engine::corpora::{store_options, traffic_in_words};

/// The cache of objects.
#[derive(clap::Args)]
pub struct ObjectArgs {
    /// A folder that keeps what is read of object stores, for the next reading. Unset: nothing is
    /// kept.
    #[arg(long, value_name = "DIR")]
    object_cache: Option<PathBuf>,
    /// The most bytes in that folder, such as 64GB; what was used least recently is removed. Unset:
    /// 16 GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "object_cache")]
    object_cache_size: Option<u64>,
}

impl ObjectArgs {
    /// The way in which objects are read.
    pub fn options(&self) -> StoreOptions {
        store_options(self.object_cache.as_deref(), self.object_cache_size)
    }
}

/// Prints what was read of object stores, if anything was.
pub fn note_traffic<'c>(corpora: impl IntoIterator<Item = &'c Corpus>) {
    let mut all = None;
    for traffic in corpora.into_iter().filter_map(Corpus::traffic) {
        *all.get_or_insert_default() += traffic;
    }
    if let Some(words) = all.and_then(traffic_in_words) {
        note(&format!("objects: {words}"));
    }
}

/// Part K of N, written `K/N`.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Counted from 1.
    pub part: usize,
    /// Number of parts.
    pub parts: usize,
}

/// Reads `K/N`.
pub fn parse_part(text: &str) -> Result<Part, String> {
    let numbers = text.split_once('/').and_then(|(part, parts)| Some((part.parse().ok()?, parts.parse().ok()?)));
    match numbers {
        Some((part, parts)) if 1 <= part && part <= parts => Ok(Part { part, parts }),
        _ => Err("write K/N with K from 1 to N, such as 2/8".to_owned()),
    }
}
