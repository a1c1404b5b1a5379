//! `trainyard data inspect` of text: counts, and one document. For the documents that `data dedup`
//! and `data filter` dropped, the reason too.

use super::inspect::escaped;
use super::objects::note_traffic;
use crate::output::{count, print};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::path::Path;
use trainyard_base::format_bytes;
use trainyard_data::corpus::{DROPPED_EXTENSION, StoreOptions, printable};
use trainyard_data::{Corpus, CorpusOptions};

/// The corpus, and how much of it to show.
pub struct Args<'a> {
    pub path: &'a Path,
    pub sample: u64,
    pub text_field: &'a str,
    pub json: bool,
    pub store: StoreOptions,
}

/// The output of the command.
#[derive(Serialize)]
struct Inspection {
    files: usize,
    documents: u64,
    text_bytes: u64,
    longest_bytes: u64,
    sample: Sample,
}

#[derive(Serialize)]
struct Sample {
    number: u64,
    file: String,
    /// Its line or record, counted from 1; 0 for a file that is one document.
    line: u64,
    text: String,
    /// The reason why it was dropped; None for documents that were not.
    reason: Option<String>,
}

/// Runs the command.
pub fn run(args: &Args<'_>) -> Result<()> {
    let inspection = inspect(args).with_context(|| format!("cannot inspect {}", printable(args.path)))?;
    if args.json {
        return print(format_args!("{}\n", serde_json::to_string(&inspection)?));
    }
    let Inspection { files, documents, text_bytes, longest_bytes, sample } = inspection;
    print(format_args!(
        "text         {files} files: {} documents, {}\n             bytes a document: mean {:.0}, longest {}\n\n",
        count(documents),
        format_bytes(text_bytes),
        text_bytes as f64 / documents.max(1) as f64,
        count(longest_bytes)
    ))?;
    let place = if sample.line > 0 { format!(":{}", sample.line) } else { String::new() };
    print(format_args!("document {}: {}{place}\n", sample.number, sample.file))?;
    if let Some(reason) = sample.reason {
        print(format_args!("dropped: {reason}\n"))?;
    }
    const SHOWN: usize = 2000;
    let end = sample.text.char_indices().nth(SHOWN).map_or(sample.text.len(), |(at, _)| at);
    let rest = if end < sample.text.len() { "..." } else { "" };
    print(format_args!("{}{rest}\n", escaped(&sample.text[..end]).trim_end()))
}

fn inspect(args: &Args<'_>) -> Result<Inspection> {
    let open = |field: &str| {
        let (field, store) = (field.to_owned(), args.store.clone());
        Corpus::open(&[args.path], CorpusOptions { field, store, ..CorpusOptions::default() })
    };
    let corpus = open(args.text_field)?;
    let (mut documents, mut text_bytes, mut longest_bytes) = (0, 0, 0);
    let mut sample = None;
    for document in corpus.documents() {
        let document = document?;
        let bytes = document.text.len() as u64;
        (text_bytes, longest_bytes) = (text_bytes + bytes, bytes.max(longest_bytes));
        if documents == args.sample {
            sample = Some(document);
        }
        documents += 1;
    }
    let Some(document) = sample else {
        bail!("--sample {} does not exist: there are {documents} documents, from 0", args.sample);
    };
    let reason = match args.path.extension().is_some_and(|extension| extension == DROPPED_EXTENSION) {
        true => open("reason")?.documents().nth(args.sample as usize).transpose()?.map(|record| record.text),
        false => None,
    };
    note_traffic([&corpus]);
    let file = corpus.files()[document.file].path.display().to_string();
    let sample = Sample { number: args.sample, file, line: document.line, text: document.text, reason };
    Ok(Inspection { files: corpus.files().len(), documents, text_bytes, longest_bytes, sample })
}
