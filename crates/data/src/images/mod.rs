//! Images of classes: sources, decoding, augmentation, and the rows that a Vision Transformer
//! trains on.
//!
//! | module | from | to |
//! |---|---|---|
//! | [`index`] | folders, tar shards, Parquet files | [`ImageIndex`]: place and class of an image |
//! | [`decode`] | JPEG, PNG or WebP | 8-bit RGB, upright, within a limit of pixels |
//! | [`decoded`] | decoded images | the same in the next epoch, from disk |
//! | [`transform`] | RGB of any size | a square, by a random crop or by the crop of evaluation |
//! | [`colour`], [`rand_augment`] | a square | the square in other colours, sheared, … |
//! | [`set`] | index, specification | [`MicroBatch`](crate::MicroBatch)es of normalised patches |
//!
//! Sample `i` is a pure function of (specification, `i`). The order is a permutation by (seed,
//! epoch), and an image's augmentation is a function of (seed, epoch, image). Neither depends on
//! workers, ranks or micro-batches.
//!
//! Images are read where they lie: nothing is unpacked, and a decoded copy is kept only where the
//! user says ([`decoded`]).

pub mod colour;
pub mod decode;
pub mod decoded;
mod draws;
pub mod index;
mod parquet;
mod patches;
pub mod rand_augment;
pub mod set;
pub mod transform;

use serde::{Deserialize, Serialize};

pub use decode::{Rgb, decode};
pub use decoded::Decoded;
pub use index::{ImageIndex, IndexOptions};
pub use set::{ImageEvaluation, ImageSet, ImageSpec};

/// The patches of a micro-batch of images.
#[derive(Debug, Clone, PartialEq)]
pub struct Pixels {
    /// Normalised patches, `[rows * patches, patch_len]`. The patches of an image come row by row;
    /// a patch is flattened as the weight of a convolution is: channel, row, column.
    pub patches: Vec<f32>,
    /// Numbers of a patch: channels x patch size x patch size.
    pub patch_len: usize,
    /// The second classes, if images are mixed.
    pub mixed: Option<Mixed>,
}

impl Pixels {
    /// Room for numbers of four bytes that its vectors take.
    pub(crate) fn elements(&self) -> usize {
        let mixed = self.mixed.as_ref().map_or(0, |mixed| mixed.second.capacity() + mixed.weight.capacity());
        self.patches.capacity() + mixed
    }
}

/// The classes of mixed images, by row.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixed {
    /// The other class.
    pub second: Vec<i32>,
    /// The weight of the first class, which is the target; the second has the rest of 1.
    pub weight: Vec<f32>,
}

/// The random changes to the images of a training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Augmentation {
    /// The random resized crop (Szegedy et al. 2015); without it an image is cropped as in
    /// evaluation.
    pub crop: Option<RandomCrop>,
    /// Probability of a horizontal flip.
    pub flip: f64,
    /// The brightness is multiplied by a factor from `1 - b` to `1 + b`; 0 leaves it.
    pub brightness: f64,
    /// The same for the contrast.
    pub contrast: f64,
    /// The same for the saturation.
    pub saturation: f64,
    /// The hue is turned by up to this part of a circle, at most 0.5; 0 leaves it.
    pub hue: f64,
    /// RandAugment (Cubuk et al. 2019).
    pub rand_augment: Option<RandAugment>,
    /// The parameter of the Beta distribution of mixup (Zhang et al. 2017); 0 for none.
    pub mixup: f64,
    /// The parameter of the Beta distribution of CutMix (Yun et al. 2019); 0 for none. With both, a
    /// sample takes one of the two with equal probability.
    pub cutmix: f64,
}

/// The range of random crops.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RandomCrop {
    /// Least and greatest part of the image's area.
    pub scale: (f64, f64),
    /// Least and greatest ratio of width to height.
    pub ratio: (f64, f64),
}

/// The two parameters of RandAugment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RandAugment {
    /// Number of operations for each image, the paper's N.
    pub operations: u32,
    /// Strength of the operations from 0 to 30, the paper's M.
    pub magnitude: u32,
}

impl Default for RandomCrop {
    /// 8 to 100 percent of the area, ratios from 3:4 to 4:3.
    fn default() -> Self {
        Self { scale: (0.08, 1.0), ratio: (3.0 / 4.0, 4.0 / 3.0) }
    }
}

impl Default for RandAugment {
    /// Two operations of magnitude 9.
    fn default() -> Self {
        Self { operations: 2, magnitude: 9 }
    }
}

impl Default for Augmentation {
    /// Random resized crops, and a flip of every second image.
    fn default() -> Self {
        Self { crop: Some(RandomCrop::default()), flip: 0.5, ..Self::none() }
    }
}

impl Augmentation {
    /// The images as in evaluation.
    pub fn none() -> Self {
        Self {
            crop: None,
            flip: 0.0,
            brightness: 0.0,
            contrast: 0.0,
            saturation: 0.0,
            hue: 0.0,
            rand_augment: None,
            mixup: 0.0,
            cutmix: 0.0,
        }
    }

    /// True if images are mixed in pairs.
    pub fn mixes(&self) -> bool {
        self.mixup > 0.0 || self.cutmix > 0.0
    }
}

/// Loader threads for images where the user names no number: the cores of the host that the
/// training leaves free, divided among the `ranks` on it, and at least one.
///
/// A rank on a GPU occupies one core, which issues its work. A rank on CPUs occupies the
/// `threads_per_rank` of its kernels.
pub fn default_workers(cores: usize, ranks: usize, threads_per_rank: usize) -> usize {
    let ranks = ranks.max(1);
    (cores.saturating_sub(ranks * threads_per_rank) / ranks).clamp(1, 64)
}
