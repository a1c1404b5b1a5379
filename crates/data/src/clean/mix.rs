//! Mixes corpora into one by their shares of the bytes.

use std::path::PathBuf;

use serde::Serialize;

use super::output::{Output, Report};
use crate::corpus::{Corpus, Skipped};
use crate::dataset::check_weights;
use crate::error::{DataError, Result};

/// The settings of a mixture.
#[derive(Debug, Clone, PartialEq)]
pub struct MixOptions {
    /// Prefix of the files written.
    pub out: PathBuf,
    /// Share of each corpus, relative to the others.
    pub weights: Vec<f64>,
    /// Bytes of text to write. Unset: until a corpus ends.
    pub bytes: Option<u64>,
}

/// Counts of a mixture.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MixReport {
    /// Counts of all corpora together.
    pub report: Report,
    /// Each corpus, in order.
    pub shares: Vec<MixShare>,
}

/// The part of a corpus in a mixture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct MixShare {
    /// Documents written.
    pub documents: u64,
    /// Bytes of text written.
    pub bytes: u64,
    /// Times that the corpus was begun.
    pub passes: u64,
}

/// Writes documents of `corpora` in turn: each time of the one whose bytes are furthest behind its
/// share. A corpus that ends is begun again if `options.bytes` asks for more.
pub fn mix(corpora: &[Corpus], options: &MixOptions) -> Result<MixReport> {
    if corpora.is_empty() || corpora.len() != options.weights.len() {
        let what = format!("{} weights for {} corpora", options.weights.len(), corpora.len());
        return Err(DataError::setting("weight", what, "give each corpus a weight"));
    }
    check_weights(&options.weights)?;
    if options.bytes == Some(0) {
        return Err(DataError::setting("bytes", "is 0", "ask for some text"));
    }
    let mut output = Output::create(&options.out, &corpora.iter().collect::<Vec<_>>())?;
    let mut readers: Vec<_> = corpora.iter().map(Corpus::documents).collect();
    let mut shares = vec![MixShare { passes: 1, ..MixShare::default() }; corpora.len()];
    let mut skipped = Skipped::default();
    while options.bytes.is_none_or(|bytes| output.report.bytes < bytes) {
        // The bytes of a corpus over its weight; the smallest is the furthest behind.
        let level = |c: usize| shares[c].bytes as f64 / options.weights[c];
        let c = (0..corpora.len()).min_by(|&a, &b| level(a).total_cmp(&level(b))).unwrap_or(0);
        let Some(document) = readers[c].next().transpose()? else {
            if options.bytes.is_none() {
                break;
            }
            if shares[c].documents == 0 {
                let what = format!("corpus {c} has no usable document");
                return Err(DataError::TooLittle { what, fix: "give files that have text".into() });
            }
            skipped += readers[c].skipped();
            readers[c] = corpora[c].documents();
            shares[c].passes += 1;
            continue;
        };
        shares[c].documents += 1;
        shares[c].bytes += document.text.len() as u64;
        let line = output.line(&corpora[c], &document);
        output.write(&line)?;
    }
    readers.iter().for_each(|reader| skipped += reader.skipped());
    Ok(MixReport { report: output.finish(skipped)?, shares })
}
