//! Micro-batches of images: sample `i` is a pure function of (specification, `i`).
//!
//! To the engine an image is a row of `1 + patches` positions. Position 0 is the class token, and
//! its target is the class; the others are the patches and have no target.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use super::decode::Rgb;
use super::draws::{Draws, ORDER, Purpose};
use super::index::ImageIndex;
use super::patches::{Cut, Mirror, Normalisation, paste};
use super::transform::{Resizing, random_window};
use super::{Augmentation, Mixed, Pixels, RandomCrop, colour, rand_augment};
use crate::corpus::OnInvalid;
use crate::dataset::{IGNORE, MicroBatch, Position};
use crate::error::{DataError, Result};
use crate::rng::Permutation;

/// The specification of a sequence of samples.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSpec {
    /// Side of the square that the model sees, in pixels; a multiple of `patch_size`.
    pub image_size: usize,
    /// Side of a patch, in pixels.
    pub patch_size: usize,
    /// Mean of each channel, of values from 0 to 1: three for RGB, one for greyscale.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel.
    pub std: Vec<f32>,
    /// The shorter side of an image in evaluation, before its central square is cut out.
    pub resize: usize,
    /// Random changes to the images.
    pub augmentation: Augmentation,
    /// Seed of the order and of the changes.
    pub seed: u64,
    /// The fate of images that cannot be decoded. With [`OnInvalid::Skip`] the next image of the
    /// epoch's order takes the place of one in training; in evaluation its row has no target.
    pub on_invalid: OnInvalid,
}

impl ImageSpec {
    /// RGB images with ImageNet's mean and deviation, the default augmentation, and the central
    /// 7/8 in evaluation.
    pub fn new(image_size: usize, patch_size: usize) -> Self {
        Self {
            image_size,
            patch_size,
            mean: vec![0.485, 0.456, 0.406],
            std: vec![0.229, 0.224, 0.225],
            resize: image_size * 256 / 224,
            augmentation: Augmentation::default(),
            seed: 0,
            on_invalid: OnInvalid::Fail,
        }
    }

    /// Channels: 1 or 3.
    pub fn channels(&self) -> usize {
        self.mean.len()
    }

    /// Patches of an image.
    pub fn patches(&self) -> usize {
        (self.image_size / self.patch_size).pow(2)
    }

    /// Positions of a row: the class token and the patches.
    pub fn sequence_length(&self) -> usize {
        1 + self.patches()
    }

    /// Numbers of a patch.
    pub fn patch_len(&self) -> usize {
        self.channels() * self.patch_size * self.patch_size
    }

    /// # Errors
    /// A setting is out of its range.
    pub fn check(&self) -> Result<()> {
        let refuse = |name, what: String, fix: &str| Err(DataError::setting(name, what, fix));
        if !(1..=1 << 14).contains(&self.image_size) {
            return refuse("image_size", format!("is {}", self.image_size), "take a side from 1 to 16,384 pixels");
        }
        if self.patch_size == 0 || !self.image_size.is_multiple_of(self.patch_size) {
            let what = format!("is {}, which does not divide the image size {}", self.patch_size, self.image_size);
            return refuse("patch_size", what, "take a divisor of it");
        }
        if ![1, 3].contains(&self.mean.len()) || self.mean.len() != self.std.len() {
            let what = format!("{} means and {} deviations", self.mean.len(), self.std.len());
            return refuse("mean", what, "give three of each for RGB, or one for greyscale");
        }
        if self.std.iter().any(|std| !(*std > 0.0 && std.is_finite())) || self.mean.iter().any(|m| !m.is_finite()) {
            return refuse(
                "std",
                format!("mean {:?}, deviation {:?}", self.mean, self.std),
                "take positive deviations",
            );
        }
        if !(1..=1 << 14).contains(&self.resize) {
            return refuse("resize", format!("is {}", self.resize), "take a side from 1 to 16,384 pixels");
        }
        self.augmentation.check()
    }
}

