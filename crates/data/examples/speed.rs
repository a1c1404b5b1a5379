//! Measures this crate on the Rust sources of this machine: training a tokenizer, tokenizing, and
//! the loader.
//!
//! `cargo run --release -p trainyard-data --example speed -- [MEGABYTES [FOLDER]]`; with a folder,
//! tokenizer and token files are left there, to be opened with other tools.

use std::sync::Arc;
use std::time::{Duration, Instant};

use trainyard_data::corpus::rust_sources;
use trainyard_data::{
    Dataset, DatasetSpec, Loader, LoaderConfig, Position, PrepareOptions, Sampling, Source, Tokenizer, Transforms,
    prepare,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let megabytes: u64 = std::env::args().nth(1).map_or(Ok(16), |a| a.parse())?;
    let begin = Instant::now();
    let corpus = rust_sources(megabytes << 20).ok_or("this machine has no cargo registry to read")?;
    println!(
        "{} files, {:.1} MB, listed in {:.0?}",
        corpus.files().len(),
        corpus.bytes() as f64 / 1e6,
        begin.elapsed()
    );

    let begin = Instant::now();
    let tokenizer = Tokenizer::train_bpe(corpus.texts(u64::MAX), 8192, |_| ())?;
    let rate = corpus.bytes() as f64 / 1e6 / begin.elapsed().as_secs_f64();
    println!("train_bpe 8192: {:.2?}, {rate:.1} MB/s", begin.elapsed());

    let kept = std::env::args().nth(2).map(std::path::PathBuf::from);
    let temporary = std::env::temp_dir().join(format!("trainyard-speed-{}", std::process::id()));
    let folder = kept.clone().unwrap_or(temporary);
    tokenizer.save_hugging_face(&folder, 1024)?;
    let mut prefix = folder.clone();
    for workers in [1, 2] {
        let options = PrepareOptions { workers, reuse: false, ..PrepareOptions::new(folder.join("data")) };
        let begin = Instant::now();
        let done = prepare(&corpus, &tokenizer, &options, |_| ())?;
        let seconds = begin.elapsed().as_secs_f64();
        let (bytes, tokens) = (done.sidecar.train.text_bytes as f64, done.sidecar.train.tokens as f64);
        println!(
            "prepare, {workers} workers: {seconds:.2} s, {:.1} MB/s, {:.2} Mtoken/s, {:.2} bytes/token",
            bytes / 1e6 / seconds,
            tokens / 1e6 / seconds,
            bytes / tokens
        );
        prefix = done.train;
    }
    let begin = Instant::now();
    let done = prepare(
        &corpus,
        &tokenizer,
        &PrepareOptions { workers: 2, ..PrepareOptions::new(folder.join("data")) },
        |_| (),
    )?;
    println!("prepare again: {:.1?}, reused: {}", begin.elapsed(), done.reused);

    for (rows, sequence_length, sampling) in
        [(4, 512, Sampling::Packed), (12, 64, Sampling::Packed), (12, 64, Sampling::Random)]
    {
        let dataset = Arc::new(Dataset::open(DatasetSpec {
            sources: vec![Source { prefix: prefix.clone(), weight: 1.0 }],
            sequence_length,
            vocab_size: tokenizer.vocab_size() as u32,
            respect_document_boundaries: true,
            sampling,
            seed: 1,
            transforms: Transforms::default(),
        })?);
        for workers in [0, 1] {
            let config = LoaderConfig { workers, ..LoaderConfig::new(rows) };
            let mut loader = Loader::new(Arc::clone(&dataset), config, Position::default())?;
            loader.next()?;
            // With a worker, the consumer pauses as a training step would, so that `waited` shows
            // the delay that a step sees.
            let batches = if workers == 0 { 20_000 } else { 500 };
            let before = loader.waited();
            let begin = Instant::now();
            for _ in 0..batches {
                std::hint::black_box(loader.next()?);
                if workers > 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            let whole = begin.elapsed().as_secs_f64() * 1e6 / f64::from(batches);
            let waited = (loader.waited() - before).as_secs_f64() * 1e6 / f64::from(batches);
            println!(
                "{rows} x {sequence_length} {sampling:?}, {workers} workers: waited {waited:.2} us of {whole:.1} us a batch"
            );
        }
    }
    if kept.is_none() {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}
