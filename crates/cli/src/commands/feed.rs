//! `trainyard data bench` and `data warm`: how fast token files feed a training, and reading them
//! ahead.

use super::export::parse_size;
use crate::output::{count, print};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trainyard_base::format_bytes;
use trainyard_data::corpus::{CACHE_BYTES, CacheOptions};
use trainyard_data::{
    Dataset, DatasetSpec, IndexedTokens, Loader, LoaderConfig, PackingReport, Position, Sampling, Source, Transforms,
    packing_report,
};
use trainyard_engine::corpora::token_source;

/// Measure how fast token files feed a training: tokens a second of the loader alone.
///
/// Micro-batches are made on one core, as `train` makes them, and thrown away. Below stand the time
/// to the first batch after a resume, and what each method of sampling makes of the documents.
#[derive(clap::Args)]
pub struct BenchArgs {
    /// Token files: the OUT of `data prepare`, or a .bin or .idx. Images with `--images`.
    #[arg(required = true)]
    tokens: Vec<PathBuf>,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 1024)]
    sequence_length: usize,
    /// Sequences of a micro-batch.
    #[arg(long, default_value_t = 8)]
    micro_batch_size: usize,
    /// Measure images instead: folders with a sub-folder for each class, WebDataset .tar shards, or
    /// .parquet files.
    #[arg(long)]
    images: bool,
    #[command(flatten)]
    cache: ImageCacheArgs,
    /// Side of the square that images are cropped to, with `--images`.
    #[arg(long, default_value_t = 224, requires = "images")]
    image_size: usize,
    /// Side of a patch, with `--images`.
    #[arg(long, default_value_t = 16, requires = "images")]
    patch_size: usize,
    /// Threads that decode, with `--images`.
    #[arg(long, default_value_t = 1, requires = "images")]
    workers: usize,
    /// Seconds of measuring for each method.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Read token files into memory, so that the first steps of a training do not wait for the disk; or
/// decode images into a cache.
#[derive(clap::Args)]
pub struct WarmArgs {
    /// Token files: the OUT of `data prepare`, or a .bin or .idx. Images with `--images`.
    #[arg(required = true)]
    tokens: Vec<PathBuf>,
    /// Decode images into the cache, for a training with `images.cache`.
    #[arg(long, requires = "image_cache")]
    images: bool,
    #[command(flatten)]
    cache: ImageCacheArgs,
    /// Threads that decode, with `--images`. Unset: one for each core.
    #[arg(long, requires = "images")]
    workers: Option<usize>,
}

/// The cache of decoded images.
#[derive(clap::Args)]
struct ImageCacheArgs {
    /// The folder that keeps decoded images, with `--images`.
    #[arg(long, value_name = "DIR", requires = "images")]
    image_cache: Option<PathBuf>,
    /// The most bytes in it: "100GB". Unset: 16 GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "image_cache")]
    image_cache_size: Option<u64>,
}

impl ImageCacheArgs {
    fn options(&self) -> Option<CacheOptions> {
        let bytes_max = self.image_cache_size.unwrap_or(CACHE_BYTES);
        self.image_cache.clone().map(|folder| CacheOptions { folder, bytes_max })
    }
}

/// The figures of a method of sampling.
#[derive(Serialize)]
struct Figures {
    sampling: Sampling,
    tokens_per_second_per_core: f64,
    /// Time from opening the files to the first batch, at this step, in seconds.
    first_batch_s: Vec<(u64, f64)>,
    packing: PackingReport,
}

const METHODS: [(&str, Sampling); 4] = [
    ("packed", Sampling::Packed),
    ("in order", Sampling::InOrder),
    ("random", Sampling::Random),
    ("best_fit", Sampling::BestFit),
];

/// Steps at which the time to the first batch is measured.
const STEPS: [u64; 2] = [10, 10_000_000];