impl Augmentation {
    /// # Errors
    /// A setting is out of its range.
    pub fn check(&self) -> Result<()> {
        let refuse = |name, value: String, fix: &str| Err(DataError::setting(name, format!("is {value}"), fix));
        if let Some(RandomCrop { scale, ratio }) = self.crop {
            if !(scale.0 > 0.0 && scale.0 <= scale.1 && scale.1 <= 1.0) {
                return refuse(
                    "crop scale",
                    format!("{scale:?}"),
                    "take two parts of the area, 0 < least <= greatest <= 1",
                );
            }
            if !(ratio.0 > 0.0 && ratio.0 <= ratio.1 && ratio.1.is_finite()) {
                return refuse("crop ratio", format!("{ratio:?}"), "take two positive ratios in order");
            }
        }
        if !(0.0..=1.0).contains(&self.flip) {
            return refuse("flip", self.flip.to_string(), "take a probability from 0 to 1");
        }
        for (name, value) in
            [("brightness", self.brightness), ("contrast", self.contrast), ("saturation", self.saturation)]
        {
            if !(0.0..=1.0).contains(&value) {
                return refuse(name, value.to_string(), "take a strength from 0 to 1");
            }
        }
        if !(0.0..=0.5).contains(&self.hue) {
            return refuse("hue", self.hue.to_string(), "take a part of a circle from 0 to 0.5");
        }
        if let Some(rand_augment) = self.rand_augment {
            if rand_augment.magnitude > rand_augment::MAGNITUDE_MAX {
                return refuse("RandAugment's magnitude", rand_augment.magnitude.to_string(), "take one from 0 to 30");
            }
            if rand_augment.operations > 14 {
                return refuse("RandAugment's operations", rand_augment.operations.to_string(), "take at most 14");
            }
        }
        for (name, alpha) in [("mixup", self.mixup), ("cutmix", self.cutmix)] {
            if !(0.0..=1000.0).contains(&alpha) {
                return refuse(name, alpha.to_string(), "take a positive parameter of the Beta distribution, or 0");
            }
        }
        Ok(())
    }
}

/// The images of a training and the rule that draws samples from them.
#[derive(Debug)]
pub struct ImageSet {
    index: ImageIndex,
    spec: ImageSpec,
    normalisation: Normalisation,
}

impl ImageSet {
    /// # Errors
    /// The specification is out of range, or there is no image.
    pub fn new(index: ImageIndex, spec: ImageSpec) -> Result<Self> {
        spec.check()?;
        if index.is_empty() {
            return Err(DataError::TooLittle {
                what: "there is no image to train on".into(),
                fix: "give more images, or a smaller validation fraction".into(),
            });
        }
        Ok(Self { normalisation: Normalisation::new(&spec.mean, &spec.std), index, spec })
    }

    /// The images.
    pub fn index(&self) -> &ImageIndex {
        &self.index
    }

    /// The specification.
    pub fn spec(&self) -> &ImageSpec {
        &self.spec
    }

    /// Images of an epoch.
    pub fn samples_per_epoch(&self) -> u64 {
        self.index.len() as u64
    }

    /// The number of passes over the images at `position`, with fractions.
    pub fn passes(&self, position: Position) -> f64 {
        position.samples as f64 / self.samples_per_epoch() as f64
    }

    /// Identifies the samples and their order: equal fingerprints mean equal samples.
    pub fn fingerprint(&self) -> String {
        let mut hash = Xxh3::new();
        hash.update(format!("images {:?}", self.spec).as_bytes());
        self.index.fingerprint_into(&mut hash);
        format!("{:016x}", hash.digest())
    }

