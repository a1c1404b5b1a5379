//! Removes documents that are equal, or nearly equal, to an earlier one.
//!
//! The corpus is read twice. The first time every document gets a hash of its text and a sketch of
//! its n-grams, which are spilled to disk. Documents that agree in the hash or in a band of the
//! sketch are joined into clusters. The second time the first document of each cluster is written,
//! and the others are dropped.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::documents;
use super::output::{Output, Report};
use super::sketch::{Shape, band_keys};
use super::spill::Spill;
use crate::corpus::Corpus;
use crate::error::{DataError, Result};
use crate::indexed::with_suffix;

/// Documents that count as duplicates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Method {
    /// Those with the same bytes.
    Exact,
    /// Those with similar n-grams too.
    Near(Shape),
}

/// The settings of a deduplication.
#[derive(Debug, Clone, PartialEq)]
pub struct DedupOptions {
    /// Prefix of the files written.
    pub out: PathBuf,
    /// Documents that count as duplicates.
    pub method: Method,
    /// Bytes of memory for grouping; more is spilled to disk. Texts in work come on top.
    pub memory_bytes: u64,
    /// Number of threads; 0 for one per core.
    pub workers: usize,
}

/// The default of [`DedupOptions::memory_bytes`].
const MEMORY_BYTES: u64 = 1 << 30;

/// Least memory for sorting.
const SORT_BYTES_MIN: u64 = 16 << 20;

impl DedupOptions {
    /// Near duplicates, 1 GiB, all cores.
    pub fn new(out: impl Into<PathBuf>) -> Self {
        Self { out: out.into(), method: Method::Near(Shape::default()), memory_bytes: MEMORY_BYTES, workers: 0 }
    }
}

/// Time between messages about the progress.
const NOTE_EVERY: Duration = Duration::from_secs(5);

/// Writes the documents of `corpus` without duplicates. `note` receives a message about the
/// progress every few seconds.
pub fn dedup(corpus: &Corpus, options: &DedupOptions, mut note: impl FnMut(&str)) -> Result<Report> {
    check(options)?;
    let mut output = Output::create(&options.out, &[corpus])?;
    let mut told = Instant::now();
    let mut tell = |message: &dyn Fn() -> String| {
        if told.elapsed() >= NOTE_EVERY {
            told = Instant::now();
            note(&message());
        }
    };
    let spill_path = |name: &str| with_suffix(&options.out, &format!(".spill-{}-{name}", std::process::id()));
    let shape = match options.method {
        Method::Exact => None,
        Method::Near(shape) => Some(shape),
    };
    let mut exact = Spill::<16>::create(spill_path("exact"))?;
    let mut bands = (0..shape.map_or(0, |shape| shape.bands))
        .map(|band| Spill::<8>::create(spill_path(&band.to_string())))
        .collect::<Result<Vec<_>>>()?;
    let mut count = 0u32;
    let sketched = |text: &str| (xxh3_128(text.as_bytes()), shape.map(|shape| band_keys(text, &shape)));
    documents::map(
        corpus,
        options.workers,
        |document| sketched(&document.text),
        |(hash, keys)| {
            exact.push(hash.to_be_bytes(), count)?;
            for (band, key) in bands.iter_mut().zip(keys.iter().flatten()) {
                band.push(key.to_be_bytes(), count)?;
            }
            count = count.checked_add(1).ok_or_else(|| {
                DataError::setting("text", "has more than 2^32 documents", "deduplicate it in parts, then the results")
            })?;
            tell(&|| format!("sketched {count} documents"));
            Ok(())
        },
    )?;
    let memory = sorting_memory(options.memory_bytes, u64::from(count))?;
    let mut clusters = Clusters::new(count);
    exact.group(memory, |first, later| clusters.join(first, later))?;
    let is_copy: Vec<u64> = clusters.later_ones();
    let all = bands.len();
    for (band, done) in bands.into_iter().zip(1..) {
        band.group(memory, |first, later| clusters.join(first, later))?;
        tell(&|| format!("grouped {done} of {all} bands"));
    }

    let mut number = 0u32;
    let mut documents = corpus.documents();
    for document in documents.by_ref() {
        let document = document?;
        if number >= count {
            return Err(changed(corpus, document.file));
        }
        let first = clusters.first_of(number);
        let is_copy = is_copy[number as usize / 64] >> (number % 64) & 1 == 1;
        let mut line = output.line(corpus, &document);
        if first != number {
            line.reason = Some(if is_copy { "exact duplicate" } else { "near duplicate" });
            line.duplicate_of = Some(u64::from(first));
        }
        output.write(&line)?;
        number += 1;
        tell(&|| format!("written {number} of {count} documents"));
    }
    if number != count {
        return Err(changed(corpus, corpus.files().len() - 1));
    }
    let skipped = documents.skipped();
    output.finish(skipped)
}

fn changed(corpus: &Corpus, file: usize) -> DataError {
    let path = &corpus.files()[file].path;
    DataError::input(path, None, "changed while it was read", "run again when nothing writes to it")
}

fn check(options: &DedupOptions) -> Result<()> {
    if let Method::Near(Shape { ngram, bands, rows }) = options.method {
        for (name, value, most) in [("ngram", ngram, 100), ("bands", bands, 256), ("rows", rows, 64)] {
            if !(1..=most).contains(&value) {
                return Err(DataError::setting(name, format!("is {value}"), format!("take 1 to {most}")));
            }
        }
    }
    sorting_memory(options.memory_bytes, 0).map(drop)
}

/// The part of `memory_bytes` that is left for sorting, beside the clusters of `documents`.
fn sorting_memory(memory_bytes: u64, documents: u64) -> Result<u64> {
    let clusters = documents * 4 + documents / 8;
    memory_bytes.checked_sub(clusters).filter(|left| *left >= SORT_BYTES_MIN).ok_or_else(|| {
        let what = format!("{memory_bytes} bytes are too few for {documents} documents");
        let fix = format!("give at least {} bytes", clusters + SORT_BYTES_MIN);
        DataError::setting("memory", what, fix)
    })
}

/// Disjoint sets of documents; the smallest number of a set stands for it.
struct Clusters(Vec<u32>);

impl Clusters {
    fn new(documents: u32) -> Self {
        Self((0..documents).collect())
    }

    fn first_of(&mut self, document: u32) -> u32 {
        let mut at = document;
        while self.0[at as usize] != at {
            let next = self.0[at as usize];
            self.0[at as usize] = self.0[next as usize];
            at = next;
        }
        at
    }

    fn join(&mut self, a: u32, b: u32) {
        let (a, b) = (self.first_of(a), self.first_of(b));
        self.0[a.max(b) as usize] = a.min(b);
    }

    /// A bit for each document that is not the first of its set.
    fn later_ones(&mut self) -> Vec<u64> {
        let mut bits = vec![0; self.0.len().div_ceil(64)];
        for document in 0..self.0.len() as u32 {
            if self.first_of(document) != document {
                bits[document as usize / 64] |= 1 << (document % 64);
            }
        }
        bits
    }
}