/// Runs `data bench`.
pub fn run_bench(args: &BenchArgs) -> Result<()> {
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        bail!("--seconds {} is not between 0 and 3600", args.seconds);
    }
    if args.images {
        return super::images::bench(&super::images::Bench {
            sources: &args.tokens,
            image_size: args.image_size,
            patch_size: args.patch_size,
            micro_batch_size: args.micro_batch_size,
            workers: args.workers,
            cache: args.cache.options(),
            seconds: args.seconds,
            json: args.json,
        });
    }
    let prefixes = prefixes(&args.tokens)?;
    let mut all = Vec::new();
    for (_, sampling) in METHODS {
        all.push(measure(args, &prefixes, sampling)?);
    }
    if args.json {
        return print(format_args!("{}\n", serde_json::to_string(&all)?));
    }
    print(format_args!(
        "{:<10} {:>15} {:>20} {:>24} {:>9} {:>9} {:>9}\n",
        "sampling", "tokens/s a core", "first batch, step 10", "first batch, step 10 M", "padded", "cut", "dropped"
    ))?;
    for ((name, _), figures) in METHODS.iter().zip(&all) {
        let documents = figures.packing.documents.max(1) as f64;
        let time = |at: usize| format!("{:.2} ms", figures.first_batch_s[at].1 * 1e3);
        let share = |part: f64| match figures.sampling {
            Sampling::Random => "-".to_owned(),
            _ => format!("{:.2} %", part * 100.0),
        };
        print(format_args!(
            "{name:<10} {:>13.1} M {:>20} {:>24} {:>9} {:>9} {:>9}\n",
            figures.tokens_per_second_per_core / 1e6,
            time(0),
            time(1),
            share(figures.packing.padding()),
            share(figures.packing.documents_cut as f64 / documents),
            share(figures.packing.documents_dropped as f64 / documents),
        ))?;
    }
    print(
        "padded: positions without tokens; cut: documents in several sequences; dropped: documents of fewer than 2 \
         tokens\n",
    )
}

fn prefixes(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    paths
        .iter()
        .map(|path| {
            token_source(path).with_context(|| {
                format!("{} names no token files: make some of text by `trainyard data prepare`", path.display())
            })
        })
        .collect()
}

fn measure(args: &BenchArgs, prefixes: &[PathBuf], sampling: Sampling) -> Result<Figures> {
    let corpora = prefixes.iter().map(|prefix| IndexedTokens::open(prefix)).collect::<Result<Vec<_>, _>>()?;
    let mut packing = PackingReport::default();
    let mut sources = Vec::new();
    for (corpus, prefix) in corpora.iter().zip(prefixes) {
        packing += packing_report(corpus, args.sequence_length, sampling);
        sources.push(Source { prefix: prefix.clone(), weight: corpus.tokens().max(1) as f64 });
    }
    let spec = DatasetSpec {
        sources,
        sequence_length: args.sequence_length,
        // All that a token can be: what a model would refuse is not the question here.
        vocab_size: i32::MAX as u32,
        respect_document_boundaries: true,
        sampling,
        seed: 0,
        transforms: Transforms::default(),
    };
    let config = LoaderConfig { workers: 0, ..LoaderConfig::new(args.micro_batch_size) };
    let first_batch_s = STEPS
        .iter()
        .map(|step| {
            // The best of some, because the machine does other things too.
            let mut best = f64::INFINITY;
            for _ in 0..5 {
                let begin = Instant::now();
                let dataset = Arc::new(Dataset::open(spec.clone())?);
                let position = Position { samples: step * args.micro_batch_size as u64 };
                Loader::new(dataset, config, position)?.next()?;
                best = best.min(begin.elapsed().as_secs_f64());
            }
            Ok((*step, best))
        })
        .collect::<Result<Vec<_>>>()?;
    let mut loader = Loader::new(Arc::new(Dataset::open(spec)?), config, Position::default())?;
    let (begin, limit) = (Instant::now(), Duration::from_secs_f64(args.seconds));
    let mut tokens = 0u64;
    while begin.elapsed() < limit {
        tokens += std::hint::black_box(loader.next()?).tokens.len() as u64;
    }
    let tokens_per_second_per_core = tokens as f64 / begin.elapsed().as_secs_f64();
    Ok(Figures { sampling, tokens_per_second_per_core, first_batch_s, packing })
}

/// Runs `data warm`.
pub fn run_warm(args: &WarmArgs) -> Result<()> {
    if let (true, Some(cache)) = (args.images, args.cache.options()) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        return super::images::warm(&args.tokens, &cache, args.workers.unwrap_or(cores).max(1));
    }
    for prefix in prefixes(&args.tokens)? {
        let corpus = IndexedTokens::open(&prefix)?;
        let begin = Instant::now();
        let bytes = corpus.read_ahead()?;
        let seconds = begin.elapsed().as_secs_f64();
        print(format_args!(
            "{}: {} tokens, {} read in {seconds:.2} s ({}/s)\n",
            prefix.display(),
            count(corpus.tokens()),
            format_bytes(bytes),
            format_bytes((bytes as f64 / seconds.max(1e-9)) as u64)
        ))?;
    }
    Ok(())
}