    /// Samples `first..first + rows` as one micro-batch of `rows` rows.
    ///
    /// # Errors
    /// An image cannot be read, or, unless such images are skipped, decoded.
    pub fn micro_batch(&self, first: u64, rows: usize) -> Result<MicroBatch> {
        let spec = &self.spec;
        let mut batch = empty_rows(rows, spec);
        let mut resizing = Resizing::default();
        let mut pixels = Vec::with_capacity(rows * spec.patches() * spec.patch_len());
        let mut mixed = spec
            .augmentation
            .mixes()
            .then(|| Mixed { second: Vec::with_capacity(rows), weight: Vec::with_capacity(rows) });
        let last = first + rows as u64;
        let mut unmixed: Vec<(u64, i32)> = Vec::with_capacity(rows);
        for sample in first..last {
            let class = self.sample_into(sample, &mut resizing, &mut pixels)?;
            unmixed.push((sample, class));
            batch.targets[(sample - first) as usize * spec.sequence_length()] = class;
        }
        if let Some(mixed) = &mut mixed {
            self.mix(&unmixed, &mut pixels, mixed, &mut resizing)?;
        }
        batch.pixels = Some(Pixels { patches: pixels, patch_len: spec.patch_len(), mixed });
        Ok(batch)
    }

    /// Seconds that one thread takes to make a sample, measured on samples that are spread over the
    /// set, until there are enough of them or `limit` has passed. Images that cannot be decoded are
    /// left out; None if there is no other.
    pub fn price(&self, limit: Duration) -> Option<f64> {
        /// Samples beyond which the mean does not change much.
        const SAMPLES: u64 = 64;
        let images = self.samples_per_epoch();
        let mut resizing = Resizing::default();
        let mut patches = Vec::new();
        let begin = Instant::now();
        let (mut made, mut busy) = (0u64, Duration::ZERO);
        for k in 0..SAMPLES.min(images) {
            let from = Instant::now();
            patches.clear();
            if self.sample_into(k * images / SAMPLES.min(images), &mut resizing, &mut patches).is_ok() {
                busy += from.elapsed();
                made += 1;
            }
            if begin.elapsed() > limit {
                break;
            }
        }
        (made > 0).then(|| busy.as_secs_f64() / made as f64)
    }

    /// Mixes each sample with its partner, which is in the batch or is decoded too.
    fn mix(&self, rows: &[(u64, i32)], pixels: &mut [f32], mixed: &mut Mixed, resizing: &mut Resizing) -> Result<()> {
        let spec = &self.spec;
        let of_image = spec.patches() * spec.patch_len();
        let clean = pixels.to_vec();
        let mut decoded = Vec::new();
        for (row, (sample, _)) in rows.iter().enumerate() {
            let partner = self.partner(*sample);
            let (other, class) = match rows.iter().position(|(sample, _)| *sample == partner) {
                Some(at) => (&clean[at * of_image..(at + 1) * of_image], rows[at].1),
                None => {
                    decoded.clear();
                    let class = self.sample_into(partner, resizing, &mut decoded)?;
                    (&decoded[..], class)
                }
            };
            let image = &mut pixels[row * of_image..(row + 1) * of_image];
            mixed.second.push(class);
            mixed.weight.push(self.mix_image(*sample, image, other));
        }
        Ok(())
    }

    /// The sample that `sample` is mixed with: its neighbour in the epoch's order, in pairs. The
    /// order is random, and a micro-batch that holds whole pairs decodes nothing twice.
    fn partner(&self, sample: u64) -> u64 {
        let images = self.samples_per_epoch();
        let (epoch, place) = (sample / images, sample % images);
        let partner = if place ^ 1 < images { place ^ 1 } else { place.saturating_sub(1) };
        epoch * images + partner
    }

