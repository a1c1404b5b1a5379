//! `trainyard data inspect --images` and `data bench --images`: the classes and sizes of a set of
//! images, and how fast the loader decodes and augments it; `data warm --images`.

use crate::output::{count, note, print};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trainyard_base::format_bytes;
use trainyard_data::corpus::CacheOptions;
use trainyard_data::images::Decoded;
use trainyard_data::{DataError, ImageIndex, ImageSet, ImageSpec, IndexOptions, Loader, LoaderConfig, Position};

/// Images that are decoded for the sizes.
const DECODED: usize = 256;
/// Classes that are printed.
const CLASSES_SHOWN: usize = 20;

#[derive(Serialize)]
struct Inspection {
    images: usize,
    bytes: u64,
    classes: Vec<Class>,
    /// Images that were decoded, evenly spread over the set.
    decoded: usize,
    /// Least and greatest width of them; None if there is none.
    width: Option<(usize, usize)>,
    height: Option<(usize, usize)>,
    /// The images among them that cannot be decoded, with the reason.
    invalid: Vec<String>,
}

#[derive(Serialize)]
struct Class {
    name: String,
    images: u64,
}

/// Runs `data inspect --images`.
pub fn inspect(path: &Path, json: bool) -> Result<()> {
    let index = open(&[path.to_path_buf()])?;
    let step = index.len().div_ceil(DECODED);
    let (mut sizes, mut invalid) = (Vec::new(), Vec::new());
    for i in (0..index.len()).step_by(step) {
        match index.decoded(i) {
            Ok(image) => sizes.push((image.width, image.height)),
            Err(error @ DataError::Input { .. }) => invalid.push(error.to_string()),
            Err(error) => return Err(error.into()),
        }
    }
    let range = |of: fn(&(usize, usize)) -> usize| Some((sizes.iter().map(of).min()?, sizes.iter().map(of).max()?));
    let classes = index.classes().iter().zip(index.counts());
    let inspection = Inspection {
        images: index.len(),
        bytes: index.bytes(),
        classes: classes.map(|(name, images)| Class { name: name.clone(), images }).collect(),
        decoded: sizes.len() + invalid.len(),
        width: range(|size| size.0),
        height: range(|size| size.1),
        invalid,
    };
    if json {
        return print(format_args!("{}\n", serde_json::to_string(&inspection)?));
    }
    let Inspection { images, bytes, classes, decoded, width, height, invalid } = inspection;
    print(format_args!(
        "images       {} in {} classes, {}\n",
        count(images as u64),
        count(classes.len() as u64),
        format_bytes(bytes)
    ))?;
    if let (Some(width), Some(height)) = (width, height) {
        print(format_args!(
            "sizes        width {} to {}, height {} to {} pixels (of {decoded} decoded)\n",
            width.0, width.1, height.0, height.1
        ))?;
    }
    for class in classes.iter().take(CLASSES_SHOWN) {
        print(format_args!("class        {}: {} images\n", class.name.escape_debug(), count(class.images)))?;
    }
    if classes.len() > CLASSES_SHOWN {
        print(format_args!("             and {} more classes\n", classes.len() - CLASSES_SHOWN))?;
    }
    invalid.iter().try_for_each(|error| print(format_args!("invalid      {error}\n")))
}

/// The loader that `data bench --images` measures.
pub struct Bench<'a> {
    pub sources: &'a [PathBuf],
    pub image_size: usize,
    pub patch_size: usize,
    pub micro_batch_size: usize,
    pub workers: usize,
    pub cache: Option<CacheOptions>,
    pub seconds: f64,
    pub json: bool,
}

#[derive(Serialize)]
struct Figures {
    images: usize,
    workers: usize,
    images_per_second: f64,
    images_per_second_per_core: f64,
    /// The share of images that were read decoded.
    cached: Option<f64>,
}

/// Runs `data bench --images`.
pub fn bench(args: &Bench<'_>) -> Result<()> {
    let decoded = args.cache.as_ref().map(Decoded::open).transpose()?.map(Arc::new);
    let mut index = open(args.sources)?;
    if let Some(decoded) = &decoded {
        index = index.keeping(Arc::clone(decoded));
    }
    let images = index.len();
    let set = Arc::new(ImageSet::new(index, ImageSpec::new(args.image_size, args.patch_size))?);
    let config =
        LoaderConfig { workers: args.workers, prefetch: 2 * args.workers, ..LoaderConfig::new(args.micro_batch_size) };
    let mut loader = Loader::new(set, config, Position::default())?;
    // The queues fill before the clock starts, and are as full when it stops.
    for _ in 0..=config.prefetch {
        loader.next()?;
    }
    let (begin, limit) = (Instant::now(), Duration::from_secs_f64(args.seconds));
    let mut rows = 0;
    while begin.elapsed() < limit {
        rows += std::hint::black_box(loader.next()?).rows;
    }
    let images_per_second = rows as f64 / begin.elapsed().as_secs_f64();
    let figures = Figures {
        images,
        workers: args.workers,
        images_per_second,
        images_per_second_per_core: images_per_second / args.workers.max(1) as f64,
        cached: decoded.and_then(|decoded| decoded.found()),
    };
    if args.json {
        return print(format_args!("{}\n", serde_json::to_string(&figures)?));
    }
    let cached = figures.cached.map_or(String::new(), |share| format!(", {:.1} % from the cache", 1e2 * share));
    print(format_args!(
        "{} images to {} x {} pixels: {:.1} images/s by {} threads, {:.1} a core{cached}\n",
        count(images as u64),
        args.image_size,
        args.image_size,
        figures.images_per_second,
        args.workers.max(1),
        figures.images_per_second_per_core,
    ))
}

/// Runs `data warm --images`.
pub fn warm(sources: &[PathBuf], cache: &CacheOptions, workers: usize) -> Result<()> {
    let decoded = Arc::new(Decoded::open(cache)?);
    let index = open(sources)?.keeping(Arc::clone(&decoded));
    let begin = Instant::now();
    let next = AtomicUsize::new(0);
    let work = || -> Result<usize> {
        let mut invalid = 0;
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= index.len() {
                return Ok(invalid);
            }
            match index.decoded(i) {
                Ok(_) => {}
                Err(error @ DataError::Input { .. }) => {
                    note(&format!("{error}"));
                    invalid += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
    };
    let invalid: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let results =
            threads.into_iter().map(|thread| thread.join().map_err(|_| DataError::Worker { doing: "decoding" })?);
        results.sum::<Result<usize>>()
    })?;
    let seconds = begin.elapsed().as_secs_f64();
    let found = 1e2 * decoded.found().unwrap_or(0.0);
    let (bytes, is_full) = decoded.bytes();
    print(format_args!(
        "{} images in {seconds:.2} s, {found:.1} % of them decoded before; {} in {}{}\n",
        count(index.len() as u64),
        format_bytes(bytes),
        cache.folder.display(),
        match is_full {
            true => ", which is full: the other images are decoded every time",
            false => "",
        }
    ))?;
    if invalid > 0 {
        bail!("{invalid} images cannot be decoded: remove them, or train with images.skip_invalid = true");
    }
    Ok(())
}

fn open(sources: &[PathBuf]) -> Result<ImageIndex> {
    ImageIndex::open(sources, &IndexOptions::default()).context("cannot read the images")
}
