//! Decoded images on disk, so that the second epoch reads what the first decoded.
//!
//! A decoded image takes some ten times the bytes of its JPEG, and reading it takes a tenth of the
//! time of decoding. Its pixels are those that decoding gives, so a sample does not depend on what
//! is kept.

use std::sync::atomic::{AtomicU64, Ordering};

use trainyard_store::{Cache, CacheOptions, Full, Kind};
use xxhash_rust::xxh3::xxh3_128;

use super::decode::Rgb;
use crate::error::{DataError, Result};

/// The entries. Another decoder, whose pixels may differ, needs another [`IDENTITY`].
const KIND: Kind = Kind { what: "decoded images", extension: "rgb", full: Full::Keeps };
const IDENTITY: &str = "decoded 1";

/// Images of fewer pixels are decoded as fast as a file is opened and read.
const PIXELS_MIN: usize = 64 * 64;

/// A cache of decoded images, and how often it helped.
#[derive(Debug)]
pub struct Decoded {
    cache: Cache,
    pixels_min: usize,
    found: AtomicU64,
    decoded: AtomicU64,
}

impl Decoded {
    /// # Errors
    /// The folder cannot be made or listed.
    pub fn open(options: &CacheOptions) -> Result<Self> {
        let cache = Cache::open(options, KIND).map_err(DataError::io("use", &options.folder))?;
        Ok(Self { cache, pixels_min: PIXELS_MIN, found: AtomicU64::new(0), decoded: AtomicU64::new(0) })
    }

    /// Keeps images of at least this many pixels. Fewer than usual are of use to tests.
    pub fn with_pixels_min(self, pixels_min: usize) -> Self {
        Self { pixels_min, ..self }
    }

    /// The share of images so far that were found; None before the first.
    pub fn found(&self) -> Option<f64> {
        let [found, decoded] = [&self.found, &self.decoded].map(|counter| counter.load(Ordering::Relaxed) as f64);
        (found + decoded > 0.0).then(|| found / (found + decoded))
    }

    /// Bytes in the cache, and true if an image found no room there.
    pub fn bytes(&self) -> (u64, bool) {
        (self.cache.bytes(), self.cache.is_full())
    }

    /// The image with this identity, kept or decoded.
    ///
    /// # Errors
    /// Those of `decode`.
    pub(super) fn get_or(&self, identity: u128, decode: impl FnOnce() -> Result<Rgb>) -> Result<Rgb> {
        let identity = format!("{IDENTITY} {identity:032x}");
        if let Some(image) = self.cache.get(&identity).and_then(unpacked) {
            self.found.fetch_add(1, Ordering::Relaxed);
            return Ok(image);
        }
        let image = decode()?;
        self.decoded.fetch_add(1, Ordering::Relaxed);
        if image.width * image.height >= self.pixels_min {
            let sides = [image.width, image.height].map(|side| (side as u32).to_le_bytes());
            self.cache.put(&identity, &[&image.data, sides.as_flattened()]);
        }
        Ok(image)
    }
}

/// The identity of an image by its encoded bytes.
pub(super) fn identity(bytes: &[u8]) -> u128 {
    xxh3_128(bytes)
}

/// The image of an entry: its pixels, then width and height.
fn unpacked(mut data: Vec<u8>) -> Option<Rgb> {
    let (_, sides) = data.split_last_chunk::<8>()?;
    let (width, height) = sides.split_at(4);
    let [width, height] = [width, height].map(|side| side.try_into().map_or(0, u32::from_le_bytes) as usize);
    data.truncate(data.len() - 8);
    (data.len() == width * height * 3).then_some(Rgb { width, height, data })
}