    /// Mixes `other` into `image`, and returns the weight of `image`.
    fn mix_image(&self, sample: u64, image: &mut [f32], other: &[f32]) -> f32 {
        let (spec, augmentation) = (&self.spec, &self.spec.augmentation);
        let mut draws = self.draws(sample, Purpose::Mix);
        let cuts = match (augmentation.mixup > 0.0, augmentation.cutmix > 0.0) {
            (true, true) => draws.chance(0.5),
            (_, cuts) => cuts,
        };
        if !cuts {
            let weight = draws.beta(augmentation.mixup) as f32;
            image.iter_mut().zip(other).for_each(|(value, other)| *value = weight * *value + (1.0 - weight) * other);
            return weight;
        }
        // The box has (1 - weight) of the area, and its centre is uniform. The weight counts the
        // pixels that lie inside the image.
        let size = spec.image_size;
        let half = 0.5 * (1.0 - draws.beta(augmentation.cutmix)).sqrt() * size as f64;
        let (x, y) = (draws.below(size as u32), draws.below(size as u32));
        let low = |at: u32| (f64::from(at) - half).max(0.0) as usize;
        let high = |at: u32| ((f64::from(at) + half) as usize).min(size);
        let cut = Cut { left: low(x), top: low(y), right: high(x), bottom: high(y) };
        paste(cut, size, spec.patch_size, spec.channels(), image, other);
        1.0 - ((cut.right - cut.left) * (cut.bottom - cut.top)) as f32 / (size * size) as f32
    }

    /// Adds the patches of a sample, before mixing, and returns its class.
    fn sample_into(&self, sample: u64, resizing: &mut Resizing, patches: &mut Vec<f32>) -> Result<i32> {
        let images = self.samples_per_epoch();
        let (epoch, place) = (sample / images, sample % images);
        let order = Permutation::new(images, self.spec.seed, ORDER, epoch);
        for skipped in 0..images {
            let i = order.apply((place + skipped) % images) as usize;
            match (self.index.decoded(i), self.spec.on_invalid) {
                (Ok(image), _) => {
                    self.augmented_into(sample, &image, resizing, patches);
                    return Ok(self.index.class(i) as i32);
                }
                (Err(error @ DataError::Input { .. }), OnInvalid::Skip) => say_skipped(&error),
                (Err(error), _) => return Err(error),
            }
        }
        Err(DataError::TooLittle {
            what: format!("none of the {images} images can be decoded"),
            fix: "check the files".into(),
        })
    }

    /// The random numbers of a sample, keyed by (seed, epoch, image).
    fn draws(&self, sample: u64, purpose: Purpose) -> Draws {
        let images = self.samples_per_epoch();
        let (epoch, place) = (sample / images, sample % images);
        let image = Permutation::new(images, self.spec.seed, ORDER, epoch).apply(place);
        Draws::new(self.spec.seed, epoch, image, purpose)
    }

    fn augmented_into(&self, sample: u64, image: &Rgb, resizing: &mut Resizing, patches: &mut Vec<f32>) {
        let (spec, augmentation) = (&self.spec, &self.spec.augmentation);
        let size = spec.image_size;
        let mut square = match &augmentation.crop {
            Some(crop) => {
                let window = random_window(crop, image.width, image.height, &mut self.draws(sample, Purpose::Crop));
                resizing.resize(image, window, size, size)
            }
            None => resizing.for_evaluation(image, spec.resize, size),
        };
        let mut mirror = self.draws(sample, Purpose::Flip).chance(augmentation.flip);
        if let Some(rand_augment) = augmentation.rand_augment {
            // Shears and rotations must see the image as it is mirrored.
            if std::mem::take(&mut mirror) {
                square.data.chunks_exact_mut(size * 3).for_each(mirror_row);
            }
            rand_augment::apply(&rand_augment, &mut square, &mut self.draws(sample, Purpose::RandAugment));
        }
        colour::jitter(augmentation, &mut square, &mut self.draws(sample, Purpose::Colour));
        let mirror = if mirror { Mirror::Yes } else { Mirror::No };
        self.normalisation.patches_into(&square, spec.patch_size, mirror, patches);
    }
}

/// Warns of an image that is skipped. A set with many of them would bury everything else.
fn say_skipped(error: &DataError) {
    /// Warnings of a process.
    const NAMED_MAX: u32 = 20;
    static NAMED: AtomicU32 = AtomicU32::new(0);
    match NAMED.fetch_add(1, Ordering::Relaxed) {
        0..NAMED_MAX => tracing::warn!("skipped: {error}"),
        NAMED_MAX => tracing::warn!("more images were skipped, which are not named"),
        _ => {}
    }
}

fn mirror_row(row: &mut [u8]) {
    let pixels = row.len() / 3;
    for x in 0..pixels / 2 {
        for channel in 0..3 {
            row.swap(x * 3 + channel, (pixels - 1 - x) * 3 + channel);
        }
    }
}

/// A batch of image rows without classes and pixels.
fn empty_rows(rows: usize, spec: &ImageSpec) -> MicroBatch {
    let length = spec.sequence_length();
    let mut batch = MicroBatch::with_capacity(rows, length);
    batch.rows = rows;
    batch.tokens.resize(rows * length, 0);
    batch.targets.resize(rows * length, IGNORE);
    for row in 1..=rows {
        batch.positions.extend(0..length as i32);
        batch.cu_seqlens.push((row * length) as i32);
    }
    batch
}

/// Every image once, in the order of the index and as evaluation sees it.
#[derive(Debug)]
pub struct ImageEvaluation<'i> {
    index: &'i ImageIndex,
    spec: ImageSpec,
    normalisation: Normalisation,
    rows: usize,
    next: usize,
    has_failed: bool,
}

impl<'i> ImageEvaluation<'i> {
    /// Batches of `rows` images, the last of fewer.
    ///
    /// # Errors
    /// The specification is out of range, or there is no image.
    pub fn new(index: &'i ImageIndex, spec: &ImageSpec, rows: usize) -> Result<Self> {
        spec.check()?;
        if rows == 0 || index.is_empty() {
            return Err(DataError::TooLittle {
                what: format!("{} images in batches of {rows}", index.len()),
                fix: "give at least one image, and batches of at least one row".into(),
            });
        }
        let normalisation = Normalisation::new(&spec.mean, &spec.std);
        Ok(Self { index, spec: spec.clone(), normalisation, rows, next: 0, has_failed: false })
    }

    /// Number of batches.
    pub fn batches(&self) -> usize {
        self.index.len().div_ceil(self.rows)
    }

    /// Leaves the next batch out, without decoding it. Returns its images; 0 at the end.
    pub fn pass_over(&mut self) -> usize {
        let end = self.index.len().min(self.next + self.rows);
        end - std::mem::replace(&mut self.next, end)
    }

    fn batch(&mut self) -> Result<MicroBatch> {
        let spec = &self.spec;
        let images = self.next..self.index.len().min(self.next + self.rows);
        let mut batch = empty_rows(images.len(), spec);
        let mut resizing = Resizing::default();
        let of_image = spec.patches() * spec.patch_len();
        let mut patches = Vec::with_capacity(images.len() * of_image);
        for (row, i) in images.clone().enumerate() {
            match (self.index.decoded(i), spec.on_invalid) {
                (Ok(image), _) => {
                    let square = resizing.for_evaluation(&image, spec.resize, spec.image_size);
                    self.normalisation.patches_into(&square, spec.patch_size, Mirror::No, &mut patches);
                    batch.targets[row * spec.sequence_length()] = self.index.class(i) as i32;
                }
                (Err(error @ DataError::Input { .. }), OnInvalid::Skip) => {
                    say_skipped(&error);
                    patches.resize(patches.len() + of_image, 0.0);
                }
                (Err(error), _) => return Err(error),
            }
        }
        self.next = images.end;
        batch.pixels = Some(Pixels { patches, patch_len: spec.patch_len(), mixed: None });
        Ok(batch)
    }
}

impl Iterator for ImageEvaluation<'_> {
    type Item = Result<MicroBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed || self.next >= self.index.len() {
            return None;
        }
        let batch = self.batch();
        self.has_failed = batch.is_err();
        Some(batch)
    }
}
